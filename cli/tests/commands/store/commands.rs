//! What each command does, prints and exits with, and what the help says.

use std::io::{BufReader, Read};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use railhead::store::Store;

use super::{Server, join, line, program, serve, started};

impl Server {
    /// Runs a command to its exit status and what it prints.
    fn done(&self, name: &str, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.run(name, arguments);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn help(name: &str) -> String {
    let output = program().args([name, "--help"]).output().expect("railhead");
    assert!(output.status.success(), "{name}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn every_operation_has_a_command() {
    let server = serve(&[], &[]);
    let said = |text: &str| (Some(0), text.to_owned());
    for (name, arguments, expected) in [
        ("append", &["a", "one"][..], said("")),
        ("append", &["a", "-two"], (Some(2), String::new())),
        ("set", &["negative", "-5"], said("")),
        ("cas", &["negative", "-5", "-6"], said("-6\n")),
        ("delete", &["negative"], said("")),
        ("append", &["a", "--", "-two"], said("")),
        ("get", &["a"], said("one-two\n")),
        ("cas", &["c", "", "first"], said("first\n")),
        ("cas", &["c", "first", "second"], said("second\n")),
        ("cas", &["c", "first", "third", "--raw"], (Some(1), "second".into())),
        ("cas", &["missing", "old", "new"], (Some(1), "old\n".into())),
        ("cas", &["missing", "old", "old"], (Some(1), "old\n".into())),
        ("cas", &["c", "second", "second"], said("second\n")),
        ("push", &["q", "x"], said("")),
        ("push", &["q", "y"], said("")),
        ("len", &["q"], said("2\n")),
        ("count", &[], said("2\n")),
        ("pop", &["q", "--raw"], said("x")),
        ("pop", &["q"], said("y\n")),
        ("pop", &["q", "--timeout", "0"], (Some(1), String::new())),
        ("pop", &["q", "--timeout", "30ms"], (Some(1), String::new())),
        ("len", &["q", "--prefix", "p"], said("0\n")),
        ("delete", &["a", "c"], said("")),
        ("delete", &["a"], (Some(1), String::new())),
        ("ls", &[], said("")),
    ] {
        assert_eq!(server.done(name, arguments), expected, "{name} {arguments:?}");
    }
}

#[test]
fn keys_are_listed_with_their_values_and_as_json() {
    let server = serve(&[], &[]);
    let store = join(&server);
    store.set("text", "a\t\"b\"\u{1b}".as_bytes()).expect("set");
    store.set("bytes", &[0, 255]).expect("set");
    server.prints("ls", &["--values"], "bytes\t\\u{0}\u{fffd}\ntext\ta\\t\"b\"\\u{1b}\n");
    server.prints("ls", &["--json"], "[\"bytes\",\"text\"]\n");
    let expected = r#"[{"bytes":[0,255],"key":"bytes"},{"key":"text","value":"a\t\"b\"\u001b"}]"#;
    server.prints("ls", &["--json", "--values"], &format!("{expected}\n"));
    server.prints("ls", &["--json", "--prefix", "none"], "[]\n");
}

#[test]
fn standard_input_is_read_when_asked_for_and_not_otherwise() {
    let server = serve(&[], &[]);
    // An input that never ends.
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let output = server.command("set", &["k", "v"]).stdin(std::os::fd::OwnedFd::from(theirs)).output().expect("railhead");
    assert!(output.status.success(), "{output:?}");
    drop(ours);
    let output = server.run("set", &["k"]);
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("<VALUE>"), "{output:?}");
    for (name, arguments) in
        [("set", &["k", "-"][..]), ("append", &["k", "-"]), ("cas", &["k", "--", "piped\npiped\n", "-"]), ("push", &["k", "-"])]
    {
        let mut echo = Command::new("echo").arg("piped").stdout(Stdio::piped()).spawn().expect("echo");
        let output = server.command(name, arguments).stdin(echo.stdout.take().expect("piped")).output().expect("railhead");
        echo.wait().expect("wait");
        assert!(output.status.success(), "{name}: {output:?}");
    }
    let output = server.run("cas", &["k", "-", "-"]);
    assert!(
        output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("only one of EXPECTED and DESIRED"),
        "{output:?}"
    );
    server.prints("get", &["k", "--raw"], "piped\n");
    server.prints("pop", &["k", "--raw"], "piped\n");
}

#[test]
fn the_help_names_timeouts_and_describes_each_argument() {
    for name in ["get", "set", "append", "add", "cas", "delete", "wait", "push", "pop", "len", "count", "ls", "watch", "serve"] {
        let text = help(name);
        if name != "serve" {
            assert!(text.contains("--timeout <TIME>") && text.contains("[default: 300s]"), "{name}: {text}");
        }
        // What takes an argument or a switch has its words on the same line or the next.
        let lines: Vec<&str> = text.lines().collect();
        let described = lines.windows(2).filter(|pair| {
            let entry = pair[0].trim_start();
            pair[0].starts_with("  ")
                && (entry.starts_with("--")
                    || entry.starts_with('<')
                    || (entry.starts_with('[') && entry.contains(']') && !entry.starts_with("[default")))
        });
        for pair in described {
            let words = pair[0].trim().split("  ").nth(1).is_some_and(|words| !words.trim().is_empty());
            assert!(words || !pair[1].trim().is_empty(), "{name}: {} is not described: {text}", pair[0]);
        }
    }
    assert!(help("serve").contains("30 s"), "the time for a client to say what it speaks");
}

#[test]
fn a_timeout_below_zero_is_refused_with_the_range() {
    for timeout in ["-1", "-1s"] {
        let output = program().args(["get", "k", "--connect", "127.0.0.1:1", "--timeout", timeout]).output().expect("railhead");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(2) && said.contains(&format!("'{timeout}'")) && said.contains("from 0 to 1000000 seconds"),
            "{said}"
        );
    }
}

#[test]
fn the_exit_status_is_the_same_when_nobody_reads_what_is_said() {
    let server = serve(&[], &[]);
    for (arguments, status) in [(&["k", "--timeout", "0"][..], 1), (&["k", "--connect", "127.0.0.1:1", "--timeout", "0"], 2)] {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        drop(ours);
        let mut command = if status == 1 { server.command("get", arguments) } else { program() };
        if status == 2 {
            command.arg("get").args(arguments);
        }
        let output = command.stderr(std::os::fd::OwnedFd::from(theirs)).output().expect("railhead");
        assert_eq!(output.status.code(), Some(status), "{output:?}");
    }
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    drop(ours);
    let mut command = program();
    let server = started(command.args(["serve", "--port", "0"]).stderr(std::os::fd::OwnedFd::from(theirs)));
    assert!(server.place.starts_with("[::]:") || server.place.starts_with("0.0.0.0:"), "{}", server.place);
}

#[test]
fn a_timeout_holds_against_a_server_that_says_nothing() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let place = silent.local_addr().expect("an address").to_string();
    for (timeout, millis) in [("1", 1_000), ("1s", 1_000), ("1100ms", 1_100)] {
        let start = Instant::now();
        let output = program().args(["get", "k", "--connect", &place, "--timeout", timeout]).output().expect("railhead");
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(&format!("timed out after {millis}ms")), "{output:?}");
        // Not ten of them, as a busy machine may be slow.
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
}

#[test]
fn a_server_says_where_it_listens_and_warns_if_that_is_everywhere() {
    for (arguments, secret, prefix, warns) in [
        (&["--bind", "127.0.0.1"][..], "", "127.0.0.1:", false),
        (&["--bind", "0.0.0.0"], "", "0.0.0.0:", true),
        (&["--bind", "0.0.0.0"], "sesame", "0.0.0.0:", false),
        (&[], "", "", true),
    ] {
        let mut command = program();
        command.args(["serve", "--port", "0"]).args(arguments).env("RAILHEAD_STORE_SECRET", secret).stderr(Stdio::piped());
        let mut server = started(&mut command);
        assert!(server.place.starts_with(prefix) && !server.place.ends_with(":0"), "{}", server.place);
        server.terminate();
        let said = server.said();
        assert_eq!(said.contains("warning: this listens on all addresses and wants no secret"), warns, "{arguments:?}: {said}");
    }
}

#[test]
fn a_server_is_bound_to_a_name() {
    let mut command = program();
    let server = started(command.args(["serve", "--port", "0", "--bind", "localhost"]));
    assert!(["127.", "[::1]:"].iter().any(|loopback| server.place.starts_with(loopback)), "{}", server.place);
    server.prints("add", &["n"], "1\n");
    let (_, port) = server.place.rsplit_once(':').expect("a port");
    let output = program().args(["add", "n", "--connect", &format!("localhost:{port}")]).output().expect("railhead");
    assert_eq!(output.stdout, b"2\n", "{output:?}");
}

#[test]
fn a_value_is_deleted_by_its_command_and_the_watch_says_so() {
    let server = serve(&[], &[]);
    server.prints("set", &["k", "v"], "");
    let mut command = server.command("watch", &["k", "--count", "1"]);
    let mut watch = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("railhead");
    assert_eq!(line(&mut BufReader::new(watch.stderr.take().expect("piped"))), "watching");
    server.prints("delete", &["k"], "");
    let mut text = String::new();
    watch.stdout.take().expect("piped").read_to_string(&mut text).expect("read");
    assert!(watch.wait().expect("wait").success());
    assert_eq!(text, "k deleted\n");
}

#[test]
fn a_watch_ends_when_nobody_reads_it() {
    let server = serve(&[], &[]);
    let mut command = server.command("watch", &["k"]);
    let mut watch = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("railhead");
    assert_eq!(line(&mut BufReader::new(watch.stderr.take().expect("piped"))), "watching");
    drop(watch.stdout.take());
    server.prints("set", &["k", "v"], "");
    let start = Instant::now();
    while watch.try_wait().expect("wait").is_none() {
        if start.elapsed() > Duration::from_secs(20) {
            watch.kill().and_then(|()| watch.wait()).expect("kill");
            panic!("it goes on");
        }
        std::thread::yield_now();
    }
    assert!(watch.wait().expect("wait").success());
}
