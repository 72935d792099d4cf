//! The report of a benchmark of whole models.

use maud::{Markup, html};

use crate::{
    Result,
    bench::{Cost, ModelPoint, ModelReport},
    environment::Load,
    page::{
        self,
        chart::{self, Axes, Series},
    },
};

/// The page of a benchmark of whole models.
pub fn models_page(report: &ModelReport) -> Result<String> {
    let title = format!("The model {} against the size of the pictures", report.recipe.name);
    let (batch, rounds) = (report.batch, report.rounds);
    let left = || report.points.iter().filter(|point| point.skipped.is_some() || point.left_out.is_some());
    let row = |cells: Vec<String>| html! { @for (at, cell) in cells.iter().enumerate() { @if at == 0 { th scope="row" { (cell) } } @else { td { (cell) } } } };
    let body = html! {
        h1 { (title) }
        p class="quiet" {
            "Batches of " (batch) " picture" @if batch != 1 { "s" } ". Medians of " (rounds) " turns; the mechanisms of one size take turns."
        }
        p class="verdict" { (report.headline()) }
        @if let Some(load) = report.load.filter(Load::is_busy) { p { strong { "Warning. " } (load) "." } }
        @if report.interrupted { p { strong { "Note. " } "Stopped before all sizes were measured." } }
        div class="charts" {
            (curves(report, "Seconds, inference", |point| point.inference))
            (curves(report, "Seconds, training step", |point| point.training))
        }
        h2 { "Costs" }
        div class="scroll" { (page::table(report.headings(), report.rows().into_iter().map(row))) }
        @if left().next().is_some() {
            h2 { "Left out" }
            ul { @for point in left() { li { (point) } } }
        }
        (page::recipe(&report.recipe)?)
        (page::environment(&report.environment, "generated pictures of noise, three channels", &report.commands))
        p class="quiet" {
            "Multiply-adds are those of one picture's logits, without norms, activations, biases and sums. Memory: of inference what it holds beside the "
            "weights; of training all that the model, its optimiser and a step hold. A training step is forward, backward and optimiser."
            @if report.has_joules() { " Joules of a picture are those of the processor's packages meanwhile, whatever else they did." }
        }
    };
    Ok(page::shell(&title, &body))
}

fn curves(report: &ModelReport, title: &str, of: fn(&ModelPoint) -> Option<Cost>) -> Markup {
    let names = report.names();
    let id =
        |name: &&str| report.points.iter().find(|point| point.name == **name).map_or("", |point| point.mechanism.id());
    let ids: Vec<&str> = names.iter().map(id).collect();
    let points = |name: &str| {
        let own = report.points.iter().filter(|point| point.name == name);
        own.filter_map(|point| Some((point.pixels as f64, of(point)?.seconds))).collect::<Vec<_>>()
    };
    let series =
        names.iter().enumerate().map(|(at, name)| Series::line(*name, page::style_among(&ids, at), points(name)));
    let series: Vec<_> = series.filter(|series| !series.points.is_empty()).collect();
    chart::log_lines(Axes { title, x: "pixels a side", y: "s", percent: false }, &series)
}
