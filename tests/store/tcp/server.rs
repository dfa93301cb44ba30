//! The server, as a peer sees it that speaks in bytes.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::time::Duration;

use railhead::base::config::Secret;
use railhead::store::tcp::{Host, Server, ServerOptions, TcpOptions};
use railhead::store::{Error, Store, TcpStore};

use super::wire::{Raw, TORCH_SERVER, VALIDATE, keyed, unhex, value};
use super::{LONG, join, serve};
use crate::ports::own_port;

#[test]
fn answers_as_torchs_does() {
    let server = serve(|_| {});
    let mut raw = Raw::open(server.port());
    for (what, request, reply) in TORCH_SERVER {
        raw.send(request);
        raw.expect(reply, what);
    }
    raw.in_step("nothing more");
}

#[test]
fn answers_the_same_to_one_byte_at_a_time_and_to_everything_at_once() {
    let requests = TORCH_SERVER.iter().map(|(_, request, _)| *request).collect::<String>();
    let replies = TORCH_SERVER.iter().map(|(_, _, reply)| *reply).collect::<String>();
    for at_once in [false, true] {
        let server = serve(|_| {});
        let mut raw = Raw::connect(server.port());
        let stream = unhex(&[VALIDATE, &requests].concat());
        // VALIDATE comes in pieces, too: torch's libuv server does not stand that, ours does.
        for piece in stream.chunks(if at_once { stream.len() } else { 1 }) {
            raw.0.write_all(piece).unwrap();
        }
        raw.expect(&replies, "all replies");
        raw.in_step("nothing more");
    }
}

#[test]
fn who_never_says_what_it_speaks_does_not_stay_and_who_did_may_be_idle() {
    let server = serve(|options| options.admission = Duration::from_millis(100));
    // On a busy machine it may be too late for that.
    let idle = (0..100).find_map(|_| TcpStore::new(Host::Other("localhost".into(), server.port()), TcpOptions::default()).ok());
    let idle = idle.expect("quick enough");
    for sent in ["", "00cef785"] {
        let mut silent = Raw::connect(server.port());
        silent.send(sent);
        silent.expect_end("it has had its time");
    }
    assert_eq!(idle.add("n", 1).unwrap(), 1, "who is in stays");
}

#[test]
fn lists_its_keys() {
    let server = serve(|_| {});
    let mut raw = Raw::open(server.port());
    raw.send("0103000000000000002f7a7a010000000000000031 11");
    raw.expect("010000000000000003000000000000002f7a7a", "LIST_KEYS");
}

#[test]
fn waits_end_when_all_keys_are_there_and_not_before() {
    let server = serve(|_| {});
    let (mut waiter, mut other) = (Raw::open(server.port()), Raw::open(server.port()));
    waiter.send("06020000000000000003000000000000002f773103000000000000002f7732");
    waiter.in_step("waiting");
    other.send("0103000000000000002f77310000000000000000");
    other.in_step("set /w1");
    waiter.in_step("still waiting for /w2");
    other.send("0103000000000000002f77310000000000000000");
    other.in_step("set /w1 again");
    waiter.in_step("a key comes once");
    other.send("0203000000000000002f7732 0000000000000000 0100000000000000 31");
    other.expect("010000000000000031", "compare_set /w2");
    waiter.expect("00", "both are there");
    other.send("0103000000000000002f77310000000000000000");
    other.in_step("set /w1 once more");
    waiter.in_step("woken once");
}

#[test]
fn a_key_that_has_come_counts_though_it_is_deleted_again() {
    const SET: [&str; 2] = ["0103000000000000002f77310000000000000000", "0103000000000000002f77320000000000000000"];
    const DELETE: [&str; 2] = ["0803000000000000002f7731", "0803000000000000002f7732"];
    // /w1, /w2 and /w1 again: a key that is named twice is waited for once.
    const WAIT: &str = "06030000000000000003000000000000002f773103000000000000002f773203000000000000002f7731";
    let server = serve(|_| {});
    for (first, second) in [(0, 1), (1, 0)] {
        let (mut waiter, mut other) = (Raw::open(server.port()), Raw::open(server.port()));
        waiter.send(WAIT);
        waiter.in_step("waiting");
        other.send(SET[first]);
        other.send(DELETE[first]);
        other.expect("0100000000000000", "gone again");
        waiter.in_step("waiting for the other");
        other.send(SET[second]);
        waiter.expect("00", "both have been there");
        other.send(DELETE[second]);
        other.expect("0100000000000000", "for the next round");
    }
}

#[test]
fn a_barrier_of_nobody_is_open() {
    let server = serve(|_| {});
    let mut raw = Raw::open(server.port());
    for world_size in ["0000000000000000", "ffffffffffffffff"] {
        raw.send("1202000000000000002f62");
        raw.send(world_size);
        raw.expect("00", "through at once");
    }
    raw.send("0302000000000000002f62");
    raw.expect("010000000000000032", "and counted");
    let store = join(server.port());
    store.barrier("b", 0, Duration::ZERO).unwrap();
}

#[test]
fn a_sum_wraps_around() {
    let server = serve(|_| {});
    let store = join(server.port());
    store.set("n", b"9223372036854775807").unwrap();
    assert_eq!(store.add("n", 1).unwrap(), i64::MIN);
    assert_eq!(store.get("n", LONG).unwrap(), b"-9223372036854775808");
    assert_eq!(store.add("n", -1).unwrap(), i64::MAX);
}

#[test]
fn an_empty_value_is_no_number() {
    let server = serve(|_| {});
    let store = join(server.port());
    store.set("e", b"").unwrap();
    for request in ["0402000000000000002f650100000000000000", "1202000000000000002f650100000000000000"] {
        let mut raw = Raw::open(server.port());
        raw.send(request);
        raw.expect_end("add to, and a barrier at, an empty value");
    }
    assert_eq!(store.get("e", LONG).unwrap(), b"", "left as it was");
}

#[test]
fn a_cancelled_wait_is_not_woken_and_a_client_can_wake_itself() {
    let server = serve(|_| {});
    let mut raw = Raw::open(server.port());
    raw.send("06010000000000000003000000000000002f7733 0c");
    raw.expect("01", "cancelled");
    raw.send("0103000000000000002f77330000000000000000");
    raw.in_step("nothing for the cancelled wait");
    raw.send("06010000000000000003000000000000002f7734 0103000000000000002f77340000000000000000");
    raw.expect("00", "its own set");
    raw.send("1203000000000000002f6232 0200000000000000 0c");
    raw.expect("01", "a barrier is cancelled like a wait");
    raw.send("1203000000000000002f6232 0200000000000000");
    raw.expect("00", "and had counted");
    raw.in_step("let through once");
}

#[test]
fn who_says_its_last_and_leaves_is_let_go() {
    let server = serve(|_| {});
    for round in 0..50 {
        let mut raw = Raw::connect(server.port());
        // The end comes with the bytes, in one event.
        raw.write(&[&unhex(VALIDATE)[..], &keyed(1, b"/k", &value(b"v"))].concat());
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        raw.expect_end(&format!("round {round}"));
    }
    assert_eq!(join(server.port()).get("k", LONG).unwrap(), b"v");
}

#[test]
fn a_cancelled_barrier_lets_nobody_through_later() {
    const BARRIER: &str = "1203000000000000002f6233 0200000000000000";
    let server = serve(|_| {});
    let (mut gone, mut other) = (Raw::open(server.port()), Raw::open(server.port()));
    gone.send(BARRIER);
    gone.in_step("waiting");
    gone.send("0c");
    gone.expect("01", "cancelled");
    other.send(BARRIER);
    other.expect("00", "the second to come");
    gone.in_step("told nothing");
    // Others' numbers are their own: 3 are wanted, and 3 have come.
    let mut three = Raw::open(server.port());
    three.send("1203000000000000002f6233 0300000000000000");
    three.expect("00", "the third");
    let mut four = Raw::open(server.port());
    four.send("1203000000000000002f6233 0500000000000000");
    four.in_step("waits for a fifth");
    three.send("1203000000000000002f6233 0300000000000000");
    three.expect("00", "the fifth");
    four.expect("00", "too");
}

#[test]
fn a_push_passes_over_who_waits_for_more() {
    let server = serve(|_| {});
    let mut raws: Vec<Raw> = (0..3).map(|_| Raw::open(server.port())).collect();
    let [both, one, pusher] = &mut raws[..] else { unreachable!() };
    both.send("06020000000000000003000000000000002f717103000000000000002f6161");
    both.in_step("waiting for the queue and for more");
    one.send("06010000000000000003000000000000002f7171");
    one.in_step("waiting for the queue");
    pusher.send("0e03000000000000002f7171010000000000000076");
    one.expect("00", "the first whom it satisfies");
    both.in_step("still waiting");
    pusher.send("0103000000000000002f61610000000000000000");
    both.expect("00", "now it has both");
    one.in_step("woken once");
}

#[test]
fn a_value_that_is_gone_is_not_handed_on() {
    const WAIT: &str = "06010000000000000003000000000000002f7171";
    let server = serve(|_| {});
    let mut raws: Vec<Raw> = (0..3).map(|_| Raw::open(server.port())).collect();
    let [first, second, other] = &mut raws[..] else { unreachable!() };
    first.send(WAIT);
    first.in_step("waiting");
    second.send(WAIT);
    second.in_step("waiting behind");
    other.send("0e03000000000000002f7171010000000000000076 0f03000000000000002f7171");
    other.expect("0100000000000000010000000000000076", "pushed, and popped at once");
    first.expect("00", "woken");
    first.in_step("goes on to something else");
    second.in_step("there is nothing to wake it for");
}

#[test]
fn what_waits_and_watches_took_is_given_back() {
    let server = serve(|options| options.memory = 256 << 10);
    let other = join(server.port());
    let key = [b"/".as_slice(), &[b'k'; 8_000]].concat();
    for round in 0..100 {
        let mut raw = Raw::open(server.port());
        let wait = [&[6][..], &1u64.to_le_bytes(), &value(&key)].concat();
        raw.write(&[&wait[..], &[12]].concat());
        raw.expect("01", "a wait that is cancelled");
        raw.write(&keyed(18, &key, &2i64.to_le_bytes()));
        raw.write(&[12]);
        raw.expect("01", "a barrier that is cancelled");
        raw.write(&wait);
        raw.expect("00", "a wait for the barrier's count");
        other.delete_key(std::str::from_utf8(&key[1..]).unwrap()).unwrap();
        raw.write(&keyed(130, &key, &[]));
        raw.expect("03", "a watch");
        drop(raw);
        // Until the server has noticed, it holds some of these.
        assert!(other.add("rounds", 1).unwrap() == round + 1);
    }
}

#[test]
fn a_push_wakes_one_waiter_and_nobody_later() {
    const WAIT: &str = "06010000000000000003000000000000002f7171";
    const PUSH: &str = "0e03000000000000002f7171010000000000000076";
    const POP: &str = "0f03000000000000002f7171";
    let server = serve(|_| {});
    let mut pusher = Raw::open(server.port());
    let mut waiters: Vec<Raw> = (0..3).map(|_| Raw::open(server.port())).collect();
    for waiter in &mut waiters {
        waiter.send(WAIT);
        waiter.in_step("waiting");
    }
    pusher.send(PUSH);
    pusher.in_step("pushed");
    waiters[0].expect("00", "the first is woken");
    waiters[1].in_step("the second is not");
    // The first takes nothing but goes on to something else: the value is the second's.
    waiters[0].send("06010000000000000003000000000000002f6161");
    waiters[1].expect("00", "handed on");
    waiters[1].send(POP);
    waiters[1].expect("0100000000000000010000000000000076", "popped");
    // Torch's server would now wake the first, which waits for another key.
    pusher.send(PUSH);
    waiters[2].expect("00", "the third is woken");
    waiters[0].in_step("woken for nothing");
    // And if the woken one dies, the next is woken.
    waiters[1].send(WAIT);
    waiters[1].expect("00", "there is a value");
    let mut next = Raw::open(server.port());
    pusher.send(POP);
    pusher.expect("0100000000000000010000000000000076", "popped by another");
    next.send(WAIT);
    next.in_step("waiting");
    waiters[2].send(POP);
    waiters[2].expect("0000000000000000", "empty");
    waiters[2].send(WAIT);
    waiters[2].in_step("waiting behind");
    pusher.send(PUSH);
    next.expect("00", "woken");
    drop(next);
    waiters[2].expect("00", "in its place");
}

#[test]
fn refuses_invalid_requests_and_serves_the_others() {
    let server = serve(|_| {});
    let mut other = Raw::open(server.port());
    let key = |size: usize| vec![b'k'; size];
    let long_value = [&keyed(1, b"/v", &[])[..], &((8u64 << 20) + 1).to_le_bytes()].concat();
    let count = |query: u8, count: u64| [&[query][..], &count.to_le_bytes()].concat();
    let mut spoiled: Vec<(&str, Vec<u8>)> = vec![
        ("second VALIDATE", unhex(VALIDATE)),
        ("key of 8193 bytes", keyed(1, &key(8193), &value(b""))),
        ("value of 8 MiB + 1", long_value),
        ("131073 keys", count(5, 131_073)),
        ("131073 pairs", count(11, 131_073)),
        ("a length of 2^64-1", [&[3][..], &[0xff; 8]].concat()),
        ("ADD to no number", [keyed(1, b"/x", &value(b"x")), keyed(4, b"/x", &1i64.to_le_bytes())].concat()),
        ("waiting twice", unhex("06010000000000000003000000000000002f7733 06010000000000000003000000000000002f7733")),
    ];
    spoiled.extend((19..=127).chain(131..=255).map(|query| ("unknown request", vec![query])));
    for (what, bytes) in spoiled {
        let mut raw = Raw::open(server.port());
        raw.0.write_all(&bytes).unwrap();
        raw.expect_end(what);
    }
    for (what, hex) in [("no VALIDATE", "0d07000000"), ("bad magic", "0001000000"), ("HTTP", "474554202f20485454502f312e31")] {
        let mut raw = Raw::connect(server.port());
        raw.send(hex);
        raw.expect_end(what);
    }
    other.in_step("the others are served");
    let big = keyed(1, &key(8192), &value(&vec![7; 8 << 20]));
    other.0.write_all(&big).unwrap();
    other.in_step("the largest key and value are taken");
}

#[test]
fn what_clients_left_unfinished_is_given_back() {
    let server = serve(|options| options.memory = 4 << 20);
    for _ in 0..10 {
        let mut raw = Raw::open(server.port());
        let half = [&keyed(1, b"/half", &[])[..], &(4u64 << 20).to_le_bytes(), &vec![7; 2 << 20]].concat();
        raw.0.write_all(&half).unwrap();
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        raw.expect_end("it has said its last");
    }
    let other = join(server.port());
    other.set("k", &[7; 1 << 20]).unwrap();
    assert_eq!(other.get("k", LONG).unwrap().len(), 1 << 20);
}

#[test]
fn who_does_not_read_is_not_read_from_and_loses_nothing() {
    const REPLIES: usize = 200;
    let server = serve(|options| options.memory = 16 << 20);
    let (mut slow, other) = (Raw::open(server.port()), join(server.port()));
    let big: Vec<u8> = (0..1 << 20).map(|i| (i % 251) as u8).collect();
    other.set("big", &big).unwrap();
    assert_eq!(other.num_keys().unwrap(), 1);
    // 200 MiB of replies, of which the server keeps next to nothing: its limit is 16 MiB.
    (0..REPLIES).for_each(|_| slow.send("0304000000000000002f626967"));
    for _ in 0..100 {
        assert_eq!(other.add("n", 0).unwrap(), 0, "the others are served");
    }
    other.set("big", b"small").unwrap();
    assert_eq!(other.get("big", LONG).unwrap(), b"small");
    let mut sizes = Vec::new();
    for _ in 0..REPLIES {
        let mut len = [0; 8];
        slow.0.read_exact(&mut len).unwrap();
        let mut got = vec![0; u64::from_le_bytes(len) as usize];
        slow.0.read_exact(&mut got).unwrap();
        assert!(got == big || got == b"small", "a reply of {} bytes", got.len());
        sizes.push(got.len());
    }
    assert!(sizes.is_sorted_by(|a, b| a >= b), "in order: {sizes:?}");
    assert_eq!((sizes[0], sizes[REPLIES - 1]), (big.len(), 5), "the last was asked for while there was no room");
    slow.in_step("nothing more");
}

#[test]
fn memory_is_bounded_and_whoever_exceeds_it_goes() {
    let server = serve(|options| options.memory = 4 << 20);
    let other = join(server.port());
    other.set("kept", b"v").unwrap();
    let mut greedy = Raw::open(server.port());
    let piece = keyed(9, b"/big", &value(&vec![1; 1 << 20]));
    // The last is refused; its sender may notice while it writes.
    let _ = (0..16).try_for_each(|_| greedy.0.write_all(&piece));
    greedy.expect_end("more than 4 MiB");
    // Nothing is left of the limit, and one who takes nothing of it is served.
    for _ in 0..10 {
        let newcomer = join(server.port());
        assert_eq!(newcomer.get("kept", LONG).unwrap(), b"v");
        assert!(!newcomer.check(&[&"k".repeat(8000)]).unwrap());
        assert_eq!(other.get("kept", LONG).unwrap(), b"v");
    }
    assert!(other.get("big", Duration::ZERO).unwrap().len() <= 4 << 20);
    assert!(other.delete_key("big").unwrap());
    other.set("again", &vec![2; 1 << 20]).unwrap();
    assert_eq!(other.get("again", LONG).unwrap().len(), 1 << 20);
    // Half a request counts as well.
    let mut half = Raw::open(server.port());
    let request = [&[11][..], &100u64.to_le_bytes(), &[value(b"/k"), value(&vec![3; 1 << 20])].concat().repeat(8)].concat();
    let _ = half.0.write_all(&request);
    half.expect_end("half a request of 8 MiB");
    assert!(other.check(&["again"]).unwrap());
}

#[test]
fn the_death_of_waiting_clients_is_nobodys_loss() {
    let server = serve(|_| {});
    let other = join(server.port());
    for round in 0..20 {
        let waiters: Vec<Raw> = (0..10)
            .map(|i| {
                let mut raw = Raw::open(server.port());
                let waiting =
                    if i % 2 == 0 { "06010000000000000003000000000000002f7731" } else { "1203000000000000002f6262ff00000000000000" };
                raw.send(waiting);
                raw.in_step("waiting");
                raw
            })
            .collect();
        drop(waiters);
        assert_eq!(other.add("rounds", 1).unwrap(), round + 1);
    }
    other.set("w1", b"").unwrap();
    assert_eq!(other.get("bb", LONG).unwrap(), b"100", "a barrier counts who came");
}

#[test]
fn hundreds_wait_for_one_key() {
    const CLIENTS: usize = 400;
    let server = serve(|_| {});
    let mut clients: Vec<Raw> = (0..CLIENTS).map(|_| Raw::open(server.port())).collect();
    for client in &mut clients {
        client.send("06010000000000000003000000000000002f676f");
        client.in_step("waiting");
    }
    clients[0].send("0103000000000000002f676f0000000000000000");
    for client in &mut clients {
        client.expect("00", "woken");
    }
}

#[test]
fn a_cancelled_wait_loses_its_place() {
    const WAIT: &str = "06010000000000000003000000000000002f7171";
    const PUSH: &str = "0e03000000000000002f7171010000000000000076";
    let server = serve(|_| {});
    let mut raws: Vec<Raw> = (0..3).map(|_| Raw::open(server.port())).collect();
    let [first, second, pusher] = &mut raws[..] else { unreachable!() };
    first.send(&[WAIT, "0c"].concat());
    first.expect("01", "cancelled");
    let mut gone = Raw::open(server.port());
    gone.send(WAIT);
    gone.in_step("waiting");
    gone.0.shutdown(std::net::Shutdown::Write).unwrap();
    gone.expect_end("gone");
    second.send(WAIT);
    second.in_step("waiting");
    // It gets the number that the one who went had.
    let mut third = Raw::open(server.port());
    for raw in [&mut *first, &mut third] {
        raw.send(WAIT);
        raw.in_step("waiting behind");
    }
    for (next, what) in [(second, "the first who still waits"), (first, "the second"), (&mut third, "the third")] {
        pusher.send(PUSH);
        next.expect("00", what);
        next.send("0f03000000000000002f7171");
        next.expect("0100000000000000010000000000000076", what);
    }
}

#[test]
fn what_had_arrived_is_taken_in_before_the_server_stops() {
    const PAIRS: u64 = 128 << 10;
    for _ in 0..20 {
        let server = serve(|_| {});
        let mut raws: Vec<Raw> = (0..3).map(|_| Raw::open(server.port())).collect();
        let [busy, waiter, writer] = &mut raws[..] else { unreachable!() };
        waiter.send("06010000000000000003000000000000002f6b62");
        waiter.in_step("waiting");
        // All of a long request but its last byte, read when the server has gone round often enough.
        let pair = [value(b"/k"), value(b"v")].concat();
        let long = [&[11][..], &PAIRS.to_le_bytes(), &pair.repeat(PAIRS as usize)].concat();
        let (last, most) = long.split_last().unwrap();
        busy.write(most);
        (0..20).for_each(|_| writer.in_step("there"));
        // While the server is at it the write comes, and the word to stop.
        busy.write(&[*last]);
        writer.write(&keyed(1, b"/kb", &value(b"v")));
        drop(server);
        waiter.expect("00", "the write counts");
        waiter.expect_end("and that was the server's last word");
    }
}

#[test]
fn stops_while_clients_are_connected_and_its_port_is_free_again() {
    let port = own_port();
    let server = serve(|options| options.port = port);
    let store = join(port);
    drop(server);
    let error = store.add("n", 1).unwrap_err();
    assert!(error.to_string().contains("Connection was likely closed. Did the remote server shutdown or crash?"), "{error}");
    assert!(matches!(error, Error::Network(_)));
    // A new server at the same port is another store: the old connection stays broken, and says so.
    let _server = serve(|options| options.port = port);
    assert_eq!(store.check(&["n"]).unwrap_err().to_string(), error.to_string());
    assert_eq!(store.reconnect().unwrap().add("n", 1).unwrap(), 1);
}

#[test]
fn listens_where_it_is_told() {
    let server = serve(|_| {});
    for address in ["127.0.0.1", "::1"] {
        let mut raw = Raw::new(TcpStream::connect((address, server.port())).unwrap_or_else(|e| panic!("{address}: {e}")));
        raw.send(VALIDATE);
        raw.in_step(address);
    }
    for (bind, other) in [("127.0.0.1", "::1"), ("::1", "127.0.0.1")] {
        let server = serve(|options| options.bind = Some(bind.parse().unwrap()));
        assert!(TcpStream::connect((bind, server.port())).is_ok(), "{bind}");
        assert!(TcpStream::connect((other, server.port())).is_err(), "{bind} only");
    }
    let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = bound.local_addr().unwrap().port();
    let server = serve(|options| options.socket = Some(bound.into()));
    assert_eq!(server.port(), port);
    assert_eq!(join(port).add("n", 2).unwrap(), 2);

    let error = Server::start(ServerOptions { port, bind: Some(Ipv4Addr::LOCALHOST.into()), ..ServerOptions::default() }).err().unwrap();
    assert!(error.to_string().contains("The server socket has failed to listen on any local network address. port: "), "{error}");
    let error = Server::start(ServerOptions { port: 0, bind: Some(Ipv6Addr::from(1 << 100).into()), ..ServerOptions::default() });
    assert!(matches!(error.err().unwrap(), Error::Network(_)));
}

#[test]
fn stores_of_one_process_share_the_server_of_a_port() {
    let options = |port| ServerOptions { port, ..ServerOptions::default() };
    let open = |port| TcpStore::new(Host::Shared("localhost".into(), options(port)), TcpOptions::default()).unwrap();
    let first = open(own_port());
    let second = open(first.port());
    first.set("k", b"v").unwrap();
    assert_eq!(first.num_keys().unwrap(), 1);
    assert_eq!(second.get("k", LONG).unwrap(), b"v");
    let port = first.port();
    drop(first);
    second.set("k", b"w").unwrap();
    drop(second);
    let third = open(port);
    assert!(!third.check(&["k"]).unwrap(), "the last user took the server along");
}

#[test]
fn a_server_that_others_share_is_the_one_that_they_asked_for() {
    let address = Ipv4Addr::LOCALHOST;
    let options = |port| ServerOptions { port, bind: Some(address.into()), secret: Secret::new("one"), ..ServerOptions::default() };
    let first = Server::shared(options(0)).unwrap();
    let port = first.port();
    assert_eq!(Server::shared(options(port)).unwrap().port(), port);
    let refused = |options| Server::shared(options).err().expect("another server").to_string();
    let error = refused(ServerOptions { bind: None, ..options(port) });
    assert_eq!(error, format!("port {port}: this process serves a store there already, on {address}, and not on all addresses"));
    let error = refused(ServerOptions { secret: Secret::new("two"), ..options(port) });
    assert_eq!(error, format!("port {port}: this process serves a store there already, with another secret"));
}
