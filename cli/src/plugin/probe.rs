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
}
