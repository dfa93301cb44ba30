//! A peer that sends control messages which no honest one sends, or at the wrong time: an error of its pair that says what it sent, or nothing.

use super::*;
use crate::link::driver::Driven;
use crate::link::duplex::Target;
use crate::link::limits::{CONTROL_SIZE, MAX_RAILS, SLOTS};
use crate::mesh::core::Peer;
use crate::mesh::device::{Part, Place};
use crate::mesh::matching::MAX_OFFERS;
use crate::mesh::ops::{Asked, What};
use crate::mesh::protocol::Small;
use crate::mesh::protocol::{Control, Tag};
use crate::mesh::slots::SlotSend;
use crate::mesh::small::{MAX_EARLY, MAX_WANTED};

type Raw = [u8; CONTROL_SIZE];

const TAG: Tag = Tag::User(7);
/// Of the last message, which is an honest one.
const LAST: Tag = Tag::User(u64::MAX);
/// The first slot of a link, opened for the first time.
const FIRST: u64 = 256;

/// Three ranks, all driven by this thread: the one that is lied to, the one that lies, and one that does nothing.
struct World {
    meshes: [Mesh; 3],
    /// A page of the first one's, which it sends from and receives into, and one of the second one's.
    memory: [Registered; 2],
    _pages: [Pages; 2],
}

impl World {
    fn new() -> World {
        let meshes = [0, 1, 2].map(|rank| Mesh::new(device(SoftWire::Shm), rank, 3).unwrap());
        for (a, b) in [(0, 1), (0, 2)] {
            let (to_a, to_b) = (meshes[a].address(b).unwrap(), meshes[b].address(a).unwrap());
            meshes[a].connect_pair(b, &to_b).unwrap();
            meshes[b].connect_pair(a, &to_a).unwrap();
        }
        let pages = [0, 1].map(|_| Pages::new(4096).unwrap());
        let memory = [0, 1].map(|rank| meshes[rank].device.register(given(&pages[rank], 4096)).unwrap());
        World { meshes, memory, _pages: pages }
    }

    fn place(&self, len: usize) -> Place {
        self.memory[0].place(0, len).unwrap().place
    }

    fn part(&self, len: usize) -> Part {
        Part { small: None, ..self.memory[0].part(0, len).unwrap() }
    }

    /// Where the first rank may write to, if the second one has opened its first slot.
    fn target(&self, len: usize) -> Target {
        Target {
            sequence: FIRST,
            len: len as u64,
            addr: self.memory[1].place(0, len).unwrap().place.addr as u64,
            rkeys: self.memory[1].rkeys(),
        }
    }

    /// The second rank opens it, as for an honest receive.
    fn opens(&self) {
        let place = self.memory[1].place(0, 100).unwrap().place;
        self.meshes[1].with(|core| core.recv(&[0], Tag::User(1000), place)).unwrap();
    }

    /// What becomes of the pair that gets these and then an honest message: why it fails, if it `fails`, or nothing once that has come.
    fn becomes(&self, lies: &[Raw], fails: bool) -> Option<String> {
        let end = Instant::now() + TIMEOUT;
        let last = Control::Message(LAST, Small::NONE).encode();
        let mut all = lies.iter().chain([&last]).peekable();
        loop {
            assert!(Instant::now() < end, "neither an error nor the last message");
            if let Some(bytes) = all.peek()
                && self.meshes[1].with(|core| core.pair(0).map_or(true, |pair| pair.send_raw_for_test(bytes)))
            {
                all.next();
            }
            self.meshes.iter().for_each(|mesh| _ = mesh.driver.lock().poll());
            let core = self.meshes[0].driver.lock();
            if let Peer::Lost(failure) = &core.peers[1] {
                return Some(failure.to_string());
            }
            if !fails && core.small.is_here(1, LAST) {
                return None;
            }
        }
    }
}

/// Nobody is told that they go, as nobody would answer.
impl Drop for World {
    fn drop(&mut self) {
        let over = crate::link::Failure::internal("over".into());
        self.meshes.iter().for_each(|mesh| mesh.with(|core| core.disconnect(&over)));
    }
}

fn nothing(_: &World) {}

fn receives(world: &World) {
    world.meshes[0].with(|core| core.recv(&[1], TAG, world.place(100))).unwrap();
}

fn receives_few(world: &World) {
    world.meshes[0].with(|core| core.recv(&[1], TAG, world.place(8))).unwrap();
}

fn receives_from_any(world: &World) {
    world.meshes[0].with(|core| core.recv(&[1, 2], TAG, world.place(100))).unwrap();
}

fn takes_back(world: &World) {
    world.meshes[0].with(|core| core.recv(&[1], TAG, world.place(100)).map(|op| core.cancel(op))).unwrap();
}

fn sends(world: &World) {
    world.opens();
    world.meshes[0].with(|core| core.send(1, TAG, world.part(100))).unwrap();
}

fn sends_to_a_slot(world: &World) {
    world.opens();
    let asked = Asked { rank: Some(1), receives: false, what: What::Slot(5) };
    let sent = world.meshes[0].with(|core| {
        core.pair(1)?.take_outgoing(5)?;
        core.start(asked, |core, op| {
            let (pair, ops) = core.pair_and_ops(1)?;
            pair.send_slot(5, SlotSend { op, part: world.part(100), offset: 0 }, ops)
        })
    });
    sent.unwrap();
}

fn has_a_buffer(world: &World) {
    world.meshes[0].with(|core| core.pair(1)?.take_incoming(5, world.place(100))).unwrap();
}

/// A control message with one byte changed.
fn but(control: Control, at: usize, byte: u8) -> Raw {
    let mut bytes = control.encode();
    bytes[at] = byte;
    bytes
}

#[test]
fn control_messages_that_no_honest_rank_sends_fail_its_pair_or_mean_nothing() {
    let before: &[fn(&World)] = &[nothing, receives, receives_few, receives_from_any, takes_back, sends, sends_to_a_slot, has_a_buffer];
    for before in before {
        // Not to be read at all, whatever goes on.
        for (lie, why) in [
            ([0xff; CONTROL_SIZE], "the peer sent a control message that begins with 0xffffffffffffffff"),
            (but(Control::Claimed(0), 0, 0xff), "the peer sent a control message that begins with 0xff"),
            ([0; CONTROL_SIZE], "the peer sent a control message that begins with 0x0"),
            (but(Control::Claimed(1), 63, 1), "the peer sent a control message of kind 6, with something in it that does not belong there"),
            (but(Control::Withdrawn(FIRST), 2, 255), "the peer sent a control message of kind 9, with something in it that"),
            (but(Control::Message(LAST, Small::NONE), 2, 49), "the peer sent a message of 49 bytes in 64"),
            (but(Control::Message(LAST, Small::NONE), 3, 0xff), "the peer sent a message of 65280 bytes in 64"),
            (but(Control::Message(LAST, Small::NONE), 16, 1), "the peer sent a message of 0 bytes in 64"),
        ] {
            let world = World::new();
            before(&world);
            let said = world.becomes(&[lie], true).expect("an error");
            assert!(said.starts_with("rank 1: ") && said.contains(why), "{why}: {said}");
        }
    }
    type Case = (fn(&World), fn(&World) -> Vec<Control>, Option<&'static str>);
    let answer = "the peer sent an answer to nothing";
    let (slot, claimed) = ("the peer sent a slot twice, or too many", "the peer granted what this rank has not claimed");
    let all: &[Case] = &[
        (nothing, |_| vec![Control::Withdrawn(FIRST)], Some(answer)),
        (receives, |_| vec![Control::Withdrawn(FIRST)], Some(answer)),
        (receives, |_| vec![Control::Withdrawn(FIRST + 256)], Some(answer)),
        (has_a_buffer, |_| vec![Control::Withdrawn(FIRST)], Some(answer)),
        (takes_back, |_| vec![Control::Withdrawn(FIRST); 2], Some(answer)),
        (nothing, |world| vec![Control::Opened(5, world.target(100)); 2], Some(slot)),
        (nothing, |world| (0..129).map(|slot| Control::Opened(slot, world.target(100))).collect(), Some(slot)),
        (nothing, |world| (0..128).map(|slot| Control::Opened(slot, world.target(100))).collect(), None),
        (nothing, |world| vec![Control::Granted(9, world.target(100))], Some(claimed)),
        (sends, |world| vec![Control::Granted(9, world.target(100))], Some(claimed)),
        (sends, |world| [vec![Control::Offered(9, TAG)], vec![Control::Granted(9, world.target(100)); 2]].concat(), Some(claimed)),
        (
            sends,
            |world| vec![Control::Offered(9, TAG), Control::Granted(9, world.target(64))],
            Some("it receives 64 bytes, tag 0x7: this rank sends 100"),
        ),
        (sends, |world| vec![Control::RecvReady(TAG, world.target(64))], Some("it receives 64 bytes, tag 0x7: this rank sends 100")),
        // Memory that there cannot be, and memory that it has not.
        (
            sends,
            |world| vec![Control::RecvReady(TAG, Target { addr: u64::MAX - 50, ..world.target(100) })],
            Some("100 bytes into 100 bytes of the peer's memory at 0xffffffffffffffcd"),
        ),
        (
            sends_to_a_slot,
            |world| vec![Control::Opened(5, Target { addr: u64::MAX - 50, ..world.target(100) })],
            Some("100 bytes into 100 bytes of the peer's memory at 0xffffffffffffffcd"),
        ),
        (
            sends,
            |world| vec![Control::RecvReady(TAG, Target { rkeys: [u32::MAX; MAX_RAILS], ..world.target(100) })],
            Some("remote access error"),
        ),
        (nothing, |_| vec![Control::Received(1, 1)], Some("the peer sent that it received what was not sent")),
        (nothing, |_| vec![Control::Received(0, u64::MAX)], Some("the peer sent that it received what was not sent")),
        (
            nothing,
            |_| (0..=MAX_WANTED as u64).map(|tag| Control::Wanted(Tag::User(tag))).collect(),
            Some("the peer waits for small messages with more than 1024 tags"),
        ),
        (nothing, |_| vec![Control::Wanted(TAG); 2 * MAX_WANTED], None),
        (
            nothing,
            |world| (0..=(SLOTS + MAX_OFFERS) as u64).map(|tag| Control::RecvReady(Tag::User(tag), world.target(100))).collect(),
            Some("the peer advertised more receives than it has slots"),
        ),
        (
            nothing,
            |_| (0..=(SLOTS + MAX_OFFERS) as u64).map(|number| Control::Offered(number, TAG)).collect(),
            Some("the peer advertised more receives than it has slots"),
        ),
        (
            nothing,
            |_| vec![Control::Message(TAG, Small::NONE); MAX_EARLY as usize + MAX_WANTED + 1],
            Some("the peer sent more small messages than may wait"),
        ),
        (receives_few, |_| vec![Control::Message(TAG, Small::NONE)], Some("it sent 0 bytes, tag 0x7: this rank receives 8")),
        (nothing, |_| vec![Control::Bye(None); 2], Some("it has closed its mesh")),
        (nothing, |_| vec![Control::Bye(Some(1 << 40))], Some("it has closed its mesh, as rank 1099511627776 is lost")),
        // What an honest rank may send for what was taken back, or is no matter.
        (nothing, |_| vec![Control::Claimed(1)], None),
        (receives_from_any, |_| vec![Control::Claimed(1); 3], None),
        (receives_from_any, |_| vec![Control::Claimed(2)], None),
        (nothing, |_| vec![Control::WithdrawnOffer(1)], None),
        (sends, |_| vec![Control::Offered(9, TAG), Control::WithdrawnOffer(9), Control::WithdrawnOffer(9)], None),
        (nothing, |_| vec![Control::Withdraw(FIRST)], None),
        (nothing, |_| vec![Control::Unmatched { tag: TAG, len: 8, ready: 0 }; 1000], None),
        (receives, |_| vec![Control::Unmatched { tag: TAG, len: u64::MAX, ready: u64::MAX }], None),
        (nothing, |_| vec![Control::Message(Tag::Collective(u64::MAX), Small::NONE)], None),
    ];
    for (case, (before, lies, why)) in all.iter().enumerate() {
        let world = World::new();
        before(&world);
        let said = world.becomes(&lies(&world).iter().map(Control::encode).collect::<Vec<_>>(), why.is_some());
        let as_said = match (&said, why) {
            (Some(said), Some(why)) => said.starts_with("rank 1: ") && said.contains(why),
            (said, why) => said.is_none() && why.is_none(),
        };
        assert!(as_said, "case {case}: {why:?}: {said:?}");
        // Whoever waits for it hears that.
        let pending = world.meshes[0].pending();
        let failed = world.meshes[0].check().err().map(|error| error.to_string());
        assert_eq!(failed, said.filter(|_| pending > 0), "case {case}");
    }
}
