//! Reliable and in order, per queue pair.

use std::collections::VecDeque;

use railhead::fabric::{QpCaps, SendWr, WcOpcode, WcStatus};

use super::bed::{Bed, NOTHING, Pair, Request, Rng, pattern};

/// WRITEs complete in the order of posting, and all are in place when the WRITE_WITH_IMM behind them is reported.
pub fn writes(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(1 << 20);
    let to = p.b.open_memory(1 << 20);
    for round in 0..20u64 {
        from.pattern(round + 1);
        to.set(0);
        let step = (1 << 20) / 64;
        for i in 0..64u64 {
            let (at, len) = (i as usize * step, 1 + (i as usize * 977) % step);
            p.a.send(Request::write(i, from.sge(at, len), &to, at));
        }
        p.b.recv(500 + round, NOTHING);
        p.a.send(Request::write_imm(64, NOTHING, &to, 0, 0xABCD_0000 + round as u32));
        p.wait(0, 1);
        let c = p.b.take_ok(500 + round);
        assert_eq!((c.opcode, c.imm), (WcOpcode::RecvRdmaWithImm, Some(0xABCD_0000 + round as u32)));
        for i in 0..64usize {
            let (at, len) = (i * step, 1 + (i * 977) % step);
            assert!(to.read(at, len) == from.read(at, len), "write {i} of round {round}");
        }
        p.wait(65, 0);
        (0..65).for_each(|i| assert_eq!(p.a.take_ok(i).opcode, WcOpcode::Write));
    }
}

/// SENDs land in the receives in the order of posting, with their lengths.
pub fn sends(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(64 * 1024);
    let to = p.b.open_memory(64 * 1024);
    from.pattern(3);
    let mut rng = Rng(42);
    for _ in 0..40 {
        to.set(0);
        let lens: Vec<usize> = (0..32).map(|_| rng.below(2048)).collect();
        for i in 0..32 {
            p.b.recv(i as u64, to.sge(i * 2048, 2048));
        }
        for (i, &len) in lens.iter().enumerate() {
            p.a.send(Request::send(100 + i as u64, from.sge(i * 2048, len)));
        }
        p.wait(32, 32);
        for (i, &len) in lens.iter().enumerate() {
            let c = p.b.take_ok(i as u64);
            assert_eq!((c.opcode, c.byte_len as usize, c.imm), (WcOpcode::Recv, len, None));
            assert_eq!(p.a.take_ok(100 + i as u64).opcode, WcOpcode::Send);
            assert!(to.read(i * 2048, len) == from.read(i * 2048, len));
            assert!(to.read(i * 2048 + len, 2048 - len).iter().all(|&b| b == 0), "beyond the message");
        }
    }
}

/// Of overlapping WRITEs the last one posted wins, whatever their sizes.
pub fn overlapping_writes(bed: &Bed) {
    let mut p = bed.pair();
    const LEN: usize = 256 * 1024;
    let from = p.a.open_memory(2 * LEN);
    let to = p.b.open_memory(LEN);
    from.pattern(11);
    let mut rng = Rng(7);
    for _ in 0..30 {
        to.set(0);
        let mut model = vec![0; LEN];
        for i in 0..24 {
            let len = if rng.below(2) == 0 { rng.below(200) } else { rng.below(LEN) };
            let (at, src) = (rng.below(LEN - len + 1), rng.below(LEN));
            model[at..at + len].copy_from_slice(&from.read(src, len));
            p.a.send(Request::write(i, from.sge(src, len), &to, at));
        }
        p.wait(24, 0);
        p.a.take_all_ok(0..24);
        // Completion says accepted in order; the data is certain once something later was seen to arrive.
        p.ping();
        assert!(to.all() == model);
    }
}

struct Expected {
    opcode: WcOpcode,
    len: usize,
    imm: Option<u32>,
    bytes: Vec<u8>,
}

/// One direction of traffic with what must come of it.
struct Oracle {
    sent: VecDeque<(u64, WcOpcode, usize)>,
    arriving: VecDeque<Expected>,
    rng: Rng,
    next: u64,
}

/// A random mixture of everything, in both directions at once, against a model that performs it in order.
pub fn mixed_against_an_oracle(bed: &Bed) {
    const LEN: usize = 128 * 1024;
    const SLOT: usize = 8192;
    const SLOTS: usize = 32;
    for seed in 1..=4u64 {
        let mut p = bed.pair_with(QpCaps { send_depth: 64, recv_depth: SLOTS as u32, ..QpCaps::default() });
        let from = [p.a.open_memory(LEN), p.b.open_memory(LEN)];
        let to = [p.b.open_memory(LEN), p.a.open_memory(LEN)];
        let inbox = [p.b.open_memory(SLOT * SLOTS), p.a.open_memory(SLOT * SLOTS)];
        from[0].pattern(seed);
        from[1].pattern(seed + 100);
        let mut model = [vec![0u8; LEN], vec![0u8; LEN]];
        let mut oracle: Vec<Oracle> =
            (0..2u64).map(|i| Oracle { sent: VecDeque::new(), arriving: VecDeque::new(), rng: Rng(seed * 31 + i + 1), next: 0 }).collect();
        let mut received = [0usize; 2];
        for (d, inbox) in inbox.iter().enumerate() {
            for slot in 0..SLOTS {
                receiver(&mut p, d).recv(slot as u64, inbox.sge(slot * SLOT, SLOT));
            }
        }
        let mut done = [0u64; 2];
        const MESSAGES: u64 = 1500;
        let end = std::time::Instant::now() + super::bed::PATIENCE;
        while done != [MESSAGES; 2] || oracle.iter().any(|o| !o.arriving.is_empty()) {
            assert!(std::time::Instant::now() < end, "seed {seed}: {done:?}");
            for d in 0..2 {
                let o = &mut oracle[d];
                while o.sent.len() < 40 && o.next < MESSAGES && o.rng.below(4) != 0 {
                    let request = make(o, &from[d], &to[d], &mut model[d], SLOT, LEN);
                    sender(&mut p, d).send(request);
                }
            }
            p.poll();
            for d in 0..2 {
                // Completions of sends and of receives share a queue, and only each kind is in order.
                let o = &mut oracle[d];
                let side = sender(&mut p, d);
                while let Some(i) = side.got.iter().position(|c| !is_recv(c.opcode)) {
                    let c = side.got.remove(i).expect("just found");
                    let (id, opcode, len) = o.sent.pop_front().expect("a completion for something posted");
                    assert_eq!((c.wr_id, c.status, c.opcode), (id, WcStatus::Success, opcode), "seed {seed}");
                    if opcode == WcOpcode::Read {
                        assert_eq!(c.byte_len as usize, len);
                    }
                    done[d] += 1;
                }
                let side = receiver(&mut p, d);
                while let Some(i) = side.got.iter().position(|c| is_recv(c.opcode)) {
                    let c = side.got.remove(i).expect("just found");
                    let slot = received[d] % SLOTS;
                    received[d] += 1;
                    let want = o.arriving.pop_front().expect("a receive for something sent");
                    assert_eq!(
                        (c.wr_id, c.status, c.opcode, c.imm),
                        (slot as u64, WcStatus::Success, want.opcode, want.imm),
                        "seed {seed} direction {d}"
                    );
                    assert_eq!(c.byte_len as usize, want.len);
                    if want.opcode == WcOpcode::Recv {
                        assert!(inbox[d].read(slot * SLOT, want.len) == want.bytes, "seed {seed}: bytes of a SEND");
                    }
                    side.recv(slot as u64, inbox[d].sge(slot * SLOT, SLOT));
                }
            }
        }
        for d in 0..2 {
            assert!(to[d].all() == model[d], "seed {seed}: memory of direction {d}");
        }
    }
}

fn is_recv(opcode: WcOpcode) -> bool {
    matches!(opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm)
}

fn sender(p: &mut Pair, d: usize) -> &mut super::bed::Side {
    if d == 0 { &mut p.a } else { &mut p.b }
}

fn receiver(p: &mut Pair, d: usize) -> &mut super::bed::Side {
    sender(p, 1 - d)
}

/// The next random request; what it will do is written into the oracle and the model.
fn make<'a>(o: &mut Oracle, from: &super::bed::Mem, to: &super::bed::Mem, model: &mut [u8], slot: usize, len: usize) -> SendWr<'a> {
    let id = o.next;
    o.next += 1;
    let imm = o.rng.next() as u32;
    let small = o.rng.below(3) != 0;
    let n = |o: &mut Oracle, most: usize| o.rng.below(if small { 160.min(most) } else { most } + 1);
    let kind = o.rng.below(5);
    match kind {
        0 | 1 => {
            let n = n(o, slot);
            let src = o.rng.below(len - n + 1);
            let imm = (kind == 1).then_some(imm);
            o.sent.push_back((id, WcOpcode::Send, n));
            o.arriving.push_back(Expected { opcode: WcOpcode::Recv, len: n, imm, bytes: from.read(src, n) });
            match imm {
                None => Request::send(id, from.sge(src, n)),
                Some(imm) => Request::send_imm(id, from.sge(src, n), imm),
            }
        }
        2 | 3 => {
            let n = n(o, 64 * 1024);
            let (src, at) = (o.rng.below(len - n + 1), o.rng.below(len - n + 1));
            model[at..at + n].copy_from_slice(&from.read(src, n));
            o.sent.push_back((id, WcOpcode::Write, n));
            if kind == 2 {
                return Request::write(id, from.sge(src, n), to, at);
            }
            o.arriving.push_back(Expected { opcode: WcOpcode::RecvRdmaWithImm, len: n, imm: Some(imm), bytes: Vec::new() });
            Request::write_imm(id, from.sge(src, n), to, at, imm)
        }
        _ => {
            // Reads nothing: a READ of bytes would need a source that no WRITE changes. Its place in the order is what counts here.
            o.sent.push_back((id, WcOpcode::Read, 0));
            Request::read(id, NOTHING, to, 0)
        }
    }
}

/// Two threads, one per side, each sending and receiving as fast as it can.
pub fn both_directions_from_two_threads(bed: &Bed) {
    let mut p = bed.pair();
    const N: usize = 3000;
    const SLOT: usize = 512;
    let Pair { ref mut a, ref mut b } = p;
    std::thread::scope(|scope| {
        for (me, side) in [(1u64, a), (2, b)] {
            scope.spawn(move || {
                let from = side.open_memory(SLOT);
                let to = side.open_memory(64 * SLOT);
                (0..64).for_each(|i| side.recv(i, to.sge(i as usize * SLOT, SLOT)));
                let (mut posted, mut sent, mut got) = (0, 0, 0);
                let mut moved = std::time::Instant::now();
                while sent < N || got < N {
                    // One at a time: the buffer is reused.
                    if posted == sent && posted < N {
                        from.pattern(me << 32 | posted as u64);
                        side.send(Request::send_imm(1 << 40, from.sge(0, 1 + posted % SLOT), posted as u32));
                        posted += 1;
                    }
                    if side.poll() == 0 {
                        assert!(moved.elapsed() < super::bed::PATIENCE, "{sent} sent, {got} received");
                        std::thread::yield_now();
                    }
                    while let Some(c) = side.got.pop_front() {
                        moved = std::time::Instant::now();
                        assert_eq!(c.status, WcStatus::Success);
                        if c.opcode == WcOpcode::Send {
                            sent += 1;
                            continue;
                        }
                        let slot = got % 64;
                        assert_eq!((c.wr_id, c.imm, c.byte_len as usize), (slot as u64, Some(got as u32), 1 + got % SLOT));
                        assert!(to.read(slot * SLOT, 1 + got % SLOT) == pattern((3 - me) << 32 | got as u64, SLOT)[..1 + got % SLOT]);
                        side.recv(slot as u64, to.sge(slot * SLOT, SLOT));
                        got += 1;
                    }
                }
                // The peer may still need an answer that only polling gives, if the contract is not kept: do not poll.
            });
        }
    });
}
