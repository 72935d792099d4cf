//! `dW = P G`, the landmarks' share, then tile by tile `dP = W^T G + dZ^T V` and what it says of tokens and landmarks.
//!
//! "Softmax-free Linear Transformers", eq. 12 in the form `dA = -(dZ / c) (W / c)^T`: of rank `value_dim`, no product of
//! three landmark matrices.

use super::{
    Core, Loaded, SavedSlice, Sizes,
    forward::{Gather, partial},
    middle::{Middle, middle_memory},
    producer_work, tile_sizes,
};
use crate::{
    ExtraGradients, Gradients, Parameter, Result,
    call::{Call, Saved},
    mechanism::{Landmarks, Soft},
    parallel::Parts,
    score::{Pairs, Squared, gradients},
    scratch::{cut, parts, room},
    simd::{
        Level,
        product::{Add, Right, Size, Store, multiply, multiply_add},
    },
    structure::{
        dense::{Rows, about},
        nystrom::{
            pass::{self, Part, Pass, TOKENS, splits},
            tile::{Zip, scatter, transpose_all, zip},
            values,
        },
    },
};

/// Writes the gradients.
pub(crate) fn backward(
    call: &Call<'_>,
    m: &Soft,
    mechanism: &'static str,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let core = Core::new(call, m, mechanism);
    let (sizes, slices, seq) = (&core.sizes, call.shape.slices(), call.shape.seq_q);
    let ([transposed, slice_parts, partial_w, partial_u], work) = cut(work, shared(sizes));
    let stats = saved.stats;
    let live = |slice: usize| &SavedSlice::of(sizes, stats, slice).u[..core.producer.live(slice) * sizes.dp];
    transpose_all(live, call.shape.head_dim, sizes.mp, transposed, work);
    let gather = Gather { core, transposed, x: saved.dout, degrees: false, partial: Parts::new(&mut *partial_w) };
    pass::run(&gather, call.level, slices, seq, work);
    let middle = Middle { core, transposed, stats, partial: partial_w, slice_parts: Parts::new(&mut *slice_parts) };
    pass::run_slices(&middle, call.level, slices, work);
    let Gradients { dq, dv, mut extras, .. } = gradients;
    {
        let (dq, dv) = (Parts::new(&mut *dq), Parts::new(dv));
        let partial = Parts::new(&mut *partial_u);
        let spread = Spread { core, transposed, stats, dout: saved.dout, slice_parts, dq, dv, partial };
        pass::run(&spread, call.level, slices, seq, work);
    }
    let close =
        Close { core, stats, partial: partial_u, slice_parts: Parts::new(&mut *slice_parts), dq: Parts::new(dq) };
    pass::run_slices(&close, call.level, slices, work);
    parameters(&core, saved, slice_parts, &mut extras, work);
    Ok(())
}

/// All slices' transposed landmarks, and what the middle makes of each; all parts' sums by landmark.
fn shared(sizes: &Sizes) -> [usize; 4] {
    let (slices, seq) = (sizes.shape.slices(), sizes.shape.seq_q);
    let parts = slices * splits(slices, seq);
    [slices * sizes.transposed(), slices * room(of_slice(sizes)), parts * partial(sizes), parts * landmark_part(sizes)]
}

/// A part's sums of the landmarks' gradients, and of the scale's.
fn landmark_part(sizes: &Sizes) -> usize {
    room([sizes.marks * sizes.dp, 1])
}

/// What is kept of a slice: `dZ`, `dZ^T`, `W^T`; the degrees' gradients; the landmarks' mean; gradients of the landmarks, of
/// gain and offset, and of the scale.
pub(super) fn of_slice(sizes: &Sizes) -> [usize; 8] {
    let (values, channels) = (sizes.marks * sizes.dvp, sizes.marks * sizes.dp);
    let across = sizes.shape.value_dim * sizes.mp;
    [values, across, across, sizes.mp, sizes.dp, channels, 2 * sizes.dp, 1]
}

/// f32 of working memory of [`backward`].
pub(super) fn work(m: &Soft, sizes: &Sizes) -> usize {
    let (slices, seq) = (sizes.shape.slices(), sizes.shape.seq_q);
    let of_slices = middle_memory(m, sizes).max(close_memory(m, sizes));
    room(shared(sizes))
        + pass::work(slices, 1, of_slices).max(pass::work(slices, seq, spread_memory(sizes))).max(filter_memory(sizes))
}

/// Gradients of tokens and values, and sums for the landmarks.
struct Spread<'a> {
    core: Core<'a>,
    transposed: &'a [f32],
    stats: &'a [f32],
    dout: &'a [f32],
    slice_parts: &'a [f32],
    dq: Parts<'a, f32>,
    dv: Parts<'a, f32>,
    partial: Parts<'a, f32>,
}

fn spread_sizes(sizes: &Sizes) -> [usize; 5] {
    // dP then E; rows of dv; of v; dq; the tile's own parts
    let (values, channels) = (TOKENS * sizes.dvp, TOKENS * sizes.dp);
    [TOKENS * sizes.mp, values, values, channels, room(tile_sizes(sizes))]
}

fn spread_memory(sizes: &Sizes) -> usize {
    room(spread_sizes(sizes))
}

impl Pass for Spread<'_> {
    fn memory(&self) -> usize {
        spread_memory(&self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (seq, d, dv) = (sizes.shape.seq_q, sizes.shape.head_dim, sizes.shape.value_dim);
        let (len, sums_len) = (room(of_slice(sizes)), landmark_part(sizes));
        // SAFETY: parts are distinct ranges of rows, and each has its own sums.
        let (dq_out, dv_out, sums) = unsafe {
            (
                self.dq.part(part.rows(seq, d)),
                self.dv.part(part.rows(seq, dv)),
                self.partial.part(part.index * sums_len..(part.index + 1) * sums_len),
            )
        };
        let ([sums, dscale], _) = cut(sums, [sizes.marks * sizes.dp, 1]);
        sums.fill(0.0);
        let [dz, dz_across, w_across, ddegrees, centre, ..] =
            parts(&self.slice_parts[slice * len..][..len], of_slice(sizes));
        let ([e, dv_rows, v_room, dx, tile_memory], _) = cut(memory, spread_sizes(sizes));
        let v = core.part(core.call.v, slice, dv);
        let (u, slope) = (SavedSlice::of(sizes, self.stats, slice).u, (-2.0 * core.scale(slice)) as f32);
        let mut contraction = 0.0;
        for range in part.tiles() {
            let Loaded { kept, q, x: g, tile } =
                core.load(level, slice, range.clone(), self.transposed, self.dout, tile_memory);
            let (tokens, marks) = (tile.tokens, tile.marks);
            let v = Rows::gather(v, dv, kept, false, v_room);
            tile.spread(level, dz, sizes.dvp, dv_rows);
            scatter(dv_rows, sizes.dvp, kept, range.start, &mut dv_out[part.within(&range, dv)], dv);
            let size = Size { rows: tokens, cols: tile.stride, depth: dv };
            let e = &mut e[..tokens * tile.stride];
            let right = |data| Right { data, stride: sizes.mp };
            multiply(level, size, g.as_left(), right(w_across), Store { data: e, stride: tile.stride });
            multiply_add(level, size, v.as_left(), right(dz_across), Add { data: e, stride: tile.stride });
            if core.takes_token_degrees() {
                zip(level, e, &ddegrees[..tile.stride], Zip::Add);
            }
            zip(level, e, &tile.data[..tokens * tile.stride], Zip::Multiply);
            let dx = &mut dx[..tokens * sizes.dp];
            let pairs = Pairs { tokens: q.data, marks: &u[..marks * sizes.dp], dim: sizes.dp, e, stride: tile.stride };
            gradients(level, Squared, pairs, dx, sums);
            contraction += about([centre; 3], q.data, dx);
            dx.iter_mut().for_each(|dx| *dx *= slope);
            scatter(dx, sizes.dp, kept, range.start, &mut dq_out[part.within(&range, d)], d);
        }
        dscale[0] = contraction as f32;
        values::Filter::of_soft(core.call, core.m).add(&part, self.dout, true, dv_out);
    }
}

/// The landmarks' gradients, from them to the tokens, and the scale's.
struct Close<'a> {
    core: Core<'a>,
    stats: &'a [f32],
    partial: &'a [f32],
    slice_parts: Parts<'a, f32>,
    dq: Parts<'a, f32>,
}

fn close_memory(m: &Soft, sizes: &Sizes) -> usize {
    producer_work(m, sizes)
}

impl Pass for Close<'_> {
    fn memory(&self) -> usize {
        close_memory(self.core.m, &self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (len, sums_len) = (room(of_slice(sizes)), landmark_part(sizes));
        let (splits, n) = (splits(sizes.shape.slices(), sizes.shape.seq_q), core.producer.live(slice));
        let rows = sizes.shape.seq_q * sizes.shape.head_dim;
        // SAFETY: slices are distinct.
        let (kept, dq) = unsafe {
            (self.slice_parts.part(slice * len..(slice + 1) * len), self.dq.part(slice * rows..(slice + 1) * rows))
        };
        let ([.., centre, du, norm, dscale], _) = cut(kept, of_slice(sizes));
        let mut contraction = 0.0;
        for sums in self.partial[slice * splits * sums_len..][..splits * sums_len].chunks_exact(sums_len) {
            let [sums, tokens] = parts(sums, [sizes.marks * sizes.dp, 1]);
            // The sums are of the differences from token to landmark.
            du.iter_mut().zip(sums).for_each(|(du, x)| *du -= x);
            contraction += f64::from(tokens[0]);
        }
        // The exponent is homogeneous of degree two in the differences.
        let (slope, live) = ((-2.0 * core.scale(slice)) as f32, n * sizes.dp);
        contraction += about([&*centre; 3], &SavedSlice::of(sizes, self.stats, slice).u[..live], &du[..live]);
        dscale[0] = -contraction as f32;
        du.iter_mut().for_each(|du| *du *= slope);
        if let Some(activation) = core.norm() {
            let raw = SavedSlice::of(sizes, self.stats, slice).raw;
            let (dgamma, dbeta) = norm.split_at_mut(sizes.dp);
            activation.backward(&raw[..live], sizes.dp, &mut du[..live], [dgamma, dbeta]);
        }
        core.producer.backward(level, slice, &du[..live], sizes.dp, dq, memory);
    }
}

/// One filter's gradient at one slot, and the slot's tokens.
fn filter_memory(sizes: &Sizes) -> usize {
    pass::work(
        sizes.shape.slices() * sizes.shape.head_dim,
        1,
        room([sizes.shape.head_dim * sizes.dp, sizes.marks * sizes.dp]),
    )
}

/// The gradients of the mechanism's own tensors that are asked for.
fn parameters(
    core: &Core<'_>,
    saved: &Saved<'_>,
    slice_parts: &[f32],
    extras: &mut ExtraGradients<'_>,
    work: &mut [f32],
) {
    let (sizes, shape) = (&core.sizes, &core.sizes.shape);
    let of_slices =
        || slice_parts.chunks_exact(room(of_slice(sizes))).map(|part| parts(part, of_slice(sizes))).enumerate();
    for (parameter, out) in extras.iter() {
        out.fill(0.0);
        if let (Parameter::LandmarkWeight, Landmarks::Conv { .. }) = (parameter, core.m.landmarks) {
            filter_gradient(core, slice_parts, out, work);
            continue;
        }
        if parameter == Parameter::ValueWeight {
            values::Filter::of_soft(core.call, core.m).gradient(saved.dout, out);
            continue;
        }
        for (slice, [_, _, _, _, _, du, norm, dscale]) in of_slices() {
            let range = parameter.part(out.len(), shape, slice);
            let out = &mut out[range];
            match parameter {
                Parameter::Scale => out[0] += dscale[0],
                Parameter::LandmarkNormGamma => out.iter_mut().zip(norm).for_each(|(out, x)| *out += x),
                Parameter::LandmarkNormBeta => out.iter_mut().zip(&norm[sizes.dp..]).for_each(|(out, x)| *out += x),
                Parameter::GivenLandmarks => {
                    for (out, du) in out.chunks_exact_mut(shape.head_dim).zip(du.chunks_exact(sizes.dp)) {
                        out.copy_from_slice(&du[..shape.head_dim]);
                    }
                }
                _ => {}
            }
        }
    }
}

/// The gradient of the landmarks' filter: slot by slot, over all slices in their order.
fn filter_gradient(core: &Core<'_>, slice_parts: &[f32], out: &mut [f32], work: &mut [f32]) {
    let d = core.sizes.shape.head_dim;
    let slots = out.len() / (d * d);
    let pass = Filter { core: *core, slice_parts, slots, out: Parts::new(out) };
    pass::run_slices(&pass, core.call.level, slots, work);
}

struct Filter<'a> {
    core: Core<'a>,
    slice_parts: &'a [f32],
    slots: usize,
    out: Parts<'a, f32>,
}

impl Pass for Filter<'_> {
    fn memory(&self) -> usize {
        let sizes = &self.core.sizes;
        room([sizes.shape.head_dim * sizes.dp, sizes.marks * sizes.dp])
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slot) = (&self.core, &self.core.sizes, part.slice);
        let d = sizes.shape.head_dim;
        let ([sums, rows], _) = cut(memory, [d * sizes.dp, sizes.marks * sizes.dp]);
        sums.fill(0.0);
        for (slice, kept) in self.slice_parts.chunks_exact(room(of_slice(sizes))).enumerate() {
            let du = parts(kept, of_slice(sizes))[5];
            core.producer.filter_gradient(level, core.producer.tokens(slice, core.call.q), slot, du, sums, rows);
        }
        for (n, sum) in sums.chunks_exact(sizes.dp).flat_map(|row| &row[..d]).enumerate() {
            // SAFETY: slots are distinct.
            let out = unsafe { self.out.part(n * self.slots + slot..n * self.slots + slot + 1) };
            out[0] = *sum;
        }
    }
}
