//! Generated pictures of dashed paths: do the two dots lie on the same one?
//!
//! By the procedure of "Learning Long-Range Spatial Dependencies with Horizontal Gated Recurrent Units" (Pathfinder) with the sizes of "Long Range
//! Arena": two paths of equal length begin near each other, one dot marks where one of them begins, the other where one of them ends; shorter
//! paths distract. What a picture shows is drawn before its label decides which end is marked, so that nothing but the path tells.

mod scene;

use std::path::Path;

use rayon::prelude::*;

use super::{
    PictureDataset, PictureShape, PictureSplit, Result,
    rng::{Purpose, stream},
    settings::{check, check_parts, generated},
};
use crate::budget::Held;
use scene::Geometry;

/// Most bytes of pixels that one data set may take.
const MAX_BYTES: usize = 16 << 30;

generated! {
    "pathfinder",
    /// Settings of the generated data set. The same settings give the same pictures, whatever the thread count, and a longer set begins with
    /// the shorter one. Half the pictures of every part are connected.
    pub struct Pathfinder {
        /// Seed of every picture. Default 0.
        seed: u64 = 0,
        /// Side of the square pictures in pixels. Default 32; 32, 64 or 128.
        size: usize = 32,
        /// Pictures to learn from. Default 160000, at least 1.
        train: usize = 160_000,
        /// Pictures to watch while learning. Default 20000, in [`Pathfinder::parse`] as many as `test`; 0 for none.
        val: usize = 20_000,
        /// Pictures to test on. Default 20000, at least 1.
        test: usize = 20_000,
        /// Dashes of the two paths; those of distractors are a third as long. Default 14, the hard form of the published sets, which also have 6 and 9; in
        /// 3..=14.
        length: usize = 14,
        /// Most distractors; fewer where there is no room. Default: as many as make 20, 22 or 35 dashes, by size, as published.
        distractors: Option<usize> = None,
    }
}

impl Pathfinder {
    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Setting`](super::Error::Setting) naming the first setting outside its range.
    pub fn validate(&self) -> Result<()> {
        check("size", self.size, Geometry::of(self.size).is_some(), "32, 64 or 128")?;
        let most = MAX_BYTES / self.shape().volume();
        let expected = "at least 1 (`val` perhaps 0) and at most 16 GiB of pixels";
        check_parts(self.train, self.val, self.test, most, expected)?;
        check("length", self.length, (3..=14).contains(&self.length), "in 3..=14")?;
        let distractors = self.distractors.unwrap_or_default();
        check("distractors", distractors, distractors <= 100, "at most 100")
    }

    /// Draws all parts.
    ///
    /// # Errors
    /// Those of [`Pathfinder::validate`]; [`Error::Budget`](super::Error::Budget) where they are more than the memory that data may take.
    pub fn generate(&self) -> Result<PictureDataset> {
        self.validate()?;
        let pictures = self.train + self.val + self.test;
        Held::new().add(Path::new("pathfinder"), (pictures * self.shape().volume()) as u64)?;
        Ok(PictureDataset {
            name: "pathfinder".into(),
            classes: ["separate", "connected"].map(String::from).to_vec(),
            shape: self.shape(),
            train: self.split(0, self.train),
            validation: (self.val > 0).then(|| self.split(2, self.val)),
            test: self.split(1, self.test),
        })
    }

    fn shape(&self) -> PictureShape {
        PictureShape { channels: 1, height: self.size, width: self.size }
    }

    /// `count` pictures with the classes in turn; `part` keeps the random numbers of the splits apart.
    fn split(&self, part: u64, count: usize) -> PictureSplit {
        let (shape, geometry) = (self.shape(), Geometry::of(self.size).expect("the size was checked"));
        let label = |index: usize| (index % 2) as u32;
        let mut pixels = vec![0; count * shape.volume()];
        pixels.par_chunks_mut(shape.volume()).enumerate().for_each(|(index, picture)| {
            let mut rng = stream(Purpose::Pathfinder, self.seed, part, index as u64);
            scene::draw(&geometry, self.length, self.distractors, label(index) == 1, &mut rng, picture);
        });
        PictureSplit::of_pixels(shape, pixels, (0..count).map(label).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_and_position_alone_decide() {
        let settings = Pathfinder::parse("seed=3,train=8,test=4,length=9,distractors=2").unwrap();
        let data = settings.generate().unwrap();
        let longer = Pathfinder { train: 10, ..settings.clone() }.generate().unwrap();
        assert_eq!(longer.train.select(&[0, 1, 2, 3, 4, 5, 6, 7]), data.train);
        assert_eq!(longer.test, data.test);
        assert_eq!(data.train.labels(), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_ne!(data.validation.as_ref(), Some(&data.test));
        assert_ne!(Pathfinder { seed: 4, ..settings.clone() }.generate().unwrap().train, data.train);
        assert_eq!(Pathfinder::parse(&settings.to_string()).unwrap(), settings);
        let usual = Pathfinder::parse("size=128,train=2,test=2").unwrap();
        assert_eq!(Pathfinder::parse(&usual.to_string()).unwrap(), usual);
    }

    #[test]
    fn settings_outside_their_range_are_named() {
        for (settings, field) in [
            ("size=48", "size"),
            ("train=0", "train"),
            ("size=128,val=99999999", "val"),
            ("length=2", "length"),
            ("distractors=101", "distractors"),
            ("paths=3", "pathfinder"),
            ("seed=1,seed=2", "pathfinder"),
        ] {
            let message = Pathfinder::parse(settings).unwrap_err().to_string();
            assert!(message.contains(&format!("`{field}`")), "{message}");
        }
    }
}
