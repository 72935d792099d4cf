//! Tokens that form clusters, more or less: what sparse attention is compared with dense attention on. "Spectral Sparse
//! Attention", section 4.4 and table 6, whose own data are unknown.

use resolvent_kernels::Result;
use resolvent_lab::{
    data::rng::{Purpose, stream},
    named,
};

use super::{Head, normal, refused};

/// Settings of the generated head. The same settings give the same head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clusters {
    /// Seed of everything random.
    pub seed: u64,
    /// Tokens, at least 2.
    pub tokens: usize,
    /// Channels of every token, at least 1.
    pub dim: usize,
    /// What queries and keys are made of.
    pub kind: ClusterKind,
}

named! {
    /// How queries, keys and values are related. `g` are independent standard normal vectors; values are such unless said otherwise.
    pub enum ClusterKind {
        /// `q = 0.7 g`, `k = q + 0.35 g'`: no clusters, but a key for every query.
        Near = "near",
        /// Around 32 centres `c`: `q = 0.5 (c + 0.2 g)`, `k = 0.5 (c + 0.2 g')`.
        Planted = "planted",
        /// `q = g`, `k = g'`.
        Independent = "independent",
        /// `q = W x`, `k = W' x`, `v = W'' x` of one token `x`, as in a layer, by three random matrices of unit variance.
        Projected = "projected",
    }
}

/// Clusters of planted tokens.
const CENTRES: usize = 32;

impl Clusters {
    /// Draws the head.
    ///
    /// # Errors
    /// Too few tokens, or no channels.
    pub fn generate(&self) -> Result<Head> {
        let Self { tokens, dim, .. } = *self;
        if tokens < 2 || dim < 1 {
            return Err(refused(format!("has {tokens} tokens of {dim} channels; clusters have 2 of 1 at least")));
        }
        let mut rng = stream(Purpose::Clusters, self.seed, tokens as u64, self.kind as u64);
        let [first, second, v] = [(); 3].map(|()| normal(&mut rng, tokens * dim));
        let mix =
            |x: &[f32], a: f32, y: &[f32], b: f32| x.iter().zip(y).map(|(x, y)| a * x + b * y).collect::<Vec<_>>();
        let (q, k, v) = match self.kind {
            ClusterKind::Near => {
                let q: Vec<f32> = first.iter().map(|x| 0.7 * x).collect();
                let k = mix(&q, 1.0, &second, 0.35);
                (q, k, v)
            }
            ClusterKind::Planted => {
                let centres = normal(&mut rng, CENTRES * dim);
                let centre: Vec<f32> = (0..tokens * dim).map(|at| centres[at % (CENTRES * dim)]).collect();
                (mix(&centre, 0.5, &first, 0.1), mix(&centre, 0.5, &second, 0.1), v)
            }
            ClusterKind::Independent => (first, second, v),
            ClusterKind::Projected => [(); 3].map(|()| project(&normal(&mut rng, dim * dim), &first, dim)).into(),
        };
        Ok(Head { tokens, dim, q, k, v })
    }
}

/// `W x / sqrt(dim)` for every row `x`.
fn project(w: &[f32], x: &[f32], dim: usize) -> Vec<f32> {
    let norm = (dim as f32).sqrt();
    let product = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>() / norm;
    x.chunks_exact(dim).flat_map(|x| w.chunks_exact(dim).map(move |w| product(w, x))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean_square(x: &[f32]) -> f32 {
        x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32
    }

    #[test]
    fn every_kind_has_its_variances() {
        for (&kind, expected) in ClusterKind::ALL.iter().zip([[0.49, 0.6125], [0.26, 0.26], [1.0, 1.0], [1.0, 1.0]]) {
            let head = Clusters { seed: 0, tokens: 4000, dim: 32, kind }.generate().unwrap();
            for (x, expected) in [&head.q, &head.k, &head.v].into_iter().zip([expected[0], expected[1], 1.0]) {
                // Planted tokens share 32 centres, projected ones three matrices.
                let got = mean_square(x);
                assert!((got / expected - 1.0).abs() < 0.12, "{kind}: {got} instead of {expected}");
            }
        }
    }

    #[test]
    fn planted_tokens_are_near_their_centres() {
        let settings = Clusters { seed: 2, tokens: 96, dim: 8, kind: ClusterKind::Planted };
        let Head { q, k, .. } = settings.generate().unwrap();
        let apart = |i: usize, j: usize| (0..8).map(|c| (q[i * 8 + c] - k[j * 8 + c]).powi(2)).sum::<f32>();
        let near: f32 = (0..64).map(|i| apart(i, i + 32)).sum();
        let far: f32 = (0..64).map(|i| apart(i, i + 1)).sum();
        assert!(near < far / 5.0, "{near} {far}");
    }

    #[test]
    fn the_settings_alone_decide() {
        for &kind in ClusterKind::ALL {
            let settings = Clusters { seed: 0, tokens: 20, dim: 32, kind };
            assert_eq!(settings.generate().unwrap(), settings.generate().unwrap());
            assert_ne!(settings.generate().unwrap(), Clusters { seed: 4, ..settings }.generate().unwrap());
            assert!(Clusters { dim: 0, ..settings }.generate().unwrap_err().to_string().contains("0 channels"));
        }
    }
}
