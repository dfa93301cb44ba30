//! Ports of servers that start later, or again, or elsewhere than in the test: their number has to be known before.

use std::net::{Ipv4Addr, TcpListener};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// A port that nobody uses, on whatever address, and that nobody is given who does not ask for it: it lies below those that the system gives out
/// to servers without a port and to connections. One of those may be taken again before its server listens.
pub fn own_port() -> u16 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let given_out = range.split_whitespace().next().and_then(|low| low.parse().ok()).unwrap_or(32768).clamp(4096, 32768);
    let mut ports = (0..4096).map(|_| {
        let at = process::id().wrapping_mul(64).wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
        (2048 + at % (given_out - 2048)) as u16
    });
    ports.find(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok()).expect("a free port")
}
