//! Any composition of a score, a structure, a normalisation and a series: each is written here once, with its gradient.

mod features;
mod graph;
mod normalisation;
mod nystrom;
mod score;
mod series;

use graph::Graph;
use nystrom::Landmarked;
use score::Affinity;

use super::{HeadForward, HeadGradients, head::Head, matrix::Matrix};
use crate::{
    Parameter, Result,
    mechanism::{Composed, Structure},
};

/// One hop, and what its gradient needs.
enum Hop<'a> {
    Graph(Graph<'a>),
    Landmarked(Box<Landmarked<'a>>),
    Features(features::Mapped),
}

/// Gradients of the tokens and of the values' parameters.
struct HopGradients {
    dq: Matrix,
    dk: Matrix,
    parameters: Vec<(Parameter, Vec<f64>)>,
}

impl<'a> Hop<'a> {
    fn of(head: &'a Head, m: &'a Composed) -> Result<Self> {
        let affinity = Affinity::of(head, &m.score);
        Ok(match &m.structure {
            Structure::Nystrom(structure) => {
                Self::Landmarked(Box::new(Landmarked::of(head, affinity, structure, &m.normalisation)?))
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
            Self::Features(mapped) => mapped.weights(),
        }
    }

    fn backward(&self, head: &Head, dweights: &Matrix) -> HopGradients {
        match self {
            Self::Graph(graph) => graph.backward(dweights),
            Self::Landmarked(landmarked) => landmarked.backward(dweights),
            Self::Features(mapped) => mapped.backward(head, dweights),
        }
    }
}

pub(super) fn forward(head: &Head, m: &Composed) -> Result<HeadForward> {
    let weights = series::total(head, &m.series, &Hop::of(head, m)?.weights());
    Ok(HeadForward { weights, ..HeadForward::default() })
}

pub(super) fn backward(head: &Head, m: &Composed, dout: &Matrix) -> Result<HeadGradients> {
    let hop = Hop::of(head, m)?;
    let (dweights, dgamma) = series::backward(head, &m.series, &hop.weights(), &dout.times_transposed(&head.v));
    let HopGradients { dq, dk, mut parameters } = hop.backward(head, &dweights);
    parameters.push((Parameter::Gamma, vec![dgamma]));
    Ok(HeadGradients { dq, dk, parameters })
}
