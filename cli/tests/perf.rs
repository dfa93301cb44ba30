//! `railhead perf` as its users run it: the built program against the library built beside it, and against a plugin that is wrong on
//! request (tests/c/fake_net.c of the library).

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The library under test: $RH_LIBRARY, else as cargo leaves it, beside the test's own binary.
fn library() -> PathBuf {
    if let Some(path) = std::env::var_os("RH_LIBRARY") {
        return path.into();
    }
    let here = std::env::current_exe().expect("own path");
    let found = here.ancestors().skip(1).take(2).map(|folder| folder.join("librailhead.so")).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no librailhead.so beside {}", here.display()))
}

/// A plugin that is wrong on request, for version `abi`; built once per test.
fn fake(test: &str, abi: u32) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("perf");
    std::fs::create_dir_all(&folder).expect("a folder");
    let plugin = folder.join(format!("libfake_{test}_{abi}.so"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/c/fake_net.c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let built = Command::new(compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", &format!("-DFAKE_ABI={abi}"), "-o"])
        .arg(&plugin)
        .arg(source)
        .output()
        .expect("a C compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    plugin
}

/// `railhead perf` and its arguments; the ranks' environment carries a mark of this run.
struct Perf {
    command: Command,
    mark: String,
}

/// Few and short rounds: what is tested is not the speed.
const SHORT: [&str; 4] = ["--rounds", "2", "--round-ms", "2"];

impl Perf {
    fn new(plugin: &Path) -> Self {
        static RUN: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let run = RUN.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mark = format!("RH_PERF_TEST=run-{}-{run}-", std::process::id());
        let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
        command.args(["perf", "--env", &mark, "--plugin"]).arg(plugin);
        // Present everywhere.
        command.env("NCCL_SOCKET_IFNAME", "lo").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Perf { command, mark }
    }

    fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(arguments);
        self
    }

    fn short(mut self) -> Self {
        if !self.command.get_args().any(|argument| argument == "--rounds") {
            self.command.args(SHORT);
        }
        self
    }

    fn run(self) -> Done {
        let mut perf = self.short();
        let output = perf.command.output().expect("railhead starts");
        let done = Done { output, left: ranks(&perf.mark) };
        assert!(done.left.is_empty(), "ranks were left behind: {:?}\n{}", done.left, done.text());
        done
    }

    fn start(self) -> Running {
        let mut perf = self.short();
        Running { child: perf.command.spawn().expect("railhead starts"), mark: perf.mark }
    }
}

struct Done {
    output: Output,
    left: Vec<u32>,
}

impl Done {
    fn text(&self) -> String {
        let (out, err) = (String::from_utf8_lossy(&self.output.stdout), String::from_utf8_lossy(&self.output.stderr));
        format!("{:?}\n--- stdout\n{out}\n--- stderr\n{err}", self.output.status)
    }

    /// Standard output of a run that succeeded.
    #[track_caller]
    fn passes(&self) -> String {
        assert!(self.output.status.success(), "{}", self.text());
        String::from_utf8(self.output.stdout.clone()).expect("text")
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.passes()).unwrap_or_else(|e| panic!("{e}\n{}", self.text()))
    }

    #[track_caller]
    fn fails(&self, message: &str) {
        assert_eq!(self.output.status.code(), Some(2), "{}", self.text());
        assert!(self.output.stdout.is_empty(), "{}", self.text());
        assert!(String::from_utf8_lossy(&self.output.stderr).contains(message), "expected {message:?}\n{}", self.text());
    }
}

/// A run in the background, ended when dropped.
struct Running {
    child: Child,
    mark: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processes that have `mark` in their environment.
fn ranks(mark: &str) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let marked = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&b| b == 0).any(|variable| variable == mark.as_bytes())
    };
    pids.filter(marked).collect()
}

/// Waits until something holds.
#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
        std::thread::yield_now();
    }
}

fn positive(summary: &Value) {
    let part = |name: &str| summary[name].as_f64().unwrap_or_else(|| panic!("no {name} in {summary}"));
    assert!(0.0 < part("min") && part("min") <= part("median") && part("median") <= part("max"), "{summary}");
}

// ---- what is measured ----

#[test]
fn json_has_the_sizes_asked_for_and_every_limit() {
    for wire in ["shm", "tcp"] {
        let wire = format!("RAILHEAD_SOFT_WIRE={wire}");
        let report = Perf::new(&library()).args(["--json", "--sizes", "8,64K", "--outstanding", "1,8", "--env", &wire]).run().json();
        assert_eq!(report["plugins"][0]["name"], "Railhead");
        assert_eq!(report["plugins"][0]["abi"], 12);
        let rows = report["rows"].as_array().expect("rows");
        let of = |kind: &str| rows.iter().filter(|row| row["kind"] == kind).collect::<Vec<_>>();
        let latencies: Vec<&Value> = of("latency").into_iter().map(|row| &row["size"]).collect();
        assert_eq!(latencies, [8, 65536]);
        let bulk: Vec<(u64, u64)> =
            of("bandwidth").into_iter().map(|row| (row["outstanding"].as_u64().unwrap(), row["size"].as_u64().unwrap())).collect();
        assert_eq!(bulk, [(1, 8), (1, 65536), (8, 8), (8, 65536)]);
        for row in rows {
            positive(&row["plugins"][0]["figure"]);
            assert!(row["plugins"][0]["cpu_s_per_gb"].as_f64().is_some(), "{row}");
            let limits: Vec<&str> = row["limits"].as_array().unwrap().iter().map(|limit| limit["name"].as_str().unwrap()).collect();
            let expected = if row["kind"] == "latency" { &["cache-line", "tcp-ping-pong"][..] } else { &["memcpy", "readv", "tcp-stream"] };
            assert_eq!(limits, expected);
            for limit in row["limits"].as_array().unwrap() {
                if limit["name"] == "readv" && limit["refused"].is_string() {
                    println!("SKIP: {}", limit["refused"]);
                    continue;
                }
                positive(&limit["figure"]);
                positive(&limit["ratios"][0]);
            }
        }
    }
}

#[test]
fn every_version_of_the_table_is_driven() {
    for abi in 4..=12 {
        let report = Perf::new(&library())
            .args(["--json", "--sizes", "0,3,5000", "--comms", "2", "--direction", "two", "--limits", "none", "--abi", &abi.to_string()])
            .run()
            .json();
        assert_eq!(report["plugins"][0]["abi"], abi);
        assert_eq!(report["rows"].as_array().unwrap().len(), 6, "v{abi}");
    }
}

#[test]
fn a_table_for_people_has_both_plugins_and_their_ratio() {
    let other = fake("compare", 12);
    let done = Perf::new(&library()).args(["--sizes", "1K,1000", "--limits", "memcpy", "--touch", "--compare"]).args([&other]).run();
    let text = done.passes();
    for part in ["A = ", "B = ", "Railhead, v12", "Fake, v12", "A/B", "1 KiB", "1000 B", "memcpy", "CPU s/GB"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

#[test]
fn comparing_gives_ratios_round_by_round() {
    let other = fake("ratio", 9);
    let report = Perf::new(&library()).args(["--json", "--sizes", "64K", "--limits", "memcpy", "--compare"]).args([&other]).run().json();
    assert_eq!(report["plugins"][1]["name"], "Fake");
    for row in report["rows"].as_array().unwrap() {
        assert_eq!(row["plugins"].as_array().unwrap().len(), 2, "{row}");
        positive(&row["ratio"]);
        for limit in row["limits"].as_array().unwrap() {
            assert_eq!(limit["ratios"].as_array().unwrap().len(), 2, "{limit}");
        }
    }
}

#[test]
fn the_plot_names_plugin_and_limits() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("perf_plot.svg");
    let _ = std::fs::remove_file(&file);
    Perf::new(&library()).args(["--sizes", "0..16,64K", "--plot"]).args([&file]).run().passes();
    let svg = std::fs::read_to_string(&file).expect("the plot");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in [
        "Throughput, 8 outstanding, 1 comm (GB/s)",
        "Half round trip (us)",
        "Railhead",
        "memcpy",
        "tcp-stream",
        "cache-line",
        "tcp-ping-pong",
    ] {
        assert!(svg.contains(text), "{text}");
    }
}

/// Whatever is wrong with the plot, what was measured is shown; and what can be known before is told before.
#[test]
fn a_plot_costs_no_result() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (new, old) = (folder.join("perf_none.svg"), folder.join("perf_old.svg"));
    let _ = std::fs::remove_file(&new);
    std::fs::write(&old, "an older plot").expect("a file");
    for file in [&new, &old] {
        let done = Perf::new(&library()).args(["--sizes", "0", "--limits", "none", "--plot"]).args([file]).run();
        assert!(done.passes().contains("0 B"), "{}", done.text());
        assert!(done.text().contains("is not drawn"), "{}", done.text());
    }
    assert!(!new.exists() && std::fs::read_to_string(&old).expect("the file") == "an older plot");
    // A plugin that no rank can load: what is wrong is told before one starts.
    let nothing = Path::new("/proc/self/status");
    for targets in [&["--targets"][..], &[]] {
        Perf::new(nothing).args(targets).args(["--plot", "/nowhere/x.svg"]).run().fails("cannot write /nowhere/x.svg");
        Perf::new(nothing).args(targets).args(["--sizes", "65M"]).run().fails("\"65M\" is no size");
    }
    // The disk is full.
    let done = Perf::new(&library()).args(["--sizes", "8", "--limits", "none", "--plot", "/dev/full"]).run();
    let table = String::from_utf8_lossy(&done.output.stdout).into_owned();
    assert!(table.contains("8 B") && done.output.status.code() == Some(2), "{}", done.text());
    assert!(done.text().contains("cannot write /dev/full"), "{}", done.text());
}

#[test]
fn every_target_is_measured_and_judged() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is ours.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    if limit.rlim_max < 8192 {
        println!("SKIP: 1000 comms need more than the {} files that may be open here", limit.rlim_max);
        return;
    }
    let verdicts = Perf::new(&library()).args(["--targets", "--json"]).run().json();
    let verdicts = verdicts.as_array().unwrap();
    let named = |setting: &str, name: &str| {
        let found = verdicts.iter().find(|v| v["setting"] == setting && v["name"].as_str().unwrap().starts_with(name));
        found.unwrap_or_else(|| panic!("{setting}, {name}"))
    };
    for (setting, name, limit) in [
        ("shm", "1 MiB x 8", "memcpy"),
        ("shm", "64 KiB x 8", "readv"),
        ("shm, no cross-memory attach", "1 MiB x 8", "memcpy"),
        ("shm", "8 B half round trip", "cache-line"),
        ("tcp", "1 MiB x 8", "tcp-stream"),
        ("tcp", "64 KiB x 8", "tcp-stream"),
        ("tcp", "8 B half round trip", "tcp-ping-pong"),
        ("shm", "64 active comms", "one comm"),
        ("tcp", "64 active comms", "one comm"),
    ] {
        let verdict = named(setting, name);
        assert!(verdict["limit_name"].as_str().unwrap().starts_with(limit), "{verdict}");
        if limit == "readv" && verdict["limit"].is_null() {
            println!("SKIP: {}", verdict["note"]);
            continue;
        }
        positive(&verdict["limit"]);
        positive(&verdict["figure"]);
        positive(&verdict["ratio"]);
        let (median, target) = (verdict["ratio"]["median"].as_f64().unwrap(), verdict["target"].as_str().unwrap());
        let (direction, bound) = target.split_once(' ').unwrap();
        let bound: f64 = bound.parse().unwrap();
        assert_eq!(verdict["met"], if direction == ">=" { median >= bound } else { median <= bound }, "{verdict}");
    }
    for setting in ["shm", "tcp"] {
        // May be nothing in a round as short as these.
        let share = named(setting, "slowest of them")["figure"]["max"].as_f64().unwrap();
        assert!(0.0 < share && share <= 1.0, "{share}");
        positive(&named(setting, "1000 comms set up")["figure"]);
        assert!(named(setting, "private memory of an idle comm")["met"].is_boolean());
    }
}

#[test]
fn variables_are_set_in_the_ranks_and_the_kernel_refuses_when_told_to() {
    // What the plugin warns of is told.
    let done = Perf::new(&library()).args(["--sizes", "8", "--env", "NCCL_SOCKET_IFNAME==nosuch0"]).run();
    done.fails("last warning in rank");
    done.fails("which matches none of this machine's interfaces");
    // Bulk data still arrives, by another path.
    let report = Perf::new(&library()).args(["--json", "--sizes", "1M", "--refuse-cma", "--env", "RAILHEAD_SOFT_WIRE=shm"]).run().json();
    positive(&report["rows"][0]["plugins"][0]["figure"]);
}

// ---- what is wrong is told ----

#[test]
fn faults_of_a_plugin_are_told() {
    let faults = [
        ("flip", "byte 4095 of 4096 is"),
        ("skip", "byte 0 of 4096 is"),
        ("repeat", "byte 0 of 4096 is"),
        ("overrun", "was overwritten"),
        ("underrun", "was overwritten"),
        ("scribble", "the sender's own buffer was changed"),
        ("short", "test reported 4095 bytes for message"),
        ("stall", "no progress for 1 s"),
        ("hang", "no progress for 1 s"),
        ("error", "test returned 6 (ncclRemoteError)"),
        ("die", "was killed by signal 9 (SIGKILL)"),
        ("nodev", "Fake has no device"),
        ("noinit", "init returned 2 (ncclSystemError)"),
    ];
    let plugin = fake("faults", 12);
    for (fault, message) in faults {
        let timeout = if matches!(fault, "stall" | "hang") { "1" } else { "60" };
        // An odd size where the byte behind it has to be found, a whole page where the next one is a slot's.
        let size = if fault == "overrun" { "4000" } else { "4096" };
        let fault = format!("FAKE_FAULT={fault}");
        let done = Perf::new(&plugin).args(["--sizes", size, "--limits", "none", "--timeout", timeout, "--env", &fault]).run();
        done.fails(message);
        done.fails("libfake_faults_12.so");
    }
}

/// A fault that begins behind the pass that checks every byte.
#[test]
fn a_stamp_that_is_wrong_is_noticed_while_timing() {
    let plugin = fake("timed", 12);
    for (what, verified) in [("latency", 16), ("bandwidth", 16)] {
        let after = format!("FAKE_AFTER={verified}");
        let arguments = ["--sizes", "4096", "--limits", "none", "--what", what, "--env", "FAKE_FAULT=flip", "--env", &after];
        Perf::new(&plugin).args(arguments).run().fails("carries stamps");
    }
    let after = ["--env", "FAKE_FAULT=flip", "--env", "FAKE_AFTER=16"];
    Perf::new(&plugin).args(["--sizes", "100", "--touch", "--what", "bandwidth"]).args(after).run().fails("not every byte is");
}

#[test]
fn nonsense_is_refused_with_the_range() {
    let cases: [(&[&str], &str); 25] = [
        (&["--sizes", "65M"], "\"65M\" is no size from 0 to 64M"),
        (&["--sizes", ""], "--sizes"),
        (&["--outstanding", "33"], "\"33\" is no number from 1 to 32"),
        (&["--comms", "9"], "\"9\" is no number from 1 to 8"),
        (&["--abi", "13"], "from 4 to 12"),
        (&["--rounds", "0"], "from 1 to 1000"),
        (&["--timeout", "0"], "from 1 to 86400"),
        (&["--limits", "speed-of-light"], "memcpy, readv, cache-line, tcp-stream, tcp-ping-pong"),
        (&["--env", "NAME"], "NAME=VALUE is wanted"),
        (&["--cpus", "0"], "two numbers are wanted"),
        (&["--cpus", "0,1000"], "may not run on CPU 1000, but on 0"),
        (&["--dev", "7"], "has no device 7: 0 to"),
        (&["--abi", "x"], "invalid value 'x' for '--abi <ABI>': expected a whole number from 4 to 12"),
        (&["--rounds", "abc"], "expected a whole number from 1 to 1000"),
        (&["--dev", "-1"], "invalid value '-1' for '--dev <DEV>': expected a whole number from 0"),
        (&["--connect", "nowhere:x"], "is no ADDRESS or ADDRESS:PORT"),
        (&["--listen", "nowhere:x"], "is no ADDRESS or ADDRESS:PORT"),
        (&["--connect", "127.0.0.1:1", "--compare", "x"], "cannot be used with"),
        (&["--targets", "--outstanding", "8"], "cannot be used with"),
        (&["--targets", "--comms", "1"], "cannot be used with"),
        (&["--targets", "--direction", "two"], "cannot be used with"),
        (&["--targets", "--touch"], "cannot be used with"),
        (&["--targets", "--what", "latency"], "cannot be used with"),
        (&["--targets", "--limits", "none"], "cannot be used with"),
        (&["--plot", "/nowhere/plot.svg", "--sizes", "8", "--limits", "none"], "cannot write /nowhere/plot.svg"),
    ];
    for (arguments, message) in cases {
        Perf::new(&library()).args(arguments).run().fails(message);
    }
    Perf::new(Path::new("/nowhere/libnothing.so")).run().fails("cannot load /nowhere/libnothing.so");
    Perf::new(Path::new("/proc/self/status")).run().fails("cannot load");
    Perf::new(&fake("abi", 9)).args(["--abi", "12"]).run().fails("exports no ncclNetPlugin_v12");
    let output = Command::new(env!("CARGO_BIN_EXE_railhead")).args(["perf", "--rank"]).stdin(Stdio::null()).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("standard input is no socket"), "{output:?}");
}

/// Even one that is in a call that does not return.
#[test]
fn ranks_end_with_their_parent() {
    let plugin = fake("orphans", 12);
    let arguments = ["--sizes", "8", "--limits", "none", "--timeout", "600", "--env", "FAKE_FAULT=hang"];
    let mut running = Perf::new(&plugin).args(arguments).start();
    until("a rank hangs", || ranks(&running.mark).into_iter().any(hangs));
    running.child.kill().expect("kill");
    until("no rank", || ranks(&running.mark).is_empty());
}

/// Whether a process is in pause(), which is ppoll() where there is no such system call.
fn hangs(pid: u32) -> bool {
    let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let number = call.split(' ').next().and_then(|number| number.parse().ok());
    #[cfg(target_arch = "x86_64")]
    let pause = libc::SYS_pause;
    #[cfg(not(target_arch = "x86_64"))]
    let pause = libc::SYS_ppoll;
    number == Some(pause)
}

// ---- two hosts ----

/// A listening side and its address.
fn listening(plugin: &Path) -> (Running, BufReader<std::process::ChildStdout>, String) {
    listening_at(plugin, "127.0.0.1:0")
}

fn listening_at(plugin: &Path, address: &str) -> (Running, BufReader<std::process::ChildStdout>, String) {
    let mut running = Perf::new(plugin).args(["--listen", address]).start();
    let mut lines = BufReader::new(running.child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("listening at ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
    (running, lines, address)
}

#[test]
fn two_hosts_measure_over_a_connection() {
    let (mut listener, mut lines, address) = listening(&library());
    let report = Perf::new(&library()).args(["--json", "--sizes", "8,64K", "--comms", "2", "--connect", &address]).run().json();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        positive(&row["plugins"][0]["figure"]);
        assert_eq!(row["limits"].as_array().unwrap().len(), 0, "limits are of one host");
    }
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert!(rest.starts_with("measured by 127.0.0.1:"), "{rest}");
    assert!(listener.child.wait().unwrap().success());
    until("no rank", || ranks(&listener.mark).is_empty());
}

/// Where nothing else is said, a listener is there for both kinds of addresses.
#[test]
fn a_listener_at_any_address_is_found_over_ipv4() {
    let (mut listener, _lines, address) = listening_at(&library(), "[::]:0");
    let port = address.rsplit_once(':').expect("a port").1;
    let report = Perf::new(&library()).args(["--json", "--sizes", "8", "--connect", &format!("127.0.0.1:{port}")]).run().json();
    assert_eq!(report["rows"].as_array().unwrap().len(), 2);
    assert!(listener.child.wait().unwrap().success());
}

#[test]
fn strangers_do_not_end_a_listener_and_a_fault_there_is_told_here() {
    let plugin = fake("strangers", 12);
    let (mut listener, _lines, address) = listening(&plugin);
    TcpStream::connect(&address).unwrap().write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    // Closed without a word.
    drop(TcpStream::connect(&address).unwrap());
    let done = Perf::new(&plugin).args(["--sizes", "4096", "--connect", &address, "--env", "FAKE_FAULT=scribble"]).run();
    done.fails("rank 0: the sender's own buffer was changed");
    assert!(!listener.child.wait().unwrap().success());
    until("no rank", || ranks(&listener.mark).is_empty());
}

#[test]
fn a_coordinator_that_talks_nonsense_is_left() {
    for nonsense in [&b"\xff\xff\xff\x7f"[..], b"\x02\0\0\0{]", b"\x08\0\0\0\"Finish"] {
        let (mut listener, _lines, address) = listening(&library());
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(b"railhead perf 1\n").unwrap();
        stream.write_all(nonsense).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(listener.child.wait().unwrap().code(), Some(2));
        let mut text = String::new();
        listener.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(text.contains("what the coordinator sends"), "{text}");
        until("no rank", || ranks(&listener.mark).is_empty());
    }
}
