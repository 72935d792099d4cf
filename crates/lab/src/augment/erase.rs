//! Covering a random rectangle with noise.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use super::resample::Rectangle;
use crate::picture::PictureShape;

/// "Random Erasing Data Augmentation", with normal noise for every value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RandomErasing {
    /// Probability that a picture loses a rectangle. Default 0.25, in [0, 1].
    pub probability: f64,
    /// Least and greatest share of the picture that is covered. Default [0.02, 0.33], within (0, 1].
    pub area: [f32; 2],
    /// Least and greatest proportion of height to width. Default [0.3, 3.3], above 0.
    pub ratio: [f32; 2],
}

impl Default for RandomErasing {
    fn default() -> Self {
        RandomErasing { probability: 0.25, area: [0.02, 0.33], ratio: [0.3, 3.3] }
    }
}

impl RandomErasing {
    /// Erases from normalised values `[channels, height, width]`, so that the noise has the spread of the data.
    pub(super) fn apply(&self, shape: PictureShape, values: &mut [f32], rng: &mut ChaCha8Rng) {
        if !rng.random_bool(self.probability) {
            return;
        }
        let Some(Rectangle { top, left, height, width }) = Rectangle::random(shape, self.area, self.ratio, rng) else {
            return;
        };
        for plane in values.chunks_exact_mut(shape.plane()) {
            for row in plane.chunks_exact_mut(shape.width).skip(top).take(height) {
                row[left..left + width].fill_with(|| rng.sample(StandardNormal));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rng::{Purpose, stream};

    #[test]
    fn one_rectangle_of_the_right_share_turns_to_noise() {
        let shape = PictureShape { channels: 2, height: 20, width: 30 };
        let erasing = RandomErasing { probability: 1.0, ..Default::default() };
        for seed in 0..50 {
            let mut values = vec![f32::NAN; shape.volume()];
            erasing.apply(shape, &mut values, &mut stream(Purpose::Augment, seed, 0, 0));
            let erased: Vec<usize> = (0..shape.plane()).filter(|&at| !values[at].is_nan()).collect();
            assert!((0..shape.plane()).all(|at| values[at].is_nan() == values[shape.plane() + at].is_nan()));
            let share = erased.len() as f32 / shape.plane() as f32;
            assert!((0.01..0.4).contains(&share), "{share}");
            let span = |of: fn(usize) -> usize| {
                let at = || erased.iter().map(|&at| of(at));
                at().max().unwrap() - at().min().unwrap() + 1
            };
            assert_eq!(span(|at| at / 30) * span(|at| at % 30), erased.len(), "a full rectangle");
        }
    }

    #[test]
    fn probability_zero_erases_nothing() {
        let shape = PictureShape { channels: 1, height: 4, width: 4 };
        let mut values = vec![7.0; 16];
        let erasing = RandomErasing { probability: 0.0, ..Default::default() };
        erasing.apply(shape, &mut values, &mut stream(Purpose::Augment, 0, 0, 0));
        assert_eq!(values, [7.0; 16]);
    }
}
