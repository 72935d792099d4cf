//! One picture: where its paths run, and how they are drawn.

use std::f32::consts::{FRAC_PI_2, TAU};

use rand::{RngExt, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;

/// Lengths in pixels, as "Long Range Arena" gives them for each size of its pictures.
pub(super) struct Geometry {
    size: usize,
    /// Of a dash.
    dash: f32,
    /// Half the gap between two dashes of a path; one is drawn for each picture.
    margins: &'static [f32],
    thickness: f32,
    /// How bright a pixel is that a dash covers, 1 being white; what is above is cut.
    contrast: f32,
    /// Radius of a dot.
    dot: f32,
    /// Between the beginnings of the two paths.
    distance: f32,
    /// How straight a path is: a turn by the angle `d` has the weight `cos(min(continuity d, 90 degrees))^2`.
    continuity: f32,
    /// Dashes that all distractors have together.
    distracting: usize,
}

/// Pixels at the border that stay empty.
const PADDING: f32 = 1.0;
/// Directions that a path can turn to.
const DIRECTIONS: usize = 72;
/// Times that a distractor is begun at most.
const TRIALS: usize = 5;
/// Places that are tried for its first dash.
const PLACES: usize = 50;
/// A pixel's brightness is the mean over so many places in it, each way.
const SAMPLES: usize = 4;

impl Geometry {
    /// For pictures of `size x size` pixels, where there is one.
    pub(super) fn of(size: usize) -> Option<Self> {
        type Row = (f32, &'static [f32], f32, f32, f32, f32, f32, usize);
        let (dash, margins, thickness, contrast, dot, distance, continuity, distracting): Row = match size {
            32 => (2.0, &[1.0], 0.5, 1.5, 1.5, 7.0, 1.0, 20),
            64 => (5.0, &[1.0], 1.0, 0.8, 2.5, 12.0, 1.8, 22),
            128 => (5.0, &[2.0, 3.0], 1.5, 0.9, 3.0, 20.0, 1.8, 35),
            _ => return None,
        };
        Some(Self { size, dash, margins, thickness, contrast, dot, distance, continuity, distracting })
    }
}

type Point = [f32; 2];

fn moved([x, y]: Point, angle: f32, by: f32) -> Point {
    [x + by * angle.cos(), y + by * angle.sin()]
}

#[derive(Debug, Clone, Copy)]
struct Dash {
    from: Point,
    to: Point,
    angle: f32,
}

impl Dash {
    fn new(from: Point, angle: f32, length: f32) -> Self {
        Self { from, to: moved(from, angle, length), angle }
    }

    /// From a point to the dash.
    fn distance_to(&self, [x, y]: Point) -> f32 {
        let ([dx, dy], [px, py]) =
            ([self.to[0] - self.from[0], self.to[1] - self.from[1]], [x - self.from[0], y - self.from[1]]);
        let length = (dx * dx + dy * dy).max(f32::MIN_POSITIVE);
        let share = ((px * dx + py * dy) / length).clamp(0.0, 1.0);
        (px - share * dx).hypot(py - share * dy)
    }

    /// Between two dashes that are shorter than twice what is asked of their distance: those that cross have ends nearer than that.
    fn distance(&self, other: &Self) -> f32 {
        let ends = [self.distance_to(other.from), self.distance_to(other.to)];
        let others = [other.distance_to(self.from), other.distance_to(self.to)];
        ends.into_iter().chain(others).fold(f32::INFINITY, f32::min)
    }
}

/// Draws a picture to `pixels [size, size]`, which are black.
pub(super) fn draw(
    geometry: &Geometry,
    length: usize,
    distractors: Option<usize>,
    connected: bool,
    rng: &mut ChaCha8Rng,
    pixels: &mut [u8],
) {
    let margin = *geometry.margins.choose(rng).expect("every size has a margin");
    let (mut scene, ends) = loop {
        let mut scene = Scene { geometry, margin, dashes: Vec::new() };
        if let Some(ends) = scene.two_paths(length, rng) {
            break (scene, ends);
        }
    };
    let distracting = (length / 3).max(1);
    for _ in 0..distractors.unwrap_or(geometry.distracting / distracting) {
        (0..TRIALS).any(|_| scene.distractor(distracting, rng));
    }
    let origin = rng.random_range(0..2);
    let terminal = if connected { origin } else { 1 - origin };
    for dash in &scene.dashes {
        paint(pixels, geometry.size, dash, geometry.thickness / 2.0, geometry.contrast);
    }
    for dot in [ends[origin].0, ends[terminal].1] {
        paint(pixels, geometry.size, &Dash { from: dot, to: dot, angle: 0.0 }, geometry.dot, 1.0);
    }
}

/// All dashes so far.
struct Scene<'a> {
    geometry: &'a Geometry,
    margin: f32,
    dashes: Vec<Dash>,
}

impl Scene<'_> {
    /// Two paths of `length` dashes that grow in turn, from near the middle: where each begins and ends. `None` where one finds no way.
    fn two_paths(&mut self, length: usize, rng: &mut ChaCha8Rng) -> Option<[(Point, Point); 2]> {
        let Geometry { size, dash, distance, .. } = *self.geometry;
        let (near, far) = (2.0 * distance, size as f32 - 2.0 * distance);
        let first = [rng.random_range(near..=far), rng.random_range(near..=far)];
        let second = moved(first, rng.random_range(0.0..TAU), distance);
        let mut last = [0; 2];
        for (path, begin) in [first, second].into_iter().enumerate() {
            last[path] = self.add(Dash::new(begin, rng.random_range(0.0..TAU), dash), None)?;
        }
        for _ in 1..length {
            for path in &mut last {
                *path = self.extend(*path, rng)?;
            }
        }
        Some([(first, self.dashes[last[0]].to), (second, self.dashes[last[1]].to)])
    }

    /// A path of `length` dashes somewhere; whether there was room.
    fn distractor(&mut self, length: usize, rng: &mut ChaCha8Rng) -> bool {
        let (size, before) = (self.geometry.size as f32, self.dashes.len());
        let begun = (0..PLACES).find_map(|_| {
            let from = [rng.random_range(0.0..size), rng.random_range(0.0..size)];
            self.add(Dash::new(from, rng.random_range(0.0..TAU), self.geometry.dash), None)
        });
        let whole = begun.and_then(|first| (1..length).try_fold(first, |last, _| self.extend(last, rng)));
        if whole.is_none() {
            self.dashes.truncate(before);
        }
        whole.is_some()
    }

    /// Adds the dash that follows `last` on its path; `None` in a dead end.
    fn extend(&mut self, last: usize, rng: &mut ChaCha8Rng) -> Option<usize> {
        let Geometry { dash, continuity, .. } = *self.geometry;
        let Dash { to, angle, .. } = self.dashes[last];
        let pivot = moved(to, angle, self.margin);
        let turns = (0..DIRECTIONS).filter_map(|direction| {
            let turn = (direction as f32 / DIRECTIONS as f32 - 0.5) * TAU;
            let weight = (continuity * turn.abs()).min(FRAC_PI_2).cos().powi(2);
            let next = Dash::new(moved(pivot, angle + turn, self.margin), angle + turn, dash);
            (weight > 1e-6 && self.is_free(&next, Some(last))).then_some((next, weight))
        });
        let turns: Vec<(Dash, f32)> = turns.collect();
        let (next, _) = turns.choose_weighted(rng, |(_, weight)| *weight).ok()?;
        self.dashes.push(*next);
        Some(self.dashes.len() - 1)
    }

    fn add(&mut self, dash: Dash, last: Option<usize>) -> Option<usize> {
        self.is_free(&dash, last).then(|| self.dashes.push(dash))?;
        Some(self.dashes.len() - 1)
    }

    /// Whether `dash` lies in the picture, and farther from all others than two dashes of a path, but for `last`, which it follows.
    fn is_free(&self, dash: &Dash, last: Option<usize>) -> bool {
        let inside = PADDING..=self.geometry.size as f32 - PADDING;
        let apart = 2.0 * self.margin + self.geometry.thickness;
        let reach = apart + 2.0 * self.geometry.dash;
        [dash.from, dash.to].as_flattened().iter().all(|at| inside.contains(at))
            && self.dashes.iter().enumerate().all(|(index, other)| {
                let far = (dash.from[0] - other.from[0]).hypot(dash.from[1] - other.from[1]) > reach;
                far || Some(index) == last || dash.distance(other) >= apart
            })
    }
}

/// Brightens the pixels within `radius` of `dash`, by how much of them is.
fn paint(pixels: &mut [u8], size: usize, dash: &Dash, radius: f32, contrast: f32) {
    let range = |axis: usize| {
        let (low, high) = (dash.from[axis].min(dash.to[axis]) - radius, dash.from[axis].max(dash.to[axis]) + radius);
        low.floor().max(0.0) as usize..(high.ceil() as usize).min(size)
    };
    let place = |pixel: usize, sample: usize| pixel as f32 + (sample as f32 + 0.5) / SAMPLES as f32;
    for y in range(1) {
        for x in range(0) {
            let inside = (0..SAMPLES * SAMPLES)
                .filter(|sample| dash.distance_to([place(x, sample % SAMPLES), place(y, sample / SAMPLES)]) <= radius);
            let covered = inside.count() as f32 / (SAMPLES * SAMPLES) as f32;
            let level = (255.0 * contrast * covered).min(255.0).round() as u8;
            let pixel = &mut pixels[y * size + x];
            *pixel = (*pixel).max(level);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rng::{Purpose, stream};

    #[test]
    fn paths_keep_apart_and_the_dots_lie_on_their_ends() {
        for size in [32, 64, 128] {
            let geometry = Geometry::of(size).unwrap();
            let mut rng = stream(Purpose::Pathfinder, 1, 0, size as u64);
            let mut found = 0;
            while found < 5 {
                let mut scene = Scene { geometry: &geometry, margin: geometry.margins[0], dashes: Vec::new() };
                let Some(ends) = scene.two_paths(14, &mut rng) else { continue };
                found += 1;
                scene.distractor(4, &mut rng);
                for (index, dash) in scene.dashes.iter().enumerate() {
                    let gap = 2.0 * scene.margin;
                    let nearest =
                        scene.dashes[..index].iter().map(|other| dash.distance(other)).fold(f32::INFINITY, f32::min);
                    assert!(nearest >= gap * 0.7 - 1e-3, "{size}: {nearest}");
                }
                // The paths grow in turn.
                let path = |which: usize| scene.dashes[..28].iter().skip(which).step_by(2);
                for (which, (from, to)) in ends.into_iter().enumerate() {
                    assert_eq!((path(which).next().unwrap().from, path(which).next_back().unwrap().to), (from, to));
                    let dashes: Vec<_> = path(which).collect();
                    let steps = dashes
                        .windows(2)
                        .map(|pair| (pair[0].to[0] - pair[1].from[0]).hypot(pair[0].to[1] - pair[1].from[1]));
                    assert!(steps.into_iter().all(|gap| gap <= 2.0 * scene.margin + 1e-3));
                }
                for (one, other) in path(0).flat_map(|one| path(1).map(move |other| (one, other))) {
                    assert!(one.distance(other) >= 2.0 * scene.margin + geometry.thickness - 1e-3);
                }
            }
        }
    }

    #[test]
    fn the_label_moves_one_dot_and_nothing_else() {
        let geometry = Geometry::of(32).unwrap();
        let picture = |connected| {
            let mut pixels = vec![0; 32 * 32];
            draw(&geometry, 9, None, connected, &mut stream(Purpose::Pathfinder, 0, 0, 7), &mut pixels);
            pixels
        };
        let (separate, joined) = (picture(false), picture(true));
        let changed = separate.iter().zip(&joined).filter(|(one, other)| one != other).count();
        // Two dots of radius 1.5, of which each touches at most 16 pixels.
        assert!((4..=32).contains(&changed), "{changed}");
        assert!(separate.iter().filter(|&&pixel| pixel > 60).count() > 60, "dashes are seen");
    }
    /// Where pixel `index` is.
    fn place(index: usize, size: usize) -> Point {
        [(index % size) as f32, (index / size) as f32]
    }

    /// The pixels that are lit, each with the number of its path: those less than `gap` apart follow each other.
    fn followed(pixels: &[u8], size: usize, gap: f32) -> Vec<(Point, usize)> {
        let lit = (0..pixels.len()).filter(|&index| pixels[index] >= 115).map(|index| (place(index, size), usize::MAX));
        let mut lit: Vec<(Point, usize)> = lit.collect();
        for first in 0..lit.len() {
            let mut reached = if lit[first].1 == usize::MAX { vec![lit[first].0] } else { Vec::new() };
            while let Some([x, y]) = reached.pop() {
                for ([other_x, other_y], path) in &mut lit {
                    if *path == usize::MAX && (x - *other_x).hypot(y - *other_y) < gap {
                        *path = first;
                        reached.push([*other_x, *other_y]);
                    }
                }
            }
        }
        lit
    }

    #[test]
    fn the_label_is_what_one_finds_by_following_the_dashes() {
        // Twice the size of the published pictures, where pixels are fine enough to tell a gap within a path from one between two.
        let size = 256;
        for index in 0..24 {
            let connected = index % 2 == 1;
            // Dashes are grey, so that what is white is a dot.
            let picture = |dot| {
                let lengths = Geometry {
                    dash: 10.0,
                    margins: &[4.0],
                    thickness: 3.0,
                    distance: 40.0,
                    ..Geometry::of(128).unwrap()
                };
                let geometry = Geometry { size, dot, ..lengths };
                let mut pixels = vec![0; size * size];
                draw(&geometry, 14, None, connected, &mut stream(Purpose::Pathfinder, 5, 0, index), &mut pixels);
                pixels
            };
            let (without_dots, dotted) = (picture(0.0), picture(3.0));
            let paths = followed(&without_dots, size, 6.5);
            let nearest = |at: Point| {
                let distance = |&(other, _): &(Point, usize)| (at[0] - other[0]).hypot(at[1] - other[1]);
                paths.iter().min_by(|one, other| distance(one).total_cmp(&distance(other))).unwrap().1
            };
            let white = (0..size * size).filter(|&index| dotted[index] == 255);
            let mut marked: Vec<usize> = white.map(|index| nearest(place(index, size))).collect();
            marked.sort_unstable();
            marked.dedup();
            assert_eq!(marked.len(), if connected { 1 } else { 2 }, "picture {index}");
        }
    }
}
