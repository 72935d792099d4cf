//! How sure a number of a few observations is: intervals that hold the true one in 95 of 100 cases.

use serde::{Deserialize, Serialize};

/// The normal distribution's two-sided 95 % quantile.
const NORMAL: f64 = 1.959_964;

/// Student's two-sided 95 % quantiles for 1, 2, ... degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// An interval that holds the true value in 95 of 100 cases.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Its lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

/// On which side of a value an interval lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// All of it below.
    Below,
    /// The value is in it: nothing is told.
    Open,
    /// All of it above.
    Above,
}

impl Interval {
    /// Of the true share, where `hits` of `count` > 0 have been counted: Wilson's score interval.
    pub fn of_share(hits: usize, count: usize) -> Self {
        let (n, z2) = (count as f64, NORMAL * NORMAL);
        let share = hits as f64 / n;
        let middle = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
        let half = NORMAL / (1.0 + z2 / n) * (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
        Self { low: (middle - half).max(0.0), high: (middle + half).min(1.0) }
    }

    /// Of the true mean of `values`, Student's; `None` of fewer than two.
    pub fn of_mean(values: &[f64]) -> Option<Self> {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let half = *STUDENT.get(values.len().checked_sub(2)?).unwrap_or(&NORMAL) * (variance / n).sqrt();
        Some(Self { low: mean - half, high: mean + half })
    }

    /// Of the difference of two shares of `count` examples each, counted apart: what pairs of answers would tell is not in them.
    pub fn of_difference(shares: [f64; 2], count: usize) -> Self {
        let error: f64 = shares.iter().map(|share| share * (1.0 - share) / count as f64).sum();
        let (difference, half) = (shares[0] - shares[1], NORMAL * error.sqrt());
        Self { low: difference - half, high: difference + half }
    }

    /// Of the true middle of `values`, between two of them, whatever their distribution; `None` of fewer than six, which bound none.
    pub fn of_median(values: &[f64]) -> Option<Self> {
        let mut values: Vec<f64> = values.iter().copied().filter(|x| x.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let n = values.len();
        if n < 6 {
            return None;
        }
        let outside = (0.5 * (n as f64 - NORMAL * (n as f64).sqrt())).floor().max(0.0) as usize;
        Some(Self { low: values[outside], high: values[n - 1 - outside] })
    }

    /// Where it lies beside `value`.
    pub fn side_of(&self, value: f64) -> Side {
        match self {
            Self { high, .. } if *high < value => Side::Below,
            Self { low, .. } if *low > value => Side::Above,
            _ => Side::Open,
        }
    }

    /// `41.0 to 50.3`, times `scale`, with so many decimals.
    pub fn text(&self, scale: f64, decimals: usize) -> String {
        format!("{:.decimals$} to {:.decimals$}", self.low * scale, self.high * scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against numbers of the literature and of definition.
    #[test]
    fn intervals_of_known_cases() {
        let near = |interval: Interval, low: f64, high: f64| {
            assert!((interval.low - low).abs() < 1e-3 && (interval.high - high).abs() < 1e-3, "{interval:?}");
        };
        near(Interval::of_share(29, 72), 0.2974, 0.5182);
        near(Interval::of_share(0, 10), 0.0, 0.2775);
        near(Interval::of_mean(&[1.0, 2.0, 3.0]).unwrap(), 2.0 - 2.4843, 2.0 + 2.4843);
        near(Interval::of_difference([0.808, 0.8076], 10_000), 0.0004 - 0.01092, 0.0004 + 0.01092);
        assert_eq!(Interval::of_mean(&[1.0]), None);
    }

    #[test]
    fn a_middle_is_bounded_by_order() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(Interval::of_median(&values), Some(Interval { low: 41.0, high: 60.0 }));
        assert_eq!(Interval::of_median(&values[..6]), Some(Interval { low: 1.0, high: 6.0 }));
        assert_eq!(Interval::of_median(&values[..5]), None);
    }

    #[test]
    fn sides() {
        let interval = Interval { low: 0.3, high: 0.52 };
        assert_eq!([0.2, 0.5, 0.6].map(|x| interval.side_of(x)), [Side::Above, Side::Open, Side::Below]);
        assert_eq!(interval.text(100.0, 1), "30.0 to 52.0");
    }
}
