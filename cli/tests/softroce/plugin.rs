//! The plugin on real queue pairs, driven by examples in C and by ranks of this program that run in the machine, too.

use std::process::Command;

use railhead::base::stats::{CommKind, RailCounter};

use crate::conformance::bed;
use crate::machine::Ran;
use crate::support::{self, Ctx, Role, comms, pattern};
use crate::{HARNESS, MACHINE};

pub const ROLES: &[(&str, Role)] = &[
    ("merges", merges),
    ("exchanges", exchanges),
    ("streams", streams),
    ("announces_early", announces_early),
    ("outlives", outlives),
    ("parts", parts),
    ("carries_on", support::failover::carries_on),
    ("mesh_carries_on", support::failover::mesh::carries_on),
];

/// Each byte of each message between two processes, over RDMA devices that nobody asked for by name.
#[test]
fn two_processes_exchange_verified_messages() {
    let line = "RAILHEAD_DEBUG=info ./plugin_pingpong --plugin ./librailhead.so --max 1M --iters 20 --timeout 250";
    let Some(ran) = MACHINE.run(1, 400, line) else { return };
    ran.passes().says("device 0: rxe0").says("fabric verbs").says("no byte wrong").says("bytes sent: nic ");
}

/// The same with more queue pairs, flow-control slots that are not inline, a forced GID, and an IPv6 one.
#[test]
fn the_settings_reach_the_device() {
    let line = "set -e
        run() { env \"$@\" RAILHEAD_DEBUG=info ./plugin_pingpong --plugin ./librailhead.so --max 256K --iters 10; }
        run NCCL_IB_USE_INLINE=0 NCCL_IB_QPS_PER_CONNECTION=4 RAILHEAD_SPLIT_MIN=4096
        run NCCL_IB_ADDR_FAMILY=AF_INET6
        run NCCL_IB_GID_INDEX=1 NCCL_IB_TIMEOUT=14 NCCL_IB_RETRY_CNT=6
        run NCCL_IB_HCA=^rxe0";
    let Some(ran) = MACHINE.run(1, 400, line) else { return };
    ran.passes()
        .says("4 queue pair(s) each, fabric verbs")
        .says("GID fd08::1 (index 2)")
        .says("RDMA port rxe0:1 is left out by NCCL_IB_HCA=^rxe0");
    assert_eq!(ran.output.matches("no byte wrong").count(), 4);
}

/// The programs that move data through the plugin and the proxy above it: each checks every byte, and the devices' own counters say whose packets
/// carried them, none of which holds more than 4096.
#[test]
fn the_other_examples_move_their_data_over_the_device() {
    let line = r#"
        export RAILHEAD_FABRIC=verbs RAILHEAD_DEBUG=info LD_LIBRARY_PATH=.
        packets() { cat /sys/class/infiniband/rxe*/ports/1/hw_counters/sent_pkts | awk '{ n += $1 } END { print n }'; }
        ranks() { # each on a device of its own
            for rank in 0 1; do
                NCCL_IB_HCA==rxe$rank ./rendezvous_ping --plugin ./librailhead.so --rounds 100 --url "file:///tmp/store?rank=$rank&world_size=2" &
                pids[rank]=$!
            done
            wait ${pids[0]} && wait ${pids[1]}
        }
        over() { # PACKETS-AT-LEAST COMMAND...
            least=$1 before=$(packets); shift
            "$@" || { echo "$1: exit status $?"; exit 1; }
            sent=$(($(packets) - before))
            echo "$1: $sent packets"
            [ $sent -ge $least ] || exit 2
        }
        over 200 ranks
        over 1500 ./proxy_stream 50 200000
        over 120 ./proxy_shared 50 20000
        over 700 ./proxy_sendrecv 3 200000"#;
    let Some(ran) = MACHINE.run(1, 400, line) else { return };
    ran.passes().says("rank 0 of 2: 100 messages went round through Railhead");
    assert_eq!(ran.output.matches("verified, no byte wrong").count(), 1 + 1 + 4);
    // A send and a receive comm of each: two ranks in a ring, one stream, another, four ranks all to all.
    assert_eq!(ran.output.matches("queue pair(s) each, fabric verbs").count(), 2 * (2 + 1 + 1 + 12));
}

/// What may be lacking is lacking: no device, or none wanted, is the software fabric; asked for by name, it is an error that says so.
#[test]
fn without_a_device_there_is_the_software_fabric() {
    let line =
        "run() { env \"$@\" NCCL_SOCKET_IFNAME=lo RAILHEAD_DEBUG=info ./plugin_pingpong --plugin ./librailhead.so --max 64 --iters 5; }
        run NCCL_IB_DISABLE=1 || exit 1
        mv /usr/lib/x86_64-linux-gnu/libibverbs.so.1 /tmp
        trap 'mv /tmp/libibverbs.so.1 /usr/lib/x86_64-linux-gnu' EXIT
        run || exit 2
        run RAILHEAD_FABRIC=verbs && exit 3
        exit 0";
    let Some(ran) = MACHINE.run(1, 400, line) else { return };
    ran.passes()
        .says("no RDMA NICs: NCCL_IB_DISABLE is set")
        .says("no RDMA NICs: libibverbs.so.1: cannot open shared object file")
        .says("RAILHEAD_FABRIC=verbs, and this machine has no usable RDMA NIC");
    assert_eq!(ran.output.matches("no byte wrong").count(), 2);
}

// ---- with ranks that tests of this program drive, inside of the machine ----

/// Runs a test of `inside` in a machine with so many pairs of devices. RHT_ROUNDS goes along.
#[track_caller]
fn run_inside(pairs: u32, test: &str) -> Option<Ran> {
    let rounds = bed::count("RHT_ROUNDS", 0);
    let set = if rounds == 0 { String::new() } else { format!("RHT_ROUNDS={rounds} ") };
    let seconds = 300 + 30 * rounds as u32;
    let ran = MACHINE.run(pairs, seconds, &format!("{set}./softroce --ignored --exact softroce::plugin::inside::{test} --nocapture"))?;
    ran.passes().says("1 passed");
    Some(ran)
}

/// One line for a failure and one for what is over, at least so often of each rail.
#[track_caller]
fn says_of_rails(ran: &Ran, least: [usize; 2]) {
    for (rail, least) in least.into_iter().enumerate() {
        for what in ["is down: ", "is up again, after "] {
            let lines = ran.output.matches(&format!("rail {rail} {what}")).count();
            assert!(lines >= least, "rail {rail} {what}: {lines} times");
        }
    }
}

#[test]
fn two_rails_one_by_one_and_merged() {
    run_inside(2, "two_rails_one_by_one_and_merged");
}

#[test]
fn rails_fail_and_come_back() {
    let Some(ran) = run_inside(2, "rails_fail_and_come_back") else { return };
    // Each end of each comm.
    says_of_rails(&ran, [8, 12]);
}

/// Collectives and messages of a mesh, whose every result is verified.
#[test]
fn rails_of_a_mesh_fail_and_come_back() {
    let Some(ran) = run_inside(2, "rails_of_a_mesh_fail_and_come_back") else { return };
    says_of_rails(&ran, [4, 4]);
}

/// The kernel's devices send in the first namespace whatever namespace they were made in (Linux 6.1, rxe_find_route6: init_net), so both stay there.
/// What differs is where the processes are: each sees the other's host by the cable alone, and its handshakes go there.
#[test]
fn peers_in_two_network_namespaces() {
    let Some(ran) = run_inside(1, "peers_in_two_network_namespaces") else { return };
    for gid in ["rxe0:1: GID ::ffff:10.8.0.1", "rxe1:1: GID ::ffff:10.8.0.2", "rxe0:1: GID fd08::1 ", "rxe1:1: GID fd08::2 "] {
        ran.says(gid);
    }
}

#[test]
fn receives_before_a_v4_peer_is_ready() {
    run_inside(1, "receives_before_a_v4_peer_is_ready");
}

#[test]
fn long_data_goes_apart_where_routing_is_adaptive() {
    run_inside(1, "long_data_goes_apart");
}

#[test]
fn addresses_and_links_that_come_and_go_are_counted_and_end_nothing() {
    let Some(ran) = run_inside(1, "addresses_come_and_go") else { return };
    ran.says("rxe0:1: GID table change: existing connections go on");
    assert!(!ran.output.contains("was removed"), "the address in use is still there");
    ran.says("rxe1:1: port error: the link is down").says("rxe1:1: port active: the link is up");
}

#[test]
fn a_link_that_goes_down_is_an_error_with_a_diagnosis() {
    let Some(ran) = run_inside(1, "a_link_that_goes_down") else { return };
    ran.says("rxe1:1: port error: the link is down").says("failed: IBV_WC_").says("vendor_err");
}

#[test]
fn the_address_in_use_is_removed() {
    let Some(ran) = run_inside(1, "the_address_in_use_is_removed") else { return };
    ran.says("rxe1:1: its address (GID) ::ffff:10.8.0.2 was removed from index 1").says("failed: IBV_WC_").says("vendor_err");
}

#[test]
fn packets_that_vanish_are_an_error_although_the_device_never_gives_up() {
    let Some(ran) = run_inside(1, "packets_vanish") else { return };
    ran.says("without completion for 3 s (RAILHEAD_FABRIC_TIMEOUT_S)");
}

#[test]
fn a_peer_that_is_killed_is_an_error_although_the_device_never_gives_up() {
    let Some(ran) = run_inside(1, "a_peer_is_killed") else { return };
    // What each survivor said before it said that it ended.
    let parts: Vec<&str> = ran.output.split("the other of rank ").collect();
    assert_eq!(parts.len(), 3);
    for part in &parts[..2] {
        assert!(part.contains("its process died") || part.contains("the control connection was "), "in the output above");
    }
    assert!(!ran.output.contains("without completion"), "the device's patience is a day");
}

/// What the commands' exit statuses are in this program's tests: the harness hands them on. And nothing is left of one for the next.
#[test]
fn each_command_has_its_own_status_and_devices() {
    let line = "echo here; touch /tmp/left; sleep 1000 & relink v1 down; ip addr add 10.9.0.1/24 dev v0; rdma link delete rxe0; exit 42";
    let Some(ran) = MACHINE.run(1, 300, line) else { return };
    assert_eq!(ran.status, Some(42));
    ran.says("here");
    let look = "ls /sys/class/infiniband; ls /tmp | wc -l; ps | grep -c 'slee[p]'; ip addr show v0 | grep -c 10.9; ip addr show v1 | grep -c 'state UP'";
    let Some(ran) = MACHINE.run(2, 300, look) else { return };
    assert_eq!(ran.output.split_whitespace().collect::<Vec<_>>(), ["rxe0", "rxe1", "rxe2", "rxe3", "0", "0", "0", "1"]);
    let Some(ran) = MACHINE.run(1, 1, "sleep 1000") else { return };
    assert_eq!(ran.status, Some(137), "the time is over");
}

/// The machine for a person, with one command.
#[test]
fn a_status_of_the_machine_is_the_harness_own() {
    let output = Command::new(HARNESS).args(["--", "ls -1 /sys/class/infiniband; exit 42"]).output().expect("vm");
    if output.status.code() != Some(77) {
        let said = String::from_utf8_lossy(&output.stdout);
        // A machine that did not come up says why.
        let own = said.rsplit_once("starting it again\n").map_or(&*said, |(_, own)| own);
        assert_eq!((output.status.code(), own), (Some(42), "rxe0\nrxe1\n"), "{said}");
    }
}

/// Without QEMU nothing is fetched or built: a status of its own, and one line.
#[test]
fn where_there_is_no_qemu_the_harness_says_so() {
    let path = tempfile::tempdir().expect("a folder");
    for program in ["bash", "dirname", "uname"] {
        let found = std::env::split_paths(&std::env::var_os("PATH").expect("PATH")).map(|dir| dir.join(program)).find(|file| file.exists());
        std::os::unix::fs::symlink(found.expect(program), path.path().join(program)).expect("a link");
    }
    let mut vm = Command::new(HARNESS);
    let output = vm.args(["--", "true"]).env("PATH", path.path()).output().expect("tests/softroce/vm");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(77), "{said}");
    assert!(said.lines().count() == 1 && said.starts_with("SKIP softroce: "), "{said}");
    if cfg!(target_arch = "x86_64") {
        assert_eq!(said, "SKIP softroce: no qemu-system-x86_64 (make deps-test)\n");
    }
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Every size over the device that NCCL_IB_HCA leaves.
fn exchanges(ctx: &Ctx) {
    let plugin = support::plugin::Plugin::start(12);
    let count = plugin.devices().expect("devices");
    for dev in 0..count {
        let (send, recv) = comms::both_ways(ctx, &plugin, dev).expect("comms");
        comms::exchange(&plugin, ctx.rank, send, recv, &comms::SIZES).expect("exchange");
        ctx.barrier();
        plugin.close_send(send).expect("close_send");
        plugin.close_recv(recv).expect("close_recv");
    }
    ctx.say(&format!("{count} devices"));
}

/// The same over two devices as one, and how many bytes went over each.
fn merges(ctx: &Ctx) {
    let plugin = support::plugin::Plugin::start(12);
    let parts = [0, 1].map(|dev| plugin.properties(dev).expect("properties"));
    let merged = plugin.make_vdevice(&[0, 1]).expect("makeVDevice");
    let whole = plugin.properties(merged).expect("properties");
    assert_eq!(whole.name, format!("{}+{}", parts[0].name, parts[1].name));
    assert_eq!(whole.speed, parts[0].speed + parts[1].speed);
    let (send, recv) = comms::both_ways(ctx, &plugin, merged).expect("comms");
    comms::exchange(&plugin, ctx.rank, send, recv, &comms::SIZES).expect("exchange");
    let all = support::holdings::comms(std::process::id() as i32);
    let sender = all.into_iter().find(|c| c.kind == CommKind::Send).expect("a send comm");
    let by_rail: Vec<String> = sender.rails.iter().map(|r| r.counters[RailCounter::TxNic as usize].to_string()).collect();
    ctx.say(&by_rail.join(" "));
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
}

/// Rank 0 announces a receive to a peer whose v4 comm is not connected before it is used, and goes on for longer than the device's retries.
fn announces_early(ctx: &Ctx) {
    let plugin = support::plugin::Plugin::start(4);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    let bytes = pattern(5, 100_000);
    if ctx.rank == 0 {
        let to = comms::Mem::new(bytes.len());
        let mr = plugin.reg_mr(recv, to.ptr(0), to.len()).expect("regMr");
        let request = comms::irecv(&plugin, recv, &to, 0, to.len(), 0, mr).expect("irecv");
        let start = std::time::Instant::now();
        while start.elapsed() < std::time::Duration::from_secs(2) {
            assert!(plugin.test(request).expect("a peer that is not ready yet is no error").is_none());
            support::pause(start);
        }
        ctx.barrier();
        comms::wait(&plugin, request).expect("the message");
        assert!(to.read(0, bytes.len()) == bytes);
        plugin.dereg_mr(recv, mr).expect("deregMr");
    } else {
        ctx.barrier();
        comms::send(&plugin, send, &bytes).expect("send");
    }
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
}

/// Messages above and below the threshold of adaptive routing, and how many requests they took.
fn parts(ctx: &Ctx) {
    let plugin = support::plugin::Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    let requests = || {
        let all = support::holdings::comms(std::process::id() as i32);
        all.iter().filter(|comm| comm.kind == CommKind::Send).map(|comm| comm.rail_sum(RailCounter::Requests)).sum::<u64>()
    };
    let said: Vec<String> = [1000, 1001, 300_000, 9 << 20]
        .into_iter()
        .map(|len| {
            let before = requests();
            comms::exchange(&plugin, ctx.rank, send, recv, &[len]).expect("exchange");
            (requests() - before).to_string()
        })
        .collect();
    ctx.say(&said.join(" "));
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
}

/// Messages flow until the device has reported something about each comm, and then some more.
fn outlives(ctx: &Ctx) {
    let plugin = support::plugin::Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    ctx.say("flowing");
    if std::env::var_os("RHT_PAUSE").is_some() {
        assert_eq!(ctx.parent.text(), "go on");
    }
    comms::exchange_until(ctx, &plugin, (send, recv), "an event of the device", || {
        let comms = support::holdings::comms(std::process::id() as i32);
        comms.len() == 2 && comms.iter().all(|comm| comm.rail_sum(RailCounter::NicEvents) > 0)
    });
    comms::exchange(&plugin, ctx.rank, send, recv, &comms::SIZES).expect("exchange");
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
}

/// Rank 0 sends to rank 1 until something ends that.
fn streams(ctx: &Ctx) {
    const LEN: usize = 1 << 20;
    let plugin = support::plugin::Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    let bytes = pattern(3, LEN);
    let mut messages = 0;
    let end = loop {
        let moved = match ctx.rank {
            0 => comms::send(&plugin, send, &bytes).map(|_| ()),
            _ => comms::recv(&plugin, recv, LEN).map(|got| assert!(got == bytes, "message {messages}")),
        };
        if let Err(error) = moved {
            break error;
        }
        messages += 1;
        if messages == 5 {
            ctx.say("flowing");
        }
    };
    ctx.say(&format!("ended with {end}"));
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
}

/// What the tests above run in the machine.
mod inside {
    use std::process::Command;

    use crate::conformance::bed;
    use crate::support::World;
    use crate::support::comms::SIZES;
    use crate::support::netns::Cable;

    /// Rank i on the devices of its end of the pairs, so that frames cross them.
    fn world(role: &'static str) -> World {
        let world = World::new(role, 2).env("RAILHEAD_DEBUG", "warn").env("RAILHEAD_FABRIC", "verbs");
        world.env_of(0, "NCCL_IB_HCA", "=rxe0,rxe2").env_of(1, "NCCL_IB_HCA", "=rxe1,rxe3")
    }

    fn sh(line: &str) {
        assert!(Command::new("bash").args(["-c", line]).status().expect("bash").success(), "{line}");
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn two_rails_one_by_one_and_merged() {
        let mut ranks = world("exchanges").spawn();
        (0..2).for_each(|rank| ranks.expect(rank, "2 devices"));
        ranks.finish();
        let mut ranks = world("merges").env("NCCL_NET_FORCE_MERGE", "rxe0,rxe2;rxe1,rxe3").spawn();
        for rank in 0..2 {
            let words = ranks.hear(rank);
            let bytes: Vec<u64> = words.split(' ').map(|word| word.parse().expect("a number")).collect();
            let large = SIZES.iter().filter(|len| **len >= 1 << 20).sum::<usize>() as u64;
            assert!(bytes.len() == 2 && bytes.iter().all(|&n| n >= large / 3), "bytes by rail: {words}");
        }
        ranks.finish();
    }

    /// Bytes of IPv6 that an interface received.
    fn received_by_ipv6(interface: &str) -> u64 {
        let counters = std::fs::read_to_string(format!("/proc/net/dev_snmp6/{interface}")).expect("counters");
        let value = counters.lines().find_map(|line| line.strip_prefix("Ip6InOctets")).expect("Ip6InOctets");
        value.trim().parse().expect("a number")
    }

    /// Handshakes through the cable between the namespaces and messages between the devices, both by one family of addresses, then by the other.
    #[test]
    #[ignore = "runs in the virtual machine"]
    fn peers_in_two_network_namespaces() {
        let cable = Cable::new();
        let messages = SIZES.iter().sum::<usize>() as u64;
        for (family, by_ipv6) in [("AF_INET", false), ("AF_INET6", true)] {
            let before = ["v0", "v1"].map(received_by_ipv6);
            let world = world("exchanges").env("RAILHEAD_DEBUG", "info").env("NCCL_SOCKET_IFNAME", "=rht");
            let world = world.env("NCCL_SOCKET_FAMILY", family).env("NCCL_IB_ADDR_FAMILY", family);
            let mut ranks = world.wrap(0, &cable.at(0)).wrap(1, &cable.at(1)).spawn();
            (0..2).for_each(|rank| ranks.expect(rank, "1 devices"));
            ranks.finish();
            for (interface, before) in ["v0", "v1"].into_iter().zip(before) {
                let got = received_by_ipv6(interface) - before;
                assert_eq!(got >= messages, by_ipv6, "{family}: {got} bytes came to {interface} by IPv6");
                assert!(by_ipv6 || got < messages / 10, "{family}: {got} bytes came to {interface} by IPv6");
            }
        }
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn receives_before_a_v4_peer_is_ready() {
        world("announces_early").env("NCCL_IB_TIMEOUT", "14").env("NCCL_IB_RETRY_CNT", "6").spawn().finish();
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn rails_fail_and_come_back() {
        rails_fail(world("carries_on").env("NCCL_NET_FORCE_MERGE", "rxe0,rxe2;rxe1,rxe3"), 6);
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn rails_of_a_mesh_fail_and_come_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let world = world("mesh_carries_on").env("RHT_STORE", folder.path().join("store").to_str().expect("UTF-8"));
        rails_fail(world.env_of(0, "RHT_DEVICE", "rxe0+rxe2").env_of(1, "RHT_DEVICE", "rxe1+rxe3"), 4);
    }

    /// So many times, or RHT_ROUNDS.
    fn rails_fail(world: World, rounds: u64) {
        let rounds = bed::count("RHT_ROUNDS", rounds) as usize;
        let world = world.env("RHT_ROUNDS", &rounds.to_string()).env("RAILHEAD_DEBUG", "info");
        let mut ranks = world.env("NCCL_IB_TIMEOUT", "14").env("NCCL_IB_RETRY_CNT", "6").spawn();
        // Longer than the pauses between attempts, where there is time for that.
        let silence_s = if rounds < 50 { 1 } else { 10 };
        for round in 0..rounds {
            // Either end of either pair.
            let end = [1, 3, 0, 2][round % 4];
            let (fault, time, mended) = [("down", 0, "up"), ("lossy", silence_s, "lossless"), ("unaddressed", 0, "addressed")][round % 3];
            for (state, line) in [("down", format!("relink v{end} {fault}")), ("up", format!("sleep {time}; relink v{end} {mended}"))] {
                (0..2).for_each(|rank| ranks.expect(rank, "ready"));
                (0..2).for_each(|rank| ranks.tell(rank, state));
                sh(&line);
            }
        }
        ranks.finish();
    }

    /// Lets messages flow, does something to the wire, and waits for both ranks' errors.
    fn broken_by(world: World, line: &str) {
        let mut ranks = world.spawn();
        (0..2).for_each(|rank| ranks.expect(rank, "flowing"));
        sh(line);
        for rank in 0..2 {
            println!("rank {rank} {}", ranks.hear(rank));
        }
        ranks.finish();
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn long_data_goes_apart() {
        // Data, data and word, and with two queue pairs a record as well, on each.
        for (adaptive, qps, requests) in [("0", "1", "1 1 1 2"), ("1", "1", "1 2 2 3"), ("1", "2", "1 2 6 6"), ("-1", "1", "1 1 1 2")] {
            let world =
                world("parts").env("NCCL_IB_AR_THRESHOLD", "1000").env("NCCL_IB_FIFO_TC", "96").env("NCCL_IB_SPLIT_DATA_ON_QPS", "1");
            let mut ranks = world.env("NCCL_IB_ADAPTIVE_ROUTING", adaptive).env("NCCL_IB_QPS_PER_CONNECTION", qps).spawn();
            (0..2).for_each(|rank| ranks.expect(rank, requests));
            ranks.finish();
        }
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn addresses_come_and_go() {
        let mut ranks = world("outlives").env("RAILHEAD_DEBUG", "info").spawn();
        (0..2).for_each(|rank| ranks.expect(rank, "flowing"));
        sh("for v in v0 v1; do ip addr add 10.9.0.1/24 dev $v && ip addr del 10.9.0.1/24 dev $v || exit 1; done");
        ranks.finish();
        // Soft-RoCE fails what is sent meanwhile, so nothing is.
        let mut ranks = world("outlives").env("RAILHEAD_DEBUG", "info").env("RHT_PAUSE", "1").spawn();
        (0..2).for_each(|rank| ranks.expect(rank, "flowing"));
        sh("relink v1 down && relink v1 up");
        (0..2).for_each(|rank| ranks.tell(rank, "go on"));
        ranks.finish();
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn a_link_that_goes_down() {
        let world = world("streams").env("NCCL_IB_TIMEOUT", "14").env("NCCL_IB_RETRY_CNT", "6");
        broken_by(world, "relink v1 down");
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn the_address_in_use_is_removed() {
        let world = world("streams").env("NCCL_IB_TIMEOUT", "14").env("NCCL_IB_RETRY_CNT", "6");
        broken_by(world, "ip addr del 10.8.0.2/24 dev v1");
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn packets_vanish() {
        let world = world("streams").env("RAILHEAD_FABRIC_TIMEOUT_S", "3");
        broken_by(world, "for v in v0 v1; do tc qdisc add dev $v root netem loss 100% || exit 1; done");
    }

    #[test]
    #[ignore = "runs in the virtual machine"]
    fn a_peer_is_killed() {
        for killed in [0, 1] {
            let mut ranks = world("streams").env("RAILHEAD_FABRIC_TIMEOUT_S", "86400").spawn();
            (0..2).for_each(|rank| ranks.expect(rank, "flowing"));
            ranks.ranks[killed].signal(libc::SIGKILL);
            println!("the other of rank {killed} {}", ranks.hear(1 - killed));
            assert!(!ranks.ranks[killed].wait().success());
            assert!(ranks.ranks[1 - killed].wait().success());
        }
    }
}
