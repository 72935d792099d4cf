//! The backward passes over tokens: gradients of keys and values, of queries, or of both where they are the same.

use super::{
    backward::Kept,
    forward::Heads,
    layout::{Saved, Sizes, buffers},
    operator::{Core, Head, Loaded, Side, TileBuffers},
    pairs::{factors, pull_back},
    pass::{Part, TOKENS, of_tokens, rows_of, share},
    pivot::{Pivot, Room},
    row_sums::ROW,
    tile::{Zip, scatter, zip},
    variance::Variances,
};
use crate::{
    linalg::wide::WIDE,
    score::{contract::MOST_PARAMETERS, tiles},
    simd::product::{Add, Left, Right, Size, Store, multiply, multiply_add},
    structure::dense::{Rows, dot},
};

buffers! {
    /// A part's sums over tokens: gradients of the landmarks, of the score's parameters, and `C^T diag(gamma) C`.
    OfTokens(s) {
        du: s.landmarks * s.dp,
        parameters: MOST_PARAMETERS,
        gamma: Sizes::only(s.whitens, WIDE * s.landmarks * s.landmarks),
        /// Parts of `E` and `F` of [`super::pivot`].
        e: Sizes::only(s.has_query_mean(), s.mp),
        f: Sizes::only(s.has_query_mean(), s.mp),
    }

    /// What a tile of gradients takes.
    SideBuffers(s) {
        /// Gradients of the affinities, and of the tokens.
        dc: TOKENS * s.mp,
        dx: TOKENS * s.dp,
        /// Affinities without their mean; what [`super::pivot`] takes beside.
        a: Sizes::only(s.has_query_mean(), TOKENS * s.mp),
        images: Sizes::only(s.has_query_mean(), TOKENS * s.dp),
        /// Rows of values, of their gradients, and of output gradients.
        values: TOKENS * s.vp,
        dvalues: TOKENS * s.vp,
        outputs: TOKENS * s.vp,
        /// Gradients of the columns' variances.
        gamma: TOKENS,
    }
}

/// A pass over tokens that are queries, keys, or both.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub core: &'a Core<'a>,
    pub heads: Heads<'a>,
    /// On the values, where columns are divided by deviations.
    pub factors: &'a [f32],
    pub dout: &'a [f32],
    /// Of rows that are divided by their sums.
    pub rows: &'a [f32],
    pub query: bool,
    pub key: bool,
}

/// What a part reads.
struct Of<'h> {
    head: &'h Head<'h>,
    saved: &'h Saved<&'h [f32]>,
    kept: Kept<&'h [f32]>,
    part: &'h Part,
}

impl Tokens<'_> {
    /// Writes the gradients of tokens and, of keys, of values; leaves sums by part in `partial`.
    pub fn run(&self, kept: &[f32], partial: &mut [f32], (dx, dv): (&mut [f32], Option<&mut [f32]>), work: &mut [f32]) {
        let (core, sizes) = (self.core, &self.core.sizes);
        let side = if self.key { Side::Key } else { Side::Query };
        let (slices, seq) = (sizes.shape.slices(), core.seq(side));
        let dv = (dv.unwrap_or_default(), if self.key { sizes.shape.value_dim } else { 0 });
        let items = of_tokens(slices, seq).zip(partial.chunks_mut(OfTokens::scratch_len(sizes)));
        let items = items.zip(rows_of(dx, slices, seq, sizes.shape.head_dim)).zip(rows_of(dv.0, slices, seq, dv.1));
        let memory = TileBuffers::scratch_len(sizes) + SideBuffers::scratch_len(sizes) + Variances::scratch_len(sizes);
        let len = Kept::scratch_len(sizes);
        share(items, work, memory, |(((part, sums), dx), dv), memory| {
            let kept = Kept::of(sizes, &kept[part.slice * len..][..len]);
            core.with(self.heads, part.slice, |head, saved| {
                let of = Of { head, saved, kept, part: &part };
                self.part(&of, side, OfTokens::cut(sizes, sums).0, [dx, dv], memory);
            });
        });
    }

    fn part(
        &self,
        of: &Of<'_>,
        side: Side,
        mut sums: OfTokens<&mut [f32]>,
        [dx, dv]: [&mut [f32]; 2],
        memory: &mut [f32],
    ) {
        let (core, sizes) = (self.core, &self.core.sizes);
        [&mut *sums.du, &mut *sums.gamma, &mut *sums.e, &mut *sums.f].into_iter().for_each(|x| x.fill(0.0));
        let pivot = self.pivot(of);
        let mut parameters = [0.0; MOST_PARAMETERS];
        let (mut buffers, memory) = SideBuffers::cut(sizes, memory);
        let (mut variances, memory) = Variances::cut(sizes, memory);
        if self.key {
            core.read_form(of.head.slice, of.saved, &mut variances);
        }
        for range in of.part.tiles() {
            let mut loaded = core.load(of.head, side, range.clone(), true, TileBuffers::cut(sizes, memory).0);
            if self.key {
                self.keys(of, &mut loaded, &mut buffers);
                if sizes.whitens {
                    let into = (&mut *buffers.dc, &mut *sums.gamma);
                    core.of_variances(&loaded, &mut variances, buffers.gamma, into);
                }
                let (rows, dim) = (of.part.within(&range, sizes.shape.value_dim), sizes.shape.value_dim);
                scatter(buffers.dvalues, sizes.vp, loaded.kept, range.start, &mut dv[rows], dim);
            }
            if self.query {
                self.queries(of, &loaded, &mut buffers);
            }
            if let Some(pivot) = &pivot {
                let room = Room { dc: &mut *buffers.dc, other: &mut *buffers.a, images: &mut *buffers.images };
                let of = (of.head, &loaded, pivot);
                core.differentiate_from(of, room, &mut sums, buffers.dx, &mut parameters);
            } else {
                core.differentiate(of.head, &loaded, buffers.dc, (&mut *sums.du, &mut *buffers.dx), &mut parameters);
            }
            let rows = of.part.within(&range, sizes.shape.head_dim);
            core.write_tokens(of.head, side, &loaded, buffers.dx, range.start, &mut dx[rows]);
        }
        sums.parameters.iter_mut().zip(parameters).for_each(|(sum, x)| *sum = x as f32);
        if self.key {
            core.filter().add(of.part, self.dout, true, dv);
        }
    }

    /// Writes `dV = f (Ck - mean) dB`, with the share of the bias, to the rows of the values' gradients, and
    /// `dC = (f V - mean) dB^T`, but for the share of the variances.
    fn keys(&self, of: &Of<'_>, loaded: &mut Loaded<'_>, buffers: &mut SideBuffers<&mut [f32]>) {
        let (core, sizes, level) = (self.core, &self.core.sizes, self.core.call.level);
        let (slice, vp, stride, count) = (of.head.slice, sizes.vp, loaded.stride, loaded.count());
        if sizes.per_query {
            zip(level, loaded.c, &of.saved.key_mean[..stride], Zip::Subtract);
        }
        loaded.tile().spread(level, of.kept.db, vp, buffers.dvalues);
        if sizes.per_query {
            zip(level, loaded.c, &of.saved.key_mean[..stride], Zip::Add);
        }
        let SideBuffers { dc, dvalues, values, outputs, gamma, .. } = buffers;
        let v = core.part(core.call.v.dense(), Side::Key, slice);
        let mut rows = core.rows(v, loaded.kept, (1.0, false), values);
        let scale = core.value_factor(slice);
        if scale != 1.0 || core.whitened().is_some() {
            let keys = core.kept(Side::Key, slice).max(1) as f32;
            let bias = if sizes.biased { 1.0 / keys } else { 0.0 };
            let factors = self.factors.get(slice * sizes.shape.seq_kv..).filter(|_| sizes.whitens);
            for (n, &j) in loaded.kept.iter().enumerate() {
                let factor = factors.map_or(scale as f32, |factors| factors[j as usize]);
                let (dv, v) = (&mut dvalues[n * vp..][..vp], &rows.data[n * vp..][..vp]);
                gamma[n] = (-0.5 * f64::from(factor).powi(3) / (scale * scale) * dot(dv, v)) as f32;
                dv.iter_mut().zip(of.kept.g_sum).for_each(|(x, g)| *x = factor * *x + bias * g);
                let weighted = outputs[n * vp..][..vp].iter_mut().zip(v).zip(of.saved.value_mean);
                weighted.for_each(|((x, v), mean)| *x = factor * v - mean);
            }
            rows = Rows { data: &outputs[..count * vp], stride: vp };
        }
        let size = Size { rows: count, cols: stride, depth: sizes.channels() };
        let right = Right { data: of.kept.db_across, stride: sizes.mp };
        multiply(level, size, rows.as_left(), right, Store { data: dc, stride });
        if sizes.token_degrees {
            zip(level, &mut dc[..count * stride], &of.kept.degrees[..stride], Zip::Add);
        }
    }

    /// Writes (or, of tokens that are keys too, adds) `dC = (G - mean) T^T + (2 / n) (C - mean) X Gamma X`.
    fn queries(&self, of: &Of<'_>, loaded: &Loaded<'_>, buffers: &mut SideBuffers<&mut [f32]>) {
        let (core, sizes, level) = (self.core, &self.core.sizes, self.core.call.level);
        let (stride, count, slice) = (loaded.stride, loaded.count(), of.head.slice);
        let SideBuffers { dc, a, outputs, .. } = buffers;
        let share = 1.0 / core.kept(Side::Query, slice).max(1) as f32;
        let mean = sizes.per_key.then_some((of.kept.g_sum, share));
        let rows = if sizes.by_row { self.rows_of(of.part) } else { &[] };
        let dout = core.part(self.dout, Side::Query, slice);
        let g = core.gradient_rows(loaded, of.part, (dout, rows), mean, outputs);
        let size = Size { rows: count, cols: stride, depth: sizes.channels() };
        let right = Right { data: of.kept.t_across, stride: sizes.mp };
        if self.key {
            multiply_add(level, size, g.as_left(), right, Add { data: dc, stride });
        } else {
            multiply(level, size, g.as_left(), right, Store { data: dc, stride });
        }
        if sizes.by_row {
            core.floor_of_affinities(loaded, of.part, of.saved, rows, dc);
        }
        if sizes.whitens {
            let centred = &mut a[..count * stride];
            centred.copy_from_slice(&loaded.c[..count * stride]);
            core.less_query_mean(of.saved, centred, stride);
            let size = Size { rows: count, cols: stride, depth: loaded.landmarks };
            let left = Left { data: &*centred, row_stride: stride, depth_stride: 1 };
            let right = Right { data: of.kept.spread, stride: sizes.mp };
            multiply_add(level, size, left, right, Add { data: dc, stride });
        }
    }

    /// The pivot of close queries. What flows back to tokens that are keys too adds up to nothing known.
    fn pivot<'h>(&self, of: &Of<'h>) -> Option<Pivot<&'h [f32]>> {
        let sizes = &self.core.sizes;
        let pivot = (!self.key && sizes.has_query_mean()).then(|| Pivot::of(sizes, of.kept.pivot));
        pivot.filter(|pivot| pivot.used[0] > 0.0)
    }

    /// What belongs to the rows of a part of the queries.
    fn rows_of(&self, part: &Part) -> &[f32] {
        &self.rows[part.rows(self.core.call.shape.seq_q, ROW)]
    }
}

impl Core<'_> {
    /// Turns `dc`, the gradient of a tile of affinities, into those of the tokens, written to `dx`, of the landmarks and of the
    /// score's parameters, added; the first two but for [`factors`].
    fn differentiate(
        &self,
        head: &Head<'_>,
        loaded: &Loaded<'_>,
        dc: &mut [f32],
        (du, dx): (&mut [f32], &mut [f32]),
        parameters: &mut [f64; MOST_PARAMETERS],
    ) {
        let (level, stride, rows) = (self.call.level, loaded.stride, loaded.count());
        let e = &mut dc[..rows * stride];
        let by = if head.score.is_log() { Some(&loaded.c[..rows * stride]) } else { None };
        if let Some(c) = by {
            zip(level, e, c, Zip::Multiply);
        } else if let Some(factors) = head.factors {
            zip(level, e, &factors[..stride], Zip::Multiply);
        }
        let tile = tiles::Tile { data: e, stride, rows, width: stride };
        let tokens = (
            &loaded.tokens.data[..rows * self.sizes.dp],
            &head.landmarks.rows[..head.count * self.sizes.dp],
            self.sizes.dp,
        );
        pull_back(level, head.score, loaded.terms, tile, tokens, (&mut dx[..rows * self.sizes.dp], du), parameters);
    }

    /// Writes the tokens' gradients, of their images in `dx`, to their positions, zeros to the masked ones.
    fn write_tokens(
        &self,
        head: &Head<'_>,
        side: Side,
        loaded: &Loaded<'_>,
        dx: &mut [f32],
        start: usize,
        out: &mut [f32],
    ) {
        let (sizes, d) = (&self.sizes, self.call.shape.head_dim);
        let dx = &mut dx[..loaded.count() * sizes.dp];
        let [factor, _] = factors(head.score.term());
        dx.iter_mut().for_each(|x| *x *= factor);
        if !sizes.mapped {
            return scatter(dx, sizes.dp, loaded.kept, start, out, d);
        }
        let x = if side == Side::Query { self.call.q.dense() } else { self.call.k.dense() };
        let x = &x[head.slice * self.seq(side) * d..][..self.seq(side) * d];
        out.fill(0.0);
        for (dx, &i) in dx.chunks_exact(sizes.dp).zip(loaded.kept) {
            let row = &x[i as usize * d..][..d];
            self.map.pull_back(row, dx, &mut out[(i as usize - start) * d..][..d]);
        }
    }
}
