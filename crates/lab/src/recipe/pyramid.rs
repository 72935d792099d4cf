//! The pyramid of a recipe.

use resolvent::models::{PyramidConfig, pyramid::StageConfig};
use resolvent_kernels::Mechanism;
use serde::{Deserialize, Serialize};

use super::{
    Check, WIDEST, check,
    model::{dropouts, sizes},
    relatives::related,
    share,
};

/// A pyramid by name, and changes to it. Picture size, channels and classes come from the data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PyramidRecipe {
    /// The library's configuration, whose fields stand beside these. Of no account are image, channels, classes, mechanism, precision and
    /// strategy, and what the preset says: embedding, stride, stages, positions and pool.
    #[serde(skip, default = "config")]
    pub config: Box<PyramidConfig>,
    /// One of [`PyramidConfig::PRESETS`]. Default `soft-mini`.
    pub preset: String,
    /// The four stages, in place of the preset's. Default none.
    pub stages: Option<Box<[StageConfig; 4]>>,
}

const DEFAULT: &str = "soft-mini";

fn config() -> Box<PyramidConfig> {
    Box::new(PyramidConfig::preset(DEFAULT).expect("a preset"))
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
        let mut preset = PyramidConfig::preset(&self.preset)?;
        // A preset's own mechanism in some stage belongs to its family; another mechanism goes into all of them.
        if !related(&preset.mechanism, mechanism) {
            preset.stages.iter_mut().for_each(|stage| stage.mechanism = None);
        }
        let PyramidConfig { embedding, stride, positions, pool, .. } = preset;
        Ok(PyramidConfig {
            image,
            channels,
            classes,
            mechanism: mechanism.clone(),
            embedding,
            stride,
            stages: self.stages.as_deref().unwrap_or(&preset.stages).clone(),
            positions,
            pool,
            ..*self.config.clone()
        })
    }

    /// Those that stages have in place of `mechanism`.
    pub(super) fn mechanisms(&self, mechanism: &Mechanism) -> Vec<Mechanism> {
        let built = self.config(mechanism, [224; 2], 3, 1000);
        built
            .map_or_else(|_| Vec::new(), |built| built.stages.into_iter().filter_map(|stage| stage.mechanism).collect())
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        let known = PyramidConfig::PRESETS.contains(&self.preset.as_str());
        let names = "a preset: soft- or laplacian-, then mini, tiny, small, medium, large or huge; or soft-tiny-t1, \
                     soft-code-small, soft-code-medium, soft-code-large, soft-code-huge";
        let PyramidConfig { landmark_count, dropout, weight_dropout, drop_path, .. } = *self.config;
        let count = landmark_count.unwrap_or(1);
        let mut checks = vec![
            check("model.preset", &self.preset, known, names),
            check("model.landmark_count", count, (1..=WIDEST).contains(&count), "1 to 65536"),
            check("model.drop_path", drop_path, share(drop_path), "in [0, 1)"),
        ];
        checks.extend(dropouts(dropout, weight_dropout));
        for stage in self.stages.iter().flat_map(|stages| stages.iter()) {
            checks.extend(sizes(stage.dim, stage.depth, stage.heads, stage.mlp_ratio.saturating_mul(stage.dim)));
        }
        checks
    }
}

impl Default for PyramidRecipe {
    fn default() -> Self {
        Self { config: config(), preset: DEFAULT.into(), stages: None }
    }
}
