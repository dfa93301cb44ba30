//! Connects a worker to all others, through a store in which they meet. On the caller's thread.

use std::time::Duration;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::store::{Deadline, Exchange, Member, Store};

use super::adapter::Waiting;
use super::core::Core;
use super::shared::{PAUSE, Shared};

impl Shared {
    /// Each worker tells all others, under its name, the addresses of its ends towards them: `{u16 size, name, u32 size, address}` for each.
    pub(super) fn connect_through(&self, store: &dyn Store, timeout: Duration) -> Result<()> {
        let member = |name: &str| Member { key: format!("worker/{name}"), words: format!("worker {name}") };
        let exchange = Exchange::new(store, "workers", member(&self.name), timeout);
        let deadline = Deadline::after(timeout);
        let others: Vec<Member> = self.others.iter().map(|name| member(name)).collect();
        exchange.claim()?;
        let connected = self.connect_to_all(&exchange, &others).and_then(|()| self.wait_connected(deadline, timeout));
        connected.map_err(|error| exchange.first_cause(error))
    }

    fn connect_to_all(&self, exchange: &Exchange<'_>, others: &[Member]) -> Result<()> {
        let (mut ends, mut addresses) = (Vec::new(), Vec::new());
        for name in &self.others {
            let mut end = Waiting::new(&self.device, self.mode)?;
            let address = end.address()?;
            addresses.extend((name.len() as u16).to_le_bytes());
            addresses.extend(name.as_bytes());
            addresses.extend((address.len() as u32).to_le_bytes());
            addresses.extend(address);
            ends.push(end);
        }
        exchange.publish(&addresses)?;
        for ((name, member), end) in self.others.iter().zip(others).zip(ends) {
            let all = exchange.fetch(member)?;
            let told = address_of(&self.name, &all).ok_or_else(|| Error::usage(format!("it was not told of worker {}", self.name)));
            let connected = told.and_then(|address| self.connect_end(name, end, address));
            connected.map_err(|error| error.within(&member.words))?;
        }
        exchange.wait_for_all(others)
    }

    /// Connects the end towards the worker of this name to that worker's, which has this address.
    pub(super) fn connect_end(&self, name: &str, end: Waiting, address: &[u8]) -> Result<()> {
        let what = format!("channel of {} to {name},", self.name);
        let adapter = end.connect(name, address, &what, &self.device, &self.pool)?;
        self.driver.with(|core| core.connected(name, adapter));
        Ok(())
    }

    fn wait_connected(&self, deadline: Deadline, timeout: Duration) -> Result<()> {
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
