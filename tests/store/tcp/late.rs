//! No operation returns later than 100 ms after its timeout, whatever the other side does. A server that is stopped is in `store_clients.rs`.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use railhead::base::config::Secret;
use railhead::store::rendezvous::store_based_barrier;
use railhead::store::tcp::{Host, ServerOptions, TcpOptions};
use railhead::store::{Error, FOREVER, Store, TcpStore};
use socket2::{Domain, Socket, Type};

use super::client::greeted;
use super::{LONG, join, serve};

const TIMEOUT: Duration = Duration::from_millis(200);
const LATE: Duration = Duration::from_millis(100);

/// Runs something that gives up after `timeout`, until it has been in time once: a busy machine may be late itself.
#[track_caller]
fn in_time<R>(timeout: Duration, run: impl Fn() -> R) -> R {
    part_in_time(timeout, || timed(&run))
}

/// The same of a part, whose time `run` says: what comes before is no part of it.
#[track_caller]
fn part_in_time<R>(timeout: Duration, run: impl Fn() -> (Duration, R)) -> R {
    let mut took = Vec::new();
    for _ in 0..10 {
        let (time, result) = run();
        took.push(time);
        if time <= timeout + LATE {
            return result;
        }
    }
    panic!("a timeout of {timeout:?} took {took:?}");
}

fn timed<R>(run: impl FnOnce() -> R) -> (Duration, R) {
    let start = Instant::now();
    let result = run();
    (start.elapsed(), result)
}

fn connect(port: u16, secret: &str) -> Result<TcpStore, Error> {
    let options = TcpOptions { timeout: TIMEOUT, secret: Secret::new(secret), ..TcpOptions::default() };
    TcpStore::new(Host::Other("127.0.0.1".into(), port), options)
}

#[test]
fn connecting_to_one_who_says_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for secret in ["", "sesame"] {
        let error = in_time(TIMEOUT, || connect(listener.local_addr().unwrap().port(), secret).err().unwrap());
        assert!(error.to_string().starts_with("The client socket has timed out after 200ms"), "{error}");
    }
}

#[test]
fn connecting_where_nobody_accepts_and_the_backlog_is_full() {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let full: Vec<TcpStream> = (0..100).map_while(|_| TcpStream::connect_timeout(&address, TIMEOUT).ok()).collect();
    assert!(full.len() < 100, "it is never full");
    in_time(TIMEOUT, || connect(address.port(), "").err().unwrap());
}

#[test]
fn the_others_are_waited_for_within_the_time_for_connecting() {
    let error = in_time(TIMEOUT, || {
        let options = ServerOptions { port: 0, ..ServerOptions::default() };
        let world = TcpOptions { world_size: Some(2), timeout: TIMEOUT, ..TcpOptions::default() };
        TcpStore::new(Host::Own("localhost".into(), options), world).err().unwrap()
    });
    assert!(error.to_string().ends_with("1/2 clients joined."), "{error}");
}

#[test]
fn a_reply_that_comes_byte_by_byte() {
    let error = part_in_time(TIMEOUT, || {
        let listener = TcpListener::bind("localhost:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut raw = greeted(&listener);
                raw.expect("06010000000000000002000000000000002f6b", "WAIT");
                // Released, and a value of 2^24 bytes.
                raw.send("00 0000000100000000");
                while std::io::Write::write_all(&mut raw.0, &[7]).is_ok() {
                    thread::sleep(Duration::from_millis(5));
                }
            });
            let store = join(port);
            timed(|| store.get("k", TIMEOUT).unwrap_err())
        })
    });
    assert!(matches!(error, Error::Timeout(_)), "{error:?}");
}

#[test]
fn while_another_thread_waits_on_the_same_store() {
    let server = serve(|_| {});
    let (store, other) = (connect(server.port(), "").unwrap(), join(server.port()));
    thread::scope(|scope| {
        scope.spawn(|| store.wait(&["late"], FOREVER).unwrap());
        // The other thread may not have begun; once it has, nobody gets a turn.
        let end = Instant::now() + LONG;
        while store.add("n", 1).is_ok() {
            assert!(Instant::now() < end);
        }
        for timeout in [TIMEOUT, Duration::ZERO] {
            let error = in_time(timeout, || store.get("n", timeout).unwrap_err());
            assert!(matches!(error, Error::Timeout(_)) && error.to_string().contains("another thread"), "{error:?}");
        }
        let error = in_time(TIMEOUT, || store.num_keys().unwrap_err());
        assert!(matches!(error, Error::Timeout(_)), "{error:?}");
        other.set("late", b"").unwrap();
    });
    assert_eq!(store.get("late", LONG.min(TIMEOUT * 10)).unwrap(), b"");
}

#[test]
fn a_barrier_of_keys_in_a_store_that_is_patient() {
    let error = part_in_time(TIMEOUT, || {
        let listener = TcpListener::bind("localhost:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::scope(|scope| {
            let silent = scope.spawn(|| greeted(&listener));
            let store = join(port);
            let _silent = silent.join().unwrap();
            timed(|| store_based_barrier(&store, "0:0", 0, 2, TIMEOUT).unwrap_err())
        })
    });
    assert!(matches!(error, Error::Timeout(_)), "{error:?}");
}
