//! Rotary positions: queries and keys are turned by their place, so that what they have in common depends on where they are.

use burn::tensor::{Tensor, TensorData};

/// Base of the frequencies.
const BASE: f64 = 10_000.0;

/// `x [batch, seq, heads * head_dim]`, whose tokens have these `places` in their sequences, with the channel pairs
/// `(2 p, 2 p + 1)` of every head turned.
///
/// In a sequence pair `p` turns by `position * 10000^(-2 p / head_dim)`. On a grid of `[height, width]` the first half of the
/// pairs turns by the row and the second by the column, each with the frequencies `10000^(-4 p / head_dim)`; `head_dim` is a
/// multiple of 4.
pub(super) fn rotate(x: Tensor<3>, head_dim: usize, places: &[usize], grid: Option<[usize; 2]>) -> Tensor<3> {
    let [batch, seq, width] = x.dims();
    let device = x.device();
    let angles = angles(places, head_dim, grid);
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f32> = angles.iter().map(|&angle| f(angle) as f32).collect();
        Tensor::<4>::from_data(TensorData::new(values, [1, seq, 1, head_dim]), &device)
    };
    let quarter = Tensor::<2>::from_data(TensorData::new(quarter_turn(head_dim), [head_dim, head_dim]), &device);
    let heads = [batch, seq, width / head_dim, head_dim];
    let turned = x.clone().reshape([batch * seq * heads[2], head_dim]).matmul(quarter).reshape(heads);
    (x.reshape(heads) * table(f64::cos) + turned * table(f64::sin)).reshape([batch, seq, width])
}

/// The angle of every token's channels, `[seq, head_dim]`.
fn angles(places: &[usize], head_dim: usize, grid: Option<[usize; 2]>) -> Vec<f64> {
    let along = if grid.is_some() { head_dim / 4 } else { head_dim / 2 };
    let angle = |position: usize, p: usize| position as f64 * BASE.powf(-(p as f64) / along as f64);
    let channel = |token: usize, channel: usize| match grid {
        None => angle(token, channel / 2),
        Some([_, width]) if channel / 2 < along => angle(token / width, channel / 2),
        Some([_, width]) => angle(token % width, channel / 2 - along),
    };
    (0..places.len() * head_dim).map(|i| channel(places[i / head_dim], i % head_dim)).collect()
}

/// The matrix that turns every pair by a right angle, `(a, b)` to `(-b, a)`, as it multiplies rows.
fn quarter_turn(head_dim: usize) -> Vec<f32> {
    let mut matrix = vec![0.0; head_dim * head_dim];
    for even in (0..head_dim).step_by(2) {
        matrix[even * head_dim + even + 1] = 1.0;
        matrix[(even + 1) * head_dim + even] = -1.0;
    }
    matrix
}
