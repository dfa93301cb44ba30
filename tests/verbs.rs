//! The verbs provider on a libibverbs that is only memory (`tests/c/fake_ibverbs.c`): what it asks of a device, and what it makes of a
//! device's answers that no healthy one gives. Real queue pairs are in `cli/tests/softroce.rs`.
//!
//! Each test runs one of `inside` in a process of its own.

#[path = "conformance/bed.rs"]
#[allow(dead_code)]
mod bed;
#[path = "support/fake_ibverbs.rs"]
mod fake_ibverbs;
#[path = "verbs/mesh.rs"]
mod mesh;
#[path = "support/pause.rs"]
mod support;
#[path = "verbs/tensor.rs"]
mod tensor;

use fake_ibverbs::{Fake, NEWEST, Ran};

/// Runs a test inside with the newest library.
#[track_caller]
fn inside(name: &str) -> Ran {
    Fake::new(NEWEST).run(name)
}

// ---- the library and its devices ----

#[test]
fn a_library_that_is_too_old_is_no_error_and_no_device() {
    Fake::new(0).run("no_devices").says("libibverbs.so.1 is too old: it has no ibv_query_qp@IBVERBS_1.1");
}

#[test]
fn nothing_is_asked_before_the_library_knows_of_forks() {
    inside("forks_first").does_not_say("ibv_fork_init");
    Fake::new(NEWEST).env("FAKE_IBV", "fork_errno=38").run("forks_first").says("ibv_fork_init: Function not implemented");
}

#[test]
fn a_machine_without_a_usable_port_says_why() {
    let run = |numbers: &str| Fake::new(NEWEST).env("FAKE_IBV", numbers).run("no_devices");
    run("devices=0").says("no RDMA NICs: libibverbs lists none");
    run("port_state=1").says("RDMA port fake0:1 is not active (down): no cable, or its link is down");
}

#[test]
fn a_library_without_the_newer_functions_does_without() {
    for (abi, relaxed, dma_buf, ece) in [(1, 0, 0, 0), (8, 1, 0, 0), (10, 1, 0, 1), (12, 1, 1, 1), (16, 1, 1, 1)] {
        let has = format!("{relaxed}{dma_buf}{ece}");
        Fake::new(abi).env("RHT_HAS", &has).env("RHT_SPEED", if abi < 16 { "100000" } else { "800000" }).run("what_a_library_has");
    }
}

#[test]
fn the_speed_is_the_drivers_own_word_where_it_has_one() {
    inside("speeds");
}

#[test]
fn functions_of_a_card_count_as_its_ports_and_virtual_ones_too() {
    let sysfs = tempfile::tempdir().expect("a folder");
    for (device, function) in [(0, "0000:3b:00.0"), (1, "0000:3b:00.1"), (2, "0000:3b:02.5"), (3, "0000:5e:00.0")] {
        let pci = sysfs.path().join("devices/pci0000:3a").join(function);
        let types = sysfs.path().join(format!("fake{device}/ports/1/gid_attrs/types"));
        std::fs::create_dir_all(&pci).expect("a folder");
        std::fs::create_dir_all(&types).expect("a folder");
        std::os::unix::fs::symlink(&pci, sysfs.path().join(format!("fake{device}/device"))).expect("a link");
        // The IPv4 address is of the older kind: the IPv6 one of the wanted kind is better.
        std::fs::write(types.join("1"), "IB/RoCE v1\n").expect("a file");
        std::fs::write(types.join("2"), "RoCE v2\n").expect("a file");
    }
    let root = sysfs.path().canonicalize().expect("a path");
    let run = |merge: &str| {
        let fake = Fake::new(NEWEST).env("FAKE_IBV", "devices=4").env("FAKE_IBV_SYSFS", root.to_str().expect("text"));
        let ran = fake.env("NCCL_IB_MERGE_VFS", merge).run("lists");
        let lines: Vec<String> = ran.output.lines().filter_map(|line| line.strip_prefix("device ")).map(str::to_owned).collect();
        lines
    };
    let at = |device: u32, path: &str, port: u32| format!("fake{device} {}/devices/pci0000:3a/{path} port {port} gid 2", root.display());
    let (card, other) = ("0000:3b:00.0", "0000:5e:00.0");
    assert_eq!(run("1"), [at(0, card, 1), at(1, card, 2), at(2, card, 3), at(3, other, 1)]);
    assert_eq!(run("0"), [at(0, card, 1), at(1, card, 2), at(2, "0000:3b:02.0", 1), at(3, other, 1)]);
}

#[test]
fn nics_stay_apart_if_they_are_not_to_be_merged() {
    let named = || Fake::new(NEWEST).env("NCCL_NET_FORCE_MERGE", "fake0,fake1");
    named().run("nics_merge").says("device 2: fake0+fake1 made of [0, 1]");
    named().env("NCCL_IB_MERGE_NICS", "1").run("nics_merge");
    named().env("NCCL_IB_MERGE_NICS", "0").run("nics_do_not_merge");
    named().env("RAILHEAD_IB_MERGE_NICS", "0").run("nics_do_not_merge");
}

// ---- queue pairs ----

#[test]
fn the_settings_are_in_the_attributes() {
    inside("attributes_on_ethernet");
    Fake::new(NEWEST).env("FAKE_IBV", "link_layer=1,mtu_1=3").run("attributes_on_infiniband");
}

#[test]
fn infiniband_beyond_the_subnet_goes_by_a_router() {
    let run = |numbers, want| {
        let numbers = format!("link_layer=1,{numbers}");
        Fake::new(NEWEST).env("FAKE_IBV", &numbers).env("RHT_WANT", want).run("paths_on_infiniband")
    };
    // Of each end: the LID, whether there is a global header, and the index of the own GID, for the router of the other's subnet.
    run("flid=0x200,subnets=1", "[[512, 1, 1], [513, 1, 1]]").does_not_say("FLID: its LID");
    // The ends are in one subnet, which has a router too.
    run("flid=0x200", "[[256, 0, 0], [257, 0, 0]]");
    // A switch that wants the header within the subnet too.
    run("flid=0x200,port_flags=1", "[[256, 1, 1], [257, 1, 1]]");
    run("subnets=1", "[[256, 1, 0], [257, 1, 0]]").says("is in another subnet and its GID has no FLID");
}

#[test]
fn rails_and_planes_are_told() {
    let run = |hcas: &str| Fake::new(NEWEST).env("NCCL_IB_HCA", hcas).run("rails_and_planes");
    run("=fake0:1:3:4,fake1").says("fake0 rail 3 plane 4").says("fake1 rail -1 plane -1");
    run("=fake0:1:3:x").says("NCCL_IB_HCA==fake0:1:3:x: in \"fake0:1:3:x\"").says("fake0 rail 3 plane -1").does_not_say("fake1 rail");
}

#[test]
fn a_neighbour_that_is_slow_to_answer_is_asked_again() {
    inside("modify_times_out").says("the peer's address does not answer");
}

#[test]
fn what_a_device_will_not_take_inline_passes_through_memory() {
    for (numbers, inlined) in [("devices=2", "1"), ("inline_refused=1", "0"), ("max_inline=32", "0")] {
        Fake::new(NEWEST).env("FAKE_IBV", numbers).env("RHT_INLINED", inlined).run("inline_or_not");
    }
}

#[test]
fn completion_queues_have_room_for_all_their_queue_pairs() {
    inside("queues_grow");
}

#[test]
fn requests_are_reported_once_in_half_a_lap_at_least() {
    inside("signals");
}

#[test]
fn every_notification_is_acknowledged() {
    inside("acknowledges");
}

#[test]
fn enhancements_are_agreed_on_by_both_devices() {
    Fake::new(NEWEST).env("FAKE_IBV", "ece=0x7,ece_mask_1=0x5").run("enhancements");
    Fake::new(NEWEST).env("FAKE_IBV", "ece=0x7,ece_mask_1=0x5").run("enhancements_across_comms");
}

#[test]
fn enhancements_are_left_alone_where_one_side_has_none() {
    // None at all, as Soft-RoCE; one side without; not wanted; a driver that refuses the peer's.
    for (numbers, wanted) in [("ece=0", "1"), ("ece=7,ece_mask_1=0", "1"), ("ece=7", "0"), ("ece=7,ece_set_errno=95", "1")] {
        Fake::new(NEWEST).env("FAKE_IBV", numbers).env("NCCL_IB_ECE_ENABLE", wanted).run("no_enhancements");
    }
    Fake::new(8).env("FAKE_IBV", "ece=7").run("no_enhancements");
}

// ---- memory ----

#[test]
fn order_is_relaxed_for_messages_and_never_for_flags() {
    for (setting, relaxed) in [("0", "0"), ("1", "1"), ("2", "1")] {
        Fake::new(NEWEST).env("NCCL_IB_PCI_RELAXED_ORDERING", setting).env("RHT_RELAXED", relaxed).run("relaxed_ordering");
    }
    Fake::new(NEWEST).env("FAKE_IBV", "relaxed_errno=22").env("RHT_RELAXED", "0").run("relaxed_ordering");
}

#[test]
fn memory_that_cannot_be_registered_is_an_error_that_can_be_mended() {
    inside("registrations_fail")
        .says("RLIMIT_MEMLOCK is 65536 bytes: raise it with `ulimit -l unlimited`")
        .says("a GPU's needs nvidia_peermem or DMA-BUF")
        .says("(the NIC's driver, or the GPU's, cannot)")
        .says("descriptor closed, or not a DMA-BUF");
}

#[test]
fn what_gpu_memory_can_be_registered_is_told_and_what_is_lacking_is_named() {
    let run = |abi: u32, numbers: &str, takes: &str| Fake::new(abi).env("FAKE_IBV", numbers).env("RHT_DMA_BUF", takes).run("gpu_memory");
    run(NEWEST, "devices=1", "1");
    run(NEWEST, "dma_buf_errno=95", "0");
    run(10, "devices=1", "0");
}

#[test]
fn a_dma_buf_is_registered_once_on_each_device_of_a_virtual_one() {
    Fake::new(NEWEST).env("NCCL_NET_FORCE_MERGE", "fake0,fake1").run("dma_buf_on_two_devices");
}

#[test]
fn memory_that_two_comms_use_is_registered_once() {
    inside("shared_registration");
}

#[test]
fn parts_of_what_is_registered_have_regions_of_their_own() {
    inside("registration_of_a_part");
}

#[test]
fn a_receive_under_a_handle_that_was_given_back_fails_its_comm() {
    inside("deregistered_under_a_receive").says("is not registered; deregistered before");
}

#[test]
fn a_flush_reads_on_every_device_behind_what_was_received() {
    for queue_pairs in ["1", "5"] {
        Fake::new(NEWEST).env("NCCL_NET_FORCE_MERGE", "fake0,fake1").env("NCCL_IB_QPS_PER_CONNECTION", queue_pairs).run("flushes");
    }
}

// ---- what goes wrong ----

#[test]
fn a_failed_completion_is_told_with_both_ends_and_a_hint() {
    inside("failed_completion")
        .says("IBV_WC_RETRY_EXC_ERR (12), vendor_err 0x81: no acknowledgement came within NCCL_IB_TIMEOUT")
        .says("fake0:1 gid ::ffff:10.77.0.1 qp ")
        .says(" -> gid ::ffff:10.77.0.1 lid 0 qp ");
}

#[test]
fn statuses_and_opcodes_of_newer_drivers_are_only_numbers() {
    inside("unknown_completion").says("a status newer than this library (77), vendor_err 0xbeef");
}

#[test]
fn fatal_events_end_what_they_concern_and_nothing_else() {
    let told = "IBV_EVENT_QP_FATAL";
    Fake::new(NEWEST).run("fatal_events").says(told).says("event 0: a completion queue overflowed or failed").says("the device failed");
    Fake::new(NEWEST).env("NCCL_IB_RETURN_ASYNC_EVENTS", "0").run("fatal_events_are_only_told").says("fake0: event");
    inside("a_comm_whose_device_fails").says("the device failed (IBV_EVENT_DEVICE_FATAL)");
}

#[test]
fn an_address_that_is_removed_is_told_and_ends_nothing_by_itself() {
    inside("addresses_change")
        .says("fake0:1: its address (GID) ::ffff:10.77.0.1 was removed from index 1")
        .does_not_say("fake1:1: its address");
}

#[test]
fn a_device_that_takes_less_than_it_promised_is_an_error() {
    inside("chain_not_taken");
}

#[test]
fn a_queue_that_cannot_be_polled_is_an_error() {
    inside("cannot_be_polled").says("polling a completion queue failed (-5)");
}

#[test]
fn a_device_that_never_completes_is_given_up() {
    inside("deaf").says("2 requests without completion for 1 s (RAILHEAD_FABRIC_TIMEOUT_S)");
}

#[test]
fn slow_traffic_is_not_taken_for_lost_work() {
    for warn in ["0", "10"] {
        let patient = Fake::new(NEWEST).env("RAILHEAD_STALL_WARN_S", warn).env("RAILHEAD_FABRIC_TIMEOUT_S", "1");
        patient.run("slow_traffic").does_not_say("without completion");
    }
}

#[test]
fn an_announcement_that_never_arrives_is_given_up() {
    let deaf = Fake::new(NEWEST).env("RAILHEAD_STALL_WARN_S", "0").env("RAILHEAD_FABRIC_TIMEOUT_S", "1");
    let ran = deaf.run("lost_announcement");
    ran.says("2 requests without completion for 1 s (RAILHEAD_FABRIC_TIMEOUT_S)");
    let warnings: Vec<&str> = ran.output.lines().filter(|line| line.contains(" WARN ")).collect();
    // One, with both ends, as the fabric and as the system name them.
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for part in [" on fake0 from ", " pid ", "fake0:1 gid ::ffff:10.77.0.1 qp ", "-> gid ::ffff:10.77.0.1", "NCCL_IB_TIMEOUT"] {
        assert!(warnings[0].contains(part), "no {part} in {}", warnings[0]);
    }
}

#[test]
fn a_flush_whose_queue_pair_failed_is_an_error() {
    let patient = Fake::new(NEWEST).env("RAILHEAD_FABRIC_TIMEOUT_S", "86400");
    patient.run("failed_flush").says("the READ of a flush").says("failed flush: ");
}

#[test]
fn a_peer_that_is_slow_to_connect_is_not_taken_for_lost() {
    let patient = Fake::new(NEWEST).env("RAILHEAD_STALL_WARN_S", "1").env("RAILHEAD_FABRIC_TIMEOUT_S", "1");
    patient.run("late_peer").says("stalled: receive 0 ").does_not_say("without completion");
}

#[test]
fn what_arrived_before_a_queue_pair_failed_is_received() {
    inside("last_words");
}

// ---- messages ----

#[test]
fn a_message_takes_one_queue_pair_or_all() {
    for (setting, used) in [("0", "1"), ("1", "4")] {
        let fake = Fake::new(NEWEST).env("NCCL_IB_QPS_PER_CONNECTION", "4").env("NCCL_IB_SPLIT_DATA_ON_QPS", setting);
        fake.env("RAILHEAD_SPLIT_MIN", "4096").env("RHT_USED", used).run("queue_pairs_of_a_message");
    }
}

/// What the tests above run.
mod inside {
    use std::collections::BTreeSet;
    use std::os::fd::AsRawFd;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    use libc::{EFAULT, EINVAL, ENOMEM, EOPNOTSUPP, ETIMEDOUT};
    use railhead::base::config::{Config, Fabric};
    use railhead::base::error::Error;
    use railhead::base::log::{self, Level};
    use railhead::base::mem::{Pages, UserMemory};
    use railhead::base::stats::RailStats;
    use railhead::fabric::{Access, Device, Opcode, PostError, QpCaps, QpState, SendWr, WcOpcode, WcStatus, devices};
    use railhead::net::{MemoryKind, Mode, MrHandle, Net, PTR_CUDA, PTR_DMABUF, PTR_HOST, RecvBuffer, RecvComm, RequestId, SendComm};

    use super::bed::{Bed, Pair, Request, Side, Wire, pause};
    use super::fake_ibverbs::{Control, value};

    static BED: Bed = Bed { name: "fake", wire: Wire::Nic, configure: |config| *config = settings(), simulated: None };

    const RELAXED: i64 = 1 << 20;
    /// Of `enum ibv_event_type` (rdma-core v55 libibverbs/verbs.h).
    const CQ_ERR: u32 = 0;
    const QP_FATAL: u32 = 1;
    const DEVICE_FATAL: u32 = 8;
    const GID_CHANGE: u32 = 18;

    fn settings() -> Config {
        log::set_stderr(Level::Info);
        Config { fabric: Fabric::Verbs, ..Config::from_env() }
    }

    fn all_devices() -> Vec<Device> {
        devices(&Arc::new(settings())).expect("devices")
    }

    fn from_env(name: &str) -> String {
        std::env::var(name).expect(name)
    }

    /// Waits for what a thread of the library does.
    #[track_caller]
    fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(60), "waited too long for {what}");
            pause(start);
        }
    }

    /// Two ends on two devices; a is the one whose endpoint travels first, as a comm's sender is.
    fn across(a: &Device, b: &Device, caps: QpCaps) -> Pair {
        let mut pair = Pair { a: Side::new("a", a, caps, false), b: Side::new("b", b, caps, false) };
        let first = pair.a.cq.qp(pair.a.qp).endpoint();
        pair.b.cq.qp(pair.b.qp).connect(&first).expect("connect b");
        let second = pair.b.cq.qp(pair.b.qp).endpoint();
        pair.a.cq.qp(pair.a.qp).connect(&second).expect("connect a");
        pair
    }

    /// A comm to itself.
    fn comms(net: &Arc<Net>, dev: usize) -> (SendComm, RecvComm) {
        let (mut listen, mut handle) = net.listen(dev).expect("listen");
        let (mut send, mut recv) = (None, None);
        until("both comms", || {
            if send.is_none() {
                send = net.connect(dev, None, &mut handle, Mode::NonBlocking).expect("connect");
            }
            if recv.is_none() {
                recv = listen.accept(Mode::NonBlocking).expect("accept");
            }
            send.is_some() && recv.is_some()
        });
        (send.expect("send"), recv.expect("recv"))
    }

    fn memory(pages: &Pages) -> UserMemory {
        // SAFETY: every caller deregisters before the pages go.
        unsafe { UserMemory::new(pages.addr() as *mut u8, pages.len()) }
    }

    fn register(net: &Net, dev: usize, pages: &Pages) -> MrHandle {
        net.register(dev, memory(pages), MemoryKind::Host).expect("register")
    }

    /// What becomes of a request: done, or an error.
    fn outcome(recv: &mut RecvComm, request: RequestId) -> Result<(), String> {
        let mut outcome = None;
        until("the outcome", || {
            outcome = recv.test(request).map(|done| done.map(|_| ())).map_err(|e| e.to_string()).transpose();
            outcome.is_some()
        });
        outcome.expect("until has seen it")
    }

    /// The first `len` bytes of `from` to `to`.
    /// The request that a call gives in the end.
    fn asked(what: &str, mut call: impl FnMut() -> Option<RequestId>) -> RequestId {
        let mut request = None;
        until(what, || {
            request = call();
            request.is_some()
        });
        request.expect("it is there")
    }

    fn message(send: &mut SendComm, recv: &mut RecvComm, from: (&Pages, MrHandle), to: (&Pages, MrHandle), len: usize) {
        let buffer = RecvBuffer { addr: to.0.addr(), len, tag: 1, mr: to.1 };
        let (r, mut s) = (recv.irecv(&[buffer]).expect("irecv").expect("room"), None);
        until("the send", || {
            s = send.isend(from.0.addr(), len, 1, from.1).expect("isend");
            s.is_some()
        });
        until("a message", || send.test(s.expect("posted")).expect("test").is_some());
        until("a message", || recv.test(r).expect("test").is_some());
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn no_devices() {
        assert!(all_devices().is_empty());
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn nics_merge() {
        let net = Net::with_config(settings()).expect("net");
        assert_eq!(net.make_virtual(&[0, 1]).expect("makeVDevice"), 2);
        assert_eq!(net.properties(2).expect("properties").vdevs, [0, 1]);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn nics_do_not_merge() {
        let net = Net::with_config(settings()).expect("net");
        // NCCL's makeVDevice says ncclInvalidUsage, whatever NCCL_NET_FORCE_MERGE names.
        let refused = net.make_virtual(&[0, 1]).expect_err("two NICs");
        assert!(matches!(refused, Error::Usage(_)), "{refused:?}");
        let variable = if std::env::var_os("NCCL_IB_MERGE_NICS").is_some() { "NCCL_IB_MERGE_NICS" } else { "RAILHEAD_IB_MERGE_NICS" };
        assert_eq!(
            refused.to_string(),
            format!("makeVDevice: {variable}=0 keeps fake0,fake1 apart; unset it, or set it to 1, to have NICs merged")
        );
        assert_eq!(net.device_count(), 2);
        let alone = net.make_virtual(&[1]).expect("one NIC");
        assert_eq!(net.properties(alone).expect("properties").vdevs, [1]);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn forks_first() {
        let control = Control::new();
        assert_eq!((all_devices().len(), all_devices().len()), (2, 2));
        assert_eq!(control.log()[..2], ["fork_init", "get_device_list"]);
        assert_eq!(control.calls("fork_init").len(), 1, "once per process");
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn what_a_library_has() {
        let control = Control::new();
        control.set("ece", 1).set("port_speed", 8000);
        let device = BED.device();
        let has = |n: usize| from_env("RHT_HAS").as_bytes()[n] == b'1';
        assert_eq!(device.info().speed_mbps.to_string(), from_env("RHT_SPEED"));
        assert_eq!(device.info().dma_buf, has(1));
        let mut pair = across(&device, &device, QpCaps::default());
        pair.ping();
        let _memory = pair.a.memory(4096, Access::LOCAL_WRITE | Access::RELAXED_ORDERING);
        assert_eq!(!control.calls("reg_mr_iova2").is_empty(), has(0));
        assert_eq!(!control.calls("set_ece").is_empty(), has(2));
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn speeds() {
        let control = Control::new();
        let speed = |width: i64, lane: i64, told: i64, ask: bool| {
            control.set("active_width", width).set("active_speed", lane).set("port_speed", told);
            let config = Config { ib_query_speed: ask, ..settings() };
            devices(&Arc::new(config)).expect("devices")[0].info().speed_mbps
        };
        // 4 lanes of 100 Gbit/s; 8 of 200, for which there is no code; a driver that does not say.
        assert_eq!(speed(2, 128, 0, true), 400_000);
        assert_eq!(speed(4, 0, 16_000, true), 1_600_000);
        assert_eq!(speed(4, 128, 16_000, false), 800_000);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn lists() {
        for device in all_devices() {
            let info = device.info();
            let Device::Verbs(_) = device else { panic!("{} is no NIC", info.name) };
            let listing = railhead::fabric::verbs::listing(&Arc::new(settings())).expect("settings").expect("devices");
            let port = listing.ports.iter().find(|port| port.info.name == info.name).expect("it");
            eprintln!("device {} {} port {} gid {}", info.name, info.pci_path.as_deref().unwrap_or("-"), info.port, port.gid_index);
        }
    }

    fn with_settings() -> Config {
        Config { ib_sl: 3, ib_pkey: 7, ib_timeout: 17, ib_retry_cnt: 5, ..settings() }
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn attributes_on_ethernet() {
        let control = Control::new();
        let devices = devices(&Arc::new(with_settings())).expect("devices");
        let caps = QpCaps { traffic_class: Some(96), rnr_retry: 4, min_rnr_timer_us: 10, ..QpCaps::default() };
        let pairs = [across(&devices[0], &devices[0], caps), across(&devices[0], &devices[0], caps)];
        let calls = control.calls("modify_qp");
        assert_eq!(calls.len(), 3 * 4);
        let to = |state: i64| calls.iter().filter(move |line| value(line, "state") == state);
        for line in to(1) {
            assert_eq!([value(line, "pkey_index"), value(line, "port"), value(line, "access")], [7, 1, 7]);
        }
        for line in to(2) {
            let got = ["mtu", "sl", "tc", "sgid", "global", "hops", "dlid", "rnr_timer"].map(|name| value(line, name));
            assert_eq!(got, [5, 3, 96, 1, 1, 255, 0, 1], "{line}");
        }
        for line in to(3) {
            assert_eq!(["timeout", "retry", "rnr_retry"].map(|name| value(line, name)), [17, 5, 4], "{line}");
        }
        // Each side expects what the other begins with, and no two begin alike.
        let sent: BTreeSet<i64> = to(3).map(|line| value(line, "sq_psn")).collect();
        let expected: BTreeSet<i64> = to(2).map(|line| value(line, "rq_psn")).collect();
        assert_eq!(sent, expected);
        assert!(sent.len() >= 3 && sent.iter().all(|psn| (0..1 << 24).contains(psn)), "{sent:?}");
        drop((pairs, devices));
        assert_eq!(["mrs", "qps", "cqs", "pds"].map(|name| control.get(name)), [0; 4]);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn attributes_on_infiniband() {
        let control = Control::new();
        let devices = devices(&Arc::new(with_settings())).expect("devices");
        let _pair = across(&devices[0], &devices[1], QpCaps::default());
        for (line, dlid) in control.calls("modify_qp").iter().filter(|line| value(line, "state") == 2).zip([0x100, 0x101]) {
            // One subnet: no global header. The smaller MTU of the two.
            assert_eq!(["dlid", "global", "sl", "mtu"].map(|name| value(line, name)), [dlid, 0, 3, 3], "{line}");
        }
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn paths_on_infiniband() {
        let control = Control::new();
        let devices = all_devices();
        let _pair = across(&devices[0], &devices[1], QpCaps::default());
        let lines: Vec<String> = control.calls("modify_qp").into_iter().filter(|line| value(line, "state") == 2).collect();
        let got: Vec<_> = lines.iter().map(|line| ["dlid", "global", "sgid"].map(|name| value(line, name))).collect();
        assert_eq!(format!("{got:?}"), std::env::var("RHT_WANT").expect("set"));
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn rails_and_planes() {
        let net = Net::with_config(settings()).expect("net");
        for dev in 0..net.device_count() {
            let it = net.properties(dev).expect("properties");
            eprintln!("{} rail {} plane {}", it.name.to_string_lossy(), it.rail_id, it.plane_id);
        }
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn modify_times_out() {
        let control = Control::new();
        let device = BED.device();
        control.set("modify_errno", ETIMEDOUT.into()).set("modify_state", 2).set("modify_fails", 3);
        across(&device, &device, QpCaps::default()).ping();
        assert_eq!(control.calls("modify_qp").iter().filter(|line| line.ends_with("refused")).count(), 3);
        let (mut a, mut b) = (Side::new("a", &device, QpCaps::default(), false), Side::new("b", &device, QpCaps::default(), false));
        let to_b = b.cq.qp(b.qp).endpoint();
        for (errno, words) in [(ETIMEDOUT, "does not answer"), (EINVAL, "the GID is gone")] {
            control.set("modify_errno", errno.into()).set("modify_fails", 1000);
            let error = a.cq.qp(a.qp).connect(&to_b).expect_err("refused").to_string();
            println!("{error}");
            assert!(error.contains("queue pair to RTR") && error.contains(words), "{error}");
        }
        // At once where waiting does not help.
        assert_eq!(1000 - control.get("modify_fails"), 1);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn inline_or_not() {
        let control = Control::new();
        let device = BED.device();
        let mut pair = across(&device, &device, QpCaps { send_depth: 8, ..QpCaps::default() });
        let to = pair.b.open_memory(64);
        for n in 0..40u8 {
            let bytes = [n; 64];
            pair.a.send(Request::write_inline(n.into(), &bytes, &to, 0));
            pair.a.wait(1);
            pair.a.take_ok(n.into());
            assert_eq!(to.all(), bytes);
        }
        assert_eq!(control.get("inlined") > 0, from_env("RHT_INLINED") == "1");
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn queues_grow() {
        let control = Control::new();
        control.set("max_cqe", 5000);
        let domain = BED.device().open().expect("open");
        let mut cq = domain.create_cq(false).expect("create_cq");
        let caps = QpCaps { send_depth: 500, recv_depth: 300, ..QpCaps::default() };
        let room =
            || control.log().iter().rev().find(|line| line.contains("entries=")).map(|line| value(line, "entries")).expect("a queue");
        let mut made = Vec::new();
        let refused = loop {
            match cq.create_qp(&caps, RailStats::detached()) {
                Ok(qp) => made.push(qp),
                Err(error) => break error.to_string(),
            }
            assert!(room() >= 800 * made.len() as i64, "{} entries for {} queue pairs", room(), made.len());
        };
        assert_eq!(made.len(), 6);
        assert!(refused.contains("5600 completions may be outstanding, its completion queues have 5000 entries at most"), "{refused}");
        // What is gone needs none.
        cq.destroy_qp(made[0]);
        cq.create_qp(&caps, RailStats::detached()).expect("room for one more");
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn signals() {
        let control = Control::new();
        let device = BED.device();
        let mut pair = across(&device, &device, QpCaps { send_depth: 16, ..QpCaps::default() });
        let (from, to) = (pair.a.open_memory(64), pair.b.open_memory(64));
        let before = control.get("signaled");
        let mut full = 0;
        for n in 0..1000 {
            let request = SendWr { signaled: false, ..Request::write(n, from.sge(0, 8), &to, 0) };
            // The device refuses what is more than its depth; the provider must know before.
            while let Err(error) = pair.a.cq.qp(pair.a.qp).post_send(&[request]) {
                assert_eq!(error, PostError::Full);
                full += 1;
                assert_eq!(pair.a.poll(), 0, "nobody asked to hear of success");
            }
        }
        assert_eq!(control.get("signaled") - before, 1000 / 8);
        assert!(full <= 1000 / 8, "{full}");
        assert_eq!(pair.a.state(), QpState::Rts);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn acknowledges() {
        let control = Control::new();
        let device = BED.device();
        let caps = QpCaps::default();
        let mut pair = Pair { a: Side::new("a", &device, caps, true), b: Side::new("b", &device, caps, true) };
        pair.connect();
        let to = pair.b.open_memory(64);
        for n in 0..100 {
            for side in [&mut pair.a, &mut pair.b] {
                side.cq.arm().expect("arm");
                assert_eq!(side.poll(), 0);
            }
            pair.b.recv(n, super::bed::NOTHING);
            pair.a.send(Request::write_imm(n, super::bed::NOTHING, &to, 0, n as u32));
            pair.wait(1, 1);
            pair.a.take_ok(n);
            pair.b.take_ok(n);
        }
        // One that nobody has looked at when its queue goes.
        pair.a.cq.arm().expect("arm");
        pair.a.send(Request::write(7, super::bed::NOTHING, &to, 0));
        drop(to);
        drop(pair);
        assert!(control.get("cq_events") >= 200, "{} events", control.get("cq_events"));
        assert_eq!(control.get("cq_events"), control.get("cq_acks"));
        assert_eq!(control.get("violations"), 0);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn enhancements() {
        let control = Control::new();
        let devices = all_devices();
        let mut pair = across(&devices[0], &devices[1], QpCaps::default());
        let number = |side: &mut Side| side.cq.qp(side.qp).qp_num();
        let (a, b) = (number(&mut pair.a), number(&mut pair.b));
        let log: Vec<String> = control.log().into_iter().filter(|line| line.contains("_ece") || line.starts_with("modify_qp")).collect();
        let log: Vec<&str> = log.iter().map(|line| line.split(" mask=").next().unwrap_or_default()).collect();
        // States: 1 INIT, 2 RTR, 3 RTS. What the first can, what the second makes of it, and that on the first.
        let steps = [
            format!("modify_qp qp={a} state=1"),
            format!("query_ece qp={a} state=1 options=0x7"),
            format!("modify_qp qp={b} state=1"),
            format!("query_ece qp={b} state=1 options=0x5"),
            format!("set_ece qp={b} state=1 vendor=0x15b3 options=0x7"),
            format!("modify_qp qp={b} state=2"),
            format!("modify_qp qp={b} state=3"),
            format!("query_ece qp={b} state=3 options=0x5"),
            format!("set_ece qp={a} state=1 vendor=0x15b3 options=0x5"),
            format!("modify_qp qp={a} state=2"),
            format!("modify_qp qp={a} state=3"),
        ];
        assert_eq!(log, steps);
        pair.ping();
        // Where both were told of offers, neither counts.
        let before = control.calls("set_ece").len();
        BED.pair_on(&devices[0], QpCaps::default()).ping();
        assert_eq!(control.calls("set_ece").len(), before);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn enhancements_across_comms() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let _comms = comms(&net, 0);
        assert_eq!(control.calls("set_ece").len(), 2, "the two ends of a comm agree");
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn no_enhancements() {
        let control = Control::new();
        let devices = all_devices();
        across(&devices[0], &devices[1], QpCaps::default()).ping();
        assert!(control.calls("set_ece").is_empty());
        assert!(from_env_or("NCCL_IB_ECE_ENABLE", "1") == "1" || control.calls("query_ece").is_empty());
    }

    fn from_env_or(name: &str, default: &str) -> String {
        std::env::var(name).unwrap_or_else(|_| default.to_owned())
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn relaxed_ordering() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (mut send, mut recv) = comms(&net, 0);
        let flags = control.calls("reg_mr");
        assert!(flags.len() >= 2, "announcements and records lie in registered memory");
        assert!(flags.iter().all(|line| value(line, "access") & RELAXED == 0), "{flags:?}");
        let pages = [Pages::new(4096), Pages::new(4096)].map(|pages| pages.expect("memory"));
        let mrs = [register(&net, 0, &pages[0]), register(&net, 0, &pages[1])];
        let wanted = from_env("RHT_RELAXED") == "1";
        let all = control.calls("reg_mr");
        let messages = all.iter().filter(|line| pages.iter().any(|pages| line.contains(&format!("addr={:#x} ", pages.addr()))));
        let relaxed: Vec<bool> = messages.map(|line| value(line, "access") & RELAXED != 0).collect();
        assert_eq!(relaxed, [wanted; 2], "{all:?}");
        message(&mut send, &mut recv, (&pages[0], mrs[0]), (&pages[1], mrs[1]), 4096);
        for mr in mrs {
            net.deregister(0, mr).expect("deregister");
        }
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn registrations_fail() {
        let control = Control::new();
        let domain = BED.device().open().expect("open");
        let limit = libc::rlimit { rlim_cur: 65536, rlim_max: 65536 };
        // SAFETY: a limit that outlives the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
        let pages = Pages::new(4096).expect("memory");
        for errno in [ENOMEM, EFAULT, EOPNOTSUPP] {
            control.set("reg_errno", errno.into());
            let error = domain.register(memory(&pages), Access::LOCAL_WRITE | Access::RELAXED_ORDERING).err().expect("refused");
            println!("{error}");
            assert!(error.to_string().contains("fake0:1: registering 4096 bytes at 0x"), "{error}");
        }
        control.set("reg_errno", 0);
        let dma_buf = |fd: i32| domain.register_dma_buf(memory(&pages), Access::LOCAL_WRITE | Access::RELAXED_ORDERING, 512, fd);
        println!("{}", dma_buf(-1).err().expect("no descriptor"));
        // A driver that does not know the wish gets the registration without it.
        control.set("relaxed_errno", EINVAL.into());
        let region = dma_buf(0).expect("registered");
        let calls = control.calls("reg_dmabuf_mr");
        assert!(calls[0].ends_with("offset=512"), "{calls:?}");
        assert_eq!((value(&calls[1], "access"), value(&calls[1], "len")), (1, 4096));
        drop(region);
        control.set("dma_buf_errno", EOPNOTSUPP.into());
        println!("{}", dma_buf(0).err().expect("refused"));
        assert_eq!(control.get("mrs"), 0);
        let empty = control.log().len();
        // SAFETY: an empty range.
        assert!(domain.register(unsafe { UserMemory::new(pages.addr() as *mut u8, 0) }, Access::LOCAL_WRITE).is_err());
        assert_eq!(control.log().len(), empty, "the device was asked all the same");
    }

    /// The keys of a range on two devices, as they were registered by the function of that name.
    fn keys_of(control: &Control, by: &str, pages: &Pages) -> Vec<i64> {
        let regions = control.calls(by);
        let key_on = |device: i64| {
            let on = |line: &&String| line.contains(&format!("dev={device} ")) && line.contains(&format!("addr={:#x} ", pages.addr()));
            value(regions.iter().rev().find(on).expect("registered"), "key")
        };
        vec![key_on(0), key_on(1)]
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn gpu_memory() {
        let _control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let takes = from_env("RHT_DMA_BUF") == "1";
        let support = net.properties(0).expect("properties").ptr_support;
        assert_eq!((support & PTR_HOST != 0, support & PTR_DMABUF != 0), (true, takes));
        let pages = Pages::new(4096).expect("memory");
        let file = std::fs::File::open("/dev/null").expect("a descriptor");
        let by_dma_buf = net.register_dma_buf(0, memory(&pages), MemoryKind::Device, 0, file.as_raw_fd());
        match by_dma_buf {
            Ok(mr) => net.deregister(0, mr).expect("deregister"),
            Err(error) => assert!(!takes && error.to_string().contains("fake0 takes no DMA-BUF (no NCCL_PTR_DMABUF)"), "{error}"),
        }
        // A machine that has nvidia_peermem has what is missing elsewhere.
        if support & PTR_CUDA == 0 {
            let error = net.register(0, memory(&pages), MemoryKind::Device).expect_err("no peer memory").to_string();
            let wanted = if takes { "there is regMrDmaBuf" } else { "DMA-BUF does not work either (`railhead info` says why)" };
            assert!(error.contains("fake0 does not reach a GPU's memory") && error.contains("`modprobe nvidia_peermem`"), "{error}");
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn dma_buf_on_two_devices() {
        const REGISTERED: &str = "reg_dmabuf_mr dev=";
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let dev = net.make_virtual(&[0, 1]).expect("makeVDevice");
        assert_ne!(net.properties(dev).expect("properties").ptr_support & PTR_DMABUF, 0, "both parts take them");
        let (mut send, mut recv) = comms(&net, dev);
        let pages = [Pages::new(4096), Pages::new(4096)].map(|pages| pages.expect("memory"));
        let file = std::fs::File::open("/dev/null").expect("a descriptor");
        let from = register(&net, dev, &pages[0]);
        let before = control.get("mrs");
        let by_dma_buf = || net.register_dma_buf(dev, memory(&pages[1]), MemoryKind::Device, 512, file.as_raw_fd()).expect("register");
        let to = by_dma_buf();
        let calls = control.calls(REGISTERED);
        assert_eq!(calls.iter().map(|line| value(line, "dev")).collect::<Vec<_>>(), [0, 1], "{calls:?}");
        let again = by_dma_buf();
        assert_eq!(control.calls(REGISTERED).len(), 2, "the second call finds the first one's");
        net.deregister(dev, again).expect("deregister");
        assert_eq!(control.get("mrs"), before + 2);
        message(&mut send, &mut recv, (&pages[0], from), (&pages[1], to), 4096);
        control.set("log_requests", 1);
        let flush = recv.iflush(&[RecvBuffer { addr: pages[1].addr(), len: 4096, tag: 0, mr: to }]).expect("iflush").expect("a request");
        until("the flush", || recv.test(flush).expect("test").is_some());
        let used: Vec<i64> = control.calls("request").iter().map(|line| value(line, "rkey")).collect();
        assert_eq!(used, keys_of(&control, REGISTERED, &pages[1]), "each device's own key");
        net.deregister(dev, from).expect("deregister");
        net.deregister(dev, to).expect("deregister");
        assert_eq!(control.calls("dereg_mr").len(), 4);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn shared_registration() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let mut pairs = [comms(&net, 0), comms(&net, 0)];
        let pages = [Pages::new(4096), Pages::new(4096)].map(|pages| pages.expect("memory"));
        let before = control.get("mrs");
        // Each comm registers for itself, as NCCL has it.
        let mrs = pairs.each_ref().map(|_| [register(&net, 0, &pages[0]), register(&net, 0, &pages[1])]);
        assert_eq!(control.get("mrs") - before, 2);
        for ((send, recv), [from, to]) in pairs.iter_mut().zip(mrs) {
            message(send, recv, (&pages[0], from), (&pages[1], to), 4096);
        }
        mrs[0].into_iter().for_each(|mr| net.deregister(0, mr).expect("deregister"));
        assert_eq!(control.get("mrs") - before, 2, "the other comm's");
        let (send, recv) = &mut pairs[1];
        message(send, recv, (&pages[0], mrs[1][0]), (&pages[1], mrs[1][1]), 4096);
        mrs[1].into_iter().for_each(|mr| net.deregister(0, mr).expect("deregister"));
        assert_eq!(control.get("mrs"), before);
    }

    /// What of a range is still registered is all that a NIC lets a peer write to.
    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn registration_of_a_part() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (mut send, mut recv) = comms(&net, 0);
        let (from, to) = (Pages::new(8192).expect("memory"), Pages::new(8192).expect("memory"));
        (0..8192).step_by(8).for_each(|at| from.store_u64(at, u64::MAX, Ordering::Relaxed));
        let before = control.get("mrs");
        let source = register(&net, 0, &from);
        let outer = register(&net, 0, &to);
        // SAFETY: the page outlives its registration.
        let page = unsafe { UserMemory::new(to.ptr(0, 4096), 4096) };
        let inner = net.register(0, page, MemoryKind::Host).expect("register");
        assert_eq!(control.get("mrs") - before, 3);
        let request = asked("irecv", || recv.irecv(&[RecvBuffer { addr: to.addr(), len: 8192, tag: 0, mr: outer }]).expect("irecv"));
        net.deregister(0, outer).expect("deregister");
        assert_eq!(control.get("mrs") - before, 2);
        let sent = asked("isend", || send.isend(from.addr(), 8192, 0, source).expect("isend"));
        until("the sender's error", || {
            let _ = recv.test(request);
            send.test(sent).is_err()
        });
        until("the receiver's error", || recv.test(request).is_err());
        assert!((0..8192).step_by(8).all(|at| to.load_u64(at, Ordering::Relaxed) == 0), "written after deregMr");
        net.deregister(0, inner).expect("deregister");
        net.deregister(0, source).expect("deregister");
        assert_eq!(control.get("mrs"), before);
    }

    /// Where another registration keeps the region, the comm's next call fails it, whether a message has come or not; and what is registered
    /// goes on to work.
    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn deregistered_under_a_receive() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (from, to) = (Pages::new(4096).expect("memory"), Pages::new(4096).expect("memory"));
        let source = register(&net, 0, &from);
        let kept = register(&net, 0, &to);
        let mut other = comms(&net, 0);
        for message_comes in [false, true] {
            let (mut send, mut recv) = comms(&net, 0);
            let mr = register(&net, 0, &to);
            let buffer = RecvBuffer { addr: to.addr(), len: 4096, tag: 0, mr };
            let requests = [(); 2].map(|()| asked("irecv", || recv.irecv(&[buffer]).expect("irecv")));
            let before = control.get("mrs");
            net.deregister(0, mr).expect("deregister");
            assert_eq!(control.get("mrs"), before, "the region is the other registration's too");
            if message_comes {
                let sent = [(); 2].map(|()| asked("isend", || send.isend(from.addr(), 4096, 0, source).expect("isend")));
                until("sent", || sent.into_iter().all(|sent| !matches!(send.test(sent), Ok(None))));
            }
            let broken = control.calls("modify_qp").len();
            for request in requests {
                let error = recv.test(request).expect_err("deregistered");
                assert!(error.to_string().contains("is not registered"), "{error}");
            }
            let calls = control.calls("modify_qp").split_off(broken);
            // 6 is IBV_QPS_ERR.
            assert!(!calls.is_empty() && calls.iter().all(|line| value(line, "state") == 6), "{calls:?}");
            // A comm that has nothing outstanding under it does not mind.
            message(&mut other.0, &mut other.1, (&from, source), (&to, kept), 4096);
        }
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn flushes() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let dev = net.make_virtual(&[0, 1]).expect("makeVDevice");
        let (mut send, mut recv) = comms(&net, dev);
        let resized = control.calls("resize_cq").len();
        let pages = [Pages::new(4096), Pages::new(4096)].map(|pages| pages.expect("memory"));
        let from = register(&net, dev, &pages[0]);
        let to = net.register_as_device(dev, memory(&pages[1])).expect("register");
        message(&mut send, &mut recv, (&pages[0], from), (&pages[1], to), 4096);
        let buffer = RecvBuffer { addr: pages[1].addr(), len: 4096, tag: 0, mr: to };
        let own: Vec<i64> = control.calls("create_qp").iter().map(|line| value(line, "qp")).collect();
        control.set("log_requests", 1).set("deaf", 1);
        let flush = recv.iflush(&[buffer]).expect("iflush").expect("a request");
        assert!(recv.test(flush).expect("test").is_none(), "no device has read yet");
        control.set("deaf", 0);
        let reads = control.calls("request");
        assert_eq!(reads.len(), 2, "{reads:?}");
        let made: Vec<String> = control.calls("create_qp").split_off(own.len());
        let flush_qps: Vec<i64> = made.iter().map(|line| value(line, "qp")).collect();
        for (read, qp) in reads.iter().zip(&flush_qps) {
            // 4 is IBV_WR_RDMA_READ; the flag 2 asks for a report. From the received memory, on a queue pair connected to itself.
            assert_eq!(["opcode", "flags", "len", "to"].map(|name| value(read, name)), [4, 2, 1, pages[1].addr() as i64], "{read}");
            assert_eq!(value(read, "qp"), *qp);
            let connected = control.calls(&format!("modify_qp qp={qp} state=2"));
            assert_eq!(value(&connected[0], "dest"), *qp);
        }
        let keys: Vec<i64> = reads.iter().map(|line| value(line, "rkey")).collect();
        assert_eq!(keys, keys_of(&control, "reg_mr", &pages[1]), "each device's own key");
        assert_eq!(control.calls("resize_cq").len(), resized, "a comm's queue has room for its flushes from the beginning");
        // The next flush wakes the devices, and finds the first done.
        let second = recv.iflush(&[buffer]).expect("iflush").expect("a request");
        until("a flush", || recv.test(flush).expect("test").is_some());
        until("a flush", || recv.test(second).expect("test").is_some());
        // Host memory needs none.
        let host = RecvBuffer { addr: pages[0].addr(), len: 4096, tag: 0, mr: from };
        assert!(recv.iflush(&[host]).expect("iflush").is_none());
        assert_eq!(control.calls("request").len(), 4);
        net.deregister(dev, from).expect("deregister");
        net.deregister(dev, to).expect("deregister");
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn failed_completion() {
        let control = Control::new();
        let device = BED.device();
        let mut pair = across(&device, &device, QpCaps::default());
        let (from, to) = (pair.a.open_memory(64), pair.b.open_memory(64));
        control.set("status", 12).set("vendor_err", 129);
        pair.a.send(Request::write(5, from.sge(0, 64), &to, 0));
        pair.a.wait(1);
        let failed = pair.a.take();
        assert_eq!((failed.wr_id, failed.status, failed.opcode), (5, WcStatus::RetryExcErr, WcOpcode::Write));
        assert_eq!(pair.a.state(), QpState::Error);
        let why = pair.a.cq.qp(pair.a.qp).error().expect("a reason").to_owned();
        assert!(why.contains("a WRITE of 64 bytes failed"), "{why}");
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn unknown_completion() {
        let control = Control::new();
        let device = BED.device();
        let mut pair = across(&device, &device, QpCaps::default());
        let (from, to) = (pair.a.open_memory(64), pair.b.open_memory(64));
        // A success of an unknown kind is a success.
        control.set("opcode", 250);
        pair.a.send(Request::write(1, from.sge(0, 64), &to, 0));
        pair.a.wait(1);
        assert_eq!(pair.a.take_ok(1).opcode, WcOpcode::Write);
        pair.b.recv(2, to.sge(0, 64));
        control.set("opcode", 249);
        pair.a.send(Request::send(3, from.sge(0, 64)));
        pair.wait(1, 1);
        assert_eq!((pair.b.take_ok(2).opcode, pair.a.take_ok(3).opcode), (WcOpcode::Recv, WcOpcode::Send));
        control.set("status", 77).set("vendor_err", 0xbeef);
        pair.a.send(Request::write(4, from.sge(0, 64), &to, 0));
        pair.a.wait(1);
        assert_eq!(pair.a.take().status, WcStatus::GeneralErr);
        assert_eq!(pair.a.state(), QpState::Error);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn fatal_events() {
        let control = Control::new();
        let devices = all_devices();
        let mut on_first: Vec<Pair> = (0..3).map(|_| across(&devices[0], &devices[0], QpCaps::default())).collect();
        let mut on_second = across(&devices[1], &devices[1], QpCaps::default());
        let number = |pair: &mut Pair| pair.a.cq.qp(pair.a.qp).qp_num();
        control.raise(QP_FATAL, number(&mut on_first[0]));
        until("the end of a queue pair", || on_first[0].a.state() == QpState::Error);
        let ended = &mut on_first[0].a;
        assert!(ended.cq.qp(ended.qp).error().is_some_and(|why| why.contains("IBV_EVENT_QP_FATAL")));
        control.raise(CQ_ERR, number(&mut on_first[1]));
        until("the end of a completion queue", || on_first[1].a.state() == QpState::Error);
        on_first[2].ping();
        control.raise(DEVICE_FATAL, 0);
        until("the end of a device", || on_first[2].a.state() == QpState::Error && on_first[2].b.state() == QpState::Error);
        assert_eq!(on_second.a.state(), QpState::Rts);
        on_second.ping();
        until("acknowledgements", || control.get("async_acks") == 3);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn addresses_change() {
        let control = Control::new();
        let devices = all_devices();
        let mut pairs = [0, 1].map(|n| across(&devices[n], &devices[n], QpCaps::default()));
        // Something else in the table, then what is used.
        control.raise(GID_CHANGE, 1);
        until("an acknowledgement", || control.get("async_acks") == 1);
        control.set("gid_gone", 1);
        control.raise(GID_CHANGE, 0);
        until("acknowledgements", || control.get("async_acks") == 2);
        pairs.iter_mut().for_each(Pair::ping);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn fatal_events_are_only_told() {
        let control = Control::new();
        let device = BED.device();
        let mut pair = across(&device, &device, QpCaps::default());
        let number = pair.a.cq.qp(pair.a.qp).qp_num();
        control.raise(QP_FATAL, number);
        control.raise(DEVICE_FATAL, 0);
        until("acknowledgements", || control.get("async_acks") == 2);
        assert_eq!(pair.a.state(), QpState::Rts);
        pair.ping();
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn a_comm_whose_device_fails() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (mut send, mut recv) = comms(&net, 0);
        let pages = Pages::new(4096).expect("memory");
        let mr = register(&net, 0, &pages);
        let request = recv.irecv(&[RecvBuffer { addr: pages.addr(), len: 64, tag: 1, mr }]).expect("irecv").expect("room");
        control.raise(DEVICE_FATAL, 0);
        let mut error = None;
        until("the receive's error", || {
            error = recv.test(request).err();
            error.is_some()
        });
        println!("{}", error.expect("an error"));
        until("the sender's error", || send.isend(pages.addr(), 64, 2, mr).is_err());
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn chain_not_taken() {
        let control = Control::new();
        let device = BED.device();
        let mut pair = across(&device, &device, QpCaps::default());
        let (from, to) = (pair.a.open_memory(64), pair.b.open_memory(64));
        let chain: Vec<_> = (0..4).map(|n| Request::write(n, from.sge(0, 8), &to, 0)).collect();
        control.set("post_taken", 2).set("post_errno", ENOMEM.into());
        let error = pair.a.cq.qp(pair.a.qp).post_send(&chain).expect_err("refused");
        assert_eq!(error, PostError::State(QpState::Error));
        let why = pair.a.cq.qp(pair.a.qp).error().expect("a reason").to_owned();
        assert!(why.contains("the device took 2 requests of a batch and then said: "), "{why}");
        pair.a.wait(2);
        pair.a.take_all_ok(0..2);
        pair.settle();
        assert!(pair.a.got.is_empty(), "what was not taken completes nowhere: {:?}", pair.a.got);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn cannot_be_polled() {
        let control = Control::new();
        let device = BED.device();
        let mut pair = across(&device, &device, QpCaps::default());
        control.set("poll_result", -5);
        assert_eq!(pair.a.poll(), 0);
        assert_eq!(pair.a.state(), QpState::Error);
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn deaf() {
        let control = Control::new();
        let device = BED.device_with(|config| config.fabric_timeout_s = 1);
        let mut pair = across(&device, &device, QpCaps::default());
        let (from, to) = (pair.a.open_memory(64), pair.b.open_memory(64));
        control.set("deaf", 1);
        pair.a.send(Request::write(1, from.sge(0, 8), &to, 0));
        pair.a.send(SendWr { opcode: Opcode::Read, ..Request::read(2, from.sge(0, 8), &to, 0) });
        pair.a.wait(2);
        assert_eq!((pair.a.take().status, pair.a.take().status), (WcStatus::RetryExcErr, WcStatus::WrFlushErr));
    }

    /// As NCCL did until 2.11: both comms are there before the sender's queue pair has been connected, which its next call does.
    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn late_peer() {
        let _control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (mut listen, mut handle) = net.listen(0).expect("listen");
        let mut send = net.connect(0, None, &mut handle, Mode::Blocking).expect("connect").expect("a comm");
        let mut recv = listen.accept(Mode::Blocking).expect("accept").expect("a comm");
        let pages = [Pages::new(4096), Pages::new(4096)].map(|pages| pages.expect("memory"));
        let mrs = [register(&net, 0, &pages[0]), register(&net, 0, &pages[1])];
        pages[0].write(0, &[7; 64]);
        let request = recv.irecv(&[RecvBuffer { addr: pages[1].addr(), len: 64, tag: 1, mr: mrs[1] }]).expect("irecv").expect("room");
        // Longer than until the wait is looked into, and than the device may take afterwards.
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(3) {
            assert!(recv.test(request).expect("a peer that is only late").is_none());
            pause(start);
        }
        // Either end's calls drive that end's handshake.
        let (mut sent, mut ends) = (None, (false, false));
        until("the message", || {
            match sent {
                None => sent = send.isend(pages[0].addr(), 64, 1, mrs[0]).expect("isend"),
                Some(sent) => ends.0 = ends.0 || send.test(sent).expect("test of the send").is_some(),
            }
            ends.1 = ends.1 || recv.test(request).expect("test of the receive").is_some();
            ends == (true, true)
        });
        let mut got = [0; 64];
        pages[1].read(0, &mut got);
        assert_eq!(got, [7; 64]);
        mrs.into_iter().for_each(|mr| net.deregister(0, mr).expect("deregister"));
    }

    /// Messages with long pauses between them, the last one longer than the device may take for anything.
    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn slow_traffic() {
        let _control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (mut send, mut recv) = comms(&net, 0);
        let pages = Pages::new(4096).expect("memory");
        let mr = register(&net, 0, &pages);
        for wait_ms in [400, 400, 400, 400, 2500] {
            let request = recv.irecv(&[RecvBuffer { addr: pages.addr() + 1024, len: 64, tag: 1, mr }]).expect("irecv").expect("room");
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(wait_ms) {
                assert!(recv.test(request).expect("a peer that is only slow").is_none());
                pause(start);
            }
            let mut sent = None;
            until("the send", || {
                sent = send.isend(pages.addr(), 64, 1, mr).expect("isend");
                sent.is_some()
            });
            until("the message", || recv.test(request).expect("test of the receive").is_some());
            until("its end", || send.test(sent.expect("posted")).expect("test of the send").is_some());
        }
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn lost_announcement() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (_send, mut recv) = comms(&net, 0);
        let pages = Pages::new(4096).expect("memory");
        let mr = register(&net, 0, &pages);
        control.set("deaf", 1);
        let request = recv.irecv(&[RecvBuffer { addr: pages.addr(), len: 64, tag: 1, mr }]).expect("irecv").expect("room");
        outcome(&mut recv, request).expect_err("the announcement never arrives");
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn failed_flush() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (mut send, mut recv) = comms(&net, 0);
        let pages = [Pages::new(4096), Pages::new(4096)].map(|pages| pages.expect("memory"));
        let from = register(&net, 0, &pages[0]);
        let to = net.register_as_device(0, memory(&pages[1])).expect("register");
        message(&mut send, &mut recv, (&pages[0], from), (&pages[1], to), 4096);
        let buffer = RecvBuffer { addr: pages[1].addr(), len: 4096, tag: 0, mr: to };
        control.set("status", 10);
        let flush = recv.iflush(&[buffer]).expect("iflush").expect("a request");
        println!("failed flush: {}", outcome(&mut recv, flush).expect_err("the READ failed"));
        // A device that says so in an event, and completes nothing.
        let (mut send, mut recv) = comms(&net, 0);
        message(&mut send, &mut recv, (&pages[0], from), (&pages[1], to), 4096);
        control.set("deaf", 1);
        let before = control.calls("create_qp").len();
        let flush = recv.iflush(&[buffer]).expect("iflush").expect("a request");
        let made = control.calls("create_qp").split_off(before);
        control.raise(QP_FATAL, value(&made[0], "qp") as u32);
        outcome(&mut recv, flush).expect_err("its queue pair failed");
    }

    /// A message and, behind it, the end of the receiver's queue pair lie in its completion queue when it looks.
    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn last_words() {
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (mut send, mut recv) = comms(&net, 0);
        let pages = Pages::new(4096).expect("memory");
        let mr = register(&net, 0, &pages);
        let buffer = |n: usize| RecvBuffer { addr: pages.addr() + 1024 * n, len: 64, tag: 1, mr };
        let requests = [1, 2].map(|n| recv.irecv(&[buffer(n)]).expect("irecv").expect("room"));
        pages.write(0, &[7; 64]);
        for status in [0, 12] {
            control.set("status", status);
            until("a send", || send.isend(pages.addr(), 64, 1, mr).expect("isend").is_some());
        }
        let outcomes = requests.map(|request| outcome(&mut recv, request));
        let mut got = [0; 64];
        pages.read(1024, &mut got);
        assert_eq!((got, &outcomes[0]), ([7; 64], &Ok(())));
        let error = outcomes[1].as_ref().expect_err("the second one's queue pair failed");
        assert!(error.contains("IBV_WC_RETRY_EXC_ERR") || error.contains("failed"), "{error}");
    }

    #[test]
    #[ignore = "needs the fake libibverbs"]
    fn queue_pairs_of_a_message() {
        const LEN: usize = 1 << 20;
        let control = Control::new();
        let net = Net::with_config(settings()).expect("net");
        let (mut send, mut recv) = comms(&net, 0);
        let pages = [Pages::new(LEN), Pages::new(LEN)].map(|pages| pages.expect("memory"));
        let mrs = [register(&net, 0, &pages[0]), register(&net, 0, &pages[1])];
        control.set("log_requests", 1);
        let mut all = BTreeSet::new();
        for n in 1..=8 {
            let before = control.calls("request").len();
            message(&mut send, &mut recv, (&pages[0], mrs[0]), (&pages[1], mrs[1]), LEN);
            let requests = control.calls("request").split_off(before);
            // 1 is IBV_WR_RDMA_WRITE_WITH_IMM, and the data goes with it.
            let data = |line: &&String| value(line, "opcode") == 1 && value(line, "len") > 0;
            let used: BTreeSet<i64> = requests.iter().filter(data).map(|line| value(line, "qp")).collect();
            assert_eq!(used.len().to_string(), from_env("RHT_USED"), "message {n}: {requests:?}");
            all.extend(used);
        }
        assert_eq!(all.len(), 4, "one message after the other takes the next");
        for mr in mrs {
            net.deregister(0, mr).expect("deregister");
        }
    }
}
