//! What every store promises, tried on each: an oracle's answers to random operations, and what happens between threads.

#[path = "store/contract.rs"]
mod contract;
#[path = "store/model.rs"]
mod model;

use std::sync::Arc;

use contract::{Bed, contract};
use railhead::store::tcp::{Host, ServerOptions, TcpOptions};
use railhead::store::{FileStore, HashStore, PrefixStore, Store, TcpStore};

contract!(hash, || {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    Bed::new(move || Arc::clone(&store))
});

contract!(prefix, || {
    let around = Arc::new(HashStore::new());
    for other in ["k0", "grp", "grpx/k0", "other/k1"] {
        around.set(other, b"not ours").unwrap();
    }
    let around: Arc<dyn Store> = around;
    Bed { own_keys: 4, ..Bed::new(move || Arc::new(PrefixStore::new("grp", Arc::clone(&around)))) }
});

contract!(prefix_in_prefix, || {
    let around: Arc<dyn Store> = Arc::new(HashStore::new());
    let outer: Arc<dyn Store> = Arc::new(PrefixStore::new("default_pg", around));
    Bed::new(move || Arc::new(PrefixStore::new("0", Arc::clone(&outer))))
});

fn tcp() -> Arc<TcpStore> {
    let server = ServerOptions { port: 0, ..ServerOptions::default() };
    Arc::new(TcpStore::new(Host::Own("localhost".into(), server), TcpOptions::default()).unwrap())
}

contract!(tcp, || {
    let first = super::tcp();
    Bed::new(move || Arc::new(first.reconnect().unwrap()))
});

contract!(prefix_in_tcp, || {
    let first = super::tcp();
    first.set("k0", b"not ours").unwrap();
    Bed { own_keys: 1, ..Bed::new(move || Arc::new(PrefixStore::new("grp", Arc::new(first.reconnect().unwrap())))) }
});

contract!(file, || {
    let folder = tempfile::tempdir().unwrap();
    // It counts the stores that use it, under a key that counts as well.
    let first = FileStore::new(folder.path().join("store"), None).unwrap();
    Bed {
        own_keys: 1,
        queues: false,
        watches: false,
        ..Bed::new(move || {
            // Moved along, so that the folder lives as long as the handles' maker.
            let _ = &folder;
            Arc::new(FileStore::new(first.path(), None).unwrap())
        })
    }
});
