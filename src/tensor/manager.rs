//! A worker's end of all channels: connects it to the other workers by their names, and runs callbacks. Any number of threads.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::link::device::Device;
use crate::link::driver::Driver;
use crate::store::{Deadline, Meeting, Store};

use super::adapter::Waiting;
use super::calls::Answer;
use super::core::{Core, Peer};
use super::message::NAME_MAX;
use super::rendezvous::Rendezvous;
use super::value::Tensor;

/// Between two looks whether all queue pairs are connected.
const PAUSE: Duration = Duration::from_micros(200);
/// How long one that is closed waits for the last that the others were sent to be through.
const FAREWELL_NS: u64 = 100_000_000;

/// What the manager's parts share.
pub struct Shared {
    device: Arc<Device>,
    pub(super) name: String,
    others: Vec<String>,
    pub(super) driver: Arc<Driver<Core>>,
    connecting: AtomicBool,
}

/// A worker's end. It is closed when it is dropped, whatever rendezvous there are.
pub struct Manager(Arc<Shared>);

impl Manager {
    /// The end of the worker of this name, one of `workers`. It is not connected yet; what it produces for itself needs no connection. With
    /// `tolerate_dup_recv`, as TensorFlow has it, a tensor stays for receives that come later, until its step is cleaned up.
    ///
    /// Errors: names that cannot be; no descriptor left.
    pub fn new(device: Arc<Device>, name: &str, workers: &[&str], tolerate_dup_recv: bool) -> Result<Manager> {
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
        Ok(Manager(Arc::new(Shared { device, name: name.to_owned(), others, driver, connecting: AtomicBool::new(false) })))
    }

    /// Connects to all other workers. Every worker calls it, with a store in which they meet and whose keys nobody else uses: a prefix of one.
    /// After an error all workers may try again, with another prefix.
    ///
    /// Errors: workers that did not come in time, or that were given other names; workers of another release, or on another fabric.
    pub fn connect(&self, store: &dyn Store, timeout: Duration) -> Result<()> {
        if self.0.connecting.swap(true, Ordering::Relaxed) {
            return Err(Error::usage("the manager is connected already, or another thread connects it"));
        }
        let connected = self.0.connect_through(store, timeout);
        match &connected {
            // From now on the others get their answers, whether or not anybody waits here.
            Ok(()) => self.0.driver.attend("rh-tensor"),
            Err(_) => {
                self.0.driver.with(|core| core.workers.iter_mut().for_each(|worker| worker.peer = Peer::Absent));
                self.0.connecting.store(false, Ordering::Relaxed);
            }
        }
        connected
    }

    /// The rendezvous of a step. What is received there waits until it is initialised.
    pub fn step(&self, id: u64) -> Rendezvous {
        let step = self.0.driver.with(|core| core.step(id));
        Rendezvous::new(self.0.clone(), step)
    }

    /// Ends a step: what is not received of it is forgotten, and what waits for it fails with "Cleanup ID". The number should not be used again, as
    /// other workers may be late.
    pub fn cleanup(&self, id: u64) {
        self.0.driver.with(|core| core.cleanup(id));
    }

    /// Ends all steps.
    pub fn cleanup_all(&self) {
        self.0.driver.with(Core::cleanup_all);
    }

    /// Runs the callbacks of receives that are over, on this thread; if there are none, it waits for the first, for so long at most. How many it
    /// has run. A callback may call whatever it likes.
    pub fn run(&self, timeout: Duration) -> usize {
        let due = self.0.wait(timeout, |core| Some(core.calls.due()).filter(|due| *due > 0 || core.check().is_err()));
        self.0.run_due(due.unwrap_or(0))
    }

    /// Whether who waits polls without end instead of sleeping: less delay, and a core that does nothing else.
    pub fn set_sync(&self, busy: bool) {
        self.0.driver.set_busy(busy);
    }

    /// Ends it: all that waits fails, and so does what comes later; callbacks that were not run are run now. Workers that wait for this one learn
    /// that it has gone.
    pub fn close(&self) {
        let shared = &self.0;
        let first = shared.driver.with(Core::close);
        shared.driver.leave();
        // What workers were sent in this one's last moments is theirs: a queue pair that is destroyed sends nothing more.
        let until = clock::now() + FAREWELL_NS;
        while first && clock::now() < until && !shared.driver.with(Core::byes_are_through) {
            std::thread::yield_now();
        }
        if first {
            // Rendezvous may stay for long.
            shared.driver.with(|core| core.workers.iter_mut().for_each(|worker| worker.peer = Peer::Absent));
        }
        while shared.run_due(1) > 0 {}
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Waits until `look` finds something, for so long at most. It reports receives that take too long.
    pub(super) fn wait<T>(&self, timeout: Duration, mut look: impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        let deadline = clock::now().saturating_add(timeout.as_nanos().try_into().unwrap_or(u64::MAX));
        let limit = self.device.config.stall_warn_s.nanos();
        self.driver.wait(|now| {
            let mut core = self.driver.lock();
            let found = look(&mut core);
            if found.is_some() || now >= deadline {
                return Ok(found);
            }
            let (stalled, next) = if limit > 0 { core.calls.stalled(now, limit) } else { (None, u64::MAX) };
            drop(core);
            if let Some(stalled) = stalled {
                log_warn!(log::NET, "stalled: worker {} waited for {stalled}", self.name);
            }
            Err(deadline.min(next))
        })
    }

    /// The tensor of a receive that is over. It is copied out without the lock.
    pub(super) fn settle(&self, answer: Answer) -> Result<Tensor> {
        match answer {
            Answer::Here(tensor) => Ok(tensor),
            Answer::Failed(error) => Err(error),
            Answer::Landed(worker, landed) => {
                let tensor = landed.copy();
                self.driver.with(|core| core.consumed(worker, landed.index));
                tensor
            }
        }
    }

    /// Runs at most so many callbacks.
    fn run_due(&self, most: usize) -> usize {
        for done in 0..most {
            let Some((callback, answer)) = self.driver.lock().calls.next_due() else { return done };
            callback(self.settle(answer));
        }
        most
    }

    /// Each worker tells all others, under its name, the addresses of its ends towards them: `{u16 size, name, u32 size, address}` for each.
    fn connect_through(&self, store: &dyn Store, timeout: Duration) -> Result<()> {
        let (meeting, deadline) = (Meeting::new(store, "workers", timeout), Deadline::after(timeout));
        let key = |name: &str| format!("worker/{name}");
        let (mut ends, mut addresses) = (Vec::new(), Vec::new());
        for name in &self.others {
            let mut end = Waiting::new(&self.device)?;
            let address = end.address()?;
            addresses.extend((name.len() as u16).to_le_bytes());
            addresses.extend(name.as_bytes());
            addresses.extend((address.len() as u32).to_le_bytes());
            addresses.extend(address);
            ends.push(end);
        }
        meeting.tell(&key(&self.name), &addresses)?;
        for (index, (name, end)) in self.others.iter().zip(ends).enumerate() {
            let who = format!("worker {name}");
            let all = meeting.hear(&key(name), &who)?;
            let told = address_of(&self.name, &all).ok_or_else(|| Error::usage(format!("it was not told of worker {}", self.name)));
            let what = format!("channel of {} to {name},", self.name);
            let adapter = told.and_then(|address| end.connect(address, &what, &self.device)).map_err(|error| error.within(&who))?;
            self.driver.with(|core| {
                if let Some(worker) = core.workers.get_mut(index) {
                    worker.peer = Peer::Here(Box::new(adapter));
                }
            });
        }
        let others: Vec<_> = self.others.iter().map(|name| (key(name), format!("worker {name}"))).collect();
        meeting.wait_for_all(&key(&self.name), &others)?;
        while !self.driver.with(Core::poll_connected)? {
            if deadline.passed() {
                let time = timeout.as_secs_f64();
                return Err(Error::timeout(format!("worker {}: not all workers have connected in {time:.1} s", self.name)));
            }
            clock::sleep(PAUSE);
        }
        Ok(())
    }
}

/// The address that a worker has told the one of this name.
fn address_of<'a>(name: &str, mut rest: &'a [u8]) -> Option<&'a [u8]> {
    loop {
        let (len, after) = rest.split_first_chunk()?;
        let (other, after) = after.split_at_checked(u16::from_le_bytes(*len).into())?;
        let (len, after) = after.split_first_chunk()?;
        let (address, after) = after.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        if other == name.as_bytes() {
            return Some(address);
        }
        rest = after;
    }
}

#[cfg(test)]
impl Manager {
    /// Until this thread waits, or has waited.
    pub fn until_waited_for<T>(&self, waits: &std::thread::ScopedJoinHandle<'_, T>) {
        self.0.driver.until_waited_for(waits);
    }

    /// Writes this into a worker's message buffer, where no packet begins like that.
    pub fn send_garbage(&self, name: &str, bytes: &[u8]) {
        self.0.driver.with(|core| {
            for worker in core.workers.iter_mut().filter(|worker| worker.name == name) {
                if let Peer::Here(adapter) = &mut worker.peer {
                    adapter.send_garbage(bytes);
                }
            }
        });
    }
}
