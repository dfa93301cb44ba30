//! The socket that belongs to a segment. It carries doorbells for a sleeping side and descriptors of memory that the peer is to map, and it
//! closes when the peer is gone. Driven by the thread that drives the queue pair.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use crate::base::error::Error;
use crate::base::fd::OwnedFd;
use crate::base::mem::Shm;

/// Bytes of a record: kind u32, id u32, len u64, addr u64.
const RECORD: usize = 24;

/// A record that the peer sent.
pub enum Record {
    /// There is something new in the segment.
    Doorbell,
    /// An allocation of the peer's, to be mapped.
    Memory(Passed),
    /// The same, of which this side may write what has its key.
    Target(Passed),
}

/// Memory that the peer has passed.
pub struct Passed {
    /// The peer's id of it, or its key.
    pub id: u32,
    /// Bytes.
    pub len: u64,
    /// Where the peer has it; 0 for memory that is only read.
    pub addr: u64,
    /// What to map.
    pub fd: OwnedFd,
}

impl Passed {
    /// Maps it.
    ///
    /// Errors: it is not what the peer says.
    pub fn map(self) -> Result<Shm, Error> {
        Shm::attach(self.fd, usize::try_from(self.len).unwrap_or(usize::MAX))
    }
}

/// What a read of the socket yields.
pub enum ControlEvent {
    /// Nothing yet.
    Nothing,
    /// A record.
    Record(Record),
    /// The socket was closed or reset, or the peer made a protocol error. In words.
    End(String),
    /// Memory of this id that the peer has passed did not come: this process has no descriptor left.
    Lacking(u32),
}

const DOORBELL: u32 = 1;
const MEMORY: u32 = 2;
const TARGET: u32 = 3;

/// Our end of the socket.
pub struct ControlSocket {
    fd: OwnedFd,
    unix: bool,
    partial: [u8; RECORD],
    have: usize,
    memory: Option<OwnedFd>,
}

impl ControlSocket {
    /// Takes a connected, non-blocking socket over; `unix` if it can pass descriptors.
    pub fn new(fd: OwnedFd, unix: bool) -> Self {
        ControlSocket { fd, unix, partial: [0; RECORD], have: 0, memory: None }
    }

    /// For epoll.
    pub fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Whether the socket can pass descriptors.
    pub fn passes_descriptors(&self) -> bool {
        self.unix
    }

    /// Wakes the peer. If the socket's buffer is full, it holds doorbells that the peer has not read.
    pub fn doorbell(&self) {
        let _ = send(&self.fd, &record(DOORBELL, 0, 0, 0), None);
    }

    /// Passes memory to the peer, which is to map it; false if the socket has no room now.
    pub fn pass_memory(&self, id: u32, memory: &Shm) -> Result<bool, Error> {
        self.pass(record(MEMORY, id, memory.len() as u64, 0), memory)
    }

    /// The same for memory that the peer may write to, as what has this key.
    pub fn pass_target(&self, key: u32, memory: &Shm) -> Result<bool, Error> {
        self.pass(record(TARGET, key, memory.len() as u64, memory.addr() as u64), memory)
    }

    fn pass(&self, record: [u8; RECORD], memory: &Shm) -> Result<bool, Error> {
        let fd = memory.fd().ok_or_else(|| Error::internal("memory without a descriptor was to be passed to the peer"))?;
        match send(&self.fd, &record, Some(fd.as_raw_fd())) {
            Ok(RECORD) => Ok(true),
            Ok(n) => Err(Error::remote(format!("control socket took {n} of {RECORD} bytes"))),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(Error::system("pass memory to the peer", e)),
        }
    }

    /// Reads one record, if a whole one has come.
    pub fn receive(&mut self) -> ControlEvent {
        loop {
            let (n, fd) = match recv(&self.fd, &mut self.partial[self.have..]) {
                Ok((0, _)) => return ControlEvent::End("the peer closed its end".into()),
                Ok(got) => got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return ControlEvent::Nothing,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return ControlEvent::End(e.to_string()),
            };
            self.memory = fd.or(self.memory.take());
            self.have += n;
            if self.have < RECORD {
                continue;
            }
            self.have = 0;
            let word = |at: usize| u32::from_le_bytes([self.partial[at], self.partial[at + 1], self.partial[at + 2], self.partial[at + 3]]);
            let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
            let passed = |fd| Passed { id: word(4), len: long(8), addr: long(16), fd };
            return match (word(0), self.memory.take()) {
                (DOORBELL, _) => ControlEvent::Record(Record::Doorbell),
                (MEMORY, Some(fd)) => ControlEvent::Record(Record::Memory(passed(fd))),
                (TARGET, Some(fd)) => ControlEvent::Record(Record::Target(passed(fd))),
                // It can be done without.
                (TARGET, None) => continue,
                (MEMORY, None) => ControlEvent::Lacking(word(4)),
                (kind, _) => ControlEvent::End(format!("the peer sent a record of unknown kind {kind}")),
            };
        }
    }
}

fn record(kind: u32, id: u32, len: u64, addr: u64) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&id.to_le_bytes());
    bytes[8..16].copy_from_slice(&len.to_le_bytes());
    bytes[16..].copy_from_slice(&addr.to_le_bytes());
    bytes
}

/// Room for one descriptor in a control message, aligned as `cmsghdr` wants it.
#[repr(align(8))]
struct Ancillary([u8; 32]);

/// Sends bytes, and a descriptor with them; never blocks, never raises SIGPIPE.
pub fn send(socket: &OwnedFd, bytes: &[u8], fd: Option<RawFd>) -> io::Result<usize> {
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut ancillary = Ancillary([0; 32]);
    // SAFETY: an all-zero msghdr is a valid one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut iov;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        message.msg_control = ancillary.0.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE and CMSG_LEN only compute; 24 and 20 bytes for one descriptor.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;
        // SAFETY: the control buffer is aligned and longer than msg_controllen, so the first header and its data lie within it.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
        }
    }
    // SAFETY: the message points to live buffers of the stated lengths.
    let n = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
}

/// Receives bytes, and a descriptor if one came with them; never blocks. 0 bytes is the end of the stream.
pub fn recv(socket: &OwnedFd, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut ancillary = Ancillary([0; 32]);
    // SAFETY: an all-zero msghdr is a valid one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut iov;
    message.msg_iovlen = 1;
    message.msg_control = ancillary.0.as_mut_ptr().cast();
    // SAFETY: CMSG_LEN only computes. The padding that CMSG_SPACE adds would let a second descriptor in unseen.
    message.msg_controllen = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as usize;
    // SAFETY: the message points to live buffers of the stated lengths.
    let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) };
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut fd = None;
    // SAFETY: the kernel has set msg_controllen to what it wrote, so the first header, if any, and its data lie within the buffer;
    // a descriptor in an SCM_RIGHTS message is ours alone.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        if !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len >= libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize
        {
            fd = Some(OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()));
        }
    }
    Ok((n as usize, fd))
}
