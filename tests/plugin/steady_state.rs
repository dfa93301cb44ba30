//! What a message costs in steady state: no heap allocation and, up to 8 KiB, a look at the clock in one of 64 calls at most on either wire;
//! and on shared memory up to 8 KiB no system call.
//!
//! Allocations and looks at the clock are counted by the allocator and the clock_gettime of this program, which has the library linked into it,
//! with both ends in one thread. System calls are
//! counted from outside, by tracing both ranks.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support;
use railhead::fabric::UserMemory;
use railhead::net::{MemoryKind, Mode, Net, RecvBuffer};
use support::comms::{self, Mem};
use support::plugin::Plugin;
use support::{Ctx, Role, World, until};

/// The system's allocator, with a count of what the calling thread asks for.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on; the count has no destructor and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's own promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's own promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's own promise.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

thread_local! {
    static CLOCK_READS: Cell<u64> = const { Cell::new(0) };
}

/// The C library's, with a count of the calling thread's.
///
/// # Safety
///
/// As the C library's.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    type Real = unsafe extern "C" fn(libc::clockid_t, *mut libc::timespec) -> libc::c_int;
    static REAL: AtomicUsize = AtomicUsize::new(0);
    let _ = CLOCK_READS.try_with(|n| n.set(n.get() + 1));
    let mut real = REAL.load(Ordering::Relaxed);
    if real == 0 {
        // SAFETY: a terminated name.
        real = unsafe { libc::dlsym(libc::RTLD_NEXT, c"clock_gettime".as_ptr()) } as usize;
        REAL.store(real, Ordering::Relaxed);
    }
    // SAFETY: an Option of a function pointer is one that may be NULL, and the C library's function has this type.
    match unsafe { std::mem::transmute::<usize, Option<Real>>(real) } {
        // SAFETY: the caller's own promise.
        Some(real) => unsafe { real(clock, time) },
        None => -1,
    }
}

fn clock_reads() -> u64 {
    CLOCK_READS.with(Cell::get)
}

pub const ROLES: &[(&str, Role)] = &[("allocates", allocates), ("calls", calls), ("polls", polls)];

#[test]
fn the_clock_is_counted() {
    let before = clock_reads();
    let _ = std::hint::black_box(railhead::base::clock::now());
    assert_eq!(clock_reads(), before + 1);
}

#[test]
fn the_count_counts() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(5u64)));
    assert_eq!(allocations(), before + 1);
}

/// Messages of a length there and nothing back, `n` times, with eight outstanding. Says how many calls that took.
fn allocates(_: &Ctx) {
    let net = Net::open().expect("open");
    let (mut listen, mut handle) = net.listen(0).expect("listen");
    let (mut send, mut recv) = (None, None);
    until("both comms", || {
        if send.is_none() {
            send = net.connect(0, None, &mut handle, Mode::NonBlocking).expect("connect");
        }
        if recv.is_none() {
            recv = listen.accept(Mode::NonBlocking).expect("accept");
        }
        (send.is_some() && recv.is_some()).then_some(())
    });
    let (mut send, mut recv) = (send.expect("sender"), recv.expect("receiver"));
    let mem = Mem::new(4 << 20);
    // SAFETY: the memory outlives its registration.
    let memory = unsafe { UserMemory::new(mem.ptr(0), mem.len()) };
    let mr = net.register(0, memory, MemoryKind::Host).expect("register");
    let (from, to) = (mem.ptr(0) as usize, mem.ptr(2 << 20) as usize);
    let mut run = |len: usize, n: usize| {
        let buf = [RecvBuffer { addr: to, len, tag: 1, mr }];
        let mut calls = 0;
        for _ in 0..n {
            let mut sends = [None; 8];
            let mut recvs = [None; 8];
            let (mut sent, mut got) = (0, 0);
            while sent < 8 || got < 8 {
                for i in 0..8 {
                    if recvs[i].is_none() && i >= got {
                        recvs[i] = recv.irecv(&buf).expect("irecv");
                        calls += 1;
                    }
                    if sends[i].is_none() && i >= sent {
                        sends[i] = send.isend(from, len, 1, mr).expect("isend");
                        calls += 1;
                    }
                }
                if let Some(r) = sends.get(sent).copied().flatten() {
                    sent += usize::from(send.test(r).expect("test").is_some());
                    calls += 1;
                }
                if let Some(r) = recvs.get(got).copied().flatten() {
                    got += usize::from(recv.test(r).expect("test").is_some());
                    calls += 1;
                }
            }
        }
        calls
    };
    for len in [0, 8, 64, 1000, 8192, 65_537, 1 << 20] {
        run(len, 50);
        let before = (allocations(), clock_reads());
        let calls = run(len, 200);
        assert_eq!(allocations() - before.0, 0, "allocations for 1600 messages of {len} bytes");
        let reads = clock_reads() - before.1;
        println!("{len} bytes: {reads} looks at the clock, {calls} calls");
        // Only a call that moves nothing looks, one time in 64. Larger messages try their ways by the clock.
        assert!(len > 8192 || reads <= calls / 64 + FEW, "{reads} looks at the clock in {calls} calls, {len} bytes");
    }
}

/// Looks at the clock that a wait from before may add.
const FEW: u64 = 4;

#[test]
fn no_allocation_per_message_and_rarely_a_look_at_the_clock() {
    for (name, value) in
        [("RAILHEAD_SOFT_WIRE", "shm"), ("RAILHEAD_CMA", "0"), ("RAILHEAD_SOFT_WIRE", "tcp"), ("RAILHEAD_TCP_STREAMS", "2")]
    {
        let wire = if name == "RAILHEAD_TCP_STREAMS" { "tcp" } else { "auto" };
        World::new("allocates", 1).env("RAILHEAD_SOFT_WIRE", wire).env(name, value).spawn().finish();
    }
}

/// A system call that does nothing and that nobody makes: the beginning and the end of what is counted.
fn mark() {
    // SAFETY: an invalid `which`, so it is refused.
    unsafe { libc::syscall(libc::SYS_getpriority, MARK, 0) };
}

const MARK: u64 = 0x5248;
const MESSAGES: usize = 20_000;

/// Sends to itself, one message after the other; between two marks lie MESSAGES of them. Both ends in one thread, so that nobody waits for
/// the scheduler. Says which thread to trace first.
fn calls(ctx: &Ctx) {
    // Tests of Rust run in a thread of their own.
    // SAFETY: asks only.
    let tid = unsafe { libc::gettid() };
    let len = std::env::var("RHT_LEN").expect("RHT_LEN").parse().expect("a length");
    let plugin = Plugin::start(12);
    let (send, recv) = comms::to_itself(&plugin, 0).expect("comms");
    let mem = Mem::new(2 * 8192);
    let mr = plugin.reg_mr(send, mem.ptr(0), mem.len()).expect("regMr");
    let run = |n: usize| {
        for _ in 0..n {
            // No deadline in here, as looking at a clock may be a system call, and no yielding either; the test kills who hangs.
            let buf = support::plugin::Buf { addr: mem.ptr(8192), len, tag: 1, mr };
            let r = plugin.irecv(recv, &[buf]).expect("irecv").expect("room");
            let s = loop {
                if let Some(s) = plugin.isend(send, mem.ptr(0), len, 1, mr).expect("isend") {
                    break s;
                }
                assert_eq!(plugin.test(r).expect("test"), None);
            };
            let (mut sent, mut got) = (false, false);
            while !sent || !got {
                sent = sent || plugin.test(s).expect("test").is_some();
                got = got || plugin.test(r).expect("test").is_some();
            }
        }
    };
    run(1000);
    ctx.say(&tid.to_string());
    // Traced from here on.
    assert_eq!(ctx.parent.text(), "go");
    run(1000);
    mark();
    run(MESSAGES);
    mark();
    ctx.say("counted");
    assert_eq!(ctx.parent.text(), "end");
}

const POLLS: usize = 64_000;

/// Polls for a message that nobody sends, or to send one that nobody wants; between two marks, POLLS times.
fn polls(ctx: &Ctx) {
    // SAFETY: asks only.
    let tid = unsafe { libc::gettid() };
    let plugin = Plugin::start(12);
    let (send, recv) = comms::to_itself(&plugin, 0).expect("comms");
    let mem = Mem::new(4096);
    let mr = plugin.reg_mr(send, mem.ptr(0), mem.len()).expect("regMr");
    let buf = support::plugin::Buf { addr: mem.ptr(0), len: 8, tag: 1, mr };
    let sends = std::env::var("RHT_IN").expect("RHT_IN") == "isend";
    let r = (!sends).then(|| plugin.irecv(recv, &[buf]).expect("irecv").expect("room"));
    let poll = || match r {
        Some(r) => assert_eq!(plugin.test(r).expect("test"), None),
        None => assert_eq!(plugin.isend(send, mem.ptr(0), 8, 1, mr).expect("isend"), None),
    };
    let run = |n: usize| (0..n).for_each(|_| poll());
    // A peer that has just been heard of is asked more often.
    run(200_000);
    ctx.say(&tid.to_string());
    assert_eq!(ctx.parent.text(), "go");
    mark();
    run(POLLS);
    mark();
    ctx.say("counted");
    assert_eq!(ctx.parent.text(), "end");
}

/// Follows a thread until its second mark; system calls between the marks, by number.
fn trace(tid: i32) -> BTreeMap<u64, u64> {
    let ask = |request: libc::c_uint, addr: usize, data: usize| {
        // SAFETY: requests that read or resume the traced thread; `data` is a flag, a signal or a buffer that outlives the call.
        unsafe { libc::ptrace(request, tid, addr, data) }
    };
    let mut counted = BTreeMap::new();
    let mut marks = 0;
    let mut entering = true;
    loop {
        let mut status = 0;
        // SAFETY: waits for the traced thread.
        assert_eq!(unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) }, tid, "{}", std::io::Error::last_os_error());
        assert!(libc::WIFSTOPPED(status), "the traced rank ended: {status:#x}");
        let signal = libc::WSTOPSIG(status);
        if signal == libc::SIGTRAP | 0x80 {
            if entering {
                // SAFETY: all zeros is a valid value.
                let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
                ask(libc::PTRACE_GET_SYSCALL_INFO, size_of_val(&info), &raw mut info as usize);
                assert_eq!(info.op, libc::PTRACE_SYSCALL_INFO_ENTRY, "entry and exit were confused");
                // SAFETY: at an entry this member is the valid one.
                let entry = unsafe { info.u.entry };
                if (entry.nr, entry.args[0]) == (libc::SYS_getpriority as u64, MARK) {
                    marks += 1;
                } else if marks == 1 {
                    *counted.entry(entry.nr).or_insert(0) += 1;
                }
            }
            entering = !entering;
        }
        if marks == 2 && entering {
            ask(libc::PTRACE_DETACH, 0, 0);
            return counted;
        }
        ask(libc::PTRACE_SYSCALL, 0, 0);
    }
}

/// Traces the rank.
fn count_calls(len: usize, wire: &str) -> BTreeMap<u64, u64> {
    traced(World::new("calls", 1).env("RHT_LEN", &len.to_string()).env("RAILHEAD_SOFT_WIRE", wire))
}

fn traced(world: World) -> BTreeMap<u64, u64> {
    let mut ranks = world.spawn();
    let tid: i32 = ranks.hear(0).parse().expect("a thread");
    // SAFETY: attaches to a thread of our own child.
    let rc = unsafe { libc::ptrace(libc::PTRACE_SEIZE, tid, 0usize, libc::PTRACE_O_TRACESYSGOOD as usize) };
    assert_eq!(rc, 0, "PTRACE_SEIZE: {}", std::io::Error::last_os_error());
    // SAFETY: as above.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, tid, 0usize, 0usize) }, 0);
    ranks.tell(0, "go");
    let counted = trace(tid);
    ranks.expect(0, "counted");
    ranks.tell(0, "end");
    ranks.finish();
    counted
}

/// Polls that find nothing look at the control connection and at the peer's process fifty times a second; these are calls per time, not per
/// message, and there are few.
#[test]
fn no_system_call_per_message_on_shared_memory() {
    for len in [0, 8, 64, 1024, 8192] {
        let calls = count_calls(len, "shm");
        let sum: u64 = calls.values().sum();
        println!("{len} bytes: {sum} system calls for {MESSAGES} messages: {calls:?}");
        assert!(sum <= MESSAGES as u64 / 100, "{len} bytes: {sum} calls for {MESSAGES} messages: {calls:?}");
    }
}

/// One in 64 polls looks at a socket; besides, the peer's process is looked at fifty times a second, which tracing makes many.
#[test]
fn a_poll_that_finds_nothing_makes_a_system_call_one_time_in_64() {
    for (wire, place) in [("shm", "test"), ("tcp", "test"), ("shm", "isend"), ("tcp", "isend")] {
        let calls = traced(World::new("polls", 1).env("RAILHEAD_SOFT_WIRE", wire).env("RHT_IN", place));
        println!("{wire}, {place}: {calls:?} for {POLLS} polls");
        for (call, n) in &calls {
            assert!(*n <= POLLS as u64 / 64, "{wire}, {place}: system call {call} {n} times in {POLLS} polls");
        }
        let sum: u64 = calls.values().sum();
        assert!(sum <= POLLS as u64 / 64 + POLLS as u64 / 256, "{wire}, {place}: {sum} system calls in {POLLS} polls: {calls:?}");
    }
}

/// The tracer sees system calls where there must be some.
#[test]
fn tracing_sees_the_calls_of_tcp() {
    let calls = count_calls(64, "tcp");
    assert!(calls.values().sum::<u64>() >= MESSAGES as u64, "{calls:?}");
}
