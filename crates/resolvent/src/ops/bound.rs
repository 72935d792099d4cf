//! A mechanism bound to the sizes of a call: of a batch, or of sequences that lie end to end.

use std::sync::Arc;

use resolvent_kernels::{
    ClusterPlan, Element, Extras, Gradients, Heads, Inputs, Mask, Operator, Result, Scratch, Sequences, Strided,
    VarlenGradients, VarlenInputs, VarlenOperator,
};

use super::fused::Saved;
use crate::{Mechanism, Shape};

/// What carries out a call. Tensors are `[batch, heads, tokens, channels]` in one piece either way.
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

    pub fn lse(&self, stats: &[f32]) -> Option<Vec<f32>> {
        match self {
            Self::Batch(operator) => operator.lse(stats).map(<[f32]>::to_vec),
            Self::Sequences(operator, _) => operator.lse(stats),
        }
    }

    pub fn forward<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        mask: &Mask<'_>,
        out: &mut [T],
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        match self {
            Self::Batch(operator) => operator.forward(inputs, mask, out, stats, scratch),
            Self::Sequences(operator, plans) => {
                let out = Strided::heads_first(out, operator.sequences().tokens(), operator.heads().value_dim);
                operator.forward(&self.varlen(inputs, plans.as_deref()), mask, out, stats, scratch)
            }
        }
    }

    pub fn backward<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        mask: &Mask<'_>,
        saved: Saved<'_, &[T]>,
        gradients: &mut Gradients<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Saved { out, stats, dout } = saved;
        match self {
            Self::Batch(operator) => operator.backward(inputs, mask, out, stats, dout, gradients, scratch),
            Self::Sequences(operator, plans) => {
                let Heads { head_dim, value_dim, .. } = operator.heads();
                let [tokens, keys] = [operator.sequences().tokens(), operator.sequences().keys()];
                let Gradients { dq, dk, dv, extras } = gradients;
                let mut into = VarlenGradients {
                    dq: Strided::heads_first(&mut **dq, tokens, head_dim),
                    dk: dk.as_deref_mut().map(|dk| Strided::heads_first(dk, keys, head_dim)),
                    dv: Strided::heads_first(&mut **dv, keys, value_dim),
                    extras: extras.reborrow(),
                };
                let [out, dout] = [out, dout].map(|x| Strided::heads_first(x, tokens, value_dim));
                let inputs = self.varlen(inputs, plans.as_deref());
                operator.backward(&inputs, mask, out, stats, dout, &mut into, scratch)
            }
        }
    }

    fn varlen<'a, T>(&self, inputs: &Inputs<'a, T>, clusters: Option<&'a [ClusterPlan]>) -> VarlenInputs<'a, T> {
        let Shape { seq_q, seq_kv, head_dim, value_dim, .. } = self.shape();
        VarlenInputs {
            q: Strided::heads_first(inputs.q, seq_q, head_dim),
            k: inputs.k.map(|k| Strided::heads_first(k, seq_kv, head_dim)),
            v: Strided::heads_first(inputs.v, seq_kv, value_dim),
            extras: inputs.extras,
            clusters,
        }
    }
}

/// The operator of sequences, with the plans that a clustered mechanism makes of `q` and `k`, both as one piece `[heads, tokens, head_dim]`.
pub(super) fn of_sequences(operator: VarlenOperator, [q, k]: [&[f32]; 2], extras: Extras<'_>) -> Result<Bound> {
    if operator.mechanism().clustering().is_none() {
        return Ok(Bound::Sequences(operator, None));
    }
    let (sequences, heads): (&Sequences, Heads) = (operator.sequences(), operator.heads());
    let [q, k] =
        [(q, sequences.tokens()), (k, sequences.keys())].map(|(x, n)| Strided::heads_first(x, n, heads.head_dim));
    // Planning reads no values.
    let v = vec![0.0; heads.value_dim];
    let v = Strided { data: &v[..], head_stride: 0, token_stride: 0 };
    let inputs = VarlenInputs { q, k: (!operator.mechanism().tied()).then_some(k), v, extras, clusters: None };
    let plans = operator.clusters(&inputs, &Mask::NONE, &mut Scratch::default())?;
    Ok(Bound::Sequences(operator, Some(plans.into())))
}
