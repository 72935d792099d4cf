//! WebP pictures: without loss as the encoder here writes them, with loss as libwebp does (`tests/data`, of 20 x 12 pixels in four colours).

use std::{
    fs,
    io::Cursor,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use image::{DynamicImage, ImageFormat, Rgb, RgbImage, RgbaImage};
use resolvent_lab::{
    budget,
    data::{Error, PictureDataset, PictureSpec, Result},
};
use tempfile::TempDir;

const LOSSY: &[u8] = include_bytes!("data/lossy.webp");
const LOSSY_ALPHA: &[u8] = include_bytes!("data/lossy-alpha.webp");
const ANIMATED: &[u8] = include_bytes!("data/animated.webp");

/// One test at a time: the budget is the process's, and one of them asks what is left of it.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn encode(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

fn picture(height: u32, width: u32, shade: u8) -> DynamicImage {
    RgbImage::from_fn(width, height, |x, y| Rgb([shade, (11 * x) as u8, (7 * y + x * y) as u8])).into()
}

/// Four pictures, two in each of two classes, of which `last` is the last.
fn folder(ending: &str, first: &[Vec<u8>; 3], last: &[u8]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (index, bytes) in first.iter().map(Vec::as_slice).chain([last]).enumerate() {
        let class = folder.path().join(["a", "b"][index / 2]);
        fs::create_dir_all(&class).unwrap();
        fs::write(class.join(format!("{index}.{ending}")), bytes).unwrap();
    }
    folder
}

fn load(folder: &Path, settings: &str) -> Result<PictureDataset> {
    PictureSpec::parse(&format!("images:{}{settings}", folder.display()))?.load()
}

fn pictures(format: ImageFormat) -> [Vec<u8>; 3] {
    [40, 90, 140].map(|shade| encode(&picture(12, 20, shade), format))
}

/// A file with chunks of its own beside the pixels that `encode` wrote.
fn extended(flags: u8, [height, width]: [u32; 2], pixels: &[u8], behind: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
    let chunk = |kind: &[u8; 4], bytes: &[u8]| {
        let padding = vec![0; bytes.len() % 2];
        [kind, &(bytes.len() as u32).to_le_bytes()[..], bytes, &padding].concat()
    };
    let (width, height) = ((width - 1).to_le_bytes(), (height - 1).to_le_bytes());
    let first = [&[flags, 0, 0, 0], &width[..3], &height[..3]].concat();
    let mut body = [b"WEBP".to_vec(), chunk(b"VP8X", &first), pixels[12..].to_vec()].concat();
    behind.iter().for_each(|(kind, bytes)| body.extend(chunk(kind, bytes)));
    [b"RIFF", &(body.len() as u32).to_le_bytes()[..], &body].concat()
}

/// EXIF that says no more than the orientation.
fn exif(orientation: u8) -> Vec<u8> {
    let tag = [0x12, 0x01, 3, 0, 1, 0, 0, 0, orientation, 0, 0, 0];
    [b"II*\0\x08\0\0\0\x01\0", &tag[..], &[0; 4]].concat()
}

#[test]
fn pictures_without_loss_are_those_of_png() {
    let _turn = alone();
    let alike = |format, ending| {
        let last = encode(&picture(12, 20, 190), format);
        load(folder(ending, &pictures(format), &last).path(), "").unwrap()
    };
    let (webp, png) = (alike(ImageFormat::WebP, "webp"), alike(ImageFormat::Png, "png"));
    assert_eq!(webp.shape, png.shape);
    for (webp, png) in [(&webp.train, &png.train), (&webp.test, &png.test)] {
        assert_eq!((webp.len(), webp.labels()), (png.len(), png.labels()));
        (0..png.len()).for_each(|index| assert_eq!(webp.picture(index).unwrap(), png.picture(index).unwrap()));
    }
    // An alpha channel is dropped, and of pictures that are read when they are needed a part is resized.
    let opaque = picture(12, 20, 190).to_rgb8();
    let transparent = RgbaImage::from_fn(20, 12, |x, y| {
        let Rgb([r, g, b]) = *opaque.get_pixel(x, y);
        image::Rgba([r, g, b, (x * 9) as u8])
    });
    let last = encode(&transparent.into(), ImageFormat::WebP);
    let resized = load(folder("webp", &pictures(ImageFormat::WebP), &last).path(), "?size=8").unwrap();
    let last = encode(&opaque.into(), ImageFormat::Png);
    let expected = load(folder("png", &pictures(ImageFormat::Png), &last).path(), "?size=8").unwrap();
    for index in 0..resized.train.len() {
        assert_eq!(resized.train.picture(index).unwrap(), expected.train.picture(index).unwrap());
    }
}

#[test]
fn pictures_with_loss_are_read_with_and_without_alpha() {
    let _turn = alone();
    for last in [LOSSY, LOSSY_ALPHA] {
        let files = folder("webp", &[LOSSY, LOSSY, LOSSY].map(<[u8]>::to_vec), last);
        let data = load(files.path(), "").unwrap();
        assert_eq!((data.shape.channels, data.shape.height, data.shape.width), (3, 12, 20));
        for split in [&data.train, &data.test] {
            for index in 0..split.len() {
                let picture = split.picture(index).unwrap();
                let at = |x: usize, y: usize| [0, 1, 2].map(|channel| i32::from(picture[(channel * 12 + y) * 20 + x]));
                for ((x, y), colour) in [
                    ((2, 1), [200, 30, 90]),
                    ((17, 1), [40, 30, 90]),
                    ((2, 10), [200, 180, 90]),
                    ((17, 10), [40, 180, 90]),
                ] {
                    let found = at(x, y);
                    assert!(
                        found.iter().zip(colour).all(|(x, y)| (x - y).abs() < 30),
                        "{found:?}, expected {colour:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn pictures_are_turned_as_their_exif_says() {
    let _turn = alone();
    let upright = picture(20, 12, 190);
    let lying = encode(&upright.rotate270(), ImageFormat::WebP);
    let turned = extended(0x08, [12, 20], &lying, &[(b"EXIF", &exif(6))]);
    let all = [40, 90, 140].map(|shade| encode(&picture(20, 12, shade), ImageFormat::WebP));
    let found = load(folder("webp", &all, &turned).path(), "").unwrap();
    let expected = load(folder("webp", &all, &encode(&upright, ImageFormat::WebP)).path(), "").unwrap();
    assert_eq!((found.shape, found.train.labels()), (expected.shape, expected.train.labels()));
    for (found, expected) in [(&found.train, &expected.train), (&found.test, &expected.test)] {
        (0..found.len()).for_each(|index| assert_eq!(found.picture(index).unwrap(), expected.picture(index).unwrap()));
    }
    // The orientation may stand behind more than what is first read of a file.
    let noise = RgbImage::from_fn(160, 160, |x, y| {
        Rgb([(x * x * 7 + y * 13) as u8, (x * y * 31) as u8, (y * y * 3 + x) as u8])
    });
    let large = encode(&noise.into(), ImageFormat::WebP);
    assert!(large.len() > 20_000, "{}", large.len());
    let turned = extended(0x08, [160, 160], &large, &[(b"XMP ", b"odd"), (b"EXIF", &exif(6))]);
    let files = folder("webp", &all, &turned);
    load(files.path(), "?size=16").unwrap();
}

#[test]
fn damaged_and_animated_files_are_refused_by_name() {
    let _turn = alone();
    let good = pictures(ImageFormat::WebP);
    let refuse = |last: &[u8], part: &str| {
        let files = folder("webp", &good, last);
        let error = load(files.path(), "").unwrap_err();
        assert!(matches!(error, Error::Entry { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains("`b/3.webp`") && message.contains(part) && !message.contains('\n'), "{message}");
    };
    let whole = encode(&picture(12, 20, 9), ImageFormat::WebP);
    refuse(ANIMATED, "is animated; keep one of its pictures");
    refuse(b"RIFF", "neither PNG, JPEG nor WebP");
    refuse(&whole[..14], "ends before its pixels");
    refuse(&whole[..whole.len() / 2], "ends in the middle of the picture");
    refuse(&LOSSY[..LOSSY.len() - 3], "ends in the middle of the picture");
    // A chunk that says it is longer than the file.
    let mut long = whole.clone();
    long[16..20].copy_from_slice(&[0xff; 4]);
    refuse(&long, "ends in the middle of the picture");
    let long = extended(0x08, [12, 20], &whole, &[(b"EXIF", &exif(1))]);
    let mut cut = long.clone();
    let length = (long.len() - 8 - 10) as u32;
    cut[4..8].copy_from_slice(&length.to_le_bytes());
    refuse(&cut, "ends in the middle of the picture");
    // Another size in the header of the file than in that of its pixels.
    refuse(&extended(0, [12, 21], LOSSY, &[]), "");
    let mut none = LOSSY.to_vec();
    none[26..28].fill(0);
    refuse(&none, "has no pixels");
}

/// What files say of their pictures is asked of the budget before anything is decoded.
#[test]
fn pictures_that_say_they_are_too_large_are_refused() {
    let _turn = alone();
    let good = pictures(ImageFormat::WebP);
    let huge = extended(0, [1 << 24, 1 << 24], &good[0], &[]);
    let files = folder("webp", &good, &huge);
    let error = load(files.path(), "?size=8").unwrap_err();
    assert!(matches!(&error, Error::Budget { path, .. } if path.ends_with("b/3.webp")), "{error}");
    assert_eq!(budget::used(), 0);
}
