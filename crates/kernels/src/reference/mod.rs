//! The naive form of every mechanism: full matrices, f64, in the order of the equations.
//!
//! Slow on purpose (O(N^2) memory, and O(N^3) time for the resolvent) and meant to be read beside the papers. Every fast
//! path of this crate agrees with it within [`crate::Tol`]. A mechanism is a matrix here: [`Forward::weights`] maps `v`
//! to `out`, whatever produced it. It is `composed` of the four values, each with its hand-derived gradient; presets are such
//! compositions too, but for `linear-infsa`.

mod clustered;
mod composed;
mod head;
mod inverse;
mod landmarks;
mod linear_infsa;
mod matrix;

use head::Head;
use matrix::Matrix;

use std::collections::BTreeMap;

use crate::{
    ClusterPlan, Error, Inputs, Mask, Mechanism, Parameter, Result, Shape, check,
    memory::{self, check_memory},
};

/// What [`forward`] computes.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct Forward {
    /// `[batch, heads, out_seq, value_dim]`; `out_seq` is `seq_q`, or 1 where the pooled value is returned once.
    pub out: Vec<f64>,
    /// Log-sum-exp of every row, `[batch, heads, seq_q]`, `-inf` for a row without keys. Of log scores by pairs, with
    /// normalisation `row`: `softmax`, `fna`, `ssa`.
    pub lse: Option<Vec<f64>>,
    /// The same before the density is divided out, where its exponent is not 0. `fna`.
    pub lse0: Option<Vec<f64>>,
    /// Frobenius norm of the affinities before `eps`: `[batch, heads]`, or, causal, `[batch, heads, seq_q]` (the norm
    /// of the rows so far). Of normalisation `frobenius`: `infsa`, `infsa-resolvent`.
    pub frob: Option<Vec<f64>>,
    /// Start weights, `[batch, heads, seq_q]`. `linear-infsa`, "Infinite Self-Attention" eq. 16.
    pub alpha: Option<Vec<f64>>,
    /// Token weights before `gamma`, `[batch, heads, seq_kv]`. `linear-infsa`, eq. 19.
    pub a: Option<Vec<f64>>,
    weights: Vec<f64>,
}

impl Forward {
    /// The dense matrix that maps `v` to `out`, `[batch, heads, out_seq, seq_kv]`, decay included. For `softmax` the
    /// attention probabilities, for `infsa-resolvent` `(I - M)^-1 - I`, for `linear-infsa` `gamma 1 a^T`.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }
}

/// What [`backward`] computes: the gradients of `<dout, out>`.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct Backward {
    /// Shape of `q`; holds both paths when tied.
    pub dq: Vec<f64>,
    /// Shape of `k`; `None` iff tied.
    pub dk: Option<Vec<f64>>,
    /// Shape of `v`.
    pub dv: Vec<f64>,
    /// Of each of [`Mechanism::parameters`] that has one in this configuration, in its shape, summed over the batch.
    pub parameters: BTreeMap<Parameter, Vec<f64>>,
}

/// One head's share of [`Forward`].
#[derive(Default)]
struct HeadForward {
    weights: Matrix,
    lse: Option<Vec<f64>>,
    lse0: Option<Vec<f64>>,
    frob: Option<Vec<f64>>,
    alpha: Option<Vec<f64>>,
    a: Option<Vec<f64>>,
}

/// One head's gradients; that of `v` is common to all mechanisms.
struct HeadGradients {
    dq: Matrix,
    dk: Matrix,
    /// The head's part of each, where every head has its own; else the whole, to be summed over the heads.
    parameters: Vec<(Parameter, Vec<f64>)>,
}

/// `out = W(q, k) v`, with everything that the mechanism's equations name on the way.
///
/// # Errors
/// Those of [`crate::Operator::new`] and of [`crate::Operator::forward`], but for solvers: nothing iterates here. [`Error::Memory`].
pub fn forward(mechanism: &Mechanism, shape: &Shape, inputs: &Inputs<'_, f64>, mask: &Mask<'_>) -> Result<Forward> {
    check_call("forward", mechanism, shape, inputs, mask)?;
    check_memory("the reference", memory_needed(mechanism, shape, false))?;
    let (mut result, values) = (Forward::default(), mechanism.values());
    let made = made_plan(mechanism, shape, inputs, mask);
    let inputs = &made.as_ref().map_or(*inputs, |plan| inputs.with_clusters(plan));
    for (b, h) in heads(shape) {
        let head = Head::of(mechanism, shape, inputs, mask, b, h);
        let part = head_forward(mechanism, &values, &head)?;
        result.out.extend(part.weights.times(&head.v).data);
        result.weights.extend(part.weights.data);
        if mechanism.own().is_none() {
            append(&mut result.lse, part.lse.filter(|_| mechanism.has_row_sums()));
            continue; // the rest is named by a preset alone
        }
        append(&mut result.lse, part.lse);
        append(&mut result.lse0, part.lse0);
        append(&mut result.frob, part.frob);
        append(&mut result.alpha, part.alpha);
        append(&mut result.a, part.a);
    }
    Ok(result)
}

/// Bytes that a pass holds, about: the weights of all heads, which forward returns, the matrices of one head on the way, and the mechanism's
/// own tensors, twice: as they are given or drawn, and by head.
pub fn memory_needed(mechanism: &Mechanism, shape: &Shape, backward: bool) -> u64 {
    let pairs = shape.seq_q.saturating_mul(shape.seq_kv);
    // Measured on 1024 tokens of one head, weights included: 13 to 15 matrices where all pairs are weighed, 5 to 7 of landmarks, for which
    // this asks too much, and 3 of clusters, which are lists.
    let matrices = match (mechanism.clusters().is_ok(), backward) {
        (true, false) => 2,
        (true, true) => 5,
        (false, false) => 12,
        (false, true) => 20,
    };
    let kept = if backward { 0 } else { shape.slices() };
    let own: usize = mechanism.parameters().iter().map(|&parameter| mechanism.parameter_len(parameter, shape)).sum();
    let weights = pairs.saturating_mul(matrices + kept);
    memory::bytes(own.saturating_mul(2).saturating_add(weights), size_of::<f64>())
}

/// The gradients of `<dout, out>`, `dout` of the shape of [`Forward::out`], in closed form.
///
/// # Errors
/// As [`forward`]; [`crate::Error::Length`] for `dout`.
pub fn backward(
    mechanism: &Mechanism,
    shape: &Shape,
    inputs: &Inputs<'_, f64>,
    mask: &Mask<'_>,
    dout: &[f64],
) -> Result<Backward> {
    check_call("backward", mechanism, shape, inputs, mask)?;
    check_memory("the reference", memory_needed(mechanism, shape, true))?;
    let out_seq = mechanism.out_seq(shape);
    let pooled = mechanism.pooling().is_some_and(|m| !m.broadcast);
    let out_len = shape.slices() * out_seq * shape.value_dim;
    check::length("backward", "dout", dout.len(), out_len, "expected the shape of out")?;
    let made = made_plan(mechanism, shape, inputs, mask);
    let inputs = &made.as_ref().map_or(*inputs, |plan| inputs.with_clusters(plan));
    let (values, names) = (mechanism.values(), mechanism.parameters());
    let mut result = Backward { dk: (!mechanism.tied).then(Vec::new), ..Backward::default() };
    for (b, h) in heads(shape) {
        let head = Head::of(mechanism, shape, inputs, mask, b, h);
        // A pooled value is no query's row, and stays whatever queries are masked.
        let keep = if pooled { vec![true; out_seq] } else { head.keep_query.clone() };
        let dout = head::gather(dout, b * shape.heads + h, shape.value_dim, &keep);
        let part = head_forward(mechanism, &values, &head)?;
        let gradients = head_backward(mechanism, &values, &head, &part, &dout)?;
        result.dv.extend(part.weights.transpose().times(&dout).data);
        match &mut result.dk {
            Some(dk) => {
                result.dq.extend(gradients.dq.data);
                dk.extend(gradients.dk.data);
            }
            None => result.dq.extend(gradients.dq.plus(&gradients.dk).data),
        }
        // A preset has fewer parameters than its values.
        for (parameter, part) in gradients.parameters.into_iter().filter(|(parameter, _)| names.contains(parameter)) {
            let len = mechanism.parameter_shape(parameter, shape).iter().product();
            let whole = result.parameters.entry(parameter).or_insert_with(|| vec![0.0; len]);
            let buffer = &mut whole[mechanism.parameter_part(parameter, shape, b * shape.heads + h)];
            buffer.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
    }
    Ok(result)
}

fn check_call(
    op: &'static str,
    mechanism: &Mechanism,
    shape: &Shape,
    inputs: &Inputs<'_, f64>,
    mask: &Mask<'_>,
) -> Result<()> {
    mechanism.check(shape, mask.causal)?;
    if mechanism.is_custom() {
        let why = "it is compiled for vectors of f32; use strategy fused";
        return Err(Error::Unsupported {
            mechanism: mechanism.id(),
            what: "the f64 form of a score from outside",
            why,
        });
    }
    check::inputs(op, mechanism, shape, inputs, mask)
}

/// The plan of a clustered call that comes without one: a constant of the call.
pub(crate) fn made_plan(
    mechanism: &Mechanism,
    shape: &Shape,
    inputs: &Inputs<'_, f64>,
    mask: &Mask<'_>,
) -> Option<ClusterPlan> {
    let m = mechanism.clustering()?;
    let of_head = |(b, h): (usize, usize)| {
        let head = Head::of(mechanism, shape, inputs, mask, b, h);
        let codebook = inputs.extras.codebook.and_then(|book| book.chunks(book.len() / shape.heads).nth(h));
        clustered::plan(&head, &m, h, codebook)
    };
    inputs.extras.clusters.is_none().then(|| ClusterPlan::of_heads(shape, heads(shape).map(of_head).collect()))
}

/// The plan that [`forward`] and [`backward`] follow in a clustered call (`ssa`), for the f32 nearest to its inputs: the one in
/// [`crate::Extras::clusters`], or one that is made in f64, by the definitions.
///
/// # Errors
/// [`Error::Unsupported`] for mechanisms without clusters; else as [`forward`].
pub fn clusters(
    mechanism: &Mechanism,
    shape: &Shape,
    inputs: &Inputs<'_, f64>,
    mask: &Mask<'_>,
) -> Result<ClusterPlan> {
    check_call("clusters", mechanism, shape, inputs, mask)?;
    let why = "only `ssa` attends along clusters";
    let refused = Error::Unsupported { mechanism: mechanism.id(), what: "a plan of clusters", why };
    made_plan(mechanism, shape, inputs, mask).or(inputs.extras.clusters.cloned()).ok_or(refused)
}

fn heads(shape: &Shape) -> impl Iterator<Item = (usize, usize)> {
    let heads = shape.heads;
    (0..shape.slices()).map(move |slice| (slice / heads, slice % heads))
}

fn append(all: &mut Option<Vec<f64>>, part: Option<Vec<f64>>) {
    if let Some(part) = part {
        all.get_or_insert_default().extend(part);
    }
}

/// `values` are those of the mechanism.
fn head_forward(mechanism: &Mechanism, values: &Mechanism, head: &Head) -> Result<HeadForward> {
    match mechanism.pooling() {
        Some(m) => Ok(linear_infsa::forward(head, &m)),
        None => composed::forward(head, mechanism, values),
    }
}

fn head_backward(
    mechanism: &Mechanism,
    values: &Mechanism,
    head: &Head,
    saved: &HeadForward,
    dout: &Matrix,
) -> Result<HeadGradients> {
    match mechanism.pooling() {
        Some(m) => Ok(linear_infsa::backward(head, &m, saved, dout)),
        None => composed::backward(head, mechanism, values, saved, dout),
    }
}
