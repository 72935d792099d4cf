//! A picture to paint on, with antialiased edges.

use super::outline::Point;

/// Red, green and blue in [0, 1].
pub(super) type Colour = [f32; 3];

/// A square picture of `size x size` pixels; pixel (column, row) has its centre at (column + 0.5, row + 0.5).
pub(super) struct Canvas {
    size: usize,
    pixels: Vec<Colour>,
}

impl Canvas {
    /// Colours every pixel by a function of its centre.
    pub(super) fn new(size: usize, colour: impl Fn(Point) -> Colour) -> Self {
        let pixels = (0..size * size).map(|index| colour(centre(index % size, index / size))).collect();
        Canvas { size, pixels }
    }

    /// Covers a pixel by as much of it as lies inside `distance < 0` (in pixels), for all pixels within `radius` of
    /// `middle`; calls `painted(column, row)` where at least half is covered.
    pub(super) fn paint(
        &mut self,
        middle: Point,
        radius: f32,
        colour: Colour,
        distance: impl Fn(Point) -> f32,
        mut painted: impl FnMut(usize, usize),
    ) {
        let span = |at: f32| {
            let clip = |edge: f32| edge.clamp(0.0, self.size as f32) as usize;
            clip((at - radius).floor())..clip((at + radius).ceil())
        };
        let (columns, rows) = (span(middle[0]), span(middle[1]));
        for (row, column) in rows.flat_map(|row| columns.clone().map(move |column| (row, column))) {
            let cover = (0.5 - distance(centre(column, row))).clamp(0.0, 1.0);
            for (under, over) in self.pixels[row * self.size + column].iter_mut().zip(colour) {
                *under += cover * (over - *under);
            }
            if cover >= 0.5 {
                painted(column, row);
            }
        }
    }

    /// Writes bytes `[3, size, size]`, each value disturbed by `noise()`.
    pub(super) fn write(&self, mut noise: impl FnMut() -> f32, bytes: &mut [u8]) {
        let plane = self.pixels.len();
        for (index, colour) in self.pixels.iter().enumerate() {
            for (channel, value) in colour.iter().enumerate() {
                bytes[channel * plane + index] = ((value + noise()).clamp(0.0, 1.0) * 255.0).round() as u8;
            }
        }
    }
}

fn centre(column: usize, row: usize) -> Point {
    [column as f32 + 0.5, row as f32 + 0.5]
}
