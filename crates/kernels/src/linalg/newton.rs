//! `X <- 2X - X M X`: every step squares the residual `I - M X`. "Softmax-free Linear Transformers", algorithm 2;
//! "LaplacianFormer", algorithm 2, which starts elsewhere.
//!
//! Every iterate is a polynomial of the matrix, and the extreme eigenvalues tell how far the steps come. Where these invert all of them
//! the result is the inverse, by a factorisation; else the steps are taken by products in f32, or, where these lose digits or take
//! longer, on eigenvalues in f64.

use super::{Entries, Method, Order, factor};
use crate::{mechanism::NewtonInit, simd::Level};

/// The most halvings of [`NewtonInit::Backtrack`], and the residual that it asks for.
const HALVINGS: usize = 10;
const RESIDUAL: f64 = 1.01;

/// The largest residual `|1 - x y|` before the last step of what counts as the inverse: the result has its square left, the gradient
/// through the last step twice itself.
const CONVERGED: f64 = 1.0 / (1 << 24) as f64;

/// Products in f32 lose as many digits as the iterate has grown beyond the inverse of the largest eigenvalue. A step from a multiple of
/// the identity at most doubles it, as two steps from a multiple of the matrix do; so many doublings leave five digits.
const DOUBLINGS: usize = 10;

/// Eigenvalues that differ by less than this part of themselves have a derivative in place of a divided difference, which would be rounding.
const CLOSE: f64 = 1e-5;

/// The fewest steps for which eigenvalues may be less work than products.
const SPECTRAL_STEPS: usize = 8;
/// The smallest order for which they are, from a multiple of the matrix and from one of the identity, which needs half as many
/// steps.
const SPECTRAL_ORDERS: [usize; 2] = [384, 768];

/// Whether steps that have not converged are taken by products.
fn by_products(method: &Method, n: usize) -> bool {
    let identity = usize::from(from_identity(method));
    let exact = method.steps <= DOUBLINGS * (2 - identity);
    exact && (method.steps < SPECTRAL_STEPS || n < SPECTRAL_ORDERS[identity])
}

/// f32 of working memory of [`invert`]: the matrix, an iterate and a product, or what a factorisation takes.
pub(super) fn work(method: &Method, order: Order) -> usize {
    let factors = factor::cholesky_work(order.n);
    let steps = if by_products(method, order.n) { 0 } else { factor::eigen_work(order.n) };
    (3 * order.len()).max(factors).max(steps)
}

/// Writes the last iterate from `a + ridge I` to `y`. Returns whether it is the inverse, and its gradient that of one, to rounding.
pub(super) fn invert(
    method: &Method,
    level: Level,
    order: Order,
    a: &[f32],
    y: &mut Entries<'_>,
    work: &mut [f32],
) -> bool {
    let alpha = factor(method, level, order, a, work);
    // From a multiple of the matrix steps go by the square of the condition, and many landmarks seldom converge.
    if from_identity(method) || order.n < SPECTRAL_ORDERS[0] {
        let largest = bound(order, &work[..order.len()]);
        let inverted = factor::cholesky(method, level, order, a, y, work).is_ok();
        if inverted && has_converged(method, alpha, [bound(order, y.high), largest]) {
            return true;
        }
    }
    if !by_products(method, order.n) {
        let last = |x, most| on_eigenvalue(method, alpha, above_rounding(order, x, most)).0;
        factor::of_eigenvalues(order, a, method.ridge, last, y, work);
        return false;
    }
    y.low.fill(0.0);
    take(method, level, order, a, alpha as f32, &mut y.high[..order.len()], work);
    false
}

/// Takes all steps by products.
fn take(method: &Method, level: Level, order: Order, a: &[f32], alpha: f32, y: &mut [f32], work: &mut [f32]) {
    let (m, rest) = work.split_at_mut(order.len());
    let (product, next) = rest.split_at_mut(order.len());
    let (mut x, mut next) = (y, &mut next[..order.len()]);
    order.add_ridge(a, method.ridge, m);
    start(method, order, m, alpha, x);
    for _ in 0..method.steps {
        step(level, order, m, x, product, next);
        std::mem::swap(&mut x, &mut next);
    }
    if method.steps % 2 == 1 {
        // Then `next` is what belongs to the caller.
        next.copy_from_slice(x);
    }
}

/// Writes the first iterate.
fn start(method: &Method, order: Order, m: &[f32], alpha: f32, x: &mut [f32]) {
    if from_identity(method) {
        x.fill(0.0);
        (0..order.n).for_each(|i| x[i * (order.stride + 1)] = alpha);
    } else {
        x.iter_mut().zip(m).for_each(|(x, m)| *x = alpha * m);
    }
}

/// At least the largest eigenvalue of a symmetric `a`.
fn bound(order: Order, a: &[f32]) -> f64 {
    let squares: f64 = a[..order.len()].iter().map(|&x| f64::from(x).powi(2)).sum();
    order.norm(a).min(squares.sqrt())
}

/// Whether the steps bring the residual below [`CONVERGED`] before the last, for eigenvalues of at most `largest` whose inverses are at
/// most `inverse`.
fn has_converged(method: &Method, alpha: f64, [inverse, largest]: [f64; 2]) -> bool {
    let first = |x: f64| 1.0 - alpha * if from_identity(method) { x } else { x * x };
    let residual = first(1.0 / inverse).abs().max(first(largest).abs());
    residual < 1.0 && residual.ln() * 2.0_f64.powi(method.steps as i32 - 1) <= CONVERGED.ln()
}

/// Zero for an eigenvalue that may be the rounding of the largest, of which 64 steps would make a large number.
fn above_rounding(order: Order, x: f64, most: f64) -> f64 {
    if x.abs() <= 4.0 * f64::EPSILON * order.n as f64 * most { 0.0 } else { x }
}

/// What the steps make of an eigenvalue, and its derivative; the factor on the start is held constant.
fn on_eigenvalue(method: &Method, alpha: f64, x: f64) -> (f64, f64) {
    let first = if from_identity(method) { (alpha, 0.0) } else { (alpha * x, alpha) };
    (0..method.steps).fold(first, |(y, dy), _| (y * (2.0 - x * y), 2.0 * dy * (1.0 - x * y) - y * y))
}

/// Back through the steps that were taken, on eigenvalues; the factor on the start is held constant.
pub(super) fn unrolled(method: &Method, level: Level, order: Order, a: &[f32], dy: [&mut [f32]; 2], work: &mut [f32]) {
    let alpha = factor(method, level, order, a, work);
    let divided = |x: f64, y: f64, most: f64| {
        let [x, y] = [x, y].map(|x| above_rounding(order, x, most));
        if (x - y).abs() <= CLOSE * x.abs().max(y.abs()) {
            return on_eigenvalue(method, alpha, 0.5 * (x + y)).1;
        }
        let [f, g] = [x, y].map(|x| on_eigenvalue(method, alpha, x).0);
        (f - g) / (x - y)
    };
    factor::gradient_of_eigenvalues(order, a, method.ridge, divided, dy, work);
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

#[cfg(test)]
mod tests {
    use faer::Mat;

    use super::*;
    use crate::mechanism::{Inverse, InverseGradient};

    const N: usize = 40;
    const ORDER: Order = Order { n: N, stride: 48 };

    /// Kernels of coordinates that are `spread` apart: almost equal where that is small.
    fn matrix(spread: f32) -> Vec<f32> {
        let mut a = vec![0.0; ORDER.len()];
        for i in 0..N {
            (0..N).for_each(|j| a[i * ORDER.stride + j] = (-(i.abs_diff(j) as f32 * spread).powi(2)).exp());
        }
        a
    }

    fn method(init: Option<NewtonInit>, steps: usize, ridge: f64) -> Method {
        let (inverse, gradient) = (Inverse::NewtonSchulz, InverseGradient::Unrolled);
        Method { mechanism: "soft", inverse, steps, init, start: None, ridge, gradient, cutoff: 0.0 }
    }

    /// Every step of the definition, in f64; the iterates, the start first.
    fn defined(method: &Method, alpha: f64, m: &Mat<f64>) -> Vec<Mat<f64>> {
        let first = if from_identity(method) { Mat::identity(N, N) } else { m.clone() };
        let mut iterates = vec![faer::Scale(alpha) * first];
        for step in 0..method.steps {
            let x = &iterates[step];
            iterates.push(faer::Scale(2.0) * x - x * m * x);
        }
        iterates
    }

    /// By the inverse, by products and on eigenvalues, and back.
    #[test]
    fn every_way_gives_what_the_steps_are_defined_to() {
        let level = Level::selected().unwrap();
        let mut converged = [false; 2];
        let starts = [(Some(NewtonInit::Scaled), 1.0), (Some(NewtonInit::Backtrack), 1.0), (None, 0.5)];
        for ((init, half), spread) in
            starts.into_iter().flat_map(|start| [1.0, 0.3, 0.02].map(|spread| (start, spread)))
        {
            for steps in [1, 2, 5, 10, 20, 26].map(|steps| (half * steps as f64).ceil() as usize) {
                let method = method(init, steps, 0.01);
                let a = matrix(spread);
                let mut memory = vec![f32::NAN; work(&method, ORDER).max(method.gradient_work(ORDER))];
                let alpha = factor(&method, level, ORDER, &a, &mut memory);
                let m = Mat::from_fn(N, N, |i, j| f64::from(a[i * ORDER.stride + j]) + if i == j { 0.01 } else { 0.0 });
                let iterates = defined(&method, alpha, &m);
                let expected = &iterates[steps];
                let (mut high, mut low) = (vec![0.0; ORDER.len()], vec![0.0; ORDER.len()]);
                let mut y = Entries { high: &mut high, low: &mut low };
                converged[usize::from(invert(&method, level, ORDER, &a, &mut y, &mut memory))] = true;
                let entry = |i: usize, j: usize| i * ORDER.stride + j;
                let far = |i: usize, j: usize| {
                    (f64::from(high[entry(i, j)]) + f64::from(low[entry(i, j)]) - expected[(i, j)]).abs()
                };
                let off = Mat::from_fn(N, N, far).norm_max() / expected.norm_max();
                assert!(off < 2e-5, "{init:?}, {spread}, {steps} steps: {off:e} off");

                let mut dy = vec![0.0; ORDER.len()];
                (0..N * N).for_each(|at| dy[entry(at / N, at % N)] = ((at / N + at % N) as f32 * 0.37).sin());
                let mut g = Mat::from_fn(N, N, |i, j| f64::from(dy[entry(i, j)]));
                unrolled(&method, level, ORDER, &a, [&mut dy, &mut vec![0.0; ORDER.len()]], &mut memory);
                let mut dm = Mat::zeros(N, N);
                for x in iterates[..steps].iter().rev() {
                    dm -= x * &g * x;
                    g = faer::Scale(2.0) * &g - &g * (&m * x) - (x * &m) * &g;
                }
                let expected = if from_identity(&method) { dm } else { dm + faer::Scale(alpha) * g };
                let far = |i: usize, j: usize| (f64::from(dy[entry(i, j)]) - expected[(i, j)]).abs();
                let off = Mat::from_fn(N, N, far).norm_max() / expected.norm_max();
                assert!(off < 1e-6, "{init:?}, {spread}, {steps} steps back: {off:e} off");
            }
        }
        assert_eq!(converged, [true; 2]);
    }

    /// Directions that few steps leave out are doubled by every further one, and what f32 rounds in them too.
    #[test]
    fn sixty_four_steps_on_a_singular_matrix_are_those_on_its_eigenvalues() {
        let level = Level::selected().unwrap();
        let (method, mut a) = (method(Some(NewtonInit::Scaled), 64, 0.0), vec![0.0; ORDER.len()]);
        // Of rank one: the pseudo-inverse of ones is ones over the square of the order.
        (0..N).for_each(|i| a[i * ORDER.stride..][..N].fill(1.0));
        let mut memory = vec![f32::NAN; work(&method, ORDER)];
        let (mut high, mut low) = (vec![0.0; ORDER.len()], vec![0.0; ORDER.len()]);
        assert!(!invert(&method, level, ORDER, &a, &mut Entries { high: &mut high, low: &mut low }, &mut memory));
        let expected = 1.0 / (N * N) as f32;
        for row in high.chunks_exact(ORDER.stride) {
            row[..N].iter().for_each(|x| assert!((x - expected).abs() < 1e-3 * expected, "{x}, not {expected}"));
        }
    }
}
