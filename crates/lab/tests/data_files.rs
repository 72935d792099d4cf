//! idx and CIFAR-10 files: what is read, and what is refused with which message.

use std::{fs, io::Write, path::Path};

use flate2::{Compression, write::GzEncoder};
use resolvent_lab::data::{Error, PictureDataset, PictureShape, PictureSpec, Result};
use tempfile::TempDir;

fn load(spec: &str) -> Result<PictureDataset> {
    PictureSpec::parse(spec)?.load()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An idx file of bytes.
fn idx(extents: &[u32], bytes: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let header =
        [0, 0, 8, extents.len() as u8].into_iter().chain(extents.iter().flat_map(|extent| extent.to_be_bytes()));
    header.chain(bytes).collect()
}

/// A folder with four good files: 6 training and 4 test pictures of 3 rows and 2 columns.
fn mnist() -> TempDir {
    let folder = TempDir::new().unwrap();
    let write = |name: &str, bytes: Vec<u8>| fs::write(folder.path().join(name), bytes).unwrap();
    write("train-images-idx3-ubyte", idx(&[6, 3, 2], 0..36));
    write("train-labels-idx1-ubyte", idx(&[6], [3, 1, 4, 1, 5, 9]));
    write("t10k-images-idx3-ubyte.gz", gzip(&idx(&[4, 3, 2], 100..124)));
    write("t10k-labels-idx1-ubyte.gz", gzip(&idx(&[4], [0, 1, 2, 3])));
    folder
}

fn cifar() -> TempDir {
    let folder = TempDir::new().unwrap();
    let record = |label: u8| std::iter::once(label).chain((0..3072).map(move |at| (at % 251) as u8 ^ label));
    for batch in 1..=5 {
        let bytes: Vec<u8> = record(batch).chain(record(0)).collect();
        fs::write(folder.path().join(format!("data_batch_{batch}.bin")), bytes).unwrap();
    }
    fs::write(folder.path().join("test_batch.bin"), record(9).collect::<Vec<u8>>()).unwrap();
    folder
}

#[test]
fn idx_files_are_read_plain_and_compressed() {
    let folder = mnist();
    let data = load(&format!("mnist:{}", folder.path().display())).unwrap();
    assert_eq!(data.shape, PictureShape { channels: 1, height: 3, width: 2 });
    assert_eq!(data.train.labels(), [3, 1, 4, 1, 5, 9]);
    assert_eq!(data.train.picture(2).unwrap()[..], [12, 13, 14, 15, 16, 17]);
    assert_eq!(data.test.labels(), [0, 1, 2, 3]);
    assert_eq!(data.test.picture(3).unwrap()[..], [118, 119, 120, 121, 122, 123]);
    assert_eq!((data.classes.len(), data.classes[7].as_str()), (10, "7"));
    let garments = load(&format!("fashion-mnist:{}", folder.path().display())).unwrap();
    assert_eq!(garments.classes[9], "Ankle boot");
    assert_ne!(garments.fingerprint(), data.fingerprint(), "the classes differ");
}

#[test]
fn one_pair_of_idx_files_is_split() {
    let folder = TempDir::new().unwrap();
    let (pictures, labels) = (folder.path().join("p"), folder.path().join("l"));
    fs::write(&pictures, idx(&[20, 1, 1], 0..20)).unwrap();
    fs::write(&labels, idx(&[20], (0..20).map(|index| index % 2))).unwrap();
    let spec = format!("idx:{},{}", pictures.display(), labels.display());
    let data = load(&spec).unwrap();
    assert_eq!((data.train.len(), data.test.len(), data.classes.len()), (16, 4, 2));
    assert_eq!(data, load(&spec).unwrap());
}

#[test]
fn cifar_records_are_read() {
    let folder = cifar();
    let data = load(&format!("cifar10:{}", folder.path().display())).unwrap();
    assert_eq!(data.shape, PictureShape { channels: 3, height: 32, width: 32 });
    assert_eq!(data.train.labels(), [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]);
    assert_eq!((data.test.labels(), data.test.picture(0).unwrap()[5]), (&[9][..], 5 ^ 9));
    assert_eq!(data.classes[9], "truck");
}

/// Damages a copy of a good folder with `damage`, loads it, and expects a one-line message with every one of `parts`.
fn expect_refusal(kind: &str, folder: &TempDir, damage: impl FnOnce(&Path), parts: &[&str]) -> Error {
    damage(folder.path());
    let error = load(&format!("{kind}:{}", folder.path().display())).expect_err(parts[0]);
    let message = error.to_string();
    assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{message}");
    error
}

#[test]
fn damaged_idx_files_are_refused_by_name() {
    let pictures = "train-images-idx3-ubyte";
    let labels = "train-labels-idx1-ubyte";
    let refuse = |file: &str, bytes: Vec<u8>, parts: &[&str]| {
        let parts: Vec<&str> = [file].iter().chain(parts).copied().collect();
        expect_refusal("mnist", &mnist(), |folder| fs::write(folder.join(file), bytes).unwrap(), &parts)
    };
    let is_length = |error| assert!(matches!(error, Error::Length { .. }), "{error:?}");
    is_length(refuse(pictures, idx(&[6, 3, 2], 0..35), &["36 bytes", "35 found"]));
    is_length(refuse(pictures, idx(&[6, 3, 2], 0..37), &["36 bytes", "37 found"]));
    is_length(refuse(pictures, idx(&[u32::MAX, 1, 1], []), &["4294967295 bytes", "0 found"]));
    refuse(pictures, idx(&[u32::MAX; 3], []), &["more than any memory"]);
    refuse(pictures, vec![0, 0, 8], &["ends too early"]);
    refuse(pictures, Vec::new(), &["ends too early"]);
    refuse(pictures, idx(&[6], 0..6), &["starts with [00, 00, 08, 01]"]);
    refuse(pictures, vec![0, 0, 13, 3, 0, 0, 0, 0], &["starts with [00, 00, 0d, 03]"]);
    let error = refuse(pictures, idx(&[5, 3, 2], 0..30), &["5 pictures", labels, "6 labels"]);
    assert!(matches!(error, Error::Count { pictures: 5, labels: 6, .. }));
    let error = refuse(labels, idx(&[6], [0, 1, 2, 255, 4, 5]), &["label 255 at index 3", "0..10"]);
    assert!(matches!(error, Error::Label { index: 3, label: 255, classes: 10, .. }));
    let whole = gzip(&idx(&[4, 3, 2], 100..124));
    is_length(refuse("t10k-images-idx3-ubyte.gz", whole[..whole.len() - 12].to_vec(), &["24 bytes"]));
    let mut flipped = whole.clone();
    let last = flipped.len() - 6;
    flipped[last] ^= 1;
    refuse("t10k-images-idx3-ubyte.gz", flipped, &["is damaged"]);
    let turned = |folder: &Path| fs::write(folder.join("t10k-images-idx3-ubyte.gz"), idx(&[4, 2, 3], 0..24)).unwrap();
    expect_refusal("mnist", &mnist(), turned, &["training pictures are 3 x 2, test pictures 2 x 3"]);
}

#[test]
fn missing_idx_files_and_empty_ones_are_refused() {
    let remove = |folder: &Path| fs::remove_file(folder.join("train-labels-idx1-ubyte")).unwrap();
    let error = expect_refusal("mnist", &mnist(), remove, &["train-labels-idx1-ubyte", "four idx files"]);
    assert!(matches!(error, Error::Missing { .. }));
    let empty = |folder: &Path| {
        fs::write(folder.join("train-images-idx3-ubyte"), idx(&[0, 3, 2], [])).unwrap();
        fs::write(folder.join("train-labels-idx1-ubyte"), idx(&[0], [])).unwrap();
    };
    let error = expect_refusal("mnist", &mnist(), empty, &["train-images-idx3-ubyte", "no pictures"]);
    assert!(matches!(error, Error::Empty { .. }));
}

#[test]
fn damaged_cifar_files_are_refused_by_name() {
    let cut = |folder: &Path| fs::write(folder.join("data_batch_3.bin"), [1; 3072]).unwrap();
    let error = expect_refusal("cifar10", &cifar(), cut, &["data_batch_3.bin", "3073 bytes", "3072 found"]);
    assert!(matches!(error, Error::Length { .. }));
    let label = |folder: &Path| fs::write(folder.join("test_batch.bin"), [10; 3073]).unwrap();
    expect_refusal("cifar10", &cifar(), label, &["test_batch.bin", "label 10 at index 0", "0..10"]);
    let gone = |folder: &Path| fs::remove_file(folder.join("data_batch_5.bin")).unwrap();
    expect_refusal("cifar10", &cifar(), gone, &["data_batch_5.bin", "not found"]);
    let empty = |folder: &Path| fs::write(folder.join("data_batch_1.bin"), []).unwrap();
    expect_refusal("cifar10", &cifar(), empty, &["data_batch_1.bin", "no pictures"]);
}

#[test]
fn paths_of_the_wrong_kind_are_refused() {
    let folder = mnist();
    let path = folder.path().display();
    let file = folder.path().join("train-images-idx3-ubyte");
    let cases = [
        ("mnist:/no/such/folder".to_string(), "/no/such/folder: not found"),
        ("cifar10:/no/such/folder".to_string(), "/no/such/folder: not found"),
        ("images:/no/such/folder".to_string(), "/no/such/folder: not found"),
        (format!("mnist:{}", file.display()), "expected a folder"),
        (format!("cifar10:{}", file.display()), "expected a folder"),
        (format!("idx:{path},{path}"), "expected a file"),
    ];
    for (spec, part) in cases {
        let message = load(&spec).expect_err(&spec).to_string();
        assert!(message.contains(part), "{spec}: {message}");
    }
}

#[test]
fn malformed_specs_are_refused_before_reading() {
    let cases = [
        ("", "unknown kind ``"),
        ("imagenet:/data", "unknown kind `imagenet`"),
        ("mnist", "a path must follow"),
        ("fashion-mnist:", "a path must follow"),
        ("idx:pictures", "idx:IMAGES,LABELS"),
        ("images:photos.zip?size=0", "1 to 4096"),
        ("images:photos.zip?side=3", "data `images` has no setting `side`"),
        ("shapes:size=8", "setting `size` is 8"),
        ("shapes:difficulty=2", "setting `difficulty` is 2"),
        ("shapes:difficulty=NaN", "setting `difficulty` is NaN"),
        ("shapes:train=0", "setting `train` is 0"),
        ("shapes:test=99999999999999", "setting `test`"),
        ("shapes:train=many", "setting `train` is `many`"),
        ("shapes:hardness=1", "data `shapes` has no setting `hardness`, but one of `seed`"),
    ];
    for (spec, part) in cases {
        let message = PictureSpec::parse(spec).expect_err(spec).to_string();
        assert!(message.contains(part), "{spec}: {message}");
    }
}

#[test]
fn specs_print_as_they_parse() {
    let specs = [
        "shapes:seed=1,size=48,train=10,test=5,difficulty=0.25",
        "mnist:/a/b",
        "fashion-mnist:c",
        "idx:p,l",
        "cifar10:/d e",
        "images:x.tar.gz",
        "images:x.zip?size=64",
    ];
    for spec in specs {
        assert_eq!(PictureSpec::parse(spec).unwrap().to_string(), spec);
    }
    assert_eq!(PictureSpec::parse("shapes").unwrap(), PictureSpec::parse("shapes:seed=0").unwrap());
}
