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

    /// Adds `e g` to both `sums`, where `g` is the derivative of the distance in `x - landmark`, of [`Squared`] half of it.
    fn pull_back<S: Simd>(simd: S, e: S::f32s, x: S::f32s, landmark: S::f32s, sums: [S::f32s; 2]) -> [S::f32s; 2];

    /// As [`Metric::pull_back`], but that what is added to the second sum is without the same of `pivot` in the place of `x`.
    fn pull_back_from<S: Simd>(
        simd: S,
        e: S::f32s,
        x: S::f32s,
        landmark_and_pivot: [S::f32s; 2],
        sums: [S::f32s; 2],
    ) -> [S::f32s; 2];
}

/// `|x - y|_2^2`.
#[derive(Clone, Copy)]
pub(crate) struct Squared;

impl Metric for Squared {
    const TERM: Term = Term::SquaredDifference;

    /// `g = x - y`.
    #[inline(always)]
    fn pull_back<S: Simd>(simd: S, e: S::f32s, x: S::f32s, landmark: S::f32s, [a, b]: [S::f32s; 2]) -> [S::f32s; 2] {
        let g = simd.sub_f32s(x, landmark);
        [simd.mul_add_e_f32s(e, g, a), simd.mul_add_e_f32s(e, g, b)]
    }

    #[inline(always)]
    fn pull_back_from<S: Simd>(
        simd: S,
        e: S::f32s,
        x: S::f32s,
        [landmark, pivot]: [S::f32s; 2],
        [a, b]: [S::f32s; 2],
    ) -> [S::f32s; 2] {
        let (g, ahead) = (simd.sub_f32s(x, landmark), simd.sub_f32s(x, pivot));
        [simd.mul_add_e_f32s(e, g, a), simd.mul_add_e_f32s(e, ahead, b)]
    }
}

/// `|x - y|_1`.
#[derive(Clone, Copy)]
pub(crate) struct Manhattan;

impl Metric for Manhattan {
    const TERM: Term = Term::Difference;

    /// `g = sign(x - y)`, 0 at a tie: comparisons choose what is added.
    #[inline(always)]
    fn pull_back<S: Simd>(simd: S, e: S::f32s, x: S::f32s, landmark: S::f32s, [a, b]: [S::f32s; 2]) -> [S::f32s; 2] {
        let signed = signed(simd, e, x, landmark);
        [simd.add_f32s(a, signed), simd.add_f32s(b, signed)]
    }

    #[inline(always)]
    fn pull_back_from<S: Simd>(
        simd: S,
        e: S::f32s,
        x: S::f32s,
        [landmark, pivot]: [S::f32s; 2],
        [a, b]: [S::f32s; 2],
    ) -> [S::f32s; 2] {
        let (of_x, of_pivot) = (signed(simd, e, x, landmark), signed(simd, e, pivot, landmark));
        [simd.add_f32s(a, of_x), simd.add_f32s(b, simd.sub_f32s(of_x, of_pivot))]
    }
}

/// `e sign(x - y)`.
#[inline(always)]
fn signed<S: Simd>(simd: S, e: S::f32s, x: S::f32s, y: S::f32s) -> S::f32s {
    let below = simd.select_f32s(simd.less_than_f32s(x, y), simd.neg_f32s(e), simd.splat_f32s(0.0));
    simd.select_f32s(simd.less_than_f32s(y, x), e, below)
}

/// A tile of tokens and landmarks, and the gradient of each pair's distance. Rows are whole vectors.
#[derive(Clone, Copy)]
pub(crate) struct Pairs<'a> {
    /// `[tokens, dim]`
    pub tokens: &'a [f32],
    /// `[landmarks, dim]`
    pub landmarks: &'a [f32],
    /// Channels, padded to whole vectors.
    pub dim: usize,
    /// `[tokens, stride]`: the gradients.
    pub e: &'a [f32],
    /// Landmarks, padded to whole vectors.
    pub stride: usize,
    /// `[landmarks, dim]`: of every landmark, the token that others are taken from in its gradient. None takes nothing off.
    pub pivots: Option<&'a [f32]>,
}

/// Writes `dtokens_i = sum_l e_il g_il` and adds `sum_i e_il g_il` to `dmarks_l`, where `g_il` is the derivative of the
/// distance in `token_i - mark_l`, of [`Squared`] half of it.
///
/// With pivots, `g_il` of the landmarks is without that of the landmark's pivot.
///
/// Differences, not products of matrices: a token at a landmark is pulled by exactly nothing, however far both are from zero.
pub(crate) fn gradients<D: Metric>(level: Level, _: D, pairs: Pairs<'_>, dtokens: &mut [f32], dlandmarks: &mut [f32]) {
    level.dispatch(Gradients { metric: PhantomData::<D>, pairs, dtokens, dlandmarks });
}

struct Gradients<'a, D> {
    metric: PhantomData<D>,
    pairs: Pairs<'a>,
    dtokens: &'a mut [f32],
    dlandmarks: &'a mut [f32],
}

impl<D: Metric> WithSimd for Gradients<'_, D> {
    type Output = ();

    /// Four tokens and two vectors of channels at a time, so that a landmark is loaded and its sums are stored once for four
    /// tokens.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.pairs.pivots {
            Some(pivots) => add_all_gradients::<S, D, true>(simd, self.pairs, pivots, self.dtokens, self.dlandmarks),
            None => add_all_gradients::<S, D, false>(simd, self.pairs, &[], self.dtokens, self.dlandmarks),
        }
    }
}

/// The pulls on all tokens, from `pivots` on or not.
#[inline(always)]
fn add_all_gradients<S: Simd, D: Metric, const FROM: bool>(
    simd: S,
    pairs: Pairs<'_>,
    pivots: &[f32],
    dtokens: &mut [f32],
    dlandmarks: &mut [f32],
) {
    let n = pairs.tokens.len() / pairs.dim;
    let mut token = 0;
    while token + 4 <= n {
        add_rows_gradients::<S, D, 4, FROM>(simd, (pairs, pivots), token, dtokens, dlandmarks);
        token += 4;
    }
    while token < n {
        add_rows_gradients::<S, D, 1, FROM>(simd, (pairs, pivots), token, dtokens, dlandmarks);
        token += 1;
    }
}

/// The pulls on `T` tokens.
#[inline(always)]
fn add_rows_gradients<S: Simd, D: Metric, const T: usize, const FROM: bool>(
    simd: S,
    (pairs, pivots): (Pairs<'_>, &[f32]),
    token: usize,
    dtokens: &mut [f32],
    dlandmarks: &mut [f32],
) {
    let lanes = S::F32_LANES;
    let mut col = 0;
    while col + 2 * lanes <= pairs.dim {
        add_gradients::<S, D, T, 2, FROM>(simd, (pairs, pivots), token, col, dtokens, dlandmarks);
        col += 2 * lanes;
    }
    if col < pairs.dim {
        add_gradients::<S, D, T, 1, FROM>(simd, (pairs, pivots), token, col, dtokens, dlandmarks);
    }
}

/// The pulls on `T` tokens in `N` vectors of channels.
#[inline(always)]
fn add_gradients<S: Simd, D: Metric, const T: usize, const N: usize, const FROM: bool>(
    simd: S,
    (pairs, pivots): (Pairs<'_>, &[f32]),
    token: usize,
    col: usize,
    dtokens: &mut [f32],
    dlandmarks: &mut [f32],
) {
    let Pairs { tokens, landmarks, dim, e, stride, .. } = pairs;
    let zero = simd.splat_f32s(0.0);
    let mut x = [[zero; N]; T];
    let mut e_rows: [&[f32]; T] = [&[]; T];
    for t in 0..T {
        x[t].copy_from_slice(vectors::<S, N>(tokens, (token + t) * dim + col));
        e_rows[t] = &e[(token + t) * stride..][..landmarks.len() / dim];
    }
    let mut sums = [[zero; N]; T];
    for (l, (landmarks, dlandmarks)) in landmarks.chunks_exact(dim).zip(dlandmarks.chunks_exact_mut(dim)).enumerate() {
        let (landmarks, dlandmarks) = (vectors::<S, N>(landmarks, col), vectors_mut::<S, N>(dlandmarks, col));
        let pivots = if FROM { vectors::<S, N>(pivots, l * dim + col) } else { landmarks };
        for t in 0..T {
            let e = simd.splat_f32s(e_rows[t][l]);
            for n in 0..N {
                let both = [sums[t][n], dlandmarks[n]];
                [sums[t][n], dlandmarks[n]] = if FROM {
                    D::pull_back_from(simd, e, x[t][n], [landmarks[n], pivots[n]], both)
                } else {
                    D::pull_back(simd, e, x[t][n], landmarks[n], both)
                };
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        vectors_mut::<S, N>(dtokens, (token + t) * dim + col).copy_from_slice(sums);
    }
}
