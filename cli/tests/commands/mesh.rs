//! `railhead mesh bench` as a user runs it.

use std::process::{Command, Output};

use serde_json::Value;

use crate::support::repeats;

fn bench(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
    command.args(["mesh", "bench", "--iteration-time", "0.01"]).args(args);
    command.env("RAILHEAD_SOCKET_IFNAME", "lo").env_remove("RAILHEAD_SOFT_WIRE");
    command.output().expect("railhead")
}

fn rows(args: &[&str]) -> Vec<Value> {
    let output = bench(&[&["--json"], args].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    document.as_array().expect("rows").clone()
}

#[test]
fn everything_is_verified_and_measured_among_any_number_of_ranks() {
    const ALL: &str = "allreduce,reduce,reduce-scatter,broadcast,allgather,alltoall,gather,scatter,barrier,sendrecv";
    for ranks in ["2", "3"] {
        let rows = rows(&["--ranks", ranks, "--what", ALL, "--elements", "1,100000"]);
        assert_eq!(rows.len(), 2 * 9 + 1, "a barrier has no bytes");
        for row in &rows {
            let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name}: {row}"));
            assert_eq!(number("ranks").to_string(), ranks);
            assert!(number("times") >= 1.0 && 0.0 < number("min_us"), "{row}");
            let (least, most) = (number("min_us") * (1.0 - 1e-9), number("max_us") * (1.0 + 1e-9));
            assert!((least..=most).contains(&number("mean_us")), "{row}");
            assert!(
                number("min_us") <= number("p50_us") && number("p50_us") <= number("p99_us") && number("p99_us") <= number("max_us"),
                "{row}"
            );
            let factor = match (row["what"].as_str().unwrap(), ranks) {
                ("allreduce", "2") | ("reduce" | "broadcast" | "sendrecv", _) => 1.0,
                ("allreduce", _) => 4.0 / 3.0,
                ("barrier", _) => 0.0,
                (_, "2") => 0.5,
                _ => 2.0 / 3.0,
            };
            assert!((number("bus_gb_s") - factor * number("gb_s")).abs() <= 1e-9 * number("gb_s"), "{row}");
            let bytes = number("bytes");
            assert!((number("gb_s") - bytes / number("p50_us") / 1e3).abs() <= 1e-6 * number("gb_s"), "{row}");
        }
    }
}

#[test]
fn threads_arrays_and_busy_waits() {
    let rows = rows(&["--threads", "3", "--inputs", "2", "--sync", "--elements", "5,5000", "--ranks", "2", "--warmup-iters", "0"]);
    assert!(rows.iter().all(|row| row["threads"] == 3 && row["what"] == "allreduce"), "{rows:?}");
}

/// As many as the program starts, in `make soak`. A rank says nothing when all goes well, not even when the others leave before it does.
#[test]
fn many_ranks_connect_and_part_and_each_pair_takes_little() {
    let ranks = repeats(24, 256);
    for wire in ["shm", "tcp"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
        command.args(["mesh", "bench", "--json", "--what", "barrier,allreduce", "--elements", "2", "--iteration-time", "0.001"]);
        command.args(["--ranks", &ranks.to_string(), "--timeout", "300"]);
        command.env("RAILHEAD_SOCKET_IFNAME", "lo").env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_STALL_WARN_S", "0");
        let output = command.output().expect("railhead");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{wire}: {said}");
        let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let rows = document.as_array().expect("rows");
        assert_eq!(rows.len(), 2, "{rows:?}");
        let cost = |name: &str| rows[0][name].as_f64().unwrap_or_else(|| panic!("no {name}: {rows:?}"));
        // A socket, and the peer's process; the rest is what any mesh has.
        let rest = 6.0 / (ranks - 1) as f64;
        assert!((2.0..2.0 + rest).contains(&cost("pair_descriptors")), "{wire}: {rows:?}");
        assert!(cost("pair_private_kib") < 128.0 && cost("pair_shared_kib") < 64.0, "{wire}: {rows:?}");
        assert!(cost("connect_s") > 0.0 && (wire == "tcp" || cost("pair_shared_kib") > 0.0), "{wire}: {rows:?}");
    }
}

#[test]
fn a_rank_that_may_not_open_enough_says_how_much_before_it_begins() {
    let script = "ulimit -n 28; exec \"$0\" mesh bench --ranks 24 --what barrier";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_railhead")]).env("RAILHEAD_SOCKET_IFNAME", "lo");
    let output = command.output().expect("sh");
    let said = String::from_utf8_lossy(&output.stderr);
    // Of the pairs, and of the scratch memory.
    // Of the pairs, and of the scratch memory; of whichever rank.
    assert!(said.contains("24 ranks: the pairs and the scratch memory of rank "), "{said}");
    assert!(said.contains(" take 31 descriptors more, and "), "{said}");
    assert!(said.contains("RLIMIT_NOFILE is 28: raise it with `ulimit -n`"), "{said}");
    assert_eq!(output.status.code(), Some(2), "{said}");
}

#[test]
fn a_table_and_a_picture() {
    let folder = tempfile::tempdir().expect("a folder");
    let picture = folder.path().join("mesh.svg");
    let output = bench(&["--elements", "2,1000", "--plot", picture.to_str().expect("text"), "--what", "allreduce,broadcast"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("bus GB/s") && text.contains("broadcast"), "{text}");
    assert!(text.contains("connected in ") && text.contains("descriptors"), "{text}");
    let drawn = std::fs::read_to_string(picture).expect("a file");
    assert!(drawn.contains("<svg") && drawn.contains("Bus bandwidth"));
}

#[test]
fn ranks_meet_where_they_are_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = |rank: usize| format!("file://{}/store?rank={rank}&world_size=2", folder.path().display());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| bench(&["--url", &url(1), "--elements", "10", "--json"]));
        assert_eq!(rows(&["--url", &url(0), "--elements", "10"]).len(), 1);
        let other = other.join().expect("no panic");
        assert!(other.status.success() && other.stdout.is_empty(), "the first rank alone tells");
    });
}

#[test]
fn what_cannot_be_is_refused_with_value_and_range() {
    for (args, why) in [
        (&["--ranks", "0"][..], "expected a whole number from 1 to 256"),
        (&["--elements", "268435457"], "expected a whole number from 0 to 268435456"),
        (&["--iteration-time", "0"], "--iteration-time: 0; expected 0.001 to 3600"),
        (&["--threads", "17"], "expected a whole number from 1 to 16"),
        (&["--what", "nothing"], "invalid value 'nothing'"),
        (&["--what", "broadcast", "--inputs", "2"], "--inputs: 2; only an allreduce takes more than 1"),
        (&["--what", "sendrecv", "--ranks", "1"], "--ranks: 1; sendrecv takes at least 2"),
        (&["--device", "nosuch0"], "there is no device \"nosuch0\""),
        (&["--url", "nosuch://here"], "No rendezvous handler for nosuch://"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
        let output = command.args(["mesh", "bench"]).args(args).env("RAILHEAD_SOCKET_IFNAME", "lo").output().expect("railhead");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains(why), "{args:?}: {text}");
    }
}
