//! What is added to the logits of pairs, as a tensor.

use burn::tensor::{Bool, Int, Tensor, TensorData};
use resolvent_kernels::{Parameter, inner};

use super::super::Extras;
use crate::{Mechanism, Shape, mechanism::Bias};

/// What is added to the logits, and the pairs that are absent, each `[batch or 1, heads or 1, seq_q or 1, seq_kv or 1]`.
pub(super) struct Added {
    pub values: Tensor<4>,
    pub absent: Option<Tensor<4, Bool>>,
}

impl Added {
    /// Queries and keys without a pair, `[batch, heads, seq, 1]` each, those among them that masks leave out; none where pairs are
    /// absent for no other reason.
    pub fn unpaired(&self, shape: &Shape, masks: [&Option<Tensor<4, Bool>>; 2]) -> Option<[Tensor<4, Bool>; 2]> {
        let Shape { batch, heads, seq_q, seq_kv, .. } = *shape;
        let full = |mask: &Tensor<4, Bool>| mask.clone().expand([batch, heads, seq_q, seq_kv]);
        let absent = full(self.absent.as_ref()?);
        let absent = masks.into_iter().flatten().fold(absent, |absent, mask| absent.bool_or(full(mask)));
        Some([absent.clone().all_dim(3), absent.all_dim(2).swap_dims(2, 3)])
    }

    /// The bias of a call whose tensors are like `x`, where the mechanism has one.
    pub fn of(mechanism: &Mechanism, extras: &Extras, shape: &Shape, x: &Tensor<4>) -> Option<Self> {
        let bias = mechanism.bias?;
        let numbers = extras.like(Parameter::Bias, x).unwrap_or_else(|| {
            let default = mechanism.parameter_default(Parameter::Bias, shape);
            Tensor::from_data(default.as_slice(), (&x.device(), x.dtype()))
        });
        let sizes = mechanism.parameter_shape(Parameter::Bias, shape);
        if let Bias::Tensor(_) = bias {
            let numbers = numbers.reshape([sizes[0], sizes[1], sizes[2], sizes[3]]);
            let absent = numbers.clone().detach().equal_elem(f32::NEG_INFINITY);
            return Some(Self { values: numbers.mask_fill(absent.clone(), 0.0), absent: Some(absent) });
        }
        let Shape { heads, seq_q, seq_kv, .. } = *shape;
        let (at, factors) = inner::bias_entries(&bias, shape);
        let at = Tensor::<1, Int>::from_data(TensorData::new(at, [seq_q * seq_kv]), &x.device());
        let factors = Tensor::<1>::from_data(factors.as_slice(), (&x.device(), x.dtype()));
        let table = numbers.clone().reshape([heads, numbers.dims()[0] / heads]);
        let values = table.select(1, at).reshape([1, heads, seq_q, seq_kv]) * factors.reshape([1, 1, seq_q, seq_kv]);
        Some(Self { values, absent: None })
    }
}
