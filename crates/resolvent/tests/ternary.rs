//! Ternary layers: the stored case with its gradients, and modules and models built of them.

use burn::{
    backend::flex::Flex,
    module::Module,
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Distribution, Int, Tensor, TensorData},
};
use resolvent::{
    Mechanism,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    models::{LanguageConfig, TextConfig, VitConfig},
    ternary::{Layers, Packed, matrices},
};
use resolvent_layers::TernaryMatrix;
use safetensors::{Dtype, SafeTensors};

fn stored(name: &str) -> (Vec<usize>, Vec<f32>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../layers/tests/data/ternary_linear.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    let values = match tensor.dtype() {
        Dtype::F32 => tensor.data().as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        _ => tensor.data().as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x) as f32).collect(),
    };
    (tensor.shape().to_vec(), values)
}

fn tensor(name: &str, device: &Device) -> Tensor<2> {
    let (shape, values) = stored(name);
    Tensor::from_data(TensorData::new(values, shape), device)
}

#[track_caller]
fn assert_close<const D: usize>(what: &str, got: Tensor<D>, want: Tensor<D>, tol: f32) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let values = |x: Tensor<D>| x.into_data().iter::<f32>().collect::<Vec<_>>();
    for (n, (got, want)) in values(got).into_iter().zip(values(want)).enumerate() {
        assert!((got - want).abs() <= tol * (1.0 + want.abs()), "{what}[{n}]: {got} instead of {want}");
    }
}

fn linear(x: Tensor<3>, weight: Tensor<2>, bias: Option<Tensor<1>>, widths: &[usize]) -> Tensor<3> {
    Layers { weight, bias, widths, packed: &Packed::default() }.forward(x)
}

fn normal<const D: usize>(shape: [usize; D], scale: f64) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, scale), &Device::flex())
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter().collect()
}

/// Both ways of computing the layer give the stored output, and its gradients pass the rounding.
#[test]
fn the_stored_case() {
    let plain = Device::flex();
    let out = tensor("out", &plain);
    let integers = linear(
        tensor("x", &plain).unsqueeze(),
        tensor("w", &plain).transpose(),
        None,
        &[tensor("w", &plain).dims()[0]],
    );
    assert_close("integers", integers.squeeze_dim(0), out.clone(), 2e-6);
    let device = Device::flex().autodiff();
    let (x, w) = (tensor("x", &device).require_grad(), tensor("w", &device).require_grad());
    let rounded = linear(x.clone().unsqueeze(), w.clone().transpose(), None, &[w.dims()[0]]);
    assert_close("rounded", rounded.clone().squeeze_dim::<2>(0).inner(), out, 2e-6);
    let gradients = (rounded.squeeze_dim::<2>(0) * tensor("dout", &device)).sum().backward();
    assert_close("dx", x.grad(&gradients).unwrap(), tensor("dx", &plain), 2e-6);
    assert_close("dw", w.grad(&gradients).unwrap(), tensor("dw", &plain), 2e-6);
}

/// Layers side by side have a scale each; a bias is added as it is.
#[test]
fn layers_side_by_side_are_apart() {
    let (left, right) = (normal([20, 7], 0.1), normal([20, 5], 3.0));
    let (x, bias) = (normal([1, 6, 20], 1.0), normal([12], 1.0));
    let both = Tensor::cat(vec![left.clone(), right.clone()], 1);
    let one = |w: Tensor<2>, first: usize, width: usize| {
        linear(x.clone(), w, Some(bias.clone().narrow(0, first, width)), &[width])
    };
    let apart = Tensor::cat(vec![one(left, 0, 7), one(right, 7, 5)], 2);
    let packed = Packed::default();
    let both = Layers { weight: both, bias: Some(bias), widths: &[7, 5], packed: &packed };
    assert_close("side by side", both.forward(x.clone()), apart.clone(), 1e-6);
    assert_eq!(values(both.forward_some(x.clone(), 1..2)), values(apart.narrow(2, 7, 5)));
    let learning = x.clone().autodiff();
    let bias = both.bias.clone().map(Tensor::autodiff);
    let rounded = Layers { weight: both.weight.clone().autodiff(), bias, ..both };
    assert_close(
        "learning",
        rounded.forward_some(learning, 1..2).inner(),
        rounded.forward(x.autodiff()).inner().narrow(2, 7, 5),
        1e-6,
    );
}

/// Weights are packed at the first call, and again when they are others, wherever they were put.
#[test]
fn packed_weights_are_never_stale() {
    let (x, packed) = (normal([1, 3, 20], 1.0), Packed::default());
    let check = |weight: &Tensor<2>, what: &str| {
        let [_, width] = weight.dims();
        let layers = Layers { weight: weight.clone(), bias: None, widths: &[width], packed: &packed };
        assert_eq!(
            values(layers.forward(x.clone())),
            values(linear(x.clone(), weight.clone(), None, &[width])),
            "{what}"
        );
    };
    let mut weight = normal([20, 20], 1.0);
    check(&weight, "first");
    let bytes = TernaryMatrix::bytes([20, 20]);
    assert_eq!(packed.bytes(), bytes);
    let of = |weight: &Tensor<2>| packed.matrices(weight, &[20]).unwrap();
    assert!(std::sync::Arc::ptr_eq(&of(&weight), &of(&weight.clone())), "packed twice");
    check(&weight.clone().transpose(), "the same memory, turned");
    for step in 0..5 {
        // Operations on the only tensor of some memory write to it in place.
        weight = weight.mul_scalar(-1.5).add_scalar(0.1 * f64::from(step));
        check(&weight, "changed");
        assert_eq!(packed.bytes(), bytes, "weights that are no more are still packed");
    }
    for _ in 0..5 {
        // New tensors like to lie where old ones were.
        drop(weight);
        weight = normal([20, 20], 1.0);
        check(&weight, "new");
    }
    assert_eq!(packed.clone().bytes(), bytes, "copies share what is packed");
    let halves = packed.matrices(&weight, &[8, 12]).unwrap();
    assert_eq!(halves.to_vec(), matrices(weight, &[8, 12]).unwrap(), "other layers in the same memory");
}

/// Learning, stored weights and copies: a module's result without autodiff is that of a new one with its weights.
#[test]
fn modules_forget_old_weights() {
    let device = Device::flex();
    let config = MultiHeadAttentionConfig::new(16, 4, Mechanism::preset("softmax").unwrap()).with_ternary(true);
    let x = normal([2, 5, 16], 1.0);
    let context = |module: &MultiHeadAttention| values(module.forward(MhaInput::self_attn(x.clone())).context);
    let fresh = |module: &MultiHeadAttention| {
        let module = config.init(&device).load_record(module.clone().into_record());
        assert_eq!(module.packed.bytes(), 0);
        context(&module)
    };
    let mut learning = config.init(&device.clone().autodiff());
    let mut optimiser = SgdConfig::new().init();
    let mut seen = vec![];
    for _ in 0..3 {
        let plain = learning.valid();
        assert_eq!(context(&plain), fresh(&plain));
        assert_eq!(context(&plain.clone()), context(&plain));
        assert!(!seen.contains(&context(&plain)), "nothing was learned");
        seen.push(context(&plain));
        assert_eq!(plain.packed.bytes(), 4 * TernaryMatrix::bytes([16, 16]));
        let loss = learning.forward(MhaInput::self_attn(Tensor::from_inner(x.clone()))).context.powi_scalar(2).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &learning);
        learning = optimiser.step(0.1, learning, gradients);
    }
    let other = config.init(&device);
    let loaded = learning.valid().load_record(other.clone().into_record());
    assert_eq!(context(&loaded), context(&other));
}

/// A model that only runs has the same bits without its real weights, which nothing keeps in memory; where they would be needed
/// it says so by NaN.
#[test]
fn packed_models_need_no_real_weights() {
    let device = Device::flex();
    let config = MultiHeadAttentionConfig::new(16, 4, Mechanism::preset("softmax").unwrap());
    let x = normal([2, 5, 16], 1.0);
    let context = |module: &MultiHeadAttention| values(module.forward(MhaInput::self_attn(x.clone())).context);
    for config in [config.clone().with_extra_proj(true), config.clone().with_kv_heads(Some(2))] {
        let module = config.clone().with_ternary(true).init(&device);
        let (expected, matrices) = (context(&module), module.ternary_matrices().unwrap());
        let weight = module.output.weight.val();
        let memory = std::sync::Arc::downgrade(&weight.clone().try_into_primitive::<Flex>().unwrap().data_arc());
        let packed = module.into_packed().unwrap();
        drop(weight);
        assert_eq!(memory.strong_count(), 0, "the real weights are still there");
        assert_eq!(context(&packed), expected);
        assert_eq!(context(&packed.clone()), expected);
        assert_eq!(packed.ternary_matrices().unwrap(), matrices);
        let bytes = |matrix: &TernaryMatrix| TernaryMatrix::bytes(matrix.shape());
        assert_eq!(packed.packed.bytes(), matrices.iter().map(bytes).sum::<usize>());
        assert_eq!(context(&packed.clone().into_packed().unwrap()), expected, "twice");
        let stored = config.clone().with_ternary(true).init(&device).load_record(packed.into_record());
        assert!(context(&stored).iter().all(|x| x.is_nan()), "what was dropped cannot be stored");
    }
    let real = config.init(&device);
    assert_eq!(context(&real.clone().into_packed().unwrap()), context(&real));
    let softmax = Mechanism::preset("softmax").unwrap();
    let language = LanguageConfig { context: 8, ..LanguageConfig::new(20, 8, vec![softmax.clone()]) };
    let text = TextConfig { dim: 16, heads: 2, mlp_dim: 24, depth: 2, ternary: true, ..language.text.clone() };
    let model = LanguageConfig { text: text.clone(), ..language }.try_init(&device).unwrap();
    let tokens = Tensor::<2, Int>::from_ints([[1, 2, 3, 4]], &device);
    let expected = values(model.try_forward(tokens.clone()).unwrap());
    assert_eq!(values(model.into_packed().unwrap().try_forward(tokens.clone()).unwrap()), expected);
    let classifier = text.try_init_classifier(3, &device).unwrap();
    let expected = values(classifier.try_forward(tokens.clone(), None).unwrap());
    assert_eq!(values(classifier.into_packed().unwrap().try_forward(tokens, None).unwrap()), expected);
}

/// What is not finite shows in the output, and nowhere else.
#[test]
fn values_that_are_not_finite_show() {
    let device = Device::flex();
    let x = Tensor::<3>::from_floats([[[1.0, f32::NAN], [1.0, -1.0]]], &device);
    let out = linear(x, Tensor::from_floats([[0.5], [1.0]], &device), None, &[1]);
    let out: Vec<f32> = out.into_data().iter::<f32>().collect();
    assert!(out[0].is_nan() && out[1].is_finite(), "{out:?}");
}

/// With and without autodiff a module gives the same rows, for every way of projecting.
#[test]
fn modules_agree_with_and_without_autodiff() {
    let device = Device::flex();
    for (mechanism, tied, kv_heads) in [
        ("softmax", false, Some(2)),
        ("softmax", true, None),
        ("uniform", false, None),
        ("linear-infsa", false, None),
        ("fna", false, None),
    ] {
        let config = MultiHeadAttentionConfig::new(16, 4, Mechanism::preset(mechanism).unwrap());
        let config = config.with_tied(Some(tied)).with_kv_heads(kv_heads).with_extra_proj(true).with_ternary(true);
        let module = config.init(&device.clone().autodiff());
        let x = Tensor::<3>::random([2, 9, 16], Distribution::Normal(0.0, 1.0), &device);
        let rounded = module.forward(MhaInput::self_attn(Tensor::from_inner(x.clone()))).context.inner();
        let plain = module.valid();
        let integers = plain.forward(MhaInput::self_attn(x.clone())).context;
        // A value at the middle between two of 255 may be rounded either way.
        assert_close(mechanism, integers, rounded, 0.02);
        let real = config.with_ternary(false).init(&device).load_record(plain.clone().into_record());
        let real = real.forward(MhaInput::self_attn(x)).context;
        let distance =
            (real.clone() - plain.forward(MhaInput::self_attn(Tensor::zeros([2, 9, 16], &device))).context).abs();
        assert!(distance.max().into_scalar::<f32>() > 1e-3, "{mechanism}: the rounding shows nothing");
    }
}

/// Every projection of a block is counted, each weight once.
#[test]
fn matrices_are_those_of_the_blocks() {
    let device = Device::flex();
    let base = VitConfig::new([8, 8], 1, 4, 3, Mechanism::preset("softmax").unwrap());
    let config = VitConfig { dim: 16, depth: 2, heads: 2, mlp_dim: 24, ternary: true, ..base };
    let model = config.init(&device);
    let matrices: Vec<TernaryMatrix> =
        model.blocks.iter().flat_map(|block| block.ternary_matrices().unwrap()).collect();
    let weights: usize = matrices.iter().map(|matrix| matrix.shape().iter().product::<usize>()).sum();
    assert_eq!(weights, 2 * (4 * 16 * 16 + 2 * 16 * 24));
    let real = VitConfig { ternary: false, ..config }.init(&device);
    assert!(real.blocks.iter().all(|block| block.ternary_matrices().unwrap().is_empty()));
    assert_eq!(model.forward(Tensor::zeros([2, 1, 8, 8], &device)).dims(), [2, 3]);
}

#[test]
fn what_cannot_be_ternary_is_refused() {
    let config =
        TextConfig { orthogonal: true, ternary: true, ..TextConfig::new(10, Mechanism::preset("fna").unwrap()) };
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("orthogonal") && error.contains("ternary"), "{error}");
}
