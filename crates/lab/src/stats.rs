//! Means, medians and confidence intervals: ranges that hold the true value in at least about 95 of 100 cases, each case by itself.

use serde::{Deserialize, Serialize};

/// The two-sided 95 % quantile of the normal distribution.
const NORMAL: f64 = 1.959_964;

/// The two-sided 95 % quantiles of Student's distribution for 1, 2, ... 30 degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// The two-sided 95 % quantile of Student's distribution; beyond the table by its expansion in one over the degrees of freedom, "Handbook
/// of Mathematical Functions" (Abramowitz and Stegun), 26.7.5, whose third term is below 1e-4 there.
fn student(degrees: usize) -> f64 {
    let (z, df) = (NORMAL, degrees as f64);
    let expansion =
        z + (z.powi(3) + z) / (4.0 * df) + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * df * df);
    STUDENT.get(degrees - 1).copied().unwrap_or(expansion)
}

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
    /// The value is in it.
    Open,
    /// All of it above.
    Above,
}

impl Interval {
    /// Of the probability of a hit, where `hits` of `count` > 0 cases were hits: Wilson's score interval, "Probable inference, the law of
    /// succession, and statistical inference" (1927).
    pub fn of_share(hits: usize, count: usize) -> Self {
        Self::wilson(hits as f64 / count as f64, count)
    }

    fn wilson(share: f64, count: usize) -> Self {
        let (n, z2) = (count as f64, NORMAL * NORMAL);
        let middle = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
        let half = NORMAL / (1.0 + z2 / n) * (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
        Self { low: (middle - half).max(0.0), high: (middle + half).min(1.0) }
    }

    /// Of the mean of what `values` were drawn from, with Student's quantiles; `None` for fewer than two values. Exact for values from a
    /// normal distribution.
    pub fn of_mean(values: &[f64]) -> Option<Self> {
        let degrees = values.len().checked_sub(1).filter(|&degrees| degrees > 0)?;
        let (mean, variance) = moments(values);
        let half = student(degrees) * (variance / values.len() as f64).sqrt();
        Some(Self { low: mean - half, high: mean + half })
    }

    /// Of the difference of two probabilities, the first less the second, from shares of `counts` > 0 independent cases: Newcombe's
    /// interval from Wilson's two, "Interval estimation for the difference between independent proportions" (1998), method 10. Unlike
    /// that of the normal distribution it has a width where a share is 0 or 1. Shares of the same cases are not independent: where two
    /// classifiers tend to err on the same cases, it is wider than need be.
    pub fn of_difference(shares: [f64; 2], counts: [usize; 2]) -> Self {
        let [first, second] = [0, 1].map(|at| Self::wilson(shares[at], counts[at]));
        let difference = shares[0] - shares[1];
        Self {
            low: difference - (shares[0] - first.low).hypot(second.high - shares[1]),
            high: difference + (first.high - shares[0]).hypot(shares[1] - second.low),
        }
    }

    /// Of the median of what `values` were drawn from, whatever its distribution; `None` for fewer than six finite values. Between the
    /// k-th least and the k-th largest value, with the largest k that holds the median with a probability of 95 %: a value is below it
    /// with probability 1/2, so that fewer than k are with a binomial one (Conover, "Practical Nonparametric Statistics", 3.2).
    pub fn of_median(values: &[f64]) -> Option<Self> {
        let mut values: Vec<f64> = values.iter().copied().filter(|x| x.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let n = values.len();
        // By logarithms: 2^-n is below f64 from 1075 values on.
        let (mut log_chance, mut below, mut k) = (-(n as f64) * std::f64::consts::LN_2, 0.0, 0);
        loop {
            below += log_chance.exp();
            if 2.0 * below > 0.05 {
                break;
            }
            log_chance += ((n - k) as f64 / (k + 1) as f64).ln();
            k += 1;
        }
        Some(Self { low: values[k.checked_sub(1)?], high: values[n - k] })
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

/// Mean and variance (of a sample) of `values`, which must not be empty; the variance of one is 0.
pub fn moments(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
    (mean, squares / (count - 1.0).max(1.0))
}

/// The middle of `values`, which must not be empty; they are sorted.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { 0.5 * (values[middle - 1] + values[middle]) }
}

/// The middle of those of `values` that are finite; `None` of none.
pub fn finite_median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().filter(|x| x.is_finite()).collect();
    (!values.is_empty()).then(|| median(&mut values))
}

/// `count` of `len` places, evenly spread, as files are often sorted by class; one somewhere in each of as many equal parts,
/// as classes often take turns. By the golden ratio, whose multiples take turns with nothing.
pub fn spread(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(len);
    let within = |i: usize| (i as f64 * 0.618_033_988_749_895).fract();
    (0..count).map(move |i| (((i as f64 + within(i)) * len as f64 / count as f64) as usize).min(len - 1))
}

/// The softmax of one example's logits.
pub fn probabilities(logits: &[f32]) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn near(interval: Interval, low: f64, high: f64) {
        assert!((interval.low - low).abs() < 6e-5 && (interval.high - high).abs() < 6e-5, "{interval:?}");
    }

    /// Against Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3.
    #[test]
    fn shares_have_published_intervals() {
        near(Interval::of_share(81, 263), 0.2553, 0.3662);
        near(Interval::of_share(15, 148), 0.0624, 0.1605);
        near(Interval::of_share(0, 20), 0.0, 0.1611);
        near(Interval::of_share(1, 29), 0.0061, 0.1718);
    }

    /// Against table II of the paper that [`Interval::of_difference`] names, method 10; of many cases it is that of the normal distribution.
    #[test]
    fn differences_have_published_intervals() {
        near(Interval::of_difference([56.0 / 70.0, 48.0 / 80.0], [70, 80]), 0.0524, 0.3339);
        near(Interval::of_difference([0.9, 0.3], [10, 10]), 0.1705, 0.8090);
        near(Interval::of_difference([1.0, 0.0], [10, 10]), 0.6075, 1.0);
        let many = Interval::of_difference([0.808, 0.8076], [1_000_000; 2]);
        let half = NORMAL * (2.0 * 0.808_f64 * 0.192 / 1e6).sqrt();
        near(many, 0.0004 - half, 0.0004 + half);
    }

    /// Quantiles on both sides of the table's end are those of published tables.
    #[test]
    fn means_have_students_intervals() {
        near(Interval::of_mean(&[1.0, 2.0, 3.0]).unwrap(), 2.0 - 2.4843, 2.0 + 2.4843);
        for (degrees, quantile) in [(1, 12.706), (30, 2.0423), (31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799)]
        {
            assert!((student(degrees) - quantile).abs() < 5e-4, "{degrees}: {}", student(degrees));
        }
        assert_eq!((Interval::of_mean(&[]), Interval::of_mean(&[1.0])), (None, None));
    }

    /// Ranks of published tables; fewer than six values bound no median.
    #[test]
    fn medians_lie_between_ranks() {
        let ranks = [(6, 1), (8, 1), (9, 2), (11, 2), (20, 6), (50, 18), (72, 28), (100, 40)];
        for (n, rank) in ranks {
            let values: Vec<f64> = (1..=n).rev().map(f64::from).collect();
            let expected = Interval { low: f64::from(rank), high: f64::from(n + 1 - rank) };
            assert_eq!(Interval::of_median(&values), Some(expected), "{n}");
        }
        assert_eq!(Interval::of_median(&[1.0, 2.0, 3.0, 4.0, 5.0, f64::NAN]), None);
        let many: Vec<f64> = (0..4096).map(f64::from).collect();
        let Interval { low, high } = Interval::of_median(&many).unwrap();
        assert!((low - (2047.5 - 62.7)).abs() < 1.5 && low + high == 4095.0, "{low} {high}");
    }

    #[test]
    fn the_middle_and_the_spread() {
        assert_eq!(finite_median([3.0, 1.0, f64::NAN, 2.0]), Some(2.0));
        assert_eq!(finite_median([4.0, 1.0]), Some(2.5));
        assert_eq!(finite_median([]), None);
        assert_eq!((moments(&[1.0, 2.0, 6.0]), moments(&[4.0])), ((3.0, 7.0), (4.0, 0.0)));
    }

    #[test]
    fn sides() {
        let interval = Interval { low: 0.3, high: 0.52 };
        assert_eq!([0.2, 0.5, 0.6].map(|x| interval.side_of(x)), [Side::Above, Side::Open, Side::Below]);
        assert_eq!(interval.text(100.0, 1), "30.0 to 52.0");
    }

    #[test]
    fn examples_are_evenly_spread() {
        let all: Vec<_> = spread(1000, 100).collect();
        assert!(all.iter().enumerate().all(|(i, place)| place / 10 == i), "one of every ten: {all:?}");
        assert_eq!(spread(3, 9).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(spread(0, 9).count(), 0);
    }

    /// Classes that take turns are all met, about equally often, whatever the share of the examples.
    #[test]
    fn examples_do_not_take_turns_with_classes() {
        for (len, count, classes) in
            [(25_000, 20, 2), (25_000, 4, 2), (1000, 100, 8), (1000, 200, 8), (10_000, 100, 10)]
        {
            let met = |class: usize| spread(len, count).filter(|place| place % classes == class).count();
            let counts: Vec<usize> = (0..classes).map(met).collect();
            let fair = count / classes;
            assert!(counts.iter().all(|&met| 2 * met >= fair && met <= 2 * fair), "{len} {count}: {counts:?}");
        }
    }
}
