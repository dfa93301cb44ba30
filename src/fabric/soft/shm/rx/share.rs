//! The responder's half of copies that both sides make (`grant.rs`): looks ahead over the WRITEs that wait, offers their copies to the
//! requester, and makes its own part of them. Driven by the thread that drives the queue pair.

use super::super::grant::{Part, Progress};
use super::*;

/// Shortest WRITE that is shared; below it the second core gains nothing.
const SHARE_MIN: u32 = 16 * 1024;

impl Rx {
    /// Whether the copy of the descriptor at the head is, or may be, shared.
    #[inline]
    pub(super) fn shares(&self, request: &Request) -> bool {
        self.offers.has(self.head) || (self.head >= self.shared_from && request.len >= SHARE_MIN && self.at == 0 && !self.filling)
    }

    /// Moves one part of the copies under way, or accepts the descriptor at the head.
    pub(super) fn share(&mut self, first: &Request, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        if self.unread.is_some() && self.offers.refuse() {
            return Ok(Outcome::Waits);
        }
        if let Some(refused) = self.unread.take() {
            // From its first byte: which bytes of it are in place already is not worth knowing.
            self.take_back();
            self.ask_for_fill(segment, refused);
            return Ok(Outcome::Waits);
        }
        if self.offers.next(self.head) - self.head < GRANTS as u64 {
            self.offer(wq, segment);
        }
        let upto = self.offers.next(self.head);
        if upto == self.head {
            // Whatever is wrong with it is found there.
            return self.write_alone(first, wq, segment);
        }
        let request = self.offered[self.head as usize % GRANTS];
        if request.completes() && !wq.recv_available() {
            return self.not_ready(wq, segment);
        }
        for desc in self.head..upto {
            match self.offers.progress(desc) {
                Progress::Waits => {}
                Progress::Done(granted) if desc == self.head => {
                    self.stats.add(RailCounter::RxCma, u64::from(granted));
                    self.offers.end(desc);
                    self.written(request.flags, request.len, request.imm, wq);
                    return Ok(Outcome::Done);
                }
                Progress::Done(_) => {}
                Progress::Part(part) => return self.read_part(desc, part, wq, segment),
                Progress::Withdrawn => {
                    // A peer that is stopped in the middle of a part must not hold up this thread's other work.
                    if self.offers.refuse() {
                        return Ok(Outcome::Waits);
                    }
                    // No descriptor is offered twice.
                    self.shared_from = upto;
                    self.take_back();
                    return self.write_alone(first, wq, segment);
                }
                Progress::Nonsense => {
                    return Err(self.refuse(segment, WcStatus::RemInvReqErr, "the peer spoilt the record of a shared copy"));
                }
            }
        }
        Ok(Outcome::Waits)
    }

    /// Grants what waits, in order, up to the first descriptor that cannot be shared.
    fn offer(&mut self, wq: &mut WorkQueues, segment: &Segment) {
        if !segment.peer_pulls() {
            return;
        }
        let mut number = self.offers.next(self.head);
        // WRITEs that need a receive request wait for it with nothing moved.
        let mut receives =
            wq.recvs().saturating_sub((self.head..number).filter(|&d| self.offered[d as usize % GRANTS].completes()).count() as u64);
        let mut waiting = number - self.head;
        while waiting < GRANTS as u64 && self.look(segment, self.head + waiting).is_some() {
            waiting += 1;
        }
        while let Some(request) = self.look(segment, number) {
            let completes = request.completes();
            if request.op != op::WRITE
                || request.place != place::PRIVATE
                || request.len < SHARE_MIN
                || (completes && receives == 0)
                || !self.offers.fits(self.head, request.addr, request.len)
            {
                break;
            }
            let Ok(_pin) = wq.pin_remote(request.rkey, request.addr, request.len as usize, Access::REMOTE_WRITE) else { break };
            self.offered[number as usize % GRANTS] = request;
            self.read[number as usize % GRANTS] = 0;
            self.offers.offer(self.head, request.rkey, request.addr, request.len, waiting);
            receives -= u64::from(completes);
            number += 1;
        }
    }

    /// Takes every offer back. What was read for them will be moved, and counted, again.
    #[cold]
    fn take_back(&mut self) {
        let offered = self.head..self.offers.next(self.head);
        let read: u64 = offered.map(|desc| u64::from(self.read[desc as usize % GRANTS])).sum();
        self.stats.take(RailCounter::RxCma, read);
        self.offers.withdraw();
    }

    /// Reads a part that is this side's.
    fn read_part(&mut self, desc: u64, part: Part, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        let request = self.offered[desc as usize % GRANTS];
        let addr = request.addr.wrapping_add(u64::from(part.offset));
        let pin = match wq.pin_remote(request.rkey, addr, part.len as usize, Access::REMOTE_WRITE) {
            Ok(pin) => pin,
            Err(status) => {
                let why = format!("memory at {addr:#x} with key {:#x} was deregistered while the peer wrote to it", request.rkey);
                return Err(self.refuse(segment, status, why));
            }
        };
        self.stats.add(RailCounter::Syscalls, 1);
        // SAFETY: the pin covers the part.
        match unsafe { segment.read_peer(request.payload[0].wrapping_add(u64::from(part.offset)), pin.as_ptr(), pin.len()) } {
            Ok(n) if n == pin.len() => {
                self.stats.add(RailCounter::RxCma, n as u64);
                self.read[desc as usize % GRANTS] += n as u32;
                self.trust(segment)?;
                stage::reach(Stage::RecvHalf);
                Ok(Outcome::Partly)
            }
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Err(Fault::oldest(WcStatus::RetryExcErr, "the peer process is gone")),
            refused => {
                self.unread = Some(refused);
                Ok(Outcome::Waits)
            }
        }
    }

    /// Writes the descriptor at the head without help.
    #[cold]
    fn write_alone(&mut self, request: &Request, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        self.shared_from = self.shared_from.max(self.head + 1);
        let mut none = Maps::none();
        self.write(request, wq, segment, &mut none)
    }
}
