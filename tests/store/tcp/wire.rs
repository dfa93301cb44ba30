//! A connection without any knowledge of the protocol, and the bytes that torch 2.15 was seen to exchange.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use super::LONG;

/// A peer that sends and expects bytes.
pub struct Raw(pub TcpStream);

pub const VALIDATE: &str = "00cef7853c";

impl Raw {
    /// Connects, and says nothing.
    pub fn connect(port: u16) -> Self {
        Raw::new(TcpStream::connect(("localhost", port)).expect("connect"))
    }

    pub fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_nodelay(true).unwrap();
        Raw(stream)
    }

    /// Connects, and opens the connection as torch does.
    pub fn open(port: u16) -> Self {
        let mut raw = Raw::connect(port);
        raw.send(VALIDATE);
        raw
    }

    pub fn send(&mut self, hex: &str) {
        self.0.write_all(&unhex(hex)).expect("send");
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("send");
    }

    /// The next bytes.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut got = vec![0; len];
        self.0.read_exact(&mut got).unwrap_or_else(|e| panic!("{len} bytes: {e}"));
        got
    }

    /// Expects exactly these bytes next.
    pub fn expect(&mut self, hex: &str, what: &str) {
        let expected = unhex(hex);
        let mut got = vec![0; expected.len()];
        self.0.read_exact(&mut got).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(got, expected, "{what}");
    }

    /// Expects a reply to a PING next, and so nothing before it.
    pub fn in_step(&mut self, what: &str) {
        self.send("0d44332211");
        self.expect("44332211", what);
    }

    /// Expects the end of the connection next.
    pub fn expect_end(&mut self, what: &str) {
        let mut byte = [0];
        match self.0.read(&mut byte) {
            Ok(0) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{what}: {other:?}, {byte:?}"),
        }
    }
}

pub fn unhex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|i| u8::from_str_radix(&digits[i..i + 2], 16).unwrap()).collect()
}

/// A request with one key and what follows it.
pub fn keyed(query: u8, key: &[u8], rest: &[u8]) -> Vec<u8> {
    [&[query][..], &(key.len() as u64).to_le_bytes(), key, rest].concat()
}

/// A length and bytes.
pub fn value(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// What, request, reply: one connection to torch's libuv server, in this order.
pub const TORCH_SERVER: &[(&str, &str, &str)] = &[
    ("PING", "0d44332211", "44332211"),
    ("SET /a", "0102000000000000002f61010000000000000078", ""),
    ("GET /a", "0302000000000000002f61", "010000000000000078"),
    ("COMPARE_SET missing, '' expected", "0202000000000000002f63000000000000000002000000000000007631", "02000000000000007631"),
    ("COMPARE_SET missing, 'z' expected", "0203000000000000002f633201000000000000007a02000000000000007631", "01000000000000007a"),
    ("COMPARE_SET match", "0202000000000000002f630200000000000000763102000000000000007632", "02000000000000007632"),
    ("COMPARE_SET mismatch", "0202000000000000002f630200000000000000763102000000000000007633", "02000000000000007632"),
    ("ADD /n 5", "0402000000000000002f6e0500000000000000", "0500000000000000"),
    ("ADD /n -7", "0402000000000000002f6ef9ffffffffffffff", "feffffffffffffff"),
    ("GET /n", "0302000000000000002f6e", "02000000000000002d32"),
    ("SET empty, GETNUMKEYS", "0102000000000000002f65000000000000000007", "0400000000000000"),
    ("CHECK yes", "05010000000000000002000000000000002f61", "00"),
    ("CHECK no", "05020000000000000002000000000000002f6103000000000000002f7a7a", "01"),
    ("GETNUMKEYS", "07", "0400000000000000"),
    ("APPEND /a, GET", "0902000000000000002f610200000000000000797a0302000000000000002f61", "030000000000000078797a"),
    ("APPEND new, GET", "0903000000000000002f61700100000000000000710303000000000000002f6170", "010000000000000071"),
    ("DELETE_KEY existing", "0803000000000000002f6170", "0100000000000000"),
    ("DELETE_KEY missing", "0803000000000000002f6170", "0000000000000000"),
    ("MULTI_SET", "0b020000000000000003000000000000002f6d3101000000000000003103000000000000002f6d3202000000000000003232", ""),
    ("MULTI_GET", "0a020000000000000003000000000000002f6d3103000000000000002f6d32", "01000000000000003102000000000000003232"),
    ("WAIT ready", "06010000000000000002000000000000002f61", "00"),
    ("CANCEL_WAIT without a wait", "0c", "01"),
    ("WAIT, CANCEL_WAIT", "06010000000000000003000000000000002f77330c", "01"),
    ("WAIT zero keys", "060000000000000000", "00"),
    ("CHECK zero keys", "050000000000000000", "00"),
    ("GET missing", "0306000000000000002f6e6f6b6579", "0000000000000000"),
    ("MULTI_GET missing", "0a020000000000000003000000000000002f6d3106000000000000002f6e6f6b6579", "0100000000000000310000000000000000"),
    ("QUEUE_PUSH", "0e02000000000000002f71010000000000000076", ""),
    ("CHECK queue", "05010000000000000002000000000000002f71", "00"),
    ("QUEUE_LEN", "1002000000000000002f71", "0100000000000000"),
    ("QUEUE_POP", "0f02000000000000002f71", "0100000000000000010000000000000076"),
    ("QUEUE_POP empty", "0f02000000000000002f71", "0000000000000000"),
    ("BARRIER 1/1", "1202000000000000002f620100000000000000", "00"),
    ("GET barrier", "0302000000000000002f62", "010000000000000031"),
    ("GETNUMKEYS again", "07", "0700000000000000"),
];
