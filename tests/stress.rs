//! Stress: random messages, groups, tags and registrations over many comms at once, while peers are stopped, killed, close, or give back memory
//! that they receive into. Every byte, size, tag and order is checked, and every byte of memory beside what was received.
//!
//! A run is a row of short episodes, each of a few processes; all that happens in one follows from its seed, but for what the scheduler
//! decides. A run prints the seed of its first episode, the next has the next number, and one that fails prints its own.
//!
//! `RHT_SEED=n cargo test --profile staged --features stages,sim --target-dir target/stages --test stress -- --nocapture` plays episode n alone;
//! with RHT_STRESS_SECONDS=s as well, episodes n, n + 1, ... until s seconds are over. Without RHT_SEED the first seed is a fixed one, or, with
//! RHT_STRESS_SECONDS (`make soak`), one of the moment's. RHT_ROUNDS=r plays each episode r times: what depends on the scheduler may take some.
//! RHT_LOG=1 shows what the plugin logs.

mod support;

mod stress {
    pub mod arena;
    pub mod episode;
    pub mod plan;
    pub mod rank;
    pub mod registrations;
}

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use stress::episode::{Episode, Fault, Where};
use support::netns::{Cable, usable};
use support::{Random, Ranks, World};

/// Where a run begins that nobody chose a seed for: always the same, so that `make test` is repeatable.
const FIRST: u64 = 1;
/// How long such a run takes.
const BRIEF: Duration = Duration::from_secs(5);

#[test]
fn child_entry() {
    support::enter(&[("episode", stress::rank::run)]);
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

#[test]
fn random_episodes() {
    let (seed, seconds) = (number("RHT_SEED"), number("RHT_STRESS_SECONDS"));
    let (first, length) = match (seed, seconds) {
        (Some(seed), None) => (seed, Duration::ZERO),
        (Some(seed), Some(seconds)) => (seed, Duration::from_secs(seconds)),
        (None, None) => (FIRST, BRIEF),
        // Short enough to be typed.
        (None, Some(seconds)) => (support::seed() >> 32, Duration::from_secs(seconds)),
    };
    let rounds = number("RHT_ROUNDS").unwrap_or(1);
    let cable = usable().then(Cable::new);
    println!("stress: episodes from seed {first} on, for {length:?}");
    let begin = Instant::now();
    let (mut played, mut messages, mut bytes) = (0, 0, 0);
    let mut faults = BTreeMap::new();
    for seed in first.. {
        let episode = Episode::new(seed, cable.is_some());
        for round in 0..rounds {
            let [m, b] = catch_unwind(AssertUnwindSafe(|| play(&episode, cable.as_ref()))).unwrap_or_else(|panic| {
                let after = begin.elapsed();
                eprintln!("stress: RHT_SEED={seed} failed in round {round} of {rounds}, {after:.1?} after the start: {episode:?}");
                resume_unwind(panic)
            });
            (messages, bytes) = (messages + m, bytes + b);
        }
        played += 1;
        *faults.entry(episode.fault.name()).or_insert(0) += 1;
        if begin.elapsed() >= length {
            break;
        }
    }
    let (last, took, gib) = (first + played - 1, begin.elapsed(), bytes as f64 / f64::from(1 << 30));
    println!("stress: {played} episodes, seeds {first} to {last}, {messages} messages, {gib:.1} GiB, {took:.1?}; {faults:?}");
}

fn play(episode: &Episode, cable: Option<&Cable>) -> [u64; 2] {
    let mut world = World::new("episode", episode.ranks).env("RHT_SEED", &episode.seed.to_string());
    world = world.env("RHT_CABLE", if cable.is_some() { "1" } else { "0" });
    for (name, value) in episode.env() {
        world = world.env(name, &value);
    }
    if let Some(cable) = cable {
        for rank in 0..episode.ranks {
            world = match episode.setting.place {
                Where::Here => world,
                Where::TwoRails => world.wrap(rank, &cable.at(0)),
                Where::TwoHosts => world.wrap(rank, &cable.at(rank % 2)),
            };
        }
    }
    let mut ranks = world.spawn();
    let mut random = Random(!episode.seed);
    match episode.fault {
        Fault::None | Fault::Close | Fault::Deregister => {}
        Fault::Pause { rank } => {
            ranks.expect(rank, "moving");
            for _ in 0..=random.below(3) {
                ranks.ranks[rank].signal(libc::SIGSTOP);
                // A long one outlasts all patience but the peer time-out.
                pass(random.below(if random.0.is_multiple_of(8) { 4_000_000 } else { 150_000 }));
                ranks.ranks[rank].signal(libc::SIGCONT);
                pass(random.below(50_000));
            }
        }
        Fault::Kill { rank } => {
            ranks.expect(rank, "moving");
            pass(random.below(5_000));
            ranks.ranks[rank].signal(libc::SIGKILL);
            ranks.ranks[rank].wait();
            return finish(ranks, Some(rank));
        }
        Fault::Stop { rank } => {
            ranks.expect(rank, "moving");
            ranks.ranks[rank].signal(libc::SIGSTOP);
            (0..episode.ranks).filter(|r| *r != rank).for_each(|r| ranks.expect(r, "lost"));
            ranks.ranks[rank].signal(libc::SIGCONT);
        }
    }
    finish(ranks, None)
}

/// Lets time pass in which the ranks run or one does not: what it is for is the chance of where that hits them.
fn pass(microseconds: u64) {
    std::thread::sleep(Duration::from_micros(microseconds));
}

/// Waits until all but the killed one have ended well. Returns how many messages and bytes they received.
fn finish(mut ranks: Ranks, killed: Option<usize>) -> [u64; 2] {
    let mut received = [0, 0];
    for rank in (0..ranks.ranks.len()).filter(|rank| Some(*rank) != killed) {
        let said = ranks.hear(rank);
        for (sum, word) in received.iter_mut().zip(said.split(' ')) {
            *sum += word.parse::<u64>().unwrap_or_else(|_| panic!("rank {rank} says {said}"));
        }
        let status = ranks.ranks[rank].wait();
        assert!(status.success(), "rank {rank}: {status}");
    }
    received
}
