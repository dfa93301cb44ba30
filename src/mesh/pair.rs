//! One rank as seen by another: a link both ways, and the sends and receives that wait for it. Under the lock of the mesh, on whichever thread drives it.
//!
//! A receive is announced to its sender; a send waits for an announcement with its tag. Both are matched in the order in which they were asked for,
//! tag by tag.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use crate::base::error::{Error, Result};
use crate::base::stats::WaitCause;
use crate::link::Failure;
use crate::link::duplex::{Duplex, Event, Target};
use crate::link::limits::{MAX_MESSAGE, MAX_RAILS, MAX_REQUESTS, SAY_SIZE, SLOTS};

use super::ops::{OpId, Ops};
use super::protocol::{Announcement, Said};

/// Part of registered memory.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// First byte.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
    /// Its keys, rail by rail.
    pub lkeys: [u32; MAX_RAILS],
}

/// What a receive tells its sender of the memory.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// First byte.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
    /// Its keys, rail by rail.
    pub rkeys: [u32; MAX_RAILS],
}

/// A peer.
pub struct Pair {
    link: Duplex,
    rank: usize,
    /// Sends that no announcement has come for, or no room.
    sends: VecDeque<(OpId, u64, Part)>,
    /// Announcements that no send has come for.
    targets: VecDeque<(u64, Target)>,
    /// Receives that wait for a slot.
    recvs: VecDeque<(OpId, u64, Place)>,
    /// Announcements that wait for a place in the peer's ring.
    says: VecDeque<[u8; SAY_SIZE]>,
    /// By slot: which receive it is of, its tag and bytes.
    open: Box<[Option<(OpId, u64, usize)>; SLOTS]>,
    /// By the index of a request: which send it is of, and its bytes.
    sent: Box<[Option<(OpId, usize)>; MAX_REQUESTS]>,
    /// Sends and receives that are not done.
    outstanding: usize,
}

impl Pair {
    /// From a link to the rank.
    pub fn new(link: Duplex, rank: usize) -> Pair {
        Pair {
            link,
            rank,
            sends: VecDeque::new(),
            targets: VecDeque::with_capacity(SLOTS),
            recvs: VecDeque::new(),
            says: VecDeque::new(),
            open: Box::new([None; SLOTS]),
            sent: Box::new([None; MAX_REQUESTS]),
            outstanding: 0,
        }
    }

    /// Whether its queue pairs are connected.
    pub fn poll_connected(&mut self) -> Result<bool> {
        self.link.poll_connected()
    }

    /// Sends, as soon as the peer receives.
    ///
    /// Errors: more than a message may have; a peer that is gone.
    pub fn send(&mut self, op: OpId, tag: u64, part: Part) -> Result<()> {
        if part.len > MAX_MESSAGE {
            return Err(Error::usage(format!("send: {} bytes; a message has at most {MAX_MESSAGE}", part.len)));
        }
        self.outstanding += 1;
        self.sends.push_back((op, tag, part));
        self.post_sends()
    }

    /// Receives.
    ///
    /// Errors: a peer that is gone.
    pub fn recv(&mut self, op: OpId, tag: u64, place: Place) -> Result<()> {
        self.outstanding += 1;
        self.recvs.push_back((op, tag, place));
        self.announce()
    }

    /// Moves everything along; whether something has moved.
    ///
    /// Errors: a peer that is gone or misbehaves; a send that its receive has no room for.
    pub fn poll(&mut self, ops: &mut Ops) -> Result<bool> {
        if self.outstanding == 0 {
            self.link.nobody_waits();
        }
        let moved = self.link.poll(WaitCause::PeerNoSend);
        let mut gone = false;
        while let Some(event) = self.link.next_event() {
            match event {
                Event::Sent(id) => {
                    let place = self.sent.get_mut((id.0 & 0xff) as usize);
                    if let Some((op, len)) = place.and_then(Option::take) {
                        self.outstanding -= 1;
                        ops.complete(op, self.rank, len as u64);
                    }
                }
                Event::Received { sequence, value } => {
                    let place = self.open.get_mut((sequence % SLOTS as u64) as usize);
                    if let Some((op, tag, len)) = place.and_then(Option::take) {
                        if value != len as u64 {
                            return Err(Error::usage(format!("it sent {value} bytes, tag {tag:#x}: this rank receives {len}")));
                        }
                        self.outstanding -= 1;
                        ops.complete(op, self.rank, value);
                    }
                }
                Event::Said(bytes) => match Said::decode(&bytes) {
                    Ok(Said::Bye) => gone = true,
                    Ok(_) if self.targets.len() >= SLOTS => self.misbehaves("more receives than it has slots"),
                    Ok(Said::Announcement(Announcement { tag, target })) => self.targets.push_back((tag, target)),
                    Err(what) => self.misbehaves(&what),
                },
            }
        }
        if gone {
            return Err(Error::remote("it has closed its mesh"));
        }
        if moved {
            self.announce()?;
            self.post_sends()?;
        }
        self.link.check().map(|()| moved)
    }

    #[cold]
    fn misbehaves(&mut self, what: &str) {
        self.link.fail(Failure::remote(format!("the peer sent {what}")));
    }

    /// Tells the peer that this rank goes, if there is a place for it: a peer that waits for it learns why.
    pub fn say_bye(&mut self) {
        if matches!(self.link.say(&Said::Bye.encode()), Ok(true)) {
            self.link.poll(WaitCause::PeerNoSend);
        }
    }

    /// Asks to be woken.
    pub fn arm(&mut self, watch: impl FnMut(RawFd)) -> Result<()> {
        self.link.arm(WaitCause::PeerNoSend, watch)
    }

    /// Whether it has to be polled again before anybody sleeps.
    pub fn needs_repoll(&mut self) -> bool {
        self.link.needs_repoll()
    }

    /// Announces the receives for which there are slots.
    fn announce(&mut self) -> Result<()> {
        while let Some(&(op, tag, place)) = self.recvs.front() {
            let Some(sequence) = self.link.open(place.len as u64) else { break };
            self.recvs.pop_front();
            if let Some(open) = self.open.get_mut((sequence % SLOTS as u64) as usize) {
                *open = Some((op, tag, place.len));
            }
            let target = Target { sequence, addr: place.addr as u64, len: place.len as u64, rkeys: place.rkeys };
            self.says.push_back(Said::Announcement(Announcement { tag, target }).encode());
        }
        while let Some(bytes) = self.says.front() {
            if !self.link.say(bytes)? {
                break;
            }
            self.says.pop_front();
        }
        Ok(())
    }

    /// Posts the sends for which there are announcements and room.
    fn post_sends(&mut self) -> Result<()> {
        let mut at = 0;
        while let Some(&(op, tag, part)) = self.sends.get(at) {
            // Of one tag, the first is matched first: one that found nothing leaves nothing for those behind it.
            let Some(found) = self.targets.iter().position(|(of, _)| *of == tag) else {
                at += 1;
                continue;
            };
            let Some(&(_, target)) = self.targets.get(found) else { break };
            if part.len as u64 != target.len {
                return Err(Error::usage(format!("it receives {} bytes, tag {tag:#x}: this rank sends {}", target.len, part.len)));
            }
            let Some(id) = self.link.write(&target, part.addr, part.len, &part.lkeys)? else { break };
            self.targets.remove(found);
            self.sends.remove(at);
            if let Some(place) = self.sent.get_mut((id.0 & 0xff) as usize) {
                *place = Some((op, part.len));
            }
        }
        Ok(())
    }
}
