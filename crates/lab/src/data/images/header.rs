//! What the beginning of a picture file says, without decoding it.

use std::io::Cursor;

use image::{ColorType, ImageDecoder, ImageFormat, codecs::png::PngDecoder, metadata::Orientation};

use super::{png::without_profile, webp};
use crate::data::PictureShape;

/// What is known of a picture before it is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Its shape once its orientation is applied: one channel if it is grey, else three.
    pub shape: PictureShape,
    /// How it is encoded.
    pub format: Format,
}

/// How a picture is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Png,
    Jpeg,
    WebP,
}

impl Format {
    /// Tells it by the first bytes.
    ///
    /// # Errors
    /// As a predicate of the file's name.
    pub(super) fn of(start: &[u8]) -> Result<Self, String> {
        match image::guess_format(start) {
            Ok(ImageFormat::Png) => Ok(Self::Png),
            Ok(ImageFormat::Jpeg) => Ok(Self::Jpeg),
            Ok(ImageFormat::WebP) => Ok(Self::WebP),
            _ => Err("is neither PNG, JPEG nor WebP inside; convert or remove it".into()),
        }
    }
}

/// Reads the header of a file from its beginning, which may be too short.
pub(super) fn read(start: &[u8]) -> Result<Header, String> {
    match Format::of(start)? {
        Format::Png => png(start).map_err(|problem| damaged(&problem)),
        Format::Jpeg => jpeg(start).ok_or_else(|| damaged(&"it ends before its pixels")),
        Format::WebP => webp::header(start),
    }
}

/// The error of a picture that cannot be decoded, as a predicate of its name and in one line.
pub(super) fn damaged(problem: &dyn std::fmt::Display) -> String {
    let problem = problem.to_string();
    let one_line: Vec<&str> = problem.split_whitespace().collect();
    format!("cannot be decoded ({}); replace or remove it", one_line.join(" "))
}

fn png(start: &[u8]) -> image::ImageResult<Header> {
    let start = without_profile(start);
    let mut decoder = PngDecoder::with_limits(Cursor::new(&*start), super::decode::limits())?;
    let (width, height) = decoder.dimensions();
    let orientation = decoder.orientation()?;
    let shape = turned([height, width].map(|extent| extent as usize), decoder.color_type(), orientation);
    Ok(Header { shape, format: Format::Png })
}

/// The shape of a picture of `extent` (height, width) in the file.
pub(super) fn turned([height, width]: [usize; 2], colour: ColorType, orientation: Orientation) -> PictureShape {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    let channels = if colour.has_color() { 3 } else { 1 };
    match orientation {
        Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH => {
            PictureShape { channels, height: width, width: height }
        }
        _ => PictureShape { channels, height, width },
    }
}

/// Walks the segments up to the frame header: the decoder would read the whole file.
fn jpeg(start: &[u8]) -> Option<Header> {
    const EXIF: &[u8] = b"Exif\0\0";
    let (mut at, mut orientation) = (2, Orientation::NoTransforms);
    loop {
        let &[0xff, marker, high, low] = start.get(at..at + 4)? else { return None };
        let length = usize::from(u16::from_be_bytes([high, low]));
        match marker {
            // Bytes of 0xff before a marker are padding.
            0xff => {
                at += 1;
                continue;
            }
            // Any kind of frame: 0xc4, 0xc8 and 0xcc are tables.
            0xc0..=0xcf if ![0xc4, 0xc8, 0xcc].contains(&marker) => {
                let &[height, rows, width, columns, components] = start.get(at + 5..at + 10)? else { return None };
                let extent = [[height, rows], [width, columns]].map(|bytes| usize::from(u16::from_be_bytes(bytes)));
                let colour = if components == 1 { ColorType::L8 } else { ColorType::Rgb8 };
                return Some(Header { shape: turned(extent, colour, orientation), format: Format::Jpeg });
            }
            0xda => return None,
            0xe1 => {
                let exif = start.get(at + 4..at + 2 + length)?.strip_prefix(EXIF);
                orientation = exif.and_then(Orientation::from_exif_chunk).unwrap_or(orientation);
            }
            _ => {}
        }
        at += 2 + length;
    }
}
