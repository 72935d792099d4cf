//! `X <- 2X - X M X`: every step squares the residual `I - M X`. "Softmax-free Linear Transformers", algorithm 2;
//! "LaplacianFormer", algorithm 2, which starts elsewhere. For large matrices the steps are taken on eigenvalues.

use std::cell::Cell;

use super::{Entries, Method, Order, factor};
use crate::{mechanism::NewtonInit, simd::Level};

/// The most halvings of [`NewtonInit::Backtrack`], and the residual that it asks for.
const HALVINGS: usize = 10;
const RESIDUAL: f64 = 1.01;

/// The residual `|I - M X|_F` from which on two steps are the last: they leave `2^-24`, half a unit of rounding, and further
/// ones would do nothing but round.
const NEAR: f32 = 1.0 / 64.0;

/// The steps from such a residual on after which the gradient of all steps is that of the exact inverse too: every step squares the
/// residual, and the gradient of the last one has what was left before it, twice: `2^-23`.
const SETTLED: usize = 3;

/// The fewest steps for which eigenvalues may be less work than products.
const SPECTRAL_STEPS: usize = 8;
/// The smallest order for which they are, from a multiple of the matrix and from one of the identity, which needs half as many
/// steps.
const SPECTRAL_ORDERS: [usize; 2] = [384, 768];

/// Whether the steps are taken on eigenvalues: every iterate is a polynomial of the matrix.
fn is_spectral(method: &Method, n: usize) -> bool {
    method.steps >= SPECTRAL_STEPS && n >= SPECTRAL_ORDERS[usize::from(from_identity(method))]
}

/// f32 of working memory of [`invert`]: the matrix, an iterate and a product, or what eigenvalues take.
pub(super) fn work(method: &Method, order: Order) -> usize {
    let spectral = if is_spectral(method, order.n) { factor::eigen_work(order.n) } else { 0 };
    (3 * order.len()).max(spectral)
}

/// f32 of working memory of [`unrolled`]: the matrix, its gradient, three products and every iterate.
pub(super) fn unrolled_work(method: &Method, order: Order) -> usize {
    (5 + method.steps) * order.len()
}

/// Writes the last iterate from `a + ridge I` to `y`, on eigenvalues or by products; these end early where they have converged.
/// Returns whether the gradient of all steps is that of the exact inverse, to rounding.
pub(super) fn invert(method: &Method, level: Level, order: Order, a: &[f32], y: &mut [f32], work: &mut [f32]) -> bool {
    let len = order.len();
    let (m, rest) = work.split_at_mut(len);
    let (product, next) = rest.split_at_mut(len);
    let (mut x, mut next) = (&mut y[..len], &mut next[..len]);
    order.add_ridge(a, method.ridge, m);
    if is_spectral(method, order.n) {
        let alpha = alpha(method, level, order, a, m, product);
        let farthest = Cell::new(0.0_f64);
        let f = |x| {
            let [early, last] = on_eigenvalue(method, alpha, x);
            farthest.set(farthest.get().max((1.0 - x * early).abs()));
            last
        };
        factor::of_eigenvalues(order, a, method.ridge, f, &mut Entries { high: y, low: &mut [] }, work);
        return farthest.get() <= NEAR.into();
    }
    start(method, level, order, a, m, x, product);
    let (mut taken, mut last, mut settled) = (0, method.steps, false);
    while taken < last {
        step(level, order, m, x, product, next);
        std::mem::swap(&mut x, &mut next);
        if is_near_identity(order, product) {
            settled |= taken + SETTLED <= method.steps;
            last = last.min(taken + 2);
        }
        taken += 1;
    }
    if taken % 2 == 1 {
        // Then `next` is what belongs to the caller.
        next.copy_from_slice(x);
    }
    settled
}

/// What all steps but the last [`SETTLED`] make of an eigenvalue, and what all make.
fn on_eigenvalue(method: &Method, alpha: f64, x: f64) -> [f64; 2] {
    let first = if from_identity(method) { alpha } else { alpha * x };
    let steps = |y: f64, taken: usize| (0..taken).fold(y, |y, _| y * (2.0 - x * y));
    let rest = SETTLED.min(method.steps);
    let early = steps(first, method.steps - rest);
    [early, steps(early, rest)]
}

/// Writes the first iterate.
fn start(method: &Method, level: Level, order: Order, a: &[f32], m: &[f32], x: &mut [f32], product: &mut [f32]) -> f32 {
    let alpha = alpha(method, level, order, a, m, product) as f32;
    if from_identity(method) {
        x.fill(0.0);
        (0..order.n).for_each(|i| x[i * (order.stride + 1)] = alpha);
    } else {
        x.iter_mut().zip(m).for_each(|(x, m)| *x = alpha * m);
    }
    alpha
}

/// [`alpha`] of `a + ridge I`.
pub(super) fn factor(method: &Method, level: Level, order: Order, a: &[f32], work: &mut [f32]) -> f64 {
    let (m, product) = work.split_at_mut(order.len());
    order.add_ridge(a, method.ridge, m);
    alpha(method, level, order, a, m, product)
}

/// Whether the first iterate is a multiple of the identity, not of the matrix.
fn from_identity(method: &Method) -> bool {
    matches!(method.init, None | Some(NewtonInit::Identity))
}

/// The factor on the start.
fn alpha(method: &Method, level: Level, order: Order, a: &[f32], m: &[f32], product: &mut [f32]) -> f64 {
    if let Some(start) = method.start {
        return start;
    }
    let norm = order.norm(m);
    match method.init {
        None => 1.0 / norm,
        Some(NewtonInit::Identity) => 1.8 / norm,
        Some(NewtonInit::Scaled) => 1.8 / (norm * norm),
        Some(NewtonInit::Official) => 1.8 / order.norm(a).powi(2),
        Some(NewtonInit::Paper) => 2.0 / (norm * norm),
        Some(NewtonInit::Backtrack) => {
            order.times(level, m, m, product);
            let mut alpha = 2.0 / (norm * norm);
            for _ in 0..HALVINGS {
                if residual(order, product, alpha) <= RESIDUAL {
                    break;
                }
                alpha *= 0.5;
            }
            alpha
        }
    }
}

/// `|I - alpha x|_1` of a symmetric `x`.
fn residual(order: Order, x: &[f32], alpha: f64) -> f64 {
    let entry = |i: usize, j: usize| f64::from(u8::from(i == j)) - alpha * f64::from(x[i * order.stride + j]);
    (0..order.n).map(|i| (0..order.n).map(|j| entry(i, j).abs()).sum()).fold(0.0, f64::max)
}

/// `next = 2x - x m x`, made symmetric, which it is but for rounding.
fn step(level: Level, order: Order, m: &[f32], x: &[f32], product: &mut [f32], next: &mut [f32]) {
    order.times(level, m, x, product);
    order.times(level, x, product, next);
    order.symmetrise(next, |at, xmx| 2.0 * x[at] - xmx);
}

/// Whether `|I - x|_F` is at most [`NEAR`].
fn is_near_identity(order: Order, x: &[f32]) -> bool {
    let rows = || x[..order.len()].chunks_exact(order.stride).enumerate();
    // The diagonal first: mostly it tells.
    let near = rows().all(|(i, row)| (1.0 - row[i]).abs() <= NEAR);
    let squares = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
    let of_row =
        |(i, row): (usize, &[f32])| squares(&row[..i]) + (1.0 - row[i]).powi(2) + squares(&row[i + 1..order.n]);
    near && rows().map(of_row).sum::<f32>() <= NEAR * NEAR
}

/// Back through the steps that were taken; the factor on the start is held constant.
pub(super) fn unrolled(method: &Method, level: Level, order: Order, a: &[f32], dy: &mut [f32], work: &mut [f32]) {
    let len = order.len();
    let dy = &mut dy[..len];
    let (m, rest) = work.split_at_mut(len);
    let (product, rest) = rest.split_at_mut(len);
    let (other, rest) = rest.split_at_mut(len);
    let (dm, rest) = rest.split_at_mut(len);
    let (third, iterates) = rest.split_at_mut(len);
    order.add_ridge(a, method.ridge, m);
    let alpha = start(method, level, order, a, m, &mut iterates[..len], product);
    for k in 1..method.steps {
        let (before, after) = iterates.split_at_mut(k * len);
        step(level, order, m, &before[(k - 1) * len..], product, &mut after[..len]);
    }
    dm.fill(0.0);
    for x in iterates[..method.steps * len].chunks_exact(len).rev() {
        // Iterates and matrix are symmetric; the gradient need not be.
        order.times(level, x, dy, product);
        order.times(level, product, x, other);
        dm.iter_mut().zip(&*other).for_each(|(dm, x)| *dm -= x);
        order.times(level, x, m, product);
        order.times(level, dy, product, other);
        order.transposed_times(level, product, dy, third);
        dy.iter_mut().zip(&*other).zip(&*third).for_each(|((g, l), r)| *g = 2.0 * *g - l - r);
    }
    if from_identity(method) {
        dy.copy_from_slice(dm);
    } else {
        dy.iter_mut().zip(&*dm).for_each(|(g, dm)| *g = dm + alpha * *g);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mechanism::{Inverse, InverseGradient};

    /// A diagonal of ones tells nothing of what lies beside it, on either side.
    #[test]
    fn an_iterate_is_near_in_every_entry() {
        let order = Order { n: 20, stride: 32 };
        let mut x = vec![0.0; order.len()];
        (0..order.n).for_each(|i| x[i * (order.stride + 1)] = 1.0);
        assert!(is_near_identity(order, &x));
        for (i, j) in [(0, 19), (19, 0), (7, 8), (12, 12)] {
            let mut x = x.clone();
            x[i * order.stride + j] += 2.0 * NEAR;
            assert!(!is_near_identity(order, &x), "({i}, {j})");
        }
        // Entries that are near by themselves are not so together.
        x.iter_mut().for_each(|x| *x += 0.5 * NEAR);
        assert!(!is_near_identity(order, &x));
    }

    #[test]
    fn what_has_converged_is_what_all_steps_give() {
        let level = Level::selected().unwrap();
        // Coordinates apart and almost equal: all steps are needed there, seven or so here.
        for (spread, early) in [(1.0, true), (0.02, false)] {
            let n = 40;
            let order = Order { n, stride: 48 };
            let mut a = vec![0.0; order.len()];
            for i in 0..n {
                (0..n).for_each(|j| a[i * order.stride + j] = (-(i.abs_diff(j) as f32 * spread).powi(2)).exp());
            }
            let method = Method {
                mechanism: "soft",
                inverse: Inverse::NewtonSchulz,
                steps: 20,
                init: Some(NewtonInit::Scaled),
                start: None,
                ridge: 0.01,
                gradient: InverseGradient::Implicit,
                cutoff: 0.0,
            };
            let (mut y, mut memory) = (vec![0.0; order.len()], vec![f32::NAN; work(&method, order)]);
            let settled = invert(&method, level, order, &a, &mut y, &mut memory);
            let (mut m, mut product, mut next) = (a.clone(), a.clone(), a.clone());
            order.add_ridge(&a, method.ridge, &mut m);
            let mut x = vec![0.0; order.len()];
            start(&method, level, order, &a, &m, &mut x, &mut product);
            let mut near = 0;
            for _ in 0..method.steps {
                step(level, order, &m, &x, &mut product, &mut next);
                std::mem::swap(&mut x, &mut next);
                near += usize::from(is_near_identity(order, &product));
            }
            assert_eq!(near > 4, early, "{near} of 20 iterates were near the inverse");
            assert_eq!(settled, near >= SETTLED, "{near}");
            if settled {
                let few = Method { steps: method.steps + SETTLED - near, ..method };
                assert!(invert(&few, level, order, &a, &mut y.clone(), &mut memory), "{near}");
                let fewer = Method { steps: few.steps - 1, ..few };
                assert!(!invert(&fewer, level, order, &a, &mut y.clone(), &mut memory), "{near}");
            }
            let largest = x.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let far = y.iter().zip(&x).map(|(y, x)| (y - x).abs()).fold(0.0, f32::max);
            assert!(far <= 4.0 * f32::EPSILON * largest, "{far} of {largest}");
        }
    }
}
