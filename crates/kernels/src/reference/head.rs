//! One (batch, head) problem of a call, with everything masked already gone.

use std::collections::BTreeMap;

use super::matrix::{Matrix, inner};
use crate::{
    Dropout, Dropped, Inputs, Mask, Mechanism, Parameter, Shape,
    call::cluster_plan::HeadPlan,
    mechanism::{Bias, Dense},
};

/// The tensors of one head. Rows of masked tokens are zero whatever the caller stored there, so that even a NaN in
/// padding cannot enter a sum.
#[derive(Clone)]
pub(super) struct Head {
    /// `[seq_q, head_dim]`
    pub q: Matrix,
    /// `[seq_kv, head_dim]`
    pub k: Matrix,
    /// `[seq_kv, value_dim]`
    pub v: Matrix,
    /// Decay; 1 where the mechanism has none.
    pub gamma: f64,
    /// Heads of the call.
    pub heads: usize,
    pub keep_query: Vec<bool>,
    pub keep_key: Vec<bool>,
    pub causal: bool,
    /// Of a clustered call.
    pub clusters: HeadPlan,
    /// Which sequence the head is of, by the caller's count.
    pub batch: usize,
    parameters: BTreeMap<Parameter, Vec<f64>>,
    landmark_indices: Option<Vec<usize>>,
    dropout: Option<Dropout>,
    slice: usize,
    window: Dense,
    /// The rule of the bias, its numbers of this head, and the call's sizes.
    bias: Option<(Bias, Vec<f64>, Shape)>,
}

impl Head {
    /// The problem of batch entry `b` and head `h`.
    pub fn of(mechanism: &Mechanism, s: &Shape, inputs: &Inputs<'_, f64>, mask: &Mask<'_>, b: usize, h: usize) -> Self {
        let keep = |mask: Option<&[bool]>, seq: usize| mask.map_or(vec![true; seq], |m| m[b * seq..][..seq].to_vec());
        let mut keep_key = keep(mask.key, s.seq_kv);
        // Where queries are keys, one mask is for both.
        let mut keep_query = if mechanism.masks_tokens_once() { keep_key.clone() } else { keep(mask.query, s.seq_q) };
        let slice = b * s.heads + h;
        let part = |(p, x): (Parameter, &[f32])| {
            (p, x[mechanism.parameter_part(p, s, slice)].iter().map(|&x| x.into()).collect::<Vec<f64>>())
        };
        let parameters: BTreeMap<_, _> = inputs.extras.iter().map(part).collect();
        let gamma = parameters.get(&Parameter::Gamma).map(|gamma| gamma[0]);
        let bias = mechanism.bias.map(|rule| {
            let default = || {
                let all = mechanism.parameter_default(Parameter::Bias, s);
                all[rule.part(s, slice)].iter().map(|&x| x.into()).collect()
            };
            (rule, parameters.get(&Parameter::Bias).cloned().unwrap_or_else(default), *s)
        });
        if let Some((rule, values, s)) = &bias {
            // A token whose pairs are all absent is absent itself.
            let paired = |i: usize, j: usize| values[rule.entry(s, i, j).0] != f64::NEG_INFINITY;
            for (i, keep) in keep_query.iter_mut().enumerate() {
                *keep &= (0..s.seq_kv).any(|j| keep_key[j] && paired(i, j));
            }
            for (j, keep) in keep_key.iter_mut().enumerate() {
                *keep &= (0..s.seq_q).any(|i| keep_query[i] && paired(i, j));
            }
        }
        let indices =
            |all: &[i64]| all.chunks(all.len() / s.batch).nth(b).map(|part| part.iter().map(|&i| i as usize).collect());
        Self {
            q: gather(inputs.q, slice, s.head_dim, &keep_query),
            k: gather(inputs.k.unwrap_or(inputs.q), slice, s.head_dim, &keep_key),
            v: gather(inputs.v, slice, s.value_dim, &keep_key),
            gamma: gamma.or(mechanism.gamma()).unwrap_or(1.0),
            heads: s.heads,
            keep_query,
            keep_key,
            causal: mask.causal || mechanism.causal,
            clusters: inputs.extras.clusters.map_or(HeadPlan::default(), |plan| plan.head(slice).clone()),
            batch: inputs.extras.first_sequence + b,
            parameters,
            landmark_indices: inputs.extras.landmark_indices.and_then(indices),
            dropout: inputs.extras.dropout,
            slice,
            window: mechanism.window(),
            bias,
        }
    }

    /// The value that the call gives in place of the configured one.
    pub fn given(&self, parameter: Parameter) -> Option<f64> {
        self.parameters.get(&parameter).map(|values| values[0])
    }

    /// What the call gives this head of a parameter.
    pub fn parameter(&self, parameter: Parameter) -> Option<Vec<f64>> {
        self.parameters.get(&parameter).cloned()
    }

    /// The same queries with other keys, all of which they see.
    pub fn with_keys(&self, k: Matrix) -> Self {
        Self { keep_key: vec![true; k.rows], k, ..self.clone() }
    }

    /// The number of the head in its sequence.
    pub fn index(&self) -> usize {
        self.slice % self.heads
    }

    /// The tokens that the call wants for landmarks.
    pub fn landmark_indices(&self) -> Option<Vec<usize>> {
        self.landmark_indices.clone()
    }

    /// Whether query `i` may see key `j`.
    pub fn allowed(&self, i: usize, j: usize) -> bool {
        let drawn = self.dropout.is_none_or(|d| d.dropped() == Dropped::Weights || d.keeps(self.slice, i, j));
        drawn && self.keep_query[i] && self.keep_key[j] && (!self.causal || self.past(i, j)) && self.near(i, j)
    }

    /// What is added to the logit of query `i` and key `j`; `-inf` for a pair that is absent.
    pub fn bias(&self, i: usize, j: usize) -> f64 {
        self.bias.as_ref().map_or(0.0, |(rule, values, shape)| {
            let (n, factor) = rule.entry(shape, i, j);
            factor * values[n]
        })
    }

    /// The gradient of the bias' numbers from those of the logits of pairs, where there is a bias.
    pub fn bias_backward(&self, dlogits: impl Iterator<Item = (usize, usize, f64)>) -> Option<Vec<f64>> {
        let (rule, values, shape) = self.bias.as_ref()?;
        let mut sums = vec![0.0; values.len()];
        for (i, j, x) in dlogits {
            let (n, factor) = rule.entry(shape, i, j);
            sums[n] += factor * x;
        }
        Some(sums)
    }

    /// Whether key `j` is not after query `i`.
    pub fn past(&self, i: usize, j: usize) -> bool {
        j + self.q.rows <= i + self.k.rows
    }

    /// Whether key `j` is in the window of query `i`, or a sink.
    fn near(&self, i: usize, j: usize) -> bool {
        let apart = (i + self.k.rows).abs_diff(j + self.q.rows);
        self.window.window.is_none_or(|window| apart < window || j < self.window.sinks)
    }

    /// `weights`, or their gradients, times the draws' factors where weights are dropped.
    pub fn with_dropout(&self, weights: &Matrix) -> Matrix {
        match self.dropout.filter(|d| d.dropped() == Dropped::Weights) {
            Some(d) => weights.map(|i, j, x| if d.keeps(self.slice, i, j) { d.factor() * x } else { 0.0 }),
            None => weights.clone(),
        }
    }

    /// The factor on `q.k`: the configured one, or `head_dim^-0.5`.
    pub fn scale(&self, scale: Option<f64>) -> f64 {
        scale.unwrap_or_else(|| (self.q.cols as f64).powf(-0.5))
    }

    /// `(dq, dk)` of the logits: `scale dL K` and `scale dL^T Q`.
    pub fn logits_backward(&self, scale: Option<f64>, dlogits: &Matrix) -> (Matrix, Matrix) {
        let scale = self.scale(scale);
        let dlogits = dlogits.map(|_, _, x| scale * x);
        (dlogits.times(&self.k), dlogits.transpose().times(&self.q))
    }
}

/// Rows of one slice of `x [slices, keep.len(), cols]`, zero where not kept.
pub(super) fn gather(x: &[f64], slice: usize, cols: usize, keep: &[bool]) -> Matrix {
    let rows = keep.len();
    let x = &x[slice * rows * cols..][..rows * cols];
    Matrix::from_fn(rows, cols, |i, j| if keep[i] { x[i * cols + j] } else { 0.0 })
}

/// Euclidean norms of the rows.
pub(super) fn row_norms(x: &Matrix) -> Vec<f64> {
    (0..x.rows).map(|i| inner(x.row(i), x.row(i)).sqrt()).collect()
}
