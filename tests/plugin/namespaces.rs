//! Peers in other network, pid, ipc and mount namespaces, each alone and all together, with a /dev/shm of 1 MiB: the right wire is taken, and
//! the bytes are exact. Needs root.

use crate::support;
use support::comms::{self, Mem, SIZES};
use support::holdings::{dev_shm, named_segments, paths, shm_files};
use support::netns::{Cable, usable};
use support::plugin::{Plugin, REMOTE_ERROR};
use support::{Ctx, Role, World};

pub const ROLES: &[(&str, Role)] = &[("namespaces::exchange", exchange), ("cut_off", cut_off)];

fn exchange(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    for _ in 0..3 {
        comms::exchange(&plugin, ctx.rank, send, recv, &SIZES).expect("exchange");
    }
    // In a pid namespace of its own this process has number 1, and its /proc knows it as that.
    let pid = std::process::id() as i32;
    ctx.say(&paths(pid).map(|n| n.to_string()).join(" "));
    ctx.say(&format!("{} files", named_segments()));
    ctx.barrier();
    plugin.close_send(send).expect("close");
    plugin.close_recv(recv).expect("close");
}

/// Bytes by path, of both ranks together: inline, mapped, cma, bounce, tcp.
fn run(world: World) -> [u64; 5] {
    let _alone = dev_shm();
    let before = shm_files();
    let mut ranks = world.spawn();
    let mut sum = [0; 5];
    for rank in 0..2 {
        let words = ranks.hear(rank);
        sum.iter_mut().zip(words.split(' ')).for_each(|(s, w)| *s += w.parse::<u64>().expect("a number"));
        assert_eq!(ranks.hear(rank), "0 files", "rank {rank}: files in /dev/shm while the comms are in use");
    }
    ranks.finish();
    assert_eq!(before, shm_files(), "files left in /dev/shm");
    sum
}

fn world() -> World {
    World::new("namespaces::exchange", 2)
}

/// A 1 MiB /dev/shm of its own, then whatever comes behind.
const SMALL_SHM: [&str; 3] = ["sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec \"$0\" \"$@\""];

fn payload() -> u64 {
    3 * SIZES.iter().sum::<usize>() as u64
}

#[track_caller]
fn over_shared_memory(by_path: [u64; 5]) {
    assert_eq!(by_path[4], 0, "bytes went over TCP: {by_path:?}");
    assert!(by_path[..4].iter().sum::<u64>() >= 2 * payload(), "{by_path:?}");
}

#[track_caller]
fn over_tcp(by_path: [u64; 5]) {
    assert_eq!(by_path[..4], [0; 4], "bytes went over shared memory");
    assert!(by_path[4] >= 2 * payload(), "{by_path:?}");
}

#[test]
fn another_pid_namespace() {
    if !usable() {
        return;
    }
    // One and both: a process that cannot see the other's number cannot read its memory, which then goes through the ring.
    for ranks in [&[1][..], &[0, 1]] {
        let with = |w: World, &r: &usize| w.wrap(r, &["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        over_shared_memory(run(ranks.iter().fold(world(), with)));
    }
}

#[test]
fn another_ipc_namespace() {
    if usable() {
        over_shared_memory(run(world().wrap(1, &["unshare", "--ipc"])));
    }
}

#[test]
fn another_mount_namespace_with_a_small_dev_shm() {
    if !usable() {
        return;
    }
    // Within one network namespace memory is passed as a descriptor and needs no file.
    over_shared_memory(run(world().wrap(1, &["unshare", "--mount"]).wrap(1, &SMALL_SHM)));
    let both = (0..2).fold(world(), |w, r| w.wrap(r, &["unshare", "--mount"]).wrap(r, &SMALL_SHM));
    over_shared_memory(run(both));
}

#[test]
fn another_network_namespace() {
    if !usable() {
        return;
    }
    // The same /dev/shm: a file there, gone as soon as both have it open.
    let cable = Cable::new();
    let world = (0..2).fold(world(), |w, r| w.wrap(r, &cable.at(r)).env_of(r, "RAILHEAD_SOCKET_IFNAME", "rht"));
    over_shared_memory(run(world));
}

#[test]
fn another_network_namespace_and_one_full_dev_shm() {
    if !usable() {
        return;
    }
    // Another /dev/shm at one end, so there is nothing to share.
    let cable = Cable::new();
    let world = (0..2).fold(world(), |w, r| w.wrap(r, &cable.at(r)).env_of(r, "RAILHEAD_SOCKET_IFNAME", "rht"));
    over_tcp(run(world.wrap(1, &["unshare", "--mount"]).wrap(1, &SMALL_SHM)));
}

#[test]
fn another_network_namespace_and_a_common_small_dev_shm() {
    if !usable() {
        return;
    }
    // Too small for the ring: said at once (the space is reserved), not by a signal later.
    let cable = Cable::new();
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().to_str().expect("a path").to_string();
    let mount = std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs", &path]).status().expect("mount");
    assert!(mount.success());
    let bind = format!("mount --bind {path} /dev/shm && exec \"$0\" \"$@\"");
    let world = (0..2).fold(world(), |w, r| {
        let w = w.wrap(r, &cable.at(r)).wrap(r, &["unshare", "--mount"]).wrap(r, &["sh", "-c", &bind]);
        w.env_of(r, "RAILHEAD_SOCKET_IFNAME", "rht")
    });
    let by_path = std::panic::catch_unwind(|| run(world.env("RAILHEAD_SHM_BOUNCE_KIB", "4096")));
    let left: Vec<_> = std::fs::read_dir(&path).expect("read_dir").flatten().map(|e| e.file_name()).collect();
    let unmounted = std::process::Command::new("umount").arg(&path).status().expect("umount");
    assert!(unmounted.success());
    over_tcp(by_path.unwrap_or_else(|e| std::panic::resume_unwind(e)));
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn all_namespaces_at_once() {
    if !usable() {
        return;
    }
    for family in ["AF_INET", "AF_INET6"] {
        let cable = Cable::new();
        let world = (0..2).fold(world(), |w, r| {
            let own = ["unshare", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];
            let w = w.wrap(r, &cable.at(r)).wrap(r, &own).wrap(r, &SMALL_SHM);
            w.env_of(r, "RAILHEAD_SOCKET_IFNAME", "rht")
        });
        over_tcp(run(world.env("RAILHEAD_SOCKET_FAMILY", family)));
    }
}

/// Rank 0 sends when the other host is silent already: what its kernel takes is sent, and then it has more to send. Rank 1 waits for what never comes.
fn cut_off(ctx: &Ctx) {
    const LEN: usize = 1 << 20;
    let plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    comms::exchange(&plugin, ctx.rank, send, recv, &SIZES).expect("exchange");
    let mem = Mem::new(LEN);
    let comm = if ctx.rank == 0 { send } else { recv };
    let mr = plugin.reg_mr(comm, mem.ptr(0), LEN).expect("regMr");
    let receive = (ctx.rank == 1).then(|| comms::irecv(&plugin, comm, &mem, 0, LEN, 1, mr).expect("irecv"));
    ctx.barrier();
    ctx.say("ready");
    assert_eq!(ctx.parent.text(), "silent");
    let start = std::time::Instant::now();
    let ended = match receive {
        Some(request) => comms::wait(&plugin, request).map(drop),
        None => {
            comms::wait(&plugin, comms::isend(&plugin, comm, &mem, 0, LEN, 1, mr).expect("isend")).expect("the kernel has it");
            comms::isend(&plugin, comm, &mem, 0, LEN, 1, mr).map(drop)
        }
    };
    assert_eq!(ended, Err(REMOTE_ERROR));
    // 2 s were set. Longer by far than these and the grace for what is still on its way, and shorter than without the setting, 42 s.
    assert!(start.elapsed() < std::time::Duration::from_secs(30), "{:?}", start.elapsed());
}

#[test]
fn a_silent_host_is_noticed_in_the_time_that_was_set() {
    if !usable() {
        return;
    }
    let cable = Cable::new();
    let world = World::new("cut_off", 2).env("RAILHEAD_SOFT_WIRE", "tcp").env("RAILHEAD_TCP_USER_TIMEOUT_S", "2");
    let world = (0..2).fold(world, |w, r| w.wrap(r, &cable.at(r)).env_of(r, "RAILHEAD_SOCKET_IFNAME", "rht"));
    let mut ranks = world.spawn();
    (0..2).for_each(|rank| ranks.expect(rank, "ready"));
    cable.cut();
    (0..2).for_each(|rank| ranks.tell(rank, "silent"));
    ranks.finish();
}
