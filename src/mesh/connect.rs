//! Connects the ranks of a mesh: by addresses that the caller carries, through a store in which all ranks meet, or over another mesh. On the caller's
//! thread.
//!
//! In a store each rank stores, under its number, the addresses of its ends towards all others, in the order of their ranks and without itself, as Gloo
//! does, but in fewer bytes. It reads the others', and finds its own peers' ends in them. Nobody posts anything before all have connected: a NIC drops what comes earlier.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::fd;
use crate::base::stats::WaitCause;
use crate::base::wakeup::{Wakeup, Woken};
use crate::link::Failure;
use crate::link::address::{Address, MAX_ADDRESS};
use crate::link::driver::Driven;
use crate::store::{Deadline, Exchange, FOREVER, Member, Store};

use super::addresses;
use super::coll::{FORK, Options};
use super::context::{Borrowed, Context, Mesh, POOL};
use super::core::{Peer, named};
use super::pair::Pair;
use super::running::Run;

/// The first pause, if nothing comes, before another look whether queue pairs are connected, and the longest: a peer's listener may have been full.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// Bytes of addresses that are read at once.
const READ_AT_ONCE: usize = 1 << 20;

impl Context {
    /// The address of this rank's end towards another, which that has to be published. It makes the end if there is none.
    ///
    /// Errors: a rank that is not another, or is connected; no memory or queue pair left.
    pub fn address(&self, peer: usize) -> Result<Vec<u8>> {
        self.with(|core| {
            let end = self.other(peer).and_then(|()| {
                let end = core.peers.get_mut(peer).ok_or_else(|| Error::internal("a rank without a place"))?;
                if matches!(end, Peer::Absent) {
                    let made = self.device.end()?;
                    made.stats().set_ranks(self.rank(), peer);
                    made.stats().sample(WaitCause::Handshake, clock::now());
                    *end = Peer::Unconnected(Box::new(made));
                }
                Ok(end)
            })?;
            match end {
                Peer::Unconnected(end) => Ok(end.address().encode()),
                Peer::Lost(failure) => Err(failure.error()),
                _ => Err(Error::usage(format!("rank {peer} is connected already"))),
            }
        })
    }

    /// Connects this rank's end to another's, with that one's address of its end towards this rank. Nothing must be asked of either before both ranks
    /// have connected. From now on what comes is seen to while nobody waits: the peer's end may be made, and reach this one, at any time.
    ///
    /// Errors: as for [`Context::address`]; an address that is none, or of a rank on another fabric.
    pub fn connect_pair(&self, peer: usize, address: &[u8]) -> Result<()> {
        self.connect_end(peer, address)?;
        self.driver.attend("rh-mesh");
        Ok(())
    }

    /// The same, for whoever waits until the peer's end is there.
    pub(super) fn connect_end(&self, peer: usize, address: &[u8]) -> Result<()> {
        self.other(peer)?;
        let wrong = |why: String| Error::remote(format!("rank {peer}: its address {why}"));
        let (remote, len) = Address::decode(address).map_err(wrong)?;
        if len != address.len() {
            return Err(wrong(format!("has {} bytes more than it needs", address.len() - len)));
        }
        self.with(|core| {
            let place = core.peers.get_mut(peer).ok_or_else(|| Error::internal("a rank without a place"))?;
            let end = match std::mem::replace(place, Peer::Absent) {
                Peer::Unconnected(end) => *end,
                Peer::Absent => return Err(Error::usage(format!("rank {peer} was not told this rank's address towards it"))),
                Peer::Lost(failure) => {
                    *place = Peer::Lost(failure.clone());
                    return Err(failure.error());
                }
                here @ Peer::Here(_) => {
                    *place = here;
                    return Err(Error::usage(format!("rank {peer} is connected already")));
                }
            };
            let what = format!("pair of rank {} on {} to rank {peer},", self.rank(), self.device.name());
            let link = end.connect(&remote, &what, &self.device.config).map_err(|error| named(peer, error))?;
            core.set_connected(peer, Pair::new(link, peer));
            Ok(())
        })
    }

    /// Connects to all other ranks. Every rank calls it, with a store in which they meet and whose keys nobody else uses: a prefix of one. After an error
    /// all ranks may try again, with another prefix.
    ///
    /// Errors: some ranks are connected already; a prefix that was used before; ranks that did not come in time; ranks of another release, or on another fabric.
    pub fn connect(&self, store: &dyn Store, timeout: Duration) -> Result<()> {
        if self.connecting.swap(true, Ordering::Relaxed) {
            return Err(Error::usage("the mesh is connected already, or another thread connects it"));
        }
        let is_connected = |peer: &Peer| matches!(peer, Peer::Here(_) | Peer::Lost(_));
        if self.with(|core| core.peers.iter().any(is_connected)) {
            self.connecting.store(false, Ordering::Relaxed);
            return Err(Error::usage("some ranks are connected already, by their addresses: so must all others be"));
        }
        let connected = self.connect_through(store, timeout).and_then(|()| self.check());
        if let Err(error) = &connected {
            self.with(|core| {
                core.disconnect(&Failure::from_error(error));
                self.attempts.fetch_add(1, Ordering::Relaxed);
            });
            self.driver.resume();
        }
        self.connecting.store(connected.is_ok(), Ordering::Relaxed);
        connected
    }

    fn connect_through(&self, store: &dyn Store, timeout: Duration) -> Result<()> {
        self.check()?;
        let member = |rank: usize| Member { key: rank.to_string(), words: format!("rank {rank}") };
        let exchange = Exchange::new(store, "ranks", member(self.rank()), timeout);
        let deadline = Deadline::after(timeout);
        let others: Vec<Member> = self.others().map(member).collect();
        exchange.claim()?;
        let connected = self.connect_to_all(&exchange, &others).and_then(|()| self.wait_connected(deadline, timeout, None));
        connected.map_err(|error| exchange.first_cause(error))
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.rank();
        (0..self.size()).filter(move |peer| *peer != own)
    }

    fn connect_to_all(&self, exchange: &Exchange<'_>, others: &[Member]) -> Result<()> {
        self.check_descriptors(others.len())?;
        let addresses = addresses::encode(&self.others().map(|peer| self.address(peer)).collect::<Result<Vec<_>>>()?)?;
        exchange.publish(&addresses)?;
        let most = (READ_AT_ONCE / addresses.len().max(1)).max(1);
        // One is waited for, and then those behind it are here as a rule: ever more are read at once.
        let (mut rest, mut at_once) = (others, 1);
        while let Some(first) = rest.first() {
            let part = rest.get(..at_once).unwrap_or(rest);
            let keys: Vec<&str> = part.iter().map(|member| member.key.as_str()).collect();
            let published = if at_once == 1 { Some(vec![exchange.fetch(first)?]) } else { exchange.fetch_all(&keys)? };
            at_once = if published.is_some() { (2 * at_once).min(most) } else { 1 };
            let published = published.unwrap_or_default();
            for (all, peer) in published.iter().zip(self.others().skip(others.len() - rest.len())) {
                self.connect_to(peer, all)?;
            }
            rest = rest.get(published.len()..).unwrap_or_default();
        }
        exchange.wait_for_all(others)
    }

    /// Errors: fewer descriptors are left to the process than so many pairs will take, and scratch memory.
    fn check_descriptors(&self, pairs: usize) -> Result<()> {
        let need = pairs * self.device.descriptors_per_link() + if pairs > 0 { POOL } else { 0 };
        match fd::left() {
            Some(left) if left < need => Err(Error::system(
                format!(
                    "{} ranks: the pairs and the scratch memory of rank {} take {need} descriptors more, and {left} are left",
                    self.size(),
                    self.rank()
                ),
                std::io::Error::from_raw_os_error(libc::EMFILE),
            )),
            _ => Ok(()),
        }
    }

    /// Connects to a rank that has told the addresses of all its ends.
    fn connect_to(&self, peer: usize, addresses: &[u8]) -> Result<()> {
        // Its ends stand in the order of ranks, without its own.
        let place = if self.rank() < peer { self.rank() } else { self.rank() - 1 };
        let found = addresses::find(addresses, place).map_err(|why| Error::remote(format!("rank {peer}: its address {why}")))?;
        match (found, self.size()) {
            ((Some(address), others), own) if others + 1 == own => self.connect_end(peer, &address),
            ((_, others), own) => Err(Error::usage(format!("rank {peer}: it is one of {} ranks, this rank one of {own}", others + 1))),
        }
    }

    /// Waits until all ranks that are here are connected, asleep while nothing comes from those that are not. `over`: the mesh whose ranks they are, none of
    /// which may be lost meanwhile.
    pub(super) fn wait_connected(&self, deadline: Deadline, timeout: Duration, over: Option<&Context>) -> Result<()> {
        let mut late = self.with(|core| core.here());
        let (sleep, mut fds) = (Wakeup::new()?, Vec::new());
        self.with(|core| core.arm_all(&late, &mut fds))?;
        let (mut pause, mut woken) = (PAUSE, 0);
        loop {
            let before = late.len();
            // First, whether it was closed meanwhile.
            let polled = self.with(|core| core.check().and_then(|()| core.poll_connecting(&mut late)));
            if let Some(over) = over {
                // Looked at last, and what it says goes first: whoever gives up says why there, and closes this one's pairs then.
                over.with(|core| {
                    // A bye counts once nothing is left that came before it.
                    while core.poll() && polled.is_err() && !deadline.passed() {}
                    core.check_ranks()?;
                    // One that has left, as it cannot go on or was closed, comes no more: nobody leaves rightly before all have all.
                    (0..core.peers.len()).filter(|rank| *rank != over.rank()).try_for_each(|rank| core.pair(rank).map(drop))
                })?;
            }
            polled?;
            let Some(first) = late.first() else { return Ok(()) };
            if deadline.passed() {
                return Err(Error::timeout(format!("rank {first}: it has not connected in {:.1} s", timeout.as_secs_f64())));
            }
            if late.len() < before {
                (pause, woken) = (PAUSE, 0);
                continue;
            }
            match sleep.wait(&fds, Some(deadline.left().map_or(pause, |left| left.min(pause)))) {
                Woken::TimedOut => (pause, woken) = ((2 * pause).min(LONGEST_PAUSE), 0),
                _ => woken += 1,
            }
            if woken > 1 {
                // For none of those, again: a rank that is connected has begun already.
                self.with(Driven::poll);
            }
        }
    }

    /// Errors: not another rank.
    fn other(&self, peer: usize) -> Result<()> {
        if peer < self.size() && peer != self.rank() {
            return Ok(());
        }
        Err(Error::usage(format!("rank {peer}; expected 0 to {}, and not this rank, {}", self.size() - 1, self.rank())))
    }
}

/// Of an address behind its length.
pub(super) const PLACE: usize = 8 + MAX_ADDRESS;

impl Mesh {
    /// Another mesh of the same ranks, on the same device: its collectives and messages have nothing to do with this one's. Every rank calls it; one at a
    /// time, of which another one is refused before anything is done.
    ///
    /// Errors: as for [`Context::connect`], and a collective; this mesh has failed then, too.
    pub fn fork(&self, timeout: Duration) -> Result<Mesh> {
        let run = self.begin_swap(FORK)?;
        // The others begin without this one if it cannot, so this mesh fails, too.
        let (mesh, out) = self.fork_ends().inspect_err(|error| self.poison(error))?;
        // Closed after that: ranks that are connected to it then learn that it has gone.
        self.connect_fork(&run, &mesh, out, timeout).inspect_err(|error| self.poison(error))?;
        Ok(mesh)
    }

    /// A mesh that is not connected, and the addresses of its ends.
    pub(super) fn fork_ends(&self) -> Result<(Mesh, Borrowed<'_>)> {
        self.check_descriptors(self.size() - 1)?;
        let mesh = Mesh::new(self.device.clone(), self.rank(), self.size())?;
        mesh.connecting.store(true, Ordering::Relaxed);
        let out = self.scratch(self.size() * PLACE)?;
        for peer in self.others() {
            let address = mesh.address(peer)?;
            out.view(peer * PLACE, 8)?.write(&address.len().to_le_bytes());
            out.view(peer * PLACE + 8, address.len())?.write(&address);
        }
        Ok((mesh, out))
    }

    /// Connects it to the others' ends.
    fn connect_fork(&self, run: &Run<'_>, mesh: &Mesh, out: Borrowed<'_>, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let left = || deadline.left().unwrap_or(FOREVER);
        let back = self.scratch(self.size() * PLACE)?;
        self.swap(run, &out, &back, PLACE, left())?;
        for peer in self.others() {
            let mut len = [0; 8];
            back.view(peer * PLACE, 8)?.read(&mut len);
            let mut address = vec![0; usize::from_le_bytes(len).min(MAX_ADDRESS)];
            back.view(peer * PLACE + 8, address.len())?.read(&mut address);
            mesh.connect_end(peer, &address)?;
        }
        out.give_back();
        back.give_back();
        mesh.wait_connected(deadline, timeout, Some(self)).inspect_err(|error| {
            self.with(|core| core.lost_by(&mesh.driver.lock()));
            self.give_up(error);
        })?;
        // Who has all may post to them, or close it.
        self.barrier(Options::forking(left()))
    }
}
