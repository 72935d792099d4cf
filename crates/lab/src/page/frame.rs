//! The area of a chart: where values lie, its grid, and how numbers are written.

use maud::{Markup, html};

use super::chart::Axes;

/// Width of a drawing, in its own units.
pub const WIDTH: f64 = 400.0;
/// Height of a drawing, in its own units.
pub const HEIGHT: f64 = 250.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 34.0;

/// Coordinates with a tenth of a unit: enough to see, short to write.
pub fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// A number with four digits that matter, whole numbers as they are.
pub fn significant(x: f64) -> String {
    match x.abs() {
        size if x.fract() == 0.0 && size < 1e6 => format!("{x}"),
        size if !(1e-4..1e6).contains(&size) => format!("{x:.3e}"),
        size => format!("{x:.*}", (3.0 - size.log10().floor()).clamp(0.0, 8.0) as usize),
    }
}

/// The map from values to the drawing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frame {
    /// The least and the largest value on the horizontal axis.
    pub x: (f64, f64),
    /// The least and the largest value on the vertical axis.
    pub y: (f64, f64),
}

impl Frame {
    /// Where a value of the horizontal axis lies in the drawing.
    pub fn x(&self, value: f64) -> f64 {
        LEFT + (value - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    /// Where a value of the vertical axis lies in the drawing.
    pub fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (value - self.y.0) / (self.y.1 - self.y.0) * (HEIGHT - TOP - BOTTOM)
    }

    /// The grid with its names; ticks are places on the axis with their labels.
    pub fn grid(&self, axes: Axes<'_>, x_ticks: &[(f64, String)], y_ticks: &[(f64, String)]) -> Markup {
        html! { (self.up(y_ticks)) (self.across(x_ticks)) (self.names(axes)) }
    }

    /// The lines and labels of the vertical axis.
    pub fn up(&self, ticks: &[(f64, String)]) -> Markup {
        html! {
            @for (tick, label) in ticks {
                line class="grid" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(px(self.y(*tick))) y2=(px(self.y(*tick))) {}
                text class="tick" text-anchor="end" x=(LEFT - 5.0) y=(px(self.y(*tick) + 3.5)) { (label) }
            }
        }
    }

    /// The marks and labels of the horizontal axis.
    pub fn across(&self, ticks: &[(f64, String)]) -> Markup {
        let base = HEIGHT - BOTTOM;
        html! {
            @for (tick, label) in ticks {
                line class="axis" x1=(px(self.x(*tick))) x2=(px(self.x(*tick))) y1=(base) y2=(base + 4.0) {}
                text class="tick" text-anchor="middle" x=(px(self.x(*tick))) y=(base + 15.0) { (label) }
            }
        }
    }

    /// The horizontal axis and the names of both.
    pub fn names(&self, axes: Axes<'_>) -> Markup {
        let base = HEIGHT - BOTTOM;
        html! {
            line class="axis" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(base) y2=(base) {}
            text class="tick" text-anchor="end" x=(WIDTH - RIGHT) y=(HEIGHT - 4.0) { (axes.x) }
            text class="tick" x="2" y="10" { (axes.y) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_digits_matter() {
        let told = [0.0, 12.0, 0.123456, 1234.56, 1.5e-7, 2.5e9].map(significant);
        assert_eq!(told, ["0", "12", "0.1235", "1235", "1.500e-7", "2.500e9"]);
    }
}
