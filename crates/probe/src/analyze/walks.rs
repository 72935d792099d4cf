//! Walks on a head's graph: counted over all lengths, absorbed, and spread by diffusion.

use resolvent_graph::{
    Alignment, Dense, HTransform, Katz, LinearOperator, Result, Reversible, Solver, Spectrum, katz, markov,
};
use resolvent_kernels::{
    Mechanism,
    mechanism::{Normalisation, Series},
};
use serde::Serialize;

/// The decay of walks on a graph whose rows sum to one.
const DECAY: f64 = 0.85;

/// Discounted walks of all lengths on `decay M`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WalkReport {
    /// What each hop is discounted by beside the mechanism's own decay: 1 where that is below one, else 0.85 over the largest row
    /// sum where that exceeds one, so that walks of all lengths have a finite weight.
    pub decay: f64,
    /// Katz centralities: how well those of tokens as ends of walks agree with those as starts.
    pub katz_in_out: Alignment,
    /// How well those as ends agree with the shares of time on the softmax graph.
    pub katz_softmax: Option<Alignment>,
    /// Least, mean and largest absorption of the h-transformed chain, `1 / c_out`: what of a walker stays at each token.
    pub absorption: [f64; 3],
}

/// What the weights of a mechanism are to a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// One hop without a decay.
    Plain,
    /// One hop with the mechanism's own decay, whose walks of all lengths have a finite weight: the Frobenius norm of its
    /// matrix, or every row sum, is below one.
    Decayed,
    /// Walks of several or all lengths, summed by the mechanism itself.
    Walks,
}

impl Step {
    /// Of `mechanism`, whose largest row sum is `most`.
    pub(super) fn of(mechanism: &Mechanism, most: f64) -> Self {
        let values = mechanism.values();
        let finite = most < 1.0 || matches!(values.normalisation, Normalisation::Frobenius(_));
        match values.series {
            Series::Resolvent(_) | Series::Hops(_) => Self::Walks,
            _ if mechanism.gamma().is_some_and(|gamma| gamma < 1.0) && finite => Self::Decayed,
            _ => Self::Plain,
        }
    }
}

/// The walks on `weights`, whose largest row sum is `most`; `softmax` are the shares of time on its graph.
///
/// # Errors
/// Those of [`katz`] and [`HTransform::new`].
pub(super) fn walks(weights: &Dense, step: Step, most: f64, softmax: Option<&[f64]>) -> Result<WalkReport> {
    let decay = if step == Step::Plain { DECAY / most.max(1.0) } else { 1.0 };
    let (found, absorbed) = match step {
        Step::Walks => summed(weights)?,
        Step::Plain | Step::Decayed => {
            let discounted = weights.clone().scaled(decay);
            let found = katz(&discounted, &Solver::default())?;
            let absorbed = markov(&HTransform::new(&discounted, &found.c_out)?)?.absorption;
            (found, absorbed)
        }
    };
    let fold = |f: fn(f64, f64) -> f64| absorbed.iter().copied().reduce(f).unwrap_or(0.0);
    Ok(WalkReport {
        decay,
        katz_in_out: Alignment::of(&found.c_in, &found.c_out),
        katz_softmax: softmax.map(|shares| Alignment::of(&found.c_in, shares)),
        absorption: [fold(f64::min), absorbed.iter().sum::<f64>() / absorbed.len().max(1) as f64, fold(f64::max)],
    })
}

/// The walks that non-negative `weights` are the sum of: there are no others to count but the empty one. And `1 / c_out`.
fn summed(weights: &Dense) -> Result<(Katz, Vec<f64>)> {
    let ones = vec![1.0; weights.len()];
    let counted = |sums: Vec<f64>| sums.into_iter().map(|sum| 1.0 + sum).collect::<Vec<_>>();
    let found = Katz { c_out: counted(weights.apply(&ones)?), c_in: counted(weights.apply_transpose(&ones)?) };
    let absorbed = found.c_out.iter().map(|count| 1.0 / count).collect();
    Ok((found, absorbed))
}

/// Diffusion distances between two tokens drawn by the stationary distribution, root mean square after 1, 2 and 4 steps:
/// `sqrt(2 sum_(l >= 1) eta_l^(2 t))`. `None` with tokens without edges.
pub(super) fn diffusion(graph: &Reversible, spectrum: &Spectrum) -> Option<[f64; 3]> {
    let connected = graph.log_degree().iter().all(|degree| degree.is_finite());
    let after = |steps: i32| (2.0 * spectrum.walk().iter().skip(1).map(|eta| eta.powi(2 * steps)).sum::<f64>()).sqrt();
    connected.then(|| [1, 2, 4].map(after))
}

#[cfg(test)]
mod tests {
    use resolvent_graph::diffusion_distances;

    use super::*;

    /// A star: its centre is where walks end; what is absorbed is what walks do not count.
    #[test]
    fn walks_on_a_star() {
        let star = Dense::from_fn(4, |i, j| if i > 0 && j == 0 { 1.0 } else { 0.0 });
        let found = walks(&star, Step::Plain, 1.0, Some(&[0.7, 0.1, 0.1, 0.1])).unwrap();
        // c_out = (1, 1.85, ...), c_in = (1 + 3 * 0.85, 1, ...).
        assert!((found.absorption[0] - 1.0 / 1.85).abs() < 1e-6 && (found.absorption[2] - 1.0).abs() < 1e-6);
        assert!((found.katz_in_out.spearman.unwrap() + 1.0).abs() < 1e-9);
        assert!((found.katz_softmax.unwrap().spearman.unwrap() - 1.0).abs() < 1e-9);
        let stronger = walks(&star.scaled(4.0), Step::Plain, 4.0, None).unwrap();
        assert!((stronger.decay - 0.85 / 4.0).abs() < 1e-12 && (stronger.absorption[0] - 1.0 / 1.85).abs() < 1e-6);
    }

    /// The worked example of the paper's Fig. 3, over its Frobenius norm and times 0.7: the decay counts once. Its resolvent has the
    /// same walks, which are counted once too.
    #[test]
    fn a_mechanisms_own_decay_and_its_own_walks_count_once() {
        let edge = |i: usize, j: usize| match (i, j) {
            (1 | 2, 0) | (0, 3) | (3, 4) => 1.0,
            (4, 4) => 0.9,
            _ => 0.0,
        };
        let norm = (4.0_f64 + 0.81).sqrt();
        let hop = Dense::from_fn(5, |i, j| 0.7 * edge(i, j) / norm);
        let found = walks(&hop, Step::Decayed, 0.7 / norm, None).unwrap();
        // 1 / c_out, c_out = (1.4621, 1.4667, 1.4667, 1.4478, 1.4030).
        let counts = [1.4621, 1.4667, 1.4667, 1.4478, 1.4030];
        let mean = counts.iter().map(|count| 1.0 / count).sum::<f64>() / 5.0;
        for (found, expected) in found.absorption.iter().zip([1.0 / 1.4667, mean, 1.0 / 1.4030]) {
            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
        }
        let solved = |at: usize| {
            let unit: Vec<f64> = (0..5).map(|i| f64::from(u8::from(i == at))).collect();
            Solver::default().resolvent(&hop, &unit).unwrap()
        };
        let columns: Vec<Vec<f64>> = (0..5).map(solved).collect();
        let all = Dense::from_fn(5, |i, j| columns[j][i] - f64::from(u8::from(i == j)));
        let summed = walks(&all, Step::Walks, 1.0, None).unwrap();
        assert_eq!((summed.decay, found.decay), (1.0, 1.0));
        for (summed, found) in summed.absorption.iter().zip(found.absorption) {
            assert!((summed - found).abs() < 1e-5, "{summed} {found}");
        }
        assert!((summed.katz_in_out.cosine - found.katz_in_out.cosine).abs() < 1e-5);
    }

    #[test]
    fn what_the_weights_are_to_a_walk() {
        let step = |json: &str, most: f64| Step::of(&Mechanism::from_json(json).unwrap(), most);
        assert_eq!(step(r#"{"mechanism": "softmax"}"#, 1.0), Step::Plain);
        assert_eq!(step(r#"{"mechanism": "infsa"}"#, 1.4), Step::Decayed);
        assert_eq!(step(r#"{"mechanism": "infsa", "gamma": 1.0}"#, 1.4), Step::Plain);
        assert_eq!(step(r#"{"mechanism": "linear-infsa"}"#, 0.7), Step::Decayed);
        assert_eq!(step(r#"{"mechanism": "infsa-resolvent"}"#, 2.0), Step::Walks);
    }

    #[test]
    fn distances_are_the_mean_of_all_pairs() {
        let weights = Dense::from_fn(6, |i, j| 1.0 + ((3 * i + 3 * j + i * j) % 5) as f64);
        let graph = Reversible::from_weights(&weights).unwrap();
        let (spectrum, pi) = (graph.spectrum().unwrap(), graph.stationary());
        let found = diffusion(&graph, &spectrum).unwrap();
        for (steps, found) in [1, 2, 4].into_iter().zip(found) {
            let all = diffusion_distances(&graph, &spectrum, steps);
            let mean: f64 = (0..36).map(|at| pi[at / 6] * pi[at % 6] * all[at]).sum();
            assert!((found - mean.sqrt()).abs() < 1e-12, "{steps}: {found} {mean}");
        }
    }
}
