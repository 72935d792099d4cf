//! Pictures that are decoded when they are needed, and stay decoded only if they are few.

use std::{
    borrow::Cow,
    fmt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use super::{
    decode::{self, Original, Problem},
    entries::Entry,
};
use crate::{
    augment::{Filter, Rectangle},
    budget::{Held, Passing},
    data::{Error, PictureShape, Result, reading::Counter},
};

/// Encoded pictures and where they lie.
pub(crate) struct Files {
    root: PathBuf,
    entries: Vec<Entry>,
    /// Share of a picture's shorter side that is seen in testing, unless the picture has the very size that is seen.
    pub(super) share: f32,
    /// All of the pictures decoded, or none.
    decoded: Vec<Original>,
}

/// A picture that is decoded for a moment, with its bytes of the budget, or for good.
pub(crate) type Borrowed<'a> = (Cow<'a, Original>, Option<Passing>);

impl Files {
    pub(super) fn new(root: PathBuf, entries: Vec<Entry>, share: f32) -> Self {
        Self { root, entries, share, decoded: Vec::new() }
    }

    /// Decodes all pictures, in parallel, in the order of the entries.
    ///
    /// # Errors
    /// [`Error::Budget`], [`Error::Entry`] for the first that cannot be decoded.
    pub(super) fn decode(&self, held: &Held, done: &Counter<'_>) -> Result<Vec<Original>> {
        let full = AtomicBool::new(false);
        let decode = |entry: &Entry| {
            if full.load(Relaxed) {
                return None;
            }
            let decoded = self.open(entry, None).map(|(original, passing)| {
                passing.keep(original.bytes.len() as u64, held);
                original
            });
            done.one();
            full.fetch_or(matches!(decoded, Err(Error::Budget { .. })), Relaxed);
            Some(decoded)
        };
        let mut decoded: Vec<Result<Original>> = self.entries.par_iter().filter_map(decode).collect();
        // Of what is left undone for lack of memory nothing else can be said.
        match decoded.iter().position(|decoded| matches!(decoded, Err(Error::Budget { .. }))) {
            Some(refused) => decoded.swap_remove(refused).map(|_| Vec::new()),
            None => decoded.into_iter().collect(),
        }
    }

    /// Keeps the pictures `decoded`.
    pub(super) fn keep(&mut self, decoded: Vec<Original>) {
        self.decoded = decoded;
    }

    /// Picture `index`, of which a part of `extent` (height, width) will be cut.
    ///
    /// # Errors
    /// [`Error::Entry`] and others that name the file.
    pub(crate) fn original(&self, index: usize, extent: [usize; 2]) -> Result<Borrowed<'_>> {
        if let Some(original) = self.decoded.get(index) {
            return Ok((Cow::Borrowed(original), None));
        }
        let (original, passing) = self.open(&self.entries[index], Some(extent))?;
        Ok((Cow::Owned(original), Some(passing)))
    }

    /// `area` of picture `index`, which is `original`, as bytes of `shape`; a grey picture has its plane as often as there are channels.
    pub(crate) fn part(
        &self,
        index: usize,
        original: &Original,
        area: Rectangle,
        shape: PictureShape,
        filter: Filter,
    ) -> Result<Vec<u8>> {
        let fail = |problem| self.entries[index].error(&self.root, problem);
        if original.shape.channels > shape.channels {
            return Err(fail("is in colour and was grey when the data was loaded; load it again".into()));
        }
        let part = original.part(area, [shape.height, shape.width], filter).map_err(fail)?;
        Ok(if original.shape.channels < shape.channels { part.repeat(shape.channels) } else { part })
    }

    /// Share of the shorter side of a picture of shape `whole` that is seen in testing at `shape`.
    pub(crate) fn share(&self, whole: PictureShape, shape: PictureShape) -> f32 {
        let same = (whole.height, whole.width) == (shape.height, shape.width);
        if same { 1.0 } else { self.share }
    }

    /// Adds what tells pictures at `indices` from others without decoding them: name, bytes, and the share that is seen.
    pub(crate) fn identify(&self, indices: &[u32], hash: &mut Xxh3) {
        hash.update(&self.share.to_le_bytes());
        for &index in indices {
            let entry = &self.entries[index as usize];
            hash.update(entry.name.as_bytes());
            hash.update(&[0]);
            hash.update(&entry.length.to_le_bytes());
        }
    }

    fn open(&self, entry: &Entry, extent: Option<[usize; 2]>) -> Result<(Original, Passing)> {
        let _waiting = entry.waiting(&self.root)?;
        let bytes = entry.start(&self.root, entry.length)?;
        decode::decode(&self.root.join(&*entry.name), &bytes, extent).map_err(|problem| match problem {
            Problem::Picture(problem) => entry.error(&self.root, problem),
            Problem::Budget(error) => error,
        })
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { root, entries, share, decoded } = self;
        let counts = (entries.len(), decoded.len());
        f.debug_struct("Files").field("root", root).field("entries, decoded", &counts).field("share", share).finish()
    }
}

/// Decodes the picture in a file of its own: resized (shorter side) and cut (centre) to `[height, width]`.
pub(crate) fn decode_file(path: &Path, extent: [usize; 2]) -> Result<Decoded> {
    let held = Held::new();
    let bytes = crate::source::read(path, &held)?;
    let fail = |problem: String| Error::Format { path: path.into(), problem };
    let (original, _passing) = decode::decode(path, &bytes, Some(extent)).map_err(|problem| match problem {
        Problem::Picture(problem) => fail(problem),
        Problem::Budget(error) => error,
    })?;
    let [height, width] = extent;
    let area = Rectangle::centred(original.shape, height, width, 1.0);
    let bytes = original.part(area, extent, Filter::Bicubic).map_err(fail)?;
    Ok(Decoded { bytes, whole: original.shape })
}

/// A part of a picture.
pub(crate) struct Decoded {
    /// `[channels, height, width]`.
    pub bytes: Vec<u8>,
    /// The shape of the whole picture, of one channel if the file is grey, else three.
    pub whole: PictureShape,
}
