//! One PNG or JPEG file to planar bytes.

use std::{io::Cursor, path::Path};

use image::{ColorType, DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

use crate::{
    augment::{Filter, Picture, Rectangle, resample},
    budget::{Held, Passing},
    data::{Error, PictureShape},
};

/// A decoded picture.
pub(crate) struct Decoded {
    /// One channel if the file is grey, else three.
    pub shape: PictureShape,
    /// `[channels, height, width]`.
    pub bytes: Vec<u8>,
    /// The shape in the file.
    pub whole: PictureShape,
}

/// Why a picture was not decoded.
pub(super) enum Problem {
    /// What is wrong with it: a predicate of the file's name.
    Picture(String),
    /// [`Error::Budget`].
    Budget(Error),
}

impl From<String> for Problem {
    fn from(problem: String) -> Self {
        Self::Picture(problem)
    }
}

/// Most bytes of a row and of what a file holds beside its pixels, such as a colour profile.
const BESIDE: u64 = 32 << 20;

/// Decodes a file, told by its content; with an `extent` (height, width), the shorter side is resized and the centre cut out.
/// An alpha channel is dropped and 16 bits become 8. `held` keeps the bytes of the result.
pub(super) fn decode(path: &Path, file: &[u8], extent: Option<[usize; 2]>, held: &Held) -> Result<Decoded, Problem> {
    let damaged = |problem: &dyn std::fmt::Display| {
        let problem = problem.to_string();
        let one_line: Vec<&str> = problem.split_whitespace().collect();
        format!("cannot be decoded ({}); replace or remove it", one_line.join(" "))
    };
    let mut reader = ImageReader::new(Cursor::new(file)).with_guessed_format().map_err(|problem| damaged(&problem))?;
    if !matches!(reader.format(), Some(ImageFormat::Png | ImageFormat::Jpeg)) {
        return Err("is neither PNG nor JPEG inside; convert or remove it".to_owned().into());
    }
    let jpeg = reader.format() == Some(ImageFormat::Jpeg);
    if jpeg && !has_end(file) {
        return Err(damaged(&"it ends in the middle of the picture").into());
    }
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(BESIDE);
    reader.limits(limits);
    let decoder = reader.into_decoder().map_err(|problem| damaged(&problem))?;
    if decoder.total_bytes() == 0 {
        return Err(damaged(&"it has no pixels").into());
    }
    // The decoder keeps a copy of a JPEG file.
    let needed = needed(&decoder, jpeg, extent).saturating_add(if jpeg { file.len() as u64 } else { 0 });
    let passing = Passing::take(path, needed).map_err(Problem::Budget)?;
    let picture = planar(DynamicImage::from_decoder(decoder).map_err(|problem| damaged(&problem))?);
    let picture = match extent {
        Some(extent) => resize(picture, extent),
        None => picture,
    };
    passing.keep(picture.bytes.len() as u64, held);
    Ok(picture)
}

/// Bytes that decoding takes at its worst moment, known from the header.
fn needed(decoder: &impl ImageDecoder, jpeg: bool, extent: Option<[usize; 2]>) -> u64 {
    let (width, height) = decoder.dimensions();
    let plane = u64::from(width).saturating_mul(height.into());
    let colour = decoder.color_type();
    let channels = if colour.has_color() { 3 } else { 1 };
    let planes = plane.saturating_mul(channels);
    // A progressive JPEG is held as coefficients of 16 bits, of whole blocks in up to four channels.
    let blocks = (u64::from(width) + 16).saturating_mul(u64::from(height) + 16);
    let coefficients = if jpeg { blocks.saturating_mul(8) } else { 0 };
    // As bytes of the channels that are kept, where the file has others.
    let converted = if matches!(colour, ColorType::L8 | ColorType::Rgb8) { 0 } else { planes };
    let decoded = [coefficients, converted, planes].into_iter().fold(decoder.total_bytes(), u64::saturating_add);
    // One plane at a time as f32, cut to the new width, then to the new height.
    let resized = extent.map_or(0, |[rows, columns]| {
        let narrowed = u64::from(height).saturating_mul(columns as u64);
        plane.saturating_add(narrowed).saturating_add(2 * channels * (rows * columns) as u64).saturating_mul(4)
    });
    decoded.max(planes.saturating_add(resized))
}

/// Whether a JPEG file has its end marker, without which the decoder fills up with grey. Segments before the first scan are
/// left out: they may hold a smaller picture with an end of its own.
fn has_end(file: &[u8]) -> bool {
    const SCAN: u8 = 0xda;
    let mut at = 2;
    while let Some(&[0xff, marker, high, low]) = file.get(at..at + 4) {
        if marker == SCAN {
            return file[at..].windows(2).any(|pair| pair == [0xff, 0xd9]);
        }
        // Bytes of 0xff before a marker are padding.
        at += if marker == 0xff { 1 } else { 2 + usize::from(u16::from_be_bytes([high, low])) };
    }
    false
}

fn planar(picture: DynamicImage) -> Decoded {
    let (height, width) = (picture.height() as usize, picture.width() as usize);
    let channels = if picture.color().has_color() { 3 } else { 1 };
    let shape = PictureShape { channels, height, width };
    if channels == 1 {
        return Decoded { shape, bytes: picture.into_luma8().into_raw(), whole: shape };
    }
    let interleaved = picture.into_rgb8().into_raw();
    let mut bytes = Vec::with_capacity(interleaved.len());
    for channel in 0..channels {
        bytes.extend(interleaved.iter().skip(channel).step_by(channels));
    }
    Decoded { shape, bytes, whole: shape }
}

/// Resizes the shorter side and cuts the centre out, one channel after the other.
fn resize(picture: Decoded, [height, width]: [usize; 2]) -> Decoded {
    let whole = picture.shape;
    if (whole.height, whole.width) == (height, width) {
        return picture;
    }
    let plane = PictureShape { channels: 1, ..whole };
    let centre = Rectangle::centred(whole, height, width, 1.0);
    let shape = PictureShape { height, width, ..whole };
    let mut bytes = Vec::with_capacity(shape.volume());
    for values in picture.bytes.chunks_exact(whole.plane()) {
        let values = Picture::from_bytes(plane, values);
        bytes.extend(resample(&values, centre, height, width, Filter::Bicubic).to_bytes());
    }
    Decoded { shape, bytes, whole }
}
