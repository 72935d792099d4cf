//! Maps of token rows to features whose inner products stand for affinities.
//!
//! Rows are first multiplied by the root of the score's scale. A row of features is held as `phi(x) = 2^level psi`, the level a whole
//! number: of a query it cancels where rows are normalised, of keys only differences of levels count. So exponentials of any size fit.

use std::{
    f32::consts::LOG2_E,
    sync::{Arc, Mutex, PoisonError},
};

use pulp::{Simd, WithSimd};

use super::product::Products;
use crate::{
    mechanism::{FeatureMap, Features},
    random_features,
    simd::{
        Level,
        bf16::Bf16Products,
        math::exp2,
        product::{Left, Right, Size},
    },
    structure::dense::{dot, padded},
};

/// The directions of `favor`, in both orders that products need.
#[derive(Debug)]
pub(super) struct Directions {
    /// `[dim][padded(count)]`.
    by_channel: Vec<f32>,
    /// `[count][padded(dim)]`.
    by_feature: Vec<f32>,
}

impl Directions {
    fn draw(seed: u64, count: usize, dim: usize) -> Self {
        let rows = random_features::directions(seed, count, dim);
        let (width, stride) = (padded(count), padded(dim));
        let (mut by_channel, mut by_feature) = (vec![0.0; dim * width], vec![0.0; count * stride]);
        for (f, row) in rows.chunks_exact(dim).enumerate() {
            for (c, &x) in row.iter().enumerate() {
                by_channel[c * width + f] = x as f32;
                by_feature[f * stride + c] = x as f32;
            }
        }
        Self { by_channel, by_feature }
    }

    /// Those of a configuration, none where nothing is drawn. They are constants, and drawn once for all calls.
    pub fn of(m: &Features, dim: usize) -> Option<Arc<Self>> {
        /// Draws that are held: a model has one per width of its heads.
        const HELD: usize = 8;
        type Key = (u64, usize, usize);
        static DRAWN: Mutex<Vec<(Key, Arc<Directions>)>> = Mutex::new(Vec::new());
        if !m.map.is_random() {
            return None;
        }
        let key = (m.seed, m.count(dim), dim);
        let mut drawn = DRAWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, directions)) = drawn.iter().find(|(held, _)| *held == key) {
            return Some(directions.clone());
        }
        let directions = Arc::new(Self::draw(key.0, key.1, key.2));
        if drawn.len() == HELD {
            drawn.remove(0);
        }
        drawn.push((key, directions.clone()));
        Some(directions)
    }
}

/// The map of one head.
#[derive(Clone, Copy)]
pub(super) struct Map<'a> {
    pub level: Level,
    pub bf16: Option<Bf16Products>,
    /// Channels of a token.
    pub dim: usize,
    /// Features of a token.
    pub count: usize,
    pub directions: Option<&'a Directions>,
    /// The root of the score's scale.
    pub root: f32,
}

/// Features of a token of `dim` channels.
pub(super) fn count(m: &Features, dim: usize) -> usize {
    if m.map == FeatureMap::Elu { dim } else { m.count(dim) }
}

impl Map<'_> {
    /// Distance of rows of features.
    pub fn width(&self) -> usize {
        padded(self.count)
    }

    /// Writes `psi` of every row of `x`, zero beyond the features, and its level. `keys`: whether the factor of a row counts.
    pub fn features(
        &self,
        products: &mut Products<'_>,
        x: &[f32],
        keys: bool,
        (psi, levels): (&mut [f32], &mut [f32]),
    ) {
        let (dim, width, rows) = (self.dim, self.width(), x.len() / self.dim);
        let psi = &mut psi[..rows * width];
        let Some(directions) = self.directions else {
            return self.level.dispatch(Elu { x, dim, root: self.root, psi, width, levels });
        };
        let left = Left { data: x, row_stride: dim, depth_stride: 1 };
        let right = Right { data: &directions.by_channel, stride: width };
        products.multiply(Size { rows, cols: width, depth: dim }, left, right, (psi, width), false);
        for ((x, psi), level) in x.chunks_exact(dim).zip(psi.chunks_exact_mut(width)).zip(levels) {
            let energy = 0.5 * f64::from(self.root).powi(2) * dot(x, x);
            let (energy, poison) = if energy.is_finite() { (energy, 0.0) } else { (0.0, f32::NAN) };
            let energy = if keys { energy * std::f64::consts::LOG2_E } else { 0.0 };
            let (psi, rest) = psi.split_at_mut(self.count);
            rest.fill(0.0);
            *level = self.level.dispatch(Favor { psi, factor: self.root * LOG2_E, energy, poison });
        }
    }

    /// The gradient of the rows `x` from `dpsi`, that of their features `psi`: written to `dx`, or added. `dpsi` is overwritten; `buffer`
    /// holds a padded row per row. Rows that are not kept get nothing.
    pub fn pull_back(
        &self,
        (x, keys): (&[f32], bool),
        (psi, dpsi): (&[f32], &mut [f32]),
        (products, buffer): (&mut Products<'_>, &mut [f32]),
        (dx, add): (&mut [f32], bool),
        keeps: &impl Fn(usize) -> bool,
    ) {
        let (dim, width, rows) = (self.dim, self.width(), x.len() / self.dim);
        let (psi, dpsi) = (&psi[..rows * width], &mut dpsi[..rows * width]);
        let put = |dx: &mut f32, x: f32| *dx = if add { *dx + x } else { x };
        let dropped = |row: usize, dx: &mut [f32]| {
            if !keeps(row) && !add {
                dx.fill(0.0);
            }
            !keeps(row)
        };
        let Some(directions) = self.directions else {
            // The slope of elu is 1 where psi is above 1, else psi itself.
            self.level.dispatch(|| dpsi.iter_mut().zip(psi).for_each(|(d, p)| *d *= p.min(1.0)));
            for (row, (dx, d)) in dx.chunks_exact_mut(dim).zip(dpsi.chunks_exact(width)).enumerate() {
                if dropped(row, dx) {
                    continue;
                }
                self.level.dispatch(|| dx.iter_mut().zip(d).for_each(|(dx, d)| put(dx, self.root * d)));
            }
            return;
        };
        let stride = padded(dim);
        self.level.dispatch(|| dpsi.iter_mut().zip(psi).for_each(|(d, p)| *d *= p));
        let left = Left { data: dpsi, row_stride: width, depth_stride: 1 };
        let right = Right { data: &directions.by_feature, stride };
        products.multiply(Size { rows, cols: stride, depth: self.count }, left, right, (buffer, stride), false);
        let rows = x.chunks_exact(dim).zip(dx.chunks_exact_mut(dim)).zip(dpsi.chunks_exact(width));
        for (row, (((x, dx), d), of_product)) in rows.zip(buffer.chunks_exact(stride)).enumerate() {
            if dropped(row, dx) {
                continue;
            }
            // A query's features have a factor of their own that cancels: they sum to nothing here.
            let along = if keys { self.root * self.root * d.iter().sum::<f32>() } else { 0.0 };
            let terms = of_product.iter().zip(x).map(|(p, x)| self.root * p - along * x);
            dx.iter_mut().zip(terms).for_each(|(dx, term)| put(dx, term));
        }
    }
}

/// `elu(x) + 1` of rows: `x + 1` above 0, else `exp(x)`. A row without a positive channel is divided by a power of two.
/// "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", eq. 7.
struct Elu<'a> {
    x: &'a [f32],
    dim: usize,
    root: f32,
    psi: &'a mut [f32],
    width: usize,
    levels: &'a mut [f32],
}

impl WithSimd for Elu<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, dim, root, psi, width, levels } = self;
        let zero = simd.splat_f32s(0.0);
        let (factor, rate) = (simd.splat_f32s(root), simd.splat_f32s(root * LOG2_E));
        let least = simd.splat_f32s(f32::NEG_INFINITY);
        for ((x, psi), level) in x.chunks_exact(dim).zip(psi.chunks_exact_mut(width)).zip(levels) {
            let (head, tail) = S::as_simd_f32s(x);
            let (mut most, mut poison) = (least, zero);
            for &x in head {
                (most, poison) = (simd.max_f32s(most, x), simd.mul_add_e_f32s(x, zero, poison));
            }
            let most = tail.iter().fold(simd.reduce_max_f32s(most), |most, x| most.max(*x));
            // Zero, or NaN where a channel is no number.
            let poison = simd.reduce_sum_f32s(poison) + tail.iter().map(|x| x * 0.0).sum::<f32>();
            *level = (most * root * LOG2_E).min(0.0).ceil() + poison;
            let constants = [factor, rate, simd.splat_f32s(-*level), simd.splat_f32s(poison)];
            let into = S::as_mut_simd_f32s(psi).0;
            for (psi, &x) in into.iter_mut().zip(head) {
                *psi = elu(simd, x, constants);
            }
            if !tail.is_empty() {
                into[head.len()] = elu(simd, simd.partial_load_f32s(tail), constants);
            }
            psi[dim..].fill(0.0);
        }
    }
}

/// `factor x + 1` above 0, else `2^(rate x + shift)`, and `poison`.
#[inline(always)]
fn elu<S: Simd>(simd: S, x: S::f32s, [factor, rate, shift, poison]: [S::f32s; 4]) -> S::f32s {
    let zero = simd.splat_f32s(0.0);
    let power = power(simd, x, rate, shift);
    let linear = simd.mul_add_e_f32s(x, factor, simd.splat_f32s(1.0));
    simd.add_f32s(simd.select_f32s(simd.less_than_f32s(zero, x), linear, power), poison)
}

/// `2^(rate x + shift)`, at most 1.
#[inline(always)]
fn power<S: Simd>(simd: S, x: S::f32s, rate: S::f32s, shift: S::f32s) -> S::f32s {
    exp2(simd, simd.min_f32s(simd.mul_add_e_f32s(x, rate, shift), simd.splat_f32s(0.0)))
}

/// One row's `2^(factor w.x - energy)`, from `w.x`, divided by the power of two that makes the largest at most one: its level.
/// "Rethinking Attention with Performers", eq. 5 and 6; what is common to all rows cancels.
struct Favor<'a> {
    psi: &'a mut [f32],
    factor: f32,
    energy: f64,
    /// 0, or NaN where the row has no features.
    poison: f32,
}

impl WithSimd for Favor<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let Self { psi, factor, energy, poison } = self;
        let (head, tail) = S::as_mut_simd_f32s(psi);
        let mut most = simd.splat_f32s(f32::NEG_INFINITY);
        for x in &*head {
            most = simd.max_f32s(most, *x);
        }
        let most = tail.iter().fold(simd.reduce_max_f32s(most), |most, x| most.max(*x));
        let level = (f64::from(factor) * f64::from(most) - energy).ceil();
        // The energy is that of all features: only what it leaves over a whole number is rounded to f32.
        let (shift, rate) = (simd.splat_f32s((-energy - level) as f32), simd.splat_f32s(factor));
        let poison = simd.splat_f32s(poison);
        for x in head {
            *x = simd.add_f32s(power(simd, *x, rate, shift), poison);
        }
        if !tail.is_empty() {
            let last = simd.add_f32s(power(simd, simd.partial_load_f32s(tail), rate, shift), poison);
            simd.partial_store_f32s(tail, last);
        }
        level as f32 + simd.reduce_max_f32s(poison)
    }
}
