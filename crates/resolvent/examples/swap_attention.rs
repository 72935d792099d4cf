//! Replaces Burn's multi-head attention in a model, first by the same softmax with the same weights, then by another mechanism.
//!
//! `cargo run --release --example swap_attention`

use burn::{
    module::Param,
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

    // After: another `use`, and the mechanism as a third argument. The input is built in the same way.
    let config = ours::MultiHeadAttentionConfig::new(D_MODEL, HEADS, Mechanism::preset("softmax")?);
    let after = with_weights_of(before, config.try_init(&device)?);
    let context = after.forward(ours::MhaInput::self_attn(tokens.clone())).context;
    let difference = (context - expected).abs().max().into_scalar::<f32>();
    println!("softmax with the same weights: the contexts differ by {difference:.1e} at most");
    assert!(difference < 1e-5);

    // From here on any mechanism is one word. Those of one shape of projections take each other's weights.
    for name in ["infsa", "fna", "cosine", "linear", "local"] {
        let config = ours::MultiHeadAttentionConfig::new(D_MODEL, HEADS, Mechanism::preset(name)?);
        let attention = config.try_init(&device)?;
        let context = attention.forward(ours::MhaInput::self_attn(tokens.clone()).causal()).context;
        println!("{name}, causal: {:?}, {} parameters", context.dims(), config.parameter_count());
    }
    Ok(())
}

/// The three input projections of Burn's module lie side by side in ours; the output projection is the same.
fn with_weights_of(theirs: theirs::MultiHeadAttention, mut ours: ours::MultiHeadAttention) -> ours::MultiHeadAttention {
    let inputs = [theirs.query, theirs.key, theirs.value];
    let weights = inputs.iter().map(|linear| linear.weight.val()).collect();
    let biases = inputs.iter().filter_map(|linear| linear.bias.as_ref()).map(Param::val).collect();
    ours.projection.weight = Param::from_tensor(Tensor::cat(weights, 1));
    ours.projection.bias = Some(Param::from_tensor(Tensor::cat(biases, 0)));
    ours.output = theirs.output;
    ours
}
