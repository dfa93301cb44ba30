//! Ranks of a mesh on real queue pairs.

use serde_json::Value;

use crate::MACHINE;

/// Runs a program as ranks 0 and 1 on two devices, so that frames cross between them, and says what rank 0 wrote.
const BOTH: &str = r#"
    export RAILHEAD_FABRIC=verbs LD_LIBRARY_PATH=.
    both() { # DEVICE DEVICE PROGRAM...
        local first=$1 second=$2 status
        shift 2
        rm -f /tmp/store
        "$@" --device $second --url "file:///tmp/store?rank=1&world_size=2" >/dev/null & other=$!
        "$@" --device $first --url "file:///tmp/store?rank=0&world_size=2"
        status=$?
        wait $other && return $status
    }
    sent() { cat /sys/class/net/v0/statistics/tx_bytes; }
"#;

/// Collectives, messages and buffers of slots, every result verified: between two devices, two pairs of devices as rails, and three ranks on one.
#[test]
fn ranks_compute_and_exchange() {
    let line = r#"
        bench() { name=$1; shift; echo "$name $("$@" --iteration-time 0.05 --json | tr -d '\n')"; }
        before=$(sent)
        bench devices both rxe0 rxe1 ./railhead mesh bench --what allreduce,broadcast,sendrecv,barrier --elements 1,1000,262144
        echo "crossed $(($(sent) - before))"
        bench rails both rxe0+rxe2 rxe1+rxe3 ./railhead mesh bench --what allreduce,alltoall --elements 262144
        bench three ./railhead mesh bench --ranks 3 --device rxe0 --what reduce,allgather --elements 5,30000
        both rxe0 rxe1 ./mesh_pair --bytes 100000 --messages 20"#;
    let Some(ran) = MACHINE.run(2, 300, &format!("{BOTH}{line}")) else { return };
    ran.passes().says("20 messages of 100000 bytes around 2 ranks").says("no byte wrong").says("rank 0 answered 1 ranks");
    let word = |name: &str| -> Value {
        let line = ran.output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        serde_json::from_str(line.unwrap_or_else(|| panic!("no line {name}"))).unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    for (name, rows) in [("devices", 3 * 3 + 1), ("rails", 2), ("three", 4)] {
        let all = word(name);
        assert_eq!(all.as_array().expect("rows").len(), rows, "{name}");
        for row in all.as_array().expect("rows") {
            println!("{name}: {} of {} bytes: {:.0} us", row["what"], row["bytes"], row["p50_us"].as_f64().expect("a time"));
        }
    }
    // At least what the warm-up of the largest sums has sent, by the device of the first rank.
    assert!(word("crossed").as_u64().is_some_and(|bytes| bytes > 5 << 20), "not over the devices");
}

/// By the end of its process: the device would try for ever.
#[test]
fn a_rank_that_is_killed_is_named_although_the_device_never_gives_up() {
    let line = r#"
        export RAILHEAD_FABRIC_TIMEOUT_S=86400
        rank() { exec ./mesh_allreduce --elements 100000 --rounds 1000000 --device rxe$1 --url "file:///tmp/store?rank=$1&world_size=2"; }
        before=$(sent)
        rank 1 & killed=$!
        rank 0 & other=$!
        while [ $(sent) -lt $((before + 4000000)) ]; do sleep 0.05; kill -0 $other || exit 1; done
        kill -KILL $killed
        wait $other
        echo "status $?""#;
    let Some(ran) = MACHINE.run(1, 150, &format!("{BOTH}{line}")) else { return };
    ran.passes().says("status 1").says("rank 1: ").says("its process died");
    assert!(!ran.output.contains("waited for"), "it took as long as a wait may");
}
