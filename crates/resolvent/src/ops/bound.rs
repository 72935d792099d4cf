//! A mechanism bound to the sizes of a call: of a batch, or of sequences that lie end to end.

use std::sync::Arc;

use resolvent_kernels::{
    ClusterPlan, Element, ExtraGradients, Extras, Heads, Mask, Operator, Result, Scratch, Sequences, Strided,
    StridedGradients, StridedInputs, VarlenInputs, VarlenOperator,
};

use super::fused::Saved;
use crate::{Mechanism, Shape};

/// What carries out a call. Tensors are `[batch, heads, tokens, channels]`, which lie anywhere, either way.
#[derive(Debug, Clone)]
pub enum Bound {
    /// One length for all of a batch.
    Batch(Operator),
    /// Sequences end to end, in a batch of one, and the plans of a clustered mechanism.
    Sequences(VarlenOperator, Option<Arc<[ClusterPlan]>>),
}

impl Bound {
    pub fn mechanism(&self) -> &Mechanism {
        match self {
            Self::Batch(operator) => operator.mechanism(),
            Self::Sequences(operator, _) => operator.mechanism(),
        }
    }

    pub fn shape(&self) -> Shape {
        match self {
            Self::Batch(operator) => *operator.shape(),
            Self::Sequences(operator, _) => {
                let (Heads { heads, head_dim, value_dim, .. }, sequences) = (operator.heads(), operator.sequences());
                let [seq_q, seq_kv] = [sequences.tokens(), sequences.keys()];
                Shape { batch: 1, heads, seq_q, seq_kv, head_dim, value_dim }
            }
        }
    }

    /// Rows of `out` per head.
    pub fn out_seq(&self) -> usize {
        match self {
            Self::Batch(operator) => operator.out_seq(),
            Self::Sequences(operator, _) => operator.sequences().tokens(),
        }
    }

    pub fn out_len(&self) -> usize {
        let shape = self.shape();
        shape.slices() * self.out_seq() * shape.value_dim
    }

    /// Elements that the forward pass leaves for the backward pass.
    pub fn stats(&self) -> usize {
        match self {
            Self::Batch(operator) => operator.plan().stats,
            Self::Sequences(operator, _) => operator.plan().stats,
        }
    }

    /// Whether the system gives what a forward pass needs beside its tensors.
    pub fn check_memory(&self) -> resolvent_kernels::Result<()> {
        match self {
            Self::Batch(operator) => operator.plan().check_memory(false),
            Self::Sequences(operator, _) => operator.plan().check_memory(false),
        }
    }

    pub fn lse(&self, stats: &[f32]) -> Option<Vec<f32>> {
        match self {
            Self::Batch(operator) => operator.lse(stats).map(<[f32]>::to_vec),
            Self::Sequences(operator, _) => operator.lse(stats),
        }
    }

    pub fn forward<T: Element>(
        &self,
        inputs: &StridedInputs<'_, T>,
        mask: &Mask<'_>,
        out: Strided<&mut [T]>,
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        match self {
            Self::Batch(operator) => operator.forward_strided(inputs, mask, out, stats, scratch),
            Self::Sequences(operator, plans) => {
                operator.forward(&varlen(inputs, plans.as_deref()), mask, out, stats, scratch)
            }
        }
    }

    pub fn backward<T: Element>(
        &self,
        inputs: &StridedInputs<'_, T>,
        mask: &Mask<'_>,
        saved: Saved<'_, Strided<&[T]>>,
        gradients: &mut StridedGradients<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Saved { out, stats, dout } = saved;
        match self {
            Self::Batch(operator) => operator.backward_strided(inputs, mask, out, stats, dout, gradients, scratch),
            Self::Sequences(operator, plans) => {
                operator.backward(&varlen(inputs, plans.as_deref()), mask, out, stats, dout, gradients, scratch)
            }
        }
    }

    /// Views of projections that lie side by side.
    pub fn packed_inputs<'a, T>(&self, packed: &'a [T], extras: Extras<'a>) -> Result<StridedInputs<'a, T>> {
        match self {
            Self::Batch(operator) => operator.packed_inputs(packed, extras),
            Self::Sequences(operator, _) => {
                let VarlenInputs { q, k, v, extras, .. } = operator.packed_inputs(packed, extras, None)?;
                Ok(StridedInputs { q, k, v, extras })
            }
        }
    }

    /// [`Bound::backward`] whose gradients of q, k and v lie side by side.
    pub fn backward_packed<T: Element>(
        &self,
        inputs: &StridedInputs<'_, T>,
        mask: &Mask<'_>,
        saved: Saved<'_, Strided<&[T]>>,
        into: (&mut [T], &mut ExtraGradients<'_>),
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Saved { out, stats, dout } = saved;
        match self {
            Self::Batch(operator) => operator.backward_packed(inputs, mask, out, stats, dout, into, scratch),
            Self::Sequences(operator, plans) => {
                operator.backward_packed(&varlen(inputs, plans.as_deref()), mask, out, stats, dout, into, scratch)
            }
        }
    }
}

fn varlen<'a, T>(inputs: &StridedInputs<'a, T>, clusters: Option<&'a [ClusterPlan]>) -> VarlenInputs<'a, T> {
    let StridedInputs { q, k, v, extras } = *inputs;
    VarlenInputs { q, k, v, extras, clusters }
}

/// The operator of sequences, with the plans that a clustered mechanism makes of `q` and `k`, both as one piece `[heads, tokens, head_dim]`.
pub(super) fn of_sequences(operator: VarlenOperator, [q, k]: [&[f32]; 2], extras: Extras<'_>) -> Result<Bound> {
    if operator.mechanism().clustering().is_none() {
        return Ok(Bound::Sequences(operator, None));
    }
    let (sequences, heads): (&Sequences, Heads) = (operator.sequences(), operator.heads());
    let view = |x, heads_of, tokens| Strided::heads_first(x, [heads_of, tokens, heads.head_dim]);
    let (q, k) = (view(q, heads.heads, sequences.tokens()), view(k, heads.kv_heads, sequences.keys()));
    // Planning reads no values.
    let v = vec![0.0; heads.value_dim];
    let v = Strided { data: &v[..], batch_stride: 0, head_stride: 0, token_stride: 0 };
    let inputs = VarlenInputs { q, k: (!operator.mechanism().tied).then_some(k), v, extras, clusters: None };
    let plans = operator.clusters(&inputs, &Mask::NONE, &mut Scratch::default())?;
    Ok(Bound::Sequences(operator, Some(plans.into())))
}
