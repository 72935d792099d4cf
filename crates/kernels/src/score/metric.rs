//! Kernels that fall off exponentially with a distance between tokens: which distance, and its gradient.
//!
//! Distances are sums over channels of a function of the difference: no large terms cancel, so that tokens that nearly
//! coincide keep their distance, and equal ones have distance 0.

use pulp::{Simd, WithSimd};

use crate::simd::{
    Level,
    product::{Add, Left, Right, Size, Store, Term, product, vectors, vectors_mut},
};

/// A distance, the sum over channels of a function of the difference.
pub(crate) trait Metric: Copy + Send + Sync {
    /// What the distance sums over the channels.
    const TERM: Term;

    /// Writes `dtokens_i = sum_l e_il g_il` and adds `sum_i e_il g_il` to `dmarks_l`, where `g_il` is the gradient of the
    /// distance in `token_i - mark_l`, of [`Squared`] half of it.
    fn gradients<S: Simd>(self, simd: S, pairs: Pairs<'_>, dtokens: &mut [f32], dmarks: &mut [f32]);
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
    /// `[tokens, stride]`: the gradients, zero beyond the last mark.
    pub e: &'a [f32],
    /// Marks, padded to whole vectors.
    pub stride: usize,
}

/// `|x - y|_2^2`.
#[derive(Clone, Copy)]
pub(crate) struct Squared;

impl Metric for Squared {
    const TERM: Term = Term::SquaredDifference;

    /// `g = x - y`: two products of matrices. What cancels in them is as large as the tokens, which should be centred.
    #[inline(always)]
    fn gradients<S: Simd>(self, simd: S, pairs: Pairs<'_>, dtokens: &mut [f32], dmarks: &mut [f32]) {
        let Pairs { tokens, marks, dim, e, stride } = pairs;
        let (n, m, lanes) = (tokens.len() / dim, marks.len() / dim, S::F32_LANES);
        let of_token = Left { data: e, row_stride: stride, depth_stride: 1 };
        let size = Size { rows: n, cols: dim, depth: m };
        product(simd, size, of_token, Right { data: marks, stride: dim }, &mut Store { data: dtokens, stride: dim });
        for (i, e) in e.chunks_exact(stride).enumerate() {
            let total = sum(simd, e);
            let (x, d) = (S::as_simd_f32s(&tokens[i * dim..][..dim]).0, &mut dtokens[i * dim..][..dim]);
            for (d, &x) in S::as_mut_simd_f32s(d).0.iter_mut().zip(x) {
                *d = simd.sub_f32s(simd.mul_f32s(total, x), *d);
            }
        }
        let of_mark = Left { data: e, row_stride: 1, depth_stride: stride };
        let size = Size { rows: m, cols: dim, depth: n };
        product(simd, size, of_mark, Right { data: tokens, stride: dim }, &mut Add { data: dmarks, stride: dim });
        for first in (0..m).step_by(lanes) {
            let mut total = simd.splat_f32s(0.0);
            for e in e.chunks_exact(stride) {
                total = simd.add_f32s(total, vectors::<S, 1>(e, first)[0]);
            }
            let totals: &[f32] = bytemuck::cast_slice(std::slice::from_ref(&total));
            for (l, &total) in (first..m).zip(totals) {
                let (mark, d) = (S::as_simd_f32s(&marks[l * dim..][..dim]).0, &mut dmarks[l * dim..][..dim]);
                for (d, &mark) in S::as_mut_simd_f32s(d).0.iter_mut().zip(mark) {
                    *d = simd.sub_f32s(*d, simd.mul_f32s(simd.splat_f32s(total), mark));
                }
            }
        }
    }
}

/// The sum of whole vectors, in every lane.
#[inline(always)]
fn sum<S: Simd>(simd: S, x: &[f32]) -> S::f32s {
    let mut total = simd.splat_f32s(0.0);
    for &x in S::as_simd_f32s(x).0 {
        total = simd.add_f32s(total, x);
    }
    simd.splat_f32s(simd.reduce_sum_f32s(total))
}

/// `|x - y|_1`.
#[derive(Clone, Copy)]
pub(crate) struct Manhattan;

impl Metric for Manhattan {
    const TERM: Term = Term::Difference;

    /// `g = sign(x - y)`, 0 at a tie. Not a product of matrices: comparisons choose what is added, four tokens and two
    /// vectors of channels at a time, so that a mark is loaded and its sums are stored once for four tokens.
    #[inline(always)]
    fn gradients<S: Simd>(self, simd: S, pairs: Pairs<'_>, dtokens: &mut [f32], dmarks: &mut [f32]) {
        let n = pairs.tokens.len() / pairs.dim;
        let mut token = 0;
        while token + 4 <= n {
            signs_of::<S, 4>(simd, pairs, token, dtokens, dmarks);
            token += 4;
        }
        while token < n {
            signs_of::<S, 1>(simd, pairs, token, dtokens, dmarks);
            token += 1;
        }
    }
}

/// The sign products of `T` tokens.
#[inline(always)]
fn signs_of<S: Simd, const T: usize>(simd: S, pairs: Pairs<'_>, token: usize, dtokens: &mut [f32], dmarks: &mut [f32]) {
    let lanes = S::F32_LANES;
    let mut col = 0;
    while col + 2 * lanes <= pairs.dim {
        signs::<S, T, 2>(simd, pairs, token, col, dtokens, dmarks);
        col += 2 * lanes;
    }
    if col < pairs.dim {
        signs::<S, T, 1>(simd, pairs, token, col, dtokens, dmarks);
    }
}

/// The sign products of `T` tokens in `N` vectors of channels.
#[inline(always)]
fn signs<S: Simd, const T: usize, const N: usize>(
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
            let plus = simd.splat_f32s(e_rows[t][l]);
            let minus = simd.neg_f32s(plus);
            for n in 0..N {
                let below = simd.select_f32s(simd.less_than_f32s(x[t][n], marks[n]), minus, zero);
                let signed = simd.select_f32s(simd.less_than_f32s(marks[n], x[t][n]), plus, below);
                sums[t][n] = simd.add_f32s(sums[t][n], signed);
                dmarks[n] = simd.add_f32s(dmarks[n], signed);
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        vectors_mut::<S, N>(dtokens, (token + t) * dim + col).copy_from_slice(sums);
    }
}

/// [`Metric::gradients`] on the instruction set `level`.
pub(crate) fn gradients(
    level: Level,
    distance: impl Metric,
    pairs: Pairs<'_>,
    dtokens: &mut [f32],
    dmarks: &mut [f32],
) {
    level.dispatch(Gradients { distance, pairs, dtokens, dmarks });
}

struct Gradients<'a, D> {
    distance: D,
    pairs: Pairs<'a>,
    dtokens: &'a mut [f32],
    dmarks: &'a mut [f32],
}

impl<D: Metric> WithSimd for Gradients<'_, D> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.distance.gradients(simd, self.pairs, self.dtokens, self.dmarks);
    }
}
