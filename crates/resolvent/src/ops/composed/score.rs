//! Scores: the affinity of every pair of rows.

use burn::tensor::{Bool, Tensor, activation};
use resolvent_kernels::{Error, Parameter, Result, inner};

use super::{
    super::{Extras, gelu::composed_gelu},
    Call,
    distance::{self, unit},
    magnitude,
};
use crate::{
    Shape,
    mechanism::{Manifold, Score},
};

/// A score with the parameters of every head, `[1, heads or 1, 1, 1]`.
pub(super) struct Affinity<'a> {
    score: &'a Score,
    scale: Tensor<4>,
    offset: Tensor<4>,
    /// Intrinsic dimension and order.
    power: Tensor<4>,
    kappa: Tensor<4>,
    lambda: Tensor<4>,
    /// The largest magnitudes of queries and keys, by which linear scores divide them: no product of `|q|` and `|k|` overflows.
    largest: [Tensor<4>; 2],
    /// Near the keys, `[batch, heads, 1, head_dim]`.
    centre: Tensor<4>,
    /// What is added to the logits of pairs.
    bias: Option<Tensor<4>>,
}

impl<'a> Affinity<'a> {
    pub fn of(call: &Call, score: &'a Score, extras: &Extras, mechanism: &'static str) -> Result<Self> {
        if !Score::KINDS.contains(&score.kind()) {
            let why = "tensor operations know the built-in scores alone; move the tensors to Device::flex()";
            return Err(Error::Unsupported { mechanism, what: "this score with Strategy::Composed", why });
        }
        let Shape { heads, head_dim, .. } = call.shape;
        let of = |parameter| match extras.like(parameter, &call.q) {
            Some(values) => values.reshape([1, heads, 1, 1]),
            None => {
                let configured = score.value(parameter, head_dim, heads);
                Tensor::full([1, 1, 1, 1], configured, (&call.q.device(), call.q.dtype()))
            }
        };
        Ok(Self {
            score,
            scale: of(Parameter::Scale),
            offset: of(Parameter::Offset),
            power: of(Parameter::Alpha) + inner::intrinsic_dim(score, head_dim, heads),
            kappa: of(Parameter::Kappa),
            lambda: of(Parameter::Lambda),
            largest: [magnitude(&call.q), magnitude(&call.k)],
            centre: distance::centre(call),
            bias: call.bias.as_ref().map(|bias| bias.values.clone()),
        })
    }

    pub fn is_log(&self) -> bool {
        self.score.is_log()
    }

    pub fn scale(&self) -> Tensor<4> {
        self.scale.clone()
    }

    /// Whether the term is linear in a key, so that the term of a mean is the mean of terms.
    pub fn is_linear_in_keys(&self) -> bool {
        matches!(self.score, Score::DotExp(_) | Score::Constant(_)) || !self.is_log()
    }

    fn on_sphere(&self) -> bool {
        matches!(self.score, Score::Levy(m) | Score::Student(m) if m.manifold == Manifold::Sphere)
    }

    /// Factors on the values of a linear score: `g` is their product and the value. Without them nothing of size `|q| |k|` is
    /// formed, where a normalisation divides them out. With a bias, to which it is added, there are none.
    pub fn units(&self) -> Vec<Tensor<4>> {
        if self.bias.is_some() {
            return Vec::new();
        }
        let [q, k] = self.largest.clone();
        let once = vec![q, k, self.scale()];
        match self.score {
            Score::DotRelu(_) | Score::DotAbs(_) => once,
            Score::DotSquaredRelu(_) => [once.clone(), once].concat(),
            _ => Vec::new(),
        }
    }

    /// The terms of all pairs of `x [.., n, dim]` and `y [.., m, dim]`: products (of `dot-exp` scaled, of linear scores over the
    /// largest magnitudes), cosines, distances or their squares.
    pub fn terms(&self, x: &Tensor<4>, y: &Tensor<4>) -> Tensor<4> {
        let product = |x: Tensor<4>, y: Tensor<4>| x.matmul(y.swap_dims(2, 3));
        match self.score {
            Score::DotExp(_) => product(x.clone() * self.scale(), y.clone()),
            Score::CosineExp(_) => product(unit(x.clone()).0, unit(y.clone()).0),
            Score::Gaussian(_) => distance::squared(x, y, &self.centre),
            Score::Levy(_) | Score::Student(_) if self.on_sphere() => distance::sphere(x, y),
            Score::Levy(_) | Score::Student(_) => distance::plane(x, y, &self.centre),
            Score::Laplacian(_) => self.own_terms(x, y.clone().unsqueeze_dim(2)),
            Score::Constant(_) => {
                let ([batch, heads, n, _], [.., m, _]) = (x.dims(), y.dims());
                Tensor::zeros([batch, heads, n, m], (&x.device(), x.dtype()))
            }
            _ => {
                let [q, k] = self.largest.clone();
                product(x.clone() / q, y.clone() / k)
            }
        }
    }

    /// The terms of every row of `x [.., n, dim]` and rows of its own, `y [.., n or 1, m, dim]`, of scores that are not linear in keys.
    pub fn own_terms(&self, x: &Tensor<4>, y: Tensor<5>) -> Tensor<4> {
        let x = x.clone().unsqueeze_dim::<5>(3);
        let sum = |x: Tensor<5>| x.sum_dim(4).squeeze_dim::<4>(4);
        match self.score {
            Score::CosineExp(_) => sum(unit(x).0 * unit(y).0),
            Score::Levy(_) | Score::Student(_) if self.on_sphere() => {
                let ((x, no_x), (y, no_y)) = (unit(x), unit(y));
                let chord = |sign: f64| sum((x.clone() + y.clone() * sign).detach().square());
                let products = sum(x.clone() * y.clone());
                let shape = products.dims();
                let full = |x: Tensor<5, Bool>| x.squeeze_dim::<4>(4).expand(shape);
                distance::angle([chord(-1.0), chord(1.0)], products, full(no_x).bool_or(full(no_y)))
            }
            Score::Levy(_) | Score::Student(_) => super::root(sum((x - y).square())),
            Score::Laplacian(_) => sum((x - y).abs()),
            _ => sum((x - y).square()),
        }
    }

    /// Logarithms of affinities, or of a linear score affinities over [`Affinity::units`], of terms; `seen [.., n, 1]` counts the keys
    /// of each query.
    pub fn values(&self, z: Tensor<4>, seen: &Tensor<4>) -> Tensor<4> {
        let whole = |z: Tensor<4>| {
            let z = self.largest.iter().cloned().fold(z * self.scale(), |z, largest| z * largest);
            self.with_bias(z)
        };
        let linear = |z: Tensor<4>| if self.bias.is_some() { whole(z) } else { z };
        let log = |z: Tensor<4>| self.with_bias(z);
        match self.score {
            Score::DotExp(m) => log(m.softcap.map_or(z.clone(), |cap| (z / cap).tanh() * cap)),
            Score::CosineExp(_) => log(z * self.scale()),
            Score::DotRelu(_) => activation::relu(linear(z)),
            Score::DotAbs(_) => linear(z).abs(),
            Score::DotSquaredRelu(_) => activation::relu(linear(z)).square(),
            Score::DotGelu(_) => composed_gelu(whole(z)),
            Score::DotSigmoid(m) => activation::sigmoid(match m.offset {
                Some(_) => whole(z) + self.offset.clone(),
                None => whole(z) - seen.clone().clamp_min(1.0).log(),
            }),
            Score::Gaussian(_) => log((z * self.scale()).neg()),
            Score::Levy(m) if m.alpha == 2.0 => log((z / self.kappa.clone()).square().neg()),
            Score::Levy(_) => log((z / self.kappa.clone()).log1p() * self.power.clone().neg()),
            Score::Student(_) => log((z / self.kappa.clone()).square().log1p() * self.power.clone() * -0.5),
            Score::Laplacian(_) => log((z / self.lambda.clone()).neg()),
            _ => log(z),
        }
    }

    /// Logits, or logarithms of affinities, with the bias.
    fn with_bias(&self, z: Tensor<4>) -> Tensor<4> {
        match &self.bias {
            Some(bias) => z + bias.clone(),
            None => z,
        }
    }

    /// Affinities of a log score.
    pub fn powers(&self, x: &Tensor<4>, y: &Tensor<4>) -> Tensor<4> {
        let z = self.terms(x, y);
        let none = Tensor::ones([1, 1, 1, 1], (&z.device(), z.dtype()));
        self.values(z, &none).exp()
    }
}
