//! `<dout_i, out_i>`: what rows that sum to one take out of the gradients of their weights.

use pulp::{Simd, WithSimd};

use crate::{call::TokenRows, simd::Level};

/// Rows that are summed beside each other, so that none waits for its own last multiply-add.
const ROWS: usize = 8;

/// `out_i = <x_i, f_i y_i>`, with `f_i` of `factors` (1 where there are none), summed channel by channel as the product of a tile
/// sums. A row with all its weight at one key has that key's value for its result: what is taken out then equals the
/// key's own product to the last bit, and the gradient is zero, not rounding times the scale of the scores.
pub(crate) fn contractions(
    level: Level,
    x: TokenRows<'_>,
    (y, factors): (TokenRows<'_>, Option<&[f32]>),
    out: &mut [f32],
) {
    level.dispatch(Contractions { x, y, factors, out });
}

struct Contractions<'a> {
    x: TokenRows<'a>,
    y: TokenRows<'a>,
    factors: Option<&'a [f32]>,
    out: &'a mut [f32],
}

impl WithSimd for Contractions<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, y, factors, out } = self;
        let (blocks, rest) = out.as_chunks_mut::<ROWS>();
        let first_of_rest = blocks.len() * ROWS;
        for (n, block) in blocks.iter_mut().enumerate() {
            *block = rows(simd, n * ROWS, x, (y, factors));
        }
        for (n, out) in rest.iter_mut().enumerate() {
            [*out] = rows(simd, first_of_rest + n, x, (y, factors));
        }
    }
}

/// `<x, y>` of `R` pairs of rows of equal length, those of `y` times their scales, summed channel by channel.
#[inline(always)]
pub(in crate::structure) fn dots_in_order<S: Simd, const R: usize>(
    simd: S,
    x: [&[f32]; R],
    y: [&[f32]; R],
    scales: [f32; R],
) -> [f32; R] {
    let mut sums = [simd.splat_f32s(0.0); R];
    for channel in 0..x[0].len() {
        for n in 0..R {
            let scaled = simd.mul_f32s(simd.splat_f32s(y[n][channel]), simd.splat_f32s(scales[n]));
            sums[n] = simd.mul_add_e_f32s(simd.splat_f32s(x[n][channel]), scaled, sums[n]);
        }
    }
    let mut out = [0.0; R];
    for (out, sum) in out.iter_mut().zip(&sums) {
        // Every lane of a vector holds the same.
        *out = bytemuck::cast_slice::<S::f32s, f32>(std::slice::from_ref(sum))[0];
    }
    out
}

/// The results of `R` rows from `first` on.
#[inline(always)]
fn rows<S: Simd, const R: usize>(
    simd: S,
    first: usize,
    x: TokenRows<'_>,
    (y, factors): (TokenRows<'_>, Option<&[f32]>),
) -> [f32; R] {
    let (mut left, mut right, mut scales) = ([&[][..]; R], [&[][..]; R], [1.0; R]);
    for n in 0..R {
        (left[n], right[n]) = (&x.row(first + n)[..x.channels], &y.row(first + n)[..x.channels]);
        if let Some(factors) = factors {
            scales[n] = factors[first + n];
        }
    }
    dots_in_order(simd, left, right, scales)
}
