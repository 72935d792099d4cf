//! The forward pass: a run of queries of one cluster is held; the keys that it sees exactly pass by in gathered tiles,
//! then mean tokens, then sampled edges, all into one running softmax per query.

use pulp::{Simd, WithSimd};

use super::{
    Case,
    far::Far,
    graph::{Graph, Run, runs},
    prefix,
    sparse::{axpy, dot},
};
use crate::{
    Result, Shape,
    call::{Call, cluster_plan::log2_weight},
    mechanism::Ssa,
    parallel::{self, Parts, for_each, workers},
    score::Exp,
    scratch::{cut, scratch_len},
    simd::product::Right,
    structure::dense::{
        Head, KEYS, Normalisation, PANEL, QUERIES, Row, RowState, Rows, TILE_STRIDE, Tile, Visible, advance, log_sum,
        padded, transpose,
    },
};

/// Writes `out` and, as `stats`, the log-sum-exps of the rows, [`log_sum::SAVED`] numbers each.
pub(crate) fn forward(call: &Call<'_>, m: &Ssa, out: &mut [f32], stats: &mut [f32], work: &mut [f32]) -> Result<()> {
    let case = Case::new(call, m)?;
    let ([lse], work) = cut(work, row_sizes(&call.shape));
    let lse: &mut [f64] = bytemuck::cast_slice_mut(lse);
    if call.mask.query.is_some() {
        out.fill(0.0);
        lse.fill(f64::NEG_INFINITY);
    }
    let far = parallel::map(case.graphs.iter().enumerate(), |(slice, graph)| {
        case.has_far().then(|| Far::new(graph, &Head::of(call, slice)))
    });
    let tasks: Vec<(usize, Run)> = (0..case.graphs.len())
        .flat_map(|slice| runs(&case.graphs[slice].queries, QUERIES).into_iter().map(move |run| (slice, run)))
        .collect();
    let shape = call.shape;
    let (out_parts, lse_parts) = (Parts::new(&mut *out), Parts::new(&mut *lse));
    for_each(tasks.len(), work, memory(&shape), |task, memory| {
        let (slice, run) = &tasks[task];
        let block = Block {
            head: Head::of(call, *slice),
            graph: &case.graphs[*slice],
            far: far[*slice].as_ref(),
            run,
            logit: case.logit,
            first_row: slice * shape.seq_q,
            out: &out_parts,
            lse: &lse_parts,
            memory,
        };
        call.level.dispatch(block);
    });
    if case.has_prefix_far() {
        prefix::forward(call, &case, out, lse);
    }
    log_sum::save(lse, stats);
    Ok(())
}

/// f32 of working memory for `shape` in the current thread pool.
pub(super) fn work(shape: &Shape) -> usize {
    scratch_len(row_sizes(shape)) + workers(shape.slices() * shape.seq_q) * memory(shape)
}

/// Log-sum-exp (f64) of every row.
fn row_sizes(shape: &Shape) -> [usize; 1] {
    [2 * shape.slices() * shape.seq_q]
}

fn memory(shape: &Shape) -> usize {
    scratch_len(sizes(shape))
}

fn sizes(shape: &Shape) -> [usize; 10] {
    let (queries, keys) = (padded(shape.seq_q.min(QUERIES)), shape.seq_kv.min(KEYS));
    let (d, dv) = (padded(shape.head_dim), padded(shape.value_dim));
    [
        // panels, outputs; peak, part, rescale, total (f64); limits; rows of keys, of values; scores
        queries * (shape.head_dim + 1),
        queries * dv,
        queries,
        queries,
        queries,
        2 * queries,
        queries,
        keys * d,
        keys * dv,
        keys * TILE_STRIDE,
    ]
}

/// Positions of mean tokens, which no query is too early to see.
pub(super) const ALWAYS: [u32; KEYS] = [0; KEYS];

/// One task.
struct Block<'a> {
    head: Head<'a>,
    graph: &'a Graph,
    far: Option<&'a Far>,
    run: &'a Run,
    logit: f32,
    first_row: usize,
    out: &'a Parts<'a, f32>,
    lse: &'a Parts<'a, f64>,
    memory: &'a mut [f32],
}

/// The queries of a task and what is carried for them.
struct Held<'a> {
    queries: &'a [u32],
    panels: &'a [f32],
    limits: &'a [u32],
    sums: &'a mut [f32],
    state: RowState<'a>,
    tile: &'a mut [f32],
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, graph, far, run, logit, first_row, out, lse, memory } = self;
        let shape = head.shape();
        let ([panels, sums, peak, part, rescale, total, limits, k_buffer, v_buffer, tile], _) =
            cut(memory, sizes(&shape));
        let queries = graph.queries.run(run);
        let limits: &mut [u32] = bytemuck::cast_slice_mut(limits);
        limits.fill(0);
        limits.iter_mut().zip(queries).for_each(|(limit, &i)| *limit = graph.window.limit(i as usize) as u32);
        pack(&head, queries, logit, panels);
        let stride = padded(head.value_dim);
        sums[..queries.len() * stride].fill(0.0);
        let mut state = RowState { peak, part, rescale, total: bytemuck::cast_slice_mut(total) };
        state.clear();
        let mut held = Held { queries, panels, limits, sums, state, tile };
        for list in graph.exact_keys(run.group) {
            for keys in list.chunks(KEYS) {
                let k = Rows::gather(head.k, keys, false, k_buffer);
                let v = Rows::gather(head.v, keys, true, v_buffer);
                held.attend(simd, &head, head.head_dim, k, v, keys);
            }
        }
        if let (Some(far), Some(a)) = (far, run.group) {
            for range in far.seen_by(graph, a) {
                for start in range.clone().step_by(KEYS) {
                    let end = (start + KEYS).min(range.end);
                    let (k, v) = far.rows(start..end);
                    held.attend(simd, &head, head.head_dim + 1, k, v, &ALWAYS[..end - start]);
                }
            }
        }
        held.sampled(simd, &head, graph, logit);
        for (n, &i) in queries.iter().enumerate() {
            let (factor, stat) = Row(Exp).close(held.state.peak[n], held.state.total[n]);
            let row = first_row + i as usize;
            // SAFETY: every query is in one run of one slice.
            let out = unsafe { out.part(row * head.value_dim..(row + 1) * head.value_dim) };
            // SAFETY: as above.
            let lse = unsafe { lse.part(row..row + 1) };
            lse.fill(stat);
            out.iter_mut().zip(&held.sums[n * stride..]).for_each(|(out, &sum)| *out = sum * factor);
        }
    }
}

/// Lays out queries times `logit` as panels of one more channel, which holds ones.
#[inline(always)]
pub(super) fn pack(head: &Head<'_>, queries: &[u32], logit: f32, panels: &mut [f32]) {
    let d = head.head_dim;
    for (queries, panel) in queries.chunks(PANEL).zip(panels.chunks_mut(PANEL * (d + 1))) {
        let width = padded(queries.len());
        transpose(head.q, queries, |_| logit, &mut panel[..width * d]);
        panel[width * d..width * (d + 1)].fill(1.0);
    }
}

/// [`Held::attend`], compiled once for all its calls.
struct Meeting<'h, 'a> {
    held: &'h mut Held<'a>,
    head: &'h Head<'h>,
    depth: usize,
    rows: [Rows<'h>; 2],
    keys: &'h [u32],
}

impl WithSimd for Meeting<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.held.advance(simd, self.head, self.depth, self.rows, self.keys);
    }
}

impl Held<'_> {
    /// Takes in a tile of `keys`, whose logits have `depth` channels.
    fn attend<S: Simd>(&mut self, simd: S, head: &Head<'_>, depth: usize, k: Rows<'_>, v: Rows<'_>, keys: &[u32]) {
        simd.vectorize(Meeting { held: self, head, depth, rows: [k, v], keys });
    }

    #[inline(always)]
    fn advance<S: Simd>(&mut self, simd: S, head: &Head<'_>, depth: usize, [k, v]: [Rows<'_>; 2], keys: &[u32]) {
        let stride = padded(head.value_dim);
        for first in (0..self.queries.len()).step_by(PANEL) {
            let count = PANEL.min(self.queries.len() - first);
            let width = padded(count);
            let columns = first..first + width;
            let limits = &self.limits[columns.clone()];
            let seen = keys.partition_point(|&key| key < limits[count - 1]);
            if seen == 0 {
                continue;
            }
            let mut state = RowState {
                peak: &mut self.state.peak[columns.clone()],
                part: &mut self.state.part[columns.clone()],
                rescale: &mut self.state.rescale[columns.clone()],
                total: &mut self.state.total[columns],
            };
            let tile = Tile { data: &mut *self.tile, stride: TILE_STRIDE, keys: seen, queries: width };
            let panel = &self.panels[first * (head.head_dim + 1)..][..width * (head.head_dim + 1)];
            let panel = (Right { data: panel, stride: width }, depth);
            let sums = &mut self.sums[first * stride..(first + count) * stride];
            let visible = Visible { keys: &keys[..seen], limits, dropped_pairs: None };
            advance(simd, Row(Exp), panel, (k, v), visible, tile, &mut state, count, sums);
        }
    }

    /// Takes in the sampled edges.
    #[inline(always)]
    fn sampled<S: Simd>(&mut self, simd: S, head: &Head<'_>, graph: &Graph, logit: f32) {
        let dv = head.value_dim;
        for (n, &i) in self.queries.iter().enumerate() {
            let edges = graph.edges_of(i as usize);
            let q = head.q.row(i as usize);
            let sums = &mut self.sums[n * padded(dv)..][..dv];
            for edges in edges.chunks(KEYS) {
                let mut peak = self.state.peak[n];
                for (z, edge) in self.tile.iter_mut().zip(edges) {
                    *z = logit * dot(simd, q, head.k.row(edge.key as usize)) + log2_weight(edge.log_weight);
                    peak = peak.max(*z);
                }
                let rescale = (self.state.peak[n] - peak).exp2();
                sums.iter_mut().for_each(|sum| *sum *= rescale);
                let mut total = self.state.total[n] * f64::from(rescale);
                for (&z, edge) in self.tile.iter().zip(edges) {
                    let weight = (z - peak).exp2();
                    total += f64::from(weight);
                    axpy(simd, weight, head.v.row(edge.key as usize), sums);
                }
                (self.state.peak[n], self.state.total[n]) = (peak, total);
            }
        }
    }
}
