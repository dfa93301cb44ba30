//! The state of the process: the [`Net`] that `init` opens, the contexts of communicators, the comms. [`super::plugin`] calls it, on the host's
//! threads.
//!
//! The `Net` lives from the first `init` until the last context is finalized and the last comm is closed. ABI versions before 11 have no
//! finalize: theirs lives on, and an `init` that finds nothing open replaces it by one with the environment's present settings.
//!
//! A forked child starts from nothing: the parent's descriptors are closed (see `base::fd`), its state is set aside untouched, for its locks
//! may be held and its memory is not all here, and the child's `init` makes new state.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_char};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::abi::comm_table::{AnyComm, CommDevice, CommTable};
use crate::abi::handle::{Handle, Kind};
use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use crate::base::{fork, log};
use crate::net::Net;

/// Everything the library keeps for this process.
pub(super) struct Instance {
    epoch: u64,
    /// How many forks lie between the first initialisation and this process, modulo 256.
    pub number: u8,
    /// What C holds handles of.
    pub comms: CommTable,
    state: Mutex<State>,
    // The parent's, kept reachable and otherwise left alone.
    _parent: Option<&'static Instance>,
}

#[derive(Default)]
struct State {
    net: Option<Arc<Net>>,
    contexts: BTreeMap<u64, Context>,
    next_context: u64,
    // Whether a table without finalize counts on `net`.
    unfinalized: bool,
    open_comms: usize,
    // C strings given out in properties. NCCL prints device names long after it asked, so they stay; a name is kept once.
    strings: BTreeSet<&'static std::ffi::CStr>,
}

#[derive(Clone, Copy)]
struct Context {
    traffic_class: Option<i32>,
}

// The Release store publishes a finished Instance; pairs with the Acquire load in `current`.
static PROCESS: AtomicPtr<Instance> = AtomicPtr::new(std::ptr::null_mut());

#[inline]
fn last() -> Option<&'static Instance> {
    // SAFETY: the reference requires NULL, or an Instance that is initialised, lives as long as the process and is never borrowed mutably. The pointer
    // is NULL or from `Box::into_raw` in `current_or_new`, whose Release store this load pairs with; what is published is never freed or changed but
    // through its locks and atomics.
    unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
}

/// The state of this process, once `init` was called in it.
#[inline]
pub(super) fn current() -> Result<&'static Instance> {
    match last() {
        Some(process) if process.epoch == fork::epoch() => Ok(process),
        process => Err(uninitialized(process.is_some())),
    }
}

#[cold]
fn uninitialized(forked: bool) -> Error {
    if forked {
        Error::internal("this process was forked: what the parent made is not usable here; call init first")
    } else {
        Error::internal("init was not called")
    }
}

// The state of this process, made if need be. Only `init` may do that.
fn current_or_new() -> &'static Instance {
    loop {
        let parent = last();
        let epoch = fork::epoch();
        if let Some(process) = parent
            && process.epoch == epoch
        {
            return process;
        }
        let number = parent.map_or(0, |parent| parent.number.wrapping_add(1));
        let process = Instance { epoch, number, comms: CommTable::new(number), state: Mutex::default(), _parent: parent };
        let process = Box::into_raw(Box::new(process));
        let expected = parent.map_or(std::ptr::null_mut(), |parent| std::ptr::from_ref(parent).cast_mut());
        if PROCESS.compare_exchange(expected, process, Ordering::Release, Ordering::Relaxed).is_err() {
            // SAFETY: `from_raw` requires a pointer of `into_raw` that nobody else uses: it is the one above, and was not published.
            drop(unsafe { Box::from_raw(process) });
        }
    }
}

impl Instance {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// A copy of `string` that C may keep as long as the process lives.
    pub fn keep(&self, string: &CString) -> *mut c_char {
        self.state().keep(string)
    }

    /// The net that is open.
    pub fn net(&self) -> Result<Arc<Net>> {
        self.state().net.clone().ok_or_else(|| Error::internal("the plugin was finalized; call init first"))
    }

    /// Takes a comm in. The comm holds its net, so whether the process still does is not asked.
    pub fn adopt(&self, shared: CommDevice, driven: AnyComm) -> Result<Handle> {
        let handle = self.comms.insert(shared, driven)?;
        self.state().open_comms += 1;
        Ok(handle)
    }

    /// Closes a comm, and ends the net if nothing uses it any more.
    pub fn close(&self, handle: Handle, kind: Kind) -> Result<()> {
        let (driven, shared) = self.comms.close(handle, kind)?;
        // The comm before its net, and both before the count: once nothing is open, nothing runs.
        drop(driven);
        drop(shared);
        let mut state = self.state();
        state.open_comms = state.open_comms.saturating_sub(1);
        state.end_if_unused();
        Ok(())
    }
}

impl State {
    fn in_use(&self) -> bool {
        !self.contexts.is_empty() || self.open_comms > 0
    }

    // Opens the net, or goes on with the one that is in use.
    fn begin(&mut self, logger: Option<log::NcclLogger>) -> Result<()> {
        log::set_nccl_logger(logger);
        if self.net.is_some() && self.in_use() {
            return Ok(());
        }
        // The old one first: the new one's listeners may want its ports.
        self.net = None;
        self.net = Some(Net::open()?);
        Ok(())
    }

    // Under the lock, so that no init comes between the end of the net and that of the logger.
    fn end_if_unused(&mut self) {
        if !self.in_use() && !self.unfinalized {
            self.net = None;
            log::set_nccl_logger(None);
        }
    }

    fn keep(&mut self, string: &CString) -> *mut c_char {
        if let Some(kept) = self.strings.get(string.as_c_str()) {
            return kept.as_ptr().cast_mut();
        }
        let kept: &'static std::ffi::CStr = Box::leak(string.clone().into_boxed_c_str());
        self.strings.insert(kept);
        kept.as_ptr().cast_mut()
    }
}

/// `init` of the tables without contexts. May be called any number of times.
pub fn init(logger: Option<log::NcclLogger>) -> Result<()> {
    let mut state = current_or_new().state();
    state.begin(logger)?;
    state.unfinalized = true;
    Ok(())
}

/// `init` of the tables with contexts: one per communicator. Every one is finalized.
pub fn init_context(logger: Option<log::NcclLogger>, traffic_class: Option<i32>) -> Result<Handle> {
    let process = current_or_new();
    let mut state = process.state();
    state.begin(logger)?;
    state.next_context += 1;
    let number = state.next_context;
    state.contexts.insert(number, Context { traffic_class });
    Ok(Handle::context(process.number, number))
}

/// Ends a context. Comms made through it live on until they are closed.
pub fn finalize(context: Handle) -> Result<()> {
    let process = current()?;
    let number = context.context_number(process.number)?;
    let mut state = process.state();
    state.contexts.remove(&number).ok_or_else(|| no_context(number))?;
    state.end_if_unused();
    Ok(())
}

fn no_context(number: u64) -> Error {
    Error::internal(format!("context {number} was finalized before, or never made"))
}

/// The traffic class of a context, if it has one.
///
/// Errors: a context that was finalized, or never made.
pub fn traffic_class(context: Handle) -> Result<Option<i32>> {
    let process = current()?;
    let number = context.context_number(process.number)?;
    let state = process.state();
    state.contexts.get(&number).map(|context| context.traffic_class).ok_or_else(|| no_context(number))
}
