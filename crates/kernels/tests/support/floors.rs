//! What rounding leaves of terms that cancel: a floor for every row, from the terms of that row alone.

use resolvent_kernels::{
    Mechanism, Parameter, Tol,
    mechanism::{DistanceKernel, Fna, Manifold, Score},
    reference,
};

use super::problem::{Problem, Solution, assert_solution};

/// What may remain of each term in f32, relative: two units in the last place. The kernels need up to 1.5.
pub const F32: f64 = 2.0 * f32::EPSILON as f64;
/// What may remain of each term where tensors are stored in halves: a quarter of bf16's rounding. The kernels need up to half of this.
pub const HALF: f64 = 1.0 / 2048.0;
/// How many times as much may remain of what is summed over all keys or pairs without weights: logarithms of sums and the gradients of
/// parameters. The kernels need up to 4.4.
const LONG_SUMS: f64 = 5.0;

/// Panics unless every row of `got` is within the tolerance of `expected`, or else within the share `left` of its terms.
/// Weights that are exponentials are as exact as the scores of their own row let them be.
#[track_caller]
pub fn assert_rows(what: &str, got: &Solution, expected: &Solution, p: &Problem, tol: Tol, left: f64) {
    let terms = terms(p);
    for (name, expected) in expected {
        let rows = terms.get(name).unwrap_or_else(|| panic!("{what}: the terms of {name} are not known"));
        let rtol = if matches!(*name, "out" | "lse") { tol.forward } else { tol.backward };
        let len = expected.len() / rows.len();
        let each = got[name].chunks(len).zip(expected.chunks(len)).zip(rows).enumerate();
        for (n, ((got, expected), terms)) in each {
            if got == expected {
                continue; // also the logarithm of an empty sum
            }
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut got.iter().zip(expected).map(|(got, x)| got - x));
            let floor = left * terms + f64::from(f32::MIN_POSITIVE);
            let size = norm(&mut expected.iter().copied());
            assert!(
                error <= rtol * size + floor,
                "{what}, {name}, row {n}: error {error:.3e} of {size:.3e}, floor {floor:.3e}"
            );
        }
    }
}

/// Whether the terms of a problem's rows are known.
pub fn knows(mechanism: &Mechanism) -> bool {
    match mechanism.id() {
        "fna" => mechanism.as_fna().is_some_and(|m| m.norm_exponent == 0.0),
        id => id == "softmax",
    }
}

/// Row by row where the terms are known that may cancel, else head by head with the noise of terms of order one.
#[track_caller]
pub fn assert_agrees(what: &str, got: &Solution, expected: &Solution, p: &Problem) {
    let tol = Tol::f32(&p.mechanism);
    match knows(&p.mechanism) {
        true => assert_rows(what, got, expected, p, tol, F32),
        false => assert_solution(what, got, expected, &p.shape, tol.with_noise(1.0)),
    }
}

/// The slopes of one pair's score, in magnitude: by the query, the key, `alpha` and `kappa`.
type Slopes = [f64; 4];

/// For every tensor what one unit of rounding leaves of the terms of its rows (of a parameter's gradient: of all rows), were all of
/// them off by one, each in its own direction. A weight is off by as many as the score of its pair and the logarithm that is taken
/// off it have digits before the point; a product of gradient and value by one of its own terms. Of mechanisms with one matrix
/// of weights: [`knows`].
fn terms(p: &Problem) -> Solution {
    let forward = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap();
    let (seq_q, seq_kv, heads) = (p.shape.seq_q, p.shape.seq_kv, p.shape.heads);
    let lse = forward.lse.as_ref().unwrap();
    let scores: Vec<f64> = lse.iter().map(|x| if x.is_finite() { 1.0 + x.abs() } else { 0.0 }).collect();
    let mut squares = Squares::new(p);
    for (row, weights) in forward.weights().chunks(seq_kv).enumerate() {
        let (slice, mean) = (row / seq_q, row_of(&forward.out, row, p.shape.value_dim));
        let visible = weights.iter().enumerate().filter(|(_, w)| **w > 0.0);
        let visible: Vec<_> = visible.map(|(j, &w)| (slice * seq_kv + j, w)).collect();
        let mut slopes: Vec<Slopes> = visible.iter().map(|&(key, _)| slopes(p, slice % heads, row, key)).collect();
        // The gradients of a row's scores sum to nothing: what they share in a parameter's slope is none of it.
        for parameter in 2..4 {
            let shared: f64 = visible.iter().zip(&slopes).map(|((_, w), slopes)| w * slopes[parameter]).sum();
            slopes.iter_mut().for_each(|slopes| slopes[parameter] -= shared);
        }
        for (&(key, w), slopes) in visible.iter().zip(slopes) {
            let digits = scores[row] + (w.ln() + lse[row]).abs();
            squares.add(p, (row, mean), (key, w, digits), slopes);
        }
    }
    let mut terms = squares.roots(p);
    terms.insert("lse", scores.iter().map(|x| LONG_SUMS * x).collect());
    terms
}

/// Sums of the squares of terms.
struct Squares {
    out: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    /// Of `alpha` and `kappa`, per head.
    parameters: [Vec<f64>; 2],
}

impl Squares {
    fn new(p: &Problem) -> Self {
        let [of_queries, of_keys] = [p.shape.seq_q, p.shape.seq_kv].map(|seq| vec![0.0; p.shape.slices() * seq]);
        let parameters = [vec![0.0; p.shape.heads], vec![0.0; p.shape.heads]];
        Self { out: of_queries.clone(), dq: of_queries, dk: of_keys.clone(), dv: of_keys, parameters }
    }

    /// Adds those of the pair of a query, with its result, and a key, with its weight and the digits that this may be off by.
    fn add(&mut self, p: &Problem, (row, mean): (usize, &[f64]), (key, w, digits): (usize, f64, f64), slopes: Slopes) {
        let [dout, value] = [(&p.dout, row), (&p.v, key)].map(|(x, n)| row_of(x, n, p.shape.value_dim));
        let apart: Vec<f64> = value.iter().zip(mean).map(|(x, mean)| x - mean).collect();
        let [of_value, of_mean] = [value, mean].map(|x| x.iter().zip(dout).map(|(x, y)| x * y).collect::<Vec<_>>());
        let ds = of_value.iter().sum::<f64>() - of_mean.iter().sum::<f64>();
        let ds = w * (length(&of_value) + length(&of_mean) + digits * ds.abs());
        let [by_q, by_k, by_alpha, by_kappa] = slopes.map(|slope| (ds * slope).powi(2));
        self.out[row] += (w * (length(value) + digits * length(&apart))).powi(2);
        self.dv[key] += (w * digits * length(dout)).powi(2);
        self.dq[row] += by_q;
        self.dk[key] += by_k;
        let head = row / p.shape.seq_q % p.shape.heads;
        self.parameters[0][head] += by_alpha;
        self.parameters[1][head] += by_kappa;
    }

    fn roots(mut self, p: &Problem) -> Solution {
        if p.k.is_none() {
            self.dq.iter_mut().zip(&self.dk).for_each(|(dq, dk)| *dq += dk);
        }
        let roots = |x: Vec<f64>, factor: f64| x.into_iter().map(|x| factor * x.sqrt()).collect();
        let [alpha, kappa] = self.parameters;
        [
            ("out", roots(self.out, 1.0)),
            ("dq", roots(self.dq, 1.0)),
            ("dk", roots(self.dk, 1.0)),
            ("dv", roots(self.dv, 1.0)),
            (Parameter::Alpha.gradient_name(), roots(alpha, LONG_SUMS)),
            (Parameter::Kappa.gradient_name(), roots(kappa, LONG_SUMS)),
        ]
        .into()
    }
}

/// Row `n` of `x`.
fn row_of(x: &[f64], n: usize, cols: usize) -> &[f64] {
    &x[n * cols..][..cols]
}

/// The length of a vector.
fn length(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The slopes of the score of query `row` and `key`, both counted over all heads.
fn slopes(p: &Problem, head: usize, row: usize, key: usize) -> Slopes {
    let (k_rows, dim) = (p.k.as_ref().unwrap_or(&p.q), p.shape.head_dim);
    let lengths = [length(row_of(&p.q, row, dim)), length(row_of(k_rows, key, dim))];
    match (&p.mechanism.score, p.mechanism.as_fna()) {
        (Score::DotExp(m), _) => {
            let scale = m.scale.unwrap_or((dim as f64).powf(-0.5));
            [scale * lengths[1], scale * lengths[0], 0.0, 0.0]
        }
        (_, Some(m)) => {
            // A zero token has no direction and gets no gradient.
            let over = |x: f64, length: f64| if length > 0.0 { x / length } else { 0.0 };
            let [q, k] = if m.manifold == Manifold::Sphere { lengths } else { [1.0; 2] };
            let tokens = p.q[row * dim..][..dim].iter().zip(&k_rows[key * dim..][..dim]);
            let r = tokens.map(|(&x, &y)| (over(x, q) - over(y, k)).powi(2)).sum::<f64>().sqrt();
            let [by_r, by_alpha, by_kappa] = by_distance(p, &m, head, r);
            // The chord is shorter than the arc by less than a half.
            [over(by_r, q), over(by_r, k), by_alpha, by_kappa].map(|slope| 2.0 * slope)
        }
        _ => panic!("the terms of {} are not known", p.mechanism.id()),
    }
}

/// The slopes of the score of two tokens at a distance of `r`, in magnitude: by `r`, `alpha` and `kappa`.
fn by_distance(p: &Problem, m: &Fna, head: usize, r: f64) -> [f64; 3] {
    let resolved = m.resolve(p.shape.head_dim, p.shape.heads);
    let given = |parameter: Parameter| p.parameters.get(&parameter).map(|values| f64::from(values[head]));
    let (kappa, alpha) =
        (given(Parameter::Kappa).unwrap_or(resolved.kappa), given(Parameter::Alpha).unwrap_or(m.alpha));
    let (power, z) = (resolved.intrinsic_dim + alpha, r / kappa);
    let (by_z, by_alpha) = match m.kernel {
        _ if m.is_gaussian() => (2.0 * z, 0.0),
        DistanceKernel::Student => (power * z / (1.0 + z * z), 0.5 * (z * z).ln_1p()),
        DistanceKernel::Levy => (power / (1.0 + z), z.ln_1p()),
    };
    [by_z / kappa, by_alpha, by_z * z / kappa]
}
