//! A frame to be sent, and the gathering of several frames for one system call. Used by the sending half of the wire.

use std::marker::PhantomData;

use crate::fabric::types::*;

use super::super::MAX_INLINE;
use super::super::mr::Pin;
use super::super::work_queues::{Fault, WorkQueues};
use super::codec::{HEADER_SIZE, Header};

/// Frames that wait to be sent at most.
pub const FRAMES: usize = 32;
/// Two elements per frame, one in the frame itself and one in the user's memory; and one for the pending ack.
const IOVS: usize = 2 * FRAMES + 1;

/// Where a frame's payload is.
#[derive(Debug, Clone, Copy, Default)]
pub enum Source {
    #[default]
    /// Behind the header, or nowhere if there is none.
    Copied,
    /// The memory of a request of ours.
    Local {
        /// Key.
        lkey: u32,
        /// First byte.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// The memory that the peer READs.
    Remote {
        /// Key.
        rkey: u32,
        /// First byte.
        addr: u64,
        /// Bytes.
        len: u32,
    },
}

/// What is done once the kernel has taken a frame.
#[derive(Debug, Clone, Copy, Default)]
pub enum OnSent {
    #[default]
    /// Nothing.
    Nothing,
    /// One piece less of this request is left to send.
    Request(u64),
    /// The response to the peer's oldest READ is sent.
    ReadAnswered,
}

#[derive(Debug, Clone, Copy)]
pub struct Frame {
    /// Header, and a payload short enough to be copied.
    pub own: [u8; HEADER_SIZE + MAX_INLINE],
    /// Bytes of `own`.
    pub own_len: usize,
    /// Where the payload is.
    pub source: Source,
    /// What is done once it is sent.
    pub on_sent: OnSent,
}

impl Default for Frame {
    fn default() -> Self {
        Frame { own: [0; HEADER_SIZE + MAX_INLINE], own_len: 0, source: Source::Copied, on_sent: OnSent::Nothing }
    }
}

impl Frame {
    /// A frame of a header and `source`.
    pub fn new(header: &Header, source: Source, on_sent: OnSent) -> Self {
        let mut frame = Frame { own_len: HEADER_SIZE, source, on_sent, ..Frame::default() };
        frame.own[..HEADER_SIZE].copy_from_slice(&header.encode());
        frame
    }

    /// Copies a payload of at most [`MAX_INLINE`] bytes after the header.
    pub fn copy(&mut self, payload: &[u8]) {
        self.own[HEADER_SIZE..HEADER_SIZE + payload.len()].copy_from_slice(payload);
        self.own_len = HEADER_SIZE + payload.len();
    }

    /// Bytes of payload that are not copied.
    pub fn payload_len(&self) -> usize {
        match self.source {
            Source::Copied => 0,
            Source::Local { len, .. } | Source::Remote { len, .. } => len as usize,
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.own_len + self.payload_len()
    }
}

/// The fault of a frame whose memory was refused with `status`.
#[cold]
pub fn lost(frame: &Frame, status: WcStatus) -> Fault {
    match frame.source {
        Source::Remote { .. } => Fault::oldest(WcStatus::WrFlushErr, "memory was deregistered while the peer was reading it"),
        _ => Fault::sending(status, "memory was deregistered while it was being sent"),
    }
}

/// The elements of one call, with what keeps them valid: it borrows bytes of the sender, and pins registered memory.
pub struct Gather<'a> {
    iov: [libc::iovec; IOVS],
    iovs: usize,
    pins: [Option<Pin>; FRAMES],
    pinned: usize,
    /// Bytes of all elements.
    pub bytes: usize,
    borrowed: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    /// None.
    pub fn new() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Gather { iov: [empty; IOVS], iovs: 0, pins: [const { None }; FRAMES], pinned: 0, bytes: 0, borrowed: PhantomData }
    }

    /// The elements: readable while `self` lives.
    pub fn iovs(&mut self) -> &mut [libc::iovec] {
        &mut self.iov[..self.iovs]
    }

    fn push(&mut self, base: *mut u8, len: usize) {
        self.iov[self.iovs] = libc::iovec { iov_base: base.cast(), iov_len: len };
        self.iovs += 1;
        self.bytes += len;
    }

    /// Adds bytes that live in the sender.
    pub fn own(&mut self, bytes: &'a [u8]) {
        if !bytes.is_empty() {
            self.push(bytes.as_ptr().cast_mut(), bytes.len());
        }
    }

    /// Adds a frame without its first `skip` bytes; nothing is added if its memory is refused.
    pub fn frame(&mut self, wq: &WorkQueues, frame: &'a Frame, skip: usize) -> Result<(), WcStatus> {
        let own = frame.own.get(skip..frame.own_len).unwrap_or(&[]);
        let into = skip.saturating_sub(frame.own_len);
        let left = frame.payload_len() - into;
        let pin = match frame.source {
            Source::Copied => None,
            Source::Local { lkey, addr, .. } => Some(wq.pin_local(lkey, addr.wrapping_add(into as u64), left, Access::empty())?),
            Source::Remote { rkey, addr, .. } => Some(wq.pin_remote(rkey, addr.wrapping_add(into as u64), left, Access::REMOTE_READ)?),
        };
        self.own(own);
        if let Some(pin) = pin {
            self.push(pin.as_ptr(), pin.len());
            self.pins[self.pinned] = Some(pin);
            self.pinned += 1;
        }
        Ok(())
    }
}
