//! What is known of this host: a name for it, for handles and endpoints, and its cores. Called at set-up, on any thread.

use sha2::{Digest, Sha256};

/// Hash of the kernel's boot id and of the host name.
///
/// Only a hint: containers may share a kernel and a name without sharing memory, or share memory under two names. That two ends
/// can share memory is proven by doing it.
pub fn id() -> [u8; 16] {
    // What cannot be read counts as empty: a hint need not fail.
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    of(&boot, &name())
}

/// The host name, as uname(2) tells it.
pub fn name() -> Vec<u8> {
    // SAFETY: utsname is arrays of char, for which zeroes are a value.
    let mut uts: libc::utsname = unsafe { std::mem::zeroed() };
    // SAFETY: `uts` is a utsname that outlives the call.
    if unsafe { libc::uname(&mut uts) } != 0 {
        return Vec::new();
    }
    uts.nodename.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect()
}

/// Cores that are online, whichever of them this process may use: a rank that is bound to one has the others for its peers. At least one.
pub fn cores() -> u64 {
    // SAFETY: sysconf takes any number.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.max(1) as u64
}

fn of(boot: &[u8], name: &[u8]) -> [u8; 16] {
    let mut hash = Sha256::new();
    // The separator cannot occur in a boot id, so no two pairs run together.
    hash.update(boot);
    hash.update([0]);
    hash.update(name);
    let mut id = [0; 16];
    id.copy_from_slice(&hash.finalize()[..16]);
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_stable_and_not_empty() {
        assert_eq!(id(), id());
        assert_ne!(id(), of(b"", b""));
        assert!(!name().is_empty());
    }

    #[test]
    fn depends_on_both_parts_and_on_where_they_meet() {
        assert_ne!(of(b"a", b"n"), of(b"b", b"n"));
        assert_ne!(of(b"a", b"n"), of(b"a", b"m"));
        assert_ne!(of(b"ab", b"c"), of(b"a", b"bc"));
    }
}
