//! The pages as JSON.

use std::collections::BTreeMap;

use anyhow::Context;
use railhead::base::stats::page::{CommSnapshot, RailSnapshot};
use railhead::base::stats::{CommCounter, MeshOp, RailCounter, WaitCause};
use serde::Serialize;

use super::processes::{Process, blame};

#[derive(Serialize)]
struct Page<'a> {
    processes: Vec<OneProcess<'a>>,
}

#[derive(Serialize)]
struct OneProcess<'a> {
    pid: i32,
    copy: usize,
    command: &'a str,
    stopped: bool,
    age_s: f64,
    /// Comms and rails that found no room in the page.
    overflowed: u64,
    comms: Vec<Comm<'a>>,
}

#[derive(Serialize)]
struct Comm<'a> {
    id: u64,
    direction: &'static str,
    device: &'a str,
    peer: &'a str,
    peer_pid: Option<i32>,
    /// Of a pair of a mesh.
    rank: Option<u32>,
    peer_rank: Option<u32>,
    outstanding: u32,
    waits_for: Option<Wait<'a>>,
    counters: BTreeMap<&'static str, u64>,
    /// Seconds, by cause.
    waited_s: BTreeMap<&'static str, f64>,
    rails: Vec<Rail>,
}

#[derive(Serialize)]
struct Wait<'a> {
    cause: &'static str,
    words: &'static str,
    for_s: f64,
    /// Of a pair of a mesh: in what, and its user's tag, or the slot of a buffer.
    operation: Option<&'static str>,
    tag: Option<u64>,
    /// Of a channel of tensors: for which, and of which step.
    key: Option<&'a str>,
    step: Option<u64>,
}

#[derive(Serialize)]
struct Rail {
    rail: u32,
    counters: BTreeMap<&'static str, u64>,
    /// While it is down, and others carry on.
    down: Option<Down>,
}

#[derive(Serialize)]
struct Down {
    for_s: f64,
    why: String,
}

/// One object, with a newline.
pub fn page(processes: &[Process]) -> anyhow::Result<String> {
    let page = Page { processes: processes.iter().map(process).collect() };
    let text = serde_json::to_string_pretty(&page).context("writing JSON")?;
    Ok(text + "\n")
}

fn process(process: &Process) -> OneProcess<'_> {
    OneProcess {
        pid: process.pid,
        copy: process.copy,
        command: &process.command,
        stopped: process.stopped,
        age_s: seconds(process.page.age_ns),
        overflowed: process.page.overflowed,
        comms: process.page.comms.iter().map(|one| comm(one, process.stopped)).collect(),
    }
}

fn comm(comm: &CommSnapshot, stopped: bool) -> Comm<'_> {
    let blame = blame(comm.wait, stopped);
    let op = Some(comm.wait_op).filter(|op| *op != MeshOp::None);
    let (operation, tag) = (op.map(MeshOp::name), op.map(|_| comm.wait_tag));
    let key = Some(comm.wait_key.as_str()).filter(|key| !key.is_empty());
    let step = key.map(|_| comm.wait_tag);
    let wait = Wait { cause: blame.name, words: blame.words, for_s: seconds(comm.wait_age_ns), operation, tag, key, step };
    Comm {
        id: comm.id,
        direction: comm.kind.name(),
        device: &comm.device,
        peer: &comm.peer,
        peer_pid: (comm.peer_pid > 0).then_some(comm.peer_pid),
        rank: comm.ranks.map(|(rank, _)| rank),
        peer_rank: comm.ranks.map(|(_, peer)| peer),
        outstanding: comm.outstanding,
        waits_for: (comm.wait != WaitCause::None).then_some(wait),
        counters: CommCounter::ALL.into_iter().map(|counter| (counter.name(), comm.get(counter))).collect(),
        waited_s: causes().map(|cause| (cause.name(), seconds(comm.waited(cause)))).collect(),
        rails: comm.rails.iter().map(rail).collect(),
    }
}

fn rail(rail: &RailSnapshot) -> Rail {
    Rail {
        rail: rail.index,
        counters: RailCounter::ALL.into_iter().map(|counter| (counter.name(), rail.get(counter))).collect(),
        down: rail.down.as_ref().map(|down| Down { for_s: seconds(down.age_ns), why: down.why.clone() }),
    }
}

/// Every cause that time is accounted to.
pub fn causes() -> impl Iterator<Item = WaitCause> {
    WaitCause::ALL.into_iter().filter(|cause| *cause != WaitCause::None)
}

/// Nanoseconds as seconds.
pub fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
