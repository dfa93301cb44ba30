//! Segments shared with another process of this host. Made and attached by the fabric at connection set-up, used on the thread that
//! drives the queue pair.
//!
//! A memfd is preferred: it is sealed, so that nobody can shrink it under us (a load past the end would be SIGBUS), and it has no name
//! to leave behind. It takes memory page by page, as it is touched, where the kernel has no reason to refuse one (that would be SIGBUS, too). A file in
//! /dev/shm, which has a size, is for peers that share /dev/shm but no socket namespace; its name is removed as soon as both have it open. The owner holds a lock on its file, so a later process can tell a left-over from a segment in use,
//! even where process ids mean nothing (another pid namespace).

use std::ffi::{CStr, CString};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw};
use once_cell::race::OnceBool;

use super::{View, page_round};
use crate::base::error::{Error, Result};
use crate::base::fd::{File, OwnedFd};
use crate::base::{fork, rand};

/// How the names of our files in /dev/shm begin.
pub const FILE_PREFIX: &str = "railhead-";
const DIRECTORY: &str = "/dev/shm";
/// Hexadecimal digits behind the prefix.
const NAME_DIGITS: usize = 32;

/// What a memfd must carry to be trusted. Writing stays allowed.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A mapped segment.
pub struct Shm {
    map: MmapRaw,
    /// Before the file, whose lock says that it has an owner.
    name: Option<Name>,
    /// None where nobody is to be given it any more: what is mapped stays.
    file: Option<File>,
}

/// The file's name in /dev/shm, while it is ours to remove.
struct Name {
    name: String,
    path: PathBuf,
    linked: AtomicBool,
    epoch: u64,
}

impl Shm {
    /// Makes a sealed, zeroed memfd of `len` bytes, rounded up to whole pages, all of which there are. `name` shows in /proc.
    ///
    /// Errors: no memory or descriptor.
    pub fn create(name: &str, len: usize) -> Result<Shm> {
        let (map, file) = sealed(name, len, allocate)?;
        Ok(Shm { map, file: Some(file), name: None })
    }

    /// The same, of pages that come when they are first touched. If one cannot be had by then, the system is out of memory as it is with private memory.
    ///
    /// Errors: no descriptor.
    pub fn create_lazy(name: &str, len: usize) -> Result<Shm> {
        let (map, file) = sealed(name, len, extend)?;
        Ok(Shm { map, file: Some(file), name: None })
    }

    /// The same, of small pages. Also the descriptor, by which a peer maps it: this side does without.
    ///
    /// Errors: no descriptor.
    pub fn create_sparse(name: &str, len: usize) -> Result<(Shm, File)> {
        let (map, file) = sealed(name, len, extend)?;
        // Where the system prefers huge pages, a touch would take 2 MiB. A kernel without them refuses.
        let _ = map.advise(Advice::NoHugePage);
        Ok((Shm { map, file: None, name: None }, file))
    }

    /// Maps a memfd that a peer sent.
    ///
    /// Errors: anything but a memfd of exactly `len` bytes, in whole pages, that nobody can resize any more.
    pub fn attach(fd: OwnedFd, len: usize) -> Result<Shm> {
        let len = checked_len(len)?;
        let file: File = fd.convert();
        // SAFETY: the descriptor is open; the command takes no argument.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(Error::remote(format!("shared memory from the peer is not sealed (seals {seals:#x}, need {SEALS:#x})")));
        }
        let actual = file.metadata().map_err(|e| Error::system("fstat of shared memory", e))?.len();
        if actual != len as u64 {
            return Err(Error::remote(format!("shared memory from the peer has {actual} bytes, expected {len}")));
        }
        Ok(Shm { map: map(&file, len)?, file: None, name: None })
    }

    /// Makes a zeroed file of `len` bytes, rounded up to whole pages, in /dev/shm, under a new random name and readable by this user alone.
    /// The name is removed by [`Shm::unlink`], or by dropping.
    ///
    /// Errors: no /dev/shm, or no room in it.
    pub fn create_file(len: usize) -> Result<Shm> {
        Self::create_file_in(Path::new(DIRECTORY), len)
    }

    fn create_file_in(directory: &Path, len: usize) -> Result<Shm> {
        let len = checked_len(len)?;
        // A sweep that opens the file between its creation and its lock takes it for a left-over: then it gets another name.
        for _ in 0..16 {
            let name = random_name()?;
            let path = directory.join(&name);
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
                .open(&path)
                .map(File::new)
                .map_err(|e| Error::system(format!("creating {}", path.display()), e))?;
            let name = Name { name, path, linked: AtomicBool::new(true), epoch: fork::epoch() };
            if !lock(&file) || links(&file)? == 0 {
                name.unlink();
                continue;
            }
            // On failure the name goes with `name`.
            allocate(&file, len)?;
            return Ok(Shm { map: map(&file, len)?, file: Some(file), name: Some(name) });
        }
        Err(Error::internal("no name in /dev/shm survived its creation"))
    }

    /// Maps the file of that name, which the peer made.
    ///
    /// Errors: a name that [`Shm::create_file`] does not make; a file that is missing, another user's, or not of exactly `len` bytes, in
    /// whole pages.
    pub fn open_file(name: &str, len: usize) -> Result<Shm> {
        Self::open_file_in(Path::new(DIRECTORY), name, len)
    }

    fn open_file_in(directory: &Path, name: &str, len: usize) -> Result<Shm> {
        let len = checked_len(len)?;
        if !is_our_name(name) {
            return Err(Error::remote("the peer named a file in /dev/shm that Railhead does not make"));
        }
        let path = directory.join(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path)
            .map(File::new)
            .map_err(|e| Error::system(format!("opening {}", path.display()), e))?;
        let meta = file.metadata().map_err(|e| Error::system("fstat of shared memory", e))?;
        if !is_ours(&meta) || meta.len() != len as u64 {
            return Err(Error::remote(format!("{} is not this user's segment of {len} bytes", path.display())));
        }
        Ok(Shm { map: map(&file, len)?, file: None, name: None })
    }

    /// Removes the file's name, if there is one: both ends have it open.
    pub fn unlink(&self) {
        if let Some(name) = &self.name {
            name.unlink();
        }
    }

    /// The file's name in /dev/shm, for the peer to open; `None` for a memfd and for what was opened by name.
    pub fn name(&self) -> Option<&str> {
        self.name.as_ref().map(|n| n.name.as_str())
    }

    /// The file's path, for another process of this user; `None` as for [`Shm::name`].
    pub fn path(&self) -> Option<PathBuf> {
        self.name.as_ref().map(|n| n.path.clone())
    }

    /// The descriptor, to be sent to peers, of what [`Shm::create`], [`Shm::create_lazy`] or [`Shm::create_file`] has made.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.as_fd())
    }

    /// Keeps the descriptor open in forked children: the application gets its number.
    pub fn share_with_children(&self) {
        self.file.iter().for_each(File::share_with_children);
    }

    /// Bytes: whole pages.
    #[inline]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Never: there is at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Address of the first byte.
    #[inline]
    pub fn addr(&self) -> usize {
        self.map.as_mut_ptr() as usize
    }

    #[inline]
    pub(super) fn view(&self) -> View {
        View { base: self.map.as_mut_ptr(), len: self.map.len() }
    }
}

impl Name {
    fn unlink(&self) {
        // A forked child drops its copy of the parent's segment, not the parent's file.
        if self.epoch == fork::epoch() && self.linked.swap(false, Ordering::Relaxed) {
            // Another process may have removed it: then there is nothing to do.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// Removes the files of this user's dead processes from /dev/shm; returns how many. Called once per init.
pub fn sweep() -> usize {
    sweep_in(Path::new(DIRECTORY))
}

fn sweep_in(directory: &Path) -> usize {
    // No /dev/shm means nothing to sweep.
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    entries
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            if !name.to_str().is_some_and(is_our_name) {
                return false;
            }
            let path = entry.path();
            let Ok(file) = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(&path)
                .map(File::new)
            else {
                return false;
            };
            // The lock can only be had once its owner is gone: the kernel drops it with the process.
            file.metadata().is_ok_and(|meta| is_ours(&meta)) && lock(&file) && std::fs::remove_file(&path).is_ok()
        })
        .count()
}

/// An empty memfd that can be sealed.
pub(crate) fn memfd(name: &CStr) -> Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Some systems (vm.memfd_noexec = 2) allow none but those that can never be executed, of which kernels before 6.3 know nothing.
    create(name, flags | libc::MFD_NOEXEC_SEAL)
        .or_else(|e| if e.raw_os_error() == Some(libc::EINVAL) { create(name, flags) } else { Err(e) })
        .map_err(|e| Error::system(format!("memfd_create({})", name.to_string_lossy()), e))
}

fn create(name: &CStr, flags: libc::c_uint) -> io::Result<File> {
    // SAFETY: `name` is a terminated string that outlives the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just returned this descriptor, so nobody else owns it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// A sealed memfd of `len` bytes, in whole pages, which `fill` gives it, and its mapping.
fn sealed(name: &str, len: usize, fill: fn(&File, usize) -> Result<()>) -> Result<(MmapRaw, File)> {
    let len = checked_len(len)?;
    let name = CString::new(name).map_err(|_| Error::internal("NUL in a memfd's name"))?;
    let file = memfd(&name)?;
    fill(&file, len)?;
    // SAFETY: the descriptor is open; the command takes an integer.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(Error::last_os("sealing a memfd"));
    }
    Ok((map(&file, len)?, file))
}

fn checked_len(len: usize) -> Result<usize> {
    page_round(len).filter(|&n| n > 0 && n <= isize::MAX as usize).ok_or_else(|| Error::internal(format!("cannot share {len} bytes")))
}

/// Takes the pages now: a full tmpfs is an error here, and would be SIGBUS at the first store otherwise.
fn allocate(file: &File, len: usize) -> Result<()> {
    loop {
        // SAFETY: the descriptor is open; the call takes integers.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len as libc::off_t) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(Error::system(format!("allocating {len} bytes of shared memory"), error));
        }
    }
}

/// Makes the file longer, without the pages. A memfd lies on no file system that could be full.
fn extend(file: &File, len: usize) -> Result<()> {
    if counts_every_page() {
        return allocate(file, len);
    }
    file.set_len(len as u64).map_err(|e| Error::system(format!("making shared memory of {len} bytes"), e))
}

/// Whether the kernel refuses pages while there is memory, namely beyond a limit on all that processes may have (vm.overcommit_memory = 2), or that
/// cannot be found out. It is set when a system is set up, so it is looked at once.
fn counts_every_page() -> bool {
    static COUNTS: OnceBool = OnceBool::new();
    COUNTS.get_or_init(|| !std::fs::read("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| matches!(mode.first(), Some(b'0' | b'1'))))
}

fn map(file: &File, len: usize) -> Result<MmapRaw> {
    let map = MmapOptions::new().len(len).map_raw(file).map_err(|e| Error::system(format!("mmap of {len} bytes"), e))?;
    map.advise(Advice::DontFork).map_err(|e| Error::system("madvise(MADV_DONTFORK)", e))?;
    Ok(map)
}

/// Takes the lock that marks the file as in use; false if another process has it.
fn lock(file: &File) -> bool {
    // SAFETY: the descriptor is open; the call takes integers.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

fn links(file: &File) -> Result<u64> {
    Ok(file.metadata().map_err(|e| Error::system("fstat of shared memory", e))?.nlink())
}

fn is_ours(meta: &std::fs::Metadata) -> bool {
    // SAFETY: geteuid takes nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    meta.is_file() && meta.uid() == user && meta.mode() & 0o077 == 0
}

fn random_name() -> Result<String> {
    let mut bytes = [0u8; NAME_DIGITS / 2];
    rand::fill(&mut bytes)?;
    Ok(bytes.iter().fold(FILE_PREFIX.to_string(), |name, byte| format!("{name}{byte:02x}")))
}

/// Whether [`random_name`] could have made it: no separator, no dot.
fn is_our_name(name: &str) -> bool {
    name.strip_prefix(FILE_PREFIX)
        .is_some_and(|rest| rest.len() == NAME_DIGITS && rest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::base::fork::tests::in_child;

    const PAGE: usize = 4096;

    fn dup(file: &File) -> OwnedFd {
        OwnedFd::new(file.try_clone().unwrap())
    }

    fn files(directory: &Path) -> Vec<String> {
        std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn two_mappings_of_a_memfd_are_one_memory_that_nobody_can_resize() {
        let a = Shm::create("test", PAGE + 1).unwrap();
        assert_eq!((a.len(), a.name()), (2 * PAGE, None));
        let b = Shm::attach(dup(a.file.as_ref().unwrap()), 2 * PAGE).unwrap();
        assert_ne!(a.addr(), b.addr());
        assert_eq!(b.load_u64(2 * PAGE - 8, Relaxed), 0);
        a.store_u64(2 * PAGE - 8, 7, Relaxed);
        assert_eq!(b.load_u64(2 * PAGE - 8, Relaxed), 7);
        for len in [0, PAGE as u64, 3 * PAGE as u64] {
            assert!(a.file.as_ref().unwrap().set_len(len).is_err(), "resized to {len}");
        }
    }

    /// Bytes of memory behind a file.
    fn taken(file: &File) -> u64 {
        file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn pages_that_were_never_touched_take_no_memory() {
        let (a, file) = Shm::create_sparse("test", 100 * PAGE).unwrap();
        let b = Shm::attach(dup(&file), 100 * PAGE).unwrap();
        if !counts_every_page() {
            assert_eq!(taken(&file), 0);
        }
        a.store_u64(50 * PAGE, 7, Relaxed);
        assert_eq!((b.load_u64(50 * PAGE, Relaxed), b.load_u64(99 * PAGE, Relaxed)), (7, 0));
        if !counts_every_page() {
            assert!(taken(&file) <= 2 * PAGE as u64, "{} bytes", taken(&file));
        }
        assert!(file.set_len(0).is_err() && file.set_len(1 << 20).is_err(), "resized");
        // There at once: what cannot be had is an error, not a signal later.
        let whole = Shm::create("test", 100 * PAGE).unwrap();
        assert_eq!(taken(whole.file.as_ref().unwrap()), 100 * PAGE as u64);
    }

    #[test]
    fn attach_refuses_what_could_change_its_size_or_has_another() {
        let good = Shm::create("test", PAGE).unwrap();
        let good = good.file.as_ref().unwrap();
        assert!(Shm::attach(dup(good), 2 * PAGE).is_err());
        assert!(Shm::attach(dup(good), 0).is_err());
        // SAFETY: a terminated name.
        let bare = unsafe { libc::memfd_create(c"bare".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        // SAFETY: the call just returned it.
        let bare = unsafe { File::from_raw_fd(bare) };
        bare.set_len(PAGE as u64).unwrap();
        assert!(Shm::attach(OwnedFd::new(bare.try_clone().unwrap()), PAGE).is_err(), "not sealed");
        // SAFETY: an open descriptor and an integer.
        assert_eq!(unsafe { libc::fcntl(bare.as_raw_fd(), libc::F_ADD_SEALS, SEALS & !libc::F_SEAL_SHRINK) }, 0);
        assert!(Shm::attach(bare.convert(), PAGE).is_err(), "may shrink");
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE as u64).unwrap();
        assert!(Shm::attach(OwnedFd::new(file), PAGE).is_err(), "a file");
        assert!(Shm::attach(OwnedFd::new(std::fs::File::open("/dev/null").unwrap()), PAGE).is_err(), "a device");
    }

    #[test]
    fn a_file_is_shared_by_name_and_its_name_goes_when_told_or_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let a = Shm::create_file_in(dir.path(), PAGE).unwrap();
        let name = a.name().unwrap().to_string();
        assert_eq!(files(dir.path()), std::slice::from_ref(&name));
        assert_eq!(std::fs::metadata(dir.path().join(&name)).unwrap().mode() & 0o777, 0o600);
        let b = Shm::open_file_in(dir.path(), &name, PAGE).unwrap();
        a.store_u32(4, 9, Relaxed);
        assert_eq!(b.load_u32(4, Relaxed), 9);
        assert!(Shm::open_file_in(dir.path(), &name, 2 * PAGE).is_err());
        drop(b);
        assert_eq!(files(dir.path()).len(), 1, "the name is the maker's to remove");
        a.unlink();
        assert_eq!(files(dir.path()).len(), 0);
        drop(a);
        let c = Shm::create_file_in(dir.path(), PAGE).unwrap();
        assert_ne!(c.name(), Some(name.as_str()));
        drop(c);
        assert_eq!(files(dir.path()).len(), 0);
    }

    #[test]
    fn no_name_but_our_own_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let shm = Shm::create_file_in(dir.path(), PAGE).unwrap();
        let name = shm.name().unwrap();
        let target = dir.path().join(name);
        let other = |file: &str| std::os::unix::fs::symlink(&target, dir.path().join(file)).map(|()| file.to_string()).unwrap();
        let link = other(&format!("{FILE_PREFIX}{}", "0".repeat(NAME_DIGITS)));
        let cases = [
            other("plain"),
            other("railhead-0"),
            link,
            format!("./{name}"),
            format!("{name}/"),
            name.to_uppercase(),
            "..".into(),
            String::new(),
        ];
        for case in cases {
            assert!(Shm::open_file_in(dir.path(), &case, PAGE).is_err(), "{case}");
        }
        std::fs::set_permissions(&target, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        assert!(Shm::open_file_in(dir.path(), name, PAGE).is_err(), "others may read it");
    }

    #[test]
    fn too_much_is_an_error_that_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        for len in [0, usize::MAX] {
            assert!(Shm::create_file_in(dir.path(), len).is_err() && Shm::create("test", len).is_err());
        }
        // More than the file system has. A memfd has no such limit but the machine's memory, so it is not asked for.
        assert!(Shm::create_file_in(dir.path(), 1 << 60).is_err());
        assert_eq!(files(dir.path()).len(), 0);
    }

    #[test]
    fn a_sweep_takes_the_files_of_the_dead_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        // _exit runs no destructor, as if killed.
        assert!(in_child(|| Shm::create_file_in(dir.path(), PAGE).map(std::mem::forget).is_ok()));
        assert_eq!(files(dir.path()).len(), 1);
        let live = Shm::create_file_in(dir.path(), PAGE).unwrap();
        for other in ["railhead-notes", "unrelated"] {
            std::fs::write(dir.path().join(other), "x").unwrap();
        }
        assert_eq!(sweep_in(dir.path()), 1);
        let mut left = files(dir.path());
        left.sort();
        let mut expected = vec![live.name().unwrap().to_string(), "railhead-notes".into(), "unrelated".into()];
        expected.sort();
        assert_eq!(left, expected);
        assert_eq!(sweep_in(&dir.path().join("missing")), 0);
    }

    #[test]
    fn a_forked_child_neither_has_the_memory_nor_removes_the_name() {
        let dir = tempfile::tempdir().unwrap();
        let shm = std::mem::ManuallyDrop::new(Shm::create_file_in(dir.path(), PAGE).unwrap());
        assert!(in_child(|| {
            // SAFETY: the child's copy, which nobody uses afterwards: the child ends without destructors.
            drop(unsafe { std::ptr::read(&*shm) });
            true
        }));
        assert_eq!(files(dir.path()).len(), 1);
        assert!(!in_child(|| shm.load_u32(0, Relaxed) == 0), "the child reads the parent's segment");
        drop(std::mem::ManuallyDrop::into_inner(shm));
        assert_eq!(files(dir.path()).len(), 0);
    }
}
