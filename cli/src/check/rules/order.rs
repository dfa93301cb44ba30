//! Rules of which message meets which receive.

use super::{Rule, USUAL};
use crate::check::rank::{Flow, Rank, STAMP, stamp};
use crate::check::verdict::{Stop, Verdict, ensure};
use crate::plugin::{MAX_RECVS, Opaque};

pub const RULES: &[Rule] = &[
    Rule {
        name: "order",
        says: "Messages of one tag meet the receives in the order in which both were posted, whatever their sizes.",
        source: "README, irecv, note: sends and receives match in the order in which they were posted",
        run: order,
        ..USUAL
    },
    Rule {
        name: "exactly-once",
        says: "Each message arrives, and arrives once.",
        source: "src/transport/net.cc: a step is known by its place in the sequence alone; one too many or few shifts all that follow",
        run: exactly_once,
        ..USUAL
    },
    Rule {
        name: "order-long",
        says: "A comm keeps the order over more messages than it has slots, sequence numbers of a byte, or requests.",
        source: "README, irecv, note; src/transport/net.cc: a connection lives as long as its communicator",
        run: order_long,
        ..USUAL
    },
    Rule {
        name: "tags",
        says: "In a receive of several buffers, each send goes into the buffer of its tag, in whatever order the sends come.",
        source: "README, irecv: tags assign a send to a buffer of the first receive in the queue; src/transport/net.cc recvProxyProgress",
        versions: 5..=12,
        run: tags,
        ..USUAL
    },
];

fn order(rank: &mut Rank) -> Verdict {
    numbered(rank, 64, 1 << 17, &[100_000, 8, 9000, 64])
}

fn exactly_once(rank: &mut Rank) -> Verdict {
    const AT_ONCE: usize = 8;
    const TOTAL: usize = 40;
    const LEN: usize = 512;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, TOTAL * LEN)?;
    let r = &*rank;
    if rank.index == 1 {
        let post = |n: usize| {
            buffer.mem.write(n * LEN, &(n as u64).to_ne_bytes());
            r.try_send(comm, &buffer, n * LEN, LEN, 3)
        };
        rank.flow(Flow::new("send", TOTAL, AT_ONCE, post))?;
    } else {
        let (mut came, mut last) = ([0; TOTAL], 0);
        let done = |n: usize, _| {
            let got = usize::try_from(stamp(&buffer.mem.read(n * LEN, STAMP))).unwrap_or(usize::MAX);
            let times = came.get_mut(got).ok_or_else(|| Stop::Fail(format!("receive {n} got no message that was sent")))?;
            *times += 1;
            ensure(*times == 1, || format!("message {got} arrived {times} times"))?;
            last = last.max(got);
            // Whatever is behind by more than can be on the way at once is lost.
            let lost = came.iter().take(last.saturating_sub(AT_ONCE)).position(|&times| times == 0);
            ensure(lost.is_none(), || format!("message {} did not arrive", lost.unwrap_or(0)))
        };
        rank.flow(Flow::new("receive", TOTAL, AT_ONCE, |n| r.try_recv(comm, &buffer, n * LEN, LEN, 3)).then(done))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn order_long(rank: &mut Rank) -> Verdict {
    numbered(rank, 1000, 64, &[8, 64, 16])
}

/// Messages that carry their number, several at once, into receives of `room` bytes.
fn numbered(rank: &Rank, total: usize, room: usize, lengths: &[usize]) -> Verdict {
    const AT_ONCE: usize = 8;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, AT_ONCE * room)?;
    let at = |n: usize| n % AT_ONCE * room;
    if rank.index == 1 {
        let post = |n: usize| {
            buffer.mem.write(at(n), &(n as u64).to_ne_bytes());
            rank.try_send(comm, &buffer, at(n), lengths[n % lengths.len()], 3)
        };
        rank.flow(Flow::new("send", total, AT_ONCE, post))?;
    } else {
        let post = |n: usize| rank.try_recv(comm, &buffer, at(n), room, 3);
        let done = |n: usize, sizes: [i32; 8]| {
            let got = stamp(&buffer.mem.read(at(n), STAMP));
            ensure(got == n as u64, || format!("receive {n} got message {got}, of {} bytes", sizes[0]))
        };
        rank.flow(Flow::new("receive", total, AT_ONCE, post).then(done))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

/// Buffers of the plugin's largest receive; none: it takes one only.
pub fn group(rank: &Rank) -> Verdict<usize> {
    let recvs = usize::try_from(rank.plugin.properties(rank.dev)?.max_recvs).unwrap_or(1).min(MAX_RECVS);
    if recvs > 1 { Ok(recvs) } else { Err(Stop::Skip("maxRecvs is 1".into())) }
}

/// Receives of `n` buffers, each with its tag and a slot of `room` bytes; the sends come in another order, `len(group, tag)` bytes each.
/// `done` is told the group and its sizes.
pub fn grouped(
    rank: &Rank,
    comm: Opaque,
    n: usize,
    room: usize,
    len: impl Fn(usize, usize) -> usize,
    mut done: impl FnMut(usize, &[i32], &dyn Fn(usize) -> Vec<u8>) -> Verdict,
) -> Verdict {
    const GROUPS: usize = 12;
    const AT_ONCE: usize = 2;
    let buffer = rank.buffer(comm, AT_ONCE * n * room)?;
    let at = |group: usize, tag: usize| (group % AT_ONCE * n + tag) * room;
    if rank.index == 1 {
        // The tags of a group, permuted by a step that is coprime to any group's size, from a place that moves on.
        let tag = |i: usize| (i * (n - 1) + i / n) % n;
        let post = |i: usize| {
            let (group, tag) = (i / n, tag(i));
            buffer.mem.write(at(group, tag), &((group * n + tag) as u64).to_ne_bytes());
            rank.try_send(comm, &buffer, at(group, tag), len(group, tag), tag as i32)
        };
        rank.flow(Flow::new("send", GROUPS * n, n, post))?;
    } else {
        let post = |group: usize| {
            let bufs: Vec<_> = (0..n).map(|tag| buffer.part(at(group, tag), room, tag as i32)).collect();
            rank.note("isend, irecv or test");
            Ok(rank.plugin.irecv(comm, &bufs)?)
        };
        let report = |group: usize, sizes: [i32; 8]| done(group, &sizes[..n], &|tag| buffer.mem.read(at(group, tag), room));
        rank.flow(Flow::new("receive of several buffers", GROUPS, AT_ONCE, post).then(report))?;
    }
    rank.release(buffer)
}

fn tags(rank: &mut Rank) -> Verdict {
    let n = group(rank)?;
    let comm = rank.one_way()?;
    let done = |group: usize, _: &[i32], read: &dyn Fn(usize) -> Vec<u8>| {
        for tag in 0..n {
            let got = stamp(&read(tag));
            ensure(got == (group * n + tag) as u64, || {
                format!("receive {group}: the buffer of tag {tag} got message {got}, not {}", group * n + tag)
            })?;
        }
        Ok(())
    };
    grouped(rank, comm, n, 4096, |_, tag| STAMP + 100 * tag, done)?;
    rank.close(comm)
}
