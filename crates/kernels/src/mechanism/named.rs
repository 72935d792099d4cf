//! Presets by their ids; those that are nothing but four values and a name stand here: what others attend with.

use super::{
    Composed, CosineExp, Dense, Dot, DotExp, DotSigmoid, Factor, FeatureMap, Features, Fna, Infsa, InfsaResolvent,
    Laplacian, LaplacianExact, LinearInfsa, Mechanism, Score, Soft, Softmax, Ssa, Uniform, Unnormalised,
};
use crate::{Error, Result};

/// A preset's id, its paper, and its values.
pub(super) type Named = (&'static str, &'static str, fn() -> Composed);

/// Every such preset, in the order of the tables. A further one is a line here.
pub(super) const NAMED: [Named; 6] = [
    ("cosine", "Swin Transformer V2: Scaling Up Capacity and Resolution", || Composed::new(CosineExp::default())),
    ("sigmoid", "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", || {
        Composed::new(DotSigmoid::default()).normalisation(Unnormalised::default())
    }),
    ("relu", "Replacing softmax with ReLU in Vision Transformers", || {
        Composed::new(Score::DotRelu(Dot::default())).normalisation(Unnormalised { factor: Factor::InvN })
    }),
    ("linear", "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", || {
        Composed::new(DotExp::default()).structure(Features::default())
    }),
    ("performer", "Rethinking Attention with Performers", || {
        Composed::new(DotExp::default()).structure(Features { map: FeatureMap::Favor, ..Features::default() })
    }),
    ("local", "Longformer: The Long-Document Transformer", || {
        Composed::new(DotExp::default()).structure(Dense { window: Some(256), sinks: 0 })
    }),
];

/// The composition that a preset names.
pub(super) fn named(id: &str) -> Option<Composed> {
    let (name, _, values) = NAMED.into_iter().find(|(name, ..)| *name == id)?;
    Some(Composed { name: Some(name), ..values() })
}

/// Presets that have a struct of their own, in the order of the tables.
const OWN: [&str; 11] = [
    "softmax",
    "uniform",
    "infsa",
    "infsa-resolvent",
    "linear-infsa",
    "soft",
    "soft-pp",
    "fna",
    "laplacian",
    "laplacian-exact",
    "ssa",
];

/// The ids of all presets.
const fn ids() -> [&'static str; OWN.len() + NAMED.len()] {
    let mut ids = [""; OWN.len() + NAMED.len()];
    let mut n = 0;
    while n < ids.len() {
        ids[n] = if n < OWN.len() { OWN[n] } else { NAMED[n - OWN.len()].0 };
        n += 1;
    }
    ids
}

impl Mechanism {
    /// Every id, in the order of the tables.
    pub const IDS: [&'static str; OWN.len() + NAMED.len()] = ids();

    /// The preset `id` with its defaults.
    ///
    /// # Errors
    /// [`Error::Config`] listing the known ids.
    pub fn preset(id: &str) -> Result<Self> {
        Ok(match id {
            "softmax" => Self::Softmax(Softmax::default()),
            "uniform" => Self::Uniform(Uniform::default()),
            "infsa" => Self::Infsa(Infsa::default()),
            "infsa-resolvent" => Self::InfsaResolvent(InfsaResolvent::default()),
            "linear-infsa" => Self::LinearInfsa(LinearInfsa::default()),
            "soft" => Self::Soft(Soft::default()),
            "soft-pp" => Self::SoftPp(Soft::plus()),
            "laplacian" => Self::Laplacian(Laplacian::default()),
            "laplacian-exact" => Self::LaplacianExact(LaplacianExact::default()),
            "ssa" => Self::Ssa(Ssa::default()),
            "fna" => Self::Fna(Fna::default()),
            _ => {
                if let Some(composed) = named(id) {
                    return Ok(composed.into());
                }
                let problem = format!("unknown mechanism `{id}`, expected one of: {}", Self::IDS.join(", "));
                return Err(Error::Config { field: "mechanism".into(), problem });
            }
        })
    }
}
