//! Moments of the queries' affinities, then keys and values gathered into `B = Ck^T V`, then `out = Cq T` with `T = X B`.

use super::{
    layout::{Marks, Saved, Sizes, buffers},
    moments::Moments,
    operator::{Core, Head, Loaded, Side, TileBuffers},
    pass::{self, Part, TOKENS, of_tokens, rows_of, share, splits},
    tile::{Zip, scatter, zip},
};
use crate::{
    Result,
    linalg::wide,
    scratch::{cut, room},
    simd::product::{Left, Right, Size, Store, multiply},
    structure::dense::{Rows, dot},
};

/// A row sum smaller than this, of what it is summed of, is rounding.
const LEAST_ROW_SUM: f64 = 1e-6;

buffers! {
    /// A part's sums over keys: moments of affinities and weighted values, and the sum of the values.
    Gathered(s) {
        moments: Moments::len(s.mp, s.vp),
        values: s.vp,
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
    pub marks: &'h [f32],
    pub saved: &'h [f32],
}

/// All slices' landmarks; all parts' sums.
fn shared(s: &Sizes) -> [usize; 2] {
    let (slices, shape) = (s.shape.slices(), &s.shape);
    let of_queries = if s.whitens || s.per_key { splits(slices, shape.seq_q) * Moments::len(s.mp, s.mp) } else { 0 };
    let of_keys = splits(slices, shape.seq_kv) * Gathered::room(s);
    [slices * Marks::room(s), slices * of_queries.max(of_keys)]
}

/// f32 of scratch of [`Core::forward`].
pub(super) fn work(s: &Sizes, prepare: usize) -> usize {
    let (slices, shape) = (s.shape.slices(), &s.shape);
    let tile = TileBuffers::room(s);
    let parts = [
        pass::work(slices, 1, prepare),
        pass::work(slices, 1, wide::product_work(s.marks, s.vp)),
        pass::work(slices, shape.seq_q, tile + room([s.mp, s.mp])),
        pass::work(slices, shape.seq_kv, tile + GatherBuffers::room(s)),
        pass::work(slices, shape.seq_q, tile + room([TOKENS * s.vp])),
    ];
    room(shared(s)) + parts.into_iter().max().unwrap_or(0)
}

impl Core<'_> {
    /// Writes `out`, and what the backward pass needs of every slice.
    pub fn forward(&self, out: &mut [f32], stats: &mut [f32], work: &mut [f32]) -> Result<()> {
        let ([marks, partial], work) = cut(work, shared(&self.sizes));
        let (saved, factors) = stats.split_at_mut(self.sizes.heads());
        self.prepare(saved, marks, work)?;
        self.moments(marks, saved, partial, work);
        self.gather(self.call.v, marks, saved, factors, partial, work);
        self.apply(Heads { marks, saved }, out, work);
        Ok(())
    }

    /// The covariance of the rows of `Cq`, and their mean, where they are needed.
    fn moments(&self, marks: &[f32], saved: &mut [f32], partial: &mut [f32], work: &mut [f32]) {
        let (sizes, slices, seq) = (&self.sizes, self.call.shape.slices(), self.call.shape.seq_q);
        if !(sizes.whitens || sizes.per_key) {
            return;
        }
        let (mp, len) = (sizes.mp, Moments::len(sizes.mp, sizes.mp));
        let heads = Heads { marks, saved };
        let memory = TileBuffers::room(sizes) + room([mp, mp]);
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
        let items = saved.chunks_mut(Saved::room(sizes)).zip(partial.chunks_mut(splits * len)).enumerate().take(slices);
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
        self.with_head(slice, heads.marks, saved.column_factors, |head| f(head, &saved))
    }

    /// Gathers the keys' affinities and the values `x` into `B`; then `T`, means and bias. Writes the factors on the values.
    fn gather(
        &self,
        x: &[f32],
        marks: &[f32],
        saved: &mut [f32],
        factors: &mut [f32],
        partial: &mut [f32],
        work: &mut [f32],
    ) {
        let (sizes, slices, seq) = (&self.sizes, self.call.shape.slices(), self.call.shape.seq_kv);
        let len = Gathered::room(sizes);
        let heads = Heads { marks, saved: &*saved };
        let items = of_tokens(slices, seq).zip(partial.chunks_mut(len));
        let items = items.zip(rows_of(factors, slices, seq, usize::from(sizes.whitens)));
        let memory = TileBuffers::room(sizes) + GatherBuffers::room(sizes);
        share(items, work, memory, |((part, sums), factors), memory| {
            self.with(heads, part.slice, |head, saved| self.gather_part(head, saved, &part, x, sums, factors, memory));
        });
        let splits = splits(slices, seq);
        let items = saved.chunks_mut(Saved::room(sizes)).zip(partial.chunks_mut(splits * len)).enumerate().take(slices);
        let memory = wide::product_work(sizes.marks, sizes.vp);
        share(items, work, memory, |(slice, (saved, sums)), memory| {
            self.close_gather(slice, Saved::cut(sizes, saved).0, sums, memory);
        });
    }

    #[allow(clippy::too_many_arguments)] // a part with its own buffers
    fn gather_part(
        &self,
        head: &Head<'_>,
        saved: &Saved<&[f32]>,
        part: &Part,
        x: &[f32],
        sums: &mut [f32],
        factors: &mut [f32],
        memory: &mut [f32],
    ) {
        let (sizes, level, vp) = (&self.sizes, self.call.level, self.sizes.vp);
        let (gathered, _) = Gathered::cut(sizes, sums);
        let mut sum = Moments::new(gathered.moments, sizes.mp, vp);
        sum.clear();
        gathered.values.fill(0.0);
        factors.fill(0.0);
        let (buffers, memory) = GatherBuffers::cut(sizes, memory);
        let (x, scale) = (self.part(x, Side::Key, head.slice), self.value_factor(head.slice) as f32);
        for range in part.tiles() {
            let loaded = self.load(head, Side::Key, range, false, TileBuffers::cut(sizes, memory).0);
            let rows = self.rows(x, loaded.kept, 1.0, buffers.values);
            if sizes.whitens {
                self.deviations(&loaded, saved, &mut buffers.a[..], &mut buffers.b[..]);
            }
            for row in rows.data.chunks_exact(vp) {
                gathered.values.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
            }
            if scale == 1.0 && !sizes.whitens && !sizes.per_query {
                loaded.tile().gather(level, rows, sum.cross);
                continue;
            }
            let weighted = &mut buffers.weighted[..loaded.count() * vp];
            let tokens = weighted.chunks_exact_mut(vp).zip(rows.data.chunks_exact(vp)).zip(loaded.kept);
            for (n, ((weighted, v), &j)) in tokens.enumerate() {
                let mut factor = scale;
                if sizes.whitens {
                    factor *= buffers.a[n * loaded.stride];
                    factors[j as usize - part.tokens.start] = factor;
                }
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

    /// Writes `a = C X` and `b = a S`, and to the first of each row of `a` one over the standard deviation: the root of
    /// `<a, b> + eps`.
    fn deviations(&self, loaded: &Loaded<'_>, saved: &Saved<&[f32]>, a: &mut [f32], b: &mut [f32]) {
        self.whiten(loaded, saved, a, b);
        let eps = self.whitened().map_or(0.0, |w| w.whiten_eps);
        let rows = a.chunks_exact_mut(loaded.stride).zip(b.chunks_exact(loaded.stride));
        for (a, b) in rows.take(loaded.count()) {
            let variance = dot(&a[..loaded.marks], &b[..loaded.marks]).max(0.0);
            a[0] = (variance + eps).powf(-0.5) as f32;
        }
    }

    /// Writes `a = C X` and `b = a S`.
    pub fn whiten(&self, loaded: &Loaded<'_>, saved: &Saved<&[f32]>, a: &mut [f32], b: &mut [f32]) {
        let (level, mp, stride) = (self.call.level, self.sizes.mp, loaded.stride);
        let size = Size { rows: loaded.count(), cols: stride, depth: loaded.marks };
        let left = |data| Left { data, row_stride: stride, depth_stride: 1 };
        let right = |data| Right { data, stride: mp };
        multiply(level, size, left(&*loaded.c), right(saved.high), Store { data: &mut *a, stride });
        multiply(level, size, left(&*a), right(saved.covariance), Store { data: b, stride });
    }

    /// `B`, the means, the bias, the tokens' degrees, and `T = c X c B`.
    fn close_gather(&self, slice: usize, saved: Saved<&mut [f32]>, sums: &mut [f32], memory: &mut [f32]) {
        let (sizes, len) = (&self.sizes, Gathered::room(&self.sizes));
        let keys = self.kept(Side::Key, slice).max(1) as f32;
        if self.whitened().is_some_and(|w| w.bias_one_over_n) {
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
            let rows = saved.b.chunks_exact(sizes.vp).zip(&*saved.column_factors);
            for (c, (b, &factor)) in saved.c.iter_mut().zip(rows) {
                let degree = if factor > 0.0 { b[sizes.shape.value_dim] / factor } else { 1.0 };
                *c = degree.max(1e-30).powf(-0.5);
            }
        }
        let inverse = [&*saved.high, &*saved.low];
        wide::scaled_product(self.order(slice), inverse, saved.c, saved.b, sizes.vp, saved.t, memory);
    }

    /// Writes `out = (Cq - mean) T`, over the row sums, with the bias; and the filtered values.
    fn apply(&self, heads: Heads<'_>, out: &mut [f32], work: &mut [f32]) {
        let (sizes, shape) = (&self.sizes, &self.call.shape);
        let (slices, seq, dv) = (shape.slices(), shape.seq_q, shape.value_dim);
        let items = of_tokens(slices, seq).zip(rows_of(out, slices, seq, dv));
        let memory = TileBuffers::room(sizes) + room([TOKENS * sizes.vp]);
        share(items, work, memory, |(part, out), memory| {
            self.with(heads, part.slice, |head, saved| self.apply_part(head, saved, &part, out, memory));
            self.filter().add(&part, self.call.v, false, out);
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
                    let factor = row_factor(row[dv], &c[..loaded.marks], bound);
                    row.iter_mut().for_each(|x| *x *= factor);
                }
            }
            zip(level, &mut rows[..loaded.count() * sizes.vp], saved.bias, Zip::Add);
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

/// One over a row sum that is `sum`, or, where that is rounding, over the least that it may be, with its sign; 0 for no sum.
pub(super) fn row_factor(sum: f32, c: &[f32], bound: f64) -> f32 {
    let least = bound * dot(c, c).sqrt();
    let divisor = f64::from(sum.abs()).max(least).copysign(sum.into());
    if divisor == 0.0 { 0.0 } else { (1.0 / divisor) as f32 }
}

/// All parts' moments, merged in their order into the first.
fn merged<'p>(partial: &'p mut [f32], len: usize, moments: impl Fn(&'p mut [f32]) -> Moments<'p>) -> Moments<'p> {
    let (first, rest) = partial.split_at_mut(len);
    let mut sum = moments(first);
    rest.chunks_exact_mut(len).for_each(|part| sum.merge(&moments(part)));
    sum
}
