//! One client of the server.

use mio::net::TcpStream;

use super::output::Output;
use crate::base::fd::Owned;
use crate::store::tcp::secret::NONCE;
use crate::store::tcp::wire::Decoder;

/// What a client has shown of itself.
#[derive(Default)]
pub struct Standing {
    /// It has said what it speaks.
    pub validated: bool,
    /// It may use the store: it knows the secret, or there is none.
    pub admitted: bool,
    /// The challenge that it has to answer.
    pub nonce: Option<[u8; NONCE]>,
}

/// A connection and what it holds.
pub struct Connection {
    pub stream: Owned<TcpStream>,
    /// When it came.
    pub came: u64,
    pub decoder: Decoder,
    pub output: Output,
    /// What the client has shown.
    pub standing: Standing,
    /// There may be more to read.
    pub readable: bool,
    /// The client has said its last: behind what there is to read comes the end, and no event will tell of it again.
    pub ends: bool,
    /// It stands in the queue of those who have more to do.
    pub queued: bool,
    /// Bytes that are counted for it.
    pub counted: usize,
}

impl Connection {
    /// A client that has just come.
    pub fn new(stream: Owned<TcpStream>, came: u64) -> Self {
        Connection {
            stream,
            came,
            decoder: Decoder::default(),
            output: Output::default(),
            standing: Standing::default(),
            readable: true,
            ends: false,
            queued: false,
            counted: 0,
        }
    }

    /// Bytes that its buffers take.
    pub fn size(&self) -> usize {
        self.decoder.size() + self.output.size()
    }
}
