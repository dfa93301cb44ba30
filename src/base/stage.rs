//! Named points at which a test stops, kills or ends the process. Called by `net`, `link`, `tensor` and `fabric`, on whatever thread gets there.
//!
//! Without the feature `stages`, which only tests enable, [`reach`] is empty and reads no environment. With it,
//! `RH_STAGE=name[:nth]=stop|kill|exit` makes the process write "name\n" to the descriptor RH_STAGE_FD (the proof that the stage was reached)
//! and then raise SIGSTOP, raise SIGKILL or leave by _exit(0), when it gets to that stage for the nth time (default 1).

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
}

#[cfg(feature = "stages")]
mod armed {
    use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

    use super::Stage;
    use crate::base::log::{self, log_warn};

    /// `stage as u32 + 1` of the stage waited for, or 0.
    static WANTED: AtomicU32 = AtomicU32::new(0);
    /// How many more times it must be reached.
    static LEFT: AtomicU32 = AtomicU32::new(0);
    static ACTION: AtomicU32 = AtomicU32::new(0);
    static PROOF_FD: AtomicI32 = AtomicI32::new(-1);

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
        let Some((stage, nth, action)) = parse(text) else {
            WANTED.store(0, Ordering::Relaxed);
            if !text.is_empty() {
                log_warn!(log::INIT, "RH_STAGE={text}: expected name[:nth]=stop|kill|exit");
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

pub use armed::{init, reach};

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
