//! What a plugin warned of: each text once, and how often. A rank counts as its plugin logs, on any of the plugin's threads; the coordinator
//! adds up what its ranks tell and shows it.

use serde::{Deserialize, Serialize};

use super::channel::LARGEST;

/// Different texts kept; what comes later is only counted.
const KEPT: usize = 32;
/// The longest text that logger.c passes on.
const LONGEST: usize = 2047;
// All of them and the last fit a frame, at most six characters of JSON for a byte.
const _: () = assert!((KEPT + 1) * (6 * LONGEST + 64) < LARGEST);

/// Warnings of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warnings {
    /// Each text and how often it came, the first first.
    texts: Vec<(String, u64)>,
    /// How many came with other texts.
    others: u64,
    last: Option<String>,
}

/// Warnings of one text, or of all texts that were not kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// As the plugin logged it.
    pub text: String,
    /// How often, in each rank.
    pub times: [u64; 2],
}

impl Warnings {
    /// None.
    pub const fn new() -> Warnings {
        Warnings { texts: Vec::new(), others: 0, last: None }
    }

    /// Counts one.
    pub fn add(&mut self, text: String) {
        self.count(text.clone(), 1);
        self.last = Some(text);
    }

    /// Adds those that came after these. They may be from another host: no more of them is kept than of any.
    pub fn append(&mut self, later: Warnings) {
        for (text, times) in later.texts {
            self.count(text, times);
        }
        self.others = self.others.saturating_add(later.others);
        self.last = later.last.or(self.last.take());
    }

    /// Takes them all.
    pub fn take(&mut self) -> Option<Warnings> {
        self.last.is_some().then(|| std::mem::take(self))
    }

    /// The text of the last one.
    pub fn last(&self) -> Option<&str> {
        self.last.as_deref()
    }

    fn count(&mut self, text: String, times: u64) {
        let room = self.texts.len() < KEPT;
        match self.texts.iter_mut().find(|(known, _)| *known == text) {
            Some((_, known)) => *known = known.saturating_add(times),
            None if room => self.texts.push((text, times)),
            None => self.others = self.others.saturating_add(times),
        }
    }

    /// Of both ranks, by text.
    pub fn of_both(ranks: [&Warnings; 2]) -> Vec<Warning> {
        let mut all = Vec::new();
        for (rank, warnings) in ranks.into_iter().enumerate() {
            let others = (warnings.others > 0).then(|| (format!("(of more than {KEPT} texts)"), warnings.others));
            for (text, times) in warnings.texts.iter().cloned().chain(others) {
                let mut warning = Warning { text, times: [0; 2] };
                warning.times[rank] = times;
                merge(&mut all, [warning]);
            }
        }
        all
    }
}

/// Adds to `all`, by text.
pub fn merge(all: &mut Vec<Warning>, more: impl IntoIterator<Item = Warning>) {
    for warning in more {
        match all.iter_mut().find(|known| known.text == warning.text) {
            Some(known) => known.times = [0, 1].map(|rank| known.times[rank].saturating_add(warning.times[rank])),
            None => all.push(warning),
        }
    }
}

impl Warning {
    /// For people, in a line.
    pub fn line(&self) -> String {
        let times = |n: u64| if n == 1 { "once".into() } else { format!("{n} times") };
        let whose = match self.times {
            [zero, 0] => format!("rank 0 ({})", times(zero)),
            [0, one] => format!("rank 1 ({})", times(one)),
            [zero, one] if zero == one => format!("both ranks ({} each)", times(zero)),
            [zero, one] => format!("both ranks ({} and {})", times(zero), times(one)),
        };
        format!("warning in {whose}: {}\n", printable(&self.text))
    }
}

/// Text from elsewhere, fit for a terminal.
pub fn printable(text: &str) -> String {
    text.chars().take(2000).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> Warnings {
        let mut warnings = Warnings::default();
        texts.iter().for_each(|text| warnings.add((*text).to_owned()));
        warnings
    }

    fn lines(zero: &Warnings, one: &Warnings) -> Vec<String> {
        Warnings::of_both([zero, one]).iter().map(Warning::line).collect()
    }

    #[test]
    fn each_text_is_told_once_with_count_and_rank() {
        let told = lines(&of(&["a", "b", "a", "c"]), &of(&["c", "d", "b", "b"]));
        let wanted = [
            "warning in rank 0 (2 times): a\n",
            "warning in both ranks (once and 2 times): b\n",
            "warning in both ranks (once each): c\n",
            "warning in rank 1 (once): d\n",
        ];
        assert_eq!(told, wanted);
        assert!(lines(&of(&[]), &of(&[])).is_empty());
        assert_eq!(lines(&of(&["a\n\x1b"]), &of(&[])), ["warning in rank 0 (once): a  \n"]);
    }

    #[test]
    fn what_comes_piece_by_piece_is_added_up() {
        let mut all = of(&["a", "b"]);
        let mut later = of(&["b", "a"]);
        all.append(later.take().unwrap());
        assert_eq!(later.take(), None);
        assert_eq!((lines(&all, &of(&[])).len(), all.last()), (2, Some("a")));
        assert_eq!(lines(&all, &of(&[]))[1], "warning in rank 0 (2 times): b\n");
        all.append(Warnings::default());
        assert_eq!(all.last(), Some("a"));
    }

    #[test]
    fn texts_without_end_are_counted_and_the_last_is_known() {
        let mut all = Warnings::default();
        for n in 0..KEPT + 10 {
            all.append(of(&[&n.to_string()]));
        }
        let told = lines(&all, &of(&["0"]));
        assert_eq!(told.len(), KEPT + 1);
        assert_eq!(told[0], "warning in both ranks (once each): 0\n");
        assert_eq!(told[KEPT], "warning in rank 0 (10 times): (of more than 32 texts)\n");
        assert_eq!(all.last(), Some("41"));
    }
}
