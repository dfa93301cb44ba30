//! What only an RDMA device can show, on real queue pairs: the kernel's Soft-RoCE, in the virtual machine of `tests/softroce/vm`. One machine for the
//! fabric, the plugin and the program, as it takes a while to start. Where it cannot be had, each test prints one line that says why.

#[path = "../../tests/support/softroce.rs"]
mod machine;
#[path = "../../tests/support/mod.rs"]
mod support;

/// The fabric's clauses, by subject.
#[macro_use]
#[path = "../../tests/conformance"]
#[allow(dead_code)]
mod conformance {
    #[macro_use]
    pub mod suite;

    pub mod bed;
    pub mod churn;
    pub mod connect;
    pub mod error;
    pub mod keys;
    pub mod notify;
    pub mod order;
    pub mod publish;
    pub mod queue;
    pub mod read;
    pub mod receive;
    pub mod reset;
    pub mod size;
    pub mod wire;
}

mod softroce {
    mod commands;
    mod mesh;
    pub mod plugin;
    mod tensor;
}

use std::path::{Path, PathBuf};
use std::process::Command;

use conformance::bed::{Bed, Wire};
use machine::{Machine, library};
use railhead::base::config::Fabric;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const HARNESS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/softroce/vm");

/// With the plugin in it, the program, examples in C, built as a user builds them, and these tests.
static MACHINE: Machine = Machine::new(|| {
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("softroce");
    let mut make = Command::new("make");
    make.args(["-s", "-C", &format!("{ROOT}/c_examples"), "pingpong", "store", "mesh", "tensor", "proxy"])
        .arg(format!("BUILD={}", build.display()));
    make.arg(format!("RAILHEAD_LIB={}", library().parent().expect("a folder").display()));
    let output = make.env_remove("MAKEFLAGS").output().expect("make");
    assert!(output.status.success(), "make: {}", String::from_utf8_lossy(&output.stderr));
    let examples = "plugin_pingpong rendezvous_ping mesh_allreduce mesh_pair tensor_pipeline tensor_params proxy_stream proxy_shared \
                    proxy_producer proxy_sendrecv";
    let mut files: Vec<(PathBuf, String)> = examples.split(' ').map(|name| (build.join(name), name.to_string())).collect();
    files.push((library(), "librailhead.so".into()));
    files.push((PathBuf::from(env!("CARGO_BIN_EXE_railhead")), "railhead".into()));
    files.push((std::env::current_exe().expect("current_exe"), "softroce".into()));
    files
});

#[test]
fn child_entry() {
    support::enter(softroce::plugin::ROLES);
}

// Soft-RoCE takes 7 retries for endless ones; 6 of 67 ms each notice a dead peer after half a second.
conforms_as_a_device! {
    #[ignore = "runs in the virtual machine"]
    verbs: Bed {
        name: "verbs", wire: Wire::Nic, configure: |c| (c.fabric, c.ib_timeout, c.ib_retry_cnt) = (Fabric::Verbs, 14, 6), simulated: None
    };
}

/// The fabric's clauses that ask something of a device. The knobs are turned down to an emulated CPU's.
#[test]
fn the_fabric_conforms() {
    let line = "RHT_PUBLISHES=5000 ./softroce --ignored verbs:: --test-threads 2 --nocapture";
    let Some(ran) = MACHINE.run(1, 900, line) else { return };
    ran.passes().says("test verbs::order::writes ... ok").says("; 0 failed; 0 ignored;");
}
