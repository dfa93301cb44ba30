//! The responder's half of copies that both sides make (`grant.rs`): looks ahead over the WRITEs that wait, opens a grant for each, and reads
//! the parts that the requester has not claimed. Driven by the thread that drives the queue pair.

use super::super::grant::{CopyPart, CopyProgress};
use super::*;

/// Shortest WRITE that gets a grant; below it a second core gains nothing.
const GRANT_MIN: u32 = 16 * 1024;

impl Responder {
    /// Whether the descriptor at the head has a grant, or may get one.
    #[inline]
    pub(super) fn may_grant(&self, desc: &DescCopy) -> bool {
        self.grants.is_open(self.head) || (self.head >= self.grants_from && desc.len >= GRANT_MIN && self.at == 0 && !self.filling)
    }

    /// Reads one part of the granted copies. `Done` once both sides have copied all of the descriptor at the head, which `first` is a copy of.
    pub(super) fn copy_granted(&mut self, first: &DescCopy, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        if self.read_error.is_some() && self.grants.stop() {
            return Ok(Outcome::Blocked);
        }
        if let Some(refused) = self.read_error.take() {
            // All of it goes through the fill stream: which bytes are in place already is not worth knowing.
            self.withdraw_grants();
            return Ok(self.refused(segment, refused));
        }
        if self.grants.next(self.head) - self.head < GRANTS as u64 {
            self.open_grants(wq, segment);
        }
        let upto = self.grants.next(self.head);
        if upto == self.head {
            // It may get no grant. If something is wrong with it, `write_alone` finds out what.
            return self.write_alone(first, wq, segment);
        }
        let desc = self.granted[self.head as usize % GRANTS];
        if desc.completes() && !wq.recv_available() {
            return self.rnr_wait(wq, segment);
        }
        for number in self.head..upto {
            match self.grants.poll(number) {
                CopyProgress::Waits => {}
                CopyProgress::Done(granted) if number == self.head => {
                    self.stats.add(RailCounter::RxCma, u64::from(granted));
                    self.grants.close(number);
                    self.write_done(desc.flags, desc.len, desc.imm, wq);
                    return Ok(Outcome::Done);
                }
                CopyProgress::Done(_) => {}
                CopyProgress::Part(part) => return self.read_part(number, part, wq, segment),
                CopyProgress::Withdrawn => {
                    // `withdraw` would wait for a peer that is writing a part. It may be stopped, and this thread has other work.
                    if self.grants.stop() {
                        return Ok(Outcome::Blocked);
                    }
                    // No descriptor gets a second grant.
                    self.grants_from = upto;
                    self.withdraw_grants();
                    return self.write_alone(first, wq, segment);
                }
                CopyProgress::ProtocolError => {
                    return Err(self.nak(segment, WcStatus::RemInvReqErr, "the peer stored impossible values in a grant"));
                }
            }
        }
        Ok(Outcome::Blocked)
    }

    /// Opens grants for the descriptors that wait, in order, up to the first one that cannot get one.
    fn open_grants(&mut self, wq: &mut WorkQueues, segment: &Segment) {
        if !segment.peer_can_read() {
            return;
        }
        let mut number = self.grants.next(self.head);
        // A WRITE that finds no receive request waits for it with nothing moved, so it gets no grant.
        let mut receives =
            wq.recvs().saturating_sub((self.head..number).filter(|&n| self.granted[n as usize % GRANTS].completes()).count() as u64);
        let published = (self.head..self.head + GRANTS as u64).map_while(|n| self.peek(segment, n));
        let waiting = published.filter(|desc| desc.source != source::INLINE).count() as u64;
        while let Some(desc) = self.peek(segment, number) {
            let completes = desc.completes();
            if desc.op != op::WRITE || (completes && receives == 0) || number - self.head == GRANTS as u64 {
                break;
            }
            // A stripe goes behind an inline record of it.
            let is_inline = desc.source == source::INLINE;
            let may_be_granted =
                desc.source == source::PRIVATE && desc.len >= GRANT_MIN && self.grants.fits(self.head, desc.addr, desc.len);
            if !is_inline && !may_be_granted {
                break;
            }
            let pin = (desc.len > 0).then(|| wq.pin_remote(desc.rkey, desc.addr, desc.len as usize, Access::REMOTE_WRITE)).transpose();
            let Ok(_pin) = pin else { break };
            if is_inline {
                self.grants.pass(self.head, desc.addr, desc.len);
            } else {
                self.grants.open(self.head, desc.rkey, desc.addr, desc.len, waiting);
            }
            self.granted[number as usize % GRANTS] = desc;
            self.read[number as usize % GRANTS] = 0;
            receives -= u64::from(completes);
            number += 1;
        }
    }

    /// Withdraws every grant. The bytes read under them are moved, and counted, again.
    #[cold]
    fn withdraw_grants(&mut self) {
        let granted = self.head..self.grants.next(self.head);
        let read: u64 = granted.map(|number| u64::from(self.read[number as usize % GRANTS])).sum();
        self.stats.take(RailCounter::RxCma, read);
        self.grants.withdraw();
    }

    /// Reads a part that this side has claimed.
    fn read_part(&mut self, number: u64, part: CopyPart, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        let desc = self.granted[number as usize % GRANTS];
        let addr = desc.addr.wrapping_add(u64::from(part.offset));
        let pin = match wq.pin_remote(desc.rkey, addr, part.len as usize, Access::REMOTE_WRITE) {
            Ok(pin) => pin,
            Err(status) => {
                let why = format!("memory at {addr:#x} with key {:#x} was deregistered while the peer wrote to it", desc.rkey);
                return Err(self.nak(segment, status, why));
            }
        };
        self.stats.add(RailCounter::Syscalls, 1);
        // SAFETY: the pin covers the part.
        match unsafe { segment.read_peer(desc.payload[0].wrapping_add(u64::from(part.offset)), pin.as_ptr(), pin.len()) } {
            Ok(n) if n == pin.len() => {
                self.stats.add(RailCounter::RxCma, n as u64);
                self.read[number as usize % GRANTS] += n as u32;
                self.check_source(segment)?;
                stage::reach(Stage::RecvHalf);
                Ok(Outcome::Partial)
            }
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Err(Fault::oldest(WcStatus::RetryExcErr, "the peer process is gone")),
            refused => {
                self.read_error = Some(refused);
                // The next call asks for it, without waiting for the peer.
                Ok(Outcome::Partial)
            }
        }
    }

    /// Executes the WRITE at the head without a grant.
    #[cold]
    fn write_alone(&mut self, desc: &DescCopy, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        self.grants_from = self.grants_from.max(self.head + 1);
        let mut none = PeerMappings::none();
        self.write(desc, wq, segment, &mut none)
    }
}
