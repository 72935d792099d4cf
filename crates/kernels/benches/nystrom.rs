//! What the Nystrom structure is made of, and how its time grows: `cargo bench --bench nystrom`.
//!
//! - the kernel between tokens and landmarks beside a matrix product of the same shape and a plain loop;
//! - the inverse of a landmark matrix;
//! - forward time against fused softmax, where the two cross;
//! - forward time and memory from 16,384 to 262,144 tokens.
//!
//! Runs are interleaved; medians are printed. `-- kernel inverse crossover growth` chooses; default all.

use std::{hint::black_box, time::Instant};

use resolvent_kernels::{
    Extras, Inputs, Mask, Mechanism, Operator, Result, Scratch, Shape, Strategy,
    inner::{Inverter, Pair, pairs},
    mechanism::Inverse,
    simd::Level,
};

const DIM: usize = 64;

/// A part's name, and what prints it.
type Part = (&'static str, fn() -> Result<()>);

fn main() -> Result<()> {
    let chosen: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let parts: [Part; 4] = [("kernel", kernel), ("inverse", inverse), ("crossover", crossover), ("growth", growth)];
    for (name, part) in parts {
        if chosen.is_empty() || chosen.iter().any(|c| c == name) {
            println!("\n{name}");
            part()?;
        }
    }
    Ok(())
}

/// Pairs of a token's and a landmark's channel per second, on one thread.
fn kernel() -> Result<()> {
    let level = Level::selected()?;
    println!(
        "{:>20} {:>14} {:>14} {:>14} {:>14}  G pairs of channels/s",
        "shape", "product", "Gaussian", "Laplacian", "plain loop"
    );
    for (tokens, marks, dim) in [(4096, 64, 64), (3136, 48, 32)] {
        let (x, landmarks) = (noise(1, tokens * dim), noise(2, marks * dim));
        let rows = &landmarks;
        let mut transposed = vec![0.0; marks * dim];
        for (at, x) in rows.iter().enumerate() {
            transposed[at % dim * marks + at / dim] = *x;
        }
        let mut out = vec![0.0; tokens * marks];
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..15 {
            for (pair, times) in [Pair::Product, Pair::Gaussian, Pair::Laplacian].into_iter().zip(&mut times) {
                times.push(seconds(|| pairs(level, pair, &x, &transposed, dim, &mut out)));
                black_box(&out);
            }
            times[3].push(seconds(|| plain(&x, rows, dim, &mut out)));
            black_box(&out);
        }
        let [product, gaussian, laplacian, plain] =
            times.map(|times| (tokens * marks * dim) as f64 / median(times) / 1e9);
        println!(
            "{:>20} {product:14.1} {gaussian:14.1} {laplacian:14.1} {plain:14.2}",
            format!("{tokens} x {marks} x {dim}")
        );
        println!(
            "  Laplacian: {:.0} % of the product, {:.0} x the loop",
            100.0 * laplacian / product,
            laplacian / plain
        );
    }
    Ok(())
}

/// The Laplacian kernel as one writes it first.
fn plain(x: &[f32], marks: &[f32], dim: usize, out: &mut [f32]) {
    let count = marks.len() / dim;
    for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(count)) {
        for (mark, out) in marks.chunks_exact(dim).zip(out) {
            *out = (-x.iter().zip(mark).map(|(x, y)| (x - y).abs()).sum::<f32>()).exp();
        }
    }
}

/// Microseconds of one inverse on one thread.
fn inverse() -> Result<()> {
    let level = Level::selected()?;
    for n in [49, 64, 256, 384, 512, 1024] {
        let marks = noise(3, n * 32);
        let mark = |i: usize| &marks[i * 32..][..32];
        let distance = |i, j| mark(i).iter().zip(mark(j)).map(|(x, y)| (x - y).abs()).sum::<f32>();
        let a: Vec<f32> = (0..n * n).map(|at| (-distance(at / n, at % n) / 4.0).exp()).collect();
        let mut methods =
            [Inverse::Cholesky, Inverse::NewtonSchulz].map(|method| Inverter::new(method, 20, 0.01, &a, n));
        let mut times = [const { Vec::new() }; 2];
        for _ in 0..(1 << 23 >> (n.ilog2() * 2)).clamp(7, 101) {
            for (method, times) in methods.iter_mut().zip(&mut times) {
                let start = Instant::now();
                method.run(level)?;
                times.push(start.elapsed().as_secs_f64());
            }
        }
        let [cholesky, newton] = times.map(|times| median(times) * 1e6);
        println!("{n:4} landmarks: Cholesky {cholesky:8.1} us, at most 20 Newton-Schulz steps {newton:8.1} us");
    }
    Ok(())
}

/// An operator with warm buffers.
struct Case {
    op: Operator,
    tensors: [Vec<f32>; 3],
    out: Vec<f32>,
    stats: Vec<f32>,
    scratch: Scratch,
}

impl Case {
    fn new(json: &str, shape: Shape) -> Result<Self> {
        let op = Operator::new(&Mechanism::from_json(json)?, shape, false, Strategy::Fused)?;
        let tensors = [noise(1, shape.q_len()), noise(2, shape.k_len()), noise(3, shape.v_len())];
        let (out, stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
        Ok(Self { op, tensors, out, stats, scratch: Scratch::default() })
    }

    fn run(&mut self) -> Result<f64> {
        let [q, k, v] = &self.tensors;
        let k = (!self.op.mechanism().tied).then_some(&k[..]);
        let inputs = Inputs { q, k, v, extras: Extras::default() };
        let start = Instant::now();
        self.op.forward(&inputs, &Mask::NONE, &mut self.out, &mut self.stats, &mut self.scratch)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// A mechanism with `marks` landmarks among `tokens`.
fn of_landmarks(id: &str, tokens: usize, marks: usize) -> String {
    let ratio = tokens / marks;
    format!(r#"{{"mechanism": "{id}", "landmarks": {{"kind": "pool", "ratio": {ratio}}}, "inverse": "cholesky"}}"#)
}

const IDS: [&str; 3] = ["soft", "soft-pp", "laplacian"];

fn crossover() -> Result<()> {
    println!("[1, 8, N, {DIM}], 64 landmarks, Cholesky, milliseconds; softmax over each in brackets");
    for tokens in [128, 256, 512, 1024, 4096] {
        let shape = Shape::square(1, 8, tokens, DIM);
        let mut cases = vec![Case::new(r#"{"mechanism": "softmax"}"#, shape)?];
        for id in IDS {
            cases.push(Case::new(&of_landmarks(id, tokens, 64), shape)?);
        }
        let times = rounds(&mut cases, 15)?;
        let others = IDS.iter().zip(&times[1..]).map(|(id, t)| format!("{id} {:.2} ({:.2}x)", t * 1e3, times[0] / t));
        println!("{tokens:6}: softmax {:.2}, {}", times[0] * 1e3, others.collect::<Vec<_>>().join(", "));
    }
    Ok(())
}

fn growth() -> Result<()> {
    println!("[1, 8, N, {DIM}], 64 landmarks, Cholesky, seconds; MiB besides the four tensors");
    for id in IDS {
        let mut last: Option<f64> = None;
        for tokens in [16_384, 65_536, 262_144] {
            let mut cases = [Case::new(&of_landmarks(id, tokens, 64), Shape::square(1, 8, tokens, DIM))?];
            let time = rounds(&mut cases, 3)?[0];
            let plan = cases[0].op.plan();
            let mib = 4.0 * (plan.stats + plan.scratch_forward) as f64 / f64::from(1 << 20);
            let ratio = last.map_or(String::new(), |last| format!(", {:.2} x the time of a quarter", time / last));
            println!("{id:>10} {tokens:7}: {time:.4} s, {mib:.2} MiB{ratio}");
            last = Some(time);
        }
    }
    Ok(())
}

/// Median seconds of every case.
fn rounds(cases: &mut [Case], rounds: usize) -> Result<Vec<f64>> {
    let mut times = vec![Vec::new(); cases.len()];
    for round in 0..=rounds {
        for (case, times) in cases.iter_mut().zip(&mut times) {
            let time = case.run()?;
            if round > 0 {
                times.push(time);
            }
        }
    }
    Ok(times.into_iter().map(median).collect())
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Deterministic numbers in [-1, 1).
fn noise(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}
