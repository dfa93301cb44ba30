//! The plugin's calls on plain values, the same for every ABI version, and the state of the process: the [`Net`] that `init` opens, the
//! contexts of communicators, the comms. Called by `abi::nccl` with arguments that the boundary has checked, on the host's threads.
//!
//! The `Net` lives from the first `init` until the last context is finalized and the last comm is closed. ABI versions before 11 have no
//! finalize: theirs lives on, and an `init` that finds nothing open replaces it by one with the environment's present settings.
//!
//! A forked child starts from nothing: the parent's descriptors are closed (see `base::fd`), its state is set aside untouched, for its locks
//! may be held and its memory is not all here, and the child's `init` makes new state.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::abi::comm_table::{AnyComm, CommDevice, CommGuard, CommTable};
use crate::abi::handle::{Handle, Kind};
use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use crate::base::{fork, log};
use crate::fabric::UserMemory;
use crate::net::{
    HANDLE_SIZE, MAX_MESSAGE, MAX_RECVS, MemoryKind, Mode, Net, PTR_CUDA, PTR_HOST, Properties, RecvBuffer, RequestId, Sizes,
};

/// Everything the library keeps for this process.
struct Instance {
    epoch: u64,
    // How many forks lie between the first initialisation and this process, modulo 256.
    number: u8,
    comms: CommTable,
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
    // SAFETY: the pointer is NULL or comes from `Box::into_raw` in `current_or_new`.
    unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
}

/// The state of this process, once `init` was called in it.
#[inline]
fn current() -> Result<&'static Instance> {
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
            // SAFETY: from `Box::into_raw` above, and published nowhere.
            drop(unsafe { Box::from_raw(process) });
        }
    }
}

impl Instance {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn net(&self) -> Result<Arc<Net>> {
        self.state().net.clone().ok_or_else(|| Error::internal("the plugin was finalized; call init first"))
    }

    // Takes a comm in. The comm holds its net, so whether the process still does is not asked.
    fn adopt(&self, shared: CommDevice, driven: AnyComm) -> Result<Handle> {
        let handle = self.comms.insert(shared, driven)?;
        self.state().open_comms += 1;
        Ok(handle)
    }

    fn close(&self, handle: Handle, kind: Kind) -> Result<()> {
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

/// How many devices there are, virtual ones included.
pub fn device_count() -> Result<usize> {
    Ok(current()?.net()?.device_count())
}

/// A device's properties, with its strings as C may keep them.
pub struct Description {
    /// The rest.
    pub properties: Arc<Properties>,
    /// Never NULL; valid as long as the process lives.
    pub name: *mut c_char,
    /// NULL unless the device is on PCI; valid as long as the process lives.
    pub pci_path: *mut c_char,
}

/// Describes device `dev`.
pub fn describe(dev: i32) -> Result<Description> {
    let process = current()?;
    let properties = process.net()?.properties(device(dev)?)?;
    let mut state = process.state();
    let name = state.keep(&properties.name);
    let pci_path = properties.pci_path.as_ref().map_or(std::ptr::null_mut(), |path| state.keep(path));
    Ok(Description { properties, name, pci_path })
}

impl State {
    fn keep(&mut self, string: &CString) -> *mut c_char {
        if let Some(kept) = self.strings.get(string.as_c_str()) {
            return kept.as_ptr().cast_mut();
        }
        let kept: &'static std::ffi::CStr = Box::leak(string.clone().into_boxed_c_str());
        self.strings.insert(kept);
        kept.as_ptr().cast_mut()
    }
}

/// Makes one device of several and returns its number.
pub fn make_virtual(devs: &[i32]) -> Result<usize> {
    let devs = devs.iter().map(|dev| device(*dev)).collect::<Result<Vec<usize>>>()?;
    current()?.net()?.make_virtual(&devs)
}

fn device(dev: i32) -> Result<usize> {
    usize::try_from(dev).map_err(|_| Error::internal(format!("device {dev} does not exist")))
}

/// Listens on a device.
pub fn listen(dev: i32) -> Result<(Handle, [u8; HANDLE_SIZE])> {
    let process = current()?;
    let (net, dev) = (process.net()?, device(dev)?);
    let (comm, handle) = net.listen(dev)?;
    Ok((process.adopt(CommDevice { net, dev }, AnyComm::Listen(Box::new(comm)))?, handle))
}

/// Connects to a listener; None while the handshake is under way.
pub fn connect(dev: i32, traffic_class: Option<i32>, handle: &mut [u8; HANDLE_SIZE], mode: Mode) -> Result<Option<Handle>> {
    let process = current()?;
    let (net, dev) = (process.net()?, device(dev)?);
    match net.connect(dev, traffic_class, handle, mode)? {
        Some(comm) => process.adopt(CommDevice { net, dev }, AnyComm::Send(Box::new(comm))).map(Some),
        None => Ok(None),
    }
}

/// Accepts a connection; None while there is none.
///
/// # Safety
/// No other thread uses the listen comm during the call.
pub unsafe fn accept(listen: Handle, mode: Mode) -> Result<Option<Handle>> {
    let process = current()?;
    // SAFETY: the requirement is the caller's own.
    let mut listen = unsafe { process.comms.listen(listen) }?;
    let Some(comm) = listen.accept(mode)? else { return Ok(None) };
    let shared = listen.shared().ok_or_else(|| Error::internal("the listen comm was closed during accept"))?;
    process.adopt(CommDevice { dev: comm.dev(), ..shared }, AnyComm::Recv(Box::new(comm))).map(Some)
}

/// The kind of memory that NCCL's pointer type `kind` says.
pub fn memory_kind(kind: i32) -> Result<MemoryKind> {
    match kind {
        PTR_HOST => Ok(MemoryKind::Host),
        PTR_CUDA => Ok(MemoryKind::Device),
        _ => {
            let accepted = format!("{PTR_HOST} (NCCL_PTR_HOST) and {PTR_CUDA} (NCCL_PTR_CUDA)");
            Err(Error::usage(format!("memory type {kind} is not supported; accepted: {accepted}")))
        }
    }
}

/// Registers memory on the device of a send or receive comm, which another thread may be driving.
pub fn register(comm: Handle, memory: UserMemory, kind: MemoryKind) -> Result<Handle> {
    let process = current()?;
    let shared = process.comms.shared(comm)?;
    Ok(Handle::mr(process.number, shared.net.register(shared.dev, memory, kind)?))
}

/// Registers memory of a device by a DMA-BUF.
pub fn register_dma_buf(comm: Handle, memory: UserMemory, kind: MemoryKind, offset: u64, fd: i32) -> Result<Handle> {
    let process = current()?;
    let shared = process.comms.shared(comm)?;
    Ok(Handle::mr(process.number, shared.net.register_dma_buf(shared.dev, memory, kind, offset, fd)?))
}

/// Ends a registration, through any comm of the same device.
pub fn deregister(comm: Handle, mr: Handle) -> Result<()> {
    let process = current()?;
    let shared = process.comms.shared(comm)?;
    shared.net.deregister(shared.dev, mr.to_mr(process.number))
}

/// A buffer of `irecv` or `iflush`.
#[derive(Clone, Copy)]
pub struct Buffer {
    /// First byte.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
    /// Which of a group's buffers a send is for.
    pub tag: i32,
    /// Registration that covers it.
    pub mr: Handle,
}

type Room = [MaybeUninit<RecvBuffer>; MAX_RECVS];

/// `n` buffers as `net` takes them, in `room`: nothing is allocated here, nor filled that is not used.
#[inline(always)]
fn to_recv_buffers(n: usize, buffers: impl Fn(usize) -> Result<Buffer>, process: u8, room: &mut Room) -> Result<&[RecvBuffer]> {
    let places = &mut room[..n];
    for (i, place) in places.iter_mut().enumerate() {
        let Buffer { addr, len, tag, mr } = buffers(i)?;
        place.write(RecvBuffer { addr, len, tag, mr: mr.to_mr(process) });
    }
    // SAFETY: every one of the places was just written.
    Ok(unsafe { std::slice::from_raw_parts(places.as_ptr().cast(), n) })
}

/// Checks a number of buffers.
#[inline]
pub fn buffer_count(n: i32) -> Result<usize> {
    match usize::try_from(n) {
        Ok(count @ 1..=MAX_RECVS) => Ok(count),
        _ => Err(bad_count(n)),
    }
}

#[cold]
fn bad_count(n: i32) -> Error {
    Error::usage(format!("{n} buffers in one receive; accepted: 1 to {MAX_RECVS}"))
}

/// What is wrong with a message of so many bytes.
#[cold]
pub fn bad_size(size: i128) -> Error {
    Error::usage(format!("message of {size} bytes; accepted: 0 to {MAX_MESSAGE}"))
}

/// Posts a send; None if it must be tried again.
///
/// # Safety
/// No other thread drives or closes the comm during the call.
#[inline(always)]
pub unsafe fn isend(comm: Handle, addr: usize, len: usize, tag: i32, mr: Handle) -> Result<Option<Handle>> {
    let process = current()?;
    // SAFETY: the requirement is the caller's own.
    let mut comm = unsafe { process.comms.send(comm) }?;
    let request = comm.isend(addr, len, tag, mr.to_mr(process.number))?;
    Ok(name_request(&comm, Kind::SendRequest, request))
}

/// Posts a receive of up to `MAX_RECVS` buffers; None if it must be tried again.
///
/// # Safety
/// As for [`isend`].
#[inline(always)]
pub unsafe fn irecv(comm: Handle, n: usize, buffers: impl Fn(usize) -> Result<Buffer>) -> Result<Option<Handle>> {
    let process = current()?;
    // SAFETY: the requirement is the caller's own.
    let mut comm = unsafe { process.comms.recv(comm) }?;
    let mut room = [const { MaybeUninit::uninit() }; MAX_RECVS];
    let request = comm.irecv(to_recv_buffers(n, buffers, process.number, &mut room)?)?;
    Ok(name_request(&comm, Kind::RecvRequest, request))
}

/// Posts a flush of received buffers; None if there is nothing to flush.
///
/// # Safety
/// As for [`isend`].
pub unsafe fn iflush(comm: Handle, n: usize, buffers: impl Fn(usize) -> Result<Buffer>) -> Result<Option<Handle>> {
    let process = current()?;
    // SAFETY: the requirement is the caller's own.
    let mut comm = unsafe { process.comms.recv(comm) }?;
    let mut room = [const { MaybeUninit::uninit() }; MAX_RECVS];
    let request = comm.iflush(to_recv_buffers(n, buffers, process.number, &mut room)?)?;
    Ok(name_request(&comm, Kind::RecvRequest, request))
}

#[inline]
fn name_request<C>(comm: &CommGuard<'_, C>, kind: Kind, request: Option<RequestId>) -> Option<Handle> {
    request.map(|request| comm.request(kind, request))
}

/// Makes progress, and returns the request's sizes once it is complete; its handle is then spent.
///
/// # Safety
/// No other thread drives or closes the request's comm during the call.
#[inline(always)]
pub unsafe fn test(request: Handle) -> Result<Option<Sizes>> {
    let process = current()?;
    if request.is_send_request()? {
        // SAFETY: the requirement is the caller's own.
        let (mut comm, id) = unsafe { process.comms.send_request(request) }?;
        comm.test(id)
    } else {
        // SAFETY: the requirement is the caller's own.
        let (mut comm, id) = unsafe { process.comms.recv_request(request) }?;
        comm.test(id)
    }
}

/// Closes a comm of the given kind.
pub fn close(comm: Handle, kind: Kind) -> Result<()> {
    current()?.close(comm, kind)
}
