//! Reset: a queue pair that has failed begins anew, and meets nothing of what was before.

use railhead::fabric::{QpState, SendWr, WcStatus};

use super::bed::{Bed, Mem, NOTHING, Pair, Request, Side};
use super::churn::Holdings;

impl Side {
    fn drained(&mut self) -> bool {
        self.cq.qp(self.qp).drained()
    }

    #[track_caller]
    fn reset(&mut self, generation: u32) {
        self.cq.qp(self.qp).reset(generation).expect("reset");
        assert_eq!((self.state(), self.cq.qp(self.qp).error()), (QpState::Init, None));
    }
}

impl Pair {
    /// Both owners give up, and take what is flushed.
    #[track_caller]
    fn fail_and_drain(&mut self) {
        self.a.cq.qp(self.a.qp).set_error();
        self.b.cq.qp(self.b.qp).set_error();
        self.until("both drained", |p| p.a.drained() && p.b.drained());
    }

    /// Both begin anew.
    #[track_caller]
    fn begin(&mut self, generation: u32) {
        self.a.reset(generation);
        self.b.reset(generation);
        self.connect();
    }

    /// Messages of every kind, both ways.
    #[track_caller]
    fn works(&mut self) {
        for _ in 0..2 {
            assert!(self.a.got.is_empty() && self.b.got.is_empty());
            let (from, to) = (self.a.open_memory(200_000), self.b.open_memory(200_000));
            from.pattern(3);
            self.b.recv(70, NOTHING);
            self.a.send(Request::write(60, from.sge(0, 150_000), &to, 0));
            self.a.send(Request::write_imm(61, from.sge(150_000, 50_000), &to, 150_000, 9));
            self.wait(2, 1);
            self.a.take_all_ok(60..62);
            assert_eq!(self.b.take_ok(70).imm, Some(9));
            assert_eq!(to.all(), from.all());
            from.set(0);
            self.a.send(Request::read(62, from.sge(0, 200_000), &to, 0));
            self.wait(1, 0);
            self.a.take_ok(62);
            assert_eq!(from.all(), to.all());
            self.ping();
            std::mem::swap(&mut self.a, &mut self.b);
        }
    }
}

/// Fails with work of every kind outstanding, signaled and not, done and not: all of it is reported, then both go on, on the endpoints of before.
pub fn goes_on_as_the_next_generation(bed: &Bed) {
    let mut p = bed.pair();
    for generation in 1..4 {
        p.works();
        let (from, to) = (p.a.open_memory(100_000), p.b.open_memory(100_000));
        (0..10).for_each(|i| p.b.recv(100 + i, NOTHING));
        // Performed by the time that the last is, which only the first and the last report.
        for i in 0..5 {
            p.a.send(SendWr { signaled: matches!(i, 0 | 4), ..Request::write(i, from.sge(0, 64), &to, 0) });
        }
        p.wait(2, 0);
        p.a.take_ok(0);
        p.a.take_ok(4);
        // Unsignaled, and performed with nothing behind that would tell.
        (5..8).for_each(|i| p.a.send(SendWr { signaled: false, ..Request::write(i, from.sge(0, 64), &to, 0) }));
        p.settle();
        p.fail_and_drain();
        p.a.got.retain(|c| (c.wr_id, c.status) != (5, WcStatus::WrFlushErr) && !(6..8).contains(&c.wr_id));
        assert!(p.a.got.is_empty(), "{:?}", p.a.got);
        let flushed: Vec<_> = p.b.got.drain(..).map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(flushed, (100..110).map(|id| (id, WcStatus::WrFlushErr)).collect::<Vec<_>>());
        p.begin(generation);
        // With work that no receive is there for.
        p.works();
        (0..20).for_each(|i| p.a.send(SendWr { signaled: i % 3 == 0, ..Request::write_imm(i, from.sge(0, 90_000), &to, 0, 1) }));
        p.fail_and_drain();
        assert_eq!(
            p.a.got.drain(..).map(|c| (c.wr_id, c.status)).collect::<Vec<_>>(),
            (0..20).map(|i| (i, WcStatus::WrFlushErr)).collect::<Vec<_>>()
        );
        p.begin(generation + 100 * generation);
        p.fail_and_drain();
        p.begin(generation + 100 * generation + 1);
        p.works();
        p.fail_and_drain();
        p = bed.pair();
    }
}

/// Only in ERROR, with everything reported, and to a later generation; what is refused changes nothing.
pub fn refused_unless_drained(bed: &Bed) {
    let mut p = bed.pair();
    let refused = |side: &mut Side, generation, why: &str| {
        let state = side.state();
        let error = side.cq.qp(side.qp).reset(generation).expect_err("reset").to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(side.state(), state);
    };
    refused(&mut p.a, 1, "not in ERROR");
    p.ping();
    (0..3).for_each(|i| p.a.recv(i, NOTHING));
    p.a.cq.qp(p.a.qp).set_error();
    refused(&mut p.a, 1, "not drained");
    p.fail_and_drain();
    assert_eq!(p.a.got.len(), 3);
    refused(&mut p.a, 0, "must be later");
    p.begin(7);
    p.a.got.clear();
    p.works();
    p.fail_and_drain();
    for (generation, why) in [(0, "must be later"), (6, "must be later"), (7, "of generation 7")] {
        refused(&mut p.a, generation, why);
    }
    p.begin(8);
    p.works();
}

/// One side a generation behind the other: what it sends does not arrive, now or later. In the same generation they meet.
pub fn generations_do_not_meet(bed: &Bed) {
    let mut p = bed.pair();
    p.ping();
    let (from, to) = (p.a.open_memory(4096), p.b.open_memory(4096));
    from.set(0x55);
    to.set(0);
    p.fail_and_drain();
    p.a.reset(1);
    p.b.reset(2);
    p.connect();
    p.b.recv(1, NOTHING);
    p.a.send(Request::write_imm(0, from.sge(0, 4096), &to, 0, 1));
    p.settle();
    assert!(p.b.got.is_empty() && to.all().iter().all(|&b| b == 0));
    p.a.cq.qp(p.a.qp).set_error();
    p.until("a drained", |p| p.a.drained());
    p.a.got.clear();
    p.a.reset(2);
    let eb = p.b.cq.qp(p.b.qp).endpoint();
    p.a.cq.qp(p.a.qp).connect(&eb).expect("connect");
    p.a.send(Request::write_imm(2, from.sge(0, 64), &to, 64, 2));
    p.wait(1, 1);
    p.a.take_ok(2);
    assert_eq!(p.b.take_ok(1).imm, Some(2));
    let want: Vec<u8> = (0..4096).map(|at| if (64..128).contains(&at) { 0x55 } else { 0 }).collect();
    assert_eq!(to.all(), want, "of the generation before");
}

/// Memory that WRITEs were under way to, and memory that READs and SENDs were to fill: once both are drained it is its owner's again.
pub fn nothing_lands_after_it(bed: &Bed) {
    const LEN: usize = 2 << 20;
    let mut p = bed.pair();
    let (mine, theirs) = (p.a.open_memory(LEN), p.b.open_memory(LEN));
    for generation in 1..=10 {
        mine.set(0x33);
        theirs.set(0x55);
        for i in 0..8 {
            p.a.send(Request::read(i, mine.sge(0, LEN), &theirs, 0));
            p.a.recv(100 + i, mine.sge(0, LEN));
            p.b.send(Request::send(i, theirs.sge(0, LEN)));
            p.b.send(Request::write(50 + i, theirs.sge(0, LEN), &mine, 0));
        }
        // Anywhere from not begun to half done.
        for _ in 0..generation * 3 {
            p.poll();
        }
        p.fail_and_drain();
        mine.set(0xAA);
        p.begin(generation);
        p.a.got.clear();
        p.b.got.clear();
        p.works();
        assert_all(&mine, 0xAA, generation);
    }
}

#[track_caller]
fn assert_all(mem: &Mem, byte: u8, generation: u32) {
    assert!(mem.all().iter().all(|&b| b == byte), "generation {generation}: something landed after it was drained");
}

/// The process holds no more after many generations than after a few. In a process of its own, as other tests' descriptors would be counted.
pub fn a_hundred_generations(bed: &Bed) {
    bed.alone("reset::a_hundred_generations", || {
        let mut p = bed.pair();
        let mut next = |upto: u32, from: u32| {
            for generation in from..upto {
                p.ping();
                (0..20).for_each(|i| p.a.recv(i, NOTHING));
                p.fail_and_drain();
                p.a.got.clear();
                p.b.got.clear();
                p.begin(generation);
            }
            p.ping();
        };
        next(20, 1);
        let before = Holdings::now();
        next(120, 20);
        before.still_hold();
    });
}
