//! Watching a key: the bytes of the extension, and what a watcher that does not read costs.

use std::sync::mpsc;

use railhead::store::{Change, Error, Store};

use super::wire::Raw;
use super::{LONG, join, serve};
use std::net::TcpListener;

#[test]
fn a_watcher_is_told_and_others_are_not() {
    let server = serve(|_| {});
    let (mut watcher, mut other) = (Raw::open(server.port()), Raw::open(server.port()));
    watcher.send("8202000000000000002f6b");
    watcher.expect("03", "registered");
    watcher.send("8202000000000000002f6e");
    watcher.expect("03", "and another");
    other.send("0102000000000000002f6b010000000000000076");
    watcher.expect("01 02000000000000002f6b 0000000000000000 010000000000000076", "created");
    other.send("0402000000000000002f6e0300000000000000");
    other.expect("0300000000000000", "add, and nothing else");
    watcher.expect("01 02000000000000002f6e 0000000000000000 010000000000000033", "created");
    other.send("0102000000000000002f6b010000000000000077");
    watcher.expect("00 02000000000000002f6b 010000000000000076 010000000000000077", "updated");
    other.send("0802000000000000002f6b");
    other.expect("0100000000000000", "deleted");
    watcher.expect("02 02000000000000002f6b 010000000000000077 0000000000000000", "deleted");
    other.in_step("told of nothing");
    // Replies and changes would not be told apart.
    watcher.send("07");
    watcher.expect_end("a watcher that asks for something else");
    other.send("0102000000000000002f6b010000000000000076");
    other.in_step("the others are served");
}

#[test]
fn a_barrier_counts_as_a_change_and_a_wait_and_a_watch_exclude_each_other() {
    let server = serve(|_| {});
    let (mut watcher, mut other) = (Raw::open(server.port()), Raw::open(server.port()));
    watcher.send("8202000000000000002f62");
    watcher.expect("03", "registered");
    other.send("1202000000000000002f620100000000000000");
    other.expect("00", "through");
    watcher.expect("01 02000000000000002f62 0000000000000000 010000000000000031", "counted");
    let mut waiter = Raw::open(server.port());
    waiter.send("06010000000000000003000000000000002f7733 8202000000000000002f62");
    waiter.expect_end("it waits");
}

#[test]
fn a_watcher_that_does_not_read_is_given_up_and_holds_nothing_back() {
    let server = serve(|options| options.memory = 24 << 20);
    let mut watcher = Raw::open(server.port());
    watcher.send("8202000000000000002f6b");
    watcher.expect("03", "registered");
    let writer = join(server.port());
    // Far more than the kernel's buffers and the server's limit.
    for round in 0..400u32 {
        writer.set("k", &vec![round as u8; 256 << 10]).unwrap();
    }
    assert_eq!(writer.num_keys().unwrap(), 1, "the writer is served");
    writer.set("k", &vec![1; 8 << 20]).unwrap();
    assert_eq!(writer.num_keys().unwrap(), 1, "and nothing is held for the watcher any more");
    let mut sink = Vec::new();
    use std::io::Read;
    let _ = watcher.0.read_to_end(&mut sink);
    assert!(sink.len() > 1 << 20 && sink.len() < 100 << 20, "{} bytes had been sent", sink.len());
}

#[test]
fn a_lost_server_is_told_once() {
    let server = serve(|_| {});
    let store = join(server.port());
    let (send, seen) = mpsc::channel();
    let _watch = store.watch_key("k", Box::new(move |change| send.send(format!("{change:?}")).unwrap())).unwrap();
    drop(server);
    let lost = seen.recv_timeout(LONG).unwrap();
    assert!(lost.starts_with("Lost(Network(") && lost.contains("Did the remote server shutdown or crash?"), "{lost}");
    assert!(seen.recv_timeout(LONG).is_err(), "the thread has ended");
    let _ = Change::Created(b"");
}

#[test]
fn a_server_without_the_extension_is_named() {
    let listener = TcpListener::bind("localhost:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The store, the watch, and a look whether the server is still there.
            for watches in [false, true, false] {
                let mut raw = Raw::new(listener.accept().unwrap().0);
                raw.expect("00cef7853c", "VALIDATE");
                let ping = raw.take(5);
                raw.write(&ping[1..]);
                if watches {
                    // As torch does with a request that it does not know.
                    raw.expect("8202000000000000002f6b", "WATCH_KEY");
                } else {
                    scope.spawn(move || raw.expect_end("the store's end"));
                }
            }
        });
        let error = join(port).watch_key("k", Box::new(|_| ())).err().unwrap();
        assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
        assert_eq!(error.to_string(), "The server does not know watch_key: torch's do not.");
    });
}
