//! The keys, values and queues of a store in memory, and torch's rules for changing them. Used by the in-process store under its lock and by the
//! server's thread; nothing here waits or wakes a waiter.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A value, shared with the replies that are sending it.
pub type Value = Arc<Blob>;

/// The bytes of a value, counted in `meter` until the last reference is dropped.
pub struct Blob {
    bytes: Vec<u8>,
    meter: Arc<AtomicUsize>,
}

/// What [`Values::compare_set`] found.
pub enum Compared {
    /// The expected value; the desired one is stored.
    Stored,
    /// Another value, which stays.
    Other(Value),
    /// No value, though one was expected.
    Missing,
}

/// A value that is not a number.
#[derive(Debug, PartialEq, Eq)]
pub struct NotANumber;

/// Keys with values, and queues.
#[derive(Default)]
pub struct Values {
    entries: HashMap<Box<[u8]>, Value>,
    queues: HashMap<Box<[u8]>, VecDeque<Value>>,
    /// Bytes of all values, including those that replies still hold.
    meter: Arc<AtomicUsize>,
    /// Bytes of the keys.
    keys: usize,
}

impl Values {
    /// Bytes of all this, without the allocator's overhead.
    pub fn size(&self) -> usize {
        self.meter.load(Ordering::Relaxed) + self.keys
    }

    /// Whether the key has a value, or names a queue that holds something.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.entries.contains_key(key) || self.queues.contains_key(key)
    }

    /// The key's value.
    pub fn get(&self, key: &[u8]) -> Option<&Value> {
        self.entries.get(key)
    }

    /// Stores a value.
    pub fn set(&mut self, key: &[u8], value: &[u8]) {
        self.change(key, |bytes| {
            bytes.clear();
            // A value that has shrunk a lot gives its memory back; one that changes a little keeps it.
            if bytes.capacity() > 64 + 2 * value.len() {
                bytes.shrink_to(value.len());
            }
            bytes.extend_from_slice(value);
        });
    }

    /// Appends to a value.
    pub fn append(&mut self, key: &[u8], value: &[u8]) {
        self.change(key, |bytes| bytes.extend_from_slice(value));
    }

    /// Stores `desired` if the value is `expected`, or missing and nothing was expected.
    pub fn compare_set(&mut self, key: &[u8], expected: &[u8], desired: &[u8]) -> Compared {
        let compared = self.compare(key, expected);
        if let Compared::Stored = compared {
            self.set(key, desired);
        }
        compared
    }

    /// What [`Values::compare_set`] would do, without doing it.
    pub fn compare(&self, key: &[u8], expected: &[u8]) -> Compared {
        match self.entries.get(key) {
            Some(value) if value.bytes() != expected => Compared::Other(Arc::clone(value)),
            None if !expected.is_empty() => Compared::Missing,
            _ => Compared::Stored,
        }
    }

    /// Adds to a number, which starts from 0, and returns the sum.
    pub fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, NotANumber> {
        let sum = sum(self.entries.get(key).map(|value| value.bytes()), delta)?;
        self.set(key, sum.to_string().as_bytes());
        Ok(sum)
    }

    /// Removes a key; false if it has no value.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        let Some((key, _)) = self.entries.remove_entry(key) else { return false };
        self.keys -= key_size(&key);
        true
    }

    /// Keys that have a value.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.entries.keys().map(|key| &**key)
    }

    /// Appends to a queue.
    pub fn push(&mut self, key: &[u8], value: &[u8]) {
        let value = Blob::new(value, &self.meter);
        match self.queues.get_mut(key) {
            Some(queue) => queue.push_back(value),
            None => {
                self.keys += key_size(key);
                self.queues.insert(key.into(), VecDeque::from([value]));
            }
        }
    }

    /// Takes the oldest from a queue.
    pub fn pop(&mut self, key: &[u8]) -> Option<Value> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
            self.keys -= key_size(key);
        }
        value
    }

    /// How many values a queue holds.
    pub fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    /// Changes a value, which starts empty; references to the old one keep it unchanged.
    fn change(&mut self, key: &[u8], change: impl FnOnce(&mut Vec<u8>)) {
        if let Some(value) = self.entries.get_mut(key) {
            match Arc::get_mut(value) {
                Some(blob) => blob.change(change),
                None => {
                    let mut bytes = value.bytes.clone();
                    change(&mut bytes);
                    *value = Blob::new(&bytes, &self.meter);
                }
            }
            return;
        }
        let mut bytes = Vec::new();
        change(&mut bytes);
        if let Entry::Vacant(entry) = self.entries.entry(key.into()) {
            self.keys += key_size(key);
            entry.insert(Blob::new(&bytes, &self.meter));
        }
    }
}

impl Blob {
    /// The value.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn new(bytes: &[u8], meter: &Arc<AtomicUsize>) -> Value {
        let bytes = bytes.to_vec();
        meter.fetch_add(bytes.capacity() + BLOB_SIZE, Ordering::Relaxed);
        Arc::new(Blob { bytes, meter: Arc::clone(meter) })
    }

    fn change(&mut self, change: impl FnOnce(&mut Vec<u8>)) {
        let before = self.bytes.capacity();
        change(&mut self.bytes);
        self.meter.fetch_add(self.bytes.capacity(), Ordering::Relaxed);
        self.meter.fetch_sub(before, Ordering::Relaxed);
    }
}

impl Drop for Blob {
    fn drop(&mut self) {
        self.meter.fetch_sub(self.bytes.capacity() + BLOB_SIZE, Ordering::Relaxed);
    }
}

/// Bytes of a value besides its contents, the Arc's counts included.
const BLOB_SIZE: usize = size_of::<Blob>() + 2 * size_of::<usize>();

/// Bytes of a key with its entry in the map.
fn key_size(key: &[u8]) -> usize {
    key.len() + size_of::<(Box<[u8]>, VecDeque<Value>)>()
}

/// The sum of a stored number, 0 if there is none, and `delta`; it wraps around, as torch's does. Text is read as C++'s `stoll` does: spaces and a sign before
/// the digits, at least one of them, anything after them.
pub fn sum(text: Option<&[u8]>, delta: i64) -> Result<i64, NotANumber> {
    let Some(text) = text else { return Ok(delta) };
    let text = match text.iter().position(|byte| !matches!(byte, b' ' | b'\t'..=b'\r')) {
        Some(start) => text.get(start..).unwrap_or(&[]),
        None => return Err(NotANumber),
    };
    let (negative, digits) = match text.split_first() {
        Some((b'-', digits)) => (true, digits),
        Some((b'+', digits)) => (false, digits),
        _ => (false, text),
    };
    let mut number: Option<i64> = None;
    for digit in digits.iter().take_while(|byte| byte.is_ascii_digit()).map(|byte| i64::from(byte - b'0')) {
        let shifted = number.unwrap_or(0).checked_mul(10).ok_or(NotANumber)?;
        number = Some(if negative { shifted.checked_sub(digit) } else { shifted.checked_add(digit) }.ok_or(NotANumber)?);
    }
    number.map(|number| number.wrapping_add(delta)).ok_or(NotANumber)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_stoll_does() {
        for (text, number) in [("7", 7), ("-2", -2), ("+5", 5), (" \t\n12abc", 12), ("9223372036854775807", i64::MAX)] {
            assert_eq!(sum(Some(text.as_bytes()), 0), Ok(number), "{text:?}");
        }
        assert_eq!(sum(None, 3), Ok(3));
        assert_eq!(sum(Some(b"-9223372036854775808"), 0), Ok(i64::MIN));
        for text in ["", "x", " ", "-", "+-1", "9223372036854775808", "-9223372036854775809"] {
            assert_eq!(sum(Some(text.as_bytes()), 0), Err(NotANumber), "{text:?}");
        }
        assert_eq!(sum(Some(b"9223372036854775807"), 2), Ok(i64::MIN + 1));
    }

    #[test]
    fn values_are_counted_until_the_last_reference_is_dropped() {
        let mut values = Values::default();
        values.set(b"big", &[1; 10_000]);
        values.push(b"queue", &[2; 5_000]);
        values.append(b"big", &[3; 10_000]);
        assert!(values.size() >= 25_000, "{}", values.size());
        let reader = values.get(b"big").cloned().unwrap();
        values.set(b"big", b"small");
        assert_eq!(reader.bytes().len(), 20_000, "a reference keeps the old value");
        assert!(values.size() >= 25_000, "{}", values.size());
        drop(reader);
        assert!(values.size() < 6_000, "{}", values.size());
        assert_eq!(values.pop(b"queue").unwrap().bytes(), [2; 5_000]);
        assert!(!values.contains(b"queue"));
        assert!(values.delete(b"big"));
        assert_eq!(values.size(), 0);
    }

    #[test]
    fn a_value_that_shrinks_gives_its_memory_back() {
        let mut values = Values::default();
        values.set(b"k", &[1; 100_000]);
        values.set(b"k", b"1");
        assert!(values.size() < 1_000, "{}", values.size());
    }
}
