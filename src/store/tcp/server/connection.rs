//! One client of the server.

use mio::net::TcpStream;

use super::output::Output;
use crate::store::tcp::wire::Decoder;

/// A connection and what it holds.
pub struct Connection {
    pub stream: TcpStream,
    pub decoder: Decoder,
    pub output: Output,
    /// The client has said what it speaks.
    pub validated: bool,
    /// There may be more to read.
    pub readable: bool,
    /// It stands in the queue of those who have more to do.
    pub queued: bool,
    /// Bytes that are counted for it.
    pub counted: usize,
}

impl Connection {
    /// A client that has just come.
    pub fn new(stream: TcpStream) -> Self {
        Connection {
            stream,
            decoder: Decoder::default(),
            output: Output::default(),
            validated: false,
            readable: true,
            queued: false,
            counted: 0,
        }
    }

    /// Bytes that its buffers take.
    pub fn size(&self) -> usize {
        self.decoder.size() + self.output.size()
    }
}
