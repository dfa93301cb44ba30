//! What ranks do whose rails fail under them: a role of the plugin's tests, here and in the virtual machine.

pub mod mesh;

use railhead::base::stats::RailCounter;
use railhead::base::stats::page::CommSnapshot;

use super::plugin::Plugin;
use super::{Ctx, comms, holdings};

/// Exchanges over two devices as one while one of them after the other fails and comes back, RHT_ROUNDS times, and says when each comm has noticed.
pub fn carries_on(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let merged = plugin.make_vdevice(&[0, 1]).expect("makeVDevice");
    let (send, recv) = comms::both_ways(ctx, &plugin, merged).expect("comms");
    let least = |counter| {
        let all = holdings::comms(std::process::id() as i32);
        all.iter().map(|comm| comm.rail_sum(counter)).min().expect("comms")
    };
    // In turn: a rail that failed, and one that is back.
    let rounds = std::env::var("RHT_ROUNDS").map_or(0, |n| n.parse().expect("a number"));
    for _ in 0..rounds {
        for (counter, said) in [(RailCounter::Failures, "down"), (RailCounter::Reconnects, "up")] {
            let before = least(counter);
            ctx.say("ready");
            assert_eq!(ctx.parent.text(), said);
            comms::exchange_until(ctx, &plugin, (send, recv), said, || least(counter) > before);
        }
    }
    comms::exchange(&plugin, ctx.rank, send, recv, &comms::SIZES).expect("exchange");
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
}

/// Exchanges over two devices as one while both fail, and until they are back.
pub fn outlasts(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let merged = plugin.make_vdevice(&[0, 1]).expect("makeVDevice");
    let (send, recv) = comms::both_ways(ctx, &plugin, merged).expect("comms");
    ctx.say("ready");
    let is_back = |comm: &CommSnapshot| {
        let [failures, reconnects] = [RailCounter::Failures, RailCounter::Reconnects].map(|counter| comm.rail_sum(counter));
        failures >= 2 && reconnects == failures
    };
    comms::exchange_until(ctx, &plugin, (send, recv), "all rails back", || holdings::comms(std::process::id() as i32).iter().all(is_back));
    comms::exchange(&plugin, ctx.rank, send, recv, &comms::SIZES).expect("exchange");
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
}

/// Exchanges over two devices as one, says when each comm does without one of them, and what ends it.
pub fn goes_on_to_the_end(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let merged = plugin.make_vdevice(&[0, 1]).expect("makeVDevice");
    let (send, recv) = comms::both_ways(ctx, &plugin, merged).expect("comms");
    comms::exchange(&plugin, ctx.rank, send, recv, &[8]).expect("exchange");
    ctx.say("flowing");
    let mut down = false;
    let end = loop {
        if let Err(error) = comms::exchange(&plugin, ctx.rank, send, recv, &[8, 100_000, 300_000]) {
            break error;
        }
        let all = holdings::comms(std::process::id() as i32);
        let is_down = |comm: &CommSnapshot| comm.rails.iter().any(|rail| rail.down.is_some());
        if !down && all.iter().all(is_down) {
            down = true;
            for comm in all {
                let whys: Vec<_> = comm.rails.iter().map(|rail| rail.down.as_ref().map(|down| down.why.as_str())).collect();
                assert!(matches!(whys[..], [None, Some(why)] if why.contains("has not answered") || why.contains("is down")), "{whys:?}");
            }
            ctx.say("down");
        }
    };
    ctx.say(&end.to_string());
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
}
