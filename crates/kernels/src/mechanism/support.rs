//! Which compositions are defined. Refusals follow from properties of the values, never from a list of names.

use super::{
    Centering, Degree, Estimator, Inverse, Landmarks, Manifold, Mechanism, NewtonInit, Normalisation, Nystrom, Score,
    Series, Structure, Whitening,
    structure::FeatureMap,
    valid::{check, check_kappa, check_scale},
};
use crate::{Error, Result, Shape};

/// What is refused, and why.
type Refusal = (&'static str, &'static str);

impl Mechanism {
    /// Checks every field of a composition against its range, and the values against each other.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the field; [`Error::Unsupported`] for a combination that is not defined.
    pub(super) fn check_values(&self) -> Result<()> {
        self.score.validate()?;
        if let Score::CosineExp(m) = &self.score {
            self.check_scale(m.scale)?;
        }
        self.structure.validate()?;
        self.normalisation.validate()?;
        self.series.validate()?;
        self.bias.map_or(Ok(()), |bias| bias.validate())?;
        if let (Structure::Clustered(structure), true) = (&self.structure, self.causal) {
            structure.ssa(None, true).validate()?;
        }
        self.refused()
    }

    /// Whether `scale` is one that the score may have. The affinities of cosines are not taken relative to a largest one among
    /// landmarks, nor where they are whitened, by variances, and the steps of Newton-Schulz begin at the square of their sums: beyond 40 these leave f32.
    pub(super) fn check_scale(&self, scale: f64) -> Result<()> {
        if !matches!(self.score, Score::CosineExp(_)) {
            return check_scale(Some(scale));
        }
        let iterated = matches!(&self.structure, Structure::Nystrom(m) if m.inverse == Inverse::NewtonSchulz);
        let held =
            matches!(self.structure, Structure::Nystrom(_)) && !matches!(self.normalisation, Normalisation::Factors(_));
        let whitened = matches!(self.normalisation, Normalisation::Whitened(_));
        let (most, expected) = match (held, iterated) {
            (false, _) if whitened => (40.0, "in [1e-18, 40] where the affinities of columns are squared"),
            (false, _) => (1e4, "in [1e-18, 1e4]"),
            (true, true) => (40.0, "in [1e-18, 40] through landmarks that newton-schulz inverts"),
            (true, false) => (80.0, "in [1e-18, 80] through landmarks"),
        };
        check("score.scale", scale, (1e-18..=most).contains(&scale), expected)
    }

    /// Whether the four values go together, whatever they are applied to.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn refused(&self) -> Result<()> {
        let refusal = self.score_refused().or(self.normalisation_refused()).or(self.series_refused());
        let refusal = refusal.or(self.bias_refused());
        let causal = if self.causal { self.causal_refused() } else { None };
        self.refusal(refusal.or(causal))
    }

    fn refusal(&self, refusal: Option<Refusal>) -> Result<()> {
        refusal.map_or(Ok(()), |(what, why)| Err(Error::Unsupported { mechanism: self.id(), what, why }))
    }

    /// Whether the structure can hold the score.
    fn score_refused(&self) -> Option<Refusal> {
        let factors = matches!(self.normalisation, Normalisation::Factors(_));
        match &self.structure {
            Structure::Nystrom(_) if matches!(self.score, Score::Constant(_)) => {
                Some(("a constant score through landmarks", "no landmark is nearer to a token than any other"))
            }
            Structure::Nystrom(_) if factors => (!self.score.is_log()).then_some((
                "factors of a linear score",
                "sums of rows of both signs may be zero in one factor and not in another; use a score whose affinities are positive",
            )),
            Structure::Nystrom(_) if !self.score.is_positive_definite() => Some((
                "this score through landmarks",
                "the affinities between landmarks are not known to be positive definite, so that their inverse need not exist",
            )),
            Structure::Nystrom(_) if !self.score.is_bounded() => Some((
                "this score through landmarks",
                "its affinities have no bound, so that no ridge fits the matrix that is inverted; cosine-exp has one",
            )),
            Structure::Features(_) if !matches!(&self.score, Score::DotExp(m) if m.softcap.is_none()) => {
                Some(("this score as features", "the maps of features stand for dot-exp without a softcap"))
            }
            Structure::Pooled(_) => Some((
                "the pooled structure, composed",
                "it weighs tokens, not pairs: use the presets `uniform` and `linear-infsa`",
            )),
            _ => None,
        }
    }

    /// Whether the structure has what the normalisation needs.
    fn normalisation_refused(&self) -> Option<Refusal> {
        let nystrom = matches!(self.structure, Structure::Nystrom(_));
        match (&self.normalisation, &self.structure) {
            (Normalisation::Factors(_), Structure::Nystrom(m)) => m.factors_refused(),
            (Normalisation::Factors(_), _) => Some(("factors without landmarks", "only nystrom has factors; use row")),
            (Normalisation::Row(m), Structure::Nystrom(_) | Structure::Features(_) | Structure::Projected(_))
                if m.density_exponent != 0.0 =>
            {
                Some((
                    "density_exponent without pairs",
                    "a density is divided out of single pairs; use dense or clustered",
                ))
            }
            (Normalisation::Row(_), _) => None,
            (
                Normalisation::Frobenius(_) | Normalisation::Symmetric(_) | Normalisation::Whitened(_),
                Structure::Projected(_),
            ) => Some((
                "this normalisation of projected keys",
                "norms and sums of columns would be of projected keys, none of which is a token; use row or none",
            )),
            (_, Structure::Features(_)) => Some((
                "features without normalisation row",
                "the maps estimate affinities up to a factor per row alone",
            )),
            (Normalisation::Frobenius(_), Structure::Nystrom(_)) => {
                Some(("frobenius through landmarks", "the sum of squares is over pairs that are never formed; use row"))
            }
            (Normalisation::Symmetric(m), _) if m.degree == Some(Degree::Landmark) && !nystrom => {
                Some(("degree landmark without landmarks", "only nystrom has landmarks; use token"))
            }
            (Normalisation::Whitened(m), _) if nystrom => (m.whitening == Whitening::Full).then_some((
                "whitening full through landmarks",
                "it stores a matrix of all keys by all keys; use diagonal",
            )),
            (Normalisation::Whitened(_), Structure::Clustered(_)) => Some((
                "whitened on clusters",
                "column statistics are over all pairs, of which a clustered graph has few",
            )),
            (Normalisation::Whitened(_), _) if !(self.score.is_log() && self.score.is_bounded()) => Some((
                "whitened with this score",
                "statistics of columns need affinities with a bound: cosine-exp, gaussian, levy, student, laplacian, constant",
            )),
            _ => None,
        }
    }

    /// Whether the series converges, and over what.
    fn series_refused(&self) -> Option<Refusal> {
        match (&self.series, &self.normalisation, &self.structure) {
            (Series::Limit(_), ..) => {
                Some(("the limit of a composed mechanism", "it is of pooled weights: use the preset `linear-infsa`"))
            }
            (Series::Hops(_) | Series::Resolvent(_), _, Structure::Projected(_)) => Some((
                "a series over projected keys",
                "weights lead from tokens to a fixed number of projected keys: they are not square, and there is no second hop",
            )),
            (Series::Resolvent(_), _, Structure::Nystrom(_)) => Some((
                "the resolvent through landmarks",
                "the operator has entries of both signs and no bound below one: the series need not converge; use hops",
            )),
            (Series::Resolvent(_), Normalisation::Whitened(_) | Normalisation::None(_), _) => Some((
                "the resolvent of this normalisation",
                "its weights are no contraction: the series need not converge; use row, frobenius, symmetric or hops",
            )),
            (Series::Resolvent(_), Normalisation::Symmetric(_), _) if !self.score.is_non_negative() => Some((
                "the resolvent of symmetric with a score of both signs",
                "the weights are no contraction: the series need not converge; use row or frobenius",
            )),
            _ => None,
        }
    }

    /// Whether there are pairs that a bias may be added to.
    fn bias_refused(&self) -> Option<Refusal> {
        self.bias?;
        match (&self.structure, &self.normalisation) {
            (Structure::Clustered(m), _) if m.ssa(None, false).estimator == Estimator::Centroid => Some((
                "a bias with centroids",
                "a mean of a cluster stands for keys at many places; use an estimator of single pairs",
            )),
            (_, Normalisation::Whitened(_)) => Some((
                "a bias with whitened",
                "statistics of columns are of the tokens' affinities; use another normalisation",
            )),
            (Structure::Dense(_) | Structure::Clustered(_), _) => None,
            _ => Some((
                "a bias without pairs",
                "only dense and clustered structures form pairs that it could be added to",
            )),
        }
    }

    /// What sees the future.
    fn causal_refused(&self) -> Option<Refusal> {
        match (&self.normalisation, &self.structure) {
            (_, Structure::Nystrom(_)) => {
                Some(("causal", "every landmark, and the inverse between them, mixes past and future"))
            }
            (_, Structure::Projected(_)) => Some((
                "causal",
                "every projected key and value mixes past and future: no row of the maps ends at a query",
            )),
            (Normalisation::Symmetric(_), _) => Some(("causal with symmetric", "column sums see later rows; use row")),
            (Normalisation::Whitened(m), _) if m.whitening != Whitening::None || m.centering == Centering::PerKey => {
                Some((
                    "causal with whitening or centering per-key",
                    "column statistics see the future; set whitening to none and centering to per-query or none",
                ))
            }
            (Normalisation::Frobenius(_), _) if matches!(self.series, Series::Resolvent(_)) => Some((
                "causal frobenius with the resolvent",
                "rows divided by the norms of the rows so far are no contraction; use row, or one hop",
            )),
            _ => None,
        }
    }

    /// Whether the composition is defined for these sizes and for causality.
    pub(super) fn check_values_at(&self, shape: &Shape, causal: bool) -> Result<()> {
        let cross = shape.seq_q != shape.seq_kv;
        if causal {
            self.refusal(self.causal_refused())?;
        }
        let density = matches!(&self.normalisation, Normalisation::Row(m) if m.density_exponent != 0.0);
        let refusal = match (&self.normalisation, &self.score) {
            _ if cross && !matches!(self.series, Series::OneHop(_)) => {
                Some(("a series in cross-attention", "it repeats a square operator; use one-hop"))
            }
            _ if cross && matches!(&self.structure, Structure::Nystrom(m) if m.value_conv > 0) => Some((
                "value_conv in cross-attention",
                "it adds the values around every query to its output; set value_conv to 0",
            )),
            (Normalisation::Factors(_), _)
                if cross && matches!(&self.structure, Structure::Nystrom(m) if m.grid.is_some()) =>
            {
                Some(("factors on a grid in cross-attention", "queries and keys have one grid; set it to null"))
            }
            (Normalisation::Row(_), _) if density && cross => Some((
                "density_exponent != 0 with seq_q != seq_kv",
                "it divides by the degrees of the keys as queries; set density_exponent to 0",
            )),
            (Normalisation::Frobenius(_), _) if causal && cross => {
                Some(("causal with seq_q != seq_kv", "the prefix norm needs every earlier row"))
            }
            (_, Score::Levy(m) | Score::Student(m)) if m.manifold == Manifold::Sphere && shape.head_dim < 2 => {
                Some(("the sphere with head_dim < 2", "two points are no sphere; use more channels or the plane"))
            }
            (Normalisation::Whitened(m), _) if m.whitening == Whitening::Full && shape.seq_kv > 1024 => Some((
                "whitening full beyond 1024 keys",
                "it stores and decomposes a matrix of all keys by all keys; use diagonal",
            )),
            _ if causal && shape.seq_q > shape.seq_kv => {
                Some(("causal with seq_q > seq_kv", "the first queries would see no key; pass only the last seq_kv"))
            }
            _ => None,
        };
        self.refusal(refusal)?;
        self.bias.map_or(Ok(()), |bias| bias.check_support(self.id(), shape))?;
        if let Score::Levy(_) | Score::Student(_) = self.score {
            // What a rule makes of the sizes.
            check_kappa(self.score.as_fna().resolve(shape.head_dim, shape.heads).kappa)?;
        }
        match &self.structure {
            Structure::Clustered(m) => m.ssa(None, causal).check_support(shape, causal),
            Structure::Nystrom(m) => m.soft().check_landmarks_fit(shape),
            Structure::Projected(m) => m.check_support(shape),
            _ => Ok(()),
        }
    }
}

impl Nystrom {
    /// Whether queries and keys can both have landmarks of this kind, and the matrix between those an inverse.
    fn factors_refused(&self) -> Option<Refusal> {
        if !matches!(self.landmarks, Landmarks::Pool(_)) {
            return Some((
                "factors with these landmarks",
                "queries and keys both need some: only pool makes them of both",
            ));
        }
        if self.inverse != Inverse::NewtonSchulz || self.newton_init != Some(NewtonInit::Scaled) {
            let why = "the matrix between landmarks of queries and of keys is not symmetric: use inverse newton-schulz with \
                       newton_init scaled, which starts at its transpose";
            return Some(("factors with this inverse", why));
        }
        let plain = !self.landmark_act && self.value_conv == 0;
        (!plain).then_some((
            "factors with landmark_act or value_conv",
            "its landmarks are means; a filter over the values is an option of the module",
        ))
    }
}

impl Inverse {
    /// Whether it ends early where it has converged.
    pub(super) const fn iterates(self) -> bool {
        matches!(self, Self::NewtonSchulz | Self::Cg)
    }
}

impl FeatureMap {
    /// Whether features are drawn at random.
    pub const fn is_random(self) -> bool {
        matches!(self, Self::Favor)
    }
}
