//! A peer whose handshake is done and whose queue pairs may still be connecting: all that a [`Link`](super::Link) is made of. Used by whatever
//! thread drives the set-up.

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::stats::{CommStats, WaitCause};

use super::failover::Cells;
use super::liveness::{Liveness, Peer, Verdict, cause};
use super::queue_pairs::QueuePairs;

/// A connection whose handshake is done; `M` is the memory that its peer writes to.
pub struct Connection<M> {
    /// Queue pairs, told of their counterparts.
    pub qps: QueuePairs,
    /// What the peer writes to.
    pub memory: M,
    /// The peer.
    pub peer: Peer,
    /// The watch over it.
    pub liveness: Liveness,
    /// Where the comm counts.
    pub stats: CommStats,
    /// Where the ends talk about their rails, if both go on when one fails.
    pub cells: Option<Cells>,
}

impl<M> Connection<M> {
    /// Whether all queue pairs are connected, so that what is posted later goes out at once, or the peer, whose own were, has closed its comm since:
    /// that is for the use of the comm to report, and no failure of the handshake.
    ///
    /// Errors: they cannot connect, `System` if this process has no descriptor left for it; the peer is gone without having closed.
    pub fn poll_connected(&mut self) -> Result<bool> {
        let gone = match self.qps.poll_connected() {
            Ok(true) => {
                self.stats.clear_wait();
                return Ok(true);
            }
            Ok(false) => {
                self.stats.wait(cause(WaitCause::Handshake, self.liveness.stopped()));
                match self.liveness.idle() {
                    Verdict::NotChecked | Verdict::Checked => return Ok(false),
                    Verdict::Gone(why) => why,
                    Verdict::ProtocolError(why) => format!("it sent {why}"),
                }
            }
            Err(ours @ Error::System { .. }) => return Err(ours),
            Err(_) if self.liveness.may_explain(clock::now()) => return Ok(false),
            Err(why) => why.to_string(),
        };
        match self.liveness.said_bye() {
            true => Ok(true),
            false => Err(Error::remote(format!("{}: {gone}", self.peer.label))),
        }
    }
}
