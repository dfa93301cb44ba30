//! The table of a comparison, as Markdown.

use std::fmt::Write;

/// One measurement: for each server, its rounds.
pub struct Row {
    pub what: String,
    pub unit: &'static str,
    pub more_is_better: bool,
    pub figures: Vec<Vec<f64>>,
}

/// The table. Ratios are taken round by round, so that a slow moment counts for both.
pub fn table(names: &[&str], rounds: u32, rows: &[Row]) -> String {
    let mut out = String::from("| |");
    let rest = names.get(1..).unwrap_or(&[]);
    for name in names {
        let _ = write!(out, " {name} |");
    }
    for name in rest {
        let _ = write!(out, " ratio to {name} (min..max) |");
    }
    let _ = write!(out, "\n|---|{}\n", "---|".repeat(2 * names.len() - 1));
    for row in rows {
        let _ = write!(out, "| {} |", row.what);
        for figures in &row.figures {
            let _ = write!(out, " {} {} |", shown(median(figures)), row.unit);
        }
        let first = row.figures.first().map_or(&[][..], Vec::as_slice);
        for figures in row.figures.iter().skip(1) {
            let ratios: Vec<f64> = first.iter().zip(figures).map(|(ours, theirs)| ours / theirs).collect();
            if ratios.iter().any(|ratio| !ratio.is_finite()) {
                // Nothing to compare with: memory that had been there before.
                out.push_str(" - |");
                continue;
            }
            let (low, high) = ratios.iter().fold((f64::MAX, f64::MIN), |(low, high), &ratio| (low.min(ratio), high.max(ratio)));
            let _ =
                write!(out, " {:.2} ({low:.2}..{high:.2}){} |", median(&ratios), if row.more_is_better { "" } else { ", less is better" });
        }
        out.push('\n');
    }
    let _ = writeln!(out, "\nMedians of {rounds} round(s), the servers in turn.");
    out
}

fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn shown(figure: f64) -> String {
    if figure >= 100.0 { format!("{figure:.0}") } else { format!("{figure:.2}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_the_first_servers_to_each_other() {
        let row = Row {
            what: "x".into(),
            unit: "1/s",
            more_is_better: true,
            figures: vec![vec![200.0, 300.0, 400.0], vec![100.0, 100.0, 100.0]],
        };
        let text = table(&["a", "b"], 3, &[row]);
        assert!(text.contains("| x | 300 1/s | 100 1/s | 3.00 (2.00..4.00) |"), "{text}");
        let nothing = Row { what: "m".into(), unit: "KiB", more_is_better: false, figures: vec![vec![1.0], vec![0.0]] };
        assert!(table(&["a", "b"], 1, &[nothing]).contains("| m | 1.00 KiB | 0.00 KiB | - |"));
    }
}
