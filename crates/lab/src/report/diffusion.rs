//! Diffusion maps: the tokens of a graph as points.

use maud::{Markup, html};

use super::{
    chart::{Axes, Frame, HEIGHT, WIDTH, px, significant},
    page,
    ticks::{labelled, ticks},
};
use crate::analyze::{Analysis, DiffusionMap};

/// Most tokens drawn of one map; of more, evenly spread ones.
const MOST: usize = 512;

/// The maps of an analysis, a section of its page.
pub fn section(analysis: &Analysis) -> Markup {
    html! {
        @if !analysis.maps.is_empty() {
            h2 { "Diffusion maps" }
            p class="quiet" {
                "Tokens of the first head of the first and the last layer on the first two coordinates of the walk on their symmetrised graph, after one step: "
                "tokens lie close whose walkers go to the same places. A second group apart is a cluster, a line a chain; all in one point is a graph that mixes at once."
            }
            div class="charts" { @for map in &analysis.maps { (scatter(map)) } }
        }
    }
}

fn scatter(map: &DiffusionMap) -> Markup {
    let step = map.places.len().div_ceil(MOST).max(1);
    let range = |axis: usize| {
        let values = map.places.iter().map(|place| place[axis]);
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h): (f64, f64), x| (l.min(x), h.max(x)));
        // Rounding is no shape.
        if high - low > 1e-9 { (low, high) } else { (low - 0.5, high + 0.5) }
    };
    let [x, y] = [0, 1].map(|axis| {
        let (low, high) = range(axis);
        ticks(low, high)
    });
    let ends = |ticks: &[f64]| (ticks[0], ticks[ticks.len() - 1]);
    let frame = Frame { x: ends(&x), y: ends(&y) };
    let title = format!("{}: {}", map.layer, map.mechanism);
    let axes = Axes { title: &title, x: "first coordinate", y: "second coordinate", percent: false };
    html! {
        figure {
            figcaption { (title) }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(format!("Diffusion map of {title}, {} tokens", map.places.len())) {
                (frame.grid(axes, &labelled(&x, false), &labelled(&y, false)))
                @for (token, [x, y]) in map.places.iter().enumerate().step_by(step) {
                    circle class=(format!("dot s{}", page::style_of(map.mechanism))) cx=(px(frame.x(*x))) cy=(px(frame.y(*y))) r="2.5" {
                        title { "token " (token) ": " (significant(*x)) ", " (significant(*y)) }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every token is a point with its number and place; one place for all of them is drawn too.
    #[test]
    fn tokens_are_points() {
        let map = |places: Vec<[f64; 2]>| DiffusionMap { layer: "a.0".into(), mechanism: "softmax", places };
        let page = scatter(&map(vec![[0.0, -1.0], [2.0, 1.0], [1.0, 0.0]])).into_string();
        assert!(page.contains("token 1: 2, 1<") && page.matches("<circle").count() == 3, "{page}");
        // The middle one lies in the middle of the other two.
        let places: Vec<f64> =
            page.split("cx=\"").skip(1).map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect();
        assert!((places[2] - 0.5 * (places[0] + places[1])).abs() < 0.11, "{places:?}");
        let one = scatter(&map(vec![[1e-12, 0.0]; 600])).into_string();
        assert!(!one.contains("NaN") && !one.contains("inf") && one.matches("<circle").count() == 300, "{one}");
    }
}
