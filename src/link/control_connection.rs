//! The control connection of a comm: the handshake's, kept for what the ends have to say to each other without their queue pairs: that one closes on
//! purpose, and, while no rail works, what a cell says otherwise (`failover.rs`). Used by the thread that drives the link.
//!
//! | of the 72 bytes of a frame | |
//! |---|---|
//! | 0 | 4: it closes; 5: a cell follows |
//! | 1 | the rail that the cell is about; else 0 |
//! | 2..8 | 0 |
//! | 8..72 | the cell; else 0 |

use std::io::{self, Read, Write};

use crate::base::fd::TcpStream;
use crate::base::fork;

use super::failover::{CELL_SIZE, Said, decode_cell};
use super::limits::MAX_RAILS;

const BYE: u8 = 4;
const CELL: u8 = 5;
const HEADER_SIZE: usize = 8;
/// Frames that a call reads at most: a peer that never ends gets no further than one that does.
const MAX_FRAMES: usize = 64;
const FRAME_SIZE: usize = HEADER_SIZE + CELL_SIZE;
type Frame = [u8; FRAME_SIZE];

/// The end of a handshake that is still to come, on the connection that is then kept.
pub trait Confirm: Send {
    /// Whether it has come.
    fn read(&mut self, stream: &mut TcpStream) -> std::result::Result<bool, ConfirmError>;
}

/// Why it does not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfirmError {
    /// The peer is gone.
    Closed,
    /// It does not belong to this handshake.
    Bad,
}

/// How the connection has ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// The peer has ended it: how one knows.
    Peer(&'static str),
    /// The peer has, or the way to it has failed: one cannot tell.
    Way(&'static str),
    /// The peer broke the protocol: what it sent.
    Protocol(&'static str),
}

/// The connection, if there is one still.
pub struct ControlConnection {
    stream: Option<TcpStream>,
    /// What the handshake still wants, where the comm was handed out before that came.
    confirm: Option<Box<dyn Confirm>>,
    /// What was read of a frame.
    frame: Frame,
    frame_len: usize,
    /// A frame of which so many bytes are written: all, if it is not under way.
    out: Frame,
    written: usize,
    /// How a write has failed, which the system tells but once.
    write_error: Option<End>,
    bye: bool,
    /// What the peer has said of each rail.
    said: [Said; MAX_RAILS],
    epoch: u64,
}

fn frame(kind: u8, rail: u8, cell: &[u8; CELL_SIZE]) -> Frame {
    let mut frame = [0; FRAME_SIZE];
    let (header, rest) = frame.split_at_mut(HEADER_SIZE);
    header.iter_mut().zip([kind, rail]).for_each(|(to, from)| *to = from);
    rest.copy_from_slice(cell);
    frame
}

impl ControlConnection {
    /// The handshake's, if there is one.
    pub fn new(stream: Option<TcpStream>, confirm: Option<Box<dyn Confirm>>) -> ControlConnection {
        ControlConnection {
            stream,
            confirm,
            frame: [0; FRAME_SIZE],
            frame_len: 0,
            out: [0; FRAME_SIZE],
            written: FRAME_SIZE,
            write_error: None,
            bye: false,
            said: [Said::default(); MAX_RAILS],
            epoch: fork::epoch(),
        }
    }

    /// Whether it is there.
    pub fn is_open(&self) -> bool {
        self.stream.is_some()
    }

    /// Forgets it: nothing more comes.
    pub fn lose(&mut self) {
        self.stream = None;
    }

    /// Whether the handshake is complete, as far as was read.
    pub fn confirmed(&self) -> bool {
        self.confirm.is_none()
    }

    /// Whether the peer has said that it closes its comm, as far as was read.
    pub fn said_bye(&self) -> bool {
        self.bye
    }

    /// The last that the peer has said of a rail, as far as was read.
    pub fn said(&self, rail: usize) -> Said {
        self.said.get(rail).copied().unwrap_or_default()
    }

    /// Reads what the peer has said, up to [`MAX_FRAMES`].
    ///
    /// Errors: the connection has ended. It is not to be read again.
    pub fn read(&mut self) -> std::result::Result<(), End> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        if let Some(confirm) = &mut self.confirm {
            match confirm.read(stream) {
                Ok(true) => self.confirm = None,
                Ok(false) => return Ok(()),
                Err(ConfirmError::Closed) => return Err(End::Peer("it closed the connection before the handshake was complete")),
                Err(ConfirmError::Bad) => return Err(End::Protocol("the last message of its handshake is wrong")),
            }
        }
        let mut frames = 0;
        while frames < MAX_FRAMES {
            let Some(rest) = self.frame.get_mut(self.frame_len..) else { return Err(End::Protocol("control message overrun")) };
            match stream.read(rest) {
                Ok(0) => {
                    let closed = End::Peer("the control connection was closed: its process died or was closed");
                    return Err(self.write_error.take().unwrap_or(closed));
                }
                Ok(n) => self.frame_len += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(end_of(&e)),
            }
            if self.frame_len < FRAME_SIZE {
                continue;
            }
            (self.frame_len, frames) = (0, frames + 1);
            match parse(&self.frame) {
                Some(Message::Bye) => self.bye = true,
                Some(Message::Cell(rail, heard)) => match self.said.get_mut(rail) {
                    // It may be said again.
                    Some(said) if heard.word >= said.word => *said = heard,
                    Some(_) => {}
                    None => return Err(End::Protocol("a control message that makes no sense")),
                },
                None => return Err(End::Protocol("a control message that makes no sense")),
            }
        }
        Ok(())
    }

    /// Tells the peer that this side closes on purpose. In a forked child the connection is the parent's.
    pub fn say_bye(&mut self) {
        // Best effort: it only makes the peer's message better.
        self.say(frame(BYE, 0, &[0; CELL_SIZE]));
    }

    /// Tells the peer what a cell says; false if it has no room for it now.
    pub fn say_cell(&mut self, rail: usize, cell: &[u8; CELL_SIZE]) -> bool {
        u8::try_from(rail).is_ok_and(|rail| self.say(frame(CELL, rail, cell)))
    }

    fn say(&mut self, frame: Frame) -> bool {
        if !self.write() {
            return false;
        }
        (self.out, self.written) = (frame, 0);
        self.write();
        // What is left goes before anything else.
        true
    }

    /// Writes what is left of a frame; whether nothing is, and there is a connection.
    pub fn write(&mut self) -> bool {
        let Some(stream) = self.stream.as_mut().filter(|_| self.epoch == fork::epoch()) else { return false };
        while let Some(rest) = self.out.get(self.written..).filter(|rest| !rest.is_empty()) {
            match stream.write(rest) {
                Ok(0) => return false,
                Ok(n) => self.written += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
                Err(e) => {
                    self.write_error.get_or_insert(end_of(&e));
                    return false;
                }
            }
        }
        true
    }

    /// Ends it because the comm has failed: a peer whose queue pairs cannot tell it learns all the same.
    #[cold]
    pub fn hang_up(&mut self) {
        if let Some(stream) = self.stream.as_mut().filter(|_| self.epoch == fork::epoch()) {
            // It may have ended already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Writes bytes as the peer would never get them from an honest side.
    #[cfg(test)]
    pub fn say_for_test(&mut self, bytes: &[u8]) {
        self.stream.as_mut().unwrap().write_all(bytes).unwrap();
    }
}

enum Message {
    Bye,
    Cell(usize, Said),
}

/// What a frame says; `None` if no honest side says it.
fn parse(frame: &Frame) -> Option<Message> {
    let (header, cell) = frame.split_at(HEADER_SIZE);
    let cell: &[u8; CELL_SIZE] = cell.try_into().ok()?;
    match *header {
        [BYE, 0, 0, 0, 0, 0, 0, 0] if cell.iter().all(|byte| *byte == 0) => Some(Message::Bye),
        [CELL, rail, 0, 0, 0, 0, 0, 0] => Some(Message::Cell(usize::from(rail), decode_cell(cell))),
        _ => None,
    }
}

/// How a connection has ended that cannot be read.
fn end_of(e: &io::Error) -> End {
    use io::ErrorKind::{ConnectionReset, HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    match e.kind() {
        TimedOut => End::Way("the control connection timed out: its host does not answer"),
        ConnectionReset | HostUnreachable | NetworkUnreachable | NetworkDown => {
            End::Way("the control connection was reset: its process died or its host is unreachable")
        }
        _ => End::Peer("the control connection was reset: its process died or its host is unreachable"),
    }
}
