//! The tensors of one call.

use std::{collections::BTreeMap, sync::Arc};

use burn::tensor::{Bool, FloatDType, Tensor};
use resolvent_kernels::{ClusterPlan, Dropout, Parameter, Precision};

use super::SharedClusters;

/// The tensors that a mechanism is applied to. All share one device and one floating-point storage type (the extras may
/// have another).
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Queries, `[batch, heads, seq_q, head_dim]`.
    pub q: Tensor<4>,
    /// Keys, `[batch, kv_heads, seq_kv, head_dim]`; `None` iff the mechanism is tied (the keys are `q`). Each of their heads serves
    /// `heads / kv_heads` heads of queries in a row.
    pub k: Option<Tensor<4>>,
    /// Values, `[batch, kv_heads, seq_kv, value_dim]`.
    pub v: Tensor<4>,
    /// The mechanism's own tensors.
    pub extras: Extras,
}

impl Inputs {
    /// Queries, keys and values.
    pub fn new(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Self {
        Self { q, k: Some(k), v, extras: Extras::default() }
    }

    /// The inputs of a tied mechanism, whose keys are the queries.
    pub fn tied(q: Tensor<4>, v: Tensor<4>) -> Self {
        Self { q, k: None, v, extras: Extras::default() }
    }

    /// The same inputs with a tensor of the mechanism's own: see [`Extras::with`].
    pub fn with<const D: usize>(mut self, parameter: Parameter, values: Tensor<D>) -> Self {
        self.extras = self.extras.with(parameter, values);
        self
    }

    /// Heads of keys and values.
    pub(super) fn kv_heads(&self) -> usize {
        let [_, heads, _, _] = self.k.as_ref().unwrap_or(&self.q).dims();
        heads
    }

    /// With every head of keys and values as often as heads of queries share it.
    pub(super) fn repeated(&self) -> Self {
        let [_, heads, _, _] = self.q.dims();
        let repeated = |x: &Tensor<4>| {
            let [batch, own, seq, channels] = x.dims();
            if own == heads || own == 0 || !heads.is_multiple_of(own) {
                return x.clone(); // what does not fit is refused where it is checked
            }
            let (one, all) = ([batch, own, 1, seq, channels], [batch, own, heads / own, seq, channels]);
            x.clone().reshape(one).expand(all).reshape([batch, heads, seq, channels])
        };
        Self { k: self.k.as_ref().map(repeated), v: repeated(&self.v), ..self.clone() }
    }

    /// The same inputs with a decay per head, `[heads]`, in place of the configured one.
    pub fn with_gamma(self, gamma: Tensor<1>) -> Self {
        self.with(Parameter::Gamma, gamma)
    }
}

/// Tensors that belong to single mechanisms, and how a call is computed.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Extras {
    pub(super) parameters: BTreeMap<Parameter, Extra>,
    pub(super) codebook: Option<Arc<[f32]>>,
    pub(super) clusters: Option<Arc<ClusterPlan>>,
    pub(super) shared_clusters: Option<SharedClusters>,
    pub(super) landmark_indices: Option<Arc<[i64]>>,
    pub(super) dropout: Option<Dropout>,
    pub(super) precision: Precision,
}

/// One of them, in f32.
#[derive(Debug, Clone)]
pub(super) struct Extra {
    pub shape: Vec<usize>,
    /// `[elements]`.
    pub flat: Tensor<1>,
}

impl Extras {
    /// The same extras with `parameter`, of [`crate::Mechanism::parameter_shape`], in place of what the configuration
    /// says. It gets a gradient.
    pub fn with<const D: usize>(self, parameter: Parameter, values: Tensor<D>) -> Self {
        let shape = values.dims().to_vec();
        self.with_shape(parameter, shape, values)
    }

    /// As [`Extras::with`], the elements of `values` taken as a tensor of `shape`.
    pub(crate) fn with_shape<const D: usize>(
        mut self,
        parameter: Parameter,
        shape: Vec<usize>,
        values: Tensor<D>,
    ) -> Self {
        let flat = values.flatten::<1>(0, D - 1).cast(FloatDType::F32);
        self.parameters.insert(parameter, Extra { shape, flat });
        self
    }

    /// The same extras with fixed centroids `[heads, clusters, head_dim]` in row-major order, which replace k-means.
    /// `ssa`. They get no gradient.
    pub fn with_codebook(self, codebook: impl Into<Arc<[f32]>>) -> Self {
        Self { codebook: Some(codebook.into()), ..self }
    }

    /// The same extras with a plan, which replaces planning: one plan may serve several layers and steps. `ssa`.
    pub fn with_clusters(self, plan: impl Into<Arc<ClusterPlan>>) -> Self {
        Self { clusters: Some(plan.into()), ..self }
    }

    /// The same extras with a place for a plan that several calls share: the first of them makes it. `ssa`; a plan of
    /// [`Extras::with_clusters`] goes before.
    pub fn with_shared_clusters(self, shared: SharedClusters) -> Self {
        Self { shared_clusters: Some(shared), ..self }
    }

    /// The same extras with the tokens that are the landmarks, `[batch, count]` in row-major order, ascending for every
    /// batch element: they replace the draw of landmarks of kind `random`. `soft`, `soft-pp`.
    pub fn with_landmark_indices(self, indices: impl Into<Arc<[i64]>>) -> Self {
        Self { landmark_indices: Some(indices.into()), ..self }
    }

    /// The same extras with pairs of query and key left out at random. `softmax`, `fna`.
    pub fn with_dropout(self, dropout: Dropout) -> Self {
        Self { dropout: Some(dropout), ..self }
    }

    /// The same extras with products of this precision, on Flex alone, in either pass. [`Precision::Bf16`] is for the mechanisms of
    /// [`resolvent_kernels::Operator::with_precision`], as [`Precision::Bf16x3`] is where the processor has tiles; others stay in f32,
    /// as [`crate::plan`] says (`kernel.arithmetic`). Default full.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// The pairs left out and the precision alone, for a call of another mechanism.
    pub(crate) fn without_tensors(&self) -> Self {
        Self { dropout: self.dropout, precision: self.precision, ..Self::default() }
    }

    /// The elements of `parameter` in row-major order, in f32, if the call has it.
    pub fn get(&self, parameter: Parameter) -> Option<&Tensor<1>> {
        Some(&self.parameters.get(&parameter)?.flat)
    }

    /// [`Extras::get`] in the storage type of `x`.
    pub(super) fn like(&self, parameter: Parameter, x: &Tensor<4>) -> Option<Tensor<1>> {
        Some(self.get(parameter)?.clone().cast(FloatDType::from(x.dtype())))
    }
}

/// What [`crate::attend`] returns.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Output {
    /// The result, `[batch, heads, seq_q, value_dim]`.
    pub out: Tensor<4>,
    /// The logarithm of the sum of exponentials of every row, `[batch, heads, seq_q]`, in f32, of one hop over pairs
    /// whose rows are normalised, with a logarithmic score: `softmax`, `ssa`, `fna`, `cosine`, `local`, `routed`. A row
    /// without keys has `-inf`. It carries no gradient.
    pub lse: Option<Tensor<3>>,
}

/// Which tokens take part, `true` = keep. The default keeps all.
#[derive(Debug, Clone, Default)]
pub struct Mask {
    /// Query `i` sees key `j` iff `j <= i + seq_kv - seq_q`.
    pub causal: bool,
    /// Keys that exist, `[batch, seq_kv]`.
    pub key: Option<Tensor<2, Bool>>,
    /// Queries that exist, `[batch, seq_q]`.
    pub query: Option<Tensor<2, Bool>>,
}

impl Mask {
    /// Every query sees every key.
    pub fn none() -> Self {
        Self::default()
    }

    /// No query sees a later key.
    pub fn causal() -> Self {
        Self { causal: true, ..Self::default() }
    }

    /// Only the keys `keep [batch, seq_kv]` exist.
    pub fn key_mask(keep: Tensor<2, Bool>) -> Self {
        Self { key: Some(keep), ..Self::default() }
    }

    /// Only the queries `keep [batch, seq_q]` exist.
    pub fn query_mask(keep: Tensor<2, Bool>) -> Self {
        Self { query: Some(keep), ..Self::default() }
    }

    /// The padding mask of self-attention: only the tokens `keep [batch, seq]` exist, as keys and as queries.
    pub fn padding(keep: Tensor<2, Bool>) -> Self {
        Self { causal: false, key: Some(keep.clone()), query: Some(keep) }
    }

    /// The same mask with causality added.
    pub fn with_causal(self) -> Self {
        Self { causal: true, ..self }
    }

    /// The same mask with `keep [batch, seq_q]` for the queries.
    pub fn with_query_mask(self, keep: Tensor<2, Bool>) -> Self {
        Self { query: Some(keep), ..self }
    }
}
