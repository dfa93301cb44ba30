//! The unsent replies of one connection. Small replies are copied together; large values are shared with the store until they are sent.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};
use std::sync::Arc;

use mio::net::TcpStream;
use rustix::net::{self, SendFlags};
use socket2::SockRef;

use crate::store::values::Value;

/// Replies, oldest first.
#[derive(Default)]
pub struct Output {
    chunks: VecDeque<Chunk>,
    /// Bytes of the first chunk that are sent.
    sent: usize,
    /// Bytes still to be sent.
    len: usize,
    /// Bytes of memory of the `Bytes` chunks.
    copied: usize,
}

enum Chunk {
    Bytes(Vec<u8>),
    Shared(Value),
}

/// Values from this size are not copied.
const SHARE_FROM: usize = 512;
/// Copied replies are gathered up to this size.
const CHUNK: usize = 64 << 10;
/// A buffer that an idle connection keeps.
const SMALL_BUFFER: usize = 256;
/// Chunks of one system call.
const BATCH: usize = 16;

impl Output {
    /// Bytes still to be sent.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory besides the store's values.
    pub fn size(&self) -> usize {
        self.copied + self.chunks.capacity() * size_of::<Chunk>()
    }

    /// Appends a reply or part of one.
    pub fn push(&mut self, bytes: &[u8]) {
        self.len += bytes.len();
        if let Some(Chunk::Bytes(last)) = self.chunks.back_mut()
            && last.len() + bytes.len() <= CHUNK
        {
            let before = last.capacity();
            last.extend_from_slice(bytes);
            self.copied += last.capacity() - before;
            return;
        }
        self.copied += bytes.len();
        self.chunks.push_back(Chunk::Bytes(bytes.to_vec()));
    }

    /// Appends a number.
    pub fn push_i64(&mut self, number: i64) {
        self.push(&number.to_le_bytes());
    }

    /// Appends a byte string, with its length.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.push(&(bytes.len() as u64).to_le_bytes());
        self.push(bytes);
    }

    /// Appends a value, with its length.
    pub fn push_value(&mut self, value: &Value) {
        let bytes = value.bytes();
        if bytes.len() < SHARE_FROM {
            return self.push_bytes(bytes);
        }
        self.push(&(bytes.len() as u64).to_le_bytes());
        self.len += bytes.len();
        self.chunks.push_back(Chunk::Shared(Arc::clone(value)));
    }

    /// Sends as much as the kernel takes; whether that was everything.
    pub fn flush(&mut self, stream: &TcpStream) -> io::Result<bool> {
        while self.len > 0 {
            match self.send(stream) {
                Ok(n) => self.take(n),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    /// One system call. A closed connection is an error, not a signal to the host program.
    fn send(&self, stream: &TcpStream) -> io::Result<usize> {
        if let (1, Some(only)) = (self.chunks.len(), self.chunks.front()) {
            // By rustix, here and for receiving: libc's calls are cancellation points, which costs two atomic operations each.
            return Ok(net::send(stream, only.bytes().get(self.sent..).unwrap_or(&[]), SendFlags::NOSIGNAL)?);
        }
        let mut slices = [IoSlice::new(&[]); BATCH];
        let mut skip = self.sent;
        for (slice, chunk) in slices.iter_mut().zip(&self.chunks) {
            *slice = IoSlice::new(chunk.bytes().get(skip..).unwrap_or(&[]));
            skip = 0;
        }
        SockRef::from(stream).send_vectored_with_flags(&slices, libc::MSG_NOSIGNAL)
    }

    /// Removes bytes that are sent.
    fn take(&mut self, n: usize) {
        self.len = self.len.saturating_sub(n);
        self.sent += n;
        loop {
            let last = self.chunks.len() == 1;
            let Some(first) = self.chunks.front_mut() else { break };
            let size = first.bytes().len();
            if self.sent < size {
                return;
            }
            self.sent -= size;
            if let Chunk::Bytes(bytes) = first {
                if last && bytes.capacity() <= SMALL_BUFFER {
                    // For the next reply.
                    bytes.clear();
                    return;
                }
                self.copied -= bytes.capacity();
            }
            self.chunks.pop_front();
        }
        self.chunks.shrink_to(4);
    }
}

impl Chunk {
    fn bytes(&self) -> &[u8] {
        match self {
            Chunk::Bytes(bytes) => bytes,
            Chunk::Shared(value) => value.bytes(),
        }
    }
}
