//! The parameters of every preset, with their defaults, ranges and sources.

use derive_setters::Setters;
use serde::{Deserialize, Serialize};

/// The function that turns a logit into an affinity. "Infinite Self-Attention", eq. 11 and table 4.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// `max(x, 0)`; derivative 0 at 0.
    #[default]
    Relu,
    /// `|x|`; derivative 0 at 0.
    Abs,
    /// `x Phi(x)`, the exact erf form; signed and not homogeneous, so that `scale` matters.
    Gelu,
}

/// How one power step of [`LinearInfsa`] is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PowerOperator {
    /// Activation after the product with the weights: O(N d) per step. The paper's.
    #[default]
    Factored,
    /// Activation inside: a true power step with `phi(scale Q K^T)^T`; O(N^2 d) time, O(N) memory.
    Exact,
}

/// The weight of the rank-one positivity term of [`LinearInfsa`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormBias {
    /// 0, or a number in [1e-12, 1e3].
    Value(f64),
    /// `E|t|`, `t` the cosine of two random directions: `Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))`; JSON `"auto"`.
    Auto,
}

/// Softmax attention, the baseline. A call in which `scale |q|.|k|` could pass 2^34 is refused: its sums of rows have five digits
/// there, and fewer beyond.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Softmax {
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
    /// Query `i` sees keys `j <= i + seq_kv - seq_q`. Default false.
    pub causal: bool,
    /// The keys are the queries. Default false.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
}

/// The mean of the allowed values: the control that every comparison carries. `q` and `k` give sizes only.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Uniform {
    /// A running mean. Default false.
    pub causal: bool,
}

/// Pure InfSA: activated affinities over their Frobenius norm. "Infinite Self-Attention", eq. 11 and 12.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Infsa {
    /// Decay. Default 0.7, in [1e-12, 1]. Eq. 6.
    pub gamma: f64,
    /// Logit to affinity. Default relu. Eq. 11, table 4.
    pub activation: Activation,
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
    /// Added to the norm. Default 1e-6; 0 or in [1e-30, 1e30]. Section 3.6.
    pub eps: f64,
    /// The keys are the queries. Default false. Section 3.4.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
    /// Row `i` sees keys `j <= i` and is divided by the norm of the leading block (prefix norm). Default false.
    pub causal: bool,
}

impl Default for Infsa {
    fn default() -> Self {
        Self { gamma: 0.7, activation: Activation::Relu, scale: None, eps: 1e-6, tied: false, causal: false }
    }
}

/// All hops of [`Infsa`] at once, `((I - gamma A)^-1 - I) V`: the limit that "Infinite Self-Attention" (eq. 7, 10, 15)
/// takes as its template, solved matrix-free.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct InfsaResolvent {
    /// Decay per hop. Default 0.7, in [1e-12, 0.99999].
    pub gamma: f64,
    /// Logit to affinity. Default relu.
    pub activation: Activation,
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
    /// Added to the norm. Default 1e-6; 0 or in [1e-30, 1e30].
    pub eps: f64,
    /// The keys are the queries; the solver is then conjugate gradients. Default false.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
    /// Must be false: the operator is square and global.
    pub causal: bool,
    /// Relative error bound at which the solver stops. Default 1e-6, in (0, 1).
    pub tol: f64,
    /// Iterations allowed. Default null = the worst case of the guaranteed bound; 1 to 1000000.
    pub max_iter: Option<usize>,
}

impl Default for InfsaResolvent {
    fn default() -> Self {
        let Infsa { gamma, activation, scale, eps, tied, causal } = Infsa::default();
        Self { gamma, activation, scale, eps, tied, causal, tol: 1e-6, max_iter: None }
    }
}

impl InfsaResolvent {
    /// Iterations after which the Neumann series is within `tol` whatever the input:
    /// `ceil(ln(tol (1 - gamma)) / ln gamma)`.
    pub fn worst_case_iterations(gamma: f64, tol: f64) -> usize {
        ((tol * (1.0 - gamma)).ln() / gamma.ln()).ceil().max(1.0) as usize
    }

    /// The single hop that the series repeats.
    pub fn hop(&self) -> Infsa {
        let Self { gamma, activation, scale, eps, tied, .. } = *self;
        Infsa { gamma, activation, scale, eps, tied, causal: false }
    }
}

/// Linear InfSA: one weight per token, one pooled value per head, broadcast. "Infinite Self-Attention", eq. 16 to 21.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct LinearInfsa {
    /// Factor on the pooled value. Default 0.7, in [1e-12, 1]. Eq. 21.
    pub gamma: f64,
    /// Logit to score. Default relu.
    pub activation: Activation,
    /// Multiplies `q.k`. Default null = `head_dim^-0.5`; in [1e-18, 1e18].
    pub scale: Option<f64>,
    /// Added to both sums that are divided by. Default 1e-6; 0 or in [1e-30, 1e30].
    pub eps: f64,
    /// The keys are the queries. Default false (the module's default is true). Section 3.4.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
    /// Must be false: every position would need all scores anew.
    pub causal: bool,
    /// Power steps. Default 1 (the paper's), 1 to 64; more than 1 needs queries and keys over one token set.
    pub iterations: usize,
    /// How a step is taken. Default factored.
    pub operator: PowerOperator,
    /// Weight of the rank-one term `|q_i| |k_j|` added to `q_i.k_j`. Default 0; else in [1e-12, 1e3] or `"auto"`.
    pub norm_bias: NormBias,
    /// Give every query the pooled value; false returns it once, `[batch, heads, 1, value_dim]`. Default true.
    pub broadcast: bool,
}

impl Default for LinearInfsa {
    fn default() -> Self {
        let Infsa { gamma, activation, scale, eps, tied, causal } = Infsa::default();
        let (operator, norm_bias) = (PowerOperator::Factored, NormBias::Value(0.0));
        Self { gamma, activation, scale, eps, tied, causal, iterations: 1, operator, norm_bias, broadcast: true }
    }
}

impl NormBias {
    /// The number, for `head_dim` channels.
    pub fn value(&self, head_dim: usize) -> f64 {
        match *self {
            NormBias::Value(x) => x,
            // E|t| obeys r(d) r(d+1) = 2 / (pi d) with r(1) = 1: exact and without a gamma function.
            NormBias::Auto => (1..head_dim).fold(1.0, |r, d| 2.0 / (std::f64::consts::PI * d as f64) / r),
        }
    }
}

pub(super) fn is_false(x: &bool) -> bool {
    !x
}
