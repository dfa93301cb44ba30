//! Sets up comms between two ranks and takes them down, as NCCL does: handles travel out of band, connect and accept are called until they
//! give a comm. Called on the thread that drives a rank.

use anyhow::{Context, bail, ensure};

use super::coordinator::{self, Coordinator};
use crate::plugin::{HANDLE, Handle, Opaque, Plugin};

/// One end of a connection; `send` or `recv` may be missing where only one direction was asked for.
#[derive(Clone, Copy)]
pub struct Comm {
    /// Towards the other rank.
    pub send: Option<Opaque>,
    /// From the other rank.
    pub recv: Option<Opaque>,
}

/// Which directions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Directions {
    /// From rank 0 to rank 1.
    One,
    /// Both.
    Both,
}

/// Sets up `n` comms. Both ranks call this at the same time.
pub fn connect(
    plugin: &Plugin,
    dev: i32,
    rank: usize,
    coordinator: &mut Coordinator,
    n: usize,
    directions: Directions,
) -> anyhow::Result<Vec<Comm>> {
    let sends = rank == 0 || directions == Directions::Both;
    let receives = rank == 1 || directions == Directions::Both;
    let listeners = if receives { (0..n).map(|_| plugin.listen(dev)).collect::<Result<Vec<_>, _>>()? } else { Vec::new() };
    let theirs = coordinator.swap(listeners.iter().map(|(handle, _)| hex(handle)).collect())?;
    let mut handles = unhex(&theirs)?;
    ensure!(!sends || handles.len() == n, "the other rank gave {} handles instead of {n}", handles.len());
    let mut comms = Vec::with_capacity(n);
    for i in 0..n {
        let mut comm = Comm { send: None, recv: None };
        let handle = handles.get_mut(i);
        let listener = listeners.get(i).map(|&(_, listener)| listener);
        if plugin.version() < 5 {
            one_after_the_other(plugin, dev, rank, handle, listener, &mut comm)?;
        } else {
            together(plugin, dev, handle, listener, &mut comm)?;
        }
        coordinator::count(1);
        comms.push(comm);
    }
    for (_, listener) in listeners {
        plugin.close_listen(listener)?;
    }
    Ok(comms)
}

/// v5 and later: neither call blocks.
fn together(plugin: &Plugin, dev: i32, mut handle: Option<&mut Handle>, listener: Option<Opaque>, comm: &mut Comm) -> anyhow::Result<()> {
    loop {
        if let (Some(handle), None) = (&mut handle, comm.send) {
            comm.send = plugin.connect(dev, handle)?;
        }
        if let (Some(listener), None) = (listener, comm.recv) {
            comm.recv = plugin.accept(listener)?;
        }
        if comm.send.is_some() == handle.is_some() && comm.recv.is_some() == listener.is_some() {
            return Ok(());
        }
        std::thread::yield_now();
    }
}

/// v4: both block, and connect may wait for the accept.
fn one_after_the_other(
    plugin: &Plugin,
    dev: i32,
    rank: usize,
    handle: Option<&mut Handle>,
    listener: Option<Opaque>,
    comm: &mut Comm,
) -> anyhow::Result<()> {
    let connect = |comm: &mut Comm| -> anyhow::Result<()> {
        if let Some(handle) = handle {
            comm.send = Some(plugin.connect(dev, handle)?.context("connect gave no comm, and v4 must block")?);
        }
        Ok(())
    };
    let accept = |comm: &mut Comm| -> anyhow::Result<()> {
        if let Some(listener) = listener {
            comm.recv = Some(plugin.accept(listener)?.context("accept gave no comm, and v4 must block")?);
        }
        Ok(())
    };
    if rank == 0 {
        connect(comm)?;
        accept(comm)
    } else {
        accept(comm)?;
        connect(comm)
    }
}

/// Closes them.
pub fn close(plugin: &Plugin, comms: &[Comm]) -> anyhow::Result<()> {
    for comm in comms {
        if let Some(send) = comm.send {
            plugin.close_send(send)?;
        }
        if let Some(recv) = comm.recv {
            plugin.close_recv(recv)?;
        }
    }
    Ok(())
}

fn hex(handle: &Handle) -> String {
    handle.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> anyhow::Result<Vec<Handle>> {
    let handle = |digits: &[u8]| -> Option<Handle> {
        let mut handle = [0; HANDLE];
        for (byte, two) in handle.iter_mut().zip(digits.chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()?;
        }
        Some(handle)
    };
    if !text.len().is_multiple_of(2 * HANDLE) {
        bail!("the other rank's handles have {} digits", text.len());
    }
    text.as_bytes().chunks(2 * HANDLE).map(|digits| handle(digits).context("the other rank's handles are no digits")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_travel_as_digits() {
        let handles: [Handle; 2] = [std::array::from_fn(|i| i as u8), [0xFF; HANDLE]];
        let text: String = handles.iter().map(hex).collect();
        assert_eq!(unhex(&text).unwrap(), handles);
        assert!(unhex(&text[1..]).is_err());
        assert!(unhex(&text.replace('f', "é")).is_err());
        assert_eq!(unhex("").unwrap().len(), 0);
    }
}
