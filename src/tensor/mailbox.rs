//! The message buffers of a channel's end, and their acks: messages go one at a time, the next one once this side's device is done with the buffer and
//! the peer has said, by an ack, that it has read its own. Pure: what is to be written is told to [`Mail`]. Under the lock of the manager.

use std::collections::VecDeque;

use crate::base::error::{Error, Result};

use super::key::TensorId;
use super::message::{self, Kind, NumberedRequest, Packet, TEXT_MAX};

/// Requests of a worker that are not answered.
pub const MAX_REQUESTS: usize = 1 << 16;
/// Messages that wait at most: more than a peer that keeps to the protocol can ask for.
const MAX_QUEUE: usize = 4 * MAX_REQUESTS;

/// What writes the peer's buffers.
pub trait Mail {
    /// Writes its ack buffer.
    fn ack(&mut self);
    /// Writes its message buffer. The text is that of an error.
    fn message(&mut self, packet: &Packet, text: &str);
    /// Sends a request that takes no buffer, and so is not acked. False: there is no room now.
    fn numbered(&mut self, request: &NumberedRequest) -> bool;
}

/// What waits to be sent.
#[derive(Debug)]
enum Letter {
    /// A message, with the text of an error.
    Message(Box<Packet>, String),
    Numbered(NumberedRequest),
}

/// One end's.
#[derive(Debug, Default)]
pub struct Mailbox {
    queue: VecDeque<Letter>,
    local_busy: bool,
    remote_busy: bool,
    ack_busy: bool,
    /// A message was read before the write of the ack of the one before was done.
    ack_owed: bool,
}

impl Mailbox {
    /// Sends a message, as soon as that may be.
    pub fn say(&mut self, packet: Packet, mail: &mut impl Mail) {
        self.queue.push_back(Letter::Message(Box::new(packet), String::new()));
        self.send_next(mail);
    }

    /// The same for a request without a packet. None overtakes another message.
    pub fn say_numbered(&mut self, request: NumberedRequest, mail: &mut impl Mail) {
        if !self.queue.is_empty() || !mail.numbered(&request) {
            self.queue.push_back(Letter::Numbered(request));
        }
    }

    /// Sends why a tensor will not come.
    pub fn refuse(&mut self, id: &TensorId, why: &Error, mail: &mut impl Mail) {
        let mut packet = Packet::new(Kind::ErrorStatus, id.clone());
        let text = why.to_string();
        let end = (0..=text.len().min(TEXT_MAX)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        let text = text.get(..end).unwrap_or_default();
        packet.meta.bytes = text.len() as u64;
        packet.meta.data_type = message::code(why);
        self.queue.push_back(Letter::Message(Box::new(packet), text.to_owned()));
        self.send_next(mail);
    }

    /// Sends what there is room for.
    pub fn send_next(&mut self, mail: &mut impl Mail) {
        while let Some(letter) = self.queue.front() {
            match letter {
                Letter::Message(..) if self.local_busy || self.remote_busy => return,
                Letter::Message(packet, text) => {
                    (self.local_busy, self.remote_busy) = (true, true);
                    mail.message(packet, text);
                }
                Letter::Numbered(request) if mail.numbered(request) => {}
                Letter::Numbered(_) => return,
            }
            self.queue.pop_front();
        }
    }

    /// Whether nothing waits to be sent.
    pub fn is_through(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether the peer has an ack to write.
    pub fn waits(&self) -> bool {
        self.remote_busy
    }

    /// The write of a message is done: its buffer may be filled again.
    pub fn message_written(&mut self, mail: &mut impl Mail) {
        self.local_busy = false;
        self.send_next(mail);
    }

    /// The same for an ack.
    pub fn ack_written(&mut self, mail: &mut impl Mail) {
        self.ack_busy = false;
        if std::mem::take(&mut self.ack_owed) {
            self.ack(mail);
        }
    }

    fn ack(&mut self, mail: &mut impl Mail) {
        if std::mem::replace(&mut self.ack_busy, true) {
            self.ack_owed = true;
        } else {
            mail.ack();
        }
    }

    /// The peer has read the message that was written last.
    ///
    /// Errors of this and of [`Mailbox::received`]: the peer broke the protocol.
    pub fn acked(&mut self, mail: &mut impl Mail) -> Result<()> {
        if !std::mem::take(&mut self.remote_busy) {
            return Err(wrong("an ack of nothing"));
        }
        self.send_next(mail);
        Ok(())
    }

    /// A message was copied out of the buffer, which is free again.
    pub fn received(&mut self, mail: &mut impl Mail) -> Result<()> {
        if self.ack_owed {
            return Err(wrong("a message before the ack of the last"));
        }
        self.check_queue()?;
        self.ack(mail);
        Ok(())
    }

    /// Errors: a peer that asks and reads no answers.
    pub fn check_queue(&self) -> Result<()> {
        if self.queue.len() > MAX_QUEUE {
            return Err(wrong("more than it reads answers to"));
        }
        Ok(())
    }
}

/// An error of the peer's.
#[cold]
pub fn wrong(what: &str) -> Error {
    Error::remote(format!("it sent {what}"))
}
