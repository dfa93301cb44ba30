//! Rules of the sizes that test gives, and of sends that are shorter or longer than their receives.

use std::time::Duration;

use super::order::{group, grouped};
use super::{Rule, USUAL};
use crate::check::rank::{Flow, Rank, STAMP, pattern};
use crate::check::verdict::{Stop, Verdict, ensure};

pub const RULES: &[Rule] = &[
    Rule {
        name: "recv-size",
        says: "A message may be shorter than its receive; test of the receive gives the bytes that arrived.",
        source: "README, irecv: sizes can and will be larger than those of the sends; test: the real size",
        run: recv_size,
        ..USUAL
    },
    Rule {
        name: "send-size",
        says: "test of a send gives the bytes that were sent.",
        source: "README, test: sizes is set to the real size sent or received",
        run: send_size,
        ..USUAL
    },
    Rule {
        name: "tag-sizes",
        says: "test of a receive of several buffers gives each buffer's own size, in the order of the buffers.",
        source: "README, test: the n sizes corresponding to the buffers passed to irecv",
        versions: 5..=12,
        run: tag_sizes,
        ..USUAL
    },
    Rule {
        name: "size-0",
        says: "Messages of 0 bytes are messages: they keep their place, complete on both sides, and have the size 0.",
        source: "src/transport/net.cc sendProxyProgress, recvProxyProgress: 0-byte sends are provided for",
        run: size_0,
        ..USUAL
    },
    Rule {
        name: "send-too-long",
        says: "A send longer than its receive is an error of either side, or is cut; it writes nothing behind the receive.",
        source: "README, irecv: it is an error; src/transport/net_ib/p2p.cc cuts, src/transport/net_socket.cc returns ncclInvalidUsage",
        run: send_too_long,
        ..USUAL
    },
];

fn recv_size(rank: &mut Rank) -> Verdict {
    const ROOM: usize = 1 << 20;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, ROOM)?;
    for len in [1, 8, 100, 4096, 70_000, ROOM - 1, ROOM] {
        if rank.index == 1 {
            let request = rank.isend(comm, &buffer, 0, len)?;
            rank.wait("a send", request)?;
        } else {
            let request = rank.irecv(comm, &buffer, 0, ROOM)?;
            let size = rank.wait("a receive", request)?;
            ensure(usize::try_from(size) == Ok(len), || format!("{len} bytes were sent into a receive of {ROOM}; its test gave {size}"))?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn send_size(rank: &mut Rank) -> Verdict {
    const ROOM: usize = 1 << 18;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, ROOM)?;
    for len in [1, 8, 100, 4096, 70_000, ROOM] {
        if rank.index == 1 {
            let request = rank.isend(comm, &buffer, 0, len)?;
            let size = rank.wait("a send", request)?;
            ensure(usize::try_from(size) == Ok(len), || format!("{len} bytes were sent; test of the send gave {size}"))?;
        } else {
            let request = rank.irecv(comm, &buffer, 0, ROOM)?;
            rank.wait("a receive", request)?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn tag_sizes(rank: &mut Rank) -> Verdict {
    let n = group(rank)?;
    let comm = rank.one_way()?;
    let len = |group: usize, tag: usize| STAMP + 16 * tag + group;
    let done = |group: usize, sizes: &[i32], _: &dyn Fn(usize) -> Vec<u8>| {
        for (tag, &size) in sizes.iter().enumerate() {
            let sent = len(group, tag);
            ensure(usize::try_from(size) == Ok(sent), || {
                format!("receive {group}, tag {tag}: {sent} bytes were sent, test gave {size} of {sizes:?}")
            })?;
        }
        Ok(())
    };
    grouped(rank, comm, n, 4096, len, done)?;
    rank.close(comm)
}

fn size_0(rank: &mut Rank) -> Verdict {
    const LENGTHS: [usize; 8] = [0, 8, 0, 0, 100, 4096, 0, 16];
    const ROOM: usize = 4096;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, LENGTHS.len() * ROOM)?;
    let r = &*rank;
    let check = |n: usize, sizes: [i32; 8]| {
        ensure(usize::try_from(sizes[0]) == Ok(LENGTHS[n]), || {
            format!("message {n} has {} bytes, test gave {}; the messages have {LENGTHS:?}", LENGTHS[n], sizes[0])
        })
    };
    if rank.index == 1 {
        rank.flow(Flow::new("send", LENGTHS.len(), 4, |n| r.try_send(comm, &buffer, n * ROOM, LENGTHS[n], 3)).then(check))?;
    } else {
        // Into receives with room, and then, as NCCL may do too, into receives of 0 bytes.
        rank.flow(Flow::new("receive", LENGTHS.len(), 4, |n| r.try_recv(comm, &buffer, n * ROOM, ROOM, 3)).then(check))?;
    }
    for _ in 0..2 {
        let request = if rank.index == 1 { rank.isend(comm, &buffer, 0, 0)? } else { rank.irecv(comm, &buffer, 0, 0)? };
        let size = rank.wait("a message of 0 bytes into a receive of 0 bytes", request)?;
        ensure(size == 0, || format!("test of 0 bytes gave {size}"))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn send_too_long(rank: &mut Rank) -> Verdict {
    const ROOM: usize = 4096;
    const LEN: usize = 6000;
    const MARK: u8 = 0xC3;
    const REFUSED: &[u8] = b"refused";
    /// One look at whether the other rank has got an error.
    const GLANCE: Duration = Duration::from_micros(20);
    let comm = rank.one_way()?;
    // What lies behind the receive belongs to the same registration, as with NCCL's steps, so no NIC would stop a long message there.
    let buffer = rank.buffer(comm, 4 * ROOM)?;
    buffer.mem.fill(0, 4 * ROOM, MARK);
    let bytes = pattern(8, LEN);
    if rank.index == 1 {
        buffer.mem.write(0, &bytes);
    }
    // Each rank says once how it ended; an error of one may be all that ends it for the other.
    let (mut request, mut there) = (None, None);
    let size = rank.until("a send that is longer than its receive to end, well or not", || {
        let mut step = || -> Verdict<Option<i32>> {
            match request {
                None if rank.index == 1 => request = rank.try_send(comm, &buffer, 0, LEN, 3)?,
                None => request = rank.try_recv(comm, &buffer, 0, ROOM, 3)?,
                Some(request) => return Ok(rank.test(request)?.map(|sizes| sizes[0])),
            }
            Ok(None)
        };
        match step() {
            Err(Stop::Fail(_)) => return Ok(Some(None)),
            Ok(Some(size)) => return Ok(Some(Some(size))),
            other => other?,
        };
        if there.is_none() {
            there = rank.hear_within(GLANCE)?;
        }
        Ok(if there.as_deref() == Some(REFUSED) { Some(None) } else { None })
    })?;
    rank.say(if size.is_some() { b"done" } else { REFUSED })?;
    if there.is_none() {
        rank.hear()?;
    }
    if rank.index == 0 {
        let intact = buffer.mem.read(ROOM, 3 * ROOM).iter().all(|&byte| byte == MARK);
        ensure(intact, || format!("a send of {LEN} bytes into a receive of {ROOM} wrote behind it"))?;
        if let Some(size) = size {
            ensure((0..=ROOM as i32).contains(&size), || format!("a receive of {ROOM} bytes got {size}, says its test"))?;
            ensure(buffer.mem.read(0, ROOM) == bytes[..ROOM], || "what was cut off is not the end of the message".into())?;
        }
    }
    // A comm in error may refuse; the processes end anyway.
    let _ = rank.release(buffer);
    let _ = rank.close(comm);
    Ok(())
}
