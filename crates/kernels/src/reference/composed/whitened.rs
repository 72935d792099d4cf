//! Centred, whitened, scaled and shifted affinities. "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel", eq. 4
//! to 6.

use super::super::{
    inverse::eigen,
    matrix::{Matrix, ratio},
};
use crate::mechanism::{Centering, Whitened, Whitening};

/// From affinities `G` to weights: what is subtracted, divided by and added.
pub(super) struct Weights {
    m: Whitened,
    /// 1 for the visible pairs, 0 for the others.
    seen: Matrix,
    /// Keys that each query sees.
    n: Vec<f64>,
    /// Queries that see each key, at least 1.
    queries: Vec<f64>,
    /// `(G - column means)` on the visible pairs, and the columns' variances.
    by_key: Matrix,
    variance: Vec<f64>,
    centred: Matrix,
    /// `(Sigma + eps)^-1/2` with the eigenvectors and the roots of the eigenvalues, where whitening is full.
    full: Option<(Matrix, Matrix, Vec<f64>)>,
}

fn column_sum(x: &Matrix, j: usize) -> f64 {
    (0..x.rows).map(|i| x.at(i, j)).sum()
}

impl Weights {
    /// `g` may hold anything at hidden pairs. The statistics of a key are over the queries that see it: all that are
    /// kept, unless there is a window.
    pub fn of(m: &Whitened, seen: Matrix, g: &Matrix) -> Self {
        let only = |i: usize, j: usize, x: f64| if seen.at(i, j) == 0.0 { 0.0 } else { x };
        let g = g.map(only);
        let n: Vec<f64> = (0..g.rows).map(|i| seen.row(i).iter().sum()).collect();
        let queries: Vec<f64> = (0..g.cols).map(|j| column_sum(&seen, j).max(1.0)).collect();
        let means: Vec<f64> = (0..g.cols).map(|j| column_sum(&g, j) / queries[j]).collect();
        let by_key = g.map(|i, j, x| only(i, j, x - means[j]));
        let squares = by_key.map(|_, _, x| x * x);
        let variance = (0..g.cols).map(|j| column_sum(&squares, j) / queries[j]).collect();
        let centred = match m.centering {
            Centering::PerKey => by_key.clone(),
            Centering::PerQuery => {
                let mean = |i: usize| ratio(g.row(i).iter().sum(), n[i]);
                g.map(|i, j, x| only(i, j, x - mean(i)))
            }
            Centering::None => g.clone(),
        };
        let full = (m.whitening == Whitening::Full).then(|| {
            let shares = by_key.map(|_, j, x| x / queries[j].sqrt());
            let (values, u) = eigen(&shares.transpose().times(&shares));
            let roots: Vec<f64> = values.iter().map(|x| (x.max(0.0) + m.whiten_eps).sqrt()).collect();
            (u.map(|_, j, x| x / roots[j]).times_transposed(&u), u, roots)
        });
        Self { m: m.clone(), seen, n, queries, by_key, variance, centred, full }
    }

    fn only(&self, i: usize, j: usize, x: f64) -> f64 {
        if self.seen.at(i, j) == 0.0 { 0.0 } else { x }
    }

    /// The factor on a row of whitened weights.
    fn scale(&self, i: usize) -> f64 {
        self.m.weight_scale.value(self.n[i].max(1.0) as usize)
    }

    fn deviation(&self, j: usize) -> f64 {
        (self.variance[j] + self.m.whiten_eps).sqrt()
    }

    pub fn weights(&self) -> Matrix {
        let white = match (&self.full, self.m.whitening) {
            (Some((root, ..)), _) => self.centred.times(root),
            (None, Whitening::Diagonal) => self.centred.map(|_, j, x| x / self.deviation(j)),
            (None, _) => self.centred.clone(),
        };
        let bias = |i: usize| if self.m.bias_one_over_n { ratio(1.0, self.n[i]) } else { 0.0 };
        white.map(|i, j, x| self.only(i, j, self.scale(i) * x + bias(i)))
    }

    /// `dG` from the gradient of the weights.
    pub fn backward(&self, dweights: &Matrix) -> Matrix {
        let dwhite = dweights.map(|i, j, x| self.only(i, j, self.scale(i) * x));
        let (dcentred, mut dby_key) = self.through_whitening(dwhite);
        let mut dg = Matrix::zeros(dcentred.rows, dcentred.cols);
        match self.m.centering {
            Centering::PerKey => dby_key = dby_key.plus(&dcentred),
            Centering::PerQuery => {
                let sum = |i: usize| (0..dcentred.cols).map(|j| self.only(i, j, dcentred.at(i, j))).sum();
                dg = dcentred.map(|i, _, x| x - ratio(sum(i), self.n[i]));
            }
            Centering::None => dg = dcentred,
        }
        let dby_key = dby_key.map(|i, j, x| self.only(i, j, x));
        let means: Vec<f64> = (0..dby_key.cols).map(|j| column_sum(&dby_key, j) / self.queries[j]).collect();
        dg.map(|i, j, x| self.only(i, j, x + dby_key.at(i, j) - means[j]))
    }

    /// The gradients of what was centred, and, through the statistics, of what was centred by key.
    fn through_whitening(&self, dwhite: Matrix) -> (Matrix, Matrix) {
        match (&self.full, self.m.whitening) {
            (Some((root, u, roots)), _) => {
                let droot = u.transpose().times(&self.centred.transpose().times(&dwhite)).times(u);
                let divided =
                    droot.map(|p, q, x| -0.5 * (x + droot.at(q, p)) / (roots[p] * roots[q] * (roots[p] + roots[q])));
                let dsigma = u.times(&divided).times_transposed(u);
                let shares = self.by_key.map(|_, j, x| x / self.queries[j].sqrt());
                let dby_key = shares.times(&dsigma).map(|_, j, x| 2.0 * x / self.queries[j].sqrt());
                (dwhite.times(root), dby_key)
            }
            (None, Whitening::Diagonal) => {
                let products = dwhite.map(|i, j, x| x * self.centred.at(i, j));
                let dvariance = |j: usize| -0.5 * column_sum(&products, j) / self.deviation(j).powi(3);
                let dvariance: Vec<f64> = (0..dwhite.cols).map(dvariance).collect();
                let dby_key = self.by_key.map(|_, j, x| 2.0 * dvariance[j] * x / self.queries[j]);
                (dwhite.map(|_, j, x| x / self.deviation(j)), dby_key)
            }
            (None, _) => {
                let zeros = Matrix::zeros(dwhite.rows, dwhite.cols);
                (dwhite, zeros)
            }
        }
    }
}
