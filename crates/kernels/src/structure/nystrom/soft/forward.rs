//! `Z = P V`, the landmarks' share, `out = P^T W`.

use std::sync::Mutex;

use super::{Core, Loaded, SavedSlice, Sizes, producer_work, tile_sizes};
use crate::{
    Error, Result,
    call::Call,
    linalg::{Entries, Order, wide},
    mechanism::{Degree, Soft},
    parallel::Parts,
    scratch::{cut, room},
    simd::Level,
    structure::nystrom::{
        pass::{self, Part, Pass, splits},
        tile::{scatter, transpose},
        values::Filter,
    },
};

/// Writes `out`, and what the backward pass needs of every slice.
pub(crate) fn forward(
    call: &Call<'_>,
    m: &Soft,
    mechanism: &'static str,
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    let core = Core::new(call, m, mechanism);
    let (slices, seq) = (call.shape.slices(), call.shape.seq_q);
    let ([transposed, partial], work) = cut(work, shared(&core.sizes));
    let prepare = Prepare {
        core,
        stats: Parts::new(&mut *stats),
        transposed: Parts::new(&mut *transposed),
        failure: Mutex::new(None),
    };
    pass::run_slices(&prepare, call.level, slices, work);
    if let Some((_, error)) = prepare.failure.into_inner().unwrap_or_default() {
        return Err(error);
    }
    let gather =
        Gather { core, transposed, x: call.v, degrees: core.takes_token_degrees(), partial: Parts::new(partial) };
    pass::run(&gather, call.level, slices, seq, work);
    pass::run_slices(&Middle { core, partial, stats: Parts::new(&mut *stats) }, call.level, slices, work);
    pass::run(&Spread { core, transposed, stats, out: Parts::new(out) }, call.level, slices, seq, work);
    Ok(())
}

/// All slices' transposed landmarks; all parts' sums.
fn shared(sizes: &Sizes) -> [usize; 2] {
    let (slices, seq) = (sizes.shape.slices(), sizes.shape.seq_q);
    [slices * sizes.transposed(), slices * splits(slices, seq) * partial(sizes)]
}

/// A part's sums: `P V`, and the degrees.
pub(super) fn partial(sizes: &Sizes) -> usize {
    room([sizes.marks * sizes.dvp, sizes.mp])
}

/// f32 of working memory of [`forward`].
pub(super) fn work(m: &Soft, sizes: &Sizes) -> usize {
    let (slices, seq) = (sizes.shape.slices(), sizes.shape.seq_q);
    let of_slices = prepare_memory(m, sizes).max(middle_memory(sizes));
    let of_parts = room(tile_sizes(sizes)) + spread_memory(sizes);
    room(shared(sizes)) + pass::work(slices, 1, of_slices).max(pass::work(slices, seq, of_parts))
}

fn prepare_memory(m: &Soft, sizes: &Sizes) -> usize {
    let order = Order { n: sizes.marks, stride: sizes.mp };
    let work = super::method(m, "").work(order).max(producer_work(m, sizes));
    room([order.len()]) + work
}

fn middle_memory(sizes: &Sizes) -> usize {
    room([sizes.mp]) + wide::product_work(sizes.marks, sizes.dvp)
}

fn spread_memory(sizes: &Sizes) -> usize {
    room([pass::TOKENS * sizes.dvp])
}

impl Core<'_> {
    pub(super) fn takes_token_degrees(&self) -> bool {
        self.m.degree == Some(Degree::Token)
    }
}

/// Landmarks and their inverse.
struct Prepare<'a> {
    core: Core<'a>,
    stats: Parts<'a, f32>,
    transposed: Parts<'a, f32>,
    /// The first slice that has no inverse.
    failure: Mutex<Option<(usize, Error)>>,
}

impl Pass for Prepare<'_> {
    fn memory(&self) -> usize {
        prepare_memory(self.core.m, &self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, slice) = (&self.core, part.slice);
        let sizes = &core.sizes;
        let saved = room(sizes.saved());
        // SAFETY: slices are distinct.
        let (stats, transposed) = unsafe {
            (
                self.stats.part(slice * saved..(slice + 1) * saved),
                self.transposed.part(slice * sizes.transposed()..(slice + 1) * sizes.transposed()),
            )
        };
        stats.fill(0.0);
        let ([u, raw, high, low, c, ..], _) = cut(stats, sizes.saved());
        let ([a], work) = cut(memory, [sizes.marks * sizes.mp]);
        let order = core.order(slice);
        let live = order.n * sizes.dp;
        let tokens = core.producer.tokens(slice, core.call.q);
        match core.norm() {
            Some(norm) => {
                core.producer.make(level, tokens, &mut raw[..live], sizes.dp, work);
                norm.forward(&raw[..live], sizes.dp, &mut u[..live]);
            }
            None => core.producer.make(level, tokens, &mut u[..live], sizes.dp, work),
        }
        transpose(&u[..live], sizes.dp, core.call.shape.head_dim, transposed, sizes.mp);
        core.marks(transposed, slice).among(level, &u[..live], a);
        if core.m.degree == Some(Degree::Landmark) {
            for (c, row) in c.iter_mut().zip(a.chunks_exact(sizes.mp)).take(order.n) {
                *c = row[..order.n].iter().map(|&x| f64::from(x)).sum::<f64>().powf(-0.5) as f32;
            }
        } else {
            c.fill(1.0);
        }
        if let Err(error) = core.method().invert(level, order, a, Entries { high, low }, work)
            && let Ok(mut failure) = self.failure.lock()
            && failure.as_ref().is_none_or(|(first, _)| slice < *first)
        {
            *failure = Some((slice, error));
        }
    }
}

/// `P x` of every part, and the sums of the rows of `P`.
pub(super) struct Gather<'a> {
    pub core: Core<'a>,
    pub transposed: &'a [f32],
    pub x: &'a [f32],
    pub degrees: bool,
    pub partial: Parts<'a, f32>,
}

impl Pass for Gather<'_> {
    fn memory(&self) -> usize {
        room(self.core.tile_sizes())
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let sizes = &self.core.sizes;
        let len = partial(sizes);
        // SAFETY: parts are distinct.
        let sums = unsafe { self.partial.part(part.index * len..(part.index + 1) * len) };
        let ([sums, degrees], _) = cut(sums, [sizes.marks * sizes.dvp, sizes.mp]);
        sums.fill(0.0);
        degrees.fill(0.0);
        for range in part.tiles() {
            let Loaded { tile, x, .. } = self.core.load(level, part.slice, range, self.transposed, self.x, memory);
            tile.gather(level, x, sums);
            if self.degrees {
                tile.add_columns(level, degrees);
            }
        }
    }
}

/// `W = c Y c Z`.
struct Middle<'a> {
    core: Core<'a>,
    partial: &'a [f32],
    stats: Parts<'a, f32>,
}

impl Pass for Middle<'_> {
    fn memory(&self) -> usize {
        middle_memory(&self.core.sizes)
    }

    fn run(&self, _: Level, part: Part, memory: &mut [f32]) {
        let (core, slice) = (&self.core, part.slice);
        let sizes = &core.sizes;
        let saved = room(sizes.saved());
        // SAFETY: slices are distinct.
        let stats = unsafe { self.stats.part(slice * saved..(slice + 1) * saved) };
        let ([_, _, high, low, c, z, w], _) = cut(stats, sizes.saved());
        let ([degrees], work) = cut(memory, [sizes.mp]);
        total(core, slice, self.partial, z, degrees);
        if core.takes_token_degrees() {
            c.iter_mut().zip(&*degrees).for_each(|(c, &degree)| *c = degree.max(1e-30).powf(-0.5));
        }
        wide::scaled_product(core.order(slice), [high, low], c, z, sizes.dvp, w, work);
    }
}

/// Adds up the sums of a slice's parts, in their order.
pub(super) fn total(core: &Core<'_>, slice: usize, partial: &[f32], z: &mut [f32], degrees: &mut [f32]) {
    let (sizes, shape) = (&core.sizes, &core.call.shape);
    let (len, splits) = (self::partial(sizes), splits(shape.slices(), shape.seq_q));
    z.fill(0.0);
    degrees.fill(0.0);
    for part in partial[slice * splits * len..][..splits * len].chunks_exact(len) {
        let [sums, degree] = crate::scratch::parts(part, [sizes.marks * sizes.dvp, sizes.mp]);
        z.iter_mut().zip(sums).for_each(|(z, x)| *z += x);
        degrees.iter_mut().zip(degree).for_each(|(d, x)| *d += x);
    }
}

/// `out = P^T W`, and the filtered values.
struct Spread<'a> {
    core: Core<'a>,
    transposed: &'a [f32],
    stats: &'a [f32],
    out: Parts<'a, f32>,
}

impl Pass for Spread<'_> {
    fn memory(&self) -> usize {
        room(self.core.tile_sizes()) + spread_memory(&self.core.sizes)
    }

    fn run(&self, level: Level, part: Part, memory: &mut [f32]) {
        let (core, sizes) = (&self.core, &self.core.sizes);
        let (seq, dv) = (core.call.shape.seq_q, core.call.shape.value_dim);
        // SAFETY: parts are distinct ranges of rows.
        let out = unsafe { self.out.part(part.rows(seq, dv)) };
        let ([rows], memory) = cut(memory, [pass::TOKENS * sizes.dvp]);
        let w = SavedSlice::of(sizes, self.stats, part.slice).w;
        for range in part.tiles() {
            let Loaded { tile, kept, .. } =
                core.load(level, part.slice, range.clone(), self.transposed, core.call.v, memory);
            tile.spread(level, w, sizes.dvp, rows);
            scatter(rows, sizes.dvp, kept, range.start, &mut out[part.within(&range, dv)], dv);
        }
        Filter::of_soft(core.call, core.m).add(&part, core.call.v, false, out);
    }
}
