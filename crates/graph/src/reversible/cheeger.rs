//! Bottlenecks.

use super::{Reversible, Spectrum};
use crate::LinearOperator;

/// The best cut found by sweeping.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Sweep {
    /// Its conductance `Q(S, S^c) / min(pi(S), pi(S^c))`: an upper bound on the Cheeger constant, which itself is between
    /// half the gap and this, and this at most `sqrt(2 gap)`.
    pub conductance: f64,
    /// Which tokens are on the first side.
    pub side: Vec<bool>,
}

/// The best of the cuts that part the tokens in the order of `u / sqrt(D)`, `u` the second eigenvector of the tokens with
/// edges. Where these are in several parts, the cut is one of them, and free. `None` for fewer than two tokens with edges;
/// tokens without edges are not cut off, they are apart already.
pub fn sweep_cut(graph: &Reversible, spectrum: &Spectrum) -> Option<Sweep> {
    let (pi, weight) = (graph.stationary(), graph.adjacency());
    let mut order: Vec<usize> = (0..graph.len()).filter(|&i| graph.log_degree()[i] > f64::NEG_INFINITY).collect();
    let side = component(graph, *order.first()?);
    if side.iter().filter(|&&inside| inside).count() < order.len() {
        return Some(Sweep { conductance: 0.0, side });
    }
    // A token without edges is an eigenvector of its own with eigenvalue 0, as is the degrees' root of the one part.
    let second = spectrum.vectors.get(1 + graph.len() - order.len())?;
    let highest = graph.log_degree().iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let place = |i: usize| second[i] * (0.5 * (highest - graph.log_degree()[i])).exp();
    order.sort_by(|&a, &b| place(a).total_cmp(&place(b)));
    let flow = |i: usize, j: usize| (pi[i] * pi[j]).sqrt() * weight.row(i)[j];
    let mut side = vec![false; graph.len()];
    let (mut cut, mut inside, mut best) = (0.0, 0.0, (f64::INFINITY, 0));
    for (taken, &i) in order.iter().enumerate().take(order.len().saturating_sub(1)) {
        for &j in order.iter().filter(|&&j| j != i) {
            cut += if side[j] { -flow(i, j) } else { flow(i, j) };
        }
        side[i] = true;
        inside += pi[i];
        // Summed again rather than 1 - inside, which cancels where almost all is inside.
        let outside: f64 = order[taken + 1..].iter().map(|&j| pi[j]).sum();
        let conductance = cut.max(0.0) / inside.min(outside);
        if conductance < best.0 {
            best = (conductance, taken + 1);
        }
    }
    let (conductance, taken) = best;
    let mut side = vec![false; graph.len()];
    order[..taken].iter().for_each(|&i| side[i] = true);
    (taken > 0).then_some(Sweep { conductance, side })
}

/// The tokens that `from` is joined with.
pub(super) fn component(graph: &Reversible, from: usize) -> Vec<bool> {
    let mut joined = vec![false; graph.len()];
    joined[from] = true;
    let mut open = vec![from];
    while let Some(i) = open.pop() {
        for (j, &weight) in graph.adjacency().row(i).iter().enumerate() {
            if weight > 0.0 && !joined[j] {
                joined[j] = true;
                open.push(j);
            }
        }
    }
    joined
}
