//! The backward pass over the keys, and from the variances' gradients to that of the inverse.

use super::{
    Core, Loaded, SavedSlice, Side, Sizes,
    backward::{CONVERGED, distances, kept_of, of_keys, of_slice},
    forward::whiten,
    method, tile_sizes,
};
use crate::{
    linalg::{Method, Order},
    mechanism::{Centering, Inverse, InverseGradient, Laplacian},
    parallel::Parts,
    score::{Manhattan, Pairs, gradients},
    scratch::{cut, parts, room},
    simd::{
        Level,
        product::{Add, Left, Right, Size, Store, multiply, multiply_add},
    },
    structure::{
        dense::{Rows, dot},
        nystrom::{
            pass::{Part, Pass, TOKENS, splits},
            tile::{Zip, scatter, zip},
        },
    },
};

/// Gradients of keys and values; `Ck^T diag(gamma) Ck`, `gamma` the gradient of the columns' variances.
pub(super) struct Keys<'a> {
    pub core: Core<'a>,
    pub transposed: &'a [f32],
    pub stats: &'a [f32],
    pub slice_parts: &'a [f32],
    pub dk: Parts<'a, f32>,
    pub dv: Parts<'a, f32>,
    pub partial: Parts<'a, f32>,
}

pub(super) fn keys_memory(sizes: &Sizes) -> usize {
    room(keys_sizes(sizes)) + room(tile_sizes(sizes))
}

fn keys_sizes(sizes: &Sizes) -> [usize; 6] {
    // dC; C X; C X S; rows of values; rows of keys; gamma
    let tile = TOKENS * sizes.mp;
    [tile, tile, tile, TOKENS * sizes.dvp, TOKENS * sizes.dp, TOKENS]
}

impl Pass for Keys<'_> {
    fn memory(&self) -> usize {
        keys_memory(&self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (seq, d, dv, dvp) = (sizes.shape.seq_kv, sizes.shape.head_dim, sizes.shape.value_dim, sizes.dvp);
        let len = room(of_keys(sizes));
        // SAFETY: parts are distinct ranges of rows.
        let dk_out = unsafe { self.dk.part(part.rows(seq, d)) };
        // SAFETY: as above.
        let dv_out = unsafe { self.dv.part(part.rows(seq, dv)) };
        // SAFETY: parts are distinct.
        let partial = unsafe { self.partial.part(part.index * len..(part.index + 1) * len) };
        partial.fill(0.0);
        let ([dmarks, contraction, gamma_sum], _) = cut(partial, of_keys(sizes));
        let saved = SavedSlice::of(sizes, self.stats, slice);
        let [g_sum, db, db_across, ..] = kept_of(sizes, self.slice_parts, slice);
        let ([dc, a, b, rows, dx, gamma], memory) = cut(memory, keys_sizes(sizes));
        let bias = if core.m.bias_one_over_n { 1.0 / core.kept(Side::Key, slice).max(1) as f32 } else { 0.0 };
        let scale = core.weight_scale(slice);
        for range in part.tiles() {
            let mut loaded =
                core.load(level, (Side::Key, slice), range.clone(), self.transposed, Some(core.call.v), memory);
            let (count, stride) = (loaded.count, loaded.stride);
            // dVt = (Ck - mean) dB, then dV and gamma.
            if core.centres(Centering::PerQuery) {
                zip(level, loaded.c, &saved.key_mean[..stride], Zip::Subtract);
            }
            loaded.tile().spread(level, db, dvp, rows);
            if core.centres(Centering::PerQuery) {
                zip(level, loaded.c, &saved.key_mean[..stride], Zip::Add);
            }
            for (n, &j) in loaded.kept.iter().enumerate() {
                let (factor, row) = (saved.factors[j as usize], &mut rows[n * dvp..][..dvp]);
                let v = &loaded.rows.data[n * dvp..][..dvp];
                gamma[n] = (-0.5 * f64::from(factor).powi(3) / (scale * scale) * dot(row, v)) as f32;
                row.iter_mut().zip(g_sum).for_each(|(x, g)| *x = factor * *x + bias * g);
            }
            scatter(rows, dvp, loaded.kept, range.start, &mut dv_out[part.within(&range, dv)], dv);
            // dC = (Vt - mean) dB^T + 2 gamma C X S X
            for (n, &j) in loaded.kept.iter().enumerate() {
                let factor = saved.factors[j as usize];
                let (row, v) = (&mut rows[n * dvp..][..dvp], &loaded.rows.data[n * dvp..][..dvp]);
                row.iter_mut().zip(v).zip(saved.value_mean).for_each(|((x, v), mean)| *x = factor * v - mean);
            }
            let whitened = Left { data: &*rows, row_stride: dvp, depth_stride: 1 };
            let size = Size { rows: count, cols: stride, depth: dv };
            let right = Right { data: db_across, stride: sizes.mp };
            multiply(level, size, whitened, right, Store { data: &mut *dc, stride });
            if core.whitens() {
                add_variances(core, level, &mut loaded, &saved, gamma, [&mut *a, &mut *b], dc, gamma_sum);
            }
            let marks = (&saved.u[..loaded.marks * sizes.dp], &mut *dmarks);
            contraction[0] += distances(core, level, &loaded, dc, marks, dx);
            let slope = (-1.0 / core.lambda(slice)) as f32;
            dx[..count * sizes.dp].iter_mut().for_each(|x| *x *= slope);
            scatter(dx, sizes.dp, loaded.kept, range.start, &mut dk_out[part.within(&range, d)], d);
        }
    }
}

/// The share of the columns' variances: adds `2 gamma C X S X` to `dc`, and `C^T diag(gamma) C` to `gamma_sum`. `a` and `b` are
/// working memory of a tile each.
#[allow(clippy::too_many_arguments)] // the matrices of one formula
fn add_variances(
    core: &Core<'_>,
    level: Level,
    loaded: &mut Loaded<'_>,
    saved: &SavedSlice<'_>,
    gamma: &[f32],
    [a, b]: [&mut [f32]; 2],
    dc: &mut [f32],
    gamma_sum: &mut [f32],
) {
    let (count, stride, mp) = (loaded.count, loaded.stride, core.sizes.mp);
    whiten(core, level, loaded, saved.x, saved.s, a, b);
    let both = gamma.iter().zip(b.chunks_exact_mut(stride)).take(count);
    both.for_each(|(gamma, b)| b.iter_mut().for_each(|x| *x *= 2.0 * gamma));
    let left = Left { data: &*b, row_stride: stride, depth_stride: 1 };
    let size = Size { rows: count, cols: stride, depth: loaded.marks };
    multiply_add(level, size, left, Right { data: saved.x, stride: mp }, Add { data: &mut *dc, stride });
    let both = gamma.iter().zip(a.chunks_exact_mut(stride).zip(loaded.c.chunks_exact(stride)));
    both.for_each(|(gamma, (a, c))| a.iter_mut().zip(c).for_each(|(a, c)| *a = gamma * c));
    gather_square(level, loaded, Rows { data: &a[..count * stride], stride }, gamma_sum, mp);
}

/// Adds `C^T x` to the square `sums`, whose rows are `stride` apart.
fn gather_square(level: Level, loaded: &mut Loaded<'_>, x: Rows<'_>, sums: &mut [f32], stride: usize) {
    let left = Left { data: &*loaded.c, row_stride: 1, depth_stride: loaded.stride };
    let size = Size { rows: loaded.marks, cols: x.stride, depth: loaded.count };
    multiply_add(level, size, left, x.as_right(0..loaded.count), Add { data: sums, stride });
}

/// From `Gamma` to the gradient of the inverse, and of the landmarks among each other.
pub(super) struct CloseKeys<'a> {
    pub core: Core<'a>,
    pub transposed: &'a [f32],
    pub stats: &'a [f32],
    pub partial: &'a [f32],
    pub slice_parts: Parts<'a, f32>,
}

fn close_keys_sizes(sizes: &Sizes) -> [usize; 7] {
    // Gamma; two products; the kernel among landmarks; E; its gradients; unused sums
    let square = sizes.marks * sizes.mp;
    [square, square, square, square, square, sizes.marks * sizes.dp, sizes.marks * sizes.dp]
}

pub(super) fn close_keys_memory(m: &Laplacian, sizes: &Sizes) -> usize {
    let order = Order { n: sizes.marks, stride: sizes.mp };
    let inverse = method(m, InverseGradient::Unrolled).gradient_work(order);
    room(close_keys_sizes(sizes)) + inverse
}

impl Pass for CloseKeys<'_> {
    fn memory(&self) -> usize {
        close_keys_memory(self.core.m, &self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let len = room(of_slice(sizes));
        // SAFETY: slices are distinct.
        let kept = unsafe { self.slice_parts.part(slice * len..(slice + 1) * len) };
        let ([_, _, _, _, dx, gxx, du, dlambda], _) = cut(kept, of_slice(sizes));
        let ([gamma, first, second, w, e, among_marks, unused], work) = cut(memory, close_keys_sizes(sizes));
        let (len, splits) = (room(of_keys(sizes)), splits(sizes.shape.slices(), sizes.shape.seq_kv));
        gamma.fill(0.0);
        for sums in self.partial[slice * splits * len..][..splits * len].chunks_exact(len) {
            let [marks, contraction, part] = parts(sums, of_keys(sizes));
            gamma.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            du.iter_mut().zip(marks).for_each(|(du, x)| *du -= x);
            dlambda[0] += contraction[0];
        }
        let saved = SavedSlice::of(sizes, self.stats, slice);
        let order = core.order(slice);
        let u = &saved.u[..order.n * sizes.dp];
        if core.whitens() {
            // 2 S X Gamma, and (2 / n) X Gamma X.
            order.times(level, saved.x, gamma, first);
            order.times(level, saved.s, first, second);
            dx.iter_mut().zip(&*second).take(order.len()).for_each(|(dx, x)| *dx += 2.0 * x);
            order.times(level, first, saved.x, gxx);
            let share = 2.0 / core.kept(Side::Query, slice).max(1) as f32;
            gxx.iter_mut().for_each(|x| *x *= share);
        }
        let transposed = core.transposed(self.transposed, slice);
        core.marks(transposed, slice).among(level, u, w);
        let norm = core.merge(order, saved.column_factors, w);
        let method = gradient_method(core, level, order, w, saved.x, first, second);
        (Method { start: norm.map(f64::recip), ..method }).gradient(level, order, w, saved.x, dx, work);
        e.fill(0.0);
        for i in 0..order.n {
            for j in 0..order.n {
                let (at, across) = (i * sizes.mp + j, j * sizes.mp + i);
                e[at] = (dx[at] + dx[across]) * w[at];
            }
        }
        let pairs = Pairs { tokens: u, marks: u, dim: sizes.dp, e: &e[..order.len()], stride: sizes.mp };
        unused.fill(0.0);
        let among_marks = &mut among_marks[..u.len()];
        gradients(level, Manhattan, pairs, among_marks, unused);
        du.iter_mut().zip(&*among_marks).for_each(|(du, x)| *du += x);
    }
}

/// The gradient of the inverse: of the exact one, unless Newton-Schulz stopped short of it.
fn gradient_method(
    core: &Core<'_>,
    level: Level,
    order: Order,
    w: &[f32],
    x: &[f32],
    matrix: &mut [f32],
    product: &mut [f32],
) -> Method {
    let exact = method(core.m, InverseGradient::Implicit);
    if core.m.inverse != Inverse::NewtonSchulz {
        return exact;
    }
    order.add_ridge(w, core.m.ridge, matrix);
    order.times(level, matrix, x, product);
    let entry = |i: usize, j: usize| f32::from(u8::from(i == j)) - product[i * order.stride + j];
    let residual = |i: usize| (0..order.n).map(|j| entry(i, j).abs()).sum::<f32>();
    let converged = (0..order.n).all(|i| residual(i) < CONVERGED);
    if converged { exact } else { method(core.m, InverseGradient::Unrolled) }
}
