//! `railhead info`: devices of our plugin and of another, what is not usable and why, and where settings come from.

use crate::fake_ibverbs;
use crate::support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The plain library where `make test` names it, else the one that cargo built for these tests.
fn library() -> PathBuf {
    std::env::var_os("RH_LIBRARY").map_or_else(support::plugin::library, PathBuf::from)
}

fn command(program: &Path, plugin: Option<&Path>, env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program);
    let names = std::env::vars().map(|(name, _)| name);
    names.filter(|name| name.starts_with("RAILHEAD_") || name.starts_with("NCCL_")).for_each(|name| {
        command.env_remove(name);
    });
    command.arg("info").envs(env.iter().copied());
    plugin.map(|plugin| command.arg("--plugin").arg(plugin));
    command
}

fn info(plugin: &Path, env: &[(&str, &str)], args: &[&str]) -> Output {
    command(env!("CARGO_BIN_EXE_railhead").as_ref(), Some(plugin), env).args(args).output().expect("railhead")
}

#[track_caller]
fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn text(output: Output) -> String {
    String::from_utf8(output.stdout).expect("text")
}

/// The entry of a list that has this name.
#[track_caller]
fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    list.as_array().expect("a list").iter().find(|it| it["name"] == name).unwrap_or_else(|| panic!("no {name} in {list:#}"))
}

/// An interface that is not lo.
fn other_interface() -> Option<String> {
    let entries = std::fs::read_dir("/sys/class/net").ok()?.flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| Path::new("/sys/class/net").join(name).is_dir() && name != "lo")
}

#[test]
fn our_devices_and_what_is_not_used() {
    let output = info(&library(), &[("NCCL_SOCKET_IFNAME", "=lo")], &["--json"]);
    assert!(output.status.success());
    let page = json(&output);
    assert_eq!((page["plugin"]["name"].as_str(), page["plugin"]["version"].as_u64()), (Some("Railhead"), Some(12)));
    assert_eq!(page["plugin"]["versions"], serde_json::json!([4, 5, 6, 7, 8, 9, 10, 11, 12]));
    let devices = page["devices"].as_array().expect("devices");
    assert_eq!(devices.len(), 1);
    assert_eq!((devices[0]["name"].as_str(), &devices[0]["memory"]), (Some("lo"), &serde_json::json!(["host"])));
    assert_eq!((devices[0]["max_recvs"].as_u64(), devices[0]["max_p2p_bytes"].as_u64()), (Some(8), Some(1 << 30)));
    assert!(devices[0]["speed_mbps"].as_u64() > Some(0));
    match other_interface() {
        Some(name) => assert_eq!(named(&page["unusable"], &name)["why"], "is not asked for by \"=lo\""),
        None => eprintln!("SKIP: this machine has no interface but lo"),
    }
    let shown = text(info(&library(), &[("NCCL_SOCKET_IFNAME", "=lo")], &[]));
    for part in [
        "Plugin Railhead: ",
        "exports v4, v5",
        "  0: lo, ",
        "host memory",
        "up to 65536 comms, 8 receives in one request; messages up to 1.0G",
    ] {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
}

#[test]
fn it_says_what_becomes_of_a_comm_whose_device_fails() {
    let shown = |names: &str, failover| text(info(&library(), &[("NCCL_SOCKET_IFNAME", names), ("RAILHEAD_FAILOVER", failover)], &[]));
    let one = shown("=lo", "1");
    assert!(one.contains("\n  When one fails: a comm ends with its only rail"), "{one}");
    let off = shown("=lo", "0");
    assert!(off.contains("\n  When one fails: a comm ends with the first of its rails") && off.contains("(RAILHEAD_FAILOVER=0)"), "{off}");
    if let Some(other) = other_interface() {
        let several = shown(&format!("=lo,{other}"), "1");
        assert!(!several.contains("\n  1: ") || several.contains("goes on without one that fails"), "{several}");
    }
    let page = json(&info(&library(), &[("NCCL_SOCKET_IFNAME", "=lo")], &["--json"]));
    assert_eq!(page["failover"], "a comm ends with its only rail: there is no second device");
}

#[test]
fn without_a_device_it_says_why_and_fails() {
    let output = info(&library(), &[("RAILHEAD_SOCKET_IFNAME", "=nosuch0")], &[]);
    assert_eq!(output.status.code(), Some(1));
    let shown = text(output);
    let says = "is \"=nosuch0\", which matches none of this machine's interfaces";
    // The plugin warns of it, and it is why no interface is used.
    assert!(shown.contains("No devices") && shown.matches(says).count() == 2, "{shown}");
    if support::netns::usable() {
        // A namespace with nothing in it but loopback, which is down.
        let mut bare = Command::new("unshare");
        bare.args(["--net", env!("CARGO_BIN_EXE_railhead"), "info", "--plugin"]).arg(library());
        let shown = text(bare.env_remove("NCCL_SOCKET_IFNAME").env_remove("RAILHEAD_SOCKET_IFNAME").output().expect("unshare"));
        assert!(shown.contains("lo is down; `ip link set dev ... up` makes it usable"), "{shown}");
        assert!(shown.contains("it warns: no usable network interface"), "{shown}");
    }
}

#[test]
fn settings_with_their_sources() {
    let env = [
        ("RAILHEAD_CMA", "0"),
        ("NCCL_IB_TC", "9"),
        ("RAILHEAD_SPLIT_MIN", "a few"),
        ("RAILHEAD_STALL_WARN_S", "0.5"),
        ("RAILHEAD_TCP_STEAMS", "4"),
        ("RAILHEAD_QUITE_ANOTHER_THING", "4"),
    ];
    let page = json(&info(&library(), &env, &["--json"]));
    let settings = &page["settings"];
    for (name, value, source, rejected) in [
        ("RAILHEAD_CMA", "0", "RAILHEAD_CMA", None),
        ("RAILHEAD_TC", "9", "NCCL_IB_TC", None),
        ("RAILHEAD_SPLIT_MIN", "65536", "RAILHEAD_SPLIT_MIN", Some("a few")),
        ("RAILHEAD_STALL_WARN_S", "0.5", "RAILHEAD_STALL_WARN_S", None),
        ("RAILHEAD_SOFT_WIRE", "auto", "default", None),
    ] {
        let it = named(settings, name);
        assert_eq!((it["value"].as_str(), it["source"].as_str(), it["rejected"].as_str()), (Some(value), Some(source), rejected), "{name}");
    }
    assert_eq!(named(&page["unknown"], "RAILHEAD_TCP_STEAMS")["nearest"], "RAILHEAD_TCP_STREAMS");
    assert_eq!(named(&page["unknown"], "RAILHEAD_QUITE_ANOTHER_THING")["nearest"], Value::Null);
    assert_eq!(page["unknown"].as_array().map(Vec::len), Some(2));

    let shown = text(info(&library(), &env, &[]));
    for part in [
        " = 0  [environment]",
        " = 9  [environment, as NCCL_IB_TC]",
        " = 65536  [default: RAILHEAD_SPLIT_MIN=a few is not accepted (128..1073741824)]",
        "RAILHEAD_TCP_STEAMS is no setting; RAILHEAD_TCP_STREAMS is meant?",
        "RAILHEAD_QUITE_ANOTHER_THING is no setting\n",
        "more at their defaults",
    ] {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
    assert!(!shown.contains("RAILHEAD_SOFT_WIRE"));
    let all = text(info(&library(), &env, &["--all"]));
    assert!(all.contains("RAILHEAD_SOFT_WIRE") && all.contains(" = auto  [default]") && !all.contains("more at"), "{all}");
}

/// What is shown of the ports of a libibverbs of such a version, whose devices are as the numbers say.
fn fake_ports(abi: u32, numbers: &str, env: &[(&str, &str)]) -> (Value, String) {
    let path = fake_ibverbs::folder(abi);
    let own = [("LD_LIBRARY_PATH", path.to_str().expect("text")), ("FAKE_IBV", numbers)];
    let env: Vec<(&str, &str)> = own.iter().chain(env).copied().collect();
    let page = json(&info(&library(), &env, &["--json"]));
    (page["rdma"]["ports"].clone(), text(info(&library(), &env, &[])))
}

#[test]
fn each_port_is_shown_with_what_came_of_each_wish() {
    let (ports, shown) = fake_ports(16, "port_speed=8000,ece=7", &[("NCCL_IB_HCA", "=fake0:1:3:4,fake1")]);
    let (first, second) = (named(&ports, "fake0:1"), named(&ports, "fake1:1"));
    let link = serde_json::json!({
        "state": "active", "layer": "Ethernet", "speed_mbps": 800_000, "speed_from": "the driver's word", "mtu": 4096, "lid": null,
    });
    assert_eq!(first["link"], link);
    assert_eq!([&first["used"]["rail"], &first["used"]["plane"]], [3, 4]);
    assert_eq!([&second["used"]["rail"], &second["used"]["plane"]], [&Value::Null, &Value::Null]);
    for (what, came) in [
        ("relaxed_ordering", "yes: the driver takes it"),
        ("ece", "yes: options 0x7 are offered to each peer"),
        ("dma_buf", "yes: the driver takes them"),
    ] {
        assert_eq!(first["used"][what], came, "{what}");
    }
    if !Path::new("/sys/module/nvidia_peermem").exists() && !Path::new("/sys/kernel/mm/memory_peers").exists() {
        assert_eq!(first["used"]["peer_memory"], "no: nvidia_peermem is not loaded");
    }
    for part in [
        "     active, Ethernet, 800000 Mbit/s (the driver's word), MTU 4096\n",
        "     rail 3, plane 4 (NCCL_IB_HCA)\n",
        "     rail not said, plane not said (NCCL_IB_HCA)\n",
        "     relaxed ordering: yes: ",
        "     enhancements (ECE): yes: options 0x7 ",
        "     DMA-BUF: yes: ",
        "     peer memory: ",
    ] {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
}

#[test]
fn what_libibverbs_or_a_driver_lacks_is_told_apart_from_what_is_switched_off() {
    let wishes = ["relaxed_ordering", "ece", "dma_buf"];
    let came = |abi: u32, numbers: &str, env: &[(&str, &str)]| {
        let (ports, shown) = fake_ports(abi, numbers, env);
        let port = named(&ports, "fake0:1");
        (wishes.map(|what| port["used"][what].as_str().unwrap_or_default().to_string()), port["link"].clone(), shown)
    };
    let (without, link, shown) = came(1, "ece=7", &[]);
    assert_eq!(
        without,
        [
            "no: libibverbs has no ibv_reg_mr_iova2 (rdma-core 28 has)",
            "no: libibverbs has no ibv_query_ece (rdma-core 31 has)",
            "no: libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 has)",
        ]
    );
    assert_eq!([&link["speed_mbps"], &link["speed_from"]], [&Value::from(100_000), &Value::from("the port's codes")]);
    assert!(shown.contains("DMA-BUF: no: libibverbs has no ibv_reg_dmabuf_mr"), "{shown}");
    let (refused, link, _) = came(16, "relaxed_errno=22,dma_buf_errno=95,active_speed=0", &[]);
    assert!(refused[0].starts_with("no: the driver refuses it: Invalid argument"), "{refused:?}");
    assert_eq!(refused[1], "no: the driver has no enhancements");
    assert!(refused[2].starts_with("no: the driver refuses them: Operation not supported"), "{refused:?}");
    assert_eq!(
        [&link["speed_mbps"], &link["speed_from"]],
        [&Value::from(10_000), &Value::from("a default: the port's codes mean nothing here")]
    );
    let (off, ..) = came(16, "ece=7", &[("NCCL_IB_PCI_RELAXED_ORDERING", "0"), ("NCCL_IB_ECE_ENABLE", "0")]);
    assert_eq!(off[..2], ["off: NCCL_IB_PCI_RELAXED_ORDERING is 0", "off: NCCL_IB_ECE_ENABLE is 0"]);
}

#[test]
fn a_port_that_is_not_used_shows_its_state_all_the_same() {
    let (ports, shown) = fake_ports(16, "port_state=1,link_layer=1", &[]);
    let port = named(&ports, "fake1:1");
    assert!(port["unused"].as_str().is_some_and(|why| why.starts_with("is not active (down)")), "{port}");
    assert_eq!([&port["link"]["state"], &port["link"]["layer"]], ["down", "InfiniBand"]);
    assert_eq!((&port["link"]["lid"], &port["used"]), (&Value::from(0x101), &Value::Null));
    assert!(shown.contains("     down, InfiniBand, 100000 Mbit/s (the port's codes), MTU 4096, LID 257\n"), "{shown}");
}

/// A plugin that is not ours, of an older version.
fn another() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/c/fake_net.c");
    let plugin = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libnccl-net-fake-{}.so", std::process::id()));
    let built = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-DFAKE_ABI=9", "-o"]).arg(&plugin).arg(source).status();
    assert!(built.unwrap_or_else(|e| panic!("cc: {e} (make deps-test)")).success());
    plugin
}

#[test]
fn any_plugin_can_be_asked() {
    let plugin = another();
    let output = info(&plugin, &[("RAILHEAD_CMA", "0")], &["--json"]);
    assert!(output.status.success());
    let page = json(&output);
    assert_eq!((page["plugin"]["version"].as_u64(), &page["plugin"]["versions"]), (Some(9), &serde_json::json!([9])));
    assert_ne!(page["plugin"]["name"], "Railhead");
    assert!(page["devices"].as_array().is_some_and(|devices| !devices.is_empty()));
    // Our settings and rules are not its.
    assert_eq!((page["settings"].as_array().map(Vec::len), page["unusable"].as_array().map(Vec::len)), (Some(0), Some(0)));

    let output = info(&plugin, &[("FAKE_FAULT", "noinit")], &[]);
    assert_eq!(output.status.code(), Some(1));
    let shown = text(output);
    assert!(shown.contains("it fails: init returned 2 (ncclSystemError)") && shown.contains("No devices"), "{shown}");
    let output = info(&plugin, &[("FAKE_FAULT", "nodev")], &[]);
    assert_eq!(output.status.code(), Some(1));
    std::fs::remove_file(plugin).expect("remove");
}

#[test]
fn what_is_no_plugin_is_named() {
    // Tests run in the package's folder, so the last of these is there.
    for (file, why) in [
        ("/nowhere/lib.so", "cannot load /nowhere/lib.so"),
        ("libc.so.6", "exports no ncclNetPlugin_v4 to v12"),
        ("/dev/null", "cannot load /dev/null: it is no shared library (it has fewer than four bytes)"),
        ("/usr", "cannot load /usr: it is a directory"),
        ("Cargo.toml", "/Cargo.toml: it is no shared library (it does not begin with \"\\x7fELF\")"),
    ] {
        let output = info(file.as_ref(), &[], &[]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn our_library_is_found_where_it_is_installed() {
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("prefix-{}", std::process::id()));
    for (dir, program) in [("lib", prefix.join("bin/railhead")), ("bin", prefix.join("bin/railhead"))] {
        let _ = std::fs::remove_dir_all(&prefix);
        std::fs::create_dir_all(prefix.join("bin")).expect("bin");
        std::fs::create_dir_all(prefix.join("lib")).expect("lib");
        std::fs::copy(env!("CARGO_BIN_EXE_railhead"), &program).expect("copy");
        std::fs::copy(library(), prefix.join(dir).join("librailhead.so")).expect("copy");
        let output = command(&program, None, &[("NCCL_SOCKET_IFNAME", "=lo")]).arg("--json").output().expect("railhead");
        let page = json(&output);
        let file = page["plugin"]["file"].as_str().expect("a file");
        assert!(file.starts_with(&*prefix.to_string_lossy()) && page["devices"].as_array().is_some_and(|d| d.len() == 1), "{page:#}");
    }
    std::fs::remove_dir_all(&prefix).expect("remove");
}
