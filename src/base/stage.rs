//! Named points at which a test stops, kills or ends the process. Called by `net`, `link`, `tensor` and `fabric`, on whatever thread gets there.
//!
//! Without the feature `stages`, which only tests enable, [`reach`] is empty and reads no environment. With it,
//! `RH_STAGE=name[:nth]=stop|kill|exit` makes the process write "name\n" to the descriptor RH_STAGE_FD (the proof that the stage was reached)
//! and then raise SIGSTOP, raise SIGKILL or leave by _exit(0), when it gets to that stage for the nth time (default 1).
//!
//! `RH_STAGE=rail=R[,R...]@N:down[:MS]` lets rails fail instead: of each link that goes on without one, one of these rails, in turn, whenever N more
//! messages were posted and all rails of the link work. Its queue pairs go to ERROR, as if the device had failed; the link finds that out as it finds out
//! the other. With MS, the end that connects a rail anew does so MS milliseconds after it is settled, each time, rather than after pauses that grow. Where
//! that may be the other end, it has the same with an N that is never reached: ends that both let rails fail may do so at the same time, to all of them.

macro_rules! stages {
    ($($variant:ident = $name:literal, $doc:literal;)*) => {
        /// A point in the life of a connection or of a message.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Stage {
            $(#[doc = $doc] $variant,)*
        }

        impl Stage {
            /// Every stage.
            pub const ALL: &'static [Stage] = &[$(Stage::$variant),*];

            /// Name in RH_STAGE.
            pub fn name(self) -> &'static str {
                match self { $(Stage::$variant => $name,)* }
            }
        }
    };
}

stages! {
    ListenOpen = "listen_open", "A listen comm exists.";
    ConnectDialed = "connect_dialed", "Connector: the handshake's stream is up, nothing was said.";
    ConnectH1Sent = "connect_h1_sent", "Connector: H1 is out.";
    ConnectH2Received = "connect_h2_received", "Connector: H2 is in and verified.";
    ConnectH3Sent = "connect_h3_sent", "Connector: H3 is out.";
    AcceptAccepted = "accept_accepted", "Acceptor: a stream came in.";
    AcceptH1Received = "accept_h1_received", "Acceptor: H1 is in and verified.";
    AcceptH2Sent = "accept_h2_sent", "Acceptor: H2 is out.";
    AcceptH3Received = "accept_h3_received", "Acceptor: H3 is in and verified.";
    WireDialed = "wire_dialed", "Fabric: a wire's control stream is connected, nothing was sent.";
    WireHelloReady = "wire_hello_ready", "Fabric: a wire's memory is made, its Hello is about to be sent.";
    WireHelloSent = "wire_hello_sent", "Fabric: the wire's Hello was sent.";
    WireUp = "wire_up", "Fabric: both ends are authenticated and have the wire.";
    RecvPosted = "recv_posted", "Receiver: a clear-to-send was written.";
    SendPosted = "send_posted", "Sender: a message's WRITEs were posted.";
    SendHalf = "send_half", "Sender: part of a message has moved.";
    SendShared = "send_shared", "Sender: about to write a part of a message into the receiver's memory.";
    RecvHalf = "recv_half", "Receiver: part of a message has arrived.";
    SendDone = "send_done", "Sender: a message completed.";
    RecvDone = "recv_done", "Receiver: a message completed.";
    Flush = "flush", "Receiver: a flush was posted.";
    Closing = "closing", "A comm is about to close.";
    TensorRequest = "tensor_request", "Tensors, this and below: such a message was posted.";
    TensorBufferRequest = "tensor_buffer_request", "See `TensorRequest`.";
    TensorBufferResponse = "tensor_buffer_response", "See `TensorRequest`.";
    TensorBufferIdle = "tensor_buffer_idle", "See `TensorRequest`.";
    TensorWrite = "tensor_write", "See `TensorRequest`.";
    TensorMetaDataUpdate = "tensor_meta_data_update", "See `TensorRequest`.";
    TensorReRequest = "tensor_re_request", "See `TensorRequest`.";
    TensorErrorStatus = "tensor_error_status", "See `TensorRequest`.";
    TensorWithdraw = "tensor_withdraw", "See `TensorRequest`.";
    TensorWithdrawn = "tensor_withdrawn", "See `TensorRequest`.";
    TensorAck = "tensor_ack", "See `TensorRequest`: the message that it is for was copied, and not looked at.";
}

#[cfg(not(feature = "stages"))]
mod armed {
    /// Empty: stages are not compiled in.
    #[inline(always)]
    pub fn reach(_stage: super::Stage) {}

    /// Empty: stages are not compiled in.
    pub fn init() {}

    /// Empty: stages are not compiled in.
    pub struct FailingRails;

    impl FailingRails {
        /// Of a new link.
        #[inline(always)]
        pub fn of_link() -> FailingRails {
            FailingRails
        }

        /// Empty: stages are not compiled in.
        #[inline(always)]
        pub fn posted(&mut self, _all_work: impl FnOnce() -> bool) -> Option<usize> {
            None
        }

        /// Empty: stages are not compiled in.
        #[inline(always)]
        pub fn pause(&self, usual_ns: u64) -> u64 {
            usual_ns
        }
    }
}

#[cfg(feature = "stages")]
mod armed {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

    use super::Stage;
    use crate::base::log::{self, log_warn};
    use crate::base::sync::lock;

    /// `stage as u32 + 1` of the stage waited for, or 0.
    static WANTED: AtomicU32 = AtomicU32::new(0);
    /// How many more times it must be reached.
    static LEFT: AtomicU32 = AtomicU32::new(0);
    static ACTION: AtomicU32 = AtomicU32::new(0);
    static PROOF_FD: AtomicI32 = AtomicI32::new(-1);
    /// Which rails of each new link fail.
    static RAILS: Mutex<Option<Rails>> = Mutex::new(None);

    /// What RH_STAGE says of rails.
    #[derive(Debug, Clone, PartialEq)]
    pub(super) struct Rails {
        pub(super) rails: Vec<usize>,
        /// Messages from one failure to the next.
        pub(super) every: u64,
        /// Until the rail is connected again.
        pub(super) pause_ns: Option<u64>,
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    pub(super) enum Action {
        Stop,
        Kill,
        Exit,
    }

    /// Reads RH_STAGE and RH_STAGE_FD. Called by each init, with the rest of the environment.
    pub fn init() {
        let fd = std::env::var("RH_STAGE_FD").ok().and_then(|v| v.parse().ok()).unwrap_or(-1);
        arm(&std::env::var("RH_STAGE").unwrap_or_default(), fd);
    }

    pub(super) fn arm(text: &str, proof_fd: i32) {
        let rails = parse_rails(text);
        let rails_fail = rails.is_some();
        *lock(&RAILS) = rails;
        let Some((stage, nth, action)) = parse(text) else {
            WANTED.store(0, Ordering::Relaxed);
            if !text.is_empty() && !rails_fail {
                log_warn!(log::INIT, "RH_STAGE={text}: expected name[:nth]=stop|kill|exit or rail=R[,R...]@N:down[:MS]");
            }
            return;
        };
        PROOF_FD.store(proof_fd, Ordering::Relaxed);
        LEFT.store(nth, Ordering::Relaxed);
        ACTION.store(action as u32, Ordering::Relaxed);
        // Release: whoever sees the stage armed sees the rest; pairs with the load in `reach`.
        WANTED.store(stage as u32 + 1, Ordering::Release);
    }

    pub(super) fn parse(text: &str) -> Option<(Stage, u32, Action)> {
        let (point, action) = text.split_once('=')?;
        let (name, nth) = match point.split_once(':') {
            Some((name, nth)) => (name, nth.parse().ok().filter(|&n| n > 0)?),
            None => (point, 1),
        };
        let stage = *Stage::ALL.iter().find(|s| s.name() == name)?;
        let action = match action {
            "stop" => Action::Stop,
            "kill" => Action::Kill,
            "exit" => Action::Exit,
            _ => return None,
        };
        Some((stage, nth, action))
    }

    pub(super) fn parse_rails(text: &str) -> Option<Rails> {
        let (rails, rest) = text.strip_prefix("rail=")?.split_once('@')?;
        let rails = rails.split(',').map(|rail| rail.parse().ok()).collect::<Option<_>>()?;
        let (every, pause) = match rest.split_once(":down")? {
            (every, "") => (every, None),
            (every, pause) => (every, Some(pause.strip_prefix(':')?.parse::<u32>().ok()?)),
        };
        let every = every.parse().ok().filter(|every| *every > 0)?;
        Some(Rails { rails, every, pause_ns: pause.map(|ms| u64::from(ms) * 1_000_000) })
    }

    /// The rails of one link that fail.
    pub struct FailingRails {
        rails: Option<Rails>,
        /// Since the last one failed.
        posted: u64,
        turn: usize,
    }

    impl FailingRails {
        /// Of a new link.
        pub fn of_link() -> FailingRails {
            FailingRails::of(lock(&RAILS).clone())
        }

        pub(super) fn of(rails: Option<Rails>) -> FailingRails {
            FailingRails { rails, posted: 0, turn: 0 }
        }

        /// A message was posted: the rail that fails now. None does before all of them work.
        pub fn posted(&mut self, all_work: impl FnOnce() -> bool) -> Option<usize> {
            let Rails { rails, every, .. } = self.rails.as_ref()?;
            self.posted += 1;
            if self.posted < *every || !all_work() {
                return None;
            }
            let rail = rails.get(self.turn % rails.len()).copied();
            (self.posted, self.turn) = (0, self.turn + 1);
            rail
        }

        /// How long a rail that has failed is left alone.
        pub fn pause(&self, usual_ns: u64) -> u64 {
            self.rails.as_ref().and_then(|rails| rails.pause_ns).unwrap_or(usual_ns)
        }
    }

    /// Says that this point was reached.
    pub fn reach(stage: Stage) {
        if WANTED.load(Ordering::Acquire) == stage as u32 + 1 && LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
            WANTED.store(0, Ordering::Relaxed);
            act(stage);
        }
    }

    fn act(stage: Stage) {
        let proof = format!("{}\n", stage.name());
        // SAFETY: writes bytes that outlive the call to a descriptor that the test named; a bad one is an error that is ignored.
        unsafe { libc::write(PROOF_FD.load(Ordering::Relaxed), proof.as_ptr().cast(), proof.len()) };
        let action = ACTION.load(Ordering::Relaxed);
        // SAFETY: signals and exits concern this process alone, as the test wants.
        unsafe {
            if action == Action::Stop as u32 {
                // Sent to this thread, which therefore goes no step further; sent to the process, another thread would take it first.
                libc::raise(libc::SIGSTOP);
            } else if action == Action::Kill as u32 {
                libc::kill(libc::getpid(), libc::SIGKILL);
            } else {
                libc::_exit(0);
            }
        }
    }
}

pub use armed::{FailingRails, init, reach};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for (i, a) in Stage::ALL.iter().enumerate() {
            assert_eq!(*a as usize, i);
            assert!(Stage::ALL[..i].iter().all(|b| b.name() != a.name()), "{}", a.name());
        }
    }

    #[cfg(feature = "stages")]
    #[test]
    fn every_stage_can_be_named_and_nothing_else() {
        use super::armed::{Action, parse};
        for stage in Stage::ALL {
            assert_eq!(parse(&format!("{}=stop", stage.name())), Some((*stage, 1, Action::Stop)));
            assert_eq!(parse(&format!("{}:3=kill", stage.name())), Some((*stage, 3, Action::Kill)));
        }
        assert_eq!(parse("flush=exit"), Some((Stage::Flush, 1, Action::Exit)));
        for bad in ["", "flush", "flush=", "flush=pause", "flush:0=stop", "flush:x=stop", "flash=stop", "=stop"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[cfg(feature = "stages")]
    #[test]
    fn rails_can_be_named_and_nothing_else() {
        use super::armed::{Rails, parse, parse_rails};
        let rails = |rails: &[usize], every, pause_ns| Some(Rails { rails: rails.to_vec(), every, pause_ns });
        assert_eq!(parse_rails("rail=1@3:down"), rails(&[1], 3, None));
        assert_eq!(parse_rails("rail=1,0,7@1:down:0"), rails(&[1, 0, 7], 1, Some(0)));
        assert_eq!(parse_rails("rail=0@20:down:1500"), rails(&[0], 20, Some(1_500_000_000)));
        let bad =
            ["", "flush=exit", "rail=", "rail=@3:down", "rail=1@0:down", "rail=1@3", "rail=1@3:down:", "rail=1@3:downs", "rail=1,@3:down"];
        for bad in bad {
            assert_eq!(parse_rails(bad), None, "{bad}");
        }
        assert_eq!(parse("rail=1@3:down"), None);
    }

    #[cfg(feature = "stages")]
    #[test]
    fn rails_fail_in_turn_after_so_many_messages_once_all_work() {
        use super::armed::parse_rails;
        let mut rails = FailingRails::of(parse_rails("rail=1,0@3:down:5"));
        let posts = [true, true, true, true, true, false, false, true, true, true, true];
        let failed: Vec<_> = posts.into_iter().map(|all_work| rails.posted(|| all_work)).collect();
        let (none, one, zero) = (None, Some(1), Some(0));
        assert_eq!(failed, [none, none, one, none, none, none, none, zero, none, none, one]);
        assert_eq!(rails.pause(100), 5_000_000);
        let mut none = FailingRails::of(None);
        assert_eq!((none.posted(|| panic!("asked in vain")), none.pause(100)), (None, 100));
    }

    #[cfg(feature = "stages")]
    #[test]
    fn acts_at_the_nth_time_only_and_proves_it() {
        use std::io::Read;
        use std::os::fd::FromRawFd;

        use super::armed::arm;
        use crate::base::fork::tests::in_child;

        let mut ends = [0; 2];
        // SAFETY: two ints, as the call wants.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        // SAFETY: the call just returned it.
        let mut reader = unsafe { std::fs::File::from_raw_fd(ends[0]) };
        let run = |text: &str, stages: &[Stage]| {
            in_child(|| {
                arm(text, ends[1]);
                stages.iter().for_each(|stage| reach(*stage));
                // Not reached if the stage ended the process, which `exit` does with 0.
                false
            })
        };
        assert!(!run("flush:2=exit", &[Stage::Flush, Stage::Closing, Stage::SendHalf]));
        assert!(run("flush:2=exit", &[Stage::Flush, Stage::Closing, Stage::Flush]));
        assert!(!run("closing=kill", &[Stage::Closing]));
        assert!(!run("", &[Stage::Closing]));
        // SAFETY: ours, and not used again.
        unsafe { libc::close(ends[1]) };
        let mut proof = String::new();
        reader.read_to_string(&mut proof).unwrap();
        assert_eq!(proof, "flush\nclosing\n");
    }
}
