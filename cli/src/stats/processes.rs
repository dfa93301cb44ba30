//! Which processes use Railhead, and their pages at one moment. Used by `stats` and `top`.
//!
//! A page is another process's memory: its texts may hold anything, and its numbers need not make sense.

use std::collections::HashSet;
use std::io::ErrorKind;

use anyhow::{Context, bail};
use railhead::base::stats::page::{self, RailSnapshot, Snapshot};
use railhead::base::stats::{MeshOp, WaitCause};

/// A process that has a page, at one moment.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its number here, which may differ from the one in its page.
    pub pid: i32,
    /// Which of its pages: it has one per loaded copy of the library.
    pub copy: usize,
    /// Its command line.
    pub command: String,
    /// Whether it is itself stopped, by a signal or a debugger: what its page says it waits for was so when it last ran.
    pub stopped: bool,
    /// The page.
    pub page: Snapshot,
}

/// All that this user may look into, by number.
///
/// Errors: no /proc.
pub fn all() -> anyhow::Result<Vec<Process>> {
    let entries = std::fs::read_dir("/proc").context("/proc cannot be read, so no process can be found")?;
    let mut pids: Vec<i32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    Ok(pids.into_iter().flat_map(look).collect())
}

/// One process.
///
/// Errors: there is none; it is not this user's; it has no page.
pub fn of(pid: i32) -> anyhow::Result<Vec<Process>> {
    if let Err(e) = std::fs::read_dir(format!("/proc/{pid}/fd")) {
        match e.kind() {
            ErrorKind::NotFound => bail!("there is no process {pid}"),
            ErrorKind::PermissionDenied => bail!("process {pid} may not be looked into: it is another user's, and this is not root"),
            _ => bail!("process {pid} cannot be looked into: {e}"),
        }
    }
    let found = look(pid);
    if found.is_empty() {
        bail!("process {pid} has no stats page: it has not initialised Railhead, uses another version of it, or has RAILHEAD_STATS=0");
    }
    Ok(found)
}

fn look(pid: i32) -> Vec<Process> {
    let pages = page::find(pid);
    if pages.is_empty() {
        return Vec::new();
    }
    let command = command(pid);
    let stopped = is_stopped(pid);
    let process =
        |(copy, page): (usize, &page::Page)| Process { pid, copy, command: command.clone(), stopped, page: tidy(page.snapshot()) };
    pages.iter().enumerate().map(process).collect()
}

fn is_stopped(pid: i32) -> bool {
    // The state follows the name, which stands in brackets and may hold any bytes.
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    String::from_utf8_lossy(&stat).rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

/// Who is to blame for a wait.
pub fn blame(cause: WaitCause, stopped: bool) -> Wait {
    match cause {
        WaitCause::None => Wait { name: cause.name(), words: cause.words(), short: "-", of_rank: None },
        _ if stopped => Wait { name: "self_stopped", words: "is stopped itself", short: "stopped itself", of_rank: None },
        cause => Wait { name: cause.name(), words: cause.words(), short: short(cause), of_rank: Some(of_rank(cause)) },
    }
}

/// In what a rank of a mesh waits, or for which tensor, as its own messages say it.
pub fn waits_in(op: MeshOp, tag: u64, key: &str) -> Option<String> {
    match op {
        MeshOp::None if key.is_empty() => None,
        MeshOp::None => Some(format!("tensor {key} of step {tag}")),
        MeshOp::Buffer => Some(format!("buffer, slot {tag}")),
        op => Some(format!("{}, tag {tag:#x}", op.name())),
    }
}

/// What a comm waits for, as it is shown.
pub struct Wait {
    /// In snake case.
    pub name: &'static str,
    /// In words.
    pub words: &'static str,
    /// In 15 characters.
    pub short: &'static str,
    /// In as many behind "rank" and its number, where it is the peer's fault.
    pub of_rank: Option<&'static str>,
}

fn of_rank(cause: WaitCause) -> &'static str {
    match cause {
        WaitCause::None => "",
        WaitCause::PeerNoReceive => "receive",
        WaitCause::PeerNoSend => "send",
        WaitCause::Fabric => "fabric",
        WaitCause::Handshake => "connect",
        WaitCause::PeerStopped => "stopped",
        WaitCause::PeerGone => "is gone",
    }
}

fn short(cause: WaitCause) -> &'static str {
    match cause {
        WaitCause::None => "-",
        WaitCause::PeerNoReceive => "peer's receive",
        WaitCause::PeerNoSend => "peer's send",
        WaitCause::Fabric => "fabric",
        WaitCause::Handshake => "handshake",
        WaitCause::PeerStopped => "stopped peer",
        WaitCause::PeerGone => "peer is gone",
    }
}

/// Makes a page fit to be shown: no control characters, which a terminal would obey, and no number twice.
fn tidy(mut page: Snapshot) -> Snapshot {
    let mut seen = HashSet::new();
    page.comms.retain(|comm| seen.insert(comm.id));
    page.comms.sort_by_key(|comm| comm.id);
    for comm in &mut page.comms {
        comm.device = printable(&comm.device);
        comm.peer = printable(&comm.peer);
        comm.wait_key = printable(&comm.wait_key);
        if let Some((_, peer)) = comm.ranks {
            comm.peer = format!("rank {peer}: {}", comm.peer);
        }
        let mut rails = HashSet::new();
        comm.rails.retain(|rail| rails.insert(rail.index));
        comm.rails.iter_mut().filter_map(|rail| rail.down.as_mut()).for_each(|down| down.why = printable(&down.why));
    }
    page
}

/// Characters that a terminal shows; everything else as one that says so.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || c == '\u{2028}' || c == '\u{2029}' { '\u{fffd}' } else { c }).collect()
}

fn command(pid: i32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> = line.split(|&b| b == 0).filter(|w| !w.is_empty()).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
    let text = if words.is_empty() { std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default() } else { words.join(" ") };
    printable(text.trim()).chars().take(200).collect()
}

/// Bytes that a rail moved, by path, sent and received: what was not moved is left out.
pub fn wires(rail: &RailSnapshot) -> Vec<(&'static str, u64, u64)> {
    use railhead::base::stats::RailCounter as R;
    let paths = [
        ("inline", R::TxInline, R::RxInline),
        ("mapped", R::TxMapped, R::RxMapped),
        ("cross-memory", R::TxCma, R::RxCma),
        ("bounce", R::TxBounce, R::RxBounce),
        ("tcp", R::TxTcp, R::RxTcp),
        ("nic", R::TxNic, R::RxNic),
    ];
    let moved = paths.map(|(name, tx, rx)| (name, rail.get(tx), rail.get(rx)));
    moved.into_iter().filter(|(_, tx, rx)| (*tx, *rx) != (0, 0)).collect()
}
