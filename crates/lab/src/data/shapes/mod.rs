//! Generated pictures: one object on clutter, with its class, its box and its difficulty.
//!
//! The object is small, and the clutter is made of pieces of the very same outlines in the same range of colours. What
//! tells the classes apart is how a few neighbouring parts fit together, which an average over the picture loses.

mod canvas;
mod outline;
mod scene;

use std::path::Path;

use rayon::prelude::*;

pub use outline::Outline;

use super::{
    PictureDataset, PictureShape, PictureSplit, Result,
    rng::{Purpose, stream},
    settings::{check, check_parts, generated},
};
use crate::budget::Held;

/// Most bytes of pixels that one data set may take.
const MAX_BYTES: usize = 16 << 30;

generated! {
    "shapes",
    /// Settings of the generated data set. The same settings give the same pictures, whatever the thread count.
    pub struct Shapes {
        /// Seed of every picture. Default 0.
        seed: u64 = 0,
        /// Side of the square pictures in pixels. Default 32, in 16..=512.
        size: usize = 32,
        /// Pictures to learn from. Default 4000, at least 1.
        train: usize = 4000,
        /// Pictures to test on. Default 1000, at least 1.
        test: usize = 1000,
        /// How hard: 0 is a large, clean object, 1 a small one in noise under clutter. Default 0, as in the recipe `shapes`, in [0, 1]. Each picture
        /// draws its own difficulty within a quarter of this value.
        difficulty: f64 = 0.0,
    }
}

impl Shapes {
    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Setting`](super::Error::Setting) naming the first setting outside its range.
    pub fn validate(&self) -> Result<()> {
        check("size", self.size, (16..=512).contains(&self.size), "in 16..=512")?;
        let most = MAX_BYTES / self.shape().volume();
        check_parts(self.train, 0, self.test, most, "at least 1 and at most 16 GiB of pixels")?;
        check("difficulty", self.difficulty, (0.0..=1.0).contains(&self.difficulty), "in [0, 1]")
    }

    /// Draws both splits.
    ///
    /// # Errors
    /// Those of [`Shapes::validate`]; [`Error::Budget`](super::Error::Budget) where they are more than the memory that data may take.
    pub fn generate(&self) -> Result<PictureDataset> {
        self.validate()?;
        let held = Held::new();
        held.add(Path::new("shapes"), ((self.train + self.test) * self.shape().volume()) as u64)?;
        let classes = Outline::ALL.iter().map(|outline| outline.name().to_string()).collect();
        let (train, test) = (self.split(0, self.train), self.split(1, self.test));
        Ok(PictureDataset { name: "shapes".into(), classes, shape: self.shape(), train, validation: None, test })
    }

    fn shape(&self) -> PictureShape {
        PictureShape { channels: 3, height: self.size, width: self.size }
    }

    /// `count` pictures with the classes in turn; `part` keeps the random numbers of the splits apart.
    fn split(&self, part: u64, count: usize) -> PictureSplit {
        let shape = self.shape();
        let label = |index: usize| index % Outline::ALL.len();
        let mut pixels = vec![0; count * shape.volume()];
        let objects: Vec<_> = pixels
            .par_chunks_mut(shape.volume())
            .enumerate()
            .map(|(index, picture)| {
                let mut rng = stream(Purpose::Shapes, self.seed, part, index as u64);
                scene::draw(&mut rng, Outline::ALL[label(index)], self.size, self.difficulty as f32, picture)
            })
            .collect();
        let (boxes, difficulty) = objects.into_iter().unzip();
        PictureSplit::of_pixels(shape, pixels, (0..count).map(|index| label(index) as u32).collect())
            .with_objects(boxes, difficulty)
    }
}
