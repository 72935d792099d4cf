//! The layers that the names of tensors tell of.

use std::{collections::BTreeMap, path::Path};

use resolvent_kernels::Shape;
use resolvent_lab::{Error, Result};
use safetensors::Dtype;

use super::Entry;

/// The tensors of one layer.
#[derive(Debug, Clone)]
pub struct Layer {
    /// What comes before `.q`; `layer` where nothing does.
    pub name: String,
    /// Its sizes, all sequences together; `value_dim` is `head_dim` where there are no values.
    pub shape: Shape,
    pub(super) q: Stored,
    /// Absent where the keys are the queries.
    pub(super) k: Option<Stored>,
    pub(super) v: Option<Stored>,
    /// Which tokens there are; absent where all are.
    pub(super) key_mask: Option<Stored>,
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
pub(super) struct Stored {
    pub name: String,
    pub dtype: Dtype,
    /// With missing batch and head axes as 1.
    pub axes: [usize; 4],
    pub file: usize,
    pub start: u64,
}

impl Stored {
    /// Bytes of one sequence.
    pub fn bytes(&self) -> usize {
        self.axes[1..].iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Bytes that reading one sequence takes: as it is stored, as f32, and for each of `heads` that share it.
    pub fn reading(&self, heads: usize) -> u64 {
        let elements = self.axes[1..].iter().product::<usize>() as u64;
        let shared = (heads / self.axes[1]) as u64 * 4;
        elements.saturating_mul(shared).saturating_add(4 * elements).saturating_add(self.bytes() as u64)
    }
}

/// What a layer's tensors are called.
pub(super) const NAMES: [&str; 4] = ["q", "k", "v", "key_mask"];

/// The layers that the names tell, and the names that tell none.
pub(super) fn layers(path: &Path, tensors: Vec<Entry>) -> Result<(Vec<Layer>, Vec<String>)> {
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
