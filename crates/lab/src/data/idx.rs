//! The idx files of MNIST and its relatives.

use std::{io::Read, path::Path};

use super::{Error, PictureDataset, PictureShape, PictureSplit, Result};
use crate::{
    budget::Held,
    source::{check_folder, open, read_exactly},
};

/// The ten digits of MNIST.
pub(super) const DIGITS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

/// The ten garments of "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", table 2.
pub(super) const GARMENTS: [&str; 10] =
    ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"];

/// Loads the four standard files in `folder`, plain or gzipped.
pub(super) fn load(name: &str, folder: &Path, classes: &[&str], held: &Held) -> Result<PictureDataset> {
    check_folder(folder)?;
    let split = |prefix: &str| -> Result<PictureSplit> {
        let pictures = find(folder, &format!("{prefix}-images"), 3)?;
        let labels = find(folder, &format!("{prefix}-labels"), 1)?;
        load_pair(&pictures, &labels, classes.len(), held)
    };
    let (train, test) = (split("train")?, split("t10k")?);
    if train.shape() != test.shape() {
        let (train, test) = (train.shape(), test.shape());
        let problem = format!(
            "training pictures are {} x {}, test pictures {} x {}; the files are of different data sets",
            train.height, train.width, test.height, test.width
        );
        return Err(Error::Format { path: folder.into(), problem });
    }
    let classes = classes.iter().map(ToString::to_string).collect();
    Ok(PictureDataset { name: name.into(), classes, shape: train.shape(), train, validation: None, test })
}

/// Loads one pair of files and holds `fraction` of every class out for testing; the classes are the numbers up to the
/// highest label.
pub(super) fn load_with_holdout(pictures: &Path, labels: &Path, fraction: f64, held: &Held) -> Result<PictureDataset> {
    let all = load_pair(pictures, labels, 256, held)?;
    // Both parts are copies.
    held.add(pictures, (all.len() * all.shape().volume()) as u64)?;
    let classes = all.labels().iter().max().map_or(0, |&last| last + 1);
    let (train, test) = all.hold_out(fraction, 0);
    if test.is_empty() {
        let problem = "has too few pictures to hold some out for testing; two per class are needed".into();
        return Err(Error::Empty { path: pictures.into(), problem });
    }
    let classes = (0..classes).map(|class| class.to_string()).collect();
    Ok(PictureDataset { name: "idx".into(), classes, shape: all.shape(), train, validation: None, test })
}

/// Loads one pair of files; labels must be below `classes`.
fn load_pair(pictures_path: &Path, labels_path: &Path, classes: usize, held: &Held) -> Result<PictureSplit> {
    let ([count, height, width], pixels) = read(pictures_path, held)?;
    let ([label_count], labels) = read(labels_path, held)?;
    if count != label_count {
        return Err(Error::Count {
            pictures_path: pictures_path.into(),
            pictures: count,
            labels_path: labels_path.into(),
            labels: label_count,
        });
    }
    if pixels.is_empty() {
        return Err(Error::Empty { path: pictures_path.into(), problem: "holds no pictures".into() });
    }
    if let Some(index) = labels.iter().position(|&label| usize::from(label) >= classes) {
        return Err(Error::Label { path: labels_path.into(), index, label: labels[index], classes });
    }
    let shape = PictureShape { channels: 1, height, width };
    Ok(PictureSplit::of_pixels(shape, pixels, labels.into_iter().map(u32::from).collect()))
}

/// The file `{stem}-idx{rank}-ubyte` or `{stem}.idx{rank}-ubyte`, plain or gzipped.
fn find(folder: &Path, stem: &str, rank: usize) -> Result<std::path::PathBuf> {
    let standard = folder.join(format!("{stem}-idx{rank}-ubyte"));
    for separator in ['-', '.'] {
        for suffix in ["", ".gz"] {
            let path = folder.join(format!("{stem}{separator}idx{rank}-ubyte{suffix}"));
            if path.exists() {
                return Ok(path);
            }
        }
    }
    Err(Error::Missing { path: standard, remedy: "the folder must hold the four idx files, plain or .gz".into() })
}

/// Reads an idx file of unsigned bytes with `RANK` dimensions.
fn read<const RANK: usize>(path: &Path, held: &Held) -> Result<([usize; RANK], Vec<u8>)> {
    let mut reader = open(path)?;
    let mut word = || -> Result<[u8; 4]> {
        let mut bytes = [0; 4];
        reader.read_exact(&mut bytes).map_err(|source| Error::io(path, source))?;
        Ok(bytes)
    };
    let magic = word()?;
    if magic != [0, 0, 8, RANK as u8] {
        let problem =
            format!("starts with {magic:02x?}, an idx file of bytes in {RANK} dimensions with 00 00 08 0{RANK}");
        return Err(Error::Format { path: path.into(), problem });
    }
    let mut extents = [0; RANK];
    for extent in &mut extents {
        *extent = u32::from_be_bytes(word()?) as usize;
    }
    let volume = extents.iter().try_fold(1_u64, |volume, &extent| volume.checked_mul(extent as u64));
    let volume = volume.ok_or_else(|| Error::Format {
        path: path.into(),
        problem: format!("announces {extents:?} values, more than any memory holds"),
    })?;
    Ok((extents, read_exactly(path, reader, volume, held)?))
}
