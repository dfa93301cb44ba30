//! Runs tests of this program again in processes of their own, where libibverbs is `tests/c/fake_ibverbs.c`: its devices are memory, it
//! records what it is asked for, and is wrong on request.

#![allow(dead_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// The newest functions that rdma-core has, by their versions' minor number.
pub const NEWEST: u32 = 16;

/// The folder of a libibverbs.so.1 that has functions up to such a version. 0: not even all of the required ones.
pub fn folder(abi: u32) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _mine = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // The program's tests use this too, from their package's folder.
    let mut places = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|dir| dir.join("tests/c"));
    let sources = places.find(|dir| dir.join("fake_ibverbs.c").exists()).expect("tests/c");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-ibverbs-{abi}"));
    std::fs::create_dir_all(&folder).expect("a folder");
    // Other test programs may be running one: the result is put in place in one step.
    let own = folder.join(format!("{}.so", std::process::id()));
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O2", "-g", "-fPIC", "-shared", "-Wl,-soname,libibverbs.so.1"])
        .arg(format!("-Wl,--version-script={}", sources.join("fake_ibverbs.map").display()))
        .arg(format!("-DFAKE_ABI={abi}"))
        .arg("-o")
        .args([&own, &sources.join("fake_ibverbs.c")])
        .output()
        .expect("cc is installed (make deps-test)");
    assert!(output.status.success(), "cc fake_ibverbs.c:\n{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&own, folder.join("libibverbs.so.1")).expect("the library is there");
    folder
}

/// How a test is to be run.
pub struct Fake {
    command: Command,
}

/// What it came to.
pub struct Ran {
    pub output: String,
}

impl Fake {
    /// With a library of such a version.
    pub fn new(abi: u32) -> Fake {
        let mut command = Command::new(std::env::current_exe().expect("current_exe"));
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("RAILHEAD_") || name.starts_with("NCCL_") || name.starts_with("FAKE_IBV") {
                command.env_remove(name);
            }
        }
        let mut path = folder(abi).into_os_string();
        if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
            path.push(":");
            path.push(more);
        }
        command.env("LD_LIBRARY_PATH", path).env("RAILHEAD_DEBUG", "info");
        Fake { command }
    }

    /// A variable.
    pub fn env(mut self, name: &str, value: &str) -> Fake {
        self.command.env(name, value);
        self
    }

    /// Runs the ignored test `inside::name`, which must pass and break no rule of the library.
    #[track_caller]
    pub fn run(self, name: &str) -> Ran {
        let ran = self.run_all(&["--exact", &format!("inside::{name}"), "--test-threads=1"]);
        ran.says("1 passed");
        ran
    }

    /// Runs the ignored tests that these words choose; the same of them all.
    #[track_caller]
    pub fn run_all(mut self, words: &[&str]) -> Ran {
        self.command.args(["--ignored", "--nocapture"]).args(words);
        let output = self.command.output().expect("this program again");
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        text.lines().for_each(|line| println!("    {line}"));
        assert!(output.status.success(), "{words:?}: {}", output.status);
        assert!(!text.contains("VIOLATION"), "{words:?}: a rule of the library was broken");
        Ran { output: text }
    }
}

impl Ran {
    /// It must have written this.
    #[track_caller]
    pub fn says(&self, text: &str) -> &Ran {
        assert!(self.output.contains(text), "no {text:?} in the output above");
        self
    }

    /// It must not have written this.
    #[track_caller]
    pub fn does_not_say(&self, text: &str) -> &Ran {
        assert!(!self.output.contains(text), "{text:?} in the output above");
        self
    }
}

/// The library that this process has, for whoever runs inside.
pub struct Control {
    set: unsafe extern "C" fn(*const c_char, c_long) -> c_int,
    get: unsafe extern "C" fn(*const c_char) -> c_long,
    raise: unsafe extern "C" fn(c_int, u32) -> c_int,
    log: unsafe extern "C" fn(*mut c_char, usize) -> usize,
}

impl Control {
    pub fn new() -> Control {
        // SAFETY: a terminated name; the library is the fake one, and stays loaded.
        let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the fake libibverbs is not there");
        let find = |name: &CStr| {
            // SAFETY: an open library and a terminated name.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!found.is_null(), "libibverbs is not the fake one");
            found
        };
        // SAFETY: the types of these functions in fake_ibverbs.c.
        unsafe {
            Control {
                set: std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*const c_char, c_long) -> c_int>(find(c"fake_set")),
                get: std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*const c_char) -> c_long>(find(c"fake_get")),
                raise: std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(c_int, u32) -> c_int>(find(c"fake_raise")),
                log: std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*mut c_char, usize) -> usize>(find(c"fake_log")),
            }
        }
    }

    /// Changes a number.
    #[track_caller]
    pub fn set(&self, name: &str, value: i64) -> &Control {
        let text = CString::new(name).expect("a name");
        // SAFETY: a terminated string.
        assert_eq!(unsafe { (self.set)(text.as_ptr(), value) }, 0, "the fake has no {name}");
        self
    }

    /// A number.
    #[track_caller]
    pub fn get(&self, name: &str) -> i64 {
        let text = CString::new(name).expect("a name");
        // SAFETY: a terminated string.
        unsafe { (self.get)(text.as_ptr()) }
    }

    /// Lets a device report an asynchronous event of a queue pair's number, or of a device.
    #[track_caller]
    pub fn raise(&self, event: u32, which: u32) {
        // SAFETY: plain numbers.
        assert_eq!(unsafe { (self.raise)(event as c_int, which) }, 0, "event {event} of {which}");
    }

    /// What was called so far, a line each.
    pub fn log(&self) -> Vec<String> {
        let mut bytes = vec![0u8; 1 << 20];
        // SAFETY: as many bytes as are said.
        let n = unsafe { (self.log)(bytes.as_mut_ptr().cast(), bytes.len()) };
        String::from_utf8_lossy(&bytes[..n]).lines().map(str::to_owned).collect()
    }

    /// The lines of the log that begin with these words.
    pub fn calls(&self, words: &str) -> Vec<String> {
        self.log().into_iter().filter(|line| line.starts_with(words)).collect()
    }
}

/// The number behind `name=` in a line of the log.
#[track_caller]
pub fn value(line: &str, name: &str) -> i64 {
    let word =
        line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('=')).unwrap_or_else(|| panic!("no {name} in {line:?}"));
    let parsed = word.strip_prefix("0x").map_or_else(|| word.parse().ok(), |hex| i64::from_str_radix(hex, 16).ok());
    parsed.unwrap_or_else(|| panic!("{name} in {line:?} is no number"))
}
