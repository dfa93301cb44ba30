//! Tests of the counters and of the page. Those that need a process of their own fork.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use super::page::{COMMS, CommSnapshot, Layout, MAGIC, Page, RAILS, VERSION, attach, find};
use super::*;
use crate::base::fork::tests::in_child;

fn me() -> i32 {
    std::process::id() as i32
}

/// The record of the comm with that peer, in this process's page.
fn shown(peer: &str) -> Option<CommSnapshot> {
    let pages = find(me());
    assert!(pages.len() <= 1);
    pages.first()?.snapshot().comms.into_iter().find(|comm| comm.peer == peer)
}

fn pipe() -> (File, File) {
    let mut ends = [0; 2];
    // SAFETY: two ints, as the call wants.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the call just returned them.
    unsafe { (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])) }
}

#[test]
fn what_is_counted_stands_in_the_page_by_comm_and_rail() {
    let comm = comm(CommKind::Send, "eth0");
    comm.set_peer("counts", 77);
    let rails = [comm.rail(0), comm.rail(1)];
    for (i, counter) in RailCounter::ALL.into_iter().enumerate() {
        assert_eq!(counter as usize, i);
        rails[1].add(counter, 100);
        comm.rail(1).add(counter, i as u64);
        assert_eq!(rails[1].get(counter), 100 + i as u64);
    }
    comm.add(CommCounter::Bytes, 6);
    comm.add(CommCounter::Errors, 1);
    comm.add(CommCounter::Ops, 5);
    comm.add(CommCounter::Completions, 2);

    let seen = shown("counts").unwrap();
    assert_eq!((seen.kind, seen.device.as_str(), seen.peer_pid, seen.outstanding), (CommKind::Send, "eth0", 77, 3));
    // What the rails sent, less what was no message's.
    assert_eq!(seen.counters, [5, 2, 6 * 100 + (1 + 2 + 3 + 4 + 17) - 6, 0, 1, 0, 0, 0]);
    assert_eq!(comm.moved(), 6 * 100 + (1 + 2 + 3 + 4 + 17));
    assert_eq!(seen.rails.iter().map(|r| r.index).collect::<Vec<_>>(), [0, 1]);
    for (i, counter) in RailCounter::ALL.into_iter().enumerate() {
        assert_eq!((seen.rails[0].get(counter), seen.rails[1].get(counter)), (0, 100 + i as u64), "{counter:?}");
        assert_eq!(seen.rail_sum(counter), 100 + i as u64);
    }
    drop(comm);
    assert!(shown("counts").is_none());
}

#[test]
fn a_rail_that_is_down_says_since_when_and_why() {
    let comm = comm(CommKind::Send, "eth0+eth1");
    comm.set_peer("down", 0);
    let (rail, long) = (comm.rail(1), "x".repeat(1000));
    let rails = || shown("down").unwrap().rails;
    comm.rail(0);
    for (why, shown) in [("no carrier", "no carrier"), (&*long, &long[..128])] {
        rail.went_down(clock::now() - 5_000_000_000, why);
        let seen = rails();
        let down = seen[1].down.as_ref().unwrap();
        assert!(seen[0].down.is_none() && down.why == shown && (5_000_000_000..65_000_000_000).contains(&down.age_ns), "{seen:?}");
        rail.came_back();
        assert!(rails()[1].down.is_none());
    }
    assert_eq!([RailCounter::Failures, RailCounter::Reconnects].map(|counter| rails()[1].get(counter)), [2, 2]);
    // A record that is used again says nothing of what was.
    rail.went_down(clock::now(), "gone");
    drop((rail, comm));
    let next = super::comm(CommKind::Send, "eth0");
    next.set_peer("next", 0);
    (0..2).for_each(|index| drop(next.rail(index)));
    assert!(shown("next").unwrap().rails.iter().all(|rail| rail.down.is_none()));
}

#[test]
fn a_wait_is_sampled_every_64th_idle_poll_and_ends_when_told() {
    let comm = comm(CommKind::Recv, "eth0");
    comm.set_peer("waits", 0);
    for _ in 0..63 {
        comm.wait(WaitCause::PeerNoSend);
    }
    assert_eq!(shown("waits").unwrap().wait, WaitCause::None);
    comm.wait(WaitCause::PeerNoSend);
    clock::sleep(std::time::Duration::from_millis(3));
    let seen = shown("waits").unwrap();
    assert_eq!(seen.wait, WaitCause::PeerNoSend);
    assert!(seen.wait_age_ns >= 3_000_000 && seen.wait_age_ns < 60_000_000_000, "{}", seen.wait_age_ns);
    assert_eq!(seen.waited(WaitCause::PeerNoSend), 0, "one look is no interval");
    for _ in 0..64 {
        comm.wait(WaitCause::PeerNoSend);
    }
    assert!(shown("waits").unwrap().waited(WaitCause::PeerNoSend) >= 3_000_000);
    comm.clear_wait();
    let seen = shown("waits").unwrap();
    assert_eq!((seen.wait, seen.wait_age_ns), (WaitCause::None, 0));
}

#[test]
fn time_goes_to_the_cause_that_is_seen_and_a_new_cause_starts_a_new_age() {
    let comm = comm(CommKind::Recv, "eth0");
    let since = || comm.record().wait_since_ns.load(Ordering::Relaxed);
    comm.sample(WaitCause::Fabric, 1000);
    comm.sample(WaitCause::Fabric, 1500);
    assert_eq!((comm.waited(WaitCause::Fabric), since()), (500, 1000));
    comm.sample(WaitCause::PeerStopped, 1700);
    assert_eq!((comm.waited(WaitCause::Fabric), comm.waited(WaitCause::PeerStopped), since()), (500, 200, 1700));
    comm.clear_wait();
    // What passed between two waits is nobody's, also if they have one cause.
    comm.sample(WaitCause::PeerStopped, 9000);
    comm.sample(WaitCause::PeerStopped, 9001);
    assert_eq!((comm.waited(WaitCause::PeerStopped), since()), (201, 9000));
    for (i, cause) in WaitCause::ALL.into_iter().enumerate() {
        assert_eq!(cause as usize, i);
    }
}

#[test]
fn a_pair_of_a_mesh_counts_both_ways_and_says_who_waits_for_whom_in_what() {
    let pair = comm(CommKind::Pair, "eth0");
    pair.set_peer("both ways", 0);
    let seen = || shown("both ways").unwrap();
    assert_eq!(seen().ranks, None);
    pair.set_ranks(3, 5);
    let rail = pair.rail(0);
    rail.add(RailCounter::TxCma, 100);
    rail.add(RailCounter::RxInline, 70);
    pair.add(CommCounter::Bytes, 64);
    // What of a control message is a message's.
    pair.add(CommCounter::Bytes, 8u64.wrapping_neg());
    assert_eq!((seen().get(CommCounter::Bytes), pair.moved(), seen().ranks), (114, 170, Some((3, 5))));
    let wait = Wait { cause: WaitCause::PeerNoSend, op: MeshOp::Barrier, tag: 9 };
    pair.sample_in(wait, 1000);
    assert_eq!((seen().wait, seen().wait_op, seen().wait_tag), (wait.cause, wait.op, wait.tag));
    pair.sample_in(Wait { tag: 10, ..wait }, 1500);
    assert_eq!((seen().wait_tag, pair.waited(wait.cause), pair.wait_age(1600)), (10, 500, Some(600)));
    pair.end_wait(1700);
    assert_eq!((seen().wait, seen().wait_op, pair.waited(wait.cause), pair.wait_age(1800)), (WaitCause::None, MeshOp::None, 700, None));
    // Nobody waits: there is nothing to end.
    pair.end_wait(9000);
    assert_eq!(pair.waited(wait.cause), 700);
    for (i, op) in MeshOp::ALL.into_iter().enumerate() {
        assert_eq!(op as usize, i);
    }
    // A channel of tensors.
    pair.set_wait_key("edge;0:0", 7, 9200);
    assert_eq!(seen().wait_key, "", "nobody waits");
    pair.sample_in(WaitCause::PeerNoSend.into(), 9500);
    assert_eq!((seen().wait_key.as_str(), seen().wait_tag, pair.wait_age(9600)), ("edge;0:0", 7, Some(400)));
    // Something else has arrived meanwhile.
    pair.end_wait(9700);
    pair.sample_in(WaitCause::PeerNoSend.into(), 9800);
    assert_eq!(pair.wait_age(9900), Some(700));
    pair.set_wait_key("next;0:0", 7, 9850);
    assert_eq!(pair.wait_age(9900), Some(50));
    drop(pair);
    let next = comm(CommKind::Pair, "eth0");
    next.set_peer("both ways", 0);
    next.sample_in(WaitCause::PeerNoSend.into(), 9600);
    assert_eq!((seen().ranks, seen().wait_tag, seen().wait_key), (None, 0, String::new()));
}

/// A record is counted when it is posted, which may be long before a rail sends it; and of a comm whose rails found no free record in a full page
/// nothing is known. Neither makes billions of bytes.
#[test]
fn bytes_are_not_fewer_than_none() {
    let comm = comm(CommKind::Send, "eth0");
    comm.set_peer("records", 0);
    let rail = comm.rail(0);
    comm.add(CommCounter::Bytes, 16);
    assert_eq!(shown("records").unwrap().get(CommCounter::Bytes), 0);
    rail.add(RailCounter::TxInline, 16);
    rail.add(RailCounter::TxCma, 5);
    assert_eq!(shown("records").unwrap().get(CommCounter::Bytes), 5);
}

#[test]
fn a_record_is_reused_clean_and_not_before_its_last_handle_is_gone() {
    assert!(in_child(|| {
        let _hold = keep_page();
        let first = comm(CommKind::Send, "eth0");
        first.set_peer("first", 1);
        first.add(CommCounter::Ops, 9);
        let rail = first.rail(0);
        rail.add(RailCounter::Requests, 4);
        drop(first);
        let second = comm(CommKind::Recv, "eth1");
        second.set_peer("second", 0);
        let own = second.rail(0);
        rail.add(RailCounter::Requests, 1);
        let seen = shown("second").unwrap();
        seen.kind == CommKind::Recv
            && seen.device == "eth1"
            && seen.get(CommCounter::Ops) == 0
            && seen.rails.len() == 1
            && seen.rail_sum(RailCounter::Requests) == 0
            && own.get(RailCounter::Requests) == 0
            && rail.get(RailCounter::Requests) == 5
            && shown("first").is_none()
            && {
                drop(rail);
                let third = comm(CommKind::Send, "eth2");
                third.rail(0).get(RailCounter::Requests) == 0
            }
    }));
}

#[test]
fn a_full_page_leaves_the_counters_working_in_private() {
    assert!(in_child(|| {
        let all: Vec<CommStats> = (0..COMMS + 2).map(|_| comm(CommKind::Send, "eth0")).collect();
        let last = &all[COMMS + 1];
        last.set_peer("last", 0);
        last.add(CommCounter::Ops, 2);
        last.rail(0).add(RailCounter::Requests, 3);
        let rails: Vec<RailStats> = (0..RAILS + 1).map(|i| all[0].rail(i)).collect();
        rails[RAILS].add(RailCounter::Requests, 8);
        let seen = find(me())[0].snapshot();
        last.get(CommCounter::Ops) == 2
            && last.rail(0).get(RailCounter::Requests) == 3
            && rails[RAILS].get(RailCounter::Requests) == 8
            && shown("last").is_none()
            && seen.comms.len() == COMMS
            && seen.comms.iter().find(|c| c.id == all[0].owned.id()).map(|c| c.rails.len()) == Some(RAILS)
            && seen.overflowed == 3
    }));
}

#[test]
fn the_page_exists_while_somebody_holds_it_and_not_when_it_is_switched_off() {
    assert!(in_child(|| {
        let none = find(me()).is_empty();
        let held = keep_page();
        let comm1 = comm(CommKind::Send, "eth0");
        let rail = comm1.rail(0);
        drop(held);
        drop(comm1);
        let one = find(me()).len() == 1;
        drop(rail);
        let gone = find(me()).is_empty();
        set_enabled(false);
        let comm2 = comm(CommKind::Send, "eth0");
        comm2.add(CommCounter::Ops, 1);
        let counted = comm2.get(CommCounter::Ops) == 1 && find(me()).is_empty();
        none && one && gone && counted
    }));
}

#[test]
fn a_forked_child_has_a_page_of_its_own() {
    let parent = comm(CommKind::Send, "eth0");
    parent.set_peer("parent", 0);
    let rail = parent.rail(0);
    let ((mut from_child, mut to_parent), (mut from_parent, mut to_child)) = (pipe(), pipe());
    std::thread::scope(|scope| {
        let handles = std::mem::ManuallyDrop::new((parent, rail));
        let child = scope.spawn(move || {
            let child = in_child(|| {
                // The inherited page is not the child's, and the child's handles leave the parent's records alone.
                let inherited = find(me()).is_empty();
                // SAFETY: the child's copies, which nobody uses afterwards: the child ends without destructors.
                drop(unsafe { std::ptr::read(&*handles) });
                let own = comm(CommKind::Recv, "eth0");
                own.set_peer("child", 0);
                to_parent.write_all(&std::process::id().to_ne_bytes()).is_ok()
                    && from_parent.read_exact(&mut [0]).is_ok()
                    && inherited
                    && shown("parent").is_none()
            });
            (child, std::mem::ManuallyDrop::into_inner(handles))
        });
        let mut pid = [0; 4];
        from_child.read_exact(&mut pid).unwrap();
        let peers: Vec<String> =
            find(i32::from_ne_bytes(pid)).iter().flat_map(|page| page.snapshot().comms).map(|comm| comm.peer).collect();
        to_child.write_all(&[1]).unwrap();
        assert_eq!(peers, ["child"]);
        let (child, handles) = child.join().unwrap();
        assert!(child);
        assert_eq!(shown("parent").map(|comm| comm.rails.len()), Some(1));
        drop(handles);
    });
}

#[test]
fn a_reader_never_sees_half_a_name() {
    let comm = comm(CommKind::Send, "eth0");
    let names = ["a".repeat(60), "b".repeat(60)];
    comm.set_peer(&names[0], 1);
    let id = comm.owned.id();
    let page = &find(me())[0];
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (names, done) = (&names, &done);
        scope.spawn(move || {
            for i in 0..20_000 {
                comm.set_peer(&names[i % 2], (i % 2) as i32 + 1);
                // Time between two changes in which a reader can succeed.
                (0..200).for_each(|_| std::hint::spin_loop());
            }
            done.store(true, Ordering::Relaxed);
        });
        let mut seen = [0, 0];
        while !done.load(Ordering::Relaxed) {
            let Some(record) = page.snapshot().comms.into_iter().find(|c| c.id == id) else { continue };
            let which = names.iter().position(|name| *name == record.peer);
            assert_eq!(which.map(|w| w as i32 + 1), Some(record.peer_pid), "{}", record.peer);
            seen[which.unwrap_or(0)] += 1;
        }
        assert!(seen[0] + seen[1] > 0, "nothing was read");
    });
}

/// A memfd with those bytes at its start and `fill` behind, and its path.
fn forged(size: usize, seals: libc::c_int, start: &[u8], fill: u8) -> (File, PathBuf) {
    // SAFETY: a terminated name.
    let fd = unsafe { libc::memfd_create(c"forged".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    // SAFETY: the call just returned it.
    let mut file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    let mut bytes = vec![fill; size];
    bytes[..start.len()].copy_from_slice(start);
    file.write_all(&bytes).unwrap();
    // SAFETY: an open descriptor and an integer.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    (file, path)
}

#[test]
fn only_a_page_of_this_version_that_cannot_shrink_is_read() {
    let size = size_of::<Layout>();
    let start = |magic: u64, version: u32| [&magic.to_ne_bytes()[..], &version.to_ne_bytes()[..]].concat();
    let good = start(MAGIC, VERSION);
    let (file, path) = forged(size, libc::F_SEAL_SHRINK, &good, 0);
    assert!(attach(&path).is_ok());
    drop(file);
    for (bad, size, seals, start) in [
        ("may shrink", size, libc::F_SEAL_GROW, &good),
        ("short", size - 1, libc::F_SEAL_SHRINK, &good),
        ("long", size + 1, libc::F_SEAL_SHRINK, &good),
        ("magic", size, libc::F_SEAL_SHRINK, &start(MAGIC + 1, VERSION)),
        ("version", size, libc::F_SEAL_SHRINK, &start(MAGIC, VERSION + 1)),
    ] {
        let (_file, path) = forged(size, seals, start, 0);
        assert!(attach(&path).is_err(), "{bad}");
    }
    assert!(attach("/proc/self/exe".as_ref()).is_err() && attach("/nowhere".as_ref()).is_err());
}

#[test]
fn nonsense_in_a_page_is_read_without_harm() {
    let start = [&MAGIC.to_ne_bytes()[..], &VERSION.to_ne_bytes()[..]].concat();
    // 0xff..: every seq is odd; 0x02..: every kind is unknown, every owner an unknown comm; 1s make rails of one comm number.
    for fill in [0xff, 0x02, 0x80] {
        let (_file, path) = forged(size_of::<Layout>(), libc::F_SEAL_SHRINK, &start, fill);
        assert_eq!(attach(&path).unwrap().snapshot().comms.len(), 0, "{fill:#x}");
    }
    let mut record = vec![0u8; 4096 + 384];
    record[..start.len()].copy_from_slice(&start);
    record[4096 + 4] = 2;
    record[4096 + 8..].fill(0xfe);
    let (_file, path) = forged(size_of::<Layout>(), libc::F_SEAL_SHRINK, &record, 0);
    let comms = attach(&path).unwrap().snapshot().comms;
    assert_eq!((comms.len(), comms[0].kind, comms[0].wait), (1, CommKind::Send, WaitCause::None));
    assert_eq!(comms[0].peer.chars().count(), 64, "bytes that are no text, and no terminator");
}

#[test]
fn nobody_else_can_write_the_page_or_resize_it() {
    let _comm = comm(CommKind::Send, "eth0");
    let page: &Page = &find(me())[0];
    let file = File::options().read(true).write(true).open(page.path()).unwrap();
    assert!(memmap2::MmapOptions::new().len(4096).map_raw(&file).is_err());
    assert!(memmap2::MmapOptions::new().len(4096).map_raw_read_only(&file).is_ok());
    assert!((&file).write(&[1]).is_err());
    assert!(file.set_len(0).is_err() && file.set_len(1 << 30).is_err());
}

#[test]
fn detached_counters_count_alone() {
    let (a, b) = (RailStats::detached(), RailStats::detached());
    let twin = a.clone();
    a.add(RailCounter::Requests, 2);
    twin.add(RailCounter::Requests, u64::MAX);
    assert_eq!((a.get(RailCounter::Requests), b.get(RailCounter::Requests)), (1, 0));
}
