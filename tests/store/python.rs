//! The Python package: its backend of torch.distributed beside torch's gloo, what goes wrong, torchrun, its wheel, and what linters say. With the
//! interpreter of [`super::torch`]; where that cannot be had, each test is a SKIP with the reason.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::torch::{Running, library, python};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}

/// An interpreter that has the package, with the library that was built with this test; on loopback.
fn package(python: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(python);
    command.args(arguments).current_dir(folder()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("PYTHONPATH", folder()).env("PYTHONDONTWRITEBYTECODE", "1").env("RAILHEAD_LIBRARY", library());
    // One thread for each rank, or they are in each other's way.
    command.env("OMP_NUM_THREADS", "1").env("GLOO_SOCKET_IFNAME", "lo").env("RAILHEAD_SOCKET_IFNAME", "lo");
    command
}

/// What it prints, and ends with.
fn good(command: Command) {
    let printed = Running::start([command]).succeed().concat();
    println!("{printed}");
    assert!(printed.trim_end().ends_with("good"));
}

fn torchrun(python: &Path, arguments: &[&str]) -> String {
    let command = package(python, &[&["-m", "torch.distributed.run", "--standalone"], arguments].concat());
    Running::start([command]).succeed().concat()
}

#[test]
fn the_backend_gives_what_torchs_gloo_gives() {
    let Some(python) = python() else { return };
    for (wire, cases) in [("shm", "300"), ("tcp", "100")] {
        let mut command = package(python, &["tests/oracle.py", cases]);
        command.args(std::env::var_os("RHT_SEED")).env("RAILHEAD_SOFT_WIRE", wire);
        good(command);
    }
}

#[test]
fn what_goes_wrong_is_said() {
    let Some(python) = python() else { return };
    good(package(python, &["tests/faults.py"]));
}

#[test]
fn what_programs_give_is_taken_as_gloo_takes_it_or_refused() {
    let Some(python) = python() else { return };
    good(package(python, &["tests/arguments.py"]));
}

#[test]
fn works_are_waited_for_and_groups_come_and_go() {
    let Some(python) = python() else { return };
    good(package(python, &["tests/works.py"]));
}

#[test]
fn the_package_without_torch() {
    let Some(python) = python() else { return };
    good(package(python, &["tests/plain.py"]));
}

#[test]
fn a_network_learns_as_it_does_with_gloo() {
    let Some(python) = python() else { return };
    let [ours, gloos] = ["railhead", "gloo"].map(|backend| {
        let printed = torchrun(python, &["--nproc-per-node", "2", "examples/ddp.py", backend]);
        println!("{printed}");
        printed.lines().filter(|line| line.starts_with("epoch ")).map(str::to_owned).collect::<Vec<_>>()
    });
    assert_eq!((ours.len(), &ours), (4, &gloos));
}

#[test]
fn torchrun_starts_ranks_again() {
    let Some(python) = python() else { return };
    let printed = torchrun(python, &["--nproc-per-node", "4", "--max-restarts", "1", "--monitor-interval", "0.1", "tests/elastic.py"]);
    assert_eq!(printed.trim(), "4 ranks, attempt 1");
}

/// A script that fetches what it needs: SKIP, if that cannot be had.
fn fetching(command: &mut Command) {
    let output = command.output().expect("python");
    let said = String::from_utf8_lossy(&output.stdout);
    match output.status.code() {
        Some(0) => assert!(said.trim_end().ends_with("good"), "{said}"),
        Some(3) => eprintln!("SKIP: {}", said.trim()),
        _ => panic!("{}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr)),
    }
}

#[test]
fn the_wheel_is_all_that_is_needed() {
    let Some(python) = python() else { return };
    fetching(package(python, &["tests/wheel.py"]).arg(library()));
}

#[test]
fn linters_have_nothing_to_say() {
    let Some(python) = python() else { return };
    fetching(&mut package(python, &["tests/lint.py"]));
}
