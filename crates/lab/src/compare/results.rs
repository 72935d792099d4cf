//! What a comparison found.

use std::fmt;

use resolvent_kernels::Mechanism;
use serde::{Deserialize, Serialize};

use super::Speed;
use crate::{
    Recipe,
    checkpoint::DataIdentity,
    columns::{
        Align::{Left, Right},
        Columns,
    },
    environment::Environment,
    evaluation::Prediction,
    metrics::Scalars,
    recipe::ModelRecipe,
    schedule::Plan,
    stats::moments,
    train::{Ended, LandmarkCount, TrainSummary},
};

/// The result of a comparison, as in its `results.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The recipe that all runs share; mechanism and seed are each run's own.
    pub recipe: Recipe,
    /// The data that all runs share.
    pub data: DataIdentity,
    /// The steps that all runs share.
    pub plan: Plan,
    /// The seeds.
    pub seeds: Vec<u64>,
    /// One entry per mechanism of which a run ended.
    pub entries: Vec<Entry>,
    /// The runs that have no result. A mechanism of which no run ended is here alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diverged: Vec<Diverged>,
    /// The machine.
    pub environment: Environment,
    /// Commands that repeat the comparison.
    pub commands: Vec<String>,
}

/// What a comparison found of one mechanism.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// What it is called: a mechanism's id, or the name of the file with its configuration.
    pub name: String,
    /// The mechanism with its parameters.
    pub mechanism: Mechanism,
    /// Parameters of the model.
    pub parameters: usize,
    /// Landmarks of its model on these pictures, stage by stage; empty for mechanisms without landmarks, and for texts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub landmarks: Vec<LandmarkCount>,
    /// One run per seed, but for those that diverged.
    pub runs: Vec<RunResult>,
    /// Test accuracy over the seeds, of models that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<Spread>,
    /// What it costs.
    pub speed: Speed,
}

/// One run of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Its seed.
    pub seed: u64,
    /// Its folder, within that of the comparison.
    pub folder: String,
    /// Test accuracy, of models that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Test examples that it is a share of; 0 in results of older programs.
    #[serde(default)]
    pub examples: usize,
    /// Test loss.
    pub loss: f64,
    /// BLEU on the test part, of translators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bleu: Option<f64>,
    /// How well the test part is predicted, by language models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
    /// Steps done.
    pub steps: usize,
    /// Why it ended there.
    pub ended: Ended,
    /// Its seconds.
    pub seconds: f64,
    /// What the model has learned in scalars.
    #[serde(default, alias = "gamma")]
    pub learned: Scalars,
}

/// A run whose loss ceased to be a number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Diverged {
    /// What the mechanism is called.
    pub name: String,
    /// The mechanism with its parameters.
    pub mechanism: Mechanism,
    /// The run's seed.
    pub seed: u64,
    /// Its folder, within that of the comparison.
    pub folder: String,
    /// The step whose loss is no number.
    pub step: usize,
}

impl fmt::Display for Diverged {
    /// `infsa, seed 1, at step 412`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, seed {}, at step {}", self.name, self.seed, self.step)
    }
}

/// Mean and spread of a few values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Their mean.
    pub mean: f64,
    /// Their sample standard deviation; absent for a single value.
    pub std: Option<f64>,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of `values`, which must not be empty.
    pub fn of(values: &[f64]) -> Self {
        let (mean, variance) = moments(values);
        Self {
            mean,
            std: (values.len() > 1).then(|| variance.sqrt()),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }

    /// `87.25 ± 0.31` in percent.
    pub fn percent(&self) -> String {
        let hundred = |x: f64| x * 100.0;
        let Self { mean, std, min, max } = self;
        Self { mean: hundred(*mean), std: std.map(hundred), min: hundred(*min), max: hundred(*max) }.points()
    }

    /// `34.25 ± 0.31`.
    pub fn points(&self) -> String {
        self.digits(2)
    }

    /// `34.2500 ± 0.3100` with so many digits behind the point.
    pub fn digits(&self, digits: usize) -> String {
        let spread = self.std.map_or_else(String::new, |std| format!(" ± {std:.digits$}"));
        format!("{:.digits$}{spread}", self.mean)
    }
}

impl Entry {
    /// Of the runs of one mechanism, which must not be empty.
    pub fn new(name: &str, runs: &[(String, TrainSummary)], landmarks: Vec<LandmarkCount>, speed: Speed) -> Self {
        let results: Vec<_> = runs
            .iter()
            .map(|(folder, summary)| RunResult {
                seed: summary.recipe.seed,
                folder: folder.clone(),
                accuracy: summary.test.accuracy,
                examples: summary.test.examples,
                loss: summary.test.loss,
                bleu: summary.test.bleu.as_ref().map(|bleu| bleu.score),
                prediction: summary.test.prediction.clone(),
                steps: summary.steps,
                ended: summary.ended,
                seconds: summary.seconds,
                learned: summary.learned.clone(),
            })
            .collect();
        let accuracies: Option<Vec<_>> = results.iter().map(|run| run.accuracy).collect();
        let first = &runs[0].1;
        Self {
            name: name.into(),
            mechanism: first.recipe.mechanism.clone(),
            parameters: first.parameters,
            landmarks,
            accuracy: accuracies.map(|values| Spread::of(&values)),
            runs: results,
            speed,
        }
    }
}

impl Entry {
    /// The mean test accuracy over the seeds, and as text in percent; of models that have none, the test loss.
    pub fn outcome(&self) -> (f64, String) {
        if let Some(accuracy) = &self.accuracy {
            return (accuracy.mean, accuracy.percent());
        }
        let loss = Spread::of(&self.runs.iter().map(|run| run.loss).collect::<Vec<_>>());
        (loss.mean, loss.digits(4))
    }

    /// BLEU over the seeds, of translators.
    pub fn bleu(&self) -> Option<Spread> {
        self.spread(|run| run.bleu)
    }

    /// Perplexity over the seeds, of language models.
    pub fn perplexity(&self) -> Option<Spread> {
        self.spread(|run| Some(run.prediction.as_ref()?.perplexity))
    }

    /// Bits per byte over the seeds, of language models.
    pub fn bits_per_byte(&self) -> Option<Spread> {
        self.spread(|run| Some(run.prediction.as_ref()?.bits_per_byte))
    }

    /// The number of its landmarks as `4 of 16` tokens, stage by stage; empty where it has none.
    pub fn landmarks_text(&self) -> String {
        let of = |LandmarkCount { tokens, landmarks }: &LandmarkCount| format!("{landmarks} of {tokens}");
        self.landmarks.iter().map(of).collect::<Vec<_>>().join(", ")
    }

    /// The tokens that a single landmark stands for, where there is such a stage.
    fn single_landmark(&self) -> Option<usize> {
        let single = self.landmarks.iter().find(|count| count.landmarks == 1 && count.tokens > 1);
        single.map(|count| count.tokens)
    }

    fn spread(&self, of: impl Fn(&RunResult) -> Option<f64>) -> Option<Spread> {
        Some(Spread::of(&self.runs.iter().map(of).collect::<Option<Vec<_>>>()?))
    }
}

impl Comparison {
    /// What [`Entry::outcome`] is of.
    pub fn outcome_title(&self) -> &'static str {
        if self.entries.iter().any(|entry| entry.accuracy.is_some()) { "test accuracy %" } else { "test loss" }
    }

    /// The comparison as a table of plain text.
    pub fn table(&self) -> String {
        let any = |of: fn(&Entry) -> bool| self.entries.iter().any(of);
        let memory = any(|entry| entry.speed.peak_bytes.is_some());
        let bleu = any(|entry| entry.bleu().is_some());
        let predicts = any(|entry| entry.perplexity().is_some());
        let landmarks = any(|entry| !entry.landmarks.is_empty());
        let outcome = self.outcome_title();
        let numbers = [outcome, "train examples/s", "infer examples/s", "parameters"].map(|name| (Right, name));
        let mut columns = vec![(Left, "mechanism")];
        columns.extend(numbers);
        columns.extend(memory.then_some((Right, "peak MB")));
        columns.extend(bleu.then_some((Right, "BLEU")));
        columns.extend(predicts.then_some([(Right, "perplexity"), (Right, "bits/byte")]).into_iter().flatten());
        columns.extend(landmarks.then_some((Left, "landmarks")));
        columns.push((Left, ""));
        let mut table = Columns::new(columns);
        let shown = |spread: Option<Spread>, digits: usize| spread.map_or_else(String::new, |s| s.digits(digits));
        for entry in self.ranked() {
            let speed = &entry.speed;
            let rates = [speed.train_examples_per_second, speed.infer_examples_per_second];
            let mut row = vec![entry.name.clone(), entry.outcome().1];
            row.extend(rates.map(|rate| format!("{rate:.0}")));
            row.push(entry.parameters.to_string());
            row.extend(memory.then(|| speed.peak_bytes.map_or_else(String::new, |b| format!("{:.1}", b as f64 / 1e6))));
            row.extend(bleu.then(|| shown(entry.bleu(), 2)));
            row.extend(
                predicts.then(|| [shown(entry.perplexity(), 2), shown(entry.bits_per_byte(), 4)]).into_iter().flatten(),
            );
            row.extend(landmarks.then(|| entry.landmarks_text()));
            row.extend(self.divergence(&entry.name));
            table.row(row);
        }
        let told = |lost: &Diverged| self.divergence(&lost.name).unwrap_or_default();
        let lost = self.lost().into_iter().map(|lost| format!("{:<16} {}\n", lost.name, told(lost)));
        table.to_string() + &lost.collect::<String>()
    }

    /// Of every mechanism of which no run ended, the first that diverged.
    pub fn lost(&self) -> Vec<&Diverged> {
        let mut lost: Vec<&Diverged> = Vec::new();
        for run in &self.diverged {
            let known = self.entries.iter().map(|entry| &entry.name).chain(lost.iter().map(|run| &run.name));
            if !known.into_iter().any(|name| *name == run.name) {
                lost.push(run);
            }
        }
        lost
    }

    /// Which runs of the mechanism called `name` diverged, if any: `diverged at step 7`, `1 of 3 runs diverged at step 7`.
    pub fn divergence(&self, name: &str) -> Option<String> {
        let steps: Vec<_> = self.diverged.iter().filter(|run| run.name == name).map(|run| run.step).collect();
        let shown = steps.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let of = self.seeds.len();
        match steps.len() {
            0 => None,
            _ if of == 1 => Some(format!("diverged at step {shown}")),
            1 => Some(format!("1 of {of} runs diverged at step {shown}")),
            some => Some(format!("{some} of {of} runs diverged at steps {shown}")),
        }
    }

    /// The speeds of language models of texts in tokens, of which an example has as many as the context.
    fn tokens_per_second(&self) -> Option<String> {
        let ModelRecipe::Language(model) = &self.recipe.model else { return None };
        self.entries.iter().find_map(Entry::bits_per_byte)?;
        let tokens = |examples: f64| (examples * model.context as f64).round();
        let of_entry = |entry: &Entry| {
            let Speed { train_examples_per_second: train, infer_examples_per_second: infer, .. } = entry.speed;
            format!("{} {} in training and {} in inference", entry.name, tokens(train), tokens(infer))
        };
        let entries: Vec<_> = self.entries.iter().map(of_entry).collect();
        Some(format!("An example is {} tokens; tokens per second: {}.", model.context, entries.join(", ")))
    }

    /// What a reader must know to read the numbers rightly, a sentence each.
    pub fn caveats(&self) -> Vec<String> {
        let mut caveats = Vec::new();
        for run in &self.diverged {
            let rest = if self.entries.iter().any(|entry| entry.name == run.name) {
                "; the other seeds alone make its numbers, which are better than the mechanism is"
            } else {
                ""
            };
            caveats.push(format!("Diverged: {run}, the loss is no number{rest}."));
        }
        if self.plan.steps < self.plan.full_steps {
            let minutes = self.recipe.schedule.max_minutes.unwrap_or_default();
            let mut runs = self.entries.iter().flat_map(|entry| &entry.runs);
            let took = if runs.all(|run| run.steps == self.plan.steps) { "took" } else { "was planned for" };
            caveats.push(format!(
                "Every run {took} {} steps: those that fit in {minutes} minutes of the slowest mechanism, instead of the \
                 recipe's {}; the learning rate was planned for them.",
                self.plan.steps, self.plan.full_steps
            ));
        }
        caveats.extend(self.tokens_per_second());
        for (entry, tokens) in self.entries.iter().filter_map(|entry| Some((entry, entry.single_landmark()?))) {
            caveats.push(format!(
                "{} has a single landmark for {tokens} tokens, which leaves little of it: `soft` and `soft-pp` are then the \
                 same operator. Give it more, as `landmarks = {{ kind = \"pool\", count = 4 }}` does.",
                entry.name
            ));
        }
        if self.seeds.len() == 1 {
            caveats.push("One seed: differences of a percent or two may be chance.".into());
        }
        let late = self.entries.iter().flat_map(|entry| entry.runs.iter().map(move |run| (entry, run)));
        for (entry, run) in late.filter(|(_, run)| run.ended == Ended::OutOfTime) {
            caveats.push(format!(
                "{}, seed {}, ran out of time after {} of {} steps: its accuracy is understated.",
                entry.name, run.seed, run.steps, self.plan.steps
            ));
        }
        caveats
    }
}
