//! The product on any instruction set: both halves of a pair become f32 in registers.

use pulp::{Simd, WithSimd};

use super::{Left, Output, Right, Size};
use crate::simd::product::vectors_mut;

pub(super) struct Product<'a> {
    pub size: Size,
    pub left: Left<'a>,
    pub right: Right<'a>,
    pub into: Output<'a>,
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut row = 0;
        while row + 6 <= self.size.rows {
            self.band::<S, 6>(simd, row);
            row += 6;
        }
        if row + 4 <= self.size.rows {
            self.band::<S, 4>(simd, row);
            row += 4;
        }
        while row < self.size.rows {
            self.band::<S, 1>(simd, row);
            row += 1;
        }
    }
}

impl Product<'_> {
    /// All columns of the `M` rows from `row`.
    #[inline(always)]
    fn band<S: Simd, const M: usize>(&mut self, simd: S, row: usize) {
        let mut col = 0;
        if const { S::REGISTER_COUNT >= 32 } {
            while col + 4 * S::F32_LANES <= self.size.cols {
                self.block::<S, M, 4>(simd, row, col);
                col += 4 * S::F32_LANES;
            }
        }
        if const { S::F32_LANES > 1 } {
            while col + 2 * S::F32_LANES <= self.size.cols {
                self.block::<S, M, 2>(simd, row, col);
                col += 2 * S::F32_LANES;
            }
        }
        while col < self.size.cols {
            self.block::<S, M, 1>(simd, row, col);
            col += S::F32_LANES;
        }
    }

    #[inline(always)]
    fn block<S: Simd, const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize) {
        let Self { size, left, right, into } = self;
        let high = simd.splat_u32s(0xffff_0000);
        let mut sums = [[simd.splat_f32s(0.0); N]; M];
        for pair in 0..size.pairs {
            let lanes = &right.data[pair * right.stride + col..][..N * S::F32_LANES];
            let (lanes, _) = S::as_simd_u32s(lanes);
            let mut halves = [[simd.splat_f32s(0.0); N]; 2];
            for n in 0..N {
                let even = simd.wrapping_dyn_shl_u32s(lanes[n], simd.splat_u32s(16));
                halves[0][n] = simd.transmute_f32s_u32s(even);
                halves[1][n] = simd.transmute_f32s_u32s(simd.and_u32s(lanes[n], high));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let x = left.data[(row + m) * left.stride + pair];
                let [even, odd] = [x << 16, x & 0xffff_0000].map(|x| simd.splat_f32s(f32::from_bits(x)));
                for n in 0..N {
                    sums[n] = simd.mul_add_e_f32s(even, halves[0][n], sums[n]);
                    sums[n] = simd.mul_add_e_f32s(odd, halves[1][n], sums[n]);
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            let row = vectors_mut::<S, N>(into.data, (row + m) * into.stride + col);
            for (out, &sum) in row.iter_mut().zip(sums) {
                *out = if into.add { simd.add_f32s(*out, sum) } else { sum };
            }
        }
    }
}
