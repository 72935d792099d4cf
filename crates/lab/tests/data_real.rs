//! The real files, in the folder that the environment variable `RESOLVENT_DATA` names. Without them there is nothing to
//! test, so that these tests run only when they are asked for, with `--ignored`.

use std::{env, path::PathBuf};

use resolvent_lab::data::{Data, DataSpec, PictureDataset, PictureShape, PictureSpec};

/// `KIND:PATH` of what lies at `path` below the folder.
fn spec(kind: &str, path: &str) -> String {
    let found = env::var_os("RESOLVENT_DATA").map(|root| PathBuf::from(root).join(path)).filter(|path| path.exists());
    let Some(found) = found else { panic!("set RESOLVENT_DATA to a folder that holds {path}") };
    format!("{kind}:{}", found.display())
}

/// The pictures at `path` below the folder.
fn load(kind: &str, path: &str) -> PictureDataset {
    PictureSpec::parse(&spec(kind, path)).unwrap().load().unwrap()
}

fn counts(data: &PictureDataset) -> Vec<usize> {
    let mut counts = vec![0; data.classes.len()];
    data.train.labels().iter().for_each(|&label| counts[label as usize] += 1);
    counts
}

#[test]
#[ignore = "needs RESOLVENT_DATA, a folder that holds fashion-mnist"]
fn fashion_mnist() {
    let data = load("fashion-mnist", "fashion-mnist");
    assert_eq!((data.train.len(), data.test.len()), (60_000, 10_000));
    assert_eq!(data.train.labels()[..10], [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]);
    assert_eq!(counts(&data), [6000; 10]);
    let stats = data.train.channel_stats().unwrap();
    assert!((stats.mean[0] - 0.2860).abs() < 1e-4 && (stats.std[0] - 0.3530).abs() < 1e-4, "{stats:?}");
}

#[test]
#[ignore = "needs RESOLVENT_DATA, a folder that holds mnist"]
fn mnist() {
    let data = load("mnist", "mnist");
    assert_eq!((data.train.len(), data.test.len()), (60_000, 10_000));
    assert_eq!(counts(&data), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]);
    let stats = data.train.channel_stats().unwrap();
    assert!((stats.mean[0] - 0.1307).abs() < 1e-4 && (stats.std[0] - 0.3081).abs() < 1e-4, "{stats:?}");
}

#[test]
#[ignore = "needs RESOLVENT_DATA, a folder that holds cifar10"]
fn cifar10_as_a_compressed_archive_of_pictures() {
    let data = load("images", "cifar10/cifar10-jpeg.tar.xz");
    assert_eq!((data.train.len(), data.test.len()), (50_000, 10_000));
    assert_eq!(data.shape, PictureShape { channels: 3, height: 32, width: 32 });
    assert_eq!((data.classes[0].as_str(), counts(&data)), ("airplane", vec![5000; 10]));
    let stats = data.train.channel_stats().unwrap();
    for (mean, expected) in stats.mean.iter().zip([0.4914, 0.4822, 0.4465]) {
        assert!((mean - expected).abs() < 2e-3, "{stats:?}, JPEG may shift the known means a little");
    }
}

#[test]
#[ignore = "needs RESOLVENT_DATA, a folder that holds imdb"]
fn imdb() {
    let spec = spec("imdb", "imdb");
    let Data::Texts(data) = spec.parse::<DataSpec>().unwrap().load().unwrap() else { panic!("texts") };
    assert_eq!(data.classes, ["negative", "positive"]);
    for split in [&data.train, &data.test] {
        assert_eq!((split.len(), split.labels.iter().sum::<u32>()), (25_000, 12_500));
        assert!(!split.texts[0].iter().any(|text| text.contains("<br />")));
    }
    assert!(data.train.texts[0].iter().any(|text| text.contains('\u{85}')), "only line feeds end a line");
}

#[test]
#[ignore = "needs RESOLVENT_DATA, a folder that holds multi30k"]
fn multi30k() {
    let spec = spec("multi30k", "multi30k");
    let Data::Pairs(data) = spec.parse::<DataSpec>().unwrap().load().unwrap() else { panic!("pairs") };
    assert_eq!((data.train.len(), data.validation.unwrap().len(), data.test.len()), (29_000, 1_014, 1_000));
    assert_eq!(data.test.source[0], "A man in an orange hat starring at something.");
    assert_eq!(data.test.target[0], "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.");
}
