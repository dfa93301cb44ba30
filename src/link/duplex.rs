//! A link both ways: messages into slots that the receiver opened, and control messages of 64 bytes, in order. For layers whose ranks exchange
//! [`Address`]es through a store. Used by the thread that drives the link.
//!
//! How the receiver's memory becomes known to the sender is for the layer above, in a control message of its own: a [`Target`] has all that a sender
//! needs. A slot is open for one message, which is striped over all rails, or stands open for any number, which then come in order on one queue pair.

mod control;
mod slots;

use std::collections::VecDeque;
use std::os::fd::RawFd;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::stats::{CommCounter, CommStats, Wait};
use crate::fabric::{Completion, Endpoint, PostError};

use super::address::{Address, Local};
use super::incoming::{Imm, RECORDS_SIZE, Records};
use super::limits::{CONTROL_SIZE, CONTROLS, IMM_LIMIT, MAX_MESSAGE, MAX_RAILS};
use super::liveness::Liveness;
use super::plan::Plan;
use super::queue_pairs::{BATCH, QueuePairs, RailDevice, Side};
use super::sends::{self, Message, stripe_completed};
use super::wr_id::{RequestId, WrId, WrKind};
use super::{CELLS_SIZE, Cells, Connection, Failure, Link, Posted, too_long};

use control::{CONTROL_SLOT, ControlRing, NO_REQUEST};
use slots::{Received, Slots};

/// Nanoseconds between two looks at queue pairs that are connecting.
const CONNECT_NS: u64 = 50_000_000;
/// Where the cells begin in the memory that the peer writes to: behind the control messages.
const CELLS: usize = RECORDS_SIZE + CONTROLS * CONTROL_SIZE;

/// What a receiver tells a sender of a slot, and of the memory behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Which slot, and which use of it: see [`Duplex::open`].
    pub sequence: u64,
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The keys, rail by rail.
    pub rkeys: [u32; MAX_RAILS],
}

/// Something that has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The peer has all of a message: its memory is free again.
    Sent(RequestId),
    /// A message is in the memory of a slot.
    Received {
        /// What [`Duplex::open`] gave.
        sequence: u64,
        /// Its bytes; of one into a slot that stands open, the sender's value.
        value: u64,
    },
    /// The peer's next control message.
    Control([u8; CONTROL_SIZE]),
}

/// One end that has not been told of the other.
pub struct Unconnected {
    qps: QueuePairs,
    records: Records,
    stats: CommStats,
    local: Local,
    fabric: String,
    device: String,
    qps_per_rail: usize,
    /// It goes on without a rail, if its peer does.
    failover: bool,
}

impl Unconnected {
    /// On these devices, one per rail, which together are called `device`. `notify` if it is to be armed.
    pub fn new(devices: &[RailDevice], fabric: &str, device: &str, config: &Config, stats: CommStats, notify: bool) -> Result<Unconnected> {
        let failover = config.failover && devices.len() > 1;
        let records = Records::with_more(CONTROLS * CONTROL_SIZE + if failover { CELLS_SIZE } else { 0 })?;
        let qps_per_rail = config.qps_per_rail as usize;
        let qps = QueuePairs::new(devices, qps_per_rail, Side::Both, records.pages(), config.traffic_class, notify)?;
        let (fabric, device) = (fabric.to_owned(), device.to_owned());
        Ok(Unconnected { qps, records, stats, local: Local::new(), fabric, device, qps_per_rail, failover })
    }

    /// Counters.
    pub fn stats(&self) -> &CommStats {
        &self.stats
    }

    /// What the other end has to be told.
    pub fn address(&mut self) -> Address {
        Address {
            local: self.local.clone(),
            fabric: self.fabric.clone(),
            device: self.device.clone(),
            memory: self.records.pages().addr() as u64,
            qps_per_rail: self.qps_per_rail,
            failover: self.failover,
            rkeys: self.qps.inbox_keys(),
            endpoints: self.qps.endpoints(),
        }
    }

    /// Connects to the end with this address; `what` is "pair 3 of mesh 0 on eth0 to" or the like. Work may be posted at once where the fabric keeps it
    /// until the peer has connected, too; else once the peer has said so by other means.
    ///
    /// Errors: an end on another fabric; queue pairs that cannot be connected.
    pub fn connect(mut self, remote: &Address, what: &str, config: &Config) -> Result<Duplex> {
        let peer = remote.peer(&self.local);
        if remote.fabric != self.fabric {
            let (theirs, ours) = (&remote.fabric, &self.fabric);
            return Err(Error::usage(format!(
                "{} is on fabric {theirs}, this side on {ours}; set RAILHEAD_FABRIC alike on all ranks",
                peer.label
            )));
        }
        let rails = self.qps.rails().min(remote.rkeys.len());
        let qps_per_rail = self.qps_per_rail.min(remote.qps_per_rail);
        let cells = (self.failover && remote.failover && rails > 1).then(|| {
            // Endpoints are unique, so each end comes to the same.
            let connects = self.qps.endpoints().first().map(|it| it.0) < remote.endpoints.first().map(|it| it.0);
            Cells::new(self.records.pages(), CELLS, CELLS, connects)
        });
        self.qps.shrink(rails, qps_per_rail);
        let of_rails = remote.endpoints.chunks(remote.qps_per_rail.max(1)).take(rails);
        let used: Vec<Endpoint> = of_rails.flat_map(|of_rail| of_rail.iter().take(qps_per_rail).copied()).collect();
        self.qps.connect(&used, remote.memory, &remote.rkeys)?;
        self.stats.set_peer(&peer.label, remote.local.pid as i32);
        let liveness = Liveness::new(None, None, &peer, config);
        let connection = Connection { qps: self.qps, memory: self.records, peer, liveness, stats: self.stats, cells };
        let (mut link, records) = Link::new(connection, Side::Both, what, config);
        link.waits_over();
        for qp in 0..link.qps.len() {
            for _ in 0..Side::Both.recv_depth() {
                link.qps.post_recv(qp).map_err(|e| Error::internal(format!("connect: posting receives: {e}")))?;
            }
        }
        let ends = Ends {
            records,
            slots: Slots::default(),
            controls: ControlRing::new(link.has_failover()),
            events: VecDeque::with_capacity(BATCH * MAX_RAILS * 4),
        };
        Ok(Duplex { link, ends, split_min: config.split_min as usize, connecting: false })
    }
}

/// A connected link both ways.
pub struct Duplex {
    link: Link,
    ends: Ends,
    split_min: usize,
    /// Somebody waits for it to be connected.
    connecting: bool,
}

/// What is known of both directions.
struct Ends {
    records: Records,
    slots: Slots,
    controls: ControlRing,
    /// Not yet taken: as many as one poll finds.
    events: VecDeque<Event>,
}

impl Duplex {
    /// Errors: the link has failed.
    #[inline]
    pub fn check(&mut self) -> Result<()> {
        self.link.check()
    }

    /// Whether its queue pairs are connected, and what is said goes out at once: a layer above may leave the link alone after that. Its polls connect them.
    ///
    /// Errors: they cannot; the peer is gone.
    pub fn poll_connected(&mut self) -> Result<bool> {
        self.link.check()?;
        self.connecting = !(self.link.qps.poll_connected()? && self.link.qps.know_receives());
        match self.connecting {
            true => self.link.wait_to_connect()?,
            false => {
                self.link.waits_over();
                self.link.reset_silence();
            }
        }
        Ok(!self.connecting)
    }

    /// The peer has said that it takes nothing more, so its queue pairs may go at any time: from now on there is no room for whatever would be sent.
    pub fn set_peer_left(&mut self) {
        self.link.set_peer_left();
    }

    /// Whether anything is sent at all: not once the peer has left, nor where the link has failed or is about to.
    pub fn can_post(&self) -> bool {
        self.link.can_post()
    }

    /// How many queue pairs it has. Only what goes on one of them is ordered.
    pub fn queue_pairs(&self) -> usize {
        self.link.qps.len()
    }

    /// Whether work may be posted before the peer has connected.
    pub fn keeps_early_requests(&self) -> bool {
        self.link.qps.keeps_early_requests
    }

    /// Opens a slot for one message of at most `room` bytes: its sequence number, for the sender. `None`: all 255 are open.
    pub fn open(&mut self, room: u64) -> Option<u64> {
        self.ends.slots.open(room)
    }

    /// How many slots can be opened.
    pub fn free_slots(&self) -> usize {
        self.ends.slots.free()
    }

    /// Opens a slot for any number of [`Duplex::notify`]s.
    pub fn open_standing(&mut self) -> Option<u64> {
        self.ends.slots.open_standing()
    }

    /// Closes a slot. The peer must have said that it writes there no more.
    pub fn close(&mut self, sequence: u64) {
        self.ends.slots.close(sequence);
    }

    /// Sends `len` bytes at `addr`, of memory with these keys, to a slot that is open for one message. `None`: no room now; poll and call again. The memory is the link's until
    /// [`Event::Sent`].
    ///
    /// Errors: more than 1 GiB, or than the target has room for; the link has failed.
    pub fn write(&mut self, to: &Target, addr: usize, len: usize, lkeys: &[u32; MAX_RAILS]) -> Result<Option<RequestId>> {
        self.link.check()?;
        fits(to, len)?;
        if !self.link.can_post() {
            return Ok(None);
        }
        let link = &mut self.link;
        let message = Message { sequence: to.sequence, remote_addr: to.addr, rkeys: &to.rkeys, addr, keys: Some(lkeys), id: NO_REQUEST };
        if let Some(qp) = link.qps.qp_for_fast_path(len, self.split_min) {
            let Some(id) = link.requests.insert(sends::request(len, 1, to.sequence)) else { return Ok(None) };
            let message = Message { id, ..message };
            let data = message.write(&link.qps, qp, 0, len, Imm::Whole(len as u32));
            link.remember(&message, Plan::whole(len));
            let posted = link.qps.post_send(qp, [data], WrKind::Data, id, true);
            link.qps.next_qp();
            let posted = link.posted(qp, Posted::Stripe(id, 0), posted);
            return self.posted(id, posted.map_err(|error| (qp, error)));
        }
        let plan = link.qps.plan(len, self.split_min);
        if !link.qps.has_room(plan) || !link.requests.has_room() {
            link.qps.unplan(plan);
            return Ok(None);
        }
        let Some(id) = link.requests.insert(sends::request(len, plan.stripes, to.sequence)) else { return Ok(None) };
        let posted = Message { id, ..message }.post(&mut self.link, plan);
        self.posted(id, posted)
    }

    /// Sends `len` bytes at `addr` to a slot that stands open, `offset` bytes behind the target's first, with a value below 2^23. Ordered among
    /// themselves and with control messages.
    ///
    /// Errors: as for [`Duplex::write`].
    pub fn notify(
        &mut self,
        to: &Target,
        offset: u64,
        value: u32,
        addr: usize,
        len: usize,
        lkeys: &[u32; MAX_RAILS],
    ) -> Result<Option<RequestId>> {
        self.link.check()?;
        if value as usize >= IMM_LIMIT {
            return Err(Error::usage(format!("a notification's value of {value}; at most {} may be", IMM_LIMIT - 1)));
        }
        let Some(rest) = to.len.checked_sub(offset) else { return Err(outside(to, offset)) };
        fits(&Target { len: rest, ..*to }, len)?;
        if !self.link.can_post() || self.link.room_in_order() < sends::MOST_ENTRIES {
            return Ok(None);
        }
        let Some(id) = self.link.requests.insert(sends::request(len, 1, to.sequence)) else { return Ok(None) };
        let remote_addr = to.addr.wrapping_add(offset);
        let message = Message { sequence: to.sequence, remote_addr, rkeys: &to.rkeys, addr, keys: Some(lkeys), id };
        let posted = message.post_in_order(&mut self.link, len, value);
        self.posted(id, posted)
    }

    fn posted(&mut self, id: RequestId, posted: std::result::Result<(), (usize, PostError)>) -> Result<Option<RequestId>> {
        match posted {
            Ok(()) => Ok(Some(id)),
            Err((qp, error)) => {
                self.link.post_failed(WrKind::Data, qp, error);
                // Until the link fails, it is as on a queue pair that flushes what is posted: stripes of it may be under way.
                self.link.check().inspect_err(|_| self.link.requests.withdraw(id)).map(|()| Some(id))
            }
        }
    }

    /// Sends a control message. False: no place now; poll and call again.
    ///
    /// Errors: the link has failed.
    pub fn send_control(&mut self, bytes: &[u8; CONTROL_SIZE]) -> Result<bool> {
        self.link.check()?;
        let sent = self.link.can_post() && self.ends.controls.send(&mut self.link, bytes);
        self.link.check().map(|()| sent)
    }

    /// The same, for the last one: [`Duplex::last_control_is_through`] tells when the peer's device has it and all before.
    ///
    /// Errors: as for [`Duplex::send_control`].
    pub fn send_last_control(&mut self, bytes: &[u8; CONTROL_SIZE]) -> Result<bool> {
        self.link.check()?;
        let sent = self.link.can_post() && self.ends.controls.send_last(&mut self.link, bytes);
        self.link.check().map(|()| sent)
    }

    /// Whether the last control message is through, or will never be.
    pub fn last_control_is_through(&mut self) -> bool {
        !self.ends.controls.last_is_under_way() || self.link.has_failed()
    }

    /// Counters, of which operations and their completions are for the layer above to count.
    #[inline]
    pub fn stats(&self) -> &CommStats {
        &self.link.stats
    }

    /// So many bytes of a control message, to the peer or from it, were a message's.
    #[inline]
    pub fn carried(&self, len: usize) {
        self.link.stats.add(CommCounter::Bytes, (len as u64).wrapping_neg());
    }

    /// Polls; whether there was any completion, be it of what has failed. [`Duplex::next_event`] tells what happened, all of which is to be taken before
    /// the next poll. A poll that finds nothing is a wait for `waits_for`.
    pub fn poll(&mut self, waits_for: impl Into<Wait>) -> bool {
        let Duplex { link, ends, .. } = self;
        let found = link.poll_completions(|link, wr, completion| ends.completed(link, wr, completion))
            | (link.rails_are_active() && ends.go_on(link));
        if !found {
            // Which of its waits are too long is for the layer above to know.
            let _ = link.found_nothing(waits_for);
        }
        if self.link.can_post() {
            self.ends.controls.return_credit(&mut self.link);
        }
        found
    }

    /// Whether somebody waits for the peer, besides those who wait until its queue pairs are connected; to be said before a poll. The silence of one that
    /// nobody waits for means nothing.
    #[inline]
    pub fn set_waited_for(&mut self, waited: bool) {
        self.link.set_waited_for(waited || self.connecting);
    }

    /// Somebody begins to wait: the peer's silence until now is not held against it.
    #[inline]
    pub fn reset_silence(&mut self) {
        self.link.reset_silence();
    }

    /// Nobody waits for the peer any more: the stats page says so.
    pub fn waits_over(&mut self) {
        self.link.waits_over();
    }

    /// The next thing that happened.
    pub fn next_event(&mut self) -> Option<Event> {
        self.ends.events.pop_front()
    }

    /// Asks for notifications, and names the descriptors to sleep on. The caller then polls once more, and sleeps if nothing moved and
    /// [`Duplex::needs_repoll`] is false. If something is waited for, it looks whether the peer is there. `Some`: who sleeps has to do that again after so
    /// many nanoseconds, as nothing would wake him.
    ///
    /// Errors: a link made without `notify`; no memory left for it.
    pub fn arm(&mut self, waits_for: Option<Wait>, mut watch: impl FnMut(RawFd)) -> Result<Option<u64>> {
        let look = match waits_for {
            Some(wait) => self.link.look(wait, &mut watch),
            None => {
                self.link.waits_over();
                None
            }
        };
        // Nothing wakes who waits for the time to dial again, or for news of a rail.
        let connecting = self.link.qps.are_connecting().then_some(CONNECT_NS);
        let rails = self.link.look_at_rails();
        self.link.qps.arm(watch).map(|()| connecting.into_iter().chain(look).chain(rails).min())
    }

    /// Whether it has to be polled again before anybody sleeps.
    pub fn needs_repoll(&mut self) -> bool {
        self.link.qps.needs_repoll() || self.link.has_fault()
    }

    /// Whether the peer maps memory of [`Device::shared_scratch`](super::device::Device::shared_scratch).
    pub fn maps_memory(&mut self) -> bool {
        self.link.qps.maps_memory()
    }

    /// Nothing is sent or received any more. Whether dropping it would wait for the peer, which may be in the middle of a write to this process's memory: a
    /// process that is stopped may be so for ever.
    pub fn drop_waits(&mut self) -> bool {
        self.link.qps.drop_waits()
    }

    /// Fails it, for instance because the peer broke the protocol of the layer above.
    pub fn fail(&mut self, failure: Failure) {
        self.link.fail(failure);
    }
}

fn fits(to: &Target, len: usize) -> Result<()> {
    if len > MAX_MESSAGE {
        return Err(too_long("send", len));
    }
    if len as u64 > to.len || to.addr.checked_add(to.len).is_none() {
        return Err(Error::usage(format!("send: {len} bytes into {} bytes of the peer's memory at {:#x}", to.len, to.addr)));
    }
    Ok(())
}

#[cold]
fn outside(to: &Target, offset: u64) -> Error {
    Error::usage(format!("send: to offset {offset} of {} bytes of the peer's memory", to.len))
}

impl Ends {
    /// A rail has failed: tells of what had landed, and sends again what is ordered and had not. Whether there is something new.
    #[cold]
    fn go_on(&mut self, link: &mut Link) -> bool {
        let events = self.events.len();
        while let Some(id) = link.next_landed() {
            self.sent(link, id);
            self.controls.completed(id);
        }
        while link.can_post()
            && let Some(what) = link.next_lost_in_order()
        {
            match what {
                Posted::Notification(id, value) => {
                    if let Err((qp, error)) = link.notify_again(id, value) {
                        link.post_failed(WrKind::Data, qp, error);
                    }
                }
                Posted::Control(id, number, _) => self.controls.send_again(link, number, id),
                // Goes over any rail.
                Posted::Stripe(..) => {}
            }
        }
        self.events.len() > events
    }

    /// The peer has a message, or a part of it.
    #[inline]
    fn sent(&mut self, link: &mut Link, id: RequestId) {
        if let Ok(Some(_)) = link.requests.finish(id) {
            self.events.push_back(Event::Sent(id));
        }
    }

    #[inline]
    fn completed(&mut self, link: &mut Link, wr: &WrId, completion: &Completion) {
        match wr.kind {
            WrKind::Recv => self.received(link, wr, completion),
            WrKind::Data => {
                stripe_completed(link, wr, completion);
                self.sent(link, wr.id);
            }
            WrKind::Control => self.controls.completed(wr.id),
            WrKind::Cts | WrKind::Flush | WrKind::Probe | WrKind::Rail => {}
        }
    }

    /// An immediate has come, which consumed a receive.
    fn received(&mut self, link: &mut Link, wr: &WrId, completion: &Completion) {
        let qp = usize::from(wr.qp);
        match link.qps.post_recv(qp) {
            // A queue pair that has failed since says so itself, after what arrived before.
            Ok(()) | Err(PostError::State(_)) => {}
            Err(error) => return link.post_failed(WrKind::Recv, qp, error),
        }
        let Some(imm) = completion.imm else { return link.protocol_error(format_args!("a message without an immediate")) };
        match Imm::decode(imm) {
            (CONTROL_SLOT, Imm::Whole(value)) => {
                let control = self.controls.received(link, &self.records, value);
                self.events.extend(control.map(Event::Control));
            }
            (number, meaning) => {
                if let Imm::Stripe(_) = meaning {
                    link.record_received();
                }
                match self.slots.received(&self.records, number, meaning) {
                    Ok(message) => self.events.extend(message.map(|Received { sequence, value }| Event::Received { sequence, value })),
                    Err(what) => link.protocol_error(format_args!("{what} for slot {number}")),
                }
            }
        }
    }
}

#[cfg(any(test, feature = "sim"))]
impl Duplex {
    /// The link below.
    pub fn link_for_test(&mut self) -> &mut Link {
        &mut self.link
    }
}

#[cfg(test)]
impl Duplex {
    /// Has the fabric take what has come, without a look at what that is.
    pub fn serve_for_test(&mut self) {
        self.link.qps.poll_connected().unwrap();
    }
}

#[cfg(test)]
mod tests;
