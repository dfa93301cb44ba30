//! Starts the ranks of a rule, listens to them, and decides: all reach the end, or the first of them that says why not, or the one that
//! crashed, or whoever had not answered when time was over. Runs in the user's process, which never calls the plugin.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::chan::Chan;
use super::rank::{Setting, word};
use super::rules::Rule;
use super::verdict::Outcome;

/// What a rank has, beyond the rule's time, to say itself that it waits in vain; after that it hangs inside a call.
const GRACE: Duration = Duration::from_millis(500);
/// How long the other rank may take to show that it was the one that crashed.
const AFTERMATH: Duration = Duration::from_millis(60);

/// A rule to be run on a version.
pub struct Job<'a> {
    /// What to check.
    pub rule: &'static Rule,
    /// On what.
    pub setting: Setting<'a>,
}

/// What came of a job.
pub struct Run {
    /// The verdict.
    pub outcome: Outcome,
    /// The last warning that the plugin logged, in either rank.
    pub warning: Option<String>,
    /// That it took.
    pub elapsed: Duration,
}

/// A rank's process, killed when dropped.
struct Process {
    child: Child,
    note: String,
    warning: Option<String>,
    done: Option<Done>,
}

/// How a rank ended.
enum Done {
    Passed,
    Failed(String),
    Skipped(String),
    /// It waited for the other rank.
    Aside(String),
    Crashed(String),
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when the process has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A message of a rank; `None` when its channel is closed.
type Event = (usize, Option<Vec<u8>>);

/// Runs a rule.
pub fn run(job: &Job) -> anyhow::Result<Run> {
    let start = Instant::now();
    let (events_in, events) = mpsc::channel();
    let mut ranks = spawn(job, &events_in)?;
    drop(events_in);
    let outcome = judge(job, &mut ranks, &events);
    let warning = ranks.iter().rev().find_map(|rank| rank.warning.clone());
    Ok(Run { outcome, warning, elapsed: start.elapsed() })
}

fn spawn(job: &Job, events: &Sender<Event>) -> anyhow::Result<Vec<Process>> {
    let Setting { plugin, version, device, timeout } = job.setting;
    let program = std::env::current_exe().context("where is this program?")?;
    let (a, b) = Chan::pair().context("socketpair")?;
    let mut ranks = Vec::new();
    for (index, peer) in [a, b].into_iter().enumerate().take(job.rule.ranks) {
        let (ours, theirs) = Chan::pair().context("socketpair")?;
        let child = Command::new(&program)
            .arg("check")
            .arg("--plugin")
            .arg(plugin)
            .args(["--rule", job.rule.name, "--abi", &version.to_string(), "--device", &device.to_string()])
            .args(["--timeout", &timeout.as_secs_f64().to_string(), "--as-rank", &index.to_string()])
            .stdin(Stdio::from(theirs.into_fd()))
            .stdout(Stdio::from(peer.into_fd()))
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        ranks.push(Process { child, note: "start".into(), warning: None, done: None });
        let events = events.clone();
        // Ends with the rank, at the latest when it is killed.
        thread::spawn(move || {
            while let Ok(message) = ours.recv() {
                if events.send((index, Some(message))).is_err() {
                    return;
                }
            }
            let _ = events.send((index, None));
        });
    }
    Ok(ranks)
}

fn judge(job: &Job, ranks: &mut [Process], events: &Receiver<Event>) -> Outcome {
    let mut end = Instant::now() + job.setting.timeout + GRACE;
    let mut over = false;
    while ranks.iter().any(|rank| rank.done.is_none()) {
        match events.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok((index, message)) => {
                let Some(rank) = ranks.get_mut(index) else { continue };
                rank.hear(message.as_deref(), over);
                if !over && matches!(rank.done, Some(Done::Failed(_) | Done::Crashed(_) | Done::Skipped(_))) {
                    // The rule is decided, but this rank may only have felt what the other died of.
                    over = true;
                    end = end.min(Instant::now() + AFTERMATH);
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    decide(job, ranks)
}

fn decide(job: &Job, ranks: &[Process]) -> Outcome {
    let name = |index: usize| if job.rule.ranks == 1 { String::new() } else { format!("rank {index}: ") };
    let find = |wanted: &dyn Fn(&Process) -> Option<String>| {
        ranks.iter().enumerate().find_map(|(i, rank)| Some(format!("{}{}", name(i), wanted(rank)?)))
    };
    let crashed = find(&|rank| match &rank.done {
        Some(Done::Crashed(how)) => Some(how.clone()),
        _ => None,
    });
    let failed = find(&|rank| match &rank.done {
        Some(Done::Failed(why)) => Some(why.clone()),
        _ => None,
    });
    let skipped = ranks.iter().find_map(|rank| match &rank.done {
        Some(Done::Skipped(why)) => Some(why.clone()),
        _ => None,
    });
    let aside = find(&|rank| match &rank.done {
        Some(Done::Aside(why)) => Some(why.clone()),
        _ => None,
    });
    let hung = find(&|rank| rank.done.is_none().then(|| format!("did not return from {} within {:?}", rank.note, job.setting.timeout)));
    if ranks.iter().all(|rank| matches!(rank.done, Some(Done::Passed))) {
        Outcome::Passed
    } else if let Some(why) = crashed.or(failed) {
        Outcome::Failed(why)
    } else if let Some(why) = skipped {
        Outcome::Skipped(why)
    } else {
        Outcome::Failed(hung.or(aside).unwrap_or_else(|| "a rank ended without a word".into()))
    }
}

impl Process {
    /// Takes a message. When the rule is `over`, warnings tell of its aftermath.
    fn hear(&mut self, message: Option<&[u8]>, over: bool) {
        let Some(message) = message else {
            if self.done.is_none() {
                self.done = Some(Done::Crashed(match self.child.wait() {
                    Ok(status) => format!("{} in {}", ended(status), self.note),
                    Err(e) => format!("its process is lost: {e}"),
                }));
            }
            return;
        };
        let Some((&word, text)) = message.split_first() else { return };
        let text = String::from_utf8_lossy(text).into_owned();
        match word {
            word::NOTE => self.note = text,
            word::WARNING if !over => self.warning = Some(text),
            word::PASSED => self.done = Some(Done::Passed),
            word::FAILED => self.done = Some(Done::Failed(text)),
            word::SKIPPED => self.done = Some(Done::Skipped(text)),
            word::ASIDE => self.done = Some(Done::Aside(text)),
            _ => {}
        }
    }
}

/// How a process ended that should not have.
fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGSEGV) => "crashed (SIGSEGV)".into(),
        Some(libc::SIGABRT) => "crashed (SIGABRT)".into(),
        Some(libc::SIGBUS) => "crashed (SIGBUS)".into(),
        Some(libc::SIGFPE) => "crashed (SIGFPE)".into(),
        Some(libc::SIGILL) => "crashed (SIGILL)".into(),
        Some(libc::SIGPIPE) => "ended by SIGPIPE".into(),
        Some(signal) => format!("was killed by signal {signal}"),
        None => format!("exited with status {}", status.code().unwrap_or(-1)),
    }
}
