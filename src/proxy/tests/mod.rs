//! Tests of send and receive operations over the fake network, step by step.

mod errors;
mod fake;
mod success;

use std::sync::Arc;

use super::args::{Args, Steps};
use super::connector::{Connector, Direction, Options};
use super::protocol::Protocol;
use super::ring::lines::{ll_flag, ll128_flag};
use super::ring::{Consumer, Geometry, Producer, Ring};
use super::{recv, send};
use crate::base::error::Result;
use crate::engine::Progress;
use fake::{Behaviour, Call, Fake};

/// Bytes of a slot, for every protocol.
const SLOT: usize = 256;

fn geometry() -> Geometry {
    Geometry::new([8 * SLOT; 3]).unwrap()
}

/// The data of step `n` of a stream.
fn pattern(stream: u64, n: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (stream.wrapping_mul(131) ^ n.wrapping_mul(31) ^ i.wrapping_mul(7)) as u8).collect()
}

/// Two connectors with a connection of the fake between them, and the programs' sides of their rings.
struct TestPair {
    net: Arc<Fake>,
    send: Connector<Fake>,
    recv: Connector<Fake>,
    producer: Producer<Arc<Ring>>,
    consumer: Consumer<Arc<Ring>>,
}

impl TestPair {
    fn new(behaviour: Behaviour, start: u64) -> TestPair {
        TestPair::over(Fake::new(0x5eed ^ start, behaviour), 1, start, Options::default())
    }

    fn over(net: Arc<Fake>, connection: usize, start: u64, options: Options) -> TestPair {
        let ring = || Arc::new(Ring::private(geometry(), start).unwrap());
        let (to, from) = net.connection(connection);
        let send = Connector::new(net.clone(), Direction::Send, to, ring(), options).unwrap();
        let recv = Connector::new(net.clone(), Direction::Recv, from, ring(), options).unwrap();
        let (producer, consumer) = (Producer::new(send.ring().clone()), Consumer::new(recv.ring().clone()));
        TestPair { net, send, recv, producer, consumer }
    }

    fn close(self) -> Result<()> {
        self.send.close().and(self.recv.close())
    }
}

/// Writes a slice as a producer of the protocol does; the bytes that go over the wire.
fn fill(producer: &mut Producer<Arc<Ring>>, ring: &Ring, protocol: Protocol, slice: u64, data: &[u8]) -> usize {
    let step = producer.step();
    let wire = match protocol {
        Protocol::Simple => data.to_vec(),
        Protocol::Ll => {
            let words = data.chunks(4).map(|part| [&[part, &[0; 4][part.len()..]].concat()[..], &ll_flag(step).to_ne_bytes()].concat());
            let mut wire: Vec<u8> = words.flatten().collect();
            if !wire.len().is_multiple_of(16) {
                wire.extend([[0; 4], ll_flag(step).to_ne_bytes()].concat());
            }
            wire
        }
        Protocol::Ll128 => {
            let lines = data.chunks(120).map(|part| [part, &[0; 120][part.len()..], &ll128_flag(step).to_ne_bytes()[..]].concat());
            lines.flatten().collect()
        }
    };
    // SAFETY: the test asked has_room before.
    unsafe { ring.copy_in(protocol, step, &wire) }.unwrap();
    producer.post(slice, wire.len());
    wire.len()
}

/// The data in a slice's lines.
fn strip(protocol: Protocol, wire: &[u8], len: usize) -> Vec<u8> {
    let parts: Vec<&[u8]> = match protocol {
        Protocol::Simple => vec![wire],
        Protocol::Ll => wire.chunks(8).map(|word| &word[..4]).collect(),
        Protocol::Ll128 => wire.chunks(128).map(|line| &line[..120]).collect(),
    };
    let mut data = parts.concat();
    data.truncate(len);
    data
}

/// Most data that a slice of the protocol holds.
fn most(protocol: Protocol, slice: u64) -> usize {
    let bytes = SLOT * slice as usize;
    match protocol {
        Protocol::Simple => bytes,
        Protocol::Ll => bytes / 2,
        Protocol::Ll128 => bytes / 128 * 120,
    }
}
