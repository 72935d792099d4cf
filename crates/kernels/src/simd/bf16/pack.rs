//! Rounding to bf16 and transposing, on every processor.

use pulp::Simd;

use super::{ROWS, pairs};

/// The nearest bf16, as f32.
#[inline(always)]
pub(crate) fn nearest(x: f32) -> f32 {
    f32::from_bits(bits(x) << 16)
}

/// A vector of [`nearest`]; NaN as arithmetic makes it stays such.
#[inline(always)]
pub(crate) fn round<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let exact = simd.transmute_u32s_f32s(x);
    let odd = simd.and_u32s(simd.wrapping_dyn_shr_u32s(exact, simd.splat_u32s(16)), simd.splat_u32s(1));
    let above = simd.add_u32s(exact, simd.add_u32s(odd, simd.splat_u32s(0x7fff)));
    simd.transmute_f32s_u32s(simd.and_u32s(above, simd.splat_u32s(0xffff_0000)))
}

/// The nearest bf16, to even where two are as near, in the low half.
#[inline(always)]
fn bits(x: f32) -> u32 {
    let exact = x.to_bits();
    let rounded = exact.wrapping_add(0x7fff + ((exact >> 16) & 1)) >> 16;
    // Adding could turn NaN into a number.
    if x.is_nan() { 0x7fc0 } else { rounded }
}

/// The bits of a number's first part, or of its second: what rounding left, rounded.
#[inline(always)]
fn part<const SECOND: bool>(x: f32) -> u32 {
    bits(if SECOND { x - nearest(x) } else { x })
}

#[inline(always)]
pub(super) fn round_row<const SECOND: bool>(row: &[f32], out: &mut [u32]) {
    let (whole, rest) = row.as_chunks::<2>();
    let (to, pad) = out.split_at_mut(whole.len());
    to.iter_mut().zip(whole).for_each(|(to, &[even, odd])| *to = part::<SECOND>(even) | part::<SECOND>(odd) << 16);
    pad.fill(0);
    if let ([last], Some(to)) = (rest, pad.first_mut()) {
        *to = part::<SECOND>(*last);
    }
}

#[inline(always)]
pub(super) fn weave<const SECOND: bool>([even, odd]: [&[f32]; 2], out: &mut [u32]) {
    let (to, pad) = out.split_at_mut(even.len());
    let pair = |even, odd| part::<SECOND>(even) | part::<SECOND>(odd) << 16;
    to.iter_mut().zip(even).zip(odd).for_each(|((to, &even), &odd)| *to = pair(even, odd));
    pad.fill(0);
}

/// Calls `round` with the rows of a tile and what takes their pairs; fills what takes rows beyond them with zeros.
#[inline(always)]
pub(super) fn each_rounded(
    (x, stride): (&[f32], usize),
    [rows, cols]: [usize; 2],
    out: (&mut [u32], usize),
    round: impl Fn(&[f32], &mut [u32]),
) {
    for (n, out) in out.0.chunks_mut(out.1).enumerate().take(rows.next_multiple_of(ROWS)) {
        let out = &mut out[..pairs(cols)];
        if n < rows { round(&x[n * stride..][..cols], out) } else { out.fill(0) }
    }
}

/// Calls `weave` with pairs of rows of a tile, the last of them zeros where there is none, and with zeros up to whole tiles.
#[inline(always)]
pub(super) fn each_pair(
    (x, stride): (&mut [f32], usize),
    [rows, cols]: [usize; 2],
    weave: impl Fn(&mut [f32], &mut [f32]),
) {
    for (pair, two) in x.chunks_mut(2 * stride).enumerate().take(pairs(rows)) {
        let (even, odd) = two.split_at_mut(stride);
        let (even, odd) = (&mut even[..cols], &mut odd[..cols]);
        match rows.saturating_sub(2 * pair) {
            0 => [even, odd].into_iter().for_each(|row| row.fill(0.0)),
            1 => {
                odd.fill(0.0);
                weave(even, odd);
            }
            _ => weave(even, odd),
        }
    }
}

/// Rounds the rows of a tile in pairs, as [`weave`], in the place of the even ones; of `two` parts the second in that of the odd ones.
#[inline(always)]
pub(super) fn weave_in_place(x: (&mut [f32], usize), sizes: [usize; 2], two: bool) {
    each_pair(x, sizes, |even, odd| {
        for (even, odd) in even.iter_mut().zip(odd) {
            let (a, b) = (*even, *odd);
            *even = f32::from_bits(part::<false>(a) | part::<false>(b) << 16);
            if two {
                *odd = f32::from_bits(part::<true>(a) | part::<true>(b) << 16);
            }
        }
    });
}

#[inline(always)]
pub(super) fn transpose([rows, cols]: [usize; 2], (x, stride): (&[u32], usize), out: (&mut [u32], usize)) {
    for row in 0..rows {
        for (col, &x) in x[row * stride..][..cols].iter().enumerate() {
            out.0[col * out.1 + row] = x;
        }
    }
}
