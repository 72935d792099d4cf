//! The report of an analysis.

use maud::{Markup, html};
use resolvent_graph::{Alignment, PerronReport};

use super::{
    chart::{self, Axes, Series},
    page,
};
use crate::analyze::{
    Analysis, CLOSE, DistanceStats, Finding, GraphReport, HeadDistances, HeadResult, LayerSummary, Numbers, median,
};

/// The page of an analysis.
pub fn analysis_page(analysis: &Analysis) -> String {
    let heads: usize = analysis.layers.iter().map(|layer| layer.heads * layer.sequences).sum();
    let title = format!("The token graphs of {}", analysis.input);
    let several = analysis.layers.len() > 1;
    let body = html! {
        h1 { "What these queries and keys attend to" }
        p class="quiet" {
            (analysis.input) ": " (heads) " heads of " (analysis.layers.len()) " layers"
            @if analysis.causal { ", causal" } ". Every mechanism was applied to them as they are, without training, in place of softmax."
        }
        (page::tiles(&tiles(analysis, heads)))
        h2 { "Which of these can replace softmax here" }
        div class="scroll" { (summary(analysis)) }
        p class="quiet" {
            "Medians over heads and calls. Error: distance from dense softmax's output as a share of it, after the one factor per head "
            "that an output projection can absorb; close is at most " (percent(Some(CLOSE))) ". Memory: held beside the tensors of a layer's call. "
            "Rows: tokens that a row attends to, the exponential of its entropy. Directions: the same of the spectrum of the symmetrised "
            "graph. Gap: of its normalised Laplacian. Hops: along shortest paths with an edge's length one over its weight. "
            "Importance: rank correlation of the tokens' shares of a random walker's time with those on softmax's graph."
        }
        h2 { "In words" }
        @for verdict in &analysis.verdicts { p { (chip(verdict.mechanism)) (verdict.sentence) } }
        h2 { @if several { "Layer by layer" } @else { "Spectra, hops and distances" } }
        div class="charts" {
            @if several {
                (by_layer(analysis, "Output error, median over heads", "error", true, |head| Some(head.output.scaled)))
                (by_layer(analysis, "Tokens that a row attends to", "tokens", false, |head| head.graph.as_ref()?.perplexity))
                (by_layer(analysis, "Spectral gap", "gap", false, |head| head.graph.as_ref()?.gap))
                (by_layer(analysis, "Mean hops along strong edges", "hops", false, |head| Some(head.graph.as_ref()?.hops.as_ref()?.mean)))
            }
            (spectra(analysis))
            (hop_counts(analysis))
            (distance_chart(analysis))
        }
        @if !analysis.distances.is_empty() {
            h2 { "How far queries are from keys" }
            div class="scroll" { (distance_table(analysis)) }
            p class="quiet" {
                "Medians over heads, of sums of absolute and of squared differences. Variation: standard deviation over mean, beside that of independent "
                "normal channels. Kurtosis: 3 for normal distances. Tail: what one pair in a thousand exceeds, over the median. What varies more is told apart better by a kernel of the distance."
            }
        }
        (dominant(analysis))
        h2 { "Head by head" }
        div class="scroll" { (heads_table(analysis)) }
        h2 { "Layers" }
        div class="scroll" { (layers(&analysis.layers)) }
        (remarks(analysis))
        (page::environment(&analysis.environment, &analysis.input, &analysis.commands))
    };
    page::shell(&title, &body)
}

fn chip(id: &str) -> Markup {
    html! { span class=(format!("chip s{}", page::style_of(id))) {} }
}

fn number(x: Option<f64>, digits: usize) -> String {
    x.filter(|x| x.is_finite()).map_or_else(|| "–".into(), |x| format!("{x:.digits$}"))
}

fn percent(x: Option<f64>) -> String {
    x.filter(|x| x.is_finite()).map_or_else(|| "–".into(), |x| format!("{:.1} %", 100.0 * x))
}

fn tiles(analysis: &Analysis, heads: usize) -> Vec<(&'static str, String)> {
    let softmax = &analysis.verdicts[0].numbers;
    let replaces = analysis.verdicts.iter().filter(|v| v.finding == Finding::Replaces).count();
    vec![
        ("heads", page::count(heads)),
        ("tokens that a softmax row attends to", number(softmax.perplexity, 1)),
        ("directions of the softmax graph", number(softmax.effective_rank, 1)),
        ("spectral gap of it", number(softmax.gap, 3)),
        ("mechanisms that replace it", replaces.to_string()),
    ]
}

/// A column of the summary: its heading, and what it shows of the numbers.
type Column = (&'static str, fn(&Numbers) -> String);

fn summary(analysis: &Analysis) -> Markup {
    const COLUMNS: [Column; 14] = [
        ("Error", |n| percent(n.error_median)),
        ("Worst", |n| percent(n.error_worst)),
        ("Own scale", |n| percent(n.error_relative)),
        ("Cosine", |n| number(n.cosine, 3)),
        ("Heads close", |n| format!("{} of {}", n.close, n.heads)),
        ("ms", |n| number(n.seconds.map(|s| s * 1e3), 2)),
        ("× softmax", |n| number(n.time_ratio, 2)),
        ("MB", |n| number(n.peak_bytes.map(|b| b / 1e6), 2)),
        ("Rows", |n| number(n.perplexity, 1)),
        ("Directions", |n| number(n.effective_rank, 1)),
        ("Gap", |n| number(n.gap, 3)),
        ("Hops", |n| number(n.hops, 2)),
        ("Negative", |n| percent(n.negative)),
        ("Importance", |n| number(n.centrality, 2)),
    ];
    html! {
        table class="sortable" {
            thead {
                tr {
                    th scope="col" { "Mechanism" }
                    @for (heading, _) in COLUMNS { th scope="col" { (heading) } }
                    th scope="col" { "Verdict" }
                }
            }
            tbody {
                @for verdict in &analysis.verdicts {
                    tr {
                        th scope="row" title=(page::about(verdict.mechanism)) { (chip(verdict.mechanism)) (verdict.mechanism) }
                        @for (_, show) in COLUMNS { td { (show(&verdict.numbers)) } }
                        td { (verdict.finding.label()) }
                    }
                }
            }
        }
    }
}

/// A line per mechanism: the median over a layer's heads of what `pick` takes from each.
fn by_layer(analysis: &Analysis, title: &str, y: &str, percent: bool, pick: fn(&HeadResult) -> Option<f64>) -> Markup {
    let points = |id: &str| -> Vec<(f64, f64)> {
        let layer = |(index, layer): (usize, &LayerSummary)| {
            let own = analysis.of(id).filter(|head| head.layer == layer.name);
            Some((index as f64, median(own.filter_map(pick))?))
        };
        analysis.layers.iter().enumerate().filter_map(layer).collect()
    };
    let axes = Axes { title, x: "layer", y, percent };
    chart::lines(axes, &series(analysis, |id| if percent && id == "softmax" { Vec::new() } else { points(id) }))
}

fn series(analysis: &Analysis, points: impl Fn(&str) -> Vec<(f64, f64)>) -> Vec<Series> {
    let ids = analysis.verdicts.iter().map(|verdict| verdict.mechanism);
    ids.map(|id| Series { label: id.into(), style: page::style_of(id), points: points(id) })
        .filter(|series| !series.points.is_empty())
        .collect()
}

/// The graphs of a mechanism.
fn graphs<'a>(analysis: &'a Analysis, id: &'a str) -> impl Iterator<Item = &'a GraphReport> {
    analysis.of(id).filter_map(|head| head.graph.as_ref())
}

fn spectra(analysis: &Analysis) -> Markup {
    let points = |id: &str| -> Vec<(f64, f64)> {
        let longest = graphs(analysis, id).map(|graph| graph.eigenvalues.len()).max().unwrap_or(0);
        let value = |rank: usize| median(graphs(analysis, id).filter_map(|graph| graph.eigenvalues.get(rank).copied()));
        (0..longest).filter_map(|rank| Some((rank as f64 + 1.0, value(rank)?))).collect()
    };
    let title = "Leading eigenvalues of the walk, median over heads";
    chart::lines(Axes { title, x: "rank", y: "eigenvalue", percent: false }, &series(analysis, points))
}

fn hop_counts(analysis: &Analysis) -> Markup {
    let points = |id: &str| -> Vec<(f64, f64)> {
        let mut counts: Vec<usize> = Vec::new();
        for hops in graphs(analysis, id).filter_map(|graph| graph.hops.as_ref()) {
            counts.resize(counts.len().max(hops.counts.len()), 0);
            counts.iter_mut().zip(&hops.counts).for_each(|(all, count)| *all += count);
        }
        let pairs = counts.iter().sum::<usize>().max(1) as f64;
        counts.iter().enumerate().skip(1).map(|(hops, &count)| (hops as f64, count as f64 / pairs)).collect()
    };
    let title = "Hops between tokens, share of pairs";
    chart::lines(Axes { title, x: "hops", y: "pairs", percent: true }, &series(analysis, points))
}

/// The token weights of `linear-infsa` beside the Perron vector that they stand in for.
fn dominant(analysis: &Analysis) -> Markup {
    type Row = (&'static str, fn(&PerronReport) -> Alignment);
    const ROWS: [Row; 3] = [
        ("the weights of linear-infsa", |found| found.weights),
        ("the same weight for every token", |found| found.uniform),
        ("norms of the queries", |found| found.energies),
    ];
    let found: Vec<_> = graphs(analysis, "linear-infsa").filter_map(|graph| graph.dominant.as_ref()).collect();
    let cell = |values: Vec<f64>| {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64;
        html! { td { (format!("{mean:.3}")) " " small { "± " (format!("{:.3}", variance.sqrt())) } } }
    };
    html! {
        @if !found.is_empty() {
            h2 { "Do token weights stand for the dominant direction?" }
            div class="scroll" {
                table class="sortable" {
                    thead { tr { @for heading in ["Agreement with the Perron vector of relu(Q Qᵀ)", "Cosine", "Rank correlation"] { th scope="col" { (heading) } } } }
                    tbody {
                        @for (name, pick) in ROWS {
                            tr {
                                th scope="row" { (name) }
                                (cell(found.iter().map(|found| pick(found).cosine).collect()))
                                (cell(found.iter().map(|found| pick(found).spearman).collect()))
                            }
                        }
                    }
                }
            }
            p class="quiet" { "Mean and deviation over " (found.len()) " heads. Between vectors without negative entries a high cosine is the rule: the weights say something where they beat the other two." }
        }
    }
}

/// The mean histogram over all heads.
fn distance_chart(analysis: &Analysis) -> Markup {
    let series = |label: &str, style: usize, pick: fn(&HeadDistances) -> &DistanceStats| {
        let mut points: Vec<(f64, f64)> = Vec::new();
        for head in &analysis.distances {
            let density = pick(head).density();
            points.resize(density.len(), (0.0, 0.0));
            let heads = analysis.distances.len() as f64;
            points.iter_mut().zip(density).for_each(|(sum, (x, share))| *sum = (x, sum.1 + share / heads));
        }
        Series { label: label.into(), style, points }
    };
    let title = "Distances between queries and keys, share of pairs";
    let both = [series("absolute", 9, |d| &d.absolute), series("squared", 2, |d| &d.squared)];
    chart::lines(Axes { title, x: "distance, in medians", y: "pairs", percent: true }, &both)
}

fn distance_table(analysis: &Analysis) -> Markup {
    type Column = (&'static str, fn(&HeadDistances) -> f64);
    const COLUMNS: [Column; 8] = [
        ("Absolute: variation", |d| d.absolute.variation),
        ("of normal ones", |d| 0.756 / (d.channels as f64).sqrt()),
        ("kurtosis", |d| d.absolute.kurtosis),
        ("tail", |d| d.absolute.tail),
        ("Squared: variation", |d| d.squared.variation),
        ("of normal ones", |d| 1.414 / (d.channels as f64).sqrt()),
        ("kurtosis", |d| d.squared.kurtosis),
        ("tail", |d| d.squared.tail),
    ];
    html! {
        table class="sortable" {
            thead { tr { th scope="col" { "Layer" } @for (heading, _) in COLUMNS { th scope="col" { (heading) } } } }
            tbody {
                @for layer in &analysis.layers {
                    tr {
                        th scope="row" { (layer.name) }
                        @for (_, pick) in COLUMNS {
                            td { (number(median(analysis.distances.iter().filter(|d| d.layer == layer.name).map(pick)), 3)) }
                        }
                    }
                }
            }
        }
    }
}

/// A column of the heads' table.
type HeadColumn = (&'static str, fn(&HeadResult) -> String);

fn heads_table(analysis: &Analysis) -> Markup {
    const COLUMNS: [HeadColumn; 11] = [
        ("Error", |h| percent(Some(h.output.scaled))),
        ("Cosine", |h| number(Some(h.output.cosine), 3)),
        ("Rows", |h| number(graph(h).and_then(|g| g.perplexity), 1)),
        ("Directions", |h| number(graph(h).and_then(|g| g.effective_rank), 1)),
        ("Gap", |h| number(graph(h).and_then(|g| g.gap), 4)),
        ("Cut", |h| number(graph(h).and_then(|g| g.cheeger), 4)),
        ("Hops", |h| number(graph(h).and_then(|g| Some(g.hops.as_ref()?.mean)), 2)),
        ("Most", |h| graph(h).and_then(|g| g.hops.as_ref()).map_or_else(|| "–".into(), |hops| hops.max.to_string())),
        ("Asymmetry", |h| number(graph(h).and_then(|g| g.asymmetry), 2)),
        ("Row sums", |h| {
            graph(h).map_or_else(|| "–".into(), |g| format!("{:.2} to {:.2}", g.row_sums[0], g.row_sums[2]))
        }),
        ("Most important tokens", |h| graph(h).map_or_else(String::new, central)),
    ];
    html! {
        table class="sortable" {
            thead {
                tr {
                    th scope="col" { "Mechanism" } th scope="col" { "Layer" } th scope="col" { "Sequence" } th scope="col" { "Head" }
                    @for (heading, _) in COLUMNS { th scope="col" { (heading) } }
                }
            }
            tbody {
                @for head in &analysis.heads {
                    tr {
                        th scope="row" { (chip(head.mechanism)) (head.mechanism) }
                        td { (head.layer) } td { (head.sequence) } td { (head.head) }
                        @for (_, show) in COLUMNS { td { (show(head)) } }
                    }
                }
            }
        }
    }
}

fn graph(head: &HeadResult) -> Option<&GraphReport> {
    head.graph.as_ref()
}

fn central(graph: &GraphReport) -> String {
    graph.central.iter().take(3).map(|(token, _)| token.to_string()).collect::<Vec<_>>().join(", ")
}

fn layers(layers: &[LayerSummary]) -> Markup {
    html! {
        table class="sortable" {
            thead {
                tr {
                    @for heading in ["Layer", "Sequences", "Heads", "Tokens", "Keys", "Channels", "Keys are", "Values are"] {
                        th scope="col" { (heading) }
                    }
                }
            }
            tbody {
                @for layer in layers {
                    tr {
                        th scope="row" { (layer.name) }
                        @for n in [layer.sequences, layer.heads, layer.tokens, layer.keys, layer.head_dim] { td { (n) } }
                        td { @if layer.tied { "the queries" } @else { "given" } }
                        td { @if layer.values { "given" } @else { "white noise" } }
                    }
                }
            }
        }
    }
}

/// What was left out, and why.
fn remarks(analysis: &Analysis) -> Markup {
    let ids = analysis.verdicts.iter().map(|verdict| verdict.mechanism);
    let notes = ids.filter_map(|id| {
        let mut notes: Vec<&String> = graphs(analysis, id).flat_map(|graph| &graph.notes).collect();
        let heads = notes.len();
        notes.sort();
        Some((id, heads, *notes.first()?))
    });
    let tied: Vec<_> = ["soft", "soft-pp"].into_iter().filter(|id| analysis.of(id).next().is_some()).collect();
    let untied = analysis.layers.iter().any(|layer| !layer.tied);
    html! {
        h2 { "Remarks" }
        ul {
            @if untied && !tied.is_empty() { li { (tied.join(" and ")) " have tied queries and keys: the queries served as both." } }
            @if analysis.layers.iter().any(|layer| !layer.values) {
                li { "Without values in the file, outputs are of white noise: errors are those of the weights." }
            }
            @if !analysis.unread.is_empty() { li { "Not read: " (analysis.unread.join(", ")) "." } }
            @for (id, heads, note) in notes { li { (id) ", " (heads) " remarks, such as: " (note) } }
            li { "The configuration of every mechanism is in results.json." }
        }
    }
}
