//! The table that an analysis comes to: a row per mechanism.

use maud::{Markup, html};
use resolvent_lab::page;

use super::analysis::{chip, median, number, percent, ranked, shown};
use crate::analyze::{
    Analysis, DIRECTIONS, Format, GAP, HOPS, IMPORTANCE, NEGATIVE, Numbers, Quantity, ROWS, Tally, Verdict,
};

/// What a column shows.
enum Shows {
    /// A number of the verdict.
    Own(fn(&Numbers) -> Cell),
    /// The median of a quantity of the graphs.
    Median(Quantity),
}

/// The table of verdicts, the nearest to softmax first.
pub(super) fn summary(analysis: &Analysis) -> Markup {
    use Shows::{Median, Own};
    const COLUMNS: [(&str, Shows); 14] = [
        ("Error", Own(|n| Cell(n.error_median, percent(n.error_median), n.error_interval.map(|i| i.text(100.0, 1))))),
        ("Worst", Own(|n| Cell(n.error_worst, percent(n.error_worst), None))),
        ("Own scale", Own(|n| Cell(n.error_relative, percent(n.error_relative), None))),
        ("Cosine", Own(|n| Cell(n.cosine, number(n.cosine, 3), None))),
        ("Heads close", Own(|n| Cell(Some(n.close as f64), format!("{} of {}", n.close, n.heads + n.refused), None))),
        ("ms", Own(|n| Cell(n.seconds, shown(n.seconds.map(|s| s * 1e3), Format::Digits), None))),
        ("× softmax", Own(|n| Cell(n.time_ratio, shown(n.time_ratio, Format::Digits), None))),
        ("MB", Own(|n| Cell(n.peak_bytes, number(n.peak_bytes.map(|b| b / 1e6), 2), None))),
        ("Rows", Median(ROWS)),
        ("Directions", Median(DIRECTIONS)),
        ("Gap", Median(GAP)),
        ("Hops", Median(HOPS)),
        ("Negative", Median(NEGATIVE)),
        ("Importance", Median(IMPORTANCE)),
    ];
    let row = |(verdict, tally): (&Verdict, &Tally)| {
        html! {
            th scope="row" title=(page::about(verdict.mechanism)) { (chip(analysis, &verdict.name)) (verdict.name) }
            td { (verdict.finding.label()) }
            @for (_, shows) in COLUMNS {
                @match shows { Own(show) => (cell(&show(&verdict.numbers))), Median(quantity) => (median(tally, &quantity)), }
            }
        }
    };
    let headings = ["Mechanism", "Verdict"].into_iter().chain(COLUMNS.map(|(heading, _)| heading));
    page::table(headings, ranked(analysis).map(row))
}

/// A number, its text, and what stands small below it.
struct Cell(Option<f64>, String, Option<String>);

fn cell(Cell(value, text, below): &Cell) -> Markup {
    html! { td data-value=[value.filter(|x| x.is_finite())] { (text) @if let Some(below) = below { br; small { (below) } } } }
}
