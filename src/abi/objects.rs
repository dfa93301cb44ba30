//! What the handles of the library's own C functions name: stores, watches, groups, proxies and what belongs to them. Looked up on every call, on any thread.
//!
//! A handle is a number in the place of a pointer, and no number is used twice: NULL, a pointer, a closed handle, one of another kind and one from before
//! a fork are all told from a live one, and nothing that they might point to is touched.
//!
//! ```text
//! kind:8 | process:16 | number:40
//! ```

use std::collections::HashMap;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::error::{Error, Result};
use crate::base::fork::{self, PerProcess};

/// The objects of one kind in this process.
pub struct Objects<T> {
    kind: u8,
    words: &'static str,
    live: PerProcess<Live<T>>,
}

/// By their numbers. (HashMap has a Default for every T, which a derive would not give.)
pub struct Live<T>(HashMap<u64, Arc<T>>);

impl<T> Default for Live<T> {
    fn default() -> Self {
        Live(HashMap::new())
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);
const NUMBER_BITS: u32 = 40;
const PROCESS_BITS: u32 = 16;

impl<T> Objects<T> {
    /// For a `static`. `kind` is what no user-space address has as its top byte; `words` is what a message calls it.
    pub const fn new(kind: u8, words: &'static str) -> Self {
        Objects { kind, words, live: PerProcess::new() }
    }

    /// Takes an object in and returns its handle.
    pub fn insert<H>(&self, object: impl Into<Arc<T>>) -> *mut H {
        let number = NEXT.fetch_add(1, Ordering::Relaxed) & ((1 << NUMBER_BITS) - 1);
        let handle = self.head() | number;
        let object = object.into();
        self.live.with(|live| live.0.insert(handle, object));
        ptr::without_provenance_mut(handle as usize)
    }

    /// The object, which lives on for as long as the caller holds it.
    pub fn get<H>(&self, handle: *const H) -> Result<Arc<T>> {
        self.live.with(|live| live.0.get(&(handle.addr() as u64)).cloned()).ok_or_else(|| self.unknown(handle.addr() as u64))
    }

    /// Whether some handle names this object.
    pub fn holds(&self, object: &Arc<T>) -> bool {
        self.live.with(|live| live.0.values().any(|other| Arc::ptr_eq(other, object)))
    }

    /// Ends the handle. The object is the caller's to drop: that may take its time.
    pub fn remove<H>(&self, handle: *mut H) -> Result<Arc<T>> {
        self.live.with(|live| live.0.remove(&(handle.addr() as u64))).ok_or_else(|| self.unknown(handle.addr() as u64))
    }

    /// Ends the handles of all objects that `which` picks. The objects are the caller's to drop.
    pub fn remove_all(&self, which: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        self.live.with(|live| live.0.extract_if(|_, object| which(object)).map(|(_, object)| object).collect())
    }

    fn head(&self) -> u64 {
        u64::from(self.kind) << (NUMBER_BITS + PROCESS_BITS) | (fork::epoch() & ((1 << PROCESS_BITS) - 1)) << NUMBER_BITS
    }

    #[cold]
    fn unknown(&self, handle: u64) -> Error {
        let words = self.words;
        let head = handle >> NUMBER_BITS << NUMBER_BITS;
        Error::internal(if handle == 0 {
            format!("the {words} is NULL")
        } else if head == self.head() {
            format!("the {words} {handle:#x} was closed")
        } else if handle >> (NUMBER_BITS + PROCESS_BITS) == u64::from(self.kind) {
            format!("the {words} {handle:#x} was made before a fork and belongs to the parent process")
        } else {
            format!("{handle:#x} is not a {words}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fork::tests::in_child;

    static OBJECTS: Objects<String> = Objects::new(0xbf, "thing");

    fn says<R>(result: Result<R>) -> String {
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn only_live_handles_of_this_kind_and_process_are_taken() {
        let (a, b) = (OBJECTS.insert::<u8>("a".to_owned()), OBJECTS.insert::<u8>("b".to_owned()));
        assert_eq!((&**OBJECTS.get(a).unwrap(), &**OBJECTS.get(b).unwrap()), ("a", "b"));
        assert!(in_child(|| says(OBJECTS.get(a)).contains("before a fork")));
        let held = OBJECTS.get(a).unwrap();
        assert!(OBJECTS.holds(&held));
        assert_eq!(*OBJECTS.remove(a).unwrap(), "a");
        assert!(!OBJECTS.holds(&held));
        assert!(says(OBJECTS.get(a)).ends_with("was closed"));
        assert!(says(OBJECTS.remove(a)).ends_with("was closed"), "closed twice");
        assert_eq!(*held, "a", "a call that is under way keeps it");
        assert_ne!(OBJECTS.insert::<u8>("c".to_owned()), a, "no number is used twice");
        assert_eq!(says(OBJECTS.get::<u8>(ptr::null())), "the thing is NULL");
        assert_eq!(says(OBJECTS.get((&raw const held).cast::<u8>())), format!("{:#x} is not a thing", (&raw const held).addr()));
        assert_eq!(OBJECTS.remove_all(|name| name == "b").len(), 1);
        assert!(says(OBJECTS.get(b)).ends_with("was closed"));
        static OTHERS: Objects<String> = Objects::new(0xbe, "other");
        assert!(says(OTHERS.get(b)).ends_with("is not a other"));
    }
}
