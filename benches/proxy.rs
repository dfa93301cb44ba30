//! What the proxy costs: `make bench-proxy`. Each figure is printed with what is wanted of it; one that is not met fails the run.
//!
//! * Throughput: two processes stream 512 KiB steps over shared memory, once by the plugin's own isend, irecv and test, 8 outstanding; once through a
//!   proxy each. One busy thread each, either way: the programs at the rings, which post and release steps and touch no data, take their turns between
//!   the proxy's steps, as kernels of a GPU cost the CPU nothing. The two ways take turns, and each round's ratio is of neighbours.
//! * Processor time of two proxies with a connection that have nothing to do.
//! * What a step costs where there are 1000 connectors and where there is one, over a network that does nothing, so that nothing hides it.
//! * How long a proxy that sleeps takes to have done what was started.

#[path = "../tests/support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use railhead::abi::table::Table;
use railhead::base::error::Result;
use railhead::engine::{self, Progress, Step};
use railhead::proxy::args::Steps;
use railhead::proxy::connector::{Direction, Options};
use railhead::proxy::net::{Buffer, Comm, ListenHandle, Mr, Net, NetRequest};
use railhead::proxy::ring::{Consumer, Geometry, Producer, Ring};
use railhead::proxy::{AttachedConnector, Proxy};
use support::comms::{self, Mem};
use support::plugin::{Opaque, Plugin};
use support::{Ctx, World, spin, until};

const STEP: usize = 512 << 10;
const STEPS: u64 = 4000;
const DEPTH: u64 = 8;
const ROUNDS: usize = 9;
/// Wanted: so much of the plugin's own throughput at least.
const TARGET: f64 = 0.95;

/// Wanted: so much processor time in `IDLE` at most.
const IDLE_TARGET: Duration = Duration::from_millis(10);
const IDLE: Duration = Duration::from_secs(10);
/// Wanted: so many times the cost of a step with one connector at most.
const CROWD_TARGET: f64 = 2.0;
const CROWD: usize = 1000;
const MESSAGES: u64 = 400_000;
const WAKE_UPS: usize = 2000;

fn main() -> ExitCode {
    support::enter(&[("direct", direct), ("through_proxy", through_proxy), ("idle", idle)]);
    let met = [crowd(), idle_time(), streaming()];
    wake_up();
    if met == [true; 3] { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "not met" }
}

/// Median, least and most.
fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

fn streaming() -> bool {
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let (direct, proxy) = (throughput("direct"), throughput("through_proxy"));
        println!("round {}: plugin {direct:.2} GB/s, proxy {proxy:.2} GB/s, ratio {:.3}", round + 1, proxy / direct);
        ratios.push(proxy / direct);
    }
    let (median, least, most) = spread(ratios);
    let met = median >= TARGET;
    println!("proxy : plugin, {ROUNDS} rounds: {median:.3} ({least:.3}..{most:.3}), wanted >= {TARGET}: {}", verdict(met));
    met
}

/// A network on which everything is complete at once.
struct Nothing;

impl Net for Nothing {
    fn isend(&self, _: &Comm, _: Buffer, _: i32, _: &Mr) -> Result<Option<NetRequest>> {
        // SAFETY: this network takes any number for anything.
        Ok(Some(unsafe { NetRequest::new(1) }))
    }

    fn irecv(&self, _: &Comm, _: Buffer, _: i32, _: &Mr) -> Result<Option<NetRequest>> {
        // SAFETY: this network takes any number for anything.
        Ok(Some(unsafe { NetRequest::new(1) }))
    }

    fn iflush(&self, _: &Comm, _: Buffer, _: &Mr) -> Result<Option<NetRequest>> {
        Ok(None)
    }

    fn test(&self, request: &mut Option<NetRequest>) -> Result<Option<usize>> {
        *request = None;
        Ok(Some(0))
    }

    fn listen(&self, _: i32) -> Result<(Comm, ListenHandle)> {
        // SAFETY: this network takes any number for anything.
        Ok((unsafe { Comm::new(1) }, ListenHandle::default()))
    }

    fn connect(&self, _: i32, _: &mut ListenHandle) -> Result<Option<Comm>> {
        // SAFETY: this network takes any number for anything.
        Ok(Some(unsafe { Comm::new(1) }))
    }

    fn accept(&self, _: &Comm) -> Result<Option<Comm>> {
        Ok(None)
    }

    fn reg_mr(&self, _: &Comm, _: Buffer, _: bool) -> Result<Mr> {
        // SAFETY: this network takes any number for anything.
        Ok(unsafe { Mr::new(1) })
    }

    fn dereg_mr(&self, _: &Comm, _: Mr) -> Result<()> {
        Ok(())
    }

    fn close_send(&self, _: Comm) -> Result<()> {
        Ok(())
    }

    fn close_recv(&self, _: Comm) -> Result<()> {
        Ok(())
    }

    fn close_listen(&self, _: Comm) -> Result<()> {
        Ok(())
    }
}

fn make_connectors(proxy: &Proxy<Nothing>, count: usize) -> Vec<AttachedConnector<Nothing>> {
    let connector = || {
        let comm = proxy.net().connect(0, &mut ListenHandle::default()).expect("connect").expect("a comm");
        let ring = Arc::new(Ring::private(Geometry::new([0, 0, 8192]).expect("a geometry"), 0).expect("a ring"));
        proxy.connect(Direction::Send, comm, ring, Options::default()).expect("a connector")
    };
    (0..count).map(|_| connector()).collect()
}

/// Nanoseconds that a message of the last connector takes; the others have no operation, or one that waits for its producer.
fn message_cost(count: usize, others_wait: bool, messages: u64) -> f64 {
    let proxy = Proxy::stepped(Arc::new(Nothing), engine::Options::default());
    let connectors = make_connectors(&proxy, count);
    let (active, others) = connectors.split_last().expect("one");
    for other in others.iter().filter(|_| others_wait) {
        proxy.append(other, Steps::simple(1)).expect("append");
    }
    proxy.append(active, Steps::simple(messages)).expect("append");
    let mut producer = Producer::new(active.connector().ring().clone());
    proxy.engine().start().expect("start");
    let lap = if others_wait { count } else { 1 };
    let start = Instant::now();
    while active.connector().step() != messages {
        while producer.step() != messages && producer.has_room(1).expect("a valid ring") {
            producer.post(1, 0);
        }
        for _ in 0..lap {
            proxy.engine().step().expect("a step");
        }
    }
    start.elapsed().as_nanos() as f64 / messages as f64
}

fn crowd() -> bool {
    let (mut ratios, mut waiting, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (one, many) = (message_cost(1, false, MESSAGES), message_cost(CROWD, false, MESSAGES));
        ratios.push(many / one);
        costs.push(one);
        // Eight messages in a lap.
        let lap = 8.0 * message_cost(CROWD, true, MESSAGES / 100);
        waiting.push((lap - 8.0 * one) / (CROWD - 1) as f64);
    }
    let (cost, least, most) = spread(costs);
    println!("a message of no bytes through one of 1 connectors, {ROUNDS} rounds: {cost:.0} ns ({least:.0}..{most:.0})");
    let (step, least, most) = spread(waiting);
    println!("a step of an operation that waits, {ROUNDS} rounds: {step:.0} ns ({least:.0}..{most:.0})");
    let (ratio, least, most) = spread(ratios);
    let met = ratio < CROWD_TARGET;
    println!(
        "1 active of {CROWD} connectors : 1 of 1, {ROUNDS} rounds: {ratio:.3} ({least:.3}..{most:.3}), wanted < {CROWD_TARGET}: {}",
        verdict(met)
    );
    met
}

fn wake_up() {
    let proxy = Proxy::new(Arc::new(Nothing), engine::Options::default()).expect("a proxy");
    let connectors = make_connectors(&proxy, 1);
    let mut producer = Producer::new(connectors[0].connector().ring().clone());
    let mut times = Vec::new();
    for n in 1..=WAKE_UPS as u64 {
        until("sleep", || proxy.engine().is_asleep().then_some(()));
        producer.post(1, 0);
        proxy.append(&connectors[0], Steps::simple(1)).expect("append");
        let start = Instant::now();
        proxy.engine().start().expect("start");
        while connectors[0].connector().step() != n {
            std::hint::spin_loop();
        }
        times.push(start.elapsed().as_nanos() as f64 / 1e3);
    }
    let (median, least, most) = spread(times);
    println!("start to done, from sleep, {WAKE_UPS} times: {median:.1} us ({least:.1}..{most:.1})");
}

fn idle_time() -> bool {
    let mut world = World::new("idle", 1).env("RAILHEAD_SOCKET_IFNAME", "=lo").spawn();
    let micros: u64 = world.hear(0).parse().expect("microseconds");
    world.finish();
    let met = micros < IDLE_TARGET.as_micros() as u64;
    println!(
        "processor time of two idle proxies in {} s: {:.3} ms, wanted < {} ms: {}",
        IDLE.as_secs(),
        micros as f64 / 1e3,
        IDLE_TARGET.as_millis(),
        verdict(met)
    );
    met
}

/// User and system time of this process so far, in microseconds.
fn processor_time() -> u64 {
    // SAFETY: zero is a value of each of its members, and the call fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage
    };
    [usage.ru_utime, usage.ru_stime].iter().map(|time| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64).sum()
}

fn idle(ctx: &Ctx) {
    use support::proxy::{Proxy, SIMPLE, operation, pair, slots};
    let (a, b) = (Proxy::new(), Proxy::new());
    let (send, recv) = pair(a, b, &slots(1024));
    send.append(&operation(1, 1, 1, SIMPLE)).expect("append");
    recv.append(&operation(1, 1, 1, SIMPLE)).expect("append");
    a.start().expect("start");
    b.start().expect("start");
    assert!(send.producer().put(1, &[1; 100]));
    let mut emptier = recv.consumer();
    until("the message", || emptier.take(1));
    until("sleep", || (a.state().asleep == 1 && b.state().asleep == 1).then_some(()));
    let before = processor_time();
    std::thread::sleep(IDLE);
    let after = processor_time();
    ctx.say(&(after - before).to_string());
    a.destroy().expect("destroy");
    b.destroy().expect("destroy");
}

/// GB/s that the receiver saw.
fn throughput(role: &'static str) -> f64 {
    let mut world = World::new(role, 2).env("RAILHEAD_SOCKET_IFNAME", "=lo").env("RAILHEAD_SOFT_WIRE", "shm").spawn();
    let seconds: f64 = world.hear(1).parse().expect("seconds");
    world.finish();
    STEPS as f64 * STEP as f64 / seconds / 1e9
}

fn direct(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    let memory = Mem::new(STEP * DEPTH as usize);
    let comm = if ctx.rank == 0 { send } else { recv };
    let mr = plugin.reg_mr(comm, memory.ptr(0), memory.len()).expect("regMr");
    ctx.barrier();
    let start = Instant::now();
    let mut requests: [Option<Opaque>; DEPTH as usize] = [None; DEPTH as usize];
    let (mut posted, mut done) = (0, 0);
    spin("the stream", || {
        if posted < STEPS && posted - done < DEPTH {
            let slot = (posted % DEPTH) as usize;
            let at = memory.ptr(slot * STEP);
            requests[slot] = match ctx.rank {
                0 => plugin.isend(comm, at, STEP, 1, mr).expect("isend"),
                _ => plugin.irecv(comm, &[support::plugin::Buf { addr: at, len: STEP, tag: 1, mr }]).expect("irecv"),
            };
            posted += u64::from(requests[slot].is_some());
        }
        if done < posted
            && let Some(request) = requests[(done % DEPTH) as usize]
            && plugin.test(request).expect("test").is_some()
        {
            done += 1;
        }
        (done == STEPS).then_some(())
    });
    finish(ctx, start);
    plugin.dereg_mr(comm, mr).expect("deregMr");
}

fn through_proxy(ctx: &Ctx) {
    let plugin = Plugin::load(12);
    // SAFETY: a v12 table of a library that stays loaded. The other way is measured through the same.
    let table = unsafe { Table::new(plugin.table(), std::ptr::null_mut(), None) }.expect("a table");
    let proxy = Proxy::stepped(Arc::new(table), engine::Options::default());
    let comm = if ctx.rank == 0 {
        let mut handle = ListenHandle(ctx.to(1).recv().try_into().expect("a handle"));
        until("rank 1", || proxy.net().connect(0, &mut handle).expect("connect"))
    } else {
        let (listener, handle) = proxy.net().listen(0).expect("listen");
        ctx.to(0).send(&handle.0).expect("rank 0");
        let comm = until("rank 0", || proxy.net().accept(&listener).expect("accept"));
        proxy.net().close_listen(listener).expect("closeListen");
        comm
    };
    let direction = if ctx.rank == 0 { Direction::Send } else { Direction::Recv };
    let ring = Arc::new(Ring::private(Geometry::new([0, 0, STEP * DEPTH as usize]).expect("a geometry"), 0).expect("a ring"));
    let connector = proxy.connect(direction, comm, ring.clone(), Options::default()).expect("a connector");
    proxy.append(&connector, Steps::simple(STEPS)).expect("append");
    ctx.barrier();
    let start = Instant::now();
    proxy.engine().start().expect("start");
    let (mut producer, mut consumer) = (Producer::new(ring.clone()), Consumer::new(ring));
    let mut programs = 0;
    spin("the stream", || {
        let step = proxy.engine().step().expect("a step");
        if ctx.rank == 0 {
            while programs < STEPS && producer.has_room(1).expect("a valid ring") {
                producer.post(1, STEP);
                programs += 1;
            }
        } else {
            while consumer.filled(1, STEP).expect("a valid ring").is_some() {
                consumer.release(1);
                programs += 1;
            }
        }
        (programs == STEPS && step != Step::Stepped(Progress::Idle) && connector.connector().step() == STEPS).then_some(())
    });
    finish(ctx, start);
    proxy.detach(&connector).expect("detach");
    connector.close().expect("close");
}

fn finish(ctx: &Ctx, start: Instant) {
    if ctx.rank == 1 {
        ctx.say(&start.elapsed().as_secs_f64().to_string());
    }
    ctx.barrier();
}
