//! One PNG, JPEG or WebP file to pixels, and the part of it that is seen.

use std::{borrow::Cow, io::Cursor, path::Path};

use fast_image_resize::{
    FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer,
    images::{TypedImage, TypedImageRef},
    pixels::{U8, U8x3},
};
use image::{ColorType, DynamicImage, ImageDecoder, ImageReader, Limits};

use super::{
    header::{Format, damaged},
    png, webp,
};
use crate::{
    augment::{Filter, Rectangle},
    budget::Passing,
    data::{Error, PictureShape},
};

/// A picture as its file has it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Original {
    /// One channel if the file is grey, else three, as of any WebP file.
    pub shape: PictureShape,
    /// `[height, width, channels]`.
    pub bytes: Vec<u8>,
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

/// Most bytes of a row and of what a file holds beside its pixels, such as an orientation.
const BESIDE: u64 = 32 << 20;

/// The limits of decoders: what pixels take is asked of the budget.
pub(super) fn limits() -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(BESIDE);
    limits
}

/// Decodes a file, told by its content, and turns it as its orientation says. An alpha channel is dropped and 16 bits become 8.
/// What comes with it are the bytes of the budget for the picture and for one part of it of `extent` (height, width).
pub(super) fn decode(path: &Path, file: &[u8], extent: Option<[usize; 2]>) -> Result<(Original, Passing), Problem> {
    let format = Format::of(file)?;
    let shown = if format == Format::Png { png::without_profile(file) } else { Cow::Borrowed(file) };
    let copied = if let Cow::Owned(copy) = &shown { copy.len() as u64 } else { 0 };
    let mut reader =
        ImageReader::new(Cursor::new(&*shown)).with_guessed_format().map_err(|problem| damaged(&problem))?;
    let beside_file = beside(file, format)?.saturating_add(copied);
    reader.limits(limits());
    let mut decoder = reader.into_decoder().map_err(|problem| damaged(&problem))?;
    if decoder.total_bytes() == 0 {
        return Err(damaged(&"it has no pixels").into());
    }
    let (width, height) = decoder.dimensions();
    let colour = decoder.color_type();
    let channels = if colour.has_color() { 3 } else { 1 };
    let shape = PictureShape { channels, height: height as usize, width: width as usize };
    // As bytes of the channels that are kept, where the file has others.
    let plain = matches!(colour, ColorType::L8 | ColorType::Rgb8);
    let converted = if plain { 0 } else { volume(shape) };
    let beside = needed(shape, format, extent).saturating_sub(volume(shape));
    let passing = [beside_file, converted, beside].into_iter().fold(decoder.total_bytes(), u64::saturating_add);
    let passing = Passing::take(path, passing).map_err(Problem::Budget)?;
    let orientation = decoder.orientation().map_err(|problem| damaged(&problem))?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(|problem| damaged(&problem))?;
    picture.apply_orientation(orientation);
    let shape = PictureShape { height: picture.height() as usize, width: picture.width() as usize, ..shape };
    let bytes = if channels == 1 { picture.into_luma8().into_raw() } else { picture.into_rgb8().into_raw() };
    Ok((Original { shape, bytes }, passing))
}

/// Bytes of tables that the codes of a WebP file without loss may take for each byte of it: eleven bytes make a table of 4096, and of the longest
/// codes three bits make six nodes of 32.
const TABLES: u64 = 640;

/// What a decoder keeps of `file`, of which no part may be missing.
fn beside(file: &[u8], format: Format) -> Result<u64, String> {
    let length = file.len() as u64;
    match format {
        Format::Png => Ok(0),
        Format::Jpeg if !has_end(file) => Err(damaged(&"it ends in the middle of the picture")),
        // A copy.
        Format::Jpeg => Ok(length),
        Format::WebP => {
            let chunks = webp::chunks(file)?;
            webp::header(file)?;
            if let Some((_, exif)) = chunks.iter().find(|(kind, range)| kind == b"EXIF" && range.len() as u64 > BESIDE)
            {
                return Err(damaged(&format!("it holds {} bytes beside its pixels", exif.len())));
            }
            // Two copies, one of which grows by doubling.
            Ok(length.saturating_mul(if webp::has_tables(&chunks) { TABLES } else { 4 }))
        }
    }
}

fn volume(shape: PictureShape) -> u64 {
    [shape.height, shape.width]
        .iter()
        .fold(shape.channels as u64, |product, &extent| product.saturating_mul(extent as u64))
}

/// Bytes that a picture of `shape` takes at least while it is decoded, turned or cut to `extent` (height, width).
pub(super) fn needed(shape: PictureShape, format: Format, extent: Option<[usize; 2]>) -> u64 {
    let PictureShape { channels, height, width } = shape;
    let [height, width, channels] = [height, width, channels].map(|extent| extent as u64);
    // A progressive JPEG is held as coefficients of 16 bits, of whole blocks in up to four channels. WebP takes less: planes of whole blocks and
    // an alpha channel, or pixels of four bytes, and in either case transforms and codes of blocks of four by four.
    let blocks = (width + 16).saturating_mul(height + 16);
    let coefficients = if format == Format::Png { 0 } else { blocks.saturating_mul(8) };
    // Resized along rows first.
    let part =
        extent.map_or(0, |[rows, columns]| (height.saturating_add(2 * rows as u64)).saturating_mul(columns as u64));
    // The picture, and a copy whose channels lie apart or that is turned.
    [volume(shape), coefficients, part.saturating_mul(channels)].into_iter().fold(volume(shape), u64::saturating_add)
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

impl Original {
    /// All of it, `[channels, height, width]`.
    pub(crate) fn planar(&self) -> Vec<u8> {
        planar(&self.bytes, self.shape.channels)
    }

    /// The pixels in `area`, resized to `extent` (height, width): `[channels, height, width]`. Where it shrinks, the filter
    /// widens so that nothing aliases.
    pub(crate) fn part(&self, area: Rectangle, extent: [usize; 2], filter: Filter) -> Result<Vec<u8>, String> {
        let PictureShape { channels, height, width } = self.shape;
        let [rows, columns] = extent;
        if (area, extent) == (Rectangle { top: 0, left: 0, height, width }, [height, width]) {
            return Ok(self.planar());
        }
        let filter = match filter {
            Filter::Bilinear => FilterType::Bilinear,
            Filter::Bicubic => FilterType::CatmullRom,
        };
        let [left, top, across, down] = [area.left, area.top, area.width, area.height].map(|extent| extent as f64);
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter)).crop(left, top, across, down);
        let side = |extent: usize| u32::try_from(extent).unwrap_or(u32::MAX);
        let sizes = [[width, height], [columns, rows]].map(|size| size.map(side));
        let resize = if channels == 1 { resized::<U8> } else { resized::<U8x3> };
        let failed = |problem| format!("cannot be resized ({problem}); replace or remove it");
        Ok(planar(&resize(&self.bytes, sizes, &options).map_err(failed)?, channels))
    }
}

/// Interleaved bytes of one size as those of another, widths before heights. Of a type of pixels each: a call that takes any would be compiled
/// for all that there are.
fn resized<P: PixelTrait>(
    bytes: &[u8],
    [[width, height], [columns, rows]]: [[u32; 2]; 2],
    options: &ResizeOptions,
) -> Result<Vec<u8>, String> {
    let source = TypedImageRef::<P>::from_buffer(width, height, bytes).map_err(|e| e.to_string())?;
    let mut resized = vec![0; columns as usize * rows as usize * size_of::<P>()];
    let mut into = TypedImage::<P>::from_buffer(columns, rows, &mut resized).map_err(|e| e.to_string())?;
    Resizer::new().resize_typed(&source, &mut into, options).map_err(|e| e.to_string())?;
    Ok(resized)
}

/// `[height, width, channels]` as `[channels, height, width]`.
fn planar(interleaved: &[u8], channels: usize) -> Vec<u8> {
    if channels == 1 {
        return interleaved.to_vec();
    }
    let mut bytes = Vec::with_capacity(interleaved.len());
    for channel in 0..channels {
        bytes.extend(interleaved.iter().skip(channel).step_by(channels));
    }
    bytes
}
