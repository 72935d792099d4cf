//! What rounding leaves of terms that cancel: a floor for every row, from the terms of that row alone.

use resolvent_kernels::{
    Mechanism, Parameter, Tol,
    mechanism::{DistanceKernel, Fna, Manifold},
    reference,
};

use super::problem::{Problem, Solution, assert_solution};

/// What may remain of each term in f32: some units in the last place.
pub const F32: f64 = 16.0 * f32::EPSILON as f64;
/// What may remain of each term where tensors are stored in halves: a unit in the last place of bf16.
pub const HALF: f64 = 1.0 / 256.0;

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
    match mechanism {
        Mechanism::Softmax(_) => true,
        Mechanism::Fna(m) => m.norm_exponent == 0.0,
        _ => false,
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

/// For every tensor the sums of the magnitudes of the terms of its rows (of a parameter's gradient: of all rows), each times one
/// more than the score of its pair and the logarithm that is taken off it: an error of these is one of the weight. Of
/// mechanisms with one matrix of weights: [`knows`].
fn terms(p: &Problem) -> Solution {
    let forward = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap();
    let (seq_q, seq_kv) = (p.shape.seq_q, p.shape.seq_kv);
    let lse = forward.lse.as_ref().unwrap();
    let scores: &[f64] = &lse.iter().map(|x| if x.is_finite() { 1.0 + x.abs() } else { 0.0 }).collect::<Vec<_>>();
    let slices = p.shape.slices();
    let (mut out, mut dq) = (vec![0.0; slices * seq_q], vec![0.0; slices * seq_q]);
    let (mut dv, mut dk) = (vec![0.0; slices * seq_kv], vec![0.0; slices * seq_kv]);
    let mut parameters = vec![[0.0; 2]; p.shape.heads];
    for (row, weights) in forward.weights().chunks(seq_kv).enumerate() {
        let (slice, dout) = (row / seq_q, norm(&p.dout, row, p.shape.value_dim));
        let visible = || {
            let digits = move |w: f64| scores[row] + (w.ln() + lse[row]).abs();
            weights
                .iter()
                .enumerate()
                .filter(|(_, w)| **w > 0.0)
                .map(move |(j, &w)| (slice * seq_kv + j, w * digits(w)))
        };
        let value = |key: usize| norm(&p.v, key, p.shape.value_dim);
        out[row] = visible().map(|(key, w)| w * value(key)).sum();
        for (key, w) in visible() {
            let [by_q, by_k, by_alpha, by_kappa] = slopes(p, slice % p.shape.heads, row, key);
            let ds = w * dout * (value(key) + out[row]);
            dv[key] += w * dout;
            dq[row] += ds * by_q;
            dk[key] += ds * by_k;
            parameters[slice % p.shape.heads][0] += ds * by_alpha;
            parameters[slice % p.shape.heads][1] += ds * by_kappa;
        }
    }
    if p.k.is_none() {
        dq.iter_mut().zip(&dk).for_each(|(dq, dk)| *dq += dk);
    }
    let of = |n: usize| parameters.iter().map(|parameter| parameter[n]).collect();
    let names = [Parameter::Alpha.gradient_name(), Parameter::Kappa.gradient_name()];
    [("out", out), ("lse", scores.to_vec()), ("dq", dq), ("dk", dk), ("dv", dv), (names[0], of(0)), (names[1], of(1))]
        .into()
}

/// The length of a row of `x`.
fn norm(x: &[f64], row: usize, cols: usize) -> f64 {
    x[row * cols..][..cols].iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The slopes of the score of query `row` and `key`, both counted over all heads.
fn slopes(p: &Problem, head: usize, row: usize, key: usize) -> Slopes {
    let (k_rows, dim) = (p.k.as_ref().unwrap_or(&p.q), p.shape.head_dim);
    let lengths = [norm(&p.q, row, dim), norm(k_rows, key, dim)];
    match &p.mechanism {
        Mechanism::Softmax(m) => {
            let scale = m.scale.unwrap_or((dim as f64).powf(-0.5));
            [scale * lengths[1], scale * lengths[0], 0.0, 0.0]
        }
        Mechanism::Fna(m) => {
            // A zero token has no direction and gets no gradient.
            let over = |x: f64, length: f64| if length > 0.0 { x / length } else { 0.0 };
            let [q, k] = if m.manifold == Manifold::Sphere { lengths } else { [1.0; 2] };
            let tokens = p.q[row * dim..][..dim].iter().zip(&k_rows[key * dim..][..dim]);
            let r = tokens.map(|(&x, &y)| (over(x, q) - over(y, k)).powi(2)).sum::<f64>().sqrt();
            let [by_r, by_alpha, by_kappa] = by_distance(p, m, head, r);
            // The chord is shorter than the arc by less than a half.
            [over(by_r, q), over(by_r, k), by_alpha, by_kappa].map(|slope| 2.0 * slope)
        }
        other => panic!("the terms of {} are not known", other.id()),
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
