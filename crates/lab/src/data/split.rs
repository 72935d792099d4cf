//! One split of a data set: pictures in memory, or files that are decoded when they are needed.

use std::{borrow::Cow, sync::Arc};

use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use super::{
    Error, Result,
    images::Files,
    rng::{Purpose, stream},
};
use crate::{
    augment::{Filter, Picture, Rectangle, Transform, resample},
    picture::{ChannelStats, PictureShape},
};

/// Where an object lies: the pixels `left..right` x `top..bottom`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ObjectBox {
    /// First column.
    pub left: u32,
    /// First row.
    pub top: u32,
    /// Column after the last.
    pub right: u32,
    /// Row after the last.
    pub bottom: u32,
}

/// Pictures that statistics are taken of where there are more.
const SAMPLE: usize = 2048;

/// Labelled pictures that a model sees at one shape.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureSplit {
    shape: PictureShape,
    pictures: Pictures,
    labels: Vec<u32>,
    boxes: Option<Vec<ObjectBox>>,
    difficulty: Option<Vec<f32>>,
}

/// Where the pictures are.
#[derive(Debug, Clone)]
enum Pictures {
    /// `[picture, channels, height, width]`.
    Pixels(Vec<u8>),
    /// In files, whose numbers these are.
    Files { files: Arc<Files>, indices: Vec<u32> },
}

impl PartialEq for Pictures {
    /// Files are equal by what is known of them without decoding them.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Pictures::Pixels(left), Pictures::Pixels(right)) => left == right,
            (Pictures::Files { .. }, Pictures::Files { .. }) => {
                let digest = |pictures: &Pictures| {
                    let mut hash = Xxh3::new();
                    pictures.hash(&mut hash);
                    hash.digest()
                };
                digest(self) == digest(other)
            }
            _ => false,
        }
    }
}

impl Pictures {
    fn hash(&self, hash: &mut Xxh3) {
        match self {
            Pictures::Pixels(pixels) => hash.update(pixels),
            Pictures::Files { files, indices } => files.identify(indices, hash),
        }
    }
}

impl PictureSplit {
    /// Pictures `pixels [labels.len(), channels, height, width]` and their labels.
    ///
    /// # Errors
    /// [`Error::Pixels`] where there are more or fewer pixels than such pictures have.
    pub fn new(shape: PictureShape, pixels: Vec<u8>, labels: Vec<u32>) -> Result<Self> {
        let (found, pictures) = (pixels.len(), labels.len());
        match shape.volume().checked_mul(pictures) {
            Some(expected) if expected == found => Ok(Self::of_pixels(shape, pixels, labels)),
            _ => Err(Error::Pixels { found, pictures, shape }),
        }
    }

    /// As [`PictureSplit::new`], of pixels that have been counted.
    pub(super) fn of_pixels(shape: PictureShape, pixels: Vec<u8>, labels: Vec<u32>) -> Self {
        assert_eq!(pixels.len(), labels.len() * shape.volume(), "pixels of {} pictures of {shape:?}", labels.len());
        PictureSplit { shape, pictures: Pictures::Pixels(pixels), labels, boxes: None, difficulty: None }
    }

    /// The pictures of `files` at `indices`, of which models see a part of `shape`.
    pub(super) fn of_files(shape: PictureShape, files: Arc<Files>, indices: Vec<u32>, labels: Vec<u32>) -> Self {
        PictureSplit { shape, pictures: Pictures::Files { files, indices }, labels, boxes: None, difficulty: None }
    }

    /// Adds what a generator knows about each picture: its object's box, and its difficulty in [0, 1].
    ///
    /// # Panics
    /// If the lengths do not fit the number of pictures.
    pub(super) fn with_objects(mut self, boxes: Vec<ObjectBox>, difficulty: Vec<f32>) -> Self {
        assert_eq!((boxes.len(), difficulty.len()), (self.len(), self.len()), "one box and difficulty per picture");
        self.boxes = Some(boxes);
        self.difficulty = Some(difficulty);
        self
    }

    /// Number of pictures.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no picture.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Shape of every picture.
    pub fn shape(&self) -> PictureShape {
        self.shape
    }

    /// The bytes `[channels, height, width]` of picture `index`, as they are seen in testing.
    ///
    /// # Errors
    /// Where pictures are decoded when they are needed: [`Error::Entry`](super::Error::Entry) and others that name the file.
    pub fn picture(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        let (files, at) = match &self.pictures {
            Pictures::Pixels(pixels) => return Ok(Cow::Borrowed(pixels_of(pixels, self.shape, index))),
            Pictures::Files { files, indices } => (files, indices[index] as usize),
        };
        let PictureShape { height, width, .. } = self.shape;
        let (original, _passing) = files.original(at, [height, width])?;
        let area = Rectangle::centred(original.shape, height, width, files.share(original.shape, self.shape));
        files.part(at, &original, area, self.shape, Filter::Bicubic).map(Cow::Owned)
    }

    /// Writes picture `index` as `transform`, which is for pictures of [`PictureSplit::shape`], makes it to `out`.
    pub(super) fn prepare(
        &self,
        index: usize,
        transform: &Transform,
        rng: &mut ChaCha8Rng,
        out: &mut [f32],
    ) -> Result<()> {
        let (files, at) = match &self.pictures {
            Pictures::Pixels(pixels) => {
                transform.apply(pixels_of(pixels, self.shape, index), rng, out);
                return Ok(());
            }
            Pictures::Files { files, indices } => (files, indices[index] as usize),
        };
        let shape = transform.output_shape();
        let (original, passing) = files.original(at, [shape.height, shape.width])?;
        let (area, filter) = transform.part(original.shape, files.share(original.shape, shape), rng);
        let bytes = files.part(at, &original, area, shape, filter)?;
        drop((original, passing));
        transform.finish(Picture::from_bytes(shape, &bytes), rng, out);
        Ok(())
    }

    /// Whether pictures are decoded when they are needed.
    pub(super) fn decodes(&self) -> bool {
        matches!(self.pictures, Pictures::Files { .. })
    }

    /// One label per picture.
    pub fn labels(&self) -> &[u32] {
        &self.labels
    }

    /// One object box per picture, where known.
    pub fn boxes(&self) -> Option<&[ObjectBox]> {
        self.boxes.as_deref()
    }

    /// One difficulty in [0, 1] per picture, where known.
    pub fn difficulty(&self) -> Option<&[f32]> {
        self.difficulty.as_deref()
    }

    /// The pictures at `indices`, in that order.
    pub fn select(&self, indices: &[usize]) -> PictureSplit {
        fn pick<T: Copy>(from: &[T], indices: &[usize]) -> Vec<T> {
            indices.iter().map(|&index| from[index]).collect()
        }
        let pictures = match &self.pictures {
            Pictures::Pixels(pixels) => {
                let picture = |&index| pixels_of(pixels, self.shape, index);
                Pictures::Pixels(indices.iter().flat_map(picture).copied().collect())
            }
            Pictures::Files { files, indices: all } => {
                Pictures::Files { files: files.clone(), indices: pick(all, indices) }
            }
        };
        PictureSplit {
            shape: self.shape,
            pictures,
            labels: pick(&self.labels, indices),
            boxes: self.boxes.as_ref().map(|boxes| pick(boxes, indices)),
            difficulty: self.difficulty.as_ref().map(|difficulty| pick(difficulty, indices)),
        }
    }

    /// The same pictures at `side x side` pixels: the shorter side resized, bicubically, and the centre cut out.
    pub(super) fn resized(&self, side: usize) -> PictureSplit {
        let shape = PictureShape { height: side, width: side, ..self.shape };
        if shape == self.shape {
            return self.clone();
        }
        let pictures = match &self.pictures {
            Pictures::Pixels(pixels) => {
                let centre = Rectangle::centred(self.shape, side, side, 1.0);
                let resized = pixels.par_chunks_exact(self.shape.volume()).flat_map_iter(|pixels| {
                    let picture = Picture::from_bytes(self.shape, pixels);
                    resample(&picture, centre, side, side, Filter::Bicubic).to_bytes()
                });
                Pictures::Pixels(resized.collect())
            }
            files => files.clone(),
        };
        PictureSplit { boxes: None, pictures, shape, ..self.clone() }
    }

    /// Holds `fraction` of every class out: (kept, held out), both in the original order, decided by `seed` alone.
    ///
    /// A class of two or more pictures keeps and gives at least one, unless `fraction` is 0.
    pub fn hold_out(&self, fraction: f64, seed: u64) -> (PictureSplit, PictureSplit) {
        let (kept, held) = hold_out(&self.labels, fraction, seed);
        (self.select(&kept), self.select(&held))
    }

    /// Mean and standard deviation per channel; where pictures are decoded when they are needed, of at most 2048 of them, evenly
    /// spread.
    ///
    /// # Errors
    /// As [`PictureSplit::picture`].
    pub fn channel_stats(&self) -> Result<ChannelStats> {
        let decoded;
        let (pixels, count) = match &self.pictures {
            Pictures::Pixels(pixels) => (pixels, self.len()),
            Pictures::Files { .. } => {
                let count = self.len().min(SAMPLE);
                let pictures = (0..count).into_par_iter().map(|index| self.picture(index * self.len() / count));
                decoded = pictures.collect::<Result<Vec<_>>>()?.concat();
                (&decoded, count)
            }
        };
        let mut sums = vec![(0_u64, 0_u64); self.shape.channels];
        if !pixels.is_empty() {
            for (plane, values) in pixels.chunks_exact(self.shape.plane()).enumerate() {
                let (sum, squares) = &mut sums[plane % self.shape.channels];
                *sum += values.iter().map(|&value| u64::from(value)).sum::<u64>();
                *squares += values.iter().map(|&value| u64::from(value) * u64::from(value)).sum::<u64>();
            }
        }
        let count = (count * self.shape.plane()).max(1) as f64;
        let moments = sums.iter().map(|&(sum, squares)| {
            let mean = sum as f64 / count;
            (mean / 255.0, (squares as f64 / count - mean * mean).max(1.0).sqrt() / 255.0)
        });
        let (mean, std) = moments.map(|(mean, std)| (mean as f32, std as f32)).unzip();
        Ok(ChannelStats { mean, std })
    }

    /// Hash of shape, pixels and labels; of files that are decoded when they are needed, of their names and lengths instead of pixels.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        for extent in [self.shape.channels, self.shape.height, self.shape.width] {
            hash.update(&(extent as u64).to_le_bytes());
        }
        self.pictures.hash(&mut hash);
        for label in &self.labels {
            hash.update(&label.to_le_bytes());
        }
        hash.digest()
    }
}

/// The bytes of picture `index` of `pixels`.
fn pixels_of(pixels: &[u8], shape: PictureShape, index: usize) -> &[u8] {
    &pixels[index * shape.volume()..][..shape.volume()]
}

/// Indices (kept, held out) of [`PictureSplit::hold_out`].
pub(super) fn hold_out(labels: &[u32], fraction: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
    let classes = labels.iter().max().map_or(0, |&last| last as usize + 1);
    let mut members = vec![Vec::new(); classes];
    for (index, &label) in labels.iter().enumerate() {
        members[label as usize].push(index);
    }
    let mut held = vec![false; labels.len()];
    for (class, indices) in members.iter_mut().enumerate() {
        indices.shuffle(&mut stream(Purpose::Holdout, seed, class as u64, 0));
        let wanted = (indices.len() as f64 * fraction).round() as usize;
        let count = if fraction > 0.0 && indices.len() > 1 { wanted.clamp(1, indices.len() - 1) } else { 0 };
        indices[..count].iter().for_each(|&index| held[index] = true);
    }
    (0..labels.len()).partition(|&index| !held[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(labels: Vec<u32>) -> PictureSplit {
        let shape = PictureShape { channels: 1, height: 1, width: 2 };
        let pixels = (0..labels.len()).flat_map(|index| [index as u8, 255 - index as u8]).collect();
        PictureSplit::of_pixels(shape, pixels, labels)
    }

    #[test]
    fn holding_out_partitions_every_class_and_follows_the_seed() {
        let split = numbered((0..100).map(|index| index % 4).collect());
        let (kept, held) = split.hold_out(0.2, 7);
        assert_eq!((kept.len(), held.len()), (80, 20));
        for class in 0..4 {
            assert_eq!(held.labels().iter().filter(|&&label| label == class).count(), 5);
        }
        let mut seen: Vec<u8> = [&kept, &held]
            .iter()
            .flat_map(|part| (0..part.len()).map(|index| part.picture(index).unwrap()[0]))
            .collect();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..100), "each picture lands in exactly one part");
        assert_eq!(split.hold_out(0.2, 7), (kept, held.clone()));
        assert_ne!(split.hold_out(0.2, 8).1, held);
    }

    #[test]
    fn small_classes_stay_on_both_sides() {
        let (kept, held) = numbered(vec![0, 0, 1, 2, 2, 2]).hold_out(0.01, 0);
        assert_eq!((kept.labels(), held.labels()), (&[0, 1, 2, 2][..], &[0, 2][..]));
        assert_eq!(numbered(vec![0, 0]).hold_out(0.0, 0).1.len(), 0);
    }

    #[test]
    fn channel_stats_match_their_definition() {
        let shape = PictureShape { channels: 2, height: 1, width: 2 };
        let split = PictureSplit::of_pixels(shape, vec![0, 255, 7, 7, 255, 0, 7, 7], vec![0, 1]);
        let ChannelStats { mean, std } = split.channel_stats().unwrap();
        assert_eq!(mean, [0.5, 7.0 / 255.0]);
        assert_eq!(std, [0.5, 1.0 / 255.0], "a constant channel has a floor");
    }

    #[test]
    fn the_fingerprint_sees_pixels_labels_and_shape() {
        let base = numbered(vec![0, 1]);
        let fingerprints = [
            base.fingerprint(),
            numbered(vec![1, 0]).fingerprint(),
            base.select(&[1, 0]).fingerprint(),
            PictureSplit::of_pixels(
                PictureShape { channels: 1, height: 2, width: 1 },
                vec![0, 255, 1, 254],
                vec![0, 1],
            )
            .fingerprint(),
        ];
        for (index, left) in fingerprints.iter().enumerate() {
            assert!(!fingerprints[..index].contains(left));
        }
        assert_eq!(base.fingerprint(), base.clone().fingerprint());
    }
}
