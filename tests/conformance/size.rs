//! Every length: none, inline, and both sides of each threshold that a provider may have.

use railhead::fabric::{Opcode, Payload, PostError, SendWr, WcOpcode};

use super::bed::{Bed, Mem, NOTHING, Pair, Request, pattern};

/// A message of no bytes is a message, whichever kind; its memory and keys are not looked at.
pub fn zero_length(bed: &Bed) {
    let mut p = bed.pair();
    let to = p.b.open_memory(64);
    to.set(5);
    for i in 0..4 {
        p.b.recv(i, NOTHING);
    }
    p.a.send(Request::send(10, NOTHING));
    p.a.send(Request::send_imm(11, NOTHING, 7));
    p.a.send(Request::write(12, NOTHING, &to, 0));
    p.a.send(Request::write_imm(13, NOTHING, &to, 64, 9));
    p.a.send(Request::read(14, NOTHING, &to, 0));
    p.a.send(SendWr { payload: Payload::Inline(&[]), ..Request::send(15, NOTHING) });
    p.wait(6, 4);
    for id in 10..16 {
        assert_eq!(p.a.take_ok(id).byte_len, 0);
    }
    let got: Vec<_> = (0..4).map(|i| p.b.take_ok(i)).map(|c| (c.opcode, c.imm, c.byte_len)).collect();
    let (recv, imm) = (WcOpcode::Recv, WcOpcode::RecvRdmaWithImm);
    assert_eq!(got, [(recv, None, 0), (recv, Some(7), 0), (imm, Some(9), 0), (recv, None, 0)]);
    assert!(to.all().iter().all(|&b| b == 5));
    p.ping();
}

/// Inline WRITEs and SENDs of each length.
pub fn inline_of_every_length(bed: &Bed) {
    let mut p = bed.pair();
    let max = p.a.cq.qp(p.a.qp).max_inline();
    assert!(max >= 64, "a slot must fit: {max}");
    let to = p.b.open_memory(max + 32);
    for len in 0..=max {
        let bytes = pattern(len as u64 + 1, len);
        to.set(0);
        p.b.recv(1, NOTHING);
        p.a.send(SendWr { opcode: Opcode::WriteWithImm, imm: len as u32, ..Request::write_inline(2, &bytes, &to, 16) });
        p.wait(1, 1);
        p.a.take_ok(2);
        assert_eq!(p.b.take_ok(1).imm, Some(len as u32));
        check(&to, 16, &bytes);
        to.set(0);
        p.b.recv(3, to.sge(8, max));
        p.a.send(SendWr { payload: Payload::Inline(&bytes), ..Request::send(4, NOTHING) });
        p.wait(1, 1);
        p.a.take_ok(4);
        assert_eq!(p.b.take_ok(3).byte_len as usize, len);
        check(&to, 8, &bytes);
    }
}

/// The bytes are exactly there and nothing else was touched.
#[track_caller]
fn check(to: &Mem, at: usize, bytes: &[u8]) {
    assert!(to.read(at, bytes.len()) == bytes, "{} bytes at {at}", bytes.len());
    assert!(to.read(0, at).iter().all(|&b| b == 0), "before {} bytes at {at}", bytes.len());
    let end = at + bytes.len();
    assert!(to.read(end, to.len() - end).iter().all(|&b| b == 0), "behind {} bytes at {at}", bytes.len());
}

/// The caller's bytes may change as soon as posting returned, however long the message waits.
pub fn inline_is_copied_while_posting(bed: &Bed) {
    let mut p = Pair {
        a: super::bed::Side::new("a", &bed.device(), Default::default(), false),
        b: super::bed::Side::new("b", &bed.device(), Default::default(), false),
    };
    let to = p.b.open_memory(64 * 64);
    let (ea, eb) = (p.a.cq.qp(p.a.qp).endpoint(), p.b.cq.qp(p.b.qp).endpoint());
    p.a.cq.qp(p.a.qp).connect(&eb).expect("connect");
    for i in 0..64usize {
        let mut bytes = pattern(i as u64 + 1, 64);
        p.a.send(Request::write_inline(i as u64, &bytes, &to, i * 64));
        bytes.fill(0xEE);
        std::hint::black_box(&bytes);
    }
    p.b.cq.qp(p.b.qp).connect(&ea).expect("connect");
    p.wait(64, 0);
    p.ping();
    for i in 0..64usize {
        assert!(to.read(i * 64, 64) == pattern(i as u64 + 1, 64), "message {i}");
    }
}

/// Too long for inline, and inline where there is nothing to carry, is refused and posts nothing.
pub fn inline_limits(bed: &Bed) {
    let mut p = bed.pair();
    let to = p.b.open_memory(4096);
    let bytes = vec![1; p.a.cq.qp(p.a.qp).max_inline() + 1];
    let mut qp = p.a.cq.qp(p.a.qp);
    let too_long = qp.post_send(&[Request::write_inline(1, &bytes, &to, 0)]);
    assert!(matches!(too_long, Err(PostError::Invalid(_))), "{too_long:?}");
    let read = qp.post_send(&[SendWr { opcode: Opcode::Read, ..Request::write_inline(2, &bytes[..8], &to, 0) }]);
    assert!(matches!(read, Err(PostError::Invalid(_))), "{read:?}");
    p.settle();
    assert!(p.a.got.is_empty() && p.b.got.is_empty());
    p.ping();
}

/// Lengths to try.
fn lengths() -> Vec<usize> {
    let mut all: Vec<usize> = (1..=200).collect();
    for edge in [256, 512, 1024, 2048, 4096, 8192, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20] {
        all.extend([edge - 1, edge, edge + 1]);
    }
    all.extend([3_000_017, 16 << 20]);
    all
}

/// WRITE, WRITE_WITH_IMM, SEND and READ of lengths around every threshold.
pub fn every_threshold(bed: &Bed) {
    let mut p = bed.pair();
    let most = *lengths().iter().max().expect("lengths");
    let from = p.a.open_memory(most);
    let to = p.b.open_memory(most + 64);
    from.pattern(99);
    let mut bytes = from.all();
    to.set(0);
    for len in lengths() {
        // Different bytes for each length, without filling megabytes each time.
        let mark = (len as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
        for (at, m) in [(0, 0), (len / 2, 3), (len - 1, 6)] {
            bytes[at] = mark[m];
            from.write(at, &[mark[m]]);
        }
        one_of_each(&mut p, &from, &to, len, 32, &bytes[..len]);
    }
}

/// All four kinds with one length; `to` is zero before and after.
fn one_of_each(p: &mut Pair, from: &Mem, to: &Mem, len: usize, at: usize, want: &[u8]) {
    let edges = |what: &str| {
        assert!(to.read(at, len) == want, "{what} of {len} at {at}");
        assert!(to.read(0, at).iter().all(|&b| b == 0), "{what} of {len}: before");
        let rest = (to.len() - at - len).min(64);
        assert!(to.read(at + len, rest).iter().all(|&b| b == 0), "{what} of {len}: behind");
        to.write(at, &vec![0; len]);
    };
    p.a.send(Request::write(1, from.sge(0, len), to, at));
    p.b.recv(2, NOTHING);
    p.a.send(Request::write_imm(3, NOTHING, to, 0, 5));
    p.wait(2, 1);
    edges("WRITE");
    p.b.recv(4, NOTHING);
    p.a.send(Request::write_imm(5, from.sge(0, len), to, at, 6));
    p.wait(3, 2);
    edges("WRITE_WITH_IMM");
    p.b.recv(6, to.sge(at, len));
    p.a.send(Request::send(7, from.sge(0, len)));
    p.wait(4, 3);
    edges("SEND");
    p.b.send(Request::read(8, to.sge(at, len), from, 0));
    p.wait(4, 4);
    edges("READ");
    for id in [1, 3, 5, 7] {
        p.a.take_ok(id);
    }
    let c = [2, 4, 6, 8].map(|id| p.b.take_ok(id));
    assert_eq!((c[1].byte_len as usize, c[2].byte_len as usize, c[3].byte_len as usize), (len, len, len));
}

/// Sources and targets at every offset within a word and around page ends.
pub fn at_odd_addresses(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(3 * 65536);
    let to = p.b.open_memory(3 * 65536);
    from.pattern(17);
    for len in [1usize, 7, 8, 9, 63, 64, 65, 129, 4096, 70_001] {
        for shift in (0..9).chain([4095, 4097]) {
            let (src, dst) = (shift, 8192 - shift % 8192 + 3 * (shift % 5));
            to.set(0);
            p.b.recv(2, NOTHING);
            p.a.send(Request::write_imm(1, from.sge(src, len), &to, dst, 1));
            p.wait(1, 1);
            p.a.take_ok(1);
            p.b.take_ok(2);
            check(&to, dst, &from.read(src, len));
        }
    }
}
