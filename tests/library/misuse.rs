//! Calls that no correct host makes, through the built library, each in a process of its own and for every ABI version: refused with a
//! status and a line in the log, and the plugin works on. The calls are in `tests/c/abi_misuse.c`.

use super::examples::{skip, valgrind};
use crate::build;
use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::process::Command;

const ALL: RangeInclusive<u32> = 4..=12;

/// Runs a case for some versions; `before` is what comes before the program on the command line, `wire` the wire that is asked for.
fn run_with(before: &[String], wire: &str, case: &str, versions: impl IntoIterator<Item = u32>) {
    let (program, library) = (build::compile("abi_misuse"), build::library());
    for version in versions {
        let mut line = before.iter().map(OsString::from).collect::<Vec<_>>();
        line.extend([program.clone().into(), library.clone().into(), version.to_string().into(), case.into()]);
        let output = Command::new(&line[0])
            .args(&line[1..])
            .env("RAILHEAD_SOCKET_IFNAME", "lo")
            .env("RAILHEAD_SOFT_WIRE", wire)
            .output()
            .expect("the program runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{case}, v{version}, wire {wire}: {}\n{stderr}", output.status);
    }
}

fn run(case: &str, versions: RangeInclusive<u32>) {
    for wire in ["auto", "tcp"] {
        run_with(&[], wire, case, versions.clone());
    }
}

#[test]
fn nothing_is_touched_that_should_not_be() {
    let Some(valgrind) = valgrind() else { return skip("valgrind is not installed") };
    for case in ["arguments", "requests", "kinds"] {
        run_with(&valgrind, "auto", case, [4, 12]);
    }
}

#[test]
fn calls_before_init() {
    run("before_init", ALL);
}

#[test]
fn null_misaligned_and_impossible_arguments() {
    run("arguments", ALL);
}

#[test]
fn requests_are_written_on_every_return() {
    run("requests", ALL);
}

#[test]
fn wrong_kinds_and_double_closes() {
    run("kinds", ALL);
}

#[test]
fn a_handle_of_version_4_has_64_bytes() {
    run("guard_page", 4..=4);
}

#[test]
fn init_and_finalize_a_hundred_times() {
    run("cycles", ALL);
}

#[test]
fn fork_after_init() {
    run("forked", ALL);
}

#[test]
fn registration_while_another_thread_drives() {
    run("registration", ALL);
}

#[test]
fn properties_of_every_device() {
    run("properties", ALL);
}

#[test]
fn a_second_thread_is_turned_away() {
    run("two_threads", 4..=4);
}
