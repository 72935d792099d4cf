//! Query and key maps that stay orthogonal all through training. "Fractional neural attention for efficient multiscale
//! sequence processing", Assumption 1 and A.3.

use burn::{
    module::{Initializer, Module, Param},
    tensor::{Device, ElementConversion, Tensor},
};

/// One orthogonal matrix, `W = B exp(X - X^T)`, with `B` fixed and `X` strictly lower triangular.
///
/// Every `X` gives an orthogonal `W`, and every `W` of the determinant of `B` has an `X`: no step of any optimiser leaves the
/// group, and nothing has to be projected back.
#[derive(Module, Debug)]
pub struct OrthogonalMap {
    /// `B`, `[d, d]`; not trained.
    pub base: Param<Tensor<2>>,
    /// `X`, `[d, d]`; what is not below its diagonal has no effect. Starts at 0.
    pub angles: Param<Tensor<2>>,
}

impl OrthogonalMap {
    fn init(width: usize, device: &Device) -> Self {
        let base = Initializer::Orthogonal { gain: 1.0 }.init([width, width], device);
        Self { base: base.no_grad(), angles: Initializer::Zeros.init([width, width], device) }
    }

    /// `W`, `[d, d]`.
    pub fn matrix(&self) -> Tensor<2> {
        let lower = self.angles.val().tril(-1);
        self.base.val().matmul(exponential(lower.clone() - lower.transpose()))
    }
}

/// The maps of one layer. Heads are column blocks of a map: each block has orthonormal columns, so that together the heads keep
/// every distance between tokens.
#[derive(Module, Debug)]
pub struct OrthogonalMaps {
    /// Of the queries; `None` where it is the identity.
    pub query: Option<OrthogonalMap>,
    /// Of the keys; `None` where tied, or the identity.
    pub key: Option<OrthogonalMap>,
    /// Channels of a token.
    pub width: usize,
    /// Whether the keys are the queries.
    pub tied: bool,
}

impl OrthogonalMaps {
    /// A single head needs no query map: distances are those of the rotated keys, and of the tokens themselves when tied.
    pub(super) fn init(width: usize, heads: usize, tied: bool, device: &Device) -> Self {
        let map = |wanted: bool| wanted.then(|| OrthogonalMap::init(width, device));
        Self { query: map(heads > 1), key: map(!tied), width, tied }
    }

    /// The maps side by side, `[d, d]` when tied, else `[d, 2 d]`.
    pub(super) fn weights(&self, device: &Device) -> Tensor<2> {
        let matrix = |map: &Option<OrthogonalMap>| match map {
            Some(map) => map.matrix(),
            None => Tensor::eye(self.width, device),
        };
        if self.tied { matrix(&self.query) } else { Tensor::cat(vec![matrix(&self.query), matrix(&self.key)], 1) }
    }
}

/// Terms of the series for the exponential: at a norm of 1/2 the next is below 1e-11.
const TERMS: usize = 10;

/// `exp(a)`, by halving `a` until its norm is at most 1/2, a Taylor series, and squaring back: products alone.
fn exponential(a: Tensor<2>) -> Tensor<2> {
    let [width, _] = a.dims();
    let norm: f32 = a.clone().detach().abs().sum_dim(1).max().into_scalar::<f32>().elem();
    let halvings = if norm > 0.5 { (2.0 * norm).log2().ceil() as i32 } else { 0 };
    let (a, one) = (a.clone() * 0.5_f64.powi(halvings), Tensor::eye(width, &a.device()));
    let series = (1..=TERMS).rev().fold(one.clone(), |sum, n| one.clone() + (a.clone() / n as f64).matmul(sum));
    (0..halvings).fold(series, |power, _| power.clone().matmul(power))
}
