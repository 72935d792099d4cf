//! The layers around attention against Burn's own operations, values and gradients.

mod support;

use burn::{
    module::{Module, Param},
    nn::LayerNormConfig,
    tensor::{DType, Device, Gradients, Tensor, activation, module},
};
use resolvent::{
    Mechanism,
    attention::MhaInput,
    models::{Block, LayerNorm, Pool, VitConfig},
    ops,
};
use resolvent_kernels::relative_distance;
use support::random;

#[track_caller]
fn assert_close<const D: usize>(what: &str, got: Tensor<D>, expected: Tensor<D>, rtol: f64) {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{what}");
    let values = |x: Tensor<D>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let distance = relative_distance(&values(got), &values(expected));
    assert!(distance <= rtol, "{what}: relative distance {distance:.3e} > {rtol:.0e}");
}

/// Another weight for every element of `y`; they do not cancel in a sum.
fn weights<const D: usize>(y: &Tensor<D>) -> Tensor<D> {
    let weights = Tensor::arange(0..y.shape().num_elements() as i64, &y.device()).float().sin() + 0.5;
    weights.reshape(y.shape()).cast(y.dtype())
}

/// The gradients of the weighted sum.
fn backward<const D: usize>(y: Tensor<D>) -> Gradients {
    (weights(&y) * y).sum().backward()
}

fn leaf<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    random(shape, device).require_grad()
}

#[test]
fn gelu_is_burns_own() {
    let device = Device::flex().autodiff();
    for x in [random([2, 3, 5, 7], &device), random([2, 7, 5, 3], &device).swap_dims(1, 3)] {
        let x = x.require_grad();
        let gradient = |y: Tensor<4>| x.grad(&(y.clone() * y).sum().backward()).unwrap();
        let (ours, theirs) = (ops::gelu(x.clone()), activation::gelu(x.clone()));
        assert_close("gelu", ours.clone(), theirs.clone(), 1e-5);
        assert_close("dx", gradient(ours), gradient(theirs), 1e-5);
    }
}

#[test]
fn linear_is_burns_own() {
    let device = Device::flex().autodiff();
    for [batch, seq, inputs, outputs] in [[1, 1, 1, 1], [2, 5, 7, 3], [3, 700, 24, 40]] {
        let x = leaf([seq, batch, inputs], &device);
        // Strided as projections are that come out of a swap of axes.
        let strided = || x.clone().swap_dims(0, 1);
        let (weight, bias) = (leaf([inputs, outputs], &device), leaf([outputs], &device));
        for bias in [None, Some(bias)] {
            let ours = ops::linear(strided(), weight.clone(), bias.clone());
            let theirs = module::linear(strided(), weight.clone(), bias.clone());
            assert_close("y", ours.clone(), theirs.clone(), 1e-5);
            let wide = weights(&ours).inner().cast(DType::F64).reshape([batch * seq, outputs]);
            let (ours, theirs) = (backward(ours), backward(theirs));
            assert_close("dx", x.grad(&ours).unwrap(), x.grad(&theirs).unwrap(), 1e-5);
            assert_close("dweight", weight.grad(&ours).unwrap(), weight.grad(&theirs).unwrap(), 1e-5);
            if let Some(bias) = bias {
                let dbias = bias.grad(&ours).unwrap().cast(DType::F64);
                assert_close("dbias", dbias, wide.sum_dim(0).squeeze_dim(0), 1e-5);
            }
        }
    }
}

/// Burn's own product of no matrices reads beyond its memory.
#[test]
fn nothing_in_is_nothing_out() {
    let device = Device::flex().autodiff();
    let (x, weight) = (leaf([0, 4, 3], &device), leaf([3, 2], &device));
    let y = ops::linear(x.clone(), weight.clone(), Some(leaf([2], &device)));
    assert_eq!(y.dims(), [0, 4, 2]);
    let gradients = backward(y);
    assert_eq!(x.grad(&gradients).unwrap().dims(), [0, 4, 3]);
    assert_close("dweight", weight.grad(&gradients).unwrap(), Tensor::zeros([3, 2], &device.clone().inner()), 0.0);
    let norm = LayerNorm::new(3, 1e-5, &device);
    assert_eq!(norm.forward(x).dims(), [0, 4, 3]);
}

#[test]
fn what_needs_no_gradient_gets_none() {
    let device = Device::flex().autodiff();
    let (x, weight) = (random::<2>([6, 4], &device), leaf([4, 3], &device));
    let gradients = backward(ops::linear(x.clone(), weight.clone(), Some(random([3], &device))));
    assert!(x.grad(&gradients).is_none());
    assert!(weight.grad(&gradients).is_some());
}

#[test]
fn layer_norm_is_burns_own() {
    let device = Device::flex().autodiff();
    for width in [2, 16, 19, 130] {
        let x = leaf([width, 3, 70], &device);
        let tokens = || x.clone().swap_dims(0, 2);
        let (gain, bias) = (leaf([width], &device), leaf([width], &device));
        let ours = ops::layer_norm(tokens(), gain.clone(), bias.clone(), 1e-5);
        let theirs = module::layer_norm(tokens(), gain.clone(), Some(bias.clone()), 1e-5);
        assert_close("y", ours.clone(), theirs.clone(), 1e-5);
        let (ours, theirs) = (backward(ours), backward(theirs));
        assert_close("dx", x.grad(&ours).unwrap(), x.grad(&theirs).unwrap(), 1e-4);
        assert_close("dgain", gain.grad(&ours).unwrap(), gain.grad(&theirs).unwrap(), 1e-5);
        assert_close("dbias", bias.grad(&ours).unwrap(), bias.grad(&theirs).unwrap(), 1e-5);
    }
}

/// A block of a model without a grid.
fn block([dim, heads, mlp_dim]: [usize; 3], mechanism: &str, device: &Device) -> Block {
    let base = VitConfig::new([8; 2], 1, 4, 3, Mechanism::preset(mechanism).unwrap());
    let config = VitConfig { dim, heads, mlp_dim, depth: 1, pool: Pool::Cls, ..base };
    config.init(device).blocks.remove(0)
}

/// So few tokens that the products are shared, and some blocks of them.
#[test]
fn a_blocks_mlp_is_its_layers_one_after_the_other() {
    let device = Device::flex().autodiff();
    let block = block([12, 2, 40], "uniform", &device);
    for [batch, seq] in [[2, 3], [4, 700]] {
        let x = leaf([batch, seq, 12], &device);
        let ours = block.forward(x.clone()).unwrap();
        let normed = block.attention_norm.forward(x.clone());
        let attended = x.clone() + block.attention.try_forward(MhaInput::self_attn(normed)).unwrap().context;
        let hidden = block.mlp_in.forward(block.mlp_norm.forward(attended.clone()));
        let theirs = attended + block.mlp_out.forward(activation::gelu(hidden));
        assert_close("y", ours.clone(), theirs.clone(), 1e-5);
        let (ours, theirs) = (backward(ours), backward(theirs));
        assert_close("dx", x.grad(&ours).unwrap(), x.grad(&theirs).unwrap(), 1e-5);
        for (name, layer) in [("in", &block.mlp_in), ("out", &block.mlp_out)] {
            let (weight, bias) = (layer.weight.val(), layer.bias.as_ref().unwrap().val());
            assert_close(name, weight.grad(&ours).unwrap(), weight.grad(&theirs).unwrap(), 1e-5);
            assert_close(name, bias.grad(&ours).unwrap(), bias.grad(&theirs).unwrap(), 1e-5);
        }
    }
}

/// Where nothing is learned, tokens and heads of a long sequence are worked on in parts.
#[test]
fn parts_of_a_long_sequence_are_the_whole() {
    let (device, learning) = (Device::flex(), Device::flex().autodiff());
    for mechanism in ["uniform", "linear-infsa"] {
        let block = block([6, 3, 8], mechanism, &device);
        let x = random([1, 33_000, 6], &device);
        let parts = block.forward(x.clone()).unwrap();
        let whole = block.to_device(&learning).forward(x.to_device(&learning)).unwrap();
        assert_close(mechanism, parts, whole.inner(), 1e-6);
    }
}

/// In other storage types the operations are Burn's; in half precision the sums of squares are f32.
#[test]
fn storage_types_stay() {
    let device = Device::flex();
    for (dtype, rtol) in [(DType::F64, 1e-12), (DType::F16, 1e-2), (DType::BF16, 5e-2)] {
        let [x, gain, bias] = [random([4, 8], &device), random([1, 8], &device), random([1, 8], &device)];
        let cast = |x: &Tensor<2>| x.clone().cast(DType::F64);
        let flat = |x: Tensor<2>| x.squeeze_dim::<1>(0);
        let norm = |[x, gain, bias]: [Tensor<2>; 3]| ops::layer_norm(x * 100.0, flat(gain), flat(bias), 1e-5);
        let got = norm([&x, &gain, &bias].map(|x| x.clone().cast(dtype)));
        assert_eq!(got.dtype(), dtype);
        assert_close("layer norm", got.cast(DType::F64), norm([&x, &gain, &bias].map(cast)), rtol);
        let product = |x: Tensor<2>| ops::linear(x.clone(), x.transpose(), None);
        let got = product(x.clone().cast(dtype));
        assert_eq!(got.dtype(), dtype);
        assert_close("linear", got.cast(DType::F64), product(cast(&x)), rtol);
    }
}

#[test]
fn the_models_norm_is_burns_module() {
    let device = Device::flex();
    let x = random([3, 5, 24], &device);
    let (gamma, beta) = (random([24], &device), random([24], &device));
    let mut ours = LayerNorm::new(24, 1e-6, &device);
    let mut theirs = LayerNormConfig::new(24).with_epsilon(1e-6).init(&device);
    assert_close("at the start", ours.forward(x.clone()), theirs.forward(x.clone()), 1e-5);
    (ours.gamma, ours.beta) = (Param::from_tensor(gamma.clone()), Param::from_tensor(beta.clone()));
    (theirs.gamma, theirs.beta) = (Param::from_tensor(gamma), Some(Param::from_tensor(beta)));
    assert_close("trained", ours.forward(x.clone()), theirs.forward(x), 1e-5);
}

#[test]
#[should_panic(expected = "as wide as the gain")]
fn a_norm_of_another_width_is_refused() {
    let device = Device::flex();
    ops::layer_norm(random::<2>([2, 6], &device), random([3], &device), random([3], &device), 1e-5);
}

#[test]
#[should_panic(expected = "inputs of the weight")]
fn a_weight_of_other_inputs_is_refused() {
    let device = Device::flex();
    ops::linear(random::<2>([2, 6], &device), random([3, 4], &device), None);
}
