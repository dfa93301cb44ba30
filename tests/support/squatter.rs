//! A process that takes the number of one that has ended, as happens by itself once all numbers were used. Needs CAP_SYS_ADMIN or
//! CAP_CHECKPOINT_RESTORE, and Linux 5.5. Used by the tests of the library and by unit tests.

/// Lives until dropped; a copy of the process that made it, except that it does nothing.
pub struct Squatter {
    pid: i32,
}

impl Squatter {
    /// Takes `pid`, whose process was waited for. `None`, and said so, where the kernel does not let this process choose.
    pub fn of(pid: i32) -> Option<Squatter> {
        // SAFETY: a struct of integers.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.exit_signal = libc::SIGCHLD as u64;
        args.set_tid = &raw const pid as u64;
        args.set_tid_size = 1;
        // SAFETY: as fork: `args` names `pid`, which outlives the call. The child makes system calls and nothing else.
        match unsafe { libc::syscall(libc::SYS_clone3, &args, size_of::<libc::clone_args>()) } {
            0 => loop {
                // SAFETY: plain system calls.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                // SAFETY: as above.
                unsafe { libc::pause() };
            },
            got if got > 0 => Some(Squatter { pid }),
            _ => {
                let error = std::io::Error::last_os_error();
                assert!(matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)), "clone3: {error}");
                eprintln!("SKIP: the kernel does not let this process choose a number ({error})");
                None
            }
        }
    }
}

impl Drop for Squatter {
    fn drop(&mut self) {
        // SAFETY: our own child, not waited for before.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // SAFETY: as above; no status is asked for.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}
