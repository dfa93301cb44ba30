//! Tests of operations that fail: errors of the network, and invalid counters and sizes in the ring.

use super::super::ring::{STEPS, Words};
use super::*;

/// Runs one operation at each end, with the programs, until both are done or one fails.
fn run(pair: &mut TestPair, count: u64) -> Result<()> {
    let (mut sending, mut receiving) = (Args::new(Steps::simple(count)).unwrap(), Args::new(Steps::simple(count)).unwrap());
    let (mut sent, mut received) = (false, false);
    let mut filled = 0;
    while !sent || !received {
        if filled < count && pair.producer.has_room(1).unwrap() {
            pair.producer.post(1, 100);
            filled += 1;
        }
        sent = sent || send::progress(&pair.send, &mut sending)? == Progress::Done;
        received = received || recv::progress(&pair.recv, &mut receiving)? == Progress::Done;
        while pair.consumer.filled(1, SLOT).unwrap().is_some() {
            pair.consumer.release(1);
        }
    }
    Ok(())
}

#[test]
fn an_error_of_any_call_of_the_network_fails_the_operation_and_leaves_nothing_open() {
    let flush = Options { flush: true, ..Options::default() };
    let net = Fake::new(5, Behaviour { delay: 2, busy: 5, ..Behaviour::default() });
    run(&mut TestPair::over(net.clone(), 1, 0, flush), 20).unwrap();
    let (whole, record) = (net.calls(), net.record());
    for kind in [|call: &Call| matches!(call, Call::Iflush { .. }), |call: &Call| matches!(call, Call::Isend { accepted: false, .. })] {
        assert!(record.iter().any(kind), "the run that is repeated has all kinds of calls");
    }
    // After the 2 registrations, before the 2 deregistrations and 2 closes.
    for fails_at in 2..whole - 4 {
        let net = Fake::new(5, Behaviour { delay: 2, busy: 5, fails_at: Some(fails_at), ..Behaviour::default() });
        let mut pair = TestPair::over(net.clone(), 1, 0, flush);
        let error = run(&mut pair, 20).unwrap_err().to_string();
        assert!(error.contains(&format!("call {fails_at},")) && error.ends_with("fails on purpose"), "{error}");
        pair.close().unwrap();
        let (open, registered, _) = net.holds();
        assert_eq!((open, registered), (0, 0), "{fails_at}");
    }
    // The closes themselves: the error is told, and the rest is closed all the same.
    for fails_at in 2..6 {
        let net = Fake::new(5, Behaviour { fails_at: Some(fails_at), ..Behaviour::default() });
        assert!(TestPair::over(net.clone(), 1, 0, flush).close().unwrap_err().to_string().contains("fails on purpose"));
        assert_eq!(net.holds(), (0, 0, 0));
    }
}

#[test]
fn a_connector_fails_if_the_network_refuses_its_memory() {
    let net = Fake::new(1, Behaviour { fails_at: Some(0), ..Behaviour::default() });
    let (to, from) = net.connection(1);
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
    let mut pair = TestPair::over(net.clone(), 1, 0, borrowed);
    run(&mut pair, 3).unwrap();
    pair.close().unwrap();
    assert_eq!(net.holds(), (2, 0, 0));
}

#[test]
fn an_invalid_tail_or_size_fails_its_operation() {
    for start in [0, u64::MAX - 2] {
        for invalid in [start.wrapping_add(9), start.wrapping_sub(16), start.wrapping_add(1 << 40)] {
            let pair = TestPair::new(Behaviour::default(), start);
            pair.send.ring().set_tail(invalid);
            let error = send::progress(&pair.send, &mut Args::new(Steps::simple(1)).unwrap()).unwrap_err().to_string();
            assert!(error.contains(&format!("tail is {invalid}")), "{error}");
        }
        for invalid in [257, -2, i64::MIN, i64::MAX] {
            for protocol in Protocol::ALL {
                let mut pair = TestPair::new(Behaviour::default(), start);
                pair.producer.post(1, 0);
                (0..8).for_each(|slot| pair.send.ring().set_size(slot, invalid));
                let steps = Steps { protocol, ..Steps::simple(1) };
                let error = send::progress(&pair.send, &mut Args::new(steps).unwrap()).unwrap_err().to_string();
                assert!(error.contains(&invalid.to_string()) && error.contains("0 to 256"), "{error}");
                assert!(!pair.net.record().iter().any(|call| matches!(call, Call::Isend { .. })));
            }
        }
        // Back to where it was, once some of it was sent.
        let mut pair = TestPair::new(Behaviour::default(), start);
        let (mut sending, mut receiving) = (Args::new(Steps::simple(4)).unwrap(), Args::new(Steps::simple(4)).unwrap());
        (0..2).for_each(|_| pair.producer.post(1, 9));
        let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
        let _ = send::progress(&pair.send, &mut sending).unwrap();
        pair.send.ring().set_tail(start.wrapping_add(1));
        assert!(send::progress(&pair.send, &mut sending).is_err());
    }
}

#[test]
fn an_invalid_head_fails_its_operation() {
    for start in [0, u64::MAX - 2] {
        for invalid in [start.wrapping_add(1), start.wrapping_sub(16), start.wrapping_add(1 << 40)] {
            let pair = TestPair::new(Behaviour::default(), start);
            pair.recv.ring().set_head(invalid);
            let error = recv::progress(&pair.recv, &mut Args::new(Steps::simple(1)).unwrap()).unwrap_err().to_string();
            assert!(error.contains(&format!("head is {invalid}")), "{error}");
        }
    }
}

#[test]
fn a_receive_of_more_bytes_than_its_buffer_is_an_error() {
    for excess in [157, usize::MAX / 2] {
        let mut pair = TestPair::new(Behaviour { excess, ..Behaviour::default() }, 0);
        assert!(run(&mut pair, 2).unwrap_err().to_string().contains("into a buffer of 256"));
    }
}

/// LL does not check `tail`, so only the number of steps in flight keeps it from posting a slot whose send is not complete.
#[test]
fn an_ll_producer_that_fills_a_slot_again_too_early_loses_no_request() {
    let mut pair = TestPair::new(Behaviour { delay: 1000, ..Behaviour::default() }, 0);
    let steps = Steps { protocol: Protocol::Ll, ..Steps::simple(9) };
    let (mut sending, mut receiving) = (Args::new(steps).unwrap(), Args::new(steps).unwrap());
    for _ in 0..8 {
        fill(&mut pair.producer, pair.send.ring(), Protocol::Ll, 1, &[1; 64]);
    }
    let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
    let _ = send::progress(&pair.send, &mut sending).unwrap();
    assert_eq!((sending.head, sending.tail), (0, 8));
    assert!(!pair.producer.has_room(1).unwrap());
    let early = [[2, 0, 0, 0], ll_flag(8).to_ne_bytes()].concat().repeat(16);
    // SAFETY: this test is the producer; the slot is not free yet, on purpose, and nobody reads what arrives.
    unsafe { pair.send.ring().copy_in(Protocol::Ll, 8, &early) }.unwrap();
    pair.send.ring().set_size(0, early.len() as i64);
    let _ = send::progress(&pair.send, &mut sending).unwrap();
    assert_eq!((sending.head, sending.tail, pair.net.holds().2), (0, 8, 16));
    let (mut sent, mut received, mut rounds) = (false, false, 0);
    while !sent || !received {
        sent = sent || send::progress(&pair.send, &mut sending).unwrap() == Progress::Done;
        received = received || recv::progress(&pair.recv, &mut receiving).unwrap() == Progress::Done;
        assert!(sending.tail.wrapping_sub(sending.head) <= STEPS);
        while pair.consumer.filled(1, SLOT).unwrap().is_some() {
            pair.consumer.release(1);
        }
        rounds += 1;
        assert!(rounds < 100_000, "stuck: {sending:?} {receiving:?}");
    }
    assert_eq!(pair.net.holds().2, 0, "every request was tested to its end");
}

#[test]
fn an_operation_of_a_protocol_without_slots_is_refused() {
    let net = Fake::new(1, Behaviour::default());
    let (to, _) = net.connection(1);
    let ring = Arc::new(Ring::private(Geometry::new([0, 1024, 1024]).unwrap(), 0).unwrap());
    let connector = Connector::new(net, Direction::Send, to, ring, Options::default()).unwrap();
    let args = |protocol| Args::new(Steps { protocol, ..Steps::simple(1) }).unwrap();
    assert!(connector.check(&args(Protocol::Simple)).is_ok());
    assert!(connector.check(&args(Protocol::Ll)).unwrap_err().to_string().contains("LL operation"));
}
