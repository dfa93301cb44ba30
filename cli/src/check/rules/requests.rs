//! Rules of isend, irecv and iflush: what they return, and when.

use std::ffi::c_void;
use std::ptr;
use std::thread;

use super::{Rule, USUAL};
use crate::check::rank::{Flow, Rank, STAMP, pattern, stamp};
use crate::check::verdict::{Stop, Verdict, during, ensure};
use crate::plugin::{Failure, MAX_RECVS, MISSING};

/// Calls of a rank whose peer does nothing.
const TRIES: usize = 200;
/// NCCL_NET_OPTIONAL_RECV_COMPLETION.
const OPTIONAL: *mut c_void = ptr::without_provenance_mut(1);

pub const RULES: &[Rule] = &[
    Rule {
        name: "calls-return",
        says: "isend, irecv and test return at once, whatever the other rank does or does not.",
        source: "net.h: a NULL request if the call would block; src/proxy.cc progressOps: one thread serves all connections",
        run: calls_return,
        ..USUAL
    },
    Rule {
        name: "null-request",
        says: "Success with a NULL request means that nothing happened: the call, repeated, is taken in the end, and its message comes once.",
        source: "README, isend and irecv; src/transport/net.cc repeats the call on the next pass of the progress thread",
        run: null_request,
        ..USUAL
    },
    Rule {
        name: "request-written",
        says: "isend and irecv write *request whenever they succeed.",
        source: "src/transport/net.cc: *request holds the pointer of an earlier step, and is taken for a request unless it is NULL",
        run: request_written,
        ..USUAL
    },
    Rule {
        name: "optional-recv",
        says: "irecv with NCCL_NET_OPTIONAL_RECV_COMPLETION (0x1) in *request replaces it with a request that can be tested, or NULL; the data come.",
        source: "README, irecv: the plugin is still expected to set a valid request; src/transport/net.cc recvProxyProgress",
        versions: 9..=12,
        run: optional_recv,
        ..USUAL
    },
    Rule {
        name: "requests-at-once",
        says: "A comm takes NCCL_NET_MAX_REQUESTS receives at once (8 to v6, 32 from v7 on), and the sends for all of their buffers.",
        source: "README, Communication: each comm must handle NCCL_NET_MAX_REQUESTS requests, times maxRecvs on the sender",
        run: requests_at_once,
        ..USUAL
    },
    Rule {
        name: "no-profiler",
        says: "irecv takes NULL for the profiler's handles.",
        source: "src/bootstrap.cc netIrecv, with NCCL_OOB_NET_ENABLE",
        versions: 10..=12,
        run: no_profiler,
        ..USUAL
    },
    Rule {
        name: "flush",
        says: "iflush of a receive that is done succeeds, with a NULL request or one that completes. A plugin for host memory alone may refuse.",
        source: "README, iflush; src/transport/net.cc recvProxyProgress: the request is tested if it is not NULL",
        run: flush,
        ..USUAL
    },
    Rule {
        name: "net-attr",
        says: "setNetAttr, where there is one, takes hints between transfers, and returns; transfers go on. What it returns does not matter.",
        source: "src/transport/net.cc setXferNetAttrs: called on the progress thread, before the first transfer of an operation",
        versions: 11..=12,
        run: net_attr,
        ..USUAL
    },
    Rule {
        name: "threads",
        says: "A comm that was made on one thread is used on another.",
        source: "src/proxy.cc: comms are made and closed on the service thread, used on the progress thread",
        run: threads,
        ..USUAL
    },
];

fn calls_return(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, 1 << 16)?;
    let mut request = None;
    // First the sender, whose peer has posted nothing; then the receiver, whose peer makes no call.
    if rank.index == 0 {
        rank.hear()?;
    }
    let mut done = false;
    for _ in 0..TRIES {
        match request {
            None if rank.index == 0 => request = rank.try_recv(comm, &buffer, 0, 1 << 16, 3)?,
            None => request = rank.try_send(comm, &buffer, 0, 1 << 16, 3)?,
            Some(posted) if !done => done = rank.test(posted)?.is_some(),
            Some(_) => {}
        }
    }
    rank.say(b"tried")?;
    if rank.index == 1 {
        rank.hear()?;
    }
    let request = match request {
        Some(request) => request,
        None if rank.index == 0 => rank.until("irecv to take a receive", || rank.try_recv(comm, &buffer, 0, 1 << 16, 3))?,
        None => rank.until("isend to take a message", || rank.try_send(comm, &buffer, 0, 1 << 16, 3))?,
    };
    if !done {
        rank.wait("a request", request)?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

/// Receives come late and one by one, so that sends find none.
fn null_request(rank: &mut Rank) -> Verdict {
    const TOTAL: usize = 32;
    const LEN: usize = 256;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, TOTAL * LEN)?;
    let r = &*rank;
    if rank.index == 1 {
        for n in 0..TOTAL {
            buffer.mem.write(n * LEN, &(n as u64).to_ne_bytes());
        }
        let mut early = None;
        for _ in 0..TRIES {
            if early.is_none() {
                early = rank.try_send(comm, &buffer, 0, LEN, 3)?;
            }
        }
        rank.say(b"tried")?;
        let post = |n: usize| match early.take() {
            Some(request) => Ok(Some(request)),
            None => r.try_send(comm, &buffer, n * LEN, LEN, 3),
        };
        rank.flow(Flow::new("send", TOTAL, 8, post))?;
    } else {
        rank.hear()?;
        let done = |n: usize, _| {
            let got = stamp(&buffer.mem.read(n * LEN, STAMP));
            ensure(got == n as u64, || format!("receive {n} got message {got}"))
        };
        rank.flow(Flow::new("receive", TOTAL, 1, |n| r.try_recv(comm, &buffer, n * LEN, LEN, 3)).then(done))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn request_written(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, 64)?;
    let (mut requests, mut refused) = (Vec::new(), 0);
    // The plugin facade fills *request with garbage before each call, and fails a call that leaves it there.
    if rank.index == 1 {
        for _ in 0..TRIES {
            if requests.is_empty() {
                requests.extend(rank.try_send(comm, &buffer, 0, 8, 3)?);
            }
        }
    }
    rank.meet()?;
    if rank.index == 0 {
        while requests.len() < max_requests(rank) && refused < TRIES {
            match rank.try_recv(comm, &buffer, 0, 8, 3)? {
                Some(request) => requests.push(request),
                None => refused += 1,
            }
        }
        rank.say(&(requests.len() as u64).to_ne_bytes())?;
        requests.into_iter().try_for_each(|request| rank.wait("a receive", request).map(|_| ()))?;
    } else {
        let total = usize::try_from(stamp(&rank.hear()?)).unwrap_or(0);
        let mut early = requests.pop();
        let r = &*rank;
        let post = |_| match early.take() {
            Some(request) => Ok(Some(request)),
            None => r.try_send(comm, &buffer, 0, 8, 3),
        };
        rank.flow(Flow::new("send", total, 8, post))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn optional_recv(rank: &mut Rank) -> Verdict {
    const TOTAL: usize = 8;
    const LEN: usize = 512;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, TOTAL * LEN)?;
    let r = &*rank;
    if rank.index == 1 {
        buffer.mem.fill(0, TOTAL * LEN, 0x77);
        rank.flow(Flow::new("send", TOTAL, 4, |n| r.try_send(comm, &buffer, n * LEN, LEN, 3)))?;
    } else {
        let post = |n: usize| {
            let request = r.plugin.irecv_with(comm, &[buffer.part(n * LEN, LEN, 3)], OPTIONAL)?;
            ensure(request.is_none_or(|request| request.0 != OPTIONAL), || "irecv left 0x1 in *request".into())?;
            Ok(request)
        };
        rank.flow(Flow::new("receive", TOTAL, 4, post))?;
        // Such a receive may be done before its data are there; whoever asks for it looks at the data.
        rank.until("the data of receives without completion", || Ok((0..TOTAL * LEN).all(|at| buffer.mem.byte(at) == 0x77).then_some(())))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

/// NCCL_NET_MAX_REQUESTS: NCCL has no more outstanding, and plugins may fail if it had.
fn max_requests(rank: &Rank) -> usize {
    if rank.version() <= 6 { 8 } else { 32 }
}

fn requests_at_once(rank: &mut Rank) -> Verdict {
    const LEN: usize = 64;
    let requests = max_requests(rank);
    let recvs = usize::try_from(rank.plugin.properties(rank.dev)?.max_recvs).unwrap_or(1).clamp(1, MAX_RECVS);
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, requests * recvs * LEN)?;
    let mut outstanding = Vec::new();
    for n in 0..requests {
        if rank.index == 0 {
            let bufs: Vec<_> = (0..recvs).map(|i| buffer.part((n * recvs + i) * LEN, LEN, i as i32)).collect();
            let what = format!("irecv to take receive {n} while {n} are outstanding");
            outstanding.push(rank.until(&what, || during(&what, rank.plugin.irecv(comm, &bufs).map_err(Stop::from)))?);
        }
    }
    rank.meet()?;
    for n in 0..requests * recvs {
        if rank.index == 1 {
            let at = n * LEN;
            buffer.mem.write(at, &(n as u64).to_ne_bytes());
            let what = format!("isend to take message {n} while {n} are outstanding");
            outstanding.push(rank.until(&what, || during(&what, rank.try_send(comm, &buffer, at, LEN, (n % recvs) as i32)))?);
        }
    }
    for request in outstanding {
        rank.wait("one of many requests", request)?;
    }
    if rank.index == 0 {
        for n in 0..requests * recvs {
            let got = stamp(&buffer.mem.read(n * LEN, STAMP));
            ensure(got == n as u64, || format!("buffer {n} got message {got}"))?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn no_profiler(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, 64)?;
    rank.note("isend, irecv or test");
    let request = if rank.index == 1 {
        rank.isend(comm, &buffer, 0, 64)?
    } else {
        let part = buffer.part(0, 64, 7);
        rank.until("irecv to take a receive", || Ok(rank.plugin.irecv_unprofiled(comm, &part)?))?
    };
    rank.wait("a request", request)?;
    rank.release(buffer)?;
    rank.close(comm)
}

fn flush(rank: &mut Rank) -> Verdict {
    const LEN: usize = 5000;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, LEN)?;
    // NCCL_PTR_CUDA and NCCL_PTR_DMABUF.
    let device_memory = rank.plugin.properties(rank.dev)?.ptr_support & 6 != 0;
    if rank.index == 1 {
        buffer.mem.write(0, &pattern(3, LEN));
        let request = rank.isend(comm, &buffer, 0, LEN)?;
        rank.wait("a send", request)?;
    } else {
        let request = rank.irecv(comm, &buffer, 0, LEN)?;
        rank.wait("a receive", request)?;
        rank.note("iflush");
        match rank.plugin.iflush(comm, &[buffer.part(0, LEN, 7)]) {
            Ok(Some(request)) => {
                rank.until("a flush", || Ok((rank.plugin.test_with(request, 0, None)? != 0).then_some(())))?;
            }
            Ok(None) => {}
            // NCCL flushes no host memory, and its own socket transport refuses.
            Err(failure) if !device_memory && failure.status > 0 => {}
            Err(failure) => return Err(failure.into()),
        }
        ensure(buffer.mem.read(0, LEN) == pattern(3, LEN), || "the data changed".into())?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn net_attr(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    for seed in 0..3 {
        rank.note("setNetAttr");
        if let Err(Failure { status: MISSING, .. }) = rank.plugin.set_net_attr(1 << seed) {
            return Err(Stop::Skip("setNetAttr is NULL".into()));
        }
        during("after setNetAttr", rank.proof(comm, seed, 20_000))?;
    }
    rank.close(comm)
}

fn threads(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let r = &*rank;
    let other = thread::scope(|scope| scope.spawn(|| r.proof(comm, 4, 20_000)).join());
    let panicked = || Err(Stop::Fail("railhead itself: a thread panicked".into()));
    during("on another thread than the one that made the comm", other.unwrap_or_else(|_| panicked()))?;
    rank.close(comm)
}
