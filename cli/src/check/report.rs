//! What the user sees of `check`: a line per rule while it runs, then the failures with their reasons; or JSON.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::rules::Rule;
use super::supervisor::Run;
use super::verdict::Outcome;

/// Columns of a terminal that the output is made for.
const WIDTH: usize = 80;
/// Columns of a rule's name, the longest of which fits.
const NAME: usize = 24;

/// What came of a rule in a version.
pub struct Result {
    rule: &'static Rule,
    version: u32,
    /// The verdict.
    pub outcome: Outcome,
    warning: Option<String>,
    seconds: f64,
    /// Not run, because of another rule.
    unrun: bool,
}

impl Result {
    /// Of a rule that was run.
    pub fn new(rule: &'static Rule, version: u32, run: Run) -> Result {
        Result { rule, version, outcome: run.outcome, warning: run.warning, seconds: run.elapsed.as_secs_f64(), unrun: false }
    }

    /// Of a rule that was not.
    pub fn unrun(rule: &'static Rule, version: u32, why: String) -> Result {
        Result { rule, version, outcome: Outcome::Skipped(why), warning: None, seconds: 0.0, unrun: true }
    }

    fn word(&self) -> &'static str {
        match self.outcome {
            Outcome::Passed => "pass",
            Outcome::Failed(_) => "fail",
            Outcome::Skipped(_) => "skip",
        }
    }

    fn reason(&self) -> Option<&str> {
        match &self.outcome {
            Outcome::Passed => None,
            Outcome::Failed(why) | Outcome::Skipped(why) => Some(why),
        }
    }

    fn json(&self) -> Value {
        json!({
            "rule": self.rule.name,
            "abi": self.version,
            "outcome": self.word(),
            "reason": self.reason(),
            "warning": self.warning,
            "seconds": self.seconds,
        })
    }
}

/// All that came of a check.
pub struct Report {
    plugin: PathBuf,
    versions: Vec<u32>,
    device: i32,
    json: bool,
    results: Vec<Result>,
    /// Versions that do not pass whatever the rules say, with the reason.
    refused: Vec<(u32, String)>,
}

impl Report {
    /// Begins; nothing is checked yet.
    pub fn new(plugin: &Path, versions: &[u32], device: i32, json: bool) -> Report {
        if !json {
            let heads: String = versions.iter().map(|v| format!("{:>5}", format!("v{v}"))).collect();
            print(&wrap(&format!("{}, device {device}", plugin.display()), ""));
            print(&format!("{:NAME$}{heads}\n", "rule"));
        }
        Report { plugin: plugin.into(), versions: versions.into(), device, json, results: Vec::new(), refused: Vec::new() }
    }

    /// Takes a result.
    pub fn add(&mut self, result: Result) {
        self.results.push(result);
    }

    /// What was checked of a version is no pass.
    pub fn refuse(&mut self, version: u32, why: String) {
        self.refused.push((version, why));
    }

    /// A rule is through in all versions.
    pub fn row(&self, rule: &Rule) {
        if self.json {
            return;
        }
        let cell = |version: &u32| {
            let result = self.results.iter().find(|r| r.rule.name == rule.name && r.version == *version);
            format!("{:>5}", result.map_or(".", |result| if result.word() == "fail" { "FAIL" } else { result.word() }))
        };
        let cells: String = self.versions.iter().map(cell).collect();
        print(&format!("{:NAME$}{cells}\n", rule.name));
    }

    /// Ends; whether all is well.
    pub fn finish(self) -> anyhow::Result<bool> {
        let count = |word| self.results.iter().filter(|r| r.word() == word).count();
        let (passed, failed, skipped) = (count("pass"), count("fail"), count("skip"));
        let ok = failed == 0 && passed > 0 && self.refused.is_empty();
        if self.json {
            let document = json!({
                "plugin": self.plugin,
                "device": self.device,
                "abi": self.versions,
                "results": self.results.iter().map(Result::json).collect::<Vec<_>>(),
                "passed": passed,
                "failed": failed,
                "skipped": skipped,
                "refused": self.refused.iter().map(|(version, why)| json!({ "abi": version, "reason": why })).collect::<Vec<_>>(),
                "ok": ok,
            });
            print(&format!("{document:#}\n"));
            return Ok(ok);
        }
        self.failed();
        self.skipped();
        print(&format!("\n{passed} passed, {failed} failed, {skipped} skipped\n"));
        let mut reasons: Vec<&str> = self.refused.iter().map(|(_, why)| why.as_str()).collect();
        reasons.dedup();
        for why in reasons {
            let versions: Vec<String> = self.refused.iter().filter(|(_, w)| w == why).map(|(v, _)| format!("v{v}")).collect();
            print(&wrap(&format!("{}: {why}: that is no pass", versions.join(" ")), ""));
        }
        if failed == 0 && passed == 0 {
            print("nothing was checked: that is no pass\n");
        }
        Ok(ok)
    }

    /// Each rule that failed, with its reasons.
    fn failed(&self) {
        let mut told: Vec<&str> = Vec::new();
        for rule in self.results.iter().filter(|r| r.word() == "fail").map(|r| r.rule) {
            if told.contains(&rule.name) {
                continue;
            }
            told.push(rule.name);
            print(&format!("\nFAIL {}\n", rule.name));
            for (versions, result) in self.reasons("fail").into_iter().filter(|(_, r)| r.rule.name == rule.name) {
                print(&wrap(&format!("{versions}: {}", result.reason().unwrap_or_default()), "  "));
                if let Some(warning) = &result.warning {
                    print(&wrap(&format!("the plugin's last warning: {warning}"), "      "));
                }
            }
            print(&wrap(&format!("rule: {}", rule.says), "  "));
            print(&wrap(&format!("source: {}", rule.source), "  "));
        }
    }

    /// What was not checked, and why.
    fn skipped(&self) {
        let mut told: Vec<&str> = Vec::new();
        for (versions, result) in self.reasons("skip") {
            let reason = result.reason().unwrap_or_default();
            // A version that could not be started has one line for all of its rules.
            if result.unrun && told.contains(&reason) {
                continue;
            }
            if told.is_empty() {
                print("\n");
            }
            told.push(reason);
            let (what, versions) = if result.unrun { ("the other rules", self.unrun(reason)) } else { (result.rule.name, versions) };
            print(&wrap(&format!("skip {what}, {versions}: {reason}"), ""));
        }
    }

    /// Versions in which rules were not run for a reason.
    fn unrun(&self, reason: &str) -> String {
        let concerned = |version: &&u32| self.results.iter().any(|r| r.unrun && r.version == **version && r.reason() == Some(reason));
        self.versions.iter().filter(concerned).map(|v| format!("v{v}")).collect::<Vec<_>>().join(" ")
    }

    /// One entry per rule and reason: its versions, and one of the results.
    fn reasons(&self, word: &str) -> Vec<(String, &Result)> {
        let mut found: Vec<(String, &Result)> = Vec::new();
        for result in self.results.iter().filter(|r| r.word() == word) {
            match found.iter_mut().find(|(_, r)| r.rule.name == result.rule.name && r.reason() == result.reason()) {
                Some((versions, _)) => versions.push_str(&format!(" v{}", result.version)),
                None => found.push((format!("v{}", result.version), result)),
            }
        }
        found
    }
}

/// Prints the rules.
pub fn list(rules: &[&Rule], as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let entry =
            |r: &&Rule| json!({ "rule": r.name, "says": r.says, "source": r.source, "abi": [r.versions.start(), r.versions.end()] });
        let document = Value::from(rules.iter().map(entry).collect::<Vec<_>>());
        return writeln!(io::stdout(), "{document:#}").context("standard output");
    }
    for rule in rules {
        let (first, last) = (rule.versions.start(), rule.versions.end());
        let versions = if first == last { format!("v{first}") } else { format!("v{first} to v{last}") };
        print(&format!("{}  ({versions})\n", rule.name));
        print(&wrap(rule.says, "    "));
        print(&wrap(&format!("source: {}", rule.source), "    "));
    }
    Ok(())
}

/// To standard output; whoever closed it does not want more.
fn print(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Lines of at most [`WIDTH`] columns where words allow it.
fn wrap(text: &str, indent: &str) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let len = word.chars().count();
        if column > 0 && column + 1 + len > WIDTH {
            out.push('\n');
            column = 0;
        }
        if column == 0 {
            out.push_str(indent);
            column = indent.len();
        } else {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += len;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapped_lines_fit_and_lose_nothing() {
        let text = "a rule of several words ".repeat(20);
        let wrapped = wrap(&text, "    ");
        assert!(wrapped.lines().all(|line| line.len() <= WIDTH && line.starts_with("    ")), "{wrapped}");
        assert_eq!(wrapped.split_whitespace().collect::<Vec<_>>(), text.split_whitespace().collect::<Vec<_>>());
        assert!(wrapped.lines().count() > 2);
    }
}
