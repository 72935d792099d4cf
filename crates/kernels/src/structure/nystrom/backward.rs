//! Queries gather the gradient of `T`, keys that of their columns' variances, queries take theirs: each pass sums what the
//! next needs. Where queries are keys and no variance is taken, the last two are one.
//!
//! "Softmax-free Linear Transformers", eq. 12 in the form `dA = -(dB / c) (T / c)^T`: of rank `value_dim`, no product of
//! three landmark matrices.

use super::{
    forward::Heads,
    gradients::{OfTokens, SideBuffers, Tokens},
    layout::{LandmarkRows, Sizes, buffers},
    middle,
    operator::{Core, Loaded, Side, TileBuffers},
    parameters,
    pass::{self, Part, TOKENS, of_tokens, rows_of, share, splits},
    pivot::Pivot,
    prepare::place_all,
    row_sums::ROW,
    variance::Variances,
};
use crate::{
    Gradients, Result,
    scratch::{cut, scratch_len},
    structure::dense::Rows,
};

buffers! {
    /// What is kept of a slice.
    Kept(s) {
        /// The sum of the output gradients.
        g_sum: s.vp,
        /// `dB`, by landmark and by channel; `T` by channel.
        db: s.landmarks * s.vp,
        db_across: s.channels() * s.mp,
        t_across: s.channels() * s.mp,
        /// The gradient of the affinities among landmarks through the inverse, or what that is made of, with what f32 leaves off it; that of
        /// the degrees.
        da: s.landmarks * s.mp,
        da_low: Sizes::only(s.explicit, s.landmarks * s.mp),
        degrees: s.mp,
        /// `(2 / n) X Gamma X`, through the covariance.
        spread: Sizes::only(s.whitens, s.landmarks * s.mp),
        /// Gradients of landmarks, first of their images; of the score's parameters; of gain and offset of the norm.
        du: s.landmarks * s.dp,
        parameters: crate::score::contract::MOST_PARAMETERS,
        norm: if s.activated { 2 * s.rp } else { 0 },
        /// See [`Pivot`].
        pivot: Sizes::only(s.has_query_mean(), Pivot::scratch_len(s)),
    }

    /// A part's sums over queries: `dT`, and the output gradients. How far they are from the first, by channel.
    OfQueries(s) {
        dt: s.landmarks * s.vp,
        g_sum: s.vp,
        reach: Sizes::only(s.has_query_mean(), s.dp),
    }
}

fn shared(s: &Sizes, tied: bool) -> [usize; 5] {
    let (slices, shape) = (s.shape.slices(), &s.shape);
    let queries = splits(slices, shape.seq_q) * OfQueries::scratch_len(s).max(OfTokens::scratch_len(s));
    let keys = splits(slices, shape.seq_kv) * OfTokens::scratch_len(s);
    [
        slices * LandmarkRows::scratch_len(s),
        slices * Kept::scratch_len(s),
        slices * queries.max(keys),
        if s.by_row { slices * shape.seq_q * ROW } else { 0 },
        if tied { shape.k_len() } else { 0 },
    ]
}

/// f32 of scratch of [`Core::backward`]; `per_slice` is what middle steps take.
pub(super) fn work(s: &Sizes, tied: bool, per_slice: usize) -> usize {
    let (slices, shape) = (s.shape.slices(), &s.shape);
    let tile = TileBuffers::scratch_len(s) + SideBuffers::scratch_len(s) + Variances::scratch_len(s);
    let parts = [
        pass::work(slices, 1, per_slice),
        pass::work(slices, shape.seq_q, tile + scratch_len([TOKENS * s.vp])),
        pass::work(slices, shape.seq_kv, tile),
        parameters::work(s),
    ];
    scratch_len(shared(s, tied)) + parts.into_iter().max().unwrap_or(0)
}

impl Core<'_> {
    /// Writes the gradients; `y` is what the operator made of the values, without their filter.
    pub fn backward(
        &self,
        y: &[f32],
        stats: &[f32],
        dout: &[f32],
        gradients: Gradients<'_, f32>,
        work: &mut [f32],
    ) -> Result<()> {
        let (sizes, shape) = (&self.sizes, &self.call.shape);
        let ([landmarks, kept, partial, rows, tied], work) = cut(work, shared(sizes, self.m.tied));
        let (saved, factors) = stats.split_at(sizes.heads());
        let Gradients { dq, dk, dv, mut extras } = gradients;
        place_all(self, stats, landmarks, work);
        let heads = Heads { landmarks, saved };
        self.gather_queries(heads, (dout, y), partial, rows, work);
        middle::close_queries(self, heads, partial, kept, work);
        if self.is_shared() {
            let tokens = Tokens { core: self, heads, factors, dout, rows, query: true, key: true };
            tokens.run(kept, partial, (dq, Some(dv)), work);
            middle::close_keys(self, heads, partial, kept, work);
            middle::close(self, heads, None, kept, dq, work);
        } else {
            let dk = dk.unwrap_or(&mut *tied);
            let tokens = Tokens { core: self, heads, factors, dout, rows, query: false, key: true };
            tokens.run(kept, partial, (&mut *dk, Some(dv)), work);
            middle::close_keys(self, heads, partial, kept, work);
            let tokens = Tokens { query: true, key: false, ..tokens };
            tokens.run(kept, partial, (&mut *dq, None), work);
            middle::close(self, heads, Some(partial), kept, dk, work);
            if self.m.tied {
                dq.iter_mut().zip(&*dk).for_each(|(dq, dk)| *dq += dk);
            }
        }
        parameters::write(self, kept, dout, &mut extras, work);
        // Told at the end: whoever trains goes on with what there is.
        (0..shape.slices()).try_for_each(|slice| self.check_apart(self.saved(saved, slice).nearest[0]))
    }

    /// `dT = (Cq - mean)^T G`.
    fn gather_queries(
        &self,
        heads: Heads<'_>,
        (dout, y): (&[f32], &[f32]),
        partial: &mut [f32],
        rows: &mut [f32],
        work: &mut [f32],
    ) {
        let (sizes, slices, seq) = (&self.sizes, self.call.shape.slices(), self.call.shape.seq_q);
        let items = of_tokens(slices, seq).zip(partial.chunks_mut(OfQueries::scratch_len(sizes)));
        let items = items.zip(rows_of(rows, slices, seq, if sizes.by_row { ROW } else { 0 }));
        let memory = TileBuffers::scratch_len(sizes) + scratch_len([TOKENS * sizes.vp]);
        share(items, work, memory, |((part, sums), factors), memory| {
            let (sums, _) = OfQueries::cut(sizes, sums);
            sums.dt.fill(0.0);
            sums.g_sum.fill(0.0);
            sums.reach.fill(0.0);
            if !self.has_rows(part.slice) {
                return factors.fill(0.0);
            }
            let ([buffer], memory) = cut(memory, [TOKENS * sizes.vp]);
            let [dout, y] = [dout, y].map(|x| self.part(x, Side::Query, part.slice));
            self.with(heads, part.slice, |head, saved| {
                for range in part.tiles() {
                    let loaded = self.load(head, Side::Query, range, false, TileBuffers::cut(sizes, memory).0);
                    self.centre_queries(saved, loaded.c, loaded.stride);
                    if sizes.has_query_mean() {
                        self.add_reach(&loaded, part.slice, sums.reach);
                    }
                    if sizes.by_row {
                        self.row_gradients(&loaded, &part, saved, [dout, y], factors);
                        self.floor_of_sums(&loaded, &part, saved, factors, sums.dt);
                    }
                    let g = self.gradient_rows(&loaded, &part, (dout, factors), None, buffer);
                    loaded.tile().gather(self.call.level, g, sums.dt);
                    for g in g.data.chunks_exact(sizes.vp) {
                        sums.g_sum.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
                    }
                }
            });
        });
    }

    /// The kept rows of output gradients, less `mean`, or over the row sums and with their gradients.
    pub fn gradient_rows<'x>(
        &self,
        loaded: &Loaded<'_>,
        part: &Part,
        (dout, factors): (&'x [f32], &[f32]),
        mean: Option<(&[f32], f32)>,
        buffer: &'x mut [f32],
    ) -> Rows<'x> {
        let (dim, stride, by_row) = (self.call.shape.value_dim, self.sizes.vp, self.sizes.by_row);
        if !by_row && mean.is_none() {
            return self.rows(dout, loaded.kept, (0.0, true), buffer);
        }
        for (row, &i) in buffer.chunks_exact_mut(stride).zip(loaded.kept) {
            row.fill(0.0);
            let g = &dout[i as usize * dim..][..dim];
            let at = (i as usize - part.tokens.start) * ROW;
            match (mean, factors.get(at..at + ROW)) {
                (_, Some(&[factor, gradient, _])) => {
                    row.iter_mut().zip(g).for_each(|(x, g)| *x = factor * g);
                    row[dim] = gradient;
                }
                (Some((sum, share)), _) => {
                    row.iter_mut().zip(g).zip(sum).for_each(|((x, g), sum)| *x = g - share * sum);
                }
                _ => row[..dim].copy_from_slice(g),
            }
        }
        Rows { data: &buffer[..loaded.count() * stride], stride }
    }
}
