//! Secrets and nonces from the kernel. Called at set-up, on any thread.

use std::io;

use crate::base::error::{Error, Result};

/// Fills `out` with bytes that nobody can guess.
///
/// Errors: a kernel that has no getrandom(2) (before 3.17) or forbids it.
pub fn fill(out: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < out.len() {
        let rest = &mut out[done..];
        // SAFETY: the kernel writes at most `rest.len()` bytes at `rest`, which is borrowed exclusively.
        let n = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        if n < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(Error::system("getrandom", error));
            }
        } else {
            done += n as usize;
        }
    }
    Ok(())
}

/// A random number.
pub fn u64() -> Result<u64> {
    let mut bytes = [0; 8];
    fill(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fills_every_byte_differently_each_time() {
        // 300 is more than getrandom promises to give at once. 2400 bits: chance is out of the question.
        let (mut a, mut b) = ([0u8; 300], [0u8; 300]);
        fill(&mut a).unwrap();
        fill(&mut b).unwrap();
        assert_ne!(a, b);
        for part in a.chunks(20).chain(b.chunks(20)) {
            assert_ne!(part, [0; 20]);
        }
        assert_ne!(u64().unwrap(), u64().unwrap());
    }

    #[test]
    fn nothing_asked_is_no_error() {
        fill(&mut []).unwrap();
    }
}
