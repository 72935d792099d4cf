//! The real files, where the environment variable `RESOLVENT_DATA` names a folder that holds them.

use std::{env, path::PathBuf};

use resolvent_lab::data::{DataSpec, Dataset, PictureShape};

/// The data set at `path` below the folder, or None, said loudly.
fn load(kind: &str, path: &str) -> Option<Dataset> {
    let found = env::var_os("RESOLVENT_DATA").map(|root| PathBuf::from(root).join(path)).filter(|path| path.exists());
    let Some(found) = found else {
        eprintln!("SKIPPED: set RESOLVENT_DATA to a folder that holds {path}");
        return None;
    };
    Some(DataSpec::parse(&format!("{kind}:{}", found.display())).unwrap().load().unwrap())
}

fn counts(data: &Dataset) -> Vec<usize> {
    let mut counts = vec![0; data.classes.len()];
    data.train.labels().iter().for_each(|&label| counts[label as usize] += 1);
    counts
}

#[test]
fn fashion_mnist() {
    let Some(data) = load("fashion-mnist", "fashion-mnist") else { return };
    assert_eq!((data.train.len(), data.test.len()), (60_000, 10_000));
    assert_eq!(data.train.labels()[..10], [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]);
    assert_eq!(counts(&data), [6000; 10]);
    let stats = data.train.channel_stats();
    assert!((stats.mean[0] - 0.2860).abs() < 1e-4 && (stats.std[0] - 0.3530).abs() < 1e-4, "{stats:?}");
}

#[test]
fn mnist() {
    let Some(data) = load("mnist", "mnist") else { return };
    assert_eq!((data.train.len(), data.test.len()), (60_000, 10_000));
    assert_eq!(counts(&data), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]);
    let stats = data.train.channel_stats();
    assert!((stats.mean[0] - 0.1307).abs() < 1e-4 && (stats.std[0] - 0.3081).abs() < 1e-4, "{stats:?}");
}

#[test]
fn cifar10_as_a_compressed_archive_of_pictures() {
    let Some(data) = load("images", "cifar10/cifar10-jpeg.tar.xz") else { return };
    assert_eq!((data.train.len(), data.test.len()), (50_000, 10_000));
    assert_eq!(data.shape, PictureShape { channels: 3, height: 32, width: 32 });
    assert_eq!((data.classes[0].as_str(), counts(&data)), ("airplane", vec![5000; 10]));
    let stats = data.train.channel_stats();
    for (mean, expected) in stats.mean.iter().zip([0.4914, 0.4822, 0.4465]) {
        assert!((mean - expected).abs() < 2e-3, "{stats:?}, JPEG may shift the known means a little");
    }
}
