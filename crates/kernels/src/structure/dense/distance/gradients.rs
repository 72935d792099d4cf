//! Backward: a tile of weights and of the scores' gradients from the distances.

use pulp::{Simd, WithSimd};

use super::{
    super::{
        forward::TILE_STRIDE,
        head::Rows,
        pairing::{Margins, PairTile},
    },
    Distances,
    geometry::{Geometry, Panel},
};
use crate::{
    score::distance::Decay,
    simd::{
        bf16::round,
        math::exp2,
        product::{vectors, vectors_mut},
    },
};

/// Makes weights and the gradients of the products of a tile, whose products are there; adds close pairs and sums to the
/// margins. A function of its own for each metric and decay, as [`super::weigh::Values`].
pub(super) struct Slopes<'a, 'p, 't, M, D> {
    pub of: Distances<'a>,
    pub metric: M,
    pub decay: D,
    pub panel: Panel<'a, 'a>,
    pub pairs: &'a mut PairTile<'p, 't>,
}

impl<M: Geometry, D: Decay> WithSimd for Slopes<'_, '_, '_, M, D> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (width, lanes, mut col) = (self.panel.columns.len(), S::F32_LANES, 0);
        while col + 4 * lanes <= width {
            self.columns::<S, 4>(simd, col);
            col += 4 * lanes;
        }
        while col < width {
            self.columns::<S, 1>(simd, col);
            col += lanes;
        }
    }
}

impl<M: Geometry, D: Decay> Slopes<'_, '_, '_, M, D> {
    /// `N` columns of vectors.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, simd: S, col: usize) {
        let zero = simd.splat_f32s(0.0);
        let (shift, delta) = (vectors::<S, N>(self.pairs.shift, col), vectors::<S, N>(self.pairs.delta, col));
        let (mut margins, mut radials, mut values) = ([zero; N], [zero; N], [zero; N]);
        // The gradients of a row's log-affinities cancel (but for what the density adds), so that any number may be taken from
        // all their factors: with that of a typical pair, their rounding does little harm. No affinity is above one, but
        // the sum of many is.
        let logs = match self.of.density {
            Some(_) => self.panel.of_queries::<S, N>(self.panel.queries.terms[0], col),
            None => shift,
        };
        let mut typical = [self.decay.typical(simd, self.of.scale, zero); N];
        for n in 0..N {
            typical[n] = self.decay.typical(simd, self.of.scale, simd.min_f32s(logs[n], zero));
        }
        for key in 0..self.pairs.visible.keys.len() {
            let at = key * TILE_STRIDE + col;
            let mut products = [zero; N];
            products.copy_from_slice(vectors::<S, N>(self.pairs.weights, at));
            let logits = M::logits::<S, N>(simd, &self.panel, key, col, products);
            let (weights, rows) =
                (vectors_mut::<S, N>(self.pairs.weights, at), vectors_mut::<S, N>(self.pairs.slopes, at));
            let (mut in_row, mut close) = (zero, zero);
            let mut close_slopes = [zero; N];
            let mut seen = [simd.splat_f32s(1.0); N];
            if !self.pairs.complete {
                seen = self.pairs.visible.show(simd, [key, col], seen, 0.0);
            }
            for n in 0..N {
                let distance = self.metric.distance(simd, logits[n]);
                let slopes = self.decay.slopes(simd, self.of.scale, distance, &typical[n]);
                let [mut weight, mut ds] = gradient::<S, N>(
                    self.of,
                    simd,
                    &self.panel,
                    key,
                    col,
                    n,
                    slopes.value,
                    rows[n],
                    [shift[n], delta[n]],
                );
                if !self.pairs.complete {
                    let seen = simd.less_than_f32s(zero, seen[n]);
                    weight = simd.select_f32s(seen, weight, zero);
                    ds = simd.select_f32s(seen, ds, zero);
                }
                weights[n] = weight;
                if self.of.columns_only {
                    in_row = simd.add_f32s(in_row, ds);
                    continue;
                }
                radials[n] = simd.mul_add_e_f32s(ds, slopes.radial, radials[n]);
                values[n] = simd.mul_add_e_f32s(ds, simd.sub_f32s(slopes.value, typical[n].value), values[n]);
                let slope = self.metric.chain(simd, logits[n], distance.r, slopes.g);
                let slope = simd.mul_f32s(ds, slope);
                let norms = simd.add_f32s(
                    simd.splat_f32s(self.panel.keys.norms[key]),
                    self.panel.of_queries::<S, N>(self.panel.queries.norms, col)[n],
                );
                let apart = simd.less_than_f32s(zero, M::clearance(simd, logits[n], norms));
                rows[n] = simd.select_f32s(apart, slope, zero);
                close_slopes[n] = simd.sub_f32s(slope, rows[n]);
                if self.of.rounded {
                    // As the products read them: sums of differences stay such.
                    rows[n] = round(simd, rows[n]);
                }
                close = simd.max_f32s(close, simd.abs_f32s(close_slopes[n]));
                in_row = simd.add_f32s(in_row, rows[n]);
                margins[n] = simd.add_f32s(margins[n], rows[n]);
            }
            self.pairs.margins.key[key] += simd.reduce_sum_f32s(in_row);
            if simd.reduce_max_f32s(close) > 0.0 {
                let of_lanes = (bytemuck::cast_slice(&close_slopes), bytemuck::cast_slice(&logits));
                add_close::<M>(&self.panel, key, col, of_lanes, &mut self.pairs.margins);
            }
        }
        for (sum, margin) in vectors_mut::<S, N>(self.pairs.margins.query, col).iter_mut().zip(margins) {
            *sum = simd.add_f32s(*sum, margin);
        }
        for n in 0..N {
            radials[n] = simd.mul_f32s(radials[n], typical[n].share);
        }
        for (sum, parts) in self.pairs.margins.parameters.iter_mut().zip([radials, values]) {
            for part in parts {
                *sum += f64::from(simd.reduce_sum_f32s(part));
            }
        }
    }
}

/// The weights and the gradients of the log-affinities, from base-2 logarithms of affinities and products of values and
/// output gradients.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // one vector's place and operands
fn gradient<S: Simd, const N: usize>(
    of: Distances<'_>,
    simd: S,
    panel: &Panel<'_, '_>,
    key: usize,
    col: usize,
    n: usize,
    value: S::f32s,
    product: S::f32s,
    [shift, delta]: [S::f32s; 2],
) -> [S::f32s; 2] {
    let Some(density) = of.density else {
        let weight = exp2(simd, simd.sub_f32s(value, shift));
        return [weight, simd.mul_f32s(weight, simd.sub_f32s(product, delta))];
    };
    let bias = simd.splat_f32s(panel.keys.terms[0][key]);
    let weight = exp2(simd, simd.sub_f32s(simd.add_f32s(value, bias), shift));
    let ds = simd.mul_f32s(weight, simd.sub_f32s(product, delta));
    if density.gradient.is_empty() {
        return [weight, ds];
    }
    let [plain_shift, back] = panel.queries.terms.map(|terms| panel.of_queries::<S, N>(terms, col)[n]);
    let plain = exp2(simd, simd.sub_f32s(value, plain_shift));
    [weight, simd.mul_add_e_f32s(plain, back, ds)]
}

/// Adds the gradients of one key's close pairs along their differences: `slope (k - q)` to the query's, the opposite to the
/// key's; near the antipode, `slope (k + q)` to both.
#[inline(always)]
fn add_close<M: Geometry>(
    panel: &Panel<'_, '_>,
    key: usize,
    col: usize,
    (slopes, logits): (&[f32], &[f32]),
    margins: &mut Margins<'_>,
) {
    let Rows { data: keys, stride } = panel.keys.exact;
    let k = &keys[key * stride..][..stride];
    for (lane, (&slope, &logit)) in slopes.iter().zip(logits).enumerate().filter(|(_, (slope, _))| **slope != 0.0) {
        let n = col + lane;
        let q = &panel.queries.exact.data[(panel.columns.start + n) * stride..][..stride];
        let (dq, dk) = (&mut margins.dq[n * stride..][..stride], &mut margins.dk[key * stride..][..stride]);
        let along = M::reflection(logit);
        for c in 0..stride {
            let pull_back = slope * (k[c] - along * q[c]);
            dq[c] += pull_back;
            dk[c] -= along * pull_back;
        }
    }
}
