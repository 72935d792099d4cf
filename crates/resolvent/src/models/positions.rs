//! Learned positions at other sizes than they were learned at.

use burn::tensor::{
    Tensor,
    module::interpolate,
    ops::{InterpolateMode, InterpolateOptions},
};

/// `positions [1, tokens, dim]` learned on the grid `learned`, for the grid `grid`: interpolated as a picture, corners not
/// aligned; those of tokens before the grid's, such as a class token, stay.
pub(super) fn positions_at(
    positions: Tensor<3>,
    learned: [usize; 2],
    grid: [usize; 2],
    mode: InterpolateMode,
) -> Tensor<3> {
    if grid == learned {
        return positions;
    }
    let [_, tokens, dim] = positions.dims();
    let places = learned[0] * learned[1];
    let first = tokens - places;
    let picture = positions.clone().narrow(1, first, places).reshape([1, learned[0], learned[1], dim]);
    let options = InterpolateOptions::new(mode).with_align_corners(false);
    let picture = interpolate(picture.permute([0, 3, 1, 2]), options.with_output_size(grid));
    let picture = picture.permute([0, 2, 3, 1]).reshape([1, grid[0] * grid[1], dim]);
    if first == 0 { picture } else { Tensor::cat(vec![positions.narrow(1, 0, first), picture], 1) }
}
