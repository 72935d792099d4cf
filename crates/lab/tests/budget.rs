//! One budget for everything that is decoded: files that would take more are refused by name, and threads share what there is.

mod support;

use std::{
    fs,
    io::{Cursor, Write},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use burn::{
    nn::{Linear, LinearConfig},
    tensor::Device,
};
use flate2::{Compression, write::GzEncoder};
use peak_alloc::PeakAlloc;
use rayon::prelude::*;
use resolvent_lab::{
    budget,
    checkpoint::parts,
    data::{DataSpec, Error, PictureSpec},
    source,
};
use tempfile::TempDir;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const MIB: usize = 1 << 20;

/// Sets the budget, which is the process's: one test at a time. All of it must be given back.
struct Limited(#[allow(dead_code, reason = "held for its lock")] MutexGuard<'static, ()>);

impl Limited {
    fn to(mebibytes: usize) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        budget::set_limit((mebibytes * MIB) as u64);
        MEMORY.reset_peak_usage();
        Self(turn)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(budget::used(), 0, "bytes that nobody gave back");
        }
    }
}

fn load(spec: &str) -> Result<(), Error> {
    spec.parse::<DataSpec>()?.load().map(drop)
}

/// Loads `spec` and expects it to be refused for its size, naming `file`.
#[track_caller]
fn refuse(spec: &str, file: &Path) {
    let error = load(spec).expect_err(spec);
    assert!(matches!(&error, Error::Budget { path, .. } if path.starts_with(file)), "{spec}: {error}");
    let message = error.to_string();
    assert!(message.contains("--decode-limit") && !message.contains('\n'), "{message}");
}

fn png(side: u32) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image::RgbImage::new(side, side).write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut options = lzma_rust2::XzOptions::default();
    options.lzma_options.dict_size = 1 << 16;
    let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

/// A folder of pictures of `side` pixels, `count` in each of two classes.
fn pictures(side: u32, count: usize) -> TempDir {
    let (folder, bytes) = (TempDir::new().unwrap(), png(side));
    for class in ["a", "b"] {
        fs::create_dir(folder.path().join(class)).unwrap();
        (0..count).for_each(|i| fs::write(folder.path().join(class).join(format!("{i}.png")), &bytes).unwrap());
    }
    folder
}

/// Each of eight pictures takes 13 MiB when it is decoded and resized: threads that all decode one wait for each other.
#[test]
fn threads_share_the_budget_of_pictures() {
    let limited = Limited::to(30);
    let folder = pictures(1400, 4);
    let spec = format!("images:{}?size=8", folder.path().display());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(8).build().unwrap();
    let before = MEMORY.current_usage();
    let data = PictureSpec::parse(&spec).unwrap().load().unwrap();
    pool.install(|| (0..data.train.len()).into_par_iter().for_each(|index| drop(data.train.picture(index).unwrap())));
    let peak = MEMORY.peak_usage() - before;
    assert!(peak < 34 * MIB, "{} MiB", peak / MIB);
    drop(limited);
    let _limited = Limited::to(8);
    refuse(&spec, folder.path());
}

/// What is decoded stays until the set is whole, and is then there twice.
#[test]
fn pictures_that_fit_one_by_one_may_not_fit_together() {
    let folder = pictures(700, 8);
    let spec = format!("images:{}", folder.path().display());
    {
        let _limited = Limited::to(24);
        refuse(&spec, folder.path());
    }
    let _limited = Limited::to(64);
    load(&spec).unwrap();
}

#[test]
fn a_picture_says_what_it_takes_before_it_is_decoded() {
    let _limited = Limited::to(256);
    let folder = pictures(4, 2);
    // The header of a picture of 2^31 - 1 pixels each way, with its checksum.
    let mut bytes = png(4);
    bytes[16..24].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]);
    let check = crc32fast::hash(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&check.to_be_bytes());
    let before = MEMORY.current_usage();
    fs::write(folder.path().join("a/9.png"), bytes).unwrap();
    let message = load(&format!("images:{}", folder.path().display())).unwrap_err().to_string();
    assert!(message.contains("9.png"), "{message}");
    assert!(MEMORY.peak_usage() - before < 64 * MIB, "{} MiB", MEMORY.peak_usage() / MIB);
}

#[test]
fn compressed_texts_have_a_limit() {
    let _limited = Limited::to(8);
    let folder = TempDir::new().unwrap();
    let text = b"a word and another\n".repeat(1 << 20);
    for (ending, bytes) in [("gz", gzip(&text)), ("xz", xz(&text)), ("zst", zstd(&text)), ("plain", text)] {
        let path = folder.path().join(format!("text.{ending}"));
        fs::write(&path, bytes).unwrap();
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        refuse(&format!("corpus:{}", path.display()), &path);
        let peak = MEMORY.peak_usage() - before;
        assert!(peak < UNPACKER, "{ending}: {} KiB before it is refused", peak >> 10);
    }
}

/// What a decoder takes for itself: of zstd the window of its format, of the files written here at most 512 KiB, and buffers.
const UNPACKER: usize = 2 * MIB;

/// Files that take most of the budget are allocated once, and are not moved while they grow.
#[test]
fn what_is_unpacked_stays_within_the_limit() {
    let limited = Limited::to(8);
    let folder = TempDir::new().unwrap();
    let text: Vec<u8> = (0..7 * MIB / 16).flat_map(|n| format!("line {n:>9} \n").into_bytes()).collect();
    let most = 8 * MIB + UNPACKER;
    for (ending, bytes) in [("gz", gzip(&text)), ("xz", xz(&text)), ("zst", zstd(&text)), ("plain", text.clone())] {
        let path = folder.path().join(format!("text.{ending}"));
        fs::write(&path, bytes).unwrap();
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let held = budget::Held::new();
        assert!(source::unpack(&path, &held).unwrap() == text, "{ending}");
        let peak = MEMORY.peak_usage() - before;
        assert!((7 * MIB..most).contains(&peak), "{ending}: {} KiB", peak >> 10);
    }
    drop(limited);
    // Pictures, whose number the header tells: 7 MiB of them, and as many labels.
    let _limited = Limited::to(8);
    let count = 7 * MIB / 784;
    let idx = |count: usize, extents: &[u32], bytes: usize| {
        let extents = [count as u32].into_iter().chain(extents.iter().copied()).flat_map(u32::to_be_bytes);
        [vec![0, 0, 8, 1 + extents.clone().count() as u8 / 4 - 1], extents.collect(), vec![3; count * bytes]].concat()
    };
    for (part, count) in [("train", count), ("t10k", 10)] {
        let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(format!("{part}-{name}.gz")), gzip(bytes));
        write("images-idx3-ubyte", &idx(count, &[28, 28], 784)).unwrap();
        write("labels-idx1-ubyte", &idx(count, &[], 1)).unwrap();
    }
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    load(&format!("mnist:{}", folder.path().display())).unwrap();
    let peak = MEMORY.peak_usage() - before;
    assert!((7 * MIB..most).contains(&peak), "{} KiB", peak >> 10);
}

/// Tables of codes count by the bytes that describe them, which are few where a picture is plain.
#[test]
fn webp_pictures_take_no_more_than_they_ask_for() {
    let folder = TempDir::new().unwrap();
    let mut bytes = Cursor::new(Vec::new());
    let picture =
        image::RgbImage::from_fn(1400, 1400, |x, y| image::Rgb([(x / 9) as u8, (y / 7) as u8, (x + y) as u8]));
    picture.write_to(&mut bytes, image::ImageFormat::WebP).unwrap();
    for class in ["a", "b"] {
        fs::create_dir(folder.path().join(class)).unwrap();
        (0..2).for_each(|i| fs::write(folder.path().join(class).join(format!("{i}.webp")), bytes.get_ref()).unwrap());
    }
    let spec = format!("images:{}?size=8", folder.path().display());
    let mut loaded = 0;
    for mebibytes in [8, 32, 128, 512] {
        let _limited = Limited::to(mebibytes);
        let before = MEMORY.current_usage();
        let outcome = PictureSpec::parse(&spec).unwrap().load();
        let pictures = outcome.and_then(|data| (0..data.train.len()).try_for_each(|i| data.train.picture(i).map(drop)));
        let peak = MEMORY.peak_usage() - before;
        assert!(peak < (mebibytes + 4) * MIB, "{} MiB of {mebibytes}", peak / MIB);
        match pictures {
            Ok(()) => loaded += 1,
            Err(error) => assert!(matches!(error, Error::Budget { .. }), "{error}"),
        }
    }
    assert!((1..4).contains(&loaded), "{loaded} limits are enough for {} bytes", bytes.get_ref().len());
}

/// A list of short lines takes many times their bytes.
#[test]
fn short_lines_count_as_what_they_take() {
    let _limited = Limited::to(24);
    let folder = TempDir::new().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        fs::write(folder.path().join(name), bytes).unwrap();
        folder.path().join(name)
    };
    let path = write("a", &b"a\n".repeat(MIB));
    refuse(&format!("pairs:{0},{0}", path.display()), &path);
    let path = write("t.csv", &[b"text,label\n".to_vec(), b"a,b\nb,c\n".repeat(MIB / 8)].concat());
    refuse(&format!("text:{}", path.display()), &path);
    let path = write("t.jsonl", &b"{\"text\":\"a\",\"label\":1}\n".repeat(MIB / 4));
    refuse(&format!("text:{}", path.display()), &path);
    let wide = format!("{{\"text\":\"a\",\"label\":1,\"more\":[{}1]}}\n", "1,".repeat(MIB / 2));
    let path = write("w.jsonl", wide.as_bytes());
    refuse(&format!("text:{}", path.display()), &path);
}

/// A tar archive may say of one file as much as it likes.
#[test]
fn long_headers_of_archives_have_a_limit() {
    let _limited = Limited::to(32);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.tar.gz");
    for kind in [tar::EntryType::GNULongName, tar::EntryType::XHeader] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(48 * MIB as u64);
        header.set_cksum();
        let mut archive = tar::Builder::new(Vec::new());
        archive.append(&header, &vec![b'a'; 48 * MIB][..]).unwrap();
        fs::write(&path, gzip(&archive.into_inner().unwrap())).unwrap();
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let message = load(&format!("images:{}", path.display())).unwrap_err().to_string();
        assert!(message.contains("a.tar.gz") && message.contains("1 MiB"), "{message}");
        assert!(MEMORY.peak_usage() - before < 8 * MIB, "{} MiB", MEMORY.peak_usage() / MIB);
    }
}

/// Of two frames, as `pzstd` and `cat` write them, the first alone was read.
#[test]
fn zstd_files_are_read_to_their_end_and_checked() {
    let _limited = Limited::to(8);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("text.zst");
    let spec = format!("corpus:{}", path.display());
    let (one, other) = (zstd(&b"one line\n".repeat(99)), zstd(&b"another\n".repeat(99)));
    fs::write(&path, [one, other].concat()).unwrap();
    let resolvent_lab::data::Data::Corpus(corpus) = spec.parse::<DataSpec>().unwrap().load().unwrap() else { panic!() };
    assert_eq!(corpus.train.len() + corpus.validation.len() + corpus.test.len(), 99 * 17);
    let text: Vec<u8> = (0..999).map(|i| b"abcdefgh\n"[i * i % 9]).collect();
    let mut bytes = zstd(&text);
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(load(&spec).unwrap_err().to_string().contains("checksum"));
}

/// A pipe where a file is expected is refused by name; nothing waits for its writer.
#[cfg(unix)]
#[test]
fn pipes_are_no_files() {
    let _limited = Limited::to(8);
    let folder = TempDir::new().unwrap();
    let pipe = |name: &str| -> PathBuf {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    };
    let names =
        ["p/a/x.png", "m/train-images-idx3-ubyte", "c/data_batch_1.bin", "t/train.csv", "k/x.txt", "v/train/a/x.txt"];
    let specs = ["images:p", "mnist:m", "cifar10:c", "text:t", "corpus:k", "text:v"];
    let prefixed = |spec: &str| spec.replace(':', &format!(":{}/", folder.path().display()));
    let mut cases: Vec<(PathBuf, String)> =
        names.iter().zip(specs).map(|(name, spec)| (pipe(name), prefixed(spec))).collect();
    fs::write(folder.path().join("m/train-labels-idx1-ubyte"), []).unwrap();
    let alone = pipe("alone");
    let kinds = ["images:", "corpus:", "pairs:PATH,", "idx:PATH,"];
    cases.extend(kinds.map(|kind| {
        (alone.clone(), format!("{kind}{0}", alone.display()).replace("PATH", &alone.display().to_string()))
    }));
    for (path, spec) in cases {
        let (sender, receiver) = mpsc::channel();
        let (file, told) = (path.clone(), spec.clone());
        std::thread::spawn(move || sender.send(load(&told)));
        let error = receiver.recv_timeout(Duration::from_secs(20)).expect("it waits for a writer").expect_err(&spec);
        assert!(matches!(&error, Error::NotAFile { path, kind: "a pipe" } if *path == file), "{spec}: {error}");
    }
    let message = resolvent_lab::Recipe::load(&alone).unwrap_err().to_string();
    assert!(message.contains("alone: is a pipe"), "{message}");
}

/// A checkpoint is read tensor by tensor, and each takes the place of the model's own.
#[test]
fn loading_weights_holds_one_tensor_beside_the_model() {
    let _limited = Limited::to(4);
    let folder = TempDir::new().unwrap();
    let layers = || -> Vec<Linear> {
        let layers: Vec<Linear> = (0..8).map(|_| LinearConfig::new(1024, 256).init(&Device::flex())).collect();
        // Weights are drawn when they are first used.
        layers.iter().for_each(|layer| drop(layer.weight.val()));
        layers
    };
    let before = MEMORY.current_usage();
    let written = layers();
    MEMORY.reset_peak_usage();
    let full = MEMORY.current_usage();
    let checkpoint = support::saved(folder.path(), &written);
    let saving = MEMORY.peak_usage() - full;
    let model = layers();
    MEMORY.reset_peak_usage();
    let full = MEMORY.current_usage();
    let model = checkpoint.load_module(model, parts::MODEL).unwrap();
    let loading = MEMORY.peak_usage() - full;
    assert!(full - before > 8 * MIB);
    assert!(loading < 3 * MIB && saving < 4 * MIB, "{loading} to load, {saving} to save tensors of {MIB} bytes each");
    let values = |layers: &[Linear]| layers.iter().map(|layer| layer.weight.val().into_data()).collect::<Vec<_>>();
    assert!(values(&model) == values(&written), "other weights");
    budget::set_limit(MIB as u64 / 2);
    let refused = checkpoint.load_module(layers(), parts::MODEL).unwrap_err().to_string();
    assert!(refused.contains(parts::MODEL) && refused.contains("--decode-limit"), "{refused}");
}
