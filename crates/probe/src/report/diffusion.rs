//! Diffusion maps: the tokens of a graph as points.

use maud::{Markup, html};
use resolvent_lab::page::{
    chart::Axes,
    frame::{Frame, HEIGHT, WIDTH, px, significant},
    ticks::{labelled, ticks},
};

use super::analysis::style;
use crate::analyze::{Analysis, DiffusionMap};

/// Most words written into one map: more would cover each other.
const WORDS: usize = 16;
/// Most tokens drawn of one map; of more, evenly spread ones.
const MOST: usize = 512;

/// The maps of an analysis, a section of its page.
pub fn section(analysis: &Analysis) -> Markup {
    html! {
        @if !analysis.maps.is_empty() {
            h2 { "Diffusion maps" }
            p class="quiet" {
                "Tokens of the first head of the first and the last layer on the first two coordinates of the walk on their symmetrised graph, after one step: "
                "tokens lie close whose walkers go to the same places. A second group apart is a cluster, a line a chain; all in one point is a graph that mixes at once, or whose walkers change sides with every step (a negative eigenvalue has no place here)."
            }
            div class="charts" { @for map in &analysis.maps { (scatter(map, style(analysis, &map.name))) } }
        }
    }
}

fn scatter(map: &DiffusionMap, style: usize) -> Markup {
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
    let title = format!("{}: {}", map.layer, map.name);
    let axes = Axes { title: &title, x: "first coordinate", y: "second coordinate", percent: false };
    html! {
        figure {
            figcaption { (title) }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="group" aria-label=(format!("Diffusion map of {title}, {} tokens", map.places.len())) {
                (frame.grid(axes, &labelled(&x, false), &labelled(&y, false)))
                @for (token, [x, y]) in map.places.iter().enumerate().step_by(step) {
                    circle class=(format!("dot s{style}")) cx=(px(frame.x(*x))) cy=(px(frame.y(*y))) r="2.5" {
                        title {
                            "token " (token) @if let Some(word) = map.words.get(token) { " (" (word) ")" }
                            ": " (significant(*x)) ", " (significant(*y))
                        }
                    }
                }
                @for token in outermost(map) {
                    @let [x, y] = map.places[token];
                    text class="word" x=(px(frame.x(x) + 4.0)) y=(px(frame.y(y) - 3.0)) { (map.words[token]) }
                }
            }
        }
    }
}

/// The tokens whose words are written: the outermost, one of each word.
fn outermost(map: &DiffusionMap) -> Vec<usize> {
    let count = map.places.len().max(1) as f64;
    let middle = [0, 1].map(|axis| map.places.iter().map(|place| place[axis]).sum::<f64>() / count);
    let distance = |token: &usize| {
        let place = map.places[*token];
        (place[0] - middle[0]).hypot(place[1] - middle[1])
    };
    let mut order: Vec<usize> = (0..map.words.len()).collect();
    order.sort_by(|a, b| distance(b).total_cmp(&distance(a)));
    let mut written: Vec<usize> = Vec::new();
    for token in order {
        if written.len() < WORDS && written.iter().all(|&other| map.words[other] != map.words[token]) {
            written.push(token);
        }
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every token is a point with its number and place; one place for all of them is drawn too.
    #[test]
    fn tokens_are_points() {
        let map = |places: Vec<[f64; 2]>| DiffusionMap {
            layer: "a.0".into(),
            name: "softmax".into(),
            places,
            words: Vec::new(),
        };
        let page = scatter(&map(vec![[0.0, -1.0], [2.0, 1.0], [1.0, 0.0]]), 0).into_string();
        assert!(page.contains("token 1: 2, 1<") && page.matches("<circle").count() == 3, "{page}");
        // The middle one lies in the middle of the other two.
        let places: Vec<f64> =
            page.split("cx=\"").skip(1).map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect();
        assert!((places[2] - 0.5 * (places[0] + places[1])).abs() < 0.11, "{places:?}");
        let one = scatter(&map(vec![[1e-12, 0.0]; 600]), 0).into_string();
        assert!(!one.contains("NaN") && !one.contains("inf") && one.matches("<circle").count() == 300, "{one}");
    }

    /// Words stand at the outermost points, each word once, and are told of every point.
    #[test]
    fn points_of_texts_have_words() {
        let places = vec![[0.0, 0.0], [5.0, 0.0], [4.0, 0.0], [-5.0, 1.0]];
        let words = ["a", "film", "film", "good & new"].map(str::to_owned).to_vec();
        let map = DiffusionMap { layer: "a.0".into(), name: "softmax".into(), places, words };
        assert_eq!(outermost(&map), [3, 1, 0]);
        let page = scatter(&map, 0).into_string();
        assert!(page.contains("token 2 (film): 4, 0<") && page.matches(">film</text>").count() == 1, "{page}");
        assert!(page.contains("good &amp; new</text>"), "{page}");
    }
}
