//! What the screen and the plain lines have in common: columns and words.

use railhead::base::stats::{CommKind, WaitCause};

use super::rates::{Frame, Row};
use crate::stats::processes::blame;
use crate::stats::text::{age, bytes, count, wait};

/// Headings and widths. Together with a space between each, and the last one, 80 columns.
pub const COLUMNS: [(&str, u16); 10] = [
    ("PID", 7),
    ("COMM", 5),
    ("END", 4),
    ("DEVICE", 7),
    ("BYTES/S", 8),
    ("OPS/S", 7),
    ("TOTAL", 6),
    ("OPEN", 4),
    ("WAITS FOR", 15),
    ("SINCE", 8),
];
/// The columns that are numbers.
pub const RIGHT: [bool; 10] = [true, true, false, false, true, true, true, true, false, true];

/// The cells of a row; the device is cut.
pub fn cells(row: &Row) -> [String; 10] {
    let since = if row.wait == WaitCause::None { String::new() } else { age(row.wait_age_ns) };
    [
        row.key.0.to_string(),
        row.key.2.to_string(),
        row.kind.name().to_owned(),
        row.device.chars().take(usize::from(COLUMNS[3].1)).collect(),
        per_second(bytes(row.bytes_rate as u64)),
        per_second(count(row.ops_rate.round() as u64)),
        bytes(row.bytes),
        row.outstanding.to_string(),
        waits_for(row),
        since,
    ]
}

/// Of a mesh, which rank; the numbers of very many are cut.
fn waits_for(row: &Row) -> String {
    let blame = blame(row.wait, row.stopped);
    match (row.ranks, blame.of_rank) {
        (Some((_, peer)), Some(what)) => format!("rank {peer} {what}").chars().take(usize::from(COLUMNS[8].1)).collect(),
        _ => blame.short.to_owned(),
    }
}

/// The peer, behind what a rank of a mesh waits in, or the tensor that is waited for, and before what is down.
pub fn peer(row: &Row) -> String {
    let within = row.wait_in.as_ref().map_or(String::new(), |within| format!("{within}: "));
    let down = down(row).map(|(rail, _)| format!("; {rail}"));
    format!("{within}{}{}", row.peer, down.collect::<String>())
}

/// Each rail that is down, since when, and why.
fn down(row: &Row) -> impl Iterator<Item = (String, &str)> {
    row.down.iter().map(|(rail, down)| (format!("rail {rail} is down, for {}", age(down.age_ns)), down.why.as_str()))
}

fn per_second(number: String) -> String {
    number + "/s"
}

/// Totals, in one line; of at most 80 columns, unless there are pairs of a mesh beside other comms.
pub fn summary(frame: &Frame) -> String {
    let of = |kind| frame.rows.iter().any(|row| row.kind == kind);
    let (pairs, ways) = (of(CommKind::Pair), of(CommKind::Send) || of(CommKind::Recv));
    let sums = [("out", CommKind::Send, ways || !pairs), ("in", CommKind::Recv, ways || !pairs), ("pairs", CommKind::Pair, pairs)];
    let sums = sums.into_iter().filter(|(.., shown)| *shown).map(|(name, kind, _)| {
        let (bytes_rate, ops_rate) = frame.sum(kind);
        format!(", {name} {}/s {}/s", bytes(bytes_rate as u64), count(ops_rate.round() as u64))
    });
    let over = frame.over.as_secs_f64();
    let decimals = if over < 9.995 { 2 } else { usize::from(over < 99.95) };
    let (number, processes, comms) = (frame.number, frame.processes, frame.rows.len());
    format!("#{number} over {over:.decimals$} s: {processes} procs, {comms} comms{}", sums.collect::<String>())
}

/// Two lines about one comm.
pub fn details(row: &Row) -> [String; 2] {
    let preposition = if row.kind == CommKind::Recv { "from" } else { "to" };
    let wait = match row.wait {
        WaitCause::None => String::new(),
        cause => wait(cause, row.stopped, row.wait_age_ns, row.wait_in.clone()) + "; ",
    };
    let bad = match (row.errors, row.stalls) {
        (0, 0) => String::new(),
        (errors, stalls) => format!("; {errors} failed, {stalls} stalled"),
    };
    let (rails, whys): (String, String) = down(row).map(|(rail, why)| (rail + "; ", format!("; {why}"))).unzip();
    let rank = row.ranks.map_or(String::new(), |(rank, _)| format!(", rank {rank}"));
    [
        format!("{} comm {} of pid {}{rank}: {}", row.kind.name(), row.key.2, row.key.0, row.command),
        format!("  {wait}{rails}{preposition} {}{bad}{whys}", row.peer),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use railhead::base::stats::page::Down;

    fn busiest() -> Row {
        Row {
            key: (4_194_304, 0, 99_999),
            kind: CommKind::Recv,
            device: "a-very-long-name".into(),
            peer: String::new(),
            ranks: None,
            command: String::new(),
            bytes_rate: 1023.4 * 1024.0,
            ops_rate: 999_400.0,
            bytes: u64::MAX,
            outstanding: 256,
            errors: 0,
            stalls: 0,
            stopped: false,
            wait: WaitCause::None,
            wait_age_ns: 86_400 * 365 * 1_000_000_000,
            wait_in: None,
            down: Vec::new(),
        }
    }

    #[test]
    fn the_heading_fits_with_as_many_comms_as_a_page_holds() {
        for over in [0.1, 1.0, 59.99, 99.99, 3600.0] {
            // Sums of 99.9G and 99.9k.
            let row = |kind| Row { kind, bytes_rate: 1.0477e8, ops_rate: 97.5, ..busiest() };
            let rows = (0..1024).map(|i| row(if i % 2 == 0 { CommKind::Send } else { CommKind::Recv })).collect();
            let over = std::time::Duration::from_secs_f64(over);
            let line = summary(&Frame { number: 9999, over, processes: 99, rows });
            assert!(line.len() <= 80 && line.contains("1024 comms") && line.ends_with("49.9k/s"), "{}: {line}", line.len());
        }
    }

    #[test]
    fn pairs_of_a_mesh_have_a_sum_of_their_own() {
        let pair = Row { kind: CommKind::Pair, bytes_rate: 2048.0, ops_rate: 3.0, ..busiest() };
        let line = |rows: &[&Row]| {
            let rows = rows.iter().map(|row| (*row).clone()).collect();
            summary(&Frame { number: 1, over: std::time::Duration::from_secs(1), processes: 1, rows })
        };
        assert!(line(&[]).ends_with("0 comms, out 0/s 0/s, in 0/s 0/s"), "{}", line(&[]));
        assert!(line(&[&pair]).ends_with("1 comms, pairs 2.0K/s 3/s"), "{}", line(&[&pair]));
        let both = line(&[&pair, &Row { bytes_rate: 1024.0, ops_rate: 1.0, ..busiest() }]);
        assert!(both.ends_with("2 comms, out 0/s 0/s, in 1.0K/s 1/s, pairs 2.0K/s 3/s"), "{both}");
    }

    #[test]
    fn the_cause_stands_first_at_the_foot() {
        let row = Row { wait: WaitCause::PeerNoSend, peer: "x".repeat(100), ..busiest() };
        assert!(details(&row)[1].starts_with("  the peer has not sent, for "), "{:?}", details(&row));
    }

    #[test]
    fn a_rail_that_is_down_is_told_with_its_cause() {
        let down = |age_ns, why: &str| Down { age_ns, why: why.into() };
        let row = Row { peer: "nodeb".into(), down: vec![(1, down(3_200_000_000, "no carrier")), (2, down(0, "reset"))], ..busiest() };
        assert_eq!(peer(&row), "nodeb; rail 1 is down, for 3.2 s; rail 2 is down, for 0.0 s");
        assert_eq!(details(&row)[1], "  rail 1 is down, for 3.2 s; rail 2 is down, for 0.0 s; from nodeb; no carrier; reset");
    }

    #[test]
    fn everything_fits_into_eighty_columns() {
        assert_eq!(COLUMNS.iter().map(|(_, width)| width + 1).sum::<u16>() - 1, 80);
        let row = busiest();
        for wait in WaitCause::ALL {
            let (row, stopped) = (Row { wait, ..row.clone() }, Row { wait, stopped: true, ..row.clone() });
            assert!(cells(&stopped)[8].len() <= usize::from(COLUMNS[8].1));
            let pair = Row { ranks: Some((0, u32::MAX)), ..row.clone() };
            assert!(cells(&pair)[8].len() <= usize::from(COLUMNS[8].1));
            for (cell, (name, width)) in cells(&row).iter().zip(COLUMNS) {
                assert!(cell.chars().count() <= usize::from(width), "{name}: {cell}");
            }
        }
    }
}
