//! Charts of bars: values of a few things side by side.

use maud::{Markup, html};

use super::frame::{WIDTH, px};

/// One row of a [`bars`] chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// What it is.
    pub label: String,
    /// Which colour.
    pub style: usize,
    /// How long the bar is.
    pub value: f64,
    /// Its value as text.
    pub text: String,
    /// Single observations, drawn as dots on the bar's scale.
    pub dots: Vec<f64>,
}

/// Horizontal bars from `from` on, longest first as given, each with its value in words.
pub fn bars(title: &str, from: f64, rows: &[Bar]) -> Markup {
    const ROW: f64 = 26.0;
    const NAME: f64 = 112.0;
    // Seven units per character are enough for the digits of every system's sans-serif.
    let text = 15.0 + 7.0 * rows.iter().map(|row| row.text.chars().count()).max().unwrap_or(0) as f64;
    let values = rows.iter().flat_map(|row| row.dots.iter().chain([&row.value]));
    let most = values.copied().fold(from, f64::max);
    let scale = |value: f64| (value - from).max(0.0) / (most - from).max(f64::MIN_POSITIVE) * (WIDTH - NAME - text);
    let height = ROW * rows.len() as f64 + 4.0;
    // A picture whose text is its label: those who do not see it have every number.
    let told = rows.iter().map(|row| format!("{} {}", row.label, row.text)).collect::<Vec<_>>().join(", ");
    html! {
        figure {
            figcaption { (title) }
            svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(format!("{title}: {told}")) {
                @for (index, row) in rows.iter().enumerate() {
                    @let middle = 2.0 + ROW * (index as f64 + 0.5);
                    text class="name" x="0" y=(middle + 4.0) { (row.label) }
                    rect class=(format!("bar s{}", row.style)) x=(NAME) y=(middle - 8.0) rx="2"
                        width=(px(scale(row.value).max(1.0))) height="16" {}
                    @for &dot in &row.dots {
                        circle class="seed" cx=(px(NAME + scale(dot))) cy=(middle) r="3" {}
                    }
                    @let end = row.dots.iter().copied().fold(row.value, f64::max);
                    text class="value" x=(px(NAME + scale(end) + 9.0)) y=(middle + 4.0) { (row.text) }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_tell_their_numbers() {
        let bar = Bar { label: "infsa".into(), style: 2, value: 0.5, text: "50.00 %".into(), dots: vec![] };
        assert!(bars("Accuracy", 0.0, &[bar]).into_string().contains(r#"aria-label="Accuracy: infsa 50.00 %""#));
    }
}
