//! Queries gather `dT`, keys gather the gradient of their columns' variances, queries take theirs: three passes, in the order
//! in which each needs what the one before has summed.

use super::{
    Core, Loaded, SavedSlice, Sizes,
    keys::{CloseKeys, Keys, close_keys_memory, keys_memory},
    queries::{CloseQueries, GatherQueries, Queries, queries_memory},
};
use crate::{
    ExtraGradients, Gradients, Parameter, Result,
    call::{Call, Saved},
    mechanism::Laplacian,
    parallel::{Parts, for_each},
    score::{Manhattan, Pairs, gradients},
    scratch::{cut, parts, room},
    simd::Level,
    structure::{
        dense::about,
        nystrom::{
            marks::Producer,
            pass::{self, Part, Pass, splits},
            tile::{Zip, transpose, zip},
        },
    },
};

/// A residual of the inverse below which its gradient is that of the exact inverse.
pub(super) const CONVERGED: f32 = 1e-4;

/// Writes the gradients.
pub(crate) fn backward(
    call: &Call<'_>,
    m: &Laplacian,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let core = Core::new(call, m);
    let (sizes, level, slices, shape) = (&core.sizes, call.level, call.shape.slices(), &call.shape);
    let ([transposed, slice_parts, partial, tied], work) = cut(work, shared(sizes, m.tied));
    let (stats, dout) = (saved.stats, saved.dout);
    let Gradients { dq, dk, dv, mut extras } = gradients;
    let dk = dk.unwrap_or(&mut *tied);
    {
        let transposed = Parts::new(&mut *transposed);
        for_each(slices, work, 0, |slice, _| {
            let (saved, len) = (SavedSlice::of(sizes, stats, slice), sizes.transposed());
            // SAFETY: slices are distinct.
            let transposed = unsafe { transposed.part(slice * len..(slice + 1) * len) };
            let u = &saved.u[..core.producer.live(slice) * sizes.dp];
            transpose(u, sizes.dp, shape.head_dim, transposed, sizes.mp);
            transposed[shape.head_dim * sizes.mp..].copy_from_slice(saved.column_factors);
        });
    }
    let transposed = &*transposed;
    {
        let gather = GatherQueries { core, transposed, stats, dout, partial: Parts::new(&mut *partial) };
        pass::run(&gather, level, slices, shape.seq_q, work);
    }
    {
        let close = CloseQueries { core, stats, partial, slice_parts: Parts::new(&mut *slice_parts) };
        pass::run_slices(&close, level, slices, work);
    }
    {
        let (dk, dv, partial) = (Parts::new(&mut *dk), Parts::new(dv), Parts::new(&mut *partial));
        let keys = Keys { core, transposed, stats, slice_parts, dk, dv, partial };
        pass::run(&keys, level, slices, shape.seq_kv, work);
    }
    {
        let slice_parts = Parts::new(&mut *slice_parts);
        let close = CloseKeys { core, transposed, stats, partial, slice_parts };
        pass::run_slices(&close, level, slices, work);
    }
    {
        let (dq, partial) = (Parts::new(&mut *dq), Parts::new(&mut *partial));
        let queries = Queries { core, transposed, stats, dout, slice_parts, dq, partial };
        pass::run(&queries, level, slices, shape.seq_q, work);
    }
    {
        let (slice_parts, dk) = (Parts::new(&mut *slice_parts), Parts::new(&mut *dk));
        let close = Close { core, partial, stats, slice_parts, dk };
        pass::run_slices(&close, level, slices, work);
    }
    if m.tied {
        dq.iter_mut().zip(&*dk).for_each(|(dq, dk)| *dq += dk);
    }
    parameters(&core, slice_parts, &mut extras, work);
    // Told at the end: whoever trains goes on with what there is.
    let mut saved_slices = (0..slices).map(|slice| SavedSlice::of(sizes, stats, slice));
    saved_slices.try_for_each(|saved| core.check_apart(saved.nearest, true))
}

/// All slices' transposed landmarks, and what is kept of each; all parts' sums; room for `dk` when tied.
fn shared(sizes: &Sizes, tied: bool) -> [usize; 4] {
    let (slices, shape) = (sizes.shape.slices(), &sizes.shape);
    let queries = splits(slices, shape.seq_q) * room(of_queries(sizes)).max(room(of_marks(sizes)));
    let keys = splits(slices, shape.seq_kv) * room(of_keys(sizes));
    let tied = if tied { shape.k_len() } else { 0 };
    [slices * sizes.transposed(), slices * room(of_slice(sizes)), slices * queries.max(keys), tied]
}

/// A part's sums over queries: `dT`, and the output gradients.
pub(super) fn of_queries(sizes: &Sizes) -> [usize; 2] {
    [sizes.marks * sizes.dvp, sizes.dvp]
}

/// A part's sums over keys: the landmarks' gradients, the bandwidth's, and `Ck^T diag(gamma) Ck`.
pub(super) fn of_keys(sizes: &Sizes) -> [usize; 3] {
    let [rows, one] = of_marks(sizes);
    [rows, one, sizes.marks * sizes.mp]
}

/// A part's sums for the landmarks: their gradients, and the bandwidth's.
pub(super) fn of_marks(sizes: &Sizes) -> [usize; 2] {
    [sizes.marks * sizes.dp, 1]
}

/// What is kept of a slice: the sum of the output gradients; `dB`, `dB^T`, `T^T`; `dX`; `(2 / n) X Gamma X`; gradients of
/// the landmarks, and of the bandwidth.
pub(super) fn of_slice(sizes: &Sizes) -> [usize; 8] {
    let (square, values) = (sizes.marks * sizes.mp, sizes.marks * sizes.dvp);
    let across = sizes.shape.value_dim * sizes.mp;
    [sizes.dvp, values, across, across, square, square, sizes.marks * sizes.dp, 1]
}

/// f32 of working memory of [`backward`].
pub(super) fn work(m: &Laplacian, sizes: &Sizes) -> usize {
    let (slices, shape) = (sizes.shape.slices(), &sizes.shape);
    let parts = [
        pass::work(slices, 1, close_keys_memory(m, sizes)),
        pass::work(slices, shape.seq_q, queries_memory(sizes)),
        pass::work(slices, shape.seq_kv, keys_memory(sizes)),
        pass::work(slices, 1, Producer::work(m.landmarks, false, shape, sizes.marks)),
        filter_memory(sizes),
    ];
    room(shared(sizes, m.tied)) + parts.into_iter().max().unwrap_or(0)
}

/// Turns `dc`, the gradient of a tile of kernels, into that of the distances; writes the tokens' and adds the marks', both but
/// for the factor `-1 / lambda`. Returns the tokens' share of [`contraction`].
pub(super) fn distances(
    core: &Core<'_>,
    level: Level,
    loaded: &Loaded<'_>,
    dc: &mut [f32],
    marks: (&[f32], &mut [f32]),
    dx: &mut [f32],
) -> f32 {
    let (count, dp) = (loaded.count, core.sizes.dp);
    let e = &mut dc[..count * loaded.stride];
    zip(level, e, &loaded.c[..e.len()], Zip::Multiply);
    e.chunks_exact_mut(loaded.stride).for_each(|row| row[loaded.marks..].fill(0.0));
    let tokens = &loaded.tokens.data[..count * dp];
    let pairs = Pairs { tokens, marks: marks.0, dim: dp, e, stride: loaded.stride };
    let dx = &mut dx[..count * dp];
    gradients(level, Manhattan, pairs, dx, marks.1);
    contraction(marks.0, tokens, dx, dp) as f32
}

/// What rows and their gradients contribute to that of the bandwidth. All gradients sum to nothing, so that rows may be
/// taken from any point: landmarks lie among them, however far all are from the origin.
fn contraction(marks: &[f32], rows: &[f32], gradients: &[f32], dp: usize) -> f64 {
    let Some(last) = (marks.len() / dp).checked_sub(1) else { return 0.0 };
    about([0, 1, 2].map(|mark| &marks[last.min(mark) * dp..][..dp]), rows, gradients)
}

/// The parts that are kept of a slice.
pub(super) fn kept_of<'a>(sizes: &Sizes, slice_parts: &'a [f32], slice: usize) -> [&'a [f32]; 8] {
    let len = room(of_slice(sizes));
    parts(&slice_parts[slice * len..][..len], of_slice(sizes))
}

/// The landmarks' gradients, from them to the keys, and the bandwidth's.
struct Close<'a> {
    core: Core<'a>,
    partial: &'a [f32],
    stats: &'a [f32],
    slice_parts: Parts<'a, f32>,
    dk: Parts<'a, f32>,
}

impl Pass for Close<'_> {
    fn memory(&self) -> usize {
        Producer::work(self.core.m.landmarks, false, &self.core.sizes.shape, self.core.sizes.marks)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let len = room(of_slice(sizes));
        let rows = sizes.shape.seq_kv * sizes.shape.head_dim;
        // SAFETY: slices are distinct.
        let kept = unsafe { self.slice_parts.part(slice * len..(slice + 1) * len) };
        // SAFETY: as above.
        let dk = unsafe { self.dk.part(slice * rows..(slice + 1) * rows) };
        let ([.., du, dlambda], _) = cut(kept, of_slice(sizes));
        let (len, splits) = (room(of_marks(sizes)), splits(sizes.shape.slices(), sizes.shape.seq_q));
        for sums in self.partial[slice * splits * len..][..splits * len].chunks_exact(len) {
            let [marks, contraction] = parts(sums, of_marks(sizes));
            // The sums are of the differences from token to landmark.
            du.iter_mut().zip(marks).for_each(|(du, x)| *du -= x);
            dlambda[0] += contraction[0];
        }
        let live = core.producer.live(slice) * sizes.dp;
        let saved = SavedSlice::of(sizes, self.stats, slice);
        let u = &saved.u[..live];
        // The distance is homogeneous of degree one in the tokens and landmarks.
        let lambda = core.lambda(slice);
        let contraction = f64::from(dlambda[0]) + contraction(u, u, &du[..live], sizes.dp);
        dlambda[0] = (contraction / (lambda * lambda)) as f32;
        du.iter_mut().for_each(|du| *du *= (-1.0 / lambda) as f32);
        core.share_gradient(&saved, live / sizes.dp, du);
        core.producer.backward(level, slice, &du[..live], sizes.dp, dk, memory);
    }
}

/// One filter's gradient at one slot, and the slot's tokens.
fn filter_memory(sizes: &Sizes) -> usize {
    room([sizes.dp, sizes.marks * sizes.dp])
}

/// The gradients of the mechanism's own tensors that are asked for.
fn parameters(core: &Core<'_>, slice_parts: &[f32], extras: &mut ExtraGradients<'_>, work: &mut [f32]) {
    let (sizes, shape) = (&core.sizes, &core.sizes.shape);
    for (parameter, out) in extras.iter() {
        out.fill(0.0);
        if parameter == Parameter::LandmarkWeight {
            let ([sums, rows], _) = cut(work, [sizes.dp, sizes.marks * sizes.dp]);
            let slots = out.len() / shape.head_dim;
            for slot in 0..slots {
                sums.fill(0.0);
                for slice in 0..shape.slices() {
                    let du = kept_of(sizes, slice_parts, slice)[6];
                    let tokens = core.producer.tokens(slice, core.call.k);
                    core.producer.filter_gradient(core.call.level, tokens, slot, du, sums, rows);
                }
                out[slot..].iter_mut().step_by(slots).zip(&*sums).for_each(|(out, sum)| *out = *sum);
            }
            continue;
        }
        for slice in 0..shape.slices() {
            out[slice % shape.heads] += kept_of(sizes, slice_parts, slice)[7][0];
        }
    }
}
