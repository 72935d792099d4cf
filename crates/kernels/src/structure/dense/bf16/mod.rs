//! The streams with bf16 products: what [`super::forward`] and [`super::backward`] compute for pairs by their inner product
//! or by their distance.
//!
//! Scores are held `[key][query]`, as there. Everything is laid out for [`crate::simd::bf16`] as it is loaded, so that each product of a
//! tile reads rounded pairs; scores, weights before rounding, and all sums are f32. Outputs and gradients of queries are summed
//! transposed, `[channel][query]`: the weights of a tile are then the right operand, which takes no transposition of them.

mod backward;
mod forward;
mod layout;
mod pairing;

use pulp::Simd;

use self::pairing::Rounded;
use super::{
    backward::{self as full_backward, Sums, Targets},
    forward as full_forward,
    normalise::{Normalisation, RowState, Tile, WeightRounding},
    pairing::Dot,
};
use crate::{Precision, Shape, call::Target, simd::bf16::Multiplier};

impl<P: Rounded, F: Fn(usize) -> P + Sync> full_forward::Stream<'_, F> {
    /// [`full_forward::Stream::run`] in the precision of the call.
    pub fn run_products(&self, out: &Target<'_>, stats: &mut [f64], work: &mut [f32]) {
        match self.call.bf16 {
            Some(products) => forward::run(self, products, out, stats, work),
            None => self.run(out, stats, work),
        }
    }
}

impl<P: Rounded, F: Fn(usize) -> P + Sync> full_backward::Stream<'_, F> {
    /// [`full_backward::Stream::run`] in the precision of the call.
    pub fn run_products(&self, targets: Targets<'_>, sums: Sums<'_>, work: &mut [f32]) {
        match self.call.bf16 {
            Some(products) => backward::run(self, products, targets, sums, work),
            None => self.run(targets, sums, work),
        }
    }
}

/// f32 of working memory of the forward stream for `shape` in the current thread pool.
pub(super) fn forward_work<P: Rounded>(shape: &Shape, precision: Precision) -> usize {
    match precision.parts() {
        0 => full_forward::work::<P>(shape),
        parts => forward::work::<P>(shape, parts),
    }
}

/// f32 of working memory of the backward stream.
pub(super) fn backward_work<P: Rounded>(shape: &Shape, tied: bool, precision: Precision) -> usize {
    match precision.parts() {
        0 => full_backward::work::<P>(shape, tied),
        parts => backward::work::<P>(shape, tied, parts),
    }
}

/// Logits with a factor: queries are rounded as they are, so that what bf16 holds already stays exact.
#[derive(Clone, Copy)]
struct Scaled<N> {
    norm: N,
    factor: f32,
    rounding: WeightRounding,
}

impl<N: Normalisation> Scaled<N> {
    fn of(pairing: &Dot<'_, N>, tiles: &Multiplier) -> Self {
        Self { norm: pairing.norm, factor: pairing.logit, rounding: WeightRounding::of_parts(tiles.parts()) }
    }
}

impl<N: Normalisation> Normalisation for Scaled<N> {
    const ABSENT: f32 = N::ABSENT;

    fn open(self, state: &mut RowState<'_>) {
        self.norm.open(state);
    }

    #[inline(always)]
    fn entry<S: Simd>(self, simd: S, logit: S::f32s) -> S::f32s {
        self.norm.rounded_entry(simd, simd.mul_f32s(logit, simd.splat_f32s(self.factor)), self.rounding)
    }

    #[inline(always)]
    fn gather<S: Simd>(self, simd: S, part: S::f32s, entry: S::f32s) -> S::f32s {
        self.norm.gather(simd, part, entry)
    }

    #[inline(always)]
    fn settle<S: Simd>(self, simd: S, tile: &mut Tile<'_>, state: &mut RowState<'_>) {
        self.norm.settle(simd, tile, state);
    }

    fn close(self, peak: f32, total: f64) -> (f32, f64) {
        self.norm.close(peak, total)
    }

    #[inline(always)]
    fn pair<S: Simd>(self, simd: S, logit: S::f32s, g: S::f32s, row: [S::f32s; 2]) -> (S::f32s, S::f32s) {
        self.norm.rounded_pair(simd, simd.mul_f32s(logit, simd.splat_f32s(self.factor)), g, row, self.rounding)
    }
}
