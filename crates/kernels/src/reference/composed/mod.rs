//! Any composition of a score, a structure, a normalisation and a series: each is written here once, with its gradient.

mod factors;
mod features;
mod graph;
mod normalisation;
mod nystrom;
mod projected;
mod score;
mod series;
mod value_filter;
mod whitened;

use graph::Graph;
use nystrom::Landmarked;
use score::Affinity;
use value_filter::ValueFilter;

use super::{HeadForward, HeadGradients, head::Head, matrix::Matrix};
use crate::{
    Mechanism, Parameter, Result,
    mechanism::{Normalisation, Structure},
};

/// One hop, and what its gradient needs.
enum Hop<'a> {
    Graph(Graph<'a>),
    Landmarked(Box<Landmarked<'a>>),
    Factored(Box<factors::Factored<'a>>),
    Features(features::Mapped),
    Projected(Box<projected::Projected<'a>>),
}

/// Gradients of the tokens and of the values' parameters.
struct HopGradients {
    dq: Matrix,
    dk: Matrix,
    parameters: Vec<(Parameter, Vec<f64>)>,
}

impl<'a> Hop<'a> {
    fn of(head: &'a Head, mechanism: &Mechanism, m: &'a Mechanism) -> Result<Self> {
        if let Some((structure, over)) = m.over_projections() {
            return Ok(Self::Projected(Box::new(projected::Projected::of(head, structure, over))));
        }
        let affinity = Affinity::of(head, &m.score);
        Ok(match &m.structure {
            Structure::Nystrom(structure) if matches!(m.normalisation, Normalisation::Factors(_)) => {
                Self::Factored(Box::new(factors::Factored::of(head, mechanism, affinity, structure)?))
            }
            Structure::Nystrom(structure) => {
                Self::Landmarked(Box::new(Landmarked::of(head, mechanism, affinity, structure, &m.normalisation)?))
            }
            Structure::Features(structure) => Self::Features(features::Mapped::of(head, affinity.scale(), structure)),
            _ => Self::Graph(Graph::of(head, affinity, m)),
        })
    }

    /// The weights, `[seq_q, seq_kv]`.
    fn weights(&self) -> Matrix {
        match self {
            Self::Graph(graph) => graph.weights(),
            Self::Landmarked(landmarked) => landmarked.weights(),
            Self::Factored(factored) => factored.weights(),
            Self::Features(mapped) => mapped.weights(),
            Self::Projected(projected) => projected.weights(),
        }
    }

    /// What the normalisation of pairs says of the call beside the weights.
    fn report(&self, head: &Head, m: &Mechanism) -> HeadForward {
        let Self::Graph(graph) = self else { return HeadForward::default() };
        let Some(normalised) = graph.normalised() else { return HeadForward::default() };
        // A pooled row is everyone's.
        let logs = m.score.is_log() && !matches!(m.structure, Structure::Pooled(_));
        let sums = normalised.row_sums().filter(|_| logs);
        let density = matches!(&m.normalisation, Normalisation::Row(m) if m.density_exponent != 0.0);
        let rows = if head.causal { head.q.rows } else { 1 };
        HeadForward {
            lse: sums.as_ref().map(|[sums, _]| sums.clone()),
            lse0: sums.filter(|_| density).map(|[_, plain]| plain),
            frob: normalised.norms().map(|norms| norms[..rows].to_vec()),
            ..HeadForward::default()
        }
    }

    fn backward(&self, head: &Head, dweights: &Matrix) -> HopGradients {
        match self {
            Self::Graph(graph) => graph.backward(dweights),
            Self::Landmarked(landmarked) => landmarked.backward(dweights),
            Self::Factored(factored) => factored.backward(dweights),
            Self::Features(mapped) => mapped.backward(head, dweights),
            Self::Projected(projected) => projected.backward(dweights),
        }
    }
}

/// The matrix of `mechanism`, whose values are `m`.
pub(super) fn forward(head: &Head, mechanism: &Mechanism, m: &Mechanism) -> Result<HeadForward> {
    let hop = Hop::of(head, mechanism, m)?;
    let block = block(m);
    // Whether a path of any length may lead from a query to a key.
    let reaches =
        |i: usize, j: usize| head.keep_query[i] && head.keep_key[j] && (!head.causal || j / block <= i / block);
    let weights = series::total(head, &m.series, &weights(head, mechanism, &hop), reaches)?;
    Ok(HeadForward { weights, ..hop.report(head, m) })
}

/// The gradients; `saved` is what [`forward`] returned.
pub(super) fn backward(
    head: &Head,
    mechanism: &Mechanism,
    m: &Mechanism,
    saved: &HeadForward,
    dout: &Matrix,
) -> Result<HeadGradients> {
    let hop = Hop::of(head, mechanism, m)?;
    let weights = weights(head, mechanism, &hop);
    let (dweights, dgamma) = series::backward(head, &m.series, &weights, &saved.weights, dout);
    let HopGradients { dq, dk, mut parameters } = hop.backward(head, &head.with_dropout(&dweights));
    parameters.push((Parameter::Gamma, vec![dgamma]));
    if let Some(filter) = ValueFilter::of(mechanism) {
        parameters.push((Parameter::ValueWeight, filter.backward(head, &dweights)));
    }
    Ok(HeadGradients { dq, dk, parameters })
}

/// The weights of one hop: after dropout, and with the filter over the values, where there are such.
fn weights(head: &Head, mechanism: &Mechanism, hop: &Hop<'_>) -> Matrix {
    let weights = head.with_dropout(&hop.weights());
    match ValueFilter::of(mechanism) {
        Some(filter) => weights.plus(&filter.matrix(head)),
        None => weights,
    }
}

/// Tokens that become visible together in a causal call.
fn block(m: &Mechanism) -> usize {
    match &m.structure {
        Structure::Clustered(structure) => structure.ssa(None, true).causal_clusters.block(),
        _ => 1,
    }
}
