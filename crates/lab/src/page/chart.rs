//! Charts as inline SVG: lines over an axis, drawn here so that a page shows them without a script and on paper.
//!
//! Drawn at 400 units of width with text of 11: readable at the width of a phone, two abreast on a desk. Colours come
//! from the page's style sheet (`--series-0` ...), so that they follow light and dark; every series also has its own dash
//! pattern or label, so that nothing depends on colour. The points lie beside the drawing as JSON: with them the page's script
//! tells values, hides series, smooths, and changes the scale. A table has the numbers too.

use std::iter;

use maud::{Markup, PreEscaped, html};
use serde_json::json;

use super::{
    downsample::{evenly, extremes},
    frame::{Frame, HEIGHT, WIDTH, px, significant},
    ticks::{compact, labelled, log_ticks, named, thinned, ticks},
};

pub use super::bars::{Bar, bars};

/// Points drawn per series; of more, the least and the largest of each group.
const MAX_POINTS: usize = 400;
/// Rows of the table under a chart.
const MAX_ROWS: usize = 30;
/// From so many points on, a line can be smoothed.
const SMOOTHED: usize = 40;

/// One line of a chart.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Series {
    /// Its name in the legend.
    pub label: String,
    /// Which colour and dash pattern.
    pub style: usize,
    /// Its points, by ascending x.
    pub points: Vec<(f64, f64)>,
    /// Where the values of several runs lie, of which the points are the means: x, the least and the largest y. Empty for one run.
    pub band: Vec<(f64, f64, f64)>,
}

impl Series {
    /// A line without a band.
    pub fn line(label: impl Into<String>, style: usize, points: Vec<(f64, f64)>) -> Self {
        Self { label: label.into(), style, points, band: Vec::new() }
    }

    /// What can be drawn of it: finite numbers, above zero on a logarithmic axis, not too many.
    fn drawn(&self, log: bool) -> Self {
        let there = |x: f64| x.is_finite() && (!log || x > 0.0);
        let points: Vec<_> = self.points.iter().copied().filter(|&(x, y)| there(x) && there(y)).collect();
        let band: Vec<_> = self.band.iter().copied().filter(|&(x, l, h)| there(x) && there(l) && there(h)).collect();
        let step = band.len().div_ceil(MAX_POINTS).max(1);
        let spread = |group: &[(f64, f64, f64)]| {
            let (low, high) =
                group.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), b| (l.min(b.1), h.max(b.2)));
            (group[group.len() / 2].0, low, high)
        };
        let band = band.chunks(step).map(spread).collect();
        Self { label: self.label.clone(), style: self.style, points: extremes(&points, MAX_POINTS), band }
    }
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

/// A line chart whose axes are both logarithmic; points must be positive. Marks show the points.
pub fn log_lines(axes: Axes<'_>, series: &[Series]) -> Markup {
    let drawn: Vec<Series> = series.iter().map(|series| series.drawn(true)).collect();
    let points = || drawn.iter().flat_map(|s| &s.points);
    if points().next().is_none() {
        return html! { p class="quiet" { (axes.title) ": nothing was measured." } };
    }
    let mut x_ticks: Vec<f64> = points().map(|p| p.0).collect();
    x_ticks.sort_by(f64::total_cmp);
    x_ticks.dedup();
    let (low, high) = range(points().map(|p| p.1));
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
    let ticks = [place(&x_ticks), place(&decades)];
    figure(&Chart { axes, log: [true; 2], names: &[], marks: true, frame, ticks }, series, &drawn)
}

/// A line chart with axes, grid and, for more than one series, a legend below.
pub fn lines(axes: Axes<'_>, series: &[Series]) -> Markup {
    lines_over(axes, &[], series)
}

/// The same over things that have `names` in place of numbers, in their order: `x` is the number of one.
pub fn lines_over(axes: Axes<'_>, names: &[&str], series: &[Series]) -> Markup {
    let drawn: Vec<Series> = series.iter().map(|series| series.drawn(false)).collect();
    let points = || drawn.iter().flat_map(|s| &s.points);
    if points().next().is_none() {
        return html! { p class="quiet" { (axes.title) ": nothing was logged." } };
    }
    let bands = || drawn.iter().flat_map(|s| &s.band).flat_map(|band| [band.1, band.2]);
    let (last, (low, high)) = (range(points().map(|p| p.0)).1, range(points().map(|p| p.1).chain(bands())));
    let last = if last > 0.0 { last } else { 1.0 };
    // A share that does not change gets a window of a tenth; no axis goes beyond all of it.
    let (low, high) =
        if axes.percent && low == high { ((low - 0.05).max(0.0), (high + 0.05).min(1.0)) } else { (low, high) };
    let (mut x_ticks, y_ticks) = (ticks(0.0, last), ticks(low, high));
    x_ticks.retain(|&tick| tick <= last);
    let frame = Frame { x: (0.0, last), y: (y_ticks[0], y_ticks[y_ticks.len() - 1]) };
    let x_ticks = if names.is_empty() { labelled(&x_ticks, false) } else { named(names) };
    let ticks = [x_ticks, labelled(&y_ticks, axes.percent)];
    figure(&Chart { axes, log: [false; 2], names, marks: false, frame, ticks }, series, &drawn)
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
}

/// How a chart of lines is drawn.
struct Chart<'a> {
    axes: Axes<'a>,
    /// Which of the axes are logarithmic.
    log: [bool; 2],
    names: &'a [&'a str],
    /// Whether every point has a mark; else only a line of a single point has.
    marks: bool,
    frame: Frame,
    ticks: [Vec<(f64, String)>; 2],
}

fn figure(chart: &Chart<'_>, series: &[Series], drawn: &[Series]) -> Markup {
    let Chart { axes, frame, ticks: [x_ticks, y_ticks], .. } = chart;
    html! {
        figure class="chart" {
            figcaption { (axes.title) }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="group" aria-label=(axes.title) {
                g { (frame.across(x_ticks)) }
                g class="scale" { (frame.up(y_ticks)) }
                (frame.names(*axes))
                g class="plot" { @for s in drawn { (curve(chart, s)) } }
            }
            @if series.len() > 1 { (legend(series)) }
            (data(chart, drawn))
            (table(chart, series))
        }
    }
}

fn curve(chart: &Chart<'_>, series: &Series) -> Markup {
    let Chart { frame, log, marks, .. } = chart;
    let x = |x: f64| px(frame.x(if log[0] { x.log10() } else { x }));
    let y = |y: f64| px(frame.y(if log[1] { y.log10() } else { y }));
    let path =
        |points: &[(f64, f64)]| points.iter().map(|p| format!("{},{}", x(p.0), y(p.1))).collect::<Vec<_>>().join(" ");
    let outline: Vec<(f64, f64)> =
        series.band.iter().map(|b| (b.0, b.2)).chain(series.band.iter().rev().map(|b| (b.0, b.1))).collect();
    html! {
        @if !outline.is_empty() { polygon class=(format!("band s{}", series.style)) points=(path(&outline)) {} }
        polyline class=(format!("line s{}", series.style)) points=(path(&series.points)) {}
        @if *marks || series.points.len() == 1 {
            @for point in &series.points {
                circle class=(format!("dot s{}", series.style)) cx=(x(point.0)) cy=(y(point.1)) r="3" {}
            }
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

/// What is drawn, for the page's script.
fn data(chart: &Chart<'_>, drawn: &[Series]) -> Markup {
    let Chart { axes, log, names, marks, frame, .. } = chart;
    let of = |s: &Series| {
        let points: Vec<_> = s.points.iter().map(|p| [short(p.0), short(p.1)]).collect();
        let band: Vec<_> = s.band.iter().map(|b| [short(b.0), short(b.1), short(b.2)]).collect();
        json!({"label": s.label, "style": s.style, "points": points, "band": band})
    };
    let series: Vec<_> = drawn.iter().map(of).collect();
    let smooth = !log[0] && names.is_empty() && drawn.iter().any(|s| s.points.len() >= SMOOTHED);
    let json = json!({
        "x": axes.x, "y": axes.y, "percent": axes.percent, "log": log, "names": names, "marks": marks, "smooth": smooth,
        "frame": [frame.x.0, frame.x.1, frame.y.0, frame.y.1], "series": series,
    });
    // No text of a series may end the element.
    let json = json.to_string().replace('<', "\\u003c");
    html! { script type="application/json" { (PreEscaped(json)) } }
}

/// Six digits that matter: more than a drawing shows.
fn short(x: f64) -> f64 {
    format!("{x:.5e}").parse().unwrap_or(x)
}

/// The numbers of a chart, of many points some of evenly spread ones.
fn table(chart: &Chart<'_>, series: &[Series]) -> Markup {
    let Chart { axes, names, .. } = chart;
    let mut all: Vec<f64> = series.iter().flat_map(|s| &s.points).map(|p| p.0).filter(|x| x.is_finite()).collect();
    all.sort_by(f64::total_cmp);
    all.dedup();
    let rows = evenly(&all, MAX_ROWS);
    let value = |y: f64| if axes.percent { format!("{:.2} %", y * 100.0) } else { significant(y) };
    let cell = |s: &Series, x: f64| s.points.iter().find(|p| p.0 == x).map(|p| p.1).filter(|y| y.is_finite());
    let row = |&x: &f64| {
        html! {
            th scope="row" data-value=(x) { @match names.get(x as usize) { Some(name) => (name), None => (significant(x)) } }
            @for s in series { @match cell(s, x) { Some(y) => td data-value=(y) { (value(y)) }, None => td { "–" } } }
        }
    };
    let headings = iter::once(axes.x).chain(series.iter().map(|s| &*s.label));
    html! {
        details class="numbers" {
            summary { "Table" }
            div class="scroll" { (super::table(headings, rows.iter().map(row))) }
            @if rows.len() < all.len() { p class="quiet" { (rows.len()) " of " (all.len()) " points, evenly spread." } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(title: &str) -> Axes<'_> {
        Axes { title, x: "step", y: "loss", percent: false }
    }

    #[test]
    fn a_logarithmic_chart_places_decades_evenly() {
        let points = vec![(512.0, 0.001), (1024.0, 0.01), (65_536.0, 0.1)];
        let axes = Axes { title: "Time", x: "tokens", y: "s", percent: false };
        let page = log_lines(axes, &[Series::line("a", 0, points)]).into_string();
        assert!(page.contains(">512<") && page.contains(">1k<") && page.contains(">64k<"), "{page}");
        assert!(page.contains(">0.001<") && page.contains(">0.1<") && !page.contains("NaN"));
        let one = log_lines(axes, &[Series::line("a", 0, vec![(8.0, 1.0)])]).into_string();
        assert!(!one.contains("NaN") && !one.contains("inf"), "{one}");
        assert!(log_lines(axes, &[]).into_string().contains("nothing"));
    }

    /// Where things have names, these stand at the axis and in the table, in the order given.
    #[test]
    fn a_chart_over_names_tells_them() {
        let series = [Series::line("infsa", 0, vec![(0.0, 1.0), (1.0, 2.0)])];
        let axes = Axes { title: "Gap", x: "layer", y: "gap", percent: false };
        let page = lines_over(axes, &["layers.10", "layers.2"], &series).into_string();
        assert!(page.contains(r#"data-value="1">layers.2</th><td data-value="2">2<"#), "{page}");
        assert!(page.contains(">10<") && page.contains(">2<") && page.contains(r#""names":["layers.10""#), "{page}");
    }

    #[test]
    fn a_line_chart_holds_its_series_and_no_broken_number() {
        let series = [
            Series::line("a <b>", 0, (0..10_000).map(|i| (f64::from(i), f64::from(i % 7))).collect()),
            Series::line("c", 1, vec![(1.0, f64::NAN), (2.0, 3.0)]),
        ];
        let page = lines(axes("Loss"), &series).into_string();
        assert!(page.contains("a &lt;b&gt;") && page.contains(r"a \u003cb>") && page.contains("Loss"));
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        let polyline = page.split("polyline").nth(1).unwrap();
        let drawn = polyline.split('"').map(|part| part.matches(',').count()).max().unwrap();
        assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&drawn), "{drawn} points");
        assert_eq!(page.matches("<th scope=\"row\"").count(), MAX_ROWS);
        assert!(lines(axes("Loss"), &[]).into_string().contains("nothing"));
    }

    /// A band is drawn below its line, and the axis has room for all of it.
    #[test]
    fn a_band_has_room() {
        let series = Series {
            band: vec![(0.0, 0.0, 4.0), (1.0, 1.0, 9.0)],
            ..Series::line("a", 0, vec![(0.0, 2.0), (1.0, 3.0)])
        };
        let page = lines(axes("Loss"), &[series]).into_string();
        assert!(page.find("polygon").unwrap() < page.find("polyline").unwrap());
        assert!(page.contains(">10<") && page.contains(r#""band":[[0.0,0.0,4.0],[1.0,1.0,9.0]]"#), "{page}");
    }

    /// What the page's script reads is JSON, whatever the names are.
    #[test]
    fn the_data_is_json() {
        let page =
            lines(axes("Loss"), &[Series::line("</script>\"", 3, vec![(0.0, 1.0 / 3.0), (2.0, 0.5)])]).into_string();
        let json = page.split("application/json\">").nth(1).unwrap().split("</script>").next().unwrap();
        let json: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(
            (&json["series"][0]["label"], &json["series"][0]["points"][0][1]),
            (&"</script>\"".into(), &0.333333.into())
        );
    }
}
