//! What an observer of the attention module is shown: the operator's own inputs, and nothing changes by it.

mod support;

use std::sync::{Arc, Mutex};

use burn::tensor::{Bool, Device, Tensor, TensorData};
use resolvent::{
    Mechanism, Strategy, attend,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, Observed, Observer},
};
use support::random;

fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

/// The module with an observer that keeps what it is shown.
fn watched(mut module: MultiHeadAttention) -> (MultiHeadAttention, Arc<Mutex<Vec<Observed>>>) {
    let seen = Arc::<Mutex<Vec<Observed>>>::default();
    let calls = seen.clone();
    module.observer = Some(Observer::new(move |call| calls.lock().unwrap().push(call)));
    (module, seen)
}

#[test]
fn the_operators_inputs_are_shown_and_the_output_stays() {
    let device = Device::flex();
    let x = random([2, 9, 24], &device);
    let padding =
        Tensor::<2, Bool>::from_data(TensorData::new([vec![false; 16], vec![true; 2]].concat(), [2, 9]), &device);
    for id in ["softmax", "infsa", "linear-infsa", "fna", "soft-pp"] {
        for rotary in [false, true] {
            let config = MultiHeadAttentionConfig::new(24, 3, Mechanism::preset(id).unwrap()).with_rotary(rotary);
            let module = config.init(&device);
            let call = || MhaInput::self_attn(x.clone()).mask_pad(padding.clone());
            let alone = values(module.forward(call()).context);
            let (module, seen) = watched(module);
            let context = values(module.forward(call()).context);
            let worst = alone.iter().zip(&context).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs()));
            assert!(worst < 1e-5, "{id}, rotary {rotary}: {worst:e}");
            let seen = seen.lock().unwrap();
            let [Observed { inputs, mechanism, mask, .. }] = &seen[..] else { panic!("one call of {id}") };
            assert_eq!(inputs.q.dims(), [2, 3, 9, 8]);
            let out = attend(inputs, mechanism, mask, Strategy::Auto).unwrap().out;
            let merged = module.output.forward(out.swap_dims(1, 2).reshape([2, 9, 24]));
            // A padded token's output is left out.
            let again = values(merged.mask_fill(padding.clone().unsqueeze_dim::<3>(2).expand([2, 9, 24]), 0.0));
            let worst = again.iter().zip(&context).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs()));
            assert!(worst < 1e-5, "{id}, rotary {rotary}: {worst:e}");
        }
    }
}
