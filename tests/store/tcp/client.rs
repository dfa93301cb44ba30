//! The client, against peers that play the server.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use railhead::store::tcp::{Host, ServerOptions, TcpOptions};
use railhead::store::{Error, FOREVER, Store, TcpStore};

use super::wire::{Raw, VALIDATE, unhex};
use super::{LONG, join, serve};
use crate::ports::own_port;

/// Plays a server that expects and replies as written, `C>` and `S>` in turn, while `run` uses a store connected to it.
fn played(script: &[(&str, &str)], run: impl FnOnce(TcpStore)) {
    let listener = TcpListener::bind("localhost:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut raw = greeted(&listener);
            for (request, reply) in script {
                raw.expect(request, "request");
                raw.send(reply);
            }
            // Nothing was sent beyond the script.
            raw.expect_end("the end");
        });
        run(join(port));
    });
}

/// How a wait of so long has ended, and whether it has used up all 80 ms that a server has to answer its cancellation.
fn waited(timeout: Duration, wait: impl FnOnce(Duration) -> Result<(), Error>) -> (Result<(), String>, bool) {
    let begun = std::time::Instant::now();
    let end = wait(timeout).map_err(|error| error.to_string());
    (end, begun.elapsed() >= timeout + Duration::from_millis(80))
}

/// The same, again while the peer was late to answer a cancelled wait, as it may be on a busy machine: how each wait has ended. Who says that the peer
/// does not answer before its time is over is not played to again.
fn played_in_time<const N: usize>(
    script: &[(&str, &str)],
    run: impl Fn(&TcpStore) -> [(Result<(), String>, bool); N],
) -> [Result<(), String>; N] {
    for _ in 0..10 {
        let mut ends = [const { (Ok(()), false) }; N];
        played(script, |store| ends = run(&store));
        let is_late = |(end, used_up): &(Result<(), String>, bool)| {
            *used_up && end.as_ref().is_err_and(|text| text.ends_with("; the server does not answer"))
        };
        if !ends.iter().any(is_late) {
            return ends.map(|(end, _)| end);
        }
    }
    panic!("a server that answers at once was never in time");
}

/// Accepts a client that opens its connection as torch's does.
pub fn greeted(listener: &TcpListener) -> Raw {
    let mut raw = Raw::new(listener.accept().unwrap().0);
    raw.expect(VALIDATE, "VALIDATE");
    let nonce = format!("{:08x}", std::process::id().swap_bytes());
    raw.expect(&format!("0d{nonce}"), "PING with the process id, as torch's");
    raw.send(&nonce);
    raw
}

#[test]
fn sends_what_torchs_sends_and_understands_what_torchs_server_answers() {
    let script = [
        ("0102000000000000002f6b010000000000000076", ""),
        ("06010000000000000002000000000000002f6b", "00"),
        ("0302000000000000002f6b", "010000000000000076"),
        ("0402000000000000002f6e0300000000000000", "0300000000000000"),
        ("0203000000000000002f63730000000000000000010000000000000078", "010000000000000078"),
        ("0203000000000000002f636d03000000000000006f6c6403000000000000006e6577", "03000000000000006f6c64"),
        ("05020000000000000002000000000000002f6b03000000000000002f7a7a", "01"),
        ("06010000000000000002000000000000002f6b", "00"),
        ("06010000000000000005000000000000002f6e6f7065", ""),
        ("0c", "01"),
        ("07", "0400000000000000"),
        ("0802000000000000002f6b", "0100000000000000"),
        ("0903000000000000002f617001000000000000007a", ""),
        ("0b020000000000000002000000000000002f6101000000000000003102000000000000002f62010000000000000032", ""),
        ("06020000000000000002000000000000002f6102000000000000002f62", "00"),
        ("0a020000000000000002000000000000002f6102000000000000002f62", "010000000000000031010000000000000032"),
        ("0e02000000000000002f71010000000000000076", ""),
        ("06010000000000000002000000000000002f71", "00"),
        ("0f02000000000000002f71", "0100000000000000010000000000000076"),
        ("0f02000000000000002f71", "0000000000000000"),
        ("1002000000000000002f71", "0000000000000000"),
        ("11", "020000000000000003000000000000002f7a7a0500000000000000696e69742f"),
        ("1204000000000000002f6261720100000000000000", "00"),
        ("1205000000000000002f626172320200000000000000", ""),
        ("0c", "01"),
        ("040500000000000000696e69742f0100000000000000", "0100000000000000"),
    ];
    let ends = played_in_time(&script, |store| {
        store.set("k", b"v").unwrap();
        assert_eq!(store.get("k", LONG).unwrap(), b"v");
        assert_eq!(store.add("n", 3).unwrap(), 3);
        assert_eq!(store.compare_set("cs", b"", b"x").unwrap(), b"x");
        assert_eq!(store.compare_set("cm", b"old", b"new").unwrap(), b"old");
        assert!(!store.check(&["k", "zz"]).unwrap());
        store.wait(&["k"], FOREVER).unwrap();
        let missing = waited(Duration::from_millis(300), |timeout| store.wait(&["nope"], timeout));
        assert_eq!(store.num_keys().unwrap(), 4);
        assert!(store.delete_key("k").unwrap());
        store.append("ap", b"z").unwrap();
        store.multi_set(&[("a", b"1"), ("b", b"2")]).unwrap();
        assert_eq!(store.multi_get(&["a", "b"], LONG).unwrap(), [b"1", b"2"]);
        store.queue_push("q", b"v").unwrap();
        assert_eq!(store.queue_pop("q", LONG).unwrap(), b"v");
        assert_eq!(store.queue_pop("q", Duration::ZERO).unwrap_err().to_string(), "queue is empty");
        assert_eq!(store.queue_len("q").unwrap(), 0);
        assert_eq!(store.list_keys().unwrap(), ["zz"]);
        store.barrier("bar", 1, LONG).unwrap();
        let met = waited(Duration::from_millis(300), |timeout| store.barrier("bar2", 2, timeout));
        store.wait_for_workers(5, LONG).unwrap();
        [missing, met]
    });
    assert_eq!(ends, ["wait timeout after 300ms, keys: /nope", "barrier timeout after 300ms, key: bar2"].map(|text| Err(text.into())));
}

#[test]
fn a_release_that_meets_the_cancel_counts() {
    let script = [
        ("06010000000000000002000000000000002f61", ""),
        // The release was on its way when the cancel came.
        ("0c", "0001"),
        ("07", "0700000000000000"),
    ];
    let ends = played_in_time(&script, |store| {
        let released = waited(Duration::from_millis(20), |timeout| store.wait(&["a"], timeout));
        assert_eq!(store.num_keys().unwrap(), 7, "in step");
        [released]
    });
    assert_eq!(ends, [Ok(())]);
}

#[test]
fn a_popper_that_was_overtaken_waits_on() {
    const WAIT: &str = "06010000000000000002000000000000002f71";
    const POP: &str = "0f02000000000000002f71";
    let script = [(WAIT, "00"), (POP, "0000000000000000"), (WAIT, "00"), (POP, "0100000000000000010000000000000076")];
    played(&script, |store| assert_eq!(store.queue_pop("q", LONG).unwrap(), b"v"));
}

#[test]
fn a_key_of_the_queues_name_does_not_keep_a_popper_beyond_its_time() {
    let server = serve(|_| {});
    let (popper, other) = (join(server.port()), join(server.port()));
    popper.set("k", b"v").unwrap();
    // A wait finds the key there each time, a pop finds no queue.
    let error = popper.queue_pop("k", Duration::from_millis(30)).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error:?}");
    assert_eq!(error.to_string(), "wait timeout after 30ms, keys: /k");
    thread::scope(|scope| {
        let popped = scope.spawn(|| popper.queue_pop("k", LONG));
        other.queue_push("k", b"queued").unwrap();
        assert_eq!(popped.join().unwrap().unwrap(), b"queued", "both live under one name");
    });
    assert_eq!(popper.get("k", LONG).unwrap(), b"v");
}

#[test]
fn large_values_go_both_ways() {
    let server = serve(|_| {});
    let store = join(server.port());
    for size in [1 << 14, (1 << 14) + 1, 1 << 20, 8 << 20] {
        let value: Vec<u8> = (0..size).map(|i| (i * 7 + i / 256) as u8).collect();
        store.set("big", &value).unwrap();
        assert!(store.get("big", LONG).unwrap() == value, "{size} bytes");
        assert!(store.multi_get(&["big", "big"], LONG).unwrap().iter().all(|got| *got == value), "{size} bytes twice");
    }
}

#[test]
fn a_peer_that_is_no_store_is_an_error_and_takes_no_memory() {
    type Call = fn(&TcpStore) -> Result<(), Error>;
    let invalid: [(&str, Call); 6] = [
        ("07", |s| s.wait(&["k"], LONG)),
        ("00ffffffffffffffff", |s| s.get("k", LONG).map(|_| ())),
        ("00ffffffffff000000", |s| s.get("k", LONG).map(|_| ())),
        ("ffffffffffffff7f0100000000000000", |s| s.list_keys().map(|_| ())),
        ("0100", |s| s.add("n", 1).map(|_| ())),
        ("", |s| s.num_keys().map(|_| ())),
    ];
    for (reply, call) in invalid {
        let listener = TcpListener::bind("localhost:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut raw = greeted(&listener);
                raw.send(reply);
                raw.0.shutdown(Shutdown::Write).unwrap();
                // Whatever the client says, until it has had enough.
                let _ = raw.0.read_to_end(&mut Vec::new());
            });
            let store = join(port);
            let error = call(&store).expect_err(reply);
            assert!(matches!(error, Error::Network(_)), "{reply}: {error}");
            let next = store.set("k", b"").unwrap_err();
            assert_eq!(next.to_string(), error.to_string(), "nothing is sent on a stream that is out of step");
        });
    }
}

#[test]
fn waits_for_a_server_that_is_not_there_yet() {
    let port = own_port();
    thread::scope(|scope| {
        let client = scope.spawn(|| join(port).add("n", 5).unwrap());
        // The client may come first or second: both must do.
        let server = serve(|options| options.port = port);
        assert_eq!(client.join().unwrap(), 5);
        drop(server);
    });
}

#[test]
fn gives_up_connecting_in_time_and_says_where_to() {
    let port = own_port();
    let options = TcpOptions { timeout: Duration::from_millis(300), ..TcpOptions::default() };
    let give_up = |port: u16| TcpStore::new(Host::Other("127.0.0.1".into(), port), options.clone()).err().unwrap().to_string();
    let before = Instant::now();
    let error = give_up(port);
    let expected = format!("The client socket has timed out after 300ms while trying to connect to (127.0.0.1, {port})");
    assert!(error.starts_with(&expected), "{error}");
    assert!(before.elapsed() < LONG);
    // One that accepts and says nothing.
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let error = give_up(listener.local_addr().unwrap().port());
    assert!(error.starts_with("The client socket has timed out after 300ms"), "{error}");
}

#[test]
fn the_one_with_the_server_waits_for_the_others() {
    const WORLD: usize = 4;
    let world = TcpOptions { world_size: Some(WORLD), timeout: LONG, ..TcpOptions::default() };
    let port = own_port();
    thread::scope(|scope| {
        for _ in 1..WORLD {
            scope.spawn(|| TcpStore::new(Host::Other("localhost".into(), port), world.clone()).unwrap());
        }
        let own = Host::Own("localhost".into(), ServerOptions { port, ..ServerOptions::default() });
        let store = TcpStore::new(own, world.clone()).unwrap();
        assert_eq!(store.num_keys().unwrap(), 1, "torch counts its own key, too");
        assert!(store.list_keys().unwrap().is_empty(), "but does not show it");
    });

    let own = Host::Own("localhost".into(), ServerOptions { port: 0, ..ServerOptions::default() });
    // Patient until it is connected, and not afterwards.
    let alone = TcpStore::new(own, TcpOptions { timeout: LONG, ..TcpOptions::default() }).unwrap();
    let error = alone.wait_for_workers(3, Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.to_string(), "Timed out after 0 seconds waiting for clients. 1/3 clients joined.");
    assert!(matches!(error, Error::Timeout(_)));
}

#[test]
fn a_waiter_learns_at_once_that_the_server_is_gone() {
    let server = serve(|_| {});
    let stores: Vec<Arc<TcpStore>> = (0..4).map(|_| Arc::new(join(server.port()))).collect();
    thread::scope(|scope| {
        let waiters: Vec<_> = stores.iter().map(|store| scope.spawn(|| store.wait(&["never"], FOREVER))).collect();
        // Some may not have begun to wait: for them the connection is as dead, or reset, if the server had not read what they ask.
        drop(server);
        for waiter in waiters {
            let error = waiter.join().unwrap().unwrap_err().to_string();
            let said = error.strip_suffix(" (Connection reset by peer (os error 104))").unwrap_or(&error);
            assert!(said.ends_with("Did the remote server shutdown or crash?"), "{error}");
        }
    });
}

#[test]
fn a_refusal_is_told_from_a_server_that_is_gone_or_was_restarted() {
    let port = own_port();
    let start = || serve(|options| options.port = port);
    let server = start();
    let connect = || join(port);
    let (late, refused, unanswered, asks, waits) = (connect(), connect(), connect(), connect(), connect());
    refused.set("text", b"x").unwrap();
    let refusal = " Or it refused the request, for it serves others: keys up to 8 KiB, values up to 8 MiB, and add only on numbers";
    let error = refused.add("text", 1).unwrap_err().to_string();
    assert!(error.contains(refusal) && error.contains(", port "), "{error}");
    // A refused set is told by the next reply.
    let error = unanswered.set(&"k".repeat(9_000), b"").and_then(|()| unanswered.num_keys()).unwrap_err().to_string();
    assert!(error.contains(refusal), "{error}");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| waits.wait(&["never"], FOREVER).unwrap_err().to_string());
        drop(server);
        let error = waiter.join().unwrap();
        assert!(error.ends_with("Did the remote server shutdown or crash?"), "{error}");
    });
    let error = asks.add("n", 1).unwrap_err().to_string();
    assert!(error.ends_with("Did the remote server shutdown or crash?"), "{error}");
    let _restarted = start();
    let error = late.add("n", 1).unwrap_err().to_string();
    assert!(error.ends_with("Did the remote server shutdown or crash?"), "it ended while nothing was asked: {error}");
}

#[test]
fn odd_replies_in_pieces_are_put_together() {
    let listener = TcpListener::bind("localhost:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut raw = greeted(&listener);
            raw.expect("06010000000000000002000000000000002f6b", "WAIT");
            raw.send("00");
            raw.expect("0302000000000000002f6b", "GET");
            for byte in unhex("0300000000000000616263") {
                raw.0.write_all(&[byte]).unwrap();
            }
            raw.expect_end("the end");
        });
        assert_eq!(join(port).get("k", LONG).unwrap(), b"abc");
    });
}
