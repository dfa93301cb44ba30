//! A peer that goes away: which call says so first. The same with RAILHEAD_PROGRESS=poll and =thread, on either wire.

use crate::support;
use support::comms::{self, Mem};
use support::plugin::{Buf, Opaque, Plugin, REMOTE_ERROR, Result, take_log};
use support::{Ctx, Ranks, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("receiver_goes", receiver_goes), ("sender_closes", sender_closes)];

const MODES: [&str; 2] = ["poll", "thread"];
const WIRES: [&str; 2] = ["shm", "tcp"];
/// Receives that the peer has outstanding, each announced.
const RECEIVES: usize = 64;
const LEN: usize = 4096;
/// Of no receive.
const OTHER_TAG: i32 = 99;

fn in_every_setting(role: &'static str, with: impl Fn(Ranks)) {
    for mode in MODES {
        for wire in WIRES {
            with(World::new(role, 2).env("RAILHEAD_PROGRESS", mode).env("RAILHEAD_SOFT_WIRE", wire).spawn());
        }
    }
}

/// Whether a warning says that the comm failed.
fn is_known() -> bool {
    take_log().iter().any(|(level, text)| *level == 2 && text.contains("outstanding"))
}

/// Posts while the peer is lost, which must not fail before the tests of what is outstanding have said so. Returns how many did.
fn first_to_say(plugin: &Plugin, requests: Vec<Opaque>, mut post: impl FnMut() -> Result<Option<Opaque>>) -> usize {
    let mut outstanding = requests;
    // Whoever only posts learns of it where a thread looks, or where posting has to look for announcements.
    for _ in 0..200 {
        outstanding.extend(post().expect("posting fails while requests are outstanding"));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let mut lost = 0;
    for (i, request) in outstanding.into_iter().enumerate() {
        // What was done before the end is still so.
        match comms::wait(plugin, request) {
            Ok(_) => {}
            Err(status) => {
                assert_eq!(status, REMOTE_ERROR, "request {i}");
                lost += 1;
            }
        }
    }
    let after = until("posting to fail", || post().err());
    assert_eq!(after, REMOTE_ERROR);
    assert!(is_known());
    lost
}

/// Rank 0 goes away with receives outstanding, while rank 1 has sends outstanding.
fn receiver_goes(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(RECEIVES * LEN);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    if ctx.rank == 0 {
        for i in 0..RECEIVES {
            comms::irecv(&plugin, comm, &mem, i * LEN, LEN, 1, mr).expect("irecv");
        }
        ctx.say("announced");
        assert_eq!(ctx.parent.text(), "close");
        plugin.close_recv(comm).expect("closeRecv");
        ctx.say("closed");
        assert_eq!(ctx.to(1).text(), "done");
        return;
    }
    assert_eq!(ctx.parent.text(), "post");
    let sends: Vec<_> = (0..4).map(|i| comms::isend(&plugin, comm, &mem, i * LEN, LEN, 1, mr).expect("isend")).collect();
    ctx.say("posted");
    let end = ctx.parent.text();
    let mut tag = OTHER_TAG;
    let lost = first_to_say(&plugin, sends, || {
        // By turns one that finds its receive and one that has to look for it.
        tag = OTHER_TAG + 1 - tag;
        plugin.isend(comm, mem.ptr(0), LEN, tag, mr)
    });
    // Who is stopped takes nothing; who closes may have taken all.
    assert!(lost > 0 || end == "closed", "nothing was outstanding");
    let _ = ctx.to(0).send(b"done");
}

/// Rank 1 closes while rank 0 has receives outstanding.
fn sender_closes(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    if ctx.rank == 1 {
        assert_eq!(ctx.to(0).text(), "posted");
        plugin.close_send(comm).expect("closeSend");
        ctx.to(0).send(b"closed").expect("rank 0");
        assert_eq!(ctx.to(0).text(), "done");
        return;
    }
    let mem = Mem::new(LEN);
    let mr = plugin.reg_mr(comm, mem.ptr(0), LEN).expect("regMr");
    let requests: Vec<_> = (0..4).map(|_| comms::irecv(&plugin, comm, &mem, 0, LEN, 1, mr).expect("irecv")).collect();
    ctx.to(1).send(b"posted").expect("rank 1");
    assert_eq!(ctx.to(1).text(), "closed");
    let lost = first_to_say(&plugin, requests, || plugin.irecv(comm, &[Buf { addr: mem.ptr(0), len: LEN, tag: 1, mr }]));
    assert!(lost >= 4, "{lost}");
    ctx.to(1).send(b"done").expect("rank 1");
}

#[test]
fn a_receiver_that_closes_is_first_reported_by_tests_of_sends() {
    in_every_setting("receiver_goes", |mut ranks| {
        ranks.expect(0, "announced");
        ranks.tell(1, "post");
        ranks.expect(1, "posted");
        ranks.tell(0, "close");
        ranks.expect(0, "closed");
        ranks.tell(1, "closed");
        ranks.finish();
    });
}

#[test]
fn a_receiver_that_is_killed_is_first_reported_by_tests_of_sends() {
    in_every_setting("receiver_goes", |mut ranks| {
        ranks.expect(0, "announced");
        ranks.ranks[0].signal(libc::SIGSTOP);
        until("rank 0 to stop", || (ranks.ranks[0].state() == 'T').then_some(()));
        ranks.tell(1, "post");
        ranks.expect(1, "posted");
        ranks.ranks[0].signal(libc::SIGKILL);
        ranks.ranks[0].wait();
        ranks.tell(1, "killed");
        assert!(ranks.ranks[1].wait().success());
    });
}

#[test]
fn a_sender_that_closes_is_first_reported_by_tests_of_receives() {
    in_every_setting("sender_closes", Ranks::finish);
}
