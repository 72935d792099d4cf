//! Causal segments token by token: clusters are made once a segment is complete, and never change.

use super::{
    decoding::{Kept, weigh},
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
    /// The segment that goes on, how many tokens it has, and those of them that are not masked, with their places in it.
    segment: usize,
    taken: usize,
    near: Kept,
    places: Vec<usize>,
    /// Tokens of segments before it that are in no cluster.
    free: Kept,
    clusters: Vec<Kept>,
    /// The mean key and value of every cluster.
    mean_keys: Vec<f32>,
    mean_values: Vec<f32>,
}

impl Routed {
    /// Bytes of keys, values and means.
    pub fn bytes(&self) -> usize {
        let kept: usize = self.clusters.iter().chain([&self.near, &self.free]).map(Kept::bytes).sum();
        let places = size_of::<usize>() * self.places.capacity();
        kept + places + size_of::<f32>() * (self.mean_keys.capacity() + self.mean_values.capacity())
    }

    /// Before the first token.
    pub fn new(index: [u64; 2]) -> Self {
        Self {
            index,
            segment: 0,
            taken: 0,
            near: Kept::default(),
            places: Vec::new(),
            free: Kept::default(),
            clusters: Vec::new(),
            mean_keys: Vec::new(),
            mean_values: Vec::new(),
        }
    }

    /// Takes the key and the value of a token in, or its place alone, if it is masked. `codebook [clusters, dim]`, if the call has one.
    pub fn push(&mut self, (m, level): (&Ssa, Level), codebook: Option<&[f32]>, [k, v]: [&[f32]; 2], keep: bool) {
        if let CausalClusters::Segment { size } = m.causal_clusters
            && self.taken == size
        {
            self.close((m, level), size, codebook, [k.len(), v.len()]);
        }
        if keep {
            self.near.push(k, v);
            self.places.push(self.taken);
        }
        self.taken += 1;
    }

    /// Makes the clusters of the segment that is complete.
    fn close(
        &mut self,
        (m, level): (&Ssa, Level),
        size: usize,
        codebook: Option<&[f32]>,
        [dim, value_dim]: [usize; 2],
    ) {
        let (near, places) = (std::mem::take(&mut self.near), std::mem::take(&mut self.places));
        let row = |n: usize| (&near.keys[n * dim..][..dim], &near.values[n * value_dim..][..value_dim]);
        let first = self.segment * size;
        for n in (0..near.count).filter(|n| m.is_global(first + places[*n])) {
            let (k, v) = row(n);
            self.free.push(k, v);
        }
        let made = of_segment((m, level, self.index), codebook, (&near.keys, dim), (self.segment, &places));
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
        self.taken = 0;
    }

    /// `sum = sum_e exp(z_e - max z) v_e` over what the query of the newest token sees; returns what it has to be multiplied by: zero
    /// where all keys so far are masked.
    pub fn row(&self, (m, level): (&Ssa, Level), scale: f64, q: &[f32], sum: &mut [f64]) -> f64 {
        let mut logits = vec![0.0; self.clusters.len()];
        rows::dots(level, &self.mean_keys, q, &mut logits);
        let mass = |c: usize, scale: f64| scale * f64::from(logits[c]) + (self.clusters[c].count as f64).ln();
        let all: Vec<u32> = (0..self.clusters.len() as u32).collect();
        // Plans do not depend on a scale that is learned.
        let planned = m.scale.unwrap_or((q.len() as f64).powf(-0.5));
        let routes = largest(&all, m.routes, |c| mass(c, planned));
        let masses: Vec<f64> = (0..self.clusters.len()).map(|c| mass(c, scale)).collect();
        let far = |mass: f64| if m.estimator == Estimator::Centroid { mass as f32 } else { f32::NEG_INFINITY };
        logits.iter_mut().zip(&masses).for_each(|(z, &mass)| *z = far(mass));
        routes.iter().for_each(|&c| logits[c as usize] = f32::NEG_INFINITY);
        let routed = routes.iter().map(|&c| &self.clusters[c as usize]);
        let exact: Vec<&Kept> = [&self.near, &self.free].into_iter().chain(routed).collect();
        let means = (&mut logits, &self.mean_values[..]);
        let total = weigh(level, (q, scale), means, &exact, f32::NEG_INFINITY, sum).0;
        if total > 0.0 { 1.0 / total } else { 0.0 }
    }
}
