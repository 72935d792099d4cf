//! Compositions of four values: scores that are a function of the product of query and key, on a dense structure or through maps of
//! features, over one hop or several.

use burn::tensor::{Bool, FloatDType, Tensor, TensorData, activation};
use resolvent_kernels::{Error, Parameter};

use super::{Call, absent, dense::fill, root};
use crate::{
    Extras, Result, Shape,
    mechanism::{Composed, Dense, Factor, FeatureMap, Features, Normalisation, Score, Series, Structure},
    ops::gelu::composed_gelu,
};

/// `out`, `[batch, heads, seq_q, value_dim]`.
pub(super) fn composed(call: &Call, m: &Composed, extras: &Extras, gamma: Tensor<4>) -> Result<Tensor<4>> {
    let call = Composition { call, m, extras };
    let weights = match &m.structure {
        Structure::Dense(dense) => call.dense(dense)?,
        Structure::Features(features) => call.features(features)?,
        _ => return call.unsupported("this structure as tensor operations"),
    };
    let hop = |x: Tensor<4>| weights.clone().matmul(x) * gamma.clone();
    match &m.series {
        Series::OneHop(_) => Ok(hop(call.call.v.clone())),
        Series::Hops(hops) => {
            let first = hop(call.call.v.clone());
            let next = |(sum, x): (Tensor<4>, Tensor<4>)| (sum + hop(x.clone()), hop(x));
            Ok((1..hops.count).fold((first.clone(), first), |state, _| next(state)).0)
        }
        _ => call.unsupported("this series as tensor operations"),
    }
}

struct Composition<'a> {
    call: &'a Call,
    m: &'a Composed,
    extras: &'a Extras,
}

impl Composition<'_> {
    fn unsupported<T>(&self, what: &'static str) -> Result<T> {
        let why = "it has no such form; use a device with fused kernels, Device::flex()";
        Err(Error::Unsupported { mechanism: self.m.id(), what, why }.into())
    }

    /// A parameter of the score, `[1, heads, 1, 1]`.
    fn parameter(&self, parameter: Parameter) -> Tensor<4> {
        let Shape { heads, head_dim, .. } = self.call.shape;
        let q = &self.call.q;
        match self.extras.get(parameter) {
            Some(values) => values.clone().cast(FloatDType::from(q.dtype())).reshape([1, heads, 1, 1]),
            None => {
                let value = self.m.score.value(parameter, head_dim, heads);
                Tensor::full([1, 1, 1, 1], value, (&q.device(), q.dtype()))
            }
        }
    }

    /// Keys that every query sees, `[batch, 1, seq_q, 1]`, at least 1.
    fn seen(&self, blocked: &Option<Tensor<4, Bool>>) -> Tensor<4> {
        let Shape { batch, seq_q, seq_kv, .. } = self.call.shape;
        let ones = Tensor::ones([batch, 1, seq_q, seq_kv], (&self.call.q.device(), self.call.q.dtype()));
        absent(ones, blocked).sum_dim(3).clamp_min(1.0)
    }

    /// Weights of all pairs.
    fn dense(&self, dense: &Dense) -> Result<Tensor<4>> {
        let blocked = match self.outside(dense) {
            Some(outside) => Some(match self.call.blocked() {
                Some(blocked) => blocked.bool_or(outside.expand(self.full(1))),
                None => outside.expand(self.full(1)),
            }),
            None => self.call.blocked(),
        };
        let term = self.term();
        let (scores, log) = match &self.m.score {
            Score::DotExp(m) => match m.softcap {
                Some(cap) => ((term / cap).tanh() * cap, true),
                None => (term, true),
            },
            Score::CosineExp(_) => (term, true),
            Score::Constant(_) => (term.zeros_like(), true),
            Score::DotRelu(_) => (activation::relu(term), false),
            Score::DotAbs(_) => (term.abs(), false),
            Score::DotGelu(_) => (composed_gelu(term), false),
            Score::DotSquaredRelu(_) => (activation::relu(term).square(), false),
            Score::DotSigmoid(m) => {
                let offset = match m.offset {
                    Some(_) => self.parameter(Parameter::Offset),
                    None => self.seen(&blocked).log().neg(),
                };
                (activation::sigmoid(term + offset), false)
            }
            _ => return self.unsupported("this score as tensor operations"),
        };
        match &self.m.normalisation {
            Normalisation::Row(row) if row.density_exponent == 0.0 => {
                let affinities = if log {
                    let highest = fill(scores.clone().detach(), &blocked, f32::MIN).max_dim(3);
                    absent((fill(scores, &blocked, f32::MIN) - highest).exp(), &blocked)
                } else {
                    absent(scores, &blocked)
                };
                Ok(over_sums(affinities))
            }
            Normalisation::None(none) => {
                let affinities = absent(if log { scores.exp() } else { scores }, &blocked);
                Ok(if none.factor == Factor::InvN { affinities / self.seen(&blocked) } else { affinities })
            }
            _ => self.unsupported("this normalisation as tensor operations"),
        }
    }

    /// Scaled products of queries and keys, or of their directions.
    fn term(&self) -> Tensor<4> {
        let (q, k) = (self.call.q.clone(), self.call.k.clone());
        match &self.m.score {
            Score::CosineExp(_) => (unit(q) * self.parameter(Parameter::Scale)).matmul(unit(k).swap_dims(2, 3)),
            _ => (q * self.parameter(Parameter::Scale)).matmul(k.swap_dims(2, 3)),
        }
    }

    fn full(&self, heads: usize) -> [usize; 4] {
        let Shape { batch, seq_q, seq_kv, .. } = self.call.shape;
        [batch, heads, seq_q, seq_kv]
    }

    /// Pairs outside the window, `[1, 1, seq_q, seq_kv]`.
    fn outside(&self, dense: &Dense) -> Option<Tensor<4, Bool>> {
        let (window, Shape { seq_q, seq_kv, .. }) = (dense.window?, self.call.shape);
        let apart = |n: usize| (n / seq_kv + seq_kv).abs_diff(n % seq_kv + seq_q);
        let outside = |n: usize| apart(n) >= window && n % seq_kv >= dense.sinks;
        let outside: Vec<bool> = (0..seq_q * seq_kv).map(outside).collect();
        Some(Tensor::from_data(TensorData::new(outside, [1, 1, seq_q, seq_kv]), &self.call.q.device()))
    }

    /// Products of features, rows normalised.
    fn features(&self, features: &Features) -> Result<Tensor<4>> {
        let scale = root(self.parameter(Parameter::Scale));
        let (q, k) = (self.call.q.clone() * scale.clone(), self.call.k.clone() * scale);
        let map = |x: Tensor<4>, keys: bool| match features.map {
            FeatureMap::Elu => activation::relu(x.clone()) + x.clamp_max(0.0).exp(),
            FeatureMap::Favor => {
                let head_dim = self.call.shape.head_dim;
                let directions = features.directions(head_dim);
                let data = TensorData::new(directions, [1, 1, features.count(head_dim), head_dim]);
                let w = Tensor::<4>::from_data(data, (&x.device(), x.dtype()));
                let exponents = x.clone().matmul(w.swap_dims(2, 3)) - x.square().sum_dim(3) * 0.5;
                // Of a query and of all keys a factor is free.
                let highest = exponents.clone().detach().max_dim(3);
                let highest = if keys { highest.max_dim(2) } else { highest };
                (exponents - highest).exp()
            }
        };
        Ok(over_sums(absent(map(q, false).matmul(map(k, true).swap_dims(2, 3)), &self.call.blocked())))
    }
}

/// Rows over the sums of their magnitudes; a row of zeros stays.
fn over_sums(affinities: Tensor<4>) -> Tensor<4> {
    let sums = affinities.clone().abs().sum_dim(3);
    let empty = sums.clone().equal_elem(0.0);
    affinities / sums.mask_fill(empty, 1.0)
}

/// Rows at length one; shorter than 1e-12 they are zero.
fn unit(x: Tensor<4>) -> Tensor<4> {
    let length = root(x.clone().square().sum_dim(3));
    let none = length.clone().lower_elem(1e-12);
    let shape = x.shape();
    (x / length.mask_fill(none.clone(), 1.0)).mask_fill(none.expand(shape), 0.0)
}
