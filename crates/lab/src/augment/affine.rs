//! Turning, shearing and shifting.

use super::Picture;

/// Moves pixels: the new picture at `p` shows the old one at `matrix * p + offset`, points measured in pixels from the
/// picture's centre, read bilinearly. What comes from outside has the channel's `fill`.
pub(super) fn warp(picture: &mut Picture, matrix: [[f32; 2]; 2], offset: [f32; 2], fill: &[f32]) {
    let (height, width) = (picture.shape.height, picture.shape.width);
    let middle = [(width as f32 - 1.0) / 2.0, (height as f32 - 1.0) / 2.0];
    let mut moved = Vec::with_capacity(picture.values.len());
    for (plane, &fill) in picture.values.chunks_exact(height * width).zip(fill) {
        let at = |row: isize, column: isize| {
            let inside = (0..height as isize).contains(&row) && (0..width as isize).contains(&column);
            if inside { plane[row as usize * width + column as usize] } else { fill }
        };
        for (row, column) in (0..height).flat_map(|row| (0..width).map(move |column| (row, column))) {
            let [x, y] = [column as f32 - middle[0], row as f32 - middle[1]];
            let from_x = matrix[0][0] * x + matrix[0][1] * y + offset[0] + middle[0];
            let from_y = matrix[1][0] * x + matrix[1][1] * y + offset[1] + middle[1];
            let (left, top) = (floor(from_x), floor(from_y));
            let (across, down) = (from_x - left as f32, from_y - top as f32);
            let upper = at(top, left) + across * (at(top, left + 1) - at(top, left));
            let lower = at(top + 1, left) + across * (at(top + 1, left + 1) - at(top + 1, left));
            moved.push(upper + down * (lower - upper));
        }
    }
    picture.values = moved;
}

/// The whole number at or below `value`; `f32::floor` is a function call on the oldest x86-64 that we build for.
fn floor(value: f32) -> isize {
    let towards_zero = value as isize;
    towards_zero - isize::from(value < towards_zero as f32)
}

/// Shifts by whole pixels: the new picture at (row, column) shows the old one at (row + down, column + right).
pub(super) fn shift(picture: &mut Picture, down: isize, right: isize, fill: &[f32]) {
    let (height, width) = (picture.shape.height, picture.shape.width);
    let mut moved = Vec::with_capacity(picture.values.len());
    for (plane, &fill) in picture.values.chunks_exact(height * width).zip(fill) {
        for row in 0..height {
            let source = row.checked_add_signed(down).filter(|&row| row < height);
            moved.extend((0..width).map(|column| {
                let column = column.checked_add_signed(right).filter(|&column| column < width);
                source.zip(column).map_or(fill, |(row, column)| plane[row * width + column])
            }));
        }
    }
    picture.values = moved;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::PictureShape;

    fn numbered() -> Picture {
        let shape = PictureShape { channels: 1, height: 3, width: 3 };
        Picture { shape, values: (1..10).map(|value| value as f32 / 10.0).collect() }
    }

    #[test]
    fn a_quarter_turn_moves_every_pixel() {
        let mut picture = numbered();
        warp(&mut picture, [[0.0, 1.0], [-1.0, 0.0]], [0.0, 0.0], &[0.0]);
        assert_eq!(picture.values, [0.7, 0.4, 0.1, 0.8, 0.5, 0.2, 0.9, 0.6, 0.3]);
    }

    #[test]
    fn warping_by_whole_pixels_is_shifting() {
        for (down, right) in [(0, 0), (1, 0), (0, -1), (-2, 2), (5, 5), (-9, 0)] {
            let (mut warped, mut shifted) = (numbered(), numbered());
            warp(&mut warped, [[1.0, 0.0], [0.0, 1.0]], [right as f32, down as f32], &[0.25]);
            shift(&mut shifted, down, right, &[0.25]);
            assert_eq!(warped, shifted);
        }
        let mut picture = numbered();
        shift(&mut picture, 1, -1, &[0.25]);
        assert_eq!(picture.values, [0.25, 0.4, 0.5, 0.25, 0.7, 0.8, 0.25, 0.25, 0.25]);
    }
}
