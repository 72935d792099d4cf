//! All hops at once, matrix-free: `out = ((I - M)^-1 - I) V` with `M = gamma A / (F + eps)`.
//!
//! `out` solves `Y = M (V + Y)`. Since `|A / (F + eps)| <= 1` in the Frobenius norm, `|M| <= gamma < 1` in the spectral
//! norm, whatever the input: the Neumann series converges with an error below `gamma / (1 - gamma)` times its last
//! step. When `M` is symmetric (tied, one mask), conjugate gradients solve the same system faster.
//! The backward pass is an adjoint solve and one backward hop.

use crate::{
    Convergence, Error, Gradients, Mask, Parameter, Plan, Precision, Result, Shape,
    call::{Call, Saved, Target, View},
    mechanism::{Form, InfsaResolvent},
    scratch::{cut, scratch_len},
    series::solver::{Method, Solver},
    structure::dense,
};

/// f32 saved per batch element and head for the hop (exponent and norm) and by the solver (iterations and bound).
const SAVED: usize = 2;

/// Writes `out` and, as `stats`, first what a hop saves, then iterations and bound of every batch element and head.
pub(crate) fn forward(
    call: &Call<'_>,
    m: &InfsaResolvent,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let (hop, report) = stats.split_at_mut(SAVED * call.shape.slices());
    Solver { call, m, method: method(call, m) }.solve(hop, false, out, report, work)?;
    dense::check_norms(call, &m.hop(), &[], hop)
}

/// `W = (I - M^T)^-1 G`; then `dV = W - G`, and the gradients of a hop with `W` for `G` and `V + out` for `V`.
pub(crate) fn backward(
    call: &Call<'_>,
    m: &InfsaResolvent,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let shape = call.shape;
    let Gradients { dq, dk, dv, mut extras } = gradients;
    let ([norms, report, w, x], work) = cut(work, backward_sizes(&shape));
    norms.copy_from_slice(&saved.stats[..norms.len()]);
    let mask = Mask { causal: false, key: call.mask.query, query: call.mask.key };
    let adjoint = Call { q: call.k, k: call.q, v: saved.dout, mask, ..*call };
    Solver { call: &adjoint, m, method: method(call, m) }.solve(norms, true, dv, report, work)?;
    let sum = |to: &mut [f32], a: &[f32], b: &[f32]| {
        to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to = a + b);
    };
    sum(w, saved.dout.dense(), dv);
    sum(x, call.v.dense(), saved.out.dense());
    let (slices, of_queries) = (shape.slices(), [shape.seq_q, shape.value_dim]);
    let hop = Call { v: View::in_one_piece(x, slices, [shape.seq_kv, shape.value_dim]), ..*call };
    let saved = Saved { dout: View::in_one_piece(w, slices, of_queries), stats: norms, ..*saved };
    let dq = Target::in_one_piece(dq, slices, [shape.seq_q, shape.head_dim]);
    let dk = dk.map(|dk| Target::in_one_piece(dk, slices, [shape.seq_kv, shape.head_dim]));
    dense::hop_backward(
        &hop,
        &m.hop(),
        &saved,
        dense::Targets { dq, dk, dv: None },
        extras.get(Parameter::Gamma),
        work,
    );
    Ok(())
}

/// What the solver reported for every batch element and head.
pub(crate) fn convergence(shape: &Shape, stats: &[f32]) -> Vec<Convergence> {
    let report = stats[SAVED * shape.slices()..].chunks_exact(2);
    report.map(|r| Convergence { iterations: r[0] as usize, bound: r[1].into() }).collect()
}

/// The norms before `eps`.
pub(crate) fn frobenius(m: &InfsaResolvent, shape: &Shape, stats: &[f32]) -> Vec<f64> {
    dense::frobenius(&m.hop(), shape, false, &stats[..SAVED * shape.slices()])
}

fn method(call: &Call<'_>, m: &InfsaResolvent) -> Method {
    // Different masks on the two sides make even a tied operator asymmetric.
    if m.tied && call.mask.key == call.mask.query { Method::ConjugateGradients } else { Method::Neumann }
}

/// Norms, report, `W`, `V + out`.
fn backward_sizes(shape: &Shape) -> [usize; 4] {
    [SAVED * shape.slices(), 2 * shape.slices(), shape.out_len(), shape.v_len()]
}

/// The plan, with FLOPs and bytes of the worst case of the bound.
pub(crate) fn plan(m: &InfsaResolvent, shape: &Shape) -> Plan {
    let hop = dense::plan(&Form::Infsa(m.hop()), shape, false, Precision::Full);
    let iterations = limit(m, m.gamma) as u64;
    let solve = super::solver::work(shape);
    Plan {
        reason: "each hop streams its scores in tiles; costs are for the iterations of the guaranteed bound",
        flops_forward: iterations.saturating_mul(hop.flops_forward),
        flops_backward: iterations.saturating_mul(hop.flops_forward).saturating_add(hop.flops_backward),
        bytes_forward: iterations.saturating_mul(hop.bytes_forward),
        bytes_backward: iterations.saturating_mul(hop.bytes_forward).saturating_add(hop.bytes_backward),
        scratch_forward: solve,
        scratch_backward: scratch_len(backward_sizes(shape)) + solve.max(hop.scratch_backward),
        stats: 2 * SAVED * shape.slices(),
        ..hop
    }
}

/// Iterations allowed to a head of decay `gamma`.
pub(super) fn limit(m: &InfsaResolvent, gamma: f64) -> usize {
    m.max_iter.unwrap_or_else(|| InfsaResolvent::worst_case_iterations(gamma, m.tol))
}

/// The error for a head that the user's `max_iter` stopped.
pub(super) fn not_converged(m: &InfsaResolvent, iterations: usize, residual: f64) -> Error {
    Error::NotConverged { mechanism: "infsa-resolvent", iterations, residual, tol: m.tol }
}
