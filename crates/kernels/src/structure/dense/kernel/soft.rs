//! The Gaussian kernel of SOFT itself, every token a landmark of its own: `S V`, or `D^-1/2 S D^-1/2 V` with `D = diag(S 1)`.

use super::compact::{BLOCK, Compact, Kept, blocks, means, sizes, tile};
use crate::{
    Gradients, Parameter, Plan, Result, Shape, Strategy,
    call::{Call, Saved},
    mechanism::Soft,
    parallel::Parts,
    score::{Pairs, Squared, gradients},
    scratch::{cut, room},
    simd::{
        Level,
        product::{Add, Left, Size, Store, multiply, multiply_add},
    },
    structure::{
        dense::{dot, padded},
        nystrom::{
            pass::{self, Part, Pass, TOKENS},
            tile::{Tile, Zip, zip},
            values::Filter,
        },
    },
};

/// What a pass over rows makes of every tile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    /// The sums of the rows.
    Degrees,
    /// The product with `y`, rows times `c`.
    Product,
}

/// A pass with the kernel of every pair: for every kept row of `x`, something of the rows of all columns.
struct Sweep<'a> {
    kernel: Kernel<'a>,
    task: Task,
    y: Compact<'a>,
    /// `[slices, seq]`, by kept row.
    c: &'a [f32],
    out: Parts<'a, f32>,
}

#[derive(Clone, Copy)]
struct Kernel<'a> {
    call: &'a Call<'a>,
    m: &'a Soft,
    kept: Kept<'a>,
    x: Compact<'a>,
}

impl Kernel<'_> {
    fn scale(&self, slice: usize) -> f64 {
        let given = self.call.extras.get(Parameter::Scale).map(|x| f64::from(x[slice % self.call.shape.heads]));
        given.unwrap_or(self.m.scale_for(self.call.shape.head_dim))
    }

    /// The part's tiles of kept rows.
    fn tiles(&self, part: &Part) -> impl Iterator<Item = std::ops::Range<usize>> {
        let end = part.tokens.end.min(self.kept.count(part.slice));
        (part.tokens.start..end).step_by(TOKENS).map(move |from| from..(from + TOKENS).min(end))
    }

    fn tile(
        &self,
        level: Level,
        slice: usize,
        rows: std::ops::Range<usize>,
        cols: &std::ops::Range<usize>,
        out: &mut [f32],
    ) {
        let rate = (self.scale(slice) * std::f64::consts::LOG2_E) as f32;
        let columns = (self.x.block(slice, cols.start), cols.len());
        tile(level, (Squared, rate), self.x.part(slice, rows), columns, self.x.dim, out);
    }
}

impl Pass for Sweep<'_> {
    fn memory(&self) -> usize {
        TOKENS * BLOCK
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (kernel, seq, slice) = (&self.kernel, self.kernel.kept.seq, part.slice);
        let width = if self.task == Task::Degrees { 1 } else { self.y.stride() };
        // SAFETY: parts are distinct ranges of rows.
        let out = unsafe { self.out.part(part.rows(seq, width)) };
        out.fill(0.0);
        for rows in kernel.tiles(&part) {
            let out = &mut out[part.within(&rows, width)];
            for cols in blocks(kernel.kept.count(slice)) {
                kernel.tile(level, slice, rows.clone(), &cols, memory);
                let stride = padded(cols.len());
                let weights = Tile { data: memory, stride, tokens: rows.len(), marks: cols.len() };
                match self.task {
                    Task::Degrees => {
                        for (out, row) in out.iter_mut().zip(memory.chunks_exact(stride)) {
                            *out += row[..cols.len()].iter().sum::<f32>();
                        }
                    }
                    Task::Product => {
                        let left = Left { data: weights.data, row_stride: stride, depth_stride: 1 };
                        let y = self.y.part(slice, cols.clone());
                        let size = Size { rows: rows.len(), cols: width, depth: cols.len() };
                        let sums = Add { data: &mut *out, stride: width };
                        multiply_add(level, size, left, y.as_right(0..cols.len()), sums);
                    }
                }
            }
            if self.task == Task::Product {
                let c = &self.c[slice * seq + rows.start..];
                for (row, c) in out.chunks_exact_mut(width).zip(c) {
                    row.iter_mut().for_each(|x| *x *= c);
                }
            }
        }
    }
}

/// Rows and blocks of queries; of the values; products by kept row.
fn forward_sizes(s: &Shape) -> [usize; 5] {
    let [q, q_blocks] = sizes(s.slices(), s.seq_q, s.head_dim);
    let [v, v_blocks] = sizes(s.slices(), s.seq_q, s.value_dim);
    [q, q_blocks, v, v_blocks, v]
}

fn work_of_pass(s: &Shape, memory: usize) -> usize {
    pass::work(s.slices(), s.seq_q, memory)
}

/// Writes `out`, and the inverse roots of the degrees as `stats [slices, seq]`, by kept token.
pub(crate) fn soft_all_forward(
    call: &Call<'_>,
    m: &Soft,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let (s, level) = (&call.shape, call.level);
    let kept = Kept { mask: call.mask.key, heads: s.heads, seq: s.seq_q };
    let ([q, q_blocks, v, v_blocks, sums], work) = cut(work, forward_sizes(s));
    let x = Compact::of(call.q, s.head_dim, kept, |_, x| x, [q, q_blocks]);
    let kernel = Kernel { call, m, kept, x };
    if m.degree.is_some() {
        let sweep = Sweep { kernel, task: Task::Degrees, y: x, c: &[], out: Parts::new(&mut *stats) };
        pass::run(&sweep, level, s.slices(), s.seq_q, work);
        stats.iter_mut().for_each(|x| *x = f64::from(*x).max(f64::from(f32::MIN_POSITIVE)).powf(-0.5) as f32);
    } else {
        stats.fill(1.0);
    }
    let y = Compact::of(call.v, s.value_dim, kept, |[slice, n, _], x| stats[slice * s.seq_q + n] * x, [v, v_blocks]);
    let sweep = Sweep { kernel, task: Task::Product, y, c: stats, out: Parts::new(&mut *sums) };
    pass::run(&sweep, level, s.slices(), s.seq_q, work);
    spread(sums, y.stride(), kept, s.value_dim, out);
    Filter::of_soft(call, m).add_all(call.v, false, out, work);
    Ok(())
}

/// Writes compact rows back to the places of their tokens, zeros to the masked ones.
pub(super) fn spread(rows: &[f32], stride: usize, kept: Kept<'_>, dim: usize, out: &mut [f32]) {
    out.fill(0.0);
    for (slice, out) in out.chunks_exact_mut(kept.seq * dim).enumerate() {
        for (row, token) in rows[slice * kept.seq * stride..].chunks_exact(stride).zip(kept.tokens(slice)) {
            out[token * dim..][..dim].copy_from_slice(&row[..dim]);
        }
    }
}

/// Rows and blocks of queries, of values and output gradients times `c`; products, degrees' gradients; contractions; means; the filter's part of the output.
fn backward_sizes(m: &Soft, s: &Shape) -> [usize; 12] {
    let [q, q_blocks] = sizes(s.slices(), s.seq_q, s.head_dim);
    let [v, v_blocks] = sizes(s.slices(), s.seq_q, s.value_dim);
    let parts = s.slices() * pass::splits(s.slices(), s.seq_q);
    let filtered = if m.value_conv > 0 { s.v_len() } else { 0 };
    [
        q,
        q_blocks,
        v,
        v_blocks,
        v,
        v_blocks,
        v,
        s.slices() * s.seq_q.next_multiple_of(BLOCK),
        q,
        parts,
        s.slices() * s.head_dim,
        filtered,
    ]
}

/// Writes the gradients.
pub(crate) fn soft_all_backward(
    call: &Call<'_>,
    m: &Soft,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let (s, level, c) = (&call.shape, call.level, saved.stats);
    let (slices, seq, dv) = (s.slices(), s.seq_q, s.value_dim);
    let kept = Kept { mask: call.mask.key, heads: s.heads, seq };
    let ([q, q_blocks, v, v_blocks, g, g_blocks, sums, ddegrees, dx, contraction, centre, filtered], work) =
        cut(work, backward_sizes(m, s));
    // About their mean: the gradient subtracts products that are as large as the tokens.
    means(call.q, s.head_dim, kept, centre);
    let centred = |[slice, _, c]: [usize; 3], x: f32| x - centre[slice * s.head_dim + c];
    let x = Compact::of(call.q, s.head_dim, kept, centred, [q, q_blocks]);
    let kernel = Kernel { call, m, kept, x };
    let factor = |[slice, n, _]: [usize; 3], x: f32| c[slice * seq + n] * x;
    let v = Compact::of(call.v, dv, kept, factor, [v, v_blocks]);
    let g = Compact::of(saved.dout, dv, kept, factor, [g, g_blocks]);
    let sweep = Sweep { kernel, task: Task::Product, y: g, c, out: Parts::new(&mut *sums) };
    pass::run(&sweep, level, slices, seq, work);
    let Gradients { dq, dv: dv_out, mut extras, .. } = gradients;
    spread(sums, v.stride(), kept, dv, dv_out);
    let padded_seq = seq.next_multiple_of(BLOCK);
    ddegrees.fill(0.0);
    if m.degree.is_some() {
        // The kernel's part of the output is what the filter did not add.
        filtered.fill(0.0);
        Filter::of_soft(call, m).add_all(call.v, false, filtered, work);
        for (slice, ddegrees) in ddegrees.chunks_exact_mut(padded_seq).enumerate() {
            for (n, token) in kept.tokens(slice).enumerate() {
                let at = (slice * seq + token) * dv..(slice * seq + token + 1) * dv;
                let row = |x: &[f32], y: &[f32]| dot(&x[at.clone()], &y[at.clone()]);
                let of_out =
                    row(saved.dout, saved.out) - if m.value_conv > 0 { row(saved.dout, filtered) } else { 0.0 };
                let c = f64::from(c[slice * seq + n]);
                ddegrees[n] = (-0.5 * c * c * (of_out + row(call.v, dv_out))) as f32;
            }
        }
    }
    Filter::of_soft(call, m).add_all(saved.dout, true, dv_out, work);
    let pass = Distances {
        kernel,
        v,
        g,
        ddegrees,
        padded_seq,
        dx: Parts::new(&mut *dx),
        contraction: Parts::new(&mut *contraction),
    };
    pass::run(&pass, level, slices, seq, work);
    spread(dx, x.stride(), kept, s.head_dim, dq);
    if let Some(dweight) = extras.get(Parameter::ValueWeight) {
        Filter::of_soft(call, m).gradient(saved.dout, dweight);
    }
    if let Some(dscale) = extras.get(Parameter::Scale) {
        dscale.fill(0.0);
        let splits = contraction.len() / slices;
        for (index, part) in contraction.iter().enumerate() {
            dscale[index / splits % s.heads] -= part;
        }
    }
    Ok(())
}

/// The tokens' gradients: with `E_ij = S_ij (g_i.v_j + v_i.g_j + dd_i + dd_j)`, `dq_i = -2 scale sum_j E_ij (q_i - q_j)`.
struct Distances<'a> {
    kernel: Kernel<'a>,
    v: Compact<'a>,
    g: Compact<'a>,
    ddegrees: &'a [f32],
    padded_seq: usize,
    dx: Parts<'a, f32>,
    contraction: Parts<'a, f32>,
}

fn distance_sizes(s: &Shape) -> [usize; 4] {
    // The kernel; E; one block's gradients of rows, and of columns
    let dp = padded(s.head_dim);
    [TOKENS * BLOCK, TOKENS * BLOCK, TOKENS * dp, BLOCK * dp]
}

impl Pass for Distances<'_> {
    fn memory(&self) -> usize {
        room(distance_sizes(&self.kernel.call.shape))
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (kernel, s, slice) = (&self.kernel, &self.kernel.call.shape, part.slice);
        let dp = kernel.x.stride();
        // SAFETY: parts are distinct ranges of rows.
        let out = unsafe { self.dx.part(part.rows(s.seq_q, dp)) };
        // SAFETY: parts are distinct.
        let contraction = unsafe { self.contraction.part(part.index..part.index + 1) };
        out.fill(0.0);
        let ddegrees = &self.ddegrees[slice * self.padded_seq..][..self.padded_seq];
        let ([weights, e, dx, unused], _) = cut(memory, distance_sizes(s));
        let (mut total, slope) = (0.0, (-2.0 * kernel.scale(slice)) as f32);
        for rows in kernel.tiles(&part) {
            let out = &mut out[part.within(&rows, dp)];
            for cols in blocks(kernel.kept.count(slice)) {
                kernel.tile(level, slice, rows.clone(), &cols, weights);
                let stride = padded(cols.len());
                let (e, weights) = (&mut e[..rows.len() * stride], &weights[..rows.len() * stride]);
                let size = Size { rows: rows.len(), cols: stride, depth: s.value_dim };
                let (g, v) = (self.g.part(slice, rows.clone()), self.v.part(slice, rows.clone()));
                let (g_block, v_block) = (self.g.block(slice, cols.start), self.v.block(slice, cols.start));
                multiply(level, size, g.as_left(), v_block, Store { data: &mut *e, stride });
                multiply_add(level, size, v.as_left(), g_block, Add { data: &mut *e, stride });
                for (row, dd) in e.chunks_exact_mut(stride).zip(&ddegrees[rows.clone()]) {
                    row.iter_mut().zip(&ddegrees[cols.start..]).for_each(|(e, other)| *e += dd + other);
                }
                zip(level, e, weights, Zip::Multiply);
                e.chunks_exact_mut(stride).for_each(|row| row[cols.len()..].fill(0.0));
                let (tokens, marks) =
                    (kernel.x.part(slice, rows.clone()).data, kernel.x.part(slice, cols.clone()).data);
                let dx = &mut dx[..tokens.len()];
                unused.fill(0.0);
                gradients(level, Squared, Pairs { tokens, marks, dim: dp, e, stride }, dx, unused);
                zip(level, out, dx, Zip::Add);
            }
            total += dot(kernel.x.part(slice, rows.clone()).data, out);
            out.iter_mut().for_each(|x| *x *= slope);
        }
        contraction[0] = total as f32;
    }
}

pub(crate) fn soft_all_plan(m: &Soft, s: &Shape) -> Plan {
    let pairs = (s.slices() * s.seq_q * s.seq_q) as u64;
    let [d, dv] = [s.head_dim, s.value_dim].map(|n| n as u64);
    let (kernel, degrees) = (3 * d, u64::from(m.degree.is_some()));
    let rows = (s.q_len() + s.v_len()) as u64;
    Plan {
        strategy: Strategy::Fused,
        reason: "every pair, streamed in tiles and never stored",
        tile: (TOKENS.min(s.seq_q), BLOCK.min(s.seq_q)),
        flops_forward: pairs * ((1 + degrees) * kernel + 2 * dv),
        flops_backward: pairs * (2 * kernel + 6 * dv + 4 * d),
        exps_forward: pairs * (1 + degrees),
        exps_backward: pairs * 2,
        bytes_forward: 4 * (4 * rows + s.v_len() as u64),
        bytes_backward: 4 * (5 * rows + 3 * s.v_len() as u64),
        scratch_forward: room(forward_sizes(s)) + work_of_pass(s, TOKENS * BLOCK),
        scratch_backward: room(backward_sizes(m, s)) + work_of_pass(s, room(distance_sizes(s))),
        stats: s.slices() * s.seq_q,
        allocated_forward: 0,
        allocated_backward: 0,
    }
}
