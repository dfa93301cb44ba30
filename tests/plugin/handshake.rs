//! Strangers, eavesdroppers and broken peers at a listener's door: whatever they say, it stays usable and the legitimate peer connects.
//!
//! Rank 0 listens and serves, rank 1 connects when told to, and the test stands between them on the network. It knows the handshake's bytes
//! from the description in `src/net/frames.rs`, and the secret from the handle where an attack needs it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use crate::support;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use support::holdings::Holdings;
use support::plugin::{HANDLE, Plugin, take_log};
use support::{Ctx, PATIENCE, Ranks, Role, World, comms, pattern};

pub const ROLES: &[(&str, Role)] = &[("peers", peers)];

const LEN: usize = 1000;
const HEADER: usize = 12;
const MAC: usize = 32;

/// Rank 0 accepts whatever comes and receives one message from it; rank 1 connects to the handles that the test gives it and sends one.
fn peers(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    if ctx.rank == 1 {
        loop {
            let mut handle = match <[u8; HANDLE]>::try_from(ctx.parent.recv()) {
                Ok(handle) => handle,
                Err(_) => return,
            };
            let result = comms::connect(&plugin, 0, &mut handle).and_then(|comm| {
                let sent = comms::send(&plugin, comm, &pattern(1, LEN));
                plugin.close_send(comm)?;
                sent
            });
            ctx.say(&match result {
                Ok(_) => "sent".into(),
                Err(e) => format!("failed {e}"),
            });
        }
    }
    let (handle, listen) = plugin.listen(0).expect("listen");
    ctx.parent.send(&handle).expect("the test");
    let mut idle = Instant::now();
    loop {
        match plugin.accept(listen) {
            Ok(None) => {
                support::pause(idle);
                let refused = take_log().into_iter().filter(|(level, text)| *level == 2 && text.contains("refused"));
                refused.for_each(|(_, text)| ctx.say(&text));
            }
            Ok(Some(comm)) => {
                let word = match comms::recv(&plugin, comm, LEN) {
                    Ok(bytes) if bytes == pattern(1, LEN) => "served".into(),
                    Ok(bytes) => format!("received {} wrong bytes", bytes.len()),
                    Err(e) => format!("failed {e}"),
                };
                plugin.close_recv(comm).expect("close");
                ctx.say(&word);
                idle = Instant::now();
            }
            Err(e) => ctx.say(&format!("accept: {e}: {}", take_log().into_iter().map(|l| l.1).collect::<Vec<_>>().join(" | "))),
        }
        if ctx.parent.ready() {
            match ctx.parent.text().as_str() {
                "holdings" => ctx.say(&format!("{:?}", Holdings::now().fds)),
                _ => return,
            }
        }
    }
}

/// The two ranks and what the test knows of them.
struct Scene {
    ranks: Ranks,
    handle: [u8; HANDLE],
    /// Where the legitimate peer is sent when the test wants to be in between.
    door: TcpListener,
}

impl Scene {
    fn new() -> Scene {
        Scene::with_half_open("8")
    }

    /// With room for so many unfinished handshakes.
    fn with_half_open(most: &str) -> Scene {
        let world = World::new("peers", 2).env("RAILHEAD_SOCKET_IFNAME", "=lo").env("RAILHEAD_SOCKET_FAMILY", "AF_INET");
        let world = world.env("RAILHEAD_MAX_HALF_OPEN", most).env("RAILHEAD_HANDSHAKE_TIMEOUT_S", "1");
        let ranks = world.spawn();
        let handle = ranks.ranks[0].chan.recv().try_into().expect("a handle");
        let door = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        Scene { ranks, handle, door }
    }

    fn secret(&self) -> &[u8] {
        &self.handle[32..48]
    }

    /// A connection to the listener.
    fn dial(&self) -> TcpStream {
        let port = u16::from_le_bytes([self.handle[6], self.handle[7]]);
        let stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).expect("dial");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        stream.set_nodelay(true).expect("nodelay");
        stream
    }

    /// Sends the legitimate peer to the test's door and returns its connection.
    fn lure(&self) -> TcpStream {
        let mut handle = self.handle;
        handle[6..8].copy_from_slice(&self.door.local_addr().expect("addr").port().to_le_bytes());
        self.ranks.ranks[1].chan.send(&handle).expect("rank 1");
        let stream = self.door.accept().expect("accept").0;
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        stream.set_nodelay(true).expect("nodelay");
        stream
    }

    /// Nobody is behind the door any more that the peer was sent to; the next one will be sent to another.
    fn close_door(&mut self) {
        drop(std::mem::replace(&mut self.door, TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind")));
    }

    /// Hangs up on a lured peer. It dials again, finds nobody, and says so.
    #[track_caller]
    fn give_up(&mut self, bait: TcpStream) {
        drop(bait);
        self.close_door();
        let said = self.ranks.hear(1);
        assert!(said.starts_with("failed"), "{said}");
    }

    /// The legitimate peer connects and its message arrives.
    #[track_caller]
    fn works(&mut self, after: &str) {
        self.ranks.ranks[1].chan.send(&self.handle).expect("rank 1");
        let (heard, said) = (self.ranks.hear(0), self.ranks.hear(1));
        assert_eq!((heard.as_str(), said.as_str()), ("served", "sent"), "after {after}");
    }

    fn holdings(&mut self) -> String {
        self.ranks.tell(0, "holdings");
        self.ranks.hear(0)
    }

    fn end(self) {
        self.ranks.tell(0, "quit");
        self.ranks.tell(1, "quit");
        self.ranks.finish();
    }
}

/// Ends what this side says. The other one may have hung up over it already.
fn no_more(stream: &TcpStream) {
    match stream.shutdown(std::net::Shutdown::Write) {
        Err(e) if e.kind() != ErrorKind::NotConnected => panic!("shutdown: {e}"),
        _ => {}
    }
}

/// One whole frame.
fn read_frame(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut frame = vec![0; HEADER];
    stream.read_exact(&mut frame)?;
    let body = u32::from_le_bytes(frame[8..12].try_into().expect("four")) as usize;
    frame.resize(HEADER + body + MAC, 0);
    stream.read_exact(&mut frame[HEADER..])?;
    Ok(frame)
}

/// Writes what the other end takes; it may hang up at any moment.
fn say(stream: &mut TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
}

/// The listener says nothing and hangs up.
#[track_caller]
fn hung_up(mut stream: TcpStream, what: &str) {
    let mut byte = [0; 1];
    match stream.read(&mut byte) {
        Ok(0) => {}
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
        other => panic!("{what}: {other:?} {byte:?}, not the end of the connection"),
    }
}

/// A frame with a right MAC: H1 of whatever version, kind and body.
fn seal(secret: &[u8], version: u16, kind: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = b"RHhs".to_vec();
    frame.extend_from_slice(&version.to_le_bytes());
    frame.extend_from_slice(&[kind, 0]);
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(body);
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("any key");
    mac.update(b"1");
    mac.update(&frame);
    frame.extend_from_slice(&mac.finalize().into_bytes());
    frame
}

#[test]
fn garbage_truncated_and_oversized_first_messages() {
    let mut scene = Scene::new();
    scene.works("nothing");
    let before = scene.holdings();
    for (i, len) in [1, 4, 11, 12, 13, 44, 300, 5000, 100_000].into_iter().enumerate() {
        let mut stream = scene.dial();
        say(&mut stream, &pattern(i as u64 + 1, len));
        if len >= HEADER {
            hung_up(stream, "garbage");
        }
    }
    scene.works("garbage");
    // A genuine H1, cut at each length, by a peer that then goes away.
    let mut bait = scene.lure();
    let h1 = read_frame(&mut bait).expect("H1");
    for len in (0..h1.len()).step_by(7).chain([h1.len() - 1]) {
        let mut stream = scene.dial();
        say(&mut stream, &h1[..len]);
    }
    // And whole, with more behind it than belongs there.
    for body in [12 * 1024 + 1, 1 << 20, u32::MAX] {
        let mut stream = scene.dial();
        let mut frame = h1.clone();
        frame[8..12].copy_from_slice(&body.to_le_bytes());
        say(&mut stream, &frame);
        say(&mut stream, &vec![0; 100_000]);
        hung_up(stream, "a body that is too long");
    }
    scene.give_up(bait);
    scene.works("truncated and oversized messages");
    let after = scene.holdings();
    assert_eq!(before, after, "descriptors of the listening process");
    scene.end();
}

#[test]
fn slow_drips_and_silent_floods() {
    let mut scene = Scene::new();
    let mut bait = scene.lure();
    let h1 = read_frame(&mut bait).expect("H1");
    scene.give_up(bait);
    let mut drips: Vec<TcpStream> = (0..100).map(|_| scene.dial()).collect();
    let mut silent: Vec<TcpStream> = (0..100).map(|_| scene.dial()).collect();
    // Byte by byte, as long as somebody listens, and longer than a handshake may take.
    let (start, mut at) = (Instant::now(), 0);
    while start.elapsed().as_millis() < 1500 {
        for drip in &mut drips {
            let byte = [h1[at % (h1.len() - 1)]];
            say(drip, &byte);
        }
        at += 1;
        if at == 5 {
            // In the middle of it.
            scene.ranks.ranks[1].chan.send(&scene.handle).expect("rank 1");
        }
    }
    assert_eq!(scene.ranks.hear(0), "served");
    assert_eq!(scene.ranks.hear(1), "sent");
    for drip in drips {
        hung_up(drip, "a drip");
    }
    scene.works("drips");
    // Of the silent ones at most as many are kept as half-open connections are allowed.
    silent.retain_mut(|s| {
        s.set_nonblocking(true).expect("nonblocking");
        matches!(s.read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock)
    });
    assert!(silent.len() <= 8, "{} silent connections are kept", silent.len());
    scene.end();
}

#[test]
fn strangers_do_not_take_the_last_descriptors() {
    let mut scene = Scene::with_half_open("64");
    let few = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
    let pid = scene.ranks.ranks[0].pid();
    // SAFETY: one valid rlimit, for a process of ours. What the harness has there is open already.
    assert_eq!(unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const few, std::ptr::null_mut()) }, 0);
    let silent: Vec<TcpStream> = (0..100).map(|_| scene.dial()).collect();
    let mut begun: Vec<TcpStream> = (0..100).map(|_| scene.dial()).collect();
    begun.iter_mut().for_each(|stream| say(stream, b"RH"));
    scene.works("strangers that had all descriptors");
    drop((silent, begun));
    scene.end();
}

#[test]
fn a_flipped_bit_in_the_first_message() {
    let mut scene = Scene::new();
    let mut bait = scene.lure();
    let h1 = read_frame(&mut bait).expect("H1");
    for at in 0..h1.len() {
        let bits: &[u8] = if at < HEADER || at >= h1.len() - MAC { &[0, 1, 2, 3, 4, 5, 6, 7] } else { &[(at % 8) as u8] };
        for bit in bits {
            let mut wrong = h1.clone();
            wrong[at] ^= 1 << bit;
            let mut stream = scene.dial();
            say(&mut stream, &wrong);
            // A longer body is waited for, not read; the end of the stream must end it.
            no_more(&stream);
            hung_up(stream, &format!("bit {bit} of byte {at}"));
        }
    }
    // It was genuine: unchanged, it is answered.
    let mut stream = scene.dial();
    say(&mut stream, &h1);
    let h2 = read_frame(&mut stream).expect("H2");
    assert_eq!(h2[6], 2, "kind of the answer");
    // Once. Heard again, it is a replay.
    let mut replay = scene.dial();
    say(&mut replay, &h1);
    hung_up(replay, "a replayed H1");
    drop(stream);
    scene.give_up(bait);
    scene.works("flipped bits");
    scene.end();
}

#[test]
fn a_flipped_bit_in_the_answer() {
    let mut scene = Scene::new();
    let mut at = 0;
    loop {
        let mut peer = scene.lure();
        let mut listener = scene.dial();
        let h1 = read_frame(&mut peer).expect("H1");
        say(&mut listener, &h1);
        let mut h2 = read_frame(&mut listener).expect("H2");
        if at >= h2.len() {
            // Unchanged, it is taken.
            say(&mut peer, &h2);
            let h3 = read_frame(&mut peer).expect("H3");
            assert_eq!(h3[6], 3);
            say(&mut listener, &h3);
            // From here on the two talk through this connection; being closed, it ends the comm at both ends, sooner or later.
            let (heard, said) = (scene.ranks.hear(0), scene.ranks.hear(1));
            assert_eq!((heard.as_str(), said.as_str()), ("served", "sent"));
            break;
        }
        h2[at] ^= 1 << (at % 8);
        say(&mut peer, &h2);
        no_more(&peer);
        assert!(read_frame(&mut peer).is_err(), "bit {} of byte {at} of H2 was taken, and answered with H3", at % 8);
        // A length that grew makes it wait for more, find the end, and dial again: nobody answers then.
        scene.close_door();
        let said = scene.ranks.hear(1);
        assert!(said.starts_with("failed"), "bit {} of byte {at}: {said}", at % 8);
        at += if at < HEADER { 1 } else { 13 };
    }
    scene.works("flipped bits in H2");
    scene.end();
}

#[test]
fn a_flipped_bit_in_the_last_message() {
    for at in [0, 4, 6, 8, HEADER, HEADER + MAC - 1] {
        let mut scene = Scene::new();
        let mut peer = scene.lure();
        let mut listener = scene.dial();
        say(&mut listener, &read_frame(&mut peer).expect("H1"));
        say(&mut peer, &read_frame(&mut listener).expect("H2"));
        let mut h3 = read_frame(&mut peer).expect("H3");
        assert_eq!(h3.len(), HEADER + MAC);
        h3[at] ^= 0x10;
        say(&mut listener, &h3);
        no_more(&listener);
        hung_up(listener, "a changed H3");
        drop(peer);
        // The peer believed itself connected; it learns.
        let said = scene.ranks.hear(1);
        assert!(said.starts_with("failed"), "byte {at}: {said}");
        scene.works("a changed H3");
        scene.end();
    }
}

#[test]
fn a_replayed_conversation() {
    let mut scene = Scene::new();
    let mut peer = scene.lure();
    let mut listener = scene.dial();
    let h1 = read_frame(&mut peer).expect("H1");
    say(&mut listener, &h1);
    say(&mut peer, &read_frame(&mut listener).expect("H2"));
    let h3 = read_frame(&mut peer).expect("H3");
    say(&mut listener, &h3);
    assert_eq!((scene.ranks.hear(0), scene.ranks.hear(1)), ("served".into(), "sent".into()));
    for _ in 0..3 {
        let mut stream = scene.dial();
        say(&mut stream, &h1);
        say(&mut stream, &h3);
        hung_up(stream, "a replayed conversation");
    }
    scene.works("replays");
    scene.end();
}

#[test]
fn wrong_versions_other_fabrics_and_parameters_that_make_no_sense() {
    let mut scene = Scene::new();
    let mut bait = scene.lure();
    let h1 = read_frame(&mut bait).expect("H1");
    let body = h1[HEADER..h1.len() - MAC].to_vec();
    assert_eq!(seal(scene.secret(), u16::from_le_bytes([h1[4], h1[5]]), 1, &body), h1, "the test seals as Railhead does");
    // Behind nonce 16, instance 4, host 16, pid 4, namespace 8, class 4, longest message 8, memory 8, rails 1, queue pairs 1, failover 1.
    const MEMORY: usize = 60;
    const RAILS: usize = 68;
    const FABRIC: usize = 71;
    assert_eq!(&body[FABRIC..FABRIC + 5], b"\x04soft");
    let version = u16::from_le_bytes([h1[4], h1[5]]);
    let changed = |at: usize, bytes: &[u8]| {
        let mut b = body.clone();
        b[at..at + bytes.len()].copy_from_slice(bytes);
        b
    };
    let cases: Vec<(&str, u16, Vec<u8>, &[&str])> = vec![
        ("another version", version + 1, body.clone(), &["version"]),
        ("another fabric", version, changed(FABRIC + 1, b"hard"), &["hard", "soft"]),
        ("no memory", version, changed(MEMORY, &[0; 8]), &[]),
        ("odd memory", version, changed(MEMORY, &[1; 8]), &[]),
        ("no rails", version, changed(RAILS, &[0]), &[]),
        ("many rails", version, changed(RAILS, &[255]), &[]),
        ("no queue pairs", version, changed(RAILS + 1, &[0]), &[]),
        ("many queue pairs", version, changed(RAILS + 1, &[255]), &[]),
        ("neither failover nor none", version, changed(RAILS + 2, &[2]), &[]),
        ("a long name", version, changed(FABRIC, &[255]), &[]),
        ("less than said", version, body[..body.len() - 1].to_vec(), &[]),
        ("more than said", version, [&body[..], &[0]].concat(), &[]),
        ("nothing", version, Vec::new(), &[]),
        ("endpoints of zeros", version, changed(body.len() - 128, &[0; 128]), &[]),
        ("endpoints of ones", version, changed(body.len() - 128, &[255; 128]), &[]),
    ];
    for (i, (what, version, mut body, words)) in cases.into_iter().enumerate() {
        if body.len() > 16 {
            // A nonce of its own, else it is a replay.
            body[..8].copy_from_slice(&(i as u64 + 1).to_le_bytes());
        }
        let mut stream = scene.dial();
        let frame = seal(scene.secret(), version, 1, &body);
        say(&mut stream, &frame);
        // Whoever knows the secret is told why.
        let answer = read_frame(&mut stream).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(answer[6], 4, "{what}: a refusal");
        let reason = String::from_utf8_lossy(&answer[HEADER..answer.len() - MAC]).into_owned();
        let heard = scene.ranks.hear(0);
        assert!(heard.contains("refused 127.0.0.1"), "{what}: {heard}");
        // Who only repeats it is told nothing, and nobody is told of him.
        let mut replay = scene.dial();
        say(&mut replay, &frame);
        hung_up(replay, "a replayed H1 that was refused");
        for word in words {
            assert!(reason.contains(word) && heard.contains(word), "{what}: neither {reason:?} nor {heard:?} says {word}");
        }
    }
    scene.give_up(bait);
    scene.works("refusals");
    scene.end();
}

#[test]
fn a_damaged_handle() {
    let mut scene = Scene::new();
    // Magic, version, family; instance and secret, which the listener does not know. Address and port would lead elsewhere.
    for at in [0, 3, 4, 5, 28, 32, 47] {
        let mut handle = scene.handle;
        handle[at] ^= 0x08;
        scene.ranks.ranks[1].chan.send(&handle).expect("rank 1");
        let said = scene.ranks.hear(1);
        assert!(said.starts_with("failed"), "byte {at}: {said}");
    }
    // The connecting side's own note and the hint for logs do no harm.
    for at in [48, 51, 52, 56] {
        let mut handle = scene.handle;
        handle[at] ^= 0x08;
        scene.ranks.ranks[1].chan.send(&handle).expect("rank 1");
        assert_eq!((scene.ranks.hear(0), scene.ranks.hear(1)), ("served".into(), "sent".into()), "byte {at}");
    }
    scene.works("damaged handles");
    scene.end();
}
