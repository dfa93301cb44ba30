//! The ends of workers that are lost, and may be in the middle of a write to memory of this one's: each stays until that is over. A process that is
//! stopped may be so for ever, and nothing else is to wait for it. Under the lock of the manager.

use super::adapter::Adapter;
use super::calls::Calls;
use super::steps::CallId;

/// Nanoseconds between two looks at them: nothing wakes who sleeps.
const LOOK_NS: u64 = 10_000_000;

/// All of them.
#[derive(Default)]
pub struct Leaving(Vec<LostEnd>);

struct LostEnd {
    adapter: Box<Adapter>,
    /// The receives into whose memory its worker may write.
    exposed: Vec<CallId>,
}

impl Leaving {
    /// One more.
    pub fn add(&mut self, adapter: Box<Adapter>, exposed: Vec<CallId>) {
        self.0.push(LostEnd { adapter, exposed });
    }

    /// Drops those whose worker writes no more, and ends their receives; whether there were any.
    pub fn drop_quiet(&mut self, calls: &mut Calls) -> bool {
        let quiet: Vec<LostEnd> = self.0.extract_if(.., |end| !end.adapter.drop_waits()).collect();
        let any = !quiet.is_empty();
        quiet.into_iter().for_each(|end| end.drop(calls));
        any
    }

    /// Drops all, and waits for those who write.
    pub fn drop_all(&mut self, calls: &mut Calls) {
        self.0.drain(..).for_each(|end| end.drop(calls));
    }

    /// When to look at them again.
    pub fn look(&self) -> Option<u64> {
        (!self.0.is_empty()).then_some(LOOK_NS)
    }
}

impl LostEnd {
    fn drop(self, calls: &mut Calls) {
        let LostEnd { adapter, exposed } = self;
        // First: nobody writes to any memory after that.
        drop(adapter);
        exposed.into_iter().for_each(|id| calls.returned(id));
    }
}
