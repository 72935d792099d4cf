//! Fractional neural attention. "Fractional neural attention for efficient multiscale sequence processing", eq. 9, 10 and
//! 13 (the kernels), 38 and A.1 (the sphere), 40 to 42 (the density exponent).

use std::f64::consts::{FRAC_PI_2, PI};

use super::{
    HeadForward, HeadGradients,
    head::{Head, row_norms},
    matrix::{Matrix, inner, ratio},
    softmax::normalise,
};
use crate::{
    Parameter,
    mechanism::{DistanceKernel, Fna, Manifold},
};

/// Rows on the sphere that are no longer than this are zero.
const NO_LENGTH: f64 = 1e-12;

/// The kernel of one head, as a function of the distance `r`.
struct Kernel {
    kappa: f64,
    /// `d_M + alpha`.
    power: f64,
    student: bool,
    gaussian: bool,
}

impl Kernel {
    fn of(head: &Head, m: &Fna) -> Self {
        let resolved = m.resolve(head.q.cols, head.heads);
        let alpha = head.given(Parameter::Alpha).unwrap_or(m.alpha);
        Self {
            kappa: head.given(Parameter::Kappa).unwrap_or(resolved.kappa),
            power: resolved.intrinsic_dim + alpha,
            student: m.kernel == DistanceKernel::Student,
            gaussian: m.is_gaussian(),
        }
    }

    /// The logarithm `s` of the affinity.
    fn value(&self, r: f64) -> f64 {
        let z = r / self.kappa;
        match self {
            Self { student: true, .. } => -0.5 * self.power * (z * z).ln_1p(),
            Self { gaussian: true, .. } => -z * z,
            _ => -self.power * z.ln_1p(),
        }
    }

    /// `ds/dr`.
    fn slope(&self, r: f64) -> f64 {
        match self {
            Self { student: true, .. } => -self.power * r / (self.kappa * self.kappa + r * r),
            Self { gaussian: true, .. } => -2.0 * r / (self.kappa * self.kappa),
            _ => -self.power / (self.kappa + r),
        }
    }

    /// `ds/dalpha`; the Gaussian has none.
    fn by_alpha(&self, r: f64) -> f64 {
        if self.gaussian { 0.0 } else { self.value(r) / self.power }
    }

    /// `ds/dkappa`: `s` depends on `r / kappa` alone.
    fn by_kappa(&self, r: f64) -> f64 {
        -self.slope(r) * r / self.kappa
    }
}

/// What the gradients need of the forward pass.
struct Pass {
    r: Matrix,
    /// Weights before the density is divided out, and the logarithms of their rows' sums.
    plain: Matrix,
    lse0: Vec<f64>,
    weights: Matrix,
    lse: Vec<f64>,
}

impl Pass {
    fn of(head: &Head, m: &Fna) -> Self {
        let kernel = Kernel::of(head, m);
        let r = distances(head, m.manifold);
        let s = r.map(|_, _, r| kernel.value(r));
        let (plain, lse0) = normalise(head, &s);
        if m.norm_exponent == 0.0 {
            return Self { r, weights: plain.clone(), lse: lse0.clone(), plain, lse0 };
        }
        // A token without keys has no degree to divide by.
        let degree = |j: usize| if lse0[j].is_finite() { lse0[j] } else { 0.0 };
        let (weights, lse) = normalise(head, &s.map(|_, j, s| s - m.norm_exponent * degree(j)));
        Self { r, plain, lse0, weights, lse }
    }
}

fn distances(head: &Head, manifold: Manifold) -> Matrix {
    let (q, k) = match manifold {
        Manifold::Euclidean => (head.q.clone(), head.k.clone()),
        Manifold::Sphere => (units(&head.q), units(&head.k)),
    };
    let length = |i: usize, j: usize, sign: f64| {
        q.row(i).iter().zip(k.row(j)).map(|(q, k)| (q + sign * k).powi(2)).sum::<f64>().sqrt()
    };
    let is_zero = |row: &[f64]| row.iter().all(|&x| x == 0.0);
    Matrix::from_fn(q.rows, k.rows, |i, j| match manifold {
        Manifold::Euclidean => length(i, j, -1.0),
        Manifold::Sphere if is_zero(q.row(i)) || is_zero(k.row(j)) => FRAC_PI_2,
        Manifold::Sphere => 2.0 * length(i, j, -1.0).atan2(length(i, j, 1.0)),
    })
}

/// The rows at length one.
fn units(x: &Matrix) -> Matrix {
    let norms = row_norms(x);
    x.map(|i, _, x| if norms[i] > NO_LENGTH { x / norms[i] } else { 0.0 })
}

/// `P_ij = exp(s_ij - a lse0_j - lse_i)`.
pub(super) fn forward(head: &Head, m: &Fna) -> HeadForward {
    let Pass { weights, lse, lse0, .. } = Pass::of(head, m);
    let lse0 = (m.norm_exponent != 0.0).then_some(lse0);
    HeadForward { weights: head.thinned(&weights), lse: Some(lse), lse0, ..HeadForward::default() }
}

/// `dS_ij = P_ij (dP_ij - <dout_i, out_i>)`, to which `norm_exponent` adds what flows back through `lse0`; then through
/// the kernel to the distances, `alpha` and `kappa`, and from the distances to the tokens.
pub(super) fn backward(head: &Head, m: &Fna, dout: &Matrix) -> HeadGradients {
    let (pass, kernel) = (Pass::of(head, m), Kernel::of(head, m));
    let (p, r) = (&pass.weights, &pass.r);
    let dp = head.thinned(&dout.times_transposed(&head.v));
    let delta: Vec<f64> = (0..p.rows).map(|i| inner(p.row(i), dp.row(i))).collect();
    let mut ds = dp.map(|i, j, x| p.at(i, j) * (x - delta[i]));
    if m.norm_exponent != 0.0 {
        let columns = |j: usize| (0..ds.rows).map(|i| ds.at(i, j)).sum::<f64>();
        let dlse0: Vec<f64> = (0..ds.cols).map(|j| -m.norm_exponent * columns(j)).collect();
        ds = ds.map(|i, j, x| x + dlse0[i] * pass.plain.at(i, j));
    }
    let sum = |f: &dyn Fn(f64) -> f64| ds.map(|i, j, x| x * f(r.at(i, j))).data.iter().sum::<f64>();
    let mut parameters = vec![(Parameter::Kappa, vec![sum(&|r| kernel.by_kappa(r))])];
    if !kernel.gaussian {
        parameters.push((Parameter::Alpha, vec![sum(&|r| kernel.by_alpha(r))]));
    }
    let dr = ds.map(|i, j, x| x * kernel.slope(r.at(i, j)));
    let (dq, dk) = match m.manifold {
        Manifold::Euclidean => plane_backward(head, r, &dr),
        Manifold::Sphere => sphere_backward(head, r, &dr),
    };
    HeadGradients { dq, dk, parameters }
}

/// `dq_i = sum_j dr_ij (q_i - k_j) / r_ij`, 0 at `r = 0`: the smallest subgradient of the cone.
fn plane_backward(head: &Head, r: &Matrix, dr: &Matrix) -> (Matrix, Matrix) {
    let g = dr.map(|i, j, x| ratio(x, r.at(i, j)));
    let pull = |i: usize, j: usize, c: usize| g.at(i, j) * (head.q.at(i, c) - head.k.at(j, c));
    let dq = head.q.map(|i, c, _| (0..r.cols).map(|j| pull(i, j, c)).sum());
    let dk = head.k.map(|j, c, _| -(0..r.rows).map(|i| pull(i, j, c)).sum::<f64>());
    (dq, dk)
}

/// `du_i = -sum_j dr_ij / sin(r_ij) w_j`, 0 at both poles, and through `u = q / |q|`.
fn sphere_backward(head: &Head, r: &Matrix, dr: &Matrix) -> (Matrix, Matrix) {
    let inside = |r: f64| r > 0.0 && r < PI && r.sin() > 1e-14;
    let g = dr.map(|i, j, x| if inside(r.at(i, j)) { -x / r.at(i, j).sin() } else { 0.0 });
    let (u, w) = (units(&head.q), units(&head.k));
    (through_unit(&head.q, &g.times(&w)), through_unit(&head.k, &g.transpose().times(&u)))
}

/// `dx = (du - <du, u> u) / |x|`; 0 for a row without length.
fn through_unit(x: &Matrix, du: &Matrix) -> Matrix {
    let (u, norms) = (units(x), row_norms(x));
    let along: Vec<f64> = (0..x.rows).map(|i| inner(du.row(i), u.row(i))).collect();
    du.map(|i, c, du| if norms[i] > NO_LENGTH { (du - along[i] * u.at(i, c)) / norms[i] } else { 0.0 })
}
