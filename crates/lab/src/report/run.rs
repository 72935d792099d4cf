//! The report of one training run.

use maud::{Markup, html};

use super::samples;
use crate::{
    Recipe, Result,
    checkpoint::State,
    environment::Environment,
    evaluation::{Evaluation, Metric},
    metrics::{EpochRecord, Record, StepRecord, Watched},
    page::{
        self,
        chart::{self, Axes, Bar, Series},
    },
    train::TrainSummary,
};

/// What the model attends with, in a line.
fn about_attention(recipe: &Recipe) -> Markup {
    html! {
        p class="quiet" {
            @match &recipe.fit {
                Some(fit) => { "Heads by mechanism, as they were fitted: " (fit.heads()) "." }
                None => (page::about_mechanism(&recipe.mechanism)),
            }
        }
    }
}

/// The page of a run.
///
/// # Errors
/// [`crate::Error::Recipe`] for a recipe that cannot be written.
pub fn run_page(summary: &TrainSummary, metrics: &[Record]) -> Result<String> {
    let (recipe, test) = (&summary.recipe, &summary.test);
    let title = format!("{} on {}: {}", recipe.attention_name(), summary.data.name, score(test.metric(), test));
    let environment = Environment { device: summary.device.clone(), ..Environment::current() };
    let body = html! {
        h1 { (recipe.attention_name()) " on " (summary.data.name) }
        (about_attention(recipe))
        p class="verdict" { (summary.line()) "." }
        @if let Some(best) = &summary.best {
            p class="quiet" { "Best epoch on the held-out examples: " (best.epoch) ", " (best.metric.words(best.value)) "." }
        }
        @if let Some(origin) = &summary.origin { p class="quiet" { "The run " (origin.line()) "." } }
        @if let Some(bleu) = &test.bleu { (page::tiles(&[("test BLEU", format!("{:.2}", bleu.score))])) }
        @if let Some(prediction) = &test.prediction {
            (page::tiles(&[
                ("test perplexity", format!("{:.2}", prediction.perplexity)),
                ("bits per byte", format!("{:.4}", prediction.bits_per_byte)),
            ]))
        }
        @let accuracy = test.accuracy.map(|accuracy| ("test accuracy", page::percent(accuracy)));
        (page::tiles(&accuracy.into_iter().chain([
            ("test loss", format!("{:.3}", test.loss)),
            ("parameters", page::count(summary.parameters)),
            ("training examples/s", format!("{:.0}", summary.examples_per_second)),
            ("test examples/s", format!("{:.0}", test.examples_per_second)),
            ("time", page::duration(summary.seconds)),
        ]).collect::<Vec<_>>()))
        h2 { "Curves" }
        div class="charts" { (curves(metrics)) }
        h2 { "Where a step's time goes" }
        div class="charts" { (time(summary)) }
        @if !test.classes.is_empty() {
            h2 { "Classes" }
            div class="charts" { (per_class(test)) (confusion(test)) }
        }
        @if let Some(samples) = &summary.samples { (samples::section(samples)) }
        (page::recipe(recipe)?)
        (page::environment(&environment, &format!("{} ({})", summary.data.name, summary.data.fingerprint), &[]))
    };
    Ok(page::shell(&title, &body))
}

/// The page of a run that is under way.
///
/// # Errors
/// As [`run_page`].
pub fn progress_page(state: &State, metrics: &[Record]) -> Result<String> {
    let (recipe, plan) = (&state.recipe, &state.plan);
    let title = format!("{} on {}: step {} of {}", recipe.attention_name(), state.data.name, state.step, plan.steps);
    let last = epochs(metrics).last();
    let scores = last.iter().flat_map(|epoch| {
        let scores = [(Metric::Bleu, epoch.bleu), (Metric::BitsPerByte, epoch.bits_per_byte)];
        let scores = scores.into_iter().chain([(Metric::Accuracy, epoch.accuracy)]);
        scores.filter_map(|(metric, value)| Some(format!(", {} {}", epoch.split, metric.words(value?))))
    });
    let body = html! {
        h1 { (recipe.attention_name()) " on " (state.data.name) }
        (about_attention(recipe))
        p class="verdict" {
            "Under way: step " (state.step) " of " (plan.steps)
            @if let Some(epoch) = last { "; epoch " (epoch.epoch) " ended with a loss of " (format!("{:.3}", epoch.loss)) }
            @for score in scores { (score) }
            "."
        }
        @if let Some(origin) = &state.origin { p class="quiet" { "The run " (origin.line()) "." } }
        (page::tiles(&[
            ("steps", format!("{} of {}", state.step, plan.steps)),
            ("epochs begun", format!("{} of {}", state.step.div_ceil(plan.steps_per_epoch), plan.epochs())),
            ("time", page::duration(state.seconds)),
        ]))
        h2 { "Curves" }
        div class="charts" { (curves(metrics)) }
        (page::recipe(recipe)?)
        (page::environment(&Environment::current(), &format!("{} ({})", state.data.name, state.data.fingerprint), &[]))
    };
    Ok(page::shell(&title, &body))
}

/// The step lines of a run.
pub(super) fn steps(metrics: &[Record]) -> impl Iterator<Item = &StepRecord> {
    metrics.iter().filter_map(|record| if let Record::Step(step) = record { Some(step) } else { None })
}

/// The epoch lines of a run.
pub(super) fn epochs(metrics: &[Record]) -> impl Iterator<Item = &EpochRecord> {
    metrics.iter().filter_map(|record| if let Record::Epoch(epoch) = record { Some(epoch) } else { None })
}

fn curves(metrics: &[Record]) -> Markup {
    let line = |label: &str, style, points: Vec<(f64, f64)>| Series::line(label, style, points);
    let of_epochs = |pick: fn(&EpochRecord) -> f64| epochs(metrics).map(|e| (e.step as f64, pick(e))).collect();
    let of_steps = |pick: fn(&StepRecord) -> f64| steps(metrics).map(|s| (s.step as f64, pick(s))).collect();
    let watched = epochs(metrics).next().map_or(Watched::Test, |epoch| epoch.split).name();
    let accuracy_of = format!("Accuracy on the {watched} part");
    let axes = Axes::over_steps;
    html! {
        (chart::lines(axes("Cross-entropy", "loss", false), &[
            line("training (soft targets)", 1, of_steps(|s| s.loss)),
            line(watched, 0, of_epochs(|e| e.loss)),
        ]))
        @if epochs(metrics).any(|epoch| epoch.accuracy.is_some()) {
            (chart::lines(axes(&accuracy_of, "accuracy", true), &[line(watched, 0, scores(metrics, |e| e.accuracy))]))
        }
        @if epochs(metrics).any(|epoch| epoch.bleu.is_some()) {
            (chart::lines(axes("BLEU", "BLEU", false), &[line(watched, 0, scores(metrics, |e| e.bleu))]))
        }
        @if epochs(metrics).any(|epoch| epoch.bits_per_byte.is_some()) {
            (chart::lines(axes("Bits per byte", "bits", false), &[line(watched, 0, scores(metrics, |e| e.bits_per_byte))]))
        }
        (chart::lines(axes("Learning rate", "rate", false), &[line("rate", 0, of_steps(|s| s.lr))]))
        (chart::lines(axes("Norm of the gradient before clipping", "norm", false), &[line("norm", 0, of_steps(|s| s.grad_norm))]))
        (learned(metrics))
    }
}

/// A chart of each kind of learned scalar, a line for each place that has one.
fn learned(metrics: &[Record]) -> Markup {
    let Some(last) = epochs(metrics).last() else { return html! {} };
    let chart = |(kind, places): (&str, Vec<(&str, f64)>)| {
        let lines = places.iter().enumerate().map(|(at, (place, _))| {
            let name = if place.is_empty() { kind.to_owned() } else { format!("{place}.{kind}") };
            let points = scores(metrics, |epoch| epoch.learned.get(&name));
            Series::line(if place.is_empty() { kind } else { place }, at % 6, points)
        });
        chart::lines(Axes::over_steps(&format!("Learned {kind}"), kind, false), &lines.collect::<Vec<_>>())
    };
    html! { @for kind in last.learned.kinds() { (chart(kind)) } }
}

/// The value of `metric` with its name.
fn score(metric: Metric, evaluation: &Evaluation) -> String {
    metric.of(evaluation).map_or_else(String::new, |value| metric.words(value))
}

/// A score that not every model has, over the steps.
pub(super) fn scores(metrics: &[Record], pick: impl Fn(&EpochRecord) -> Option<f64>) -> Vec<(f64, f64)> {
    epochs(metrics).filter_map(|epoch| Some((epoch.step as f64, pick(epoch)?))).collect()
}

fn time(summary: &TrainSummary) -> Markup {
    let time = &summary.time;
    let steps = time.steps.max(1) as f64;
    let rows: Vec<_> = time
        .step_parts()
        .iter()
        .map(|&(name, seconds)| Bar {
            label: name.into(),
            style: 0,
            value: seconds / steps * 1e3,
            text: format!("{:.1} ms", seconds / steps * 1e3),
            dots: vec![],
        })
        .collect();
    html! {
        (chart::bars("Milliseconds of a step", 0.0, &rows))
        p class="quiet" { (time.line()) "." }
    }
}

fn per_class(test: &Evaluation) -> Markup {
    let named = test.classes.iter().zip(&test.per_class);
    let rows: Vec<_> = named
        .filter_map(|(class, accuracy)| {
            let accuracy = (*accuracy)?;
            Some(Bar {
                label: shortened(class, 16),
                style: 0,
                value: accuracy,
                text: page::percent(accuracy),
                dots: vec![],
            })
        })
        .collect();
    chart::bars("Accuracy per class", 0.0, &rows)
}

fn shortened(name: &str, most: usize) -> String {
    if name.chars().count() <= most { name.into() } else { name.chars().take(most - 1).chain(['…']).collect() }
}

/// The confusion matrix, where it is small enough to be read.
fn confusion(test: &Evaluation) -> Markup {
    if test.classes.len() > 20 {
        return html! {};
    }
    html! {
        figure {
            figcaption { "Confusion: a row per label, a column per answer, in examples" }
            div class="scroll" {
                table class="matrix" {
                    thead { tr { th {} @for class in &test.classes { th scope="col" title=(class) { (shortened(class, 4)) } } } }
                    tbody {
                        @for (class, row) in test.classes.iter().zip(&test.confusion) {
                            @let total = row.iter().sum::<u64>().max(1) as f64;
                            tr {
                                th scope="row" { (shortened(class, 10)) }
                                @for &n in row { td style=(format!("--share:{:.2}", n as f64 / total)) { (n) } }
                            }
                        }
                    }
                }
            }
        }
    }
}
