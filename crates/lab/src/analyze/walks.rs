//! Walks on a head's graph: counted over all lengths, absorbed, and spread by diffusion.

use resolvent_graph::{Alignment, Dense, HTransform, Result, Reversible, Solver, Spectrum, katz, markov};
use serde::Serialize;

/// The decay of walks on a graph whose rows sum to one.
const DECAY: f64 = 0.85;

/// Discounted walks of all lengths on `decay M`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WalkReport {
    /// 0.85 over the largest row sum where that exceeds one: walks of all lengths have a finite weight.
    pub decay: f64,
    /// Katz centralities: how well those of tokens as ends of walks agree with those as starts.
    pub katz_in_out: Alignment,
    /// How well those as ends agree with the shares of time on the softmax graph.
    pub katz_softmax: Option<Alignment>,
    /// Least, mean and largest absorption of the h-transformed chain, `1 / c_out`: what of a walker stays at each token.
    pub absorption: [f64; 3],
}

/// The walks on `weights`, whose largest row sum is `most`; `softmax` are the shares of time on its graph.
///
/// # Errors
/// Those of [`katz`] and [`HTransform::new`].
pub(super) fn walks(weights: &Dense, most: f64, softmax: Option<&[f64]>) -> Result<WalkReport> {
    let decay = DECAY / most.max(1.0);
    let discounted = weights.clone().scaled(decay);
    let found = katz(&discounted, &Solver::default())?;
    let absorbed = markov(&HTransform::new(&discounted, &found.c_out)?)?.absorption;
    let fold = |f: fn(f64, f64) -> f64| absorbed.iter().copied().reduce(f).unwrap_or(0.0);
    Ok(WalkReport {
        decay,
        katz_in_out: Alignment::of(&found.c_in, &found.c_out),
        katz_softmax: softmax.map(|shares| Alignment::of(&found.c_in, shares)),
        absorption: [fold(f64::min), absorbed.iter().sum::<f64>() / absorbed.len().max(1) as f64, fold(f64::max)],
    })
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
        let found = walks(&star, 1.0, Some(&[0.7, 0.1, 0.1, 0.1])).unwrap();
        // c_out = (1, 1.85, ...), c_in = (1 + 3 * 0.85, 1, ...).
        assert!((found.absorption[0] - 1.0 / 1.85).abs() < 1e-6 && (found.absorption[2] - 1.0).abs() < 1e-6);
        assert!((found.katz_in_out.spearman.unwrap() + 1.0).abs() < 1e-9);
        assert!((found.katz_softmax.unwrap().spearman.unwrap() - 1.0).abs() < 1e-9);
        let stronger = walks(&star.scaled(4.0), 4.0, None).unwrap();
        assert!((stronger.decay - 0.85 / 4.0).abs() < 1e-12 && (stronger.absorption[0] - 1.0 / 1.85).abs() < 1e-6);
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
