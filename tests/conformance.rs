//! The fabric's conformance suite: each clause of the contract in `src/fabric/mod.rs`, on each provider and wire.
//!
//! The clauses are functions over a [`Bed`](conformance::bed::Bed); a new provider is one more line at the end of this file.

/// The clauses, by subject.
mod conformance {
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
    pub mod size;
    pub mod wire;
}

#[path = "support/fake_ibverbs.rs"]
mod fake_ibverbs;
#[path = "support/softroce.rs"]
mod softroce;

use conformance::bed::{Bed, Wire};
use railhead::base::config::{CrossMemory, Fabric, SoftWire};

/// One test per clause and bed.
macro_rules! suite {
    ($needs:tt $bed:ident: $value:expr; $($module:ident { $($clause:ident),* $(,)? })*) => {
        mod $bed {
            use super::*;
            static BED: Bed = $value;
            $(mod $module {
                $(clause! { $needs $module $clause })*
            })*
        }
    };
}

macro_rules! clause {
    ([$(#[$needs:meta])?] $module:ident $clause:ident) => {
        #[test]
        $(#[$needs])?
        fn $clause() {
            crate::conformance::$module::$clause(&super::BED);
        }
    };
}

macro_rules! conforms {
    ($($(#[$needs:meta])? $bed:ident: $value:expr;)*) => {
        $(suite! { [$(#[$needs])?] $bed: $value;
            order { writes, sends, mixed_against_an_oracle, overlapping_writes, both_directions_from_two_threads }
            size { zero_length, inline_of_every_length, inline_is_copied_while_posting, inline_limits, every_threshold, at_odd_addresses }
            receive {
                send_longer_than_receive, send_with_immediate, rnr_waits_for_ever, a_long_wait_one_way_leaves_the_other_alone, rnr_limit, write_with_imm_waits_for_receive,
                receive_scatter_is_exact, write_consumes_no_receive, receives_posted_before_connect,
            }
            keys { bad_remote_key, stale_remote_key, guessed_remote_key, bad_remote_bounds, bad_remote_access, bad_local_key, bad_receive_key, foreign_qp_keeps_working }
            error {
                flush_reports_all_in_order, set_error_is_learnt_by_peer, posting_in_wrong_state, connecting_twice_or_to_nonsense,
                peer_destroyed, peer_queue_dropped, peer_destroyed_before_connect, peer_destroyed_with_nothing_outstanding,
            }
            connect {
                work_before_connect, work_before_peer_connects, either_side_first, connected_to_itself, many_queue_pairs_on_one_queue,
                two_peers_on_one_queue, peer_stops_polling, pairs_in_many_threads,
            }
            notify { arm_then_drain, wakes_a_sleeper, no_lost_wakeup, needs_a_notifying_queue, error_notifies, nothing_wakes_an_idle_sleeper }
            queue { full_send_queue, full_receive_queue, batch_is_all_or_nothing, counters_wrap, unsignaled, unsignaled_failure_is_reported, poll_takes_no_more_than_asked }
            read { every_size, many_outstanding, ordered_after_write, into_memory_that_may_not_be_written }
            publish { no_torn_slot, unaligned_or_long_writes_are_whole_at_completion }
            churn { deregistration_in_flight, source_deregistration_in_flight, destruction_in_flight, ten_thousand_lives, registration_from_other_threads }
            wire {
                bytes_take_the_path, cross_memory_attach_refused, both_sides_copy, the_last_write_to_a_place_stays, writing_refused,
                counters_count, silence_is_bounded,
            }
        })*
    };
}

conforms! {
    soft_shm: Bed { name: "soft_shm", wire: Wire::Shm, configure: |c| {
        (c.fabric, c.soft_wire, c.cma) = (Fabric::Soft, SoftWire::Shm, CrossMemory::Always);
    } };
    soft_tcp: Bed { name: "soft_tcp", wire: Wire::Tcp, configure: |c| (c.fabric, c.soft_wire) = (Fabric::Soft, SoftWire::Tcp) };
    // Soft-RoCE takes 7 retries for endless ones; 6 of 67 ms each notice a dead peer after half a second.
    #[ignore = "needs an RDMA device; verbs_conforms_on_soft_roce runs it in a virtual machine that has one"]
    verbs: Bed { name: "verbs", wire: Wire::Nic, configure: |c| (c.fabric, c.ib_timeout, c.ib_retry_cnt) = (Fabric::Verbs, 14, 6) };
}

/// The clauses of `verbs`, on the kernel's Soft-RoCE, by this program in a virtual machine. Its knobs are turned down to an emulated CPU's.
#[test]
fn verbs_conforms_on_soft_roce() {
    static MACHINE: softroce::Machine =
        softroce::Machine::new(|| vec![(std::env::current_exe().expect("current_exe"), "conformance".into())]);
    let line = "RHT_LIVES=200 RHT_PUBLISHES=20000 ./conformance --ignored verbs:: --test-threads 2 --nocapture";
    let Some(ran) = MACHINE.run(1, 900, line) else { return };
    ran.passes().says("test verbs::order::writes ... ok").says("; 0 failed; 0 ignored;");
}

/// The same clauses on a libibverbs that performs everything at once, in memory: what is the provider's own fault shows in seconds, without a
/// machine. That a device does what it is asked for, it does not show.
#[test]
fn verbs_conforms_on_memory() {
    let fake = fake_ibverbs::Fake::new(fake_ibverbs::NEWEST).env("RHT_LIVES", "1000").env("RHT_PUBLISHES", "20000");
    fake.env("RAILHEAD_DEBUG", "none").run_all(&["verbs::"]).says("; 0 failed; 0 ignored;");
}
