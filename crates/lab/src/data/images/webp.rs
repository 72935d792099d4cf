//! What the chunks of a WebP file say, without decoding it.

use std::ops::Range;

use image::{ColorType, metadata::Orientation};

use super::header::{Format, Header, damaged, turned};

/// Flags of an extended file.
const ANIMATION: u8 = 0x02;
const EXIF: u8 = 0x08;

/// The kind of a chunk and where its bytes are. A chunk of an odd length is followed by a byte of padding.
type Chunk = ([u8; 4], Range<usize>);

/// The chunk at `at`; none behind the last.
fn chunk(file: &[u8], at: usize) -> Option<Chunk> {
    let (kind, rest) = file.get(at..)?.split_first_chunk::<4>()?;
    let length = u32::from_le_bytes(*rest.first_chunk()?) as usize;
    Some((*kind, at + 8..(at + 8).saturating_add(length)))
}

/// All chunks of a whole file, behind `RIFF`, its length and `WEBP`.
///
/// # Errors
/// As a predicate of its name.
pub(super) fn chunks(file: &[u8]) -> Result<Vec<Chunk>, String> {
    let cut_off = || damaged(&"it ends in the middle of the picture");
    let stated = file.get(4..).and_then(<[u8]>::first_chunk).ok_or_else(cut_off)?;
    let end = (u32::from_le_bytes(*stated) as usize).saturating_add(8);
    let file = file.get(..end).ok_or_else(cut_off)?;
    let (mut found, mut at) = (Vec::new(), 12);
    while let Some((kind, range)) = chunk(file, at) {
        if range.end > file.len() {
            return Err(cut_off());
        }
        at = range.end + range.len() % 2;
        found.push((kind, range));
    }
    Ok(found)
}

/// Whether a chunk is compressed without loss, by codes whose tables may take many times its bytes.
pub(super) fn has_tables(chunks: &[Chunk]) -> bool {
    chunks.iter().any(|(kind, _)| [b"VP8L", b"ALPH"].contains(&kind))
}

/// Reads the header of a file from its beginning, which may be too short: the orientation stands behind the pixels.
pub(super) fn header(start: &[u8]) -> Result<Header, String> {
    let short = || damaged(&"it ends before its pixels");
    let kind = start.get(12..).and_then(<[u8]>::first_chunk::<4>).ok_or_else(short)?;
    let body = start.get(20..).ok_or_else(short)?;
    let (extent, orientation) = match (kind, body) {
        (b"VP8 ", &[_, _, _, 0x9d, 0x01, 0x2a, w0, w1, h0, h1, ..]) => (
            [[h0, h1], [w0, w1]].map(|bytes| usize::from(u16::from_le_bytes(bytes) & 0x3fff)),
            Orientation::NoTransforms,
        ),
        (b"VP8L", &[0x2f, b0, b1, b2, b3, ..]) => {
            let bits = u32::from_le_bytes([b0, b1, b2, b3]);
            ([bits >> 14, bits].map(|bits| (bits & 0x3fff) as usize + 1), Orientation::NoTransforms)
        }
        (b"VP8X", &[flags, _, _, _, w0, w1, w2, h0, h1, h2, ..]) => {
            if flags & ANIMATION != 0 {
                return Err("is animated; keep one of its pictures".into());
            }
            let extent = [[h0, h1, h2], [w0, w1, w2]];
            let extent = extent.map(|[low, middle, high]| u32::from_le_bytes([low, middle, high, 0]) as usize + 1);
            let turned = if flags & EXIF == 0 { Orientation::NoTransforms } else { orientation(start)? };
            (extent, turned)
        }
        _ => return Err(short()),
    };
    if extent.contains(&0) {
        return Err(damaged(&"it has no pixels"));
    }
    Ok(Header { shape: turned(extent, ColorType::Rgb8, orientation), format: Format::WebP })
}

/// What a whole file says of its orientation.
fn orientation(file: &[u8]) -> Result<Orientation, String> {
    let exif = chunks(file)?.into_iter().find(|(kind, _)| kind == b"EXIF");
    let orientation = exif.and_then(|(_, range)| Orientation::from_exif_chunk(&file[range]));
    Ok(orientation.unwrap_or(Orientation::NoTransforms))
}
