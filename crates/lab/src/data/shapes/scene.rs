//! The composition of one picture: backdrop, clutter, object, occluding strokes, noise.

use std::{f32::consts::PI, ops::Range};

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

use super::{
    canvas::{Canvas, Colour},
    outline::{Outline, Point, length, segment},
};
use crate::data::ObjectBox;

/// The side for which lengths in pixels are given; they grow with the picture.
const NOMINAL_SIZE: f32 = 32.0;

/// Spread of a picture's own difficulty around that of its data set.
const SPREAD: f32 = 0.25;

/// Draws one picture into `bytes [3, size, size]`; returns the object's box and the picture's difficulty.
pub(super) fn draw(
    rng: &mut ChaCha8Rng,
    outline: Outline,
    size: usize,
    level: f32,
    bytes: &mut [u8],
) -> (ObjectBox, f32) {
    let difficulty = (level + rng.random_range(-SPREAD..=SPREAD)).clamp(0.0, 1.0);
    let mut scene = Scene::new(rng, size, difficulty);
    for _ in 0..scene.between(3.0, 14.0).round() as usize {
        scene.clutter();
    }
    let (bounds, middle, radius) = scene.object(outline);
    for _ in 0..scene.between(0.0, 3.0).round() as usize {
        scene.occlude(middle, radius);
    }
    scene.finish(bytes);
    (bounds, difficulty)
}

struct Scene<'a> {
    rng: &'a mut ChaCha8Rng,
    canvas: Canvas,
    size: f32,
    difficulty: f32,
    /// Whether the backdrop is dark and the things on it are bright, or the other way round.
    dark: bool,
    backdrop: Colour,
}

impl<'a> Scene<'a> {
    fn new(rng: &'a mut ChaCha8Rng, size: usize, difficulty: f32) -> Self {
        let dark = rng.random();
        let value = if dark { 0.12..0.32 } else { 0.7..0.9 };
        let mut tone = || hsv(rng.random(), rng.random_range(0.1..0.5), rng.random_range(value.clone()));
        let [from, to] = [tone(), tone()];
        let backdrop = mix(from, to, 0.5);
        let (sin, cos) = rng.random_range(-PI..PI).sin_cos();
        let texture = Texture::new(rng);
        let strength = lerp(0.04, 0.12, difficulty);
        let canvas = Canvas::new(size, |[x, y]| {
            let [x, y] = [x / size as f32, y / size as f32];
            let share = 0.5 + (x - 0.5) * cos + (y - 0.5) * sin;
            mix(from, to, share.clamp(0.0, 1.0)).map(|value| value + strength * texture.at(x, y))
        });
        Scene { rng, canvas, size: size as f32, difficulty, dark, backdrop }
    }

    /// A value for difficulty 0, another for difficulty 1, and what lies between.
    fn between(&self, easy: f32, hard: f32) -> f32 {
        lerp(easy, hard, self.difficulty)
    }

    /// A random length, given for the nominal size, in pixels of this picture.
    fn extent(&mut self, nominal: Range<f32>) -> f32 {
        self.rng.random_range(nominal) * self.size / NOMINAL_SIZE
    }

    /// A colour that stands out from the backdrop, the less the harder.
    fn colour(&mut self) -> Colour {
        let value = if self.dark { 0.75..1.0 } else { 0.1..0.4 };
        let vivid = hsv(self.rng.random(), self.rng.random_range(0.45..0.95), self.rng.random_range(value));
        mix(self.backdrop, vivid, self.between(1.0, 0.6))
    }

    /// Half the extent of an object.
    fn radius(&mut self) -> f32 {
        self.size * self.between(0.24, 0.14) * self.rng.random_range(0.9..1.1)
    }

    fn anywhere(&mut self) -> Point {
        [(); 2].map(|()| self.rng.random_range(0.0..self.size))
    }

    /// Paints something that is no whole object: a piece of an outline, a stroke or a speck.
    fn clutter(&mut self) {
        let (middle, colour) = (self.anywhere(), self.colour());
        match self.rng.random_range(0..10) {
            0..6 => self.fragment(middle, colour),
            6..9 => {
                let reach = self.extent(2.0..5.0);
                self.stroke(middle, reach, colour);
            }
            _ => {
                let radius = self.extent(0.6..1.2);
                self.canvas.paint(
                    middle,
                    radius + 1.0,
                    colour,
                    |[x, y]| length([x - middle[0], y - middle[1]]) - radius,
                    |_, _| (),
                );
            }
        }
    }

    /// Paints what a straight cut through its middle leaves of an outline.
    fn fragment(&mut self, middle: Point, colour: Colour) {
        let outline = Outline::ALL[self.rng.random_range(0..Outline::ALL.len())];
        let radius = self.radius();
        let pose = Pose::new(middle, radius, self.rng.random_range(-PI..PI));
        let (sin, cos) = self.rng.random_range(-PI..PI).sin_cos();
        let cut = self.rng.random_range(0.0..0.35) * radius;
        let distance = |point: Point| {
            let beyond = (point[0] - middle[0]) * cos + (point[1] - middle[1]) * sin + cut;
            pose.distance(outline, point).max(beyond)
        };
        self.canvas.paint(middle, radius + 1.0, colour, distance, |_, _| ());
    }

    /// Paints a straight stroke that reaches `reach` to both sides of `middle`.
    fn stroke(&mut self, middle: Point, reach: f32, colour: Colour) {
        let half_width = self.extent(0.4..0.8);
        let (sin, cos) = self.rng.random_range(-PI..PI).sin_cos();
        let from = [middle[0] - reach * cos, middle[1] - reach * sin];
        let to = [middle[0] + reach * cos, middle[1] + reach * sin];
        let distance = |point| segment(from, to, point) - half_width;
        self.canvas.paint(middle, reach + half_width + 1.0, colour, distance, |_, _| ());
    }

    /// Paints the whole object where it fits; returns its box, middle and radius.
    fn object(&mut self, outline: Outline) -> (ObjectBox, Point, f32) {
        let (radius, colour) = (self.radius(), self.colour());
        let middle = [(); 2].map(|()| self.rng.random_range(radius + 0.5..self.size - radius - 0.5));
        let turn = self.between(0.15, PI);
        let pose = Pose::new(middle, radius, self.rng.random_range(-turn..turn));
        let mut bounds = ObjectBox { left: u32::MAX, top: u32::MAX, right: 0, bottom: 0 };
        let distance = |point| pose.distance(outline, point);
        self.canvas.paint(middle, radius + 1.0, colour, distance, |column, row| {
            let (column, row) = (column as u32, row as u32);
            bounds.left = bounds.left.min(column);
            bounds.top = bounds.top.min(row);
            bounds.right = bounds.right.max(column + 1);
            bounds.bottom = bounds.bottom.max(row + 1);
        });
        (bounds, middle, radius)
    }

    /// Draws a thin stroke over the rim of the object.
    fn occlude(&mut self, middle: Point, radius: f32) {
        let colour = self.colour();
        let (sin, cos) = self.rng.random_range(-PI..PI).sin_cos();
        let rim = [middle[0] + radius * cos, middle[1] + radius * sin];
        self.stroke(rim, 0.6 * radius, colour);
    }

    fn finish(self, bytes: &mut [u8]) {
        let deviation = self.between(0.01, 0.06);
        self.canvas.write(|| deviation * self.rng.sample::<f32, _>(StandardNormal), bytes);
    }
}

/// Where, how large and how turned an outline is drawn.
struct Pose {
    middle: Point,
    radius: f32,
    sin: f32,
    cos: f32,
}

impl Pose {
    fn new(middle: Point, radius: f32, angle: f32) -> Self {
        let (sin, cos) = angle.sin_cos();
        Pose { middle, radius, sin, cos }
    }

    /// Distance in pixels.
    fn distance(&self, outline: Outline, point: Point) -> f32 {
        let Pose { sin, cos, .. } = self;
        let [x, y] = [point[0] - self.middle[0], point[1] - self.middle[1]];
        self.radius * outline.distance([(x * cos + y * sin) / self.radius, (y * cos - x * sin) / self.radius])
    }
}

/// Smooth noise in [-1, 1]: random values on a grid, blended between its points.
struct Texture([[f32; Self::GRID + 1]; Self::GRID + 1]);

impl Texture {
    /// Cells per side: a cell of 32 / 6 pixels is neither a gradient nor noise.
    const GRID: usize = 6;

    fn new(rng: &mut ChaCha8Rng) -> Self {
        Texture([[(); Self::GRID + 1]; Self::GRID + 1].map(|row| row.map(|()| rng.random_range(-1.0..1.0))))
    }

    /// The value at a point of the unit square.
    fn at(&self, x: f32, y: f32) -> f32 {
        let cell = |at: f32| {
            let at = at * Self::GRID as f32;
            let index = (at as usize).min(Self::GRID - 1);
            let share = at - index as f32;
            (index, share * share * (3.0 - 2.0 * share))
        };
        let ((column, across), (row, down)) = (cell(x), cell(y));
        let along = |row: &[f32]| lerp(row[column], row[column + 1], across);
        lerp(along(&self.0[row]), along(&self.0[row + 1]), down)
    }
}

fn lerp(from: f32, to: f32, share: f32) -> f32 {
    from + share * (to - from)
}

fn mix(from: Colour, to: Colour, share: f32) -> Colour {
    std::array::from_fn(|channel| lerp(from[channel], to[channel], share))
}

/// A colour from hue, saturation and value in [0, 1].
fn hsv(hue: f32, saturation: f32, value: f32) -> Colour {
    [5.0, 3.0, 1.0].map(|offset| {
        let sector = (offset + 6.0 * hue) % 6.0;
        value * (1.0 - saturation * sector.min(4.0 - sector).clamp(0.0, 1.0))
    })
}
