//! What the proxy asks of a network: the functions of an ncclNet table that it uses. Implemented over any table by `abi`, and by a fake that
//! records in tests. A comm's functions are called on one thread at a time: the engine's, once a connector is made.
//!
//! The tokens say that whoever made them vouches for what they stand for, so that using them needs no further promise.

use std::fmt;

use crate::base::error::Result;

/// Bytes of a listener's handle (NCCL_NET_HANDLE_MAXSIZE, nccl v2.30.7 src/include/plugin/nccl_net.h).
pub const HANDLE_BYTES: usize = 128;

/// A handle as it travels to the peer. Aligned for plugins that take it for a structure.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Handle(pub [u8; HANDLE_BYTES]);

impl fmt::Debug for Handle {
    /// Not its bytes: whoever has seen them may connect.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle(..)")
    }
}

impl Default for Handle {
    fn default() -> Self {
        Handle([0; HANDLE_BYTES])
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
pub struct Request(usize);

/// Memory that a request may use until it is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    addr: usize,
    bytes: usize,
}

macro_rules! token {
    ($type:ident, $promise:literal) => {
        impl $type {
            /// The token of what the table knows by this value.
            ///
            /// # Safety
            #[doc = $promise]
            pub unsafe fn new(value: usize) -> Self {
                $type(value)
            }

            /// What the table knows it by.
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
token!(Request, "It must be a request of the table that the token is used with, and nobody else may test it.");

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

    /// How many.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What the proxy asks of a network. `None` from a function that posts or connects means: again later.
pub trait Net: Send + Sync + 'static {
    /// Posts a send.
    fn isend(&self, comm: &Comm, data: Buffer, tag: i32, mr: &Mr) -> Result<Option<Request>>;

    /// Posts a receive of at most the buffer's bytes.
    fn irecv(&self, comm: &Comm, data: Buffer, tag: i32, mr: &Mr) -> Result<Option<Request>>;

    /// Posts what makes received data visible; `None` if it is already.
    fn iflush(&self, comm: &Comm, data: Buffer, mr: &Mr) -> Result<Option<Request>>;

    /// Makes progress; the message's bytes once the request is complete, which then is no more. No request is no bytes.
    fn test(&self, request: &mut Option<Request>) -> Result<Option<usize>>;

    /// Opens a listener on a device, and makes the handle by which a peer connects to it.
    fn listen(&self, dev: i32) -> Result<(Comm, Handle)>;

    /// Connects to a peer's listener, to send. Called again with the same handle until there is a comm.
    fn connect(&self, dev: i32, handle: &mut Handle) -> Result<Option<Comm>>;

    /// Takes a peer in, to receive.
    fn accept(&self, listener: &Comm) -> Result<Option<Comm>>;

    /// Registers memory; `device` says that only a device can touch it.
    fn reg_mr(&self, comm: &Comm, data: Buffer, device: bool) -> Result<Mr>;

    /// Takes a registration back.
    fn dereg_mr(&self, comm: &Comm, mr: Mr) -> Result<()>;

    /// Closes a comm that sends.
    fn close_send(&self, comm: Comm) -> Result<()>;

    /// Closes a comm that receives.
    fn close_recv(&self, comm: Comm) -> Result<()>;

    /// Closes a listener.
    fn close_listen(&self, comm: Comm) -> Result<()>;
}
