//! What a call does and needs.

use super::{Sizes, backward, forward, method};
use crate::{
    Plan, Shape, Strategy,
    mechanism::{InverseGradient, Laplacian},
    structure::nystrom::{pass::TOKENS, reason},
};

pub(crate) fn plan(m: &Laplacian, shape: &Shape) -> Plan {
    let sizes = Sizes::of(m, shape);
    let [slices, queries, keys, marks] = [shape.slices(), shape.seq_q, shape.seq_kv, sizes.marks].map(|n| n as u64);
    let [d, dv] = [shape.head_dim, shape.value_dim].map(|n| n as u64);
    let inverse = method(m, InverseGradient::Implicit).flops(sizes.marks);
    // A difference, its magnitude and a sum per channel. Queries pass by twice forward.
    let kernel = |tokens: u64| tokens * marks * 3 * d;
    let square = marks * marks;
    let forward = 2 * kernel(queries) + kernel(keys) + 2 * queries * square + 4 * keys * square;
    let backward = 2 * kernel(queries) + kernel(keys) + 2 * queries * square + 8 * keys * square;
    Plan {
        strategy: Strategy::Fused,
        reason: reason(m.landmarks),
        tile: (TOKENS.min(shape.seq_q), sizes.marks),
        flops_forward: slices * (forward + 2 * (queries + keys) * marks * dv + 2 * square * dv + inverse),
        flops_backward: slices * (backward + (queries + keys) * marks * (4 * dv + 6 * d) + 6 * marks * square),
        exps_forward: slices * (2 * queries + keys + marks) * marks,
        exps_backward: slices * (2 * queries + keys + marks) * marks,
        bytes_forward: 4 * slices * (2 * queries * d + keys * (d + dv) + queries * dv),
        bytes_backward: 4 * slices * (3 * queries * d + 2 * keys * (d + dv) + 2 * queries * dv),
        scratch_forward: forward::work(m, &sizes),
        scratch_backward: backward::work(m, &sizes),
        stats: sizes.heads() + shape.slices() * shape.seq_kv,
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
