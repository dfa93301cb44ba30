//! Very many clients, and clients that are killed: as processes of their own where that makes a difference.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use railhead::store::tcp::{Host, Server, ServerOptions, TcpOptions};
use railhead::store::{Deadline, Error, FOREVER, Store, TcpStore};

const LONG: Duration = Duration::from_secs(120);

fn serve() -> Server {
    Server::start(ServerOptions { port: 0, ..ServerOptions::default() }).expect("start")
}

fn join(port: u16) -> TcpStore {
    TcpStore::new(Host::Other("localhost".into(), port), TcpOptions { timeout: LONG, ..TcpOptions::default() }).expect("connect")
}

/// Runs in a process of its own, started by the tests below.
#[test]
fn child_entry() {
    let Ok(task) = std::env::var("RHT_STORE_CHILD") else { return };
    let (task, port) = task.split_once(' ').unwrap();
    match task {
        "wait" => {
            let store = join(port.parse().unwrap());
            store.add("waiting", 1).unwrap();
            store.wait(&["never"], FOREVER).unwrap();
        }
        "serve" => {
            let server = serve();
            println!("port {}", server.port());
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
        }
        other => panic!("{other}"),
    }
}

fn child(task: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::clients::child_entry", "--nocapture"])
        .env("RHT_STORE_CHILD", task)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn clients_that_are_killed_in_a_wait_cost_the_others_nothing() {
    const VICTIMS: usize = 6;
    let server = serve();
    let store = join(server.port());
    let mut victims: Vec<Killed> = (0..VICTIMS).map(|_| Killed(child(&format!("wait {}", server.port())))).collect();
    let end = Instant::now() + LONG;
    while store.add("waiting", 0).unwrap() < VICTIMS as i64 {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    for victim in &mut victims[..VICTIMS / 2] {
        // SIGKILL.
        victim.0.kill().unwrap();
        victim.0.wait().unwrap();
    }
    store.set("never", b"after all").unwrap();
    for survivor in &mut victims[VICTIMS / 2..] {
        assert!(survivor.0.wait().unwrap().success(), "who lives is woken");
    }
    assert_eq!(store.get("never", LONG).unwrap(), b"after all");
}

/// A server in a process of its own, and its port.
fn serving() -> (Killed, u16) {
    let mut server = Killed(child("serve 0"));
    let lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
    let port = lines.map_while(Result::ok).find_map(|line| line.split_once("port ")?.1.parse().ok()).expect("a port");
    (server, port)
}

#[test]
fn a_server_that_crashes_has_refused_nothing() {
    let (mut server, port) = serving();
    let stores: Vec<TcpStore> = (0..8).map(|_| join(port)).collect();
    std::thread::scope(|scope| {
        let waiters: Vec<_> = stores.iter().map(|store| scope.spawn(|| store.wait(&["never"], FOREVER).unwrap_err().to_string())).collect();
        // SIGKILL.
        server.0.kill().unwrap();
        for waiter in waiters {
            let error = waiter.join().unwrap();
            assert!(error.contains("Did the remote server shutdown or crash?") && !error.contains("Or it refused"), "{error}");
        }
    });
}

/// A stop reaches each thread in its own time.
fn until_stopped(pid: u32) {
    let end = Instant::now() + LONG;
    let tasks = || std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    // The state stands behind the name, which is in brackets.
    let stopped = |stat: std::io::Result<String>| stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')));
    while !tasks().all(|task| stopped(std::fs::read_to_string(task.path().join("stat")))) {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
}

#[test]
fn no_call_returns_later_than_told_when_the_server_is_stopped() {
    const TIMEOUT: Duration = Duration::from_millis(200);
    const SOON: Duration = Duration::from_millis(50);
    type Call = fn(&TcpStore) -> Result<(), Error>;
    let calls: [(&str, Duration, Call); 18] = [
        ("get", TIMEOUT, |s| s.get("k", TIMEOUT).map(drop)),
        ("get, at once", Duration::ZERO, |s| s.get("k", Duration::ZERO).map(drop)),
        ("wait", TIMEOUT, |s| s.wait(&["a", "b"], TIMEOUT)),
        ("multi_get", TIMEOUT, |s| s.multi_get(&["a", "b"], TIMEOUT).map(drop)),
        ("barrier", TIMEOUT, |s| s.barrier("b", 2, TIMEOUT)),
        ("queue_pop", TIMEOUT, |s| s.queue_pop("q", TIMEOUT).map(drop)),
        ("queue_pop, at once", Duration::ZERO, |s| s.queue_pop("q", Duration::ZERO).map(drop)),
        ("queue_len", TIMEOUT, |s| s.queue_len("q").map(drop)),
        ("check", TIMEOUT, |s| s.check(&["k"]).map(drop)),
        ("add", TIMEOUT, |s| s.add("n", 1).map(drop)),
        ("compare_set", TIMEOUT, |s| s.compare_set("c", b"", b"v").map(drop)),
        ("compare_set_by, soon", SOON, |s| s.compare_set_by("c", b"", b"v", Deadline::after(SOON)).map(drop)),
        ("delete_key", TIMEOUT, |s| s.delete_key("k").map(drop)),
        ("num_keys", TIMEOUT, |s| s.num_keys().map(drop)),
        ("list_keys", TIMEOUT, |s| s.list_keys().map(drop)),
        // More than the kernel takes for the server.
        ("set", TIMEOUT, |s| s.set("big", &vec![0; 16 << 20])),
        ("watch_key", TIMEOUT, |s| s.watch_key("k", Box::new(|_| ())).map(drop)),
        ("reconnect", TIMEOUT, |s| s.reconnect().map(drop)),
    ];
    let (server, port) = serving();
    let signal = |number| {
        // SAFETY: our own child, not yet waited for.
        assert_eq!(unsafe { libc::kill(server.0.id() as i32, number) }, 0);
    };
    let mut worst = Vec::new();
    // On a busy machine this process may be late itself.
    for _ in 0..10 {
        let options = TcpOptions { timeout: TIMEOUT, ..TcpOptions::default() };
        // On a busy machine it may take some attempts.
        let store = || (0..100).find_map(|_| TcpStore::new(Host::Other("localhost".into(), port), options.clone()).ok());
        let stores: Vec<TcpStore> = calls.iter().map(|_| store().expect("connect")).collect();
        signal(libc::SIGSTOP);
        until_stopped(server.0.id());
        worst = std::thread::scope(|scope| {
            let threads: Vec<_> = calls
                .iter()
                .zip(&stores)
                .map(|((name, timeout, call), store)| {
                    scope.spawn(move || {
                        let start = Instant::now();
                        let result = call(store);
                        let late = start.elapsed().saturating_sub(*timeout);
                        // Connecting in vain is torch's DistNetworkError.
                        let connects = matches!(*name, "watch_key" | "reconnect");
                        let expected =
                            if connects { matches!(result, Err(Error::Network(_))) } else { matches!(result, Err(Error::Timeout(_))) };
                        assert!(expected, "{name}: {result:?}");
                        (late, *name)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(|(late, _)| *late > Duration::from_millis(100)).collect()
        });
        signal(libc::SIGCONT);
        // What was only waited for has left the connection in step.
        for (store, (name, ..)) in stores.iter().zip(&calls).take(5) {
            let end = Instant::now() + LONG;
            while let Err(error) = store.add("n", 1) {
                assert!(matches!(error, Error::Timeout(_)) && Instant::now() < end, "{name}: {error}");
            }
        }
        if worst.is_empty() {
            return;
        }
    }
    panic!("later than told: {worst:?}");
}

/// Private memory of a process, in KiB.
fn private_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok());
    field("Private_Clean:").unwrap() + field("Private_Dirty:").unwrap()
}

/// The same number of descriptors here and in a child must be allowed.
fn descriptors(wanted: u64) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a limit of this process, in a value that outlives both calls.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_cur.max(wanted.min(limit.rlim_max));
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= wanted
    }
}

#[test]
fn five_thousand_idle_connections_take_less_than_8_kib_each() {
    const IDLE: usize = 5_000;
    if !descriptors(IDLE as u64 + 200) {
        return eprintln!("SKIP: RLIMIT_NOFILE is below {}", IDLE + 200);
    }
    let (server, port) = serving();
    let greeting = [&[0u8, 0xce, 0xf7, 0x85, 0x3c][..], &[13, 1, 2, 3, 4]].concat();
    let pid = server.0.id();
    let before = private_kib(pid);
    let mut idle: Vec<TcpStream> = (0..IDLE)
        .map(|i| {
            let mut stream = TcpStream::connect(("localhost", port)).unwrap_or_else(|e| panic!("connection {i}: {e}"));
            stream.set_read_timeout(Some(LONG)).unwrap();
            // Each has used the store: a value of 4 KiB set, and read back.
            let key = [&3u64.to_le_bytes()[..], b"/kv"].concat();
            let set = [&[1][..], &key, &4096u64.to_le_bytes(), &[7; 4096]].concat();
            stream.write_all(&[&greeting[..], &set, &[3], &key].concat()).unwrap();
            let mut reply = vec![0; 4 + 8 + 4096];
            stream.read_exact(&mut reply).unwrap_or_else(|e| panic!("connection {i}: {e}"));
            assert_eq!((&reply[..4], reply[4100]), (&[1, 2, 3, 4][..], 7));
            stream
        })
        .collect();
    let each = (private_kib(pid) - before) as f64 / IDLE as f64;
    println!("{each:.2} KiB per idle connection");
    assert!(each < 8.0, "{each:.2} KiB per idle connection");
    let store = join(port);
    assert_eq!(store.num_keys().unwrap(), 1);
    for stream in idle.iter_mut().step_by(499) {
        stream.write_all(&[13, 9, 9, 9, 9]).unwrap();
        let mut nonce = [0; 4];
        stream.read_exact(&mut nonce).unwrap();
        assert_eq!(nonce, [9; 4], "served after the rest had come");
    }
}
