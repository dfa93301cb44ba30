//! `railhead stats` and `railhead top` beside workers that exchange tensors: which one is waited for, from whom, since when, and what was moved.

use crate::support;

use std::process::Command;
use std::time::Duration;

use railhead::base::config::{Config, Debug};
use railhead::link::device::Device;
use railhead::store::FileStore;
use railhead::tensor::{Key, Manager, Mode, Tensor};
use serde_json::Value;
use support::{Ctx, PATIENCE, Ranks, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("tensor_stats", works)];

const BYTES: usize = 100_000;

fn name(worker: usize) -> String {
    format!("/job:w/task:{worker}")
}

/// The last worker waits for a tensor of the first one's, which produces it when it is told to.
fn works(ctx: &Ctx) {
    let device = Device::open(Config::from_env_or(Debug::Warn), "").expect("a device");
    let names: Vec<String> = (0..ctx.size).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mode = if std::env::var("RHT_MODE").as_deref() == Ok("direct") { Mode::Direct } else { Mode::Buffered };
    let manager = Manager::new(device, names[ctx.rank], &names, true, mode).expect("a manager");
    let store = FileStore::new(std::env::var("RHT_STORE").expect("RHT_STORE"), None).expect("a store");
    manager.connect(&store, PATIENCE).expect("connected");
    let step = manager.step(7);
    step.initialize().expect("a step");
    let key = Key::new("/job:w/task:0/device:CPU:0", 1, "/job:w/task:1/device:CPU:0", "gradients", 0, 3).expect("a key");
    ctx.say("connected");
    if ctx.rank == 0 {
        assert_eq!(ctx.parent.text(), "produce");
        step.send(key.text(), Tensor::new(1, &[], vec![1; BYTES]).expect("a tensor")).expect("sent");
    } else {
        assert_eq!(step.recv(key.text(), PATIENCE).expect("a tensor").bytes().len(), BYTES);
        // Nobody waits.
        manager.run(Duration::ZERO);
        ctx.say("received");
    }
    assert_eq!(ctx.parent.text(), "end");
}

fn railhead(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_railhead")).args(args).output().expect("railhead");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// A worker's one channel.
fn channel(ranks: &Ranks, worker: usize) -> Value {
    let page: Value = serde_json::from_str(&railhead(&["stats", "--json", "--pid", &ranks.ranks[worker].pid().to_string()])).expect("JSON");
    let comms = page["processes"][0]["comms"].as_array().expect("comms").clone();
    let found = comms.iter().find(|comm| comm["peer"] == name(1 - worker)).unwrap_or_else(|| panic!("no channel: {page}"));
    found.clone()
}

#[test]
fn the_tensor_that_is_waited_for_is_shown_with_its_producer() {
    for (wire, mode) in ["shm", "tcp"].into_iter().flat_map(|wire| ["buffered", "direct"].map(|mode| (wire, mode))) {
        let folder = tempfile::tempdir().expect("a folder");
        let world = World::new("tensor_stats", 2).env("RAILHEAD_SOCKET_IFNAME", "lo").env("RAILHEAD_SOFT_WIRE", wire);
        let world = world
            .env("RHT_STORE", folder.path().join("store").to_str().expect("UTF-8"))
            .env("RAILHEAD_STALL_WARN_S", "1")
            .env("RHT_MODE", mode);
        let mut ranks = world.spawn();
        (0..2).for_each(|worker| ranks.expect(worker, "connected"));
        // And reported, once.
        let waits = until("a report", || Some(channel(&ranks, 1)).filter(|channel| channel["counters"]["stalls"] == 1));
        let wait = &waits["waits_for"];
        assert_eq!((&wait["cause"], &wait["key"], &wait["step"]), (&"peer_no_send".into(), &"gradients;0:3".into(), &7.into()), "{waits}");
        assert!(wait["for_s"].as_f64().is_some() && waits["outstanding"] == 1, "{waits}");
        let pid = ranks.ranks[1].pid().to_string();
        let top = railhead(&["top", "--once", "--interval", "0.1", "--pid", &pid]);
        assert!(top.contains(&format!("tensor gradients;0:3 of step 7: {}", name(0))), "{top}");
        let table = railhead(&["stats", "--pid", &pid]);
        assert!(table.contains("the peer has not sent, for ") && table.contains(", in tensor gradients;0:3 of step 7"), "{table}");
        ranks.tell(0, "produce");
        ranks.expect(1, "received");
        for worker in [0, 1] {
            // The producer's device may say so later.
            let channel = until("no request is left", || Some(channel(&ranks, worker)).filter(|channel| channel["outstanding"] == 0));
            assert_eq!((&channel["counters"]["ops"], &channel["counters"]["errors"]), (&1.into(), &0.into()), "{channel}");
            assert!(channel["counters"]["bytes"].as_u64().is_some_and(|bytes| bytes >= BYTES as u64), "{channel}");
        }
        ranks.tell(0, "end");
        ranks.tell(1, "end");
        ranks.finish();
    }
}
