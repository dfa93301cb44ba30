//! `railhead stats` beside running ranks: what it shows is what was moved, in every format, and a page that lies does no harm.

use crate::support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::{Command, Output};

use railhead::base::stats::page::{Layout, MAGIC, VERSION};
use serde_json::Value;
use support::comms::{self, Mem};
use support::plugin::Plugin;
use support::{Ctx, Ranks, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("moves", moves), ("forges", forges)];

const MESSAGES: u64 = 10;
const LEN: usize = 100_000;

/// Rank 0 sends to rank 1 and is done; then rank 1 waits for a message more, until it is told to end.
fn moves(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("comm");
    let receives = ctx.rank == 0;
    let mem = Mem::new(LEN);
    let mr = plugin.reg_mr(comm, mem.ptr(0), LEN).expect("regMr");
    for _ in 0..MESSAGES {
        let request = match receives {
            true => comms::irecv(&plugin, comm, &mem, 0, LEN, 1, mr).expect("irecv"),
            false => comms::isend(&plugin, comm, &mem, 0, LEN, 1, mr).expect("isend"),
        };
        comms::wait(&plugin, request).expect("wait");
    }
    ctx.say("moved");
    if receives {
        let request = comms::irecv(&plugin, comm, &mem, 0, LEN, 1, mr).expect("irecv");
        until("the end of the test", || {
            assert_eq!(plugin.test(request).expect("test"), None);
            ctx.parent.ready().then_some(())
        });
    }
    assert_eq!(ctx.parent.text(), "end");
}

fn railhead(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_railhead")).args(args).output().expect("railhead")
}

#[track_caller]
fn stats(args: &[&str]) -> String {
    let output = railhead(&[&["stats"], args].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&stats(&[args, &["--json"]].concat())).expect("JSON")
}

/// The one comm that the process has.
fn comm_of(pid: &str) -> Value {
    let page = json(&["--pid", pid]);
    let processes = page["processes"].as_array().expect("processes");
    assert_eq!(processes.len(), 1);
    assert_eq!(processes[0]["pid"], pid.parse::<i32>().expect("a number"));
    assert!(processes[0]["command"].as_str().expect("a command").contains("child_entry"), "{page}");
    let comms = processes[0]["comms"].as_array().expect("comms");
    assert_eq!(comms.len(), 1, "{page}");
    comms[0].clone()
}

fn moved(wire: &str) -> (Ranks, [String; 2]) {
    let mut ranks = World::new("moves", 2).env("RAILHEAD_SOFT_WIRE", wire).spawn();
    (0..2).for_each(|rank| ranks.expect(rank, "moved"));
    let pids = [0, 1].map(|rank: usize| ranks.ranks[rank].pid().to_string());
    (ranks, pids)
}

fn end(ranks: Ranks) {
    (0..2).for_each(|rank| ranks.tell(rank, "end"));
    ranks.finish();
}

/// The records that tell the size of a message in stripes are moved by the rails, and are none of its bytes.
#[test]
fn bytes_of_messages_in_stripes_are_counted_once() {
    for wire in ["shm", "tcp"] {
        let mut ranks = World::new("moves", 2).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_QPS_PER_RAIL", "2").spawn();
        (0..2).for_each(|rank| ranks.expect(rank, "moved"));
        for rank in 0..2 {
            let comm = comm_of(&ranks.ranks[rank].pid().to_string());
            assert_eq!(comm["counters"]["bytes"], MESSAGES * LEN as u64, "{comm}");
            if rank == 1 {
                assert_eq!(comm["rails"][0]["counters"]["requests"], 4 * MESSAGES, "not in stripes: {comm}");
            }
        }
        end(ranks);
    }
}

#[test]
fn counts_are_what_was_moved() {
    for (wire, path) in [("shm", "cma"), ("tcp", "tcp")] {
        let (ranks, pids) = moved(wire);
        let total = MESSAGES * LEN as u64;
        let sender = comm_of(&pids[1]);
        assert_eq!(sender["direction"], "send");
        assert_eq!(sender["peer_pid"].to_string(), pids[0]);
        assert_eq!(sender["outstanding"], 0);
        assert_eq!(comm_of(&pids[0])["counters"]["bytes"], total);
        let expected = [("ops", MESSAGES), ("completions", MESSAGES), ("bytes", total), ("errors", 0), ("stalls", 0)];
        expected.iter().for_each(|(name, n)| assert_eq!(sender["counters"][name], *n, "{name}"));
        let rail = &sender["rails"][0]["counters"];
        let tx = rail[format!("tx_{path}_bytes")].as_u64().expect("bytes");
        // A kernel may refuse cross-memory attach.
        let tx = tx + rail["tx_bounce_bytes"].as_u64().expect("bytes");
        assert!((total..total + MESSAGES * 4096).contains(&tx), "{wire}: {tx}");
        assert_eq!(rail["requests"], MESSAGES);

        let text = stats(&["--pid", &pids[1]]);
        for part in [&format!("pid {}  ", pids[1]), " send ", " 977K ", " out ", "rail 0: "] {
            assert!(text.contains(part), "no {part:?} in: {text}");
        }
        end(ranks);
    }
}

#[test]
fn a_wait_is_shown_with_its_cause_and_grows() {
    let (ranks, pids) = moved("auto");
    let waiting = |least: f64| {
        until("a wait", || {
            let comm = comm_of(&pids[0]);
            let wait = &comm["waits_for"];
            (wait["for_s"].as_f64()? > least).then(|| comm.clone())
        })
    };
    let first = waiting(0.0);
    assert_eq!((first["direction"].as_str(), first["outstanding"].as_u64()), (Some("recv"), Some(1)));
    assert_eq!(first["waits_for"]["cause"], "peer_no_send");
    waiting(first["waits_for"]["for_s"].as_f64().expect("seconds"));
    // What is accounted to the cause grows with each sample of the waiting rank.
    let waited = |comm: &Value| comm["waited_s"]["peer_no_send"].as_f64().expect("seconds");
    until("a later sample", || (waited(&comm_of(&pids[0])) > waited(&first)).then_some(()));
    let text = stats(&["--pid", &pids[0]]);
    assert!(text.contains("the peer has not sent, for "), "{text}");
    let samples = prometheus(&stats(&["--pid", &pids[0], "--prometheus"]));
    assert!(samples.keys().any(|key| key.starts_with("railhead_comm_waiting_seconds{") && key.contains("cause=peer_no_send")));
    end(ranks);
}

/// The fault is not the fabric's, nor the peer's, while the process itself does not run.
#[test]
fn a_process_that_is_itself_stopped_is_told() {
    let (ranks, pids) = moved("auto");
    let cause = || comm_of(&pids[0])["waits_for"]["cause"].as_str().map(str::to_owned);
    until("a wait", || cause().filter(|cause| cause == "peer_no_send"));
    ranks.ranks[0].signal(libc::SIGSTOP);
    until("the stop", || (ranks.ranks[0].state() == 'T').then_some(()));
    assert_eq!(cause().as_deref(), Some("self_stopped"));
    assert_eq!(json(&["--pid", &pids[0]])["processes"][0]["stopped"], true);
    let text = stats(&["--pid", &pids[0]]);
    assert!(text.contains("is stopped itself, for "), "{text}");
    let samples = prometheus(&stats(&["--pid", &pids[0], "--prometheus"]));
    assert!(samples.iter().any(|(key, value)| key.starts_with("railhead_process_stopped{") && *value == 1.0), "{samples:?}");
    assert!(samples.keys().any(|key| key.starts_with("railhead_comm_waiting_seconds{") && key.contains("cause=self_stopped")));
    let top = railhead(&["top", "--once", "--interval", "0.1", "--pid", &pids[0]]);
    assert!(String::from_utf8_lossy(&top.stdout).contains("stopped itself"), "{top:?}");
    ranks.ranks[0].signal(libc::SIGCONT);
    until("the wait for the peer again", || cause().filter(|cause| cause == "peer_no_send"));
    assert!(!stats(&["--pid", &pids[0]]).contains("itself"));
    end(ranks);
}

#[test]
fn without_a_pid_every_process_is_shown() {
    let (ranks, pids) = moved("auto");
    let page = json(&[]);
    let seen: BTreeSet<String> = page["processes"].as_array().expect("processes").iter().map(|p| p["pid"].to_string()).collect();
    assert!(pids.iter().all(|pid| seen.contains(pid)), "{pids:?} in {seen:?}");
    let samples = prometheus(&stats(&["--prometheus"]));
    for pid in &pids {
        let bytes: f64 = samples
            .iter()
            .filter(|(key, _)| key.starts_with("railhead_comm_bytes_total{") && key.contains(&format!("pid={pid},")))
            .map(|(_, value)| value)
            .sum();
        assert_eq!(bytes, (MESSAGES * LEN as u64) as f64);
    }
    end(ranks);
}

/// Checks the text against the format's rules and gives the samples.
#[track_caller]
fn prometheus(page: &str) -> BTreeMap<String, f64> {
    assert!(page.is_empty() || page.ends_with('\n'));
    let mut samples = BTreeMap::new();
    let mut described = BTreeSet::new();
    let (mut name, mut kind) = (String::new(), String::new());
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            name = help.split(' ').next().expect("a name").to_owned();
            assert!(described.insert(name.clone()), "{name} is described twice, or its samples do not stand together");
            assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') && help.len() > name.len() + 5, "{line}");
            let kinds = lines.next().and_then(|l| l.strip_prefix(&format!("# TYPE {name} "))).expect("a type");
            assert!(["counter", "gauge"].contains(&kinds), "{kinds}");
            kind = kinds.to_owned();
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            assert!(lines.peek().is_some_and(|l| l.starts_with(&format!("{name}{{"))), "{name} has no sample");
            continue;
        }
        let rest = line.strip_prefix(&format!("{name}{{")).unwrap_or_else(|| panic!("not a sample of {name}: {line}"));
        let (labels, value) = labels(rest);
        let value: f64 = value.strip_prefix(' ').and_then(|v| v.parse().ok()).unwrap_or_else(|| panic!("no value: {line}"));
        assert!(value >= 0.0, "{line}");
        assert!(samples.insert(format!("{name}{{{labels}}}"), value).is_none(), "twice: {line}");
    }
    assert!(page.is_empty() || !kind.is_empty());
    samples
}

/// Labels unescaped as "name=value,", and what stands behind the closing brace.
fn labels(text: &str) -> (String, &str) {
    let (mut out, mut rest) = (String::new(), text);
    loop {
        let (name, behind) = rest.split_once("=\"").expect("a label");
        assert!(!name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{name:?}");
        out += &format!("{name}=");
        let mut chars = behind.char_indices();
        loop {
            match chars.next().expect("the end of a value") {
                (_, '\\') => match chars.next().expect("an escape").1 {
                    'n' => out.push('\n'),
                    c @ ('\\' | '"') => out.push(c),
                    c => panic!("no such escape: \\{c}"),
                },
                (at, '"') => {
                    rest = &behind[at + 1..];
                    break;
                }
                (_, c) => {
                    assert!(!c.is_control(), "{c:?} in a label");
                    out.push(c);
                }
            }
        }
        out.push(',');
        match rest.strip_prefix(',') {
            Some(more) => rest = more,
            None => return (out, rest.strip_prefix('}').expect("a closing brace")),
        }
    }
}

/// Holds a page that says the strangest things, until told to end.
fn forges(ctx: &Ctx) {
    // SAFETY: a terminated name; the result is checked before it is owned.
    let mut file = unsafe {
        let fd = libc::memfd_create(c"railhead-stats".as_ptr(), libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0);
        std::fs::File::from_raw_fd(fd)
    };
    file.set_len(size_of::<Layout>() as u64).expect("a size");
    let mut put = |at: usize, bytes: &[u8]| {
        file.seek(SeekFrom::Start(at as u64)).expect("seek");
        file.write_all(bytes).expect("write");
    };
    put(0, &MAGIC.to_ne_bytes());
    put(8, &VERSION.to_ne_bytes());
    put(12, &std::process::id().to_ne_bytes());
    // Two comms of one number, one whose seq is odd for ever, and rails likewise.
    for (record, seq) in [(0usize, 0u32), (1, 0), (2, 1)] {
        let at = 4096 + record * 384;
        put(at, &[0xff; 384]);
        put(at, &seq.to_ne_bytes());
        put(at + 4, &2u32.to_ne_bytes());
        put(at + 8, &77u64.to_ne_bytes());
        put(at + 24, &4u32.to_ne_bytes());
        let mut name = [0u8; 64];
        let evil = b"e\"v\\i\nl\x1b[31m\xff{}";
        name[..evil.len()].copy_from_slice(evil);
        put(at + 176, &name);
        put(at + 240, &name);
        let rail = 4096 + (1024 + record) * 384;
        put(rail, &[0xff; 384]);
        put(rail + 16, &1u64.to_ne_bytes());
        put(rail + 256, &name);
        put(rail, &0u32.to_ne_bytes());
        put(rail + 8, &77u64.to_ne_bytes());
    }
    // SAFETY: an open descriptor and an integer.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }, 0);
    ctx.say("forged");
    assert_eq!(ctx.parent.text(), "end");
}

#[test]
fn a_page_that_lies_is_shown_without_harm() {
    let mut ranks = World::new("forges", 1).spawn();
    ranks.expect(0, "forged");
    let pid = ranks.ranks[0].pid().to_string();
    let comm = comm_of(&pid);
    assert_eq!((comm["id"].as_u64(), comm["counters"]["ops"].as_u64()), (Some(77), Some(u64::MAX)));
    assert!(comm["rails"][0]["down"]["for_s"].as_f64() > Some(1.0), "{comm}");
    let samples = prometheus(&stats(&["--pid", &pid, "--prometheus"]));
    assert!(samples.keys().any(|key| key.contains("device=e\"v\\i")), "{samples:?}");
    let text = stats(&["--pid", &pid]);
    assert!(text.contains("e\"v\\i") && !text.contains('\x1b'), "{text:?}");
    ranks.tell(0, "end");
    ranks.finish();
}

#[test]
fn what_cannot_be_shown_is_said() {
    let mut child = Command::new("true").spawn().expect("true");
    child.wait().expect("wait");
    let (gone, here) = (child.id().to_string(), std::process::id().to_string());
    for (args, why) in [
        (vec!["--pid", &gone], "there is no process"),
        (vec!["--pid", &here], "has no stats page"),
        (vec!["--pid", "0"], "expected a whole number from 1 to "),
        (vec!["--pid", "abc"], "invalid value 'abc' for '--pid <PID>': expected a whole number from 1 to 4194304"),
        (vec!["--json", "--prometheus"], "cannot be used with"),
    ] {
        let output = railhead(&[&["stats"], &args[..]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(why), "{args:?}: {said}");
    }
}
