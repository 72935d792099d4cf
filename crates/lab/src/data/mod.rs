//! Data sets of labelled pictures, labelled texts, labelled pairs of texts, translations, plain text and sequences to recall from: generated, or
//! read strictly from files.
//!
//! Pictures are bytes in memory, planar (`[picture, channel, row, column]`), or files that are decoded when they are needed;
//! [`PictureLoader`] turns them into augmented `f32` batches. Texts are strings; a [`Vocabulary`] turns them into token ids.

mod batches;
mod cifar;
mod corpus;
mod encoded;
mod idx;
pub(crate) mod images;
pub(crate) mod lines;
mod loader;
mod matching;
mod pairs;
mod pathfinder;
pub mod reading;
mod recall;
pub mod rng;
mod settings;
pub mod shapes;
mod spec;
mod split;
pub mod text;
mod vocabulary;

pub use batches::{BatchPlan, Batches};
pub use corpus::{CorpusDataset, CorpusSpec};
pub use encoded::{Encoded, Padded, by_budget, by_length, cut_note};
pub use images::{LabelFile, Sizing, WebDataset};
pub use loader::{PictureBatch, PictureLoader};
pub use matching::{Documents, MatchDataset, MatchSpec, MatchSplit};
pub use pairs::{PairDataset, PairSpec, PairSplit};
pub use pathfinder::Pathfinder;
pub use recall::{Filler, Mqar, RecallDataset, RecallSplit};
pub use shapes::Shapes;
pub use spec::{Data, DataSpec, PictureSpec};
pub use split::{ObjectBox, PictureSplit};
pub use text::{Listops, TextDataset, TextSpec, TextSplit};
pub use vocabulary::{Span, TextRecipe, Tokens, Vocabulary};

pub use crate::{
    error::data::{Error, Result},
    picture::{ChannelStats, PictureShape},
};

/// Pictures to learn from and pictures to be tested on, with the names of their classes.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureDataset {
    /// The data set's kind, e.g. `fashion-mnist`.
    pub name: String,
    /// Names of the classes; a label is an index into them.
    pub classes: Vec<String>,
    /// Shape of every picture in all splits.
    pub shape: PictureShape,
    /// What is learnt from.
    pub train: PictureSplit,
    /// What is looked at after each epoch, where the data set brings it beside what it is tested on.
    pub validation: Option<PictureSplit>,
    /// What accuracy is reported on.
    pub test: PictureSplit,
}

impl PictureDataset {
    /// The same pictures at `side x side` pixels: the shorter side resized, bicubically, and the centre cut out. What is known
    /// of where objects lie is lost.
    #[must_use]
    pub fn resized(&self, side: usize) -> Self {
        let (train, test) = (self.train.resized(side), self.test.resized(side));
        let validation = self.validation.as_ref().map(|validation| validation.resized(side));
        Self { shape: test.shape(), train, validation, test, ..self.clone() }
    }

    /// Hash of everything that training and testing see: names, shapes, pixels and labels.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        for class in &self.classes {
            hash.update(class.as_bytes());
            hash.update(&[0]);
        }
        for split in [Some(&self.train), self.validation.as_ref(), Some(&self.test)].into_iter().flatten() {
            hash.update(&split.fingerprint().to_le_bytes());
        }
        hash.digest()
    }
}
