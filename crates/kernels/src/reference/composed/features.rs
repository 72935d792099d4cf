//! Maps of features: `phi(Q) phi(K)^T`, rows normalised.

use super::{
    super::{
        head::Head,
        matrix::{Matrix, inner, ratio},
    },
    HopGradients,
};
use crate::{
    Parameter,
    mechanism::{FeatureMap, Features},
    random_features,
};

/// Mapped queries and keys, and what made them.
pub(super) struct Mapped {
    root: f64,
    /// Directions of random features; none of `elu`.
    directions: Option<Matrix>,
    /// What each row's exponents are shifted by; it cancels in the rows' sums.
    shifts: [Vec<f64>; 2],
    phi: [Matrix; 2],
    /// Products of visible pairs, and their rows' sums.
    g: Matrix,
    sums: Vec<f64>,
}

impl Mapped {
    pub fn of(head: &Head, scale: f64, m: &Features) -> Self {
        let (root, d) = (scale.sqrt(), head.q.cols);
        let directions = (m.map == FeatureMap::Favor).then(|| {
            let count = m.count(d);
            Matrix { rows: count, cols: d, data: random_features::directions(m.seed, count, d) }
        });
        let mut mapped = Self {
            root,
            directions,
            shifts: Default::default(),
            phi: Default::default(),
            g: Matrix::default(),
            sums: Vec::new(),
        };
        // A query's own largest exponent, and that of all kept keys.
        let largest = |x: &Matrix, i: usize| {
            (0..mapped.count(x)).map(|f| mapped.exponent(x.row(i), f)).fold(f64::NEG_INFINITY, f64::max)
        };
        let of_queries: Vec<f64> = (0..head.q.rows).map(|i| largest(&head.q, i)).collect();
        let kept = (0..head.k.rows).filter(|&j| head.keep_key[j]);
        let most = kept.map(|j| largest(&head.k, j)).fold(f64::NEG_INFINITY, f64::max);
        mapped.shifts = [of_queries, vec![if most.is_finite() { most } else { 0.0 }; head.k.rows]];
        mapped.phi = [mapped.map(&head.q, 0), mapped.map(&head.k, 1)];
        let g = mapped.phi[0].times_transposed(&mapped.phi[1]);
        mapped.g = g.map(|i, j, x| if head.allowed(i, j) { x } else { 0.0 });
        mapped.sums = (0..mapped.g.rows).map(|i| mapped.g.row(i).iter().sum()).collect();
        mapped
    }

    fn count(&self, x: &Matrix) -> usize {
        self.directions.as_ref().map_or(x.cols, |directions| directions.rows)
    }

    /// `w.x - |x|^2 / 2` of the scaled row; 0 of `elu`, which has no exponents.
    fn exponent(&self, x: &[f64], f: usize) -> f64 {
        let Some(directions) = &self.directions else { return 0.0 };
        self.root * inner(directions.row(f), x) - 0.5 * self.root.powi(2) * inner(x, x)
    }

    fn map(&self, x: &Matrix, side: usize) -> Matrix {
        Matrix::from_fn(x.rows, self.count(x), |i, f| match self.directions {
            Some(_) => (self.exponent(x.row(i), f) - self.shifts[side][i]).exp() / (self.count(x) as f64).sqrt(),
            None => elu_plus_one(self.root * x.at(i, f)),
        })
    }

    pub fn weights(&self) -> Matrix {
        self.g.map(|i, _, x| ratio(x, self.sums[i]))
    }

    pub fn backward(&self, head: &Head, dweights: &Matrix) -> HopGradients {
        let delta: Vec<f64> =
            (0..self.g.rows).map(|i| ratio(inner(self.g.row(i), dweights.row(i)), self.sums[i])).collect();
        let dg = dweights.map(|i, j, x| if head.allowed(i, j) { ratio(x - delta[i], self.sums[i]) } else { 0.0 });
        let (dq, of_q) = self.pull_back(&head.q, 0, &dg.times(&self.phi[1]));
        let (dk, of_k) = self.pull_back(&head.k, 1, &dg.transpose().times(&self.phi[0]));
        // root = scale^1/2
        let dscale = 0.5 * (of_q + of_k) / self.root;
        HopGradients { dq, dk, parameters: vec![(Parameter::Scale, vec![dscale])] }
    }

    /// Gradients of the rows and of the root of the scale.
    fn pull_back(&self, x: &Matrix, side: usize, dphi: &Matrix) -> (Matrix, f64) {
        let (mut dx, mut droot) = (Matrix::zeros(x.rows, x.cols), 0.0);
        for i in 0..x.rows {
            for f in 0..dphi.cols {
                let (row, d) = (x.row(i), dphi.at(i, f));
                if let Some(directions) = &self.directions {
                    let e = d * self.phi[side].at(i, f);
                    droot += e * (inner(directions.row(f), row) - self.root * inner(row, row));
                    let slope = |c: usize| self.root * directions.at(f, c) - self.root.powi(2) * row[c];
                    (0..x.cols).for_each(|c| dx.row_mut(i)[c] += e * slope(c));
                } else {
                    let slope = d * (self.root * row[f]).min(0.0).exp();
                    dx.row_mut(i)[f] += self.root * slope;
                    droot += row[f] * slope;
                }
            }
        }
        (dx, droot)
    }
}

/// Without the cancellation of `exp(x) - 1 + 1`.
fn elu_plus_one(x: f64) -> f64 {
    if x > 0.0 { x + 1.0 } else { x.exp() }
}
