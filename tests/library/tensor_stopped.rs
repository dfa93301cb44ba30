//! A worker that is stopped while it writes a tensor to another's memory: what that one is told, when, and what becomes of the memory.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use railhead::base::mem::UserMemory;
use railhead::tensor::{Manager, State};

use super::mesh_faults::{memory, world};
use super::tensor_faults::{connected, key, step};
use crate::support::{Ctx, PATIENCE, Role};

pub const ROLES: &[(&str, Role)] = &[("tensor_is_written_to", is_written_to)];

/// Bytes of a tensor: many parts.
const LEN: usize = 4 << 20;
/// A worker that is quick copies a whole tensor alone.
const STEPS: u64 = 50;

/// Produces all that worker 0 may ask for.
fn produce(ctx: &Ctx, manager: &Manager, tensor: UserMemory) {
    manager.register(tensor).expect("registered");
    for id in 1..=STEPS {
        for edge in ["into", "more"] {
            step(manager, id).send_from(&key(ctx.rank, 0, edge), 1, &[LEN as i64], tensor, Box::new(|| ())).expect("produced");
        }
    }
    assert_eq!(ctx.parent.text(), "end");
}

/// How a receive of this edge has ended.
type Ended = (&'static str, Option<String>);

fn next(manager: &Manager, ended: &Receiver<Ended>) -> Ended {
    loop {
        match ended.try_recv() {
            Ok(one) => return one,
            Err(_) => assert!(manager.run(PATIENCE) > 0, "nothing has ended"),
        }
    }
}

/// Two threads close it, and another asks and runs what is due meanwhile.
fn close_beside_others(ctx: &Ctx, manager: &Manager) {
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                manager.close();
                ctx.say("closed");
            });
        }
        while manager.state() != State::Stopped {
            std::thread::yield_now();
        }
        // Longer than the others take until they know.
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(300) {
            assert_eq!(manager.state(), State::Stopped);
            manager.run(PATIENCE);
        }
        let why = step(manager, 1).recv(&key(2, 0, "more"), PATIENCE).expect_err("closed").to_string();
        assert!(why.contains("has closed its manager"), "{why}");
        ctx.say("its others go on");
    });
}

/// Worker 0 asks worker 1 for tensors, each second one into memory of its own, until it is told that one does not come; then worker 2; and then waits
/// for the rest of worker 1's, or closes its manager.
fn is_written_to(ctx: &Ctx) {
    let mut bytes = vec![ctx.rank as u8; 2 * LEN];
    let all = memory(&mut bytes);
    let manager = connected(ctx);
    if ctx.rank > 0 {
        return produce(ctx, &manager, all.part(0, LEN).expect("a part"));
    }
    let (ends, ended) = mpsc::channel();
    let ask = |id: u64| {
        let callback = |edge: &'static str| {
            let ends = ends.clone();
            move |result: railhead::base::error::Result<_>| ends.send((edge, result.err().map(|why| why.to_string()))).expect("heard")
        };
        let (step, into) = (step(&manager, id), all.part(id as usize % 2 * LEN, LEN).expect("a part"));
        step.recv_into_async(&key(1, 0, "into"), into, callback("into")).expect("asked");
        step.recv_async(&key(1, 0, "more"), callback("more")).expect("asked");
    };
    ask(1);
    let (mut asked, mut came) = (2, 0);
    let (edge, why) = (2..=STEPS)
        .find_map(|id| {
            ask(id);
            asked += 2;
            (0..2).find_map(|_| {
                let (edge, why) = next(&manager, &ended);
                came += 1;
                why.map(|why| (edge, why))
            })
        })
        .expect("a worker that stops");
    ctx.say(&format!("{edge}: {why}"));
    let tensor = step(&manager, 1).recv(&key(2, 0, "more"), PATIENCE).expect("a tensor");
    assert!(tensor.len() == LEN && tensor.bytes().iter().all(|byte| *byte == 2));
    ctx.say("the others go on");
    if std::env::var_os("RHT_CLOSES").is_some() {
        close_beside_others(ctx, &manager);
    }
    let rest: Vec<Ended> = (came..asked).map(|_| next(&manager, &ended)).collect();
    assert!(rest.iter().any(|(edge, _)| *edge == "into") && rest.iter().all(|(_, why)| why.is_some()), "{rest:?}");
    bytes.fill(0xAA);
    ctx.say("given back");
    assert_eq!(ctx.parent.text(), "end");
    manager.close();
    ctx.say(if bytes.iter().all(|&byte| byte == 0xAA) { "untouched" } else { "touched" });
}

/// Once RAILHEAD_PEER_TIMEOUT_S is over it is lost: what waits for it has its error, but for receives into memory that it may write to; others go on, also
/// while that memory holds up who closes the manager.
#[test]
fn a_worker_that_is_stopped_while_it_writes_holds_up_its_own_tensors_alone() {
    for (signal, closes) in [(libc::SIGCONT, false), (libc::SIGKILL, false), (libc::SIGCONT, true), (libc::SIGKILL, true)] {
        let folder = tempfile::tempdir().expect("a folder");
        let world = world("tensor_is_written_to", 3, folder.path(), "shm").env("RHT_MODE", "direct");
        let world = if closes { world.env_of(0, "RHT_CLOSES", "1") } else { world };
        let mut ranks = world.env_of(0, "RAILHEAD_PEER_TIMEOUT_S", "1").env_of(1, "RH_STAGE", "send_shared=stop").spawn();
        ranks.ranks[1].stage.recv_within(PATIENCE).expect("the stage");
        let said = ranks.hear(0);
        assert!(said.starts_with("more: worker /job:w/task:1: ") && said.contains("RAILHEAD_PEER_TIMEOUT_S"), "{said}");
        ranks.expect(0, "the others go on");
        if closes {
            ranks.expect(0, "its others go on");
        }
        assert!(ranks.is_silent(0), "given back under a writer");
        ranks.ranks[1].signal(signal);
        (0..if closes { 2 } else { 0 }).for_each(|_| ranks.expect(0, "closed"));
        ranks.expect(0, "given back");
        if signal == libc::SIGCONT {
            ranks.tell(1, "end");
        }
        ranks.ranks[1].wait();
        (0..3).filter(|worker| *worker != 1).for_each(|worker| ranks.tell(worker, "end"));
        ranks.expect(0, "untouched");
        [0, 2].into_iter().for_each(|worker| assert!(ranks.ranks[worker].wait().success(), "worker {worker}"));
    }
}
