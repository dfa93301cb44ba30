//! The program on real queue pairs.

use serde_json::Value;

use crate::MACHINE;
use crate::machine::Ran;

/// What a line of the script wrote as `name {...}`.
#[track_caller]
fn json(ran: &Ran, name: &str) -> Value {
    let line = ran.output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    serde_json::from_str(line.unwrap_or_else(|| panic!("no line {name}"))).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Every entry of every port's table is shown, one of them as chosen, each with a reason; and so it is when the rules are others, or the table is.
#[test]
fn info_explains_the_chosen_gid_and_every_other() {
    let line = r#"
        show() { name=$1; shift; echo "$name $(env "$@" ./railhead info --plugin ./librailhead.so --json | tr -d '\n')"; }
        count() { cat /sys/class/infiniband/$1/ports/1/gids/* | grep -vc '^0000:0000:0000:0000:0000:0000:0000:0000$'; }
        show plain A=1
        show six NCCL_IB_ADDR_FAMILY=AF_INET6
        show range NCCL_IB_ADDR_RANGE=10.9.0.0/16
        show index NCCL_IB_GID_INDEX=2
        echo "entries {\"rxe0\": $(count rxe0), \"rxe1\": $(count rxe1)}"
        ./railhead info --plugin ./librailhead.so
        ip addr add 10.9.0.1/16 dev v0
        while ! grep -qs 0a09:0001 /sys/class/infiniband/rxe0/ports/1/gids/*; do sleep 0.05; done
        show changed NCCL_IB_ADDR_RANGE=10.9.0.0/16"#;
    let Some(ran) = MACHINE.run(1, 300, line) else { return };
    let entries = json(&ran, "entries");
    let ports = |page: &Value| page["rdma"]["ports"].as_array().expect("ports").clone();
    let chosen = |port: &Value| -> Vec<String> {
        let gids = port["gids"].as_array().expect("gids").iter();
        gids.filter(|gid| gid["chosen"] == true).map(|gid| gid["gid"].as_str().expect("text").to_string()).collect()
    };
    let choices = |name: &str| -> Vec<Vec<String>> { ports(&json(&ran, name)).iter().map(chosen).collect() };
    for port in ports(&json(&ran, "plain")) {
        // The veth takes 4200 bytes, which hold 4096 and the headers; the device has neither of the others.
        assert_eq!([&port["link"]["state"], &port["link"]["layer"]], ["active", "Ethernet"]);
        assert_eq!(port["link"]["mtu"], 4096);
        assert!(port["used"]["dma_buf"].as_str().is_some_and(|why| why.starts_with("no: the driver refuses them: ")), "{port}");
        assert_eq!(port["used"]["ece"], "no: the driver has no enhancements");
        assert_eq!(port["used"]["peer_memory"], "no: nvidia_peermem is not loaded");
        let name = port["name"].as_str().expect("a name").split(':').next().expect("a device").to_string();
        let gids = port["gids"].as_array().expect("gids").clone();
        assert_eq!(gids.len() as u64, entries[&name].as_u64().expect("a count"), "{name}");
        assert!(gids.len() >= 3, "{name} has no link-local, IPv4 and IPv6 address");
        for gid in &gids {
            let why = gid["why"].as_str().expect("a reason");
            assert!(!why.is_empty(), "{gid}");
            if gid["gid"].as_str().expect("text").starts_with("fe80") {
                assert!(why.contains("link-local"), "{why}");
            }
        }
    }
    assert_eq!(choices("plain"), [["::ffff:10.8.0.1"], ["::ffff:10.8.0.2"]]);
    assert_eq!(choices("six"), [["fd08::1"], ["fd08::2"]]);
    assert_eq!(choices("index"), [["fd08::1"], ["fd08::2"]]);
    // No address lies in the range, and the ports are not used; then one of them has one.
    for port in ports(&json(&ran, "range")) {
        assert_eq!(port["unused"], "has no GID within NCCL_IB_ADDR_RANGE=10.9.0.0/16");
        assert!(chosen(&port).is_empty());
        let gids = port["gids"].as_array().expect("gids").iter();
        assert_eq!(gids.filter(|gid| gid["why"] == "not taken: outside of NCCL_IB_ADDR_RANGE").count(), 2);
    }
    assert_eq!(choices("changed"), [vec!["::ffff:10.9.0.1".to_string()], vec![]]);
    // And for people.
    ran.says("::ffff:10.8.0.1").says("link-local").says("MTU 4096").says("     DMA-BUF: no: the driver refuses them: ");
}

/// The rules of NCCL's interface, over RDMA devices. Versions differ above the fabric, where a device makes no difference.
#[test]
fn check_passes_every_rule() {
    let line = "RAILHEAD_FABRIC=verbs ./railhead check --plugin ./librailhead.so --abi 12 --timeout 60";
    let Some(ran) = MACHINE.run(1, 600, line) else { return };
    ran.passes();
}

/// `railhead perf` and perftest on the same device, once shortly, or in RHT_TURNS turns, with long messages, too. Which of them is faster is for people to read: an emulated machine's times
/// are nobody's promise.
#[test]
fn perf_beside_perftest() {
    let line = r#"
        theirs() { # PROGRAM COLUMN OPTIONS...
            program=$1 column=$2; shift 2
            # Port 18515, state LISTEN.
            $program -d rxe0 -x 1 -F "$@" >/tmp/server 2>&1 & server=$!
            while ! grep -q ':4853 [0:]* 0A' /proc/net/tcp; do sleep 0.05; done
            $program -d rxe0 -x 1 -F "$@" 10.8.0.1 >/tmp/client 2>&1 || { cat /tmp/server /tmp/client; exit 1; }
            wait $server || { cat /tmp/server; exit 1; }
            awk -v c=$column '$1 ~ /^[0-9]+$/ { figure = $c } END { print figure }' /tmp/client
        }
        ours() { RAILHEAD_FABRIC=verbs NCCL_IB_HCA==rxe0 ./railhead perf --plugin ./librailhead.so --limits none --recv-size 0 --rounds $ROUNDS --round-ms 200 --json "$@" | tr -d '\n'; }
        for turn in $(seq $TURNS); do
            echo "theirs$turn [$(theirs ib_write_lat 5 -s 8 -n 100),
                $(theirs ib_write_bw 4 -s 65536 -n 200 -t 8 --report_gbits)
                $([ $TURNS = 1 ] || theirs ib_write_bw 4 -s 1048576 -n 20 -t 8 --report_gbits | sed 's/^/,/')]" | tr -d '\n'
            echo
            echo "ours$turn $(ours --sizes $SIZES)"
        done"#;
    let turns: u32 = std::env::var("RHT_TURNS").map_or(1, |text| text.parse().expect("RHT_TURNS: a number"));
    let Some(ran) = MACHINE.run(
        1,
        200 + 40 * turns,
        &format!("TURNS={turns}; {}; {line}", if turns > 1 { "ROUNDS=5; SIZES=8,64K,1M" } else { "ROUNDS=1; SIZES=8,64K" }),
    ) else {
        return;
    };
    ran.passes();
    let figure = |turn: u32, what: &str, size: u64| {
        let page = json(&ran, &format!("ours{turn}"));
        let row = page["rows"].as_array().expect("rows").iter().find(|row| row["kind"] == what && row["size"] == size).cloned();
        let row = row.unwrap_or_else(|| panic!("no {what} of {size} bytes"));
        row["plugins"][0]["figure"]["median"].as_f64().expect("a figure")
    };
    let figures = [("latency", 8), ("bandwidth", 65536), ("bandwidth", 1 << 20)];
    for (i, (what, size)) in figures.into_iter().take(if turns > 1 { 3 } else { 2 }).enumerate() {
        let mut ratios: Vec<f64> = (1..=turns)
            .filter_map(|turn| {
                let theirs = json(&ran, &format!("theirs{turn}"))[i].as_f64().expect("a figure");
                // perftest says Gbit/s, to a hundredth: of a machine that stood still meanwhile, 0.
                let theirs = if what == "latency" { theirs } else { theirs / 8.0 };
                (theirs > 0.0).then(|| figure(turn, what, size) / theirs)
            })
            .collect();
        assert!(!ratios.is_empty(), "perftest has measured nothing of {what}");
        ratios.sort_by(f64::total_cmp);
        let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
        println!("{what} of {size} bytes, of perftest's: {:.2} ({least:.2}..{most:.2})", ratios[ratios.len() / 2]);
    }
}
