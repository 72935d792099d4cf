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
    /// Logarithms of the features of queries and keys, which are positive.
    logs: [Matrix; 2],
    /// What each row's products are divided by, as logarithms: its largest. It cancels in the rows' sums.
    shifts: Vec<f64>,
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
            logs: Default::default(),
            shifts: Vec::new(),
            g: Matrix::default(),
            sums: Vec::new(),
        };
        mapped.logs = [mapped.logs_of(&head.q), mapped.logs_of(&head.k)];
        let largest = |i: usize| {
            let seen = (0..head.k.rows).filter(|&j| head.allowed(i, j));
            let largest = seen.flat_map(|j| mapped.pair(i, j)).fold(f64::NEG_INFINITY, f64::max);
            if largest.is_finite() { largest } else { 0.0 }
        };
        mapped.shifts = (0..head.q.rows).map(largest).collect();
        mapped.g = Matrix::from_fn(head.q.rows, head.k.rows, |i, j| match head.allowed(i, j) {
            true => mapped.pair(i, j).map(|log| (log - mapped.shifts[i]).exp()).sum(),
            false => 0.0,
        });
        mapped.sums = (0..mapped.g.rows).map(|i| mapped.g.row(i).iter().sum()).collect();
        mapped
    }

    /// The logarithms of a pair's products, feature by feature.
    fn pair(&self, i: usize, j: usize) -> impl Iterator<Item = f64> {
        let [of_q, of_k] = &self.logs;
        of_q.row(i).iter().zip(of_k.row(j)).map(|(q, k)| q + k)
    }

    /// `w.x - |x|^2 / 2` of the scaled row for random features, but for a factor of all; the logarithms of `elu + 1`.
    fn logs_of(&self, x: &Matrix) -> Matrix {
        let Some(directions) = &self.directions else { return x.map(|_, _, x| log_elu_plus_one(self.root * x)) };
        Matrix::from_fn(x.rows, directions.rows, |i, f| {
            let x = x.row(i);
            self.root * inner(directions.row(f), x) - 0.5 * self.root.powi(2) * inner(x, x)
        })
    }

    pub fn weights(&self) -> Matrix {
        self.g.map(|i, _, x| ratio(x, self.sums[i]))
    }

    pub fn backward(&self, head: &Head, dweights: &Matrix) -> HopGradients {
        let delta: Vec<f64> =
            (0..self.g.rows).map(|i| ratio(inner(self.g.row(i), dweights.row(i)), self.sums[i])).collect();
        let dg = dweights.map(|i, j, x| if head.allowed(i, j) { ratio(x - delta[i], self.sums[i]) } else { 0.0 });
        let [of_queries, of_keys] = self.of_logs(head, &dg);
        let (dq, of_q) = self.pull_back(&head.q, &of_queries);
        let (dk, of_k) = self.pull_back(&head.k, &of_keys);
        // root = scale^1/2
        let dscale = 0.5 * (of_q + of_k) / self.root;
        HopGradients { dq, dk, parameters: vec![(Parameter::Scale, vec![dscale])] }
    }

    /// The gradients of the logarithms of the features, from those of the pairs' products.
    fn of_logs(&self, head: &Head, dg: &Matrix) -> [Matrix; 2] {
        let mut dlogs = self.logs.each_ref().map(|logs| Matrix::zeros(logs.rows, logs.cols));
        for i in 0..dg.rows {
            for j in (0..dg.cols).filter(|&j| head.allowed(i, j)) {
                for (f, log) in self.pair(i, j).enumerate() {
                    let d = dg.at(i, j) * (log - self.shifts[i]).exp();
                    dlogs[0].row_mut(i)[f] += d;
                    dlogs[1].row_mut(j)[f] += d;
                }
            }
        }
        dlogs
    }

    /// Gradients of the rows and of the root of the scale, from those of the logarithms of the features.
    fn pull_back(&self, x: &Matrix, dlogs: &Matrix) -> (Matrix, f64) {
        let (mut dx, mut droot) = (Matrix::zeros(x.rows, x.cols), 0.0);
        for i in 0..x.rows {
            for f in 0..dlogs.cols {
                let (row, d) = (x.row(i), dlogs.at(i, f));
                if let Some(directions) = &self.directions {
                    droot += d * (inner(directions.row(f), row) - self.root * inner(row, row));
                    let slope = |c: usize| self.root * directions.at(f, c) - self.root.powi(2) * row[c];
                    (0..x.cols).for_each(|c| dx.row_mut(i)[c] += d * slope(c));
                } else {
                    // Of the logarithm: 1 below zero, 1 / (1 + x) from there on.
                    let slope = d / (1.0 + (self.root * row[f]).max(0.0));
                    dx.row_mut(i)[f] += self.root * slope;
                    droot += row[f] * slope;
                }
            }
        }
        (dx, droot)
    }
}

fn log_elu_plus_one(x: f64) -> f64 {
    if x > 0.0 { x.ln_1p() } else { x }
}
