//! The report of a comparison.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::run::{epochs, scores, steps};
use crate::{
    Result,
    compare::{Comparison, Entry, Spread},
    metrics::{Record, Watched},
    page::{
        self,
        chart::{self, Axes, Bar, Series},
    },
};

/// The page of a comparison; `metrics` are those of each entry's runs.
///
/// # Errors
/// [`crate::Error::Recipe`] for a recipe that cannot be written.
pub fn comparison_page(comparison: &Comparison, metrics: &[Vec<Vec<Record>>]) -> Result<String> {
    let Comparison { recipe, data, plan, seeds, entries, environment, commands, .. } = comparison;
    let title = format!("Attention mechanisms on {}", data.name);
    let body = html! {
        h1 { (title) }
        p class="quiet" {
            "The same model, data, recipe and seeds; only the attention differs. "
            (entries.len() + comparison.lost().len()) " mechanisms, " (seeds.len()) " seed" @if seeds.len() != 1 { "s" } ", "
            (plan.steps) " steps of " (recipe.schedule.step_examples()) " examples a run."
        }
        p class="verdict" { (comparison.headline()) }
        @for caveat in comparison.caveats() { p { strong { "Note. " } (caveat) } }
        h2 { "Result" }
        (table(comparison))
        (intervals(comparison))
        h2 { "Side by side" }
        div class="charts" { (side_by_side(comparison)) }
        h2 { "Curves" }
        @if seeds.len() > 1 { p class="quiet" { "Lines: means over the seeds; bands: from the least to the largest of them." } }
        div class="charts" { (curves(entries, metrics)) }
        h2 { "The mechanisms" }
        dl {
            @for entry in entries {
                dt { (chip(entries, entry)) (entry.name) }
                dd {
                    (page::about_mechanism(&entry.mechanism)) (landmarks(entry)) (learned(entry))
                    @if entry.name != entry.mechanism.id() { br; code { (serde_json::to_string(&entry.mechanism).unwrap_or_default()) } }
                }
            }
        }
        (page::recipe(recipe)?)
        (page::environment(environment, &format!("{} ({})", data.name, data.fingerprint), commands))
        p class="quiet" {
            "Speed: medians of short runs of all mechanisms in turn, at batch size " (entries[0].speed.batch)
            ", on the trained models; the batch is at hand. "
            @if entries.iter().any(|entry| entry.speed.peak_bytes.is_some()) {
                "Peak memory: the most heap that model, optimiser and one training step hold together."
            }
        }
    };
    Ok(page::shell(&title, &body))
}

/// The style of `entry`: its mechanism's, and where several have the same mechanism, one that no other has.
fn style_of(entries: &[Entry], entry: &Entry) -> usize {
    let ids: Vec<&str> = entries.iter().map(|entry| entry.mechanism.id()).collect();
    let at = entries.iter().position(|other| other.name == entry.name);
    at.map_or_else(|| page::style_of(entry.mechanism.id()), |at| page::style_among(&ids, at))
}

fn chip(entries: &[Entry], entry: &Entry) -> Markup {
    html! { span class=(format!("chip s{}", style_of(entries, entry))) {} }
}

fn table(comparison: &Comparison) -> Markup {
    let entries = &comparison.entries;
    let memory = entries.iter().any(|entry| entry.speed.peak_bytes.is_some());
    let bleu = entries.iter().any(|entry| entry.bleu().is_some());
    let predicts = entries.iter().any(|entry| entry.perplexity().is_some());
    let shown = |spread: Option<Spread>, digits| spread.map_or("–".into(), |spread| spread.digits(digits));
    let behind = format!("Behind the best, {}", comparison.metric().points());
    let outcome = if has_accuracy(comparison) { "Test accuracy, %" } else { "Test loss" };
    let rate = |rate: f64| page::count(rate.round() as usize);
    html! {
        table class="wide sortable" {
            thead { tr {
                th scope="col" { "Mechanism" }
                th scope="col" { (outcome) }
                th scope="col" { (behind) }
                @if bleu { th scope="col" { "Test BLEU" } }
                @if predicts { th scope="col" { "Test perplexity" } th scope="col" { "Bits per byte" } }
                th scope="col" { "Training, examples/s" }
                th scope="col" { "Inference, examples/s" }
                @if memory { th scope="col" { "Peak memory" } }
                th scope="col" { "Parameters" }
                th scope="col" { "Time of a run" }
            } }
            tbody {
                @for entry in comparison.ranked() {
                    @let seconds = entry.runs.iter().map(|run| run.seconds).sum::<f64>() / entry.runs.len() as f64;
                    tr {
                        th scope="row" { (chip(entries, entry)) (entry.name) }
                        @let (mean, text) = entry.outcome();
                        td data-label=(outcome) data-value=(mean) {
                            strong { (text) }
                            @if let Some(told) = comparison.divergence(&entry.name) { br; small { (told) } }
                        }
                        @let difference = comparison.beside_best(entry);
                        td data-label=(behind) data-value=(difference.points) { span { (difference_text(comparison, entry)) } }
                        @if bleu {
                            td data-label="Test BLEU" { (entry.bleu().map_or("–".into(), |bleu| bleu.points())) }
                        }
                        @if predicts {
                            td data-label="Test perplexity" { (shown(entry.perplexity(), 2)) }
                            td data-label="Bits per byte" { (shown(entry.bits_per_byte(), 4)) }
                        }
                        td data-label="Training, examples/s" { (rate(entry.speed.train_examples_per_second)) }
                        td data-label="Inference, examples/s" { (rate(entry.speed.infer_examples_per_second)) }
                        @if memory {
                            td data-label="Peak memory" data-value=[entry.speed.peak_bytes] { (entry.speed.peak_bytes.map_or("–".into(), page::megabytes)) }
                        }
                        td data-label="Parameters" { (page::count(entry.parameters)) }
                        td data-label="Time of a run" data-value=(seconds) { (page::duration(seconds)) }
                    }
                }
                @for lost in comparison.lost() {
                    tr {
                        th scope="row" { (lost.name) }
                        td data-label=(outcome) { (comparison.divergence(&lost.name).unwrap_or_default()) }
                        @for _ in 0..5 + usize::from(bleu) + 2 * usize::from(predicts) + usize::from(memory) { td { "–" } }
                    }
                }
            }
        }
    }
}

/// How far behind the best, and whether that is told from nothing.
fn difference_text(comparison: &Comparison, entry: &Entry) -> Markup {
    let difference = comparison.beside_best(entry);
    html! {
        @if comparison.ranked()[0].name == entry.name { "the best" } @else {
            (difference.text())
            @if !difference.is_told() { br; small { "not told apart" } }
        }
    }
}

/// What the intervals of the differences are of.
fn intervals(comparison: &Comparison) -> Markup {
    let differences: Vec<_> = comparison.ranked().iter().skip(1).map(|entry| comparison.beside_best(entry)).collect();
    let with = |of_seeds: bool| differences.iter().any(|d| d.interval.is_some() && d.of_seeds == of_seeds);
    let of = match (with(true), with(false)) {
        (true, false) => "over the seeds, in pairs of the same seed (Student's)",
        (true, true) => {
            "over the seeds, in pairs of the same seed (Student's); where two mechanisms have one seed in common, or differ by the same in all of them, by the number of test examples alone (Newcombe's)"
        }
        _ => "by the number of test examples alone (Newcombe's): another seed may change more",
    };
    html! {
        @if !differences.is_empty() {
            p class="quiet" {
                "Ranked. "
                @if differences.iter().any(|difference| difference.interval.is_some()) {
                    "In brackets the interval that holds the true difference in 95 of 100 cases, each by itself, " (of) "."
                } @else {
                    "What differences are worth takes more than one seed."
                }
            }
        }
    }
}

fn side_by_side(comparison: &Comparison) -> Markup {
    let bars = |value: fn(&Entry) -> f64, text: fn(&Entry) -> String, dots: fn(&Entry) -> Vec<f64>| {
        let bar = |entry: &Entry| Bar {
            label: entry.name.clone(),
            style: style_of(&comparison.entries, entry),
            value: value(entry),
            text: text(entry),
            dots: dots(entry),
        };
        comparison.ranked().into_iter().map(bar).collect::<Vec<_>>()
    };
    let several = comparison.seeds.len() > 1;
    let outcome = bars(
        |e| e.outcome().0,
        |e| e.outcome().1 + if e.accuracy.is_some() { " %" } else { "" },
        |e| if e.runs.len() > 1 { e.runs.iter().map(|run| run.accuracy.unwrap_or(run.loss)).collect() } else { vec![] },
    );
    let training = bars(
        |e| e.speed.train_examples_per_second,
        |e| page::count(e.speed.train_examples_per_second.round() as usize),
        |_| vec![],
    );
    let inference = bars(
        |e| e.speed.infer_examples_per_second,
        |e| page::count(e.speed.infer_examples_per_second.round() as usize),
        |_| vec![],
    );
    let memory = bars(
        |e| e.speed.peak_bytes.unwrap_or(0) as f64,
        |e| e.speed.peak_bytes.map_or("–".into(), page::megabytes),
        |_| vec![],
    );
    let title = if has_accuracy(comparison) { "Test accuracy" } else { "Test loss" };
    let title = format!("{title}{}", if several { ", mean over the seeds; each seed a dot" } else { "" });
    html! {
        (chart::bars(&title, 0.0, &outcome))
        (chart::bars("Training examples per second", 0.0, &training))
        (chart::bars("Inference examples per second", 0.0, &inference))
        @if comparison.entries.iter().any(|e| e.speed.peak_bytes.is_some()) {
            (chart::bars("Peak memory of a training step", 0.0, &memory))
        }
    }
}

fn curves(entries: &[Entry], metrics: &[Vec<Vec<Record>>]) -> Markup {
    type Points<'a> = &'a dyn Fn(&[Record]) -> Vec<(f64, f64)>;
    let series = |points: Points<'_>| {
        let line = |(entry, runs): (&Entry, &Vec<Vec<Record>>)| {
            let runs: Vec<_> = runs.iter().map(|run| points(run)).collect();
            over_runs(&entry.name, style_of(entries, entry), &runs)
        };
        entries.iter().zip(metrics).map(line).collect::<Vec<_>>()
    };
    let accuracy = series(&|metrics| scores(metrics, |epoch| epoch.accuracy));
    let loss = series(&|metrics| steps(metrics).map(|s| (s.step as f64, s.loss)).collect());
    let watched = metrics.iter().flatten().flat_map(|m| epochs(m)).next().map_or(Watched::Test, |epoch| epoch.split);
    let accuracy_of = format!("Accuracy on the {watched} part");
    let axes = Axes::over_steps;
    html! {
        @if accuracy.iter().any(|series| !series.points.is_empty()) {
            (chart::lines(axes(&accuracy_of, "accuracy", true), &accuracy))
        }
        (chart::lines(axes("Training loss (soft targets)", "loss", false), &loss))
    }
}

/// The mean of several runs where each has a value, with a band from the least to the largest of them.
fn over_runs(label: &str, style: usize, runs: &[Vec<(f64, f64)>]) -> Series {
    let mut values: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    // Steps are whole numbers.
    runs.iter().flatten().for_each(|&(x, y)| values.entry(x as u64).or_default().push(y));
    values.retain(|_, all| all.len() == runs.len());
    let points = values.iter().map(|(&x, all)| (x as f64, all.iter().sum::<f64>() / all.len() as f64)).collect();
    let extent = |(&x, all): (&u64, &Vec<f64>)| {
        let (low, high) = all.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), y| (l.min(*y), h.max(*y)));
        (x as f64, low, high)
    };
    let band = if runs.len() > 1 { values.iter().map(extent).collect() } else { Vec::new() };
    Series { band, ..Series::line(label, style, points) }
}

/// How many landmarks there are, if any.
fn landmarks(entry: &Entry) -> Markup {
    html! { @if !entry.landmarks.is_empty() { " " small { "Landmarks: " (entry.landmarks_text()) " tokens." } } }
}

/// What the first run learned in scalars, if anything.
fn learned(entry: &Entry) -> Markup {
    let settings = serde_json::to_value(&entry.mechanism).unwrap_or_default();
    html! {
        @for (kind, places) in entry.runs[0].learned.kinds() {
            @let from = settings.get(kind).and_then(serde_json::Value::as_f64);
            @let from = from.map_or_else(String::new, |from| format!(" (from {from})"));
            @let values = places.iter().map(|(_, value)| format!("{value:.3}")).collect::<Vec<_>>().join(", ");
            " " small { "Learned " (kind) (from) ": " (values) "." }
        }
    }
}

/// Whether its models have an accuracy.
fn has_accuracy(comparison: &Comparison) -> bool {
    comparison.entries.iter().any(|entry| entry.accuracy.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps that a run does not have, as one that stopped early, are none of the mean.
    #[test]
    fn runs_make_a_line_and_a_band() {
        let runs = [vec![(1.0, 2.0), (2.0, 4.0)], vec![(1.0, 4.0), (2.0, 0.0), (3.0, 9.0)]];
        let series = over_runs("a", 0, &runs);
        assert_eq!(series.points, [(1.0, 3.0), (2.0, 2.0)]);
        assert_eq!(series.band, [(1.0, 2.0, 4.0), (2.0, 0.0, 4.0)]);
        assert!(over_runs("a", 0, &runs[..1]).band.is_empty());
    }
}
