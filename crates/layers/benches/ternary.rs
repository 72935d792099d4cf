//! Time of ternary matrices against f32 layers of the same sizes, warm buffers, runs interleaved; medians are printed.
//!
//! `cargo bench --bench ternary -- [--widths 192,384,768,1024] [--tokens 1,64,1024] [--runs 15] [--threads 1]`

use std::{hint::black_box, time::Instant};

use resolvent_layers::{TernaryMatrix, linear};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let value =
        |name: &str, default| args.iter().position(|arg| arg == name).map_or(default, |at| args[at + 1].as_str());
    let numbers = |name: &str, default| {
        value(name, default).split(',').map(|n| n.parse::<usize>().expect("a number")).collect::<Vec<_>>()
    };
    let [threads, runs] = [("--threads", "1"), ("--runs", "15")].map(|(name, default)| numbers(name, default)[0]);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().expect("threads");
    println!("microseconds, {threads} threads");
    println!("{:>8} {:>8} {:>12} {:>12} {:>8}", "width", "tokens", "f32", "ternary", "ratio");
    for width in numbers("--widths", "192,384,768,1024") {
        for &tokens in &numbers("--tokens", "1,64,256,1024") {
            compare(width, tokens, runs);
        }
    }
}

fn compare(width: usize, tokens: usize, runs: usize) {
    let noise = |len: usize| (0..len).map(|n| ((n as f32 * 0.7).sin() * 43_758.547).fract()).collect::<Vec<f32>>();
    let (x, weight, bias) = (noise(tokens * width), noise(width * width), noise(width));
    let matrix = TernaryMatrix::quantise(&weight, [width, width]).expect("finite weights");
    let mut out = vec![0.0; tokens * width];
    let mut seconds = [vec![], vec![]];
    // Short calls are timed several at once.
    let calls = ((1 << 26) / (tokens * width * width)).max(1);
    for _ in 0..=runs {
        let start = Instant::now();
        (0..calls).for_each(|_| _ = black_box(linear(tokens, &x, &weight, &bias)));
        seconds[0].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        (0..calls).for_each(|_| matrix.forward(&x, Some(&bias), black_box(&mut out)).expect("sizes that fit"));
        seconds[1].push(start.elapsed().as_secs_f64());
    }
    let [real, ternary] = seconds.map(|mut seconds| {
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2] / calls as f64 * 1e6
    });
    println!("{width:>8} {tokens:>8} {real:>12.1} {ternary:>12.1} {:>8.2}", real / ternary);
}
