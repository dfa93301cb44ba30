//! Times as settings: seconds with up to three decimals. Read at init, plain data afterwards.

use super::Value;

/// A time in seconds, to the millisecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seconds {
    millis: u64,
}

impl Seconds {
    /// Whole seconds.
    pub const fn new(seconds: u64) -> Seconds {
        Seconds { millis: seconds * 1000 }
    }

    /// In nanoseconds.
    pub fn nanos(self) -> u64 {
        self.millis * 1_000_000
    }
}

impl Value for Seconds {
    /// Whole seconds at most.
    type Limits = u64;

    fn parse(text: &str, most: &u64) -> Option<Self> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let digits = |part: &str, longest| (1..=longest).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole, 9) || !digits(fraction, 3) {
            return None;
        }
        let seconds: u64 = whole.parse().ok()?;
        let millis: u64 = format!("{fraction:0<3}").parse().ok()?;
        let value = Seconds { millis: seconds * 1000 + millis };
        (value.millis <= most * 1000).then_some(value)
    }

    fn accepted(most: &u64) -> String {
        format!("0..{most}, in thousandths")
    }

    fn show(&self) -> String {
        match self.millis % 1000 {
            0 => (self.millis / 1000).to_string(),
            rest => format!("{}.{rest:03}", self.millis / 1000).trim_end_matches('0').into(),
        }
    }
}
