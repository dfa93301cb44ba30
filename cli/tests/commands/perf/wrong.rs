//! What is wrong with a plugin, or with what was asked for, is told; and no rank stays behind.

use std::path::Path;
use std::process::{Command, Stdio};

use super::run::{Perf, fake, library, ranks, until};

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

#[test]
fn what_fails_alike_in_both_ranks_is_said_once() {
    let done = Perf::new(&fake("alike", 12)).args(["--sizes", "8", "--limits", "none", "--env", "FAKE_FAULT=noinit"]).run();
    done.fails("both ranks: ");
    assert_eq!(done.text().matches("init returned 2").count(), 1, "{}", done.text());
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
    let cases: [(&[&str], &str); 27] = [
        (&["--sizes", "65M"], "\"65M\" is no size from 0 to 64M"),
        (&["--sizes", ""], "--sizes"),
        (&["--outstanding", "33"], "\"33\" is no number from 1 to 32"),
        (&["--comms", "9"], "\"9\" is no number from 1 to 8"),
        (&["--abi", "13"], "from 4 to 12"),
        (&["--rounds", "0"], "from 1 to 1000"),
        (&["--timeout", "0"], "from 1 to 86400"),
        (&["--limits", "speed-of-light"], "memcpy, readv, ring, cache-line, tcp-stream, tcp-ping-pong"),
        (&["--env", "NAME"], "NAME=VALUE is wanted"),
        (&["--dev", "7"], "has no device 7: 0 to"),
        (&["--abi", "x"], "invalid value 'x' for '--abi <ABI>': expected a whole number from 4 to 12"),
        (&["--rounds", "abc"], "expected a whole number from 1 to 1000"),
        (&["--dev", "-1"], "invalid value '-1' for '--dev <DEV>': expected a whole number from 0"),
        (&["--connect", "nowhere:x"], "is no ADDRESS or ADDRESS:PORT"),
        (&["--listen", "nowhere:x"], "is no ADDRESS or ADDRESS:PORT"),
        (&["--connect", "127.0.0.1:1", "--compare", "x"], "cannot be used with"),
        (&["--recv-size", "65M"], "--recv-size: \"65M\" is no size from 0 to 64M"),
        (&["--ahead", "9"], "invalid value '9' for '--ahead <N>': expected a whole number from 0 to 8"),
        (&["--targets", "--ahead", "4"], "cannot be used with"),
        (&["--targets", "--recv-size", "0"], "cannot be used with"),
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

#[test]
fn cpus_that_cannot_be_had_are_refused_with_those_that_can() {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("the list").trim();
    let first = allowed.split(['-', ',']).next().expect("a CPU");
    let malformed = format!("two numbers are wanted, with a comma between them; this process may run on CPUs {allowed}");
    for (cpus, message) in [
        ("0", malformed.clone()),
        ("", malformed.clone()),
        ("0,1,2", malformed.clone()),
        ("0,x", malformed.clone()),
        ("0,-1", malformed),
        (&format!("{first},1000"), format!("this process may not run on CPU 1000, but on {allowed}\n")),
        (&format!("{first},9999"), format!("this process may not run on CPU 9999, but on {allowed}\n")),
        (&format!("{first},{first}"), format!("--cpus {first},{first}: two different CPUs of {allowed} are wanted: ")),
    ] {
        Perf::new(&library()).args(["--cpus", cpus]).run().fails(&message);
    }
}

/// Everything but the plugin and its environment is said at the other end.
#[test]
fn a_listener_is_not_told_what_to_measure() {
    let nothing = Path::new("/proc/self/status");
    let others: [&[&str]; 14] = [
        &["--sizes", "8"],
        &["--recv-size", "8"],
        &["--ahead", "1"],
        &["--outstanding", "8"],
        &["--comms", "1"],
        &["--direction", "one"],
        &["--touch"],
        &["--what", "latency"],
        &["--limits", "none"],
        &["--rounds", "3"],
        &["--round-ms", "10"],
        &["--timeout", "5"],
        &["--json"],
        &["--plot", "/nowhere/plot.svg"],
    ];
    for other in others {
        let refused = format!("the argument '--listen [<ADDR[:PORT]>]' cannot be used with '{}", other[0]);
        Perf::new(nothing).args(["--listen", "127.0.0.1:0"]).args(other).run().fails(&refused);
    }
}

/// What has no effect is not what was wanted.
#[test]
fn options_without_effect_are_refused() {
    let nothing = Path::new("/proc/self/status");
    for other in [&["--outstanding", "32"][..], &["--comms", "8"], &["--direction", "two"], &["--touch"]] {
        Perf::new(nothing).args(["--what", "latency"]).args(other).run().fails_with(&["--what latency", other[0], "bandwidth"]);
    }
    let all = ["--what", "latency", "--touch", "--direction", "two", "--outstanding", "32", "--comms", "8"];
    Perf::new(nothing).args(all).run().fails("--what latency cannot be used with --outstanding, --comms, --direction, --touch");
    let one_by_one = ["--what", "bandwidth", "--ahead", "0"];
    Perf::new(nothing).args(one_by_one).run().fails("--what bandwidth cannot be used with --ahead: half round trips only");
    Perf::new(nothing).args(["--targets", "--sizes", "8"]).run().fails_with(&["--targets", "--sizes", "--plot"]);
    let wire = ["--targets", "--env", "NAME=value", "--env", "RAILHEAD_SOFT_WIRE=tcp"];
    Perf::new(nothing).args(wire).run().fails("--targets cannot be used with --env RAILHEAD_SOFT_WIRE=tcp");
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
