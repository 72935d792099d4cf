//! How far queries are from keys, and in how many directions they vary.

use maud::{Markup, html};
use resolvent_lab::page::{
    self,
    chart::{self, Axes, Series},
};

use super::analysis::number;
use crate::analyze::{Analysis, Curve, DistanceStats, DistanceTally, LayerSummary};

/// The mean histogram over all heads.
pub fn histogram(analysis: &Analysis) -> Markup {
    let series = |(kind, label, style): (usize, &str, usize)| {
        let mut mean = Curve::default();
        for layer in &analysis.distances {
            mean.add(&layer.density[kind].means().collect::<Vec<_>>());
        }
        let points = mean.means().enumerate().map(|(bin, share)| (DistanceStats::place(bin), share)).collect();
        Series::line(label, style, points)
    };
    let title = "Distances between queries and keys, share of pairs";
    let both = [(0, "absolute", 9), (1, "squared", 2)].map(series);
    chart::lines(Axes { title, x: "distance, in medians", y: "pairs", percent: true }, &both)
}

/// A row per layer.
pub fn table(analysis: &Analysis) -> Markup {
    /// What the variation of independent normal tokens is, times the root of the channels.
    const KINDS: [(&str, f64); 2] = [("Absolute", 0.756), ("Squared", 1.414)];
    let of =
        |(kind, _)| [format!("{kind}: variation").as_str(), "of normal ones", "kurtosis", "tail"].map(str::to_owned);
    let row = |(layer, found): (&LayerSummary, &DistanceTally)| {
        html! {
            th scope="row" { (layer.name) }
            @for ((_, normal), [variation, kurtosis, tail]) in KINDS.iter().zip(&found.stats) {
                td { (number(variation.median(), 3)) }
                td { (number(Some(normal / (found.channels as f64).sqrt()), 3)) }
                td { (number(kurtosis.median(), 3)) }
                td { (number(tail.median(), 3)) }
            }
            td { (found.channels) }
            @for sample in &found.components { td { (number(sample.median(), 3)) } }
        }
    };
    let directions = ["Channels", "Queries: directions", "share of two"].map(str::to_owned);
    let headings = ["Layer".to_owned()].into_iter().chain(KINDS.into_iter().flat_map(of)).chain(directions);
    page::table(headings, analysis.layers.iter().zip(&analysis.distances).map(row))
}
