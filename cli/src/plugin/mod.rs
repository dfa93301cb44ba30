//! A plugin behind its C ABI, every version of it behind one facade. Used by the commands that drive a plugin, on whichever thread its
//! rules allow.
//!
//! The definitions here are written from NCCL's headers (net_v4.h to net_v12.h): a table is an array of pointers whose places and
//! signatures depend on the version. Nothing is taken from Railhead's own library, so that any plugin can be judged.

mod load;
mod log;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr;

pub use log::{take_log, watch_log};

/// NCCL_PTR_HOST.
pub const HOST: c_int = 1;
/// Versions with a table, newest last.
pub const VERSIONS: [u32; 9] = [4, 5, 6, 7, 8, 9, 10, 11, 12];
/// NCCL_NET_HANDLE_MAXSIZE of v5 and later; v4 has 64.
pub const HANDLE: usize = 128;
/// Buffers of one receive at most (NCCL_NET_MAX_REQUESTS' companion NCCL_NET_MAX_RECVS in NCCL's net.cc).
pub const MAX_RECVS: usize = 8;

type Ptr = *mut c_void;
/// A handle as it travels between ranks.
pub type Handle = [u8; HANDLE];

/// A call that did not return ncclSuccess.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The function of the table.
    pub call: &'static str,
    /// What it returned.
    pub status: c_int,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.status {
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            UNWRITTEN => "*request was not written",
            MISSING => "not in the table",
            _ => "no ncclResult_t",
        };
        write!(f, "{} returned {} ({name})", self.call, self.status)
    }
}

impl std::error::Error for Failure {}

/// What a call gives.
pub type Result<T> = std::result::Result<T, Failure>;

/// A comm, request or registration of the plugin: opaque.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opaque(pub Ptr);

// SAFETY: never dereferenced here; the caller keeps the plugin's rules on which thread may use it.
unsafe impl Send for Opaque {}
// SAFETY: as above.
unsafe impl Sync for Opaque {}

/// One buffer of a receive.
#[derive(Debug, Clone, Copy)]
pub struct Buf {
    /// First byte.
    pub addr: *mut u8,
    /// Bytes.
    pub len: usize,
    /// Which sends it takes.
    pub tag: c_int,
    /// Registration that covers it.
    pub mr: Opaque,
}

/// A device's properties.
#[derive(Debug, Clone)]
pub struct Properties {
    /// Name; empty where the plugin gives none.
    pub name: String,
    /// Path in /sys.
    pub pci_path: Option<String>,
    /// Unique per NIC.
    pub guid: u64,
    /// NCCL_PTR_* bits.
    pub ptr_support: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// On the NIC.
    pub port: c_int,
    /// Comms at most.
    pub max_comms: c_int,
    /// Buffers of one receive at most.
    pub max_recvs: c_int,
    /// v9 and later: the devices that it is made of.
    pub vdevs: Option<Vec<c_int>>,
    /// v9 and later.
    pub max_p2p_bytes: Option<usize>,
}

/// A loaded table.
pub struct Plugin {
    version: u32,
    table: *const *const c_void,
    ctx: Ptr,
    _library: libloading::Library,
}

// SAFETY: the table is constant; the plugin's rules say which calls may run at once.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

/// Index of a function in the table of a version.
#[derive(Clone, Copy)]
enum F {
    Init,
    Devices,
    Properties,
    Listen,
    Connect,
    Accept,
    RegMr,
    DeregMr,
    Isend,
    Irecv,
    Iflush,
    Test,
    CloseSend,
    CloseRecv,
    CloseListen,
    Finalize,
    SetNetAttr,
}

impl F {
    fn name(self) -> &'static str {
        match self {
            F::Init => "init",
            F::Devices => "devices",
            F::Properties => "getProperties",
            F::Listen => "listen",
            F::Connect => "connect",
            F::Accept => "accept",
            F::RegMr => "regMr",
            F::DeregMr => "deregMr",
            F::Isend => "isend",
            F::Irecv => "irecv",
            F::Iflush => "iflush",
            F::Test => "test",
            F::CloseSend => "closeSend",
            F::CloseRecv => "closeRecv",
            F::CloseListen => "closeListen",
            F::Finalize => "finalize",
            F::SetNetAttr => "setNetAttr",
        }
    }

    fn index(self, version: u32) -> usize {
        // Behind the name. v6 inserted regMrDmaBuf behind regMr; v7 appended getDeviceMr and irecvConsumed, v9 makeVDevice, v11 finalize.
        let shift = usize::from(version >= 6);
        match self {
            F::Init => 1,
            F::Devices => 2,
            F::Properties => 3,
            F::Listen => 4,
            F::Connect => 5,
            F::Accept => 6,
            F::RegMr => 7,
            F::DeregMr => 8 + shift,
            F::Isend => 9 + shift,
            F::Irecv => 10 + shift,
            F::Iflush => 11 + shift,
            F::Test => 12 + shift,
            F::CloseSend => 13 + shift,
            F::CloseRecv => 14 + shift,
            F::CloseListen => 15 + shift,
            F::Finalize => 20,
            F::SetNetAttr => 21,
        }
    }
}

/// Calls `$f` of the table with the given types; a status other than success is an error.
macro_rules! call {
    ($self:ident, $f:expr, ($($type:ty),*), $($arg:expr),*) => {{
        let entry = $self.entry($f)?;
        // SAFETY: NCCL's header gives this function this signature in this version.
        let function = unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> c_int>(entry) };
        // SAFETY: the arguments are what the interface asks for.
        match unsafe { function($($arg),*) } {
            0 => Ok(()),
            status => Err(Failure { call: $f.name(), status }),
        }
    }};
}

mod probe;

/// [`Failure::status`] of a function that the table does not have.
pub const MISSING: c_int = -1;

/// What output arguments hold before a call: no value that the plugin could mean.
const GARBAGE: Ptr = 0x5A5A_5A5A_5A5A_5A5A_usize as Ptr;

impl Plugin {
    /// The version of the table.
    pub fn version(&self) -> u32 {
        self.version
    }

    #[inline]
    fn entry(&self, f: F) -> Result<*const c_void> {
        // SAFETY: the table of this version has an entry there.
        let entry = unsafe { *self.table.add(f.index(self.version)) };
        // NULL: a function that the plugin does not offer.
        if entry.is_null() { Err(Failure { call: f.name(), status: MISSING }) } else { Ok(entry) }
    }

    /// The table's name.
    pub fn name(&self) -> String {
        // SAFETY: the first member of each table is a C string.
        unsafe { CStr::from_ptr((*self.table).cast()) }.to_string_lossy().into_owned()
    }

    pub fn init(&mut self) -> Result<()> {
        let log = log::railhead_cli_logger as *const c_void;
        match self.version {
            4..=9 => call!(self, F::Init, (*const c_void), log),
            10 => call!(self, F::Init, (*const c_void, *const c_void), log, ptr::null()),
            _ => {
                let mut config: c_int = -1;
                let mut ctx = GARBAGE;
                let types = call!(
                    self,
                    F::Init,
                    (*mut Ptr, u64, *mut c_int, *const c_void, *const c_void),
                    &raw mut ctx,
                    0x1234,
                    &raw mut config,
                    log,
                    ptr::null()
                );
                self.ctx = ctx;
                types
            }
        }
    }

    /// v11 and later; before, nothing.
    pub fn finalize(&mut self) -> Result<()> {
        if self.version < 11 { Ok(()) } else { call!(self, F::Finalize, (Ptr), self.ctx) }
    }

    pub fn devices(&self) -> Result<c_int> {
        let mut n = -1;
        call!(self, F::Devices, (*mut c_int), &raw mut n)?;
        Ok(n)
    }

    pub fn properties(&self, dev: c_int) -> Result<Properties> {
        let mut raw = [0xA5A5_A5A5_A5A5_A5A5u64; 64];
        call!(self, F::Properties, (c_int, Ptr), dev, raw.as_mut_ptr().cast())?;
        let bytes: Vec<u8> = raw.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let int = |at: usize| bytes[at..].first_chunk().map_or(0, |b| c_int::from_ne_bytes(*b));
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
        let text = |at: usize| {
            let p = word(at) as *const c_char;
            // SAFETY: a C string or NULL, kept by the plugin.
            (!p.is_null()).then(|| unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned())
        };
        // ptrSupport is followed by regIsGlobal from v8 on and by forceFlush from v9 on; latency came with v5.
        let speed = match self.version {
            4..=7 => 28,
            8 => 32,
            _ => 36,
        };
        let comms = if self.version == 4 { speed + 8 } else { speed + 12 };
        let most = if self.version >= 12 { 8 } else { 4 };
        let vprops = self.version >= 9;
        Ok(Properties {
            name: text(0).unwrap_or_default(),
            pci_path: text(8),
            guid: word(16),
            ptr_support: int(24),
            speed: int(speed),
            port: int(speed + 4),
            max_comms: int(comms),
            max_recvs: if self.version == 4 { 1 } else { int(comms + 4) },
            vdevs: vprops.then(|| (0..int(64).clamp(0, most) as usize).map(|i| int(68 + 4 * i)).collect()),
            max_p2p_bytes: vprops.then(|| word((68 + 4 * most as usize).next_multiple_of(8)) as usize),
        })
    }

    pub fn listen(&self, dev: c_int) -> Result<(Handle, Opaque)> {
        let (mut handle, mut comm) = ([0u8; HANDLE], GARBAGE);
        let (h, c) = (handle.as_mut_ptr().cast(), &raw mut comm);
        if self.version >= 11 {
            call!(self, F::Listen, (Ptr, c_int, Ptr, *mut Ptr), self.ctx, dev, h, c)?;
        } else {
            call!(self, F::Listen, (c_int, Ptr, *mut Ptr), dev, h, c)?;
        }
        Ok((handle, Opaque(comm)))
    }

    /// `None`: call again, with the same handle.
    pub fn connect(&self, dev: c_int, handle: &mut Handle) -> Result<Option<Opaque>> {
        // SAFETY: a handle of full size.
        unsafe { self.connect_at(dev, handle.as_mut_ptr()) }
    }

    /// As `connect`, with the handle wherever the caller wants it.
    ///
    /// # Safety
    /// `handle` must be valid for the version's handle size.
    pub unsafe fn connect_at(&self, dev: c_int, handle: *mut u8) -> Result<Option<Opaque>> {
        let mut comm = ptr::null_mut();
        let (h, c): (Ptr, _) = (handle.cast(), &raw mut comm);
        let (mut config, mut device): (c_int, Ptr) = (-1, ptr::null_mut());
        let (config, device) = (&raw mut config, &raw mut device);
        match self.version {
            4..=6 => call!(self, F::Connect, (c_int, Ptr, *mut Ptr), dev, h, c)?,
            7..=9 => call!(self, F::Connect, (c_int, Ptr, *mut Ptr, *mut Ptr), dev, h, c, device)?,
            10 => call!(self, F::Connect, (c_int, *mut c_int, Ptr, *mut Ptr, *mut Ptr), dev, config, h, c, device)?,
            _ => call!(self, F::Connect, (Ptr, c_int, Ptr, *mut Ptr, *mut Ptr), self.ctx, dev, h, c, device)?,
        }
        Ok((!comm.is_null()).then_some(Opaque(comm)))
    }

    /// `None`: call again.
    pub fn accept(&self, listen: Opaque) -> Result<Option<Opaque>> {
        let mut comm = ptr::null_mut();
        let mut device: Ptr = ptr::null_mut();
        if self.version >= 7 {
            call!(self, F::Accept, (Ptr, *mut Ptr, *mut Ptr), listen.0, &raw mut comm, &raw mut device)?;
        } else {
            call!(self, F::Accept, (Ptr, *mut Ptr), listen.0, &raw mut comm)?;
        }
        Ok((!comm.is_null()).then_some(Opaque(comm)))
    }

    pub fn reg_mr(&self, comm: Opaque, addr: *mut u8, len: usize) -> Result<Opaque> {
        let mut mr = GARBAGE;
        if self.version >= 8 {
            call!(self, F::RegMr, (Ptr, Ptr, usize, c_int, *mut Ptr), comm.0, addr.cast(), len, HOST, &raw mut mr)?;
        } else {
            call!(self, F::RegMr, (Ptr, Ptr, c_int, c_int, *mut Ptr), comm.0, addr.cast(), len as c_int, HOST, &raw mut mr)?;
        }
        Ok(Opaque(mr))
    }

    pub fn dereg_mr(&self, comm: Opaque, mr: Opaque) -> Result<()> {
        call!(self, F::DeregMr, (Ptr, Ptr), comm.0, mr.0)
    }

    /// `None`: not now, call again.
    pub fn isend(&self, comm: Opaque, addr: *const u8, len: usize, tag: c_int, mr: Opaque) -> Result<Option<Opaque>> {
        let mut request = GARBAGE;
        let (d, r): (Ptr, _) = (addr.cast_mut().cast(), &raw mut request);
        let n = len as c_int;
        let result = match self.version {
            4 => call!(self, F::Isend, (Ptr, Ptr, c_int, Ptr, *mut Ptr), comm.0, d, n, mr.0, r),
            5..=8 => call!(self, F::Isend, (Ptr, Ptr, c_int, c_int, Ptr, *mut Ptr), comm.0, d, n, tag, mr.0, r),
            9 => call!(self, F::Isend, (Ptr, Ptr, usize, c_int, Ptr, *mut Ptr), comm.0, d, len, tag, mr.0, r),
            _ => call!(self, F::Isend, (Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr), comm.0, d, len, tag, mr.0, ptr::null_mut(), r),
        };
        taken("isend", result, request)
    }

    /// `None`: not now, call again. At most 8 buffers.
    pub fn irecv(&self, comm: Opaque, bufs: &[Buf]) -> Result<Option<Opaque>> {
        self.irecv_with(comm, bufs, GARBAGE)
    }

    /// As `irecv`, with `*request` as given on input (0x1 is NCCL_NET_OPTIONAL_RECV_COMPLETION).
    pub fn irecv_with(&self, comm: Opaque, bufs: &[Buf], input: Ptr) -> Result<Option<Opaque>> {
        let mut request = input;
        let r = &raw mut request;
        let n = bufs.len() as c_int;
        let (mut data, mut mrs, mut phandles) =
            ([ptr::null_mut::<c_void>(); 8], [ptr::null_mut::<c_void>(); 8], [ptr::null_mut::<c_void>(); 8]);
        let (mut tags, mut ints, mut sizes) = ([0 as c_int; 8], [0 as c_int; 8], [0usize; 8]);
        for (i, b) in bufs.iter().enumerate().take(MAX_RECVS) {
            (data[i], mrs[i], tags[i], ints[i], sizes[i]) = (b.addr.cast(), b.mr.0, b.tag, b.len as c_int, b.len);
        }
        let (d, m, t) = (data.as_mut_ptr(), mrs.as_mut_ptr(), tags.as_mut_ptr());
        let result = match self.version {
            4 => {
                call!(self, F::Irecv, (Ptr, Ptr, c_int, Ptr, *mut Ptr), comm.0, data[0], ints[0], mrs[0], r)
            }
            5..=8 => {
                let s = ints.as_mut_ptr();
                call!(self, F::Irecv, (Ptr, c_int, *mut Ptr, *mut c_int, *mut c_int, *mut Ptr, *mut Ptr), comm.0, n, d, s, t, m, r)
            }
            9 => {
                let s = sizes.as_mut_ptr();
                call!(self, F::Irecv, (Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr), comm.0, n, d, s, t, m, r)
            }
            _ => {
                let (s, p) = (sizes.as_mut_ptr(), phandles.as_mut_ptr());
                type Types = unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr, *mut Ptr) -> c_int;
                // SAFETY: NCCL's header gives irecv this signature since v10.
                let function = unsafe { std::mem::transmute::<*const c_void, Types>(self.entry(F::Irecv)?) };
                // SAFETY: arrays of eight, n of which are filled.
                match unsafe { function(comm.0, n, d, s, t, m, p, r) } {
                    0 => Ok(()),
                    status => Err(Failure { call: F::Irecv.name(), status }),
                }
            }
        };
        taken("irecv", result, request)
    }

    /// `None`: nothing to wait for.
    pub fn iflush(&self, comm: Opaque, bufs: &[Buf]) -> Result<Option<Opaque>> {
        let mut request = GARBAGE;
        let r = &raw mut request;
        let n = bufs.len() as c_int;
        let (mut data, mut mrs, mut sizes) = ([ptr::null_mut::<c_void>(); 8], [ptr::null_mut::<c_void>(); 8], [0 as c_int; 8]);
        for (i, b) in bufs.iter().enumerate().take(MAX_RECVS) {
            (data[i], mrs[i], sizes[i]) = (b.addr.cast(), b.mr.0, b.len as c_int);
        }
        let (d, s, m) = (data.as_mut_ptr(), sizes.as_mut_ptr(), mrs.as_mut_ptr());
        let result = match self.version {
            4 => call!(self, F::Iflush, (Ptr, Ptr, c_int, Ptr, *mut Ptr), comm.0, data[0], sizes[0], mrs[0], r),
            _ => call!(self, F::Iflush, (Ptr, c_int, *mut Ptr, *mut c_int, *mut Ptr, *mut Ptr), comm.0, n, d, s, m, r),
        };
        taken("iflush", result, request)
    }

    /// `None`: not done. Else the sizes, as many as there were buffers.
    pub fn test(&self, request: Opaque) -> Result<Option<[c_int; 8]>> {
        let (mut done, mut sizes) = (-1, [-1; 8]);
        call!(self, F::Test, (Ptr, *mut c_int, *mut c_int), request.0, &raw mut done, sizes.as_mut_ptr())?;
        Ok((done != 0).then_some(sizes))
    }

    pub fn close_send(&self, comm: Opaque) -> Result<()> {
        call!(self, F::CloseSend, (Ptr), comm.0)
    }

    pub fn close_recv(&self, comm: Opaque) -> Result<()> {
        call!(self, F::CloseRecv, (Ptr), comm.0)
    }

    pub fn close_listen(&self, comm: Opaque) -> Result<()> {
        call!(self, F::CloseListen, (Ptr), comm.0)
    }
}

/// [`Failure::status`] of a post that left `*request` as it was.
pub const UNWRITTEN: c_int = -2;

/// `*request` must have been written by a call that succeeds. What a failed call leaves there is not looked at by NCCL.
#[inline]
fn taken(call: &'static str, result: Result<()>, request: Ptr) -> Result<Option<Opaque>> {
    result?;
    if request == GARBAGE {
        return Err(Failure { call, status: UNWRITTEN });
    }
    Ok((!request.is_null()).then_some(Opaque(request)))
}
