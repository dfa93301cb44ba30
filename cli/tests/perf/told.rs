//! What is said besides the figures: what the plugin warns of, and how the figures came about.

use crate::run::{Perf, fake, library};

const BRIEF: [&str; 8] = ["--sizes", "64K", "--limits", "none", "--what", "bandwidth", "--env", "RAILHEAD_SOFT_WIRE=shm"];

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
