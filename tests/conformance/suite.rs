//! The clauses by name, for each bed a test: all of them, or those that ask something of a device.

/// One test per clause.
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
            if super::BED.asks(concat!(stringify!($module), "::", stringify!($clause))) {
                crate::conformance::$module::$clause(&super::BED);
            }
        }
    };
}

/// All clauses.
#[allow(unused_macros)]
macro_rules! conforms {
    ($($(#[$needs:meta])? $bed:ident: $value:expr;)*) => {
        $(suite! { [$(#[$needs])?] $bed: $value;
            order { writes, sends, mixed_against_an_oracle, overlapping_writes, both_directions_from_two_threads }
            size { zero_length, inline_of_every_length, inline_is_copied_while_posting, inline_limits, every_threshold, at_odd_addresses }
            receive {
                send_longer_than_receive, send_with_immediate, rnr_waits_for_ever, a_long_wait_one_way_leaves_the_other_alone, rnr_limit,
                write_with_imm_waits_for_receive, receive_scatter_is_exact, write_consumes_no_receive, receives_posted_before_connect,
            }
            keys {
                bad_remote_key, stale_remote_key, guessed_remote_key, bad_remote_bounds, bad_remote_access, bad_local_key, bad_receive_key,
                foreign_qp_keeps_working,
            }
            error {
                flush_reports_all_in_order, set_error_is_learnt_by_peer, posting_in_wrong_state, connecting_twice_or_to_nonsense,
                peer_destroyed, peer_queue_dropped, peer_destroyed_before_connect, peer_destroyed_with_nothing_outstanding,
            }
            connect {
                work_before_connect, work_before_peer_connects, either_side_first, connected_to_itself, many_queue_pairs_on_one_queue,
                two_peers_on_one_queue, peer_stops_polling, pairs_in_many_threads,
            }
            notify {
                arm_then_drain, wakes_a_sleeper, what_is_drained_uses_up_no_notification, no_lost_wakeup, needs_a_notifying_queue, error_notifies,
                nothing_wakes_an_idle_sleeper, what_is_posted_after_arming_gets_out,
            }
            queue {
                full_send_queue, full_receive_queue, batch_is_all_or_nothing, counters_wrap, unsignaled, unsignaled_failure_is_reported,
                what_can_wait_is_sent, memory_of_what_is_sent_is_free, poll_takes_no_more_than_asked,
            }
            reset {
                goes_on_as_the_next_generation, refused_unless_drained, generations_do_not_meet, nothing_lands_after_it, a_hundred_generations,
            }
            read { every_size, many_outstanding, ordered_after_write, into_memory_that_may_not_be_written }
            publish { no_torn_slot, unaligned_or_long_writes_are_whole_at_completion }
            churn {
                deregistration_in_flight, source_deregistration_in_flight, destruction_in_flight, a_thousand_lives,
                registration_from_other_threads,
            }
            wire {
                bytes_take_the_path, cross_memory_attach_refused, both_sides_copy, both_sides_copy_behind_short_writes, the_last_write_to_a_place_stays,
                writing_refused, counters_count, silence_is_bounded,
            }
        })*
    };
}

/// The clauses in which it matters who moves the bytes of a WRITE.
#[allow(unused_macros)]
macro_rules! conforms_as_shared_memory {
    ($($(#[$needs:meta])? $bed:ident: $value:expr;)*) => {
        $(suite! { [$(#[$needs])?] $bed: $value;
            placed {
                once_the_key_is_known, behind_what_the_peer_moves, either_side_copies_what_both_map, keys_and_bounds_are_the_owners,
                more_than_is_mapped
            }
            order { writes, mixed_against_an_oracle, overlapping_writes, both_directions_from_two_threads }
            size { zero_length, inline_of_every_length, every_threshold, at_odd_addresses }
            receive { rnr_waits_for_ever, write_with_imm_waits_for_receive, write_consumes_no_receive }
            keys { bad_remote_key, stale_remote_key, bad_remote_bounds, bad_remote_access, bad_local_key, foreign_qp_keeps_working }
            error { flush_reports_all_in_order, peer_destroyed }
            connect { peer_stops_polling, pairs_in_many_threads }
            reset { goes_on_as_the_next_generation, nothing_lands_after_it }
            notify { wakes_a_sleeper, what_is_drained_uses_up_no_notification, what_is_posted_after_arming_gets_out, no_lost_wakeup }
            read { every_size, ordered_after_write }
            publish { no_torn_slot, unaligned_or_long_writes_are_whole_at_completion }
            churn { source_deregistration_in_flight, destruction_in_flight }
            wire { the_last_write_to_a_place_stays }
        })*
    };
}

/// The clauses in which a device does what memory that performs everything at once does not. In the others it is our own counting and
/// checking that is tried, for which the memory-only libibverbs is as good and a hundred times faster than a machine with devices.
#[allow(unused_macros)]
macro_rules! conforms_as_a_device {
    ($($(#[$needs:meta])? $bed:ident: $value:expr;)*) => {
        $(suite! { [$(#[$needs])?] $bed: $value;
            // It cuts messages into packets and acknowledges them later: what is in order at the other end is its doing.
            order { writes, sends, mixed_against_an_oracle }
            // It has lengths of its own: inline, and those of a packet.
            size { zero_length, inline_limits, every_threshold }
            // It waits for receives by itself, repeats, and gives up.
            receive { send_longer_than_receive, rnr_waits_for_ever, rnr_limit, write_with_imm_waits_for_receive, receive_scatter_is_exact }
            // It compares keys, bounds and rights, and it is at the other end that the answer is made.
            keys { bad_remote_key, stale_remote_key, bad_remote_bounds, bad_remote_access, bad_local_key, bad_receive_key }
            // It flushes, and notices a peer that no longer answers.
            error { flush_reports_all_in_order, set_error_is_learnt_by_peer, posting_in_wrong_state, peer_destroyed }
            // It drops what comes before it is ready to receive.
            connect { work_before_peer_connects, connected_to_itself }
            // It flushes what is posted in ERROR, goes through its states again, and drops packets with a number that is not expected.
            reset { goes_on_as_the_next_generation, generations_do_not_meet, nothing_lands_after_it }
            // Its events come through the kernel.
            notify { arm_then_drain, wakes_a_sleeper, no_lost_wakeup, error_notifies }
            // Its queues have their own bounds, and it tells of a failure that nobody asked for.
            queue { full_send_queue, full_receive_queue, unsignaled, unsignaled_failure_is_reported }
            // READs are answered by it alone, and at most so many at a time.
            read { every_size, many_outstanding, ordered_after_write, into_memory_that_may_not_be_written }
            // The order in which it stores a message's bytes.
            publish { no_torn_slot }
            // It is still copying when memory or a queue pair goes.
            churn { deregistration_in_flight, source_deregistration_in_flight, destruction_in_flight }
            // Its own patience ends nothing early.
            wire { bytes_take_the_path, silence_is_bounded }
        })*
    };
}
