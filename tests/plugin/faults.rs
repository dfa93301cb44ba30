//! What a machine and a user can do wrong: no usable interface, too few descriptors, settings out of range, fork; and what is left behind by
//! ordinary use and by peers that die.

use std::os::fd::AsRawFd;

use crate::support;
use support::comms::{self, SIZES};
use support::holdings::{Holdings, abandoned_files, dev_shm, shm_files};
#[cfg(feature = "stages")]
use support::netns::Cable;
use support::netns::usable;
use support::plugin::{INVALID_USAGE, Plugin, REMOTE_ERROR, SYSTEM_ERROR, take_log};
use support::{Ctx, Role, World, pattern, until};

pub const ROLES: &[(&str, Role)] = &[
    ("no_interface", no_interface),
    ("few_descriptors", few_descriptors),
    ("one_descriptor_more", one_descriptor_more),
    ("no_descriptor_needed", no_descriptor_needed),
    ("settings", settings),
    ("forks", forks),
    ("comes_and_goes", comes_and_goes),
    ("survives", survives),
    ("guarded_handle", guarded_handle),
    ("faults::exchange", exchange),
    ("starts", starts),
];

/// What was logged at WARN (2).
fn warnings() -> Vec<String> {
    take_log().into_iter().filter(|(level, _)| *level == 2).map(|(_, text)| text).collect()
}

/// NCCL then takes the next plugin: no devices, no error, and one line that says why.
fn no_interface(_: &Ctx) {
    let mut plugin = Plugin::load(12);
    let usable = plugin.init().and_then(|()| plugin.devices());
    let said = warnings();
    assert!(matches!(usable, Ok(0) | Err(INVALID_USAGE)), "{usable:?}");
    let word = std::env::var("RHT_SAYS").unwrap_or("interface".into());
    assert!(said.iter().any(|w| w.contains(&word)), "{said:?}");
    assert!(plugin.listen(0).is_err());
    assert!(plugin.properties(0).is_err());
    if usable.is_ok() {
        plugin.finalize().expect("finalize");
    }
}

#[test]
fn no_usable_interface() {
    World::new("no_interface", 1).env("RAILHEAD_SOCKET_IFNAME", "=nosuchinterface0").spawn().finish();
    World::new("no_interface", 1).env("RAILHEAD_SOCKET_IFNAME", "^eth,en,lo,w,b,v,d,t,ifb,r").spawn().finish();
    if usable() {
        // A namespace with nothing in it but loopback, which is down.
        World::new("no_interface", 1).wrap(0, &["unshare", "--net"]).spawn().finish();
    }
}

#[test]
fn no_such_provider() {
    World::new("no_interface", 1).env("RAILHEAD_FABRIC", "verbs").env("RHT_SAYS", "RAILHEAD_FABRIC=verbs").spawn().finish();
}

/// Comms are made until the descriptors run out: an error then, a line that names the limit, and what exists goes on working.
fn few_descriptors(_: &Ctx) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one valid rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = 260;
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let plugin = Plugin::start(12);
    let mut open = Vec::new();
    let error = until("the end of the descriptors", || match comms::to_itself(&plugin, 0) {
        Ok(pair) => {
            open.push(pair);
            None
        }
        Err(e) => Some(e),
    });
    let said = warnings();
    // Of a pair, one end has no descriptor left, and the other hears that it went away.
    assert!([SYSTEM_ERROR, REMOTE_ERROR].contains(&error), "{error}: {said:?}");
    assert!(said.iter().any(|w| w.contains("RLIMIT_NOFILE") || w.contains("ulimit")), "{said:?}");
    assert!(!open.is_empty());
    // One comm less, and there is room to go on.
    for _ in 0..3 {
        let (send, recv) = open.pop().expect("a pair");
        plugin.close_send(send).expect("close");
        plugin.close_recv(recv).expect("close");
        take_log();
    }
    for (send, recv) in open {
        comms::exchange_with_itself(&plugin, send, recv, &pattern(1, 5000));
        plugin.close_send(send).expect("close");
        plugin.close_recv(recv).expect("close");
    }
}

#[test]
fn descriptors_run_out() {
    for wire in ["shm", "tcp"] {
        World::new("few_descriptors", 1).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

/// A pair of comms with one descriptor to be had, with two, and so on until they are enough: wherever the last one goes, a call says so, once.
fn one_descriptor_more(_: &Ctx) {
    let plugin = Plugin::start(12);
    // Those of the harness are numbered high; the limit is one of numbers.
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    let fill: Vec<_> = std::iter::from_fn(|| null.try_clone().ok()).take_while(|file| file.as_raw_fd() < 220).collect();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one valid rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    for more in 0..64 {
        limit.rlim_cur = 220 + more;
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        let Ok((mut handle, listen)) = plugin.listen(0) else {
            assert_eq!(warnings().len(), 1);
            continue;
        };
        let (mut send, mut recv) = (Ok(None), Ok(None));
        let error = until("comms, or an error", || {
            if let Ok(None) = send {
                send = plugin.connect(0, &mut handle);
            }
            if recv == Ok(None) && send != Err(SYSTEM_ERROR) {
                recv = plugin.accept(listen);
            }
            match (send, recv) {
                (Err(SYSTEM_ERROR), _) | (_, Err(SYSTEM_ERROR)) => Some(Err(SYSTEM_ERROR)),
                // A device's thread may let the other end know first.
                (Ok(None), _) | (_, Ok(None)) => None,
                (Ok(Some(send)), Ok(Some(recv))) => Some(Ok((send, recv))),
                (Err(other), _) | (_, Err(other)) => Some(Err(other)),
            }
        });
        let said = warnings();
        plugin.close_listen(listen).expect("closeListen");
        let error = match error {
            Ok((send, recv)) => {
                assert!(more > 8, "{more} descriptors are enough");
                comms::exchange_with_itself(&plugin, send, recv, &pattern(1, 5000));
                plugin.close_send(send).expect("close");
                plugin.close_recv(recv).expect("close");
                drop(fill);
                return;
            }
            Err(error) => error,
        };
        // Nobody is there any more for the other end, which may say so in any words.
        if let Ok(None) = send {
            send = until("an end of connect", || plugin.connect(0, &mut handle).transpose()).map(Some);
        }
        if let Ok(Some(comm)) = send {
            plugin.close_send(comm).expect("close");
        }
        if let Ok(Some(comm)) = recv {
            plugin.close_recv(comm).expect("close");
        }
        take_log();
        assert_eq!(error, SYSTEM_ERROR, "{more} descriptors: {said:?}");
        let limits: Vec<_> = said.iter().filter(|line| line.contains("RLIMIT_NOFILE is")).collect();
        // Both ends may have lacked one.
        assert!((1..=2).contains(&limits.len()), "{more} descriptors: {said:?}");
    }
    panic!("64 descriptors are not enough");
}

#[test]
fn whoever_lacks_one_descriptor_hears_of_it() {
    // At once, as each waits most of its time for ends of comms whose peers are gone.
    let settings = [("poll", "shm"), ("poll", "tcp"), ("thread", "shm"), ("thread", "tcp")];
    let worlds = settings.map(|(mode, wire)| {
        let world = World::new("one_descriptor_more", 1).env("RAILHEAD_PROGRESS", mode).env("RAILHEAD_SOFT_WIRE", wire);
        world.env("RAILHEAD_TCP_STREAMS", "2").spawn()
    });
    worlds.into_iter().for_each(support::Ranks::finish);
}

/// Has no descriptor left while it waits for somebody who does not come: neither a listener nor a queue pair needs one for that.
fn no_descriptor_needed(_: &Ctx) {
    let plugin = Plugin::start(12);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one valid rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    let without = |calls: &mut dyn FnMut()| {
        let lowest = std::fs::File::open("/dev/null").expect("/dev/null").as_raw_fd();
        let none = libc::rlimit { rlim_cur: lowest as u64, ..limit };
        // SAFETY: one valid rlimit, twice.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
        calls();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    };
    // Whose queue pair dials is a matter of chance, and that one does need a descriptor.
    until("a connect that waits for the other end to dial", || {
        let (mut handle, listen) = plugin.listen(0).expect("listen");
        without(&mut || (0..100).for_each(|_| assert_eq!(plugin.accept(listen), Ok(None), "{:?}", warnings())));
        // H1 and H2.
        assert_eq!(plugin.connect(0, &mut handle), Ok(None));
        assert_eq!(plugin.accept(listen), Ok(None));
        let mut waits = Ok(None);
        without(&mut || (0..100).for_each(|_| waits = waits.and_then(|_| plugin.connect(0, &mut handle))));
        let said = warnings();
        let dials = said.iter().any(|line| line.contains("to dial the peer"));
        assert!(dials || waits == Ok(None), "{waits:?}: {said:?}");
        let done = (!dials).then(|| {
            let (mut send, mut recv) = (None, None);
            until("comms", || {
                send = send.or_else(|| plugin.connect(0, &mut handle).expect("connect"));
                recv = recv.or_else(|| plugin.accept(listen).expect("accept"));
                send.zip(recv)
            })
        });
        plugin.close_listen(listen).expect("closeListen");
        let (send, recv) = done?;
        comms::exchange_with_itself(&plugin, send, recv, &pattern(1, 5000));
        plugin.close_send(send).expect("close");
        plugin.close_recv(recv).ok()
    });
}

#[test]
fn nobody_lacks_a_descriptor_for_somebody_who_does_not_come() {
    for wire in ["shm", "tcp"] {
        World::new("no_descriptor_needed", 1).env("RAILHEAD_PROGRESS", "poll").env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

/// Every setting out of range at once: each is reported with its accepted range, and the defaults do the work.
fn settings(_: &Ctx) {
    let plugin = Plugin::start(12);
    let said = warnings();
    for (name, _) in BAD_SETTINGS {
        let line = said.iter().find(|w| w.contains(name));
        let line = line.unwrap_or_else(|| panic!("nothing said about {name}: {said:?}"));
        assert!(line.contains("default") && line.contains('('), "{line}");
    }
    assert!(said.iter().any(|w| w.contains("RAILHEAD_NO_SUCH_SETTING")), "{said:?}");
    let (send, recv) = comms::to_itself(&plugin, 0).expect("comms");
    comms::exchange_with_itself(&plugin, send, recv, &pattern(1, 100_000));
}

const BAD_SETTINGS: [(&str, &str); 19] = [
    ("RAILHEAD_FABRIC", "carrier-pigeon"),
    ("RAILHEAD_SOFT_WIRE", "barbed"),
    ("RAILHEAD_CMA", "perhaps"),
    ("RAILHEAD_SHM_BOUNCE_KIB", "1"),
    ("RAILHEAD_TCP_STREAMS", "17"),
    ("RAILHEAD_TCP_BUFFER_KIB", "99999999999999999999"),
    ("RAILHEAD_SOCKET_FAMILY", "AF_IPX"),
    ("RAILHEAD_PORT_RANGE", "9-1"),
    ("RAILHEAD_QPS_PER_RAIL", "0"),
    ("RAILHEAD_SPLIT_MIN", "-1"),
    ("RAILHEAD_TC", "256"),
    ("RAILHEAD_MAX_HALF_OPEN", "0"),
    ("RAILHEAD_HANDSHAKE_TIMEOUT_S", ""),
    ("RAILHEAD_PEER_TIMEOUT_S", "1h"),
    ("RAILHEAD_TCP_USER_TIMEOUT_S", "0x"),
    ("RAILHEAD_FABRIC_TIMEOUT_S", "NaN"),
    ("RAILHEAD_DEBUG", "loud"),
    ("RAILHEAD_STATS", "2"),
    ("RAILHEAD_STALL_WARN_S", "soon"),
];

#[test]
fn settings_out_of_range() {
    let world = BAD_SETTINGS.iter().fold(World::new("settings", 1), |w, (name, value)| w.env(name, value));
    world.env("RAILHEAD_NO_SUCH_SETTING", "1").spawn().finish();
}

/// A fork while comms exist: the parent goes on; in the child the old comms fail, a new init works, and nothing of the parent's is disturbed.
fn forks(_: &Ctx) {
    let mut plugin = Plugin::start(12);
    let (send, recv) = comms::to_itself(&plugin, 0).expect("comms");
    comms::exchange_with_itself(&plugin, send, recv, &pattern(1, 70_000));
    let held = comms::Mem::new(4096);
    let mr = plugin.reg_mr(send, held.ptr(0), 4096).expect("regMr");
    // SAFETY: the child only uses this thread's state and leaves by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert!(plugin.isend(send, held.ptr(0), 64, 1, mr).is_err(), "isend on the parent's comm");
            assert!(plugin.accept(send).is_err());
            let _ = (plugin.close_send(send), plugin.close_recv(recv));
            let mut own = Plugin::load(12);
            own.init().expect("init in the child");
            let (send, recv) = comms::to_itself(&own, 0).expect("comms");
            comms::exchange_with_itself(&own, send, recv, &pattern(2, 70_000));
            own.close_send(send).expect("close");
            own.close_recv(recv).expect("close");
            own.finalize().expect("finalize");
        }));
        // SAFETY: ends the child without running the parent's handlers.
        unsafe { libc::_exit(if outcome.is_ok() { 0 } else { 1 }) };
    }
    for i in 0..50 {
        comms::exchange_with_itself(&plugin, send, recv, &pattern(i, 70_000));
    }
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
    for i in 0..50 {
        comms::exchange_with_itself(&plugin, send, recv, &pattern(i, 70_000));
    }
    plugin.dereg_mr(send, mr).expect("deregMr");
    plugin.close_send(send).expect("close");
    plugin.close_recv(recv).expect("close");
    plugin.finalize().expect("finalize");
}

#[test]
fn parent_and_child_of_a_fork_both_go_on() {
    for wire in ["shm", "tcp"] {
        World::new("forks", 1).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

/// Comms made, used and closed many times over between two processes: after the last finalize both hold what they held before init.
fn comes_and_goes(ctx: &Ctx) {
    let live = |plugin: &Plugin, i: usize| {
        let (send, recv) = comms::both_ways(ctx, plugin, 0).expect("comms");
        comms::exchange(plugin, ctx.rank, send, recv, &[i % 100, 70_000, 300_000]).expect("exchange");
        ctx.barrier();
        if i % 2 == ctx.rank {
            plugin.close_send(send).expect("close");
            plugin.close_recv(recv).expect("close");
        } else {
            plugin.close_recv(recv).expect("close");
            plugin.close_send(send).expect("close");
        }
    };
    let mut before = None;
    for round in 0..2 {
        let mut plugin = Plugin::start(12);
        (0..50).for_each(|i| live(&plugin, i));
        plugin.finalize().expect("finalize");
        let after = Holdings::now();
        match &before {
            None => before = Some(after),
            Some(before) => before.assert_same(&after, &format!("round {round} of fifty comms")),
        }
    }
}

#[test]
fn a_hundred_comms_leave_nothing() {
    let _alone = dev_shm();
    for wire in ["shm", "tcp"] {
        World::new("comes_and_goes", 2).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

/// Rank 0 outlives ten peers that are killed in the middle of a message: an error each time, and nothing kept of any of them.
fn survives(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    if ctx.rank > 0 {
        let (_, recv) = comms::both_ways_on(ctx.to(0), &plugin, 0).expect("comms");
        // Receives what is never sent whole: rank 0 waits for our second receive when it is killed.
        comms::recv(&plugin, recv, 100_000).expect("the first message");
        ctx.say("kill me");
        loop {
            std::hint::spin_loop();
        }
    }
    let mut before = None;
    for rank in 1..ctx.size {
        let (send, recv) = comms::both_ways_on(ctx.to(rank), &plugin, 0).expect("comms");
        comms::send(&plugin, send, &pattern(1, 100_000)).expect("the first message");
        let mem = comms::Mem::filled(&pattern(2, 1 << 20));
        let mr = plugin.reg_mr(send, mem.ptr(0), mem.len()).expect("regMr");
        let to = comms::Mem::new(4096);
        let to_mr = plugin.reg_mr(recv, to.ptr(0), 4096).expect("regMr");
        let pending = comms::irecv(&plugin, recv, &to, 0, 4096, 1, to_mr).expect("irecv");
        // Without a receive isend has nothing to fail but says "not now" until it sees the death.
        let sending = until("the death, at the sender", || plugin.isend(send, mem.ptr(0), mem.len(), 1, mr).err());
        let receiving = until("the death, at the receiver", || plugin.test(pending).err());
        assert_eq!((sending, receiving), (REMOTE_ERROR, REMOTE_ERROR));
        plugin.dereg_mr(send, mr).expect("deregMr");
        plugin.dereg_mr(recv, to_mr).expect("deregMr");
        plugin.close_send(send).expect("close");
        plugin.close_recv(recv).expect("close");
        match &before {
            None => before = Some(Holdings::now()),
            Some(before) => {
                let after = Holdings::now();
                before.assert_same(&after, "peers that were killed");
            }
        }
    }
    ctx.say("done");
}

#[test]
fn killed_peers_leave_nothing() {
    let _alone = dev_shm();
    for wire in ["shm", "tcp"] {
        let mut ranks = World::new("survives", 6).env("RAILHEAD_SOFT_WIRE", wire).spawn();
        for rank in 1..6 {
            ranks.expect(rank, "kill me");
            ranks.ranks[rank].signal(libc::SIGKILL);
        }
        ranks.expect(0, "done");
        assert!(ranks.ranks[0].wait().success());
        assert!(shm_files().is_empty(), "{:?}", shm_files());
    }
}

/// v4's handle has 64 bytes and not one more: here an inaccessible page follows.
fn guarded_handle(_: &Ctx) {
    let plugin = Plugin::start(4);
    let (handle, listen) = plugin.listen(0).expect("listen");
    let page = 4096;
    let (none, anonymous) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping of two pages, the first of which is made usable.
    let base = unsafe {
        let base = libc::mmap(std::ptr::null_mut(), 2 * page, none, anonymous, -1, 0).cast::<u8>();
        assert_eq!(libc::mprotect(base.cast(), page, libc::PROT_READ | libc::PROT_WRITE), 0);
        base
    };
    // SAFETY: the last 64 bytes of the first page.
    let send = unsafe {
        let place = base.add(page - 64);
        std::ptr::copy_nonoverlapping(handle.as_ptr(), place, 64);
        plugin.connect_at(0, place, None).expect("connect").expect("v4 connects in one call")
    };
    assert!(handle[64..].iter().all(|&b| b == 0), "listen wrote more than 64 bytes");
    let recv = plugin.accept(listen).expect("accept").expect("v4 accepts in one call");
    comms::exchange_with_itself(&plugin, send, recv, &pattern(1, 100_000));
}

#[test]
fn v4_handle_before_a_guard_page() {
    World::new("guarded_handle", 1).spawn().finish();
}

fn exchange(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    // Whose peer dies while the wires meet hears it here.
    let Ok((send, recv)) = comms::both_ways(ctx, &plugin, 0) else { return ctx.say("alone") };
    ctx.say("connected");
    comms::exchange(&plugin, ctx.rank, send, recv, &SIZES).expect("exchange");
    ctx.barrier();
}

fn starts(_: &Ctx) {
    Plugin::start(12);
}

/// A process that dies with a file of its own in /dev/shm leaves it to the next start of anybody's.
#[cfg(feature = "stages")]
#[test]
fn the_next_start_sweeps_dev_shm() {
    if !usable() {
        return;
    }
    let _alone = dev_shm();
    let cable = Cable::new();
    // Another test's process may start, and sweep, before it is seen.
    let seen = (0..40).any(|_| {
        let world =
            (0..2).fold(World::new("faults::exchange", 2), |w, r| w.wrap(r, &cable.at(r)).env_of(r, "RAILHEAD_SOCKET_IFNAME", "rht"));
        let mut ranks = world.env("RH_STAGE", "wire_hello_ready=kill").spawn();
        // Whichever dials dies having just made the file; the other may wait for a connection that nobody opens.
        until("a death", || ranks.ranks.iter_mut().any(|rank| rank.ended().is_some()).then_some(()));
        for rank in &mut ranks.ranks {
            rank.signal(libc::SIGKILL);
            rank.wait();
        }
        !abandoned_files().is_empty()
    });
    assert!(seen, "no process died with a file in /dev/shm");
    World::new("starts", 1).spawn().finish();
    assert!(shm_files().is_empty(), "{:?}", shm_files());
}
