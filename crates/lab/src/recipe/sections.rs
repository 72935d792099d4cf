//! The parts of a recipe, and their defaults.

use serde::{Deserialize, Serialize};

/// Soft targets, averaging and stopping.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegularisationRecipe {
    /// Share of the target that is spread over all classes. Default 0.1, in [0, 1).
    pub label_smoothing: f64,
    /// Decay of the exponential moving average of the weights, which is then what is evaluated; 0 switches it off.
    /// Default 0, in [0, 1).
    pub ema_decay: f64,
    /// Share of every class of the training examples that is held out; it picks the best epoch and stops early.
    /// 0: the curves show the test examples, and nothing is picked. Default 0, in [0, 0.5]; an error where the data set has a
    /// validation part of its own.
    pub hold_out: f64,
    /// Epochs without a better score (accuracy, BLEU of translators, bits per byte of language models) on the examples that are held out or
    /// for validation, after which the run ends with its best weights. Default none; needs such examples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<usize>,
}

impl Default for RegularisationRecipe {
    fn default() -> Self {
        Self { label_smoothing: 0.1, ema_decay: 0.0, hold_out: 0.0, patience: None }
    }
}

/// Metrics and checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogRecipe {
    /// Steps between two lines of metrics. Default 20, >= 1.
    pub every: usize,
    /// Steps between two checkpoints beside those at the end of each epoch; 0 for none. Default 0.
    pub checkpoint_every: usize,
    /// Checkpoints kept beside the best. Default 2, >= 1.
    pub keep: usize,
}

impl Default for LogRecipe {
    fn default() -> Self {
        Self { every: 20, checkpoint_every: 0, keep: 2 }
    }
}
