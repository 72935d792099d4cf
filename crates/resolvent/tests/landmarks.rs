//! What mechanisms with landmarks add to the attention module: filters and norms that learn, grids of any size, and draws.

mod support;

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Tensor},
};
use resolvent::{
    Inputs, Mask, Mechanism, Parameter, Strategy, attend,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
};
use support::random;

const D_MODEL: usize = 16;
const HEADS: usize = 2;

/// Everything that a mechanism of this structure can learn.
const LEARNING: [&str; 3] = [
    r#"{"mechanism": "soft", "landmarks": {"kind": "conv", "ratio": 2}, "landmark_act": true, "value_conv": 3,
        "grid": [5, 4], "inverse": "cholesky"}"#,
    r#"{"mechanism": "soft-pp", "landmarks": {"kind": "conv", "ratio": 3}, "value_conv": 5, "degree": "token"}"#,
    r#"{"mechanism": "laplacian", "landmarks": {"kind": "conv", "ratio": 2}, "grid": [5, 4], "weight_scale": "inv-n"}"#,
];

fn config(json: &str) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(D_MODEL, HEADS, Mechanism::from_json(json).unwrap())
}

fn out(module: &MultiHeadAttention, input: MhaInput) -> Vec<f32> {
    module.forward(input).context.into_data().iter().collect()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

/// Names and values of all parameters.
fn parameters(module: &MultiHeadAttention) -> Vec<(String, Vec<f32>)> {
    struct Values(Vec<String>, Vec<(String, Vec<f32>)>);
    impl ModuleVisitor for Values {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.0.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push((self.0.join("."), param.val().into_data().iter().collect()));
        }
    }
    let mut values = Values(Vec::new(), Vec::new());
    module.visit(&mut values);
    values.1
}

#[test]
fn filters_norms_and_widths_learn() {
    let device = Device::flex().autodiff();
    for json in LEARNING {
        for strategy in [Strategy::Fused, Strategy::Composed] {
            let config = config(json).with_trained([Parameter::Lambda, Parameter::Scale]).with_strategy(strategy);
            let mut module = config.init(&device);
            let before = parameters(&module);
            assert!(before.len() >= 6, "{before:?}");
            let (tokens, target) = (random([2, 20, D_MODEL], &device), random([2, 20, D_MODEL], &device));
            let mut optimiser = AdamConfig::new().init();
            let mut losses = Vec::new();
            for _ in 0..20 {
                let out = module.forward(MhaInput::self_attn(tokens.clone())).context;
                let loss = (out - target.clone()).square().mean();
                losses.push(loss.clone().into_scalar::<f32>());
                let gradients = GradientsParams::from_grads(loss.backward(), &module);
                module = optimiser.step(0.01, module, gradients);
            }
            assert!(losses[19] < 0.95 * losses[0], "{strategy} {json}: {losses:?}");
            for ((name, before), (_, after)) in before.iter().zip(parameters(&module)) {
                assert!(difference(before, &after) > 1e-3, "{strategy} {json}: `{name}` stays");
            }
        }
    }
}

#[test]
fn the_module_is_the_operator_with_its_own_tensors() {
    let device = Device::flex();
    let module = config(LEARNING[0]).with_trained([Parameter::Scale]).init(&device);
    let tokens = random([2, 20, D_MODEL], &device);
    let heads = |x: Tensor<3>| x.reshape([2, 20, HEADS, D_MODEL / HEADS]).swap_dims(1, 2);
    let packed = module.projection.forward(tokens.clone());
    let (q, v) = (heads(packed.clone().narrow(2, 0, D_MODEL)), heads(packed.narrow(2, D_MODEL, D_MODEL)));
    let own = &module.landmarks;
    let weight = |x: &Option<Param<Tensor<2>>>| x.as_ref().unwrap().val();
    let inputs = Inputs::tied(q, v)
        .with(Parameter::LandmarkWeight, weight(&own.landmark_weight).reshape([8, 8, 2, 2]))
        .with(Parameter::LandmarkNormGamma, own.norm_gamma.as_ref().unwrap().val())
        .with(Parameter::LandmarkNormBeta, own.norm_beta.as_ref().unwrap().val())
        .with(Parameter::ValueWeight, weight(&own.value_weight).reshape([HEADS, 3, 3]))
        .with(Parameter::Scale, module.learned.value(Parameter::Scale).unwrap());
    let attended = attend(&inputs, &module.mechanism, &Mask::none(), Strategy::Auto).unwrap().out;
    let expected = module.output.forward(attended.swap_dims(1, 2).reshape([2, 20, D_MODEL]));
    let expected: Vec<f32> = expected.into_data().iter().collect();
    assert!(difference(&out(&module, MhaInput::self_attn(tokens)), &expected) < 1e-6);
}

#[test]
fn filters_start_as_pooling() {
    let device = Device::flex();
    // Whole windows: `soft` drops the rest of a grid.
    for (mechanism, grid) in [("soft", [4, 6]), ("laplacian", [4, 6]), ("laplacian", [5, 4])] {
        let of = |kind: &str| {
            let [height, width] = grid;
            let landmarks = format!(r#""landmarks": {{"kind": "{kind}", "ratio": 2}}, "grid": [{height}, {width}]"#);
            config(&format!(r#"{{"mechanism": "{mechanism}", "inverse": "cholesky", {landmarks}}}"#)).init(&device)
        };
        let (conv, mut pool) = (of("conv"), of("pool"));
        (pool.projection, pool.output) = (conv.projection.clone(), conv.output.clone());
        let tokens = random([2, grid[0] * grid[1], D_MODEL], &device);
        let input = || MhaInput::self_attn(tokens.clone());
        let [conv, pool] = [&conv, &pool].map(|module| out(module, input()));
        // A partial window's mean is over the tokens it has, a filter's sum is not.
        let same = difference(&conv, &pool) < 1e-5;
        assert_eq!(same, grid == [4, 6], "{mechanism} {grid:?}");
    }
}

/// The weights of a module are the same whether its windows are counted or of a side, and so is what it computes where the
/// windows are.
#[test]
fn counted_windows_need_no_other_weights() {
    let device = Device::flex();
    for mechanism in ["soft", "soft-pp", "laplacian"] {
        let of = |windows: &str| {
            config(&format!(
                r#"{{"mechanism": "{mechanism}", "landmarks": {{"kind": "pool", {windows}}}, "grid": [4, 6]}}"#
            ))
            .with_trained([Parameter::Lambda, Parameter::Scale])
            .init(&device)
        };
        let sided = of(r#""ratio": 2"#);
        let counted = of(r#""count": 6"#).load_record(sided.clone().into_record());
        assert_eq!(parameters(&sided), parameters(&counted), "{mechanism}");
        let tokens = random([2, 24, D_MODEL], &device);
        let [expected, got] = [&sided, &counted].map(|module| out(module, MhaInput::self_attn(tokens.clone())));
        assert_eq!(expected, got, "{mechanism}");
        // On another grid too, where six windows are others.
        let tokens = random([2, 60, D_MODEL], &device);
        assert!(out(&counted, MhaInput::self_attn(tokens).grid([6, 10])).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn one_module_serves_grids_of_any_size() {
    let device = Device::flex();
    for json in LEARNING {
        let module = config(json).init(&device);
        for grid in [[3, 7], [8, 8]] {
            let tokens = random([1, grid[0] * grid[1], D_MODEL], &device);
            let mut configured = module.clone();
            configured.grid = Some(grid);
            let own = configured.mechanism;
            if own.landmark_kind().is_none() || own.as_soft().is_some() && own.grid().is_none() {
                continue;
            }
            configured.mechanism = own.with_grid(Some(grid));
            let called = out(&module, MhaInput::self_attn(tokens.clone()).grid(grid));
            assert_eq!(called, out(&configured, MhaInput::self_attn(tokens.clone())), "{json}");
            let error = module.try_forward(MhaInput::self_attn(tokens).grid([2, 5])).unwrap_err().to_string();
            assert!(error.contains("grid") && error.contains("[2, 5]"), "{error}");
        }
    }
}

#[test]
fn random_landmarks_are_drawn_anew_in_training_alone() {
    let random_landmarks = r#"{"mechanism": "soft", "landmarks": {"kind": "random", "count": 3, "seed": 5}}"#;
    let device = Device::flex();
    let module = config(random_landmarks).init(&device.clone().autodiff());
    let tokens = random([2, 20, D_MODEL], &device);
    let evaluated = module.valid();
    let evaluate = || out(&evaluated, MhaInput::self_attn(tokens.clone()));
    assert_eq!(evaluate(), evaluate());
    let learned = || Tensor::from_inner(tokens.clone());
    let train = || out(&module, MhaInput::self_attn(learned()));
    let (first, second) = (train(), train());
    assert!(difference(&first, &second) > 1e-3 && difference(&first, &evaluate()) > 1e-3);
}

#[test]
fn what_a_module_cannot_do_is_named() {
    let error = |json: &str| config(json).validate().unwrap_err().to_string();
    let given = error(r#"{"mechanism": "soft", "landmarks": {"kind": "given"}}"#);
    assert!(given.contains("given landmarks") && given.contains("attend"), "{given}");
    let device = Device::flex();
    let tokens = || random([1, 6, D_MODEL], &device);
    let cross = MhaInput::new(tokens(), tokens(), tokens());
    let error = config(r#"{"mechanism": "soft"}"#).init(&device).try_forward(cross).unwrap_err().to_string();
    assert!(error.contains("cross-attention") && error.contains("soft"), "{error}");
}

#[test]
fn parameters_are_counted() {
    for json in LEARNING {
        let config = config(json);
        assert_eq!(config.init(&Device::flex()).num_params(), config.parameter_count(), "{json}");
    }
}

/// The one mechanism that has no fused path finds its own.
#[test]
fn full_whitening_runs_where_nothing_is_asked_for() {
    let config = config(r#"{"mechanism": "laplacian-exact", "whitening": "full"}"#);
    let module = config.init(&Device::flex().autodiff());
    let tokens = random([1, 6, D_MODEL], &Device::flex().autodiff()).require_grad();
    let gradients = module.forward(MhaInput::self_attn(tokens.clone())).context.sum().backward();
    let dx: Vec<f32> = tokens.grad(&gradients).unwrap().into_data().iter().collect();
    assert!(dx.iter().all(|x| x.is_finite()) && dx.iter().any(|&x| x != 0.0));
}
