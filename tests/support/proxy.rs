//! The proxy's C functions behind a facade, and the programs at a connector's ring.

use std::ffi::{CStr, c_void};
use std::ptr;

use railhead::abi::connector::*;
use railhead::abi::proxy::*;
use railhead::abi::status::railhead_status_t;
pub use railhead::abi::status::railhead_status_t::*;
use railhead::proxy::ring::{Consumer, Control, Producer};

use super::until;

/// A status other than success.
pub type Status = railhead_status_t;
pub type Result<T> = std::result::Result<T, Status>;

/// What a call returned, and what it wrote.
fn given<T>(status: Status, value: T) -> Result<T> {
    if status == RAILHEAD_OK { Ok(value) } else { Err(status) }
}

/// A proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proxy(pub *mut railhead_proxy_t);

// SAFETY: a handle; any thread may use it.
unsafe impl Send for Proxy {}
// SAFETY: as above.
unsafe impl Sync for Proxy {}

/// A connector of a proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connector(pub *mut railhead_connector_t);

// SAFETY: a handle; any thread may use it.
unsafe impl Send for Connector {}
// SAFETY: as above.
unsafe impl Sync for Connector {}

/// A configuration that says nothing.
pub fn config() -> railhead_connector_config_t {
    // SAFETY: zero is a value of each of its members.
    let zero: railhead_connector_config_t = unsafe { std::mem::zeroed() };
    railhead_connector_config_t { size: size_of::<railhead_connector_config_t>(), ..zero }
}

/// A ring whose slots have so many bytes in each protocol.
pub fn slots(bytes: usize) -> railhead_connector_config_t {
    railhead_connector_config_t { ll_bytes: bytes * 8, ll128_bytes: bytes * 8, simple_bytes: bytes * 8, ..config() }
}

/// An operation.
pub fn operation(steps: u64, slice: u32, chunk: u32, protocol: u32) -> railhead_operation_t {
    let size = size_of::<railhead_operation_t>();
    railhead_operation_t { size, steps, slice_steps: slice, chunk_steps: chunk, protocol, reserved: 0 }
}

/// The SIMPLE protocol's number.
pub const SIMPLE: u32 = 2;

impl Proxy {
    /// A proxy over Railhead's own table.
    pub fn new() -> Proxy {
        Proxy::over(ptr::null(), ptr::null()).expect("railhead_proxy_create")
    }

    pub fn over(net: *const c_void, config: *const railhead_proxy_config_t) -> Result<Proxy> {
        let mut proxy = ptr::null_mut();
        // SAFETY: NULL or what the test vouches for; a place for the handle.
        given(unsafe { railhead_proxy_create(net, config, &raw mut proxy) }, ()).map(|()| Proxy(proxy))
    }

    pub fn start(self) -> Result<()> {
        given(railhead_proxy_start(self.0), ())
    }

    pub fn stop(self) -> Result<()> {
        given(railhead_proxy_stop(self.0), ())
    }

    pub fn abort(self) -> Result<()> {
        given(railhead_proxy_abort(self.0), ())
    }

    pub fn group_start(self) -> Result<()> {
        given(railhead_proxy_group_start(self.0), ())
    }

    pub fn group_end(self) -> Result<()> {
        given(railhead_proxy_group_end(self.0), ())
    }

    pub fn destroy(self) -> Result<()> {
        // SAFETY: the test has given up the rings.
        given(unsafe { railhead_proxy_destroy(self.0) }, ())
    }

    pub fn state(self) -> railhead_proxy_state_t {
        // SAFETY: zero is a value of each of its members.
        let mut state = unsafe { std::mem::zeroed() };
        // SAFETY: a place for the result.
        given(unsafe { railhead_proxy_state(self.0, &raw mut state) }, state).map(|_| state).expect("railhead_proxy_state")
    }

    /// The status and words of the operation that failed; success and nothing if none did.
    pub fn error(self) -> (Status, String) {
        let mut words = [0; 1024];
        // SAFETY: room for as many bytes.
        let status = unsafe { railhead_proxy_error(self.0, words.as_mut_ptr(), words.len()) };
        // SAFETY: the last byte at the latest is 0.
        (status, unsafe { CStr::from_ptr(words.as_ptr()) }.to_string_lossy().into_owned())
    }

    pub fn dump(self) -> String {
        let mut words = vec![0; 1 << 20];
        let mut needed = 0;
        // SAFETY: room for as many bytes.
        given(unsafe { railhead_proxy_dump(self.0, words.as_mut_ptr(), words.len(), &raw mut needed) }, ()).expect("railhead_proxy_dump");
        // SAFETY: the last byte at the latest is 0.
        let text = unsafe { CStr::from_ptr(words.as_ptr()) }.to_string_lossy().into_owned();
        assert_eq!(needed, text.len() + 1);
        text
    }

    pub fn listen(self) -> (*mut railhead_listener_t, [u8; 128]) {
        let (mut listener, mut handle) = (ptr::null_mut(), [0; 128]);
        // SAFETY: places for both.
        given(unsafe { railhead_proxy_listen(self.0, 0, handle.as_mut_ptr().cast(), &raw mut listener) }, ())
            .expect("railhead_proxy_listen");
        (listener, handle)
    }

    /// A connector over a comm of the test's own.
    pub fn adopt(self, comm: *mut c_void, sends: bool, config: &railhead_connector_config_t) -> Result<Connector> {
        let mut connector = ptr::null_mut();
        // SAFETY: an open comm of the kind, which the test does not drive meanwhile; a configuration and a place for the handle.
        let status = unsafe {
            match sends {
                true => railhead_proxy_send_over(self.0, comm, config, &raw mut connector),
                false => railhead_proxy_recv_over(self.0, comm, config, &raw mut connector),
            }
        };
        given(status, Connector(connector))
    }

    /// One try to connect.
    pub fn connect(self, handle: &mut [u8; 128], config: &railhead_connector_config_t) -> Result<Option<Connector>> {
        let mut connector = ptr::null_mut();
        // SAFETY: 128 bytes, a configuration, a place for the handle.
        match unsafe { railhead_proxy_connect(self.0, 0, handle.as_mut_ptr().cast(), config, &raw mut connector) } {
            RAILHEAD_IN_PROGRESS => Ok(None),
            status => given(status, Some(Connector(connector))),
        }
    }
}

/// One try to take a peer in.
pub fn accept(listener: *mut railhead_listener_t, config: &railhead_connector_config_t) -> Result<Option<Connector>> {
    let mut connector = ptr::null_mut();
    // SAFETY: a configuration and a place for the handle.
    match unsafe { railhead_listener_accept(listener, config, &raw mut connector) } {
        RAILHEAD_IN_PROGRESS => Ok(None),
        status => given(status, Some(Connector(connector))),
    }
}

/// Connects two proxies of this process: a connector that sends, and the one that receives from it.
pub fn pair(from: Proxy, to: Proxy, config: &railhead_connector_config_t) -> (Connector, Connector) {
    let (listener, mut handle) = to.listen();
    let (mut send, mut recv) = (None, None);
    until("a connection", || {
        send = send.or_else(|| from.connect(&mut handle, config).expect("connect"));
        recv = recv.or_else(|| accept(listener, config).expect("accept"));
        send.zip(recv)
    });
    assert_eq!(railhead_listener_close(listener), RAILHEAD_OK);
    send.zip(recv).expect("both")
}

impl Connector {
    pub fn append(self, operation: &railhead_operation_t) -> Result<u64> {
        let mut count = 0;
        // SAFETY: an operation, and a place for the result.
        given(unsafe { railhead_connector_append(self.0, operation, &raw mut count) }, ()).map(|()| count)
    }

    pub fn state(self) -> railhead_connector_state_t {
        // SAFETY: zero is a value of each of its members.
        let mut state = unsafe { std::mem::zeroed() };
        // SAFETY: a place for the result.
        given(unsafe { railhead_connector_state(self.0, &raw mut state) }, ()).expect("railhead_connector_state");
        state
    }

    pub fn close(self) -> Result<()> {
        // SAFETY: the test has given up the ring.
        given(unsafe { railhead_connector_close(self.0) }, ())
    }

    pub fn place(self) -> railhead_ring_place_t {
        // SAFETY: zero is a value of each of its members.
        let mut place = unsafe { std::mem::zeroed() };
        // SAFETY: a place for the result.
        given(unsafe { railhead_connector_ring(self.0, &raw mut place) }, ()).expect("railhead_connector_ring");
        place
    }

    fn words(self) -> &'static Control {
        // SAFETY: control words, all atomics; the tests give rings up before they close connectors.
        unsafe { &*self.place().control.cast::<Control>() }
    }

    /// The SIMPLE slots: the first one, and the bytes of each.
    fn slots(self) -> (*mut u8, usize) {
        let (place, area) = (self.place(), &self.words().info.areas[SIMPLE as usize]);
        let load = |word: &std::sync::atomic::AtomicU64| word.load(std::sync::atomic::Ordering::Relaxed) as usize;
        (place.data.cast::<u8>().wrapping_add(load(&area.offset)), load(&area.step_bytes))
    }

    /// The program that fills the connector's ring.
    pub fn producer(self) -> Filler {
        let (slots, step_bytes) = self.slots();
        Filler { side: Producer::new(self.words()), slots, step_bytes }
    }

    /// The program that empties the connector's ring.
    pub fn consumer(self) -> Emptier {
        let (slots, step_bytes) = self.slots();
        Emptier { side: Consumer::new(self.words()), slots, step_bytes }
    }
}

/// A program that fills a ring with SIMPLE steps.
pub struct Filler {
    pub side: Producer<&'static Control>,
    slots: *mut u8,
    pub step_bytes: usize,
}

// SAFETY: one thread at a time uses it.
unsafe impl Send for Filler {}

impl Filler {
    /// Fills the next slice, if there is room.
    pub fn put(&mut self, slice: u64, data: &[u8]) -> bool {
        if !self.side.has_room(slice).expect("a valid ring") {
            return false;
        }
        let at = (self.side.step() % 8) as usize * self.step_bytes;
        assert!(data.len() <= slice as usize * self.step_bytes);
        // SAFETY: the ring granted the slots.
        unsafe { self.slots.add(at).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        self.side.post(slice, data.len());
        true
    }
}

/// A program that empties a ring of SIMPLE steps.
pub struct Emptier {
    pub side: Consumer<&'static Control>,
    slots: *mut u8,
    pub step_bytes: usize,
}

// SAFETY: one thread at a time uses it.
unsafe impl Send for Emptier {}

impl Emptier {
    /// Takes the next slice, if it is there.
    pub fn take(&mut self, slice: u64) -> Option<Vec<u8>> {
        let bytes = self.side.filled(slice, slice as usize * self.step_bytes).expect("a valid ring")?;
        let at = (self.side.step() % 8) as usize * self.step_bytes;
        let mut data = vec![0; bytes];
        // SAFETY: the ring granted the slots, which hold so many bytes.
        unsafe { self.slots.add(at).copy_to_nonoverlapping(data.as_mut_ptr(), bytes) };
        self.side.release(slice);
        Some(data)
    }
}
