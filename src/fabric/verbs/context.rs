//! An open device. Made while ports are listed, on the thread that initialises; held by all that is made on the device, on any thread.

use std::ffi::CStr;
use std::path::PathBuf;

use ibverbs_sys::*;
use once_cell::sync::OnceCell;

use super::events::Events;
use super::library::{Library, check, made};
use crate::base::error::{Error, Result};
use crate::base::fork;

/// An open device, shared by its ports.
pub struct Context {
    /// The functions.
    pub library: &'static Library,
    /// The device, open.
    pub raw: *mut ibv_context,
    /// Name.
    pub name: String,
    /// Its folder in sysfs.
    pub sysfs: PathBuf,
    /// Entries of a completion queue at most.
    pub max_cqe: u64,
    /// READs that it answers, and asks, at once per queue pair.
    pub reads_answered: i32,
    /// See above.
    pub reads_asked: i32,
    /// Whether its driver takes DMA-BUFs.
    pub dma_buf: bool,
    events: OnceCell<Events>,
    epoch: u64,
}

// SAFETY: libibverbs' functions may be called from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The thread that waits for its asynchronous events, started at first use.
    pub fn events(&self, fatal: bool) -> Result<&Events> {
        self.events.get_or_try_init(|| Events::start(self.library, self.raw, &self.name, fatal))
    }

    /// Whether this is the process that opened it, and not a forked child.
    pub fn owned(&self) -> bool {
        self.epoch == fork::epoch()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        drop(self.events.take());
        if self.owned() {
            // SAFETY: made by open_device, closed once, after everything made on it (each of which holds it).
            unsafe { (self.library.close_device)(self.raw) };
        }
    }
}

/// Opens `device`, of a list that is alive, and asks what it can.
pub fn open(library: &'static Library, device: *mut ibv_device, name: &str) -> Result<(Context, ibv_device_attr)> {
    // SAFETY: a device of a list that is alive.
    let raw = made(unsafe { (library.open_device)(device) }).map_err(|e| Error::system("ibv_open_device", e))?;
    // SAFETY: the same; its folder is a string inside it.
    let sysfs = unsafe { CStr::from_ptr((*device).ibdev_path.as_ptr()) };
    let mut context = Context {
        library,
        raw,
        name: name.to_owned(),
        sysfs: sysfs.to_string_lossy().into_owned().into(),
        max_cqe: 0,
        reads_answered: 0,
        reads_asked: 0,
        dma_buf: false,
        events: OnceCell::new(),
        epoch: fork::epoch(),
    };
    let mut attr = ibv_device_attr::default();
    // SAFETY: the device is open; the place outlives the call.
    check(unsafe { (library.query_device)(raw, &mut attr) }).map_err(|e| Error::system("ibv_query_device", e))?;
    context.max_cqe = u64::try_from(attr.max_cqe).unwrap_or(0);
    (context.reads_answered, context.reads_asked) = (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom);
    context.dma_buf = takes_dma_buf(library, raw).is_ok();
    Ok((context, attr))
}

/// Asks the driver, as NCCL does, with a descriptor that is none: drivers that can are the ones that look at it.
///
/// Errors: why DMA-BUFs cannot be registered, in words.
pub fn takes_dma_buf(library: &Library, raw: *mut ibv_context) -> std::result::Result<(), String> {
    let Some(reg_mr) = library.reg_dmabuf_mr else {
        return Err("libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 has)".into());
    };
    // SAFETY: the device is open.
    let pd = made(unsafe { (library.alloc_pd)(raw) }).map_err(|e| format!("ibv_alloc_pd: {e}"))?;
    // SAFETY: the domain is live; nothing is registered, as -1 is no descriptor.
    let answer = made(unsafe { reg_mr(pd, 0, 0, 0, -1, 0) });
    // SAFETY: made above, given back once, empty.
    unsafe { (library.dealloc_pd)(pd) };
    match answer {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT)) => {
            Err(format!("the driver refuses them: {e}"))
        }
        Err(_) => Ok(()),
        Ok(_) => Err("the driver takes a descriptor that is none".into()),
    }
}
