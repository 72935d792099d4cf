//! Mechanisms in Rust: presets by name, and the four values of any of them replaced.

use super::{
    Composed, Fna, Infsa, InfsaResolvent, Laplacian, LaplacianExact, LinearInfsa, Mechanism, Normalisation, Score,
    Series, Soft, Softmax, Ssa, Structure, Uniform,
};

/// Constructors of presets with their defaults.
macro_rules! presets {
    ($($name:ident: $variant:ident($fields:expr), $about:literal;)+) => {
        impl Mechanism {
            $(#[doc = $about]
            pub fn $name() -> Self {
                Self::$variant($fields)
            })+
        }
    };
}

presets! {
    softmax: Softmax(Softmax::default()), "Dense softmax.";
    uniform: Uniform(Uniform::default()), "The mean of the values.";
    infsa: Infsa(Infsa::default()), "Pure InfSA, \"Infinite Self-Attention\".";
    infsa_resolvent: InfsaResolvent(InfsaResolvent::default()), "The resolvent of Pure InfSA.";
    linear_infsa: LinearInfsa(LinearInfsa::default()), "Linear InfSA.";
    soft: Soft(Soft::default()), "SOFT, \"Softmax-free Linear Transformers\".";
    soft_pp: SoftPp(Soft::plus()), "SOFT++.";
    fna: Fna(Fna::default()), "\"Fractional neural attention for efficient multiscale sequence processing\".";
    laplacian: Laplacian(Laplacian::default()), "\"LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel\".";
    laplacian_exact: LaplacianExact(LaplacianExact::default()), "The kernel of LaplacianFormer, every pair of it.";
    ssa: Ssa(Ssa::default()), "Spectral sparse attention.";
}

/// `softmax`: what values are that are left out.
impl Default for Mechanism {
    fn default() -> Self {
        Self::softmax()
    }
}

/// Presets of fields that say which they are.
macro_rules! from_fields {
    ($($variant:ident)+) => {
        $(impl From<$variant> for Mechanism {
            fn from(fields: $variant) -> Self {
                Self::$variant(fields)
            }
        })+
    };
}

from_fields! { Softmax Infsa InfsaResolvent LinearInfsa Fna Laplacian LaplacianExact Ssa }

impl Mechanism {
    /// `score`, densely, rows normalised, one hop.
    ///
    /// ```
    /// use resolvent_kernels::mechanism::*;
    /// let levy = Score::Levy(PowerLaw::default().with_alpha(1.5));
    /// let over_clusters = Mechanism::new(levy).structure(Ssa::default().with_clusters(Some(16)));
    /// let diffused = Mechanism::ssa().series(Resolvent::default().with_gamma(0.8));
    /// assert_eq!(over_clusters.to_string(), "levy x clustered x row x one-hop");
    /// assert_eq!(diffused.to_string(), "dot-exp x clustered x row x resolvent");
    /// ```
    pub fn new(score: impl Into<Score>) -> Self {
        Composed::new(score).into()
    }

    /// The same with another score.
    #[must_use]
    pub fn score(self, score: impl Into<Score>) -> Self {
        Composed { score: score.into(), ..self.values() }.into()
    }

    /// The same with another structure.
    #[must_use]
    pub fn structure(self, structure: impl Into<Structure>) -> Self {
        self.values().structure(structure).into()
    }

    /// The same with another normalisation.
    #[must_use]
    pub fn normalisation(self, normalisation: impl Into<Normalisation>) -> Self {
        self.values().normalisation(normalisation).into()
    }

    /// The same with another series.
    #[must_use]
    pub fn series(self, series: impl Into<Series>) -> Self {
        self.values().series(series).into()
    }

    /// The same with keys that are the queries, or not.
    #[must_use]
    pub fn with_tied(self, tied: bool) -> Self {
        match self {
            _ if self.tied() == tied => self,
            Self::Softmax(m) => Self::Softmax(Softmax { tied, ..m }),
            Self::Infsa(m) => Self::Infsa(Infsa { tied, ..m }),
            Self::InfsaResolvent(m) => Self::InfsaResolvent(InfsaResolvent { tied, ..m }),
            Self::LinearInfsa(m) => Self::LinearInfsa(LinearInfsa { tied, ..m }),
            Self::Fna(m) => Self::Fna(Fna { tied, ..m }),
            Self::Laplacian(m) => Self::Laplacian(Laplacian { tied, ..m }),
            Self::LaplacianExact(m) => Self::LaplacianExact(LaplacianExact { tied, ..m }),
            other => other.values().tied(tied).into(),
        }
    }

    /// Whether it is part of what the preset is that keys are the queries, or are not: `uniform` reads neither, `ssa` both, `soft` and
    /// `soft-pp` one of them.
    pub const fn fixes_tying(&self) -> bool {
        matches!(self, Self::Uniform(_) | Self::Ssa(_) | Self::Soft(_) | Self::SoftPp(_))
    }

    /// The same with queries that see no later key, or with ones that see all.
    #[must_use]
    pub fn with_causal(self, causal: bool) -> Self {
        match self {
            Self::Softmax(m) => Self::Softmax(Softmax { causal, ..m }),
            Self::Uniform(Uniform { .. }) => Self::Uniform(Uniform { causal }),
            Self::Infsa(m) => Self::Infsa(Infsa { causal, ..m }),
            Self::InfsaResolvent(m) => Self::InfsaResolvent(InfsaResolvent { causal, ..m }),
            Self::LinearInfsa(m) => Self::LinearInfsa(LinearInfsa { causal, ..m }),
            Self::Soft(m) => Self::Soft(Soft { causal, ..m }),
            Self::SoftPp(m) => Self::SoftPp(Soft { causal, ..m }),
            Self::Fna(m) => Self::Fna(Fna { causal, ..m }),
            Self::Laplacian(m) => Self::Laplacian(Laplacian { causal, ..m }),
            Self::LaplacianExact(m) => Self::LaplacianExact(LaplacianExact { causal, ..m }),
            Self::Ssa(m) => Self::Ssa(Ssa { causal, ..m }),
            Self::Composed(m) => m.causal(causal).into(),
        }
    }
}
