//! A worker's end of all channels: made, connected, closed. Any number of threads.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::mem::UserMemory;
use crate::base::sync::lock;
use crate::engine::{self, DumpGuard};
use crate::link::device::{Device, Registered};
#[cfg(test)]
use crate::link::driver::Driven;
use crate::link::driver::Driver;
use crate::store::Store;

#[cfg(test)]
use super::adapter::Adapter;
use super::adapter::Mode;
#[cfg(test)]
use super::core::Peer;
use super::core::{Core, State};
use super::memory::Pool;
use super::message::NAME_MAX;
use super::rendezvous::Rendezvous;
use super::shared::{PAUSE, Shared, deadline};

/// How long one that is closed waits for what the others are sent to be through, and for the last of it.
const FAREWELL_NS: u64 = 1_000_000_000;

/// A worker's end. It is closed when it is dropped, whatever rendezvous there are.
pub struct Manager {
    pub(super) shared: Arc<Shared>,
    _dumped: Option<DumpGuard>,
}

impl Manager {
    /// The end of the worker of this name, one of `workers`, all in the same mode. It is not connected yet; what it produces for itself needs no connection. With
    /// `tolerate_dup_recv`, as TensorFlow has it, a tensor stays for receives that come later, until its step is cleaned up.
    ///
    /// Errors: names that cannot be; no descriptor left.
    pub fn new(device: Arc<Device>, name: &str, workers: &[&str], tolerate_dup_recv: bool, mode: Mode) -> Result<Manager> {
        let wrong = |name: &&&str| name.is_empty() || name.len() > NAME_MAX || name.contains(';') || name.contains("/device:");
        if let Some(wrong) = workers.iter().find(wrong) {
            return Err(Error::usage(format!(
                "worker {wrong:?}; expected 1 to {NAME_MAX} bytes without a semicolon, and without /device:"
            )));
        }
        let different: HashSet<&str> = workers.iter().copied().collect();
        if different.len() != workers.len() || !different.contains(name) {
            return Err(Error::usage(format!("worker {name:?} of {workers:?}; expected one of them, all of which are different")));
        }
        let others: Vec<&str> = workers.iter().copied().filter(|other| *other != name).collect();
        let driver = Arc::new(Driver::new(Core::new(name, &others, tolerate_dup_recv))?);
        let others = others.into_iter().map(str::to_owned).collect();
        let (pool, notified) = (Pool::new(device.clone()), Arc::downgrade(&driver));
        pool.on_release(move || {
            if let Some(driver) = notified.upgrade() {
                driver.nudge();
            }
        });
        let shared = Arc::new(Shared { device, name: name.to_owned(), others, driver, mode, pool, closing: Mutex::default() });
        let dumped = shared.device.config.dump_signal.number().map(|signal| engine::dump_on_signal(signal, shared.clone()));
        let dumped =
            dumped.and_then(|dumped| dumped.inspect_err(|error| log_warn!(log::NET, "tensors: no dump on a signal: {error}")).ok());
        Ok(Manager { shared, _dumped: dumped })
    }

    /// Connects to all other workers. Every worker calls it, with a store in which they meet and whose keys nobody else uses: a prefix of one.
    /// After an error all workers may try again, with another prefix.
    ///
    /// Errors: workers that did not come in time, or that were given other names; workers of another release, or on another fabric; a manager that is
    /// not new.
    pub fn connect(&self, store: &dyn Store, timeout: Duration) -> Result<()> {
        let shared = &self.shared;
        shared.driver.with(Core::start)?;
        let connected = shared.connect_through(store, timeout);
        let closing = lock(&shared.closing);
        let (started, ends) = shared.driver.with(|core| {
            let started = core.started(connected);
            let ends = if started.is_err() { core.take_ends() } else { Vec::new() };
            (started, ends)
        });
        shared.drop_ends(ends);
        drop(closing);
        started?;
        // From now on the others get their answers, whether or not anybody waits here.
        shared.driver.attend("rh-tensor");
        Ok(())
    }

    /// How far it is.
    pub fn state(&self) -> State {
        self.shared.driver.lock().state()
    }

    /// The rendezvous of a step. What is received there waits until it is initialised.
    pub fn step(&self, id: u64) -> Rendezvous {
        let step = self.shared.driver.with(|core| core.step(id));
        Rendezvous::new(self.shared.clone(), step)
    }

    /// Ends a step: what is not received of it is forgotten, and what waits for it, here or on other workers, fails with "Cleanup ID". So does what
    /// others ask for of it later, unless this worker uses the number again.
    pub fn cleanup(&self, id: u64) {
        self.shared.driver.with(|core| core.cleanup(id));
    }

    /// Ends all steps.
    pub fn cleanup_all(&self) {
        self.shared.driver.with(Core::cleanup_all);
    }

    /// Registers memory for all tensors in it, until [`MemoryHandle::deregister`].
    ///
    /// Errors: none; it overlaps memory that is registered; it cannot be registered.
    pub fn register(&self, memory: UserMemory) -> Result<MemoryHandle> {
        let registered = self.shared.pool.register(memory)?;
        Ok(MemoryHandle { pool: self.shared.pool.clone(), addr: memory.addr(), registered })
    }

    /// Runs the callbacks of receives that are over, and of tensors that are not needed any more, on this thread; if there are none, it waits for the
    /// first, for so long at most. How many it has run. A callback may call whatever it likes.
    pub fn run(&self, timeout: Duration) -> usize {
        let (shared, until) = (&*self.shared, deadline(timeout));
        loop {
            let first = shared.wait(until, |core| match (shared.due(core), shared.next_due(core)) {
                (due, Some(first)) => Some(Some((due, first))),
                (_, None) => core.check().is_err().then_some(None),
            });
            let Some((due, first)) = first.flatten() else { return 0 };
            let mut ran = usize::from(shared.call(first));
            for _ in 1..due {
                let next = shared.next_due(&mut shared.driver.lock());
                let Some(next) = next else { break };
                ran += usize::from(shared.call(next));
            }
            // Else they were parts of several.
            if ran > 0 {
                return ran;
            }
        }
    }

    /// Bytes of tensors that were copied on their way from and to the workers that are connected.
    pub fn copied(&self) -> u64 {
        self.shared.driver.with(|core| core.all_copied())
    }

    /// Whether who waits polls without end instead of sleeping: less delay, and a core that does nothing else.
    pub fn set_sync(&self, busy: bool) {
        self.shared.driver.set_busy(busy);
    }

    /// Ends it: all that waits fails, and so does what comes later; callbacks that were not run are run now, and those that other threads run are over
    /// when it returns, unless they call this. Workers that wait for this one learn that it has gone. It waits for one of this host that is in the
    /// middle of a write to this one's memory, be it stopped; nobody else does.
    pub fn close(&self) {
        let shared = &self.shared;
        let closing = lock(&shared.closing);
        // What others have asked for and is here is theirs: a queue pair that is destroyed sends nothing more.
        let until = clock::now() + FAREWELL_NS;
        while clock::now() < until && !shared.with(Core::is_through) {
            std::thread::yield_now();
        }
        let first = shared.driver.with(Core::close);
        shared.driver.leave();
        let until = clock::now() + FAREWELL_NS;
        while first && clock::now() < until && !shared.driver.with(Core::byes_are_through) {
            std::thread::yield_now();
        }
        if first {
            // Rendezvous may stay for long.
            shared.drop_ends(shared.driver.with(Core::take_ends));
        }
        // Who copies a tensor gives it back, and it is released below.
        while shared.driver.lock().is_filling() {
            clock::sleep(PAUSE);
        }
        drop(closing);
        let next = || shared.next_due(&mut shared.driver.lock());
        while let Some(next) = next() {
            shared.call(next);
        }
        shared.pool.close().into_iter().for_each(|release| release());
        // One that is called meanwhile may close the manager, too.
        while first && shared.driver.lock().calls.is_calling_elsewhere() {
            clock::sleep(PAUSE);
        }
    }
}

/// Memory that is registered for tensors. It stays registered if this is dropped.
pub struct MemoryHandle {
    pool: Arc<Pool>,
    addr: usize,
    registered: Weak<Registered>,
}

impl MemoryHandle {
    /// Ends that: nobody reads or writes the memory afterwards. A second call does nothing.
    ///
    /// Errors: tensors are in it that are sent or received.
    pub fn deregister(&self) -> Result<()> {
        self.pool.deregister(self.addr, &self.registered)
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
impl Manager {
    /// Until this thread waits, or has waited.
    pub fn until_waited_for<T>(&self, waits: &std::thread::ScopedJoinHandle<'_, T>) {
        self.shared.driver.until_waited_for(waits);
    }

    /// Keeps what this worker is told from it until the function is over.
    pub fn with_driver_locked<T>(&self, f: impl FnOnce() -> T) -> T {
        let _core = self.shared.driver.lock();
        f()
    }

    /// Whether it is closed, or another thread closes it.
    pub fn is_closed(&self) -> bool {
        self.shared.driver.lock().has_failed()
    }

    /// How many steps there are.
    pub fn steps(&self) -> usize {
        self.shared.driver.lock().steps()
    }

    /// Does something to the channel with a worker.
    pub fn with_adapter<T>(&self, name: &str, f: impl FnOnce(&mut Adapter) -> T) -> Option<T> {
        self.shared.driver.with(|core| {
            let worker = core.workers.iter_mut().find(|worker| worker.name == name)?;
            if let Peer::Here(adapter) = &mut worker.peer { Some(f(adapter)) } else { None }
        })
    }
}
