//! Augmentation of pictures as it is used to train vision transformers from little data ("Training data-efficient image
//! transformers & distillation through attention", table 9).
//!
//! Everything random follows from (seed, epoch, picture) or (seed, epoch, batch): threads and resuming do not matter.

mod affine;
mod colour;
mod erase;
mod mix;
mod picture;
mod rand_augment;
mod resample;
mod transform;

use serde::{Deserialize, Serialize};

pub use colour::ColourJitter;
pub use erase::RandomErasing;
pub use mix::Mix;
pub use picture::Picture;
pub use rand_augment::{Operation, RandAugment};
pub use resample::{Filter, Rectangle, resample};
pub use transform::{Transform, View};

use crate::error::data::{Error, Result};

/// What is done to the pictures of a training batch, in the order of the fields. The default does nothing.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Augment {
    /// Cuts out a random part and resizes it. Default off.
    pub resized_crop: Option<ResizedCrop>,
    /// Shifts by up to this many pixels both ways, as cutting from a padded picture does. Default 0.
    pub padding: usize,
    /// Probability of turning left side right. Default 0 (right for digits and letters), in [0, 1].
    pub flip: f64,
    /// Changes brightness, contrast, saturation and hue. Default off.
    pub colour_jitter: Option<ColourJitter>,
    /// Applies random operations. Default off.
    pub rand_augment: Option<RandAugment>,
    /// Covers a rectangle with noise. Default off.
    pub erasing: Option<RandomErasing>,
    /// Mixes the pictures of a batch. Default off.
    pub mix: Option<Mix>,
    /// Value in [0, 1] of what shifts and turns uncover. Default null: the mean of the channel over the training split.
    pub fill: Option<f32>,
}

/// The random crop of "Going Deeper with Convolutions", section 6.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResizedCrop {
    /// Least and greatest share of the picture's area. Default [0.08, 1], within (0, 1].
    pub area: [f32; 2],
    /// Least and greatest proportion of height to width. Default [3/4, 4/3], above 0.
    pub ratio: [f32; 2],
    /// How the part is resized. Default bicubic.
    pub filter: Filter,
}

impl Default for ResizedCrop {
    fn default() -> Self {
        ResizedCrop { area: [0.08, 1.0], ratio: [3.0 / 4.0, 4.0 / 3.0], filter: Filter::Bicubic }
    }
}

impl Augment {
    /// The recipe of "Training data-efficient image transformers & distillation through attention", table 9.
    pub fn deit() -> Self {
        Augment {
            resized_crop: Some(ResizedCrop::default()),
            flip: 0.5,
            rand_augment: Some(RandAugment::default()),
            erasing: Some(RandomErasing::default()),
            mix: Some(Mix::default()),
            ..Augment::default()
        }
    }

    /// Small shifts, and left-right flips where they keep the class: what short runs on small pictures profit from.
    pub fn light(flip: bool) -> Self {
        Augment { padding: 2, flip: if flip { 0.5 } else { 0.0 }, ..Augment::default() }
    }

    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Setting`] naming the first field outside its range.
    pub fn validate(&self) -> Result<()> {
        within("flip", self.flip, 0.0, 1.0, "in [0, 1]")?;
        within("fill", self.fill.unwrap_or(0.0).into(), 0.0, 1.0, "in [0, 1] or null")?;
        if self.padding > 512 {
            return Err(setting("padding", &self.padding, "in 0..=512"));
        }
        if let Some(ResizedCrop { area, ratio, .. }) = self.resized_crop {
            share_range("resized_crop.area", area)?;
            ratio_range("resized_crop.ratio", ratio)?;
        }
        if let Some(jitter) = self.colour_jitter {
            within("colour_jitter.brightness", jitter.brightness.into(), 0.0, 1.0, "in [0, 1]")?;
            within("colour_jitter.contrast", jitter.contrast.into(), 0.0, 1.0, "in [0, 1]")?;
            within("colour_jitter.saturation", jitter.saturation.into(), 0.0, 1.0, "in [0, 1]")?;
            within("colour_jitter.hue", jitter.hue.into(), 0.0, 0.5, "in [0, 0.5]")?;
        }
        if let Some(rand_augment) = self.rand_augment {
            if !(1..=15).contains(&rand_augment.operations) {
                return Err(setting("rand_augment.operations", &rand_augment.operations, "in 1..=15"));
            }
            within("rand_augment.magnitude", rand_augment.magnitude.into(), 0.0, 10.0, "in [0, 10]")?;
            within("rand_augment.deviation", rand_augment.deviation.into(), 0.0, 10.0, "in [0, 10]")?;
            within("rand_augment.probability", rand_augment.probability, 0.0, 1.0, "in [0, 1]")?;
        }
        if let Some(RandomErasing { probability, area, ratio }) = self.erasing {
            within("erasing.probability", probability, 0.0, 1.0, "in [0, 1]")?;
            share_range("erasing.area", area)?;
            ratio_range("erasing.ratio", ratio)?;
        }
        if let Some(Mix { mixup, cutmix, probability }) = self.mix {
            within("mix.mixup", mixup, 0.0, MAX_ALPHA, "in [0, 1000]; 0 is off")?;
            within("mix.cutmix", cutmix, 0.0, MAX_ALPHA, "in [0, 1000]; 0 is off")?;
            within("mix.probability", probability, 0.0, 1.0, "in [0, 1]")?;
        }
        Ok(())
    }
}

/// Beta(1000, 1000) is 0.5 to two digits; what lies beyond is a mistake.
const MAX_ALPHA: f64 = 1000.0;

fn setting(field: &'static str, got: &dyn std::fmt::Display, expected: &'static str) -> Error {
    Error::Setting { field, got: got.to_string(), expected }
}

/// NaN is in no range.
fn within(field: &'static str, value: f64, least: f64, most: f64, expected: &'static str) -> Result<()> {
    if (least..=most).contains(&value) { Ok(()) } else { Err(setting(field, &value, expected)) }
}

fn share_range(field: &'static str, [least, most]: [f32; 2]) -> Result<()> {
    let valid = least > 0.0 && least <= most && most <= 1.0;
    if valid { Ok(()) } else { Err(setting(field, &format!("[{least}, {most}]"), "[least, greatest] within (0, 1]")) }
}

fn ratio_range(field: &'static str, [least, most]: [f32; 2]) -> Result<()> {
    let valid = least > 0.0 && least <= most && most.is_finite();
    if valid {
        Ok(())
    } else {
        Err(setting(field, &format!("[{least}, {most}]"), "[least, greatest], finite and above 0"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_presets_are_valid_and_survive_json() {
        for augment in [Augment::default(), Augment::deit(), Augment::light(true)] {
            augment.validate().unwrap();
            let json = serde_json::to_string(&augment).unwrap();
            assert_eq!(serde_json::from_str::<Augment>(&json).unwrap(), augment);
        }
        assert_eq!(serde_json::from_str::<Augment>("{}").unwrap(), Augment::default());
        assert!(serde_json::from_str::<Augment>(r#"{"flipp": 0.5}"#).unwrap_err().to_string().contains("flipp"));
    }

    #[test]
    fn every_value_out_of_range_is_named() {
        let cases = [
            ("flip", r#"{"flip": 1.5}"#),
            ("fill", r#"{"fill": -0.1}"#),
            ("padding", r#"{"padding": 1000}"#),
            ("resized_crop.area", r#"{"resized_crop": {"area": [0.5, 0.2]}}"#),
            ("resized_crop.area", r#"{"resized_crop": {"area": [0.0, 0.2]}}"#),
            ("resized_crop.ratio", r#"{"resized_crop": {"ratio": [-1, 2]}}"#),
            ("colour_jitter.brightness", r#"{"colour_jitter": {"brightness": 2}}"#),
            ("colour_jitter.contrast", r#"{"colour_jitter": {"contrast": -1}}"#),
            ("colour_jitter.saturation", r#"{"colour_jitter": {"saturation": 1.1}}"#),
            ("colour_jitter.hue", r#"{"colour_jitter": {"hue": 0.6}}"#),
            ("rand_augment.operations", r#"{"rand_augment": {"operations": 0}}"#),
            ("rand_augment.magnitude", r#"{"rand_augment": {"magnitude": 11}}"#),
            ("rand_augment.deviation", r#"{"rand_augment": {"deviation": -1}}"#),
            ("rand_augment.probability", r#"{"rand_augment": {"probability": 2}}"#),
            ("erasing.probability", r#"{"erasing": {"probability": -0.5}}"#),
            ("erasing.area", r#"{"erasing": {"area": [0.5, 1.5]}}"#),
            ("erasing.ratio", r#"{"erasing": {"ratio": [3, 1]}}"#),
            ("mix.mixup", r#"{"mix": {"mixup": -1}}"#),
            ("mix.cutmix", r#"{"mix": {"cutmix": 1e9}}"#),
            ("mix.probability", r#"{"mix": {"probability": 7}}"#),
        ];
        for (expected, json) in cases {
            let augment: Augment = serde_json::from_str(json).unwrap();
            match augment.validate() {
                Err(Error::Setting { field, .. }) => assert_eq!(field, expected),
                other => panic!("{json}: {other:?}"),
            }
        }
    }
}
