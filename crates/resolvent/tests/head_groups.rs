//! Heads of one layer with mechanisms of their own: each is that head of a module in which all have its mechanism.

mod support;

use burn::{
    module::Param,
    tensor::{Bool, Device, Tensor, TensorData},
};
use resolvent::{
    Error, Mechanism,
    attention::{HeadGroup, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
};
use support::random;

const D_MODEL: usize = 24;
const HEADS: usize = 4;
const SEQ: usize = 9;

fn mechanism(json: &str) -> Mechanism {
    Mechanism::from_json(json).unwrap()
}

fn group(heads: &[usize], json: &str) -> HeadGroup {
    HeadGroup { heads: heads.to_vec(), mechanism: mechanism(json) }
}

const SOFTMAX: &str = r#"{"mechanism": "softmax"}"#;
const LOCAL: &str = r#"{"mechanism": "local", "window": 2}"#;
const POOLED: &str = r#"{"mechanism": "linear-infsa"}"#;
const UNIFORM: &str = r#"{"mechanism": "uniform"}"#;

fn module(device: &Device) -> MultiHeadAttention {
    MultiHeadAttentionConfig::new(D_MODEL, HEADS, mechanism(SOFTMAX)).with_tied(Some(false)).init(device)
}

/// The same weights with one mechanism for all heads.
fn all(module: &MultiHeadAttention, json: &str) -> MultiHeadAttention {
    module.clone().with_head_groups(vec![group(&[0, 1, 2, 3], json)]).unwrap()
}

/// Of the output, what is before the last projection: that is the identity here.
fn by_head(module: &mut MultiHeadAttention, device: &Device) {
    module.output.weight = Param::from_tensor(Tensor::eye(D_MODEL, device));
    module.output.bias = None;
}

#[track_caller]
fn assert_close<const D: usize>(got: Tensor<D>, expected: Tensor<D>, what: &str) {
    let worst = (got - expected.clone()).abs().max().into_scalar::<f32>();
    let unit = expected.abs().max().into_scalar::<f32>();
    assert!(worst <= 1e-5 * unit, "{what}: off by {worst} of {unit}");
}

fn padding(device: &Device) -> Tensor<2, Bool> {
    let padded: Vec<bool> = (0..2 * SEQ).map(|at| at >= SEQ + 6).collect();
    Tensor::from_data(TensorData::new(padded, [2, SEQ]), device)
}

#[test]
fn each_head_is_that_of_a_module_with_its_mechanism() {
    let device = Device::flex();
    let mut module = module(&device);
    by_head(&mut module, &device);
    let groups = vec![group(&[3, 0], LOCAL), group(&[1], POOLED), group(&[2], SOFTMAX)];
    let grouped = module.clone().with_head_groups(groups).unwrap();
    let tokens = random([2, SEQ, D_MODEL], &device);
    let input = || MhaInput::self_attn(tokens.clone()).mask_pad(padding(&device));
    let context = |module: &MultiHeadAttention| module.forward(input()).context;
    let got = context(&grouped);
    for (head, json) in [LOCAL, POOLED, SOFTMAX, LOCAL].into_iter().enumerate() {
        let own = |x: Tensor<3>| x.narrow(2, head * D_MODEL / HEADS, D_MODEL / HEADS);
        assert_close(own(got.clone()), own(context(&all(&module, json))), json);
    }
    let plain = MultiHeadAttention { mechanism: mechanism(LOCAL), ..module.clone() };
    assert_close(context(&all(&module, LOCAL)), context(&plain), "one group of all heads");
    let none = grouped.with_head_groups(Vec::new()).unwrap();
    assert_close(context(&none), context(&module), "no groups");
}

#[test]
fn shared_heads_masks_and_decoding() {
    let device = Device::flex();
    let config = MultiHeadAttentionConfig::new(D_MODEL, HEADS, mechanism(SOFTMAX)).with_tied(Some(false));
    let module = config.with_kv_heads(Some(2)).with_rotary(true).init(&device);
    let groups = vec![group(&[0, 1], LOCAL), group(&[2], UNIFORM), group(&[3], SOFTMAX)];
    let grouped = module.with_head_groups(groups).unwrap();
    let tokens = random([2, SEQ, D_MODEL], &device);
    let whole = grouped.forward(MhaInput::self_attn(tokens.clone()).causal()).context;
    for steps in [&[1; SEQ][..], &[4, 1, 4]] {
        let (mut past, mut rows, mut first) = (None, Vec::new(), 0);
        for &step in steps {
            rows.push(grouped.attend_next(tokens.clone().narrow(1, first, step), &mut past).unwrap());
            first += step;
        }
        assert_close(Tensor::cat(rows, 1), whole.clone(), &format!("{steps:?}"));
    }
}

#[test]
fn gradients_are_those_of_the_heads() {
    let device = Device::flex().autodiff();
    let mut module = module(&device);
    by_head(&mut module, &device);
    let grouped = module.clone().with_head_groups(vec![group(&[0, 2], POOLED), group(&[1, 3], SOFTMAX)]).unwrap();
    let (tokens, dout) = (random([2, SEQ, D_MODEL], &device), random([2, SEQ, D_MODEL], &device));
    let gradient = |module: &MultiHeadAttention, heads: &[usize]| {
        let context = module.forward(MhaInput::self_attn(tokens.clone())).context * dout.clone();
        let width = D_MODEL / HEADS;
        let own = heads.iter().map(|&head| context.clone().narrow(2, head * width, width).sum());
        let loss = own.reduce(|a, b| a + b).unwrap();
        module.projection.weight.val().grad(&loss.backward()).unwrap()
    };
    let sum = gradient(&all(&module, POOLED), &[0, 2]) + gradient(&all(&module, SOFTMAX), &[1, 3]);
    assert_close(gradient(&grouped, &[0, 1, 2, 3]), sum, "weights of the projection");
}

#[test]
fn what_has_no_groups_is_refused() {
    let device = Device::flex();
    let refused = |module: MultiHeadAttention, groups: Vec<HeadGroup>, told: &str| {
        let error = module.with_head_groups(groups).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    };
    refused(module(&device), vec![group(&[0, 1, 2], SOFTMAX)], "head 3 has no mechanism");
    refused(module(&device), vec![group(&[0, 1, 2, 3, 1], SOFTMAX)], "is there twice");
    // A file may say that there are more heads than any memory has room for the numbers of.
    let told = |heads: &[usize]| HeadGroup::check(&[group(heads, SOFTMAX)], usize::MAX).unwrap_err();
    assert!(told(&[1, 0, 3]).contains("head 2 has no mechanism") && told(&[1]).contains("head 0 has no mechanism"));
    assert!(told(&[0, usize::MAX]).contains("there are fewer"));
    refused(module(&device), vec![group(&[0, 1, 2, 3, 4], SOFTMAX)], "there are fewer");
    refused(module(&device), vec![group(&[0, 1, 2, 3], r#"{"mechanism": "soft"}"#)], "one with queries and keys");
    let of = |json: &str| MultiHeadAttentionConfig::new(D_MODEL, HEADS, mechanism(json)).init(&device);
    refused(of(r#"{"mechanism": "soft"}"#), vec![group(&[0, 1, 2, 3], SOFTMAX)], "softmax or another");

    let grouped = all(&module(&device), LOCAL);
    let tokens = random([1, SEQ, D_MODEL], &device);
    let error = grouped.try_forward(MhaInput::new(tokens.clone(), tokens.clone(), tokens)).unwrap_err();
    let told = error.to_string();
    assert!(matches!(error, Error::Mechanism(_)) && told.contains("mechanisms of their own"), "{told}");
}
