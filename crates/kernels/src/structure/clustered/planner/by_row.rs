//! Sampled edges row by row: every query draws among the keys that it may see.

use std::collections::BTreeMap;

use super::{
    Sides, gather,
    random::{Stage, pick},
    seen::Seen,
};
use crate::{
    call::cluster_plan::{Edge, NONE},
    parallel::grain,
    simd::rows,
};

/// Tasks of a head: each takes in the keys before its own anew.
const TASKS: usize = 16;

/// `samples` edges for every query with a cluster, among the keys of the other clusters that it may see; all of these
/// with weight one where there are no more.
pub(super) fn edges(sides: &Sides<'_>, samples: usize) -> Vec<Edge> {
    let rows = sides.label_q.len();
    let of_a_task = rows.div_ceil(TASKS).max(1);
    let of_a_row = samples.min(sides.label_k.len()).max(1);
    let starts = (0..rows).step_by(of_a_task);
    let sizes = starts.map(|start| of_a_task.min(rows - start) * of_a_row);
    gather(sizes, grain(1), |task, buffer| {
        let mut keys = Keys::new(sides);
        for (row, buffer) in (task * of_a_task..).zip(buffer.chunks_exact_mut(of_a_row)) {
            keys.seen.extend(sides.limit(row));
            if sides.label_q[row] != NONE {
                keys.draw(row, samples, buffer);
            }
        }
    })
}

/// The clusters of keys as far as a query sees them.
struct Keys<'a> {
    sides: &'a Sides<'a>,
    seen: Seen<'a>,
    products: Vec<f32>,
}

impl<'a> Keys<'a> {
    fn new(sides: &'a Sides<'a>) -> Self {
        let seen = Seen::new(sides.k, sides.dim, sides.label_k);
        Self { sides, seen, products: vec![0.0; sides.keys.len()] }
    }

    /// The keys of cluster `c` that are seen.
    fn of(&self, c: usize) -> &'a [u32] {
        &self.sides.keys.of(c)[..self.seen.counts[c]]
    }

    /// Writes the edges of `row` to the front of `buffer`.
    fn draw(&mut self, row: usize, samples: usize, buffer: &mut [Edge]) {
        let sides = self.sides;
        let own = sides.label_q[row] as u32;
        let remote = |c: usize| !sides.is_exact(own, c as u32);
        let clusters = 0..self.seen.counts.len();
        let total: usize = clusters.clone().filter(|&c| remote(c)).map(|c| self.seen.counts[c]).sum();
        let query = row as u32;
        if total <= samples {
            let keys = clusters.filter(|&c| remote(c)).flat_map(|c| self.of(c));
            let edges = keys.map(|&key| Edge { query, key, log_weight: 0.0 });
            buffer.iter_mut().zip(edges).for_each(|(to, edge)| *to = edge);
            return;
        }
        rows::dots(sides.level, self.seen.means(), &sides.q[row * sides.dim..][..sides.dim], &mut self.products);
        let score = |c: usize| match self.seen.counts[c] {
            0 => f64::NEG_INFINITY,
            _ if !remote(c) => f64::NEG_INFINITY,
            n => sides.scale() * f64::from(self.products[c]) + (n as f64).ln(),
        };
        let mut mass: Vec<f64> = clusters.map(score).collect();
        let most = mass.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(x));
        mass.iter_mut().for_each(|x| *x = (*x - most).exp());
        let sum: f64 = mass.iter().sum();
        let mut stream = sides.stream(Stage::Rows, &[row as u64]);
        let mut drawn = BTreeMap::new();
        for _ in 0..samples {
            let c = pick(mass.iter().copied(), sum, stream.uniform());
            let keys = self.of(c);
            drawn.entry(keys[stream.below(keys.len())]).or_insert((c, 0_u32)).1 += 1;
        }
        for (to, (key, (c, times))) in buffer.iter_mut().zip(drawn) {
            let log_share = mass[c].ln() - sum.ln();
            let log_count = (self.seen.counts[c] as f64).ln();
            let log_weight = f64::from(times).ln() - (samples as f64).ln() - log_share + log_count;
            *to = Edge { query, key, log_weight };
        }
    }
}
