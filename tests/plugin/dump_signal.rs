//! RAILHEAD_DUMP_SIGNAL: at the signal every engine logs what it waits for, and what the application does at it goes on. Each scenario runs in a process of
//! its own.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::support;
use support::plugin::Plugin;
use support::proxy::*;
use support::{Ctx, Role, World, comms, until};

pub const ROLES: &[(&str, Role)] =
    &[("proxies", proxies), ("device", device), ("dump_signal::off", off), ("from_the_logger", from_the_logger)];

fn alone(role: &'static str) -> World {
    World::new(role, 1).env("RAILHEAD_SOCKET_IFNAME", "=lo").env("RAILHEAD_DEBUG", "warn")
}

/// What the library writes to stderr from now on; panics go where they went.
struct Log(File);

impl Log {
    fn take() -> Log {
        // SAFETY: plain system calls on this process's own descriptors.
        let (log, stderr) = unsafe {
            let (log, stderr) = (libc::memfd_create(c"log".as_ptr(), libc::MFD_CLOEXEC), libc::dup(2));
            assert!(log >= 0 && stderr >= 0 && libc::dup2(log, 2) == 2);
            (log, stderr)
        };
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // SAFETY: as above.
            unsafe { libc::dup2(stderr, 2) };
            hook(info);
        }));
        // SAFETY: just made. O_APPEND is not needed: all who write share its offset.
        Log(unsafe { File::from_raw_fd(log) })
    }

    fn text(&self) -> String {
        let mut bytes = vec![0; self.0.metadata().expect("a size").len() as usize];
        self.0.read_exact_at(&mut bytes, 0).expect("the log");
        String::from_utf8(bytes).expect("text")
    }

    /// How often it holds this.
    fn count(&self, words: &str) -> usize {
        self.text().matches(words).count()
    }
}

static PLAIN: AtomicU32 = AtomicU32::new(0);
static WITH_INFO: AtomicU32 = AtomicU32::new(0);

extern "C" fn plain(signal: i32) {
    PLAIN.fetch_add(signal as u32, Ordering::Relaxed);
    // SAFETY: this thread's errno.
    unsafe { *libc::__errno_location() = libc::EBADF };
}

extern "C" fn with_info(signal: i32, info: *mut libc::siginfo_t, context: *mut std::ffi::c_void) {
    // SAFETY: given by the kernel.
    let given = unsafe { info.as_ref() }.is_some_and(|info| info.si_signo == signal) && !context.is_null();
    WITH_INFO.fetch_add(if given { signal as u32 } else { 1000 }, Ordering::Relaxed);
}

fn handle(signal: i32, handler: usize, flags: i32) {
    // SAFETY: zero is a value of each of its members.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    (action.sa_sigaction, action.sa_flags) = (handler, flags);
    // SAFETY: a handler of this type.
    assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
}

fn handler_of(signal: i32) -> usize {
    // SAFETY: zero is a value of each of its members, and the call fills it in.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, std::ptr::null(), &raw mut action), 0);
        action.sa_sigaction
    }
}

fn raise(signal: i32) {
    // SAFETY: this process handles it.
    assert_eq!(unsafe { libc::raise(signal) }, 0);
}

/// Threads of this process with this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
    tasks
        .filter(|task| std::fs::read_to_string(task.as_ref().expect("task").path().join("comm")).is_ok_and(|comm| comm.trim() == name))
        .count()
}

/// What was written to this process's eventfds and not read.
fn unread() -> u64 {
    let files = std::fs::read_dir("/proc/self/fdinfo").expect("descriptors");
    let texts = files.filter_map(|file| std::fs::read_to_string(file.expect("a descriptor").path()).ok());
    let counts = texts.filter_map(|text| {
        let (_, count) = text.split_once("eventfd-count:")?;
        u64::from_str_radix(count.lines().next()?.trim(), 16).ok()
    });
    counts.sum()
}

const USR1: u32 = libc::SIGUSR1 as u32;

fn proxies(ctx: &Ctx) {
    let log = Log::take();
    handle(libc::SIGUSR1, plain as *const () as usize, libc::SA_RESTART);
    let (waits, sleeps) = (Proxy::new(), Proxy::new());
    let (send, recv) = pair(waits, waits, &slots(1024));
    send.append(&operation(4, 1, 1, SIMPLE)).expect("append");
    waits.start().expect("start");
    until("a turn", || (waits.state().idle_laps > 0).then_some(()));
    until("the other to sleep", || (sleeps.state().asleep == 1).then_some(()));
    // A thread has its parent's name until it has run.
    until("the thread that dumps", || (threads("railhead-signal") == 1).then_some(()));
    assert_eq!(log.text(), "");
    // From outside, as a person does it.
    ctx.say("ready");
    let (waiting, sleeping) = ("waits for the local producer to fill a step", "railhead-proxy: asleep, 0 operations");
    // On a busy machine the thread may take longer to give way than a dump waits for it.
    let shown = || log.count(waiting) + log.count("stuck in a step");
    until("both dumps", || (shown() == 1 && log.count(sleeping) == 1).then_some(()));
    // It may run on another thread.
    until("the application's handler", || (PLAIN.swap(0, Ordering::Relaxed) == USR1).then_some(()));
    assert_eq!((waits.state().failed, waits.state().ended, sleeps.state().asleep), (0, 0, 1));
    // One that is interrupted sees its own errno.
    // SAFETY: this thread's errno.
    unsafe { *libc::__errno_location() = libc::ENOTTY };
    raise(libc::SIGUSR1);
    // SAFETY: as above.
    assert_eq!(unsafe { *libc::__errno_location() }, libc::ENOTTY);
    until("a second dump of each", || (shown() == 2 && log.count(sleeping) == 2).then_some(()));
    let others = unread();
    // A forked child has none of these engines, and its signals are not its parent's.
    // SAFETY: the child raises a signal and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        raise(libc::SIGUSR1);
        let told = PLAIN.load(Ordering::Relaxed) == 2 * USR1;
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(if told { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: our child, a place for its status.
    assert_eq!((unsafe { libc::waitpid(child, &raw mut status, 0) }, status), (child, 0));
    // Had it written to its parent's descriptor, that would be read before the next signal comes, and not merge with it.
    until("the descriptor to be read", || (unread() == others).then_some(()));
    // One that is gone is shown no more.
    send.append(&operation(1, 1, 1, SIMPLE)).expect("append");
    sleeps.destroy().expect("destroy");
    raise(libc::SIGUSR1);
    until("a third", || (shown() >= 3).then_some(()));
    assert_eq!(recv.state().operations, 0);
    waits.destroy().expect("destroy");
    until("the thread's end", || (threads("railhead-signal") == 0).then_some(()));
    // All is written: two dumps of both, one of the one that was left, and none for the child's signal.
    assert_eq!((shown(), log.count(sleeping), log.count("railhead-proxy: ")), (3, 2, 5), "{}", log.text());
    PLAIN.store(0, Ordering::Relaxed);
    raise(libc::SIGUSR1);
    assert_eq!(PLAIN.load(Ordering::Relaxed), USR1, "nobody to show, and the process lives");
    // And again with a new one.
    let again = Proxy::new();
    until("the new one to sleep", || (again.state().asleep == 1).then_some(()));
    assert_eq!(log.count(sleeping), 2, "a signal from before its time");
    raise(libc::SIGUSR1);
    until("its dump", || (log.count(sleeping) == 3).then_some(()));
    assert_eq!(PLAIN.load(Ordering::Relaxed), 2 * USR1, "once each time");
    again.destroy().expect("destroy");
}

#[test]
fn a_signal_from_outside_shows_a_proxy_that_waits_and_one_that_sleeps() {
    let mut world = alone("proxies").env("RAILHEAD_DUMP_SIGNAL", "sigusr1").spawn();
    world.expect(0, "ready");
    world.ranks[0].signal(libc::SIGUSR1);
    world.finish();
}

/// The thread of a device, with a handler of the other kind.
fn device(_: &Ctx) {
    let log = Log::take();
    handle(libc::SIGUSR2, with_info as *const () as usize, libc::SA_SIGINFO);
    let plugin = Plugin::start(12);
    let (send, recv) = comms::to_itself(&plugin, 0).expect("comms");
    raise(libc::SIGUSR2);
    assert_eq!(WITH_INFO.load(Ordering::Relaxed), libc::SIGUSR2 as u32);
    let mut stuck = 0;
    until("its dump", || {
        // On a busy machine the thread may take longer to give way than a dump waits for it.
        if log.count("stuck in a step") > stuck {
            stuck += 1;
            raise(libc::SIGUSR2);
        }
        (log.count("a send comm") > 0 && log.count("a receive comm") > 0).then_some(())
    });
    plugin.close_send(send).expect("closeSend");
    plugin.close_recv(recv).expect("closeRecv");
    until("the thread's end", || (threads("railhead-signal") == 0).then_some(()));
}

#[test]
fn a_signal_shows_what_a_devices_thread_watches_over() {
    alone("device").env("RAILHEAD_DUMP_SIGNAL", "SIGUSR2").env("RAILHEAD_PROGRESS", "thread").spawn().finish();
}

/// What the logger is to do at the next dump: a turn of this test's.
static AT_DUMP: Mutex<Option<Box<dyn FnOnce() + Send>>> = Mutex::new(None);

/// NCCL's logger, for calls with one argument behind the format.
extern "C" fn acts(_: c_int, _: c_ulong, _: *const c_char, _: c_int, _: *const c_char, message: *const c_char) {
    // SAFETY: the library passes a C string.
    let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    if message.starts_with("railhead-proxy: ") && message.contains("operations") {
        // Not under the lock: what it does may log.
        let act = AT_DUMP.lock().unwrap().take();
        if let Some(act) = act {
            act();
        }
    }
}

/// Sets the logger, as an init does. Each init of a proxy forgets it.
fn set_logger() {
    // The proxies' own copy of the library, which is linked into this program.
    let table = &raw const railhead::abi::nccl::v12::ncclNetPlugin_v12;
    type Init = unsafe extern "C" fn(*mut *mut c_void, u64, *mut c_int, *const c_void, *const c_void) -> c_int;
    let (mut context, mut config) = (std::ptr::null_mut(), [-1; 4]);
    // SAFETY: the second word of a v12 table is its init, of this type; places for its results, and a logger.
    let status = unsafe {
        let init = std::mem::transmute::<*const c_void, Init>(table.cast::<*const c_void>().add(1).read());
        init(&raw mut context, 1, config.as_mut_ptr(), acts as *const c_void, std::ptr::null())
    };
    assert_eq!(status, 0);
}

fn at_dump(act: impl FnOnce() + Send + 'static) {
    set_logger();
    *AT_DUMP.lock().unwrap() = Some(Box::new(act));
    raise(libc::SIGUSR1);
    until("the dump", || AT_DUMP.lock().unwrap().is_none().then_some(()));
}

/// The application's logger makes and ends proxies while it is given a dump.
fn from_the_logger(_: &Ctx) {
    let alive = Proxy::new();
    // One is made, works, shows itself and is ended.
    let told = Arc::new(AtomicU32::new(0));
    let done = told.clone();
    at_dump(move || {
        let proxy = Proxy::new();
        let (send, recv) = pair(proxy, proxy, &slots(1024));
        for connector in [send, recv] {
            connector.append(&operation(1, 1, 1, SIMPLE)).expect("append");
        }
        proxy.start().expect("start");
        // Both wait until there is data.
        assert!(proxy.dump().contains("2 operations") && send.producer().put(1, &[1; 10]));
        let mut emptier = recv.consumer();
        assert_eq!(until("data", || emptier.take(1)), [1; 10]);
        proxy.stop().expect("stop");
        proxy.destroy().expect("destroy");
        done.store(1, Ordering::Release);
    });
    until("its end", || (told.load(Ordering::Acquire) == 1).then_some(()));
    // The last one is ended while it is shown, and a new one is made at once.
    let (made, make) = std::sync::mpsc::channel();
    at_dump(move || {
        alive.destroy().expect("destroy");
        made.send(Proxy::new()).expect("the test");
    });
    let second = make.recv_timeout(support::PATIENCE).expect("a proxy");
    assert_eq!(alive.start(), Err(RAILHEAD_INTERNAL));
    until("the old thread's end", || (threads("railhead-signal") == 1).then_some(()));
    // Another thread ends the last one and waits for the logger, which makes another meanwhile.
    let (made, make) = std::sync::mpsc::channel();
    at_dump(move || {
        let ending = std::thread::spawn(move || {
            // SAFETY: plain system call.
            WITH_INFO.store(unsafe { libc::gettid() } as u32, Ordering::Release);
            second.destroy().expect("destroy");
        });
        until("the other thread to wait", || {
            let tid = WITH_INFO.load(Ordering::Acquire);
            let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap_or_default();
            (second.start() == Err(RAILHEAD_INTERNAL) && threads("railhead-proxy") == 0 && stat.contains(") S ")).then_some(())
        });
        let third = Proxy::new();
        assert!(!ending.is_finished(), "nobody had to wait for this");
        made.send((third, ending)).expect("the test");
    });
    let (third, ending) = make.recv_timeout(support::PATIENCE).expect("a proxy");
    ending.join().expect("the other thread");
    // It is shown as any other.
    let (shown, show) = std::sync::mpsc::channel();
    at_dump(move || shown.send(()).expect("the test"));
    show.recv_timeout(support::PATIENCE).expect("a dump");
    third.destroy().expect("destroy");
    until("the thread's end", || (threads("railhead-signal") == 0).then_some(()));
}

#[test]
fn a_logger_may_make_and_end_proxies_while_it_is_given_a_dump() {
    alone("from_the_logger").env("RAILHEAD_DUMP_SIGNAL", "SIGUSR1").spawn().finish();
}

/// Nobody asked for it.
fn off(_: &Ctx) {
    let log = Log::take();
    let before = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGQUIT].map(handler_of);
    let proxy = Proxy::new();
    assert_eq!([libc::SIGUSR1, libc::SIGUSR2, libc::SIGQUIT].map(handler_of), before);
    assert_eq!((threads("railhead-signal"), log.text()), (0, String::new()));
    proxy.destroy().expect("destroy");
}

#[test]
fn without_the_setting_no_signal_is_touched() {
    alone("dump_signal::off").spawn().finish();
}
