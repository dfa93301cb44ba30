//! The opaque numbers that C holds in the place of pointers to comms, requests, registrations and contexts. Made and read on every
//! call from C, on the host's threads; plain values.
//!
//! NULL, 0x1, real pointers, and numbers of another kind or from before a fork are told apart from a live handle without touching what
//! they might point to; `abi::comm_table` tells apart what is closed. The top byte is a kind that no user-space address has.
//!
//! ```text
//! comm     kind:8 | process:8 | count:30 | index:18
//! request  kind:8 |   count:6 | index:18 | request:32    (index and count of its comm; the comm's own number of the request)
//! context  kind:8 | process:8 | number:48
//! mr       net's 64-bit number, xor (kind:8 | process:8 | 0:48)
//! ```
//!
//! `index` is an entry of the slab of comms, `count` how many comms used it before, `process` how many forks lie between the
//! library's first initialisation and this process.

use std::ffi::c_void;

use crate::base::error::{Error, Result};
use crate::net::{MrHandle, RequestId};

const _: () = assert!(size_of::<*const c_void>() == 8, "handles are 64-bit numbers in the place of pointers");

const INDEX_BITS: u32 = 18;
const COUNT_BITS: u32 = 30;
const REQUEST_COUNT_BITS: u32 = 6;
const CONTEXT_BITS: u32 = 48;

/// How many comms can be told apart.
pub const MAX_COMMS: usize = 1 << INDEX_BITS;

/// What a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A listen comm.
    Listen = 0xa1,
    /// A send comm.
    Send = 0xa2,
    /// A receive comm.
    Recv = 0xa3,
    /// A request of a send comm.
    SendRequest = 0xa4,
    /// A request of a receive comm.
    RecvRequest = 0xa5,
    /// A memory registration.
    Mr = 0xa6,
    /// A context (one per communicator, from ABI version 11).
    Context = 0xa7,
}

impl Kind {
    const ALL: [Kind; 7] = [Kind::Listen, Kind::Send, Kind::Recv, Kind::SendRequest, Kind::RecvRequest, Kind::Mr, Kind::Context];

    /// In a message.
    pub fn words(self) -> &'static str {
        match self {
            Kind::Listen => "listen comm",
            Kind::Send => "send comm",
            Kind::Recv => "receive comm",
            Kind::SendRequest => "send request",
            Kind::RecvRequest => "receive request",
            Kind::Mr => "memory handle",
            Kind::Context => "context",
        }
    }
}

/// A handle as C holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(u64);

impl Handle {
    /// No handle.
    pub const NULL: Handle = Handle(0);

    /// What came from C.
    #[inline]
    pub fn from_pointer(pointer: *mut c_void) -> Handle {
        Handle(pointer.addr() as u64)
    }

    /// What goes to C.
    #[inline]
    pub fn to_pointer(self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    /// The number itself, for a message.
    pub fn value(self) -> u64 {
        self.0
    }

    /// Makes the handle of a context.
    pub fn context(process: u8, number: u64) -> Handle {
        Handle(tagged(Kind::Context, process) | number & mask(CONTEXT_BITS))
    }

    /// The number of a context of this process.
    pub fn context_number(self, process: u8) -> Result<u64> {
        self.check_kind(Kind::Context, process)?;
        Ok(self.0 & mask(CONTEXT_BITS))
    }

    /// Hides a registration's number.
    #[inline]
    pub fn mr(process: u8, mr: MrHandle) -> Handle {
        Handle(mr.0 ^ tagged(Kind::Mr, process))
    }

    /// The registration's number. A handle that never was one turns into a number that `net` never gave out.
    #[inline]
    pub fn to_mr(self, process: u8) -> MrHandle {
        MrHandle(self.0 ^ tagged(Kind::Mr, process))
    }

    /// Whether this is a send request (true) or a receive request (false).
    #[inline]
    pub fn is_send_request(self) -> Result<bool> {
        let tag = (self.0 >> 56) as u8;
        if tag == Kind::SendRequest as u8 {
            Ok(true)
        } else if tag == Kind::RecvRequest as u8 {
            Ok(false)
        } else {
            Err(self.is_no("request"))
        }
    }

    /// What it claims to be.
    pub fn kind(self) -> Option<Kind> {
        let tag = (self.0 >> 56) as u8;
        Kind::ALL.into_iter().find(|kind| *kind as u8 == tag)
    }

    /// Checks the kind and that the handle was made in this process.
    #[inline]
    pub fn check_kind(self, kind: Kind, process: u8) -> Result<()> {
        if self.0 >> 48 == tagged(kind, process) >> 48 { Ok(()) } else { Err(self.unexpected(kind, process)) }
    }

    #[cold]
    fn unexpected(self, kind: Kind, process: u8) -> Error {
        if (self.0 >> 56) as u8 == kind as u8 && (self.0 >> 48) as u8 != process {
            let words = kind.words();
            return Error::internal(format!("{words} {:#x} was made before a fork and belongs to the parent process", self.0));
        }
        self.is_no(kind.words())
    }

    /// The error for something else than what was wanted.
    #[cold]
    pub fn is_no(self, wanted: &str) -> Error {
        match (self.0, self.kind()) {
            (0, _) => Error::internal(format!("the {wanted} is NULL")),
            (value, Some(kind)) => Error::internal(format!("{value:#x} is a {}, not a {wanted}", kind.words())),
            (value, None) => Error::internal(format!("{value:#x} is not a {wanted}, nor any other handle of Railhead")),
        }
    }
}

/// The comm that a handle names.
#[derive(Debug, Clone, Copy)]
pub struct CommKey {
    /// Index of its entry in the slab.
    pub index: u32,
    /// The low bits of how many comms had the entry before.
    count: u32,
    mask: u32,
}

impl CommKey {
    /// Whether it is the comm of this generation of the entry, which is odd while there is one.
    #[inline]
    pub fn is(self, generation: u32) -> bool {
        generation & 1 == 1 && generation >> 1 & self.mask == self.count
    }

    /// The handle of the comm.
    pub fn comm(kind: Kind, process: u8, index: u32, count: u32) -> Handle {
        Handle(tagged(kind, process) | (u64::from(count) & mask(COUNT_BITS)) << INDEX_BITS | u64::from(index))
    }

    /// The handle of one of its requests.
    #[inline]
    pub fn request(kind: Kind, index: u32, count: u32, request: RequestId) -> Handle {
        let count = u64::from(count) & mask(REQUEST_COUNT_BITS);
        Handle((kind as u64) << 56 | count << 50 | u64::from(index) << 32 | u64::from(request.0))
    }
}

impl Handle {
    /// The comm of a handle of a comm.
    #[inline]
    pub fn comm(self) -> CommKey {
        let count = (self.0 >> INDEX_BITS & mask(COUNT_BITS)) as u32;
        CommKey { index: (self.0 & mask(INDEX_BITS)) as u32, count, mask: mask(COUNT_BITS) as u32 }
    }

    /// The comm of a handle of a request, and the comm's number of the request.
    #[inline]
    pub fn request(self) -> (CommKey, RequestId) {
        let count = (self.0 >> 50 & mask(REQUEST_COUNT_BITS)) as u32;
        let key = CommKey { index: (self.0 >> 32 & mask(INDEX_BITS)) as u32, count, mask: mask(REQUEST_COUNT_BITS) as u32 };
        (key, RequestId(self.0 as u32))
    }
}

#[inline]
const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

#[inline]
const fn tagged(kind: Kind, process: u8) -> u64 {
    (kind as u64) << 56 | (process as u64) << 48
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message<T>(result: Result<T>) -> String {
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn nothing_is_no_request() {
        assert!(message(Handle(0).is_send_request()).contains("NULL"));
        assert!(message(Handle(1).is_send_request()).contains("nor any other handle"));
        assert!(message(Handle::context(0, 5).is_send_request()).contains("is a context, not a request"));
    }

    #[test]
    fn parts_come_back() {
        let (index, count) = (MAX_COMMS as u32 - 2, mask(COUNT_BITS) as u32);
        let comm = CommKey::comm(Kind::Recv, 9, index, count).comm();
        assert!(comm.index == index && comm.is(count << 1 | 1) && !comm.is(count << 1) && !comm.is((count - 1) << 1 | 1));
        let (key, id) = CommKey::request(Kind::RecvRequest, index, count, RequestId(0xdead_beef)).request();
        assert!(key.index == index && key.is(count << 1 | 1) && !key.is((count - 1) << 1 | 1) && id.0 == 0xdead_beef);
    }

    #[test]
    fn contexts_and_registrations() {
        let context = Handle::context(3, 77);
        assert_eq!(context.context_number(3).ok(), Some(77));
        assert!(message(context.context_number(4)).contains("before a fork"));
        let mr = Handle::mr(3, MrHandle(0x1_0000_0005));
        assert_eq!(mr.to_mr(3).0, 0x1_0000_0005);
        assert_ne!(mr.to_mr(4).0, 0x1_0000_0005);
        assert!(Handle(0).to_mr(3).0 >> 48 != 0 && Handle(1).to_mr(3).0 >> 48 != 0);
    }

    #[test]
    fn no_user_address_is_a_handle() {
        // 5-level paging gives user space 56 bits (Linux Documentation/arch/x86/x86_64/5level-paging.rst); ARM's memory tagging uses bits 56..60.
        for kind in Kind::ALL {
            assert!(kind as u8 >= 0x10);
        }
    }
}
