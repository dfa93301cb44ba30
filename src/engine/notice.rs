//! Dumps of engines when a signal comes, for those that ask for it ([`super::Options::dump_signal`]).
//!
//! The signal's handler only writes to a descriptor. A thread reads that, which lives as long as there is such an engine, and has no other task. It
//! looks at the engines from outside, so that one which sleeps, or is stuck in a step, is shown as well.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::Dump;
use crate::base::alarm::{Alarm, Ended};
use crate::base::error::{Error, Result};
use crate::base::fork::PerProcess;
use crate::base::log::{self, log_warn};
use crate::base::signal::Notice;
use crate::base::thread::{self, Cpus};

/// An engine with a thread.
pub trait Watched: Send + Sync {
    /// How it stands.
    fn dump(&self) -> Dump;
}

static WATCH: PerProcess<Arc<Watch>> = PerProcess::new();

#[derive(Default)]
struct Watch {
    /// Taken first. Nobody waits for the thread under it, since an application's logger may make or end engines there.
    life: Mutex<Life>,
    /// Held while dumps are made: who has left it is looked at no more.
    engines: Mutex<Vec<(u64, Arc<dyn Watched>)>>,
}

#[derive(Default)]
struct Life {
    next: u64,
    thread: Option<Reader>,
}

struct Reader {
    thread: JoinHandle<()>,
    stop: Arc<Alarm>,
}

/// An engine's place among those that are shown. Dropping it takes it away, after the dump that is being made.
pub struct Place {
    watch: Arc<Watch>,
    number: u64,
}

/// Shows the engine whenever the signal comes.
///
/// Errors: a signal that cannot be handled; no descriptor or thread to be had.
pub fn watch(signal: i32, engine: Arc<dyn Watched>) -> Result<Place> {
    let watch = WATCH.with(|watch| watch.clone());
    let mut life = lock(&watch.life);
    let notice = Notice::of(signal).map_err(|e| Error::system(format!("handling signal {signal}"), e))?;
    if life.thread.is_none() {
        // A signal that came while there was nobody to show.
        notice.forget();
        let stop = Arc::new(Alarm::new()?);
        let (told, shared) = (stop.clone(), Arc::downgrade(&watch));
        let body = move || {
            // A thread that is to stop leaves signals to its successor.
            while told.wait(&[notice.fd()], None) != Ended::Rung {
                if let (true, Some(watch)) = (notice.forget(), shared.upgrade()) {
                    watch.show();
                }
            }
        };
        let thread = thread::spawn("railhead-signal", &Cpus::default(), body);
        let thread = thread.map_err(|e| Error::system("starting the thread for dumps", e))?;
        life.thread = Some(Reader { thread, stop });
    }
    let number = life.next;
    life.next += 1;
    lock(&watch.engines).push((number, engine));
    drop(life);
    Ok(Place { watch, number })
}

impl Watch {
    fn show(&self) {
        let dumps: Vec<Dump> = lock(&self.engines).iter().map(|(_, engine)| engine.dump()).collect();
        // Not under the lock: the application's logger may do anything. Line by line, as a message has an end.
        for dump in dumps {
            dump.to_string().lines().for_each(|line| log_warn!(log::NET, "{line}"));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut life = lock(&self.watch.life);
        let mut engines = lock(&self.watch.engines);
        let gone = engines.iter().position(|(number, _)| *number == self.number).map(|at| engines.swap_remove(at));
        let last = engines.is_empty();
        drop(engines);
        drop(gone);
        let reader = last.then(|| life.thread.take()).flatten();
        drop(life);
        if let Some(reader) = reader {
            reader.stop.ring();
            // An application's logger may end the last engine on the thread that shows it; that ends right after.
            if reader.thread.thread().id() != std::thread::current().id() {
                let _ = reader.thread.join();
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is under these locks is changed by single assignments and calls.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
