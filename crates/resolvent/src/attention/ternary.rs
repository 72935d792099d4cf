//! Projections whose weights are rounded to three values.

use burn::nn::Linear;
use resolvent_layers::TernaryMatrix;

use super::MultiHeadAttention;
use crate::{
    Result,
    ternary::{self, Layers, Packed},
};

impl MultiHeadAttention {
    /// The input projections, of `widths`, rounded.
    pub(super) fn ternary_inputs<'a>(&self, packed: &'a Packed, widths: &'a [usize]) -> Layers<'a> {
        let (weight, bias) = self.input_maps();
        Layers { weight, bias, widths, packed }
    }

    /// Where rounded weights are kept, if weights are rounded.
    pub(crate) fn packed(&self) -> Option<&Packed> {
        self.ternary.then_some(&self.packed)
    }

    /// The ternary matrices of all projections; none where weights are real.
    ///
    /// # Errors
    /// [`crate::Error::Mechanism`] for weights that are not finite.
    pub fn ternary_matrices(&self) -> Result<Vec<TernaryMatrix>> {
        if !self.ternary {
            return Ok(Vec::new());
        }
        let mut matrices = self.packed.matrices(&self.projection.weight.val(), &self.input_widths())?.to_vec();
        for layer in [Some(&self.output), self.extra.as_ref()].into_iter().flatten() {
            let [_, width] = layer.weight.dims();
            matrices.extend(self.packed.matrices(&layer.weight.val(), &[width])?.to_vec());
        }
        Ok(matrices)
    }

    /// The module for running alone: on Flex its ternary weights are packed, and the real ones, from which it would learn or be
    /// stored, are no more. It is as it was where weights are real.
    ///
    /// # Errors
    /// [`crate::Error::Mechanism`] for weights that are not finite.
    pub fn into_packed(mut self) -> Result<Self> {
        if self.ternary {
            let widths = self.input_widths();
            self.projection = ternary::only_packed(self.projection, &widths, &self.packed)?;
            let alone = |layer: Linear| {
                let [_, width] = layer.weight.dims();
                ternary::only_packed(layer, &[width], &self.packed)
            };
            self.output = alone(self.output)?;
            self.extra = self.extra.map(alone).transpose()?;
        }
        Ok(self)
    }
}
