//! Forward: a tile of weights from the distances.

use pulp::{Simd, WithSimd};

use super::{
    super::{head::Visible, normalise::Tile},
    Distances,
    geometry::{Geometry, Panel},
};
use crate::{
    score::distance::Decay,
    simd::product::{vectors, vectors_mut},
};

/// Turns a tile of products into base-2 logarithms of affinities, and raises `peaks` to their maxima. A function of its own
/// for each metric and decay: inlined into the stream, all of them would be compiled as one.
pub(super) struct Values<'a, 't, M, D> {
    pub of: Distances<'a>,
    pub metric: M,
    pub decay: D,
    pub panel: Panel<'a, 'a>,
    pub visible: Option<Visible<'a>>,
    pub tile: &'a mut Tile<'t>,
    pub peaks: &'a mut [f32],
}

impl<M: Geometry, D: Decay> WithSimd for Values<'_, '_, M, D> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (lanes, mut col) = (S::F32_LANES, 0);
        while col + 4 * lanes <= self.tile.queries {
            self.columns::<S, 4>(simd, col);
            col += 4 * lanes;
        }
        while col < self.tile.queries {
            self.columns::<S, 1>(simd, col);
            col += lanes;
        }
    }
}

impl<M: Geometry, D: Decay> Values<'_, '_, M, D> {
    /// `N` columns of vectors.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, simd: S, col: usize) {
        let Self { of, metric, decay, ref panel, visible, .. } = *self;
        let mut most = [simd.splat_f32s(0.0); N];
        most.copy_from_slice(vectors::<S, N>(self.peaks, col));
        for key in 0..self.tile.keys {
            let row = vectors_mut::<S, N>(self.tile.data, key * self.tile.stride + col);
            let mut products = [simd.splat_f32s(0.0); N];
            products.copy_from_slice(row);
            let logits = M::logits::<S, N>(simd, panel, key, col, products);
            let bias = simd.splat_f32s(if of.density.is_some() { panel.keys.terms[0][key] } else { 0.0 });
            let mut values = [simd.splat_f32s(0.0); N];
            for n in 0..N {
                values[n] = simd.add_f32s(decay.value(simd, of.scale, metric.distance(simd, logits[n])), bias);
            }
            if let Some(visible) = &visible {
                values = visible.show(simd, [key, col], values, f32::NEG_INFINITY);
            }
            for n in 0..N {
                row[n] = values[n];
                most[n] = simd.max_f32s(most[n], values[n]);
            }
        }
        vectors_mut::<S, N>(self.peaks, col).copy_from_slice(&most);
    }
}
