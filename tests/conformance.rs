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

use conformance::bed::{Bed, Wire};
use railhead::base::config::{CrossMemory, SoftWire};

/// One test per clause and bed.
macro_rules! suite {
    ($bed:ident: $value:expr; $($module:ident { $($clause:ident),* $(,)? })*) => {
        mod $bed {
            use super::*;
            static BED: Bed = $value;
            $(mod $module {
                $(#[test]
                fn $clause() {
                    crate::conformance::$module::$clause(&super::BED);
                })*
            })*
        }
    };
}

macro_rules! conforms {
    ($($bed:ident: $value:expr;)*) => {
        $(suite! { $bed: $value;
            order { writes, sends, mixed_against_an_oracle, overlapping_writes, both_directions_from_two_threads }
            size { zero_length, inline_of_every_length, inline_is_copied_while_posting, inline_limits, every_threshold, at_odd_addresses }
            receive {
                send_longer_than_receive, send_with_immediate, rnr_waits_for_ever, rnr_limit, write_with_imm_waits_for_receive,
                receive_scatter_is_exact, write_consumes_no_receive, receives_posted_before_connect,
            }
            keys { bad_remote_key, stale_remote_key, bad_remote_bounds, bad_remote_access, bad_local_key, bad_receive_key, foreign_qp_keeps_working }
            error {
                flush_reports_all_in_order, set_error_is_learnt_by_peer, posting_in_wrong_state, connecting_twice_or_to_nonsense,
                peer_destroyed, peer_queue_dropped, peer_destroyed_before_connect, peer_destroyed_with_nothing_outstanding,
            }
            connect {
                work_before_connect, work_before_peer_connects, either_side_first, connected_to_itself, many_queue_pairs_on_one_queue,
                two_peers_on_one_queue, peer_stops_polling, pairs_in_many_threads,
            }
            notify { arm_then_drain, wakes_a_sleeper, no_lost_wakeup, needs_a_notifying_queue, error_notifies }
            queue { full_send_queue, full_receive_queue, batch_is_all_or_nothing, counters_wrap, unsignaled, unsignaled_failure_is_reported, poll_takes_no_more_than_asked }
            read { every_size, many_outstanding, ordered_after_write, into_memory_that_may_not_be_written }
            publish { no_torn_slot, unaligned_or_long_writes_are_whole_at_completion }
            churn { deregistration_in_flight, source_deregistration_in_flight, destruction_in_flight, ten_thousand_lives, registration_from_other_threads }
            wire {
                bytes_take_the_path, cross_memory_attach_refused, both_sides_copy, the_last_write_to_a_place_stays, writing_refused,
                counters_count
            }
        })*
    };
}

conforms! {
    soft_shm: Bed { name: "soft_shm", wire: Wire::Shm, configure: |c| (c.soft_wire, c.cma) = (SoftWire::Shm, CrossMemory::Always) };
    soft_tcp: Bed { name: "soft_tcp", wire: Wire::Tcp, configure: |c| c.soft_wire = SoftWire::Tcp };
}
