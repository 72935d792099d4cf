//! Frobenius norms, of all rows or of those so far.

use super::{head::Head, sweep::Weights};

/// The logarithm of a sum, from those of its terms.
pub(super) fn add_logs(a: f64, b: f64) -> f64 {
    let (low, high) = (a.min(b), a.max(b));
    if low == f64::NEG_INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

/// For every row the logarithm of the sum of the squares that it is divided by the root of.
pub(super) fn norms(head: &Head<'_>, squares: &[f64]) -> Vec<f64> {
    if head.sight.causal { prefix_logs(head, squares) } else { total_log(head, squares) }
}

/// The logarithm of the sum of all queries' squares, for every row.
fn total_log(head: &Head<'_>, squares: &[f64]) -> Vec<f64> {
    let total = squares[..head.own_rows()].iter().copied().fold(f64::NEG_INFINITY, add_logs);
    vec![total; squares.len()]
}

/// The rows of queries in the order of their positions.
fn by_position(head: &Head<'_>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..head.own_rows()).collect();
    order.sort_by_key(|&n| head.queries[n]);
    order
}

/// The logarithm of the sum of the squares of the rows so far.
fn prefix_logs(head: &Head<'_>, squares: &[f64]) -> Vec<f64> {
    let (mut sum, mut norms) = (f64::NEG_INFINITY, vec![0.0; squares.len()]);
    for n in by_position(head) {
        sum = add_logs(sum, squares[n]);
        norms[n] = sum;
    }
    head.spread(&mut norms);
    norms
}

/// `tau`: the gradient of a norm is `c / f` with `c = sum delta` over the rows that it divides, and of a squared affinity's part
/// in it `g f / F`. Causal: `tau_i = sum_{r >= i} c_r f_i^2 / (f_r F_r)`, by recursion from the last row.
pub(super) fn gradients(head: &Head<'_>, norm_ratios: &[f64], weights: &Weights, delta: &[f64], log: bool) -> Vec<f32> {
    if !head.sight.causal {
        let ratio = norm_ratios.first().copied().unwrap_or(0.0);
        return vec![(delta[..head.own_rows()].iter().sum::<f64>() * ratio) as f32; delta.len()];
    }
    let ratio = |from: usize, to: usize| {
        let [from, to] = [weights.rows[from], weights.rows[to]].map(f64::from);
        match log {
            true => (from - to).exp(),
            false if from == 0.0 => 0.0,
            false => to / from,
        }
    };
    let (mut tau, mut next) = (vec![0.0; delta.len()], None);
    let mut sum = 0.0;
    for n in by_position(head).into_iter().rev() {
        sum = delta[n] * norm_ratios[n] + next.map_or(0.0, |next| sum * f64::powi(ratio(n, next), 2));
        tau[n] = sum as f32;
        next = Some(n);
    }
    head.spread(&mut tau);
    tau
}
