//! What the times of a benchmark say side by side: where mechanisms overtake softmax, and how we stand against rivals.

use serde::{Deserialize, Serialize};

use super::{BenchReport, Pass, Point, milliseconds, three_digits};

/// From how many tokens on a mechanism is faster than softmax.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Crossover {
    /// The mechanism's id.
    pub label: String,
    /// Tokens, forward, by interpolation between the sizes; `None` where it never stays faster.
    pub forward: Option<f64>,
    /// Tokens, forward and backward.
    pub training: Option<f64>,
}

impl BenchReport {
    /// What the first softmax that was measured is called.
    pub fn baseline(&self) -> Option<&str> {
        let softmax = |p: &&Point| p.forward.is_some() && p.mechanism.as_ref().is_some_and(|m| m.id() == "softmax");
        self.points.iter().find(softmax).map(|point| point.label.as_str())
    }

    /// The labels of ours, in order.
    pub fn ours(&self) -> impl Iterator<Item = &str> {
        let ours = |label: &&str| self.points.iter().any(|p| p.label == *label && p.rival_of.is_none());
        self.labels().into_iter().filter(ours)
    }

    /// Where each mechanism overtakes softmax for good; nothing where softmax was not measured.
    pub fn crossovers(&self) -> Vec<Crossover> {
        let Some(softmax) = self.baseline() else { return Vec::new() };
        let others = self.ours().filter(|label| *label != softmax);
        let of = |label: &str, pass: Pass| crossover(&self.curve(softmax, pass), &self.curve(label, pass));
        others
            .map(|label| Crossover {
                label: label.into(),
                forward: of(label, Pass::Forward),
                training: of(label, Pass::Training),
            })
            .collect()
    }

    /// The rivals that were measured, and the mechanisms that they compute.
    pub fn rivals(&self) -> impl Iterator<Item = (&str, &str)> {
        let of = |label| self.points.iter().find(|p| p.label == label && p.forward.is_some())?.rival_of.as_deref();
        self.labels().into_iter().filter_map(move |label| Some((label, of(label)?)))
    }

    /// What the benchmark comes to: who is fastest at the most tokens at which several were measured, and who always is slower than softmax.
    pub fn headline(&self) -> String {
        let at = |n: usize| -> Vec<(&str, f64)> {
            let timed = |label| Some((label, Pass::Training.of(self.point(label, n)?)?.median));
            let mut all: Vec<_> = self.ours().filter_map(timed).collect();
            all.sort_by(|a, b| a.1.total_cmp(&b.1));
            all
        };
        let Some((n, timed)) = self.sizes().into_iter().rev().map(|n| (n, at(n))).find(|(_, timed)| timed.len() > 1)
        else {
            return "Nothing to compare: no size has two mechanisms that were measured.".into();
        };
        let (first, seconds) = timed[0];
        let time = milliseconds(seconds);
        let softmax = timed.iter().find(|(label, _)| Some(*label) == self.baseline());
        let beside = match softmax {
            Some((label, own)) if *label != first => {
                format!(", {} times as fast as {label}", three_digits(own / seconds))
            }
            _ => format!(", {} times as fast as {}, the next", three_digits(timed[1].1 / seconds), timed[1].0),
        };
        let slower = self.crossovers().iter().filter(|crossover| crossover.training.is_none()).count();
        let slower = match (self.baseline(), slower) {
            (None, _) | (_, 0) => String::new(),
            (Some(softmax), count) => {
                format!(" Not faster than {softmax} within these sizes: {count} of {}.", self.crossovers().len())
            }
        };
        format!("At {n} tokens {first} is fastest, {time} ms forward and backward{beside}.{slower}")
    }

    /// A rival's `quantity` over ours at the same size; `None` where either is unknown or 0.
    pub fn ratio(&self, rival: &str, tokens: usize, quantity: impl Fn(&Point) -> Option<f64>) -> Option<f64> {
        let theirs = self.point(rival, tokens)?;
        let ours = quantity(self.point(theirs.rival_of.as_deref()?, tokens)?)?;
        Some(quantity(theirs)? / ours).filter(|ratio| ratio.is_finite() && *ratio > 0.0)
    }
}

/// Where `other` falls below `base` and stays there, both in ascending tokens, between sizes in log-log coordinates.
fn crossover(base: &[(f64, f64)], other: &[(f64, f64)]) -> Option<f64> {
    let at = |n: f64| base.iter().find(|p| p.0 == n).map(|p| p.1);
    let ratios: Vec<_> = other.iter().filter_map(|&(n, t)| Some((n.ln(), (t / at(n)?).ln()))).collect();
    let last_slower = ratios.iter().rposition(|r| r.1 >= 0.0);
    match last_slower {
        None => ratios.first().map(|r| r.0.exp()),
        Some(i) => {
            let (a, b) = (ratios[i], *ratios.get(i + 1)?);
            Some((a.0 + (b.0 - a.0) * a.1 / (a.1 - b.1)).exp())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crossover_is_where_a_curve_stays_below() {
        let base = [(512.0, 1.0), (1024.0, 4.0), (2048.0, 16.0)];
        let linear = [(512.0, 2.0), (1024.0, 4.0), (2048.0, 8.0)];
        assert!((crossover(&base, &linear).unwrap() - 1024.0).abs() < 1e-6);
        assert_eq!(crossover(&base, &base.map(|(n, t)| (n, t / 2.0))), Some(512.0_f64.ln().exp()));
        assert_eq!(crossover(&base, &base.map(|(n, t)| (n, t * 2.0))), None);
        assert_eq!(crossover(&base, &[]), None);
    }
}
