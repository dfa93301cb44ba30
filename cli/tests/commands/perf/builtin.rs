//! The plugins inside NCCL's own library, by one that looks like it (tests/c/fake_nccl.c).

use std::path::{Path, PathBuf};
use std::process::Command;

use super::run::{Perf, built};

fn nccl(test: &str, more: &[&str]) -> PathBuf {
    built(&format!("libnccl_{test}.so"), "fake_nccl.c", more)
}

fn named(prefix: &str, file: &Path) -> PathBuf {
    format!("{prefix}:{}", file.display()).into()
}

#[test]
fn nccls_socket_is_found_by_its_symbol_and_connects_without_cuda() {
    let library = nccl("socket", &["-fvisibility=hidden"]);
    let page = Perf::new(&named("nccl", &library)).args(["--sizes", "8,4K", "--limits", "none", "--json"]).run().json();
    assert_eq!((&page["plugins"][0]["name"], &page["plugins"][0]["abi"]), (&"Fake".into(), &12.into()), "{page}");
    assert_eq!(page["rows"].as_array().map(Vec::len), Some(4));
    // As it is in the file, it does not connect: that is what stands in for the runtime.
    let plain = Perf::new(&nccl("plain", &["-DTABLE=ncclNetPlugin_v12"]));
    plain.args(["--sizes", "8"]).run().fails("connect returned 1 (ncclUnhandledCudaError)");
}

#[test]
fn a_library_without_the_table_is_refused_with_the_reason() {
    let library = nccl("refused", &["-fvisibility=hidden"]);
    Perf::new(&named("nccl-ib", &library)).run().fails("its symbol table shows no ncclNetIb: it is stripped, or it is not NCCL");
    Perf::new(&named("nccl", &library)).args(["--abi", "8"]).run().fails("its ncclNetSocket is of version 12");
    assert!(Command::new("strip").arg(&library).status().expect("strip").success());
    Perf::new(&named("nccl", &library)).run().fails("its symbol table shows no ncclNetSocket: it is stripped");
    Perf::new(Path::new("nccl:/nowhere")).run().fails("cannot load nccl:/nowhere: No such file");
}
