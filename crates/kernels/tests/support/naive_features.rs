//! What a naive implementation makes of sums over random features in bf16: operands of products rounded, products summed exactly, sums
//! rounded before they are multiplied again. Exponentials, row sums and what is no product are f64. Operands of two parts keep what
//! rounding leaves of them, rounded.

use resolvent_kernels::mechanism::Structure;

use super::naive::{add, dot, rounded};
use crate::support::problem::{Problem, Solution};

/// One side of a head: of every token its features, what they are multiplied with and whether it counts.
struct Side<'a> {
    x: &'a [f64],
    psi: Vec<f64>,
    kept: Vec<bool>,
}

struct Head<'a> {
    p: &'a Problem,
    directions: Vec<f64>,
    count: usize,
    parts: usize,
}

/// The solution of a problem whose mechanism has features; `stored` where tensors are of bf16.
pub fn solution(p: &Problem, stored: bool, parts: usize) -> Solution {
    let (s, Structure::Features(m)) = (p.shape, p.mechanism.values().structure) else { panic!("no features") };
    let count = m.count(s.head_dim);
    let head = Head { p, directions: m.directions(s.head_dim), count, parts };
    let store = |x: &[f64]| x.iter().map(|&x| if stored { rounded(x, 1) } else { x }).collect::<Vec<_>>();
    let [q, k, v, dout] = [&p.q, p.k.as_ref().expect("keys"), &p.v, &p.dout].map(|x| store(x));
    let mut all = Solution::new();
    for slice in 0..s.slices() {
        let part = |x: &'_ [f64], len: usize| x[slice * len..(slice + 1) * len].to_vec();
        let (q, k) = (part(&q, s.seq_q * s.head_dim), part(&k, s.seq_kv * s.head_dim));
        let (v, dout) = (part(&v, s.seq_kv * s.value_dim), part(&dout, s.seq_q * s.value_dim));
        let batch = slice / s.heads;
        let kept = |mask: &Option<Vec<bool>>, seq: usize| {
            mask.as_ref().map_or(vec![true; seq], |mask| mask[batch * seq..(batch + 1) * seq].to_vec())
        };
        let side = |x, kept| Side { x, psi: head.features(x), kept };
        let (queries, keys) = (side(&q, kept(&p.query_mask, s.seq_q)), side(&k, kept(&p.key_mask, s.seq_kv)));
        for (name, x) in head.solve(&queries, &keys, (&v, &dout), stored) {
            all.entry(name).or_default().extend(x);
        }
    }
    if stored {
        all.values_mut().flatten().for_each(|x| *x = rounded(*x, 1));
    }
    all
}

impl Head<'_> {
    fn root(&self) -> f64 {
        (self.p.shape.head_dim as f64).powf(-0.25)
    }

    fn rounded(&self, x: &[f64]) -> Vec<f64> {
        x.iter().map(|&x| rounded(x, self.parts)).collect()
    }

    fn features(&self, x: &[f64]) -> Vec<f64> {
        let (dim, root) = (self.p.shape.head_dim, self.root());
        let of_row = |x: &[f64]| -> Vec<f64> {
            let (row, energy) = (self.rounded(x), 0.5 * root * root * dot(x, x));
            let logit = |w: &[f64]| root * dot(&self.rounded(w), &row) - energy;
            self.directions.chunks(dim).map(|w| logit(w).exp()).collect()
        };
        x.chunks(dim).flat_map(of_row).collect()
    }

    /// The gradient of a token from that of its features.
    fn pull_back(&self, x: &[f64], psi: &[f64], dpsi: &[f64]) -> Vec<f64> {
        let root = self.root();
        let slopes: Vec<f64> = psi.iter().zip(dpsi).map(|(psi, d)| psi * d).collect();
        let along = root * root * slopes.iter().sum::<f64>();
        let mut dx: Vec<f64> = x.iter().map(|x| -along * x).collect();
        for (w, slope) in self.directions.chunks(x.len()).zip(self.rounded(&slopes)) {
            add(&mut dx, &self.rounded(w), root * slope);
        }
        dx
    }

    /// Keys that query `i` sees come before this one.
    fn limit(&self, i: usize) -> usize {
        let s = &self.p.shape;
        if self.p.mechanism.causal { i + 1 + s.seq_kv - s.seq_q } else { s.seq_kv }
    }

    fn solve(
        &self,
        queries: &Side<'_>,
        keys: &Side<'_>,
        (v, dout): (&[f64], &[f64]),
        stored: bool,
    ) -> Vec<(&'static str, Vec<f64>)> {
        let (s, f) = (&self.p.shape, self.count);
        let (d, e) = (s.head_dim, s.value_dim);
        let row = |i: usize, len: usize| i * len..(i + 1) * len;
        let [mut out, mut dq, mut dk, mut dv] =
            [s.seq_q * e, s.seq_q * d, s.seq_kv * d, s.seq_kv * e].map(|len| vec![0.0; len]);
        // What comes back to a query's sum of values, and to its row sum.
        let mut back = vec![(vec![0.0; e], 0.0); s.seq_q];
        let (mut sums, mut ones, mut seen) = (vec![0.0; f * e], vec![0.0; f], 0);
        for i in 0..s.seq_q {
            for j in std::mem::replace(&mut seen, self.limit(i))..self.limit(i) {
                if keys.kept[j] {
                    let psi = &keys.psi[row(j, f)];
                    add(&mut ones, psi, 1.0);
                    let v = self.rounded(&v[row(j, e)]);
                    self.rounded(psi).iter().zip(sums.chunks_mut(e)).for_each(|(psi, sums)| add(sums, &v, *psi));
                }
            }
            let (psi, total) = (&queries.psi[row(i, f)], dot(&queries.psi[row(i, f)], &ones));
            if !queries.kept[i] || total == 0.0 {
                continue;
            }
            let (sums, out) = (self.rounded(&sums), &mut out[row(i, e)]);
            self.rounded(psi).iter().zip(sums.chunks(e)).for_each(|(psi, sums)| add(out, sums, psi / total));
            if stored {
                out.iter_mut().for_each(|x| *x = rounded(*x, 1));
            }
            let of_values: Vec<f64> = self.rounded(&dout[row(i, e)].iter().map(|x| x / total).collect::<Vec<_>>());
            let of_sum = -dot(&dout[row(i, e)], out) / total;
            let dpsi: Vec<f64> =
                sums.chunks(e).zip(&ones).map(|(sums, one)| dot(sums, &of_values) + one * of_sum).collect();
            dq[row(i, d)].copy_from_slice(&self.pull_back(&queries.x[row(i, d)], psi, &dpsi));
            back[i] = (of_values, of_sum);
        }
        let (mut sums, mut ones, mut first) = (vec![0.0; f * e], vec![0.0; f], s.seq_q);
        for j in (0..s.seq_kv).rev() {
            while first > 0 && self.limit(first - 1) > j {
                first -= 1;
                let (psi, (of_values, of_sum)) = (&queries.psi[row(first, f)], &back[first]);
                add(&mut ones, psi, *of_sum);
                self.rounded(psi).iter().zip(sums.chunks_mut(e)).for_each(|(psi, sums)| add(sums, of_values, *psi));
            }
            if !keys.kept[j] {
                continue;
            }
            let (psi, sums, v) = (&keys.psi[row(j, f)], self.rounded(&sums), self.rounded(&v[row(j, e)]));
            let dpsi: Vec<f64> = sums.chunks(e).zip(&ones).map(|(sums, one)| dot(sums, &v) + one).collect();
            dk[row(j, d)].copy_from_slice(&self.pull_back(&keys.x[row(j, d)], psi, &dpsi));
            let psi = self.rounded(psi);
            psi.iter().zip(sums.chunks(e)).for_each(|(psi, sums)| add(&mut dv[row(j, e)], sums, *psi));
        }
        vec![("out", out), ("dq", dq), ("dk", dk), ("dv", dv)]
    }
}
