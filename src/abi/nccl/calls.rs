//! What the functions of the tables do, once for all versions: check the pointers, call `abi::plugin`, write the results.
//!
//! Every function returns through the boundary. Except for `*request`, results are written on success only. Each takes the raw
//! arguments of its C namesake and `v`, the version of the table; the threads that may call it are named there.
//!
//! # Safety
//! Common to all: a pointer that is neither NULL nor misaligned must be what NCCL's interface says it is, valid for its elements for the
//! length of the call. Handles may be anything. No two threads may use one comm at a time, except in `reg_mr` and `dereg_mr`.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use super::types::{VDeviceProps, ncclDebugLogger_t, ncclNetCommConfig_t, ncclResult_t};
use crate::abi::boundary::{self, Out, call, call_with};
use crate::abi::handle::{Handle, Kind};
use crate::abi::plugin::{self, Buffer, Description};
use crate::base::error::{Error, Result};
use crate::base::log::Level;
use crate::fabric::UserMemory;
use crate::net::{MAX_MESSAGE, Mode};

/// A length in C: int up to ABI version 7 or 8, size_t after.
pub(super) trait Length: Copy {
    /// As a number of bytes; `None` if it is negative.
    fn bytes(self) -> Option<usize>;
    /// The value, whatever it is, for a message.
    fn value(self) -> i128;
}

impl Length for c_int {
    #[inline]
    fn bytes(self) -> Option<usize> {
        usize::try_from(self).ok()
    }

    fn value(self) -> i128 {
        self.into()
    }
}

impl Length for usize {
    #[inline]
    fn bytes(self) -> Option<usize> {
        Some(self)
    }

    fn value(self) -> i128 {
        self as i128
    }
}

/// Where connect takes the traffic class from.
pub(super) enum TrafficClassFrom {
    /// Nowhere: the settings decide.
    Nowhere,
    /// From connect's own argument, which may be NULL.
    Argument(*const ncclNetCommConfig_t),
    /// From the context.
    Context(*mut c_void),
}

pub(super) unsafe fn init(v: u32, logger: Option<ncclDebugLogger_t>) -> ncclResult_t {
    call("init", v, || plugin::init(logger))
}

pub(super) unsafe fn init_context(
    v: u32,
    ctx: *mut *mut c_void,
    config: *const ncclNetCommConfig_t,
    logger: Option<ncclDebugLogger_t>,
) -> ncclResult_t {
    call("init", v, || {
        // SAFETY: this module's common requirement.
        let (ctx, config) = unsafe { (Out::new(ctx, "ctx")?, traffic_class(config)?) };
        ctx.set(plugin::init_context(logger, config)?.to_pointer());
        Ok(())
    })
}

/// # Safety
/// As for [`boundary::read`]; NULL means no wish.
unsafe fn traffic_class(config: *const ncclNetCommConfig_t) -> Result<Option<i32>> {
    if config.is_null() {
        return Ok(None);
    }
    // SAFETY: the requirement is the caller's own.
    unsafe { boundary::read(config, "config") }?.traffic_class()
}

pub(super) unsafe fn finalize(v: u32, ctx: *mut c_void) -> ncclResult_t {
    call("finalize", v, || plugin::finalize(Handle::from_pointer(ctx)))
}

pub(super) unsafe fn set_net_attr(v: u32, ctx: *mut c_void) -> ncclResult_t {
    // Nothing is done with the attributes; only the context is checked.
    call("setNetAttr", v, || plugin::traffic_class(Handle::from_pointer(ctx)).map(|_| ()))
}

pub(super) unsafe fn devices(v: u32, ndev: *mut c_int) -> ncclResult_t {
    call("devices", v, || {
        // SAFETY: this module's common requirement.
        let ndev = unsafe { Out::new(ndev, "ndev") }?;
        ndev.set(plugin::device_count()? as c_int);
        Ok(())
    })
}

pub(super) unsafe fn get_properties<P: for<'a> TryFrom<&'a Description, Error = Error>>(v: u32, dev: c_int, props: *mut P) -> ncclResult_t {
    call("getProperties", v, || {
        // SAFETY: this module's common requirement.
        let props = unsafe { Out::new(props, "props") }?;
        props.set(P::try_from(&plugin::describe(dev)?)?);
        Ok(())
    })
}

pub(super) unsafe fn make_v_device<const N: usize>(v: u32, d: *mut c_int, props: *const VDeviceProps<N>) -> ncclResult_t {
    // NCCL tries to fuse whatever it thinks could be, and goes on with the devices as they are when told no.
    call_with("makeVDevice", v, Level::Info, || {
        // SAFETY: this module's common requirement.
        let (d, props) = unsafe { (Out::new(d, "d")?, boundary::read(props, "props")?) };
        d.set(plugin::make_virtual(props.devs()?)? as c_int);
        Ok(())
    })
}

pub(super) unsafe fn listen(
    v: u32,
    scope: TrafficClassFrom,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> ncclResult_t {
    call("listen", v, || {
        // SAFETY: this module's common requirement. The handle is NCCL's 64 bytes (128 from version 5, of which 64 are used).
        let (handle, listen_comm) = unsafe { (boundary::bytes(handle, "handle")?, Out::new(listen_comm, "listenComm")?) };
        // SAFETY: as above.
        unsafe { scope.traffic_class() }?;
        let (comm, bytes) = plugin::listen(dev)?;
        *handle = bytes;
        listen_comm.set(comm.to_pointer());
        Ok(())
    })
}

pub(super) unsafe fn connect(
    v: u32,
    scope: TrafficClassFrom,
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    mode: Mode,
) -> ncclResult_t {
    call("connect", v, || {
        // SAFETY: this module's common requirement; of the handle 64 bytes are used, as in `listen`.
        let (handle, send_comm) = unsafe { (boundary::bytes(handle, "handle")?, Out::new(send_comm, "sendComm")?) };
        // SAFETY: as above.
        let traffic_class = unsafe { scope.traffic_class() }?;
        send_comm.set(plugin::connect(dev, traffic_class, handle, mode)?.map_or(null_mut(), Handle::to_pointer));
        Ok(())
    })
}

impl TrafficClassFrom {
    /// # Safety
    /// As for [`boundary::read`].
    unsafe fn traffic_class(&self) -> Result<Option<i32>> {
        match self {
            TrafficClassFrom::Nowhere => Ok(None),
            // SAFETY: the requirement is the caller's own.
            TrafficClassFrom::Argument(config) => unsafe { traffic_class(*config) },
            TrafficClassFrom::Context(ctx) => plugin::traffic_class(Handle::from_pointer(*ctx)),
        }
    }
}

pub(super) unsafe fn accept(v: u32, listen_comm: *mut c_void, recv_comm: *mut *mut c_void, mode: Mode) -> ncclResult_t {
    call("accept", v, || {
        // SAFETY: this module's common requirement.
        let recv_comm = unsafe { Out::new(recv_comm, "recvComm") }?;
        // SAFETY: as above: the listen comm is this thread's.
        let comm = unsafe { plugin::accept(Handle::from_pointer(listen_comm), mode) }?;
        recv_comm.set(comm.map_or(null_mut(), Handle::to_pointer));
        Ok(())
    })
}

pub(super) unsafe fn reg_mr<L: Length>(
    v: u32,
    comm: *mut c_void,
    data: *mut c_void,
    size: L,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    call("regMr", v, || {
        // SAFETY: this module's common requirement.
        let mhandle = unsafe { Out::new(mhandle, "mhandle") }?;
        let kind = plugin::memory_kind(kind)?;
        let len = size.bytes().ok_or_else(|| Error::usage(format!("memory of {} bytes; accepted: 1 or more", size.value())))?;
        if data.is_null() {
            return Err(boundary::bad_pointer(0, "data", 1));
        }
        // SAFETY: `new` requires memory of this process for as long as it is registered, which the peer may change, and which the CPU can access unless
        // it is a device's. By NCCL's interface it is NCCL's own until deregMr, to be written by the peer; `kind` tells of a device's memory, which
        // `Net::register` takes for NICs alone, and whose bytes nothing in `net` views.
        let memory = unsafe { UserMemory::new(data.cast(), len) };
        mhandle.set(plugin::register(Handle::from_pointer(comm), memory, kind)?.to_pointer());
        Ok(())
    })
}

#[allow(clippy::too_many_arguments)] // They are NCCL's.
pub(super) unsafe fn reg_mr_dma_buf(
    v: u32,
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    call("regMrDmaBuf", v, || {
        // SAFETY: this module's common requirement.
        let mhandle = unsafe { Out::new(mhandle, "mhandle") }?;
        let kind = plugin::memory_kind(kind)?;
        if data.is_null() {
            return Err(boundary::bad_pointer(0, "data", 1));
        }
        // SAFETY: as in `reg_mr`; a DMA-BUF is registered on NICs alone, so the CPU need not be able to access what it names.
        let memory = unsafe { UserMemory::new(data.cast(), size) };
        mhandle.set(plugin::register_dma_buf(Handle::from_pointer(comm), memory, kind, offset, fd)?.to_pointer());
        Ok(())
    })
}

pub(super) unsafe fn dereg_mr(v: u32, comm: *mut c_void, mhandle: *mut c_void) -> ncclResult_t {
    call("deregMr", v, || {
        if mhandle.is_null() {
            return Err(boundary::bad_pointer(0, "mhandle", 1));
        }
        plugin::deregister(Handle::from_pointer(comm), Handle::from_pointer(mhandle))
    })
}

// Inlined into each version's function, with all that it calls: most steps cost less than a call.
#[inline(always)]
pub(super) unsafe fn isend<L: Length>(
    v: u32,
    comm: *mut c_void,
    data: *mut c_void,
    size: L,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    call("isend", v, move || {
        // SAFETY: this module's common requirement.
        let request = unsafe { null_out(request) }?;
        let (addr, len) = buffer(data, size)?;
        // SAFETY: as above: the comm is this thread's.
        let posted = unsafe { plugin::isend(Handle::from_pointer(comm), addr, len, tag, Handle::from_pointer(mhandle)) }?;
        if let Some(posted) = posted {
            request.set(posted.to_pointer());
        }
        Ok(())
    })
}

/// The place of a request, with NULL in it. The caller may have left anything there, such as 0x1 (NCCL_NET_OPTIONAL_RECV_COMPLETION), and takes
/// what it finds there after the call for a request: so this comes before everything that may fail.
///
/// # Safety
/// As for [`Out::new`].
#[inline]
unsafe fn null_out(request: *mut *mut c_void) -> Result<Out<*mut c_void>> {
    // SAFETY: the requirement is the caller's own.
    let request = unsafe { Out::new(request, "request") }?;
    request.set(null_mut());
    Ok(request)
}

#[inline(always)]
fn buffer<L: Length>(data: *mut c_void, size: L) -> Result<(usize, usize)> {
    let Some(len) = size.bytes().filter(|bytes| *bytes <= MAX_MESSAGE) else { return Err(plugin::bad_size(size.value())) };
    if data.is_null() && len > 0 {
        return Err(boundary::bad_pointer(0, "data", 1));
    }
    Ok((data.addr(), len))
}

/// The arrays of a receive or a flush.
pub(super) struct Arrays<L> {
    pub n: c_int,
    pub data: *const *mut c_void,
    pub sizes: *const L,
    /// NULL in a flush, which has none.
    pub tags: Option<*const c_int>,
    pub mhandles: *const *mut c_void,
}

impl<L: Length> Arrays<L> {
    /// Checks them, and gives the number of buffers and what the arrays say of each.
    ///
    /// # Safety
    /// Unless NULL or misaligned, the arrays must be readable for `n` elements if `n` is at most `MAX_RECVS`, as long as the result lives.
    #[inline(always)]
    unsafe fn buffers<'a>(&self) -> Result<(usize, impl Fn(usize) -> Result<Buffer> + 'a)>
    where
        L: 'a,
    {
        let n = plugin::buffer_count(self.n)?;
        // SAFETY: the requirement is the caller's own; `n` was just checked against MAX_RECVS.
        let (data, sizes, mhandles) = unsafe {
            (
                boundary::slice(self.data, n, "data")?,
                boundary::slice(self.sizes, n, "sizes")?,
                boundary::slice(self.mhandles, n, "mhandles")?,
            )
        };
        // SAFETY: as above.
        let tags = self.tags.map(|tags| unsafe { boundary::slice(tags, n, "tags") }).transpose()?;
        let at = move |i: usize| {
            let (addr, len) = buffer(data[i], sizes[i])?;
            Ok(Buffer { addr, len, tag: tags.map_or(0, |tags| tags[i]), mr: Handle::from_pointer(mhandles[i]) })
        };
        Ok((n, at))
    }
}

#[inline(always)]
pub(super) unsafe fn irecv<L: Length>(v: u32, comm: *mut c_void, arrays: Arrays<L>, request: *mut *mut c_void) -> ncclResult_t {
    call("irecv", v, move || {
        // SAFETY: this module's common requirement.
        let request = unsafe { null_out(request) }?;
        // SAFETY: as above.
        let (n, buffers) = unsafe { arrays.buffers() }?;
        // SAFETY: as above: the comm is this thread's.
        if let Some(posted) = unsafe { plugin::irecv(Handle::from_pointer(comm), n, buffers) }? {
            request.set(posted.to_pointer());
        }
        Ok(())
    })
}

pub(super) unsafe fn iflush(v: u32, comm: *mut c_void, arrays: Arrays<c_int>, request: *mut *mut c_void) -> ncclResult_t {
    call("iflush", v, || {
        // SAFETY: this module's common requirement.
        let request = unsafe { null_out(request) }?;
        // SAFETY: as above.
        let (n, buffers) = unsafe { arrays.buffers() }?;
        // SAFETY: as above: the comm is this thread's.
        if let Some(posted) = unsafe { plugin::iflush(Handle::from_pointer(comm), n, buffers) }? {
            request.set(posted.to_pointer());
        }
        Ok(())
    })
}

#[inline(always)]
pub(super) unsafe fn test(v: u32, request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> ncclResult_t {
    call("test", v, move || {
        // SAFETY: this module's common requirement.
        let (done, first) = unsafe { (Out::new(done, "done")?, Out::optional(sizes, "sizes")?) };
        // SAFETY: as above: the request's comm is this thread's.
        let complete = unsafe { plugin::test(Handle::from_pointer(request)) }?;
        if let (Some(complete), Some(first)) = (&complete, first)
            && let Some((size, others)) = complete.bytes.get(..complete.n).and_then(<[u32]>::split_first)
        {
            first.set(*size as c_int);
            for (i, size) in others.iter().enumerate() {
                // SAFETY: `sizes` is not NULL and aligned; the caller gave it room for as many sizes as the request has buffers.
                unsafe { sizes.add(1 + i).write(*size as c_int) };
            }
        }
        done.set(complete.is_some().into());
        Ok(())
    })
}

pub(super) unsafe fn close_send(v: u32, comm: *mut c_void) -> ncclResult_t {
    call("closeSend", v, || plugin::close(Handle::from_pointer(comm), Kind::Send))
}

pub(super) unsafe fn close_recv(v: u32, comm: *mut c_void) -> ncclResult_t {
    call("closeRecv", v, || plugin::close(Handle::from_pointer(comm), Kind::Recv))
}

pub(super) unsafe fn close_listen(v: u32, comm: *mut c_void) -> ncclResult_t {
    call("closeListen", v, || plugin::close(Handle::from_pointer(comm), Kind::Listen))
}
