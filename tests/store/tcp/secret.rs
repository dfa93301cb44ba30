//! The shared secret: who knows it gets in, nobody else does or learns anything.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use railhead::base::config::Secret;
use railhead::store::tcp::{Host, ServerOptions, TcpOptions};
use railhead::store::{Error, Store, TcpStore};
use sha2::Sha256;

use super::wire::{Raw, VALIDATE, keyed, unhex, value};
use super::{LONG, join, serve};

const CHALLENGE: &str = "80";

fn options(secret: &str) -> TcpOptions {
    TcpOptions { timeout: LONG, secret: Secret::new(secret), ..TcpOptions::default() }
}

fn enter(port: u16, secret: &str) -> Result<TcpStore, Error> {
    TcpStore::new(Host::Other("localhost".into(), port), options(secret))
}

/// The code as the protocol defines it, made without the library.
fn code(secret: &str, who: &str, server: &[u8], client: &[u8]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    [format!("railhead store {who}").as_bytes(), server, client].iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().to_vec()
}

/// Asks for a challenge and returns the nonce.
fn challenged(raw: &mut Raw) -> Vec<u8> {
    raw.send(CHALLENGE);
    raw.expect("01", "there is a secret");
    raw.take(16)
}

fn prove(nonce: &[u8], code: &[u8]) -> Vec<u8> {
    [&[0x81], nonce, code].concat()
}

#[test]
fn who_knows_the_secret_gets_in() {
    let server = serve(|options| options.secret = Secret::new("sesame"));
    let store = enter(server.port(), "sesame").unwrap();
    store.set("k", b"v").unwrap();
    assert_eq!(store.reconnect().unwrap().get("k", LONG).unwrap(), b"v");
    let own = ServerOptions { port: 0, secret: Secret::new("mine"), ..ServerOptions::default() };
    let own = TcpStore::new(Host::Own("localhost".into(), own), TcpOptions::default()).unwrap();
    assert_eq!(own.add("n", 1).unwrap(), 1, "a store knows the secret of its own server");
}

#[test]
fn who_does_not_is_refused_at_once_and_told_why() {
    let server = serve(|options| options.secret = Secret::new("sesame"));
    let open = serve(|_| {});
    for (port, secret, words) in [
        (server.port(), "", "The server has a secret, and this process does not: RAILHEAD_STORE_SECRET"),
        (server.port(), "sesam", "The server has another secret than this process: RAILHEAD_STORE_SECRET"),
        (open.port(), "sesame", "This process has a secret, and the server does not: RAILHEAD_STORE_SECRET"),
    ] {
        let error = enter(port, secret).err().expect(words);
        assert!(matches!(error, Error::Network(_)), "{error:?}");
        assert_eq!(error.to_string(), words);
    }
    assert_eq!(join(open.port()).num_keys().unwrap(), 0);
}

#[test]
fn torchs_clients_get_an_answer_that_tells() {
    let server = serve(|options| options.secret = Secret::new("sesame"));
    let mut raw = Raw::open(server.port());
    raw.send("0d44332211");
    // Not its nonce: torch warns of a failed ping that got 1397048146.
    raw.expect("52434553", "the wrong nonce");
    raw.expect_end("and nothing else");
    assert_eq!(u32::from_le_bytes([0x52, 0x43, 0x45, 0x53]), 1_397_048_146);
}

#[test]
fn nothing_is_done_for_strangers() {
    let server = serve(|options| options.secret = Secret::new("sesame"));
    let store = enter(server.port(), "sesame").unwrap();
    let requests = [
        keyed(1, b"/k", &value(b"v")),
        keyed(4, b"/n", &1i64.to_le_bytes()),
        keyed(14, b"/q", &value(b"v")),
        keyed(130, b"/k", b""),
        vec![7],
        vec![17],
        vec![12],
        // Would be buffered for one who is let in.
        keyed(1, b"", &(4u64 << 20).to_le_bytes()),
    ];
    for request in requests {
        for after_challenge in [false, true] {
            let mut raw = Raw::open(server.port());
            if after_challenge {
                challenged(&mut raw);
            }
            raw.write(&request);
            raw.expect_end(&format!("{request:?}"));
        }
    }
    let mut silent = Raw::connect(server.port());
    silent.send(CHALLENGE);
    silent.expect_end("before VALIDATE");
    assert_eq!(store.num_keys().unwrap(), 0);
    assert_eq!(store.queue_len("q").unwrap(), 0);
}

#[test]
fn a_proof_is_for_one_challenge_and_one_end() {
    let server = serve(|options| options.secret = Secret::new("sesame"));
    let mine = [7; 16];

    let mut raw = Raw::open(server.port());
    let nonce = challenged(&mut raw);
    let good = prove(&mine, &code("sesame", "client", &nonce, &mine));
    raw.write(&good);
    raw.expect("01", "admitted");
    assert_eq!(raw.take(32), code("sesame", "server", &nonce, &mine), "the server proves itself, too");
    raw.in_step("served");

    for (what, bad) in
        [("another challenge's proof", good), ("the server's own code", prove(&mine, &code("sesame", "server", &nonce, &mine)))]
    {
        let mut raw = Raw::open(server.port());
        let other = challenged(&mut raw);
        assert_ne!(other, nonce);
        raw.write(&bad);
        raw.expect("02", what);
        raw.expect_end(what);
    }
    let mut raw = Raw::open(server.port());
    raw.write(&prove(&mine, &code("sesame", "client", &[0; 16], &mine)));
    raw.expect_end("a proof without a challenge");
    // Every bit of the code counts.
    let mut raw = Raw::open(server.port());
    let nonce = challenged(&mut raw);
    let mut spoiled = code("sesame", "client", &nonce, &mine);
    spoiled[31] ^= 1;
    raw.write(&prove(&mine, &spoiled));
    raw.expect("02", "one bit off");
}

#[test]
fn a_server_that_does_not_know_the_secret_is_not_believed() {
    let listener = TcpListener::bind("localhost:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut raw = Raw::new(listener.accept().unwrap().0);
            raw.expect(VALIDATE, "VALIDATE");
            raw.expect(CHALLENGE, "CHALLENGE");
            raw.write(&[&[1][..], &[9; 16]].concat());
            let proof = raw.take(1 + 16 + 32);
            // What it can do: send the client's own code back.
            raw.write(&[&[1], &proof[17..]].concat());
        });
        let error = enter(port, "sesame").err().unwrap().to_string();
        assert_eq!(error, "The server does not know the secret: RAILHEAD_STORE_SECRET");
    });
}

#[test]
fn one_that_hangs_up_is_a_server_without_secrets_only_if_it_serves_who_has_none() {
    for knows_none in [true, false] {
        let listener = TcpListener::bind("localhost:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut raw = Raw::new(listener.accept().unwrap().0);
                raw.expect(VALIDATE, "VALIDATE");
                raw.expect(CHALLENGE, "CHALLENGE");
                drop(raw);
                let mut raw = Raw::new(listener.accept().unwrap().0);
                raw.expect(VALIDATE, "VALIDATE");
                let ping = raw.take(5);
                if knows_none {
                    raw.write(&ping[1..]);
                    raw.expect_end("the client has seen enough");
                } else {
                    // Nobody yet, behind a proxy that takes connections: then the server is there.
                    drop(raw);
                    let mut raw = Raw::new(listener.accept().unwrap().0);
                    raw.expect(VALIDATE, "VALIDATE");
                    raw.expect(CHALLENGE, "CHALLENGE");
                    raw.send("00");
                }
            });
            let error = enter(port, "sesame").err().unwrap().to_string();
            let words = match knows_none {
                true => "The server knows no secrets, as torch's do not, and this process has one: RAILHEAD_STORE_SECRET",
                false => "This process has a secret, and the server does not: RAILHEAD_STORE_SECRET",
            };
            assert_eq!(error, words);
        });
    }
}

#[test]
fn a_stranger_does_not_stay() {
    let server = serve(|options| (options.secret, options.admission) = (Secret::new("sesame"), Duration::from_millis(20)));
    let mut silent = Raw::connect(server.port());
    let mut slow = Raw::connect(server.port());
    // It may be too slow for that already.
    let _ = slow.0.write_all(&unhex(&[VALIDATE, CHALLENGE].concat()));
    silent.expect_end("it says nothing");
    let ended = slow.0.read_to_end(&mut Vec::new());
    assert!(ended.is_ok() || ended.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset), "it does not go on");
    let one_who_knows = (0..100).find_map(|_| enter(server.port(), "sesame").ok()).expect("quick enough");
    for round in 1..20 {
        let mut next = Raw::connect(server.port());
        next.expect_end("later strangers go, too");
        assert_eq!(one_who_knows.add("n", 1).unwrap(), round, "who is in stays");
    }
}

#[test]
fn a_secret_is_not_shown() {
    assert_eq!(format!("{:?}{:?}", Secret::new("sesame"), Secret::default()), "a secretno secret");
}
