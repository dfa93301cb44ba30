//! Stress: random messages, groups, tags and registrations over many comms at once, while peers are stopped, killed, close, or give back memory
//! that they receive into. Every byte, size, tag and order is checked, and every byte of memory beside what was received.
//!
//! A run is a row of short episodes, each of a few processes; all that happens in one follows from its seed, but for what the scheduler
//! decides. A run prints the seed of its first episode, the next has the next number, and one that fails prints its own.
//!
//! `RHT_SEED=n cargo test --profile staged --features stages --target-dir target/stages --test stress -- --nocapture` plays episode n alone;
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
    let mut played = 0;
    for seed in first.. {
        let episode = Episode::new(seed, cable.is_some());
        for round in 0..rounds {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| play(&episode, cable.as_ref()))) {
                eprintln!(
                    "stress: RHT_SEED={seed} failed in round {round} of {rounds}, {:.1?} after the start: {episode:?}",
                    begin.elapsed()
                );
                resume_unwind(panic);
            }
        }
        played += 1;
        if begin.elapsed() >= length {
            break;
        }
    }
    println!("stress: {played} episodes, seeds {first} to {}, {:.1?}", first + played - 1, begin.elapsed());
}

fn play(episode: &Episode, cable: Option<&Cable>) {
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
                pass(random.below(150_000));
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
    finish(ranks, None);
}

/// Lets time pass in which the ranks run or one does not: what it is for is the chance of where that hits them.
fn pass(microseconds: u64) {
    std::thread::sleep(Duration::from_micros(microseconds));
}

/// Waits until all but the killed one have ended well.
fn finish(mut ranks: Ranks, killed: Option<usize>) {
    for (rank, process) in ranks.ranks.iter_mut().enumerate().filter(|(rank, _)| Some(*rank) != killed) {
        let status = process.wait();
        assert!(status.success(), "rank {rank}: {status}");
    }
}
