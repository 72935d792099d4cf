//! One hop, several, or all of them, over the weights `W`.

use super::super::{head::Head, matrix::Matrix};
use crate::{Error, Result, mechanism::Series};

/// The matrix that maps `v` to `out`: `gamma W`, `sum of (gamma W)^t`, or `(I - gamma W)^-1 - I`. "Infinite Self-Attention", eq. 7,
/// 10, 11 and 15. `reaches`: whether a path may lead from a
/// key to a query.
pub(super) fn total(head: &Head, m: &Series, w: &Matrix, reaches: impl Fn(usize, usize) -> bool) -> Result<Matrix> {
    let hop = w.map(|_, _, x| head.gamma * x);
    Ok(match m {
        Series::OneHop(_) => hop,
        Series::Hops(m) => {
            // Horner's rule: M (I + M (I + ..)).
            (1..m.count).fold(hop.clone(), |sum, _| hop.plus(&hop.times(&sum)))
        }
        Series::Resolvent(_) => {
            let inverse = hop.map(|i, j, x| if i == j { 1.0 - x } else { -x }).inverse();
            // (I - M)^-1 M rather than (I - M)^-1 - I, which would cancel where M is small. A path starts at a kept query and
            // ends at a kept key: elsewhere the series is zero, and so that no rounding of the elimination remains there, it is
            // written as zero.
            inverse.times(&hop).map(|i, j, x| if reaches(i, j) { x } else { 0.0 })
        }
        Series::Limit(_) => {
            let (what, why) = ("the limit of a composed mechanism", "it is of pooled weights: use `linear-infsa`");
            return Err(Error::Unsupported { mechanism: "composed", what, why });
        }
    })
}

/// `(dW, dgamma)` from `dout`; `total` is the matrix of [`total`]. With `M = gamma W` they are `gamma dM` and `<dM, W>`:
///
/// ```text
/// one hop     dM = dout v^T
/// hops        dM = sum over s + r < count of ((M^T)^s dout) (M^r v)^T
/// resolvent   dM = ((I - M^T)^-1 dout) ((I - M)^-1 v)^T
/// ```
pub(super) fn backward(head: &Head, m: &Series, w: &Matrix, total: &Matrix, dout: &Matrix) -> (Matrix, f64) {
    let v = &head.v;
    let dhop = match m {
        Series::OneHop(_) | Series::Limit(_) => dout.times_transposed(v),
        Series::Hops(m) => {
            let scaled = |x: Matrix| x.map(|_, _, x| head.gamma * x);
            // The sums of the first powers on v, those of most powers last.
            let mut sums = vec![v.clone()];
            for _ in 1..m.count {
                sums.push(v.plus(&scaled(w.times(&sums[sums.len() - 1]))));
            }
            let (mut dhop, mut adjoint) = (Matrix::zeros(w.rows, w.cols), dout.clone());
            for sum in sums.iter().rev() {
                dhop = dhop.plus(&adjoint.times_transposed(sum));
                adjoint = scaled(w.transpose().times(&adjoint));
            }
            dhop
        }
        Series::Resolvent(_) => {
            let adjoint = dout.plus(&total.transpose().times(dout));
            let solution = v.plus(&total.times(v));
            adjoint.times_transposed(&solution)
        }
    };
    (dhop.map(|_, _, x| head.gamma * x), dhop.inner(w))
}
