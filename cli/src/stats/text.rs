//! The pages as tables for people.

use std::fmt::Write;

use railhead::base::stats::page::CommSnapshot;
use railhead::base::stats::{CommCounter, CommKind, RailCounter, WaitCause};

use super::processes::{Process, blame, waits_in, wires};

/// A table per process.
pub fn page(processes: &[Process]) -> String {
    if processes.is_empty() {
        return "no process of this user has initialised Railhead (or all that have, did so with RAILHEAD_STATS=0)\n".into();
    }
    let mut out = String::new();
    for (i, process) in processes.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        one(&mut out, process);
    }
    out
}

fn one(out: &mut String, process: &Process) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "pid {}  {}", process.pid, process.command);
    let copy = if process.copy > 0 { format!(", copy {} of the library in this process", process.copy) } else { String::new() };
    let lost = match process.page.overflowed {
        0 => String::new(),
        n => format!("; {n} more comms or rails found no room in the page"),
    };
    let _ = writeln!(out, "  initialised {} ago{copy}; {} comms{lost}", age(process.page.age_ns), process.page.comms.len());
    if process.page.comms.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "  {:>4} {:6} {:10} {:>9} {:>9} {:>5} {:>6} {:>6} {:>8}  waits for",
        "comm", "end", "device", "bytes", "requests", "open", "errors", "stalls", "retries"
    );
    for comm in &process.page.comms {
        let wait = match comm.wait {
            WaitCause::None => "-".into(),
            cause => wait(cause, process.stopped, comm.wait_age_ns, waits_in(comm.wait_op, comm.wait_tag, &comm.wait_key)),
        };
        let _ = writeln!(
            out,
            "  {:>4} {:6} {:10} {:>9} {:>9} {:>5} {:>6} {:>6} {:>8}  {wait}",
            comm.id,
            comm.kind.name(),
            comm.device,
            bytes(comm.get(CommCounter::Bytes)),
            comm.get(CommCounter::Completions),
            comm.outstanding,
            comm.get(CommCounter::Errors),
            comm.get(CommCounter::Stalls),
            comm.get(CommCounter::NullPosts),
        );
        details(out, comm);
    }
}

fn details(out: &mut String, comm: &CommSnapshot) {
    if !comm.peer.is_empty() {
        let own = comm.ranks.map_or(String::new(), |(rank, _)| format!("of rank {rank} "));
        let preposition = if comm.kind == CommKind::Recv { "from" } else { "to" };
        let _ = writeln!(out, "       {own}{preposition} {}", comm.peer);
    }
    let waited: Vec<String> = super::json::causes()
        .filter(|cause| comm.waited(*cause) > 0)
        .map(|cause| format!("{} {}", age(comm.waited(cause)), cause.words()))
        .collect();
    if !waited.is_empty() {
        let _ = writeln!(out, "       waited {}", waited.join(", "));
    }
    for rail in &comm.rails {
        let moved: Vec<String> =
            wires(rail).into_iter().map(|(path, tx, rx)| format!("{path} {} out {} in", bytes(tx), bytes(rx))).collect();
        let moved = if moved.is_empty() { "nothing moved".into() } else { moved.join(", ") };
        let other = [RailCounter::RnrWaits, RailCounter::Errors, RailCounter::CmaRefused, RailCounter::Failures, RailCounter::Reconnects];
        let other: String =
            other.into_iter().filter(|c| rail.get(*c) > 0).map(|c| format!(", {} {}", c.name().replace('_', " "), rail.get(c))).collect();
        let calls = rail.get(RailCounter::Syscalls);
        let _ = writeln!(out, "       rail {}: {moved}; {calls} system calls{other}", rail.index);
        if let Some(down) = &rail.down {
            let _ = writeln!(out, "         is down, for {}: {}", age(down.age_ns), down.why);
        }
    }
}

/// A wait in words: for what, for how long, and in what.
pub fn wait(cause: WaitCause, stopped: bool, age_ns: u64, within: Option<String>) -> String {
    let within = within.map_or(String::new(), |within| format!(", in {within}"));
    format!("{}, for {}{within}", blame(cause, stopped).words, age(age_ns))
}

/// "12.3G" and the like, in powers of 1024; at most six characters.
pub fn bytes(n: u64) -> String {
    scaled(n, 1024.0, &["", "K", "M", "G", "T", "P", "E"])
}

/// A number in powers of 1000.
pub fn count(n: u64) -> String {
    scaled(n, 1000.0, &["", "k", "M", "G", "T", "P", "E"])
}

fn scaled(n: u64, base: f64, units: &[&str]) -> String {
    let mut value = n as f64;
    let mut unit = 0;
    // What would round up to four digits is shown in the next unit.
    while value >= if unit == 0 { base } else { 999.5 } && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 99.95 { 0 } else { 1 };
    format!("{value:.digits$}{}", units[unit])
}

/// A time for people: 0.4 s, 75 s, 12 min, 5.2 h, 3.1 d.
pub fn age(ns: u64) -> String {
    let s = ns as f64 / 1e9;
    match s {
        _ if s < 99.95 => format!("{s:.1} s"),
        _ if s < 5940.0 => format!("{:.0} min", s / 60.0),
        _ if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        _ => format!("{:.1} d", s / 86400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_short() {
        for (n, text) in
            [(0, "0"), (1023, "1023"), (1024, "1.0K"), (1536, "1.5K"), (102_297, "99.9K"), (1 << 20, "1.0M"), (u64::MAX, "16.0E")]
        {
            assert_eq!(bytes(n), text);
        }
        assert_eq!((count(999), count(1000), count(999_499), count(999_500)), ("999".into(), "1.0k".into(), "999k".into(), "1.0M".into()));
        for shift in 0..64 {
            for n in [(1u64 << shift) - 1, 1 << shift, (1 << shift) | (1 << shift >> 1)] {
                assert!(bytes(n).len() <= 6 && count(n).len() <= 6, "{n}");
            }
        }
    }

    #[test]
    fn ages_are_told_in_a_fitting_unit() {
        let s = 1_000_000_000;
        for (ns, text) in [(0, "0.0 s"), (99 * s, "99.0 s"), (100 * s, "2 min"), (7200 * s, "2.0 h"), (200_000 * s, "2.3 d")] {
            assert_eq!(age(ns), text);
        }
    }
}
