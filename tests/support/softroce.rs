//! Runs commands in the virtual machine of `tests/softroce/vm`, which has RDMA devices. One machine at a time: it takes two CPUs.

#![allow(dead_code)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Exit status of `vm` where the machine cannot be had.
const SKIPPED: i32 = 77;

/// End of the line that `vm` writes when it has to.
const STARTED_AGAIN: &str = "; starting it again\n";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A machine to be.
pub struct Vm {
    command: Command,
}

/// What a command in it came to.
pub struct Ran {
    /// Exit status.
    pub status: Option<i32>,
    /// What it wrote, both streams together.
    pub output: String,
}

impl Vm {
    /// With so many pairs of devices, for so many seconds at most.
    pub fn new(pairs: u32, seconds: u32) -> Vm {
        // The program's tests use this too, from their package's folder.
        let places = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|dir| dir.join("tests/softroce/vm"));
        let mut command = Command::new(places.into_iter().find(|vm| vm.exists()).expect("tests/softroce/vm"));
        command.args(["--pairs", &pairs.to_string(), "--timeout", &seconds.to_string()]);
        Vm { command }
    }

    /// Takes a file along.
    pub fn file(mut self, from: &Path, to: &str) -> Vm {
        self.command.arg("--file").arg(format!("{}={to}", from.display()));
        self
    }

    /// Runs a line of bash. `None`, with a line that says why, where the machine cannot be had.
    pub fn run(mut self, line: &str) -> Option<Ran> {
        let _mine = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        self.command.args(["--", line]).stdin(Stdio::null());
        let output = self.command.output().expect("tests/softroce/vm");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.code() == Some(SKIPPED) {
            // Past the capture of the test's output, so that every run shows it; on a line of its own.
            let _ = writeln!(std::io::stderr(), "\n{}", text.trim_end());
            return None;
        }
        // What came before the machine had to be started again.
        let text = text.rsplit_once(STARTED_AGAIN).map_or(text.as_str(), |(_, after)| after).to_owned();
        let output_text = text + &String::from_utf8_lossy(&output.stderr);
        // Indented, so that no line of it is taken for one of this test program's.
        output_text.lines().for_each(|line| println!("    {line}"));
        Some(Ran { status: output.status.code(), output: output_text })
    }
}

impl Ran {
    /// It must have succeeded.
    #[track_caller]
    pub fn passes(&self) -> &Ran {
        assert_eq!(self.status, Some(0), "in the virtual machine");
        self
    }

    /// It must have written this.
    #[track_caller]
    pub fn says(&self, text: &str) -> &Ran {
        assert!(self.output.contains(text), "no {text:?} in the output above");
        self
    }
}

/// The library that cargo built for these tests.
pub fn library() -> PathBuf {
    let library = std::env::current_exe().expect("current_exe").with_file_name("librailhead.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}
