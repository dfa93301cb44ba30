//! Messages on a healthy comm.

use super::*;
use crate::link::limits::MAX_REQUESTS;

/// One message of each size there and checked.
fn sizes(pair: &mut Pair, sizes: &[usize]) {
    let most = sizes.iter().copied().max().unwrap();
    let (from, to) = (pair.buffer(most + 64), pair.buffer(most + 64));
    for (seed, &len) in sizes.iter().enumerate() {
        let seed = seed as u32 + 1;
        from.fill(0, len, seed);
        let recv = pair.irecv(&[to.recv(0, len, 7)]);
        let send = pair.isend(&from, 0, len, 7);
        assert_eq!(pair.received(recv), [len]);
        assert_eq!(pair.stripe_completed(send), len);
        to.check(0, len, seed);
    }
}

const SIZES: &[usize] = &[
    0,
    1,
    7,
    8,
    63,
    64,
    65,
    127,
    128,
    129,
    4095,
    4096,
    4097,
    65535,
    65536,
    65537,
    1 << 20,
    (1 << 20) + 1,
    (1 << 23) - 1,
    1 << 23,
    (1 << 23) + 129,
];

#[test]
fn every_size_on_one_lane() {
    sizes(&mut Pair::new(&net(config()), 0), SIZES);
}

#[test]
fn every_size_on_four_queue_pairs() {
    sizes(&mut Pair::new(&net(Config { qps_per_rail: 4, ..config() }), 0), SIZES);
}

#[test]
fn every_size_on_two_rails_of_three_queue_pairs() {
    let net = net(Config { qps_per_rail: 3, split_min: 128, ..config() });
    let dev = many_rails(&net, 2);
    sizes(&mut Pair::new(&net, dev), SIZES);
}

#[test]
fn every_size_over_tcp() {
    let config = Config { soft_wire: crate::base::config::SoftWire::Tcp, qps_per_rail: 2, ..config() };
    sizes(&mut Pair::new(&net(config), 0), SIZES);
}

#[test]
fn ends_with_different_numbers_of_rails_and_queue_pairs_use_the_fewer() {
    let (many, few) = (net(Config { qps_per_rail: 4, ..config() }), net(Config { qps_per_rail: 2, ..config() }));
    let wide = many_rails(&many, 3);
    for (from, from_dev, to, to_dev) in [(&many, wide, &few, 0), (&few, 0, &many, wide)] {
        let (mut listen, mut handle) = to.listen(to_dev).unwrap();
        let (mut send, mut recv) = (None, None);
        within("handshake", || {
            if send.is_none() {
                send = from.connect(from_dev, None, &mut handle, Mode::NonBlocking).unwrap();
            }
            recv = recv.take().or_else(|| listen.accept(Mode::NonBlocking).unwrap());
            (send.is_some() && recv.is_some()).then_some(())
        });
        let (mut send, mut recv) = (send.unwrap(), recv.unwrap());
        assert_eq!((send.qps_for_test(), recv.qps_for_test()), (2, 2));
        let (source, target) = (Buffer::new(from, from_dev, 1 << 20), Buffer::new(to, to_dev, 1 << 20));
        source.fill(0, 1 << 20, 5);
        let r = recv.irecv(&[target.recv(0, 1 << 20, 0)]).unwrap().unwrap();
        let s = within("isend", || {
            recv.poll_for_test();
            send.isend(source.addr(), 1 << 20, 0, source.mr).unwrap()
        });
        within("both", || {
            let got = recv.test(r).unwrap();
            send.poll_for_test();
            got
        });
        within("send", || {
            recv.poll_for_test();
            send.test(s).unwrap()
        });
        target.check(0, 1 << 20, 5);
    }
}

#[test]
fn a_send_longer_than_its_receive_is_clamped() {
    let mut pair = Pair::new(&net(Config { qps_per_rail: 2, ..config() }), 0);
    let (from, to) = (pair.buffer(1 << 20), pair.buffer(1 << 20));
    for (room, len) in [(100, 200), (0, 5), (70_000, 200_000), (200, 100)] {
        from.fill(0, len, 9);
        to.fill(0, 1 << 20, 10);
        let recv = pair.irecv(&[to.recv(0, room, 1)]);
        let send = pair.isend(&from, 0, len, 1);
        let moved = room.min(len);
        assert_eq!(pair.received(recv), [moved]);
        assert_eq!(pair.stripe_completed(send), moved);
        let mut got = vec![0; len + 64];
        to.pages.read(0, &mut got);
        assert!(got[..moved] == pattern(len, 9)[..moved]);
        assert!(got[moved..] == pattern(1 << 20, 10)[moved..len + 64]);
    }
}

/// Groups of n = 1..=8 with sizes from 0, sends in an order of their own.
#[test]
fn groups_with_permuted_and_repeated_tags() {
    let mut pair = Pair::new(&net(Config { qps_per_rail: 2, split_min: 1024, ..config() }), 0);
    let (from, to) = (pair.buffer(1 << 20), pair.buffer(1 << 20));
    let mut seed = 0u32;
    for n in 1..=8usize {
        for turn in 0..n {
            for repeated in [false, true] {
                let tag = |i: usize| if repeated { (i / 2) as i32 } else { 100 + i as i32 };
                let len = |i: usize| [0, 1, 64, 4096, 5000, 70_000, 128, 3][(i + turn) % 8];
                let group: Vec<_> = (0..n).map(|i| to.recv(i << 17, len(i), tag(i))).collect();
                let recv = pair.irecv(&group);
                let mut sends = Vec::new();
                // Repeated tags go to the first unused slot of the tag, so those must come in order.
                let order: Vec<usize> = if repeated { (0..n).collect() } else { (0..n).map(|i| (i * 5 + turn) % n).collect() };
                let mut seen = vec![false; n];
                let order: Vec<usize> = order.into_iter().chain(0..n).filter(|&i| !std::mem::replace(&mut seen[i], true)).collect();
                for &i in &order {
                    from.fill(i << 17, len(i), seed + i as u32);
                    sends.push((i, pair.isend(&from, i << 17, len(i), tag(i))));
                }
                for (i, send) in sends.into_iter().rev() {
                    assert_eq!(pair.stripe_completed(send), len(i));
                }
                assert_eq!(pair.received(recv), (0..n).map(len).collect::<Vec<_>>());
                for i in 0..n {
                    to.check(i << 17, len(i), seed + i as u32);
                }
                seed += 8;
            }
        }
    }
}

#[test]
fn a_send_of_a_group_completes_while_another_is_withheld() {
    let mut pair = Pair::new(&net(config()), 0);
    let (from, to) = (pair.buffer(4096), pair.buffer(4096));
    from.fill(0, 4096, 3);
    let recv = pair.irecv(&[to.recv(0, 100, 1), to.recv(1000, 100, 2), to.recv(2000, 100, 3)]);
    let first = pair.isend(&from, 2000, 100, 3);
    let second = pair.isend(&from, 0, 100, 1);
    assert_eq!(pair.stripe_completed(first), 100);
    assert_eq!(pair.stripe_completed(second), 100);
    // The tag is used up.
    assert!(pair.send.isend(from.addr(), 100, 3, from.mr).unwrap().is_none());
    assert!(pair.recv.test(recv).unwrap().is_none());
    let last = pair.isend(&from, 1000, 100, 2);
    assert_eq!(pair.received(recv), [100, 100, 100]);
    assert_eq!(pair.stripe_completed(last), 100);
    for at in [0, 1000, 2000] {
        let mut got = vec![0; 100];
        to.pages.read(at, &mut got);
        assert!(got == pattern(4096, 3)[at..at + 100]);
    }
}

/// As many requests as a comm has, tested in an order that no queue has.
#[test]
fn all_256_requests_outstanding_over_three_laps() {
    let mut pair = Pair::new(&net(Config { qps_per_rail: 2, ..config() }), 0);
    let (from, to) = (pair.buffer(256 * 512), pair.buffer(256 * 512));
    for lap in 0..3u32 {
        let recvs: Vec<_> = (0..256).map(|i| pair.irecv(&[to.recv(i * 512, 512, i as i32)])).collect();
        assert!(pair.recv.irecv(&[to.recv(0, 1, 0)]).unwrap().is_none(), "a 257th receive");
        let sends: Vec<_> = (0..256)
            .map(|i| {
                from.fill(i * 512, 2 * i, lap * 256 + i as u32);
                pair.isend(&from, i * 512, 2 * i, i as i32)
            })
            .collect();
        for i in (0..256).map(|i| i * 77 % 256) {
            assert_eq!(pair.stripe_completed(sends[i]), 2 * i);
            assert_eq!(pair.received(recvs[255 - i]), [2 * (255 - i)]);
        }
        for i in 0..256 {
            to.check(i * 512, 2 * i, lap * 256 + i as u32);
        }
    }
}

#[test]
fn thirty_two_groups_of_eight_over_three_laps() {
    let mut pair = Pair::new(&net(config()), 0);
    let (from, to) = (pair.buffer(256 * 256), pair.buffer(256 * 256));
    for lap in 0..3u32 {
        let recvs: Vec<_> = (0..32usize)
            .map(|g| {
                let group: Vec<_> = (0..8).map(|i| to.recv((g * 8 + i) * 256, 256, i as i32)).collect();
                pair.irecv(&group)
            })
            .collect();
        assert!(pair.recv.irecv(&[to.recv(0, 1, 0)]).unwrap().is_none(), "a 257th slot");
        let mut sends = Vec::new();
        for g in 0..32 {
            for i in (0..8).rev() {
                let k = g * 8 + i;
                from.fill(k * 256, k, lap * 1000 + k as u32);
                sends.push((k, pair.isend(&from, k * 256, k, i as i32)));
            }
        }
        for (g, recv) in recvs.into_iter().enumerate().rev() {
            assert_eq!(pair.received(recv), (0..8).map(|i| g * 8 + i).collect::<Vec<_>>());
        }
        for (k, send) in sends {
            assert_eq!(pair.stripe_completed(send), k);
            to.check(k * 256, k, lap * 1000 + k as u32);
        }
    }
}

#[test]
fn a_finished_request_cannot_be_tested_again() {
    let mut pair = Pair::new(&net(config()), 0);
    let buffer = pair.buffer(100);
    let recv = pair.irecv(&[buffer.recv(0, 10, 0)]);
    let send = pair.isend(&buffer, 0, 10, 0);
    pair.stripe_completed(send);
    pair.received(recv);
    assert!(matches!(pair.send.test(send), Err(Error::Internal(_))));
    assert!(matches!(pair.recv.test(recv), Err(Error::Internal(_))));
    assert!(matches!(pair.recv.test(RequestId(77)), Err(Error::Internal(_))));
    // The comm is none the worse for it.
    let recv = pair.irecv(&[buffer.recv(0, 10, 0)]);
    let send = pair.isend(&buffer, 0, 10, 0);
    pair.stripe_completed(send);
    pair.received(recv);
}

#[test]
fn memory_must_be_registered_and_covered() {
    let net = net(config());
    let mut pair = Pair::new(&net, 0);
    let buffer = pair.buffer(4096);
    let _ = pair.irecv(&[buffer.recv(0, 4096, 0)]);
    let bad = [
        (buffer.addr(), 4096, MrHandle(12345)),
        (buffer.addr() + 1, 4096, buffer.mr),
        (buffer.addr() - 1, 1, buffer.mr),
        (8, 1, MrHandle(0)),
    ];
    for (addr, len, mr) in bad {
        assert!(matches!(pair.send.isend(addr, len, 0, mr), Err(Error::Internal(_))));
        assert!(matches!(pair.recv.irecv(&[RecvBuffer { addr, len, tag: 0, mr }]), Err(Error::Internal(_))));
        assert!(matches!(pair.recv.iflush(&[RecvBuffer { addr, len, tag: 0, mr }]), Err(Error::Internal(_))));
    }
    assert!(matches!(pair.send.isend(buffer.addr(), MAX_MESSAGE + 1, 0, buffer.mr), Err(Error::Usage(_))));
    assert!(matches!(pair.recv.irecv(&[buffer.recv(0, MAX_MESSAGE + 1, 0)]), Err(Error::Usage(_))));
    assert!(matches!(pair.recv.irecv(&[]), Err(Error::Internal(_))));
    assert!(matches!(pair.recv.irecv(&[buffer.recv(0, 1, 0); 9]), Err(Error::Internal(_))));
    assert!(pair.recv.iflush(&[buffer.recv(0, 10, 0)]).unwrap().is_none());
    net.deregister(0, buffer.mr).unwrap();
    assert!(matches!(net.deregister(0, buffer.mr), Err(Error::Internal(_))));
    assert!(matches!(pair.send.isend(buffer.addr(), 1, 0, buffer.mr), Err(Error::Internal(_))));
}

#[test]
fn each_registration_has_a_region_of_its_own_on_each_rail() {
    let net = net(config());
    let dev = many_rails(&net, 2);
    let pages = Pages::new(1 << 16).unwrap();
    let outer = net.register(0, pages.to_register(), MemoryKind::Host).unwrap();
    let again = net.register(0, pages.to_register(), MemoryKind::Host).unwrap();
    let keys = |mr| net.mrs.lookup("test", 0, mr, pages.addr(), 1).unwrap().rkeys();
    assert_ne!(keys(outer), keys(again));
    assert_eq!(net.mrs.counts(), (2, 2));
    let fused = net.register(dev, pages.to_register(), MemoryKind::Host).unwrap();
    assert_eq!(net.mrs.counts(), (3, 4));
    assert!(matches!(net.deregister(0, fused), Err(Error::Internal(_))));
    net.deregister(0, outer).unwrap();
    net.deregister(dev, fused).unwrap();
    assert_eq!(net.mrs.counts(), (1, 1));
    net.deregister(0, again).unwrap();
    assert_eq!((net.mrs.counts(), net.mrs.shared_deregs()), ((0, 0), 0));
    assert!(matches!(net.register(0, pages.to_register(), MemoryKind::Device), Err(Error::Usage(_))));
}

/// The flush path of device memory, over host memory that says it is a device's.
#[test]
fn device_memory_is_flushed_by_a_read() {
    let net = net(config());
    let mut pair = Pair::new(&net, 0);
    let pages = Pages::new(4096).unwrap();
    let make = |_: usize| {
        net.physical[0].domain()?.register(pages.to_register(), Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ)
    };
    let mr = net.mrs.register(0, &[0], pages.to_register(), MemoryKind::Device, make).unwrap();
    let buffer = RecvBuffer { addr: pages.addr(), len: 4096, tag: 0, mr };
    assert!(pair.recv.iflush(&[RecvBuffer { len: 0, ..buffer }]).unwrap().is_none());
    for _ in 0..1000 {
        let flush = pair.recv.iflush(&[buffer, RecvBuffer { len: 0, ..buffer }]).unwrap().unwrap();
        let sizes = within("flush", || pair.recv.test(flush).unwrap());
        assert_eq!(sizes.n, 0);
    }
    // No request would say that there is nothing to flush.
    let all: Vec<RequestId> = (0..MAX_REQUESTS).map(|_| pair.recv.iflush(&[buffer]).unwrap().unwrap()).collect();
    assert!(matches!(pair.recv.iflush(&[buffer]), Err(Error::Usage(_))));
    for flush in all {
        within("flush", || pair.recv.test(flush).unwrap());
    }
    net.deregister(0, mr).unwrap();
}
