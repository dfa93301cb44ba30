//! A network in memory that records its calls and is as slow, busy and faulty as a test wants. A message is copied at its last poll, not when it is
//! posted, so a slot that is overwritten too early is noticed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::error::{Error, Result};
use crate::proxy::net::{Buffer, Comm, ListenHandle, Mr, Net, NetRequest};

/// A call of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Isend { connection: usize, bytes: usize, accepted: bool },
    Irecv { connection: usize, bytes: usize, accepted: bool },
    Iflush { connection: usize, bytes: usize },
    Test { done: bool },
    RegMr { device: bool },
    DeregMr,
    CloseSend,
    CloseRecv,
}

/// How the network behaves.
#[derive(Debug, Clone, Copy, Default)]
pub struct Behaviour {
    /// Polls that a message or a flush takes: 0 to this many, by chance.
    pub delay: u64,
    /// One post in this many is not accepted, by chance; 0 for none.
    pub busy: u64,
    /// The call of this number fails, counted from 0.
    pub fails_at: Option<u64>,
    /// Flushes complete only once this is not set.
    pub holds_flushes: bool,
    /// Every receive reports so many bytes too many.
    pub excess: usize,
}

#[derive(Default)]
struct Message {
    from: usize,
    to: usize,
    bytes: usize,
    polls: u64,
    copied: bool,
}

enum Posted {
    Message(usize),
    Receive { connection: usize, number: u64 },
    Flush { polls: u64 },
}

#[derive(Default)]
struct State {
    behaviour: Behaviour,
    record: Vec<Call>,
    unrecorded: bool,
    calls: u64,
    random: u64,
    // By number; a message that both ends have seen stays, for its address is not reused.
    messages: BTreeMap<usize, (Message, u8)>,
    next_message: usize,
    // By connection: receives without a send. Then those that have one, with the number of its message.
    waiting: BTreeMap<usize, VecDeque<(u64, usize, usize)>>,
    matched: BTreeMap<(usize, u64), usize>,
    received: u64,
    requests: BTreeMap<usize, Posted>,
    next_request: usize,
    open: i64,
    registered: i64,
}

/// The network.
#[derive(Default)]
pub struct Fake(Mutex<State>);

impl Fake {
    pub fn new(seed: u64, behaviour: Behaviour) -> Arc<Fake> {
        Arc::new(Fake(Mutex::new(State { behaviour, random: seed | 1, ..State::default() })))
    }

    /// A pair of comms: what is sent on the first is received on the second.
    pub fn connection(&self, connection: usize) -> (Comm, Comm) {
        self.lock().open += 2;
        // SAFETY: this network takes any number for a comm.
        unsafe { (Comm::new(connection * 2), Comm::new(connection * 2 + 1)) }
    }

    pub fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.lock().behaviour);
    }

    /// Keeps no record from now on.
    pub fn unrecorded(&self) {
        self.lock().unrecorded = true;
    }

    pub fn record(&self) -> Vec<Call> {
        self.lock().record.clone()
    }

    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Comms and registrations that are open, and requests that were not tested to their end.
    pub fn holds(&self) -> (i64, i64, usize) {
        let state = self.lock();
        (state.open, state.registered, state.requests.len())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl State {
    fn call(&mut self, what: &str) -> Result<()> {
        let call = self.calls;
        self.calls += 1;
        if self.behaviour.fails_at == Some(call) { Err(Error::remote(format!("call {call}, {what}, fails on purpose"))) } else { Ok(()) }
    }

    fn note(&mut self, call: Call) {
        if !self.unrecorded {
            self.record.push(call);
        }
    }

    fn chance(&mut self, below: u64) -> u64 {
        // xorshift64 (Marsaglia)
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn is_busy(&mut self) -> bool {
        let n = self.behaviour.busy;
        n > 0 && self.chance(n) == 0
    }

    fn request(&mut self, posted: Posted) -> NetRequest {
        self.next_request += 1;
        self.requests.insert(self.next_request, posted);
        // SAFETY: this network takes any number for a request.
        unsafe { NetRequest::new(self.next_request) }
    }

    /// One poll of a message; its bytes once it is copied.
    fn poll(&mut self, number: usize) -> Option<usize> {
        let (message, seen) = self.messages.get_mut(&number).expect("a message");
        if message.polls > 0 {
            message.polls -= 1;
            return None;
        }
        if !message.copied {
            message.copied = true;
            let (from, to) =
                (std::ptr::with_exposed_provenance::<u8>(message.from), std::ptr::with_exposed_provenance_mut::<u8>(message.to));
            // SAFETY: slots of two rings that the test keeps, claimed by the operations whose requests these are.
            unsafe { to.copy_from_nonoverlapping(from, message.bytes) };
        }
        let bytes = message.bytes;
        *seen += 1;
        if *seen == 2 {
            self.messages.remove(&number);
        }
        Some(bytes)
    }
}

impl Net for Fake {
    fn isend(&self, comm: &Comm, data: Buffer, _tag: i32, _mr: &Mr) -> Result<Option<NetRequest>> {
        let state = &mut *self.lock();
        state.call("isend")?;
        let connection = comm.value() / 2;
        let receive = if state.is_busy() { None } else { state.waiting.entry(connection).or_default().pop_front() };
        state.note(Call::Isend { connection, bytes: data.bytes(), accepted: receive.is_some() });
        let Some((number, to, room)) = receive else { return Ok(None) };
        assert!(data.bytes() <= room, "{} bytes for a receive of {room}", data.bytes());
        let delay = state.behaviour.delay;
        let polls = state.chance(delay + 1);
        state.next_message += 1;
        let message = state.next_message;
        state.messages.insert(message, (Message { from: data.addr(), to, bytes: data.bytes(), polls, copied: false }, 0));
        state.matched.insert((connection, number), message);
        Ok(Some(state.request(Posted::Message(message))))
    }

    fn irecv(&self, comm: &Comm, data: Buffer, _tag: i32, _mr: &Mr) -> Result<Option<NetRequest>> {
        let state = &mut *self.lock();
        state.call("irecv")?;
        let connection = comm.value() / 2;
        let accepted = !state.is_busy();
        state.note(Call::Irecv { connection, bytes: data.bytes(), accepted });
        if !accepted {
            return Ok(None);
        }
        state.received += 1;
        let number = state.received;
        state.waiting.entry(connection).or_default().push_back((number, data.addr(), data.bytes()));
        Ok(Some(state.request(Posted::Receive { connection, number })))
    }

    fn iflush(&self, comm: &Comm, data: Buffer, _mr: &Mr) -> Result<Option<NetRequest>> {
        let state = &mut *self.lock();
        state.call("iflush")?;
        state.note(Call::Iflush { connection: comm.value() / 2, bytes: data.bytes() });
        if state.is_busy() {
            // Nothing to flush, as a plugin says of host memory.
            return Ok(None);
        }
        let delay = state.behaviour.delay;
        let polls = state.chance(delay + 1);
        Ok(Some(state.request(Posted::Flush { polls })))
    }

    fn test(&self, request: &mut Option<NetRequest>) -> Result<Option<usize>> {
        let Some(number) = request.as_ref().map(NetRequest::value) else { return Ok(Some(0)) };
        let state = &mut *self.lock();
        state.call("test")?;
        let holds = state.behaviour.holds_flushes;
        let done = match state.requests.get_mut(&number).expect("a request that was not tested to its end") {
            Posted::Flush { .. } if holds => None,
            Posted::Flush { polls: 0 } => Some(0),
            Posted::Flush { polls } => {
                *polls -= 1;
                None
            }
            Posted::Message(message) => {
                let message = *message;
                state.poll(message)
            }
            Posted::Receive { connection, number } => {
                let matched = state.matched.get(&(*connection, *number)).copied();
                matched.and_then(|message| state.poll(message)).map(|bytes| bytes + state.behaviour.excess)
            }
        };
        state.note(Call::Test { done: done.is_some() });
        if done.is_some() {
            if let Some(Posted::Receive { connection, number }) = state.requests.remove(&number) {
                state.matched.remove(&(connection, number));
            }
            *request = None;
        }
        Ok(done)
    }

    fn listen(&self, _dev: i32) -> Result<(Comm, ListenHandle)> {
        self.lock().call("listen")?;
        // SAFETY: as in `connection`.
        Ok((unsafe { Comm::new(usize::MAX) }, ListenHandle::default()))
    }

    fn connect(&self, _dev: i32, _handle: &mut ListenHandle) -> Result<Option<Comm>> {
        self.lock().call("connect")?;
        Ok(None)
    }

    fn accept(&self, _listener: &Comm) -> Result<Option<Comm>> {
        self.lock().call("accept")?;
        Ok(None)
    }

    fn reg_mr(&self, _comm: &Comm, _data: Buffer, device: bool) -> Result<Mr> {
        let state = &mut *self.lock();
        state.call("regMr")?;
        state.note(Call::RegMr { device });
        state.registered += 1;
        // SAFETY: this network takes any number for a registration.
        Ok(unsafe { Mr::new(7) })
    }

    fn dereg_mr(&self, _comm: &Comm, _mr: Mr) -> Result<()> {
        let state = &mut *self.lock();
        state.registered -= 1;
        state.note(Call::DeregMr);
        state.call("deregMr")
    }

    fn close_send(&self, _comm: Comm) -> Result<()> {
        let state = &mut *self.lock();
        state.open -= 1;
        state.note(Call::CloseSend);
        state.call("closeSend")
    }

    fn close_recv(&self, _comm: Comm) -> Result<()> {
        let state = &mut *self.lock();
        state.open -= 1;
        state.note(Call::CloseRecv);
        state.call("closeRecv")
    }

    fn close_listen(&self, _comm: Comm) -> Result<()> {
        self.lock().call("closeListen")
    }
}
