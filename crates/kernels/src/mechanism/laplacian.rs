//! LaplacianFormer: a whitened Laplacian kernel, whole or through landmarks. "LaplacianFormer: Rethinking Linear Attention
//! with Laplacian Kernel".

use derive_setters::Setters;
use serde::{Deserialize, Serialize};

use super::{
    Inverse, Landmarks, PoolWindows,
    presets::is_false,
    soft::{check_grid, check_landmarks, check_steps, check_windows},
    valid::{check, check_added, check_lambda},
};
use crate::{Error, Parameter, Result, Shape};

/// The mean that is taken off the similarities.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Centering {
    /// Over the keys of each query. "LaplacianFormer", eq. 4.
    PerQuery,
    /// Over the queries of each key. Eq. 5.
    #[default]
    PerKey,
    /// None.
    None,
}

/// What the centred similarities are divided by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Whitening {
    /// The standard deviation of each key's column. "LaplacianFormer", eq. 6.
    #[default]
    Diagonal,
    /// The square root of the covariance of the keys' columns. For analysis: `laplacian-exact`, at most 1024 keys. Eq. 5.
    Full,
    /// Nothing.
    None,
}

/// The factor on the whitened weights, from the number `n` of keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightScale {
    /// 1, as the paper has it: outputs grow with `n`.
    #[default]
    Unit,
    /// `n^-1/2`.
    InvSqrtN,
    /// `1 / n`: outputs keep their size whatever the resolution.
    InvN,
}

impl WeightScale {
    /// The factor for `n` keys.
    pub fn value(self, n: usize) -> f64 {
        match self {
            WeightScale::Unit => 1.0,
            WeightScale::InvSqrtN => (n as f64).powf(-0.5),
            WeightScale::InvN => 1.0 / n as f64,
        }
    }
}

/// Similarities `exp(-|q - k|_1 / lambda)`, centred, whitened and shifted by `1 / n`, every pair of them.
/// "LaplacianFormer", eq. 3 to 6.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct LaplacianExact {
    /// Bandwidth. Default 4, in [1e-18, 1e18]. Section 4.1.
    pub lambda: f64,
    /// The mean that is taken off. Default per-key.
    pub centering: Centering,
    /// What is divided by. Default diagonal.
    pub whitening: Whitening,
    /// Added to variances. Default 1e-5, in [1e-12, 1e12]; also 0 if whitening is none. Eq. 6.
    pub whiten_eps: f64,
    /// Factor on the weights. Default unit.
    pub weight_scale: WeightScale,
    /// Add `1 / n` to every weight. Default true. Eq. 4.
    pub bias_one_over_n: bool,
    /// Needs whitening none and centering per-query or none. Default false.
    pub causal: bool,
    /// The keys are the queries. Default false.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
}

impl Default for LaplacianExact {
    fn default() -> Self {
        Self {
            lambda: 4.0,
            centering: Centering::PerKey,
            whitening: Whitening::Diagonal,
            whiten_eps: 1e-5,
            weight_scale: WeightScale::Unit,
            bias_one_over_n: true,
            causal: false,
            tied: false,
        }
    }
}

/// [`LaplacianExact`] with its similarities `Cq (k(L, L) + ridge)^-1 Ck^T`, through landmarks `L` among the keys. A fixed
/// number of them takes linear time. "LaplacianFormer", eq. 7 to 10 and algorithm 2.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Laplacian {
    /// Bandwidth. Default 4, in [1e-18, 1e18]. Section 4.1.
    pub lambda: f64,
    /// Where the landmarks come from: pool (default, ratio 8), conv or stride. Section 4.2.
    pub landmarks: Landmarks,
    /// `[height, width]` of the key tokens, row by row. Default null: a sequence.
    pub grid: Option<[usize; 2]>,
    /// How the matrix between landmarks is inverted. Default newton-schulz; not eigen. Algorithm 2, table 3.
    pub inverse: Inverse,
    /// Newton-Schulz steps, at most: an iterate that has converged stays. Default 20, 1 to 64.
    pub newton_iterations: usize,
    /// Added to the diagonal of the matrix between landmarks. Default 1e-3; 0 or in [1e-12, 1e12].
    pub ridge: f64,
    /// The mean that is taken off. Default per-key.
    pub centering: Centering,
    /// What is divided by. Default diagonal; not full.
    pub whitening: Whitening,
    /// Added to variances. Default 1e-5, in [1e-12, 1e12]; also 0 if whitening is none. Eq. 6.
    pub whiten_eps: f64,
    /// Factor on the weights. Default unit.
    pub weight_scale: WeightScale,
    /// Add `1 / n` to every weight. Default true. Eq. 4.
    pub bias_one_over_n: bool,
    /// Must be false: landmarks and statistics see the future.
    pub causal: bool,
    /// The keys are the queries. Default false.
    #[serde(skip_serializing_if = "is_false")]
    pub tied: bool,
}

impl Default for Laplacian {
    fn default() -> Self {
        let exact = LaplacianExact::default();
        Self {
            lambda: exact.lambda,
            landmarks: Landmarks::Pool(PoolWindows::Ratio(8)),
            grid: None,
            inverse: Inverse::NewtonSchulz,
            newton_iterations: 20,
            ridge: 1e-3,
            centering: exact.centering,
            whitening: exact.whitening,
            whiten_eps: exact.whiten_eps,
            weight_scale: exact.weight_scale,
            bias_one_over_n: exact.bias_one_over_n,
            causal: exact.causal,
            tied: exact.tied,
        }
    }
}

impl Laplacian {
    /// The mechanism that is approximated.
    pub fn exact(&self) -> LaplacianExact {
        let Self { lambda, centering, whitening, whiten_eps, weight_scale, bias_one_over_n, causal, tied, .. } = *self;
        LaplacianExact { lambda, centering, whitening, whiten_eps, weight_scale, bias_one_over_n, causal, tied }
    }

    pub(super) fn validate(&self) -> Result<()> {
        self.exact().validate()?;
        check_landmarks(self.landmarks)?;
        let windows = matches!(self.landmarks, Landmarks::Pool(_) | Landmarks::Conv { .. } | Landmarks::Stride { .. });
        check("landmarks.kind", self.landmarks.kind(), windows, "pool, conv or stride")?;
        check("inverse", "eigen", self.inverse != Inverse::Eigen, "newton-schulz, cholesky or cg")?;
        check_steps(self.newton_iterations)?;
        check_added("ridge", self.ridge, true)?;
        let full = self.whitening == Whitening::Full;
        check("whitening", "full", !full, "diagonal or none; only `laplacian-exact` has full")
    }

    pub(super) fn check_support(&self, shape: &Shape, causal: bool) -> Result<()> {
        if causal {
            let why = "landmarks and column statistics see the future; use `laplacian-exact` without whitening";
            return Err(Error::Unsupported { mechanism: "laplacian", what: "causal", why });
        }
        check_grid(self.grid, shape.seq_kv)?;
        check_windows(self.landmarks, self.grid, shape.seq_kv)
    }

    pub(super) const fn parameters(&self) -> &'static [Parameter] {
        match self.landmarks {
            Landmarks::Conv { .. } => &[Parameter::Lambda, Parameter::LandmarkWeight],
            _ => &[Parameter::Lambda],
        }
    }

    /// The axes of one of [`Laplacian::parameters`], and 1s beyond the last; how many there are.
    pub(super) fn parameter_axes(&self, parameter: Parameter, s: &Shape) -> ([usize; 4], usize) {
        match (parameter, self.landmarks) {
            (Parameter::LandmarkWeight, Landmarks::Conv { ratio }) => {
                ([s.head_dim, if self.grid.is_some() { ratio * ratio } else { ratio }, 1, 1], 2)
            }
            _ => ([s.heads, 1, 1, 1], 1),
        }
    }

    /// What one of [`Laplacian::parameters`] starts from: filters from the mean of the window.
    pub(super) fn parameter_default(&self, parameter: Parameter, s: &Shape) -> Vec<f32> {
        let (shape, _) = self.parameter_axes(parameter, s);
        let len = shape.iter().product();
        match parameter {
            Parameter::LandmarkWeight => vec![1.0 / shape[1] as f32; len],
            _ => vec![self.lambda as f32; len],
        }
    }
}

impl LaplacianExact {
    /// The most keys that [`Whitening::Full`] takes.
    pub const FULL_LIMIT: usize = 1024;

    pub(super) fn validate(&self) -> Result<()> {
        check_lambda(self.lambda)?;
        check_added("whiten_eps", self.whiten_eps, self.whitening == Whitening::None)
    }

    pub(super) fn check_support(&self, shape: &Shape, causal: bool) -> Result<()> {
        let unsupported = |what, why| Err(Error::Unsupported { mechanism: "laplacian-exact", what, why });
        if causal && (self.whitening != Whitening::None || self.centering == Centering::PerKey) {
            return unsupported(
                "causal with whitening or centering per-key",
                "column statistics see the future; set whitening to none and centering to per-query or none",
            );
        }
        if causal && shape.seq_q > shape.seq_kv {
            return unsupported("causal with seq_q > seq_kv", "the first queries would see no key");
        }
        if self.whitening == Whitening::Full && shape.seq_kv > Self::FULL_LIMIT {
            return unsupported(
                "whitening full beyond 1024 keys",
                "it stores and decomposes a matrix of all keys by all keys; use diagonal",
            );
        }
        Ok(())
    }
}
