//! Every mechanism on a WebGPU device against the CPU: outputs and gradients of the operator, the module and the model.
//! Any adapter will do, also a software one: `cargo test --release -p resolvent --features wgpu --test wgpu -- --ignored`.

mod support;

use burn::{
    module::Module,
    tensor::{Bool, Device, DeviceType, Tensor},
};
use resolvent::{
    Error, Inputs, Mask, Mechanism, Precision, Strategy, attend,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    models::{Vit, VitConfig},
    plan,
};
use resolvent_kernels::{Tol, relative_distance};
use support::random;

const MECHANISMS: &[&str] = &[
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "softmax", "causal": true}"#,
    r#"{"mechanism": "uniform"}"#,
    r#"{"mechanism": "infsa"}"#,
    r#"{"mechanism": "infsa", "causal": true}"#,
    r#"{"mechanism": "infsa", "activation": "gelu"}"#,
    r#"{"mechanism": "infsa-resolvent"}"#,
    r#"{"mechanism": "infsa-resolvent", "tied": true, "activation": "abs"}"#,
    r#"{"mechanism": "linear-infsa"}"#,
    r#"{"mechanism": "linear-infsa", "tied": true, "iterations": 2, "norm_bias": "auto"}"#,
    r#"{"mechanism": "linear-infsa", "operator": "exact"}"#,
];

/// Agreement of a whole model.
const MODEL: f64 = 1e-5;

/// The tokens that take part.
const KEEP: [[bool; 7]; 2] = [[true, false, true, true, true, true, false], [true; 7]];

/// The first adapter.
fn adapter() -> Device {
    let found = Device::enumerate(DeviceType::Wgpu).into_vec().into_iter().next();
    let Some(device) = found else {
        panic!("no WebGPU adapter; install a Vulkan driver, for instance Mesa's software one")
    };
    eprintln!("adapter: {}", device.identity().map_or("unknown".into(), |identity| identity.name));
    device
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn keep(device: &Device) -> Tensor<2, Bool> {
    Tensor::from_data(KEEP, device)
}

/// Compares what two devices computed, tensor by tensor.
#[track_caller]
fn assert_agree(what: &str, tol: f64, got: &[Vec<f64>], expected: &[Vec<f64>]) {
    assert_eq!(got.len(), expected.len());
    for (n, (got, expected)) in got.iter().zip(expected).enumerate() {
        let distance = relative_distance(got, expected);
        assert!(distance <= tol, "{what}, tensor {n}: relative distance {distance:.3e} > {tol:.0e}");
    }
}

/// Output and gradients, of `gamma` too where there is one.
fn operator(mechanism: &Mechanism, tensors: &[Tensor<4>; 4], device: &Device) -> Vec<Vec<f64>> {
    let device = device.clone().autodiff();
    let [q, k, v, dout] = tensors.clone().map(|x| Tensor::<4>::from_data(x.into_data(), &device));
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let gamma = mechanism.gamma().map(|_| Tensor::<1>::from_floats([0.4, 0.8], &device).require_grad());
    let mut inputs = Inputs { k: (!mechanism.tied).then(|| k.clone()), ..Inputs::tied(q.clone(), v.clone()) };
    if let Some(gamma) = &gamma {
        inputs = inputs.with_gamma(gamma.clone());
    }
    let out = attend(&inputs, mechanism, &Mask::padding(keep(&device)), Strategy::Auto).unwrap().out;
    let gradients = (out.clone() * dout).sum().backward();
    // Burn leaves out the gradient of what is not read, as q and k by `uniform`.
    let gradient = |x: &Tensor<4>| values(x.grad(&gradients).unwrap_or_else(|| x.clone().inner().zeros_like()));
    let mut all = vec![values(out), gradient(&q), gradient(&v)];
    all.extend(inputs.k.as_ref().map(gradient));
    all.extend(gamma.map(|gamma| values(gamma.grad(&gradients).unwrap())));
    all
}

#[test]
#[ignore = "needs a WebGPU adapter"]
fn every_mechanism_agrees_with_the_cpu() {
    let device = adapter();
    let cpu = Device::flex();
    let absent = keep(&cpu).bool_not().reshape([2, 1, 7, 1]).expand([2, 2, 7, 8]);
    let [q, k, v, dout] = [(); 4].map(|()| random([2, 2, 7, 8], &cpu));
    let [q, k, v] = [q, k, v].map(|x| x.mask_fill(absent.clone(), f32::NAN));
    let (tensors, absent) = ([q, k, v, dout], values(absent.float()));
    for text in MECHANISMS {
        let mechanism = Mechanism::from_json(text).unwrap();
        let (got, expected) = (operator(&mechanism, &tensors, &device), operator(&mechanism, &tensors, &cpu));
        assert_agree(text, Tol::f32(&mechanism).backward, &got, &expected);
        for got in got.iter().filter(|got| got.len() == absent.len()) {
            assert!(got.iter().zip(&absent).all(|(x, absent)| *absent == 0.0 || *x == 0.0), "{text}: masked content");
        }
    }
}

/// Self-attention with padding, and attention over a memory.
fn module(module: &MultiHeadAttention, x: &Tensor<3>, device: &Device) -> Vec<Vec<f64>> {
    let (module, x) = (module.clone().to_device(device), x.clone().to_device(device));
    let itself = MhaInput::self_attn(x.clone()).mask_pad(keep(device).bool_not());
    let memory = MhaInput::new(x.clone().narrow(1, 0, 4), x.clone(), x);
    // What a mechanism refuses (the resolvent: a memory of another length) is refused on every device alike.
    [itself, memory].map(|input| module.try_forward(input).map_or_else(|_| vec![], |out| values(out.context))).to_vec()
}

/// Logits, and the gradient of the first layer, which everything else has passed through.
fn model(model: &Vit, images: &Tensor<4>, device: &Device) -> Vec<Vec<f64>> {
    let device = device.clone().autodiff();
    let model = model.clone().fork(&device);
    let logits = model.forward(Tensor::from_data(images.to_data(), &device));
    let gradients = logits.clone().square().sum().backward();
    vec![values(logits), values(model.patch.weight.val().grad(&gradients).unwrap())]
}

#[test]
#[ignore = "needs a WebGPU adapter"]
fn modules_and_models_agree_with_the_cpu() {
    let device = adapter();
    let cpu = Device::flex();
    for id in Mechanism::IDS {
        // What projects keys learns its maps by their length; the model says its own.
        let mechanism = Mechanism::preset(id).unwrap().with_max_tokens(7);
        let (attention, x) =
            (MultiHeadAttentionConfig::new(8, 2, mechanism.clone()).init(&cpu), random([2, 7, 8], &cpu));
        assert_agree(
            id,
            Tol::f32(&mechanism).backward,
            &module(&attention, &x, &device),
            &module(&attention, &x, &cpu),
        );
        let config = VitConfig::new([8, 8], 1, 4, 3, mechanism.clone());
        let vit = VitConfig { dim: 8, depth: 1, heads: 2, mlp_dim: 12, ..config }.init(&cpu.clone().autodiff());
        let images = random([2, 1, 8, 8], &cpu);
        assert_agree(id, MODEL, &model(&vit, &images, &device), &model(&vit, &images, &cpu));
    }
}

#[test]
#[ignore = "needs a WebGPU adapter"]
fn only_the_composed_form_runs_there() {
    let device = adapter();
    let x = || Tensor::<4>::zeros([1, 1, 2, 2], &device);
    let inputs = Inputs::new(x(), x(), x());
    let softmax = Mechanism::preset("softmax").unwrap();
    let chosen = plan(&inputs, &softmax, &Mask::none(), Strategy::Auto).unwrap();
    assert_eq!((chosen.strategy, chosen.kernel), (Strategy::Composed, None));
    for strategy in [Strategy::Fused, Strategy::Reference] {
        assert!(attend(&inputs, &softmax, &Mask::none(), strategy).unwrap_err().to_string().contains("Device::flex"));
    }
    // Nor are there products of bf16, of a call or of a module.
    let mut rounded = inputs;
    rounded.extras = rounded.extras.with_precision(Precision::Bf16);
    let error = attend(&rounded, &softmax, &Mask::none(), Strategy::Auto).unwrap_err();
    assert!(matches!(error, Error::Precision { op: "attend", .. }), "{error}");
    let module = MultiHeadAttentionConfig::new(4, 2, softmax).with_precision(Precision::Bf16).init(&device);
    let error = module.try_forward(MhaInput::self_attn(Tensor::zeros([1, 3, 4], &device))).unwrap_err();
    assert!(matches!(error, Error::Precision { op: "attention", .. }), "{error}");
}
