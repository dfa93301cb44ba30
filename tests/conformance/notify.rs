//! Notification: armed, **then** drained, then waited for on the device's one descriptor.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use railhead::fabric::{QpCaps, QpState, SendWr, WcStatus};

use super::bed::{Bed, NOTHING, PATIENCE, Pair, Request, SILENT, Side};

/// poll(2) for readability; true if readable.
fn readable(fd: RawFd, timeout_ms: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd.
    let n = unsafe { libc::poll(&raw mut p, 1, timeout_ms) };
    assert!(n >= 0, "poll: {}", std::io::Error::last_os_error());
    n == 1 && p.revents & libc::POLLIN != 0
}

/// A pair whose ends have devices of their own, so that each has a descriptor of its own.
fn pair(bed: &Bed) -> Pair {
    let mut p =
        Pair { a: Side::new("a", &bed.device(), QpCaps::default(), true), b: Side::new("b", &bed.device(), QpCaps::default(), true) };
    p.connect();
    p.ping();
    p
}

/// Arms, drains, and blocks until there are `n` completions.
fn sleep_until(side: &mut Side, n: usize) {
    let fd = side.domain.notification_fd().expect("notification_fd");
    while side.got.len() < n {
        side.cq.arm().expect("arm");
        while side.poll() > 0 {}
        if side.got.len() >= n {
            break;
        }
        assert!(readable(fd, PATIENCE.as_millis() as i32), "side {} was never woken: {} of {n}", side.name, side.got.len());
    }
}

/// Has b arm and drain its queue until nothing wakes it any more: what is still under way from before (acknowledgements) may do so once or twice.
#[track_caller]
fn calm(p: &mut Pair) {
    let fd = p.b.domain.notification_fd().expect("notification_fd");
    for _ in 0..1000 {
        p.b.cq.arm().expect("arm");
        while p.poll() > 0 {}
        if !readable(fd, 0) {
            return;
        }
    }
    panic!("readable for ever with nothing there");
}

/// Nothing there: not readable. Something arrives: readable, until polled.
pub fn arm_then_drain(bed: &Bed) {
    let mut p = pair(bed);
    let fd = p.b.domain.notification_fd().expect("notification_fd");
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64);
    for round in 0..50 {
        p.b.recv(1, to.sge(0, 64));
        calm(&mut p);
        from.pattern(round);
        p.a.send(Request::send(2, from.sge(0, 64)));
        // The requester may have to poll to get it out, so it does; what is asked is that readability leads to the completion.
        let end = Instant::now() + PATIENCE;
        while p.b.got.is_empty() {
            p.b.cq.arm().expect("arm");
            while p.b.poll() > 0 {}
            while p.b.got.is_empty() && !readable(fd, 1) {
                p.a.poll();
                assert!(Instant::now() < end, "round {round}: never readable");
            }
        }
        p.b.take_ok(1);
        assert!(to.all() == from.all());
        p.wait(1, 0);
        p.a.take_ok(2);
    }
}

/// A thread that is blocked in poll(2) is woken by data, small and large.
pub fn wakes_a_sleeper(bed: &Bed) {
    for len in [8usize, 64, 5000, 3_000_000] {
        let Pair { mut a, mut b } = pair(bed);
        let from = a.open_memory(len);
        let to = b.open_memory(len);
        from.pattern(len as u64);
        std::thread::scope(|scope| {
            let to = &to;
            let sleeper = scope.spawn(move || {
                b.recv(1, to.sge(0, len));
                sleep_until(&mut b, 1);
                b.take_ok(1);
                b
            });
            a.send(Request::send(2, from.sge(0, len)));
            sleep_until(&mut a, 1);
            a.take_ok(2);
            drop(sleeper.join().expect("sleeper"));
        });
        assert!(to.all() == from.all());
    }
}

/// Who arms a queue and drains it may sleep, whatever has come meanwhile: its notification is not used up by that.
pub fn what_is_drained_uses_up_no_notification(bed: &Bed) {
    let mut p = pair(bed);
    let fd = p.b.domain.notification_fd().expect("notification_fd");
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64);
    for round in 0..20 {
        p.b.recv(1, to.sge(0, 32));
        p.b.recv(2, to.sge(32, 32));
        p.b.cq.arm().expect("arm");
        p.a.send(Request::send(1, from.sge(0, 32)));
        let end = Instant::now() + PATIENCE;
        loop {
            while p.b.poll() > 0 {}
            if !p.b.got.is_empty() {
                break;
            }
            // The requester may have to poll to get it out.
            p.a.poll();
            p.b.cq.arm().expect("arm");
            assert!(Instant::now() < end, "round {round}: nothing comes");
        }
        p.a.send(Request::send(2, from.sge(32, 32)));
        while !readable(fd, 1) {
            p.a.poll();
            assert!(Instant::now() < end, "round {round}: never readable");
        }
        p.wait(2, 2);
        for wr_id in [1, 2] {
            p.a.take_ok(wr_id);
            p.b.take_ok(wr_id);
        }
    }
}

/// Who has armed and drained may post before it sleeps: what could wait for its next poll does not, and it is woken to send what does not get out at once,
/// and for what is done.
pub fn what_is_posted_after_arming_gets_out(bed: &Bed) {
    const LEN: usize = 16 << 20;
    let mut p = pair(bed);
    let from = p.b.open_memory(LEN);
    let to = p.a.open_memory(LEN);
    for before_the_last_poll in [false, true] {
        from.pattern(before_the_last_poll.into());
        calm(&mut p);
        if before_the_last_poll {
            p.b.cq.arm().expect("arm");
        }
        let quiet = SendWr { signaled: false, ..Request::write(1, from.sge(0, 64), &to, 0) };
        p.b.cq.qp(p.b.qp).post_held([quiet]).expect("post_held");
        while before_the_last_poll && p.b.poll() > 0 {}
        let end = Instant::now() + PATIENCE;
        while to.read(0, 64) != from.read(0, 64) {
            p.a.poll();
            assert!(Instant::now() < end, "never sent");
        }
    }
    p.a.recv(1, NOTHING);
    calm(&mut p);
    let fd = p.b.domain.notification_fd().expect("notification_fd");
    p.b.send(SendWr { when_sent: true, ..Request::write_imm(1, from.sge(0, 64), &to, 0, 5) });
    let end = Instant::now() + PATIENCE;
    while !readable(fd, 1) {
        p.a.poll();
        assert!(Instant::now() < end, "never woken to learn that it is done");
    }
    p.wait(1, 1);
    p.a.take_ok(1);
    p.b.take_ok(1);
    from.pattern(2);
    calm(&mut p);
    p.b.send(Request::write(1, from.sge(0, LEN), &to, 0));
    let Pair { mut a, mut b } = p;
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let end = Instant::now() + 2 * PATIENCE;
            while !is_done.load(Ordering::Relaxed) && Instant::now() < end {
                if a.poll() == 0 {
                    std::thread::yield_now();
                }
            }
        });
        assert!(readable(fd, PATIENCE.as_millis() as i32), "never woken to send the rest");
        sleep_until(&mut b, 1);
        is_done.store(true, Ordering::Relaxed);
    });
    b.take_ok(1);
    assert!(to.all() == from.all());
}

/// Ten thousand times there and back between two threads that both sleep for it.
pub fn no_lost_wakeup(bed: &Bed) {
    const ROUNDS: u32 = 10_000;
    let Pair { mut a, mut b } = pair(bed);
    let (ma, mb) = (a.open_memory(8), b.open_memory(8));
    let (ma, mb) = (&ma, &mb);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for i in 0..ROUNDS {
                a.recv(1, NOTHING);
                a.send(Request::write_imm(2, ma.sge(0, 8), mb, 0, i));
                sleep_until(&mut a, 2);
                let echoed = a.got.drain(..).find_map(|c| {
                    assert_eq!(c.status, WcStatus::Success);
                    c.imm
                });
                assert_eq!(echoed, Some(i));
            }
            a
        });
        scope.spawn(move || {
            b.recv(1, NOTHING);
            for i in 0..ROUNDS {
                sleep_until(&mut b, 1);
                let c = b.take_ok(1);
                assert_eq!(c.imm, Some(i));
                b.recv(1, NOTHING);
                b.send(Request::write_imm(2, mb.sge(0, 8), ma, 0, i));
                sleep_until(&mut b, 1);
                // Either its own completion or, as the peer is quick, the next request before or behind it.
                let own = b.got.iter().position(|c| c.wr_id == 2);
                let own = own.unwrap_or_else(|| {
                    sleep_until(&mut b, 2);
                    b.got.iter().position(|c| c.wr_id == 2).expect("own completion")
                });
                assert_eq!(b.got.remove(own).expect("just found").status, WcStatus::Success);
            }
            b
        });
    });
}

/// A queue made without notification cannot be armed.
pub fn needs_a_notifying_queue(bed: &Bed) {
    let mut p = bed.pair();
    assert!(p.a.cq.arm().is_err());
    p.ping();
}

/// A failure wakes like data does: the peer's death, with receives outstanding only.
pub fn error_notifies(bed: &Bed) {
    if bed.waives("notify::error_notifies", SILENT) {
        return;
    }
    let Pair { mut a, mut b } = pair(bed);
    for _ in 0..10 {
        a.poll();
        b.poll();
    }
    b.recv(1, NOTHING);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(move || {
            sleep_until(&mut b, 1);
            let c = b.take();
            assert_eq!((c.wr_id, c.status), (1, WcStatus::WrFlushErr));
            assert_eq!(b.state(), QpState::Error);
        });
        drop(a);
        sleeper.join().expect("sleeper");
    });
}

/// Who has armed and drained is left alone by a peer that does nothing: blocked in the kernel, it takes no CPU time.
pub fn nothing_wakes_an_idle_sleeper(bed: &Bed) {
    let mut p = pair(bed);
    let fd = p.b.domain.notification_fd().expect("notification_fd");
    p.b.recv(1, NOTHING);
    calm(&mut p);
    let cpu = || {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes the time to a value that outlives the call.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    };
    let before = cpu();
    assert!(!readable(fd, 500), "woken by nobody");
    let used = cpu() - before;
    assert!(used < 50_000_000, "{used} ns of CPU time in half a second of sleep");
}
