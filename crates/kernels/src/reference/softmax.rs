//! Softmax attention, and its control with constant scores.

use super::{
    HeadForward, HeadGradients,
    head::Head,
    matrix::{Matrix, inner},
};
use crate::mechanism::Softmax;

/// `P_ij = exp(L_ij - lse_i)` with `L = scale Q K^T` and `lse_i = ln sum_j exp(L_ij)` over the allowed keys.
pub(super) fn forward(head: &Head, m: &Softmax) -> HeadForward {
    let (weights, lse) = normalise(head, &head.logits(m.scale));
    HeadForward { weights: head.thinned(&weights), lse: Some(lse), ..HeadForward::default() }
}

/// The rows of `exp(logits)` over their sums, and the logarithms of these sums.
pub(super) fn normalise(head: &Head, logits: &Matrix) -> (Matrix, Vec<f64>) {
    let allowed = |i: usize| (0..logits.cols).filter(move |&j| head.allowed(i, j));
    let lse: Vec<f64> = (0..logits.rows)
        .map(|i| {
            let max = allowed(i).map(|j| logits.at(i, j)).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = allowed(i).map(|j| (logits.at(i, j) - max).exp()).sum();
            if sum > 0.0 { max + sum.ln() } else { f64::NEG_INFINITY }
        })
        .collect();
    let weights = logits.map(|i, j, x| if head.allowed(i, j) { (x - lse[i]).exp() } else { 0.0 });
    (weights, lse)
}

/// `dL_ij = P_ij (dP_ij - <dout_i, out_i>)` with `dP = dout V^T`, times the factors of weights that are dropped.
pub(super) fn backward(head: &Head, m: &Softmax, dout: &Matrix) -> HeadGradients {
    let (p, _) = normalise(head, &head.logits(m.scale));
    let dp = head.thinned(&dout.times_transposed(&head.v));
    let delta: Vec<f64> = (0..p.rows).map(|i| inner(p.row(i), dp.row(i))).collect();
    let (dq, dk) = head.logits_backward(m.scale, &dp.map(|i, j, x| p.at(i, j) * (x - delta[i])));
    HeadGradients { dq, dk, parameters: Vec::new() }
}

/// The mean of the allowed values: every allowed key of a row has the same weight.
pub(super) fn uniform_forward(head: &Head) -> HeadForward {
    let (rows, cols) = (head.q.rows, head.k.rows);
    let count: Vec<usize> = (0..rows).map(|i| (0..cols).filter(|&j| head.allowed(i, j)).count()).collect();
    let weight = |i, j| if head.allowed(i, j) { 1.0 / count[i] as f64 } else { 0.0 };
    HeadForward { weights: Matrix::from_fn(rows, cols, weight), ..HeadForward::default() }
}

/// The weights depend on nothing but the mask.
pub(super) fn uniform_backward(head: &Head) -> HeadGradients {
    let zeros = |x: &Matrix| Matrix::zeros(x.rows, x.cols);
    HeadGradients { dq: zeros(&head.q), dk: zeros(&head.k), parameters: Vec::new() }
}
