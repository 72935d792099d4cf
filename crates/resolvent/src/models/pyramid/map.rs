//! Tokens on a grid.

use burn::tensor::Tensor;

/// Tokens on a grid.
pub(super) struct Map {
    /// `[batch, height * width, channels]`, row by row.
    pub tokens: Tensor<3>,
    /// Height and width.
    pub grid: [usize; 2],
}

impl Map {
    /// Of `picture [batch, channels, height, width]`.
    pub(super) fn from_picture(picture: Tensor<4>) -> Self {
        let [batch, channels, height, width] = picture.dims();
        let tokens = picture.reshape([batch, channels, height * width]).swap_dims(1, 2);
        Self { tokens, grid: [height, width] }
    }

    /// `[batch, channels, height, width]`.
    pub(super) fn picture(self) -> Tensor<4> {
        let [batch, _, channels] = self.tokens.dims();
        let [height, width] = self.grid;
        self.tokens.swap_dims(1, 2).reshape([batch, channels, height, width])
    }
}
