//! From products of tokens to the logits of [`Metric`], exact also for close pairs.

use std::ops::Range;

use pulp::Simd;

use super::super::{forward::TILE_STRIDE, pairing::Tokens};
use crate::{
    mechanism::Manifold,
    score::distance::{Metric, Plane, Sphere},
    simd::product::{Size, Store, Term, squares, store_sums, vectors},
};

/// Up to this width, distances are summed from differences at once: two instructions per channel instead of one, and exact.
const DIRECT: usize = 16;

/// A panel of queries before a tile of keys.
pub(in super::super) struct Panel<'a, 't> {
    pub head_dim: usize,
    /// Whether the products are squared distances: see [`is_direct`].
    pub direct: bool,
    /// The queries, among all that are laid out.
    pub columns: Range<usize>,
    pub queries: &'a Tokens<'t>,
    pub keys: &'a Tokens<'t>,
}

impl Panel<'_, '_> {
    /// The vectors of a number per query.
    #[inline(always)]
    pub fn of_queries<'x, S: Simd, const N: usize>(&self, numbers: &'x [f32], col: usize) -> &'x [S::f32s] {
        vectors::<S, N>(numbers, self.columns.start + col)
    }

    /// Fills the first `keys` rows of `tile` with the products that [`Geometry::logits`] takes.
    #[inline(always)]
    pub fn products<S: Simd>(&self, simd: S, keys: usize, tile: &mut [f32]) {
        let size = Size { rows: keys, cols: self.columns.len(), depth: self.head_dim };
        let (term, rows, panels) = if self.direct {
            (Term::SquaredDifference, self.keys.exact, self.queries.exact_panels)
        } else {
            (Term::Product, self.keys.rows, self.queries.panels)
        };
        let panel = Tokens::panel(panels, self.head_dim, &self.columns);
        store_sums(simd, term, size, rows.as_left(), panel, Store { data: tile, stride: TILE_STRIDE });
    }

    /// The squared differences (or sums) of one key and some queries, from tokens that were not rounded.
    #[inline(always)]
    fn exact<S: Simd, const SUMS: bool, const N: usize>(&self, simd: S, key: usize, col: usize) -> [S::f32s; N] {
        let panel = Tokens::panel(self.queries.exact_panels, self.head_dim, &self.columns);
        squares::<S, SUMS, N>(simd, self.head_dim, (key, col), self.keys.exact.as_left(), panel)
    }
}

/// Whether the products are squared distances at once: up to [`DIRECT`] channels of the plane.
pub(in super::super) fn is_direct(manifold: Manifold, head_dim: usize) -> bool {
    manifold == Manifold::Euclidean && head_dim <= DIRECT
}

/// A metric as the streams compute it.
pub(super) trait Geometry: Metric {
    /// The logits of a key and `N` vectors of queries from their products.
    fn logits<S: Simd, const N: usize>(
        simd: S,
        panel: &Panel<'_, '_>,
        key: usize,
        col: usize,
        products: [S::f32s; N],
    ) -> [S::f32s; N];
    /// Negative where a pair is close to a pole of its gradient, at a logit.
    fn clearance<S: Simd>(simd: S, logit: S::f32s, norms: S::f32s) -> S::f32s;
    /// The factor on the query in the difference that a close pair's gradient is along, from the logit.
    fn reflection(logit: f32) -> f32;
}

/// A pair is close when its squared distance is below this part of its tokens' squared norms: what the expansion loses is
/// then at most the inverse of it.
const CLOSE: f32 = 1.0 / 64.0;

/// A pair is close, or nearly antipodal, when `1 - |cos|` is below this.
const STEEP: f32 = 0.03;

impl Geometry for Plane {
    #[inline(always)]
    fn logits<S: Simd, const N: usize>(
        simd: S,
        panel: &Panel<'_, '_>,
        key: usize,
        col: usize,
        mut products: [S::f32s; N],
    ) -> [S::f32s; N] {
        if panel.direct {
            return products;
        }
        let zero = simd.splat_f32s(0.0);
        let of_key = simd.splat_f32s(panel.keys.norms[key]);
        let of_queries = panel.of_queries::<S, N>(panel.queries.norms, col);
        let (mut clearance, mut least) = ([zero; N], zero);
        for n in 0..N {
            let norms = simd.add_f32s(of_key, of_queries[n]);
            products[n] = simd.max_f32s(simd.add_f32s(norms, products[n]), zero);
            clearance[n] = Self::clearance(simd, products[n], norms);
            least = simd.min_f32s(least, clearance[n]);
        }
        if simd.reduce_min_f32s(least) < 0.0 {
            let exact = panel.exact::<S, false, N>(simd, key, col);
            for n in 0..N {
                let close = simd.less_than_f32s(clearance[n], zero);
                products[n] = simd.select_f32s(close, exact[n], products[n]);
            }
        }
        products
    }

    #[inline(always)]
    fn clearance<S: Simd>(simd: S, logit: S::f32s, norms: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(norms, simd.splat_f32s(-CLOSE), logit)
    }

    fn reflection(_: f32) -> f32 {
        1.0
    }
}

impl Geometry for Sphere {
    #[inline(always)]
    fn logits<S: Simd, const N: usize>(
        simd: S,
        panel: &Panel<'_, '_>,
        key: usize,
        col: usize,
        mut products: [S::f32s; N],
    ) -> [S::f32s; N] {
        let (zero, one) = (simd.splat_f32s(0.0), simd.splat_f32s(1.0));
        let (mut a, mut least) = ([zero; N], one);
        for n in 0..N {
            a[n] = simd.max_f32s(simd.sub_f32s(one, simd.abs_f32s(products[n])), zero);
            least = simd.min_f32s(least, a[n]);
        }
        if simd.reduce_min_f32s(least) < STEEP {
            // 1 - |cos| is half the square of the chord, to the token or to its antipode.
            let to = panel.exact::<S, false, N>(simd, key, col);
            let away = panel.exact::<S, true, N>(simd, key, col);
            for n in 0..N {
                let chord = simd.mul_f32s(simd.min_f32s(to[n], away[n]), simd.splat_f32s(0.5));
                let steep = simd.less_than_f32s(a[n], simd.splat_f32s(STEEP));
                a[n] = simd.select_f32s(steep, chord, a[n]);
            }
        }
        for n in 0..N {
            let sign = simd.and_u32s(simd.transmute_u32s_f32s(products[n]), simd.splat_u32s(1 << 31));
            products[n] = simd.transmute_f32s_u32s(simd.or_u32s(simd.transmute_u32s_f32s(a[n]), sign));
        }
        products
    }

    #[inline(always)]
    fn clearance<S: Simd>(simd: S, logit: S::f32s, _: S::f32s) -> S::f32s {
        simd.sub_f32s(simd.abs_f32s(logit), simd.splat_f32s(STEEP))
    }

    fn reflection(logit: f32) -> f32 {
        if logit.is_sign_negative() { -1.0 } else { 1.0 }
    }
}
