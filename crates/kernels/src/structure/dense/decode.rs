//! One query of fractional neural attention before all keys so far: decoding.

use crate::mechanism::{DistanceKernel, Fna, Manifold};

/// One head's kernel.
#[derive(Clone, Copy)]
pub(crate) struct Decoder<'a> {
    pub m: &'a Fna,
    pub kappa: f64,
    /// `d_M + alpha`.
    pub power: f64,
}

impl Decoder<'_> {
    /// The distances of `q` from keys.
    pub fn distances(&self, q: &[f32], k: &[f32], out: &mut [f32]) {
        for (r, k) in out.iter_mut().zip(k.chunks_exact(q.len())) {
            *r = self.distance(q, k) as f32;
        }
    }

    /// Makes weights `exp(s_j - max s)` of distances, 0 of an infinite one.
    pub fn weigh(&self, distances: &mut [f32]) {
        // The kernels fall with the distance: the nearest key has the largest score.
        let nearest = distances.iter().fold(f32::INFINITY, |least, r| least.min(*r));
        let most = self.score(nearest.into());
        distances.iter_mut().for_each(|r| *r = (self.score((*r).into()) - most).exp() as f32);
    }

    fn distance(&self, q: &[f32], k: &[f32]) -> f64 {
        let pairs = || q.iter().zip(k).map(|(&q, &k)| (f64::from(q), f64::from(k)));
        if self.m.manifold == Manifold::Euclidean {
            return pairs().map(|(q, k)| (q - k).powi(2)).sum::<f64>().sqrt();
        }
        let (square_q, square_k) = pairs().fold((0.0, 0.0), |(qs, ks), (q, k)| (qs + q * q, ks + k * k));
        let (length_q, length_k) = (square_q.sqrt(), square_k.sqrt());
        if length_q.min(length_k) <= 1e-12 {
            return std::f64::consts::FRAC_PI_2;
        }
        let chord = |sign: f64| pairs().map(|(q, k)| (q / length_q + sign * k / length_k).powi(2)).sum::<f64>().sqrt();
        2.0 * chord(-1.0).atan2(chord(1.0))
    }

    /// The logarithm of the affinity at distance `r`.
    fn score(&self, r: f64) -> f64 {
        let z = r / self.kappa;
        match self.m.kernel {
            _ if self.m.is_gaussian() => -z * z,
            DistanceKernel::Levy => -self.power * z.ln_1p(),
            DistanceKernel::Student => -0.5 * self.power * (z * z).ln_1p(),
        }
    }
}
