//! The pages in Prometheus's text format, version 0.0.4
//! (<https://github.com/prometheus/docs/blob/main/docs/instrumenting/exposition_formats.md>).

use std::fmt::Write;

use railhead::base::stats::page::{CommSnapshot, RailSnapshot};
use railhead::base::stats::{CommCounter, MeshOp, RailCounter, WaitCause};

use super::json::{causes, seconds};
use super::processes::{Process, blame};

/// What is shown by direction and path.
const BYTES: [[RailCounter; 6]; 2] = [RailCounter::TX, RailCounter::RX];

/// The metrics of one name stand together, as the format asks.
pub fn page(processes: &[Process]) -> String {
    let mut out = String::new();
    metric(&mut out, "railhead_process_age_seconds", "gauge", "Seconds since the process initialised Railhead.", |add| {
        processes.iter().for_each(|process| add(&labels_of(process), &seconds(process.page.age_ns)));
    });
    metric(&mut out, "railhead_process_overflowed_total", "counter", "Comms and rails that found no room in the stats page.", |add| {
        processes.iter().for_each(|process| add(&labels_of(process), &process.page.overflowed));
    });
    metric(&mut out, "railhead_process_stopped", "gauge", "1 while the process is itself stopped.", |add| {
        processes.iter().for_each(|process| add(&labels_of(process), &u8::from(process.stopped)));
    });
    let comms = || processes.iter().flat_map(|process| process.page.comms.iter().map(move |comm| (labels_of_comm(process, comm), comm)));
    for counter in CommCounter::ALL {
        metric(&mut out, &format!("railhead_comm_{}_total", counter.name()), "counter", help_of_comm(counter), |add| {
            comms().for_each(|(labels, comm)| add(&labels, &comm.get(counter)));
        });
    }
    metric(&mut out, "railhead_comm_outstanding", "gauge", "Requests given out and not completed.", |add| {
        comms().for_each(|(labels, comm)| add(&labels, &comm.outstanding));
    });
    metric(&mut out, "railhead_comm_wait_seconds_total", "counter", "Seconds spent waiting, by cause.", |add| {
        for (labels, comm) in comms() {
            causes().for_each(|cause| add(&with(&labels, "cause", cause.name()), &seconds(comm.waited(cause))));
        }
    });
    metric(
        &mut out,
        "railhead_comm_waiting_seconds",
        "gauge",
        "Age of the present wait, by its cause, and what a rank of a mesh waits in.",
        |add| {
            for process in processes {
                for comm in process.page.comms.iter().filter(|comm| comm.wait != WaitCause::None) {
                    let labels = with(&labels_of_comm(process, comm), "cause", blame(comm.wait, process.stopped).name);
                    let labels = if comm.wait_op == MeshOp::None { labels } else { with(&labels, "operation", comm.wait_op.name()) };
                    add(&labels, &seconds(comm.wait_age_ns));
                }
            }
        },
    );
    let rails =
        || comms().flat_map(|(labels, comm)| comm.rails.iter().map(move |rail| (with(&labels, "rail", &rail.index.to_string()), rail)));
    metric(&mut out, "railhead_rail_bytes_total", "counter", PAYLOAD, |add| {
        for (labels, rail) in rails() {
            bytes(&labels, rail).for_each(|(labels, bytes)| add(&labels, &bytes));
        }
    });
    for counter in RailCounter::ALL.into_iter().filter(|counter| !BYTES.as_flattened().contains(counter)) {
        metric(&mut out, &format!("railhead_rail_{}_total", counter.name()), "counter", help_of_rail(counter), |add| {
            rails().for_each(|(labels, rail)| add(&labels, &rail.get(counter)));
        });
    }
    metric(
        &mut out,
        "railhead_rail_down_seconds",
        "gauge",
        "For how long the rail has been down while others carry on; 0 while it is used.",
        |add| {
            rails().for_each(|(labels, rail)| add(&labels, &rail.down.as_ref().map_or(0.0, |down| seconds(down.age_ns))));
        },
    );
    out
}

/// One metric with its samples; none at all if it has none.
fn metric(out: &mut String, name: &str, kind: &str, help: &str, samples: impl FnOnce(&mut dyn FnMut(&str, &dyn std::fmt::Display))) {
    let mut lines = String::new();
    samples(&mut |labels, value| {
        // Writing to a String cannot fail.
        let _ = writeln!(lines, "{name}{{{labels}}} {value}");
    });
    if !lines.is_empty() {
        let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}");
    }
}

fn labels_of(process: &Process) -> String {
    format!("pid=\"{}\",copy=\"{}\"", process.pid, process.copy)
}

fn labels_of_comm(process: &Process, comm: &CommSnapshot) -> String {
    let labels = with(&labels_of(process), "comm", &comm.id.to_string());
    let labels = with(&labels, "direction", comm.kind.name());
    let labels = with(&with(&labels, "device", &comm.device), "peer", &comm.peer);
    match comm.ranks {
        Some((rank, peer)) => with(&with(&labels, "rank", &rank.to_string()), "peer_rank", &peer.to_string()),
        None => labels,
    }
}

/// "tx_cma_bytes" as labels.
fn bytes<'a>(labels: &'a str, rail: &'a RailSnapshot) -> impl Iterator<Item = (String, u64)> + 'a {
    BYTES.into_iter().flatten().map(move |counter| {
        let (direction, path) = counter.name().trim_end_matches("_bytes").split_once('_').unwrap_or((counter.name(), ""));
        (with(&with(labels, "way", direction), "path", path), rail.get(counter))
    })
}

fn with(labels: &str, name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{labels},{name}=\"{value}\"")
}

fn help_of_comm(counter: CommCounter) -> &'static str {
    match counter {
        CommCounter::Ops => "Requests given out.",
        CommCounter::Completions => "Requests completed.",
        CommCounter::Bytes => "Bytes of messages, sent or received.",
        CommCounter::NullPosts => "Calls that could not take a request at that time.",
        CommCounter::Errors => "Requests that failed.",
        CommCounter::Stalls => "Requests reported as stalled.",
        CommCounter::Copied => "Bytes of tensors that were copied on their way.",
    }
}

fn help_of_rail(counter: RailCounter) -> &'static str {
    match counter {
        RailCounter::Requests => "Requests posted.",
        RailCounter::RnrWaits => "Requests that met no receive request and waited.",
        RailCounter::Errors => "Queue pairs that failed.",
        RailCounter::CmaRefused => "Cross-memory copies that the kernel refused.",
        RailCounter::Syscalls => "System calls made to move data.",
        RailCounter::Reconnects => "Connections made anew.",
        RailCounter::TxGranted => "Bytes sent by cross-memory attach that the sender wrote into the receiver's memory.",
        RailCounter::NicEvents => "What a NIC reported unasked: of its link, its addresses, its queue pairs, itself.",
        RailCounter::Failures => "Times that the rail failed and others carried on.",
        RailCounter::TxInline
        | RailCounter::TxMapped
        | RailCounter::TxCma
        | RailCounter::TxBounce
        | RailCounter::TxTcp
        | RailCounter::TxNic
        | RailCounter::RxInline
        | RailCounter::RxMapped
        | RailCounter::RxCma
        | RailCounter::RxBounce
        | RailCounter::RxTcp
        | RailCounter::RxNic => PAYLOAD,
    }
}

/// Of all paths together, which are one metric.
const PAYLOAD: &str = "Payload bytes moved, by direction and path.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_of_a_rail_has_a_help_text_of_its_own() {
        let alone = RailCounter::ALL.into_iter().filter(|counter| !BYTES.as_flattened().contains(counter));
        let mut seen = std::collections::HashSet::from([PAYLOAD]);
        for counter in alone {
            assert!(seen.insert(help_of_rail(counter)), "{}: {}", counter.name(), help_of_rail(counter));
        }
    }
}
