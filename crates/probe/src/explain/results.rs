//! What an explanation found.

use std::fmt::Write;

use resolvent_kernels::Mechanism;
use resolvent_lab::{
    columns::{
        Align::{Left, Right},
        Columns, counted,
    },
    environment::Environment,
    named,
    stats::{Interval, Side, moments},
};
use serde::Serialize;

use super::{Query, deletion::Deletion, localisation::Localisation, rule::MapRule, weights::breadth};
use crate::subject::{Example, Region};

/// Shares of the places taken away at which curves are averaged.
const SHARES: usize = 20;

/// The result of an explanation, as in its `results.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Explanation {
    /// The checkpoint.
    pub checkpoint: String,
    /// Steps that it was trained for.
    pub step: usize,
    /// Its mechanism.
    pub mechanism: Mechanism,
    /// What it was shown.
    pub data: String,
    /// Examples it was shown.
    pub examples: usize,
    /// Texts among them that were cut to what the model reads.
    pub cut: usize,
    /// The layer that `attention` is the map of.
    pub layer: String,
    /// Who asks: what a map is a row of, or the mean of.
    pub rule: String,
    /// How the heads of a layer make one map.
    pub map_rule: MapRule,
    /// The place whose own rows are drawn.
    #[serde(skip)]
    pub query: Option<Query>,
    /// The model's maps and those without meaning, attention first; none of a language model, whose texts cannot lack a token.
    pub maps: Vec<MapScores>,
    /// Every layer's map by itself.
    pub layers: Vec<LayerScores>,
    /// Some examples with their maps.
    pub shown: Vec<Shown>,
    /// One per example.
    pub answers: Vec<ExampleScores>,
    /// The machine.
    pub environment: Environment,
    /// Commands that repeat it.
    pub commands: Vec<String>,
}

/// Mean and standard deviation over examples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Standard deviation (of a sample); 0 for one example.
    pub std: f64,
    /// Examples.
    pub examples: usize,
}

impl Spread {
    /// Of some values; `None` of none.
    pub fn new(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().collect();
        let (mean, variance) = moments(&values);
        (!values.is_empty()).then_some(Self { mean, std: variance.sqrt(), examples: values.len() })
    }

    /// `87.2 (0.3)` in percent.
    fn percent(self) -> String {
        format!("{:.1} ({:.1})", 100.0 * self.mean, 100.0 * self.std)
    }
}

named! {
    /// A kind of map.
    pub enum MapKind {
        /// The model's own: the attention of a layer.
        Attention = "attention",
        /// The attention of all layers, rolled out.
        Rollout = "rollout",
        /// Random weights.
        Random = "random",
        /// Equal weights.
        Uniform = "uniform",
    }
}

/// How well one kind of map explains the answers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MapScores {
    /// The kind.
    pub map: MapKind,
    /// One minus the area under the curve that takes the most important places first: larger is better.
    pub morf_aoc: Spread,
    /// The area under the curve that takes the least important places first: larger is better.
    pub lerf_auc: Spread,
    /// Where its MoRF-AOC lies above that of random maps of the same examples; absent of random maps, and of fewer than two examples.
    pub above_random: Option<Interval>,
    /// Shares of the places taken away.
    pub removed: Vec<f64>,
    /// Mean and deviation of what is left of the answer's probability at each, most important first.
    pub morf: Vec<[f64; 2]>,
    /// The same, least important first.
    pub lerf: Vec<[f64; 2]>,
    /// Area under the ROC curve of the places in boxes; absent without boxes.
    pub roc_auc: Option<Spread>,
    /// Average precision of them.
    pub average_precision: Option<Spread>,
    /// Share of the weight in boxes.
    pub mass: Option<Spread>,
    /// Share of the places in boxes: the average precision of chance.
    pub prevalence: Option<Spread>,
}

impl MapScores {
    /// Of one kind of map over all examples.
    pub(super) fn new(
        map: MapKind,
        deletions: &[Deletion],
        found: &[Localisation],
        random: &[Deletion],
    ) -> Option<Self> {
        let curve = |pick: fn(&Deletion) -> &Vec<f64>| {
            let at = |step: usize| {
                let share = step as f64 / SHARES as f64;
                let spread = Spread::new(deletions.iter().map(|d| interpolated(&d.removed, pick(d), share)))?;
                Some([spread.mean, spread.std])
            };
            (0..=SHARES).filter_map(at).collect()
        };
        let over = |pick: fn(&Localisation) -> f64| Spread::new(found.iter().map(pick));
        let pairs = deletions.iter().zip(random);
        let above: Vec<f64> = pairs.map(|(own, random)| own.morf_aoc() - random.morf_aoc()).collect();
        Some(Self {
            map,
            above_random: Interval::of_mean(&above).filter(|_| map != MapKind::Random),
            morf_aoc: Spread::new(deletions.iter().map(Deletion::morf_aoc))?,
            lerf_auc: Spread::new(deletions.iter().map(Deletion::lerf_auc))?,
            removed: (0..=SHARES).map(|step| step as f64 / SHARES as f64).collect(),
            morf: curve(|d| &d.morf),
            lerf: curve(|d| &d.lerf),
            roc_auc: over(|l| l.roc_auc),
            average_precision: over(|l| l.average_precision),
            mass: over(|l| l.mass),
            prevalence: over(|l| l.prevalence),
        })
    }
}

/// The value of a curve between its points.
fn interpolated(x: &[f64], y: &[f64], at: f64) -> f64 {
    let after = x.partition_point(|&x| x < at).clamp(1, x.len() - 1);
    let share = ((at - x[after - 1]) / (x[after] - x[after - 1])).clamp(0.0, 1.0);
    y[after - 1] * (1.0 - share) + y[after] * share
}

/// The map of one layer over all examples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerScores {
    /// The layer.
    pub layer: String,
    /// Height and width of its grid; absent for texts.
    pub grid: Option<[usize; 2]>,
    /// Places that the map lies on, as a share of all: the exponential of its entropy.
    pub breadth: Spread,
    /// Area under the ROC curve of the mean over heads; absent without boxes.
    pub roc_auc: Option<Spread>,
    /// Average precision of it.
    pub average_precision: Option<Spread>,
    /// Area under the ROC curve of each head.
    pub heads: Vec<Option<Spread>>,
}

/// One layer's maps of one example.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerMaps {
    /// The layer.
    pub layer: String,
    /// Height and width of its grid; absent for texts.
    pub grid: Option<[usize; 2]>,
    /// The heads' map by the rule of [`Explanation::map_rule`]: a weight per place, row by row.
    pub mean: Vec<f32>,
    /// Each head.
    pub heads: Vec<Vec<f32>>,
}

impl LayerMaps {
    /// Places that the map lies on, as a share of all.
    pub(super) fn breadth(&self) -> f64 {
        breadth(&self.mean) / self.mean.len().max(1) as f64
    }
}

/// What one place of a layer looks at.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QueryRow {
    /// Which place: row by row on the layer's grid, or the token's number; from 0.
    pub place: usize,
    /// The weights, which may be negative.
    pub maps: LayerMaps,
}

/// An example with its maps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Shown {
    /// Its file, or its number in the data set.
    pub name: String,
    /// Its class, where known.
    pub label: Option<String>,
    /// The model's answer: a class, or the token that it takes for the likeliest to follow.
    pub answer: String,
    /// The probability of it.
    pub probability: f64,
    /// Where its objects lie, in pixels of what the model sees.
    pub boxes: Option<Vec<Region>>,
    /// The tokens of a text.
    pub tokens: Option<Vec<String>>,
    /// The maps, first layer first.
    pub layers: Vec<LayerMaps>,
    /// The map through all layers, where asked for.
    pub rollout: Option<Vec<f32>>,
    /// What one place looks at, where asked for: every layer's heads, and their mean as they are.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub query: Vec<QueryRow>,
    /// Of a language model: what every token looks at in the scored layer, the mean over the heads, of itself and the tokens before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs: Option<Vec<Vec<f32>>>,
    /// What the model was shown.
    #[serde(skip)]
    pub example: Example,
}

/// What one example adds to the scores.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExampleScores {
    /// Its file, or its number in the data set.
    pub name: String,
    /// Its class, where known.
    pub label: Option<String>,
    /// The model's answer: a class, or the token that it takes for the likeliest to follow.
    pub answer: String,
    /// The probability of it.
    pub probability: f64,
    /// See [`MapScores::morf_aoc`]; of the attention. Absent of language models.
    pub morf_aoc: Option<f64>,
    /// See [`MapScores::lerf_auc`]; of the attention. Absent of language models.
    pub lerf_auc: Option<f64>,
    /// How the attention finds the boxes; absent without boxes, and where all places are in one, or none.
    pub localisation: Option<Localisation>,
}

impl ExampleScores {
    /// Of an answer alone.
    pub(super) fn unscored(name: &str, answer: String, probability: f64) -> Self {
        let (morf_aoc, lerf_auc, localisation) = (None, None, None);
        Self { name: name.to_owned(), label: None, answer, probability, morf_aoc, lerf_auc, localisation }
    }
}

impl Explanation {
    /// Examples whose places are partly in boxes.
    pub fn located(&self) -> usize {
        self.maps.first().and_then(|own| own.roc_auc).map_or(0, |spread| spread.examples)
    }

    /// What the explanation comes to.
    pub fn headline(&self) -> String {
        let scored = self.layers.iter().find(|layer| layer.layer == self.layer);
        let Some(own) = self.maps.first() else {
            let looked_at = scored.map_or(0.0, |layer| 100.0 * layer.breadth.mean);
            return format!(
                "In {} the last token looks at {looked_at:.0} % of a text, the mean over {} (the exponential of the map's entropy; 100 % is flat).",
                self.layer,
                counted(self.examples, "text")
            );
        };
        let rest = match own.above_random {
            None => format!("One example says little: MoRF-AOC {:.1} %.", 100.0 * own.morf_aoc.mean),
            Some(above) => {
                let points = format!(
                    "MoRF-AOC {} points from that of random maps (95 % interval over {} examples)",
                    above.text(100.0, 1),
                    self.examples
                );
                match above.side_of(0.0) {
                    Side::Above => format!("The answers rest on what the maps of {} find: {points}.", self.layer),
                    Side::Open => format!(
                        "Whether the answers rest on what the maps of {} find is not told: {points}.",
                        self.layer
                    ),
                    Side::Below => {
                        format!("The answers rest on other places than the maps of {} find: {points}.", self.layer)
                    }
                }
            }
        };
        let flat = scored.filter(|layer| layer.breadth.mean > 0.9).map_or_else(String::new, |layer| {
            format!(" They are nearly flat: {:.0} % of the places are looked at.", 100.0 * layer.breadth.mean)
        });
        rest + &flat
    }

    /// The scores as text.
    pub fn table(&self) -> String {
        if self.maps.is_empty() {
            return self.table_of_layers();
        }
        let scores = ["MoRF-AOC", "LeRF-AUC", "ROC-AUC", "AP", "in boxes"].map(|name| (Right, name));
        let mut table = Columns::new([(Left, "map")].into_iter().chain(scores));
        for m in &self.maps {
            let scores = [Some(m.morf_aoc), Some(m.lerf_auc), m.roc_auc, m.average_precision, m.mass];
            let cells = scores.map(|spread| spread.map_or_else(|| "-".into(), Spread::percent));
            table.row([m.map.to_string()].into_iter().chain(cells));
        }
        let mut text = table.to_string();
        let located = match self.located() {
            0 => String::new(),
            located => format!(", {located} of them with places in boxes and out"),
        };
        let cut = self.cut_note();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "percent, mean (deviation) over {}{located}; {}, {}, of {}, {}{cut}",
            counted(self.examples, "example"),
            self.rule,
            self.map_rule.words(),
            self.layer,
            self.mechanism.id()
        );
        text + &self.headline() + "\n"
    }

    /// How many places each layer looks at, of a model whose maps are not scored.
    fn table_of_layers(&self) -> String {
        let mut table = Columns::new([(Left, "layer"), (Right, "tokens looked at, %")]);
        for layer in &self.layers {
            table.row([layer.layer.clone(), layer.breadth.percent()]);
        }
        let note = self.cut_note();
        let note = if note.is_empty() { note } else { format!("{}\n", note.trim_start_matches("; ")) };
        table.to_string() + &note + &self.headline() + "\n"
    }

    /// How many texts were cut, where some were.
    fn cut_note(&self) -> String {
        match self.cut {
            0 => String::new(),
            cut => format!("; cut to what the model reads: {}", counted(cut, "text")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        let spread = Spread::new([1.0, 3.0]).unwrap();
        assert_eq!((spread.mean, spread.examples), (2.0, 2));
        assert!((spread.std - 2f64.sqrt()).abs() < 1e-12);
        assert_eq!(Spread::new([4.0]).unwrap().std, 0.0);
        assert_eq!(Spread::new([]), None);
    }

    #[test]
    fn curves_of_different_lengths_meet() {
        let curve = |y: [f64; 3]| Deletion { removed: vec![0.0, 0.5, 1.0], morf: y.to_vec(), lerf: y.to_vec() };
        let long = Deletion {
            removed: (0..=7).map(|i| f64::from(i) / 7.0).collect(),
            morf: (0..=7).map(|i| 1.0 - f64::from(i) / 7.0).collect(),
            lerf: vec![1.0; 8],
        };
        let scores = MapScores::new(MapKind::Random, &[curve([1.0, 0.5, 0.0]), long], &[], &[]).unwrap();
        for (removed, [mean, std]) in scores.removed.iter().zip(&scores.morf) {
            assert!((mean - (1.0 - removed)).abs() < 1e-9 && *std < 1e-9, "{removed} {mean} {std}");
        }
        assert!((scores.morf_aoc.mean - 0.5).abs() < 1e-12 && scores.roc_auc.is_none());
        assert_eq!(MapScores::new(MapKind::Random, &[], &[], &[]), None);
    }
}
