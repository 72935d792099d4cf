//! Attention over a long sequence, forward and backward, in memory that grows with the number of tokens and not with its square.
//!
//! `cargo run --release --example long_sequence -- [TOKENS]`

use std::{error::Error, process::Command, time::Instant};

use burn::tensor::{Device, Distribution, Tensor};
use peak_alloc::PeakAlloc;
use resolvent::{Inputs, Mask, Mechanism, Strategy, attend};

/// Counts every byte that the program allocates.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const HEADS: usize = 2;
const HEAD_DIM: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [tokens, mechanism] = &args[..] {
        let (peak, seconds) = step(&Mechanism::preset(mechanism)?, tokens.parse()?)?;
        println!("{peak} {seconds}");
        return Ok(());
    }
    let tokens = args.first().map_or(Ok(16_384), |tokens| tokens.parse())?;
    let tensor = mib(HEADS * tokens * HEAD_DIM * size_of::<f32>());
    // Softmax composed of tensor operations keeps the weights, and in the backward pass makes their gradients beside them.
    let square = mib(2 * HEADS * tokens * tokens * size_of::<f32>());
    println!("{HEADS} heads, {tokens} tokens: q, k, v, the output and each gradient take {tensor:.0} MiB");
    println!("two matrices of {tokens} x {tokens} weights per head would take {square:.0} MiB\n");
    println!(
        "{:>10} {:>24} {:>12} {:>16} {:>10}",
        "mechanism", "peak of half as many", "peak, MiB", "of the square", "seconds"
    );
    for name in ["softmax", "fna", "linear"] {
        let ([half, _], [peak, seconds]) = (apart(tokens / 2, name)?, apart(tokens, name)?);
        println!("{name:>10} {half:>24.0} {peak:>12.0} {:>15.1}% {seconds:>10.2}", 100.0 * peak / square);
        // Twice the tokens take twice the memory, not four times as much.
        assert!(peak < 2.5 * half, "{name} takes memory beyond O(N)");
    }
    Ok(())
}

/// Peak memory and seconds of one step in a process of its own: working memory is kept for the next call, and would count there.
fn apart(tokens: usize, mechanism: &str) -> Result<[f64; 2], Box<dyn Error>> {
    let output = Command::new(std::env::current_exe()?).arg(tokens.to_string()).arg(mechanism).output()?;
    let numbers: Vec<f64> = String::from_utf8(output.stdout)?.split_whitespace().flat_map(str::parse).collect();
    numbers.try_into().map_err(|_| String::from_utf8_lossy(&output.stderr).into())
}

/// Peak memory in MiB, and seconds, of one forward and backward pass.
fn step(mechanism: &Mechanism, tokens: usize) -> Result<(f64, f64), resolvent::Error> {
    let device = Device::flex().autodiff();
    let start = Instant::now();
    let random = || Tensor::<4>::random([1, HEADS, tokens, HEAD_DIM], Distribution::Default, &device).require_grad();
    let (q, k, v) = (random(), random(), random());
    let inputs = Inputs::new(q.clone(), k.clone(), v.clone());
    let output = attend(&inputs, mechanism, &Mask::causal(), Strategy::Auto)?;
    let gradients = output.out.sum().backward();
    for x in [&q, &k, &v] {
        assert!(x.grad(&gradients).is_some());
    }
    Ok((mib(HEAP.peak_usage()), start.elapsed().as_secs_f64()))
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / (1 << 20) as f64
}
