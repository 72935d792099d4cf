//! What the dense structure costs.

use super::{fna, forward, infsa, log_sum, softmax};
use crate::{Plan, Precision, Shape, Strategy, mechanism::Form};

/// The plan of one hop.
pub(crate) fn plan(m: &Form, s: &Shape, causal: bool, precision: Precision) -> Plan {
    let pairs = pairs(s, causal);
    let [d, dv] = [s.head_dim as u64, s.value_dim as u64];
    let tied = is_tied(m);
    let tensors = (s.q_len() + if tied { 0 } else { s.k_len() } + s.v_len()) as u64;
    let streamed = s.seq_q.div_ceil(forward::QUERIES) as u64 * (s.k_len() + s.v_len()) as u64;
    let out = s.out_len() as u64;
    let exps = if let Form::Softmax(_) = m { pairs } else { 0 };
    let [scratch_forward, scratch_backward] = scratch(m, s, causal, precision);
    let stats = match m {
        Form::Infsa(_) => s.slices() * (1 + infsa::norms(s, causal)),
        _ => log_sum::SAVED * s.slices() * s.seq_q,
    };
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "scores are streamed in tiles and never stored",
        tile: (forward::QUERIES.min(s.seq_q), forward::KEYS.min(s.seq_kv)),
        flops_forward: pairs * 2 * (d + dv),
        flops_backward: pairs * 2 * (3 * d + 2 * dv),
        exps_forward: exps,
        exps_backward: exps,
        bytes_forward: 4 * (s.q_len() as u64 + streamed + out),
        // The panels of one head are read once per tile of keys from the cache that holds them.
        bytes_backward: 4 * (2 * tensors + 2 * out),
        scratch_forward,
        scratch_backward,
        stats,
        allocated_forward: 0,
        allocated_backward: 0,
    }
}

const fn is_tied(m: &Form) -> bool {
    match m {
        Form::Softmax(m) => m.tied,
        Form::Infsa(m) => m.tied,
        _ => false,
    }
}

/// f32 of working memory of one hop, forward and backward.
fn scratch(m: &Form, s: &Shape, causal: bool, precision: Precision) -> [usize; 2] {
    match m {
        Form::Fna(m) => fna::scratch(m, s, precision),
        Form::Infsa(m) => [infsa::forward_work(s, m, causal, precision), infsa::backward_work(s, m, causal, precision)],
        _ => [softmax::forward_work(s, precision), softmax::backward_work(s, is_tied(m), precision)],
    }
}

/// Pairs of a query and a key that it may see, without masks.
pub(super) fn pairs(s: &Shape, causal: bool) -> u64 {
    let seen = |i: usize| (i + 1 + s.seq_kv).saturating_sub(s.seq_q).min(s.seq_kv) as u64;
    let per_slice = if causal { (0..s.seq_q).map(seen).sum() } else { (s.seq_q * s.seq_kv) as u64 };
    s.slices() as u64 * per_slice
}
