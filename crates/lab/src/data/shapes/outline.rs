//! The outlines that make the classes, as signed distances.

/// A point of the plane.
pub(super) type Point = [f32; 2];

/// The outline of an object: one class of the data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outline {
    /// A filled circle.
    Disc,
    /// A circle with a hole.
    Ring,
    /// A disc with a disc bitten out of its side.
    Crescent,
    /// An equilateral triangle.
    Triangle,
    /// A square.
    Square,
    /// Two crossed bars of equal length.
    Cross,
    /// A star of five points.
    Star,
    /// A head and a shaft.
    Arrow,
}

impl Outline {
    /// All outlines, in label order.
    pub const ALL: [Outline; 8] = [
        Outline::Disc,
        Outline::Ring,
        Outline::Crescent,
        Outline::Triangle,
        Outline::Square,
        Outline::Cross,
        Outline::Star,
        Outline::Arrow,
    ];

    /// The class name.
    pub fn name(self) -> &'static str {
        match self {
            Outline::Disc => "disc",
            Outline::Ring => "ring",
            Outline::Crescent => "crescent",
            Outline::Triangle => "triangle",
            Outline::Square => "square",
            Outline::Cross => "cross",
            Outline::Star => "star",
            Outline::Arrow => "arrow",
        }
    }

    /// Distance of `point` to the outline, negative inside. The outline lies within the unit circle and is scaled so
    /// that all outlines cover about the same area, lest size give the class away.
    pub(super) fn distance(self, point: Point) -> f32 {
        let [x, y] = point;
        let radius = length(point);
        match self {
            Outline::Disc => radius - 0.78,
            Outline::Ring => (radius - 0.72).abs() - 0.22,
            Outline::Crescent => (radius - 0.95).max(0.72 - length([x - 0.52, y])),
            Outline::Triangle => polygon(&TRIANGLE, point),
            Outline::Square => polygon(&SQUARE, point),
            Outline::Cross => polygon(&CROSS, point),
            Outline::Star => polygon(&STAR, point),
            Outline::Arrow => polygon(&ARROW, point),
        }
    }
}

const TRIANGLE: [Point; 3] = [[0.0, -1.0], [0.866, 0.5], [-0.866, 0.5]];
const SQUARE: [Point; 4] = [[-0.69, -0.69], [0.69, -0.69], [0.69, 0.69], [-0.69, 0.69]];
/// Half the width of the bars of the cross.
const BAR: f32 = 0.29;
/// Half the length of the bars of the cross.
const ARM: f32 = 0.95;
const CROSS: [Point; 12] = [
    [-BAR, -ARM],
    [BAR, -ARM],
    [BAR, -BAR],
    [ARM, -BAR],
    [ARM, BAR],
    [BAR, BAR],
    [BAR, ARM],
    [-BAR, ARM],
    [-BAR, BAR],
    [-ARM, BAR],
    [-ARM, -BAR],
    [-BAR, -BAR],
];
/// Points at angles of 36 degrees, alternately on circles of radius 1 and 0.48.
const STAR: [Point; 10] = [
    [0.0, -1.0],
    [0.282, -0.388],
    [0.951, -0.309],
    [0.457, 0.148],
    [0.588, 0.809],
    [0.0, 0.48],
    [-0.588, 0.809],
    [-0.457, 0.148],
    [-0.951, -0.309],
    [-0.282, -0.388],
];
const ARROW: [Point; 7] =
    [[0.0, -1.0], [0.8, -0.05], [0.3, -0.05], [0.3, 0.92], [-0.3, 0.92], [-0.3, -0.05], [-0.8, -0.05]];

/// Distance from the origin.
pub(super) fn length([x, y]: Point) -> f32 {
    (x * x + y * y).sqrt()
}

/// Distance to a closed polygon: to its nearest edge, negative where the even-odd rule says inside.
fn polygon(corners: &[Point], [x, y]: Point) -> f32 {
    let (mut nearest, mut inside) = (f32::INFINITY, false);
    let mut from = corners[corners.len() - 1];
    for &to in corners {
        nearest = nearest.min(square_to_segment(from, to, [x, y]));
        if (from[1] > y) != (to[1] > y) && x < (to[0] - from[0]) * (y - from[1]) / (to[1] - from[1]) + from[0] {
            inside = !inside;
        }
        from = to;
    }
    if inside { -nearest.sqrt() } else { nearest.sqrt() }
}

/// Distance of a point to the segment between two others.
pub(super) fn segment(from: Point, to: Point, point: Point) -> f32 {
    square_to_segment(from, to, point).sqrt()
}

fn square_to_segment(from: Point, to: Point, [x, y]: Point) -> f32 {
    let along = [to[0] - from[0], to[1] - from[1]];
    let offset = [x - from[0], y - from[1]];
    let length = along[0] * along[0] + along[1] * along[1];
    let share = if length > 0.0 { (offset[0] * along[0] + offset[1] * along[1]) / length } else { 0.0 };
    let share = share.clamp(0.0, 1.0);
    (offset[0] - share * along[0]).powi(2) + (offset[1] - share * along[1]).powi(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outlines_lie_in_the_unit_circle_and_cover_similar_areas() {
        for outline in Outline::ALL {
            let mut covered = 0;
            for (row, column) in (0..200).flat_map(|row| (0..200).map(move |column| (row, column))) {
                let point = [column as f32 / 80.0 - 1.25, row as f32 / 80.0 - 1.25];
                if outline.distance(point) < 0.0 {
                    covered += 1;
                    assert!(point[0].hypot(point[1]) <= 1.01, "{outline:?} reaches {point:?}");
                }
            }
            let area = covered as f32 / 6400.0;
            assert!((1.0..2.1).contains(&area), "{outline:?} covers {area}");
        }
    }

    #[test]
    fn distances_of_a_square_are_exact() {
        for (point, expected) in [([0.0, 0.0], -0.69), ([1.69, 0.0], 1.0), ([0.69 + 3.0, 0.69 + 4.0], 5.0)] {
            assert!((Outline::Square.distance(point) - expected).abs() < 1e-5);
        }
    }
}
