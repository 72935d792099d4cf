//! What a naive implementation makes of a dense problem of one hop in bf16: operands rounded, products summed exactly, weights and the
//! gradients of the products rounded before the second product. Everything else, norms of the rounded tokens among it, is f64. Operands
//! of two parts keep what rounding leaves of them, rounded.

use half::bf16;
use resolvent_kernels::{
    Parameter, Shape,
    mechanism::{Factor, Manifold, Mechanism, Normalisation, Score, Structure},
};

use crate::support::problem::{Problem, Solution};

/// How two rows make a number, by their product.
#[derive(Clone, Copy, PartialEq)]
enum Term {
    Product,
    /// Of rows at length one.
    Cosine,
    /// The squared distance.
    Square,
}

pub struct Naive<'a> {
    p: &'a Problem,
    m: Mechanism,
    term: Term,
    /// Whether tensors are stored in bf16, and the backward pass takes the output as it was stored.
    stored: bool,
    parts: usize,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
}

/// The weights of a slice, and the derivative of each pair's value (the logarithm, or the affinity) in its term.
struct Weights {
    w: Vec<f64>,
    slopes: Vec<f64>,
    /// Of an affinity that is not normalised by its row: the factor that makes a weight of it.
    factor: Vec<f64>,
}

impl<'a> Naive<'a> {
    pub fn of(p: &'a Problem, stored: bool, parts: usize) -> Self {
        let m = p.mechanism.values();
        let term = match &m.score {
            Score::Levy(m) | Score::Student(m) if m.manifold == Manifold::Sphere => Term::Cosine,
            Score::Levy(_) | Score::Student(_) | Score::Gaussian(_) => Term::Square,
            Score::CosineExp(_) => Term::Cosine,
            _ => Term::Product,
        };
        let round = |x: &[f64]| x.iter().map(|&x| rounded(x, parts)).collect::<Vec<_>>();
        let tokens = |x: &[f64]| {
            let x = if stored { round(x) } else { x.to_vec() };
            let row = |x: &[f64]| if term == Term::Cosine { unit(x) } else { x.to_vec() };
            round(&x.chunks(p.shape.head_dim).flat_map(row).collect::<Vec<_>>())
        };
        let (q, k) = (tokens(&p.q), tokens(p.k.as_ref().unwrap_or(&p.q)));
        Self { p, m, term, stored, parts, q, k, v: round(&p.v), g: round(&p.dout) }
    }

    fn visible(&self, slice: usize, i: usize, j: usize) -> bool {
        let (s, batch) = (&self.p.shape, slice / self.p.shape.heads);
        let keeps = |mask: &Option<Vec<bool>>, at: usize| mask.as_ref().is_none_or(|mask| mask[at]);
        let within = match &self.m.structure {
            Structure::Dense(m) => {
                let apart = (i + s.seq_kv).abs_diff(j + s.seq_q);
                m.window.is_none_or(|window| apart < window || j < m.sinks)
            }
            _ => true,
        };
        within
            && keeps(&self.p.query_mask, batch * s.seq_q + i)
            && keeps(&self.p.key_mask, batch * s.seq_kv + j)
            && (!self.m.causal || j + s.seq_q <= i + s.seq_kv)
            && self.bias(slice, i, j) != f64::NEG_INFINITY
    }

    /// What is added to a pair's logit: of a tensor that is broadcast over axes of one.
    fn bias(&self, slice: usize, i: usize, j: usize) -> f64 {
        let (s, Some(values)) = (&self.p.shape, self.p.parameters.get(&Parameter::Bias)) else { return 0.0 };
        let axes = self.p.mechanism.parameter_shape(Parameter::Bias, s);
        let at = [slice / s.heads, slice % s.heads, i, j];
        let place = axes.iter().zip(at).fold(0, |place, (&n, at)| place * n + if n == 1 { 0 } else { at });
        values[place].into()
    }

    fn parameter(&self, parameter: Parameter) -> f64 {
        let (known, s) = (self.p.mechanism.parameters(), &self.p.shape);
        let of = || self.p.mechanism.parameter_default(parameter, s)[0].into();
        if known.contains(&parameter) { of() } else { 1.0 }
    }

    /// The logarithm of an affinity, or the affinity, and its derivative in the term.
    fn value(&self, t: f64, bias: f64, seen: f64) -> (f64, f64) {
        let Shape { head_dim, heads, .. } = self.p.shape;
        let scale = match &self.m.score {
            Score::CosineExp(m) => m.scale,
            _ => (head_dim as f64).powf(-0.5),
        };
        let (kappa, power) = match &self.m.score {
            Score::Levy(m) | Score::Student(m) => {
                let own = if m.manifold == Manifold::Sphere && heads == 1 { head_dim - 1 } else { head_dim };
                let dim = m.intrinsic_dim.unwrap_or(own as f64);
                (self.parameter(Parameter::Kappa), dim + self.parameter(Parameter::Alpha))
            }
            _ => (1.0, 0.0),
        };
        let z = scale * t + bias;
        let ratio = |a: f64, b: f64| if b == 0.0 { 0.0 } else { a / b };
        match &self.m.score {
            Score::DotRelu(_) => (z.max(0.0), if z > 0.0 { scale } else { 0.0 }),
            Score::DotAbs(_) => (z.abs(), scale * z.signum()),
            Score::DotSquaredRelu(_) => (z.max(0.0).powi(2), 2.0 * scale * z.max(0.0)),
            Score::DotSigmoid(m) => {
                let g = 1.0 / (1.0 + (-(z + m.offset.unwrap_or(-seen.max(1.0).ln()))).exp());
                (g, scale * g * (1.0 - g))
            }
            Score::Levy(_) if self.term == Term::Cosine => {
                let r = t.clamp(-1.0, 1.0).acos();
                (bias - power * (r / kappa).ln_1p(), ratio(power / (kappa + r), r.sin()))
            }
            Score::Levy(_) => {
                let r = t.sqrt();
                (bias - power * (r / kappa).ln_1p(), -ratio(power / (kappa + r), 2.0 * r))
            }
            Score::Student(_) => (bias - 0.5 * power * (t / kappa.powi(2)).ln_1p(), -0.5 * power / (kappa.powi(2) + t)),
            Score::Gaussian(m) => {
                let scale = m.scale.unwrap_or(0.5 * scale);
                (bias - scale * t, -scale)
            }
            Score::DotExp(_) | Score::CosineExp(_) => (z, scale),
            other => panic!("no naive form of {other:?}"),
        }
    }

    fn weights(&self, slice: usize) -> Weights {
        let s = &self.p.shape;
        let len = s.seq_q * s.seq_kv;
        let [mut w, mut slopes, mut factor] = [0.0; 3].map(|x| vec![x; len]);
        for i in 0..s.seq_q {
            let row = i * s.seq_kv..(i + 1) * s.seq_kv;
            let q = &self.q[(slice * s.seq_q + i) * s.head_dim..][..s.head_dim];
            let seen: Vec<_> = (0..s.seq_kv).filter(|&j| self.visible(slice, i, j)).collect();
            for &j in &seen {
                let k = &self.k[(slice * s.seq_kv + j) * s.head_dim..][..s.head_dim];
                let t = if self.term == Term::Square { square(q, k) } else { dot(q, k) };
                let (value, slope) = self.value(t, self.bias(slice, i, j), seen.len() as f64);
                (w[row.start + j], slopes[row.start + j]) = (if self.is_log() { value.exp() } else { value }, slope);
            }
            let of_row = match &self.m.normalisation {
                Normalisation::Row(_) => 1.0 / w[row.clone()].iter().sum::<f64>().max(1e-300),
                Normalisation::None(m) if m.factor == Factor::InvN => 1.0 / seen.len().max(1) as f64,
                _ => 1.0,
            };
            w[row.clone()].iter_mut().for_each(|w| *w *= of_row);
            factor[row].fill(of_row);
        }
        Weights { w, slopes, factor }
    }

    /// Of every row the norm of its slice, causal of the rows so far, and what weights are divided by.
    fn norms(&self, w: &[f64]) -> Vec<[f64; 2]> {
        let Normalisation::Frobenius(m) = &self.m.normalisation else { return vec![[1.0; 2]; self.p.shape.seq_q] };
        let all: f64 = dot(w, w);
        let so_far = w.chunks(self.p.shape.seq_kv).scan(0.0, |sum, row| {
            *sum += dot(row, row);
            Some(if self.m.causal { *sum } else { all })
        });
        so_far.map(|squares: f64| [squares.sqrt(), squares.sqrt() + m.eps]).collect()
    }

    fn is_log(&self) -> bool {
        !matches!(self.m.score, Score::DotRelu(_) | Score::DotAbs(_) | Score::DotSquaredRelu(_) | Score::DotSigmoid(_))
    }

    pub fn solution(&self) -> Solution {
        let (s, tied) = (self.p.shape, self.p.k.is_none());
        let zeros = |len: usize| vec![0.0; len];
        let (mut out, mut dq, mut dk, mut dv) =
            (zeros(s.out_len()), zeros(s.q_len()), zeros(s.k_len()), zeros(s.v_len()));
        for slice in 0..s.slices() {
            let Weights { w, slopes, factor } = self.weights(slice);
            let row = |x: usize, seq: usize, dim: usize| (slice * seq + x) * dim..(slice * seq + x + 1) * dim;
            let norms = self.norms(&w);
            let gamma = self.parameter(Parameter::Gamma);
            let mut dw = zeros(w.len());
            for (i, [_, norm]) in norms.iter().enumerate() {
                let common = gamma / norm;
                for j in 0..s.seq_kv {
                    let at = i * s.seq_kv + j;
                    let rounded = gamma * rounded(w[at] / norm, self.parts);
                    let (oi, vj) = (row(i, s.seq_q, s.value_dim), row(j, s.seq_kv, s.value_dim));
                    add(&mut out[oi.clone()], &self.v[vj.clone()], rounded);
                    add(&mut dv[vj.clone()], &self.g[oi.clone()], rounded);
                    dw[at] = common * dot(&self.g[oi], &self.v[vj]);
                }
            }
            let outputs = slice * s.seq_q * s.value_dim..(slice + 1) * s.seq_q * s.value_dim;
            if self.stored {
                out[outputs.clone()].iter_mut().for_each(|x| *x = rounded(*x, 1));
            }
            let total = |i: usize| match self.stored {
                true => dot(&out[row(i, s.seq_q, s.value_dim)], &self.g[row(i, s.seq_q, s.value_dim)]),
                false => dot(&w[i * s.seq_kv..(i + 1) * s.seq_kv], &dw[i * s.seq_kv..(i + 1) * s.seq_kv]),
            };
            // What the norms of this row and of later ones take out.
            let share = |i: usize| if norms[i][0] > 0.0 { total(i) / (norms[i][0] * norms[i][1]) } else { 0.0 };
            let taken = |i: usize| -> f64 { (if self.m.causal { i } else { 0 }..s.seq_q).map(share).sum() };
            for i in 0..s.seq_q {
                let (delta, taken) = (total(i), taken(i));
                for j in 0..s.seq_kv {
                    let at = i * s.seq_kv + j;
                    let of_value = match &self.m.normalisation {
                        Normalisation::Row(_) => w[at] * (dw[at] - delta),
                        Normalisation::Frobenius(_) => dw[at] - taken * w[at],
                        _ => factor[at] * dw[at],
                    };
                    let (qi, kj) = (row(i, s.seq_q, s.head_dim), row(j, s.seq_kv, s.head_dim));
                    let exact = of_value * slopes[at];
                    let (slope, own) = match self.term {
                        Term::Square => (-2.0 * rounded(exact, self.parts), 2.0 * exact),
                        _ => (rounded(exact, self.parts), 0.0),
                    };
                    add(&mut dq[qi.clone()], &self.k[kj.clone()], slope);
                    add(&mut dq[qi.clone()], &self.q[qi.clone()], own);
                    add(&mut dk[kj.clone()], &self.q[qi], slope);
                    add(&mut dk[kj.clone()], &self.k[kj], own);
                }
            }
        }
        if self.term == Term::Cosine {
            through_lengths(&self.p.q, &mut dq, s.head_dim);
            through_lengths(self.p.k.as_ref().unwrap_or(&self.p.q), &mut dk, s.head_dim);
        }
        let mut solution = Solution::from([("out", out), ("dv", dv)]);
        if tied {
            dq.iter_mut().zip(&dk).for_each(|(dq, dk)| *dq += dk);
        } else {
            solution.insert("dk", dk);
        }
        solution.insert("dq", dq);
        if self.stored {
            solution.values_mut().flatten().for_each(|x| *x = rounded(*x, 1));
        }
        solution
    }
}

/// Gradients of rows from those of the rows at length one.
fn through_lengths(x: &[f64], gradients: &mut [f64], dim: usize) {
    for (x, d) in x.chunks(dim).zip(gradients.chunks_mut(dim)) {
        let (length, u) = (dot(x, x).sqrt(), unit(x));
        let along = dot(d, &u);
        d.iter_mut().zip(u).for_each(|(d, u)| *d = if length > 0.0 { (*d - along * u) / length } else { 0.0 });
    }
}

fn unit(x: &[f64]) -> Vec<f64> {
    let length = dot(x, x).sqrt();
    x.iter().map(|x| if length > 0.0 { x / length } else { 0.0 }).collect()
}

pub fn rounded(x: f64, parts: usize) -> f64 {
    let first = bf16::from_f32(x as f32).to_f64();
    if parts == 1 { first } else { first + rounded(x - first, 1) }
}

pub fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn square(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum()
}

pub fn add(sum: &mut [f64], x: &[f64], factor: f64) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += factor * x);
}
