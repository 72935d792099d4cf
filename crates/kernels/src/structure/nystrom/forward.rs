//! Moments of the queries' affinities, then keys and values gathered into `B = Ck^T V`, then `out = Cq T` with `T = X B`.

use super::{
    layout::{LandmarkRows, Saved, Sizes, buffers},
    moments::Moments,
    operator::{Core, Head, Side, TileBuffers},
    pass::{self, Part, TOKENS, of_tokens, rows_of, share, splits},
    prepare::place_all,
    row_sums::row_factor,
    tile::{Zip, scatter, zip},
    variance::{self, Centred, Matrices, Variances},
};
use crate::{
    Result,
    linalg::wide,
    scratch::{cut, scratch_len},
    structure::dense::Rows,
};

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
    let of_keys = slices * splits(slices, shape.seq_kv) * Gathered::scratch_len(s);
    [slices * LandmarkRows::scratch_len(s), variance::sums_len(s).max(of_keys)]
}

/// f32 of scratch of [`Core::forward`].
pub(super) fn work(s: &Sizes, prepare: usize) -> usize {
    let (slices, shape) = (s.shape.slices(), &s.shape);
    let tile = TileBuffers::scratch_len(s);
    let parts = [
        pass::work(slices, 1, prepare),
        pass::work(slices, 1, wide::product_work(s.landmarks, s.vp)),
        pass::work(slices, shape.seq_q, tile + Centred::scratch_len(s)),
        pass::work(slices, 1, Matrices::scratch_len(s)),
        pass::work(slices, shape.seq_kv, tile + GatherBuffers::scratch_len(s) + Variances::scratch_len(s)),
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
        let memory =
            TileBuffers::scratch_len(sizes) + GatherBuffers::scratch_len(sizes) + Variances::scratch_len(sizes);
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
        let (mut variances, memory) = Variances::cut(sizes, memory);
        self.read_form(head.slice, saved, &mut variances);
        let (x, scale) = (self.part(self.call.v.dense(), Side::Key, head.slice), self.value_factor(head.slice));
        let plain = scale == 1.0 && !sizes.whitens && !sizes.per_query;
        for range in part.tiles() {
            let loaded = self.load(head, Side::Key, range, false, TileBuffers::cut(sizes, memory).0);
            let rows = self.rows(x, loaded.kept, (1.0, plain), buffers.values);
            if sizes.whitens && !known {
                self.deviations(&loaded, &mut variances, (part.tokens.start, &mut *factors), scale);
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

    /// Writes `c X c x`.
    pub fn times_inverse(
        &self,
        slice: usize,
        [high, low, c]: [&[f32]; 3],
        x: &[f32],
        out: &mut [f32],
        memory: &mut [f32],
    ) {
        wide::scaled_product(self.order(slice), [high, low], c, x, self.sizes.vp, out, memory);
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
        let (any, bound) = (self.has_rows(head.slice), self.row_sum_bound(saved));
        for range in part.tiles() {
            let loaded = self.load(head, Side::Query, range.clone(), false, TileBuffers::cut(sizes, memory).0);
            self.centre_queries(saved, loaded.c, loaded.stride);
            loaded.tile().spread(level, saved.t, sizes.vp, rows);
            if sizes.by_row {
                let affinities = loaded.c.chunks_exact(loaded.stride);
                for (row, c) in rows.chunks_exact_mut(sizes.vp).zip(affinities) {
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

    /// Takes the mean off the rows of `Cq`, where keys are centred.
    pub fn centre_queries(&self, saved: &Saved<&[f32]>, c: &mut [f32], stride: usize) {
        if self.sizes.per_key {
            self.less_query_mean(saved, c, stride);
        }
    }

    /// Takes the mean off the rows of `Cq`. Close queries differ by less than a few roundings of it.
    pub fn less_query_mean(&self, saved: &Saved<&[f32]>, c: &mut [f32], stride: usize) {
        zip(self.call.level, c, &saved.query_mean[..stride], Zip::Subtract);
        zip(self.call.level, c, &saved.query_mean_low[..stride], Zip::Subtract);
    }
}

/// All parts' moments, merged in their order into the first.
fn merged<'p>(partial: &'p mut [f32], len: usize, moments: impl Fn(&'p mut [f32]) -> Moments<'p>) -> Moments<'p> {
    let (first, rest) = partial.split_at_mut(len);
    let mut sum = moments(first);
    rest.chunks_exact_mut(len).for_each(|part| sum.merge(&moments(part)));
    sum
}
