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
use crate::fabric::QpId;
use crate::fabric::types::*;

/// Entries to begin with: enough for a comm with one queue pair per rail, flush included, also where long data goes apart from its immediate.
/// Drivers that take powers of two less one have as much for it as for 1024. It grows with its queue pairs.
const FIRST_ENTRIES: u64 = 1536;
/// Entries kept free behind deep queue pairs for shallow ones that come late, as a comm's flush: it should not have to wait for the device
/// to resize a queue that messages flow through.
const SPARE: u64 = 512;
/// Entries taken from the device at once.
const BATCH: usize = 16;
/// Polls between two looks at what no completion tells.
const LOOK_EVERY: u32 = 1024;
/// Queue pairs of a completion queue at most: the bits that an id on the device has for them.
const MAX_QPS: usize = 1 << 16;

/// A completion queue and its queue pairs.
pub struct CompletionQueue {
    raw: *mut ibv_cq,
    poll_cq: unsafe extern "C" fn(*mut ibv_cq, i32, *mut ibv_wc) -> i32,
    entries: Box<[ibv_wc; BATCH]>,
    /// Dropped first: a queue with queue pairs cannot be destroyed.
    places: Vec<Place>,
    /// Entries that the device has room for.
    room: u64,
    /// Entries that the queue pairs may need, and those of destroyed ones that may still lie there.
    needed: u64,
    left: u64,
    polls: u32,
    /// Its number on the device's channel, if it can be armed.
    notice: Option<usize>,
    armed: bool,
    shared: Arc<Shared>,
}

/// Where a queue pair is, or was: completions of a former one are told by the generation.
struct Place {
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
        let notice = channel.map(|channel| channel.join());
        let entries = FIRST_ENTRIES.min(context.max_cqe);
        let (number, channel_raw) = (notice.unwrap_or(0), channel.map_or(ptr::null_mut(), |channel| channel.raw()));
        // SAFETY: context and channel are live; the context word is a number that only `Channel` looks at.
        let raw = unsafe { (shared.library().create_cq)(context.raw, entries as i32, ptr::without_provenance_mut(number), channel_raw, 0) };
        let raw = made(raw).map_err(|e| {
            if let (Some(channel), Some(id)) = (channel, notice) {
                channel.leave(id);
            }
            Error::system(format!("{}: creating a completion queue of {entries} entries{}", context.name, super::memlock_hint()), e)
        })?;
        Ok(CompletionQueue {
            raw,
            poll_cq,
            entries: Box::new([ibv_wc::default(); BATCH]),
            places: Vec::new(),
            room: entries,
            needed: 0,
            left: 0,
            polls: 0,
            notice,
            armed: false,
            shared,
        })
    }

    /// Makes a queue pair.
    pub fn create_qp(&mut self, caps: &QpCaps, stats: RailStats) -> Result<QpId> {
        let free = self.places.iter().position(|place| place.qp.is_none());
        let at = free.unwrap_or(self.places.len());
        if at >= MAX_QPS {
            return Err(Error::usage(format!("a completion queue serves {MAX_QPS} queue pairs at most")));
        }
        self.grow(u64::from(caps.send_depth) + u64::from(caps.recv_depth))?;
        let generation = self.places.get(at).map_or(0, |place| place.generation);
        let name = u32::from(generation) << 16 | at as u32;
        let qp = Box::new(QueuePair::new(self.shared.clone(), self.raw, name, caps, stats)?);
        self.needed += qp.depth();
        match self.places.get_mut(at) {
            Some(place) => place.qp = Some(qp),
            None => self.places.push(Place { generation, qp: Some(qp) }),
        }
        Ok(QpId(at as u32))
    }

    /// Makes room for so many more entries: a queue that overflows is lost with all its queue pairs.
    fn grow(&mut self, more: u64) -> Result<()> {
        let wanted = self.needed + self.left + more;
        let spare = if more > SPARE { SPARE } else { 0 };
        if wanted + spare <= self.room {
            return Ok(());
        }
        let (label, most) = (&self.shared.port.label, self.shared.port.context.max_cqe);
        if wanted > most {
            return Err(Error::usage(format!(
                "{label}: {wanted} completions may be outstanding, its completion queues have {most} entries at most"
            )));
        }
        let entries = (wanted + spare).next_power_of_two().min(most);
        if entries <= self.room {
            return Ok(());
        }
        // SAFETY: the queue is live, and this thread drives it.
        let result = check(unsafe { (self.shared.library().resize_cq)(self.raw, entries as i32) });
        match result {
            Ok(()) => self.room = entries,
            // Only the spare entries are missing.
            Err(_) if wanted <= self.room => {}
            Err(e) => return Err(Error::system(format!("{label}: resizing a completion queue to {entries} entries"), e)),
        }
        Ok(())
    }

    /// The queue pair of that id.
    #[inline]
    pub fn qp(&mut self, id: QpId) -> &mut QueuePair {
        match self.places.get_mut(id.0 as usize) {
            Some(Place { qp: Some(qp), .. }) => qp,
            _ => unknown(id),
        }
    }

    /// Destroys it.
    pub fn destroy_qp(&mut self, id: QpId) {
        if let Some(place) = self.places.get_mut(id.0 as usize)
            && let Some(qp) = place.qp.take()
        {
            self.needed -= qp.depth();
            // Not every device takes them out with the queue pair.
            self.left += qp.outstanding();
            place.generation = place.generation.wrapping_add(1);
        }
    }

    /// Takes completions.
    #[inline]
    pub fn poll(&mut self, out: &mut [Completion]) -> usize {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(LOOK_EVERY) {
            self.look();
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
                    self.broken(got);
                }
                self.left = 0;
                // A caller that is about to sleep takes 0 for "nothing to be done here".
                if !self.armed || !self.fired() {
                    return 0;
                }
                continue;
            }
            let mut n = 0;
            for wc in self.entries.iter().take(got as usize) {
                let (at, generation) = ((wc.wr_id() >> 32) as u16, (wc.wr_id() >> 48) as u16);
                let place = self.places.get_mut(usize::from(at)).filter(|place| place.generation == generation);
                let Some(qp) = place.and_then(|place| place.qp.as_mut()) else { continue };
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

    /// Whether the queue was notified of since it was armed. Then it is armed again, and may have got something in between.
    fn fired(&mut self) -> bool {
        let Some(id) = self.notice else { return false };
        if !self.shared.channel().is_ok_and(|channel| channel.take(id)) {
            return false;
        }
        self.request().is_ok()
    }

    /// Whoever would look at what it notifies of looks no more: what it still reports keeps nobody awake. It cannot be armed again.
    #[cold]
    pub fn mute(&mut self) {
        if let Some(id) = self.notice.take()
            && let Ok(channel) = self.shared.channel()
        {
            channel.leave(id);
        }
        self.armed = false;
    }

    /// Asks for a notification.
    pub fn arm(&mut self) -> Result<()> {
        let Some(id) = self.notice else {
            return Err(Error::usage("this completion queue was created without notification"));
        };
        // Who sleeps polls rarely.
        self.look();
        // What was notified of before is about to be drained.
        self.shared.channel()?.take(id);
        self.request()?;
        self.armed = true;
        Ok(())
    }

    fn request(&self) -> Result<()> {
        // SAFETY: the context is open, the queue live.
        let code = unsafe {
            let request = (*self.shared.port.context.raw).ops.req_notify_cq;
            request.map_or(libc::EOPNOTSUPP, |request| request(self.raw, 0))
        };
        check(code).map_err(|e| Error::system(format!("{}: ibv_req_notify_cq", self.shared.port.label), e))
    }

    #[cold]
    fn look(&mut self) {
        let now = clock::now();
        self.places.iter_mut().filter_map(|place| place.qp.as_mut()).for_each(|qp| qp.look(now));
    }

    /// The device cannot even be polled.
    #[cold]
    fn broken(&mut self, code: i32) {
        let label = &self.shared.port.label;
        for qp in self.places.iter_mut().filter_map(|place| place.qp.as_mut()) {
            if qp.state() != QpState::Error {
                log_warn!(log::NET, "{label}: polling a completion queue failed ({code}); look at `dmesg`");
            }
            qp.set_error();
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.places.clear();
        if !self.shared.owned() {
            return;
        }
        if let (Some(id), Ok(channel)) = (self.notice, self.shared.channel()) {
            channel.leave(id);
        }
        // SAFETY: made by create_cq, destroyed once, after its queue pairs; every event of it was acknowledged.
        unsafe { (self.shared.library().destroy_cq)(self.raw) };
    }
}

#[cold]
fn unknown(id: QpId) -> ! {
    panic!("{id:?} names no queue pair of this completion queue")
}
