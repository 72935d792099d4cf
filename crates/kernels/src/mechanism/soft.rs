//! SOFT and SOFT++: a Gaussian kernel through landmarks. "Softmax-free Linear Transformers".

use derive_setters::Setters;
use serde::{Deserialize, Serialize};

use super::{
    Inverse, InverseGradient, Landmarks, NewtonInit, PoolWindows,
    valid::{check, check_added, check_scale},
};
use crate::{Error, Parameter, Result, Shape};

/// What the degree of a landmark sums over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Degree {
    /// The landmarks: `D = diag(A 1)`, without the ridge. "Softmax-free Linear Transformers", eq. 17.
    #[default]
    Landmark,
    /// The tokens: `D = diag(P 1)`, which makes the operator an average at every length.
    Token,
}

/// `out = P^T Y P v` with `P` the Gaussian kernel between landmarks and tokens and `Y` the inverse of that among the
/// landmarks; `soft-pp` scales `Y` by the landmarks' degrees on both sides. Queries are keys, and rows do not sum to one.
/// "Softmax-free Linear Transformers", eq. 5 to 10 and 17.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters)]
#[serde(default, deny_unknown_fields)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Soft {
    /// Where the landmarks come from. Default `pool` with ratio 4. Section 3.2.
    pub landmarks: Landmarks,
    /// `[height, width]` of the tokens, row by row. Default null: a sequence.
    pub grid: Option<[usize; 2]>,
    /// Pass landmarks through a layer norm (inputs `landmark_norm_gamma`, `landmark_norm_beta`, each `[head_dim]`) and GELU,
    /// as the authors' code does. Default false.
    pub landmark_act: bool,
    /// Factor on the squared distance. Default null = `1 / (2 sqrt(head_dim))`; in [1e-18, 1e18]. Eq. 4.
    pub scale: Option<f64>,
    /// How the matrix between landmarks is inverted. Default newton-schulz; not cg. Eq. 10, algorithm 2.
    pub inverse: Inverse,
    /// Newton-Schulz steps, at most: an iterate that has converged stays. Default 20, 1 to 64. Algorithm 2.
    pub newton_iterations: usize,
    /// Where Newton-Schulz starts. Default scaled.
    pub newton_init: NewtonInit,
    /// Added to the diagonal of the matrix between landmarks. Default 0.01; 0 or in [1e-12, 1e12].
    pub ridge: f64,
    /// What is differentiated. Default implicit. Eq. 12.
    pub gradient: InverseGradient,
    /// `eigen` drops eigenvalues up to this share of the largest. Default 1e-6, in [0, 1).
    pub eigen_cutoff: f64,
    /// What degrees sum over: null in `soft`, which has none, default landmark in `soft-pp`. Eq. 17.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub degree: Option<Degree>,
    /// Side of the filter over the values' tokens that is added to the output (input `value_weight`, `[heads, side, side]`
    /// on a grid, else `[heads, side]`). Default 0: none; else odd, at most 1023.
    pub value_conv: usize,
    /// Must be false: every landmark mixes past and future.
    pub causal: bool,
}

impl Default for Soft {
    fn default() -> Self {
        Self {
            landmarks: Landmarks::Pool(PoolWindows::Ratio(4)),
            grid: None,
            landmark_act: false,
            scale: None,
            inverse: Inverse::NewtonSchulz,
            newton_iterations: 20,
            newton_init: NewtonInit::Scaled,
            ridge: 0.01,
            gradient: InverseGradient::Implicit,
            eigen_cutoff: 1e-6,
            degree: None,
            value_conv: 0,
            causal: false,
        }
    }
}

impl Soft {
    /// The defaults of `soft-pp`.
    pub fn plus() -> Self {
        Self { degree: Some(Degree::Landmark), ..Self::default() }
    }

    /// The same with degrees: over the landmarks, unless it says otherwise.
    pub(super) fn with_default_degree(self) -> Self {
        Self { degree: Some(self.degree.unwrap_or_default()), ..self }
    }

    /// The settings that the paper prints: no ridge, and a start at the edge of convergence.
    #[must_use]
    pub fn as_printed(self) -> Self {
        let (inverse, newton_init) = (Inverse::NewtonSchulz, NewtonInit::Paper);
        Self { inverse, newton_init, newton_iterations: 20, ridge: 0.0, ..self }
    }

    /// The settings of the authors' code, but for `value_conv`, which is 9, 5 and 3 in its three stages: filtered and
    /// activated landmarks in windows of `ratio`.
    #[must_use]
    pub fn official(self, ratio: usize) -> Self {
        let (inverse, newton_init) = (Inverse::NewtonSchulz, NewtonInit::Official);
        let landmarks = Landmarks::Conv { ratio };
        Self { inverse, newton_init, newton_iterations: 20, ridge: 0.01, landmarks, landmark_act: true, ..self }
    }

    /// What new models should use: an exact inverse with a ridge.
    #[must_use]
    pub fn robust(self) -> Self {
        Self { inverse: Inverse::Cholesky, ridge: 0.01, ..self }
    }

    /// The factor on the squared distance for `head_dim` channels.
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or(0.5 / (head_dim as f64).sqrt())
    }

    /// Every step doubles what rounding has put into directions without an eigenvalue; of products in f32, as other backends take
    /// them, some 24 are harmless.
    pub(super) fn caution(&self) -> Option<&'static str> {
        let newton = self.inverse == Inverse::NewtonSchulz && self.landmarks != Landmarks::All;
        (newton && self.ridge == 0.0 && self.newton_iterations > 24).then_some(
            "more than 24 Newton-Schulz steps without a ridge diverge where landmarks nearly coincide and steps are products in f32, as \
             on other backends than the CPU's kernels; set `ridge` to 0.01, or `inverse` to `cholesky`",
        )
    }

    pub(super) fn validate(&self, plus: bool) -> Result<()> {
        let degree = match self.degree {
            None => "null",
            Some(Degree::Landmark) => "landmark",
            Some(Degree::Token) => "token",
        };
        let expected = if plus { "landmark or token in `soft-pp`" } else { "absent from `soft`, which has no degrees" };
        check("degree", degree, self.degree.is_some() == plus, expected)?;
        check_landmarks(self.landmarks)?;
        let stride = matches!(self.landmarks, Landmarks::Stride { .. });
        check("landmarks.kind", "stride", !stride, "pool, conv, random, first, given or all")?;
        let plain = !self.landmark_act || self.landmarks != Landmarks::All;
        check("landmark_act", self.landmark_act, plain, "false with landmarks of kind all, which makes none")?;
        check_scale(self.scale)?;
        check("inverse", "cg", self.inverse != Inverse::Cg, "newton-schulz, cholesky or eigen")?;
        check_steps(self.newton_iterations)?;
        check_added("ridge", self.ridge, true)?;
        let start = self.inverse != Inverse::NewtonSchulz || self.newton_init != NewtonInit::Identity;
        let expected = "> 0 with newton_init = identity, whose null directions would grow without end";
        check("ridge", self.ridge, start || self.ridge > 0.0, expected)?;
        let unrolls = self.gradient == InverseGradient::Implicit || self.inverse == Inverse::NewtonSchulz;
        check("gradient", "unrolled", unrolls, "implicit unless inverse = newton-schulz")?;
        check("eigen_cutoff", self.eigen_cutoff, (0.0..1.0).contains(&self.eigen_cutoff), "in [0, 1)")?;
        let k = self.value_conv;
        check("value_conv", k, k == 0 || k % 2 == 1 && k < LARGEST_FILTER, "0, or odd and at most 1023")
    }

    pub(super) fn check_support(&self, id: &'static str, shape: &Shape, causal: bool) -> Result<()> {
        let unsupported = |what, why| Err(Error::Unsupported { mechanism: id, what, why });
        if causal {
            return unsupported("causal", "every landmark, and the inverse between them, mixes past and future");
        }
        if shape.seq_q != shape.seq_kv {
            return unsupported("cross-attention", "queries are keys here: it makes the kernel a Gram matrix");
        }
        self.check_landmarks_fit(shape)
    }

    /// Whether the tokens are enough for the landmarks.
    pub(super) fn check_landmarks_fit(&self, shape: &Shape) -> Result<()> {
        check_grid(self.grid, shape.seq_kv)?;
        check_windows(self.landmarks, self.grid, shape.seq_kv)?;
        let tokens = shape.seq_kv;
        match self.landmarks {
            Landmarks::Random { count, .. } | Landmarks::First { count } => {
                check("landmarks.count", count, count <= tokens, "at most the number of tokens")
            }
            Landmarks::Conv { ratio } => {
                let smallest = self.grid.map_or(tokens, |[height, width]| height.min(width));
                let expected =
                    "at most the number of tokens, and both sides of the grid: a filter needs a whole window";
                check("landmarks.ratio", ratio, ratio <= smallest, expected)
            }
            Landmarks::Given { count } => {
                let expected =
                    "the number of `given_landmarks`: that tensor is missing, or see `Mechanism::with_given_landmarks`";
                check("landmarks.count", "null", count.is_some(), expected)?;
                let (count, most) = (count.unwrap_or(0), tokens.max(MOST_GIVEN));
                check("landmarks.count", count, count <= most, "at most the number of tokens, or 1024 for fewer")
            }
            _ => Ok(()),
        }
    }

    pub(super) const fn parameters(&self) -> &'static [Parameter] {
        use Parameter::*;
        let filtered = self.value_conv > 0;
        let all: &[Parameter] = match (self.landmarks, self.landmark_act) {
            (Landmarks::Given { .. }, true) if filtered => {
                return &[Scale, LandmarkNormGamma, LandmarkNormBeta, ValueWeight, GivenLandmarks];
            }
            (Landmarks::Given { .. }, true) => return &[Scale, LandmarkNormGamma, LandmarkNormBeta, GivenLandmarks],
            (Landmarks::Given { .. }, false) if filtered => return &[Scale, ValueWeight, GivenLandmarks],
            (Landmarks::Given { .. }, false) => return &[Scale, GivenLandmarks],
            (Landmarks::Conv { .. }, true) => {
                &[Scale, LandmarkWeight, LandmarkNormGamma, LandmarkNormBeta, ValueWeight]
            }
            (Landmarks::Conv { .. }, false) => &[Scale, LandmarkWeight, ValueWeight],
            (_, true) => &[Scale, LandmarkNormGamma, LandmarkNormBeta, ValueWeight],
            (_, false) => &[Scale, ValueWeight],
        };
        if filtered { all } else { all.split_at(all.len() - 1).0 }
    }

    /// The axes of one of [`Soft::parameters`], and 1s beyond the last; how many there are.
    pub(super) fn parameter_axes(&self, parameter: Parameter, s: &Shape) -> ([usize; 4], usize) {
        let [d, heads] = [s.head_dim, s.heads];
        let grid = self.grid.is_some();
        match (parameter, self.landmarks) {
            (Parameter::LandmarkWeight, Landmarks::Conv { ratio }) if grid => ([d, d, ratio, ratio], 4),
            (Parameter::LandmarkWeight, Landmarks::Conv { ratio }) => ([d, d, ratio, 1], 3),
            (Parameter::GivenLandmarks, Landmarks::Given { count }) => ([s.batch, heads, count.unwrap_or(0), d], 4),
            (Parameter::LandmarkNormGamma | Parameter::LandmarkNormBeta, _) => ([d, 1, 1, 1], 1),
            (Parameter::ValueWeight, _) if grid => ([heads, self.value_conv, self.value_conv, 1], 3),
            (Parameter::ValueWeight, _) => ([heads, self.value_conv, 1, 1], 2),
            _ => ([heads, 1, 1, 1], 1),
        }
    }

    /// What one of [`Soft::parameters`] starts from: filters from the mean of the window, or, over the values, from none.
    pub(super) fn parameter_default(&self, parameter: Parameter, s: &Shape) -> Vec<f32> {
        let (shape, _) = self.parameter_axes(parameter, s);
        let len = shape.iter().product();
        match parameter {
            Parameter::Scale => vec![self.scale_for(s.head_dim) as f32; len],
            Parameter::LandmarkNormGamma => vec![1.0; len],
            Parameter::LandmarkWeight => {
                let window: usize = shape[2..].iter().product();
                let same = |n: usize| n / window / s.head_dim == n / window % s.head_dim;
                (0..len).map(|n| if same(n) { 1.0 / window as f32 } else { 0.0 }).collect()
            }
            _ => vec![0.0; len],
        }
    }
}

/// Sides of windows beyond this are a mistake, and their squares might not fit a number.
const LARGEST_RATIO: usize = 1 << 16;
/// Numbers of windows beyond this are a mistake: the matrix between so many landmarks takes 16 GiB.
const MOST_WINDOWS: usize = 1 << 16;
/// Filters over the values are narrower than this.
const LARGEST_FILTER: usize = 1 << 10;
/// So many landmarks may be given for few tokens too.
const MOST_GIVEN: usize = 1 << 10;

pub(super) fn check_landmarks(landmarks: Landmarks) -> Result<()> {
    match landmarks {
        Landmarks::Pool(PoolWindows::Ratio(ratio)) | Landmarks::Conv { ratio } | Landmarks::Stride { ratio } => {
            check("landmarks.ratio", ratio, (1..=LARGEST_RATIO).contains(&ratio), "1 to 65536")
        }
        Landmarks::Pool(PoolWindows::Count(count)) => {
            check("landmarks.count", count, (1..=MOST_WINDOWS).contains(&count), "1 to 65536")
        }
        Landmarks::Random { count, .. } | Landmarks::First { count } => {
            check("landmarks.count", count, count >= 1, "at least 1")
        }
        Landmarks::Given { count } => check("landmarks.count", 0, count != Some(0), "at least 1"),
        Landmarks::All => Ok(()),
    }
}

pub(super) fn check_grid(grid: Option<[usize; 2]>, tokens: usize) -> Result<()> {
    let Some([height, width]) = grid else { return Ok(()) };
    let fits = height.checked_mul(width) == Some(tokens);
    let expected = "[height, width] with height * width = the number of key tokens, or null for a sequence";
    check("grid", format_args!("[{height}, {width}] for {tokens} tokens"), fits, expected)
}

/// Whether a grid has room for as many windows as are asked for.
pub(super) fn check_windows(landmarks: Landmarks, grid: Option<[usize; 2]>, tokens: usize) -> Result<()> {
    let (Landmarks::Pool(PoolWindows::Count(count)), Some([height, width])) = (landmarks, grid) else { return Ok(()) };
    let fits = landmarks.windows(tokens, grid, true).is_some();
    let expected = "rows * columns of windows, no more of them than the grid has of tokens (4 x 4 windows are 16), or at least \
                    the number of tokens";
    check("landmarks.count", format_args!("{count} on a grid of [{height}, {width}]"), fits, expected)
}

pub(super) fn check_steps(steps: usize) -> Result<()> {
    check("newton_iterations", steps, (1..=64).contains(&steps), "1 to 64")
}
