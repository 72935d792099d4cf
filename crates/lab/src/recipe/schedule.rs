//! The schedule of a recipe: how long, and how the learning rate falls after its warm-up.

use serde::{Deserialize, Deserializer, Serialize};

use super::{Check, LONGEST, check, least, section::by_kind};

/// How long a run is, and its learning rates: a linear warm-up, then what `kind` says, step by step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScheduleRecipe {
    /// How the rate falls. Default `cosine`.
    #[serde(flatten)]
    pub decay: Decay,
    /// Passes over the training examples. Default 10, >= 1.
    pub epochs: usize,
    /// Examples per batch. Default 128, >= 1.
    pub batch_size: usize,
    /// Batches per step: their gradients are averaged, so that a step is that of one batch as large as all of them. Default 1, >= 1.
    pub accumulate: usize,
    /// Epochs, also fractions of one, in which the learning rate grows from 0. Default 1, >= 0, < `epochs`.
    pub warmup_epochs: f64,
    /// Most steps of the run, whatever `epochs` says; the warm-up shrinks with them. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<usize>,
    /// Minutes that the run may take; a few steps are timed first, and where the epochs do not fit, the whole schedule
    /// is shortened to what does. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_minutes: Option<f64>,
}

/// What the learning rate does after the warm-up, by `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Decay {
    /// Half a cosine down to the last rate.
    Cosine {
        /// The last learning rate as a share of `optimiser.lr`. Default 0.01, in [0, 1].
        final_lr_share: f64,
    },
    /// A straight line down to the last rate.
    Linear {
        /// The last learning rate as a share of `optimiser.lr`. Default 0.01, in [0, 1].
        final_lr_share: f64,
    },
    /// The rate stays.
    Constant,
    /// The rate is multiplied by `factor` at each of some epochs.
    Step {
        /// The epochs, also fractions of one, each later than the one before, within the run.
        milestones: Vec<f64>,
        /// Default 0.1, in (0, 1).
        factor: f64,
    },
    /// The rate is multiplied by `factor` after `patience` epochs in turn without a better score on the examples that are held out or
    /// for validation, which there must be.
    Plateau {
        /// Default 0.1, in (0, 1).
        factor: f64,
        /// Default 5, >= 1.
        patience: usize,
    },
}

/// Every kind with its defaults, the default first.
fn kinds() -> [ScheduleRecipe; 5] {
    let (final_lr_share, factor) = (0.01, 0.1);
    [
        Decay::Cosine { final_lr_share },
        Decay::Linear { final_lr_share },
        Decay::Constant,
        Decay::Step { milestones: Vec::new(), factor },
        Decay::Plateau { factor, patience: 5 },
    ]
    .map(|decay| ScheduleRecipe {
        decay,
        epochs: 10,
        batch_size: 128,
        accumulate: 1,
        warmup_epochs: 1.0,
        max_steps: None,
        max_minutes: None,
    })
}

/// Of a recipe, with the defaults of its kind.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<ScheduleRecipe, D::Error> {
    by_kind(d, "schedule", &kinds(), &["max_steps", "max_minutes"])
}

impl Default for ScheduleRecipe {
    fn default() -> Self {
        let [cosine, ..] = kinds();
        cosine
    }
}

impl ScheduleRecipe {
    /// What ends a run: epochs, steps and minutes.
    pub(super) fn limits(&self) -> [f64; 3] {
        let [steps, minutes] = [self.max_steps.map(|steps| steps as f64), self.max_minutes];
        [self.epochs as f64, steps.unwrap_or(f64::INFINITY), minutes.unwrap_or(f64::INFINITY)]
    }

    /// The same, ended where `other` is at the latest.
    pub(super) fn as_long_as(&self, other: &Self) -> Self {
        Self {
            epochs: self.epochs.min(other.epochs),
            max_steps: least(self.max_steps, other.max_steps),
            max_minutes: least(self.max_minutes, other.max_minutes),
            ..self.clone()
        }
    }

    /// Examples that a step learns from.
    pub const fn step_examples(&self) -> usize {
        self.batch_size.saturating_mul(self.accumulate)
    }

    /// The schedule stretched or shrunk to `epochs`: milestones keep their share of the run, and the warm-up is a quarter of it at most.
    #[must_use]
    pub fn of_epochs(mut self, epochs: usize) -> Self {
        if epochs == self.epochs {
            return self;
        }
        let ratio = epochs as f64 / self.epochs as f64;
        if let Decay::Step { milestones, .. } = &mut self.decay {
            milestones.iter_mut().for_each(|milestone| *milestone *= ratio);
        }
        self.warmup_epochs = self.warmup_epochs.min(epochs as f64 / 4.0);
        Self { epochs, ..self }
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        let (epochs, warmup) = (self.epochs as f64, self.warmup_epochs);
        let many = |n: usize| (1..=LONGEST).contains(&n);
        let below_one = |factor: f64| check("schedule.factor", factor, factor > 0.0 && factor < 1.0, "in (0, 1)");
        let mut checks = vec![
            check("schedule.epochs", self.epochs, many(self.epochs), "1 to 1000000"),
            check("schedule.batch_size", self.batch_size, many(self.batch_size), "1 to 1000000"),
            check("schedule.accumulate", self.accumulate, many(self.accumulate), "1 to 1000000"),
            check(
                "schedule.warmup_epochs",
                warmup,
                (0.0..epochs).contains(&warmup),
                ">= 0 and less than `schedule.epochs`",
            ),
            check("schedule.max_steps", self.max_steps.unwrap_or(1), self.max_steps != Some(0), "absent or at least 1"),
            check(
                "schedule.max_minutes",
                self.max_minutes.unwrap_or(1.0),
                self.max_minutes.is_none_or(|x| x.is_finite() && x > 0.0),
                "absent or > 0",
            ),
        ];
        match &self.decay {
            Decay::Cosine { final_lr_share: x } | Decay::Linear { final_lr_share: x } => {
                checks.push(check("schedule.final_lr_share", x, (0.0..=1.0).contains(x), "in [0, 1]"));
            }
            Decay::Constant => {}
            Decay::Step { milestones, factor } => {
                let rising = milestones.windows(2).all(|pair| pair[0] < pair[1]);
                let within = milestones.iter().all(|&epoch| epoch > 0.0 && epoch < epochs);
                checks.push(check(
                    "schedule.milestones",
                    milestones,
                    rising && within && !milestones.is_empty(),
                    "one epoch or more, each later than the one before, above 0 and below `schedule.epochs`",
                ));
                checks.push(below_one(*factor));
            }
            Decay::Plateau { factor, patience } => {
                checks.push(check("schedule.patience", patience, *patience >= 1, "at least 1"));
                checks.push(below_one(*factor));
            }
        }
        checks
    }
}

#[cfg(test)]
mod tests {
    use super::super::Recipe;
    use super::*;

    fn read(text: &str) -> Result<ScheduleRecipe, String> {
        let recipe = Recipe::from_toml(&format!("[schedule]\n{text}"), "r").map_err(|e| e.to_string())?;
        assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap(), recipe);
        Ok(recipe.schedule)
    }

    #[test]
    fn kinds_have_their_fields() {
        assert_eq!(read("").unwrap(), ScheduleRecipe::default());
        assert_eq!(read("final_lr_share = 0.5").unwrap().decay, Decay::Cosine { final_lr_share: 0.5 });
        assert_eq!(read("kind = 'linear'").unwrap().decay, Decay::Linear { final_lr_share: 0.01 });
        assert_eq!(read("kind = 'constant'").unwrap().decay, Decay::Constant);
        let step = read("kind = 'step'\nmilestones = [4, 8]\nfactor = 0.5").unwrap();
        assert_eq!(step.decay, Decay::Step { milestones: vec![4.0, 8.0], factor: 0.5 });
        assert_eq!(step.of_epochs(5).decay, Decay::Step { milestones: vec![2.0, 4.0], factor: 0.5 });
    }

    #[test]
    fn fields_of_other_kinds_and_values_out_of_range_are_refused() {
        for (text, parts) in [
            ("kind = 'constant'\nfinal_lr_share = 0.1", &["`final_lr_share`", "`constant`", "`cosine`, `linear`"][..]),
            ("milestones = [3]", &["`milestones`", "`cosine`", "`step`"]),
            ("kind = 'step'", &["schedule.milestones", "one epoch or more"]),
            ("kind = 'step'\nmilestones = [4, 3]", &["schedule.milestones", "later"]),
            ("kind = 'step'\nmilestones = [10]", &["schedule.milestones", "below"]),
            ("kind = 'step'\nmilestones = [3]\nfactor = 1", &["schedule.factor", "(0, 1)"]),
            ("kind = 'plateau'\npatience = 0", &["schedule.patience", "at least 1"]),
            ("kind = 'plateau'\nmilestones = [2]", &["`milestones`", "factor, patience"]),
            ("accumulate = 0", &["schedule.accumulate", "1 to"]),
        ] {
            let message = read(text).unwrap_err();
            parts.iter().for_each(|part| assert!(message.contains(part), "{message} lacks {part}"));
        }
    }
}
