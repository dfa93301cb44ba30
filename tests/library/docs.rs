//! What README.md and the pages under docs/ say of this repository holds: links lead somewhere, named files exist, the log lines that are
//! explained are in the code, and the variables mentioned are settings.

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn links_lead_somewhere() {
    let mut seen = 0;
    for (path, text) in pages() {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).filter(|link| !link.contains("://")) {
            let (file, section) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.parent().expect("a folder").join(file) };
            assert!(target.exists(), "{} links to {link}", path.display());
            let found = section.is_empty() || headings(&target).any(|heading| heading == section);
            assert!(found, "{} links to {link}, and there is no such heading", path.display());
            seen += 1;
        }
    }
    assert!(seen >= 15, "{seen} links");
}

#[test]
fn named_files_exist() {
    let mut seen = 0;
    for (page, text) in pages() {
        let folders = ["src/", "tests/", "include/", "cli/", "c_examples/", "docs/", "benches/", "python/"];
        for path in quoted(&text).filter_map(|text| text.split_whitespace().next()) {
            // What a build makes, and NCCL's own files.
            if !folders.iter().any(|folder| path.starts_with(folder)) || path.contains("build/") || path.ends_with(".cc") {
                continue;
            }
            assert!(Path::new(ROOT).join(path).exists(), "{} names {path}", page.display());
            seen += 1;
        }
    }
    assert!(seen >= 20, "{seen} files");
}

#[test]
fn named_functions_are_where_it_says() {
    let page = read("docs/architecture.md");
    for (function, file, text) in [
        ("`Receiver::irecv`", "src/net/receiver.rs", "pub fn irecv("),
        ("`Slot::encode_to`", "src/net/cts_fifo.rs", "pub fn encode_to("),
        ("`isend`", "src/net/sender.rs", "fn isend("),
        ("`load_group`", "src/net/sender.rs", "fn load_group("),
        ("`CtsFifo::read`", "src/net/cts_fifo.rs", "pub fn read("),
    ] {
        assert!(page.contains(function) && page.contains(file), "docs/architecture.md no longer tells of {function} in {file}");
        let code = read(file);
        let (_, before) = code.split_once(text).map(|(before, after)| (after, before)).unwrap_or_else(|| panic!("{file} has no {text:?}"));
        assert!(!before.ends_with("#[cfg(test)]\n    "), "{file}: {text} is only there for tests");
    }
}

#[test]
fn explained_log_lines_exist() {
    let page = read("docs/troubleshooting.md");
    let table = page.split("| the line says |").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("the table");
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
    let (settings, header) = (read("docs/env.md"), read("include/railhead.h"));
    let constant = |name: &str| header.lines().any(|line| line.trim().split(' ').next() == Some(name));
    // What the Python package reads before there is a library to ask.
    let package = read("python/railhead/_library.py");
    let of_package = |name: &str| package.contains(&format!("os.environ.get(\"{name}\")"));
    let mut seen = 0;
    for (page, text) in pages() {
        let words = text.split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
        for name in words.filter(|word| word.starts_with("RAILHEAD_") && *word != "RAILHEAD_") {
            assert!(
                settings.contains(&format!("`{name}`")) || constant(name) || of_package(name),
                "{} names {name}, which docs/env.md has not",
                page.display()
            );
            seen += 1;
        }
    }
    assert!(seen >= 20, "{seen} variables");
}

/// README.md and every page under docs/, with their texts.
fn pages() -> Vec<(PathBuf, String)> {
    let docs = fs::read_dir(Path::new(ROOT).join("docs")).expect("docs").flatten().map(|entry| entry.path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let all = pages.chain([Path::new(ROOT).join("README.md")]);
    all.map(|path| (path.clone(), fs::read_to_string(&path).expect("a page"))).collect()
}

/// A page's headings as links name them.
fn headings(page: &Path) -> impl Iterator<Item = String> {
    let text = fs::read_to_string(page).expect("a page");
    let titles: Vec<String> =
        text.lines().filter_map(|line| line.strip_prefix('#')).map(|line| line.trim_start_matches('#').into()).collect();
    titles.into_iter().map(|title| {
        let kept = title.trim().to_lowercase();
        kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_')).map(|c| if c == ' ' { '-' } else { c }).collect()
    })
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
