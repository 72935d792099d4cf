//! Pure InfSA and its resolvent. "Infinite Self-Attention", eq. 11, 12 (one hop) and 7, 10, 15 (all hops).

use super::{
    HeadForward, HeadGradients,
    head::Head,
    matrix::{Matrix, inner, ratio},
};
use crate::{
    Parameter,
    mechanism::{Activation, Infsa},
};

/// The affinity of one head, `A = phi(scale Q K^T)` on the allowed pairs, and its norms.
struct Affinity {
    logits: Matrix,
    a: Matrix,
    /// Frobenius norm that divides row `i`: of all of `A`, or, causal, of its rows up to `i` (the prefix norm).
    norm: Vec<f64>,
    /// `norm + eps`.
    f: Vec<f64>,
}

impl Affinity {
    fn of(head: &Head, m: &Infsa) -> Self {
        let logits = head.logits(m.scale);
        let a = logits.map(|i, j, x| if head.allowed(i, j) { m.activation.value(x) } else { 0.0 });
        let mut energy: Vec<f64> = (0..a.rows).map(|i| inner(a.row(i), a.row(i))).collect();
        if head.causal {
            (1..energy.len()).for_each(|i| energy[i] += energy[i - 1]);
        } else {
            let total = energy.iter().sum();
            energy.fill(total);
        }
        let norm: Vec<f64> = energy.into_iter().map(f64::sqrt).collect();
        let f = norm.iter().map(|x| x + m.eps).collect();
        Self { logits, a, norm, f }
    }

    /// `M = gamma A / f`.
    fn hop(&self, gamma: f64) -> Matrix {
        self.a.map(|i, _, x| gamma * ratio(x, self.f[i]))
    }

    /// The norm once, or per row when causal.
    fn frob(&self, causal: bool) -> Vec<f64> {
        if causal { self.norm.clone() } else { self.norm[..1].to_vec() }
    }
}

/// `out = gamma A / (|A|_F + eps) V`.
pub(super) fn forward(head: &Head, m: &Infsa) -> HeadForward {
    let affinity = Affinity::of(head, m);
    let frob = Some(affinity.frob(head.causal));
    HeadForward { weights: affinity.hop(head.gamma), frob, ..HeadForward::default() }
}

/// `out = ((I - M)^-1 - I) V`, `M` the matrix of [`forward`].
pub(super) fn resolvent_forward(head: &Head, m: &Infsa) -> HeadForward {
    let affinity = Affinity::of(head, m);
    let hop = affinity.hop(head.gamma);
    let inverse = hop.map(|i, j, x| if i == j { 1.0 - x } else { -x }).inverse();
    // (I - M)^-1 M rather than (I - M)^-1 - I, which would cancel where M is small. A path starts at a kept query and ends
    // at a kept key: elsewhere the series is zero, and so that no rounding of the elimination remains there, it is
    // written as zero.
    let weights = inverse.times(&hop).map(|i, j, x| if head.allowed(i, j) { x } else { 0.0 });
    HeadForward { weights, frob: Some(affinity.frob(false)), ..HeadForward::default() }
}

/// The gradients of the one hop: those of `M` with `dM = dout V^T`.
pub(super) fn backward(head: &Head, m: &Infsa, dout: &Matrix) -> HeadGradients {
    hop_backward(head, m, &dout.times_transposed(&head.v))
}

/// The gradients of the series: those of `M` with `dM = (I - M^T)^-1 dout ((I - M)^-1 V)^T`.
pub(super) fn resolvent_backward(head: &Head, m: &Infsa, saved: &HeadForward, dout: &Matrix) -> HeadGradients {
    let adjoint = dout.plus(&saved.weights.transpose().times(dout));
    let solution = head.v.plus(&saved.weights.times(&head.v));
    hop_backward(head, m, &adjoint.times_transposed(&solution))
}

/// The gradients of `<dM, M>`, `M = gamma A / f`: with `c_i = sum_j dM_ij M_ij` and `t = c / (f F)`, summed over the
/// rows that share a norm,
///
/// ```text
/// dA = gamma / f dM - t A,   dL = phi'(L) dA,   dQ = scale dL K,   dK = scale dL^T Q,   dgamma = sum_i c_i / gamma
/// ```
fn hop_backward(head: &Head, m: &Infsa, dhop: &Matrix) -> HeadGradients {
    let affinity = Affinity::of(head, m);
    let Affinity { logits, a, norm, f } = &affinity;
    let hop = affinity.hop(head.gamma);
    let c: Vec<f64> = (0..a.rows).map(|i| inner(dhop.row(i), hop.row(i))).collect();
    let mut t: Vec<f64> = (0..a.rows).map(|i| ratio(c[i], f[i] * norm[i])).collect();
    if head.causal {
        (1..t.len()).rev().for_each(|i| t[i - 1] += t[i]); // row r enters the norms of all rows i >= r
    } else {
        let total = t.iter().sum();
        t.fill(total);
    }
    let dlogit = |i: usize, j: usize, x: f64| {
        let da = head.gamma * ratio(dhop.at(i, j), f[i]) - t[i] * a.at(i, j);
        if head.allowed(i, j) { m.activation.derivative(x) * da } else { 0.0 }
    };
    let (dq, dk) = head.logits_backward(m.scale, &logits.map(dlogit));
    let dgamma = c.iter().sum::<f64>() / head.gamma;
    HeadGradients { dq, dk, parameters: vec![(Parameter::Gamma, vec![dgamma])] }
}

impl Activation {
    /// `phi(x)` in f64.
    pub(super) fn value(self, x: f64) -> f64 {
        match self {
            Self::Relu => x.max(0.0),
            Self::Abs => x.abs(),
            Self::Gelu => x * normal_cdf(x),
        }
    }

    /// `phi'(x)` in f64; 0 at a kink.
    pub(super) fn derivative(self, x: f64) -> f64 {
        match self {
            Self::Relu => f64::from(u8::from(x > 0.0)),
            Self::Abs if x == 0.0 => 0.0,
            Self::Abs => x.signum(),
            Self::Gelu => normal_cdf(x) + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt(),
        }
    }
}

/// The standard normal distribution function.
fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}
