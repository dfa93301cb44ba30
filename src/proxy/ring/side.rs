//! The two sides of a ring for a Rust program; `include/railhead_ring.h` has the same for C and CUDA. Each is used by one thread.
//!
//! A producer checks for room, writes the slot, posts it; a consumer checks what is filled, reads the slot, releases it. Neither waits, and neither
//! accesses the data: the program does that, at the slot's address.

use super::layout::{EMPTY, STEPS, round_up, slot};
use super::rules::{self, Position};
use super::words::Words;
use crate::base::error::{Error, Result};

/// The side that fills slots.
pub struct Producer<W> {
    words: W,
    // The next step to be filled; everything before it is published.
    step: u64,
    fresh: bool,
    // The last value of `head` that was read: there is at least as much room as it says.
    head: u64,
}

impl<W: Words> Producer<W> {
    /// The producer of a ring; it continues where the producer before it ended.
    pub fn new(words: W) -> Producer<W> {
        let (step, head) = (words.tail(), words.head());
        Producer { words, step, fresh: true, head }
    }

    /// The step that is filled next.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Goes to where an operation starts: the next multiple of `chunk` steps (1, 2, 4 or 8).
    pub fn start(&mut self, chunk: u64) -> Result<()> {
        rules::check_slice(chunk)?;
        self.step = round_up(self.step, chunk);
        self.fresh = true;
        Ok(())
    }

    /// Whether the next `slice` steps (1, 2, 4 or 8) are free: then the caller may write their slots, which are contiguous.
    ///
    /// Errors: a step that is no multiple of the slice; an invalid `head` in the ring.
    #[inline]
    pub fn has_room(&mut self, slice: u64) -> Result<bool> {
        check_step(self.step, slice)?;
        let at = Position { published: self.step, claimed: self.step, fresh: self.fresh };
        if rules::room(self.head, at).is_ok_and(|room| room >= slice) {
            return Ok(true);
        }
        self.head = self.words.head();
        Ok(rules::room(self.head, at)? >= slice)
    }

    /// Publishes the next `slice` steps with `bytes` in their slots. Only after [`Producer::has_room`] returned true.
    #[inline]
    pub fn post(&mut self, slice: u64, bytes: usize) {
        debug_assert!(matches!(self.has_room(slice), Ok(true)));
        self.words.set_size(slot(self.step), i64::try_from(bytes).unwrap_or(i64::MAX));
        self.step = self.step.wrapping_add(slice);
        self.fresh = false;
        self.words.set_tail(self.step);
    }
}

/// The side that empties slots.
pub struct Consumer<W> {
    words: W,
    // The next step to be emptied; everything before it is published.
    step: u64,
    fresh: bool,
    // The last value of `tail` that was read: at least as much is filled as it says.
    tail: u64,
}

impl<W: Words> Consumer<W> {
    /// The consumer of a ring; it continues where the consumer before it ended.
    pub fn new(words: W) -> Consumer<W> {
        let (step, tail) = (words.head(), words.tail());
        Consumer { words, step, fresh: true, tail }
    }

    /// The step that is emptied next.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Goes to where an operation starts: the next multiple of `chunk` steps (1, 2, 4 or 8). The skipped steps are free for the producer.
    pub fn start(&mut self, chunk: u64) -> Result<()> {
        rules::check_slice(chunk)?;
        let start = round_up(self.step, chunk);
        if start != self.step {
            self.step = start;
            self.words.set_head(start);
        }
        self.fresh = true;
        Ok(())
    }

    /// The bytes, at most `capacity`, in the slots of the next `slice` steps (1, 2, 4 or 8); `None` until they are filled.
    ///
    /// Errors: a step that is no multiple of the slice; an invalid `tail` or size in the ring.
    #[inline]
    pub fn filled(&mut self, slice: u64, capacity: usize) -> Result<Option<usize>> {
        check_step(self.step, slice)?;
        let at = Position { published: self.step, claimed: self.step, fresh: self.fresh };
        if !rules::filled(self.tail, at).is_ok_and(|filled| filled >= slice) {
            self.tail = self.words.tail();
            if rules::filled(self.tail, at)? < slice {
                return Ok(None);
            }
        }
        rules::size(self.words.size(slot(self.step)), capacity)
    }

    /// Frees the next `slice` steps. Only after [`Consumer::filled`] returned their size.
    #[inline]
    pub fn release(&mut self, slice: u64) {
        debug_assert!(matches!(self.filled(slice, usize::MAX), Ok(Some(_))));
        // Before `head`: once that is published, the producer may set the size.
        self.words.set_size(slot(self.step), EMPTY);
        self.step = self.step.wrapping_add(slice);
        self.fresh = false;
        self.words.set_head(self.step);
    }
}

#[inline]
fn check_step(step: u64, slice: u64) -> Result<()> {
    rules::check_slice(slice)?;
    if step.is_multiple_of(slice) { Ok(()) } else { Err(misplaced(step, slice)) }
}

#[cold]
fn misplaced(step: u64, slice: u64) -> Error {
    Error::usage(format!("a slice of {slice} steps at step {step}, slot {}: its slots, of {STEPS}, would not be contiguous", slot(step)))
}
