//! Network namespaces joined by a virtual cable, made with ip(8). Needs root; [`usable`] says whether it can work here.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

static NEXT: AtomicU32 = AtomicU32::new(0);

fn ip(args: &[&str]) {
    let output = Command::new("ip").args(args).output().expect("ip");
    assert!(output.status.success(), "ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
}

/// Whether this process may make namespaces; says so when not.
pub fn usable() -> bool {
    let ok = Command::new("unshare").args(["--net", "--mount", "--pid", "--ipc", "--fork", "true"]).status().is_ok_and(|s| s.success());
    if !ok {
        eprintln!("SKIP: namespaces need root and unshare(1)");
    }
    ok
}

/// The kernel sees a carrier a little after the interface is up, and calls the interface running (IFF_RUNNING) later still.
fn carrier(namespace: &str, interface: &str) {
    super::until("a carrier", || {
        let shown = Command::new("ip").args(["-n", namespace, "-o", "link", "show", interface]).output().expect("ip");
        String::from_utf8_lossy(&shown.stdout).contains("state UP").then_some(())
    });
}

/// Two namespaces with addresses 10.77.n.1 and .2 (and fd77:n::1 and ::2) on an interface `rht` each.
pub struct Cable {
    names: [String; 2],
    pub v4: [String; 2],
    pub v6: [String; 2],
}

impl Cable {
    pub fn new() -> Cable {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let names = ["a", "b"].map(|end| format!("rht-{pid}-{n}-{end}"));
        let subnet = (pid.wrapping_mul(7) + n) % 250;
        let cable = Cable { names, v4: [1, 2].map(|i| format!("10.77.{subnet}.{i}")), v6: [1, 2].map(|i| format!("fd77:{subnet}::{i}")) };
        for name in &cable.names {
            ip(&["netns", "add", name]);
        }
        let [a, b] = &cable.names;
        // In one step straight into both namespaces, so that no name is ever taken in this one.
        ip(&["-n", a, "link", "add", "rht", "type", "veth", "peer", "name", "rht", "netns", b]);
        for (i, name) in cable.names.iter().enumerate() {
            ip(&["-n", name, "link", "set", "lo", "up"]);
            ip(&["-n", name, "addr", "add", &format!("{}/24", cable.v4[i]), "dev", "rht"]);
            ip(&["-n", name, "addr", "add", &format!("{}/64", cable.v6[i]), "dev", "rht", "nodad"]);
            ip(&["-n", name, "link", "set", "rht", "up"]);
        }
        cable.names.iter().for_each(|name| carrier(name, "rht"));
        cable
    }

    /// Lays another one beside it, whose interface is `rht1` at both ends.
    pub fn double(&self) {
        let [a, b] = &self.names;
        ip(&["-n", a, "link", "add", "rht1", "type", "veth", "peer", "name", "rht1", "netns", b]);
        for (name, v4) in self.names.iter().zip(&self.v4) {
            ip(&["-n", name, "addr", "add", &format!("{}/24", v4.replacen("10.77", "10.78", 1)), "dev", "rht1"]);
            ip(&["-n", name, "link", "set", "rht1", "up"]);
        }
        self.names.iter().for_each(|name| carrier(name, "rht1"));
    }

    /// Takes an interface down at one end, or up again.
    pub fn set(&self, interface: &str, end: usize, state: &str) {
        ip(&["-n", &self.names[end], "link", "set", interface, state]);
        if state == "up" {
            self.names.iter().for_each(|name| carrier(name, interface));
        }
    }

    /// What goes over an interface is lost from now on, both ways, and neither end is told: it goes to an address that nobody has.
    pub fn swallow(&self, interface: &str) {
        for (end, name) in self.names.iter().enumerate() {
            let to = self.v4[1 - end].replacen("10.77", if interface == "rht" { "10.77" } else { "10.78" }, 1);
            ip(&["-n", name, "neigh", "replace", &to, "lladdr", "02:00:00:00:00:01", "dev", interface, "nud", "permanent"]);
        }
    }

    /// The command that runs another one at an end of the cable.
    pub fn at(&self, end: usize) -> [&str; 4] {
        ["ip", "netns", "exec", &self.names[end]]
    }

    /// Nothing comes through any more, and nobody says so.
    pub fn cut(&self) {
        self.set("rht", 1, "down");
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}
