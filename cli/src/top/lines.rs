//! `top` without a terminal: a table of plain lines per interval.

use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

use anyhow::Context;

use super::rates::Frame;
use super::view::{COLUMNS, RIGHT, cells, peer, summary};
use super::{Args, Source};

/// Prints until whoever reads has had enough, or once.
pub fn run(mut source: Source, args: &Args) -> anyhow::Result<ExitCode> {
    source.look()?;
    loop {
        std::thread::sleep(args.interval);
        let mut frame = source.look()?;
        frame.sort(args.sort);
        match std::io::stdout().write_all(table(&frame).as_bytes()) {
            Err(e) if e.kind() == ErrorKind::BrokenPipe => return Ok(ExitCode::SUCCESS),
            result => result.context("writing to stdout")?,
        }
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn table(frame: &Frame) -> String {
    let mut out = summary(frame) + "\n";
    let mut line = |cells: &[String], peer: &str| {
        for ((cell, (_, width)), right) in cells.iter().zip(COLUMNS).zip(RIGHT) {
            let width = usize::from(width);
            // Writing to a String cannot fail.
            let _ = if right { write!(out, "{cell:>width$} ") } else { write!(out, "{cell:width$} ") };
        }
        out += peer;
        out.truncate(out.trim_end().len());
        out.push('\n');
    };
    line(&COLUMNS.map(|(name, _)| name.to_owned()), "PEER");
    frame.rows.iter().for_each(|row| line(&cells(row), &peer(row)));
    out + "\n"
}
