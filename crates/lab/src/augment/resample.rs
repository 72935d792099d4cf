//! Cutting and resizing.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::Picture;
use crate::picture::PictureShape;

/// How values between pixels are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Filter {
    /// Two neighbours per axis.
    Bilinear,
    /// Four neighbours per axis: "Cubic Convolution Interpolation for Digital Image Processing", a = -1/2.
    #[default]
    Bicubic,
}

impl Filter {
    /// Distance in source pixels beyond which the kernel is zero.
    fn support(self) -> f32 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
        }
    }

    fn kernel(self, distance: f32) -> f32 {
        let t = distance.abs();
        match self {
            Filter::Bilinear => (1.0 - t).max(0.0),
            Filter::Bicubic if t < 1.0 => (1.5 * t - 2.5) * t * t + 1.0,
            Filter::Bicubic if t < 2.0 => ((-0.5 * t + 2.5) * t - 4.0) * t + 2.0,
            Filter::Bicubic => 0.0,
        }
    }
}

/// A rectangle of whole pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rectangle {
    /// First row.
    pub top: usize,
    /// First column.
    pub left: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

impl Rectangle {
    /// The largest centred rectangle of the proportions `height : width`, shrunk to `share` of its extent.
    ///
    /// Resizing it to `height x width` is the same as resizing the picture's shorter side and cutting the centre out.
    pub fn centred(shape: PictureShape, height: usize, width: usize, share: f32) -> Self {
        let scale = (shape.height as f32 / height as f32).min(shape.width as f32 / width as f32) * share;
        let extent = |wanted: usize, most: usize| ((wanted as f32 * scale).round() as usize).clamp(1, most);
        let (height, width) = (extent(height, shape.height), extent(width, shape.width));
        Rectangle { top: (shape.height - height) / 2, left: (shape.width - width) / 2, height, width }
    }

    /// A rectangle somewhere in the picture whose share of the area and proportion (height to width) are drawn from the
    /// given ranges, the latter evenly in the logarithm. None if ten draws did not fit.
    pub(super) fn random(shape: PictureShape, area: [f32; 2], ratio: [f32; 2], rng: &mut ChaCha8Rng) -> Option<Self> {
        (0..10).find_map(|_| {
            let pixels = shape.plane() as f32 * rng.random_range(area[0]..=area[1]);
            let ratio = rng.random_range(ratio[0].ln()..=ratio[1].ln()).exp();
            let (height, width) = ((pixels * ratio).sqrt().round() as usize, (pixels / ratio).sqrt().round() as usize);
            let fits = (1..=shape.height).contains(&height) && (1..=shape.width).contains(&width);
            fits.then(|| Rectangle {
                top: rng.random_range(0..=shape.height - height),
                left: rng.random_range(0..=shape.width - width),
                height,
                width,
            })
        })
    }
}

/// Cuts `area` out and resizes it to `height x width`; where it shrinks, the filter widens so that nothing aliases.
///
/// # Panics
/// If `area` is empty or leaves the picture, or the new extent is 0.
pub fn resample(picture: &Picture, area: Rectangle, height: usize, width: usize, filter: Filter) -> Picture {
    let PictureShape { channels, height: rows, width: columns } = picture.shape;
    assert!(area.height > 0 && area.top + area.height <= rows, "{area:?} in {:?}", picture.shape);
    assert!(area.width > 0 && area.left + area.width <= columns, "{area:?} in {:?}", picture.shape);
    assert!(height > 0 && width > 0, "a new extent of {height} x {width}");
    let across = Taps::new(area.left, area.width, width, filter);
    let down = Taps::new(area.top, area.height, height, filter);
    let shape = PictureShape { channels, height, width };
    let mut values = Vec::with_capacity(shape.volume());
    let mut narrowed = vec![0.0; area.height * width];
    for plane in picture.values.chunks_exact(rows * columns) {
        let source = plane.chunks_exact(columns).skip(area.top);
        for (row, narrow) in source.zip(narrowed.chunks_exact_mut(width)) {
            for (out, (start, weights)) in narrow.iter_mut().zip(across.iter()) {
                *out = row[start..].iter().zip(weights).map(|(value, weight)| value * weight).sum();
            }
        }
        for (start, weights) in down.iter() {
            let from = values.len();
            values.resize(from + width, 0.0);
            let out = &mut values[from..];
            for (row, weight) in narrowed.chunks_exact(width).skip(start - area.top).zip(weights) {
                out.iter_mut().zip(row).for_each(|(out, value)| *out += weight * value);
            }
            out.iter_mut().for_each(|value| *value = value.clamp(0.0, 1.0));
        }
    }
    Picture { shape, values }
}

/// For each new pixel along one axis: the first source pixel it takes from, and the weights from there on.
struct Taps {
    starts: Vec<usize>,
    ends: Vec<usize>,
    weights: Vec<f32>,
}

impl Taps {
    fn new(offset: usize, extent: usize, size: usize, filter: Filter) -> Self {
        let scale = extent as f32 / size as f32;
        let stretch = scale.max(1.0);
        let mut taps = Taps { starts: Vec::with_capacity(size), ends: Vec::with_capacity(size), weights: Vec::new() };
        for index in 0..size {
            let centre = (index as f32 + 0.5) * scale;
            let reach = filter.support() * stretch;
            let first = (centre - reach + 0.5).max(0.0) as usize;
            let last = ((centre + reach + 0.5) as usize).min(extent);
            let from = taps.weights.len();
            taps.weights.extend((first..last).map(|at| filter.kernel((at as f32 + 0.5 - centre) / stretch)));
            let total: f32 = taps.weights[from..].iter().sum();
            taps.weights[from..].iter_mut().for_each(|weight| *weight /= total);
            taps.starts.push(offset + first);
            taps.ends.push(taps.weights.len());
        }
        taps
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &[f32])> {
        let mut from = 0;
        self.starts
            .iter()
            .zip(&self.ends)
            .map(move |(&start, &end)| (start, &self.weights[std::mem::replace(&mut from, end)..end]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(height: usize, width: usize) -> Picture {
        let shape = PictureShape { channels: 2, height, width };
        let values = (0..shape.volume()).map(|index| (index % 97) as f32 / 96.0).collect();
        Picture { shape, values }
    }

    #[test]
    fn a_size_that_stays_changes_nothing() {
        let picture = ramp(7, 5);
        let whole = Rectangle { top: 0, left: 0, height: 7, width: 5 };
        for filter in [Filter::Bilinear, Filter::Bicubic] {
            assert_eq!(resample(&picture, whole, 7, 5, filter), picture);
        }
    }

    #[test]
    fn cutting_takes_exactly_the_area() {
        let picture = ramp(6, 8);
        let cut = resample(&picture, Rectangle { top: 2, left: 3, height: 3, width: 4 }, 3, 4, Filter::Bicubic);
        for channel in 0..2 {
            for (row, column) in (0..3).flat_map(|row| (0..4).map(move |column| (row, column))) {
                let expected = picture.values[(channel * 6 + row + 2) * 8 + column + 3];
                assert_eq!(cut.values[(channel * 3 + row) * 4 + column], expected);
            }
        }
    }

    #[test]
    fn a_constant_stays_constant_and_a_line_stays_a_line() {
        let shape = PictureShape { channels: 1, height: 9, width: 16 };
        let whole = Rectangle { top: 0, left: 0, height: 9, width: 16 };
        let flat = Picture { shape, values: vec![0.3; shape.volume()] };
        let line = Picture { shape, values: (0..shape.volume()).map(|index| (index % 16) as f32 / 16.0).collect() };
        for filter in [Filter::Bilinear, Filter::Bicubic] {
            for (height, width) in [(3, 4), (9, 16), (20, 50), (1, 1)] {
                let out = resample(&flat, whole, height, width, filter);
                assert!(out.values.iter().all(|value| (value - 0.3).abs() < 1e-6));
            }
            for (extent, size) in (1..=9).flat_map(|extent| (1..=12).map(move |size| (extent, size))) {
                let part = Rectangle { top: 9 - extent, left: 1, height: extent, width: extent };
                let out = resample(&flat, part, size, size + 1, filter);
                assert!(out.values.iter().all(|value| (value - 0.3).abs() < 1e-6), "{extent} to {size}");
            }
            let wide = resample(&line, whole, 9, 32, filter);
            for column in 4..28 {
                let expected = ((column as f32 + 0.5) / 2.0 - 0.5) / 16.0;
                assert!((wide.values[column] - expected).abs() < 1e-5, "{filter:?} at {column}");
            }
        }
    }

    #[test]
    fn halving_averages_instead_of_skipping() {
        let shape = PictureShape { channels: 1, height: 8, width: 8 };
        let stripes = Picture { shape, values: (0..64).map(|index| (index % 2) as f32).collect() };
        let out = resample(&stripes, Rectangle { top: 0, left: 0, height: 8, width: 8 }, 4, 4, Filter::Bilinear);
        for row in 0..4 {
            assert!((out.values[row * 4 + 1] - 0.5).abs() < 0.13, "{:?}", out.values);
        }
    }

    #[test]
    fn the_centre_has_the_proportions_asked_for() {
        let shape = PictureShape { channels: 3, height: 40, width: 60 };
        let centred = |height, width, share| Rectangle::centred(shape, height, width, share);
        assert_eq!(centred(20, 20, 1.0), Rectangle { top: 0, left: 10, height: 40, width: 40 });
        assert_eq!(centred(20, 20, 0.5), Rectangle { top: 10, left: 20, height: 20, width: 20 });
        assert_eq!(centred(10, 60, 1.0), Rectangle { top: 15, left: 0, height: 10, width: 60 });
    }
}
