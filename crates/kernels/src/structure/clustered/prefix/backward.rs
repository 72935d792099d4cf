//! The gradients of running mean tokens. Every key is in the means of all later queries: their gradients are sums from
//! the last panel down.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::{
    Chunk, chunks,
    panel::{Matrix, Panel, Room, row, row_mut},
};
use crate::{
    call::Call,
    parallel,
    simd::{
        math::exp2,
        product::{Add, Left, Right, Size, Store, add_product, store_product},
    },
    structure::{
        clustered::{
            Case,
            graph::Graph,
            held::{Finished, deltas},
        },
        dense::{Head, PANEL, Rows, TILE_STRIDE, padded},
    },
};

/// Adds the gradients to `dq`, `dk` and `dv`.
pub(in crate::structure::clustered) fn backward(
    call: &Call<'_>,
    case: &Case,
    finished: &Finished<'_>,
    [dq, dk, dv]: [&mut [f32]; 3],
) {
    let s = call.shape;
    let (dq, dk) = (dq.chunks_mut(s.seq_q * s.head_dim), dk.chunks_mut(s.seq_kv * s.head_dim));
    let gradients = dq.zip(dk).zip(dv.chunks_mut(s.seq_kv * s.value_dim));
    parallel::each(case.graphs.iter().zip(gradients).enumerate(), |(slice, (graph, ((dq, dk), dv)))| {
        head_backward(call, case, graph, Head::of(call, slice), finished, [dq, dk, dv]);
    });
}

/// One head.
fn head_backward(
    call: &Call<'_>,
    case: &Case,
    graph: &Graph,
    head: Head<'_>,
    finished: &Finished<'_>,
    [dq, dk, dv]: [&mut [f32]; 3],
) {
    let (d, value_dim) = (head.head_dim, head.value_dim);
    let chunks = chunks(graph, &head);
    let starts: Vec<usize> = chunks.iter().map(|chunk| chunk.sums.limit).chain([head.seq_kv]).collect();
    let later: Vec<[Vec<f32>; 2]> = {
        // Chunks have queries of their own, and the keys between the limits of their first ones.
        let queries: Vec<usize> = chunks.iter().map(|chunk| chunk.len() * d).collect();
        let keys = starts.windows(2).map(|limits| limits[1] - limits[0]);
        let dq = parallel::split(dq, queries.into_iter());
        let dk = parallel::split(&mut dk[starts[0] * d..], keys.clone().map(|keys| keys * d));
        let dv = parallel::split(&mut dv[starts[0] * value_dim..], keys.map(|keys| keys * value_dim));
        let tasks = chunks.into_iter().zip(dq.zip(dk).zip(dv)).enumerate();
        parallel::map(tasks, |(n, (chunk, ((dq, dk), dv)))| {
            let (keys, targets) = (starts[n]..starts[n + 1], [dq, dk, dv]);
            let buffer = Room::new(graph, &head);
            call.level.dispatch(Pass { chunk, keys, head, graph, case, finished, targets, buffer })
        })
    };
    // What the queries of later chunks pass on to the keys of all earlier ones.
    let clusters = graph.keys.len();
    let mut sums = [vec![0.0; clusters * padded(d)], vec![0.0; clusters * padded(value_dim)]];
    for (n, later) in later.iter().enumerate().rev() {
        for (sum, x) in sums.iter_mut().zip(later) {
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
        let first = if n == 0 { 0 } else { starts[n - 1] };
        release(
            graph,
            &head,
            first..starts[n],
            &sums,
            case.scale,
            first,
            [&mut dk[first * d..], &mut dv[first * value_dim..]],
        );
    }
}

/// Adds the sums of their clusters to the gradients of `keys`; the first row of the gradients is at `origin`.
fn release(
    graph: &Graph,
    head: &Head<'_>,
    keys: Range<usize>,
    sums: &[Vec<f32>; 2],
    scale: f32,
    origin: usize,
    targets: [&mut [f32]; 2],
) {
    for ((sums, to), (dim, factor)) in sums.iter().zip(targets).zip([(head.head_dim, scale), (head.value_dim, 1.0)]) {
        for j in keys.clone() {
            let Some(c) = graph.cluster_of_key(j) else { continue };
            let to = &mut to[(j - origin) * dim..][..dim];
            to.iter_mut().zip(&sums[c * padded(dim)..]).for_each(|(to, sum)| *to += factor * sum);
        }
    }
}

/// A chunk. Returns what its queries pass on to the keys before the limit of its first query, by cluster.
struct Pass<'a> {
    chunk: Chunk,
    /// The keys that `targets` has the gradients of.
    keys: Range<usize>,
    head: Head<'a>,
    graph: &'a Graph,
    case: &'a Case,
    finished: &'a Finished<'a>,
    /// `dq` of the chunk's positions, `dk` and `dv` of its keys.
    targets: [&'a mut [f32]; 3],
    buffer: Room,
}

impl WithSimd for Pass<'_> {
    type Output = [Vec<f32>; 2];

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> [Vec<f32>; 2] {
        let Self { chunk, keys, head, graph, case, finished, targets: [dq, dk, dv], mut buffer } = self;
        let (d, value_dim) = (head.head_dim, head.value_dim);
        let clusters = graph.keys.len();
        let start = chunk.panels[0].start;
        let mut passed = [vec![0.0; clusters * padded(d)], vec![0.0; clusters * padded(value_dim)]];
        let mut slopes = vec![0.0; clusters * TILE_STRIDE];
        let mut sums = vec![0.0; PANEL * padded(d).max(padded(value_dim))];
        for (n, positions) in chunk.panels.iter().enumerate().rev() {
            let limit = |n: usize| graph.window.limit(chunk.panels[n].start);
            // Sums made anew: taking keys back out would leave the rounding of the largest of them behind.
            let mut before = chunk.sums.clone();
            before.extend(graph, &head, limit(n));
            let mut panel = Panel::new(simd, &head, graph, case.logit, positions.clone(), &before, &mut buffer);
            let rows = Held::new(simd, &head, finished, &panel.queries);
            pair(simd, &mut panel, &rows, &mut slopes);
            let to_queries = &mut sums[..panel.queries.len() * padded(d)];
            of_queries(simd, &mut panel, d, &slopes, to_queries);
            for (sums, &i) in to_queries.chunks_exact(padded(d)).zip(&panel.queries) {
                let dq = &mut dq[(i as usize - start) * d..][..d];
                dq.iter_mut().zip(sums).for_each(|(dq, sum)| *dq += case.scale * sum);
            }
            let weights = std::mem::take(&mut panel.logits);
            let of_key = (&slopes[..], &rows.q, d, case.scale, &mut *dk);
            let of_value = (&*weights, &rows.g, value_dim, 1.0, &mut *dv);
            for ((matrix, rows, dim, factor, to), passed) in [of_key, of_value].into_iter().zip(&mut passed) {
                let rows = Rows { data: rows, stride: padded(dim) };
                of_keys(simd, &mut panel, matrix, rows, passed, &mut sums);
                for (sums, &(j, _)) in sums.chunks_exact(padded(dim)).zip(&panel.local) {
                    let to = &mut to[(j as usize - keys.start) * dim..][..dim];
                    to.iter_mut().zip(sums).for_each(|(to, sum)| *to += factor * sum);
                }
            }
            if n > 0 {
                let released = limit(n - 1)..limit(n);
                release(graph, &head, released, &passed, case.scale, keys.start, [&mut *dk, &mut *dv]);
            }
        }
        passed
    }
}

/// What the backward pass needs of a panel's queries beside their logits.
struct Held {
    /// Output gradients, times the factors of their rows, as a panel.
    g_panel: Vec<f32>,
    q: Vec<f32>,
    /// The same as rows.
    g: Vec<f32>,
    value_dim: usize,
    shift: [f32; PANEL],
    delta: [f32; PANEL],
}

impl Held {
    fn new<S: Simd>(simd: S, head: &Head<'_>, finished: &Finished<'_>, queries: &[u32]) -> Self {
        let (d, value_dim, count) = (head.head_dim, head.value_dim, queries.len());
        let (shifts, factors) = (head.rows(finished.shift), head.rows(finished.factor));
        let mut g_panel = vec![0.0; padded(count) * value_dim];
        let (mut q, mut g) = (vec![0.0; count * padded(d)], vec![0.0; count * padded(value_dim)]);
        let mut out_panel = g_panel.clone();
        Rows::copy(head.q, queries, |_| 1.0, &mut q);
        let factor = |n: usize| factors[queries[n] as usize];
        Rows::copy(head.outputs(finished.dout), queries, factor, &mut g);
        let (mut shift, mut delta) = ([0.0; PANEL], [0.0; PANEL]);
        deltas(simd, head, finished, queries, [&mut g_panel, &mut out_panel], &mut delta);
        shift.iter_mut().zip(queries).for_each(|(shift, &i)| *shift = shifts[i as usize]);
        Self { g_panel, q, g, value_dim, shift, delta }
    }
}

/// Turns logits into weights over the number of keys, and writes the gradients of the logits over it to `slopes`.
#[inline(always)]
fn pair<S: Simd>(simd: S, panel: &mut Panel<'_>, held: &Held, slopes: &mut [f32]) {
    let width = panel.width;
    let right = Right { data: &held.g_panel, stride: width };
    let into = Matrix::Other(&mut *slopes);
    panel.sum(simd, panel.values, panel.local_values, right, held.value_dim, into);
    let terms = S::as_simd_f32s(&held.shift[..width]).0.iter().zip(S::as_simd_f32s(&held.delta[..width]).0);
    for c in 0..panel.clusters {
        let shares = row::<S>(panel.shares, c, width);
        let (logits, slopes) = (row_mut::<S>(panel.logits, c, width), row_mut::<S>(slopes, c, width));
        for (((logit, slope), share), (shift, delta)) in logits.iter_mut().zip(slopes).zip(shares).zip(terms.clone()) {
            let weight = simd.mul_f32s(exp2(simd, simd.sub_f32s(*logit, *shift)), *share);
            *slope = simd.mul_f32s(weight, simd.sub_f32s(simd.mul_f32s(*slope, *share), *delta));
            *logit = weight;
        }
    }
}

/// What the queries get from all keys: `slopes` times the sums that each sees.
#[inline(always)]
fn of_queries<S: Simd>(simd: S, panel: &mut Panel<'_>, d: usize, slopes: &[f32], sums: &mut [f32]) {
    let (clusters, local) = (panel.clusters, panel.local.len());
    let size = |depth| Size { rows: panel.queries.len(), cols: padded(d), depth };
    let (whole, of_local) = (size(clusters), size(local));
    sums.fill(0.0);
    let add = Add { data: &mut *sums, stride: padded(d) };
    add_product(simd, whole, Panel::by_query(slopes), panel.keys.as_right(0..clusters), add);
    panel.spread(slopes);
    let add = Add { data: sums, stride: padded(d) };
    add_product(simd, of_local, Panel::by_query(panel.products), panel.local_keys.as_right(0..local), add);
}

/// What the queries' `rows` give: to `passed` for each cluster's keys that all of them see, to `local` for local keys.
#[inline(always)]
fn of_keys<S: Simd>(
    simd: S,
    panel: &mut Panel<'_>,
    matrix: &[f32],
    rows: Rows<'_>,
    passed: &mut [f32],
    local: &mut [f32],
) {
    let stride = rows.stride;
    let size = |rows| Size { rows, cols: stride, depth: panel.queries.len() };
    let (whole, of_local) = (size(panel.clusters), size(panel.local.len()));
    let right = rows.as_right(0..panel.queries.len());
    let by_cluster = |data| Left { data, row_stride: TILE_STRIDE, depth_stride: 1 };
    add_product(simd, whole, by_cluster(matrix), right, Add { data: passed, stride });
    panel.spread(matrix);
    store_product(simd, of_local, by_cluster(&*panel.products), right, Store { data: local, stride });
}
