//! Schedules in a simulated world: see `src/sim`. As a test a few of each scenario; by `make sim` for as long as one likes, on every core.
//!
//!     RHT_SIM="..." cargo test ... --test sim
//!     [--seed N] [--schedules N] [--for SECONDS] [--rails N] [--faults N] [--messages N] [--threads N] [--first] [--ranks N [--meet]] [--verbose]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use railhead::sim::mesh::Task;
use railhead::sim::{Options, Report, Violation, duplex, mesh, net, tensor};

/// A scenario.
type Run = fn(&Options) -> Result<Report, Violation>;
/// Each, as a test.
const SCENARIOS: [(&str, Run); 4] = [
    ("sim::comms_go_on_without_their_rails", net::run),
    ("sim::links_both_ways_go_on_without_their_rails", duplex::run),
    ("sim::meshes_go_on_without_their_rails", mesh::run),
    ("sim::tensors_go_on_without_their_rails", tensor::run),
];

/// What a run of many schedules was asked for.
struct Args {
    /// Words of the test harness that all programs are given: what is run has one of these in its name, if there are any.
    filters: Vec<String>,
    seed: Option<u64>,
    schedules: u64,
    time: Duration,
    options: Options,
    threads: usize,
    /// Violations that end it.
    most: usize,
    /// In place of the scenarios; and what so many ranks do.
    ranks: Option<usize>,
    task: Task,
    is_verbose: bool,
}

fn number(text: &str) -> u64 {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{text:?} is no number"))
}

impl Args {
    fn read() -> Args {
        let mut args = Args {
            filters: Vec::new(),
            seed: None,
            schedules: 1000,
            time: Duration::MAX,
            options: Options { seed: 0, rails: 0, faults: 8, messages: 60 },
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            most: 10,
            ranks: None,
            task: Task::Ring,
            is_verbose: false,
        };
        let more = std::env::var("RHT_SIM").unwrap_or_default();
        let mut words = std::env::args().skip(1).chain(more.split_whitespace().map(str::to_owned));
        while let Some(word) = words.next() {
            let mut value = || number(&words.next().unwrap_or_else(|| panic!("{word} needs a number")));
            match word.as_str() {
                "--seed" => args.seed = Some(value()),
                "--schedules" => args.schedules = value(),
                "--for" => (args.time, args.schedules) = (Duration::from_secs(value()), u64::MAX),
                "--rails" => args.options.rails = value() as usize,
                "--faults" => args.options.faults = value() as usize,
                "--messages" => args.options.messages = value() as usize,
                "--threads" => args.threads = value() as usize,
                "--first" => args.most = 1,
                "--ranks" => args.ranks = Some(value() as usize),
                "--meet" => args.task = Task::Meet,
                "--verbose" => args.is_verbose = true,
                "--show-output" | "--nocapture" => {}
                filter if !filter.starts_with('-') => args.filters.push(filter.into()),
                other => panic!(
                    "{other:?}: expected --seed, --schedules, --for, --rails, --faults, --messages, --threads, --first, --ranks, --meet or --verbose"
                ),
            }
        }
        args
    }
}

fn main() {
    let args = Args::read();
    let is_asked = |name: &str| args.filters.is_empty() || args.filters.iter().any(|filter| name.contains(filter));
    let scenarios: Vec<_> = SCENARIOS.into_iter().filter(|(name, _)| is_asked(name)).collect();
    if args.is_verbose {
        railhead::base::log::set_stderr(railhead::base::log::Level::Info);
    }
    if let Some(ranks) = args.ranks {
        return one_of_many_ranks(&args, ranks);
    }
    if let Some(seed) = args.seed {
        let options = Options { seed, ..args.options };
        let failed = scenarios.iter().filter(|(name, run)| {
            let (first, second) = (run(&options), run(&options));
            println!("{name}: {first:#?}");
            let traces = [&first, &second].map(|run| run.as_ref().map(|report| report.trace).ok());
            assert_eq!(traces[0], traces[1], "the same seed gives another schedule");
            first.is_err()
        });
        std::process::exit(i32::from(failed.count() > 0));
    }
    let (mut schedules, mut violations, mut failed) = (0, 0, 0);
    for (name, run) in &scenarios {
        let (all, broken) = many(*run, &args, scenarios.len() as u32);
        (schedules, violations) = (schedules + all, violations + broken);
        failed += i32::from(broken > 0);
        println!("test {name} ... {}\n", if broken > 0 { "FAILED" } else { "ok" });
    }
    let (result, passed) = (if failed == 0 { "ok" } else { "FAILED" }, scenarios.len() as i32 - failed);
    println!("test result: {result}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out\n");
    println!("{schedules} schedules, {violations} violations");
    std::process::exit(i32::from(failed > 0));
}

/// Kilobytes of this process in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Runs one schedule of many ranks.
fn one_of_many_ranks(args: &Args, ranks: usize) {
    let first = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let options = Options { seed: args.seed.unwrap_or(first), ..args.options.clone() };
    let (start, before) = (Instant::now(), resident());
    let result = mesh::many(&options, ranks, args.task);
    let took = start.elapsed().as_secs_f64();
    println!("{result:#?}\n{ranks} ranks: {took:.1} s, {} KiB of memory for each", (resident() - before) / ranks.max(1) as u64);
    std::process::exit(i32::from(result.is_err()));
}

/// Runs many schedules of a scenario, which is one of so many that share the time: how many those were, and how many broke a promise.
fn many(run: Run, args: &Args, sharers: u32) -> (u64, u64) {
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (violations, sum) = (Mutex::new(Vec::<Violation>::new()), Mutex::new((0u64, Report::default(), 0u64)));
    let first = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    println!("seeds from {first:#x} on");
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) && start.elapsed() < args.time / sharers {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= args.schedules {
                        return;
                    }
                    let options = Options { seed: first.wrapping_add(number), ..args.options.clone() };
                    let result = std::panic::catch_unwind(|| run(&options))
                        .unwrap_or_else(|_| Err(Violation { seed: options.seed, what: "a panic".into() }));
                    match result {
                        Ok(report) => {
                            let mut sum = sum.lock().unwrap();
                            sum.0 += 1;
                            sum.1.failures += report.failures;
                            sum.1.reconnects += report.reconnects;
                            sum.1.messages += report.messages;
                            sum.1.time += report.time;
                            sum.2 += u64::from(report.has_ended);
                        }
                        Err(violation) => {
                            println!("{violation}");
                            let mut violations = violations.lock().unwrap();
                            violations.push(violation);
                            stop.store(violations.len() >= args.most, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let (schedules, report, ended) = sum.into_inner().unwrap();
    let violations = violations.into_inner().unwrap();
    let all = schedules + violations.len() as u64;
    println!(
        "{} failures of a rail, {} recoveries, {} messages, {ended} that lost all rails; {:.0} s of their worlds, {:.0} schedules per second",
        report.failures,
        report.reconnects,
        report.messages,
        report.time as f64 / 1e9,
        all as f64 / start.elapsed().as_secs_f64()
    );
    (all, violations.len() as u64)
}
