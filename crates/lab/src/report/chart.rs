//! Charts as inline SVG: lines over an axis, and values of a few things side by side.
//!
//! Drawn at 400 units of width with text of 11: readable at the width of a phone, two abreast on a desk. Colours come
//! from the page's style sheet (`--series-0` ...), so that they follow light and dark; every series also has its own dash
//! pattern or label, so that nothing depends on colour.

use maud::{Markup, html};

use super::ticks::{compact, labelled, log_ticks, named, thinned, ticks};

pub(super) const WIDTH: f64 = 400.0;
pub(super) const HEIGHT: f64 = 250.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 34.0;
/// Points drawn per series; more are averaged in groups.
const MAX_POINTS: usize = 200;

/// One line of a chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub label: String,
    /// Which colour and dash pattern.
    pub style: usize,
    /// Its points, by ascending x.
    pub points: Vec<(f64, f64)>,
}

/// What a chart of lines is about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Axes<'a> {
    /// What is shown, for those who do not see it.
    pub title: &'a str,
    /// Name of the horizontal axis.
    pub x: &'a str,
    /// Name of the vertical axis.
    pub y: &'a str,
    /// Values are shares, shown in percent.
    pub percent: bool,
}

impl<'a> Axes<'a> {
    /// Something over the steps of a run.
    pub fn over_steps(title: &'a str, y: &'a str, percent: bool) -> Self {
        Self { title, x: "step", y, percent }
    }
}

/// A line chart whose axes are both logarithmic; points must be positive. Marks show the points, with their values on
/// hover.
pub fn log_lines(axes: Axes<'_>, series: &[Series]) -> Markup {
    let points = || series.iter().flat_map(|s| &s.points);
    let range = |pick: fn(&(f64, f64)) -> f64| {
        points().map(pick).fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), v| (low.min(v), high.max(v)))
    };
    if points().next().is_none() {
        return html! { p class="quiet" { (axes.title) ": nothing was measured." } };
    }
    let mut x_ticks: Vec<f64> = points().map(|p| p.0).collect();
    x_ticks.sort_by(f64::total_cmp);
    x_ticks.dedup();
    let (low, high) = range(|p| p.1);
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let decades: Vec<_> = (first..=last.max(first + 1)).map(|power| 10f64.powi(power)).collect();
    let (first, last) = (x_ticks[0], x_ticks[x_ticks.len() - 1]);
    // Numbers of tokens are ticks themselves; shares are not.
    let x_ticks = match x_ticks.iter().all(|x| x.fract() == 0.0) {
        true => thinned(&x_ticks, 7),
        false => log_ticks(first, last, 7),
    };
    let (left, right) = (first.log10(), last.log10());
    let frame = Frame { x: (left, right.max(left + 0.3)), y: (decades[0].log10(), decades[decades.len() - 1].log10()) };
    let label = |x: f64| match x {
        x if x >= 1.0 => compact(x),
        x if x < 1e-3 => format!("{x:e}"),
        x => x.to_string(),
    };
    let place = |ticks: &[f64]| ticks.iter().map(|&t| (t.log10(), label(t))).collect::<Vec<_>>();
    html! {
        figure {
            figcaption { (axes.title) }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(axes.title) {
                (frame.grid(axes, &place(&x_ticks), &place(&decades)))
                @for s in series {
                    @let logs: Vec<_> = s.points.iter().map(|(x, y)| (x.log10(), y.log10())).collect();
                    polyline class=(format!("line s{}", s.style)) points=(frame.path(&logs)) { title { (s.label) } }
                    @for ((x, y), at) in s.points.iter().zip(&logs) {
                        circle class=(format!("dot s{}", s.style)) cx=(px(frame.x(at.0))) cy=(px(frame.y(at.1))) r="3" {
                            title { (s.label) ", " (x) " " (axes.x) ": " (format!("{y:.3e}")) " " (axes.y) }
                        }
                    }
                }
            }
            @if series.len() > 1 { (legend(series)) }
        }
    }
}

/// A line chart with axes, grid and, for more than one series, a legend below.
pub fn lines(axes: Axes<'_>, series: &[Series]) -> Markup {
    drawn(axes, &[], series)
}

/// The same over things that have `names` in place of numbers, in their order: `x` is the number of one.
pub fn lines_over(axes: Axes<'_>, names: &[&str], series: &[Series]) -> Markup {
    drawn(axes, names, series)
}

fn drawn(axes: Axes<'_>, names: &[&str], series: &[Series]) -> Markup {
    let points = || series.iter().flat_map(|s| &s.points).filter(|(x, y)| x.is_finite() && y.is_finite());
    let range = |pick: fn(&(f64, f64)) -> f64| {
        points().map(pick).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
    };
    if points().next().is_none() {
        return html! { p class="quiet" { (axes.title) ": nothing was logged." } };
    }
    let (last, (low, high)) = (range(|p| p.0).1, range(|p| p.1));
    let last = if last > 0.0 { last } else { 1.0 };
    // A share that does not change gets a window of a tenth; no axis goes beyond all of it.
    let (low, high) =
        if axes.percent && low == high { ((low - 0.05).max(0.0), (high + 0.05).min(1.0)) } else { (low, high) };
    let (mut x_ticks, y_ticks) = (ticks(0.0, last), ticks(low, high));
    x_ticks.retain(|&tick| tick <= last);
    let frame = Frame { x: (0.0, last), y: (y_ticks[0], y_ticks[y_ticks.len() - 1]) };
    let x_ticks = if names.is_empty() { labelled(&x_ticks, false) } else { named(names) };
    html! {
        figure {
            figcaption { (axes.title) }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(axes.title) {
                (frame.grid(axes, &x_ticks, &labelled(&y_ticks, axes.percent)))
                @for s in series {
                    polyline class=(format!("line s{}", s.style)) points=(frame.path(&s.points)) {
                        title { (s.label) }
                    }
                    @if let [(x, y)] = &s.points[..] {
                        circle class=(format!("dot s{}", s.style)) cx=(px(frame.x(*x))) cy=(px(frame.y(*y))) r="3" {}
                    }
                }
                // Above everything that is seen, lest it keeps the pointer from them.
                @for s in series {
                    (frame.hits(axes, names, s))
                }
            }
            @if series.len() > 1 { (legend(series)) }
        }
    }
}

fn legend(series: &[Series]) -> Markup {
    html! {
        ul class="legend" {
            @for s in series {
                li {
                    svg viewBox="0 0 28 8" width="28" height="8" aria-hidden="true" {
                        line class=(format!("line s{}", s.style)) x1="0" y1="4" x2="28" y2="4" {}
                    }
                    (s.label)
                }
            }
        }
    }
}

/// Coordinates with a tenth of a unit: enough to see, short to write.
pub(super) fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// The points that are drawn: all, or the means of groups of them.
fn shown(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    let group = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |chunk: &[(f64, f64)]| {
        let n = chunk.len() as f64;
        (chunk.iter().map(|p| p.0).sum::<f64>() / n, chunk.iter().map(|p| p.1).sum::<f64>() / n)
    };
    points.chunks(group).map(mean).filter(|(x, y)| x.is_finite() && y.is_finite())
}

/// A number with four digits that matter, whole numbers as they are.
pub(super) fn significant(x: f64) -> String {
    if x.fract() == 0.0 && x.abs() < 1e6 {
        return format!("{x}");
    }
    let digits = (3.0 - x.abs().log10().floor()).clamp(0.0, 8.0) as usize;
    format!("{x:.digits$}")
}

/// The map from values to the drawing.
pub(super) struct Frame {
    pub x: (f64, f64),
    pub y: (f64, f64),
}

impl Frame {
    pub fn x(&self, value: f64) -> f64 {
        LEFT + (value - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    pub fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (value - self.y.0) / (self.y.1 - self.y.0) * (HEIGHT - TOP - BOTTOM)
    }

    fn path(&self, points: &[(f64, f64)]) -> String {
        shown(points).map(|(x, y)| format!("{},{}", px(self.x(x)), px(self.y(y)))).collect::<Vec<_>>().join(" ")
    }

    /// Where a pointer finds the values of a line: unseen marks on its points.
    fn hits(&self, axes: Axes<'_>, names: &[&str], series: &Series) -> Markup {
        let value = |y: f64| if axes.percent { format!("{:.2} %", y * 100.0) } else { significant(y) };
        let place = |x: f64| match names.get(x as usize) {
            Some(name) => (*name).to_owned(),
            None => format!("{} {}", axes.x, significant(x)),
        };
        html! {
            @for (x, y) in shown(&series.points) {
                circle class=(format!("hit s{}", series.style)) cx=(px(self.x(x))) cy=(px(self.y(y))) r="4" {
                    title { (series.label) ", " (place(x)) ": " (value(y)) }
                }
            }
        }
    }

    /// Ticks are places on the axis with their labels.
    pub fn grid(&self, axes: Axes<'_>, x_ticks: &[(f64, String)], y_ticks: &[(f64, String)]) -> Markup {
        let base = HEIGHT - BOTTOM;
        html! {
            @for (tick, label) in y_ticks {
                line class="grid" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(px(self.y(*tick))) y2=(px(self.y(*tick))) {}
                text class="tick" text-anchor="end" x=(LEFT - 5.0) y=(px(self.y(*tick) + 3.5)) { (label) }
            }
            @for (tick, label) in x_ticks {
                line class="axis" x1=(px(self.x(*tick))) x2=(px(self.x(*tick))) y1=(base) y2=(base + 4.0) {}
                text class="tick" text-anchor="middle" x=(px(self.x(*tick))) y=(base + 15.0) { (label) }
            }
            line class="axis" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(base) y2=(base) {}
            text class="tick" text-anchor="end" x=(WIDTH - RIGHT) y=(HEIGHT - 4.0) { (axes.x) }
            text class="tick" x="2" y="10" { (axes.y) }
        }
    }
}

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
    html! {
        figure {
            figcaption { (title) }
            svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
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
    fn a_logarithmic_chart_places_decades_evenly() {
        let points = vec![(512.0, 0.001), (1024.0, 0.01), (65_536.0, 0.1)];
        let axes = Axes { title: "Time", x: "tokens", y: "s", percent: false };
        let page = log_lines(axes, &[Series { label: "a".into(), style: 0, points }]).into_string();
        assert!(page.contains(">512<") && page.contains(">1k<") && page.contains(">64k<"), "{page}");
        assert!(page.contains(">0.001<") && page.contains(">0.1<") && !page.contains("NaN"));
        let one = log_lines(axes, &[Series { label: "a".into(), style: 0, points: vec![(8.0, 1.0)] }]).into_string();
        assert!(!one.contains("NaN") && !one.contains("inf"), "{one}");
        assert!(log_lines(axes, &[]).into_string().contains("nothing"));
    }

    /// Where things have names, these stand at the axis and are told, in the order given.
    #[test]
    fn a_chart_over_names_tells_them() {
        let points = vec![(0.0, 1.0), (1.0, 2.0)];
        let axes = Axes { title: "Gap", x: "layer", y: "gap", percent: false };
        let series = [Series { label: "infsa".into(), style: 0, points }];
        let page = lines_over(axes, &["layers.10", "layers.2"], &series).into_string();
        assert!(page.contains("infsa, layers.10: 1<") && page.contains("infsa, layers.2: 2<"), "{page}");
        assert!(page.contains(">10<") && page.contains(">2<") && !page.contains("layer 0"), "{page}");
    }

    #[test]
    fn a_line_chart_holds_its_series_and_no_broken_number() {
        let series = [
            Series { label: "a <b>".into(), style: 0, points: (0..1000).map(|i| (f64::from(i), 1.0)).collect() },
            Series { label: "c".into(), style: 1, points: vec![(1.0, f64::NAN), (2.0, 3.0)] },
        ];
        let page = lines(Axes { title: "Loss", x: "step", y: "loss", percent: false }, &series).into_string();
        assert!(page.contains("a &lt;b&gt;") && page.contains("Loss"));
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        let longest = page.split('"').map(|part| part.matches(',').count()).max().unwrap();
        assert_eq!(longest, 200, "points are thinned");
        assert!(lines(Axes { title: "Loss", x: "", y: "", percent: false }, &[]).into_string().contains("nothing"));
    }

    /// What is drawn later has the pointer: a point must not lie under its own dot, or another's line.
    #[test]
    fn values_lie_above_everything_that_is_seen() {
        let series = [(0, vec![(1.0, 2.0)]), (1, vec![(0.0, 1.0), (2.0, 3.0)])];
        let series = series.map(|(style, points)| Series { label: "a".into(), style, points });
        let page = lines(Axes { title: "Loss", x: "step", y: "loss", percent: false }, &series).into_string();
        let first = page.find("\"hit ").unwrap();
        let seen = ["\"dot ", "\"line s1"].map(|class| page[..page.find("legend").unwrap()].rfind(class).unwrap());
        assert!(seen.iter().all(|&at| at < first), "{page}");
    }
}
