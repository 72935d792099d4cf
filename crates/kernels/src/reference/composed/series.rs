//! Series of a matrix of weights.

use super::super::{head::Head, matrix::Matrix};
use crate::mechanism::Series;

fn scaled(x: &Matrix, factor: f64) -> Matrix {
    x.map(|_, _, x| factor * x)
}

/// `(I - M)^-1` of `M = gamma W`.
fn resolvent(hop: &Matrix) -> Matrix {
    hop.map(|i, j, x| if i == j { 1.0 - x } else { -x }).inverse()
}

/// The matrix that the series makes of `W`.
pub(super) fn total(head: &Head, series: &Series, weights: &Matrix) -> Matrix {
    let hop = scaled(weights, head.gamma);
    match series {
        Series::Hops(m) => {
            let (mut power, mut sum) = (hop.clone(), hop.clone());
            for _ in 1..m.count {
                power = power.times(&hop);
                sum = sum.plus(&power);
            }
            sum
        }
        // (I - M)^-1 M rather than (I - M)^-1 - I, which would cancel where M is small. A path starts at a kept query and ends at a
        // kept key, in the past of the first where that is asked for: elsewhere rounding of the elimination is no weight.
        Series::Resolvent(_) => resolvent(&hop).times(&hop).map(|i, j, x| {
            let reaches = head.keep_query[i] && head.keep_key[j] && (!head.causal || head.past(i, j));
            if reaches { x } else { 0.0 }
        }),
        _ => hop,
    }
}

/// The gradients of `W` and of the decay from that of [`total`].
pub(super) fn backward(head: &Head, series: &Series, weights: &Matrix, dtotal: &Matrix) -> (Matrix, f64) {
    let hop = scaled(weights, head.gamma);
    let dhop = match series {
        Series::Hops(m) => {
            // d(M^t) = sum over s of (M^T)^s d (M^T)^(t-1-s), by Horner: g_t = d + M^T g_(t-1), and each times the powers behind it.
            let transposed = hop.transpose();
            let mut dhop = Matrix::zeros(hop.rows, hop.cols);
            let mut behind = dtotal.clone();
            for after in 0..m.count {
                let mut front = behind.clone();
                for _ in 0..m.count - after {
                    dhop = dhop.plus(&front);
                    front = transposed.times(&front);
                }
                behind = behind.times(&transposed);
            }
            dhop
        }
        Series::Resolvent(_) => {
            let adjoint = resolvent(&hop).transpose();
            adjoint.times(dtotal).times(&adjoint)
        }
        _ => dtotal.clone(),
    };
    (scaled(&dhop, head.gamma), dhop.inner(weights))
}
