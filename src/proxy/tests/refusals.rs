//! Operations that fail, and only they: a network that errs, a ring that lies.

use super::super::ring::{STEPS, Words};
use super::*;

/// One operation with a program at each end, as far as it goes.
fn run(rig: &mut Rig, count: u64) -> Result<()> {
    let (mut sending, mut receiving) = (Args::new(Steps::simple(count)).unwrap(), Args::new(Steps::simple(count)).unwrap());
    let (mut sent, mut received) = (false, false);
    let mut filled = 0;
    while !sent || !received {
        if filled < count && rig.producer.has_room(1).unwrap() {
            rig.producer.post(1, 100);
            filled += 1;
        }
        sent = sent || send::progress(&rig.send, &mut sending)? == Progress::Done;
        received = received || recv::progress(&rig.recv, &mut receiving)? == Progress::Done;
        while rig.consumer.filled(1, SLOT).unwrap().is_some() {
            rig.consumer.release(1);
        }
    }
    Ok(())
}

#[test]
fn an_error_at_every_call_of_the_network_is_the_operations_and_everything_is_given_back() {
    let flush = Options { flush: true, ..Options::default() };
    let net = Fake::new(5, Behaviour { delay: 2, unwilling: 5, ..Behaviour::default() });
    run(&mut Rig::over(net.clone(), 1, 0, flush), 20).unwrap();
    let (whole, record) = (net.calls(), net.record());
    for kind in [|call: &Call| matches!(call, Call::Iflush { .. }), |call: &Call| matches!(call, Call::Isend { taken: false, .. })] {
        assert!(record.iter().any(kind), "the run that is repeated has all kinds of calls");
    }
    // After the 2 registrations, before the 2 deregistrations and 2 closes.
    for fails_at in 2..whole - 4 {
        let net = Fake::new(5, Behaviour { delay: 2, unwilling: 5, fails_at: Some(fails_at), ..Behaviour::default() });
        let mut rig = Rig::over(net.clone(), 1, 0, flush);
        let error = run(&mut rig, 20).unwrap_err().to_string();
        assert!(error.contains(&format!("call {fails_at},")) && error.ends_with("fails on purpose"), "{error}");
        rig.close().unwrap();
        let (open, registered, _) = net.holds();
        assert_eq!((open, registered), (0, 0), "{fails_at}");
    }
    // The closes themselves: the error is told, and the rest is closed all the same.
    for fails_at in 2..6 {
        let net = Fake::new(5, Behaviour { fails_at: Some(fails_at), ..Behaviour::default() });
        assert!(Rig::over(net.clone(), 1, 0, flush).close().unwrap_err().to_string().contains("fails on purpose"));
        assert_eq!(net.holds(), (0, 0, 0));
    }
}

#[test]
fn memory_that_the_network_refuses_makes_no_connector() {
    let net = Fake::new(1, Behaviour { fails_at: Some(0), ..Behaviour::default() });
    let (to, from) = net.link(1);
    let ring = Arc::new(Ring::private(geometry(), 0).unwrap());
    assert!(Connector::new(net.clone(), Direction::Send, to, ring.clone(), Options::default()).is_err());
    assert_eq!(net.record(), [Call::CloseSend]);
    let next = net.calls();
    net.behave(|behaviour| behaviour.fails_at = Some(next));
    // A comm that is the caller's stays open.
    let borrowed = Options { borrowed: true, ..Options::default() };
    assert!(Connector::new(net.clone(), Direction::Recv, from, ring, borrowed).is_err());
    assert_eq!(net.holds(), (1, 0, 0));
}

#[test]
fn a_borrowed_comm_is_deregistered_and_left_open() {
    let borrowed = Options { borrowed: true, ..Options::default() };
    let net = Fake::new(1, Behaviour::default());
    let mut rig = Rig::over(net.clone(), 1, 0, borrowed);
    run(&mut rig, 3).unwrap();
    rig.close().unwrap();
    assert_eq!(net.holds(), (2, 0, 0));
}

#[test]
fn a_producer_that_lies_fails_its_operation() {
    for start in [0, u64::MAX - 2] {
        for lie in [start.wrapping_add(9), start.wrapping_sub(16), start.wrapping_add(1 << 40)] {
            let rig = Rig::new(Behaviour::default(), start);
            rig.send.ring().set_tail(lie);
            let error = send::progress(&rig.send, &mut Args::new(Steps::simple(1)).unwrap()).unwrap_err().to_string();
            assert!(error.contains(&format!("tail is {lie}")), "{error}");
        }
        for lie in [257, -2, i64::MIN, i64::MAX] {
            for protocol in Protocol::ALL {
                let mut rig = Rig::new(Behaviour::default(), start);
                rig.producer.post(1, 0);
                (0..8).for_each(|slot| rig.send.ring().set_size(slot, lie));
                let steps = Steps { protocol, ..Steps::simple(1) };
                let error = send::progress(&rig.send, &mut Args::new(steps).unwrap()).unwrap_err().to_string();
                assert!(error.contains(&lie.to_string()) && error.contains("0 to 256"), "{error}");
                assert!(!rig.net.record().iter().any(|call| matches!(call, Call::Isend { .. })));
            }
        }
        // Back to where it was, once some of it was sent.
        let mut rig = Rig::new(Behaviour::default(), start);
        let (mut sending, mut receiving) = (Args::new(Steps::simple(4)).unwrap(), Args::new(Steps::simple(4)).unwrap());
        (0..2).for_each(|_| rig.producer.post(1, 9));
        let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
        let _ = send::progress(&rig.send, &mut sending).unwrap();
        rig.send.ring().set_tail(start.wrapping_add(1));
        assert!(send::progress(&rig.send, &mut sending).is_err());
    }
}

#[test]
fn a_consumer_that_lies_fails_its_operation() {
    for start in [0, u64::MAX - 2] {
        for lie in [start.wrapping_add(1), start.wrapping_sub(16), start.wrapping_add(1 << 40)] {
            let rig = Rig::new(Behaviour::default(), start);
            rig.recv.ring().set_head(lie);
            let error = recv::progress(&rig.recv, &mut Args::new(Steps::simple(1)).unwrap()).unwrap_err().to_string();
            assert!(error.contains(&format!("head is {lie}")), "{error}");
        }
    }
}

#[test]
fn a_network_that_received_more_than_there_was_room_for_is_not_believed() {
    for exaggerates in [157, usize::MAX / 2] {
        let mut rig = Rig::new(Behaviour { exaggerates, ..Behaviour::default() }, 0);
        assert!(run(&mut rig, 2).unwrap_err().to_string().contains("into a buffer of 256"));
    }
}

/// LL goes by its flags and looks at no counter, so that nothing but the number of steps in flight keeps it from a slot whose send is not complete.
#[test]
fn an_ll_producer_that_fills_a_slot_again_too_early_loses_no_request() {
    let mut rig = Rig::new(Behaviour { delay: 1000, ..Behaviour::default() }, 0);
    let steps = Steps { protocol: Protocol::Ll, ..Steps::simple(9) };
    let (mut sending, mut receiving) = (Args::new(steps).unwrap(), Args::new(steps).unwrap());
    for _ in 0..8 {
        fill(&mut rig.producer, rig.send.ring(), Protocol::Ll, 1, &[1; 64]);
    }
    let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
    let _ = send::progress(&rig.send, &mut sending).unwrap();
    assert_eq!((sending.head, sending.tail), (0, 8));
    assert!(!rig.producer.has_room(1).unwrap());
    let early = [[2, 0, 0, 0], ll_flag(8).to_ne_bytes()].concat().repeat(16);
    // SAFETY: this test is the producer; that the slot is not free yet is what it is about, and nobody looks at what arrives.
    unsafe { rig.send.ring().copy_in(Protocol::Ll, 8, &early) }.unwrap();
    rig.send.ring().set_size(0, early.len() as i64);
    let _ = send::progress(&rig.send, &mut sending).unwrap();
    assert_eq!((sending.head, sending.tail, rig.net.holds().2), (0, 8, 16));
    let (mut sent, mut received, mut turns) = (false, false, 0);
    while !sent || !received {
        sent = sent || send::progress(&rig.send, &mut sending).unwrap() == Progress::Done;
        received = received || recv::progress(&rig.recv, &mut receiving).unwrap() == Progress::Done;
        assert!(sending.tail.wrapping_sub(sending.head) <= STEPS);
        while rig.consumer.filled(1, SLOT).unwrap().is_some() {
            rig.consumer.release(1);
        }
        turns += 1;
        assert!(turns < 100_000, "stuck: {sending:?} {receiving:?}");
    }
    assert_eq!(rig.net.holds().2, 0, "every request was tested to its end");
}

#[test]
fn a_ring_without_slots_of_the_protocol_takes_no_such_operation() {
    let net = Fake::new(1, Behaviour::default());
    let (to, _) = net.link(1);
    let ring = Arc::new(Ring::private(Geometry::new([0, 1024, 1024]).unwrap(), 0).unwrap());
    let connector = Connector::new(net, Direction::Send, to, ring, Options::default()).unwrap();
    let args = |protocol| Args::new(Steps { protocol, ..Steps::simple(1) }).unwrap();
    assert!(connector.check(&args(Protocol::Simple)).is_ok());
    assert!(connector.check(&args(Protocol::Ll)).unwrap_err().to_string().contains("LL operation"));
}
