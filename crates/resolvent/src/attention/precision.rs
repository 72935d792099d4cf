//! What the products of a module are computed in, and what has none of less than f32.

use burn::tensor::{DType, Tensor};

use super::{MultiHeadAttention, field};
use crate::{Error, Precision, Result, ops, ternary::Products};

impl MultiHeadAttention {
    /// How the layers of the module, and of the MLP beside it, multiply.
    pub(crate) fn products(&self) -> Products<'_> {
        self.packed().map_or(Products::Real(self.precision), Products::Ternary)
    }

    /// Refuses products of less than f32 of tensors that are not for the kernels, and of ternary weights.
    pub(crate) fn check_precision(&self, x: &Tensor<3>) -> Result<()> {
        if self.precision == Precision::Full {
            return Ok(());
        }
        let (op, precision, dtype) = ("attention", self.precision, x.dtype());
        field("ternary", self.ternary, !self.ternary, "false with precision bf16")?;
        ops::check_precision(op, precision, self.strategy, (&x.device(), dtype))?;
        if dtype == DType::F32 {
            return Ok(());
        }
        let remedy = "its layers take f32, of which they round the operands; cast the model and the tokens to f32";
        Err(Error::Precision { op, precision, what: format!("{dtype:?}"), remedy })
    }
}
