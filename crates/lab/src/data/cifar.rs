//! CIFAR-10 in its binary form: records of one label byte and three planes of 32 x 32.

use std::path::Path;

use super::{Error, PictureDataset, PictureShape, PictureSplit, Result};
use crate::{
    budget::Held,
    source::{self, check_folder},
};

/// Classes in label order, "Learning Multiple Layers of Features from Tiny Images".
const CLASSES: [&str; 10] = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];
const SHAPE: PictureShape = PictureShape { channels: 3, height: 32, width: 32 };
const TRAIN: [&str; 5] =
    ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"];

/// Loads `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin` from `folder`.
pub(super) fn load(folder: &Path, held: &Held) -> Result<PictureDataset> {
    check_folder(folder)?;
    let (train, test) = (read(folder, &TRAIN, held)?, read(folder, &["test_batch.bin"], held)?);
    let classes = CLASSES.iter().map(ToString::to_string).collect();
    Ok(PictureDataset { name: "cifar10".into(), classes, shape: SHAPE, train, validation: None, test })
}

fn read(folder: &Path, files: &[&str], held: &Held) -> Result<PictureSplit> {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for file in files {
        let path = folder.join(file);
        if !path.exists() {
            let remedy = "the folder must hold data_batch_1.bin to data_batch_5.bin and test_batch.bin";
            return Err(Error::Missing { path, remedy: remedy.into() });
        }
        read_records(&path, &mut pixels, &mut labels, held)?;
    }
    Ok(PictureSplit::of_pixels(SHAPE, pixels, labels))
}

fn read_records(path: &Path, pixels: &mut Vec<u8>, labels: &mut Vec<u32>, held: &Held) -> Result<()> {
    let record = 1 + SHAPE.volume();
    let file = Held::new();
    let bytes = source::read(path, &file)?;
    if bytes.is_empty() {
        return Err(Error::Empty { path: path.into(), problem: "holds no pictures".into() });
    }
    let expected = bytes.len().next_multiple_of(record) as u64;
    if bytes.len() as u64 != expected {
        return Err(Error::Length { path: path.into(), expected, got: bytes.len() as u64 });
    }
    held.add(path, expected)?;
    pixels.reserve_exact(bytes.len());
    for (index, record) in bytes.chunks_exact(record).enumerate() {
        let (label, picture) = (record[0], &record[1..]);
        if usize::from(label) >= CLASSES.len() {
            return Err(Error::Label { path: path.into(), index, label, classes: CLASSES.len() });
        }
        labels.push(u32::from(label));
        pixels.extend_from_slice(picture);
    }
    Ok(())
}
