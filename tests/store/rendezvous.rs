//! Rendezvous as torch's users know it: URLs, variables, errors word for word, groups and their keys.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use railhead::store::rendezvous::{Environment, Group, GroupOptions, Joined, register, rendezvous, store_based_barrier};
use railhead::store::tcp::{Server, ServerOptions};
use railhead::store::{Error, HashStore, Result, Store};

const LONG: Duration = Duration::from_secs(120);

fn nothing() -> Environment {
    Environment::of([])
}

fn meet(url: &str, rank: i64, world_size: i64, environment: Environment) -> Result<Joined> {
    rendezvous(url, rank, world_size, LONG, environment)?.join()
}

/// A server that the stores of this process share, and its port.
fn shared_server() -> (Arc<Server>, u16) {
    let server = Server::shared(ServerOptions { port: 0, ..ServerOptions::default() }).unwrap();
    let port = server.port();
    (server, port)
}

/// Runs one thread per rank and returns what each gives.
fn ranks<R: Send>(count: i64, run: impl Fn(i64) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|rank| (rank, &run)).map(|(rank, run)| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("rank")).collect()
    })
}

#[test]
fn says_what_torch_says() {
    const TCP: &str = "Error initializing torch.distributed using tcp:// rendezvous: ";
    const FILE: &str = "Error initializing torch.distributed using file:// rendezvous: ";
    let cases: &[(&str, i64, i64, &str, &str)] = &[
        ("tcp://localhost?rank=0&world_size=1", -1, -1, TCP, "port number missing"),
        ("tcp://localhost:0?world_size=1", -1, -1, TCP, "rank parameter missing"),
        ("tcp://localhost:0?rank=0", -1, -1, TCP, "world size parameter missing"),
        ("tcp://localhost:0", 0, -1, TCP, "world size parameter missing"),
        ("tcp://localhost:0", -1, 1, TCP, "rank parameter missing"),
        ("tcp://:0?rank=0&world_size=1", -1, -1, "", "hostname cannot be None"),
        ("tcp://h:99999?rank=0&world_size=1", -1, -1, "", "Port out of range 0-65535"),
        ("tcp://h:x", -1, -1, "", "Port could not be cast to integer value as 'x'"),
        ("tcp://localhost:0?rank=a&world_size=1", -1, -1, "", "invalid literal for int() with base 10: 'a'"),
        ("tcp://localhost:0?rank=&world_size=1", -1, -1, "", "invalid literal for int() with base 10: ''"),
        ("tcp://localhost:0?rank=0&world_size=0", -1, -1, "", "TCPStore world size cannot be 0"),
        ("file://?rank=0", -1, -1, FILE, "path missing"),
        ("file:///nowhere/store", -1, -1, FILE, "rank parameter missing"),
        ("file:///nowhere/store?rank=0", -1, -1, FILE, "world size parameter missing"),
        ("x://y", -1, -1, "", "No rendezvous handler for x://"),
        ("y", -1, -1, "", "No rendezvous handler for ://"),
        ("tcp://[::1", -1, -1, "", "Invalid IPv6 URL"),
        ("tcp://localhost:0?rank=0", 0, 1, "The url: tcp://localhost:0?rank=0 has node-specific arguments(rank, world_size) already.", ""),
        (
            "tcp://localhost:0?world_size=1",
            0,
            -1,
            "The url: tcp://localhost:0?world_size=1 has node-specific arguments(rank, world_size) already.",
            "",
        ),
    ];
    for (url, rank, world_size, before, words) in cases {
        let error = meet(url, *rank, *world_size, nothing()).err().unwrap_or_else(|| panic!("{url}: no error"));
        assert_eq!(error.to_string(), format!("{before}{words}"), "{url}");
        assert!(matches!(error, Error::Usage(_)), "{url}: {error:?}");
    }
}

#[test]
fn says_which_variable_is_missing_or_wrong() {
    const ENV: &str = "Error initializing torch.distributed using env:// rendezvous: ";
    let all = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")];
    for (missing, _) in all {
        for empty in [false, true] {
            let left = all.iter().filter(|(name, _)| *name != missing).copied().chain(empty.then_some((missing, "")));
            let error = meet("env://", -1, -1, Environment::of(left)).err().expect(missing);
            assert_eq!(error.to_string(), format!("{ENV}environment variable {missing} expected, but not set"));
        }
    }
    let wrong = |name: &'static str, value: &'static str| {
        let all = all.iter().map(|(known, text)| (*known, if *known == name { value } else { text }));
        meet("env://", -1, -1, Environment::of(all)).err().expect(name).to_string()
    };
    assert_eq!(wrong("MASTER_PORT", "99999"), "port must have value from 0 to 65535 but was 99999.");
    assert_eq!(wrong("MASTER_PORT", "-1"), "port must have value from 0 to 65535 but was -1.");
    assert_eq!(wrong("MASTER_PORT", "a"), "invalid literal for int() with base 10: 'a'");
    assert_eq!(wrong("RANK", "a"), "invalid literal for int() with base 10: 'a'");
    assert!(wrong("RANK", "1").starts_with("port 0: rank 1 cannot know"));
}

#[test]
fn tcp_ranks_find_each_other() {
    let (_server, port) = shared_server();
    let seen = ranks(3, |rank| {
        // As arguments, or in the URL.
        let joined = match rank {
            1 => meet(&format!("tcp://localhost:{port}?use_libuv=0"), rank, 3, nothing()),
            _ => meet(&format!("tcp://localhost:{port}?rank={rank}&world_size=3"), -1, -1, nothing()),
        };
        let joined = joined.unwrap();
        assert_eq!((joined.rank, joined.world_size), (rank, 3));
        joined.store.set(&format!("from{rank}"), rank.to_string().as_bytes()).unwrap();
        joined.store.multi_get(&["from0", "from1", "from2"], LONG).unwrap()
    });
    assert!(seen.iter().all(|values| *values == [b"0", b"1", b"2"]), "{seen:?}");
}

#[test]
fn rank_0_runs_the_server_on_any_port_and_a_rendezvous_serves_once() {
    let mut pending = rendezvous("tcp://localhost:0?rank=0&world_size=1", -1, -1, LONG, nothing()).unwrap();
    let joined = pending.join().unwrap();
    assert_eq!(joined.store.add("n", 2).unwrap(), 2);
    let again = pending.join().err().unwrap();
    assert_eq!(again.to_string(), "Unable to perform re-rendezvous using tcp:// method");

    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}?rank=0&world_size=1", folder.path().join("store").display());
    let mut pending = rendezvous(&url, -1, -1, LONG, nothing()).unwrap();
    pending.join().unwrap();
    assert_eq!(pending.join().err().unwrap().to_string(), "Unable to perform rerendezvous using file:// method");
}

#[test]
fn env_ranks_find_each_other_and_the_url_wins_over_the_variables() {
    let (_server, port) = shared_server();
    let port = port.to_string();
    let seen = ranks(2, |rank| {
        let rank_text = rank.to_string();
        let place = [("MASTER_ADDR", "localhost"), ("MASTER_PORT", &port)];
        let joined = if rank == 0 {
            // A launcher's variables, without torch's.
            let launcher = [("PMI_RANK", rank_text.as_str()), ("PMI_SIZE", "2")];
            meet("env://", -1, -1, Environment::of([&place[..], &launcher].concat()))
        } else {
            let others = [("RANK", "7"), ("WORLD_SIZE", "9")];
            meet("env://?rank=1&world_size=2", -1, -1, Environment::of([&place[..], &others].concat()))
        };
        let joined = joined.unwrap();
        joined.store.add("came", 1).unwrap();
        joined.store.barrier("all", joined.world_size, LONG).unwrap();
        (joined.rank, joined.world_size, joined.store.get("came", LONG).unwrap())
    });
    assert_eq!(seen, [(0, 2, b"2".to_vec()), (1, 2, b"2".to_vec())]);
}

#[test]
fn file_ranks_find_each_other_and_leave_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    ranks(3, |rank| {
        let joined = meet(&format!("file://{}", path.display()), rank, 3, nothing()).unwrap();
        assert_eq!((joined.rank, joined.world_size), (rank, 3));
        joined.store.barrier("all", 3, LONG).unwrap();
    });
    assert!(!path.exists());
}

#[test]
fn the_agents_store_is_joined_and_not_served() {
    // Not shared: whoever tried to serve this port would fail.
    let agent = Server::start(ServerOptions { port: 0, ..ServerOptions::default() }).unwrap();
    let port = agent.port().to_string();
    let agents = |flag: &'static str, address: &'static str| {
        [("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_USE_AGENT_STORE", flag), ("MASTER_ADDR", address), ("MASTER_PORT", &port)]
    };
    let joined = meet("env://", -1, -1, Environment::of(agents("True", "localhost"))).unwrap();
    joined.store.set("k", b"v").unwrap();
    assert_eq!(joined.store.get("k", LONG).unwrap(), b"v");
    let same = meet(&format!("tcp://localhost:{port}"), 0, 1, Environment::of(agents("True", "localhost"))).unwrap();
    assert_eq!(same.store.get("k", LONG).unwrap(), b"v");
    // Not its flag, or not its place: rank 0 serves, and cannot.
    let other = meet(&format!("tcp://localhost:{port}"), 0, 1, Environment::of(agents("True", "127.0.0.1")));
    for refused in [meet("env://", -1, -1, Environment::of(agents("1", "localhost"))), other] {
        let error = refused.err().expect("the port is taken").to_string();
        assert!(error.contains("The server socket has failed to listen on any local network address"), "{error}");
    }
}

#[test]
fn the_server_listens_where_railhead_store_bind_says() {
    let bound = meet("tcp://127.0.0.1:0?rank=0&world_size=1", -1, -1, Environment::of([("RAILHEAD_STORE_BIND", "127.0.0.1")]));
    bound.unwrap().store.set("k", b"").unwrap();
    // The server is elsewhere, and nobody answers: the port was free a moment ago.
    let timeout = Duration::from_millis(200);
    let environment = Environment::of([("RAILHEAD_STORE_BIND", "127.0.0.1")]);
    let mut pending = rendezvous("tcp://[::1]:0?rank=0&world_size=1", -1, -1, timeout, environment).unwrap();
    let error = pending.join().err().unwrap().to_string();
    assert!(error.starts_with("The client socket has timed out after 200ms while trying to connect to (::1, "), "{error}");
}

#[test]
fn settings_that_cannot_be_followed_are_refused() {
    let server = "tcp://127.0.0.1:0?rank=0&world_size=1";
    for (name, value, words) in [
        ("RAILHEAD_STORE_BIND", "10.0.0.5x", "RAILHEAD_STORE_BIND=10.0.0.5x is not accepted (`address`, IPv4 or IPv6, or empty)"),
        ("RAILHEAD_STORE_BIND", "localhost", "RAILHEAD_STORE_BIND=localhost is not accepted (`address`, IPv4 or IPv6, or empty)"),
        ("RAILHEAD_STORE_SECRET", " \t ", "RAILHEAD_STORE_SECRET=(hidden) is not accepted (UTF-8 text that is not blank, or empty)"),
    ] {
        let error = meet(server, -1, -1, Environment::of([(name, value)])).err().expect(words);
        assert!(matches!(error, Error::Usage(_)), "{error:?}");
        assert_eq!(error.to_string(), words);
    }
    // A client goes without an address to listen on, but not without a secret.
    let (_server, port) = shared_server();
    let client = format!("tcp://localhost:{port}?rank=1&world_size=2");
    meet(&client, -1, -1, Environment::of([("RAILHEAD_STORE_BIND", "nowhere")])).unwrap();
    assert!(meet(&client, -1, -1, Environment::of([("RAILHEAD_STORE_SECRET", " ")])).is_err());
    meet(&client, -1, -1, Environment::of([("RAILHEAD_STORE_SECRET", "")])).unwrap();
}

#[test]
fn schemes_of_ones_own() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let handler = {
        let store = Arc::clone(&store);
        Arc::new(move |request: &railhead::store::rendezvous::RendezvousArgs| {
            let url = &request.url;
            assert_eq!((url.scheme(), url.host(), url.path()), ("test-own", Some("where"), "/x"));
            let rank = url.required("rank", || Error::Usage("no rank".into()))?.parse().unwrap();
            Ok(Joined { store: Arc::clone(&store), rank, world_size: 4 })
        })
    };
    register("Test-Own", handler.clone()).unwrap();
    let joined = meet("test-own://where/x?a=b", 3, -1, nothing()).unwrap();
    assert_eq!((joined.rank, joined.world_size), (3, 4));
    joined.store.set("k", b"v").unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
    assert_eq!(meet("test-own://where/x", -1, -1, nothing()).err().unwrap().to_string(), "no rank");
    for taken in ["test-own", "tcp", "ENV", "file"] {
        let error = register(taken, handler.clone()).unwrap_err().to_string();
        assert_eq!(error, format!("Rendezvous handler for {}:// already registered", taken.to_lowercase()));
    }
}

fn group(store: &Arc<dyn Store>, rank: i64, world_size: i64) -> Result<Group> {
    Group::init(GroupOptions { store: Some(Arc::clone(store)), rank, world_size, environment: nothing(), ..GroupOptions::default() })
}

#[test]
fn groups_have_torchs_prefixes_and_their_own_keys() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let found = ranks(4, |rank| {
        let job = group(&store, rank, 4).unwrap();
        assert_eq!((job.name(), job.rank(), job.world_size(), job.ranks()), ("0", rank, 4, &[0, 1, 2, 3][..]));
        job.store().set(&format!("r{rank}"), b"").unwrap();
        let odd = job.new_group(Some(&[3, 1])).unwrap();
        assert_eq!(odd.is_some(), rank % 2 == 1);
        let all = job.new_group(None).unwrap().expect("all are members");
        assert_eq!((all.name(), all.ranks()), ("2", &[0, 1, 2, 3][..]));
        if let Some(odd) = &odd {
            assert_eq!((odd.name(), odd.rank(), odd.world_size(), odd.ranks()), ("1", rank / 2, 2, &[1, 3][..]));
            odd.store().set("k", b"odd").unwrap();
            for _ in 0..3 {
                odd.barrier(LONG).unwrap();
            }
        }
        all.store().set("k", b"all").unwrap();
        job.barrier(LONG).unwrap();
        odd.map(|odd| odd.store().get("k", LONG).unwrap())
    });
    assert_eq!(found, [None, Some(b"odd".to_vec()), None, Some(b"odd".to_vec())]);
    // As torch 2.15 names them: a PrefixStore adds a slash of its own.
    for key in ["default_pg/0//r0", "default_pg/0//r3", "default_pg/0//1//k", "default_pg/0//2//k"] {
        assert!(store.check(&[key]).unwrap(), "{key}: {:?}", store.list_keys().unwrap());
    }
    assert_eq!(store.get("default_pg/0//2//k", LONG).unwrap(), b"all");
}

#[test]
fn groups_refuse_what_torch_refuses() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let says = |result: Result<Group>, words: &str| assert_eq!(result.err().expect(words).to_string(), words);
    let both = GroupOptions { store: Some(Arc::clone(&store)), init_method: Some("env://".into()), ..GroupOptions::default() };
    says(Group::init(both), "Cannot specify both init_method and store.");
    says(group(&store, 0, 0), "world_size must be positive if using store");
    says(group(&store, -1, 2), "rank must be non-negative if using store");
    says(group(&store, 2, 2), "rank 2 of 2: expected 0 to 1");
    let neither = Group::init(GroupOptions { environment: nothing(), ..GroupOptions::default() });
    says(neither, "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set");
    let job = group(&store, 0, 2).unwrap();
    let refused = |ranks: &[i64], words: &str| assert_eq!(job.new_group(Some(ranks)).err().expect(words).to_string(), words);
    refused(&[1, 1], "ranks list must not contain duplicate entries, got [1, 1]");
    refused(&[0, 1, 2], "the new group's world size should be less or equal to the world size set by init_process_group");
    refused(&[2], "Rank 2 is out of range. Valid ranks are 0 to 1 (world_size=2)");
    refused(&[-1], "Rank -1 is out of range. Valid ranks are 0 to 1 (world_size=2)");
    assert_eq!(job.new_group(None).unwrap().unwrap().name(), "1", "what was refused is not counted");
}

#[test]
fn a_groups_barrier_holds_each_time() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let (first, second) = (group(&store, 0, 2).unwrap(), group(&store, 1, 2).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| second.barrier(LONG).unwrap());
        first.barrier(LONG).unwrap();
    });
    assert!(matches!(first.barrier(Duration::from_millis(50)), Err(Error::Timeout(_))), "the other has come once");
}

#[test]
fn a_barrier_that_runs_out_says_who_came() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let error = store_based_barrier(&*store, "0", 1, 3, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)));
    let error = error.to_string();
    // What coming to it took is not waited for once more.
    let (words, keys) = error.rsplit_once("ms, ").unwrap();
    assert_eq!(
        words.trim_end_matches(|c: char| c.is_ascii_digit()),
        "Timed out initializing process group in store based barrier on rank 1, for key: store_based_barrier_key:0 \
         (world_size=3, num_workers_joined=1, timeout=0:00:00.050000 error=wait timeout after "
    );
    assert_eq!(keys, "keys: store_based_barrier_key:0:last_worker)");
    assert_eq!(store.get("store_based_barrier_key:0", LONG).unwrap(), b"1");
}

#[test]
fn a_group_is_made_from_a_url() {
    let (_server, port) = shared_server();
    let keys = ranks(2, |rank| {
        let url = format!("tcp://localhost:{port}");
        let options =
            GroupOptions { init_method: Some(url), rank, world_size: 2, timeout: LONG, environment: nothing(), ..GroupOptions::default() };
        let group = Group::init(options).unwrap();
        group.store().set(&rank.to_string(), b"here").unwrap();
        group.barrier(LONG).unwrap();
        let mut keys = group.store().list_keys().unwrap();
        keys.sort();
        keys
    });
    assert!(keys.iter().all(|keys| keys[..2] == ["0", "1"]), "{keys:?}");
}
