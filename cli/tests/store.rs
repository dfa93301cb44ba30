//! `railhead store` as users run it: a server and what looks into it, each a process of its own.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// The server, which is stopped with SIGTERM.
struct Server {
    child: Child,
    place: String,
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
    command.arg("store");
    for name in ["MASTER_ADDR", "MASTER_PORT", "RAILHEAD_STORE_SECRET", "RAILHEAD_STORE_BIND"] {
        command.env_remove(name);
    }
    command
}

fn serve(arguments: &[&str], environment: &[(&str, &str)]) -> Server {
    let mut command = program();
    command.args(["serve", "--port", "0", "--bind", "127.0.0.1"]).args(arguments).envs(environment.iter().copied());
    let mut child = command.stdout(Stdio::piped()).spawn().expect("railhead");
    let port = line(&mut BufReader::new(child.stdout.as_mut().expect("piped")));
    Server { child, place: format!("127.0.0.1:{port}") }
}

fn line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).expect("a line");
    line.trim_end_matches('\n').to_owned()
}

impl Server {
    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = program();
        command.args([name, "--connect", &self.place]).args(arguments).stdin(Stdio::null());
        command
    }

    fn run(&self, name: &str, arguments: &[&str]) -> Output {
        self.command(name, arguments).output().expect("railhead")
    }

    #[track_caller]
    fn prints(&self, name: &str, arguments: &[&str], expected: &str) {
        let output = self.run(name, arguments);
        assert!(output.status.success(), "{name} {arguments:?}: {output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{name} {arguments:?}");
    }

    fn stop(mut self) -> std::process::ExitStatus {
        // SAFETY: our own child, not yet waited for.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        self.child.wait().expect("wait")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn values_go_in_and_come_out() {
    let server = serve(&[], &[]);
    server.prints("set", &["k", "some value"], "");
    server.prints("get", &["k"], "some value\n");
    server.prints("get", &["k", "--raw"], "some value");
    server.prints("add", &["n"], "1\n");
    server.prints("add", &["n", "41"], "42\n");
    server.prints("add", &["n", "-50"], "-8\n");
    server.prints("set", &["--prefix", "grp", "k", "other"], "");
    server.prints("get", &["grp/k"], "other\n");
    server.prints("set", &["odd\nkey\u{1b}", "x"], "");
    server.prints("ls", &[], "grp/k\nk\nn\nodd\\nkey\\u{1b}\n");
    server.prints("ls", &["--prefix", "grp"], "k\n");
    server.prints("wait", &["k", "n"], "");
    let mut set = server.command("set", &["bytes"]);
    let mut set = set.stdin(Stdio::piped()).spawn().expect("railhead");
    set.stdin.take().expect("piped").write_all(&[0, 255, 10]).expect("write");
    assert!(set.wait().expect("wait").success());
    assert_eq!(server.run("get", &["bytes", "--raw"]).stdout, [0, 255, 10]);
    assert!(server.stop().success(), "SIGTERM ends it well");
}

#[test]
fn waiting_in_vain_is_told_from_other_failures() {
    let server = serve(&[], &[]);
    for (name, arguments) in [("get", &["nope", "--timeout", "0.1"][..]), ("wait", &["nope", "--timeout", "0"])] {
        let output = server.run(name, arguments);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("wait timeout after "), "{output:?}");
    }
    for (arguments, words) in [
        (&["get", "k"][..], "neither --connect nor --file, and MASTER_ADDR is not set"),
        (&["get", "k", "--connect", "h"], "must be HOST:PORT"),
        (&["get", "k", "--connect", "h:99999"], "must be 0 to 65535"),
        (&["get", "k", "--file", "/nowhere/store"], "/nowhere/store"),
        (&["get", "k", "--connect", "127.0.0.1:1", "--timeout", "0"], "while trying to connect to (127.0.0.1, 1)"),
        (&["serve", "--bind", "nowhere"], "invalid IP address"),
    ] {
        let output = program().args(arguments).output().expect("railhead");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{arguments:?}: {output:?}");
    }
    let (host, port) = server.place.split_once(':').unwrap();
    let output = program().args(["add", "n"]).env("MASTER_ADDR", host).env("MASTER_PORT", port).output().expect("railhead");
    assert_eq!(output.stdout, b"1\n", "{output:?}");
}

#[test]
fn a_wait_ends_when_the_key_comes() {
    let server = serve(&[], &[]);
    let mut waiter = server.command("get", &["late"]).stdout(Stdio::piped()).spawn().expect("railhead");
    server.prints("set", &["late", "now"], "");
    let mut text = String::new();
    waiter.stdout.take().expect("piped").read_to_string(&mut text).expect("read");
    assert!(waiter.wait().expect("wait").success());
    assert_eq!(text, "now\n");
}

#[test]
fn a_watch_prints_each_change() {
    let server = serve(&[], &[]);
    let mut command = server.command("watch", &["a", "b", "--count", "4"]);
    let mut watch = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("railhead");
    assert_eq!(line(&mut BufReader::new(watch.stderr.take().expect("piped"))), "watching");
    let mut lines: BufReader<ChildStdout> = BufReader::new(watch.stdout.take().expect("piped"));
    for (arguments, expected) in
        [(["set", "a", "1"], "a created 1"), (["add", "b", "5"], "b created 5"), (["set", "a", "t\tx"], "a updated t\\tx")]
    {
        assert!(server.run(arguments[0], &arguments[1..]).status.success());
        assert_eq!(line(&mut lines), expected);
    }
    server.prints("add", &["b", "1"], "6\n");
    assert_eq!(line(&mut lines), "b updated 6");
    assert!(watch.wait().expect("wait").success(), "after as many as were asked for");
}

#[test]
fn the_secret_of_the_environment_is_wanted_from_all() {
    let server = serve(&[], &[("RAILHEAD_STORE_SECRET", "sesame")]);
    let with = |secret: Option<&str>| {
        let mut command = server.command("add", &["n"]);
        secret.map(|secret| command.env("RAILHEAD_STORE_SECRET", secret));
        command.output().expect("railhead")
    };
    assert_eq!(with(Some("sesame")).stdout, b"1\n");
    for (secret, words) in [(None, "The server has a secret, and this process does not"), (Some("other"), "The server has another secret")]
    {
        let output = with(secret);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{output:?}");
    }
}

#[test]
fn a_file_is_looked_into() {
    let folder = std::env::temp_dir().join(format!("railhead-store-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("store");
    let store = railhead::store::FileStore::new(&path, Some(1)).expect("a store");
    railhead::store::Store::set(&store, "k", b"v").expect("set");
    let output = program().args(["get", "k", "--file"]).arg(&path).output().expect("railhead");
    assert_eq!(output.stdout, b"v\n", "{output:?}");
    drop(store);
    assert!(!path.exists(), "a look does not count as a user");
    std::fs::remove_dir_all(&folder).expect("remove");
}

#[test]
fn a_bench_prints_its_table() {
    let (one, two) = (serve(&[], &[]), serve(&[], &[]));
    let (one_named, two_named) = (format!("one={}", one.place), format!("two={}", two.place));
    let arguments = ["bench", "--server", &one_named, "--server", &two_named, "--connections", "1,3", "--clients", "20"];
    let output = program().args(arguments).args(["--rounds", "2", "--duration", "0.01"]).output().expect("railhead");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for row in ["| set + get, 1 connection(s) |", "| set + get, 3 connection(s) |", "| 20 clients join a barrier |", "of 20 |"] {
        assert!(text.contains(row), "{row}: {text}");
    }
    assert!(text.contains("ratio to two"), "{text}");
}
