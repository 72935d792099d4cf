//! What each fuzz target does with its bytes: a reader may refuse them, with an error, and may not panic, hang, or take more
//! memory than the budget. What is read must hold what the reader promises.

mod seeds;

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{LazyLock, Once},
};

use burn::{nn::LinearConfig, tensor::Device};
use resolvent_kernels::Mechanism;
use resolvent_lab::{
    Recipe, budget,
    checkpoint::{Checkpoint, parts},
    data::{DataSpec, Error, Vocabulary},
    fit::FitFile,
};
use resolvent_probe::{analyze::Dump, subject::read_boxes};
use safetensors::SafeTensors;

/// Decoded data of one input.
const LIMIT: u64 = 64 << 20;

/// This process's folder, in memory where the system has such a place.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let shared = PathBuf::from("/dev/shm");
    let base = if shared.is_dir() { shared } else { std::env::temp_dir() };
    let folder = base.join(format!("resolvent-fuzz-{}", std::process::id()));
    fs::create_dir_all(folder.join("pictures/a")).expect("a folder for inputs");
    budget::set_limit(LIMIT);
    folder
});

/// Before the first input: writes the seeds of `target` to the folder that `RESOLVENT_SEEDS` names, if it names one.
pub fn seed(target: &str) {
    if let Some(folder) = std::env::var_os("RESOLVENT_SEEDS") {
        seeds::write(target, folder.as_ref());
    }
}

/// Writes an input to the file `name`.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = FOLDER.join(name);
    fs::write(&path, bytes).expect("an input is written");
    path
}

/// Everything that was taken must have been given back, and every message is one line.
fn settled(error: Option<String>) {
    assert_eq!(budget::used(), 0, "bytes that nobody gave back");
    if let Some(message) = error {
        assert!(!message.is_empty(), "an error without a message");
    }
}

fn dump(name: &str, data: &[u8]) {
    let path = file(name, data);
    let error = match Dump::open(&path) {
        Ok(mut dump) => {
            let sizes: Vec<usize> = dump.layers().iter().map(|layer| layer.shape.batch).collect();
            let mut read = |(layer, batch): (usize, usize)| {
                let sequence = dump.sequence(layer, batch).map_err(|e| e.to_string())?;
                let shape = sequence.shape;
                assert_eq!(sequence.q.len(), shape.heads * shape.seq_q * shape.head_dim);
                assert!(sequence.k.is_none_or(|k| k.len() == shape.heads * shape.seq_kv * shape.head_dim));
                assert!(sequence.v.is_none_or(|v| v.len() == shape.heads * shape.seq_kv * shape.value_dim));
                Ok::<_, String>(())
            };
            let first = sizes.iter().enumerate().take(4).flat_map(|(layer, &count)| [(layer, 0), (layer, count - 1)]);
            first.map(&mut read).collect::<Result<Vec<()>, _>>().err()
        }
        Err(e) => Some(e.to_string()),
    };
    settled(error);
}

fn load(spec: String) {
    let loaded = spec.parse::<DataSpec>().and_then(|source| source.load());
    if let Err(Error::Missing { path, .. }) = &loaded {
        panic!("{} was just written", path.display());
    }
    settled(loaded.err().map(|e| e.to_string()));
}

/// Two files in one input: the length of the first, then both.
fn two(data: &[u8]) -> (&[u8], &[u8]) {
    let Some((length, rest)) = data.split_first_chunk() else { return (data, &[]) };
    rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()))
}

/// Tensors of a dump in the format of the same name.
pub fn safetensors(data: &[u8]) {
    dump("q.safetensors", data);
}

/// One array of NumPy.
pub fn npy(data: &[u8]) {
    dump("q.npy", data);
}

/// An archive of NumPy's arrays.
pub fn npz(data: &[u8]) {
    dump("q.npz", data);
}

/// Pictures and labels of an idx data set, plain or compressed.
pub fn idx(data: &[u8]) {
    let (pictures, labels) = two(data);
    let (pictures, labels) = (file("pictures.idx", pictures), file("labels.idx", labels));
    load(format!("idx:{},{}", pictures.display(), labels.display()));
}

/// An archive of pictures, compressed or not.
pub fn tar(data: &[u8]) {
    load(format!("images:{}?size=4", file("pictures.tar", data).display()));
}

/// An archive of pictures.
pub fn zip(data: &[u8]) {
    load(format!("images:{}?size=4", file("pictures.zip", data).display()));
}

/// A shard of WebDataset; the first byte says where the classes stand.
pub fn shards(data: &[u8]) {
    let Some((&first, data)) = data.split_first() else { return };
    let label = ["cls", "txt", "json:class"][usize::from(first % 3)];
    load(format!("webdataset:{}?size=4&label={label}", file("shard.tar", data).display()));
}

/// One picture; the first byte says whether it is resized.
pub fn pictures(data: &[u8]) {
    let Some((&first, data)) = data.split_first() else { return };
    file("pictures/a/0.png", data);
    let size = ["", "?size=5"][usize::from(first & 1)];
    load(format!("images:{}{size}", FOLDER.join("pictures").display()));
}

/// Labelled, parallel and plain text, by the first byte.
pub fn texts(data: &[u8]) {
    let Some((&first, data)) = data.split_first() else { return };
    let path = |name: &str| file(name, data).display().to_string();
    load(match first % 5 {
        0 => format!("text:{}", path("texts.csv")),
        1 => format!("text:{}", path("texts.tsv")),
        2 => format!("text:{}", path("texts.jsonl")),
        3 => format!("corpus:{}", path("texts.txt")),
        _ => {
            let (source, target) = two(data);
            format!("pairs:{},{}", file("texts.en", source).display(), file("texts.de", target).display())
        }
    });
}

/// A vocabulary, and what it makes of a text.
pub fn vocabularies(data: &[u8]) {
    const TEXT: &str = "A dog (small), 2 cats\u{e9}\n\u{1f600} [PAD] runs.";
    let error = match Vocabulary::from_bytes(data, "tokenizer.json".as_ref()) {
        Ok(vocabulary) => {
            vocabulary.fingerprint();
            vocabulary.bytes_of_tokens();
            let encoded = vocabulary.encode_whole(TEXT).and_then(|ids| {
                let (few, spans) = vocabulary.spans(TEXT, 8)?;
                assert!(few.len() == spans.len() && few.len() <= 8);
                assert!(ids.iter().all(|&id| (id as usize) < vocabulary.len().max(2)), "an id beyond the vocabulary");
                vocabulary.decode(&ids)
            });
            encoded.err().map(|e| e.to_string())
        }
        Err(e) => Some(e.to_string()),
    };
    settled(error);
}

/// A recipe; one that is read is written and read again as itself.
pub fn recipes(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(recipe) = Recipe::from_toml(text, "recipe") else { return };
    let Ok(written) = recipe.to_toml() else { return };
    let again = Recipe::from_toml(&written, "written").expect("a recipe that was written");
    assert_eq!(again, recipe);
}

/// A mechanism's configuration; one that is read is written and read again as itself.
pub fn mechanisms(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(mechanism) = Mechanism::from_json(text) else { return };
    let written = serde_json::to_string(&mechanism).expect("a mechanism is written");
    let again = Mechanism::from_json(&written).unwrap_or_else(|e| panic!("{written}: {e}"));
    assert_eq!(again, mechanism);
}

/// A mechanism for every head of a model; one that is read gives every head one, and is written and read again as itself.
pub fn fits(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(fit) = FitFile::parse(text) else { return };
    assert!(FitFile::is_one(text));
    for layer in &fit.layers {
        let mut heads: Vec<usize> = layer.groups.iter().flat_map(|group| &group.heads).copied().collect();
        heads.sort_unstable();
        assert!(heads.into_iter().eq(0..layer.heads), "a head without one mechanism");
    }
    let written = serde_json::to_string(&fit).expect("a fit is written");
    let again = FitFile::parse(&written).unwrap_or_else(|e| panic!("{written}: {e}"));
    assert_eq!(again, fit);
}

/// Annotations of a picture of 20 x 10 pixels.
pub fn annotations(data: &[u8]) {
    let boxes = read_boxes(&file("picture.xml", data), 20, 10);
    for region in boxes.iter().flatten() {
        assert!(region.left < region.right && region.right <= 20.0 && region.top < region.bottom, "{region:?}");
    }
    settled(boxes.err().map(|e| e.to_string()));
}

/// A checkpoint: its state as it is, or, by the first byte, the weights of a small layer, in either format, under a state that fits them.
pub fn checkpoints(data: &[u8]) {
    static WRITTEN: Once = Once::new();
    let Some((&first, data)) = data.split_first() else { return };
    let folder = FOLDER.join("checkpoint");
    WRITTEN.call_once(|| fs::create_dir_all(&folder).expect("a folder for a checkpoint"));
    let state = if first & 3 == 0 {
        data.to_vec()
    } else {
        let mut manifest: serde_json::Value = serde_json::from_str(STATE).expect("a state that was written");
        let (name, file) = if first & 1 == 0 {
            (parts::MODEL, tensors_file(data))
        } else {
            ("model.bpk", serde_json::json!({"bytes": data.len(), "crc32": crc32fast::hash(data)}))
        };
        manifest["files"] = serde_json::json!({ name: file });
        fs::write(folder.join(name), data).expect("an input is written");
        manifest.to_string().into_bytes()
    };
    fs::write(folder.join("state.json"), state).expect("an input is written");
    let error = match Checkpoint::load(&folder) {
        Ok(checkpoint) => {
            let layer = LinearConfig::new(3, 2).init(&Device::flex());
            checkpoint.load_weights(layer).err().map(|e| e.to_string())
        }
        Err(e) => Some(e.to_string()),
    };
    settled(error);
}

/// The checksums of weights, as if they had been written so.
fn tensors_file(data: &[u8]) -> serde_json::Value {
    let header = data.first_chunk().map_or(0, |size| u64::from_le_bytes(*size));
    let header = header.saturating_add(8).min(data.len() as u64) as usize;
    let tensors = SafeTensors::deserialize(data).map(|found| found.tensors()).unwrap_or_default();
    let tensors: BTreeMap<String, u32> =
        tensors.into_iter().map(|(name, tensor)| (name, crc32fast::hash(tensor.data()))).collect();
    serde_json::json!({"bytes": data.len(), "crc32": crc32fast::hash(&data[..header]), "tensors": tensors})
}

/// The state of a run of one step.
pub const STATE: &str = include_str!("../seeds/state.json");
