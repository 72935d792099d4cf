//! Paths between pairs of tokens, and the hops between all.

use maud::{Markup, html};
use resolvent_lab::page;

use super::analysis::{chip, digits};
use crate::analyze::{Analysis, HeadResult, PathReport};

/// Most paths of the table.
const LISTED: usize = 500;
/// Most matrices of hops.
const MATRICES: usize = 16;

/// The paths and matrices of an analysis, a section of its page where they were asked for.
pub fn section(analysis: &Analysis) -> Markup {
    let of_head = |head| HeadResult::paths(head).iter().map(move |path| (head, path));
    let paths: Vec<_> = analysis.listed.iter().flat_map(of_head).take(LISTED + 1).collect();
    let drawn = |head: &&HeadResult| head.graph.as_ref().is_some_and(|graph| !graph.hop_matrix.is_empty());
    let matrices: Vec<_> = analysis.listed.iter().filter(drawn).take(MATRICES).collect();
    html! {
        @if !paths.is_empty() || !matrices.is_empty() {
            h2 { "Paths between tokens" }
            p class="quiet" { "Shortest paths by edges as long as one over their weights, from the token that attends to the one attended to." }
        }
        @if !paths.is_empty() { (table(analysis, &paths[..paths.len().min(LISTED)])) }
        @if paths.len() > LISTED { p class="quiet" { "The first " (LISTED) "; all are in results.json." } }
        @for head in &matrices { (matrix(analysis, head)) }
    }
}

fn table(analysis: &Analysis, paths: &[(&HeadResult, &PathReport)]) -> Markup {
    let row = |(head, path): &(&HeadResult, &PathReport)| {
        html! {
            th scope="row" { (chip(analysis, &head.name)) (head.name) }
            td { (head.layer) }
            @for n in [head.sequence, head.head, path.from, path.to] { td { (n) } }
            td data-value=[path.hops] { (path.hops.map_or_else(|| "no path".into(), |hops| hops.to_string())) }
            td data-value=[path.length] { (path.length.map_or_else(|| "–".into(), digits)) }
            td { (through(path)) }
        }
    };
    let headings = ["Mechanism", "Layer", "Sequence", "Head", "From", "To", "Hops", "Length", "Through, with weights"];
    html! { div class="scroll" { (page::table(headings, paths.iter().map(row))) } }
}

/// The tokens, and the weights of the edges between them.
fn through(path: &PathReport) -> Markup {
    html! {
        @for (at, name) in path.names().iter().enumerate() {
            @if at > 0 { " →" small { (digits(path.weights[at - 1])) } " " }
            (name)
        }
    }
}

fn matrix(analysis: &Analysis, head: &HeadResult) -> Markup {
    let rows = head.graph.as_ref().map_or(&[][..], |graph| &graph.hop_matrix);
    html! {
        h3 { (chip(analysis, &head.name)) "Hops between the tokens of " (head.layer) ", head " (head.head) ": " (head.name) }
        div class="scroll" {
            table {
                thead { tr { th scope="col" { "from, to" } @for to in 0..rows.len() { th scope="col" { (to) } } } }
                tbody {
                    @for (from, row) in rows.iter().enumerate() {
                        tr { th scope="row" { (from) } @for hops in row { td { (hops.map_or_else(|| "–".into(), |hops| hops.to_string())) } } }
                    }
                }
            }
        }
    }
}
