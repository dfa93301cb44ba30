//! What every store promises, tried on each: an oracle's answers to random operations, and what happens between threads.

mod contract;
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
    Bed { empty_is_zero: false, ..Bed::new(move || Arc::new(first.reconnect().unwrap())) }
});

contract!(prefix_in_tcp, || {
    let first = super::tcp();
    first.set("k0", b"not ours").unwrap();
    let make = move || Arc::new(PrefixStore::new("grp", Arc::new(first.reconnect().unwrap()))) as Arc<dyn Store>;
    Bed { own_keys: 1, empty_is_zero: false, ..Bed::new(make) }
});

contract!(file, || {
    let folder = tempfile::tempdir().unwrap();
    // It counts the stores that use it, under a key that counts as well.
    let first = FileStore::new(folder.path().join("store"), None).unwrap();
    Bed {
        own_keys: 1,
        queues: false,
        deletes_all: true,
        ..Bed::new(move || {
            // Moved along, so that the folder lives as long as the handles' maker.
            let _ = &folder;
            Arc::new(FileStore::new(first.path(), None).unwrap())
        })
    }
});

#[test]
fn everything_of_a_name_space_stands_behind_its_prefix() {
    let around = Arc::new(HashStore::new());
    let space = PrefixStore::new("grp", Arc::clone(&around) as Arc<dyn Store>);
    space.barrier("bar", 1, contract::LONG).unwrap();
    space.set("k", b"v").unwrap();
    space.queue_push("q", b"v").unwrap();
    let mut keys = around.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["grp/bar/last_member", "grp/bar/num_members", "grp/k"]);
    assert_eq!(around.queue_len("grp/q").unwrap(), 1);
    assert!(Arc::ptr_eq(space.underlying(), &(Arc::clone(&around) as Arc<dyn Store>)));

    let server = tcp();
    let store: Arc<dyn Store> = Arc::clone(&server) as Arc<dyn Store>;
    PrefixStore::new("grp", store).barrier("bar", 1, contract::LONG).unwrap();
    assert_eq!(server.get("grp/bar", contract::LONG).unwrap(), b"1");
    let expired = PrefixStore::new("grp", server as Arc<dyn Store>).wait(&["a", "b"], std::time::Duration::ZERO).unwrap_err();
    assert_eq!(expired.to_string(), "wait timeout after 0ms, keys: /grp/a, /grp/b");
}
