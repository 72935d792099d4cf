//! Whole vision transformers on the CPU: pictures per second and peak memory of every mechanism against the picture's size,
//! and one forward pass at an extreme resolution.
//!
//! `cargo bench -p resolvent --bench models -- sizes [PIXELS,PIXELS]`: width 192, 12 blocks, 3 heads, patch 16; inference and a
//! training pass (forward, backward; no optimiser) of one picture; default 224,512,1024. Runs are interleaved, medians of three.
//!
//! `cargo bench -p resolvent --bench models -- extreme [PRESET] [PIXELS]`: one forward pass of a published model; default
//! infvit-linear-4 and 9216, that is 331,776 tokens.

use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use peak_alloc::PeakAlloc;
use resolvent::{
    Mechanism,
    models::{Pool, Vit, VitConfig},
};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const MIB: f64 = 1024.0 * 1024.0;
const REPEATS: usize = 3;

/// The mechanisms for a grid of `side` patches, with about 64 landmarks where there are any.
fn mechanisms(side: usize) -> Vec<Mechanism> {
    let ratio = side.div_ceil(8);
    let landmarks = format!(r#""landmarks": {{"kind": "pool", "ratio": {ratio}}}, "inverse": "cholesky""#);
    [
        r#"{"mechanism": "softmax"}"#.to_owned(),
        r#"{"mechanism": "infsa"}"#.to_owned(),
        r#"{"mechanism": "linear-infsa"}"#.to_owned(),
        r#"{"mechanism": "fna"}"#.to_owned(),
        r#"{"mechanism": "ssa", "estimator": "centroid"}"#.to_owned(),
        format!(r#"{{"mechanism": "soft-pp", "ridge": 0.01, {landmarks}}}"#),
        format!(r#"{{"mechanism": "laplacian", "weight_scale": "inv-n", {landmarks}}}"#),
        r#"{"mechanism": "uniform"}"#.to_owned(),
    ]
    .iter()
    .map(|json| Mechanism::from_json(json).expect("a configuration"))
    .collect()
}

fn picture(pixels: usize, device: &Device) -> Tensor<4> {
    device.seed(1);
    Tensor::random([1, 3, pixels, pixels], Distribution::Normal(0.0, 1.0), device)
}

/// Seconds and peak extra bytes of `f`.
fn measure<R>(f: impl FnOnce() -> R) -> (f64, usize) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let start = Instant::now();
    std::hint::black_box(f());
    (start.elapsed().as_secs_f64(), MEMORY.peak_usage().saturating_sub(before))
}

fn infer(model: &Vit, picture: &Tensor<4>) -> (f64, usize) {
    measure(|| model.forward(picture.clone()).into_data())
}

fn train(model: &Vit, picture: &Tensor<4>) -> (f64, usize) {
    let picture = picture.clone().autodiff();
    measure(|| {
        let gradients = model.forward(picture.clone()).square().sum().backward();
        model.head.weight.val().grad(&gradients).expect("a gradient").into_data()
    })
}

fn median(runs: &[(f64, usize)]) -> (f64, f64) {
    let mut seconds: Vec<f64> = runs.iter().map(|run| run.0).collect();
    seconds.sort_by(f64::total_cmp);
    (seconds[seconds.len() / 2], runs.iter().map(|run| run.1).max().unwrap_or(0) as f64 / MIB)
}

fn sizes(pixels: &[usize]) {
    println!("width 192, 12 blocks, 3 heads, patch 16; one picture");
    println!(
        "{:>6} {:>7}  {:<13} {:>12} {:>9} {:>12} {:>9}",
        "pixels", "tokens", "mechanism", "inference", "MiB", "training", "MiB"
    );
    for &pixels in pixels {
        let side = pixels / 16;
        let device = Device::flex();
        let models: Vec<_> = mechanisms(side)
            .into_iter()
            .map(|mechanism| {
                let base = VitConfig::new([pixels; 2], 3, 16, 1000, mechanism);
                let config = VitConfig { dim: 192, depth: 12, heads: 3, mlp_dim: 768, pool: Pool::Mean, ..base };
                (config.init(&device), config.init(&device.clone().autodiff()))
            })
            .collect();
        let picture = picture(pixels, &device);
        let mut runs = vec![[const { Vec::new() }; 2]; models.len()];
        for repeat in 0..=REPEATS {
            for (runs, (fixed, learning)) in runs.iter_mut().zip(&models) {
                let measured = [infer(fixed, &picture), train(learning, &picture)];
                // The first pass draws weights and touches memory.
                if repeat > 0 {
                    runs.iter_mut().zip(measured).for_each(|(runs, run)| runs.push(run));
                }
            }
        }
        for (runs, mechanism) in runs.iter().zip(mechanisms(side)) {
            let [(forward, inference), (both, training)] = [median(&runs[0]), median(&runs[1])];
            println!(
                "{pixels:6} {:7}  {:<13} {:9.1} ms {inference:9.0} {:9.1} ms {training:9.0}",
                side * side,
                mechanism.id(),
                forward * 1e3,
                both * 1e3
            );
        }
    }
}

fn extreme(preset: &str, pixels: usize) {
    let config = VitConfig::preset(preset).expect("a preset");
    let config = VitConfig { image: [pixels; 2], ..config };
    let device = Device::flex();
    let before = MEMORY.current_usage();
    let model = config.init(&device);
    // Weights are drawn at their first use.
    model.forward(Tensor::zeros([1, 3, config.patch, config.patch], &device));
    let weights = MEMORY.current_usage() - before;
    let picture = picture(pixels, &device);
    let (seconds, peak) = infer(&model, &picture);
    let whole = MEMORY.current_usage() - before + peak;
    println!(
        "{preset} at {pixels} x {pixels}, {} tokens: {seconds:.1} s, peak {:.2} GiB with weights and positions ({:.2}) and picture",
        config.tokens(),
        whole as f64 / MIB / 1024.0,
        weights as f64 / MIB / 1024.0
    );
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let arg = |n: usize, otherwise: &str| args.get(n).cloned().unwrap_or_else(|| otherwise.to_owned());
    let number = |text: String| text.parse::<usize>().expect("a number of pixels");
    match arg(0, "sizes").as_str() {
        "sizes" => sizes(&arg(1, "224,512,1024").split(',').map(|n| number(n.to_owned())).collect::<Vec<_>>()),
        "extreme" => extreme(&arg(1, "infvit-linear-4"), number(arg(2, "9216"))),
        other => println!("`{other}` is neither `sizes` nor `extreme`"),
    }
}
