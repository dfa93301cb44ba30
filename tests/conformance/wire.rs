//! The bytes went where the name of the bed says, by the path that their size and the settings ask for.

use std::sync::atomic::{AtomicBool, Ordering};

use railhead::base::config::CrossMemory;
use railhead::base::stats::RailCounter;
use railhead::fabric::{Device, QpCaps};

use super::bed::{Bed, NOTHING, Pair, Request, Rng, Wire, received, sent};

/// Paths in the order of `sent` and `received`.
const INLINE: usize = 0;
const CMA: usize = 2;
const BOUNCE: usize = 3;
const TCP: usize = 4;

/// Moves `len` bytes by WRITE, checks them, and returns the bytes sent and received, by path.
fn moved(bed: &Bed, device: &Device, len: usize) -> ([u64; 5], [u64; 5]) {
    let mut p = bed.pair_on(device, QpCaps::default());
    let from = p.a.open_memory(len);
    let to = p.b.open_memory(len);
    from.pattern(len as u64);
    let before = acquainted(&mut p);
    p.b.recv(1, NOTHING);
    p.a.send(Request::write_imm(2, from.sge(0, len), &to, 0, 0));
    p.wait(1, 1);
    p.a.take_ok(2);
    p.b.take_ok(1);
    assert!(to.all() == from.all());
    let since = |now: [u64; 5], then: [u64; 5]| std::array::from_fn(|i| now[i] - then[i]);
    (since(sent(&p.a.stats), before.0), since(received(&p.b.stats), before.1))
}

/// Moves a little each way, so that both ends know what the other can do; what was counted for it.
fn acquainted(p: &mut Pair) -> ([u64; 5], [u64; 5]) {
    p.ping();
    std::mem::swap(&mut p.a, &mut p.b);
    p.ping();
    std::mem::swap(&mut p.a, &mut p.b);
    p.settle();
    (sent(&p.a.stats), received(&p.b.stats))
}

/// Exactly `len` bytes, and on one path only.
#[track_caller]
fn only(path: usize, len: usize, (tx, rx): ([u64; 5], [u64; 5])) {
    let mut want = [0; 5];
    want[path] = len as u64;
    assert_eq!((tx, rx), (want, want), "inline, mapped, cma, bounce, tcp: sent and received of {len} bytes");
}

/// Each path, and what makes it be taken.
pub fn bytes_take_the_path(bed: &Bed) {
    if bed.waives("wire::bytes_take_the_path", "the bytes of a NIC have one path") {
        return;
    }
    let device = bed.device();
    if bed.wire == Wire::Tcp {
        for len in [8, 5000, 3_000_000] {
            only(TCP, len, moved(bed, &device, len));
        }
        return;
    }
    only(INLINE, 8, moved(bed, &device, 8));
    only(CMA, 3_000_000, moved(bed, &device, 3_000_000));
    let without = bed.device_with(|c| c.cma = CrossMemory::Never);
    only(BOUNCE, 3_000_000, moved(bed, &without, 3_000_000));
}

/// The kernel itself refuses, from the start or from one moment to the next: nothing is lost, and the bytes go through the ring.
pub fn cross_memory_attach_refused(bed: &Bed) {
    if bed.wire == Wire::Tcp || bed.waives("wire::cross_memory_attach_refused", "a NIC uses none") {
        return;
    }
    bed.alone("wire::cross_memory_attach_refused", || {
        let device = bed.device();
        let mut p = bed.pair_on(&device, QpCaps::default());
        let from = p.a.open_memory(3_000_000);
        let to = p.b.open_memory(3_000_000);
        let (_, before) = acquainted(&mut p);
        for round in 0..3 {
            from.pattern(round);
            p.b.recv(1, NOTHING);
            p.a.send(Request::write_imm(2, from.sge(0, 3_000_000), &to, 0, 0));
            p.wait(1, 1);
            p.a.take_ok(2);
            p.b.take_ok(1);
            assert!(to.all() == from.all(), "round {round}");
            if round == 0 {
                assert_eq!(received(&p.b.stats)[CMA], 3_000_000);
                refuse_cross_memory_attach();
            }
        }
        assert_eq!(received(&p.b.stats)[BOUNCE] - before[BOUNCE], 6_000_000);
        assert!(p.b.stats.get(RailCounter::CmaRefused) > 0, "the refusal is counted");
        only(BOUNCE, 3_000_000, moved(bed, &bed.device(), 3_000_000));
    });
}

/// Many long WRITEs at once, of all lengths around the limits of what is shared: both sides copy, each byte arrives, in order.
pub fn both_sides_copy(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(16 << 20);
    let to = p.b.open_memory(16 << 20);
    let (_, before) = acquainted(&mut p);
    let mut rng = Rng(7);
    let (mut id, mut total) = (0, 0);
    for round in 0..40 {
        from.pattern(round);
        to.set(0);
        let (mut at, first) = (0, id);
        while id - first < 12 {
            let len = [8193, 16_383, 16_384, 65_536, 100_000, 512 * 1024 + 1, 1 << 20][rng.below(7)];
            p.b.recv(id, NOTHING);
            p.a.send(Request::write_imm(id, from.sge(at, len), &to, at, id as u32));
            (at, id, total) = (at + len, id + 1, total + len as u64);
        }
        p.wait(12, 12);
        p.a.take_all_ok(first..id);
        for i in first..id {
            assert_eq!(p.b.take_ok(i).imm, Some(i as u32));
        }
        assert!(to.read(0, at) == from.read(0, at), "round {round}");
    }
    if bed.wire == Wire::Shm {
        let granted = p.a.stats.get(RailCounter::TxGranted);
        assert!(granted > 0 && granted < total, "the sender wrote {granted} of {total} bytes itself");
        assert_eq!(received(&p.b.stats)[CMA] - before[CMA], total);
    }
}

/// Long WRITEs behind a short one each, as a message's stripes are behind their records: both sides copy them, too.
pub fn both_sides_copy_behind_short_writes(bed: &Bed) {
    const LEN: usize = 512 << 10;
    let mut p = bed.pair();
    let from = p.a.open_memory(4 * LEN);
    let (to, records) = (p.b.open_memory(4 * LEN), p.b.open_memory(64));
    acquainted(&mut p);
    let before = p.a.stats.get(RailCounter::TxGranted);
    for round in 0..20u8 {
        from.pattern(u64::from(round));
        for i in 0..4u64 {
            p.b.recv(i, NOTHING);
            p.a.send(Request::write_inline(2 * i, &[round ^ i as u8; 16], &records, 16 * i as usize));
            p.a.send(Request::write_imm(2 * i + 1, from.sge(i as usize * LEN, LEN), &to, i as usize * LEN, i as u32));
        }
        p.wait(8, 4);
        p.a.take_all_ok(0..8);
        for i in 0..4 {
            assert_eq!(p.b.take_ok(i).imm, Some(i as u32));
            assert_eq!(records.read(16 * i as usize, 16), [round ^ i as u8; 16]);
        }
        assert!(to.all() == from.all(), "round {round}");
    }
    if bed.wire == Wire::Shm {
        let (granted, total) = (p.a.stats.get(RailCounter::TxGranted) - before, 20 * 4 * LEN as u64);
        assert!(granted >= total / 5 * 2, "the sender wrote {granted} of {total} bytes itself");
    }
}

/// Of WRITEs to one place, outstanding together, the last one stays, whoever copies what.
pub fn the_last_write_to_a_place_stays(bed: &Bed) {
    const LEN: usize = 1 << 20;
    let mut p = bed.pair();
    let from = p.a.open_memory(6 * LEN);
    let to = p.b.open_memory(2 * LEN);
    // Where the one that follows lies, or not.
    let short = |i: usize| [LEN / 2 + 7, 5, 2 * LEN - 24][i % 3];
    for round in 0..40u64 {
        from.pattern(round);
        for i in 0..6 {
            // Overlapping by all, by half, by a byte.
            let at = [0, LEN / 2, LEN - 1][(round as usize + i) % 3];
            p.a.send(Request::write(2 * i as u64, from.sge(i * LEN, LEN), &to, at));
            p.a.send(Request::write_inline(2 * i as u64 + 1, &[i as u8; 24], &to, short(i)));
        }
        // Each side on a thread of its own, or one would never be ahead of the other.
        let over = AtomicBool::new(false);
        let Pair { a, b } = &mut p;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    b.poll();
                }
            });
            a.wait(12);
            over.store(true, Ordering::Relaxed);
        });
        p.a.take_all_ok(0..12);
        let mut want = to.all();
        for i in 0..6 {
            let at = [0, LEN / 2, LEN - 1][(round as usize + i) % 3];
            want[at..at + LEN].copy_from_slice(&from.read(i * LEN, LEN));
            want[short(i)..short(i) + 24].fill(i as u8);
        }
        assert!(to.all() == want, "round {round}");
    }
}

/// The requester may not write into the responder: the responder reads everything, what the requester had begun included.
pub fn writing_refused(bed: &Bed) {
    if bed.wire == Wire::Tcp || bed.waives("wire::writing_refused", "a NIC uses no cross-memory attach") {
        return;
    }
    bed.alone("wire::writing_refused", || {
        let mut p = bed.pair();
        let from = p.a.open_memory(8 << 20);
        let to = p.b.open_memory(8 << 20);
        acquainted(&mut p);
        for round in 0..4 {
            if round == 1 {
                refuse(&[libc::SYS_process_vm_writev]);
            }
            from.pattern(round);
            p.a.send(Request::write(1, from.sge(0, 8 << 20), &to, 0));
            p.wait(1, 0);
            p.a.take_ok(1);
            assert!(to.all() == from.all(), "round {round}");
            let granted = p.a.stats.get(RailCounter::TxGranted);
            assert!(granted > 0 && granted < 8 << 20, "round {round}: {granted}");
        }
        assert_eq!(p.b.stats.get(RailCounter::CmaRefused), 0);
    });
}

fn refuse_cross_memory_attach() {
    refuse(&[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev]);
}

/// From here on these system calls of this process are EPERM.
fn refuse(calls: &[libc::c_long]) {
    let op = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, equal, ret) =
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::BPF_RET | libc::BPF_K);
    // seccomp_data.nr is its first word (linux/seccomp.h).
    let mut filter = vec![op(load, 0, 0, 0)];
    for &call in calls {
        filter.push(op(equal, 0, 1, call as u32));
        filter.push(op(ret, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    }
    filter.push(op(ret, 0, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the call; it changes what this process may do and nothing else.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let rc = libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC, &raw const program);
        assert_eq!(rc, 0, "seccomp: {}", std::io::Error::last_os_error());
    }
}

/// Requests and failures are counted.
pub fn counters_count(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(4096);
    let to = p.b.open_memory(4096);
    p.b.recv(1, to.sge(0, 4096));
    p.b.recv(2, NOTHING);
    p.a.send(Request::send(1, from.sge(0, 100)));
    p.a.send(Request::write(2, from.sge(0, 100), &to, 0));
    p.a.send(Request::write_imm(3, from.sge(0, 100), &to, 0, 0));
    p.a.send(Request::read(4, from.sge(0, 100), &to, 0));
    p.wait(4, 2);
    assert_eq!([&p.a, &p.b].map(|side| side.stats.get(RailCounter::Requests)), [4, 0]);
    assert_eq!(p.a.stats.get(RailCounter::Errors) + p.b.stats.get(RailCounter::Errors), 0);
    p.a.send(railhead::fabric::SendWr { rkey: 0, ..Request::write(5, from.sge(0, 8), &to, 0) });
    p.wait(5, 2);
    assert!(p.a.stats.get(RailCounter::Errors) > 0);
}

/// A connection without traffic asks for signs of life as often as the setting wants, the shortest included.
pub fn silence_is_bounded(bed: &Bed) {
    if bed.wire == Wire::Shm || bed.waives("wire::silence_is_bounded", "a NIC has no TCP connection") {
        return;
    }
    bed.alone("wire::silence_is_bounded", || {
        for seconds in [1, 8, 60] {
            let device = bed.device_with(|c| c.tcp_user_timeout_s = seconds);
            let mut p = bed.pair_on(&device, QpCaps::default());
            p.ping();
            let kept: Vec<u32> = std::fs::read_dir("/proc/self/fd")
                .expect("fd")
                .filter_map(|entry| keepalive(entry.ok()?.file_name().to_str()?.parse().ok()?))
                .collect();
            assert!(kept.len() >= 2, "no connection with two ends: {kept:?}");
            assert!(kept.iter().all(|&longest| longest <= seconds.max(5)), "{kept:?} seconds of silence, {seconds} were set");
        }
    });
}

/// After how many seconds without a sign from its peer a connected TCP socket ends.
fn keepalive(fd: i32) -> Option<u32> {
    let get = |level, name| {
        let (mut value, mut len) = (0u32, 4);
        // SAFETY: four bytes are written at most, to a value that outlives the call; a descriptor that is no socket is an error.
        let rc = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut len) };
        (rc == 0).then_some(value)
    };
    let established = 1;
    if get(libc::IPPROTO_TCP, libc::TCP_INFO)? & 0xff != established {
        return None;
    }
    let on = get(libc::SOL_SOCKET, libc::SO_KEEPALIVE)? != 0;
    let [idle, interval, count] = [libc::TCP_KEEPIDLE, libc::TCP_KEEPINTVL, libc::TCP_KEEPCNT].map(|name| get(libc::IPPROTO_TCP, name));
    Some(if on { idle? + interval? * count? } else { u32::MAX })
}
