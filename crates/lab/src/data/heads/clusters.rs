//! Tokens that form clusters, more or less: what sparse attention is compared with dense attention on. "Spectral Sparse
//! Attention", section 4.4 and table 6, whose own data are unknown.

use std::fmt;

use super::{Head, normal};
use crate::data::{
    Result,
    rng::{Purpose, stream},
    settings::{Choice, Field, check, read_into},
};

/// Settings of the generated head. The same settings give the same head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clusters {
    /// Seed of everything random. Default 0.
    pub seed: u64,
    /// Tokens, 2 to 1048576. Default 1024.
    pub tokens: usize,
    /// Channels of every token, 1 to 1024. Default 32.
    pub dim: usize,
    /// What queries and keys are made of. Default near.
    pub kind: ClusterKind,
}

/// How queries, keys and values are related. `g` are independent standard normal vectors; values are such unless said otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ClusterKind {
    /// `q = 0.7 g`, `k = q + 0.35 g'`: no clusters, but a key for every query.
    #[default]
    Near,
    /// Around 32 centres `c`: `q = 0.5 (c + 0.2 g)`, `k = 0.5 (c + 0.2 g')`.
    Planted,
    /// `q = g`, `k = g'`.
    Independent,
    /// `q = W x`, `k = W' x`, `v = W'' x` of one token `x`, as in a layer, by three random matrices of unit variance.
    Projected,
}

/// Clusters of planted tokens.
const CENTRES: usize = 32;

impl Default for Clusters {
    fn default() -> Self {
        Self { seed: 0, tokens: 1024, dim: 32, kind: ClusterKind::Near }
    }
}

impl Clusters {
    /// Reads `seed=0,tokens=1024,dim=32,kind=near`; what is left out has its default.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::data::Error::Setting) for an unknown setting, one given twice or a value outside its range.
    pub fn parse(text: &str) -> Result<Self> {
        let mut clusters = Self::default();
        let fields: &mut [(&str, &mut dyn Field)] = &mut [
            ("seed", &mut clusters.seed),
            ("tokens", &mut clusters.tokens),
            ("dim", &mut clusters.dim),
            ("kind", &mut clusters.kind),
        ];
        read_into("clusters", text, "one of seed, tokens, dim, kind, each followed by `=` and a value", fields)?;
        clusters.validate()?;
        Ok(clusters)
    }

    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::data::Error::Setting) naming the first setting outside its range.
    pub fn validate(&self) -> Result<()> {
        super::check_tokens(self.tokens, 2)?;
        check("dim", self.dim, (1..=1024).contains(&self.dim), "1 to 1024")
    }

    /// Draws the head.
    ///
    /// # Errors
    /// Those of [`Clusters::validate`].
    pub fn generate(&self) -> Result<Head> {
        self.validate()?;
        let Self { tokens, dim, .. } = *self;
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

impl Choice for ClusterKind {
    const ALL: &'static [Self] = &[Self::Near, Self::Planted, Self::Independent, Self::Projected];
    const NAMES: &'static str = "near, planted, independent or projected";
}

impl fmt::Display for ClusterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Near => "near",
            Self::Planted => "planted",
            Self::Independent => "independent",
            Self::Projected => "projected",
        })
    }
}

impl fmt::Display for Clusters {
    /// The settings as [`Clusters::parse`] reads them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, tokens, dim, kind } = self;
        write!(f, "seed={seed},tokens={tokens},dim={dim},kind={kind}")
    }
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
            let head = Clusters { tokens: 4000, kind, ..Clusters::default() }.generate().unwrap();
            for (x, expected) in [&head.q, &head.k, &head.v].into_iter().zip([expected[0], expected[1], 1.0]) {
                // Planted tokens share 32 centres, projected ones three matrices.
                let got = mean_square(x);
                assert!((got / expected - 1.0).abs() < 0.12, "{kind}: {got} instead of {expected}");
            }
        }
    }

    #[test]
    fn planted_tokens_are_near_their_centres() {
        let settings = Clusters::parse("seed=2,tokens=96,dim=8,kind=planted").unwrap();
        let Head { q, k, .. } = settings.generate().unwrap();
        let apart = |i: usize, j: usize| (0..8).map(|c| (q[i * 8 + c] - k[j * 8 + c]).powi(2)).sum::<f32>();
        let near: f32 = (0..64).map(|i| apart(i, i + 32)).sum();
        let far: f32 = (0..64).map(|i| apart(i, i + 1)).sum();
        assert!(near < far / 5.0, "{near} {far}");
    }

    #[test]
    fn the_settings_alone_decide() {
        for &kind in ClusterKind::ALL {
            let settings = Clusters { kind, tokens: 20, ..Clusters::default() };
            assert_eq!(Clusters::parse(&settings.to_string()).unwrap(), settings);
            assert_eq!(settings.generate().unwrap(), settings.generate().unwrap());
            assert_ne!(settings.generate().unwrap(), Clusters { seed: 4, ..settings }.generate().unwrap());
        }
        for (settings, field) in [
            ("tokens=1", "tokens"),
            ("kind=odd", "kind"),
            ("size=3", "clusters"),
            ("dim=0", "dim"),
            ("dim=3,tokens=4,dim=5", "clusters"),
        ] {
            let message = Clusters::parse(settings).unwrap_err().to_string();
            assert!(message.contains(&format!("`{field}`")), "{message}");
        }
    }
}
