//! Medians and spreads. Used by everything that prints a figure.

use serde::Serialize;

/// A figure over several rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// The middle one.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

impl Summary {
    /// None of nothing.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Summary> {
        let mut values: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Some(Summary { median, min, max })
    }

    /// Of the quotients, round by round.
    pub fn of_ratios(upper: &[f64], lower: &[f64]) -> Option<Summary> {
        Summary::of(upper.iter().zip(lower).map(|(u, l)| u / l))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(Summary::of([]), None);
        assert_eq!(Summary::of([3.0, 1.0, 2.0]), Some(Summary { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Summary::of([4.0, 1.0, 2.0, 3.0]), Some(Summary { median: 2.5, min: 1.0, max: 4.0 }));
        // The median of the ratios is not the ratio of the medians.
        assert_eq!(Summary::of_ratios(&[1.0, 10.0, 9.0], &[1.0, 2.0, 3.0]), Some(Summary { median: 3.0, min: 1.0, max: 5.0 }));
    }
}
