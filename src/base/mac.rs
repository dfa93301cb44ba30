//! HMAC-SHA-256, which authenticates handshakes. Called at connection set-up, on any thread.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a code.
pub const MAC_SIZE: usize = 32;

/// The code of the concatenated `parts`. Parts of variable length need their length inside, or two messages may read alike.
pub fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; MAC_SIZE] {
    feed(key, parts).finalize().into_bytes().into()
}

/// Whether `code` is that of the concatenated `parts`. Takes the same time wherever they differ.
pub fn verify(key: &[u8], parts: &[&[u8]], code: &[u8]) -> bool {
    feed(key, parts).verify_slice(code).is_ok()
}

fn feed(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    // RFC 2104 defines keys of every length, and so does this implementation.
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes any key");
    for part in parts {
        mac.update(part);
    }
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 2.
    const RFC: [u8; 32] = [
        0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24, 0x26, 0x08, 0x95, 0x75, 0xc7, 0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27,
        0x39, 0x83, 0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43,
    ];

    #[test]
    fn matches_the_rfc_however_the_message_is_cut() {
        assert_eq!(hmac(b"Jefe", &[b"what do ya want for nothing?"]), RFC);
        assert_eq!(hmac(b"Jefe", &[b"what do ya ", b"", b"want for nothing?"]), RFC);
    }

    #[test]
    fn refuses_every_flipped_bit_and_every_other_length() {
        let parts: [&[u8]; 1] = [b"what do ya want for nothing?"];
        assert!(verify(b"Jefe", &parts, &RFC));
        for bit in 0..256 {
            let mut code = RFC;
            code[bit / 8] ^= 1 << (bit % 8);
            assert!(!verify(b"Jefe", &parts, &code), "bit {bit}");
        }
        assert!(!verify(b"Jefe", &parts, &RFC[..31]));
        assert!(!verify(b"Jefe", &parts, &[]));
        assert!(!verify(b"jefe", &parts, &RFC));
    }
}
