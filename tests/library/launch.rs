//! Ranks of the C examples under what starts ranks on a cluster: Open MPI, MPICH and Slurm. One that is missing is a SKIP with its name.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use super::examples::{library, make, skip};
use crate::support::ports::own_port;

/// What starts ranks and says who they are: Debian's name for it, what it says of itself, and its options.
#[derive(Clone, Copy)]
struct Launcher {
    name: &'static str,
    maker: &'static str,
    options: &'static [&'static str],
}

/// Root may, there may be more ranks than cores, and nothing is started on another host.
const OPEN_MPI: Launcher = Launcher {
    name: "mpirun.openmpi",
    maker: "open-mpi.org",
    options: &["--allow-run-as-root", "--oversubscribe", "--mca", "plm", "isolated"],
};
const MPICH: Launcher = Launcher { name: "mpirun.mpich", maker: "HYDRA", options: &["-launcher", "fork"] };

impl Launcher {
    /// Four ranks of a program: what they print. A SKIP if the launcher is not installed; mpirun will do if that is the same.
    fn run(&self, line: &[OsString]) -> Option<String> {
        let says = |program: &str| {
            let output = Command::new(program).arg("--version").output().ok()?;
            String::from_utf8_lossy(&output.stdout).contains(self.maker).then(|| program.to_owned())
        };
        let Some(launcher) = says(self.name).or_else(|| says("mpirun")) else {
            skip(&format!("{} is not installed", self.name));
            return None;
        };
        let mut command = Command::new(&launcher);
        command.args(self.options).args(["-n", "4"]).args(line);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", own_port().to_string()).env("RAILHEAD_STORE_BIND", "127.0.0.1");
        command.env("RAILHEAD_SOCKET_IFNAME", "lo").env_remove("RANK").env_remove("WORLD_SIZE").stdin(Stdio::null());
        let output = command.output().expect("the launcher starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{launcher}: {}\n{text}", output.status);
        Some(text)
    }
}

fn ping_under(launcher: Launcher) {
    let program = make("store", "").join("rendezvous_ping");
    let line = [program.into(), "--plugin".into(), library().into(), "--rounds".into(), "20".into()];
    let Some(text) = launcher.run(&line) else { return };
    for rank in 0..4 {
        assert!(text.contains(&format!("rank {rank} of 4: 20 messages went round through Railhead")), "{text}");
    }
}

#[test]
fn ranks_started_by_open_mpi_find_each_other() {
    ping_under(OPEN_MPI);
}

#[test]
fn ranks_started_by_mpich_find_each_other() {
    ping_under(MPICH);
}

#[test]
fn ranks_started_by_slurm_find_each_other() {
    let allowed = Command::new("srun").args(["--immediate=5", "true"]).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        return skip("srun is not installed, or no cluster takes a job from here");
    }
    ping_under(Launcher { name: "srun", maker: "slurm", options: &["--overcommit"] });
}

fn under(launcher: Launcher) {
    let programs = make("mesh", "");
    for (program, option, says) in
        [("mesh_allreduce", ["--rounds", "3"], "3 rounds, no element wrong"), ("mesh_pair", ["--messages", "50"], "no byte wrong")]
    {
        let line = [programs.join(program).into(), option[0].into(), option[1].into()];
        let Some(text) = launcher.run(&line) else { return };
        assert!(text.contains(says), "{program}: {text}");
    }
}

#[test]
fn meshes_of_ranks_started_by_open_mpi() {
    under(OPEN_MPI);
}

#[test]
fn meshes_of_ranks_started_by_mpich() {
    under(MPICH);
}
