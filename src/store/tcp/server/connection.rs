//! One client of the server.

use mio::net::TcpStream;

use super::output::Output;
use crate::base::fd::Owned;
use crate::store::tcp::secret::NONCE;
use crate::store::tcp::wire::Decoder;

/// What a client has proved so far.
#[derive(Default)]
pub struct Admission {
    /// It speaks the protocol.
    pub validated: bool,
    /// It may use the store: it knows the secret, or there is none.
    pub admitted: bool,
    /// The challenge that it must answer.
    pub nonce: Option<[u8; NONCE]>,
}

/// A connection and what it holds.
pub struct Connection {
    pub stream: Owned<TcpStream>,
    /// When it connected.
    pub connected_at: u64,
    pub decoder: Decoder,
    pub output: Output,
    /// What the client has proved.
    pub admission: Admission,
    /// There may be more to read.
    pub readable: bool,
    /// The client has closed its side: the end follows what there is to read, and no further event reports it.
    pub ends: bool,
    /// It is in the queue of clients that have more to do.
    pub queued: bool,
    /// Bytes that the server's total counts for it.
    pub counted: usize,
}

impl Connection {
    /// A client that has just connected.
    pub fn new(stream: Owned<TcpStream>, connected_at: u64) -> Self {
        Connection {
            stream,
            connected_at,
            decoder: Decoder::default(),
            output: Output::default(),
            admission: Admission::default(),
            readable: true,
            ends: false,
            queued: false,
            counted: 0,
        }
    }

    /// Bytes of its buffers.
    pub fn size(&self) -> usize {
        self.decoder.size() + self.output.size()
    }
}
