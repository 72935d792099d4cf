//! Presets that are nothing but four values and a name: what others attend with.

use super::{Composed, CosineExp, Dense, Dot, DotExp, DotSigmoid, Factor, FeatureMap, Features, Score, Unnormalised};

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
