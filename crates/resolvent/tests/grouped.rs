//! Heads of queries that share keys and values, and causal attention token by token.

mod support;

use burn::{
    module::{Module, Param},
    tensor::{Device, Int, Tensor},
};
use resolvent::{
    Error, Inputs, Mask, Mechanism, Parameter, Sequences, Strategy, attend, attend_sequences,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
};
use support::random;

const D_MODEL: usize = 24;
const HEADS: usize = 6;
const HEAD_DIM: usize = D_MODEL / HEADS;

fn config(mechanism: Mechanism) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(D_MODEL, HEADS, mechanism).with_tied(Some(false))
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

#[track_caller]
fn assert_close<const D: usize>(got: Tensor<D>, expected: Tensor<D>, what: &str) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let (got, expected) = (values(got), values(expected));
    let unit = expected.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
    let worst = got.iter().zip(&expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(worst < 2e-5 * unit, "{what}: off by {worst} of {unit}");
}

/// `x`, whose last axis holds the heads of keys or values side by side, with every head three times.
fn thrice<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let heads = x.dims()[D - 1] / HEAD_DIM;
    let each = (0..heads).flat_map(|head| [head; 3]);
    Tensor::cat(each.map(|head| x.clone().narrow(D - 1, head * HEAD_DIM, HEAD_DIM)).collect(), D - 1)
}

/// The module with a head of keys and values of its own for every head of queries, which computes the same as `grouped`.
fn spread(grouped: &MultiHeadAttention, config: &MultiHeadAttentionConfig, device: &Device) -> MultiHeadAttention {
    fn wide<const D: usize>(packed: Tensor<D>) -> Tensor<D> {
        let width = packed.dims()[D - 1];
        let parts: Vec<_> = match width == 2 * HEAD_DIM {
            true => vec![thrice(packed)],
            false => {
                let part = |first| thrice(packed.clone().narrow(D - 1, first, 2 * HEAD_DIM));
                vec![packed.clone().narrow(D - 1, 0, D_MODEL), part(D_MODEL), part(D_MODEL + 2 * HEAD_DIM)]
            }
        };
        Tensor::cat(parts, D - 1)
    }
    let mut whole = config.clone().with_kv_heads(None).init(device);
    whole.projection.weight = Param::from_tensor(wide(grouped.projection.weight.val()).detach());
    whole.projection.bias = grouped.projection.bias.as_ref().map(|bias| Param::from_tensor(wide(bias.val()).detach()));
    (whole.output, whole.landmarks) = (grouped.output.clone(), grouped.landmarks.clone());
    whole
}

#[test]
fn heads_that_share_keys_are_heads_with_equal_keys() {
    let device = Device::flex();
    for id in Mechanism::IDS.into_iter().filter(|id| !id.starts_with("soft-") && *id != "soft") {
        let rotary = id != "laplacian";
        let mechanism = Mechanism::preset(id).unwrap().with_max_tokens(64);
        let config = config(mechanism).with_kv_heads(Some(2)).with_rotary(rotary);
        let grouped = config.init(&device);
        let learned = grouped.learned.free(Parameter::Gamma).map_or(0, |_| HEADS);
        assert_eq!(grouped.num_params(), config.parameter_count() + learned, "{id}");
        let whole = spread(&grouped, &config, &device);
        let tokens = random([2, 9, D_MODEL], &device);
        let input = || MhaInput::self_attn(tokens.clone());
        assert_close(grouped.forward(input()).context, whole.forward(input()).context, id);
        if !rotary {
            let input = || MhaInput::new(tokens.clone(), tokens.clone(), tokens.clone());
            assert_close(grouped.forward(input()).context, whole.forward(input()).context, &format!("{id}, cross"));
        }
    }
}

#[test]
fn a_shared_key_learns_from_all_that_share_it() {
    let device = Device::flex().autodiff();
    let config = config(Mechanism::preset("softmax").unwrap()).with_kv_heads(Some(2)).with_rotary(true);
    let grouped = config.init(&device);
    let whole = spread(&grouped, &config, &device);
    let (tokens, dout) = (random([2, 7, D_MODEL], &device), random([2, 7, D_MODEL], &device));
    let gradient = |module: &MultiHeadAttention| {
        let context = module.forward(MhaInput::self_attn(tokens.clone()).causal()).context;
        module.projection.weight.val().grad(&(context * dout.clone()).sum().backward()).unwrap()
    };
    let (of_grouped, of_whole) = (gradient(&grouped), gradient(&whole));
    let keys = of_whole.clone().narrow(1, D_MODEL, D_MODEL).reshape([D_MODEL, 2, 3, HEAD_DIM]).sum_dim(2);
    assert_close(of_grouped.clone().narrow(1, D_MODEL, 2 * HEAD_DIM), keys.reshape([D_MODEL, 2 * HEAD_DIM]), "keys");
    assert_close(of_grouped.narrow(1, 0, D_MODEL), of_whole.narrow(1, 0, D_MODEL), "queries");
}

/// Heads of keys and values that each serve three heads of queries, and what their copies give.
fn shared_and_repeated(
    id: &str,
    strategy: Strategy,
    sequences: Option<&Sequences>,
) -> Result<[Vec<Tensor<4>>; 2], Error> {
    let device = Device::flex().autodiff();
    let mechanism = Mechanism::preset(id)?.with_max_tokens(64);
    let (batch, seq) = (if sequences.is_some() { 1 } else { 2 }, 12);
    let [q, dout] = [6, 6].map(|heads| random([batch, heads, seq, 4], &device));
    let [k, v] = [2, 2].map(|heads| random([batch, heads, seq, 4], &device).detach().require_grad());
    let q = q.detach().require_grad();
    let thrice = |x: &Tensor<4>| {
        let heads = (0..6).map(|head| x.clone().narrow(1, head / 3, 1)).collect();
        Tensor::cat(heads, 1)
    };
    let solve = |k: Tensor<4>, v: Tensor<4>| {
        let inputs = Inputs::new(q.clone(), k, v);
        match sequences {
            Some(sequences) => attend_sequences(&inputs, &mechanism, sequences, false, strategy),
            None => attend(&inputs, &mechanism, &Mask::none(), strategy),
        }
    };
    let of = |out: Tensor<4>| {
        let gradients = (out.clone() * dout.clone()).sum().backward();
        let gradient = |x: &Tensor<4>| x.grad(&gradients).unwrap_or_else(|| x.clone().inner().zeros_like());
        vec![out.inner(), gradient(&q), gradient(&k), gradient(&v)]
    };
    Ok([of(solve(k.clone(), v.clone())?.out), of(solve(thrice(&k), thrice(&v))?.out)])
}

#[test]
fn keys_of_a_call_may_serve_several_heads() {
    let sequences = Sequences::new(&[0, 5, 12]).unwrap();
    for id in Mechanism::IDS.into_iter().filter(|id| !["soft", "soft-pp", "linear-infsa"].contains(id)) {
        for (strategy, packed) in
            [(Strategy::Auto, None), (Strategy::Composed, None), (Strategy::Auto, Some(&sequences))]
        {
            // What is projected is as long as the longest sequence, whichever it is.
            if packed.is_some() && id == "linformer" {
                continue;
            }
            let [got, expected] = shared_and_repeated(id, strategy, packed).unwrap_or_else(|e| panic!("{id}: {e}"));
            for (n, (got, expected)) in got.into_iter().zip(expected).enumerate() {
                assert_close(got, expected, &format!("{id} {strategy} {}, {n}", packed.is_some()));
            }
        }
    }
}

#[test]
fn heads_of_keys_that_divide_no_heads_are_refused() {
    let device = Device::flex();
    let x = |heads| random([1, heads, 5, 4], &device);
    for (k, v) in [(4, 4), (0, 0), (12, 12), (2, 3)] {
        let inputs = Inputs::new(x(6), x(k), x(v));
        for strategy in [Strategy::Auto, Strategy::Composed] {
            let error = attend(&inputs, &Mechanism::preset("softmax").unwrap(), &Mask::none(), strategy).unwrap_err();
            assert!(error.to_string().contains("heads"), "{error}");
        }
    }
}

#[test]
fn groups_are_refused_where_queries_are_keys() {
    for id in ["soft", "soft-pp", "linear-infsa"] {
        let config = MultiHeadAttentionConfig::new(D_MODEL, HEADS, Mechanism::preset(id).unwrap());
        let error = config.with_kv_heads(Some(2)).validate().unwrap_err();
        let message = error.to_string();
        assert!(
            matches!(error, Error::Mechanism(_)) && message.contains(id) && message.contains("kv_heads"),
            "{message}"
        );
    }
    for heads in [0, 4, 12] {
        let message = config(Mechanism::preset("softmax").unwrap()).with_kv_heads(Some(heads)).validate();
        let message = message.unwrap_err().to_string();
        assert!(message.contains("kv_heads") && message.contains(&heads.to_string()), "{message}");
    }
    let message = config(Mechanism::preset("fna").unwrap()).with_kv_heads(Some(3)).with_orthogonal(true).validate();
    assert!(message.unwrap_err().to_string().contains("orthogonal"));
}

/// Every mechanism with a causal form, and options that change how it is decoded.
const CAUSAL: [&str; 13] = [
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "uniform"}"#,
    r#"{"mechanism": "infsa"}"#,
    r#"{"mechanism": "cosine"}"#,
    r#"{"mechanism": "relu"}"#,
    r#"{"mechanism": "local", "window": 5, "sinks": 2, "bias": "alibi"}"#,
    r#"{"mechanism": "fna"}"#,
    r#"{"mechanism": "fna", "norm_exponent": 0.5}"#,
    r#"{"mechanism": "laplacian-exact", "whitening": "none", "centering": "none"}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid"}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid", "cluster_on": "keys", "clusters": 5, "global_tokens": [0, 9]}"#,
    r#"{"mechanism": "ssa"}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid", "score": "cosine-exp"}"#,
];

#[test]
fn tokens_one_by_one_are_as_the_whole() {
    let device = Device::flex();
    for json in CAUSAL {
        let untied = [(false, None), (false, Some(2))];
        // The clusters of `ssa` need queries and keys of their own.
        let tied = (!json.contains("ssa")).then_some((true, None));
        for (tied, kv_heads) in untied.into_iter().chain(tied) {
            let config = MultiHeadAttentionConfig::new(D_MODEL, HEADS, Mechanism::from_json(json).unwrap());
            let config = config.with_tied(Some(tied)).with_kv_heads(kv_heads).with_causal_span(Some(40));
            let module = config.with_rotary(true).init(&device);
            let tokens = random([2, 23, D_MODEL], &device);
            let whole = module.forward(MhaInput::self_attn(tokens.clone()).causal()).context;
            for steps in [&[1; 23][..], &[7, 1, 1, 14], &[23]] {
                let (mut past, mut rows, mut first) = (None, vec![], 0);
                for &step in steps {
                    rows.push(module.attend_next(tokens.clone().narrow(1, first, step), &mut past).unwrap());
                    first += step;
                }
                assert_eq!(past.unwrap().len(), 23);
                assert_close(
                    Tensor::cat(rows, 1),
                    whole.clone(),
                    &format!("{json} tied {tied} {kv_heads:?} {steps:?}"),
                );
            }
        }
    }
}

/// What is kept of a window does not grow, and rows are those of the whole after the ring has gone round.
#[test]
fn a_window_is_kept_in_bounded_memory() {
    let device = Device::flex();
    let local = Mechanism::from_json(r#"{"mechanism": "local", "window": 5, "sinks": 1}"#).unwrap();
    let module = config(local).with_kv_heads(Some(2)).with_rotary(true).init(&device);
    let tokens = random([1, 150, D_MODEL], &device);
    let whole = module.forward(MhaInput::self_attn(tokens.clone()).causal()).context;
    let (mut past, mut rows, mut bytes) = (None, vec![], vec![]);
    for (first, step) in [(0, 60)].into_iter().chain((60..150).map(|first| (first, 1))) {
        rows.push(module.attend_next(tokens.clone().narrow(1, first, step), &mut past).unwrap());
        bytes.push(past.as_ref().unwrap().bytes());
    }
    assert!(bytes.iter().all(|&now| now == bytes[0]), "{bytes:?}");
    assert_close(Tensor::cat(rows, 1), whole, "window");
}

#[test]
fn a_span_makes_clusters_independent_of_the_length() {
    let device = Device::flex();
    let ssa = Mechanism::from_json(r#"{"mechanism": "ssa", "estimator": "centroid"}"#).unwrap();
    let module = config(ssa.clone()).with_causal_span(Some(64)).init(&device);
    let tokens = random([1, 64, D_MODEL], &device);
    let rows = |module: &MultiHeadAttention, seq: usize| {
        let input = MhaInput::self_attn(tokens.clone().narrow(1, 0, seq)).causal();
        values(module.forward(input).context.narrow(1, 0, 20))
    };
    assert_eq!(rows(&module, 20), rows(&module, 64));
    // Pairs that a mask hides are of the call's own length, to which nothing is added.
    let pairs = config(Mechanism::preset("ssa").unwrap()).with_causal_span(Some(64)).init(&device);
    let hidden = Tensor::<1, Int>::arange(0..400, &device).equal_elem(203).reshape([1, 20, 20]);
    let input = MhaInput::self_attn(tokens.clone().narrow(1, 0, 20)).causal().mask_attn(hidden);
    assert_eq!(pairs.try_forward(input).unwrap().context.dims(), [1, 20, D_MODEL]);
    let module = config(ssa).init(&device);
    assert_ne!(rows(&module, 20), rows(&module, 64), "without one the length counts");

    let module = config(Mechanism::preset("ssa").unwrap()).with_causal_span(Some(10)).init(&device);
    let error = module.try_forward(MhaInput::self_attn(tokens.clone()).causal()).unwrap_err().to_string();
    assert!(error.contains("64") && error.contains("causal_span"), "{error}");
    module.try_forward(MhaInput::self_attn(tokens)).unwrap();
}

#[test]
fn what_has_no_causal_form_is_not_decoded() {
    let device = Device::flex();
    for id in ["linear-infsa", "infsa-resolvent", "soft", "laplacian"] {
        let module = MultiHeadAttentionConfig::new(D_MODEL, HEADS, Mechanism::preset(id).unwrap()).init(&device);
        let error = module.attend_next(random([1, 3, D_MODEL], &device), &mut None).unwrap_err().to_string();
        assert!(error.contains(id) && error.contains("causal"), "{error}");
    }
}
