//! A plugin's table behind one set of methods, whatever its version. For the program and, included by path, for the tests, on whichever
//! thread the plugin's rules allow.
//!
//! Written from NCCL's headers (net_v4.h to net_v12.h): a table is an array of pointers whose places and signatures depend on the version.
//! Nothing is taken from Railhead's own library, so that any plugin can be judged. The parent module says what a failure is and where the
//! plugin's log goes.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use super::{Failure, failed, logger, unwritten};

/// NCCL_PTR_HOST.
pub const HOST: c_int = 1;
/// Versions with a table, newest last.
pub const VERSIONS: [u32; 9] = [4, 5, 6, 7, 8, 9, 10, 11, 12];
/// NCCL_NET_HANDLE_MAXSIZE of v5 and later; v4 has 64.
pub const HANDLE: usize = 128;
/// Buffers of one receive at most (NCCL_NET_MAX_REQUESTS' companion NCCL_NET_MAX_RECVS in NCCL's net.cc).
pub const MAX_RECVS: usize = 8;

/// A status that no plugin returns: the table lacks the function.
pub const MISSING: c_int = -1;

/// What output arguments hold before a call: no value that the plugin could mean.
const GARBAGE: Ptr = 0x5A5A_5A5A_5A5A_5A5A_usize as Ptr;

type Ptr = *mut c_void;
type Ptrs = *mut Ptr;
type Ints = *mut c_int;
/// What a call gives.
pub type Result<T> = std::result::Result<T, Failure>;
/// A handle as it travels between ranks.
pub type Handle = [u8; HANDLE];

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
    /// v7 and later: netDeviceType and netDeviceVersion.
    pub net_device: Option<(c_int, c_int)>,
    /// v9 and later: the devices that it is made of.
    pub vdevs: Option<Vec<c_int>>,
    /// v9 and later.
    pub max_p2p_bytes: Option<usize>,
}

/// The buffers of a receive, as the arrays that C takes.
struct Arrays {
    n: c_int,
    data: [Ptr; MAX_RECVS],
    mrs: [Ptr; MAX_RECVS],
    tags: [c_int; MAX_RECVS],
    ints: [c_int; MAX_RECVS],
    sizes: [usize; MAX_RECVS],
}

impl Arrays {
    #[inline]
    fn of(bufs: &[Buf]) -> Arrays {
        let none = [ptr::null_mut(); MAX_RECVS];
        let mut a = Arrays { n: bufs.len() as c_int, data: none, mrs: none, tags: [0; 8], ints: [0; 8], sizes: [0; 8] };
        for (i, b) in bufs.iter().enumerate().take(MAX_RECVS) {
            (a.data[i], a.mrs[i], a.tags[i], a.ints[i], a.sizes[i]) = (b.addr.cast(), b.mr.0, b.tag, b.len as c_int, b.len);
        }
        a
    }
}

/// A loaded table. The file stays loaded.
pub struct Plugin {
    version: u32,
    table: *const *const c_void,
    library: Ptr,
    ctx: Ptr,
}

// SAFETY: the table is constant; the plugin's rules say which calls may run at once.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

/// A function: its place in the tables of v6 and later, and its name. v6 put regMrDmaBuf behind regMr; what later versions brought follows
/// behind closeListen.
#[derive(Clone, Copy)]
struct F(usize, &'static str);

const INIT: F = F(1, "init");
const DEVICES: F = F(2, "devices");
const PROPERTIES: F = F(3, "getProperties");
const LISTEN: F = F(4, "listen");
const CONNECT: F = F(5, "connect");
const ACCEPT: F = F(6, "accept");
const REG_MR: F = F(7, "regMr");
const DEREG_MR: F = F(9, "deregMr");
const ISEND: F = F(10, "isend");
const IRECV: F = F(11, "irecv");
const IFLUSH: F = F(12, "iflush");
const TEST: F = F(13, "test");
const CLOSE_SEND: F = F(14, "closeSend");
const CLOSE_RECV: F = F(15, "closeRecv");
const CLOSE_LISTEN: F = F(16, "closeListen");
const MAKE_VDEVICE: F = F(19, "makeVDevice");
const FINALIZE: F = F(20, "finalize");
const SET_NET_ATTR: F = F(21, "setNetAttr");

/// Functions that NCCL calls without a look whether they are there; finalize from v11 on.
const MANDATORY: [F; 14] =
    [INIT, DEVICES, PROPERTIES, LISTEN, CONNECT, ACCEPT, REG_MR, DEREG_MR, ISEND, IRECV, TEST, CLOSE_SEND, CLOSE_RECV, CLOSE_LISTEN];

/// Calls `$f` of the table with the given types; a status other than success is an error.
macro_rules! call {
    ($self:ident, $f:expr, ($($type:ty),*), $($arg:expr),*) => {{
        let entry = $self.entry($f)?;
        // SAFETY: NCCL's header gives this function this signature in this version.
        let function = unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> c_int>(entry) };
        // SAFETY: the arguments are what the interface asks for, or what a test wants to be refused.
        match unsafe { function($($arg),*) } {
            0 => Ok(()),
            status => Err(failed($f.1, status)),
        }
    }};
}

impl Plugin {
    /// The table of a version, not initialised. Errors: the loader's words, or nothing where the file exports no such table.
    pub fn open(path: &Path, version: u32) -> std::result::Result<Plugin, Option<String>> {
        let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|e| Some(e.to_string()))?;
        // SAFETY: loading runs the file's initialisers, which is what the caller asks for by naming it.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: what dlerror returns is a C string or NULL, which is ruled out behind an error.
            return Err(Some(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned()));
        }
        let symbol = CString::new(format!("ncclNetPlugin_v{version}")).map_err(|_| None)?;
        // SAFETY: a loaded library and the name of a symbol.
        let table = unsafe { libc::dlsym(library, symbol.as_ptr()) };
        if table.is_null() {
            // SAFETY: opened above, and nobody else has it.
            unsafe { libc::dlclose(library) };
            return Err(None);
        }
        Ok(Plugin { version, table: table.cast_const().cast(), library, ctx: GARBAGE })
    }

    /// A table at an address.
    ///
    /// # Safety
    /// `library` is open and belongs to the result, and `table` is a table of this version in it.
    pub unsafe fn at(version: u32, table: *const *const c_void, library: Ptr) -> Plugin {
        Plugin { version, table, library, ctx: GARBAGE }
    }

    /// As NCCL's last user does: dlclose.
    pub fn unload(self) {
        // SAFETY: open since `self` was made, which is gone afterwards.
        assert_eq!(unsafe { libc::dlclose(self.library) }, 0, "dlclose");
    }

    /// The version of the table.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The table itself.
    pub fn table(&self) -> *const c_void {
        self.table.cast()
    }

    #[inline]
    fn entry(&self, f: F) -> Result<*const c_void> {
        let at = if self.version < 6 && f.0 > REG_MR.0 { f.0 - 1 } else { f.0 };
        // SAFETY: the table of this version has an entry there.
        let entry = unsafe { *self.table.add(at) };
        // NULL: a function that the plugin does not offer.
        if entry.is_null() { Err(failed(f.1, MISSING)) } else { Ok(entry) }
    }

    /// isend, irecv and test as they stand in the table, for who calls nothing else.
    pub fn hot_calls(&self) -> Result<[*const c_void; 3]> {
        Ok([self.entry(ISEND)?, self.entry(IRECV)?, self.entry(TEST)?])
    }

    /// Mandatory functions that the table does not have.
    pub fn missing(&self) -> Vec<&'static str> {
        let finalize = (self.version >= 11).then_some(FINALIZE);
        MANDATORY.into_iter().chain(finalize).filter(|f| self.entry(*f).is_err()).map(|f| f.1).collect()
    }

    /// The table's name; empty where it has none.
    pub fn name(&self) -> String {
        // SAFETY: the first member of each table is a C string or NULL.
        unsafe { text(*self.table) }.unwrap_or_default()
    }

    /// Once, before anything else.
    pub fn init(&mut self) -> Result<()> {
        let log = logger as *const c_void;
        match self.version {
            4..=9 => call!(self, INIT, (*const c_void), log),
            10 => call!(self, INIT, (*const c_void, *const c_void), log, ptr::null()),
            _ => {
                let (mut config, mut ctx) = (-1, GARBAGE);
                let (c, x) = (&raw mut config, &raw mut ctx);
                let result = call!(self, INIT, (Ptrs, u64, Ints, *const c_void, *const c_void), x, 0x1234, c, log, ptr::null());
                self.ctx = ctx;
                result
            }
        }
    }

    /// v11 and later; before, nothing.
    pub fn finalize(&mut self) -> Result<()> {
        if self.version < 11 { Ok(()) } else { call!(self, FINALIZE, (Ptr), self.ctx) }
    }

    /// How many there are.
    pub fn devices(&self) -> Result<c_int> {
        let mut n = -1;
        call!(self, DEVICES, (Ints), &raw mut n)?;
        Ok(n)
    }

    /// What the plugin says of a device.
    pub fn properties(&self, dev: c_int) -> Result<Properties> {
        let mut raw = [0xA5A5_A5A5_A5A5_A5A5u64; 64];
        call!(self, PROPERTIES, (c_int, Ptr), dev, raw.as_mut_ptr().cast())?;
        let bytes: Vec<u8> = raw.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let int = |at: usize| bytes[at..].first_chunk().map_or(0, |b| c_int::from_ne_bytes(*b));
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
        // SAFETY: a C string or NULL, kept by the plugin.
        let text = |at: usize| unsafe { text(word(at) as *const c_void) };
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
            net_device: (self.version >= 7).then(|| (int(comms + 8), int(comms + 12))),
            vdevs: vprops.then(|| (0..int(64).clamp(0, most) as usize).map(|i| int(68 + 4 * i)).collect()),
            max_p2p_bytes: vprops.then(|| word((68 + 4 * most as usize).next_multiple_of(8)) as usize),
        })
    }

    /// v9 and later: one device of several.
    pub fn make_vdevice(&self, devs: &[c_int]) -> Result<c_int> {
        let mut props = [0; 9];
        props[0] = devs.len() as c_int;
        props[1..=devs.len()].copy_from_slice(devs);
        let mut dev = -1;
        call!(self, MAKE_VDEVICE, (Ints, Ptr), &raw mut dev, props.as_mut_ptr().cast())?;
        Ok(dev)
    }

    /// v11 and later: hints for transfers of one operation (a bit of ncclFunc_t), the rest undefined. Many plugins lack it.
    pub fn set_net_attr(&self, op: u32) -> Result<()> {
        // NCCL_NET_ATTR_UNDEF, as the four numbers of a comm's attributes, twice; then op, algo, proto.
        let mut attributes = [u32::MAX; 11];
        attributes[8] = op;
        call!(self, SET_NET_ATTR, (Ptr, *mut u32), self.ctx, attributes.as_mut_ptr())
    }

    /// A listener, and the handle that leads to it.
    pub fn listen(&self, dev: c_int) -> Result<(Handle, Opaque)> {
        let mut handle = [0u8; HANDLE];
        // SAFETY: a handle of full size.
        let comm = unsafe { self.listen_at(dev, handle.as_mut_ptr()) }?;
        Ok((handle, comm))
    }

    /// As `listen`, with the handle wherever the caller wants it.
    ///
    /// # Safety
    /// `handle` must be valid for the version's handle size.
    pub unsafe fn listen_at(&self, dev: c_int, handle: *mut u8) -> Result<Opaque> {
        let mut comm = GARBAGE;
        let (h, c) = (handle.cast(), &raw mut comm);
        match self.version {
            ..=10 => call!(self, LISTEN, (c_int, Ptr, Ptrs), dev, h, c)?,
            _ => call!(self, LISTEN, (Ptr, c_int, Ptr, Ptrs), self.ctx, dev, h, c)?,
        }
        Ok(Opaque(comm))
    }

    /// `None`: call again, with the same handle.
    pub fn connect(&self, dev: c_int, handle: &mut Handle) -> Result<Option<Opaque>> {
        // SAFETY: a handle of full size.
        unsafe { self.connect_at(dev, handle.as_mut_ptr(), Some(&mut ptr::null_mut())) }
    }

    /// As `connect`, with the handle wherever the caller wants it and, from v7 on, with a place for a device handle or without one.
    ///
    /// # Safety
    /// `handle` must be valid for the version's handle size.
    pub unsafe fn connect_at(&self, dev: c_int, handle: *mut u8, device: Option<&mut Ptr>) -> Result<Option<Opaque>> {
        let (mut comm, mut config): (Ptr, c_int) = (ptr::null_mut(), -1);
        let (h, c): (Ptr, _) = (handle.cast(), &raw mut comm);
        let d: Ptrs = device.map_or(ptr::null_mut(), |d| d);
        match self.version {
            ..=6 => call!(self, CONNECT, (c_int, Ptr, Ptrs), dev, h, c)?,
            7..=9 => call!(self, CONNECT, (c_int, Ptr, Ptrs, Ptrs), dev, h, c, d)?,
            10 => call!(self, CONNECT, (c_int, Ints, Ptr, Ptrs, Ptrs), dev, &raw mut config, h, c, d)?,
            _ => call!(self, CONNECT, (Ptr, c_int, Ptr, Ptrs, Ptrs), self.ctx, dev, h, c, d)?,
        }
        Ok((!comm.is_null()).then_some(Opaque(comm)))
    }

    /// `None`: call again.
    pub fn accept(&self, listen: Opaque) -> Result<Option<Opaque>> {
        self.accept_offering(listen, Some(&mut ptr::null_mut()))
    }

    /// As `accept`, from v7 on with a place for a device handle or without one.
    pub fn accept_offering(&self, listen: Opaque, device: Option<&mut Ptr>) -> Result<Option<Opaque>> {
        let mut comm = ptr::null_mut();
        match self.version {
            ..=6 => call!(self, ACCEPT, (Ptr, Ptrs), listen.0, &raw mut comm)?,
            _ => call!(self, ACCEPT, (Ptr, Ptrs, Ptrs), listen.0, &raw mut comm, device.map_or(ptr::null_mut(), |d| d))?,
        }
        Ok((!comm.is_null()).then_some(Opaque(comm)))
    }

    /// Registers host memory.
    pub fn reg_mr(&self, comm: Opaque, addr: *mut u8, len: usize) -> Result<Opaque> {
        let (mut mr, a) = (GARBAGE, addr.cast());
        match self.version {
            ..=7 => call!(self, REG_MR, (Ptr, Ptr, c_int, c_int, Ptrs), comm.0, a, len as c_int, HOST, &raw mut mr)?,
            _ => call!(self, REG_MR, (Ptr, Ptr, usize, c_int, Ptrs), comm.0, a, len, HOST, &raw mut mr)?,
        }
        Ok(Opaque(mr))
    }

    /// Ends a registration.
    pub fn dereg_mr(&self, comm: Opaque, mr: Opaque) -> Result<()> {
        call!(self, DEREG_MR, (Ptr, Ptr), comm.0, mr.0)
    }

    /// `None`: not now, call again.
    pub fn isend(&self, comm: Opaque, addr: *const u8, len: usize, tag: c_int, mr: Opaque) -> Result<Option<Opaque>> {
        let mut request = GARBAGE;
        let (d, r): (Ptr, _) = (addr.cast_mut().cast(), &raw mut request);
        let n = len as c_int;
        let result = match self.version {
            4 => call!(self, ISEND, (Ptr, Ptr, c_int, Ptr, Ptrs), comm.0, d, n, mr.0, r),
            5..=8 => call!(self, ISEND, (Ptr, Ptr, c_int, c_int, Ptr, Ptrs), comm.0, d, n, tag, mr.0, r),
            9 => call!(self, ISEND, (Ptr, Ptr, usize, c_int, Ptr, Ptrs), comm.0, d, len, tag, mr.0, r),
            _ => call!(self, ISEND, (Ptr, Ptr, usize, c_int, Ptr, Ptr, Ptrs), comm.0, d, len, tag, mr.0, ptr::null_mut(), r),
        };
        taken(ISEND, result, request)
    }

    /// `None`: not now, call again. At most 8 buffers.
    pub fn irecv(&self, comm: Opaque, bufs: &[Buf]) -> Result<Option<Opaque>> {
        self.irecv_with(comm, bufs, GARBAGE)
    }

    /// As `irecv`, with `*request` as given on input (0x1 is NCCL_NET_OPTIONAL_RECV_COMPLETION).
    pub fn irecv_with(&self, comm: Opaque, bufs: &[Buf], input: Ptr) -> Result<Option<Opaque>> {
        self.receive(comm, bufs, [ptr::null_mut(); MAX_RECVS].as_mut_ptr(), input)
    }

    /// As `irecv`, from v10 on with NULL for the profiler's handles.
    pub fn irecv_unprofiled(&self, comm: Opaque, buf: &Buf) -> Result<Option<Opaque>> {
        self.receive(comm, std::slice::from_ref(buf), ptr::null_mut(), GARBAGE)
    }

    #[inline]
    fn receive(&self, comm: Opaque, bufs: &[Buf], p: Ptrs, mut request: Ptr) -> Result<Option<Opaque>> {
        let (mut a, r) = (Arrays::of(bufs), &raw mut request);
        let (n, d, t, m) = (a.n, a.data.as_mut_ptr(), a.tags.as_mut_ptr(), a.mrs.as_mut_ptr());
        let (i, s) = (a.ints.as_mut_ptr(), a.sizes.as_mut_ptr());
        let result = match self.version {
            4 => call!(self, IRECV, (Ptr, Ptr, c_int, Ptr, Ptrs), comm.0, a.data[0], a.ints[0], a.mrs[0], r),
            5..=8 => call!(self, IRECV, (Ptr, c_int, Ptrs, Ints, Ints, Ptrs, Ptrs), comm.0, n, d, i, t, m, r),
            9 => call!(self, IRECV, (Ptr, c_int, Ptrs, *mut usize, Ints, Ptrs, Ptrs), comm.0, n, d, s, t, m, r),
            _ => call!(self, IRECV, (Ptr, c_int, Ptrs, *mut usize, Ints, Ptrs, Ptrs, Ptrs), comm.0, n, d, s, t, m, p, r),
        };
        taken(IRECV, result, request)
    }

    /// `None`: nothing to wait for.
    pub fn iflush(&self, comm: Opaque, bufs: &[Buf]) -> Result<Option<Opaque>> {
        let (mut a, mut request) = (Arrays::of(bufs), GARBAGE);
        let (d, s, m, r) = (a.data.as_mut_ptr(), a.ints.as_mut_ptr(), a.mrs.as_mut_ptr(), &raw mut request);
        let result = match self.version {
            4 => call!(self, IFLUSH, (Ptr, Ptr, c_int, Ptr, Ptrs), comm.0, a.data[0], a.ints[0], a.mrs[0], r),
            _ => call!(self, IFLUSH, (Ptr, c_int, Ptrs, Ints, Ptrs, Ptrs), comm.0, a.n, d, s, m, r),
        };
        taken(IFLUSH, result, request)
    }

    /// `None`: not done. Else the sizes, as many as there were buffers.
    pub fn test(&self, request: Opaque) -> Result<Option<[c_int; MAX_RECVS]>> {
        let mut sizes = [-1; MAX_RECVS];
        let done = self.test_with(request, -1, Some(&mut sizes))?;
        Ok((done != 0).then_some(sizes))
    }

    /// What `*done` is after a call that finds `done` there, with or without a place for the sizes.
    #[inline]
    pub fn test_with(&self, request: Opaque, mut done: c_int, sizes: Option<&mut [c_int; MAX_RECVS]>) -> Result<c_int> {
        let sizes = sizes.map_or(ptr::null_mut(), |s| s.as_mut_ptr());
        call!(self, TEST, (Ptr, Ints, Ints), request.0, &raw mut done, sizes)?;
        Ok(done)
    }

    /// Closes a send comm.
    pub fn close_send(&self, comm: Opaque) -> Result<()> {
        call!(self, CLOSE_SEND, (Ptr), comm.0)
    }

    /// Closes a receive comm.
    pub fn close_recv(&self, comm: Opaque) -> Result<()> {
        call!(self, CLOSE_RECV, (Ptr), comm.0)
    }

    /// Closes a listen comm.
    pub fn close_listen(&self, comm: Opaque) -> Result<()> {
        call!(self, CLOSE_LISTEN, (Ptr), comm.0)
    }
}

/// A post's request, which the plugin must have written; `None` for NULL.
#[inline]
fn taken(f: F, result: Result<()>, request: Ptr) -> Result<Option<Opaque>> {
    if request == GARBAGE {
        return Err(unwritten(f.1, result));
    }
    result.map(|()| (!request.is_null()).then_some(Opaque(request)))
}

/// # Safety
/// `text` is NULL or leads to a C string.
unsafe fn text(text: *const c_void) -> Option<String> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text.cast::<c_char>()) }.to_string_lossy().into_owned())
}
