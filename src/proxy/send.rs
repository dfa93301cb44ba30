//! Steps send operations: from the ring to the network. Called on the engine's thread; never waits, never allocates.
//!
//! netSendProxy of nccl v2.7.8 src/transport/net.cc. The counters are `head` (complete) <= `tail` (posted) <= `end`:
//!
//! ```text
//! post      the next slice is filled, and all its flags are set:  isend, size = -1, tail += slice
//! complete  the request of the oldest slice is complete:          head += slice, ring.head = head
//! ```

use super::args::{Args, Wait};
use super::connector::{Connector, Counters};
use super::net::Net;
use super::protocol::Protocol;
use super::ring::layout::slot;
use super::ring::{EMPTY, Words, rules};
use crate::base::error::Result;
use crate::engine::Progress;

/// Makes what progress is possible.
pub fn progress<N: Net>(connector: &Connector<N>, args: &mut Args) -> Result<Progress> {
    if !args.started && args.start(connector.step()) {
        // The skipped steps are free. If they were not published, a producer whose slice fills the ring would wait for ever.
        connector.ring().words().set_head(args.base);
    }
    args.wait = Wait::Nothing;
    let moved = post(connector, args)? | complete(connector, args)?;
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
    let mut filled = 0;
    while args.may_post() {
        // An LL slot is filled once its flags are set, whatever `tail` says.
        if protocol != Protocol::Ll && filled < slice {
            filled = rules::filled(words.tail(), args.position())?;
            if filled < slice {
                args.wait = Wait::Producer;
                break;
            }
        }
        let at = slot(args.tail);
        let Some(bytes) = rules::size(words.size(at), capacity)? else {
            args.wait = Wait::Producer;
            break;
        };
        let bytes = bytes.next_multiple_of(protocol.line());
        let missing = connector.ring().missing(protocol, args.tail, args.lines, bytes);
        if missing * protocol.line() < bytes {
            (args.lines, args.wait) = (missing, Wait::Flags);
            break;
        }
        let data = connector.buffer(protocol, args.tail, bytes);
        let Some(request) = connector.net().isend(comm, data, connector.tag(), mr)? else {
            Counters::add(&connector.counters().retries, 1);
            args.wait = Wait::Receiver;
            break;
        };
        args.requests[at] = Some(request);
        // Before `head` is published beyond this step: then the producer may set the size again.
        words.set_size(at, EMPTY);
        Counters::add(&connector.counters().bytes, bytes as u64);
        args.tail = args.tail.wrapping_add(slice);
        args.lines = 0;
        filled = filled.saturating_sub(slice);
    }
    Ok(args.tail != before)
}

fn complete<N: Net>(connector: &Connector<N>, args: &mut Args) -> Result<bool> {
    let before = args.head;
    while args.head != args.tail {
        if connector.net().test(&mut args.requests[slot(args.head)])?.is_none() {
            if args.wait == Wait::Nothing {
                args.wait = Wait::Sent;
            }
            break;
        }
        args.head = args.head.wrapping_add(args.steps.slice);
        Counters::add(&connector.counters().messages, 1);
        connector.ring().words().set_head(args.head);
    }
    Ok(args.head != before)
}
