//! A model of your own around the attention module, and your own loop around Burn's optimiser.
//!
//! The task: a sequence of pairs of a key and a value, then a key alone; what is its value? The model has to look the key up,
//! which a mean over the tokens cannot do.
//!
//! `cargo run --release --example training_loop -- [MECHANISM]`

use burn::{
    module::Module,
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Int, Tensor, TensorData},
};
use resolvent::{
    Mechanism,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
};

/// Keys, values, and pairs in a sequence.
const SYMBOLS: usize = 16;
const WIDTH: usize = 64;
const STEPS: usize = 100;

/// Tokens are the sum of a key's and a value's vector; the asked key has value number `SYMBOLS`, which means none.
#[derive(Module, Debug)]
struct Lookup {
    keys: Embedding,
    values: Embedding,
    attention: MultiHeadAttention,
    classes: Linear,
}

impl Lookup {
    /// The logits of the value, `[batch, SYMBOLS]`, for keys and values `[batch, SYMBOLS + 1]`, the asked key last.
    fn forward(&self, keys: Tensor<2, Int>, values: Tensor<2, Int>) -> Tensor<2> {
        let tokens = self.keys.forward(keys) + self.values.forward(values);
        let context = self.attention.forward(MhaInput::self_attn(tokens)).context;
        self.classes.forward(context.narrow(1, SYMBOLS, 1).squeeze_dim(1))
    }
}

fn main() -> Result<(), resolvent::Error> {
    let mechanism = Mechanism::preset(&std::env::args().nth(1).unwrap_or("softmax".into()))?;
    // Autodiff is a property of the device; the same model runs without it after `valid()`.
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Lookup {
        keys: EmbeddingConfig::new(SYMBOLS, WIDTH).init(&device),
        values: EmbeddingConfig::new(SYMBOLS + 1, WIDTH).init(&device),
        attention: MultiHeadAttentionConfig::new(WIDTH, 4, mechanism).try_init(&device)?,
        classes: LinearConfig::new(WIDTH, SYMBOLS).init(&device),
    };
    let mut optimiser = AdamConfig::new().init();
    let mut first = None;
    for step in 1..=STEPS {
        let [keys, values, wanted] = batch(128, step, &device);
        let logits = model.forward(keys, values);
        let wanted = wanted.squeeze_dim::<1>(1);
        let right = logits.clone().argmax(1).squeeze_dim::<1>(1).equal(wanted.clone()).float().mean();
        let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, wanted);
        let value = loss.clone().into_scalar::<f32>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimiser.step(1e-3, model, gradients);
        let first = *first.get_or_insert(value);
        if step == 1 || step % 10 == 0 {
            println!("step {step:>3}: loss {value:.3}, {:.0} % right", 100.0 * right.into_scalar::<f32>());
        }
        assert!(
            step < STEPS || value < 0.5 * first,
            "the loss falls by less than half: this mechanism looks no key up"
        );
    }
    Ok(())
}

/// Keys, values and the wanted values of new sequences: every key once, in an order that steps through them by an odd number.
fn batch(size: usize, step: usize, device: &Device) -> [Tensor<2, Int>; 3] {
    let mut state = step as u64;
    let mut draw = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut keys, mut values, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..size {
        let (first, stride, asked) = (draw(SYMBOLS), 2 * draw(SYMBOLS / 2) + 1, draw(SYMBOLS));
        let drawn: Vec<usize> = (0..SYMBOLS).map(|_| draw(SYMBOLS)).collect();
        wanted.push(drawn[asked] as i64);
        keys.extend((0..=SYMBOLS).map(|n| ((first + stride * if n < SYMBOLS { n } else { asked }) % SYMBOLS) as i64));
        values.extend(drawn.iter().chain([&SYMBOLS]).map(|&value| value as i64));
    }
    [(keys, SYMBOLS + 1), (values, SYMBOLS + 1), (wanted, 1)]
        .map(|(data, columns)| Tensor::from_data(TensorData::new(data, [size, columns]), device))
}
