//! The soft fabric end to end within one process: two queue pairs of one device, over each wire.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::Arc;

use super::endpoint::Address;
use super::qp::Wire;
use super::*;
use crate::base::config::CrossMemory;
use crate::base::stats::RailCounter;

/// Two connected queue pairs, each with its queue.
struct Pair {
    cqs: [CompletionQueue; 2],
    qps: [QpId; 2],
    stats: [RailStats; 2],
}

fn pair(config: Config) -> Pair {
    pair_with(config, QpCaps::default())
}

fn pair_with(config: Config, caps: QpCaps) -> Pair {
    let config = Arc::new(Config { socket_ifname: "lo".into(), ..config });
    let device = devices(&config).unwrap().remove(0);
    let domain = device.open().unwrap();
    let stats = [RailStats::detached(), RailStats::detached()];
    let mut cqs = [domain.create_cq(false).unwrap(), domain.create_cq(false).unwrap()];
    let qps = [0, 1].map(|i: usize| cqs[i].create_qp(&caps, stats[i].clone()).unwrap());
    let ends = [cqs[0].qp(qps[0]).endpoint(), cqs[1].qp(qps[1]).endpoint()];
    cqs[0].qp(qps[0]).connect(&ends[1]).unwrap();
    cqs[1].qp(qps[1]).connect(&ends[0]).unwrap();
    Pair { cqs, qps, stats }
}

impl Pair {
    /// Polls both sides until side `want` has a completion.
    fn next(&mut self, want: usize) -> Completion {
        let mut out = [Completion { wr_id: 0, status: WcStatus::Success, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 }];
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while std::time::Instant::now() < end {
            let mut found = false;
            for side in [want, 1 - want] {
                if side == want {
                    found = self.cqs[side].poll(&mut out) == 1;
                    if found {
                        break;
                    }
                } else {
                    self.cqs[side].poll(&mut []);
                }
            }
            if found {
                return out[0];
            }
        }
        let errors = [0, 1].map(|i: usize| self.cqs[i].qp(self.qps[i]).error().map(str::to_string));
        panic!("no completion; errors: {errors:?}");
    }
}

fn register(bytes: &mut [u8]) -> MemoryRegion {
    // SAFETY: the tests keep the bytes alive, and look at them only when nothing is in flight.
    let memory = unsafe { UserMemory::new(bytes.as_mut_ptr(), bytes.len()) };
    MemoryRegion::register(memory, Access::all()).unwrap()
}

fn moves_every_size(config: Config, via: &[RailCounter]) {
    let mut pair = pair(config);
    let mut from = vec![0u8; 3 << 20];
    let mut to = vec![0u8; 3 << 20];
    let (send, recv) = (register(&mut from), register(&mut to));
    for (n, len) in [0usize, 1, 8, 31, 32, 33, 64, 100, 4096, 8192, 8193, 65_537, 1 << 20, 3 << 20].into_iter().enumerate() {
        for (i, byte) in from[..len].iter_mut().enumerate() {
            *byte = (i * 7 + n) as u8;
        }
        to.fill(0xee);
        pair.cqs[1].qp(pair.qps[1]).post_recv(&RecvWr { wr_id: 5, ..RecvWr::default() }).unwrap();
        let sge = Sge { addr: from.as_ptr() as u64, len: len as u32, lkey: send.lkey() };
        let request = SendWr {
            wr_id: 9,
            opcode: Opcode::WriteWithImm,
            payload: Payload::Sge(sge),
            remote_addr: to.as_ptr() as u64,
            rkey: recv.rkey(),
            imm: n as u32,
            signaled: true,
            when_sent: false,
        };
        pair.cqs[0].qp(pair.qps[0]).post_send(&[request]).unwrap();
        let got = pair.next(1);
        assert_eq!((got.wr_id, got.status, got.imm), (5, WcStatus::Success, Some(n as u32)), "{len} bytes");
        assert_eq!(got.byte_len as usize, len);
        let done = pair.next(0);
        assert_eq!((done.wr_id, done.status), (9, WcStatus::Success), "{len} bytes");
        assert_eq!(to[..len], from[..len], "{len} bytes");
        assert!(to[len..].iter().all(|b| *b == 0xee), "{len} bytes spilled");
        // And back, by a READ.
        let mut back = vec![0u8; len.max(1)];
        let local = register(&mut back);
        let request = SendWr {
            wr_id: 11,
            opcode: Opcode::Read,
            payload: Payload::Sge(Sge { addr: back.as_ptr() as u64, len: len as u32, lkey: local.lkey() }),
            remote_addr: to.as_ptr() as u64,
            rkey: recv.rkey(),
            imm: 0,
            signaled: true,
            when_sent: false,
        };
        pair.cqs[0].qp(pair.qps[0]).post_send(&[request]).unwrap();
        let read = pair.next(0);
        assert_eq!((read.wr_id, read.status, read.byte_len as usize), (11, WcStatus::Success, len));
        assert_eq!(back[..len], to[..len], "READ of {len} bytes");
    }
    for counter in via {
        assert!(pair.stats[1].get(*counter) > 0, "nothing moved by {counter:?}");
    }
}

/// A buffer smaller than a segment of the loopback makes nothing wait for the timers of the kernel.
#[test]
fn small_buffers_hold_up_nothing() {
    let config = Config { soft_wire: TCP, tcp_streams: 1, tcp_buffer_kib: 16, ..Config::default() };
    let mut pair = pair(config);
    let (mut from, mut to) = (vec![1u8; 8 << 20], vec![0u8; 8 << 20]);
    let (send, recv) = (register(&mut from), register(&mut to));
    let sge = Sge { addr: from.as_ptr() as u64, len: from.len() as u32, lkey: send.lkey() };
    let (remote_addr, rkey) = (to.as_ptr() as u64, recv.rkey());
    let long =
        SendWr { wr_id: 1, opcode: Opcode::Write, payload: Payload::Sge(sge), remote_addr, rkey, imm: 0, signaled: true, when_sent: false };
    let (start, qp) = (std::time::Instant::now(), pair.qps[0]);
    pair.cqs[0].qp(qp).post_send(&[long]).unwrap();
    assert_eq!(pair.next(0).wr_id, 1);
    assert!(start.elapsed() < std::time::Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(to, from);
}

#[test]
fn shared_memory_moves_every_size() {
    moves_every_size(
        Config { cma: CrossMemory::Always, ..Config::default() },
        &[RailCounter::RxInline, RailCounter::RxBounce, RailCounter::RxCma],
    );
}

#[test]
fn the_bounce_ring_moves_every_size() {
    moves_every_size(Config { cma: CrossMemory::Never, ..Config::default() }, &[RailCounter::RxInline, RailCounter::RxBounce]);
}

#[test]
fn tcp_moves_every_size() {
    moves_every_size(Config { soft_wire: crate::base::config::SoftWire::Tcp, ..Config::default() }, &[RailCounter::RxTcp]);
}

#[test]
fn tcp_with_data_streams_moves_every_size() {
    let config = Config { soft_wire: crate::base::config::SoftWire::Tcp, tcp_streams: 3, ..Config::default() };
    moves_every_size(config, &[RailCounter::RxTcp]);
}

#[test]
fn the_traffic_class_is_on_every_stream() {
    let config = Config { soft_wire: crate::base::config::SoftWire::Tcp, tcp_streams: 2, ..Config::default() };
    let mut pair = pair_with(config, QpCaps { traffic_class: Some(0x68), ..QpCaps::default() });
    let connected = |pair: &mut Pair| {
        for cq in &mut pair.cqs {
            cq.poll(&mut []);
        }
        (0..2).all(|i| pair.cqs[i].qp(pair.qps[i]).connected())
    };
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !connected(&mut pair) {
        assert!(std::time::Instant::now() < end);
    }
    for i in 0..2 {
        let Wire::Tcp(wire) = &pair.cqs[i].qp(pair.qps[i]).wire else { panic!("not on TCP") };
        let fds: Vec<RawFd> = wire.fds().map(|(fd, _)| fd).collect();
        assert_eq!(fds.len(), 3);
        for fd in fds {
            // SAFETY: the wire keeps the descriptor open meanwhile.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            assert_eq!(socket2::SockRef::from(&fd).tos_v4().unwrap(), 0x68);
        }
    }
}

const TCP: crate::base::config::SoftWire = crate::base::config::SoftWire::Tcp;

/// Two queue pairs that are not connected. Number 0 is the one that will dial.
fn unconnected(config: Config, notify: bool) -> (Domain, CompletionQueue, [QpId; 2], [Address; 2]) {
    let config = Arc::new(Config { socket_ifname: "lo".into(), ..config });
    let domain = devices(&config).unwrap().remove(0).open().unwrap();
    let mut cq = domain.create_cq(notify).unwrap();
    let mut qps = [0, 1].map(|_| cq.create_qp(&QpCaps::default(), RailStats::detached()).unwrap());
    let mut ends = qps.map(|qp| Address::decode(&cq.qp(qp).endpoint()).unwrap());
    if ends[0].token > ends[1].token {
        qps.swap(0, 1);
        ends.swap(0, 1);
    }
    (domain, cq, qps, ends)
}

fn dialed(from: &Address, to: &Address) -> OwnedFd {
    let socket = sockets::connect_tcp(from, to, 0).unwrap();
    while !sockets::connected(&socket).unwrap() {
        std::thread::yield_now();
    }
    socket.convert()
}

#[track_caller]
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !holds() {
        assert!(std::time::Instant::now() < end, "never: {what}");
    }
}

fn readable(fd: RawFd, ms: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&mut poll, 1, ms) == 1 }
}

fn drain(cq: &mut CompletionQueue) {
    cq.arm().unwrap();
    let mut out = [Completion { wr_id: 0, status: WcStatus::Success, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 }; 4];
    while cq.poll(&mut out) > 0 {}
}

#[test]
fn a_burst_of_ranks_does_not_push_itself_out() {
    let config = Arc::new(Config { socket_ifname: "lo".into(), soft_wire: TCP, tcp_streams: 8, max_half_open: 2, ..Config::default() });
    let domain = devices(&config).unwrap().remove(0).open().unwrap();
    let mut cqs = [0, 1].map(|_| domain.create_cq(false).unwrap());
    let pairs: Vec<_> =
        (0..8).map(|_| [0, 1].map(|i: usize| cqs[i].create_qp(&QpCaps::default(), RailStats::detached()).unwrap())).collect();
    for pair in &pairs {
        let ends = [0, 1].map(|i: usize| cqs[i].qp(pair[i]).endpoint());
        cqs[0].qp(pair[0]).connect(&ends[1]).unwrap();
        cqs[1].qp(pair[1]).connect(&ends[0]).unwrap();
    }
    eventually("all pairs connected", || {
        for cq in &mut cqs {
            for _ in 0..300 {
                cq.poll(&mut []);
            }
        }
        pairs.iter().all(|pair| {
            [0, 1].into_iter().all(|i: usize| {
                let qp = cqs[i].qp(pair[i]);
                assert_eq!(qp.error(), None);
                qp.connected()
            })
        })
    });
}

#[test]
fn a_dialer_that_dies_before_its_data_streams_is_noticed() {
    let (_domain, mut cq, qps, ends) = unconnected(Config { soft_wire: TCP, tcp_streams: 2, ..Config::default() }, false);
    cq.qp(qps[1]).connect(&ends[0].encode()).unwrap();
    let control = dialed(&ends[0], &ends[1]);
    dial::send_hello(&control, &ends[0], &ends[1], endpoint::Offer::Tcp, None).unwrap();
    eventually("an answer", || {
        cq.poll(&mut []);
        readable(control.as_raw_fd(), 0)
    });
    drop(control);
    eventually("ERROR", || {
        cq.poll(&mut []);
        cq.qp(qps[1]).state() == QpState::Error
    });
}

/// Though the system says so: it has nothing to do with what this process has left.
#[test]
fn an_offer_that_is_gone_is_refused_and_no_lack() {
    let config = Config { soft_wire: crate::base::config::SoftWire::Shm, ..Config::default() };
    let (_domain, mut cq, qps, ends) = unconnected(config, false);
    cq.qp(qps[1]).connect(&ends[0].encode()).unwrap();
    let control = dialed(&ends[0], &ends[1]);
    let gone = endpoint::Offer::Named(1 << 20, "railhead-0123456789abcdef0123456789abcdef".into());
    let hello = dial::send_hello(&control, &ends[0], &ends[1], gone, None).unwrap();
    eventually("an answer", || {
        cq.poll(&mut []);
        readable(control.as_raw_fd(), 0)
    });
    let mut reply = [0; endpoint::REPLY_SIZE];
    assert_eq!(shm::recv_with_fd(&control, &mut reply).unwrap().0, reply.len());
    assert_eq!(endpoint::Reply::decode(&reply, &ends[0].token, &hello), Some(endpoint::Reply::Refused(0)));
    assert_eq!(cq.qp(qps[1]).error(), None);
}

/// Accepts streams at a listener of the test's own, in place of the hub of queue pair 1 of [`unconnected`].
struct Stand(std::net::TcpListener);

impl Stand {
    /// A listener, and queue pair 1's address with it in place of its hub.
    fn new(of: &Address) -> (Stand, Address) {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let addr = listener.local_addr().unwrap();
        (Stand(listener), Address { addr, ..of.clone() })
    }

    /// The next stream and its Hello, while `poll` goes on.
    #[track_caller]
    fn accept(&self, mut poll: impl FnMut()) -> (std::net::TcpStream, [u8; endpoint::HELLO_SIZE]) {
        let (mut stream, mut hello) = (None, [0; endpoint::HELLO_SIZE]);
        eventually("a stream", || {
            poll();
            stream = self.0.accept().ok();
            stream.is_some()
        });
        let (mut stream, _) = stream.unwrap();
        stream.set_nonblocking(false).unwrap();
        stream.read_exact(&mut hello).unwrap();
        (stream, hello)
    }
}

#[test]
fn every_data_stream_is_confirmed_and_a_closed_one_dialed_again() {
    let (_domain, mut cq, qps, ends) = unconnected(Config { soft_wire: TCP, tcp_streams: 2, ..Config::default() }, false);
    let (stand, peer) = Stand::new(&ends[1]);
    cq.qp(qps[0]).connect(&peer.encode()).unwrap();
    let (mut control, hello) = stand.accept(|| _ = cq.poll(&mut []));
    control.write_all(&endpoint::Reply::Tcp(2).encode(&ends[0].token, &hello)).unwrap();
    let mut streams: Vec<_> = (0..2).map(|_| stand.accept(|| _ = cq.poll(&mut []))).collect();
    let number = |hello: &[u8; endpoint::HELLO_SIZE]| match endpoint::Hello::decode(hello, &ends[1].token).unwrap().offer {
        endpoint::Offer::Data(number) => number,
        other => panic!("{other:?}"),
    };
    assert_ne!(number(&streams[0].1), number(&streams[1].1));
    for _ in 0..100 {
        cq.poll(&mut []);
    }
    assert!(!cq.qp(qps[0]).connected(), "the peer has confirmed nothing");
    // The hub drops one before it has read its Hello.
    let lost = streams.remove(0);
    drop(lost.0);
    streams.push(stand.accept(|| _ = cq.poll(&mut [])));
    assert_eq!(number(&streams[1].1), number(&lost.1));
    assert_ne!(streams[1].1, lost.1, "a Hello of its own");
    for (stream, hello) in &mut streams {
        assert!(!cq.qp(qps[0]).connected());
        stream.write_all(&endpoint::Reply::Tcp(number(hello)).encode(&ends[0].token, hello)).unwrap();
    }
    eventually("all streams", || {
        cq.poll(&mut []);
        assert_eq!(cq.qp(qps[0]).error(), None);
        cq.qp(qps[0]).connected()
    });
}

#[test]
fn drops_that_have_nothing_to_do_with_each_other_do_not_end_a_dial() {
    let (_domain, mut cq, qps, ends) = unconnected(Config { soft_wire: TCP, ..Config::default() }, false);
    let (stand, peer) = Stand::new(&ends[1]);
    cq.qp(qps[0]).connect(&peer.encode()).unwrap();
    drop(stand.accept(|| _ = cq.poll(&mut [])));
    // The second is kept for longer than a dial may fail, and then lost as well.
    let kept = stand.accept(|| _ = cq.poll(&mut []));
    let end = std::time::Instant::now() + std::time::Duration::from_millis(5200);
    while std::time::Instant::now() < end {
        (0..20).for_each(|_| _ = cq.poll(&mut []));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(kept);
    let (mut control, hello) = stand.accept(|| {
        cq.poll(&mut []);
        assert_eq!(cq.qp(qps[0]).error(), None);
    });
    control.write_all(&endpoint::Reply::Tcp(0).encode(&ends[0].token, &hello)).unwrap();
    eventually("the wire", || {
        cq.poll(&mut []);
        cq.qp(qps[0]).connected()
    });
}

#[test]
fn data_streams_that_do_not_come_are_not_waited_for_without_end() {
    let config = Config { soft_wire: TCP, tcp_streams: 2, handshake_timeout_s: 1, ..Config::default() };
    let (_domain, mut cq, qps, ends) = unconnected(config, false);
    cq.qp(qps[1]).connect(&ends[0].encode()).unwrap();
    let control = dialed(&ends[0], &ends[1]);
    dial::send_hello(&control, &ends[0], &ends[1], endpoint::Offer::Tcp, None).unwrap();
    eventually("ERROR", || {
        cq.poll(&mut []);
        cq.qp(qps[1]).state() == QpState::Error
    });
    assert!(cq.qp(qps[1]).error().unwrap().contains("RAILHEAD_HANDSHAKE_TIMEOUT_S"));
}

#[test]
fn silent_streams_do_not_push_out_one_with_part_of_a_hello() {
    let (_domain, mut cq, qps, ends) = unconnected(Config { soft_wire: TCP, max_half_open: 4, ..Config::default() }, false);
    cq.qp(qps[1]).connect(&ends[0].encode()).unwrap();
    let hello = endpoint::Hello { to: ends[1].qpn, from: ends[0].qpn, nonce: [1; 16], offer: endpoint::Offer::Tcp }.encode(&ends[1].token);
    let mut slow: crate::base::fd::TcpStream = dialed(&ends[0], &ends[1]).convert();
    slow.write_all(&hello[..50]).unwrap();
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.extend((0..4).map(|_| dialed(&ends[0], &ends[1])));
        (0..20).for_each(|_| _ = cq.poll(&mut []));
    }
    assert!(silent.iter().filter(|stream| !sockets::closed(stream)).count() <= 4);
    slow.write_all(&hello[50..]).unwrap();
    eventually("the end of a slow Hello", || {
        cq.poll(&mut []);
        cq.qp(qps[1]).connected()
    });
}

#[test]
fn a_peer_with_the_token_gets_in_through_a_flood() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
    use std::time::{Duration, Instant};
    let (_domain, mut cq, qps, ends) = unconnected(Config { soft_wire: TCP, tcp_streams: 4, ..Config::default() }, false);
    let (stop, opened) = (AtomicBool::new(false), AtomicU64::new(0));
    let took = std::thread::scope(|scope| {
        scope.spawn(|| {
            // 5000 silent connections a second, of which the last are kept open.
            let (start, mut open) = (Instant::now(), VecDeque::new());
            while !stop.load(Relaxed) {
                let due = start.elapsed().as_micros() as u64 / 200;
                while opened.load(Relaxed) < due && !stop.load(Relaxed) {
                    let Ok(socket) = sockets::connect_tcp(&ends[0], &ends[1], 0) else { break };
                    // No port stays behind.
                    socket.set_linger(Some(Duration::ZERO)).unwrap();
                    open.push_back(socket);
                    if open.len() > 300 {
                        open.pop_front();
                    }
                    opened.fetch_add(1, Relaxed);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        // Nobody serves the hub while the backlog fills.
        eventually("a flood", || opened.load(Relaxed) > 500);
        let start = Instant::now();
        cq.qp(qps[0]).connect(&ends[1].encode()).unwrap();
        cq.qp(qps[1]).connect(&ends[0].encode()).unwrap();
        let connected = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually("both connected", || {
                cq.poll(&mut []);
                assert_eq!(qps.map(|qp| cq.qp(qp).error().map(str::to_owned)), [None, None]);
                qps.iter().all(|qp| cq.qp(*qp).connected())
            })
        }));
        stop.store(true, Relaxed);
        connected.map(|()| start.elapsed())
    });
    assert!(took.unwrap() < Duration::from_secs(5));
}

#[test]
fn a_queue_pair_in_error_keeps_no_dialer_waiting() {
    let (_domain, mut cq, qps, ends) = unconnected(Config { soft_wire: TCP, ..Config::default() }, false);
    let control = dialed(&ends[0], &ends[1]);
    dial::send_hello(&control, &ends[0], &ends[1], endpoint::Offer::Tcp, None).unwrap();
    // A third one serves the hub: by now the stream is pending for a queue pair that will never take it.
    let third = cq.create_qp(&QpCaps::default(), RailStats::detached()).unwrap();
    cq.qp(third).connect(&ends[0].encode()).unwrap();
    for _ in 0..100 {
        cq.poll(&mut []);
    }
    cq.qp(qps[1]).set_error();
    eventually("the end of the stream", || sockets::closed(&control));
}

#[test]
fn a_hello_that_comes_late_wakes_a_sleeper() {
    let (domain, mut cq, qps, ends) = unconnected(Config { soft_wire: TCP, ..Config::default() }, true);
    let fd = domain.notification_fd().unwrap();
    cq.qp(qps[1]).connect(&ends[0].encode()).unwrap();
    drain(&mut cq);
    let control = dialed(&ends[0], &ends[1]);
    assert!(readable(fd, 2000), "a stream woke nobody");
    drain(&mut cq);
    assert!(!readable(fd, 20), "nothing to do, and yet awake");
    dial::send_hello(&control, &ends[0], &ends[1], endpoint::Offer::Tcp, None).unwrap();
    assert!(readable(fd, 2000), "a Hello woke nobody");
    drain(&mut cq);
    assert!(cq.qp(qps[1]).connected());
}

#[test]
fn unauthenticated_streams_and_checks_do_not_keep_sleepers_awake() {
    let (domain, mut cq, qps, ends) = unconnected(Config { soft_wire: TCP, ..Config::default() }, true);
    let fd = domain.notification_fd().unwrap();
    cq.qp(qps[1]).connect(&ends[0].encode()).unwrap();
    drain(&mut cq);
    let check = dialed(&ends[1], &ends[0]);
    dial::send_hello(&check, &ends[1], &ends[0], endpoint::Offer::Check, None).unwrap();
    assert!(readable(fd, 2000));
    // The wake-up of a stream may come twice, once with its Hello.
    (0..3).for_each(|_| drain(&mut cq));
    assert!(!readable(fd, 20), "a check keeps everybody awake");
    cq.qp(qps[0]).connect(&ends[1].encode()).unwrap();
    eventually("both connected", || {
        drain(&mut cq);
        cq.qp(qps[0]).connected() && cq.qp(qps[1]).connected()
    });
    drain(&mut cq);
    for _ in 0..3 {
        drop(dialed(&ends[1], &ends[0]));
    }
    assert!(readable(fd, 2000));
    drain(&mut cq);
    assert!(!readable(fd, 20), "an unauthenticated stream keeps everybody awake");
}
