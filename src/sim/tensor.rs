//! Workers that send each other tensors, step by step, of the same names in each. What must hold: each receive is answered with the tensor that was sent,
//! or, in a step that was ended too soon or in too little memory, with an error; once it is answered nobody writes to its memory, and once a
//! producer's memory is released nobody reads it; and all ends, soon after the last fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_utils::atomic::AtomicCell;

use crate::base::error::{Error, Result};
use crate::base::mem::{Pages, UserMemory};
use crate::fabric::sim::{Random, World};
use crate::link::Link;
use crate::tensor::simulated::{self, SimulatedManager, Wait};
use crate::tensor::{Key, Manager, Mode, Rendezvous, Tensor};

use super::net::config;
use super::schedule::{self, Ranks, Stop};
use super::{Options, Report, Violation, bytes_of};

/// Tensors of a worker for another one in each step.
const EDGES: usize = 2;
/// Steps that are under way at once.
const WINDOW: usize = 2;
/// Bytes of a tensor at most, and of its memory; and of most: more than are copied into and out of the library's memory anyway.
const ROOM: usize = 24_000;
const LARGE: usize = 17_000;
/// Receives of a tensor at most.
const RECEIVES: usize = 2;
/// Tensors that a worker keeps for a while.
const KEPT: usize = 3;
const DATA_TYPE: u32 = 9;
/// Why a step is aborted.
const ABORTED: &str = "it was cut short";

/// What a receive ended with.
type Answer = Result<Tensor>;

/// A tensor of a step.
struct Item {
    key: String,
    from: usize,
    to: usize,
    /// Of all tensors under way: of its memory at the producer, and, twice, at the consumer.
    place: usize,
    value: Value,
    is_sent: bool,
    /// The producer's memory, until it is released.
    lent: Option<Arc<AtomicBool>>,
    receives: Vec<Receive>,
}

/// What it is.
#[derive(Clone, Copy)]
struct Value {
    len: usize,
    pattern: u64,
    is_dead: bool,
}

impl Value {
    fn bytes(&self) -> Vec<u8> {
        if self.is_dead { Vec::new() } else { bytes_of(self.len, self.pattern) }
    }

    /// Whether this is it, with these bytes.
    fn is(&self, tensor: &Tensor, bytes: &[u8]) -> bool {
        let shape = [self.len as i64, 1];
        let is_same = || tensor.meta().data_type == DATA_TYPE && tensor.meta().shape() == shape;
        tensor.is_dead() == self.is_dead && bytes == self.bytes() && (self.is_dead || is_same())
    }
}

/// A consumer's wish.
struct Receive {
    /// Bytes of his memory, if it is to be there.
    room: Option<usize>,
    is_asked: bool,
    /// He waits, and may give up; else he has a callback.
    wait: Option<Wait>,
    answer: Arc<AtomicCell<Option<Answer>>>,
    is_done: bool,
}

/// How far a worker is with a step.
enum Found {
    /// Others may have asked it for tensors of that.
    NotYet,
    Here(Rendezvous),
    Over,
}

/// A step.
struct Step {
    /// By worker.
    rendezvous: Vec<Found>,
    is_initialized: Vec<bool>,
    /// By worker: it has aborted it, and ends it later.
    is_aborted: Vec<bool>,
    /// Workers end it whenever they like.
    is_cut_short: bool,
    items: Vec<Item>,
}

/// A worker.
struct Worker {
    manager: SimulatedManager,
    /// What is sent, and what is received.
    from: Pages,
    to: Pages,
    /// Tensors in the library's memory.
    kept: Vec<(Tensor, Value)>,
}

struct Group {
    world: World,
    workers: Vec<Worker>,
    /// Those that are under way, by number.
    steps: Vec<(u64, Step)>,
    next: u64,
    count: u64,
    /// A tensor can be had more than once.
    tolerate_dup_recv: bool,
    received: u64,
}

/// Runs one schedule.
///
/// Errors: a promise that was broken.
pub fn run(options: &Options) -> std::result::Result<Report, Violation> {
    schedule::run(options, Group::new)
}

fn name(worker: usize) -> String {
    format!("/job:worker/task:{worker}")
}

fn wrong<T>(what: String) -> std::result::Result<T, Stop> {
    Err(Stop::Wrong(what))
}

impl Receive {
    /// Of a tensor of so many bytes. One in twelve has too little memory for it.
    fn new(random: &mut Random, len: usize) -> Receive {
        let too_little = random.one_in(12);
        let room = if too_little { len.saturating_sub(1) } else { len + random.below(100) as usize }.min(ROOM);
        Receive {
            room: (room > 0 && random.one_in(2)).then_some(room),
            is_asked: false,
            wait: None,
            answer: Arc::default(),
            is_done: false,
        }
    }

    /// What it has ended with. Who waits gives up now and then.
    fn take(&mut self, random: &mut Random) -> Option<Answer> {
        match &mut self.wait {
            Some(wait) => wait.poll().or_else(|| random.one_in(30).then(|| wait.give_up()).flatten()),
            None => self.answer.take(),
        }
    }

    fn callback(&self) -> impl FnOnce(Answer) + Send + 'static {
        let place = self.answer.clone();
        move |answer| place.store(Some(answer))
    }
}

impl Item {
    fn is_done(&self) -> bool {
        self.receives.iter().all(|receive| receive.is_done)
    }
}

impl Step {
    fn new(group: &Group, random: &mut Random) -> Result<Step> {
        let size = group.workers.len();
        let mut items = Vec::new();
        let pairs = (0..size).flat_map(|from| (0..size).map(move |to| (from, to))).filter(|(from, to)| from != to);
        for (from, to) in pairs {
            for edge in 0..EDGES {
                let device = |worker| format!("{}/device:CPU:0", name(worker));
                let key = Key::new(&device(from), 1, &device(to), &edge.to_string(), 0, 0)?.text().to_owned();
                let value = Value {
                    // The shape of the step before, or another one.
                    len: [0, 8, 1000, ROOM, LARGE, LARGE, LARGE][random.below(7) as usize],
                    pattern: random.draw(),
                    is_dead: random.one_in(20),
                };
                let receives = 1 + usize::from(group.tolerate_dup_recv && random.one_in(3));
                let receives = (0..receives).map(|_| Receive::new(random, value.bytes().len())).collect();
                let place = (group.next as usize % WINDOW) * size * size * EDGES + items.len();
                items.push(Item { key, from, to, place, value, is_sent: false, lent: None, receives });
            }
        }
        let rendezvous = (0..size).map(|_| Found::NotYet).collect();
        Ok(Step { rendezvous, is_initialized: vec![false; size], is_aborted: vec![false; size], is_cut_short: random.one_in(4), items })
    }

    /// Whether nothing is left of it.
    fn is_over(&self) -> bool {
        self.rendezvous.iter().all(|found| matches!(found, Found::Over))
            && self.items.iter().all(|item| item.is_done() && item.lent.is_none())
    }
}

impl Group {
    fn new(world: &World, random: &mut Random, options: &Options) -> Result<Group> {
        let config = config(1 + random.below(3) as u32);
        let size = 2 + usize::from(random.one_in(3));
        let mode = if random.one_in(2) { Mode::Direct } else { Mode::Buffered };
        let (tolerate_dup_recv, registers) = (random.one_in(2), random.one_in(2));
        let names: Vec<String> = (0..size).map(name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let places = WINDOW * size * size * EDGES;
        let mut workers: Vec<Worker> = Vec::new();
        for (rank, name) in names.iter().enumerate() {
            let device = simulated::device(world, rank, options.rails, &config)?;
            let manager = SimulatedManager::from(Manager::new(device, name, &names, tolerate_dup_recv, mode)?);
            let (from, to) = (Pages::new(places * ROOM)?, Pages::new(places * RECEIVES * ROOM)?);
            if registers {
                manager.register(from.to_register())?;
                manager.register(to.to_register())?;
            }
            for place in 0..places * RECEIVES {
                world.guard(to.addr() + place * ROOM, ROOM);
            }
            for other in &workers {
                simulated::connect(&other.manager, &manager)?;
            }
            workers.push(Worker { manager, from, to, kept: Vec::new() });
        }
        let count = options.messages.div_ceil(size * (size - 1) * EDGES) as u64;
        Ok(Group { world: world.clone(), workers, steps: Vec::new(), next: 1, count, tolerate_dup_recv, received: 0 })
    }

    /// A worker begins something, or ends a step; whether there was anything.
    fn begin(&mut self, rank: usize, random: &mut Random) -> std::result::Result<bool, Stop> {
        let Group { world, workers, steps, .. } = self;
        let Some(index) = (!steps.is_empty()).then(|| random.below(steps.len() as u64) as usize) else { return Ok(false) };
        let (number, step) = &mut steps[index];
        let Step { rendezvous: all, is_initialized, is_aborted, is_cut_short, items } = step;
        let Worker { manager, from, to, .. } = &workers[rank];
        let rendezvous = match &all[rank] {
            Found::Here(rendezvous) => rendezvous,
            Found::NotYet if random.one_in(4) => {
                all[rank] = Found::Here(manager.step(*number));
                return Ok(true);
            }
            Found::NotYet | Found::Over => return Ok(false),
        };
        if !is_initialized[rank] && random.one_in(4) {
            is_initialized[rank] = true;
            rendezvous.initialize()?;
            return Ok(true);
        }
        if *is_cut_short && !is_aborted[rank] && random.one_in(40) {
            is_aborted[rank] = true;
            rendezvous.abort(&Error::usage(ABORTED))?;
            return Ok(true);
        }
        let is_done = is_initialized[rank] && items.iter().all(Item::is_done);
        if is_done || *is_cut_short && random.one_in(40) {
            // What was not begun comes to nothing.
            for item in items.iter_mut() {
                item.is_sent |= item.from == rank;
                let receives = if item.to == rank { item.receives.as_mut_slice() } else { &mut [] };
                receives.iter_mut().for_each(|receive| receive.is_done |= !receive.is_asked);
            }
            manager.cleanup(*number);
            all[rank] = Found::Over;
            return Ok(true);
        }
        let mut choices = Vec::new();
        for (index, item) in items.iter().enumerate() {
            if item.from == rank && !item.is_sent {
                choices.push((index, None));
            }
            let receives = item.receives.iter().enumerate().filter(|(_, receive)| item.to == rank && !receive.is_asked);
            choices.extend(receives.map(|(receive, _)| (index, Some(receive))));
        }
        if choices.is_empty() {
            return Ok(false);
        }
        let (index, receive) = choices[random.below(choices.len() as u64) as usize];
        let item = &mut items[index];
        match receive {
            None => match item.send(rendezvous, from, random) {
                Err(error) if is_aborted[rank] && error.to_string().contains(ABORTED) => item.lent = None,
                sent => sent?,
            },
            Some(receive) => item.ask(receive, rendezvous, (world, to), random)?,
        }
        Ok(true)
    }

    /// What has come for a worker, and what it has back.
    fn take(&mut self, rank: usize, random: &mut Random) -> std::result::Result<bool, Stop> {
        let Group { world, workers, steps, received, .. } = self;
        let Worker { manager, from, to, kept } = &mut workers[rank];
        let mut any = false;
        for (number, step) in steps.iter_mut() {
            let (may_fail, is_here) = (step.is_cut_short, matches!(step.rendezvous[rank], Found::Here(_)));
            for item in &mut step.items {
                let Item { value, place, .. } = *item;
                if item.from == rank && item.lent.as_ref().is_some_and(|released| released.load(Ordering::Relaxed)) {
                    // What is still read of it comes as something else.
                    from.write(place * ROOM, &bytes_of(value.len, !value.pattern));
                    item.lent = None;
                    any = true;
                }
                let receives = if item.to == rank { item.receives.as_mut_slice() } else { &mut [] };
                for (index, receive) in receives.iter_mut().enumerate() {
                    let Some(answer) = receive.take(random) else { continue };
                    let gave_up = receive.wait.take().is_some_and(|wait| wait.gave_up());
                    let what = || format!("receive {index} of {} of step {number}", item.key);
                    (receive.is_done, any) = (true, true);
                    let at = (place * RECEIVES + index) * ROOM;
                    if receive.room.is_some() {
                        world.guard(to.addr() + at, ROOM);
                    }
                    match answer {
                        Ok(tensor) => {
                            let bytes = match receive.room {
                                None => tensor.bytes().into_owned(),
                                Some(room) => {
                                    let mut bytes = vec![0; tensor.len().min(room)];
                                    to.read(at, &mut bytes);
                                    bytes
                                }
                            };
                            if !value.is(&tensor, &bytes) {
                                return wrong(format!("{} has come as another one: {:?}", what(), tensor.meta()));
                            }
                            *received += 1;
                            if receive.room.is_none() && !tensor.is_empty() {
                                world.guard(tensor.as_ptr().addr(), tensor.len());
                                kept.push((tensor, value));
                            }
                        }
                        Err(error) if gave_up && error.to_string().contains("Timed out waiting for notification") => {
                            // Who asks again gets it, also if it has come in between.
                            let again = is_here && random.one_in(2);
                            (receive.is_asked, receive.is_done) = (!again, !again);
                        }
                        Err(error) if may_fail && [ABORTED, "Cleanup "].iter().any(|why| error.to_string().contains(why)) => {}
                        Err(error)
                            if receive.room.is_some_and(|room| room < value.bytes().len())
                                && error.to_string().contains("received into") => {}
                        Err(error) => {
                            simulated::check(manager)?;
                            return wrong(format!("{} has failed: {error}", what()));
                        }
                    }
                }
            }
        }
        Ok(any)
    }

    /// Gives back what a worker has kept for a while.
    fn give_back(&mut self, rank: usize, most: usize) -> std::result::Result<(), Stop> {
        let kept = &mut self.workers[rank].kept;
        while kept.len() > most {
            let (tensor, value) = kept.remove(0);
            if !value.is(&tensor, &tensor.bytes()) {
                return wrong(format!("a tensor has changed since it was received: {:?}", tensor.meta()));
            }
            // Who receives one twice may have it in the same memory.
            if kept.iter().all(|(other, _)| other.as_ptr() != tensor.as_ptr()) {
                self.world.unguard(tensor.as_ptr().addr());
            }
        }
        Ok(())
    }

    /// Those that may be under way.
    fn next_steps(&mut self, random: &mut Random) -> Result<()> {
        self.steps.retain(|(_, step)| !step.is_over());
        while self.next <= self.count && self.steps.first().is_none_or(|(first, _)| self.next < first + WINDOW as u64) {
            let step = Step::new(self, random)?;
            self.steps.push((self.next, step));
            self.next += 1;
        }
        Ok(())
    }
}

impl Item {
    fn send(&mut self, rendezvous: &Rendezvous, from: &Pages, random: &mut Random) -> Result<()> {
        self.is_sent = true;
        let Item { key, value, lent, .. } = self;
        let (at, shape, bytes) = (self.place * ROOM, [value.len as i64, 1], value.bytes());
        match random.below(3) {
            _ if value.is_dead => rendezvous.send(key, Tensor::dead()),
            0 => rendezvous.send(key, Tensor::new(DATA_TYPE, &shape, bytes)?),
            1 => rendezvous.send_copy(key, DATA_TYPE, &shape, &bytes),
            _ => {
                from.write(at, &bytes);
                let released = lent.insert(Arc::default()).clone();
                let release = Box::new(move || released.store(true, Ordering::Relaxed));
                rendezvous.send_from(key, DATA_TYPE, &shape, part(from, at, value.len)?, release)
            }
        }
    }

    fn ask(&mut self, receive: usize, rendezvous: &Rendezvous, (world, to): (&World, &Pages), random: &mut Random) -> Result<()> {
        let at = (self.place * RECEIVES + receive) * ROOM;
        let receive = &mut self.receives[receive];
        receive.is_asked = true;
        let into = receive.room.map(|room| part(to, at, room)).transpose()?;
        if into.is_some() {
            world.unguard(to.addr() + at);
        }
        match into {
            _ if random.one_in(3) => receive.wait = Some(Wait::begin(rendezvous, &self.key, into)?),
            None => rendezvous.recv_async(&self.key, receive.callback())?,
            Some(into) => rendezvous.recv_into_async(&self.key, into, receive.callback())?,
        }
        Ok(())
    }
}

fn part(pages: &Pages, at: usize, len: usize) -> Result<UserMemory> {
    pages.to_register().part(at, len).ok_or_else(|| Error::internal("memory that is too short"))
}

impl Ranks for Group {
    fn count(&self) -> usize {
        self.workers.len()
    }

    fn poll(&mut self, rank: usize, random: &mut Random) -> std::result::Result<bool, Stop> {
        self.next_steps(random)?;
        let manager = &self.workers[rank].manager;
        let mut moved = simulated::poll(manager);
        if moved {
            simulated::check(manager)?;
        }
        if random.one_in(2) {
            moved |= manager.run(std::time::Duration::ZERO) > 0;
        }
        moved |= self.take(rank, random)?;
        moved |= self.begin(rank, random)?;
        let most = if random.one_in(8) { 0 } else { KEPT };
        self.give_back(rank, most)?;
        Ok(moved)
    }

    fn is_done(&self) -> bool {
        self.next > self.count
            && self.steps.iter().all(|(_, step)| step.is_over())
            && self.workers.iter().all(|worker| worker.kept.is_empty())
    }

    fn for_each_link(&mut self, rank: usize, f: &mut dyn FnMut(&mut Link)) {
        simulated::for_each_link(&self.workers[rank].manager, f);
    }

    fn received(&self) -> u64 {
        self.received
    }
}
