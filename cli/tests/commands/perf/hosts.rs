//! Two hosts: `--listen` and `--connect`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use super::run::{Perf, Running, fake, library, positive, ranks, until};

/// A listening side and its address.
fn listening(plugin: &Path) -> (Running, BufReader<std::process::ChildStdout>, String) {
    listening_at(plugin, "127.0.0.1:0")
}

fn listening_at(plugin: &Path, address: &str) -> (Running, BufReader<std::process::ChildStdout>, String) {
    told(Perf::new(plugin).args(["--listen", address]).start())
}

/// What a listening side says of its address.
fn told(mut running: Running) -> (Running, BufReader<std::process::ChildStdout>, String) {
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

/// They are in its environment, which nobody sees at the other end.
#[test]
fn warnings_of_the_other_host_are_told_here() {
    let wrong = ["--listen", "127.0.0.1:0", "--env", "RAILHEAD_PROGRESS=thraed"];
    let (mut listener, _lines, address) = told(Perf::new(&library()).args(wrong).start());
    let table = Perf::new(&library()).args(["--sizes", "8", "--connect", &address]).run().passes();
    let line = table.lines().find(|line| line.starts_with("warning in rank 1 (once): ")).unwrap_or_else(|| panic!("{table}"));
    assert!(line.contains("RAILHEAD_PROGRESS=thraed is not accepted"), "{line}");
    assert!(listener.child.wait().unwrap().success());
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

/// Even where the system would have it for IPv6 only.
#[test]
fn a_listener_at_any_address_is_there_for_both_kinds_on_any_system() {
    let script = "echo 1 > /proc/sys/net/ipv6/bindv6only && ip link set lo up && exec \"$@\"";
    let namespace = ["unshare", "--net", "sh", "-c", script, "sh"];
    let able = Command::new(namespace[0]).args(&namespace[1..]).arg("true").output().is_ok_and(|o| o.status.success());
    if !able {
        println!("SKIP: a network namespace with IPv6 needs root, unshare(1) and ip(8)");
        return;
    }
    let (mut listener, _lines, address) = told(Perf::new(&library()).through(&namespace).args(["--listen", "[::]:0"]).start());
    let port = address.rsplit_once(':').expect("a port").1;
    // What it ran through became it.
    let inside = format!("--net=/proc/{}/ns/net", listener.child.id());
    let connect = format!("127.0.0.1:{port}");
    let run = Perf::new(&library()).through(&["nsenter", &inside]).args(["--json", "--sizes", "8", "--connect", &connect]).run();
    assert_eq!(run.json()["rows"].as_array().unwrap().len(), 2);
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
        stream.write_all(b"railhead perf 2\n").unwrap();
        stream.write_all(nonsense).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(listener.child.wait().unwrap().code(), Some(2));
        let mut text = String::new();
        listener.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(text.contains("what the coordinator sends"), "{text}");
        until("no rank", || ranks(&listener.mark).is_empty());
    }
}
