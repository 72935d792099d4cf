//! One PNG or JPEG file to planar bytes.

use std::io::Cursor;

use image::{DynamicImage, ImageFormat, ImageReader};

use crate::{
    augment::{Filter, Picture, Rectangle, resample},
    data::PictureShape,
};

/// A decoded picture.
pub(super) struct Decoded {
    /// One channel if the file is grey, else three.
    pub shape: PictureShape,
    /// `[channels, height, width]`.
    pub bytes: Vec<u8>,
}

/// Decodes a file, told by its content. An alpha channel is dropped and 16 bits become 8. The error is a predicate of the
/// file's name.
pub(super) fn decode(file: &[u8], size: Option<usize>) -> Result<Decoded, String> {
    let damaged = |problem: &dyn std::fmt::Display| {
        let problem = problem.to_string();
        let one_line: Vec<&str> = problem.split_whitespace().collect();
        format!("cannot be decoded ({}); replace or remove it", one_line.join(" "))
    };
    let reader = ImageReader::new(Cursor::new(file)).with_guessed_format().map_err(|problem| damaged(&problem))?;
    if !matches!(reader.format(), Some(ImageFormat::Png | ImageFormat::Jpeg)) {
        return Err("is neither PNG nor JPEG inside; convert or remove it".into());
    }
    if reader.format() == Some(ImageFormat::Jpeg) && !has_end(file) {
        return Err(damaged(&"it ends in the middle of the picture"));
    }
    let picture = planar(&reader.decode().map_err(|problem| damaged(&problem))?);
    Ok(match size {
        Some(size) => resize(picture, size),
        None => picture,
    })
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

fn planar(picture: &DynamicImage) -> Decoded {
    let (height, width) = (picture.height() as usize, picture.width() as usize);
    if !picture.color().has_color() {
        let shape = PictureShape { channels: 1, height, width };
        return Decoded { shape, bytes: picture.to_luma8().into_raw() };
    }
    let interleaved = picture.to_rgb8();
    let bytes = (0..3).flat_map(|channel| interleaved.pixels().map(move |pixel| pixel.0[channel])).collect();
    Decoded { shape: PictureShape { channels: 3, height, width }, bytes }
}

/// Resizes the shorter side to `size` and cuts the centre out.
fn resize(picture: Decoded, size: usize) -> Decoded {
    if (picture.shape.height, picture.shape.width) == (size, size) {
        return picture;
    }
    let centre = Rectangle::centred(picture.shape, size, size, 1.0);
    let resized = resample(&Picture::from_bytes(picture.shape, &picture.bytes), centre, size, size, Filter::Bicubic);
    Decoded { shape: resized.shape, bytes: resized.to_bytes() }
}
