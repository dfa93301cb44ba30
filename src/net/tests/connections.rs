//! Making comms, in every order that NCCL's versions do it in.

use super::*;

/// One message, to see that a comm works.
fn works(send: &mut SendComm, recv: &mut RecvComm, net: &Arc<Net>, dev: usize, seed: u32) {
    works_between(send, net, recv, net, dev, seed);
}

fn works_between(send: &mut SendComm, of_send: &Net, recv: &mut RecvComm, of_recv: &Net, dev: usize, seed: u32) {
    let (from, to) = (Buffer::new(of_send, dev, 1000), Buffer::new(of_recv, dev, 1000));
    from.fill(0, 1000, seed);
    let r = recv.irecv(&[to.recv(0, 1000, 4)]).unwrap().unwrap();
    let s = within("isend", || {
        recv.poll_for_test();
        send.isend(from.addr(), 1000, 4, from.mr).unwrap()
    });
    within("receive", || {
        send.poll_for_test();
        recv.test(r).unwrap()
    });
    within("send", || {
        recv.poll_for_test();
        send.test(s).unwrap()
    });
    to.check(0, 1000, seed);
    of_send.deregister(dev, from.mr).unwrap();
    of_recv.deregister(dev, to.mr).unwrap();
}

/// NCCL 2.8: every rank connects to its neighbour, blocking, registers memory, and only then accepts.
#[test]
fn v4_ranks_connect_first_and_accept_second() {
    for ranks in [1, 2, 3, 5] {
        let nets: Vec<_> = (0..ranks).map(|_| net(config())).collect();
        let mut listens: Vec<_> = nets.iter().map(|n| n.listen(0).unwrap()).collect();
        let handles: Vec<_> = listens.iter().map(|(_, handle)| *handle).collect();
        let mut sends: Vec<_> = nets
            .iter()
            .enumerate()
            .map(|(i, n)| n.connect(0, None, &mut handles[(i + 1) % ranks].clone(), Mode::Blocking).unwrap().unwrap())
            .collect();
        let buffers: Vec<_> = nets.iter().map(|n| Buffer::new(n, 0, 100)).collect();
        for (send, buffer) in sends.iter_mut().zip(&buffers) {
            assert!(send.isend(buffer.addr(), 100, 0, buffer.mr).unwrap().is_none());
        }
        let mut recvs: Vec<_> = listens.iter_mut().map(|(listen, _)| listen.accept(Mode::Blocking).unwrap().unwrap()).collect();
        drop(listens);
        for i in 0..ranks {
            let next = (i + 1) % ranks;
            let (send, recv) = (&mut sends[i], &mut recvs[next]);
            let r = recv.irecv(&[buffers[next].recv(0, 100, 0)]).unwrap().unwrap();
            let s = within("isend", || {
                recv.poll_for_test();
                send.isend(buffers[i].addr(), 100, 0, buffers[i].mr).unwrap()
            });
            within("receive", || {
                send.poll_for_test();
                recv.test(r).unwrap()
            });
            within("send", || send.test(s).unwrap());
        }
    }
}

#[test]
fn both_ranks_connect_before_either_accepts() {
    let (a, b) = (net(config()), net(config()));
    let (mut listen_a, mut to_a) = a.listen(0).unwrap();
    let (mut listen_b, mut to_b) = b.listen(0).unwrap();
    let (mut send_a, mut send_b, mut recv_a, mut recv_b) = (None, None, None, None);
    for _ in 0..100 {
        assert!(a.connect(0, None, &mut to_b, Mode::NonBlocking).unwrap().is_none());
        assert!(b.connect(0, None, &mut to_a, Mode::NonBlocking).unwrap().is_none());
    }
    within("handshakes", || {
        recv_a = recv_a.take().or_else(|| listen_a.accept(Mode::NonBlocking).unwrap());
        recv_b = recv_b.take().or_else(|| listen_b.accept(Mode::NonBlocking).unwrap());
        if send_a.is_none() {
            send_a = a.connect(0, None, &mut to_b, Mode::NonBlocking).unwrap();
        }
        if send_b.is_none() {
            send_b = b.connect(0, None, &mut to_a, Mode::NonBlocking).unwrap();
        }
        (recv_a.is_some() && recv_b.is_some() && send_a.is_some() && send_b.is_some()).then_some(())
    });
    works_between(&mut send_a.unwrap(), &a, &mut recv_b.unwrap(), &b, 0, 1);
    works_between(&mut send_b.unwrap(), &b, &mut recv_a.unwrap(), &a, 0, 2);
}

#[test]
fn many_connects_interleave_on_one_listener() {
    let net = net(config());
    let (mut listen, handle) = net.listen(0).unwrap();
    let mut handles = [handle; 20];
    let mut sends: Vec<Option<SendComm>> = (0..20).map(|_| None).collect();
    let mut recvs = Vec::new();
    within("handshakes", || {
        for (send, handle) in sends.iter_mut().zip(&mut handles) {
            if send.is_none() {
                *send = net.connect(0, None, handle, Mode::NonBlocking).unwrap();
            }
        }
        recvs.extend(listen.accept(Mode::NonBlocking).unwrap());
        (recvs.len() == 20 && sends.iter().all(Option::is_some)).then_some(())
    });
    // Which is whose shows in the tags.
    let buffer = Buffer::new(&net, 0, 20 * 4);
    let target = Buffer::new(&net, 0, 20 * 4);
    for i in 0..20u32 {
        buffer.fill(4 * i as usize, 4, i + 1);
    }
    let requests: Vec<_> =
        recvs.iter_mut().enumerate().map(|(i, recv)| recv.irecv(&[target.recv(4 * i, 4, 0)]).unwrap().unwrap()).collect();
    let mut sent = [false; 20];
    let mut done = [false; 20];
    within("messages", || {
        for (i, send) in sends.iter_mut().flatten().enumerate() {
            if !sent[i] {
                sent[i] = send.isend(buffer.addr() + 4 * i, 4, 0, buffer.mr).unwrap().is_some();
            }
            send.poll_for_test();
        }
        for (i, recv) in recvs.iter_mut().enumerate() {
            if !done[i] {
                done[i] = recv.test(requests[i]).unwrap().is_some();
            }
        }
        done.iter().all(|d| *d).then_some(())
    });
    let mut got: Vec<_> = (0..20)
        .map(|i| {
            let mut b = [0; 4];
            target.pages.read(4 * i, &mut b);
            b.to_vec()
        })
        .collect();
    let mut expected: Vec<_> = (0..20u32).map(|i| pattern(4, i + 1)).collect();
    got.sort();
    expected.sort();
    assert_eq!(got, expected);
}

#[test]
fn a_handle_may_be_used_again_once_it_has_served() {
    let net = net(config());
    let (mut listen, mut handle) = net.listen(0).unwrap();
    let original = handle;
    for seed in 0..3 {
        let (mut send, mut recv) = (None, None);
        within("handshake", || {
            if send.is_none() {
                send = net.connect(0, None, &mut handle, Mode::NonBlocking).unwrap();
            }
            recv = recv.take().or_else(|| listen.accept(Mode::NonBlocking).unwrap());
            (send.is_some() && recv.is_some()).then_some(())
        });
        assert!(handle == original, "the cursor is cleared");
        works(&mut send.unwrap(), &mut recv.unwrap(), &net, 0, seed + 1);
    }
}

#[test]
fn a_cursor_of_another_handle_is_not_honoured() {
    let net = net(config());
    let (_first, mut one) = net.listen(0).unwrap();
    let (mut listen, mut two) = net.listen(0).unwrap();
    assert!(net.connect(0, None, &mut one, Mode::NonBlocking).unwrap().is_none());
    // The cursor lies at 48..56.
    two[48..56].copy_from_slice(&one[48..56]);
    let (mut send, mut recv) = (None, None);
    within("handshake", || {
        if send.is_none() {
            send = net.connect(0, None, &mut two, Mode::NonBlocking).unwrap();
        }
        recv = recv.take().or_else(|| listen.accept(Mode::NonBlocking).unwrap());
        (send.is_some() && recv.is_some()).then_some(())
    });
    works(&mut send.unwrap(), &mut recv.unwrap(), &net, 0, 1);
}

#[test]
fn the_listener_may_close_right_after_accept() {
    let net = net(config());
    let mut pair = Pair::new(&net, 0);
    works(&mut pair.send, &mut pair.recv, &net, 0, 1);
}

#[test]
fn nobody_listens_any_more() {
    let net = net(config());
    let (listen, mut handle) = net.listen(0).unwrap();
    drop(listen);
    let error = within("error", || net.connect(0, None, &mut handle, Mode::NonBlocking).err());
    assert!(matches!(error, Error::Remote(_)), "{error}");
    assert!(matches!(net.connect(0, None, &mut handle, Mode::Blocking), Err(Error::Remote(_))));
}

#[test]
fn a_listener_that_closes_on_a_waiting_connector_is_an_error_there() {
    let net = net(config());
    let (listen, mut handle) = net.listen(0).unwrap();
    let mut eager = net.connect(0, None, &mut handle.clone(), Mode::Blocking).unwrap().unwrap();
    for _ in 0..10 {
        assert!(net.connect(0, None, &mut handle, Mode::NonBlocking).unwrap().is_none());
    }
    drop(listen);
    let error = within("error", || net.connect(0, None, &mut handle, Mode::NonBlocking).err());
    assert!(matches!(error, Error::Remote(_)), "{error}");
    let error = within("error", || eager.isend(0, 0, 0, MrHandle(0)).err());
    assert!(matches!(error, Error::Remote(_)), "{error}");
    assert!(matches!(eager.isend(0, 0, 0, MrHandle(0)), Err(Error::Remote(_))));
    assert!(matches!(eager.test(RequestId(256)), Err(Error::Remote(_))));
}

#[test]
fn ports_come_from_the_range() {
    // A port that was just free; the range may lose it to another process, so several are tried.
    for _ in 0..20 {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let net = net(Config { port_range: format!("{free}-{free}"), ..config() });
        let Ok((_listen, handle)) = net.listen(0) else { continue };
        assert_eq!(u16::from_le_bytes([handle[6], handle[7]]), free);
        let full = net.listen(0).err().unwrap();
        assert!(matches!(full, Error::Usage(_)) && full.to_string().contains("RAILHEAD_PORT_RANGE"), "{full}");
        return;
    }
    panic!("no free port stayed free");
}

#[test]
fn vnics_are_made_only_where_asked_for() {
    let plain = net(config());
    assert!(matches!(plain.make_virtual(&[]), Err(Error::Usage(_))));
    assert!(matches!(plain.make_virtual(&[0, 0]), Err(Error::Usage(_))));
    assert!(matches!(plain.make_virtual(&[0, 99]), Err(Error::Internal(_))));
    let all = net(Config { socket_ifname: String::new(), ..config() });
    let only = all.make_virtual(&[0]).unwrap();
    assert_eq!(only, all.make_virtual(&[0]).unwrap());
    let properties = all.properties(only).unwrap();
    assert_eq!(properties.vdevs, [0]);
    assert_ne!(properties.name, all.properties(0).unwrap().name);
    assert!(matches!(all.make_virtual(&[only]), Err(Error::Usage(_))));
}

#[test]
fn names_of_fused_devices_are_joined_and_speeds_added() {
    let net = net(config());
    let dev = many_rails(&net, 2);
    let again = many_rails(&net, 2);
    let (one, two, three) = (net.properties(0).unwrap(), net.properties(dev).unwrap(), net.properties(again).unwrap());
    assert_eq!(two.name.to_str().unwrap(), "lo+lo");
    assert_eq!(three.name.to_str().unwrap(), "lo+lo#2");
    assert_eq!(two.speed_mbps, 2 * one.speed_mbps);
    assert_eq!(two.vdevs, [0, 0]);
    assert_eq!(net.device_count(), 3);
    assert_eq!((one.max_recvs, one.reg_is_global, one.ptr_support, one.rail_id), (8, true, 1, -1));
}

#[test]
fn over_ipv6() {
    let net = net(Config { socket_family: crate::base::config::Family::Inet6, ..config() });
    let (_listen, handle) = net.listen(0).unwrap();
    assert_eq!(handle[5], 6);
    let mut pair = Pair::new(&net, 0);
    works(&mut pair.send, &mut pair.recv, &net, 0, 1);
}

/// regMr comes on NCCL's service thread while the progress thread drives the same comm.
#[test]
fn memory_is_registered_while_the_comm_is_driven() {
    let net = net(config());
    let mut pair = Pair::new(&net, 0);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let pages = Pages::new(1 << 20).unwrap();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let handles: Vec<_> = (0..20).map(|_| net.register(0, pages.to_register(), MemoryKind::Host).unwrap()).collect();
                    handles.into_iter().for_each(|mr| net.deregister(0, mr).unwrap());
                }
            });
        }
        for seed in 1..300 {
            works(&mut pair.send, &mut pair.recv, &net, 0, seed);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(net.mrs.counts(), (0, 0));
}

#[test]
fn comms_on_many_threads_at_once() {
    let net = net(config());
    std::thread::scope(|scope| {
        for t in 0..8 {
            let net = &net;
            scope.spawn(move || {
                for round in 0..5 {
                    let mut pair = Pair::new(net, 0);
                    works(&mut pair.send, &mut pair.recv, net, 0, t * 10 + round + 1);
                }
            });
        }
    });
    assert_eq!(net.mrs.counts(), (0, 0));
}
