//! The order of operations, as slot numbers: `next` links the oldest operation of each connector into a circle, `next_peer` links the later ones of
//! the same connector behind it. Free slots form the pool. Used only by the scheduler; knows nothing of what an operation is.
//!
//! As in NCCL 2.7 (src/proxy.cc: allocateArgs, ProxyAppend, persistentThread), with slot numbers instead of pointers. The circle is linked in one
//! direction, so a slot is removed by way of the one before it.

/// Names no slot.
pub const NONE: u32 = u32::MAX;
/// Slots by which the pool grows (NCCL 2.7, src/proxy.cc: PROXYARGS_ALLOCATE_SIZE).
pub const POOL: usize = 32;

#[derive(Debug, Clone, Copy)]
struct Node {
    /// In the circle: the slot that follows. In the pool: the next free slot. Behind another operation: unused.
    next: u32,
    /// The connector's next operation.
    next_peer: u32,
    connector: u32,
}

/// The circle, the chains and the pool.
#[derive(Debug)]
pub struct List {
    nodes: Vec<Node>,
    /// The slot in the circle with which a lap begins.
    ops: u32,
    /// First slot of the pool.
    pool: u32,
    /// By connector: its last operation.
    last: Vec<u32>,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        List { nodes: Vec::new(), ops: NONE, pool: NONE, last: Vec::new(), len: 0 }
    }
}

impl List {
    /// Operations of all connectors together.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ops == NONE
    }

    /// Slots that exist, in use or not.
    #[cfg(test)]
    pub fn slots(&self) -> usize {
        self.nodes.len()
    }

    /// The slot with which a lap begins, or [`NONE`].
    #[inline]
    pub fn ops(&self) -> u32 {
        self.ops
    }

    /// The slot that follows in the circle: the slot itself if it is alone there.
    #[inline]
    pub fn next(&self, slot: u32) -> u32 {
        self.nodes[slot as usize].next
    }

    /// The later operation of the same connector, or [`NONE`].
    pub fn next_peer(&self, slot: u32) -> u32 {
        self.nodes[slot as usize].next_peer
    }

    /// Whether the connector has an operation.
    pub fn has(&self, connector: u32) -> bool {
        self.last.get(connector as usize).is_some_and(|&last| last != NONE)
    }

    /// Takes a slot from the pool and puts it behind the connector's other operations, or into the circle if there are none. Allocates only where
    /// more slots or connectors are in use than ever before.
    pub fn append(&mut self, connector: u32) -> u32 {
        if self.pool == NONE {
            self.grow();
        }
        let slot = self.pool;
        self.pool = self.nodes[slot as usize].next;
        self.nodes[slot as usize] = Node { next: NONE, next_peer: NONE, connector };
        self.len += 1;
        if self.last.len() <= connector as usize {
            self.last.resize(connector as usize + 1, NONE);
        }
        let last = std::mem::replace(&mut self.last[connector as usize], slot);
        if last != NONE {
            self.nodes[last as usize].next_peer = slot;
        } else if self.ops == NONE {
            self.nodes[slot as usize].next = slot;
            self.ops = slot;
        } else {
            let first = self.ops as usize;
            self.nodes[slot as usize].next = std::mem::replace(&mut self.nodes[first].next, slot);
        }
        slot
    }

    /// Gives the slot that follows `slot` in the circle back to the pool. If its connector has another operation, that takes its place and is
    /// returned; otherwise `slot` is returned, or [`NONE`] if the circle is empty. In each case the slot after the returned one is to be stepped next.
    pub fn remove_next(&mut self, slot: u32) -> u32 {
        let freed = self.nodes[slot as usize].next;
        let Node { next, next_peer, connector } = self.nodes[freed as usize];
        let alone = freed == slot;
        let follows = if next_peer != NONE {
            self.nodes[next_peer as usize].next = if alone { next_peer } else { next };
            next_peer
        } else {
            self.last[connector as usize] = NONE;
            if alone { NONE } else { next }
        };
        if !alone {
            self.nodes[slot as usize].next = follows;
        }
        if self.ops == freed {
            self.ops = follows;
        }
        self.nodes[freed as usize] = Node { next: self.pool, next_peer: NONE, connector: NONE };
        self.pool = freed;
        self.len -= 1;
        if next_peer == NONE && !alone { slot } else { follows }
    }

    /// Calls `visit` with every operation and its depth: the circle from where a lap begins, each followed by the later ones of its connector.
    pub fn for_each(&self, mut visit: impl FnMut(u32, u32)) {
        let mut first = self.ops;
        while first != NONE {
            let (mut slot, mut depth) = (first, 0);
            while slot != NONE {
                visit(slot, depth);
                (slot, depth) = (self.next_peer(slot), depth + 1);
            }
            first = self.next(first);
            if first == self.ops {
                return;
            }
        }
    }

    fn grow(&mut self) {
        let from = self.nodes.len();
        self.nodes.extend((from..from + POOL).map(|at| Node {
            next: if at + 1 < from + POOL { at as u32 + 1 } else { NONE },
            next_peer: NONE,
            connector: NONE,
        }));
        self.pool = from as u32;
    }
}

#[cfg(test)]
mod tests;
