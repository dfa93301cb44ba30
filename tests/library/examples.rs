//! Builds the C examples and runs them as a user does: plain, under ASan and UBSan, and under valgrind. A tool that is missing is
//! a SKIP with its name.
//!
//! tests/c/fake_net.c, a plugin that can be told to be wrong, proves that plugin_pingpong's verdict means something.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::support::ports::own_port;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
pub const SANITIZE: &str = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g";
const ABIS: [u32; 5] = [8, 9, 10, 11, 12];

// ---- the library through plugin_pingpong ----

#[test]
fn pingpong_on_shared_memory() {
    let run = Pingpong::plain().env("RAILHEAD_SOFT_WIRE", "shm").run(&["--max", "4M", "--iters", "200"]);
    run.passes();
    run.moved_on(|path| path != "tcp");
}

#[test]
fn pingpong_on_tcp() {
    let run = Pingpong::plain().env("RAILHEAD_SOFT_WIRE", "tcp").run(&["--max", "4M", "--iters", "200"]);
    run.passes();
    run.moved_on(|path| path == "tcp");
}

#[test]
fn pingpong_on_each_abi_version() {
    let pingpong = Pingpong::plain();
    for abi in ABIS {
        let run = pingpong.run(&["--abi", &abi.to_string(), "--max", "64K", "--iters", "20"]);
        run.passes();
        assert!(run.stdout.contains(&format!("ncclNetPlugin_v{abi},")), "{}", run.text());
    }
}

#[test]
fn pingpong_takes_the_newest_version_and_sizes_that_are_not_usual() {
    let run = Pingpong::plain().run(&["--max", "1000003", "--iters", "20"]);
    run.passes();
    assert!(run.stdout.contains("plugin Railhead, ncclNetPlugin_v12,"), "{}", run.text());
}

#[test]
fn pingpong_finds_the_plugin_by_name_as_nccl_does() {
    let pingpong = Pingpong::plain();
    let link = pingpong.build.join("libnccl-net-railhead.so");
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(library(), &link).expect("symlink");
    let folder = pingpong.build.clone();
    let run = pingpong.with("railhead".as_ref()).env("LD_LIBRARY_PATH", folder).run(&["--max", "64", "--iters", "20"]);
    run.passes();
}

#[test]
fn pingpong_under_sanitizers() {
    if !sanitizers_work() {
        return skip("the compiler has no AddressSanitizer here");
    }
    for wire in ["shm", "tcp"] {
        let run = Pingpong::new(SANITIZE, &[]).env("RAILHEAD_SOFT_WIRE", wire).run(&["--max", "1M", "--iters", "50"]);
        run.passes();
    }
}

#[test]
fn pingpong_under_valgrind() {
    let Some(valgrind) = valgrind() else { return skip("valgrind is not installed") };
    for wire in ["shm", "tcp"] {
        let run = Pingpong::new("-g", &valgrind).env("RAILHEAD_SOFT_WIRE", wire).run(&["--max", "64K", "--iters", "10"]);
        run.passes();
    }
}

#[test]
fn pingpong_is_not_linked_with_the_library() {
    let pingpong = Pingpong::plain();
    let Some(output) = try_run(Command::new("readelf").arg("-d").arg(pingpong.binary())) else {
        return skip("readelf is not installed");
    };
    let dynamic = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && dynamic.contains("(NEEDED)"), "{output:?}");
    assert!(!dynamic.contains("railhead"), "{dynamic}");
}

// ---- the header ----

#[test]
fn header_alone_in_c11_and_cxx17() {
    let build = make("header_only", "");
    for program in ["header_only_c11", "header_only_cxx17"] {
        succeed(&mut Command::new(build.join(program)));
    }
}

#[test]
fn header_alone_under_sanitizers() {
    if !sanitizers_work() {
        return skip("the compiler has no AddressSanitizer here");
    }
    let build = make("header_only", SANITIZE);
    for program in ["header_only_c11", "header_only_cxx17"] {
        succeed(&mut Command::new(build.join(program)));
    }
}

#[test]
fn header_alone_under_valgrind() {
    let Some(valgrind) = valgrind() else { return skip("valgrind is not installed") };
    let build = make("header_only", "-g");
    for program in ["header_only_c11", "header_only_cxx17"] {
        succeed(Command::new(&valgrind[0]).args(&valgrind[1..]).arg(build.join(program)));
    }
}

// ---- the store, and ranks that find each other through it ----

#[test]
fn store_kv_demonstrates_every_operation() {
    let build = make("store", "");
    succeed(&mut Command::new(build.join("store_kv")));
}

#[test]
fn store_kv_under_sanitizers() {
    if !sanitizers_work() {
        return skip("the compiler has no AddressSanitizer here");
    }
    succeed(&mut Command::new(make("store", SANITIZE).join("store_kv")));
}

#[test]
fn store_kv_under_valgrind() {
    let Some(valgrind) = valgrind() else { return skip("valgrind is not installed") };
    let build = make("store", "-g");
    succeed(Command::new(&valgrind[0]).args(&valgrind[1..]).arg(build.join("store_kv")));
}

#[test]
fn store_kv_serves_other_processes() {
    let program = make("store", "").join("store_kv");
    let mut server = Command::new(&program)
        .args(["serve", "0"])
        .env("RAILHEAD_STORE_BIND", "127.0.0.1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("store_kv starts");
    let mut port = String::new();
    BufReader::new(server.stdout.take().expect("piped")).read_line(&mut port).expect("a port");
    let place = format!("127.0.0.1:{}", port.trim());
    let client = |arguments: &[&str]| {
        let output = Command::new(&program).arg(&place).args(arguments).output().expect("store_kv starts");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    client(&["set", "k", "some value"]);
    client(&["wait", "k"]);
    assert_eq!(client(&["get", "k"]), "some value\n");
    assert_eq!(client(&["add", "n", "40"]), "40\n");
    assert_eq!(client(&["add", "n", "2"]), "42\n");
    drop(server.stdin.take());
    assert!(server.wait().expect("store_kv ends").success());
}

/// Starts ranks of rendezvous_ping and waits for their success.
fn ranks_ping(build: &Path, wrapper: &[String], count: usize, environment: impl Fn(&mut Command, usize)) {
    let ranks: Vec<_> = (0..count)
        .map(|rank| {
            let line: Vec<OsString> = wrapper.iter().map(Into::into).chain([build.join("rendezvous_ping").into()]).collect();
            let mut command = Command::new(&line[0]);
            command.args(&line[1..]).args(["--plugin".as_ref(), library().as_os_str(), "--rounds".as_ref(), "20".as_ref()]);
            command.env("RAILHEAD_SOCKET_IFNAME", "lo").stdout(Stdio::piped()).stderr(Stdio::piped());
            environment(&mut command, rank);
            command.spawn().expect("rendezvous_ping starts")
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().expect("rendezvous_ping ends");
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {}\n{text}", output.status);
        assert!(text.contains(&format!("rank {rank} of {count}: 20 messages went round through Railhead")), "{text}");
    }
}

/// Ranks that meet in a file: no port has to be free.
fn by_file(folder: &tempfile::TempDir) -> impl Fn(&mut Command, usize) {
    let path = folder.path().join("store");
    move |command, rank| {
        command.arg("--url").arg(format!("file://{}?rank={rank}&world_size=3", path.display()));
    }
}

#[test]
fn ranks_find_each_other_through_a_file_and_ping() {
    let folder = tempfile::tempdir().expect("a folder");
    ranks_ping(&make("store", ""), &[], 3, by_file(&folder));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "the last rank removes the file");
}

#[test]
fn ranks_ping_under_sanitizers() {
    if !sanitizers_work() {
        return skip("the compiler has no AddressSanitizer here");
    }
    let folder = tempfile::tempdir().expect("a folder");
    ranks_ping(&make("store", SANITIZE), &[], 3, by_file(&folder));
}

#[test]
fn ranks_ping_under_valgrind() {
    let Some(valgrind) = valgrind() else { return skip("valgrind is not installed") };
    let folder = tempfile::tempdir().expect("a folder");
    ranks_ping(&make("store", "-g"), &valgrind, 3, by_file(&folder));
}

#[test]
fn ranks_started_by_hand_find_each_other_through_the_environment() {
    let port = own_port().to_string();
    ranks_ping(&make("store", ""), &[], 4, |command, rank| {
        let by_launcher = rank % 2 == 1;
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).env("RAILHEAD_STORE_BIND", "127.0.0.1");
        command.env(if by_launcher { "OMPI_COMM_WORLD_RANK" } else { "RANK" }, rank.to_string());
        command.env(if by_launcher { "OMPI_COMM_WORLD_SIZE" } else { "WORLD_SIZE" }, "4");
    });
}

#[test]
fn ranks_without_an_environment_are_told_what_is_missing() {
    let output = Command::new(make("store", "").join("rendezvous_ping")).env_clear().output().expect("starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(text.contains("env:// rendezvous: environment variable RANK expected, but not set"), "{text}");
}

// ---- the proxy ----

#[test]
fn proxy_examples() {
    let build = make("proxy", "");
    for wire in ["shm", "tcp"] {
        proxy_examples_run(&build, wire, &[], ["1000", "524288"], ["1000", "65536"], ["20", "1000000"]);
    }
}

#[test]
fn proxy_examples_under_sanitizers() {
    if !sanitizers_work() {
        return skip("the compiler has no AddressSanitizer here");
    }
    let build = make("proxy", SANITIZE);
    for wire in ["shm", "tcp"] {
        proxy_examples_run(&build, wire, &[], ["200", "65536"], ["200", "4000"], ["5", "300000"]);
    }
}

#[test]
fn proxy_examples_under_valgrind() {
    let Some(valgrind) = valgrind() else { return skip("valgrind is not installed") };
    let build = make("proxy", "-g");
    proxy_examples_run(&build, "shm", &valgrind, ["40", "4096"], ["40", "1000"], ["2", "20000"]);
}

/// What makes the header alone enough for a producer.
#[test]
fn proxy_producer_is_not_linked_with_the_library() {
    let build = make("proxy", "");
    let Some(output) = try_run(Command::new("readelf").arg("-d").arg(build.join("proxy_producer"))) else {
        return skip("readelf is not installed");
    };
    let dynamic = String::from_utf8_lossy(&output.stdout).into_owned();
    let needed: Vec<&str> = dynamic.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(output.status.success() && needed.len() == 1 && needed[0].contains("libc.so"), "{dynamic}");
}

/// A kernel as producer and another as consumer: built where there is nvcc, run where there is a GPU.
#[test]
fn proxy_between_cuda_kernels() {
    if try_run(Command::new("nvcc").arg("--version")).is_none() {
        return skip("nvcc is not installed");
    }
    let build = make("cuda", "");
    let mut command = Command::new(build.join("proxy_cuda"));
    command.env("RAILHEAD_SOCKET_IFNAME", "=lo");
    let output = command.output().expect("proxy_cuda starts");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success(), "{text}");
    if text.starts_with("SKIP") {
        return skip("no GPU");
    }
    assert!(text.contains("verified, no byte wrong"), "{text}");
}

fn proxy_examples_run(build: &Path, wire: &str, wrapper: &[String], stream: [&str; 2], shared: [&str; 2], sendrecv: [&str; 2]) {
    for (program, arguments, verdicts) in [("proxy_stream", stream, 1), ("proxy_shared", shared, 1), ("proxy_sendrecv", sendrecv, 4)] {
        let line: Vec<std::ffi::OsString> = wrapper.iter().map(Into::into).chain([build.join(program).into()]).collect();
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).args(arguments).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_SOCKET_IFNAME", "=lo");
        let output = command.output().unwrap_or_else(|e| panic!("{program}: {e}"));
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(output.status.success() && text.matches("verified, no byte wrong").count() == verdicts, "{program} {wire}: {text}");
    }
}

// ---- plugin_pingpong through a plugin that is wrong on request ----

#[test]
fn pingpong_reads_each_table_version_right() {
    for abi in ABIS {
        let run = Pingpong::fake("fake_abi", abi).run(&["--max", "64K", "--iters", "20"]);
        run.passes();
        // The fake's speed is its version times 1000: the properties were read with the right layout.
        assert!(
            run.stdout.contains(&format!("plugin Fake, ncclNetPlugin_v{abi}, device 0: fake0 (no PCI path), {abi}000 Mbit/s")),
            "{}",
            run.text()
        );
    }
}

#[test]
fn pingpong_notices_each_fault() {
    let faults = [
        ("flip", "DATA MISMATCH: received message"),
        ("skip", "DATA MISMATCH: received message"),
        ("repeat", "DATA MISMATCH: received message"),
        ("scribble", "DATA MISMATCH: sent message"),
        ("overrun", "GUARD OVERWRITTEN"),
        ("underrun", "GUARD OVERWRITTEN"),
        ("short", "WRONG SIZE"),
        ("error", "test of a receive returned ncclRemoteError (6)"),
        ("stall", "killed by signal 14"),
        ("hang", "killed by signal 14"),
        ("die", "killed by signal 9"),
        ("nodev", "devices: the plugin has none"),
        ("noinit", "init returned ncclSystemError (2)"),
    ];
    let fake = Pingpong::fake("fake_faults", 12);
    for (fault, message) in faults {
        let timeout = if matches!(fault, "stall" | "hang") { "2" } else { "60" };
        let run = fake.clone().env("FAKE_FAULT", fault).run(&["--max", "8K", "--iters", "20", "--timeout", timeout]);
        run.fails(1, message);
    }
}

#[test]
fn pingpong_refuses_bad_options_and_plugins() {
    let cases: [(&[&str], i32, &str); 7] = [
        (&["--abi", "13"], 2, "--abi 13: expected a number from 8 to 12"),
        (&["--max", "2G"], 2, "--max 2G: expected a number from 0 to 1073741824"),
        (&["--max", "1T"], 2, "--max 1T: expected"),
        (&["--iters", "-1"], 2, "--iters -1: expected"),
        (&["--timeout"], 2, "Usage: plugin_pingpong"),
        (&["surplus"], 2, "Usage: plugin_pingpong"),
        (&["--abi", "9"], 1, "exports no ncclNetPlugin_v"),
    ];
    let fake = Pingpong::fake("fake_options", 12);
    for (arguments, code, message) in cases {
        fake.run(arguments).fails(code, message);
    }
    fake.with("/nowhere/libnothing.so".as_ref()).run(&[]).fails(1, "dlopen: /nowhere/libnothing.so: cannot open");
}

// ---- running ----

/// plugin_pingpong, built for one test, and how it is to be run.
#[derive(Clone)]
struct Pingpong {
    build: PathBuf,
    plugin: PathBuf,
    wrapper: Vec<String>,
    environment: Vec<(String, std::ffi::OsString)>,
}

struct Run {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Pingpong {
    fn new(cflags: &str, wrapper: &[String]) -> Self {
        let build = make("pingpong", cflags);
        Pingpong { build, plugin: library(), wrapper: wrapper.to_vec(), environment: Vec::new() }
    }

    fn plain() -> Self {
        Self::new("", &[])
    }

    fn fake(test: &str, abi: u32) -> Self {
        let pingpong = Self::plain();
        let plugin = pingpong.build.join(format!("lib{test}{abi}.so"));
        succeed(
            Command::new(compiler())
                .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"])
                .arg(format!("-DFAKE_ABI={abi}"))
                .arg("-o")
                .arg(&plugin)
                .arg(Path::new(ROOT).join("tests/c/fake_net.c")),
        );
        pingpong.with(&plugin)
    }

    fn with(mut self, plugin: &Path) -> Self {
        self.plugin = plugin.into();
        self
    }

    fn env(mut self, name: &str, value: impl Into<std::ffi::OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    fn binary(&self) -> PathBuf {
        self.build.join("plugin_pingpong")
    }

    fn run(&self, arguments: &[&str]) -> Run {
        let line: Vec<std::ffi::OsString> =
            self.wrapper.iter().map(Into::into).chain([self.binary().into(), "--plugin".into(), self.plugin.clone().into()]).collect();
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).args(arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        let output = command.output().expect("plugin_pingpong starts");
        Run {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Run {
    fn passes(&self) {
        assert!(self.code == Some(0) && self.stdout.contains("verified, no byte wrong"), "{}", self.text());
    }

    fn fails(&self, code: i32, message: &str) {
        assert!(self.code == Some(code) && self.stderr.contains(message), "expected {code} and {message:?}:\n{}", self.text());
        assert!(!self.stdout.contains("no byte wrong"), "{}", self.text());
    }

    /// Both ranks said by which paths their bytes went, and all of them are allowed.
    fn moved_on(&self, allowed: impl Fn(&str) -> bool) {
        for rank in ["# rank 0: ", "# rank 1: "] {
            let line = self.stdout.lines().find_map(|line| line.strip_prefix(rank)).unwrap_or_else(|| panic!("{}", self.text()));
            let (sent, received) = line.strip_prefix("bytes sent: ").and_then(|rest| rest.split_once("; received: ")).expect(line);
            for paths in [sent, received] {
                let names: Vec<&str> = paths.split(", ").filter_map(|path| path.split(' ').next()).collect();
                assert!(names[0] != "nothing" && names.iter().all(|name| allowed(name)), "{line}");
            }
        }
    }

    fn text(&self) -> String {
        format!("exit status {:?}\n--- stdout\n{}\n--- stderr\n{}", self.code, self.stdout, self.stderr)
    }
}

/// Builds a target of c_examples/Makefile, once for all tests that want it with these flags, and gives the folder.
pub fn make(target: &str, cflags: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = match cflags {
        "" => "plain",
        SANITIZE => "sanitizers",
        _ => cflags,
    };
    let library = library().parent().expect("a folder").to_path_buf();
    let profile = library.file_name().expect("a name");
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("c_examples").join(profile).join(folder);
    succeed(
        Command::new("make")
            .arg("-C")
            .arg(Path::new(ROOT).join("c_examples"))
            .arg(target)
            .arg(format!("BUILD={}", build.display()))
            .arg(format!("CFLAGS={cflags}"))
            .arg(format!("RAILHEAD_LIB={}", library.display()))
            .env_remove("MAKEFLAGS"),
    );
    build
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

fn compiler() -> String {
    std::env::var("CC").unwrap_or_else(|_| "cc".into())
}

pub fn sanitizers_work() -> bool {
    let probe = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sanitizer_probe_{}", std::process::id()));
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("echo 'int main(void){{return 0;}}' | {} {SANITIZE} -x c - -o '{}'", compiler(), probe.display()));
    let built = command.output().is_ok_and(|output| output.status.success());
    let runs = built && Command::new(&probe).status().is_ok_and(|status| status.success());
    let _ = fs::remove_file(&probe);
    runs
}

/// The command line of valgrind up to the program.
pub fn valgrind() -> Option<Vec<String>> {
    // Without the names of inlined functions it starts twice as fast.
    let line = ["valgrind", "-q", "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite", "--read-inline-info=no"];
    try_run(Command::new(line[0]).arg("--version"))?;
    Some(line.map(String::from).to_vec())
}

fn succeed(command: &mut Command) {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// None if the program does not exist.
fn try_run(command: &mut Command) -> Option<Output> {
    command.output().ok()
}

pub fn skip(reason: &str) {
    eprintln!("SKIP: {reason}");
}
