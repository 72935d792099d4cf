//! The products of bytes that x86 has.

use std::arch::x86_64::*;

use super::{Block, NARROW, Quad, ROWS, WIDE};

/// Proof that the processor has AVX2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx2(());

/// Proof that the processor has AVX-512 with products of bytes that sum in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Vnni(());

impl Avx2 {
    pub fn detect() -> Option<Self> {
        std::arch::is_x86_feature_detected!("avx2").then_some(Self(()))
    }

    #[inline(always)]
    pub fn dots<const T: usize>(self, digits: &[Block], codes: &[[Quad; T]]) -> [[i32; ROWS]; T] {
        // SAFETY: this value is the proof of the feature.
        unsafe { avx2(digits, codes) }
    }
}

impl Vnni {
    pub fn detect() -> Option<Self> {
        use std::arch::is_x86_feature_detected as has;
        (has!("avx512f") && has!("avx512vnni")).then_some(Self(()))
    }

    #[inline(always)]
    pub fn dots<const T: usize>(self, digits: &[Block], codes: &[[Quad; T]]) -> [[i32; ROWS]; T] {
        // A sum of its own for each of five blocks in turn: a product takes longer to arrive than the next to begin.
        // SAFETY: this value is the proof of the features.
        unsafe { if T == 1 { vnni::<T, 5>(digits, codes) } else { vnni::<T, 1>(digits, codes) } }
    }
}

/// `IN_TURN` divides the number of blocks.
#[target_feature(enable = "avx512f,avx512vnni")]
fn vnni<const T: usize, const IN_TURN: usize>(digits: &[Block], codes: &[[Quad; T]]) -> [[i32; ROWS]; T] {
    let mut sums = [[_mm512_setzero_si512(); T]; IN_TURN];
    for (blocks, codes) in digits.as_chunks::<IN_TURN>().0.iter().zip(codes.as_chunks::<IN_TURN>().0) {
        for ((block, quads), sums) in blocks.iter().zip(codes).zip(&mut sums) {
            // SAFETY: a block is 64 bytes, of no alignment.
            let block = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
            for (sum, quad) in sums.iter_mut().zip(quads) {
                let quad = _mm512_set1_epi32(i32::from_ne_bytes(quad.map(|code| code as u8)));
                *sum = _mm512_dpbusd_epi32(*sum, block, quad);
            }
        }
    }
    let mut all = [[0; ROWS]; T];
    for (t, lanes) in all.iter_mut().enumerate() {
        let sum = sums.iter().fold(_mm512_setzero_si512(), |sum, sums| _mm512_add_epi32(sum, sums[t]));
        // SAFETY: the lanes are 64 bytes, of no alignment.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), sum) };
    }
    all
}

#[target_feature(enable = "avx2")]
fn avx2<const T: usize>(digits: &[Block], codes: &[[Quad; T]]) -> [[i32; ROWS]; T] {
    let mut all = [[0; ROWS]; T];
    // The 16 registers hold the sums of eight tokens with half of the rows, beside their factors.
    for half in 0..2 {
        let mut wide = [_mm256_setzero_si256(); T];
        for (blocks, codes) in digits.chunks(NARROW).zip(codes.chunks(NARROW)) {
            let mut narrow = [_mm256_setzero_si256(); T];
            for (block, quads) in blocks.iter().zip(codes) {
                let rows = &block.as_chunks::<{ ROWS * WIDE / 2 }>().0[half];
                // SAFETY: half a block is 32 bytes, of no alignment.
                let rows = unsafe { _mm256_loadu_si256(rows.as_ptr().cast()) };
                for (sum, quad) in narrow.iter_mut().zip(quads) {
                    let quad = _mm256_set1_epi32(i32::from_ne_bytes(quad.map(|code| code as u8)));
                    *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(rows, quad));
                }
            }
            for (wide, narrow) in wide.iter_mut().zip(narrow) {
                *wide = _mm256_add_epi32(*wide, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
            }
        }
        for (lanes, wide) in all.iter_mut().zip(wide) {
            let lanes = &mut lanes.as_chunks_mut::<{ ROWS / 2 }>().0[half];
            // SAFETY: half of the lanes is 32 bytes, of no alignment.
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), wide) };
        }
    }
    all
}
