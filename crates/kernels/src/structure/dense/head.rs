//! One head's tensors, and how their kept rows are laid out for the tile products.
//!
//! Masks are settled here: a masked row is never loaded, so that its content can reach nothing, whatever it is.

use std::ops::Range;

use pulp::Simd;

use super::dropout::PanelDropout;
use crate::{
    Dropout, Shape,
    call::{Call, TokenRows, View},
    simd::{
        bf16::Bf16Products,
        product::{Left, Right, vectors},
    },
};

/// Channels are padded to this many, the longest vector of any instruction set.
pub(super) const LANES: usize = 16;
/// Queries whose scores are computed together: four of the longest vectors.
pub(in crate::structure) const PANEL: usize = 64;

/// `n` channels, padded to whole vectors.
pub(crate) const fn padded(n: usize) -> usize {
    n.next_multiple_of(LANES)
}

/// The part of a [`Call`] that belongs to one batch element and head.
#[derive(Clone, Copy)]
pub(in crate::structure) struct Head<'a> {
    pub q: TokenRows<'a>,
    pub k: TokenRows<'a>,
    pub v: TokenRows<'a>,
    pub keep_query: Option<&'a [bool]>,
    pub keep_key: Option<&'a [bool]>,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    slice: usize,
    causal: bool,
    dropout: Option<Dropout>,
}

impl<'a> Head<'a> {
    pub fn of(call: &Call<'a>, slice: usize) -> Self {
        let s = call.shape;
        let batch = slice / s.heads;
        Self {
            q: call.q.slice(slice),
            k: call.k.slice(slice),
            v: call.v.slice(slice),
            keep_query: call.mask.query.map(|keep| &keep[batch * s.seq_q..][..s.seq_q]),
            keep_key: call.mask.key.map(|keep| &keep[batch * s.seq_kv..][..s.seq_kv]),
            seq_q: s.seq_q,
            seq_kv: s.seq_kv,
            head_dim: s.head_dim,
            value_dim: s.value_dim,
            slice,
            causal: call.mask.causal,
            dropout: call.extras.dropout,
        }
    }

    /// The sizes, of one head.
    pub fn shape(&self) -> Shape {
        let Self { seq_q, seq_kv, head_dim, value_dim, .. } = *self;
        Shape { batch: 1, heads: 1, seq_q, seq_kv, head_dim, value_dim }
    }

    /// This head's part of a tensor shaped like `out`.
    pub fn outputs<'x>(&self, x: View<'x>) -> TokenRows<'x> {
        x.slice(self.slice)
    }

    /// This head's part of a tensor with one element per query.
    pub fn rows<'x>(&self, x: &'x [f32]) -> &'x [f32] {
        &x[self.slice * self.seq_q..][..self.seq_q]
    }

    /// `<x_i, y_i>` over the channels of query `i` of two tensors shaped like `out`; 0 where the query is masked.
    pub fn contraction(&self, i: usize, x: View<'_>, y: View<'_>) -> f64 {
        if self.keep_query.is_some_and(|keep| !keep[i]) {
            return 0.0;
        }
        dot(x.row(self.slice, i), y.row(self.slice, i))
    }

    /// [`Head::contraction`] with `x` times its factor as `products` with it read it: where it is equal to them, it takes them out exactly.
    pub fn rounded_contraction(
        &self,
        products: Bf16Products,
        i: usize,
        (x, factor): (View<'_>, f32),
        y: View<'_>,
    ) -> f64 {
        if self.keep_query.is_some_and(|keep| !keep[i]) {
            return 0.0;
        }
        let mut rounded = [0.0; 64];
        let [x, y] = [x, y].map(|x| x.row(self.slice, i).chunks(rounded.len()));
        let sums = x.zip(y).map(|(x, y)| {
            let rounded = &mut rounded[..x.len()];
            rounded.iter_mut().zip(x).for_each(|(rounded, &x)| *rounded = products.read(x * factor));
            dot(rounded, y)
        });
        sums.sum()
    }

    /// The dropout of the queries at the positions `kept`, if there is any; `buffer` takes a number per query.
    pub fn panel_dropout<'t>(&self, kept: &[u32], buffer: &'t mut [f32]) -> Option<PanelDropout<'t>> {
        self.dropout.map(|dropout| PanelDropout::new(&dropout, self.slice, kept, buffer))
    }

    /// Query `i` sees the keys below this.
    pub fn limit(&self, i: usize) -> usize {
        if self.causal { (i + 1 + self.seq_kv).saturating_sub(self.seq_q).min(self.seq_kv) } else { self.seq_kv }
    }
}

/// `<x, y>` in f64, in eight interleaved sums.
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f64 {
    let mut sums = [0.0; 8];
    let ((x, x_tail), (y, y_tail)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    for (x, y) in x.iter().zip(y) {
        for n in 0..8 {
            sums[n] += f64::from(x[n]) * f64::from(y[n]);
        }
    }
    let tail = x_tail.iter().zip(y_tail).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
    sums.iter().sum::<f64>() + tail
}

/// Writes the positions in `range` that are kept; returns them.
pub(crate) fn positions<'a>(range: Range<usize>, keep: Option<&[bool]>, buffer: &'a mut [f32]) -> &'a [u32] {
    let buffer: &mut [u32] = bytemuck::cast_slice_mut(buffer);
    let mut kept = 0;
    for i in range {
        if keep.is_none_or(|keep| keep[i]) {
            buffer[kept] = i as u32;
            kept += 1;
        }
    }
    &buffer[..kept]
}

/// Rows of a tensor as the products read them: `stride` apart, whole vectors.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
}

impl<'a> Rows<'a> {
    /// No rows.
    pub const NONE: Self = Self { data: &[], stride: 0 };

    /// The first `channels` of its rows, as tokens.
    pub fn as_tokens(self, channels: usize) -> TokenRows<'a> {
        TokenRows::strided(self.data, channels, self.stride)
    }

    /// Its rows are the rows of a product.
    pub fn as_left(self) -> Left<'a> {
        Left { data: self.data, row_stride: self.stride, depth_stride: 1 }
    }

    /// The rows `range` are the depth of a product.
    pub fn as_right(self, range: Range<usize>) -> Right<'a> {
        Right { data: &self.data[range.start * self.stride..range.end * self.stride], stride: self.stride }
    }

    /// The rows `kept` (ascending) of `tensor`: as they lie when they are contiguous whole vectors (and, to be
    /// read as `vectors`, aligned to cache lines: a vector across two lines costs two loads), else copied to `buffer`, which
    /// takes `kept.len() * padded(channels)`. Rows that lie apart are copied, too: read in place they fall into the same few cache sets.
    pub fn gather(tensor: TokenRows<'a>, kept: &[u32], vectors: bool, buffer: &'a mut [f32]) -> Self {
        let (dim, stride) = (tensor.channels, padded(tensor.channels));
        let Some((&first, &last)) = kept.first().zip(kept.last()).filter(|_| dim > 0) else {
            return Self { data: &[], stride };
        };
        let whole = stride == dim && (last - first) as usize + 1 == kept.len();
        let aligned = |data: &[f32]| data.as_ptr().addr().is_multiple_of(LANES * size_of::<f32>());
        let all = tensor.as_slice(first as usize..last as usize + 1).filter(|_| whole);
        if let Some(data) = all.filter(|data| !vectors || aligned(data)) {
            return Self { data, stride };
        }
        for (row, &i) in buffer.chunks_exact_mut(stride).zip(kept) {
            row[..dim].copy_from_slice(tensor.row(i as usize));
            row[dim..].fill(0.0);
        }
        Self { data: &buffer[..kept.len() * stride], stride }
    }

    /// The rows `kept`, copied; the `n`-th of them times `factor(n)`.
    pub fn copy(tensor: TokenRows<'_>, kept: &[u32], factor: impl Fn(usize) -> f32, buffer: &'a mut [f32]) -> Self {
        let stride = padded(tensor.channels);
        for (n, (row, &i)) in buffer.chunks_exact_mut(stride).zip(kept).enumerate() {
            let (head, pad) = row.split_at_mut(tensor.channels);
            let factor = factor(n);
            head.iter_mut().zip(tensor.row(i as usize)).for_each(|(x, &y)| *x = y * factor);
            pad.fill(0.0);
        }
        Self { data: &buffer[..kept.len() * stride], stride }
    }
}

/// Writes the rows `kept` of `tensor`, the `n`-th times `factor(n)`, as [`panels`].
pub(in crate::structure) fn transpose(
    tensor: TokenRows<'_>,
    kept: &[u32],
    factor: impl Fn(usize) -> f32,
    buffer: &mut [f32],
) {
    panels(kept.len(), tensor.channels, |n| (tensor.row(kept[n] as usize), factor(n)), buffer);
}

/// Writes `count` rows of `dim` channels, `row(n)` and the factor on it, as panels of [`PANEL`] columns: column `n % PANEL` of
/// panel `n / PANEL` is row `n`. The last panel is padded with zeros to whole vectors.
pub(super) fn panels<'r>(count: usize, dim: usize, row: impl Fn(usize) -> (&'r [f32], f32), buffer: &mut [f32]) {
    for first in (0..count).step_by(PANEL) {
        let rows = PANEL.min(count - first);
        let width = padded(rows);
        let panel = &mut buffer[first * dim..][..width * dim];
        if width > rows {
            panel.fill(0.0);
        }
        for n in 0..rows {
            let (row, factor) = row(first + n);
            panel[n..].iter_mut().step_by(width).zip(row).for_each(|(x, &y)| *x = y * factor);
        }
    }
}

/// Which pairs of a tile are visible: key `n` and query `m` iff `keys[n] < limits[m]`, and the draw keeps them where there is one.
#[derive(Clone, Copy)]
pub(in crate::structure) struct Visible<'a> {
    pub keys: &'a [u32],
    pub limits: &'a [u32],
    pub dropped_pairs: Option<PanelDropout<'a>>,
}

impl Visible<'_> {
    /// Whether all are visible.
    pub fn complete(&self) -> bool {
        self.dropped_pairs.is_none() && self.keys.last().is_none_or(|&key| key < self.limits[0])
    }

    /// `entries` of key `row` and the queries from `col` on, and `absent` for those that are not visible.
    #[inline(always)]
    pub fn show<S: Simd, const N: usize>(
        &self,
        simd: S,
        [row, col]: [usize; 2],
        mut entries: [S::f32s; N],
        absent: f32,
    ) -> [S::f32s; N] {
        let (limits, absent) = (vectors::<S, N>(bytemuck::cast_slice(self.limits), col), simd.splat_f32s(absent));
        let key = simd.splat_u32s(self.keys[row]);
        for n in 0..N {
            let seen = simd.less_than_u32s(key, simd.transmute_u32s_f32s(limits[n]));
            entries[n] = simd.select_f32s(seen, entries[n], absent);
        }
        if let Some(dropped_pairs) = &self.dropped_pairs {
            let factors = dropped_pairs.factors::<S, N>(simd, self.keys[row], col);
            for n in 0..N {
                let kept = simd.less_than_f32s(simd.splat_f32s(0.0), factors[n]);
                entries[n] = simd.select_f32s(kept, entries[n], absent);
            }
        }
        entries
    }
}
