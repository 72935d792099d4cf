//! What `fna` adds to the attention module: orders and length scales that learn, and maps that stay orthogonal.

mod support;

use burn::{
    module::Module,
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Tensor},
};
use resolvent::{
    Mechanism, Parameter, Strategy,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
};
use support::random;

const D_MODEL: usize = 24;

fn fna(fields: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "fna"{fields}}}"#)).unwrap()
}

fn config(heads: usize, fields: &str) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(D_MODEL, heads, fna(fields))
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

/// Trains a module to give a target for some steps; returns it with the first and the last loss.
fn train(mut module: MultiHeadAttention, steps: usize, device: &Device) -> (MultiHeadAttention, [f32; 2]) {
    let (tokens, target) = (random([2, 9, D_MODEL], device), random([2, 9, D_MODEL], device));
    let mut optimiser = AdamConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..steps {
        let out = module.forward(MhaInput::self_attn(tokens.clone())).context;
        let loss = (out - target.clone()).square().mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &module);
        module = optimiser.step(0.02, module, gradients);
    }
    (module, [losses[0], losses[steps - 1]])
}

#[test]
fn order_and_length_scale_learn_within_their_ranges() {
    let device = Device::flex().autodiff();
    let fields = r#", "alpha": 1.3, "kappa": "vision", "intrinsic_dim": 2"#;
    for strategy in [Strategy::Fused, Strategy::Composed] {
        let config = config(3, fields).with_trained([Parameter::Alpha, Parameter::Kappa]).with_strategy(strategy);
        let module = config.init(&device);
        let start = |x: Option<Tensor<1>>| values(x.unwrap());
        assert!(start(module.learned.value(Parameter::Alpha)).iter().all(|x| (x - 1.3).abs() < 1e-6));
        assert!(start(module.learned.value(Parameter::Kappa)).iter().all(|x| (x - 8.0).abs() < 1e-5));
        let (module, [first, last]) = train(module, 30, &device);
        assert!(last < 0.9 * first, "{strategy}: {first} to {last}");
        let (alpha, kappa) =
            (start(module.learned.value(Parameter::Alpha)), start(module.learned.value(Parameter::Kappa)));
        assert!(alpha.iter().all(|x| (1.0..2.0).contains(x) && (x - 1.3).abs() > 1e-3), "{strategy}: {alpha:?}");
        assert!(kappa.iter().all(|x| *x > 0.0 && (x - 8.0).abs() > 1e-2), "{strategy}: {kappa:?}");
    }
}

#[test]
fn learned_parameters_stand_for_the_configured_ones() {
    let device = Device::flex();
    let fixed = config(2, "").init(&device);
    assert!(fixed.learned.value(Parameter::Alpha).is_none() && fixed.learned.value(Parameter::Kappa).is_none());
    let learned = config(2, "").with_trained([Parameter::Alpha, Parameter::Kappa]).init(&device);
    let learned = learned.load_record_of(&fixed);
    let tokens = random([1, 7, D_MODEL], &device);
    let out = |m: &MultiHeadAttention| values(m.forward(MhaInput::self_attn(tokens.clone())).context);
    let worst = out(&fixed).iter().zip(out(&learned)).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(worst < 1e-6, "{worst}");
    // At the end of its range the order has no logit, and the Gaussian has no order.
    assert!(config(2, r#", "alpha": 1"#).with_trained([Parameter::Alpha]).validate().is_err());
    let gaussian = config(2, r#", "alpha": 2"#).with_trained([Parameter::Alpha, Parameter::Kappa]).init(&device);
    assert!(gaussian.learned.value(Parameter::Alpha).is_none() && gaussian.learned.value(Parameter::Kappa).is_some());
}

trait WithMaps {
    fn load_record_of(self, other: &Self) -> Self;
}

impl WithMaps for MultiHeadAttention {
    /// The same module with the projections of another.
    fn load_record_of(mut self, other: &Self) -> Self {
        (self.projection, self.output) = (other.projection.clone(), other.output.clone());
        self
    }
}

#[track_caller]
fn assert_orthogonal(w: Tensor<2>) {
    let [n, _] = w.dims();
    let product = w.clone().transpose().matmul(w);
    let off = values((product.clone() - Tensor::eye(n, &product.device())).abs());
    let worst = off.into_iter().fold(0.0_f32, f32::max);
    assert!(worst < 1e-5, "{worst}");
}

#[test]
fn maps_stay_orthogonal_all_through_training() {
    let device = Device::flex().autodiff();
    for (heads, tied, maps) in [(3, false, 2), (3, true, 1), (1, false, 1), (1, true, 0)] {
        let module = config(heads, r#", "kappa": 2"#).with_orthogonal(true).with_tied(Some(tied)).init(&device);
        let matrices = |module: &MultiHeadAttention| {
            let maps = module.orthogonal.as_ref().unwrap();
            [&maps.query, &maps.key].into_iter().flatten().map(|map| map.matrix()).collect::<Vec<_>>()
        };
        let before = matrices(&module);
        assert_eq!(before.len(), maps);
        // Large steps: the exponential has to be halved many times.
        let (module, [first, last]) = train(module, 40, &device);
        assert!(last < first, "{heads} heads, tied {tied}: {first} to {last}");
        for (before, after) in before.into_iter().zip(matrices(&module)) {
            assert_orthogonal(before.clone());
            assert_orthogonal(after.clone());
            let moved = values((after - before).abs()).into_iter().fold(0.0_f32, f32::max);
            assert!(moved > 0.05, "{moved}");
        }
        let trained = module.num_params();
        let square = D_MODEL * D_MODEL;
        // Base and angles of each map; values and output with biases.
        assert_eq!(trained, 2 * maps * square + 2 * (square + D_MODEL));
    }
}

#[test]
fn orthogonal_heads_keep_the_distances_of_the_tokens() {
    let device = Device::flex();
    let module = config(3, "").with_orthogonal(true).with_tied(Some(true)).init(&device);
    let tokens = random([5, D_MODEL], &device);
    let mapped = tokens.clone().matmul(module.orthogonal.unwrap().query.unwrap().matrix());
    let distance = |x: &Tensor<2>| values((x.clone().narrow(0, 0, 4) - x.clone().narrow(0, 1, 4)).square().sum_dim(1));
    for (a, b) in distance(&tokens).iter().zip(distance(&mapped)) {
        assert!((a - b).abs() < 1e-4 * a, "{a} {b}");
    }
    let uniform =
        MultiHeadAttentionConfig::new(D_MODEL, 3, Mechanism::preset("uniform").unwrap()).with_orthogonal(true);
    assert!(uniform.validate().unwrap_err().to_string().contains("orthogonal"));
}
