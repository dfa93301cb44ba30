//! A rank of an episode: one thread that drives all comms of the process by turns, as NCCL's proxy does.

use std::time::{Duration, Instant};

use crate::support::plugin::{Buf, INTERNAL_ERROR, Opaque, Plugin, REMOTE_ERROR, Result, Status};
use crate::support::{Ctx, Random};

use super::arena::Arena;
use super::episode::{Episode, Fault, Spec, Where};
use super::plan::{Message, Plan};
use super::registrations::{Registrations, Taken};

/// Longest time in which nothing moves: a bound on hangs on a machine that has much else to do.
const STILL: Duration = Duration::from_secs(40);
/// Requests of a comm whose memory is deregistered under them; then it is closed.
const DEREGISTERED: u32 = 12;
/// Groups after the moment of a fault that finds nothing to hit.
const UNHARMED: u64 = 1000;
/// What is written over memory whose send is done.
const OVER: u8 = 0xDD;

/// What all comms of the rank share.
struct Shared<'a> {
    ctx: &'a Ctx,
    episode: Episode,
    plugin: Plugin,
    /// This rank's own choices.
    random: Random,
    arena: Arena,
    registrations: Registrations,
    source: Vec<u8>,
    /// Requests that are done.
    done: u64,
    /// Messages received, and their bytes.
    received: (u64, u64),
    /// Whether the test knows that there is traffic.
    said: bool,
    /// Whether the test knows that every comm with the stopped rank is lost.
    lost: bool,
}

/// A message at its place in memory.
struct Placed {
    message: Message,
    at: usize,
    taken: Taken,
}

struct Open {
    request: Opaque,
    placed: Vec<Placed>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// A call said that the peer is lost: by `test`, or by posting.
    Lost {
        by_test: bool,
    },
    Closed,
}

/// This rank's end of a comm.
struct End {
    spec: Spec,
    comm: Opaque,
    sending: bool,
    plan: Plan,
    /// Of the arena, for this end alone: so no end waits for another's memory.
    share: (usize, usize),
    window: usize,
    phase: Phase,
    /// What has no place yet, and what has one but is not posted.
    waiting: Option<Vec<Message>>,
    ready: Option<Vec<Placed>>,
    open: Vec<Open>,
    /// Whose request ended in an error: the memory is the peer's until the close.
    lost: Vec<Placed>,
    groups: u64,
    deregistered: u32,
}

pub fn run(ctx: &Ctx) {
    let number = |name: &str| std::env::var(name).expect(name).parse::<u64>().expect(name);
    let episode = Episode::new(number("RHT_SEED"), number("RHT_CABLE") == 1);
    let mut plugin = Plugin::start(episode.version);
    let dev = if episode.setting.place == Where::TwoRails { two_rails(&plugin) } else { 0 };
    let mine: Vec<Spec> = episode.specs().into_iter().filter(|s| s.from == ctx.rank || s.to == ctx.rank).collect();
    let share = 2 * episode.most + 8192;
    let mut shared = Shared {
        ctx,
        random: episode.random(200 + ctx.rank as u64),
        arena: Arena::new(mine.len() * share),
        registrations: Registrations::default(),
        source: Plan::source(&episode),
        done: 0,
        received: (0, 0),
        said: false,
        lost: false,
        plugin,
        episode,
    };
    shared.tell();
    let comms = connect(&mut shared, dev, &mine);
    let mut ends: Vec<End> = Vec::new();
    for (i, (spec, comm)) in mine.iter().zip(comms).enumerate() {
        let Some(comm) = comm else { continue };
        ends.push(End {
            spec: *spec,
            comm,
            sending: spec.from == ctx.rank,
            plan: Plan::new(&shared.episode, spec),
            share: (i * share, (i + 1) * share),
            window: 1 + shared.random.below(8) as usize,
            phase: Phase::Running,
            waiting: None,
            ready: None,
            open: Vec::new(),
            lost: Vec::new(),
            groups: 0,
            deregistered: 0,
        });
    }
    drive(&mut shared, &mut ends);
    if !matches!(shared.episode.fault, Fault::Kill { .. } | Fault::Stop { .. }) {
        ctx.barrier();
    }
    shared.arena.check(0, shared.arena.len(), "at the end");
    plugin = shared.plugin;
    plugin.finalize().expect("finalize");
    shared.arena.check(0, shared.arena.len(), "after finalize");
    let (messages, bytes) = shared.received;
    ctx.say(&format!("{messages} {bytes}"));
}

fn two_rails(plugin: &Plugin) -> i32 {
    if plugin.version() < 9 {
        return 1;
    }
    plugin.make_vdevice(&[0, 1]).expect("makeVDevice")
}

/// All comms at once. `None`: its peer was killed before it was there.
fn connect(shared: &mut Shared, dev: i32, specs: &[Spec]) -> Vec<Option<Opaque>> {
    let rank = shared.ctx.rank;
    let plugin = &shared.plugin;
    let may_die = matches!(shared.episode.fault, Fault::Kill { .. });
    let mut listens: Vec<Option<Opaque>> = Vec::new();
    for spec in specs {
        listens.push((spec.to == rank).then(|| {
            let (handle, listen) = plugin.listen(dev).expect("listen");
            if shared.ctx.to(spec.from).send(&handle).is_err() {
                assert!(may_die && spec.doomed, "rank {} is gone", spec.from);
            }
            listen
        }));
    }
    let mut handles = Vec::new();
    for spec in specs {
        let from_me = spec.from == rank;
        handles.push(from_me.then(|| shared.ctx.to(spec.to).recv_within(STILL).map(|h| h.try_into().expect("a handle"))));
    }
    let begin = Instant::now();
    let mut comms: Vec<Option<Option<Opaque>>> = vec![None; specs.len()];
    while comms.iter().any(Option::is_none) {
        let i = shared.random.below(specs.len() as u64) as usize;
        if comms[i].is_some() {
            continue;
        }
        let spec = &specs[i];
        let result: Result<Option<Opaque>> = match (&mut handles[i], listens[i]) {
            (Some(Ok(handle)), _) => plugin.connect(dev, handle),
            (Some(Err(_)), _) => Err(REMOTE_ERROR),
            (None, Some(listen)) => match plugin.accept(listen) {
                // Who was to connect is dead: nobody comes.
                Ok(None) if may_die && spec.doomed && shared.ctx.to(spec.from).ready() && begin.elapsed() > Duration::from_millis(300) => {
                    Err(REMOTE_ERROR)
                }
                result => result,
            },
            (None, None) => unreachable!("this rank's comm"),
        };
        comms[i] = match result {
            Ok(None) => None,
            Ok(Some(comm)) => Some(Some(comm)),
            Err(status) => {
                assert!(may_die && spec.doomed, "{spec:?}: connect or accept: {status}");
                Some(None)
            }
        };
        assert!(begin.elapsed() < STILL, "not connected: {:?}", specs.iter().zip(&comms).filter(|c| c.1.is_none()).collect::<Vec<_>>());
        std::thread::yield_now();
    }
    listens.into_iter().flatten().for_each(|listen| plugin.close_listen(listen).expect("closeListen"));
    comms.into_iter().map(Option::flatten).collect()
}

/// Moves everything along until all ends are closed.
fn drive(shared: &mut Shared, ends: &mut [End]) {
    let mut moved_at = Instant::now();
    while ends.iter().any(|end| end.phase != Phase::Closed) {
        let live: Vec<usize> = (0..ends.len()).filter(|&i| ends[i].phase != Phase::Closed).collect();
        let first = shared.random.below(live.len() as u64) as usize;
        let mut moved = false;
        for &i in live[first..].iter().chain(&live[..first]) {
            let last = ends.iter().filter(|end| end.phase != Phase::Closed).count() == 1;
            moved |= ends[i].step(shared, last);
        }
        if !shared.lost && shared.outlives_a_stop() {
            shared.lost = ends.iter().filter(|end| end.spec.doomed).all(|end| end.phase != Phase::Running);
            if shared.lost {
                shared.ctx.say("lost");
            }
        }
        if moved {
            moved_at = Instant::now();
            shared.tell();
        } else {
            let left: Vec<String> = ends.iter().filter(|end| end.phase != Phase::Closed).map(End::describe).collect();
            assert!(moved_at.elapsed() < STILL, "rank {} hangs: {}", shared.ctx.rank, left.join("; "));
            std::thread::yield_now();
        }
        if shared.random.below(1000) == 0 {
            // The host does something else.
            std::thread::sleep(Duration::from_micros(shared.random.below(10_000)));
        }
    }
    // Its part may be over before the moment of the fault.
    shared.done = u64::MAX;
    shared.tell();
}

impl Shared<'_> {
    /// Whether another rank is stopped.
    fn outlives_a_stop(&self) -> bool {
        matches!(self.episode.fault, Fault::Stop { rank } if rank != self.ctx.rank)
    }

    /// Lets the test know that the moment of the fault has come.
    fn tell(&mut self) {
        let hit = match self.episode.fault {
            Fault::Pause { rank } | Fault::Kill { rank } | Fault::Stop { rank } => rank == self.ctx.rank,
            Fault::None | Fault::Close | Fault::Deregister => false,
        };
        if hit && !self.said && self.done >= self.episode.moment {
            self.said = true;
            self.ctx.say("moving");
        }
    }

    fn may_fail(&self, spec: &Spec, status: Status) {
        assert!(spec.doomed, "{spec:?} failed with {status} though nothing was done to it");
        // Who deregisters what it is sending breaks a rule of its own side; a receiver's peer finds the key refused.
        let own = self.episode.fault == Fault::Deregister && self.ctx.rank == spec.from && self.ctx.rank == self.episode.culprit(spec);
        assert!(status == REMOTE_ERROR || own && status == INTERNAL_ERROR, "{spec:?} failed with {status}");
    }
}

impl End {
    fn describe(&self) -> String {
        let open: Vec<usize> = self.open.iter().map(|o| o.placed.len()).collect();
        let (ready, waiting) = (self.ready.is_some(), self.waiting.is_some());
        format!("{:?} {:?} after {} groups, outstanding {open:?}, ready {ready}, waiting {waiting}", self.spec, self.phase, self.groups)
    }

    /// One turn. Whether anything happened.
    fn step(&mut self, s: &mut Shared, last: bool) -> bool {
        let mut moved = false;
        if self.phase == Phase::Running {
            moved |= self.post(s);
        }
        if !self.open.is_empty() {
            // NCCL tests the oldest; any may be.
            let index = if s.random.below(2) == 0 { 0 } else { s.random.below(self.open.len() as u64) as usize };
            moved |= self.test(s, index);
        }
        if self.phase == Phase::Running && s.episode.fault == Fault::Deregister {
            moved |= self.deregister(s);
        }
        let over = match self.phase {
            Phase::Running => {
                self.open.is_empty() && self.ready.is_none() && self.waiting.is_none() && self.plan.is_over(self.sending) || self.leaves(s)
            }
            // A peer that was stopped while it wrote into this rank's memory is waited for by the close, so that comes after the test has
            // heard of every loss, and lets the peer go on.
            Phase::Lost { .. } => self.open.is_empty() && (s.lost || !s.outlives_a_stop()),
            Phase::Closed => false,
        };
        if over {
            self.close(s, last);
        }
        moved || over
    }

    /// Whether this end closes in the middle.
    fn leaves(&self, s: &mut Shared) -> bool {
        let closes = match s.episode.fault {
            Fault::Close => self.groups > s.episode.moment,
            // What has left already needs no memory: with luck, no deregistration hits anything. And each of a window of one send may be
            // done when it is first tested: nothing is ever outstanding then.
            Fault::Deregister => self.deregistered == DEREGISTERED || self.groups > s.episode.moment + UNHARMED,
            _ => false,
        };
        closes && self.spec.doomed && s.ctx.rank == s.episode.culprit(&self.spec)
    }

    fn post(&mut self, s: &mut Shared) -> bool {
        if self.ready.is_none() && !self.place(s) {
            return false;
        }
        let Some(placed) = self.ready.take() else { return false };
        let result = if self.sending {
            let Placed { message, at, taken } = &placed[0];
            s.plugin.isend(self.comm, s.arena.ptr(*at), message.size, message.tag, taken.mr)
        } else {
            let buf = |p: &Placed| Buf { addr: s.arena.ptr(p.at), len: p.message.room, tag: p.message.tag, mr: p.taken.mr };
            let bufs: Vec<Buf> = placed.iter().map(buf).collect();
            s.plugin.irecv(self.comm, &bufs)
        };
        match result {
            Ok(None) => self.ready = Some(placed),
            Ok(Some(request)) => {
                self.open.push(Open { request, placed });
                return true;
            }
            Err(status) => {
                s.may_fail(&self.spec, status);
                // Nothing was posted: the memory is the rank's own.
                self.ready = Some(placed);
                self.phase = Phase::Lost { by_test: false };
                return true;
            }
        }
        false
    }

    /// Finds memory for what comes next. Whether it is ready to be posted.
    fn place(&mut self, s: &mut Shared) -> bool {
        if self.open.len() >= self.window {
            return false;
        }
        let next = self.waiting.take().or_else(|| if self.sending { self.plan.send().map(|m| vec![m]) } else { self.plan.group() });
        let Some(messages) = next else { return false };
        let Some(places) = self.room(s, &messages) else {
            self.waiting = Some(messages);
            return false;
        };
        let private = s.episode.fault == Fault::Deregister && self.spec.doomed && s.ctx.rank == s.episode.culprit(&self.spec);
        let placed = messages.into_iter().zip(places).map(|(message, at)| {
            let len = self.len(&message);
            s.arena.check(at, len, "memory that nothing was received into");
            if self.sending {
                s.arena.write(at, &s.source[message.from..message.from + len]);
            }
            let taken = if private {
                s.registrations.take_private(&s.plugin, self.comm, &s.arena, (at, len))
            } else {
                s.registrations.take(&s.plugin, self.comm, &s.arena, &mut s.random, (at, len))
            };
            Placed { message, at, taken }
        });
        self.ready = Some(placed.collect());
        true
    }

    /// Bytes of memory that a message takes here.
    fn len(&self, message: &Message) -> usize {
        if self.sending { message.size } else { message.room }
    }

    /// Places for all of them, apart from each other and from what is outstanding.
    fn room(&self, s: &mut Shared, messages: &[Message]) -> Option<Vec<usize>> {
        let outstanding = self.open.iter().flat_map(|o| &o.placed).map(|p| (p.at, p.at + self.len(&p.message)));
        let mut taken: Vec<(usize, usize)> = outstanding.collect();
        let mut places = Vec::new();
        let lonely = taken.is_empty();
        let mut next = self.share.0 + 64;
        for message in messages {
            let len = self.len(message);
            let slack = self.share.1 - self.share.0 - 128 - len;
            let gap = 1 + s.random.below(64) as usize;
            let anywhere = (0..12).map(|_| self.share.0 + 64 + s.random.below(slack as u64 + 1) as usize);
            let mut free = anywhere.filter(|&at| taken.iter().all(|&(begin, end)| at + len + gap <= begin || end + gap <= at));
            // In a row if it must be: a group always fits when nothing is outstanding.
            let at = if lonely && messages.len() > 1 { Some(next) } else { free.next() }?;
            next = at + len + gap;
            taken.push((at, at + len));
            places.push(at);
        }
        Some(places)
    }

    fn test(&mut self, s: &mut Shared, index: usize) -> bool {
        match s.plugin.test(self.open[index].request) {
            Ok(None) => false,
            Ok(Some(sizes)) => {
                let open = self.open.remove(index);
                if !self.sending && s.random.below(4) == 0 {
                    self.flush(s, &open.placed);
                }
                self.done(s, open, sizes);
                true
            }
            Err(status) => {
                s.may_fail(&self.spec, status);
                assert_ne!(
                    self.phase,
                    Phase::Lost { by_test: false },
                    "{:?}: posting failed before the test of what is outstanding",
                    self.spec
                );
                self.phase = Phase::Lost { by_test: true };
                let open = self.open.remove(index);
                self.lost.extend(open.placed);
                true
            }
        }
    }

    /// A request is done: everything that it promises holds.
    fn done(&mut self, s: &mut Shared, open: Open, sizes: [i32; 8]) {
        let n = open.placed.len();
        for (i, Placed { message, at, taken }) in open.placed.iter().enumerate() {
            let what = format!("{:?}, group {}, message {i} of {n}, {message:?}", self.spec, self.groups);
            let said = sizes[i] as usize;
            assert_eq!(said, message.moved(), "{what}");
            if self.sending {
                s.arena.check(*at, message.size, &what);
                s.arena.write(*at, &vec![OVER; message.size]);
            } else {
                s.arena.received(*at, &s.source[message.from..message.from + said], &what);
                s.arena.check(at + said, message.room - said, &format!("behind the message of {what}"));
                s.received = (s.received.0 + 1, s.received.1 + said as u64);
            }
            s.registrations.give(*taken);
        }
        assert!(n == 8 || sizes[n] == -1, "{:?}: a size was written beyond the request", self.spec);
        self.groups += 1;
        s.done += 1;
        s.registrations.thin(&s.plugin, self.comm, &mut s.random);
    }

    fn flush(&self, s: &Shared, placed: &[Placed]) {
        let bufs: Vec<Buf> =
            placed.iter().map(|p| Buf { addr: s.arena.ptr(p.at), len: p.message.moved(), tag: 0, mr: p.taken.mr }).collect();
        match s.plugin.iflush(self.comm, &bufs) {
            Ok(flush) => assert_eq!(flush, None, "host memory needs no flush"),
            Err(status) => s.may_fail(&self.spec, status),
        }
    }

    /// Gives memory back that a message is on its way to or from: either that has arrived, or it never does, and the comm is lost.
    fn deregister(&mut self, s: &mut Shared) -> bool {
        let culprit = self.spec.doomed && s.ctx.rank == s.episode.culprit(&self.spec);
        if !culprit || self.open.is_empty() || self.groups < s.episode.moment || s.random.below(4) > 0 {
            return false;
        }
        self.deregistered += 1;
        let index = s.random.below(self.open.len() as u64) as usize;
        let open = self.open.swap_remove(index);
        for p in &open.placed {
            s.registrations.drop_in_use(&s.plugin, self.comm, p.taken);
            if self.sending {
                // The peer checks what it receives.
                s.arena.write(p.at, &vec![OVER; p.message.size]);
            } else {
                s.arena.freeze(p.at, p.message.room);
            }
        }
        let mut result = s.plugin.test(open.request);
        let begin = Instant::now();
        while result == Ok(None) {
            assert!(begin.elapsed() < STILL, "{:?}: neither done nor lost after deregMr", self.spec);
            std::thread::yield_now();
            result = s.plugin.test(open.request);
        }
        match result {
            Ok(Some(sizes)) => self.done(s, open, sizes),
            Ok(None) => unreachable!("waited for"),
            Err(status) => {
                s.may_fail(&self.spec, status);
                open.placed.iter().for_each(|p| s.arena.check(p.at, self.len(&p.message), "memory was written after deregMr"));
                self.phase = Phase::Lost { by_test: true };
            }
        }
        true
    }

    fn close(&mut self, s: &mut Shared, last: bool) {
        if last {
            s.registrations.clear(&s.plugin, self.comm);
        }
        if self.sending { s.plugin.close_send(self.comm) } else { s.plugin.close_recv(self.comm) }.expect("close");
        self.phase = Phase::Closed;
        let open = std::mem::take(&mut self.open).into_iter().flat_map(|open| open.placed);
        for p in open.chain(std::mem::take(&mut self.lost)) {
            let len = self.len(&p.message);
            // Whatever came, nothing comes any more.
            s.arena.freeze(p.at, len);
            s.registrations.give(p.taken);
        }
        for p in self.ready.take().into_iter().flatten() {
            s.registrations.give(p.taken);
        }
    }
}
