//! What is built and committed, seen from outside: the shared library's symbols and headers, the generated files.
//!
//! The library is the one that cargo built for these tests and, if RH_LIBRARY names one (`make test` does), the plain release one too.
//! With RH_UPDATE=1 the generated files are written instead of compared (`make header`, `make docs`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The versions of NCCL's table that are exported.
const TABLES: std::ops::RangeInclusive<u32> = 4..=12;

fn libraries() -> Vec<PathBuf> {
    let beside = std::env::current_exe().unwrap().parent().unwrap().join("librailhead.so");
    assert!(beside.exists(), "{} was not built", beside.display());
    std::iter::once(beside).chain(std::env::var_os("RH_LIBRARY").map(PathBuf::from)).collect()
}

/// What a program of binutils says about a file.
fn ask(program: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(program).args(arguments).arg(file).output().unwrap_or_else(|e| panic!("{program}: {e} (make deps-test)"));
    assert!(output.status.success(), "{program} {}: {}", file.display(), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The values of the dynamic section's entries of one kind, as in "0x... (NEEDED) Shared library: [libc.so.6]".
fn dynamic(library: &Path, kind: &str) -> Vec<String> {
    let text = ask("readelf", &["-dW"], library);
    text.lines().filter(|line| line.contains(&format!("({kind})"))).map(|line| line.split(')').nth(1).unwrap().trim().to_string()).collect()
}

#[test]
fn only_the_tables_and_our_own_functions_are_exported() {
    for library in libraries() {
        let text = ask("nm", &["-D", "--defined-only"], &library);
        let mut tables = BTreeSet::new();
        for line in text.lines() {
            let [_, kind, name] = line.split_whitespace().collect::<Vec<_>>()[..] else { panic!("{line}") };
            match name.strip_prefix("ncclNetPlugin_v").and_then(|version| version.parse::<u32>().ok()) {
                Some(version) => {
                    assert!(["D", "R"].contains(&kind), "{line}: dlsym must find data");
                    tables.insert(version);
                }
                None => assert!(name.starts_with("railhead_") && kind == "T", "{}: {line}", library.display()),
            }
        }
        assert_eq!(tables, TABLES.collect(), "{}", library.display());
    }
}

#[test]
fn nothing_is_needed_beyond_the_c_library() {
    for library in libraries() {
        let needed = dynamic(&library, "NEEDED");
        assert!(!needed.is_empty());
        for entry in needed {
            let name = entry.split(['[', ']']).nth(1).unwrap();
            let known = ["libc.so.", "libm.so.", "libgcc_s.so.", "ld-linux"].iter().any(|prefix| name.starts_with(prefix));
            assert!(known, "{} needs {name}", library.display());
        }
    }
}

#[test]
fn the_library_knows_its_name_and_stays_mapped() {
    for library in libraries() {
        assert_eq!(dynamic(&library, "SONAME"), ["Library soname: [librailhead.so]"]);
        let flags = dynamic(&library, "FLAGS_1").concat();
        assert!(flags.contains("NODELETE"), "{}: {flags}", library.display());
    }
}

#[test]
fn the_plain_library_has_no_fault_injection_in_it() {
    let holds = |library: &Path| std::fs::read(library).unwrap().windows(8).any(|bytes| bytes == b"RH_STAGE");
    let [tested, plain @ ..] = &libraries()[..] else { unreachable!() };
    // That the string can be found at all.
    assert_eq!(holds(tested), cfg!(feature = "stages"));
    for library in plain {
        assert!(!holds(library), "{}", library.display());
    }
}

/// Compares a committed file with what it is generated from, or writes it.
fn generated(file: &str, text: &str, target: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("RH_UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == text, "{file} is stale: run `make {target}` and commit it");
}

#[cfg(feature = "header")]
#[test]
fn header_is_what_the_source_gives() {
    let path = Path::new(env!("OUT_DIR")).join("railhead.h");
    generated("include/railhead.h", &std::fs::read_to_string(path).expect("the build wrote a header"), "header");
}

#[test]
fn environment_page_is_what_the_table_gives() {
    generated("docs/env.md", &railhead::base::config::markdown(), "docs");
}

#[test]
fn the_header_and_the_library_name_the_same_functions() {
    let header = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/railhead.h")).unwrap();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    // In code, a name of ours before a parenthesis is a function's.
    let code = header.lines().filter(|line| !line.trim_start().starts_with("//") && !line.starts_with("/*"));
    let declared: BTreeSet<&str> = code
        .flat_map(|line| line.match_indices('(').map(move |(at, _)| line[..at].rsplit(|c| !is_word(c)).next().unwrap()))
        .filter(|name| name.starts_with("railhead_"))
        .collect();
    for library in libraries() {
        let text = ask("nm", &["-D", "--defined-only"], &library);
        let exported: BTreeSet<&str> =
            text.lines().filter_map(|line| line.split_whitespace().nth(2)).filter(|name| name.starts_with("railhead_")).collect();
        assert_eq!(declared, exported, "{}", library.display());
    }
}

/// The producer's header is enough alone: nothing is included before it, nothing is linked; and both sides of a ring work near the limits of
/// the counters and against a side that lies.
#[test]
fn the_ring_header_stands_alone_in_c11_and_cxx17() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/ring_check.c");
    let variable = |name: &str, otherwise: &str| std::env::var(name).unwrap_or_else(|_| otherwise.into());
    let languages = [(variable("CC", "cc"), ["-xc", "-std=c11"]), (variable("CXX", "c++"), ["-xc++", "-std=c++17"])];
    for (compiler, language) in languages {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ring_check{}", language[1]));
        let built = Command::new(&compiler)
            .args(language)
            .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", "-o"])
            .args([&program, &source])
            .output()
            .unwrap_or_else(|e| panic!("{compiler}: {e} (make deps-test)"));
        assert!(built.status.success(), "{compiler} {language:?}: {}", String::from_utf8_lossy(&built.stderr));
        let run = Command::new(&program).output().expect("the program starts");
        assert!(run.status.success(), "{language:?}: {}", String::from_utf8_lossy(&run.stderr));
    }
}
