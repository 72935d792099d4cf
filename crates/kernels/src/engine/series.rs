//! Series over a hop: one, several, or all of them. Nothing here knows what a hop is made of.

use crate::{Convergence, Error, Parameter, Result, Shape, mechanism::Series, parallel};

/// One application of an operator `W` that queries and keys fix.
pub(super) trait Hop: Sync {
    fn shape(&self) -> Shape;
    /// Writes `W x`, `x [slices, seq_kv, value_dim]`.
    fn apply(&self, x: &[f32], out: &mut [f32]);
    /// Writes `W^T y`, `y [slices, seq_q, value_dim]`.
    fn transpose(&self, y: &[f32], out: &mut [f32]);
    /// Writes the gradient `W^T dout` of `x` and adds those of queries, keys and parameters, of `<dout, y>` with `y = W x`.
    fn backward(&self, x: &[f32], y: &[f32], dout: &[f32], dx: &mut [f32], tokens: &mut Tokens<'_>);
    /// What [`Tokens::parameters`] are of.
    fn parameters(&self) -> Vec<Parameter>;
    /// Whether what it was made of is bounded, after its first application.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// Gradients of what makes the operator.
pub(super) struct Tokens<'t> {
    /// Whether gradients of parameters are wanted.
    pub wanted: bool,
    pub dq: &'t mut [f32],
    pub dk: &'t mut [f32],
    /// Of every slice.
    pub parameters: Vec<[f64; 2]>,
    /// Of the bias, as a whole, where it is wanted.
    pub bias: Option<&'t mut [f32]>,
    /// Of the structure's own tensors, as wholes.
    pub others: Vec<(Parameter, Vec<f32>)>,
    /// Why they are not to be relied on.
    pub failure: Option<Error>,
}

impl<'t> Tokens<'t> {
    /// With zeros for what is summed up beside the tokens' gradients, of which there is some already.
    pub fn new(wanted: bool, slices: usize, dq: &'t mut [f32], dk: &'t mut [f32]) -> Self {
        Self { wanted, dq, dk, parameters: vec![[0.0; 2]; slices], bias: None, others: Vec::new(), failure: None }
    }
}

/// How the error of a step is measured, so that the operator contracts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Measure {
    /// The largest entry: rows whose weights' magnitudes sum to one.
    Largest,
    /// The root of the sum of squares.
    Square,
}

/// A series with the decays of the heads.
pub(super) struct Sum<'a, H> {
    pub hop: &'a H,
    pub series: &'a Series,
    /// One per head.
    pub gamma: Vec<f64>,
    pub measure: Measure,
    /// Whether no row depends on a later one.
    pub causal: bool,
}

/// Where the solver stands with a slice.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// First rows that change no more: all, or, where none depends on a later one, those before the first that is not exact enough.
    settled: usize,
    /// Bound on the error of these, relative to what they come from.
    bound: f64,
    /// The same of all rows.
    residual: f64,
    iterations: usize,
}

/// Rounding errors of one iteration, relative to the iterate: steps below this are noise.
const ROUNDING: f64 = 4.0 * f32::EPSILON as f64;

impl<H: Hop> Sum<'_, H> {
    /// Writes `out`, and how the solver ended on every slice where there is one.
    pub fn forward(&self, v: &[f32], out: &mut [f32]) -> Result<Vec<Convergence>> {
        let ended = match self.series {
            Series::Hops(m) => {
                let hops = self.hops(v, m.count);
                out.fill(0.0);
                for (t, y) in hops.iter().enumerate() {
                    self.each(out, y, |out, y, gamma| *out += gamma.powi(t as i32 + 1) as f32 * y);
                }
                Ok(Vec::new())
            }
            Series::Resolvent(_) => self.solve(v, out, false),
            _ => {
                self.hop.apply(v, out);
                self.scale(out);
                Ok(Vec::new())
            }
        };
        self.hop.check()?;
        ended
    }

    /// Writes `dv`, adds the gradients of the tokens; returns that of the decay of every head.
    pub fn backward(
        &self,
        v: &[f32],
        out: &[f32],
        dout: &[f32],
        dv: &mut [f32],
        tokens: &mut Tokens<'_>,
    ) -> Result<Vec<f64>> {
        match self.series {
            Series::Hops(m) => self.hops_backward(v, m.count, dout, dv, tokens),
            Series::Resolvent(_) => self.adjoint(v, out, dout, dv, tokens),
            _ => {
                if self.gamma.iter().all(|&gamma| gamma == 1.0) {
                    self.hop.backward(v, out, dout, dv, tokens);
                    return Ok(if tokens.wanted { self.by_head(dout, out) } else { Vec::new() });
                }
                // The values with the decay: where a row has all its weight at one key, its result is that key's scaled value,
                // to the last bit.
                let mut x = v.to_vec();
                self.scale(&mut x);
                self.hop.backward(&x, out, dout, dv, tokens);
                self.scale(dv);
                Ok(self.by_head(dout, out).iter().zip(&self.gamma).map(|(sum, gamma)| sum / gamma).collect())
            }
        }
    }

    /// `W v`, `W^2 v`, ...
    fn hops(&self, v: &[f32], count: usize) -> Vec<Vec<f32>> {
        let mut hops: Vec<Vec<f32>> = Vec::with_capacity(count);
        for _ in 0..count {
            let s = self.hop.shape();
            let mut y = vec![0.0; s.slices() * s.seq_q * s.value_dim];
            self.hop.apply(hops.last().map_or(v, |y| y), &mut y);
            hops.push(y);
        }
        hops
    }

    /// Back through the hops: what comes back to the `t`-th is `gamma^t dout` and, through the next, `W^T` of what comes back to that.
    fn hops_backward(
        &self,
        v: &[f32],
        count: usize,
        dout: &[f32],
        dv: &mut [f32],
        tokens: &mut Tokens<'_>,
    ) -> Result<Vec<f64>> {
        let hops = self.hops(v, count);
        let mut dgamma = vec![0.0; self.gamma.len()];
        dv.fill(0.0);
        for t in (0..count).rev() {
            let mut g = dv.to_vec();
            self.each(&mut g, dout, |g, dout, gamma| *g += gamma.powi(t as i32 + 1) as f32 * dout);
            let x = if t == 0 { v } else { &hops[t - 1] };
            self.hop.backward(x, &hops[t], &g, dv, tokens);
            for (h, (sum, term)) in dgamma.iter_mut().zip(self.by_head(dout, &hops[t])).enumerate() {
                *sum += (t + 1) as f64 * self.gamma[h].powi(t as i32) * term;
            }
        }
        Ok(dgamma)
    }

    /// `w = dout + dv` with `dv = gamma W^T w`, and one hop back with `v + out` for `v`.
    fn adjoint(
        &self,
        v: &[f32],
        out: &[f32],
        dout: &[f32],
        dv: &mut [f32],
        tokens: &mut Tokens<'_>,
    ) -> Result<Vec<f64>> {
        self.solve(dout, dv, true)?;
        let plus = |a: &[f32], b: &[f32]| -> Vec<f32> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
        let (w, x) = (plus(dout, dv), plus(v, out));
        let (mut y, mut g) = (vec![0.0; out.len()], w.clone());
        // Not from `out`: what a solver leaves open would not cancel in rows that are normalised.
        self.hop.apply(&x, &mut y);
        self.scale(&mut g);
        self.hop.backward(&x, &y, &g, &mut vec![0.0; dv.len()], tokens);
        Ok(self.by_head(&w, &y))
    }

    /// `Y <- gamma W (x + Y)`, or with the transpose: every step is as long as a hop, and its error `gamma` times as large. Causal rows
    /// end by themselves, one after the other: how long others go on, and how large they are, is nothing to them.
    fn solve(&self, x: &[f32], y: &mut [f32], transposed: bool) -> Result<Vec<Convergence>> {
        let Series::Resolvent(m) = self.series else { return Ok(Vec::new()) };
        let s = self.hop.shape();
        let (mut next, mut input) = (vec![0.0; y.len()], x.to_vec());
        y.fill(0.0);
        let most = self.gamma.iter().copied().fold(0.0, f64::max);
        let limit = crate::mechanism::InfsaResolvent::worst_case_iterations(most, m.tol) + 2;
        let len = (y.len() / s.slices()).max(1);
        let rows = y.len() / s.slices() / s.value_dim.max(1);
        let mut all = vec![Progress::default(); s.slices()];
        for iterations in 1.. {
            if transposed {
                self.hop.transpose(&input, &mut next)
            } else {
                self.hop.apply(&input, &mut next)
            }
            self.scale(&mut next);
            let slices = all.iter_mut().zip(y.chunks_mut(len)).zip(next.chunks_mut(len));
            let slices = slices.zip(x.chunks(len).zip(input.chunks_mut(len))).enumerate();
            parallel::each(
                slices.filter(|(_, (((p, _), _), _))| p.settled < rows),
                |(slice, (((p, y), next), (x, input)))| {
                    let kept = p.settled * s.value_dim;
                    next[..kept].copy_from_slice(&y[..kept]);
                    y.iter_mut().zip(&*next).for_each(|(y, next)| *y = next - *y);
                    input.iter_mut().zip(x).zip(&*next).for_each(|((input, x), next)| *input = x + next);
                    let now = self.progress(slice, transposed, m.tol, [x, y, input]);
                    y.copy_from_slice(next);
                    let ended = if iterations >= limit { (rows, now.residual) } else { (now.settled, now.bound) };
                    *p = Progress { settled: ended.0, bound: p.bound.max(ended.1), iterations, ..now };
                },
            );
            let mut left = all.iter().filter(|p| p.settled < rows).peekable();
            if left.peek().is_none() {
                break;
            }
            if m.max_iter.is_some_and(|max| iterations >= max) {
                let residual = left.fold(0.0, |most: f64, p| most.max(p.residual));
                return Err(Error::NotConverged { mechanism: "composed", iterations, residual, tol: m.tol });
            }
        }
        Ok(all.into_iter().map(|Progress { iterations, bound, .. }| Convergence { iterations, bound }).collect())
    }

    /// Where a slice stands after a `step` from `x` to `iterate = x + y`.
    fn progress(&self, slice: usize, transposed: bool, tol: f64, parts: [&[f32]; 3]) -> Progress {
        let gamma = self.head(slice);
        let mut sizes = [0.0; 3];
        let mut now = Progress::default();
        let dim = self.hop.shape().value_dim;
        // Of rows that depend on all others there is one piece.
        let piece = if self.causal && !transposed { dim } else { parts[0].len() };
        let mut exact = true;
        for first in (0..parts[0].len()).step_by(piece) {
            for (size, x) in sizes.iter_mut().zip(parts) {
                *size = self.joined(*size, self.measured(&x[first..first + piece], transposed));
            }
            let [size, step, iterate] = sizes;
            let weight = gamma / (1.0 - gamma) / if size > 0.0 { size } else { 1.0 };
            now.residual = now.residual.max(weight * step);
            exact &= weight * step <= tol.max(weight * ROUNDING * iterate);
            if exact {
                (now.settled, now.bound) = ((first + piece) / dim, now.residual);
            }
        }
        now
    }

    /// The measure of two pieces from that of each.
    fn joined(&self, a: f64, b: f64) -> f64 {
        match self.measure {
            Measure::Square => a.hypot(b),
            Measure::Largest => a.max(b),
        }
    }

    /// The size of values, in the measure in which the operator contracts. The transpose of what contracts the largest
    /// entry contracts the sum of a channel's magnitudes.
    fn measured(&self, x: &[f32], transposed: bool) -> f64 {
        let dim = self.hop.shape().value_dim;
        match (self.measure, transposed) {
            (Measure::Square, _) => x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt(),
            (Measure::Largest, false) => x.iter().fold(0.0, |most: f64, &x| most.max(f64::from(x).abs())),
            (Measure::Largest, true) => {
                let column = |c: usize| x.iter().skip(c).step_by(dim).map(|&x| f64::from(x).abs()).sum::<f64>();
                (0..dim).map(column).fold(0.0, f64::max)
            }
        }
    }

    fn head(&self, slice: usize) -> f64 {
        self.gamma[slice % self.gamma.len()]
    }

    fn scale(&self, x: &mut [f32]) {
        self.each_mut(x, |x, gamma| *x *= gamma as f32);
    }

    fn each_mut(&self, x: &mut [f32], f: impl Fn(&mut f32, f64) + Sync) {
        let len = x.len() / self.hop.shape().slices();
        let slices = x.chunks_mut(len.max(1)).enumerate();
        parallel::each(slices, |(slice, x)| x.iter_mut().for_each(|x| f(x, self.head(slice))));
    }

    fn each(&self, x: &mut [f32], y: &[f32], f: impl Fn(&mut f32, f32, f64) + Sync) {
        let len = (x.len() / self.hop.shape().slices()).max(1);
        let slices = x.chunks_mut(len).zip(y.chunks(len)).enumerate();
        parallel::each(slices, |(slice, (x, y))| x.iter_mut().zip(y).for_each(|(x, &y)| f(x, y, self.head(slice))));
    }

    /// `<x, y>` of every head, summed over the batch.
    fn by_head(&self, x: &[f32], y: &[f32]) -> Vec<f64> {
        let len = (x.len() / self.hop.shape().slices()).max(1);
        let mut sums = vec![0.0; self.gamma.len()];
        for (slice, (x, y)) in x.chunks(len).zip(y.chunks(len)).enumerate() {
            sums[slice % self.gamma.len()] += crate::structure::dense::dot(x, y);
        }
        sums
    }
}
