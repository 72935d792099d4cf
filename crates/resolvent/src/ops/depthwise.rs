//! A filter over tokens, channel by channel: on Flex a loop over contiguous runs, forward and backward, elsewhere Burn's
//! convolution.

use burn::{
    backend::{
        Autodiff, Backend, DType, Dispatch, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops},
        },
        backend_extension,
        flex::{Flex, FlexTensor},
        tensor::FloatTensor,
    },
    tensor::{Tensor, module::conv2d, ops::ConvOptions},
};
use rayon::prelude::*;
use resolvent_kernels::Error;

use super::{
    autodiff::{attach, register},
    plan::is_flex,
    rows::{contiguous, slice, tensor},
};
use crate::Result;

const OP: &str = "depthwise";

/// `x [batch, seq, channels]`, each channel convolved with its own filter, zeros beyond the edges.
///
/// The tokens lie on a grid of `[height, width]` and `weight` is `[channels, side * side]`, or they are a sequence and it is
/// `[channels, side]`; `side` is odd.
///
/// # Errors
/// Shapes that do not fit each other.
pub fn depthwise(x: Tensor<3>, weight: Tensor<2>, grid: Option<[usize; 2]>) -> Result<Tensor<3>> {
    let ([batch, seq, channels], [filters, taps]) = (x.dims(), weight.dims());
    let misfit = |remedy| {
        let (left_shape, right_shape) = (vec![batch, seq, channels], vec![filters, taps]);
        Err(Error::Shape { op: OP, left: "x", left_shape, right: "weight", right_shape, remedy }.into())
    };
    let side = if grid.is_some() { taps.isqrt() } else { taps };
    let rows = if grid.is_some() { side } else { 1 };
    if filters != channels || side % 2 == 0 || side * rows != taps {
        return misfit(
            "weight must be [channels, side] for a sequence, [channels, side * side] on a grid, with odd side",
        );
    }
    let grid = grid.unwrap_or([1, seq]);
    if grid[0].checked_mul(grid[1]) != Some(seq) {
        return misfit("the grid must have as many places as `x` has tokens");
    }
    let window = Window { grid, rows, side };
    if x.dtype() == DType::F32 && is_flex(&x.device()) {
        let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
        return Ok(Tensor::from_dispatch(Dispatch::fused_depthwise(x, weight, window)));
    }
    Ok(composed(x, weight, window))
}

fn composed(x: Tensor<3>, weight: Tensor<2>, Window { grid: [height, width], rows, side }: Window) -> Tensor<3> {
    let [batch, seq, channels] = x.dims();
    let picture = x.swap_dims(1, 2).reshape([batch, channels, height, width]);
    let padding = [rows / 2, side / 2];
    let filtered = conv2d(
        picture,
        weight.reshape([channels, 1, rows, side]),
        None,
        ConvOptions::new([1, 1], padding, [1, 1], channels),
    );
    filtered.reshape([batch, channels, seq]).swap_dims(1, 2)
}

/// How a filter lies on the tokens.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Height and width of the grid.
    grid: [usize; 2],
    /// Height of the filter.
    rows: usize,
    /// Width of the filter.
    side: usize,
}

impl Window {
    /// Calls `visit(tap, to, from, count)` for runs of tokens: the `count` tokens from `to` on read those from `from` on
    /// through `tap`. Row by row, so that what is written stays in the cache.
    fn each_run(&self, mut visit: impl FnMut(usize, usize, usize, usize)) {
        let Self { grid: [height, width], rows, side } = *self;
        for (y, i) in (0..height).flat_map(|y| (0..rows).map(move |i| (y, i))) {
            let Some(from) = (y + i).checked_sub(rows / 2).filter(|&from| from < height) else { continue };
            for j in 0..side {
                let first = (side / 2).saturating_sub(j);
                let end = (width + side / 2).saturating_sub(j).min(width);
                if first < end {
                    let read = from * width + first + j - side / 2;
                    visit(i * side + j, y * width + first, read, end - first);
                }
            }
        }
    }
}

/// The operation as Burn dispatches it.
#[backend_extension(Autodiff, Flex)]
pub trait FusedDepthwise: Backend {
    /// See [`depthwise`].
    fn fused_depthwise(x: FloatTensor<Self>, weight: FloatTensor<Self>, window: Window) -> FloatTensor<Self>;
}

/// A backend that has the gradient too.
pub trait DepthwiseKernel: FusedDepthwise {
    /// The gradients of `x` and `weight`.
    fn fused_depthwise_backward(
        inputs: [FloatTensor<Self>; 2],
        dout: FloatTensor<Self>,
        window: Window,
    ) -> [FloatTensor<Self>; 2];
}

/// `[channels, taps]` as `[taps, channels]`, or back.
fn transposed(x: &[f32], rows: usize) -> Vec<f32> {
    let columns = x.len() / rows;
    (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
}

/// `into += weight * from`, channel by channel.
fn add_weighted(into: &mut [f32], from: &[f32], weight: &[f32]) {
    for (into, from) in into.chunks_exact_mut(weight.len()).zip(from.chunks_exact(weight.len())) {
        into.iter_mut().zip(from).zip(weight).for_each(|((into, from), w)| *into += w * from);
    }
}

impl FusedDepthwise for Flex {
    fn fused_depthwise(x: FlexTensor, weight: FlexTensor, window: Window) -> FlexTensor {
        let (x, weight) = (contiguous(x), contiguous(weight));
        let [_, seq, channels] = x.shape().dims();
        let taps = transposed(slice(&weight), channels);
        let mut out = vec![0.0; x.shape().num_elements()];
        out.par_chunks_exact_mut(seq * channels).zip(slice(&x).par_chunks_exact(seq * channels)).for_each(
            |(out, x)| {
                window.each_run(|tap, to, from, count| {
                    let of = |first: usize| first * channels..(first + count) * channels;
                    add_weighted(&mut out[of(to)], &x[of(from)], &taps[tap * channels..][..channels]);
                });
            },
        );
        tensor(out, x.shape())
    }
}

impl DepthwiseKernel for Flex {
    fn fused_depthwise_backward([x, weight]: [FlexTensor; 2], dout: FlexTensor, window: Window) -> [FlexTensor; 2] {
        let [x, weight, dout] = [x, weight, dout].map(contiguous);
        let [batch, seq, channels] = x.shape().dims();
        let taps = transposed(slice(&weight), channels);
        let (values, gradients) = (slice::<f32>(&x), slice::<f32>(&dout));
        let mut dx = vec![0.0; values.len()];
        // One sum per picture, then in their order: the same bits on any number of threads.
        let mut sums = vec![0.0; batch * taps.len()];
        let (dx_parts, sum_parts) = (dx.par_chunks_exact_mut(seq * channels), sums.par_chunks_exact_mut(taps.len()));
        dx_parts.zip(sum_parts).enumerate().for_each(|(entry, (dx, sums))| {
            let part = entry * seq * channels..(entry + 1) * seq * channels;
            let (x, g) = (&values[part.clone()], &gradients[part]);
            window.each_run(|tap, to, from, count| {
                let of = |first: usize| first * channels..(first + count) * channels;
                let tap = tap * channels..(tap + 1) * channels;
                add_weighted(&mut dx[of(from)], &g[of(to)], &taps[tap.clone()]);
                let sum = &mut sums[tap];
                for (g, x) in g[of(to)].chunks_exact(channels).zip(x[of(from)].chunks_exact(channels)) {
                    sum.iter_mut().zip(g).zip(x).for_each(|((sum, g), x)| *sum += g * x);
                }
            });
        });
        let mut dtaps = vec![0.0; taps.len()];
        for sum in sums.chunks_exact(taps.len()) {
            dtaps.iter_mut().zip(sum).for_each(|(total, sum)| *total += sum);
        }
        let dweight = transposed(&dtaps, taps.len() / channels);
        [tensor(dx, x.shape()), tensor(dweight, weight.shape())]
    }
}

/// Saves both inputs.
#[derive(Debug)]
struct DepthwiseBackward;

impl<B: DepthwiseKernel> Backward<B, 2> for DepthwiseBackward {
    type State = ([NodeId; 2], Window);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let (inputs, window) = ops.state;
        let inputs = inputs.map(|id| checkpointer.retrieve_node_output(id));
        let gradients = B::fused_depthwise_backward(inputs, dout, window).map(Some);
        register::<B, 2>(grads, ops.parents.map(|node| node.map(|node| node.id)), gradients);
    }
}

impl<B: DepthwiseKernel, C: CheckpointStrategy> FusedDepthwise for Autodiff<B, C> {
    fn fused_depthwise(x: FloatTensor<Self>, weight: FloatTensor<Self>, window: Window) -> FloatTensor<Self> {
        let out = B::fused_depthwise(x.primitive().clone(), weight.primitive().clone(), window);
        attach::<B, C, _, 2, 2>(DepthwiseBackward, [&x, &weight], [&x, &weight], out, |inputs| (inputs, window))
    }
}
