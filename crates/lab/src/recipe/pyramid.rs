//! The pyramid of a recipe.

use resolvent::models::{PyramidConfig, pyramid::StageConfig};
use resolvent_kernels::Mechanism;
use serde::{Deserialize, Serialize};

use super::{Check, WIDEST, check, model::sizes, relatives::related, share};

/// A pyramid by name, and changes to it. Picture size, channels and classes come from the data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PyramidRecipe {
    /// One of [`PyramidConfig::PRESETS`]. Default `soft-mini`.
    pub preset: String,
    /// The four stages, in place of the preset's. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<Box<[StageConfig; 4]>>,
    /// As many pooled landmarks in every stage, whatever its `ratio` and the pictures' size, 1 to 65536, so that the cost is
    /// linear in the pixels: [`PyramidConfig::landmark_count`]. Default none: the ratios decide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub landmark_count: Option<usize>,
    /// One projection for queries and keys. Default: as the mechanism is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tied: Option<bool>,
    /// Learn gamma, per head and block, where the mechanism has one. Default true.
    pub gamma_trainable: bool,
    /// Learn the bandwidth of the Laplacian kernel per head and block. Default false.
    pub lambda_trainable: bool,
    /// Learn the scale of the Gaussian kernel per head and block. Default false.
    pub scale_trainable: bool,
    /// Dropout on embedded tokens, after the attention and after the MLP. Default 0, in [0, 1).
    pub dropout: f64,
    /// Dropout on the attention weights, for mechanisms that have them. Default 0, in [0, 1).
    pub weight_dropout: f64,
    /// Stochastic depth of the last block, rising linearly from 0 at the first. Default 0, in [0, 1).
    pub drop_path: f64,
}

impl PyramidRecipe {
    /// The model with `mechanism` for pictures of `image` height and width.
    ///
    /// # Errors
    /// [`resolvent::Error`] for an unknown preset.
    pub fn config(
        &self,
        mechanism: &Mechanism,
        image: [usize; 2],
        channels: usize,
        classes: usize,
    ) -> resolvent::Result<PyramidConfig> {
        let mut preset = PyramidConfig::preset(&self.preset)?.for_pictures(image, channels, classes);
        // A preset's own mechanism in some stage belongs to its family; another mechanism goes into all of them.
        if !related(&preset.mechanism, mechanism) {
            preset.stages.iter_mut().for_each(|stage| stage.mechanism = None);
        }
        Ok(PyramidConfig {
            mechanism: mechanism.clone(),
            landmark_count: self.landmark_count,
            stages: self.stages.as_deref().unwrap_or(&preset.stages).clone(),
            tied: self.tied,
            gamma_trainable: self.gamma_trainable,
            lambda_trainable: self.lambda_trainable,
            scale_trainable: self.scale_trainable,
            dropout: self.dropout,
            weight_dropout: self.weight_dropout,
            drop_path: self.drop_path,
            ..preset
        })
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        let known = PyramidConfig::PRESETS.contains(&self.preset.as_str());
        let names = "a preset: soft- or laplacian-, then mini, tiny, small, medium, large or huge; or soft-tiny-t1, \
                     soft-code-small, soft-code-medium, soft-code-large, soft-code-huge";
        let count = self.landmark_count.unwrap_or(1);
        let mut checks = vec![
            check("model.preset", &self.preset, known, names),
            check("model.landmark_count", count, (1..=WIDEST).contains(&count), "1 to 65536"),
            check("model.dropout", self.dropout, share(self.dropout), "in [0, 1)"),
            check("model.weight_dropout", self.weight_dropout, share(self.weight_dropout), "in [0, 1)"),
            check("model.drop_path", self.drop_path, share(self.drop_path), "in [0, 1)"),
        ];
        for stage in self.stages.iter().flat_map(|stages| stages.iter()) {
            checks.extend(sizes(stage.dim, stage.depth, stage.heads, stage.mlp_ratio.saturating_mul(stage.dim)));
        }
        checks
    }
}

impl Default for PyramidRecipe {
    fn default() -> Self {
        Self {
            preset: "soft-mini".into(),
            stages: None,
            landmark_count: None,
            tied: None,
            gamma_trainable: true,
            lambda_trainable: false,
            scale_trainable: false,
            dropout: 0.0,
            weight_dropout: 0.0,
            drop_path: 0.0,
        }
    }
}
