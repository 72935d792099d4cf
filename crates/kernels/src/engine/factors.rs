//! The normalisation `factors`: three row-normalised graphs over landmarks of the queries and of the keys, and between them a
//! pseudo-inverse. "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention", eq. 13.

use faer::Mat;

use super::{
    graph::Graph,
    series::{Hop, Tokens},
};
use crate::{
    Error, Mask, Mechanism, Parameter, Plan, Result, Shape,
    call::{Call, View},
    linalg::pseudo_inverse::PseudoInverse,
    mechanism::{InverseGradient, Nystrom},
    parallel,
};

/// What a call does and needs; `pairs` is the plan of all pairs.
pub(super) fn plan(structure: &Nystrom, shape: &Shape, pairs: Plan, hops: u64) -> Plan {
    let of = |tokens| structure.landmarks.count(tokens, structure.grid, true);
    let (rows, columns) = (of(shape.seq_q), of(shape.seq_kv));
    let share = |work: u64| {
        let part = |landmarks: usize, tokens: usize| work as f64 * landmarks as f64 / tokens as f64;
        // Queries to landmarks of keys, landmarks of queries to keys, and among landmarks.
        let among = part(rows, shape.seq_q) * columns as f64 / shape.seq_kv as f64;
        (part(columns, shape.seq_kv) + part(rows, shape.seq_q) + among) as u64
    };
    let products = 4 * (structure.newton_iterations * rows * columns * rows.max(columns)) as u64;
    let inverse = shape.slices() as u64 * products;
    let landmarks = 4 * shape.slices() * (rows + columns) * (shape.head_dim + shape.value_dim + 32);
    let iterates = 8 * shape.slices() * rows * columns * (structure.newton_iterations + 4);
    Plan {
        reason: "pairs of tokens and landmarks are scored in tiles and never stored",
        flops_forward: share(pairs.flops_forward) * hops + inverse,
        flops_backward: share(pairs.flops_backward) * hops + 3 * inverse,
        exps_forward: share(pairs.exps_forward) * hops,
        exps_backward: share(pairs.exps_backward) * hops,
        stats: 2 * shape.slices(),
        allocated_forward: pairs.allocated_forward + landmarks + iterates,
        allocated_backward: pairs.allocated_backward + 3 * landmarks + iterates,
        ..pairs
    }
}

/// Landmarks of queries or of keys: means over windows of the tokens that are kept.
struct Landmarks {
    /// The kept tokens of every window, per batch element.
    members: Vec<Vec<Vec<usize>>>,
    /// Which windows have any, `[batch, count]`.
    alive: Vec<bool>,
    count: usize,
    /// `[batch, heads, count, head_dim]`; zeros where there are none.
    rows: Vec<f32>,
    heads: usize,
    tokens: usize,
    dim: usize,
}

impl Landmarks {
    /// Of `x [batch, heads, tokens, head_dim]`, of which `keep [batch, tokens]` are kept.
    fn of(structure: &Nystrom, shape: &Shape, x: &[f32], keep: Option<&[bool]>) -> Self {
        let Shape { batch, heads, head_dim: dim, .. } = *shape;
        let tokens = x.len() / (batch * heads * dim);
        let windows = structure.landmarks.members(tokens, structure.grid, true).unwrap_or_default();
        let kept = |b: usize, token: usize| keep.is_none_or(|keep| keep[b * tokens + token]);
        let of_window = |b: usize, window: &Vec<(usize, usize)>| -> Vec<usize> {
            window.iter().map(|&(token, _)| token).filter(|&token| kept(b, token)).collect()
        };
        let members: Vec<Vec<Vec<usize>>> =
            (0..batch).map(|b| windows.iter().map(|window| of_window(b, window)).collect()).collect();
        let alive = members.iter().flatten().map(|window| !window.is_empty()).collect();
        let count = windows.len();
        let mut made = Self { members, alive, count, rows: vec![0.0; batch * heads * count * dim], heads, tokens, dim };
        let mut rows = std::mem::take(&mut made.rows);
        parallel::each(rows.chunks_mut(count * dim).enumerate(), |(slice, rows)| {
            let x = &x[slice * tokens * dim..][..tokens * dim];
            for (row, window) in rows.chunks_exact_mut(dim).zip(made.windows(slice)) {
                let mean =
                    |c: usize| window.iter().map(|n| f64::from(x[n * dim + c])).sum::<f64>() / window.len() as f64;
                row.iter_mut()
                    .enumerate()
                    .for_each(|(c, row)| *row = if window.is_empty() { 0.0 } else { mean(c) as f32 });
            }
        });
        Self { rows, ..made }
    }

    fn view(&self, shape: &Shape) -> View<'_> {
        View::in_one_piece(&self.rows, shape.slices(), [self.count, self.dim])
    }

    /// The kept tokens of every window of a slice.
    fn windows(&self, slice: usize) -> &[Vec<usize>] {
        &self.members[slice / self.heads]
    }

    /// Adds the gradient of the landmarks to that of the tokens.
    fn backward(&self, rows: &[f32], dx: &mut [f32]) {
        let Self { tokens, dim, count, .. } = *self;
        parallel::each(dx.chunks_mut(tokens * dim).zip(rows.chunks(count * dim)).enumerate(), |(slice, (dx, rows))| {
            for (row, window) in rows.chunks_exact(dim).zip(self.windows(slice)) {
                for &token in window {
                    let dx = &mut dx[token * dim..][..dim];
                    dx.iter_mut().zip(row).for_each(|(dx, row)| *dx += row / window.len() as f32);
                }
            }
        });
    }
}

/// Runs `f` on the hop of a call.
pub(super) fn with<R>(
    call: &Call<'_>,
    m: &Mechanism,
    structure: &Nystrom,
    f: impl FnOnce(&FactorsHop<'_>) -> Result<R>,
) -> Result<R> {
    let rows = Landmarks::of(structure, &call.shape, call.q.dense(), call.mask.query);
    let columns = Landmarks::of(structure, &call.shape, call.k.dense(), call.mask.key);
    let pairs = Mechanism::new(m.score.clone());
    let shape = Shape { seq_q: rows.count, seq_kv: columns.count, ..call.shape };
    let visible = |query, key| Mask { query, key, ..Mask::default() };
    let [alive_rows, alive_columns] = [Some(&rows.alive[..]), Some(&columns.alive[..])];
    let left = Call {
        shape: Shape { seq_kv: columns.count, ..call.shape },
        k: columns.view(&call.shape),
        mask: visible(call.mask.query, alive_columns),
        ..*call
    };
    let right = Call {
        shape: Shape { seq_q: rows.count, ..call.shape },
        q: rows.view(&call.shape),
        mask: visible(alive_rows, call.mask.key),
        ..*call
    };
    let among = Call {
        shape: Shape { value_dim: columns.count, ..shape },
        q: rows.view(&call.shape),
        k: columns.view(&call.shape),
        mask: visible(alive_rows, alive_columns),
        ..*call
    };
    let graphs = [Graph::new(&left, &pairs)?, Graph::new(&right, &pairs)?, Graph::new(&among, &pairs)?];
    let [left, right, among] = graphs;
    let identity = identity(&shape);
    let mut weights = vec![0.0; shape.slices() * rows.count * columns.count];
    among.apply(&identity, &mut weights);
    among.check()?;
    let invert = |(slice, weights): (usize, &[f32])| {
        let ridge = |i: usize, j: usize| {
            let alive = |side: &Landmarks, n: usize| side.alive[slice / shape.heads * side.count + n];
            if i == j && alive(&rows, i) && alive(&columns, j) { structure.ridge } else { 0.0 }
        };
        let entry = |i: usize, j: usize| f64::from(weights[i * columns.count + j]) + ridge(i, j);
        PseudoInverse::new(Mat::from_fn(rows.count, columns.count, entry), structure.newton_iterations)
    };
    let inverses = parallel::map(weights.chunks(rows.count * columns.count).enumerate(), invert);
    if inverses.iter().any(|inverse| !inverse.result().is_all_finite()) {
        return Err(Error::Diverged { mechanism: m.id() });
    }
    let implicit = structure.gradient == InverseGradient::Implicit;
    f(&FactorsHop {
        shape: call.shape,
        rows: &rows,
        columns: &columns,
        left,
        right,
        among,
        identity,
        weights,
        inverses,
        implicit,
    })
}

/// The identity of every slice, as values.
fn identity(shape: &Shape) -> Vec<f32> {
    let n = shape.seq_kv;
    (0..shape.slices() * n * n).map(|at| f32::from(u8::from(at / n % n == at % n))).collect()
}

/// `F A^+ B` over the landmarks.
pub(super) struct FactorsHop<'a> {
    shape: Shape,
    rows: &'a Landmarks,
    columns: &'a Landmarks,
    /// `F`: queries to landmarks of keys.
    left: Graph<'a>,
    /// `B`: landmarks of queries to keys.
    right: Graph<'a>,
    /// `A`: landmarks of queries to those of keys.
    among: Graph<'a>,
    identity: Vec<f32>,
    /// The entries of `A`.
    weights: Vec<f32>,
    inverses: Vec<PseudoInverse>,
    implicit: bool,
}

impl FactorsHop<'_> {
    /// `B x`, `[slices, rows, dim]`, and `A^+ B x`, `[slices, columns, dim]`.
    fn through(&self, x: &[f32]) -> [Vec<f32>; 2] {
        let mut right = vec![0.0; self.shape.slices() * self.rows.count * self.shape.value_dim];
        self.right.apply(x, &mut right);
        let middle = self.by_inverse(&right, false);
        [right, middle]
    }

    /// `A^+ x`, or its transpose times `x`.
    fn by_inverse(&self, x: &[f32], transposed: bool) -> Vec<f32> {
        let (dim, [from, to]) = (self.shape.value_dim, [self.rows.count, self.columns.count]);
        let [from, to] = if transposed { [to, from] } else { [from, to] };
        let mut out = vec![0.0; self.shape.slices() * to * dim];
        let slices = out.chunks_mut(to * dim).zip(x.chunks(from * dim)).zip(&self.inverses);
        parallel::each(slices, |((out, x), inverse)| {
            let z = if transposed { inverse.result().transpose() } else { inverse.result() };
            let y = z * Mat::from_fn(from, dim, |i, c| f64::from(x[i * dim + c]));
            out.iter_mut().enumerate().for_each(|(at, out)| *out = y[(at / dim, at % dim)] as f32);
        });
        out
    }

    /// The gradient of the entries of `A` from `dy`, that of `A^+ x`.
    fn of_inverse(&self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let (dim, [rows, columns]) = (self.shape.value_dim, [self.rows.count, self.columns.count]);
        let mut da = vec![0.0; self.weights.len()];
        let slices = da.chunks_mut(rows * columns).zip(x.chunks(rows * dim)).zip(dy.chunks(columns * dim));
        parallel::each(slices.zip(&self.inverses), |(((da, x), dy), inverse)| {
            let matrix = |x: &[f32], rows: usize| Mat::from_fn(rows, dim, |i, c| f64::from(x[i * dim + c]));
            let d = inverse.gradient(matrix(dy, columns) * matrix(x, rows).transpose(), self.implicit);
            da.iter_mut().enumerate().for_each(|(at, da)| *da = d[(at / columns, at % columns)] as f32);
        });
        da
    }
}

impl Hop for FactorsHop<'_> {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn apply(&self, x: &[f32], out: &mut [f32]) {
        let [_, middle] = self.through(x);
        self.left.apply(&middle, out);
    }

    fn transpose(&self, y: &[f32], out: &mut [f32]) {
        let mut columns = vec![0.0; self.shape.slices() * self.columns.count * self.shape.value_dim];
        self.left.transpose(y, &mut columns);
        self.right.transpose(&self.by_inverse(&columns, true), out);
    }

    fn backward(&self, x: &[f32], y: &[f32], dout: &[f32], dx: &mut [f32], tokens: &mut Tokens<'_>) {
        let (slices, dim) = (self.shape.slices(), self.shape.head_dim);
        let [mut of_rows, mut of_columns] =
            [self.rows.count, self.columns.count].map(|count| vec![0.0; slices * count * dim]);
        let [right, middle] = self.through(x);
        let mut dmiddle = vec![0.0; middle.len()];
        let mut left = Tokens::new(tokens.wanted, slices, tokens.dq, &mut of_columns);
        self.left.backward(&middle, y, dout, &mut dmiddle, &mut left);
        let mut parts = left.parameters;
        let dright = self.by_inverse(&dmiddle, true);
        let mut of_right = Tokens::new(tokens.wanted, slices, &mut of_rows, tokens.dk);
        self.right.backward(x, &right, &dright, dx, &mut of_right);
        parts.extend(of_right.parameters);
        let dweights = self.of_inverse(&right, &dmiddle);
        let mut unused = vec![0.0; self.identity.len()];
        let mut among = Tokens::new(tokens.wanted, slices, &mut of_rows, &mut of_columns);
        self.among.backward(&self.identity, &self.weights, &dweights, &mut unused, &mut among);
        parts.extend(among.parameters);
        self.rows.backward(&of_rows, tokens.dq);
        self.columns.backward(&of_columns, tokens.dk);
        for part in parts.chunks(slices) {
            let sums = tokens.parameters.iter_mut().flatten();
            sums.zip(part.as_flattened()).for_each(|(to, x)| *to += x);
        }
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.left.parameters()
    }

    fn check(&self) -> Result<()> {
        [&self.left, &self.right].into_iter().try_for_each(Graph::check)
    }
}
