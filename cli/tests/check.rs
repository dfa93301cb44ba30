//! `railhead check`: our own library passes every rule in every version, and for each rule there is a plugin that breaks it and is caught
//! by it. The broken plugins are one, `mutants/mutant.c`, which forwards to our library and does one thing wrong.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::Value;

/// Versions that the mutant exports.
const VERSIONS: [u32; 3] = [4, 8, 12];
/// Checks that run at once: many of the mutants hang, which takes time but no processor.
const AT_ONCE: usize = 6;
/// Seconds until a mutant that hangs is caught.
const PATIENCE: &str = "1.5";

/// A mutant, the rule that catches it, and a part of the reason that the rule gives.
const MUTANTS: &[(&str, &str, &str)] = &[
    ("no_device", "devices", "no device: nothing was checked"),
    ("block_accept", "accept-returns", "did not return from accept"),
    ("flip_byte", "data", "arrived as"),
    ("size_lost", "recv-size", "its test gave 1048576"),
    ("swap", "order", "receive 3 got message 2"),
];

#[test]
fn our_library_passes_every_rule_in_every_version() {
    let (document, output) = check(&library(), &[], "none");
    let failed = results(&document).filter(|r| r["outcome"] != "pass").map(|r| format!("{r}\n")).collect::<String>();
    assert!(failed.is_empty(), "{failed}");
    assert!(output.status.success(), "{output:?}");
    let checked: Vec<_> = results(&document).map(|r| (text(&r["rule"]), r["abi"].as_u64())).collect();
    for (rule, versions) in rules() {
        for version in versions {
            assert!(checked.contains(&(rule.as_str(), Some(u64::from(version)))), "{rule} in v{version} was not checked");
        }
    }
}

/// The forwarding itself is right, so what a rule finds in a mutant is its defect.
#[test]
fn a_mutant_without_a_defect_passes() {
    let (document, output) = check(mutant(), &[], "none");
    let failed = results(&document).filter(|r| r["outcome"] != "pass").map(|r| format!("{r}\n")).collect::<String>();
    assert!(failed.is_empty() && output.status.success(), "{failed}{output:?}");
}

#[test]
fn each_mutant_is_caught_by_its_rule() {
    let rules = rules();
    let jobs: Vec<_> = MUTANTS
        .iter()
        .flat_map(|mutant| {
            let (_, versions) = rules.iter().find(|(rule, _)| rule == mutant.1).unwrap_or_else(|| panic!("there is no rule {}", mutant.1));
            VERSIONS.into_iter().filter(|v| versions.contains(v)).map(move |v| (mutant, v))
        })
        .collect();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(((name, rule, reason), version)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let abi = version.to_string();
                    let (document, output) = check(mutant(), &["--rule", rule, "--abi", &abi, "--timeout", PATIENCE], name);
                    let found: Vec<_> = results(&document).collect();
                    assert_eq!(found.len(), 1, "{document}");
                    assert_eq!(found[0]["outcome"], "fail", "{name}, v{version}: {document}");
                    assert!(text(&found[0]["reason"]).contains(reason), "{name}, v{version}: {document}");
                    assert_eq!(output.status.code(), Some(1), "{output:?}");
                }
            });
        }
    });
}

#[test]
fn each_rule_has_a_mutant_in_the_newest_version_that_it_applies_to() {
    for (rule, versions) in rules() {
        assert!(MUTANTS.iter().any(|(_, caught_by, _)| *caught_by == rule), "no mutant breaks {rule}");
        assert!(VERSIONS.iter().any(|v| versions.contains(v)), "{rule} applies to no version of the mutants");
    }
}

/// The rules and their versions.
fn rules() -> Vec<(String, Vec<u32>)> {
    let output = railhead(&["--list", "--json"], "none");
    assert!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let bound = |v: &Value| u32::try_from(v.as_u64().expect("a version")).expect("a version");
    let rules: Vec<_> = document
        .as_array()
        .expect("a list")
        .iter()
        .map(|r| (text(&r["rule"]).to_owned(), (bound(&r["abi"][0])..=bound(&r["abi"][1])).collect()))
        .collect();
    assert!(!rules.is_empty());
    rules
}

fn results(document: &Value) -> impl Iterator<Item = &Value> {
    document["results"].as_array().expect("results").iter()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// Checks a plugin; what came of it as JSON.
fn check(plugin: &Path, arguments: &[&str], mutation: &str) -> (Value, Output) {
    let plugin = plugin.to_str().expect("a path in UTF-8");
    let output = railhead(&[&["--json", "--plugin", plugin], arguments].concat(), mutation);
    let document = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    (document, output)
}

fn railhead(arguments: &[&str], mutation: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("RAILHEAD_") || name.starts_with("NCCL_") {
            command.env_remove(name);
        }
    }
    command.env("MUTANT", mutation).env("MUTANT_OF", library());
    command.arg("check").args(arguments).output().expect("railhead starts")
}

/// The library under test: the one that was asked for, or the one that cargo built along with this test.
fn library() -> PathBuf {
    let beside = || std::env::current_exe().expect("a test knows where it is").with_file_name("librailhead.so");
    let library = std::env::var_os("RH_LIBRARY").map_or_else(beside, PathBuf::from);
    assert!(library.is_file(), "{} is missing", library.display());
    library
}

/// The mutant, compiled once.
fn mutant() -> &'static Path {
    static MUTANT: OnceLock<PathBuf> = OnceLock::new();
    MUTANT.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mutants/mutant.c");
        let plugin = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutant.so");
        // Put in place in one step: another run of this test may be loading it.
        let own = plugin.with_extension(std::process::id().to_string());
        let output = Command::new("cc")
            .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", "-shared", "-fPIC", "-o"])
            .args([&own, &source])
            .arg("-ldl")
            .output()
            .expect("cc is installed (make deps)");
        assert!(output.status.success(), "cc {}:\n{}", source.display(), String::from_utf8_lossy(&output.stderr));
        std::fs::rename(&own, &plugin).expect("the mutant is there");
        plugin
    })
}
