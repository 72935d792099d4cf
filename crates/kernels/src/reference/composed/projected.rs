//! Projected keys and values: `W = A F`, with `A` the weights of queries and the projected keys `E k`.

use super::{
    super::{head::Head, matrix::Matrix},
    HopGradients,
    graph::Graph,
    score::Affinity,
};
use crate::{
    Mechanism, Parameter,
    mechanism::{self},
};

/// The pairs of queries and projected keys, and the maps, whose columns are the tokens'; zeros for masked ones.
pub(super) struct Projected<'a> {
    head: &'a Head,
    /// The head over projected keys, and its values.
    over: (Head, Mechanism),
    key_map: Matrix,
    value_map: Matrix,
    /// Columns of the maps as they are given.
    columns: usize,
}

impl<'a> Projected<'a> {
    pub fn of(head: &'a Head, m: &mechanism::Projected, over: Mechanism) -> Self {
        let (count, columns, tokens) = (m.count, m.columns(head.k.rows), head.k.rows);
        let map = |parameter| {
            let drawn = || {
                let all = m.map(parameter, head.heads, columns);
                let own = if m.per_head { head.index() } else { 0 };
                all[own * count * columns..][..count * columns].iter().map(|&x| x.into()).collect()
            };
            let map: Vec<f64> = head.parameter(parameter).unwrap_or_else(drawn);
            Matrix::from_fn(count, tokens, |i, j| if head.keep_key[j] { map[i * columns + j] } else { 0.0 })
        };
        let [key_map, value_map] = [Parameter::KeyMap, Parameter::ValueMap].map(map);
        let over = (head.with_keys(key_map.times(&head.k)), over);
        Self { head, over, key_map, value_map, columns }
    }

    fn graph(&self) -> Graph<'_> {
        let (head, m) = &self.over;
        Graph::of(head, Affinity::of(head, &m.score), m)
    }

    pub fn weights(&self) -> Matrix {
        self.graph().weights().times(&self.value_map)
    }

    pub fn backward(&self, dweights: &Matrix) -> HopGradients {
        let graph = self.graph();
        let HopGradients { dq, dk, mut parameters } = graph.backward(&dweights.times_transposed(&self.value_map));
        let dvalue_map = graph.weights().transpose().times(dweights);
        let dkey_map = dk.times_transposed(&self.head.k);
        for (parameter, dmap) in [(Parameter::KeyMap, dkey_map), (Parameter::ValueMap, dvalue_map)] {
            let wide = Matrix::from_fn(dmap.rows, self.columns, |i, j| if j < dmap.cols { dmap.at(i, j) } else { 0.0 });
            parameters.push((parameter, wide.data));
        }
        HopGradients { dq, dk: self.key_map.transpose().times(&dk), parameters }
    }
}
