//! A rank: what a rule has in hand, the plugin, the other rank and the supervisor. Made and used on the first thread of a rank's process.

mod flow;
mod moves;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::chan::Chan;
use super::verdict::{Stop, Verdict, ensure};
use crate::plugin::Plugin;

pub use flow::Flow;
pub use moves::{Reusable, STAMP, difference, pattern, stamp};

/// First byte of what a rank tells the supervisor.
pub mod word {
    /// The call that it is about to make.
    pub const NOTE: u8 = b'N';
    /// A warning of the plugin.
    pub const WARNING: u8 = b'W';
    /// It reached the end of its part.
    pub const PASSED: u8 = b'P';
    /// The rule is broken.
    pub const FAILED: u8 = b'F';
    /// The rule does not apply.
    pub const SKIPPED: u8 = b'S';
    /// The other rank is gone or far behind.
    pub const ASIDE: u8 = b'A';
}

/// Polls that only yield; after them, each sleeps a moment, so that a rank that hangs leaves the processor to others.
const EAGER_POLLS: u32 = 5000;
const POLL_PAUSE: Duration = Duration::from_micros(50);
/// Longest text of a warning or reason.
const LONGEST_TEXT: usize = 2000;

/// What the ranks of a rule are given.
pub struct Setting<'a> {
    /// The file.
    pub plugin: &'a Path,
    /// Of the interface.
    pub version: u32,
    /// That the rule uses.
    pub device: i32,
    /// That the rule may take.
    pub timeout: Duration,
}

/// One of the two processes of a rule.
pub struct Rank {
    /// 0 or 1. Where data flows one way, 0 receives and 1 sends.
    pub index: usize,
    /// The plugin; initialised, unless the rule does that.
    pub plugin: Plugin,
    /// Device that the rules use.
    pub dev: i32,
    path: PathBuf,
    peer: Option<Chan>,
    parent: Arc<Mutex<Chan>>,
    end: Instant,
    note: Mutex<&'static str>,
    /// Whether the end of the rule is not waited for together.
    alone: AtomicBool,
}

/// Tells the supervisor something.
pub fn tell(parent: &Mutex<Chan>, word: u8, text: &str) {
    let mut message = vec![word];
    message.extend(text.bytes().take(LONGEST_TEXT));
    // A supervisor that is gone has no use for it.
    let _ = parent.lock().unwrap_or_else(PoisonError::into_inner).send(&message);
}

impl Rank {
    /// Loads the plugin and, if the rule wants it `ready`, initialises it.
    pub fn start(setting: &Setting, ready: bool, index: usize, peer: Option<Chan>, parent: &Arc<Mutex<Chan>>) -> Verdict<Rank> {
        tell(parent, word::NOTE, "dlopen");
        let plugin = Plugin::load(setting.plugin, Some(setting.version)).map_err(|e| Stop::Fail(format!("{e:#}")))?;
        let mut rank = Rank {
            index,
            plugin,
            dev: setting.device,
            path: setting.plugin.to_owned(),
            peer,
            parent: parent.clone(),
            end: Instant::now() + setting.timeout,
            note: Mutex::new("dlopen"),
            alone: AtomicBool::new(false),
        };
        if ready {
            rank.init()?;
        }
        Ok(rank)
    }

    /// The end of the rule: a rank that is through waits for the other, which may still need it.
    pub fn end(&self) -> Verdict {
        if self.peer.is_none() || self.alone.load(Ordering::Relaxed) { Ok(()) } else { self.meet() }
    }

    /// Initialises the plugin and makes sure that there is something to check.
    pub fn init(&mut self) -> Verdict {
        self.note("init");
        self.plugin.init()?;
        self.note("devices");
        let devices = self.plugin.devices()?;
        ensure(devices > 0, || "the plugin has no device: nothing was checked".into())?;
        ensure(self.dev < devices, || format!("there is no device {}; the plugin has {devices}, from 0 on", self.dev))
    }

    /// The end of the rule is not waited for together: the other rank will be dead by then.
    pub fn end_alone(&self) {
        // Read on the same thread.
        self.alone.store(true, Ordering::Relaxed);
    }

    /// Passes before the end of the rule, for a rank that dies then.
    pub fn pass(&self) {
        tell(&self.parent, word::PASSED, "");
    }

    /// The plugin once more, as another communicator of this process has it; not initialised.
    pub fn load_again(&self) -> Verdict<Plugin> {
        Plugin::load(&self.path, Some(self.plugin.version())).map_err(|e| Stop::Fail(format!("{e:#}")))
    }

    /// The version of the table.
    pub fn version(&self) -> u32 {
        self.plugin.version()
    }

    /// Tells the supervisor which call is next, in case that it does not return.
    pub fn note(&self, call: &'static str) {
        let mut last = self.note.lock().unwrap_or_else(PoisonError::into_inner);
        if *last != call {
            *last = call;
            tell(&self.parent, word::NOTE, call);
        }
    }

    /// Repeats a step until it gives a value, or the rule's time is over.
    pub fn until<T>(&self, what: &str, mut step: impl FnMut() -> Verdict<Option<T>>) -> Verdict<T> {
        for polls in 0u32.. {
            if let Some(value) = step()? {
                return Ok(value);
            }
            if polls < EAGER_POLLS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(POLL_PAUSE);
            }
            if polls % 64 == 63 && Instant::now() > self.end {
                break;
            }
        }
        Err(Stop::Fail(format!("waited in vain for {what}")))
    }

    fn peer(&self) -> Verdict<&Chan> {
        self.peer.as_ref().ok_or_else(|| Stop::Fail("a rule of one rank talks to another".into()))
    }

    /// Tells the other rank something.
    pub fn say(&self, message: &[u8]) -> Verdict {
        self.peer()?.send(message).map_err(gone)
    }

    /// What the other rank says next. Until then this rank makes no call of the plugin.
    pub fn hear(&self) -> Verdict<Vec<u8>> {
        self.hear_until(self.end)?.ok_or_else(|| Stop::Aside("waited in vain for the other rank".into()))
    }

    /// As `hear`, for a bounded time.
    pub fn hear_within(&self, timeout: Duration) -> Verdict<Option<Vec<u8>>> {
        self.hear_until(Instant::now() + timeout)
    }

    fn hear_until(&self, end: Instant) -> Verdict<Option<Vec<u8>>> {
        self.peer()?.recv_until(end).map_err(gone)
    }

    /// Returns once both ranks have called it.
    pub fn meet(&self) -> Verdict {
        self.say(b"here")?;
        let word = self.hear()?;
        ensure(word == b"here", || format!("the ranks lost step: {:?}", String::from_utf8_lossy(&word)))
    }
}

fn gone(error: std::io::Error) -> Stop {
    Stop::Aside(format!("the other rank is gone: {error}"))
}

/// Context for errors of the operating system that are not the plugin's fault.
pub fn own<T>(what: &str, result: std::io::Result<T>) -> Verdict<T> {
    result.with_context(|| what.to_owned()).map_err(|e| Stop::Fail(format!("railhead itself: {e:#}")))
}
