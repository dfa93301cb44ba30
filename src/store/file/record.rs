//! The records of torch's FileStore: a key and a value, each preceded by its length. A file consists of records only; the last one of a key counts.

use std::io::{self, Read};

/// A record, or why there is none.
#[derive(Debug, PartialEq, Eq)]
pub enum Record {
    /// A key has this value from here on.
    Set(Vec<u8>, Vec<u8>),
    /// A key is gone from here on.
    Delete(Vec<u8>),
    /// The file ends within the record: its writer was killed.
    Cut,
    /// Not a record of a store.
    Foreign,
}

/// Prefix of a user's key.
pub const REGULAR: u8 = b'/';
/// Prefix of the key of a deletion.
const DELETE: u8 = b'-';
/// How many stores use the file.
pub const REFCOUNT: &[u8] = b"refcount/";
/// How many stores have ended.
pub const CLEANUP: &[u8] = b"cleanup/";
/// A file with longer keys or values is not a store's.
const LONGEST_KEY: u64 = 1 << 20;
const LONGEST_VALUE: u64 = 1 << 30;

/// Appends a record.
pub fn write(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    for part in [key, value] {
        out.extend_from_slice(&(part.len() as u32).to_le_bytes());
        out.extend_from_slice(part);
    }
}

/// Appends the record of a deletion.
pub fn write_delete(out: &mut Vec<u8>, key: &[u8]) {
    write(out, &[&[DELETE], key].concat(), &[]);
}

/// Whether a record can hold it, and another the key's deletion.
pub fn fits(key: &[u8], value: &[u8]) -> bool {
    (key.len() as u64) < LONGEST_KEY && value.len() as u64 <= LONGEST_VALUE
}

/// Reads a record of a file that has `left` more bytes; at least one.
pub fn read(from: &mut impl Read, mut left: u64) -> io::Result<(Record, u64)> {
    let before = left;
    let Some(len) = length(from, &mut left)? else { return Ok((Record::Cut, 0)) };
    if len > LONGEST_KEY {
        return Ok((Record::Foreign, 0));
    }
    let key = bytes(from, &mut left, len)?;
    if !plausible(&key, len) {
        return Ok((Record::Foreign, 0));
    }
    if (key.len() as u64) < len {
        return Ok((Record::Cut, 0));
    }
    let Some(len) = length(from, &mut left)? else { return Ok((Record::Cut, 0)) };
    if len > LONGEST_VALUE {
        return Ok((Record::Foreign, 0));
    }
    let value = bytes(from, &mut left, len)?;
    if (value.len() as u64) < len {
        return Ok((Record::Cut, 0));
    }
    let record = match key.strip_prefix(&[DELETE]) {
        Some(key) => Record::Delete(key.to_vec()),
        None => Record::Set(key, value),
    };
    Ok((record, before - left))
}

/// Whether a store's key of `len` bytes may begin like this.
fn plausible(start: &[u8], len: u64) -> bool {
    let own = |name: &[u8]| len == name.len() as u64 && name.starts_with(start);
    match start {
        [] => len > 0,
        [REGULAR, ..] | [DELETE, REGULAR, ..] => true,
        [DELETE] => len > 1,
        _ => own(REFCOUNT) || own(CLEANUP),
    }
}

fn length(from: &mut impl Read, left: &mut u64) -> io::Result<Option<u64>> {
    if *left < 4 {
        return Ok(None);
    }
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    *left -= 4;
    Ok(Some(u64::from(u32::from_le_bytes(len))))
}

/// So many bytes, or as many as there are.
fn bytes(from: &mut impl Read, left: &mut u64, len: u64) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let n = from.take(len.min(*left)).read_to_end(&mut out)?;
    *left -= n as u64;
    Ok(out)
}
