//! What a call does and needs.

use super::{
    backward, forward,
    layout::Sizes,
    middle,
    operator::{Preset, method},
    pass::TOKENS,
    prepare,
};
use crate::{
    Mechanism, Plan, Shape, Strategy,
    mechanism::{Nystrom, Score},
};

pub(crate) fn plan((m, structure): (&Mechanism, &Nystrom), preset: Preset, shape: &Shape) -> Plan {
    let sizes = Sizes::of(m, structure, preset.full, shape);
    let method = method(structure, preset);
    let [slices, queries, keys, landmarks] =
        [shape.slices(), shape.seq_q, shape.seq_kv, sizes.landmarks].map(|n| n as u64);
    let [d, dv] = [shape.head_dim, shape.value_dim].map(|n| n as u64);
    let moments = u64::from(sizes.has_query_mean());
    let whitens = u64::from(sizes.whitens);
    // Every pass takes the terms anew, at three operations per channel; where queries are keys one may serve both.
    let shared = m.tied && sizes.may_share();
    let pairs = (1 + moments) * queries + keys;
    let [back, pulled] = if shared { [queries + keys, keys] } else { [2 * queries + keys, queries + keys] };
    let pull_back = if matches!(m.score, Score::Laplacian(_)) { 6 } else { 4 };
    let square = landmarks * landmarks;
    let values = 2 * (queries + keys) * landmarks * dv;
    let (prepare, middle) = (
        prepare::memory(&method, structure.landmarks, preset.full, &sizes),
        middle::memory(&method, structure.landmarks, preset.full, &sizes),
    );
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: super::reason(structure.landmarks),
        tile: (TOKENS.min(shape.seq_q), sizes.landmarks),
        flops_forward: slices
            * (pairs * landmarks * 3 * d
                + values
                + square * (3 * d + 2 * dv)
                + method.flops(sizes.landmarks)
                + (moments * 2 * queries + whitens * (2 * keys + 4 * landmarks)) * square),
        flops_backward: slices
            * (back * landmarks * 3 * d
                + 2 * values
                + pulled * landmarks * pull_back * d
                + square * (7 * d + 4 * dv)
                + whitens * (2 * queries + 4 * keys + 6 * landmarks) * square),
        exps_forward: slices * (pairs + landmarks) * landmarks,
        exps_backward: slices * (back + landmarks) * landmarks,
        bytes_forward: 4 * slices * (queries * (d + dv) + keys * (d + dv) + moments * queries * d),
        bytes_backward: 4
            * slices
            * (queries * if shared { d } else { 3 * d } + 2 * keys * (d + dv) + 2 * queries * dv),
        scratch_forward: forward::work(&sizes, prepare),
        scratch_backward: backward::work(&sizes, m.tied, middle),
        stats: sizes.stats(),
        allocated_forward: images(&sizes, m.tied),
        allocated_backward: images(&sizes, m.tied)
            + if preset.decays { 2 * size_of::<f32>() * shape.out_len() } else { 0 },
    }
}

/// Bytes of the tokens' images, where these are not the tokens.
fn images(s: &Sizes, tied: bool) -> usize {
    let rows = s.shape.seq_q + if tied { 0 } else { s.shape.seq_kv };
    if s.mapped { size_of::<f32>() * s.shape.slices() * rows * s.dp } else { 0 }
}
