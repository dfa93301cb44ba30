//! The C boundary: what NCCL, RCCL and C programs load. Casts, checks and status codes; what the calls mean is `net`'s business.
//!
//! * [`boundary`]: nothing unwinds into C, every pointer is checked, errors become status codes here and nowhere else.
//! * [`handle`], [`comm_table`]: what C holds for a comm, a request or a registration is an opaque number, looked up on every call.
//! * [`plugin`]: the calls of the plugin on plain values, the same for every ABI version; [`instance`]: the state of the process that they work on.
//! * [`nccl`]: the tables `ncclNetPlugin_v4` to `ncclNetPlugin_v12`, one file per version.
//! * [`version`], [`memory`], [`store`], [`watch`], [`rendezvous`], [`proxy`], [`connector`], [`mesh`], [`buffer`],
//!   [`collective`], [`tensor`], [`status`]: the library's own C functions, `railhead_*`; [`objects`]: what
//!   their handles name.
//! * [`table`]: any plugin's table, ours included, as the proxy's network; [`proxies`]: the proxies of this process.

pub mod boundary;
pub mod buffer;
pub mod collective;
pub mod comm_table;
pub mod connector;
pub mod handle;
pub mod instance;
pub mod memory;
pub mod mesh;
pub mod nccl;
pub mod objects;
pub mod plugin;
pub mod proxies;
pub mod proxy;
pub mod rendezvous;
pub mod status;
pub mod store;
pub mod table;
pub mod tensor;
pub mod version;
pub mod watch;
