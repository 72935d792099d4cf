//! Every mechanism on a WebGPU device against the CPU: outputs and gradients. Any adapter will do, also a software one;
//! without one the test says so and passes.

mod support;

use burn::tensor::{Bool, Device, DeviceType, Tensor};
use resolvent::{Inputs, Mask, Mechanism, Strategy, attend, plan};
use resolvent_kernels::{Tol, relative_distance};
use support::random;

const MECHANISMS: [&str; 10] = [
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "softmax", "causal": true}"#,
    r#"{"mechanism": "uniform"}"#,
    r#"{"mechanism": "infsa"}"#,
    r#"{"mechanism": "infsa", "causal": true, "activation": "gelu"}"#,
    r#"{"mechanism": "infsa-resolvent"}"#,
    r#"{"mechanism": "infsa-resolvent", "tied": true, "activation": "abs"}"#,
    r#"{"mechanism": "linear-infsa"}"#,
    r#"{"mechanism": "linear-infsa", "tied": true, "iterations": 2, "norm_bias": "auto"}"#,
    r#"{"mechanism": "linear-infsa", "operator": "exact"}"#,
];

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// Output and gradients, of `gamma` too where there is one.
fn run(mechanism: &Mechanism, tensors: &[Tensor<4>; 4], device: &Device) -> Vec<Vec<f64>> {
    let device = device.clone().autodiff();
    let [q, k, v, dout] = tensors.clone().map(|x| Tensor::<4>::from_data(x.into_data(), &device));
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let gamma = mechanism.gamma().map(|_| Tensor::<1>::from_floats([0.4, 0.8], &device).require_grad());
    let mut inputs = Inputs { k: (!mechanism.tied()).then(|| k.clone()), ..Inputs::tied(q.clone(), v.clone()) };
    inputs.extras.gamma = gamma.clone();
    let keep = [[true, false, true, true, true, true, false], [true; 7]];
    let mask = Mask::padding(Tensor::<2, Bool>::from_data(keep, &device));
    let out = attend(&inputs, mechanism, &mask, Strategy::Auto).unwrap().out;
    let gradients = (out.clone() * dout).sum().backward();
    // Burn leaves out the gradient of what is not read, as q and k by `uniform`.
    let gradient = |x: &Tensor<4>| values(x.grad(&gradients).unwrap_or_else(|| x.clone().inner().zeros_like()));
    let mut all = vec![values(out), gradient(&q), gradient(&v)];
    all.extend(inputs.k.as_ref().map(gradient));
    all.extend(gamma.map(|gamma| values(gamma.grad(&gradients).unwrap())));
    all
}

#[test]
fn every_mechanism_agrees_with_the_cpu() {
    let Some(device) = Device::enumerate(DeviceType::Wgpu).into_vec().into_iter().next() else {
        eprintln!("SKIPPED: no WebGPU adapter found; install a Vulkan driver, for instance Mesa's software one");
        return;
    };
    let cpu = Device::flex();
    let tensors = [(); 4].map(|()| random([2, 2, 7, 8], &cpu));
    for text in MECHANISMS {
        let mechanism = Mechanism::from_json(text).unwrap();
        let (got, expected) = (run(&mechanism, &tensors, &device), run(&mechanism, &tensors, &cpu));
        let tol = Tol::f32(&mechanism).backward;
        for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let distance = relative_distance(got, expected);
            assert!(distance <= tol, "{text}, tensor {n}: relative distance {distance:.3e} > {tol:.0e}");
        }
    }
    let x = || Tensor::<4>::zeros([1, 1, 2, 2], &device);
    let inputs = Inputs::new(x(), x(), x());
    let softmax = Mechanism::preset("softmax").unwrap();
    let chosen = plan(&inputs, &softmax, &Mask::none(), Strategy::Auto).unwrap();
    assert_eq!((chosen.strategy, chosen.kernel), (Strategy::Composed, None));
    assert!(attend(&inputs, &softmax, &Mask::none(), Strategy::Fused).is_err());
}
