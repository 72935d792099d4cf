//! Moments of the queries' kernel, then keys and values gathered into `B`, then the outputs.

use std::sync::Mutex;

use super::{Core, Loaded, SavedSlice, Side, Sizes, coinciding::Counted, method, tile_sizes};
use crate::{
    Error, Result,
    call::Call,
    linalg::{Entries, Method, Order},
    mechanism::{Centering, InverseGradient, Laplacian},
    parallel::Parts,
    scratch::{cut, parts, room},
    simd::{
        Level,
        product::{Left, Right, Size, Store, multiply},
    },
    structure::{
        dense::{Rows, dot},
        nystrom::{
            marks::Producer,
            moments::Moments,
            pass::{self, Part, Pass, TOKENS, splits},
            tile::{Zip, scatter, transpose, zip},
        },
    },
};

/// Writes `out`, and what the backward pass needs of every slice.
pub(crate) fn forward(
    call: &Call<'_>,
    m: &Laplacian,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let core = Core::new(call, m);
    let (level, slices, shape) = (call.level, call.shape.slices(), &call.shape);
    let ([transposed, partial], work) = cut(work, shared(&core.sizes));
    {
        let (stats, transposed) = (Parts::new(&mut *stats), Parts::new(&mut *transposed));
        let prepare = Prepare { core, stats, transposed, failure: Mutex::new(None) };
        pass::run_slices(&prepare, level, slices, work);
        if let Some((_, error)) = prepare.failure.into_inner().unwrap_or_default() {
            return Err(error);
        }
    }
    let transposed = &*transposed;
    if core.takes_moments() {
        pass::run(&Spread { core, transposed, out: Parts::new(&mut *partial) }, level, slices, shape.seq_q, work);
        let close = CloseMoments { core, partial: Parts::new(&mut *partial), stats: Parts::new(&mut *stats) };
        pass::run_slices(&close, level, slices, work);
    }
    {
        let (heads, factors) = stats.split_at_mut(core.sizes.heads());
        let (partial, factors) = (Parts::new(&mut *partial), Parts::new(factors));
        pass::run(&Gather { core, transposed, heads, partial, factors }, level, slices, shape.seq_kv, work);
    }
    let close = CloseGather { core, partial: Parts::new(&mut *partial), stats: Parts::new(&mut *stats) };
    pass::run_slices(&close, level, slices, work);
    pass::run(&Apply { core, transposed, stats, out: Parts::new(out) }, level, slices, shape.seq_q, work);
    Ok(())
}

/// All slices' transposed landmarks; all parts' sums.
fn shared(sizes: &Sizes) -> [usize; 2] {
    let slices = sizes.shape.slices();
    let of_queries = splits(slices, sizes.shape.seq_q) * Moments::len(sizes.mp, sizes.mp);
    let of_keys = splits(slices, sizes.shape.seq_kv) * room(gathered(sizes));
    [slices * sizes.transposed(), slices * of_queries.max(of_keys)]
}

/// A part's sums over keys: moments of kernel and whitened values, and the sum of the values.
fn gathered(sizes: &Sizes) -> [usize; 2] {
    [Moments::len(sizes.mp, sizes.dvp), sizes.dvp]
}

/// f32 of working memory of [`forward`].
pub(super) fn work(m: &Laplacian, sizes: &Sizes) -> usize {
    let (slices, shape) = (sizes.shape.slices(), &sizes.shape);
    let parts = [
        pass::work(slices, 1, prepare_memory(m, sizes)),
        pass::work(slices, shape.seq_q, spread_memory(sizes).max(apply_memory(sizes))),
        pass::work(slices, shape.seq_kv, gather_memory(sizes)),
    ];
    room(shared(sizes)) + parts.into_iter().max().unwrap_or(0)
}

/// Landmarks and their inverse.
struct Prepare<'a> {
    core: Core<'a>,
    stats: Parts<'a, f32>,
    transposed: Parts<'a, f32>,
    /// The first slice that has no inverse.
    failure: Mutex<Option<(usize, Error)>>,
}

fn prepare_memory(m: &Laplacian, sizes: &Sizes) -> usize {
    let order = Order { n: sizes.marks, stride: sizes.mp };
    let inverse = method(m, InverseGradient::Implicit).work(order);
    room([order.len()]) + inverse.max(Producer::work(m.landmarks, false, &sizes.shape, sizes.marks))
}

impl Pass for Prepare<'_> {
    fn memory(&self) -> usize {
        prepare_memory(self.core.m, &self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let saved = room(sizes.saved());
        // SAFETY: slices are distinct.
        let stats = unsafe { self.stats.part(slice * saved..(slice + 1) * saved) };
        // SAFETY: as above.
        let transposed = unsafe { self.transposed.part(slice * sizes.transposed()..(slice + 1) * sizes.transposed()) };
        stats.fill(0.0);
        let ([u, x, .., factors, first, nearest], _) = cut(stats, sizes.saved());
        let ([w], work) = cut(memory, [sizes.marks * sizes.mp]);
        let order = core.order(slice);
        let u = &mut u[..order.n * sizes.dp];
        core.producer.make(level, core.producer.tokens(slice, core.call.k), u, sizes.dp, work);
        transpose(u, sizes.dp, sizes.shape.head_dim, transposed, sizes.mp);
        core.marks(transposed, slice).among(level, u, w);
        let counted = Counted { factors: &mut *factors, first, nearest: &mut nearest[0] };
        counted.write(order, w, u, sizes.dp);
        transposed[sizes.shape.head_dim * sizes.mp..].copy_from_slice(factors);
        let norm = core.merge(order, factors, w);
        let (method, x) = (method(core.m, InverseGradient::Implicit), Entries { high: x, low: &mut [] });
        let inverted = core
            .check_apart(nearest[0], false)
            .and_then(|()| Method { start: norm.map(f64::recip), ..method }.invert(level, order, w, x, work));
        if let Err(error) = inverted
            && let Ok(mut failure) = self.failure.lock()
            && failure.as_ref().is_none_or(|(first, _)| slice < *first)
        {
            *failure = Some((slice, error));
        }
    }
}

/// Moments of the rows of `Cq`.
struct Spread<'a> {
    core: Core<'a>,
    transposed: &'a [f32],
    out: Parts<'a, f32>,
}

fn spread_memory(sizes: &Sizes) -> usize {
    room(tile_sizes(sizes)) + room([sizes.mp, sizes.mp])
}

impl Pass for Spread<'_> {
    fn memory(&self) -> usize {
        spread_memory(&self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes) = (&self.core, &self.core.sizes);
        let (mp, len) = (sizes.mp, Moments::len(sizes.mp, sizes.mp));
        // SAFETY: parts are distinct.
        let out = unsafe { self.out.part(part.index * len..(part.index + 1) * len) };
        let (mut sum, (mut means, memory)) = (Moments::new(out, mp, mp), cut(memory, [mp, mp]));
        sum.clear();
        for range in part.tiles() {
            let side = (Side::Query, part.slice);
            let loaded = core.load(level, side, range, self.transposed, None, memory);
            let means = means.each_mut().map(|mean| &mut **mean);
            sum.add_columns(level, loaded.c, loaded.stride, means);
        }
    }
}

/// `S` and the mean of the rows of `Cq`.
struct CloseMoments<'a> {
    core: Core<'a>,
    partial: Parts<'a, f32>,
    stats: Parts<'a, f32>,
}

impl Pass for CloseMoments<'_> {
    fn memory(&self) -> usize {
        0
    }

    fn run(&self, _: Level, part: Part, _: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (saved, len) = (room(sizes.saved()), Moments::len(sizes.mp, sizes.mp));
        let splits = splits(sizes.shape.slices(), sizes.shape.seq_q);
        // SAFETY: slices are distinct.
        let stats = unsafe { self.stats.part(slice * saved..(slice + 1) * saved) };
        // SAFETY: as above.
        let partial = unsafe { self.partial.part(slice * splits * len..(slice + 1) * splits * len) };
        let ([_, _, s, mean, ..], _) = cut(stats, sizes.saved());
        let sum = merged(partial, len, |part| Moments::new(part, sizes.mp, sizes.mp));
        let queries = core.kept(Side::Query, slice).max(1) as f32;
        mean.copy_from_slice(sum.x);
        s.iter_mut().zip(&*sum.cross).for_each(|(s, x)| *s = x / queries);
    }
}

/// All parts' moments, merged in their order into the first.
fn merged<'p>(partial: &'p mut [f32], len: usize, moments: impl Fn(&'p mut [f32]) -> Moments<'p>) -> Moments<'p> {
    let (first, rest) = partial.split_at_mut(len);
    let mut sum = moments(first);
    rest.chunks_exact_mut(len).for_each(|part| sum.merge(&moments(part)));
    sum
}

/// Factors on the values; moments of `Ck` and the whitened values.
struct Gather<'a> {
    core: Core<'a>,
    transposed: &'a [f32],
    /// What all slices have saved so far.
    heads: &'a [f32],
    partial: Parts<'a, f32>,
    factors: Parts<'a, f32>,
}

fn gather_memory(sizes: &Sizes) -> usize {
    let tile = TOKENS * sizes.mp;
    room(tile_sizes(sizes)) + room([sizes.mp, sizes.dvp, tile, tile, TOKENS * sizes.dvp])
}

impl Pass for Gather<'_> {
    fn memory(&self) -> usize {
        gather_memory(&self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (mp, dvp, len) = (sizes.mp, sizes.dvp, room(gathered(sizes)));
        // SAFETY: parts are distinct.
        let partial = unsafe { self.partial.part(part.index * len..(part.index + 1) * len) };
        // SAFETY: parts are distinct ranges of rows.
        let factors = unsafe { self.factors.part(part.rows(sizes.shape.seq_kv, 1)) };
        let saved = room(sizes.saved());
        let [_, x, s, ..] = parts(&self.heads[slice * saved..][..saved], sizes.saved());
        let ([moments, values], _) = cut(partial, gathered(sizes));
        let ([c_mean, v_mean, a, b, whitened], memory) = cut(memory, [mp, dvp, TOKENS * mp, TOKENS * mp, TOKENS * dvp]);
        let mut sum = Moments::new(moments, mp, dvp);
        sum.clear();
        values.fill(0.0);
        factors.fill(0.0);
        let scale = core.weight_scale(slice) as f32;
        for range in part.tiles() {
            let loaded = core.load(level, (Side::Key, slice), range, self.transposed, Some(core.call.v), memory);
            let whitened = &mut whitened[..loaded.count * dvp];
            if core.whitens() {
                variances(core, level, &loaded, x, s, a, b);
            }
            for (n, (&j, row)) in loaded.kept.iter().zip(whitened.chunks_exact_mut(dvp)).enumerate() {
                let factor = if core.whitens() { scale * a[n * loaded.stride] } else { scale };
                factors[j as usize - part.tokens.start] = factor;
                let v = &loaded.rows.data[n * dvp..][..dvp];
                row.iter_mut().zip(v).for_each(|(w, v)| *w = factor * v);
                values.iter_mut().zip(v).for_each(|(sum, v)| *sum += v);
            }
            if core.centres(Centering::PerQuery) {
                sum.add_rows(level, [loaded.c, whitened], [loaded.stride, dvp], [&mut *c_mean, &mut *v_mean]);
            } else {
                let rows = Rows { data: whitened, stride: dvp };
                loaded.tile().gather(level, rows, sum.cross);
            }
        }
    }
}

/// Writes `a = C X` and `b = a S`, and to the first of each row of `a` one over the standard deviation: the root of
/// `<a, b> + eps`.
fn variances(core: &Core<'_>, level: Level, loaded: &Loaded<'_>, x: &[f32], s: &[f32], a: &mut [f32], b: &mut [f32]) {
    whiten(core, level, loaded, x, s, a, b);
    let stride = loaded.stride;
    for (a, b) in a.chunks_exact_mut(stride).zip(b.chunks_exact(stride)).take(loaded.count) {
        let variance = dot(&a[..loaded.marks], &b[..loaded.marks]).max(0.0);
        a[0] = (variance + core.m.whiten_eps).powf(-0.5) as f32;
    }
}

/// Writes `a = C X` and `b = a S`.
pub(super) fn whiten(
    core: &Core<'_>,
    level: Level,
    loaded: &Loaded<'_>,
    x: &[f32],
    s: &[f32],
    a: &mut [f32],
    b: &mut [f32],
) {
    let (mp, stride) = (core.sizes.mp, loaded.stride);
    let size = Size { rows: loaded.count, cols: stride, depth: loaded.marks };
    let left = |data| Left { data, row_stride: stride, depth_stride: 1 };
    multiply(level, size, left(&*loaded.c), Right { data: x, stride: mp }, Store { data: &mut *a, stride });
    multiply(level, size, left(&*a), Right { data: s, stride: mp }, Store { data: b, stride });
}

/// `B`, `T = X B`, the means and the bias.
struct CloseGather<'a> {
    core: Core<'a>,
    partial: Parts<'a, f32>,
    stats: Parts<'a, f32>,
}

impl Pass for CloseGather<'_> {
    fn memory(&self) -> usize {
        0
    }

    fn run(&self, level: Level, part: Part, _: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (saved, len) = (room(sizes.saved()), room(gathered(sizes)));
        let splits = splits(sizes.shape.slices(), sizes.shape.seq_kv);
        // SAFETY: slices are distinct.
        let stats = unsafe { self.stats.part(slice * saved..(slice + 1) * saved) };
        // SAFETY: as above.
        let partial = unsafe { self.partial.part(slice * splits * len..(slice + 1) * splits * len) };
        let ([_, x, _, _, key_mean, b, t, value_mean, bias, ..], _) = cut(stats, sizes.saved());
        let keys = core.kept(Side::Key, slice).max(1) as f32;
        if core.m.bias_one_over_n {
            for part in partial.chunks_exact(len) {
                let [_, values] = parts(part, gathered(sizes));
                bias.iter_mut().zip(values).for_each(|(bias, sum)| *bias += sum / keys);
            }
        }
        let moments = |part| Moments::new(part, sizes.mp, sizes.dvp);
        if core.centres(Centering::PerQuery) {
            let sum = merged(partial, len, moments);
            key_mean.copy_from_slice(sum.x);
            value_mean.copy_from_slice(sum.y);
            b.copy_from_slice(&sum.cross[..b.len()]);
        } else {
            for part in partial.chunks_exact_mut(len) {
                b.iter_mut().zip(&*moments(part).cross).for_each(|(b, x)| *b += x);
            }
        }
        let Order { n, stride } = core.order(slice);
        let left = Left { data: x, row_stride: stride, depth_stride: 1 };
        let size = Size { rows: n, cols: sizes.dvp, depth: n };
        multiply(level, size, left, Right { data: b, stride: sizes.dvp }, Store { data: t, stride: sizes.dvp });
    }
}

/// `out = (Cq - mean) T + bias`.
struct Apply<'a> {
    core: Core<'a>,
    transposed: &'a [f32],
    stats: &'a [f32],
    out: Parts<'a, f32>,
}

fn apply_memory(sizes: &Sizes) -> usize {
    room(tile_sizes(sizes)) + room([TOKENS * sizes.dvp])
}

impl Pass for Apply<'_> {
    fn memory(&self) -> usize {
        apply_memory(&self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes, slice) = (&self.core, &self.core.sizes, part.slice);
        let (seq, dv) = (sizes.shape.seq_q, sizes.shape.value_dim);
        // SAFETY: parts are distinct ranges of rows.
        let out = unsafe { self.out.part(part.rows(seq, dv)) };
        let ([rows], memory) = cut(memory, [TOKENS * sizes.dvp]);
        let saved = SavedSlice::of(sizes, self.stats, slice);
        let any = core.kept(Side::Key, slice) > 0;
        for range in part.tiles() {
            let loaded = core.load(level, (Side::Query, slice), range.clone(), self.transposed, None, memory);
            centre_queries(core, level, &saved, loaded.c, loaded.stride);
            loaded.tile().spread(level, saved.t, sizes.dvp, rows);
            zip(level, &mut rows[..loaded.count * sizes.dvp], saved.bias, Zip::Add);
            let kept = if any { loaded.kept } else { &[] };
            scatter(rows, sizes.dvp, kept, range.start, &mut out[part.within(&range, dv)], dv);
        }
    }
}

/// Takes the mean off the rows of `Cq`, where keys are centred.
pub(super) fn centre_queries(core: &Core<'_>, level: Level, saved: &SavedSlice<'_>, c: &mut [f32], stride: usize) {
    if core.centres(Centering::PerKey) {
        zip(level, c, &saved.query_mean[..stride], Zip::Subtract);
    }
}
