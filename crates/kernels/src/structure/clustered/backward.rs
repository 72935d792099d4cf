//! The backward pass: first by runs of queries, which gives `dq` and what mean tokens and edges pass on, then by runs of
//! keys, which gives `dk` and `dv`. Every sum has one owner and a fixed order: no result depends on the threads.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::{
    Case,
    far::Far,
    forward::ALWAYS,
    graph::{Graph, Lists, Run, runs},
    held::{self, Finished, Held, Keys, Sums},
    prefix,
    sparse::{axpy, dot},
};
use crate::{
    Gradients, Result, Shape,
    call::{Call, Saved, cluster_plan::log2_weight},
    mechanism::Ssa,
    parallel::{self, Parts, for_each, for_each_item, workers},
    scratch::{cut, scratch_len},
    structure::dense::{Head, KEYS, QUERIES, Rows, dots_in_order, padded},
};

/// Parts that the queries of a head are split into, each with sums of its own for the mean tokens. A constant, lest
/// results depend on the machine.
pub(super) const SHARES: usize = 16;

/// The weight from which on an edge's product is summed in the order of its row's `delta`: one with all the weight of its row then has no
/// gradient, to the last bit. Below it the faster order does.
const SHARP: f32 = 0.99;

/// `dS = P (dP - delta)` over all entries, with `delta = <dout, out>` per row.
pub(crate) fn backward(
    call: &Call<'_>,
    m: &Ssa,
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let Gradients { dq, dk, dv, .. } = gradients;
    let dk = dk.expect("checked: an untied call has keys");
    let case = Case::new(call, m)?;
    if call.mask.query.is_some() {
        dq.fill(0.0);
    }
    if call.mask.key.is_some() {
        dk.fill(0.0);
        dv.fill(0.0);
    }
    let (rows, work) = cut(work, row_sizes(&call.shape));
    let finished = &Finished::new(saved, rows);
    let mut passed = Passed::new(call, &case);
    by_queries(call, &case, finished, dq, &mut passed, work);
    passed.settle();
    by_keys(call, &case, finished, [&mut *dk, &mut *dv], &passed, work);
    if case.has_prefix_far() {
        prefix::backward(call, &case, finished, [dq, dk, dv]);
    }
    Ok(())
}

/// f32 of working memory for `shape` in the current thread pool.
pub(super) fn work(shape: &Shape) -> usize {
    scratch_len(row_sizes(shape)) + workers(shape.slices() * shape.seq_q.max(shape.seq_kv)) * memory(shape)
}

/// Shift and factor of every row.
fn row_sizes(shape: &Shape) -> [usize; 2] {
    [shape.slices() * shape.seq_q; 2]
}

fn memory(shape: &Shape) -> usize {
    scratch_len(sizes(shape)) + scratch_len(held::sizes(shape))
}

/// Rows of keys and of values; sums for queries, keys and values.
fn sizes(shape: &Shape) -> [usize; 5] {
    let (queries, keys) = (shape.seq_q.min(QUERIES), shape.seq_kv.min(KEYS));
    let (d, dv) = (padded(shape.head_dim), padded(shape.value_dim));
    [keys * d, keys * dv, queries * d, keys * d, keys * dv]
}

/// What the queries pass on to the keys, but for exact pairs.
struct Passed {
    /// The mean tokens of every head.
    far: Vec<Option<Far>>,
    /// Gradients of their keys and values, one after the other, for every head and share.
    far_sums: Vec<f32>,
    /// Where each head starts in it, and its length.
    far_at: Vec<Range<usize>>,
    /// The queries of every key's edges, and the place of every edge among them, for every head.
    by_key: Vec<(Lists, Vec<u32>)>,
    /// Weight and gradient of the logit of every edge, by key: whoever sums them reads them in order, and waits for no memory.
    terms: Vec<[f32; 2]>,
    /// Where the edges of each head start.
    edges_at: Vec<usize>,
}

impl Passed {
    fn new(call: &Call<'_>, case: &Case) -> Self {
        let (mut far, mut far_at, mut edges_at) = (Vec::new(), Vec::new(), vec![0]);
        let by_key = parallel::map(case.graphs.iter(), Graph::edges_by_key);
        let mut start = 0;
        for (slice, graph) in case.graphs.iter().enumerate() {
            edges_at.push(edges_at[slice] + by_key[slice].1.len());
            let tokens = case.has_far().then(|| Far::new(graph, &Head::of(call, slice)));
            let len = tokens.as_ref().map_or(0, |far| SHARES * far.gradient_len(call.shape.head_dim));
            far_at.push(start..start + len);
            start += len;
            far.push(tokens);
        }
        let edges = edges_at[case.graphs.len()];
        Self { far, far_sums: vec![0.0; start], far_at, by_key, terms: vec![[0.0; 2]; edges], edges_at }
    }

    /// Adds the shares up into the first, in order.
    fn settle(&mut self) {
        for at in &self.far_at {
            let (first, rest) = self.far_sums[at.clone()].split_at_mut(at.len() / SHARES);
            for share in rest.chunks_exact(first.len().max(1)) {
                first.iter_mut().zip(share).for_each(|(sum, x)| *sum += x);
            }
        }
    }

    /// The settled gradients of the mean key and value number `n` of a head.
    fn of_mean(&self, slice: usize, n: usize, d: usize) -> [&[f32]; 2] {
        let Some(far) = &self.far[slice] else { return [&[], &[]] };
        let all = &self.far_sums[self.far_at[slice].start..];
        let (keys, values) = all.split_at(far.clusters.len() * d);
        [&keys[n * d..][..d], &values[n * far.value_stride..][..far.value_stride]]
    }
}

fn by_queries(
    call: &Call<'_>,
    case: &Case,
    finished: &Finished<'_>,
    dq: &mut [f32],
    passed: &mut Passed,
    work: &mut [f32],
) {
    let all: Vec<Vec<Run>> = case.graphs.iter().map(|graph| runs(&graph.queries, QUERIES)).collect();
    let (dq, terms) = (Parts::new(dq), Parts::new(&mut passed.terms));
    let tasks = 0..case.graphs.len() * SHARES;
    let shares = tasks.clone().map(|task| passed.far_at[task / SHARES].len() / SHARES);
    let tasks = tasks.zip(parallel::split(&mut passed.far_sums, shares));
    for_each_item(tasks, work, memory(&call.shape), |(task, far_sums), memory| {
        let (slice, share) = (task / SHARES, task % SHARES);
        let runs = &all[slice];
        let first = slice * call.shape.q_len() / call.shape.slices();
        call.level.dispatch(Queries {
            head: Head::of(call, slice),
            graph: &case.graphs[slice],
            far: passed.far[slice].as_ref(),
            runs: &runs[share * runs.len() / SHARES..(share + 1) * runs.len() / SHARES],
            case,
            finished,
            dq: (&dq, first),
            far_sums,
            terms: Terms { all: &terms, start: passed.edges_at[slice], places: &passed.by_key[slice].1 },
            memory,
        });
    });
}

/// A share of the queries of a head.
struct Queries<'a> {
    head: Head<'a>,
    graph: &'a Graph,
    far: Option<&'a Far>,
    runs: &'a [Run],
    case: &'a Case,
    finished: &'a Finished<'a>,
    /// The gradients, and where those of the head start.
    dq: (&'a Parts<'a, f32>, usize),
    far_sums: &'a mut [f32],
    terms: Terms<'a>,
    memory: &'a mut [f32],
}

/// As [`Passed::terms`]: those of all heads, where those of a head start, and the places of its edges.
#[derive(Clone, Copy)]
struct Terms<'a> {
    all: &'a Parts<'a, [f32; 2]>,
    start: usize,
    places: &'a [u32],
}

impl WithSimd for Queries<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, graph, far, runs, case, finished, dq, far_sums, terms, memory } = self;
        let ([k_buffer, v_buffer, dq_sums, ..], memory) = cut(memory, sizes(&head.shape()));
        let (d, stride) = (head.head_dim, padded(head.head_dim));
        for run in runs {
            let queries = graph.queries.run(run);
            let mut held = Held::new(simd, head, finished, graph.window, case.logit, queries, &mut *memory);
            dq_sums[..queries.len() * stride].fill(0.0);
            for list in graph.exact_keys(run.group) {
                for positions in list.chunks(KEYS) {
                    let k = Rows::gather(head.k, positions, true, k_buffer);
                    let v = Rows::gather(head.v, positions, false, v_buffer);
                    let keys = Keys { k, v, depth: d, positions };
                    held.attend(simd, keys, Sums { dq: Some(&mut *dq_sums), dkv: None });
                }
            }
            if let (Some(far), Some(a)) = (far, run.group) {
                let (dk, dv) = far_sums.split_at_mut(far.clusters.len() * stride);
                for range in far.seen_by(graph, a) {
                    for start in range.clone().step_by(KEYS) {
                        let end = (start + KEYS).min(range.end);
                        let (k, v) = far.rows(start..end);
                        let keys = Keys { k, v, depth: d + 1, positions: &ALWAYS[..end - start] };
                        let dkv = [
                            &mut dk[start * stride..end * stride],
                            &mut dv[start * far.value_stride..end * far.value_stride],
                        ];
                        held.attend(simd, keys, Sums { dq: Some(&mut *dq_sums), dkv: Some(dkv) });
                    }
                }
            }
            sampled(simd, &held, &head, graph, case.logit, finished, terms, dq_sums);
            for (&i, sums) in queries.iter().zip(dq_sums.chunks_exact(stride)) {
                let start = dq.1 + i as usize * d;
                // SAFETY: every query is in one run of one head.
                let dq = unsafe { dq.0.part(start..start + d) };
                dq.iter_mut().zip(sums).for_each(|(dq, &sum)| *dq = sum * case.scale);
            }
        }
    }
}

/// The edges of the held queries: adds to the sums of the queries and keeps what the keys will need.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // a call's tensors, and where to write
fn sampled<S: Simd>(
    simd: S,
    held: &Held<'_>,
    head: &Head<'_>,
    graph: &Graph,
    logit: f32,
    finished: &Finished<'_>,
    terms: Terms<'_>,
    dq_sums: &mut [f32],
) {
    let (d, dv) = (head.head_dim, head.value_dim);
    for (n, &i) in held.queries.iter().enumerate() {
        let i = i as usize;
        let places = &terms.places[graph.edge_range(i)];
        let (q, g) = (head.q.row(i), &held.g.data[n * held.g.stride..][..dv]);
        let factor = head.rows(finished.factor)[i];
        for (edge, &place) in graph.edges_of(i).iter().zip(places) {
            let (k, v) = (head.k.row(edge.key as usize), head.v.row(edge.key as usize));
            let weight = (logit * dot(simd, q, k) + log2_weight(edge.log_weight) - held.shift[n]).exp2();
            let product = if weight > SHARP { dots_in_order(simd, [v], [g], [1.0])[0] } else { dot(simd, g, v) };
            let slope = weight * (product - held.delta[n]);
            let place = terms.start + place as usize;
            // SAFETY: every edge is one query's and has a place of its own.
            let term = unsafe { terms.all.part(place..place + 1) };
            term[0] = [factor * weight, slope];
            axpy(simd, slope, k, &mut dq_sums[n * padded(d)..][..d]);
        }
    }
}

fn by_keys(
    call: &Call<'_>,
    case: &Case,
    finished: &Finished<'_>,
    [dk, dv]: [&mut [f32]; 2],
    passed: &Passed,
    work: &mut [f32],
) {
    let shape = call.shape;
    let tasks: Vec<(usize, Run)> = (0..case.graphs.len())
        .flat_map(|slice| runs(&case.graphs[slice].keys, KEYS).into_iter().map(move |run| (slice, run)))
        .collect();
    let (dk, dv) = (Parts::new(dk), Parts::new(dv));
    for_each(tasks.len(), work, memory(&shape), |task, memory| {
        let (slice, run) = &tasks[task];
        call.level.dispatch(KeyRun {
            slice: *slice,
            head: Head::of(call, *slice),
            graph: &case.graphs[*slice],
            run,
            case,
            finished,
            passed,
            targets: [&dk, &dv],
            memory,
        });
    });
}

/// Some keys of one cluster, or of none.
struct KeyRun<'a> {
    slice: usize,
    head: Head<'a>,
    graph: &'a Graph,
    run: &'a Run,
    case: &'a Case,
    finished: &'a Finished<'a>,
    passed: &'a Passed,
    /// `dk` and `dv` of all heads.
    targets: [&'a Parts<'a, f32>; 2],
    memory: &'a mut [f32],
}

impl WithSimd for KeyRun<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { slice, head, graph, run, case, finished, passed, targets, memory } = self;
        let ([k_buffer, v_buffer, _, dk_sums, dv_sums], memory) = cut(memory, sizes(&head.shape()));
        let (d, dv) = (head.head_dim, head.value_dim);
        let positions = graph.keys.run(run);
        let k = Rows::gather(head.k, positions, false, k_buffer);
        let v = Rows::gather(head.v, positions, false, v_buffer);
        dk_sums[..positions.len() * padded(d)].fill(0.0);
        dv_sums[..positions.len() * padded(dv)].fill(0.0);
        for list in graph.exact_queries(run.group) {
            for queries in list.chunks(QUERIES) {
                let mut held = Held::new(simd, head, finished, graph.window, case.logit, queries, &mut *memory);
                let dkv = Some([&mut *dk_sums, &mut *dv_sums]);
                held.attend(simd, Keys { k, v, depth: d, positions }, Sums { dq: None, dkv });
            }
        }
        let mean = run.group.zip(passed.far[slice].as_ref()).and_then(|(c, far)| {
            let n = far.clusters.binary_search(&(c as u32)).ok()?;
            Some((passed.of_mean(slice, n, padded(d)), 1.0 / graph.keys.of(c).len() as f32))
        });
        let (edges, terms) = (&passed.by_key[slice].0, &passed.terms[passed.edges_at[slice]..]);
        let dout = head.outputs(finished.dout);
        for (n, &j) in positions.iter().enumerate() {
            let j = j as usize;
            let (dk_sum, dv_sum) = (&mut dk_sums[n * padded(d)..][..d], &mut dv_sums[n * padded(dv)..][..dv]);
            for (&query, &[weight, slope]) in edges.of(j).iter().zip(&terms[edges.range(j)]) {
                axpy(simd, slope, head.q.row(query as usize), dk_sum);
                axpy(simd, weight, dout.row(query as usize), dv_sum);
            }
            if let Some(([dk_mean, dv_mean], share)) = mean {
                axpy(simd, share, &dk_mean[..d], dk_sum);
                axpy(simd, share, &dv_mean[..dv], dv_sum);
            }
            let row = slice * head.seq_kv + j;
            // SAFETY: every key is in one run of one head.
            let (dk, dv) =
                unsafe { (targets[0].part(row * d..(row + 1) * d), targets[1].part(row * dv..(row + 1) * dv)) };
            dk.iter_mut().zip(dk_sum).for_each(|(dk, sum)| *dk = *sum * case.scale);
            dv.copy_from_slice(dv_sum);
        }
    }
}
