//! Rules of listen, connect and accept.

use std::ptr;

use super::{Rule, USUAL};
use crate::check::memory::Mem;
use crate::check::rank::{Rank, own};
use crate::check::verdict::{Stop, Verdict, during, ensure};
use crate::plugin::HANDLE;

/// Tries of a call that has no reason to succeed.
const TRIES: usize = 200;
/// NCCL_NET_HANDLE_MAXSIZE before v5.
const SMALL_HANDLE: usize = 64;

pub const RULES: &[Rule] = &[
    Rule {
        name: "handle-size",
        says: "listen and connect stay within the handle: 64 bytes in v4, 128 from v5 on.",
        source: "net.h, NCCL_NET_HANDLE_MAXSIZE: the handle is NCCL's memory, with other things of it behind",
        run: handle_size,
        ..USUAL
    },
    Rule {
        name: "accept-returns",
        says: "accept returns at once, with success and a NULL comm, as long as nobody connects; called again, it gives the comm in the end.",
        source: "README, accept; src/transport/net.cc recvProxyConnect: one thread serves all connections",
        versions: 5..=12,
        run: accept_returns,
        ..USUAL
    },
    Rule {
        name: "connect-returns",
        says: "connect returns at once, with success, as long as nobody accepts; called again with the same handle, it gives the comm in the end.",
        source: "README, connect; src/transport/net.cc sendProxyConnect: one thread serves all connections, and keeps the handle between calls",
        versions: 5..=12,
        run: connect_returns,
        ..USUAL
    },
    Rule {
        name: "connect-first",
        says: "connect gives a comm in one call although nobody has accepted; accept, called later, gives one in one call.",
        source: "NCCL 2.8 to 2.11, src/transport.cc ncclTransportP2pSetup: every rank connects all channels, then accepts; neither call is repeated",
        versions: 4..=4,
        run: connect_first,
        ..USUAL
    },
    Rule {
        name: "connect-both",
        says: "Two ranks that connect to each other, each with one thread for connect and accept, both get there.",
        source: "src/proxy.cc proxyProgressAsync: one thread calls connect and accept of all connections by turns",
        versions: 5..=12,
        run: connect_both,
        ..USUAL
    },
    Rule {
        name: "connect-self",
        says: "A process connects to itself; the listen comm may be closed last.",
        source: "src/plugin/net.cc ncclGpuGdrSupport (until NCCL 2.11 in net.h): listen, connect and accept in one process",
        ranks: 1,
        run: connect_self,
        ..USUAL
    },
    Rule {
        name: "many-listeners",
        says: "Several listen comms wait at once; each handle leads to its own, in whatever order they are used.",
        source: "src/transport/net.cc: one listen comm per channel and peer, all made before the first connect",
        run: many_listeners,
        ..USUAL
    },
    Rule {
        name: "listen-again",
        says: "A listen comm that nobody used is closed as any other, and listening again works, any number of times.",
        source: "src/plugin/net.cc ncclGpuGdrSupport, src/bootstrap.cc bootstrapClose: listen comms are closed with or without a connection",
        run: listen_again,
        ..USUAL
    },
    Rule {
        name: "listen-closed",
        says: "Comms live on when the listen comm that they came from is closed.",
        source: "src/transport/net.cc recvProxyConnect: closes the listen comm as soon as accept gave a comm",
        run: listen_closed,
        ..USUAL
    },
    Rule {
        name: "no-offload",
        says: "connect and accept of a host device leave the device handle NULL, and take NULL for the place of it.",
        source: "src/transport/net.cc: a device handle that is not NULL is read; src/plugin/net.cc ncclGpuGdrSupport passes NULL",
        versions: 7..=12,
        run: no_offload,
        ..USUAL
    },
];

fn handle_size(rank: &mut Rank) -> Verdict {
    let size = if rank.version() == 4 { SMALL_HANDLE } else { HANDLE };
    // What lies behind the handle cannot be touched.
    let place = own("memory", Mem::new(size))?;
    let comm = if rank.index == 0 {
        rank.note("listen");
        // SAFETY: as many bytes as a handle of this version has.
        let listen = unsafe { rank.plugin.listen_at(rank.dev, place.ptr(0)) }?;
        rank.say(&place.read(0, size))?;
        let comm = rank.accept(listen)?;
        rank.close_listen(listen)?;
        comm
    } else {
        place.write(0, &rank.hear()?);
        rank.note("connect");
        // SAFETY: as many bytes as a handle of this version has.
        rank.until("connect to give a comm", || Ok(unsafe { rank.plugin.connect_at(rank.dev, place.ptr(0), Some(&mut ptr::null_mut())) }?))?
    };
    rank.proof(comm, 1, 1000)?;
    rank.close(comm)
}

fn accept_returns(rank: &mut Rank) -> Verdict {
    let comm = if rank.index == 0 {
        let (handle, listen) = rank.listen()?;
        rank.note("accept");
        for _ in 0..TRIES {
            let comm = rank.plugin.accept(listen)?;
            ensure(comm.is_none(), || "accept gave a comm, and nobody had connected".into())?;
        }
        rank.give(&handle)?;
        let comm = rank.accept(listen)?;
        rank.close_listen(listen)?;
        comm
    } else {
        rank.connect(&mut rank.take()?)?
    };
    rank.proof(comm, 1, 1000)?;
    rank.close(comm)
}

fn connect_returns(rank: &mut Rank) -> Verdict {
    let comm = if rank.index == 0 {
        let (handle, listen) = rank.listen()?;
        rank.give(&handle)?;
        // Rank 1 has tried.
        rank.hear()?;
        let comm = rank.accept(listen)?;
        rank.close_listen(listen)?;
        comm
    } else {
        let mut handle = rank.take()?;
        let mut comm = None;
        rank.note("connect");
        for _ in 0..TRIES {
            if comm.is_none() {
                comm = rank.plugin.connect(rank.dev, &mut handle)?;
            }
        }
        rank.say(b"tried")?;
        match comm {
            Some(comm) => comm,
            None => rank.connect(&mut handle)?,
        }
    };
    rank.proof(comm, 1, 1000)?;
    rank.close(comm)
}

fn connect_first(rank: &mut Rank) -> Verdict {
    const CHANNELS: usize = 2;
    let mut listens = Vec::new();
    for _ in 0..CHANNELS {
        let (handle, listen) = rank.listen()?;
        rank.give(&handle)?;
        listens.push(listen);
    }
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for _ in 0..CHANNELS {
        let mut handle = rank.take()?;
        rank.note("connect");
        let comm = rank.plugin.connect(rank.dev, &mut handle)?;
        sends.push(comm.ok_or_else(|| Stop::Fail("connect gave a NULL comm, and is not called again".into()))?);
    }
    // No rank accepts before both have connected.
    rank.meet()?;
    for listen in listens {
        rank.note("accept");
        let comm = rank.plugin.accept(listen)?;
        recvs.push(comm.ok_or_else(|| Stop::Fail("accept gave a NULL comm, and is not called again".into()))?);
        rank.close_listen(listen)?;
    }
    for (seed, (send, recv)) in sends.into_iter().zip(recvs).enumerate() {
        let comm = if rank.index == 0 { recv } else { send };
        during(format_args!("channel {seed}"), rank.proof(comm, seed as u64, 1000))?;
        rank.close_send(send)?;
        rank.close_recv(recv)?;
    }
    Ok(())
}

fn connect_both(rank: &mut Rank) -> Verdict {
    let (send, recv) = rank.both_ways()?;
    rank.proof(if rank.index == 0 { recv } else { send }, 1, 1000)?;
    rank.close_send(send)?;
    rank.close_recv(recv)
}

fn connect_self(rank: &mut Rank) -> Verdict {
    let (send, recv, listen) = rank.to_itself()?;
    let (from, to) = (rank.buffer(send, 1000)?, rank.buffer(recv, 1000)?);
    from.mem.fill(0, 1000, 0x5A);
    let received = rank.irecv(recv, &to, 0, 1000)?;
    let (mut request, mut sent, mut came) = (None, false, false);
    rank.until("a message of a process to itself", || {
        match request {
            None => request = rank.try_send(send, &from, 0, 1000, 7)?,
            Some(request) if !sent => sent = rank.test(request)?.is_some(),
            Some(_) => {}
        }
        came = came || rank.test(received)?.is_some();
        Ok((sent && came).then_some(()))
    })?;
    ensure(to.mem.read(0, 1000) == from.mem.read(0, 1000), || "a message of a process to itself arrived damaged".into())?;
    rank.release(from)?;
    rank.release(to)?;
    rank.close_recv(recv)?;
    rank.close_send(send)?;
    rank.close_listen(listen)
}

fn many_listeners(rank: &mut Rank) -> Verdict {
    const LISTENERS: u64 = 5;
    let mut comms = Vec::new();
    if rank.index == 0 {
        let mut listens = Vec::new();
        for _ in 0..LISTENERS {
            let (handle, listen) = rank.listen()?;
            rank.give(&handle)?;
            listens.push(listen);
        }
        for listen in listens {
            comms.push(rank.accept(listen)?);
            rank.close_listen(listen)?;
        }
    } else {
        let mut handles = (0..LISTENERS).map(|_| Ok((rank.take()?, None))).collect::<Verdict<Vec<_>>>()?;
        rank.note("connect");
        rank.until("connect to give a comm for each of several handles", || {
            for (handle, comm) in handles.iter_mut().rev().filter(|(_, comm)| comm.is_none()) {
                *comm = rank.plugin.connect(rank.dev, handle)?;
            }
            Ok(handles.iter().all(|(_, comm)| comm.is_some()).then_some(()))
        })?;
        comms.extend(handles.into_iter().filter_map(|(_, comm)| comm));
    }
    for (seed, &comm) in comms.iter().enumerate() {
        during(format_args!("listener {seed}"), rank.proof(comm, seed as u64, 64))?;
    }
    comms.into_iter().try_for_each(|comm| rank.close(comm))
}

fn listen_again(rank: &mut Rank) -> Verdict {
    for _ in 0..3 {
        let (_, unused) = rank.listen()?;
        rank.close_listen(unused)?;
        let comm = rank.one_way()?;
        rank.proof(comm, 1, 64)?;
        rank.close(comm)?;
    }
    Ok(())
}

fn listen_closed(rank: &mut Rank) -> Verdict {
    // one_way closes the listen comm as soon as there is a comm.
    let comms = [rank.one_way()?, rank.one_way()?];
    for (seed, &comm) in comms.iter().enumerate() {
        during("after closeListen", rank.proof(comm, seed as u64, 100_000))?;
    }
    comms.into_iter().try_for_each(|comm| rank.close(comm))
}

fn no_offload(rank: &mut Rank) -> Verdict {
    if let Some((kind, _)) = rank.plugin.properties(rank.dev)?.net_device.filter(|(kind, _)| *kind != 0) {
        return Err(Stop::Skip(format!("the device offloads: its netDeviceType is {kind}")));
    }
    for offered in [true, false] {
        let mut device = ptr::null_mut();
        let comm = if rank.index == 0 {
            let (handle, listen) = rank.listen()?;
            rank.give(&handle)?;
            rank.note("accept");
            let comm =
                rank.until("accept to give a comm", || Ok(rank.plugin.accept_offering(listen, offered.then_some(&mut device))?))?;
            rank.close_listen(listen)?;
            comm
        } else {
            let mut handle = rank.take()?;
            rank.note("connect");
            rank.until("connect to give a comm", || {
                // SAFETY: a handle of full size.
                Ok(unsafe { rank.plugin.connect_at(rank.dev, handle.as_mut_ptr(), offered.then_some(&mut device)) }?)
            })?
        };
        ensure(device.is_null(), || format!("a host device gave a device handle: {device:?}"))?;
        rank.proof(comm, 1, 64)?;
        rank.close(comm)?;
    }
    Ok(())
}
