//! Layers with products of bf16 in turns with those of f32: `MIMALLOC_PURGE_DELAY=-1 cargo bench --bench bf16`, two threads, medians of seven
//! runs, GFLOP/s of the products. On a busy machine only the ratios mean something.

use std::time::Instant;

use resolvent_layers::{MlpWeights, bf16::Bf16Layers, linear, linear_backward, mlp, mlp_backward};

/// As the program's own; freed pages are kept where the environment has `MIMALLOC_PURGE_DELAY=-1`, as the program sets it.
#[global_allocator]
static MEMORY: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RUNS: usize = 7;

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.7311).sin()).collect()
}

/// Median seconds of both, in turns.
fn times(mut both: [Box<dyn FnMut() + '_>; 2]) -> [f64; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..=RUNS {
        for (run, times) in both.iter_mut().zip(&mut times) {
            let start = Instant::now();
            run();
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.map(|mut times| {
        times.remove(0);
        times.sort_by(f64::total_cmp);
        times[RUNS / 2]
    })
}

fn show(what: &str, sizes: &[usize], flops: usize, both: [Box<dyn FnMut() + '_>; 2]) {
    let [full, half] = times(both);
    let rate = |seconds: f64| flops as f64 / seconds / 1e9;
    println!("{what:<16} {sizes:?}: f32 {:.0}, bf16 {:.0} GFLOP/s, {:.2}x", rate(full), rate(half), full / half);
}

fn main() {
    rayon::ThreadPoolBuilder::new().num_threads(2).build_global().expect("no pool yet");
    let layers = Bf16Layers::selected().expect("a level");
    println!("{}", layers.unit().name());
    for (rows, inputs, outputs) in
        [(6304, 192, 576), (6304, 192, 192), (6304, 384, 1536), (1024, 768, 768), (8192, 768, 3072), (8192, 3072, 768)]
    {
        let (x, weight, bias) = (&numbers(rows * inputs), &numbers(inputs * outputs), &numbers(outputs));
        let (dout, flops) = (&numbers(rows * outputs), 2 * rows * inputs * outputs);
        show(
            "linear",
            &[rows, inputs, outputs],
            flops,
            [
                Box::new(move || drop(linear(rows, x, weight, bias))),
                Box::new(move || drop(layers.linear(rows, x, weight, bias))),
            ],
        );
        show(
            "linear_backward",
            &[rows, inputs, outputs],
            2 * flops,
            [
                Box::new(move || drop(linear_backward(rows, x, weight, dout, outputs, [true; 3]))),
                Box::new(move || drop(layers.linear_backward(rows, x, weight, dout, outputs, [true; 3]))),
            ],
        );
    }
    for (rows, width) in [(6304, 192), (6304, 384), (4096, 768)] {
        let (x, hidden, weight, bias) =
            (&numbers(rows * width), &numbers(4 * rows * width), &numbers(4 * width * width), &numbers(4 * width));
        let weights = &MlpWeights { weight_in: weight, bias_in: bias, weight_out: weight, bias_out: &bias[..width] };
        let flops = 16 * rows * width * width;
        show(
            "mlp",
            &[rows, width],
            flops,
            [
                Box::new(move || drop(mlp(rows, x, weights, true))),
                Box::new(move || drop(layers.mlp(rows, x, weights, true))),
            ],
        );
        show(
            "mlp_backward",
            &[rows, width],
            2 * flops,
            [
                Box::new(move || drop(mlp_backward(rows, x, hidden, weights, x))),
                Box::new(move || drop(layers.mlp_backward(rows, x, hidden, weights, x))),
            ],
        );
    }
}
