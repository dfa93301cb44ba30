//! The server of a TCPStore: torch's protocol and its answers. Started and stopped on any thread; all its work is done by one thread of its own.
//!
//! Any process that reaches the port may read and write, as in torch, unless a secret is set: so bind it to an address that only the job reaches, or
//! protect it by a firewall. The memory that a client can make it use is bounded: per request, for unsent replies, and in total.

mod connection;
mod daemon;
mod disconnect_log;
mod handler;
mod output;
mod waits;
mod watches;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::Waker;
use socket2::{Domain, Type};

use super::wire::Limits;
use crate::base::config::Secret;
use crate::base::fd::Socket;
use crate::base::fork::{self, PerProcess};
use crate::base::thread::{self, Cpus};
use crate::store::{Error, Result};
use daemon::Daemon;

/// How a server is set up.
#[derive(Debug)]
pub struct ServerOptions {
    /// The port; 0 for one of the system's choice.
    pub port: u16,
    /// The address to listen on; `None` for all, IPv6 and IPv4, as torch does.
    pub bind: Option<IpAddr>,
    /// A socket that is bound already (it may listen, too), instead of `port` and `bind`.
    pub socket: Option<OwnedFd>,
    /// The secret that clients must prove that they know. Torch's clients cannot.
    pub secret: Secret,
    /// How long a client may take to show that it speaks the protocol and, if there is a secret, to prove that it knows it. An admitted client may be idle
    /// without limit.
    pub admission: Duration,
    /// Limits of a request.
    pub limits: Limits,
    /// Bytes that values, queues, unread requests and unsent replies may take together. A client that exceeds it is
    /// disconnected; one that stores nothing and whose requests and replies are small never is.
    pub memory: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            port: super::DEFAULT_PORT,
            bind: None,
            socket: None,
            secret: Secret::default(),
            admission: Duration::from_secs(30),
            limits: Limits::default(),
            memory: 8 << 30,
        }
    }
}

/// A running server. Stops when dropped, after it has handled every request that had arrived.
pub struct Server {
    address: SocketAddr,
    bind: Option<IpAddr>,
    secret: Secret,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Mutex<Option<JoinHandle<()>>>,
    epoch: u64,
}

impl Server {
    /// Binds and starts.
    ///
    /// Errors: a port that is in use, an address that is not this machine's; no descriptors or threads left.
    pub fn start(options: ServerOptions) -> Result<Server> {
        let listener = match options.socket {
            Some(ref socket) => socket.try_clone().and_then(|socket| adopt(Socket::new(socket))).map_err(|e| cannot_listen(0, &e))?,
            None => listen(options.bind, options.port).map_err(|e| cannot_listen(options.port, &e))?,
        };
        let address = listener.local_addr().map_err(|e| Error::system("getsockname", e))?;
        let address = address.as_socket().ok_or_else(|| Error::Network("the store's socket is none of IP".into()))?;
        let stop = Arc::new(AtomicBool::new(false));
        let (daemon, waker) = Daemon::new(listener.convert(), &options, Arc::clone(&stop)).map_err(|e| Error::system("epoll", e))?;
        let thread = thread::spawn("railhead-store", &Cpus::default(), move || daemon.run());
        let thread = Mutex::new(Some(thread.map_err(|e| Error::system("start the store's thread", e))?));
        Ok(Server { address, bind: options.bind, secret: options.secret, stop, waker, thread, epoch: fork::epoch() })
    }

    /// The server of this process at the options' port, started if there is none: several stores of one process may name the same port.
    ///
    /// Errors: [`Error::Usage`] for one that listens elsewhere or has another secret; those of [`Server::start`].
    pub fn shared(options: ServerOptions) -> Result<Arc<Server>> {
        static SERVERS: PerProcess<HashMap<u16, Weak<Server>>> = PerProcess::new();
        SERVERS.with(|servers| {
            servers.retain(|_, server| server.strong_count() > 0);
            if let Some(server) = servers.get(&options.port).and_then(Weak::upgrade) {
                let other = |how: &str| Error::Usage(format!("port {}: this process serves a store there already, {how}", options.port));
                if server.bind != options.bind {
                    let shown = |bind: Option<IpAddr>| bind.map_or("all addresses".to_owned(), |ip| ip.to_string());
                    return Err(other(&format!("on {}, and not on {}", shown(server.bind), shown(options.bind))));
                }
                return if server.secret == options.secret { Ok(server) } else { Err(other("with another secret")) };
            }
            let server = Arc::new(Server::start(options)?);
            servers.insert(server.port(), Arc::downgrade(&server));
            Ok(server)
        })
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.epoch != fork::epoch() {
            // A forked child does not have the thread.
            std::mem::forget(thread);
            return;
        }
        // Release pairs with the Acquire load in `Daemon::run`.
        self.stop.store(true, Ordering::Release);
        let woken = self.waker.wake();
        if let Some(thread) = thread
            && woken.is_ok()
        {
            let _ = thread.join();
        }
    }
}

/// Torch's message, which users search for.
fn cannot_listen(port: u16, error: &io::Error) -> Error {
    Error::Network(format!(
        "The server socket has failed to listen on any local network address. port: {port}, code: -{}, message: {error}",
        error.raw_os_error().unwrap_or(0)
    ))
}

fn listen(bind: Option<IpAddr>, port: u16) -> io::Result<Socket> {
    let Some(addr) = bind else {
        return open(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).or_else(|_| open(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))));
    };
    open(SocketAddr::new(addr, port))
}

fn open(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(socket2::Socket::new(Domain::for_address(addr), Type::STREAM, None)?);
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(!addr.ip().is_unspecified())?;
    }
    socket.bind(&addr.into())?;
    adopt(socket)
}

fn adopt(socket: Socket) -> io::Result<Socket> {
    // As long as net.core.somaxconn allows: a whole job connects at once.
    socket.listen(i32::MAX)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
