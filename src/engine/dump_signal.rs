//! Writes the dumps of engines, and of whatever else waits, to the log when a signal comes ([`super::Options::dump_signal`]).
//!
//! The signal's handler only writes to a descriptor. A thread of its own reads that, from the first such engine to the last. It dumps the engines
//! from outside, so one that sleeps, or is stuck in a step, is shown as well.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::base::error::{Error, Result};
use crate::base::fork::PerProcess;
use crate::base::log::{self, log_warn};
use crate::base::signal::SignalEvent;
use crate::base::sync::lock;
use crate::base::thread::{self, Cpus};
use crate::base::wakeup::{Wakeup, Woken};

/// An engine with a thread, or what else waits.
pub trait DumpSource: Send + Sync {
    /// Its dump, in lines.
    fn dump(&self) -> String;
}

static REGISTRY: PerProcess<Arc<Registry>> = PerProcess::new();

#[derive(Default)]
struct Registry {
    /// Taken first. Not held while the thread is joined: the application's logger, called on it, may make or end engines.
    reader: Mutex<ReaderState>,
    /// Held while dumps are made, so an engine that was removed is not dumped any more.
    engines: Mutex<Vec<(u64, Arc<dyn DumpSource>)>>,
}

#[derive(Default)]
struct ReaderState {
    next_number: u64,
    thread: Option<Reader>,
}

struct Reader {
    thread: JoinHandle<()>,
    stop: Arc<Wakeup>,
}

/// Keeps an engine registered. Dropping it waits for a dump that is being made.
pub struct DumpGuard {
    registry: Arc<Registry>,
    number: u64,
}

/// Dumps the engine whenever the signal comes.
///
/// Errors: a signal that cannot be handled; the system gives no descriptor or thread.
pub fn watch(signal: i32, engine: Arc<dyn DumpSource>) -> Result<DumpGuard> {
    let registry = REGISTRY.with(|registry| registry.clone());
    let mut reader = lock(&registry.reader);
    let event = SignalEvent::of(signal).map_err(|e| Error::system(format!("handling signal {signal}"), e))?;
    if reader.thread.is_none() {
        // Signals that came while there was no engine.
        event.clear();
        let stop = Arc::new(Wakeup::new()?);
        let (stopped, shared) = (stop.clone(), Arc::downgrade(&registry));
        let body = move || {
            // Once stopped it clears no more signals: they are for the next thread.
            while stopped.wait(&[event.fd()], None) != Woken::Notified {
                if let (true, Some(registry)) = (event.clear(), shared.upgrade()) {
                    registry.log_dumps();
                }
            }
        };
        let thread = thread::spawn("railhead-signal", &Cpus::default(), body);
        let thread = thread.map_err(|e| Error::system("starting the thread for dumps", e))?;
        reader.thread = Some(Reader { thread, stop });
    }
    let number = reader.next_number;
    reader.next_number += 1;
    lock(&registry.engines).push((number, engine));
    drop(reader);
    Ok(DumpGuard { registry, number })
}

impl Registry {
    fn log_dumps(&self) {
        let dumps: Vec<String> = lock(&self.engines).iter().map(|(_, engine)| engine.dump()).collect();
        // Not under the lock: the application's logger may do anything. Line by line, because the log cuts long messages.
        for dump in dumps {
            dump.lines().for_each(|line| log_warn!(log::NET, "{line}"));
        }
    }
}

impl Drop for DumpGuard {
    fn drop(&mut self) {
        let mut state = lock(&self.registry.reader);
        let mut engines = lock(&self.registry.engines);
        let removed = engines.iter().position(|(number, _)| *number == self.number).map(|at| engines.swap_remove(at));
        let last = engines.is_empty();
        drop(engines);
        drop(removed);
        let reader = last.then(|| state.thread.take()).flatten();
        drop(state);
        if let Some(reader) = reader {
            reader.stop.notify();
            // The application's logger, called on that thread, may drop the last engine; the thread then ends right after.
            if reader.thread.thread().id() != std::thread::current().id() {
                let _ = reader.thread.join();
            }
        }
    }
}
