//! What the screen and the plain lines have in common: columns and words.

use railhead::base::stats::{CommKind, WaitCause};

use super::rates::{Frame, Row};
use crate::stats::processes::blame;
use crate::stats::text::{age, bytes, count};

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
        blame(row.wait, row.stopped).short.to_owned(),
        since,
    ]
}

fn per_second(number: String) -> String {
    number + "/s"
}

/// Totals, in one line of at most 80 columns.
pub fn summary(frame: &Frame) -> String {
    let (out_bytes, out_ops) = frame.sum(CommKind::Send);
    let (in_bytes, in_ops) = frame.sum(CommKind::Recv);
    let way = |bytes_rate: f64, ops_rate: f64| format!("{}/s {}/s", bytes(bytes_rate as u64), count(ops_rate.round() as u64));
    let over = frame.over.as_secs_f64();
    let decimals = if over < 9.995 { 2 } else { usize::from(over < 99.95) };
    format!(
        "#{} over {over:.decimals$} s: {} procs, {} comms, out {}, in {}",
        frame.number,
        frame.processes,
        frame.rows.len(),
        way(out_bytes, out_ops),
        way(in_bytes, in_ops)
    )
}

/// Two lines about one comm.
pub fn details(row: &Row) -> [String; 2] {
    let preposition = if row.kind == CommKind::Recv { "from" } else { "to" };
    let wait = match row.wait {
        WaitCause::None => String::new(),
        cause => format!("{}, for {}; ", blame(cause, row.stopped).words, age(row.wait_age_ns)),
    };
    let bad = match (row.errors, row.stalls) {
        (0, 0) => String::new(),
        (errors, stalls) => format!("; {errors} failed, {stalls} stalled"),
    };
    [
        format!("{} comm {} of pid {}: {}", row.kind.name(), row.key.2, row.key.0, row.command),
        format!("  {wait}{preposition} {}{bad}", row.peer),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busiest() -> Row {
        Row {
            key: (4_194_304, 0, 99_999),
            kind: CommKind::Recv,
            device: "a-very-long-name".into(),
            peer: String::new(),
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
    fn the_cause_stands_first_at_the_foot() {
        let row = Row { wait: WaitCause::PeerNoSend, peer: "x".repeat(100), ..busiest() };
        assert!(details(&row)[1].starts_with("  the peer has not sent, for "), "{:?}", details(&row));
    }

    #[test]
    fn everything_fits_into_eighty_columns() {
        assert_eq!(COLUMNS.iter().map(|(_, width)| width + 1).sum::<u16>() - 1, 80);
        let row = busiest();
        for wait in WaitCause::ALL {
            let (row, stopped) = (Row { wait, ..row.clone() }, Row { wait, stopped: true, ..row.clone() });
            assert!(cells(&stopped)[8].len() <= usize::from(COLUMNS[8].1));
            for (cell, (name, width)) in cells(&row).iter().zip(COLUMNS) {
                assert!(cell.chars().count() <= usize::from(width), "{name}: {cell}");
            }
        }
    }
}
