//! Sampled edges row by row: every query draws among the keys that it may see.

use std::collections::BTreeMap;

use super::{
    super::{members::NONE, plans::Edge},
    Sides, gather,
    random::{Stage, pick},
};
use crate::{parallel::grain, simd::rows};

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
    gather(sizes, grain(1), |task, room| {
        let mut seen = Seen::new(sides);
        for (row, room) in (task * of_a_task..).zip(room.chunks_exact_mut(of_a_row)) {
            seen.extend(sides.limit(row));
            if sides.label_q[row] != NONE && sides.keep_q.is_none_or(|keep| keep[row]) {
                seen.draw(row, samples, room);
            }
        }
    })
}

/// The clusters of keys as far as a query sees them.
struct Seen<'a> {
    sides: &'a Sides<'a>,
    /// Keys below this are taken in.
    limit: usize,
    counts: Vec<usize>,
    sums: Vec<f64>,
    means: Vec<f32>,
    /// Clusters whose mean is not that of their sum.
    stale: Vec<usize>,
    products: Vec<f32>,
}

impl<'a> Seen<'a> {
    fn new(sides: &'a Sides<'a>) -> Self {
        let clusters = sides.keys.len();
        Self {
            sides,
            limit: 0,
            counts: vec![0; clusters],
            sums: vec![0.0; clusters * sides.dim],
            means: vec![0.0; clusters * sides.dim],
            stale: Vec::new(),
            products: vec![0.0; clusters],
        }
    }

    /// Takes in the keys below `limit`.
    fn extend(&mut self, limit: usize) {
        let dim = self.sides.dim;
        for key in self.limit..limit {
            let Ok(c) = usize::try_from(self.sides.label_k[key]) else { continue };
            self.counts[c] += 1;
            self.stale.push(c);
            let sum = &mut self.sums[c * dim..][..dim];
            sum.iter_mut().zip(&self.sides.k[key * dim..]).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        self.limit = self.limit.max(limit);
    }

    fn freshen(&mut self) {
        let dim = self.sides.dim;
        self.stale.sort_unstable();
        self.stale.dedup();
        for c in self.stale.drain(..) {
            let mean = self.means[c * dim..].iter_mut().zip(&self.sums[c * dim..][..dim]);
            mean.for_each(|(mean, sum)| *mean = (sum / self.counts[c] as f64) as f32);
        }
    }

    /// The keys of cluster `c` that are seen.
    fn keys(&self, c: usize) -> &'a [u32] {
        &self.sides.keys.of(c)[..self.counts[c]]
    }

    /// Writes the edges of `row` to the front of `room`.
    fn draw(&mut self, row: usize, samples: usize, room: &mut [Edge]) {
        let sides = self.sides;
        let own = sides.label_q[row] as u32;
        let remote = |c: usize| !sides.is_exact(own, c as u32);
        let total: usize = (0..self.counts.len()).filter(|&c| remote(c)).map(|c| self.counts[c]).sum();
        let query = row as u32;
        if total <= samples {
            let keys = (0..self.counts.len()).filter(|&c| remote(c)).flat_map(|c| self.keys(c));
            let edges = keys.map(|&key| Edge { query, key, log_weight: 0.0 });
            room.iter_mut().zip(edges).for_each(|(to, edge)| *to = edge);
            return;
        }
        self.freshen();
        rows::dots(sides.level, &self.means, &sides.q[row * sides.dim..][..sides.dim], &mut self.products);
        let score = |c: usize| match self.counts[c] {
            0 => f64::NEG_INFINITY,
            _ if !remote(c) => f64::NEG_INFINITY,
            n => sides.scale() * f64::from(self.products[c]) + (n as f64).ln(),
        };
        let mut mass: Vec<f64> = (0..self.counts.len()).map(score).collect();
        let most = mass.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(x));
        mass.iter_mut().for_each(|x| *x = (*x - most).exp());
        let sum: f64 = mass.iter().sum();
        let mut stream = sides.stream(Stage::Rows, &[row as u64]);
        let mut drawn = BTreeMap::new();
        for _ in 0..samples {
            let c = pick(mass.iter().copied(), sum, stream.uniform());
            let keys = self.keys(c);
            drawn.entry(keys[stream.below(keys.len())]).or_insert((c, 0_u32)).1 += 1;
        }
        for (to, (key, (c, times))) in room.iter_mut().zip(drawn) {
            let log_share = mass[c].ln() - sum.ln();
            let log_count = (self.counts[c] as f64).ln();
            let log_weight = f64::from(times).ln() - (samples as f64).ln() - log_share + log_count;
            *to = Edge { query, key, log_weight };
        }
    }
}
