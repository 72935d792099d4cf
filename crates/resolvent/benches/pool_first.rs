//! `linear-infsa` modules: tokens pooled before they are projected against values projected per token.
//!
//! `cargo bench --bench pool_first -- [REPEATS]`; default 15. Runs are interleaved, medians reported, results
//! compared before anything is timed.

use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use resolvent::{
    Mechanism,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
};

/// Batch, tokens, channels, heads: a small picture model, a ViT-B at 224 and at 1024 squared.
const SIZES: [[usize; 4]; 3] = [[128, 17, 64, 4], [4, 197, 768, 12], [1, 4097, 768, 12]];

fn forward(module: &MultiHeadAttention, x: &Tensor<3>) -> Tensor<3> {
    module.forward(MhaInput::self_attn(x.clone())).context
}

/// The gradient of the tokens.
fn training(module: &MultiHeadAttention, x: &Tensor<3>) -> Tensor<3> {
    let x = x.clone().autodiff().require_grad();
    let gradients = module.forward(MhaInput::self_attn(x.clone())).context.square().sum().backward();
    x.grad(&gradients).expect("a gradient")
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn main() {
    let repeats = std::env::args().skip(1).find_map(|x| x.parse().ok()).unwrap_or(15);
    let mechanism = Mechanism::preset("linear-infsa").expect("a known id");
    for [batch, tokens, d_model, heads] in SIZES {
        type Pass = fn(&MultiHeadAttention, &Tensor<3>) -> Tensor<3>;
        let device = Device::flex();
        device.seed(1);
        let x = Tensor::<3>::random([batch, tokens, d_model], Distribution::Normal(0.0, 1.0), &device);
        for (name, device, pass) in
            [("forward", device.clone(), forward as Pass), ("forward + backward", device.autodiff(), training)]
        {
            let first = MultiHeadAttentionConfig::new(d_model, heads, mechanism.clone()).init(&device);
            let modules = [MultiHeadAttention { pool_first: false, ..first.clone() }, first];
            let [a, b] = modules.each_ref().map(|module| pass(module, &x));
            let error = (a.clone() - b).abs().max().into_scalar::<f32>() / a.abs().max().into_scalar::<f32>();
            assert!(error < 1e-4, "{name}: the orders differ by {error:.1e}");
            let mut seconds = [const { Vec::new() }; 2];
            for _ in 0..repeats {
                for (seconds, module) in seconds.iter_mut().zip(&modules) {
                    let start = Instant::now();
                    std::hint::black_box(pass(module, &x));
                    seconds.push(start.elapsed().as_secs_f64());
                }
            }
            let [each, pooled] = seconds.map(median).map(|s| s * 1e3);
            let ratio = each / pooled;
            println!(
                "[{batch}, {tokens}, {d_model}] x {heads} heads, {name:18}: each token {each:8.2} ms, pooled {pooled:8.2} ms ({ratio:.2}x)"
            );
        }
    }
}
