//! The functions of an ncclNet table that the proxy calls. Implemented over any table by `abi`, and in tests by a fake that records the calls. The
//! functions of one comm are called on one thread at a time: the engine's, once a connector is made.
//!
//! [`Comm`], [`Mr`], [`NetRequest`] and [`Buffer`] are tokens: their makers promise, in `unsafe`, that they are valid, so using them is safe.

use std::fmt;

use crate::base::error::Result;

/// Bytes of a listener's handle (NCCL_NET_HANDLE_MAXSIZE, nccl v2.30.7 src/include/plugin/nccl_net.h).
pub const HANDLE_BYTES: usize = 128;

/// A listener's handle as it is sent to the peer. Aligned for plugins that cast it to a structure.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct ListenHandle(pub [u8; HANDLE_BYTES]);

impl fmt::Debug for ListenHandle {
    /// Without its bytes, which let anyone connect.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ListenHandle(..)")
    }
}

impl Default for ListenHandle {
    fn default() -> Self {
        ListenHandle([0; HANDLE_BYTES])
    }
}

/// An open comm of a table.
#[derive(Debug, PartialEq, Eq)]
pub struct Comm(usize);

/// Memory registered with a comm.
#[derive(Debug, PartialEq, Eq)]
pub struct Mr(usize);

/// A request that is not complete.
#[derive(Debug, PartialEq, Eq)]
pub struct NetRequest(usize);

/// Memory that a request may use until it is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    addr: usize,
    bytes: usize,
}

macro_rules! token {
    ($type:ident, $promise:literal) => {
        impl $type {
            /// The token for a value that the table returned.
            ///
            /// # Safety
            #[doc = $promise]
            pub unsafe fn new(value: usize) -> Self {
                $type(value)
            }

            /// The table's value.
            #[inline]
            pub fn value(&self) -> usize {
                self.0
            }
        }
    };
}

token!(
    Comm,
    "It must be an open comm of the table that the token is used with, and stay open as long as the token lives; nobody else may drive it."
);
token!(Mr, "It must be a registration with the comm that the token is used with, and stay registered as long as the token lives.");
token!(NetRequest, "It must be a request of the table that the token is used with, and nobody else may test it.");

impl Buffer {
    /// The token of `bytes` bytes at `addr`.
    ///
    /// # Safety
    /// They must stay mapped, and be read or written by nobody against a ring's rules, until every request that uses them is complete or its comm
    /// closed.
    #[inline]
    pub unsafe fn new(addr: usize, bytes: usize) -> Self {
        Buffer { addr, bytes }
    }

    /// First byte.
    #[inline]
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Length.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The functions that the proxy calls. `None` from one that posts or connects means: call again later.
pub trait Net: Send + Sync + 'static {
    /// Posts a send.
    fn isend(&self, comm: &Comm, data: Buffer, tag: i32, mr: &Mr) -> Result<Option<NetRequest>>;

    /// Posts a receive of at most the buffer's bytes.
    fn irecv(&self, comm: &Comm, data: Buffer, tag: i32, mr: &Mr) -> Result<Option<NetRequest>>;

    /// Posts a flush that makes received data visible; `None` if it is visible already.
    fn iflush(&self, comm: &Comm, data: Buffer, mr: &Mr) -> Result<Option<NetRequest>>;

    /// Makes progress. Once the request is complete: takes it and returns the message's bytes. 0 without a request.
    fn test(&self, request: &mut Option<NetRequest>) -> Result<Option<usize>>;

    /// Opens a listener on a device, and makes the handle by which a peer connects to it.
    fn listen(&self, dev: i32) -> Result<(Comm, ListenHandle)>;

    /// Connects to a peer's listener, to send. Called again with the same handle until it returns a comm.
    fn connect(&self, dev: i32, handle: &mut ListenHandle) -> Result<Option<Comm>>;

    /// Accepts a peer, to receive.
    fn accept(&self, listener: &Comm) -> Result<Option<Comm>>;

    /// Registers memory; `device`: the CPU cannot access it.
    fn reg_mr(&self, comm: &Comm, data: Buffer, device: bool) -> Result<Mr>;

    /// Ends a registration.
    fn dereg_mr(&self, comm: &Comm, mr: Mr) -> Result<()>;

    /// Closes a comm that sends.
    fn close_send(&self, comm: Comm) -> Result<()>;

    /// Closes a comm that receives.
    fn close_recv(&self, comm: Comm) -> Result<()>;

    /// Closes a listener.
    fn close_listen(&self, comm: Comm) -> Result<()>;
}
