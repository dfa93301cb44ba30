//! Both ends of a channel against the table of actions, in random orders of what arrives, what is written, what is produced and what is copied out.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::super::message::{ACK, golden};
use super::*;

/// What an end may do when something happens, all of which is to be seen: Seed 2's table, with refusals.
const TABLE: &[(&str, &[&str])] = &[
    ("request", &["message", "nothing"]),
    ("withdraw", &["message", "nothing"]),
    ("forgotten", &["message", "nothing"]),
    ("found", &["write", "grow", "message", "nothing"]),
    ("not found", &["message", "nothing"]),
    ("consumed", &["message", "nothing"]),
    ("Ack received", &["message", "nothing"]),
    ("TensorRequest received", &["ack", "find"]),
    ("BufferRequest received", &["ack", "grow", "message", "give up"]),
    ("BufferResponse received", &["ack", "write"]),
    ("BufferIdle received", &["ack", "write", "grow", "give up", "message", "nothing"]),
    ("ErrorStatus received", &["ack", "fail"]),
    ("TensorWithdraw received", &["ack", "forget", "nothing"]),
    ("TensorWithdrawn received", &["ack", "withdrawn"]),
    ("TensorWrite received", &["deliver"]),
    ("Ack written", &["ack", "nothing"]),
    ("TensorRequest written", &["message", "nothing"]),
    ("BufferRequest written", &["message", "nothing"]),
    ("BufferResponse written", &["message", "nothing"]),
    ("BufferIdle written", &["message", "nothing"]),
    ("ErrorStatus written", &["message", "nothing"]),
    ("TensorWithdraw written", &["message", "nothing"]),
    ("TensorWithdrawn written", &["message", "nothing"]),
    ("TensorWrite written", &["write", "grow", "give up", "message", "nothing"]),
];

/// What happens, and one of the things that an end does then.
type Row = (String, &'static str);

type Seen = Rc<RefCell<BTreeSet<Row>>>;

/// A write on its way.
#[derive(Debug, Clone)]
enum Wire {
    Ack,
    Message(Packet, String),
    Tensor(usize, Packet, Vec<u8>),
}

impl Wire {
    fn kind(&self) -> Kind {
        match self {
            Wire::Ack => Kind::Ack,
            Wire::Message(packet, _) => packet.kind,
            Wire::Tensor(..) => Kind::TensorWrite,
        }
    }
}

/// What is true of both ends, whatever they believe.
#[derive(Default)]
struct Truth {
    /// By end: its buffers that are written to, or have a tensor that was not copied out.
    occupied: [HashSet<usize>; 2],
    /// Their bytes.
    room: [Vec<u64>; 2],
}

/// An end's hands.
struct Hands {
    me: usize,
    truth: Rc<RefCell<Truth>>,
    did: Vec<&'static str>,
    /// What is left out of it.
    broken: Option<&'static str>,
    wire: VecDeque<Wire>,
    /// Writes of which this end has not heard that they are done.
    unwritten: VecDeque<(Tx, Kind)>,
    message_is_out: bool,
    room: Vec<u64>,
    goes_to: HashMap<usize, usize>,
    finds: Vec<TensorId>,
    withdraws: Vec<TensorId>,
    wanted: HashSet<TensorId>,
    /// Taken back, so they may be asked for again.
    gone: Vec<TensorId>,
    refused: HashSet<TensorId>,
    landed: HashMap<usize, Vec<u8>>,
    delivered: Vec<usize>,
    /// Fails the next time that there has to be memory.
    no_memory: bool,
}

impl Hands {
    /// Notes what the end does: whether it is done.
    fn does(&mut self, what: &'static str) -> bool {
        self.did.push(what);
        self.broken != Some(what)
    }

    fn post(&mut self, from: Tx, wire: Wire) {
        assert!(!self.unwritten.iter().any(|(other, _)| *other == from), "{from:?} is filled while it is written");
        self.unwritten.push_back((from, wire.kind()));
        self.wire.push_back(wire);
    }
}

impl Mail for Hands {
    fn ack(&mut self) {
        if !self.does("ack") {
            return;
        }
        self.post(Tx::Ack, Wire::Ack);
    }

    fn message(&mut self, packet: &Packet, text: &str) {
        if !self.does("message") {
            return;
        }
        assert!(!std::mem::replace(&mut self.message_is_out, true), "a second message in flight");
        assert_eq!(packet.meta.bytes, text.len() as u64);
        self.post(Tx::Message, Wire::Message(packet.clone(), text.into()));
    }

    fn numbered(&mut self, _: &message::NumberedRequest) -> bool {
        panic!("no request is numbered where tensors go through buffers")
    }
}

impl Actions<Vec<u8>> for Hands {
    fn grow(&mut self, outgoing: bool, index: usize, bytes: u64) -> Result<RemoteMr> {
        if outgoing && std::mem::take(&mut self.no_memory) {
            return Err(Error::internal("no memory"));
        }
        if !self.does("grow") {
            return Ok(RemoteMr::default());
        }
        let mut truth = self.truth.borrow_mut();
        let room = if outgoing {
            assert!(!self.unwritten.iter().any(|(tx, _)| *tx == Tx::Tensor(index)), "enlarged while it is written");
            let full = self.goes_to.get(&index).is_some_and(|to| truth.occupied[1 - self.me].contains(to));
            assert!(!full, "enlarged while the consumer's is full");
            &mut self.room
        } else {
            assert!(!truth.occupied[self.me].contains(&index), "a full buffer is replaced");
            &mut truth.room[self.me]
        };
        room.resize(room.len().max(index + 1), 0);
        assert!(bytes > room[index]);
        room[index] = bytes;
        Ok(RemoteMr { addr: bytes, rkeys: [self.me as u32; 8] })
    }

    fn give_up(&mut self, outgoing: bool, index: usize) {
        if !self.does("give up") {
            return;
        }
        let mut truth = self.truth.borrow_mut();
        let room = if outgoing {
            assert!(!self.unwritten.iter().any(|(tx, _)| *tx == Tx::Tensor(index)), "given up while it is written");
            let to = self.goes_to.remove(&index).unwrap();
            assert!(!truth.occupied[1 - self.me].contains(&to), "given up while the consumer's is full");
            &mut self.room
        } else {
            assert!(!truth.occupied[self.me].contains(&index), "a full buffer is given up");
            &mut truth.room[self.me]
        };
        assert!(std::mem::take(&mut room[index]) > 0);
    }

    fn write(&mut self, index: usize, to: RemoteBuffer, packet: &Packet, tensor: Vec<u8>) {
        if !self.does("write") {
            return;
        }
        let there = to.index as usize;
        {
            let mut truth = self.truth.borrow_mut();
            assert!(truth.occupied[1 - self.me].insert(there), "a full buffer is overwritten");
            assert_eq!((to.len, to.memory.addr), (truth.room[1 - self.me][there], to.len));
        }
        assert!(HEADER as u64 + packet.meta.bytes <= self.room[index].min(to.len));
        assert_eq!((self.room[index], tensor.len() as u64), (to.len, packet.meta.bytes));
        assert_eq!(*self.goes_to.entry(index).or_insert(there), there);
        self.post(Tx::Tensor(index), Wire::Tensor(there, packet.clone(), tensor));
    }

    fn find(&mut self, id: TensorId) {
        if !self.does("find") {
            return;
        }
        self.finds.push(id);
    }

    fn deliver(&mut self, index: usize, packet: &Packet) {
        if !self.does("deliver") {
            return;
        }
        assert!(self.wanted.remove(&packet.id), "delivered twice, or never asked for");
        assert_eq!(self.landed[&index], contents(&packet.id, packet.meta.bytes));
        self.delivered.push(index);
    }

    fn fail(&mut self, id: &TensorId, why: Error) {
        if !self.does("fail") {
            return;
        }
        assert!(self.wanted.remove(id), "failed twice, or never asked for");
        let text = why.to_string();
        assert!(text == "gone" || text == "no memory" || text.starts_with("a tensor of 1073741824 bytes; "), "{text}");
        self.refused.insert(id.clone());
    }

    fn forget(&mut self, id: &TensorId) {
        if !self.does("forget") {
            return;
        }
        self.withdraws.push(id.clone());
    }

    fn withdrawn(&mut self, id: &TensorId) {
        if !self.does("withdrawn") {
            return;
        }
        assert!(self.wanted.remove(id), "taken back, and answered before");
        self.gone.push(id.clone());
    }
}

fn contents(id: &TensorId, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i * 31 + id.step * 7) as u8 ^ id.name.as_bytes()[0]).collect()
}

struct World {
    channels: [Channel<Vec<u8>>; 2],
    hands: [Hands; 2],
    asked: HashSet<(usize, TensorId)>,
    truth: Rc<RefCell<Truth>>,
    seen: Seen,
    /// What an end leaves out, or, of "nothing", what it does more.
    broken: Option<Row>,
}

impl World {
    /// Whose ends keep one idle buffer.
    fn new(seen: &Seen) -> World {
        let truth = Rc::new(RefCell::new(Truth::default()));
        let hands = |me| Hands {
            me,
            truth: truth.clone(),
            did: Vec::new(),
            broken: None,
            wire: VecDeque::new(),
            unwritten: VecDeque::new(),
            message_is_out: false,
            room: Vec::new(),
            goes_to: HashMap::default(),
            finds: Vec::new(),
            withdraws: Vec::new(),
            wanted: HashSet::default(),
            gone: Vec::new(),
            refused: HashSet::default(),
            landed: HashMap::default(),
            delivered: Vec::new(),
            no_memory: false,
        };
        let hands = [hands(0), hands(1)];
        let channels = [0, 1].map(|_| Channel { idle: Idle::new(1, 20_000), ..Channel::default() });
        World { channels, hands, asked: HashSet::default(), truth, seen: seen.clone(), broken: None }
    }

    /// Something happens to an end: what it does must stand in the table.
    fn happens(&mut self, end: usize, what: &str, f: impl FnOnce(&mut Channel<Vec<u8>>, &mut Hands)) {
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

    fn request(&mut self, end: usize, id: &TensorId) {
        if self.asked.insert((end, id.clone())) {
            self.hands[end].wanted.insert(id.clone());
            self.happens(end, "request", |channel, hands| assert!(channel.request(id, hands).unwrap()));
            // Nothing comes of it while it is not answered.
            self.happens(end, "request", |channel, hands| assert!(!channel.request(id, hands).unwrap()));
        }
    }

    /// One of those that were asked for is not wanted any more.
    fn withdraw(&mut self, end: usize, which: usize) {
        let order = |id: &&TensorId| ((id.step as usize + which) % 8, id.name.clone());
        let Some(id) = self.hands[end].wanted.iter().min_by_key(order).cloned() else { return };
        self.happens(end, "withdraw", |channel, hands| channel.withdraw(&id, hands));
    }

    /// The producer has one of the tensors that are looked for, or will not have it.
    fn answer(&mut self, end: usize, which: usize, kind: u8) {
        let finds = &mut self.hands[end].finds;
        if finds.is_empty() {
            return;
        }
        let id = finds.swap_remove(which % finds.len());
        let bytes = match kind % 8 {
            0 => return self.happens(end, "not found", |channel, hands| channel.not_found(&id, &Error::remote("gone"), hands)),
            // So much is never copied.
            1 => 1 << 30,
            2 | 3 => 0,
            4 => 3000,
            5 => 9000,
            _ => 1000 * u64::from(kind),
        };
        self.hands[end].no_memory = kind == 255;
        let tensor = contents(&id, bytes % (1 << 30));
        let meta = Meta::new(1, &[bytes as i64], bytes, kind % 8 == 3).unwrap();
        self.happens(end, "found", |channel, hands| channel.found(&id, &meta, tensor, hands));
    }

    /// The next write of this end's arrives.
    fn arrives(&mut self, end: usize) {
        let Some(wire) = self.hands[end].wire.pop_front() else { return };
        let peer = 1 - end;
        let what = format!("{:?} received", wire.kind());
        match wire {
            Wire::Ack => {
                self.hands[peer].message_is_out = false;
                self.happens(peer, &what, |channel, hands| channel.acked(hands).unwrap());
            }
            Wire::Message(packet, text) => {
                // Over the wire.
                let packet = Packet::decode(&packet.encode()).unwrap();
                let owes = self.hands[peer].unwritten.iter().any(|(tx, _)| *tx == Tx::Ack);
                self.happens(peer, &what, |channel, hands| channel.message(&packet, &text, hands).unwrap());
                assert!(owes != (self.hands[peer].did.first() == Some(&"ack")), "{what}: {:?}", self.hands[peer].did);
                let Hands { finds, withdraws, .. } = &self.hands[peer];
                let wanted = packet.id.clone();
                let is_unheard = packet.kind == Kind::TensorWithdraw && finds.contains(&wanted) && !withdraws.contains(&wanted);
                assert!(!is_unheard, "{wanted:?} is taken back and still looked for");
                for wanted in std::mem::take(&mut self.hands[peer].withdraws) {
                    // Else it was answered.
                    if let Some(index) = self.hands[peer].finds.iter().position(|find| *find == wanted) {
                        self.hands[peer].finds.remove(index);
                        self.happens(peer, "forgotten", |channel, hands| channel.forgotten(&wanted, hands));
                    }
                }
                for wanted in std::mem::take(&mut self.hands[peer].gone) {
                    self.asked.remove(&(peer, wanted));
                }
            }
            Wire::Tensor(index, packet, bytes) => {
                self.hands[peer].landed.insert(index, bytes);
                self.happens(peer, &what, |channel, hands| channel.tensor(index, &packet, hands).unwrap());
            }
        }
    }

    /// An end hears that its oldest write is done.
    fn is_written(&mut self, end: usize) {
        if let Some((tx, kind)) = self.hands[end].unwritten.pop_front() {
            self.happens(end, &format!("{kind:?} written"), |channel, hands| channel.written(tx, hands));
        }
    }

    fn consume(&mut self, end: usize, which: usize) {
        let delivered = &mut self.hands[end].delivered;
        if !delivered.is_empty() {
            let index = delivered.swap_remove(which % delivered.len());
            assert!(self.truth.borrow_mut().occupied[end].remove(&index));
            self.happens(end, "consumed", |channel, hands| channel.consumed(index, hands));
        }
    }

    /// An end that is `late` seldom hears that its writes are done. It asks for nothing if the tensors go `one_way`.
    fn step(&mut self, (late, one_way, withdraws): (usize, bool, bool), choice: u8, which: u8) {
        let end = usize::from(choice % 2);
        if withdraws && choice / 2 % 17 == 16 {
            return self.withdraw(end, which.into());
        }
        match choice / 2 % 17 % 8 {
            0 if one_way && end == late => {}
            0 => self.request(end, &TensorId::new(["a", "b"][usize::from(which % 2)], u64::from(which / 2 % 8))),
            1 => self.answer(end, usize::from(which / 16), which),
            2..=4 => self.arrives(end),
            5 | 6 if end == late && !which.is_multiple_of(8) => self.arrives(1 - end),
            5 | 6 => self.is_written(end),
            _ => self.consume(end, which.into()),
        }
    }

    /// All that can happen does, once; the producer has a tensor of that kind.
    fn goes_on(&mut self, kind: u8) {
        for end in [0, 1] {
            self.arrives(end);
            self.is_written(end);
            self.answer(end, 0, kind);
            self.consume(end, 0);
        }
    }

    /// What is asked for comes, whatever the order until then.
    fn ends(&mut self) {
        (0..10_000).for_each(|_| self.goes_on(6));
        for end in [0, 1] {
            let Hands { wanted, wire, unwritten, .. } = &self.hands[end];
            assert!(wanted.is_empty(), "never answered: {wanted:?}");
            assert!(wire.is_empty() && unwritten.is_empty() && !self.channels[end].waits());
            let has_memory = |room: &Vec<u64>| room.iter().filter(|room| **room > 0).count();
            let [outgoing, incoming] = [has_memory(&self.hands[end].room), has_memory(&self.truth.borrow().room[end])];
            let Channel { outgoing: out, incoming: coming, .. } = &self.channels[end];
            assert_eq!((outgoing, incoming), (out.len(), coming.len()), "buffers that are given up, and are there");
        }
    }
}

/// Who has sent what until nothing happens any more, as it is in memory.
fn sent(world: &mut World, kind: u8) -> Vec<(usize, Vec<u8>)> {
    let mut sent = Vec::new();
    for end in (0..40).map(|turn| turn % 2) {
        match world.hands[end].wire.front() {
            Some(Wire::Ack) => sent.push((end, ACK.to_vec())),
            Some(Wire::Message(packet, text)) => sent.push((end, [&packet.encode()[..], text.as_bytes()].concat())),
            Some(Wire::Tensor(_, packet, _)) => sent.push((end, packet.encode().to_vec())),
            None => {}
        }
        world.arrives(end);
        world.is_written(end);
        world.answer(end, 0, kind);
        world.consume(end, 0);
    }
    sent
}

#[test]
fn a_tensor_goes_in_six_messages_of_these_bytes() {
    let mut world = World::new(&Rc::default());
    world.channels = Default::default();
    // So that what follows has a buffer with another number than 0.
    world.request(0, &TensorId::new("a", 6));
    sent(&mut world, 6);
    world.request(0, &TensorId::new("b", 7));
    let (six_thousand, size, remote) = (6000u64.to_le_bytes(), 8192u64.to_le_bytes(), [1u32; 8].map(u32::to_le_bytes).concat());
    let ack = vec![0, 0, 0];
    let expected = [
        (0, golden(4, b"b", 7, &[])),
        (1, ack.clone()),
        (1, golden(2, b"b", 7, &[(523, &size), (531, &size), (539, &remote[..4]), (685, &remote[4..])])),
        (0, ack.clone()),
        (0, golden(3, b"b", 7, &[(523, &size), (531, &size), (713, &[1])])),
        (1, ack.clone()),
        (1, golden(5, b"b", 7, &[(544, &[1]), (548, &[1]), (549, &six_thousand), (677, &six_thousand)])),
        (0, golden(1, b"b", 7, &[])),
        (1, ack.clone()),
    ];
    assert_eq!(sent(&mut world, 6), expected);
    // One that will not come, with why.
    world.request(0, &TensorId::new("b", 8));
    let error = [golden(8, b"b", 8, &[(544, &[3]), (677, &[4])]), b"gone".to_vec()].concat();
    assert_eq!(sent(&mut world, 0), [(0, golden(4, b"b", 8, &[])), (1, ack.clone()), (1, error), (0, ack)]);
}

#[test]
fn buffers_are_given_up_however_many_names_there_are() {
    const KEYS: u64 = 100_000;
    let mut world = World::new(&Rc::default());
    world.channels = Default::default();
    for key in 0..KEYS {
        world.request(0, &TensorId::new(format!("{key}"), 1));
        while !world.hands[0].wanted.is_empty() || !world.hands[0].delivered.is_empty() {
            // Empty ones.
            world.goes_on(2);
        }
    }
    world.ends();
    let World { channels: [consumer, producer], hands, truth, .. } = &world;
    assert_eq!((producer.outgoing.len(), consumer.incoming.len()), (IDLE.0, IDLE.0));
    assert_eq!((producer.outgoing.places(), consumer.incoming.places()), (IDLE.0 + 1, IDLE.0 + 1));
    for rooms in [&hands[1].room, &truth.borrow().room[0]] {
        assert_eq!(rooms.iter().filter(|room| **room > 0).count(), IDLE.0);
    }
}

/// Random schedules of both ends, one of which may leave something out. Errors: what is noticed.
fn schedules(seen: &Seen, broken: Option<&Row>) -> std::result::Result<(), String> {
    let schedule = ((0..3usize, any::<bool>(), any::<bool>()), proptest::collection::vec((any::<u8>(), any::<u8>()), 0..600));
    let config = ProptestConfig { cases: 1500, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let ran = runner.run(&schedule, |(kind, schedule)| {
        let mut world = World { broken: broken.cloned(), ..World::new(seen) };
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

/// Does as it is told.
#[derive(Default)]
struct Dull {
    landed: Vec<usize>,
}

impl Mail for Dull {
    fn ack(&mut self) {}
    fn message(&mut self, packet: &Packet, _: &str) {
        assert!(packet.id.name.len() <= message::NAME_MAX);
    }
    fn numbered(&mut self, _: &message::NumberedRequest) -> bool {
        panic!("no request is numbered where tensors go through buffers")
    }
}

impl Actions<()> for Dull {
    fn grow(&mut self, _: bool, _: usize, _: u64) -> Result<RemoteMr> {
        Ok(RemoteMr::default())
    }
    fn give_up(&mut self, _: bool, _: usize) {}
    fn write(&mut self, _: usize, to: RemoteBuffer, packet: &Packet, _: ()) {
        assert!(HEADER as u64 + packet.meta.bytes <= to.len);
    }
    fn find(&mut self, _: TensorId) {}
    fn deliver(&mut self, index: usize, _: &Packet) {
        self.landed.push(index);
    }
    fn fail(&mut self, _: &TensorId, _: Error) {}
    fn forget(&mut self, _: &TensorId) {}
    fn withdrawn(&mut self, _: &TensorId) {}
}

proptest! {
    /// Whatever a peer sends, in whatever order: it is taken, or refused in words that blame it.
    #[test]
    fn no_peer_can_make_an_end_panic(events in proptest::collection::vec((any::<u8>(), any::<u8>(), 0u64..3, 0u64..12_000), 0..200)) {
        let (mut channel, mut hands) = (Channel { idle: Idle::new(1, 8192), ..Channel::default() }, Dull::default());
        for (what, which, step, bytes) in events {
            let id = &TensorId::new(["a", "b", ""][usize::from(which % 3)], step);
            let kind = match which / 3 % 8 {
                0 => Kind::BufferIdle,
                1 => Kind::BufferRequest,
                2 => Kind::BufferResponse,
                3 => Kind::TensorRequest,
                4 => Kind::TensorWrite,
                5 => Kind::ErrorStatus,
                6 => Kind::TensorWithdraw,
                _ => Kind::TensorWithdrawn,
            };
            let size = if bytes % 5 == 0 { 0 } else { bytes.next_multiple_of(4096) };
            let meta = Meta { bytes, data_type: u32::from(which % 8), ..Meta::default() };
            let packet = Packet { buffer_size: size, index: bytes % 4, meta, ..Packet::new(kind, id.clone()) };
            let index = usize::from(which % 4);
            let mut taken = Ok(());
            match what % 12 {
                0..=3 => taken = channel.message(&packet, "why", &mut hands),
                4 => taken = channel.acked(&mut hands),
                5 => taken = channel.tensor(index, &Packet { kind: Kind::TensorWrite, ..packet }, &mut hands),
                6 => taken = channel.request(id, &mut hands).map(drop),
                7 => channel.withdraw(id, &mut hands),
                8 => channel.found(id, &meta, (), &mut hands),
                9 => channel.forgotten(id, &mut hands),
                10 => hands.landed.pop().into_iter().for_each(|index| channel.consumed(index, &mut hands)),
                _ => channel.written([Tx::Ack, Tx::Message, Tx::Tensor(index), Tx::Tensor(0)][index], &mut hands),
            }
            if let Err(error) = taken {
                prop_assert!(matches!(&error, Error::Remote(words) if words.starts_with("it sent ")), "{}", error);
            }
        }
    }
}

/// An end that has asked for the tensor `a` of step 1, and has said so.
fn asking() -> (Channel<Vec<u8>>, Hands) {
    let mut world = World::new(&Rc::default());
    world.request(0, &TensorId::new("a", 1));
    let World { channels: [channel, _], hands: [hands, _], .. } = world;
    (channel, hands)
}

#[test]
fn what_breaks_the_protocol_is_refused_in_words() {
    let sent = |packet: Packet| {
        let (mut channel, mut hands) = asking();
        channel.message(&packet, "", &mut hands).unwrap_err().to_string()
    };
    let packet = |kind, name: &str| Packet { buffer_size: 4096, ..Packet::new(kind, TensorId::new(name, 1)) };
    assert_eq!(sent(packet(Kind::TensorWrite, "a")), "it sent a message of kind 5");
    assert_eq!(sent(packet(Kind::BufferIdle, "a")), "it sent a message of kind 1 for a, which it has not asked for");
    assert_eq!(sent(packet(Kind::BufferResponse, "a")), "it sent a message of kind 3 for a, which it has not asked for");
    assert_eq!(sent(packet(Kind::BufferRequest, "b")), "it sent a wish for a buffer for b of step 1, which was not asked for");
    assert_eq!(sent(packet(Kind::ErrorStatus, "b")), "it sent an error for b of step 1, which was not asked for");
    assert_eq!(sent(packet(Kind::TensorWithdrawn, "a")), "it sent that a of step 1 is taken back, which it is not");
    let give_up = Packet::new(Kind::BufferRequest, TensorId::new("b", 1));
    assert_eq!(sent(give_up), "it sent a wish for a buffer for b of step 1, which was not asked for");
    for bytes in [0, 767, (1 << 30) + 1, u64::MAX] {
        let error = sent(Packet { buffer_size: bytes, ..packet(Kind::BufferRequest, "a") });
        assert!(error.contains(&format!("a wish for a buffer of {bytes} bytes for a; it has 0, and at most 1073741824")), "{error}");
    }
    let (mut channel, mut hands) = asking();
    assert_eq!(
        channel.tensor(0, &packet(Kind::TensorWrite, "a"), &mut hands).unwrap_err().to_string(),
        "it sent a tensor into buffer 0 of 0"
    );
    channel.acked(&mut hands).unwrap();
    assert_eq!(channel.acked(&mut hands).unwrap_err().to_string(), "it sent an ack of nothing");
    channel.message(&packet(Kind::TensorRequest, "x"), "", &mut hands).unwrap();
    let error = channel.message(&packet(Kind::TensorRequest, "x"), "", &mut hands).unwrap_err().to_string();
    assert_eq!(error, "it sent a second request for x of step 1");
    let error = channel.message(&packet(Kind::TensorRequest, "y"), "", &mut hands).unwrap_err().to_string();
    assert_eq!(error, "it sent a message before the ack of the last");
}

#[test]
fn a_buffer_is_enlarged_while_it_is_empty_and_idle_once() {
    // A message that comes once the ack of the last one is written.
    let hear = |channel: &mut Channel<Vec<u8>>, hands: &mut Hands, packet: &Packet| {
        let heard = channel.message(packet, "", hands).map_err(|why| why.to_string());
        channel.written(Tx::Ack, hands);
        hands.unwritten.retain(|(tx, _)| *tx != Tx::Ack);
        heard
    };
    let packet = |kind, name: &str, step, bytes| Packet { buffer_size: bytes, ..Packet::new(kind, TensorId::new(name, step)) };
    let (mut channel, mut hands) = asking();
    let request = packet(Kind::BufferRequest, "a", 1, 4096);
    assert_eq!(hear(&mut channel, &mut hands, &request), Ok(()));
    let error = hear(&mut channel, &mut hands, &request).unwrap_err();
    assert_eq!(error, "it sent a wish for a buffer of 4096 bytes for a; it has 4096, and at most 1073741824 may be");
    hands.landed.insert(0, Vec::new());
    channel.tensor(0, &packet(Kind::TensorWrite, "a", 1, 0), &mut hands).unwrap();
    assert!(channel.request(&TensorId::new("a", 2), &mut hands).unwrap());
    let error = hear(&mut channel, &mut hands, &packet(Kind::BufferRequest, "a", 2, 8192)).unwrap_err();
    assert_eq!(error, "it sent a wish for a buffer for a, which is number 0, and full: true");

    let (mut channel, mut hands) = asking();
    hands.broken = Some("write");
    assert_eq!(hear(&mut channel, &mut hands, &packet(Kind::TensorRequest, "x", 1, 0)), Ok(()));
    channel.found(&TensorId::new("x", 1), &Meta::new(1, &[4], 4, false).unwrap(), vec![0; 4], &mut hands);
    for kind in [Kind::BufferResponse, Kind::BufferIdle] {
        assert_eq!(hear(&mut channel, &mut hands, &packet(kind, "x", 1, 4096)), Ok(()));
    }
    let error = hear(&mut channel, &mut hands, &packet(Kind::BufferIdle, "x", 1, 0)).unwrap_err();
    assert_eq!(error, "it sent that the buffer for x is idle again, which it was");
}

#[test]
fn a_buffer_that_was_not_asked_for_is_refused() {
    let meta = Meta::new(1, &[4], 4, false).unwrap();
    for (bytes, index, addr) in [(8192, 0, 0), (4096, MAX_BUFFERS as u64, 0), (4096, 0, u64::MAX - 4095)] {
        let (mut channel, mut hands) = asking();
        channel.message(&Packet::new(Kind::TensorRequest, TensorId::new("x", 1)), "", &mut hands).unwrap();
        channel.found(&TensorId::new("x", 1), &meta, vec![0; 4], &mut hands);
        channel.written(Tx::Ack, &mut hands);
        hands.unwritten.clear();
        let memory = RemoteMr { addr, rkeys: [1; 8] };
        let response = Packet { buffer_size: bytes, index, memory, ..Packet::new(Kind::BufferResponse, TensorId::new("x", 1)) };
        let error = channel.message(&response, "", &mut hands).unwrap_err().to_string();
        assert_eq!(error, format!("it sent buffer {index} of {bytes} bytes at {addr:#x} for x, which it was not asked for"));
    }
}

#[test]
fn a_peer_asks_for_so_much_and_no_more() {
    let (mut channel, mut hands) = asking();
    let mut asks = |step: u64| {
        let asked = channel.message(&Packet::new(Kind::TensorRequest, TensorId::new("x", step)), "", &mut hands);
        channel.written(Tx::Ack, &mut hands);
        hands.unwritten.retain(|(tx, _)| *tx != Tx::Ack);
        // Found, and kept until there is a buffer.
        channel.found(&TensorId::new("x", step), &Meta::default(), Vec::new(), &mut hands);
        asked
    };
    (0..MAX_REQUESTS as u64).for_each(|step| asks(step).unwrap());
    assert_eq!(asks(1 << 40).unwrap_err().to_string(), "it sent more than 65536 requests at a time");
}

#[test]
fn no_more_is_asked_for_than_that_and_what_came_counts() {
    let (mut channel, mut hands) = asking();
    channel.message(&Packet { buffer_size: 4096, ..Packet::new(Kind::BufferRequest, TensorId::new("a", 1)) }, "", &mut hands).unwrap();
    hands.landed.insert(0, Vec::new());
    channel.tensor(0, &Packet::new(Kind::TensorWrite, TensorId::new("a", 1)), &mut hands).unwrap();
    (2..=MAX_REQUESTS as u64).for_each(|step| assert!(channel.request(&TensorId::new("a", step), &mut hands).unwrap()));
    let error = channel.request(&TensorId::new("a", 1 << 40), &mut hands).unwrap_err().to_string();
    assert_eq!(error, "65536 tensors are asked for already, or have come and were not taken, which is the limit");
    channel.consumed(0, &mut hands);
    assert!(channel.request(&TensorId::new("a", 1 << 40), &mut hands).unwrap());
}

#[test]
fn a_tensor_that_does_not_belong_into_its_buffer_is_refused() {
    let ready = || {
        let (mut channel, mut hands) = asking();
        channel.message(&Packet { buffer_size: 4096, ..Packet::new(Kind::BufferRequest, TensorId::new("a", 1)) }, "", &mut hands).unwrap();
        hands.landed.insert(0, Vec::new());
        (channel, hands)
    };
    let refused = |packet: &Packet| {
        let (mut channel, mut hands) = ready();
        channel.tensor(0, packet, &mut hands).unwrap_err().to_string()
    };
    let write = Packet::new(Kind::TensorWrite, TensorId::new("a", 1));
    assert_eq!(refused(&Packet { id: TensorId::new("b", 1), ..write.clone() }), "it sent a packet of kind 5 for b into the buffer for a");
    assert_eq!(refused(&Packet { id: TensorId::new("a", 2), ..write.clone() }), "it sent a of step 2, which was not asked for");
    let meta = Meta::new(0, &[], 4096 - HEADER as u64 + 1, false).unwrap();
    assert_eq!(refused(&Packet { meta, ..write.clone() }), "it sent 3329 bytes of a into a buffer of 4096");
    let (mut channel, mut hands) = ready();
    channel.tensor(0, &write, &mut hands).unwrap();
    let error = channel.tensor(0, &write, &mut hands).unwrap_err().to_string();
    assert_eq!(error, "it sent a second tensor for a into a buffer that was not idle");
}
