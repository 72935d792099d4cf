//! Our softmax against Burn's own attention on the same backend: time and peak memory, forward and training.
//!
//! `cargo bench --bench burn_attention -- [TOKENS] [REPEATS]`; default 4096 and 5, at `[1, 8, TOKENS, 64]`.
//! Runs are interleaved, medians reported, results compared before anything is timed.

use std::time::Instant;

use burn::tensor::{
    Device, Distribution, Tensor,
    module::{attention, attention_fallback},
    ops::AttentionModuleOptions,
};
use peak_alloc::PeakAlloc;
use resolvent::{Inputs, Mask, Mechanism, Strategy, attend};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

type Attention = fn(Tensor<4>, Tensor<4>, Tensor<4>) -> Tensor<4>;

fn ours(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    let softmax = Mechanism::preset("softmax").expect("a known id");
    attend(&Inputs::new(q, k, v), &softmax, &Mask::none(), Strategy::Fused).expect("tensors that fit").out
}

fn burns(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    attention(q, k, v, None, None, AttentionModuleOptions::default())
}

fn burns_composed(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    attention_fallback(q, k, v, None, None, AttentionModuleOptions::default())
}

/// Seconds and peak extra bytes of one forward pass, and its result.
fn forward(f: Attention, [q, k, v, _]: &[Tensor<4>; 4]) -> (f64, usize, Tensor<4>) {
    let (q, k, v) = (q.clone(), k.clone(), v.clone());
    measure(|| f(q, k, v))
}

/// Seconds and peak extra bytes of one forward and backward pass, and the gradient of `q`.
fn training(f: Attention, [q, k, v, dout]: &[Tensor<4>; 4]) -> (f64, usize, Tensor<4>) {
    let [q, k, v] = [q, k, v].map(|x| x.clone().autodiff().require_grad());
    let dout = dout.clone().autodiff();
    measure(|| {
        let gradients = (f(q.clone(), k.clone(), v.clone()) * dout).sum().backward();
        let [dq, _, _] = [q, k, v].map(|x| x.grad(&gradients).expect("a gradient"));
        dq
    })
}

fn measure(f: impl FnOnce() -> Tensor<4>) -> (f64, usize, Tensor<4>) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let start = Instant::now();
    let result = f();
    (start.elapsed().as_secs_f64(), MEMORY.peak_usage().saturating_sub(before), result)
}

fn difference(a: Tensor<4>, b: Tensor<4>) -> f32 {
    let scale = b.clone().abs().max().into_scalar::<f32>();
    (a - b).abs().max().into_scalar::<f32>() / scale
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|x| x.parse().ok()).collect();
    let (tokens, repeats) = (numbers.first().copied().unwrap_or(4096), numbers.get(1).copied().unwrap_or(5));
    let device = Device::flex();
    device.seed(1);
    let inputs: [Tensor<4>; 4] =
        std::array::from_fn(|_| Tensor::random([1, 8, tokens, 64], Distribution::Normal(0.0, 1.0), &device));
    println!("softmax at [1, 8, {tokens}, 64], f32, {} threads, median of {repeats}", rayon_threads());
    type Pass = fn(Attention, &[Tensor<4>; 4]) -> (f64, usize, Tensor<4>);
    for (name, pass) in [("forward", forward as Pass), ("forward + backward", training as Pass)] {
        let rivals: [(&str, Attention); 3] = [("resolvent", ours), ("burn", burns), ("burn, composed", burns_composed)];
        let reference = pass(ours, &inputs).2;
        for (rival, f) in &rivals[1..] {
            let error = difference(pass(*f, &inputs).2, reference.clone());
            assert!(error < 1e-4, "{name}: {rival} differs by {error:.1e}");
        }
        let mut runs = [const { Vec::new() }; 3];
        let mut peaks = [0; 3];
        for _ in 0..repeats {
            for (i, (_, f)) in rivals.iter().enumerate() {
                let (seconds, peak, _) = pass(*f, &inputs);
                runs[i].push(seconds);
                peaks[i] = peak;
            }
        }
        let medians = runs.map(median);
        for (i, (rival, _)) in rivals.iter().enumerate() {
            let (time, memory) = (medians[i] / medians[0], peaks[i] as f64 / peaks[0] as f64);
            let mib = peaks[i] as f64 / f64::from(1 << 20);
            println!("{name:18} {rival:15} {:8.3} s ({time:5.2}x)  peak {mib:8.1} MiB ({memory:5.2}x)", medians[i]);
        }
    }
}

fn rayon_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
