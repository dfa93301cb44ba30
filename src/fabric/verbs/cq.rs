//! A completion queue of a NIC and its queue pairs. Driven by one thread at a time.

use std::ptr;
use std::sync::Arc;

use ibverbs_sys::*;

use super::Shared;
use super::library::{check, made};
use super::qp::QueuePair;
use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::stats::RailStats;
use crate::fabric::types::*;

/// Entries to begin with: enough for a comm with one queue pair per rail, flush included, also if long data is posted apart from its immediate.
/// Drivers round up to 2^n - 1, so it takes no more memory than 1024. The queue grows with its queue pairs.
const FIRST_ENTRIES: u64 = 1536;
/// Entries kept free behind deep queue pairs for a shallow one that is made later, such as a comm's flush: making it should not wait until the
/// device has resized a queue that messages flow through.
const SPARE: u64 = 512;
/// Entries taken from the device at once.
const BATCH: usize = 16;
/// Polls between two checks for failures that no completion reports.
const CHECK_EVERY: u32 = 1024;
/// Queue pairs of a completion queue at most: the bits that an id on the device has for them.
const MAX_QPS: usize = 1 << 16;

/// A completion queue and its queue pairs.
pub struct CompletionQueue {
    raw: *mut ibv_cq,
    poll_cq: unsafe extern "C" fn(*mut ibv_cq, i32, *mut ibv_wc) -> i32,
    entries: Box<[ibv_wc; BATCH]>,
    /// Dropped first: a queue with queue pairs cannot be destroyed.
    slots: Vec<QpSlot>,
    /// Entries of the device's queue.
    capacity: u64,
    /// Entries that the queue pairs may need, and those of destroyed ones that may still be in the queue.
    needed: u64,
    stale: u64,
    polls: u32,
    /// Its number on the device's channel; none if it cannot be armed.
    channel_id: Option<usize>,
    armed: bool,
    shared: Arc<Shared>,
}

/// A slot for a queue pair. The generation tells completions of an earlier queue pair of the slot apart.
struct QpSlot {
    generation: u16,
    qp: Option<Box<QueuePair>>,
}

// SAFETY: the raw pointer is the device's queue, which any thread may use, one at a time.
unsafe impl Send for CompletionQueue {}

impl CompletionQueue {
    pub(super) fn new(shared: Arc<Shared>, notify: bool) -> Result<CompletionQueue> {
        let context = &shared.port.context;
        // SAFETY: the context is open; its table of operations was filled when it was.
        let poll_cq = unsafe { (*context.raw).ops.poll_cq };
        let poll_cq = poll_cq.ok_or_else(|| Error::internal(format!("{}: its driver has no poll_cq", context.name)))?;
        let channel = if notify { Some(shared.channel()?) } else { None };
        let channel_id = channel.map(|channel| channel.add());
        let entries = FIRST_ENTRIES.min(context.max_cqe);
        let (number, channel_raw) = (channel_id.unwrap_or(0), channel.map_or(ptr::null_mut(), |channel| channel.raw()));
        // SAFETY: context and channel are live; the context word is a number that only `Channel` looks at.
        let raw = unsafe { (shared.library().create_cq)(context.raw, entries as i32, ptr::without_provenance_mut(number), channel_raw, 0) };
        let raw = made(raw).map_err(|e| {
            if let (Some(channel), Some(id)) = (channel, channel_id) {
                channel.remove(id);
            }
            Error::system(format!("{}: creating a completion queue of {entries} entries{}", context.name, super::memlock_hint()), e)
        })?;
        Ok(CompletionQueue {
            raw,
            poll_cq,
            entries: Box::new([ibv_wc::default(); BATCH]),
            slots: Vec::new(),
            capacity: entries,
            needed: 0,
            stale: 0,
            polls: 0,
            channel_id,
            armed: false,
            shared,
        })
    }

    /// Makes a queue pair.
    pub fn create_qp(&mut self, caps: &QpCaps, stats: RailStats) -> Result<QpId> {
        let free = self.slots.iter().position(|slot| slot.qp.is_none());
        let at = free.unwrap_or(self.slots.len());
        if at >= MAX_QPS {
            return Err(Error::usage(format!("a completion queue serves {MAX_QPS} queue pairs at most")));
        }
        self.grow(u64::from(caps.send_depth) + u64::from(caps.recv_depth))?;
        let generation = self.slots.get(at).map_or(0, |slot| slot.generation);
        let name = u32::from(generation) << 16 | at as u32;
        let qp = Box::new(QueuePair::new(self.shared.clone(), self.raw, name, caps, stats)?);
        self.needed += qp.depth();
        match self.slots.get_mut(at) {
            Some(slot) => slot.qp = Some(qp),
            None => self.slots.push(QpSlot { generation, qp: Some(qp) }),
        }
        Ok(QpId(at as u32))
    }

    /// Grows the queue by so many entries: a queue that overflows fails with all its queue pairs.
    fn grow(&mut self, more: u64) -> Result<()> {
        let wanted = self.needed + self.stale + more;
        let spare = if more > SPARE { SPARE } else { 0 };
        if wanted + spare <= self.capacity {
            return Ok(());
        }
        let (label, most) = (&self.shared.port.label, self.shared.port.context.max_cqe);
        if wanted > most {
            return Err(Error::usage(format!(
                "{label}: {wanted} completions may be outstanding, its completion queues have {most} entries at most"
            )));
        }
        let entries = (wanted + spare).next_power_of_two().min(most);
        if entries <= self.capacity {
            return Ok(());
        }
        // SAFETY: the queue is live, and this thread drives it.
        let result = check(unsafe { (self.shared.library().resize_cq)(self.raw, entries as i32) });
        match result {
            Ok(()) => self.capacity = entries,
            // Only the spare entries are missing.
            Err(_) if wanted <= self.capacity => {}
            Err(e) => return Err(Error::system(format!("{label}: resizing a completion queue to {entries} entries"), e)),
        }
        Ok(())
    }

    /// The queue pair of that id.
    #[inline]
    pub fn qp(&mut self, id: QpId) -> &mut QueuePair {
        match self.slots.get_mut(id.0 as usize) {
            Some(QpSlot { qp: Some(qp), .. }) => qp,
            _ => unknown(id),
        }
    }

    /// Destroys it.
    pub fn destroy_qp(&mut self, id: QpId) {
        if let Some(slot) = self.slots.get_mut(id.0 as usize)
            && let Some(qp) = slot.qp.take()
        {
            self.needed -= qp.depth();
            // Not every device removes them with the queue pair.
            self.stale += qp.outstanding();
            slot.generation = slot.generation.wrapping_add(1);
        }
    }

    /// Takes completions.
    #[inline]
    pub fn poll(&mut self, out: &mut [Completion]) -> usize {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(CHECK_EVERY) {
            self.check();
        }
        let wanted = out.len().min(BATCH);
        if wanted == 0 {
            return 0;
        }
        loop {
            // SAFETY: the queue is live and driven by this thread; the array has `BATCH` entries.
            let got = unsafe { (self.poll_cq)(self.raw, wanted as i32, self.entries.as_mut_ptr()) };
            if got <= 0 {
                if got < 0 {
                    self.poll_failed(got);
                }
                self.stale = 0;
                // If the queue is armed, 0 makes the caller sleep: only if the queue did not fire meanwhile.
                if !self.armed || !self.fired() {
                    return 0;
                }
                continue;
            }
            let mut n = 0;
            for wc in self.entries.iter().take(got as usize) {
                let (at, generation) = ((wc.wr_id() >> 32) as u16, (wc.wr_id() >> 48) as u16);
                let slot = self.slots.get_mut(usize::from(at)).filter(|slot| slot.generation == generation);
                let Some(qp) = slot.and_then(|slot| slot.qp.as_mut()) else { continue };
                if let (Some(completion), Some(slot)) = (qp.complete(wc), out.get_mut(n)) {
                    *slot = completion;
                    n += 1;
                }
            }
            if n > 0 {
                self.armed = false;
                return n;
            }
        }
    }

    /// Whether the queue has fired since it was armed. If so, arms it again: the caller is to poll once more.
    fn fired(&mut self) -> bool {
        let Some(id) = self.channel_id else { return false };
        if !self.shared.channel().is_ok_and(|channel| channel.take_fired(id)) {
            return false;
        }
        self.request_notify().is_ok()
    }

    /// Ends notification, as nobody polls the queue any more: its completions do not keep the device's descriptor readable. Not to be armed again.
    #[cold]
    pub fn disarm(&mut self) {
        if let Some(id) = self.channel_id.take()
            && let Ok(channel) = self.shared.channel()
        {
            channel.remove(id);
        }
        self.armed = false;
    }

    /// Asks for a notification.
    pub fn arm(&mut self) -> Result<()> {
        let Some(id) = self.channel_id else {
            return Err(Error::usage("this completion queue was created without notification"));
        };
        // A caller that sleeps between polls makes too few of them for `CHECK_EVERY`.
        self.check();
        // Clears an earlier notification: the caller drains the queue after this.
        self.shared.channel()?.take_fired(id);
        self.request_notify()?;
        self.armed = true;
        Ok(())
    }

    fn request_notify(&self) -> Result<()> {
        // SAFETY: the context is open, the queue live.
        let code = unsafe {
            let request = (*self.shared.port.context.raw).ops.req_notify_cq;
            request.map_or(libc::EOPNOTSUPP, |request| request(self.raw, 0))
        };
        check(code).map_err(|e| Error::system(format!("{}: ibv_req_notify_cq", self.shared.port.label), e))
    }

    #[cold]
    fn check(&mut self) {
        let now = clock::now();
        self.slots.iter_mut().filter_map(|slot| slot.qp.as_mut()).for_each(|qp| qp.check(now));
    }

    /// The device's queue cannot be polled.
    #[cold]
    fn poll_failed(&mut self, code: i32) {
        let label = &self.shared.port.label;
        for qp in self.slots.iter_mut().filter_map(|slot| slot.qp.as_mut()) {
            if qp.state() != QpState::Error {
                log_warn!(log::NET, "{label}: polling a completion queue failed ({code}); look at `dmesg`");
            }
            qp.set_error();
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.slots.clear();
        if !self.shared.owned() {
            return;
        }
        if let (Some(id), Ok(channel)) = (self.channel_id, self.shared.channel()) {
            channel.remove(id);
        }
        // SAFETY: made by create_cq, destroyed once, after its queue pairs; every event of it was acknowledged.
        unsafe { (self.shared.library().destroy_cq)(self.raw) };
    }
}

#[cold]
fn unknown(id: QpId) -> ! {
    panic!("{id:?} names no queue pair of this completion queue")
}
