//! Queries, keys and values of a model's layers, in a file that may be larger than memory.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use resolvent_kernels::{Shape, mechanism::check_distinct};
use safetensors::{Dtype, tensor::Metadata};

use crate::{Error, Result};

/// Headers longer than this are damage: one has about 100 bytes per tensor.
const LONGEST_HEADER: u64 = 100_000_000;

/// A safetensors file with tensors `q`, `k` and `v`, or several layers of them as `NAME.q`, `NAME.k`, `NAME.v`. Only its
/// header is held.
#[derive(Debug)]
pub struct Dump {
    path: PathBuf,
    file: File,
    /// Where the data begins.
    data: u64,
    layers: Vec<Layer>,
    unread: Vec<String>,
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
}

impl Layer {
    /// Whether the keys are the queries.
    pub const fn tied(&self) -> bool {
        self.k.is_none()
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
    start: u64,
}

/// One sequence of one layer, all heads: `[heads, tokens, channels]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// Its sizes; `batch` is 1.
    pub shape: Shape,
    /// Queries.
    pub q: Vec<f32>,
    /// Keys; `None` where they are the queries.
    pub k: Option<Vec<f32>>,
    /// Values, if the file has any.
    pub v: Option<Vec<f32>>,
}

impl Dump {
    /// Reads the header of `path` and checks every layer's shapes.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Damaged`] naming the tensor, for a file that is none, is cut off, has no `q`, or tensors
    /// that do not fit together.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(Error::io(path, "cannot open the dump"))?;
        let length = file.metadata().map_err(Error::io(path, "cannot open the dump"))?.len();
        let damaged = |problem: String| Error::damaged(path, problem);
        let advice = "write it with safetensors.torch.save_file";
        let mut size = [0; 8];
        file.read_exact(&mut size).map_err(|_| damaged(format!("is no safetensors file (too short); {advice}")))?;
        let header = u64::from_le_bytes(size);
        if header > LONGEST_HEADER || header + 8 > length {
            return Err(damaged(format!("is no safetensors file, or cut off; {advice}")));
        }
        let mut text = vec![0; header as usize];
        file.read_exact(&mut text).map_err(Error::io(path, "cannot read the dump"))?;
        check_distinct(&String::from_utf8_lossy(&text)).map_err(|e| damaged(format!("has a damaged header: {e}")))?;
        let metadata: Metadata =
            serde_json::from_slice(&text).map_err(|e| damaged(format!("has no safetensors header ({e}); {advice}")))?;
        let expected = 8 + header + metadata.data_len() as u64;
        if length != expected {
            return Err(damaged(format!("has {length} bytes, its header says {expected}; write it again")));
        }
        let (layers, unread) = layers(path, &metadata)?;
        Ok(Self { path: path.into(), file, data: 8 + header, layers, unread })
    }

    /// The layers, `layers.2` before `layers.10`.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Names of tensors that belong to no layer.
    pub fn unread(&self) -> &[String] {
        &self.unread
    }

    /// Reads sequence `batch` of layer `layer`. Where keys and values have fewer heads than queries, each serves as many
    /// queries in a row.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Damaged`] for a value that is not finite, naming tensor and index.
    pub fn sequence(&mut self, layer: usize, batch: usize) -> Result<Sequence> {
        let Layer { shape, q, k, v, .. } = self.layers[layer].clone();
        let mut read = |tensor: &Stored| -> Result<Vec<f32>> {
            let one = self.slice(tensor, batch)?;
            let per_head = one.len() / tensor.axes[1];
            let shared = shape.heads / tensor.axes[1];
            Ok((0..shape.heads).flat_map(|head| &one[head / shared * per_head..][..per_head]).copied().collect())
        };
        let (q, k) = (read(&q)?, k.as_ref().map(&mut read).transpose()?);
        Ok(Sequence { shape: Shape { batch: 1, ..shape }, q, k, v: v.as_ref().map(&mut read).transpose()? })
    }

    /// The elements of one sequence of a tensor.
    fn slice(&mut self, tensor: &Stored, batch: usize) -> Result<Vec<f32>> {
        let elements: usize = tensor.axes[1..].iter().product();
        let width = tensor.dtype.bitsize() / 8;
        let start = self.data + tensor.start + (batch * elements * width) as u64;
        let mut bytes = vec![0; elements * width];
        let read = self.file.seek(SeekFrom::Start(start)).and_then(|_| self.file.read_exact(&mut bytes));
        read.map_err(Error::io(&self.path, "cannot read the dump"))?;
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
                let problem = format!(
                    "tensor `{}` is {} at {index:?} ([batch, head, token, channel]); dump finite numbers, without padding",
                    tensor.name, values[at]
                );
                Err(Error::damaged(&self.path, problem))
            }
            None => Ok(values),
        }
    }
}

/// The layers that the file's names tell, and the names that tell none.
fn layers(path: &Path, metadata: &Metadata) -> Result<(Vec<Layer>, Vec<String>)> {
    let mut groups: BTreeMap<Vec<Part>, [Option<Stored>; 3]> = BTreeMap::new();
    let mut unread = Vec::new();
    for (name, info) in metadata.tensors() {
        let (prefix, last) = name.rsplit_once(['.', '/']).unwrap_or(("", &name));
        match ["q", "k", "v"].iter().position(|known| *known == last) {
            Some(which) => {
                let stored = stored(path, &name, info)?;
                groups.entry(parts(prefix)).or_default()[which] = Some(stored);
            }
            None => unread.push(name),
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
    Ok((found, unread))
}

/// A piece of a name: numbers compare as numbers.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Number(u64),
    Text(String),
}

fn parts(name: &str) -> Vec<Part> {
    let digit = |c: char| c.is_ascii_digit();
    let chars: Vec<char> = name.chars().collect();
    let pieces = chars.chunk_by(|&a, &b| digit(a) == digit(b)).map(|piece| piece.iter().collect::<String>());
    pieces.map(|piece| piece.parse().map_or(Part::Text(piece), Part::Number)).collect()
}

fn stored(path: &Path, name: &str, info: &safetensors::tensor::TensorInfo) -> Result<Stored> {
    let problem = |problem: String| Err(Error::damaged(path, format!("tensor `{name}` {problem}")));
    if !matches!(info.dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64) {
        return problem(format!("has type {}; store it as F32, F16, BF16 or F64", info.dtype));
    }
    if !(2..=4).contains(&info.shape.len()) || info.shape.contains(&0) {
        return problem(format!("has shape {:?}; expected [B, H, N, D], [H, N, D] or [N, D], none empty", info.shape));
    }
    let mut axes = [1; 4];
    axes[4 - info.shape.len()..].copy_from_slice(&info.shape);
    Ok(Stored { name: name.into(), dtype: info.dtype, axes, start: info.data_offsets.0 as u64 })
}

fn layer(path: &Path, [q, k, v]: [Option<Stored>; 3]) -> Result<Layer> {
    let Some(q) = q else {
        let orphan = k.or(v).map_or_else(String::new, |tensor| tensor.name);
        return Err(Error::damaged(
            path,
            format!("tensor `{orphan}` has no queries beside it; store them under the same name with `q`"),
        ));
    };
    let [batch, heads, seq_q, head_dim] = q.axes;
    let keys = k.as_ref().unwrap_or(&q);
    let seq_kv = keys.axes[2];
    for other in k.iter().chain(&v) {
        let [b, h, n, d] = other.axes;
        let channels = if std::ptr::eq(other, keys) { head_dim } else { d };
        if b != batch || heads % h != 0 || n != seq_kv || d != channels {
            let problem = format!(
                "tensor `{}` has shape {:?}, which does not fit `{}` {:?}; expected [{batch}, {heads} or a divisor, {seq_kv}, {channels}]",
                other.name, other.axes, q.name, q.axes
            );
            return Err(Error::damaged(path, problem));
        }
    }
    let value_dim = v.as_ref().map_or(head_dim, |v| v.axes[3]);
    let name = q.name.strip_suffix('q').unwrap_or_default().trim_end_matches(['.', '/']);
    let name = if name.is_empty() { "layer" } else { name }.to_owned();
    Ok(Layer { name, shape: Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim }, q, k, v })
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
