//! Solves `Y = M (V + Y)` for all heads together: every iteration is one forward stream over those not done yet.

use super::resolvent::{limit, not_converged};
use crate::{
    Precision, Result, Shape,
    call::{Call, Target, View},
    mechanism::InfsaResolvent,
    parallel,
    scratch::{cut, scratch_len},
    structure::dense::{self, Unit},
};

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Method {
    /// `Y <- M (V + Y)`, for any operator.
    Neumann,
    /// For a symmetric one; each value channel is a system of its own.
    ConjugateGradients,
}

/// One system per batch element and head: `call.v` is the right-hand side.
pub(super) struct Solver<'a> {
    pub call: &'a Call<'a>,
    pub m: &'a InfsaResolvent,
    pub method: Method,
}

/// Where one head's solve stands.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Progress {
    /// `gamma / (F + eps)`: `M` is this times the unnormalised hop.
    factor: f64,
    gamma: f64,
    /// `|V|` over the kept keys.
    size: f64,
    /// Bound on the error, relative to `size`.
    bound: f64,
    /// Where rounding errors of f32 take over: `bound` is not driven below.
    floor: f64,
    iterations: f64,
}

/// f32 in a [`Progress`].
const PROGRESS: usize = size_of::<Progress>() / size_of::<f32>();
/// Rounding errors of one iteration, relative to the iterate: steps below this are noise.
const ROUNDING: f64 = 4.0 * f32::EPSILON as f64;

/// Factors on the logits, heads to go, progress; sums of squares (f64); products of columns (f64); input, hop, residual.
fn sizes(shape: &Shape) -> [usize; 8] {
    let (slices, len) = (shape.slices(), shape.v_len());
    [slices, slices, PROGRESS * slices, 2 * slices * shape.seq_q, 4 * slices * shape.value_dim, len, len, len]
}

/// f32 of working memory of [`Solver::solve`].
pub(super) fn work(shape: &Shape) -> usize {
    scratch_len(sizes(shape)) + dense::unnormalised_work(shape, Precision::Full)
}

/// The buffers of a solve, cut from working memory.
struct Buffers<'a> {
    logit: &'a mut [f32],
    progress: &'a mut [Progress],
    squares: &'a mut [f64],
    /// Conjugate gradients: two products per column and head.
    columns: &'a mut [f64],
    /// What the next hop is applied to: `V + y`, or the search direction.
    input: &'a mut [f32],
    /// The hop of it, unnormalised.
    next: &'a mut [f32],
    residual: &'a mut [f32],
}

impl Solver<'_> {
    /// Writes `y`, and iterations and bound of every head to `report`. `hop` holds exponent and norm of every head: given
    /// (`known`), or found by the first product and written.
    pub fn solve(
        &self,
        hop: &mut [f32],
        known: bool,
        y: &mut [f32],
        report: &mut [f32],
        work: &mut [f32],
    ) -> Result<()> {
        let ([logit, to_do, progress, squares, columns, input, next, residual], work) =
            cut(work, sizes(&self.call.shape));
        let (squares, columns) = (bytemuck::cast_slice_mut(squares), bytemuck::cast_slice_mut(columns));
        let progress = bytemuck::cast_slice_mut(progress);
        let mut buffers = Buffers { logit, progress, squares, columns, input, next, residual };
        let to_do: &mut [u32] = bytemuck::cast_slice_mut(to_do);
        to_do.iter_mut().enumerate().for_each(|(n, slice)| *slice = n as u32);
        self.start(&mut buffers, hop, known);
        y.fill(0.0);
        let (infsa, mut left, mut first) = (self.m.hop(), to_do.len(), true);
        while left > 0 {
            let Buffers { logit, input, next, squares, .. } = &mut buffers;
            let (slices, sizes) = (self.call.shape.slices(), [self.call.shape.seq_q, self.call.shape.value_dim]);
            let call = Call { v: View::in_one_piece(input, slices, sizes), ..*self.call };
            let next = Target::in_one_piece(next, slices, sizes);
            dense::unnormalised(&call, &infsa, (logit, &[]), &to_do[..left], &next, squares, work);
            if first && !known {
                self.normalise(&mut buffers, hop);
            }
            first = false;
            self.step(&mut buffers, y);
            left = self.remaining(buffers.progress, to_do, left)?;
        }
        for (report, p) in report.chunks_exact_mut(2).zip(buffers.progress) {
            report.copy_from_slice(&[p.iterations as f32, p.bound as f32]);
        }
        Ok(())
    }

    fn start(&self, buffers: &mut Buffers<'_>, hop: &mut [f32], known: bool) {
        let (shape, infsa) = (self.call.shape, self.m.hop());
        let slices = buffers.progress.iter_mut().zip(buffers.logit.iter_mut()).zip(hop.chunks_mut(2));
        let inputs = buffers.input.chunks_mut(shape.seq_q * shape.value_dim);
        parallel::each(slices.zip(inputs).enumerate(), |(slice, (((p, logit), hop), input))| {
            if !known {
                hop[0] = dense::exponent(self.call, &infsa, slice);
            }
            let gamma = dense::gamma(self.call, &infsa, slice);
            let unit = Unit::new(&infsa, shape.head_dim, hop[0], self.call.units(slice), gamma);
            *logit = unit.logit as f32;
            let factor = if known { unit.factor(unit.restore(hop[1])) } else { f64::NAN };
            let size = self.shifted(slice, None, input).sqrt();
            *p = Progress { factor, gamma, size, bound: f64::INFINITY, floor: 0.0, iterations: 0.0 };
        });
    }

    /// Takes the norms from the first product.
    fn normalise(&self, buffers: &mut Buffers<'_>, hop: &mut [f32]) {
        let (shape, infsa) = (self.call.shape, self.m.hop());
        let squares = buffers.squares.chunks_exact(shape.seq_q);
        let heads = buffers.progress.iter_mut().zip(hop.chunks_exact_mut(2)).zip(squares).enumerate();
        for (slice, ((p, hop), squares)) in heads {
            let norm = squares.iter().sum::<f64>().sqrt();
            hop[0] = dense::saved_exponent(&infsa, hop[0], norm);
            let unit = Unit::new(&infsa, shape.head_dim, hop[0], self.call.units(slice), p.gamma);
            hop[1] = unit.save(norm);
            p.factor = unit.factor(norm);
        }
    }

    /// One iteration of every head that is not done.
    fn step(&self, buffers: &mut Buffers<'_>, y: &mut [f32]) {
        let shape = self.call.shape;
        let len = shape.seq_q * shape.value_dim;
        let Buffers { progress, columns, input, next, residual, .. } = buffers;
        let heads = progress.iter_mut().zip(y.chunks_mut(len)).zip(input.chunks_mut(len));
        let heads = heads.zip(next.chunks_mut(len)).zip(residual.chunks_mut(len));
        let heads = heads.zip(columns.chunks_mut(2 * shape.value_dim)).enumerate();
        parallel::each(heads, |(slice, (((((p, y), input), next), residual), columns))| {
            if self.done(p) {
                return;
            }
            p.iterations += 1.0;
            match self.method {
                Method::Neumann => self.neumann(slice, p, y, input, next),
                Method::ConjugateGradients => {
                    conjugate_gradients(p, y, input, next, residual, columns);
                    if self.done(p) {
                        // `y + r = M (V + y)`, a step of Neumann's that costs no product: what is small beside `V` is
                        // then not lost, as where the residual of `y = 0` is within the tolerance already.
                        y.iter_mut().zip(residual).for_each(|(y, r)| *y += *r);
                    }
                }
            }
        });
    }

    /// Moves the heads that go on to the front of `to_do`; returns how many there are.
    fn remaining(&self, progress: &[Progress], to_do: &mut [u32], left: usize) -> Result<usize> {
        let mut kept = 0;
        for n in 0..left {
            let p = &progress[to_do[n] as usize];
            if self.m.max_iter.is_some_and(|max| p.iterations as usize >= max) && !p.converged(self.m.tol) {
                return Err(not_converged(self.m, p.iterations as usize, p.bound));
            }
            if !self.done(p) {
                to_do[kept] = to_do[n];
                kept += 1;
            }
        }
        Ok(kept)
    }

    /// Whether a head is converged, or at the default limit: there the guaranteed bound holds, what is left is rounding.
    fn done(&self, p: &Progress) -> bool {
        p.converged(self.m.tol) || p.iterations as usize >= limit(self.m, p.gamma)
    }

    /// `x = V + y` on the kept keys (zeros elsewhere); returns its sum of squares.
    fn shifted(&self, slice: usize, y: Option<&[f32]>, x: &mut [f32]) -> f64 {
        let s = self.call.shape;
        let keep = self.call.mask.key.map(|keep| &keep[slice / s.heads * s.seq_kv..][..s.seq_kv]);
        let v = self.call.v.slice(slice);
        let mut square = 0.0;
        for (j, (x, v)) in x.chunks_exact_mut(s.value_dim).zip(v.rows()).enumerate() {
            if keep.is_some_and(|keep| !keep[j]) {
                x.fill(0.0);
                continue;
            }
            x.copy_from_slice(v);
            if let Some(y) = y {
                x.iter_mut().zip(&y[j * s.value_dim..]).for_each(|(x, y)| *x += y);
            }
            square += dense::dot(x, x);
        }
        square
    }

    /// `next` is the hop of `input = V + y`: `y` becomes `M (V + y)`, and `input` follows.
    fn neumann(&self, slice: usize, p: &mut Progress, y: &mut [f32], input: &mut [f32], next: &mut [f32]) {
        let factor = p.factor as f32;
        for (y, next) in y.iter_mut().zip(&mut *next) {
            let new = *next * factor;
            *next = new - *y;
            *y = new;
        }
        let step = dense::dot(next, next).sqrt();
        let iterate = self.shifted(slice, Some(y), input).sqrt();
        let weight = p.gamma / (1.0 - p.gamma);
        p.reach(weight * step, weight * ROUNDING * iterate);
    }
}

impl Progress {
    /// Notes a bound on the error and what rounding leaves of it, both in units of `V`'s entries.
    fn reach(&mut self, bound: f64, floor: f64) {
        let relative = |x: f64| if self.size > 0.0 { x / self.size } else { x };
        (self.bound, self.floor) = (relative(bound), relative(floor));
    }

    fn converged(&self, tol: f64) -> bool {
        self.bound <= tol.max(self.floor)
    }
}

/// One step for `(I - M) y = M V`: `next` is the hop of the direction `input`, at first of `V`.
fn conjugate_gradients(
    p: &mut Progress,
    y: &mut [f32],
    direction: &mut [f32],
    next: &mut [f32],
    residual: &mut [f32],
    columns: &mut [f64],
) {
    let factor = p.factor as f32;
    let (square, product) = columns.split_at_mut(columns.len() / 2);
    let dim = square.len();
    let ratio = |a: f64, b: f64| if b == 0.0 { 0.0 } else { (a / b) as f32 };
    if p.iterations == 1.0 {
        residual.iter_mut().zip(&*next).for_each(|(r, &x)| *r = x * factor);
        direction.copy_from_slice(residual);
        column_products(residual, residual, square);
    } else {
        next.iter_mut().zip(&*direction).for_each(|(x, &d)| *x = d - *x * factor);
        column_products(direction, next, product);
        product.iter_mut().zip(&*square).for_each(|(x, &square)| *x = ratio(square, *x).into());
        let rows = y.chunks_exact_mut(dim).zip(residual.chunks_exact_mut(dim));
        let hops = direction.chunks_exact(dim).zip(next.chunks_exact(dim));
        for ((y, r), (d, hop)) in rows.zip(hops) {
            for c in 0..dim {
                y[c] += product[c] as f32 * d[c];
                r[c] -= product[c] as f32 * hop[c];
            }
        }
        product.copy_from_slice(square);
        column_products(residual, residual, square);
        for (d, r) in direction.chunks_exact_mut(dim).zip(residual.chunks_exact(dim)) {
            for c in 0..dim {
                d[c] = r[c] + ratio(square[c], product[c]) * d[c];
            }
        }
    }
    // The smallest eigenvalue of I - M is at least 1 - gamma.
    let weight = 1.0 / (1.0 - p.gamma);
    p.reach(weight * square.iter().sum::<f64>().sqrt(), weight * f64::from(f32::EPSILON) * p.size);
}

/// `<x, y>` of every column.
fn column_products(x: &[f32], y: &[f32], sums: &mut [f64]) {
    sums.fill(0.0);
    for (x, y) in x.chunks_exact(sums.len()).zip(y.chunks_exact(sums.len())) {
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum += f64::from(x) * f64::from(y);
        }
    }
}
