//! `railhead perf` as its users run it: the built program against the library built beside it, and against other plugins. What it measures
//! and shows is here.

mod builtin;
mod hosts;
mod ranges;
mod run;
mod told;
mod wrong;

use std::path::Path;
use std::process::Command;

use run::{Perf, fake, fake_with, library, positive};
use serde_json::Value;

#[test]
fn json_has_the_sizes_asked_for_and_every_limit() {
    for (wire, outstanding) in [("shm", &[1, 8][..]), ("tcp", &[8])] {
        let wire = format!("RAILHEAD_SOFT_WIRE={wire}");
        let each: Vec<String> = outstanding.iter().map(u64::to_string).collect();
        let report =
            Perf::new(&library()).args(["--json", "--sizes", "8,64K", "--outstanding", &each.join(","), "--env", &wire]).run().json();
        assert_eq!(report["plugins"][0]["name"], "Railhead");
        assert_eq!(report["plugins"][0]["abi"], 12);
        let rows = report["rows"].as_array().expect("rows");
        let of = |kind: &str| rows.iter().filter(|row| row["kind"] == kind).collect::<Vec<_>>();
        let latencies: Vec<&Value> = of("latency").into_iter().map(|row| &row["size"]).collect();
        assert_eq!(latencies, [8, 65536]);
        let bulk: Vec<(u64, u64)> =
            of("bandwidth").into_iter().map(|row| (row["outstanding"].as_u64().unwrap(), row["size"].as_u64().unwrap())).collect();
        let asked: Vec<(u64, u64)> = outstanding.iter().flat_map(|&n| [(n, 8), (n, 65536)]).collect();
        assert_eq!(bulk, asked);
        for row in rows {
            positive(&row["plugins"][0]["figure"]);
            assert!(row["plugins"][0]["cpu_s_per_gb"].as_f64().is_some(), "{row}");
            let limits: Vec<&str> = row["limits"].as_array().unwrap().iter().map(|limit| limit["name"].as_str().unwrap()).collect();
            let expected =
                if row["kind"] == "latency" { &["ring", "cache-line", "tcp-ping-pong"][..] } else { &["memcpy", "readv", "tcp-stream"] };
            assert_eq!(limits, expected);
            for limit in row["limits"].as_array().unwrap() {
                if limit["name"] == "readv" && limit["refused"].is_string() {
                    println!("SKIP: {}", limit["refused"]);
                    continue;
                }
                positive(&limit["figure"]);
                positive(&limit["ratios"][0]);
            }
        }
    }
}

#[test]
fn every_version_of_the_table_is_driven() {
    // `railhead check` drives those between, too.
    for abi in (4..=12).step_by(crate::support::repeats(4, 1)) {
        let report = Perf::new(&library())
            .args(["--json", "--sizes", "0,3,5000", "--comms", "2", "--direction", "two", "--limits", "none", "--abi", &abi.to_string()])
            .run()
            .json();
        assert_eq!(report["plugins"][0]["abi"], abi);
        assert_eq!(report["rows"].as_array().unwrap().len(), 6, "v{abi}");
    }
}

/// Before their messages and longer than these, as NCCL does, or as one asks.
#[test]
fn receives_are_posted_as_asked() {
    let plugin = fake("receives", 12);
    let receives = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("perf_receives_{}", std::process::id()));
    for (what, options, bytes, most, said) in [
        ("latency", &[][..], 512 << 10, 4, "receives of 512 KiB at least, 4 posted"),
        ("latency", &["--ahead", "2", "--recv-size", "10000"], 10_000, 2, "receives of 10000 B at least, 2 posted"),
        ("latency", &["--ahead", "0", "--recv-size", "0"], 8, 1, "receives as long as the messages, posted one by one"),
        ("bandwidth", &["--outstanding", "3"], 512 << 10, 3, "receives of 512 KiB at least"),
        ("bandwidth", &["--recv-size", "4"], 8, 8, "receives as long as the messages"),
    ] {
        std::fs::write(&receives, "").expect("a file");
        let env = format!("FAKE_RECEIVES={}", receives.display());
        let done = Perf::new(&plugin).args(["--sizes", "8", "--limits", "none", "--what", what, "--env", &env]).args(options).run();
        assert!(done.passes().contains(said), "{said}: {}", done.text());
        let posted = std::fs::read_to_string(&receives).expect("the receives");
        let lines = posted.lines().map(|line| line.split_once(' ').expect("two numbers"));
        let mut together: Vec<u32> = Vec::new();
        for (size, posted) in lines {
            assert_eq!(size, bytes.to_string(), "{what} {options:?}");
            together.push(posted.parse().expect("a number"));
        }
        let together = together.into_iter().max().expect("some");
        // Of many messages that are under way, some may come before as many receives are posted.
        assert!(together == most || what == "bandwidth" && together < most, "{what} {options:?}: {together}");
    }
    std::fs::remove_file(&receives).expect("the receives");
}

#[test]
fn a_table_for_people_has_both_plugins_and_their_ratio() {
    let other = fake("compare", 12);
    let done = Perf::new(&library()).args(["--sizes", "1K,1000", "--limits", "memcpy", "--touch", "--compare"]).args([&other]).run();
    let text = done.passes();
    for part in ["A = ", "B = ", "Railhead, v12", "Fake, v12", "A/B", "1 KiB", "1000 B", "memcpy", "CPU s/GB"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

#[test]
fn comparing_gives_ratios_round_by_round() {
    let other = fake("ratio", 9);
    let report = Perf::new(&library()).args(["--json", "--sizes", "64K", "--limits", "memcpy", "--compare"]).args([&other]).run().json();
    assert_eq!(report["plugins"][1]["name"], "Fake");
    for row in report["rows"].as_array().unwrap() {
        assert_eq!(row["plugins"].as_array().unwrap().len(), 2, "{row}");
        positive(&row["ratio"]);
        for limit in row["limits"].as_array().unwrap() {
            assert_eq!(limit["ratios"].as_array().unwrap().len(), 2, "{limit}");
        }
    }
}

/// Whatever drifts on a machine drifts for both.
#[test]
fn plugins_are_compared_in_turn() {
    let [a, b] = ["A", "B"].map(|letter| fake_with(&format!("turn_{letter}"), 12, &[&format!("-DFAKE_TURN='{letter}'")]));
    let turns = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("perf_turns_{}", std::process::id()));
    std::fs::write(&turns, "").expect("a file");
    let rounds = 5;
    let done = Perf::new(&a)
        .args(["--sizes", "1000", "--what", "bandwidth", "--limits", "none", "--round-ms", "1", "--rounds", &rounds.to_string()])
        .args(["--env", &format!("FAKE_TURNS={}", turns.display()), "--compare"])
        .args([&b])
        .run();
    let mut order = std::fs::read(&turns).expect("the turns");
    std::fs::remove_file(&turns).expect("the turns");
    order.dedup();
    // Both before the rounds, to check every byte and to find the number of messages of a round; then one round each at a time.
    assert_eq!(String::from_utf8_lossy(&order), "AB".repeat(2 + rounds));
    let table = done.passes();
    let line = |begin: &str| table.lines().find(|line| line.trim_start().starts_with(begin)).unwrap_or_else(|| panic!("{begin}: {table}"));
    assert!(line("size").ends_with("A/B"), "{table}");
    // Spreads of A, of B and of their ratio.
    assert_eq!(line("1000 B").matches("..").count(), 3, "{table}");
    let spread = line("1000 B").rsplit("   ").next().expect("a cell");
    assert!(spread.split(" (").next().and_then(|median| median.parse::<f64>().ok()).is_some_and(|ratio| ratio > 0.0), "{table}");
}

#[test]
fn the_plot_names_plugin_and_limits() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("perf_plot.svg");
    let _ = std::fs::remove_file(&file);
    Perf::new(&library()).args(["--sizes", "0..4,64K", "--plot"]).args([&file]).run().passes();
    let svg = std::fs::read_to_string(&file).expect("the plot");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in [
        "Throughput, 8 outstanding, 1 comm (GB/s)",
        "Half round trip (us)",
        "Railhead",
        "memcpy",
        "tcp-stream",
        "ring",
        "cache-line",
        "tcp-ping-pong",
    ] {
        assert!(svg.contains(text), "{text}");
    }
}

/// Whatever is wrong with the plot, what was measured is shown; and what can be known before is told before.
#[test]
fn a_plot_costs_no_result() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (new, old) = (folder.join("perf_none.svg"), folder.join("perf_old.svg"));
    let _ = std::fs::remove_file(&new);
    std::fs::write(&old, "an older plot").expect("a file");
    for file in [&new, &old] {
        let done = Perf::new(&library()).args(["--sizes", "0", "--limits", "none", "--plot"]).args([file]).run();
        assert!(done.passes().contains("0 B"), "{}", done.text());
        assert!(done.text().contains("is not drawn"), "{}", done.text());
    }
    assert!(!new.exists() && std::fs::read_to_string(&old).expect("the file") == "an older plot");
    // A plugin that no rank can load: what is wrong is told before one starts.
    let nothing = Path::new("/proc/self/status");
    for targets in [&["--targets"][..], &[]] {
        Perf::new(nothing).args(targets).args(["--plot", "/nowhere/x.svg"]).run().fails("cannot write /nowhere/x.svg");
        Perf::new(nothing).args(targets).args(["--sizes", "65M", "--plot", "/nowhere/x.svg"]).run().fails("\"65M\" is no size");
    }
    // The disk is full.
    let done = Perf::new(&library()).args(["--sizes", "8", "--limits", "none", "--plot", "/dev/full"]).run();
    let table = String::from_utf8_lossy(&done.output.stdout).into_owned();
    assert!(table.contains("8 B") && done.output.status.code() == Some(2), "{}", done.text());
    assert!(done.text().contains("cannot write /dev/full"), "{}", done.text());
}

/// One would stand in the middle of the other, or over it.
#[test]
fn a_plot_and_the_figures_have_files_of_their_own() {
    let nothing = Path::new("/proc/self/status");
    for file in ["/dev/stdout", "/proc/self/fd/1"] {
        Perf::new(nothing).args(["--plot", file]).run().fails(&format!("--plot {file}: that is standard output, where the figures go"));
    }
    let both = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("perf_both_{}", std::process::id()));
    let output = std::fs::File::create(&both).expect("a file");
    let run = Command::new(env!("CARGO_BIN_EXE_railhead"))
        .args(["perf", "--sizes", "8", "--limits", "none", "--rounds", "2", "--round-ms", "2", "--plugin"])
        .arg(library())
        .arg("--plot")
        .arg(&both)
        .stdout(output)
        .output()
        .expect("railhead");
    assert!(String::from_utf8_lossy(&run.stderr).contains("that is standard output"), "{run:?}");
    assert_eq!((run.status.code(), std::fs::read(&both).expect("the file").len()), (Some(2), 0));
    std::fs::remove_file(&both).expect("the file");
}

#[test]
fn every_target_is_measured_and_judged() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is ours.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    if limit.rlim_max < 8192 {
        println!("SKIP: 1000 comms need more than the {} files that may be open here", limit.rlim_max);
        return;
    }
    let verdicts = Perf::new(&library())
        .args(["--targets", "--rounds", "1", "--round-ms", "1", "--json", "--env", "RAILHEAD_PROGRESS=thraed"])
        .run()
        .json();
    let verdicts = verdicts.as_array().unwrap();
    for verdict in verdicts {
        let told =
            |text: &str| verdict["warnings"].as_array().expect("warnings").iter().any(|w| w["text"].as_str().unwrap().contains(text));
        assert!(told("RAILHEAD_PROGRESS=thraed is not accepted"), "{verdict}");
        // Always so with 1000 comms: no news.
        assert!(!told("stats page"), "{verdict}");
    }
    let named = |setting: &str, name: &str| {
        let found = verdicts.iter().find(|v| v["setting"] == setting && v["name"].as_str().unwrap().starts_with(name));
        found.unwrap_or_else(|| panic!("{setting}, {name}"))
    };
    for (setting, name, limit) in [
        ("shm", "1 MiB x 8", "memcpy"),
        ("shm", "64 KiB x 8", "readv"),
        ("shm, no cross-memory attach", "1 MiB x 8", "memcpy"),
        ("shm", "8 B half round trip", "ring"),
        ("tcp", "1 MiB x 8", "tcp-stream"),
        ("tcp", "64 KiB x 8", "tcp-stream"),
        ("tcp", "8 B half round trip", "tcp-ping-pong"),
        ("shm", "64 active comms", "one comm"),
        ("tcp", "64 active comms", "one comm"),
    ] {
        let verdict = named(setting, name);
        assert!(verdict["limit_name"].as_str().unwrap().starts_with(limit), "{verdict}");
        if limit == "readv" && verdict["limit"].is_null() {
            println!("SKIP: {}", verdict["note"]);
            continue;
        }
        positive(&verdict["limit"]);
        positive(&verdict["figure"]);
        positive(&verdict["ratio"]);
        let (median, target) = (verdict["ratio"]["median"].as_f64().unwrap(), verdict["target"].as_str().unwrap());
        let (direction, bound) = target.split_once(' ').unwrap();
        let bound: f64 = bound.parse().unwrap();
        assert_eq!(verdict["met"], if direction == ">=" { median >= bound } else { median <= bound }, "{verdict}");
    }
    for setting in ["shm", "tcp"] {
        // May be nothing in a round as short as these.
        let share = named(setting, "slowest of them")["figure"]["max"].as_f64().unwrap();
        assert!(0.0 < share && share <= 1.0, "{share}");
        positive(&named(setting, "1000 comms set up")["figure"]);
        assert!(named(setting, "memory of an idle comm")["met"].is_boolean());
    }
}

#[test]
fn variables_are_set_in_the_ranks_and_the_kernel_refuses_when_told_to() {
    // What the plugin warns of is told.
    let done = Perf::new(&library()).args(["--sizes", "8", "--env", "NCCL_SOCKET_IFNAME==nosuch0"]).run();
    done.fails("last warning in both ranks: ");
    done.fails("which matches none of this machine's interfaces");
    // Bulk data still arrives, by another path.
    let report = Perf::new(&library()).args(["--json", "--sizes", "1M", "--refuse-cma", "--env", "RAILHEAD_SOFT_WIRE=shm"]).run().json();
    positive(&report["rows"][0]["plugins"][0]["figure"]);
}
