//! Queries, keys and values of single heads, generated: what sparse attention is tried on without a model.

mod clusters;
mod needle;

use rand::{Rng, RngExt};
use rand_distr::StandardNormal;
use resolvent_kernels::{Error, Result, Shape};
use safetensors::{Dtype, tensor::TensorView};

pub use clusters::{ClusterKind, Clusters};
pub use needle::{Needle, NeedleHead, NeedleKind};

/// One head's tensors, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    /// Number of tokens.
    pub tokens: usize,
    /// Channels of queries and keys.
    pub dim: usize,
    /// Queries, `[tokens, dim]`.
    pub q: Vec<f32>,
    /// Keys, `[tokens, dim]`.
    pub k: Vec<f32>,
    /// Values, `[tokens, dim]`.
    pub v: Vec<f32>,
}

impl Head {
    /// The sizes of a call with this head alone.
    pub fn shape(&self) -> Shape {
        Shape::square(1, 1, self.tokens, self.dim)
    }
}

/// `len` independent standard normal numbers.
fn normal(rng: &mut impl Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.sample(StandardNormal)).collect()
}

/// An error of what was asked for.
fn refused(problem: String) -> Error {
    Error::Config { field: "head".into(), problem }
}

/// Writes the head that `KIND TOKENS SEED FILE` name to FILE, as `resolvent attend` reads it.
pub fn write(words: &[String]) -> Result<()> {
    let usage = || {
        refused(
            "give KIND TOKENS SEED FILE, KIND one of tied, key, query, near, planted, independent, projected".into(),
        )
    };
    let [kind, tokens, seed, file] = words else { return Err(usage()) };
    let (tokens, seed) = (tokens.parse().map_err(|_| usage())?, seed.parse().map_err(|_| usage())?);
    let head = match (kind.parse(), kind.parse()) {
        (Ok(kind), _) => Needle { seed, tokens, kind }.generate()?.head,
        (_, Ok(kind)) => Clusters { seed, tokens, dim: 32, kind }.generate()?,
        _ => return Err(usage()),
    };
    let bytes = [&head.q, &head.k, &head.v].map(|x| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let view = |bytes| {
        TensorView::new(Dtype::F32, vec![1, 1, head.tokens, head.dim], bytes).expect("as many as the shape says")
    };
    let tensors = ["q", "k", "v"].into_iter().zip(&bytes).map(|(name, bytes)| (name, view(bytes)));
    safetensors::serialize_to_file(tensors, None, file.as_ref()).map_err(|e| refused(format!("cannot be written: {e}")))
}
