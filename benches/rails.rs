//! What rails that fail cost: `make bench-rails`. Each figure is printed with what is wanted of it.
//!
//! * Throughput of two rails while one after the other fails, as soon as all are back, beside that of one rail alone; and once both have failed and are back,
//!   beside that of two that never failed. Two processes on one host, a busy thread each; messages of 1 MiB, 8 outstanding; the receiver's clock.
//! * The longest time in which no message completes at the receiver, messages of 64 KiB, 8 outstanding: while nothing fails, where a queue pair fails at
//!   once, and where a cable between two hosts takes what is sent and says nothing.
//!
//! All take turns, and a ratio is of the figures of one round. Needs root, for network namespaces.

#[path = "../tests/support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use railhead::base::stats::RailCounter;
use railhead::base::stats::page::CommSnapshot;
use support::comms::{self, Mem};
use support::netns::{Cable, usable};
use support::plugin::{Buf, Opaque, Plugin};
use support::{Ctx, World, holdings, spin};

const DEPTH: usize = 8;
const MIB: usize = 1 << 20;
const SMALL: usize = 64 << 10;
/// Messages that are timed, and those before them.
const TIMED: usize = 2000;
const WARM: usize = 200;
/// The fabric's time-out: the shortest there is.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How much longer than that nothing may complete.
const GRACE: Duration = Duration::from_millis(50);
/// For how long messages flow when all has happened.
const FLOW: Duration = Duration::from_millis(500);
/// Tags of messages, and of none.
const MESSAGE: i32 = 1;
const NONE: i32 = 2;

fn main() -> ExitCode {
    support::enter(&[("streams", streams), ("flows", flows)]);
    let rounds = std::env::args().skip_while(|arg| arg != "--rounds").nth(1).map_or(9, |n| n.parse().expect("--rounds: a number"));
    if !usable() {
        return ExitCode::SUCCESS;
    }
    let cable = Cable::new();
    println!("| what | wire | figure | beside it | ratio | wanted | |\n|---|---|---|---|---|---|---|");
    for wire in ["shm", "tcp"] {
        throughput(wire, rounds, &cable);
    }
    for wire in ["shm", "tcp"] {
        gaps(wire, rounds, &cable);
    }
    silent_cable(rounds);
    println!("\nMedians (min..max) of {rounds} rounds on {} core(s).", std::thread::available_parallelism().map_or(0, usize::from));
    ExitCode::SUCCESS
}

/// Median, least and most, in so many digits.
fn spread(values: &[f64], digits: usize) -> (f64, String) {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let (median, least, most) = (values[values.len() / 2], values[0], values[values.len() - 1]);
    (median, format!("{median:.digits$} ({least:.digits$}..{most:.digits$})"))
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "not met" }
}

/// Two ranks of one host, on so many rails.
fn one_host(role: &'static str, wire: &str, rails: usize, cable: &Cable) -> World {
    let world = World::new(role, 2).env("RAILHEAD_SOCKET_IFNAME", "=lo,rht").env("RAILHEAD_FORCE_MERGE", "lo,rht");
    let world = world.env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_FABRIC_TIMEOUT_S", &TIMEOUT.as_secs().to_string());
    (0..2).fold(world.env("RHT_RAILS", &rails.to_string()), |world, rank| world.wrap(rank, &cable.at(0)))
}

/// What the receiver says, and what the sender does.
fn run(world: World) -> (f64, usize) {
    let mut ranks = world.spawn();
    let said = [0, 1].map(|rank| ranks.hear(rank));
    ranks.finish();
    (said[0].parse().expect("a number"), said[1].parse().expect("a number"))
}

fn throughput(wire: &str, rounds: usize, cable: &Cable) {
    let world = |rails, warm: usize| one_host("streams", wire, rails, cable).env("RHT_WARM", &warm.to_string());
    let mut failures = Vec::new();
    let [mut alone, mut both, mut failing, mut back, mut of_alone, mut of_both] = [const { Vec::new() }; 6];
    for _ in 0..rounds {
        let one = run(world(1, WARM)).0;
        let (while_failing, seen) = run(world(2, WARM).env_of(1, "RH_STAGE", "rail=0,1@1:down:0"));
        // Twice in so many messages, and not again before the timed ones are through.
        let every = DEPTH + TIMED + 1;
        let two = run(world(2, 2 * every)).0;
        let stage = format!("rail=0,1@{every}:down:0");
        let after = run(world(2, 2 * every).env("RHT_FAILURES", "2").env_of(1, "RH_STAGE", &stage)).0;
        [&mut alone, &mut both, &mut failing, &mut back].into_iter().zip([one, two, while_failing, after]).for_each(|(to, it)| to.push(it));
        of_alone.push(while_failing / one);
        of_both.push(after / two);
        failures.push(seen as f64 / ((WARM + TIMED) as f64 * MIB as f64 / while_failing / 1e9));
    }
    let (figures, shown) = (spread(&failing, 2).1, spread(&of_alone, 3));
    println!(
        "| while one rail after the other fails, {} times a second | {wire} | {figures} GB/s | one rail alone {} | {} | >= 0.9 | {} |",
        spread(&failures, 0).1,
        spread(&alone, 2).1,
        shown.1,
        verdict(shown.0 >= 0.9)
    );
    let (figures, shown) = (spread(&back, 2).1, spread(&of_both, 3));
    println!(
        "| both have failed and are back | {wire} | {figures} GB/s | never failed {} | {} | >= 0.95 | {} |",
        spread(&both, 2).1,
        shown.1,
        verdict(shown.0 >= 0.95)
    );
}

/// The longest gap, in milliseconds.
fn show_gap(what: &str, wire: &str, gaps: &[f64], calm: &[f64]) {
    let most = (TIMEOUT + GRACE).as_millis() as f64;
    let (median, shown) = spread(gaps, 1);
    let share = spread(&gaps.iter().map(|gap| gap / most).collect::<Vec<_>>(), 3).1;
    let met = verdict(median <= most);
    println!(
        "| longest gap: {what} | {wire} | {shown} ms | while nothing fails {} | {share} of {most} ms | <= 1 | {met} |",
        spread(calm, 1).1
    );
}

fn gaps(wire: &str, rounds: usize, cable: &Cable) {
    let (mut calm, mut failing) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        calm.push(run(one_host("flows", wire, 2, cable)).0);
        let world = one_host("flows", wire, 2, cable).env("RHT_FAILURES", "1");
        failing.push(run(world.env_of(1, "RH_STAGE", "rail=1@3000:down:100000")).0);
    }
    show_gap("a queue pair fails at once", wire, &failing, &calm);
}

fn silent_cable(rounds: usize) {
    let (mut calm, mut silent) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for failures in [0, 1] {
            let cable = Cable::new();
            cable.double();
            let world = World::new("flows", 2).env("RAILHEAD_SOCKET_IFNAME", "=rht,rht1").env("RAILHEAD_FORCE_MERGE", "rht,rht1");
            let world = world.env("RAILHEAD_SOFT_WIRE", "tcp").env("RAILHEAD_FABRIC_TIMEOUT_S", &TIMEOUT.as_secs().to_string());
            let world = world.env("RHT_RAILS", "2").env("RHT_FAILURES", &failures.to_string()).env("RHT_CUT", &failures.to_string());
            let mut ranks = (0..2).fold(world, |world, rank| world.wrap(rank, &cable.at(rank))).spawn();
            if failures == 1 {
                ranks.expect(1, "flows");
                cable.swallow("rht1");
            }
            let gap: f64 = ranks.hear(0).parse().expect("milliseconds");
            ranks.hear(1);
            ranks.finish();
            if failures == 1 { silent.push(gap) } else { calm.push(gap) }
        }
    }
    show_gap("a cable says nothing", "tcp", &silent, &calm);
}

/// A number from the environment, or 0.
fn number(name: &str) -> usize {
    std::env::var(name).map_or(0, |value| value.parse().expect(name))
}

/// The one comm of this process's.
fn comm() -> CommSnapshot {
    holdings::comms(std::process::id() as i32).into_iter().find(|comm| !comm.rails.is_empty()).expect("a comm")
}

/// How often rails have failed here, and how many of them are down.
fn failures() -> (usize, usize) {
    let comm = comm();
    (comm.rail_sum(RailCounter::Failures) as usize, comm.rails.iter().filter(|rail| rail.down.is_some()).count())
}

/// One end of a comm, and what it has under way.
struct End<'a> {
    plugin: &'a Plugin,
    comm: Opaque,
    sends: bool,
    mem: Mem,
    mr: Opaque,
    requests: [Option<Opaque>; DEPTH],
}

impl End<'_> {
    /// On RHT_RAILS rails. Rank 1 sends, the other one receives.
    fn new<'a>(ctx: &Ctx, plugin: &'a Plugin, len: usize) -> End<'a> {
        let device = if number("RHT_RAILS") == 1 { 0 } else { plugin.make_vdevice(&[0, 1]).expect("makeVDevice") };
        let comm = comms::one_way(ctx, plugin, device).expect("a comm");
        let mem = Mem::filled(&vec![1; len * DEPTH]);
        let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
        End { plugin, comm, sends: ctx.rank == 1, mem, mr, requests: [None; DEPTH] }
    }

    /// Posts a message in each free place, as far as it goes and `most` allows; how many.
    fn post(&mut self, len: usize, most: usize) -> usize {
        let mut posted = 0;
        for (slot, request) in self.requests.iter_mut().enumerate().filter(|(_, request)| request.is_none()) {
            if posted == most {
                break;
            }
            let at = self.mem.ptr(slot * (self.mem.len() / DEPTH));
            *request = match self.sends {
                true => self.plugin.isend(self.comm, at, len, MESSAGE, self.mr).expect("isend"),
                false => self.plugin.irecv(self.comm, &[Buf { addr: at, len, tag: MESSAGE, mr: self.mr }]).expect("irecv"),
            };
            if request.is_none() {
                break;
            }
            posted += 1;
        }
        posted
    }

    /// The sizes of those that are done.
    fn done(&mut self, mut each: impl FnMut(usize)) {
        for request in &mut self.requests {
            if let Some(sizes) = request.and_then(|request| self.plugin.test(request).expect("test")) {
                *request = None;
                each(sizes[0] as usize);
            }
        }
    }

    /// Polls, as there is no receive with this tag.
    fn poll(&self) {
        assert!(self.plugin.isend(self.comm, self.mem.ptr(0), 1, NONE, self.mr).expect("isend").is_none());
    }

    fn close(self, ctx: &Ctx) {
        ctx.barrier();
        self.plugin.dereg_mr(self.comm, self.mr).expect("deregMr");
        match self.sends {
            true => self.plugin.close_send(self.comm).expect("closeSend"),
            false => self.plugin.close_recv(self.comm).expect("closeRecv"),
        }
    }
}

/// RHT_WARM messages, then so many that are timed; the sender waits between the two until rails have failed RHT_FAILURES times and all are back.
fn streams(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let mut end = End::new(ctx, &plugin, MIB);
    let (warm, wanted) = (number("RHT_WARM"), number("RHT_FAILURES"));
    let all = warm + DEPTH + TIMED;
    let (mut posted, mut done, mut start) = (0, 0, Instant::now());
    spin("the stream", || {
        if end.sends && posted == warm && wanted > 0 {
            spin("the rails", || {
                end.done(|_| done += 1);
                end.poll();
                (failures() == (wanted, 0)).then_some(())
            });
        }
        let most = if posted < warm { warm - posted } else { all - posted };
        posted += end.post(MIB, most);
        end.done(|_| {
            done += 1;
            // They flow again.
            if done == warm + DEPTH {
                start = Instant::now();
            }
        });
        (done == all).then_some(())
    });
    let taken = start.elapsed().as_secs_f64();
    let seen = failures().0;
    assert!(!end.sends || wanted == 0 || seen == wanted, "{seen} failures");
    ctx.say(&if end.sends { seen.to_string() } else { ((TIMED * MIB) as f64 / taken / 1e9).to_string() });
    end.close(ctx);
}

/// Messages until RHT_FAILURES rails have failed, and for a while then; the longest time without one.
fn flows(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let mut end = End::new(ctx, &plugin, SMALL);
    let (mut done, mut last, mut longest) = (0, Instant::now(), Duration::ZERO);
    let wanted = number("RHT_FAILURES");
    if end.sends {
        let (mut until, mut looked, mut cut) = (None, Instant::now(), number("RHT_CUT") == 1);
        spin("the flow", || {
            end.post(SMALL, DEPTH);
            end.done(|_| done += 1);
            if done >= 1000 && std::mem::take(&mut cut) {
                ctx.say("flows");
            }
            if looked.elapsed() > Duration::from_millis(5) {
                looked = Instant::now();
                if until.is_none() && failures().0 >= wanted {
                    until = Some(Instant::now() + FLOW);
                }
            }
            until.is_some_and(|until| Instant::now() > until).then_some(())
        });
        // All are done before the last one goes.
        spin("the last messages", || {
            end.done(|_| ());
            end.requests.iter().all(Option::is_none).then_some(())
        });
        spin("room for one more", || (end.post(1, 1) == 1).then_some(()));
        spin("that one", || {
            end.done(|_| ());
            end.requests.iter().all(Option::is_none).then_some(())
        });
        ctx.say("0");
    } else {
        spin("the flow", || {
            end.post(SMALL, DEPTH);
            let mut over = false;
            end.done(|size| {
                done += 1;
                over |= size == 1;
                let now = Instant::now();
                if done > WARM {
                    longest = longest.max(now - last);
                }
                last = now;
            });
            over.then_some(())
        });
        ctx.say(&(longest.as_secs_f64() * 1e3).to_string());
    }
    end.close(ctx);
}
