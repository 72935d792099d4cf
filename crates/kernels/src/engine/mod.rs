//! The fused path of compositions: a score, a structure, a normalisation and a series meet here, and each knows nothing of the others.

mod backward;
mod bias;
mod columns;
mod factors;
mod features;
mod gradient;
mod graph;
mod head;
mod landmarks;
mod normalise;
mod pool;
mod range;
mod routes;
mod series;
mod sight;
mod sweep;
mod tile;
mod whiten;

use std::borrow::Cow;

pub(crate) use range::check_row;

use factors::FactorsHop;
use features::FeatureHop;
use graph::{Graph, parameter};
use landmarks::LandmarkHop;
use series::{Hop, Measure, Sum, Tokens};

use crate::{
    Convergence, Gradients, Parameter, Plan, Result, Shape, Strategy,
    call::{Call, Saved},
    mechanism::{Clustered, Composed, Dense, Normalisation, Nystrom, Score, Series, Softmax, Structure},
    structure::{
        clustered, dense,
        nystrom::{self, Preset},
    },
};

/// What a call does and needs; none where there is no fused path.
pub(crate) fn plan(m: &Composed, shape: &Shape, causal: bool) -> Option<Plan> {
    if let Structure::Features(structure) = &m.structure {
        return Some(features::plan(m, structure, shape, causal, hops(m)));
    }
    if let Some(structure) = factored(m) {
        return Some(factors::plan(structure, shape, of_pairs(m, shape, causal, 1), hops(m)));
    }
    if let Structure::Nystrom(structure) = &m.structure {
        return Some(landmarks::plan(m, structure, shape, hops(m)));
    }
    if !graph::is_fused(m, causal) {
        return None;
    }
    Some(match &m.structure {
        Structure::Clustered(structure) => of_clusters(m, structure, shape, causal),
        _ => of_pairs(m, shape, causal, hops(m)),
    })
}

/// Bytes of images of `queries` rows, of keys and of values, and of gradients of these for every task.
fn rows(shape: &Shape, queries: usize, tasks: usize) -> usize {
    let [d, dv] = [shape.head_dim + 16, shape.value_dim + 16];
    4 * shape.slices() * (queries * (d + dv) + tasks * shape.seq_kv * (d + dv))
}

/// The plan of all pairs that are within the window.
fn of_pairs(m: &Composed, shape: &Shape, causal: bool, hops: u64) -> Plan {
    let softmax = crate::Mechanism::Softmax(Softmax { tied: m.tied, ..Softmax::default() });
    let one = dense::plan(&softmax, shape, causal);
    let (pairs, sums) = (seen(m, shape, causal), sweeps_of_sums(&m.normalisation));
    let [d, dv] = [shape.head_dim as u64, shape.value_dim as u64];
    let (scores, hop) = (pairs * 2 * d, pairs * 2 * (d + dv));
    let exponential = m.score.is_log() || matches!(m.score, Score::DotSigmoid(_));
    let exps = if exponential { pairs * (hops + sums) } else { 0 };
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "pairs are scored in tiles and never stored",
        tile: (tile::QUERIES.min(shape.seq_q), tile::KEYS.min(shape.seq_kv)),
        flops_forward: hop * hops + scores * sums,
        // Every hop but the last is repeated; then each is swept back.
        flops_backward: hop * hops.saturating_sub(1) + (scores + 2 * hop) * hops + scores * sums,
        exps_forward: exps,
        exps_backward: exps,
        scratch_forward: 0,
        scratch_backward: 0,
        stats: saved_rows(shape) + 2 * shape.slices(),
        allocated_forward: rows(shape, shape.seq_q, 2),
        allocated_backward: rows(shape, shape.seq_q, 4),
        ..one
    }
}

/// Pairs of a query and a key that it may see, without masks.
fn seen(m: &Composed, shape: &Shape, causal: bool) -> u64 {
    let dense = if let Structure::Dense(dense) = &m.structure { dense.clone() } else { Dense::default() };
    let sight = sight::Sight::dense(&dense, shape, causal);
    let row = |i: usize| {
        let sees = sight.of(i as u32);
        let high = sees.high.min(shape.seq_kv as u32);
        let low = sees.low.min(high);
        u64::from(high - low + sees.sinks.min(low))
    };
    shape.slices() as u64 * (0..shape.seq_q).map(row).sum::<u64>()
}

/// Sweeps over the pairs for sums without which no value can be weighed.
fn sweeps_of_sums(m: &Normalisation) -> u64 {
    if normalise::is_streamed(m) { 0 } else { 2 }
}

/// The plan of a clustered graph, whose clusters are of equal size.
fn of_clusters(m: &Composed, structure: &Clustered, shape: &Shape, causal: bool) -> Plan {
    let ssa = structure.ssa(m.planned_scale(), causal);
    let one = clustered::plan(&ssa, shape, causal);
    // A query that chooses for itself has a row for each cluster beside its own.
    let routes = if ssa.routes_queries() { ssa.routes.min(ssa.clusters(shape.seq_kv)) } else { 0 };
    let queries = shape.seq_q.saturating_mul(1 + routes);
    // What a causal query sees of its own segment lies by itself.
    let times = if causal && ssa.routes_queries() { 2 } else { 1 };
    let columns = &Shape { seq_kv: shape.seq_kv.saturating_mul(times), ..*shape };
    let hops = hops(m);
    Plan {
        strategy: Strategy::Fused,
        arithmetic: crate::Arithmetic::default(),
        reason: "exact entries and means in gathered tiles, by clusters; no score is stored",
        tile: (tile::QUERIES.min(shape.seq_q), tile::KEYS.min(shape.seq_kv)),
        flops_forward: one.flops_forward.saturating_mul(hops),
        flops_backward: one.flops_backward.saturating_mul(hops),
        scratch_forward: 0,
        scratch_backward: 0,
        stats: saved_rows(shape) + 2 * shape.slices(),
        allocated_forward: one.allocated_forward + rows(columns, queries, 2),
        allocated_backward: one.allocated_backward + rows(columns, 2 * queries, 4),
        ..one
    }
}

/// Numbers that are saved of rows, the logarithms of their sums first; how a solver ended comes after them.
fn saved_rows(shape: &Shape) -> usize {
    graph::SAVED * shape.slices() * shape.seq_q
}

/// The part of `stats` that is the log-sum-exp of every row, where a composition has one.
pub(crate) fn lse<'s>(m: &Composed, shape: &Shape, stats: &'s [f32]) -> Option<&'s [f32]> {
    m.has_row_sums().then(|| &stats[..shape.slices() * shape.seq_q])
}

/// The structure of a composition by three factors.
fn factored(m: &Composed) -> Option<&Nystrom> {
    match (&m.structure, &m.normalisation) {
        (Structure::Nystrom(structure), Normalisation::Factors(_)) => Some(structure),
        _ => None,
    }
}

/// The most hops that a call takes.
fn hops(m: &Composed) -> u64 {
    match &m.series {
        Series::Hops(m) => m.count as u64,
        Series::Resolvent(m) => {
            let most = crate::mechanism::InfsaResolvent::worst_case_iterations(m.gamma, m.tol);
            m.max_iter.unwrap_or(most) as u64
        }
        _ => 1,
    }
}

/// How the operator contracts, for a series that needs it.
fn measure(m: &Composed) -> Measure {
    match m.normalisation {
        Normalisation::Row(_) => Measure::Largest,
        _ => Measure::Square,
    }
}

/// The series of a composition over `hop`.
fn sum_over<'a, H>(call: &Call<'_>, m: &'a Composed, hop: &'a H) -> Sum<'a, H> {
    let gamma = (0..call.shape.heads).map(|head| parameter(call, m, Parameter::Gamma, head)).collect();
    Sum { hop, series: &m.series, gamma, measure: measure(m), causal: call.mask.causal }
}

/// Writes `out` and, as `stats`, how a solver ended: iterations and bound of every batch element and head.
pub(crate) fn forward(
    call: &Call<'_>,
    m: &Composed,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    if m.feature_map().is_none() {
        range::check(call, m)?;
    }
    stats.fill(0.0);
    if call.mask.key.is_some() {
        // Heads without a key are not computed.
        out.fill(0.0);
    }
    // How long a solver goes on depends on all values.
    let kept = matches!(m.series, Series::Resolvent(_)).then(|| kept_rows(call, call.v.dense(), call.mask.key));
    let v = kept.as_deref().unwrap_or(call.v.dense());
    if let Some(structure) = factored(m) {
        let ended = factors::with(call, m, structure, |hop| sum_over(call, m, hop).forward(v, out))?;
        save(&ended, stats);
        return Ok(());
    }
    if let (Structure::Nystrom(structure), Series::OneHop(_)) = (&m.structure, &m.series) {
        return nystrom::forward(call, (m, structure), Preset::COMPOSED, out, stats, work);
    }
    let ended = match (&m.structure, &m.series) {
        (Structure::Features(structure), Series::OneHop(_)) => {
            return features::forward(call, (m, structure), out, stats, work);
        }
        (Structure::Features(structure), _) => {
            sum_over(call, m, &FeatureHop::new(call, m, structure)?).forward(v, out)?
        }
        (Structure::Nystrom(structure), _) => {
            sum_over(call, m, &LandmarkHop::new(call, m, structure)?).forward(v, out)?
        }
        _ => {
            let graph = Graph::new(call, m)?;
            let ended = sum_over(call, m, &graph).forward(v, out)?;
            let (of_rows, of_solver) = stats.split_at_mut(saved_rows(&call.shape));
            graph.save(of_rows);
            save(&ended, of_solver);
            return Ok(());
        }
    };
    save(&ended, stats);
    Ok(())
}

/// Saves how a solver ended on every slice, where there was one.
fn save(ended: &[Convergence], stats: &mut [f32]) {
    for (stats, ended) in stats.chunks_exact_mut(2).zip(ended) {
        stats.copy_from_slice(&[ended.iterations as f32, ended.bound as f32]);
    }
}

/// The gradients.
pub(crate) fn backward(
    call: &Call<'_>,
    m: &Composed,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    if let Some(structure) = factored(m) {
        let series = |hop: &FactorsHop<'_>| series_backward(call, &sum_over(call, m, hop), saved, gradients);
        return factors::with(call, m, structure, series);
    }
    match (&m.structure, &m.series) {
        (Structure::Features(structure), Series::OneHop(_)) => {
            features::backward(call, (m, structure), saved, gradients, work)
        }
        (Structure::Nystrom(structure), Series::OneHop(_)) => {
            nystrom::backward(call, (m, structure), Preset::COMPOSED, saved, gradients, work)
        }
        (Structure::Features(structure), _) => {
            series_backward(call, &sum_over(call, m, &FeatureHop::new(call, m, structure)?), saved, gradients)
        }
        (Structure::Nystrom(structure), _) => {
            series_backward(call, &sum_over(call, m, &LandmarkHop::new(call, m, structure)?), saved, gradients)
        }
        _ => {
            let graph = Graph::new(call, m)?.restore(&saved.stats[..saved_rows(&call.shape)]);
            series_backward(call, &sum_over(call, m, &graph), saved, gradients)
        }
    }
}

/// `x [batch, heads, seq, value_dim]` with zeros for the rows of masked tokens, whose content may be anything.
fn kept_rows<'x>(call: &Call<'_>, x: &'x [f32], keep: Option<&[bool]>) -> Cow<'x, [f32]> {
    let Some(keep) = keep else { return Cow::Borrowed(x) };
    let Shape { batch, heads, value_dim, .. } = call.shape;
    let (mut kept, seq) = (x.to_vec(), keep.len() / batch);
    for (n, row) in kept.chunks_exact_mut(value_dim).enumerate() {
        let (slice, i) = (n / seq, n % seq);
        if !keep[slice / heads * seq + i] {
            row.fill(0.0);
        }
    }
    Cow::Owned(kept)
}

/// The gradients of a series.
fn series_backward<H: Hop>(
    call: &Call<'_>,
    sum: &Sum<'_, H>,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
) -> Result<()> {
    let Gradients { dq, dk, dv, mut extras } = gradients;
    let s = call.shape;
    dq.fill(0.0);
    let (tied, mut of_keys) = (dk.is_none(), Vec::new());
    let dk = dk.unwrap_or_else(|| {
        of_keys = vec![0.0; s.k_len()];
        &mut of_keys
    });
    dk.fill(0.0);
    let wanted = extras.iter().next().is_some();
    let mut tokens = Tokens::new(wanted, s.slices(), dq, dk);
    tokens.bias = extras.take(Parameter::Bias);
    if let Some(bias) = &mut tokens.bias {
        bias.fill(0.0);
    }
    let (v, dout) =
        (kept_rows(call, call.v.dense(), call.mask.key), kept_rows(call, saved.dout.dense(), call.mask.query));
    let dgamma = sum.backward(&v, saved.out.dense(), &dout, dv, &mut tokens)?;
    if tied {
        tokens.dq.iter_mut().zip(&*tokens.dk).for_each(|(dq, dk)| *dq += dk);
    }
    if let Some(to) = extras.get(Parameter::Gamma) {
        to.iter_mut().zip(&dgamma).for_each(|(to, &x)| *to = x as f32);
    }
    for (parameter, x) in &tokens.others {
        if let Some(to) = extras.get(*parameter) {
            to.copy_from_slice(x);
        }
    }
    for (n, of_score) in sum.hop.parameters().into_iter().enumerate() {
        if let Some(to) = extras.get(of_score) {
            let of_head = |h: usize| (0..s.batch).map(|b| tokens.parameters[b * s.heads + h][n]).sum::<f64>();
            to.iter_mut().enumerate().for_each(|(h, to)| *to = of_head(h) as f32);
        }
    }
    tokens.failure.map_or(Ok(()), Err)
}
