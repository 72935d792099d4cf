//! The report of an analysis.

use maud::{Markup, html};

use super::{
    chart::{self, Axes, Series},
    page,
};
use crate::analyze::{
    Analysis, CLOSE, Curve, DistanceStats, Finding, Format, GraphReport, HeadResult, LayerSummary, LayerTally, Numbers,
    QUANTITIES, Sample, Tally,
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
                (by_layer(analysis, "Output error, median over heads", "error", true, |layer| &layer.error))
                (by_layer(analysis, "Tokens that a row attends to", "tokens", false, |layer| &layer.perplexity))
                (by_layer(analysis, "Spectral gap", "gap", false, |layer| &layer.gap))
                (by_layer(analysis, "Mean hops along strong edges", "hops", false, |layer| &layer.hops))
            }
            (curves(analysis, "Leading eigenvalues of the walk, mean over heads", "eigenvalue", |tally| &tally.eigenvalues))
            @if analysis.full {
                (curves(analysis, "Singular values, mean over heads", "singular value", |tally| &tally.singular_values))
                (curves(analysis, "Moduli of the eigenvalues, mean over heads", "modulus", |tally| &tally.moduli))
            }
            (hop_counts(analysis))
            (distance_chart(analysis))
        }
        h2 { "The graphs in numbers" }
        div class="scroll" { (quantities(analysis)) }
        p class="quiet" { "Medians over the heads that have the number; the remarks say why others have none." }
        @if analysis.distances.iter().any(|layer| layer.channels > 0) {
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
        @if analysis.heads > analysis.listed.len() {
            p class="quiet" { "The first " (page::count(analysis.listed.len())) " of " (page::count(analysis.heads)) "; all are in results.json." }
        }
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
                    th scope="col" { "Verdict" }
                    @for (heading, _) in COLUMNS { th scope="col" { (heading) } }
                }
            }
            tbody {
                @for verdict in &analysis.verdicts {
                    tr {
                        th scope="row" title=(page::about(verdict.mechanism)) { (chip(verdict.mechanism)) (verdict.mechanism) }
                        td { (verdict.finding.label()) }
                        @for (_, show) in COLUMNS { td { (show(&verdict.numbers)) } }
                    }
                }
            }
        }
    }
}

/// A line per mechanism: the median over a layer's heads of what `pick` takes of them.
fn by_layer(analysis: &Analysis, title: &str, y: &str, percent: bool, pick: fn(&LayerTally) -> &Sample) -> Markup {
    let points = |tally: &Tally| -> Vec<(f64, f64)> {
        let layers = tally.layers.iter().enumerate();
        layers.filter_map(|(index, layer)| Some((index as f64, pick(layer).median()?))).collect()
    };
    let axes = Axes { title, x: "layer", y, percent };
    let mut series = series(analysis, points);
    // Its own error is zero, which is no news.
    series.retain(|series| !percent || series.label != "softmax");
    chart::lines(axes, &series)
}

/// Every mechanism with its tally.
fn tallies(analysis: &Analysis) -> impl Iterator<Item = (&'static str, &Tally)> {
    analysis.verdicts.iter().map(|verdict| verdict.mechanism).zip(&analysis.tallies)
}

fn series(analysis: &Analysis, points: impl Fn(&Tally) -> Vec<(f64, f64)>) -> Vec<Series> {
    tallies(analysis)
        .map(|(id, tally)| Series { label: id.into(), style: page::style_of(id), points: points(tally) })
        .filter(|series| !series.points.is_empty())
        .collect()
}

/// Spectra over their ranks.
fn curves(analysis: &Analysis, title: &str, y: &str, pick: fn(&Tally) -> &Curve) -> Markup {
    let points = |tally: &Tally| pick(tally).means().enumerate().map(|(rank, x)| (rank as f64 + 1.0, x)).collect();
    chart::lines(Axes { title, x: "rank", y, percent: false }, &series(analysis, points))
}

fn hop_counts(analysis: &Analysis) -> Markup {
    let points = |tally: &Tally| -> Vec<(f64, f64)> {
        let pairs = tally.hops.iter().sum::<usize>().max(1) as f64;
        tally.hops.iter().enumerate().skip(1).map(|(hops, &count)| (hops as f64, count as f64 / pairs)).collect()
    };
    let title = "Hops between tokens, share of pairs";
    chart::lines(Axes { title, x: "hops", y: "pairs", percent: true }, &series(analysis, points))
}

/// The token weights of `linear-infsa` beside the Perron vector that they stand in for.
fn dominant(analysis: &Analysis) -> Markup {
    const ROWS: [&str; 3] = ["the weights of linear-infsa", "the same weight for every token", "norms of the queries"];
    let found = tallies(analysis).find(|(id, _)| *id == "linear-infsa").map(|(_, tally)| &tally.dominant);
    let cell = |sample: &Sample| {
        let [mean, deviation] = sample.spread().unwrap_or([f64::NAN; 2]);
        html! { td { (number(Some(mean), 3)) " " small { "± " (number(Some(deviation), 3)) } } }
    };
    html! {
        @if let Some(found) = found.filter(|found| found[0][0].count() > 0) {
            h2 { "Do token weights stand for the dominant direction?" }
            div class="scroll" {
                table class="sortable" {
                    thead { tr { @for heading in ["Agreement with the Perron vector of relu(Q Qᵀ)", "Cosine", "Rank correlation"] { th scope="col" { (heading) } } } }
                    tbody {
                        @for (name, [cosine, rank]) in ROWS.iter().zip(found) {
                            tr { th scope="row" { (name) } (cell(cosine)) (cell(rank)) }
                        }
                    }
                }
            }
            p class="quiet" { "Mean and deviation over " (found[0][0].count()) " heads. Between vectors without negative entries a high cosine is the rule: the weights say something where they beat the other two." }
        }
    }
}

/// The mean histogram over all heads.
fn distance_chart(analysis: &Analysis) -> Markup {
    let series = |(kind, label, style): (usize, &str, usize)| {
        let mut mean = Curve::default();
        for layer in &analysis.distances {
            mean.add(&layer.density[kind].means().collect::<Vec<_>>());
        }
        let points = mean.means().enumerate().map(|(bin, share)| (DistanceStats::place(bin), share)).collect();
        Series { label: label.into(), style, points }
    };
    let title = "Distances between queries and keys, share of pairs";
    let both = [(0, "absolute", 9), (1, "squared", 2)].map(series);
    chart::lines(Axes { title, x: "distance, in medians", y: "pairs", percent: true }, &both)
}

fn distance_table(analysis: &Analysis) -> Markup {
    /// What the variation of independent normal tokens is, times the root of the channels.
    const KINDS: [(&str, f64); 2] = [("Absolute", 0.756), ("Squared", 1.414)];
    html! {
        table class="sortable" {
            thead {
                tr {
                    th scope="col" { "Layer" }
                    @for (kind, _) in KINDS {
                        th scope="col" { (kind) ": variation" }
                        @for heading in ["of normal ones", "kurtosis", "tail"] { th scope="col" { (heading) } }
                    }
                }
            }
            tbody {
                @for (layer, found) in analysis.layers.iter().zip(&analysis.distances) {
                    tr {
                        th scope="row" { (layer.name) }
                        @for ((_, normal), [variation, kurtosis, tail]) in KINDS.iter().zip(&found.stats) {
                            td { (number(variation.median(), 3)) }
                            td { (number(Some(normal / (found.channels as f64).sqrt()), 3)) }
                            td { (number(kurtosis.median(), 3)) }
                            td { (number(tail.median(), 3)) }
                        }
                    }
                }
            }
        }
    }
}

/// A number of a graph as text.
fn shown(x: Option<f64>, format: Format) -> String {
    match format {
        Format::Decimals(digits) => number(x, digits),
        Format::Percent => percent(x),
        Format::Digits => x.filter(|x| x.is_finite()).map_or_else(|| "–".into(), digits),
    }
}

/// Three digits that matter.
fn digits(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        size if (1e-3..1e5).contains(&size) => format!("{x:.*}", (2.0 - size.log10().floor()).max(0.0) as usize),
        _ => format!("{x:.2e}"),
    }
}

/// The medians of all that the graphs have.
fn quantities(analysis: &Analysis) -> Markup {
    let there: Vec<usize> = (0..QUANTITIES.len())
        .filter(|&at| analysis.tallies.iter().any(|tally| tally.graph.get(at).is_some_and(|own| own.count() > 0)))
        .collect();
    html! {
        table class="sortable" {
            thead {
                tr { th scope="col" { "Mechanism" } @for &at in &there { th scope="col" { (QUANTITIES[at].name) } } }
            }
            tbody {
                @for (id, tally) in tallies(analysis) {
                    tr {
                        th scope="row" { (chip(id)) (id) }
                        @for &at in &there {
                            td { (shown(tally.graph.get(at).and_then(Sample::median), QUANTITIES[at].format)) }
                        }
                    }
                }
            }
        }
    }
}

fn heads_table(analysis: &Analysis) -> Markup {
    let value = |head: &HeadResult, at: usize| graph(head).and_then(QUANTITIES[at].of).filter(|x| x.is_finite());
    let there: Vec<usize> =
        (0..QUANTITIES.len()).filter(|&at| analysis.listed.iter().any(|head| value(head, at).is_some())).collect();
    html! {
        table class="sortable" {
            thead {
                tr {
                    @for heading in ["Mechanism", "Layer", "Sequence", "Head", "Error", "Own scale", "Cosine"] {
                        th scope="col" { (heading) }
                    }
                    @for &at in &there { th scope="col" { (QUANTITIES[at].name) } }
                    th scope="col" { "Most important tokens" }
                }
            }
            tbody {
                @for head in &analysis.listed {
                    tr {
                        th scope="row" { (chip(head.mechanism)) (head.mechanism) }
                        td { (head.layer) } td { (head.sequence) } td { (head.head) }
                        td { (percent(head.output.map(|output| output.scaled))) }
                        td { (percent(head.output.map(|output| output.relative))) }
                        td { (number(head.output.map(|output| output.cosine), 3)) }
                        @for &at in &there { td { (shown(value(head, at), QUANTITIES[at].format)) } }
                        td { (graph(head).map_or_else(String::new, central)) }
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
    let there = |id: &&str| tallies(analysis).any(|(own, tally)| own == *id && tally.heads > 0);
    let tied: Vec<_> = ["soft", "soft-pp"].into_iter().filter(there).collect();
    let untied = analysis.layers.iter().any(|layer| !layer.tied);
    html! {
        h2 { "Remarks" }
        ul {
            @if untied && !tied.is_empty() { li { (tied.join(" and ")) " have tied queries and keys: the queries served as both." } }
            @if analysis.layers.iter().any(|layer| !layer.values) {
                li { "Without values in the file, outputs are of white noise: errors are those of the weights." }
            }
            @if !analysis.unread.is_empty() { li { "Not read: " (analysis.unread.join(", ")) "." } }
            @for (id, tally) in tallies(analysis).filter(|(_, tally)| tally.remarks.count > 0) {
                @let remarks = &tally.remarks;
                li { (id) ", " (remarks.count) " remarks, such as: " (remarks.first.join("; ")) "." }
            }
            li { "The configuration of every mechanism is in results.json." }
        }
    }
}
