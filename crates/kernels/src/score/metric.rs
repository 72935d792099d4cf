//! Kernels that fall off exponentially with a distance between tokens: which distance, and its gradient.
//!
//! Distances are sums over channels of a function of the difference: no large terms cancel, so that tokens that nearly
//! coincide keep their distance, and equal ones have distance 0.

use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use crate::simd::{
    Level,
    product::{Term, vectors, vectors_mut},
};

/// A distance, the sum over channels of a function of the difference.
pub(crate) trait Metric: Copy + Send + Sync {
    /// What the distance sums over the channels.
    const TERM: Term;

    /// Adds `e g` to both `sums`, where `g` is the derivative of the distance in `x - mark`, of [`Squared`] half of it.
    fn pull<S: Simd>(simd: S, e: S::f32s, x: S::f32s, mark: S::f32s, sums: [S::f32s; 2]) -> [S::f32s; 2];
}

/// `|x - y|_2^2`.
#[derive(Clone, Copy)]
pub(crate) struct Squared;

impl Metric for Squared {
    const TERM: Term = Term::SquaredDifference;

    /// `g = x - y`.
    #[inline(always)]
    fn pull<S: Simd>(simd: S, e: S::f32s, x: S::f32s, mark: S::f32s, [a, b]: [S::f32s; 2]) -> [S::f32s; 2] {
        let g = simd.sub_f32s(x, mark);
        [simd.mul_add_e_f32s(e, g, a), simd.mul_add_e_f32s(e, g, b)]
    }
}

/// `|x - y|_1`.
#[derive(Clone, Copy)]
pub(crate) struct Manhattan;

impl Metric for Manhattan {
    const TERM: Term = Term::Difference;

    /// `g = sign(x - y)`, 0 at a tie: comparisons choose what is added.
    #[inline(always)]
    fn pull<S: Simd>(simd: S, e: S::f32s, x: S::f32s, mark: S::f32s, [a, b]: [S::f32s; 2]) -> [S::f32s; 2] {
        let below = simd.select_f32s(simd.less_than_f32s(x, mark), simd.neg_f32s(e), simd.splat_f32s(0.0));
        let signed = simd.select_f32s(simd.less_than_f32s(mark, x), e, below);
        [simd.add_f32s(a, signed), simd.add_f32s(b, signed)]
    }
}

/// A tile of tokens and marks, and the gradient of each pair's distance. Rows are whole vectors.
#[derive(Clone, Copy)]
pub(crate) struct Pairs<'a> {
    /// `[tokens, dim]`
    pub tokens: &'a [f32],
    /// `[marks, dim]`
    pub marks: &'a [f32],
    /// Channels, padded to whole vectors.
    pub dim: usize,
    /// `[tokens, stride]`: the gradients.
    pub e: &'a [f32],
    /// Marks, padded to whole vectors.
    pub stride: usize,
}

/// Writes `dtokens_i = sum_l e_il g_il` and adds `sum_i e_il g_il` to `dmarks_l`, where `g_il` is the derivative of the
/// distance in `token_i - mark_l`, of [`Squared`] half of it.
///
/// Differences, not products of matrices: a token at a mark is pulled by exactly nothing, however far both are from zero.
pub(crate) fn gradients<D: Metric>(level: Level, _: D, pairs: Pairs<'_>, dtokens: &mut [f32], dmarks: &mut [f32]) {
    level.dispatch(Gradients { metric: PhantomData::<D>, pairs, dtokens, dmarks });
}

struct Gradients<'a, D> {
    metric: PhantomData<D>,
    pairs: Pairs<'a>,
    dtokens: &'a mut [f32],
    dmarks: &'a mut [f32],
}

impl<D: Metric> WithSimd for Gradients<'_, D> {
    type Output = ();

    /// Four tokens and two vectors of channels at a time, so that a mark is loaded and its sums are stored once for four
    /// tokens.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pairs, dtokens, dmarks, .. } = self;
        let n = pairs.tokens.len() / pairs.dim;
        let mut token = 0;
        while token + 4 <= n {
            pulls_on::<S, D, 4>(simd, pairs, token, dtokens, dmarks);
            token += 4;
        }
        while token < n {
            pulls_on::<S, D, 1>(simd, pairs, token, dtokens, dmarks);
            token += 1;
        }
    }
}

/// The pulls on `T` tokens.
#[inline(always)]
fn pulls_on<S: Simd, D: Metric, const T: usize>(
    simd: S,
    pairs: Pairs<'_>,
    token: usize,
    dtokens: &mut [f32],
    dmarks: &mut [f32],
) {
    let lanes = S::F32_LANES;
    let mut col = 0;
    while col + 2 * lanes <= pairs.dim {
        pulls::<S, D, T, 2>(simd, pairs, token, col, dtokens, dmarks);
        col += 2 * lanes;
    }
    if col < pairs.dim {
        pulls::<S, D, T, 1>(simd, pairs, token, col, dtokens, dmarks);
    }
}

/// The pulls on `T` tokens in `N` vectors of channels.
#[inline(always)]
fn pulls<S: Simd, D: Metric, const T: usize, const N: usize>(
    simd: S,
    pairs: Pairs<'_>,
    token: usize,
    col: usize,
    dtokens: &mut [f32],
    dmarks: &mut [f32],
) {
    let Pairs { tokens, marks, dim, e, stride } = pairs;
    let zero = simd.splat_f32s(0.0);
    let mut x = [[zero; N]; T];
    let mut e_rows: [&[f32]; T] = [&[]; T];
    for t in 0..T {
        x[t].copy_from_slice(vectors::<S, N>(tokens, (token + t) * dim + col));
        e_rows[t] = &e[(token + t) * stride..][..marks.len() / dim];
    }
    let mut sums = [[zero; N]; T];
    for (l, (marks, dmarks)) in marks.chunks_exact(dim).zip(dmarks.chunks_exact_mut(dim)).enumerate() {
        let (marks, dmarks) = (vectors::<S, N>(marks, col), vectors_mut::<S, N>(dmarks, col));
        for t in 0..T {
            let e = simd.splat_f32s(e_rows[t][l]);
            for n in 0..N {
                [sums[t][n], dmarks[n]] = D::pull(simd, e, x[t][n], marks[n], [sums[t][n], dmarks[n]]);
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        vectors_mut::<S, N>(dtokens, (token + t) * dim + col).copy_from_slice(sums);
    }
}
