//! The parts of a recipe, and their defaults.

use serde::{Deserialize, Serialize};

/// AdamW ("Decoupled Weight Decay Regularization"); biases, norms, the class token, positions and gamma do not decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimiserRecipe {
    /// Learning rate at the end of the warm-up. Default 1e-3, > 0.
    pub lr: f64,
    /// Decay of the two moments. Default [0.9, 0.999], in [0, 1).
    pub betas: [f64; 2],
    /// Added to the root of the second moment. Default 1e-8, > 0.
    pub eps: f64,
    /// Weight decay, times the learning rate per step. Default 0.05, >= 0.
    pub weight_decay: f64,
    /// Largest norm of the gradient of all parameters together; 0 switches clipping off. Default 1.
    pub clip_norm: f64,
}

impl Default for OptimiserRecipe {
    fn default() -> Self {
        Self { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.05, clip_norm: 1.0 }
    }
}

/// Linear warm-up, then half a cosine, step by step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleRecipe {
    /// Passes over the training pictures. Default 10, >= 1.
    pub epochs: usize,
    /// Pictures per step. Default 128, >= 1.
    pub batch_size: usize,
    /// Epochs, also fractions of one, in which the learning rate grows from 0. Default 1, >= 0, < `epochs`.
    pub warmup_epochs: f64,
    /// The last learning rate as a share of `optimiser.lr`. Default 0.01, in [0, 1].
    pub final_lr_share: f64,
    /// Most steps of the run, whatever `epochs` says; the warm-up shrinks with them. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<usize>,
    /// Minutes that the run may take; a few steps are timed first, and where the epochs do not fit, the whole schedule
    /// is shortened to what does. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_minutes: Option<f64>,
}

impl Default for ScheduleRecipe {
    fn default() -> Self {
        Self {
            epochs: 10,
            batch_size: 128,
            warmup_epochs: 1.0,
            final_lr_share: 0.01,
            max_steps: None,
            max_minutes: None,
        }
    }
}

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
    /// Epochs without a better accuracy on the examples that are held out or for validation, after which the run ends with its
    /// best weights. Default none; needs such examples.
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
