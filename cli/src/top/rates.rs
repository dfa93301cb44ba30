//! Rates out of two looks at the pages. Pure; the numbers of a page need not make sense.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use railhead::base::stats::page::{CommSnapshot, Down};
use railhead::base::stats::{CommCounter, CommKind, WaitCause};

use crate::stats::processes::{Process, waits_in};

/// What comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Order {
    /// Who moves most.
    Rate,
    /// Who has waited longest.
    Wait,
    /// By process and comm.
    Pid,
}

impl Order {
    /// The next one, in a circle.
    pub fn next(self) -> Order {
        match self {
            Order::Rate => Order::Wait,
            Order::Wait => Order::Pid,
            Order::Pid => Order::Rate,
        }
    }

    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Order::Rate => "rate",
            Order::Wait => "wait",
            Order::Pid => "pid",
        }
    }
}

/// Which comm: process, copy of the library in it, number.
pub type Key = (i32, usize, u64);

/// One comm.
#[derive(Debug, Clone)]
pub struct Row {
    /// Which.
    pub key: Key,
    /// Which end.
    pub kind: CommKind,
    /// Its device.
    pub device: String,
    /// Its peer.
    pub peer: String,
    /// Of a pair of a mesh: the owner's rank and the peer's.
    pub ranks: Option<(u32, u32)>,
    /// The process's command line.
    pub command: String,
    /// Per second.
    pub bytes_rate: f64,
    /// Per second.
    pub ops_rate: f64,
    /// So far.
    pub bytes: u64,
    /// Requests outstanding.
    pub outstanding: u32,
    /// Requests that failed, so far.
    pub errors: u64,
    /// Requests reported as stalled, so far.
    pub stalls: u64,
    /// Whether its process is itself stopped.
    pub stopped: bool,
    /// What it waits for.
    pub wait: WaitCause,
    /// Since when, in ns.
    pub wait_age_ns: u64,
    /// Rails that are down.
    pub down: Vec<(u32, Down)>,
    /// In what, and for which tensor, in words.
    pub wait_in: Option<String>,
}

/// Everything at one moment.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    /// Which look it was, from 0.
    pub number: u64,
    /// What the rates are over; zero for the first look.
    pub over: Duration,
    /// Processes seen.
    pub processes: usize,
    /// Comms, listeners left out: they move nothing.
    pub rows: Vec<Row>,
}

impl Frame {
    /// From this look and the one before.
    pub fn new(number: u64, before: Option<(Duration, &[Process])>, processes: &[Process]) -> Frame {
        let (over, old) = before.unwrap_or_default();
        let old: HashMap<Key, &CommSnapshot> =
            old.iter().flat_map(|process| process.page.comms.iter().map(|comm| (key(process, comm), comm))).collect();
        let comms = processes.iter().flat_map(|process| process.page.comms.iter().map(move |comm| (process, comm)));
        let rows = comms.filter(|(_, comm)| comm.kind != CommKind::Listen).map(|(process, comm)| {
            let key = key(process, comm);
            let rate = |counter| match old.get(&key) {
                _ if over.is_zero() => 0.0,
                // A comm that is new has moved all it has since the last look. One that counts backwards is another one.
                old => comm.get(counter).saturating_sub(old.map_or(0, |old| old.get(counter))) as f64 / over.as_secs_f64(),
            };
            Row {
                key,
                kind: comm.kind,
                device: comm.device.clone(),
                peer: comm.peer.clone(),
                ranks: comm.ranks,
                command: process.command.clone(),
                bytes_rate: rate(CommCounter::Bytes),
                ops_rate: rate(CommCounter::Completions),
                bytes: comm.get(CommCounter::Bytes),
                outstanding: comm.outstanding,
                errors: comm.get(CommCounter::Errors),
                stalls: comm.get(CommCounter::Stalls),
                stopped: process.stopped,
                wait: comm.wait,
                wait_age_ns: comm.wait_age_ns,
                down: comm.rails.iter().filter_map(|rail| Some((rail.index, rail.down.clone()?))).collect(),
                wait_in: waits_in(comm.wait_op, comm.wait_tag, &comm.wait_key),
            }
        });
        Frame { number, over, processes: processes.len(), rows: rows.collect() }
    }

    /// Puts the rows in order. Those that are equal stay by process and comm.
    pub fn sort(&mut self, order: Order) {
        self.rows.sort_by_key(|row| row.key);
        match order {
            Order::Rate => {
                self.rows.sort_by(|a, b| (b.bytes_rate, b.ops_rate).partial_cmp(&(a.bytes_rate, a.ops_rate)).unwrap_or(a.key.cmp(&b.key)))
            }
            Order::Wait => self.rows.sort_by_key(|row| Reverse(row.wait_age_ns)),
            Order::Pid => {}
        }
    }

    /// Bytes and requests per second of all comms of that kind.
    pub fn sum(&self, kind: CommKind) -> (f64, f64) {
        let rows = self.rows.iter().filter(|row| row.kind == kind);
        rows.fold((0.0, 0.0), |(bytes, ops), row| (bytes + row.bytes_rate, ops + row.ops_rate))
    }
}

fn key(process: &Process, comm: &CommSnapshot) -> Key {
    (process.pid, process.copy, comm.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use railhead::base::stats::MeshOp;
    use railhead::base::stats::page::Snapshot;

    fn process(pid: i32, comms: &[(u64, CommKind, u64, u64)]) -> Process {
        let comm = |&(id, kind, bytes, ops): &(u64, CommKind, u64, u64)| CommSnapshot {
            kind,
            id,
            device: "eth0".into(),
            peer: "somebody".into(),
            peer_pid: 0,
            ranks: None,
            outstanding: 0,
            wait: WaitCause::PeerNoSend,
            wait_age_ns: bytes,
            wait_op: MeshOp::None,
            wait_tag: 0,
            wait_key: String::new(),
            counters: [0, ops, bytes, 0, 0, 0, 0, 0],
            wait_ns: [0; 8],
            rails: Vec::new(),
        };
        let page = Snapshot { pid, age_ns: 0, overflowed: 0, comms: comms.iter().map(comm).collect() };
        Process { pid, copy: 0, command: "x".into(), stopped: false, page }
    }

    #[test]
    fn rates_are_differences_over_time() {
        use CommKind::{Listen, Recv, Send};
        let before = [process(7, &[(1, Listen, 0, 3), (2, Send, 1000, 10), (3, Recv, u64::MAX, 5)])];
        let after = [process(7, &[(1, Listen, 0, 9), (2, Send, 5000, 30), (3, Recv, 7, 5), (4, Send, 600, 2)]), process(9, &[])];
        let mut frame = Frame::new(1, Some((Duration::from_secs(2), &before)), &after);
        let rates: Vec<_> = frame.rows.iter().map(|row| (row.key.2, row.bytes_rate, row.ops_rate)).collect();
        assert_eq!(rates, [(2, 2000.0, 10.0), (3, 0.0, 0.0), (4, 300.0, 1.0)]);
        assert_eq!((frame.processes, frame.sum(Send), frame.sum(Recv)), (2, (2300.0, 11.0), (0.0, 0.0)));
        let mut order = |order| {
            frame.sort(order);
            frame.rows.iter().map(|row| row.key.2).collect::<Vec<_>>()
        };
        assert_eq!((order(Order::Rate), order(Order::Wait), order(Order::Pid)), (vec![2, 4, 3], vec![2, 4, 3], vec![2, 3, 4]));
    }

    #[test]
    fn a_first_look_has_no_rates() {
        let frame = Frame::new(0, None, &[process(7, &[(2, CommKind::Send, 1000, 10)])]);
        assert_eq!((frame.rows[0].bytes_rate, frame.rows[0].bytes), (0.0, 1000));
    }
}
