//! A picture while it is being augmented.

use crate::picture::PictureShape;

/// A planar picture `[channels, height, width]` with values in [0, 1].
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// Its shape.
    pub shape: PictureShape,
    /// Its values.
    pub values: Vec<f32>,
}

impl Picture {
    /// Scales bytes `[channels, height, width]` to [0, 1].
    pub fn from_bytes(shape: PictureShape, bytes: &[u8]) -> Self {
        assert_eq!(bytes.len(), shape.volume(), "bytes of one picture of {shape:?}");
        Picture { shape, values: bytes.iter().map(|&byte| f32::from(byte) * (1.0 / 255.0)).collect() }
    }

    /// Values back to bytes, rounded.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.values.iter().map(|&value| byte(value)).collect()
    }

    /// The planes, one per channel.
    pub(super) fn planes_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.values.chunks_exact_mut(self.shape.plane())
    }

    /// Replaces every value by a function of it, kept in [0, 1].
    pub(super) fn map(&mut self, mut f: impl FnMut(f32) -> f32) {
        for value in &mut self.values {
            *value = f(*value).clamp(0.0, 1.0);
        }
    }

    /// Moves every value from `other` towards (or, where `share` > 1, away from) this picture's:
    /// `other + share * (self - other)`, kept in [0, 1].
    pub(super) fn blend(&mut self, other: &[f32], share: f32) {
        for (value, other) in self.values.iter_mut().zip(other) {
            *value = (other + share * (*value - other)).clamp(0.0, 1.0);
        }
    }

    /// Brightness `[height, width]` as the eye weighs it (ITU-R BT.601).
    pub(super) fn luma(&self) -> Vec<f32> {
        if self.shape.channels != 3 {
            return self.values.clone();
        }
        let (red, rest) = self.values.split_at(self.shape.plane());
        let (green, blue) = rest.split_at(self.shape.plane());
        let weigh = |((red, green), blue): ((&f32, &f32), &f32)| 0.299 * red + 0.587 * green + 0.114 * blue;
        red.iter().zip(green).zip(blue).map(weigh).collect()
    }

    /// Turns the picture left side right.
    pub fn flip(&mut self) {
        self.values.chunks_exact_mut(self.shape.width).for_each(<[f32]>::reverse);
    }
}

/// The byte nearest to a value in [0, 1].
pub(super) fn byte(value: f32) -> u8 {
    (value * 255.0 + 0.5) as u8
}
