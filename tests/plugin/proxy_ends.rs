//! How a proxy ends, through its C functions: stop, abort and destroy in every state, by whom and how often; and calls that meet a destroy. Each scenario
//! runs in a process of its own.

use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use crate::support;
use railhead::abi::connector::{railhead_listener_close, railhead_listener_t};
use railhead::abi::proxy::railhead_proxy_config_t;
use support::plugin::Plugin;
use support::proxy::*;
use support::{Ctx, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("ends", ends), ("late_abort", late_abort), ("own_thread", own_thread), ("race", race), ("met", met)];

fn alone(role: &'static str) -> World {
    World::new(role, 1).env("RAILHEAD_SOCKET_IFNAME", "=lo")
}

/// What a proxy is at when it is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It has no operations, and sleeps.
    Empty,
    /// They were appended and not started.
    Held,
    /// They were started within a group that is open.
    OpenGroup,
    /// One is behind another of its connector, where it was not stepped (Ready); the other waits for its producer (Progress), and the engine polls.
    Waiting,
    /// The same, and the engine sleeps between its polls.
    SleepingIdle,
    /// The consumer takes nothing, so that both rings are full.
    Full,
    /// Messages flow.
    Streaming,
    /// All is done, and the engine sleeps again.
    Done,
    /// An operation has failed.
    Failed,
    /// It was stopped.
    Stopped,
    /// It was aborted.
    Aborted,
}

use State::*;

const STATES: [State; 11] = [Empty, Held, OpenGroup, Waiting, SleepingIdle, Full, Streaming, Done, Failed, Stopped, Aborted];

/// How it is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Stop,
    Abort,
    /// Without a stop.
    Destroy,
}

/// A proxy in a state, and the programs at its rings.
struct TestPair {
    proxy: Proxy,
    send: Connector,
    recv: Connector,
    filler: Filler,
    emptier: Emptier,
    /// Messages that the programs have yet to fill and to empty for all that was started to be done.
    left: (u64, u64),
    /// Operations of both connectors that a stop has to see done.
    started: u64,
}

/// Steps of each operation; there are two on each connector.
const STEPS: u64 = 12;

fn test_pair(state: State) -> TestPair {
    let idle_sleep_us = if state == SleepingIdle { 20_000 } else { 0 };
    let size = size_of::<railhead_proxy_config_t>();
    let config = railhead_proxy_config_t {
        size,
        context: std::ptr::null_mut(),
        logger: None,
        cpus: std::ptr::null(),
        max_operations: 0,
        idle_sleep_us,
        reserved: 0,
    };
    let proxy = Proxy::over(std::ptr::null(), &raw const config).expect("a proxy");
    let (send, recv) = pair(proxy, proxy, &slots(1024));
    let (mut filler, mut emptier) = (send.producer(), recv.consumer());
    if state == OpenGroup {
        proxy.group_start().expect("group");
    }
    let mut started = 0;
    if state != Empty {
        for connector in [send, recv, send, recv] {
            connector.append(&operation(STEPS, 1, 1, SIMPLE)).expect("append");
            started += 1;
        }
    }
    if matches!(state, Held | OpenGroup) {
        started = 0;
    }
    if state == Failed {
        // SAFETY: the control words, all atomics.
        let words = unsafe { &*send.place().control.cast::<railhead::proxy::ring::Control>() };
        words.recv_mem.sizes_fifo[0].store(1025, Ordering::Relaxed);
        words.recv_mem.tail.store(1, Ordering::Release);
    }
    if state != Held && state != Empty {
        proxy.start().expect("start");
    }
    let mut left = (2 * STEPS, 2 * STEPS);
    match state {
        Empty | Held | OpenGroup => until("it sleeps", || (proxy.state().asleep == 1).then_some(())),
        Waiting => until("a few laps", || (proxy.state().idle_laps > 3).then_some(())),
        SleepingIdle => until("it sleeps", || (proxy.state().asleep == 1 && proxy.state().idle_laps > 0).then_some(())),
        Full => {
            until("both rings to be full", || {
                while filler.put(1, &[7; 100]) {
                    left.0 -= 1;
                }
                (recv.state().messages == 8 && left.0 == 2 * STEPS - 16).then_some(())
            });
        }
        Streaming => {}
        Done => {
            finish(&mut filler, &mut emptier, &mut left);
            until("it sleeps", || (proxy.state().asleep == 1 && proxy.state().done == 4).then_some(()));
        }
        Failed => until("the failure", || (proxy.state().failed == 1 && proxy.state().ended == 1).then_some(())),
        Stopped => {
            let stopping = thread::spawn(move || proxy.stop());
            finish(&mut filler, &mut emptier, &mut left);
            stopping.join().unwrap().expect("stop");
        }
        Aborted => proxy.abort().expect("abort"),
    }
    TestPair { proxy, send, recv, filler, emptier, left, started }
}

/// Fills and empties what is left, for as long as the proxy takes part.
fn finish(filler: &mut Filler, emptier: &mut Emptier, left: &mut (u64, u64)) {
    until("all messages", || {
        if left.0 > 0 && filler.put(1, &[7; 100]) {
            left.0 -= 1;
        }
        if left.1 > 0
            && let Some(data) = emptier.take(1)
        {
            assert_eq!(data, [7; 100]);
            left.1 -= 1;
        }
        (*left == (0, 0)).then_some(())
    });
}

/// What it is like after the end, however that came.
fn assert_ended(state: State, pair: &TestPair, refusal: Status) {
    let TestPair { proxy, send, recv, .. } = pair;
    let now = proxy.state();
    assert_eq!((now.ended, now.asleep, now.failed), (1, 0, u32::from(state == Failed)), "{state:?}");
    assert_eq!(send.append(&operation(1, 1, 1, SIMPLE)), Err(refusal), "{state:?}");
    assert_eq!(proxy.start(), Err(refusal), "{state:?}");
    assert!(proxy.dump().starts_with(if state == Failed { "railhead-proxy: failed" } else { "railhead-proxy: ended" }), "{state:?}");
    assert_eq!(proxy.error().0, if state == Failed { refusal } else { RAILHEAD_OK });
    // Ending what has ended changes nothing.
    let stopped = if state == Failed { Err(refusal) } else { Ok(()) };
    for _ in 0..2 {
        assert_eq!((proxy.stop(), proxy.abort()), (stopped, Ok(())), "{state:?}");
    }
    assert_eq!((proxy.state().done, proxy.state().steps), (now.done, now.steps), "it moved after its end: {state:?}");
    // Even what is not done can be closed.
    recv.close().expect("close");
    send.close().expect("close");
    proxy.destroy().expect("destroy");
    assert_eq!((proxy.destroy(), proxy.stop(), proxy.abort()), (Err(RAILHEAD_INTERNAL), Err(RAILHEAD_INTERNAL), Err(RAILHEAD_INTERNAL)));
}

fn ends(_: &Ctx) {
    for state in STATES {
        for ending in [Ending::Stop, Ending::Abort, Ending::Destroy] {
            let mut pair = test_pair(state);
            let proxy = pair.proxy;
            let refusal = RAILHEAD_USAGE;
            let goes_on = matches!(state, Waiting | SleepingIdle | Full | Streaming);
            match ending {
                Ending::Stop => {
                    // Two wait, on threads of their own.
                    let stopping = [(); 2].map(|()| thread::spawn(move || proxy.stop()));
                    if goes_on {
                        until("it takes nothing more in", || (pair.send.append(&operation(1, 1, 1, SIMPLE)) == Err(refusal)).then_some(()));
                        assert_eq!(proxy.state().ended, 0, "{state:?}");
                        finish(&mut pair.filler, &mut pair.emptier, &mut pair.left);
                    }
                    let stopped = if state == Failed { Err(refusal) } else { Ok(()) };
                    assert_eq!(stopping.map(|thread| thread.join().unwrap()), [stopped; 2], "{state:?}");
                    let done = if matches!(state, Failed | Aborted) { 0 } else { pair.started };
                    assert_eq!(proxy.state().done, done, "{state:?}");
                    assert_ended(state, &pair, refusal);
                }
                Ending::Abort => {
                    let waiting = pair.left;
                    let TestPair { recv, filler, emptier, left, .. } = &mut pair;
                    thread::scope(|scope| {
                        let streaming = scope.spawn(|| {
                            // What flows is cut off wherever it is.
                            while state == Streaming && proxy.state().ended == 0 {
                                if filler.put(1, &[7; 100]) {
                                    left.0 -= 1;
                                }
                                if emptier.take(1).is_some() {
                                    left.1 -= 1;
                                }
                                if *left == (0, 0) {
                                    break;
                                }
                            }
                        });
                        if state == Streaming {
                            until("some messages", || (recv.state().messages > 3).then_some(()));
                        }
                        let aborted = [(); 2].map(|()| thread::spawn(move || proxy.abort()));
                        assert_eq!(aborted.map(|thread| thread.join().unwrap()), [Ok(()); 2], "{state:?}");
                        streaming.join().unwrap();
                    });
                    if matches!(state, Waiting | SleepingIdle | Full | Held | OpenGroup) {
                        assert_eq!((proxy.state().done, pair.left), (0, waiting), "{state:?}");
                    }
                    if state == Full {
                        // The rings keep what is in them.
                        for _ in 0..8 {
                            assert_eq!(pair.emptier.take(1).as_deref(), Some(&[7; 100][..]));
                        }
                        assert!(pair.emptier.take(1).is_none() && !pair.filler.put(1, &[]));
                    }
                    assert_ended(state, &pair, refusal);
                }
                Ending::Destroy => {
                    assert_eq!(thread::spawn(move || proxy.destroy()).join().unwrap(), Ok(()), "{state:?}");
                    for connector in [pair.send, pair.recv] {
                        assert_eq!(connector.close(), Err(RAILHEAD_INTERNAL), "{state:?}");
                    }
                    assert_eq!((proxy.destroy(), proxy.start()), (Err(RAILHEAD_INTERNAL), Err(RAILHEAD_INTERNAL)), "{state:?}");
                }
            }
        }
    }
}

#[test]
fn stop_abort_and_destroy_in_every_state() {
    for wire in ["shm", "tcp"] {
        alone("ends").env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

/// A stop that would wait for ever.
fn late_abort(_: &Ctx) {
    for state in [Waiting, SleepingIdle, Full] {
        for destroys in [false, true] {
            let pair = test_pair(state);
            let proxy = pair.proxy;
            let stopping = thread::spawn(move || proxy.stop());
            until("it takes nothing more in", || (proxy.start() == Err(RAILHEAD_USAGE)).then_some(()));
            let ended = if destroys { proxy.destroy() } else { proxy.abort() };
            assert_eq!((ended, stopping.join().unwrap()), (Ok(()), Ok(())), "{state:?}");
            match destroys {
                true => assert_eq!(proxy.abort(), Err(RAILHEAD_INTERNAL)),
                false => assert_ended(state, &pair, RAILHEAD_USAGE),
            }
        }
    }
}

#[test]
fn a_stop_that_waits_for_ever_returns_once_another_thread_aborts_or_destroys() {
    alone("late_abort").spawn().finish();
}

type Connect = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> c_int;
type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> c_int;

/// Railhead's own table with some functions in front of its own. Words of the table: its name, then its functions.
struct Front {
    words: [usize; 22],
}

static CONNECT: AtomicUsize = AtomicUsize::new(0);
static TEST: AtomicUsize = AtomicUsize::new(0);
/// The places of two functions (nccl v2.30.7 src/include/plugin/net/net_v12.h).
const CONNECT_AT: usize = 5;
const TEST_AT: usize = 13;

impl Front {
    /// The plugin of this program itself.
    fn new() -> Front {
        let plugin = Plugin::load(12);
        // SAFETY: a v12 table is so many words long.
        let words = unsafe { plugin.table().cast::<[usize; 22]>().read() };
        CONNECT.store(words[CONNECT_AT], Ordering::Relaxed);
        TEST.store(words[TEST_AT], Ordering::Relaxed);
        Front { words }
    }

    fn proxy(&self) -> Proxy {
        Proxy::over(self.words.as_ptr().cast(), std::ptr::null()).expect("a proxy")
    }
}

/// The proxy whose thread calls `test_from_inside`, and what its calls came to.
static OWN: Mutex<Option<Proxy>> = Mutex::new(None);
static INSIDE: Mutex<Vec<Result<()>>> = Mutex::new(Vec::new());

unsafe extern "C" fn test_from_inside(request: *mut c_void, done: *mut c_int, size: *mut c_int) -> c_int {
    if let Some(proxy) = OWN.lock().unwrap().take() {
        let mut results = vec![proxy.destroy()];
        // What does not wait works.
        assert_eq!(proxy.state().ended, 0);
        results.extend([proxy.start(), proxy.stop(), proxy.abort()]);
        *INSIDE.lock().unwrap() = results;
    }
    // SAFETY: the plugin's own function, with the arguments meant for it.
    unsafe { std::mem::transmute::<usize, Test>(TEST.load(Ordering::Relaxed))(request, done, size) }
}

/// A plugin's function ends the proxy that calls it.
fn own_thread(_: &Ctx) {
    let mut front = Front::new();
    front.words[TEST_AT] = test_from_inside as *const () as usize;
    let proxy = front.proxy();
    let (send, recv) = pair(proxy, proxy, &slots(1024));
    for connector in [send, recv] {
        connector.append(&operation(STEPS, 1, 1, SIMPLE)).expect("append");
    }
    *OWN.lock().unwrap() = Some(proxy);
    proxy.start().expect("start");
    assert!(send.producer().put(1, &[1; 10]));
    until("the end", || (proxy.state().ended == 1).then_some(()));
    let refused = Err(RAILHEAD_INTERNAL);
    assert_eq!(*INSIDE.lock().unwrap(), [refused, Ok(()), refused, refused]);
    assert_eq!((proxy.state().done, proxy.error().0), (0, RAILHEAD_OK));
    proxy.destroy().expect("destroy");
}

#[test]
fn a_proxy_ended_by_what_it_calls_is_told_and_does_not_wait_for_itself() {
    alone("own_thread").spawn().finish();
}

/// A listener's handle.
struct Listener(*mut railhead_listener_t);

// SAFETY: any thread may use it.
unsafe impl Sync for Listener {}

impl Listener {
    fn get(&self) -> *mut railhead_listener_t {
        self.0
    }
}

/// Two threads connect and accept on a proxy that a third destroys at some moment.
fn race(_: &Ctx) {
    let counts = [(); 3].map(|()| AtomicU64::new(0));
    for round in 0..300u32 {
        let proxy = Proxy::new();
        let (listener, handle) = proxy.listen();
        let listener = Listener(listener);
        let made = Mutex::new(Vec::new());
        let turns = AtomicU64::new(0);
        // After so many calls of the others.
        let moment = u64::from(round % 60);
        thread::scope(|scope| {
            let ends = [
                scope.spawn(|| {
                    let mut fresh = handle;
                    loop {
                        turns.fetch_add(1, Ordering::Relaxed);
                        match proxy.connect(&mut fresh, &slots(1024)) {
                            Ok(Some(connector)) => {
                                made.lock().unwrap().push(connector);
                                fresh = handle;
                            }
                            Ok(None) => {}
                            Err(status) => break status,
                        }
                    }
                }),
                scope.spawn(|| {
                    loop {
                        turns.fetch_add(1, Ordering::Relaxed);
                        match accept(listener.get(), &slots(1024)) {
                            Ok(Some(connector)) => made.lock().unwrap().push(connector),
                            Ok(None) => {}
                            Err(status) => break status,
                        }
                    }
                }),
            ];
            until("the moment", || (turns.load(Ordering::Relaxed) >= moment).then_some(()));
            let destroyed = proxy.destroy();
            // A comm whose other end went first may tell of that.
            counts[usize::from(destroyed.is_ok())].fetch_add(1, Ordering::Relaxed);
            for end in ends {
                let status = end.join().unwrap();
                // Whoever destroys a listener refuses who is on the way to it.
                assert!(matches!(status, RAILHEAD_INTERNAL | RAILHEAD_NETWORK), "{status:?}");
            }
        });
        let made = made.into_inner().unwrap();
        counts[2].fetch_add(made.len() as u64, Ordering::Relaxed);
        for connector in made {
            assert_eq!(connector.close(), Err(RAILHEAD_INTERNAL), "a connector outlived its proxy");
        }
        assert_eq!(railhead_listener_close(listener.get()), RAILHEAD_INTERNAL);
    }
    assert!(counts[2].load(Ordering::Relaxed) > 0, "nothing was connected: {counts:?}");
}

#[test]
fn connecting_races_with_destroying() {
    alone("race").spawn().finish();
}

/// The proxy that is destroyed as soon as somebody has connected on it.
static MEETS: Mutex<Option<Proxy>> = Mutex::new(None);

unsafe extern "C" fn connect_and_be_destroyed(
    context: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    device: *mut *mut c_void,
) -> c_int {
    // SAFETY: the plugin's own function, with the arguments meant for it, and its result.
    let (status, made) = unsafe {
        let status = std::mem::transmute::<usize, Connect>(CONNECT.load(Ordering::Relaxed))(context, dev, handle, comm, device);
        (status, !(*comm).is_null())
    };
    if status == 0
        && made
        && let Some(proxy) = MEETS.lock().unwrap().take()
    {
        // The proxy's caller is in this function; another thread does not wait for it.
        thread::spawn(move || proxy.destroy()).join().unwrap().expect("destroy");
    }
    status
}

/// A destroy between the moment that a comm is there and the moment that it has a connector.
fn met(_: &Ctx) {
    let mut front = Front::new();
    front.words[CONNECT_AT] = connect_and_be_destroyed as *const () as usize;
    let other = Proxy::new();
    let before = support::holdings::Holdings::now();
    for _ in 0..3 {
        let proxy = front.proxy();
        let (listener, mut handle) = other.listen();
        *MEETS.lock().unwrap() = Some(proxy);
        let (mut refused, mut recv) = (None, None);
        let (refused, recv) = until("both ends", || {
            refused = refused.or_else(|| proxy.connect(&mut handle, &slots(1024)).map_or_else(Some, |made| made.map(|_| RAILHEAD_OK)));
            // Its peer may have closed before it was there.
            recv = recv.or_else(|| accept(listener, &slots(1024)).map_or_else(|status| Some(Err(status)), |made| made.map(Ok)));
            refused.zip(recv)
        });
        assert_eq!(refused, RAILHEAD_INTERNAL);
        assert_eq!(proxy.start(), Err(RAILHEAD_INTERNAL));
        assert_eq!(railhead_listener_close(listener), RAILHEAD_OK);
        match recv {
            Ok(connector) => connector.close().expect("close"),
            Err(status) => assert_eq!(status, RAILHEAD_NETWORK),
        }
    }
    // A thread that has been waited for is listed for a moment more.
    let now = support::holdings::Holdings::now;
    support::until("as many threads and files as before", || {
        let after = now();
        (before.tasks == after.tasks && before.shm == after.shm).then_some(())
    });
    other.destroy().expect("destroy");
}

#[test]
fn what_is_connected_on_a_proxy_that_was_destroyed_meanwhile_is_closed() {
    alone("met").spawn().finish();
}
