//! `railhead check`: whether a plugin keeps the rules of NCCL's interface. For each rule and version, [`supervisor`] starts fresh processes
//! of this program, the ranks; [`part`] is what runs in them, [`rules`] what they do there to a [`rank`], [`report`] what the user sees.

mod chan;
mod memory;
mod part;
mod process;
mod rank;
mod report;
mod rules;
mod supervisor;
mod verdict;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::number::{ABIS, within};
use crate::plugin::{Plugin, absolute};
use rank::Setting;
use report::{Report, Result as RuleResult};
use rules::{DEVICES, RULES, Rule};
use supervisor::Job;
use verdict::Outcome;

/// Checks a plugin against the rules of NCCL's interface.
///
/// Each rule runs in processes of its own. Exit status: 0 all rules passed, 1 a rule failed or nothing could be checked, 2 wrong usage.
#[derive(clap::Args)]
pub struct Args {
    /// The plugin: a shared library that exports ncclNetPlugin_v4 to v12; `nccl:FILE` and `nccl-ib:FILE` are those inside libnccl.so.2
    #[arg(long, value_name = "FILE", required_unless_present = "list")]
    plugin: Option<PathBuf>,
    /// Only this version of the interface; default: all that the plugin exports
    #[arg(long, value_name = "N", value_parser = within(ABIS))]
    abi: Option<u32>,
    /// Device that the rules use
    #[arg(long, value_name = "D", default_value_t = 0, allow_negative_numbers = true, value_parser = within(0..=i32::MAX))]
    device: i32,
    /// Only this rule (several times: these rules)
    #[arg(long, value_name = "NAME")]
    rule: Vec<String>,
    /// Seconds that a rule may take, 0.1 to 600
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    timeout: Duration,
    /// Machine-readable output
    #[arg(long)]
    json: bool,
    /// List the rules and their sources, check nothing
    #[arg(long)]
    list: bool,
    /// This process is a rank of a rule: `supervisor` starts it so
    #[arg(long, hide = true, value_name = "INDEX")]
    as_rank: Option<usize>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let range = "a number of seconds from 0.1 to 600";
    let number: f64 = text.parse().map_err(|_| format!("must be {range}"))?;
    if (0.1..=600.0).contains(&number) { Ok(Duration::from_secs_f64(number)) } else { Err(format!("must be {range}")) }
}

impl Args {
    fn job<'a>(&self, plugin: &'a Path, rule: &'static Rule, version: u32) -> Job<'a> {
        Job { rule, setting: Setting { plugin, version, device: self.device, timeout: self.timeout } }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let rules = chosen(&args.rule)?;
    if args.list {
        report::list(&rules, args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let path = args.plugin.clone().context("--plugin is missing")?;
    if let Some(index) = args.as_rank {
        let (&[rule], Some(version)) = (rules.as_slice(), args.abi) else { bail!("--as-rank is for this program itself") };
        part::play(&args.job(&path, rule, version), index)
    }
    // Loading by a bare name would search the library path; a file is what was asked for.
    let path = absolute(&path)?;
    let versions = match args.abi {
        Some(version) => vec![Plugin::load(&path, Some(version))?.version()],
        None => Plugin::versions(&path)?,
    };
    let mut report = Report::new(&path, &versions, args.device, args.json);
    // A version whose plugin does not start has nothing to check; the failed rule stands for the others.
    let mut given_up: Vec<(u32, &'static str)> = Vec::new();
    for &rule in &rules {
        for &version in versions.iter().filter(|v| rule.versions.contains(v)) {
            let gate = given_up.iter().find(|(v, _)| *v == version);
            let result = match gate {
                Some((_, failed)) => RuleResult::unrun(rule, version, format!("not run, because `{failed}` failed")),
                None => RuleResult::new(rule, version, supervisor::run(&args.job(&path, rule, version))?),
            };
            if rule.gate && matches!(result.outcome, Outcome::Failed(_)) {
                given_up.push((version, rule.name));
            }
            report.add(result);
        }
        report.row(rule);
    }
    // Rules that need no device prove nothing about a plugin that has none.
    for &version in &versions {
        let mut concerned = rules.iter().filter(|rule| rule.versions.contains(&version)).peekable();
        let failed = given_up.iter().any(|(v, _)| *v == version);
        if concerned.peek().is_some()
            && concerned.all(|rule| rule.deviceless)
            && !failed
            && let Outcome::Failed(why) = supervisor::run(&args.job(&path, &DEVICES, version))?.outcome
        {
            report.refuse(version, why);
        }
    }
    Ok(if report.finish()? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The rules of these names, in the order of the table; all if there are none.
fn chosen(names: &[String]) -> anyhow::Result<Vec<&'static Rule>> {
    let all = || RULES.iter().flat_map(|rules| rules.iter());
    if let Some(unknown) = names.iter().find(|name| !all().any(|rule| rule.name == **name)) {
        let known: Vec<_> = all().map(|rule| rule.name).collect();
        bail!("there is no rule {unknown:?}; the rules are {}", known.join(", "));
    }
    Ok(all().filter(|rule| names.is_empty() || names.iter().any(|name| name == rule.name)).collect())
}
