//! Real torch, both ways: its clients on our server, our client on both of its servers, both on one file, jobs of both, and our collectives beside
//! its gloo's.
//!
//! tests/torch/setup.py makes one virtual environment under target/, once; $RH_TORCH_PYTHON names another interpreter that has torch 2.15 or later. Where
//! torch cannot be had, each test is a SKIP with the reason.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use crate::ports::own_port;
use railhead::base::config::{Config, Secret};
use railhead::mesh::{Device, Mesh};
use railhead::store::rendezvous::{Environment, Group, GroupOptions, rendezvous};
use railhead::store::tcp::{Host, Server, ServerOptions, TcpOptions};
use railhead::store::{Error, FileStore, Store, TcpStore};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const LONG: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_millis(300);

/// The interpreter, or a SKIP line and `None`.
pub fn python() -> Option<&'static Path> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found = PYTHON.get_or_init(|| {
        if let Some(python) = std::env::var_os("RH_TORCH_PYTHON") {
            return Ok(python.into());
        }
        let folder = Path::new(ROOT).join("target/torch");
        let output = Command::new("python3").arg(Path::new(ROOT).join("tests/torch/setup.py")).arg(folder).output();
        let output = output.map_err(|e| format!("python3: {e}"))?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        match output.status.code() {
            Some(0) => Ok(text.into()),
            Some(3) => Err(text),
            _ => panic!("setup.py: {}\n{text}{}", output.status, String::from_utf8_lossy(&output.stderr)),
        }
    });
    found.as_deref().map_err(|reason| eprintln!("SKIP: {reason}")).ok()
}

/// The process that tests/torch/forked.py forks scripts from: the name of its socket.
fn forked(python: &Path) -> &'static str {
    static SERVER: OnceLock<(String, Child)> = OnceLock::new();
    let (name, _) = SERVER.get_or_init(|| {
        let name = format!("railhead-torch-{}", std::process::id());
        let mut command = Command::new(python);
        command.arg(Path::new(ROOT).join("tests/torch/forked.py")).args(["serve", &name]).env_remove("PYTHONPATH");
        // Its input ends with this process.
        let mut server = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python");
        let mut line = String::new();
        BufReader::new(server.stdout.as_mut().expect("piped")).read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        (name, server)
    });
    name
}

/// A script of tests/torch, to be started.
fn script<A: AsRef<OsStr>>(python: &Path, name: &str, arguments: impl IntoIterator<Item = A>) -> Command {
    let scripts = Path::new(ROOT).join("tests/torch");
    let mut command = Command::new(python);
    // With nothing that takes long to start.
    command.args(["-S", "-E"]).arg(scripts.join("forked.py")).args(["run", forked(python)]).arg(scripts.join(name)).args(arguments);
    // Gloo looks for an interface by the host's name otherwise.
    command.env("GLOO_SOCKET_IFNAME", "lo").env_remove("PYTHONPATH");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Processes that are killed if the test fails.
pub struct Running(Vec<Child>);

impl Running {
    pub fn start(commands: impl IntoIterator<Item = Command>) -> Self {
        Running(commands.into_iter().map(|mut command| command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"))).collect())
    }

    /// Waits for all and returns what each printed.
    pub fn succeed(mut self) -> Vec<String> {
        let outputs: Vec<_> = std::mem::take(&mut self.0).into_iter().map(|child| child.wait_with_output().expect("wait")).collect();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        for (index, output) in outputs.iter().enumerate() {
            assert!(output.status.success(), "{index}: {}\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
        }
        outputs.iter().map(|output| text(&output.stdout)).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub fn good(command: Command) {
    let printed = Running::start([command]).succeed();
    assert_eq!(printed[0].trim(), "good");
}

fn serve() -> Server {
    Server::start(ServerOptions { port: 0, ..ServerOptions::default() }).expect("start")
}

fn join(port: u16) -> TcpStore {
    TcpStore::new(Host::Other("localhost".into(), port), TcpOptions { timeout: LONG, ..TcpOptions::default() }).expect("connect")
}

/// torch's server, and its port.
fn torchs(python: &Path, backend: &str) -> (Running, u16) {
    let mut command = script(python, "server.py", [backend]);
    command.stdin(Stdio::piped()).stderr(Stdio::inherit());
    let mut server = Running::start([command]);
    let mut line = String::new();
    BufReader::new(server.0[0].stdout.as_mut().expect("piped")).read_line(&mut line).expect("a port");
    (server, line.trim().parse().expect("a port"))
}

#[test]
fn torchs_client_does_everything_on_our_server() {
    let Some(python) = python() else { return };
    let server = serve();
    good(script(python, "client.py", ["localhost", &server.port().to_string()]));
}

#[test]
fn the_same_passes_on_torchs_own_server() {
    let Some(python) = python() else { return };
    let (_server, port) = torchs(python, "libuv");
    // What client.py asserts is torch's behaviour, then; but for the keys, of which torch's server has none of its own either.
    good(script(python, "client.py", ["localhost", &port.to_string()]));
}

#[test]
fn many_torch_clients_use_our_server_at_once() {
    let Some(python) = python() else { return };
    let server = serve();
    good(script(python, "clients.py", ["localhost", &server.port().to_string(), "64"]));
    assert_eq!(join(server.port()).get("sum", LONG).unwrap(), b"1280");
}

#[test]
fn a_client_with_a_secret_refuses_torchs_servers_at_once() {
    let Some(python) = python() else { return };
    for backend in ["libuv", "legacy"] {
        let (_server, port) = torchs(python, backend);
        let options = TcpOptions { timeout: LONG, secret: Secret::new("sesame"), ..TcpOptions::default() };
        let error = TcpStore::new(Host::Other("localhost".into(), port), options).err().expect(backend).to_string();
        assert_eq!(error, "The server knows no secrets, as torch's do not, and this process has one: RAILHEAD_STORE_SECRET", "{backend}");
    }
}

#[test]
fn our_client_does_everything_on_torchs_servers() {
    let Some(python) = python() else { return };
    for backend in ["libuv", "legacy"] {
        let (_server, port) = torchs(python, backend);
        everything(&join(port), &join(port), backend);
    }
}

fn everything(store: &TcpStore, other: &TcpStore, backend: &str) {
    let libuv = backend == "libuv";
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
    let big: Vec<u8> = (0..8 << 20).map(|i| (i % 253) as u8).collect();
    store.set("big", &big).unwrap();
    assert!(store.get("big", LONG).unwrap() == big);
    assert_eq!((store.add("n", 5).unwrap(), other.add("n", -7).unwrap()), (5, -2));
    assert_eq!(store.compare_set("c", b"", b"v1").unwrap(), b"v1");
    assert_eq!(store.compare_set("c", b"v1", b"v2").unwrap(), b"v2");
    assert_eq!(store.compare_set("c", b"no", b"v3").unwrap(), b"v2");
    assert_eq!(store.compare_set("missing", b"x", b"y").unwrap(), b"x");
    assert!(store.check(&["k", "n"]).unwrap() && !store.check(&["k", "missing"]).unwrap() && store.check(&[]).unwrap());
    store.append("a", b"1").unwrap();
    store.append("a", b"2").unwrap();
    store.multi_set(&[("m1", b"x"), ("m2", b"")]).unwrap();
    assert_eq!(store.multi_get(&["a", "m1", "m2"], LONG).unwrap(), [&b"12"[..], b"x", b""]);
    assert!(store.delete_key("m1").unwrap() && !store.delete_key("m1").unwrap());
    let mut keys = store.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["a", "big", "c", "k", "m2", "n"]);
    assert_eq!(store.num_keys().unwrap(), 6);
    store.barrier("b1", 1, LONG).unwrap();

    // On a busy machine torch's server may take longer to answer the cancel than ours waits for that.
    let said = |error: Error| {
        let text = error.to_string();
        (matches!(error, Error::Timeout(_)), text.strip_suffix("; the server does not answer").unwrap_or(&text).to_owned())
    };
    let wait = said(store.wait(&["nope", "k"], SHORT).unwrap_err());
    assert_eq!(wait, (true, "wait timeout after 300ms, keys: /nope, /k".into()));
    assert_eq!(said(store.barrier("b2", 2, SHORT).unwrap_err()), (true, "barrier timeout after 300ms, key: b2".into()));
    assert_eq!(store.get("k", LONG).unwrap(), b"v", "in step after both");

    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.multi_get(&["late1", "late2"], LONG).unwrap());
        other.set("late1", b"1").unwrap();
        other.add("late2", 2).unwrap();
        assert_eq!(waiter.join().unwrap(), [b"1", b"2"]);
        let waiter = scope.spawn(|| store.barrier("b3", 2, LONG));
        other.barrier("b3", 2, LONG).unwrap();
        waiter.join().unwrap().unwrap();
    });

    assert!(matches!(store.watch_key("k", Box::new(|_| ())), Err(Error::Unsupported(_))));
    assert_eq!(store.get("k", LONG).unwrap(), b"v", "a watch in vain costs its own connection alone");
    if libuv {
        store.queue_push("q", b"one").unwrap();
        store.queue_push("q", b"two").unwrap();
        assert_eq!(store.queue_len("q").unwrap(), 2);
        assert_eq!((other.queue_pop("q", LONG).unwrap(), store.queue_pop("q", LONG).unwrap()), (b"one".to_vec(), b"two".to_vec()));
        assert!(matches!(store.queue_pop("q", Duration::ZERO), Err(Error::QueueEmpty)));
        assert!(matches!(store.queue_pop("q", SHORT), Err(Error::Timeout(_))));
    } else {
        // The legacy server does not know queues and hangs up.
        assert!(matches!(store.queue_len("q"), Err(Error::Network(_))));
    }
}

/// Of whom one waits for the other.
#[test]
fn ranks_of_a_mesh_meet_on_torchs_servers() {
    let Some(python) = python() else { return };
    for backend in ["libuv", "legacy"] {
        let (_server, port) = torchs(python, backend);
        let connect = |rank| {
            let config = Config { socket_ifname: "=lo".into(), stats: false, ..Config::default() };
            let mesh = Mesh::new(Device::open(config, "").unwrap(), rank, 2).unwrap();
            let connected = mesh.connect(&join(port), Duration::from_secs(20));
            (mesh, connected.map_err(|error| format!("{backend}, rank {rank}: {error}")))
        };
        thread::scope(|scope| {
            let first = scope.spawn(|| connect(0));
            let store = join(port);
            store.wait(&["0"], LONG).unwrap();
            // Most likely it waits by then.
            thread::sleep(Duration::from_millis(100));
            let second = scope.spawn(|| connect(1));
            // Both are there until both are connected.
            let (first, second) = (first.join().unwrap(), second.join().unwrap());
            assert_eq!((first.1, second.1), (Ok(()), Ok(())));
        });
    }
}

#[test]
fn many_of_our_clients_use_torchs_servers_at_once() {
    const CLIENTS: usize = 64;
    let Some(python) = python() else { return };
    for backend in ["libuv", "legacy"] {
        let (_server, port) = torchs(python, backend);
        thread::scope(|scope| {
            for index in 0..CLIENTS {
                scope.spawn(move || {
                    let store = join(port);
                    for turn in 0..20 {
                        store.set(&format!("{index}/{turn}"), (index * turn).to_string().as_bytes()).unwrap();
                        store.add("sum", 1).unwrap();
                    }
                    store.barrier("all", CLIENTS as i64, LONG).unwrap();
                    assert_eq!(store.get("sum", LONG).unwrap(), (20 * CLIENTS).to_string().as_bytes());
                    let next = (index + 1) % CLIENTS;
                    assert_eq!(store.get(&format!("{next}/19"), LONG).unwrap(), (next * 19).to_string().as_bytes());
                });
            }
        });
    }
}

#[test]
fn a_gloo_job_runs_through_our_server() {
    let Some(python) = python() else { return };
    let server = serve();
    let store = join(server.port());
    let ranks = (0..4).map(|rank| {
        let mut command = script(python, "gloo.py", ["env://"]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "4");
        // As torchrun's agent would have it, whose place our server takes.
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", server.port().to_string()).env("TORCHELASTIC_USE_AGENT_STORE", "True");
        command
    });
    let printed = Running::start(ranks).succeed();
    for (rank, text) in printed.iter().enumerate() {
        assert_eq!(text.trim(), format!("rank {rank} of 4: good"));
    }
    // A group of ours with the same store finds torch's keys: the prefixes are the same.
    let options = GroupOptions {
        init_method: Some(format!("tcp://localhost:{}", server.port())),
        rank: 3,
        world_size: 4,
        environment: Environment::of([]),
        ..GroupOptions::default()
    };
    let job = Group::init(options).unwrap();
    for rank in 0..4 {
        assert_eq!(job.store().get(&format!("from/{rank}"), LONG).unwrap(), b"all", "{:?}", store.list_keys().unwrap());
    }
    let sub = job.new_group(Some(&[0, 3])).unwrap().unwrap();
    assert_eq!(sub.store().multi_get(&["from/0", "from/3"], LONG).unwrap(), [b"sub", b"sub"]);
}

/// In 200 random cases, among 1 to 8 processes. $RHT_SEED repeats them.
#[test]
fn collectives_give_what_torchs_gloo_gives() {
    let Some(python) = python() else { return };
    let mut command = script(python, "mesh.py", [library().as_os_str(), "200".as_ref()]);
    command.args(std::env::var_os("RHT_SEED")).env("RAILHEAD_SOCKET_IFNAME", "lo");
    let printed = Running::start([command]).succeed().concat();
    println!("{printed}");
    assert!(printed.trim().ends_with("good"));
}

#[test]
fn ranks_of_both_kinds_meet_whoever_runs_the_server() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = format!("file://{}", folder.path().join("store").display());
    let tcp = || format!("tcp://localhost:{}", own_port());
    for (url, ours) in [(tcp(), 0), (tcp(), 1), (file.clone(), 1)] {
        let others = (0..3).filter(|rank| *rank != ours);
        let torch = Running::start(others.map(|rank| script(python, "meet.py", [&url[..], &rank.to_string(), "3"])));
        let joined = rendezvous(&url, ours, 3, LONG, Environment::of([])).unwrap().join().unwrap();
        joined.store.set(&format!("from/{ours}"), ours.to_string().as_bytes()).unwrap();
        let values = joined.store.multi_get(&["from/0", "from/1", "from/2"], LONG).unwrap();
        assert_eq!(values, [b"0", b"1", b"2"], "{url}");
        if joined.store.add("gone", 1).unwrap() == 3 {
            joined.store.set("all gone", b"").unwrap();
        }
        if ours == 0 {
            joined.store.wait(&["all gone"], LONG).unwrap();
        }
        assert_eq!(torch.succeed().iter().map(|text| text.trim()).collect::<Vec<_>>(), ["good"; 2]);
    }
}

#[test]
fn both_kinds_of_file_stores_use_one_file_at_once() {
    const ROUNDS: usize = 100;
    const USERS: usize = 4;
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let torch = Running::start((0..2).map(|name| {
        let arguments = [path.display().to_string(), name.to_string(), ROUNDS.to_string(), USERS.to_string()];
        script(python, "file.py", arguments)
    }));
    thread::scope(|scope| {
        for name in 2..USERS {
            let path = &path;
            scope.spawn(move || {
                let store = FileStore::new(path, Some(USERS)).unwrap();
                for turn in 0..ROUNDS {
                    store.add("sum", 1).unwrap();
                    store.set(&format!("{name}/{turn}"), format!("{name} {turn}").as_bytes()).unwrap();
                }
                store.add("done", 1).unwrap();
                while store.add("done", 0).unwrap() < USERS as i64 {
                    thread::yield_now();
                }
                assert_eq!(store.get("sum", LONG).unwrap(), (ROUNDS * USERS).to_string().as_bytes());
                for turn in 0..ROUNDS {
                    for other in 0..USERS {
                        let value = store.get(&format!("{other}/{turn}"), LONG).unwrap();
                        assert_eq!(value, format!("{other} {turn}").as_bytes());
                    }
                }
            });
        }
    });
    torch.succeed();
    assert!(!path.exists(), "the last of both kinds removes the file");
}

#[test]
fn torchs_clients_are_refused_by_a_server_with_a_secret_and_told_what_it_said() {
    let Some(python) = python() else { return };
    let options = ServerOptions { port: 0, secret: Secret::new("sesame"), ..ServerOptions::default() };
    let server = Server::start(options).unwrap();
    let code = "import sys, datetime, torch.distributed as d\n\
                t = datetime.timedelta(seconds=2)\n\
                d.TCPStore('localhost', int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=t)";
    let output = Command::new(python).args(["-c", code, &server.port().to_string()]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(text.contains("Ping failed") && text.contains("Got: 1397048146"), "{text}");
    assert!(text.contains("retrying"), "and with the first attempt: {text}");
}

/// What ranks of a C example print that torchrun starts.
fn torchrun(python: &Path, target: &str, program: &str, arguments: &[&OsStr]) -> String {
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("torchrun");
    let made = Command::new("make")
        .arg("-C")
        .arg(Path::new(ROOT).join("c_examples"))
        .args([target, &format!("BUILD={}", build.display())])
        .arg(format!("RAILHEAD_LIB={}", library().parent().expect("a folder").display()))
        .env_remove("MAKEFLAGS")
        .output()
        .expect("make");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut command = Command::new(python);
    command.args(["-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone", "--no-python"]);
    command.arg(build.join(program)).args(arguments);
    command.env("RAILHEAD_SOCKET_IFNAME", "lo").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::start([command]).succeed().concat()
}

#[test]
fn torchrun_starts_ranks_that_ping() {
    let Some(python) = python() else { return };
    let library = library();
    let printed =
        torchrun(python, "store", "rendezvous_ping", &["--plugin".as_ref(), library.as_os_str(), "--rounds".as_ref(), "20".as_ref()]);
    for rank in 0..4 {
        assert!(printed.contains(&format!("rank {rank} of 4: 20 messages went round through Railhead")), "{printed}");
    }
}

#[test]
fn torchrun_starts_ranks_of_a_mesh() {
    let Some(python) = python() else { return };
    let printed = torchrun(python, "mesh", "mesh_allreduce", &["--rounds".as_ref(), "3".as_ref()]);
    assert!(printed.contains("4 ranks, ") && printed.contains("3 rounds, no element wrong"), "{printed}");
    let printed = torchrun(python, "mesh", "mesh_pair", &["--messages".as_ref(), "50".as_ref()]);
    assert!(printed.contains("around 4 ranks: ") && printed.contains("no byte wrong"), "{printed}");
}

#[test]
fn a_torch_client_that_is_killed_while_it_waits_is_nobodys_loss() {
    let Some(python) = python() else { return };
    let server = serve();
    let store = join(server.port());
    let code = "import sys, torch.distributed as d\n\
                s = d.TCPStore('localhost', int(sys.argv[1]), is_master=False, wait_for_workers=False)\n\
                s.set('here', ''); s.wait(['never'])";
    let mut command = Command::new(python);
    command.args(["-c", code, &server.port().to_string()]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut waiter = Running::start([command]);
    store.wait(&["here"], LONG).unwrap();
    waiter.0[0].kill().unwrap();
    let mut rest = String::new();
    waiter.0[0].stderr.take().unwrap().read_to_string(&mut rest).unwrap();
    store.set("never", b"").unwrap();
    assert_eq!(store.add("n", 1).unwrap(), 1, "{rest}");
}

/// The library under test: $RH_LIBRARY, else as `cargo test` leaves it, beside the test's own binary.
pub fn library() -> PathBuf {
    if let Some(path) = std::env::var_os("RH_LIBRARY") {
        return path.into();
    }
    let here = std::env::current_exe().expect("own path");
    let found = here.ancestors().skip(1).take(2).map(|folder| folder.join("librailhead.so")).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no librailhead.so beside {}", here.display()))
}
