//! A kernel that falls off with a distance, of every pair of kept tokens, and its weights in one form:
//! `W_ij = scale_i (G_ij - row_centre_i - centre_j) factor_j + bias_i` for the keys that a query sees, else 0.

use std::{f64::consts::LOG2_E, ops::Range};

use super::compact::{BLOCK, Compact, Kept, blocks, sizes};
use crate::{
    Parameter, Shape,
    call::Call,
    score::{Manhattan, Squared},
    scratch::{cut, scratch_len},
    simd::product::{Add, Left, Size, Store, multiply_add},
    structure::{
        dense::padded,
        nystrom::{
            pass::{self, Part, TOKENS, of_tokens, rows_of, share},
            tile::kernel,
        },
    },
};

/// f32 of a tile.
pub(super) const TILE: usize = TOKENS * BLOCK;

/// What the kernel falls off with.
#[derive(Clone, Copy)]
pub(super) enum Distance {
    /// `exp(-|q - k|_1 / lambda)`.
    Manhattan,
    /// `exp(-scale |q - k|^2)`.
    Squared,
}

impl Distance {
    pub fn parameter(self) -> Parameter {
        match self {
            Self::Manhattan => Parameter::Lambda,
            Self::Squared => Parameter::Scale,
        }
    }
}

/// A call, and its kept tokens without gaps.
#[derive(Clone, Copy)]
pub(super) struct Kernel<'a> {
    pub call: &'a Call<'a>,
    pub distance: Distance,
    /// The bandwidth or scale where the call gives none.
    pub configured: f64,
    pub queries: Kept<'a>,
    pub keys: Kept<'a>,
    pub q: Compact<'a>,
    pub k: Compact<'a>,
    /// How many of the kept keys each kept query sees, `[slices, seq_q]`; empty where it sees all.
    limits: &'a [u32],
}

/// What makes weights of similarities, `[slices, seq]` each, by kept token. What is empty is zero everywhere.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub scale: &'a [f32],
    pub row_centre: &'a [f32],
    pub bias: &'a [f32],
    pub factor: &'a [f32],
    pub centre: &'a [f32],
}

/// Rows and blocks of queries, keys and values; how many keys each query sees.
fn load_sizes(s: &Shape) -> [usize; 7] {
    let [q, q_blocks] = sizes(s.slices(), s.seq_q, s.head_dim);
    let [k, k_blocks] = sizes(s.slices(), s.seq_kv, s.head_dim);
    let [v, v_blocks] = sizes(s.slices(), s.seq_kv, s.value_dim);
    [q, q_blocks, k, k_blocks, v, v_blocks, s.slices() * s.seq_q]
}

/// f32 of working memory of [`Kernel::load`] and of passes over queries or keys with `memory` each.
pub(super) fn work(s: &Shape, memory: usize) -> usize {
    let of_pass = pass::work(s.slices(), s.seq_q, memory).max(pass::work(s.slices(), s.seq_kv, memory));
    scratch_len(load_sizes(s)) + of_pass
}

/// Some entries of a vector of columns, or zeros where there is none.
pub(super) fn entries(x: &[f32], range: Range<usize>) -> &[f32] {
    static ZEROS: [f32; BLOCK] = [0.0; BLOCK];
    if x.is_empty() { &ZEROS[..range.len()] } else { &x[range] }
}

impl<'a> Kernel<'a> {
    /// Gathers the kept queries, keys and values of a call; what is left of `work` is the last result.
    pub fn load(
        call: &'a Call<'a>,
        distance: Distance,
        configured: f64,
        work: &'a mut [f32],
    ) -> (Self, Compact<'a>, &'a mut [f32]) {
        let s = &call.shape;
        let ([q, q_blocks, k, k_blocks, v, v_blocks, limits], work) = cut(work, load_sizes(s));
        let queries = Kept { mask: call.mask.query, heads: s.heads, seq: s.seq_q };
        let keys = Kept { mask: call.mask.key, heads: s.heads, seq: s.seq_kv };
        let q = Compact::of(call.q, queries, [q, q_blocks]);
        let k = Compact::of(call.k, keys, [k, k_blocks]);
        let v = Compact::of(call.v, keys, [v, v_blocks]);
        let mut kernel = Self { call, distance, configured, queries, keys, q, k, limits: &[] };
        if call.mask.causal {
            let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
            limits.chunks_exact_mut(s.seq_q).enumerate().for_each(|(slice, limits)| kernel.count_past(slice, limits));
            kernel.limits = limits;
        }
        (kernel, v, work)
    }

    /// Writes, for the kept queries of a slice, how many of the kept keys are not later.
    fn count_past(&self, slice: usize, out: &mut [u32]) {
        let shape = &self.call.shape;
        let mut keys = self.keys.tokens(slice).peekable();
        let mut seen = 0;
        for (out, query) in out.iter_mut().zip(self.queries.tokens(slice)) {
            while keys.next_if(|&key| key + shape.seq_q <= query + shape.seq_kv).is_some() {
                seen += 1;
            }
            *out = seen;
        }
    }

    /// Writes for every kept query `of(keys that it sees)`.
    pub fn fill_rows(&self, out: &mut [f32], of: impl Fn(usize) -> f32) {
        for (slice, out) in out.chunks_exact_mut(self.queries.seq).enumerate() {
            let all = self.keys.count(slice);
            let limits = self.limits.get(slice * self.queries.seq..).unwrap_or_default();
            for (n, out) in out.iter_mut().enumerate() {
                *out = of(limits.get(n).map_or(all, |&limit| limit as usize));
            }
        }
    }

    /// How many of some columns row `i` of a slice sees.
    pub fn seen(&self, slice: usize, i: usize, cols: &Range<usize>) -> usize {
        let limit = self.limits.get(slice * self.queries.seq + i).map_or(cols.end, |&limit| limit as usize);
        limit.clamp(cols.start, cols.end) - cols.start
    }

    /// Queries for keys and keys for queries, all of which see each other.
    pub fn turned(&self) -> Self {
        let Self { queries, keys, q, k, .. } = *self;
        Self { queries: keys, keys: queries, q: k, k: q, limits: &[], ..*self }
    }

    /// The bandwidth or scale of a slice.
    pub fn parameter(&self, slice: usize) -> f64 {
        let given = self.call.extras.get(self.distance.parameter());
        given.map_or(self.configured, |x| f64::from(x[slice % self.call.shape.heads]))
    }

    /// By what the distance is multiplied.
    pub fn rate(&self, slice: usize) -> f64 {
        match self.distance {
            Distance::Manhattan => 1.0 / self.parameter(slice),
            Distance::Squared => self.parameter(slice),
        }
    }

    /// Calls `visit(rows, columns, similarities)` for every tile of a part's rows; rows of a tile are `padded(columns)` apart.
    pub fn sweep(&self, part: &Part, tile: &mut [f32], mut visit: impl FnMut(Range<usize>, Range<usize>, &mut [f32])) {
        let rows = self.rows(part);
        for from in rows.clone().step_by(TOKENS) {
            let rows = from..(from + TOKENS).min(rows.end);
            for cols in blocks(self.keys.count(part.slice)) {
                let tile = &mut tile[..rows.len() * padded(cols.len())];
                self.tile(part.slice, rows.clone(), &cols, tile);
                visit(rows.clone(), cols, tile);
            }
        }
    }

    /// The part's kept rows.
    pub fn rows(&self, part: &Part) -> Range<usize> {
        part.tokens.start..part.tokens.end.min(self.queries.count(part.slice)).max(part.tokens.start)
    }

    fn tile(&self, slice: usize, rows: Range<usize>, cols: &Range<usize>, out: &mut [f32]) {
        let (level, rate) = (self.call.level, (LOG2_E * self.rate(slice)) as f32);
        let size = Size { rows: rows.len(), cols: padded(cols.len()), depth: self.q.dim };
        let (left, right) = (self.q.part(slice, rows), self.k.block(slice, cols.start));
        let out = Store { data: out, stride: size.cols };
        match self.distance {
            Distance::Manhattan => kernel(level, (Manhattan, rate), left.as_left(), size, right, out),
            Distance::Squared => kernel(level, (Squared, rate), left.as_left(), size, right, out),
        }
    }

    /// Makes weights of the similarities of a tile.
    pub fn weigh(&self, slice: usize, rows: Range<usize>, cols: &Range<usize>, weights: &Weights<'_>, g: &mut [f32]) {
        let (query, key) = (slice * self.queries.seq, slice * self.keys.seq);
        let columns = key + cols.start..key + cols.end;
        let (factors, centres) = (&weights.factor[columns.clone()], entries(weights.centre, columns));
        self.call.level.dispatch(|| {
            for (i, row) in rows.zip(g.chunks_exact_mut(padded(cols.len()))) {
                let (seen, hidden) = row.split_at_mut(self.seen(slice, i, cols));
                let of_row = |x: &[f32]| x.get(query + i).copied().unwrap_or(0.0);
                let [scale, centre, bias] = [weights.scale, weights.row_centre, weights.bias].map(of_row);
                for ((x, factor), of_column) in seen.iter_mut().zip(factors).zip(centres) {
                    *x = scale * (*x - centre - of_column) * factor + bias;
                }
                hidden.fill(0.0);
            }
        });
    }

    /// Writes `W v`, by kept query.
    pub fn apply(&self, weights: &Weights<'_>, v: Compact<'_>, out: &mut [f32], work: &mut [f32]) {
        let (slices, seq, width) = (self.call.shape.slices(), self.queries.seq, v.stride());
        let items = of_tokens(slices, seq).zip(rows_of(out, slices, seq, width));
        share(items, work, TILE, |(part, out), tile| {
            out.fill(0.0);
            self.sweep(&part, tile, |rows, cols, g| {
                self.weigh(part.slice, rows.clone(), &cols, weights, g);
                let left = Left { data: g, row_stride: padded(cols.len()), depth_stride: 1 };
                let size = Size { rows: rows.len(), cols: width, depth: cols.len() };
                let v = v.part(part.slice, cols.clone());
                let sums = Add { data: &mut out[part.within(&rows, width)], stride: width };
                multiply_add(self.call.level, size, left, v.as_right(0..cols.len()), sums);
            });
        });
    }

    /// Writes the sum of every row over the columns that it sees. (A mean from the first entry on has few digits where that is by far the
    /// largest, as that of a token with itself.)
    pub fn row_sums(&self, out: &mut [f32], work: &mut [f32]) {
        let (slices, seq) = (self.call.shape.slices(), self.queries.seq);
        share(of_tokens(slices, seq).zip(rows_of(out, slices, seq, 1)), work, TILE, |(part, out), tile| {
            out.fill(0.0);
            self.sweep(&part, tile, |rows, cols, g| {
                for (i, row) in rows.zip(g.chunks_exact(padded(cols.len()))) {
                    out[i - part.tokens.start] += row[..self.seen(part.slice, i, &cols)].iter().sum::<f32>();
                }
            });
        });
    }

    /// Writes the mean of every row over the columns that it sees, and to `squares`, where that has room, the sum of the squares
    /// about it.
    pub fn moments(&self, means: &mut [f32], squares: &mut [f32], work: &mut [f32]) {
        let (slices, seq, width) = (self.call.shape.slices(), self.queries.seq, usize::from(!squares.is_empty()));
        let items =
            of_tokens(slices, seq).zip(rows_of(means, slices, seq, 1)).zip(rows_of(squares, slices, seq, width));
        share(items, work, TILE, |((part, means), squares), tile| {
            means.fill(0.0);
            squares.fill(0.0);
            self.sweep(&part, tile, |rows, cols, g| {
                for (i, row) in rows.zip(g.chunks_exact(padded(cols.len()))) {
                    let (row, at) = (&row[..self.seen(part.slice, i, &cols)], i - part.tokens.start);
                    if !row.is_empty() {
                        add_moments((&mut means[at], squares.get_mut(at)), cols.start, row);
                    }
                }
            });
        });
    }
}

/// Takes `x` into the mean of `count` numbers and the sum of their squares about it. Numbers that are all equal are their mean to the
/// last bit, of which whitening would make something otherwise.
fn add_moments((mean, square): (&mut f32, Option<&mut f32>), count: usize, x: &[f32]) {
    let (n, old) = (x.len() as f32, count as f32);
    let of_x = x[0] + x.iter().map(|other| other - x[0]).sum::<f32>() / n;
    let shift = of_x - *mean;
    *mean += shift * (n / (n + old));
    if let Some(square) = square {
        *square += x.iter().map(|x| (x - of_x) * (x - of_x)).sum::<f32>() + shift * shift * n * old / (n + old);
    }
}
