//! The variables that launchers set, torch's own first. Read when a rendezvous is carried out, on its thread.

use std::ffi::OsString;
use std::net::IpAddr;
use std::sync::Arc;

use crate::base::config::{Config, Effective, Secret};
use crate::store::{Error, Result};

/// Variables: this process's, or given ones instead.
#[derive(Clone)]
pub struct Environment(Arc<Lookup>);

type Lookup = dyn Fn(&str) -> Option<OsString> + Send + Sync;

/// A launcher's variables for rank and number of ranks.
struct Launcher {
    rank: &'static str,
    world_size: &'static [&'static str],
}

/// Open MPI's and MPICH's before Slurm's: a program that mpirun starts within a Slurm job inherits the Slurm variables of the node's daemon.
///
/// Sources: mpirun(1) of Open MPI 5, MPICH's PMI-1 (src/pmi/src/pmi_v1.c; Intel MPI, Cray and `srun --mpi=pmi2` set the same), srun(1) of Slurm 24.05.
const LAUNCHERS: &[Launcher] = &[
    Launcher { rank: "OMPI_COMM_WORLD_RANK", world_size: &["OMPI_COMM_WORLD_SIZE"] },
    Launcher { rank: "PMI_RANK", world_size: &["PMI_SIZE"] },
    Launcher { rank: "SLURM_PROCID", world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"] },
];

impl Environment {
    /// This process's.
    pub fn process() -> Self {
        Environment(Arc::new(|name| std::env::var_os(name)))
    }

    /// These and no others.
    pub fn of<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let variables: Vec<(String, OsString)> = variables.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        Environment(Arc::new(move |name| variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())))
    }

    /// A variable that is set and not empty. A value that is no UTF-8 counts as not set.
    pub fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).and_then(|value| value.into_string().ok()).filter(|value| !value.is_empty())
    }

    /// RANK, or what the launcher calls it.
    pub fn rank(&self) -> Option<String> {
        self.get("RANK").or_else(|| self.launched().map(|(rank, _)| rank))
    }

    /// WORLD_SIZE, or what the launcher calls it.
    pub fn world_size(&self) -> Option<String> {
        self.get("WORLD_SIZE").or_else(|| self.launched().map(|(_, world_size)| world_size))
    }

    /// Whether torchrun's agent serves a store at this address: the variable is about MASTER_ADDR and MASTER_PORT only.
    pub fn agent_serves(&self, host: &str, port: u16) -> bool {
        self.get("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True")
            && self.get("MASTER_ADDR").as_deref() == Some(host)
            && self.get("MASTER_PORT").is_some_and(|text| text == port.to_string())
    }

    /// RAILHEAD_STORE_BIND: the address that a server of this process listens on; `None` for all.
    ///
    /// Errors: [`Error::Usage`] for an invalid address: the server would listen on more addresses than intended.
    pub fn bind(&self) -> Result<Option<IpAddr>> {
        Ok(self.setting("RAILHEAD_STORE_BIND")?.store_bind.parse().ok())
    }

    /// RAILHEAD_STORE_SECRET.
    ///
    /// Errors: [`Error::Usage`] for an invalid secret: the server would run without one.
    pub fn secret(&self) -> Result<Secret> {
        Ok(self.setting("RAILHEAD_STORE_SECRET")?.store_secret)
    }

    /// Railhead's settings. Errors: an invalid value of this one.
    fn setting(&self, name: &str) -> Result<Config> {
        let effective = Effective::of(&|name| (self.0)(name));
        effective.complaint(name).map_or(Ok(effective.config), |complaint| Err(Error::Usage(complaint)))
    }

    /// Rank and number of ranks from the first launcher that has set both: those of two launchers do not belong together.
    fn launched(&self) -> Option<(String, String)> {
        LAUNCHERS.iter().find_map(|launcher| {
            let rank = self.get(launcher.rank)?;
            Some((rank, launcher.world_size.iter().find_map(|name| self.get(name))?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(variables: &[(&str, &str)]) -> (Option<String>, Option<String>) {
        let environment = Environment::of(variables.iter().copied());
        (environment.rank(), environment.world_size())
    }

    #[test]
    fn torchs_own_win_and_launchers_do_not_mix() {
        let some = |rank: &str, size: &str| (Some(rank.to_owned()), Some(size.to_owned()));
        let slurm = [("SLURM_PROCID", "5"), ("SLURM_NTASKS", "8")];
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
        let mpich = [("PMI_RANK", "2"), ("PMI_SIZE", "3")];
        assert_eq!(ranks(&slurm), some("5", "8"));
        assert_eq!(ranks(&open_mpi), some("1", "4"));
        assert_eq!(ranks(&mpich), some("2", "3"));
        assert_eq!(ranks(&[slurm, open_mpi].concat()), some("1", "4"));
        assert_eq!(ranks(&[slurm, mpich].concat()), some("2", "3"));
        assert_eq!(ranks(&[&slurm[..], &[("SLURM_STEP_NUM_TASKS", "6")]].concat()), some("5", "6"));
        assert_eq!(ranks(&[&open_mpi[..], &[("RANK", "0"), ("WORLD_SIZE", "2")]].concat()), some("0", "2"));
        assert_eq!(ranks(&[&open_mpi[..], &[("RANK", ""), ("WORLD_SIZE", "2")]].concat()), some("1", "2"));
        assert_eq!(ranks(&[&[("OMPI_COMM_WORLD_RANK", "7")], &slurm[..]].concat()), some("5", "8"), "half a launcher is none");
        assert_eq!(ranks(&[("RANK", "3")]), (Some("3".into()), None));
    }

    #[test]
    fn the_agents_store_is_where_the_agent_says() {
        let agent = |flag: &str| {
            let all = [("TORCHELASTIC_USE_AGENT_STORE", flag), ("MASTER_ADDR", "h"), ("MASTER_PORT", "5")];
            Environment::of(all)
        };
        assert!(agent("True").agent_serves("h", 5));
        assert!(!agent("True").agent_serves("h", 6) && !agent("True").agent_serves("g", 5));
        assert!(!agent("1").agent_serves("h", 5) && !agent("true").agent_serves("h", 5));
    }
}
