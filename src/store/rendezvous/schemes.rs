//! The schemes that torch has: tcp, env and file.

use std::sync::Arc;
use std::time::Duration;

use super::{Environment, Handler, Joined, RendezvousArgs, integer};
use crate::store::tcp::{Host, ServerOptions, TcpOptions};
use crate::store::{Error, FileStore, Result, Store, TcpStore};

/// The handler of a scheme that is always there.
pub fn built_in(scheme: &str) -> Option<Handler> {
    match scheme {
        "tcp" => Some(Arc::new(tcp)),
        "env" => Some(Arc::new(env)),
        "file" => Some(Arc::new(file)),
        _ => None,
    }
}

/// `tcp://host:port?rank=R&world_size=N`: rank 0 runs the server.
fn tcp(args: &RendezvousArgs) -> Result<Joined> {
    let url = &args.url;
    let error = |what: &str| failed("tcp", what);
    let port = url.port()?.ok_or_else(|| error("port number missing"))?;
    let (rank, world_size) = ranks(args, "tcp")?;
    let host = url.host().ok_or_else(|| Error::Usage("hostname cannot be None".into()))?;
    tcp_store(host, port, rank, world_size, args.timeout, &args.environment)
}

/// `env://[?rank=R&world_size=N]`: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
fn env(args: &RendezvousArgs) -> Result<Joined> {
    let environment = &args.environment;
    let expected = |name: &str| failed("env", &format!("environment variable {name} expected, but not set"));
    let number = |name: &str, variable: &str, value: Option<String>| match args.url.query(name) {
        Some(text) => integer(text?),
        None => integer(&value.ok_or_else(|| expected(variable))?),
    };
    let rank = number("rank", "RANK", environment.rank())?;
    let world_size = number("world_size", "WORLD_SIZE", environment.world_size())?;
    let host = environment.get("MASTER_ADDR").ok_or_else(|| expected("MASTER_ADDR"))?;
    let port = integer(&environment.get("MASTER_PORT").ok_or_else(|| expected("MASTER_PORT"))?)?;
    let port = u16::try_from(port).map_err(|_| Error::Usage(format!("port must have value from 0 to 65535 but was {port}.")))?;
    tcp_store(&host, port, rank, world_size, args.timeout, environment)
}

/// `file:///path?rank=R&world_size=N`: a file that all can reach.
fn file(args: &RendezvousArgs) -> Result<Joined> {
    let path = args.url.path();
    if path.is_empty() {
        return Err(failed("file", "path missing"));
    }
    let (rank, world_size) = ranks(args, "file")?;
    let store = FileStore::new(path, usize::try_from(world_size).ok())?;
    Ok(Joined { store: Arc::new(store), rank, world_size })
}

fn ranks(args: &RendezvousArgs, scheme: &str) -> Result<(i64, i64)> {
    let rank = args.url.required("rank", || failed(scheme, "rank parameter missing"))?;
    let world_size = args.url.required("world_size", || failed(scheme, "world size parameter missing"))?;
    Ok((integer(rank)?, integer(world_size)?))
}

/// The store at this address, on a server that torchrun's agent or rank 0 runs.
fn tcp_store(host: &str, port: u16, rank: i64, world_size: i64, timeout: Duration, environment: &Environment) -> Result<Joined> {
    let known = match world_size {
        0 => return Err(Error::Usage("TCPStore world size cannot be 0".into())),
        _ => usize::try_from(world_size).ok(),
    };
    let secret = environment.secret()?;
    let host = if rank != 0 || environment.agent_serves(host, port) {
        if port == 0 {
            return Err(Error::Usage(format!("port 0: rank {rank} cannot know which port rank 0 was given")));
        }
        Host::Other(host.to_owned(), port)
    } else {
        let (bind, secret) = (environment.bind()?, secret.clone());
        Host::Shared(host.to_owned(), ServerOptions { port, bind, secret, ..ServerOptions::default() })
    };
    let store = TcpStore::new(host, TcpOptions { world_size: known, timeout, secret, ..TcpOptions::default() })?;
    let store: Arc<dyn Store> = Arc::new(store);
    Ok(Joined { store, rank, world_size })
}

/// Torch's message, which users search for.
fn failed(scheme: &str, what: &str) -> Error {
    Error::Usage(format!("Error initializing torch.distributed using {scheme}:// rendezvous: {what}"))
}
