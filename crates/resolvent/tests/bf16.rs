//! Products of bf16 in modules and models: how far from f32, forward and backward, what they are for, and what is refused.

mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::{
    module::Module,
    tensor::{Bool, DType, Device, Tensor, activation, module},
};
use resolvent::{
    Dropout, Error, Inputs, Mask, Mechanism, Precision, Sequences, Strategy, attend,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    models::{Block, Pool, TextConfig, Visible, VitConfig},
    plan,
};
use resolvent_kernels::{Tol, relative_distance};
use support::random;

/// Seeds the generator that initial weights are drawn from, which is one per process, for as long as the guard lives.
fn seeded(device: &Device) -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(7);
    alone
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn distance<const D: usize>(x: Tensor<D>, y: Tensor<D>) -> f64 {
    relative_distance(&values(x), &values(y))
}

fn config(mechanism: &str, precision: Precision) -> VitConfig {
    let base = VitConfig::new([8; 2], 1, 4, 3, Mechanism::preset(mechanism).unwrap().with_max_tokens(24));
    VitConfig { dim: 32, heads: 2, mlp_dim: 48, depth: 1, pool: Pool::Cls, precision, ..base }
}

/// A block of f32, and the same in bf16.
fn blocks(mechanism: &str, device: &Device) -> [Block; 2] {
    let exact = config(mechanism, Precision::Full).init(device).blocks.remove(0);
    let mut rounded = exact.clone();
    rounded.attention.precision = Precision::Bf16;
    [exact, rounded]
}

/// `x W + b` in tensors of bf16, as a naive mixed precision computes it.
fn naive_layer(layer: &burn::nn::Linear, x: Tensor<3>) -> Tensor<3> {
    let half = |x: Tensor<2>| x.cast(DType::BF16);
    let bias = layer.bias.as_ref().map(|bias| bias.val().cast(DType::BF16));
    module::linear(x.cast(DType::BF16), half(layer.weight.val()), bias)
}

/// A pre-norm block of softmax whose projections, attention and MLP store bf16; `hidden [batch, seq]` are padding.
fn naive(block: &Block, tokens: Tensor<3>, hidden: &Tensor<2, Bool>) -> Tensor<3> {
    let ([batch, seq, dim], heads) = (tokens.dims(), block.attention.n_heads);
    let packed = naive_layer(&block.attention.projection, block.attention_norm.forward(tokens.clone()));
    let part =
        |n: usize| packed.clone().narrow(2, n * dim, dim).reshape([batch, seq, heads, dim / heads]).swap_dims(1, 2);
    let scores = part(0).matmul(part(1).transpose()) / ((dim / heads) as f64).sqrt();
    let shape = scores.shape();
    let absent = hidden.clone().reshape([batch, 1, 1, seq]).expand(shape);
    let weights = activation::softmax(scores.cast(DType::F32).mask_fill(absent, f32::NEG_INFINITY), 3);
    let context = weights.cast(DType::BF16).matmul(part(2)).swap_dims(1, 2).reshape([batch, seq, dim]);
    let context = naive_layer(&block.attention.output, context).cast(DType::F32);
    let absent = hidden.clone().reshape([batch, seq, 1]).expand(context.shape());
    let attended = tokens + context.mask_fill(absent, 0.0);
    let hidden = activation::gelu(naive_layer(&block.mlp_in, block.mlp_norm.forward(attended.clone())));
    attended + naive_layer(&block.mlp_out, hidden).cast(DType::F32)
}

/// The result of the tokens that are no padding, and all gradients of a weighted sum of it, with their names.
fn solution(block: &Block, x: &Tensor<3>, y: Tensor<3>, hidden: &Tensor<2, Bool>) -> Vec<(&'static str, Vec<f64>)> {
    let [batch, seq, _] = y.dims();
    let y = y.clone().mask_fill(hidden.clone().reshape([batch, seq, 1]).expand(y.shape()), 0.0);
    let weights = Tensor::arange(0..y.shape().num_elements() as i64, &y.device()).float().sin() + 0.5;
    let gradients = (weights.reshape(y.shape()) * y.clone()).sum().backward();
    let attention = &block.attention;
    let mut all = vec![("y", values(y)), ("dx", values(x.grad(&gradients).unwrap()))];
    for (names, layer) in [
        (["projection", "its bias"], &attention.projection),
        (["output", "its bias"], &attention.output),
        (["mlp_in", "its bias"], &block.mlp_in),
        (["mlp_out", "its bias"], &block.mlp_out),
    ] {
        all.push((names[0], values(layer.weight.val().grad(&gradients).unwrap())));
        all.push((names[1], values(layer.bias.as_ref().unwrap().val().grad(&gradients).unwrap())));
    }
    for (name, norm) in [("attention_norm", &block.attention_norm), ("mlp_norm", &block.mlp_norm)] {
        all.push((name, values(norm.gamma.val().grad(&gradients).unwrap())));
    }
    all
}

/// So few tokens that a call is shared out whole, and so many that blocks of them are.
#[test]
fn a_block_errs_at_most_twice_as_much_as_a_naive_computation() {
    let device = Device::flex().autodiff();
    let _alone = seeded(&device);
    let [exact, rounded] = blocks("softmax", &device);
    for [batch, seq] in [[3, 21], [2, 700]] {
        let hidden = Tensor::<2>::zeros([batch, seq], &device).slice_fill([0..1, seq - 5..seq], 1.0).greater_elem(0.5);
        let visible = Visible { padding: Some(hidden.clone()), ..Visible::default() };
        let x = random([batch, seq, 32], &device).require_grad();
        let of = |block: &Block| solution(block, &x, block.forward_visible(x.clone(), &visible).unwrap(), &hidden);
        let (exactly, got) = (of(&exact), of(&rounded));
        let naively = solution(&exact, &x, naive(&exact, x.clone(), &hidden), &hidden);
        for (((name, exact), (_, got)), (_, naive)) in exactly.iter().zip(&got).zip(&naively) {
            let [error, naive] = [got, naive].map(|x| relative_distance(x, exact));
            assert!(
                error <= Tol::OF_NAIVE_BF16 * naive,
                "{name} of [{batch}, {seq}]: {error:.2e}, naively {naive:.2e}"
            );
            // Gradients of biases are sums in f32.
            assert!(*name == "its bias" || error > 1e-5, "{name} of [{batch}, {seq}] is that of f32");
        }
    }
}

#[test]
fn padding_changes_no_bit_and_gets_no_gradient() {
    let device = Device::flex().autodiff();
    let _alone = seeded(&device);
    let [_, block] = blocks("softmax", &device);
    let hidden = Tensor::<2, Bool>::from_data([[false, false, true, false, true], [false; 5]], &device);
    let visible = Visible { padding: Some(hidden.clone()), ..Visible::default() };
    let x = random([2, 5, 32], &device);
    let absent = hidden.clone().reshape([2, 5, 1]).expand(x.shape());
    let solve = |x: Tensor<3>| {
        let x = x.require_grad();
        solution(&block, &x, block.forward_visible(x.clone(), &visible).unwrap(), &hidden)
    };
    let (one, other) = (solve(x.clone()), solve(x.mask_fill(absent.clone(), 3e4)));
    for ((name, one), (_, other)) in one.iter().zip(&other).filter(|((name, _), _)| *name != "dx") {
        assert_eq!(one, other, "{name}");
    }
    let dx = Tensor::<1>::from_data(one[1].1.as_slice(), &device).reshape([2, 5, 32]);
    assert_eq!(values(dx.mask_fill(absent.bool_not(), 0.0)), vec![0.0; 2 * 5 * 32]);
}

/// Projections and MLP are rounded around whichever operator. Rounding may move a token of `ssa` to another cluster.
#[test]
fn every_mechanism_trains() {
    let device = Device::flex().autodiff();
    let _alone = seeded(&device);
    for id in Mechanism::IDS {
        let [exact, rounded] = blocks(id, &device);
        let x = random([2, 24, 32], &device).require_grad();
        let of = |block: &Block| {
            let y = block.forward(x.clone()).unwrap();
            let gradients = y.clone().square().sum().backward();
            (y, x.grad(&gradients).unwrap())
        };
        let ((y, dx), (exact_y, exact_dx)) = (of(&rounded), of(&exact));
        let errors = [distance(y, exact_y), distance(dx, exact_dx)];
        let most = if id == "ssa" { 1.0 } else { 0.05 };
        assert!(errors.iter().all(|&error| error > 1e-5 && error < most), "{id}: {errors:?}");
    }
}

/// Layers with a ReLU between them, post-norm, and texts end to end: each as if it were alone, far nearer than bf16 is to f32.
#[test]
fn texts_end_to_end_are_texts_alone() {
    let device = Device::flex();
    let _alone = seeded(&device);
    let config = |precision| TextConfig {
        dim: 32,
        heads: 2,
        depth: 2,
        precision,
        ..TextConfig::new(20, Mechanism::preset("softmax").unwrap())
    };
    let model = config(Precision::Bf16).try_init_classifier(3, &device).unwrap();
    let tokens = Tensor::<2, burn::tensor::Int>::from_data([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]], &device);
    let ends = [0, 5, 12];
    let sequences = Sequences::new(&ends).unwrap();
    let together = model.forward_sequences(tokens.clone(), &sequences).unwrap();
    let alone = ends.windows(2).map(|ends| model.forward(tokens.clone().slice([0..1, ends[0]..ends[1]]), None));
    let alone = Tensor::cat(alone.collect(), 0);
    assert!(distance(together, alone.clone()) < 1e-6);
    let mut exact = config(Precision::Full).try_init_classifier(3, &device).unwrap().load_record(model.into_record());
    exact.encoder.blocks.iter_mut().for_each(|block| assert_eq!(block.attention.precision, Precision::Full));
    let texts = ends.windows(2).map(|ends| exact.forward(tokens.clone().slice([0..1, ends[0]..ends[1]]), None));
    let error = distance(alone, Tensor::cat(texts.collect(), 0));
    assert!(error > 1e-5 && error < 0.03, "{error}");
}

fn attention(mechanism: &str) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(16, 2, Mechanism::preset(mechanism).unwrap()).with_precision(Precision::Bf16)
}

/// Hidden pairs, which make another operator of `softmax`, hidden keys, dropped weights and shared heads.
#[test]
fn what_a_call_adds_is_kept() {
    let device = Device::flex();
    let _alone = seeded(&device);
    let rounded = attention("softmax").with_kv_heads(Some(1)).init(&device);
    let exact = MultiHeadAttention { precision: Precision::Full, ..rounded.clone() };
    let pairs =
        Tensor::<3>::from_data([[[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0], [0.0; 4], [0.0, 0.0, 1.0, 0.0]]], &device);
    let keys = Tensor::<2, Bool>::from_data([[false, true, false, false]], &device);
    let input = || MhaInput::self_attn(random([1, 4, 16], &device));
    for input in [
        input(),
        input().mask_attn(pairs.greater_elem(0.5)),
        input().hide_keys(keys),
        input().dropout(Dropout::weights(0.4, 3).unwrap()),
        input().causal(),
    ] {
        let error = distance(rounded.forward(input.clone()).context, exact.forward(input.clone()).context);
        assert!(error > 1e-5 && error < 0.02, "{input:?}: {error}");
    }
}

#[test]
fn decoding_is_near_the_whole() {
    let device = Device::flex();
    let _alone = seeded(&device);
    let module: MultiHeadAttention = attention("softmax").init(&device);
    let tokens = random([2, 7, 16], &device);
    let whole = module.forward(MhaInput::self_attn(tokens.clone()).causal()).context;
    let mut past = None;
    let rows = (0..7).map(|n| module.attend_next(tokens.clone().narrow(1, n, 1), &mut past).unwrap());
    let error = distance(Tensor::cat(rows.collect(), 1), whole);
    assert!(error < 0.01, "{error}");
}

#[test]
fn plans_tell_what_runs() {
    let device = Device::flex();
    let x = || random([1, 2, 6, 8], &device);
    let rounded = ["softmax", "infsa", "fna", "cosine", "sigmoid"].map(|id| (id, Precision::Bf16));
    for (id, runs) in rounded.into_iter().chain([("linear", Precision::Full)]) {
        let mut inputs = Inputs::new(x(), x(), x());
        inputs.extras = inputs.extras.with_precision(Precision::Bf16);
        let plan = plan(&inputs, &Mechanism::preset(id).unwrap(), &Mask::none(), Strategy::Auto).unwrap();
        let arithmetic = plan.kernel.unwrap().arithmetic;
        assert_eq!(
            (plan.strategy, arithmetic.asked, arithmetic.runs),
            (Strategy::Fused, Precision::Bf16, runs),
            "{id}"
        );
    }
}

/// Nothing is rounded, or left unrounded, in silence.
#[test]
fn what_has_no_such_products_is_refused() {
    let device = Device::flex();
    let told = |error: Error, parts: &[&str]| {
        let message = error.to_string();
        parts.iter().for_each(|part| assert!(message.contains(part), "`{message}` lacks `{part}`"));
    };
    told(attention("softmax").with_ternary(true).validate().unwrap_err(), &["`ternary`", "precision bf16"]);
    for strategy in [Strategy::Composed, Strategy::Reference] {
        told(attention("softmax").with_strategy(strategy).validate().unwrap_err(), &["`strategy`", "auto or fused"]);
        let x = || random([1, 2, 6, 8], &device);
        let mut inputs = Inputs::new(x(), x(), x());
        inputs.extras = inputs.extras.with_precision(Precision::Bf16);
        let error = attend(&inputs, &Mechanism::preset("softmax").unwrap(), &Mask::none(), strategy).unwrap_err();
        assert!(matches!(error, Error::Precision { op: "attend", .. }), "{error}");
        told(error, &["`bf16`", &strategy.to_string(), "Strategy::Auto"]);
    }
    let module = attention("softmax").init(&device);
    for dtype in [DType::F64, DType::BF16] {
        let error = module.try_forward(MhaInput::self_attn(random([1, 3, 16], &device).cast(dtype))).unwrap_err();
        assert!(matches!(error, Error::Precision { op: "attention", .. }), "{error}");
        told(error, &["`bf16`", &format!("{dtype:?}"), "cast"]);
    }
    let forced = MultiHeadAttention { ternary: true, ..module.clone() };
    told(forced.try_forward(MhaInput::self_attn(random([1, 3, 16], &device))).unwrap_err(), &["`ternary`"]);
    let forced = MultiHeadAttention { strategy: Strategy::Composed, ..module };
    told(forced.try_forward(MhaInput::self_attn(random([1, 3, 16], &device))).unwrap_err(), &["composed"]);
}
