//! What is left of an answer while the places that a map finds important are taken away, most or least important first.

use rand::seq::SliceRandom;
use resolvent_lab::{
    Result,
    data::rng::{Purpose, stream},
};
use serde::Serialize;

use crate::subject::{Example, Subject};

/// Most steps of a curve: 196 places are taken away seven at a time.
const STEPS: usize = 28;

/// The probability of the first answer as places are taken away, as a share of what it was.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Deletion {
    /// Shares of the places taken away, from 0 to 1.
    pub removed: Vec<f64>,
    /// What is left, most important places first.
    pub morf: Vec<f64>,
    /// What is left, least important places first.
    pub lerf: Vec<f64>,
}

impl Deletion {
    /// The area above the curve that takes the most important first: large where the map finds what the answer rests on.
    pub fn morf_aoc(&self) -> f64 {
        1.0 - area(&self.removed, &self.morf)
    }

    /// The area under the curve that takes the least important first: large where the map finds what can be missed.
    pub fn lerf_auc(&self) -> f64 {
        area(&self.removed, &self.lerf)
    }
}

/// The area under a curve, by trapezoids.
pub fn area(x: &[f64], y: &[f64]) -> f64 {
    x.windows(2).zip(y.windows(2)).map(|(x, y)| 0.5 * (x[1] - x[0]) * (y[0] + y[1])).sum()
}

/// How many of `places` are taken away at each step.
pub fn counts(places: usize) -> Vec<usize> {
    let steps = places.clamp(1, STEPS);
    (0..=steps).map(|step| (step * places + steps / 2) / steps).collect()
}

/// The places by descending weight; those of equal weight in an order drawn from `seed` and `example`, so that no corner of a
/// picture comes first.
pub fn order(weights: &[f32], seed: u64, example: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..weights.len()).collect();
    places.shuffle(&mut stream(Purpose::Deletion, seed, example as u64, 0));
    places.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    places
}

/// Takes places away in both orders. `answer` is the class that the subject gives to the whole example.
///
/// # Errors
/// As [`Subject::answers`].
pub fn delete(
    subject: &Subject,
    example: &Example,
    grid: Option<[usize; 2]>,
    answer: usize,
    ordered: &[usize],
) -> Result<Deletion> {
    let places = ordered.len();
    let counts = counts(places);
    // A text without any token has no answer: its last step is left out, and what is left of it is nothing.
    let shown = counts.len() - usize::from(grid.is_none());
    let without = |taken: &[usize]| {
        let mut removed = vec![false; places];
        taken.iter().for_each(|&place| removed[place] = true);
        removed
    };
    let first = counts[..shown].iter().map(|&count| without(&ordered[..count]));
    let last = counts[..shown].iter().map(|&count| without(&ordered[places - count..]));
    let removed: Vec<_> = first.chain(last).collect();
    let answers = subject.answers(example, grid, &removed)?;
    let whole = answers[0][answer].max(f64::MIN_POSITIVE);
    let curve = |answers: &[Vec<f64>]| {
        let mut curve: Vec<f64> = answers.iter().map(|answers| answers[answer] / whole).collect();
        curve.resize(counts.len(), 0.0);
        curve
    };
    let share = |&count: &usize| count as f64 / places as f64;
    Ok(Deletion {
        removed: counts.iter().map(share).collect(),
        morf: curve(&answers[..shown]),
        lerf: curve(&answers[shown..]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_those_of_the_curves() {
        let deletion = Deletion { removed: vec![0.0, 0.25, 1.0], morf: vec![1.0, 0.0, 0.0], lerf: vec![1.0, 1.0, 0.0] };
        assert!((deletion.morf_aoc() - 0.875).abs() < 1e-12);
        assert!((deletion.lerf_auc() - 0.625).abs() < 1e-12);
    }

    #[test]
    fn steps_go_from_nothing_to_everything() {
        assert_eq!(counts(196), (0..=28).map(|step| step * 7).collect::<Vec<_>>());
        for places in 1..300 {
            let counts = counts(places);
            assert!(counts[0] == 0 && *counts.last().unwrap() == places, "{places}: {counts:?}");
            assert!(counts.windows(2).all(|pair| pair[0] < pair[1]), "{places}: {counts:?}");
        }
    }

    #[test]
    fn orders_follow_the_weights_and_draw_ties() {
        assert_eq!(order(&[0.1, 0.9, 0.5], 0, 0), [1, 2, 0]);
        let flat = vec![0.5; 64];
        assert_ne!(order(&flat, 0, 0), order(&flat, 0, 1), "another example, another order");
        assert_eq!(order(&flat, 0, 1), order(&flat, 0, 1));
        let mut sorted = order(&flat, 7, 3);
        sorted.sort();
        assert_eq!(sorted, (0..64).collect::<Vec<_>>());
    }
}
