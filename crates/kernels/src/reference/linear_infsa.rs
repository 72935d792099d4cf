//! Linear InfSA. "Infinite Self-Attention", eq. 16 to 21, with the further options of [`LinearInfsa`].

use super::{
    HeadForward, HeadGradients,
    head::{Head, row_norms},
    matrix::{Matrix, inner, ratio},
};
use crate::{
    Parameter,
    mechanism::{LinearInfsa, PowerOperator},
};

/// Everything that the forward pass meets on its way, all `N x N` products written out.
struct Trace {
    /// Norms of the queries and of the keys.
    e: (Vec<f64>, Vec<f64>),
    /// `Z_ij = scale (q_i.k_j + norm_bias |q_i| |k_j|)`.
    z: Matrix,
    /// `alpha = e / (sum e + eps)` over the kept queries.
    alpha: Vec<f64>,
    /// `sum e + eps`.
    alpha_sum: f64,
    /// One entry per power step.
    steps: Vec<Step>,
}

/// One power step `u -> s / (sum |s| + eps)`.
struct Step {
    /// The weights that go in, over the queries.
    u: Vec<f64>,
    /// The scores, over the keys.
    s: Vec<f64>,
    /// `sum |s| + eps`.
    sum: f64,
}

impl Trace {
    fn of(head: &Head, m: &LinearInfsa) -> Self {
        let e = (row_norms(&head.q), row_norms(&head.k));
        let (scale, bias) = (head.scale(m.scale), m.norm_bias.value(head.q.cols));
        let z = head.q.times_transposed(&head.k).map(|i, j, x| scale * (x + bias * e.0[i] * e.1[j]));
        let alpha_sum = e.0.iter().sum::<f64>() + m.eps; // masked queries are zero rows
        let alpha: Vec<f64> = e.0.iter().map(|&x| ratio(x, alpha_sum)).collect();
        let mut trace = Self { e, z, alpha, alpha_sum, steps: Vec::new() };
        let mut u = trace.alpha.clone();
        for _ in 0..m.iterations {
            let s = trace.scores(head, m, &u);
            let sum = s.iter().map(|x| x.abs()).sum::<f64>() + m.eps;
            let step = Step { u, s, sum };
            u = step.weights(head, m);
            trace.steps.push(step);
        }
        trace
    }

    /// `phi(Z^T u)` (factored) or `phi(Z)^T u` (exact), 0 at masked keys.
    fn scores(&self, head: &Head, m: &LinearInfsa, u: &[f64]) -> Vec<f64> {
        let phi = |x| m.activation.value(x);
        let column = |j: usize| (0..u.len()).map(move |i| (u[i], self.z.at(i, j)));
        (0..self.z.cols)
            .map(|j| match m.operator {
                _ if !head.keep_key[j] => 0.0,
                PowerOperator::Factored => phi(column(j).map(|(u, z)| u * z).sum()),
                PowerOperator::Exact => column(j).map(|(u, z)| u * phi(z)).sum(),
            })
            .collect()
    }
}

impl Step {
    /// What comes out. Where a further step follows, the tokens are queries too, and masked queries drop out.
    fn weights(&self, head: &Head, m: &LinearInfsa) -> Vec<f64> {
        let kept = |j: usize| m.iterations == 1 || head.keep_query[j];
        (0..self.s.len()).map(|j| if kept(j) { ratio(self.s[j], self.sum) } else { 0.0 }).collect()
    }
}

/// `out_i = gamma sum_j a_j v_j` for every kept query: the matrix `gamma 1 a^T`.
pub(super) fn forward(head: &Head, m: &LinearInfsa) -> HeadForward {
    let trace = Trace::of(head, m);
    let a = trace.steps.last().map_or(trace.alpha.clone(), |step| step.weights(head, m));
    let rows = if m.broadcast { head.q.rows } else { 1 };
    let weight = |i: usize, j: usize| if !m.broadcast || head.keep_query[i] { head.gamma * a[j] } else { 0.0 };
    let weights = Matrix::from_fn(rows, a.len(), weight);
    HeadForward { weights, alpha: Some(trace.alpha), a: Some(a), ..HeadForward::default() }
}

/// The chain of the steps backwards, from `da_j = gamma v_j . sum_i dout_i`; then that of `alpha` and of `Z`.
pub(super) fn backward(head: &Head, m: &LinearInfsa, saved: &HeadForward, dout: &Matrix) -> HeadGradients {
    let trace = Trace::of(head, m);
    let mut dz = Matrix::zeros(trace.z.rows, trace.z.cols);
    let pooled: Vec<f64> = (0..dout.cols).map(|c| (0..dout.rows).map(|i| dout.at(i, c)).sum()).collect();
    let mut du: Vec<f64> = (0..head.v.rows).map(|j| head.gamma * inner(head.v.row(j), &pooled)).collect();
    for step in trace.steps.iter().rev() {
        let ds = step_backward(head, m, step, &du);
        du = scores_backward(m, &trace, step, &ds, &mut dz);
    }
    let (dq, dk) = tensors_backward(head, m, &trace, &du, &dz);
    let dgamma = dout.inner(&saved.weights.times(&head.v)) / head.gamma;
    HeadGradients { dq, dk, parameters: vec![(Parameter::Gamma, vec![dgamma])] }
}

/// `ds_j = (du_j - sign(s_j) sum_l u_l du_l) / (sum |s| + eps)`, 0 at masked keys.
fn step_backward(head: &Head, m: &LinearInfsa, step: &Step, du: &[f64]) -> Vec<f64> {
    let kept = |j: usize| m.iterations == 1 || head.keep_query[j];
    let mean = inner(&step.weights(head, m), du);
    let sign = |s: f64| if s == 0.0 { 0.0 } else { s.signum() };
    let ds = |j: usize| ratio(if kept(j) { du[j] } else { 0.0 } - sign(step.s[j]) * mean, step.sum);
    (0..du.len()).map(|j| if head.keep_key[j] { ds(j) } else { 0.0 }).collect()
}

/// Adds one step's share of `dZ`; returns `du`. Factored: `dZ = u (phi'(Z^T u) ds)^T`; exact: `dZ_ij = u_i phi'(Z_ij)
/// ds_j`.
fn scores_backward(m: &LinearInfsa, trace: &Trace, step: &Step, ds: &[f64], dz: &mut Matrix) -> Vec<f64> {
    let (z, u, act) = (&trace.z, &step.u, m.activation);
    match m.operator {
        PowerOperator::Factored => {
            let logit = |j: usize| (0..u.len()).map(|i| u[i] * z.at(i, j)).sum::<f64>();
            let dlogit: Vec<f64> = (0..ds.len()).map(|j| act.derivative(logit(j)) * ds[j]).collect();
            *dz = dz.map(|i, j, x| x + u[i] * dlogit[j]);
            (0..u.len()).map(|i| inner(z.row(i), &dlogit)).collect()
        }
        PowerOperator::Exact => {
            *dz = dz.map(|i, j, x| x + u[i] * act.derivative(z.at(i, j)) * ds[j]);
            (0..u.len()).map(|i| z.row(i).iter().zip(ds).map(|(&z, ds)| act.value(z) * ds).sum()).collect()
        }
    }
}

/// `(dq, dk)` from `dalpha` and `dZ`, with `d|x| = x / |x|` and 0 at `x = 0`.
fn tensors_backward(head: &Head, m: &LinearInfsa, trace: &Trace, dalpha: &[f64], dz: &Matrix) -> (Matrix, Matrix) {
    let (mut dq, mut dk) = head.logits_backward(m.scale, dz);
    let factor = head.scale(m.scale) * m.norm_bias.value(head.q.cols);
    let mean = inner(&trace.alpha, dalpha);
    for (i, dalpha) in dalpha.iter().enumerate() {
        let through_alpha = ratio(dalpha - mean, trace.alpha_sum);
        let de = through_alpha + factor * inner(dz.row(i), &trace.e.1);
        add_norm_gradient(de, head.q.row(i), trace.e.0[i], dq.row_mut(i));
    }
    for j in 0..dk.rows {
        let de: f64 = (0..dz.rows).map(|i| dz.at(i, j) * trace.e.0[i]).sum();
        add_norm_gradient(factor * de, head.k.row(j), trace.e.1[j], dk.row_mut(j));
    }
    (dq, dk)
}

/// `dx += de x / |x|`.
fn add_norm_gradient(de: f64, x: &[f64], norm: f64, dx: &mut [f64]) {
    dx.iter_mut().zip(x).for_each(|(dx, x)| *dx += ratio(de * x, norm));
}
