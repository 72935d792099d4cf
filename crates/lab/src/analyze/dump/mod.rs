//! Queries, keys and values of a model's layers, in a file that may be larger than memory.

mod header;
mod numpy;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use resolvent_kernels::Shape;
use safetensors::Dtype;

use crate::{Error, Result, budget::Held};

/// Tensors `q`, `k` and `v`, or several layers of them as `NAME.q`, `NAME.k`, `NAME.v`, in a safetensors file, a NumPy
/// archive (.npz), a NumPy file (.npy: `q` alone) or a folder of NumPy files, one per tensor. Where sequences have different
/// lengths, `NAME.key_mask [batch, tokens]` says which tokens there are. Only headers are held.
#[derive(Debug)]
pub struct Dump {
    files: Vec<Part>,
    layers: Vec<Layer>,
    unread: Vec<String>,
    /// Of arrays that were unpacked.
    _held: Held,
}

/// A file that tensors lie in.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
}

/// What the headers say, before anything is made of it.
#[derive(Debug, Default)]
struct Contents {
    files: Vec<Part>,
    tensors: Vec<Entry>,
}

/// One tensor of a header.
#[derive(Debug)]
struct Entry {
    name: String,
    /// Its type, or the name of one that is not read.
    dtype: std::result::Result<Dtype, String>,
    shape: Vec<usize>,
    /// Which of the files holds it.
    file: usize,
    /// Where its elements begin.
    start: u64,
}

/// The tensors of one layer.
#[derive(Debug, Clone)]
pub struct Layer {
    /// What comes before `.q`; `layer` where nothing does.
    pub name: String,
    /// Its sizes, all sequences together; `value_dim` is `head_dim` where there are no values.
    pub shape: Shape,
    q: Stored,
    /// Absent where the keys are the queries.
    k: Option<Stored>,
    v: Option<Stored>,
    /// Which tokens there are; absent where all are.
    key_mask: Option<Stored>,
}

impl Layer {
    /// Whether the keys are the queries.
    pub const fn tied(&self) -> bool {
        self.k.is_none()
    }

    /// Whether sequences may have fewer tokens than the shape says.
    pub const fn masked(&self) -> bool {
        self.key_mask.is_some()
    }

    /// Whether there are values.
    pub const fn has_values(&self) -> bool {
        self.v.is_some()
    }
}

/// Where a tensor is.
#[derive(Debug, Clone)]
struct Stored {
    name: String,
    dtype: Dtype,
    /// With missing batch and head axes as 1.
    axes: [usize; 4],
    file: usize,
    start: u64,
}

impl Stored {
    /// Bytes of one sequence.
    fn bytes(&self) -> usize {
        self.axes[1..].iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Bytes that reading one sequence takes: as it is stored, as f32, and for each of `heads` that share it.
    fn reading(&self, heads: usize) -> u64 {
        let elements = self.axes[1..].iter().product::<usize>() as u64;
        let shared = (heads / self.axes[1]) as u64 * 4;
        elements.saturating_mul(shared).saturating_add(4 * elements).saturating_add(self.bytes() as u64)
    }
}

/// One sequence of one layer, all heads: `[heads, tokens, channels]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// Its sizes; `batch` is 1.
    pub shape: Shape,
    /// Whether queries and keys are of the same tokens, which a mask may make look so.
    pub same_tokens: bool,
    /// Queries.
    pub q: Vec<f32>,
    /// Keys; `None` where they are the queries.
    pub k: Option<Vec<f32>>,
    /// Values, if the file has any.
    pub v: Option<Vec<f32>>,
}

impl Dump {
    /// Reads the headers of `path` and checks every layer's shapes.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Damaged`] naming the tensor, for a file that is none, is cut off, has no `q`, or tensors
    /// that do not fit together.
    pub fn open(path: &Path) -> Result<Self> {
        let held = Held::new();
        let Contents { files, tensors } = header::read(path, &held)?;
        let (layers, unread) = layers(path, tensors)?;
        Ok(Self { files, layers, unread, _held: held })
    }

    /// The layers, `layers.2` before `layers.10`.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Names of tensors that belong to no layer.
    pub fn unread(&self) -> &[String] {
        &self.unread
    }

    /// Reads sequence `batch` of layer `layer`, without the tokens that its mask leaves out. Where keys and values have fewer
    /// heads than queries, each serves as many queries in a row.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Damaged`] for a value that is not finite, naming tensor and index, and for a mask that keeps
    /// nothing or is none.
    pub fn sequence(&mut self, layer: usize, batch: usize) -> Result<Sequence> {
        let Layer { shape, q, k, v, key_mask, .. } = self.layers[layer].clone();
        let kept = key_mask.map(|mask| self.kept(&mask, batch)).transpose()?;
        // Queries are the same tokens as keys, or those of another sequence.
        let own = shape.seq_q == shape.seq_kv;
        let held = Held::new();
        let mut read = |tensor: &Stored, masked: bool| -> Result<Vec<f32>> {
            held.add(&self.files[tensor.file].path, tensor.reading(shape.heads))?;
            let one = self.reals(tensor, batch)?;
            let [_, heads, tokens, channels] = tensor.axes;
            let shared = shape.heads / heads;
            let rows = |head: usize| {
                let rows = one[head / shared * tokens * channels..][..tokens * channels].chunks_exact(channels);
                rows.enumerate().filter(|(token, _)| !masked || kept.as_ref().is_none_or(|kept| kept[*token]))
            };
            Ok((0..shape.heads).flat_map(|head| rows(head).flat_map(|(_, row)| row)).copied().collect())
        };
        let (q, k) = (read(&q, own)?, k.as_ref().map(|k| read(k, true)).transpose()?);
        let v = v.as_ref().map(|v| read(v, true)).transpose()?;
        let seq_kv = kept.map_or(shape.seq_kv, |kept| kept.iter().filter(|&&kept| kept).count());
        let seq_q = if own { seq_kv } else { shape.seq_q };
        Ok(Sequence { shape: Shape { batch: 1, seq_q, seq_kv, ..shape }, same_tokens: own, q, k, v })
    }

    /// Which tokens of a sequence there are.
    fn kept(&mut self, mask: &Stored, batch: usize) -> Result<Vec<bool>> {
        let bytes = self.slice(mask, batch)?;
        let problem = match bytes.iter().find(|&&byte| byte > 1) {
            Some(other) => format!("holds {other}; a mask holds 0 (absent) and 1 (there) only"),
            None if bytes.iter().all(|&byte| byte == 0) => format!("leaves no token of sequence {batch}"),
            None => return Ok(bytes.iter().map(|&byte| byte == 1).collect()),
        };
        Err(Error::damaged(&self.files[mask.file].path, format!("tensor `{}` {problem}", mask.name)))
    }

    /// The bytes of one sequence of a tensor.
    fn slice(&mut self, tensor: &Stored, batch: usize) -> Result<Vec<u8>> {
        let length = tensor.bytes();
        let Part { path, file } = &mut self.files[tensor.file];
        let mut bytes = vec![0; length];
        let start = SeekFrom::Start(tensor.start + (batch * length) as u64);
        let read = file.seek(start).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(Error::io(path, "cannot read the dump"))?;
        Ok(bytes)
    }

    /// The elements of one sequence of a tensor.
    fn reals(&mut self, tensor: &Stored, batch: usize) -> Result<Vec<f32>> {
        let bytes = self.slice(tensor, batch)?;
        let values: Vec<f32> = match tensor.dtype {
            Dtype::F16 => bytes.as_chunks().0.iter().map(|&x| f16::from_le_bytes(x).to_f32()).collect(),
            Dtype::BF16 => bytes.as_chunks().0.iter().map(|&x| bf16::from_le_bytes(x).to_f32()).collect(),
            Dtype::F64 => bytes.as_chunks().0.iter().map(|&x| f64::from_le_bytes(x) as f32).collect(),
            _ => bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect(),
        };
        match values.iter().position(|x| !x.is_finite()) {
            Some(at) => {
                let [_, heads, tokens, channels] = tensor.axes;
                let index = [batch, at / (tokens * channels) % heads, at / channels % tokens, at % channels];
                let value = match tensor.dtype {
                    Dtype::F64 => f64::from_le_bytes(bytes.as_chunks().0[at]),
                    _ => values[at].into(),
                };
                let (value, remedy) = match value.is_finite() {
                    true => (format!("{value:e}, beyond f32,"), "scale the tensor"),
                    false => (value.to_string(), "dump finite numbers, and zeros where there is no token"),
                };
                let problem = format!(
                    "tensor `{}` is {value} at {index:?} ([batch, head, token, channel]); {remedy}",
                    tensor.name
                );
                Err(Error::damaged(&self.files[tensor.file].path, problem))
            }
            None => Ok(values),
        }
    }
}

/// What a layer's tensors are called.
const NAMES: [&str; 4] = ["q", "k", "v", "key_mask"];

/// The layers that the names tell, and the names that tell none.
fn layers(path: &Path, tensors: Vec<Entry>) -> Result<(Vec<Layer>, Vec<String>)> {
    // By the numbers in their names; `03` is not `3`.
    let mut groups: BTreeMap<(Vec<Piece>, String), [Option<Stored>; NAMES.len()]> = BTreeMap::new();
    let mut unread = Vec::new();
    for entry in tensors {
        let (prefix, last) = entry.name.rsplit_once(['.', '/']).unwrap_or(("", &entry.name));
        match NAMES.iter().position(|known| *known == last) {
            Some(which) => {
                let own = stored(path, which, &entry)?;
                let group = groups.entry((pieces(prefix), prefix.to_owned())).or_default();
                if let Some(other) = group[which].replace(own) {
                    return Err(two_of_a_kind(path, &other.name, &entry.name));
                }
            }
            None => unread.push(entry.name),
        }
    }
    unread.sort();
    let found = groups.into_values().map(|tensors| layer(path, tensors)).collect::<Result<Vec<_>>>()?;
    if found.is_empty() {
        let there = unread.join(", ");
        let problem = format!(
            "tensor `q` (or `NAME.q`) is missing; store queries, keys and values as q, k, v (it holds: {there})"
        );
        return Err(Error::damaged(path, problem));
    }
    let mut known: BTreeMap<&str, &str> = BTreeMap::new();
    for layer in &found {
        if let Some(other) = known.insert(&layer.name, &layer.q.name) {
            return Err(two_of_a_kind(path, other, &layer.q.name));
        }
    }
    Ok((found, unread))
}

/// The error of two tensors that one name stands for.
fn two_of_a_kind(path: &Path, one: &str, other: &str) -> Error {
    Error::damaged(path, format!("tensors `{one}` and `{other}` are of the same layer; give them different names"))
}

/// A piece of a name: numbers compare as numbers.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Piece {
    Number(u64),
    Text(String),
}

fn pieces(name: &str) -> Vec<Piece> {
    let digit = |c: char| c.is_ascii_digit();
    let chars: Vec<char> = name.chars().collect();
    let pieces = chars.chunk_by(|&a, &b| digit(a) == digit(b)).map(|piece| piece.iter().collect::<String>());
    pieces.map(|piece| piece.parse().map_or(Piece::Text(piece), Piece::Number)).collect()
}

/// The tensor of `entry`, the one called `NAMES[which]`.
fn stored(path: &Path, which: usize, entry: &Entry) -> Result<Stored> {
    let problem = |problem: String| Err(Error::damaged(path, format!("tensor `{}` {problem}", entry.name)));
    let (is_mask, shape) = (NAMES[which] == "key_mask", &entry.shape);
    let dtype = match (&entry.dtype, is_mask) {
        (Ok(dtype @ (Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64)), false)
        | (Ok(dtype @ (Dtype::U8 | Dtype::BOOL)), true) => *dtype,
        (found, _) => {
            let found = found.as_ref().map_or_else(Clone::clone, Dtype::to_string);
            let expected = if is_mask { "U8 or BOOL" } else { "F32, F16, BF16 or F64" };
            return problem(format!("has type {found}; store it as {expected}"));
        }
    };
    let (ranks, expected) =
        if is_mask { (1..=2, "[B, N] or [N]") } else { (2..=4, "[B, H, N, D], [H, N, D] or [N, D]") };
    if !ranks.contains(&shape.len()) || shape.contains(&0) {
        return problem(format!("has shape {shape:?}; expected {expected}, none empty"));
    }
    let mut axes = [1; 4];
    match (is_mask, &shape[..]) {
        (true, &[batch, tokens]) => axes = [batch, 1, tokens, 1],
        (true, &[tokens]) => axes[2] = tokens,
        _ => axes[4 - shape.len()..].copy_from_slice(shape),
    }
    Ok(Stored { name: entry.name.clone(), dtype, axes, file: entry.file, start: entry.start })
}

fn layer(path: &Path, [q, k, v, key_mask]: [Option<Stored>; NAMES.len()]) -> Result<Layer> {
    let Some(q) = q else {
        let orphan = k.or(v).or(key_mask).map_or_else(String::new, |tensor| tensor.name);
        return Err(Error::damaged(
            path,
            format!("tensor `{orphan}` has no queries beside it; store them under the same name with `q`"),
        ));
    };
    let [batch, heads, seq_q, head_dim] = q.axes;
    let keys = k.as_ref().unwrap_or(&q);
    let seq_kv = keys.axes[2];
    for other in k.iter().chain(&v).chain(&key_mask) {
        let [b, h, n, d] = other.axes;
        let channels = if std::ptr::eq(other, keys) { head_dim } else { d };
        if b != batch || heads % h != 0 || n != seq_kv || d != channels {
            let (shape, expected) = match key_mask.as_ref().is_some_and(|mask| std::ptr::eq(other, mask)) {
                true => (vec![b, n], format!("[{batch}, {seq_kv}]")),
                false => (other.axes.to_vec(), format!("[{batch}, {heads} or a divisor, {seq_kv}, {channels}]")),
            };
            let problem = format!(
                "tensor `{}` has shape {shape:?}, which does not fit `{}` {:?}; expected {expected}",
                other.name, q.name, q.axes
            );
            return Err(Error::damaged(path, problem));
        }
    }
    let value_dim = v.as_ref().map_or(head_dim, |v| v.axes[3]);
    let name = q.name.strip_suffix('q').unwrap_or_default().trim_end_matches(['.', '/']);
    let name = if name.is_empty() { "layer" } else { name }.to_owned();
    Ok(Layer { name, shape: Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim }, q, k, v, key_mask })
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    /// A dump of f32 tensors that count up from 0, each shape with its name.
    fn dump(tensors: &[(&str, &[usize])]) -> (tempfile::TempDir, Result<Dump>) {
        let folder = tempfile::tempdir().unwrap();
        let bytes = |shape: &[usize]| -> Vec<u8> {
            (0..shape.iter().product()).flat_map(|i: usize| (i as f32).to_le_bytes()).collect()
        };
        let data: Vec<_> = tensors.iter().map(|(_, shape)| bytes(shape)).collect();
        let view = |shape: &[usize], data| TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap();
        let views = tensors.iter().zip(&data).map(|((name, shape), data)| (*name, view(shape, data)));
        let path = folder.path().join("dump.safetensors");
        std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        let opened = Dump::open(&path);
        (folder, opened)
    }

    #[test]
    fn layers_are_told_by_their_names() {
        let shape: &[usize] = &[1, 1, 3, 2];
        let tensors = [("l.10.q", shape), ("l.9.q", shape), ("l.9.k", shape), ("l.9.mask", shape), ("l.2/q", shape)];
        let (_folder, dump) = dump(&tensors);
        let dump = dump.unwrap();
        let names: Vec<_> = dump.layers().iter().map(|layer| (layer.name.as_str(), layer.tied())).collect();
        assert_eq!(names, [("l.2", true), ("l.9", false), ("l.10", true)]);
        assert_eq!(dump.unread(), ["l.9.mask"]);
    }

    /// Names that only compare alike are two layers, names that say the same are an error: no tensor takes another's place.
    #[test]
    fn no_tensor_hides_another() {
        let shape: &[usize] = &[3, 2];
        let (_folder, both) = dump(&[("l.3.q", shape), ("l.3.k", shape), ("l.03.q", shape)]);
        let both = both.unwrap();
        let names: Vec<_> = both.layers().iter().map(|layer| (layer.name.as_str(), layer.tied())).collect();
        assert_eq!(names, [("l.03", true), ("l.3", false)]);
        for pair in [["a.q", "a/q"], ["layer.q", "q"]] {
            let refused = dump(&pair.map(|name| (name, shape))).1.unwrap_err().to_string();
            assert!(pair.iter().all(|name| refused.contains(&format!("`{name}`"))), "{refused}");
        }
    }

    #[test]
    fn keys_serve_several_queries_and_sequences_are_read_alone() {
        let (_folder, dump) = dump(&[("q", &[2, 4, 3, 2]), ("k", &[2, 2, 3, 2]), ("v", &[2, 2, 3, 1])]);
        let mut dump = dump.unwrap();
        let sequence = dump.sequence(0, 1).unwrap();
        assert_eq!((sequence.shape.batch, sequence.shape.heads, sequence.shape.value_dim), (1, 4, 1));
        assert_eq!(sequence.q, (24..48).map(|i| i as f32).collect::<Vec<_>>());
        let k = sequence.k.unwrap();
        assert_eq!((&k[..6], &k[6..12]), (&k[12..18].iter().map(|x| x - 6.0).collect::<Vec<_>>()[..], &k[..6]));
        assert_eq!(sequence.v.unwrap(), [6.0, 7.0, 8.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 9.0, 10.0, 11.0]);
    }

    #[test]
    fn tensors_that_do_not_fit_are_named() {
        let refused = |tensors: &[(&str, &[usize])]| dump(tensors).1.unwrap_err().to_string();
        assert!(refused(&[("a.k", &[1, 2])]).contains("`a.k` has no queries"));
        assert!(refused(&[("q", &[3, 2]), ("v", &[4, 2])]).contains("`v` has shape [1, 1, 4, 2]"));
        assert!(refused(&[("q", &[3, 2]), ("k", &[3, 1])]).contains("`k` has shape"));
        assert!(refused(&[("q", &[3, 3, 2]), ("k", &[2, 3, 2])]).contains("3 or a divisor"));
        assert!(refused(&[("queries", &[3, 2])]).contains("`q` (or `NAME.q`) is missing"));
        assert!(refused(&[("q", &[3])]).contains("has shape [3]"));
    }
}
