//! Layers whose products are of bf16: operands are rounded to the nearest, sums are f32. Tensors, biases, the GELU and gradients stay
//! f32, so that weights can be f32 master weights of a training in mixed precision.

mod mlp;
mod operands;
mod product;

use resolvent_kernels::simd::{
    Level,
    bf16::{Bf16Products, Bf16Unit},
};

use self::operands::{Memory, Panels};
use crate::{
    LinearGradients, Result,
    linear::{column_sums, inputs},
    rows::area,
};

/// The layers of this crate with products of bf16.
///
/// Each operand is rounded once in a call, relatively by 2^-9 at most, and each product summed along its whole depth in one order: bits
/// depend neither on the threads nor on the other rows.
///
/// ```
/// use resolvent_layers::bf16::Bf16Layers;
/// // 257 has no bf16, 256 and 258 are as near: the even one is taken.
/// let y = Bf16Layers::selected()?.linear(2, &[1.0, 2.0, 3.0, 257.0], &[10.0, 100.0], &[0.5]);
/// assert_eq!(y, [210.5, 25630.5]);
/// # Ok::<(), resolvent_layers::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Bf16Layers {
    level: Level,
    unit: Bf16Unit,
    products: Bf16Products,
}

impl Bf16Layers {
    /// By the instructions that calls use unless they name others.
    ///
    /// # Errors
    /// As [`Level::selected`].
    pub fn selected() -> Result<Self> {
        let level = Level::selected()?;
        let unit = Bf16Unit::available(level).last().copied().unwrap_or(Bf16Unit::Widened);
        Ok(Self::new(level, unit).expect("the unit is available"))
    }

    /// By these instructions. `None` where the processor or the `level` lacks them.
    pub fn new(level: Level, unit: Bf16Unit) -> Option<Self> {
        Some(Self { level, unit, products: Bf16Products::new(unit, level)? })
    }

    /// The instructions that multiply.
    pub fn unit(&self) -> Bf16Unit {
        self.unit
    }

    /// [`crate::linear`] with products of bf16: x and weight are rounded.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn linear(&self, rows: usize, x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f32> {
        let inputs = inputs(rows, x, weight, bias.len());
        let mut memory = Memory::default();
        let weight = Panels::of(self.products, weight, [inputs, bias.len()], &mut memory);
        self.times(rows, x, weight, Some(bias))
    }

    /// [`crate::linear_backward`] with products of bf16: x, weight and dout are rounded. The gradient of the bias is a sum in f32.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn linear_backward(
        &self,
        rows: usize,
        x: &[f32],
        weight: &[f32],
        dout: &[f32],
        outputs: usize,
        wanted: [bool; 3],
    ) -> LinearGradients {
        let inputs = inputs(rows, x, weight, outputs);
        assert_eq!(dout.len(), area(rows, outputs), "linear_backward: dout must be [rows, outputs]");
        let [dx, dweight, dbias] = wanted;
        LinearGradients {
            dx: dx.then(|| {
                let mut memory = Memory::default();
                let right = Panels::of_transposed(self.products, weight, [outputs, inputs], &mut memory);
                self.times(rows, dout, right, None)
            }),
            dweight: dweight.then(|| self.weight_gradient(rows, x, inputs, dout, outputs)),
            dbias: dbias.then(|| column_sums(dout, outputs)),
        }
    }
}
