//! Token by token: the sums of one head over all keys so far, which stand for them.

use std::sync::Arc;

use super::{
    check_entries,
    map::{self, Directions, Map},
    product::Products,
    state::FLOOR,
};
use crate::{
    Result, Shape,
    mechanism::Features,
    simd::{Level, rows},
};

/// What maps the tokens of a step.
pub(crate) struct Decoder {
    directions: Option<Arc<Directions>>,
    level: Level,
    dim: usize,
    features: usize,
    channels: usize,
    /// The score's scale, of every head.
    scales: Vec<f64>,
}

/// `S` and `z` of one head, in units of `2^unit`.
#[derive(Debug, Clone)]
pub(crate) struct Past {
    unit: f32,
    /// `[features][channels + 1]`: products with values, and the features alone.
    sums: Vec<f64>,
    /// One token's features.
    row: Vec<f32>,
}

impl Past {
    pub fn bytes(&self) -> usize {
        size_of::<f64>() * self.sums.len() + size_of::<f32>() * self.row.len()
    }
}

impl Decoder {
    pub fn new(m: &Features, level: Level, token: &Shape, scales: Vec<f64>) -> Self {
        let (dim, channels) = (token.head_dim, token.value_dim);
        Self { directions: Directions::of(m, dim), level, dim, features: map::count(m, dim), channels, scales }
    }

    /// No key.
    pub fn past(&self) -> Past {
        let map = self.map(0);
        Past { unit: FLOOR, sums: vec![0.0; self.features * (self.channels + 1)], row: vec![0.0; map.width()] }
    }

    /// Whether the tokens of a step have features in f32.
    ///
    /// # Errors
    /// [`crate::Error::Range`].
    pub fn check(&self, q: &[f32], k: &[f32]) -> Result<()> {
        let largest = [q, k].map(|x| rows::max_abs(self.level, x));
        let scale = self.scales.iter().copied().fold(0.0, f64::max);
        if self.directions.is_some() { check_entries(largest, scale, self.dim) } else { Ok(()) }
    }

    fn map(&self, head: usize) -> Map<'_> {
        let root = self.scales[head].sqrt() as f32;
        Map {
            level: self.level,
            bf16: None,
            dim: self.dim,
            count: self.features,
            directions: self.directions.as_deref(),
            root,
        }
    }

    /// Takes a key and its value of head `head` in.
    pub fn push(&self, past: &mut Past, head: usize, k: &[f32], v: &[f32]) {
        let Past { unit, sums, row } = past;
        let mut level = [0.0];
        self.map(head).features(&mut Products::full(self.level), k, true, (row, &mut level));
        let [level] = level;
        if level > *unit {
            let by = f64::from(*unit - level).exp2();
            sums.iter_mut().for_each(|sum| *sum *= by);
            *unit = level;
        }
        let by = f64::from(level - *unit).exp2();
        for (psi, sums) in row.iter().zip(sums.chunks_exact_mut(self.channels + 1)) {
            let weight = by * f64::from(*psi);
            sums.iter_mut().zip(v).for_each(|(sum, v)| *sum += weight * f64::from(*v));
            sums[self.channels] += weight;
        }
    }

    /// Writes the sum of the values of all keys, weighed by query `q`; returns what its weights sum to.
    pub fn row(&self, past: &mut Past, head: usize, q: &[f32], sum: &mut [f64]) -> f64 {
        let products = &mut Products::full(self.level);
        self.map(head).features(products, q, false, (&mut past.row, &mut [0.0]));
        sum.fill(0.0);
        let mut weights = 0.0;
        for (psi, sums) in past.row.iter().zip(past.sums.chunks_exact(self.channels + 1)) {
            let psi = f64::from(*psi);
            sum.iter_mut().zip(sums).for_each(|(sum, x)| *sum += psi * x);
            weights += psi * sums[self.channels];
        }
        weights
    }
}
