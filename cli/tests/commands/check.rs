//! `railhead check`: our own library passes every rule in every version, and for each rule there is a plugin that breaks it and is caught
//! by it. The broken plugins are one, `mutants`, which forwards to our library and does one thing wrong.

use crate::support::until;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;

use serde_json::Value;

/// Versions that the mutant exports.
const VERSIONS: [u32; 3] = [4, 8, 12];
/// Checks that run at once: many of the mutants hang, which takes time but no processor.
const AT_ONCE: usize = 6;
/// Seconds until a mutant that hangs is caught: few, for most do; more if on a busy machine the rule did not come as far as that.
const PATIENCE: [&str; 3] = ["1.5", "8", "40"];

/// A mutant.
struct Mutant {
    /// MUTANT in its environment.
    name: &'static str,
    /// The rule that catches it.
    rule: &'static str,
    /// A part of the reason that the rule gives; or several, with a bar between, where either rank may be the first to see it.
    reason: &'static str,
    /// Versions that have the defect, among those that the rule applies to.
    versions: &'static [u32],
}

const fn mutant(name: &'static str, rule: &'static str, reason: &'static str) -> Mutant {
    Mutant { name, rule, reason, versions: &VERSIONS }
}

const MUTANTS: &[Mutant] = &[
    mutant("nameless", "table", "the table has no name"),
    mutant("null_close_listen", "table", "NULL in the table: closeListen"),
    Mutant { versions: &[12], ..mutant("null_finalize", "table", "NULL in the table: finalize") },
    mutant("init_fails", "init", "init returned 2"),
    mutant("no_device", "devices", "no device: nothing was checked"),
    mutant("devices_vary", "devices", "devices gave"),
    mutant("no_name", "device-name", "device 0 has no name"),
    mutant("null_name", "device-name", "device 0 has no name"),
    mutant("same_name", "device-name", "as one before it is"),
    mutant("no_host", "device-host", "ptrSupport is 0x2"),
    mutant("speed_0", "device-speed", "speed is 0"),
    mutant("no_comms", "device-comms", "maxComms is 0"),
    mutant("no_recvs", "device-recvs", "maxRecvs is 0"),
    mutant("odd_device", "device-type", "netDeviceType is 9"),
    mutant("vprops_empty", "device-parts", "is made of []"),
    mutant("vprops_wild", "device-parts", "is made of [1000]"),
    mutant("speed_varies", "device-stable", "then"),
    mutant("wide_handle", "handle-size", "rank 0: crashed (SIGSEGV) in listen"),
    mutant("block_accept", "accept-returns", "rank 0: did not return from accept"),
    mutant("accept_fails_first", "accept-returns", "accept returned 2"),
    mutant("block_connect", "connect-returns", "rank 1: did not return from connect"),
    mutant("connect_fails_first", "connect-returns", "connect returned 6"),
    mutant("connect_null", "connect-first", "connect gave a NULL comm"),
    mutant("connect_after_accept", "connect-first", "did not return from connect"),
    mutant("connect_after_accept", "connect-both", "waited in vain for connect and accept"),
    mutant("refuse_self", "connect-self", "connect returned 5"),
    mutant("one_handle", "many-listeners", "listener 0: isend returned|in vain for accept|return from accept|connect returned 6"),
    mutant("listen_once", "listen-again", "listen returned 2"),
    mutant("close_listen_blocks", "listen-again", "did not return from closeListen"),
    mutant("listen_kills", "listen-closed", "irecv returned 3"),
    mutant("device_handle", "no-offload", "a host device gave a device handle"),
    mutant("device_handle_needed", "no-offload", "crashed (SIGSEGV) in connect"),
    mutant("base_only", "mr-parts", "of 262144 registered: irecv returned 3"),
    mutant("dereg_all", "mr-again", "returned 3"),
    mutant("register_once", "mr-again", "the same memory and comm: regMr returned 5"),
    mutant("reg_race", "mr-busy", "while memory is registered on another thread"),
    mutant("block_isend", "calls-return", "rank 1: did not return from isend, irecv or test"),
    mutant("block_test", "calls-return", "rank 0: did not return from isend, irecv or test"),
    mutant("null_posted", "null-request", "receive 4 got message 3"),
    mutant("null_stays", "null-request", "waited in vain"),
    mutant("null_is_error", "null-request", "isend returned 2"),
    mutant("request_unwritten", "request-written", "*request was not written"),
    mutant("optional_kept", "optional-recv", "irecv left 0x1 in *request"),
    mutant("few_requests", "requests-at-once", "waited in vain for irecv to take receive"),
    mutant("requests_error", "requests-at-once", "irecv returned 3"),
    mutant("phandles_read", "no-profiler", "rank 0: crashed (SIGSEGV) in isend, irecv or test"),
    mutant("flush_hangs", "flush", "waited in vain for a flush"),
    mutant("flush_unwritten", "flush", "*request was not written"),
    mutant("attributes_hang", "net-attr", "rank 0: did not return from setNetAttr|rank 1: did not return from setNetAttr"),
    mutant("thread_bound", "threads", "isend returned 3"),
    mutant("recv_bound", "threads", "irecv returned 3"),
    mutant("done_unwritten", "test-done", "test left *done as it was"),
    mutant("sizes_needed", "test-null-sizes", "crashed (SIGSEGV)"),
    mutant("all_sizes", "test-sizes", "test of one buffer wrote the sizes"),
    mutant("tests_in_order", "test-any-order", "test returned 3"),
    mutant("early_recv", "recv-done", "receive 0 was done before anything was sent"),
    mutant("early_send", "send-done", "was overwritten when its send was done"),
    mutant("scribble", "send-unchanged", "the buffer of send 3"),
    mutant("flip_byte", "data", "arrived as"),
    mutant("flip_large", "data-large", "byte 16777216"),
    mutant("overrun", "data-bounds", "bytes behind a receive of 1 were overwritten"),
    mutant("underrun", "data-bounds", "bytes before a receive of 1 were overwritten"),
    mutant("flip_late", "data-soak", "message 150"),
    mutant("swap", "order", "got message"),
    mutant("drop", "exactly-once", "message 5 did not arrive"),
    mutant("duplicate", "exactly-once", "message 5 arrived 2 times"),
    mutant("flip_very_late", "order-long", "receive 900 got message"),
    mutant("swap_tags", "tags", "the buffer of tag 0 got message 1"),
    mutant("size_lost", "recv-size", "its test gave 1048576"),
    mutant("send_size_lost", "send-size", "test of the send gave 0"),
    mutant("swap_sizes", "tag-sizes", "tag 0: 8 bytes were sent, test gave 24"),
    mutant("zero_lost", "size-0", "has 0 bytes, test gave 8;|has 8 bytes, test gave 100;"),
    mutant("zero_size", "size-0", "has 0 bytes, test gave 1;"),
    mutant("grow", "send-too-long", "wrote behind it"),
    mutant("crosstalk", "comms-apart", "comm 0: byte"),
    mutant("stall_others", "comms-independent", "waited in vain for irecv"),
    mutant("half_duplex", "two-way", "both at once"),
    mutant("late_push", "idle-peer", "while the peer may have stopped calling"),
    mutant("close_send_blocks", "close-send-first", "rank 1: did not return from closeSend"),
    mutant("close_recv_blocks", "close-recv-first", "rank 0: did not return from closeRecv"),
    mutant("close_waits", "close-outstanding", "rank 0: did not return from closeRecv"),
    mutant("hides_errors", "sender-closes", "waited in vain for a request to end whose peer is gone"),
    mutant("hides_errors", "receiver-closes", "waited in vain for a request to end whose peer is gone"),
    mutant("hides_errors", "peer-dies", "waited in vain for a request to end whose peer is gone"),
    mutant("hides_errors", "receiver-dies", "waited in vain for a request to end whose peer is gone"),
    mutant("init_once", "init-cycles", "cycle 1: init returned 3"),
    mutant("finalize_hangs", "init-cycles", "did not return from finalize"),
    mutant("finalize_all", "contexts", "after finalize of another context"),
];

#[test]
fn our_library_passes_every_rule_in_every_version() {
    let (document, output) = check(&library(), &[], "none");
    let failed = results(&document).filter(|r| r["outcome"] != "pass").map(|r| format!("{r}\n")).collect::<String>();
    assert!(failed.is_empty() && output.status.success(), "{}\n{failed}", output.status);
    let checked: Vec<_> = results(&document).map(|r| (text(&r["rule"]), r["abi"].as_u64())).collect();
    for (rule, versions) in rules() {
        for version in versions {
            assert!(checked.contains(&(rule.as_str(), Some(u64::from(version)))), "{rule} in v{version} was not checked");
        }
    }
}

/// The same over the other ways that bytes can take, in the oldest and the newest version.
#[test]
fn our_library_passes_every_rule_over_each_wire() {
    let library = library();
    let plugin = library.to_str().expect("a path in UTF-8");
    for (name, value) in [("RAILHEAD_SOFT_WIRE", "tcp"), ("RAILHEAD_CMA", "0")] {
        for abi in ["4", "12"] {
            let output = command(&["--plugin", plugin, "--abi", abi], "none").env(name, value).output().expect("railhead starts");
            assert!(output.status.success(), "{name}={value}:\n{}", String::from_utf8_lossy(&output.stdout));
        }
    }
}

/// The forwarding itself is right, so what a rule finds in a mutant is its defect.
#[test]
fn a_mutant_without_a_defect_passes() {
    let (document, output) = check(mutant_library(), &[], "none");
    let failed = results(&document).filter(|r| r["outcome"] != "pass").map(|r| format!("{r}\n")).collect::<String>();
    assert!(failed.is_empty() && output.status.success(), "{}\n{failed}", output.status);
}

#[test]
fn each_mutant_is_caught_by_its_rule() {
    let rules = rules();
    let jobs: Vec<(&Mutant, u32)> = MUTANTS
        .iter()
        .enumerate()
        .flat_map(|(number, mutant)| {
            let rule = rules.iter().find(|(rule, _)| rule == mutant.rule);
            let (_, versions) = rule.unwrap_or_else(|| panic!("there is no rule {}", mutant.rule));
            let concerned: Vec<_> = mutant.versions.iter().copied().filter(|v| versions.contains(v)).collect();
            assert!(!concerned.is_empty(), "{} concerns no version of {}", mutant.name, mutant.rule);
            // One of each, by turns, and in a long run all.
            let turn = number % concerned.len();
            let chosen = concerned.into_iter().enumerate().filter(move |(at, _)| *at == turn || crate::support::repeats(0, 1) > 0);
            chosen.map(move |(_, v)| (mutant, v))
        })
        .collect();
    let (next, escaped) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(&(mutant, version)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(seen) = caught(mutant, version) {
                        escaped.lock().expect("no thread panics").push(seen);
                    }
                }
            });
        }
    });
    let escaped = escaped.into_inner().expect("no thread panics");
    assert!(escaped.is_empty(), "{}", escaped.concat());
}

/// Whether the mutant's rule catches it, for the right reason.
fn caught(mutant: &Mutant, version: u32) -> Result<(), String> {
    let mut seen = String::new();
    for patience in PATIENCE {
        let arguments = ["--rule", mutant.rule, "--abi", &version.to_string(), "--timeout", patience];
        let (document, output) = check(mutant_library(), &arguments, mutant.name);
        let found: Vec<_> = results(&document).collect();
        let fails = found.len() == 1 && found[0]["outcome"] == "fail" && output.status.code() == Some(1);
        if fails && mutant.reason.split('|').any(|part| text(&found[0]["reason"]).contains(part)) {
            return Ok(());
        }
        seen = format!("{}, v{version}, expected {:?}: {found:?}\n", mutant.name, mutant.reason);
        if !fails {
            break;
        }
    }
    Err(seen)
}

#[test]
fn each_rule_has_a_mutant() {
    for (rule, versions) in rules() {
        assert!(MUTANTS.iter().any(|mutant| mutant.rule == rule), "no mutant breaks {rule}");
        assert!(VERSIONS.iter().any(|v| versions.contains(v)), "{rule} applies to no version of the mutants");
    }
}

#[test]
fn no_rule_passes_without_a_device() {
    for (rule, versions) in rules() {
        let newest = VERSIONS.iter().rfind(|v| versions.contains(v)).expect("a version").to_string();
        let (document, output) = check(mutant_library(), &["--rule", &rule, "--abi", &newest], "no_device");
        // These two hold of a plugin without a device as well; the check as a whole does not pass.
        let deviceless = matches!(rule.as_str(), "table" | "init");
        let place = if deviceless { &document["refused"][0] } else { &document["results"][0] };
        let reason = place["reason"].as_str().unwrap_or_default();
        assert!(reason.contains("no device: nothing was checked"), "{document}");
        assert_eq!((output.status.code(), &document["ok"]), (Some(1), &Value::Bool(false)), "{document}");
    }
    let (document, output) = check(mutant_library(), &[], "no_device");
    assert!(results(&document).all(|r| matches!(text(&r["rule"]), "table" | "init") || r["outcome"] != "pass"), "{document}");
    assert_eq!(output.status.code(), Some(1));
    let plugin = mutant_library().to_str().expect("a path in UTF-8");
    let output = railhead(&["--plugin", plugin, "--rule", "table", "--rule", "init"], "no_device");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(shown.contains("\nv4 v8 v12: the plugin has no device: nothing was checked: that is no pass\n"), "{shown}");
    let (document, output) = check(mutant_library(), &["--rule", "table", "--rule", "init"], "none");
    assert_eq!((output.status.code(), &document["refused"]), (Some(0), &Value::Array(Vec::new())), "{document}");
}

#[test]
fn the_table_fits_a_terminal_and_names_rule_reason_and_source() {
    let plugin = mutant_library().to_str().expect("a path in UTF-8");
    let arguments = ["--plugin", plugin, "--rule", "data", "--rule", "order", "--rule", "send-size", "--rule", "connect-first"];
    let output = railhead(&arguments, "flip_byte");
    let shown = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{shown}");
    // The first line names the file, however long that is.
    assert!(shown.lines().skip(1).all(|line| line.chars().count() <= 80), "{shown}");
    for part in [
        "data                     FAIL FAIL FAIL",
        "send-size                pass pass pass",
        "connect-first            pass    .    .",
        "FAIL data",
        "v4 v8 v12: rank 0: message 3",
        "source: ",
    ] {
        assert!(shown.contains(part), "{part:?} is missing:\n{shown}");
    }
    let warned = railhead(&["--plugin", plugin, "--rule", "init"], "init_fails");
    let shown = String::from_utf8(warned.stdout).expect("UTF-8");
    assert!(shown.contains("the plugin's last warning: mutant: no init today"), "{shown}");
}

#[test]
fn wrong_usage_is_told_with_what_is_right() {
    let plugin = mutant_library().to_str().expect("a path in UTF-8").to_owned();
    let program = env!("CARGO_BIN_EXE_railhead");
    let cases: [(&[&str], &str); 7] = [
        (&["--plugin", &plugin, "--rule", "ordr"], "there is no rule \"ordr\"; the rules are table, init"),
        (&["--plugin", &plugin, "--timeout", "0"], "must be a number of seconds from 0.1 to 600"),
        (&["--plugin", &plugin, "--abi", "3"], "expected a whole number from 4 to 12"),
        (&["--plugin", &plugin, "--abi", "7"], "exports no ncclNetPlugin_v7"),
        (&["--plugin", program], "cannot load|exports no ncclNetPlugin_v4 to v12"),
        (&["--plugin", "/nowhere/libnccl-net.so"], "cannot load /nowhere/libnccl-net.so"),
        (&[], "--plugin <FILE>"),
    ];
    for (arguments, message) in cases {
        let output = railhead(arguments, "none");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && message.split('|').any(|m| told.contains(m)), "{arguments:?}: {output:?}");
    }
    let output = railhead(&["--plugin", &plugin, "--rule", "data", "--device", "77"], "none");
    assert!(String::from_utf8_lossy(&output.stdout).contains("there is no device 77"), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
}

/// A rank that hangs in the plugin ends with the process that started it.
#[test]
fn ranks_do_not_outlive_a_killed_check() {
    let plugin = mutant_library().to_str().expect("a path in UTF-8");
    let arguments = ["--plugin", plugin, "--rule", "accept-returns", "--abi", "12", "--timeout", "600"];
    let mut check = command(&arguments, "block_accept").stdout(Stdio::null()).spawn().expect("railhead starts");
    let children = format!("/proc/{0}/task/{0}/children", check.id());
    let ranks = until("two ranks", || {
        let ranks: Vec<String> = std::fs::read_to_string(&children).ok()?.split_whitespace().map(str::to_owned).collect();
        // A rank has loaded the plugin: what follows can only end it from outside.
        let loaded = |pid: &String| std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("mutant.so"));
        (ranks.len() == 2 && ranks.iter().all(loaded)).then_some(ranks)
    });
    check.kill().expect("kill");
    check.wait().expect("wait");
    until("the end of the ranks", || {
        // Whoever inherits the ranks may be slow to wait for them.
        let gone = |pid: &String| match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')),
            Err(_) => true,
        };
        ranks.iter().all(gone).then_some(())
    });
}

/// The rules and their versions.
fn rules() -> Vec<(String, Vec<u32>)> {
    let output = railhead(&["--list", "--json"], "none");
    assert!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let bound = |v: &Value| u32::try_from(v.as_u64().expect("a version")).expect("a version");
    let rules: Vec<_> = document
        .as_array()
        .expect("a list")
        .iter()
        .map(|r| (text(&r["rule"]).to_owned(), (bound(&r["abi"][0])..=bound(&r["abi"][1])).collect()))
        .collect();
    assert!(!rules.is_empty());
    rules
}

fn results(document: &Value) -> impl Iterator<Item = &Value> {
    document["results"].as_array().expect("results").iter()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// Checks a plugin; what came of it as JSON.
fn check(plugin: &Path, arguments: &[&str], mutation: &str) -> (Value, Output) {
    let plugin = plugin.to_str().expect("a path in UTF-8");
    let output = railhead(&[&["--json", "--plugin", plugin], arguments].concat(), mutation);
    let document = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    (document, output)
}

fn railhead(arguments: &[&str], mutation: &str) -> Output {
    command(arguments, mutation).output().expect("railhead starts")
}

fn command(arguments: &[&str], mutation: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_railhead"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("RAILHEAD_") || name.starts_with("NCCL_") {
            command.env_remove(name);
        }
    }
    // What a mutation does to the bytes must not depend on which way is faster on this machine.
    command.env("RAILHEAD_CMA", "1").env("MUTANT", mutation).env("MUTANT_OF", library());
    command.arg("check").args(arguments);
    command
}

/// The library under test: the one that was asked for, or the one that cargo built along with this test.
fn library() -> PathBuf {
    let beside = || std::env::current_exe().expect("a test knows where it is").with_file_name("librailhead.so");
    let library = std::env::var_os("RH_LIBRARY").map_or_else(beside, PathBuf::from);
    assert!(library.is_file(), "{} is missing", library.display());
    library
}

/// The mutant, compiled once.
fn mutant_library() -> &'static Path {
    static MUTANT: OnceLock<PathBuf> = OnceLock::new();
    MUTANT.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mutants");
        let sources = ["init.c", "connections.c", "requests.c", "tables.c"].map(|name| folder.join(name));
        let plugin = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutant.so");
        // Put in place in one step: another run of this test may be loading it.
        let own = plugin.with_extension(std::process::id().to_string());
        let output = Command::new("cc")
            .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", "-shared", "-fPIC", "-o"])
            .arg(&own)
            .args(&sources)
            .arg("-ldl")
            .output()
            .expect("cc is installed (make deps-test)");
        assert!(output.status.success(), "cc {}:\n{}", folder.display(), String::from_utf8_lossy(&output.stderr));
        std::fs::rename(&own, &plugin).expect("the mutant is there");
        plugin
    })
}
