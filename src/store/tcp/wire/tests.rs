//! Bytes recorded from torch 2.15 in both directions, every limit, and every way to cut or spoil a stream.

use proptest::collection::vec;
use proptest::prelude::*;

use super::Part::*;
use super::decode::SMALL_BUFFER;
use super::*;
use crate::base::mac::MAC_SIZE;
use crate::store::tcp::secret::NONCE;

/// What a torch 2.15 client sent, and the request that it stands for.
fn recorded() -> Vec<(&'static str, RequestType, Vec<Part<'static>>)> {
    vec![
        ("00cef7853c", RequestType::Validate, vec![Word(MAGIC)]),
        ("0d54270000", RequestType::Ping, vec![Word(10068)]),
        ("040500000000000000696e69742f0100000000000000", RequestType::Add, vec![OwnKey("init/"), Int(1)]),
        ("0102000000000000002f6b010000000000000076", RequestType::Set, vec![Key("k"), Value(b"v")]),
        ("06010000000000000002000000000000002f6b", RequestType::Wait, vec![Count(1), Key("k")]),
        ("0302000000000000002f6b", RequestType::Get, vec![Key("k")]),
        ("0402000000000000002f6e0300000000000000", RequestType::Add, vec![Key("n"), Int(3)]),
        ("0402000000000000002f6ef9ffffffffffffff", RequestType::Add, vec![Key("n"), Int(-7)]),
        ("0203000000000000002f63730000000000000000010000000000000078", RequestType::CompareSet, vec![Key("cs"), Value(b""), Value(b"x")]),
        (
            "0203000000000000002f636d03000000000000006f6c6403000000000000006e6577",
            RequestType::CompareSet,
            vec![Key("cm"), Value(b"old"), Value(b"new")],
        ),
        ("05020000000000000002000000000000002f6b03000000000000002f7a7a", RequestType::Check, vec![Count(2), Key("k"), Key("zz")]),
        ("060000000000000000", RequestType::Wait, vec![Count(0)]),
        ("050000000000000000", RequestType::Check, vec![Count(0)]),
        ("0c", RequestType::CancelWait, vec![]),
        ("07", RequestType::GetNumKeys, vec![]),
        ("0802000000000000002f6b", RequestType::DeleteKey, vec![Key("k")]),
        ("0903000000000000002f617001000000000000007a", RequestType::Append, vec![Key("ap"), Value(b"z")]),
        (
            "0b020000000000000002000000000000002f6101000000000000003102000000000000002f62010000000000000032",
            RequestType::MultiSet,
            vec![Count(2), Key("a"), Value(b"1"), Key("b"), Value(b"2")],
        ),
        ("0a020000000000000002000000000000002f6102000000000000002f62", RequestType::MultiGet, vec![Count(2), Key("a"), Key("b")]),
        ("0e02000000000000002f71010000000000000076", RequestType::QueuePush, vec![Key("q"), Value(b"v")]),
        ("0f02000000000000002f71", RequestType::QueuePop, vec![Key("q")]),
        ("1002000000000000002f71", RequestType::QueueLen, vec![Key("q")]),
        ("11", RequestType::ListKeys, vec![]),
        ("1204000000000000002f6261720100000000000000", RequestType::Barrier, vec![Key("bar"), Int(1)]),
    ]
}

/// Torch's, and those of our own.
fn requests() -> Vec<(&'static str, RequestType, Vec<Part<'static>>)> {
    const PROOF: &str = "81303132333435363738394142434445466162636465666768696a6b6c6d6e6f707172737475767778797a2e2e2e2e2e2e";
    let own = [
        ("80", RequestType::Challenge, vec![]),
        (PROOF, RequestType::Prove, vec![Bare(b"0123456789ABCDEF"), Bare(b"abcdefghijklmnopqrstuvwxyz......")]),
        ("8202000000000000002f6b", RequestType::WatchKey, vec![Key("k")]),
    ];
    recorded().into_iter().chain(own).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

/// A decoded request as the bytes that it came from.
fn again(request: &ClientRequest<'_>) -> Vec<u8> {
    fn text(bytes: &[u8]) -> &str {
        std::str::from_utf8(bytes).unwrap()
    }
    let several = |keys: &Strings<'_>, step: usize| {
        let mut parts = vec![(keys.count() / step).to_le_bytes().to_vec()];
        parts.extend(keys.iter().map(|key| [&(key.len() as u64).to_le_bytes()[..], key].concat()));
        parts.concat()
    };
    let mut out = Vec::new();
    let key = |key: &[u8]| text(key).to_owned();
    match request {
        ClientRequest::Validate { magic } => encode(&mut out, RequestType::Validate, &[Word(*magic)]),
        ClientRequest::Set { key: k, value } => encode(&mut out, RequestType::Set, &[OwnKey(&key(k)), Value(value)]),
        ClientRequest::CompareSet { key: k, expected, desired } => {
            encode(&mut out, RequestType::CompareSet, &[OwnKey(&key(k)), Value(expected), Value(desired)]);
        }
        ClientRequest::Get { key: k } => encode(&mut out, RequestType::Get, &[OwnKey(&key(k))]),
        ClientRequest::Add { key: k, delta } => encode(&mut out, RequestType::Add, &[OwnKey(&key(k)), Int(*delta)]),
        ClientRequest::Check { keys } => out = [vec![RequestType::Check as u8], several(keys, 1)].concat(),
        ClientRequest::Wait { keys } => out = [vec![RequestType::Wait as u8], several(keys, 1)].concat(),
        ClientRequest::GetNumKeys => encode(&mut out, RequestType::GetNumKeys, &[]),
        ClientRequest::DeleteKey { key: k } => encode(&mut out, RequestType::DeleteKey, &[OwnKey(&key(k))]),
        ClientRequest::Append { key: k, value } => encode(&mut out, RequestType::Append, &[OwnKey(&key(k)), Value(value)]),
        ClientRequest::MultiGet { keys } => out = [vec![RequestType::MultiGet as u8], several(keys, 1)].concat(),
        ClientRequest::MultiSet { entries } => out = [vec![RequestType::MultiSet as u8], several(entries, 2)].concat(),
        ClientRequest::CancelWait => encode(&mut out, RequestType::CancelWait, &[]),
        ClientRequest::Ping { nonce } => encode(&mut out, RequestType::Ping, &[Word(*nonce)]),
        ClientRequest::QueuePush { key: k, value } => encode(&mut out, RequestType::QueuePush, &[OwnKey(&key(k)), Value(value)]),
        ClientRequest::QueuePop { key: k } => encode(&mut out, RequestType::QueuePop, &[OwnKey(&key(k))]),
        ClientRequest::QueueLen { key: k } => encode(&mut out, RequestType::QueueLen, &[OwnKey(&key(k))]),
        ClientRequest::ListKeys => encode(&mut out, RequestType::ListKeys, &[]),
        ClientRequest::Challenge => encode(&mut out, RequestType::Challenge, &[]),
        ClientRequest::Prove { nonce, code } => encode(&mut out, RequestType::Prove, &[Bare(*nonce), Bare(code)]),
        ClientRequest::WatchKey { key: k } => encode(&mut out, RequestType::WatchKey, &[OwnKey(&key(k))]),
        ClientRequest::Barrier { key: k, world_size } => encode(&mut out, RequestType::Barrier, &[OwnKey(&key(k)), Int(*world_size)]),
    }
    out
}

/// Feeds `stream` in pieces of the given sizes, over and over, and returns the requests, each as bytes.
fn decode(stream: &[u8], pieces: &[usize]) -> Result<Vec<Vec<u8>>, WireError> {
    let (mut decoder, mut requests, mut rest) = (Decoder::default(), Vec::new(), stream);
    let limits = Limits::default();
    for &piece in pieces.iter().cycle() {
        let (now, later) = rest.split_at(piece.min(rest.len()));
        decoder.feed(now);
        while let Some(request) = decoder.next(&limits)? {
            requests.push(again(&request));
        }
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    Ok(requests)
}

#[test]
fn our_client_sends_torchs_bytes() {
    for (hex, query, parts) in recorded() {
        let mut out = Vec::new();
        encode(&mut out, query, &parts);
        assert_eq!(out, unhex(hex), "{query:?}");
    }
}

#[test]
fn our_server_understands_torchs_bytes() {
    let fields = |hex: &str| {
        let mut decoder = Decoder::default();
        decoder.feed(&unhex(hex));
        format!("{:?}", decoder.next(&Limits::default()).unwrap().expect("a whole request"))
    };
    let bytes = |text: &str| format!("{:?}", text.as_bytes());
    assert_eq!(fields("00cef7853c"), format!("Validate {{ magic: {MAGIC} }}"));
    assert_eq!(fields("0402000000000000002f6ef9ffffffffffffff"), format!("Add {{ key: {}, delta: -7 }}", bytes("/n")));
    assert_eq!(
        fields("0203000000000000002f636d03000000000000006f6c6403000000000000006e6577"),
        format!("CompareSet {{ key: {}, expected: {}, desired: {} }}", bytes("/cm"), bytes("old"), bytes("new"))
    );
    assert_eq!(
        fields("0b020000000000000002000000000000002f6101000000000000003102000000000000002f62010000000000000032"),
        format!("MultiSet {{ entries: [{}, {}, {}, {}] }}", bytes("/a"), bytes("1"), bytes("/b"), bytes("2"))
    );
    assert_eq!(fields("1204000000000000002f6261720100000000000000"), format!("Barrier {{ key: {}, world_size: 1 }}", bytes("/bar")));
    for (hex, query, _) in requests() {
        assert_eq!(decode(&unhex(hex), &[1 << 20]).unwrap(), [unhex(hex)], "{query:?}");
    }
}

#[test]
fn one_byte_at_a_time_is_as_good_as_all_at_once() {
    let requests: Vec<Vec<u8>> = requests().iter().map(|(hex, ..)| unhex(hex)).collect();
    let stream = requests.concat();
    for piece in 1..40 {
        assert_eq!(decode(&stream, &[piece]).unwrap(), requests, "{piece} bytes at a time");
    }
}

#[test]
fn nothing_comes_of_a_truncated_request() {
    for (hex, query, _) in requests() {
        let whole = unhex(hex);
        for cut in 0..whole.len() {
            assert_eq!(decode(&whole[..cut], &[3]).unwrap(), Vec::<Vec<u8>>::new(), "{query:?} cut at {cut}");
        }
    }
}

/// Limits that a test can reach.
const TIGHT: Limits = Limits { key: 10, value: 20, keys: 3, request: 120 };

fn first(bytes: &[u8], limits: &Limits) -> Result<bool, WireError> {
    let mut decoder = Decoder::default();
    decoder.feed(bytes);
    decoder.next(limits).map(|request| request.is_some())
}

#[test]
fn each_limit_is_torchs_and_is_kept_before_the_bytes_come() {
    assert_eq!((Limits::default().key, Limits::default().value, Limits::default().keys), (8192, 8 << 20, 131_072));
    let (key, long_key) = ("k".repeat(9), "k".repeat(10));
    let (value, long_value) = ([7; 20], [7; 21]);
    let make = |query, parts: &[Part<'_>]| {
        let mut out = Vec::new();
        encode(&mut out, query, parts);
        out
    };
    let fits = [
        make(RequestType::Set, &[Key(&key), Value(&value)]),
        make(RequestType::CompareSet, &[Key(&key), Value(&value), Value(&value)]),
        make(RequestType::Wait, &[Count(3), Key(&key), Key(&key), Key(&key)]),
        make(RequestType::MultiSet, &[Count(2), Key(&key), Value(&value), Key(&key), Value(&value)]),
        make(RequestType::Barrier, &[Key(&key), Int(i64::MIN)]),
    ];
    for request in fits {
        assert_eq!(first(&request, &TIGHT), Ok(true), "{request:?}");
    }
    let cut = |mut bytes: Vec<u8>, body: usize| {
        // Only the length has come, not what it announces.
        bytes.truncate(bytes.len() - body);
        bytes
    };
    for query in [
        RequestType::Set,
        RequestType::CompareSet,
        RequestType::Get,
        RequestType::Add,
        RequestType::DeleteKey,
        RequestType::Append,
        RequestType::QueuePop,
        RequestType::Barrier,
    ] {
        assert_eq!(first(&cut(make(query, &[Key(&long_key)]), 11), &TIGHT), Err(WireError::LongKey(11, TIGHT.key)), "{query:?}");
    }
    for query in [RequestType::Check, RequestType::Wait, RequestType::MultiGet, RequestType::MultiSet] {
        assert_eq!(first(&cut(make(query, &[Count(1), Key(&long_key)]), 11), &TIGHT), Err(WireError::LongKey(11, TIGHT.key)), "{query:?}");
        assert_eq!(first(&make(query, &[Count(4)]), &TIGHT), Err(WireError::ManyKeys(4, TIGHT.keys)), "{query:?}");
        assert_eq!(first(&make(query, &[Int(-1)]), &TIGHT), Err(WireError::ManyKeys(u64::MAX, TIGHT.keys)), "{query:?}");
    }
    for query in [RequestType::Set, RequestType::Append, RequestType::QueuePush, RequestType::CompareSet] {
        assert_eq!(
            first(&cut(make(query, &[Key(&key), Value(&long_value)]), 21), &TIGHT),
            Err(WireError::LongValue(21, TIGHT.value)),
            "{query:?}"
        );
    }
    let late = make(RequestType::CompareSet, &[Key(&key), Value(&value), Value(&long_value)]);
    assert_eq!(first(&cut(late, 21), &TIGHT), Err(WireError::LongValue(21, TIGHT.value)));
    let pairs = make(RequestType::MultiSet, &[Count(1), Key(&key), Value(&long_value)]);
    assert_eq!(first(&cut(pairs, 21), &TIGHT), Err(WireError::LongValue(21, TIGHT.value)));
    let long = make(RequestType::MultiSet, &[Count(3), Key(&key), Value(&value), Key(&key), Value(&value), Key(&key), Value(&value)]);
    assert_eq!(first(&cut(long, 20), &TIGHT), Err(WireError::LongRequest(120)));
    // A length that would overflow.
    assert_eq!(first(&[&[RequestType::Get as u8][..], &[0xff; 8]].concat(), &TIGHT), Err(WireError::LongKey(u64::MAX, TIGHT.key)));
    for byte in (19..128).chain(131..=u8::MAX) {
        assert_eq!(first(&[byte], &TIGHT), Err(WireError::UnknownQuery(byte)));
    }
}

#[test]
fn announced_lengths_take_no_memory() {
    let mut decoder = Decoder::default();
    let limits = Limits::default();
    let mut out = Vec::new();
    encode(&mut out, RequestType::MultiSet, &[Count(limits.keys), Key("k")]);
    out.extend_from_slice(&(limits.value as u64).to_le_bytes());
    decoder.feed(&out);
    assert!(decoder.next(&limits).unwrap().is_none());
    assert!(decoder.size() < 1_000, "{}", decoder.size());
}

#[test]
fn an_idle_connection_keeps_little() {
    let mut decoder = Decoder::default();
    let limits = Limits::default();
    let mut out = Vec::new();
    encode(&mut out, RequestType::Set, &[Key("k"), Value(&vec![0; 1 << 20])]);
    let keys: Vec<Part<'_>> = std::iter::once(Count(10_000)).chain((0..10_000).map(|_| Key("k"))).collect();
    encode(&mut out, RequestType::Check, &keys);
    for piece in out.chunks(1_000) {
        decoder.feed(piece);
        while decoder.next(&limits).unwrap().is_some() {}
    }
    assert!(decoder.size() <= 4 * SMALL_BUFFER, "{}", decoder.size());
}

fn part_key() -> impl Strategy<Value = String> {
    proptest::string::string_regex("[a-z/]{0,12}").unwrap()
}

/// The type byte of a request.
fn known() -> impl Strategy<Value = u8> {
    prop_oneof![6 => 0..19u8, 1 => 128..131u8]
}

/// Any request, as bytes.
fn request() -> impl Strategy<Value = Vec<u8>> {
    let value = || vec(any::<u8>(), 0..200);
    let made = |query, key: String, a: Vec<u8>, b: Vec<u8>, n: i64| {
        let mut out = Vec::new();
        match query {
            RequestType::Validate | RequestType::Ping => encode(&mut out, query, &[Word(n as u32)]),
            RequestType::GetNumKeys | RequestType::CancelWait | RequestType::ListKeys | RequestType::Challenge => {
                encode(&mut out, query, &[])
            }
            RequestType::Prove => encode(&mut out, query, &[Bare(&[n as u8; NONCE]), Bare(&[a.len() as u8; MAC_SIZE])]),
            RequestType::Set | RequestType::Append | RequestType::QueuePush => encode(&mut out, query, &[Key(&key), Value(&a)]),
            RequestType::CompareSet => encode(&mut out, query, &[Key(&key), Value(&a), Value(&b)]),
            RequestType::Get | RequestType::DeleteKey | RequestType::QueuePop | RequestType::QueueLen | RequestType::WatchKey => {
                encode(&mut out, query, &[Key(&key)])
            }
            RequestType::Add | RequestType::Barrier => encode(&mut out, query, &[Key(&key), Int(n)]),
            RequestType::Check | RequestType::Wait | RequestType::MultiGet => {
                encode(&mut out, query, &[Count(3), Key(&key), Key(""), Key(&key)])
            }
            RequestType::MultiSet => encode(&mut out, query, &[Count(2), Key(&key), Value(&a), Key("x"), Value(&b)]),
        }
        out
    };
    (known().prop_map(|byte| RequestType::from_byte(byte).unwrap()), part_key(), value(), value(), any::<i64>())
        .prop_map(move |(query, key, a, b, n)| made(query, key, a, b, n))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn however_a_stream_is_cut_its_requests_come_out(requests in vec(request(), 0..30), pieces in vec(1usize..300, 1..20)) {
        prop_assert_eq!(decode(&requests.concat(), &pieces).unwrap(), requests);
    }

    #[test]
    fn noise_is_refused_or_waited_for_within_bounds(noise in vec(any::<u8>(), 0..400), head in known(), pieces in vec(1usize..50, 1..9)) {
        let mut decoder = Decoder::default();
        let stream = [vec![head], noise].concat();
        let (mut rest, mut fed) = (&stream[..], 0);
        'stream: for &piece in pieces.iter().cycle() {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            decoder.feed(now);
            fed += now.len();
            loop {
                match decoder.next(&TIGHT) {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => break 'stream,
                }
            }
            prop_assert!(decoder.size() <= 4 * fed + 2 * SMALL_BUFFER, "{} for {fed}", decoder.size());
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
    }
}
