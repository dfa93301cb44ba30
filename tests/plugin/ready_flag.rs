//! The ready flag has one way, the WRITE into the sender's FIFO: with the FIFO's registration gone, announcing fails, and every receive is
//! a WRITE that the fabric has counted.

use crate::support;
use railhead::base::stats::RailCounter;
use railhead::fabric::UserMemory;
use railhead::net::{MemoryKind, Mode, Net, RecvBuffer, RecvComm, SendComm};
use std::sync::Arc;
use support::comms::{self, Mem};
use support::holdings::rail_sum;
use support::plugin::Plugin;
use support::{Ctx, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("invalidated", invalidated), ("counted", counted)];

fn pair(net: &Arc<Net>) -> (SendComm, RecvComm) {
    let (mut listen, mut handle) = net.listen(0).expect("listen");
    let (mut send, mut recv) = (None, None);
    until("both comms", || {
        if send.is_none() {
            send = net.connect(0, None, &mut handle, Mode::NonBlocking).expect("connect");
        }
        if recv.is_none() {
            recv = listen.accept(Mode::NonBlocking).expect("accept");
        }
        (send.is_some() && recv.is_some()).then_some(())
    });
    (send.expect("sender"), recv.expect("receiver"))
}

/// Through the Rust interface, as no caller of the C one can reach the FIFO.
fn invalidated(_: &Ctx) {
    let net = Net::open().expect("open");
    let (mut send, mut recv) = pair(&net);
    let mem = Mem::new(4096);
    // SAFETY: the memory outlives its registration.
    let memory = unsafe { UserMemory::new(mem.ptr(0), 4096) };
    let mr = net.register(0, memory, MemoryKind::Host).expect("register");
    let buf = RecvBuffer { addr: mem.ptr(0) as usize, len: 2000, tag: 1, mr };
    let from = mem.ptr(2000) as usize;
    let mut exchange = || {
        let r = recv.irecv(&[buf]).expect("irecv").expect("room");
        let (mut s, mut sent, mut got) = (None, None, None);
        until("a message", || {
            s = s.or_else(|| send.isend(from, 1000, 1, mr).expect("isend"));
            sent = sent.or_else(|| s.and_then(|s| send.test(s).expect("test").map(|sizes| sizes.n)));
            got = got.or_else(|| recv.test(r).expect("test").map(|sizes| sizes.n));
            sent.zip(got)
        });
    };
    exchange();
    exchange();
    send.invalidate_cts_fifo();
    let r = recv.irecv(&[buf]).expect("irecv").expect("room");
    let error = until("the refusal", || {
        assert!(!matches!(send.isend(from, 1000, 1, mr), Ok(Some(_))), "announced by another way");
        recv.test(r).err()
    });
    assert!(error.to_string().contains("remote access error"), "{error}");
    // And the sender, whose memory it was, fails too: nothing can be announced to it any more.
    until("the sender's error", || send.isend(from, 1000, 1, mr).err());
}

#[test]
fn without_the_fifo_registration_nothing_is_announced() {
    for wire in ["shm", "tcp"] {
        World::new("invalidated", 1).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

const RECEIVES: usize = 3000;

/// The receiver's WRITEs are at least its receives.
fn counted(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(4096);
    let mr = plugin.reg_mr(comm, mem.ptr(0), 4096).expect("regMr");
    for i in 0..RECEIVES {
        if ctx.rank == 0 {
            let before = rail_sum_if(i, RailCounter::Requests);
            let r = comms::irecv(&plugin, comm, &mem, 0, 100, 1, mr).expect("irecv");
            assert!(rail_sum_if(i, RailCounter::Requests) > before || i % 500 != 0, "receive {i} was announced without a WRITE");
            comms::wait(&plugin, r).expect("test");
        } else {
            let s = comms::isend(&plugin, comm, &mem, 0, 100, 1, mr).expect("isend");
            comms::wait(&plugin, s).expect("test");
        }
    }
    if ctx.rank == 0 {
        let pid = std::process::id() as i32;
        let writes = rail_sum(pid, RailCounter::Requests);
        assert!(writes >= RECEIVES as u64, "{writes} WRITEs for {RECEIVES} receives");
    }
    ctx.barrier();
}

/// A look at the page now and then, as it costs a walk through /proc.
fn rail_sum_if(i: usize, counter: RailCounter) -> u64 {
    if i.is_multiple_of(500) { rail_sum(std::process::id() as i32, counter) } else { 0 }
}

#[test]
fn every_receive_is_a_write() {
    for wire in ["shm", "tcp"] {
        World::new("counted", 2).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}
