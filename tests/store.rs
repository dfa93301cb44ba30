//! The store: what each kind of it promises, its server and clients, its C interface, rendezvous, and real torch on either side; and the Python
//! package, which needs torch, too. One program for all of these tests, so that their waits overlap.

#[path = "support/ports.rs"]
mod ports;

/// The tests, by subject.
mod store {
    pub mod abi;
    pub mod clients;
    pub mod file;
    pub mod promises;
    pub mod python;
    pub mod rendezvous;
    pub mod tcp;
    pub mod torch;
}
