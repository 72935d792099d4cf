//! The chunks of a PNG file.

use std::borrow::Cow;

/// Where the first chunk begins.
const SIGNATURE: usize = 8;

/// A chunk's length and kind before its content, and the checksum behind it.
const AROUND: usize = 12;

/// The file, or the beginning of one, without the colour profile and the texts before its pixels: a decoder unpacks them, to many times what they
/// take in the file, and no pixel depends on them.
pub(super) fn without_profile(file: &[u8]) -> Cow<'_, [u8]> {
    let (mut kept, mut from, mut at) = (Vec::new(), 0, SIGNATURE);
    while let Some((&[a, b, c, d], kind)) = file.get(at..at + 8).and_then(<[u8]>::split_first_chunk) {
        if kind == b"IDAT" {
            break;
        }
        let next = at.saturating_add(u32::from_be_bytes([a, b, c, d]) as usize).saturating_add(AROUND);
        if [b"iCCP", b"iTXt", b"zTXt", b"tEXt"].iter().any(|dropped| kind == *dropped) {
            kept.extend_from_slice(&file[from..at]);
            from = next.min(file.len());
        }
        at = next;
    }
    if from == 0 {
        return Cow::Borrowed(file);
    }
    kept.extend_from_slice(&file[from..]);
    Cow::Owned(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(kind: &[u8; 4], content: &[u8]) -> Vec<u8> {
        [&(content.len() as u32).to_be_bytes(), &kind[..], content, &[0; 4]].concat()
    }

    #[test]
    fn what_is_beside_the_pixels_is_left_out() {
        let [header, pixels, text] = [chunk(b"IHDR", &[1; 13]), chunk(b"IDAT", b"iCCP"), chunk(b"tEXt", b"late")];
        let signature = b"\x89PNG\r\n\x1a\n".to_vec();
        let plain = [&signature[..], &header, &pixels, &text].concat();
        assert_eq!(without_profile(&plain), Cow::Borrowed(&plain[..]));
        let [profile, early, turned] = [chunk(b"iCCP", &[7; 99]), chunk(b"zTXt", b"x"), chunk(b"eXIf", b"MM")];
        let laden = [&signature[..], &header, &profile, &turned, &early, &pixels, &text].concat();
        assert_eq!(without_profile(&laden)[..], [&signature[..], &header, &turned, &pixels, &text].concat());
        // A beginning that ends within a chunk, or one that says that it is longer than all memory.
        let begin = [&signature[..], &header].concat();
        assert_eq!(without_profile(&laden[..begin.len() + 20])[..], begin);
        let mut long = laden.clone();
        long[begin.len()..begin.len() + 4].fill(0xff);
        assert_eq!(without_profile(&long)[..], begin);
        assert!(without_profile(b"\x89PNG").len() == 4);
    }
}
