//! What follows from the four values: what a call needs, and what others may ask.

use super::{
    Bias, Dense, FeatureMap, Form, Landmarks, LinearInfsa, Mechanism, Normalisation, OneHop, Projected, Score, Series,
    Ssa, Structure,
};
use crate::{Error, Parameter, Result, Shape};

impl Mechanism {
    /// The configured decay, where the mechanism has one.
    pub fn gamma(&self) -> Option<f64> {
        let damped = match self.own() {
            Some(form) => form.parameters().contains(&Parameter::Gamma),
            None => !matches!(self.series, Series::OneHop(OneHop { gamma: 1.0 })),
        };
        damped.then(|| self.series.gamma())
    }

    /// Whether it ends an iteration early where that has converged: a plan counts operations for the most steps that it may take.
    pub fn iterates(&self) -> bool {
        let steps =
            matches!(&self.structure, Structure::Nystrom(m) if m.landmarks != Landmarks::All && m.inverse.iterates());
        steps || matches!(self.series, Series::Resolvent(_))
    }

    /// How tokens are clustered, where they are.
    pub fn clustering(&self) -> Option<Ssa> {
        let Structure::Clustered(structure) = &self.structure else { return None };
        Some(structure.ssa(self.planned_scale(), self.causal))
    }

    /// [`Mechanism::clustering`], or a refusal.
    pub(crate) fn clusters(&self) -> Result<Ssa> {
        let why = "only clustered mechanisms attend along clusters";
        self.clustering().ok_or(Error::Unsupported { mechanism: self.id(), what: "a plan of clusters", why })
    }

    /// The scale of the products by which a planner ranks clusters and draws edges: the score's where it has one, else the default.
    pub(crate) const fn planned_scale(&self) -> Option<f64> {
        match &self.score {
            Score::DotExp(m) => m.scale,
            Score::DotSigmoid(m) => m.scale,
            Score::DotRelu(m) | Score::DotAbs(m) | Score::DotGelu(m) | Score::DotSquaredRelu(m) => m.scale,
            _ => None,
        }
    }

    /// Whether the score comes from outside.
    pub(crate) const fn is_custom(&self) -> bool {
        matches!(self.score, Score::Custom(_))
    }

    /// The window of a dense structure.
    pub(crate) fn window(&self) -> Dense {
        if let Structure::Dense(dense) = &self.structure { dense.clone() } else { Dense::default() }
    }

    /// Whether one mask is for queries and keys alike.
    pub fn masks_tokens_once(&self) -> bool {
        matches!(self.own(), Some(Form::Soft(_) | Form::SoftPp(_)))
    }

    /// Whether each row depends on its own query alone, and on the keys that this sees.
    pub fn is_row_local(&self) -> bool {
        if self.projections() == 1 {
            return true;
        }
        let alone = match &self.normalisation {
            Normalisation::Row(m) => m.density_exponent == 0.0,
            Normalisation::None(_) => true,
            _ => false,
        };
        let pairs = match &self.structure {
            Structure::Dense(_) | Structure::Features(_) => true,
            Structure::Clustered(structure) => structure.routes_queries(),
            _ => false,
        };
        // A bias of distances is the same for a query whatever queries there are beside it.
        let bias = matches!(self.bias, None | Some(Bias::Alibi(_) | Bias::Buckets(_)));
        // What has one map for queries and keys has neither a causal form nor one for other keys.
        let once = self.masks_tokens_once();
        alone && pairs && bias && !once && matches!(self.series, Series::OneHop(_))
    }

    /// Whether rows have a log-sum-exp: one hop over pairs, divided by the sums of rows of positive affinities.
    pub fn has_row_sums(&self) -> bool {
        let pairs = matches!(self.structure, Structure::Dense(_) | Structure::Clustered(_));
        let rows = matches!(self.normalisation, Normalisation::Row(_)) && self.score.is_log();
        pairs && rows && matches!(self.series, Series::OneHop(_))
    }

    /// How many rows of a token it reads, of queries, keys and values: all three, two where the keys are the queries, and values alone
    /// where all pairs have one score.
    pub fn projections(&self) -> usize {
        match self.own() {
            Some(Form::Uniform(_)) => 1,
            _ if self.tied => 2,
            _ => 3,
        }
    }

    /// Whether it is part of what the preset is that keys are the queries, or are not: `uniform` reads neither, `ssa` both, `soft` and
    /// `soft-pp` one of them.
    pub fn fixes_tying(&self) -> bool {
        matches!(self.own(), Some(Form::Uniform(_) | Form::Ssa(_) | Form::Soft(_) | Form::SoftPp(_)))
    }

    /// Whether landmarks are filtered channel by channel and not by full matrices, as in "LaplacianFormer: Rethinking Linear Attention
    /// with Laplacian Kernel".
    pub fn filters_by_channel(&self) -> bool {
        matches!(self.own(), Some(Form::Laplacian(_)))
    }

    /// How tokens are weighed that are pooled to one value for all queries, of what was made as `linear-infsa`.
    pub fn pooling(&self) -> Option<LinearInfsa> {
        if let Some(Form::LinearInfsa(m)) = self.own() { Some(m) } else { None }
    }

    /// Whether all queries get one pooled value.
    pub(crate) const fn is_pooled(&self) -> bool {
        matches!(self.structure, Structure::Pooled(_))
    }

    /// How many combinations of all keys stand for these, where the structure is [`Structure::Projected`].
    pub const fn projected(&self) -> Option<&Projected> {
        if let Structure::Projected(m) = &self.structure { Some(m) } else { None }
    }

    /// Whether heads of one call have numbers of their own that nobody learned, the slopes or entries of a bias or maps per head: a head that
    /// is called with others, or alone, would have others' numbers.
    pub fn tells_heads_apart(&self) -> bool {
        self.bias.is_some() || self.projected().is_some_and(|m| m.per_head)
    }

    /// The projected structure, and the same values over the projected keys and values, where there are such.
    pub(crate) fn over_projections(&self) -> Option<(&Projected, Self)> {
        let projected = self.projected()?;
        Some((projected, Self { structure: Structure::default(), tied: false, name: None, ..self.clone() }))
    }

    /// The map of features, where the structure is one.
    pub const fn feature_map(&self) -> Option<FeatureMap> {
        if let Structure::Features(m) = &self.structure { Some(m.map) } else { None }
    }

    /// What is allowed and likely a mistake, with the remedy. See [`Mechanism::caution_at`].
    pub fn caution(&self) -> Option<&'static str> {
        if let Structure::Nystrom(m) = &self.structure { m.soft().caution() } else { None }
    }

    /// What is likely a mistake in calls of sizes `shape`, beside [`Mechanism::caution`]: a single landmark for several tokens,
    /// more than 256 landmarks of a kind whose number grows with the tokens, and more projected keys than keys.
    pub fn caution_at(&self, shape: &Shape) -> Option<&'static str> {
        if self.projected().is_some_and(|m| m.count > shape.seq_kv) {
            return Some(
                "there are more projected keys than keys, so that every pair of tokens would cost less; set `count` to fewer",
            );
        }
        let landmarks = self.landmark_kind()?;
        match self.landmarks(shape)? {
            1 if shape.seq_kv > 1 => Some(
                "a single landmark stands for all tokens, which then differ only by how near they are to it; set `landmarks` to \
                 more, as {\"kind\": \"pool\", \"count\": 4} does",
            ),
            count if count > MANY_LANDMARKS && landmarks.grow() => Some(
                "there are more landmarks for more tokens, and the cost is not linear in the tokens; set `landmarks` to a fixed \
                 number, as {\"kind\": \"pool\", \"count\": 49} does",
            ),
            _ => None,
        }
    }

    /// Rows of `out` per head: `seq_q`, or 1 where the mechanism returns its pooled value once.
    pub const fn out_seq(&self, shape: &Shape) -> usize {
        match &self.structure {
            Structure::Pooled(m) if !m.broadcast => 1,
            _ => shape.seq_q,
        }
    }
}

/// Beyond this the cost of landmarks whose number grows is worth a word: five times the papers' 49.
const MANY_LANDMARKS: usize = 256;
