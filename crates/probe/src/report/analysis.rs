//! The report of an analysis.

use maud::{Markup, html};
use resolvent_lab::page::{
    self,
    chart::{self, Axes, Series},
};

use super::{diffusion, distances, paths, summary::summary};
use crate::analyze::{
    Analysis, CLOSE, Curve, Finding, Format, GraphReport, HOPS, HeadResult, LayerSummary, LayerTally, QUANTITIES,
    Quantity, Sample, Tally, Verdict,
};

/// The page of an analysis.
pub fn analysis_page(analysis: &Analysis) -> String {
    let heads: usize = analysis.layers.iter().map(|layer| layer.heads * layer.sequences).sum();
    let title = format!("The token graphs of {}", analysis.input);
    let several = analysis.layers.len() > 1;
    let body = html! {
        h1 { "What these queries and keys attend to" }
        p class="quiet" {
            (analysis.input) ": " (plural(heads, "head")) " of " (plural(analysis.layers.len(), "layer"))
            @if analysis.causal { ", causal" } ". Every mechanism was applied to them as they are, without training, in place of softmax."
        }
        p class="verdict" { (analysis.headline()) }
        (page::tiles(&tiles(analysis, heads)))
        h2 { "Which of these can replace softmax here" }
        div class="scroll" { (summary(analysis)) }
        p class="quiet" {
            "Ranked by the error. Medians over heads and calls, \"of\" so many heads where not all have the number. Error: distance from dense softmax's output as a share of it, after the one factor per head "
            "that an output projection can absorb; below it the interval that holds the median of more such heads in 95 of 100 cases; close is at most " (percent(Some(CLOSE)))
            @if let Some(mean) = analysis.verdicts[0].numbers.mean_of_values {
                ", and the mean of " @if analysis.causal { "the values so far" } @else { "all values" } ", which no attention is needed for, is " (percent(Some(mean))) " off"
            }
            ". Memory: held beside the tensors of a layer's call. "
            "Rows: tokens that a row attends to, the exponential of its entropy. Directions: the same of the spectrum of the symmetrised "
            "graph. Gap: of its normalised Laplacian. Hops: along shortest paths with an edge's length one over its weight. "
            "Importance: rank correlation of the tokens' shares of a random walker's time with those on softmax's graph."
        }
        h2 { "In words" }
        @for verdict in ranked(analysis).map(|(verdict, _)| verdict) { p { (chip(analysis, &verdict.name)) (verdict.sentence) } }
        h2 { @if several { "Layer by layer" } @else { "Spectra and hops" } }
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
                (distances::histogram(analysis))
            }
            (hop_counts(analysis))
        }
        h2 { "The graphs in numbers" }
        div class="scroll" { (quantities(analysis)) }
        p class="quiet" {
            "Medians over the heads that have the number, \"of\" so many where not all have; the remarks say why."
            @if !analysis.full { " " code { "--full" } " adds the others: walks, mixing, diffusion, singular values, and how far queries are from keys." }
        }
        @if analysis.distances.iter().any(|layer| layer.channels > 0) {
            h2 { "How far queries are from keys" }
            div class="scroll" { (distances::table(analysis)) }
            p class="quiet" {
                "Medians over heads, of sums of absolute and of squared differences. Variation: standard deviation over mean, beside that of independent "
                "normal channels. Kurtosis: 3 for normal distances. Tail: what one pair in a thousand exceeds, over the median. What varies more is told apart better by a kernel of the distance. "
                "Directions: exp of the entropy of the queries' variances along their principal components, and the share of the first two."
            }
        }
        (diffusion::section(analysis))
        (paths::section(analysis))
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

fn plural(count: usize, what: &str) -> String {
    format!("{} {what}{}", page::count(count), if count == 1 { "" } else { "s" })
}

/// The style of the mechanism that is called `name`.
pub(super) fn style(analysis: &Analysis, name: &str) -> usize {
    let ids: Vec<&str> = analysis.verdicts.iter().map(|verdict| verdict.mechanism).collect();
    let at = analysis.verdicts.iter().position(|verdict| verdict.name == name);
    at.map_or_else(|| page::style_of(name), |at| page::style_among(&ids, at))
}

pub(super) fn chip(analysis: &Analysis, name: &str) -> Markup {
    html! { span class=(format!("chip s{}", style(analysis, name))) {} }
}

pub(super) fn number(x: Option<f64>, digits: usize) -> String {
    x.filter(|x| x.is_finite()).map_or_else(|| "–".into(), |x| format!("{x:.digits$}"))
}

pub(super) fn percent(x: Option<f64>) -> String {
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

/// Verdicts with their tallies, the nearest to softmax first.
pub(super) fn ranked(analysis: &Analysis) -> impl Iterator<Item = (&Verdict, &Tally)> {
    analysis.ranking().into_iter().map(|at| (&analysis.verdicts[at], &analysis.tallies[at]))
}

/// A cell with the median of a quantity, and of how many heads it is where not of all.
pub(super) fn median(tally: &Tally, quantity: &Quantity) -> Markup {
    let sample = tally.quantity(quantity);
    let (count, all) = (sample.map_or(0, Sample::count), tally.heads + tally.incomparable);
    html! {
        td data-value=[sample.and_then(Sample::median).filter(|x| x.is_finite())] {
            (shown(sample.and_then(Sample::median), quantity.format))
            @if count > 0 && count < all { " " small { "of " (count) } }
        }
    }
}

/// A line per mechanism: the median over a layer's heads of what `pick` takes of them.
fn by_layer(analysis: &Analysis, title: &str, y: &str, percent: bool, pick: fn(&LayerTally) -> &Sample) -> Markup {
    let points = |tally: &Tally| -> Vec<(f64, f64)> {
        let layers = tally.layers.iter().enumerate();
        layers.filter_map(|(index, layer)| Some((index as f64, pick(layer).median()?))).collect()
    };
    let count = |tally: &Tally| tally.layers.iter().map(|layer| pick(layer).count()).sum();
    let axes = Axes { title, x: "layer", y, percent };
    let mut series = series(analysis, count, points);
    // Its own error is zero, which is no news.
    series.retain(|series| !percent || series.label != analysis.verdicts[0].name);
    let names: Vec<&str> = analysis.layers.iter().map(|layer| layer.name.as_str()).collect();
    chart::lines_over(axes, &names, &series)
}

/// Every mechanism with its tally.
fn tallies(analysis: &Analysis) -> impl Iterator<Item = (&str, &Tally)> {
    analysis.verdicts.iter().map(|verdict| verdict.name.as_str()).zip(&analysis.tallies)
}

/// A line per mechanism that has points, which tells of how many heads it is where not of all.
fn series(
    analysis: &Analysis,
    count: impl Fn(&Tally) -> usize,
    points: impl Fn(&Tally) -> Vec<(f64, f64)>,
) -> Vec<Series> {
    let one = |(name, tally): (&str, &Tally)| {
        let (of, all) = (count(tally), tally.heads + tally.incomparable);
        let label = if of < all { format!("{name} ({of} of {all} heads)") } else { name.to_owned() };
        Series::line(label, style(analysis, name), points(tally))
    };
    tallies(analysis).map(one).filter(|series| !series.points.is_empty()).collect()
}

/// Spectra over their ranks.
fn curves(analysis: &Analysis, title: &str, y: &str, pick: fn(&Tally) -> &Curve) -> Markup {
    let points = |tally: &Tally| pick(tally).means().enumerate().map(|(rank, x)| (rank as f64 + 1.0, x)).collect();
    let series = series(analysis, |tally| pick(tally).count(), points);
    chart::lines(Axes { title, x: "rank", y, percent: false }, &series)
}

fn hop_counts(analysis: &Analysis) -> Markup {
    let points = |tally: &Tally| -> Vec<(f64, f64)> {
        let pairs = tally.hops.iter().sum::<usize>().max(1) as f64;
        let beyond = |hops: usize| tally.hops[hops..].iter().sum::<usize>() as f64;
        // A few long paths would leave no room for all others.
        let most = (1..tally.hops.len()).take_while(|&hops| beyond(hops) > 1e-3 * pairs).count();
        (1..=most).map(|hops| (hops as f64, tally.hops[hops] as f64 / pairs)).collect()
    };
    let title = "Hops between tokens, share of pairs, without the longest of a thousand";
    let count = |tally: &Tally| tally.quantity(&HOPS).map_or(0, Sample::count);
    chart::lines(Axes { title, x: "hops", y: "pairs", percent: true }, &series(analysis, count, points))
}

/// The token weights of `linear-infsa` beside the Perron vector that they stand in for.
fn dominant(analysis: &Analysis) -> Markup {
    const ROWS: [&str; 3] = ["the weights of linear-infsa", "the same weight for every token", "norms of the queries"];
    let mechanisms = analysis.verdicts.iter().zip(&analysis.tallies);
    let found = mechanisms.into_iter().find(|(verdict, _)| verdict.mechanism == "linear-infsa");
    let found = found.map(|(_, tally)| &tally.dominant);
    let cell = |sample: &Sample| {
        let [mean, deviation] = sample.spread().unwrap_or([f64::NAN; 2]);
        html! { td { (number(Some(mean), 3)) " " small { "± " (number(Some(deviation), 3)) } } }
    };
    const HEADINGS: [&str; 3] = ["Agreement with the Perron vector of relu(Q Qᵀ)", "Cosine", "Rank correlation"];
    let row =
        |(name, [cosine, rank]): (&&str, &[Sample; 2])| html! { th scope="row" { (name) } (cell(cosine)) (cell(rank)) };
    html! {
        @if let Some(found) = found.filter(|found| found[0][0].count() > 0) {
            h2 { "Do token weights stand for the dominant direction?" }
            div class="scroll" { (page::table(HEADINGS, ROWS.iter().zip(found).map(row))) }
            p class="quiet" { "Mean and deviation over " (found[0][0].count()) " heads. Between vectors without negative entries a high cosine is the rule: the weights say something where they beat the other two." }
        }
    }
}

/// A number of a graph as text.
pub(super) fn shown(x: Option<f64>, format: Format) -> String {
    match format {
        Format::Decimals(digits) => number(x, digits),
        Format::Percent => percent(x),
        Format::Digits => x.filter(|x| x.is_finite()).map_or_else(|| "–".into(), digits),
    }
}

/// Three digits that matter.
pub(super) fn digits(x: f64) -> String {
    // Rounded first: what rounds to one is one.
    let x: f64 = format!("{x:.2e}").parse().unwrap_or(x);
    match x.abs() {
        0.0 => "0".into(),
        size if (1e-3..1e5).contains(&size) => format!("{x:.*}", (2.0 - size.log10().floor()).max(0.0) as usize),
        _ => format!("{x:.2e}"),
    }
}

/// Which of [`QUANTITIES`] are shown.
fn told(analysis: &Analysis) -> impl Iterator<Item = usize> {
    let full = analysis.full;
    (0..QUANTITIES.len()).filter(move |&at| full || !QUANTITIES[at].full)
}

/// The medians of all that the graphs have.
fn quantities(analysis: &Analysis) -> Markup {
    let there: Vec<usize> = told(analysis)
        .filter(|&at| analysis.tallies.iter().any(|tally| tally.graph.get(at).is_some_and(|own| own.count() > 0)))
        .collect();
    let row = |(name, tally)| {
        html! {
            th scope="row" { (chip(analysis, name)) (name) }
            @for &at in &there { (median(tally, &QUANTITIES[at])) }
        }
    };
    let headings = ["Mechanism"].into_iter().chain(there.iter().map(|&at| QUANTITIES[at].name));
    page::table(headings, tallies(analysis).map(row))
}

fn heads_table(analysis: &Analysis) -> Markup {
    let value = |head: &HeadResult, at: usize| graph(head).and_then(QUANTITIES[at].of).filter(|x| x.is_finite());
    let there: Vec<usize> =
        told(analysis).filter(|&at| analysis.listed.iter().any(|head| value(head, at).is_some())).collect();
    let row = |head: &HeadResult| {
        html! {
            th scope="row" { (chip(analysis, &head.name)) (head.name) }
            td { (head.layer) } td { (head.sequence) } td { (head.head) }
            td { (percent(head.output.map(|output| output.scaled))) }
            td { (percent(head.output.map(|output| output.relative))) }
            td { (number(head.output.map(|output| output.cosine), 3)) }
            @for &at in &there { td { (shown(value(head, at), QUANTITIES[at].format)) } }
            td { (graph(head).map_or_else(String::new, central)) }
        }
    };
    let headings = ["Mechanism", "Layer", "Sequence", "Head", "Error", "Own scale", "Cosine"].into_iter();
    let headings = headings.chain(there.iter().map(|&at| QUANTITIES[at].name)).chain(["Most important tokens"]);
    page::table(headings, analysis.listed.iter().map(row))
}

fn graph(head: &HeadResult) -> Option<&GraphReport> {
    head.graph.as_ref()
}

fn central(graph: &GraphReport) -> String {
    graph.central.iter().take(3).map(|(token, _)| token.to_string()).collect::<Vec<_>>().join(", ")
}

fn layers(layers: &[LayerSummary]) -> Markup {
    let row = |layer: &LayerSummary| {
        html! {
            th scope="row" { (layer.name) }
            @for n in [layer.sequences, layer.heads] { td { (n) } }
            @for n in [layer.tokens, layer.keys] { td { (n) @if layer.masked { " " small { "at most" } } } }
            td { (layer.head_dim) }
            td { @if layer.tied { "the queries" } @else { "given" } }
            td { @if layer.values { "given" } @else { "white noise" } }
        }
    };
    let headings = ["Layer", "Sequences", "Heads", "Tokens", "Keys", "Channels", "Keys are", "Values are"];
    page::table(headings, layers.iter().map(row))
}

/// What was left out, and why.
fn remarks(analysis: &Analysis) -> Markup {
    let tied: Vec<_> = tallies(analysis).filter(|(_, tally)| tally.tied).map(|(id, _)| id).collect();
    html! {
        h2 { "Remarks" }
        ul {
            @if !tied.is_empty() { li { "Tied queries and keys, so that the queries served as both: " (tied.join(", ")) "." } }
            @if analysis.layers.iter().any(|layer| !layer.values) {
                li { "Without values in the file, outputs are of white noise: errors are those of the weights." }
            }
            @if !analysis.unread.is_empty() { li { "Not read: " (analysis.unread.join(", ")) "." } }
            @if analysis.cut > 0 { li { (analysis.cut) " of the texts were cut to what the model reads." } }
            @for (id, tally) in tallies(analysis) {
                @if let (Some(why), true) = (&tally.refused, tally.heads > 0) {
                    li { (id) ": cannot be applied to " (plural(tally.refused_heads, "head")) ": " (why) "." }
                }
                @for (remark, count) in &tally.remarks.kinds {
                    li { (id) ": " (remark) @if *count > 1 { " (and " (count - 1) " like it)" } "." }
                }
            }
            li { "The configuration of every mechanism is in results.json." }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_matter() {
        let told = [0.9999997, 1.0, 1.0004, 0.01234, 12345.6, 1e-9, 0.0, -0.5].map(digits);
        assert_eq!(told, ["1.00", "1.00", "1.00", "0.0123", "12300", "1.00e-9", "0", "-0.500"]);
    }
}
