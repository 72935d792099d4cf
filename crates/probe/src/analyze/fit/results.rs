//! What a fit found.

use std::fmt::Write;

use resolvent_kernels::Mechanism;
use resolvent_lab::{
    columns::{
        Align::{Left, Right},
        Columns,
    },
    environment::Environment,
    fit::{FitFile, FittedLayer, Measure},
};
use serde::Serialize;

use super::is_softmax;

/// A mechanism for every head, and what it is worth.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fit {
    /// What the dump is called.
    pub input: String,
    /// The file that others read.
    #[serde(flatten)]
    pub file: FitFile,
    /// What all heads together cost, as a share of dense softmax, from the costs of the candidates.
    pub share: f64,
    /// Costs and distances for other targets.
    pub curve: Vec<CurvePoint>,
    /// Every candidate on all heads.
    pub singles: Vec<Single>,
    /// Layer by layer.
    #[serde(rename = "found")]
    pub layers: Vec<LayerFit>,
    /// Seconds that it took.
    pub seconds: f64,
    /// Where it was measured.
    pub environment: Environment,
    /// Commands that repeat it.
    pub commands: Vec<String>,
}

/// All heads together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CurvePoint {
    /// Share of dense softmax's cost.
    pub cost: f64,
    /// Mean of the measure over heads on the sequences that choices are made by.
    pub fitted: Option<f64>,
    /// On those held out.
    pub checked: Option<f64>,
}

/// One candidate on all heads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Single {
    /// Its name.
    pub name: String,
    /// What it costs, and its means.
    #[serde(flatten)]
    pub point: CurvePoint,
    /// The measure of its worst head on the sequences that choices are made by.
    pub worst: f64,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerFit {
    /// Tokens of its longest sequence.
    pub tokens: usize,
    /// Sequences in all.
    pub sequences: usize,
    /// Those that took no part in the choice.
    pub held_out: usize,
    /// Mean seconds of dense softmax and of the fitted groups, run one after the other on what is held out, or on all where nothing is.
    pub seconds: [Option<f64>; 2],
    /// Head by head.
    pub heads: Vec<HeadFit>,
    /// All that was tried.
    pub candidates: Vec<TriedCandidate>,
    /// The mechanisms.
    #[serde(skip)]
    pub mechanisms: FittedLayer,
}

/// One head.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeadFit {
    /// The candidate that it has.
    pub candidate: String,
    /// Its share of dense softmax's cost.
    pub cost: f64,
    /// The measure on the sequences that the choice is made by.
    pub fitted: f64,
    /// On what is held out, in the groups that it will be in; on all, where nothing is.
    pub checked: Option<f64>,
}

/// One candidate on one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TriedCandidate {
    /// Its name.
    pub name: String,
    /// What it is.
    pub mechanism: Mechanism,
    /// Why it cannot be had.
    pub refused: Option<String>,
    /// Median share of dense softmax's cost.
    pub cost: Option<f64>,
    /// The measure of every head on the sequences that choices are made by.
    pub fitted: Vec<Option<f64>>,
    /// On those held out.
    pub checked: Vec<Option<f64>>,
}

impl Fit {
    /// All heads.
    pub fn heads(&self) -> impl Iterator<Item = &HeadFit> {
        self.layers.iter().flat_map(|layer| &layer.heads)
    }

    /// Heads that keep dense softmax.
    pub fn dense_heads(&self) -> usize {
        let groups = self.file.layers.iter().flat_map(|layer| &layer.groups);
        groups.filter(|group| is_softmax(&group.mechanism)).map(|group| group.heads.len()).sum()
    }

    /// Whether `measured` reaches the target.
    pub fn reaches(&self, measured: f64) -> bool {
        match self.file.measure {
            Measure::Cosine => measured >= self.file.target,
            Measure::Error => measured <= self.file.target,
        }
    }

    /// Whether nothing was held out.
    pub fn unchecked(&self) -> bool {
        self.layers.iter().all(|layer| layer.held_out == 0)
    }

    /// Seconds of the fitted layers over those of dense softmax, as they were run last.
    pub fn time_ratio(&self) -> Option<f64> {
        let sum = |which: usize| self.layers.iter().map(|layer| layer.seconds[which]).sum::<Option<f64>>();
        Some(sum(1)? / sum(0)?).filter(|ratio| ratio.is_finite())
    }

    /// Heads on which the measure could be checked, how many of them reach the target, the mean and the worst.
    pub fn checked(&self) -> (usize, usize, Option<f64>, Option<f64>) {
        let all: Vec<f64> = self.heads().filter_map(|head| head.checked).collect();
        let mean = (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64);
        let worst = match self.file.measure {
            Measure::Cosine => all.iter().copied().reduce(f64::min),
            Measure::Error => all.iter().copied().reduce(f64::max),
        };
        (all.len(), all.iter().filter(|&&x| self.reaches(x)).count(), mean, worst)
    }

    /// The cheapest candidate that reaches the target in the mean of all heads by itself, beside softmax.
    pub fn best_single(&self) -> Option<&Single> {
        let others = self.singles.iter().skip(1).filter(|single| single.point.fitted.is_some_and(|x| self.reaches(x)));
        others.min_by(|a, b| a.point.cost.total_cmp(&b.point.cost))
    }

    /// The mechanisms of a layer, the most frequent first, with their heads.
    pub fn mixture(layer: &LayerFit) -> Vec<(&str, usize)> {
        let mut found: Vec<(&str, usize)> = Vec::new();
        for head in &layer.heads {
            match found.iter_mut().find(|(name, _)| *name == head.candidate) {
                Some((_, count)) => *count += 1,
                None => found.push((&head.candidate, 1)),
            }
        }
        found.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        found
    }

    /// What was found, in sentences.
    pub fn sentences(&self) -> Vec<String> {
        let (count, reached, mean, worst) = self.checked();
        let all = self.heads().count();
        let (unit, measure) = (self.file.cost.name(), self.measure());
        let dense = self.dense_heads();
        let below = self.heads().filter(|head| !self.reaches(head.fitted)).count();
        let able = all - dense - below;
        let rest: Vec<String> = [(dense, ["keeps", "keep"], "it"), (below, ["misses", "miss"], "the target")]
            .into_iter()
            .filter(|&(count, ..)| count > 0)
            .map(|(count, does, what)| format!(", {count} {} {what}", does[usize::from(count > 1)]))
            .collect();
        let mut told = vec![match dense {
            // A budget takes what it costs, whatever the heads do then.
            _ if self.file.budget.is_some() && below == all => {
                format!("None of the {all} heads reaches {measure} with what it has got for the budget.")
            }
            dense if dense == all => format!(
                "Nothing that was tried is cheaper than dense softmax and reaches {measure} on any of the {all} heads: softmax stays."
            ),
            _ if able == 0 => {
                format!("None of the {all} heads reaches {measure} with less than dense softmax{}.", rest.concat())
            }
            _ if able == all => format!(
                "All {all} heads can do with less than dense softmax: by the candidates' own {unit} {:.2} of softmax's.",
                self.share
            ),
            _ => format!(
                "{able} of {all} heads can do with less than dense softmax{}: by the candidates' own {unit} {:.2} of softmax's.",
                rest.concat(),
                self.share
            ),
        }];
        if let Some(budget) = self.file.budget {
            told.push(match self.share <= budget {
                true if below == 0 => format!("The budget of {budget} holds, and every head reaches the target."),
                true => format!("The budget of {budget} holds; {below} of {all} heads leave the target for it."),
                false => format!(
                    "The budget of {budget} cannot be kept: the cheapest that was tried costs {}.",
                    if self.share < 0.01 { format!("{:.1e}", self.share) } else { format!("{:.2}", self.share) }
                ),
            });
        }
        if let (Some(mean), Some(worst), true) = (mean, worst, dense < all) {
            let on = if self.unchecked() {
                "the same sequences, since none was held out"
            } else {
                "sequences that took no part in the choice"
            };
            let time = self
                .time_ratio()
                .map_or_else(String::new, |ratio| format!(" The layers take {ratio:.2} times softmax's time there."));
            told.push(format!(
                "On {on} {reached} of {count} heads reach the target (mean {mean:.4}, worst {worst:.4}).{time}"
            ));
        }
        told.push(match self.best_single() {
            Some(single) => format!(
                "One mechanism for all heads: {} reaches the target in their mean at {:.2} times softmax's {unit} (worst head {:.4}).",
                single.name, single.point.cost, single.worst
            ),
            None => format!("No single mechanism reaches {measure} in the mean of all heads."),
        });
        told
    }

    fn measure(&self) -> String {
        match self.file.measure {
            Measure::Cosine => format!("a cosine of {}", self.file.target),
            Measure::Error => format!("an error of {}", self.file.target),
        }
    }

    /// Layers and sentences as text.
    pub fn table(&self) -> String {
        let name = self.file.measure.name();
        let numbers = ["cost", name, "x softmax"].map(|name| (Right, name));
        let last = (Left, "mechanisms (heads)");
        let mut table = Columns::new([(Left, "layer")].into_iter().chain(numbers).chain([last]));
        for (layer, found) in self.file.layers.iter().zip(&self.layers) {
            let mean = |of: &dyn Fn(&HeadFit) -> Option<f64>| {
                let all: Vec<f64> = found.heads.iter().filter_map(of).collect();
                (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
            };
            let shown = |x: Option<f64>, digits: usize| x.map_or_else(|| "-".into(), |x| format!("{x:.digits$}"));
            let ratio = found.seconds[0].zip(found.seconds[1]).map(|(dense, own)| own / dense);
            let mixture: Vec<String> = Self::mixture(found).iter().map(|(name, n)| format!("{name} ({n})")).collect();
            table.row([
                layer.name.clone(),
                shown(mean(&|head| Some(head.cost)), 2),
                shown(mean(&|head| head.checked), 4),
                shown(ratio, 2),
                mixture.join(", "),
            ]);
        }
        let mut text = table.to_string();
        let on = if self.unchecked() { "all sequences" } else { "held-out sequences" };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "cost: {} over dense softmax's; {name} and x softmax (time): on {on}, as fitted\n",
            self.file.cost.name()
        );
        for sentence in self.sentences() {
            let _ = writeln!(text, "{sentence}");
        }
        text
    }
}
