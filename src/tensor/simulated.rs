//! Workers on the simulated fabric, for `crate::sim`: nobody waits there, so that a manager is polled by whoever runs the schedule, and who would wait
//! looks, and gives up whenever he likes. How workers meet is left out.

use std::sync::Arc;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::mem::UserMemory;
use crate::fabric;
use crate::fabric::sim::World;
use crate::link::Link;
use crate::link::address::Address;
use crate::link::device::Device;
use crate::link::driver::Driven;

use super::adapter::Waiting;
use super::calls::Answer;
use super::core::{Core, Peer};
use super::key::Key;
use super::manager::Manager;
use super::memory::Memory;
use super::rendezvous::Rendezvous;
use super::shared::Shared;
use super::steps::CallId;
use super::value::Tensor;

/// A manager that ends without waiting until the others have heard.
pub struct SimulatedManager(Manager);

impl From<Manager> for SimulatedManager {
    fn from(manager: Manager) -> SimulatedManager {
        SimulatedManager(manager)
    }
}

impl std::ops::Deref for SimulatedManager {
    type Target = Manager;

    fn deref(&self) -> &Manager {
        &self.0
    }
}

impl Drop for SimulatedManager {
    fn drop(&mut self) {
        self.0.shared.driver.with(Core::close);
        self.0.shared.drop_ends(self.0.shared.driver.with(Core::take_ends));
    }
}

/// All rails of a host.
///
/// Errors: one that cannot be opened.
pub fn device(world: &World, host: usize, rails: usize, config: &Config) -> Result<Arc<Device>> {
    let devices = world.devices(host, rails);
    Device::of(config.clone(), &devices.iter().collect::<Vec<&fabric::Device>>(), false)
}

/// Connects two workers.
///
/// Errors: no memory left.
pub fn connect(first: &Manager, second: &Manager) -> Result<()> {
    let (first, second) = (&*first.shared, &*second.shared);
    let end = |of: &Shared| {
        let mut end = Waiting::new(&of.device, of.mode)?;
        let bytes = end.address()?;
        let (mut address, len) = Address::decode(&bytes).map_err(Error::remote)?;
        // No process is looked at: this one would be both.
        address.local.pid_ns = 0;
        let behind = bytes.get(len..).unwrap_or_default();
        Ok::<_, Error>((end, [&address.encode(), behind].concat()))
    };
    let (ours, theirs) = (end(first)?, end(second)?);
    first.connect_end(&second.name, ours.0, &theirs.1)?;
    second.connect_end(&first.name, theirs.0, &ours.1)
}

/// What [`Rendezvous::recv`] and [`Rendezvous::recv_into`] do, by somebody who does not wait.
pub struct Wait {
    step: Rendezvous,
    id: CallId,
    into: Option<Arc<Memory>>,
    gave_up: bool,
}

impl Wait {
    /// Begins it.
    ///
    /// Errors: the manager is closed; memory that cannot be registered.
    pub fn begin(step: &Rendezvous, key: &str, into: Option<UserMemory>) -> Result<Wait> {
        let key = Key::parse(key);
        let into = into.map(|into| step.destination(&key, into)).transpose()?;
        Ok(Wait { step: step.clone(), id: step.begin(key, into.as_ref())?, into, gave_up: false })
    }

    /// What it has ended with, if it has.
    pub fn poll(&self) -> Option<Result<Tensor>> {
        let answer = self.step.shared.driver.with(|core| core.calls.take(self.id));
        answer.map(|answer| self.settle(answer))
    }

    /// Its time is over, if that was not said before: as [`Wait::poll`].
    pub fn give_up(&mut self) -> Option<Result<Tensor>> {
        if std::mem::replace(&mut self.gave_up, true) {
            return None;
        }
        self.step.give_up(self.id).map(|answer| self.settle(answer))
    }

    fn settle(&self, answer: Answer) -> Result<Tensor> {
        self.step.shared.settle(answer, self.into.as_ref())
    }

    /// Whether its time is over.
    pub fn gave_up(&self) -> bool {
        self.gave_up
    }
}

/// Polls it, and copies what is to be sent; whether something has moved.
pub fn poll(manager: &Manager) -> bool {
    manager.shared.with(Driven::poll)
}

/// Errors: a worker to which it was connected is lost.
pub fn check(manager: &Manager) -> Result<()> {
    let check = |core: &mut Core| {
        core.workers.iter().try_for_each(|worker| match &worker.peer {
            Peer::Lost(failure) => Err(failure.error()),
            Peer::Here(_) | Peer::Absent => Ok(()),
        })
    };
    manager.shared.driver.with(check)
}

/// Does something with each of its links.
pub fn for_each_link(manager: &Manager, f: &mut dyn FnMut(&mut Link)) {
    manager.shared.driver.with(|core| {
        for worker in &mut core.workers {
            if let Peer::Here(adapter) = &mut worker.peer {
                f(adapter.link_for_test());
            }
        }
    });
}
