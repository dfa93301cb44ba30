//! The ends of what may be asked for: each is measured, and what lies beyond is refused with the value and the range.

use super::run::{Perf, library, positive};

/// Of each row: bytes, outstanding, comms, both ways.
type Shape = (u64, u64, u64, bool);

/// Measures bandwidth as the arguments say; the shapes of the rows.
fn rows(args: &[&str]) -> Vec<Shape> {
    let common = ["--json", "--what", "bandwidth", "--limits", "none", "--rounds", "1", "--round-ms", "1", "--timeout", "600"];
    let report = Perf::new(&library()).args(common).args(args).run().json();
    let row = |row: &serde_json::Value| {
        let number = |name: &str| row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}"));
        let figure = &row["plugins"][0];
        if number("size") > 0 {
            positive(&figure["figure"]);
        }
        assert!(figure["messages_per_s"].as_f64() > Some(0.0), "{row}");
        (number("size"), number("outstanding"), number("comms"), row["two_way"] == true)
    };
    report["rows"].as_array().expect("rows").iter().map(row).collect()
}

#[test]
fn fewest_and_most_comms_and_requests_go_in_one_and_in_both_directions() {
    for (direction, both) in [("one", false), ("two", true)] {
        let shapes = rows(&["--sizes", "0,64K", "--outstanding", "1,32", "--comms", "1,8", "--direction", direction]);
        let mut wanted = Vec::new();
        for comms in [1, 8] {
            for outstanding in [1, 32] {
                wanted.extend([0, 65536].map(|size| (size, outstanding, comms, both)));
            }
        }
        assert_eq!(shapes, wanted);
    }
}

const LARGEST: u64 = 64 << 20;

#[test]
fn the_largest_message_goes_as_often_as_may_be() {
    let info = std::fs::read_to_string("/proc/meminfo").expect("meminfo");
    let free = info.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    // In a long run 2 GiB in each rank, which tables before v8 cannot register in one piece.
    let most = crate::support::repeats(2, 32);
    if free.is_some_and(|kilobytes| kilobytes < 8 << 20) && most == 32 {
        println!("SKIP: 4 GiB of buffers need 8 GiB of free memory");
        return;
    }
    let outstanding = most.to_string();
    assert_eq!(rows(&["--sizes", "64M", "--outstanding", &outstanding, "--abi", "7"]), [(LARGEST, most as u64, 1, false)]);
    assert_eq!(rows(&["--sizes", "64M", "--outstanding", "1", "--direction", "two"]), [(LARGEST, 1, 1, true)]);
}

#[test]
fn what_lies_beyond_is_refused_with_value_and_range() {
    for (arguments, message) in [
        (["--sizes", "67108865"], "--sizes: \"67108865\" is no size from 0 to 64M"),
        (["--sizes", "8..65M"], "--sizes: \"65M\" is no size from 0 to 64M"),
        (["--sizes", "-1"], "--sizes: \"-1\" is no size from 0 to 64M"),
        (["--outstanding", "0"], "--outstanding: \"0\" is no number from 1 to 32"),
        (["--outstanding", "1,33"], "--outstanding: \"33\" is no number from 1 to 32"),
        (["--comms", "0"], "--comms: \"0\" is no number from 1 to 8"),
        (["--comms", "8,9"], "--comms: \"9\" is no number from 1 to 8"),
        (["--direction", "three"], "invalid value 'three' for '--direction <DIRECTION>'"),
        (["--rounds", "1001"], "expected a whole number from 1 to 1000"),
        (["--round-ms", "0"], "expected a whole number from 1 to 10000"),
        (["--round-ms", "10001"], "expected a whole number from 1 to 10000"),
        (["--timeout", "86401"], "expected a whole number from 1 to 86400"),
        (["--abi", "3"], "expected a whole number from 4 to 12"),
    ] {
        Perf::new(&library()).args([format!("{}={}", arguments[0], arguments[1])]).run().fails(message);
    }
}
