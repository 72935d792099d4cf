//! Sums over queries that lie close to each other.
//!
//! What flows back to the queries' affinities, `dC`, is large where columns hardly vary, and adds up over the queries to what is known:
//! nothing, where columns are centred. The gradients of landmarks and of the score's parameters are sums of `dC` times numbers that are nearly
//! the same for all queries that are close, so that what f32 rounds of it, times these numbers, would drown them. They are taken from one query
//! on, the pivot: with `e_i = dC_i c_i`, the slopes `s_i` in the term and `p_i` in a parameter of the logarithm of the affinity, and the
//! derivative `g_i` of the term in the landmark,
//!
//! - `E = sum e_i = sum dC_i (c_i - c) + c sum dC_i`,
//! - `F = sum e_i s_i = sum (e_i s_i - e_i s) + s E`,
//! - `sum e_i p_i = sum e_i (p_i - p) + p E`,
//! - `sum e_i s_i g_i = sum e_i s_i (g_i - g) + g F`,
//!
//! whatever `c`, `s`, `p` and `g` are. A landmark has a pivot where all queries are nearer to that than half its distance from the landmark:
//! slopes are then of one size. Otherwise these are zeros, and little cancels.

use pulp::{Simd, WithSimd};

use super::{
    gradients::OfTokens,
    layout::{Saved, Sizes, buffers},
    operator::{Core, Head, Loaded},
    pairs::{Origin, factors, pull_back_from},
    tile::{Zip, width, zip},
};
use crate::{
    score::{
        contract::{MOST_PARAMETERS, Term},
        tiles::{self, ParameterSums},
    },
    simd::product::{Left, Store},
    structure::dense::dot,
};

buffers! {
    /// The pivot of a slice.
    Pivot(s) {
        /// 1 where a landmark has one.
        used: 1,
        /// Its image, and in the place of its terms those of which `p` is.
        image: s.dp,
        terms: s.mp,
        /// `c`, `s`, and the sum of `dC`.
        affinities: s.mp,
        slopes: s.mp,
        totals: s.mp,
        /// Of every landmark the image whose `g` is taken off: its own where it has no pivot.
        rows: s.landmarks * s.dp,
        /// Room for `E` and `F`.
        e: s.mp,
        f: s.mp,
    }
}

/// What a tile of queries takes.
pub(super) struct Room<'m> {
    pub dc: &'m mut [f32],
    /// As large.
    pub other: &'m mut [f32],
    /// A tile of images.
    pub images: &'m mut [f32],
}

fn largest(x: impl Iterator<Item = f32>) -> f32 {
    x.fold(0.0, |most, x| most.max(x.abs()))
}

impl Core<'_> {
    /// Takes in how far a tile of queries is from the first one, by channel.
    pub(super) fn add_reach(&self, loaded: &Loaded<'_>, slice: usize, reach: &mut [f32]) {
        if let Some(from) = self.first_query(slice) {
            let (x, dim) = (loaded.tokens.data, loaded.tokens.stride);
            self.call.level.dispatch(Reach { x, dim, from, reach });
        }
    }

    /// Chooses the pivot of a slice whose queries are at most `reach` from the first in every channel; `g_sum` is the sum of the output gradients.
    pub(super) fn write_pivot(
        &self,
        head: &Head<'_>,
        saved: &Saved<&[f32]>,
        (reach, g_sum): (f32, &[f32]),
        pivot: Pivot<&mut [f32]>,
    ) {
        let (sizes, n, score) = (&self.sizes, head.count, head.score);
        let Some(image) = self.first_query(head.slice).filter(|_| n > 0) else { return };
        pivot.image[..image.len()].copy_from_slice(image);
        let row = Left { data: &*pivot.image, row_stride: sizes.dp, depth_stride: 1 };
        self.terms(head, row, 1, Store { data: &mut *pivot.terms, stride: width(n) });
        pivot.terms[n..].fill(0.0);
        pivot.rows.copy_from_slice(head.landmarks.rows);
        for (m, landmark) in pivot.rows.chunks_exact_mut(sizes.dp).enumerate().take(n) {
            let from_landmark = || largest(pivot.image.iter().zip(&*landmark).map(|(x, y)| x - y));
            let far = if score.term() == Term::Product { largest(image.iter().copied()) } else { from_landmark() };
            if 2.0 * reach > far {
                // No parameter says anything of tokens that coincide.
                pivot.terms[m] = 0.0;
                continue;
            }
            landmark.copy_from_slice(pivot.image);
            pivot.used[0] = 1.0;
            pivot.slopes[m] = 1.0;
            let factor = head.factors.map_or(1.0, |factors| factors[m]);
            pivot.affinities[m] = if score.is_log() { saved.query_mean[m] } else { factor };
            let total = || dot(&saved.t[m * sizes.vp..][..sizes.vp], g_sum);
            pivot.totals[m] = if sizes.per_key { 0.0 } else { total() as f32 };
        }
        let (row, mut unused) = (width(n), [0.0; MOST_PARAMETERS]);
        let slopes = tiles::Tile { data: &mut pivot.slopes[..row], stride: row, rows: 1, width: row };
        score.gradients(self.call.level, pivot.terms, slopes, ParameterSums { sums: &mut unused, typical: None });
    }

    /// Turns the gradient of a tile of queries' affinities, in `room.dc`, into those of the tokens, written to `dx`, and of the landmarks
    /// and the score's parameters, added, as `Core::differentiate`; of these what is taken from the pivot on.
    pub(super) fn differentiate_from(
        &self,
        (head, loaded, pivot): (&Head<'_>, &Loaded<'_>, &Pivot<&[f32]>),
        room: Room<'_>,
        sums: &mut OfTokens<&mut [f32]>,
        dx: &mut [f32],
        parameters: &mut [f64; MOST_PARAMETERS],
    ) {
        let (level, stride, rows, dp) = (self.call.level, loaded.stride, loaded.count(), self.sizes.dp);
        // Of a tile whose tokens are all masked there is nothing, and what follows begins within rows.
        if rows == 0 {
            return;
        }
        let (e, before) = (&mut room.dc[..rows * stride], &mut room.other[..rows * stride]);
        if head.score.is_log() {
            let c = &pivot.affinities[..stride];
            level.dispatch(Ahead { x: &mut *e, by: loaded.c, less: c, sums: &mut sums.e[..stride] });
            zip(level, e, loaded.c, Zip::Multiply);
        } else if let Some(factors) = head.factors {
            zip(level, e, &factors[..stride], Zip::Multiply);
        }
        before.copy_from_slice(e);
        for from in (0..stride).step_by(tiles::WIDEST) {
            let width = tiles::WIDEST.min(stride - from);
            let tile = tiles::Tile { data: &mut e[from..], stride, rows, width };
            let typical = Some(&pivot.terms[from..from + width]);
            let sums = ParameterSums { sums: &mut *parameters, typical };
            head.score.gradients(level, &loaded.terms[from..], tile, sums);
        }
        level.dispatch(Rest { x: &*e, of: before, factors: &pivot.slopes[..stride], sums: &mut sums.f[..stride] });
        let landmarks = &head.landmarks.rows[..head.count * dp];
        let tokens = (&loaded.tokens.data[..rows * dp], landmarks, dp);
        let from = Origin { image: pivot.image, rows: pivot.rows, room: &mut room.images[..rows * dp] };
        pull_back_from(level, head.score.term(), (&*e, stride), tokens, from, (&mut dx[..rows * dp], sums.du));
    }

    /// Adds what is left of the gradients of landmarks and parameters, from all parts' sums.
    pub(super) fn close_pivot(
        &self,
        head: &Head<'_>,
        pivot: Pivot<&mut [f32]>,
        parts: &[f32],
        (du, parameters): (&mut [f32], &mut [f32]),
    ) {
        if pivot.used[0] == 0.0 {
            return;
        }
        let (sizes, n, row) = (&self.sizes, head.count, width(head.count));
        for part in parts.chunks_exact(OfTokens::scratch_len(sizes)) {
            let sums = OfTokens::of(sizes, part);
            pivot.e.iter_mut().zip(sums.e).for_each(|(sum, x)| *sum += x);
            pivot.f.iter_mut().zip(sums.f).for_each(|(sum, x)| *sum += x);
        }
        let Pivot { terms, affinities, totals, rows, e, f, .. } = pivot;
        e.iter_mut().zip(&*totals).zip(&*affinities).for_each(|((e, total), c)| *e += total * c);
        e[n..].fill(0.0);
        let mut sums = [0.0; MOST_PARAMETERS];
        let tile = tiles::Tile { data: &mut e[..row], stride: row, rows: 1, width: row };
        head.score.gradients(self.call.level, terms, tile, ParameterSums { sums: &mut sums, typical: None });
        parameters.iter_mut().zip(sums).for_each(|(sum, x)| *sum += x as f32);
        let (term, [_, factor]) = (head.score.term(), factors(head.score.term()));
        for (m, du) in du.chunks_exact_mut(sizes.dp).enumerate().take(n) {
            let (image, landmark) = (&rows[m * sizes.dp..], &head.landmarks.rows[m * sizes.dp..]);
            let f = factor * (f[m] + e[m]);
            for ((du, x), y) in du.iter_mut().zip(image).zip(landmark) {
                *du += match term {
                    Term::Product => f * x,
                    // Slopes without a pivot are those at a distance of zero, which may be infinite.
                    _ if x == y => 0.0,
                    Term::SquaredDifference | Term::Chord => f * (x - y),
                    Term::Difference => f * (x - y).signum(),
                };
            }
        }
    }
}

/// `reach = max(reach, |x - from|)` for every row of `x`.
struct Reach<'a> {
    x: &'a [f32],
    dim: usize,
    from: &'a [f32],
    reach: &'a mut [f32],
}

impl WithSimd for Reach<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for x in self.x.chunks_exact(self.dim) {
            for ((reach, x), from) in self.reach.iter_mut().zip(x).zip(self.from) {
                let far = (x - from).abs();
                *reach = if far > *reach { far } else { *reach };
            }
        }
    }
}

/// `sums += x (by - less)` over the rows of `x` and `by`.
struct Ahead<'a> {
    x: &'a [f32],
    by: &'a [f32],
    less: &'a [f32],
    sums: &'a mut [f32],
}

impl WithSimd for Ahead<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (less, sums) = (S::as_simd_f32s(self.less).0, S::as_mut_simd_f32s(self.sums).0);
        for (x, by) in self.x.chunks_exact(self.less.len()).zip(self.by.chunks_exact(self.less.len())) {
            let (x, by) = (S::as_simd_f32s(x).0, S::as_simd_f32s(by).0);
            for (((sum, &x), &by), &less) in sums.iter_mut().zip(x).zip(by).zip(less) {
                *sum = simd.mul_add_e_f32s(x, simd.sub_f32s(by, less), *sum);
            }
        }
    }
}

/// `sums += x - factors of` over the rows of `x` and `of`. Products are rounded as those that made `x`: where factors are the same nothing is left.
struct Rest<'a> {
    x: &'a [f32],
    of: &'a [f32],
    factors: &'a [f32],
    sums: &'a mut [f32],
}

impl WithSimd for Rest<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (factors, sums) = (S::as_simd_f32s(self.factors).0, S::as_mut_simd_f32s(self.sums).0);
        for (x, of) in self.x.chunks_exact(self.factors.len()).zip(self.of.chunks_exact(self.factors.len())) {
            let (x, of) = (S::as_simd_f32s(x).0, S::as_simd_f32s(of).0);
            for (((sum, &x), &of), &factor) in sums.iter_mut().zip(x).zip(of).zip(factors) {
                *sum = simd.add_f32s(*sum, simd.sub_f32s(x, simd.mul_f32s(factor, of)));
            }
        }
    }
}
