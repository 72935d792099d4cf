//! Picture folders and archives: all containers give the same data set, and every damage has its message.

use std::{
    fs,
    io::{Cursor, Write},
    path::{Path, PathBuf},
};

use image::{DynamicImage, GrayImage, ImageFormat, Luma, Rgb, RgbImage};
use resolvent_lab::data::{Error, PictureDataset, PictureShape, PictureSpec, Result};
use tempfile::TempDir;

/// Names and contents of the files of a data set.
type Files = Vec<(String, Vec<u8>)>;

fn load(path: &Path, settings: &str) -> Result<PictureDataset> {
    PictureSpec::parse(&format!("images:{}{settings}", path.display()))?.load()
}

fn encode(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

fn colour(height: u32, width: u32, shade: u8) -> DynamicImage {
    RgbImage::from_fn(width, height, |x, y| Rgb([shade, 10 * x as u8, 10 * y as u8])).into()
}

fn png(height: u32, width: u32, shade: u8) -> Vec<u8> {
    encode(&colour(height, width, shade), ImageFormat::Png)
}

/// `train` and `test` with two classes, and a readme beside them.
fn split_files() -> Files {
    let mut files = vec![("README.txt".to_string(), b"about".to_vec())];
    for (split, count) in [("train", 3), ("test", 2)] {
        for (label, class) in ["dog", "cat"].into_iter().enumerate() {
            for index in 0..count {
                let name = format!("{split}/{class}/{index}.png");
                files.push((name, png(4, 5, 100 * label as u8 + 10 * index + split.len() as u8)));
            }
        }
    }
    files
}

fn write_folder(root: &Path, files: &Files) -> PathBuf {
    for (name, bytes) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    root.to_path_buf()
}

fn tar(files: &Files) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, name, &bytes[..]).unwrap();
    }
    archive.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::default()).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

fn zip(files: &Files) -> Vec<u8> {
    let mut archive = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in files {
        archive.start_file(name.as_str(), zip::write::SimpleFileOptions::default()).unwrap();
        archive.write_all(bytes).unwrap();
    }
    archive.finish().unwrap().into_inner()
}

/// Writes one file and loads it.
fn load_bytes(name: &str, bytes: &[u8]) -> (String, Result<PictureDataset>) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    (path.display().to_string(), load(&path, ""))
}

#[test]
fn a_folder_is_read_with_its_splits() {
    let folder = TempDir::new().unwrap();
    let data = load(&write_folder(folder.path(), &split_files()), "").unwrap();
    assert_eq!(data.classes, ["cat", "dog"]);
    assert_eq!(data.shape, PictureShape { channels: 3, height: 4, width: 5 });
    assert_eq!(data.train.labels(), [0, 0, 0, 1, 1, 1]);
    assert_eq!(data.test.labels(), [0, 0, 1, 1]);
    let second_cat = data.train.picture(1).unwrap();
    assert_eq!(second_cat[..20], [115; 20], "the red plane: 100 for a cat, 10 for its index, 5 for `train`");
    assert_eq!(second_cat[20..25], [0, 10, 20, 30, 40], "the green plane grows along a row");
    assert_eq!(second_cat[40..46], [0, 0, 0, 0, 0, 10], "the blue plane grows along a column");
}

#[test]
fn every_archive_equals_the_folder() {
    let folder = TempDir::new().unwrap();
    let expected = load(&write_folder(folder.path(), &split_files()), "").unwrap();
    let mut nested: Files = split_files();
    nested.reverse();
    nested.iter_mut().for_each(|(name, _)| *name = format!("./pets/{name}"));
    nested.push(("./pets/train/cat/._0.png".into(), b"a desktop system's note".to_vec()));
    let plain = tar(&nested);
    let archives = [
        ("a.tar", plain.clone()),
        ("a.tar.gz", gzip(&plain)),
        ("a.tar.xz", xz(&plain)),
        ("a.tar.zst", zstd(&plain)),
        ("a.zip", zip(&split_files())),
        ("told-by-content", gzip(&plain)),
    ];
    for (name, bytes) in archives {
        assert_eq!(load_bytes(name, &bytes).1.unwrap(), expected, "{name}");
    }
}

#[test]
fn classes_without_splits_are_held_out_reproducibly() {
    let files: Files = (0..20).map(|index| (format!("{}/{index:02}.png", index % 2), png(2, 2, index))).collect();
    let data = load_bytes("a.tar", &tar(&files)).1.unwrap();
    assert_eq!((data.train.len(), data.test.len()), (16, 4));
    assert_eq!(load_bytes("a.zip", &zip(&files)).1.unwrap(), data);
}

#[test]
fn grey_pictures_have_one_channel_unless_mixed_with_colour() {
    let grey: DynamicImage = GrayImage::from_fn(3, 3, |x, y| Luma([(60 * x + y) as u8])).into();
    let mut files: Files = (0..4)
        .map(|index| (format!("{}/{index}.png", ["a", "b"][index % 2]), encode(&grey, ImageFormat::Png)))
        .collect();
    let data = load_bytes("a.tar", &tar(&files)).1.unwrap();
    assert_eq!(data.shape.channels, 1);
    assert_eq!(data.train.picture(0).unwrap()[..], [0, 60, 120, 1, 61, 121, 2, 62, 122]);
    files.push(("a/9.jpg".into(), encode(&colour(3, 3, 50), ImageFormat::Jpeg)));
    let data = load_bytes("a.tar", &tar(&files)).1.unwrap();
    assert_eq!(data.shape.channels, 3);
    let picture = data.test.picture(1).unwrap();
    let planes: Vec<&[u8]> = picture.chunks(9).collect();
    assert!(planes.iter().all(|plane| plane == &[0, 60, 120, 1, 61, 121, 2, 62, 122]), "grey in every plane");
}

#[test]
fn mixed_sizes_are_resized_on_request_and_refused_otherwise() {
    let mut files = split_files();
    files.push(("train/cat/9.png".into(), png(8, 6, 1)));
    let folder = TempDir::new().unwrap();
    let path = write_folder(folder.path(), &files);
    let message = load(&path, "").unwrap_err().to_string();
    for part in ["`train/cat/9.png`", "8 rows and 6 columns", "4 and 5", "?size=4"] {
        assert!(message.contains(part), "{message}");
    }
    let data = load(&path, "?size=4").unwrap();
    assert_eq!((data.shape.height, data.shape.width, data.train.len()), (4, 4, 7));
}

/// Loads `files` with one more, and expects an error about that one with `part` in it.
fn expect_refusal(name: &str, bytes: Vec<u8>, part: &str) {
    let mut files = split_files();
    files.retain(|(other, _)| other != name);
    files.push((name.into(), bytes));
    let message = match load_bytes("a.tar", &tar(&files)).1 {
        Err(error @ Error::Entry { .. }) => error.to_string(),
        other => panic!("{name}: {other:?}"),
    };
    let expected = [&format!("`{name}`"), part, "a.tar"];
    assert!(expected.iter().all(|part| message.contains(*part)) && !message.contains('\n'), "{message}");
}

#[test]
fn files_that_do_not_belong_are_refused_by_name() {
    expect_refusal("train/cat/notes.txt", b"none".to_vec(), "is no PNG, JPEG or WebP picture");
    expect_refusal("train/cat/7.png", b"none".to_vec(), "neither PNG, JPEG nor WebP");
    expect_refusal("train/cat/7.jpg", Vec::new(), "neither PNG, JPEG nor WebP");
    let whole = png(4, 5, 9);
    expect_refusal("train/cat/7.png", whole[..whole.len() / 2].to_vec(), "cannot be decoded");
    let jpeg = encode(&colour(4, 5, 9), ImageFormat::Jpeg);
    expect_refusal("train/cat/7.jpg", jpeg[..jpeg.len() / 2].to_vec(), "cannot be decoded");
    expect_refusal("top.png", png(4, 5, 9), "lies in no class folder");
    expect_refusal("train/cat/deep/7.png", png(4, 5, 9), "same depth");
    expect_refusal("test/mouse/7.png", png(4, 5, 9), "no training pictures");
}

#[test]
fn data_sets_too_small_to_learn_from_are_refused() {
    let folder = TempDir::new().unwrap();
    let cases: [(Files, &str); 5] = [
        (vec![], "no PNG, JPEG or WebP pictures"),
        (vec![("readme".into(), vec![1])], "no PNG, JPEG or WebP pictures"),
        (vec![("cat/0.png".into(), png(2, 2, 0)), ("cat/1.png".into(), png(2, 2, 1))], "one class only, `cat`"),
        (vec![("test/cat/0.png".into(), png(2, 2, 0))], "no training pictures"),
        (vec![("cat/0.png".into(), png(2, 2, 0)), ("dog/1.png".into(), png(2, 2, 1))], "too few pictures"),
    ];
    for (index, (files, part)) in cases.into_iter().enumerate() {
        let root = folder.path().join(index.to_string());
        fs::create_dir(&root).unwrap();
        for result in [load(&write_folder(&root, &files), ""), load_bytes("a.tar", &tar(&files)).1] {
            let message = match result {
                Err(error @ Error::Empty { .. }) => error.to_string(),
                other => panic!("{part}: {other:?}"),
            };
            assert!(message.contains(part), "{message}");
        }
    }
}

#[test]
fn a_validation_part_is_watched_beside_the_test_part() {
    let mut files = split_files();
    files.push(("val/cat/0.png".into(), png(4, 5, 7)));
    let data = load_bytes("a.tar", &tar(&files)).1.unwrap();
    let validation = data.validation.as_ref().unwrap();
    assert_eq!((validation.labels(), data.test.labels()), (&[0][..], &[0, 0, 1, 1][..]));
    assert_eq!(validation.picture(0).unwrap()[0], 7);
    assert_ne!(PictureDataset { validation: None, ..data.clone() }.fingerprint(), data.fingerprint());
    // Alone it is what is tested on.
    files.retain(|(name, _)| !name.starts_with("test/"));
    let data = load_bytes("a.tar", &tar(&files)).1.unwrap();
    assert_eq!((data.validation, data.test.labels()), (None, &[0][..]));
    files.push(("valid/cat/0.png".into(), png(4, 5, 0)));
    let message = load_bytes("a.tar", &tar(&files)).1.unwrap_err().to_string();
    assert!(message.contains("both `val` and `valid`"), "{message}");
}

/// The folders of ImageNet, whose validation pictures come without folders of their classes.
#[test]
fn validation_pictures_without_classes_are_refused_with_the_remedy() {
    let folder = TempDir::new().unwrap();
    let names = ["train/n01440764/n01440764_18.JPEG", "train/n01443537/n01443537_2.JPEG"];
    let jpeg = encode(&colour(6, 6, 9), ImageFormat::Jpeg);
    let mut files: Files = names.map(|name| (name.to_owned(), jpeg.clone())).into();
    files.push(("val/ILSVRC2012_val_00000001.JPEG".into(), jpeg.clone()));
    let message = load(&write_folder(folder.path(), &files), "").unwrap_err().to_string();
    let parts = ["`val/ILSVRC2012_val_00000001.JPEG`", "`val/CLASS/`", "ILSVRC2012_validation_ground_truth.txt"];
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    fs::remove_dir_all(folder.path().join("val")).unwrap();
    files.pop();
    files.push(("val/n01443537/ILSVRC2012_val_00000001.JPEG".into(), jpeg));
    let data = load(&write_folder(folder.path(), &files), "?size=4").unwrap();
    assert_eq!((data.classes.len(), data.train.len(), data.test.labels()), (2, 2, &[1][..]));
}

#[test]
fn a_name_that_occurs_twice_is_refused() {
    let mut files = split_files();
    files.push(files[1].clone());
    let message = load_bytes("a.tar", &tar(&files)).1.unwrap_err().to_string();
    assert!(message.contains("`train/dog/0.png` occurs twice"), "{message}");
}

#[test]
fn damaged_archives_are_refused_by_name() {
    let plain = tar(&split_files());
    let cut = |bytes: &[u8], share: f64| bytes[..(bytes.len() as f64 * share) as usize].to_vec();
    let flip = |mut bytes: Vec<u8>, at: usize| {
        bytes[at] ^= 0x55;
        bytes
    };
    let zipped = zip(&split_files());
    let xz_end = xz(&plain).len() - 30;
    let cases = [
        ("cut.tar", cut(&plain, 0.5)),
        ("no-end.tar", plain[..plain.len() - 1024].to_vec()),
        ("cut.tar.gz", cut(&gzip(&plain), 0.9)),
        ("cut.tar.xz", cut(&xz(&plain), 0.9)),
        ("cut.tar.zst", cut(&zstd(&plain), 0.9)),
        ("cut.zip", cut(&zipped, 0.9)),
        ("header.tar", flip(plain.clone(), 3)),
        ("check.tar.gz", {
            let bytes = gzip(&plain);
            let at = bytes.len() - 6;
            flip(bytes, at)
        }),
        ("index.tar.xz", flip(xz(&plain), xz_end)),
        ("data.zip", flip(zipped.clone(), zipped.len() / 3)),
        ("empty.tar", Vec::new()),
        ("text.tar", b"not an archive at all".to_vec()),
        ("picture.png", png(4, 5, 0)),
    ];
    for (name, bytes) in cases {
        let (path, result) = load_bytes(name, &bytes);
        let message = match result {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{name} was read"),
        };
        assert!(message.starts_with(&path) && !message.contains('\n'), "{message}");
    }
}
