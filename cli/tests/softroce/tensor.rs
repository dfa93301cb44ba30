//! Workers that exchange tensors on real queue pairs.

use crate::MACHINE;

/// Runs a program as so many workers, on two devices by turns, so that frames cross between them; says what the first one wrote.
const ALL: &str = r#"
    export RAILHEAD_FABRIC=verbs LD_LIBRARY_PATH=.
    worker() { # NUMBER WORKERS PROGRAM...
        local number=$1 workers=$2
        shift 2
        exec "$@" --device rxe$((number % 2)) --url "file:///tmp/store?rank=$number&world_size=$workers"
    }
    all() { # WORKERS PROGRAM...
        local workers=$1 others= status=0 number
        shift
        rm -f /tmp/store
        for number in $(seq 1 $((workers - 1))); do
            worker $number $workers "$@" >/dev/null & others="$others $!"
        done
        (worker 0 $workers "$@") || status=1
        for number in $others; do wait $number || status=1; done
        return $status
    }
    sent() { cat /sys/class/net/v0/statistics/tx_bytes; }
"#;

#[test]
fn workers_exchange_tensors() {
    let line = r#"
        before=$(sent)
        for mode in "" --direct; do
            all 3 ./tensor_pipeline --bytes 500000 $mode || exit 1
            all 5 ./tensor_params --elements 30000 $mode || exit 1
        done
        echo "crossed $(($(sent) - before))""#;
    let Some(ran) = MACHINE.run(1, 150, &format!("{ALL}{line}")) else { return };
    ran.passes();
    for line in ["3 steps, no byte wrong, and one that was aborted", "4 steps of 4 workers, no parameter wrong"] {
        assert_eq!(ran.output.matches(line).count(), 2, "in both modes: {}", ran.output);
    }
    let crossed = ran.output.lines().find_map(|line| line.strip_prefix("crossed ")?.parse::<u64>().ok());
    // A consumer's tensors alone.
    assert!(crossed.is_some_and(|bytes| bytes > 6_000_000), "{crossed:?}: not over the devices");
}

/// By the end of its process: the device would try for ever.
#[test]
fn a_worker_that_is_killed_is_named() {
    let line = r#"
        rm -f /tmp/store
        before=$(sent)
        (worker 0 3 ./tensor_pipeline --bytes 1000 --steps 1000000) & killed=$!
        (worker 1 3 ./tensor_pipeline --bytes 1000 --steps 1000000) & first=$!
        (worker 2 3 ./tensor_pipeline --bytes 1000 --steps 1000000) & second=$!
        while [ $(sent) -lt $((before + 1000000)) ]; do sleep 0.05; kill -0 $first || exit 1; done
        kill -KILL $killed
        wait $first; echo "first $?"
        wait $second; echo "second $?""#;
    let Some(ran) = MACHINE.run(1, 150, &format!("{ALL}{line}")) else { return };
    ran.passes().says("first 1").says("second 1").says("worker /job:producer/task:0: ").says("its process died");
}
