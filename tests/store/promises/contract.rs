//! The contract that every store keeps towards threads, each with a handle of its own.

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use railhead::store::{Change, Error, FOREVER, KeyWatch, Store};

/// Long enough for anything that must happen, on a machine that is busy.
pub const LONG: Duration = Duration::from_secs(120);
/// How long a test waits for what must not happen.
const SHORT: Duration = Duration::from_millis(30);
const THREADS: usize = 6;

/// A store to try.
pub struct Bed {
    /// Another handle on the same store.
    pub handle: Box<dyn Fn() -> Arc<dyn Store> + Send + Sync>,
    /// Keys that are there from the start and count.
    pub own_keys: i64,
    /// Whether it has queues.
    pub queues: bool,
    /// Whether an empty value is a number, 0: torch's servers say no.
    pub empty_is_zero: bool,
    /// Whether `delete_key` says true of a key that does not exist, as torch's in a file does.
    pub deletes_all: bool,
}

impl Bed {
    pub fn new(handle: impl Fn() -> Arc<dyn Store> + Send + Sync + 'static) -> Self {
        Bed { handle: Box::new(handle), own_keys: 0, queues: true, empty_is_zero: true, deletes_all: false }
    }

    pub fn handle(&self) -> Arc<dyn Store> {
        (self.handle)()
    }
}

/// Makes a change, and does not return before others see it: a write to a server is not answered, but the next operation on the same
/// connection comes after it.
pub fn settled<R>(store: &dyn Store, change: impl FnOnce(&dyn Store) -> R) -> R {
    let result = change(store);
    store.num_keys().expect("num_keys");
    result
}

/// Every change that creates a key lets its waiter go on, whoever came first.
pub fn waiters_go_on(bed: &Bed) {
    type Change = fn(&dyn Store);
    let mut changes: Vec<(&str, Change)> = vec![
        ("set", |s| s.set("set", b"v").unwrap()),
        ("add", |s| assert_eq!(s.add("add", 3).unwrap(), 3)),
        ("append", |s| s.append("append", b"v").unwrap()),
        ("multi_set", |s| s.multi_set(&[("other", b""), ("multi_set", b"v")]).unwrap()),
        ("compare_set", |s| assert_eq!(s.compare_set("compare_set", b"", b"v").unwrap(), b"v")),
    ];
    if bed.queues {
        changes.push(("queue", |s| s.queue_push("queue", b"v").unwrap()));
    }
    for (key, change) in changes {
        let (waiter, changer) = (bed.handle(), bed.handle());
        let start = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                waiter.wait(&[key], LONG).expect(key);
            });
            start.wait();
            change(&*changer);
        });
    }
}

/// A wait ends when the last key is there, not before, and an unlimited one ends at all.
pub fn all_keys_are_waited_for(bed: &Bed) {
    let (waiter, changer) = (bed.handle(), bed.handle());
    thread::scope(|scope| {
        scope.spawn(|| {
            waiter.wait(&["a", "b", "c"], FOREVER).unwrap();
            assert_eq!(waiter.multi_get(&["c", "a", "b"], Duration::ZERO).unwrap(), [b"3", b"1", b"2"]);
        });
        for (key, value) in [("b", b"2"), ("a", b"1")] {
            settled(&*changer, |s| s.set(key, value).unwrap());
            assert!(!changer.check(&["a", "b", "c"]).unwrap());
            let early = changer.wait(&["a", "b", "c"], SHORT);
            assert!(matches!(early, Err(Error::Timeout(_))), "{early:?}");
        }
        changer.set("c", b"3").unwrap();
    });
    waiter.wait(&[], Duration::ZERO).unwrap();
}

/// Waits that run out say so, neither early nor never, and leave the store usable.
pub fn waits_run_out(bed: &Bed) {
    let store = bed.handle();
    store.set("there", b"v").unwrap();
    type Wait<'a> = Box<dyn Fn() -> Result<(), Error> + 'a>;
    for timeout in [Duration::ZERO, SHORT] {
        let mut waits: Vec<(&str, Wait<'_>)> = vec![
            ("wait", Box::new(|| store.wait(&["there", "missing"], timeout))),
            ("get", Box::new(|| store.get("missing", timeout).map(|_| ()))),
            ("multi_get", Box::new(|| store.multi_get(&["there", "missing"], timeout).map(|_| ()))),
            ("barrier", Box::new(|| store.barrier("alone", 1_000, timeout))),
        ];
        if bed.queues && !timeout.is_zero() {
            waits.push(("queue_pop", Box::new(|| store.queue_pop("missing", timeout).map(|_| ()))));
        }
        for (name, wait) in waits {
            let before = Instant::now();
            let error = wait().expect_err(name);
            assert!(matches!(error, Error::Timeout(_)), "{name}: {error:?}");
            assert!(before.elapsed() >= timeout, "{name}: {:?}", before.elapsed());
        }
    }
    assert_eq!(store.get("there", Duration::ZERO).unwrap(), b"v");
    store.set("missing", b"late").unwrap();
    assert_eq!(store.get("missing", LONG).unwrap(), b"late");
    if bed.queues {
        assert!(matches!(store.queue_pop("missing", Duration::ZERO), Err(Error::QueueEmpty)));
    }
}

/// No addition is lost, and no sum is returned twice.
pub fn additions_are_atomic(bed: &Bed) {
    const ROUNDS: usize = 100;
    let sums: Vec<i64> = on_threads(bed, |_, store| (0..ROUNDS).map(|_| store.add("n", 1).unwrap()).collect::<Vec<_>>()).concat();
    assert_eq!(sums.iter().copied().collect::<BTreeSet<_>>(), (1..=(THREADS * ROUNDS) as i64).collect());
    assert_eq!(bed.handle().get("n", LONG).unwrap(), (THREADS * ROUNDS).to_string().as_bytes());
}

/// Of all who want to be first, one is, and all agree who.
pub fn one_is_first(bed: &Bed) {
    for round in 0..10 {
        let key = format!("first{round}");
        let seen = on_threads(bed, |i, store| (i, store.compare_set(&key, b"", i.to_string().as_bytes()).unwrap()));
        assert!(seen.iter().all(|(_, first)| *first == seen[0].1), "{seen:?}");
        assert_eq!(seen.iter().filter(|(i, first)| i.to_string().as_bytes() == first).count(), 1, "{seen:?}");
    }
}

/// Nobody leaves a barrier before all have come.
pub fn barriers_hold(bed: &Bed) {
    on_threads(bed, |_, store| {
        for round in 0..10 {
            settled(&*store, |s| s.add("came", 1).unwrap());
            store.barrier(&format!("bar{round}"), THREADS as i64, LONG).unwrap();
            let came: i64 = String::from_utf8(store.get("came", LONG).unwrap()).unwrap().parse().unwrap();
            assert!(came >= (THREADS * (round + 1)) as i64, "left the barrier of round {round} after {came} had come");
        }
    });
    for nobody in [0, -1] {
        bed.handle().barrier("nobody", nobody, Duration::ZERO).expect("nobody is waited for");
    }
}

/// Each change of a watched key is told of once and in order, and nothing else is.
pub fn watches_see_each_change(bed: &Bed) {
    let (store, other) = (bed.handle(), bed.handle());
    let (send, seen) = mpsc::channel();
    let watch = store.watch_key("w", Box::new(move |change| send.send(shown(&change)).unwrap())).unwrap();
    type Step<'a> = (&'a str, Box<dyn Fn() + 'a>, &'a [&'a str]);
    let steps: Vec<Step<'_>> = vec![
        ("set", Box::new(|| other.set("w", b"1").unwrap()), &["created 1"]),
        ("set again", Box::new(|| store.set("w", b"1").unwrap()), &["updated 1 1"]),
        ("add", Box::new(|| assert_eq!(other.add("w", 4).unwrap(), 5)), &["updated 1 5"]),
        ("append", Box::new(|| other.append("w", b"x").unwrap()), &["updated 5 5x"]),
        ("compare_set", Box::new(|| drop(other.compare_set("w", b"5x", b"y").unwrap())), &["updated 5x y"]),
        ("compare_set in vain", Box::new(|| drop(other.compare_set("w", b"no", b"z").unwrap())), &[]),
        ("multi_set", Box::new(|| other.multi_set(&[("v", b"a"), ("w", b"b"), ("w", b"c")]).unwrap()), &["updated y b", "updated b c"]),
        ("another key", Box::new(|| other.set("ww", b"").unwrap()), &[]),
        ("a queue", Box::new(|| assert_eq!(other.queue_push("w", b"").is_ok(), bed.queues)), &[]),
        ("a look", Box::new(|| drop(other.get("w", LONG).unwrap())), &[]),
        ("delete", Box::new(|| assert!(other.delete_key("w").unwrap())), &["deleted c"]),
        ("delete in vain", Box::new(|| assert_eq!(other.delete_key("w").unwrap(), bed.deletes_all)), &[]),
        ("append to nothing", Box::new(|| other.append("w", b"new").unwrap()), &["created new"]),
    ];
    for (what, step, expected) in steps {
        settled(&*other, |_| step());
        settled(&*store, |_| ());
        for change in expected {
            assert_eq!(seen.recv_timeout(LONG).expect(what), *change, "{what}");
        }
    }
    other.set("w", b"last").unwrap();
    assert_eq!(seen.recv_timeout(LONG).unwrap(), "updated new last", "and none for what changed nothing");
    drop(watch);
    settled(&*other, |s| s.set("w", b"unseen").unwrap());
    assert!(seen.recv().is_err(), "a dropped watch calls nobody");
}

/// A callback may use the store it watches, and end its own watch.
pub fn callbacks_may_use_the_store(bed: &Bed) {
    let store = bed.handle();
    let held: Arc<Mutex<Option<KeyWatch>>> = Arc::default();
    let (inside, own) = (bed.handle(), Arc::clone(&held));
    let callback = Box::new(move |change: Change<'_>| {
        inside.set("seen", shown(&change).as_bytes()).unwrap();
        drop(own.lock().unwrap().take());
    });
    // Within the callback's lock, so that it finds its watch.
    let mut place = held.lock().unwrap();
    *place = Some(store.watch_key("w", callback).unwrap());
    store.set("w", b"1").unwrap();
    drop(place);
    assert_eq!(store.get("seen", LONG).unwrap(), b"created 1");
    settled(&*store, |s| s.set("w", b"2").unwrap());
    until_none(&held);
    assert_eq!(store.get("seen", LONG).unwrap(), b"created 1");
}

fn until_none(held: &Mutex<Option<KeyWatch>>) {
    let end = Instant::now() + LONG;
    while held.lock().unwrap().is_some() {
        assert!(Instant::now() < end);
        thread::yield_now();
    }
}

fn shown(change: &Change<'_>) -> String {
    let text = String::from_utf8_lossy;
    match change {
        Change::Created(new) => format!("created {}", text(new)),
        Change::Updated(old, new) => format!("updated {} {}", text(old), text(new)),
        Change::Deleted(old) => format!("deleted {}", text(old)),
        Change::Lost(error) => format!("lost: {error}"),
    }
}

/// Everything that is pushed is popped once, by waiters and by those who come later.
pub fn queues_lose_nothing(bed: &Bed) {
    const EACH: usize = 60;
    let store = bed.handle();
    if !bed.queues {
        for result in [store.queue_push("q", b"").map(|()| 0), store.queue_pop("q", LONG).map(|_| 0), store.queue_len("q")] {
            assert!(matches!(result, Err(Error::Unsupported(_))), "{result:?}");
        }
        return;
    }
    let popped = on_threads(bed, |i, store| {
        if i % 2 == 0 {
            (0..EACH).for_each(|n| store.queue_push("q", format!("{i} {n}").as_bytes()).unwrap());
            Vec::new()
        } else {
            (0..EACH).map(|_| String::from_utf8(store.queue_pop("q", LONG).unwrap()).unwrap()).collect()
        }
    });
    let expected: BTreeSet<String> = (0..THREADS).step_by(2).flat_map(|i| (0..EACH).map(move |n| format!("{i} {n}"))).collect();
    assert_eq!(popped.concat().len(), expected.len());
    assert_eq!(popped.concat().into_iter().collect::<BTreeSet<_>>(), expected);
    assert_eq!(store.queue_len("q").unwrap(), 0);
}

/// One handle serves several threads.
pub fn a_handle_is_shared(bed: &Bed) {
    let store = bed.handle();
    thread::scope(|scope| {
        for i in 0..THREADS {
            let store = &store;
            scope.spawn(move || {
                for n in 0..50 {
                    let (key, value) = (format!("{i}/{n}"), format!("{}", i * n));
                    store.set(&key, value.as_bytes()).unwrap();
                    assert_eq!(store.get(&key, LONG).unwrap(), value.as_bytes());
                }
            });
        }
    });
}

fn on_threads<R: Send>(bed: &Bed, run: impl Fn(usize, Arc<dyn Store>) -> R + Sync) -> Vec<R> {
    let start = Barrier::new(THREADS);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|i| {
                let (run, start, store) = (&run, &start, bed.handle());
                scope.spawn(move || {
                    start.wait();
                    run(i, store)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("thread")).collect()
    })
}

/// `contract!(name, || Bed)`: everything above, and the model, on one kind of store.
macro_rules! contract {
    ($name:ident, $make:expr) => {
        mod $name {
            use super::*;

            fn bed() -> Bed {
                let make = $make;
                make()
            }

            #[test]
            fn answers_as_the_oracle_does() {
                model::check(bed);
            }

            contract!(@ waiters_go_on all_keys_are_waited_for waits_run_out additions_are_atomic one_is_first barriers_hold
                queues_lose_nothing a_handle_is_shared watches_see_each_change callbacks_may_use_the_store);
        }
    };
    (@ $($test:ident)*) => {
        $(
            #[test]
            fn $test() {
                contract::$test(&bed());
            }
        )*
    };
}
pub(crate) use contract;
