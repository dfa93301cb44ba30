//! Both ends of a channel against the table of actions, in random orders of what arrives, what is written, what is produced and what is taken back.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::rc::Rc;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::super::message::{ACK, golden};
use super::*;

/// What an end may do when something happens, all of which is to be seen.
const TABLE: &[(&str, &[&str])] = &[
    ("request", &["open", "message", "numbered", "nothing"]),
    ("polled", &["numbered", "message", "nothing"]),
    ("NumberedRequest received", &["find"]),
    ("withdraw", &["message", "nothing"]),
    ("found", &["write", "message", "give back", "nothing"]),
    ("not found", &["message", "nothing"]),
    ("forgotten", &["message", "nothing"]),
    ("Ack received", &["message", "numbered", "nothing"]),
    ("TensorRequest received", &["ack", "find"]),
    ("TensorReRequest received", &["ack", "write"]),
    ("MetaDataUpdate received", &["ack", "close", "open", "message", "deliver", "no memory", "nothing"]),
    ("ErrorStatus received", &["ack", "close", "fail", "open", "message", "no memory"]),
    ("TensorWithdraw received", &["ack", "forget", "give back", "message", "nothing"]),
    ("TensorWithdrawn received", &["ack", "close", "withdrawn", "open", "message", "no memory"]),
    ("landed", &["deliver", "open", "message", "no memory"]),
    ("Ack written", &["ack", "nothing"]),
    ("TensorRequest written", &["message", "numbered", "nothing"]),
    ("TensorReRequest written", &["message", "numbered", "nothing"]),
    ("MetaDataUpdate written", &["message", "numbered", "nothing"]),
    ("ErrorStatus written", &["message", "numbered", "nothing"]),
    ("TensorWithdraw written", &["message", "numbered", "nothing"]),
    ("TensorWithdrawn written", &["message", "numbered", "nothing"]),
];

/// Bytes of the memory that a receive has brought.
const OWN: u64 = 3000;

/// What happens, and one of the things that an end does then.
type Row = (String, &'static str);

type Seen = Rc<RefCell<BTreeSet<Row>>>;

/// A message on its way.
#[derive(Debug, Clone)]
enum Wire {
    Ack,
    Message(Box<Packet>, String),
    Numbered(NumberedRequest),
}

impl Wire {
    fn kind(&self) -> String {
        match self {
            Wire::Ack => format!("{:?}", Kind::Ack),
            Wire::Message(packet, _) => format!("{:?}", packet.kind),
            Wire::Numbered(_) => "NumberedRequest".into(),
        }
    }
}

/// An end's hands. A tensor is its bytes, and so is what a slot has got.
struct Hands {
    me: usize,
    did: Vec<&'static str>,
    /// What is left out of it.
    broken: Option<&'static str>,
    wire: VecDeque<Wire>,
    /// Tensors, which overtake messages and each other.
    writes: Vec<(Announced, Vec<u8>)>,
    /// Writes of which this end has not heard that they are done.
    unwritten: VecDeque<(Tx, Kind)>,
    message_is_out: bool,
    /// There is no room for a control message.
    is_full: bool,
    /// Open slots: their bytes, whether the memory is a receive's own, and what has landed.
    slots: HashMap<u64, (u64, bool, Option<Vec<u8>>)>,
    /// As many slots as there may be.
    room: usize,
    uses: u64,
    finds: Vec<TensorId>,
    /// Of what was.
    found: HashSet<Name>,
    forgets: Vec<TensorId>,
    /// Tensors with bytes that were found, and are neither written nor given back.
    kept: usize,
    wanted: HashSet<TensorId>,
    /// Those whose receive waits until nobody writes to its memory.
    withdrawing: HashSet<TensorId>,
    /// Fails the next time that there has to be memory.
    no_memory: bool,
}

impl Hands {
    /// Notes what the end does: whether it is done.
    fn does(&mut self, what: &'static str) -> bool {
        self.did.push(what);
        self.broken != Some(what)
    }

    fn ends(&mut self, what: &TensorId) {
        assert!(self.wanted.remove(what), "{what:?} is answered twice, or was never asked for");
        self.withdrawing.remove(what);
    }
}

impl Mail for Hands {
    fn ack(&mut self) {
        if !self.does("ack") {
            return;
        }
        assert!(!self.unwritten.iter().any(|(tx, _)| *tx == Tx::Ack));
        self.unwritten.push_back((Tx::Ack, Kind::Ack));
        self.wire.push_back(Wire::Ack);
    }

    fn message(&mut self, packet: &Packet, text: &str) {
        if !self.does("message") {
            return;
        }
        assert!(!std::mem::replace(&mut self.message_is_out, true), "a second message in flight");
        assert!(!self.unwritten.iter().any(|(tx, _)| *tx == Tx::Message));
        self.unwritten.push_back((Tx::Message, packet.kind));
        self.wire.push_back(Wire::Message(Box::new(packet.clone()), text.into()));
    }

    fn numbered(&mut self, request: &NumberedRequest) -> bool {
        if self.is_full {
            return false;
        }
        if self.does("numbered") {
            self.wire.push_back(Wire::Numbered(*request));
        }
        true
    }
}

impl Actions<Vec<u8>, ()> for Hands {
    fn open(&mut self, into: Option<&()>, bytes: u64, ahead: bool) -> Result<Option<Announced>> {
        assert!(bytes > 0);
        // Of two slots, what is ahead leaves one to what is certain to come.
        if self.slots.len() >= if ahead { 1 } else { self.room } {
            return Ok(None);
        }
        if std::mem::take(&mut self.no_memory) || into.is_some() && bytes > OWN {
            return Err(Error::usage("no memory"));
        }
        self.uses += 1;
        if self.does("open") {
            self.slots.insert(self.uses, (bytes, into.is_some(), None));
        }
        let memory = RemoteMr { addr: self.uses << 20, rkeys: [self.me as u32; 8] };
        Ok(Some(Announced { sequence: self.uses, memory, bytes }))
    }

    fn close(&mut self, sequence: u64) {
        if !self.does("close") {
            return;
        }
        let (_, _, landed) = self.slots.remove(&sequence).expect("a slot that was open");
        assert!(landed.is_none(), "what has landed is delivered");
    }

    fn write(&mut self, to: &Announced, tensor: Vec<u8>) {
        if !self.does("write") {
            return;
        }
        self.kept -= 1;
        assert_eq!(to.bytes, tensor.len() as u64);
        assert_eq!(to.memory, RemoteMr { addr: to.sequence << 20, rkeys: [1 - self.me as u32; 8] });
        self.writes.push((*to, tensor));
    }

    fn find(&mut self, id: TensorId, again: bool) {
        if !self.does("find") {
            return;
        }
        assert!(!self.finds.contains(&id), "{id:?} is looked for twice");
        assert!(!again || self.found.contains(&id.name), "{id:?} was not found before");
        self.finds.push(id);
    }

    fn forget(&mut self, id: &TensorId) {
        if !self.does("forget") {
            return;
        }
        self.forgets.push(id.clone());
    }

    fn give_back(&mut self, id: &TensorId, tensor: Vec<u8>) {
        if !self.does("give back") {
            return;
        }
        self.kept -= 1;
        assert_eq!(tensor, contents(id, tensor.len() as u64));
    }

    fn deliver(&mut self, id: TensorId, meta: &Meta, sequence: Option<u64>) {
        if !self.does("deliver") {
            return;
        }
        self.ends(&id);
        let bytes = sequence.map_or(Some(Vec::new()), |sequence| self.slots.remove(&sequence).expect("an open slot").2);
        assert_eq!(bytes.expect("what has landed"), contents(&id, meta.bytes), "{id}");
    }

    fn fail(&mut self, id: &TensorId, why: Error) {
        if !self.does("fail") {
            return;
        }
        let text = why.to_string();
        assert!(text == "gone" || text.starts_with("a tensor of 1073741825 bytes; "), "{text}");
        self.ends(id);
    }

    fn no_memory(&mut self, id: &TensorId, _: Error) {
        if !self.does("no memory") {
            return;
        }
        assert!(self.wanted.contains(&id.clone()), "a request that is not answered");
        self.withdrawing.insert(id.clone());
    }

    fn withdrawn(&mut self, id: &TensorId) {
        if !self.does("withdrawn") {
            return;
        }
        let what = id.clone();
        assert!(self.withdrawing.contains(&what), "nobody takes {what:?} back");
        self.ends(&what);
    }
}

fn contents(id: &TensorId, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i * 31 + id.step * 7) as u8 ^ id.name.as_bytes()[0]).collect()
}

struct World {
    channels: [Direct<Vec<u8>, ()>; 2],
    hands: [Hands; 2],
    seen: Seen,
    /// What an end leaves out, or, of "nothing", what it does more.
    broken: Option<Row>,
}

impl World {
    fn new(seen: &Seen, room: usize) -> World {
        let hands = |me| Hands {
            me,
            did: Vec::new(),
            broken: None,
            wire: VecDeque::new(),
            writes: Vec::new(),
            unwritten: VecDeque::new(),
            message_is_out: false,
            is_full: false,
            slots: HashMap::default(),
            room,
            uses: 0,
            finds: Vec::new(),
            found: HashSet::default(),
            forgets: Vec::new(),
            kept: 0,
            wanted: HashSet::default(),
            withdrawing: HashSet::default(),
            no_memory: false,
        };
        World { channels: Default::default(), hands: [hands(0), hands(1)], seen: seen.clone(), broken: None }
    }

    /// Something happens to an end: what it does must stand in the table.
    fn happens(&mut self, end: usize, what: &str, f: impl FnOnce(&mut Direct<Vec<u8>, ()>, &mut Hands)) {
        let hands = &mut self.hands[end];
        hands.did.clear();
        hands.broken = self.broken.as_ref().filter(|(event, _)| event == what).map(|(_, did)| *did);
        f(&mut self.channels[end], hands);
        let (_, may) = TABLE.iter().find(|(event, _)| *event == what).unwrap_or_else(|| panic!("{what}"));
        let only_acks = what != "Ack written" && hands.did.iter().all(|did| *did == "ack");
        let nothing = (hands.did.is_empty() || only_acks && may.contains(&"nothing")).then_some("nothing");
        let did: Vec<_> = hands.did.iter().copied().chain(nothing).collect();
        if nothing.is_some() && hands.broken.take() == nothing {
            hands.ack();
        }
        for did in did {
            assert!(may.contains(&did), "{what}: {did}");
            self.seen.borrow_mut().insert((what.to_owned(), did));
        }
    }

    /// Whoever has asked before asks again.
    fn request(&mut self, end: usize, id: &TensorId, own: bool) {
        let into = own.then_some(());
        let is_new = self.hands[end].wanted.insert(id.clone());
        self.happens(end, "request", |channel, hands| assert_eq!(channel.request(id, into, hands).unwrap(), is_new));
    }

    fn withdraw(&mut self, end: usize, which: usize) {
        let hands = &mut self.hands[end];
        let mut wanted: Vec<TensorId> = hands.wanted.iter().cloned().collect();
        wanted.sort_unstable();
        if let Some(what) = wanted.get(which % wanted.len().max(1)).cloned() {
            hands.withdrawing.insert(what.clone());
            self.happens(end, "withdraw", |channel, hands| channel.withdraw(&what, hands));
        }
    }

    /// The producer has one of the tensors that are looked for, or will not have it.
    fn answer(&mut self, end: usize, which: usize, kind: u8) {
        let finds = &mut self.hands[end].finds;
        if finds.is_empty() {
            return;
        }
        let id = finds.swap_remove(which % finds.len());
        self.hands[end].forgets.retain(|forgotten| *forgotten != id);
        let bytes = match kind % 8 {
            0 | 4 => return self.happens(end, "not found", |channel, hands| channel.not_found(&id, &Error::remote("gone"), hands)),
            // So much is never written.
            1 => (1 << 30) + 1,
            2 | 3 => 0,
            5 => 9000,
            _ => 1000,
        };
        let tensor = contents(&id, if bytes > 1 << 30 { 0 } else { bytes });
        let meta = Meta::new(1, &[bytes as i64], bytes, kind % 8 == 3).unwrap();
        self.hands[end].kept += usize::from(!tensor.is_empty());
        self.hands[end].found.insert(id.name.clone());
        self.happens(end, "found", |channel, hands| channel.found(&id, &meta, tensor, hands));
        // Once is enough.
        self.happens(end, "not found", |channel, hands| channel.not_found(&id, &Error::remote("gone"), hands));
        self.happens(end, "found", |channel, hands| channel.found(&id, &meta, Vec::new(), hands));
    }

    /// The next message of this end's arrives.
    fn arrives(&mut self, end: usize) {
        let peer = 1 - end;
        self.forgets(peer);
        let Some(wire) = self.hands[end].wire.pop_front() else { return };
        let what = format!("{} received", wire.kind());
        match wire {
            Wire::Ack => {
                self.hands[peer].message_is_out = false;
                self.happens(peer, &what, |channel, hands| channel.acked(hands).unwrap());
            }
            Wire::Numbered(request) => {
                let request = NumberedRequest::decode(&request.encode()).unwrap();
                self.happens(peer, &what, |channel, hands| channel.numbered(&request, hands).unwrap());
            }
            Wire::Message(packet, text) => {
                // Over the wire.
                let packet = Packet::decode(&packet.encode()).unwrap();
                self.happens(peer, &what, |channel, hands| channel.message(&packet, &text, hands).unwrap());
            }
        }
    }

    /// The producer looks no more for what an earlier message has taken back, unless it has answered since.
    fn forgets(&mut self, end: usize) {
        for what in std::mem::take(&mut self.hands[end].forgets) {
            let Some(at) = self.hands[end].finds.iter().position(|found| *found == what) else { continue };
            self.hands[end].finds.swap_remove(at);
            // Once is enough.
            for _ in 0..2 {
                self.happens(end, "forgotten", |channel, hands| channel.forgotten(&what, hands));
            }
        }
    }

    /// One of its tensors does.
    fn lands(&mut self, end: usize, which: usize) {
        let writes = &mut self.hands[end].writes;
        if writes.is_empty() {
            return;
        }
        let (to, bytes) = writes.swap_remove(which % writes.len());
        let (room, _, landed) = self.hands[1 - end].slots.get_mut(&to.sequence).expect("nobody writes to memory that is not announced");
        assert_eq!(*room, bytes.len() as u64);
        assert!(landed.replace(bytes).is_none(), "written twice");
        self.happens(1 - end, "landed", |channel, hands| channel.landed(to.sequence, to.bytes, hands).unwrap());
    }

    /// An end hears that its oldest write is done.
    fn is_written(&mut self, end: usize) {
        if let Some((tx, kind)) = self.hands[end].unwritten.pop_front() {
            self.happens(end, &format!("{kind:?} written"), |channel, hands| channel.written(tx, hands));
        }
    }

    fn polled(&mut self, end: usize, is_full: bool) {
        self.hands[end].is_full = is_full;
        self.happens(end, "polled", |channel, hands| channel.send_waiting(hands));
    }

    /// An end that is `late` seldom hears that its writes are done. One end asks for nothing if the tensors go `one_way`.
    fn step(&mut self, (late, one_way): (usize, bool), choice: u8, which: u8) {
        let (end, number) = (usize::from(choice % 2), usize::from(which));
        match choice / 2 % 16 {
            0 if one_way && end == 1 => {}
            0 => self.request(end, &TensorId::new(["a", "b"][number % 2], u64::from(which / 4 % 16)), which >= 128),
            1 => self.withdraw(end, number),
            2 => self.hands[end].no_memory = which < 64,
            3 if which.is_multiple_of(2) => self.answer(end, number / 16, which / 2),
            3 => self.lands(end, number),
            4..=9 => self.arrives(end),
            10 => self.polled(end, which < 64),
            _ if end == late && !which.is_multiple_of(8) => self.arrives(1 - end),
            _ => self.is_written(end),
        }
    }

    /// What is asked for comes, whatever the order until then.
    fn ends(&mut self) {
        for _ in 0..1000 {
            for end in [0, 1] {
                self.arrives(end);
                self.is_written(end);
                // What nobody wants any more need never be there.
                let Hands { withdrawing, .. } = &self.hands[1 - end];
                if let Some(at) = self.hands[end].finds.iter().position(|id| !withdrawing.contains(id)) {
                    self.answer(end, at, 6);
                }
                self.lands(end, 0);
                self.polled(end, false);
            }
        }
        for end in [0, 1] {
            let Hands { wanted, wire, writes, unwritten, slots, kept, .. } = &self.hands[end];
            assert!(wanted.is_empty(), "never answered: {wanted:?}");
            assert!(wire.is_empty() && writes.is_empty() && unwritten.is_empty() && !self.channels[end].waits());
            assert!(slots.is_empty(), "memory that stays announced: {slots:?}");
            assert_eq!(*kept, 0, "tensors that are lost");
            assert!(self.channels[end].sought.is_empty(), "tensors that are kept: {:?}", self.channels[end].sought);
            assert!(self.channels[end].slots.is_empty());
        }
    }
}

/// Who has sent what until nothing happens any more, as it is in memory.
fn sent(world: &mut World, answer: Option<u8>) -> Vec<(usize, Vec<u8>)> {
    let mut sent = Vec::new();
    for end in (0..40).map(|turn| turn % 2) {
        match world.hands[end].wire.front() {
            Some(Wire::Ack) => sent.push((end, ACK.to_vec())),
            Some(Wire::Numbered(request)) => sent.push((end, request.encode().to_vec())),
            Some(Wire::Message(packet, text)) => sent.push((end, [&packet.encode()[..], text.as_bytes()].concat())),
            None => {}
        }
        world.arrives(end);
        world.is_written(end);
        if let Some(kind) = answer {
            world.answer(end, 0, kind);
        }
        world.lands(end, 0);
    }
    sent
}

#[test]
fn a_tensor_goes_in_messages_of_these_bytes() {
    let mut world = World::new(&Rc::default(), 2);
    let thousand = 1000u64.to_le_bytes();
    let shape = [(544, &[1][..]), (548, &[1]), (549, &thousand), (677, &thousand)];
    // Memory in slot 1, then in slot 2.
    let memory = |slot: u8| [(523, thousand.to_vec()), (531, vec![0, 0, slot << 4]), (713, vec![slot])];
    let with = |slot: u8, kind: u8, step: u64| {
        let memory = memory(slot);
        let number = (721, &[1][..]);
        let all: Vec<(usize, &[u8])> =
            shape.iter().copied().chain(memory.iter().map(|(at, bytes)| (*at, &bytes[..]))).chain([number]).collect();
        golden(kind, b"a", step, &all)
    };
    let ack = vec![0, 0, 0];
    world.request(0, &TensorId::new("a", 7), false);
    let expected = [
        (0, golden(4, b"a", 7, &[])),
        (1, ack.clone()),
        (1, golden(6, b"a", 7, &shape)),
        (0, ack.clone()),
        (0, with(1, 7, 7)),
        (1, ack.clone()),
    ];
    assert_eq!(sent(&mut world, Some(6)), expected);
    // The next one is like it.
    world.request(0, &TensorId::new("a", 8), false);
    let next: Vec<u8> = [(1 << 32) | u64::from(b'N'), 8, 2, 2 << 20].into_iter().flat_map(u64::to_le_bytes).chain([0; 32]).collect();
    assert_eq!(sent(&mut world, Some(6)), [(0, next)]);
    // One that is taken back: nobody has it yet.
    world.request(0, &TensorId::new("b", 9), false);
    world.withdraw(0, 0);
    let expected = [
        (0, golden(4, b"b", 9, &[])),
        (1, ack.clone()),
        (0, golden(9, b"b", 9, &[])),
        (1, ack.clone()),
        (1, golden(10, b"b", 9, &[])),
        (0, ack),
    ];
    assert_eq!(sent(&mut world, None), expected);
}

/// Random schedules of both ends, one of which may leave something out. Errors: what is noticed.
fn schedules(seen: &Seen, broken: Option<&Row>) -> std::result::Result<(), String> {
    let schedule = ((0..3usize, any::<bool>()), proptest::collection::vec((any::<u8>(), any::<u8>()), 0..600));
    let config = ProptestConfig { cases: 6000, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let ran = runner.run(&schedule, |(kind, schedule)| {
        let mut world = World { broken: broken.cloned(), ..World::new(seen, 1 + kind.0 % 2) };
        schedule.into_iter().for_each(|(choice, which)| world.step(kind, choice, which));
        world.ends();
        Ok(())
    });
    ran.map_err(|noticed| noticed.to_string())
}

fn table() -> BTreeSet<Row> {
    TABLE.iter().flat_map(|(event, did)| did.iter().map(|did| ((*event).to_owned(), *did))).collect()
}

#[test]
fn both_ends_keep_to_the_table_and_reach_all_of_it() {
    let seen = Seen::default();
    schedules(&seen, None).unwrap();
    let missing: Vec<_> = table().difference(&seen.borrow()).cloned().collect();
    assert!(missing.is_empty(), "never seen: {missing:?}");
}

/// Else the test above shows little.
#[test]
fn each_row_of_the_table_is_noticed_when_it_is_broken() {
    let unnoticed: Vec<Row> = table().into_iter().filter(|row| schedules(&Seen::default(), Some(row)).is_ok()).collect();
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}

/// Does as it is told, and has as many slots as it likes.
#[derive(Default)]
struct Dull(u64);

impl Mail for Dull {
    fn ack(&mut self) {}
    fn message(&mut self, packet: &Packet, _: &str) {
        assert!(packet.id.name.len() <= message::NAME_MAX);
    }
    fn numbered(&mut self, request: &NumberedRequest) -> bool {
        request.number <= MAX_NAMES as u32
    }
}

impl Actions<(), ()> for Dull {
    fn open(&mut self, _: Option<&()>, bytes: u64, _: bool) -> Result<Option<Announced>> {
        self.0 += 1;
        Ok(Some(Announced { sequence: self.0 % 8, memory: RemoteMr::default(), bytes }))
    }
    fn close(&mut self, _: u64) {}
    fn write(&mut self, _: &Announced, _: ()) {}
    fn find(&mut self, _: TensorId, _: bool) {}
    fn forget(&mut self, _: &TensorId) {}
    fn give_back(&mut self, _: &TensorId, _: ()) {}
    fn deliver(&mut self, _: TensorId, _: &Meta, _: Option<u64>) {}
    fn fail(&mut self, _: &TensorId, _: Error) {}
    fn no_memory(&mut self, _: &TensorId, _: Error) {}
    fn withdrawn(&mut self, _: &TensorId) {}
}

proptest! {
    /// Whatever a peer sends, in whatever order: it is taken, or refused in words that blame it.
    #[test]
    fn no_peer_can_make_an_end_panic(events in proptest::collection::vec((any::<u8>(), any::<u8>(), 0u64..3, 0u64..3), 0..200)) {
        let (mut channel, mut hands) = (Direct::default(), Dull::default());
        for (what, which, step, bytes) in events {
            let id = &TensorId::new(["a", "b", ""][usize::from(which % 3)], step);
            let kind = [
                Kind::TensorRequest,
                Kind::TensorReRequest,
                Kind::MetaDataUpdate,
                Kind::ErrorStatus,
                Kind::TensorWithdraw,
                Kind::TensorWithdrawn,
                Kind::BufferIdle,
            ][usize::from(which / 3 % 7)];
            let meta = Meta { bytes, ..Meta::default() };
            let (number, index) = (u32::from(which % 4), u64::from(which % 8));
            let packet = Packet { buffer_size: bytes, index, meta, number, ..Packet::new(kind, id.clone()) };
            let request = NumberedRequest { number, step, index, memory: RemoteMr { addr: u64::MAX - u64::from(which % 2), ..RemoteMr::default() } };
            let mut taken = Ok(());
            match what % 14 {
                0..=3 => taken = channel.message(&packet, "why", &mut hands),
                4 => taken = channel.acked(&mut hands),
                5 => taken = channel.landed(u64::from(which % 8), bytes, &mut hands),
                6 => taken = channel.request(id, None, &mut hands).map(drop),
                7 => channel.withdraw(id, &mut hands),
                8 => channel.found(id, &meta, (), &mut hands),
                11 => taken = channel.numbered(&request, &mut hands),
                12 => channel.send_waiting(&mut hands),
                9 => channel.forgotten(id, &mut hands),
                10 => channel.not_found(id, &Error::remote("gone"), &mut hands),
                _ => channel.written([Tx::Ack, Tx::Message, Tx::Tensor(0)][usize::from(which % 3)], &mut hands),
            }
            if let Err(error) = taken {
                prop_assert!(matches!(&error, Error::Remote(words) if words.starts_with("it sent ")), "{}", error);
            }
        }
    }
}

/// An end that has asked for the tensor `a` of step 1, and has said so.
fn asking() -> (Direct<Vec<u8>, ()>, Hands) {
    let mut world = World::new(&Seen::default(), 2);
    world.request(0, &TensorId::new("a", 1), false);
    let World { channels: [channel, _], hands: [hands, _], .. } = world;
    (channel, hands)
}

#[test]
fn what_breaks_the_protocol_is_refused_in_words() {
    let sent = |packet: Packet| {
        let (mut channel, mut hands) = asking();
        channel.message(&packet, "", &mut hands).unwrap_err().to_string()
    };
    let meta = |bytes: u64| Meta::new(1, &[bytes as i64], bytes, false).unwrap();
    let packet = |kind, name: &str, bytes| Packet { meta: meta(bytes), ..Packet::new(kind, TensorId::new(name, 1)) };
    assert_eq!(sent(packet(Kind::BufferIdle, "a", 0)), "it sent a message of kind 1");
    assert_eq!(sent(packet(Kind::MetaDataUpdate, "b", 5)), "it sent the shape of b of step 1, which was not asked for");
    let error = sent(packet(Kind::MetaDataUpdate, "a", (1 << 30) + 1));
    assert_eq!(error, "it sent that a has 1073741825 bytes; at most 1073741824 may be");
    assert_eq!(sent(packet(Kind::ErrorStatus, "b", 0)), "it sent an error for b of step 1, which was not asked for");
    assert_eq!(sent(packet(Kind::TensorWithdrawn, "a", 0)), "it sent that a of step 1 is taken back, which it is not");
    let error = sent(packet(Kind::TensorReRequest, "x", 4));
    assert_eq!(error, "it sent a second request for x of step 1, of which it was not told that");
    for (bytes, has, addr) in [(5, 4, 0), (4, 5, 0), ((1 << 30) + 1, (1 << 30) + 1, 0), (4, 4, u64::MAX - 2)] {
        let memory = RemoteMr { addr, rkeys: [1; 8] };
        let error = sent(Packet { buffer_size: bytes, memory, ..packet(Kind::TensorRequest, "x", has) });
        let which = if bytes == has && bytes <= 1 << 30 { String::new() } else { format!(", which has {has}") };
        assert_eq!(error, format!("it sent {bytes} bytes of memory at {addr:#x} for x{which}"));
    }
    let (mut channel, mut hands) = asking();
    assert_eq!(channel.landed(0, 5, &mut hands).unwrap_err().to_string(), "it sent a tensor that was not asked for");
    channel.acked(&mut hands).unwrap();
    assert_eq!(channel.acked(&mut hands).unwrap_err().to_string(), "it sent an ack of nothing");
    channel.message(&packet(Kind::TensorRequest, "x", 0), "", &mut hands).unwrap();
    let error = channel.message(&packet(Kind::TensorRequest, "x", 0), "", &mut hands).unwrap_err().to_string();
    assert_eq!(error, "it sent a second request for x of step 1");
}

/// A number that is none, or none yet, names nothing; memory that cannot be is refused; and of one request there is one.
#[test]
fn a_request_by_a_number_is_checked_as_any_other() {
    let (mut channel, mut hands) = (Direct::<(), ()>::default(), Dull::default());
    let memory = RemoteMr { addr: 1 << 20, rkeys: [1; 8] };
    let request = NumberedRequest { number: 7, step: 2, index: 3, memory };
    let error = channel.numbered(&request, &mut hands).unwrap_err().to_string();
    assert_eq!(error, "it sent a request for number 7, which no tensor has");
    let meta = Meta::new(1, &[4], 4, false).unwrap();
    let again =
        |step, number| Packet { meta, buffer_size: 4, memory, number, ..Packet::new(Kind::TensorReRequest, TensorId::new("x", step)) };
    let mut asks = |channel: &mut Direct<(), ()>, step, number| {
        channel.message(&Packet::new(Kind::TensorRequest, TensorId::new("x", step)), "", &mut hands).unwrap();
        channel.written(Tx::Ack, &mut hands);
        channel.found(&TensorId::new("x", step), &meta, (), &mut hands);
        let asked = channel.message(&again(step, number), "", &mut hands);
        channel.written(Tx::Ack, &mut hands);
        asked
    };
    let error = asks(&mut channel, 0, 65_537).unwrap_err().to_string();
    assert_eq!(error, "it sent number 65537 for x of step 0; at most 65536 may be");
    asks(&mut channel, 1, 7).unwrap();
    let mut asks = |request| channel.numbered(&request, &mut hands);
    let outside = NumberedRequest { memory: RemoteMr { addr: u64::MAX - 2, ..memory }, ..request };
    assert_eq!(asks(outside).unwrap_err().to_string(), "it sent 4 bytes of memory at 0xfffffffffffffffd for x");
    asks(request).unwrap();
    assert_eq!(asks(request).unwrap_err().to_string(), "it sent a second request for x of step 2");
}

/// An end that was told of so many bytes of `a`, has asked again, and has heard that its messages were read.
fn told(bytes: u64) -> (Direct<Vec<u8>, ()>, Hands, u64) {
    let (mut channel, mut hands) = asking();
    let meta = Meta::new(1, &[bytes as i64], bytes, false).unwrap();
    channel.message(&Packet { meta, ..Packet::new(Kind::MetaDataUpdate, TensorId::new("a", 1)) }, "", &mut hands).unwrap();
    let sequence = *hands.slots.keys().next().expect("it has opened a slot");
    channel.written(Tx::Ack, &mut hands);
    hands.unwritten.clear();
    (channel, hands, sequence)
}

/// Else the producer, who was asked by that number for another shape last, writes one of that into memory for this one.
#[test]
fn a_number_stands_for_the_shape_that_the_producer_was_asked_for() {
    let (mut channel, mut hands) = asking();
    let [one, two, three] = [1, 2, 3].map(|step| TensorId::new("a", step));
    let next = |channel: &mut Direct<Vec<u8>, ()>, hands: &mut Hands| {
        for _ in 0..8 {
            (hands.message_is_out, hands.unwritten) = (false, VecDeque::new());
            channel.written(Tx::Message, hands);
            let _ = channel.acked(hands);
        }
    };
    hands.wanted.insert(two.clone());
    channel.request(&two, None, &mut hands).unwrap();
    let hears = |hands: &mut Hands, channel: &mut Direct<Vec<u8>, ()>, kind, id: &TensorId, bytes: u64| {
        let meta = Meta::new(1, &[bytes as i64], bytes, false).unwrap();
        channel.message(&Packet { meta, ..Packet::new(kind, id.clone()) }, "", hands).unwrap_or_else(|error| panic!("{error}"));
        hands.unwritten.clear();
        channel.written(Tx::Ack, hands);
    };
    // There is no slot for either of two shapes, and the later one is taken back; then there is one for the other.
    hands.room = 0;
    hears(&mut hands, &mut channel, Kind::MetaDataUpdate, &one, 1000);
    hears(&mut hands, &mut channel, Kind::MetaDataUpdate, &two, 9000);
    hands.withdrawing.insert(two.clone());
    channel.withdraw(&two, &mut hands);
    hands.room = 2;
    hears(&mut hands, &mut channel, Kind::TensorWithdrawn, &two, 0);
    let sequence = *hands.slots.keys().next().expect("it has opened a slot");
    hands.slots.get_mut(&sequence).unwrap().2 = Some(contents(&one, 1000));
    channel.landed(sequence, 1000, &mut hands).unwrap();
    hands.wanted.insert(three.clone());
    channel.request(&three, None, &mut hands).unwrap();
    next(&mut channel, &mut hands);
    match hands.wire.back() {
        Some(Wire::Message(packet, _)) => assert_eq!((packet.kind, packet.id.step, packet.buffer_size), (Kind::TensorRequest, 3, 9000)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_lands_must_be_what_was_told() {
    let (mut channel, mut hands, sequence) = told(1000);
    let error = channel.landed(sequence, 999, &mut hands).unwrap_err().to_string();
    assert_eq!(error, "it sent 999 bytes of a of step 1, which has 1000");
    let again = |kind| {
        let (mut channel, mut hands, _) = told(1000);
        channel.message(&Packet::new(kind, TensorId::new("a", 1)), "", &mut hands).unwrap_err().to_string()
    };
    assert_eq!(again(Kind::MetaDataUpdate), "it sent the shape of a of step 1, which was not asked for");
    assert_eq!(again(Kind::ErrorStatus), "it sent an error for a of step 1, which was not asked for");
    // Of another shape than it was told, or twice.
    let mut asks = |packet: Packet| channel.message(&packet, "", &mut hands);
    asks(Packet::new(Kind::TensorRequest, TensorId::new("x", 1))).unwrap();
    let (mut producer, mut hands) = asking();
    producer.message(&Packet::new(Kind::TensorRequest, TensorId::new("x", 1)), "", &mut hands).unwrap();
    let meta = Meta::new(1, &[4], 4, false).unwrap();
    producer.found(&TensorId::new("x", 1), &meta, vec![0; 4], &mut hands);
    hands.unwritten.retain(|(tx, _)| *tx != Tx::Ack);
    producer.written(Tx::Ack, &mut hands);
    let other = Packet { meta: Meta { data_type: 2, ..meta }, buffer_size: 4, ..Packet::new(Kind::TensorReRequest, TensorId::new("x", 1)) };
    let error = producer.message(&other, "", &mut hands).unwrap_err().to_string();
    assert_eq!(error, "it sent a second request for x of step 1, of which it was not told that");
}

#[test]
fn a_peer_asks_for_so_much_and_no_more() {
    let (mut channel, mut hands) = asking();
    let mut asks = |step: u64| {
        let asked = channel.message(&Packet::new(Kind::TensorRequest, TensorId::new("x", step)), "", &mut hands);
        channel.written(Tx::Ack, &mut hands);
        hands.unwritten.retain(|(tx, _)| *tx != Tx::Ack);
        hands.finds.clear();
        asked
    };
    (0..MAX_REQUESTS as u64).for_each(|step| asks(step).unwrap());
    assert_eq!(asks(1 << 40).unwrap_err().to_string(), "it sent more than 65536 requests at a time");
}

/// Else one that reads messages, and nothing else, has all that it asks for kept.
#[test]
fn a_peer_takes_what_it_asks_for() {
    let (mut channel, mut hands) = (Direct::<(), ()>::default(), Dull::default());
    let meta = Meta::new(1, &[4], 4, false).unwrap();
    let mut asks = |channel: &mut Direct<(), ()>, step| {
        let asked =
            channel.message(&Packet { meta, buffer_size: 4, ..Packet::new(Kind::TensorRequest, TensorId::new("x", step)) }, "", &mut hands);
        channel.written(Tx::Ack, &mut hands);
        channel.found(&TensorId::new("x", step), &meta, (), &mut hands);
        asked
    };
    (0..MAX_REQUESTS as u64).for_each(|step| asks(&mut channel, step).unwrap());
    assert_eq!(asks(&mut channel, 1 << 40).unwrap_err().to_string(), "it sent more than 65536 requests at a time");
    channel.written(Tx::Tensor(0), &mut Dull::default());
    asks(&mut channel, 1 << 40).unwrap();
}

/// Else one whose names are new in each step asks for all tensors twice, for ever, once there were so many.
#[test]
fn names_are_learned_however_many_there_were() {
    let (mut channel, mut hands) = (Direct::<(), ()>::default(), Dull::default());
    let meta = Meta::new(1, &[4], 4, false).unwrap();
    for number in 0..=MAX_NAMES {
        let id = TensorId::new(number.to_string(), 1);
        channel.request(&id, None, &mut hands).unwrap();
        channel.message(&Packet { meta, ..Packet::new(Kind::MetaDataUpdate, id) }, "", &mut hands).unwrap();
        channel.written(Tx::Ack, &mut hands);
        channel.landed(hands.0 % 8, 4, &mut hands).unwrap();
    }
    let last = TensorId::new(MAX_NAMES.to_string(), 2);
    channel.request(&last, None, &mut hands).unwrap();
    assert!(channel.wanted[&last].opened.is_some(), "it is announced");
}
