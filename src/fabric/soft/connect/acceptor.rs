//! The acceptor's steps: it takes the dialer's streams from the hub, chooses the wire, and answers each Hello.

use std::io;

use super::super::endpoint::{Offer, REPLY_SIZE, Reply};
use super::super::hub::IncomingStream;
use super::super::shm::{Segment, send_with_fd};
use super::super::sockets;
use super::super::tcp::TcpWire;
use super::super::work_queues::{Fault, is_lack};
use super::{Connected, Connecting, SHM_ONLY, Step, is_emfile, no_descriptor, unreachable};
use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::fd::OwnedFd;
use crate::base::log::{self, log_info, log_warn};
use crate::base::mem::Shm;

impl Connecting {
    /// Takes the dialer's control stream, chooses the wire and sends the Reply.
    pub(super) fn accept_control(&mut self) -> std::result::Result<Option<Connected>, Fault> {
        self.step = Step::AcceptControl;
        let Some(stream) = self.args.pending.take() else {
            let gone = |e| unreachable(format!("the peer's queue pair is gone: {e}"));
            return self.check.poll(&self.args.local, &self.args.remote).map(|()| None).map_err(gone);
        };
        if stream.hello.from != self.args.remote.qpn || matches!(stream.hello.offer, Offer::Data(_) | Offer::Check) {
            return Ok(None);
        }
        let send_reply = |reply: Reply| {
            let bytes = reply.encode(&self.args.remote.token, &stream.raw);
            matches!(send_with_fd(&stream.socket, &bytes, None), Ok(REPLY_SIZE))
        };
        let offered = self.open_offered(&stream);
        if let Err(Error::System { word, .. }) = &offered
            && is_emfile(word)
        {
            return Err(no_descriptor("for the memory that the peer passes", &self.args.local));
        }
        let mut lack = None;
        let offered = offered.unwrap_or_else(|e| {
            // The Reply tells the dialer no more than what this process lacks.
            let peer = self.args.remote.addr;
            match self.tcp_allowed() {
                true => log_info!(log::NET, "no shared memory from {peer}: {e}"),
                false => log_warn!(log::NET, "no shared memory from {peer}, and nothing else is allowed: {e}"),
            }
            if let Error::System { word, .. } = e {
                lack = Some(word).filter(is_lack);
            }
            None
        });
        if let Some(segment) = offered {
            segment.introduce(self.args.notify);
            if send_reply(Reply::Shm) {
                return Ok(Some(self.use_segment(segment, stream.socket, stream.unix)));
            }
        } else if self.tcp_allowed() && !stream.unix {
            let streams = self.args.local.streams.min(self.args.remote.streams);
            if send_reply(Reply::Tcp(streams)) {
                self.set_options(&stream.socket);
                self.step = Step::AcceptData(stream.socket, (0..streams).map(|_| None).collect(), clock::now());
            }
        } else {
            let errno = lack.as_ref().and_then(io::Error::raw_os_error).and_then(|errno| errno.try_into().ok());
            send_reply(Reply::Refused(errno.unwrap_or(0)));
            // Over a unix socket that is not the dialer's last offer.
            if let Some(word) = lack.filter(|_| !stream.unix) {
                return Err(Fault::lacking(&word, SHM_ONLY));
            }
        }
        Ok(None)
    }

    /// Opens the segment that a Hello offers; none if it offers none, or if this side does not use shared memory.
    fn open_offered(&self, stream: &IncomingStream) -> Result<Option<Segment>> {
        if !self.shm_allowed() {
            return Ok(None);
        }
        let too_long = || Error::remote("the peer offered a segment longer than the address space");
        let shm = match &stream.hello.offer {
            Offer::Passed(len) => {
                if stream.pid.is_none() {
                    return Err(Error::remote("the peer is another user's process"));
                }
                // The kernel drops a passed descriptor if this process has no room for it.
                let none = || Error::system("no descriptor came with the Hello", io::Error::from_raw_os_error(libc::EMFILE));
                let memory = stream.memory.as_ref().ok_or_else(none)?;
                let memory = OwnedFd::new(memory.try_clone().map_err(|e| Error::system("dup", e))?);
                Shm::attach(memory, usize::try_from(*len).map_err(|_| too_long())?)?
            }
            Offer::Named(len, name) => Shm::open_file(name, usize::try_from(*len).map_err(|_| too_long())?)?,
            Offer::Tcp | Offer::Data(_) | Offer::Check => return Ok(None),
        };
        Segment::attach(shm).map(Some)
    }

    /// Takes the dialer's data streams and confirms each with a Reply.
    pub(super) fn accept_data(
        &mut self,
        control: OwnedFd,
        mut streams: Vec<Option<OwnedFd>>,
        mut since: u64,
    ) -> std::result::Result<Option<Connected>, Fault> {
        while let Some(stream) = self.args.pending.take() {
            let Offer::Data(number) = stream.hello.offer else { continue };
            // The dialer dials a stream again only after it was closed. A replayed Hello comes while it is open.
            let free = |slot: &&mut Option<OwnedFd>| slot.as_ref().is_none_or(sockets::closed);
            let slot = streams.get_mut(usize::from(number)).filter(free);
            let Some(slot) = slot.filter(|_| stream.hello.from == self.args.remote.qpn) else { continue };
            let reply = Reply::Tcp(number).encode(&self.args.remote.token, &stream.raw);
            if matches!(send_with_fd(&stream.socket, &reply, None), Ok(REPLY_SIZE)) {
                self.set_options(&stream.socket);
                *slot = Some(stream.socket);
                since = clock::now();
            }
        }
        if streams.iter().all(Option::is_some) {
            return Ok(Some(Connected::Tcp(Box::new(TcpWire::new(control, streams.into_iter().flatten().collect())))));
        }
        if sockets::closed(&control) {
            return Err(unreachable("the peer went away before its data streams had come"));
        }
        let seconds = self.args.config.handshake_timeout_s;
        if clock::now() - since > u64::from(seconds) * 1_000_000_000 {
            return Err(unreachable(format!("the peer's data streams did not come within {seconds} s (RAILHEAD_HANDSHAKE_TIMEOUT_S)")));
        }
        self.step = Step::AcceptData(control, streams, since);
        Ok(None)
    }
}
