//! The commands on a store in a file.

use std::fs::{File, Permissions};
use std::io::BufReader;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use railhead::store::{FileStore, Store};

use super::{line, program};

/// A store in a file, of a job of two ranks of which the first has come.
struct InFile {
    folder: PathBuf,
    path: PathBuf,
    first: Option<FileStore>,
}

impl InFile {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("railhead-store-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("store");
        let first = FileStore::new(&path, Some(2)).expect("a store");
        first.set("k", b"v").expect("set");
        InFile { folder, path, first: Some(first) }
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).expect("read")
    }

    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = program();
        command.arg(name).args(arguments).arg("--file").arg(&self.path).stdin(Stdio::null());
        command
    }

    #[track_caller]
    fn prints(&self, name: &str, arguments: &[&str], status: i32, expected: &str) {
        let output = self.command(name, arguments).output().expect("railhead");
        assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stdout)), (Some(status), expected), "{name}: {output:?}");
    }

    #[track_caller]
    fn fails(&self, name: &str, arguments: &[&str], status: i32, said: &str) {
        let output = self.command(name, arguments).output().expect("railhead");
        assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(status), said), "{name}: {output:?}");
    }
}

impl Drop for InFile {
    fn drop(&mut self) {
        drop(self.first.take());
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn who_looks_into_a_file_is_no_rank_of_the_job() {
    let mut store = InFile::new("look");
    let before = store.bytes();
    store.prints("get", &["k"], 0, "v\n");
    store.prints("wait", &["k"], 0, "");
    store.prints("wait", &["nope", "--timeout", "0.05"], 1, "");
    store.prints("ls", &[], 0, "k\n");
    let mut watch = store.command("watch", &["k"]).stderr(Stdio::piped()).spawn().expect("railhead");
    assert_eq!(line(&mut BufReader::new(watch.stderr.as_mut().expect("piped"))), "watching");
    watch.kill().expect("kill");
    watch.wait().expect("wait");
    assert_eq!(store.bytes(), before, "who looks writes nothing");
    store.prints("add", &["n", "2"], 0, "2\n");
    store.prints("set", &["empty", ""], 0, "");
    store.prints("ls", &[], 0, "empty\nk\nn\n");
    store.prints("set", &["doomed", "v"], 0, "");
    store.prints("delete", &["doomed"], 0, "");
    store.prints("delete", &["doomed"], 1, "");
    // The first may leave before the second comes, and the second is the last.
    drop(store.first.take());
    store.prints("get", &["k"], 0, "v\n");
    let second = FileStore::new(&store.path, Some(2)).expect("a store");
    assert_eq!(second.get("n", Duration::ZERO).expect("get"), b"2");
    drop(second);
    assert!(!store.path.exists(), "the last rank removes the file");
    let gone = format!("railhead: look into {}: No such file or directory (os error 2)\n", store.path.display());
    store.fails("set", &["k", "late"], 2, &gone);
    assert!(!store.path.exists(), "and nobody makes another");
}

#[test]
fn who_may_only_read_a_file_can_look_into_it() {
    let store = InFile::new("read");
    for (path, mode) in [(&store.folder, 0o755), (&store.path, 0o444)] {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("permissions");
    }
    let as_reader = |name: &str, arguments: &[&str]| {
        let mut command = store.command(name, arguments);
        // SAFETY: geteuid has no preconditions.
        if unsafe { libc::geteuid() } == 0 {
            command.uid(65534).gid(65534);
        }
        command.output()
    };
    match as_reader("get", &["k"]) {
        Ok(output) => assert_eq!(output.stdout, b"v\n", "{output:?}"),
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
            println!("SKIP another user may not run the program: {e}");
            return;
        }
        Err(e) => panic!("{e}"),
    }
    assert_eq!(as_reader("ls", &[]).expect("railhead").stdout, b"k\n");
    let output = as_reader("set", &["k", "w"]).expect("railhead");
    let said = format!("railhead: open {}: Permission denied (os error 13)\n", store.path.display());
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(2), &*said));
}

#[test]
fn a_file_whose_lock_somebody_holds_is_not_waited_for_longer_than_told() {
    let store = InFile::new("lock");
    let held = File::open(&store.path).expect("open");
    // SAFETY: a descriptor that is open.
    assert_eq!(unsafe { libc::flock(held.as_raw_fd(), libc::LOCK_EX) }, 0);
    let locked = format!("another process holds the lock of {}\n", store.path.display());
    for (name, arguments, words) in [
        ("get", &["k"][..], "Timeout waiting for key: k after 150 ms; "),
        ("wait", &["k"], "Wait timeout; "),
        ("ls", &[], ""),
        ("set", &["k", "w"], ""),
        ("add", &["n"], ""),
        ("watch", &["k"], ""),
    ] {
        store.fails(name, &[arguments, &["--timeout", "0.15"]].concat(), 1, &format!("railhead: {words}{locked}"));
    }
    drop(held);
    store.prints("get", &["k", "--timeout", "0"], 0, "v\n");
}

#[test]
fn what_is_no_stores_file_is_not_looked_into() {
    let store = InFile::new("foreign");
    let path = store.path.display();
    std::fs::write(&store.path, "Dear diary,\nthis is no store.\n").expect("write");
    store.fails("get", &["k"], 2, &format!("railhead: read {path}: this is not a store's file, or it is damaged\n"));
    std::fs::remove_file(&store.path).expect("remove");
    std::fs::create_dir(&store.path).expect("a folder");
    store.fails("ls", &[], 2, &format!("railhead: {path} is not a regular file\n"));
}
