//! `railhead top` in a real terminal (tmux's), beside ranks that move known amounts and beside `railhead perf`: the rates that it shows add up
//! to what was moved, and whatever ends it, the terminal is as before.

use crate::support;

use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use support::comms::{self, Mem};
use support::plugin::Plugin;
use support::{Ctx, Ranks, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("bursts", bursts)];

const LEN: usize = 1 << 20;
const BURST: usize = 64;

/// Rank 1 sends BURST messages to rank 0 whenever the test says so. In between, rank 0 waits for the next one, polling.
fn bursts(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("comm");
    let mem = Mem::new(LEN);
    let mr = plugin.reg_mr(comm, mem.ptr(0), LEN).expect("regMr");
    let more = std::env::var_os("RHT_MORE").map(|_| comms::to_itself(&plugin, 0).expect("comms"));
    ctx.say(if more.is_some() { "ready with more" } else { "ready" });
    if ctx.rank == 1 {
        while ctx.parent.text() == "burst" {
            for _ in 0..BURST {
                let request = comms::isend(&plugin, comm, &mem, 0, LEN, 1, mr).expect("isend");
                comms::wait(&plugin, request).expect("wait");
            }
            ctx.say("moved");
        }
        return;
    }
    loop {
        let request = comms::irecv(&plugin, comm, &mem, 0, LEN, 1, mr).expect("irecv");
        // For as long as the test likes.
        while plugin.test(request).expect("test").is_none() {
            if ctx.parent.ready() {
                assert_eq!(ctx.parent.text(), "end");
                return;
            }
            std::thread::yield_now();
        }
    }
}

fn ranks() -> (Ranks, [i32; 2]) {
    started(World::new("bursts", 2), "ready")
}

fn started(world: World, word: &str) -> (Ranks, [i32; 2]) {
    let mut ranks = world.spawn();
    (0..2).for_each(|rank| ranks.expect(rank, word));
    let pids = [0, 1].map(|rank: usize| ranks.ranks[rank].pid());
    (ranks, pids)
}

fn end(ranks: Ranks) {
    (0..2).for_each(|rank| ranks.tell(rank, "end"));
    ranks.finish();
}

/// A terminal of tmux's, with a server of its own.
struct Terminal {
    name: String,
}

impl Terminal {
    /// Runs a line of shell in 80 columns and 24 lines.
    fn new(name: &str, line: &str) -> Terminal {
        Terminal::of_height(24, name, line)
    }

    fn of_height(lines: u32, name: &str, line: &str) -> Terminal {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        // A server that is ending still holds its name.
        let started = STARTED.fetch_add(1, Ordering::Relaxed);
        let terminal = Terminal { name: format!("railhead-{}-{started}-{name}", std::process::id()) };
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", &lines.to_string(), line]);
        terminal
    }

    fn tmux(&self, args: &[&str]) -> String {
        let output = Command::new("tmux").args(["-L", &self.name]).args(args).env_remove("TMUX").output();
        let output = output.unwrap_or_else(|e| panic!("tmux: {e} (make deps-test)"));
        assert!(output.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// With its attributes, as escape sequences.
    fn coloured(&self) -> String {
        self.tmux(&["capture-pane", "-e", "-p"])
    }

    fn keys(&self, keys: &str) {
        self.tmux(&["send-keys", keys]);
    }

    fn ask(&self, format: &str) -> String {
        self.tmux(&["display-message", "-p", format]).trim().to_owned()
    }

    /// The screen, once it holds this.
    #[track_caller]
    fn wait_for(&self, text: &str) -> String {
        let mut screen = String::new();
        let end = std::time::Instant::now() + support::PATIENCE;
        while !screen.contains(text) {
            assert!(std::time::Instant::now() < end, "no {text:?} on the screen:\n{screen}");
            screen = self.screen();
        }
        screen
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.name, "kill-server"]).stderr(Stdio::null()).status();
    }
}

fn top(args: &str) -> String {
    format!("{} top {args}", env!("CARGO_BIN_EXE_railhead"))
}

/// The number of a frame and the seconds that its rates are over, from "#3 over 2.00 s: ...".
fn heading(screen: &str) -> Option<(u64, f64)> {
    let (number, rest) = screen.strip_prefix('#')?.split_once(" over ")?;
    Some((number.parse().ok()?, rest.split_once(" s: ")?.0.parse().ok()?))
}

/// "64.0M" or "12.0M/s" as a number.
fn number(text: &str) -> Option<f64> {
    let text = text.trim_end_matches("/s");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_uppercase());
    let power = ["", "K", "M", "G", "T"].iter().position(|unit| *unit == &text[digits.len()..])?;
    Some(digits.parse::<f64>().ok()? * 1024f64.powi(power as i32))
}

/// Bytes per second, and bytes so far, of the process's comms, if there are any.
fn rows(screen: &str, pid: i32) -> Option<(f64, f64)> {
    let pid = pid.to_string();
    let lines = screen.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows = lines.filter(|cells| cells.first() == Some(&&*pid)).map(|cells| Some((number(cells.get(4)?)?, number(cells.get(6)?)?)));
    rows.reduce(|sum, row| sum.zip(row).map(|(sum, row)| (sum.0 + row.0, sum.1 + row.1)))?
}

#[test]
fn rates_add_up_to_what_was_moved() {
    let (mut ranks, pids) = ranks();
    let mut bursts = 0;
    for pid in pids {
        let terminal = Terminal::new(&format!("rates{pid}"), &top(&format!("--interval 1.5 --pid {pid}")));
        // A burst proves nothing if the test itself missed a frame of it.
        let proven = (0..5).any(|_| {
            let before = bursts;
            bursts += 1;
            let frames = watch(&terminal, &ranks, pid, before);
            ranks.expect(1, "moved");
            let sum: f64 = frames.values().map(|(over, rate)| over * rate).sum();
            let moved = (BURST * LEN) as f64;
            let missed = frames.keys().zip(frames.keys().skip(1)).any(|(a, b)| *b != a + 1);
            assert!(missed || (sum - moved).abs() < moved * 0.06, "rates add up to {sum} instead of {moved}: {frames:?}");
            !missed
        });
        assert!(proven, "frames were missed each time");
    }
    end(ranks);
}

/// Starts a burst when the screen shows the ones before it at rest, and watches until it shows this one at rest. What the frames said, by
/// number: seconds, and bytes per second. As last seen, for while a frame is drawn its rows may be the old ones still.
fn watch(terminal: &Terminal, ranks: &Ranks, pid: i32, before: usize) -> BTreeMap<u64, (f64, f64)> {
    let mut frames = BTreeMap::new();
    let mut begun = false;
    let rests = |(rate, total): (f64, f64), bursts: usize| {
        let moved = (bursts * BURST * LEN) as f64;
        rate == 0.0 && (total - moved).abs() <= moved / 100.0
    };
    until("a burst, on the screen", || {
        let screen = terminal.screen();
        let ((number, over), seen) = (heading(&screen)?, rows(&screen, pid)?);
        frames.insert(number, (over, seen.0));
        if !begun && rests(seen, before) {
            begun = true;
            ranks.tell(1, "burst");
        }
        (begun && rests(seen, before + 1)).then_some(())
    });
    frames
}

#[test]
#[ignore = "it takes a machine that does little else: `make soak`"]
fn rates_are_what_perf_measures_and_add_up_to_what_it_moves() {
    for wire in ["shm", "tcp"] {
        // A run proves nothing if the test itself missed a frame of it.
        assert!((0..5).any(|_| beside_perf(wire)), "{wire}: frames were missed each time");
    }
}

/// `perf`, killed when dropped; its ranks end with it.
struct Perf(Child);

impl Drop for Perf {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Watches a whole run of `perf`, and compares; false if not every frame of it was seen.
fn beside_perf(wire: &str) -> bool {
    // High enough for whatever else uses Railhead here just now.
    let terminal = Terminal::of_height(200, &format!("perf-{wire}"), &top("--interval 0.5"));
    terminal.wait_for(" over ");
    // Messages without a byte come last: so that top still sees the comms when all bytes are moved.
    let perf = Command::new(env!("CARGO_BIN_EXE_railhead"))
        .args(["perf", "--json", "--what", "bandwidth", "--limits", "none", "--sizes", "1M,0", "--rounds", "6", "--round-ms", "300"])
        .args(["--env", &format!("RAILHEAD_SOFT_WIRE={wire}"), "--plugin"])
        .arg(support::plugin::library())
        .env("NCCL_SOCKET_IFNAME", "lo")
        .stdout(Stdio::piped())
        .spawn();
    let mut perf = Perf(perf.expect("railhead"));
    let frames = frames_of(&terminal, &mut perf.0);
    let mut report = String::new();
    perf.0.stdout.take().expect("a pipe").read_to_string(&mut report).expect("text");
    let report: serde_json::Value = serde_json::from_str(&report).unwrap_or_else(|e| panic!("{e}: {report}"));
    let measured = &report["rows"][0]["plugins"][0];
    let part = |of: &serde_json::Value| of.as_f64().unwrap_or_else(|| panic!("no number: {measured}"));
    let (moved, timed) = (part(&measured["bytes"]), part(&measured["timed_bytes"]));
    // Up to the one in which all is at rest again.
    let rest =
        frames.iter().rfind(|(_, frame)| frame.rows.iter().flatten().any(|(rate, _)| *rate > 0.0)).map_or(0, |(number, _)| number + 1);
    if !(0..=rest).all(|number| frames.get(&number).is_some_and(|frame| frame.seen >= 2)) || frames[&rest].rows.contains(&None) {
        return false;
    }
    let mut inner = 0;
    for rank in 0..2 {
        // A cell has two digits where it has fewest.
        let near = |sum: f64, what: &str| assert!((sum - moved).abs() < moved * 0.06, "{wire}: {what} {sum}, not {moved}: {frames:?}");
        let total = frames.values().filter_map(|f| f.rows[rank]).map(|(_, total)| total).fold(0.0, f64::max);
        near(total, "the total is");
        let (mut sum, mut within) = (0.0, (0.0, 0.0));
        for (rate, over) in frames.values().filter_map(|f| Some((f.rows[rank]?.0, f.over))) {
            let before = sum;
            sum += rate * over;
            // All of it while perf took the time.
            if before > moved * 1.06 - timed && sum < moved * 0.94 {
                within = (within.0 + rate * over, within.1 + over);
                inner += 1;
            }
        }
        near(sum, "rates add up to");
        if within.1 > 0.0 {
            let (rate, of) = (within.0 / within.1, |name: &str| part(&measured["figure"][name]) * 1e9);
            // Between two rounds nothing is moved for a moment, which a busy machine draws out.
            let (low, high) = (of("min") * 0.6, of("max") * 1.06);
            assert!((low..high).contains(&rate), "{wire}: {rate} is not within {low}..{high}: {frames:?}\n{measured}");
        }
    }
    inner > 0
}

/// A frame of top's, as it showed two processes.
#[derive(Debug, PartialEq)]
struct TwoRanks {
    over: f64,
    /// Bytes per second, and so far; none where the process is not shown.
    rows: [Option<(f64, f64)>; 2],
    /// How often, one after the other.
    seen: u32,
}

/// By number, what top showed of the ranks until `perf` was through. As last seen, for while a frame is drawn its rows may be the old ones.
fn frames_of(terminal: &Terminal, perf: &mut Child) -> BTreeMap<u64, TwoRanks> {
    let children = format!("/proc/{0}/task/{0}/children", perf.id());
    let mut ranks: Vec<i32> = Vec::new();
    let mut frames: BTreeMap<u64, TwoRanks> = BTreeMap::new();
    let mut through = false;
    while !through {
        through = perf.try_wait().expect("perf").is_some();
        let screen = terminal.screen();
        if ranks.len() < 2 {
            let pids = std::fs::read_to_string(&children).unwrap_or_default();
            ranks = pids.split_whitespace().map(|pid| pid.parse().expect("a number")).collect();
        }
        let Some((number, over)) = heading(&screen) else { continue };
        let rows = [0, 1].map(|rank: usize| rows(&screen, *ranks.get(rank)?));
        let before = frames.get(&number).filter(|frame| frame.over == over && frame.rows == rows).map_or(0, |frame| frame.seen);
        frames.insert(number, TwoRanks { over, rows, seen: before + 1 });
    }
    // Of a frame that came as perf ended, nobody knows whether it would have been seen again.
    frames.pop_last();
    frames
}

#[test]
fn it_fits_any_size_and_keys_do_what_they_say() {
    // Rank 0 then has three comms.
    let (ranks, pids) = started(World::new("bursts", 2).env("RHT_MORE", "1"), "ready with more");
    let terminal = Terminal::new("sizes", &top(&format!("--interval 0.2 --pid {}", pids[0])));
    let screen = terminal.wait_for(&format!("of pid {}: ", pids[0]));
    assert!(screen.contains("BYTES/S") && screen.contains("by rate") && screen.contains("SINCE"), "{screen}");
    assert!(screen.lines().count() <= 24 && !screen.contains("PEER"), "{screen}");
    terminal.wait_for("peer's send");
    terminal.keys("s");
    terminal.wait_for("by wait");
    // Only one of them waits, so it is the first, and the one that is told about.
    terminal.wait_for("the peer has not sent, for ");
    terminal.keys("s");
    terminal.wait_for("by pid");
    let numbers: Vec<String> = terminal
        .screen()
        .lines()
        .filter_map(|l| l.strip_prefix(&format!("{:>7} ", pids[0]))?.split_whitespace().next().map(str::to_owned))
        .collect();
    assert_eq!(numbers.len(), 3);
    let tells = |number: &str| terminal.wait_for(&format!(" comm {number} of pid "));
    terminal.keys("PageDown");
    tells(&numbers[2]);
    terminal.keys("Up");
    tells(&numbers[1]);
    terminal.keys("k");
    tells(&numbers[0]);
    terminal.keys("j");
    tells(&numbers[1]);
    terminal.tmux(&["resize-window", "-x", "130", "-y", "30"]);
    terminal.wait_for("PEER");
    terminal.tmux(&["resize-window", "-x", "40", "-y", "8"]);
    until("a narrow screen", || {
        let screen = terminal.screen();
        (screen.contains("PID") && !screen.contains("SINCE") && screen.lines().count() <= 8).then_some(())
    });
    terminal.tmux(&["resize-window", "-x", "5", "-y", "1"]);
    terminal.tmux(&["resize-window", "-x", "80", "-y", "24"]);
    terminal.wait_for("SINCE");
    end(ranks);
}

#[test]
fn colours_only_where_they_are_wanted() {
    let (ranks, pids) = ranks();
    let narrow = format!("--interval 0.2 --pid {}", pids[0]);
    let with = Terminal::new("colours", &top(&narrow));
    let without = Terminal::new("plain", &format!("NO_COLOR=1 {}", top(&narrow)));
    // A wait of a second is shown in yellow.
    until("a colour", || colours(&with.coloured()).contains(&"38;5;3").then_some(()));
    until("a wait of a second", || {
        let screen = without.coloured();
        let since = screen.split(", for ").nth(1)?.split(" s").next()?.parse::<f64>().ok()?;
        (since >= 2.0).then_some(())
    });
    let screen = without.coloured();
    assert_eq!(colours(&screen), [""; 0], "{screen:?}");
    assert!(screen.contains("\x1b[7m") || screen.contains(";7m"), "what is chosen is reversed: {screen:?}");
    end(ranks);
}

/// The attributes that are colours, the terminal's own ones left out.
fn colours(screen: &str) -> Vec<&str> {
    let attributes = screen.split("\x1b[").skip(1).filter_map(|rest| rest.split('m').next());
    attributes.filter(|codes| codes.split(';').any(|code| matches!(code.parse(), Ok(30..=38 | 40..=48 | 90..=107)))).collect()
}

/// Runs top in a shell that says how it ended and how the terminal is set.
fn ended(name: &str, stop: impl FnOnce(&Terminal)) -> String {
    let line = format!("{}; echo \"code $?\"; stty -a; cat", top("--interval 0.2"));
    let terminal = Terminal::new(name, &format!("sh -c '{}'", line.replace('\'', "'\\''")));
    terminal.wait_for("q quits");
    // The cursor is hidden behind the first frame.
    until("the screen without a cursor", || (terminal.ask("#{alternate_on} #{cursor_flag}") == "1 0").then_some(()));
    stop(&terminal);
    let screen = terminal.wait_for("icanon");
    assert_eq!(terminal.ask("#{alternate_on} #{cursor_flag}"), "0 1");
    let settings: Vec<&str> = screen.split_whitespace().collect();
    for sane in ["icanon", "echo", "isig", "opost"] {
        assert!(settings.contains(&sane), "no {sane:?} in {screen}");
    }
    screen
}

fn signal(terminal: &Terminal, signal: i32) {
    let shell = terminal.ask("#{pane_pid}");
    let found = Command::new("pgrep").args(["-P", &shell, "-x", "railhead"]).output().expect("pgrep");
    let pid: i32 = String::from_utf8_lossy(&found.stdout).trim().parse().expect("one child of the shell");
    // SAFETY: a child of a shell that this test started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

#[test]
fn however_it_ends_the_terminal_is_restored() {
    assert!(ended("q", |terminal| terminal.keys("q")).contains("code 0"));
    assert!(ended("interrupt", |terminal| terminal.keys("C-c")).contains("code 130"));
    for number in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        let screen = ended(&format!("signal{number}"), |terminal| signal(terminal, number));
        assert!(screen.contains(&format!("code {}", 128 + number)), "{screen}");
    }
    // The process that it was to watch goes away.
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat");
    let line = format!("{}; echo \"code $?\"; cat", top(&format!("--pid {}", child.id())));
    let terminal = Terminal::new("gone", &format!("sh -c '{line}'"));
    terminal.wait_for("has no stats page");
    terminal.wait_for("code 2");
    assert_eq!(terminal.ask("#{alternate_on} #{cursor_flag}"), "0 1");
    drop(child.stdin.take());
    child.wait().expect("wait");
}

#[test]
fn a_stop_gives_the_terminal_back_until_it_goes_on() {
    let terminal = Terminal::new("stops", "sh -i");
    // An interactive shell has job control.
    terminal.tmux(&["send-keys", "-l", &top("--interval 0.2")]);
    terminal.keys("Enter");
    terminal.wait_for("q quits");
    terminal.keys("C-z");
    until("the shell's screen", || (terminal.ask("#{alternate_on} #{cursor_flag}") == "0 1").then_some(()));
    terminal.tmux(&["send-keys", "-l", "fg"]);
    terminal.keys("Enter");
    until("the screen again", || (terminal.ask("#{alternate_on}") == "1").then_some(()));
    terminal.wait_for("q quits");
    terminal.keys("q");
    until("the shell's screen", || (terminal.ask("#{alternate_on} #{cursor_flag}") == "0 1").then_some(()));
}

#[test]
fn plain_lines_where_there_is_no_screen() {
    let (ranks, pids) = ranks();
    let output = Command::new(env!("CARGO_BIN_EXE_railhead")).args(["top", "--once", "--interval", "0.1"]).output().expect("railhead");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success() && !text.contains('\x1b'), "{text}");
    assert!(text.starts_with("#1 over "), "{text}");
    assert!(pids.iter().all(|pid| rows(&text, *pid) == Some((0.0, 0.0))), "{text}");
    assert!(text.lines().all(|line| !line.ends_with(' ')) && text.contains("WAITS FOR") && text.contains(" pid "), "{text}");
    let terminal = Terminal::new("dumb", &format!("TERM=dumb {}", top(&format!("--interval 0.1 --pid {}", pids[0]))));
    terminal.wait_for(" over 0.");
    assert_eq!(terminal.ask("#{alternate_on}"), "0");
    for (args, why) in
        [(["--interval", "0"], "from 0.1 to 3600"), (["--interval", "x"], "from 0.1 to 3600"), (["--sort", "x"], "rate, wait, pid")]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_railhead")).arg("top").args(args).output().expect("railhead");
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{args:?}");
    }
    end(ranks);
}
