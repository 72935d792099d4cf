//! The report of an explanation.

use std::fmt::Write;

use maud::{Markup, PreEscaped, html};
use resolvent_lab::page::{
    self,
    chart::{self, Axes, Bar, Series},
};

use crate::{
    explain::{
        ExampleScores, Explanation, LayerMaps, LayerScores, MapKind, MapScores, QueryRow, Shown, Spread, ceiling,
        overlay, scaled,
    },
    subject::{Example, PictureExample, TextExample},
};

/// The page of an explanation.
pub fn explanation_page(e: &Explanation) -> String {
    let body = html! {
        h1 { "What this model looks at" }
        p class="quiet" {
            (e.checkpoint) ", step " (page::count(e.step)) ", shown " (page::count(e.examples)) " examples of " (e.data) ". "
            "A map is " (e.rule) ", " (e.map_rule.words()) ", of the matrix that " (e.mechanism.id()) " multiplies its values with"
            ": what the answer is read from looks at each place with that weight. "
            (page::about_mechanism(&e.mechanism))
            @if e.cut > 0 { " " (e.cut) " of the texts were cut to what the model reads; the rest of them is grey." }
        }
        p class="verdict" { (e.headline()) }
        (page::tiles(&tiles(e)))
        @if !e.shown.is_empty() {
            h2 { "Maps" }
            style { (PreEscaped(backgrounds(e.shown.iter()))) }
            p class="quiet" {
                "Colours run from a weight of 0 to the largest of the map, at least to twice the mean: a flat map has one colour, in the middle. What the strongest "
                "colour stands for is told below each map, in per cent of all weight and in equal shares. Of a layer, first comes the mean of its heads, then each head."
                @if let Some(query) = e.query { " What " (query) " itself looks at is a map of its own" @if signed(e) { ", with weights below zero in blue" } "." }
            }
            div class="examples" { @for (index, shown) in e.shown.iter().enumerate() { (example(e, index, shown)) } }
        }
        @if !e.maps.is_empty() { (judged(e)) }
        h2 { "Layer by layer" }
        div class="scroll" { (layers(e)) }
        h2 { "Example by example" }
        div class="scroll" { (examples(e)) }
        (page::environment(&e.environment, &e.data, &e.commands))
    };
    page::shell(&format!("What {} looks at", e.checkpoint), &body)
}

/// How well the maps explain the answers.
fn judged(e: &Explanation) -> Markup {
    html! {
        h2 { "Do the answers rest on what the maps find?" }
        div class="scroll" { (scores(&e.maps, e.located() > 0)) }
        p class="quiet" {
            "Percent, mean and standard deviation over the examples, of " (e.layer) ". MoRF-AOC: the area above the curve of the answer's probability, as a share of what it was, "
            "while places are taken away, most important first. LeRF-AUC: the area under it, least important first. Both are large for a map that "
            "tells what matters. A picture's places are filled with its mean colour, a text's tokens are absent. "
            @if e.located() > 0 {
                "ROC-AUC and average precision (AP): how well weights tell the places in boxes from others, over " (e.located()) " pictures; chance of ROC-AUC is 50 %, of AP what random weights have, which over few places is above the share of places in boxes. "
            }
            "Random maps and equal weights (taken away in a random order) say what no map is needed for."
        }
        div class="charts" {
            (curves(e, "Most important places first", |m| &m.morf))
            (curves(e, "Least important places first", |m| &m.lerf))
            @if e.located() > 0 { (rocs(e)) (precisions(e)) }
        }
    }
}

fn tiles(e: &Explanation) -> Vec<(&'static str, String)> {
    let right = e.answers.iter().filter(|found| found.label.as_ref() == Some(&found.answer)).count();
    let known = e.answers.iter().filter(|found| found.label.is_some()).count();
    let chance = e.maps.iter().find(|m| m.map == MapKind::Random);
    let mut tiles = vec![("mechanism", e.mechanism.id().to_owned())];
    if known > 0 {
        tiles.push(("answers right", page::percent(right as f64 / known as f64)));
    }
    let Some(own) = e.maps.first() else { return tiles };
    tiles.push(("MoRF-AOC", cell(Some(own.morf_aoc))));
    if let Some(chance) = chance {
        tiles.push(("MoRF-AOC of random maps", cell(Some(chance.morf_aoc))));
    }
    if let Some(roc) = own.roc_auc {
        tiles.push(("ROC-AUC of the boxes", cell(Some(roc))));
    }
    tiles
}

fn cell(spread: Option<Spread>) -> String {
    spread.map_or_else(|| "–".into(), |s| format!("{:.1} %", 100.0 * s.mean))
}

/// A table's cell of mean and deviation.
pub(super) fn spread(spread: Option<Spread>) -> Markup {
    html! { td { @match spread { Some(s) => { (format!("{:.1}", 100.0 * s.mean)) " " small { "± " (format!("{:.1}", 100.0 * s.std)) } } None => "–" } } }
}

/// The pictures shown, each once, by their numbers.
pub(super) fn backgrounds<'a>(shown: impl Iterator<Item = &'a Shown>) -> String {
    let mut css = String::new();
    for (index, shown) in shown.enumerate() {
        if let Example::Picture(picture) = &shown.example {
            let address = overlay::address(&overlay::picture(picture));
            // Writing to a string cannot fail.
            let _ = write!(css, ".picture{index} {{ background-image: url({address}); }}");
        }
    }
    css
}

/// Whether weights of rows that are shown lie below zero.
fn signed(e: &Explanation) -> bool {
    e.shown.iter().flat_map(|shown| &shown.query).flat_map(|row| &row.maps.mean).any(|&weight| weight < 0.0)
}

fn example(e: &Explanation, index: usize, shown: &Shown) -> Markup {
    let scored = &e.layer;
    let asked = || shown.query.iter().filter(|row| row.maps.layer == *scored);
    let query = e.query.map(|query| query.to_string()).unwrap_or_default();
    html! {
        section {
            h3 {
                (shown.name) ": " @if shown.pairs.is_some() { "goes on with " (format!("{:?}", shown.answer)) } @else { (shown.answer) } " " small { (page::percent(shown.probability)) }
                @if let Some(label) = shown.label.as_ref().filter(|label| **label != shown.answer) { small { " (is " (label) ")" } }
            }
            @match &shown.example {
                Example::Picture(picture) => {
                    div class="maps" {
                        figure { (framed(index, picture, None, &format!("{}, as the model sees it", shown.name))) figcaption { "picture" } }
                        @for maps in shown.layers.iter().filter(|maps| maps.layer == *scored) {
                            figure { (framed(index, picture, maps.grid.map(|grid| (&maps.mean[..], grid)), &format!("{}: {}, mean of the heads", shown.name, maps.layer))) figcaption { (maps.layer) (bar(&maps.mean)) } }
                        }
                        @for QueryRow { maps, .. } in asked() {
                            figure { (framed(index, picture, maps.grid.map(|grid| (&maps.mean[..], grid)), &format!("{}: {query} in {}, mean of the heads", shown.name, maps.layer))) figcaption { (query) (bar(&maps.mean)) } }
                        }
                        @if let Some((rollout, grid)) = shown.rollout.as_ref().zip(shown.layers.first().and_then(|maps| maps.grid)) {
                            figure { (framed(index, picture, Some((rollout, grid)), &format!("{}: through all layers", shown.name))) figcaption { "all layers" (bar(rollout)) } }
                        }
                    }
                    details {
                        summary { "Every layer and head" }
                        @for maps in &shown.layers {
                            p class="quiet" { (maps.layer) }
                            div class="maps small" {
                                @for (name, weights) in rows(maps) {
                                    figure { (framed(index, picture, maps.grid.map(|grid| (weights, grid)), &format!("{}: {}, {name}", shown.name, maps.layer))) figcaption { (bar(weights)) } }
                                }
                            }
                        }
                        @for QueryRow { maps, .. } in &shown.query {
                            p class="quiet" { (query) " in " (maps.layer) }
                            div class="maps small" {
                                @for (name, weights) in rows(maps) {
                                    figure { (framed(index, picture, maps.grid.map(|grid| (weights, grid)), &format!("{}: {query} in {}, {name}", shown.name, maps.layer))) figcaption { (bar(weights)) } }
                                }
                            }
                        }
                    }
                }
                Example::Text(text) => {
                    @let last = shown.pairs.as_ref().map(|pairs| pairs.len() - 1);
                    @for maps in shown.layers.iter().filter(|maps| maps.layer == *scored) { (tokens(text, &maps.mean, last)) }
                    @for QueryRow { maps, place } in asked() { p class="quiet" { (query) " (underlined)" } (tokens(text, &maps.mean, Some(*place))) }
                    @if let Some(pairs) = &shown.pairs { (token_to_token(pairs, &format!("{}: {scored}, mean of the heads", shown.name))) }
                    details {
                        summary { "Every layer and head" }
                        @for maps in &shown.layers {
                            @for (name, weights) in rows(maps) { p class="quiet" { (maps.layer) ", " (name) } (tokens(text, weights, None)) }
                        }
                        @for QueryRow { maps, place } in &shown.query {
                            @for (name, weights) in rows(maps) { p class="quiet" { (query) " in " (maps.layer) ", " (name) } (tokens(text, weights, Some(*place))) }
                        }
                        @if let Some(rollout) = &shown.rollout { p class="quiet" { "through all layers" } (tokens(text, rollout, None)) }
                    }
                }
            }
        }
    }
}

/// The mean of the heads and, where there are several, the heads, by name.
fn rows(maps: &LayerMaps) -> impl Iterator<Item = (String, &[f32])> {
    let several = if maps.heads.len() > 1 { maps.heads.len() } else { 0 };
    let heads =
        maps.heads.iter().enumerate().map(|(head, weights)| (format!("head {head}"), &weights[..])).take(several);
    std::iter::once(("mean of the heads".to_owned(), &maps.mean[..])).chain(heads)
}

/// A picture with a map over it, and its boxes.
pub(super) fn framed(index: usize, picture: &PictureExample, map: Option<(&[f32], [usize; 2])>, what: &str) -> Markup {
    let (width, height) = (picture.shape.width as f64, picture.shape.height as f64);
    let class = format!("picture picture{index}{}", if map.is_some() { " under" } else { "" });
    let what = match map {
        Some((weights, grid)) => format!("{what}; {}", strongest(weights, grid)),
        None => what.to_owned(),
    };
    html! {
        span class="frame" role="img" aria-label=(what) title=(what) style=(format!("aspect-ratio: {width} / {height}")) {
            span class=(class) {}
            @if let Some((weights, grid)) = map { img class="heat" alt="" src=(overlay::address(&overlay::heat(weights, grid))); }
            @for region in picture.boxes.iter().flatten() {
                @let share = |at: f64, extent: f64| format!("{:.2}%", 100.0 * at / extent);
                span class="box" style=(format!(
                    "left:{};top:{};width:{};height:{}",
                    share(region.left, width), share(region.top, height),
                    share(region.right - region.left, width), share(region.bottom - region.top, height)
                )) {}
            }
        }
    }
}

/// Where a map is strongest, for those who do not see it.
fn strongest(weights: &[f32], [rows, columns]: [usize; 2]) -> String {
    let most = weights.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(at, _)| at);
    if weights.iter().all(|&weight| weight == weights[0]) {
        return "the same everywhere".into();
    }
    format!("strongest in row {} of {rows}, column {} of {columns}", most / columns + 1, most % columns + 1)
}

/// What the strongest colour of a map stands for, below a bar of the colours.
pub(super) fn bar(weights: &[f32]) -> Markup {
    let signed = weights.iter().any(|&weight| weight < 0.0);
    html! {
        span class="colours" {
            span style=(format!("background:{}", overlay::gradient(signed))) {}
            span { @if signed { "blue: below 0" } @else { "0" } }
            span { (strongest_colour(weights)) }
        }
    }
}

/// `4.2 % (6.7 ×)`: the share of all weight, and how many equal shares that is.
fn strongest_colour(weights: &[f32]) -> String {
    let sum: f32 = weights.iter().map(|weight| weight.abs()).sum();
    if sum <= 0.0 {
        return "0".into();
    }
    let share = f64::from(ceiling(weights) / sum);
    format!("{:.1} % ({:.1} ×)", 100.0 * share, share * weights.len() as f64)
}

/// A text whose tokens are as dark as their weights; the `asked` one is underlined.
pub(super) fn tokens(text: &TextExample, weights: &[f32], asked: Option<usize>) -> Markup {
    let ends = std::iter::once(0).chain(text.spans.iter().map(|&(_, to)| to));
    let parts = text.spans.iter().zip(ends).zip(scaled(weights).into_iter().zip(weights));
    html! {
        p class="tokens" {
            @for (at, ((&(from, to), end), (share, weight))) in parts.enumerate() {
                (text.text.get(end..from).unwrap_or_default())
                span class=[below(share)] style=(format!("--share:{:.3}", share.abs())) title=(format!("{weight:.3e}")) { @if asked == Some(at) { u { (text.text[from..to]) } } @else { (text.text[from..to]) } }
            }
            small class="quiet" { " strongest: " (strongest_colour(weights)) }
            @if let Some(rest) = text.spans.last().and_then(|&(_, to)| text.text.get(to..)).filter(|rest| !rest.is_empty()) {
                span class="quiet" { (rest) }
            }
        }
    }
}

/// What every token looks at: a row per token.
fn token_to_token(pairs: &[Vec<f32>], what: &str) -> Markup {
    let what = format!("{what}; what each of {} tokens looks at, itself and those before it", pairs.len());
    html! {
        figure class="pairs" {
            span class="frame" role="img" aria-label=(what) title=(what) style="aspect-ratio: 1" { img class="heat" alt="" src=(overlay::address(&overlay::pairs(pairs))); }
            figcaption { "Token to token: a row is a token that looks, from the first at the top, a column one that is looked at. The strongest colour is the largest weight of its row; what is later is empty." }
        }
    }
}

/// The class of a weight below zero.
fn below(share: f32) -> Option<&'static str> {
    (share < 0.0).then_some("below")
}

/// A column of the scores.
pub(super) type Column = (&'static str, fn(&MapScores) -> Option<Spread>);

/// Those that maps have, of boxes too where there are `boxes`.
pub(super) fn columns(boxes: bool) -> &'static [Column] {
    const COLUMNS: [Column; 6] = [
        ("MoRF-AOC", |m| Some(m.morf_aoc)),
        ("LeRF-AUC", |m| Some(m.lerf_auc)),
        ("ROC-AUC", |m| m.roc_auc),
        ("AP", |m| m.average_precision),
        ("Weight in boxes", |m| m.mass),
        ("Places in boxes", |m| m.prevalence),
    ];
    if boxes { &COLUMNS } else { &COLUMNS[..2] }
}

fn scores(maps: &[MapScores], boxes: bool) -> Markup {
    let columns = columns(boxes);
    let row = |m: &MapScores| html! { th scope="row" { (m.map) } @for (_, pick) in columns { (spread(pick(m))) } };
    page::table(["Map"].into_iter().chain(columns.iter().map(|(heading, _)| *heading)), maps.iter().map(row))
}

fn curves(e: &Explanation, title: &str, pick: fn(&MapScores) -> &Vec<[f64; 2]>) -> Markup {
    let points = |m: &MapScores| m.removed.iter().zip(pick(m)).map(|(&x, [mean, _])| (x, *mean)).collect();
    let series = e.maps.iter().map(|m| Series::line(m.map.name(), style(e, m.map), points(m)));
    let axes = Axes { title, x: "share of places taken away", y: "probability left", percent: true };
    chart::lines(axes, &series.collect::<Vec<_>>())
}

/// The colour of a kind of map: the model's own has its mechanism's.
fn style(e: &Explanation, map: MapKind) -> usize {
    let own = page::style_of(e.mechanism.id());
    let free: Vec<usize> = [3, 5, 1, 11].into_iter().filter(|&style| style != own).collect();
    match map {
        MapKind::Attention => own,
        MapKind::Rollout => free[0],
        MapKind::Random => free[1],
        MapKind::Uniform => free[2],
    }
}

fn bars(e: &Explanation, title: &str, pick: fn(&MapScores) -> Option<Spread>) -> Markup {
    let bar = |m: &MapScores| {
        let value = pick(m)?.mean;
        let (label, text) = (m.map.name().into(), page::percent(value));
        Some(Bar { label, style: style(e, m.map), value, text, dots: Vec::new() })
    };
    chart::bars(title, 0.0, &e.maps.iter().filter_map(bar).collect::<Vec<_>>())
}

fn rocs(e: &Explanation) -> Markup {
    bars(e, "ROC-AUC of the places in boxes", |m| m.roc_auc)
}

fn precisions(e: &Explanation) -> Markup {
    bars(e, "Average precision of the places in boxes", |m| m.average_precision)
}

fn layers(e: &Explanation) -> Markup {
    let row = |layer: &LayerScores| {
        html! {
            th scope="row" { (layer.layer) @if layer.layer == e.layer { small { " scored above" } } }
            td { @match layer.grid { Some([rows, columns]) => { (rows) " × " (columns) } None => "–" } }
            @for share in [Some(layer.breadth), layer.roc_auc, layer.average_precision] { (spread(share)) }
            td { (layer.heads.iter().map(|head| head.map_or_else(|| "–".into(), |s| format!("{:.1}", 100.0 * s.mean))).collect::<Vec<_>>().join(", ")) }
        }
    };
    let headings = ["Layer", "Grid", "Places looked at", "ROC-AUC", "AP", "ROC-AUC of the heads"];
    html! {
        (page::table(headings, e.layers.iter().map(row)))
        p class="quiet" { "Places looked at: the exponential of the map's entropy, as a share of all places; 100 % is flat." }
    }
}

fn examples(e: &Explanation) -> Markup {
    let percent = |share: f64| format!("{:.1}", 100.0 * share);
    if e.maps.is_empty() {
        let row = |found: &ExampleScores| {
            html! { th scope="row" { (found.name) } td { (format!("{:?}", found.answer)) } td { (percent(found.probability)) } }
        };
        return page::table(["Example", "Goes on with", "Probability"], e.answers.iter().map(row));
    }
    let row = |found: &ExampleScores| {
        let found_boxes = found.localisation.as_ref().map(|l| [l.roc_auc, l.average_precision, l.mass].map(Some));
        let shares = [Some(found.probability), found.morf_aoc, found.lerf_auc]
            .into_iter()
            .chain(found_boxes.unwrap_or_default());
        html! {
            th scope="row" { (found.name) }
            td { (found.label.as_deref().unwrap_or("–")) }
            td { (found.answer) }
            @for share in shares { td { (share.map_or_else(|| "–".into(), percent)) } }
        }
    };
    let headings =
        ["Example", "Is", "Answer", "Probability", "MoRF-AOC", "LeRF-AUC", "ROC-AUC", "AP", "Weight in boxes"];
    page::table(headings, e.answers.iter().map(row))
}
