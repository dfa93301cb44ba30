//! Messages between two processes over a socket pair. Each end is used by one reader at a time; a message is written in one piece.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longest message.
const LONGEST: usize = 1 << 16;

/// One end.
#[derive(Debug)]
pub struct Chan(UnixStream);

impl Chan {
    /// Two ends, closed on exec.
    pub fn pair() -> io::Result<(Chan, Chan)> {
        let (a, b) = UnixStream::pair()?;
        Ok((Chan(a), Chan(b)))
    }

    /// The end as a descriptor, to be handed to a process.
    pub fn into_fd(self) -> OwnedFd {
        self.0.into()
    }

    /// The end that this process was handed.
    pub fn from_fd(fd: OwnedFd) -> Chan {
        Chan(fd.into())
    }

    /// Sends a message.
    pub fn send(&self, message: &[u8]) -> io::Result<()> {
        let len = u32::try_from(message.len()).ok().filter(|&len| len as usize <= LONGEST).ok_or(io::ErrorKind::InvalidInput)?;
        let mut frame = Vec::with_capacity(4 + message.len());
        frame.extend_from_slice(&len.to_ne_bytes());
        frame.extend_from_slice(message);
        (&self.0).write_all(&frame)
    }

    /// The next message. `UnexpectedEof`: the other end is gone.
    pub fn recv(&self) -> io::Result<Vec<u8>> {
        let mut len = [0; 4];
        (&self.0).read_exact(&mut len)?;
        let len = u32::from_ne_bytes(len) as usize;
        if len > LONGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut message = vec![0; len];
        (&self.0).read_exact(&mut message)?;
        Ok(message)
    }

    /// The next message, if its beginning comes before `end`; else `None`.
    pub fn recv_until(&self, end: Instant) -> io::Result<Option<Vec<u8>>> {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_micros(1));
        self.0.set_read_timeout(Some(left))?;
        let message = self.recv();
        self.0.set_read_timeout(None)?;
        match message {
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => Ok(None),
            message => message.map(Some),
        }
    }
}
