//! Three factors, each normalised by its rows, over landmarks of the queries and of the keys: `W = F A^+ B`.

use super::{
    super::{
        head::Head,
        inverse::PseudoInverse,
        landmarks::LandmarkSource,
        matrix::{Matrix, inner, ratio},
    },
    HopGradients,
    score::{Affinity, PairContext},
};
use crate::{
    Error, Mechanism, Result,
    mechanism::{InverseGradient, Nystrom},
};

/// Rows, and which of them are there.
struct Side {
    rows: Matrix,
    alive: Vec<bool>,
}

/// Landmarks of tokens, and the way back to these.
struct Landmarks {
    producer: LandmarkSource,
    side: Side,
}

impl Landmarks {
    fn of(m: &Nystrom, tokens: &Side) -> Self {
        let producer = LandmarkSource::new(m.landmarks, m.grid, &tokens.alive, true, None, &[]);
        let alive = producer.members.iter().map(|window| !window.is_empty()).collect();
        let side = Side { rows: producer.apply(&tokens.rows), alive };
        Self { producer, side }
    }
}

/// Everything on the way from tokens to weights.
pub(super) struct Factored<'a> {
    affinity: Affinity<'a>,
    queries: Side,
    keys: Side,
    of_queries: Landmarks,
    of_keys: Landmarks,
    /// Queries to landmarks of keys, landmarks of queries to these, and to keys.
    left: Matrix,
    among: Matrix,
    right: Matrix,
    inverse: PseudoInverse,
    implicit: bool,
}

impl<'a> Factored<'a> {
    /// `mechanism` names errors.
    pub fn of(head: &'a Head, mechanism: &Mechanism, affinity: Affinity<'a>, m: &Nystrom) -> Result<Self> {
        let queries = Side { rows: head.q.clone(), alive: head.keep_query.clone() };
        let keys = Side { rows: head.k.clone(), alive: head.keep_key.clone() };
        let (of_queries, of_keys) = (Landmarks::of(m, &queries), Landmarks::of(m, &keys));
        let (rows, columns) = (&of_queries.side, &of_keys.side);
        let among = softmax(&affinity, rows, columns);
        let ridge = |i: usize, j: usize| if i == j && rows.alive[i] && columns.alive[j] { m.ridge } else { 0.0 };
        let inverse = PseudoInverse::new(among.map(|i, j, x| x + ridge(i, j)), m.newton_iterations);
        if !inverse.result().data.iter().all(|x| x.is_finite()) {
            return Err(Error::Diverged { mechanism: mechanism.id() });
        }
        let (left, right) = (softmax(&affinity, &queries, columns), softmax(&affinity, rows, &keys));
        let implicit = m.gradient == InverseGradient::Implicit;
        Ok(Self { affinity, queries, keys, of_queries, of_keys, left, among, right, inverse, implicit })
    }

    pub fn weights(&self) -> Matrix {
        self.left.times(self.inverse.result()).times(&self.right)
    }

    pub fn backward(&self, dweights: &Matrix) -> HopGradients {
        let z = self.inverse.result();
        let dleft = dweights.times_transposed(&z.times(&self.right));
        let dright = self.left.times(z).transpose().times(dweights);
        let dz = self.left.transpose().times(dweights).times_transposed(&self.right);
        let damong = self.inverse.backward(&dz, self.implicit);
        let zeros = |x: &Matrix| Matrix::zeros(x.rows, x.cols);
        let (rows, columns) = (&self.of_queries.side, &self.of_keys.side);
        let [mut dq, mut dk] = [zeros(&self.queries.rows), zeros(&self.keys.rows)];
        let [mut drows, mut dcolumns] = [zeros(&rows.rows), zeros(&columns.rows)];
        let mut parameters = vec![0.0; self.affinity.parameters.len()];
        let mut back = |w: &Matrix, dw: &Matrix, x: &Side, y: &Side, [dx, dy]: [&mut Matrix; 2]| {
            for i in 0..w.rows {
                let mean = inner(w.row(i), dw.row(i));
                for j in (0..w.cols).filter(|&j| w.at(i, j) != 0.0) {
                    let e = w.at(i, j) * (dw.at(i, j) - mean);
                    let into = [dx.row_mut(i), dy.row_mut(j)];
                    self.affinity.backward(e, [x.rows.row(i), y.rows.row(j)], PairContext::NONE, into, &mut parameters);
                }
            }
        };
        back(&self.left, &dleft, &self.queries, columns, [&mut dq, &mut dcolumns]);
        back(&self.right, &dright, rows, &self.keys, [&mut drows, &mut dk]);
        back(&self.among, &damong, rows, columns, [&mut drows, &mut dcolumns]);
        let through = |of: &Landmarks, x: &Side, d: &Matrix| of.producer.backward(&x.rows, d).0;
        HopGradients {
            dq: dq.plus(&through(&self.of_queries, &self.queries, &drows)),
            dk: dk.plus(&through(&self.of_keys, &self.keys, &dcolumns)),
            parameters: self.affinity.parameters.iter().zip(parameters).map(|(&p, x)| (p, vec![x])).collect(),
        }
    }
}

/// Affinities divided by the sums of their rows.
fn softmax(affinity: &Affinity<'_>, x: &Side, y: &Side) -> Matrix {
    let log = |i: usize, j: usize| {
        let seen = x.alive[i] && y.alive[j];
        if seen { affinity.value(x.rows.row(i), y.rows.row(j), PairContext::NONE) } else { f64::NEG_INFINITY }
    };
    let logs = Matrix::from_fn(x.rows.rows, y.rows.rows, log);
    let most: Vec<f64> = (0..logs.rows).map(|i| logs.row(i).iter().copied().fold(f64::MIN, f64::max)).collect();
    let powers = logs.map(|i, _, l| (l - most[i]).exp());
    let sums: Vec<f64> = (0..powers.rows).map(|i| powers.row(i).iter().sum()).collect();
    powers.map(|i, _, x| ratio(x, sums[i]))
}
