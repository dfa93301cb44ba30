//! The plugin over its C interface: ranks that are processes of their own load it as NCCL does. One program for all of these tests, so that
//! their waits overlap; no test here touches what is the whole process's, which is what ranks are for.

mod support;

/// The tests, by subject.
mod plugin {
    pub mod basic;
    pub mod close_first;
    pub mod concurrency;
    pub mod dump_signal;
    pub mod faults;
    pub mod fork;
    pub mod handshake;
    pub mod hostile;
    pub mod idle;
    pub mod last_call;
    pub mod lost_peer;
    pub mod mapped;
    pub mod multi_recv;
    pub mod namespaces;
    pub mod progress;
    pub mod proxy;
    pub mod proxy_ends;
    pub mod proxy_errors;
    pub mod rails;
    pub mod ready_flag;
    pub mod registration;
    pub mod reload;
    #[cfg(feature = "stages")]
    pub mod stages;
    pub mod stall;
    pub mod steady_state;
}

use plugin::*;

#[test]
fn child_entry() {
    let roles = [
        basic::ROLES,
        close_first::ROLES,
        concurrency::ROLES,
        dump_signal::ROLES,
        faults::ROLES,
        fork::ROLES,
        handshake::ROLES,
        hostile::ROLES,
        idle::ROLES,
        last_call::ROLES,
        lost_peer::ROLES,
        mapped::ROLES,
        multi_recv::ROLES,
        namespaces::ROLES,
        progress::ROLES,
        proxy::ROLES,
        proxy_ends::ROLES,
        proxy_errors::ROLES,
        rails::ROLES,
        ready_flag::ROLES,
        registration::ROLES,
        reload::ROLES,
        #[cfg(feature = "stages")]
        stages::ROLES,
        stall::ROLES,
        steady_state::ROLES,
    ];
    support::enter(&roles.concat());
}
