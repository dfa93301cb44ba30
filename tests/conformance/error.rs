//! ERROR: everything outstanding is flushed, once and in order; the peer learns; a peer that is gone is noticed.

use railhead::fabric::{Endpoint, Opcode, PostError, QpCaps, QpState, SendWr, WcOpcode, WcStatus};

use super::bed::{Bed, NOTHING, Pair, Request, SILENT, Side};

/// Outstanding sends of every kind and receives: all come back with WrFlushErr, each kind in order, none lost, none twice.
pub fn flush_reports_all_in_order(bed: &Bed) {
    let mut p = bed.pair();
    let local = p.a.open_memory(100_000);
    let to = p.b.open_memory(100_000);
    for i in 0..50 {
        p.a.recv(1000 + i, local.sge(0, 64));
    }
    // The first one waits for a receive that never comes, so all behind it are outstanding.
    p.a.send(Request::send(0, local.sge(0, 8)));
    for i in 1..200u64 {
        let len = [0, 8, 100, 5000, 90_000][i as usize % 5];
        let sge = if len == 0 { NOTHING } else { local.sge(0, len) };
        let request = match i % 4 {
            0 => Request::send(i, sge),
            1 => Request::write(i, sge, &to, 0),
            2 => Request::write_imm(i, sge, &to, 0, 1),
            _ => Request::read(i, sge, &to, 0),
        };
        p.a.send(SendWr { signaled: i % 3 != 0, ..request });
    }
    p.settle();
    assert!(p.a.got.is_empty());
    p.a.cq.qp(p.a.qp).set_error();
    assert_eq!(p.a.state(), QpState::Error);
    p.wait(250, 0);
    p.settle();
    assert_eq!(p.a.got.len(), 250, "unsignaled ones too, and each once");
    assert!(p.a.got.iter().all(|c| c.status == WcStatus::WrFlushErr));
    let (recvs, sends): (Vec<_>, Vec<_>) = p.a.got.iter().map(|c| c.wr_id).partition(|&id| id >= 1000);
    assert_eq!(sends, (0..200).collect::<Vec<_>>());
    assert_eq!(recvs, (1000..1050).collect::<Vec<_>>());
    let kinds: Vec<_> = p.a.got.iter().filter(|c| c.wr_id < 4).map(|c| c.opcode).collect();
    assert_eq!(kinds, [WcOpcode::Send, WcOpcode::Write, WcOpcode::Write, WcOpcode::Read]);
}

/// One side gives up: the other's requests fail, its receives are flushed.
pub fn set_error_is_learnt_by_peer(bed: &Bed) {
    if bed.waives("error::set_error_is_learnt_by_peer", SILENT) {
        return;
    }
    let mut p = bed.pair();
    let local = p.b.open_memory(64);
    (0..3).for_each(|i| p.b.recv(i, local.sge(0, 64)));
    p.ping_back();
    p.a.cq.qp(p.a.qp).set_error();
    p.until("the peer's ERROR", |p| p.b.state() == QpState::Error);
    p.wait(0, 3);
    for i in 0..3 {
        let c = p.b.take();
        assert_eq!((c.wr_id, c.status), (i, WcStatus::WrFlushErr));
    }
    p.settle();
    assert!(p.b.got.is_empty() && p.a.got.is_empty());
}

impl Pair {
    /// As `ping`, from b to a.
    fn ping_back(&mut self) {
        std::mem::swap(&mut self.a, &mut self.b);
        self.ping();
        std::mem::swap(&mut self.a, &mut self.b);
    }
}

/// Nothing can be sent before `connect`. In ERROR a request is refused, or taken and flushed; it is never performed.
pub fn posting_in_wrong_state(bed: &Bed) {
    let device = bed.device();
    let mut p = Pair { a: Side::new("a", &device, QpCaps::default(), false), b: Side::new("b", &device, QpCaps::default(), false) };
    let local = p.a.open_memory(64);
    let to = p.b.open_memory(64);
    to.set(0);
    let early = p.a.cq.qp(p.a.qp).post_send(&[Request::write(1, local.sge(0, 64), &to, 0)]);
    assert_eq!(early, Err(PostError::State(QpState::Init)));
    p.connect();
    p.ping();
    assert!(p.a.got.is_empty(), "the refused request was performed");
    p.a.cq.qp(p.a.qp).set_error();
    let late = p.a.cq.qp(p.a.qp).post_send(&[Request::write(2, local.sge(0, 64), &to, 0)]);
    let recv = p.a.cq.qp(p.a.qp).post_recv(&railhead::fabric::RecvWr { wr_id: 3, sge: NOTHING });
    let mut want = Vec::new();
    for (id, result) in [(2, late), (3, recv)] {
        match result {
            Ok(()) => want.push((id, WcStatus::WrFlushErr)),
            Err(e) => assert_eq!(e, PostError::State(QpState::Error)),
        }
    }
    p.settle();
    p.wait(want.len(), 0);
    let got: Vec<_> = p.a.got.drain(..).map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(got, want);
    assert!(to.all().iter().all(|&b| b == 0));
}

/// `connect` is legal once, and only to what this provider made; an endpoint is checked, whatever it holds.
pub fn connecting_twice_or_to_nonsense(bed: &Bed) {
    let device = bed.device();
    let mut p = bed.pair_on(&device, QpCaps::default());
    let eb = p.b.cq.qp(p.b.qp).endpoint();
    assert!(p.a.cq.qp(p.a.qp).connect(&eb).is_err(), "connected twice");
    p.ping();
    let mut lone = Side::new("lone", &device, QpCaps::default(), false);
    for bytes in [[0u8; railhead::fabric::ENDPOINT_SIZE], [0xFF; railhead::fabric::ENDPOINT_SIZE]] {
        assert!(lone.cq.qp(lone.qp).connect(&Endpoint(bytes)).is_err(), "connected to nonsense");
    }
    // One byte wrong anywhere: refused, or never connected; no crash, and the pair whose endpoint it was goes on.
    for at in 0..railhead::fabric::ENDPOINT_SIZE {
        let mut side = Side::new("flipped", &device, QpCaps::default(), false);
        let mut wrong = eb;
        wrong.0[at] ^= 0x41;
        let _ = side.cq.qp(side.qp).connect(&wrong);
        for _ in 0..5 {
            side.poll();
            p.poll();
        }
    }
    p.ping();
}

/// What a's outstanding requests and receives must come to when b is gone.
fn dead_peer(a: &mut Side, sends: u64) {
    a.wait(sends as usize + 2);
    let sent: Vec<_> = a.got.iter().filter(|c| c.wr_id < 1000).map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(sent[0], (0, WcStatus::RetryExcErr), "the oldest says that the peer is gone: {:?}", a.cq.qp(a.qp).error());
    assert_eq!(sent[1..], (1..sends).map(|i| (i, WcStatus::WrFlushErr)).collect::<Vec<_>>());
    let recvs: Vec<_> = a.got.iter().filter(|c| c.wr_id >= 1000).map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(recvs, [(1000, WcStatus::WrFlushErr), (1001, WcStatus::WrFlushErr)]);
    assert_eq!(a.state(), QpState::Error);
}

/// Sends of all kinds that cannot complete, as b posts no receive, and two receives.
fn load(p: &mut Pair) -> u64 {
    let local = p.a.open_memory(300_000);
    let to = p.b.open_memory(300_000);
    p.a.recv(1000, NOTHING);
    p.a.recv(1001, NOTHING);
    p.a.send(Request::send(0, local.sge(0, 300_000)));
    for i in 1..20 {
        let opcode = [Opcode::Write, Opcode::Read, Opcode::Send, Opcode::WriteWithImm][i as usize % 4];
        p.a.send(SendWr { opcode, ..Request::write(i, local.sge(0, 1000 * i as usize), &to, 0) });
    }
    p.settle();
    assert!(p.a.got.is_empty());
    // Nothing of it may be touched any more once b is gone; a's completions tell when its own memory is free.
    std::mem::forget(local);
    drop(to);
    20
}

/// b destroys its queue pair.
pub fn peer_destroyed(bed: &Bed) {
    let mut p = bed.pair();
    let n = load(&mut p);
    p.b.cq.destroy_qp(p.b.qp);
    p.b.cq.poll(&mut []);
    dead_peer(&mut p.a, n);
}

/// b drops the whole completion queue.
pub fn peer_queue_dropped(bed: &Bed) {
    let mut p = bed.pair();
    let n = load(&mut p);
    let Pair { mut a, b } = p;
    drop(b);
    dead_peer(&mut a, n);
}

/// b goes away without ever having connected, while a's work waits for it.
pub fn peer_destroyed_before_connect(bed: &Bed) {
    let device = bed.device();
    let mut a = Side::new("a", &device, QpCaps::default(), false);
    let mut b = Side::new("b", &device, QpCaps::default(), false);
    let eb = b.cq.qp(b.qp).endpoint();
    let local = a.open_memory(4096);
    let to = b.open_memory(4096);
    a.cq.qp(a.qp).connect(&eb).expect("connect");
    a.recv(1000, NOTHING);
    a.recv(1001, NOTHING);
    for i in 0..5 {
        a.send(Request::write(i, local.sge(0, 64), &to, 0));
    }
    for _ in 0..200 {
        a.poll();
        b.poll();
    }
    assert!(a.got.is_empty());
    drop(to);
    drop(b);
    dead_peer(&mut a, 5);
}

/// A side with receives only, and nothing to say, is told as well.
pub fn peer_destroyed_with_nothing_outstanding(bed: &Bed) {
    if bed.waives("error::peer_destroyed_with_nothing_outstanding", SILENT) {
        return;
    }
    let mut p = bed.pair();
    p.ping();
    p.ping_back();
    p.a.recv(1000, NOTHING);
    p.a.recv(1001, NOTHING);
    let Pair { mut a, b } = p;
    drop(b);
    a.wait(2);
    let got: Vec<_> = a.got.drain(..).map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(got, [(1000, WcStatus::WrFlushErr), (1001, WcStatus::WrFlushErr)]);
    assert_eq!(a.state(), QpState::Error);
}
