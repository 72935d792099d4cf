//! A small call and its exact results, beside which others are put.

use std::collections::BTreeMap;

use half::bf16;
use resolvent_kernels::{
    Inputs, Mask, Mechanism, Parameter, Shape, Strided, inner::HeadGroups, reference, relative_distance,
};

use super::{
    buffers::{Buffers, Results, gather},
    call::Call,
    check::Check,
    contender::{Contender, Local},
    ours::Ours,
};
use crate::Result;

/// A small call and its exact results.
pub(super) struct Comparison {
    /// As the call has its tensors, and heads first, as rivals take them.
    laid: Buffers,
    heads_first: Buffers,
    exact: Exact,
}

/// Results in f64, `[batch, heads, tokens, channels]`.
struct Exact {
    out: Vec<f64>,
    dq: Vec<f64>,
    dk: Option<Vec<f64>>,
    dv: Vec<f64>,
    /// Gradients of the mechanism's own tensors, summed over sequences.
    own: BTreeMap<Parameter, Vec<f64>>,
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// The relative distance of results; none where they are so small that f32 has no digits of them.
fn far(got: &[f32], expected: &[f64]) -> f64 {
    let (got, least) = (wide(got), f64::from(f32::MIN_POSITIVE));
    let vanishes = got.len() == expected.len() && got.iter().chain(expected).all(|x| x.abs() < least);
    if vanishes { 0.0 } else { relative_distance(&got, expected) }
}

impl Comparison {
    /// What a comparison at this size holds: tensors in f32, and in f64 inputs, results, weights with what a reference keeps of them,
    /// and gradients.
    pub fn bytes(call: &Call) -> u64 {
        let shape = call.shape;
        let tensors = 16 * (size_of::<f64>() as u64).saturating_mul(shape.q_len() as u64);
        let weights =
            8 * (size_of::<f64>() as u64).saturating_mul((shape.slices() * shape.seq_q * shape.seq_kv) as u64);
        Buffers::bytes(call).saturating_mul(2).saturating_add(tensors).saturating_add(weights)
    }

    /// The call of `ours`. `rounded` inputs are such that bf16 holds: rounding others would turn the signs of small scores, and with
    /// them whole gradients of a ReLU.
    pub fn new(mechanism: &Mechanism, ours: &mut Ours, rounded: bool) -> Result<Self> {
        let mut laid = Buffers::new(ours.call());
        if rounded {
            let Buffers { q, k, v, dout, .. } = &mut laid;
            for x in [q, k, v, dout].into_iter().flatten() {
                *x = bf16::from_f32(*x).to_f32();
            }
        }
        ours.prepare(&laid)?;
        let inputs = ours.read(&laid)?;
        let exact = Exact::new(mechanism, ours, &inputs)?;
        let mut heads_first = Buffers::new(&ours.call().heads_first());
        let Buffers { q, k, v, dout, .. } = &mut heads_first;
        for (into, x) in [q, k, v, dout].into_iter().zip(inputs) {
            // A pooled output has one row.
            into[..x.len()].copy_from_slice(&x);
        }
        Ok(Self { laid, heads_first, exact })
    }

    /// Our results beside the exact ones.
    pub fn ours(&mut self, label: &str, ours: &mut Ours, tol: (f64, f64)) -> Result<Check> {
        let results = Local::solve(ours, &mut self.laid)?;
        let own = ours.own_gradients();
        let far = |(parameter, x): (Parameter, &[f32])| self.exact.own.get(&parameter).map(|exact| far(x, exact));
        let own = own.into_iter().filter_map(far).fold(0.0, f64::max);
        Ok(self.check(label, &results, Some(own), tol))
    }

    /// A rival's results beside the exact ones.
    pub fn rival(&mut self, label: &str, rival: &mut dyn Contender, tol: (f64, f64)) -> Result<Check> {
        self.heads_first.poison();
        let results = rival.solve(&mut self.heads_first)?;
        Ok(self.check(label, &results, None, tol))
    }

    fn check(&self, label: &str, results: &Results, own: Option<f64>, tol: (f64, f64)) -> Check {
        let Exact { out, dq, dk, dv, .. } = &self.exact;
        let far = |got: &[f32], expected: &[f64]| {
            let got = got.get(..expected.len()).unwrap_or(got);
            far(got, expected)
        };
        let pairs = [(&results.dq, Some(dq)), (&results.dk, dk.as_ref()), (&results.dv, Some(dv))];
        let distances = pairs.into_iter().filter_map(|(got, expected)| Some(far(got.as_ref()?, expected?)));
        let backward = distances.chain(own).reduce(f64::max);
        Check::new(label, self.laid.call.shape.seq_q, far(&results.out, out), backward, tol)
    }
}

impl Exact {
    /// The reference of every sequence by itself, keys and values repeated for all heads that they serve.
    fn new(mechanism: &Mechanism, ours: &Ours, [q, k, v, dout]: &[Vec<f32>; 4]) -> Result<Self> {
        let call = ours.call();
        let (shape, out_seq) = (call.shape, ours.out_seq());
        let groups = HeadGroups::new(shape.batch, shape.heads, call.kv_heads);
        let [q, dout] = [q, dout].map(|x| wide(x));
        let [k, v] = [k, v].map(|x| groups.repeat(&wide(x)));
        let zeros = |rows: usize| vec![0.0; shape.slices() * rows * shape.head_dim];
        let tokens = shape.seq_q;
        let mut all = Self {
            out: zeros(out_seq),
            dq: zeros(tokens),
            dk: (!mechanism.tied).then(|| zeros(tokens)),
            dv: zeros(tokens),
            own: BTreeMap::new(),
        };
        for n in 0..call.sequences.as_ref().map_or(1, |sequences| sequences.len()) {
            let range = call.sequences.as_ref().map_or(0..tokens, |sequences| sequences.range(n));
            // A pooled output, of a batch alone, has rows of its own.
            let out_range = if call.sequences.is_some() { range.clone() } else { 0..out_seq };
            let one = Shape { seq_q: range.len(), seq_kv: range.len(), ..shape };
            let rows = |x: &[f64]| part_of(x, &shape, tokens, range.clone());
            let (q, v, dout) = (rows(&q), rows(&v), part_of(&dout, &shape, out_seq, out_range.clone()));
            let k = (!mechanism.tied).then(|| rows(&k));
            let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: ours.extras() };
            let forward = reference::forward(mechanism, &one, &inputs, &Mask::NONE)?;
            let exact = reference::backward(mechanism, &one, &inputs, &Mask::NONE, &dout)?;
            put(&mut all.out, &forward.out, &shape, out_seq, out_range);
            put(&mut all.dq, &exact.dq, &shape, tokens, range.clone());
            put(&mut all.dv, &exact.dv, &shape, tokens, range.clone());
            if let (Some(all), Some(dk)) = (&mut all.dk, &exact.dk) {
                put(all, dk, &shape, tokens, range);
            }
            for (parameter, x) in exact.parameters {
                let sum = all.own.entry(parameter).or_insert_with(|| vec![0.0; x.len()]);
                sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
            }
        }
        let summed = |x: Vec<f64>| groups.sum(&x, |a, b| a + b);
        Ok(Self { dk: all.dk.map(summed), dv: summed(all.dv), ..all })
    }
}

/// Rows of every head of a tensor of `rows` rows.
fn part_of(x: &[f64], shape: &Shape, rows: usize, range: std::ops::Range<usize>) -> Vec<f64> {
    let channels = shape.head_dim;
    let from = Strided::heads_first(&x[range.start * channels..], [shape.heads, rows, channels]);
    gather(&from, [shape.batch, shape.heads, range.len(), channels])
}

/// Writes what [`part_of`] reads.
fn put(all: &mut [f64], part: &[f64], shape: &Shape, rows: usize, range: std::ops::Range<usize>) {
    let (channels, each) = (shape.head_dim, range.len() * shape.head_dim);
    let heads = all.chunks_exact_mut(rows * channels).zip(part.chunks_exact(each));
    heads.for_each(|(head, part)| head[range.start * channels..][..each].copy_from_slice(part));
}

#[cfg(test)]
mod tests {
    use super::far;

    #[test]
    fn what_f32_has_no_digits_of_is_not_compared() {
        assert_eq!(far(&[0.0, 1e-40], &[1e-60, 0.0]), 0.0);
        assert_eq!(far(&[0.0, 0.0], &[1e-30, 0.0]), 1.0);
        assert!(far(&[f32::NAN], &[0.0]).is_infinite() && far(&[], &[1.0]).is_infinite());
    }
}
