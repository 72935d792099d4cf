//! Queries, keys and values of a model's layers, in a file that may be larger than memory.

mod header;
mod layer;
mod numpy;

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

pub use self::layer::Layer;
use self::layer::{Stored, layers};
use half::{bf16, f16};
use resolvent_kernels::Shape;
use resolvent_lab::{Error, Result, budget::Held};
use safetensors::Dtype;

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

/// One sequence of one layer, all heads: `[heads, tokens, channels]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// Its sizes; `batch` is 1.
    pub shape: Shape,
    /// Whether queries and keys are of the same tokens, which a mask may make look so.
    pub same_tokens: bool,
    /// Whether a mask left out keys behind the last that is there: the last query and the last key are then not those that stood side by side.
    pub shifted: bool,
    /// Tokens before the first that there is, which are left out: places are counted from that one.
    pub first: usize,
    /// Its number among those of the layer, by which clusters and landmarks are drawn.
    pub number: usize,
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
    /// nothing, leaves out a token between others, whose places would be lost, or is none.
    pub fn sequence(&mut self, layer: usize, batch: usize) -> Result<Sequence> {
        let Layer { shape, q, k, v, key_mask, .. } = self.layers[layer].clone();
        let kept = key_mask.map(|mask| self.kept(&mask, batch)).transpose()?;
        // Queries are the same tokens as keys, or those of another sequence.
        let own = shape.seq_q == shape.seq_kv;
        let shifted = !own && kept.as_ref().is_some_and(|kept| kept.last() == Some(&false));
        let first = kept.iter().flatten().position(|&kept| kept).unwrap_or(0);
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
        let shape = Shape { batch: 1, seq_q, seq_kv, ..shape };
        Ok(Sequence { shape, same_tokens: own, shifted, first, number: batch, q, k, v })
    }

    /// Which tokens of a sequence there are.
    fn kept(&mut self, mask: &Stored, batch: usize) -> Result<Vec<bool>> {
        let bytes = self.slice(mask, batch)?;
        let problem = match bytes.iter().find(|&&byte| byte > 1) {
            Some(other) => format!("holds {other}; a mask holds 0 (absent) and 1 (there) only"),
            None if bytes.iter().all(|&byte| byte == 0) => format!("leaves no token of sequence {batch}"),
            None if bytes.chunk_by(|a, b| a == b).filter(|run| run[0] == 1).count() > 1 => format!(
                "leaves out tokens of sequence {batch} between others, which would close up; absent may be tokens at either end"
            ),
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
