//! What README.md says of this repository holds: the files it names exist, the log lines it explains are in the code, and the
//! variables it mentions are settings.

use std::fs;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn named_files_exist() {
    let readme = read("README.md");
    let links = readme.split("](").skip(1).filter_map(|rest| rest.split(')').next()).filter(|link| !link.starts_with('#'));
    let paths = quoted(&readme).filter(|text| text.starts_with("src/") || text.starts_with("tests/") || text.starts_with("include"));
    let named: Vec<&str> = links.chain(paths).collect();
    assert!(named.len() >= 8, "{named:?}");
    for path in named {
        assert!(Path::new(ROOT).join(path).exists(), "README.md names {path}");
    }
}

#[test]
fn named_functions_are_where_it_says() {
    for (file, text) in [
        ("src/net/recv.rs", "pub fn irecv("),
        ("src/net/sender.rs", "fn isend("),
        ("src/net/sender.rs", "fn load_group("),
        ("src/net/cts_fifo.rs", "pub fn encode("),
        ("src/net/cts_fifo.rs", "pub fn read("),
    ] {
        assert!(read(file).contains(text), "{file} has no {text:?}");
    }
}

#[test]
fn explained_log_lines_exist() {
    let readme = read("README.md");
    let table = readme.split("| the line says |").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("the table");
    let mut code = String::new();
    collect(&Path::new(ROOT).join("src"), &mut code);
    let mut seen = 0;
    for row in table.lines().skip(2).filter(|row| !row.starts_with("| NCCL:")) {
        let lines = row.split('|').nth(1).expect("a first column");
        for line in quoted(lines) {
            assert!(code.contains(line), "no message says {line:?}");
            seen += 1;
        }
    }
    assert!(seen >= 15, "{seen} log lines");
}

#[test]
fn named_variables_are_settings() {
    let (readme, settings) = (read("README.md"), read("docs/env.md"));
    let names =
        readme.split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_').filter(|word| word.starts_with("RAILHEAD_"));
    let names: Vec<&str> = names.collect();
    assert!(names.len() >= 8, "{names:?}");
    for name in names {
        assert!(settings.contains(&format!("`{name}`")), "docs/env.md has no {name}");
    }
}

/// What stands between single backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with("```")).flat_map(|line| line.split('`').skip(1).step_by(2))
}

fn collect(folder: &Path, code: &mut String) {
    for entry in fs::read_dir(folder).expect("src").flatten() {
        if entry.path().is_dir() {
            collect(&entry.path(), code);
        } else {
            code.push_str(&fs::read_to_string(entry.path()).unwrap_or_default());
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}
