//! A language model that writes token by token: each token reads what is kept of the past instead of computing it again.
//!
//! `cargo run --release --example cached_decoding`

use std::time::Instant;

use burn::tensor::{Device, Int, Tensor};
use resolvent::{Mechanism, models::LanguageConfig};

const VOCABULARY: usize = 256;
const PROMPT: usize = 64;
const WRITTEN: usize = 192;

fn main() -> Result<(), resolvent::Error> {
    let device = Device::flex();
    // Untrained: what it writes means nothing, but both ways must write the same. Blocks may have mechanisms in turn.
    for layers in [vec!["softmax"], vec!["infsa"], vec!["linear", "softmax"]] {
        let mechanisms = layers.iter().map(|name| Mechanism::preset(name)).collect::<Result<_, _>>()?;
        let model = LanguageConfig::new(VOCABULARY, PROMPT + WRITTEN, mechanisms).try_init(&device)?;
        let prompt = Tensor::<1, Int>::arange(0..PROMPT as i64, &device).unsqueeze::<2>();

        // With a state: the prompt is read at once, then one token at a time.
        let start = Instant::now();
        let mut state = model.begin();
        let mut next = likeliest(model.next(prompt.clone(), &mut state)?);
        let mut cached = vec![prompt.clone()];
        while state.len() < PROMPT + WRITTEN {
            cached.push(next.clone());
            next = likeliest(model.next(next, &mut state)?);
        }
        let with_state = start.elapsed();

        // Without: all tokens so far are read again for every new one.
        let start = Instant::now();
        let mut text = prompt;
        for _ in 0..WRITTEN {
            let length = text.dims()[1];
            let logits = model.try_forward(text.clone())?.narrow(1, length - 1, 1).squeeze_dim(1);
            text = Tensor::cat(vec![text, likeliest(logits)], 1);
        }
        let again = start.elapsed();

        let same = Tensor::cat(cached, 1).equal(text).all().into_scalar::<bool>();
        println!(
            "{}: {WRITTEN} tokens in {:.0} ms with a state, {:.0} ms without, the same tokens: {same}",
            layers.join(", "),
            with_state.as_secs_f64() * 1e3,
            again.as_secs_f64() * 1e3
        );
        assert!(same);
    }
    Ok(())
}

/// The token of the largest of `logits [1, vocabulary]`, `[1, 1]`.
fn likeliest(logits: Tensor<2>) -> Tensor<2, Int> {
    logits.argmax(1)
}
