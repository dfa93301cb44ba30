//! What of this machine decides how well the software fabric does.

use serde::Serialize;

/// The machine.
#[derive(Debug, Serialize)]
pub struct Host {
    /// Descriptors that a process may have: the soft limit, and the hard one.
    pub descriptors: Option<(u64, u64)>,
    /// kernel.yama.ptrace_scope, where there is one.
    pub ptrace_scope: Option<u32>,
}

impl Host {
    /// What stands in the way, in words.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if let Some((soft, hard)) = self.descriptors
            && soft < 4096
        {
            // Two per comm over TCP, and some for the rest of the program.
            let comms = soft.saturating_sub(64) / 2;
            remarks.push(format!(
                "a process may have {soft} descriptors, enough for some {comms} comms over TCP; `ulimit -n` can raise that to {hard}"
            ));
        }
        if let Some(scope @ 1..) = self.ptrace_scope {
            remarks.push(format!(
                "kernel.yama.ptrace_scope is {scope}: cross-memory attach is refused unless the processes run as root, and bulk data within this host \
                 passes through a bounce ring; `sysctl kernel.yama.ptrace_scope=0` allows it"
            ));
        }
        remarks
    }
}

/// Looks.
pub fn look() -> Host {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    Host { descriptors: descriptors(), ptrace_scope: scope.ok().and_then(|text| text.trim().parse().ok()) }
}

/// Names of RDMA NICs, in order.
pub fn rdma_devices() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// From "Max open files  1024  4096  files".
fn descriptors() -> Option<(u64, u64)> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let mut numbers = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace();
    let mut number = || numbers.next().map(|text| text.parse().unwrap_or(u64::MAX));
    Some((number()?, number()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_the_way_is_said_with_what_would_help() {
        let fine = Host { descriptors: Some((65536, 65536)), ptrace_scope: Some(0) };
        assert_eq!(fine.remarks(), [""; 0]);
        assert_eq!(Host { descriptors: None, ptrace_scope: None }.remarks(), [""; 0]);
        let poor = Host { descriptors: Some((1024, 4096)), ptrace_scope: Some(1) };
        let remarks = poor.remarks();
        assert_eq!(remarks.len(), 2);
        assert!(remarks[0].contains("some 480 comms") && remarks[0].contains("4096") && remarks[1].contains("sysctl"), "{remarks:?}");
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let host = look();
        assert!(host.descriptors.is_some_and(|(soft, hard)| soft > 0 && soft <= hard));
    }
}
