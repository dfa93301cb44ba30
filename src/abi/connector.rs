//! `railhead_listener_*` and `railhead_connector_*`: the connections of a proxy, their rings and their operations, for C programs. Any thread, unless a
//! function says otherwise.
//!
//! Checks the arguments; `abi::proxies` and the proxy do the rest.

#![allow(non_camel_case_types)] // The names are C's.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;

use crate::abi::boundary::{self, Out};
use crate::abi::proxies;
use crate::abi::proxy::{handle, put_text, railhead_proxy_t, sized};
use crate::abi::status::railhead_status_t::{RAILHEAD_IN_PROGRESS, RAILHEAD_OK};
use crate::abi::status::{call_status, railhead_status_t};
use crate::base::error::{Error, Result};
use crate::proxy::args::Steps;
use crate::proxy::connector::{Direction, Options};
use crate::proxy::net::{self, Comm};
use crate::proxy::protocol::Protocol;
use crate::proxy::ring::{self, Geometry, Memory, Ring};

/// A listener of a proxy. Not a pointer.
pub struct railhead_listener_t {
    _opaque: [u8; 0],
}

/// One direction of a connection of a proxy: a comm and a ring. Not a pointer.
pub struct railhead_connector_t {
    _opaque: [u8; 0],
}

/// The kind of memory of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub enum railhead_ring_home_t {
    /// In this process's own memory.
    RAILHEAD_RING_PRIVATE = 0,
    /// In a memfd that cannot be resized: another process maps the descriptor.
    RAILHEAD_RING_MEMFD = 1,
    /// In a file under /dev/shm that this user alone may open: another process maps the path.
    RAILHEAD_RING_NAMED = 2,
    /// In memory that the caller supplies, such as what a GPU has mapped.
    RAILHEAD_RING_SUPPLIED = 3,
}

/// Configuration of a connector. Set `size`, and everything else to zero or to what you want.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct railhead_connector_config_t {
    /// sizeof(railhead_connector_config_t).
    pub size: usize,
    /// A railhead_ring_home_t.
    pub home: u32,
    /// What can access supplied data: NCCL_PTR_HOST (1, or 0) or NCCL_PTR_CUDA (2). Data received into the latter is flushed before it is published.
    pub memory: u32,
    /// Bytes of the LL, LL128 and SIMPLE buffers, each 0 or a multiple of 1024 up to 1 GiB; a slot is an eighth. All zero: 4 MiB of SIMPLE.
    pub ll_bytes: usize,
    /// See ll_bytes.
    pub ll128_bytes: usize,
    /// See ll_bytes.
    pub simple_bytes: usize,
    /// Supplied memory for the control words (railhead_ring_control, 512 bytes), aligned to 128, readable and writable by the CPU. It must stay until the
    /// connector is closed.
    pub control: *mut c_void,
    /// Supplied memory for the slots, as many bytes as the buffers have together, LL first, then LL128, then SIMPLE; aligned to 128. It must stay until
    /// the connector is closed.
    pub data: *mut c_void,
    /// The first step of the ring.
    pub first_step: u64,
    /// Tag of all messages.
    pub tag: i32,
    /// 1: also flush data received into host memory.
    pub flush: u32,
}

/// Where a connector's ring is. For railhead_ring_open, in this process or in another one.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct railhead_ring_place_t {
    /// The control words.
    pub control: *mut c_void,
    /// The slots of all protocols.
    pub data: *mut c_void,
    /// Bytes of the slots.
    pub data_bytes: usize,
    /// Bytes from the control words to the end of the mapping: what railhead_ring_open takes. 0 for supplied memory, which railhead_ring_join takes.
    pub mapped_bytes: usize,
    /// Descriptor of the mapping, which stays the connector's and which a forked child keeps; -1 if the ring is not shared.
    pub fd: c_int,
    /// Zero.
    pub reserved: u32,
    /// Path of the mapping; empty if it has none.
    pub path: [c_char; 64],
}

/// An operation. Set `size`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct railhead_operation_t {
    /// sizeof(railhead_operation_t).
    pub size: usize,
    /// How many steps: a multiple of slice_steps.
    pub steps: u64,
    /// Steps that make one message: 1, 2, 4 or 8. 0: 1.
    pub slice_steps: u32,
    /// The operation starts at the next multiple of this: 1, 2, 4 or 8, at least slice_steps. 0: slice_steps.
    pub chunk_steps: u32,
    /// How the producer marks a slot as filled: 0 LL, 1 LL128, 2 SIMPLE (RAILHEAD_RING_* of railhead_ring.h).
    pub protocol: u32,
    /// Zero.
    pub reserved: u32,
}

/// What a connector has done. Counts wrap at 2^64.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct railhead_connector_state_t {
    /// The step after those of its complete operations.
    pub step: u64,
    /// Operations complete.
    pub operations: u64,
    /// Messages complete.
    pub messages: u64,
    /// Bytes posted to the network, or received from it.
    pub bytes: u64,
    /// Calls of isend and irecv that the network did not accept yet.
    pub retries: u64,
    /// Flushes posted.
    pub flushes: u64,
}

const _: () = {
    assert!(size_of::<railhead_connector_config_t>() == 72);
    assert!(offset_of!(railhead_connector_config_t, home) == 8 && offset_of!(railhead_connector_config_t, memory) == 12);
    assert!(offset_of!(railhead_connector_config_t, ll_bytes) == 16 && offset_of!(railhead_connector_config_t, simple_bytes) == 32);
    assert!(offset_of!(railhead_connector_config_t, control) == 40 && offset_of!(railhead_connector_config_t, data) == 48);
    assert!(offset_of!(railhead_connector_config_t, first_step) == 56 && offset_of!(railhead_connector_config_t, tag) == 64);
    assert!(size_of::<railhead_ring_place_t>() == 104);
    assert!(offset_of!(railhead_ring_place_t, fd) == 32 && offset_of!(railhead_ring_place_t, path) == 40);
    assert!(size_of::<railhead_operation_t>() == 32);
    assert!(offset_of!(railhead_operation_t, steps) == 8 && offset_of!(railhead_operation_t, protocol) == 24);
    assert!(size_of::<railhead_connector_state_t>() == 48 && offset_of!(railhead_connector_state_t, flushes) == 40);
};

/// Opens a listener on device `dev` of the proxy's table, and makes the handle by which a peer connects to it.
///
/// * `listen_handle` - out, 128 bytes (NCCL_NET_HANDLE_MAXSIZE), to be given to the peer.
/// * `listener` - out; closed with railhead_listener_close.
///
/// Errors: the table's.
///
/// # Safety
/// `listen_handle` must be NULL or writable for 128 bytes, `listener` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_listen(
    proxy: *mut railhead_proxy_t,
    dev: c_int,
    listen_handle: *mut c_void,
    listener: *mut *mut railhead_listener_t,
) -> railhead_status_t {
    call_status("railhead_proxy_listen", || {
        // SAFETY: the requirement is the caller's own.
        let (bytes, listener) =
            unsafe { (boundary::bytes::<{ net::HANDLE_BYTES }>(listen_handle, "listen_handle")?, Out::new(listener, "listener")?) };
        let (opened, made) = proxies::listen(&proxies::proxy(handle(proxy))?, dev)?;
        *bytes = made.0;
        listener.set(opened.to_pointer().cast());
        Ok(RAILHEAD_OK)
    })
}

/// Accepts a peer, and makes the connector that receives from it.
///
/// * `config` - in, may be NULL for all defaults.
/// * `connector` - out; closed with railhead_connector_close.
///
/// Returns RAILHEAD_IN_PROGRESS while there is no peer: call again.
///
/// Errors: the table's; RAILHEAD_USAGE for an invalid configuration.
///
/// # Safety
/// `config` must be NULL or readable for its size; what it supplies must stay until the connector is closed; `connector` must be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_listener_accept(
    listener: *mut railhead_listener_t,
    config: *const railhead_connector_config_t,
    connector: *mut *mut railhead_connector_t,
) -> railhead_status_t {
    call_status("railhead_listener_accept", || {
        // SAFETY: the requirement is the caller's own.
        let (connector, plan) = unsafe { (Out::new(connector, "connector")?, Plan::new(config)?) };
        let options = plan.options;
        // SAFETY: as above.
        let made = proxies::listener(handle(listener))?.accept(|| unsafe { plan.ring() }, options)?;
        Ok(done(made, &connector))
    })
}

/// Closes a listener and ends its handle. Accepted connectors stay.
///
/// Errors: the table's; it is closed all the same.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_listener_close(listener: *mut railhead_listener_t) -> railhead_status_t {
    call_status("railhead_listener_close", || {
        proxies::close_listener(handle(listener))?;
        Ok(RAILHEAD_OK)
    })
}

/// Connects to a peer's listener through device `dev` of the proxy's table, and makes the connector that sends to it.
///
/// * `listen_handle` - in and out, 128 bytes: the peer's, and between calls the progress of the connection, so pass the same memory each time.
/// * `config` - in, may be NULL for all defaults.
/// * `connector` - out; closed with railhead_connector_close.
///
/// Returns RAILHEAD_IN_PROGRESS while that is under way: call again.
///
/// Errors: as railhead_listener_accept.
///
/// # Safety
/// `listen_handle` must be NULL or readable and writable for 128 bytes; the rest as for railhead_listener_accept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_connect(
    proxy: *mut railhead_proxy_t,
    dev: c_int,
    listen_handle: *mut c_void,
    config: *const railhead_connector_config_t,
    connector: *mut *mut railhead_connector_t,
) -> railhead_status_t {
    call_status("railhead_proxy_connect", || {
        // SAFETY: the requirement is the caller's own.
        let (bytes, connector, plan) = unsafe {
            let bytes = boundary::bytes::<{ net::HANDLE_BYTES }>(listen_handle, "listen_handle")?;
            (bytes, Out::new(connector, "connector")?, Plan::new(config)?)
        };
        let (mut peer, options) = (net::ListenHandle(*bytes), plan.options);
        // SAFETY: as above.
        let made = proxies::connect(&proxies::proxy(handle(proxy))?, dev, &mut peer, || unsafe { plan.ring() }, options);
        *bytes = peer.0;
        Ok(done(made?, &connector))
    })
}

/// Makes a connector that sends over an open send comm of the proxy's table. The caller closes the comm, after the connector; until then only the
/// proxy may use it.
///
/// * `config` - in, may be NULL for all defaults.
/// * `connector` - out; closed with railhead_connector_close.
///
/// Errors: as railhead_listener_accept.
///
/// # Safety
/// `comm` must be an open send comm of the table; the rest as for railhead_listener_accept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_send_over(
    proxy: *mut railhead_proxy_t,
    comm: *mut c_void,
    config: *const railhead_connector_config_t,
    connector: *mut *mut railhead_connector_t,
) -> railhead_status_t {
    // SAFETY: the requirement is the caller's own.
    unsafe { over("railhead_proxy_send_over", proxy, Direction::Send, comm, config, connector) }
}

/// Makes a connector that receives over an open receive comm of the proxy's table. As railhead_proxy_send_over.
///
/// # Safety
/// `comm` must be an open receive comm of the table; the rest as for railhead_listener_accept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_recv_over(
    proxy: *mut railhead_proxy_t,
    comm: *mut c_void,
    config: *const railhead_connector_config_t,
    connector: *mut *mut railhead_connector_t,
) -> railhead_status_t {
    // SAFETY: the requirement is the caller's own.
    unsafe { over("railhead_proxy_recv_over", proxy, Direction::Recv, comm, config, connector) }
}

/// # Safety
/// As for the two functions above.
unsafe fn over(
    name: &'static str,
    proxy: *mut railhead_proxy_t,
    direction: Direction,
    comm: *mut c_void,
    config: *const railhead_connector_config_t,
    connector: *mut *mut railhead_connector_t,
) -> railhead_status_t {
    call_status(name, || {
        // SAFETY: the requirement is the caller's own.
        let (connector, plan) = unsafe { (Out::new(connector, "connector")?, Plan::new(config)?) };
        if comm.is_null() {
            return Err(boundary::bad_pointer(0, "comm", 1));
        }
        let options = Options { borrowed: true, ..plan.options };
        // SAFETY: as above; nobody else drives the comm until the connector is closed.
        let comm = unsafe { Comm::new(comm.expose_provenance()) };
        // SAFETY: as above.
        let made = proxies::adopt(&proxies::proxy(handle(proxy))?, direction, comm, || unsafe { plan.ring() }, options)?;
        Ok(done(Some(made), &connector))
    })
}

/// Closes a connector and ends its handle; its ring's memory, unless the caller supplied it, is freed.
///
/// Errors: RAILHEAD_USAGE if it has operations that are not done, and the proxy has not ended: it stays open. The table's: it is closed all the same.
///
/// # Safety
/// No thread of this process may use the ring any more. Another process keeps its own mapping of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_connector_close(connector: *mut railhead_connector_t) -> railhead_status_t {
    call_status("railhead_connector_close", || {
        proxies::close_connector(handle(connector))?;
        Ok(RAILHEAD_OK)
    })
}

/// Tells where the connector's ring is.
///
/// * `place` - out.
///
/// # Safety
/// `place` must be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_connector_ring(
    connector: *mut railhead_connector_t,
    place: *mut railhead_ring_place_t,
) -> railhead_status_t {
    call_status("railhead_connector_ring", || {
        // SAFETY: the requirement is the caller's own.
        let place = unsafe { Out::new(place, "place") }?;
        proxies::connector(handle(connector))?.with(|attached| {
            let ring = attached.connector().ring();
            let mut path = [0; 64];
            if let Some(named) = ring.path() {
                // SAFETY: 64 bytes of our own.
                unsafe { put_text(&named.to_string_lossy(), path.as_mut_ptr(), path.len(), "path") }?;
            }
            place.set(railhead_ring_place_t {
                control: std::ptr::from_ref(ring.words()).cast_mut().cast(),
                data: ring.data().cast(),
                data_bytes: ring.geometry().data_bytes(),
                mapped_bytes: ring.mapped_bytes().unwrap_or(0),
                fd: ring.fd().map_or(-1, |fd| fd.as_raw_fd()),
                reserved: 0,
                path,
            });
            Ok(RAILHEAD_OK)
        })
    })
}

/// Appends an operation to those of the connector, which are done one after the other. It runs once railhead_proxy_start is called.
///
/// * `operation` - in.
/// * `op_count` - out: one more than that of the proxy's operation before it. May be NULL.
///
/// Errors: RAILHEAD_USAGE for invalid steps, for a protocol for which the ring has no slots, for too many operations, for a proxy that was stopped; the
/// error of the operation that failed, if one did.
///
/// # Safety
/// `operation` must be NULL or readable for its size, `op_count` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_connector_append(
    connector: *mut railhead_connector_t,
    operation: *const railhead_operation_t,
    op_count: *mut u64,
) -> railhead_status_t {
    call_status("railhead_connector_append", || {
        // SAFETY: the requirement is the caller's own.
        let (operation, op_count) = unsafe { (sized(operation, "operation")?, Out::optional(op_count, "op_count")?) };
        let operation = operation.ok_or_else(|| boundary::bad_pointer(0, "operation", align_of::<railhead_operation_t>()))?;
        let protocol = Protocol::of_number(operation.protocol)
            .ok_or_else(|| Error::usage(format!("protocol {}; accepted: 0 (LL), 1 (LL128) or 2 (SIMPLE)", operation.protocol)))?;
        let slice = operation.slice_steps.max(1).into();
        let chunk = if operation.chunk_steps == 0 { slice } else { operation.chunk_steps.into() };
        let steps = Steps { count: operation.steps, slice, chunk, protocol };
        let count = proxies::connector(handle(connector))?.append(steps)?;
        if let Some(op_count) = op_count {
            op_count.set(count);
        }
        Ok(RAILHEAD_OK)
    })
}

/// Tells what the connector has done.
///
/// * `state` - out.
///
/// # Safety
/// `state` must be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_connector_state(
    connector: *mut railhead_connector_t,
    state: *mut railhead_connector_state_t,
) -> railhead_status_t {
    call_status("railhead_connector_state", || {
        // SAFETY: the requirement is the caller's own.
        let state = unsafe { Out::new(state, "state") }?;
        proxies::connector(handle(connector))?.with(|attached| {
            let counters = attached.connector().counters();
            state.set(railhead_connector_state_t {
                step: attached.connector().step(),
                operations: counters.operations.load(Relaxed),
                messages: counters.messages.load(Relaxed),
                bytes: counters.bytes.load(Relaxed),
                retries: counters.retries.load(Relaxed),
                flushes: counters.flushes.load(Relaxed),
            });
            Ok(RAILHEAD_OK)
        })
    })
}

/// A checked configuration.
#[derive(Clone, Copy)]
struct Plan {
    geometry: Geometry,
    home: Home,
    first_step: u64,
    options: Options,
}

#[derive(Clone, Copy)]
enum Home {
    Private,
    Memfd,
    Named,
    Supplied { control: *mut u8, data: *mut u8, memory: Memory },
}

impl Plan {
    /// # Safety
    /// As for [`sized`].
    unsafe fn new(config: *const railhead_connector_config_t) -> Result<Plan> {
        const DEFAULT_BYTES: usize = 4 << 20; // DEFAULT_BUFFSIZE of SIMPLE: nccl v2.7.8 src/init.cc

        // SAFETY: the requirement is the caller's own.
        let Some(config) = (unsafe { sized(config, "config") })? else {
            let geometry = Geometry::new([0, 0, DEFAULT_BYTES])?;
            return Ok(Plan { geometry, home: Home::Private, first_step: 0, options: Options::default() });
        };
        let buffers = match [config.ll_bytes, config.ll128_bytes, config.simple_bytes] {
            [0, 0, 0] => [0, 0, DEFAULT_BYTES],
            buffers => buffers,
        };
        let memory = match config.memory {
            0 | 1 => Memory::Host,
            2 => Memory::Device,
            other => return Err(Error::usage(format!("config->memory is {other}; accepted: 1 (NCCL_PTR_HOST) or 2 (NCCL_PTR_CUDA)"))),
        };
        let home = match config.home {
            0 => Home::Private,
            1 => Home::Memfd,
            2 => Home::Named,
            3 => Home::Supplied { control: config.control.cast(), data: config.data.cast(), memory },
            other => return Err(Error::usage(format!("config->home is {other}; accepted: 0 to 3 (railhead_ring_home_t)"))),
        };
        if memory == Memory::Device && !matches!(home, Home::Supplied { .. }) {
            return Err(Error::usage("config->memory is NCCL_PTR_CUDA, but the library has no device memory: supply it"));
        }
        let options = Options { tag: config.tag, flush: config.flush != 0, borrowed: false };
        Ok(Plan { geometry: Geometry::new(buffers)?, home, first_step: config.first_step, options })
    }

    /// # Safety
    /// Supplied memory must be as `railhead_connector_config_t` says.
    unsafe fn ring(&self) -> Result<Ring> {
        match self.home {
            Home::Private => Ring::private(self.geometry, self.first_step),
            Home::Memfd => Ring::memfd(self.geometry, self.first_step),
            Home::Named => Ring::named(self.geometry, self.first_step),
            // SAFETY: the requirement is the caller's own.
            Home::Supplied { control, data, memory } => unsafe { Ring::over(control, data, self.geometry, memory, self.first_step) },
        }
    }
}

const _: () = assert!(ring::BUFFER_UNIT == 1024 && ring::BUFFER_MAX == 1 << 30, "what railhead_connector_config_t says");

fn done(made: Option<crate::abi::handle::Handle>, connector: &Out<*mut railhead_connector_t>) -> railhead_status_t {
    match made {
        Some(made) => {
            connector.set(made.to_pointer().cast());
            RAILHEAD_OK
        }
        None => RAILHEAD_IN_PROGRESS,
    }
}
