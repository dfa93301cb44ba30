//! What reaches a listener or a dialer from someone who was not invited, or is no peer for it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use super::super::frames::{self, FrameReader, HEADER_SIZE, Kind, MAC_SIZE, PROTOCOL_VERSION, Params, Progress};
use super::super::listen_handle::ListenHandle;
use super::*;
use crate::fabric::{ENDPOINT_SIZE, Endpoint};

fn decoded(handle: &[u8; HANDLE_SIZE]) -> ListenHandle {
    ListenHandle::decode(handle).ok().unwrap()
}

fn params(instance: u32) -> Params {
    Params {
        nonce: [3; 16],
        instance,
        host_id: [0; 16],
        pid: 1,
        pid_ns: 0,
        traffic_class: -1,
        max_message: 1,
        memory: 4096,
        rails: 1,
        qps_per_rail: 1,
        failover: false,
        fabric: "soft".into(),
        host: "stranger".into(),
        device: "eth9".into(),
        rkeys: vec![1],
        endpoints: vec![Endpoint([0; ENDPOINT_SIZE])],
    }
}

/// A good H1, as a test may damage it.
fn hello(handle: &ListenHandle, change: impl FnOnce(&mut Params)) -> Vec<u8> {
    let mut params = params(handle.instance);
    crate::base::rand::fill(&mut params.nonce).unwrap();
    change(&mut params);
    frames::seal(Kind::Hello, PROTOCOL_VERSION, &handle.secret, &[], &params.encode())
}

/// The legitimate peer connects all the same.
fn still_usable(net: &Arc<Net>, listen: &mut ListenComm, handle: &[u8; HANDLE_SIZE]) {
    let mut handle = *handle;
    let (mut send, mut recv) = (None, None);
    within("legitimate peer", || {
        if send.is_none() {
            send = net.connect(0, None, &mut handle, Mode::NonBlocking).unwrap();
        }
        recv = recv.take().or_else(|| listen.accept(Mode::NonBlocking).unwrap());
        (send.is_some() && recv.is_some()).then_some(())
    });
}

/// Says `bytes` to the listener and waits until it hangs up; what it answered.
fn hung_up_on(listen: &mut ListenComm, handle: &ListenHandle, bytes: &[u8]) -> (Vec<u8>, Option<Error>) {
    let mut stream = TcpStream::connect(handle.addr).unwrap();
    let _ = stream.write_all(bytes);
    stream.set_nonblocking(true).unwrap();
    let (mut answer, mut refusal) = (Vec::new(), None);
    within("hang-up", || {
        match listen.accept(Mode::NonBlocking) {
            Ok(comm) => assert!(comm.is_none()),
            Err(error) => refusal = Some(error),
        }
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk) {
            Ok(0) => Some(()),
            Ok(n) => {
                answer.extend_from_slice(&chunk[..n]);
                None
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(_) => Some(()),
        }
    });
    (answer, refusal)
}

#[test]
fn garbage_is_hung_up_on_without_a_word() {
    let net = net(config());
    let (mut listen, bytes) = net.listen(0).unwrap();
    let handle = decoded(&bytes);
    let good = hello(&handle, |_| {});
    let mut oversized = good.clone();
    oversized[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut wrong_kind = good.clone();
    wrong_kind[6] = 9;
    let confirm = frames::seal(Kind::Confirm, PROTOCOL_VERSION, &handle.secret, &[], b"");
    let wrong_secret = frames::seal(Kind::Hello, PROTOCOL_VERSION, b"another secret!!", &[], &params(handle.instance).encode());
    let other_instance = hello(&handle, |p| p.instance ^= 1);
    for bad in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &oversized, &wrong_kind, &confirm, &wrong_secret, &other_instance] {
        let (answer, refusal) = hung_up_on(&mut listen, &handle, bad);
        assert!(answer.is_empty() && refusal.is_none());
        assert_eq!(listen.half_open(), 0);
    }
    still_usable(&net, &mut listen, &bytes);
}

#[test]
fn a_flipped_bit_in_any_byte_is_hung_up_on() {
    let net = net(config());
    let (mut listen, bytes) = net.listen(0).unwrap();
    let handle = decoded(&bytes);
    let good = hello(&handle, |_| {});
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        // A longer body than was sent is waited for; the end of the stream ends that.
        if (8..12).contains(&at) {
            continue;
        }
        let (answer, refusal) = hung_up_on(&mut listen, &handle, &bad);
        assert!(answer.is_empty() && refusal.is_none(), "byte {at}");
    }
    still_usable(&net, &mut listen, &bytes);
}

#[test]
fn truncated_and_slow_handshakes_cost_a_place_and_are_dropped() {
    let net = net(Config { max_half_open: 4, ..config() });
    let (mut listen, bytes) = net.listen(0).unwrap();
    let handle = decoded(&bytes);
    let good = hello(&handle, |_| {});
    // Ends early.
    for len in [1, HEADER_SIZE, HEADER_SIZE + 1, good.len() - MAC_SIZE, good.len() - 1] {
        let mut stream = TcpStream::connect(handle.addr).unwrap();
        stream.write_all(&good[..len]).unwrap();
        drop(stream);
    }
    within("drop", || {
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        (listen.half_open() == 0).then_some(())
    });
    // Never ends: more than there are places for.
    let mut silent: Vec<_> = (0..20).map(|_| TcpStream::connect(handle.addr).unwrap()).collect();
    for stream in &mut silent {
        stream.write_all(&good[..5]).unwrap();
    }
    within("admission", || {
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        (listen.half_open() == 4).then_some(())
    });
    still_usable(&net, &mut listen, &bytes);
    assert!(listen.half_open() <= 4);
}

#[test]
fn who_has_spoken_is_not_pushed_out_by_who_has_not() {
    let net = net(Config { max_half_open: 4, ..config() });
    let (mut listen, bytes) = net.listen(0).unwrap();
    let handle = decoded(&bytes);
    let good = hello(&handle, |p| p.fabric = "verbs".into());
    // Many are waiting by the time of the next call, the one that has spoken among the first: as many as are taken in at once, and more.
    let mut whole = TcpStream::connect(handle.addr).unwrap();
    whole.write_all(&good).unwrap();
    let mut part = TcpStream::connect(handle.addr).unwrap();
    part.write_all(&good[..20]).unwrap();
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(handle.addr).unwrap()).collect();
    let mut answer = [0; HEADER_SIZE];
    whole.set_nonblocking(true).unwrap();
    part.set_nonblocking(true).unwrap();
    within("an answer to the first", || {
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        whole.read_exact(&mut answer).ok()
    });
    within("an end of the silent ones", || {
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        (listen.half_open() == 5).then_some(())
    });
    assert_eq!(part.read(&mut answer).unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "it was hung up on");
    drop(silent);
}

#[test]
fn a_slow_handshake_is_timed_from_its_first_byte() {
    use super::super::accept::Acceptor;
    let net = net(Config { handshake_timeout_s: 10, ..config() });
    let secret = [1; 16];
    let mut acceptor = Acceptor::new(net.resources(0).unwrap(), secret, 5);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, from) = listener.accept().unwrap();
    acceptor.admit(crate::base::fd::TcpStream::new(stream), from, 1);
    let second = 1_000_000_000u64;
    // Silent: for ever.
    for now in [1, 1000 * second, 100_000 * second] {
        assert!(acceptor.drive(now, Mode::NonBlocking).unwrap().is_none());
        assert_eq!(acceptor.half_open(), 1);
    }
    let start = 200_000 * second;
    stranger.write_all(b"R").unwrap();
    // Time stands still until the byte is seen; it is on its way on this host.
    for _ in 0..1000 {
        acceptor.drive(start, Mode::NonBlocking).unwrap();
        std::thread::yield_now();
    }
    acceptor.drive(start + 10 * second, Mode::NonBlocking).unwrap();
    assert_eq!(acceptor.half_open(), 1);
    acceptor.drive(start + 10 * second + 1, Mode::NonBlocking).unwrap();
    assert_eq!(acceptor.half_open(), 0);
}

#[test]
fn a_replayed_handshake_opens_nothing() {
    let net = net(config());
    let (mut listen, bytes) = net.listen(0).unwrap();
    // A wire tap between dialer and listener.
    let tap = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut tapped = decoded(&bytes);
    tapped.addr = tap.local_addr().unwrap();
    let mut through_tap = tapped.encode();
    assert!(net.connect(0, None, &mut through_tap, Mode::NonBlocking).unwrap().is_none());
    let (mut from_connector, _) = tap.accept().unwrap();
    let mut reader = FrameReader::default();
    within("H1", || {
        assert!(net.connect(0, None, &mut through_tap, Mode::NonBlocking).unwrap().is_none());
        from_connector.set_nonblocking(true).unwrap();
        (reader.pull(&mut from_connector).unwrap() == Progress::Done).then_some(())
    });
    let h1 = reader.take();
    // The first use gets an answer, but whoever has heard H1 alone cannot complete it.
    let mut first = TcpStream::connect(decoded(&bytes).addr).unwrap();
    first.write_all(&h1).unwrap();
    first.set_nonblocking(true).unwrap();
    let mut h2 = FrameReader::default();
    within("H2", || {
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        (h2.pull(&mut first).unwrap() == Progress::Done).then_some(())
    });
    // A bad H3.
    first.write_all(&[7; HEADER_SIZE + MAC_SIZE]).unwrap();
    within("hang-up", || {
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        (listen.half_open() == 0).then_some(())
    });
    // The second is recognised, even by an eager accept's rules.
    let (answer, refusal) = hung_up_on(&mut listen, &decoded(&bytes), &h1);
    assert!(answer.is_empty() && refusal.is_none());
    still_usable(&net, &mut listen, &bytes);
}

#[test]
fn who_hangs_up_during_a_handshake_and_lives_is_forgotten() {
    let net = net(config());
    let (mut listen, bytes) = net.listen(0).unwrap();
    let other = super::net(config());
    let mut to = bytes;
    assert!(other.connect(0, None, &mut to, Mode::NonBlocking).unwrap().is_none());
    within("H1", || {
        assert!(other.connect(0, None, &mut to, Mode::NonBlocking).unwrap().is_none());
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        listen.answered_for_test().then_some(())
    });
    drop(TcpStream::connect(decoded(&bytes).addr).unwrap());
    drop(other);
    within("oblivion", || {
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        (listen.half_open() == 0).then_some(())
    });
    still_usable(&net, &mut listen, &bytes);
}

#[test]
fn peers_that_cannot_be_talked_to_are_told_so() {
    let net = net(config());
    let (mut listen, bytes) = net.listen(0).unwrap();
    let handle = decoded(&bytes);
    let other_version = frames::seal(Kind::Hello, PROTOCOL_VERSION + 1, &handle.secret, &[], b"whatever that version says");
    let versions = format!("wire version {} meets {PROTOCOL_VERSION}", PROTOCOL_VERSION + 1);
    let cases = [
        (hello(&handle, |p| p.fabric = "verbs".into()), "is on fabric verbs"),
        (other_version, versions.as_str()),
        (hello(&handle, |p| p.memory = 4), "memory that cannot be"),
        (hello(&handle, |p| p.endpoints[0] = Endpoint([0xff; ENDPOINT_SIZE])), ""),
        (frames::seal(Kind::Hello, PROTOCOL_VERSION, &handle.secret, &[], b"short"), "make no sense"),
    ];
    for (h1, expect) in cases {
        let (answer, refusal) = hung_up_on(&mut listen, &handle, &h1);
        let (header, body) = frames::open(&answer, &handle.secret, &[&h1]).unwrap();
        assert_eq!(header.kind, Kind::Refuse);
        let reason = frames::decode_reason(body);
        assert!(reason.contains(expect), "{reason}");
        assert!(refusal.is_none(), "{refusal:?}");
        // Heard again it gets no answer.
        let (answer, refusal) = hung_up_on(&mut listen, &handle, &h1);
        assert!(answer.is_empty() && refusal.is_none(), "{answer:?} {refusal:?}");
    }
    still_usable(&net, &mut listen, &bytes);
}

/// A listener of ours in all but what the test changes.
fn fake_listener(net: &Arc<Net>, answer: impl FnOnce(&[u8], &ListenHandle) -> Vec<u8>) -> Error {
    let (_listen, bytes) = net.listen(0).unwrap();
    let fake = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut handle = decoded(&bytes);
    handle.addr = fake.local_addr().unwrap();
    let mut encoded = handle.encode();
    assert!(net.connect(0, None, &mut encoded, Mode::NonBlocking).unwrap().is_none());
    let (mut stream, _) = fake.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut h1 = FrameReader::default();
    within("H1", || {
        assert!(net.connect(0, None, &mut encoded, Mode::NonBlocking).unwrap().is_none());
        (h1.pull(&mut stream).unwrap() == Progress::Done).then_some(())
    });
    stream.write_all(&answer(&h1.take(), &handle)).unwrap();
    within("error", || net.connect(0, None, &mut encoded, Mode::NonBlocking).err())
}

#[test]
fn a_connector_trusts_nobody_but_its_listener() {
    let net = net(config());
    let reply = |h1: &[u8], handle: &ListenHandle, change: &dyn Fn(&mut Params)| {
        let mut p = params(handle.instance);
        change(&mut p);
        frames::seal(Kind::Reply, PROTOCOL_VERSION, &handle.secret, &[h1], &p.encode())
    };
    let remote = |e: Error| assert!(matches!(e, Error::Remote(_)), "{e:?}");
    remote(fake_listener(&net, |_, _| b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()));
    remote(fake_listener(&net, |h1, handle| {
        let mut frame = reply(h1, handle, &|_| {});
        *frame.last_mut().unwrap() ^= 1;
        frame
    }));
    remote(fake_listener(&net, |_, handle| reply(b"another H1", handle, &|_| {})));
    remote(fake_listener(&net, |h1, handle| reply(h1, handle, &|p| p.instance ^= 1)));
    remote(fake_listener(&net, |h1, handle| {
        reply(h1, handle, &|p| {
            p.rails = 2;
            p.rkeys = vec![1; 2];
            p.endpoints = vec![Endpoint([0; ENDPOINT_SIZE]); 2];
        })
    }));
    remote(fake_listener(&net, |h1, handle| frames::seal(Kind::Confirm, PROTOCOL_VERSION, &handle.secret, &[h1], b"")));
    let refused =
        fake_listener(&net, |h1, handle| frames::seal(Kind::Refuse, PROTOCOL_VERSION, &handle.secret, &[h1], b"wrong phase of the moon"));
    assert!(matches!(refused, Error::Usage(_)) && refused.to_string().contains("phase of the moon"), "{refused}");
    let fabric = fake_listener(&net, |h1, handle| reply(h1, handle, &|p| p.fabric = "verbs".into()));
    assert!(matches!(fabric, Error::Usage(_)) && fabric.to_string().contains("verbs"), "{fabric}");
}

#[test]
fn a_connector_dials_again_when_dropped_and_gives_up_on_a_damaged_handle() {
    let net = net(config());
    let (mut listen, bytes) = net.listen(0).unwrap();
    // Dropped twice by somebody in between, then let through to the real one.
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut handle = decoded(&bytes);
    let real = handle.addr;
    handle.addr = middle.local_addr().unwrap();
    let mut encoded = handle.encode();
    let relay = std::thread::spawn(move || {
        for _ in 0..2 {
            drop(middle.accept().unwrap());
        }
        let (inner, _) = middle.accept().unwrap();
        let outer = TcpStream::connect(real).unwrap();
        let (mut a, mut b) = (inner.try_clone().unwrap(), outer.try_clone().unwrap());
        let up = std::thread::spawn(move || std::io::copy(&mut a, &mut b));
        let (mut a, mut b) = (outer, inner);
        let _ = std::io::copy(&mut a, &mut b);
        let _ = b.shutdown(std::net::Shutdown::Both);
        let _ = up.join();
    });
    let (mut send, mut recv) = (None, None);
    within("handshake", || {
        if send.is_none() {
            send = net.connect(0, None, &mut encoded, Mode::NonBlocking).unwrap();
        }
        recv = recv.take().or_else(|| listen.accept(Mode::NonBlocking).unwrap());
        (send.is_some() && recv.is_some()).then_some(())
    });
    drop((send, recv));
    relay.join().unwrap();

    let mut damaged = bytes;
    damaged[40] ^= 1;
    let error = within("giving up", || {
        assert!(listen.accept(Mode::NonBlocking).unwrap().is_none());
        net.connect(0, None, &mut damaged, Mode::NonBlocking).err()
    });
    assert!(matches!(error, Error::Remote(_)) && error.to_string().contains("damaged"), "{error}");
    still_usable(&net, &mut listen, &bytes);
}
