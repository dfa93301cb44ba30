//! A rank's memory, and what must be in it: whatever the library writes elsewhere than into an outstanding receive differs from the second copy.

use crate::support::comms::Mem;

/// What memory holds at first.
const CANARY: u8 = 0xC3;

pub struct Arena {
    mem: Mem,
    expected: Vec<u8>,
}

impl Arena {
    pub fn new(len: usize) -> Arena {
        let expected = vec![CANARY; len];
        Arena { mem: Mem::filled(&expected), expected }
    }

    pub fn len(&self) -> usize {
        self.expected.len()
    }

    pub fn ptr(&self, at: usize) -> *mut u8 {
        self.mem.ptr(at)
    }

    /// What the rank itself writes.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        self.mem.write(at, bytes);
        self.expected[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// What must have been written there.
    #[track_caller]
    pub fn received(&mut self, at: usize, bytes: &[u8], what: &str) {
        self.compare(at, bytes, what);
        self.expected[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// From now on nothing may change there any more, whatever there is.
    pub fn freeze(&mut self, at: usize, len: usize) {
        let there = self.mem.read(at, len);
        self.expected[at..at + len].copy_from_slice(&there);
    }

    /// Nothing was written there but what is known.
    #[track_caller]
    pub fn check(&self, at: usize, len: usize, what: &str) {
        self.compare(at, &self.expected[at..at + len], what);
    }

    #[track_caller]
    fn compare(&self, at: usize, expected: &[u8], what: &str) {
        // SAFETY: both ranges are mapped. Nobody may write there; if somebody does, that is what this is to find.
        if unsafe { libc::memcmp(self.mem.ptr(at).cast(), expected.as_ptr().cast(), expected.len()) } == 0 {
            return;
        }
        let there = self.mem.read(at, expected.len());
        let wrong: Vec<usize> = (0..expected.len()).filter(|&i| there[i] != expected[i]).collect();
        let (Some(first), Some(last)) = (wrong.first(), wrong.last()) else { panic!("{what}: bytes change while they are compared") };
        let (len, n) = (expected.len(), wrong.len());
        panic!("{what}: of {len} bytes at {at:#x}, {n} are wrong, the first at {first}, the last at {last}");
    }
}
