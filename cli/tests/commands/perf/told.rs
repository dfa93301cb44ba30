//! What is said besides the figures: what the plugin warns of, and how the figures came about.

use std::path::Path;

use super::run::{Perf, fake, library};

/// Without the warnings that a slow machine gives rise to.
const BRIEF: [&str; 10] =
    ["--sizes", "64K", "--limits", "none", "--what", "bandwidth", "--env", "RAILHEAD_SOFT_WIRE=shm", "--env", "RAILHEAD_STALL_WARN_S=0"];

/// A name that is spelt wrong is no reason to fail, but the figures are of something else.
#[test]
fn what_the_plugin_warns_of_is_told_with_figures_that_succeed() {
    let wrong = ["--env", "RAILHEAD_PROGRESS=thraed"];
    let table = Perf::new(&library()).args(BRIEF).args(wrong).run().passes();
    let figures = table.find("64 KiB").expect("the figures");
    let told = table.find("warning in both ranks (once each): ").unwrap_or_else(|| panic!("{table}"));
    assert!(figures < told, "{table}");
    assert_eq!(table.matches("RAILHEAD_PROGRESS=thraed is not accepted").count(), 1, "{table}");

    let report = Perf::new(&library()).args(BRIEF).args(wrong).args(["--json"]).run().json();
    let [warning] = &report["plugins"][0]["warnings"].as_array().expect("warnings")[..] else { panic!("{report}") };
    assert!(warning["text"].as_str().expect("text").contains("RAILHEAD_PROGRESS=thraed is not accepted"), "{warning}");
    assert_eq!(warning["times"], serde_json::json!([1, 1]));
}

/// Of two plugins, each has its own.
#[test]
fn warnings_are_told_of_the_plugin_that_gave_them() {
    let silent = fake("silent", 12);
    let wrong = ["--env", "RAILHEAD_PROGRESS=thraed", "--compare"];
    let table = Perf::new(&library()).args(BRIEF).args(wrong).args([&silent]).run().passes();
    assert!(table.contains("\nA: warning in both ranks (once each): "), "{table}");
    assert_eq!(table.matches("warning in").count(), 1, "{table}");
}

/// Levels above warnings are for logs, also when they are asked for.
#[test]
fn what_is_no_warning_is_not_told() {
    let debug = ["--env", "RAILHEAD_DEBUG=trace", "--env", "NCCL_DEBUG=TRACE"];
    let table = Perf::new(&library()).args(BRIEF).args(debug).run().passes();
    assert!(!table.contains("warning in"), "{table}");
    let report = Perf::new(&library()).args(BRIEF).args(debug).args(["--json"]).run().json();
    assert_eq!(report["plugins"][0]["warnings"], serde_json::json!([]));
}

/// Figures of both directions are about twice those of one, and the limits stay those of one.
#[test]
fn the_heading_and_the_plot_say_how_messages_went() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("perf_ways_{}.svg", std::process::id()));
    let plain = "Throughput in GB/s, receives of 512 KiB at least: median (min..max) of 2 rounds; limits: GB/s, and the ratio to them";
    let one_way = "limits: GB/s in one direction";
    for (options, heading, titles) in [
        (&[][..], plain, &["Throughput, 8 outstanding, 1 comm (GB/s)", ">\nmemcpy\n<"][..]),
        (
            &["--direction", "two"],
            "Throughput in GB/s, both directions together, receives of 512 KiB at least: median",
            &["Throughput, both directions together, 8 outstanding, 1 comm (GB/s)", ">\nmemcpy, one direction\n<"],
        ),
        (
            &["--touch"],
            "Throughput in GB/s, every byte touched, receives of 512 KiB at least: median (min..max) of 2 rounds; limits: GB/s, and the ratio to them",
            &["Throughput, every byte touched, 8 outstanding, 1 comm (GB/s)"],
        ),
        (
            &["--direction", "two", "--touch"],
            "Throughput in GB/s, both directions together, every byte touched, receives of 512 KiB at least: median",
            &["Throughput, both directions together, every byte touched, 8 outstanding, 1 comm (GB/s)"],
        ),
    ] {
        let _ = std::fs::remove_file(&file);
        let arguments = ["--sizes", "64K", "--limits", "memcpy", "--what", "bandwidth", "--plot"];
        let table = Perf::new(&library()).args(arguments).args([&file]).args(options).run().passes();
        assert!(table.contains(heading), "{options:?}: {heading}\n{table}");
        assert_eq!(table.contains(one_way), options.contains(&"two"), "{options:?}\n{table}");
        let svg = std::fs::read_to_string(&file).expect("the plot");
        for title in titles {
            assert!(svg.contains(title), "{options:?}: {title}\n{svg}");
        }
    }
    std::fs::remove_file(&file).expect("the plot");
}
