//! The fused path of compositions: a score, a structure, a normalisation and a series meet here, and each knows nothing of the others.

mod graph;
mod head;
mod series;
mod sweep;
mod tile;

use graph::{Graph, parameter};
use series::{Hop, Measure, Sum, Tokens};

use crate::{
    Gradients, Parameter, Plan, Result, Shape, Strategy,
    call::{Call, Saved},
    mechanism::{Composed, Normalisation, Series, Softmax, Structure},
    structure::{
        dense,
        nystrom::{self, Preset},
    },
};

/// What a call does and needs; none where there is no fused path.
pub(crate) fn plan(m: &Composed, shape: &Shape, causal: bool) -> Option<Plan> {
    if let Some(plan) = through_landmarks(m).then(|| nystrom::plan(m, Preset::COMPOSED, shape)) {
        return plan;
    }
    if !graph::is_fused(m, causal) {
        return None;
    }
    let pairs = crate::Mechanism::Softmax(Softmax { tied: m.tied, ..Softmax::default() });
    let one = dense::plan(&pairs, shape, causal);
    let hops = match &m.series {
        Series::Hops(m) => m.count as u64,
        Series::Resolvent(m) => {
            let most = crate::mechanism::InfsaResolvent::worst_case_iterations(m.gamma, m.tol);
            m.max_iter.unwrap_or(most) as u64
        }
        _ => 1,
    };
    // Images of queries, keys and values, and gradients of them for every task.
    let rows = |tasks: usize| {
        let [d, dv] = [shape.head_dim + 16, shape.value_dim + 16];
        4 * shape.slices() * (shape.seq_q * (d + dv) + tasks * shape.seq_kv * (d + dv))
    };
    Some(Plan {
        strategy: Strategy::Fused,
        reason: "pairs are scored in tiles and never stored",
        tile: (tile::QUERIES.min(shape.seq_q), tile::KEYS.min(shape.seq_kv)),
        flops_forward: one.flops_forward * (1 + hops),
        flops_backward: one.flops_backward * (1 + hops),
        scratch_forward: 0,
        scratch_backward: 0,
        stats: 2 * shape.slices(),
        allocated_forward: rows(2),
        allocated_backward: rows(4),
        ..one
    })
}

/// Whether the engine of landmarks serves the composition.
fn through_landmarks(m: &Composed) -> bool {
    matches!((&m.structure, &m.series), (Structure::Nystrom(_), Series::OneHop(_)))
}

/// How the operator contracts, for a series that needs it.
fn measure(m: &Composed) -> Measure {
    match m.normalisation {
        Normalisation::Row(_) => Measure::Largest,
        _ => Measure::Square,
    }
}

/// Runs `f` over the hop of a composition.
fn with_sum<R>(call: &Call<'_>, m: &Composed, f: impl FnOnce(Sum<'_, Graph<'_>>) -> Result<R>) -> Result<R> {
    let gamma = (0..call.shape.heads).map(|head| parameter(call, m, Parameter::Gamma, head)).collect();
    let hop = Graph::new(call, m)?;
    f(Sum { hop: &hop, series: &m.series, gamma, measure: measure(m) })
}

/// Writes `out` and, as `stats`, how a solver ended: iterations and bound of every batch element and head.
pub(crate) fn forward(
    call: &Call<'_>,
    m: &Composed,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    if through_landmarks(m) {
        return nystrom::forward(call, m, Preset::COMPOSED, out, stats, work);
    }
    stats.fill(0.0);
    let ended = with_sum(call, m, |sum| sum.forward(call.v, out))?;
    for (stats, ended) in stats.chunks_exact_mut(2).zip(ended) {
        stats.copy_from_slice(&[ended.iterations as f32, ended.bound as f32]);
    }
    Ok(())
}

/// The gradients.
pub(crate) fn backward(
    call: &Call<'_>,
    m: &Composed,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    if through_landmarks(m) {
        return nystrom::backward(call, m, Preset::COMPOSED, saved, gradients, work);
    }
    let Gradients { dq, dk, dv, mut extras } = gradients;
    let s = call.shape;
    with_sum(call, m, |sum| {
        let mut tokens =
            Tokens { dq: vec![0.0; s.q_len()], dk: vec![0.0; s.k_len()], parameters: vec![[0.0; 2]; s.slices()] };
        let dgamma = sum.backward(call.v, saved.out, saved.dout, dv, &mut tokens)?;
        dq.copy_from_slice(&tokens.dq);
        match dk {
            Some(dk) => dk.copy_from_slice(&tokens.dk),
            None => dq.iter_mut().zip(&tokens.dk).for_each(|(dq, dk)| *dq += dk),
        }
        if let Some(to) = extras.get(Parameter::Gamma) {
            to.iter_mut().zip(&dgamma).for_each(|(to, &x)| *to = x as f32);
        }
        for (n, of_score) in sum.hop.parameters().into_iter().enumerate() {
            if let Some(to) = extras.get(of_score) {
                let of_head = |h: usize| (0..s.batch).map(|b| tokens.parameters[b * s.heads + h][n]).sum::<f64>();
                to.iter_mut().enumerate().for_each(|(h, to)| *to = of_head(h) as f32);
            }
        }
        Ok(())
    })
}
