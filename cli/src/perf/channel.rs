//! Frames between the coordinator and its ranks: a length of four bytes, little endian, and that many bytes of JSON. Used on both ends, on
//! socket pairs and, between two hosts, on a TCP connection, so nothing here trusts what it reads.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest frame that is read or written: the handles of 1024 comms in hexadecimal digits, twice over.
pub const LARGEST: usize = 1 << 19;

/// Writes one frame.
pub fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let len = frame.len() - 4;
    if len > LARGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {len} bytes; at most {LARGEST} are allowed")));
    }
    frame[..4].copy_from_slice(&(len as u32).to_le_bytes());
    to.write_all(&frame)
}

/// Reads one frame; `None` where the stream ends before one begins.
pub fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut len = [0; 4];
    let mut have = 0;
    while have < len.len() {
        match from.read(&mut len[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > LARGEST {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a message announces {len} bytes; at most {LARGEST} are allowed: no railhead perf at the other end?"),
        ));
    }
    let mut frame = vec![0; len];
    from.read_exact(&mut frame)?;
    Ok(Some(serde_json::from_slice(&frame)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_went() {
        let mut stream = Vec::new();
        write(&mut stream, &"first").unwrap();
        write(&mut stream, &vec![1, 2]).unwrap();
        let mut rest = &stream[..];
        assert_eq!(read::<String>(&mut rest).unwrap().as_deref(), Some("first"));
        assert_eq!(read::<Vec<u8>>(&mut rest).unwrap(), Some(vec![1, 2]));
        assert_eq!(read::<String>(&mut rest).unwrap(), None);
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        assert!(write(&mut Vec::new(), &"x".repeat(LARGEST)).is_err());
        let long = (LARGEST as u32 + 1).to_le_bytes();
        assert!(read::<String>(&mut &long[..]).unwrap_err().to_string().contains("at most"));
        assert!(read::<String>(&mut &b"\x05\0\0\0\"ab"[..]).is_err(), "cut off");
        assert!(read::<String>(&mut &b"\x05\0"[..]).is_err(), "cut off in the length");
        assert!(read::<String>(&mut &b"\x02\0\0\0{]"[..]).is_err(), "no JSON");
    }
}
