//! Changes of colour and tone.

use rand::{RngExt, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{Picture, picture::byte};

/// Random brightness, contrast, saturation and hue, in random order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ColourJitter {
    /// Brightness is multiplied by 1 +- this. Default 0.4, in [0, 1].
    pub brightness: f32,
    /// Contrast is multiplied by 1 +- this. Default 0.4, in [0, 1].
    pub contrast: f32,
    /// Saturation is multiplied by 1 +- this. Default 0.4, in [0, 1]; no effect on grey pictures.
    pub saturation: f32,
    /// Hue is turned by +- this share of the circle. Default 0, in [0, 0.5]; no effect on grey pictures.
    pub hue: f32,
}

impl Default for ColourJitter {
    fn default() -> Self {
        ColourJitter { brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.0 }
    }
}

impl ColourJitter {
    pub(super) fn apply(&self, picture: &mut Picture, rng: &mut ChaCha8Rng) {
        let around = |spread: f32, rng: &mut ChaCha8Rng| 1.0 + rng.random_range(-spread..=spread);
        let mut order = [0, 1, 2, 3];
        order.shuffle(rng);
        for step in order {
            match step {
                0 => brightness(picture, around(self.brightness, rng)),
                1 => contrast(picture, around(self.contrast, rng)),
                2 => saturation(picture, around(self.saturation, rng)),
                _ => hue(picture, rng.random_range(-self.hue..=self.hue)),
            }
        }
    }
}

/// Multiplies every value; 1 changes nothing.
pub(super) fn brightness(picture: &mut Picture, factor: f32) {
    picture.map(|value| value * factor);
}

/// Stretches values away from the mean brightness; 1 changes nothing, 0 leaves one grey.
pub(super) fn contrast(picture: &mut Picture, factor: f32) {
    let mean = picture.luma().iter().sum::<f32>() / picture.shape.plane() as f32;
    picture.map(|value| mean + factor * (value - mean));
}

/// Stretches colours away from their grey; 1 changes nothing, 0 leaves a grey picture.
pub(super) fn saturation(picture: &mut Picture, factor: f32) {
    if picture.shape.channels == 3 {
        let grey = picture.luma().repeat(3);
        picture.blend(&grey, factor);
    }
}

/// Stretches details away from their smoothed form; 1 changes nothing. The outermost pixels have no full neighbourhood
/// and stay.
pub(super) fn sharpness(picture: &mut Picture, factor: f32) {
    let (height, width) = (picture.shape.height, picture.shape.width);
    let mut smooth = picture.values.clone();
    for (plane, out) in picture.values.chunks_exact(height * width).zip(smooth.chunks_exact_mut(height * width)) {
        for row in 1..height.saturating_sub(1) {
            for column in 1..width.saturating_sub(1) {
                let around = |row: usize| plane[row * width + column - 1..][..3].iter().sum::<f32>();
                let sum = around(row - 1) + around(row) + around(row + 1);
                out[row * width + column] = (sum + 4.0 * plane[row * width + column]) / 13.0;
            }
        }
    }
    picture.blend(&smooth, factor);
}

/// Turns the hue by `turn` of the circle, in [-1/2, 1/2].
pub(super) fn hue(picture: &mut Picture, turn: f32) {
    if picture.shape.channels != 3 || turn == 0.0 {
        return;
    }
    let (reds, rest) = picture.values.split_at_mut(picture.shape.plane());
    let (greens, blues) = rest.split_at_mut(picture.shape.plane());
    for ((red, green), blue) in reds.iter_mut().zip(greens).zip(blues) {
        let most = red.max(*green).max(*blue);
        let chroma = most - red.min(*green).min(*blue);
        if chroma > 0.0 {
            let sector = match most {
                most if most == *red => (*green - *blue) / chroma,
                most if most == *green => (*blue - *red) / chroma + 2.0,
                _ => (*red - *green) / chroma + 4.0,
            };
            let channel = |offset: f32| {
                let at = offset + sector + 6.0 * turn;
                let at = if at < 0.0 { at + 6.0 } else { at };
                let at = if at >= 6.0 { at - 6.0 } else { at };
                most - chroma * at.min(4.0 - at).clamp(0.0, 1.0)
            };
            (*red, *green, *blue) = (channel(5.0), channel(3.0), channel(1.0));
        }
    }
}

/// Stretches each channel to the whole range.
pub(super) fn auto_contrast(picture: &mut Picture) {
    for plane in picture.planes_mut() {
        let least = plane.iter().copied().fold(f32::INFINITY, f32::min);
        let most = plane.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if most > least {
            plane.iter_mut().for_each(|value| *value = (*value - least) / (most - least));
        }
    }
}

/// Spreads the 256 levels of each channel over the whole range: a level goes to the share of pixels below it, counted
/// without the topmost level.
pub(super) fn equalize(picture: &mut Picture) {
    for plane in picture.planes_mut() {
        let mut counts = [0_usize; 256];
        plane.iter().for_each(|&value| counts[usize::from(byte(value))] += 1);
        let last = counts.iter().rposition(|&count| count > 0).unwrap_or(0);
        let total = plane.len() - counts[last];
        if total > 0 {
            let mut below = 0;
            let levels = counts.map(|count| {
                let level = below as f32 / total as f32;
                below += count;
                level
            });
            plane.iter_mut().for_each(|value| *value = levels[usize::from(byte(*value))]);
        }
    }
}

/// Keeps the `bits` highest bits of every value; 8 changes only what lies between bytes.
pub(super) fn posterize(picture: &mut Picture, bits: u32) {
    let mask = 0xff_u8 << (8 - bits);
    picture.map(|value| f32::from(byte(value) & mask) / 255.0);
}

/// Inverts the values from `threshold` on; a threshold above 1 changes nothing.
pub(super) fn solarize(picture: &mut Picture, threshold: f32) {
    picture.map(|value| if value >= threshold { 1.0 - value } else { value });
}

/// Adds to the values of the lower half.
pub(super) fn solarize_add(picture: &mut Picture, addend: f32) {
    picture.map(|value| if value < 0.5 { value + addend } else { value });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::PictureShape;

    fn rgb(values: &[[f32; 3]]) -> Picture {
        let shape = PictureShape { channels: 3, height: 1, width: values.len() };
        Picture { shape, values: (0..3).flat_map(|channel| values.iter().map(move |value| value[channel])).collect() }
    }

    fn close(left: &Picture, right: &Picture) {
        for (left, right) in left.values.iter().zip(&right.values) {
            assert!((left - right).abs() < 1e-5, "{left} against {right}");
        }
    }

    #[test]
    fn hue_turns_red_to_green_to_blue_and_back() {
        let colours = [[1.0, 0.0, 0.0], [0.8, 0.5, 0.2], [0.4, 0.4, 0.4], [0.1, 0.3, 0.9]];
        let mut picture = rgb(&colours);
        hue(&mut picture, 1.0 / 3.0);
        close(&picture, &rgb(&colours.map(|[red, green, blue]| [blue, red, green])));
        hue(&mut picture, -1.0 / 3.0);
        close(&picture, &rgb(&colours));
    }

    #[test]
    fn no_saturation_is_grey_and_no_contrast_is_flat() {
        let mut picture = rgb(&[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]);
        saturation(&mut picture, 0.0);
        close(&picture, &rgb(&[[0.299; 3], [0.587; 3]]));
        contrast(&mut picture, 0.0);
        close(&picture, &rgb(&[[0.443; 3]; 2]));
    }

    #[test]
    fn tone_curves_do_what_they_say() {
        let grey = |values: &[f32]| {
            let shape = PictureShape { channels: 1, height: 1, width: values.len() };
            Picture { shape, values: values.to_vec() }
        };
        let mut picture = grey(&[0.2, 0.3, 0.6]);
        auto_contrast(&mut picture);
        close(&picture, &grey(&[0.0, 0.25, 1.0]));
        solarize(&mut picture, 0.5);
        close(&picture, &grey(&[0.0, 0.25, 0.0]));
        solarize_add(&mut picture, 0.3);
        close(&picture, &grey(&[0.3, 0.55, 0.3]));
        let mut picture = grey(&[255.0 / 255.0, 100.0 / 255.0]);
        posterize(&mut picture, 4);
        close(&picture, &grey(&[240.0 / 255.0, 96.0 / 255.0]));
    }

    #[test]
    fn equalizing_spreads_crowded_levels() {
        let shape = PictureShape { channels: 1, height: 32, width: 32 };
        let values = (0..1024).map(|index| (100 + index % 16) as f32 / 255.0).collect();
        let mut picture = Picture { shape, values };
        equalize(&mut picture);
        let mut levels = picture.to_bytes();
        levels.sort_unstable();
        levels.dedup();
        assert!(
            levels.into_iter().eq((0..16).map(|level| 17 * level)),
            "16 equally frequent levels, equally far apart"
        );
    }

    #[test]
    fn sharpening_widens_an_edge_and_softening_narrows_it() {
        let shape = PictureShape { channels: 1, height: 3, width: 4 };
        let edge = Picture { shape, values: [0.4, 0.4, 0.6, 0.6].repeat(3) };
        let step = |factor| {
            let mut picture = edge.clone();
            sharpness(&mut picture, factor);
            picture.values[6] - picture.values[5]
        };
        assert!(step(2.0) > 0.21 && step(0.0) < 0.19 && (step(1.0) - 0.2).abs() < 1e-6);
    }
}
