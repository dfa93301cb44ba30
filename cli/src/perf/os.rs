//! The system calls that the standard library does not offer, each behind a safe function. Called by the coordinator and its ranks.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

/// CLOCK_MONOTONIC in nanoseconds: one clock for all processes of a host.
#[inline]
pub fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// User and system time of this process.
pub fn cpu_seconds() -> f64 {
    // SAFETY: zeroes are a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// This process ends with the thread that started it, however that ends.
pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: sets a property of this process, no memory involved.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })
}

/// What this process is called in lists of processes: it was not started by its name.
pub fn be_called(name: &CStr) -> io::Result<()> {
    // SAFETY: a C string, of which the kernel copies at most 16 bytes.
    check(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) })
}

/// Lets `pid` attach to this process's memory where only ancestors may (Yama). Kernels without Yama refuse, and need nothing.
pub fn allow_attach(pid: u32) {
    const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
    // SAFETY: as above.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::from(pid)) };
}

/// The CPUs that this process may run on, as the kernel lists them: "0-3,8".
pub fn allowed() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.map_or_else(|| "others only".into(), |list| list.trim().to_owned())
}

/// Keeps this thread, and those that it starts, on one CPU.
pub fn stay_on(cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: zeroes are the empty set; `cpu` is within it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        check(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set))
    }
}

/// Raises the limit on open files as far as it goes without privilege.
pub fn raise_open_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is ours.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// A file in memory that other processes can open in /proc.
pub fn memory_file() -> io::Result<File> {
    // SAFETY: a C string.
    let fd = unsafe { libc::memfd_create(c"railhead-perf".as_ptr(), libc::MFD_CLOEXEC) };
    check(fd)?;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// From here on this thread's process_vm_readv and process_vm_writev are EPERM, and those of threads that it starts.
pub fn refuse_cross_memory_attach() -> io::Result<()> {
    let op = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, equal, ret) =
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::BPF_RET | libc::BPF_K);
    let mut filter = [
        // seccomp_data.nr is its first word (linux/seccomp.h).
        op(load, 0, 0, 0),
        op(equal, 1, 0, libc::SYS_process_vm_readv as u32),
        op(equal, 0, 1, libc::SYS_process_vm_writev as u32),
        op(ret, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        op(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the calls; they change what this process may do and nothing else.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        check(libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC, &raw const program) as i32)
    }
}

/// Reads another process's memory into `into`; how many bytes came.
pub fn read_peer(pid: u32, addr: usize, into: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: the local part is the slice, borrowed for writing; the kernel checks the remote one.
    let n = unsafe { libc::process_vm_readv(pid as libc::pid_t, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Whether a rank may take so many bytes: there are two, and the limits have theirs.
pub fn can_hold(bytes: usize) -> anyhow::Result<()> {
    let info = std::fs::read_to_string("/proc/meminfo")?;
    let available = info.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    // A kernel too old to tell: the allocation itself will.
    let Some(available) = available.map(|kilobytes| kilobytes * 1024) else { return Ok(()) };
    anyhow::ensure!(
        bytes <= available / 2,
        "{} MiB of buffers in each rank, and {} MiB of memory are free: fewer outstanding, fewer comms or smaller messages",
        bytes >> 20,
        available >> 20
    );
    Ok(())
}

fn check(rc: libc::c_int) -> io::Result<()> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
