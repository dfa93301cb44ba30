//! The key of a tensor: who produces it on which device, who gets it, and which of them it is. Used by whoever names tensors. Any thread.
//!
//! As TensorFlow writes them (tensorflow/core/framework/rendezvous.cc, CreateKey and ParseKey): the producer's device, its incarnation in
//! hexadecimal, the consumer's device, the name of the edge, and frame and iteration, with semicolons between them.

use crate::base::error::{Error, Result};

use super::message::NAME_MAX;

/// A key, in its parts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    text: String,
    /// Where the parts end in the text, without the last.
    ends: [usize; 4],
    /// Of the producer's process: another one with the same name is not it.
    pub src_incarnation: u64,
    /// Of a loop, and the time around it.
    pub frame: u64,
    /// See `frame`.
    pub iter: i64,
}

impl Key {
    /// Errors: a part that is empty or has a semicolon in it; more than 512 bytes in all.
    pub fn new(src_device: &str, src_incarnation: u64, dst_device: &str, edge: &str, frame: u64, iter: i64) -> Result<Key> {
        for (what, part) in [("source device", src_device), ("destination device", dst_device), ("edge", edge)] {
            if part.is_empty() || part.contains(';') {
                return Err(Error::usage(format!("{what} {part:?}; expected some text without a semicolon")));
            }
        }
        Key::parse(&format!("{src_device};{src_incarnation:016x};{dst_device};{edge};{frame}:{iter}"))
    }

    /// Errors: a text that [`Key::new`] does not make.
    pub fn parse(text: &str) -> Result<Key> {
        let wrong = |why: &str| {
            let expected = "expected SOURCE_DEVICE;INCARNATION (16 hexadecimal digits);DESTINATION_DEVICE;EDGE;FRAME:ITERATION";
            Err(Error::usage(format!("key {text:?} {why}; {expected}")))
        };
        if text.len() > NAME_MAX {
            return Err(Error::usage(format!("a key of {} bytes; at most {NAME_MAX}", text.len())));
        }
        let mut parts = text.split(';');
        let five = std::array::from_fn(|_| parts.next());
        let ([Some(src), Some(incarnation), Some(dst), Some(edge), Some(frame_iter)], None) = (five, parts.next()) else {
            return wrong("has not five parts");
        };
        if src.is_empty() || dst.is_empty() || edge.is_empty() {
            return wrong("has an empty part");
        }
        let hexadecimal = incarnation.len() == 16 && incarnation.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let Some(src_incarnation) = u64::from_str_radix(incarnation, 16).ok().filter(|_| hexadecimal) else {
            return wrong("has another incarnation");
        };
        let numbers = frame_iter.split_once(':').filter(|(frame, iter)| is_shortest(frame) && is_shortest(iter));
        let Some((frame, iter)) = numbers.and_then(|(frame, iter)| Some((frame.parse().ok()?, iter.parse().ok()?))) else {
            return wrong("has another frame and iteration");
        };
        let mut end = 0;
        let ends = [src, incarnation, dst, edge].map(|part| {
            let at = end + part.len();
            end = at + 1;
            at
        });
        Ok(Key { text: text.to_owned(), ends, src_incarnation, frame, iter })
    }

    /// All of it.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn part(&self, index: usize) -> &str {
        let begin = index.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |end| end + 1);
        self.ends.get(index).and_then(|end| self.text.get(begin..*end)).unwrap_or_default()
    }

    /// The producer's device.
    pub fn src_device(&self) -> &str {
        self.part(0)
    }

    /// The consumer's.
    pub fn dst_device(&self) -> &str {
        self.part(2)
    }

    /// Which of the tensors between them.
    pub fn edge(&self) -> &str {
        self.part(3)
    }

    /// The producer's worker.
    pub fn src_worker(&self) -> &str {
        worker(self.src_device())
    }

    /// The consumer's.
    pub fn dst_worker(&self) -> &str {
        worker(self.dst_device())
    }
}

/// Whether a number is written as [`Key::new`] writes it: without plus, zeros in front, or minus before a zero.
fn is_shortest(number: &str) -> bool {
    let digits = number.strip_prefix('-').unwrap_or(number);
    number == "0" || !digits.starts_with(['0', '+'])
}

/// The worker that a device is one of: `/job:ps/replica:0/task:1` of `/job:ps/replica:0/task:1/device:CPU:0`. Without `/device:`, all of it.
fn worker(device: &str) -> &str {
    device.split_once("/device:").map_or(device, |(worker, _)| worker)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SRC: &str = "/job:worker/replica:0/task:1/device:GPU:0";
    const DST: &str = "/job:ps/replica:0/task:0/device:CPU:0";

    #[test]
    fn a_key_has_the_text_that_tensorflow_gives_it() {
        let key = Key::new(SRC, 0x8935, DST, "edge_12_x", 0, -3).unwrap();
        assert_eq!(key.text(), format!("{SRC};0000000000008935;{DST};edge_12_x;0:-3"));
        assert_eq!((key.src_device(), key.dst_device(), key.edge()), (SRC, DST, "edge_12_x"));
        assert_eq!((key.src_worker(), key.dst_worker()), ("/job:worker/replica:0/task:1", "/job:ps/replica:0/task:0"));
        assert_eq!(Key::new("a", 1, "b", "c", 2, 3).unwrap().src_worker(), "a");
    }

    #[test]
    fn what_is_no_key_is_refused_with_its_text() {
        for text in [
            "",
            ";;;;",
            "a;0000000000000001;b;c",
            "a;0000000000000001;b;c;0:0;",
            "a;1;b;c;0:0",
            "a;000000000000000G;b;c;0:0",
            "a;+000000000000001;b;c;0:0",
            "a;00000000000000AB;b;c;0:0",
            "a;0000000000000001;b;c;0",
            "a;0000000000000001;b;c;+0:0",
            "a;0000000000000001;b;c;1:+2",
            "a;0000000000000001;b;c;00:0",
            "a;0000000000000001;b;c;0:-0",
            "a;0000000000000001;b;c;0:-01",
            "a;0000000000000001;b;c;0:",
            "a;0000000000000001;b;c;-1:0",
            "a;0000000000000001;b;;0:0",
        ] {
            let error = Key::parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("expected SOURCE_DEVICE;"), "{error}");
        }
        assert!(Key::new("a;b", 1, "c", "d", 0, 0).is_err() && Key::new("a", 1, "", "d", 0, 0).is_err());
        let long = "x".repeat(NAME_MAX);
        assert!(Key::new("a", 1, "b", &long, 0, 0).unwrap_err().to_string().contains("at most 512"));
    }

    proptest! {
        #[test]
        fn what_is_made_is_what_is_parsed(src in "[^;]{1,60}", incarnation: u64, dst in "[^;]{1,60}", edge in "[^;]{1,40}", frame: u64, iter: i64) {
            prop_assume!(src.len() + dst.len() + edge.len() < 400);
            let key = Key::new(&src, incarnation, &dst, &edge, frame, iter).unwrap();
            prop_assert_eq!(Key::parse(key.text()).unwrap(), key.clone());
            prop_assert_eq!((key.src_device(), key.src_incarnation, key.dst_device(), key.edge(), key.frame, key.iter),
                (src.as_str(), incarnation, dst.as_str(), edge.as_str(), frame, iter));
        }

        #[test]
        fn no_text_panics(text in ".{0,600}") {
            if let Ok(key) = Key::parse(&text) {
                prop_assert_eq!(key.text(), text);
            }
        }
    }
}
