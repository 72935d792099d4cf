//! The filter over the values' tokens that is added to the output. "Softmax-free Linear Transformers", the authors' code.

use super::super::{head::Head, matrix::Matrix};
use crate::{Mechanism, Parameter};

/// A filter of `width` taps along each axis.
pub(super) struct ValueFilter {
    width: usize,
    grid: Option<[usize; 2]>,
}

impl ValueFilter {
    /// The filter of a mechanism, where it has one.
    pub fn of(mechanism: &Mechanism) -> Option<Self> {
        let (width, grid) = (mechanism.value_conv(), mechanism.grid());
        (width > 0).then_some(Self { width, grid })
    }

    /// The matrix that is added to that of the operator.
    pub fn matrix(&self, head: &Head) -> Matrix {
        let weight = head.parameter(Parameter::ValueWeight).unwrap_or_default();
        let mut matrix = Matrix::zeros(head.q.rows, head.k.rows);
        self.taps(head, |n, from, tap| matrix.row_mut(n)[from] += weight[tap]);
        matrix
    }

    /// The gradient of the weights from that of the matrix.
    pub fn backward(&self, head: &Head, dmatrix: &Matrix) -> Vec<f64> {
        let axes = if self.grid.is_some() { 2 } else { 1 };
        let mut dweight = vec![0.0; self.width.pow(axes)];
        self.taps(head, |n, from, tap| dweight[tap] += dmatrix.at(n, from));
        dweight
    }

    /// Calls `visit(token, token it reads, place in the filter)` for every pair of tokens that are kept on both sides.
    fn taps(&self, head: &Head, mut visit: impl FnMut(usize, usize, usize)) {
        let k = self.width;
        let [height, width] = self.grid.unwrap_or([1, head.k.rows]);
        let rows = if self.grid.is_some() { k } else { 1 };
        for n in (0..height * width).filter(|&n| head.keep_query[n] && head.keep_key[n]) {
            for tap in 0..rows * k {
                let (y, x) = (n / width + tap / k, n % width + tap % k);
                let (Some(y), Some(x)) = (y.checked_sub(rows / 2), x.checked_sub(k / 2)) else { continue };
                if y < height && x < width && head.keep_key[y * width + x] {
                    visit(n, y * width + x, tap);
                }
            }
        }
    }
}
