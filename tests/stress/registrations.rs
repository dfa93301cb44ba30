//! A rank's registrations: exact, wider, nested and overlapping ones, shared by all comms of the device, given back while requests are
//! outstanding under others over the same memory.

use crate::support::Random;
use crate::support::plugin::{Opaque, Plugin};

use super::arena::Arena;

/// Registrations at once.
const MOST: usize = 24;

/// A registration in use.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    id: u64,
    pub mr: Opaque,
}

struct Entry {
    taken: Taken,
    at: usize,
    len: usize,
    /// Outstanding requests under it.
    users: usize,
    /// For one request alone.
    private: bool,
}

#[derive(Default)]
pub struct Registrations {
    entries: Vec<Entry>,
    next: u64,
}

impl Registrations {
    /// One that covers a range.
    pub fn take(&mut self, plugin: &Plugin, comm: Opaque, arena: &Arena, random: &mut Random, (at, len): (usize, usize)) -> Taken {
        let covers = |e: &&mut Entry| !e.private && e.at <= at && at + len <= e.at + e.len;
        let mut fitting: Vec<&mut Entry> = self.entries.iter_mut().filter(covers).collect();
        if !fitting.is_empty() && (fitting.len() >= MOST / 2 || random.below(4) > 0) {
            let choice = random.below(fitting.len() as u64) as usize;
            fitting[choice].users += 1;
            return fitting[choice].taken;
        }
        let (before, after) = (at, arena.len() - at - len);
        let (before, after) = match random.below(4) {
            0 => (0, 0),
            1 => (before, after),
            _ => (random.below(before.min(1 << 20) as u64 + 1) as usize, random.below(after.min(1 << 20) as u64 + 1) as usize),
        };
        self.register(plugin, comm, arena, (at - before, before + len + after), false)
    }

    /// One of exactly this range, that no other request uses.
    pub fn take_private(&mut self, plugin: &Plugin, comm: Opaque, arena: &Arena, range: (usize, usize)) -> Taken {
        self.register(plugin, comm, arena, range, true)
    }

    fn register(&mut self, plugin: &Plugin, comm: Opaque, arena: &Arena, (at, len): (usize, usize), private: bool) -> Taken {
        let len = len.max(1);
        let mr = plugin.reg_mr(comm, arena.ptr(at), len).expect("regMr");
        self.next += 1;
        let taken = Taken { id: self.next, mr };
        self.entries.push(Entry { taken, at, len, users: 1, private });
        taken
    }

    /// A request under it has ended.
    pub fn give(&mut self, taken: Taken) {
        // It may have been given back already.
        if let Some(entry) = self.entries.iter_mut().find(|e| e.taken.id == taken.id) {
            entry.users -= 1;
        }
    }

    /// Deregisters it though a request is outstanding under it.
    pub fn drop_in_use(&mut self, plugin: &Plugin, comm: Opaque, taken: Taken) {
        let index = self.entries.iter().position(|e| e.taken.id == taken.id).expect("a registration");
        assert_eq!(self.entries[index].users, 1);
        self.entries.swap_remove(index);
        plugin.dereg_mr(comm, taken.mr).expect("deregMr under a request");
    }

    /// Now and then, and when there are many: deregisters some that no request is under.
    pub fn thin(&mut self, plugin: &Plugin, comm: Opaque, random: &mut Random) {
        while self.entries.len() > MOST || random.below(6) == 0 {
            let idle: Vec<usize> = (0..self.entries.len()).filter(|&i| self.entries[i].users == 0).collect();
            if idle.is_empty() {
                return;
            }
            let entry = self.entries.swap_remove(idle[random.below(idle.len() as u64) as usize]);
            plugin.dereg_mr(comm, entry.taken.mr).expect("deregMr");
        }
    }

    /// Deregisters all.
    pub fn clear(&mut self, plugin: &Plugin, comm: Opaque) {
        for entry in self.entries.drain(..) {
            plugin.dereg_mr(comm, entry.taken.mr).expect("deregMr");
        }
    }
}
