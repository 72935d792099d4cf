//! What a configuration may say.

use resolvent_kernels::{self as kernels, Dropout};

use super::{MultiHeadAttentionConfig, field};
use crate::{
    Error, Mechanism, Parameter, Precision, Shape, Strategy,
    attention::Learned,
    mechanism::{Bias, GlobalTokens, Landmarks, Ssa},
};

impl MultiHeadAttentionConfig {
    /// Checks every field, and that the mechanism is defined for self-attention.
    ///
    /// # Errors
    /// [`Error::Heads`], [`Error::Field`], [`Error::Mechanism`].
    pub fn validate(&self) -> Result<(), Error> {
        let Self { d_model, n_heads, .. } = *self;
        field("d_model", d_model, d_model >= 1, "at least 1")?;
        field("n_heads", n_heads, n_heads >= 1, "at least 1")?;
        if !d_model.is_multiple_of(n_heads) {
            return Err(Error::Heads { d_model, n_heads });
        }
        self.check_dropout()?;
        self.check_precision()?;
        let layer = self.decay.layer;
        field("layer", layer, layer >= 1, "at least 1: layers are counted from 1")?;
        let mechanism = self.operator();
        self.check_tied(&mechanism)?;
        if mechanism.parameters().contains(&Parameter::GivenLandmarks) {
            let (what, why) = ("given landmarks in a module", "they come with a call; use `attend`");
            return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
        }
        if let Some(m) = mechanism.projected() {
            let expected = "the longest sequence: a module learns a column of its maps for every token";
            field("structure.max_tokens", "null", m.max_tokens.is_some(), expected)?;
        }
        if let Some(Bias::Tensor(_)) = mechanism.bias {
            let (what, why) = ("a bias of kind tensor in a module", "it comes with a call; use `attend`");
            return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
        }
        self.check_groups(&mechanism)?;
        let span = self.clusters.causal_span;
        field("causal_span", span.unwrap_or(1), span != Some(0), "null or at least 1")?;
        self.clusters.codebook.map_or(Ok(None), |codebook| codebook.validate(&mechanism))?;
        mechanism.check(&Shape::square(1, n_heads, least_tokens(&mechanism), d_model / n_heads), false)?;
        self.check_positions(&mechanism)?;
        self.check_orthogonal(&mechanism)?;
        Learned::check(&self.starts(&mechanism))
    }

    fn check_dropout(&self) -> Result<(), Error> {
        let [output, weights] = [self.dropout.output, self.dropout.weights];
        field("dropout", output, (0.0..1.0).contains(&output), "in [0, 1)")?;
        field("weight_dropout", weights, (0.0..1.0).contains(&weights), "in [0, 1)")?;
        if weights > 0.0 {
            Dropout::weights(weights, 0)?.check(&self.mechanism)?;
        }
        Ok(())
    }

    /// Products of less than f32 are those of the kernels.
    fn check_precision(&self) -> Result<(), Error> {
        if self.precision == Precision::Full {
            return Ok(());
        }
        field("ternary", self.projection.ternary, !self.projection.ternary, "false with precision bf16")?;
        let kernels = matches!(self.strategy, Strategy::Auto | Strategy::Fused);
        field("strategy", self.strategy, kernels, "auto or fused with precision bf16")
    }

    fn check_positions(&self, mechanism: &Mechanism) -> Result<(), Error> {
        let (positions, head_dim) = (&self.positions, self.d_model / self.n_heads);
        let planar = mechanism.grid().or(positions.grid).is_some();
        let whole = head_dim.is_multiple_of(if planar { 4 } else { 2 });
        let expected = "a multiple of 4 with `rotary` on a grid, even with `rotary` in a sequence";
        field("head_dim", head_dim, whole || !positions.rotary, expected)?;
        let side = positions.value_conv.side();
        field("value_conv.side", side.unwrap_or(0), side.is_none_or(|side| side % 2 == 1), "odd")
    }

    fn check_orthogonal(&self, mechanism: &Mechanism) -> Result<(), Error> {
        let orthogonal = self.projection.orthogonal;
        field("orthogonal", orthogonal, !(orthogonal && self.projection.ternary), "false with ternary weights")?;
        let with_queries = mechanism.projections() > 1;
        field("orthogonal", orthogonal, with_queries || !orthogonal, "false: there are no queries to map")
    }

    /// `tied` must be what the mechanism is; without queries and keys it says nothing, so that a control may have any.
    fn check_tied(&self, mechanism: &Mechanism) -> Result<(), Error> {
        let (is, control) = (mechanism.tied, mechanism.projections() == 1);
        let expected =
            if is { "true or absent: keys are queries here" } else { "false or absent: keys are not queries here" };
        field("tied", !is, control || self.projection.tied.is_none_or(|tied| tied == is), expected)
    }

    /// Whether queries can share keys and values as configured.
    fn check_groups(&self, mechanism: &Mechanism) -> Result<(), Error> {
        let heads = self.kv_heads();
        field("kv_heads", heads, heads >= 1 && self.n_heads.is_multiple_of(heads), "a divisor of `n_heads`")?;
        if heads == self.n_heads {
            return Ok(());
        }
        if mechanism.tied {
            let (what, why) = (
                "kv_heads below n_heads",
                "queries are keys here, so that there are as many; set tied to false where it can be",
            );
            return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
        }
        let orthogonal = self.projection.orthogonal;
        field("orthogonal", orthogonal, !orthogonal, "false with grouped keys, whose map is no square")
    }
}

/// Tokens that a sequence needs for the positions, grids and landmarks that the configuration names.
fn least_tokens(mechanism: &Mechanism) -> usize {
    if let Some(Bias::Grid(m)) = mechanism.bias {
        return m.height.saturating_mul(m.width);
    }
    match (mechanism.landmark_kind(), mechanism.clustering()) {
        (Some(landmarks), _) => least_for_landmarks(mechanism.grid(), landmarks),
        (_, Some(clusters)) => least_for_clusters(&clusters),
        _ => 1,
    }
}

fn least_for_landmarks(grid: Option<[usize; 2]>, landmarks: Landmarks) -> usize {
    match (grid, landmarks) {
        (Some([height, width]), _) => height.saturating_mul(width),
        (None, Landmarks::Random { count, .. } | Landmarks::First { count }) => count,
        (None, Landmarks::Conv { ratio }) => ratio,
        _ => 1,
    }
}

fn least_for_clusters(m: &Ssa) -> usize {
    match &m.global_tokens {
        Some(GlobalTokens::At(positions)) => positions.iter().max().map_or(1, |&last| last.saturating_add(1)),
        _ => 1,
    }
}
