//! The same operators out of Burn's tensor operations, for devices without kernels: full matrices, O(N^2) memory,
//! differentiated by Burn.
//!
//! Masking is by absence: masked rows of q, k and v are replaced by zeros first, so that their content (NaN included)
//! reaches nothing and gets exactly zero gradient.

mod affinity;
mod bias;
mod clustered;
mod distance;
mod factors;
mod features;
mod graph;
mod hop;
mod landmarks;
mod normalisation;
mod nystrom;
mod pooled;
mod projected;
mod score;
mod series;
mod value_filter;
mod whitened;

use burn::tensor::{Bool, DType, FloatDType, Tensor, TensorData};

use resolvent_kernels::{Dropout, Dropped, Error, Parameter};

use bias::Added;
use clustered::Clusters;
use graph::Pairs;
use normalisation::normalise;
use score::Affinity;

use super::{Inputs, Mask, Output, clusters};
use crate::{
    Mechanism, Result, Shape,
    mechanism::{Dense, Inverse, LinearInfsa, Normalisation, Structure, Whitening},
};

/// A call with its masks applied, in f32 or f64.
struct Call {
    shape: Shape,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    causal: bool,
    /// Keys that do not exist, `[batch, 1, 1, seq_kv]`.
    no_key: Option<Tensor<4, Bool>>,
    /// Queries that do not exist, `[batch, 1, seq_q, 1]`.
    no_query: Option<Tensor<4, Bool>>,
    dropout: Option<Dropout>,
    /// What is added to the logits of pairs.
    bias: Option<Added>,
}

/// Applies the mechanism.
pub(super) fn attend(inputs: &Inputs, mechanism: &Mechanism, mask: &Mask, shape: &Shape) -> Result<Output> {
    let dtype = inputs.q.dtype();
    inputs.extras.dropout.map_or(Ok(()), |dropout| dropout.check(mechanism))?;
    let call = Call::new(inputs, mechanism, mask, *shape);
    for (&parameter, extra) in &inputs.extras.parameters {
        let values: Vec<f32> = extra.flat.to_data().iter::<f32>().collect();
        mechanism.check_parameter(parameter, &values)?;
    }
    let decay = match (inputs.extras.like(Parameter::Gamma, &call.q), mechanism.gamma()) {
        (Some(gamma), _) => gamma.reshape([1, shape.heads, 1, 1]),
        (None, gamma) => Tensor::full([1, 1, 1, 1], gamma.unwrap_or(1.0), (&call.q.device(), call.q.dtype())),
    };
    let (out, lse) = match mechanism.pooling() {
        Some(m) => (pooled::linear_infsa(&call, &m, decay), None),
        None if mechanism.projections() == 1 => (pooled::uniform(&call), None),
        None => four_values(&call, inputs, mechanism, mask, decay)?,
    };
    Ok(Output { out: out.cast(FloatDType::from(dtype)), lse })
}

/// The output of four values, and the log-sum-exp of its rows, `[batch, heads, seq_q]`, where these have one.
fn four_values(
    call: &Call,
    inputs: &Inputs,
    mechanism: &Mechanism,
    mask: &Mask,
    decay: Tensor<4>,
) -> Result<(Tensor<4>, Option<Tensor<3>>)> {
    let (m, id, extras) = (mechanism.values(), mechanism.id(), &inputs.extras);
    let over = match &m.structure {
        Structure::Projected(structure) => Some(projected::call(call, structure, extras)),
        _ => None,
    };
    let call = over.as_ref().unwrap_or(call);
    let affinity = Affinity::of(call, &m.score, extras, id)?;
    let (hop, lse) = match &m.structure {
        Structure::Projected(_) => {
            normalise(call, Pairs::dense(call, &affinity, &Dense::default()), &m.normalisation, id)?
        }
        Structure::Dense(structure) => normalise(call, Pairs::dense(call, &affinity, structure), &m.normalisation, id)?,
        Structure::Clustered(structure) => {
            let plan = clusters::clusters(inputs, mechanism, mask, &call.shape)?;
            let plan = plan.ok_or_else(|| unsupported(id, "a call without a plan of clusters"))?;
            let clusters = Clusters::of(call, structure, &plan, mechanism, mask)?;
            normalise(call, Pairs::clustered(call, &affinity, &clusters), &m.normalisation, id)?
        }
        Structure::Nystrom(structure) if matches!(m.normalisation, Normalisation::Factors(_)) => {
            (factors::hop(call, &affinity, structure, extras), None)
        }
        Structure::Nystrom(structure) => {
            (nystrom::hop(call, &affinity, structure, &m.normalisation, extras, mechanism)?, None)
        }
        Structure::Features(structure) => (features::hop(call, structure, affinity.scale()), None),
        _ => return Err(unsupported(id, "this structure with Strategy::Composed").into()),
    };
    let hop = match value_filter::of(call, mechanism, extras) {
        Some(filter) => hop.with_filter(filter),
        None => hop,
    };
    let out = series::apply(call, &m.series, &hop, decay, id)?;
    let Shape { batch, heads, seq_q, .. } = call.shape;
    let lse = lse.filter(|_| m.has_row_sums()).map(|lse| lse.cast(FloatDType::F32).reshape([batch, heads, seq_q]));
    Ok((out, lse))
}

/// Whether the mechanism is defined by eigenvalues, which tensor operations do not take.
pub(super) fn needs_eigenvalues(mechanism: &Mechanism) -> bool {
    matches!(&mechanism.normalisation, Normalisation::Whitened(m) if m.whitening == Whitening::Full)
        || matches!(&mechanism.values().structure, Structure::Nystrom(m) if m.inverse == Inverse::Eigen)
}

/// A refusal of what tensor operations have no form of.
fn unsupported(mechanism: &'static str, what: &'static str) -> Error {
    let why = "tensor operations have no form of it; move the tensors to Device::flex()";
    Error::Unsupported { mechanism, what, why }
}

/// The token weights of `linear-infsa`, `[batch, heads, 1, seq_kv]`.
pub(super) fn token_weights(inputs: &Inputs, m: &LinearInfsa, mask: &Mask, shape: Shape) -> Tensor<4> {
    let call = Call::new(inputs, &m.clone().into(), mask, shape);
    absent(pooled::weights(&call, m), &call.no_key)
}

impl Call {
    fn new(inputs: &Inputs, mechanism: &Mechanism, mask: &Mask, shape: Shape) -> Self {
        let Shape { batch, seq_q, seq_kv, .. } = shape;
        let no_key = mask.key.as_ref().map(|keep| keep.clone().bool_not().reshape([batch, 1, 1, seq_kv]));
        // Tokens that are queries and keys have one mask.
        let query = if mechanism.masks_tokens_once() { &mask.key } else { &mask.query };
        let no_query = query.as_ref().map(|keep| keep.clone().bool_not().reshape([batch, 1, seq_q, 1]));
        let no_key_row = no_key.clone().map(|mask| mask.swap_dims(2, 3));
        let k = inputs.k.as_ref().unwrap_or(&inputs.q);
        let bias = Added::of(mechanism, &inputs.extras, &shape, &wide(&inputs.q));
        let unpaired = bias.as_ref().and_then(|bias| bias.unpaired(&shape, [&no_query, &no_key]));
        let [no_query_row, no_key_row] =
            unpaired.map_or([no_query.clone(), no_key_row], |[query, key]| [Some(query), Some(key)]);
        Self {
            shape,
            bias,
            q: absent(wide(&inputs.q), &no_query_row),
            k: absent(wide(k), &no_key_row),
            v: absent(wide(&inputs.v), &no_key_row),
            causal: mask.causal || mechanism.causal,
            no_key,
            no_query,
            dropout: inputs.extras.dropout,
        }
    }

    /// The pairs that causality forbids, `[1, 1, seq_q, seq_kv]`.
    fn future(&self) -> Option<Tensor<4, Bool>> {
        let Shape { seq_q, seq_kv, .. } = self.shape;
        let shift = seq_kv as i64 - seq_q as i64;
        // Burn's triangle masks are false inside the triangle that they name.
        let mask = || Tensor::<2, Bool>::tril_mask([seq_q, seq_kv], shift, &self.q.device());
        self.causal.then(|| mask().reshape([1, 1, seq_q, seq_kv]))
    }

    /// The pairs that are left out at random, `[batch, heads, seq_q, seq_kv]`, if they are those of `dropped`.
    fn drawn(&self, dropped: Dropped) -> Option<Tensor<4, Bool>> {
        let dropout = self.dropout.filter(|dropout| dropout.dropped() == dropped)?;
        let Shape { batch, heads, seq_q, seq_kv, .. } = self.shape;
        let row = |n: usize| (0..seq_kv).map(move |key| !dropout.keeps(n / seq_q, n % seq_q, key));
        let left_out: Vec<bool> = (0..batch * heads * seq_q).flat_map(row).collect();
        Some(Tensor::from_data(TensorData::new(left_out, [batch, heads, seq_q, seq_kv]), &self.q.device()))
    }

    /// Weights, or what becomes weights divided by the sums of rows, thinned out where weights are dropped.
    fn thinned(&self, weights: Tensor<4>) -> Tensor<4> {
        match (self.drawn(Dropped::Weights), self.dropout) {
            (Some(left_out), Some(dropout)) => weights.mask_fill(left_out, 0.0) * dropout.factor(),
            _ => weights,
        }
    }

    /// The pairs that a bias leaves out.
    fn absent(&self) -> Option<Tensor<4, Bool>> {
        self.bias.as_ref()?.absent.clone()
    }

    /// Every pair that does not exist, `[batch, 1 or heads, seq_q, seq_kv]`.
    fn blocked(&self) -> Option<Tensor<4, Bool>> {
        let Shape { batch, seq_q, seq_kv, .. } = self.shape;
        let drawn = self.drawn(Dropped::Pairs);
        let absent = self.absent();
        let heads = if drawn.is_some() || absent.is_some() { self.shape.heads } else { 1 };
        let full = |mask: Tensor<4, Bool>| mask.expand([batch, heads, seq_q, seq_kv]);
        [self.future(), self.no_key.clone(), self.no_query.clone(), drawn, absent]
            .into_iter()
            .flatten()
            .map(full)
            .reduce(|a, b| a.bool_or(b))
    }
}

/// `x` in f32, unless it is wider.
fn wide(x: &Tensor<4>) -> Tensor<4> {
    if x.dtype() == DType::F64 { x.clone() } else { x.clone().cast(FloatDType::F32) }
}

/// `x` with zeros in place of the masked elements.
fn absent(x: Tensor<4>, mask: &Option<Tensor<4, Bool>>) -> Tensor<4> {
    fill(x, mask, 0.0)
}

/// `x` with `value` in place of the masked elements.
fn fill(x: Tensor<4>, mask: &Option<Tensor<4, Bool>>, value: f32) -> Tensor<4> {
    match mask {
        Some(mask) => {
            let shape = x.shape();
            x.mask_fill(mask.clone().expand(shape), value)
        }
        None => x,
    }
}

/// `sqrt(x)` for `x >= 0`, with derivative 0 at 0.
fn root<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let zero = x.clone().equal_elem(0.0);
    x.mask_fill(zero.clone(), 1.0).sqrt().mask_fill(zero, 0.0)
}

/// The largest magnitude per slice as a constant, `[batch, heads, 1, 1]`; 1 where all is zero.
fn magnitude(x: &Tensor<4>) -> Tensor<4> {
    let largest = x.clone().detach().abs().max_dim(3).max_dim(2);
    let zero = largest.clone().equal_elem(0.0);
    largest.mask_fill(zero, 1.0)
}
