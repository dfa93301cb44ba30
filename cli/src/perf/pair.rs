//! Two ranks as the coordinator sees them: starts them, gives both the same command, carries what they swap, and says what went wrong
//! when one fails, dies or hangs. Ranks never outlive this. One reading thread per rank; everything else on the coordinator's thread.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};

use super::channel;
use super::message::{FromRank, Outcome, ToRank};
use super::warnings::{Warning, Warnings, printable};

/// Two ranks.
pub struct Pair {
    what: String,
    ranks: [Rank; 2],
    events: Receiver<(usize, Event)>,
    timeout: Duration,
    next_id: u32,
    /// A rank owes an answer: there is no talking to them any more.
    lost: bool,
}

enum Event {
    Message(FromRank),
    Gone(Option<io::Error>),
}

/// The coordinator's end of a connection with a rank.
pub enum Stream {
    /// A child of this process.
    Local(UnixStream),
    /// On another host.
    Remote(TcpStream),
}

struct Rank {
    writer: Stream,
    child: Option<Process>,
    /// Its plugin's.
    warnings: Warnings,
    /// Messages completed, as far as it told.
    messages: u64,
    /// Its connection has ended.
    gone: bool,
}

/// A rank's process; ended when dropped.
pub struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if it has ended already, which is as well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What [`Process::ended`] says when nothing is wrong.
pub const ENDED_WELL: &str = "exited with status 0";
/// How long the other rank is given to tell its side of a failure.
const GRACE: Duration = Duration::from_secs(1);

impl Process {
    /// Starts this program as a rank; the stream is its standard input.
    pub fn start(env: &[(String, String)]) -> anyhow::Result<(Process, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        // A rank's output goes to standard error: standard output is for results.
        let stdout = io::stderr().as_fd().try_clone_to_owned()?;
        let child = Command::new("/proc/self/exe")
            // In lists of processes.
            .arg0("railhead")
            .args(["perf", "--rank"])
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(stdout))
            .spawn()
            .context("cannot start a rank")?;
        Ok((Process(child), ours))
    }

    /// How it ended; waits for that, since its connection is closed before.
    pub fn ended(&mut self, timeout: Duration) -> String {
        let deadline = Instant::now() + timeout;
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => {
                    return match (status.signal(), status.code()) {
                        (Some(signal), _) => format!("was killed by signal {signal} ({})", signal_name(signal)),
                        (_, code) => format!("exited with status {}", code.unwrap_or(-1)),
                    };
                }
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                _ => return "closed its connection".into(),
            }
        }
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGILL => "SIGILL",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGSYS => "SIGSYS",
        libc::SIGTERM => "SIGTERM",
        _ => "see kill -l",
    }
}

impl Pair {
    /// Two local ranks with `env` besides this process's environment.
    pub fn local(what: &str, env: &[(String, String)], timeout: Duration) -> anyhow::Result<Pair> {
        let rank = || -> anyhow::Result<_> {
            let (process, stream) = Process::start(env)?;
            Ok((Stream::Local(stream), Some(process)))
        };
        Pair::new(what, [rank()?, rank()?], timeout)
    }

    /// Rank 0 here, rank 1 behind a connection.
    pub fn with_remote(what: &str, env: &[(String, String)], remote: TcpStream, timeout: Duration) -> anyhow::Result<Pair> {
        let (process, stream) = Process::start(env)?;
        Pair::new(what, [(Stream::Local(stream), Some(process)), (Stream::Remote(remote), None)], timeout)
    }

    fn new(what: &str, ends: [(Stream, Option<Process>); 2], timeout: Duration) -> anyhow::Result<Pair> {
        let (sender, events) = mpsc::channel();
        let [zero, one] = ends;
        let rank = |index: usize, (writer, child): (Stream, Option<Process>)| -> anyhow::Result<Rank> {
            let sender: Sender<(usize, Event)> = sender.clone();
            match &writer {
                Stream::Local(s) => read_all(index, s.try_clone()?, sender)?,
                Stream::Remote(s) => read_all(index, s.try_clone()?, sender)?,
            }
            Ok(Rank { writer, child, warnings: Warnings::default(), messages: 0, gone: false })
        };
        Ok(Pair { what: what.into(), ranks: [rank(0, zero)?, rank(1, one)?], events, timeout, next_id: 0, lost: false })
    }

    /// Whether both ranks read one clock.
    pub fn one_clock(&self) -> bool {
        self.ranks.iter().all(|rank| rank.child.is_some())
    }

    /// A name for a new job.
    pub fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    /// Gives each rank its command and waits until both have obeyed, carrying what they swap.
    pub fn command(&mut self, doing: &str, command: impl Fn(usize) -> ToRank) -> anyhow::Result<[Outcome; 2]> {
        ensure!(!self.lost, "{}: {doing}: ended after an earlier failure", self.what);
        self.obey(command).map_err(|trouble| self.explain(doing, trouble))
    }

    fn obey(&mut self, command: impl Fn(usize) -> ToRank) -> Result<[Outcome; 2], Trouble> {
        self.lost = true;
        if let Some(index) = self.ranks.iter().position(|rank| rank.gone) {
            return Err(Trouble::Gone(index, None));
        }
        for index in 0..2 {
            self.send(index, &command(index));
        }
        let mut outcomes = [None, None];
        let mut swaps = [None, None];
        let mut failure: Option<Trouble> = None;
        let mut deadline = Instant::now() + self.timeout;
        loop {
            if outcomes.iter().all(Option::is_some) {
                self.lost = false;
                if let Some(failure) = failure {
                    return Err(failure);
                }
                let [Some(zero), Some(one)] = outcomes else { return Err(Trouble::Silent) };
                return Ok([zero, one]);
            }
            let wait = deadline.saturating_duration_since(Instant::now());
            let (index, event) = match self.events.recv_timeout(wait) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => return Err(failure.unwrap_or(Trouble::Silent)),
                Err(RecvTimeoutError::Disconnected) => return Err(failure.unwrap_or(Trouble::Gone(0, None))),
            };
            let troubled = match event {
                Event::Message(FromRank::Progress { messages }) => {
                    self.ranks[index].messages = messages;
                    None
                }
                Event::Message(FromRank::Warnings(later)) => {
                    self.ranks[index].warnings.append(later);
                    continue;
                }
                Event::Message(FromRank::Swap { data }) => {
                    swaps[index] = Some(data);
                    None
                }
                Event::Message(FromRank::Done(outcome)) => {
                    outcomes[index] = Some(outcome);
                    None
                }
                Event::Message(FromRank::Failed { message }) => {
                    outcomes[index] = Some(Outcome::Nothing);
                    Some(Trouble::Failed(index, message))
                }
                Event::Gone(_) if outcomes[index].is_some() => {
                    // After its answer: only the next command, if there is one, is in trouble.
                    self.ranks[index].gone = true;
                    continue;
                }
                Event::Gone(error) => {
                    self.ranks[index].gone = true;
                    outcomes[index] = Some(Outcome::Nothing);
                    Some(Trouble::Gone(index, error))
                }
            };
            if failure.is_none() {
                deadline = Instant::now() + self.timeout;
            }
            failure = match (failure, troubled) {
                (None, Some(first)) => {
                    // The other rank may have more to say, or be in a call that never ends now.
                    deadline = Instant::now() + GRACE;
                    Some(first)
                }
                (Some(first), Some(second)) => Some(Trouble::Both(Box::new(first), Box::new(second))),
                (failure, None) => failure,
            };
            if failure.is_some() {
                for (index, swap) in swaps.iter_mut().enumerate() {
                    if swap.take().is_some() {
                        self.send(index, &ToRank::Abort);
                    }
                }
            } else if let [Some(_), Some(_)] = &swaps {
                let [zero, one] = std::mem::take(&mut swaps);
                self.send(1, &ToRank::Swapped { data: zero.unwrap_or_default() });
                self.send(0, &ToRank::Swapped { data: one.unwrap_or_default() });
            }
        }
    }

    /// A rank that is gone is noticed by its reader.
    fn send(&mut self, index: usize, message: &ToRank) {
        let _ = match &mut self.ranks[index].writer {
            Stream::Local(s) => channel::write(s, message),
            Stream::Remote(s) => channel::write(s, message),
        };
    }

    fn explain(&mut self, doing: &str, trouble: Trouble) -> anyhow::Error {
        let mut text = match trouble {
            Trouble::Silent => {
                let counts = self.ranks.each_ref().map(|rank| rank.messages);
                format!(
                    "no progress for {} s, so the ranks were ended (--timeout); messages completed so far: rank 0 {}, rank 1 {}",
                    self.timeout.as_secs(),
                    counts[0],
                    counts[1]
                )
            }
            other => self.told(other),
        };
        match self.ranks.each_ref().map(|rank| rank.warnings.last()) {
            [Some(zero), Some(one)] if zero == one => text += &format!("\n  last warning in both ranks: {}", printable(zero)),
            warnings => {
                for (index, warning) in warnings.iter().enumerate().filter_map(|(index, warning)| Some((index, (*warning)?))) {
                    text += &format!("\n  last warning in rank {index}: {}", printable(warning));
                }
            }
        }
        anyhow!("{}: {doing}: {text}", self.what)
    }

    fn told(&mut self, trouble: Trouble) -> String {
        match trouble {
            Trouble::Silent => "no answer".into(),
            Trouble::Failed(index, message) => format!("rank {index}: {}", printable(&message)),
            Trouble::Gone(index, error) => {
                let how = match &mut self.ranks[index].child {
                    Some(child) => child.ended(GRACE),
                    None => "is gone, or the connection to its host".into(),
                };
                match error {
                    Some(error) => format!("rank {index} {how} ({error})"),
                    None => format!("rank {index} {how}"),
                }
            }
            Trouble::Both(first, second) => {
                if let (Trouble::Failed(_, a), Trouble::Failed(_, b)) = (&*first, &*second)
                    && a == b
                {
                    return format!("both ranks: {}", printable(a));
                }
                // A death explains what the other rank reports.
                let (first, second) = if matches!(*second, Trouble::Gone(..)) { (second, first) } else { (first, second) };
                format!("{}; {}", self.told(*first), self.told(*second))
            }
        }
    }

    /// Lets the ranks close everything and end; what their plugin warned of since the start.
    pub fn finish(mut self) -> anyhow::Result<Vec<Warning>> {
        self.command("closing", |_| ToRank::Finish)?;
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if let Some(child) = &mut rank.child {
                let ended = child.ended(self.timeout);
                if ended != ENDED_WELL {
                    bail!("{}: rank {index} {ended} after closing", self.what);
                }
            }
        }
        Ok(Warnings::of_both(self.ranks.each_ref().map(|rank| &rank.warnings)))
    }
}

/// Why a command did not succeed.
enum Trouble {
    Silent,
    Failed(usize, String),
    Gone(usize, Option<io::Error>),
    Both(Box<Trouble>, Box<Trouble>),
}

fn read_all(index: usize, mut from: impl io::Read + Send + 'static, to: Sender<(usize, Event)>) -> anyhow::Result<()> {
    std::thread::Builder::new().name(format!("rank {index}")).spawn(move || {
        loop {
            let event = match channel::read(&mut from) {
                Ok(Some(message)) => Event::Message(message),
                Ok(None) => Event::Gone(None),
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Event::Gone(None),
                Err(e) => Event::Gone(Some(e)),
            };
            let last = matches!(event, Event::Gone(_));
            if to.send((index, event)).is_err() || last {
                return;
            }
        }
    })?;
    Ok(())
}
