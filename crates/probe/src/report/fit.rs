//! The report of a fit.

use maud::{Markup, html};
use resolvent_lab::{
    fit::{Cost, FittedLayer, Measure},
    page::{
        self,
        chart::{self, Axes, Series},
    },
};

use crate::analyze::{CurvePoint, Fit, HeadFit, LayerFit, Single, TriedCandidate};

/// The page of a fit.
pub fn fit_page(fit: &Fit) -> String {
    let title = format!("What can stand for softmax in {}", fit.input);
    let on = if fit.unchecked() {
        "the same sequences: none was held out"
    } else {
        "sequences that took no part in the choice"
    };
    let body = html! {
        h1 { "What can stand for softmax here" }
        p class="quiet" { (fit.input) @if fit.file.causal { ", causal" } ". Nothing was trained: every candidate was applied to the queries, keys and values as they are." }
        (page::tiles(&tiles(fit)))
        @for sentence in fit.sentences() { p { (sentence) } }
        h2 { "Distance against cost" }
        div class="charts" {
            (pareto(fit))
            p class="quiet" {
                "Fitted: every head has its own mechanism, for targets from the strictest to the mildest. The others: one mechanism on all heads. Means over heads, on " (on)
                ". Further down is nearer to softmax, further left is cheaper."
            }
        }
        h2 { "Layer by layer" }
        div class="scroll" { (layers(fit)) }
        h2 { "One mechanism for all heads" }
        div class="scroll" { (singles(fit)) }
        h2 { "Head by head" }
        div class="scroll" { (heads(fit)) }
        (refused(fit))
        (page::environment(&fit.environment, &fit.input, &fit.commands))
    };
    page::shell(&title, &body)
}

fn number(x: Option<f64>, digits: usize) -> String {
    x.filter(|x| x.is_finite()).map_or_else(|| "–".into(), |x| format!("{x:.digits$}"))
}

fn tiles(fit: &Fit) -> Vec<(&'static str, String)> {
    let (count, reached, mean, _) = fit.checked();
    let all = fit.heads().count();
    let cost = match fit.file.cost {
        Cost::Time => "of softmax's time, by the candidates",
        Cost::Operations => "of softmax's operations",
    };
    let mean_of = match fit.file.measure {
        Measure::Cosine => "mean cosine, checked",
        Measure::Error => "mean error, checked",
    };
    vec![
        ("heads with less than dense softmax", format!("{} of {all}", all - fit.dense_heads())),
        (cost, number(Some(fit.share), 2)),
        ("of softmax's time, run as fitted", number(fit.time_ratio(), 2)),
        (mean_of, number(mean, 4)),
        ("heads that reach the target, checked", format!("{reached} of {count}")),
    ]
}

/// How far the heads of a point are, on what is held out where something is.
fn distance(fit: &Fit, point: &CurvePoint) -> Option<f64> {
    let measured = point.checked.or(point.fitted)?;
    Some(fit.file.measure.of_distance(measured)).filter(|distance| distance.is_finite())
}

/// What two digits of a cosine leave; nearer points would stretch the chart for nothing.
const NEAREST: f64 = 1e-5;

fn pareto(fit: &Fit) -> Markup {
    let place = |point: &CurvePoint| Some((point.cost, distance(fit, point)?.max(NEAREST))).filter(|p| p.0 > 0.0);
    let mut fitted: Vec<(f64, f64)> = fit.curve.iter().filter_map(place).collect();
    fitted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut series = vec![Series::line("fitted head by head", page::style_of("softmax"), fitted)];
    // Settings of one mechanism are one line.
    for single in fit.singles.iter().skip(1) {
        let id = mechanism_of(fit, &single.name);
        let Some(point) = place(&single.point) else { continue };
        match series.iter_mut().skip(1).find(|series| series.label == id) {
            Some(series) => series.points.push(point),
            None => series.push(Series::line(id, page::style_of(id), vec![point])),
        }
    }
    series.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    let (title, y) = match fit.file.measure {
        Measure::Cosine => ("One less the cosine, over the share of dense softmax's cost", "1 - cosine"),
        Measure::Error => ("Error, over the share of dense softmax's cost", "error"),
    };
    chart::log_lines(Axes { title, x: "of the cost", y, percent: false }, &series)
}

/// The id of the mechanism that a candidate is of.
fn mechanism_of<'a>(fit: &'a Fit, name: &'a str) -> &'a str {
    let mut candidates = fit.layers.iter().flat_map(|layer| &layer.candidates);
    candidates.find(|candidate| candidate.name == name).map_or(name, |candidate| candidate.mechanism.id())
}

fn chip(fit: &Fit, candidate: &str) -> Markup {
    html! { span class=(format!("chip s{}", page::style_of(mechanism_of(fit, candidate)))) {} (candidate) }
}

/// The heading of costs.
fn cost(fit: &Fit) -> String {
    format!("Cost ({})", fit.file.cost.name())
}

fn layers(fit: &Fit) -> Markup {
    let mean = |all: Vec<f64>| (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64);
    let milliseconds = |seconds: Option<f64>| number(seconds.map(|s| 1e3 * s), 2);
    let row = |(layer, found): (&FittedLayer, &LayerFit)| {
        html! {
            th scope="row" { (layer.name) }
            td { (page::count(found.tokens)) }
            td { (found.sequences) }
            td { (found.held_out) }
            td { (number(mean(found.heads.iter().map(|head| head.cost).collect()), 2)) }
            td { (number(mean(found.heads.iter().filter_map(|head| head.checked).collect()), 4)) }
            @for seconds in found.seconds { td { (milliseconds(seconds)) } }
            td class="words" { (mixture(fit, found)) }
        }
    };
    let (cost, checked) = (cost(fit), format!("Mean {}, checked", fit.file.measure.name()));
    let found = ["Layer", "Tokens", "Sequences", "Held out", &cost, &checked];
    let headings = found.into_iter().chain(["Softmax ms", "Fitted ms", "Mechanisms (heads)"]);
    page::table(headings, fit.file.layers.iter().zip(&fit.layers).map(row))
}

fn mixture(fit: &Fit, layer: &LayerFit) -> Markup {
    html! { @for (name, heads) in Fit::mixture(layer) { span { (chip(fit, name)) " (" (heads) ")" } " " } }
}

fn singles(fit: &Fit) -> Markup {
    let row = |single: &Single| {
        html! {
            th scope="row" { (chip(fit, &single.name)) }
            td { (number(Some(single.point.cost), 2)) }
            td { (number(single.point.fitted, 4)) }
            td { (number(single.point.checked, 4)) }
            td { (number(Some(single.worst), 4)) }
        }
    };
    let mean = format!("Mean {}", fit.file.measure.name());
    html! {
        (page::table(["Mechanism", &cost(fit), &mean, "Held out", "Worst head"], fit.singles.iter().map(row)))
        p class="quiet" { "Names tell settings: routed-clusters-routes-outlier keys (causal: routed-clusters/tokens of a segment-routes), local-window. What was refused, or has no output that could be compared on some head, is left out." }
    }
}

fn heads(fit: &Fit) -> Markup {
    let rows = |(layer, found): (&'_ FittedLayer, &'_ LayerFit)| {
        let row = |(number_of, head): (usize, &HeadFit)| {
            html! {
                th scope="row" { (layer.name) }
                td { (number_of) }
                td { (chip(fit, &head.candidate)) }
                td { (number(Some(head.cost), 2)) }
                td { (number(Some(head.fitted), 4)) }
                td { (number(head.checked, 4)) }
            }
        };
        found.heads.iter().enumerate().map(row).collect::<Vec<_>>()
    };
    let [chosen, checked] = ["chosen by", "checked"].map(|how| format!("{}, {how}", fit.file.measure.name()));
    let headings = ["Layer", "Head", "Mechanism", &cost(fit), &chosen, &checked];
    page::table(headings, fit.file.layers.iter().zip(&fit.layers).flat_map(rows))
}

/// What could not be tried, once for each reason.
fn refused(fit: &Fit) -> Markup {
    let mut told: Vec<(&str, &str)> = Vec::new();
    for TriedCandidate { name, refused, .. } in fit.layers.iter().flat_map(|layer| &layer.candidates) {
        if let Some(why) = refused.as_deref().filter(|why| !told.contains(&(name, why))) {
            told.push((name, why));
        }
    }
    html! {
        @if !told.is_empty() {
            h2 { "Not applicable here" }
            ul { @for (name, why) in told { li { code { (name) } ": " (why) } } }
        }
    }
}
