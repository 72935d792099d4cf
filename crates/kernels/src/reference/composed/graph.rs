//! The graph of a dense or clustered structure: for every query the entries that it sees, single keys or means of clusters. A mean of
//! `n` keys stands for `n` equal pairs.

use super::{
    super::{
        clustered::{Entry, entries},
        head::Head,
        matrix::Matrix,
    },
    HopGradients,
    normalisation::{Normalised, Pairs},
    score::{Affinity, PairContext},
    whitened,
};
use crate::{
    Mechanism, Parameter,
    mechanism::{Normalisation, Structure},
};

/// Affinities by query and entry.
pub(super) struct Graph<'a> {
    head: &'a Head,
    affinity: Affinity<'a>,
    entries: Vec<Vec<Entry>>,
    /// Keys that every query sees.
    seen: Vec<f64>,
    weights: Weights,
}

enum Weights {
    Pairs(Normalised),
    /// Of whole columns of affinities.
    Whitened(Matrix, Box<whitened::Weights>),
}

impl<'a> Graph<'a> {
    pub fn of(head: &'a Head, affinity: Affinity<'a>, m: &Mechanism) -> Self {
        let dense = |i: usize| (0..head.k.rows).filter(|&j| head.allowed(i, j)).map(|j| Entry::token(j, 0.0)).collect();
        let rows = 0..head.q.rows;
        let mut entries: Vec<Vec<Entry>> = match &m.structure {
            Structure::Clustered(structure) => {
                let ssa = structure.ssa(None, head.causal);
                rows.map(|i| entries(head, &ssa, &head.clusters, i)).collect()
            }
            _ => rows.map(dense).collect(),
        };
        for (i, row) in entries.iter_mut().enumerate() {
            row.retain(|e| e.tokens.iter().all(|&j| head.bias(i, j) > f64::NEG_INFINITY));
        }
        let seen: Vec<f64> = entries.iter().map(|row| row.iter().map(|e| e.tokens.len() as f64).sum()).collect();
        let weights = if let Normalisation::Whitened(whitened) = &m.normalisation {
            let affinity = |i: usize, j: usize| affinity.affinity(head.q.row(i), head.k.row(j));
            let g = Matrix::from_fn(head.q.rows, head.k.rows, affinity);
            let seen = g.map(|i, j, _| f64::from(u8::from(head.allowed(i, j))));
            let weights = whitened::Weights::of(whitened, seen, &g);
            Weights::Whitened(g, Box::new(weights))
        } else {
            let value = |i: usize, e: &Entry| {
                let at = PairContext { seen: seen[i], bias: bias(head, i, e) };
                let value = affinity.value(head.q.row(i), &e.mean(&head.k), at);
                if affinity.is_log() { value + e.edge_weight() } else { value * e.edge_weight().exp() }
            };
            let spread = |(i, row): (usize, &Vec<Entry>)| -> Vec<f64> {
                row.iter().flat_map(|e| vec![value(i, e); e.tokens.len()]).collect()
            };
            let keys = |row: &Vec<Entry>| row.iter().flat_map(|e| e.tokens.iter().copied()).collect();
            let pairs = Pairs {
                log: affinity.is_log(),
                keys: entries.iter().map(keys).collect(),
                values: entries.iter().enumerate().map(spread).collect(),
                columns: head.k.rows,
                causal: head.causal,
            };
            Weights::Pairs(Normalised::of(pairs, &m.normalisation))
        };
        Self { head, affinity, entries, seen, weights }
    }

    /// Every query's keys, as often as they are paired.
    fn keys(&self, i: usize) -> impl Iterator<Item = usize> + '_ {
        self.entries[i].iter().flat_map(|e| e.tokens.iter().copied())
    }

    /// What divides the pairs, where something does.
    pub fn normalised(&self) -> Option<&Normalised> {
        if let Weights::Pairs(normalised) = &self.weights { Some(normalised) } else { None }
    }

    pub fn weights(&self) -> Matrix {
        match &self.weights {
            Weights::Whitened(_, weights) => weights.weights(),
            Weights::Pairs(normalised) => {
                let mut weights = Matrix::zeros(self.head.q.rows, self.head.k.rows);
                for (i, row) in normalised.weights.iter().enumerate() {
                    self.keys(i).zip(row).for_each(|(j, w)| weights.row_mut(i)[j] += w);
                }
                weights
            }
        }
    }

    /// The gradients of the values of all pairs.
    fn dvalues(&self, dweights: &Matrix) -> Vec<Vec<f64>> {
        let rows = 0..self.entries.len();
        match &self.weights {
            Weights::Whitened(g, weights) => {
                let dg = weights.backward(dweights);
                rows.map(|i| self.keys(i).map(|j| dg.at(i, j) * g.at(i, j)).collect()).collect()
            }
            Weights::Pairs(normalised) => {
                let of_pairs = |i: usize| self.keys(i).map(|j| dweights.at(i, j)).collect();
                normalised.backward(&rows.map(of_pairs).collect::<Vec<_>>())
            }
        }
    }

    pub fn backward(&self, dweights: &Matrix) -> HopGradients {
        let (head, affinity) = (self.head, &self.affinity);
        let dvalues = self.dvalues(dweights);
        let (mut dq, mut dk) = (Matrix::zeros(head.q.rows, head.q.cols), Matrix::zeros(head.k.rows, head.k.cols));
        let mut parameters = vec![0.0; affinity.parameters.len()];
        let mut of_bias = Vec::new();
        for (i, row) in self.entries.iter().enumerate() {
            let mut of_pairs = dvalues[i].iter();
            for entry in row {
                let sum: f64 = of_pairs.by_ref().take(entry.tokens.len()).sum();
                // The constant of an edge is a factor on a linear score.
                let e = if affinity.is_log() { sum } else { sum * entry.edge_weight().exp() };
                let y = entry.mean(&head.k);
                let at = PairContext { seen: self.seen[i], bias: bias(head, i, entry) };
                let mut to = |dy: &mut [f64]| {
                    affinity.backward(e, [head.q.row(i), &y], at, [dq.row_mut(i), dy], &mut parameters)
                };
                if let [j] = entry.tokens[..] {
                    of_bias.push((i, j, to(dk.row_mut(j))));
                    continue;
                }
                let mut dmean = vec![0.0; head.k.cols];
                to(&mut dmean);
                for &j in &entry.tokens {
                    let share = dmean.iter().map(|x| x / entry.tokens.len() as f64);
                    dk.row_mut(j).iter_mut().zip(share).for_each(|(dk, x)| *dk += x);
                }
            }
        }
        let mut parameters: Vec<_> = affinity.parameters.iter().zip(parameters).map(|(&p, x)| (p, vec![x])).collect();
        parameters.extend(head.bias_backward(of_bias.into_iter()).map(|x| (Parameter::Bias, x)));
        HopGradients { dq, dk, parameters }
    }
}

/// What is added to the logit of a single key. A mean of several stands at no one position, and has no bias.
fn bias(head: &Head, i: usize, entry: &Entry) -> f64 {
    if let [j] = entry.tokens[..] { head.bias(i, j) } else { 0.0 }
}
