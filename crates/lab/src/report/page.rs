//! What every report shares: the shell, tiles, the recipe, the machine.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use resolvent_kernels::Mechanism;

use crate::{Recipe, Result, environment::Environment};

/// A whole page.
pub fn shell(title: &str, body: &Markup) -> String {
    html! {
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
                script { (PreEscaped(include_str!("script.js"))) }
            }
        }
    }
    .into_string()
}

/// The numbers that matter, large.
pub fn tiles(tiles: &[(&str, String)]) -> Markup {
    html! {
        ul class="tiles" { @for (name, value) in tiles { li { b { (value) } span { (name) } } } }
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

/// What a mechanism is, in a line.
pub fn about(id: &str) -> &'static str {
    match id {
        "softmax" => "The baseline: each token averages all values with the softmax of its scaled dot products.",
        "uniform" => "The control: the plain mean of all values. What it reaches, no attention is needed for.",
        "infsa" => {
            "Rectified dot products over their Frobenius norm, times a learned decay: one hop of a discounted \
                    diffusion on the token graph."
        }
        "infsa-resolvent" => {
            "The same operator with all its hops at once, (I - gamma A)^-1 - I, solved without forming \
                              the matrix."
        }
        "linear-infsa" => {
            "One weight per token, a surrogate of the dominant direction of the token graph, and one pooled \
                           value per head for all tokens: linear in their number."
        }
        "fna" => {
            "A power law of the distance between tokens (Levy flights), normalised per row: many short steps and a few \
             long ones."
        }
        "ssa" => {
            "Softmax within clusters of tokens, exact there, and through sampled edges or cluster means elsewhere: a sparse \
             graph in place of the dense one."
        }
        "soft" => {
            "A Gaussian kernel of tied queries and keys, held through landmarks: linear in the tokens at a fixed number of them."
        }
        "soft-pp" => "SOFT with its symmetric degree normalisation, which keeps the operator's norm bounded.",
        "laplacian" => {
            "A Laplacian (L1) kernel, centred and whitened, held through pooled landmark keys: linear in the tokens at a fixed \
             number of them; weights \
             may be negative."
        }
        "laplacian-exact" => "The same kernel, whole: streamed in tiles, no landmarks.",
        "cosine" => "Softmax of the cosine of query and key, ten times as steep: lengths say nothing.",
        "sigmoid" => {
            "Every pair by itself, a sigmoid of its product less the logarithm of the number of keys: no row is normalised."
        }
        "relu" => "Rectified products over the number of keys: no row is normalised, and most weights are zero.",
        "linear" => {
            "Products of positive features, elu + 1, rows normalised: sums over all keys, linear in the tokens."
        }
        "performer" => "Softmax estimated by random features: sums over all keys, linear in the tokens.",
        "local" => "Softmax within a window of tokens around each.",
        _ => "",
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
