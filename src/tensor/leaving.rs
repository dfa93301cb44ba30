//! The ends of workers that are lost, and may be in the middle of a write to memory of this one's: each stays until that is over. A process that is
//! stopped may be so for ever, and nothing else is to wait for it. Under the lock of the manager, until [`Leaving::take`] ends that.

use crate::base::clock;

use super::adapter::Adapter;
use super::calls::Calls;
use super::steps::CallId;

/// Nanoseconds between two looks at them: nothing wakes who sleeps.
const LOOK_NS: u64 = 10_000_000;

/// All of them.
#[derive(Default)]
pub struct Leaving {
    ends: Vec<LostEnd>,
    /// When to look at them.
    next: u64,
}

/// An end that nobody polls any more.
pub struct LostEnd {
    adapter: Box<Adapter>,
    /// The receives into whose memory its worker may write, the oldest first.
    exposed: Vec<CallId>,
}

impl Leaving {
    /// One more. It is looked at next.
    pub fn add(&mut self, end: LostEnd) {
        self.ends.push(end);
        self.next = 0;
    }

    /// Drops those whose worker writes no more, and ends their receives, if it is time to look; whether there were any.
    pub fn drop_quiet(&mut self, calls: &mut Calls) -> bool {
        if self.ends.is_empty() || clock::now() < self.next {
            return false;
        }
        let quiet: Vec<LostEnd> = self.ends.extract_if(.., |end| !end.drop_waits()).collect();
        self.next = clock::now().saturating_add(LOOK_NS);
        let any = !quiet.is_empty();
        quiet.into_iter().flat_map(LostEnd::drop).for_each(|id| calls.returned(id));
        any
    }

    /// All.
    pub fn take(&mut self) -> Vec<LostEnd> {
        std::mem::take(&mut self.ends)
    }

    /// Nanoseconds until they are to be looked at again.
    pub fn look(&self) -> Option<u64> {
        (!self.ends.is_empty()).then_some(LOOK_NS)
    }
}

impl LostEnd {
    /// That of a worker which may write into the memory of these receives.
    pub fn new(adapter: Box<Adapter>, exposed: impl Iterator<Item = CallId>) -> LostEnd {
        let mut exposed: Vec<CallId> = exposed.collect();
        exposed.sort_unstable();
        LostEnd { adapter, exposed }
    }

    /// Whether [`LostEnd::drop`] waits.
    pub fn drop_waits(&mut self) -> bool {
        self.adapter.drop_waits()
    }

    /// Drops it, which waits for a worker that writes: nobody writes to the memory of these receives after that.
    pub fn drop(self) -> Vec<CallId> {
        drop(self.adapter);
        self.exposed
    }
}
