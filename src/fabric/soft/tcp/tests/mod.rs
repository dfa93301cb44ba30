//! Tests of the TCP wire: two queue pairs of one process over socket pairs, driven by hand.

mod faults;
mod model;
mod moves;

use std::os::unix::net::UnixStream;

use super::super::MemoryRegion;
use super::super::work_queues::{Fault, WorkQueues};
use super::*;
use crate::base::stats::RailStats;

/// Registered memory.
pub struct Memory {
    words: Box<[u64]>,
    len: usize,
    pub mr: Option<MemoryRegion>,
}

pub const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

impl Memory {
    pub fn new(len: usize, access: Access) -> Memory {
        let mut words = vec![0u64; len.div_ceil(8).max(1)].into_boxed_slice();
        // SAFETY: `words` outlives the region: fields drop in order of declaration only after `drop` below took the region.
        let mr = MemoryRegion::register(unsafe { UserMemory::new(words.as_mut_ptr().cast(), len.max(1)) }, access).unwrap();
        Memory { words, len, mr: Some(mr) }
    }

    /// Bytes that depend on `seed`.
    pub fn patterned(len: usize, seed: u64) -> Memory {
        let mut memory = Memory::new(len, ALL);
        memory.fill(seed);
        memory
    }

    pub fn fill(&mut self, seed: u64) {
        for (i, word) in self.words.iter_mut().enumerate() {
            *word = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed.wrapping_mul(0x1234_5678_9abc_def1));
        }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `words` holds at least `len` bytes; the tests read only while nothing is in flight.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }

    pub fn addr(&self) -> u64 {
        self.words.as_ptr() as u64
    }

    pub fn key(&self) -> u32 {
        self.mr.as_ref().unwrap().rkey()
    }

    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.addr() + offset as u64, len: len as u32, lkey: self.key() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.mr = None;
    }
}

/// One end.
pub struct Side {
    pub wq: WorkQueues,
    pub wire: TcpWire,
    pub done: Vec<Completion>,
}

#[derive(Default)]
pub struct Setup {
    pub streams: usize,
    /// SO_SNDBUF of every stream.
    pub buffer: Option<usize>,
    pub caps: QpCaps,
    pub start: u64,
}

pub fn streams(buffer: Option<usize>) -> (OwnedFd, OwnedFd) {
    let (a, b) = UnixStream::pair().unwrap();
    for end in [&a, &b] {
        end.set_nonblocking(true).unwrap();
        if let Some(size) = buffer {
            socket2::SockRef::from(end).set_send_buffer_size(size).unwrap();
        }
    }
    (OwnedFd::new(a), OwnedFd::new(b))
}

pub fn side(setup: &Setup, control: OwnedFd, data: Vec<OwnedFd>) -> Side {
    let mut wq = WorkQueues::new(&setup.caps, RailStats::detached(), 7, setup.start);
    wq.ready(setup.caps.rnr_retry);
    let wire = TcpWire::new(control, data);
    wq.sq.copies = wire.copies();
    Side { wq, wire, done: Vec::new() }
}

pub fn pair(setup: Setup) -> (Side, Side) {
    let control = streams(setup.buffer);
    let (a, b): (Vec<OwnedFd>, Vec<OwnedFd>) = (0..setup.streams).map(|_| streams(setup.buffer)).unzip();
    (side(&setup, control.0, a), side(&setup, control.1, b))
}

impl Side {
    pub fn post(&mut self, request: SendWr<'_>) {
        self.wq.post_send(&[request]).unwrap();
        self.wire.kick(&mut self.wq).unwrap();
    }

    pub fn hold(&mut self, request: SendWr<'_>) {
        let from = self.wq.sq.posted;
        self.wq.post_send(&[request]).unwrap();
        self.wire.hold(from);
    }

    pub fn recv(&mut self, wr_id: u64, sge: Sge) {
        self.wq.post_recv(&RecvWr { wr_id, sge }).unwrap();
    }

    /// One step, and what completed.
    pub fn step(&mut self) -> Result<bool, Fault> {
        let moved = self.wire.progress(&mut self.wq)?;
        self.poll_completions();
        Ok(moved)
    }

    pub fn poll_completions(&mut self) {
        let none = Completion { wr_id: 0, status: WcStatus::Success, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 };
        let mut out = [none; 16];
        loop {
            let n = self.wq.poll_completions(&mut out);
            self.done.extend_from_slice(&out[..n]);
            if n == 0 {
                return;
            }
        }
    }

    /// Takes the completions so far, as (wr_id, status).
    pub fn took(&mut self) -> Vec<(u64, WcStatus)> {
        self.done.drain(..).map(|c| (c.wr_id, c.status)).collect()
    }
}

pub fn write(wr_id: u64, from: Sge, to: &Memory, offset: usize) -> SendWr<'static> {
    SendWr {
        wr_id,
        opcode: Opcode::Write,
        payload: Payload::Sge(from),
        remote_addr: to.addr() + offset as u64,
        rkey: to.key(),
        imm: 0,
        signaled: true,
        when_sent: false,
    }
}

pub fn of(opcode: Opcode, request: SendWr<'_>) -> SendWr<'_> {
    SendWr { opcode, ..request }
}

/// Steps both ends until `until`, which must come true.
pub fn drive(a: &mut Side, b: &mut Side, mut until: impl FnMut(&Side, &Side) -> bool) {
    let mut idle = 0u32;
    while !until(a, b) {
        let moved = a.step().unwrap() | b.step().unwrap();
        idle = if moved { 0 } else { idle + 1 };
        assert!(idle < 100_000, "stuck: a has {:?}, b has {:?}", a.done, b.done);
    }
}

/// Steps both ends until neither moves.
pub fn settle(a: &mut Side, b: &mut Side) {
    let mut idle = 0;
    while idle < 3 {
        let moved = a.step().unwrap() | b.step().unwrap();
        idle = if moved { 0 } else { idle + 1 };
    }
}

/// Steps both ends until each has failed.
pub fn faults(a: &mut Side, b: &mut Side) -> (Fault, Fault) {
    let (mut of_a, mut of_b) = (None, None);
    for _ in 0..100_000 {
        for (side, fault) in [(&mut *a, &mut of_a), (&mut *b, &mut of_b)] {
            if fault.is_none()
                && let Err(found) = side.step()
            {
                side.wq.fail(found.clone());
                side.poll_completions();
                *fault = Some(found);
            }
        }
        if of_a.is_some() && of_b.is_some() {
            break;
        }
    }
    (of_a.expect("no fault at a"), of_b.expect("no fault at b"))
}
