//! A store in a file that all ranks can reach, in torch's format: torch's FileStore and this one may use one file at the same time.
//!
//! The file is a log of records. Every operation opens it, takes flock(2), exclusive to write and shared to read, and catches up with what others appended. There
//! is nothing to wake a waiter, so waiting looks every 10 ms. The last store of the job removes the file; a file that a job left behind, because a rank died,
//! holds that job's keys and has to be removed by hand. A record that a dying writer left half written is cut off by the next writer.
//!
//! Whoever holds the lock may be stopped. An operation that was given a timeout gives up on the lock when that runs out; a rank's other operations, its opening and
//! its end wait for it without limit, as torch's do.

mod record;
mod watch;

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::deadline::Deadline;
use super::values::{self, Compared, Values};
use super::watch::{Callback, Watch};
use super::{Error, FOREVER, Result, Store};
use crate::base::{clock, fork};
use record::{CLEANUP, REFCOUNT, REGULAR, Record};
use watch::Follower;

/// A store in a file.
pub struct FileStore {
    path: PathBuf,
    role: Role,
    /// How long an operation without a timeout waits for the lock.
    patience: Duration,
    /// Locked within the file's lock, which alone is waited for.
    log: Mutex<Log>,
    epoch: u64,
}

/// Whose store it is.
enum Role {
    /// A rank's, which counts; of so many, if that is known.
    Rank(Option<usize>),
    /// That of somebody who does not belong to the job.
    Visitor,
}

/// What has been read of the file.
#[derive(Default)]
struct Log {
    values: Values,
    seen: Seen,
}

/// How far a file was read.
#[derive(Default, Clone)]
struct Seen {
    /// Which one the path led to: device, number and time of birth, as numbers are used again. Another job's may be as long.
    file: Option<(u64, u64, Option<SystemTime>)>,
    /// Up to here.
    end: u64,
}

/// Pause between looks at the file, as torch's.
const LOOK: Duration = Duration::from_millis(10);
/// Pause between attempts to take the lock, which is held for as long as a read or a write takes.
const ATTEMPT: Duration = Duration::from_millis(1);
/// Queues in a file, in torch's words.
const NO_QUEUES: &str = "queue support is not implemented.";

impl FileStore {
    /// Opens or creates the file. With a world size, the last of so many stores removes it.
    ///
    /// Errors: a path that cannot be written; a file that no store wrote, which is left as it is.
    pub fn new(path: impl Into<PathBuf>, world_size: Option<usize>) -> Result<Self> {
        let store = FileStore::with(path.into(), Role::Rank(world_size), FOREVER);
        store.change(|log, records| bump(log, records, REFCOUNT, 1))?;
        Ok(store)
    }

    /// The store in a file that is there, for somebody who is no rank of the job: neither counted nor waited for, and the file stays when it is closed. To look into it
    /// takes no right to write. An operation that has no timeout of its own waits for the lock for `patience`, and then returns [`Error::Timeout`].
    ///
    /// Errors: no such file, or none that could hold a store.
    pub fn visit(path: impl Into<PathBuf>, patience: Duration) -> Result<Self> {
        let store = FileStore::with(path.into(), Role::Visitor, patience);
        let found = store.path.metadata().map_err(|e| store.failed("look into", e))?;
        if !found.is_file() {
            return Err(Error::Usage(format!("{} is not a regular file", store.path.display())));
        }
        Ok(store)
    }

    fn with(path: PathBuf, role: Role, patience: Duration) -> Self {
        FileStore { path, role, patience, log: Mutex::default(), epoch: fork::epoch() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn patience(&self) -> Deadline {
        Deadline::after(self.patience)
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // What a thread that died left is at worst behind the file.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the file as it is now. A file that does not exist is an empty one.
    fn look<R>(&self, deadline: Deadline, look: impl FnOnce(&Log) -> R) -> Result<R> {
        let locked = match Locked::open(&self.path, OpenOptions::new().read(true), FlockOperation::LockShared, deadline.grace()) {
            Ok(locked) => Some(locked),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(self.failed("open", e)),
        };
        let mut log = self.log();
        match &locked {
            Some(locked) => log.catch_up(&locked.0).map_err(|e| self.failed("read", e))?,
            None => *log = Log::default(),
        }
        Ok(look(&log))
    }

    /// Appends the records that `change` makes, knowing the file as it is now and nobody else writing.
    fn change<R>(&self, change: impl FnOnce(&mut Log, &mut Vec<u8>) -> Result<R>) -> Result<R> {
        self.change_by(self.patience(), change)
    }

    fn change_by<R>(&self, deadline: Deadline, change: impl FnOnce(&mut Log, &mut Vec<u8>) -> Result<R>) -> Result<R> {
        let mut open = OpenOptions::new();
        // Nobody would remove what a visitor makes.
        open.read(true).write(true).create(matches!(self.role, Role::Rank(_))).mode(0o644);
        let locked =
            Locked::open(&self.path, &open, FlockOperation::LockExclusive, deadline.grace()).map_err(|e| self.failed("open", e))?;
        let file = &locked.0;
        let mut log = self.log();
        log.catch_up(file).map_err(|e| self.failed("read", e))?;
        let mut records = Vec::new();
        let result = change(&mut log, &mut records)?;
        log.append(file, &records).map_err(|e| self.failed("write", e))?;
        Ok(result)
    }

    /// Looks until the keys exist, and reads them then.
    fn when_there<R>(&self, keys: &[&str], deadline: Deadline, late: &dyn Fn() -> String, read: impl Fn(&Values) -> R) -> Result<R> {
        let keys: Vec<_> = keys.iter().map(|key| regular(key)).collect();
        loop {
            match self.look(deadline, |log| keys.iter().all(|key| log.values.contains(key)).then(|| read(&log.values))) {
                Ok(Some(read)) => return Ok(read),
                Ok(None) if deadline.passed() => return Err(Error::Timeout(late())),
                Ok(None) => clock::sleep(deadline.left().map_or(LOOK, |left| left.min(LOOK))),
                Err(error) => return Err(too_late(late(), error)),
            }
        }
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        let path = self.path.display();
        match error.kind() {
            ErrorKind::WouldBlock => Error::Timeout(format!("somebody else holds the lock of {path}")),
            _ => Error::system(format!("{what} {path}"), error),
        }
    }
}

/// Adds to one of the numbers in the file.
fn bump(log: &mut Log, records: &mut Vec<u8>, key: &[u8], delta: i64) -> Result<i64> {
    // Torch's, too, reads an empty value as 0 here, and its server does not.
    let text = log.values.get(key).map(|value| value.bytes()).filter(|text| !text.is_empty());
    let sum = values::sum(text, delta)
        .map_err(|_| Error::Usage(format!("add: the value of {} is not a number of 64 bits", String::from_utf8_lossy(key))))?;
    record::write(records, key, sum.to_string().as_bytes());
    Ok(sum)
}

fn regular(key: &str) -> Vec<u8> {
    [&[REGULAR], key.as_bytes()].concat()
}

/// A user's value, or nothing.
fn value(values: &Values, key: &str) -> Vec<u8> {
    values.get(&regular(key)).map_or(Vec::new(), |value| value.bytes().to_vec())
}

/// Torch's words before those about the lock, if that is what took too long.
fn too_late(words: String, error: Error) -> Error {
    match error {
        Error::Timeout(locked) => Error::Timeout(format!("{words}; {locked}")),
        other => other,
    }
}

/// Torch's words for a wait that ran out.
fn wait_late() -> String {
    "Wait timeout".into()
}

/// Appends a user's value, if a record can hold it.
fn put(records: &mut Vec<u8>, key: &[u8], value: &[u8]) -> Result<()> {
    if !record::fits(key, value) {
        return Err(Error::Usage(format!("a key of {} bytes with a value of {}: at most 1 MiB and 1 GiB", key.len(), value.len())));
    }
    record::write(records, key, value);
    Ok(())
}

impl Log {
    /// Reads what was appended since the last time.
    fn catch_up(&mut self, file: &File) -> io::Result<()> {
        let values = &mut self.values;
        read_on(file, &mut self.seen, |entry| match entry {
            Entry::Restart => *values = Values::default(),
            Entry::Set(key, value) => values.set(&key, &value),
            Entry::Delete(key) => drop(values.delete(&key)),
        })
    }

    /// Appends records, in place of what a dead writer left half done. Whole or not at all, as far as the file system lets.
    fn append(&mut self, mut file: &File, records: &[u8]) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let end = self.seen.end;
        if file.metadata()?.len() > end {
            file.set_len(end)?;
        }
        file.seek(SeekFrom::Start(end))?;
        if let Err(e) = file.write_all(records) {
            let _ = file.set_len(end);
            return Err(e);
        }
        Ok(())
    }
}

/// What a file says next.
enum Entry {
    /// It is another file, or somebody emptied it: nothing that was read before holds.
    Restart,
    /// A key has this value.
    Set(Vec<u8>, Vec<u8>),
    /// A key is gone.
    Delete(Vec<u8>),
}

/// Reads what was appended since the last time.
fn read_on(file: &File, seen: &mut Seen, mut each: impl FnMut(Entry)) -> io::Result<()> {
    let now = file.metadata()?;
    let (size, which) = (now.len(), Some((now.dev(), now.ino(), now.created().ok())));
    if seen.end > 0 && (size < seen.end || seen.file != which) {
        seen.end = 0;
        each(Entry::Restart);
    }
    seen.file = which;
    let end = &mut seen.end;
    if size == *end {
        return Ok(());
    }
    let mut file = file;
    file.seek(SeekFrom::Start(*end))?;
    let mut reader = BufReader::new(file.take(size - *end));
    while *end < size {
        let (record, len) = record::read(&mut reader, size - *end)?;
        each(match record {
            Record::Set(key, value) => Entry::Set(key, value),
            Record::Delete(key) => Entry::Delete(key),
            Record::Cut => return Ok(()),
            Record::Foreign => return Err(io::Error::new(ErrorKind::InvalidData, "this is not a store's file, or it is damaged")),
        });
        *end += len;
    }
    Ok(())
}

/// The file, open and locked.
struct Locked(File);

impl Locked {
    /// Errors: [`ErrorKind::WouldBlock`] when somebody else still holds the lock at the deadline.
    fn open(path: &Path, open: &OpenOptions, lock: FlockOperation, deadline: Deadline) -> io::Result<Self> {
        // The kernel knows no deadline: with one, this asks again and again.
        let lock = match (lock, deadline.left()) {
            (FlockOperation::LockShared, Some(_)) => FlockOperation::NonBlockingLockShared,
            (FlockOperation::LockExclusive, Some(_)) => FlockOperation::NonBlockingLockExclusive,
            (lock, _) => lock,
        };
        loop {
            let locked = Locked(open.open(path)?);
            match flock(&locked.0, lock) {
                // The last store of an earlier job may have removed it before it was locked.
                Ok(()) if locked.0.metadata()?.nlink() > 0 => return Ok(locked),
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if !deadline.passed() => clock::sleep(deadline.left().map_or(ATTEMPT, |left| left.min(ATTEMPT))),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing alone would leave it locked while a child that was forked meanwhile has it open.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl Drop for FileStore {
    /// Counts a rank's store out; the last removes the file.
    fn drop(&mut self) {
        let Role::Rank(world_size) = self.role else { return };
        if self.epoch != fork::epoch() || !self.path.exists() {
            return;
        }
        let path = self.path.clone();
        let _ = self.change(|log, records| {
            let ended = bump(log, records, CLEANUP, 1)?;
            let users = bump(log, records, REFCOUNT, -1)?;
            if users <= 0 && world_size.is_some_and(|all| ended >= all as i64) && std::fs::remove_file(path).is_ok() {
                records.clear();
            }
            Ok(())
        });
    }
}

impl Store for FileStore {
    /// It has no connection, and holds its lock for no longer than a look or a change takes.
    fn reopen(self: Arc<Self>) -> Result<Arc<dyn Store>> {
        Ok(self)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|_, records| put(records, &regular(key), value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let late = || format!("Timeout waiting for key: {key} after {} ms", timeout.as_millis());
        self.when_there(&[key], Deadline::after(timeout), &late, |values| value(values, key))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.when_there(keys, Deadline::after(timeout), &wait_late, |_| ())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.look(self.patience(), |log| keys.iter().all(|key| log.values.contains(&regular(key))))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.add_by(key, delta, self.patience())
    }

    fn add_by(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        self.change_by(deadline, |log, records| bump(log, records, &regular(key), delta))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let key = regular(key);
        self.change(|log, records| {
            Ok(match log.values.compare(&key, expected) {
                Compared::Stored => {
                    put(records, &key, desired)?;
                    desired.to_vec()
                }
                Compared::Other(value) => value.bytes().to_vec(),
                Compared::Missing => expected.to_vec(),
            })
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = regular(key);
        self.change(|log, records| {
            let before = log.values.get(&key).map_or(&[][..], |value| value.bytes());
            put(records, &key, &[before, value].concat())
        })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.when_there(keys, Deadline::after(timeout), &wait_late, |values| keys.iter().map(|key| value(values, key)).collect())
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        self.change(|_, records| entries.iter().try_for_each(|(key, value)| put(records, &regular(key), value)))
    }

    /// Always true: torch's does not look whether the key exists, either.
    fn delete_key(&self, key: &str) -> Result<bool> {
        let key = regular(key);
        self.change(|_, records| {
            record::write_delete(records, &key);
            Ok(true)
        })
    }

    fn num_keys(&self) -> Result<i64> {
        self.look(self.patience(), |log| log.values.keys().len() as i64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let user = |key: &[u8]| std::str::from_utf8(key.strip_prefix(&[REGULAR])?).ok().map(str::to_owned);
        self.look(self.patience(), |log| log.values.keys().filter_map(user).collect())
    }

    fn queue_push(&self, _: &str, _: &[u8]) -> Result<()> {
        Err(Error::Unsupported(NO_QUEUES.into()))
    }

    fn queue_pop(&self, _: &str, _: Duration) -> Result<Vec<u8>> {
        Err(Error::Unsupported(NO_QUEUES.into()))
    }

    fn queue_len(&self, _: &str) -> Result<i64> {
        Err(Error::Unsupported(NO_QUEUES.into()))
    }

    fn watch_key(&self, key: &str, callback: Callback) -> Result<Watch> {
        let key = regular(key);
        let (value, seen) = self.look(self.patience(), |log| {
            let value = log.values.get(&key).map(|value| value.bytes().to_vec());
            (value, log.seen.clone())
        })?;
        Follower { path: self.path.clone(), key, value, seen }.start(callback)
    }

    fn barrier(&self, key: &str, world_size: i64, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let last = format!("{key}/last_member");
        let join = self.change_by(deadline, |log, records| {
            if bump(log, records, &regular(&format!("{key}/num_members")), 1)? == world_size {
                put(records, &regular(&last), b"1")?;
            }
            Ok(())
        });
        join.map_err(|error| too_late(wait_late(), error))?;
        if world_size < 1 {
            return Ok(());
        }
        self.when_there(&[&last], deadline, &wait_late, |_| ())
    }
}
