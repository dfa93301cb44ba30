//! The store in a file: torch's bytes, half-written records, files that are no stores, and several processes of which some die.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use railhead::store::{Change, Error, FileStore, Store};

const LONG: Duration = Duration::from_secs(120);

/// What torch 2.15 wrote, or would: operations in the order of the records.
const TORCH: &[&str] = &[
    "09000000726566636f756e742f0100000031",
    "020000002f6b0100000076",
    "020000002f6e0100000035",
    "020000002f630100000078",
    "030000002d2f6b00000000",
    "020000002f610100000062",
    "0e0000002f622f6e756d5f6d656d6265727301000000310e0000002f622f6c6173745f6d656d6265720100000031",
];

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn writes_torchs_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::new(&path, Some(1)).unwrap();
    let operations: [fn(&FileStore); 6] = [
        |s| s.set("k", b"v").unwrap(),
        |s| assert_eq!(s.add("n", 5).unwrap(), 5),
        |s| assert_eq!(s.compare_set("c", b"", b"x").unwrap(), b"x"),
        |s| assert!(s.delete_key("k").unwrap()),
        |s| s.multi_set(&[("a", b"b")]).unwrap(),
        |s| s.barrier("b", 1, LONG).unwrap(),
    ];
    let mut expected = unhex(TORCH[0]);
    assert_eq!(fs::read(&path).unwrap(), expected);
    for (operation, record) in operations.iter().zip(&TORCH[1..]) {
        operation(&store);
        expected.extend(unhex(record));
        assert_eq!(fs::read(&path).unwrap(), expected, "{record}");
    }
    for (key, record) in [("k", "030000002d2f6b00000000"), ("zz", "040000002d2f7a7a00000000")] {
        assert!(store.delete_key(key).unwrap(), "{key}, which is gone: torch's does not look");
        expected.extend(unhex(record));
        assert_eq!(fs::read(&path).unwrap(), expected, "{key}");
    }
    assert_eq!(store.compare_set("c", b"y", b"z").unwrap(), b"x");
    assert_eq!(fs::read(&path).unwrap(), expected, "what changes nothing writes nothing");
}

#[test]
fn reads_torchs_bytes_and_says_torchs_words() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    fs::write(&path, unhex(&TORCH.concat())).unwrap();
    let store = FileStore::new(&path, None).unwrap();
    assert_eq!(store.get("n", LONG).unwrap(), b"5");
    assert_eq!(store.get("c", LONG).unwrap(), b"x");
    assert!(!store.check(&["k"]).unwrap());
    let mut keys = store.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["a", "b/last_member", "b/num_members", "c", "n"]);
    assert_eq!(store.num_keys().unwrap(), 6, "refcount/ counts, as torch's does");
    let timeout = Duration::from_millis(20);
    assert_eq!(store.get("nokey", timeout).unwrap_err().to_string(), "Timeout waiting for key: nokey after 20 ms");
    assert_eq!(store.wait(&["nokey"], timeout).unwrap_err().to_string(), "Wait timeout");
    assert_eq!(store.queue_push("q", b"").unwrap_err().to_string(), "queue support is not implemented.");
    store.set("x", b"abc").unwrap();
    assert!(matches!(store.add("x", 1), Err(Error::Usage(_))));
}

#[test]
fn the_last_store_of_a_job_removes_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let stores: Vec<_> = (0..3).map(|_| FileStore::new(&path, Some(3)).unwrap()).collect();
    for store in stores {
        assert!(path.exists());
        drop(store);
    }
    assert!(!path.exists());
    // Between two that come and go there may be a moment without any.
    drop(FileStore::new(&path, Some(2)).unwrap());
    assert!(path.exists());
    drop(FileStore::new(&path, Some(2)).unwrap());
    assert!(!path.exists());
    // Of a job whose size is not known nobody is the last.
    drop(FileStore::new(&path, None).unwrap());
    let after = unhex("09000000726566636f756e742f010000003108000000636c65616e75702f010000003109000000726566636f756e742f0100000030");
    assert_eq!(fs::read(&path).unwrap(), after);
    // Whoever removes the file under a store's feet empties the store.
    let store = FileStore::new(&path, None).unwrap();
    store.set("k", b"v").unwrap();
    fs::remove_file(&path).unwrap();
    assert!(!store.check(&["k"]).unwrap());
    store.set("k", b"w").unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"w");
}

#[test]
fn a_record_cut_short_at_any_byte_is_ignored_and_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, last) = (unhex(&TORCH.concat()), unhex("040000002f6e657703000000616263"));
    for cut in 0..last.len() {
        let path = folder.path().join(format!("cut{cut}"));
        fs::write(&path, [&whole[..], &last[..cut]].concat()).unwrap();
        let store = FileStore::new(&path, None).unwrap();
        assert!(!store.check(&["new"]).unwrap(), "cut at {cut}");
        let counted = unhex("09000000726566636f756e742f0100000032");
        assert_eq!(fs::read(&path).unwrap(), [&whole[..], &counted].concat(), "cut at {cut}");
        // While a store has it open, too.
        fs::write(&path, [&whole[..], &counted, &last[..cut]].concat()).unwrap();
        assert_eq!(store.get("c", LONG).unwrap(), b"x");
        store.set("new", b"abc").unwrap();
        assert_eq!(fs::read(&path).unwrap(), [&whole[..], &counted, &last].concat(), "cut at {cut}");
        assert_eq!(store.get("new", LONG).unwrap(), b"abc");
    }
}

/// The record written over it is the shorter one: nothing of the longer may be left behind it.
#[test]
fn a_long_record_cut_short_is_written_over_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let whole = unhex(&TORCH.concat());
    fs::write(&path, [&whole[..], &unhex("060000002f6c6f6e676bff000000"), &[7; 200]].concat()).unwrap();
    let store = FileStore::new(&path, None).unwrap();
    assert_eq!(fs::read(&path).unwrap(), [&whole[..], &unhex("09000000726566636f756e742f0100000032")].concat());
    assert_eq!(store.get("c", LONG).unwrap(), b"x");
}

#[test]
fn files_that_no_store_wrote_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let spoiled = [unhex(TORCH[0]), unhex("020000002f6bffffffff"), b"and more".to_vec()].concat();
    let foreign: [&[u8]; 6] =
        [b"Dear diary,\nthis is no store.\n", b"\0\0\0\0\0\0\0\0", &[0xff; 64], b"\x05\0\0\0hello\x01\0\0\0x", b"\x02\0\0\0xy", &spoiled];
    for bytes in foreign {
        fs::write(&path, bytes).unwrap();
        let error = FileStore::new(&path, None).err().expect("not a store").to_string();
        assert!(error.contains("not a store's file"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
    let error = FileStore::new(folder.path().join("no/such/folder"), None).err().unwrap().to_string();
    assert!(error.contains("no/such/folder") && error.contains("No such file"), "{error}");
}

/// Whatever becomes of the file, who watches a key hears of each change of that key, and of nothing else.
#[test]
fn a_watch_follows_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::new(&path, None).unwrap();
    store.set("k", b"before").unwrap();
    let (send, seen) = mpsc::channel();
    let report = move |change: Change<'_>| {
        let text = String::from_utf8_lossy;
        send.send(match change {
            Change::Created(new) => format!("created {}", text(new)),
            Change::Updated(old, new) => format!("{} became {}", text(old), text(new)),
            Change::Deleted(old) => format!("deleted {}", text(old)),
            Change::Lost(error) => format!("lost: {error}"),
        })
        .unwrap();
    };
    let _watch = store.watch_key("k", Box::new(report)).unwrap();
    let heard = || seen.recv_timeout(LONG).unwrap();
    // Many between two looks.
    let values: Vec<String> = ["before".to_owned()].into_iter().chain((0..200).map(|i| i.to_string())).collect();
    values[1..].iter().for_each(|value| store.set("k", value.as_bytes()).unwrap());
    for pair in values.windows(2) {
        assert_eq!(heard(), format!("{} became {}", pair[0], pair[1]));
    }
    // What a writer that died left is not heard of.
    OpenOptions::new().append(true).open(&path).unwrap().write_all(&unhex("020000002f6b05000000ab")).unwrap();
    store.set("k", b"whole").unwrap();
    assert_eq!(heard(), "199 became whole");
    fs::remove_file(&path).unwrap();
    assert_eq!(heard(), "deleted whole");
    store.set("k", b"again").unwrap();
    assert_eq!(heard(), "created again");
    // Another job's file in its place, as long as this one and longer.
    let other = FileStore::new(folder.path().join("other"), None).unwrap();
    other.set("k", b"other").unwrap();
    fs::rename(other.path(), &path).unwrap();
    assert_eq!((heard(), heard()), ("deleted again".into(), "created other".into()));
    assert_eq!(store.get("k", LONG).unwrap(), b"other");
    fs::write(&path, b"").unwrap();
    assert_eq!(heard(), "deleted other");
    fs::write(&path, b"Dear diary,\nthis is no store.\n").unwrap();
    let lost = heard();
    assert!(lost.starts_with("lost: ") && lost.contains("not a store's file"), "{lost}");
    assert!(seen.recv().is_err(), "nothing comes after that");
}

#[test]
fn a_program_that_is_no_rank_is_not_counted_and_creates_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    assert!(FileStore::open_existing(&path, LONG).err().unwrap().to_string().contains("No such file"));
    let rank = FileStore::new(&path, Some(1)).unwrap();
    rank.set("k", b"v").unwrap();
    let (before, other) = (fs::read(&path).unwrap(), FileStore::open_existing(&path, LONG).unwrap());
    assert_eq!(other.get("k", LONG).unwrap(), b"v");
    drop(FileStore::open_existing(&path, LONG).unwrap());
    assert_eq!(fs::read(&path).unwrap(), before);
    other.set("k", b"w").unwrap();
    assert_eq!(rank.get("k", LONG).unwrap(), b"w");
    drop(rank);
    assert!(!path.exists(), "only ranks are waited for");
    assert!(!other.check(&["k"]).unwrap());
    let error = other.set("k", b"late").unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
    drop(other);
    assert!(!path.exists());
}

/// The lock of a file, as one who never comes to unlock it holds it. Given back when it is dropped.
fn hold(path: &Path) -> fs::File {
    let file = fs::File::open(path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    file
}

#[test]
fn a_timeout_runs_out_while_somebody_holds_the_lock() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::new(&path, None).unwrap();
    store.set("there", b"v").unwrap();
    type Wait = fn(&FileStore, Duration) -> Result<(), Error>;
    let waits: [(&str, Wait); 4] = [
        ("Timeout waiting for key: there after ", |s, timeout| s.get("there", timeout).map(drop)),
        ("Wait timeout", |s, timeout| s.wait(&["there"], timeout)),
        ("Wait timeout", |s, timeout| s.multi_get(&["there"], timeout).map(drop)),
        ("Wait timeout", |s, timeout| s.barrier("bar", 1, timeout)),
    ];
    thread::scope(|scope| {
        let held = hold(&path);
        // One that has no timeout waits for the lock, and does not keep the others of the same store waiting.
        let setter = scope.spawn(|| store.set("late", b"v"));
        for (words, wait) in waits {
            for timeout in [Duration::ZERO, Duration::from_millis(150)] {
                let (send, receive) = mpsc::channel();
                let store = &store;
                scope.spawn(move || send.send(wait(store, timeout)));
                let error = receive.recv_timeout(LONG).expect(words).expect_err(words);
                let text = error.to_string();
                assert!(matches!(error, Error::Timeout(_)), "{words}: {error:?}");
                assert!(text.starts_with(words) && text.contains("holds the lock of ") && text.contains("/store"), "{text}");
            }
        }
        assert!(!setter.is_finished());
        drop(held);
        setter.join().unwrap().unwrap();
    });
    assert_eq!(store.multi_get(&["there", "late"], Duration::ZERO).unwrap(), [b"v", b"v"]);
    store.barrier("bar", 1, LONG).expect("nobody had joined it");
}

/// Runs in a process of its own, started by the test below: adds one, again and again, and reports each sum.
#[test]
fn child_entry() {
    let Some(path) = std::env::var_os("RHT_FILE_STORE") else { return };
    let store = FileStore::new(path, None).unwrap();
    store.wait(&["go"], LONG).unwrap();
    while !store.check(&["stop"]).unwrap() {
        println!("sum {}", store.add("n", 1).unwrap());
    }
}

fn adder(path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::file::child_entry", "--nocapture"])
        .env("RHT_FILE_STORE", path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn sums(child: &mut Child) -> impl Iterator<Item = i64> + use<> {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // A killed process may leave half a line.
    lines.map_while(Result::ok).filter_map(|line| line.split_once("sum ")?.1.parse().ok())
}

#[test]
fn processes_share_a_file_and_survive_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::new(&path, None).unwrap();
    let (mut victim, mut others) = (adder(&path), [adder(&path), adder(&path)]);
    store.set("go", b"").unwrap();
    let mut seen: Vec<i64> = sums(&mut victim).take(20).collect();
    victim.kill().unwrap();
    victim.wait().unwrap();
    let mut rest: Vec<_> = others.iter_mut().map(sums).collect();
    // Both go on after the kill.
    for sums in &mut rest {
        seen.extend(sums.take(20));
    }
    store.set("stop", b"").unwrap();
    rest.into_iter().for_each(|sums| seen.extend(sums));
    for other in &mut others {
        assert!(other.wait().unwrap().success());
    }
    let total = store.add("n", 0).unwrap();
    assert!(seen.len() >= 60 && seen.iter().all(|sum| (1..=total).contains(sum)), "{} sums up to {total}", seen.len());
    assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), seen.len(), "no sum comes twice");
}

#[test]
fn a_lock_is_not_waited_for_beyond_the_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::new(&path, None).unwrap();
    let held = fs::File::open(&path).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    for timeout in [Duration::ZERO, Duration::from_millis(150)] {
        let calls: [&dyn Fn() -> Result<(), Error>; 3] =
            [&|| store.get("k", timeout).map(drop), &|| store.wait(&["k"], timeout), &|| store.barrier("b", 2, timeout)];
        for call in calls {
            // On a busy machine this thread may be late itself.
            let in_time = (0..10).any(|_| {
                let start = Instant::now();
                assert!(matches!(call(), Err(Error::Timeout(_))));
                start.elapsed() < timeout + Duration::from_millis(100)
            });
            assert!(in_time, "later than {timeout:?}");
        }
    }
}
