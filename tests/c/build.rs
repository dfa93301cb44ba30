//! Finds the library under test and compiles the C programs that load it. Used by the tests that talk to the C boundary.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The cdylib that cargo built along with this test: beside it, in `target/<profile>/deps`.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let library = test.with_file_name("librailhead.so");
    assert!(library.is_file(), "{} is missing", library.display());
    library
}

/// Compiles `tests/c/<name>.c` and returns the program.
pub fn compile(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name).with_extension("c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    // Tests run at the same time: each compiles for itself and puts the result in place in one step.
    static TURN: AtomicU32 = AtomicU32::new(0);
    let own = program.with_extension(format!("{}-{}", std::process::id(), TURN.fetch_add(1, Ordering::Relaxed)));
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", "-o"])
        .args([&own, &source])
        .arg("-ldl")
        .output()
        .expect("cc is installed (make deps-test)");
    assert!(output.status.success(), "cc {}:\n{}", source.display(), String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&own, &program).expect("the program is there");
    program
}
