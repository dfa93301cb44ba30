//! Calls that only a check of the plugin makes: at the edges of what the interface allows, or with outputs as the plugin left them.

use super::*;

/// Functions that NCCL calls without a look whether they are there; finalize from v11 on.
const MANDATORY: [F; 14] = [
    F::Init,
    F::Devices,
    F::Properties,
    F::Listen,
    F::Connect,
    F::Accept,
    F::RegMr,
    F::DeregMr,
    F::Isend,
    F::Irecv,
    F::Test,
    F::CloseSend,
    F::CloseRecv,
    F::CloseListen,
];

impl Plugin {
    /// Mandatory functions that the table does not have.
    pub fn missing(&self) -> Vec<&'static str> {
        let finalize = (self.version >= 11).then_some(F::Finalize);
        MANDATORY.into_iter().chain(finalize).filter(|f| self.entry(*f).is_err()).map(F::name).collect()
    }

    /// Whether the table has a name.
    pub fn has_name(&self) -> bool {
        // SAFETY: the first member of each table is a pointer to a C string.
        unsafe { !(*self.table).is_null() }
    }

    /// netDeviceType and netDeviceVersion: v7 and later.
    pub fn net_device(&self, dev: c_int) -> Result<Option<(c_int, c_int)>> {
        let mut raw = [0xA5A5_A5A5_A5A5_A5A5u64; 64];
        call!(self, F::Properties, (c_int, Ptr), dev, raw.as_mut_ptr().cast())?;
        // Behind name, pciPath, guid, ptrSupport, speed, port, latency, maxComms, maxRecvs; v8 and v9 inserted an int each.
        let at = match self.version {
            4..=6 => return Ok(None),
            7 => 12,
            8 => 13,
            _ => 14,
        };
        let int = |i: usize| {
            let word = raw[i / 2].to_ne_bytes();
            let half = if i.is_multiple_of(2) { &word[..4] } else { &word[4..] };
            half.first_chunk().map_or(0, |b| c_int::from_ne_bytes(*b))
        };
        Ok(Some((int(at), int(at + 1))))
    }

    /// As `listen`, with the handle wherever the caller wants it.
    ///
    /// # Safety
    /// `handle` must be valid for the version's handle size.
    pub unsafe fn listen_at(&self, dev: c_int, handle: *mut u8) -> Result<Opaque> {
        let mut comm = GARBAGE;
        let (h, c) = (handle.cast(), &raw mut comm);
        if self.version >= 11 {
            call!(self, F::Listen, (Ptr, c_int, Ptr, *mut Ptr), self.ctx, dev, h, c)?;
        } else {
            call!(self, F::Listen, (c_int, Ptr, *mut Ptr), dev, h, c)?;
        }
        Ok(Opaque(comm))
    }

    /// As `test`, without a place for the sizes.
    pub fn test_without_sizes(&self, request: Opaque) -> Result<bool> {
        let mut done = 0;
        call!(self, F::Test, (Ptr, *mut c_int, *mut c_int), request.0, &raw mut done, ptr::null_mut())?;
        Ok(done != 0)
    }

    /// As `test`, with `*done` as `done` on input: what it is afterwards.
    pub fn test_with(&self, request: Opaque, done: c_int) -> Result<c_int> {
        let (mut done, mut sizes) = (done, [-1 as c_int; 8]);
        call!(self, F::Test, (Ptr, *mut c_int, *mut c_int), request.0, &raw mut done, sizes.as_mut_ptr())?;
        Ok(done)
    }

    /// As `connect` from v7 on, with the place for a device handle given, or without one.
    pub fn connect_offering(&self, dev: c_int, handle: &mut Handle, device: Option<&mut *mut c_void>) -> Result<Option<Opaque>> {
        let mut comm = ptr::null_mut();
        let (h, c): (Ptr, _) = (handle.as_mut_ptr().cast(), &raw mut comm);
        let mut config: c_int = -1;
        let device: *mut Ptr = device.map_or(ptr::null_mut(), |d| d);
        match self.version {
            ..=9 => call!(self, F::Connect, (c_int, Ptr, *mut Ptr, *mut Ptr), dev, h, c, device)?,
            10 => call!(self, F::Connect, (c_int, *mut c_int, Ptr, *mut Ptr, *mut Ptr), dev, &raw mut config, h, c, device)?,
            _ => call!(self, F::Connect, (Ptr, c_int, Ptr, *mut Ptr, *mut Ptr), self.ctx, dev, h, c, device)?,
        }
        Ok((!comm.is_null()).then_some(Opaque(comm)))
    }

    /// As `accept` from v7 on, with the place for a device handle given, or without one.
    pub fn accept_offering(&self, listen: Opaque, device: Option<&mut *mut c_void>) -> Result<Option<Opaque>> {
        let mut comm = ptr::null_mut();
        let device: *mut Ptr = device.map_or(ptr::null_mut(), |d| d);
        call!(self, F::Accept, (Ptr, *mut Ptr, *mut Ptr), listen.0, &raw mut comm, device)?;
        Ok((!comm.is_null()).then_some(Opaque(comm)))
    }

    /// v11 and later: hints for transfers of one operation (a bit of ncclFunc_t), the rest undefined. `None`: the plugin takes no hints.
    pub fn set_net_attr(&self, op: u32) -> Option<Result<()>> {
        /// NCCL_NET_ATTR_UNDEF, as the four numbers of a comm's attributes, twice; then op, algo, proto.
        const UNDEFINED: u32 = u32::MAX;
        let mut attributes = [UNDEFINED; 11];
        attributes[8] = op;
        let mut set = || call!(self, F::SetNetAttr, (Ptr, *mut u32), self.ctx, attributes.as_mut_ptr());
        match set() {
            Err(Failure { status: MISSING, .. }) => None,
            result => Some(result),
        }
    }

    /// As `irecv` from v10 on, of one buffer, with NULL for the profiler's handles.
    pub fn irecv_unprofiled(&self, comm: Opaque, buf: &Buf) -> Result<Option<Opaque>> {
        type Types = unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr, *mut Ptr) -> c_int;
        let mut request = GARBAGE;
        let (mut data, mut size, mut tag, mut mr): (Ptr, _, _, _) = (buf.addr.cast(), buf.len, buf.tag, buf.mr.0);
        let (d, s, t, m) = (&raw mut data, &raw mut size, &raw mut tag, &raw mut mr);
        // SAFETY: NCCL's header gives irecv this signature since v10.
        let function = unsafe { std::mem::transmute::<*const c_void, Types>(self.entry(F::Irecv)?) };
        // SAFETY: each pointer leads to one element, and one buffer is announced; the last array may be missing.
        let result = match unsafe { function(comm.0, 1, d, s, t, m, ptr::null_mut(), &raw mut request) } {
            0 => Ok(()),
            status => Err(Failure { call: F::Irecv.name(), status }),
        };
        taken("irecv", result, request)
    }
}
