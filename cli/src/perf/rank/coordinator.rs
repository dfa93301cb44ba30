//! A rank's end of its connection to the coordinator, which is its standard input, and the thread that reports that messages move.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};

use crate::perf::channel;
use crate::perf::message::{FromRank, ToRank};
use crate::perf::warnings::Warnings;
use crate::plugin::watch_log;

/// Messages completed since the start. Written by the thread that drives the rank.
static COMPLETED: AtomicU64 = AtomicU64::new(0);

/// Counts completed messages.
#[inline]
pub fn count(messages: u64) {
    // One writer, so that this needs no locked instruction. Relaxed: a number to show, nothing hangs on it.
    COMPLETED.store(COMPLETED.load(Ordering::Relaxed) + messages, Ordering::Relaxed);
}

/// Not told yet. Written on the plugin's threads, as it logs.
static WARNINGS: Mutex<Warnings> = Mutex::new(Warnings::new());

/// NCCL_LOG_WARN.
const WARN: i32 = 2;
/// How often the second thread looks.
const BEAT: Duration = Duration::from_millis(500);

/// The coordinator, as a rank reaches it.
pub struct Coordinator {
    reader: UnixStream,
    writer: Arc<Mutex<UnixStream>>,
}

impl Coordinator {
    /// Takes standard input, counts what the plugin will warn of, and starts the thread that reports.
    pub fn new() -> anyhow::Result<Coordinator> {
        let fd = std::io::stdin().as_fd().try_clone_to_owned()?;
        let reader = UnixStream::from(fd);
        reader.peer_addr().context("standard input is no socket: this command is not for people")?;
        let writer = Arc::new(Mutex::new(reader.try_clone()?));
        watch_log(|line| {
            if line.level == WARN {
                warnings().add(line.text.clone());
            }
        });
        let beats = Arc::clone(&writer);
        std::thread::Builder::new().name("beat".into()).spawn(move || beat(&beats))?;
        Ok(Coordinator { reader, writer })
    }

    /// The next command; `None` when the coordinator is gone.
    pub fn next(&mut self) -> anyhow::Result<Option<ToRank>> {
        Ok(channel::read(&mut self.reader)?)
    }

    /// Answers, behind whatever the plugin logged before.
    pub fn answer(&mut self, message: &FromRank) -> anyhow::Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        forward_warnings(&mut *writer)?;
        Ok(channel::write(&mut *writer, message)?)
    }

    /// Gives `data` to the other rank and takes what that gives: also a barrier.
    pub fn swap(&mut self, data: String) -> anyhow::Result<String> {
        self.answer(&FromRank::Swap { data })?;
        match self.next()?.ok_or_else(|| anyhow!("the coordinator is gone"))? {
            ToRank::Swapped { data } => Ok(data),
            ToRank::Abort => Err(Aborted.into()),
            _ => bail!("a command came while swapping"),
        }
    }
}

/// The other rank failed; what this one has to say about it is of no interest.
#[derive(Debug)]
pub struct Aborted;

impl std::fmt::Display for Aborted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the other rank failed")
    }
}

impl std::error::Error for Aborted {}

fn forward_warnings(to: &mut impl Write) -> std::io::Result<()> {
    // Taken in a statement of its own: a plugin that logs must not wait for the coordinator to read.
    let told = warnings().take();
    told.map_or(Ok(()), |told| channel::write(to, &FromRank::Warnings(told)))
}

fn warnings() -> MutexGuard<'static, Warnings> {
    WARNINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn beat(writer: &Mutex<UnixStream>) {
    let mut told = 0;
    loop {
        std::thread::sleep(BEAT);
        let messages = COMPLETED.load(Ordering::Relaxed);
        let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tell = || -> std::io::Result<()> {
            forward_warnings(&mut *writer)?;
            if messages != told {
                channel::write(&mut *writer, &FromRank::Progress { messages })?;
            }
            Ok(())
        };
        // The driving thread finds out by itself that the coordinator is gone.
        if tell().is_err() {
            return;
        }
        told = messages;
    }
}
