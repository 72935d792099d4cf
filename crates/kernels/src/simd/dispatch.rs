//! Runs a kernel that is generic over `pulp::Simd` on one instruction set.

use pulp::WithSimd;

use super::Level;

impl Level {
    /// Runs `op` compiled for this level. A level that the processor lacks runs the portable code; `Operator` refuses
    /// such a level before it gets here.
    #[inline]
    pub fn dispatch<Op: WithSimd>(self, op: Op) -> Op::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => match pulp::x86::V4::try_new() {
                Some(simd) => pulp::Simd::vectorize(simd, op),
                None => portable(op),
            },
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => match pulp::x86::V3::try_new() {
                Some(simd) => pulp::Simd::vectorize(simd, op),
                None => portable(op),
            },
            #[cfg(target_arch = "aarch64")]
            Level::Neon => match pulp::aarch64::Neon::try_new() {
                Some(simd) => pulp::Simd::vectorize(simd, op),
                None => portable(op),
            },
            _ => portable(op),
        }
    }
}

/// Not inlined: `dispatch` calls it in three places, and all that `op` does would be compiled in each of them.
#[inline(never)]
fn portable<Op: WithSimd>(op: Op) -> Op::Output {
    pulp::Simd::vectorize(pulp::Scalar, op)
}
