//! Causal segments token by token: clusters are made once a segment is complete, and never change.

use super::{
    decoding::Kept,
    planner::{largest, of_segment},
};
use crate::{
    mechanism::{CausalClusters, Estimator, Ssa},
    simd::{Level, rows},
};

/// What one head keeps of the tokens so far.
#[derive(Debug, Clone)]
pub(crate) struct Routed {
    /// Batch entry and head, which draws depend on.
    index: [u64; 2],
    /// The segment that goes on, and the tokens that it has.
    segment: usize,
    near: Kept,
    /// Tokens of segments before it that are in no cluster.
    free: Kept,
    clusters: Vec<Kept>,
    /// The mean key and value of every cluster.
    mean_keys: Vec<f32>,
    mean_values: Vec<f32>,
}

impl Routed {
    /// Before the first token.
    pub fn new(index: [u64; 2]) -> Self {
        Self {
            index,
            segment: 0,
            near: Kept::default(),
            free: Kept::default(),
            clusters: Vec::new(),
            mean_keys: Vec::new(),
            mean_values: Vec::new(),
        }
    }

    /// Takes the key and the value of a token in. `codebook [clusters, dim]`, if the call has one.
    pub fn push(&mut self, (m, level): (&Ssa, Level), codebook: Option<&[f32]>, [k, v]: [&[f32]; 2]) {
        if let CausalClusters::Segment { size } = m.causal_clusters
            && self.near.count == size
        {
            self.close(m, level, codebook, [k.len(), v.len()]);
        }
        self.near.push(k, v);
    }

    /// Makes the clusters of the segment that is complete.
    fn close(&mut self, m: &Ssa, level: Level, codebook: Option<&[f32]>, [dim, value_dim]: [usize; 2]) {
        let near = std::mem::take(&mut self.near);
        let row = |n: usize| (&near.keys[n * dim..][..dim], &near.values[n * value_dim..][..value_dim]);
        let first = self.segment * near.count;
        for n in (0..near.count).filter(|n| m.is_global(first + n)) {
            let (k, v) = row(n);
            self.free.push(k, v);
        }
        let made = of_segment((m, level, self.index), codebook, (&near.keys, dim), self.segment);
        for members in made {
            let mut cluster = Kept::default();
            for n in members {
                let (k, v) = row(n);
                cluster.push(k, v);
            }
            let mean = |sum: &f64| (sum / cluster.count as f64) as f32;
            self.mean_keys.extend(cluster.sum_keys.iter().map(mean));
            self.mean_values.extend(cluster.sum_values.iter().map(mean));
            self.clusters.push(cluster);
        }
        self.segment += 1;
    }

    /// `sum = sum_e exp(z_e - max z) v_e` over what the query of the newest token sees; returns what it has to be multiplied by.
    pub fn row(&self, (m, level): (&Ssa, Level), scale: f64, q: &[f32], sum: &mut [f64]) -> f64 {
        let mut logits = vec![0.0; self.clusters.len()];
        rows::dots(level, &self.mean_keys, q, &mut logits);
        let masses: Vec<f64> =
            logits.iter().zip(&self.clusters).map(|(&z, c)| scale * f64::from(z) + (c.count as f64).ln()).collect();
        let all: Vec<u32> = (0..masses.len() as u32).collect();
        let routes = largest(&all, m.routes, |c| masses[c]);
        let centroid = m.estimator == Estimator::Centroid;
        logits
            .iter_mut()
            .zip(&masses)
            .for_each(|(z, &mass)| *z = if centroid { mass as f32 } else { f32::NEG_INFINITY });
        routes.iter().for_each(|&c| logits[c as usize] = f32::NEG_INFINITY);
        let routed = routes.iter().map(|&c| &self.clusters[c as usize]);
        let exact: Vec<&Kept> = [&self.near, &self.free].into_iter().chain(routed).collect();
        for kept in &exact {
            let from = logits.len();
            logits.resize(from + kept.count, 0.0);
            rows::dots(level, &kept.keys, q, &mut logits[from..]);
            logits[from..].iter_mut().for_each(|z| *z = (scale * f64::from(*z)) as f32);
        }
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        logits.iter_mut().for_each(|z| *z = (*z - most).exp());
        sum.fill(0.0);
        let (means, mut rest) = logits.split_at(self.clusters.len());
        rows::accumulate(level, means, &self.mean_values, 1.0, sum);
        for kept in exact {
            let (weights, after) = rest.split_at(kept.count);
            rows::accumulate(level, weights, &kept.values, 1.0, sum);
            rest = after;
        }
        1.0 / logits.iter().map(|&w| f64::from(w)).sum::<f64>()
    }
}
