//! The gradients of the whitened Laplacian kernel of every pair: a sweep for the values and the columns' variances, and one
//! for the similarities: `dG_ij = h_i.v_j w_j - rho_i + kappa_j (G_ij - mean_j)` for the keys that a query sees.

use std::ops::Range;

use super::{
    compact::{BLOCK, Compact, blocks, sizes},
    laplacian::{Kernel, Terms, all_limits, kept, stats_sizes},
    soft::spread,
};
use crate::{
    Gradients, Parameter, Result, Shape,
    call::{Call, Saved},
    mechanism::{Centering, LaplacianExact, Whitening},
    parallel::Parts,
    score::{Manhattan, Pairs, gradients},
    scratch::{cut, parts, room},
    simd::{
        Level,
        product::{Add, Left, Size, Store, multiply, multiply_add},
    },
    structure::{
        dense::{Rows, about, dot, padded},
        nystrom::{
            pass::{self, Part, Pass, TOKENS, splits},
            tile::{Zip, zip},
        },
    },
};

/// Rows and blocks of queries, keys, values and output gradients; `h`; gradients of queries, keys, values by kept row; how
/// many keys each query sees; `rho`; `kappa`; room for `dk` when tied; all parts' sums.
fn buffers(m: &LaplacianExact, s: &Shape) -> [usize; 16] {
    let slices = s.slices();
    let [q, q_blocks] = sizes(slices, s.seq_q, s.head_dim);
    let [k, k_blocks] = sizes(slices, s.seq_kv, s.head_dim);
    let [v, v_blocks] = sizes(slices, s.seq_kv, s.value_dim);
    let [g, g_blocks] = sizes(slices, s.seq_q, s.value_dim);
    let (queries, keys) = (slices * s.seq_q, slices * s.seq_kv);
    let partial = slices * splits(slices, s.seq_q) * room(partial(s));
    let tied = if m.tied { s.k_len() } else { 0 };
    [q, q_blocks, k, k_blocks, v, v_blocks, g, g_blocks, g, q, k, v, 2 * queries, keys, tied, partial]
}

/// A part's sums by key: gradients of the values, and then of the keys; `<q, dq>`.
fn partial(s: &Shape) -> [usize; 2] {
    [s.seq_kv * padded(s.head_dim).max(padded(s.value_dim)), 1]
}

/// f32 of working memory of [`laplacian_exact_backward`].
pub(super) fn work(m: &LaplacianExact, s: &Shape) -> usize {
    room(buffers(m, s)) + pass::work(s.slices(), s.seq_q, room(tile_sizes(s)))
}

fn tile_sizes(s: &Shape) -> [usize; 3] {
    [TOKENS * BLOCK, TOKENS * BLOCK, TOKENS * padded(s.head_dim)]
}

/// Writes the gradients.
pub(crate) fn laplacian_exact_backward(
    call: &Call<'_>,
    m: &LaplacianExact,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let (s, level, slices) = (&call.shape, call.level, call.shape.slices());
    let [queries, keys] = kept(call);
    let ([q, q_blocks, k, k_blocks, v, v_blocks, g, rest @ ..], work) = cut(work, buffers(m, s));
    let [g_blocks, h, dq, dk, dv, of_queries, kappa, tied, partial_room] = rest;
    let q = Compact::of(call.q, s.head_dim, queries, |_, x| x, [q, q_blocks]);
    let k = Compact::of(call.k, s.head_dim, keys, |_, x| x, [k, k_blocks]);
    let v = Compact::of(call.v, s.value_dim, keys, |_, x| x, [v, v_blocks]);
    let g = Compact::of(saved.dout, s.value_dim, queries, |_, x| x, [g, g_blocks]);
    let kernel = Kernel { call, m, queries, keys, q, k };
    let (limits, rho) = of_queries.split_at_mut(slices * s.seq_q);
    let limits = all_limits(&kernel, limits);
    let [mean, inverse, row_mean] = parts(saved.stats, stats_sizes(s));
    let terms = Terms { mean, inverse, row_mean };

    let values = Values { kernel, terms, limits, g, partial: Parts::new(&mut *partial_room) };
    pass::run(&values, level, slices, s.seq_q, work);
    total(s, partial_room, v.stride(), dv);
    row_terms(&kernel, &terms, limits, g, v, h, rho);
    variances(&kernel, &terms, limits, g, v, dv, kappa);

    let sweep = Similarities {
        kernel,
        terms,
        limits,
        h,
        v,
        rho,
        kappa,
        dq: Parts::new(&mut *dq),
        partial: Parts::new(&mut *partial_room),
    };
    pass::run(&sweep, level, slices, s.seq_q, work);
    total(s, partial_room, k.stride(), dk);
    let Gradients { dq: dq_out, dk: dk_out, dv: dv_out, mut extras } = gradients;
    if let Some(dlambda) = extras.get(Parameter::Lambda) {
        dlambda.fill(0.0);
        for slice in 0..slices {
            let range = slice * s.seq_kv * k.stride()..(slice + 1) * s.seq_kv * k.stride();
            let of_keys = about(kernel.some_keys(slice), &k.rows[range.clone()], &dk[range]);
            let of_queries: f64 =
                of_parts(s, partial_room, slice).map(|[_, contraction]| f64::from(contraction[0])).sum();
            // The distance is homogeneous of degree one in queries and keys, wherever these are measured from.
            dlambda[slice % s.heads] -= ((of_queries + of_keys) / kernel.lambda(slice)) as f32;
        }
    }
    spread(dq, q.stride(), queries, s.head_dim, dq_out);
    spread(dv, v.stride(), keys, s.value_dim, dv_out);
    let dk_out = dk_out.unwrap_or(&mut *tied);
    spread(dk, k.stride(), keys, s.head_dim, dk_out);
    if m.tied {
        dq_out.iter_mut().zip(&*dk_out).for_each(|(dq, dk)| *dq += dk);
    }
    Ok(())
}

/// A slice's parts' sums, in their order.
fn of_parts<'p>(s: &Shape, partial_room: &'p [f32], slice: usize) -> impl Iterator<Item = [&'p [f32]; 2]> {
    let (splits, sizes) = (splits(s.slices(), s.seq_q), partial(s));
    let len = room(sizes);
    let all = partial_room[slice * splits * len..][..splits * len].chunks_exact(len);
    all.map(move |part| parts(part, sizes))
}

/// Adds up the parts' sums by key.
fn total(s: &Shape, partial_room: &[f32], stride: usize, out: &mut [f32]) {
    for (slice, out) in out.chunks_exact_mut(s.seq_kv * stride).enumerate() {
        out.fill(0.0);
        for [sums, _] in of_parts(s, partial_room, slice) {
            out.iter_mut().zip(sums).for_each(|(out, x)| *out += x);
        }
    }
}

/// Writes `h_i = alpha_i g_i`, less the mean over the queries where columns are centred; and, where rows are,
/// `rho_i = alpha_i g_i . (mean of w_j v_j over the keys that query i sees)`.
fn row_terms(
    kernel: &Kernel<'_>,
    terms: &Terms<'_>,
    limits: &[u32],
    g: Compact<'_>,
    v: Compact<'_>,
    h: &mut [f32],
    rho: &mut [f32],
) {
    let (s, width) = (&kernel.call.shape, g.stride());
    h.fill(0.0);
    rho.fill(0.0);
    for slice in 0..s.slices() {
        let count = kernel.queries.count(slice);
        let at = slice * s.seq_q;
        let (h, rho) = (&mut h[at * width..][..count * width], &mut rho[at..][..count]);
        let g = g.part(slice, 0..count);
        for ((h, g), &n) in h.chunks_exact_mut(width).zip(g.data.chunks_exact(width)).zip(&limits[at..]) {
            let alpha = kernel.row_terms(n).0;
            h.iter_mut().zip(g).for_each(|(h, g)| *h = alpha * g);
        }
        match kernel.m.centering {
            Centering::PerKey => {
                for c in 0..width {
                    let mean =
                        h.iter().skip(c).step_by(width).map(|&x| f64::from(x)).sum::<f64>() / count.max(1) as f64;
                    h.iter_mut().skip(c).step_by(width).for_each(|x| *x -= mean as f32);
                }
            }
            Centering::PerQuery => running_means(terms, slice, s.seq_kv, &limits[at..at + count], v, h, rho),
            Centering::None => {}
        }
    }
}

/// `rho_i = h_i . (1/n_i) sum over j < n_i of w_j v_j`; limits only grow.
fn running_means(
    terms: &Terms<'_>,
    slice: usize,
    seq: usize,
    limits: &[u32],
    v: Compact<'_>,
    h: &[f32],
    rho: &mut [f32],
) {
    let width = v.stride();
    let inverse = &terms.inverse[slice * seq..][..seq];
    let rows = v.part(slice, 0..seq).data;
    // One channel at a time, so that the running sum needs no room.
    for c in 0..v.dim {
        let (mut sum, mut next) = (0.0, 0);
        for ((rho, &limit), h) in rho.iter_mut().zip(limits).zip(h.chunks_exact(width)) {
            while next < limit as usize {
                sum += f64::from(inverse[next]) * f64::from(rows[next * width + c]);
                next += 1;
            }
            *rho += h[c] * (sum / limit.max(1) as f64) as f32;
        }
    }
}

/// Writes `kappa_j = (2 / queries) gamma_j`, with `gamma_j` the gradient of the variance of column `j`: from `dv_j`, less what
/// the bias has in it. Zero without whitening.
fn variances(
    kernel: &Kernel<'_>,
    terms: &Terms<'_>,
    limits: &[u32],
    g: Compact<'_>,
    v: Compact<'_>,
    dv: &[f32],
    kappa: &mut [f32],
) {
    let (s, width) = (&kernel.call.shape, v.stride());
    kappa.fill(0.0);
    if kernel.m.whitening != Whitening::Diagonal {
        return;
    }
    for slice in 0..s.slices() {
        let (queries, keys) = (kernel.queries.count(slice), kernel.keys.count(slice));
        let bias = limits.get(slice * s.seq_q).map_or(0.0, |&n| kernel.row_terms(n).1);
        let g = g.part(slice, 0..queries).data;
        let rows = v.part(slice, 0..keys).data;
        let dv = &dv[slice * s.seq_kv * width..][..keys * width];
        for (j, kappa) in kappa[slice * s.seq_kv..][..keys].iter_mut().enumerate() {
            let inverse = f64::from(terms.inverse[slice * s.seq_kv + j]);
            *kappa = (-inverse * inverse / queries.max(1) as f64
                * dot(&rows[j * width..][..width], &dv[j * width..][..width])) as f32;
        }
        for c in 0..v.dim {
            let sum = f64::from(bias) * g.iter().skip(c).step_by(width).map(|&x| f64::from(x)).sum::<f64>();
            for (j, kappa) in kappa[slice * s.seq_kv..][..keys].iter_mut().enumerate() {
                let inverse = f64::from(terms.inverse[slice * s.seq_kv + j]);
                *kappa += (inverse * inverse / queries.max(1) as f64 * sum * f64::from(rows[j * width + c])) as f32;
            }
        }
    }
}

/// `dV = Z^T G`.
struct Values<'a> {
    kernel: Kernel<'a>,
    terms: Terms<'a>,
    limits: &'a [u32],
    g: Compact<'a>,
    partial: Parts<'a, f32>,
}

impl Pass for Values<'_> {
    fn memory(&self) -> usize {
        room(tile_sizes(&self.kernel.call.shape))
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (kernel, s, slice, width) = (&self.kernel, &self.kernel.call.shape, part.slice, self.g.stride());
        let len = room(partial(s));
        // SAFETY: parts are distinct.
        let sums = unsafe { self.partial.part(part.index * len..(part.index + 1) * len) };
        sums.fill(0.0);
        let limits = &self.limits[slice * s.seq_q..][..s.seq_q];
        for rows in Kernel::tiles(&part, kernel.queries.count(slice)) {
            for cols in blocks(kernel.keys.count(slice)) {
                kernel.tile(level, slice, rows.clone(), &cols, memory);
                kernel.weigh(slice, &rows, &cols, limits, &self.terms, memory);
                let left = Left { data: &*memory, row_stride: 1, depth_stride: padded(cols.len()) };
                let size = Size { rows: cols.len(), cols: width, depth: rows.len() };
                let g = self.g.part(slice, rows.clone());
                let out = Add { data: &mut sums[cols.start * width..cols.end * width], stride: width };
                multiply_add(level, size, left, g.as_right(0..rows.len()), out);
            }
        }
    }
}

/// `dG`, and what it says of queries and keys.
struct Similarities<'a> {
    kernel: Kernel<'a>,
    terms: Terms<'a>,
    limits: &'a [u32],
    h: &'a [f32],
    v: Compact<'a>,
    rho: &'a [f32],
    kappa: &'a [f32],
    dq: Parts<'a, f32>,
    partial: Parts<'a, f32>,
}

impl Similarities<'_> {
    /// Turns products `h_i.v_j` into `E = dG G`.
    fn chain(&self, slice: usize, rows: &Range<usize>, cols: &Range<usize>, weights: &[f32], e: &mut [f32]) {
        let (keys, queries) = (slice * self.kernel.keys.seq, slice * self.kernel.queries.seq);
        let stride = padded(cols.len());
        let of_keys = keys + cols.start..keys + cols.end;
        let (w, kappa) = (&self.terms.inverse[of_keys.clone()], &self.kappa[of_keys.clone()]);
        let mean = &self.terms.mean[of_keys];
        for ((i, e), g) in rows.clone().zip(e.chunks_exact_mut(stride)).zip(weights.chunks_exact(stride)) {
            let rho = self.rho[queries + i];
            let seen = (self.limits[queries + i] as usize).clamp(cols.start, cols.end) - cols.start;
            for (j, (e, &g)) in e.iter_mut().zip(g).enumerate().take(seen) {
                *e = (*e * w[j] - rho + kappa[j] * (g - mean[j])) * g;
            }
            e[seen..].fill(0.0);
        }
    }
}

impl Pass for Similarities<'_> {
    fn memory(&self) -> usize {
        room(tile_sizes(&self.kernel.call.shape))
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (kernel, s, slice) = (&self.kernel, &self.kernel.call.shape, part.slice);
        let (dp, width, len) = (kernel.q.stride(), self.v.stride(), room(partial(s)));
        // SAFETY: parts are distinct ranges of rows.
        let dq = unsafe { self.dq.part(part.rows(s.seq_q, dp)) };
        // SAFETY: parts are distinct.
        let sums = unsafe { self.partial.part(part.index * len..(part.index + 1) * len) };
        dq.fill(0.0);
        sums.fill(0.0);
        let ([sums, contraction], _) = cut(sums, partial(s));
        let ([weights, e, dx], _) = cut(memory, tile_sizes(s));
        let slope = (-1.0 / kernel.lambda(slice)) as f32;
        for rows in Kernel::tiles(&part, kernel.queries.count(slice)) {
            let dq = &mut dq[part.within(&rows, dp)];
            let at = (slice * s.seq_q + rows.start) * width;
            let h = Rows { data: &self.h[at..at + rows.len() * width], stride: width };
            for cols in blocks(kernel.keys.count(slice)) {
                kernel.tile(level, slice, rows.clone(), &cols, weights);
                let stride = padded(cols.len());
                let e = &mut e[..rows.len() * stride];
                let size = Size { rows: rows.len(), cols: stride, depth: s.value_dim };
                multiply(level, size, h.as_left(), self.v.block(slice, cols.start), Store { data: &mut *e, stride });
                self.chain(slice, &rows, &cols, weights, e);
                let (tokens, marks) =
                    (kernel.q.part(slice, rows.clone()).data, kernel.k.part(slice, cols.clone()).data);
                let (dx, dmarks) = (&mut dx[..tokens.len()], &mut sums[cols.start * dp..cols.end * dp]);
                gradients(level, Manhattan, Pairs { tokens, marks, dim: dp, e, stride }, dx, dmarks);
                zip(level, dq, dx, Zip::Add);
            }
            dq.iter_mut().for_each(|x| *x *= slope);
            contraction[0] += about(kernel.some_keys(slice), kernel.q.part(slice, rows.clone()).data, dq) as f32;
        }
        // The sums are of the differences from query to key.
        sums.iter_mut().for_each(|x| *x *= -slope);
    }
}
