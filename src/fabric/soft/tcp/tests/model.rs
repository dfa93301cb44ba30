//! Random requests in both directions, in random steps, against an oracle that performs them at once and in order.

use super::*;
use proptest::prelude::*;

/// Half of the window is written by the peer, the other half is the source of READs and never changes.
const WINDOW: usize = 400_000;

#[derive(Debug, Clone)]
enum Op {
    /// Opcode, offset in the source, offset in the target, length.
    Post(u8, u32, u32, u32),
    Recv,
    Step(u8),
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0), 1u32..70, Just(64), 70u32..5000, 100_000u32..300_000, Just(131_072)]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0u8..5, 0u32..1000, 0u32..2000, len()).prop_map(|(o, s, t, l)| Op::Post(o, s, t, l)),
        3 => Just(Op::Recv),
        3 => (1u8..4).prop_map(Op::Step),
    ]
}

/// What one direction's oracle knows.
struct Oracle {
    /// The target as it must end.
    window: Vec<u8>,
    /// Lengths and immediates that the receives must report.
    received: Vec<(u32, Option<u32>)>,
    wanted: usize,
    recvs: usize,
    consumed: usize,
}

/// One end's memory.
struct Space {
    source: Memory,
    window: Memory,
    /// READs and SENDs land here.
    landing: Memory,
}

impl Space {
    fn new(seed: u64) -> Self {
        Space { source: Memory::patterned(WINDOW, seed), window: Memory::new(WINDOW, ALL), landing: Memory::new(WINDOW, ALL) }
    }
}

fn run(ops: Vec<(bool, Op)>, streams: usize, buffer: Option<usize>) {
    let (a, b) = pair(Setup { streams, buffer, start: 1 << 33, ..Setup::default() });
    let mut sides = [a, b];
    let spaces = [Space::new(1), Space::new(2)];
    let mut oracles = [0, 1].map(|_| Oracle { window: vec![0; WINDOW], received: Vec::new(), wanted: 0, recvs: 0, consumed: 0 });
    for (number, (who, op)) in ops.into_iter().enumerate() {
        let (me, peer) = (usize::from(who), usize::from(!who));
        match op {
            Op::Post(code, from, to, len) => {
                let (from, to, len) = (from as usize, to as usize * 4, len as usize);
                let opcode = [Opcode::Send, Opcode::SendWithImm, Opcode::Write, Opcode::WriteWithImm, Opcode::Read][usize::from(code)];
                let base =
                    SendWr { imm: number as u32, ..write(number as u64, spaces[me].source.sge(from, len), &spaces[peer].window, to) };
                let oracle = &mut oracles[me];
                let request = match opcode {
                    Opcode::Read => SendWr { wr_id: number as u64, ..write(0, spaces[me].landing.sge(to, len), &spaces[peer].source, to) },
                    _ => base,
                };
                if matches!(opcode, Opcode::Write | Opcode::WriteWithImm) {
                    oracle.window[to..to + len].copy_from_slice(&spaces[me].source.bytes()[from..from + len]);
                }
                if !matches!(opcode, Opcode::Write | Opcode::Read) {
                    oracle.received.push((len as u32, (opcode != Opcode::Send).then_some(number as u32)));
                    oracle.consumed += 1;
                }
                let signaled = number % 3 > 0;
                oracle.wanted += usize::from(signaled);
                sides[me].post(SendWr { signaled, ..of(opcode, request) });
            }
            Op::Recv => {
                let sge = spaces[me].landing.sge(0, WINDOW);
                sides[me].recv(number as u64, sge);
                oracles[peer].recvs += 1;
            }
            Op::Step(n) => {
                for _ in 0..n {
                    sides[me].step().unwrap();
                }
            }
        }
    }
    let [a, b] = &mut sides;
    for (me, side) in [(0, &mut *a), (1, &mut *b)] {
        let oracle = &mut oracles[1 - me];
        while oracle.recvs < oracle.consumed {
            side.recv(0, spaces[me].landing.sge(0, WINDOW));
            oracle.recvs += 1;
        }
    }
    let is_recv = |c: &&Completion| matches!(c.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
    let wanted = [oracles[0].wanted + oracles[1].consumed, oracles[1].wanted + oracles[0].consumed];
    drive(a, b, |a, b| a.done.len() == wanted[0] && b.done.len() == wanted[1]);
    settle(a, b);
    for (me, side) in [(0, &*a), (1, &*b)] {
        let sent: Vec<u64> = side.done.iter().filter(|c| !is_recv(c)).map(|c| c.wr_id).collect();
        assert!(sent.is_sorted(), "completions out of order: {sent:?}");
        assert!(side.done.iter().all(|c| c.status == WcStatus::Success));
        let received: Vec<(u32, Option<u32>)> = side.done.iter().filter(is_recv).map(|c| (c.byte_len, c.imm)).collect();
        assert_eq!(received, oracles[1 - me].received);
        assert!(spaces[me].window.bytes() == oracles[1 - me].window, "the window of side {me} differs");
        assert!(side.wire.flushed());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn random_requests_do_what_the_oracle_does(
        ops in proptest::collection::vec((any::<bool>(), op()), 1..150),
        streams in prop_oneof![Just(0usize), 1usize..5],
        buffer in prop_oneof![Just(None), Just(Some(1usize)), Just(Some(20_000))],
    ) {
        run(ops, streams, buffer);
    }
}
