//! What one call is applied to: tensors and masks, as slices.

use super::{ClusterPlan, ExtraGradients, Extras, Strided};
use crate::{Error, Result};

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
/// [`f64`]). All arithmetic of the fast paths is f32 with f32 or wider accumulation, unless
/// [`crate::Operator::with_precision`] asks for products of bf16.
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

/// [`Inputs`] whose batch elements, heads and tokens lie anywhere; the channels of a token lie side by side.
#[derive(Debug, Clone, Copy)]
pub struct StridedInputs<'a, T> {
    /// Queries, `[batch, heads, seq_q, head_dim]`.
    pub q: Strided<&'a [T]>,
    /// Keys, `[batch, kv_heads, seq_kv, head_dim]`; `None` iff the mechanism is tied.
    pub k: Option<Strided<&'a [T]>>,
    /// Values, `[batch, kv_heads, seq_kv, value_dim]`.
    pub v: Strided<&'a [T]>,
    /// The mechanism's own tensors.
    pub extras: Extras<'a>,
}

/// Where [`crate::Operator::backward_strided`] writes: [`Gradients`] that lie anywhere. All rows are overwritten, what lies between them
/// stays.
#[derive(Debug)]
pub struct StridedGradients<'a, T> {
    /// Gradient of `q`; holds both paths when tied.
    pub dq: Strided<&'a mut [T]>,
    /// Gradient of `k`, summed over the heads that it serves; `None` iff tied.
    pub dk: Option<Strided<&'a mut [T]>>,
    /// Gradient of `v`, likewise.
    pub dv: Strided<&'a mut [T]>,
    /// Gradients of the mechanism's own tensors: those that are wanted.
    pub extras: ExtraGradients<'a>,
}

impl<T> StridedGradients<'_, T> {
    /// The same room for a shorter time.
    pub(crate) fn reborrow(&mut self) -> StridedGradients<'_, T> {
        let Self { dq, dk, dv, extras } = self;
        let dk = dk.as_mut().map(Strided::reborrow);
        StridedGradients { dq: dq.reborrow(), dk, dv: dv.reborrow(), extras: extras.reborrow() }
    }
}

/// First non-finite element of `data`, as an error naming `tensor`.
pub fn check_finite(tensor: &'static str, data: &[f32]) -> Result<()> {
    match data.iter().position(|x| !x.is_finite()) {
        Some(index) => Err(Error::NonFinite { tensor, index, value: data[index].into() }),
        None => Ok(()),
    }
}
