//! A model of the ring: every order in which the loads and stores of a producer and a consumer may become visible, with the code that real rings
//! run. Then the same with single orders weakened, which the model must notice: else it proves nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering as Std;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use railhead::proxy::ring::{Consumer, EMPTY, Producer, Word, Words};

/// Which order is weakened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mistake {
    None,
    RelaxedTailStore,
    RelaxedTailLoad,
    RelaxedHeadStore,
    RelaxedHeadLoad,
    /// The consumer publishes head first and empties the size after.
    HeadBeforeEmpty,
}

/// A ring of 8 slots whose words and data loom watches.
struct Model {
    mistake: Mistake,
    head: AtomicU64,
    tail: AtomicU64,
    sizes: Vec<AtomicU64>,
    data: Vec<UnsafeCell<u64>>,
    /// What `HeadBeforeEmpty` put off.
    late: std::sync::Mutex<Option<(usize, u64)>>,
}

impl Model {
    fn new(mistake: Mistake, start: u64) -> Model {
        Model {
            mistake,
            head: AtomicU64::new(start),
            tail: AtomicU64::new(start),
            sizes: (0..8).map(|_| AtomicU64::new(EMPTY as u64)).collect(),
            data: (0..8).map(|_| UnsafeCell::new(0)).collect(),
            late: std::sync::Mutex::new(None),
        }
    }

    fn order(&self, weak: Mistake, order: Std) -> Ordering {
        match order {
            _ if self.mistake == weak => Ordering::Relaxed,
            Std::Acquire => Ordering::Acquire,
            Std::Release => Ordering::Release,
            other => panic!("{other:?} is not an order of the ring's"),
        }
    }
}

impl Words for Model {
    fn load(&self, word: Word, order: Std) -> u64 {
        match word {
            Word::Head => self.head.load(self.order(Mistake::RelaxedHeadLoad, order)),
            Word::Tail => self.tail.load(self.order(Mistake::RelaxedTailLoad, order)),
            Word::Size(slot) => self.sizes[slot].load(self.order(Mistake::None, order)),
        }
    }

    fn store(&self, word: Word, value: u64, order: Std) {
        match word {
            Word::Head => {
                self.head.store(value, self.order(Mistake::RelaxedHeadStore, order));
                if let Some((slot, size)) = self.late.lock().unwrap().take() {
                    self.sizes[slot].store(size, Ordering::Release);
                }
            }
            Word::Tail => self.tail.store(value, self.order(Mistake::RelaxedTailStore, order)),
            Word::Size(slot) if self.mistake == Mistake::HeadBeforeEmpty && value == EMPTY as u64 => {
                *self.late.lock().unwrap() = Some((slot, value));
            }
            Word::Size(slot) => self.sizes[slot].store(value, self.order(Mistake::None, order)),
        }
    }
}

/// How the consumer learns that a slot is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reader {
    /// As the library does: by tail, then the size.
    BySize,
    /// As a kernel may that knows its sizes: by tail alone.
    ByTail,
}

/// Two slices of 8 steps, so that each takes the whole ring and both sides wait for each other.
fn stream(mistake: Mistake, reader: Reader) {
    const STEPS: u64 = 2;
    // The second slice starts past the wrap.
    let model = Arc::new(Model::new(mistake, 0u64.wrapping_sub(8)));
    let producing = {
        let model = model.clone();
        loom::thread::spawn(move || {
            let mut producer = Producer::new(&*model);
            for n in 1..=STEPS {
                while !producer.has_room(8).unwrap() {
                    loom::thread::yield_now();
                }
                // SAFETY: the ring says that the slot is this thread's; loom checks it.
                model.data[0].with_mut(|slot| unsafe { *slot = n });
                producer.post(8, n as usize);
            }
        })
    };
    let mut consumer = Consumer::new(&*model);
    for n in 1..=STEPS {
        match reader {
            Reader::BySize => {
                let mut looks = 0;
                let bytes = loop {
                    match consumer.filled(8, 8).unwrap() {
                        Some(bytes) => break bytes,
                        None => loom::thread::yield_now(),
                    }
                    looks += 1;
                    assert!(looks < 100, "a size was erased");
                };
                assert_eq!(bytes as u64, n);
            }
            Reader::ByTail => {
                while model.tail().wrapping_sub(consumer.step()) < 8 {
                    loom::thread::yield_now();
                }
            }
        }
        // SAFETY: as above.
        assert_eq!(model.data[0].with(|slot| unsafe { *slot }), n);
        consumer.release(8);
    }
    producing.join().unwrap();
}

fn check(mistake: Mistake, reader: Reader) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || stream(mistake, reader));
}

#[test]
fn each_step_arrives_whole_and_once_in_every_order() {
    check(Mistake::None, Reader::BySize);
    check(Mistake::None, Reader::ByTail);
}

#[test]
fn every_weakened_order_is_noticed() {
    for (mistake, reader) in [
        (Mistake::RelaxedTailStore, Reader::ByTail),
        (Mistake::RelaxedTailLoad, Reader::ByTail),
        (Mistake::RelaxedHeadStore, Reader::BySize),
        (Mistake::RelaxedHeadLoad, Reader::BySize),
        (Mistake::HeadBeforeEmpty, Reader::BySize),
    ] {
        let noticed = catch_unwind(AssertUnwindSafe(|| check(mistake, reader))).is_err();
        assert!(noticed, "{mistake:?} went unnoticed");
    }
}
