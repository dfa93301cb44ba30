//! What `railhead perf` prints: the table, or JSON. Used by the coordinator when everything is measured.

use serde::Serialize;

use super::measure::{Limit, Row, What};
use super::message::Started;
use super::summary::Summary;
use super::warnings::Warning;

/// Everything that was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Of this program.
    pub railhead: &'static str,
    /// Rounds of each figure.
    pub rounds: usize,
    /// One, or two with `--compare`.
    pub plugins: Vec<About>,
    /// The table.
    pub rows: Vec<Row>,
}

/// A plugin that was measured.
#[derive(Debug, Clone, Serialize)]
pub struct About {
    /// The file.
    pub path: String,
    /// What it says of itself.
    #[serde(flatten)]
    pub started: Started,
    /// What it warned of, from beginning to end.
    pub warnings: Vec<Warning>,
}

/// How receives were posted, in all rows alike.
fn receives(rows: &[&Row]) -> String {
    let (mut least, mut longer, mut posted) = (usize::MAX, false, String::new());
    for row in rows {
        let (What::Bandwidth { size, recv_size, .. } | What::Latency { size, recv_size, .. }) = row.what;
        (least, longer) = (least.min(recv_size), longer | (recv_size > size));
        posted = match row.what {
            What::Latency { ahead: 0, .. } => ", posted one by one".into(),
            What::Latency { ahead, .. } => format!(", {ahead} posted"),
            What::Bandwidth { .. } => String::new(),
        };
    }
    let sizes = if longer { format!("of {} at least", size(least)) } else { "as long as the messages".into() };
    format!("receives {sizes}{posted}")
}

impl Report {
    /// For people.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for (letter, about) in self.letters() {
            let Started { name, abi, device } = &about.started;
            text += &format!("{letter}{}: {name}, v{abi}, device {device}\n", about.path);
        }
        let latency = |row: &&Row| matches!(row.what, What::Latency { .. });
        let (bounce, bulk): (Vec<&Row>, Vec<&Row>) = self.rows.iter().partition(latency);
        if !bounce.is_empty() {
            text += &format!(
                "\nHalf round trip in us, {}: median (min..max) of {} rounds; limits: one way, and the ratio to them\n",
                receives(&bounce),
                self.rounds
            );
            text += &aligned(&self.lines(&bounce, vec!["size".into()], |row| vec![size(row.size())]), 0);
        }
        // One run has one manner.
        if let Some(what) = bulk.first().map(|row| row.what) {
            let limits = if what.two_way() { "GB/s in one direction" } else { "GB/s" };
            text += &format!(
                "\nThroughput in GB/s{}, {}: median (min..max) of {} rounds; limits: {limits}, and the ratio to them\n",
                what.manner(),
                receives(&bulk),
                self.rounds
            );
            let head = ["size", "outstanding", "comms"].map(String::from).to_vec();
            text += &aligned(
                &self.lines(&bulk, head, |row| match row.what {
                    What::Bandwidth { size: bytes, outstanding, comms, .. } => {
                        vec![size(bytes), outstanding.to_string(), comms.to_string()]
                    }
                    What::Latency { size: bytes, .. } => vec![size(bytes)],
                }),
                0,
            );
        }
        for (name, note) in self.notes() {
            text += &format!("{name}: {note}\n");
        }
        let letters = if self.plugins.len() == 2 { ["A: ", "B: "] } else { ["", ""] };
        for (letter, about) in letters.into_iter().zip(&self.plugins) {
            for warning in &about.warnings {
                text += &format!("{letter}{}", warning.line());
            }
        }
        text
    }

    /// Of the plugins, in a legend.
    pub fn names(&self) -> Vec<String> {
        let name = |about: &About| about.started.name.clone();
        match &self.plugins[..] {
            [a, b] => vec![format!("A: {}", name(a)), format!("B: {}", name(b))],
            plugins => plugins.iter().map(name).collect(),
        }
    }

    /// "A = " and "B = " where there are two.
    fn letters(&self) -> impl Iterator<Item = (&'static str, &About)> {
        let letters = if self.plugins.len() == 2 { ["A = ", "B = "] } else { ["", ""] };
        letters.into_iter().zip(&self.plugins)
    }

    fn lines(&self, rows: &[&Row], first: Vec<String>, cells: impl Fn(&Row) -> Vec<String>) -> Vec<Vec<String>> {
        let two = self.plugins.len() == 2;
        let mut head = first;
        let bulk = rows.first().is_some_and(|row| row.unit == "GB/s");
        for letter in if two { &["A", "B"][..] } else { &[""][..] } {
            head.push(format!("{letter} {}", rows.first().map_or("", |row| row.unit)).trim().into());
            if bulk {
                head.extend([format!("{letter} msg/s").trim().to_owned(), format!("{letter} CPU s/GB").trim().to_owned()]);
            }
        }
        if two {
            head.push("A/B".into());
        }
        let mut names: Vec<&'static str> = Vec::new();
        for limit in rows.iter().flat_map(|row| &row.limits) {
            if !names.contains(&limit.name) {
                names.push(limit.name);
            }
        }
        head.extend(names.iter().map(|name| (*name).to_owned()));
        let mut lines = vec![head];
        for row in rows {
            let mut line = cells(row);
            for plugin in &row.plugins {
                line.push(spread(&plugin.figure));
                if bulk {
                    line.push(count(plugin.messages_per_s));
                    line.push(plugin.cpu_s_per_gb.map_or("-".into(), digits));
                }
            }
            if two {
                line.push(row.ratio.as_ref().map_or("-".into(), spread));
            }
            for name in &names {
                line.push(row.limits.iter().find(|limit| limit.name == *name).map_or("-".into(), against));
            }
            lines.push(line);
        }
        lines
    }

    /// Remarks on limits, each once.
    fn notes(&self) -> Vec<(&'static str, String)> {
        let mut notes: Vec<(&'static str, String)> = Vec::new();
        for limit in self.rows.iter().flat_map(|row| &row.limits) {
            for note in limit.note.iter().chain(&limit.refused) {
                if !notes.iter().any(|(name, known)| *name == limit.name && known == note) {
                    notes.push((limit.name, note.clone()));
                }
            }
        }
        notes
    }
}

fn against(limit: &Limit) -> String {
    let Some(figure) = &limit.figure else { return "refused".into() };
    let ratios: Vec<String> = limit.ratios.iter().map(|ratio| format!("x{:.2}", ratio.median)).collect();
    format!("{} {}", digits(figure.median), ratios.join(" "))
}

/// Columns, the first `left` of them flush left, the others flush right.
pub fn aligned(lines: &[Vec<String>], left: usize) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cell = |(column, (cell, &width)): (usize, (&String, &usize))| {
            if column < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        };
        let cells: Vec<String> = line.iter().zip(&widths).enumerate().map(cell).collect();
        text += cells.join("   ").trim_end();
        text.push('\n');
    }
    text
}

/// Bytes, short.
pub fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// Three digits that mean something.
pub fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Median (min..max).
pub fn spread(s: &Summary) -> String {
    format!("{} ({}..{})", digits(s.median), digits(s.min), digits(s.max))
}

fn count(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{} M", digits(v * 1e-6)),
        v if v >= 1e3 => format!("{} k", digits(v * 1e-3)),
        v => digits(v),
    }
}
