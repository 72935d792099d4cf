//! Mechanisms in Rust: presets by name, and the four values of any of them replaced.

use super::{
    Bias, Features, Fna, Form, Infsa, InfsaResolvent, Landmarks, Laplacian, LaplacianExact, LinearInfsa, Mechanism,
    Normalisation, Projected, Score, Series, Soft, Softmax, Ssa, Structure, Uniform,
};
use crate::Parameter;

/// Constructors of presets with their defaults.
macro_rules! presets {
    ($($name:ident: $variant:ident($fields:expr), $about:literal;)+) => {
        impl Mechanism {
            $(#[doc = $about]
            pub fn $name() -> Self {
                Form::$variant($fields).into()
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

/// Presets of their fields.
macro_rules! from_fields {
    ($($variant:ident)+) => {
        $(impl From<$variant> for Mechanism {
            /// Checked where it is bound to sizes.
            fn from(fields: $variant) -> Self {
                Form::$variant(fields).into()
            }
        })+
    };
}

from_fields! { Softmax Uniform Infsa InfsaResolvent LinearInfsa Fna Laplacian LaplacianExact Ssa }

impl From<Soft> for Mechanism {
    /// `soft`, or, with degrees, `soft-pp`.
    fn from(fields: Soft) -> Self {
        if fields.degree.is_some() { Form::SoftPp(fields).into() } else { Form::Soft(fields).into() }
    }
}

impl Mechanism {
    /// `score`, densely, rows normalised, one hop.
    pub fn new(score: impl Into<Score>) -> Self {
        Self {
            score: score.into(),
            structure: Structure::default(),
            normalisation: Normalisation::default(),
            series: Series::default(),
            bias: None,
            tied: false,
            causal: false,
            name: None,
        }
    }

    /// The same with another score.
    #[must_use]
    pub fn score(self, score: impl Into<Score>) -> Self {
        Self { score: score.into(), ..self.composed() }
    }

    /// The same with another structure.
    #[must_use]
    pub fn structure(self, structure: impl Into<Structure>) -> Self {
        Self { structure: structure.into(), ..self.composed() }
    }

    /// The same with another normalisation.
    #[must_use]
    pub fn normalisation(self, normalisation: impl Into<Normalisation>) -> Self {
        Self { normalisation: normalisation.into(), ..self.composed() }
    }

    /// The same with another series.
    #[must_use]
    pub fn series(self, series: impl Into<Series>) -> Self {
        Self { series: series.into(), ..self.composed() }
    }

    /// The same with a bias on the logits of pairs.
    #[must_use]
    pub fn bias(self, bias: impl Into<Bias>) -> Self {
        Self { bias: Some(bias.into()), ..self.composed() }
    }

    /// The same with keys that are the queries, or not.
    #[must_use]
    pub fn with_tied(self, tied: bool) -> Self {
        if self.tied == tied { self } else { Self { tied, ..self }.settled() }
    }

    /// The same with queries that see no later key, or with ones that see all.
    #[must_use]
    pub fn with_causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// The same mechanism with `change` applied to its decay, where it has one.
    #[must_use]
    pub fn with_gamma(mut self, change: impl FnOnce(f64) -> f64) -> Self {
        if self.own().is_none_or(|form| form.parameters().contains(&Parameter::Gamma)) {
            let gamma = self.series.gamma_mut();
            *gamma = change(*gamma);
        }
        self
    }

    /// The same mechanism, told how many tokens a sequence has at most, where learned maps have a column for each; one whose configuration
    /// says how many is unchanged.
    #[must_use]
    pub fn with_max_tokens(mut self, number: usize) -> Self {
        if let Structure::Projected(m) = &mut self.structure {
            m.max_tokens.get_or_insert(number);
        }
        self
    }

    /// The same mechanism with so many combinations of all keys standing for these, where the structure is [`Structure::Projected`].
    #[must_use]
    pub fn with_projected(mut self, count: usize) -> Self {
        if let Structure::Projected(m) = &mut self.structure {
            m.count = count;
        }
        self
    }

    /// The same mechanism with another seed for what it draws: landmarks, clusters and sampled edges, random features, maps.
    #[must_use]
    pub fn with_seed(mut self, number: u64) -> Self {
        match &mut self.structure {
            Structure::Features(Features { seed, .. }) | Structure::Projected(Projected { seed, .. }) => *seed = number,
            Structure::Clustered(m) => m.set_seed(number),
            _ => {}
        }
        self.with_landmarks(|landmarks| match landmarks {
            Landmarks::Random { count, .. } => Landmarks::Random { count, seed: number },
            other => other,
        })
    }

    /// The same mechanism with a row for every query, also where it would return a common one once.
    #[must_use]
    pub fn with_every_row(mut self) -> Self {
        if let Structure::Pooled(m) = &mut self.structure {
            m.broadcast = true;
        }
        self
    }
}
