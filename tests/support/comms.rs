//! The common moves of a rank: connecting, sending, receiving, waiting, all bounded and all reporting the plugin's own status.

use super::plugin::{Buf, Handle, Opaque, Plugin, Result};
use super::{Chan, Ctx, until};

/// Page-aligned memory that the test owns.
pub struct Mem {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: plain memory.
unsafe impl Send for Mem {}
// SAFETY: as above; contents are copied in and out.
unsafe impl Sync for Mem {}

impl Mem {
    /// `len` zero bytes.
    pub fn new(len: usize) -> Mem {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping.
        let ptr = unsafe { libc::mmap(std::ptr::null_mut(), len.max(1), prot, flags, -1, 0) };
        assert_ne!(ptr, libc::MAP_FAILED);
        Mem { ptr: ptr.cast(), len }
    }

    pub fn filled(bytes: &[u8]) -> Mem {
        let mem = Mem::new(bytes.len());
        mem.write(0, bytes);
        mem
    }

    pub fn ptr(&self, at: usize) -> *mut u8 {
        assert!(at <= self.len);
        // SAFETY: inside the mapping.
        unsafe { self.ptr.add(at) }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr(at), bytes.len()) }
    }

    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut out = vec![0; len];
        // SAFETY: inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr(at), out.as_mut_ptr(), len) }
        out
    }
}

impl Drop for Mem {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.ptr.cast(), self.len.max(1)) };
    }
}

/// Sends a handle to a rank.
pub fn give(chan: &Chan, handle: &Handle) {
    chan.send(handle).expect("the other rank");
}

/// Receives a handle from a rank.
#[track_caller]
pub fn get(chan: &Chan) -> Handle {
    chan.recv().try_into().expect("a handle")
}

/// Connects, however often the call must be repeated.
#[track_caller]
pub fn connect(plugin: &Plugin, dev: i32, handle: &mut Handle) -> Result<Opaque> {
    until("connect", || plugin.connect(dev, handle).transpose())
}

/// Accepts, however often the call must be repeated.
#[track_caller]
pub fn accept(plugin: &Plugin, listen: Opaque) -> Result<Opaque> {
    until("accept", || plugin.accept(listen).transpose())
}

/// A send comm to the other of two ranks and a receive comm from it, made as NCCL makes them. The listen comm is closed.
#[track_caller]
pub fn both_ways(ctx: &Ctx, plugin: &Plugin, dev: i32) -> Result<(Opaque, Opaque)> {
    both_ways_on(ctx.to(1 - ctx.rank), plugin, dev)
}

/// As `both_ways`, with the channel given.
#[track_caller]
pub fn both_ways_on(chan: &Chan, plugin: &Plugin, dev: i32) -> Result<(Opaque, Opaque)> {
    let (mine, listen) = plugin.listen(dev)?;
    give(chan, &mine);
    let mut theirs = get(chan);
    let (mut send, mut recv) = (None, None);
    until("both comms", || {
        if send.is_none() {
            send = plugin.connect(dev, &mut theirs).transpose();
        }
        // v4 connects and accepts in one blocking call each; the connector is usable at once.
        if recv.is_none() {
            recv = plugin.accept(listen).transpose();
        }
        (send.is_some() && recv.is_some() || matches!(send, Some(Err(_))) || matches!(recv, Some(Err(_)))).then_some(())
    });
    plugin.close_listen(listen)?;
    match (send, recv) {
        (Some(Ok(send)), Some(Ok(recv))) => Ok((send, recv)),
        (Some(Err(e)), _) | (_, Some(Err(e))) => Err(e),
        _ => unreachable!("both are there or one failed"),
    }
}

/// A send comm of this rank and the receive comm that it is connected to. The listen comm is closed.
#[track_caller]
pub fn to_itself(plugin: &Plugin, dev: i32) -> Result<(Opaque, Opaque)> {
    let (mut handle, listen) = plugin.listen(dev)?;
    let (mut send, mut recv) = (None, None);
    let pair = until("both comms", || {
        let mut step = || -> Result<()> {
            if send.is_none() {
                send = plugin.connect(dev, &mut handle)?;
            }
            if recv.is_none() {
                recv = plugin.accept(listen)?;
            }
            Ok(())
        };
        match step() {
            Err(e) => Some(Err(e)),
            Ok(()) => send.zip(recv).map(Ok),
        }
    });
    if pair.is_err() {
        let _ = (send.map(|s| plugin.close_send(s)), recv.map(|r| plugin.close_recv(r)));
    }
    plugin.close_listen(listen)?;
    pair
}

/// A message over the comms of `to_itself`, checked.
#[track_caller]
pub fn exchange_with_itself(plugin: &Plugin, send: Opaque, recv: Opaque, bytes: &[u8]) {
    let (from, to) = (Mem::filled(bytes), Mem::new(bytes.len()));
    let from_mr = plugin.reg_mr(send, from.ptr(0), from.len()).expect("regMr");
    let to_mr = plugin.reg_mr(recv, to.ptr(0), to.len()).expect("regMr");
    let r = irecv(plugin, recv, &to, 0, to.len(), 1, to_mr).expect("irecv");
    let (mut s, mut sent, mut got) = (None, None, None);
    until("a message to oneself", || {
        s = s.or_else(|| plugin.isend(send, from.ptr(0), from.len(), 1, from_mr).expect("isend"));
        sent = sent.or_else(|| s.and_then(|s| plugin.test(s).expect("test")));
        got = got.or_else(|| plugin.test(r).expect("test"));
        sent.zip(got)
    });
    assert!(to.read(0, to.len()) == bytes);
    plugin.dereg_mr(send, from_mr).expect("deregMr");
    plugin.dereg_mr(recv, to_mr).expect("deregMr");
}

/// Rank 0 receives, the other sends: this rank's comm.
#[track_caller]
pub fn one_way(ctx: &Ctx, plugin: &Plugin, dev: i32) -> Result<Opaque> {
    let chan = ctx.to(1 - ctx.rank);
    if ctx.rank == 0 {
        let (mine, listen) = plugin.listen(dev)?;
        give(chan, &mine);
        let comm = accept(plugin, listen);
        plugin.close_listen(listen)?;
        comm
    } else {
        connect(plugin, dev, &mut get(chan))
    }
}

/// Waits for the end of a request.
#[track_caller]
pub fn wait(plugin: &Plugin, request: Opaque) -> Result<[i32; 8]> {
    until("a request", || plugin.test(request).transpose())
}

/// Posts a send, however often it must be tried.
#[track_caller]
pub fn isend(plugin: &Plugin, comm: Opaque, from: &Mem, at: usize, len: usize, tag: i32, mr: Opaque) -> Result<Opaque> {
    until("isend", || plugin.isend(comm, from.ptr(at), len, tag, mr).transpose())
}

/// Posts a receive of one buffer, however often it must be tried.
#[track_caller]
pub fn irecv(plugin: &Plugin, comm: Opaque, to: &Mem, at: usize, len: usize, tag: i32, mr: Opaque) -> Result<Opaque> {
    let buf = Buf { addr: to.ptr(at), len, tag, mr };
    until("irecv", || plugin.irecv(comm, &[buf]).transpose())
}

/// Sends and waits.
#[track_caller]
pub fn send(plugin: &Plugin, comm: Opaque, bytes: &[u8]) -> Result<usize> {
    let mem = Mem::filled(bytes);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len().max(1))?;
    let result = isend(plugin, comm, &mem, 0, bytes.len(), 7, mr).and_then(|r| wait(plugin, r));
    plugin.dereg_mr(comm, mr)?;
    Ok(result?[0] as usize)
}

/// Receives up to `most` bytes and waits.
#[track_caller]
pub fn recv(plugin: &Plugin, comm: Opaque, most: usize) -> Result<Vec<u8>> {
    let mem = Mem::new(most.max(1));
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len())?;
    let result = irecv(plugin, comm, &mem, 0, most, 7, mr).and_then(|r| wait(plugin, r));
    plugin.dereg_mr(comm, mr)?;
    Ok(mem.read(0, result?[0] as usize))
}

/// Exchanges over both comms until both ranks have met what they wait for, `what`.
pub fn exchange_until(ctx: &Ctx, plugin: &Plugin, (send, recv): (Opaque, Opaque), what: &str, mut met: impl FnMut() -> bool) {
    let peer = ctx.to(1 - ctx.rank);
    until(what, || {
        exchange(plugin, ctx.rank, send, recv, &[8, 100_000, 300_000]).expect("exchange");
        let met = met();
        peer.send(&[u8::from(met)]).expect("rank");
        (peer.recv() == [1] && met).then_some(())
    });
}

/// Byte-exact traffic between two ranks over the comms of `both_ways`: each size each way, both at once.
#[track_caller]
pub fn exchange(plugin: &Plugin, rank: usize, send: Opaque, recv: Opaque, sizes: &[usize]) -> Result<()> {
    let most = sizes.iter().copied().max().unwrap_or(0).max(1);
    let (out, inn) = (Mem::new(most), Mem::new(most));
    let out_mr = plugin.reg_mr(send, out.ptr(0), most)?;
    let in_mr = plugin.reg_mr(recv, inn.ptr(0), most)?;
    for (i, &len) in sizes.iter().enumerate() {
        out.write(0, &super::pattern((i * 2 + rank) as u64, len));
        let r = irecv(plugin, recv, &inn, 0, len, 3, in_mr)?;
        // The other rank may be waiting for our receive to move on, so both are driven by turns.
        let mut sending = None;
        let (mut sent, mut received) = (None, None);
        until("an exchange", || {
            let mut step = || -> Result<()> {
                if sending.is_none() {
                    sending = plugin.isend(send, out.ptr(0), len, 3, out_mr)?;
                }
                if let (Some(s), None) = (sending, sent) {
                    sent = plugin.test(s)?;
                }
                if received.is_none() {
                    received = plugin.test(r)?;
                }
                Ok(())
            };
            match step() {
                Err(e) => Some(Err(e)),
                Ok(()) => (sent.is_some() && received.is_some()).then_some(Ok(())),
            }
        })?;
        assert_eq!((sent.expect("sent")[0] as usize, received.expect("received")[0] as usize), (len, len));
        assert!(inn.read(0, len) == super::pattern((i * 2 + 1 - rank) as u64, len), "{len} bytes");
    }
    plugin.dereg_mr(send, out_mr)?;
    plugin.dereg_mr(recv, in_mr)
}

/// Sizes on both sides of every threshold.
pub const SIZES: [usize; 16] = [1, 0, 8, 64, 65, 127, 1000, 4095, 4096, 4097, 8192, 8193, 65536, 65537, 1 << 20, (3 << 20) + 5];
