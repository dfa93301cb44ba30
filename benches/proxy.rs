//! What the proxy costs: `make bench-proxy`. Two processes stream 512 KiB steps over shared memory, once by the plugin's own isend, irecv and test, 8
//! outstanding; once through a proxy each. One busy thread each, either way: the programs at the rings, which post and release steps and touch no data,
//! take their turns between the proxy's steps, as kernels of a GPU cost the CPU nothing. The two ways take turns, and each round's ratio is of
//! neighbours.

#[path = "../tests/support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use railhead::abi::table::Table;
use railhead::engine::{self, Progress, Step};
use railhead::proxy::Proxy;
use railhead::proxy::args::Steps;
use railhead::proxy::connector::{Direction, Options};
use railhead::proxy::net::{Handle, Net};
use railhead::proxy::ring::{Consumer, Geometry, Producer, Ring};
use support::comms::{self, Mem};
use support::plugin::{Opaque, Plugin};
use support::{Ctx, World, until};

const STEP: usize = 512 << 10;
const STEPS: u64 = 4000;
const DEPTH: u64 = 8;
const ROUNDS: usize = 9;
/// Wanted: so much of the plugin's own throughput.
const TARGET: f64 = 0.95;

fn main() -> ExitCode {
    support::enter(&[("direct", direct), ("through_proxy", through_proxy)]);
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let (direct, proxy) = (throughput("direct"), throughput("through_proxy"));
        println!("round {}: plugin {direct:.2} GB/s, proxy {proxy:.2} GB/s, ratio {:.3}", round + 1, proxy / direct);
        ratios.push(proxy / direct);
    }
    ratios.sort_by(f64::total_cmp);
    let median = ratios[ROUNDS / 2];
    let verdict = if median >= TARGET { "met" } else { "not met" };
    println!("proxy : plugin, {ROUNDS} rounds: {median:.3} ({:.3}..{:.3}), wanted >= {TARGET}: {verdict}", ratios[0], ratios[ROUNDS - 1]);
    if median >= TARGET { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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
    until("the stream", || {
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
        let mut handle = Handle(ctx.to(1).recv().try_into().expect("a handle"));
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
    let link = proxy.connect(direction, comm, ring.clone(), Options::default()).expect("a connector");
    proxy.append(&link, Steps::simple(STEPS)).expect("append");
    ctx.barrier();
    let start = Instant::now();
    proxy.engine().start().expect("start");
    let (mut producer, mut consumer) = (Producer::new(ring.clone()), Consumer::new(ring));
    let mut programs = 0;
    until("the stream", || {
        let step = proxy.engine().step().expect("a step");
        if ctx.rank == 0 {
            while programs < STEPS && producer.has_room(1).expect("a ring without nonsense") {
                producer.post(1, STEP);
                programs += 1;
            }
        } else {
            while consumer.filled(1, STEP).expect("a ring without nonsense").is_some() {
                consumer.release(1);
                programs += 1;
            }
        }
        (programs == STEPS && step != Step::Turn(Progress::Idle) && link.connector().step() == STEPS).then_some(())
    });
    finish(ctx, start);
    proxy.detach(&link).expect("detach");
    link.close().expect("close");
}

fn finish(ctx: &Ctx, start: Instant) {
    if ctx.rank == 1 {
        ctx.say(&start.elapsed().as_secs_f64().to_string());
    }
    ctx.barrier();
}
