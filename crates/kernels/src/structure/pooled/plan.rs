//! What a pooled call does and needs.

use super::{backward, exact, forward, linear, tiles, uniform, work_len};
use crate::{
    Plan, Shape, Strategy,
    mechanism::{Form, LinearInfsa, PowerOperator},
};

/// Memory of one head of `linear-infsa`.
pub(super) struct Sizes {
    /// f32 saved for the backward pass.
    pub stats: usize,
    /// f32 of scratch.
    pub narrow: usize,
    /// f64 of scratch.
    pub wide: usize,
}

pub(super) fn sizes(m: &LinearInfsa, shape: &Shape) -> Sizes {
    let longest = shape.seq_q.max(shape.seq_kv);
    let widest = shape.head_dim.max(shape.value_dim);
    let rows = 1 + shape.value_dim;
    match m.operator {
        PowerOperator::Factored => Sizes {
            stats: linear::Stats::len(shape, m.iterations),
            narrow: rows + shape.head_dim,
            wide: tiles::partial_len(longest, forward::width(widest).max(backward::width(shape.head_dim))),
        },
        PowerOperator::Exact => Sizes {
            stats: exact::stats_len(shape, m.iterations),
            narrow: rows + exact::narrow_len(shape),
            wide: exact::wide_len(shape),
        },
    }
}

pub(crate) fn plan(form: &Form, shape: &Shape, causal: bool) -> Plan {
    match form {
        Form::LinearInfsa(m) => linear_plan(m, shape),
        _ => uniform_plan(shape, causal),
    }
}

/// Elements of one head's queries, keys, values and output, as `u64`.
fn elements(shape: &Shape) -> [u64; 4] {
    let Shape { seq_q, seq_kv, head_dim, value_dim, .. } = *shape;
    [seq_q * head_dim, seq_kv * head_dim, seq_kv * value_dim, seq_q * value_dim].map(|n| n as u64)
}

fn uniform_plan(shape: &Shape, causal: bool) -> Plan {
    let [q, k, v, out] = elements(shape);
    let heads = shape.slices() as u64;
    let scratch = work_len(shape.slices() * uniform::narrow_len(shape), shape.slices() * uniform::wide_len(shape));
    // A running mean reads its rows once for the tiles' sums and once more to run through them.
    let passes = if causal { 2 } else { 1 };
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "one mean per head, or a running one: O(N d)",
        tile: (tiles::TILE, tiles::TILE),
        flops_forward: heads * (passes * v + out),
        flops_backward: heads * (passes * out + v),
        exps_forward: 0,
        exps_backward: 0,
        bytes_forward: 4 * heads * (passes * v + out),
        bytes_backward: 4 * heads * (passes * out + q + k + v),
        scratch_forward: scratch,
        scratch_backward: scratch,
        stats: 0,
        allocated_forward: 0,
        allocated_backward: 0,
    }
}

fn linear_plan(m: &LinearInfsa, shape: &Shape) -> Plan {
    let [q, k, v, full] = elements(shape);
    let (heads, steps) = (shape.slices() as u64, m.iterations as u64);
    let out = if m.broadcast { full } else { shape.value_dim as u64 };
    let bias = u64::from(m.norm_bias.value(shape.head_dim) != 0.0);
    let sizes = sizes(m, shape);
    let scratch = work_len(shape.slices() * sizes.narrow, shape.slices() * sizes.wide);
    let keys = if m.tied { 0 } else { k };
    let (flops_forward, flops_backward, reason) = match m.operator {
        // Norms and pooled queries, then one dot and one pooled row per step; norms again where they bias the scores.
        PowerOperator::Factored => (
            4 * q + steps * (2 + 2 * bias) * k + (steps - 1) * (2 + 2 * bias) * q + 2 * v,
            out + 4 * v + steps * (6 + 4 * bias) * k + (steps - 1) * (4 + 4 * bias) * q + (8 + 4 * bias) * q,
            "one weight per token, the activation after the product with the weights: O(N d) per step",
        ),
        PowerOperator::Exact => {
            let pairs = 2 * shape.seq_q as u64 * k;
            (
                2 * (q + k) + steps * pairs + 2 * v,
                2 * (q + k) + out + 4 * v + steps * 4 * pairs + 4 * q,
                "true power steps, streamed: O(N^2 d) per step, O(N) memory",
            )
        }
    };
    // Tied queries are read as keys once more.
    let forward_rows = q + steps * k + (steps - 1) * if m.tied { 0 } else { q } + v + out;
    let rewritten = if m.tied || steps > 1 { 2 * q } else { q };
    let backward_rows = out + 2 * v + q + rewritten + steps * k + keys * (2 * steps - 1) + (steps - 1) * 3 * q;
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason,
        tile: (tiles::TILE, tiles::TILE),
        flops_forward: heads * flops_forward,
        flops_backward: heads * flops_backward,
        exps_forward: 0,
        exps_backward: 0,
        bytes_forward: 4 * heads * forward_rows,
        bytes_backward: 4 * heads * backward_rows,
        scratch_forward: scratch,
        scratch_backward: scratch,
        stats: shape.slices() * sizes.stats,
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
