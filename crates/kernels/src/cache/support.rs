//! What every cache asks of a mechanism and of new tokens.

use super::{
    features,
    reach::{Reach, keeps_rows},
    routed,
    store::Store,
};
use crate::{
    Error, Inputs, Mechanism, Result, Shape, check,
    mechanism::{Form, GlobalTokens},
    score::map::Map,
    simd::{Level, rows::max_abs},
};

/// Whether there is a cache for a mechanism.
pub(super) fn check_support(mechanism: &Mechanism, token: &Shape, capacity: usize) -> Result<()> {
    let refused = |what, why| Err(Error::Unsupported { mechanism: mechanism.id(), what, why });
    let form = mechanism.form();
    let clusters = if let Form::Ssa(m) = &form { Some(m.clone()) } else { routed::clusters(mechanism) };
    // A cache grows: the positions of global tokens may lie behind what it begins with.
    let furthest = match clusters.as_ref().and_then(|m| m.global_tokens.as_ref()) {
        Some(GlobalTokens::At(positions)) => positions.iter().map(|&n| n.saturating_add(1)).max().unwrap_or(0),
        _ => 0,
    };
    let seq = if clusters.is_some() { capacity.max(furthest).max(1) } else { 1 };
    mechanism.check(&Shape { seq_q: seq, seq_kv: seq, ..*token }, true)?;
    if matches!(&form, Form::Ssa(m) if m.causal_clusters.block() > 1) {
        return refused("decoding with causal_clusters = block", "tokens see later ones; use prefix");
    }
    Shape { seq_kv: capacity, ..*token }.check()?;
    match form {
        _ if keeps_rows(mechanism) || mechanism.is_pooled() || clusters.is_some() => Ok(()),
        Form::Fna(m) if m.norm_exponent != 0.0 => refused(
            "decoding with norm_exponent != 0",
            "the degrees of all past rows would be needed; set norm_exponent to 0, or attend to the whole sequence",
        ),
        _ => features::structure(mechanism).map(|_| ()),
    }
}

/// The number of new tokens, from the tensors of a step, which are checked.
pub(super) fn new_tokens(
    op: &'static str,
    mechanism: &Mechanism,
    token: &Shape,
    sharing: usize,
    inputs: &Inputs<'_, f32>,
) -> Result<usize> {
    let one = token.q_len();
    let new = inputs.q.len() / one;
    let remedy = "expected batch * heads * n * head_dim for n >= 1 new tokens";
    check::length(op, "q", inputs.q.len(), new.max(1) * one, remedy)?;
    let lens = [one, token.k_len() / sharing, token.v_len() / sharing];
    check::tensors(op, mechanism, inputs, lens.map(|x| new * x))?;
    if inputs.extras.dropout.is_some() {
        let (what, why) = ("dropout in a cache", "tokens are decoded with the whole operator");
        return Err(Error::Unsupported { mechanism: mechanism.id(), what, why });
    }
    Ok(new)
}

/// What becomes of keys before they are kept.
pub(super) fn map_of(mechanism: &Mechanism) -> Map {
    if let Some(Form::Fna(_)) = mechanism.own() { Map::Identity } else { Map::of(&mechanism.score) }
}

/// Channels of a key and of a value as they are kept.
pub(super) fn kept_dims(mechanism: &Mechanism, token: &Shape) -> [usize; 2] {
    [token.head_dim + map_of(mechanism).channels(), token.value_dim]
}

/// A store without memory yet.
pub(super) fn store_of(mechanism: &Mechanism, token: &Shape, kv_heads: usize) -> Store {
    Store::new(kv_heads, kept_dims(mechanism, token), Reach::of(mechanism))
}

/// The largest entries of the keys so far, one number a head, with new ones.
pub(super) fn largest(level: Level, k: &[f32], before: &[f32]) -> Vec<f32> {
    let new = k.chunks_exact(k.len() / before.len()).map(|k| max_abs(level, k));
    new.zip(before).map(|(new, before)| new.max(*before)).collect()
}
