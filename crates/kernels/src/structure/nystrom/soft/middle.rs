//! From the gradient of `W` to those of `Z`, of the degrees and of the landmarks among each other.

use super::{Core, SavedSlice, Sizes, backward::of_slice, forward::total};
use crate::{
    linalg::{Order, wide},
    mechanism::{Degree, Soft},
    parallel::Parts,
    score::{Pairs, Squared, gradients},
    scratch::{cut, room},
    simd::{
        Level,
        product::{Left, Right, Size, Store, multiply},
    },
    structure::{
        dense::{dot, padded},
        nystrom::{
            pass::{Part, Pass},
            tile::transpose,
        },
    },
};

/// From `dW` to `dZ`, and the gradients of the landmarks among each other.
pub(super) struct Middle<'a> {
    pub core: Core<'a>,
    pub transposed: &'a [f32],
    pub stats: &'a [f32],
    pub partial: &'a [f32],
    pub slice_parts: Parts<'a, f32>,
}

fn middle_sizes(sizes: &Sizes) -> [usize; 8] {
    let (values, square, channels) = (sizes.marks * sizes.dvp, sizes.marks * sizes.mp, sizes.marks * sizes.dp);
    // dW, rows scaled by c, dA then E, A, E made symmetric, unused sums, degrees, unused degrees
    [values, values, square, square, square, channels, sizes.mp, sizes.mp]
}

pub(super) fn middle_memory(m: &Soft, sizes: &Sizes) -> usize {
    let order = Order { n: sizes.marks, stride: sizes.mp };
    let method = super::method(m, "");
    // The formula of an inverse takes no room of its own.
    let gradient =
        if method.is_implicit() { 0 } else { sizes.shape.value_dim * sizes.mp + method.gradient_work(order) };
    room(middle_sizes(sizes)) + gradient.max(wide::product_work(sizes.marks, sizes.dvp))
}

impl Pass for Middle<'_> {
    fn memory(&self) -> usize {
        middle_memory(self.core.m, &self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, slice) = (&self.core, part.slice);
        let sizes = &core.sizes;
        let (order, len) = (core.order(slice), room(of_slice(sizes)));
        let saved = SavedSlice::of(sizes, self.stats, slice);
        // SAFETY: slices are distinct.
        let kept = unsafe { self.slice_parts.part(slice * len..(slice + 1) * len) };
        kept.fill(0.0);
        let ([dz, dz_across, w_across, ddegrees, centre, du, ..], _) = cut(kept, of_slice(sizes));
        let ([dw, scaled, da, a, e, unused, ..], work) = cut(memory, middle_sizes(sizes));
        let values = order.n * sizes.dvp;
        total(core, slice, self.partial, dw, &mut e[..sizes.mp]);
        wide::scaled_product(order, saved.y, saved.c, dw, sizes.dvp, dz, work);
        transpose(&dz[..values], sizes.dvp, sizes.shape.value_dim, dz_across, sizes.mp);
        transpose(&saved.w[..values], sizes.dvp, sizes.shape.value_dim, w_across, sizes.mp);
        let u = &saved.u[..order.n * sizes.dp];
        for row in u.chunks_exact(sizes.dp) {
            centre.iter_mut().zip(row).for_each(|(mean, x)| *mean += x / order.n as f32);
        }

        core.marks(core.transposed(self.transposed, slice), slice).among(level, u, a);
        inverse_gradient(core, level, order, &saved, [dw, dz, w_across], a, da, [scaled, &mut *e], work);
        if core.m.degree.is_some() {
            degree_gradient(core, order, &saved, [dw, dz], ddegrees);
        }
        let by_landmark = core.m.degree == Some(Degree::Landmark);
        for (i, row) in da.chunks_exact_mut(sizes.mp).enumerate().take(order.n) {
            let degree = if by_landmark { ddegrees[i] } else { 0.0 };
            row.iter_mut().zip(&a[i * sizes.mp..]).take(order.n).for_each(|(da, a)| *da = (*da + degree) * a);
        }
        e.fill(0.0);
        for i in 0..order.n {
            for j in 0..order.n {
                e[i * sizes.mp + j] = da[i * sizes.mp + j] + da[j * sizes.mp + i];
            }
        }
        let pairs = Pairs { tokens: u, marks: u, dim: sizes.dp, e: &e[..order.len()], stride: sizes.mp };
        gradients(level, Squared, pairs, &mut du[..u.len()], unused);
        if !core.takes_token_degrees() {
            ddegrees.fill(0.0);
        }
    }
}

/// Writes `da` of the inverse alone: by the formula of an inverse `-(dZ / c) (W / c)^T`, else by way of
/// `dY = (c dW) (c Z)^T`.
#[allow(clippy::too_many_arguments)] // the matrices of one formula
fn inverse_gradient(
    core: &Core<'_>,
    level: Level,
    order: Order,
    saved: &SavedSlice<'_>,
    [dw, dz, w_across]: [&[f32]; 3],
    a: &[f32],
    da: &mut [f32],
    [scaled, room]: [&mut [f32]; 2],
    work: &mut [f32],
) {
    let (sizes, dv) = (&core.sizes, core.sizes.shape.value_dim);
    let (method, width) = (core.method(), core.sizes.dvp);
    let size = Size { rows: order.n, cols: padded(order.n), depth: dv };
    let left = |data| Left { data, row_stride: width, depth_stride: 1 };
    let c = |i: usize| saved.c[i];
    if method.is_implicit() {
        multiply(
            level,
            size,
            left(dz),
            Right { data: w_across, stride: sizes.mp },
            Store { data: da, stride: sizes.mp },
        );
        for i in 0..order.n {
            (0..order.n).for_each(|j| da[i * sizes.mp + j] /= -(c(i) * c(j)));
        }
        return;
    }
    let (across, rest) = work.split_at_mut(dv * sizes.mp);
    scale_rows(saved.c, saved.z, width, scaled);
    transpose(&scaled[..order.n * width], width, dv, across, sizes.mp);
    scale_rows(saved.c, dw, width, scaled);
    room.fill(0.0);
    multiply(
        level,
        size,
        left(scaled),
        Right { data: across, stride: sizes.mp },
        Store { data: room, stride: sizes.mp },
    );
    method.gradient(level, order, a, saved.y[0], room, rest);
    da.copy_from_slice(room);
}

/// `out_i = c_i x_i` for rows of `width`.
fn scale_rows(c: &[f32], x: &[f32], width: usize, out: &mut [f32]) {
    for ((x, out), c) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)).zip(c) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = c * x);
    }
}

/// `dd_i = -1/2 c_i^2 (<dW_i, W_i> + <Z_i, dZ_i>)`.
fn degree_gradient(core: &Core<'_>, order: Order, saved: &SavedSlice<'_>, [dw, dz]: [&[f32]; 2], out: &mut [f32]) {
    let width = core.sizes.dvp;
    for (i, out) in out.iter_mut().enumerate().take(order.n) {
        let row = |x: &[f32]| i * width..i * width + x.len().min(width);
        let inner = |x: &[f32], y: &[f32]| dot(&x[row(x)], &y[row(y)]);
        let c = f64::from(saved.c[i]);
        *out = (-0.5 * c * c * (inner(dw, saved.w) + inner(saved.z, dz))) as f32;
    }
}
