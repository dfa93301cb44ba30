//! `railhead_mesh_*`, for C programs: ranks that meet and connect. Casts and checks; what the operations do is `mesh`'s business. On the threads of the
//! host program, which an operation may block up to its timeout.

// What callers owe stands in the header's words, which are these functions' documentation: C's callers do not read "# Safety".
#![allow(clippy::missing_safety_doc)]

use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

use crate::abi::boundary::{Out, read, slice};
use crate::abi::objects::Objects;
use crate::abi::status::{call, railhead_status_t};
use crate::abi::store::convert::text;
use crate::abi::store::{found, railhead_store_t};
use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::link::address::MAX_ADDRESS;
use crate::mesh::{Device, Mesh};

/// One rank's end of a mesh: an opaque handle. Made by railhead_mesh_create, ended by railhead_mesh_close.
///
/// Threads: any, several at a time. Collectives that run at once on a mesh need tags of their own, the same on all ranks. In a forked child the parent's
/// handles are refused. A failure of any of its operations is that of the mesh: all others, and those that follow, fail with the first cause.
#[allow(non_camel_case_types)]
pub struct railhead_mesh_t(());

/// What railhead_mesh_create takes.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct railhead_mesh_config_t {
    /// sizeof(railhead_mesh_config_t).
    pub size: usize,
    /// This process's rank, from 0.
    pub rank: i64,
    /// How many ranks there are, from 1.
    pub ranks: i64,
    /// What operations have that are given no time of their own; 0 or less: 30 s, as Gloo's.
    pub timeout_ms: i64,
    /// 0.
    pub flags: u64,
}

const _: () = assert!(size_of::<railhead_mesh_config_t>() == 40 && std::mem::offset_of!(railhead_mesh_config_t, flags) == 32);

/// Behind a handle.
pub struct Object {
    /// The mesh.
    pub mesh: Mesh,
    /// What operations have that are given no time of their own.
    pub timeout: Duration,
}

static MESHES: Objects<Object> = Objects::new(0xb8, "mesh");

/// As Gloo's context and store.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Makes one rank's end of a mesh, not connected yet.
///
/// `device`: the name of the device that it is on, or several with `+` between them, as `railhead info` lists them; NULL or "" for the first. Which
/// devices there are is said by the same variables as for the plugin (docs/env.md).
///
/// RAILHEAD_USAGE: a rank that is not below `ranks`, a device that there is not, a size or flags of another version.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_mesh_create(
    config: *const railhead_mesh_config_t,
    device: *const c_char,
    mesh: *mut *mut railhead_mesh_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a configuration, a string or NULL, and a place for a handle.
    call(|| unsafe {
        let out = Out::new(mesh, "mesh")?;
        sized("config", read(config.cast(), "config")?, size_of::<railhead_mesh_config_t>())?;
        let config = read(config, "config")?;
        let ranks = usize::try_from(config.ranks).ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks));
        let ranks = ranks.ok_or_else(|| Error::usage(format!("ranks: {}; expected 1 to {MAX_RANKS}", config.ranks)))?;
        let rank = usize::try_from(config.rank).ok().filter(|rank| *rank < ranks);
        let rank = rank.ok_or_else(|| Error::usage(format!("rank: {}; expected 0 to {}", config.rank, ranks - 1)))?;
        if config.flags != 0 {
            return Err(Error::usage(format!("flags: {:#x}; expected 0", config.flags)).into());
        }
        let name = if device.is_null() { "" } else { text(device, "device")? };
        let device = Device::open(Config::from_env(), name)?;
        let timeout = milliseconds(config.timeout_ms).unwrap_or(DEFAULT_TIMEOUT);
        out.set(MESHES.insert(Object { mesh: Mesh::new(device, rank, ranks)?, timeout }));
        Ok(())
    })
}

/// The most ranks of a mesh.
const MAX_RANKS: usize = 65536;

/// Connects to all other ranks, each of which calls it, through a store whose keys nobody else uses (railhead_store_prefix makes one of any). After an
/// error all ranks may try again, with another prefix.
///
/// RAILHEAD_TIMEOUT: a rank did not come in time; RAILHEAD_USAGE: it is connected already, the prefix was used before, or ranks are on different
/// fabrics; RAILHEAD_NETWORK: the store or a rank is lost, or of another release.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_mesh_connect(mesh: *mut railhead_mesh_t, store: *mut railhead_store_t) -> railhead_status_t {
    call(|| {
        let object = the(mesh)?;
        let store = found(store)?;
        Ok(object.mesh.connect(&*store, object.timeout)?)
    })
}

/// Makes another mesh of the same ranks on the same device, connected, without a store: what is done on it has nothing to do with `mesh`. Every rank calls
/// it, one thread at a time.
///
/// RAILHEAD_USAGE: another thread of this rank does so, or 1024 collectives run, before anything is done; RAILHEAD_TIMEOUT, RAILHEAD_NETWORK: a rank did
/// not come, or is lost; RAILHEAD_SYSTEM: no memory or descriptor left. After any other error than the first `mesh` has failed, too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_mesh_fork(mesh: *mut railhead_mesh_t, forked: *mut *mut railhead_mesh_t) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place for a handle.
    call(|| unsafe {
        let (out, object) = (Out::new(forked, "forked")?, the(mesh)?);
        let mesh = object.mesh.fork(object.timeout)?;
        out.set(MESHES.insert(Object { mesh, timeout: object.timeout }));
        Ok(())
    })
}

/// Writes the address of this rank's end towards `peer`, for ranks that tell each other by means of their own: each hands its peer's to
/// railhead_mesh_connect_pair. `*len`: the bytes at `address`; becomes those that the address has, at most RAILHEAD_MESH_ADDRESS. Whoever can read it can
/// connect in the peer's place.
///
/// RAILHEAD_USAGE: a rank that is not another one, or is connected; too few bytes, and `*len` is what it takes then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_mesh_address(
    mesh: *mut railhead_mesh_t,
    peer: i64,
    address: *mut u8,
    len: *mut usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for so many bytes, and for their number.
    call(|| unsafe {
        let (object, has) = (the(mesh)?, read(len, "len")?);
        let bytes = object.mesh.address(object.rank("peer", peer)?)?;
        Out::new(len, "len")?.set(bytes.len());
        if has < bytes.len() {
            return Err(Error::usage(format!("len: {has}; the address has {} bytes", bytes.len())).into());
        }
        Out::new(address, "address")?;
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), address, bytes.len());
        Ok(())
    })
}

/// Bytes of the longest address of a rank's end. The header has it from build.rs.
pub const RAILHEAD_MESH_ADDRESS: usize = 16384;
const _: () = assert!(MAX_ADDRESS <= RAILHEAD_MESH_ADDRESS);

/// Connects this rank to `peer`, whose address towards this rank is given. It does not wait for the peer to do the same; both must have done so before either
/// sends or receives. From the first one on, a thread of the mesh sees to what comes while nobody waits.
///
/// RAILHEAD_USAGE: a rank that is not another one, is connected, or was not given an address by railhead_mesh_address; RAILHEAD_NETWORK: an address that is
/// none, or of another release.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_mesh_connect_pair(
    mesh: *mut railhead_mesh_t,
    peer: i64,
    address: *const u8,
    len: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for so many bytes.
    call(|| unsafe {
        let object = the(mesh)?;
        Ok(object.mesh.connect_pair(object.rank("peer", peer)?, slice(address, len, "address")?)?)
    })
}

/// Whether threads that wait for something on this mesh poll without end (`busy` not 0) instead of sleeping once nothing comes: less delay, at the cost of a
/// core. May be called at any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_mesh_set_sync(mesh: *mut railhead_mesh_t, busy: i32) -> railhead_status_t {
    call(|| {
        the(mesh)?.mesh.set_sync(busy != 0);
        Ok(())
    })
}

/// Ends a handle, and the connections to the other ranks: what other threads still do with it fails with RAILHEAD_USAGE. A rank that waits for this one gets
/// RAILHEAD_NETWORK. Its buffers are closed by their own functions, before or after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_mesh_close(mesh: *mut railhead_mesh_t) -> railhead_status_t {
    call(|| {
        MESHES.remove(mesh)?.mesh.close();
        Ok(())
    })
}

/// What a handle names.
pub fn the(mesh: *mut railhead_mesh_t) -> Result<Arc<Object>> {
    MESHES.get(mesh)
}

impl Object {
    /// A rank of the mesh.
    pub fn rank(&self, what: &str, rank: i64) -> Result<usize> {
        let found = usize::try_from(rank).ok().filter(|rank| *rank < self.mesh.size());
        found.ok_or_else(|| Error::usage(format!("{what}: rank {rank}; expected 0 to {}", self.mesh.size() - 1)))
    }

    /// A time, or what the mesh was given.
    pub fn time(&self, ms: i64) -> Duration {
        milliseconds(ms).unwrap_or(self.timeout)
    }
}

/// A time, if it is one.
pub fn milliseconds(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().filter(|ms| *ms > 0).map(Duration::from_millis)
}

/// Errors: a structure of another version.
pub fn sized(what: &str, given: usize, ours: usize) -> Result<()> {
    if given == ours {
        return Ok(());
    }
    Err(Error::usage(format!("{what}: a size of {given}; this library's has {ours} (sizeof, and a header of the same version)")))
}
