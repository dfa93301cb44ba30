//! Workers on the simulated fabric, for `crate::sim`: nobody waits there, so that a manager is polled by whoever runs the schedule. How workers meet, and
//! that whoever waits gives up after a while, is left out.

use std::sync::Arc;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::fabric;
use crate::fabric::sim::World;
use crate::link::Link;
use crate::link::address::Address;
use crate::link::device::Device;
use crate::link::driver::Driven;

use super::adapter::Waiting;
use super::core::{Core, Peer};
use super::manager::Manager;
use super::shared::Shared;

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
        self.0.shared.driver.with(|core| {
            core.close();
            core.disconnect();
        });
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
