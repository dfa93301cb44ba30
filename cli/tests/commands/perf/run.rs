//! Runs of `railhead perf`: against the library under test, or against a plugin that is wrong on request (tests/c/fake_net.c of the library).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// The library under test: $RH_LIBRARY, else as cargo leaves it, beside the test's own binary.
pub fn library() -> PathBuf {
    if let Some(path) = std::env::var_os("RH_LIBRARY") {
        return path.into();
    }
    let here = std::env::current_exe().expect("own path");
    let found = here.ancestors().skip(1).take(2).map(|folder| folder.join("librailhead.so")).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no librailhead.so beside {}", here.display()))
}

/// A plugin that is wrong on request, for version `abi`; built once per test.
pub fn fake(test: &str, abi: u32) -> PathBuf {
    fake_with(test, abi, &[])
}

/// As `fake`, with more arguments for the compiler.
pub fn fake_with(test: &str, abi: u32, more: &[&str]) -> PathBuf {
    built(&format!("libfake_{test}_{abi}.so"), "fake_net.c", &[more, &[&format!("-DFAKE_ABI={abi}")]].concat())
}

/// A library made of a source in tests/c.
pub fn built(name: &str, source: &str, more: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("perf");
    std::fs::create_dir_all(&folder).expect("a folder");
    let plugin = folder.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/c").join(source);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let built = Command::new(compiler)
        .args(more)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-o"])
        .arg(&plugin)
        .arg(source)
        .output()
        .expect("a C compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    plugin
}

/// `railhead perf` and its arguments; the ranks' environment carries a mark of this run.
pub struct Perf {
    command: Command,
    mark: String,
}

/// Few and short rounds: what is tested is not the speed.
const SHORT: [&str; 4] = ["--rounds", "2", "--round-ms", "2"];

impl Perf {
    pub fn new(plugin: &Path) -> Self {
        static RUN: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let run = RUN.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mark = format!("RH_PERF_TEST=run-{}-{run}-", std::process::id());
        let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
        command.args(["perf", "--env", &mark, "--plugin"]).arg(plugin);
        // Present everywhere.
        command.env("NCCL_SOCKET_IFNAME", "lo").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Perf { command, mark }
    }

    /// Started by another program, which is given this one and its arguments behind its own.
    pub fn through(mut self, wrapper: &[&str]) -> Self {
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).arg(self.command.get_program()).args(self.command.get_args());
        command.env("NCCL_SOCKET_IFNAME", "lo").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        self.command = command;
        self
    }

    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(arguments);
        self
    }

    fn short(mut self) -> Self {
        if !self.command.get_args().any(|argument| argument == "--rounds" || argument == "--listen") {
            self.command.args(SHORT);
        }
        self
    }

    /// One at a time: two ranks that spin take two cores, and four take more than twice as long.
    pub fn run(self) -> Done {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut perf = self.short();
        let output = perf.command.output().expect("railhead starts");
        let done = Done { output, left: ranks(&perf.mark) };
        assert!(done.left.is_empty(), "ranks were left behind: {:?}\n{}", done.left, done.text());
        done
    }

    pub fn start(self) -> Running {
        let mut perf = self.short();
        Running { child: perf.command.spawn().expect("railhead starts"), mark: perf.mark }
    }
}

pub struct Done {
    pub output: Output,
    left: Vec<u32>,
}

impl Done {
    pub fn text(&self) -> String {
        let (out, err) = (String::from_utf8_lossy(&self.output.stdout), String::from_utf8_lossy(&self.output.stderr));
        format!("{:?}\n--- stdout\n{out}\n--- stderr\n{err}", self.output.status)
    }

    /// Standard output of a run that succeeded.
    #[track_caller]
    pub fn passes(&self) -> String {
        assert!(self.output.status.success(), "{}", self.text());
        String::from_utf8(self.output.stdout.clone()).expect("text")
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.passes()).unwrap_or_else(|e| panic!("{e}\n{}", self.text()))
    }

    #[track_caller]
    pub fn fails(&self, message: &str) {
        assert_eq!(self.output.status.code(), Some(2), "{}", self.text());
        assert!(self.output.stdout.is_empty(), "{}", self.text());
        assert!(String::from_utf8_lossy(&self.output.stderr).contains(message), "expected {message:?}\n{}", self.text());
    }

    /// As `fails`, with all of several parts.
    #[track_caller]
    pub fn fails_with(&self, parts: &[&str]) {
        parts.iter().for_each(|part| self.fails(part));
    }
}

/// A run in the background, ended when dropped.
pub struct Running {
    pub child: Child,
    pub mark: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processes that have `mark` in their environment.
pub fn ranks(mark: &str) -> Vec<u32> {
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
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    crate::support::until(what, || holds().then_some(()));
}

pub fn positive(summary: &Value) {
    let part = |name: &str| summary[name].as_f64().unwrap_or_else(|| panic!("no {name} in {summary}"));
    assert!(0.0 < part("min") && part("min") <= part("median") && part("median") <= part("max"), "{summary}");
}
