//! `railhead_proxy_*`: a proxy over any ncclNet v12 table, for C programs. Any thread, unless a function says otherwise.
//!
//! Checks the arguments; `abi::proxies` and the proxy do the rest.

#![allow(non_camel_case_types)] // The names are C's.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::abi::boundary::{self, Out};
use crate::abi::handle::Handle;
use crate::abi::proxies;
use crate::abi::status::railhead_status_t::RAILHEAD_OK;
use crate::abi::status::{call_status, railhead_status_t};
use crate::abi::table::Table;
use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::thread::Cpus;
use crate::engine;

/// No proxy has been made in this process yet: the first one warns of errors in the environment.
static FIRST: AtomicBool = AtomicBool::new(true);

/// A proxy: a thread that sends and receives for programs that cannot call a network. Made by railhead_proxy_create; not a pointer.
pub struct railhead_proxy_t {
    _opaque: [u8; 0],
}

/// NCCL's logger (ncclDebugLogger_t).
pub type railhead_logger_t =
    Option<unsafe extern "C" fn(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, format: *const c_char, ...)>;

/// Configuration of a proxy. Set `size`, and everything else to zero or to what you want.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct railhead_proxy_config_t {
    /// sizeof(railhead_proxy_config_t).
    pub size: usize,
    /// The context that the table's init returned, for listeners and connections made through the proxy. It must live until the proxy is destroyed. NULL:
    /// the proxy calls init when it first needs a context, and finalize when it is destroyed.
    pub context: *mut c_void,
    /// The logger for that init. Railhead's own table does without; other plugins may not.
    pub logger: railhead_logger_t,
    /// Processors that the thread runs on, as in NCCL_PROXY_CPUSET: "0-3,8". NULL or empty: where the calling thread may.
    pub cpus: *const c_char,
    /// Operations that may be appended and not done. 0: 1048576.
    pub max_operations: u64,
    /// Microseconds that the thread sleeps at a time while its operations have not moved for long. 0: it polls as long as there are operations, as
    /// NCCL's does. Without operations it sleeps in any case.
    pub idle_sleep_us: u32,
    /// Zero.
    pub reserved: u32,
}

/// What a proxy is doing, and what it has done. Counts wrap at 2^64.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct railhead_proxy_state_t {
    /// 1 while the thread sleeps because there is nothing to do.
    pub asleep: u32,
    /// 1 once it was stopped or aborted, or an operation failed: no operation runs any more.
    pub ended: u32,
    /// 1 once an operation failed; railhead_proxy_error says which.
    pub failed: u32,
    /// Zero.
    pub reserved: u32,
    /// The opCount that the next operation will have.
    pub next_op_count: u64,
    /// Operations complete.
    pub done: u64,
    /// Steps that the thread made: in each it tried to advance one operation.
    pub steps: u64,
    /// Laps: in each, one operation of every connector that has any is stepped.
    pub laps: u64,
    /// Those in which nothing moved.
    pub idle_laps: u64,
    /// Times that the thread yielded its processor.
    pub yields: u64,
    /// Times that the thread slept.
    pub sleeps: u64,
}

const _: () = {
    assert!(size_of::<railhead_proxy_config_t>() == 48);
    assert!(offset_of!(railhead_proxy_config_t, context) == 8 && offset_of!(railhead_proxy_config_t, logger) == 16);
    assert!(offset_of!(railhead_proxy_config_t, cpus) == 24 && offset_of!(railhead_proxy_config_t, max_operations) == 32);
    assert!(offset_of!(railhead_proxy_config_t, idle_sleep_us) == 40 && offset_of!(railhead_proxy_config_t, reserved) == 44);
    assert!(size_of::<railhead_proxy_state_t>() == 72);
    assert!(offset_of!(railhead_proxy_state_t, next_op_count) == 16 && offset_of!(railhead_proxy_state_t, sleeps) == 64);
};

/// Makes a proxy over the table `net`, an ncclNet_v12_t; NULL is Railhead's own. Its thread sleeps until something is started.
///
/// * `config` - in, may be NULL for all defaults.
/// * `proxy` - out; the caller destroys it with railhead_proxy_destroy.
///
/// The table and its code must stay until then. The environment is read as by an init, for RAILHEAD_DUMP_SIGNAL.
///
/// Errors: RAILHEAD_USAGE for a table that lacks a function, an invalid `size` or list of processors; RAILHEAD_SYSTEM if the system gives
/// no thread.
///
/// # Safety
/// `net` must be NULL or such a table, and `config->context` NULL or a live context of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_create(
    net: *const c_void,
    config: *const railhead_proxy_config_t,
    proxy: *mut *mut railhead_proxy_t,
) -> railhead_status_t {
    call_status("railhead_proxy_create", || {
        // SAFETY: the requirement is the caller's own.
        let (proxy, config) = unsafe { (Out::new(proxy, "proxy")?, sized(config, "config")?) };
        let settings = match FIRST.swap(false, Ordering::Relaxed) {
            true => Config::from_env(),
            false => Config::quietly(&|name| std::env::var_os(name)),
        };
        let dump_signal = settings.dump_signal.number();
        let mut options = engine::Options { name: "railhead-proxy".into(), dump_signal, ..engine::Options::default() };
        let (mut context, mut logger) = (std::ptr::null_mut(), None);
        if let Some(config) = config {
            (context, logger) = (config.context, config.logger);
            // SAFETY: a C string or NULL, by this function's own requirement.
            options.cpus = unsafe { cpus(config.cpus) }?;
            options.idle_sleep = Duration::from_micros(config.idle_sleep_us.into());
            if config.max_operations > 0 {
                options.limit = config.max_operations;
            }
        }
        // SAFETY: the requirement is the caller's own.
        let table = unsafe { Table::new(net, context, logger) }?;
        proxy.set(proxies::create(table, options)?.to_pointer().cast());
        Ok(RAILHEAD_OK)
    })
}

/// # Safety
/// NULL or a C string.
unsafe fn cpus(list: *const c_char) -> Result<Cpus> {
    if list.is_null() {
        return Ok(Cpus::default());
    }
    // SAFETY: the requirement is the caller's own.
    let list = unsafe { CStr::from_ptr(list) }.to_string_lossy();
    Cpus::parse(&list)
        .ok_or_else(|| Error::usage(format!("processors \"{list}\"; accepted: a list such as 0-3,8, each below 1024, or nothing")))
}

/// Starts the operations that were appended, unless to a group that is still open, and wakes the thread.
///
/// Errors: that of the operation that failed, if one did; RAILHEAD_USAGE if the proxy was stopped.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_proxy_start(proxy: *mut railhead_proxy_t) -> railhead_status_t {
    engine_call("railhead_proxy_start", proxy, engine::Engine::start)
}

/// Opens a group, maybe within another: what any thread appends from now on is held until the group is ended and the proxy started.
///
/// Errors: as railhead_proxy_start.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_proxy_group_start(proxy: *mut railhead_proxy_t) -> railhead_status_t {
    engine_call("railhead_proxy_group_start", proxy, engine::Engine::group_start)
}

/// Ends the innermost group. Starts nothing.
///
/// Errors: as railhead_proxy_start; RAILHEAD_USAGE if there is no group.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_proxy_group_end(proxy: *mut railhead_proxy_t) -> railhead_status_t {
    engine_call("railhead_proxy_group_end", proxy, engine::Engine::group_end)
}

/// Ends all groups and drops what was appended since the outermost was opened.
///
/// Errors: as railhead_proxy_group_end.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_proxy_group_cancel(proxy: *mut railhead_proxy_t) -> railhead_status_t {
    engine_call("railhead_proxy_group_cancel", proxy, engine::Engine::group_cancel)
}

/// Refuses further operations, and waits until those that were started are done and the thread has ended. An operation that never ends makes this wait
/// until another thread calls railhead_proxy_abort.
///
/// What was appended and not started, or belongs to an open group, never runs. Started operations are completed whether they wait behind others or for
/// the producer, the consumer or the peer, and even if the thread sleeps. Stopping or aborting a proxy that has ended does nothing. Several threads may
/// wait here at once.
///
/// Errors: that of the operation that failed, if one did, each time; RAILHEAD_INTERNAL on the proxy's own thread (in a plugin's function or a logger
/// that it calls), which cannot wait for itself: the proxy stops all the same.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_proxy_stop(proxy: *mut railhead_proxy_t) -> railhead_status_t {
    call_status("railhead_proxy_stop", || {
        let proxy = proxies::proxy(handle(proxy))?;
        proxy.engine().stop().map_err(|refusal| proxy.refused(refusal))?;
        proxy.fatal().map_or(Ok(RAILHEAD_OK), |fatal| Err(fatal.error()))
    })
}

/// Ends the proxy's thread after its present step, even if operations are not done, and waits for that. If the step is a call of the table that does not
/// return, this does not return either.
///
/// Operations that are not done stay as they are and never run again, and rings keep their contents; their connectors may be closed. A stop that waits
/// on another thread returns. Does nothing to a proxy that has ended or failed, which is no error here.
///
/// Errors: RAILHEAD_INTERNAL on the proxy's own thread, as railhead_proxy_stop: the proxy ends after its present step all the same.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_proxy_abort(proxy: *mut railhead_proxy_t) -> railhead_status_t {
    engine_call("railhead_proxy_abort", proxy, engine::Engine::abort)
}

/// Aborts the proxy and closes it with all its connectors and listeners: all their handles end, and their rings' memory, unless the caller supplied it,
/// is freed. A comm that the caller supplied stays open. NULL is fine. It need not have been stopped.
///
/// A call that another thread is making on it, its connectors or its listeners ends as if it had come before, and what it made is closed, or after, and is
/// refused. The table and its code must stay until such calls have returned too. So it must not be called from within such a call, by a logger or a function
/// of the table: it may wait for the end of its own caller.
///
/// Errors: the first error of closing them, after which all are closed all the same. RAILHEAD_INTERNAL on the proxy's own thread, as railhead_proxy_stop: nothing was
/// done.
///
/// # Safety
/// No thread may use a ring of it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_destroy(proxy: *mut railhead_proxy_t) -> railhead_status_t {
    call_status("railhead_proxy_destroy", || {
        if !proxy.is_null() {
            proxies::destroy(handle(proxy))?;
        }
        Ok(RAILHEAD_OK)
    })
}

/// Tells what the proxy is doing, and what it has done.
///
/// * `state` - out.
///
/// # Safety
/// `state` must be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_state(proxy: *mut railhead_proxy_t, state: *mut railhead_proxy_state_t) -> railhead_status_t {
    call_status("railhead_proxy_state", || {
        // SAFETY: the requirement is the caller's own.
        let state = unsafe { Out::new(state, "state") }?;
        let proxy = proxies::proxy(handle(proxy))?;
        let (engine, counters) = (proxy.engine(), proxy.counters());
        state.set(railhead_proxy_state_t {
            asleep: engine.is_asleep().into(),
            ended: engine.has_ended().into(),
            failed: proxy.fatal().is_some().into(),
            reserved: 0,
            next_op_count: engine.next_op_count().map_err(|refusal| proxy.refused(refusal))?,
            done: counters.done,
            steps: counters.steps,
            laps: counters.laps,
            idle_laps: counters.idle_laps,
            yields: counters.yields,
            sleeps: counters.sleeps,
        });
        Ok(RAILHEAD_OK)
    })
}

/// Tells which operation failed and why.
///
/// * `message` - out, at most `bytes` bytes, the last of them 0; untouched if no operation failed. May be NULL if `bytes` is 0.
///
/// Returns RAILHEAD_OK if none failed, else the status that the operation failed with.
///
/// # Safety
/// `message` must be NULL or writable for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_error(proxy: *mut railhead_proxy_t, message: *mut c_char, bytes: usize) -> railhead_status_t {
    call_status("railhead_proxy_error", || {
        let proxy = proxies::proxy(handle(proxy))?;
        let Some(fatal) = proxy.fatal() else { return Ok(RAILHEAD_OK) };
        // SAFETY: the requirement is the caller's own.
        unsafe { put_text(&fatal.to_string(), message, bytes, "message") }?;
        Ok((&fatal.error()).into())
    })
}

/// Writes a text for people: one line per operation with its connector, its opCount, its progress, and what it waits for since when. Waits for the
/// present step, at most a second: if that takes longer, the text says which operation the thread is stuck in.
///
/// * `text` - out, at most `bytes` bytes, the last of them 0. May be NULL if `bytes` is 0.
/// * `needed` - out, bytes of the whole text, its 0 included. May be NULL.
///
/// # Safety
/// `text` must be NULL or writable for `bytes` bytes, `needed` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_proxy_dump(
    proxy: *mut railhead_proxy_t,
    text: *mut c_char,
    bytes: usize,
    needed: *mut usize,
) -> railhead_status_t {
    call_status("railhead_proxy_dump", || {
        // SAFETY: the requirement is the caller's own.
        let needed = unsafe { Out::optional(needed, "needed") }?;
        let dump = proxies::proxy(handle(proxy))?.dump()?.to_string();
        // SAFETY: the requirement is the caller's own.
        unsafe { put_text(&dump, text, bytes, "text") }?;
        if let Some(needed) = needed {
            needed.set(dump.len() + 1);
        }
        Ok(RAILHEAD_OK)
    })
}

fn engine_call<T>(
    name: &'static str,
    proxy: *mut railhead_proxy_t,
    call: impl FnOnce(&engine::Engine<crate::proxy::transfer::TransferWork<Table>>) -> std::result::Result<T, engine::Refusal>,
) -> railhead_status_t {
    call_status(name, || {
        let proxy = proxies::proxy(handle(proxy))?;
        call(proxy.engine()).map_err(|refusal| proxy.refused(refusal))?;
        Ok(RAILHEAD_OK)
    })
}

pub(super) fn handle<T>(handle: *mut T) -> Handle {
    Handle::from_pointer(handle.cast())
}

/// Reads a structure that starts with its own size; none for NULL.
///
/// # Safety
/// Unless NULL or misaligned, `pointer` must be valid for reads of as many bytes as its first word says, and nobody may write there meanwhile.
pub(super) unsafe fn sized<T: Copy>(pointer: *const T, name: &'static str) -> Result<Option<T>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the requirement is the caller's own: at least the size is there.
    let size = unsafe { boundary::read(pointer.cast::<usize>(), name) }?;
    if size != size_of::<T>() {
        return Err(Error::usage(format!("{name}->size is {size}; accepted: {}", size_of::<T>())));
    }
    // SAFETY: the requirement is the caller's own: the whole structure is there.
    unsafe { boundary::read(pointer, name) }.map(Some)
}

/// Writes a text and its 0, as much as there is room for.
///
/// # Safety
/// `to` must be NULL or writable for `bytes` bytes.
pub(super) unsafe fn put_text(text: &str, to: *mut c_char, bytes: usize, name: &'static str) -> Result<()> {
    let Some(room) = bytes.checked_sub(1) else { return Ok(()) };
    if to.is_null() {
        return Err(boundary::bad_pointer(0, name, 1));
    }
    // As much as there is room for, in whole characters: a boundary is never further than 4 bytes.
    let end = (0..=room.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    let text = &text.as_bytes()[..end];
    // SAFETY: not NULL; at most `bytes` bytes with the 0, which are writable by this function's own requirement.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        to.cast::<u8>().add(text.len()).write(0);
    }
    Ok(())
}
