//! `railhead top`: what the comms of running processes do, live. A screen in a terminal, plain lines everywhere else.

mod lines;
mod rates;
mod screen;
mod view;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::number::{PIDS, within};
use crate::stats::processes::{self, Process};
use rates::{Frame, Order};

/// Running processes, live: rates, outstanding requests, and what each comm waits for and since when.
///
/// Keys: q quits, s changes the order, arrows choose the comm that the last lines tell about. Where stdout is no terminal, or TERM is "dumb",
/// plain lines come instead.
#[derive(clap::Args)]
pub struct Args {
    /// Only this process.
    #[arg(long, value_parser = within(PIDS))]
    pid: Option<i32>,
    /// Seconds between two looks, 0.1 to 3600.
    #[arg(long, default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// What comes first.
    #[arg(long, value_enum, default_value_t = Order::Rate)]
    sort: Order,
    /// Looks twice, prints one table of plain lines and ends.
    #[arg(long)]
    once: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.1..=3600.0).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err("expected seconds from 0.1 to 3600".into()),
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let source = Source { pid: args.pid, before: None, number: 0 };
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    let terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if args.once || dumb || !terminal { lines::run(source, args) } else { screen::run(source, args) }
}

/// Where frames come from.
struct Source {
    pid: Option<i32>,
    before: Option<(Instant, Vec<Process>)>,
    number: u64,
}

impl Source {
    /// Looks at the processes; the rates are those since the last look, and 0 at the first.
    ///
    /// Errors: the process that was asked for cannot be seen, or is gone.
    fn look(&mut self) -> anyhow::Result<Frame> {
        let processes = match self.pid {
            Some(pid) => processes::of(pid)?,
            None => processes::all()?,
        };
        let now = Instant::now();
        let before = self.before.as_ref().map(|(then, processes)| (now - *then, processes.as_slice()));
        let frame = Frame::new(self.number, before, &processes);
        self.before = Some((now, processes));
        self.number += 1;
        Ok(frame)
    }
}
