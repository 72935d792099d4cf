//! The inputs that fuzzing begins with: small good files of every format, one folder per target.

use std::{
    fs,
    io::{Cursor, Write},
    path::Path,
};

use burn::{
    module::Module,
    nn::LinearConfig,
    store::{ModuleSnapshot, SafetensorsStore},
    tensor::Device,
};
use flate2::{Compression, write::GzEncoder};
use resolvent_kernels::Mechanism;
use resolvent_lab::data::{TextRecipe, Tokens, Vocabulary};
use safetensors::{Dtype, tensor::TensorView};
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

type Files = Vec<(String, Vec<u8>)>;

/// Writes the seeds of `target` to the folder of that name in `folder`.
pub(crate) fn write(target: &str, folder: &Path) {
    let files = match target {
        "annotations" => numbered([annotation()]),
        "checkpoints" => checkpoints(),
        "fits" => fits(),
        "idx" => idx(),
        "mechanisms" => mechanisms(),
        "npy" => numbered([npy("<f4", &[2, 3], 24), npy("<f2", &[1, 2, 3, 2], 24), npy("|b1", &[4], 4)]),
        "npz" => npz(),
        "pictures" => pictures().into_iter().map(|(name, bytes)| (name, with_first(1, &bytes))).collect(),
        "recipes" => recipes(),
        "safetensors" => dumps(),
        "shards" => shards(),
        "tar" => tars(),
        "texts" => texts(),
        "vocabularies" => vocabularies(),
        "zip" => zips(),
        other => panic!("no seeds for {other}"),
    };
    let folder = folder.join(target);
    fs::create_dir_all(&folder).expect("a folder for seeds");
    files.into_iter().for_each(|(name, bytes)| fs::write(folder.join(name), bytes).expect("a seed is written"));
}

fn numbered(files: impl IntoIterator<Item = Vec<u8>>) -> Files {
    files.into_iter().enumerate().map(|(i, bytes)| (format!("seed-{i}"), bytes)).collect()
}

fn with_first(byte: u8, bytes: &[u8]) -> Vec<u8> {
    [&[byte], bytes].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

/// `a b c` as Python's `lzma.compress` writes it.
const XZ: &[u8] = include_bytes!("../seeds/text.xz");

fn annotation() -> Vec<u8> {
    let bounds = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>9</xmax><ymax>8</ymax></bndbox>";
    let size = "<size><width>20</width><height>10</height><depth>3</depth></size>";
    format!("<annotation>{size}<object><name>dog</name>{bounds}</object></annotation>").into_bytes()
}

fn checkpoints() -> Files {
    let layer = LinearConfig::new(3, 2).init(&Device::flex());
    let mut file = SafetensorsStore::from_bytes(None);
    layer.save_into(&mut file).expect("a layer is written");
    let file = file.get_bytes().expect("bytes in memory");
    let packed = layer.no_grad().into_record().into_bytes().expect("a layer is written");
    numbered([with_first(0, crate::STATE.as_bytes()), with_first(1, &packed), with_first(2, &file)])
}

/// The first file's length, then both.
fn pair(first: &[u8], second: &[u8]) -> Vec<u8> {
    [&(first.len() as u16).to_le_bytes(), first, second].concat()
}

fn idx() -> Files {
    let pictures: Vec<u8> = [0, 0, 8, 3, 0, 0, 0, 4, 0, 0, 0, 2, 0, 0, 0, 1].into_iter().chain(0..8).collect();
    let labels = [0, 0, 8, 1, 0, 0, 0, 4, 1, 0, 1, 0];
    numbered([pair(&pictures, &labels), pair(&gzip(&pictures), &gzip(&labels)), pair(&zstd(&pictures), &labels)])
}

/// Fits of no layer, and of one whose heads have every mechanism, in groups of one and of two.
fn fits() -> Files {
    let fit = |layers: &str| {
        format!(
            r#"{{"fit":1,"measure":"cosine","target":0.99,"cost":"time","budget":null,"causal":false,"layers":[{layers}]}}"#
        )
        .into_bytes()
    };
    let (mut heads, mut groups) = (0, Vec::new());
    for (_, mechanism) in mechanisms() {
        let mechanism = String::from_utf8(mechanism).expect("JSON");
        let own: Vec<String> = (heads..heads + 1 + groups.len() % 2).map(|head| head.to_string()).collect();
        heads += own.len();
        groups.push(format!(r#"{{"heads":[{}],"mechanism":{mechanism}}}"#, own.join(",")));
    }
    let layer = format!(r#"{{"name":"blocks.0","heads":{heads},"groups":[{}]}}"#, groups.join(","));
    numbered([fit(""), fit(&layer), fit(r#"{"name":"a","heads":0,"groups":[]}"#)])
}

fn mechanisms() -> Files {
    let preset = |id: &&str| Mechanism::preset(id).expect("a preset");
    let written = |id| serde_json::to_vec(&preset(id)).expect("a mechanism is written");
    Mechanism::IDS.iter().map(|id| ((*id).to_owned(), written(id))).collect()
}

fn npy(descr: &str, shape: &[usize], bytes: usize) -> Vec<u8> {
    let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({},), }}", shape.join(", "));
    header += &" ".repeat(63 - (10 + header.len()) % 64);
    header.push('\n');
    [b"\x93NUMPY\x01\0", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), &vec![0; bytes]].concat()
}

fn archive(method: CompressionMethod, members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in members {
        archive.start_file(*name, SimpleFileOptions::default().compression_method(method)).expect("memory");
        archive.write_all(bytes).expect("memory");
    }
    archive.finish().expect("memory").into_inner()
}

fn npz() -> Files {
    let members = [("l.0.q.npy", npy("<f4", &[2, 1, 2, 2], 32)), ("l.0.key_mask.npy", npy("|b1", &[2, 2], 4))];
    numbered([CompressionMethod::Stored, CompressionMethod::Deflated].map(|method| archive(method, &members)))
}

fn picture(format: image::ImageFormat, picture: image::DynamicImage) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, format).expect("memory");
    bytes.into_inner()
}

fn pictures() -> Files {
    use image::ImageFormat::{Jpeg, Png, WebP};
    numbered([
        picture(Png, image::RgbImage::from_fn(3, 2, |x, y| image::Rgb([x as u8 * 80, y as u8 * 90, 7])).into()),
        picture(Png, image::DynamicImage::new_luma_a8(2, 3)),
        picture(Png, image::DynamicImage::new_rgba16(2, 2)),
        picture(Jpeg, image::RgbImage::from_fn(9, 8, |x, y| image::Rgb([x as u8 * 20, y as u8 * 30, 7])).into()),
        picture(Jpeg, image::DynamicImage::new_luma8(8, 8)),
        picture(WebP, image::RgbImage::from_fn(9, 8, |x, y| image::Rgb([x as u8 * 20, y as u8 * 30, 7])).into()),
        picture(WebP, image::DynamicImage::new_rgba8(3, 4)),
        include_bytes!("../../crates/lab/tests/data/lossy.webp").to_vec(),
        include_bytes!("../../crates/lab/tests/data/lossy-alpha.webp").to_vec(),
    ])
}

/// Two pictures in each of two classes.
fn set() -> Vec<(&'static str, Vec<u8>)> {
    let one = pictures().swap_remove(0).1;
    ["a/0.png", "a/1.png", "b/0.png", "b/1.png"].map(|name| (name, one.clone())).into()
}

fn tar<'a>(files: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, name, &bytes[..]).expect("memory");
    }
    archive.into_inner().expect("memory")
}

fn tars() -> Files {
    let long = format!("b/{}.png", "long".repeat(30));
    let plain = tar(set().into_iter().chain([(&*long, set().swap_remove(0).1)]));
    numbered([gzip(&plain), zstd(&plain), plain])
}

/// Shards whose classes stand in a file each, by name, by number and in JSON.
fn shards() -> Files {
    let shard = |ending: &str, classes: [&[u8]; 2]| {
        let keys = ["0", "1", "2", "3"];
        let names = keys.map(|key| (format!("{key}.png"), format!("{key}.{ending}")));
        let pairs =
            names.iter().zip(set()).enumerate().flat_map(|(i, ((picture, label), (_, bytes)))| {
                [(&**picture, bytes), (&**label, classes[i % 2].to_vec())]
            });
        tar(pairs)
    };
    let (cls, txt) = (shard("cls", [b"0", b"1"]), shard("txt", [b"a cat", b"a dog\n"]));
    let json = shard("json", [br#"{"class": 7}"#, br#"{"more": [1], "class": "b"}"#]);
    numbered([with_first(0, &cls), with_first(1, &txt), with_first(2, &json), with_first(0, &gzip(&cls))])
}

fn zips() -> Files {
    numbered([CompressionMethod::Stored, CompressionMethod::Deflated].map(|method| archive(method, &set())))
}

fn recipes() -> Files {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/lab/configs");
    let entries = fs::read_dir(configs).expect("the recipes of the project");
    let read = |path: std::path::PathBuf| {
        (path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), fs::read(path).expect("a recipe"))
    };
    entries.map(|entry| read(entry.expect("a recipe").path())).collect()
}

fn dumps() -> Files {
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).expect("a tensor");
    let data = [0; 48];
    let one = safetensors::serialize([("q", view(Dtype::F32, &[2, 3], &data[..24]))], None);
    let layers = [
        ("l.0.q", view(Dtype::F32, &[1, 2, 3, 2], &data)),
        ("l.0.k", view(Dtype::BF16, &[1, 1, 4, 2], &data[..16])),
        ("l.0.v", view(Dtype::F16, &[1, 1, 4, 1], &data[..8])),
        ("l.1.q", view(Dtype::F64, &[1, 1, 3, 2], &data)),
    ];
    let masked =
        [("q", view(Dtype::F32, &[1, 1, 3, 2], &data[..24])), ("key_mask", view(Dtype::U8, &[1, 3], &[1, 0, 1]))];
    let written = [one, safetensors::serialize(layers, None), safetensors::serialize(masked, None)];
    numbered(written.map(|file| file.expect("memory")))
}

fn texts() -> Files {
    let csv: &[u8] = b"text,label\n\"a, b\",1\nc,0\nd,1\ne,0\n";
    let tsv: &[u8] = b"text\tlabel\na b\t1\nc\t0\nd\t1\ne\t0\n";
    let jsonl: &[u8] = b"{\"text\":\"a b\",\"label\":1}\n{\"text\":\"c\",\"label\":0}\n{\"text\":\"d\",\"label\":1}\n{\"text\":\"e\",\"label\":0}\n";
    let text: &[u8] = b"some plain text\nin several lines\nof which the last\nare held out\n";
    let parallel = pair(b"one\ntwo\nthree\n", b"eins\nzwei\ndrei\n");
    numbered([
        with_first(0, csv),
        with_first(1, tsv),
        with_first(2, jsonl),
        with_first(3, text),
        with_first(4, &parallel),
        with_first(0, &gzip(csv)),
        with_first(2, &zstd(jsonl)),
        with_first(3, XZ),
    ])
}

fn vocabularies() -> Files {
    let texts = ["A dog runs.", "A black dog, a white dog!", "Two dogs (small) run", "a cat"];
    let kinds = [Tokens::Words, Tokens::Bpe, Tokens::ByteBpe, Tokens::Bytes];
    numbered(kinds.map(|tokens| {
        let recipe = TextRecipe { tokens, vocabulary: 280, ..TextRecipe::default() };
        let learnt = Vocabulary::learn(texts.into_iter(), &recipe).expect("a vocabulary");
        learnt.to_bytes().expect("memory")
    }))
}
