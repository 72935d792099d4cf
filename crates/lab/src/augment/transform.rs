//! From the bytes of a picture to what a model sees.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::{Augment, Filter, Picture, Rectangle, ResizedCrop, affine, resample};
use crate::{
    error::data::Result,
    picture::{ChannelStats, PictureShape},
};

/// The deterministic size change of evaluation: the shorter side is resized, the centre cut out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct View {
    /// Rows that the model sees.
    pub height: usize,
    /// Columns that the model sees.
    pub width: usize,
    /// Share of the shorter side that the centre keeps, in (0, 1]; 0.875 is usual for photographs.
    pub share: f32,
}

/// Augmentation, size change and normalisation of single pictures.
#[derive(Debug, Clone, PartialEq)]
pub struct Transform {
    shape: PictureShape,
    view: View,
    augment: Augment,
    stats: ChannelStats,
    fill: Vec<f32>,
}

impl Transform {
    /// For pictures of `shape`, normalised by `stats` (of the training split): `(value - mean) / std`.
    ///
    /// Without augmentation this is the transform of evaluation.
    ///
    /// # Errors
    /// Those of [`Augment::validate`].
    pub fn new(shape: PictureShape, stats: ChannelStats, augment: Augment) -> Result<Self> {
        augment.validate()?;
        let fill = stats.mean.iter().map(|&mean| augment.fill.unwrap_or(mean)).collect();
        let view = View { height: shape.height, width: shape.width, share: 1.0 };
        Ok(Transform { shape, view, augment, stats, fill })
    }

    /// The same for a model that sees another size than the pictures have.
    ///
    /// # Panics
    /// If an extent of the view is 0 or its share outside (0, 1].
    pub fn with_view(mut self, view: View) -> Self {
        assert!(view.height > 0 && view.width > 0 && view.share > 0.0 && view.share <= 1.0, "{view:?}");
        self.view = view;
        self
    }

    /// Shape of what the model sees.
    pub fn output_shape(&self) -> PictureShape {
        PictureShape { channels: self.shape.channels, height: self.view.height, width: self.view.width }
    }

    /// How batches are augmented.
    pub fn augment(&self) -> &Augment {
        &self.augment
    }

    /// Writes the normalised form of `bytes` (one picture) to `out`, of the length of [`Transform::output_shape`].
    pub fn apply(&self, bytes: &[u8], rng: &mut ChaCha8Rng, out: &mut [f32]) {
        let View { height, width, share } = self.view;
        let (area, filter) = self.part(self.shape, share, rng);
        let whole = Rectangle { top: 0, left: 0, height: self.shape.height, width: self.shape.width };
        let picture = Picture::from_bytes(self.shape, bytes);
        let same = area == whole && (height, width) == (whole.height, whole.width);
        let picture = if same { picture } else { resample(&picture, area, height, width, filter) };
        self.finish(picture, rng, out);
    }

    /// The part that is seen of a picture of shape `whole`, and how it is resized: a random one where the augmentation has it, else
    /// the centre, which keeps `share` of the shorter side.
    pub(crate) fn part(&self, whole: PictureShape, share: f32, rng: &mut ChaCha8Rng) -> (Rectangle, Filter) {
        let View { height, width, .. } = self.view;
        let centre = Rectangle::centred(whole, height, width, share);
        match self.augment.resized_crop {
            Some(ResizedCrop { area, ratio, filter }) => {
                (Rectangle::random(whole, area, ratio, rng).unwrap_or(centre), filter)
            }
            None => (centre, Filter::Bicubic),
        }
    }

    /// Writes the augmented and normalised form of `picture`, which has the [`Transform::output_shape`], to `out`.
    pub(crate) fn finish(&self, mut picture: Picture, rng: &mut ChaCha8Rng, out: &mut [f32]) {
        self.disturb(&mut picture, rng);
        let plane = picture.shape.plane();
        let planes = picture.values.chunks_exact(plane).zip(out.chunks_exact_mut(plane));
        for ((values, out), (mean, std)) in planes.zip(self.stats.mean.iter().zip(&self.stats.std)) {
            let scale = 1.0 / std;
            out.iter_mut().zip(values).for_each(|(out, value)| *out = (value - mean) * scale);
        }
        if let Some(erasing) = &self.augment.erasing {
            erasing.apply(picture.shape, out, rng);
        }
    }

    fn disturb(&self, picture: &mut Picture, rng: &mut ChaCha8Rng) {
        let augment = &self.augment;
        if augment.padding > 0 {
            let mut steps = || rng.random_range(0..=2 * augment.padding) as isize - augment.padding as isize;
            let (down, right) = (steps(), steps());
            affine::shift(picture, down, right, &self.fill);
        }
        if rng.random_bool(augment.flip) {
            picture.flip();
        }
        if let Some(jitter) = &augment.colour_jitter {
            jitter.apply(picture, rng);
        }
        if let Some(rand_augment) = &augment.rand_augment {
            rand_augment.apply(picture, &self.fill, rng);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rng::{Purpose, stream};

    const SHAPE: PictureShape = PictureShape { channels: 3, height: 10, width: 14 };

    fn bytes() -> Vec<u8> {
        (0..SHAPE.volume()).map(|index| (index * 7919 % 256) as u8).collect()
    }

    fn stats() -> ChannelStats {
        ChannelStats { mean: vec![0.5, 0.25, 0.0], std: vec![0.5, 0.25, 1.0] }
    }

    fn run(transform: &Transform, epoch: u64) -> Vec<f32> {
        let mut out = vec![f32::NAN; transform.output_shape().volume()];
        transform.apply(&bytes(), &mut stream(Purpose::Augment, 3, epoch, 9), &mut out);
        out
    }

    #[test]
    fn evaluation_only_normalises() {
        let out = run(&Transform::new(SHAPE, stats(), Augment::default()).unwrap(), 0);
        for (at, (value, byte)) in out.iter().zip(bytes()).enumerate() {
            let channel = at / SHAPE.plane();
            let expected = (f32::from(byte) / 255.0 - stats().mean[channel]) / stats().std[channel];
            assert!((value - expected).abs() < 1e-5);
        }
    }

    #[test]
    fn the_whole_recipe_is_finite_and_follows_its_coordinates() {
        let everything = Augment { colour_jitter: Some(Default::default()), padding: 2, ..Augment::deit() };
        let transform = Transform::new(SHAPE, stats(), everything).unwrap();
        for epoch in 0..200 {
            let out = run(&transform, epoch);
            assert!(out.iter().all(|value| value.is_finite()));
            assert_eq!(out, run(&transform, epoch));
            assert_ne!(out, run(&transform, epoch + 1));
        }
    }

    #[test]
    fn another_size_is_a_centre_cut() {
        let view = View { height: 5, width: 5, share: 1.0 };
        let transform = Transform::new(SHAPE, stats(), Augment::default()).unwrap().with_view(view);
        let picture = Picture::from_bytes(SHAPE, &bytes());
        let square = Rectangle { top: 0, left: 2, height: 10, width: 10 };
        let expected = resample(&picture, square, 5, 5, Filter::Bicubic);
        let out = run(&transform, 0);
        assert_eq!(out.len(), 75);
        assert!((out[0] - (expected.values[0] - 0.5) / 0.5).abs() < 1e-6);
    }

    #[test]
    fn a_random_crop_sees_parts_of_the_picture() {
        let crop = ResizedCrop { area: [0.2, 0.4], ..Default::default() };
        let augment = Augment { resized_crop: Some(crop), ..Default::default() };
        let transform = Transform::new(SHAPE, stats(), augment).unwrap();
        let plain = Transform::new(SHAPE, stats(), Augment::default()).unwrap();
        assert!((0..20).all(|epoch| run(&transform, epoch) != run(&plain, epoch)));
    }
}
