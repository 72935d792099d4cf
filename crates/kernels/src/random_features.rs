//! The directions of positive orthogonal random features, for fast paths and the reference alike: a constant of a mechanism.
//!
//! Only the four operations, roots and a logarithm in software go into a draw, so that it is the same on every platform.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// `count` directions `w [count, dim]`: blocks of `dim` orthogonal rows, each as long as a standard normal vector of its own, so that
/// every row alone is standard normal. "Rethinking Attention with Performers", section 3.2 (orthogonal random features). A larger count
/// only adds rows. The numbers are f32, so that all arithmetic has the same ones.
pub(crate) fn directions(seed: u64, count: usize, dim: usize) -> Vec<f64> {
    let mut normal = Normal::new(seed, 0);
    let mut rows: Vec<f64> = Vec::with_capacity(count * dim);
    // The block at its full precision: rows that are rounded are not orthogonal to it.
    let mut block: Vec<f64> = Vec::with_capacity(dim * dim);
    for row in 0..count {
        if row % dim == 0 {
            block.clear();
        }
        let unit = normal.direction(dim, &block);
        let length = norm(&normal.vector(dim));
        rows.extend(unit.iter().map(|x| f64::from((x * length) as f32)));
        block.extend(unit);
    }
    rows
}

/// Standard normal numbers: Marsaglia's polar method, which makes two at a time.
pub(crate) struct Normal {
    rng: ChaCha8Rng,
    spare: Option<f64>,
}

impl Normal {
    /// Draws that depend on `seed` and `stream` alone.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Self { rng, spare: None }
    }

    /// Uniform in (-1, 1).
    fn uniform(&mut self) -> f64 {
        let unit = (self.rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        2.0 * unit - 1.0
    }

    pub fn next(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let (x, y) = (self.uniform(), self.uniform());
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                let factor = (-2.0 * libm::log(square) / square).sqrt();
                self.spare = Some(factor * y);
                return factor * x;
            }
        }
    }

    fn vector(&mut self, dim: usize) -> Vec<f64> {
        (0..dim).map(|_| self.next()).collect()
    }

    /// A row at length one and orthogonal to those of `block`, to which it is the next of an orthogonal matrix drawn uniformly: a
    /// normal vector, from which the block is taken out twice for the sake of rounding.
    fn direction(&mut self, dim: usize, block: &[f64]) -> Vec<f64> {
        loop {
            let mut row = self.vector(dim);
            let before = norm(&row);
            for other in block.chunks_exact(dim).chain(block.chunks_exact(dim)) {
                let along: f64 = other.iter().zip(&row).map(|(x, y)| x * y).sum();
                row.iter_mut().zip(other).for_each(|(x, y)| *x -= along * y);
            }
            let length = norm(&row);
            // What is left of a vector within the block is rounding.
            if length > 1e-6 * before {
                row.iter_mut().for_each(|x| *x /= length);
                return row;
            }
        }
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(x: &[f64], y: &[f64]) -> f64 {
        x.iter().zip(y).map(|(x, y)| x * y).sum()
    }

    #[test]
    fn blocks_are_orthogonal_and_more_rows_change_none() {
        let (dim, count) = (7, 17);
        let all = directions(3, count, dim);
        let rows: Vec<&[f64]> = all.chunks_exact(dim).collect();
        for (i, x) in rows.iter().enumerate() {
            for (j, y) in rows.iter().enumerate().filter(|(j, _)| i / dim == j / dim && i != *j) {
                assert!(dot(x, y).abs() < 1e-6 * norm(x) * norm(y), "{i} {j}");
            }
        }
        assert_eq!(all[..5 * dim], directions(3, 5, dim));
        assert_ne!(all, directions(4, count, dim));
        assert!(all.iter().all(|&x| f64::from(x as f32) == x));
        assert!(directions(0, 9, 1).iter().all(|x| x.is_finite() && *x != 0.0));
    }

    #[test]
    fn entries_are_standard_normal() {
        let all = directions(1, 4096, 16);
        let moment = |power: i32| all.iter().map(|x| x.powi(power)).sum::<f64>() / all.len() as f64;
        assert!(moment(1).abs() < 0.02 && (moment(2) - 1.0).abs() < 0.02 && (moment(4) - 3.0).abs() < 0.15);
    }

    /// A draw is part of a trained model: it stays.
    #[test]
    fn a_seed_is_one_draw() {
        let drawn: Vec<f32> = directions(0, 2, 2).into_iter().map(|x| x as f32).collect();
        assert_eq!(drawn, [0.369_190_7, -0.060_176_29, 0.092_645_85, 0.568_396_33]);
    }
}
