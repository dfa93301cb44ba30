//! The shared library stays free of what the command line program is made of.

use std::path::{Path, PathBuf};

/// Names that are in any program which these are linked into.
const CRATES: [&str; 4] = ["clap_builder", "indicatif", "plotters", "serde_json"];

fn holds(file: &Path, text: &str) -> bool {
    let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

fn libraries() -> Vec<PathBuf> {
    let beside = std::env::current_exe().unwrap().parent().unwrap().join("librailhead.so");
    assert!(beside.exists(), "{} was not built", beside.display());
    std::iter::once(beside).chain(std::env::var_os("RH_LIBRARY").map(PathBuf::from)).collect()
}

#[test]
fn nothing_of_the_program_is_in_the_library() {
    for name in CRATES {
        assert!(holds(Path::new(env!("CARGO_BIN_EXE_railhead")), name), "the program has no {name}: is this test's list old?");
        for library in libraries() {
            assert!(!holds(&library, name), "{} has {name}", library.display());
        }
    }
}
