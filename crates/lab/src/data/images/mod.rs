//! Folders and archives of pictures: `train/CLASS/PICTURE` and `test/CLASS/PICTURE`, or `CLASS/PICTURE`.
//!
//! An archive is read as a stream, its pictures are decoded in parallel while they arrive; nothing is written to disk.

mod decode;
mod entries;
mod layout;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::sync_channel,
    },
};

use rayon::prelude::*;

use super::{Dataset, Error, PictureShape, Result, Split, split::hold_out};
use crate::{budget::Held, source};

pub(crate) use decode::Decoded;
use decode::Problem;
use layout::{Layout, Place};

/// Encoded pictures that wait for decoding: bounds the memory, and is enough to keep every core busy.
const WAITING: usize = 64;

/// Side of pictures that `size` may ask for.
pub(super) const SIZES: std::ops::RangeInclusive<usize> = 1..=4096;

/// A picture and its name within the folder or archive.
type Named = (String, Decoded);

/// A file that waits to be decoded.
struct Encoded {
    name: String,
    bytes: Vec<u8>,
    held: Held,
}

/// Loads all pictures of `path`. With a `size`, each is resized (shorter side) and cut (centre) to `size x size`; without,
/// all must have one size. Where there is no test split, `holdout` of every class becomes one.
pub(super) fn load(path: &Path, size: Option<usize>, holdout: f64, held: &Held) -> Result<Dataset> {
    let (pictures, others) = decode_all(path, size, held)?;
    let mut layout = Layout::new(path, pictures.iter().map(|(name, _)| name.as_str()), &others)?;
    let shape = common_shape(path, &pictures)?;
    if !layout.places.iter().any(|place| place.test) {
        let labels: Vec<u32> = layout.places.iter().map(|place| place.label).collect();
        hold_out(&labels, holdout, 0).1.into_iter().for_each(|index| layout.places[index].test = true);
    }
    held.add(path, (pictures.len() as u64).saturating_mul(shape.volume() as u64))?;
    let [train, test] = assemble(&layout, shape, pictures);
    if test.is_empty() {
        let problem = "has too few pictures to hold some out for testing; two in a class are needed".into();
        return Err(Error::Empty { path: path.into(), problem });
    }
    Ok(Dataset { name: "images".into(), classes: layout.classes, shape, train, test })
}

/// Decodes the picture in a file of its own: resized (shorter side) and cut (centre) to `[height, width]`.
pub(crate) fn decode_file(path: &Path, extent: [usize; 2]) -> Result<Decoded> {
    let held = Held::new();
    let bytes = source::read(path, &held)?;
    decode::decode(path, &bytes, Some(extent), &held).map_err(|problem| match problem {
        Problem::Picture(problem) => Error::Format { path: path.into(), problem },
        Problem::Budget(error) => error,
    })
}

/// Decodes every picture; returns them sorted by name, and the names of all other files.
fn decode_all(path: &Path, size: Option<usize>, held: &Held) -> Result<(Vec<Named>, Vec<String>)> {
    let (sender, receiver) = sync_channel::<Encoded>(WAITING);
    let full = AtomicBool::new(false);
    let decode = |Encoded { name, bytes, held: waiting }: Encoded| {
        if full.load(Relaxed) {
            return None;
        }
        let extent = size.map(|size| [size, size]);
        let decoded = decode::decode(&path.join(&name), &bytes, extent, held);
        drop((bytes, waiting));
        full.fetch_or(matches!(decoded, Err(Problem::Budget(_))), Relaxed);
        Some((name, decoded))
    };
    let (others, decoded) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| entries::read(path, sender, held, &full));
        let decoded: Vec<_> = receiver.into_iter().par_bridge().filter_map(decode).collect();
        (reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), decoded)
    });
    let mut named = Vec::with_capacity(decoded.len());
    for (name, picture) in decoded {
        match picture {
            // Of what is left undone for lack of memory nothing else can be said.
            Err(Problem::Budget(error)) => return Err(error),
            picture => named.push((name, picture)),
        }
    }
    let others = others?;
    named.sort_unstable_by(|(left, _), (right, _)| left.cmp(right));
    let named = named.into_iter().map(|(name, picture)| match picture {
        Ok(picture) => Ok((name, picture)),
        Err(Problem::Budget(error)) => Err(error),
        Err(Problem::Picture(problem)) => Err(Error::Entry { path: path.into(), entry: name, problem }),
    });
    Ok((named.collect::<Result<_>>()?, others))
}

/// The shape of every picture: grey only if all are.
fn common_shape(path: &Path, pictures: &[Named]) -> Result<PictureShape> {
    let mut counts = BTreeMap::new();
    for (_, picture) in pictures {
        *counts.entry((picture.shape.height, picture.shape.width)).or_insert(0_usize) += 1;
    }
    let usual = counts.iter().max_by_key(|&(_, count)| count).map_or((0, 0), |(&extent, _)| extent);
    let odd = pictures.iter().find(|(_, picture)| (picture.shape.height, picture.shape.width) != usual);
    if let Some((name, picture)) = odd {
        let (height, width) = usual;
        let problem = format!(
            "has {} rows and {} columns where most have {height} and {width}; add `?size={}` to the path to resize all",
            picture.shape.height,
            picture.shape.width,
            height.min(width),
        );
        return Err(Error::Entry { path: path.into(), entry: name.clone(), problem });
    }
    let channels = pictures.iter().map(|(_, picture)| picture.shape.channels).max().unwrap_or(1);
    Ok(PictureShape { channels, height: usual.0, width: usual.1 })
}

/// Puts the pictures of each split together, in the order of their names.
fn assemble(layout: &Layout, shape: PictureShape, pictures: Vec<Named>) -> [Split; 2] {
    let tests = layout.places.iter().filter(|place| place.test).count();
    let room = |count: usize| (Vec::with_capacity(count * shape.volume()), Vec::with_capacity(count));
    let mut parts = [room(pictures.len() - tests), room(tests)];
    for ((_, picture), &Place { test, label }) in pictures.into_iter().zip(&layout.places) {
        let (pixels, labels) = &mut parts[usize::from(test)];
        for _ in 0..shape.channels / picture.shape.channels {
            pixels.extend_from_slice(&picture.bytes);
        }
        labels.push(label);
    }
    parts.map(|(pixels, labels)| Split::new(shape, pixels, labels))
}
