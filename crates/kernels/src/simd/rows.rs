//! Kernels on a block of token rows `x [n, d]`, row-major: what every mechanism in O(N d) is made of. Each reads a row
//! once; a block is meant to stay in the first-level cache from one kernel to the next.

use pulp::{Simd, WithSimd};

use super::{
    Level, distance,
    product::{FAR, Term},
    stream::stream_outer,
};

/// `out_j = x_j . y` for every row `x_j` of `x [out.len(), y.len()]`.
pub(crate) fn dots(level: Level, x: &[f32], y: &[f32], out: &mut [f32]) {
    debug_assert_eq!(x.len(), y.len() * out.len());
    level.dispatch(Dots { x, y, out });
}

/// `out_j`: the sum of a term over the channels of `x_j` and `y`, for every row `x_j` of `x [out.len(), y.len()]`.
pub(crate) fn terms(level: Level, term: Term, x: &[f32], y: &[f32], out: &mut [f32]) {
    debug_assert_eq!(x.len(), y.len() * out.len());
    match term {
        Term::Product => dots(level, x, y, out),
        Term::SquaredDifference => distance::squares(level, x, y, out),
        Term::Difference => distance::absolutes(level, x, y, out),
        Term::Chord => {
            distance::squares(level, x, y, out);
            let far = out.iter_mut().zip(x.chunks_exact(y.len())).filter(|(chord, _)| **chord > FAR);
            far.for_each(|(chord, x)| *chord = -x.iter().zip(y).map(|(x, y)| (x + y).powi(2)).sum::<f32>());
        }
    }
}

/// `out_j = |x_j|_2` for every row of `x [out.len(), dim]`, correct for any finite row whose norm is finite.
pub(crate) fn norms(level: Level, x: &[f32], dim: usize, out: &mut [f32]) {
    debug_assert_eq!(x.len(), dim * out.len());
    level.dispatch(SquareNorms { x, dim, out });
    if level.dispatch(|| out.iter().fold(true, |safe, e| safe & SAFE_SQUARES.contains(e))) {
        return level.dispatch(|| out.iter_mut().for_each(|e| *e = e.sqrt()));
    }
    for (e, row) in out.iter_mut().zip(x.chunks_exact(dim)) {
        let wide = || row.iter().map(|&c| f64::from(c) * f64::from(c)).sum::<f64>().sqrt() as f32;
        *e = if SAFE_SQUARES.contains(e) { e.sqrt() } else { wide() };
    }
}

/// Sums of squares within it have lost nothing to underflow of a term and have not overflowed.
const SAFE_SQUARES: std::ops::Range<f32> = 1e-30..1e30;

/// `acc += factor * sum_j w_j x_j`: f32 within the block, f64 from there on.
pub(crate) fn accumulate(level: Level, w: &[f32], x: &[f32], factor: f64, acc: &mut [f64]) {
    debug_assert_eq!(x.len(), w.len() * acc.len());
    level.dispatch(Accumulate { w, x, factor, acc });
}

/// What becomes of the rows that are written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    /// They are overwritten.
    Overwrite,
    /// They are overwritten past the caches, see [`stream_outer`].
    Stream,
    /// They are added to.
    Add,
}

impl Store {
    /// Bytes of one head's tensor beyond which it is written past the caches: a quarter of a 2 MiB second level, which
    /// also has to hold what is read.
    const STREAM_BYTES: usize = 512 << 10;

    /// Overwriting of a tensor of `len` f32 that is not read again soon.
    pub(crate) const fn fresh(len: usize) -> Self {
        if len * size_of::<f32>() > Self::STREAM_BYTES { Self::Stream } else { Self::Overwrite }
    }
}

/// `out_j = w_j y`, or `out_j += w_j y`, for every row of `out [w.len(), y.len()]`.
pub(crate) fn outer(level: Level, w: &[f32], y: &[f32], out: &mut [f32], store: Store) {
    debug_assert_eq!(out.len(), w.len() * y.len());
    match store {
        Store::Overwrite => level.dispatch(Outer::<false> { w, y, out }),
        Store::Stream => stream_outer(w, y, out),
        Store::Add => level.dispatch(Outer::<true> { w, y, out }),
    }
}

/// `out_j += w_j x_j` for every row of `x` and `out [w.len(), dim]`.
pub(crate) fn add_scaled(level: Level, w: &[f32], x: &[f32], dim: usize, out: &mut [f32]) {
    debug_assert!(x.len() == w.len() * dim && out.len() == x.len());
    level.dispatch(AddScaled { w, x, dim, out });
}

/// What [`normalise`] did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Normalised {
    /// The power of two that `w` was divided by.
    pub factor: f64,
    /// The sum of the magnitudes that `w` now holds.
    pub sum: f64,
}

/// Divides `w` by a power of two, exactly, so that its largest magnitude lies in [1, 2): products with `w` then
/// overflow only where the other factor does.
pub(crate) fn normalise(level: Level, w: &mut [f32]) -> Normalised {
    let factor = power_of_two(max_abs(level, w));
    let sum = level.dispatch(ScaleAndSum { w, by: 1.0 / factor });
    Normalised { factor: factor.into(), sum: sum.into() }
}

/// The largest magnitude in `x`; 0 of nothing.
pub(crate) fn max_abs(level: Level, x: &[f32]) -> f32 {
    level.dispatch(MaxAbs { w: x })
}

/// The largest power of two that is at most `x > 0`, kept where it has a reciprocal; 1 for 0.
pub(crate) fn power_of_two(x: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80_0000;
    let (least, most) = (f32::MIN_POSITIVE, f32::MAX / 2.0);
    if x == 0.0 { 1.0 } else { f32::from_bits(x.clamp(least, most).to_bits() & EXPONENT) }
}

struct MaxAbs<'a> {
    w: &'a [f32],
}

impl WithSimd for MaxAbs<'_> {
    type Output = f32;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let (head, tail) = S::as_simd_f32s(self.w);
        let mut most = simd.abs_f32s(simd.partial_load_f32s(tail));
        for w in head {
            most = simd.max_f32s(most, simd.abs_f32s(*w));
        }
        simd.reduce_max_f32s(most)
    }
}

struct ScaleAndSum<'a> {
    w: &'a mut [f32],
    by: f32,
}

impl WithSimd for ScaleAndSum<'_> {
    type Output = f32;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let by = simd.splat_f32s(self.by);
        let (head, tail) = S::as_mut_simd_f32s(self.w);
        let last = simd.mul_f32s(simd.partial_load_f32s(tail), by);
        simd.partial_store_f32s(tail, last);
        let mut sum = simd.abs_f32s(last);
        for w in head {
            *w = simd.mul_f32s(*w, by);
            sum = simd.add_f32s(sum, simd.abs_f32s(*w));
        }
        simd.reduce_sum_f32s(sum)
    }
}

struct Dots<'a> {
    x: &'a [f32],
    y: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for Dots<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, y, out } = self;
        let (y_head, y_tail) = S::as_simd_f32s(y);
        let last = simd.partial_load_f32s(y_tail);
        if let ([y], []) = (y_head, y_tail) {
            // One register per row: no inner loop.
            for (o, x) in out.iter_mut().zip(S::as_simd_f32s(x).0) {
                prefetch(x);
                *o = simd.reduce_sum_f32s(simd.mul_f32s(*x, *y));
            }
            return;
        }
        for (o, x) in out.iter_mut().zip(x.chunks_exact(y.len())) {
            let (head, tail) = S::as_simd_f32s(x);
            let mut sum = simd.splat_f32s(0.0);
            if !tail.is_empty() {
                sum = simd.mul_f32s(simd.partial_load_f32s(tail), last);
            }
            for (x, y) in head.iter().zip(y_head) {
                prefetch(x);
                sum = simd.mul_add_e_f32s(*x, *y, sum);
            }
            *o = simd.reduce_sum_f32s(sum);
        }
    }
}

struct SquareNorms<'a> {
    x: &'a [f32],
    dim: usize,
    out: &'a mut [f32],
}

impl WithSimd for SquareNorms<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, dim, out } = self;
        if dim == S::F32_LANES {
            for (o, x) in out.iter_mut().zip(S::as_simd_f32s(x).0) {
                prefetch(x);
                *o = simd.reduce_sum_f32s(simd.mul_f32s(*x, *x));
            }
            return;
        }
        for (o, x) in out.iter_mut().zip(x.chunks_exact(dim)) {
            let (head, tail) = S::as_simd_f32s(x);
            let mut sum = simd.splat_f32s(0.0);
            if !tail.is_empty() {
                let x = simd.partial_load_f32s(tail);
                sum = simd.mul_f32s(x, x);
            }
            for x in head {
                prefetch(x);
                sum = simd.mul_add_e_f32s(*x, *x, sum);
            }
            *o = simd.reduce_sum_f32s(sum);
        }
    }
}

struct Accumulate<'a> {
    w: &'a [f32],
    x: &'a [f32],
    factor: f64,
    acc: &'a mut [f64],
}

/// Independent sums per column: as many as a fused multiply-add takes cycles.
const CHAINS: usize = 4;

impl WithSimd for Accumulate<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { w, x, factor, acc } = self;
        let dim = acc.len();
        for (column, acc) in (0..dim).step_by(S::F32_LANES).zip(acc.chunks_mut(S::F32_LANES)) {
            let width = acc.len();
            let mut sums = [simd.splat_f32s(0.0); CHAINS];
            let (quads, rest) = w.as_chunks::<CHAINS>();
            for (w, x) in quads.iter().zip(x.chunks_exact(CHAINS * dim)) {
                for (chain, sum) in sums.iter_mut().enumerate() {
                    let at = chain * dim + column;
                    prefetch(&x[at]);
                    *sum = simd.mul_add_e_f32s(simd.splat_f32s(w[chain]), load(simd, &x[at..at + width]), *sum);
                }
            }
            let done = quads.len() * CHAINS;
            for (w, x) in rest.iter().zip(x[done * dim..].chunks_exact(dim)) {
                let x = load(simd, &x[column..column + width]);
                sums[0] = simd.mul_add_e_f32s(simd.splat_f32s(*w), x, sums[0]);
            }
            let sum = simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3]));
            let lanes: &[f32] = bytemuck::cast_slice(std::slice::from_ref(&sum));
            acc.iter_mut().zip(lanes).for_each(|(a, x)| *a += factor * f64::from(*x));
        }
    }
}

/// Asks for the cache line 1 KiB after `x`: rows follow one another, and the processor's own prefetching ends at every page.
#[inline(always)]
pub(crate) fn prefetch<T>(x: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const AHEAD: usize = 1024;
        // SAFETY: SSE is part of every x86-64, and asking for a line that is not there does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(x).cast::<i8>().wrapping_add(AHEAD)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = x;
}

/// `x` in one register, the missing lanes zero.
#[inline(always)]
fn load<S: Simd>(simd: S, x: &[f32]) -> S::f32s {
    match S::as_simd_f32s(x).0 {
        [full] => *full,
        _ => simd.partial_load_f32s(x),
    }
}

struct Outer<'a, const ADD: bool> {
    w: &'a [f32],
    y: &'a [f32],
    out: &'a mut [f32],
}

impl<const ADD: bool> WithSimd for Outer<'_, ADD> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { w, y, out } = self;
        let (y_head, y_tail) = S::as_simd_f32s(y);
        let last = simd.partial_load_f32s(y_tail);
        for (w, out) in w.iter().zip(out.chunks_exact_mut(y.len())) {
            let w = simd.splat_f32s(*w);
            let (head, tail) = S::as_mut_simd_f32s(out);
            for (o, y) in head.iter_mut().zip(y_head) {
                *o = if ADD { simd.mul_add_e_f32s(w, *y, *o) } else { simd.mul_f32s(w, *y) };
            }
            if !tail.is_empty() {
                let o = simd.mul_f32s(w, last);
                let o = if ADD { simd.add_f32s(o, simd.partial_load_f32s(tail)) } else { o };
                simd.partial_store_f32s(tail, o);
            }
        }
    }
}

struct AddScaled<'a> {
    w: &'a [f32],
    x: &'a [f32],
    dim: usize,
    out: &'a mut [f32],
}

impl WithSimd for AddScaled<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { w, x, dim, out } = self;
        for ((w, x), out) in w.iter().zip(x.chunks_exact(dim)).zip(out.chunks_exact_mut(dim)) {
            let w = simd.splat_f32s(*w);
            let ((x_head, x_tail), (head, tail)) = (S::as_simd_f32s(x), S::as_mut_simd_f32s(out));
            for (o, x) in head.iter_mut().zip(x_head) {
                *o = simd.mul_add_e_f32s(w, *x, *o);
            }
            if !tail.is_empty() {
                let o = simd.mul_f32s(w, simd.partial_load_f32s(x_tail));
                let o = simd.add_f32s(o, simd.partial_load_f32s(tail));
                simd.partial_store_f32s(tail, o);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic numbers in (-1, 1).
    fn numbers(n: usize, seed: f32) -> Vec<f32> {
        (0..n).map(|i| ((i as f32 + seed) * 0.7311).sin()).collect()
    }

    fn close(got: f64, want: f64, of: &str) {
        assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "{of}: {got} instead of {want}");
    }

    #[test]
    fn row_kernels_agree_with_their_definition_at_every_level() {
        for level in Level::available() {
            for dim in [1, 2, 7, 8, 9, 12, 16, 17, 32, 64] {
                for n in [1, 3, 4, 5, 64] {
                    check(level, n, dim);
                }
            }
        }
    }

    fn check(level: Level, n: usize, dim: usize) {
        let (x, y, w) = (numbers(n * dim, 0.0), numbers(dim, 0.3), numbers(n, 0.6));
        let at = |j: usize, c: usize| f64::from(x[j * dim + c]);
        let mut out = vec![f32::NAN; n];
        dots(level, &x, &y, &mut out);
        for (j, o) in out.iter().enumerate() {
            close((*o).into(), (0..dim).map(|c| at(j, c) * f64::from(y[c])).sum(), "dots");
        }
        type Channel = fn(f64) -> f64;
        let apart: [(Term, Channel); 2] = [(Term::SquaredDifference, |x| x * x), (Term::Difference, f64::abs)];
        for (term, of) in apart {
            terms(level, term, &x, &y, &mut out);
            for (j, o) in out.iter().enumerate() {
                close((*o).into(), (0..dim).map(|c| of(at(j, c) - f64::from(y[c]))).sum(), "terms");
            }
        }
        norms(level, &x, dim, &mut out);
        for (j, o) in out.iter().enumerate() {
            close((*o).into(), (0..dim).map(|c| at(j, c).powi(2)).sum::<f64>().sqrt(), "norms");
        }
        let mut acc = vec![1.0; dim];
        accumulate(level, &w, &x, 0.5, &mut acc);
        for (c, a) in acc.iter().enumerate() {
            close(*a, 1.0 + 0.5 * (0..n).map(|j| at(j, c) * f64::from(w[j])).sum::<f64>(), "accumulate");
        }
        let mut rows = vec![f32::NAN; n * dim];
        outer(level, &w, &y, &mut rows, Store::Overwrite);
        outer(level, &w, &y, &mut rows, Store::Add);
        add_scaled(level, &w, &x, dim, &mut rows);
        for (i, r) in rows.iter().enumerate() {
            let (j, c) = (i / dim, i % dim);
            close((*r).into(), f64::from(w[j]) * (2.0 * f64::from(y[c]) + at(j, c)), "outer and add_scaled");
        }
    }

    #[test]
    fn norms_survive_squares_out_of_range() {
        for level in Level::available() {
            let mut out = [f32::NAN; 4];
            norms(level, &[3e30, 4e30, 3e-30, 4e-30, 0.0, 0.0, 3.0, 4.0], 2, &mut out);
            for (got, want) in out.iter().zip([5e30, 5e-30, 0.0, 5.0]) {
                assert!((got - want).abs() <= 1e-6 * want, "{got} instead of {want}");
            }
        }
    }

    #[test]
    fn normalise_brings_the_largest_magnitude_to_one() {
        for level in Level::available() {
            for scale in [0.0, 1e-36, 1e-20, 1.0, 1e30, 3e38] {
                let (mut w, x) = (numbers(37, 0.1), numbers(37, 0.1));
                w.iter_mut().for_each(|w| *w *= scale);
                let done = normalise(level, &mut w);
                let most = w.iter().fold(0.0f32, |m, w| m.max(w.abs()));
                assert!(scale == 0.0 || (0.5..4.0).contains(&most), "{scale}: {most}");
                close(
                    done.sum * done.factor / f64::from(scale).max(1e-300),
                    if scale == 0.0 { 0.0 } else { x.iter().map(|x| f64::from(x.abs())).sum() },
                    "sum",
                );
            }
        }
    }
}
