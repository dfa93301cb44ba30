//! Steps receive operations: from the network to the ring. Called on the engine's thread; never waits, never allocates.
//!
//! netRecvProxy of nccl v2.7.8 src/transport/net.cc. The counters are `head` (published) <= `received` <= `tail` (posted) <= `end`:
//!
//! ```text
//! post      the consumer has freed the next slice:           irecv, tail += slice
//! receive   the request of the oldest slice is complete:     iflush where the memory needs it, received += slice
//! publish   its flush is complete, or it needs none:         ring.size = size, head += slice, ring.tail = head
//! ```
//!
//! `tail` is published for every protocol, not only for SIMPLE: a NIC writes the bytes of an LL line in order, a copy by the CPU need not, and a
//! consumer that waits for `tail` does not depend on it.

use super::args::{Args, Wait};
use super::connector::{Connector, Counters};
use super::net::Net;
use super::ring::layout::slot;
use super::ring::{Words, rules};
use crate::base::error::{Error, Result};
use crate::engine::Progress;

/// Makes what progress is possible.
pub fn progress<N: Net>(connector: &Connector<N>, args: &mut Args) -> Result<Progress> {
    if !args.started {
        args.start(connector.step());
    }
    args.wait = Wait::Nothing;
    let moved = post(connector, args)? | receive(connector, args)? | publish(connector, args)?;
    if args.head == args.end {
        connector.finish(args);
        return Ok(Progress::Done);
    }
    Ok(if moved { Progress::Moved } else { Progress::Idle })
}

fn post<N: Net>(connector: &Connector<N>, args: &mut Args) -> Result<bool> {
    let (words, protocol, slice) = (connector.ring().words(), args.steps.protocol, args.steps.slice);
    let (comm, mr) = connector.comm()?;
    let capacity = connector.capacity(args);
    let before = args.tail;
    let mut room = 0;
    while args.may_post() {
        if room < slice {
            room = rules::room(words.head(), args.position())?;
            if room < slice {
                args.wait = Wait::Consumer;
                break;
            }
        }
        let data = connector.buffer(protocol, args.tail, capacity);
        let Some(request) = connector.net().irecv(comm, data, connector.tag(), mr)? else {
            Counters::add(&connector.counters().retries, 1);
            args.wait = Wait::Posted;
            break;
        };
        args.requests[slot(args.tail)] = Some(request);
        args.tail = args.tail.wrapping_add(slice);
        room -= slice;
    }
    Ok(args.tail != before)
}

fn receive<N: Net>(connector: &Connector<N>, args: &mut Args) -> Result<bool> {
    let (protocol, slice) = (args.steps.protocol, args.steps.slice);
    let (comm, mr) = connector.comm()?;
    let capacity = connector.capacity(args);
    let before = args.received;
    while args.received != args.tail {
        let at = slot(args.received);
        let Some(bytes) = connector.net().test(&mut args.requests[at])? else {
            args.wait = Wait::Sender;
            break;
        };
        args.sizes[at] = match u32::try_from(bytes) {
            Ok(size) if bytes <= capacity => size,
            _ => return Err(oversized(bytes, capacity)),
        };
        if bytes > 0 && connector.flushes(protocol) {
            Counters::add(&connector.counters().flushes, 1);
            args.requests[at] = connector.net().iflush(comm, connector.buffer(protocol, args.received, bytes), mr)?;
        }
        Counters::add(&connector.counters().bytes, bytes as u64);
        args.received = args.received.wrapping_add(slice);
    }
    Ok(args.received != before)
}

fn publish<N: Net>(connector: &Connector<N>, args: &mut Args) -> Result<bool> {
    let words = connector.ring().words();
    let before = args.head;
    while args.head != args.received {
        let at = slot(args.head);
        if args.requests[at].is_some() && connector.net().test(&mut args.requests[at])?.is_none() {
            args.wait = Wait::Flush;
            break;
        }
        words.set_size(at, args.sizes[at].into());
        args.head = args.head.wrapping_add(args.steps.slice);
        Counters::add(&connector.counters().messages, 1);
        words.set_tail(args.head);
    }
    Ok(args.head != before)
}

#[cold]
fn oversized(bytes: usize, capacity: usize) -> Error {
    Error::remote(format!("the network received {bytes} bytes into a buffer of {capacity}"))
}
