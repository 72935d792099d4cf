//! Values of the pairs of one query, for decoding.

use pulp::{Simd, WithSimd};

use crate::score::contract::PairScore;

pub(super) struct RowValues<'a, T> {
    pub score: &'a T,
    pub terms: &'a mut [f32],
    pub bias: Option<&'a [f32]>,
}

impl<T: PairScore> WithSimd for RowValues<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (head, tail) = S::as_mut_simd_f32s(self.terms);
        let last = simd.partial_load_f32s(tail);
        let last = if let Some(bias) = self.bias {
            let (bias, rest) = S::as_simd_f32s(bias);
            for (term, bias) in head.iter_mut().zip(bias) {
                *term = self.score.biased_value(simd, *term, *bias);
            }
            self.score.biased_value(simd, last, simd.partial_load_f32s(rest))
        } else {
            for term in head {
                *term = self.score.value(simd, *term);
            }
            self.score.value(simd, last)
        };
        simd.partial_store_f32s(tail, last);
    }
}
