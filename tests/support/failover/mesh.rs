//! Ranks of a mesh whose rails fail under them: roles of the library's tests, and of those in the virtual machine.

use std::time::Duration;

use railhead::base::config::{Config, Debug};
use railhead::base::mem::UserMemory;
use railhead::base::stats::RailCounter;
use railhead::mesh::{Algorithm, DataType, Device, Mesh, Op, Options, Reduction, UnboundBuffer};
use railhead::store::FileStore;

use crate::support::{Ctx, PATIENCE, holdings, until};

/// Bytes of what is long.
pub const LEN: usize = 300_000;
const SUM: Reduction = Reduction::Of(DataType::U8, Op::Sum);

/// This rank's end, on RHT_DEVICE, of a mesh that meets in the file RHT_STORE.
pub fn connected(ctx: &Ctx) -> Mesh {
    let device = Device::open(Config::from_env_or(Debug::None), &variable("RHT_DEVICE")).expect("a device");
    let mesh = Mesh::new(device, ctx.rank, 2).expect("a mesh");
    mesh.connect(&FileStore::new(variable("RHT_STORE"), None).expect("a store"), PATIENCE).expect("connected");
    mesh
}

/// What is done with the other rank again and again.
pub fn work<'a>(ctx: &'a Ctx, mesh: &'a Mesh) -> impl FnMut() + 'a {
    let (mut numbers, mut from, mut to) = (vec![0; LEN], vec![0; LEN], vec![0; LEN]);
    let mut round = 0u8;
    move || {
        round = round.wrapping_add(1);
        for len in [8, LEN] {
            let mine = |rank: usize| move |i: usize| (i + rank) as u8 ^ round;
            (0..len).for_each(|i| numbers[i] = mine(ctx.rank)(i));
            mesh.allreduce(memory(&mut numbers[..len]), SUM, options(PATIENCE)).expect("allreduce");
            assert!((0..len).all(|i| numbers[i] == mine(0)(i).wrapping_add(mine(1)(i))), "sums of {len} in round {round}");
            (0..len).for_each(|i| from[i] = mine(ctx.rank)(i));
            let (out, into) = (memory(&mut from[..len]), memory(&mut to[..len]));
            let [out, into] = [out, into].map(|memory| UnboundBuffer::new(mesh, memory).expect("a buffer"));
            into.recv(&[1 - ctx.rank], 7, 0, None).expect("recv");
            out.send(1 - ctx.rank, 7, 0, None).expect("send");
            into.wait_recv(PATIENCE).expect("a message");
            out.wait_send(PATIENCE).expect("sent");
            drop((out, into));
            assert!((0..len).all(|i| to[i] == mine(1 - ctx.rank)(i)), "a message of {len} in round {round}");
        }
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

fn options(timeout: Duration) -> Options {
    Options { tag: 0, timeout, algorithm: Algorithm::Auto }
}

fn memory(bytes: &mut [u8]) -> UserMemory {
    // SAFETY: bytes of a rank's, which outlive its mesh and everything on it.
    unsafe { UserMemory::new(bytes.as_mut_ptr(), bytes.len()) }
}

/// Whether both ranks say so.
pub fn both_say(mesh: &Mesh, what: bool) -> bool {
    let mut both = [u8::from(what); 8];
    mesh.allreduce(memory(&mut both), SUM, options(PATIENCE)).expect("allreduce");
    both[0] == 2
}

/// Of all links of this process.
pub fn count(counter: RailCounter) -> u64 {
    holdings::rail_sum(std::process::id() as i32, counter)
}

/// Works with the other rank while one rail after the other fails and comes back, and says when each pair has noticed.
pub fn carries_on(ctx: &Ctx) {
    let mesh = connected(ctx);
    let mut work = work(ctx, &mesh);
    let rounds = variable("RHT_ROUNDS").parse().expect("a number");
    for _ in 0..rounds {
        for (counter, said) in [(RailCounter::Failures, "down"), (RailCounter::Reconnects, "up")] {
            let before = count(counter);
            ctx.say("ready");
            assert_eq!(ctx.parent.text(), said);
            until(said, || {
                work();
                both_say(&mesh, count(counter) > before).then_some(())
            });
        }
    }
    work();
}
