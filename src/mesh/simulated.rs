//! Meshes on the simulated fabric, for `crate::sim`: nobody waits there, so that a collective is a future, and a mesh is polled by whoever runs the
//! schedule. How ranks meet, and that whoever waits gives up after a while, is left out.

use std::pin::Pin;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::mem::UserMemory;
use crate::fabric;
use crate::fabric::sim::World;
use crate::link::Link;
use crate::link::address::Address;
use crate::link::driver::Driven;

use super::coll::{Begun, Work};
use super::core::Peer;
use super::{Device, Mesh, Options, Reduction};

/// A collective that has begun.
pub type Collective<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// A mesh that ends without waiting until its ranks have heard.
pub struct SimulatedMesh(Mesh);

impl SimulatedMesh {
    /// The end of a rank of so many, on a host of its own.
    ///
    /// Errors: no descriptor left.
    pub fn new(world: &World, rank: usize, size: usize, rails: usize, config: &Config) -> Result<SimulatedMesh> {
        let devices = world.devices(rank, rails);
        let device = Device::of(config.clone(), &devices.iter().collect::<Vec<&fabric::Device>>(), false)?;
        Mesh::new(device, rank, size).map(SimulatedMesh)
    }
}

impl std::ops::Deref for SimulatedMesh {
    type Target = Mesh;

    fn deref(&self) -> &Mesh {
        &self.0
    }
}

impl Drop for SimulatedMesh {
    fn drop(&mut self) {
        self.0.with(|core| core.closed = true);
    }
}

/// Connects two ranks.
///
/// Errors: no memory left.
pub fn connect(first: &Mesh, second: &Mesh) -> Result<()> {
    let address = |of: &Mesh, towards: &Mesh| {
        let bytes = of.address(towards.rank())?;
        let (mut address, _) = Address::decode(&bytes).map_err(Error::remote)?;
        // No process is looked at: this one would be both.
        address.local.pid_ns = 0;
        Ok::<_, Error>(address.encode())
    };
    let (ours, theirs) = (address(first, second)?, address(second, first)?);
    first.connect_end(second.rank(), &theirs)?;
    second.connect_end(first.rank(), &ours)
}

/// Whether a rank was told of another one.
pub fn are_connected(mesh: &Mesh, peer: usize) -> bool {
    mesh.with(|core| matches!(core.peers.get(peer), Some(Peer::Here(_))))
}

/// Polls it; whether something has moved.
pub fn poll(mesh: &Mesh) -> bool {
    mesh.with(Driven::poll)
}

/// Errors: one of these ranks, to which it was connected, is lost.
pub fn check(mesh: &Mesh, peers: &[usize]) -> Result<()> {
    mesh.with(|core| peers.iter().try_for_each(|peer| core.pair(*peer).map(drop)))
}

/// Does something with its links to these ranks.
pub fn for_each_link(mesh: &Mesh, peers: &[usize], mut f: impl FnMut(&mut Link)) {
    mesh.with(|core| {
        for peer in peers {
            if let Ok(pair) = core.pair(*peer) {
                f(pair.link_for_test());
            }
        }
    });
}

/// The ranks that it is connected to.
pub fn peers(mesh: &Mesh) -> Vec<usize> {
    mesh.with(|core| core.here())
}

/// What a wait does that ends with an error.
pub fn give_up(mesh: &Mesh, error: &Error) {
    mesh.poison(error);
}

fn begun<'a, M: 'a>(collective: Option<Begun<'a, M, impl Work<M> + 'a>>) -> Collective<'a> {
    Box::pin(async move {
        match collective {
            Some(Begun { run: _run, memory, work }) => work(&memory).await,
            None => Ok(()),
        }
    })
}

/// See [`Mesh::allreduce`].
pub fn allreduce<'a>(mesh: &'a Mesh, memory: UserMemory, reduction: Reduction<'a>, options: Options) -> Result<Collective<'a>> {
    mesh.begin_allreduce(memory, reduction, options).map(begun)
}

/// See [`Mesh::broadcast`].
pub fn broadcast(mesh: &Mesh, memory: UserMemory, root: usize, tag: u32) -> Result<Collective<'_>> {
    mesh.begin_broadcast(memory, root, tag).map(begun)
}

/// See [`Mesh::allgather`].
pub fn allgather<'a>(mesh: &'a Mesh, from: UserMemory, to: UserMemory, lens: &[usize], tag: u32) -> Result<Collective<'a>> {
    mesh.begin_allgather(from, to, lens, tag).map(begun)
}

/// See [`Mesh::alltoall`].
pub fn alltoall<'a>(mesh: &'a Mesh, from: UserMemory, to: UserMemory, out: &[usize], back: &[usize], tag: u32) -> Result<Collective<'a>> {
    mesh.begin_alltoall(from, to, out, back, tag).map(begun)
}

/// See [`Mesh::barrier`].
pub fn barrier(mesh: &Mesh, tag: u32) -> Result<Collective<'_>> {
    mesh.begin_barrier(tag).map(|barrier| begun(Some(barrier)))
}
