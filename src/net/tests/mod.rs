//! Tests of whole comms, in one process: two ends of one [`Net`], driven in turn by one thread unless a test says otherwise. Nothing
//! waits for time; a loop that makes no progress ends by [`within`].

mod connections;
mod failover;
mod failures;
mod messages;
mod strangers;

use super::*;
use crate::base::clock;
use crate::base::config::Progress;
use crate::base::mem::Pages;

/// Calls `f` until it gives something.
fn within<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let end = clock::now() + 60_000_000_000;
    loop {
        if let Some(value) = f() {
            return value;
        }
        assert!(clock::now() < end, "{what}: nothing within 60 s");
        std::thread::yield_now();
    }
}

/// A setting that suits every machine: the loopback interface.
fn config() -> Config {
    // Tests move both ends along themselves.
    Config { socket_ifname: "=lo".into(), progress: Progress::Caller, ..Config::default() }
}

fn net(config: Config) -> Arc<Net> {
    Net::with_config(config).unwrap()
}

/// A virtual device of `n` rails, all of them device 0.
fn many_rails(net: &Arc<Net>, n: usize) -> usize {
    let mut devices = net.devices.write().unwrap();
    let parts = vec![devices[0].clone(); n];
    let taken: Vec<&str> = devices.iter().map(|d| d.name()).collect();
    let fused = NetDevice::fused(devices.len(), &parts, &taken).unwrap();
    devices.push(Arc::new(fused));
    devices.len() - 1
}

/// Registered memory.
struct Buffer {
    pages: Pages,
    mr: MrHandle,
}

impl Buffer {
    fn new(net: &Net, dev: usize, len: usize) -> Buffer {
        let pages = Pages::new(len.max(1)).unwrap();
        let mr = net.register(dev, pages.to_register(), MemoryKind::Host).unwrap();
        Buffer { pages, mr }
    }

    /// Fills `len` bytes at `at` with a pattern that no other `seed` makes.
    fn fill(&self, at: usize, len: usize, seed: u32) {
        self.pages.write(at, &pattern(len, seed));
    }

    /// Checks that they are there and that the byte after them is still 0.
    fn check(&self, at: usize, len: usize, seed: u32) {
        let mut bytes = vec![0; len];
        self.pages.read(at, &mut bytes);
        assert!(bytes == pattern(len, seed), "{len} bytes at {at} of seed {seed}");
    }

    fn addr(&self) -> usize {
        self.pages.addr()
    }

    fn recv(&self, at: usize, len: usize, tag: i32) -> RecvBuffer {
        RecvBuffer { addr: self.addr() + at, len, tag, mr: self.mr }
    }
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mut state = u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Two ends of a comm.
struct Pair {
    send: SendComm,
    recv: RecvComm,
    dev: usize,
    net: Arc<Net>,
}

impl Pair {
    fn new(net: &Arc<Net>, dev: usize) -> Pair {
        let (mut listen, mut handle) = net.listen(dev).unwrap();
        let (mut send, mut recv) = (None, None);
        within("handshake", || {
            if send.is_none() {
                send = net.connect(dev, None, &mut handle, Mode::NonBlocking).unwrap();
            }
            if recv.is_none() {
                recv = listen.accept(Mode::NonBlocking).unwrap();
            }
            (send.is_some() && recv.is_some()).then_some(())
        });
        Pair { send: send.unwrap(), recv: recv.unwrap(), dev, net: net.clone() }
    }

    fn buffer(&self, len: usize) -> Buffer {
        Buffer::new(&self.net, self.dev, len)
    }

    /// Sends, polling the other end meanwhile: nothing arrives where nobody polls.
    fn isend(&mut self, buffer: &Buffer, at: usize, len: usize, tag: i32) -> RequestId {
        within("isend", || {
            self.nudge();
            self.send.isend(buffer.addr() + at, len, tag, buffer.mr).unwrap()
        })
    }

    fn irecv(&mut self, buffers: &[RecvBuffer]) -> RequestId {
        within("irecv", || self.recv.irecv(buffers).unwrap())
    }

    /// Polls the receiver.
    fn nudge(&mut self) {
        self.recv.poll_for_test();
    }

    fn stripe_completed(&mut self, id: RequestId) -> usize {
        let sizes = within("send", || {
            self.nudge();
            self.send.test(id).unwrap()
        });
        assert_eq!(sizes.n, 1);
        sizes.bytes[0] as usize
    }

    fn received(&mut self, id: RequestId) -> Vec<usize> {
        let sizes = within("receive", || {
            self.send.poll_for_test();
            self.recv.test(id).unwrap()
        });
        sizes.bytes[..sizes.n].iter().map(|bytes| *bytes as usize).collect()
    }
}
