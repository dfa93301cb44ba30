//! What a comm costs that nothing is asked of: memory, system calls, CPU time.

use crate::support;
use support::comms;
use support::plugin::Plugin;
use support::{Ctx, Role, World};

pub const ROLES: &[(&str, Role)] = &[("holds", holds)];

/// Memory, private and shared, that either end of an idle comm may take (the targets of `railhead perf`).
const MOST: i64 = 128 << 10;
const COMMS: i64 = 200;

fn held() -> [i64; 2] {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    ["RssAnon:", "RssShmem:"].map(|name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        line.trim().trim_end_matches(" kB").parse::<i64>().expect("a number") << 10
    })
}

/// Both ends of many comms, each of which has moved a message.
fn holds(_: &Ctx) {
    let plugin = Plugin::start(12);
    let one = |_| {
        let (send, recv) = comms::to_itself(&plugin, 0).expect("comms");
        comms::exchange_with_itself(&plugin, send, recv, &[7; 4096]);
        (send, recv)
    };
    // What the first comm of a process allocates is not what each costs.
    let first = one(0);
    let before = held();
    let all: Vec<_> = (0..COMMS).map(one).collect();
    let after = held();
    let [private, shared] = [0, 1].map(|i| (after[i] - before[i]) / (2 * COMMS));
    println!("{private} private and {shared} shared bytes for each end");
    assert!(private + shared <= MOST, "{private} private and {shared} shared bytes for each end of an idle comm");
    for (send, recv) in all.into_iter().chain([first]) {
        plugin.close_send(send).expect("closeSend");
        plugin.close_recv(recv).expect("closeRecv");
    }
}

#[test]
fn memory_that_was_never_used_takes_none() {
    for wire in ["shm", "tcp"] {
        World::new("holds", 1).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}
