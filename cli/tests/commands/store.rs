//! `railhead store` as users run it: a server and what looks into it, each a process of its own.

mod commands;
mod file;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use railhead::store::tcp::{Host, TcpOptions};
use railhead::store::{Store, TcpStore};

/// The server, which is stopped with SIGTERM.
struct Server {
    child: Child,
    place: String,
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
    command.arg("store");
    for name in ["MASTER_ADDR", "MASTER_PORT", "RAILHEAD_STORE_SECRET", "RAILHEAD_STORE_BIND", "RAILHEAD_DEBUG"] {
        command.env_remove(name);
    }
    command
}

fn serve(arguments: &[&str], environment: &[(&str, &str)]) -> Server {
    let mut command = program();
    command.args(["serve", "--port", "0", "--bind", "127.0.0.1"]).args(arguments).envs(environment.iter().copied());
    started(&mut command)
}

/// A server, at the address that it prints.
fn started(command: &mut Command) -> Server {
    let mut child = command.stdout(Stdio::piped()).spawn().expect("railhead");
    let place = line(&mut BufReader::new(child.stdout.as_mut().expect("piped")));
    Server { child, place }
}

/// What a server says that does not start.
#[track_caller]
fn does_not_serve(command: &mut Command) -> String {
    let mut server = started(command.args(["serve", "--port", "0"]).stderr(Stdio::piped()));
    assert_eq!(server.place, "", "it serves");
    assert_eq!(server.child.wait().expect("wait").code(), Some(2));
    server.said()
}

/// A client in this process.
fn join(server: &Server) -> TcpStore {
    let (host, port) = server.place.split_once(':').expect("HOST:PORT");
    let host = Host::Other(host.to_owned(), port.parse().expect("a port"));
    TcpStore::new(host, TcpOptions::default()).expect("connect")
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
        self.terminate();
        self.child.wait().expect("wait")
    }

    fn terminate(&mut self) {
        // SAFETY: our own child, not yet waited for.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
    }

    /// All that it says on stderr, which is piped, until it ends.
    fn said(&mut self) -> String {
        let mut text = Vec::new();
        self.child.stderr.take().expect("piped").read_to_end(&mut text).expect("read");
        String::from_utf8_lossy(&text).into_owned()
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
    let mut set = server.command("set", &["bytes", "-"]);
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
        (&["get", "k", "--connect", "h:99999"], "port 99999: must be 1 to 65535"),
        (&["get", "k", "--connect", "h:0"], "port 0: must be 1 to 65535"),
        (&["get", "k", "--connect", "::1"], "host ':': must be a name or IPv4 address, or an IPv6 address in brackets, as [::1]:29500"),
        (&["get", "k", "--connect", "fe80::1:29500"], "host 'fe80::1': must be"),
        (&["get", "k", "--file", "/nowhere/store"], "/nowhere/store"),
        (&["get", "k", "--connect", "127.0.0.1:1", "--timeout", "0"], "while trying to connect to (127.0.0.1, 1)"),
        (&["serve", "--bind", "nowhere.invalid"], "--bind nowhere.invalid: "),
        (&["serve", "--bind", "198.51.100.1", "--port", "0"], "serve --bind 198.51.100.1: "),
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
fn a_watch_ends_badly_when_the_server_goes() {
    let server = serve(&[], &[]);
    let mut watch = server.command("watch", &["k"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("railhead");
    let mut said = BufReader::new(watch.stderr.take().expect("piped"));
    let mut lines = BufReader::new(watch.stdout.take().expect("piped"));
    assert_eq!(line(&mut said), "watching");
    let store = join(&server);
    store.set("k", b"v").expect("set");
    assert!(store.delete_key("k").expect("delete"));
    assert_eq!((line(&mut lines), line(&mut lines)), ("k created v".into(), "k deleted".into()));
    assert!(server.stop().success());
    assert_eq!(watch.wait().expect("wait").code(), Some(2));
    let mut rest = String::new();
    said.read_to_string(&mut rest).expect("read");
    assert!(rest.contains("Did the remote server shutdown or crash?"), "{rest}");
}

#[test]
fn a_wait_of_several_keys_ends_with_the_last() {
    let server = serve(&[], &[]);
    let mut waiter = server.command("wait", &["a", "b", "--timeout", "1000"]).spawn().expect("railhead");
    server.prints("set", &["b", ""], "");
    // It cannot have ended: there is no a.
    assert!(waiter.try_wait().expect("wait").is_none());
    server.prints("set", &["a", ""], "");
    assert!(waiter.wait().expect("wait").success());
}

#[test]
fn a_server_says_what_it_cannot_do_and_refuses_what_is_too_much() {
    let server = serve(&[], &[]);
    let port = server.place.rsplit_once(':').expect("a port").1;
    let failing: [(&[&str], &str); 9] = [
        (&["serve", "--bind", "127.0.0.1", "--port", port], "The server socket has failed to listen on any local network address. port: "),
        (&["serve", "--port", "65536"], "65536"),
        (&["serve", "--memory", "0"], "--memory"),
        (&["serve", "--value", "1025"], "--value"),
        (&["wait"], "<KEYS>..."),
        (&["watch", "k", "--count", "0"], "--count"),
        (&["get", "k", "--timeout", "1e9"], "must be a time from 0 to 1000000 seconds, as 90, 1.5s, 200ms, 1m or 2h"),
        (&["add", "k", "many"], "many"),
        (&["ls", "--connect", "h:1", "--file", "f"], "cannot be used with"),
    ];
    for (arguments, words) in failing {
        let output = program().args(arguments).output().expect("railhead");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{arguments:?}: {output:?}");
    }
    // What the server does not take, it says by hanging up.
    server.prints("set", &["text", "x"], "");
    let output = server.run("add", &["text"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("Connection was likely closed"), "{output:?}");
    for (options, taken) in [(&[][..], false), (&["--value", "9"], true), (&["--value", "9", "--memory", "8"], false)] {
        let server = serve(options, &[]);
        let store = join(&server);
        let stored = store.set("big", &vec![7; (8 << 20) + 1]).and_then(|()| store.num_keys());
        assert_eq!(stored.is_ok(), taken, "{options:?}: {stored:?}");
        server.prints("ls", &[], if taken { "big\n" } else { "" });
    }
}

/// Where a process listens, as /proc/net/tcp and tcp6 have it. (Whether a connect elsewhere fails would say it of all processes.)
fn listens_at(pid: u32) -> Vec<String> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors").flatten();
    let sockets: Vec<String> = links.filter_map(|link| std::fs::read_link(link.path()).ok()?.to_str().map(str::to_owned)).collect();
    let mut places = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in std::fs::read_to_string(table).expect(table).lines().skip(1) {
            // Local address, state (0A: LISTEN) and inode are fields 1, 3 and 9 of proc_net_tcp.
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            if fields[3] == "0A" && sockets.contains(&format!("socket:[{}]", fields[9])) {
                places.push(fields[1].to_owned());
            }
        }
    }
    places
}

#[test]
fn serves_at_the_address_that_it_is_told_until_a_signal() {
    for (bind, environment) in [(Some("::1"), "127.0.0.1"), (Some("[::1]"), "127.0.0.1"), (None, "::1")] {
        let mut command = program();
        command.args(["serve", "--port", "0"]).args(bind.iter().flat_map(|address| ["--bind", address]));
        let mut child = command.env("RAILHEAD_STORE_BIND", environment).stdout(Stdio::piped()).spawn().expect("railhead");
        let place = line(&mut BufReader::new(child.stdout.as_mut().expect("piped")));
        let port = place.strip_prefix("[::1]:").expect("the address").to_owned();
        let server = Server { child, place };
        server.prints("add", &["n"], "1\n");
        let port: u16 = port.parse().expect("a port");
        assert_eq!(listens_at(server.child.id()), [format!("00000000000000000000000001000000:{port:04X}")], "there alone");
        // SAFETY: our own child, not yet waited for.
        unsafe { libc::kill(server.child.id() as i32, libc::SIGINT) };
        let mut server = server;
        assert!(server.child.wait().expect("wait").success());
    }
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
fn a_secret_that_cannot_be_one_is_refused_and_not_shown() {
    let server = serve(&[], &[]);
    for secret in [&b"hush\xff"[..], b"  "] {
        for level in [None, Some("warn"), Some("info")] {
            let mut command = program();
            command.env("RAILHEAD_STORE_SECRET", OsStr::from_bytes(secret)).envs(level.map(|level| ("RAILHEAD_DEBUG", level)));
            let said = does_not_serve(&mut command);
            assert!(said.contains("RAILHEAD_STORE_SECRET") && said.contains("not blank"), "{said}");
            assert!(!said.contains("hush"), "{said}");
        }
        let output = server.command("add", &["n"]).env("RAILHEAD_STORE_SECRET", OsStr::from_bytes(secret)).output().expect("railhead");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("RAILHEAD_STORE_SECRET") && !said.contains("hush"), "{said}");
    }
}

#[test]
fn an_address_that_is_none_is_not_taken_for_all() {
    for address in ["10.0.0.5x", "localhost"] {
        let said = does_not_serve(program().env("RAILHEAD_STORE_BIND", address));
        let words = format!("RAILHEAD_STORE_BIND={address} is not accepted (`address`, IPv4 or IPv6, or empty)");
        assert!(said.contains(&words), "{said}");
    }
    serve(&[], &[("RAILHEAD_STORE_BIND", "localhost")]).prints("add", &["n"], "1\n");
}

#[test]
fn a_server_says_whom_it_refused_and_why_and_so_does_the_client() {
    let mut command = program();
    command.args(["serve", "--port", "0", "--bind", "127.0.0.1"]).stderr(Stdio::piped());
    let mut server = started(&mut command);
    server.prints("set", &["text\n", "x"], "");
    let mut named = Vec::new();
    for arguments in [&["text\n"][..], &[&"k".repeat(9_000)]] {
        let output = server.run("add", arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("Connection was likely closed. Did the remote server shutdown or crash?"), "{said}");
        assert!(said.contains("Or it refused the request, for it serves others"), "{said}");
        // In the words of the server's log.
        let words = said.split('"').nth(1).unwrap_or_else(|| panic!("no place in the log: {said}"));
        named.push(words.to_owned());
    }
    let store = join(&server);
    store.set("big", &vec![7; 9_000_000]).and_then(|()| store.num_keys()).expect_err("too big");
    server.terminate();
    let said = server.said();
    assert!(named.iter().all(|words| said.contains(words)), "{named:?}: {said}");
    for words in [
        r#"it added 1 to "/text\n", whose value is no number of 64 bits"#,
        "it sent a key of 9001 bytes; at most 8192 are accepted",
        "it sent a value of 9000000 bytes; at most 8388608 are accepted",
    ] {
        let lines: Vec<&str> = said.lines().filter(|line| line.contains(words)).collect();
        assert!(matches!(lines[..], [line] if line.contains(" WARN ") && line.contains(" 127.0.0.1, port ")), "{words}: {said}");
    }
}

#[test]
fn a_server_says_once_that_it_has_no_descriptors_left() {
    let mut command = Command::new("sh");
    let serve = format!("ulimit -n 32; exec {} store serve --port 0 --bind 127.0.0.1", env!("CARGO_BIN_EXE_railhead"));
    let environment = ["RAILHEAD_STORE_SECRET", "RAILHEAD_STORE_BIND", "RAILHEAD_DEBUG"];
    for name in environment {
        command.env_remove(name);
    }
    let mut server = started(command.args(["-c", &serve]).stderr(Stdio::piped()));
    let store = join(&server);
    // More than the limit wait, and the server has other things to do meanwhile.
    let crowd: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&server.place).expect("connect")).collect();
    (1..500).for_each(|n| assert_eq!(store.add("n", 1).expect("add"), n));
    drop(crowd);
    server.prints("add", &["n"], "500\n");
    server.terminate();
    let said = server.said();
    assert_eq!(said.matches("a client has to wait: accept").count(), 1, "{said}");
}

#[test]
fn a_server_takes_as_many_descriptors_as_it_may() {
    let mut command = Command::new("sh");
    let serve = format!("ulimit -S -n 32; exec {} store serve --port 0 --bind 127.0.0.1", env!("CARGO_BIN_EXE_railhead"));
    let server = started(command.args(["-c", &serve]));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.child.id())).expect("limits");
    let files: Vec<&str> = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line").split_whitespace().collect();
    assert_eq!(files[3], files[4], "soft and hard limit");
}

#[test]
fn strangers_do_not_fill_the_log() {
    let mut command = program();
    let mut server = started(command.args(["serve", "--port", "0", "--bind", "127.0.0.1"]).stderr(Stdio::piped()));
    for _ in 0..300 {
        let mut stranger = TcpStream::connect(&server.place).expect("connect");
        stranger.write_all(b"X").expect("write");
        // It hangs up.
        let _ = stranger.read(&mut [0]);
    }
    server.terminate();
    let said = server.said();
    let lines = said.matches("is disconnected").count();
    assert!((10..150).contains(&lines), "{lines} lines: {said}");
}
