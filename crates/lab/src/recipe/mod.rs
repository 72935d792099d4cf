//! Recipes: everything that decides what a training run computes, as a TOML file.
//!
//! A missing field has its default, an unknown field, a wrong type or a value out of range is an [`Error::Recipe`] that
//! names file and field. Two runs of one recipe, seed and data set end with the same bits.

pub mod builtin;
mod document;
mod effect;
pub(crate) mod fit;
mod landmarks;
mod language;
mod length_scale;
mod mechanism;
mod model;
mod names;
mod optimiser;
mod precision;
mod pyramid;
mod relatives;
mod schedule;
mod section;
mod sections;
mod setting;

use resolvent::Precision;
use resolvent_kernels::Mechanism;
use serde::{Deserialize, Serialize};

use crate::{
    Error, Result,
    augment::Augment,
    data::{self, TextRecipe, Tokens},
    fit::FitFile,
};

pub use landmarks::with_landmarks_for;
pub use language::{LanguageRecipe, Layer};
pub use length_scale::{length_scale_rule, rule_name, with_length_scale};
pub use model::{ModelRecipe, TextModelRecipe};
pub use optimiser::{Lion, Moments, Momentum, Muon, OptimiserRecipe, Rule};
pub use pyramid::PyramidRecipe;
pub use relatives::with_settings_of;
pub use schedule::{Decay, ScheduleRecipe};
pub use sections::{LogRecipe, RegularisationRecipe};
pub use setting::Setting;

/// A training recipe.
///
/// ```
/// use resolvent_lab::Recipe;
/// let recipe = Recipe::from_toml("mechanism = 'infsa'\n[schedule]\nepochs = 3", "example")?;
/// assert_eq!((recipe.mechanism.id(), recipe.schedule.epochs), ("infsa", 3));
/// # Ok::<(), resolvent_lab::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    /// A name for reports. Default `unnamed`.
    pub name: String,
    /// What the recipe is for, in a line or two. Default empty.
    pub about: String,
    /// The data set to use where the command names none, as `KIND:PATH`. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// Attention: an id, or a table with `mechanism = "id"` and the mechanism's fields. Default `softmax`.
    #[serde(with = "mechanism")]
    pub mechanism: Mechanism,
    /// Mechanisms of layers and heads in place of `mechanism`, which is softmax then: the name of a file that `analyze --fit` left, which is
    /// found from the recipe's folder, or what it holds. Of classifiers and language models. Default none.
    #[serde(with = "fit", skip_serializing_if = "Option::is_none")]
    pub fit: Option<FitFile>,
    /// Seed of everything random: initial weights, order, augmentation. Default 0.
    pub seed: u64,
    /// Of the products in the model's blocks: `f32`, or `bf16`: projections, MLPs and the attention that has such products round their
    /// operands, while weights and everything else stay f32. On the CPU; not with ternary weights, nor for models of one's own. Default `f32`.
    #[serde(with = "precision")]
    pub precision: Precision,
    /// The model, by default a vision transformer.
    pub model: ModelRecipe,
    /// How weights follow their gradients: AdamW and others.
    #[serde(deserialize_with = "optimiser::deserialize")]
    pub optimiser: OptimiserRecipe,
    /// How long, how fast.
    #[serde(deserialize_with = "schedule::deserialize")]
    pub schedule: ScheduleRecipe,
    /// What is done to the training pictures; an error in a recipe of text. Default: nothing.
    pub augment: Augment,
    /// How texts become tokens; without effect for pictures.
    pub text: TextRecipe,
    /// What keeps the model from learning the training set by heart.
    pub regularisation: RegularisationRecipe,
    /// What is written while training.
    pub log: LogRecipe,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            name: "unnamed".into(),
            about: String::new(),
            data: None,
            mechanism: Mechanism::default(),
            fit: None,
            seed: 0,
            precision: Precision::Full,
            model: Default::default(),
            optimiser: Default::default(),
            schedule: Default::default(),
            augment: Augment::default(),
            text: TextRecipe::default(),
            regularisation: Default::default(),
            log: Default::default(),
        }
    }
}

/// Bounds that no useful run comes near, and within which no product of sizes overflows.
const WIDEST: usize = 1 << 16;
const DEEPEST: usize = 1 << 12;
const LONGEST: usize = 1_000_000;
const MOST_WEIGHTS: u64 = 1 << 33;

/// Field, value, whether it is in range, the range.
type Check = (&'static str, String, bool, &'static str);

fn check<T: std::fmt::Debug>(field: &'static str, got: T, ok: bool, expected: &'static str) -> Check {
    (field, format!("{got:?}"), ok, expected)
}

fn share(x: f64) -> bool {
    (0.0..1.0).contains(&x)
}

impl Recipe {
    /// The recipe as TOML, with every field written out.
    ///
    /// # Errors
    /// [`Error::Recipe`] for a number that TOML cannot hold.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string_pretty(self).map_err(|e| Error::Recipe {
            file: "recipe".into(),
            field: ".".into(),
            problem: format!("cannot be written as TOML: {e}"),
        })
    }

    /// Checks every field against its range.
    ///
    /// # Errors
    /// [`Error::Recipe`] naming the first field that is out of range.
    pub fn validate(&self) -> Result<()> {
        self.validate_as("recipe")
    }

    fn validate_as(&self, file: &str) -> Result<()> {
        let fail = |field: &str, problem| Err(Error::Recipe { file: file.into(), field: field.into(), problem });
        if let Some((field, got, _, expected)) = self.range_checks().iter().find(|(_, _, ok, _)| !ok) {
            return fail(field, format!("is {got}, must be {expected}"));
        }
        let reads_text = matches!(self.model, ModelRecipe::Text(_) | ModelRecipe::Language(_));
        match self.augment.validate() {
            Ok(()) if !reads_text || self.augment == Augment::default() => {}
            Ok(()) => return fail("augment", "changes pictures, and the model reads text; leave it out".into()),
            Err(data::Error::Setting { field, got, expected }) => {
                return fail(&format!("augment.{field}"), format!("is {got}, must be {expected}"));
            }
            Err(e) => return fail("augment", format!("is not valid: {e}")),
        }
        self.check_fit().or_else(|problem| fail(fit::FIT, problem))?;
        self.mechanism.validate().or_else(|e| fail("mechanism", format!("is not valid: {e}")))
    }

    /// What must hold of every field.
    fn range_checks(&self) -> Vec<Check> {
        let Self { model, optimiser, schedule, text: t, regularisation: r, log, .. } = self;
        let positive = |x: usize| x >= 1;
        let (rounded, own) = (self.precision != Precision::Full, matches!(model, ModelRecipe::Own(_)));
        let mut checks = [model.checks(), optimiser.checks(), schedule.checks()].concat();
        checks.extend([
            check("seed", self.seed, i64::try_from(self.seed).is_ok(), "at most 2^63 - 1, as TOML holds it"),
            check(
                "precision",
                format_args!("bf16"),
                !rounded || !own,
                "`f32` with a model of one's own, which multiplies as its program says",
            ),
            check("precision", format_args!("bf16"), !rounded || !model.is_ternary(), "`f32` with `model.ternary`"),
            check("precision", format_args!("bf16x3"), self.precision != Precision::Bf16x3, "`f32` or `bf16`"),
            check("text.vocabulary", t.vocabulary, (1..=1_000_000).contains(&t.vocabulary), "1 to 1000000"),
            check(
                "text.vocabulary",
                t.vocabulary,
                t.tokens != Tokens::ByteBpe || t.vocabulary >= 256,
                "at least 256 for byte-bpe, which begins with every byte",
            ),
            check("text.min_count", t.min_count, positive(t.min_count), "at least 1"),
            check("text.max_tokens", t.max_tokens, (1..=LONGEST).contains(&t.max_tokens), "1 to 1000000"),
            check("regularisation.label_smoothing", r.label_smoothing, share(r.label_smoothing), "in [0, 1)"),
            check("regularisation.ema_decay", r.ema_decay, share(r.ema_decay), "in [0, 1)"),
            check("regularisation.hold_out", r.hold_out, (0.0..=0.5).contains(&r.hold_out), "in [0, 0.5]"),
            check("regularisation.patience", r.patience.unwrap_or(1), r.patience != Some(0), "absent or at least 1"),
            check("log.every", log.every, positive(log.every), "at least 1"),
            check("log.keep", log.keep, positive(log.keep), "at least 1"),
        ]);
        checks
    }

    /// What the model attends with in a word: the mechanism's id, or `fit`.
    pub fn attention_name(&self) -> &'static str {
        if self.fit.is_some() { fit::FIT } else { self.mechanism.id() }
    }

    /// Every mechanism of the model: the recipe's, and those that parts of a model of text, stages of a pyramid or heads have in its place.
    pub fn mechanisms(&self) -> impl Iterator<Item = Mechanism> {
        let others = match &self.model {
            ModelRecipe::Language(m) => m.mechanisms(&self.mechanism),
            ModelRecipe::Text(m) => m.decoder.iter().chain(&m.cross).map(|mechanism| (**mechanism).clone()).collect(),
            ModelRecipe::Pyramid(m) => m.mechanisms(&self.mechanism),
            ModelRecipe::Vit(_) | ModelRecipe::Own(_) => Vec::new(),
        };
        let groups = self.fit.iter().flat_map(|fit| &fit.layers).flat_map(|layer| &layer.groups);
        others.into_iter().chain(groups.map(|group| group.mechanism.clone())).chain([self.mechanism.clone()])
    }

    /// The first field in which two recipes differ: its dotted path, here, there. Names and descriptions do not count,
    /// nor does what only decides what is written. How much longer `other` is comes last: a run may be extended, if nothing else is another.
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let computed = |recipe: &Self| {
            let unnamed = Self { name: String::new(), about: String::new(), data: None, ..recipe.clone() };
            serde_json::to_value(Self { log: Default::default(), ..unnamed }).unwrap_or_default()
        };
        let compared = |other: &Self| first_difference("", &computed(self), &computed(other));
        compared(&other.as_long_as(self)).or_else(|| compared(other))
    }

    /// Whether it is `shorter`, but for a longer schedule or more patience.
    pub(crate) fn is_longer(&self, shorter: &Self) -> bool {
        let (now, then) = (self.limits(), shorter.limits());
        let less = now.iter().zip(then).any(|(now, then)| *now < then);
        !less && now != then && shorter.difference(&self.as_long_as(shorter)).is_none()
    }

    /// What ends a run: epochs, steps, minutes, and epochs without a better score.
    fn limits(&self) -> [f64; 4] {
        let [epochs, steps, minutes] = self.schedule.limits();
        [epochs, steps, minutes, self.regularisation.patience.map_or(f64::INFINITY, |patience| patience as f64)]
    }

    /// The same, ended where `other` is at the latest.
    fn as_long_as(&self, other: &Self) -> Self {
        let regularisation = RegularisationRecipe {
            patience: least(self.regularisation.patience, other.regularisation.patience),
            ..self.regularisation.clone()
        };
        Self { schedule: self.schedule.as_long_as(&other.schedule), regularisation, ..self.clone() }
    }
}

/// The lesser of two limits, of which one that is not there is none.
fn least<T: PartialOrd>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other < one { other } else { one }),
        (one, other) => one.or(other),
    }
}

pub(crate) fn first_difference(
    path: &str,
    left: &serde_json::Value,
    right: &serde_json::Value,
) -> Option<(String, String, String)> {
    use serde_json::Value::{Null, Object};
    match (left, right) {
        (Object(a), Object(b)) => a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))).find_map(|key| {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            first_difference(&path, a.get(key).unwrap_or(&Null), b.get(key).unwrap_or(&Null))
        }),
        _ => (left != right).then(|| (path.into(), left.to_string(), right.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn error_of(text: &str) -> String {
        let message = Recipe::from_toml(text, "r.toml").unwrap_err().to_string();
        assert!(!message.contains('\n'), "one line: {message}");
        message
    }

    #[test]
    fn the_defaults_are_valid_and_survive_toml() {
        let recipe = Recipe::from_toml("", "empty").unwrap();
        assert_eq!(recipe, Recipe::default());
        assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap(), recipe);
    }

    #[test]
    fn every_mechanism_survives_toml() {
        let composed = r#"{"mechanism": "composed", "score": {"kind": "dot-exp"}, "structure": {"kind": "clustered"}}"#;
        let presets = Mechanism::IDS.iter().map(|id| Mechanism::preset(id).unwrap());
        for mechanism in presets.chain([Mechanism::from_json(composed).unwrap()]) {
            let recipe = Recipe { mechanism, ..Recipe::default() };
            assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap(), recipe);
        }
    }

    #[test]
    fn a_mechanism_is_an_id_or_a_table() {
        let id = Recipe::from_toml("mechanism = 'linear-infsa'", "r").unwrap();
        assert_eq!(id.mechanism, Mechanism::preset("linear-infsa").unwrap());
        let table = Recipe::from_toml("[mechanism]\nmechanism = 'infsa'\ngamma = 0.9", "r").unwrap();
        assert_eq!(table.mechanism.gamma(), Some(0.9));
    }

    #[test]
    fn errors_name_file_field_and_remedy() {
        for (text, expected) in [
            ("modle = 1", &["r.toml", "modle"][..]),
            ("[model]\nwidth = 3", &["model", "width", "expected one of"]),
            ("[model]\ndim = 'x'", &["model", "dim", "expected usize"]),
            ("[model]\nkind = 'text'\npatch = 4", &["model", "patch", "expected one of"]),
            ("[model]\nkind = 'cnn'", &["model", "cnn", "vit, pyramid, text, language"]),
            ("[model]\nkind = 'pyramid'\npreset = 'soft-big'", &["model.preset", "soft-big", "soft-code-huge"]),
            ("[model]\nkind = 'pyramid'\npatch = 4", &["model", "patch", "expected one of"]),
            ("[text]\nvocabulary = 1000001", &["text.vocabulary", "1000000"]),
            ("[schedule]\nepochs = 'x'", &["schedule.epochs", "expected usize"]),
            ("[schedule]\nepochs = 0", &["schedule.epochs", "is 0", "1 to 1000000"]),
            ("[schedule]\nepochs = 2\nwarmup_epochs = 2.0", &["schedule.warmup_epochs", "less than"]),
            ("[model]\ndim = 65", &["model.heads", "divisor"]),
            ("[optimiser]\nlr = inf", &["optimiser.lr", "finite"]),
            ("[optimiser]\nbetas = [0.9, 1.0]", &["optimiser.betas", "[0, 1)"]),
            ("[optimiser]\nweight_decay = -1.0", &["optimiser.weight_decay", ">= 0"]),
            ("[augment]\nflip = 2.0", &["augment.flip", "[0, 1]"]),
            ("[augment.mix]\nmixup = -1.0", &["augment.mix.mixup"]),
            ("[regularisation]\npatience = 0", &["regularisation.patience", "is 0,", "at least 1"]),
            ("[schedule]\nmax_steps = 0", &["schedule.max_steps", "is 0,"]),
            ("[schedule]\nmax_minutes = -1.0", &["schedule.max_minutes", "is -1.0,"]),
            ("[model]\nkind = 'language'\nkv_heads = 3", &["model.kv_heads", "is 3,"]),
            ("[model]\nplan_layers = 5", &["model.plan_layers", "1 to `model.depth`"]),
            ("[model]\nkind = 'text'\nplan_layers = 2", &["model.plan_layers", "1 to `model.depth`"]),
            ("[model]\nkind = 'text'\n[augment]\nflip = 0.5", &["augment", "pictures"]),
            ("[model]\nkind = 'language'\n[augment]\npadding = 4", &["augment", "pictures"]),
            ("[text]\ntokens = 'byte-bpe'\nvocabulary = 255", &["text.vocabulary", "is 255", "256"]),
            ("[regularisation]\nlabel_smoothing = nan", &["regularisation.label_smoothing", "NaN"]),
            ("mechanism = 'softmacs'", &["mechanism", "softmacs", "linear-infsa"]),
            ("[mechanism]\nmechanism = 'infsa'\ngamma = 2.0", &["mechanism", "gamma", "[1e-12, 1]"]),
            ("precision = 'f16'", &["precision", "f16", "`bf16`"]),
            ("precision = 'bf16'\n[model]\nternary = true", &["precision", "is bf16,", "model.ternary"]),
            ("precision = 'bf16'\n[model]\nkind = 'own'", &["precision", "is bf16,", "its program"]),
            ("seed = 1\nseed = 2", &["line 2", "duplicate"]),
            ("[model", &["line 1"]),
        ] {
            let message = error_of(text);
            for part in expected {
                assert!(message.contains(part), "`{text}` gives `{message}`, which lacks `{part}`");
            }
        }
    }

    /// A run would be stored as one in f32.
    #[test]
    fn three_products_of_bf16_are_for_no_recipe() {
        let message = Recipe { precision: Precision::Bf16x3, ..Recipe::default() }.validate().unwrap_err().to_string();
        assert!(message.contains("precision") && message.contains("is bf16x3,"), "{message}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let message = Recipe::load(Path::new("no/such.toml")).unwrap_err().to_string();
        assert!(message.contains("no/such.toml"), "{message}");
    }

    #[test]
    fn the_difference_is_named_and_labels_do_not_count() {
        let base = Recipe::default();
        let renamed =
            Recipe { name: "other".into(), log: LogRecipe { every: 7, ..Default::default() }, ..base.clone() };
        assert_eq!(base.difference(&renamed), None);
        let mut slower = base.clone();
        slower.optimiser.lr = 5e-4;
        assert_eq!(base.difference(&slower), Some(("optimiser.lr".into(), "0.001".into(), "0.0005".into())));
        let mut bounded = base.clone();
        bounded.schedule.max_minutes = Some(1.0);
        assert_eq!(base.difference(&bounded).unwrap().0, "schedule.max_minutes");
        let mut longer = Recipe { seed: 3, ..base.clone() };
        longer.schedule.epochs += 1;
        assert_eq!(base.difference(&longer).unwrap().0, "seed", "a run may be longer");
    }
}
