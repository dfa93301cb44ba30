//! The limit of a small message over TCP: a ping-pong on raw sockets that do not block, spinning, without delay (TCP_NODELAY).

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use anyhow::bail;

use super::super::message::Round;
use super::super::rank::coordinator::{self, Coordinator};
use super::super::rank::job::{Begin, Job, Meter};
use super::super::spin::Spin;
use super::tcp;

/// A connection.
pub struct TcpPingPong {
    stream: TcpStream,
    message: Vec<u8>,
    rank: usize,
}

impl TcpPingPong {
    /// Connects.
    pub fn new(size: usize, rank: usize, coordinator: &mut Coordinator) -> anyhow::Result<(TcpPingPong, String)> {
        let (stream, note) = tcp::pair(rank, coordinator)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok((TcpPingPong { stream, message: vec![0; size], rank }, note))
    }

    fn send(&mut self, seq: u64) -> anyhow::Result<()> {
        self.message[0] = seq as u8;
        let (mut sent, mut spin) = (0, Spin::default());
        while sent < self.message.len() {
            match self.stream.write(&self.message[sent..]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => spin.idle(),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn receive(&mut self, seq: u64) -> anyhow::Result<()> {
        let (mut have, mut spin) = (0, Spin::default());
        while have < self.message.len() {
            match self.stream.read(&mut self.message[have..]) {
                Ok(0) => bail!("the connection was closed"),
                Ok(n) => have += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => spin.idle(),
                Err(e) => return Err(e.into()),
            }
        }
        if self.message[0] != seq as u8 {
            bail!("message {seq} carries stamp {:#04x}", self.message[0]);
        }
        Ok(())
    }
}

impl Job for TcpPingPong {
    fn round(&mut self, _: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round> {
        let meter = Meter::start(begin);
        for seq in 0..messages {
            if self.rank == 0 {
                self.send(seq)?;
            }
            self.receive(seq)?;
            if self.rank == 1 {
                self.send(seq)?;
            }
        }
        coordinator::count(messages);
        Ok(meter.stop())
    }
}
