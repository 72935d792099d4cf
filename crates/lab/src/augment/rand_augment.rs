//! A few random operations of one common strength.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use super::{Picture, affine, colour};

/// "RandAugment: Practical automated data augmentation with a reduced search space", with the list of operations and the
/// defaults of "Training data-efficient image transformers & distillation through attention".
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RandAugment {
    /// Operations drawn per picture, with repetition. Default 2, in 1..=15.
    pub operations: usize,
    /// Strength of the operations. Default 9, in [0, 10].
    pub magnitude: f32,
    /// Standard deviation of the strength from one operation to the next. Default 0.5, in [0, 10].
    pub deviation: f32,
    /// Probability that a drawn operation is applied. Default 0.5, in [0, 1].
    pub probability: f64,
}

impl Default for RandAugment {
    fn default() -> Self {
        RandAugment { operations: 2, magnitude: 9.0, deviation: 0.5, probability: 0.5 }
    }
}

impl RandAugment {
    /// `fill`: one value per channel for what shifts and turns uncover.
    pub(super) fn apply(&self, picture: &mut Picture, fill: &[f32], rng: &mut ChaCha8Rng) {
        for _ in 0..self.operations {
            let operation = Operation::ALL[rng.random_range(0..Operation::ALL.len())];
            if rng.random_bool(self.probability) {
                let magnitude = self.magnitude + self.deviation * rng.sample::<f32, _>(StandardNormal);
                operation.apply(picture, magnitude.clamp(0.0, MOST) / MOST, rng.random(), fill);
            }
        }
    }
}

/// The greatest magnitude.
const MOST: f32 = 10.0;

/// One operation of [`RandAugment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Stretches each channel to the whole range; has no strength.
    AutoContrast,
    /// Makes all levels about equally frequent; has no strength.
    Equalize,
    /// Turns bright into dark; has no strength.
    Invert,
    /// Turns by up to 30 degrees.
    Rotate,
    /// Keeps the 8 to 4 highest bits.
    Posterize,
    /// Inverts what is brighter than a threshold that falls from above 1 to 0.
    Solarize,
    /// Adds up to 110/255 to the dark half.
    SolarizeAdd,
    /// Multiplies saturation by 1 +- 0.9; no effect on grey pictures.
    Colour,
    /// Multiplies contrast by 1 +- 0.9.
    Contrast,
    /// Multiplies brightness by 1 +- 0.9.
    Brightness,
    /// Multiplies sharpness by 1 +- 0.9.
    Sharpness,
    /// Shears rows by up to 0.3.
    ShearX,
    /// Shears columns by up to 0.3.
    ShearY,
    /// Shifts by up to 0.45 of the width.
    TranslateX,
    /// Shifts by up to 0.45 of the height.
    TranslateY,
}

impl Operation {
    /// All operations.
    pub const ALL: [Operation; 15] = [
        Operation::AutoContrast,
        Operation::Equalize,
        Operation::Invert,
        Operation::Rotate,
        Operation::Posterize,
        Operation::Solarize,
        Operation::SolarizeAdd,
        Operation::Colour,
        Operation::Contrast,
        Operation::Brightness,
        Operation::Sharpness,
        Operation::ShearX,
        Operation::ShearY,
        Operation::TranslateX,
        Operation::TranslateY,
    ];

    /// Applies the operation with `strength` in [0, 1], in the negative direction where it has two and `negative` says
    /// so. Strength 0 changes nothing, but for the operations that have none.
    pub fn apply(self, picture: &mut Picture, strength: f32, negative: bool, fill: &[f32]) {
        let signed = if negative { -strength } else { strength };
        let factor = 1.0 + 0.9 * signed;
        let (height, width) = (picture.shape.height as f32, picture.shape.width as f32);
        let mut warp = |matrix, offset| {
            if strength > 0.0 {
                affine::warp(picture, matrix, offset, fill);
            }
        };
        match self {
            Operation::Rotate => {
                let (sin, cos) = (signed * 30_f32.to_radians()).sin_cos();
                warp([[cos, sin], [-sin, cos]], [0.0, 0.0]);
            }
            Operation::ShearX => warp([[1.0, 0.3 * signed], [0.0, 1.0]], [0.0, 0.0]),
            Operation::ShearY => warp([[1.0, 0.0], [0.3 * signed, 1.0]], [0.0, 0.0]),
            Operation::TranslateX => warp([[1.0, 0.0], [0.0, 1.0]], [0.45 * signed * width, 0.0]),
            Operation::TranslateY => warp([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.45 * signed * height]),
            Operation::AutoContrast => colour::auto_contrast(picture),
            Operation::Equalize => colour::equalize(picture),
            Operation::Invert => picture.map(|value| 1.0 - value),
            Operation::Posterize => colour::posterize(picture, 8 - (4.0 * strength).round() as u32),
            Operation::Solarize if strength > 0.0 => colour::solarize(picture, 1.0 - strength),
            Operation::Solarize => {}
            Operation::SolarizeAdd => colour::solarize_add(picture, strength * 110.0 / 255.0),
            Operation::Colour => colour::saturation(picture, factor),
            Operation::Contrast => colour::contrast(picture, factor),
            Operation::Brightness => colour::brightness(picture, factor),
            Operation::Sharpness => colour::sharpness(picture, factor),
        }
    }

    /// Whether the operation has a strength.
    pub fn has_strength(self) -> bool {
        !matches!(self, Operation::AutoContrast | Operation::Equalize | Operation::Invert)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::PictureShape;

    fn picture(channels: usize) -> Picture {
        let shape = PictureShape { channels, height: 12, width: 16 };
        let bytes: Vec<u8> = (0..shape.volume()).map(|index| (index * 7919 % 256) as u8).collect();
        Picture::from_bytes(shape, &bytes)
    }

    #[test]
    fn no_strength_changes_nothing() {
        for (operation, channels) in Operation::ALL.into_iter().flat_map(|operation| [(operation, 1), (operation, 3)]) {
            let mut changed = picture(channels);
            operation.apply(&mut changed, 0.0, true, &[0.5; 3]);
            let same = changed.to_bytes() == picture(channels).to_bytes();
            assert_eq!(same, operation.has_strength(), "{operation:?} on {channels} channels");
        }
    }

    #[test]
    fn full_strength_changes_something_and_stays_in_range() {
        for (operation, channels) in Operation::ALL.into_iter().flat_map(|operation| [(operation, 1), (operation, 3)]) {
            for negative in [false, true] {
                let mut changed = picture(channels);
                operation.apply(&mut changed, 1.0, negative, &[0.5; 3]);
                assert!(changed.values.iter().all(|value| (0.0..=1.0).contains(value)), "{operation:?}");
                let same = changed.to_bytes() == picture(channels).to_bytes();
                assert_eq!(same, operation == Operation::Colour && channels == 1, "{operation:?}");
            }
        }
    }
}
