//! What one call is applied to: sizes, tensors and masks, as slices.

use crate::{ClusterPlan, Error, ExtraGradients, Extras, Result};

/// The sizes of one attention call. Every tensor is dense and row-major:
/// `q [batch, heads, seq_q, head_dim]`, `k [batch, heads, seq_kv, head_dim]`,
/// `v [batch, heads, seq_kv, value_dim]`, `out [batch, heads, seq_q, value_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Independent sequences.
    pub batch: usize,
    /// Independent heads of one sequence.
    pub heads: usize,
    /// Query tokens.
    pub seq_q: usize,
    /// Key and value tokens.
    pub seq_kv: usize,
    /// Channels of a query or key.
    pub head_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

impl Shape {
    /// Self-attention of `seq` tokens with as many value as key channels.
    pub const fn square(batch: usize, heads: usize, seq: usize, dim: usize) -> Self {
        Self { batch, heads, seq_q: seq, seq_kv: seq, head_dim: dim, value_dim: dim }
    }

    /// Number of independent problems: `batch * heads`. This and the lengths below saturate where a product leaves `usize`:
    /// no slice is as long, and so none fits such a shape.
    pub const fn slices(&self) -> usize {
        self.batch.saturating_mul(self.heads)
    }

    /// Elements of `q`.
    pub const fn q_len(&self) -> usize {
        self.slices().saturating_mul(self.seq_q).saturating_mul(self.head_dim)
    }

    /// Elements of `k`.
    pub const fn k_len(&self) -> usize {
        self.slices().saturating_mul(self.seq_kv).saturating_mul(self.head_dim)
    }

    /// Elements of `v`.
    pub const fn v_len(&self) -> usize {
        self.slices().saturating_mul(self.seq_kv).saturating_mul(self.value_dim)
    }

    /// Elements of a full-length `out`.
    pub const fn out_len(&self) -> usize {
        self.slices().saturating_mul(self.seq_q).saturating_mul(self.value_dim)
    }

    /// Whether counts of elements, and of operations on all pairs, stay far from wrapping: more than that no machine attends.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { batch, heads, seq_q, seq_kv, head_dim, value_dim } = *self;
        let product = |axes: &[usize]| axes.iter().try_fold(1_u64, |all, &axis| all.checked_mul(axis.max(1) as u64));
        let channels = head_dim.max(value_dim);
        let fits = |axes: &[usize], most: u64| product(axes).is_some_and(|n| n <= most);
        let most_elements = (1 << 40).min(isize::MAX as u64 / size_of::<f32>() as u64);
        if fits(&[batch, heads, seq_q.max(seq_kv), channels], most_elements)
            && fits(&[batch, heads, seq_q, seq_kv, channels], 1 << 52)
        {
            return Ok(());
        }
        let got = format!("{batch} x {heads} x {seq_q} queries, {seq_kv} keys x {head_dim}, {value_dim} channels");
        Err(Error::OutOfRange { field: "shape", got, expected: "at most 2^40 elements per tensor and 2^52 per pair" })
    }
}

/// Boolean masks of one call, `true` = keep. A masked token is absent: it enters no sum, norm or count, its content
/// changes no output and it gets exactly zero gradient; a masked query's output row is zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mask<'a> {
    /// Query `i` sees key `j` iff `j <= i + seq_kv - seq_q` (bottom-right alignment).
    pub causal: bool,
    /// `[batch, seq_kv]`; `None` keeps all keys.
    pub key: Option<&'a [bool]>,
    /// `[batch, seq_q]`; `None` keeps all queries.
    pub query: Option<&'a [bool]>,
}

impl<'a> Mask<'a> {
    /// Every query sees every key.
    pub const NONE: Mask<'static> = Mask { causal: false, key: None, query: None };

    /// The padding mask of self-attention: `keep [batch, seq]` applies to keys and to queries.
    pub const fn padding(keep: &'a [bool]) -> Self {
        Self { causal: false, key: Some(keep), query: Some(keep) }
    }

    /// The same mask with causality added.
    pub const fn with_causal(self) -> Self {
        Self { causal: true, ..self }
    }
}

/// The tensors of a call in their storage type `T` ([`f32`], [`half::f16`] or [`half::bf16`]; the reference takes
/// [`f64`]). All arithmetic of the fast paths is f32 with f32 or wider accumulation.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, T> {
    /// Queries, `[batch, heads, seq_q, head_dim]`.
    pub q: &'a [T],
    /// Keys, `[batch, heads, seq_kv, head_dim]`; `None` iff the mechanism is tied (the keys are `q`).
    pub k: Option<&'a [T]>,
    /// Values, `[batch, heads, seq_kv, value_dim]`.
    pub v: &'a [T],
    /// The mechanism's own tensors.
    pub extras: Extras<'a>,
}

impl<'a, T> Inputs<'a, T> {
    /// The same tensors with a plan of the clusters.
    pub(crate) fn with_clusters(&self, plan: &'a ClusterPlan) -> Self {
        Self { extras: self.extras.with_clusters(plan), ..*self }
    }
}

/// Where [`crate::Operator::backward`] writes. Every slice is overwritten, not added to.
#[derive(Debug)]
pub struct Gradients<'a, T> {
    /// Gradient of `q`, same shape; holds both paths when tied.
    pub dq: &'a mut [T],
    /// Gradient of `k`, same shape; `None` iff tied.
    pub dk: Option<&'a mut [T]>,
    /// Gradient of `v`, same shape.
    pub dv: &'a mut [T],
    /// Gradients of the mechanism's own tensors: those that are wanted.
    pub extras: ExtraGradients<'a>,
}

impl<T> Gradients<'_, T> {
    /// The same room for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Gradients<'_, T> {
        Gradients { dq: self.dq, dk: self.dk.as_deref_mut(), dv: self.dv, extras: self.extras.reborrow() }
    }
}

/// First non-finite element of `data`, as an error naming `tensor`.
pub fn check_finite(tensor: &'static str, data: &[f32]) -> Result<()> {
    match data.iter().position(|x| !x.is_finite()) {
        Some(index) => Err(Error::NonFinite { tensor, index, value: data[index].into() }),
        None => Ok(()),
    }
}
