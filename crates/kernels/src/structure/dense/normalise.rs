//! What makes the operator an average, as a streaming state per query.

use pulp::Simd;

use crate::{
    score::Score,
    simd::{
        math::exp2,
        product::{vectors, vectors_mut},
    },
};

/// What is carried per query from one tile of keys to the next.
pub(in crate::structure) struct RowState<'a> {
    /// Running maximum of the log-affinities.
    pub peak: &'a mut [f32],
    /// What the micro-tiles of the current tile add up to.
    pub part: &'a mut [f32],
    /// Factor that the settled tile puts on everything summed before it.
    pub rescale: &'a mut [f32],
    /// Sum over all tiles so far: of the weights, or of their squares.
    pub total: &'a mut [f64],
}

impl RowState<'_> {
    pub fn clear(&mut self) {
        self.peak.fill(f32::MIN);
        self.rescale.fill(1.0);
        self.total.fill(0.0);
    }
}

/// A tile of scores, then weights: `[key][query]`, rows `stride` apart.
pub(in crate::structure) struct Tile<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
    pub keys: usize,
    pub queries: usize,
}

/// Turns the logits of a tile into weights, keeping the state of its queries.
pub(in crate::structure) trait Normalisation: Copy + Send + Sync {
    /// The entry of a hidden pair.
    const ABSENT: f32;

    /// Readies `part` for a tile.
    fn open(self, state: &mut RowState<'_>);
    /// The entry of the tile for a logit.
    fn entry<S: Simd>(self, simd: S, logit: S::f32s) -> S::f32s;
    /// `part` with one more entry.
    fn gather<S: Simd>(self, simd: S, part: S::f32s, entry: S::f32s) -> S::f32s;
    /// Turns the entries of a complete tile into weights.
    fn settle<S: Simd>(self, simd: S, tile: &mut Tile<'_>, state: &mut RowState<'_>);
    /// After the last tile, from a query's peak and total: the factor on its output, and the statistic to be saved.
    fn close(self, peak: f32, total: f64) -> (f32, f64);
    /// `(weight, gradient of the logit)` of a pair, from its logit, the product `g` of output gradient and value, and
    /// the query's `shift` and `delta`.
    fn pair<S: Simd>(self, simd: S, logit: S::f32s, g: S::f32s, row: [S::f32s; 2]) -> (S::f32s, S::f32s);

    /// [`Normalisation::entry`] beside products of bf16: rounded where entries are weights.
    #[inline(always)]
    fn rounded_entry<S: Simd>(self, simd: S, logit: S::f32s, _: WeightRounding) -> S::f32s {
        self.entry(simd, logit)
    }

    /// [`Normalisation::pair`] likewise.
    #[inline(always)]
    fn rounded_pair<S: Simd>(
        self,
        simd: S,
        logit: S::f32s,
        g: S::f32s,
        row: [S::f32s; 2],
        _: WeightRounding,
    ) -> (S::f32s, S::f32s) {
        self.pair(simd, logit, g, row)
    }
}

/// How weights are rounded to what products of bf16 read.
#[derive(Clone, Copy)]
pub(in crate::structure) struct WeightRounding {
    /// The factor of Dekker's splitting: 2^16 + 1 leaves eight binary digits, 2^8 + 1 sixteen.
    splitter: f32,
}

impl WeightRounding {
    /// Of operands of one or two parts, of eight binary digits each.
    pub fn of_parts(parts: usize) -> Self {
        Self { splitter: if parts == 1 { 65537.0 } else { 257.0 } }
    }

    /// `x` with as many digits as operands keep, so that rounding it once more changes nothing ("A floating-point technique for extending
    /// the available precision").
    #[inline(always)]
    fn round<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        let large = simd.mul_f32s(x, simd.splat_f32s(self.splitter));
        let rounded = simd.sub_f32s(large, simd.sub_f32s(large, x));
        // What is so large that the product is not finite stays as it is.
        let fits = simd.less_than_f32s(simd.abs_f32s(x), simd.splat_f32s(1e30));
        simd.select_f32s(fits, rounded, x)
    }
}

/// Every row sums to one: `exp2(value)` over its sum, by a running maximum.
#[derive(Clone, Copy)]
pub(in crate::structure) struct Row<F>(pub F);

impl<F: Score> Normalisation for Row<F> {
    const ABSENT: f32 = f32::NEG_INFINITY;

    fn open(self, state: &mut RowState<'_>) {
        state.part.copy_from_slice(state.peak);
    }

    #[inline(always)]
    fn entry<S: Simd>(self, simd: S, logit: S::f32s) -> S::f32s {
        self.0.value(simd, logit)
    }

    #[inline(always)]
    fn gather<S: Simd>(self, simd: S, part: S::f32s, entry: S::f32s) -> S::f32s {
        simd.max_f32s(part, entry)
    }

    #[inline(always)]
    fn settle<S: Simd>(self, simd: S, tile: &mut Tile<'_>, state: &mut RowState<'_>) {
        settle_rows(simd, tile, state);
    }

    fn close(self, peak: f32, total: f64) -> (f32, f64) {
        close_row(peak, total)
    }

    /// `w = exp2(value - shift)`, `w (g - delta) value'`.
    #[inline(always)]
    fn pair<S: Simd>(self, simd: S, logit: S::f32s, g: S::f32s, [shift, delta]: [S::f32s; 2]) -> (S::f32s, S::f32s) {
        let (value, slope) = self.0.value_and_derivative(simd, logit);
        let weight = exp2(simd, simd.sub_f32s(value, shift));
        (weight, simd.mul_f32s(simd.mul_f32s(weight, simd.sub_f32s(g, delta)), slope))
    }
}

/// Turns the base-2 logarithms of a complete tile, whose running maxima are in `state.part`, into weights.
#[inline(always)]
pub(super) fn settle_rows<S: Simd>(simd: S, tile: &mut Tile<'_>, state: &mut RowState<'_>) {
    let lanes = S::F32_LANES;
    let mut col = 0;
    while col + 4 * lanes <= tile.queries {
        exponentiate::<S, 4>(simd, tile, col, state);
        col += 4 * lanes;
    }
    while col < tile.queries {
        exponentiate::<S, 1>(simd, tile, col, state);
        col += lanes;
    }
    for ((total, &rescale), &part) in state.total.iter_mut().zip(&*state.rescale).zip(&*state.part) {
        *total = *total * f64::from(rescale) + f64::from(part);
    }
}

/// [`Normalisation::close`] of rows that sum to one, from base-2 logarithms.
pub(super) fn close_row(peak: f32, total: f64) -> (f32, f64) {
    if total == 0.0 {
        return (0.0, f64::NEG_INFINITY);
    }
    ((1.0 / total) as f32, (f64::from(peak) + total.log2()) * std::f64::consts::LN_2)
}

/// `N` columns of vectors of [`settle_rows`].
#[inline(always)]
fn exponentiate<S: Simd, const N: usize>(simd: S, tile: &mut Tile<'_>, col: usize, state: &mut RowState<'_>) {
    let mut peaks = [simd.splat_f32s(0.0); N];
    peaks.copy_from_slice(vectors::<S, N>(state.part, col));
    let old = vectors_mut::<S, N>(state.peak, col);
    for ((rescale, old), &peak) in vectors_mut::<S, N>(state.rescale, col).iter_mut().zip(old).zip(&peaks) {
        *rescale = exp2(simd, simd.sub_f32s(*old, peak));
        *old = peak;
    }
    let mut sums = [simd.splat_f32s(0.0); N];
    for key in 0..tile.keys {
        let entries = vectors_mut::<S, N>(tile.data, key * tile.stride + col);
        for ((entry, sum), &peak) in entries.iter_mut().zip(&mut sums).zip(&peaks) {
            *entry = exp2(simd, simd.sub_f32s(*entry, peak));
            *sum = simd.add_f32s(*sum, *entry);
        }
    }
    vectors_mut::<S, N>(state.part, col).copy_from_slice(&sums);
}

/// The whole matrix has Frobenius norm one. Streams unnormalised weights and the sum of their squares; the norm is
/// divided out once at the end. "Infinite Self-Attention", eq. 11 and 12.
#[derive(Clone, Copy)]
pub(super) struct Frobenius<F>(pub F);

impl<F: Score> Normalisation for Frobenius<F> {
    const ABSENT: f32 = 0.0;

    fn open(self, state: &mut RowState<'_>) {
        state.part.fill(0.0);
    }

    #[inline(always)]
    fn entry<S: Simd>(self, simd: S, logit: S::f32s) -> S::f32s {
        self.0.value(simd, logit)
    }

    #[inline(always)]
    fn gather<S: Simd>(self, simd: S, part: S::f32s, entry: S::f32s) -> S::f32s {
        if F::HOMOGENEOUS { simd.mul_add_e_f32s(entry, entry, part) } else { part }
    }

    #[inline(always)]
    fn settle<S: Simd>(self, _: S, tile: &mut Tile<'_>, state: &mut RowState<'_>) {
        if F::HOMOGENEOUS {
            state.total.iter_mut().zip(&*state.part).for_each(|(total, &part)| *total += f64::from(part));
            return;
        }
        // Logits that cannot be rescaled may be large: their squares need the range of f64.
        for row in tile.data.chunks(tile.stride).take(tile.keys) {
            for (total, &x) in state.total.iter_mut().zip(&row[..tile.queries]) {
                *total += f64::from(x) * f64::from(x);
            }
        }
    }

    fn close(self, _: f32, total: f64) -> (f32, f64) {
        (1.0, total)
    }

    /// `w = phi(logit)`, `phi' (g - delta w)`.
    #[inline(always)]
    fn pair<S: Simd>(self, simd: S, logit: S::f32s, g: S::f32s, [_, delta]: [S::f32s; 2]) -> (S::f32s, S::f32s) {
        let (weight, slope) = self.0.value_and_derivative(simd, logit);
        (weight, simd.mul_f32s(slope, simd.sub_f32s(g, simd.mul_f32s(delta, weight))))
    }

    /// The norm is of the weights that products read: a row's only pair then weighs exactly 1, and its gradient cancels.
    #[inline(always)]
    fn rounded_entry<S: Simd>(self, simd: S, logit: S::f32s, rounding: WeightRounding) -> S::f32s {
        rounding.round(simd, self.entry(simd, logit))
    }

    #[inline(always)]
    fn rounded_pair<S: Simd>(
        self,
        simd: S,
        logit: S::f32s,
        g: S::f32s,
        [_, delta]: [S::f32s; 2],
        rounding: WeightRounding,
    ) -> (S::f32s, S::f32s) {
        let (weight, slope) = self.0.value_and_derivative(simd, logit);
        let weight = rounding.round(simd, weight);
        (weight, simd.mul_f32s(slope, simd.sub_f32s(g, simd.mul_f32s(delta, weight))))
    }
}
