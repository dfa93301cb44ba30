//! What `deregMr` promises: once it has returned, nothing is written under that handle, whatever else is registered over the same memory, and
//! the comm whose receive was outstanding under it fails on both sides.

use crate::support;
use support::comms::{self, Mem};
use support::plugin::{Plugin, REMOTE_ERROR};
use support::{Ctx, Role, World};

pub const ROLES: &[(&str, Role)] = &[("deregistered_under_a_receive", deregistered_under_a_receive)];

const OUTER: usize = 1 << 20;

/// Rank 0 registers two ranges, posts a receive under the first handle and gives it back. The message that rank 1 then sends is written
/// nowhere, and the second handle is as good as before.
fn deregistered_under_a_receive(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let broken = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let intact = comms::one_way(ctx, &plugin, 0).expect("another comm");
    // A shared region, inline or not: each size takes another way to the memory.
    let number = |name: &str| std::env::var(name).expect(name).parse::<usize>().expect(name);
    let (len, inner) = (number("RHT_LEN"), number("RHT_INNER"));
    let mem = Mem::new(OUTER);
    if ctx.rank == 1 {
        mem.write(0, &vec![0xEE; OUTER]);
        let mr = plugin.reg_mr(broken, mem.ptr(0), OUTER).expect("regMr");
        ctx.barrier();
        // It may leave before the refusal is known.
        if let Ok(request) = comms::isend(&plugin, broken, &mem, 0, len, 3, mr) {
            let _ = comms::wait(&plugin, request);
        }
        comms::send(&plugin, intact, &vec![0xEE; inner]).expect("the other comm");
        ctx.barrier();
        plugin.close_send(broken).expect("close");
        return plugin.close_send(intact).expect("close");
    }
    let outer = plugin.reg_mr(broken, mem.ptr(0), OUTER).expect("regMr");
    let kept = plugin.reg_mr(intact, mem.ptr(0), inner).expect("regMr");
    let request = comms::irecv(&plugin, broken, &mem, 0, len, 3, outer).expect("irecv");
    plugin.dereg_mr(broken, outer).expect("deregMr");
    ctx.barrier();
    assert_eq!(comms::wait(&plugin, request), Err(REMOTE_ERROR));
    let written = mem.read(0, OUTER).iter().filter(|byte| **byte != 0).count();
    assert_eq!(written, 0, "bytes were written after deregMr");
    let request = comms::irecv(&plugin, intact, &mem, 0, inner, 7, kept).expect("irecv");
    assert_eq!(comms::wait(&plugin, request).expect("the other comm")[0] as usize, inner);
    assert!(mem.read(0, inner).iter().all(|byte| *byte == 0xEE));
    plugin.dereg_mr(intact, kept).expect("deregMr");
    ctx.barrier();
    plugin.close_recv(broken).expect("close");
    plugin.close_recv(intact).expect("close");
}

#[test]
fn nothing_is_written_under_a_handle_that_was_given_back() {
    for (wire, cma) in [("shm", "0"), ("shm", "1"), ("tcp", "auto")] {
        for (len, inner) in [(512 << 10, 4096), (9000, 9000), (64, OUTER), (8, 8)] {
            println!("{wire}, RAILHEAD_CMA={cma}: {len} bytes beside a registration of {inner}");
            let world = World::new("deregistered_under_a_receive", 2).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_CMA", cma);
            world.env("RHT_LEN", &len.to_string()).env("RHT_INNER", &inner.to_string()).spawn().finish();
        }
    }
}
