//! Pairs by their distance, on the plane or on the sphere.
//!
//! Squared distances come from the matrix product, `|q|^2 + |k|^2 - 2 q.k`, which cancels where two tokens are close: in f32
//! a pair of coinciding tokens would be 1e-2 apart. So tokens are centred first (a distance does not feel a translation),
//! and a pair closer than an eighth of its tokens' norms is computed again from the differences. The gradient `g (q - k)`
//! of such a pair cancels too, in `sum g q - sum g k`: it is added by itself.
//!
//! With products of bf16, tokens are rounded as they are, without a centre, so that what bf16 holds already stays exact; norms are those of
//! the rounded tokens, so that nothing but the rounding of f32 cancels in the expansion, and close pairs are computed from the differences
//! of the tokens that were not rounded. The distance of a token to itself is exactly zero in either.

mod geometry;
mod gradients;
mod layout;
mod weigh;

use std::ops::Range;

use pulp::Simd;

pub(super) use geometry::is_direct;
pub(super) use layout::{Frame, frames};

use super::{
    forward::TILE_STRIDE,
    head::{Head, Visible},
    normalise::{RowState, Tile, close_row, settle_rows},
    pairing::{PairTile, Pairing, Pass, Tokens},
};
use crate::{
    mechanism::Manifold,
    score::distance::{Gaussian, Levy, Plane, Scale, Sphere, Student},
    simd::product::{Size, Store, Term, store_sums},
};

/// Which [`crate::score::distance::Decay`].
#[derive(Clone, Copy)]
pub(super) enum Kernel {
    Levy,
    Student,
    Gaussian,
}

/// What dividing the density out of the affinities adds to one head. Base-2 logarithms, per token.
#[derive(Clone, Copy)]
pub(super) struct Density<'a> {
    /// Added to the logarithm of a key's affinities.
    pub bias: &'a [f32],
    /// Backward: log-sum-exp of the rows without the bias, and its gradient; empty while that is being summed.
    pub shift: &'a [f32],
    pub gradient: &'a [f32],
}

/// One head's tokens paired by their distance.
#[derive(Clone, Copy)]
pub(super) struct Distances<'a> {
    pub manifold: Manifold,
    pub kernel: Kernel,
    /// In units of the frame.
    pub scale: Scale,
    pub frame: Frame<'a>,
    pub density: Option<Density<'a>>,
    /// Backward: sum up the gradients of the log-affinities, and nothing else.
    pub columns_only: bool,
    /// Whether products are of bf16.
    pub rounded: bool,
}

/// `$run` with the head's metric and decay.
macro_rules! dispatch {
    ($of:expr, $metric:ident, $decay:ident, $run:expr) => {
        match ($of.manifold, $of.kernel) {
            (Manifold::Euclidean, Kernel::Levy) => dispatch!(@ $metric = Plane, $decay = Levy, $run),
            (Manifold::Euclidean, Kernel::Student) => dispatch!(@ $metric = Plane, $decay = Student, $run),
            (Manifold::Euclidean, Kernel::Gaussian) => dispatch!(@ $metric = Plane, $decay = Gaussian, $run),
            (Manifold::Sphere, Kernel::Levy) => dispatch!(@ $metric = Sphere, $decay = Levy, $run),
            (Manifold::Sphere, Kernel::Student) => dispatch!(@ $metric = Sphere, $decay = Student, $run),
            (Manifold::Sphere, Kernel::Gaussian) => dispatch!(@ $metric = Sphere, $decay = Gaussian, $run),
        }
    };
    (@ $metric:ident = $m:ident, $decay:ident = $d:ident, $run:expr) => {{
        let ($metric, $decay) = ($m, $d);
        $run
    }};
}

impl<'a> Distances<'a> {
    pub fn panel<'t>(
        &self,
        head_dim: usize,
        columns: Range<usize>,
        [queries, keys]: [&'a Tokens<'t>; 2],
    ) -> geometry::Panel<'a, 't> {
        let direct = !self.rounded && is_direct(self.manifold, head_dim);
        geometry::Panel { head_dim, direct, columns, queries, keys }
    }
}

impl Distances<'_> {
    /// Makes weights of the products in `tile`.
    #[inline(always)]
    pub fn weights<S: Simd>(
        self,
        simd: S,
        panel: geometry::Panel<'_, '_>,
        visible: Option<Visible<'_>>,
        tile: &mut Tile<'_>,
        state: &mut RowState<'_>,
    ) {
        state.part.copy_from_slice(state.peak);
        let peaks = &mut *state.part;
        dispatch!(self, metric, decay, {
            simd.vectorize(weigh::Values { of: self, metric, decay, panel, visible, tile: &mut *tile, peaks })
        });
        settle_rows(simd, tile, state);
    }

    /// Makes weights and gradients of the products in the tiles of `pairs`.
    #[inline(always)]
    pub fn slopes<S: Simd>(self, simd: S, panel: geometry::Panel<'_, '_>, pairs: &mut PairTile<'_, '_>) {
        pairs.apply_dropout(simd, |pairs| &mut *pairs.slopes);
        {
            let pairs = &mut *pairs;
            dispatch!(self, metric, decay, simd.vectorize(gradients::Slopes { of: self, metric, decay, panel, pairs }));
        }
        pairs.apply_dropout(simd, |pairs| &mut *pairs.weights);
    }
}

impl Pairing for Distances<'_> {
    /// Sums over all pairs of the gradient of the log-affinity times its radial derivative, and times the log-affinity.
    const PARAMETERS: usize = 2;
    const MARGINS: bool = true;

    fn query_buffer_len(count: usize, head_dim: usize, _: Pass) -> usize {
        layout::query_buffer_len(count, head_dim)
    }

    fn key_buffer_len(count: usize, head_dim: usize) -> usize {
        layout::key_buffer_len(count, head_dim)
    }

    fn queries<'t>(self, head: &Head<'t>, kept: &[u32], _: Pass, buffer: &'t mut [f32]) -> Tokens<'t> {
        layout::queries(self, head, kept, buffer)
    }

    fn keys<'t>(self, head: &Head<'t>, kept: &[u32], _: Pass, buffer: &'t mut [f32]) -> Tokens<'t> {
        layout::keys(self, head, kept, buffer)
    }

    #[inline(always)]
    fn weigh<S: Simd>(
        self,
        simd: S,
        head_dim: usize,
        columns: Range<usize>,
        tokens: [&Tokens<'_>; 2],
        visible: Option<Visible<'_>>,
        tile: &mut Tile<'_>,
        state: &mut RowState<'_>,
    ) {
        let panel = self.panel(head_dim, columns, tokens);
        panel.products(simd, tile.keys, tile.data);
        self.weights(simd, panel, visible, tile, state);
    }

    fn close(self, peak: f32, total: f64) -> (f32, f64) {
        close_row(peak, total)
    }

    #[inline(always)]
    fn pull_back<S: Simd>(self, simd: S, mut pairs: PairTile<'_, '_>) {
        let panel = self.panel(pairs.head_dim, pairs.columns.clone(), [pairs.queries, pairs.keys]);
        let rows = pairs.visible.keys.len();
        panel.products(simd, rows, pairs.weights);
        let size = Size { rows, cols: pairs.columns.len(), depth: pairs.value_dim };
        let store = Store { data: &mut *pairs.slopes, stride: TILE_STRIDE };
        store_sums(simd, Term::Product, size, pairs.values.as_left(), pairs.gradients, store);
        self.slopes(simd, panel, &mut pairs);
    }

    fn gradient(self, tokens: &Tokens<'_>, n: usize, margin: f32, sums: &[f32], out: &mut [f32]) {
        layout::gradient(self, tokens, n, margin, sums, out);
    }
}
