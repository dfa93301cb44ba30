//! A store in a file that all ranks can reach, in torch's format: torch's FileStore and this one may use one file at the same time.
//!
//! The file is a log of records. Every operation opens it, takes flock(2), exclusive to write and shared to read, and reads what others appended. A waiter reads
//! the file every 10 ms. The last store of the job removes the file; if a rank died, the file stays with the job's keys and has to be removed by hand. A record
//! that a killed writer left incomplete is cut off by the next writer.
//!
//! The process that holds the lock may be stopped. An operation with a timeout waits for the lock until then; a rank's other operations, its opening and its end
//! wait without limit, as torch's do.

mod record;
mod watch;

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::deadline::Deadline;
use super::values::{self, Compared, Values};
use super::watch::{Callback, KeyWatch};
use super::{Error, FOREVER, Result, Store};
use crate::base::sync::lock;
use crate::base::{clock, fork};
use record::{CLEANUP, REFCOUNT, REGULAR, Record};
use watch::Follower;

/// A store in a file.
pub struct FileStore {
    path: PathBuf,
    role: Role,
    /// How long an operation without a timeout waits for the lock.
    lock_timeout: Duration,
    /// Locked while the file's lock is held, so nobody waits for it.
    log: Mutex<Log>,
    epoch: u64,
}

/// Who uses the store.
enum Role {
    /// A rank, which is counted; with the number of ranks, if that is known.
    Rank(Option<usize>),
    /// A program that is no rank of the job.
    Other,
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
    /// The file: device, number and time of creation, because numbers are used again. (Another job's file may be as long.)
    file: Option<(u64, u64, Option<SystemTime>)>,
    /// Bytes read.
    end: u64,
}

/// Time between two reads of the file while waiting, as torch's.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Time between attempts to take the lock, which is held for as long as a read or a write takes.
const LOCK_RETRY: Duration = Duration::from_millis(1);
/// Torch's message for queues in a file.
const NO_QUEUES: &str = "queue support is not implemented.";

impl FileStore {
    /// Opens or creates the file. With a world size, the last of that many stores removes it.
    ///
    /// Errors: a path that cannot be written; a file that no store wrote, which is left as it is.
    pub fn new(path: impl Into<PathBuf>, world_size: Option<usize>) -> Result<Self> {
        let store = FileStore::with(path.into(), Role::Rank(world_size), FOREVER);
        store.change(|log, records| bump(log, records, REFCOUNT, 1))?;
        Ok(store)
    }

    /// Opens an existing file for a program that is no rank of the job: it is not counted, and the file stays when it is closed. To read needs no write
    /// permission. An operation without a timeout of its own waits for the lock for `lock_timeout`, and then returns [`Error::Timeout`].
    ///
    /// Errors: no such file, or one that is not regular.
    pub fn open_existing(path: impl Into<PathBuf>, lock_timeout: Duration) -> Result<Self> {
        let store = FileStore::with(path.into(), Role::Other, lock_timeout);
        let found = store.path.metadata().map_err(|e| store.failed("look into", e))?;
        if !found.is_file() {
            return Err(Error::Usage(format!("{} is not a regular file", store.path.display())));
        }
        Ok(store)
    }

    fn with(path: PathBuf, role: Role, lock_timeout: Duration) -> Self {
        FileStore { path, role, lock_timeout, log: Mutex::default(), epoch: fork::epoch() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn lock_deadline(&self) -> Deadline {
        Deadline::after(self.lock_timeout)
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // After a panic under this lock the log is at worst behind the file.
        lock(&self.log)
    }

    /// Runs `read` on the present contents of the file. A file that does not exist counts as empty.
    fn read<R>(&self, deadline: Deadline, read: impl FnOnce(&Log) -> R) -> Result<R> {
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
        Ok(read(&log))
    }

    /// Appends the records that `change` makes from the present contents of the file, under the exclusive lock.
    fn change<R>(&self, change: impl FnOnce(&mut Log, &mut Vec<u8>) -> Result<R>) -> Result<R> {
        self.change_by(self.lock_deadline(), change)
    }

    fn change_by<R>(&self, deadline: Deadline, change: impl FnOnce(&mut Log, &mut Vec<u8>) -> Result<R>) -> Result<R> {
        let mut open = OpenOptions::new();
        // Only ranks create the file: only their last one removes it.
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

    /// Waits until the keys exist, and then reads them.
    fn wait_and_read<R>(&self, keys: &[&str], deadline: Deadline, late: &dyn Fn() -> String, read: impl Fn(&Values) -> R) -> Result<R> {
        let keys: Vec<_> = keys.iter().map(|key| regular(key)).collect();
        loop {
            match self.read(deadline, |log| keys.iter().all(|key| log.values.contains(key)).then(|| read(&log.values))) {
                Ok(Some(read)) => return Ok(read),
                Ok(None) if deadline.passed() => return Err(Error::Timeout(late())),
                Ok(None) => clock::sleep(deadline.left().map_or(POLL_INTERVAL, |left| left.min(POLL_INTERVAL))),
                Err(error) => return Err(too_late(late(), error)),
            }
        }
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        let path = self.path.display();
        match error.kind() {
            ErrorKind::WouldBlock => Error::Timeout(format!("another process holds the lock of {path}")),
            _ => Error::system(format!("{what} {path}"), error),
        }
    }
}

/// Adds to one of the numbers in the file.
fn bump(log: &mut Log, records: &mut Vec<u8>, key: &[u8], delta: i64) -> Result<i64> {
    // As torch's FileStore reads an empty value as 0. (Its server does not.)
    let text = log.values.get(key).map(|value| value.bytes()).filter(|text| !text.is_empty());
    let sum = values::sum(text, delta)
        .map_err(|_| Error::Usage(format!("add: the value of {} is not a number of 64 bits", String::from_utf8_lossy(key))))?;
    record::write(records, key, sum.to_string().as_bytes());
    Ok(sum)
}

fn regular(key: &str) -> Vec<u8> {
    [&[REGULAR], key.as_bytes()].concat()
}

/// A user's value; empty if there is none.
fn value(values: &Values, key: &str) -> Vec<u8> {
    values.get(&regular(key)).map_or(Vec::new(), |value| value.bytes().to_vec())
}

/// Puts torch's message before that of a timeout of the lock.
fn too_late(words: String, error: Error) -> Error {
    match error {
        Error::Timeout(locked) => Error::Timeout(format!("{words}; {locked}")),
        other => other,
    }
}

/// Torch's message for a wait that has timed out.
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

    /// Appends records, after cutting off what a killed writer left incomplete. All or nothing, as far as the file system allows.
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

/// The next entry of a file.
enum Entry {
    /// The file is another one, or was emptied: what was read before is void.
    Restart,
    /// A key has this value.
    Set(Vec<u8>, Vec<u8>),
    /// A key was deleted.
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
    /// Errors: [`ErrorKind::WouldBlock`] when another process still holds the lock at the deadline.
    fn open(path: &Path, open: &OpenOptions, lock: FlockOperation, deadline: Deadline) -> io::Result<Self> {
        // flock has no timeout: with a deadline it is tried again and again.
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
                Err(Errno::WOULDBLOCK) if !deadline.passed() => {
                    clock::sleep(deadline.left().map_or(LOCK_RETRY, |left| left.min(LOCK_RETRY)))
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing does not unlock it while a child that was forked meanwhile has it open.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl Drop for FileStore {
    /// Counts a rank out; the last removes the file.
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
    /// It has no connection, and holds its lock only while it reads or writes.
    fn reopen(self: Arc<Self>) -> Result<Arc<dyn Store>> {
        Ok(self)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|_, records| put(records, &regular(key), value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let late = || format!("Timeout waiting for key: {key} after {} ms", timeout.as_millis());
        self.wait_and_read(&[key], Deadline::after(timeout), &late, |values| value(values, key))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.wait_and_read(keys, Deadline::after(timeout), &wait_late, |_| ())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.read(self.lock_deadline(), |log| keys.iter().all(|key| log.values.contains(&regular(key))))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.add_by(key, delta, self.lock_deadline())
    }

    fn add_by(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        self.change_by(deadline, |log, records| bump(log, records, &regular(key), delta))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.compare_set_by(key, expected, desired, self.lock_deadline())
    }

    fn compare_set_by(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        let key = regular(key);
        self.change_by(deadline, |log, records| {
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
        self.wait_and_read(keys, Deadline::after(timeout), &wait_late, |values| keys.iter().map(|key| value(values, key)).collect())
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        self.change(|_, records| entries.iter().try_for_each(|(key, value)| put(records, &regular(key), value)))
    }

    /// Always true, as torch's, which does not check whether the key exists.
    fn delete_key(&self, key: &str) -> Result<bool> {
        let key = regular(key);
        self.change(|_, records| {
            record::write_delete(records, &key);
            Ok(true)
        })
    }

    fn num_keys(&self) -> Result<i64> {
        self.read(self.lock_deadline(), |log| log.values.keys().len() as i64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let user = |key: &[u8]| std::str::from_utf8(key.strip_prefix(&[REGULAR])?).ok().map(str::to_owned);
        self.read(self.lock_deadline(), |log| log.values.keys().filter_map(user).collect())
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

    fn watch_key(&self, key: &str, callback: Callback) -> Result<KeyWatch> {
        let key = regular(key);
        let (value, seen) = self.read(self.lock_deadline(), |log| {
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
        self.wait_and_read(&[&last], deadline, &wait_late, |_| ())
    }
}
