//! `railhead_rendezvous_*`: how a C program finds its job's store, rank and number of ranks. Casts and checks; the rules are `store::rendezvous`'s.
//! On the threads of the host program, which wait for the job.

// What callers owe stands in the header's words, which are these functions' documentation: C's callers do not read "# Safety".
#![allow(clippy::missing_safety_doc)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use crate::abi::boundary::{Out, bad_pointer, slice};
use crate::abi::objects::Objects;
use crate::abi::status::{call, railhead_status_t};
use crate::abi::store::convert::{User, text, timeout};
use crate::abi::store::{environment, found, open, railhead_store_t};
use crate::store::Error;
use crate::store::rendezvous::{self, DEFAULT_TIMEOUT, Group, GroupOptions, Joined, RendezvousArgs};

/// Ranks that share a name space of a store: an opaque handle, ended by railhead_rendezvous_leave. Threads: as for a railhead_store_t.
#[allow(non_camel_case_types)]
pub struct railhead_group_t(());

/// Carries out the rendezvous of a scheme of the program's own: writes a store's handle, which the library closes, the rank and the number of ranks, and
/// returns 0. Anything else is an error. `url` ends with 0 and is the library's until the callback returns. Called on the thread that asked for the rendezvous; must not throw.
#[allow(non_camel_case_types)]
pub type railhead_rendezvous_callback_t = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        url: *const c_char,
        timeout_ms: i64,
        store: *mut *mut railhead_store_t,
        rank: *mut i64,
        world_size: *mut i64,
    ) -> c_int,
>;

static GROUPS: Objects<Group> = Objects::new(0xb3, "group");

/// Finds the job's store, this process's rank and the number of ranks (-1 if nobody has said).
///
/// `url`: tcp://host:port, env://, file:///path or one of railhead_rendezvous_register, with torch's rules; NULL is env://, which reads MASTER_ADDR,
/// MASTER_PORT, RANK and WORLD_SIZE, the last two also under the names that Open MPI, MPICH and Slurm give them. `rank`, `world_size`: -1 if the URL or
/// the environment says it. `timeout_ms`: less than 0 is torch's 30 minutes. With tcp:// and env:// rank 0 runs the server, as long as its store is
/// open, unless torchrun's agent does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_rendezvous(
    url: *const c_char,
    rank: i64,
    world_size: i64,
    timeout_ms: i64,
    store: *mut *mut railhead_store_t,
    own_rank: *mut i64,
    ranks: *mut i64,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, or NULL, and three places.
    call(|| unsafe {
        let (own_rank, ranks) = (Out::new(own_rank, "own_rank")?, Out::new(ranks, "ranks")?);
        let url = if url.is_null() { "env://" } else { text(url, "url")? };
        open(store, || {
            let joined = rendezvous::rendezvous(url, rank, world_size, duration(timeout_ms), environment())?.join()?;
            own_rank.set(joined.rank);
            ranks.set(joined.world_size);
            Ok(joined.store)
        })
    })
}

/// Adds a scheme for this process; forked children add it again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_rendezvous_register(
    scheme: *const c_char,
    callback: railhead_rendezvous_callback_t,
    user: *mut c_void,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a function.
    call(|| unsafe {
        let callback = callback.ok_or_else(|| bad_pointer(0, "callback", 1))?;
        let user = User(user);
        let handler = move |args: &RendezvousArgs| {
            let user = &user;
            let words = args.url.to_string();
            let url = CString::new(words.clone()).map_err(|_| Error::Usage(format!("a URL with a 0 in it: {words}")))?;
            let (mut store, mut rank, mut world_size) = (ptr::null_mut(), -1, -1);
            let timeout = i64::try_from(args.timeout.as_millis()).unwrap_or(-1);
            // The caller gave the function for these arguments; all of them outlive the call.
            match callback(user.0, url.as_ptr(), timeout, &mut store, &mut rank, &mut world_size) {
                0 => {}
                code => return Err(Error::Usage(format!("the rendezvous handler for {words} returned {code}"))),
            }
            let joined = found(store).map(|store| Joined { store, rank, world_size });
            let _ = super::store::railhead_store_close(store);
            joined
        };
        rendezvous::register(text(scheme, "scheme")?, Arc::new(handler))
    })
}

/// As torch's init_process_group: finds the others as railhead_rendezvous does, or takes `store`, which needs `rank` and `world_size` then, and gives the
/// group of all ranks. `url` and `store` may be NULL, one of them must be unless the URL is to be env://.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_rendezvous_join(
    url: *const c_char,
    store: *mut railhead_store_t,
    rank: i64,
    world_size: i64,
    timeout_ms: i64,
    group: *mut *mut railhead_group_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, or NULL, and a place; `store` is looked up.
    call(|| unsafe {
        let out = Out::new(group, "group")?;
        let init_method = if url.is_null() { None } else { Some(text(url, "url")?.to_owned()) };
        let store = if store.is_null() { None } else { Some(found(store)?) };
        let environment = environment();
        let group = Group::init(GroupOptions { init_method, store, rank, world_size, timeout: duration(timeout_ms), environment })?;
        out.set(GROUPS.insert(group));
        Ok(())
    })
}

/// As torch's new_group: a group of these ranks of the job. Every rank of the job calls it, members or not, in the same order; who is not a member gets
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_rendezvous_new_group(
    job: *mut railhead_group_t,
    ranks: *const i64,
    count: usize,
    group: *mut *mut railhead_group_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for `count` numbers and a place; `job` is looked up.
    call(|| unsafe {
        let out = Out::new(group, "group")?;
        let job = GROUPS.get(job)?;
        if count as u64 > job.world_size() as u64 {
            return Err(Error::Usage(format!("argument 'count' is {count}: the job has {} ranks", job.world_size())));
        }
        let ranks = if count == 0 { &[] } else { slice(ranks, count, "ranks")? };
        out.set(job.new_group(Some(ranks))?.map_or(ptr::null_mut(), |group| GROUPS.insert(group)));
        Ok(())
    })
}

/// This process's rank in the group, and how many ranks it has. Either place may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_rendezvous_ranks(group: *mut railhead_group_t, own_rank: *mut i64, ranks: *mut i64) -> railhead_status_t {
    // SAFETY: the header asks the caller for two places, or NULL.
    call(|| unsafe {
        let (own_rank, ranks) = (Out::optional(own_rank, "own_rank")?, Out::optional(ranks, "ranks")?);
        let group = GROUPS.get(group)?;
        own_rank.into_iter().for_each(|out| out.set(group.rank()));
        ranks.into_iter().for_each(|out| out.set(group.world_size()));
        Ok(())
    })
}

/// The group's store, whose keys no other group sees: a handle of its own, closed as any other, on the group's connection, if there is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_rendezvous_store(group: *mut railhead_group_t, store: *mut *mut railhead_store_t) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place; `group` is looked up.
    call(|| unsafe {
        let group = GROUPS.get(group)?;
        open(store, || Ok(Arc::clone(group.store())))
    })
}

/// Waits until all ranks of the group have come, for at most `timeout_ms` (less than 0: 30 minutes). All ranks call it equally often.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_rendezvous_barrier(group: *mut railhead_group_t, timeout_ms: i64) -> railhead_status_t {
    call(|| GROUPS.get(group)?.barrier(duration(timeout_ms)))
}

/// Ends a group's handle. The job's server, if this process runs it, lives on while a store or a group of it is open.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_rendezvous_leave(group: *mut railhead_group_t) -> railhead_status_t {
    call(|| Ok(GROUPS.remove(group).map(drop)?))
}

fn duration(ms: i64) -> Duration {
    if ms < 0 { DEFAULT_TIMEOUT } else { timeout(ms) }
}
