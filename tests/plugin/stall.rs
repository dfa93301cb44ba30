//! The stall report: a request that stays outstanding is reported once, with the right cause, on both wires; and no other is.
//!
//! Each cause is brought about several times in a row between two ranks, of which the one that waits reads its own log.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support;
use railhead::base::stats::CommKind;
use railhead::base::stats::page;
use support::comms::{self, Mem};
use support::plugin::{Buf, Opaque, Plugin, take_log};
use support::{Ctx, Ranks, Role, World, until};

fn rounds() -> usize {
    support::repeats(3, 20)
}

/// RAILHEAD_STALL_WARN_S of the tests that want a report.
const SOON: &str = "0.1";
/// Where the other rank has half of it to answer: it may not be scheduled for a while.
const SOON_FOR_AN_ANSWER: &str = "1";
/// And of the one that wants none; what is injected there takes nine tenths of it.
const LIMIT: Duration = Duration::from_secs(3);
const DELAY: Duration = Duration::from_millis(2700);
const WIRES: [&str; 2] = ["shm", "tcp"];

pub const ROLES: &[(&str, Role)] = &[
    ("no_receive", no_receive),
    ("no_send", no_send),
    ("fabric", fabric),
    ("later", later),
    ("stopped_reader", stopped_reader),
    ("stopped", stopped),
    ("gone", gone),
    ("healthy", healthy),
    ("stall::off", off),
];

/// One of two ranks, with a comm each way, and registered memory for both.
struct Rank<'a> {
    ctx: &'a Ctx,
    plugin: Plugin,
    send: Opaque,
    recv: Opaque,
    mem: Mem,
    send_mr: Opaque,
    recv_mr: Opaque,
    peer_pid: String,
}

const ROOM: usize = 1 << 20;

/// Bytes of a message that stays outstanding if the peer does not poll: over TCP more than the sockets hold.
fn outstanding() -> usize {
    if std::env::var("RAILHEAD_SOFT_WIRE").is_ok_and(|wire| wire == "tcp") { ROOM } else { 8 }
}

/// Sockets that hold less than that.
const SMALL_SOCKETS: (&str, &str) = ("RAILHEAD_TCP_BUFFER_KIB", "16");

impl Rank<'_> {
    fn new(ctx: &Ctx) -> Rank<'_> {
        let plugin = Plugin::start(12);
        let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
        let mem = Mem::new(2 * ROOM);
        let send_mr = plugin.reg_mr(send, mem.ptr(0), mem.len()).expect("regMr");
        let recv_mr = plugin.reg_mr(recv, mem.ptr(0), mem.len()).expect("regMr");
        let peer = ctx.to(1 - ctx.rank);
        peer.send(std::process::id().to_string().as_bytes()).expect("the other rank");
        Rank { ctx, plugin, send, recv, mem, send_mr, recv_mr, peer_pid: peer.text() }
    }

    fn try_send(&self, len: usize, tag: i32) -> Option<Opaque> {
        self.plugin.isend(self.send, self.mem.ptr(0), len, tag, self.send_mr).expect("isend")
    }

    fn post_send(&self, len: usize) -> Opaque {
        until("isend", || self.try_send(len, 1))
    }

    fn post_recv(&self, len: usize) -> Opaque {
        let buf = Buf { addr: self.mem.ptr(ROOM), len, tag: 1, mr: self.recv_mr };
        self.plugin.irecv(self.recv, &[buf]).expect("irecv").expect("room")
    }

    fn wait(&self, request: Opaque) {
        comms::wait(&self.plugin, request).expect("test");
    }

    fn test_in_vain(&self, request: Opaque) {
        assert_eq!(self.plugin.test(request).expect("test"), None);
    }

    /// Polls until something is reported, which must be this.
    fn stall(&self, what: &str, cause: &str, poll: impl Fn()) {
        let report = until("a report", || {
            poll();
            reports().pop()
        });
        let age = report.split("for ").nth(1).and_then(|rest| rest.split(" s so far").next()).and_then(|age| age.parse::<f64>().ok());
        assert!(age.is_some_and(|age| (0.1..60.0).contains(&age)), "{report}");
        // The number by which the process's page knows the comm.
        let end = if what.starts_with("send") { CommKind::Send } else { CommKind::Recv };
        let pages = page::find(std::process::id() as i32);
        let comms = pages.iter().flat_map(|page| page.snapshot().comms).filter(|comm| comm.kind == end);
        let ids: Vec<String> = comms.map(|comm| format!(" of {} comm {} on ", end.name(), comm.id)).collect();
        assert!(matches!(&ids[..], [id] if report.contains(id)), "no {ids:?} in: {report}");
        for part in [&format!("stalled: {what} of "), &format!("cause: {cause}"), &format!("pid {} (", self.peer_pid), "outstanding"] {
            assert!(report.contains(part), "no {part:?} in: {report}");
        }
    }

    /// The other rank hears this and goes on.
    fn tell(&self, word: &str) {
        self.ctx.to(1 - self.ctx.rank).send(word.as_bytes()).expect("the other rank");
    }

    /// Does nothing until the other rank says this.
    #[track_caller]
    fn hear(&self, word: &str) {
        assert_eq!(self.ctx.to(1 - self.ctx.rank).text(), word);
    }

    /// Polls until the other rank says something.
    fn hear_polling(&self, word: &str, poll: impl Fn()) {
        until(word, || {
            poll();
            self.ctx.to(1 - self.ctx.rank).ready().then_some(())
        });
        self.hear(word);
    }
}

/// How many waits were reported to be over.
static OVER: AtomicUsize = AtomicUsize::new(0);

/// Reports since the last call.
fn reports() -> Vec<String> {
    let log = take_log();
    OVER.fetch_add(log.iter().filter(|(level, text)| *level == 3 && text.starts_with("no longer stalled: ")).count(), Ordering::Relaxed);
    log.into_iter().filter(|(level, text)| *level == 2 && text.starts_with("stalled: ")).map(|(_, text)| text).collect()
}

#[track_caller]
fn no_more_reports() {
    assert_eq!(reports(), [""; 0]);
}

/// Only calls make progress: a rank that makes none does not poll.
fn both_wires(role: &'static str, warn_s: &str) {
    for wire in WIRES {
        let world = World::new(role, 2).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_STALL_WARN_S", warn_s);
        world.env("RAILHEAD_PROGRESS", "poll").env(SMALL_SOCKETS.0, SMALL_SOCKETS.1).spawn().finish();
    }
}

/// Rank 0 wants to send, rank 1 has posted nothing; in every second round, nothing with that tag.
fn no_receive(ctx: &Ctx) {
    let rank = Rank::new(ctx);
    for round in 0..rounds() {
        let other_tag = round % 2 == 1;
        if ctx.rank == 1 {
            rank.hear("receive");
            let request = rank.post_recv(8);
            rank.tell("posted");
            rank.wait(request);
            continue;
        }
        let what = format!("send {round}, not yet posted,");
        let cause = "the peer has not posted a receive";
        if other_tag {
            rank.tell("receive");
            rank.hear("posted");
            rank.stall(&what, &format!("{cause} (with this tag"), || assert_eq!(rank.try_send(8, 7), None));
        } else {
            rank.stall(&what, &format!("{cause}; 0 request"), || assert_eq!(rank.try_send(8, 1), None));
            rank.tell("receive");
            rank.hear("posted");
        }
        let request = rank.post_send(8);
        rank.wait(request);
        no_more_reports();
    }
}

#[test]
fn the_peer_has_not_posted_a_receive() {
    both_wires("no_receive", SOON);
}

/// Rank 0 waits for a message; rank 1 sends none and does nothing else either, or, in every second round, polls.
fn no_send(ctx: &Ctx) {
    let rank = Rank::new(ctx);
    for round in 0..rounds() {
        let polls = round % 2 == 1;
        if ctx.rank == 0 {
            let request = rank.post_recv(8);
            rank.tell("posted");
            let detail = if polls { "it knows of the receive" } else { "nor taken the receive's clear-to-send" };
            let what = format!("receive {round}");
            rank.stall(&what, &format!("the peer has not sent ({detail}"), || rank.test_in_vain(request));
            rank.tell("send");
            rank.wait(request);
            no_more_reports();
            rank.tell("next");
        } else {
            rank.hear("posted");
            match polls {
                // A tag that no receive has.
                true => rank.hear_polling("send", || assert_eq!(rank.try_send(8, 7), None)),
                false => rank.hear("send"),
            }
            let request = rank.post_send(8);
            rank.wait(request);
            rank.hear("next");
        }
    }
    // The end of a wait is noticed at the next look, which is in the next wait.
    if ctx.rank == 0 {
        assert_eq!(OVER.load(Ordering::Relaxed), rounds() - 1);
    }
}

#[test]
fn the_peer_has_not_sent() {
    both_wires("no_send", SOON_FOR_AN_ANSWER);
}

/// Rank 0's message was posted; rank 1 has posted the receive and then does not poll. Small ones and large ones.
fn fabric(ctx: &Ctx) {
    let rank = Rank::new(ctx);
    for round in 0..rounds() {
        let len = if round % 2 == 0 { outstanding() } else { ROOM };
        if ctx.rank == 0 {
            rank.hear("posted");
            let request = rank.post_send(len);
            rank.stall(&format!("send {round}"), "the fabric has not completed (", || rank.test_in_vain(request));
            rank.tell("poll");
            rank.wait(request);
            no_more_reports();
            rank.tell("next");
        } else {
            let request = rank.post_recv(len);
            rank.tell("posted");
            rank.hear("poll");
            rank.wait(request);
            rank.hear("next");
        }
    }
}

#[test]
fn the_fabric_has_not_completed() {
    both_wires("fabric", SOON);
}

/// Rank 1 does not poll; what rank 0 sends behind the oldest message is not a part of that.
fn later(ctx: &Ctx) {
    let rank = Rank::new(ctx);
    if ctx.rank == 0 {
        rank.hear("posted");
        let first = rank.post_send(outstanding());
        // The first look is at this one.
        (0..1000).for_each(|_| rank.test_in_vain(first));
        let second = rank.post_send(8);
        rank.stall("send 0", "the fabric has not completed (the peer does not poll", || rank.test_in_vain(first));
        rank.tell("poll");
        [first, second].into_iter().for_each(|request| rank.wait(request));
        no_more_reports();
    } else {
        let requests = [rank.post_recv(outstanding()), rank.post_recv(8)];
        rank.tell("posted");
        rank.hear("poll");
        requests.into_iter().for_each(|request| rank.wait(request));
    }
}

#[test]
fn what_moves_later_is_no_part_of_the_oldest() {
    both_wires("later", SOON);
}

/// Rank 1 is stopped with more under way than its socket holds, for longer than a silent host may take.
fn stopped_reader(ctx: &Ctx) {
    const LEN: usize = 64 << 20;
    let plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    let mem = Mem::new(LEN);
    if ctx.rank == 1 {
        let mr = plugin.reg_mr(recv, mem.ptr(0), LEN).expect("regMr");
        let request = comms::irecv(&plugin, recv, &mem, 0, LEN, 1, mr).expect("irecv");
        ctx.say("posted");
        assert_eq!(ctx.parent.text(), "receive");
        assert_eq!(comms::wait(&plugin, request).expect("test")[0], LEN as i32);
        return;
    }
    let mr = plugin.reg_mr(send, mem.ptr(0), LEN).expect("regMr");
    assert_eq!(ctx.parent.text(), "stopped");
    let request = comms::isend(&plugin, send, &mem, 0, LEN, 1, mr).expect("isend");
    // Time has to pass: twice what the kernel took to give up a connection by TCP_USER_TIMEOUT.
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        assert_eq!(plugin.test(request), Ok(None), "a peer that lives was given up");
        support::pause(start);
    }
    ctx.say("still there");
    comms::wait(&plugin, request).expect("test");
}

#[test]
fn a_stopped_peer_is_not_given_up_however_much_is_under_way() {
    let mut ranks = World::new("stopped_reader", 2).env("RAILHEAD_SOFT_WIRE", "tcp").env("RAILHEAD_TCP_USER_TIMEOUT_S", "1").spawn();
    ranks.expect(1, "posted");
    stop(&ranks, 1);
    ranks.tell(0, "stopped");
    ranks.expect(0, "still there");
    ranks.ranks[1].signal(libc::SIGCONT);
    ranks.tell(1, "receive");
    ranks.finish();
}

/// Rank 1 is stopped; rank 0 wants to send, has sent or wants to receive.
fn stopped(ctx: &Ctx) {
    let rank = Rank::new(ctx);
    let (mut sends, mut recvs) = (0, 0);
    for round in 0..rounds() {
        let posted = round % 3 == 1;
        if ctx.rank == 1 {
            let request = posted.then(|| rank.post_recv(outstanding()));
            rank.tell("ready");
            rank.hear("go on");
            if round % 3 == 2 {
                let request = rank.post_send(8);
                rank.wait(request);
            } else {
                rank.wait(request.unwrap_or_else(|| rank.post_recv(8)));
            }
            continue;
        }
        rank.hear("ready");
        let stop = || {
            ctx.say("stop it");
            assert_eq!(ctx.parent.text(), "stopped");
        };
        let resume = || {
            ctx.say("resume it");
            rank.tell("go on");
        };
        let cause = "the peer's process is stopped; ";
        if round % 3 == 2 {
            stop();
            let request = rank.post_recv(8);
            rank.stall(&format!("receive {recvs}"), cause, || rank.test_in_vain(request));
            resume();
            rank.wait(request);
            recvs += 1;
        } else if posted {
            stop();
            let request = rank.post_send(outstanding());
            rank.stall(&format!("send {sends}"), cause, || rank.test_in_vain(request));
            resume();
            rank.wait(request);
            sends += 1;
        } else {
            stop();
            rank.stall(&format!("send {sends}, not yet posted,"), cause, || assert_eq!(rank.try_send(8, 1), None));
            resume();
            let request = rank.post_send(8);
            rank.wait(request);
            sends += 1;
        }
        no_more_reports();
    }
    ctx.say("done");
}

#[test]
fn the_peer_is_stopped() {
    for wire in WIRES {
        let world = World::new("stopped", 2).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_STALL_WARN_S", SOON);
        let mut ranks = world.env(SMALL_SOCKETS.0, SMALL_SOCKETS.1).spawn();
        let mut stops = 0;
        loop {
            match ranks.hear(0).as_str() {
                "stop it" => {
                    stop(&ranks, 1);
                    ranks.tell(0, "stopped");
                    stops += 1;
                }
                "resume it" => ranks.ranks[1].signal(libc::SIGCONT),
                word => break assert_eq!(word, "done"),
            }
        }
        assert_eq!(stops, rounds());
        ranks.finish();
    }
}

/// Returns once the rank is stopped.
fn stop(ranks: &Ranks, rank: usize) {
    ranks.ranks[rank].signal(libc::SIGSTOP);
    until("the stop", || (ranks.ranks[rank].state() == 'T').then_some(()));
}

/// Rank 1 is killed while rank 0 waits: the failure of the comm is the report.
fn gone(ctx: &Ctx) {
    let rank = Rank::new(ctx);
    if ctx.rank == 1 {
        let _request = rank.post_recv(outstanding());
        rank.tell("posted");
        rank.hear("never");
        return;
    }
    let kind = std::env::var("RHT_KIND").expect("RHT_KIND");
    rank.hear("posted");
    let request = match kind.as_str() {
        "receive" => Some(rank.post_recv(8)),
        "send" => Some(rank.post_send(outstanding())),
        _ => None,
    };
    let poll = || match request {
        Some(request) => rank.plugin.test(request).map(|sizes| assert_eq!(sizes, None)),
        None => rank.plugin.isend(rank.send, rank.mem.ptr(0), 8, 7, rank.send_mr).map(|request| assert_eq!(request, None)),
    };
    poll().expect("not yet");
    ctx.say("kill it");
    until("the death", || poll().err());
    let said: Vec<String> = take_log().into_iter().filter(|(level, _)| *level == 2).map(|(_, text)| text).collect();
    // Both comms may have died, each with a line.
    let comm = if kind == "receive" { "recv comm " } else { "send comm " };
    let report = said.iter().find(|text| text.contains(comm)).unwrap_or_else(|| panic!("{said:?}"));
    let number = if request.is_some() { "the oldest is number 0" } else { "0 request(s) outstanding" };
    for part in [number, "cause: the peer is gone", &format!("pid {} (", rank.peer_pid)] {
        assert!(report.contains(part), "no {part:?} in: {report}");
    }
}

#[test]
fn the_peer_is_gone() {
    for (wire, round) in WIRES.into_iter().flat_map(|wire| (0..rounds()).map(move |round| (wire, round))) {
        let kind = ["receive", "send", "next send"][round % 3];
        // The receiver takes nothing: it makes no calls.
        let world = World::new("gone", 2).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_PROGRESS", "poll").env("RHT_KIND", kind);
        let mut ranks = world.env("RAILHEAD_STALL_WARN_S", "30").env(SMALL_SOCKETS.0, SMALL_SOCKETS.1).spawn();
        ranks.expect(0, "kill it");
        ranks.ranks[1].signal(libc::SIGKILL);
        assert!(ranks.ranks[0].wait().success(), "{wire} {kind}");
    }
}

/// Nothing comes on the channel: a delay that does not depend on anybody.
fn delay(ctx: &Ctx) {
    assert_eq!(ctx.parent.recv_within(DELAY).map_err(|e| e.kind()), Err(std::io::ErrorKind::TimedOut));
}

/// Rounds of a kind in which the machine was too slow for them to prove anything, before that kind is skipped.
const SLOW: usize = 3;

/// Every kind of wait, for nine tenths of the limit. A round that took the limit itself by this test's clock proves nothing and is repeated.
fn healthy(ctx: &Ctx) {
    let rank = Rank::new(ctx);
    let kinds = 4;
    let (mut slow, mut kind) = (0, 0);
    while kind < kinds {
        let begin = Instant::now();
        match (ctx.rank, kind) {
            // The receive comes late.
            (0, 0) => {
                let request = rank.post_send(8);
                rank.wait(request);
            }
            (1, 0) => {
                delay(ctx);
                let request = rank.post_recv(8);
                rank.wait(request);
            }
            // The send does.
            (0, 1) => {
                let request = rank.post_recv(8);
                rank.wait(request);
            }
            (1, 1) => {
                delay(ctx);
                let request = rank.post_send(8);
                rank.wait(request);
            }
            // The receiver does not poll.
            (0, 2) => {
                let request = rank.post_send(8);
                rank.wait(request);
            }
            (1, 2) => {
                let request = rank.post_recv(8);
                delay(ctx);
                rank.wait(request);
            }
            // The peer is stopped.
            (0, _) => {
                let request = rank.post_recv(8);
                ctx.say("stop it");
                rank.wait(request);
            }
            (_, _) => {
                until("the stop and its end", || {
                    assert_eq!(rank.try_send(8, 7), None);
                    ctx.parent.ready().then_some(())
                });
                assert_eq!(ctx.parent.text(), "resumed");
                let request = rank.post_send(8);
                rank.wait(request);
            }
        }
        let took = begin.elapsed();
        let reports = reports();
        ctx.barrier();
        let mine = if took < LIMIT { "fair" } else { "slow" };
        rank.tell(mine);
        let theirs = ctx.to(1 - ctx.rank).text();
        if mine == "fair" && theirs == "fair" {
            assert_eq!(reports, [""; 0], "kind {kind}, {took:?}");
            (kind, slow) = (kind + 1, 0);
        } else {
            slow += 1;
        }
        if slow == SLOW {
            println!("SKIP: the machine was too slow for a wait of kind {kind} in each of {SLOW} rounds");
            (kind, slow) = (kind + 1, 0);
        }
    }
    ctx.say("done");
}

#[test]
fn nine_tenths_of_the_limit_are_no_stall() {
    for wire in WIRES {
        let limit = LIMIT.as_secs().to_string();
        let mut ranks = World::new("healthy", 2).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_STALL_WARN_S", &limit).spawn();
        loop {
            match ranks.hear(0).as_str() {
                "stop it" => {
                    stop(&ranks, 1);
                    let silence = ranks.ranks[0].chan.recv_within(DELAY).map_err(|e| e.kind());
                    assert_eq!(silence, Err(std::io::ErrorKind::TimedOut));
                    ranks.ranks[1].signal(libc::SIGCONT);
                    ranks.tell(1, "resumed");
                }
                word => break assert_eq!(word, "done"),
            }
        }
        ranks.expect(1, "done");
        ranks.finish();
    }
}

/// Ten times as long as what the other tests wait for.
fn off(ctx: &Ctx) {
    let rank = Rank::new(ctx);
    if ctx.rank == 0 {
        let request = rank.post_recv(8);
        rank.wait(request);
        no_more_reports();
    } else {
        delay(ctx);
        let request = rank.post_send(8);
        rank.wait(request);
    }
    ctx.barrier();
}

#[test]
fn nothing_is_reported_when_switched_off() {
    World::new("stall::off", 2).env("RAILHEAD_STALL_WARN_S", "0").spawn().finish();
}
