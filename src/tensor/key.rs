//! The key of a tensor: who produces it on which device, who gets it, and which of them it is. Used by whoever names tensors. Any thread.
//!
//! As TensorFlow writes them (tensorflow/core/framework/rendezvous.cc, CreateKey and ParseKey): the producer's device, its incarnation in
//! hexadecimal, the consumer's device, the name of the edge, and frame and iteration, with semicolons between them.

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::{Arc, LazyLock};

use foldhash::HashMap;
use foldhash::fast::RandomState;
use memchr::memchr_iter;

use crate::base::error::{Error, Result};

use super::direct::MAX_NAMES;
use super::message::NAME_MAX;

/// What is behind the name of a worker in that of a device.
const DEVICE: &str = "/device:";

/// The text of a key, with a hash that is computed once: several tables have it. Clones share the text.
#[derive(Clone)]
pub struct Name {
    text: Arc<str>,
    hash: u64,
}

impl<T: Into<Arc<str>>> From<T> for Name {
    fn from(text: T) -> Name {
        let text = text.into();
        Name { hash: hash(&text), text }
    }
}

fn hash(text: &str) -> u64 {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::default);
    STATE.hash_one(text)
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Name) -> bool {
        self.hash == other.hash && (Arc::ptr_eq(&self.text, &other.text) || self.text == other.text)
    }
}

impl Eq for Name {}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Name) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Name) -> std::cmp::Ordering {
        self.text.cmp(&other.text)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

/// A key, in its parts. Clones share the text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    text: Name,
    /// Where the parts end in the text, without the last.
    ends: [usize; 4],
    /// Where the name of the producer's worker ends.
    src_worker: usize,
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
        Key::parse(format!("{src_device};{src_incarnation:016x};{dst_device};{edge};{frame}:{iter}"))
    }

    /// Errors: a text that [`Key::new`] does not make.
    pub fn parse(text: impl Into<Name>) -> Result<Key> {
        let text = text.into();
        if text.len() > NAME_MAX {
            return Err(Error::usage(format!("a key of {} bytes; at most {NAME_MAX}", text.len())));
        }
        Key::read(&text).map_err(|why| {
            let expected = "expected SOURCE_DEVICE;INCARNATION (16 hexadecimal digits);DESTINATION_DEVICE;EDGE;FRAME:ITERATION";
            Error::usage(format!("key {text:?} {why}; {expected}"))
        })
    }

    /// Errors: what is wrong with it.
    fn read(text: &Name) -> std::result::Result<Key, &'static str> {
        let mut semicolons = memchr_iter(b';', text.as_bytes());
        let ends = std::array::from_fn(|_| semicolons.next());
        let ([Some(src), Some(incarnation), Some(dst), Some(edge)], None) = (ends, semicolons.next()) else {
            return Err("has not five parts");
        };
        if src == 0 || dst == incarnation + 1 || edge == dst + 1 {
            return Err("has an empty part");
        }
        let src_incarnation = text.get(src + 1..incarnation).and_then(hexadecimal).ok_or("has another incarnation")?;
        let numbers = text.get(edge + 1..).and_then(|numbers| numbers.split_once(':'));
        let numbers = numbers.filter(|(frame, iter)| is_shortest(frame) && is_shortest(iter));
        let numbers = numbers.and_then(|(frame, iter)| Some((frame.parse().ok()?, iter.parse().ok()?)));
        let (frame, iter) = numbers.ok_or("has another frame and iteration")?;
        let src_worker = text.get(..src).map_or(0, |device| worker(device).len());
        Ok(Key { text: text.clone(), ends: [src, incarnation, dst, edge], src_worker, src_incarnation, frame, iter })
    }

    /// All of it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The same, to be looked up.
    pub(super) fn name(&self) -> &Name {
        &self.text
    }

    /// Its tensor in a step.
    pub(super) fn in_step(&self, step: u64) -> TensorId {
        TensorId { name: self.text.clone(), step }
    }

    fn part(&self, begin: usize, end: usize) -> &str {
        self.text.get(begin..end).unwrap_or_default()
    }

    /// The producer's device.
    pub fn src_device(&self) -> &str {
        self.part(0, self.ends[0])
    }

    /// The consumer's.
    pub fn dst_device(&self) -> &str {
        self.part(self.ends[1] + 1, self.ends[2])
    }

    /// Which of the tensors between them.
    pub fn edge(&self) -> &str {
        self.part(self.ends[2] + 1, self.ends[3])
    }

    /// The producer's worker.
    pub fn src_worker(&self) -> &str {
        self.part(0, self.src_worker)
    }

    /// The consumer's.
    pub fn dst_worker(&self) -> &str {
        worker(self.dst_device())
    }

    /// Whether the worker of this name produces it, a name without `/device:`.
    pub(super) fn is_from(&self, name: &str) -> bool {
        is_of(self.src_device(), name)
    }

    /// The same of the one that gets it.
    pub(super) fn is_for(&self, name: &str) -> bool {
        is_of(self.dst_device(), name)
    }
}

/// Keys that were parsed, as most are used again in the next step, and what is known of each: by the hash of their text, the last ones.
pub struct Keys<T>(HashMap<u64, (Key, T)>);

impl<T> Default for Keys<T> {
    fn default() -> Self {
        Keys(HashMap::default())
    }
}

impl<T: Copy> Keys<T> {
    /// A key, and what `look` finds out about it, if that is not known.
    ///
    /// Errors: as [`Key::parse`]; those of `look`.
    pub fn parse(&mut self, text: &str, look: impl FnOnce(&Key) -> Result<T>) -> Result<(Key, T)> {
        let hash = hash(text);
        if let Some((key, known)) = self.0.get(&hash).filter(|(key, _)| key.text() == text) {
            return Ok((key.clone(), *known));
        }
        let key = Key::parse(text)?;
        let found = look(&key)?;
        if self.0.len() >= MAX_NAMES {
            self.0.clear();
        }
        self.0.insert(hash, (key.clone(), found));
        Ok((key, found))
    }
}

/// A tensor: the text of its key, whatever that is, and its step. Clones share the text.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId {
    /// The text.
    pub name: Name,
    /// The step.
    pub step: u64,
}

impl TensorId {
    /// Of this name.
    pub fn new(name: impl Into<Name>, step: u64) -> TensorId {
        TensorId { name: name.into(), step }
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of step {}", self.name, self.step)
    }
}

/// A number of 16 digits.
fn hexadecimal(digits: &str) -> Option<u64> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let digits: &[u8; 16] = digits.as_bytes().try_into().ok()?;
    digits.iter().try_fold(0, |number, digit| Some(number << 4 | u64::from(value(*digit)?)))
}

/// Whether a number is written as [`Key::new`] writes it: without plus, zeros in front, or minus before a zero.
fn is_shortest(number: &str) -> bool {
    let digits = number.strip_prefix('-').unwrap_or(number);
    number == "0" || !digits.starts_with(['0', '+'])
}

/// The worker that a device is one of: `/job:ps/replica:0/task:1` of `/job:ps/replica:0/task:1/device:CPU:0`. Without `/device:`, all of it.
fn worker(device: &str) -> &str {
    let is_end = |at: &usize| device.get(*at..).is_some_and(|rest| rest.starts_with(DEVICE));
    memchr_iter(b'/', device.as_bytes()).find(is_end).and_then(|end| device.get(..end)).unwrap_or(device)
}

/// Whether that is this one; shorter than to look for its end.
fn is_of(device: &str, name: &str) -> bool {
    device.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(DEVICE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SRC: &str = "/job:worker/replica:0/task:1/device:GPU:0";
    const DST: &str = "/job:ps/replica:0/task:0/device:CPU:0";

    #[test]
    fn names_of_one_hash_are_different() {
        let [a, b] = ["a", "b"].map(|text| Name { text: text.into(), hash: 1 });
        assert!(a != b && a == a.clone());
        let both = HashMap::<Name, u8>::from_iter([(a.clone(), 1), (b.clone(), 2)]);
        assert_eq!((both.get(&a), both.get(&b)), (Some(&1), Some(&2)));
        let [known, other] = ["known", "other"].map(|edge| Key::new(SRC, 1, DST, edge, 0, 0).unwrap());
        let mut keys = Keys(HashMap::from_iter([(hash(other.text()), (known, 1))]));
        let (parsed, found) = keys.parse(other.text(), |_| Ok(2)).unwrap();
        assert_eq!((parsed.text(), found), (other.text(), 2));
    }

    #[test]
    fn keys_that_are_parsed_again_are_the_same() {
        let mut keys = Keys::default();
        for edge in (0..MAX_NAMES + 2).chain([0, 1]) {
            let text = Key::new(SRC, 1, DST, &format!("edge {edge}"), 0, 0).unwrap().text().to_owned();
            let parsed = Key::parse(text.as_str()).unwrap();
            assert_eq!(keys.parse(&text, |_| Ok(edge)).unwrap(), (parsed.clone(), edge));
            assert_eq!(keys.parse(&text, |_| panic!("looked again")).unwrap(), (parsed, edge));
            assert!(keys.0.len() <= MAX_NAMES);
        }
        assert!(keys.parse("no key", |_| Ok(0)).is_err());
        let unknown = Key::new(SRC, 1, DST, "unknown", 0, 0).unwrap();
        for _ in 0..2 {
            assert!(keys.parse(unknown.text(), |_| Err(Error::usage("not known"))).is_err());
        }
    }

    #[test]
    fn a_key_has_the_text_that_tensorflow_gives_it() {
        let key = Key::new(SRC, 0x8935, DST, "edge_12_x", 0, -3).unwrap();
        assert_eq!(key.text(), format!("{SRC};0000000000008935;{DST};edge_12_x;0:-3"));
        assert_eq!((key.src_device(), key.dst_device(), key.edge()), (SRC, DST, "edge_12_x"));
        assert_eq!((key.src_worker(), key.dst_worker()), ("/job:worker/replica:0/task:1", "/job:ps/replica:0/task:0"));
        let of = |name: &str| (key.is_from(name), key.is_for(name));
        assert_eq!((of("/job:worker/replica:0/task:1"), of("/job:ps/replica:0/task:0")), ((true, false), (false, true)));
        assert_eq!(
            (of("/job:worker/replica:0/task:"), of("/job:worker/replica:0/task:1/dev"), of(SRC)),
            ((false, false), (false, false), (true, false))
        );
        let key = Key::new("a", 1, "b", "c", 2, 3).unwrap();
        assert!(key.src_worker() == "a" && key.is_from("a") && key.is_for("b"));
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
            for name in [key.src_worker(), key.dst_worker()] {
                prop_assert_eq!((key.is_from(name), key.is_for(name)), (key.src_worker() == name, key.dst_worker() == name));
            }
        }

        #[test]
        fn no_text_panics(text in ".{0,600}") {
            if let Ok(key) = Key::parse(text.as_str()) {
                prop_assert_eq!(key.text(), text);
            }
        }
    }
}
