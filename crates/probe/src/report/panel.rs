//! The report of several models that were shown the same examples: their maps side by side. "Infinite Self-Attention", Fig. 12.

use maud::{Markup, PreEscaped, html};
use resolvent_lab::page;

use super::explanation::{backgrounds, bar, columns, framed, spread, tokens};
use crate::{
    explain::{Explanation, Shown},
    subject::Example,
};

/// The page of some models, by their names, each with what explains it.
pub fn panel_page(models: &[(String, Explanation)]) -> String {
    let Some((_, first)) = models.first() else { return page::shell("No models", &html! {}) };
    let shown = models.iter().flat_map(|(_, e)| &e.shown);
    let body = html! {
        h1 { "What " (models.len()) " models look at" }
        p class="quiet" {
            "The same " (page::count(first.examples)) " examples of " (first.data) ", shown to each. A map is that of the layer that is scored, " (first.map_rule.words())
            "; its colours run from 0 to its largest weight. Every layer and head of a model, and what its answers rest on, are in the report of its own folder."
        }
        h2 { "Models" }
        div class="scroll" { (table(models)) }
        @if models.iter().any(|(_, e)| !e.maps.is_empty()) { p class="quiet" { "Percent, mean and deviation over the examples. MoRF-AOC and LeRF-AUC are shares of a model's own answers' probabilities: compare them with those of the same model's random maps." } }
        @if !first.shown.is_empty() {
            h2 { "Maps" }
            style { (PreEscaped(backgrounds(shown))) }
            @for at in 0..first.shown.len() { (example(models, at)) }
        }
        (page::environment(&first.environment, &first.data, &first.commands))
    };
    page::shell("What several models look at", &body)
}

fn table(models: &[(String, Explanation)]) -> Markup {
    let boxes = models.iter().any(|(_, e)| e.located() > 0);
    // Language models have no scores.
    let columns = if models.iter().all(|(_, e)| e.maps.is_empty()) { &[] } else { columns(boxes) };
    let right = |e: &Explanation| {
        let known = e.answers.iter().filter(|found| found.label.is_some());
        let right = known.clone().filter(|found| found.label.as_ref() == Some(&found.answer)).count();
        (known.clone().count() > 0).then(|| page::percent(right as f64 / known.count() as f64))
    };
    let row = |(name, e): &(String, Explanation)| {
        html! {
            th scope="row" { a href=(format!("{}/report.html", address(name))) { (name) } }
            td { (e.mechanism.id()) }
            td { (e.layer) }
            td { (e.rule) }
            td { (right(e).unwrap_or_else(|| "–".into())) }
            @for (_, pick) in columns { (spread(e.maps.first().and_then(pick))) }
        }
    };
    let headings = ["Model", "Mechanism", "Layer", "A map is", "Answers right"]
        .into_iter()
        .chain(columns.iter().map(|(heading, _)| *heading));
    page::table(headings, models.iter().map(row))
}

/// A folder's name in an address.
fn address(name: &str) -> String {
    name.replace('%', "%25").replace('#', "%23").replace('?', "%3F")
}

/// One example with the map of every model.
fn example(models: &[(String, Explanation)], at: usize) -> Markup {
    let answer = |name: &str, shown: &Shown| {
        let answer = if shown.pairs.is_some() { format!("{:?}", shown.answer) } else { shown.answer.clone() };
        format!("{name}: {answer}, {}", page::percent(shown.probability))
    };
    let (_, first) = &models[0];
    let own = &first.shown[at];
    html! {
        section {
            h3 { (own.name) @if let Some(label) = &own.label { small { " (is " (label) ")" } } }
            div class="maps" {
                @if let Example::Picture(picture) = &own.example {
                    figure { (framed(at, picture, None, &format!("{}, as the first model sees it", own.name))) figcaption { "picture" } }
                }
                @for (number, (name, e)) in models.iter().enumerate() {
                    @let shown = &e.shown[at];
                    @for maps in shown.layers.iter().filter(|maps| maps.layer == e.layer) {
                        @match &shown.example {
                            Example::Picture(picture) => {
                                figure {
                                    (framed(number * first.shown.len() + at, picture, maps.grid.map(|grid| (&maps.mean[..], grid)), &format!("{}: {name}, {}", shown.name, maps.layer)))
                                    figcaption { (answer(name, shown)) (bar(&maps.mean)) }
                                }
                            }
                            Example::Text(text) => {
                                div { p class="quiet" { (answer(name, shown)) } (tokens(text, &maps.mean, None)) }
                            }
                        }
                    }
                }
            }
        }
    }
}
