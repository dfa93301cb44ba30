//! The proxies of this process with their listeners and connectors, for the C functions of `abi::proxy` and `abi::connector`. On the callers' threads;
//! several may use one proxy at a time.

use std::sync::{Arc, Mutex};

use crate::abi::handle::Handle;
use crate::abi::objects::Objects;
use crate::abi::table::Table;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::sync::lock;
use crate::engine;
use crate::proxy::args::Steps;
use crate::proxy::connector::{self, Direction};
use crate::proxy::net::{self, Comm, Net};
use crate::proxy::ring::Ring;
use crate::proxy::{AttachedConnector, Proxy};

static PROXIES: Objects<Proxy<Table>> = Objects::new(0xb4, "proxy");
static LISTENERS: Objects<Listener> = Objects::new(0xb5, "listener");
static CONNECTORS: Objects<Connector> = Objects::new(0xb6, "connector");

/// A listener of a proxy.
pub struct Listener {
    proxy: Arc<Proxy<Table>>,
    // None once closed.
    comm: Mutex<Option<Comm>>,
}

/// A connector of a proxy.
pub struct Connector {
    proxy: Arc<Proxy<Table>>,
    // None once closed.
    attached: Mutex<Option<AttachedConnector<Table>>>,
}

/// Makes a proxy over a table.
pub fn create(table: Table, options: engine::Options) -> Result<Handle> {
    let proxy = Arc::new(Proxy::new(Arc::new(table), options)?);
    Ok(Handle::from_pointer(PROXIES.insert(proxy)))
}

/// The proxy of a handle.
pub fn proxy(handle: Handle) -> Result<Arc<Proxy<Table>>> {
    PROXIES.get(handle.to_pointer())
}

/// The listener of a handle.
pub fn listener(handle: Handle) -> Result<Arc<Listener>> {
    LISTENERS.get(handle.to_pointer())
}

/// The connector of a handle.
pub fn connector(handle: Handle) -> Result<Arc<Connector>> {
    CONNECTORS.get(handle.to_pointer())
}

/// Aborts a proxy, and closes it with all its connectors and listeners; all their handles end.
///
/// Errors: a call on the proxy's own thread, which does nothing; the first error of closing them, after which all are closed all the same.
pub fn destroy(handle: Handle) -> Result<()> {
    let proxy = self::proxy(handle)?;
    if proxy.engine().is_own_thread() {
        return Err(proxy.refused(engine::Refusal::OwnThread));
    }
    drop(proxy);
    // From here on `admit` closes at once what is added to it.
    let proxy = PROXIES.remove(handle.to_pointer())?;
    let aborted = proxy.engine().abort().map_err(|refusal| proxy.refused(refusal));
    let connectors = CONNECTORS.remove_all(|connector| Arc::ptr_eq(&connector.proxy, &proxy));
    let listeners = LISTENERS.remove_all(|listener| Arc::ptr_eq(&listener.proxy, &proxy));
    let mut result = aborted;
    for closed in connectors.iter().map(|connector| connector.close()).chain(listeners.iter().map(|listener| listener.close())) {
        match (&result, closed) {
            (Ok(()), closed) => result = closed,
            (Err(_), Err(error)) => log_warn!(log::NET, "destroying a proxy: {error}"),
            (Err(_), Ok(())) => {}
        }
    }
    result
}

/// Makes a handle for a listener or connector. If the proxy was destroyed while it was made, it is closed here: `destroy` may have missed it.
fn admit<T>(objects: &Objects<T>, proxy: &Arc<Proxy<Table>>, made: T, close: impl FnOnce(&T) -> Result<()>) -> Result<Handle> {
    let handle = objects.insert(made);
    if PROXIES.holds(proxy) {
        return Ok(Handle::from_pointer(handle));
    }
    if let Ok(made) = objects.remove(handle)
        && let Err(error) = close(&made)
    {
        log_warn!(log::NET, "closing a listener or connector of a destroyed proxy: {error}");
    }
    Err(Error::internal("the proxy was destroyed meanwhile"))
}

/// Opens a listener on a device.
pub fn listen(proxy: &Arc<Proxy<Table>>, dev: i32) -> Result<(Handle, net::ListenHandle)> {
    let (comm, handle) = proxy.net().listen(dev)?;
    let listener = Listener { proxy: proxy.clone(), comm: Mutex::new(Some(comm)) };
    Ok((admit(&LISTENERS, proxy, listener, Listener::close)?, handle))
}

/// Connects to a peer's listener; `None` while that is under way. `ring` is called once there is a comm.
pub fn connect(
    proxy: &Arc<Proxy<Table>>,
    dev: i32,
    handle: &mut net::ListenHandle,
    ring: impl FnOnce() -> Result<Ring>,
    options: connector::Options,
) -> Result<Option<Handle>> {
    match proxy.net().connect(dev, handle)? {
        Some(comm) => adopt(proxy, Direction::Send, comm, ring, options).map(Some),
        None => Ok(None),
    }
}

/// Makes a connector of a comm. If that fails the comm is closed, unless it is borrowed.
pub fn adopt(
    proxy: &Arc<Proxy<Table>>,
    direction: Direction,
    comm: Comm,
    ring: impl FnOnce() -> Result<Ring>,
    options: connector::Options,
) -> Result<Handle> {
    let ring = match ring() {
        Ok(ring) => Arc::new(ring),
        Err(error) => {
            if !options.borrowed
                && let Err(error) = connector::close(&**proxy.net(), direction, comm)
            {
                log_warn!(log::NET, "closing a comm that got no ring: {error}");
            }
            return Err(error);
        }
    };
    let attached = proxy.connect(direction, comm, ring, options)?;
    let connector = Connector { proxy: proxy.clone(), attached: Mutex::new(Some(attached)) };
    admit(&CONNECTORS, proxy, connector, Connector::close)
}

/// Closes a listener and ends its handle.
pub fn close_listener(handle: Handle) -> Result<()> {
    LISTENERS.remove(handle.to_pointer())?.close()
}

/// Closes a connector without operations and ends its handle.
///
/// Errors: operations that are not done: it stays open. Those of the network: it is closed all the same.
pub fn close_connector(handle: Handle) -> Result<()> {
    let connector = connector(handle)?;
    let attached = connector.detach()?;
    // Fails if another thread has destroyed the proxy meanwhile, and the handle with it.
    let _ = CONNECTORS.remove(handle.to_pointer());
    attached.close()
}

impl Listener {
    /// Accepts a peer; `None` while there is none. `ring` is called once there is a comm.
    pub fn accept(&self, ring: impl FnOnce() -> Result<Ring>, options: connector::Options) -> Result<Option<Handle>> {
        let comm = match &*lock(&self.comm) {
            Some(listener) => self.proxy.net().accept(listener)?,
            None => return Err(Error::internal("the listener is closed")),
        };
        comm.map(|comm| adopt(&self.proxy, Direction::Recv, comm, ring, options)).transpose()
    }

    fn close(&self) -> Result<()> {
        match lock(&self.comm).take() {
            Some(comm) => self.proxy.net().close_listen(comm),
            None => Ok(()),
        }
    }
}

impl Connector {
    /// Appends an operation; returns its opCount.
    pub fn append(&self, steps: Steps) -> Result<u64> {
        self.with(|attached| self.proxy.append(attached, steps))
    }

    /// Runs `f` on the proxy's connector.
    pub fn with<R>(&self, f: impl FnOnce(&AttachedConnector<Table>) -> Result<R>) -> Result<R> {
        match &*lock(&self.attached) {
            Some(attached) => f(attached),
            None => Err(Error::internal("the connector is closed")),
        }
    }

    fn detach(&self) -> Result<AttachedConnector<Table>> {
        let mut held = lock(&self.attached);
        match held.take() {
            Some(attached) => match self.proxy.detach(&attached) {
                Ok(()) => Ok(attached),
                Err(error) => {
                    *held = Some(attached);
                    Err(error)
                }
            },
            None => Err(Error::internal("the connector is closed")),
        }
    }

    fn close(&self) -> Result<()> {
        if lock(&self.attached).is_none() {
            return Ok(());
        }
        self.detach()?.close()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            log_warn!(log::NET, "closing a listener: {error}");
        }
    }
}
