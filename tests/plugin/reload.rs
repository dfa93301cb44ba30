//! Life cycles: init, use, finalize and dlclose, time and again; each init reads the environment again; nothing is left behind.

use crate::support;
use support::comms;
use support::holdings::{Holdings, paths};
use support::plugin::{self, Plugin};
use support::{Ctx, Role, World};

pub const ROLES: &[(&str, Role)] =
    &[("cycles", cycles), ("fresh_copies", fresh_copies), ("wires_by_turns", wires_by_turns), ("nested", nested)];

fn lives() -> usize {
    support::repeats(10, 100)
}

/// One life: this rank sends to itself and receives.
fn live(plugin: &mut Plugin, len: usize) {
    plugin.init().expect("init");
    assert!(plugin.devices().expect("devices") > 0);
    let (send, recv) = comms::to_itself(plugin, 0).expect("comms");
    comms::exchange_with_itself(plugin, send, recv, &support::pattern(len as u64, len));
    plugin.close_send(send).expect("close");
    plugin.close_recv(recv).expect("close");
    plugin.finalize().expect("finalize");
}

fn cycles(_: &Ctx) {
    let one = |i: usize| {
        let mut plugin = Plugin::load(12);
        live(&mut plugin, 1 + i * 1000);
        plugin.unload();
    };
    (0..5).for_each(one);
    let before = Holdings::now();
    (0..lives()).for_each(one);
    before.assert_same(&Holdings::now(), "a few lives");
}

#[test]
fn lives_leave_nothing() {
    for wire in ["shm", "tcp"] {
        World::new("cycles", 1).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

/// Each cycle a copy of the file under a new name, which is a new library to the loader: its own statics, and threads that must not be
/// left running in it.
fn fresh_copies(_: &Ctx) {
    let dir = tempfile::tempdir().expect("tempdir");
    let one = |i: usize| {
        let path = dir.path().join(format!("librailhead-{i}.so"));
        std::fs::copy(plugin::library(), &path).expect("copy");
        let mut plugin = Plugin::load_from(&path, 12);
        live(&mut plugin, 1000);
        plugin.unload();
        std::fs::remove_file(&path).expect("remove");
    };
    (0..5).for_each(one);
    let before = Holdings::now();
    (100..100 + lives()).for_each(one);
    let after = Holdings::now();
    assert_eq!((&before.fds, before.tasks, &before.shm, before.shared_maps), (&after.fds, after.tasks, &after.shm, after.shared_maps));
}

#[test]
fn a_hundred_fresh_copies_leave_nothing() {
    World::new("fresh_copies", 1).spawn().finish();
}

/// A variable that changes between two lives takes effect in the second.
fn wires_by_turns(_: &Ctx) {
    for i in 0..10 {
        let wire = ["shm", "tcp"][i % 2];
        // SAFETY: this process has no other thread that looks at the environment now.
        unsafe { std::env::set_var("RAILHEAD_SOFT_WIRE", wire) };
        let mut plugin = Plugin::load(12);
        plugin.init().expect("init");
        let (send, recv) = comms::to_itself(&plugin, 0).expect("comms");
        comms::exchange_with_itself(&plugin, send, recv, &support::pattern(1, 4096));
        let tcp = paths(std::process::id() as i32)[4];
        assert_eq!(tcp > 0, wire == "tcp", "life {i} with {wire}: {tcp} bytes over TCP");
        plugin.close_send(send).expect("close");
        plugin.close_recv(recv).expect("close");
        plugin.finalize().expect("finalize");
        plugin.unload();
    }
}

#[test]
fn a_changed_variable_takes_effect() {
    World::new("wires_by_turns", 1).spawn().finish();
}

/// Contexts overlap: a second init while the first is in use, finalized in either order; a comm outlives the last finalize.
fn nested(_: &Ctx) {
    let before = Holdings::now();
    for round in 0..10 {
        let (mut first, mut second) = (Plugin::start(12), Plugin::start(11));
        if round % 2 == 0 {
            first.finalize().expect("finalize");
            live(&mut Plugin::load(10), 100);
            second.finalize().expect("finalize");
        } else {
            second.finalize().expect("finalize");
            live(&mut Plugin::load(9), 100);
            first.finalize().expect("finalize");
        }
    }
    let after = Holdings::now();
    assert_eq!(before.shm, after.shm);
    // v9 and v10 have no finalize, so what their init holds stays: once, not once per life.
    assert!(after.fds.len() <= before.fds.len() + 8, "{before:?} {after:?}");
}

#[test]
fn contexts_overlap() {
    World::new("nested", 1).spawn().finish();
}
