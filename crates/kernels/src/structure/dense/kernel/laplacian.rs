//! The whitened Laplacian kernel of every pair. "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel", eq. 3
//! to 6, all options but full whitening in one form:
//! `Z_ij = alpha_i (G_ij - a_i - b_j) w_j + beta_i` for the keys that a query sees, else 0.

use std::ops::Range;

use super::{
    compact::{BLOCK, Compact, Kept, blocks, sizes, tile},
    soft::spread,
};
use crate::{
    Parameter, Plan, Result, Shape, Strategy,
    call::Call,
    mechanism::{Centering, LaplacianExact, Whitening},
    parallel::Parts,
    score::Manhattan,
    scratch::{cut, room},
    simd::{
        Level,
        product::{Add, Left, Size, multiply_add},
    },
    structure::{
        dense::padded,
        nystrom::pass::{self, Part, Pass, TOKENS},
    },
};

/// A call, its kept tokens, and queries and keys without gaps.
#[derive(Clone, Copy)]
pub(super) struct Kernel<'a> {
    pub call: &'a Call<'a>,
    pub m: &'a LaplacianExact,
    pub queries: Kept<'a>,
    pub keys: Kept<'a>,
    pub q: Compact<'a>,
    pub k: Compact<'a>,
}

/// What makes weights of similarities; `[slices, seq]` each, by kept token.
#[derive(Clone, Copy)]
pub(super) struct Terms<'a> {
    /// Per key: the mean of its column, and one over its standard deviation (1 without whitening).
    pub mean: &'a [f32],
    pub inverse: &'a [f32],
    /// Per query: the mean of its row.
    pub row_mean: &'a [f32],
}

/// Which kept tokens two kinds of token have.
pub(super) fn kept<'a>(call: &Call<'a>) -> [Kept<'a>; 2] {
    let heads = call.shape.heads;
    [(call.mask.query, call.shape.seq_q), (call.mask.key, call.shape.seq_kv)].map(|(mask, seq)| Kept {
        mask,
        heads,
        seq,
    })
}

/// The sizes of the three parts of the statistics: means and inverse deviations of columns, means of rows.
pub(super) fn stats_sizes(s: &Shape) -> [usize; 3] {
    [s.slices() * s.seq_kv, s.slices() * s.seq_kv, s.slices() * s.seq_q]
}

impl Kernel<'_> {
    pub fn lambda(&self, slice: usize) -> f64 {
        let given = self.call.extras.get(Parameter::Lambda).map(|x| f64::from(x[slice % self.call.shape.heads]));
        given.unwrap_or(self.m.lambda)
    }

    fn rate(&self, slice: usize) -> f32 {
        (std::f64::consts::LOG2_E / self.lambda(slice)) as f32
    }

    /// Three keys of a slice, among which its tokens lie.
    pub fn some_keys(&self, slice: usize) -> [&[f32]; 3] {
        let last = self.k.seq.max(1) - 1;
        [0, 1, 2].map(|j| self.k.part(slice, last.min(j)..last.min(j) + 1).data)
    }

    /// The tile of some queries by a block of keys.
    pub fn tile(&self, level: Level, slice: usize, rows: Range<usize>, cols: &Range<usize>, out: &mut [f32]) {
        let columns = (self.k.block(slice, cols.start), cols.len());
        tile(level, (Manhattan, self.rate(slice)), self.q.part(slice, rows), columns, self.q.dim, out);
    }

    /// Writes, for the kept queries of a slice, how many of the kept keys each sees.
    pub fn limits(&self, slice: usize, out: &mut [u32]) {
        let shape = &self.call.shape;
        let all = self.keys.count(slice);
        if !self.call.mask.causal {
            return out.fill(all as u32);
        }
        let mut keys = self.keys.tokens(slice).peekable();
        let mut seen = 0;
        for (out, query) in out.iter_mut().zip(self.queries.tokens(slice)) {
            while keys.next_if(|&key| key + shape.seq_q <= query + shape.seq_kv).is_some() {
                seen += 1;
            }
            *out = seen;
        }
    }

    /// The factor on the whitened weights of a query that sees `n` keys, and what is added to each.
    pub fn row_terms(&self, n: u32) -> (f32, f32) {
        let n = n.max(1) as usize;
        let bias = if self.m.bias_one_over_n { 1.0 / n as f32 } else { 0.0 };
        (self.m.weight_scale.value(n) as f32, bias)
    }

    /// What is taken off the similarities of a column and of a row.
    pub fn centres(&self, terms: &Terms<'_>, key: usize, query: usize) -> (f32, f32) {
        match self.m.centering {
            Centering::PerKey => (terms.mean[key], 0.0),
            Centering::PerQuery => (0.0, terms.row_mean[query]),
            Centering::None => (0.0, 0.0),
        }
    }

    /// Turns the similarities of a tile into weights, but for the factor `w_j` of the columns when `plain`.
    pub fn weigh(
        &self,
        slice: usize,
        rows: &Range<usize>,
        cols: &Range<usize>,
        limits: &[u32],
        terms: &Terms<'_>,
        g: &mut [f32],
    ) {
        let (key, query) = (slice * self.keys.seq, slice * self.queries.seq);
        for (i, row) in rows.clone().zip(g.chunks_exact_mut(padded(cols.len()))) {
            let (alpha, beta) = self.row_terms(limits[i]);
            let seen = (limits[i] as usize).clamp(cols.start, cols.end) - cols.start;
            let (row, hidden) = row.split_at_mut(seen);
            let columns = key + cols.start..key + cols.start + seen;
            let a = self.centres(terms, key + cols.start.min(self.keys.seq - 1), query + i).1;
            let inverse = &terms.inverse[columns.clone()];
            match self.m.centering {
                Centering::PerKey => row
                    .iter_mut()
                    .zip(inverse)
                    .zip(&terms.mean[columns])
                    .for_each(|((x, w), b)| *x = alpha * (*x - b) * w + beta),
                _ => row.iter_mut().zip(inverse).for_each(|(x, w)| *x = alpha * (*x - a) * w + beta),
            }
            hidden.fill(0.0);
        }
    }

    /// The part's tiles of the first `count` rows.
    pub fn tiles(part: &Part, count: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (start, end) = (part.tokens.start, part.tokens.end.min(count));
        (start..end).step_by(TOKENS).map(move |from| from..(from + TOKENS).min(end))
    }
}

/// Means and deviations of the columns: rows of the tiles are keys.
struct Columns<'a> {
    kernel: Kernel<'a>,
    mean: Parts<'a, f32>,
    inverse: Parts<'a, f32>,
}

impl Pass for Columns<'_> {
    fn memory(&self) -> usize {
        TOKENS * BLOCK
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (kernel, slice) = (&self.kernel, part.slice);
        // SAFETY: parts are distinct ranges of rows.
        let mean = unsafe { self.mean.part(part.rows(kernel.keys.seq, 1)) };
        // SAFETY: as above.
        let inverse = unsafe { self.inverse.part(part.rows(kernel.keys.seq, 1)) };
        mean.fill(0.0);
        inverse.fill(0.0);
        let queries = kernel.queries.count(slice);
        for rows in Kernel::tiles(&part, kernel.keys.count(slice)) {
            let range = part.within(&rows, 1);
            let (mean, square) = (&mut mean[range.clone()], &mut inverse[range]);
            for cols in blocks(queries) {
                let columns = (kernel.q.block(slice, cols.start), cols.len());
                tile(
                    level,
                    (Manhattan, kernel.rate(slice)),
                    kernel.k.part(slice, rows.clone()),
                    columns,
                    kernel.q.dim,
                    memory,
                );
                let rows = memory.chunks_exact(padded(cols.len()));
                for ((mean, square), row) in mean.iter_mut().zip(&mut *square).zip(rows) {
                    merge(mean, square, cols.start, &row[..cols.len()]);
                }
            }
            let whitens = kernel.m.whitening == Whitening::Diagonal;
            for square in square {
                let variance = f64::from(*square) / queries.max(1) as f64;
                *square = if whitens { (variance + kernel.m.whiten_eps).powf(-0.5) as f32 } else { 1.0 };
            }
        }
    }
}

/// Takes `x` into `mean`, that of `count` numbers. Returns the mean of `x`, and how far it is from the one before. Numbers that are
/// all equal are their mean to the last bit, of which whitening would make something otherwise.
fn add_to_mean(mean: &mut f32, count: usize, x: &[f32]) -> [f32; 2] {
    let (n, old) = (x.len() as f32, count as f32);
    let of_x = x[0] + x.iter().map(|other| other - x[0]).sum::<f32>() / n;
    let shift = of_x - *mean;
    *mean += shift * (n / (n + old));
    [of_x, shift]
}

/// The mean of `count` numbers and their squared distance from it, with `x` added to them.
fn merge(mean: &mut f32, square: &mut f32, count: usize, x: &[f32]) {
    let (n, old) = (x.len() as f32, count as f32);
    let [of_x, shift] = add_to_mean(mean, count, x);
    *square += x.iter().map(|x| (x - of_x) * (x - of_x)).sum::<f32>() + shift * shift * n * old / (n + old);
}

/// Means of the rows over the keys that each sees.
struct RowMeans<'a> {
    kernel: Kernel<'a>,
    limits: &'a [u32],
    out: Parts<'a, f32>,
}

impl Pass for RowMeans<'_> {
    fn memory(&self) -> usize {
        TOKENS * BLOCK
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (kernel, slice) = (&self.kernel, part.slice);
        let seq = kernel.queries.seq;
        // SAFETY: parts are distinct ranges of rows.
        let out = unsafe { self.out.part(part.rows(seq, 1)) };
        out.fill(0.0);
        let limits = &self.limits[slice * seq..][..seq];
        for rows in Kernel::tiles(&part, kernel.queries.count(slice)) {
            let out = &mut out[part.within(&rows, 1)];
            for cols in blocks(kernel.keys.count(slice)) {
                kernel.tile(level, slice, rows.clone(), &cols, memory);
                for ((out, i), row) in out.iter_mut().zip(rows.clone()).zip(memory.chunks_exact(padded(cols.len()))) {
                    let seen = (limits[i] as usize).clamp(cols.start, cols.end) - cols.start;
                    if seen > 0 {
                        add_to_mean(out, cols.start, &row[..seen]);
                    }
                }
            }
        }
    }
}

/// `out = Z V`.
struct Apply<'a> {
    kernel: Kernel<'a>,
    terms: Terms<'a>,
    limits: &'a [u32],
    v: Compact<'a>,
    out: Parts<'a, f32>,
}

impl Pass for Apply<'_> {
    fn memory(&self) -> usize {
        TOKENS * BLOCK
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (kernel, slice, width) = (&self.kernel, part.slice, self.v.stride());
        let seq = kernel.queries.seq;
        // SAFETY: parts are distinct ranges of rows.
        let out = unsafe { self.out.part(part.rows(seq, width)) };
        out.fill(0.0);
        let limits = &self.limits[slice * seq..][..seq];
        for rows in Kernel::tiles(&part, kernel.queries.count(slice)) {
            let out = &mut out[part.within(&rows, width)];
            for cols in blocks(kernel.keys.count(slice)) {
                kernel.tile(level, slice, rows.clone(), &cols, memory);
                kernel.weigh(slice, &rows, &cols, limits, &self.terms, memory);
                let left = Left { data: &*memory, row_stride: padded(cols.len()), depth_stride: 1 };
                let size = Size { rows: rows.len(), cols: width, depth: cols.len() };
                let v = self.v.part(slice, cols.clone());
                multiply_add(level, size, left, v.as_right(0..cols.len()), Add { data: &mut *out, stride: width });
            }
        }
    }
}

/// Rows and blocks of queries, keys and values; products by kept row; how many keys each query sees.
fn forward_sizes(s: &Shape) -> [usize; 8] {
    let [q, q_blocks] = sizes(s.slices(), s.seq_q, s.head_dim);
    let [k, k_blocks] = sizes(s.slices(), s.seq_kv, s.head_dim);
    let [v, v_blocks] = sizes(s.slices(), s.seq_kv, s.value_dim);
    [q, q_blocks, k, k_blocks, v, v_blocks, s.slices() * s.seq_q * padded(s.value_dim), s.slices() * s.seq_q]
}

/// Fills the limits of all slices.
pub(super) fn all_limits<'l>(kernel: &Kernel<'_>, limits: &'l mut [f32]) -> &'l [u32] {
    let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
    for (slice, limits) in limits.chunks_exact_mut(kernel.queries.seq).enumerate() {
        kernel.limits(slice, limits);
    }
    limits
}

/// Writes `out`, and the means and deviations.
pub(crate) fn laplacian_exact_forward(
    call: &Call<'_>,
    m: &LaplacianExact,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let (s, level) = (&call.shape, call.level);
    let [queries, keys] = kept(call);
    let ([q, q_blocks, k, k_blocks, v, v_blocks, sums, limits], work) = cut(work, forward_sizes(s));
    let q = Compact::of(call.q, s.head_dim, queries, |_, x| x, [q, q_blocks]);
    let k = Compact::of(call.k, s.head_dim, keys, |_, x| x, [k, k_blocks]);
    let v = Compact::of(call.v, s.value_dim, keys, |_, x| x, [v, v_blocks]);
    let kernel = Kernel { call, m, queries, keys, q, k };
    let limits = all_limits(&kernel, limits);
    let ([mean, inverse, row_mean], _) = cut(stats, stats_sizes(s));
    if m.centering == Centering::PerKey || m.whitening == Whitening::Diagonal {
        let columns = Columns { kernel, mean: Parts::new(&mut *mean), inverse: Parts::new(&mut *inverse) };
        pass::run(&columns, level, s.slices(), s.seq_kv, work);
    } else {
        mean.fill(0.0);
        inverse.fill(1.0);
    }
    if m.centering == Centering::PerQuery {
        let rows = RowMeans { kernel, limits, out: Parts::new(&mut *row_mean) };
        pass::run(&rows, level, s.slices(), s.seq_q, work);
    } else {
        row_mean.fill(0.0);
    }
    let terms = Terms { mean, inverse, row_mean };
    let apply = Apply { kernel, terms, limits, v, out: Parts::new(&mut *sums) };
    pass::run(&apply, level, s.slices(), s.seq_q, work);
    spread(sums, v.stride(), queries, s.value_dim, out);
    Ok(())
}

pub(crate) fn laplacian_exact_plan(m: &LaplacianExact, s: &Shape) -> Plan {
    let pairs = (s.slices() * s.seq_q * s.seq_kv) as u64;
    let [d, dv] = [s.head_dim, s.value_dim].map(|n| n as u64);
    let columns = m.centering == Centering::PerKey || m.whitening == Whitening::Diagonal;
    let sweeps = 1 + u64::from(columns) + u64::from(m.centering == Centering::PerQuery);
    let kernel = 3 * d;
    let rows = (s.q_len() + s.k_len() + s.v_len()) as u64;
    let work = |memory| pass::work(s.slices(), s.seq_q, memory).max(pass::work(s.slices(), s.seq_kv, memory));
    Plan {
        strategy: Strategy::Fused,
        reason: "every pair, streamed in tiles and never stored",
        tile: (TOKENS.min(s.seq_q), BLOCK.min(s.seq_kv)),
        flops_forward: pairs * (sweeps * kernel + 2 * dv),
        flops_backward: pairs * (2 * kernel + 4 * dv + 6 * d),
        exps_forward: pairs * sweeps,
        exps_backward: pairs * 2,
        bytes_forward: 4 * (4 * rows + s.out_len() as u64),
        bytes_backward: 4 * (6 * rows + 3 * s.out_len() as u64),
        scratch_forward: room(forward_sizes(s)) + work(TOKENS * BLOCK),
        scratch_backward: super::laplacian_backward::work(m, s),
        stats: room(stats_sizes(s)),
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
