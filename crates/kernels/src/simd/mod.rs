//! Run-time choice of the instruction set: kernels are generic over [`Simd`], and [`Level::dispatch`] runs them.

pub mod bf16;
mod dispatch;
pub(crate) mod distance;
pub(crate) mod math;
pub(crate) mod product;
pub(crate) mod rows;
pub(crate) mod stream;

use std::sync::OnceLock;

pub use pulp::{Simd, WithSimd};

pub use self::bf16::Bf16Unit;
pub use self::math::normal;

use crate::{Error, Result};

/// An instruction set that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Level {
    /// Plain Rust, on every processor.
    Portable,
    /// 128-bit NEON (aarch64).
    Neon,
    /// 256-bit AVX2 with FMA (x86-64-v3).
    Avx2,
    /// 512-bit AVX-512 (x86-64-v4).
    Avx512,
}

impl Level {
    /// Name as in the `RESOLVENT_SIMD` environment variable.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Every level that this processor runs, slowest first.
    pub fn available() -> Vec<Level> {
        #[cfg(target_arch = "x86_64")]
        let wider =
            [(Level::Avx2, pulp::x86::V3::try_new().is_some()), (Level::Avx512, pulp::x86::V4::try_new().is_some())];
        #[cfg(target_arch = "aarch64")]
        let wider = [(Level::Neon, pulp::aarch64::Neon::try_new().is_some())];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let wider: [(Level, bool); 0] = [];
        let runs = wider.into_iter().filter(|&(_, runs)| runs).map(|(level, _)| level);
        std::iter::once(Level::Portable).chain(runs).collect()
    }

    /// The level used unless a call names another: the one that the environment variable `RESOLVENT_SIMD` (`portable`,
    /// `neon`, `avx2`, `avx512`) names, else the fastest available. Read once.
    ///
    /// # Errors
    /// [`Error::Config`] when the variable names no level of this processor.
    pub fn selected() -> Result<Level> {
        static LEVEL: OnceLock<Option<Level>> = OnceLock::new();
        let level = LEVEL.get_or_init(|| match std::env::var("RESOLVENT_SIMD") {
            Ok(wanted) if !wanted.is_empty() => Level::available().into_iter().find(|l| l.name() == wanted),
            _ => Level::available().last().copied(),
        });
        level.ok_or_else(|| {
            let names: Vec<_> = Level::available().into_iter().map(Level::name).collect();
            let problem = format!("this processor runs nothing of that name; unset it, or use {}", names.join(" or "));
            Error::Config { field: "RESOLVENT_SIMD".into(), problem }
        })
    }
}
