//! Replaces Burn's multi-head attention in a model, first by the same softmax with the same weights, then by another mechanism.
//!
//! `cargo run --release --example swap_attention`

use burn::{
    nn::attention as theirs,
    tensor::{Device, Distribution, Tensor},
};
use resolvent::{Mechanism, attention as ours};

const D_MODEL: usize = 64;
const HEADS: usize = 4;

fn main() -> Result<(), resolvent::Error> {
    let device = Device::flex();
    let tokens = Tensor::<3>::random([2, 100, D_MODEL], Distribution::Default, &device);

    // Before: Burn's own module.
    let before = theirs::MultiHeadAttentionConfig::new(D_MODEL, HEADS).with_dropout(0.0).init(&device);
    let expected = before.forward(theirs::MhaInput::self_attn(tokens.clone())).context;

    // After: the same weights in a module that takes any mechanism. The input is built in the same way.
    let after = ours::MultiHeadAttention::from_burn(before)?;
    let context = after.forward(ours::MhaInput::self_attn(tokens.clone())).context;
    let difference = (context - expected).abs().max().into_scalar::<f32>();
    println!("softmax with the same weights: the contexts differ by {difference:.1e} at most");
    assert!(difference < 1e-5);

    // From here on any mechanism is one word.
    for name in ["infsa", "fna", "cosine", "linear", "local"] {
        let config = ours::MultiHeadAttentionConfig::new(D_MODEL, HEADS, Mechanism::preset(name)?);
        let attention = config.try_init(&device)?;
        let context = attention.forward(ours::MhaInput::self_attn(tokens.clone()).causal()).context;
        println!("{name}, causal: {:?}, {} parameters", context.dims(), config.parameter_count());
    }
    Ok(())
}
