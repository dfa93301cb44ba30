//! What an episode is, from its seed: the test and every rank of it come to the same.

use crate::support::Random;

/// Settings of the library, and where the ranks run.
#[derive(Debug)]
pub struct Setting {
    pub env: &'static [(&'static str, &'static str)],
    pub place: Where,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    Here,
    /// In a network namespace, with two interfaces merged into one device.
    TwoRails,
    /// In two network namespaces, by turns.
    TwoHosts,
}

const fn here(env: &'static [(&'static str, &'static str)]) -> Setting {
    Setting { env, place: Where::Here }
}

const SHM: (&str, &str) = ("RAILHEAD_SOFT_WIRE", "shm");
const TCP: (&str, &str) = ("RAILHEAD_SOFT_WIRE", "tcp");
const STRAIGHT: (&str, &str) = ("RAILHEAD_CMA", "1");
const BOUNCED: (&str, &str) = ("RAILHEAD_CMA", "0");
const THREAD: (&str, &str) = ("RAILHEAD_PROGRESS", "thread");
const POLL: (&str, &str) = ("RAILHEAD_PROGRESS", "poll");
const MERGE: [(&str, &str); 2] = [("RAILHEAD_SOCKET_IFNAME", "=lo,rht"), ("RAILHEAD_FORCE_MERGE", "lo,rht")];

/// Neighbouring seeds have neighbouring settings, so that a short run sees most of them.
const SETTINGS: [Setting; 16] = [
    here(&[SHM, STRAIGHT, POLL]),
    here(&[TCP, POLL]),
    here(&[SHM, BOUNCED, POLL]),
    here(&[TCP, ("RAILHEAD_TCP_STREAMS", "2"), POLL]),
    here(&[SHM, STRAIGHT, THREAD]),
    here(&[TCP, THREAD]),
    here(&[SHM, BOUNCED, ("RAILHEAD_SHM_BOUNCE_KIB", "64"), THREAD]),
    here(&[TCP, ("RAILHEAD_TCP_STREAMS", "3"), THREAD]),
    here(&[SHM, ("RAILHEAD_CMA", "auto"), ("RAILHEAD_QPS_PER_RAIL", "2"), ("RAILHEAD_SPLIT_MIN", "4096"), POLL]),
    here(&[TCP, ("RAILHEAD_QPS_PER_RAIL", "4"), ("RAILHEAD_SPLIT_MIN", "128"), POLL]),
    here(&[SHM, BOUNCED, ("RAILHEAD_QPS_PER_RAIL", "3"), ("RAILHEAD_SPLIT_MIN", "128"), POLL]),
    here(&[TCP, ("RAILHEAD_TCP_STREAMS", "1"), ("RAILHEAD_TCP_BUFFER_KIB", "16"), POLL]),
    Setting { env: &[SHM, STRAIGHT, POLL, MERGE[0], MERGE[1]], place: Where::TwoRails },
    Setting { env: &[TCP, ("RAILHEAD_TCP_STREAMS", "2"), POLL, MERGE[0], MERGE[1]], place: Where::TwoRails },
    Setting { env: &[SHM, STRAIGHT, POLL, ("RAILHEAD_SOCKET_IFNAME", "rht")], place: Where::TwoHosts },
    Setting { env: &[TCP, THREAD, ("RAILHEAD_SOCKET_IFNAME", "rht")], place: Where::TwoHosts },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// A rank is stopped for less than the peer time-out, a few times.
    Pause {
        rank: usize,
    },
    /// A rank is killed.
    Kill {
        rank: usize,
    },
    /// A rank is stopped for longer than the peer time-out.
    Stop {
        rank: usize,
    },
    /// One side of a comm closes it in the middle.
    Close,
    /// One side of a comm deregisters memory of an outstanding request.
    Deregister,
}

impl Fault {
    /// For the tally.
    pub fn name(self) -> &'static str {
        match self {
            Fault::None => "none",
            Fault::Pause { .. } => "pause",
            Fault::Kill { .. } => "kill",
            Fault::Stop { .. } => "stop",
            Fault::Close => "close",
            Fault::Deregister => "deregister",
        }
    }
}

/// A comm.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub id: usize,
    pub from: usize,
    pub to: usize,
    /// The fault ends it.
    pub doomed: bool,
}

#[derive(Debug)]
pub struct Episode {
    pub seed: u64,
    pub setting: &'static Setting,
    pub fault: Fault,
    pub ranks: usize,
    /// Of each ordered pair of ranks.
    pub comms: usize,
    /// Longest message.
    pub most: usize,
    /// Most groups of a comm.
    pub groups: u64,
    /// Most bytes of a comm, about.
    pub bytes: u64,
    /// Of the table.
    pub version: u32,
    /// Groups that a rank has moved when the fault comes; 0: before it connects.
    pub moment: u64,
}

impl Episode {
    /// `cable`: whether there are network namespaces to run in; without them, such settings run here.
    pub fn new(seed: u64, cable: bool) -> Episode {
        let place = (seed % SETTINGS.len() as u64) as usize;
        let setting = &SETTINGS[place];
        let setting = if cable || setting.place == Where::Here { setting } else { &SETTINGS[place % 12] };
        let mut random = Random(seed);
        let ranks = if random.below(4) == 0 { 3 } else { 2 };
        let rank = random.below(ranks as u64) as usize;
        let fault = match random.below(24) {
            0..10 => Fault::None,
            10..13 => Fault::Pause { rank },
            13..17 => Fault::Kill { rank },
            17..20 => Fault::Close,
            20..23 => Fault::Deregister,
            _ => Fault::Stop { rank },
        };
        let most = [4096, 70_000, 600_000, 4 << 20][random.below(4) as usize];
        Episode {
            seed,
            setting,
            fault,
            ranks,
            comms: if ranks == 3 { 1 } else { 1 + random.below(3) as usize },
            most,
            groups: 20 + random.below(400),
            bytes: 24 << 20,
            version: [12, 12, 11, 10, 9, 8, 6][random.below(7) as usize],
            moment: if let Fault::Stop { .. } = fault { 1 } else { 0 } + random.below(40),
        }
    }

    /// The same numbers for the same use, whoever draws them.
    pub fn random(&self, purpose: u64) -> Random {
        Random(Random(self.seed.rotate_left(32) ^ purpose).next())
    }

    /// Which rank does what ends a comm.
    pub fn culprit(&self, spec: &Spec) -> usize {
        if self.moment.is_multiple_of(2) { spec.from } else { spec.to }
    }

    /// All comms.
    pub fn specs(&self) -> Vec<Spec> {
        let ranks = 0..self.ranks;
        let pairs: Vec<(usize, usize)> = ranks.clone().flat_map(|a| ranks.clone().map(move |b| (a, b))).filter(|(a, b)| a != b).collect();
        let all = pairs.iter().flat_map(|pair| std::iter::repeat_n(*pair, self.comms));
        let one = self.random(1).below((pairs.len() * self.comms) as u64) as usize;
        let doomed = |id: usize, from: usize, to: usize| match self.fault {
            Fault::None | Fault::Pause { .. } => false,
            Fault::Kill { rank } | Fault::Stop { rank } => rank == from || rank == to,
            Fault::Close | Fault::Deregister => id == one,
        };
        all.enumerate().map(|(id, (from, to))| Spec { id, from, to, doomed: doomed(id, from, to) }).collect()
    }

    /// Variables of every rank.
    pub fn env(&self) -> Vec<(&'static str, String)> {
        let mut random = self.random(2);
        let mut env: Vec<_> = self.setting.env.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        env.push(("RAILHEAD_STATS", random.below(2).to_string()));
        env.push(("RAILHEAD_STALL_WARN_S", ["0", "0.02", "10"][random.below(3) as usize].to_owned()));
        match self.fault {
            Fault::Stop { .. } => env.push(("RAILHEAD_PEER_TIMEOUT_S", "1".to_owned())),
            Fault::Pause { .. } => env.push(("RAILHEAD_PEER_TIMEOUT_S", "30".to_owned())),
            _ => {}
        }
        env
    }
}
