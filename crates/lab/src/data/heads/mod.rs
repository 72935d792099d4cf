//! Queries, keys and values of single heads, generated: what sparse attention is tried on without a model.

mod clusters;
mod needle;

use rand::{Rng, RngExt};
use rand_distr::StandardNormal;
use resolvent_kernels::Shape;

use super::{Result, settings::check};

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

/// The head that `needle:SETTINGS` or `clusters:SETTINGS` names, the settings as [`Needle::parse`] and [`Clusters::parse`] read
/// them; `None` for any other text.
///
/// ```
/// let head = resolvent_lab::data::heads::named("needle:tokens=64").unwrap()?;
/// assert_eq!((head.tokens, head.q.len()), (64, 64 * 64));
/// assert!(resolvent_lab::data::heads::named("needle.safetensors").is_none());
/// # Ok::<(), resolvent_lab::data::Error>(())
/// ```
pub fn named(spec: &str) -> Option<Result<Head>> {
    match spec.split_once(':')? {
        ("needle", settings) => Some(Needle::parse(settings).and_then(|needle| Ok(needle.generate()?.head))),
        ("clusters", settings) => Some(Clusters::parse(settings).and_then(|clusters| clusters.generate())),
        _ => None,
    }
}

/// `len` independent standard normal numbers.
fn normal(rng: &mut impl Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.sample(StandardNormal)).collect()
}

/// [`Error::Setting`](super::Error::Setting) unless a head can have so many tokens.
fn check_tokens(tokens: usize, least: usize) -> Result<()> {
    check("tokens", tokens, (least..=1 << 20).contains(&tokens), "16 (clusters: 2) to 1048576")
}
