//! The plugin's calls on plain values, the same for every ABI version. Called by `abi::nccl` with arguments that the boundary has checked, on the
//! host's threads; what they work on is the state of the process, [`super::instance`].

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::abi::comm_table::{AnyComm, CommDevice, CommGuard};
use crate::abi::handle::{Handle, Kind};
use crate::abi::instance::current;
use crate::base::error::{Error, Result};
use crate::fabric::UserMemory;
use crate::net::{HANDLE_SIZE, MAX_MESSAGE, MAX_RECVS, MemoryKind, Mode, PTR_CUDA, PTR_HOST, Properties, RecvBuffer, RequestId, Sizes};

pub use crate::abi::instance::{finalize, init, init_context, traffic_class};

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
    let name = process.keep(&properties.name);
    let pci_path = properties.pci_path.as_ref().map_or(std::ptr::null_mut(), |path| process.keep(path));
    Ok(Description { properties, name, pci_path })
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
    // SAFETY: the slice requires `n` initialised elements, borrowed as long as `room`: the loop has written each of the `n` places.
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
