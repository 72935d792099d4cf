//! Whole models on the CPU: time and peak memory of every mechanism against the picture's size, and one forward pass at an
//! extreme resolution.
//!
//! `cargo bench --bench models -- sizes [PIXELS,PIXELS]`: a vision transformer of width 192, 12 blocks, 3 heads, patch
//! 16; inference and a training pass (forward, backward; no optimiser) of one picture; default 224,512,1024. Runs are interleaved,
//! medians of three. Where a training pass takes longer than 20 seconds, it and the inference beside it are timed once, and what
//! would take longer than ten minutes, going by the size before, is left out.
//!
//! `cargo bench --bench models -- pyramids [PIXELS,PIXELS]`: the same for the pyramids `soft-tiny` and `laplacian-tiny`,
//! each with its own mechanism, with softmax and with linear InfSA in its place.
//!
//! `cargo bench --bench models -- extreme [PRESET] [PIXELS]`: one forward pass of a published model; default
//! infvit-linear-4 and 9216, that is 331,776 tokens.

use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use peak_alloc::PeakAlloc;
use resolvent::{
    Mechanism,
    models::{Pool, Pyramid, PyramidConfig, Vit, VitConfig},
};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const MIB: f64 = 1024.0 * 1024.0;
const REPEATS: usize = 3;
/// Seconds of a training pass: a longer one is timed once.
const ONCE: f64 = 20.0;
/// Seconds of a training pass: a longer one is left out.
const LIMIT: f64 = 600.0;

enum Model {
    Vit(Box<Vit>),
    Pyramid(Box<Pyramid>),
}

impl Model {
    fn forward(&self, picture: Tensor<4>) -> Tensor<2> {
        match self {
            Self::Vit(model) => model.forward(picture),
            Self::Pyramid(model) => model.forward(picture),
        }
    }
}

/// A model by name, made for a size and a device.
type Maker = (String, Box<dyn Fn(usize, &Device) -> Model>);

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

fn infer(model: &Model, picture: &Tensor<4>) -> (f64, usize) {
    measure(|| model.forward(picture.clone()).into_data())
}

fn train(model: &Model, picture: &Tensor<4>) -> (f64, usize) {
    let picture = picture.clone().autodiff();
    measure(|| model.forward(picture.clone()).square().sum().backward())
}

fn median(runs: &[(f64, usize)]) -> (f64, f64) {
    let mut seconds: Vec<f64> = runs.iter().map(|run| run.0).collect();
    seconds.sort_by(f64::total_cmp);
    (seconds[seconds.len() / 2], runs.iter().map(|run| run.1).max().unwrap_or(0) as f64 / MIB)
}

fn transformers() -> Vec<Maker> {
    let make = |mechanism: usize| {
        move |pixels: usize, device: &Device| {
            let mechanism = mechanisms(pixels / 16).swap_remove(mechanism);
            let base = VitConfig::new([pixels; 2], 3, 16, 1000, mechanism);
            let config = VitConfig { dim: 192, depth: 12, heads: 3, mlp_dim: 768, pool: Pool::Mean, ..base };
            Model::Vit(Box::new(config.init(device)))
        }
    };
    let maker = |(i, mechanism): (usize, Mechanism)| (mechanism.id().to_owned(), Box::new(make(i)) as Box<_>);
    mechanisms(14).into_iter().enumerate().map(maker).collect()
}

fn pyramids() -> Vec<Maker> {
    let presets = ["soft-tiny", "laplacian-tiny"].into_iter();
    let pairs = presets.flat_map(|preset| [None, Some("softmax"), Some("linear-infsa")].map(|other| (preset, other)));
    pairs
        .map(|(preset, other)| {
            let make = move |pixels: usize, device: &Device| {
                let config = PyramidConfig::preset(preset).expect("a preset").for_pictures([pixels; 2], 3, 1000);
                let mechanism = other.map_or(config.mechanism.clone(), |id| Mechanism::preset(id).expect("an id"));
                Model::Pyramid(Box::new(PyramidConfig { mechanism, ..config }.init(device)))
            };
            let name = other.map_or(preset.to_owned(), |other| format!("{preset}, {other}"));
            (name, Box::new(make) as Box<_>)
        })
        .collect()
}

fn sizes(makers: &[Maker], pixels: &[usize]) {
    println!(
        "one picture\n{:>6}  {:<28} {:>12} {:>9} {:>12} {:>9}",
        "pixels", "model", "inference", "MiB", "training", "MiB"
    );
    // Seconds of the training pass at the size before; work grows with the square of the tokens at most.
    let mut before: Vec<Option<(usize, f64)>> = vec![None; makers.len()];
    for &pixels in pixels {
        let device = Device::flex();
        let takes = |(was, seconds): (usize, f64)| seconds * (pixels as f64 / was as f64).powi(4);
        let (run, left): (Vec<_>, Vec<_>) =
            (0..makers.len()).partition(|&i| before[i].map(takes).is_none_or(|seconds| seconds <= LIMIT));
        for i in left {
            println!("{pixels:6}  {:<28} left out: more than {LIMIT} s, going by the size before", makers[i].0);
        }
        let models: Vec<_> = run
            .iter()
            .map(|&i| (makers[i].1(pixels, &device), makers[i].1(pixels, &device.clone().autodiff())))
            .collect();
        let picture = picture(pixels, &device);
        // The first pass draws weights and touches memory: it counts only where it is the one there is.
        let mut runs = vec![[const { Vec::new() }; 2]; models.len()];
        for repeat in 0..=REPEATS {
            for (runs, (fixed, learning)) in runs.iter_mut().zip(&models) {
                if runs[1].first().is_some_and(|&(seconds, _)| seconds > ONCE) {
                    continue;
                }
                if repeat == 1 {
                    runs.iter_mut().for_each(Vec::clear);
                }
                let measured = [infer(fixed, &picture), train(learning, &picture)];
                runs.iter_mut().zip(measured).for_each(|(runs, run)| runs.push(run));
            }
        }
        for (runs, &i) in runs.iter().zip(&run) {
            let [(forward, inference), (both, training)] = [median(&runs[0]), median(&runs[1])];
            before[i] = Some((pixels, both));
            let (name, forward, both) = (&makers[i].0, forward * 1e3, both * 1e3);
            let once = if runs[1].len() == 1 { "  one run" } else { "" };
            println!("{pixels:6}  {name:<28} {forward:9.1} ms {inference:9.0} {both:9.1} ms {training:9.0}{once}");
        }
    }
}

fn extreme(preset: &str, pixels: usize) {
    let config = VitConfig::preset(preset).expect("a preset");
    let config = VitConfig { image: [pixels; 2], ..config };
    let device = Device::flex();
    let before = MEMORY.current_usage();
    let model = Model::Vit(Box::new(config.init(&device)));
    // Weights are drawn at their first use.
    model.forward(Tensor::zeros([1, 3, config.patch, config.patch], &device));
    let weights = MEMORY.current_usage() - before;
    let picture = picture(pixels, &device);
    let held = MEMORY.current_usage() - before;
    let (seconds, peak) = infer(&model, &picture);
    let whole = held + peak;
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
    let list = || arg(1, "224,512,1024").split(',').map(|n| number(n.to_owned())).collect::<Vec<_>>();
    match arg(0, "sizes").as_str() {
        "sizes" => sizes(&transformers(), &list()),
        "pyramids" => sizes(&pyramids(), &list()),
        "extreme" => extreme(&arg(1, "infvit-linear-4"), number(arg(2, "9216"))),
        other => println!("`{other}` is none of `sizes`, `pyramids` and `extreme`"),
    }
}
