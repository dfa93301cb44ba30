//! Tests of the handshake's bytes.

use super::*;
use proptest::prelude::*;

const KEY: &[u8] = b"0123456789abcdef";

fn sample() -> Params {
    Params {
        nonce: [7; 16],
        instance: 3,
        host_id: [9; 16],
        pid: 1234,
        pid_ns: 0xf000_0000_1111,
        traffic_class: -1,
        max_message: 1 << 30,
        memory: 0x7fff_1234_5678,
        rails: 2,
        qps_per_rail: 3,
        failover: true,
        fabric: "soft".into(),
        host: "node-1.example".into(),
        device: "eth0+eth1".into(),
        rkeys: vec![0xdead_beef, 17],
        endpoints: (0..6).map(|i| Endpoint([i; ENDPOINT_SIZE])).collect(),
    }
}

#[test]
fn parameters_round_trip() {
    let params = sample();
    assert_eq!(Params::decode(&params.encode()).unwrap(), params);
    let mut most = sample();
    most.rails = 8;
    most.qps_per_rail = 8;
    most.rkeys = vec![1; 8];
    most.endpoints = vec![Endpoint([1; ENDPOINT_SIZE]); 64];
    let body = most.encode();
    assert!(body.len() <= MAX_BODY, "{}", body.len());
    assert_eq!(Params::decode(&body).unwrap(), most);
}

#[test]
fn long_names_are_cut_at_a_character() {
    let mut params = sample();
    params.host = "é".repeat(100);
    let back = Params::decode(&params.encode()).unwrap();
    assert_eq!(back.host, "é".repeat(32));
}

#[test]
fn every_truncation_and_every_surplus_is_refused() {
    let body = sample().encode();
    for len in 0..body.len() {
        assert!(Params::decode(&body[..len]).is_err(), "{len} bytes");
    }
    let mut more = body;
    more.push(0);
    assert_eq!(Params::decode(&more), Err(WireError::Length));
}

#[test]
fn counts_and_names_are_bounded() {
    let with = |change: &dyn Fn(&mut Params)| {
        let mut params = sample();
        change(&mut params);
        Params::decode(&params.encode())
    };
    assert_eq!(with(&|p| p.rails = 0), Err(WireError::Field("number of rails")));
    assert_eq!(with(&|p| p.rails = 9), Err(WireError::Field("number of rails")));
    assert_eq!(with(&|p| p.qps_per_rail = 0), Err(WireError::Field("number of queue pairs")));
    assert_eq!(with(&|p| p.qps_per_rail = 9), Err(WireError::Field("number of queue pairs")));
    assert_eq!(with(&|p| p.host = "a\nb".into()), Err(WireError::Field("host name")));
}

/// The three messages of a conversation.
fn conversation() -> [Vec<u8>; 3] {
    let h1 = seal(Kind::Hello, PROTOCOL_VERSION, KEY, &[], &sample().encode());
    let h2 = seal(Kind::Reply, PROTOCOL_VERSION, KEY, &[&h1], &sample().encode());
    let h3 = seal(Kind::Confirm, PROTOCOL_VERSION, KEY, &[&h1, &h2], &[]);
    [h1, h2, h3]
}

#[test]
fn a_conversation_opens() {
    let [h1, h2, h3] = conversation();
    let (header, body) = open(&h1, KEY, &[]).unwrap();
    assert_eq!((header.version, header.kind), (PROTOCOL_VERSION, Kind::Hello));
    assert_eq!(Params::decode(body).unwrap(), sample());
    assert_eq!(open(&h2, KEY, &[&h1]).unwrap().0.kind, Kind::Reply);
    assert_eq!(open(&h3, KEY, &[&h1, &h2]).unwrap().1, b"");
    let refuse = seal(Kind::Refuse, PROTOCOL_VERSION, KEY, &[&h1], &encode_reason("peer on fabric soft"));
    assert_eq!(decode_reason(open(&refuse, KEY, &[&h1]).unwrap().1), "peer on fabric soft");
}

#[test]
fn every_flipped_bit_is_refused() {
    let [h1, h2, h3] = conversation();
    let before: [&[&[u8]]; 3] = [&[], &[&h1], &[&h1, &h2]];
    for (frame, before) in [&h1, &h2, &h3].into_iter().zip(before) {
        for bit in 0..frame.len() * 8 {
            let mut bad = frame.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&bad, KEY, before).is_err(), "bit {bit}");
        }
    }
}

#[test]
fn other_secrets_and_other_conversations_are_refused() {
    let [h1, h2, h3] = conversation();
    assert_eq!(open(&h1, b"0123456789abcdeF", &[]), Err(WireError::Mac));
    let other = seal(Kind::Hello, PROTOCOL_VERSION, KEY, &[], b"");
    assert_eq!(open(&h2, KEY, &[&other]), Err(WireError::Mac));
    assert_eq!(open(&h3, KEY, &[&h1, &other]), Err(WireError::Mac));
    assert_eq!(open(&h3, KEY, &[&h2, &h1]), Err(WireError::Mac));
}

#[test]
fn oversize_is_refused_from_the_header_alone() {
    let mut frame = conversation()[0].clone();
    frame[8..12].copy_from_slice(&(MAX_BODY as u32 + 1).to_le_bytes());
    assert_eq!(Header::decode(&frame), Err(WireError::Length));
    assert_eq!(FrameReader::default().pull(&mut frame.as_slice()), Err(WireError::Length));
    frame[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(Header::decode(&frame), Err(WireError::Length));
}

/// A stream that gives and takes one byte per call, and blocks every other time.
struct Drip {
    bytes: std::collections::VecDeque<u8>,
    block: bool,
}

impl Read for Drip {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.block = !self.block;
        if self.block {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        match self.bytes.pop_front() {
            Some(byte) => {
                out[0] = byte;
                Ok(1)
            }
            None => Ok(0),
        }
    }
}

impl Write for Drip {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.block = !self.block;
        if self.block {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.bytes.push_back(bytes[0]);
        Ok(1)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_frame_passes_byte_by_byte_and_leaves_what_follows() {
    let [h1, _, h3] = conversation();
    let mut drip = Drip { bytes: Default::default(), block: false };
    for frame in [&h1, &h3] {
        let mut writer = FrameWriter::new(frame.clone());
        while writer.push(&mut drip) == Progress::Blocked {}
    }
    drip.bytes.push_back(0xee);
    for frame in [&h1, &h3] {
        let mut reader = FrameReader::default();
        while reader.pull(&mut drip).unwrap() == Progress::Blocked {}
        assert!(reader.take() == *frame);
    }
    assert_eq!(drip.bytes, [0xee]);
    let mut reader = FrameReader::default();
    while reader.pull(&mut drip).unwrap() == Progress::Blocked {}
    assert_eq!(reader.pull(&mut drip).unwrap(), Progress::Blocked);
    assert_eq!(reader.pull(&mut drip).unwrap(), Progress::Closed);
    assert!(reader.started());
}

proptest! {
    #[test]
    fn decoders_take_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _ = Header::decode(&bytes);
        let _ = open(&bytes, KEY, &[]);
        let _ = decode_reason(&bytes);
        let mut reader = FrameReader::default();
        let _ = reader.pull(&mut bytes.as_slice());
        if let Ok(params) = Params::decode(&bytes) {
            prop_assert_eq!(params.encode(), bytes);
        }
    }
}
