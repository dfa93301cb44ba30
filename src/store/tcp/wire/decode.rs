//! Incremental decoding of requests, for the server's thread: takes bytes as they arrive, returns requests once they are complete. No input or output here.

use std::fmt;

use super::{Field, RequestType};
use crate::base::mac::MAC_SIZE;
use crate::store::tcp::secret::NONCE;

/// A request as the server sees it, borrowed from its connection's buffer.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum ClientRequest<'a> {
    Validate {
        magic: u32,
    },
    Set {
        key: &'a [u8],
        value: &'a [u8],
    },
    CompareSet {
        key: &'a [u8],
        expected: &'a [u8],
        desired: &'a [u8],
    },
    Get {
        key: &'a [u8],
    },
    Add {
        key: &'a [u8],
        delta: i64,
    },
    Check {
        keys: Strings<'a>,
    },
    Wait {
        keys: Strings<'a>,
    },
    GetNumKeys,
    DeleteKey {
        key: &'a [u8],
    },
    Append {
        key: &'a [u8],
        value: &'a [u8],
    },
    MultiGet {
        keys: Strings<'a>,
    },
    /// Keys and values alternately.
    MultiSet {
        entries: Strings<'a>,
    },
    CancelWait,
    Ping {
        nonce: u32,
    },
    QueuePush {
        key: &'a [u8],
        value: &'a [u8],
    },
    QueuePop {
        key: &'a [u8],
    },
    QueueLen {
        key: &'a [u8],
    },
    ListKeys,
    Barrier {
        key: &'a [u8],
        world_size: i64,
    },
    Challenge,
    Prove {
        nonce: &'a [u8; NONCE],
        code: &'a [u8],
    },
    WatchKey {
        key: &'a [u8],
    },
}

/// Several byte strings of a request.
#[derive(Clone, Copy)]
pub struct Strings<'a> {
    bytes: &'a [u8],
    spans: &'a [Span],
}

impl<'a> Strings<'a> {
    /// How many.
    pub fn count(&self) -> usize {
        self.spans.len()
    }

    /// The one at `index`.
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        self.spans.get(index).map(|span| span.of(self.bytes))
    }

    /// All of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        let bytes = self.bytes;
        self.spans.iter().map(move |span| span.of(bytes))
    }
}

impl fmt::Debug for Strings<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Limits of a request. A client that exceeds them is disconnected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a key.
    pub key: usize,
    /// Bytes of a value in a request. APPEND may make longer ones.
    pub value: usize,
    /// Keys of a request.
    pub keys: usize,
    /// Bytes of a request. Torch has no such limit: 131072 values of 8 MiB are a legal request there.
    pub request: usize,
}

impl Default for Limits {
    /// Torch's: MAX_STRING_LEN, MAX_PAYLOAD_LEN and MAX_KEY_COUNT of its libuv backend.
    fn default() -> Self {
        Limits { key: 8 << 10, value: 8 << 20, keys: 128 << 10, request: 256 << 20 }
    }
}

/// A request that breaks the protocol or its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum WireError {
    #[error("unknown request type {0}")]
    UnknownQuery(u8),
    #[error("a key of {0} bytes; at most {1} are accepted")]
    LongKey(u64, usize),
    #[error("a value of {0} bytes; at most {1} are accepted")]
    LongValue(u64, usize),
    #[error("a request with {0} keys; at most {1} are accepted")]
    ManyKeys(u64, usize),
    #[error("a request of more than {0} bytes")]
    LongRequest(usize),
}

/// One connection's undecoded bytes. Allocates no more than was received, whatever lengths the bytes say, and decodes each byte once.
#[derive(Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Start of the request that is being read.
    start: usize,
    /// How far it is read, counted from `start`.
    pos: usize,
    /// Fields read so far.
    spans: Vec<Span>,
    query: Option<RequestType>,
    /// Index in the query's shape.
    field: usize,
    /// Keys, or keys and values, still to come of a field that is several.
    left: Option<u64>,
    /// The request was returned: the next call begins after it.
    returned: bool,
}

/// The bytes of a field, counted from the start of its request.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
}

impl Span {
    fn of(self, request: &[u8]) -> &[u8] {
        // Always within: a span is made when its bytes are there.
        request.get(self.start..self.end).unwrap_or(&[])
    }
}

/// Buffers of this size stay with an idle connection.
pub(super) const SMALL_BUFFER: usize = 1 << 10;

impl Decoder {
    /// Takes bytes off the wire.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.skip_returned();
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next request, once all its bytes are there. After an error the connection cannot be used any more.
    pub fn next(&mut self, limits: &Limits) -> Result<Option<ClientRequest<'_>>, WireError> {
        self.skip_returned();
        if !self.read(limits)? {
            self.shrink();
            return Ok(None);
        }
        self.returned = true;
        Ok(self.request())
    }

    /// Bytes of its memory.
    pub fn size(&self) -> usize {
        self.buffer.capacity() + self.spans.capacity() * size_of::<Span>()
    }

    /// Skips the request that was returned.
    fn skip_returned(&mut self) {
        if self.returned {
            self.returned = false;
            self.start += self.pos;
            self.pos = 0;
            self.spans.clear();
            self.query = None;
            self.field = 0;
            self.left = None;
        }
    }

    fn shrink(&mut self) {
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
            self.buffer.shrink_to(SMALL_BUFFER);
            self.spans.shrink_to(SMALL_BUFFER / size_of::<Span>());
        }
    }

    /// Continues to read the request; whether it is complete.
    fn read(&mut self, limits: &Limits) -> Result<bool, WireError> {
        let query = match self.query {
            Some(query) => query,
            None => {
                let Some([byte]) = self.take() else { return Ok(false) };
                let query = RequestType::from_byte(byte).ok_or(WireError::UnknownQuery(byte))?;
                self.query = Some(query);
                query
            }
        };
        while let Some(&field) = query.shape().get(self.field) {
            let done = match field {
                Field::Word => self.fixed(4),
                Field::Int => self.fixed(8),
                Field::Nonce => self.fixed(NONCE),
                Field::Code => self.fixed(MAC_SIZE),
                Field::Key | Field::Value => self.string(field, limits)?,
                Field::Keys => self.several(&[Field::Key], limits)?,
                Field::Pairs => self.several(&[Field::Key, Field::Value], limits)?,
            };
            if !done {
                return Ok(false);
            }
            self.field += 1;
        }
        Ok(true)
    }

    /// A field of `size` bytes.
    fn fixed(&mut self, size: usize) -> bool {
        let span = Span { start: self.pos, end: self.pos + size };
        if self.rest().len() < size {
            return false;
        }
        self.spans.push(span);
        self.pos = span.end;
        true
    }

    /// A key or a value. Too long a one is noticed by its length, before its bytes come.
    fn string(&mut self, field: Field, limits: &Limits) -> Result<bool, WireError> {
        let Some(len) = self.peek_u64() else { return Ok(false) };
        let limit = if field == Field::Key { limits.key } else { limits.value };
        let size = match usize::try_from(len) {
            Ok(size) if size <= limit => size,
            _ if field == Field::Key => return Err(WireError::LongKey(len, limit)),
            _ => return Err(WireError::LongValue(len, limit)),
        };
        let start = self.pos + 8;
        let end = start.saturating_add(size);
        if end > limits.request {
            return Err(WireError::LongRequest(limits.request));
        }
        if self.rest().len() < 8 + size {
            return Ok(false);
        }
        self.spans.push(Span { start, end });
        self.pos = end;
        Ok(true)
    }

    /// A number of elements, and the elements' fields.
    fn several(&mut self, element: &[Field], limits: &Limits) -> Result<bool, WireError> {
        if self.left.is_none() {
            let Some(bytes) = self.take() else { return Ok(false) };
            let count = u64::from_le_bytes(bytes);
            if usize::try_from(count).is_ok_and(|count| count <= limits.keys) {
                self.left = Some(count * element.len() as u64);
            } else {
                return Err(WireError::ManyKeys(count, limits.keys));
            }
        }
        while let Some(left) = self.left.filter(|&left| left > 0) {
            // `left` counts down from a multiple of the element's length: the remainder is 1 at an element's last field.
            let next = (element.len() as u64 - left % element.len() as u64) as usize % element.len();
            let Some(&field) = element.get(next) else { return Ok(false) };
            if !self.string(field, limits)? {
                return Ok(false);
            }
            self.left = Some(left - 1);
        }
        Ok(true)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.rest().first_chunk()?;
        self.pos += N;
        Some(bytes)
    }

    fn peek_u64(&self) -> Option<u64> {
        self.rest().first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
    }

    fn rest(&self) -> &[u8] {
        self.buffer.get(self.start + self.pos..).unwrap_or(&[])
    }

    /// The complete request.
    fn request(&self) -> Option<ClientRequest<'_>> {
        let bytes = self.buffer.get(self.start..)?;
        let all = Strings { bytes, spans: &self.spans };
        let key = all.get(0).unwrap_or(&[]);
        let second = all.get(1).unwrap_or(&[]);
        let word = || key.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let int = || second.first_chunk().map(|bytes| i64::from_le_bytes(*bytes));
        Some(match self.query? {
            RequestType::Validate => ClientRequest::Validate { magic: word()? },
            RequestType::Set => ClientRequest::Set { key, value: second },
            RequestType::CompareSet => ClientRequest::CompareSet { key, expected: second, desired: all.get(2)? },
            RequestType::Get => ClientRequest::Get { key },
            RequestType::Add => ClientRequest::Add { key, delta: int()? },
            RequestType::Check => ClientRequest::Check { keys: all },
            RequestType::Wait => ClientRequest::Wait { keys: all },
            RequestType::GetNumKeys => ClientRequest::GetNumKeys,
            RequestType::DeleteKey => ClientRequest::DeleteKey { key },
            RequestType::Append => ClientRequest::Append { key, value: second },
            RequestType::MultiGet => ClientRequest::MultiGet { keys: all },
            RequestType::MultiSet => ClientRequest::MultiSet { entries: all },
            RequestType::CancelWait => ClientRequest::CancelWait,
            RequestType::Ping => ClientRequest::Ping { nonce: word()? },
            RequestType::QueuePush => ClientRequest::QueuePush { key, value: second },
            RequestType::QueuePop => ClientRequest::QueuePop { key },
            RequestType::QueueLen => ClientRequest::QueueLen { key },
            RequestType::ListKeys => ClientRequest::ListKeys,
            RequestType::Barrier => ClientRequest::Barrier { key, world_size: int()? },
            RequestType::Challenge => ClientRequest::Challenge,
            RequestType::Prove => ClientRequest::Prove { nonce: key.first_chunk()?, code: second },
            RequestType::WatchKey => ClientRequest::WatchKey { key },
        })
    }
}
