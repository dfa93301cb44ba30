//! The proxy over Railhead's own table, through its C functions: streams, many connectors, dumps, ends and errors. Each scenario runs in a process
//! of its own, with both ends in it unless it says otherwise.

use std::thread;

use crate::support;
use railhead::abi::connector::railhead_connector_config_t;
use support::proxy::*;
use support::{Ctx, Random, Role, World, pattern, until};

pub const ROLES: &[(&str, Role)] = &[
    ("streams", streams),
    ("many_connectors", many_connectors),
    ("dump", dump),
    ("zero_bytes", zero_bytes),
    ("a_million", a_million),
    ("stop_and_abort", stop_and_abort),
    ("a_lie", a_lie),
    ("peer_dies", peer_dies),
    ("producer_dies", producer_dies),
    ("misuse", misuse),
    ("supplied", supplied),
];

fn alone(role: &'static str) {
    for wire in ["shm", "tcp"] {
        World::new(role, 1).env("RAILHEAD_SOCKET_IFNAME", "=lo").env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

#[test]
fn streams_in_both_directions_between_two_engines_of_one_process() {
    alone("streams");
}

#[test]
fn sixty_four_connectors_with_random_operations() {
    let seed = support::seed();
    for wire in ["shm", "tcp"] {
        World::new("many_connectors", 1)
            .env("RAILHEAD_SOCKET_IFNAME", "=lo")
            .env("RAILHEAD_SOFT_WIRE", wire)
            .env("RHT_SEED", &seed.to_string())
            .spawn()
            .finish();
    }
}

#[test]
fn a_dump_shows_what_each_operation_waits_for() {
    alone("dump");
}

#[test]
fn operations_of_no_bytes() {
    World::new("zero_bytes", 1).env("RAILHEAD_SOCKET_IFNAME", "=lo").spawn().finish();
}

#[test]
fn a_million_operations_of_no_bytes_past_the_end_of_all_counters() {
    World::new("a_million", 1).env("RAILHEAD_SOCKET_IFNAME", "=lo").spawn().finish();
}

#[test]
fn stop_drains_and_abort_does_not() {
    alone("stop_and_abort");
}

#[test]
fn a_ring_that_lies_ends_the_proxy_with_its_operation() {
    alone("a_lie");
}

#[test]
fn a_peer_that_dies_ends_the_proxy_with_its_operation() {
    let mut world = World::new("peer_dies", 2).env("RAILHEAD_SOCKET_IFNAME", "=lo").spawn();
    world.expect(0, "streaming");
    world.ranks[1].signal(libc::SIGKILL);
    world.expect(0, "told");
    assert!(world.ranks[0].wait().success());
}

#[test]
fn a_producer_that_is_killed_while_its_ring_is_full() {
    let mut world = World::new("producer_dies", 2).env("RAILHEAD_SOCKET_IFNAME", "=lo").spawn();
    world.expect(0, "full");
    world.ranks[1].signal(libc::SIGKILL);
    assert!(!world.ranks[1].wait().success());
    world.tell(0, "dead");
    world.expect(0, "done");
    assert!(world.ranks[0].wait().success());
}

/// A stream of an operation's steps from one connector to another, each program in a thread.
fn stream(send: Connector, recv: Connector, seed: u64, messages: u64, slice: u64, chunk: u64) {
    let most = send.place().data_bytes / 24 * slice as usize;
    let len = |n: u64| (n as usize).wrapping_mul(7919).wrapping_add(seed as usize) % (most + 1);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut filler = send.producer();
            filler.side.start(chunk).expect("start");
            for n in 0..messages {
                let data = pattern(seed ^ n, len(n));
                until("room", || filler.put(slice, &data).then_some(()));
            }
        });
        let mut emptier = recv.consumer();
        emptier.side.start(chunk).expect("start");
        for n in 0..messages {
            let data = until("data", || emptier.take(slice));
            assert!(data == pattern(seed ^ n, len(n)), "message {n} of {} bytes", data.len());
        }
    });
}

fn streams(_: &Ctx) {
    let (a, b) = (Proxy::new(), Proxy::new());
    let start = u64::MAX - 20;
    for home in 0..3 {
        let config = railhead_connector_config_t { home, first_step: start, ..slots(64 << 10) };
        let (there, back) = (pair(a, b, &config), pair(b, a, &config));
        for (slice, chunk) in [(1, 1), (2, 4), (8, 8)] {
            for (send, recv) in [there, back] {
                for connector in [send, recv] {
                    connector.append(&operation(40 * slice, slice as u32, chunk, SIMPLE)).expect("append");
                }
            }
            a.start().expect("start");
            b.start().expect("start");
            thread::scope(|scope| {
                for (seed, (send, recv)) in [(1, there), (2, back)] {
                    scope.spawn(move || stream(send, recv, seed, 40, slice, chunk.into()));
                }
            });
        }
        for connector in [there.0, there.1, back.0, back.1] {
            until("the end", || (connector.state().operations == 3).then_some(()));
            // Step u64::MAX - 20, 40 steps, 80 from the next multiple of 4 on, 320 from the next of 8 on.
            assert_eq!((connector.state().messages, connector.state().step), (120, 424));
            connector.close().expect("close");
            assert_eq!(connector.close(), Err(RAILHEAD_INTERNAL));
        }
    }
    a.stop().expect("stop");
    b.stop().expect("stop");
    a.destroy().expect("destroy");
    b.destroy().expect("destroy");
}

/// Operations, messages and pauses of 64 pairs of connectors, all drawn from one seed.
fn many_connectors(_: &Ctx) {
    const PAIRS: u64 = 64;
    // At most, of an operation and of a connector; they bound the time.
    const MESSAGES: u64 = 40;
    const OPERATIONS: u64 = 12;
    let seed: u64 = std::env::var("RHT_SEED").expect("RHT_SEED").parse().expect("a number");
    let mut random = Random(seed);
    let (a, b) = (Proxy::new(), Proxy::new());
    // What a pair's two programs have to move, in order: steps, bytes, and what the data follows from.
    struct Message {
        slice: u64,
        /// Of the operation that it is the first of.
        chunk: Option<u64>,
        len: usize,
        seed: u64,
    }
    struct Programs {
        n: u64,
        send: Connector,
        recv: Connector,
        filler: Filler,
        emptier: Emptier,
        operations: Vec<(u64, u64, u64)>,
        messages: Vec<Message>,
        filled: usize,
        emptied: usize,
        /// Turns for which either program does nothing.
        pauses: [u64; 2],
    }
    let mut programs: Vec<Programs> = (0..PAIRS)
        .map(|n| {
            let bytes = 128 * (1 + random.below(16)) as usize;
            // Near the end of the counters, or not.
            let first_step = if random.below(2) == 0 { 0u64.wrapping_sub(random.below(64)) } else { random.next() };
            let config = railhead_connector_config_t { home: random.below(3) as u32, first_step, ..slots(bytes) };
            let (send, recv) = if random.below(2) == 0 { pair(a, b, &config) } else { pair(b, a, &config) };
            let operations: Vec<_> = (0..random.below(OPERATIONS + 1))
                .map(|_| {
                    let slice = 1u64 << random.below(4);
                    let chunk = slice << random.below(4 - u64::from(slice.trailing_zeros()));
                    (slice, chunk, chunk / slice * (1 + random.below(MESSAGES * slice / chunk)))
                })
                .collect();
            let mut messages = Vec::new();
            for &(slice, chunk, count) in &operations {
                messages.extend((0..count).map(|k| {
                    let most = slice * bytes as u64;
                    // None, all, and anything between.
                    let len = match random.below(4) {
                        0 => 0,
                        1 => most,
                        _ => random.below(most + 1),
                    };
                    Message { slice, chunk: (k == 0).then_some(chunk), len: len as usize, seed: random.next() }
                }));
            }
            let (filler, emptier) = (send.producer(), recv.consumer());
            Programs { n, send, recv, filler, emptier, operations, messages, filled: 0, emptied: 0, pauses: [0; 2] }
        })
        .collect();
    for proxy in [a, b] {
        proxy.group_start().expect("group");
    }
    // In an order of their own across connectors.
    let mut order: Vec<(usize, bool)> = programs
        .iter()
        .enumerate()
        .flat_map(|(p, programs)| programs.operations.iter().flat_map(move |_| [(p, true), (p, false)]))
        .collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i as u64 + 1) as usize);
    }
    let mut next = vec![[0usize; 2]; programs.len()];
    for (p, sends) in order {
        let at = &mut next[p][usize::from(sends)];
        let (slice, chunk, count) = programs[p].operations[*at];
        *at += 1;
        let connector = if sends { programs[p].send } else { programs[p].recv };
        connector.append(&operation(slice * count, slice as u32, chunk as u32, SIMPLE)).expect("append");
    }
    for proxy in [a, b] {
        proxy.start().expect("start");
        assert_eq!(proxy.state().done, 0, "an open group is held back");
        proxy.group_end().expect("group");
        proxy.start().expect("start");
    }
    // All programs in turn, in one thread; after what it did, each pauses for a while, most not at all and some for long.
    let pause = |random: &mut Random| {
        let most = 1 << random.below(10);
        if random.below(4) == 0 { random.below(most) } else { 0 }
    };
    until("all messages", || {
        for p in &mut programs {
            for (pauses, fills) in [(0, true), (1, false)] {
                let at = if fills { p.filled } else { p.emptied };
                let Some(message) = p.messages.get(at) else { continue };
                if p.pauses[pauses] > 0 {
                    p.pauses[pauses] -= 1;
                    continue;
                }
                let data = || pattern(message.seed, message.len);
                let done = if fills {
                    if let Some(chunk) = message.chunk {
                        p.filler.side.start(chunk).expect("start");
                    }
                    p.filler.put(message.slice, &data())
                } else {
                    if let Some(chunk) = message.chunk {
                        p.emptier.side.start(chunk).expect("start");
                    }
                    p.emptier.take(message.slice).is_some_and(|got| {
                        assert!(got == data(), "seed {seed}: pair {}, message {at} of {} bytes", p.n, message.len);
                        true
                    })
                };
                if done {
                    *if fills { &mut p.filled } else { &mut p.emptied } += 1;
                    p.pauses[pauses] = pause(&mut random);
                }
            }
        }
        programs.iter().all(|p| p.emptied == p.messages.len()).then_some(())
    });
    for proxy in [a, b] {
        proxy.stop().expect("stop");
        assert_eq!(proxy.error(), (RAILHEAD_OK, String::new()));
    }
    for Programs { n, send, recv, operations, messages, .. } in &programs {
        let sum: u64 = messages.iter().map(|message| message.len as u64).sum();
        for connector in [send, recv] {
            let state = connector.state();
            let expected = (operations.len() as u64, messages.len() as u64, sum);
            assert_eq!((state.operations, state.messages, state.bytes), expected, "seed {seed}: pair {n}");
        }
    }
    a.destroy().expect("destroy");
    b.destroy().expect("destroy");
}

fn dump(_: &Ctx) {
    let proxy = Proxy::new();
    let config = slots(1024);
    let pairs: Vec<_> = (0..3).map(|_| pair(proxy, proxy, &config)).collect();
    for (send, recv) in &pairs {
        for _ in 0..3 {
            send.append(&operation(4, 2, 4, SIMPLE)).expect("append");
            recv.append(&operation(4, 2, 4, SIMPLE)).expect("append");
        }
    }
    proxy.group_start().expect("group");
    pairs[0].0.append(&operation(7, 1, 1, SIMPLE)).expect("append");
    proxy.start().expect("start");
    // The first has sent one of two messages, which nobody has taken; the others have nothing to send.
    let mut filler = pairs[0].0.producer();
    assert!(filler.put(2, &[7; 2000]));
    let text =
        until("the first message", || Some(proxy.dump()).filter(|text| text.contains("2 posted, 2 done") && text.contains("idle for")));
    let count = |part: &str| text.matches(part).count();
    assert!(text.starts_with("railhead-proxy: running, 19 operations\n"), "{text}");
    assert_eq!(count("\n`-> [connector"), 12, "{text}");
    assert_eq!((count("send 4 steps of SIMPLE, 2 a slice"), count("receive 4 steps of SIMPLE, 2 a slice")), (9, 9), "{text}");
    assert_eq!(count("waits for the local producer to fill a step"), 3, "{text}");
    assert_eq!(count("waits for the peer to send"), 3, "{text}");
    assert_eq!(count("(ring: head 2, tail 2)"), 1, "{text}");
    assert_eq!(count("held"), 1, "{text}");
    // Too little room is filled as far as it goes.
    let mut little = [b'x' as std::ffi::c_char; 20];
    // SAFETY: room for as many bytes.
    let status = unsafe { railhead::abi::proxy::railhead_proxy_dump(proxy.0, little.as_mut_ptr(), little.len(), std::ptr::null_mut()) };
    assert_eq!((status, little.map(|c| c as u8).as_slice()), (RAILHEAD_OK, &b"railhead-proxy: run\0"[..]));
    // What is not done cannot be closed; whoever destroys the proxy closes it all.
    assert_eq!(pairs[1].0.close(), Err(RAILHEAD_USAGE));
    proxy.destroy().expect("destroy");
    assert_eq!(pairs[1].0.close(), Err(RAILHEAD_INTERNAL));
    assert_eq!(proxy.start(), Err(RAILHEAD_INTERNAL));
    assert_eq!(proxy.destroy(), Err(RAILHEAD_INTERNAL));
}

/// Both ends and their programs in one thread, which makes the engine's steps, so that a million take seconds.
fn a_million(_: &Ctx) {
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;

    use railhead::abi::table::Table;
    use railhead::engine::{Options, Step};
    use railhead::proxy::args::Steps;
    use railhead::proxy::connector::{self, Direction};
    use railhead::proxy::net::Net;
    use railhead::proxy::ring::{Consumer, Geometry, Producer, Ring};

    const OPERATIONS: u64 = 1_000_000;
    const BATCH: u64 = 8;
    let plugin = support::plugin::Plugin::load(12);
    // SAFETY: a v12 table of a library that stays loaded.
    let table = unsafe { Table::new(plugin.table(), std::ptr::null_mut(), None) }.expect("a table");
    let start = u64::MAX - OPERATIONS / 2;
    let proxy = railhead::proxy::Proxy::stepped(Arc::new(table), Options { first_op_count: start, ..Options::default() });
    let (listener, mut handle) = proxy.net().listen(0).expect("listen");
    let (mut to, mut from) = (None, None);
    until("a connection", || {
        to = to.take().or_else(|| proxy.net().connect(0, &mut handle).expect("connect"));
        from = from.take().or_else(|| proxy.net().accept(&listener).expect("accept"));
        (to.is_some() && from.is_some()).then_some(())
    });
    proxy.net().close_listen(listener).expect("closeListen");
    let ring = || Arc::new(Ring::private(Geometry::new([0, 0, 8 * 1024]).expect("a geometry"), start).expect("a ring"));
    let made = [(Direction::Send, to), (Direction::Recv, from)].map(|(direction, comm)| {
        proxy.connect(direction, comm.expect("a comm"), ring(), connector::Options::default()).expect("a connector")
    });
    let [send, recv] = &made;
    let (mut producer, mut consumer) = (Producer::new(send.connector().ring().clone()), Consumer::new(recv.connector().ring().clone()));
    for batch in 0..OPERATIONS / BATCH {
        for n in 0..BATCH {
            for (side, connector) in (0..).zip(&made) {
                let count = proxy.append(connector, Steps::simple(1)).expect("append");
                assert_eq!(count, start.wrapping_add(2 * (batch * BATCH + n) + side));
            }
            assert!(producer.has_room(1).expect("a valid ring"));
            producer.post(1, 0);
        }
        proxy.engine().start().expect("start");
        let empty = (0..100_000_000).any(|_| proxy.engine().step().expect("a step") == Step::Empty);
        assert!(empty, "a batch that does not end");
        for _ in 0..BATCH {
            assert_eq!(consumer.filled(1, 1024).expect("a valid ring"), Some(0));
            consumer.release(1);
        }
    }
    for connector in &made {
        let counters = connector.connector().counters();
        let counts = [&counters.operations, &counters.messages, &counters.bytes, &counters.flushes].map(|count| count.load(Relaxed));
        assert_eq!(counts, [OPERATIONS, OPERATIONS, 0, 0]);
        assert_eq!(connector.connector().step(), OPERATIONS / 2 - 1, "the counters wrapped");
    }
    let counters = proxy.counters();
    assert_eq!(counters.done, 2 * OPERATIONS);
    assert!(counters.steps >= counters.done);
    assert_eq!((producer.step(), consumer.step()), (OPERATIONS / 2 - 1, OPERATIONS / 2 - 1));
    for connector in made {
        proxy.detach(&connector).expect("detach");
        connector.close().expect("close");
    }
}

fn zero_bytes(_: &Ctx) {
    const BATCH: u64 = 1000;
    let rounds = support::repeats(20, 100) as u64;
    let (a, b) = (Proxy::new(), Proxy::new());
    let (send, recv) = pair(a, b, &railhead_connector_config_t { first_step: u64::MAX - rounds * BATCH / 2, ..slots(1024) });
    let (mut filler, mut emptier) = (send.producer(), recv.consumer());
    for round in 0..rounds {
        for _ in 0..BATCH {
            send.append(&operation(1, 1, 1, SIMPLE)).expect("append");
            recv.append(&operation(1, 1, 1, SIMPLE)).expect("append");
        }
        a.start().expect("start");
        b.start().expect("start");
        let (mut filled, mut emptied) = (0, 0);
        until("a round", || {
            if filled < BATCH && filler.put(1, &[]) {
                filled += 1;
            }
            if let Some(data) = emptier.take(1) {
                assert!(data.is_empty());
                emptied += 1;
            }
            (emptied == BATCH).then_some(())
        });
        until("the operations", || (recv.state().operations == (round + 1) * BATCH).then_some(()));
    }
    a.stop().expect("stop");
    b.stop().expect("stop");
    assert_eq!((send.state().operations, send.state().bytes), (rounds * BATCH, 0));
    a.destroy().expect("destroy");
    b.destroy().expect("destroy");
}

fn stop_and_abort(_: &Ctx) {
    let (a, b) = (Proxy::new(), Proxy::new());
    let (send, recv) = pair(a, b, &slots(1024));
    send.append(&operation(30, 1, 1, SIMPLE)).expect("append");
    recv.append(&operation(40, 1, 1, SIMPLE)).expect("append");
    a.start().expect("start");
    b.start().expect("start");
    // Asked to stop before anything was produced: it waits for all that was started.
    let stopping = thread::spawn(move || a.stop());
    stream(send, recv, 5, 30, 1, 1);
    stopping.join().unwrap().expect("stop");
    assert_eq!((send.state().operations, a.state().ended, a.state().failed), (1, 1, 0));
    assert_eq!(send.append(&operation(1, 1, 1, SIMPLE)), Err(RAILHEAD_USAGE));
    assert_eq!(a.start(), Err(RAILHEAD_USAGE));
    // The other still waits for 10 steps.
    assert_eq!(b.state().ended, 0);
    b.abort().expect("abort");
    assert_eq!((b.state().ended, recv.state().operations, recv.state().messages), (1, 0, 30));
    // After the end even what is not done can be closed.
    recv.close().expect("close");
    send.close().expect("close");
    a.destroy().expect("destroy");
    b.destroy().expect("destroy");
}

fn a_lie(_: &Ctx) {
    let (a, b) = (Proxy::new(), Proxy::new());
    let (good, _) = pair(a, b, &slots(1024));
    let (send, recv) = pair(a, b, &slots(1024));
    good.append(&operation(1, 1, 1, SIMPLE)).expect("append");
    let bad = send.append(&operation(1, 1, 1, SIMPLE)).expect("append");
    recv.append(&operation(1, 1, 1, SIMPLE)).expect("append");
    // SAFETY: the control words, all atomics.
    let words = unsafe { &*send.place().control.cast::<railhead::proxy::ring::Control>() };
    words.recv_mem.sizes_fifo[0].store(1025, std::sync::atomic::Ordering::Relaxed);
    words.recv_mem.tail.store(1, std::sync::atomic::Ordering::Release);
    a.start().expect("start");
    b.start().expect("start");
    until("the end", || (a.state().failed == 1 && a.state().ended == 1).then_some(()));
    let (status, words) = a.error();
    assert_eq!(status, RAILHEAD_USAGE);
    assert!(words.contains(&format!("operation {bad} of connector 1: ")) && words.contains("1025 bytes"), "{words}");
    // Every further call says so.
    assert_eq!(good.append(&operation(1, 1, 1, SIMPLE)), Err(RAILHEAD_USAGE));
    assert_eq!((a.start(), a.stop()), (Err(RAILHEAD_USAGE), Err(RAILHEAD_USAGE)));
    assert!(a.dump().contains("failed: operation"), "{}", a.dump());
    // The other engine of the process goes on.
    assert_eq!((b.state().failed, b.state().ended), (0, 0));
    a.destroy().expect("destroy");
    b.destroy().expect("destroy");
}

/// Rank 0 sends to rank 1 until that is killed.
fn peer_dies(ctx: &Ctx) {
    let proxy = Proxy::new();
    let config = slots(4096);
    if ctx.rank == 1 {
        let (listener, handle) = proxy.listen();
        ctx.to(0).send(&handle).expect("rank 0");
        let recv = until("a peer", || accept(listener, &config).expect("accept"));
        recv.append(&operation(1 << 40, 1, 1, SIMPLE)).expect("append");
        proxy.start().expect("start");
        let mut emptier = recv.consumer();
        loop {
            until("data", || emptier.take(1));
        }
    }
    let mut handle: [u8; 128] = ctx.to(1).recv().try_into().expect("a handle");
    let send = until("rank 1", || proxy.connect(&mut handle, &config).expect("connect"));
    send.append(&operation(1 << 40, 1, 1, SIMPLE)).expect("append");
    proxy.start().expect("start");
    let mut filler = send.producer();
    let mut said = false;
    until("the end", || {
        filler.put(1, &[1; 4096]);
        if !said && send.state().messages > 100 {
            ctx.say("streaming");
            said = true;
        }
        (proxy.state().failed == 1).then_some(())
    });
    let (status, words) = proxy.error();
    assert_eq!(status, RAILHEAD_NETWORK, "{words}");
    assert!(words.starts_with("operation 0 of connector 0: ") && words.contains(" of plugin Railhead: "), "{words}");
    ctx.say("told");
    proxy.destroy().expect("destroy");
}

/// Rank 1 only maps rank 0's ring and fills it.
fn producer_dies(ctx: &Ctx) {
    if ctx.rank == 1 {
        let text = ctx.to(0).text();
        let (path, bytes) = text.split_once(' ').expect("path and bytes");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("the ring");
        let map = memmap2::MmapRaw::map_raw(&file).expect("mmap");
        assert_eq!(map.len(), bytes.parse::<usize>().expect("bytes"));
        // SAFETY: control words, all atomics, at the start of the mapping.
        let words = unsafe { &*map.as_mut_ptr().cast::<railhead::proxy::ring::Control>() };
        let mut producer = railhead::proxy::ring::Producer::new(words);
        let mut n = 0;
        loop {
            // Nobody takes them while the proxy has no operation.
            if producer.has_room(1).expect("a valid ring") {
                producer.post(1, 8 * n);
                n += 1;
                if n == 8 {
                    ctx.to(0).send(b"full").expect("rank 0");
                }
            }
        }
    }
    let proxy = Proxy::new();
    let config = railhead_connector_config_t { home: 2, ..slots(1024) };
    let (send, recv) = pair(proxy, proxy, &config);
    let place = send.place();
    // SAFETY: a C string in the structure.
    let path = unsafe { std::ffi::CStr::from_ptr(place.path.as_ptr()) }.to_str().expect("a path");
    ctx.to(1).send(format!("{path} {}", place.mapped_bytes).as_bytes()).expect("rank 1");
    assert_eq!(ctx.to(1).recv(), b"full");
    ctx.say("full");
    assert_eq!(ctx.parent.recv(), b"dead");
    // What it left is sent; then the proxy waits for it, and says so.
    for connector in [send, recv] {
        connector.append(&operation(10, 1, 1, SIMPLE)).expect("append");
    }
    proxy.start().expect("start");
    let mut emptier = recv.consumer();
    for n in 0..8 {
        assert_eq!(until("data", || emptier.take(1)).len(), 8 * n);
    }
    until("the proxy to wait", || proxy.dump().contains("8 posted, 8 done; waits for the local producer to fill a step").then_some(()));
    assert_eq!((proxy.state().failed, proxy.state().ended), (0, 0));
    // Another producer takes over where it was.
    let mut filler = send.producer();
    assert!(filler.put(1, &[1; 100]) && filler.put(1, &[2; 200]));
    for len in [100, 200] {
        assert_eq!(until("data", || emptier.take(1)).len(), len);
    }
    until("the end", || (send.state().operations == 1 && recv.state().operations == 1).then_some(()));
    send.close().expect("close");
    recv.close().expect("close");
    proxy.destroy().expect("destroy");
    ctx.say("done");
}

/// What comes from C and makes no sense, and what the caller supplies.
fn misuse(_: &Ctx) {
    use std::ptr::{null, null_mut, without_provenance_mut};

    use railhead::abi::connector::*;
    use railhead::abi::proxy::*;
    use railhead::abi::status::railhead_status_t;

    let proxy = Proxy::new();
    let (send, recv) = pair(proxy, proxy, &slots(1024));
    let closed = Proxy::new();
    closed.destroy().expect("destroy");
    // NULL, 0x1, an address, a handle of another kind, one that is closed.
    let bad_proxies = [0, 1, &raw const proxy as usize, send.0 as usize, closed.0 as usize];
    for bad in bad_proxies.map(|bad| Proxy(without_provenance_mut(bad))) {
        let calls = [bad.start(), bad.stop(), bad.abort(), bad.group_start(), bad.group_end()];
        assert_eq!(calls, [Err(RAILHEAD_INTERNAL); 5]);
        assert_eq!(bad.error().0, RAILHEAD_INTERNAL);
        assert!(bad.0.is_null() || bad.destroy() == Err(RAILHEAD_INTERNAL));
        assert_eq!(bad.connect(&mut [0; 128], &config()), Err(RAILHEAD_INTERNAL));
    }
    assert_eq!(Proxy(null_mut()).destroy(), Ok(()));
    for bad in [0, 1, proxy.0 as usize, closed.0 as usize].map(|bad| Connector(without_provenance_mut(bad))) {
        assert_eq!((bad.close(), bad.append(&operation(1, 1, 1, SIMPLE))), (Err(RAILHEAD_INTERNAL), Err(RAILHEAD_INTERNAL)));
        assert_eq!(accept(bad.0.cast(), &config()), Err(RAILHEAD_INTERNAL));
        assert_eq!(railhead_listener_close(bad.0.cast()), RAILHEAD_INTERNAL);
    }
    // SAFETY: NULL, or what the functions check.
    unsafe {
        let internal = |status: railhead_status_t| assert_eq!(status, RAILHEAD_INTERNAL);
        internal(railhead_proxy_create(null(), null(), null_mut()));
        internal(railhead_proxy_create(null(), without_provenance_mut(3), null_mut()));
        internal(railhead_proxy_state(proxy.0, null_mut()));
        internal(railhead_proxy_dump(proxy.0, null_mut(), 1, null_mut()));
        internal(railhead_proxy_listen(proxy.0, 0, null_mut(), null_mut()));
        internal(railhead_proxy_connect(proxy.0, 0, null_mut(), null(), null_mut()));
        internal(railhead_proxy_send_over(proxy.0, null_mut(), null(), &mut null_mut()));
        internal(railhead_proxy_recv_over(proxy.0, without_provenance_mut(1), null(), &mut null_mut()));
        internal(railhead_connector_ring(send.0, null_mut()));
        internal(railhead_connector_state(send.0, null_mut()));
        internal(railhead_connector_append(send.0, null(), null_mut()));
        assert_eq!(railhead_proxy_dump(proxy.0, null_mut(), 0, null_mut()), RAILHEAD_OK);
    }
    let size = size_of::<railhead_proxy_config_t>();
    let own =
        railhead_proxy_config_t { size, context: null_mut(), logger: None, cpus: null(), max_operations: 0, idle_sleep_us: 0, reserved: 0 };
    for bad in [railhead_proxy_config_t { size: size - 8, ..own }, railhead_proxy_config_t { cpus: c"0-9999".as_ptr(), ..own }] {
        assert_eq!(Proxy::over(null(), &bad).err(), Some(RAILHEAD_USAGE));
    }
    // A table of zeros lacks all functions.
    assert_eq!(Proxy::over([0usize; 22].as_ptr().cast(), &own).err(), Some(RAILHEAD_USAGE));

    let wrong = [
        railhead_connector_config_t { size: 8, ..config() },
        railhead_connector_config_t { home: 4, ..config() },
        railhead_connector_config_t { memory: 3, ..config() },
        railhead_connector_config_t { memory: 2, ..config() },
        railhead_connector_config_t { simple_bytes: 1000, ..config() },
        railhead_connector_config_t { ll_bytes: 2 << 30, ..config() },
    ];
    for config in wrong {
        let (listener, mut handle) = proxy.listen();
        assert_eq!(proxy.connect(&mut handle, &config), Err(RAILHEAD_USAGE));
        assert_eq!(accept(listener, &config), Err(RAILHEAD_USAGE));
        assert_eq!(railhead_listener_close(listener), RAILHEAD_OK);
    }
    let steps = [(0, 1, 1, 2), (3, 2, 2, 2), (1, 3, 3, 2), (2, 2, 1, 2), (1, 1, 16, 2), (1, 1, 1, 3), (1 << 63, 1, 1, 2)];
    for (steps, slice, chunk, protocol) in steps {
        assert_eq!(send.append(&operation(steps, slice, chunk, protocol)), Err(RAILHEAD_USAGE), "{steps} {slice} {chunk}");
    }
    assert_eq!(proxy.group_end(), Err(RAILHEAD_USAGE));
    send.close().expect("close");
    recv.close().expect("close");
    proxy.destroy().expect("destroy");

    // Few operations at a time.
    let few =
        Proxy::over(null(), &railhead_proxy_config_t { max_operations: 2, idle_sleep_us: 50, cpus: c"".as_ptr(), ..own }).expect("a proxy");
    let (send, _) = pair(few, few, &slots(1024));
    let appended = [(); 3].map(|()| send.append(&operation(1, 1, 1, SIMPLE)));
    assert_eq!(appended, [Ok(0), Ok(1), Err(RAILHEAD_USAGE)]);
    few.destroy().expect("destroy");
}

#[test]
fn invalid_arguments_from_c_are_refused_and_do_no_harm() {
    World::new("misuse", 1).env("RAILHEAD_SOCKET_IFNAME", "=lo").spawn().finish();
}

/// Comms of the program's own, made through the plugin's table, and memory of its own.
fn supplied(ctx: &Ctx) {
    let plugin = support::plugin::Plugin::start(12);
    let (send_comm, recv_comm) = support::comms::both_ways(ctx, &plugin, 0).expect("comms");
    // The table of the library that the comms are of.
    let proxy = Proxy::over(plugin.table(), std::ptr::null()).expect("a proxy");
    let mut memory = [(); 2].map(|()| support::comms::Mem::new(512 + 8 * 1024 + 128));
    let mut made = Vec::new();
    for (memory, comm, sends) in memory.iter_mut().zip([(send_comm, true), (recv_comm, false)]).map(|(m, (c, s))| (m, c, s)) {
        let at = memory.ptr(0).addr().next_multiple_of(128) - memory.ptr(0).addr();
        let config = railhead_connector_config_t {
            home: 3,
            memory: 1,
            control: memory.ptr(at).cast(),
            data: memory.ptr(at + 512).cast(),
            ll_bytes: 0,
            ll128_bytes: 0,
            ..slots(1024)
        };
        made.push(proxy.adopt(comm.0, sends, &config).expect("a connector"));
    }
    for connector in &made {
        connector.append(&operation(30, 1, 1, SIMPLE)).expect("append");
    }
    proxy.start().expect("start");
    let (mut filler, mut emptier) = (made[0].producer(), made[1].consumer());
    let (mut filled, mut emptied) = (0, 0);
    let data = |rank: usize, n: usize| pattern((rank * 100 + n) as u64, n * 33);
    until("both ways", || {
        if filled < 30 && filler.put(1, &data(ctx.rank, filled)) {
            filled += 1;
        }
        if let Some(got) = emptier.take(1) {
            assert!(got == data(1 - ctx.rank, emptied), "message {emptied}");
            emptied += 1;
        }
        (filled == 30 && emptied == 30).then_some(())
    });
    proxy.stop().expect("stop");
    proxy.destroy().expect("destroy");
    // The comms are the program's still.
    ctx.barrier();
    plugin.close_send(send_comm).expect("closeSend");
    plugin.close_recv(recv_comm).expect("closeRecv");
}

#[test]
fn comms_and_memory_of_the_callers_own() {
    World::new("supplied", 2).env("RAILHEAD_SOCKET_IFNAME", "=lo").spawn().finish();
}
