//! What a call does and needs.

use super::{Sizes, backward, forward, method};
use crate::{
    Plan, Shape, Strategy,
    mechanism::Soft,
    scratch::room,
    structure::nystrom::{pass::TOKENS, reason},
};

pub(crate) fn plan(m: &Soft, shape: &Shape) -> Plan {
    let sizes = Sizes::of(m, shape);
    let [slices, tokens, marks] = [shape.slices(), shape.seq_q, sizes.marks].map(|n| n as u64);
    let [d, dv] = [shape.head_dim, shape.value_dim].map(|n| n as u64);
    let inverse = method(m, "soft").flops(sizes.marks);
    // A distance takes a subtraction and a multiply-add per channel; twice forward, twice backward.
    let kernel = tokens * marks * 3 * d;
    let rows = tokens * (d + dv);
    Plan {
        strategy: Strategy::Fused,
        reason: reason(m.landmarks),
        tile: (TOKENS.min(shape.seq_q), sizes.marks),
        flops_forward: slices * (2 * kernel + 4 * tokens * marks * dv + marks * marks * (3 * d + 2 * dv) + inverse),
        flops_backward: slices * (2 * kernel + tokens * marks * (8 * dv + 4 * d) + marks * marks * (7 * d + 4 * dv)),
        exps_forward: slices * (2 * tokens + marks) * marks,
        exps_backward: slices * (2 * tokens + marks) * marks,
        bytes_forward: 4 * slices * (2 * rows),
        bytes_backward: 4 * slices * (2 * rows + 2 * tokens * dv + tokens * d),
        scratch_forward: forward::work(m, &sizes),
        scratch_backward: backward::work(m, &sizes),
        stats: shape.slices() * room(sizes.saved()),
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
