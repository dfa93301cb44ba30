//! Runs commands in the virtual machine of `tests/softroce/vm`, which has RDMA devices: one machine for all tests of a program, started by the
//! first and used by one after the other, as it takes two CPUs.

#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Exit status of `vm` where the machine cannot be had.
const SKIPPED: i32 = 77;
/// Its longest way to "softroce-begun": packages are fetched, and three attempts made.
const UP: Duration = Duration::from_secs(600);
/// What it takes to make devices, and to end what a command left.
const AROUND: Duration = Duration::from_secs(60);

/// The machine of a test program.
pub struct Machine {
    /// What is in it, and under which names.
    files: fn() -> Vec<(PathBuf, String)>,
    running: Mutex<Option<Running>>,
}

struct Running {
    vm: Child,
    commands: Option<ChildStdin>,
    lines: Receiver<String>,
}

/// What a command in it came to.
pub struct Ran {
    /// Exit status; `None` if the time was over or the machine ended.
    pub status: Option<i32>,
    /// What it wrote, both streams together.
    pub output: String,
}

impl Machine {
    pub const fn new(files: fn() -> Vec<(PathBuf, String)>) -> Machine {
        Machine { files, running: Mutex::new(None) }
    }

    /// Runs a script of bash with so many pairs of devices, for so many seconds at most. `None`, with a line that says why, where the machine cannot
    /// be had. A machine whose kernel crashes says nothing about what ran in it: the script runs again, twice at most.
    pub fn run(&self, pairs: u32, seconds: u32, script: &str) -> Option<Ran> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ran = Ran { status: None, output: String::new() };
        for _ in 0..3 {
            if running.is_none() {
                *running = Some(Running::start((self.files)())?);
            }
            let machine = running.as_mut().expect("it was started");
            ran = machine.run(pairs, seconds, script);
            if ran.status.is_some() {
                break;
            }
            let crashed = machine.has_ended();
            machine.end();
            *running = None;
            if !crashed {
                break;
            }
            println!("softroce: the machine ended; starting it again");
        }
        // Indented, so that no line of it is taken for one of this test program's.
        ran.output.lines().for_each(|line| println!("    {line}"));
        Some(ran)
    }
}

impl Running {
    fn start(files: Vec<(PathBuf, String)>) -> Option<Running> {
        // The program's tests use this too, from their package's folder.
        let places = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|dir| dir.join("tests/softroce/vm"));
        let mut command = Command::new(places.into_iter().find(|vm| vm.exists()).expect("tests/softroce/vm"));
        for (from, to) in files {
            command.arg("--file").arg(format!("{}={to}", from.display()));
        }
        // It ends with its input, so with this process.
        let mut vm = command.arg("--serve").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("tests/softroce/vm");
        let (commands, output) = (vm.stdin.take(), vm.stdout.take().expect("its output"));
        let (said, lines) = channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut line = Vec::new();
            while output.by_ref().read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                if said.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
                line.clear();
            }
        });
        let mut running = Running { vm, commands, lines };
        let (said, begun) = running.until(UP, "softroce-begun");
        if begun.is_some() {
            return Some(running);
        }
        let status = running.end();
        assert_eq!(status.code(), Some(SKIPPED), "tests/softroce/vm: {status}\n{said}");
        // Past the capture of the test's output, so that every run shows it; on a line of its own.
        let _ = writeln!(std::io::stderr(), "\n{}", said.trim_end());
        None
    }

    fn run(&mut self, pairs: u32, seconds: u32, script: &str) -> Ran {
        use std::fmt::Write as _;
        // As base64, which has no newline: 6 bits to a letter.
        let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut line = format!("{seconds} {pairs} ");
        for three in script.as_bytes().chunks(3) {
            let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
            for i in 0..4 {
                let letter = letters[(bits >> (18 - 6 * i) & 63) as usize] as char;
                let _ = line.write_char(if i <= three.len() { letter } else { '=' });
            }
        }
        // Where that fails the machine has ended, which its output tells.
        let _ = self.commands.as_mut().map(|commands| commands.write_all(format!("{line}\n").as_bytes()));
        let (output, status) = self.until(Duration::from_secs(seconds.into()) + AROUND, "softroce-exit ");
        Ran { status: status.and_then(|status| status.trim().parse().ok()), output }
    }

    /// What it says until a line that begins so, and the rest of that; `None` if it ends before, or the time is over.
    fn until(&mut self, time: Duration, mark: &str) -> (String, Option<String>) {
        let (end, mut said) = (Instant::now() + time, String::new());
        while let Ok(line) = self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            match line.strip_prefix(mark) {
                Some(rest) => return (said, Some(rest.into())),
                None => said += &line,
            }
        }
        (said, None)
    }

    fn has_ended(&self) -> bool {
        matches!(self.lines.try_recv(), Err(TryRecvError::Disconnected))
    }

    /// Ends it; what `vm` exits with.
    fn end(&mut self) -> ExitStatus {
        self.commands = None;
        self.vm.wait().expect("tests/softroce/vm")
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
