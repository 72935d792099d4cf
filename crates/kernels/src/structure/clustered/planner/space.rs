//! The space in which tokens are near each other: their own, that of rows of unit length, or a random projection of either.

use std::borrow::Cow;

use super::{Stage, Stream};
use crate::{
    mechanism::{ClusterMetric, Ssa},
    simd::{Level, rows},
};

/// How rows of `dim` channels become points that are clustered.
#[derive(Debug, Clone)]
pub(in super::super) struct Space {
    dim: usize,
    unit: bool,
    /// `[jl_dim, dim]`: keeps distances; "Spectral Sparse Attention", section 3.12.
    projection: Option<Vec<f32>>,
}

impl Space {
    pub fn of(m: &Ssa, dim: usize) -> Self {
        let projection = m.jl_dim.map(|to| projection(m.seed, to, dim));
        Self { dim, unit: m.cluster_metric == ClusterMetric::Cosine, projection }
    }

    /// Channels of a point.
    pub fn dim(&self) -> usize {
        self.projection.as_ref().map_or(self.dim, |phi| phi.len() / self.dim)
    }

    /// The point of a row.
    pub fn point<'x>(&self, level: Level, row: &'x [f32]) -> Cow<'x, [f32]> {
        let row = if self.unit { Cow::Owned(unit(row)) } else { Cow::Borrowed(row) };
        let Some(phi) = &self.projection else { return row };
        let mut point = vec![0.0; self.dim()];
        rows::dots(level, phi, &row, &mut point);
        Cow::Owned(point)
    }

    /// The points of the rows `tokens` of `x [.., dim]`, at the same rows.
    pub fn points<'x>(&self, level: Level, x: &'x [f32], tokens: &[u32]) -> Cow<'x, [f32]> {
        if !self.unit && self.projection.is_none() {
            return Cow::Borrowed(x);
        }
        let to = self.dim();
        let mut points = vec![0.0; x.len() / self.dim * to];
        for n in tokens.iter().map(|&n| n as usize) {
            points[n * to..][..to].copy_from_slice(&self.point(level, &x[n * self.dim..][..self.dim]));
        }
        Cow::Owned(points)
    }
}

/// The matrix `[to, from]` of a random projection.
fn projection(seed: u64, to: usize, from: usize) -> Vec<f32> {
    let mut stream = Stream::new(seed, &[Stage::Projection as u64]);
    let norm = (to as f64).sqrt();
    (0..to * from).map(|_| (stream.normal() / norm) as f32).collect()
}

/// A row over its length; zeros stay.
fn unit(row: &[f32]) -> Vec<f32> {
    let length = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let factor = if length > 0.0 { 1.0 / length } else { 0.0 };
    row.iter().map(|&x| (factor * f64::from(x)) as f32).collect()
}
