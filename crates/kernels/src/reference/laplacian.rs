//! The whitened Laplacian kernel, whole and through landmarks. "LaplacianFormer: Rethinking Linear Attention with
//! Laplacian Kernel", with the further options of [`Laplacian`].

use super::{
    HeadForward, HeadGradients,
    head::Head,
    inverse::{Inverted, Method, eigen},
    landmarks::{Filter, Producer},
    matrix::{Matrix, ratio},
};
use crate::{
    Parameter, Result,
    mechanism::{Centering, Inverse, InverseGradient, Laplacian, LaplacianExact, Whitening},
};

/// `exp(-|x_i - y_j|_1 / lambda)`.
fn kernel(x: &Matrix, y: &Matrix, lambda: f64) -> Matrix {
    Matrix::from_fn(x.rows, y.rows, |i, j| (-distance(x.row(i), y.row(j)) / lambda).exp())
}

fn distance(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| (x - y).abs()).sum()
}

/// Gradients of `<e, log k(x, y)>` in `x`, in `y` and in lambda; 0 in a channel that ties.
fn kernel_backward(e: &Matrix, x: &Matrix, y: &Matrix, lambda: f64) -> (Matrix, Matrix, f64) {
    let (mut dx, mut dy, mut dlambda) = (Matrix::zeros(x.rows, x.cols), Matrix::zeros(y.rows, y.cols), 0.0);
    for i in 0..x.rows {
        for j in 0..y.rows {
            dlambda += e.at(i, j) * distance(x.row(i), y.row(j)) / (lambda * lambda);
            for c in 0..x.cols {
                let t = x.at(i, c) - y.at(j, c);
                let sign = if t == 0.0 { 0.0 } else { t.signum() };
                dx.row_mut(i)[c] -= e.at(i, j) * sign / lambda;
                dy.row_mut(j)[c] += e.at(i, j) * sign / lambda;
            }
        }
    }
    (dx, dy, dlambda)
}

fn times_entries(x: &Matrix, y: &Matrix) -> Matrix {
    x.map(|i, j, x| x * y.at(i, j))
}

/// From similarities `G` to weights: what is subtracted, divided by and added.
pub(super) struct Weights {
    /// Keys that each query sees.
    n: Vec<f64>,
    /// Kept queries, at least 1.
    rows: f64,
    /// `(G - column means)` on the pairs that may meet, and the columns' variances.
    by_key: Matrix,
    variance: Vec<f64>,
    centred: Matrix,
    /// `(Sigma + eps)^-1/2` with the eigenvectors and the roots of the eigenvalues, where whitening is full.
    full: Option<(Matrix, Matrix, Vec<f64>)>,
}

impl Weights {
    /// `g` may hold anything at masked pairs.
    pub fn of(head: &Head, m: &LaplacianExact, g: &Matrix) -> Self {
        // The statistics of a key are over all kept queries; only without them is the call causal.
        let seen = |i: usize, j: usize, x: f64| if head.allowed(i, j) { x } else { 0.0 };
        let g = g.map(seen);
        let n: Vec<f64> = (0..g.rows).map(|i| (0..g.cols).filter(|&j| head.allowed(i, j)).count() as f64).collect();
        let rows = head.keep_query.iter().filter(|&&keep| keep).count().max(1) as f64;
        let column_mean = |j: usize| (0..g.rows).map(|i| g.at(i, j)).sum::<f64>() / rows;
        let means: Vec<f64> = (0..g.cols).map(column_mean).collect();
        let by_key = g.map(|i, j, x| seen(i, j, x - means[j]));
        let variance = (0..g.cols).map(|j| (0..g.rows).map(|i| by_key.at(i, j).powi(2)).sum::<f64>() / rows).collect();
        let centred = match m.centering {
            Centering::PerKey => by_key.clone(),
            Centering::PerQuery => {
                let mean = |i: usize| ratio(g.row(i).iter().sum(), n[i]);
                g.map(|i, j, x| seen(i, j, x - mean(i)))
            }
            Centering::None => g.clone(),
        };
        let full = (m.whitening == Whitening::Full).then(|| {
            let sigma = by_key.transpose().times(&by_key).map(|_, _, x| x / rows);
            let (values, u) = eigen(&sigma);
            let roots: Vec<f64> = values.iter().map(|x| (x.max(0.0) + m.whiten_eps).sqrt()).collect();
            (u.map(|_, j, x| x / roots[j]).times_transposed(&u), u, roots)
        });
        Self { n, rows, by_key, variance, centred, full }
    }

    /// The factor on a row of whitened weights.
    fn scale(&self, m: &LaplacianExact, i: usize) -> f64 {
        m.weight_scale.value(self.n[i].max(1.0) as usize)
    }

    fn deviation(&self, m: &LaplacianExact, j: usize) -> f64 {
        (self.variance[j] + m.whiten_eps).sqrt()
    }

    pub fn weights(&self, head: &Head, m: &LaplacianExact) -> Matrix {
        let white = match (&self.full, m.whitening) {
            (Some((root, ..)), _) => self.centred.times(root),
            (None, Whitening::Diagonal) => self.centred.map(|_, j, x| x / self.deviation(m, j)),
            (None, _) => self.centred.clone(),
        };
        let bias = |i: usize| if m.bias_one_over_n { ratio(1.0, self.n[i]) } else { 0.0 };
        white.map(|i, j, x| if head.allowed(i, j) { self.scale(m, i) * x + bias(i) } else { 0.0 })
    }

    /// `dG` from the gradient of the weights.
    pub fn backward(&self, head: &Head, m: &LaplacianExact, dweights: &Matrix) -> Matrix {
        let seen = |i: usize, j: usize, x: f64| if head.allowed(i, j) { x } else { 0.0 };
        let dwhite = dweights.map(|i, j, x| seen(i, j, self.scale(m, i) * x));
        let mut dby_key = Matrix::zeros(dwhite.rows, dwhite.cols);
        let dcentred = match (&self.full, m.whitening) {
            (Some((root, u, roots)), _) => {
                let droot = u.transpose().times(&self.centred.transpose().times(&dwhite)).times(u);
                let divided =
                    droot.map(|p, q, x| -0.5 * (x + droot.at(q, p)) / (roots[p] * roots[q] * (roots[p] + roots[q])));
                let dsigma = u.times(&divided).times_transposed(u);
                dby_key = self.by_key.times(&dsigma).map(|_, _, x| 2.0 * x / self.rows);
                dwhite.times(root)
            }
            (None, Whitening::Diagonal) => {
                let dvariance = |j: usize| {
                    let slope: f64 = (0..dwhite.rows).map(|i| dwhite.at(i, j) * self.centred.at(i, j)).sum();
                    -0.5 * slope / self.deviation(m, j).powi(3)
                };
                let dvariance: Vec<f64> = (0..dwhite.cols).map(dvariance).collect();
                dby_key = self.by_key.map(|_, j, x| 2.0 * dvariance[j] * x / self.rows);
                dwhite.map(|_, j, x| x / self.deviation(m, j))
            }
            (None, _) => dwhite,
        };
        let mut dg = Matrix::zeros(dcentred.rows, dcentred.cols);
        match m.centering {
            Centering::PerKey => dby_key = dby_key.plus(&dcentred),
            Centering::PerQuery => {
                let mean = |i: usize| ratio((0..dcentred.cols).map(|j| seen(i, j, dcentred.at(i, j))).sum(), self.n[i]);
                dg = dcentred.map(|i, _, x| x - mean(i));
            }
            Centering::None => dg = dcentred,
        }
        let column = |j: usize| (0..dby_key.rows).map(|i| seen(i, j, dby_key.at(i, j))).sum::<f64>() / self.rows;
        let means: Vec<f64> = (0..dby_key.cols).map(column).collect();
        dg.map(|i, j, x| seen(i, j, x + dby_key.at(i, j) - means[j]))
    }
}

fn bandwidth(head: &Head, configured: f64) -> f64 {
    head.parameter(Parameter::Lambda).map_or(configured, |lambda| lambda[0])
}

pub(super) fn exact_forward(head: &Head, m: &LaplacianExact) -> HeadForward {
    let g = kernel(&head.q, &head.k, bandwidth(head, m.lambda));
    HeadForward { weights: Weights::of(head, m, &g).weights(head, m), ..HeadForward::default() }
}

pub(super) fn exact_backward(head: &Head, m: &LaplacianExact, dout: &Matrix) -> HeadGradients {
    let lambda = bandwidth(head, m.lambda);
    let g = kernel(&head.q, &head.k, lambda);
    let dg = Weights::of(head, m, &g).backward(head, m, &dout.times_transposed(&head.v));
    let (dq, dk, dlambda) = kernel_backward(&times_entries(&dg, &g), &head.q, &head.k, lambda);
    HeadGradients { dq, dk, parameters: vec![(Parameter::Lambda, vec![dlambda])] }
}

/// `G = Cq X Ck^T` and what it is made of.
struct Trace {
    lambda: f64,
    producer: Producer,
    alive: Vec<bool>,
    marks: Matrix,
    cq: Matrix,
    ck: Matrix,
    /// The kernel among landmarks, the identity at dead ones.
    w: Matrix,
    inverted: Inverted,
    g: Matrix,
}

impl Trace {
    fn of(head: &Head, m: &Laplacian) -> Result<Self> {
        let lambda = bandwidth(head, m.lambda);
        let filter = head.parameter(Parameter::LandmarkWeight).map(Filter::Depthwise);
        let producer = Producer::new(m.landmarks, m.grid, &head.keep_key, true, filter, &[]);
        let marks = producer.apply(&head.k);
        let alive: Vec<bool> = producer.members.iter().map(|members| !members.is_empty()).collect();
        let live = |_: usize, l: usize, x: f64| if alive[l] { x } else { 0.0 };
        let (cq, ck) = (kernel(&head.q, &marks, lambda).map(live), kernel(&head.k, &marks, lambda).map(live));
        let both = |i: usize, j: usize, x: f64| if alive[i] && alive[j] { x } else { f64::from(u8::from(i == j)) };
        let w = kernel(&marks, &marks, lambda).map(both);
        let method = Method {
            mechanism: "laplacian",
            inverse: m.inverse,
            steps: m.newton_iterations,
            init: None,
            ridge: m.ridge,
            gradient: match m.inverse {
                Inverse::NewtonSchulz => InverseGradient::Unrolled,
                _ => InverseGradient::Implicit,
            },
            cutoff: 0.0,
        };
        let inverted = Inverted::new(&w, method)?;
        let g = cq.times(inverted.result()).times_transposed(&ck);
        Ok(Self { lambda, producer, alive, marks, cq, ck, w, inverted, g })
    }
}

pub(super) fn forward(head: &Head, m: &Laplacian) -> Result<HeadForward> {
    let (trace, exact) = (Trace::of(head, m)?, m.exact());
    let weights = Weights::of(head, &exact, &trace.g).weights(head, &exact);
    Ok(HeadForward { weights, ..HeadForward::default() })
}

pub(super) fn backward(head: &Head, m: &Laplacian, dout: &Matrix) -> Result<HeadGradients> {
    let (t, exact) = (Trace::of(head, m)?, m.exact());
    let dg = Weights::of(head, &exact, &t.g).backward(head, &exact, &dout.times_transposed(&head.v));
    let x = t.inverted.result();
    let dcq = dg.times(&t.ck).times_transposed(x);
    let dck = dg.transpose().times(&t.cq).times(x);
    let dw = t.inverted.backward(&t.cq.transpose().times(&dg).times(&t.ck));
    let both = |i: usize, j: usize, x: f64| if t.alive[i] && t.alive[j] { x } else { 0.0 };
    let (dq, dm_q, dl_q) = kernel_backward(&times_entries(&dcq, &t.cq), &head.q, &t.marks, t.lambda);
    let (dk, dm_k, dl_k) = kernel_backward(&times_entries(&dck, &t.ck), &head.k, &t.marks, t.lambda);
    let (left, right, dl_w) = kernel_backward(&times_entries(&dw, &t.w).map(both), &t.marks, &t.marks, t.lambda);
    let dmarks = dm_q.plus(&dm_k).plus(&left).plus(&right);
    let (dk_marks, dfilter) = t.producer.backward(&head.k, &dmarks);
    let mut parameters = vec![(Parameter::Lambda, vec![dl_q + dl_k + dl_w])];
    if !dfilter.is_empty() {
        parameters.push((Parameter::LandmarkWeight, dfilter));
    }
    Ok(HeadGradients { dq, dk: dk.plus(&dk_marks), parameters })
}
