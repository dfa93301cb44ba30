//! The values of the settings and where each comes from, to be shown to the user. Any thread, at any time.

use std::ffi::OsString;

use super::{Config, Found, NAMES, Value, complaint, origins, rows};

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// It is not set.
    Default,
    /// This variable.
    Variable(&'static str),
    /// This variable has that text, which is not accepted (and not shown if it is a secret); the default is used.
    Rejected(&'static str, String),
}

/// One setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Railhead's own name for it.
    pub name: &'static str,
    /// NCCL's, if it has one.
    pub alias: Option<&'static str>,
    /// The value in use.
    pub value: String,
    /// Where it comes from.
    pub source: Source,
    /// The default.
    pub default: String,
    /// The accepted values.
    pub accepted: String,
    /// Its meaning.
    pub doc: &'static str,
}

/// A variable with our prefix that is no setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// Its name.
    pub name: String,
    /// The setting with the most similar name, if one is similar.
    pub nearest: Option<&'static str>,
}

/// Everything that the environment says about Railhead.
#[derive(Debug, Clone, PartialEq)]
pub struct Effective {
    /// The values.
    pub config: Config,
    /// The same in words, in the table's order.
    pub settings: Vec<Setting>,
    /// Unknown variables with our prefix.
    pub unknown: Vec<Unknown>,
}

impl Effective {
    /// Reads the environment, and logs nothing.
    pub fn read() -> Effective {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        Effective::from(&|name| std::env::var_os(name), names)
    }

    /// Reads only these variables, and logs nothing.
    pub fn of(env: &impl Fn(&str) -> Option<OsString>) -> Effective {
        Effective::from(env, std::iter::empty())
    }

    /// What is wrong with a setting's variable, if anything is, for a caller that cannot use the default.
    pub fn complaint(&self, name: &str) -> Option<String> {
        self.settings.iter().find(|setting| setting.name == name).and_then(|setting| match &setting.source {
            Source::Rejected(variable, text) => Some(complaint(variable, text, &setting.accepted)),
            _ => None,
        })
    }

    fn from(env: &impl Fn(&str) -> Option<OsString>, names: impl Iterator<Item = String>) -> Effective {
        let config = Config::quietly(env);
        let setting = |(row, (source, value)): (super::Row, (Source, String))| Setting {
            name: row.env,
            alias: row.alias,
            value,
            source,
            default: row.default,
            accepted: row.accepted,
            doc: row.doc,
        };
        Effective { config, settings: rows().into_iter().zip(origins(env)).map(setting).collect(), unknown: unknown(names) }
    }
}

/// The source of a row's value, and the value.
pub(super) fn origin<T: Value>(found: Found<T>, default: &T) -> (Source, String) {
    match found {
        Found::Nothing => (Source::Default, default.show()),
        Found::Value(name, value) => (Source::Variable(name), value.show()),
        Found::Bad(name, text) => (Source::Rejected(name, text), default.show()),
    }
}

/// The aliases whose value is used and is not the default.
pub(super) fn aliases(env: &impl Fn(&str) -> Option<OsString>) -> Vec<&'static str> {
    let used = |(row, (source, value)): (super::Row, (Source, String))| match source {
        Source::Variable(name) if row.alias == Some(name) && value != row.default => Some(name),
        _ => None,
    };
    rows().into_iter().zip(origins(env)).filter_map(used).collect()
}

/// What the Python package reads, to find the library.
const PACKAGES: &str = "RAILHEAD_LIBRARY";

/// Those of `names` that have our prefix and are no settings, in order.
pub(super) fn unknown(names: impl Iterator<Item = String>) -> Vec<Unknown> {
    let ours = |name: &String| name.starts_with("RAILHEAD_") && name != PACKAGES && !NAMES.contains(&name.as_str());
    let mut found: Vec<Unknown> = names.filter(ours).map(|name| Unknown { nearest: nearest(&name), name }).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// The setting with the most similar name, unless half of the name would have to change.
fn nearest(name: &str) -> Option<&'static str> {
    const PREFIX: usize = "RAILHEAD_".len();
    // Bounds the work for a name of any length.
    let ends = NAMES.iter().filter(|ours| name.len() < 2 * ours.len());
    let (steps, best) = ends.map(|ours| (distance(name.as_bytes(), ours.as_bytes()), *ours)).min()?;
    (2 * steps < best.len() - PREFIX).then_some(best)
}

/// Levenshtein's: insertions, removals and replacements.
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        // What was left of, and above left of, the place being filled.
        let (mut left, mut corner) = (i + 1, i);
        for (y, above) in b.iter().zip(row.iter_mut().skip(1)) {
            let here = (corner + usize::from(x != y)).min(left + 1).min(*above + 1);
            (corner, left) = (*above, here);
            *above = here;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(a.len())
}

#[cfg(test)]
mod tests {
    use super::super::CrossMemory;
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Effective {
        let env = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value));
        Effective::from(&env, vars.iter().map(|(name, _)| name.to_string()))
    }

    #[test]
    fn every_value_has_its_source() {
        let vars = [("RAILHEAD_CMA", "0"), ("NCCL_IB_TC", "7"), ("RAILHEAD_SPLIT_MIN", "1"), ("NCCL_SOCKET_FAMILY", "AF_INET")];
        let it = read(&vars);
        assert_eq!((it.config.cma, it.config.traffic_class, it.config.split_min), (CrossMemory::Never, 7, 65536));
        assert_eq!(it.settings.len(), NAMES.len());
        let of = |name: &str| it.settings.iter().find(|s| s.name == name).map(|s| (s.value.as_str(), s.source.clone())).unwrap();
        assert_eq!(of("RAILHEAD_CMA"), ("0", Source::Variable("RAILHEAD_CMA")));
        assert_eq!(of("RAILHEAD_TC"), ("7", Source::Variable("NCCL_IB_TC")));
        assert_eq!(of("RAILHEAD_SOCKET_FAMILY"), ("AF_INET", Source::Variable("NCCL_SOCKET_FAMILY")));
        assert_eq!(of("RAILHEAD_SPLIT_MIN"), ("65536", Source::Rejected("RAILHEAD_SPLIT_MIN", "1".into())));
        let set = it.settings.iter().filter(|s| s.source != Source::Default).count();
        assert_eq!(set, vars.len());
        assert!(it.settings.iter().all(|s| s.source != Source::Default || s.value == s.default));
    }

    #[test]
    fn unknown_names_have_the_nearest_one_with_them() {
        let known = [("RAILHEAD_DEBUG", "none"), ("RAILHEAD_LIBRARY", "/lib/librailhead.so")];
        let it = read(&[[("RAILHEAD_TCP_STREAM", "1"), ("RAILHEAD_XYZZY_PLUGH", "1")], known, [("RAILHEAD_", ""), known[0]]].concat());
        let all: Vec<_> = it.unknown.iter().map(|u| (u.name.as_str(), u.nearest)).collect();
        assert_eq!(all, [("RAILHEAD_", None), ("RAILHEAD_TCP_STREAM", Some("RAILHEAD_TCP_STREAMS")), ("RAILHEAD_XYZZY_PLUGH", None)]);
        assert_eq!(read(&[(&format!("RAILHEAD_{}", "A".repeat(100_000)), "")]).unknown[0].nearest, None);
    }

    #[test]
    fn distances_are_levenshteins() {
        for (a, b, steps) in
            [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("same", "same", 0)]
        {
            assert_eq!((distance(a.as_bytes(), b.as_bytes()), distance(b.as_bytes(), a.as_bytes())), (steps, steps), "{a} {b}");
        }
    }
}
