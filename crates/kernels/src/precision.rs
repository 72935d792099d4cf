//! How exactly the products of a call are computed.

use crate::simd::{Bf16Unit, Level};

/// The operands of a call's products. What else a call computes, log-sum-exps, norms, sums and gradients, is f32 or wider in either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Precision {
    /// f32: as exact as the tensors.
    #[default]
    Full,
    /// bf16, with sums in f32: queries, keys, values and output gradients are rounded before they are multiplied, and so are the
    /// weights and their gradients before the second product. Each rounding is relative, 2^-9 at most.
    Bf16,
    /// Three products of bf16 for each of f32, with sums in f32: what [`Precision::Bf16`] rounds is split into its rounded value and what
    /// that leaves, rounded, so that 16 bits are kept, and the product of the second parts, of 2^-18, is left out. Relative errors are
    /// some 2^-16 of a product's terms. It runs where the processor has tiles (AMX), which can make it faster than f32.
    #[serde(rename = "bf16x3")]
    Bf16x3,
}

impl Precision {
    /// All of them.
    pub const ALL: &[Self] = &[Self::Full, Self::Bf16, Self::Bf16x3];

    /// Parts of bf16 that operands are split into; none in f32.
    pub(crate) const fn parts(self) -> usize {
        match self {
            Self::Full => 0,
            Self::Bf16 => 1,
            Self::Bf16x3 => 2,
        }
    }

    /// Name as in JSON and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Bf16 => "bf16",
            Self::Bf16x3 => "bf16x3",
        }
    }

    /// The precision of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|precision| precision.name() == name)
    }
}

/// In which precision a call runs, and by which instructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Arithmetic {
    /// What was asked for: see [`crate::Operator::with_precision`].
    pub asked: Precision,
    /// What runs.
    pub runs: Precision,
    /// The instructions of the products: a [`Level`] of f32's, a [`Bf16Unit`] of bf16's.
    pub instructions: &'static str,
    /// Why.
    pub reason: &'static str,
}

impl Arithmetic {
    pub(crate) const fn full(asked: Precision, level: Level, reason: &'static str) -> Self {
        Self { asked, runs: Precision::Full, instructions: level.name(), reason }
    }

    /// What was asked for, by this unit.
    pub(crate) const fn bf16(asked: Precision, unit: Bf16Unit) -> Self {
        let reason = match (unit, asked) {
            (Bf16Unit::Widened, _) => {
                "no instruction of this level multiplies bf16: rounded, widened in registers, and slower than f32"
            }
            (Bf16Unit::Avx512, Precision::Bf16x3) => {
                "three products of bf16 pairs in vectors for each of f32, and slower than that"
            }
            (Bf16Unit::Avx512, _) => "products of bf16 pairs in vectors",
            (Bf16Unit::Amx, Precision::Bf16x3) => "three products of bf16 tiles for each of f32",
            (Bf16Unit::Amx, _) => "products of bf16 tiles",
        };
        Self { asked, runs: asked, instructions: unit.name(), reason }
    }
}
