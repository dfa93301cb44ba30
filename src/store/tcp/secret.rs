//! How two ends prove to each other that they know a secret, without sending it: an extension that torch does not have. No input or output here.
//!
//! The client asks for a challenge; the server sends a nonce; the client sends one of its own and a code of both; the server answers with another code of both.
//! What is sent afterwards is neither encrypted nor signed.

use crate::base::mac;

/// Bytes of a nonce.
pub const NONCE: usize = 16;

/// The server's reply to a PING from a client that has not proved the secret, before it closes the connection: torch's client tries again until its timeout,
/// but warns from the first attempt on that its ping failed, and names this number, 1397048146.
pub const SECRET_WANTED: u32 = u32::from_be_bytes(*b"SECR");

/// Reply to CHALLENGE: there is no secret here.
pub const NO_SECRET: u8 = 0;
/// Reply to CHALLENGE, before the nonce; and to PROVE, before the code.
pub const SECRET: u8 = 1;
/// Reply to PROVE: it is another secret.
pub const WRONG_SECRET: u8 = 2;

/// The code of one end.
pub fn code(key: &[u8], end: End, server: &[u8; NONCE], client: &[u8; NONCE]) -> [u8; mac::MAC_SIZE] {
    mac::hmac(key, &[end.label(), server, client])
}

/// Whether the code is that end's.
pub fn verify(key: &[u8], end: End, server: &[u8; NONCE], client: &[u8; NONCE], code: &[u8]) -> bool {
    mac::verify(key, &[end.label(), server, client], code)
}

/// The end that makes a code: a code of one end is invalid as that of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum End {
    Client,
    Server,
}

impl End {
    /// Both of one length, so that no two messages are the same bytes.
    fn label(self) -> &'static [u8] {
        match self {
            End::Client => b"railhead store client",
            End::Server => b"railhead store server",
        }
    }
}
