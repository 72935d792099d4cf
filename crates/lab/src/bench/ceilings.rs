//! What this machine can do at best.

use std::{fmt, time::Instant};

use resolvent_kernels::{inner::exponentials, simd::Level};

use burn::tensor::{Device, Distribution, Tensor};
use serde::{Deserialize, Serialize};

use crate::stats::median;

/// What plain products, exponentials and copies reach here. They are no bounds: a kernel whose operands lie in the caches may pass
/// the rate of large matrices by some per cent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// GFLOP/s of a plain f32 matrix product of two 2048-squared factors, through Burn.
    pub gemm_gflops: f64,
    /// Exponentials per second in f32, in 10^9, of vectors in the first-level cache, on all threads.
    #[serde(default)]
    pub exp_giga: f64,
    /// GB/s, read and written, of a copy between buffers far larger than the caches, on all threads.
    pub copy_gbs: f64,
}

impl Ceilings {
    /// Medians of `rounds` runs.
    pub fn measure(rounds: usize) -> Self {
        const SIDE: usize = 2048;
        let device = Device::flex();
        let factor = || Tensor::<2>::random([SIDE, SIDE], Distribution::Normal(0.0, 1.0), &device);
        let (a, b) = (factor(), factor());
        let from = vec![1.0_f32; 1 << 26];
        let mut to = vec![0.0_f32; 1 << 26];
        let mut times = [const { Vec::new() }; 3];
        // The first round touches the memory.
        for round in 0..=rounds.max(3) {
            let product = seconds(|| drop(std::hint::black_box(a.clone().matmul(b.clone()))));
            let copy = seconds(|| copy(&from, &mut to));
            let exp = seconds(exponentiate);
            if round > 0 {
                times.iter_mut().zip([product, copy, exp]).for_each(|(times, time)| times.push(time));
            }
        }
        let [product, copy, exp] = times.map(|mut times| median(&mut times));
        Self {
            gemm_gflops: 2.0 * (SIDE as f64).powi(3) / product / 1e9,
            exp_giga: (EXPONENTIALS * rayon::current_num_threads()) as f64 / exp / 1e9,
            copy_gbs: 8.0 * from.len() as f64 / copy / 1e9,
        }
    }
}

impl fmt::Display for Ceilings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gemm_gflops, exp_giga, copy_gbs } = self;
        write!(f, "this machine: matrix product {gemm_gflops:.0} GFLOP/s, ")?;
        write!(f, "{exp_giga:.1} * 10^9 exponentials/s, memory copy {copy_gbs:.1} GB/s")
    }
}

/// Exponentials of every thread in one run.
const EXPONENTIALS: usize = 1 << 24;

fn exponentiate() {
    rayon::broadcast(|_| {
        let x: Vec<f32> = (0..2048).map(|n| n as f32 / -128.0).collect();
        let (mut out, level) = (vec![0.0; x.len()], Level::selected().unwrap_or(Level::Portable));
        for _ in 0..EXPONENTIALS / x.len() {
            exponentials(level, std::hint::black_box(&x), &mut out);
            std::hint::black_box(&out);
        }
    });
}

fn copy(from: &[f32], to: &mut [f32]) {
    let part = from.len().div_ceil(rayon::current_num_threads());
    rayon::scope(|scope| {
        for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
            scope.spawn(move |_| to.copy_from_slice(from));
        }
    });
    std::hint::black_box(&*to);
}

/// Seconds that `work` takes.
pub(super) fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}
