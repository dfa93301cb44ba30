//! A peer that writes whatever it likes into the segment spoils its own queue pair, and nothing else.

use std::os::unix::net::UnixStream;

use super::layout::{Trailer, flag, op, source};
use super::*;
use crate::base::clock;
use crate::base::config::CrossMemory;
use crate::base::process::squatter::Squatter;
use crate::base::stats::RailStats;
use crate::fabric::soft::MemoryRegion;
use crate::fabric::types::*;

/// xorshift64*.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 33) % n
    }

    fn pick(&mut self, of: &[u64]) -> u64 {
        of[self.below(of.len() as u64) as usize]
    }

    /// Near something that matters, or anything at all.
    fn position(&mut self, near: u64) -> u64 {
        match self.below(32) {
            0 => self.next(),
            1 => self.pick(&[0, 1, u64::MAX, u64::MAX - 1, 1 << 32, 1 << 63, 64 * 1024, 64 * 1024 - 1]),
            _ => near.wrapping_add(self.below(130)).wrapping_sub(1),
        }
    }
}

const MEMORY: usize = 256 * 1024;
const MARGIN: usize = 4096;

fn scribble(rng: &mut Rng, segment: &Segment, theirs: usize, memory: &[u64; 3]) {
    let direction = segment.direction(theirs);
    match rng.below(8) {
        0..=4 => {
            let head = direction.desc_head.load(Ordering::Relaxed);
            let desc = segment.desc(theirs, head);
            let kind = if rng.below(64) == 0 { 0 } else { rng.pick(&[op::SEND, op::WRITE, op::WRITE, op::READ].map(u64::from)) };
            let from_where = rng.pick(&[source::BOUNCE, source::BOUNCE, source::PRIVATE, source::INLINE].map(u64::from));
            let from_where = if rng.below(32) == 0 { rng.pick(&[source::MAPPED, source::PRIVATE].map(u64::from)) } else { from_where };
            let flags = rng.below(4) as u8 & (flag::LAST | flag::IMM);
            let fitting = from_where == u64::from(source::INLINE) && rng.below(32) > 0;
            let len = rng.pick(if fitting { &[0, 1, 8, 32, 61, 64, 255] } else { &[0, 1, 33, 64, 65, 8192, 65_536, MEMORY as u64 - 129] });
            let len = if rng.below(64) == 0 { u64::from(u32::MAX) } else { len };
            let key = memory[1 + usize::from(rng.below(64) == 0)];
            let payload = if from_where == 1 { rng.below(64) * 64 } else { rng.position(memory[0]) };
            let trailer = Trailer {
                op: kind as u8,
                source: from_where as u8,
                flags,
                inline: len as u8,
                words: rng.next() as u8,
                acked: if rng.below(32) == 0 {
                    rng.next() as u16
                } else {
                    segment.direction(1 - theirs).acked.load(Ordering::Relaxed) as u16
                },
            };
            let words = [
                rng.position(memory[0]),
                key | rng.next() << 32,
                payload,
                if from_where == u64::from(source::MAPPED) { rng.below(4) } else { rng.position(len) },
                if from_where == 0 { rng.next() } else { len },
                rng.next(),
                rng.next(),
                if rng.below(16) == 0 { rng.next() } else { Trailer::word(trailer.bits(), head) },
            ];
            for (to, from) in desc.words.iter().zip(words) {
                to.store(from, Ordering::Relaxed);
            }
        }
        5 => {
            // What the peer writes about our requests.
            let ours = segment.direction(1 - theirs);
            let acked = ours.acked.load(Ordering::Relaxed);
            match rng.below(64) {
                0 => ours.nak.store(rng.below(8), Ordering::Relaxed),
                1 => ours.acked.store(acked + 1, Ordering::Relaxed),
                5 => ours.desc_head.store(rng.position(acked), Ordering::Relaxed),
                6 => ours.bounce_head.store(rng.position(0), Ordering::Relaxed),
                7 => ours.fill_want.store(rng.position(acked), Ordering::Relaxed),
                8 => ours.fill_from.store(rng.position(0), Ordering::Relaxed),
                9 => ours.fill_head.store(rng.position(0), Ordering::Relaxed),
                10 => ours.resp_tail.store(rng.position(0), Ordering::Relaxed),
                11 => ours.acked.store(rng.position(acked), Ordering::Relaxed),
                _ => {}
            }
        }
        6 => match rng.below(5) {
            0 => direction.fill_tail.store(rng.position(0), Ordering::Relaxed),
            1 => direction.resp_head.store(rng.position(0), Ordering::Relaxed),
            2 if rng.below(20) == 0 => direction.revoked.store(1, Ordering::Relaxed),
            3 => segment.direction(1 - theirs).resp_head.store(rng.position(0), Ordering::Relaxed),
            _ => segment.direction(1 - theirs).fill_tail.store(rng.position(0), Ordering::Relaxed),
        },
        _ => {
            let side = segment.side(theirs);
            match rng.below(6) {
                0 if rng.below(20) == 0 => side.closed.store(1, Ordering::Relaxed),
                1 => side.notify.store(rng.next() as u32, Ordering::Relaxed),
                2 => side.sleeping.store(rng.next() as u32, Ordering::Relaxed),
                3 => side.can_read_peer.store(rng.below(3) as u32, Ordering::Relaxed),
                4 => segment.control().bounce.store(rng.next(), Ordering::Relaxed),
                _ => segment.side(1 - theirs).sleeping.store(1, Ordering::Relaxed),
            }
        }
    }
}

/// Both sides of a fresh segment.
fn sides(bounce: u64) -> (Segment, Segment) {
    let (shm, fd) = Shm::create_sparse("railhead-test", Segment::len_for(bounce).unwrap()).unwrap();
    let dialer = Segment::create(shm, bounce).unwrap();
    let acceptor = Segment::attach(Shm::attach(fd.convert(), dialer.shm.len()).unwrap()).unwrap();
    (dialer, acceptor)
}

#[test]
fn garbage_in_the_segment_never_panics_and_never_leaves_the_memory() {
    let mut bytes = vec![0x5au8; MEMORY + 2 * MARGIN];
    // SAFETY: the buffer outlives the region and is looked at only when nothing is in flight.
    let memory = unsafe { UserMemory::new(bytes.as_mut_ptr().add(MARGIN), MEMORY) };
    let region = MemoryRegion::register(memory, Access::all()).unwrap();
    let addr = memory.addr() as u64;
    let (mut steps, mut faults) = (0u64, 0u64);
    for seed in 1..=1500u64 {
        let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let bounce = (64 * 1024) << rng.below(3);
        let (mut dialer, mut acceptor) = sides(bounce);
        dialer.introduce(true);
        acceptor.introduce(true);
        let cma = [CrossMemory::Always, CrossMemory::Never][rng.below(2) as usize];
        dialer.prove_peer(Some(std::process::id() as i32), cma);
        acceptor.prove_peer(Some(std::process::id() as i32), cma);
        let (victim, attacker) = if seed % 2 == 0 { (dialer, acceptor) } else { (acceptor, dialer) };
        let (a, b) = UnixStream::pair().unwrap();
        let caps = QpCaps { send_depth: 16, recv_depth: 16, ..QpCaps::default() };
        let mut wq = WorkQueues::new(&caps, RailStats::detached(), 1, 0);
        wq.ready(if rng.below(2) == 0 { 7 } else { 0 });
        let mut wire = ShmWire::new(victim, OwnedFd::new(a), true, 16, RailStats::detached());
        // Of four allocations that the peer names, it has passed two, of which one cannot be had.
        wire.maps.mapped = vec![(1, None), (2, Some(Shm::create_sparse("railhead-test", MEMORY).unwrap().0))];
        let mut out = [Completion { wr_id: 0, status: WcStatus::Success, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 }; 8];
        for _ in 0..400 {
            steps += 1;
            for _ in 0..rng.below(4) {
                let stray = rng.next() & 0xffff_ffff;
                scribble(&mut rng, &attacker, attacker.me, &[addr, u64::from(region.rkey()), stray]);
            }
            let len = rng.pick(&[0, 1, 32, 33, 64, 8192, 8193, 65_537, MEMORY as u64]) as u32;
            let sge = Sge { addr, len, lkey: region.lkey() };
            let roomy = Sge { len: if rng.below(32) == 0 { len } else { MEMORY as u32 }, ..sge };
            let _ = wq.post_recv(&RecvWr { wr_id: 1, sge: roomy });
            let opcode = [Opcode::Send, Opcode::SendWithImm, Opcode::Write, Opcode::WriteWithImm, Opcode::Read][rng.below(5) as usize];
            let request = SendWr {
                wr_id: 2,
                opcode,
                payload: Payload::Sge(sge),
                remote_addr: addr,
                rkey: 1,
                imm: 3,
                signaled: rng.below(2) == 0,
                when_sent: false,
            };
            let _ = wq.post_send(&[request]);
            if rng.below(8) == 0 {
                wire.arm(|_| Ok(())).unwrap();
            }
            let result = if rng.below(8) == 0 { wire.kick(&mut wq) } else { wire.progress(&mut wq).map(drop) };
            wq.poll_completions(&mut out);
            if let Err(fault) = result {
                wq.fail(fault);
                faults += 1;
                break;
            }
        }
        wire.close();
        drop(b);
        assert!(bytes[..MARGIN].iter().chain(&bytes[MARGIN + MEMORY..]).all(|b| *b == 0x5a), "seed {seed} wrote outside");
    }
    assert!(steps > 6000 && faults > 500, "{steps} steps, {faults} faults: this tested little");
}

/// Two wires that each sleep whenever they find nothing once they are armed.
struct Sleepers([(ShmWire, WorkQueues); 2]);

impl Sleepers {
    /// Over the two sides of a segment.
    fn new(sides: [Segment; 2]) -> Sleepers {
        let (a, b) = UnixStream::pair().unwrap();
        let caps = QpCaps { send_depth: 16, recv_depth: 16, ..QpCaps::default() };
        let mut ends = [a, b].map(OwnedFd::new).into_iter().zip(sides);
        Sleepers(std::array::from_fn(|_| {
            let (socket, segment) = ends.next().unwrap();
            let mut wq = WorkQueues::new(&caps, RailStats::detached(), 1, 0);
            wq.ready(7);
            (ShmWire::new(segment, socket, true, 16, wq.stats.clone()), wq)
        }))
    }

    /// The first one writes all of one memory to the beginning of another.
    fn write(&mut self, from: &MemoryRegion, to: &MemoryRegion) {
        let [(sender, sends), _] = &mut self.0;
        let sge = Sge { addr: from.memory().addr() as u64, len: from.memory().len() as u32, lkey: from.lkey() };
        let request = SendWr {
            wr_id: 2,
            opcode: Opcode::Write,
            payload: Payload::Sge(sge),
            remote_addr: to.memory().addr() as u64,
            rkey: to.rkey(),
            imm: 0,
            signaled: true,
            when_sent: false,
        };
        sends.post_send(&[request]).unwrap();
        sender.kick(sends).unwrap();
        let mut out = [Completion { wr_id: 0, status: WcStatus::Success, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 }];
        while self.0[0].1.poll_completions(&mut out) == 0 {
            let mut awake = 0;
            for (wire, wq) in &mut self.0 {
                if wire.segment.side(wire.segment.me).sleeping.load(Ordering::Relaxed) != 0 {
                    continue;
                }
                awake += 1;
                wire.arm(|_| Ok(())).unwrap();
                while wire.progress(wq).unwrap() {
                    wire.arm(|_| Ok(())).unwrap();
                }
            }
            assert!(awake > 0, "both sleep");
        }
        assert_eq!(out[0].status, WcStatus::Success);
    }

    fn get(&self, counters: [[RailCounter; 2]; 3]) -> [[u64; 2]; 3] {
        counters.map(|[sends, receives]| [self.0[0].1.stats.get(sends), self.0[1].1.stats.get(receives)])
    }

    /// Bytes that the second one has asked for.
    fn asked_for(&self) -> u64 {
        let segment = &self.0[0].0.segment;
        segment.direction(segment.me).fill_tail.load(Ordering::Relaxed)
    }
}

const PATHS: [[RailCounter; 2]; 3] = [
    [RailCounter::TxMapped, RailCounter::RxMapped],
    [RailCounter::TxCma, RailCounter::RxCma],
    [RailCounter::TxBounce, RailCounter::RxBounce],
];

/// What it is asked for wakes the sender. Later bytes of that memory go as if it were private, which the receiver may not be allowed to read.
#[test]
fn who_cannot_map_memory_is_sent_what_is_in_it() {
    const LEN: usize = 200_000;
    let me = Some(std::process::id() as i32);
    for cma in [CrossMemory::Always, CrossMemory::Never] {
        let (mut dialer, mut acceptor) = sides(64 * 1024);
        dialer.introduce(true);
        acceptor.introduce(true);
        dialer.prove_peer(me, cma);
        acceptor.prove_peer(me, cma);
        let mut wires = Sleepers::new([dialer, acceptor]);
        let from = memory::alloc(LEN).unwrap();
        wires.0[1].0.maps.mapped.push((memory::find(from.addr(), LEN).unwrap().id, None));
        // SAFETY: fresh bytes, which are freed at the end.
        let source = MemoryRegion::register(unsafe { UserMemory::new(from, LEN) }, Access::all()).unwrap();
        let mut bytes = vec![0u8; LEN];
        // SAFETY: looked at only when nothing is in flight.
        let target = MemoryRegion::register(unsafe { UserMemory::new(bytes.as_mut_ptr(), LEN) }, Access::all()).unwrap();
        for round in 1..=3u8 {
            // SAFETY: nothing reads them now.
            unsafe { from.write_bytes(round, LEN) };
            wires.write(&source, &target);
            assert!(bytes.iter().all(|byte| *byte == round));
            let [mapped, read, bounced] = wires.get(PATHS);
            assert_eq!((mapped, read[0], bounced[0]), ([0; 2], read[1], bounced[1]));
            assert_eq!(read[0] + bounced[0], u64::from(round) * LEN as u64);
            assert!(cma == CrossMemory::Always || read[0] == 0, "it was read in spite of that");
            assert_eq!(wires.asked_for(), LEN as u64, "once");
        }
        drop(source);
        memory::free(from).unwrap();
    }
}

/// What is refused may be the first part of a copy that both sides were to make.
#[test]
fn who_cannot_read_memory_is_sent_what_is_in_it() {
    const LEN: usize = 20_000;
    // SAFETY: a new mapping.
    let from = unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(std::ptr::null_mut(), LEN, access, kind, -1, 0)
    };
    assert_ne!(from, libc::MAP_FAILED);
    // SAFETY: that mapping, which the child below does not get.
    assert_eq!(unsafe { libc::madvise(from, LEN, libc::MADV_DONTFORK) }, 0);
    let (mut dialer, mut acceptor) = sides(64 * 1024);
    dialer.introduce(true);
    acceptor.introduce(true);
    // SAFETY: the child makes one system call, again and again.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        loop {
            // SAFETY: as above.
            unsafe { libc::pause() };
        }
    }
    dialer.prove_peer(Some(std::process::id() as i32), CrossMemory::Always);
    // The child has the cookie, too.
    acceptor.prove_peer(Some(pid), CrossMemory::Always);
    let mut wires = Sleepers::new([dialer, acceptor]);
    // SAFETY: mapped above, until this process ends.
    let source = MemoryRegion::register(unsafe { UserMemory::new(from.cast(), LEN) }, Access::all()).unwrap();
    let mut bytes = vec![0u8; LEN];
    // SAFETY: looked at only when nothing is in flight.
    let target = MemoryRegion::register(unsafe { UserMemory::new(bytes.as_mut_ptr(), LEN) }, Access::all()).unwrap();
    let written = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        for round in 1..=3u8 {
            // SAFETY: nothing reads them now.
            unsafe { from.write_bytes(round, LEN) };
            wires.write(&source, &target);
            assert!(bytes.iter().all(|byte| *byte == round));
        }
    }));
    // SAFETY: our own child; no status is asked for.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    // SAFETY: as above.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    assert!(written.is_ok());
    assert_eq!(wires.get(PATHS), [[0; 2], [0; 2], [3 * LEN as u64; 2]]);
    assert_eq!(wires.asked_for(), LEN as u64, "once");
}

/// The peer rings for what this side has received by then, while it arms again: nothing rings for what comes next.
#[test]
fn who_reads_a_doorbell_for_nothing_new_is_to_arm_again() {
    let (dialer, acceptor) = sides(64 * 1024);
    dialer.introduce(true);
    acceptor.introduce(true);
    let (a, b) = UnixStream::pair().unwrap();
    let peers = ControlSocket::new(OwnedFd::new(b), true);
    let mut wq = WorkQueues::new(&QpCaps { send_depth: 16, recv_depth: 16, ..QpCaps::default() }, RailStats::detached(), 1, 0);
    wq.ready(7);
    let mut wire = ShmWire::new(dialer, OwnedFd::new(a), true, 16, RailStats::detached());
    let sleeping = &acceptor.side(0).sleeping;
    // Armed, or at a poll that reads the socket in any case.
    for armed in [true, false] {
        wire.arm(|_| Ok(())).unwrap();
        (wire.armed, wire.idle) = if armed { (true, 0) } else { (false, IDLE_POLLS - 1) };
        assert_eq!(sleeping.swap(0, Ordering::SeqCst), 1);
        peers.doorbell();
        assert!(wire.progress(&mut wq).unwrap(), "who sleeps now is not woken");
        wire.arm(|_| Ok(())).unwrap();
        assert_eq!(sleeping.load(Ordering::SeqCst), 1);
        assert!(!wire.progress(&mut wq).unwrap(), "there is nothing to do");
    }
}

/// A look at the control socket is a system call: who polls many wires that are armed would make one for each. But what is in it ends every sleep.
#[test]
fn the_control_socket_of_an_armed_wire_is_read_seldom_unless_its_doorbell_was_rung() {
    let (dialer, acceptor) = sides(64 * 1024);
    dialer.introduce(true);
    acceptor.introduce(true);
    let (a, b) = UnixStream::pair().unwrap();
    let peers = ControlSocket::new(OwnedFd::new(b), true);
    let mut wq = WorkQueues::new(&QpCaps { send_depth: 16, recv_depth: 16, ..QpCaps::default() }, RailStats::detached(), 1, 0);
    wq.ready(7);
    let mut wire = ShmWire::new(dialer, OwnedFd::new(a), true, 16, RailStats::detached());
    wire.arm(|_| Ok(())).unwrap();
    let polls = |wire: &mut ShmWire, wq: &mut WorkQueues, most| (1..=most).find(|_| wire.progress(wq).unwrap());
    assert_eq!(polls(&mut wire, &mut wq, 10 * ARMED_POLLS), None);
    let looks = wq.stats.get(RailCounter::Syscalls);
    assert!((1..=10).contains(&looks), "{looks} system calls");
    // The bell of an earlier sleep comes late.
    peers.doorbell();
    assert!(polls(&mut wire, &mut wq, ARMED_POLLS).is_some(), "the socket stays readable");
    assert_eq!(polls(&mut wire, &mut wq, 1), None);
    acceptor.side(0).sleeping.store(0, Ordering::SeqCst);
    peers.doorbell();
    assert_eq!(polls(&mut wire, &mut wq, 1), Some(1), "it was rung");
}

/// A process that the peer forked has its cookie, and may get its pid.
#[test]
fn nothing_is_written_to_another_process_that_has_the_pid_of_the_peer() {
    let (mut dialer, acceptor) = sides(64 * 1024);
    // Before the fork: a copy of this process has its cookie where this one has it.
    acceptor.introduce(false);
    // SAFETY: the child makes one system call, again and again.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        loop {
            // SAFETY: as above.
            unsafe { libc::pause() };
        }
    }
    dialer.prove_peer(Some(pid), CrossMemory::Always);
    let [from, to] = [[7u8; 8], [0; 8]];
    // SAFETY: eight live bytes, and eight of the other process that nothing in it uses.
    let write = || unsafe { dialer.write_peer(from.as_ptr(), to.as_ptr() as u64, 8) };
    let before = write();
    // SAFETY: our own child; no status is asked for.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    // SAFETY: as above.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    assert!(before && !write());
    let Some(_squatter) = Squatter::of(pid) else { return };
    dialer.seen.set(0);
    assert!(!dialer.is_the_peer());
    // It takes the pid after the look.
    dialer.seen.set(clock::now());
    assert!(!write(), "what was written in another process counts as written");
}
