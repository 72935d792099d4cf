//! WebDataset shards: `key.jpg` and what says its class, in tar archives that are named together.

use std::{
    fs,
    io::Cursor,
    path::{Path, PathBuf},
};

use image::{ImageFormat, Rgb, RgbImage};
use resolvent_lab::data::{DataSpec, Error, PictureDataset, PictureSpec, Result};
use tempfile::TempDir;

fn png(shade: u8) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    RgbImage::from_pixel(6, 6, Rgb([shade; 3])).write_to(&mut bytes, ImageFormat::Png).unwrap();
    bytes.into_inner()
}

type Files = Vec<(String, Vec<u8>)>;

/// Samples `from..to`, of the class of their number modulo `classes`.
fn samples(from: u8, to: u8, classes: u8) -> Files {
    (from..to)
        .flat_map(|index| {
            let json = format!(r#"{{"label": "c{}", "url": 1}}"#, index % classes);
            [
                (format!("{index:03}.png"), png(index)),
                (format!("{index:03}.cls"), format!("{}\n", index % classes).into_bytes()),
                (format!("{index:03}.json"), json.into_bytes()),
            ]
        })
        .collect()
}

fn write(path: &Path, files: &Files) -> PathBuf {
    let mut archive = tar::Builder::new(fs::File::create(path).unwrap());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, name, &bytes[..]).unwrap();
    }
    archive.finish().unwrap();
    path.into()
}

fn load(spec: &str) -> Result<PictureDataset> {
    PictureSpec::parse(&format!("webdataset:{spec}"))?.load()
}

/// Two training shards and one to test on.
fn shards() -> TempDir {
    let folder = TempDir::new().unwrap();
    write(&folder.path().join("train-09.tar"), &samples(0, 24, 12));
    write(&folder.path().join("train-10.tar"), &samples(24, 48, 12));
    write(&folder.path().join("test.tar"), &samples(100, 103, 12));
    folder
}

#[test]
fn shards_are_read_in_order_with_their_classes() {
    let folder = shards();
    let at = |names: &str| names.replace("DIR", &folder.path().display().to_string());
    let data = load(&at("DIR/train-{09..10}.tar,DIR/test.tar")).unwrap();
    assert_eq!(data.classes, (0..12).map(|class| class.to_string()).collect::<Vec<_>>(), "in order of their values");
    assert_eq!((data.train.len(), data.test.labels()), (48, &[4, 5, 6][..]));
    assert!((0..48).all(|index| data.train.picture(index).unwrap()[0] == index as u8));
    assert!(data.train.labels().iter().enumerate().all(|(index, &label)| label as usize == index % 12));
    let named = load(&at("DIR/train-{09..10}.tar,DIR/train-09.tar,DIR/test.tar?size=3&label=json:label")).unwrap();
    assert_eq!((named.classes[2].as_str(), named.validation.unwrap().len(), named.shape.width), ("c10", 24, 3));
    // All shards of a folder, of which a part is held out.
    let all = load(&at("DIR")).unwrap();
    assert_eq!((all.train.len() + all.test.len(), all.test.len()), (51, 12));
}

#[test]
fn specifications_read_as_they_are_written() {
    for spec in ["a-{0..3}.tar", "a,b", "a,b,c?size=32&crop=1&label=json:class", "a?label=txt"] {
        let source: DataSpec = format!("webdataset:{spec}").parse().unwrap();
        assert_eq!(source.to_string(), format!("webdataset:{spec}"));
    }
    for (spec, part) in
        [("a,,b", "TRAIN,TEST"), ("a?label=png", "label=cls"), ("a?sizes=3", "size=PIXELS"), ("a?size=0", "4096")]
    {
        let message = format!("webdataset:{spec}").parse::<DataSpec>().unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    assert!(load("a-{3..1}.tar").unwrap_err().to_string().contains("`{FIRST..LAST}`"));
}

/// Loads `files` as the one shard `s.tar`.
#[track_caller]
fn refuse(files: &Files, settings: &str, parts: &[&str]) {
    let folder = TempDir::new().unwrap();
    let path = write(&folder.path().join("s.tar"), files);
    let message = match load(&format!("{}{settings}", path.display())) {
        Err(error @ (Error::Entry { .. } | Error::Empty { .. } | Error::Format { .. })) => error.to_string(),
        other => panic!("{parts:?}: {other:?}"),
    };
    assert!(message.contains("s.tar") && !message.contains('\n'), "{message}");
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

#[test]
fn damaged_shards_are_refused_by_name() {
    let with = |name: &str, bytes: &[u8]| {
        let mut files = samples(0, 8, 2);
        files.retain(|(other, _)| other != name);
        files.push((name.into(), bytes.to_vec()));
        files
    };
    let without =
        |name: &str| -> Files { samples(0, 8, 2).into_iter().filter(|(other, _)| !other.ends_with(name)).collect() };
    refuse(&vec![], "", &["without PNG, JPEG or WebP pictures", "leave it out"]);
    refuse(&without(".png"), "", &["without PNG, JPEG or WebP pictures"]);
    refuse(&without(".cls"), "", &["shard without classes", "?label="]);
    refuse(&without("003.cls"), "", &["`003.png` has no `003.cls`", "?label="]);
    refuse(&without("003.png"), "", &["`003.cls` has no PNG, JPEG or WebP picture"]);
    refuse(&with("003.jpg", &png(1)), "", &["`003.png` has the key `003` of another picture"]);
    refuse(&[samples(0, 8, 2), samples(0, 1, 2)].concat(), "", &["`000.png` occurs twice"]);
    refuse(&with("003.cls", b" "), "", &["`003.cls` says no class"]);
    refuse(&with("003.cls", &[0xff]), "", &["`003.cls` is not UTF-8"]);
    refuse(&with("003.json", b"{}"), "?label=json:label", &["`003.json` has no name or number `label`"]);
    refuse(&with("003.json", b"{"), "?label=json:label", &["`003.json` is not JSON"]);
    refuse(&with("003.png", b"none"), "", &["003.png` is neither PNG, JPEG nor WebP"]);
    let folder = TempDir::new().unwrap();
    let path = write(&folder.path().join("s.tar"), &samples(0, 8, 1));
    let message = load(&path.display().to_string()).unwrap_err().to_string();
    assert!(message.contains("one class only, `0`"), "{message}");
}

#[test]
fn classes_that_were_not_learnt_are_refused() {
    let folder = shards();
    write(&folder.path().join("few.tar"), &samples(0, 8, 4));
    let at = |name: &str| folder.path().join(name).display().to_string();
    let message = load(&format!("{},{}", at("few.tar"), at("test.tar"))).unwrap_err().to_string();
    assert!(["test.tar/100.png`", "class `4`"].iter().all(|part| message.contains(part)), "{message}");
    let message = load(&at("none-{0..1}.tar")).unwrap_err().to_string();
    assert!(message.contains("none-") && message.contains("not found"), "{message}");
    // Without its folders of classes it is no archive of pictures.
    let message = PictureSpec::parse(&format!("images:{}", at("few.tar"))).unwrap().load().unwrap_err().to_string();
    assert!(message.contains("webdataset:"), "{message}");
}
