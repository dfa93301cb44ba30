//! Makes a mesh of ranks that meet in a store. On the caller's thread.
//!
//! Each rank stores, under its number, the addresses of its ends towards all others, in the order of their ranks and without itself, as Gloo does. It
//! reads the others', and finds its own peers' ends in them. Nobody posts anything before all have connected: a NIC drops what comes earlier.

use std::sync::Arc;
use std::time::Duration;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::stats::{self, CommKind};
use crate::link::address::Address;
use crate::link::duplex::Unconnected;
use crate::store::{self, Store};

use super::context::Mesh;
use super::device::Device;
use super::pair::Pair;

/// Between two looks whether all queue pairs are connected.
const PAUSE: Duration = Duration::from_micros(200);

impl Mesh {
    /// Connects to all other ranks of `size`. Every rank calls it, with a store in which they meet and whose keys nobody else uses: a prefix of one.
    ///
    /// Errors: a rank or size that cannot be; ranks that did not come in time; ranks of another release, or on another fabric.
    pub fn connect(device: &Arc<Device>, store: &dyn Store, rank: usize, size: usize, timeout: Duration) -> Result<Mesh> {
        if rank >= size {
            return Err(Error::usage(format!("rank {rank} of {size}; ranks are 0 to {}", size.saturating_sub(1))));
        }
        let deadline = clock::now().saturating_add(timeout.as_nanos().try_into().unwrap_or(u64::MAX));
        let left = || Duration::from_nanos(deadline.saturating_sub(clock::now()));
        let config = &device.config;
        let mut ends = Vec::with_capacity(size);
        let mut value = Vec::new();
        for peer in 0..size {
            ends.push(match peer == rank {
                true => None,
                false => {
                    let stats = stats::comm(CommKind::Pair, device.name());
                    let mut end = Unconnected::new(&device.rails(&stats), device.fabric(), device.name(), config, stats, true)?;
                    value.extend(end.address().encode());
                    Some(end)
                }
            });
        }
        store.set(&rank.to_string(), &value).map_err(in_store)?;
        let mut pairs = Vec::with_capacity(size);
        for (peer, end) in ends.into_iter().enumerate() {
            pairs.push(match end {
                None => None,
                Some(end) => {
                    let all = store.get(&peer.to_string(), left()).map_err(|error| missing(peer, error))?;
                    // Its ends stand in the order of ranks, without its own.
                    let remote = nth(&all, if rank < peer { rank } else { rank - 1 })
                        .map_err(|why| Error::remote(format!("rank {peer}: its address {why}")))?;
                    let what = format!("pair of rank {rank} on {} to rank {peer},", device.name());
                    let link = end.connect(&remote, &what, config).map_err(|error| error.within(&format!("rank {peer}")))?;
                    Some(Pair::new(link, peer))
                }
            });
        }
        let mesh = Mesh::new(device.clone(), rank, pairs)?;
        store.barrier("connecting", size as i64, left()).map_err(in_store)?;
        while !mesh.poll_connected()? {
            if left().is_zero() {
                return Err(Error::timeout(format!("rank {rank}: not all ranks have connected in {:.1} s", timeout.as_secs_f64())));
            }
            clock::sleep(PAUSE);
        }
        Ok(mesh)
    }
}

/// The address at this place of a list.
fn nth(bytes: &[u8], place: usize) -> std::result::Result<Address, String> {
    let mut rest = bytes;
    for at in 0.. {
        let (address, len) = Address::decode(rest)?;
        if at == place {
            return Ok(address);
        }
        rest = rest.get(len..).unwrap_or_default();
    }
    Err("is missing".into())
}

fn missing(peer: usize, error: store::Error) -> Error {
    match error {
        store::Error::Timeout(why) => Error::timeout(format!("rank {peer} has not come: {why}")),
        other => in_store(other),
    }
}

fn in_store(error: store::Error) -> Error {
    let words = |why: &dyn std::fmt::Display| format!("the store in which the ranks meet: {why}");
    match error {
        store::Error::System(error) => error,
        store::Error::Timeout(why) => Error::timeout(words(&why)),
        store::Error::Usage(why) => Error::usage(words(&why)),
        other => Error::remote(words(&other)),
    }
}
