//! Notices what stays outstanding too long. Asked by the thread that drives the link, on polls that found nothing, and then rarely.
//!
//! Nothing is noted when a request is posted or completes, so a message pays nothing: a look finds the oldest thing that the caller waits
//! for and remembers since when it has been the same. Ages are therefore lower bounds, and what is reported did wait that long.

use std::time::Duration;

use super::wr_id::RequestId;

/// Looks per limit: how late a report may come.
const LOOKS: u64 = 8;
/// Numbers of probes, of which one or two are under way at once.
const PROBES: u32 = 255;

/// What a caller waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A request.
    Request(RequestId),
    /// The send of that number: `isend` gives no request yet.
    NextSend,
}

/// The oldest of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// What it is.
    pub subject: Subject,
    /// Its sequence number.
    pub sequence: u64,
}

/// What a look came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do.
    Nothing,
    /// Half of the limit is over: time to find out what a report would say.
    Suspect,
    /// To be reported.
    Stalled {
        /// At least so many nanoseconds.
        age_ns: u64,
        /// Bytes that moved meanwhile.
        moved: u64,
    },
    /// What was reported is no longer waited for.
    Over {
        /// What that was.
        was: Waiting,
        /// Nanoseconds, about.
        age_ns: u64,
    },
}

/// The watch over one comm.
pub struct StallWatch {
    /// Nanoseconds; 0 = off.
    limit_ns: u64,
    looked_at: u64,
    waiting: Option<Waiting>,
    since: u64,
    moved_before: u64,
    /// When half of the limit was found to be over.
    suspected: Option<u64>,
    /// A report was put off, because this side itself had not polled.
    put_off: bool,
    reported: bool,
    last_probe: u32,
    answered: bool,
}

impl StallWatch {
    /// Reports after so many nanoseconds; 0 = never.
    pub fn new(limit_ns: u64) -> StallWatch {
        StallWatch {
            limit_ns,
            looked_at: 0,
            waiting: None,
            since: 0,
            moved_before: 0,
            suspected: None,
            put_off: false,
            reported: false,
            last_probe: 0,
            answered: false,
        }
    }

    /// How far apart looks are to be.
    pub fn interval(&self) -> Option<Duration> {
        (self.limit_ns > 0).then(|| Duration::from_nanos(self.limit_ns / LOOKS))
    }

    /// Whether it is time for a look.
    pub fn due(&self, now: u64) -> bool {
        self.limit_ns > 0 && now.saturating_sub(self.looked_at) >= self.limit_ns / LOOKS
    }

    /// A look: the oldest thing that the caller waits for, and a count of the bytes that the comm has moved.
    pub fn look(&mut self, now: u64, waiting: Option<Waiting>, moved: u64) -> Step {
        let gap = now.saturating_sub(self.looked_at);
        self.looked_at = now;
        if waiting != self.waiting {
            let over = self.waiting.filter(|_| self.reported).map(|was| Step::Over { was, age_ns: now.saturating_sub(self.since) });
            self.waiting = waiting;
            self.since = now;
            self.moved_before = moved;
            (self.suspected, self.put_off, self.reported, self.answered) = (None, false, false, false);
            return over.unwrap_or(Step::Nothing);
        }
        if waiting.is_none() || self.reported {
            return Step::Nothing;
        }
        let age_ns = now.saturating_sub(self.since);
        let Some(suspected) = self.suspected else {
            if age_ns < self.limit_ns / 2 {
                return Step::Nothing;
            }
            self.suspected = Some(now);
            return Step::Suspect;
        };
        // If this side was late to suspect, the peer has its time to answer nevertheless.
        if age_ns < self.limit_ns || now.saturating_sub(suspected) < self.limit_ns / LOOKS * 3 {
            return Step::Nothing;
        }
        // What arrived while this side did not poll may be about to be found.
        if gap > self.limit_ns / 2 && !self.put_off {
            self.put_off = true;
            return Step::Nothing;
        }
        self.reported = true;
        Step::Stalled { age_ns, moved: moved.wrapping_sub(self.moved_before) }
    }

    /// How long the caller has waited for this, in nanoseconds, as far as known.
    pub fn age(&self, now: u64, sequence: u64) -> Option<u64> {
        self.waiting.filter(|waiting| waiting.sequence == sequence).map(|_| now.saturating_sub(self.since))
    }

    /// The number of a new probe of the peer's fabric: its completion shows that the peer has taken all that was posted before.
    pub fn probe(&mut self) -> RequestId {
        self.last_probe = self.last_probe % PROBES + 1;
        self.answered = false;
        RequestId(self.last_probe)
    }

    /// The number of a probe for another purpose, which does not take back what the last one found out.
    pub fn last_probe_id(&self) -> RequestId {
        RequestId(self.last_probe)
    }

    /// A probe was answered, which may be the last one.
    #[inline]
    pub fn answer(&mut self, id: RequestId) {
        if id.0 == self.last_probe {
            self.answered = true;
        }
    }

    /// Whether the last probe was answered.
    pub fn answered(&self) -> bool {
        self.answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 8000;

    fn request(n: u32) -> Option<Waiting> {
        Some(Waiting { subject: Subject::Request(RequestId(n << 8)), sequence: u64::from(n) })
    }

    #[test]
    fn one_request_is_reported_once_and_its_end_told() {
        let mut watch = StallWatch::new(LIMIT);
        let mut steps = Vec::new();
        for i in 0..=20 {
            steps.push(watch.look(100_000 + 1000 * i, request(1), 7 + i));
        }
        assert_eq!(steps[4], Step::Suspect);
        assert_eq!(steps[8], Step::Stalled { age_ns: LIMIT, moved: 8 });
        assert!(steps.iter().enumerate().all(|(i, step)| [4, 8].contains(&i) || *step == Step::Nothing), "{steps:?}");
        assert_eq!(watch.age(121_000, 1), Some(21_000));
        assert_eq!(watch.age(121_000, 2), None);
        let was = request(1).unwrap();
        assert_eq!(watch.look(121_000, request(2), 0), Step::Over { was, age_ns: 21_000 });
        assert_eq!(watch.look(122_000, None, 0), Step::Nothing, "the second was not reported");
    }

    #[test]
    fn requests_that_take_turns_are_never_reported() {
        let mut watch = StallWatch::new(LIMIT);
        let mut now = 100_000;
        for n in 1..100 {
            for _ in 0..8 {
                let step = watch.look(now, request(n), 0);
                assert!(matches!(step, Step::Nothing | Step::Suspect), "{step:?}");
                now += 999;
            }
        }
    }

    #[test]
    fn a_next_send_is_not_the_request_that_follows_it() {
        let mut watch = StallWatch::new(LIMIT);
        let blocked = Some(Waiting { subject: Subject::NextSend, sequence: 1 });
        watch.look(100_000, blocked, 0);
        watch.look(107_000, blocked, 0);
        assert_eq!(watch.look(108_000, request(1), 0), Step::Nothing);
        assert_eq!(watch.look(109_000, request(1), 0), Step::Nothing);
    }

    #[test]
    fn a_side_that_did_not_poll_looks_twice() {
        let mut watch = StallWatch::new(LIMIT);
        watch.look(100_000, request(1), 0);
        watch.look(104_000, request(1), 0);
        assert_eq!(watch.look(900_000, request(1), 0), Step::Nothing);
        assert_eq!(watch.look(901_000, request(1), 0), Step::Stalled { age_ns: 801_000, moved: 0 });
        // One that always polls so rarely is late, not silent.
        let mut watch = StallWatch::new(LIMIT);
        let steps: Vec<Step> = (1..6).map(|i| watch.look(i * 50_000, request(1), 0)).collect();
        assert!(matches!(steps[..], [Step::Nothing, Step::Suspect, Step::Nothing, Step::Stalled { .. }, Step::Nothing]), "{steps:?}");
    }

    #[test]
    fn who_suspects_late_leaves_the_peer_its_time() {
        let mut watch = StallWatch::new(LIMIT);
        watch.look(100_000, request(1), 0);
        assert_eq!(watch.look(107_900, request(1), 0), Step::Suspect);
        assert_eq!(watch.look(108_900, request(1), 0), Step::Nothing);
        assert_eq!(watch.look(109_900, request(1), 0), Step::Nothing);
        assert_eq!(watch.look(110_900, request(1), 0), Step::Stalled { age_ns: 10_900, moved: 0 });
    }

    #[test]
    fn looks_are_rare_and_none_when_off() {
        let mut watch = StallWatch::new(LIMIT);
        assert!(watch.due(100_000));
        watch.look(100_000, None, 0);
        assert!(!watch.due(100_999) && watch.due(101_000));
        assert!(!StallWatch::new(0).due(u64::MAX));
    }

    #[test]
    fn only_the_last_question_is_answered() {
        let mut watch = StallWatch::new(LIMIT);
        let first = watch.probe();
        let second = watch.probe();
        watch.answer(first);
        assert!(!watch.answered());
        watch.answer(second);
        assert!(watch.answered());
        for _ in 0..1000 {
            let id = watch.probe();
            assert!((1..=255).contains(&id.0) && !watch.answered());
        }
    }
}
