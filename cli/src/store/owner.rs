//! Who listens at a port of this machine, and how much memory and time it takes. From /proc, for processes of this user.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};

/// The process that listens at a port.
pub fn listening(port: u16) -> anyhow::Result<i32> {
    let mut inodes = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let local = fields.get(1).and_then(|local| local.rsplit_once(':')).and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
            // 0A is LISTEN (linux/net/tcp_states.h).
            if local == Some(port) && fields.get(3) == Some(&"0A") {
                inodes.extend(fields.get(9).map(|inode| format!("socket:[{inode}]")));
            }
        }
    }
    for process in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let descriptors = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let holds = |path: &Path| fs::read_link(path).is_ok_and(|link| inodes.iter().any(|inode| link.as_os_str() == inode.as_str()));
        if descriptors.map(|descriptor| descriptor.path()).any(|path| holds(&path)) {
            return Ok(pid);
        }
    }
    bail!("no process of this user listens at port {port}")
}

/// Private memory of a process, in KiB.
pub fn private_kib(pid: i32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok());
    Ok(field("Private_Clean:").context("Private_Clean")? + field("Private_Dirty:").context("Private_Dirty")?)
}

/// Processor time of all threads of a process so far, in microseconds.
pub fn busy_micros(pid: i32) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/task");
    let threads = fs::read_dir(&path).with_context(|| path.clone())?.flatten();
    let nanos = |stat: String| stat.split_whitespace().next()?.parse::<f64>().ok();
    Ok(threads.filter_map(|thread| nanos(fs::read_to_string(thread.path().join("schedstat")).ok()?)).sum::<f64>() / 1e3)
}
