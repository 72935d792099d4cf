//! Folders, archives and shards of pictures. Their names and headers are read at loading. Small sets whose pictures have the size
//! that models see are decoded then; of others each picture is decoded when a batch needs it, so that crops are taken from the
//! original and memory does not grow with the set.

mod decode;
mod entries;
mod files;
mod header;
mod layout;
mod pattern;
mod png;
mod tar;
mod webdataset;
mod webp;

use std::{collections::BTreeMap, path::Path, sync::Arc};

use rayon::prelude::*;

use super::{
    Error, PictureDataset, PictureShape, PictureSplit, Result,
    reading::{Counter, Tell},
    split::hold_out,
};
use crate::budget::{self, Held};

pub(crate) use entries::is_picture;
pub(crate) use files::{Files, decode_file};
pub use webdataset::{LabelFile, WebDataset};

use decode::Original;
use entries::{Entry, Search};
use header::Header;
use layout::{Layout, Part, Place};

/// Side of pictures that `size` may ask for.
pub(super) const SIZES: std::ops::RangeInclusive<usize> = 1..=4096;

/// Bytes of decoded pictures up to which a set is small.
const SMALL: u64 = 256 << 20;

/// Bytes that most headers lie within.
const HEADER: u64 = 16 << 10;

/// The share of the shorter side that is usually seen of photographs: 224 of 256 pixels.
const CROP: f32 = 0.875;

/// How pictures of any size become pictures of one.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sizing {
    /// Side of the square that models see; without it all pictures must have one size.
    pub size: Option<usize>,
    /// Share of the shorter side that the centre keeps where nothing is cut at random. Default 0.875; of no account for a
    /// picture that has the size.
    pub crop: Option<f32>,
}

impl Sizing {
    /// Reads `size` or `crop`; `None` for another name.
    pub(super) fn set(&mut self, name: &str, value: &str) -> Option<Result<()>> {
        let fail = |expected| Some(Err(Error::Setting { field: "images", got: format!("`{name}={value}`"), expected }));
        match name {
            "size" => match value.parse().ok().filter(|size| SIZES.contains(size)) {
                Some(size) => self.size = Some(size),
                None => return fail("`size=PIXELS` with 1 to 4096 pixels"),
            },
            "crop" => match value.parse().ok().filter(|&crop: &f32| crop > 0.0 && crop <= 1.0) {
                Some(crop) => self.crop = Some(crop),
                None => return fail("`crop=SHARE` in (0, 1]"),
            },
            _ => return None,
        }
        Some(Ok(()))
    }

    /// The settings as they are read.
    pub(super) fn text(self) -> impl Iterator<Item = String> {
        let size = self.size.map(|size| format!("size={size}"));
        size.into_iter().chain(self.crop.map(|crop| format!("crop={crop}")))
    }
}

/// Reads the pictures of `path`. Where there is no test part, the validation part is it, or `holdout` of every class becomes one.
pub(super) fn load(path: &Path, sizing: Sizing, holdout: f64, held: &Held, tell: Tell<'_>) -> Result<PictureDataset> {
    let counter = Counter::new(tell, "pictures found", None);
    let found = Search { path, kind: &entries::by_ending, held, found: &counter }.run()?;
    let layout = Layout::new(path, found.pictures.iter().map(|entry| &*entry.name), &found.others)?;
    Loading { name: "images", root: path, sizing, holdout, held, tell }.dataset(found.pictures, layout)
}

/// What is needed to make a data set of pictures.
struct Loading<'a> {
    name: &'static str,
    root: &'a Path,
    sizing: Sizing,
    holdout: f64,
    held: &'a Held,
    tell: Tell<'a>,
}

impl Loading<'_> {
    fn dataset(&self, entries: Vec<Entry>, mut layout: Layout) -> Result<PictureDataset> {
        self.divide(&mut layout);
        let headers = self.headers(&entries)?;
        let (shape, whole) = self.common_shape(&entries, &headers)?;
        let bytes: u64 = headers.iter().map(|header| header.shape.volume() as u64).sum();
        let count = entries.len();
        let counter = Counter::new(self.tell, "pictures decoded", Some(count));
        let mut files = Files::new(self.root.into(), entries, self.sizing.crop.unwrap_or(CROP));
        let [train, validation, test] = if whole && bytes <= SMALL {
            let decoded = files.decode(self.held, &counter)?;
            self.held.add(self.root, (count as u64).saturating_mul(shape.volume() as u64))?;
            assemble(&layout, shape, decoded)
        } else {
            if bytes <= SMALL.min(budget::limit() / 8) {
                let decoded = files.decode(self.held, &counter)?;
                files.keep(decoded);
            }
            refer(&layout, shape, Arc::new(files))
        };
        if test.is_empty() {
            let problem = "has too few pictures to hold some out for testing; two in a class are needed".into();
            return Err(Error::Empty { path: self.root.into(), problem });
        }
        let validation = (!validation.is_empty()).then_some(validation);
        Ok(PictureDataset { name: self.name.into(), classes: layout.classes, shape, train, validation, test })
    }

    /// Makes a test part where there is none.
    fn divide(&self, layout: &mut Layout) {
        let places = &mut layout.places;
        let has = |places: &[Place], part| places.iter().any(|place| place.part == part);
        if has(places, Part::Test) {
        } else if has(places, Part::Validation) {
            let validation = places.iter_mut().filter(|place| place.part == Part::Validation);
            validation.for_each(|place| place.part = Part::Test);
        } else {
            let labels: Vec<u32> = places.iter().map(|place| place.label).collect();
            let (_, held) = hold_out(&labels, self.holdout, 0);
            held.into_iter().for_each(|index| places[index].part = Part::Test);
        }
    }

    /// The header of every picture, none of which takes more than the budget.
    fn headers(&self, entries: &[Entry]) -> Result<Vec<Header>> {
        let done = Counter::new(self.tell, "headers of pictures read", Some(entries.len()));
        let extent = self.sizing.size.map(|size| [size, size]);
        let read = |entry: &Entry| {
            let mut header = header::read(&entry.start(self.root, HEADER)?);
            if header.is_err() && entry.length > HEADER {
                let _waiting = entry.waiting(self.root)?;
                header = header::read(&entry.start(self.root, entry.length)?);
            }
            let header = header.map_err(|problem| entry.error(self.root, problem))?;
            let (needed, limit) = (decode::needed(header.shape, header.format, extent), budget::limit());
            if needed > limit {
                let path = self.root.join(&*entry.name);
                return Err(Error::Budget { path, needed, used: 0, limit });
            }
            done.one();
            Ok(header)
        };
        entries.par_iter().map(read).collect()
    }

    /// The shape that models see, grey only if all pictures are, and whether all have it.
    fn common_shape(&self, entries: &[Entry], headers: &[Header]) -> Result<(PictureShape, bool)> {
        let extent = |header: &Header| (header.shape.height, header.shape.width);
        let channels = headers.iter().map(|header| header.shape.channels).max().unwrap_or(1);
        if let Some(size) = self.sizing.size {
            let whole = headers.iter().all(|header| extent(header) == (size, size));
            return Ok((PictureShape { channels, height: size, width: size }, whole));
        }
        let mut counts = BTreeMap::new();
        headers.iter().for_each(|header| *counts.entry(extent(header)).or_insert(0_usize) += 1);
        let usual = counts.iter().max_by_key(|&(_, count)| count).map_or((0, 0), |(&extent, _)| extent);
        let (height, width) = usual;
        if let Some((entry, header)) = entries.iter().zip(headers).find(|(_, header)| extent(header) != usual) {
            let (rows, columns) = extent(header);
            let size = height.min(width).min(224);
            let problem = format!(
                "has {rows} rows and {columns} columns where most have {height} and {width}; add `?size={size}` to the path to resize all"
            );
            return Err(entry.error(self.root, problem));
        }
        Ok((PictureShape { channels, height, width }, true))
    }
}

/// Puts the pictures of each part together, in the order of their names.
fn assemble(layout: &Layout, shape: PictureShape, pictures: Vec<Original>) -> [PictureSplit; 3] {
    let mut parts = [Part::Train, Part::Validation, Part::Test].map(|part| {
        let count = layout.places.iter().filter(|place| place.part == part).count();
        (Vec::with_capacity(count * shape.volume()), Vec::with_capacity(count))
    });
    for (picture, &Place { part, label }) in pictures.into_iter().zip(&layout.places) {
        let (pixels, labels) = &mut parts[part as usize];
        let planes = picture.planar();
        for _ in 0..shape.channels / picture.shape.channels {
            pixels.extend_from_slice(&planes);
        }
        labels.push(label);
    }
    parts.map(|(pixels, labels)| PictureSplit::of_pixels(shape, pixels, labels))
}

/// The parts of pictures that are decoded later, in the order of their names.
fn refer(layout: &Layout, shape: PictureShape, files: Arc<Files>) -> [PictureSplit; 3] {
    [Part::Train, Part::Validation, Part::Test].map(|part| {
        let places = layout.places.iter().enumerate().filter(|(_, place)| place.part == part);
        let (indices, labels) = places.map(|(index, place)| (index as u32, place.label)).unzip();
        PictureSplit::of_files(shape, files.clone(), indices, labels)
    })
}
