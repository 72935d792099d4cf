//! Pictures that are decoded when they are needed: from the original, the same whatever threads decode, within the budget.

use std::{
    fs,
    io::Cursor,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use image::{DynamicImage, ImageFormat, Rgb, RgbImage};
use resolvent_lab::{
    Recipe,
    augment::{Augment, ResizedCrop, Transform},
    budget,
    data::{BatchPlan, Error, PictureBatch, PictureDataset, PictureLoader, PictureShape, PictureSpec},
    device::Device,
    train::{self, Resume, TrainOptions},
};
use support::{finished, stopping};
use tempfile::TempDir;

mod support;

/// Sets the budget, which is the process's: one test at a time. With little of it, nothing stays decoded.
fn limited(bytes: u64) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    budget::set_limit(bytes);
    turn
}

/// Of 40 pictures of 64 x 48 an eighth of this holds 29.
const TIGHT: u64 = 2 << 20;
const AMPLE: u64 = 1 << 30;

fn encode(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

/// A picture whose left and right halves, or upper and lower, differ in brightness by what `class` says.
fn picture(height: u32, width: u32, class: u32, index: u32) -> DynamicImage {
    let shade = |x: u32, y: u32| if (if class == 0 { 2 * x / width } else { 2 * y / height }) == 0 { 30 } else { 200 };
    RgbImage::from_fn(width, height, |x, y| Rgb([shade(x, y), (index * 5) as u8, (x + y) as u8])).into()
}

/// `train` and `test` with two classes, all pictures of 64 x 48.
fn folder(format: ImageFormat) -> TempDir {
    let root = TempDir::new().unwrap();
    for (part, count) in [("train", 16), ("test", 4)] {
        for class in 0..2 {
            let folder = root.path().join(part).join(["across", "down"][class as usize]);
            fs::create_dir_all(&folder).unwrap();
            for index in 0..count {
                let name = format!("{index}.{}", format.extensions_str()[0]);
                fs::write(folder.join(name), encode(&picture(48, 64, class, index), format)).unwrap();
            }
        }
    }
    root
}

fn load(path: &Path, settings: &str) -> Result<PictureDataset, Error> {
    PictureSpec::parse(&format!("images:{}{settings}", path.display()))?.load()
}

/// The batches of an epoch, everything augmented, decoded by so many threads.
fn batches(data: &PictureDataset, threads: usize, first: usize) -> Vec<PictureBatch> {
    let augment = Augment { padding: 2, ..Augment::deit() };
    let transform = Transform::new(data.shape, data.train.channel_stats().unwrap(), augment).unwrap();
    let loader = PictureLoader::new(Arc::new(data.train.clone()), transform, BatchPlan::training(5, 3), 2);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| loader.epoch(1, first)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn batches_depend_on_neither_threads_nor_cache_nor_container() {
    let root = folder(ImageFormat::Jpeg);
    let turn = limited(AMPLE);
    let whole = batches(&load(root.path(), "?size=24").unwrap(), 1, 0);
    assert_eq!(whole.len(), 6);
    drop(turn);
    let _turn = limited(TIGHT);
    let data = load(root.path(), "?size=24").unwrap();
    assert_eq!(batches(&data, 4, 0), whole, "decoded over and over by four threads");
    assert_eq!(batches(&data, 2, 4), whole[4..], "from the fifth batch on");
    assert_eq!(budget::used(), 0, "what was decoded is given back");
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_dir_all("", root.path()).unwrap();
    let bytes = archive.into_inner().unwrap();
    let file = root.path().join("set");
    for (name, bytes) in [("tar", bytes.clone()), ("zip", zip(root.path())), ("tar.zst", zstd(&bytes))] {
        let file = file.with_extension(name);
        fs::write(&file, bytes).unwrap();
        assert_eq!(batches(&load(&file, "?size=24").unwrap(), 2, 0), whole, "{name}");
        fs::remove_file(file).unwrap();
    }
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

/// Every other file compressed.
fn zip(root: &Path) -> Vec<u8> {
    use std::io::Write;
    use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for part in ["train", "test"] {
        for class in ["across", "down"] {
            for (index, file) in fs::read_dir(root.join(part).join(class)).unwrap().enumerate() {
                let file = file.unwrap().path();
                let method = [CompressionMethod::Stored, CompressionMethod::Deflated][index % 2];
                let name = format!("{part}/{class}/{}", file.file_name().unwrap().display());
                archive.start_file(name, SimpleFileOptions::default().compression_method(method)).unwrap();
                archive.write_all(&fs::read(file).unwrap()).unwrap();
            }
        }
    }
    archive.finish().unwrap().into_inner()
}

/// Resized to 8 pixels first, the stripes of one pixel would be gone.
#[test]
fn crops_are_taken_from_the_original() {
    let _turn = limited(AMPLE);
    let root = TempDir::new().unwrap();
    for class in ["a", "b"] {
        fs::create_dir(root.path().join(class)).unwrap();
        for index in 0..3 {
            let stripes = RgbImage::from_fn(128, 128, |x, _| Rgb([255 * (x % 2) as u8; 3]));
            fs::write(root.path().join(class).join(format!("{index}.png")), encode(&stripes.into(), ImageFormat::Png))
                .unwrap();
        }
    }
    let data = load(root.path(), "?size=8").unwrap();
    let seen = data.test.picture(0).unwrap();
    assert!(seen.iter().all(|&value| (96..160).contains(&value)), "grey from afar: {seen:?}");
    let crop = ResizedCrop { area: [0.0039, 0.004], ratio: [1.0, 1.0], ..Default::default() };
    let stats = data.train.channel_stats().unwrap();
    let transform =
        Transform::new(data.shape, stats, Augment { resized_crop: Some(crop), ..Default::default() }).unwrap();
    let loader = PictureLoader::new(Arc::new(data.train), transform, BatchPlan::training(4, 0), 2);
    let batch = loader.epoch(0, 0).unwrap().next().unwrap().unwrap();
    let (least, most) = batch.pixels.iter().fold((f32::MAX, f32::MIN), |(l, m), &x| (l.min(x), m.max(x)));
    assert!(most - least > 5.0, "black and white from near, in standard deviations: {least} to {most}");
}

/// 224 of 256 pixels are what is usually seen of photographs; here 28 of 32, which are not resized.
#[test]
fn testing_sees_the_centre() {
    let _turn = limited(AMPLE);
    let root = TempDir::new().unwrap();
    let framed = |x: u32, y: u32| (2..30).contains(&x) && (2..30).contains(&y);
    let whole =
        RgbImage::from_fn(32, 32, |x, y| Rgb(if framed(x, y) { [x as u8 * 4, y as u8 * 4, 9] } else { [255; 3] }));
    for (class, index) in [("a", 0), ("a", 1), ("b", 0), ("b", 1)] {
        fs::create_dir_all(root.path().join(class)).unwrap();
        let name = format!("{class}/{index}.png");
        fs::write(root.path().join(name), encode(&whole.clone().into(), ImageFormat::Png)).unwrap();
    }
    let data = load(root.path(), "?size=28").unwrap();
    assert_eq!(data.shape, PictureShape { channels: 3, height: 28, width: 28 });
    let seen = data.test.picture(0).unwrap();
    let expected: Vec<u8> = (0..28).flat_map(|_| (2..30).map(|x| 4 * x)).collect();
    assert_eq!(seen[..28 * 28], expected);
    let all = load(root.path(), "?size=28&crop=1").unwrap();
    assert!(all.test.picture(0).unwrap()[..28].iter().all(|&value| value > 200), "the frame is seen");
    assert_ne!(all.fingerprint(), data.fingerprint());
    let same = load(root.path(), "?size=32").unwrap();
    assert_eq!(same.test.picture(0).unwrap()[..32], [255; 32], "of the size already");
    assert!(load(root.path(), "?crop=0").unwrap_err().to_string().contains("crop"));
}

/// JPEG bytes with the EXIF orientation `value`.
fn oriented(jpeg: &[u8], value: u8) -> Vec<u8> {
    let exif = [&b"Exif\0\0MM\0*\0\0\0\x08"[..], &[0, 1, 0x01, 0x12, 0, 3, 0, 0, 0, 1, 0, value, 0, 0], &[0, 0, 0, 0]]
        .concat();
    let length = (exif.len() as u16 + 2).to_be_bytes();
    [&jpeg[..2], &[0xff, 0xe1], &length, &exif, &jpeg[2..]].concat()
}

#[test]
fn a_noted_orientation_is_applied() {
    let _turn = limited(AMPLE);
    // Red above, blue below, in a camera that lies on its side.
    let taken = RgbImage::from_fn(32, 16, |x, _| if x < 16 { Rgb([255, 0, 0]) } else { Rgb([0, 0, 255]) });
    let jpeg = encode(&taken.into(), ImageFormat::Jpeg);
    let root = TempDir::new().unwrap();
    for (class, index) in [("a", 0), ("a", 1), ("b", 0), ("b", 1)] {
        fs::create_dir_all(root.path().join(class)).unwrap();
        fs::write(root.path().join(format!("{class}/{index}.jpg")), oriented(&jpeg, 6)).unwrap();
    }
    for settings in ["", "?size=16&crop=1"] {
        let data = load(root.path(), settings).unwrap();
        let height = if settings.is_empty() { 32 } else { 16 };
        assert_eq!(data.shape, PictureShape { channels: 3, height, width: 16 });
        let picture = data.test.picture(0).unwrap();
        let red = &picture[..height * 16];
        assert!(red[..16].iter().all(|&value| value > 240) && red[red.len() - 16..].iter().all(|&value| value < 15));
    }
}

fn recipe() -> Recipe {
    Recipe::from_toml(
        "seed = 4\n[model]\npatch = 8\ndim = 16\ndepth = 1\nheads = 2\nmlp_dim = 32\n\
         [schedule]\nepochs = 3\nbatch_size = 8\nwarmup_epochs = 0\n[augment]\nflip = 0.5\n[augment.resized_crop]\narea = [0.5, 1.0]",
        "test",
    )
    .unwrap()
}

/// Three epochs at once, and with an interruption in the second of them.
#[test]
fn a_run_is_resumed_to_the_same_bits() {
    let _turn = limited(8 * TIGHT);
    let (root, runs) = (folder(ImageFormat::Png), TempDir::new().unwrap());
    let data = load(root.path(), "?size=16").unwrap();
    let whole = runs.path().join("whole");
    let summary = finished(train::run(&recipe(), &data, &TrainOptions::new(&whole)).unwrap());
    let parts = runs.path().join("parts");
    train::run(&recipe(), &data, &stopping(&parts, 6, Resume::Never)).unwrap();
    // Loaded anew, by another number of threads.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&parts) };
    let resumed = pool.install(|| train::run(&recipe(), &load(root.path(), "?size=16").unwrap(), &options).unwrap());
    let resumed = finished(resumed);
    assert_eq!((resumed.test.confusion, resumed.test.loss), (summary.test.confusion, summary.test.loss));
}

/// What is damaged behind its header is seen when it is decoded: at loading where few are, else in the step that needs it.
#[test]
fn a_broken_picture_is_named_when_it_is_met() {
    let root = folder(ImageFormat::Jpeg);
    let file = root.path().join("train/down/7.jpg");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 40]).unwrap();
    let named = |message: String| {
        assert!(
            ["`train/down/7.jpg`", "cannot be decoded", "replace or remove"].iter().all(|part| message.contains(part)),
            "{message}"
        );
    };
    let turn = limited(AMPLE);
    named(load(root.path(), "?size=16").unwrap_err().to_string());
    drop(turn);
    let (_turn, runs) = (limited(TIGHT / 4), TempDir::new().unwrap());
    // Statistics are of all pictures here: the first to meet it.
    let data = load(root.path(), "?size=16").unwrap();
    named(train::run(&recipe(), &data, &TrainOptions::new(runs.path())).unwrap_err().to_string());
    fs::write(&file, [&bytes[..], b"more"].concat()).unwrap();
    let message = data.train.picture(29).unwrap_err().to_string();
    assert!(message.contains("`train/down/7.jpg`") && message.contains("load the data again"), "{message}");
}

/// 200,000 files of 500 x 375 would be 112 GB decoded. Small ones take the same ways.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "writes 200,000 files and takes minutes"]
fn memory_does_not_grow_with_the_files() {
    const FILES: usize = 200_000;
    let _turn = limited(AMPLE);
    let root = TempDir::new().unwrap();
    let pictures: Vec<Vec<u8>> =
        (0..64).map(|index| encode(&picture(96, 128, index % 2, index), ImageFormat::Jpeg)).collect();
    for class in 0..100 {
        let folder = root.path().join(format!("train/{class:03}"));
        fs::create_dir_all(&folder).unwrap();
        for index in 0..FILES / 100 {
            fs::write(folder.join(format!("{index}.jpg")), &pictures[(class + index) % 64]).unwrap();
        }
    }
    let began = std::time::Instant::now();
    let data = load(root.path(), "?size=224").unwrap();
    let loaded = began.elapsed();
    assert_eq!(data.train.len() + data.test.len(), FILES);
    let stats = data.train.channel_stats().unwrap();
    let transform = Transform::new(data.shape, stats, Augment::deit()).unwrap();
    let loader = PictureLoader::new(Arc::new(data.train), transform, BatchPlan::training(128, 0), 100);
    let began = std::time::Instant::now();
    let seen: usize = loader.epoch(0, 0).unwrap().take(60).map(|batch| batch.unwrap().len()).sum();
    let speed = seen as f64 / began.elapsed().as_secs_f64();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    let kibibytes: usize = peak.split(' ').next().unwrap().parse().unwrap();
    println!(
        "{FILES} files found in {loaded:.1?}, {speed:.0} pictures/s augmented at 224 pixels, at most {peak} resident"
    );
    assert!(kibibytes < 2 << 20, "{peak}");
}

/// A step of ViT-Ti at 224 pixels, and how fast two threads decode photographs of 500 x 375 for it, everything augmented.
#[test]
#[ignore = "measures, and takes a minute"]
fn two_threads_feed_a_small_transformer() {
    let _turn = limited(AMPLE);
    let root = TempDir::new().unwrap();
    // As much detail as a photograph of a hundred kilobytes.
    let noise = |x: u32, y: u32, index: u32| (x * 7919 + y * 104_729 + index * 31) % 97;
    for index in 0..128 {
        let folder = root.path().join(["a", "b"][index as usize % 2]);
        fs::create_dir_all(&folder).unwrap();
        let photograph = RgbImage::from_fn(500, 375, |x, y| {
            let wave = ((f64::from(x) / 20.0).sin() + (f64::from(y) / 15.0).cos()) * 40.0 + 128.0;
            Rgb([0, 1, 2].map(|channel| (wave as u32 + noise(x, y, index) / (2 + channel)) as u8))
        });
        fs::write(folder.join(format!("{index}.jpg")), encode(&photograph.into(), ImageFormat::Jpeg)).unwrap();
    }
    let bytes = fs::metadata(root.path().join("a/0.jpg")).unwrap().len();
    budget::set_limit(64 << 20);
    let data = load(root.path(), "?size=224").unwrap();
    let stats = data.train.channel_stats().unwrap();
    let transform = Transform::new(data.shape, stats, Augment::deit()).unwrap();
    let loader = PictureLoader::new(Arc::new(data.train.clone()), transform, BatchPlan::training(16, 0), 2);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let began = std::time::Instant::now();
    let seen: usize = pool.install(|| (0..4).map(|epoch| loader.epoch(epoch, 0).unwrap().count() * 16).sum());
    let decoded = seen as f64 / began.elapsed().as_secs_f64();
    let recipe = Recipe::from_toml(
        "[model]\npatch = 16\ndim = 192\ndepth = 12\nheads = 3\nmlp_dim = 768\n[schedule]\nepochs = 2\nbatch_size = 16",
        "test",
    )
    .unwrap();
    let seconds = pool.install(|| train::seconds_per_step(&recipe, &data, &Device::flex()).unwrap());
    let learnt = 16.0 / seconds;
    println!(
        "{bytes} bytes a picture: {decoded:.0} pictures/s decoded and augmented, {learnt:.1} pictures/s learnt from"
    );
    assert!(decoded > learnt);
}
