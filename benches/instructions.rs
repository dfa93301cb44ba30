//! What an 8-byte message costs in instructions, and how many of them are for counting: `make instructions`.
//!
//! RH_LIBRARY, the library that users get, is run under valgrind's callgrind, which counts instructions in user space. Both ends of a comm are
//! in one thread, so that nobody waits for the scheduler and a figure comes out the same each time. One run per wire and call: callgrind
//! collects inside one of the functions below and nowhere else. All progress is made by the tests. For counting is what the debug information puts into src/base/stats, inlined or not.
//!
//! The wire `verbs` is tests/c/fake_ibverbs.c in place of libibverbs: its own instructions, which stand for a driver's, are left out.

#[path = "../tests/support/fake_ibverbs.rs"]
mod fake_ibverbs;
#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use support::comms::{self, Mem};
use support::plugin::Plugin;

/// Messages that are counted; as many go before.
const MESSAGES: u64 = 1000;
/// Instructions that counting may take, per message and end.
const LIMIT: f64 = 16.0;
/// Those up to a NIC's doorbell that are aimed at, post and tests together.
const AIM: f64 = 400.0;
/// The wire that is a NIC.
const NIC: &str = "verbs";
const LEN: usize = 8;
const TAG: c_int = 1;

type Ptr = *mut c_void;
type Isend = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr) -> c_int;
type Irecv = unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr, *mut Ptr) -> c_int;
type Test = unsafe extern "C" fn(Ptr, *mut c_int, *mut c_int) -> c_int;

/// What is collected: a function below, by its name, with its heading.
const CALLS: [(&str, &str); 4] =
    [("counted_isend", "isend"), ("counted_send_test", "test"), ("counted_irecv", "irecv"), ("counted_recv_test", "test")];
/// As `counted_send_test`, around a function that returns at once: what is not the library's.
const NOTHING: &str = "counted_nothing";

/// The functions of the v12 table, and what they are called with.
struct Messages {
    isend: Isend,
    irecv: Irecv,
    test: Test,
    comms: (Ptr, Ptr),
    mem: Mem,
    mr: Ptr,
}

// Entered from `Messages::run`, each a function of its own that callgrind knows by name.

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_isend(m: &Messages, request: &mut Ptr) -> c_int {
    // SAFETY: as the interface asks: registered memory, and a place for the request.
    unsafe { (m.isend)(m.comms.0, m.mem.ptr(0).cast(), LEN, TAG, m.mr, std::ptr::null_mut(), request) }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_irecv(m: &Messages, request: &mut Ptr) -> c_int {
    let (mut to, mut len, mut tag, mut mr, mut handle) = (m.mem.ptr(4096).cast(), LEN, TAG, m.mr, std::ptr::null_mut());
    // SAFETY: as the interface asks: arrays of one, registered memory, and a place for the request.
    unsafe { (m.irecv)(m.comms.1, 1, &mut to, &mut len, &mut tag, &mut mr, &mut handle, request) }
}

/// A test, under three names.
macro_rules! tests {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $name(test: Test, request: Ptr, done: &mut c_int) -> c_int {
            let mut sizes = [0; 8];
            // The name, so that the functions are not made one.
            std::hint::black_box(stringify!($name).as_ptr());
            // SAFETY: an outstanding request, and places for what is returned.
            unsafe { test(request, done, sizes.as_mut_ptr()) }
        }
    )*};
}
tests! { counted_send_test counted_recv_test counted_nothing }

unsafe extern "C" fn nothing(_: Ptr, _: *mut c_int, _: *mut c_int) -> c_int {
    0
}

impl Messages {
    /// One message after the other, each received a message after it was announced, so that isend finds a receive at once. Says how many
    /// calls of each kind that took.
    fn run(&self, n: u64) -> [u64; 4] {
        let mut calls = [0; 4];
        let mut announced = std::ptr::null_mut();
        for i in 0..=n {
            let (mut send, mut next): (Ptr, Ptr) = (std::ptr::null_mut(), std::ptr::null_mut());
            assert_eq!(counted_irecv(self, &mut next), 0);
            assert!(!next.is_null());
            calls[2] += 1;
            let recv = std::mem::replace(&mut announced, next);
            if i == 0 {
                continue;
            }
            while send.is_null() {
                assert_eq!(counted_isend(self, &mut send), 0);
                calls[0] += 1;
            }
            let (mut sent, mut got) = (0, 0);
            while sent == 0 || got == 0 {
                if got == 0 {
                    assert_eq!(counted_recv_test(self.test, recv, &mut got), 0);
                    calls[3] += 1;
                }
                if sent == 0 {
                    assert_eq!(counted_send_test(self.test, send, &mut sent), 0);
                    calls[1] += 1;
                }
            }
        }
        calls
    }
}

/// The process that callgrind runs: says how many calls were made.
fn child(library: &Path) {
    let mut plugin = Plugin::load_from(library, 12);
    plugin.init().expect("init");
    let comms = comms::to_itself(&plugin, 0).expect("comms");
    let mem = Mem::new(2 * 4096);
    let mr = plugin.reg_mr(comms.0, mem.ptr(0), mem.len()).expect("regMr").0;
    let [isend, irecv, test] = plugin.hot_calls().expect("a table");
    // SAFETY: these are the functions' types since v10.
    let (isend, irecv, test) = unsafe {
        (
            std::mem::transmute::<*const c_void, Isend>(isend),
            std::mem::transmute::<*const c_void, Irecv>(irecv),
            std::mem::transmute::<*const c_void, Test>(test),
        )
    };
    let messages = Messages { isend, irecv, test, comms: (comms.0.0, comms.1.0), mem, mr };
    let n: u64 = std::env::var("RHB_MESSAGES").expect("RHB_MESSAGES").parse().expect("a number");
    let [isends, sent, irecvs, got] = messages.run(n);
    for _ in 0..n {
        counted_nothing(nothing, std::ptr::null_mut(), &mut 0);
    }
    println!("calls {isends} {sent} {irecvs} {got}");
}

/// What callgrind collected inside one function.
struct Collected {
    /// Instructions of the library, by address in its file.
    at: BTreeMap<u64, u64>,
    /// Those of others, but for the fake NIC's: libc, and this program.
    elsewhere: u64,
    /// Calls of each kind.
    calls: [u64; 4],
}

/// Runs `n` messages.
fn collect(library: &Path, wire: &str, function: &str, n: u64) -> Collected {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut command = Command::new("valgrind");
    if wire == NIC {
        command.env("LD_LIBRARY_PATH", fake_ibverbs::folder(fake_ibverbs::NEWEST)).env("RAILHEAD_FABRIC", NIC);
    } else {
        command.env("RAILHEAD_FABRIC", "soft").env("RAILHEAD_SOFT_WIRE", wire);
    }
    let output = command
        .args(["--tool=callgrind", "--collect-atstart=no", "--dump-instr=yes", "--dump-line=no", "--compress-pos=no"])
        .args(["--compress-strings=no", &format!("--toggle-collect={function}")])
        .arg(format!("--callgrind-out-file={}", file.path().display()))
        .arg(std::env::current_exe().expect("current_exe"))
        .env("RHB_CHILD", library)
        .env("RHB_MESSAGES", n.to_string())
        .env_remove("RAILHEAD_STATS")
        .stdin(Stdio::null())
        .output()
        .expect("valgrind");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let calls = said.lines().find_map(|line| line.strip_prefix("calls ")).expect("counts");
    let calls: Vec<u64> = calls.split(' ').map(|word| word.parse().expect("a number")).collect();
    let mut collected = Collected { at: BTreeMap::new(), elsewhere: 0, calls: calls.try_into().expect("four counts") };
    // https://valgrind.org/docs/manual/cl-format.html: "ob=FILE" names the object of the lines that follow, "0xADDRESS COST". The line
    // behind "calls=" is about the function called, and counted there.
    let (mut ours, mut device, mut inclusive) = (false, false, false);
    for line in std::fs::read_to_string(file.path()).expect("callgrind's file").lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            ours = Path::new(object) == library;
            device = object.ends_with("/libibverbs.so.1");
        } else if line.starts_with("calls=") {
            inclusive = true;
        } else if let Some((address, cost)) = line.strip_prefix("0x").and_then(|line| line.split_once(' ')) {
            let cost: u64 = cost.trim().parse().expect("a cost");
            match (std::mem::take(&mut inclusive), ours) {
                (true, _) => {}
                (false, true) => *collected.at.entry(u64::from_str_radix(address, 16).expect("an address")).or_insert(0) += cost,
                (false, false) if device => {}
                (false, false) => collected.elsewhere += cost,
            }
        }
    }
    collected
}

/// The addresses that lie in code of src/base/stats, be it inlined.
fn counting(library: &Path, addresses: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut tool = Command::new("addr2line")
        .args(["-a", "-i", "-e"])
        .arg(library)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("addr2line");
    let mut input = tool.stdin.take().expect("a pipe");
    let lines: String = addresses.map(|address| format!("{address:#x}\n")).collect();
    // It answers as it reads, so somebody else has to write.
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let output = tool.wait_with_output().expect("addr2line");
    writer.join().expect("the writer").expect("addr2line reads");
    assert!(output.status.success());
    let (mut found, mut address) = (Vec::new(), 0);
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        if let Some(hex) = line.strip_prefix("0x") {
            address = u64::from_str_radix(hex, 16).expect("an address");
        } else if line.contains("/src/base/stats/") && found.last() != Some(&address) {
            found.push(address);
        }
    }
    found
}

/// Of one call, per message.
#[derive(Clone, Copy)]
struct Cost {
    calls: f64,
    instructions: f64,
    counting: f64,
}

/// In the order of [`CALLS`].
fn costs(library: &Path, wire: &str) -> [Cost; 4] {
    let per_message = |more: u64, fewer: u64| (more as f64 - fewer as f64) / MESSAGES as f64;
    // The first messages cost more; what they cost is in both runs.
    let both = |function: &str| [2 * MESSAGES, MESSAGES].map(|n| collect(library, wire, function, n));
    let all = |run: &Collected| run.at.values().sum::<u64>() + run.elsewhere;
    let [long, short] = both(NOTHING);
    let caller = per_message(all(&long), all(&short));
    std::array::from_fn(|i| {
        let [long, short] = both(CALLS[i].0);
        let addresses = counting(library, long.at.keys().copied());
        let count = |run: &Collected| addresses.iter().filter_map(|address| run.at.get(address)).sum();
        let calls = per_message(long.calls[i], short.calls[i]);
        // A receive hands over arrays, which takes its caller a little more than a test.
        let instructions = per_message(all(&long), all(&short)) - caller * calls;
        Cost { calls, instructions, counting: per_message(count(&long), count(&short)) }
    })
}

fn main() -> ExitCode {
    if let Some(library) = std::env::var_os("RHB_CHILD") {
        child(Path::new(&library));
        return ExitCode::SUCCESS;
    }
    let Some(library) = std::env::var_os("RH_LIBRARY").map(PathBuf::from) else {
        println!("SKIP: RH_LIBRARY names no library; run `make instructions`");
        return ExitCode::SUCCESS;
    };
    for (tool, question) in [("valgrind", "--version"), ("addr2line", "--version")] {
        if Command::new(tool).arg(question).stdout(Stdio::null()).status().is_err() {
            println!("SKIP: {tool} is missing");
            return ExitCode::SUCCESS;
        }
    }
    let library = library.canonicalize().expect("RH_LIBRARY");
    println!("Instructions per {LEN}-byte message; in brackets, calls per message where that is not one.\n");
    println!("| wire | end | post | tests | together | of these for counting |");
    println!("|---|---|---|---|---|---|");
    let (mut met, mut aimed) = (true, true);
    for wire in ["shm", "tcp", NIC] {
        let costs = costs(&library, wire);
        for (end, at) in [("send", 0), ("recv", 2)] {
            let (post, tests) = (costs[at], costs[at + 1]);
            let counting = post.counting + tests.counting;
            met &= (1.0..=LIMIT).contains(&counting);
            let shown = |cost: Cost| {
                let calls = if cost.calls == 1.0 { String::new() } else { format!(" ({:.1})", cost.calls) };
                format!("{:.0}{calls}", cost.instructions)
            };
            let together = post.instructions + tests.instructions;
            aimed &= wire != NIC || together <= AIM;
            println!("| {wire} | {end} | {} {} | {} | {together:.0} | {counting:.1} |", CALLS[at].1, shown(post), shown(tests));
        }
    }
    let said = |met: bool| if met { "met" } else { "not met" };
    println!("\nCounting may take {LIMIT} per message and end: {}", said(met));
    println!("Aim on {NIC}, up to the doorbell: {AIM} per message and end: {}", said(aimed));
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
