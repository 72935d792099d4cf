//! The gradients of a kernel of every pair: a sweep for the values, and one for the similarities,
//! `dG_ij = h_i.v_j factor_j - row_i + curve_j (G_ij - mean_j)` for the keys that a query sees.

use std::ops::Range;

use super::{
    affine::{Distance, Kernel, TILE, Weights, entries, work as forward_work},
    compact::{Compact, sizes, spread},
};
use crate::{
    Gradients, Shape,
    score::{Manhattan, Pairs, Squared, gradients},
    scratch::{cut, scratch_len},
    simd::product::{Add, Left, Size, Store, multiply, multiply_add},
    structure::{
        dense::{Rows, centred_dot, padded},
        nystrom::{
            pass::{TOKENS, of_tokens, rows_of, share, splits},
            tile::{Zip, zip},
        },
    },
};

/// What flows back to similarities, by kept token: `h [slices, seq_q, padded(value_dim)]`, the others `[slices, seq]`. What is empty is zero.
#[derive(Clone, Copy)]
pub(super) struct Back<'a> {
    pub h: &'a [f32],
    pub row: &'a [f32],
    pub factor: &'a [f32],
    pub curve: &'a [f32],
    pub mean: &'a [f32],
}

/// Buffers of a backward pass, by kept token.
pub(super) struct Buffers<'a> {
    /// Rows and blocks of the output gradients.
    pub g: [&'a mut [f32]; 2],
    /// What [`Back`] is made of.
    pub h: &'a mut [f32],
    pub row: &'a mut [f32],
    pub curve: &'a mut [f32],
    pub sums: Sums<'a>,
}

/// Gradients by kept token, and what they are summed in.
pub(super) struct Sums<'a> {
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    pub dv: &'a mut [f32],
    /// The keys' gradients where there is no tensor of their own.
    tied: &'a mut [f32],
    /// Every part's sums by key: gradients of the values, and then of the keys.
    partial: &'a mut [f32],
    /// Every part's `<q, dq>`.
    contraction: &'a mut [f32],
    /// The mean key of every slice.
    centre: &'a mut [f32],
}

fn buffer_sizes(s: &Shape, tied: bool) -> [usize; 12] {
    let slices = s.slices();
    let [q, _] = sizes(slices, s.seq_q, s.head_dim);
    let [k, _] = sizes(slices, s.seq_kv, s.head_dim);
    let [v, _] = sizes(slices, s.seq_kv, s.value_dim);
    let [g, g_blocks] = sizes(slices, s.seq_q, s.value_dim);
    let (parts, tied) = (slices * splits(slices, s.seq_q), if tied { s.k_len() } else { 0 });
    [
        g,
        g_blocks,
        g,
        slices * s.seq_q,
        slices * s.seq_kv,
        q,
        k,
        v,
        tied,
        parts * partial_len(s),
        parts,
        slices * padded(s.head_dim),
    ]
}

fn partial_len(s: &Shape) -> usize {
    s.seq_kv * padded(s.head_dim).max(padded(s.value_dim))
}

impl<'a> Buffers<'a> {
    /// Cuts the buffers; what is left of `work` is the last result.
    pub fn cut(s: &Shape, tied: bool, work: &'a mut [f32]) -> (Self, &'a mut [f32]) {
        let ([g, g_blocks, h, row, curve, dq, dk, dv, tied, partial, contraction, centre], work) =
            cut(work, buffer_sizes(s, tied));
        (Self { g: [g, g_blocks], h, row, curve, sums: Sums { dq, dk, dv, tied, partial, contraction, centre } }, work)
    }
}

/// f32 of working memory of a backward pass.
pub(super) fn work(s: &Shape, tied: bool) -> usize {
    scratch_len(buffer_sizes(s, tied)) + forward_work(s, scratch_len(tile_sizes(s)))
}

/// Similarities; their gradients; a tile's gradients of queries.
fn tile_sizes(s: &Shape) -> [usize; 3] {
    [TILE, TILE, TOKENS * padded(s.head_dim)]
}

impl Sums<'_> {
    /// Adds up the parts' sums by key.
    fn total(s: &Shape, partial: &[f32], stride: usize, out: &mut [f32]) {
        let splits = splits(s.slices(), s.seq_q);
        let slices = out.chunks_exact_mut(s.seq_kv * stride).zip(partial.chunks_exact(splits * partial_len(s)));
        for (out, parts) in slices {
            out.fill(0.0);
            for sums in parts.chunks_exact(partial_len(s)) {
                out.iter_mut().zip(sums).for_each(|(out, x)| *out += x);
            }
        }
    }

    /// Writes the values' gradients, `W^T g`.
    pub fn values(&mut self, kernel: &Kernel<'_>, weights: &Weights<'_>, g: Compact<'_>, work: &mut [f32]) {
        let (s, seq, width) = (&kernel.call.shape, kernel.queries.seq, g.stride());
        let items = of_tokens(s.slices(), seq).zip(self.partial.chunks_mut(partial_len(s)));
        share(items, work, TILE, |(part, sums), tile| {
            sums.fill(0.0);
            kernel.sweep(&part, tile, |rows, cols, w| {
                kernel.weigh(part.slice, rows.clone(), &cols, weights, w);
                let left = Left { data: w, row_stride: 1, depth_stride: padded(cols.len()) };
                let size = Size { rows: cols.len(), cols: width, depth: rows.len() };
                let g = g.part(part.slice, rows.clone());
                let out = Add { data: &mut sums[cols.start * width..cols.end * width], stride: width };
                multiply_add(kernel.call.level, size, left, g.as_right(0..rows.len()), out);
            });
        });
        Self::total(s, self.partial, width, self.dv);
    }

    /// Writes the tokens' gradients, and to `dparameter` that of the bandwidth or scale of every head.
    pub fn tokens(
        &mut self,
        kernel: &Kernel<'_>,
        back: &Back<'_>,
        v: Compact<'_>,
        dparameter: Option<&mut [f32]>,
        work: &mut [f32],
    ) {
        let (s, dp) = (&kernel.call.shape, kernel.q.stride());
        let (slices, seq) = (s.slices(), s.seq_q);
        kernel.mean_keys(self.centre);
        let centre = &*self.centre;
        let items = of_tokens(slices, seq).zip(self.partial.chunks_mut(partial_len(s)));
        let items = items.zip(rows_of(self.dq, slices, seq, dp)).zip(self.contraction.iter_mut());
        share(items, work, scratch_len(tile_sizes(s)), |(((part, sums), dq), contraction), memory| {
            sums.fill(0.0);
            dq.fill(0.0);
            let ([tile, e, dx], _) = cut(memory, tile_sizes(s));
            kernel.sweep(&part, tile, |rows, cols, g| {
                let e = &mut e[..g.len()];
                kernel.chain(part.slice, rows.clone(), &cols, (back, v), g, e);
                let dk = &mut sums[cols.start * dp..cols.end * dp];
                let dx = &mut dx[..rows.len() * dp];
                kernel.pull_back(part.slice, rows.clone(), &cols, e, [&mut *dx, dk]);
                zip(kernel.call.level, &mut dq[part.within(&rows, dp)], dx, Zip::Add);
            });
            let rows = kernel.rows(&part);
            let dq = &mut dq[..rows.len() * dp];
            *contraction =
                centred_dot(kernel.centres(part.slice, centre), kernel.q.part(part.slice, rows).data, dq) as f32;
            let slope = kernel.slope(part.slice);
            dq.iter_mut().for_each(|x| *x *= slope);
        });
        Self::total(s, self.partial, dp, self.dk);
        if let Some(dparameter) = dparameter {
            self.parameter(kernel, dparameter);
        }
        for (slice, dk) in self.dk.chunks_exact_mut(s.seq_kv * dp).enumerate() {
            // The sums are of the differences from query to key.
            let slope = -kernel.slope(slice);
            dk.iter_mut().for_each(|x| *x *= slope);
        }
    }

    /// The gradient of the bandwidth or scale of every head. Sums of differences times tokens, wherever these are measured from, add
    /// up to the distances times the gradients of the logarithms.
    fn parameter(&self, kernel: &Kernel<'_>, out: &mut [f32]) {
        let (s, len) = (&kernel.call.shape, kernel.k.seq * kernel.k.stride());
        let splits = splits(s.slices(), s.seq_q);
        out.fill(0.0);
        for (slice, parts) in self.contraction.chunks_exact(splits).enumerate() {
            let range = slice * len..(slice + 1) * len;
            let of_keys =
                centred_dot(kernel.centres(slice, self.centre), &kernel.k.rows[range.clone()], &self.dk[range]);
            let apart = parts.iter().map(|&x| f64::from(x)).sum::<f64>() - of_keys;
            out[slice % s.heads] += match kernel.distance {
                Distance::Manhattan => apart / kernel.parameter(slice).powi(2),
                Distance::Squared => -apart,
            } as f32;
        }
    }

    /// Writes the tokens' gradients to where the call wants them.
    pub fn write(self, kernel: &Kernel<'_>, gradients: Gradients<'_, f32>) {
        let (s, Gradients { dq, dk, .. }) = (&kernel.call.shape, gradients);
        spread(self.dq, kernel.q.stride(), kernel.queries, s.head_dim, dq);
        let tied = dk.is_none();
        let dk = dk.unwrap_or(self.tied);
        spread(self.dk, kernel.k.stride(), kernel.keys, s.head_dim, dk);
        if tied {
            dq.iter_mut().zip(&*dk).for_each(|(dq, dk)| *dq += dk);
        }
    }
}

impl Kernel<'_> {
    /// Writes the mean of every slice's kept keys.
    fn mean_keys(&self, out: &mut [f32]) {
        out.fill(0.0);
        for (slice, out) in out.chunks_exact_mut(self.k.stride()).enumerate() {
            let count = self.keys.count(slice);
            for row in self.k.part(slice, 0..count).data.chunks_exact(self.k.stride()) {
                out.iter_mut().zip(row).for_each(|(sum, x)| *sum += x / count as f32);
            }
        }
    }

    /// What a slice's tokens are measured from: their mean, or, where that may lie far from all of them, three keys.
    fn centres<'c>(&'c self, slice: usize, means: &'c [f32]) -> [&'c [f32]; 3] {
        let stride = self.k.stride();
        match self.distance {
            Distance::Squared => [&means[slice * stride..][..stride]; 3],
            Distance::Manhattan => {
                let last = self.k.seq.max(1) - 1;
                [0, 1, 2].map(|j| self.k.part(slice, last.min(j)..last.min(j) + 1).data)
            }
        }
    }

    /// The factor on a query's sums of differences, for a square of half their slope.
    fn slope(&self, slice: usize) -> f32 {
        match self.distance {
            Distance::Manhattan => -self.rate(slice) as f32,
            Distance::Squared => (-2.0 * self.rate(slice)) as f32,
        }
    }

    /// Writes the gradients of the logarithms of a tile of similarities `g`.
    fn chain(
        &self,
        slice: usize,
        rows: Range<usize>,
        cols: &Range<usize>,
        (back, v): (&Back<'_>, Compact<'_>),
        g: &[f32],
        e: &mut [f32],
    ) {
        let (level, stride, width) = (self.call.level, padded(cols.len()), v.stride());
        let (query, key) = (slice * self.queries.seq, slice * self.keys.seq);
        let at = (query + rows.start) * width;
        let h = Rows { data: &back.h[at..at + rows.len() * width], stride: width };
        let size = Size { rows: rows.len(), cols: stride, depth: v.dim };
        multiply(level, size, h.as_left(), v.block(slice, cols.start), Store { data: &mut *e, stride });
        let columns = key + cols.start..key + cols.end;
        let of_columns = [back.factor, back.curve, back.mean].map(|x| entries(x, columns.clone()));
        level.dispatch(|| {
            let [factors, curves, means] = of_columns;
            for ((i, e), g) in rows.zip(e.chunks_exact_mut(stride)).zip(g.chunks_exact(stride)) {
                let of_row = back.row.get(query + i).copied().unwrap_or(0.0);
                let (seen, hidden) = e.split_at_mut(self.seen(slice, i, cols));
                let columns = factors.iter().zip(curves).zip(means);
                for ((e, &g), ((factor, curve), mean)) in seen.iter_mut().zip(g).zip(columns) {
                    *e = (*e * factor - of_row + curve * (g - mean)) * g;
                }
                hidden.fill(0.0);
            }
        });
    }

    /// Writes the sums of the differences of a tile to its queries, and adds them to its keys'.
    fn pull_back(&self, slice: usize, rows: Range<usize>, cols: &Range<usize>, e: &[f32], [dq, dk]: [&mut [f32]; 2]) {
        let (tokens, landmarks) = (self.q.part(slice, rows).data, self.k.part(slice, cols.clone()).data);
        let pairs = Pairs { tokens, landmarks, dim: self.q.stride(), e, stride: padded(cols.len()) };
        match self.distance {
            Distance::Manhattan => gradients(self.call.level, Manhattan, pairs, dq, dk),
            Distance::Squared => gradients(self.call.level, Squared, pairs, dq, dk),
        }
    }
}
