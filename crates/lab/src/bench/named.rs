//! What a benchmark's results are told apart by.

use resolvent_kernels::{Arithmetic, Plan, Strategy};

use super::{Point, Timing};
use crate::named;

named! {
    /// A pass that is timed.
    pub enum Pass {
        /// The forward pass.
        Forward = "forward",
        /// The forward and the backward pass together.
        Training = "forward + backward",
    }
}

impl Pass {
    /// What was measured of it.
    pub const fn of(self, point: &Point) -> Option<&Timing> {
        match self {
            Self::Forward => point.forward.as_ref(),
            Self::Training => point.training.as_ref(),
        }
    }
}

named! {
    /// What [`Strategy::Auto`] became.
    pub enum Carried {
        /// [`Strategy::Fused`].
        Fused = "fused",
        /// [`Strategy::Reference`].
        Reference = "reference",
    }
}

impl Carried {
    pub(super) const fn of(plan: &Plan) -> Self {
        if matches!(plan.strategy, Strategy::Reference) { Self::Reference } else { Self::Fused }
    }
}

named! {
    /// The instructions that make the products: a [`resolvent_kernels::simd::Level`] of f32's, a [`resolvent_kernels::simd::Bf16Unit`] of bf16's.
    pub enum Instructions {
        /// Plain Rust.
        Portable = "portable",
        /// NEON.
        Neon = "neon",
        /// AVX2 with FMA.
        Avx2 = "avx2",
        /// AVX-512.
        Avx512 = "avx512",
        /// Those of f32, on bf16 that is widened.
        Widened = "widened",
        /// AVX512-BF16.
        Avx512Bf16 = "avx512-bf16",
        /// AMX.
        AmxBf16 = "amx-bf16",
    }
}

impl Instructions {
    pub(super) fn of(arithmetic: &Arithmetic) -> Option<Self> {
        arithmetic.instructions.parse().ok()
    }
}

named! {
    /// The type of a call's tensors, and of its products where that is another.
    pub enum TensorType {
        /// f32.
        Float32 = "float32",
        /// bf16.
        Bfloat16 = "bfloat16",
        /// Tensors of f32 that are rounded to bf16 before they are multiplied.
        Float32ProductsOfBfloat16 = "float32, products of bfloat16",
    }
}

impl TensorType {
    /// Whether anything is rounded to bf16.
    pub const fn is_rounded(self) -> bool {
        !matches!(self, Self::Float32)
    }

    /// Bytes of an element of a tensor.
    pub const fn bytes(self) -> u64 {
        if matches!(self, Self::Bfloat16) { 2 } else { 4 }
    }
}

#[cfg(test)]
mod tests {
    use resolvent_kernels::simd::{Bf16Unit, Level};

    use super::*;

    #[test]
    fn all_instructions_have_a_name() {
        for level in Level::available() {
            assert_eq!(level.name().parse().map(Instructions::name), Ok(level.name()));
            for unit in Bf16Unit::available(level) {
                assert_eq!(unit.name().parse().map(Instructions::name), Ok(unit.name()));
            }
        }
    }
}
