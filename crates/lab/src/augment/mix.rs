//! Mixing the pictures of a batch, and their targets with them.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Beta, Distribution};
use serde::{Deserialize, Serialize};

use super::resample::Rectangle;
use crate::picture::PictureShape;

/// Mixes every picture with its mirror image in the batch (first with last, and so on), all with one `lambda`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Mix {
    /// `alpha` of "mixup: Beyond Empirical Risk Minimization": lambda ~ Beta(alpha, alpha). Default 0.8; 0 is off.
    pub mixup: f64,
    /// `alpha` of "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features". Default 1;
    /// 0 is off. With both on, each batch draws one of them with equal odds.
    pub cutmix: f64,
    /// Probability that a batch is mixed at all. Default 1, in [0, 1].
    pub probability: f64,
}

impl Default for Mix {
    fn default() -> Self {
        Mix { mixup: 0.8, cutmix: 1.0, probability: 1.0 }
    }
}

impl Mix {
    /// Mixes `pixels [batch, channels, height, width]` and `targets [batch, classes]` in place.
    ///
    /// Returns lambda, the share that every picture keeps of itself; 1 where nothing was mixed.
    pub fn apply(&self, shape: PictureShape, pixels: &mut [f32], targets: &mut [f32], rng: &mut ChaCha8Rng) -> f32 {
        let batch = pixels.len() / shape.volume();
        let cut = match (self.mixup > 0.0, self.cutmix > 0.0) {
            (false, false) => return 1.0,
            (true, true) => rng.random(),
            (_, cut) => cut,
        };
        if batch < 2 || !rng.random_bool(self.probability) {
            return 1.0;
        }
        let lambda = share(if cut { self.cutmix } else { self.mixup }, rng);
        let lambda = if cut {
            let area = cut_area(shape, lambda, rng);
            each_pair(pixels, batch, |left, right| swap_area(shape, area, left, right));
            1.0 - (area.height * area.width) as f32 / shape.plane() as f32
        } else {
            each_pair(pixels, batch, |left, right| blend(lambda, left, right));
            lambda
        };
        each_pair(targets, batch, |left, right| blend(lambda, left, right));
        lambda
    }
}

/// lambda ~ Beta(alpha, alpha), for a validated `alpha` > 0.
fn share(alpha: f64, rng: &mut ChaCha8Rng) -> f32 {
    Beta::new(alpha, alpha).map_or(1.0, |beta| beta.sample(rng) as f32)
}

/// A rectangle of `1 - lambda` of the picture around a random middle, clipped at the edges.
fn cut_area(shape: PictureShape, lambda: f32, rng: &mut ChaCha8Rng) -> Rectangle {
    let side = (1.0 - lambda).max(0.0).sqrt();
    let mut span = |extent: usize| {
        let half = (side * extent as f32) as usize / 2;
        let middle = rng.random_range(0..extent);
        let first = middle.saturating_sub(half);
        (first, (middle + half).min(extent) - first)
    };
    let (top, height) = span(shape.height);
    let (left, width) = span(shape.width);
    Rectangle { top, left, height, width }
}

/// Calls `mix` on the items first and last, second and second last, and so on; a middle one stays as it is.
fn each_pair(items: &mut [f32], batch: usize, mut mix: impl FnMut(&mut [f32], &mut [f32])) {
    let len = items.len() / batch;
    let (left, right) = items.split_at_mut(batch / 2 * len);
    left.chunks_exact_mut(len).zip(right.rchunks_exact_mut(len)).for_each(|(left, right)| mix(left, right));
}

fn blend(lambda: f32, left: &mut [f32], right: &mut [f32]) {
    for (left, right) in left.iter_mut().zip(right) {
        (*left, *right) = (lambda * *left + (1.0 - lambda) * *right, lambda * *right + (1.0 - lambda) * *left);
    }
}

fn swap_area(shape: PictureShape, area: Rectangle, left: &mut [f32], right: &mut [f32]) {
    let Rectangle { top, left: first, height, width } = area;
    for (left, right) in left.chunks_exact_mut(shape.plane()).zip(right.chunks_exact_mut(shape.plane())) {
        for row in top..top + height {
            let columns = row * shape.width + first..row * shape.width + first + width;
            left[columns.clone()].swap_with_slice(&mut right[columns]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rng::{Purpose, stream};

    const SHAPE: PictureShape = PictureShape { channels: 2, height: 9, width: 12 };
    const BATCH: usize = 5;

    /// Picture i is all i, and belongs to class i.
    fn batch() -> (Vec<f32>, Vec<f32>) {
        let pixels = (0..BATCH * SHAPE.volume()).map(|at| (at / SHAPE.volume()) as f32).collect();
        let targets = (0..BATCH * BATCH).map(|at| f32::from(u8::from(at % BATCH == at / BATCH))).collect();
        (pixels, targets)
    }

    #[test]
    fn targets_follow_the_pixels_and_sum_to_one() {
        for mix in [Mix { cutmix: 0.0, ..Default::default() }, Mix { mixup: 0.0, ..Default::default() }] {
            let mut lambdas = Vec::new();
            for seed in 0..200 {
                let (mut pixels, mut targets) = batch();
                let lambda = mix.apply(SHAPE, &mut pixels, &mut targets, &mut stream(Purpose::Mix, seed, 0, 0));
                for (index, (picture, target)) in
                    pixels.chunks_exact(SHAPE.volume()).zip(targets.chunks_exact(BATCH)).enumerate()
                {
                    assert!((target.iter().sum::<f32>() - 1.0).abs() < 1e-6);
                    let mean = picture.iter().sum::<f32>() / SHAPE.volume() as f32;
                    let expected: f32 = target.iter().enumerate().map(|(class, share)| class as f32 * share).sum();
                    assert!((mean - expected).abs() < 1e-4, "picture {index}: {mean} against {expected}");
                    let kept = if index == BATCH / 2 { 1.0 } else { lambda };
                    assert!((target[index] - kept).abs() < 1e-6 || (lambda - 0.5).abs() < 1e-6);
                }
                lambdas.push(lambda);
            }
            lambdas.sort_by(f32::total_cmp);
            assert!(lambdas[5] < 0.4 && lambdas[180] > 0.9, "lambda spreads over [0, 1]: {lambdas:?}");
        }
    }

    #[test]
    fn both_kinds_take_turns_and_off_is_off() {
        let kinds = |mix: Mix| -> [usize; 3] {
            let mut counts = [0; 3];
            for seed in 0..100 {
                let (mut pixels, mut targets) = batch();
                let lambda = mix.apply(SHAPE, &mut pixels, &mut targets, &mut stream(Purpose::Mix, seed, 0, 0));
                let whole = pixels.iter().all(|value| value.fract() == 0.0);
                counts[if lambda == 1.0 { 0 } else { 1 + usize::from(whole) }] += 1;
            }
            counts
        };
        let [_, mixup, cutmix] = kinds(Mix::default());
        assert!(mixup > 30 && cutmix > 30, "{mixup} mixup, {cutmix} cutmix");
        assert_eq!(kinds(Mix { mixup: 0.0, cutmix: 0.0, probability: 1.0 }), [100, 0, 0]);
        assert_eq!(kinds(Mix { probability: 0.0, ..Default::default() }), [100, 0, 0]);
    }
}
