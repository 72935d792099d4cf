//! What every report shares: the shell of a page, its tiles and charts, the recipe, the machine.

mod bars;
pub mod chart;
mod downsample;
pub mod frame;
pub mod ticks;

use maud::{DOCTYPE, Markup, PreEscaped, Render, html};
use resolvent_kernels::Mechanism;

use crate::{
    Recipe, Result,
    environment::Environment,
    recipe::{length_scale_rule, rule_name},
};

/// A whole page.
pub fn shell(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                main { (body) }
                script { (PreEscaped(include_str!("script.js"))) (PreEscaped(include_str!("chart.js"))) }
            }
        }
    }
    .into_string();
    page.replace(is_unseen, "\u{fffd}")
}

/// Whether a character, which texts and file names may have, does not belong into HTML: it would be invisible, or end the page.
fn is_unseen(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\r' | '\t')
}

/// The numbers that matter, large.
pub fn tiles(tiles: &[(&str, String)]) -> Markup {
    html! {
        ul class="tiles" { @for (name, value) in tiles { li { b { (value) } span { (name) } } } }
    }
}

/// Columns of a table that paper has room for.
const MOST_COLUMNS: usize = 12;

/// A table that is sorted by its headings: a column under each, a row of cells of each of `rows`. On paper, one of more than 12 columns has a
/// block of named values for each row.
pub fn table<H: Render>(headings: impl IntoIterator<Item = H>, rows: impl IntoIterator<Item = Markup>) -> Markup {
    let headings: Vec<H> = headings.into_iter().collect();
    let class = if headings.len() > MOST_COLUMNS { "sortable many" } else { "sortable" };
    html! {
        table class=(class) {
            thead { tr { @for heading in headings { th scope="col" { (heading) } } } }
            tbody { @for row in rows { tr { (row) } } }
        }
    }
}

/// The recipe as it was run.
pub fn recipe(recipe: &Recipe) -> Result<Markup> {
    let text = recipe.to_toml()?;
    Ok(html! {
        h2 { "Recipe" }
        @if !recipe.about.is_empty() { p { (recipe.about) } }
        details { summary { "Every field" } pre { (text) } }
    })
}

/// Where and how the numbers were made.
pub fn environment(environment: &Environment, data: &str, commands: &[String]) -> Markup {
    html! {
        h2 { "Where these numbers come from" }
        dl {
            @for (name, value) in environment.rows() { dt { (name) } dd { (value) } }
            dt { "Data" } dd { (data) }
        }
        @if !commands.is_empty() {
            p { "To repeat it:" }
            pre { (commands.join("\n")) }
        }
    }
}

/// The colour and dash pattern of a mechanism, the same on every page.
pub fn style_of(id: &str) -> usize {
    Mechanism::IDS.iter().position(|&known| known == id).unwrap_or(Mechanism::IDS.len())
}

/// The style of number `at` of the mechanisms with these ids: its own, and where several have one id, for all but the first one
/// that no other has.
pub fn style_among(ids: &[&str], at: usize) -> usize {
    let mut taken: Vec<usize> = ids.iter().map(|id| style_of(id)).collect();
    for n in 0..=at {
        let style = match ids[..n].contains(&ids[n]) {
            false => style_of(ids[n]),
            true => (0..).find(|style| !taken.contains(style)).unwrap_or_default(),
        };
        if n == at {
            return style;
        }
        taken.push(style);
    }
    style_of(ids[at])
}

/// What a preset is, in a line.
pub fn about(id: &str) -> &'static str {
    Mechanism::summary(id).unwrap_or_default()
}

/// What a mechanism is, in a line, and the rule that gives it its length scale, if one does.
pub fn about_mechanism(mechanism: &Mechanism) -> Markup {
    let rule = length_scale_rule(mechanism).map(rule_name);
    html! {
        (about(mechanism.id()))
        @if let Some(rule) = rule { " Length scale (" code { "kappa" } ") by the rule " code { (rule) } "." }
    }
}

/// A share as `87.25 %`.
pub fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

/// A count with thin gaps: `1 234 567`.
pub fn count(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join("\u{2009}")
}

/// Bytes as MB.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// A duration in words.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s => format!("{:.1} min", s / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_seen_is_marked() {
        let page = shell("a\u{1b}[0m", &html! { p { "two\tcolumns\r\nand \0 <b>" } });
        assert!(page.contains("<title>a\u{fffd}[0m</title>"), "{page}");
        assert!(page.contains("<p>two\tcolumns\r\nand \u{fffd} &lt;b&gt;</p>"), "{page}");
    }

    #[test]
    fn tables_of_many_columns_are_told_from_others() {
        let page = |columns: usize| table(vec!["Gap"; columns], [html! { th { "infsa" } td { "0.5" } }]).into_string();
        assert_eq!(
            page(1),
            "<table class=\"sortable\"><thead><tr><th scope=\"col\">Gap</th></tr></thead>\
             <tbody><tr><th>infsa</th><td>0.5</td></tr></tbody></table>"
        );
        let many = |columns| page(columns).starts_with("<table class=\"sortable many\">");
        assert_eq!([MOST_COLUMNS, MOST_COLUMNS + 1].map(many), [false, true]);
    }

    #[test]
    fn every_mechanism_has_its_line_and_its_colour() {
        let css = include_str!("style.css");
        // One more for rivals.
        for style in 0..=Mechanism::IDS.len() {
            assert!(css.contains(&format!(".s{style} {{")) && css.contains(&format!("--series-{style}:")), "{style}");
        }
        for id in Mechanism::IDS {
            assert!(!about(id).is_empty(), "{id}");
        }
    }
}
