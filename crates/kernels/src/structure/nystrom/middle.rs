//! What stands between the backward passes, per slice: small products among landmarks.

use super::{
    backward::{Kept, OfQueries},
    forward::Heads,
    gradients::OfTokens,
    layout::{Saved, Sizes, buffers},
    operator::{Core, Head, Side},
    pairs::{factors, pull_back},
    pass::{share, splits},
    pivot::Pivot,
    source::LandmarkSource,
    tile::transpose,
    variance::Matrices,
};
use crate::{
    linalg::{
        Entries, Method, Order,
        wide::{self, WIDE},
    },
    mechanism::Landmarks,
    score::{contract::MOST_PARAMETERS, tiles},
    scratch::cut,
    simd::product::{Left, Right, Size, Store, multiply},
    structure::dense::dot,
};

buffers! {
    /// What [`close_queries`] takes.
    QueriesBuffers(s) {
        dt: s.landmarks * s.vp,
    }

    /// What [`close_keys`] takes.
    KeysBuffers(s) {
        /// `Gamma`.
        gamma: Sizes::only(s.whitens, WIDE * s.landmarks * s.landmarks),
        /// Terms and affinities among landmarks; the gradients of the latter.
        terms: s.landmarks * s.mp,
        a: s.landmarks * s.mp,
        e: s.landmarks * s.mp,
        du: s.landmarks * s.dp,
        unused: s.landmarks * s.dp,
    }
}

/// f32 of memory that the steps of a slice take.
pub(super) fn memory(method: &Method, landmarks: Landmarks, full: bool, s: &Sizes) -> usize {
    let order = Order { n: s.landmarks, stride: s.mp };
    let queries = QueriesBuffers::scratch_len(s) + wide::product_work(s.landmarks, s.vp);
    let keys = KeysBuffers::scratch_len(s) + method.gradient_work(order).max(Matrices::scratch_len(s));
    queries.max(keys).max(s.dp + LandmarkSource::work(landmarks, full, &s.shape, s.landmarks))
}

impl Core<'_> {
    fn middle_memory(&self) -> usize {
        memory(&self.method(), self.structure.landmarks, self.preset.full, &self.sizes)
    }
}

/// `dB = c X c dT`, what that and `T` say of the inverse, and the gradients of the degrees.
pub(super) fn close_queries(core: &Core<'_>, heads: Heads<'_>, partial: &[f32], kept: &mut [f32], work: &mut [f32]) {
    let (sizes, shape) = (&core.sizes, &core.call.shape);
    let len = OfQueries::scratch_len(sizes);
    let parts = splits(shape.slices(), shape.seq_q) * len;
    let items = kept.chunks_mut(Kept::scratch_len(sizes)).zip(partial.chunks(parts)).enumerate().take(shape.slices());
    share(items, work, core.middle_memory(), |(slice, (kept, partial)), memory| {
        kept.fill(0.0);
        let (kept, _) = Kept::cut(sizes, kept);
        let (buffers, work) = QueriesBuffers::cut(sizes, memory);
        let (saved, order) = (core.saved(heads.saved, slice), core.order(slice));
        buffers.dt.fill(0.0);
        for part in partial.chunks_exact(len) {
            let sums = OfQueries::of(sizes, part);
            buffers.dt.iter_mut().zip(sums.dt).for_each(|(dt, x)| *dt += x);
            kept.g_sum.iter_mut().zip(sums.g_sum).for_each(|(sum, x)| *sum += x);
        }
        core.times_inverse(slice, [saved.high, saved.low, saved.c], buffers.dt, kept.db, work);
        let values = order.n * sizes.vp;
        transpose(&saved.t[..values], sizes.vp, sizes.channels(), kept.t_across, sizes.mp);
        core.inverse_gradient(order, &saved, [buffers.dt, kept.db, kept.t_across], [kept.da, kept.da_low], work);
        core.degree_gradient(order, &saved, [buffers.dt, kept.db], kept.degrees);
        transpose(&kept.db[..values], sizes.vp, sizes.channels(), kept.db_across, sizes.mp);
        if sizes.has_query_mean() {
            let parts = || partial.chunks_exact(len).map(|part| OfQueries::of(sizes, part).reach);
            let reach = parts().flatten().fold(0.0, |most: f32, &x| most.max(x));
            let pivot = Pivot::cut(sizes, kept.pivot).0;
            core.with(heads, slice, |head, saved| core.write_pivot(head, saved, (reach, kept.g_sum), pivot));
        }
    });
}

impl Core<'_> {
    /// Writes the gradient of the affinities among landmarks by the formula of an inverse, `-(dB / c) (T / c)^T`; for other
    /// methods that of `X`, `(c dT) (c B)^T`.
    fn inverse_gradient(
        &self,
        order: Order,
        saved: &Saved<&[f32]>,
        [dt, db, t_across]: [&[f32]; 3],
        [da, da_low]: [&mut [f32]; 2],
        work: &mut [f32],
    ) {
        let (sizes, level, channels) = (&self.sizes, self.call.level, self.sizes.channels());
        if !self.is_implicit(saved) {
            let mut da = Entries { high: da, low: da_low };
            return wide::scaled_outer(order, saved.c, [dt, saved.b], [sizes.vp, channels], &mut da, work);
        }
        let size = Size { rows: order.n, cols: order.n.next_multiple_of(16), depth: channels };
        let left = Left { data: db, row_stride: sizes.vp, depth_stride: 1 };
        multiply(
            level,
            size,
            left,
            Right { data: t_across, stride: sizes.mp },
            Store { data: &mut *da, stride: sizes.mp },
        );
        for (i, row) in da.chunks_exact_mut(sizes.mp).take(order.n).enumerate() {
            row.iter_mut().zip(saved.c).take(order.n).for_each(|(da, c)| *da /= -(saved.c[i] * c));
        }
    }

    /// Whether the gradient is that of the exact inverse: of steps that have converged it is too.
    fn is_implicit(&self, saved: &Saved<&[f32]>) -> bool {
        self.method().is_implicit() || saved.settled[0] > 0.0
    }

    /// `dd_i = -1/2 c_i^2 (<dT_i, T_i> + <B_i, dB_i>)`; those of tokens per unit of a column as it counts.
    fn degree_gradient(&self, order: Order, saved: &Saved<&[f32]>, [dt, db]: [&[f32]; 2], out: &mut [f32]) {
        let (width, by_token) = (self.sizes.vp, self.sizes.token_degrees);
        if !(by_token || self.landmark_degrees()) {
            return;
        }
        for (i, out) in out.iter_mut().enumerate().take(order.n) {
            let inner = |x: &[f32], y: &[f32]| dot(&x[i * width..][..width], &y[i * width..][..width]);
            let (c, factor) = (f64::from(saved.c[i]), f64::from(saved.column_factors[i]));
            let share = if by_token { 1.0 / factor } else { 1.0 };
            let gradient = -0.5 * c * c * share * (inner(dt, saved.t) + inner(saved.b, db));
            *out = if factor > 0.0 { gradient as f32 } else { 0.0 };
        }
    }
}

/// From `Gamma` to the gradient of the inverse, and of the landmarks among each other.
pub(super) fn close_keys(core: &Core<'_>, heads: Heads<'_>, partial: &[f32], kept: &mut [f32], work: &mut [f32]) {
    let (sizes, shape) = (&core.sizes, &core.call.shape);
    let len = OfTokens::scratch_len(sizes);
    let parts = splits(shape.slices(), shape.seq_kv) * len;
    let items = kept.chunks_mut(Kept::scratch_len(sizes)).zip(partial.chunks(parts)).enumerate().take(shape.slices());
    share(items, work, core.middle_memory(), |(slice, (kept, partial)), memory| {
        let (kept, _) = Kept::cut(sizes, kept);
        let (buffers, work) = KeysBuffers::cut(sizes, memory);
        buffers.gamma.fill(0.0);
        for part in partial.chunks_exact(len) {
            let sums = OfTokens::of(sizes, part);
            let (gamma, part): (&mut [f64], &[f64]) =
                (bytemuck::cast_slice_mut(buffers.gamma), bytemuck::cast_slice(sums.gamma));
            gamma.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            kept.du.iter_mut().zip(sums.du).for_each(|(du, x)| *du += x);
            kept.parameters.iter_mut().zip(sums.parameters).for_each(|(sum, x)| *sum += x);
        }
        core.with(heads, slice, |head, saved| core.among_landmarks(head, saved, kept, buffers, work));
    });
}

impl Core<'_> {
    fn among_landmarks(
        &self,
        head: &Head<'_>,
        saved: &Saved<&[f32]>,
        mut kept: Kept<&mut [f32]>,
        buffers: KeysBuffers<&mut [f32]>,
        work: &mut [f32],
    ) {
        let (sizes, level, order) = (&self.sizes, self.call.level, self.order(head.slice));
        let KeysBuffers { gamma, terms, a, e, du, unused } = buffers;
        self.among(head, &mut *terms, a);
        let start = self.merge(order, saved.column_factors, a, work);
        let by_formula = self.is_implicit(saved);
        if sizes.whitens {
            let queries = self.kept(Side::Query, head.slice).max(1);
            let matrices = Matrices::cut(sizes, &mut *work).0;
            self.through_forms(order, saved, (gamma, by_formula), &mut kept, matrices, queries);
        }
        if !by_formula {
            let method = Method { start, ..self.method() };
            method.gradient(level, order, a, [&mut *kept.da, &mut *kept.da_low], work);
        }
        self.value_gradients(head, saved, [a, kept.da, kept.degrees], e);
        unused.fill(0.0);
        let mut parameters = [0.0; MOST_PARAMETERS];
        let (n, live) = (order.n, order.n * sizes.dp);
        let tile = tiles::Tile { data: e, stride: sizes.mp, rows: n, width: super::tile::width(n) };
        let images = (self.as_tokens(head), &head.landmarks.rows[..live], sizes.dp);
        pull_back(level, head.score, terms, tile, images, (&mut du[..live], unused), &mut parameters);
        let [of_tokens, of_landmarks] = factors(head.score.term());
        kept.du.iter_mut().zip(&*du).take(live).for_each(|(sum, x)| *sum = of_landmarks * *sum + of_tokens * x);
        // Every pair of landmarks stands in the matrix twice, and each time with the gradients of both.
        kept.parameters.iter_mut().zip(parameters).for_each(|(sum, x)| *sum += 0.5 * x as f32);
    }

    /// Writes the gradients of the score's values among landmarks, of both orders of every pair: from those of the affinities as they
    /// count, and of the degrees.
    fn value_gradients(&self, head: &Head<'_>, saved: &Saved<&[f32]>, [a, da, degrees]: [&[f32]; 3], e: &mut [f32]) {
        let (n, mp, factors) = (head.count, self.sizes.mp, saved.column_factors);
        let (log, by_landmark) = (head.score.is_log(), self.landmark_degrees());
        let one_way = |i: usize, j: usize| {
            let at = i * mp + j;
            let chain = if log { a[at] } else { factors[i] * factors[j] };
            let degree = if by_landmark && factors[i] > 0.0 { degrees[i] * factors[j] / factors[i] } else { 0.0 };
            // Affinities as they count are those of single landmarks times the factors of both.
            if log { (da[at] + degree) * chain } else { da[at] * chain + degree * factors[i] * factors[j] }
        };
        e.fill(0.0);
        for i in 0..n {
            (0..n).for_each(|j| e[i * mp + j] = one_way(i, j) + one_way(j, i));
        }
    }
}

/// The landmarks' gradients, and from them those of the keys that they are made of, added to `dk`; `partial` has the sums over queries.
pub(super) fn close(
    core: &Core<'_>,
    heads: Heads<'_>,
    partial: Option<&[f32]>,
    kept: &mut [f32],
    dk: &mut [f32],
    work: &mut [f32],
) {
    let (sizes, shape) = (&core.sizes, &core.call.shape);
    let len = OfTokens::scratch_len(sizes);
    let parts = splits(shape.slices(), shape.seq_q) * len;
    let items = kept.chunks_mut(Kept::scratch_len(sizes)).zip(dk.chunks_mut(shape.seq_kv * shape.head_dim)).enumerate();
    share(items.take(shape.slices()), work, core.middle_memory(), |(slice, (kept, dk)), memory| {
        let (kept, _) = Kept::cut(sizes, kept);
        let sums = partial.map_or(&[][..], |partial| &partial[slice * parts..][..parts]);
        core.with(heads, slice, |head, saved| {
            let [_, of_landmarks] = factors(head.score.term());
            for part in sums.chunks_exact(len) {
                let sums = OfTokens::of(sizes, part);
                kept.du.iter_mut().zip(sums.du).for_each(|(du, x)| *du += of_landmarks * x);
                kept.parameters.iter_mut().zip(sums.parameters).for_each(|(sum, x)| *sum += x);
            }
            if sizes.has_query_mean() && !sums.is_empty() {
                let pivot = Pivot::cut(sizes, kept.pivot).0;
                core.close_pivot(head, pivot, sums, (&mut *kept.du, &mut *kept.parameters));
            }
            core.share_gradient(saved, head.count, kept.du);
            let ([row], work) = cut(memory, [sizes.dp]);
            core.pull_back(head, saved, kept.du, row);
            let du = &mut kept.du[..head.count * sizes.rp];
            if let Some(norm) = core.norm() {
                let (dgamma, dbeta) = kept.norm.split_at_mut(sizes.rp);
                norm.backward(&saved.raw[..du.len()], sizes.rp, du, [dgamma, dbeta]);
            }
            core.producer.backward(core.call.level, slice, du, sizes.rp, dk, work);
        });
    });
}

impl Core<'_> {
    /// Turns gradients of images, rows of `dp`, into those of the landmarks before they were mapped, rows of `rp`.
    fn pull_back(&self, head: &Head<'_>, saved: &Saved<&[f32]>, du: &mut [f32], image: &mut [f32]) {
        let (sizes, d) = (&self.sizes, self.call.shape.head_dim);
        if !sizes.mapped {
            return;
        }
        let before = if sizes.activated { head.landmarks.active } else { saved.raw };
        for (i, row) in before.chunks_exact(sizes.rp).enumerate().take(head.count) {
            image.copy_from_slice(&du[i * sizes.dp..][..sizes.dp]);
            let out = &mut du[i * sizes.rp..][..sizes.rp];
            out.fill(0.0);
            self.map.pull_back(&row[..d], image, &mut out[..d]);
        }
    }
}
