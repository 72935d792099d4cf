//! The backward passes over the queries: what they gather for the inverse, and their own gradients.

use super::{
    Core, SavedSlice, Side, Sizes,
    backward::{distances, kept_of, of_marks, of_queries, of_slice},
    forward::centre_queries,
    tile_sizes,
};
use crate::{
    linalg::Order,
    mechanism::Centering,
    parallel::Parts,
    scratch::{cut, parts, room},
    simd::{
        Level,
        product::{Add, Left, Right, Size, Store, multiply, multiply_add},
    },
    structure::nystrom::{
        pass::{Part, Pass, TOKENS, splits},
        tile::{Zip, scatter, transpose, zip},
    },
};

/// `dT = (Cq - mean)^T G`.
pub(super) struct GatherQueries<'a> {
    pub core: Core<'a>,
    pub transposed: &'a [f32],
    pub stats: &'a [f32],
    pub dout: &'a [f32],
    pub partial: Parts<'a, f32>,
}

impl Pass for GatherQueries<'_> {
    fn memory(&self) -> usize {
        room(tile_sizes(&self.core.sizes))
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let len = room(of_queries(sizes));
        // SAFETY: parts are distinct.
        let partial = unsafe { self.partial.part(part.index * len..(part.index + 1) * len) };
        partial.fill(0.0);
        let ([dt, g_sum], _) = cut(partial, of_queries(sizes));
        let saved = SavedSlice::of(sizes, self.stats, slice);
        if core.kept(Side::Key, slice) == 0 {
            return;
        }
        for range in part.tiles() {
            let loaded = core.load(level, (Side::Query, slice), range, self.transposed, Some(self.dout), memory);
            centre_queries(core, level, &saved, loaded.c, loaded.stride);
            loaded.tile().gather(level, loaded.rows, dt);
            for g in loaded.rows.data.chunks_exact(sizes.dvp) {
                g_sum.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
            }
        }
    }
}

/// `dB = X dT` and `dX = dT B^T`.
pub(super) struct CloseQueries<'a> {
    pub core: Core<'a>,
    pub stats: &'a [f32],
    pub partial: &'a [f32],
    pub slice_parts: Parts<'a, f32>,
}

impl Pass for CloseQueries<'_> {
    fn memory(&self) -> usize {
        room([self.core.sizes.marks * self.core.sizes.dvp, self.core.sizes.shape.value_dim * self.core.sizes.mp])
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (len, dv) = (room(of_slice(sizes)), sizes.shape.value_dim);
        // SAFETY: slices are distinct.
        let kept = unsafe { self.slice_parts.part(slice * len..(slice + 1) * len) };
        kept.fill(0.0);
        let ([g_sum, db, db_across, t_across, dx, ..], _) = cut(kept, of_slice(sizes));
        let ([dt, b_across], _) = cut(memory, [sizes.marks * sizes.dvp, dv * sizes.mp]);
        let (len, splits) = (room(of_queries(sizes)), splits(sizes.shape.slices(), sizes.shape.seq_q));
        dt.fill(0.0);
        for sums in self.partial[slice * splits * len..][..splits * len].chunks_exact(len) {
            let [part, g] = parts(sums, of_queries(sizes));
            dt.iter_mut().zip(part).for_each(|(dt, x)| *dt += x);
            g_sum.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
        }
        let saved = SavedSlice::of(sizes, self.stats, slice);
        let Order { n, stride } = core.order(slice);
        let values = n * sizes.dvp;
        let left = |data, row_stride| Left { data, row_stride, depth_stride: 1 };
        let right = Right { data: &*dt, stride: sizes.dvp };
        let out = Store { data: &mut *db, stride: sizes.dvp };
        multiply(level, Size { rows: n, cols: sizes.dvp, depth: n }, left(saved.x, stride), right, out);
        for (x, across) in [(&*db, db_across), (saved.t, t_across), (saved.b, &mut *b_across)] {
            transpose(&x[..values], sizes.dvp, dv, across, sizes.mp);
        }
        let right = Right { data: b_across, stride: sizes.mp };
        let size = Size { rows: n, cols: stride, depth: dv };
        multiply(level, size, left(&*dt, sizes.dvp), right, Store { data: dx, stride });
    }
}

/// Gradients of the queries.
pub(super) struct Queries<'a> {
    pub core: Core<'a>,
    pub transposed: &'a [f32],
    pub stats: &'a [f32],
    pub dout: &'a [f32],
    pub slice_parts: &'a [f32],
    pub dq: Parts<'a, f32>,
    pub partial: Parts<'a, f32>,
}

pub(super) fn queries_memory(sizes: &Sizes) -> usize {
    room(queries_sizes(sizes)) + room(tile_sizes(sizes))
}

fn queries_sizes(sizes: &Sizes) -> [usize; 4] {
    // dC; centred C; rows of output gradients; rows of queries
    let tile = TOKENS * sizes.mp;
    [tile, tile, TOKENS * sizes.dvp, TOKENS * sizes.dp]
}

impl Pass for Queries<'_> {
    fn memory(&self) -> usize {
        queries_memory(&self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (seq, d, dv, dvp) = (sizes.shape.seq_q, sizes.shape.head_dim, sizes.shape.value_dim, sizes.dvp);
        let len = room(of_marks(sizes));
        // SAFETY: parts are distinct ranges of rows.
        let dq_out = unsafe { self.dq.part(part.rows(seq, d)) };
        // SAFETY: parts are distinct.
        let partial = unsafe { self.partial.part(part.index * len..(part.index + 1) * len) };
        partial.fill(0.0);
        let ([dmarks, contraction], _) = cut(partial, of_marks(sizes));
        let saved = SavedSlice::of(sizes, self.stats, slice);
        let [g_sum, _, _, t_across, _, gxx, ..] = kept_of(sizes, self.slice_parts, slice);
        let ([dc, centred, rows, dx], memory) = cut(memory, queries_sizes(sizes));
        let share =
            if core.centres(Centering::PerKey) { 1.0 / core.kept(Side::Query, slice).max(1) as f32 } else { 0.0 };
        for range in part.tiles() {
            let loaded =
                core.load(level, (Side::Query, slice), range.clone(), self.transposed, Some(self.dout), memory);
            let (count, stride) = (loaded.count, loaded.stride);
            for (row, g) in rows.chunks_exact_mut(dvp).zip(loaded.rows.data.chunks_exact(dvp)).take(count) {
                row.iter_mut().zip(g).zip(g_sum).for_each(|((x, g), sum)| *x = g - share * sum);
            }
            let left = |data, row_stride| Left { data, row_stride, depth_stride: 1 };
            let (size, right) =
                (Size { rows: count, cols: stride, depth: dv }, Right { data: t_across, stride: sizes.mp });
            multiply(level, size, left(&*rows, dvp), right, Store { data: &mut *dc, stride });
            if core.whitens() {
                let centred = &mut centred[..count * stride];
                centred.copy_from_slice(&loaded.c[..count * stride]);
                zip(level, centred, &saved.query_mean[..stride], Zip::Subtract);
                let size = Size { rows: count, cols: stride, depth: loaded.marks };
                let right = Right { data: gxx, stride: sizes.mp };
                multiply_add(level, size, left(&*centred, stride), right, Add { data: &mut *dc, stride });
            }
            let marks = (&saved.u[..loaded.marks * sizes.dp], &mut *dmarks);
            contraction[0] += distances(core, level, &loaded, dc, marks, dx);
            let slope = (-1.0 / core.lambda(slice)) as f32;
            dx[..count * sizes.dp].iter_mut().for_each(|x| *x *= slope);
            scatter(dx, sizes.dp, loaded.kept, range.start, &mut dq_out[part.within(&range, d)], d);
        }
    }
}
