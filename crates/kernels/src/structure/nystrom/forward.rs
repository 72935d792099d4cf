//! Moments of the queries' affinities, then keys and values gathered into `B = Ck^T V`, then `out = Cq T` with `T = X B`.

use super::{
    layout::{LandmarkRows, Saved, Sizes, buffers},
    moments::Moments,
    operator::{Core, Head, Loaded, Side, TileBuffers},
    pass::{self, Part, TOKENS, of_tokens, rows_of, share, splits},
    prepare::place_all,
    tile::{Zip, scatter, zip},
};
use crate::{
    Result,
    linalg::wide,
    scratch::{cut, scratch_len},
    simd::product::{Left, Right, Size, Store, multiply},
    structure::dense::{Rows, dot},
};

/// A row sum smaller than this, of what it is summed of, is rounding.
const LEAST_ROW_SUM: f64 = 1e-6;

buffers! {
    /// A part's sums over keys: moments of affinities and weighted values, the sums of the values and of the affinities.
    Gathered(s) {
        moments: Moments::len(s.mp, s.vp),
        values: s.vp,
        degrees: s.mp,
    }

    /// What gathering a tile takes.
    GatherBuffers(s) {
        c_mean: s.mp,
        v_mean: s.vp,
        /// Affinities times the inverse, and that times the covariance.
        a: Sizes::only(s.whitens, TOKENS * s.mp),
        b: Sizes::only(s.whitens, TOKENS * s.mp),
        values: TOKENS * s.vp,
        weighted: TOKENS * s.vp,
    }
}

/// What passes over all slices read: landmarks, and what has been saved.
#[derive(Clone, Copy)]
pub(super) struct Heads<'h> {
    pub landmarks: &'h [f32],
    pub saved: &'h [f32],
}

/// All slices' landmarks; all parts' sums.
fn shared(s: &Sizes) -> [usize; 2] {
    let (slices, shape) = (s.shape.slices(), &s.shape);
    let of_queries = if s.whitens || s.per_key { splits(slices, shape.seq_q) * Moments::len(s.mp, s.mp) } else { 0 };
    let of_keys = splits(slices, shape.seq_kv) * Gathered::scratch_len(s);
    [slices * LandmarkRows::scratch_len(s), slices * of_queries.max(of_keys)]
}

/// f32 of scratch of [`Core::forward`].
pub(super) fn work(s: &Sizes, prepare: usize) -> usize {
    let (slices, shape) = (s.shape.slices(), &s.shape);
    let tile = TileBuffers::scratch_len(s);
    let parts = [
        pass::work(slices, 1, prepare),
        pass::work(slices, 1, wide::product_work(s.landmarks, s.vp)),
        pass::work(slices, shape.seq_q, tile + scratch_len([s.mp, s.mp])),
        pass::work(slices, shape.seq_kv, tile + GatherBuffers::scratch_len(s)),
        pass::work(slices, shape.seq_q, tile + scratch_len([TOKENS * s.vp])),
    ];
    scratch_len(shared(s)) + parts.into_iter().max().unwrap_or(0)
}

impl Core<'_> {
    /// Writes `out`, and what the backward pass needs of every slice.
    pub fn forward(&self, out: &mut [f32], stats: &mut [f32], work: &mut [f32]) -> Result<()> {
        let ([landmarks, partial], work) = cut(work, shared(&self.sizes));
        let (saved, factors) = stats.split_at_mut(self.sizes.heads());
        self.prepare(saved, landmarks, work)?;
        self.moments(landmarks, saved, partial, work);
        self.gather(false, landmarks, saved, factors, partial, work);
        self.apply(Heads { landmarks, saved }, out, work);
        Ok(())
    }

    /// As [`Core::forward`], of a call whose landmarks and statistics `stats` has, with other values. Without `out`, that is not written.
    pub fn again(&self, out: Option<&mut [f32]>, stats: &mut [f32], work: &mut [f32]) {
        let ([landmarks, partial], work) = cut(work, shared(&self.sizes));
        place_all(self, stats, landmarks, work);
        let (saved, factors) = stats.split_at_mut(self.sizes.heads());
        self.gather(true, landmarks, saved, factors, partial, work);
        if let Some(out) = out {
            self.apply(Heads { landmarks, saved }, out, work);
        }
    }

    /// The covariance of the rows of `Cq`, and their mean, where they are needed.
    fn moments(&self, landmarks: &[f32], saved: &mut [f32], partial: &mut [f32], work: &mut [f32]) {
        let (sizes, slices, seq) = (&self.sizes, self.call.shape.slices(), self.call.shape.seq_q);
        if !(sizes.whitens || sizes.per_key) {
            return;
        }
        let (mp, len) = (sizes.mp, Moments::len(sizes.mp, sizes.mp));
        let heads = Heads { landmarks, saved };
        let memory = TileBuffers::scratch_len(sizes) + scratch_len([mp, mp]);
        share(of_tokens(slices, seq).zip(partial.chunks_mut(len)), work, memory, |(part, sums), memory| {
            let ([first, second], memory) = cut(memory, [mp, mp]);
            let mut sum = Moments::new(sums, mp, mp);
            sum.clear();
            self.with(heads, part.slice, |head, _| {
                for range in part.tiles() {
                    let (buffers, _) = TileBuffers::cut(sizes, memory);
                    let loaded = self.load(head, Side::Query, range, false, buffers);
                    sum.add_columns(self.call.level, loaded.c, loaded.stride, [&mut *first, &mut *second]);
                }
            });
        });
        let splits = splits(slices, seq);
        let items =
            saved.chunks_mut(Saved::scratch_len(sizes)).zip(partial.chunks_mut(splits * len)).enumerate().take(slices);
        share(items, work, 0, |(slice, (saved, sums)), _| {
            let (saved, _) = Saved::cut(sizes, saved);
            let sum = merged(sums, len, |part| Moments::new(part, mp, mp));
            let queries = self.kept(Side::Query, slice).max(1) as f32;
            saved.query_mean.copy_from_slice(sum.x);
            saved.covariance.iter_mut().zip(&*sum.cross).for_each(|(s, x)| *s = x / queries);
        });
    }

    /// Calls `f` with a slice and what it has saved.
    pub fn with<R>(&self, heads: Heads<'_>, slice: usize, f: impl FnOnce(&Head<'_>, &Saved<&[f32]>) -> R) -> R {
        let saved = self.saved(heads.saved, slice);
        self.with_head(slice, heads.landmarks, saved.column_factors, |head| f(head, &saved))
    }

    /// Gathers the keys' affinities and the values into `B`; then `T`, means and bias. Writes the factors on the values, unless
    /// they are `known`.
    fn gather(
        &self,
        known: bool,
        landmarks: &[f32],
        saved: &mut [f32],
        factors: &mut [f32],
        partial: &mut [f32],
        work: &mut [f32],
    ) {
        let (sizes, slices, seq) = (&self.sizes, self.call.shape.slices(), self.call.shape.seq_kv);
        let len = Gathered::scratch_len(sizes);
        let heads = Heads { landmarks, saved: &*saved };
        let items = of_tokens(slices, seq).zip(partial.chunks_mut(len));
        let items = items.zip(rows_of(factors, slices, seq, usize::from(sizes.whitens)));
        let memory = TileBuffers::scratch_len(sizes) + GatherBuffers::scratch_len(sizes);
        share(items, work, memory, |((part, sums), factors), memory| {
            self.with(heads, part.slice, |head, saved| {
                self.gather_part(head, saved, (&part, known), sums, factors, memory)
            });
        });
        let splits = splits(slices, seq);
        let items =
            saved.chunks_mut(Saved::scratch_len(sizes)).zip(partial.chunks_mut(splits * len)).enumerate().take(slices);
        let memory = wide::product_work(sizes.landmarks, sizes.vp);
        share(items, work, memory, |(slice, (saved, sums)), memory| {
            self.close_gather(slice, Saved::cut(sizes, saved).0, sums, memory);
        });
    }

    fn gather_part(
        &self,
        head: &Head<'_>,
        saved: &Saved<&[f32]>,
        (part, known): (&Part, bool),
        sums: &mut [f32],
        factors: &mut [f32],
        memory: &mut [f32],
    ) {
        let (sizes, level, vp) = (&self.sizes, self.call.level, self.sizes.vp);
        let (gathered, _) = Gathered::cut(sizes, sums);
        let mut sum = Moments::new(gathered.moments, sizes.mp, vp);
        sum.clear();
        gathered.values.fill(0.0);
        gathered.degrees.fill(0.0);
        if !known {
            factors.fill(0.0);
        }
        let (buffers, memory) = GatherBuffers::cut(sizes, memory);
        let (x, scale) = (self.part(self.call.v.dense(), Side::Key, head.slice), self.value_factor(head.slice));
        let plain = scale == 1.0 && !sizes.whitens && !sizes.per_query;
        for range in part.tiles() {
            let loaded = self.load(head, Side::Key, range, false, TileBuffers::cut(sizes, memory).0);
            let rows = self.rows(x, loaded.kept, (1.0, plain), buffers.values);
            if sizes.whitens && !known {
                self.deviations(
                    &loaded,
                    saved,
                    [&mut *buffers.a, &mut *buffers.b],
                    (part.tokens.start, &mut *factors),
                    scale,
                );
            }
            if sizes.biased {
                for row in rows.data.chunks_exact(vp) {
                    gathered.values.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
                }
            }
            if sizes.token_degrees {
                loaded.tile().add_columns(level, gathered.degrees);
            }
            if plain {
                loaded.tile().gather(level, rows, sum.cross);
                continue;
            }
            let weighted = &mut buffers.weighted[..loaded.count() * vp];
            for ((weighted, v), &j) in weighted.chunks_exact_mut(vp).zip(rows.data.chunks_exact(vp)).zip(loaded.kept) {
                let factor = factors.get(j as usize - part.tokens.start).copied().unwrap_or(scale as f32);
                weighted.iter_mut().zip(v).for_each(|(w, v)| *w = factor * v);
            }
            if sizes.per_query {
                let means = [&mut *buffers.c_mean, &mut *buffers.v_mean];
                sum.add_rows(level, [loaded.c, weighted], [loaded.stride, vp], means);
            } else {
                loaded.tile().gather(level, Rows { data: weighted, stride: vp }, sum.cross);
            }
        }
    }

    /// Writes the values' factors over the standard deviations of their columns, the roots of `<a, b> + eps` with `a = C X` and
    /// `b = a S`; the first factor is that of token `start`.
    fn deviations(
        &self,
        loaded: &Loaded<'_>,
        saved: &Saved<&[f32]>,
        [a, b]: [&mut [f32]; 2],
        (start, factors): (usize, &mut [f32]),
        scale: f64,
    ) {
        self.whiten(loaded, saved, a, b);
        let eps = self.whitened().map_or(0.0, |w| w.whiten_eps);
        let rows = a.chunks_exact(loaded.stride).zip(b.chunks_exact(loaded.stride));
        for ((a, b), &j) in rows.zip(loaded.kept) {
            let variance = dot(&a[..loaded.landmarks], &b[..loaded.landmarks]).max(0.0);
            factors[j as usize - start] = scale as f32 * (variance + eps).powf(-0.5) as f32;
        }
    }

    /// Writes `a = C X` and `b = a S`.
    pub fn whiten(&self, loaded: &Loaded<'_>, saved: &Saved<&[f32]>, a: &mut [f32], b: &mut [f32]) {
        let (level, mp, stride) = (self.call.level, self.sizes.mp, loaded.stride);
        let size = Size { rows: loaded.count(), cols: stride, depth: loaded.landmarks };
        let left = |data| Left { data, row_stride: stride, depth_stride: 1 };
        let right = |data| Right { data, stride: mp };
        multiply(level, size, left(&*loaded.c), right(saved.high), Store { data: &mut *a, stride });
        multiply(level, size, left(&*a), right(saved.covariance), Store { data: b, stride });
    }

    /// `B`, the means, the bias, the tokens' degrees, and `T = c X c B`.
    fn close_gather(&self, slice: usize, saved: Saved<&mut [f32]>, sums: &mut [f32], memory: &mut [f32]) {
        let (sizes, len) = (&self.sizes, Gathered::scratch_len(&self.sizes));
        let keys = self.kept(Side::Key, slice).max(1) as f32;
        saved.b.fill(0.0);
        saved.bias.fill(0.0);
        if sizes.biased {
            for part in sums.chunks_exact(len) {
                let values = Gathered::of(sizes, part).values;
                saved.bias.iter_mut().zip(values).for_each(|(bias, sum)| *bias += sum / keys);
            }
        }
        let moments = |part| Moments::new(Gathered::cut(sizes, part).0.moments, sizes.mp, sizes.vp);
        if sizes.per_query {
            let sum = merged(sums, len, moments);
            saved.key_mean.copy_from_slice(sum.x);
            saved.value_mean.copy_from_slice(sum.y);
            saved.b.copy_from_slice(&sum.cross[..saved.b.len()]);
        } else {
            for part in sums.chunks_exact_mut(len) {
                saved.b.iter_mut().zip(&*moments(part).cross).for_each(|(b, x)| *b += x);
            }
        }
        if sizes.token_degrees {
            saved.degrees.fill(0.0);
            for part in sums.chunks_exact(len) {
                let degrees = Gathered::of(sizes, part).degrees;
                saved.degrees.iter_mut().zip(degrees).for_each(|(sum, x)| *sum += x);
            }
            // Those of landmarks that count as one are the sum's part that one of them has.
            for ((c, degree), &factor) in saved.c.iter_mut().zip(&*saved.degrees).zip(&*saved.column_factors) {
                *c = if factor > 0.0 { (degree / factor).max(1e-30).powf(-0.5) } else { 1.0 };
            }
        }
        self.times_inverse(slice, [saved.high, saved.low, saved.c], saved.b, saved.t, memory);
    }

    /// Writes `c X c x`, in f32 where single tokens meet the inverse in it too.
    pub fn times_inverse(
        &self,
        slice: usize,
        [high, low, c]: [&[f32]; 3],
        x: &[f32],
        out: &mut [f32],
        memory: &mut [f32],
    ) {
        let (width, order) = (self.sizes.vp, self.order(slice));
        if !self.sizes.whitens {
            return wide::scaled_product(order, [high, low], c, x, width, out, memory);
        }
        let left = Left { data: high, row_stride: order.stride, depth_stride: 1 };
        let size = Size { rows: order.n, cols: width, depth: order.n };
        multiply(self.call.level, size, left, Right { data: x, stride: width }, Store { data: out, stride: width });
    }

    /// Writes `out = (Cq - mean) T`, over the row sums, with the bias; and the filtered values.
    fn apply(&self, heads: Heads<'_>, out: &mut [f32], work: &mut [f32]) {
        let (sizes, shape) = (&self.sizes, &self.call.shape);
        let (slices, seq, dv) = (shape.slices(), shape.seq_q, shape.value_dim);
        let items = of_tokens(slices, seq).zip(rows_of(out, slices, seq, dv));
        let memory = TileBuffers::scratch_len(sizes) + scratch_len([TOKENS * sizes.vp]);
        share(items, work, memory, |(part, out), memory| {
            self.with(heads, part.slice, |head, saved| self.apply_part(head, saved, &part, out, memory));
            self.filter().add(&part, self.call.v.dense(), false, out);
        });
    }

    fn apply_part(&self, head: &Head<'_>, saved: &Saved<&[f32]>, part: &Part, out: &mut [f32], memory: &mut [f32]) {
        let (sizes, level, dv) = (&self.sizes, self.call.level, self.call.shape.value_dim);
        let ([rows], memory) = cut(memory, [TOKENS * sizes.vp]);
        let (any, bound) = (self.kept(Side::Key, head.slice) > 0, self.row_sum_bound(saved));
        for range in part.tiles() {
            let loaded = self.load(head, Side::Query, range.clone(), false, TileBuffers::cut(sizes, memory).0);
            self.centre_queries(saved, loaded.c, loaded.stride);
            loaded.tile().spread(level, saved.t, sizes.vp, rows);
            if sizes.by_row {
                let affinities = loaded.c.chunks_exact(loaded.stride);
                for (row, c) in rows.chunks_exact_mut(sizes.vp).zip(affinities) {
                    // Without a key there are no rows.
                    let factor = if any { row_factor(row[dv], &c[..loaded.landmarks], bound) } else { 0.0 };
                    row.iter_mut().for_each(|x| *x *= factor);
                }
            }
            if sizes.biased {
                zip(level, &mut rows[..loaded.count() * sizes.vp], saved.bias, Zip::Add);
            }
            let kept = if any { loaded.kept } else { &[] };
            scatter(rows, sizes.vp, kept, range.start, &mut out[part.within(&range, dv)], dv);
        }
    }

    /// What a row sum has to exceed, per length of the row of `Cq`: its share of the length of `t`.
    pub fn row_sum_bound(&self, saved: &Saved<&[f32]>) -> f64 {
        if !self.sizes.by_row {
            return 0.0;
        }
        let sums = saved.t.chunks_exact(self.sizes.vp).map(|row| f64::from(row[self.sizes.shape.value_dim]).powi(2));
        LEAST_ROW_SUM * sums.sum::<f64>().sqrt()
    }

    /// Takes the mean off the rows of `Cq`, where keys are centred.
    pub fn centre_queries(&self, saved: &Saved<&[f32]>, c: &mut [f32], stride: usize) {
        if self.sizes.per_key {
            zip(self.call.level, c, &saved.query_mean[..stride], Zip::Subtract);
        }
    }
}

/// The least length of a row of affinities with landmarks of which f32 has digits.
const LEAST_AFFINITIES: f64 = 1e-36;

/// One over a row sum that is `sum`, or, where that is rounding, over the least that it may be, with its sign. NaN, which no result may
/// have, where the token, or every key, is so far from all landmarks that f32 has no digits for the affinities.
pub(super) fn row_factor(sum: f32, c: &[f32], bound: f64) -> f32 {
    let length = dot(c, c).sqrt();
    let divisor = f64::from(sum.abs()).max(bound * length).copysign(sum.into());
    if length < LEAST_AFFINITIES || divisor == 0.0 { f32::NAN } else { (1.0 / divisor) as f32 }
}

/// All parts' moments, merged in their order into the first.
fn merged<'p>(partial: &'p mut [f32], len: usize, moments: impl Fn(&'p mut [f32]) -> Moments<'p>) -> Moments<'p> {
    let (first, rest) = partial.split_at_mut(len);
    let mut sum = moments(first);
    rest.chunks_exact_mut(len).for_each(|part| sum.merge(&moments(part)));
    sum
}
