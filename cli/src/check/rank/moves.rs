//! The common moves of a rank: connecting, sending, receiving, waiting, all bounded by the rule's time.

use super::{Flow, Rank, own};
use crate::check::memory::Mem;
use crate::check::verdict::{Verdict, during, ensure};
use crate::plugin::{Buf, HANDLE, Handle, Opaque};

/// Tag of messages whose tag does not matter.
const TAG: i32 = 7;
/// Bytes of a message's number, where a message is told from another by it.
pub const STAMP: usize = 8;

/// Memory that is registered with a comm.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// The memory.
    pub mem: Mem,
    /// Its registration.
    pub mr: Opaque,
    comm: Opaque,
}

impl Buffer {
    /// Part of it as a buffer of a receive.
    pub fn part(&self, at: usize, len: usize, tag: i32) -> Buf {
        Buf { addr: self.mem.ptr(at), len, tag, mr: self.mr }
    }
}

/// Bytes that depend on `seed`, for messages of up to a length: made once, as all are parts of one sequence.
#[derive(Debug)]
pub struct Reusable(Vec<u8>);

impl Reusable {
    /// For messages of up to `most` bytes.
    pub fn new(most: usize) -> Reusable {
        Reusable(pattern(1, most + 4096))
    }

    /// Message number `n`.
    pub fn message(&self, n: usize, len: usize) -> &[u8] {
        let at = n.wrapping_mul(269) % (self.0.len() - len).max(1);
        &self.0[at..at + len]
    }
}

/// `len` bytes that depend on `seed`.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        out.extend_from_slice(&x.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
    }
    out.truncate(len);
    out
}

impl Rank {
    /// Listens.
    pub fn listen(&self) -> Verdict<(Handle, Opaque)> {
        self.note("listen");
        Ok(self.plugin.listen(self.dev)?)
    }

    /// Connects, however often the call must be repeated, with the handle in one place.
    pub fn connect(&self, handle: &mut Handle) -> Verdict<Opaque> {
        self.note("connect");
        self.until("connect to give a comm", || Ok(self.plugin.connect(self.dev, handle)?))
    }

    /// Accepts, however often the call must be repeated.
    pub fn accept(&self, listen: Opaque) -> Verdict<Opaque> {
        self.note("accept");
        self.until("accept to give a comm", || Ok(self.plugin.accept(listen)?))
    }

    /// Closes a listen comm.
    pub fn close_listen(&self, listen: Opaque) -> Verdict {
        self.note("closeListen");
        Ok(self.plugin.close_listen(listen)?)
    }

    /// Closes a send comm.
    pub fn close_send(&self, comm: Opaque) -> Verdict {
        self.note("closeSend");
        Ok(self.plugin.close_send(comm)?)
    }

    /// Closes a receive comm.
    pub fn close_recv(&self, comm: Opaque) -> Verdict {
        self.note("closeRecv");
        Ok(self.plugin.close_recv(comm)?)
    }

    /// Closes this rank's end of a comm of `one_way`.
    pub fn close(&self, comm: Opaque) -> Verdict {
        if self.index == 0 { self.close_recv(comm) } else { self.close_send(comm) }
    }

    /// Gives the other rank a handle.
    pub fn give(&self, handle: &Handle) -> Verdict {
        self.say(handle)
    }

    /// Takes a handle from the other rank.
    pub fn take(&self) -> Verdict<Handle> {
        let bytes = self.hear()?;
        let mut handle = [0; HANDLE];
        ensure(bytes.len() == HANDLE, || "the ranks lost step: no handle".into())?;
        handle.copy_from_slice(&bytes);
        Ok(handle)
    }

    /// A comm on which rank 1 sends and rank 0 receives, made as NCCL does: the listen comm is closed once it has served.
    pub fn one_way(&self) -> Verdict<Opaque> {
        if self.index == 0 {
            let (handle, listen) = self.listen()?;
            self.give(&handle)?;
            let comm = self.accept(listen)?;
            self.close_listen(listen)?;
            Ok(comm)
        } else {
            self.connect(&mut self.take()?)
        }
    }

    /// A send comm to the other rank and a receive comm from it.
    pub fn both_ways(&self) -> Verdict<(Opaque, Opaque)> {
        let (mine, listen) = self.listen()?;
        self.give(&mine)?;
        let mut theirs = self.take()?;
        let (mut send, mut recv) = (None, None);
        let both = self.until("connect and accept to give a comm each", || {
            if send.is_none() {
                self.note("connect");
                send = self.plugin.connect(self.dev, &mut theirs)?;
            }
            if recv.is_none() {
                self.note("accept");
                recv = self.plugin.accept(listen)?;
            }
            Ok(send.zip(recv))
        })?;
        self.close_listen(listen)?;
        Ok(both)
    }

    /// A comm of this process with itself: the sending end, the receiving end, and the listen comm.
    pub fn to_itself(&self) -> Verdict<(Opaque, Opaque, Opaque)> {
        let (mut handle, listen) = self.listen()?;
        let (mut send, mut recv) = (None, None);
        let (send, recv) = self.until("connect and accept, in one process, to give a comm each", || {
            if send.is_none() {
                self.note("connect");
                send = self.plugin.connect(self.dev, &mut handle)?;
            }
            // In v4 accept waits, and connect comes first.
            if recv.is_none() && (self.version() > 4 || send.is_some()) {
                self.note("accept");
                recv = self.plugin.accept(listen)?;
            }
            Ok(send.zip(recv))
        })?;
        Ok((send, recv, listen))
    }

    /// Fresh memory, registered with `comm`.
    pub fn buffer(&self, comm: Opaque, len: usize) -> Verdict<Buffer> {
        let mem = own("memory", Mem::new(len))?;
        self.register(comm, mem)
    }

    /// All of `mem`, registered with `comm`.
    pub fn register(&self, comm: Opaque, mem: Mem) -> Verdict<Buffer> {
        self.note("regMr");
        let mr = self.plugin.reg_mr(comm, mem.ptr(0), mem.len())?;
        Ok(Buffer { mem, mr, comm })
    }

    /// Deregisters.
    pub fn release(&self, buffer: Buffer) -> Verdict {
        self.note("deregMr");
        Ok(self.plugin.dereg_mr(buffer.comm, buffer.mr)?)
    }

    /// One try of a send. `None`: not now.
    pub fn try_send(&self, comm: Opaque, from: &Buffer, at: usize, len: usize, tag: i32) -> Verdict<Option<Opaque>> {
        self.note("isend, irecv or test");
        Ok(self.plugin.isend(comm, from.mem.ptr(at), len, tag, from.mr)?)
    }

    /// One try of a receive of one buffer. `None`: not now.
    pub fn try_recv(&self, comm: Opaque, to: &Buffer, at: usize, len: usize, tag: i32) -> Verdict<Option<Opaque>> {
        self.note("isend, irecv or test");
        Ok(self.plugin.irecv(comm, &[to.part(at, len, tag)])?)
    }

    /// Posts a send, however often it must be tried.
    pub fn isend(&self, comm: Opaque, from: &Buffer, at: usize, len: usize) -> Verdict<Opaque> {
        self.until("isend to take a message", || self.try_send(comm, from, at, len, TAG))
    }

    /// Posts a receive, however often it must be tried.
    pub fn irecv(&self, comm: Opaque, to: &Buffer, at: usize, len: usize) -> Verdict<Opaque> {
        self.until("irecv to take a receive", || self.try_recv(comm, to, at, len, TAG))
    }

    /// One test. The sizes once done.
    pub fn test(&self, request: Opaque) -> Verdict<Option<[i32; 8]>> {
        Ok(self.plugin.test(request)?)
    }

    /// Waits for a request; its first size, which only the rules of sizes look at.
    pub fn wait(&self, what: &str, request: Opaque) -> Verdict<i32> {
        Ok(self.until(what, || during(what, self.test(request)))?[0])
    }

    /// Runs a flow to its end.
    pub fn flow(&self, mut flow: Flow) -> Verdict {
        while !flow.ended() {
            self.until(&flow.waits_for(), || Ok(flow.step(self)?.then_some(())))?;
        }
        Ok(())
    }

    /// Sends bytes, and waits until they are sent.
    pub fn send(&self, comm: Opaque, bytes: &[u8]) -> Verdict {
        let from = self.buffer(comm, bytes.len().max(1))?;
        from.mem.write(0, bytes);
        let request = self.isend(comm, &from, 0, bytes.len())?;
        self.wait("a send", request)?;
        self.release(from)
    }

    /// Receives a message of `len` bytes.
    pub fn recv(&self, comm: Opaque, len: usize) -> Verdict<Vec<u8>> {
        let to = self.buffer(comm, len.max(1))?;
        let request = self.irecv(comm, &to, 0, len)?;
        self.wait("a receive", request)?;
        self.release(to)?;
        Ok(to.mem.read(0, len))
    }

    /// Over a comm of `one_way`: a message that proves that the comm works.
    pub fn proof(&self, comm: Opaque, seed: u64, len: usize) -> Verdict {
        let bytes = pattern(seed, len);
        if self.index == 1 {
            return self.send(comm, &bytes);
        }
        let got = self.recv(comm, len)?;
        ensure(got == bytes, || difference(&got, &bytes))
    }
}

/// Says how two messages differ.
pub fn difference(got: &[u8], sent: &[u8]) -> String {
    if got.len() != sent.len() {
        return format!("{} bytes arrived, {} were sent", got.len(), sent.len());
    }
    match got.iter().zip(sent).position(|(a, b)| a != b) {
        Some(at) => format!("byte {at} of {} arrived as {:#04x}, sent was {:#04x}", sent.len(), got[at], sent[at]),
        None => "no difference".into(),
    }
}

/// The number at the beginning of a message.
pub fn stamp(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(u64::MAX, |b| u64::from_ne_bytes(*b))
}
