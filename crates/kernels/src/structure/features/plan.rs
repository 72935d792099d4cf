//! What a call does and needs.

use super::{FORWARD, Operator, QUERIES, drive::Cut, keys, map, tile::CHUNK};
use crate::{
    Plan, Precision, Shape, Strategy,
    mechanism::{FeatureMap, Features},
};

/// The plan of one hop.
pub(crate) fn plan(m: &Features, shape: &Shape, causal: bool, precision: Precision) -> Plan {
    let Shape { seq_q, seq_kv, head_dim, value_dim, .. } = *shape;
    let features = map::count(m, head_dim);
    let cut = Cut::of(shape, features, precision.parts());
    let [heads, q, k, d, f, v] = [shape.slices(), seq_q, seq_kv, head_dim, features, value_dim].map(|n| n as u64);
    // A product of a token's features with its values, or with sums of such products.
    let hop = 2 * f * (v + 1);
    let drawn = if m.map == FeatureMap::Favor { 2 * d * f } else { 0 };
    // Causal, pairs within chunks, and the sums of pieces a second time.
    let chunk = CHUNK.min(seq_q) as u64;
    let pairs = if causal { 2 * chunk * (f + v + 1) } else { 0 };
    let twice = if causal && cut.pieces > 1 { 2 } else { 1 };
    let forward = q * (hop + drawn + pairs) + twice * k * (hop + drawn);
    // Twice to the features of both sides, once to values.
    let backward = q * (hop + 2 * drawn + 2 * pairs)
        + twice * k * (hop + drawn)
        + k * (2 * hop + 2 * drawn)
        + twice * q * (2 * hop + drawn);
    let [in_q, in_k, in_v, out] = [q * d, k * d, k * v, q * v];
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "sums over features stand for all keys: O(N)",
        tile: (CHUNK.min(seq_q), CHUNK.min(seq_kv)),
        flops_forward: heads * forward,
        flops_backward: heads * backward,
        exps_forward: heads * f * (q + twice * k),
        exps_backward: heads * f * (1 + twice) * (q + k),
        bytes_forward: 4 * heads * (in_q + twice * (in_k + in_v) + out),
        bytes_backward: 4 * heads * ((2 + twice) * (in_q + 2 * out) + (2 + twice) * (in_k + in_v)),
        scratch_forward: cut.memory(FORWARD),
        scratch_backward: cut.memory(QUERIES).max(cut.memory(keys(true, true))),
        stats: Operator::stats(shape),
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
