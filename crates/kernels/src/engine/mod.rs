//! The fused path of compositions: a score, a structure, a normalisation and a series meet here, and each knows nothing of the others.

mod backward;
mod bias;
mod columns;
mod factors;
mod features;
mod filtered;
mod gradient;
mod graph;
mod head;
mod landmarks;
mod normalise;
mod norms;
mod plan;
mod pool;
mod range;
mod rounded;
mod routes;
mod saved;
mod series;
mod sight;
mod stream;
mod sums;
mod sweep;
mod tile;
mod whiten;
mod whole_rows;

use std::borrow::Cow;

pub(crate) use filtered::{soft_backward, soft_forward};
pub(crate) use normalise::{LEAST_SUM, farthest, has_affinity};
pub(crate) use plan::{nearest, plan};
pub(crate) use range::check_row;
pub(crate) use rounded::refusal as bf16_refusal;

use factors::FactorsHop;
use features::FeatureHop;
use graph::{Graph, parameter};
use landmarks::LandmarkHop;
use normalise::saved_len;
use series::{Hop, Measure, Sum, Tokens};

use crate::{
    Convergence, Gradients, Mechanism, Parameter, Result, Shape,
    call::{Call, Saved},
    mechanism::{Normalisation, Nystrom, Series, Structure},
    structure::nystrom::{self, Preset},
};

/// The part of `stats` that is the log-sum-exp of every row, where a composition has one.
pub(crate) fn lse<'s>(m: &Mechanism, shape: &Shape, stats: &'s [f32]) -> Option<&'s [f32]> {
    m.has_row_sums().then(|| &stats[..shape.slices() * shape.seq_q])
}

/// The structure of a composition by three factors.
fn factored(m: &Mechanism) -> Option<&Nystrom> {
    match (&m.structure, &m.normalisation) {
        (Structure::Nystrom(structure), Normalisation::Factors(_)) => Some(structure),
        _ => None,
    }
}

/// The most hops that a call takes.
fn hops(m: &Mechanism) -> u64 {
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
fn measure(m: &Mechanism) -> Measure {
    match m.normalisation {
        Normalisation::Row(_) => Measure::Largest,
        _ => Measure::Square,
    }
}

/// The series of a composition over `hop`.
fn sum_over<'a, H>(call: &Call<'_>, m: &'a Mechanism, hop: &'a H) -> Sum<'a, H> {
    let gamma = (0..call.shape.heads).map(|head| parameter(call, m, Parameter::Gamma, head)).collect();
    Sum { hop, series: &m.series, gamma, measure: measure(m), causal: call.mask.causal }
}

/// Writes `out` and, as `stats`, how a solver ended: iterations and bound of every batch element and head.
pub(crate) fn forward(
    call: &Call<'_>,
    m: &Mechanism,
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
            let (of_tokens, of_solver) = stats.split_at_mut(saved_len(&m.normalisation, &call.shape));
            graph.save(of_tokens);
            save(&ended, of_solver);
            return Ok(());
        }
    };
    save(&ended, stats);
    Ok(())
}

/// How a solver ended on every slice, where there was one.
pub(crate) fn convergence(m: &Mechanism, shape: &Shape, stats: &[f32]) -> Option<Vec<Convergence>> {
    if !matches!(m.series, Series::Resolvent(_)) {
        return None;
    }
    // Sums of rows come first, where there are such.
    let of_pairs = matches!(m.structure, Structure::Dense(_) | Structure::Clustered(_));
    let first = if of_pairs { saved_len(&m.normalisation, shape) } else { 0 };
    let ended = stats[first..][..2 * shape.slices()].chunks_exact(2);
    Some(ended.map(|x| Convergence { iterations: x[0] as usize, bound: x[1].into() }).collect())
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
    m: &Mechanism,
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
            let graph = Graph::new(call, m)?.restore(&saved.stats[..saved_len(&m.normalisation, &call.shape)]);
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
