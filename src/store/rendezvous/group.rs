//! Groups of ranks: what torch's init_process_group and new_group do with a store. Each rank calls them in the same order, on any thread.
//!
//! Key prefixes are torch's, so that torch and Railhead ranks can be in one job: all keys are under `default_pg`, and each group's under its name and "/".
//! The first group is called "0", further ones by the number of groups made before.
//!
//! Source: torch 2.15, torch/distributed/distributed_c10d.py.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{DEFAULT_TIMEOUT, Environment, rendezvous};
use crate::store::{Deadline, Error, FOREVER, PrefixStore, Result, Store};

/// Prefix of everything that groups keep in the store.
pub const DEFAULT_GROUP: &str = "default_pg";

/// How a job's first group is made.
pub struct GroupOptions {
    /// URL of the rendezvous; `env://` if there is neither this nor a store.
    pub init_method: Option<String>,
    /// An open store. Needs the next two.
    pub store: Option<Arc<dyn Store>>,
    /// This process's rank; -1 to take it from the URL or the environment.
    pub rank: i64,
    /// Number of ranks; -1 to take it from the URL or the environment.
    pub world_size: i64,
    /// For the rendezvous.
    pub timeout: Duration,
    /// The variables.
    pub environment: Environment,
}

impl Default for GroupOptions {
    /// Torch's: everything from the environment, 30 minutes.
    fn default() -> Self {
        GroupOptions {
            init_method: None,
            store: None,
            rank: -1,
            world_size: -1,
            timeout: DEFAULT_TIMEOUT,
            environment: Environment::process(),
        }
    }
}

/// Ranks that share a name space of the store.
pub struct Group {
    name: String,
    store: Arc<dyn Store>,
    /// This process's index in `ranks`.
    rank: i64,
    /// The members, by their ranks in the job, in order.
    ranks: Vec<i64>,
    job: Arc<Job>,
    /// Barriers that this process has joined.
    barriers: AtomicU64,
}

/// What all groups of a job share.
struct Job {
    /// The first group's store.
    store: Arc<dyn Store>,
    rank: i64,
    world_size: i64,
    groups: AtomicU64,
}

impl Group {
    /// Makes the job's first group.
    ///
    /// Errors: torch's words for arguments that exclude each other or are missing; those of the rendezvous; a rank that is not below the number of ranks.
    pub fn init(options: GroupOptions) -> Result<Group> {
        let (store, rank, world_size) = match (options.store, options.init_method) {
            (Some(_), Some(_)) => return Err(Error::Usage("Cannot specify both init_method and store.".into())),
            (Some(_), None) if options.world_size <= 0 => return Err(Error::Usage("world_size must be positive if using store".into())),
            (Some(_), None) if options.rank < 0 => return Err(Error::Usage("rank must be non-negative if using store".into())),
            (Some(store), None) => (store, options.rank, options.world_size),
            (None, method) => {
                let method = method.as_deref().unwrap_or("env://");
                let mut pending = rendezvous(method, options.rank, options.world_size, options.timeout, options.environment)?;
                let joined = pending.join()?;
                (joined.store, joined.rank, joined.world_size)
            }
        };
        if rank < 0 || rank >= world_size {
            return Err(Error::Usage(format!("rank {rank} of {world_size}: expected 0 to {}", world_size.max(1) - 1)));
        }
        let name = "0".to_owned();
        let store = within(&name, Arc::new(PrefixStore::new(DEFAULT_GROUP, store)));
        let job = Arc::new(Job { store: Arc::clone(&store), rank, world_size, groups: AtomicU64::new(1) });
        Ok(Group { name, store, rank, ranks: (0..world_size).collect(), job, barriers: AtomicU64::new(0) })
    }

    /// Makes a group of these ranks of the job, or of all. Every rank of the job calls it, members or not, in the same order; only members get one.
    ///
    /// Errors: torch's words for ranks that do not exist or come twice.
    pub fn new_group(&self, ranks: Option<&[i64]>) -> Result<Option<Group>> {
        let size = self.job.world_size;
        let mut ranks = ranks.map_or_else(|| (0..size).collect(), <[i64]>::to_vec);
        ranks.sort_unstable();
        if ranks.windows(2).any(|pair| pair.first() == pair.last()) {
            return Err(Error::Usage(format!("ranks list must not contain duplicate entries, got {ranks:?}")));
        }
        if ranks.len() as i64 > size {
            let most = "the new group's world size should be less or equal to the world size set by init_process_group";
            return Err(Error::Usage(most.into()));
        }
        if let Some(rank) = ranks.iter().find(|rank| !(0..size).contains(*rank)) {
            let last = size - 1;
            return Err(Error::Usage(format!("Rank {rank} is out of range. Valid ranks are 0 to {last} (world_size={size})")));
        }
        let name = self.job.groups.fetch_add(1, Ordering::Relaxed).to_string();
        let Some(rank) = ranks.iter().position(|rank| *rank == self.job.rank) else { return Ok(None) };
        let store = within(&name, Arc::clone(&self.job.store));
        let job = Arc::clone(&self.job);
        Ok(Some(Group { name, store, rank: rank as i64, ranks, job, barriers: AtomicU64::new(0) }))
    }

    /// The group's name space.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> i64 {
        self.rank
    }

    /// How many ranks the group has.
    pub fn world_size(&self) -> i64 {
        self.ranks.len() as i64
    }

    /// The members' ranks in the job.
    pub fn ranks(&self) -> &[i64] {
        &self.ranks
    }

    /// Waits until all ranks of the group have joined. May be called any number of times.
    ///
    /// Errors: [`Error::Timeout`], with torch's words for its store-based barrier.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        let number = self.barriers.fetch_add(1, Ordering::Relaxed);
        store_based_barrier(&*self.store, &format!("{}:{number}", self.name), self.rank, self.world_size(), timeout)
    }
}

fn within(name: &str, store: Arc<dyn Store>) -> Arc<dyn Store> {
    Arc::new(PrefixStore::new(format!("{name}/"), store))
}

/// Torch's barrier of keys that every store has, for one group and once: torch calls it after making a group if TORCH_DIST_INIT_BARRIER is 1.
///
/// Errors: [`Error::Timeout`], with torch's message and how many ranks had joined.
pub fn store_based_barrier(store: &dyn Store, group: &str, rank: i64, world_size: i64, timeout: Duration) -> Result<()> {
    let key = format!("store_based_barrier_key:{group}");
    let (last, deadline) = (format!("{key}:last_worker"), Deadline::after(timeout));
    if store.add_by(&key, 1, deadline)? == world_size {
        // Sets torch's value "1", by an operation that has a deadline.
        store.add_by(&last, 1, deadline)?;
    }
    match store.wait(&[&last], deadline.left().unwrap_or(FOREVER)) {
        Err(error @ Error::Timeout(_)) => {
            let joined = store.add_by(&key, 0, deadline).map_or("unknown".into(), |joined| joined.to_string());
            Err(Error::Timeout(format!(
                "Timed out initializing process group in store based barrier on rank {rank}, for key: {key} \
                 (world_size={world_size}, num_workers_joined={joined}, timeout={} error={error})",
                timedelta(timeout)
            )))
        }
        result => result,
    }
}

/// A time as Python writes its timedelta.
fn timedelta(time: Duration) -> String {
    let (seconds, micros) = (time.as_secs(), time.subsec_micros());
    let days = match seconds / 86_400 {
        0 => String::new(),
        1 => "1 day, ".into(),
        days => format!("{days} days, "),
    };
    let fraction = if micros == 0 { String::new() } else { format!(".{micros:06}") };
    format!("{days}{}:{:02}:{:02}{fraction}", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_python_does() {
        for (millis, text) in
            [(500, "0:00:00.500000"), (1_800_000, "0:30:00"), (90_061_001, "1 day, 1:01:01.001000"), (172_800_000, "2 days, 0:00:00")]
        {
            assert_eq!(timedelta(Duration::from_millis(millis)), text);
        }
    }
}
