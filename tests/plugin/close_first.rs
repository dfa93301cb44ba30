//! A side whose `connect` or `accept` has succeeded closes its comm at once, while the other's call goes on: that call succeeds too, and using
//! its comm says what has happened. The same on each wire and with either progress.

use std::time::Duration;

use crate::support;
use support::comms::{self, Mem};
use support::plugin::{Buf, Opaque, Plugin, REMOTE_ERROR, Result, take_log};
use support::{Ctx, PATIENCE, Random, Role, World, seed, until};

pub const ROLES: &[(&str, Role)] = &[("closes", closes)];

/// Connections of each kind: RHT_ROUNDS, which `make soak` sets.
fn rounds() -> usize {
    std::env::var("RHT_ROUNDS").map_or(40, |rounds| rounds.parse().expect("RHT_ROUNDS: a number"))
}

/// Uses a comm until that fails, which must be for the right reason.
fn use_of_it_says_so(plugin: &Plugin, comm: Opaque, mut post: impl FnMut(Buf) -> Result<Option<Opaque>>) {
    let mem = Mem::new(64);
    let mr = plugin.reg_mr(comm, mem.ptr(0), 64).expect("regMr");
    let mut request = None;
    let status = until("the comm to fail", || match request {
        None => match post(Buf { addr: mem.ptr(0), len: 64, tag: 1, mr }) {
            Ok(posted) => {
                request = posted;
                None
            }
            Err(status) => Some(status),
        },
        Some(request) => plugin.test(request).err(),
    });
    assert_eq!(status, REMOTE_ERROR);
    let log = take_log();
    assert!(log.iter().any(|(level, text)| *level == 2 && text.contains("it closed its comm")), "{log:?}");
    plugin.dereg_mr(comm, mr).expect("deregMr");
}

/// Rank 0 accepts and rank 1 connects, time and again; rank RHT_FIRST closes as soon as it has its comm, and the other one is slow.
fn closes(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let first = std::env::var("RHT_FIRST").expect("RHT_FIRST").parse::<usize>().expect("a rank");
    let mut random = Random(std::env::var("RHT_SEED").expect("RHT_SEED").parse().expect("a number"));
    let other = ctx.to(1 - ctx.rank);
    let mut slowly = |step: &mut dyn FnMut() -> Option<Result<Opaque>>| {
        until("a comm", || {
            if ctx.rank != first && random.below(3) > 0 {
                // So that the other one is done before the next call, now and then.
                std::thread::sleep(Duration::from_micros(random.below(1500)));
            }
            step()
        })
    };
    let (rounds, mut failures) = (rounds(), Vec::new());
    for round in 0..rounds {
        let comm = if ctx.rank == 0 {
            let (handle, listen) = plugin.listen(0).expect("listen");
            comms::give(other, &handle);
            let comm = slowly(&mut || plugin.accept(listen).transpose());
            plugin.close_listen(listen).expect("closeListen");
            comm
        } else {
            let mut handle = comms::get(other);
            slowly(&mut || plugin.connect(0, &mut handle).transpose())
        };
        match comm {
            Err(status) => failures.push(format!("round {round}: {status}, {:?}", take_log().iter().rfind(|line| line.0 == 2))),
            Ok(comm) => {
                if ctx.rank != first && round < 3 {
                    use_of_it_says_so(&plugin, comm, |buf| match ctx.rank {
                        0 => plugin.irecv(comm, &[buf]),
                        _ => plugin.isend(comm, buf.addr, buf.len, buf.tag, buf.mr),
                    });
                }
                if ctx.rank == 0 { plugin.close_recv(comm) } else { plugin.close_send(comm) }.expect("close");
            }
        }
        // Nobody begins anew before both are done.
        other.send(b"done").expect("the other");
        assert_eq!(other.recv_within(PATIENCE).expect("the other"), b"done");
    }
    let n = failures.len();
    assert!(failures.is_empty(), "{n} of {rounds} failed at rank {}, the first few: {:#?}", ctx.rank, &failures[..n.min(3)]);
}

#[track_caller]
fn whoever_closes_first(first: usize) {
    let seed = seed();
    for mode in ["poll", "thread"] {
        for (wire, streams) in [("shm", "0"), ("tcp", "0"), ("tcp", "3")] {
            println!("{mode}, {wire}, {streams} data streams");
            let world = World::new("closes", 2).env("RAILHEAD_PROGRESS", mode).env("RAILHEAD_SOFT_WIRE", wire);
            let world = world.env("RAILHEAD_TCP_STREAMS", streams).env("RHT_FIRST", &first.to_string()).env("RHT_SEED", &seed.to_string());
            world.spawn().finish();
        }
    }
}

#[test]
fn an_acceptor_that_closes_at_once_fails_no_connect() {
    whoever_closes_first(0);
}

#[test]
fn a_connector_that_closes_at_once_fails_no_accept() {
    whoever_closes_first(1);
}
