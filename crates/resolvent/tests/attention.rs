//! The attention module: what it is made of, what it computes, and that its decay learns.

mod support;

use std::sync::{Arc, Mutex};

use burn::{
    module::{Module, Param},
    nn::attention as burn_attention,
    optim::{GradientsParams, SgdConfig},
    tensor::{Bool, Device, Tensor, TensorData},
};
use resolvent::{
    Dropout, Error, Mechanism, Parameter, Strategy, attend,
    attention::{GammaSchedule, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, Observer, Trained},
};
use support::random;

const D_MODEL: usize = 24;
const HEADS: usize = 3;

/// A preset; where sizes follow the length of the sequence by default, padding included, they are fixed.
fn preset(id: &str) -> Mechanism {
    match id {
        "ssa" => Mechanism::from_json(r#"{"mechanism": "ssa", "clusters": 3, "samples": 2}"#).unwrap(),
        _ => Mechanism::preset(id).unwrap().with_max_tokens(64),
    }
}

fn config(mechanism: Mechanism) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(D_MODEL, HEADS, mechanism)
}

/// The decay learned or not.
fn decay(learned: bool) -> Trained {
    Trained::default().with(Parameter::Gamma, learned)
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

#[track_caller]
fn assert_close<const D: usize>(got: Tensor<D>, expected: Tensor<D>, rtol: f32) {
    let (got, expected) = (values(got), values(expected));
    let unit = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let worst = got.iter().zip(&expected).fold(0.0f32, |m, (g, e)| m.max((g - e).abs()));
    assert!(got.len() == expected.len() && worst <= rtol * unit, "differs by {worst:e} of {unit:e}");
}

/// Burn's module and ours with its weights.
fn pair(device: &Device) -> (burn_attention::MultiHeadAttention, MultiHeadAttention) {
    let config = burn_attention::MultiHeadAttentionConfig::new(D_MODEL, HEADS).with_dropout(0.0);
    let mut theirs = config.init(device);
    // Biases start at zero, where one could be taken for another.
    for linear in [&mut theirs.query, &mut theirs.key, &mut theirs.value, &mut theirs.output] {
        linear.bias = Some(Param::from_tensor(random([1, 1, D_MODEL], device).reshape([D_MODEL])));
    }
    (theirs.clone(), MultiHeadAttention::from_burn(theirs).unwrap())
}

/// Two sequences of seven keys, of which the second lacks the last two; true = padding.
fn padding(device: &Device) -> Tensor<2, Bool> {
    Tensor::from_data([[false; 7], [false, false, false, false, false, true, true]], device)
}

#[test]
fn burns_own_module_becomes_this_one() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let (theirs, ours) = pair(&device);
        let tokens = random([2, 7, D_MODEL], &device);
        let (query, memory) = (random([2, 5, D_MODEL], &device), random([2, 7, D_MODEL], &device));
        let causal = burn_attention::generate_autoregressive_mask(2, 7, &device);
        // Every query sees its own token and those beside it, and of the second sequence all but the first.
        let hidden = |n: usize| if n < 49 { (n / 7).abs_diff(n % 7) > 1 } else { n.is_multiple_of(7) };
        let near = TensorData::new((0..98).map(hidden).collect::<Vec<bool>>(), [2, 7, 7]);
        let near = Tensor::<3, Bool>::from_data(near, &device);
        let mine = || MhaInput::self_attn(tokens.clone());
        let own = || burn_attention::MhaInput::self_attn(tokens.clone());
        let cases = [
            (mine(), own()),
            (mine().mask_attn(causal.clone()), own().mask_attn(causal)),
            (mine().mask_attn(near.clone()), own().mask_attn(near)),
            (
                MhaInput::new(query.clone(), memory.clone(), memory.clone()).mask_pad(padding(&device)),
                burn_attention::MhaInput::new(query, memory.clone(), memory).mask_pad(padding(&device)),
            ),
        ];
        for (mine, own) in cases {
            let expected = theirs.forward(own);
            assert_close(ours.forward(mine.clone()).context, expected.context, 1e-5);
            assert_close(ours.weights(mine).unwrap(), expected.weights, 1e-5);
        }
    }
}

#[test]
fn what_burns_module_has_and_this_one_not_is_an_error() {
    let device = Device::flex();
    let theirs = || burn_attention::MultiHeadAttentionConfig::new(D_MODEL, HEADS);
    let refused = |config: burn_attention::MultiHeadAttentionConfig| {
        MultiHeadAttention::from_burn(config.init(&device)).unwrap_err().to_string()
    };
    assert!(refused(theirs().with_quiet_softmax(true)).contains("quiet_softmax"));
    assert!(refused(theirs().with_key_bias(false)).contains("key_bias"));
    let bare = theirs().with_key_bias(false).with_query_bias(false).with_value_bias(false).with_output_bias(false);
    let bare = MultiHeadAttention::from_burn(bare.with_dropout(0.25).init(&device)).unwrap();
    assert!(bare.projection.bias.is_none() && bare.output.bias.is_none() && bare.weight_dropout == 0.25);

    let (_, ours) = pair(&device);
    let masked = |mask: Tensor<3, Bool>| {
        let input = MhaInput::self_attn(random([2, 7, D_MODEL], &device)).mask_attn(mask);
        ours.try_forward(input).unwrap_err().to_string()
    };
    let causal = burn_attention::generate_autoregressive_mask(2, 7, &device);
    assert!(masked(causal.clone().narrow(0, 0, 1)).contains("[batch, seq_q, seq_kv]"));
    let biased = Mechanism::from_json(r#"{"mechanism": "softmax", "bias": "alibi"}"#).unwrap();
    for (mechanism, word) in [(preset("linear-infsa"), "pairs"), (preset("soft"), "pairs"), (biased, "a bias")] {
        let input = MhaInput::self_attn(random([2, 7, D_MODEL], &device)).mask_attn(causal.clone().bool_not());
        let error = config(mechanism).init(&device).try_forward(input).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

/// The module is told what is absent, the operator what is present.
#[test]
fn a_modules_mask_is_the_operators_turned_round() {
    let device = Device::flex();
    for id in ["softmax", "fna"] {
        let module = config(preset(id)).init(&device);
        let x = random([2, 7, D_MODEL], &device);
        let pad = padding(&device);
        let input = MhaInput::self_attn(x.clone());
        let matrix = module.weights(input.clone().mask_pad(pad.clone())).unwrap();
        let columns = matrix.sum_dim(2).squeeze_dim::<3>(2);
        let present = pad.bool_not().float().unsqueeze_dim::<3>(1).expand([2, HEADS, 7]);
        // A key that is padding has no weight with any query, and one that is not has some.
        let seen: Vec<bool> = values(columns).iter().map(|&x| x != 0.0).collect();
        let expected: Vec<bool> = values(present).iter().map(|&x| x == 1.0).collect();
        assert_eq!(seen, expected, "{id}");
        let shown = Arc::new(Mutex::new(Vec::new()));
        let calls = shown.clone();
        let mut watched = module;
        watched.observer = Some(Observer::new(move |call| calls.lock().unwrap().push(call.mask)));
        watched.forward(input.clone().mask_pad(padding(&device)));
        watched.forward(input.hide_keys(padding(&device)));
        let flags = |mask: &Option<Tensor<2, Bool>>| {
            mask.clone().map(|mask| mask.into_data().iter::<bool>().collect::<Vec<_>>())
        };
        let keep = Some([[true; 7], [true, true, true, true, true, false, false]].concat());
        let masks = shown.lock().unwrap();
        assert_eq!([flags(&masks[0].key), flags(&masks[0].query)], [keep.clone(), keep.clone()]);
        assert_eq!([flags(&masks[1].key), flags(&masks[1].query)], [keep, None]);
    }
}

/// The matrix by which a module says that it multiplies the values does so.
#[test]
fn weights_times_values_is_the_operator() {
    let device = Device::flex();
    for id in Mechanism::IDS {
        let module = config(preset(id)).with_rotary(true).init(&device);
        let x = random([2, 8, D_MODEL], &device);
        let input = MhaInput::self_attn(x.clone()).mask_pad(Tensor::from_data(
            [[false; 8], [false, false, false, false, false, false, false, true]],
            &device,
        ));
        let shown = Arc::new(Mutex::new(Vec::new()));
        let calls = shown.clone();
        let mut watched = module.clone();
        watched.observer = Some(Observer::new(move |call| calls.lock().unwrap().push(call)));
        watched.forward(input.clone());
        let call = shown.lock().unwrap().pop().unwrap();
        let expected = attend(&call.inputs, &call.mechanism, &call.mask, Strategy::Auto).unwrap().out;
        let padding = call.mask.key.unwrap().bool_not().reshape([2, 1, 8, 1]).expand(call.inputs.v.shape());
        let v = call.inputs.v.mask_fill(padding, 0.0);
        assert_close(module.weights(input).unwrap().matmul(v), expected, 1e-4);
    }
}

#[test]
fn self_attention_is_cross_attention_with_itself() {
    let device = Device::flex();
    // Where queries are keys there is no cross-attention.
    for id in Mechanism::IDS.into_iter().filter(|id| !id.starts_with("soft-") && *id != "soft") {
        let module = config(preset(id)).init(&device);
        let x = random([2, 6, D_MODEL], &device);
        let cross = module.forward(MhaInput::new(x.clone(), x.clone(), x.clone())).context;
        assert_close(module.forward(MhaInput::self_attn(x)).context, cross, 1e-5);
    }
}

#[test]
fn padding_changes_nothing_and_comes_out_zero() {
    let device = Device::flex().autodiff();
    for id in Mechanism::IDS {
        let module = config(preset(id)).init(&device);
        let x = random([1, 5, D_MODEL], &device);
        let garbage = random([1, 3, D_MODEL], &device) * 1e3;
        let padded = Tensor::cat(vec![x.clone(), garbage], 1).require_grad();
        let pad = Tensor::<2, Bool>::from_data([[false, false, false, false, false, true, true, true]], &device);
        let context = module.forward(MhaInput::self_attn(padded.clone()).mask_pad(pad)).context;
        let expected = module.forward(MhaInput::self_attn(x)).context;
        assert_close(context.clone().narrow(1, 0, 5), expected, 1e-5);
        assert!(values(context.clone().narrow(1, 5, 3)).iter().all(|&x| x == 0.0), "{id}");
        let gradient = padded.grad(&context.sum().backward()).unwrap().narrow(1, 5, 3);
        assert!(values(gradient).iter().all(|&x| x == 0.0), "{id}");
    }
}

#[test]
fn parameters_are_counted() {
    let device = Device::flex();
    for id in Mechanism::IDS {
        for (tied, extra, bias) in [(None, false, true), (Some(true), true, false), (Some(false), false, false)] {
            let config = config(preset(id)).with_tied(tied).with_extra_proj(extra).with_qkv_bias(bias);
            let refused = match id {
                "soft" | "soft-pp" => tied == Some(false),
                "ssa" => tied == Some(true),
                _ => false,
            };
            assert_eq!(config.validate().is_err(), refused, "{id} {tied:?}");
            if refused {
                continue;
            }
            let module = config.init(&device);
            let gammas = module.learned.free(Parameter::Gamma).map_or(0, |logit| logit.val().dims()[0]);
            assert_eq!(module.num_params(), config.parameter_count() + gammas, "{id}");
        }
    }
}

/// The loss whose gradient the tests look at.
fn loss(module: &MultiHeadAttention, x: &Tensor<3>) -> Tensor<1> {
    module.forward(MhaInput::self_attn(x.clone())).context.square().sum()
}

#[test]
fn gamma_learns() {
    let device = Device::flex().autodiff();
    for id in ["infsa", "infsa-resolvent", "linear-infsa"] {
        for schedule in [GammaSchedule::Constant, GammaSchedule::Power] {
            let module = config(preset(id)).with_gamma_schedule(schedule).with_layer(2).init(&device);
            let x = random([2, 6, D_MODEL], &device);
            let logit = module.learned.free(Parameter::Gamma).unwrap().val();
            let gradients = loss(&module, &x).backward();
            let gradient = values(logit.grad(&gradients).unwrap());
            let largest = gradient.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for head in 0..HEADS {
                let at = |step: f32| {
                    let mut bump = vec![0.0; HEADS];
                    bump[head] = step;
                    let mut module = module.clone();
                    let bump = Tensor::<1>::from_data(TensorData::new(bump, [HEADS]), &device);
                    module.learned = module.learned.map_free(Parameter::Gamma, |logit| logit + bump.clone());
                    loss(&module, &x).into_scalar::<f32>()
                };
                let finite = (at(0.02) - at(-0.02)) / 0.04;
                let error = (finite - gradient[head]).abs();
                assert!(error <= 1e-2 * largest, "{id}: {finite} against {}", gradient[head]);
            }
            let params = GradientsParams::from_grads(gradients, &module);
            let stepped = SgdConfig::new().init().step(0.1, module, params);
            let moved = stepped.learned.free(Parameter::Gamma).unwrap().val();
            assert!(values(moved).iter().zip(values(logit)).all(|(after, before)| *after != before), "{id}");
        }
    }
}

#[test]
fn schedules_set_the_decay_of_a_layer() {
    let device = Device::flex();
    for trainable in [true, false] {
        let config = config(preset("infsa")).with_trained(decay(trainable)).with_layer(3);
        let power = config.with_gamma_schedule(GammaSchedule::Power).init(&device);
        match power.learned.value(Parameter::Gamma) {
            Some(gamma) => values(gamma).iter().for_each(|gamma| assert!((gamma - 0.343).abs() < 1e-6)),
            None => assert!((power.mechanism.gamma().unwrap() - 0.343).abs() < 1e-12),
        }
        assert_eq!(power.learned.value(Parameter::Gamma).is_some(), trainable);
    }
}

#[test]
fn folding_gamma_changes_nothing() {
    let device = Device::flex();
    for id in ["infsa", "linear-infsa"] {
        for trainable in [true, false] {
            let module = config(preset(id)).with_trained(decay(trainable)).init(&device);
            let x = random([2, 6, D_MODEL], &device);
            let expected = module.forward(MhaInput::self_attn(x.clone())).context;
            let folded = module.fold_gamma().unwrap();
            assert!(folded.learned.value(Parameter::Gamma).is_none() && folded.mechanism.gamma() == Some(1.0));
            assert_close(folded.forward(MhaInput::self_attn(x)).context, expected, 1e-5);
        }
    }
    for id in ["infsa-resolvent", "softmax"] {
        assert!(config(preset(id)).init(&device).fold_gamma().is_err());
    }
}

#[test]
fn weights_are_dropped_in_training_alone() {
    let (device, learns) = (Device::flex(), Device::flex().autodiff());
    for id in ["softmax", "fna"] {
        let dropped = config(preset(id)).with_weight_dropout(0.3).init(&device);
        let x = random([2, 9, D_MODEL], &device);
        let out = |module: &MultiHeadAttention, x: Tensor<3>| values(module.forward(MhaInput::self_attn(x)).context);
        let whole = MultiHeadAttention { weight_dropout: 0.0, ..dropped.clone() };
        assert_eq!(out(&dropped, x.clone()), out(&whole, x.clone()), "{id}");
        let module = dropped.to_device(&learns);
        let train = || out(&module, Tensor::from_data(x.clone().into_data(), &learns));
        assert_ne!(train(), train(), "{id}: a new draw in each call");
        let fixed = || {
            let input = MhaInput::self_attn(x.clone()).dropout(Dropout::pairs(0.5, 7).unwrap());
            values(whole.forward(input).context)
        };
        assert_eq!(fixed(), fixed());
        assert_ne!(fixed(), out(&whole, x.clone()));
    }
}

#[test]
fn mistakes_are_errors() {
    let device = Device::flex();
    let infsa = || preset("infsa");
    let error = |config: MultiHeadAttentionConfig| config.try_init(&device).unwrap_err().to_string();
    assert_eq!(
        MultiHeadAttentionConfig::new(64, 5, infsa()).try_init(&device).unwrap_err(),
        Error::Heads { d_model: 64, n_heads: 5 }
    );
    assert!(error(config(infsa()).with_weight_dropout(0.1)).contains("dropout"));
    assert!(error(config(preset("softmax")).with_weight_dropout(1.0)).contains("`weight_dropout`"));
    assert!(error(config(infsa()).with_dropout(1.0)).contains("`dropout`"));
    // Also where the tokens are pooled before they are projected, which has no pairs to leave out.
    for pool_first in [true, false] {
        let module = config(preset("linear-infsa")).with_pool_first(pool_first).init(&device);
        let input = MhaInput::self_attn(random([2, 5, D_MODEL], &device)).dropout(Dropout::pairs(0.5, 7).unwrap());
        let refused = module.try_forward(input).unwrap_err().to_string();
        assert!(refused.contains("dropout") && refused.contains("linear-infsa"), "{refused}");
    }
    assert!(error(config(infsa()).with_layer(0)).contains("`layer`"));
    let certain = Mechanism::from_json(r#"{"mechanism": "infsa", "gamma": 1.0}"#).unwrap();
    assert!(error(config(certain.clone())).contains("`gamma`"));
    assert!(config(certain).with_trained([]).try_init(&device).is_ok());

    let module = config(infsa()).init(&device);
    let narrow = module.try_forward(MhaInput::self_attn(random([1, 4, 8], &device))).unwrap_err();
    assert!(narrow.to_string().contains("d_model"), "{narrow}");
    let long = Tensor::<2, Bool>::from_data([[true; 9]], &device);
    let masked = MhaInput::self_attn(random([1, 4, D_MODEL], &device)).mask_pad(long);
    assert!(module.try_forward(masked).unwrap_err().to_string().contains("key_mask"));
    let resolvent = config(preset("infsa-resolvent")).init(&device);
    let causal = MhaInput::self_attn(random([1, 4, D_MODEL], &device)).causal();
    assert!(resolvent.try_forward(causal).unwrap_err().to_string().contains("causal"));
}

#[test]
fn strategies_agree_and_repeat_themselves() {
    let device = Device::flex();
    for id in Mechanism::IDS {
        let fused = config(preset(id)).init(&device);
        let mut composed = fused.clone();
        composed.strategy = Strategy::Composed;
        let x = random([2, 9, D_MODEL], &device);
        let run = |module: &MultiHeadAttention| module.forward(MhaInput::self_attn(x.clone())).context;
        assert_close(run(&fused), run(&composed), 1e-5);
        assert_eq!(values(run(&fused)), values(run(&fused)), "{id}");
    }
}

/// Pooling the tokens before projecting them is the same function, and so are its gradients.
#[test]
fn pooling_first_changes_nothing() {
    let device = Device::flex().autodiff();
    let keep = [[true, true, false, true, true, true], [true; 6]];
    for json in [
        r#"{"mechanism": "linear-infsa"}"#,
        r#"{"mechanism": "linear-infsa", "activation": "gelu", "scale": 2.0, "eps": 0.1}"#,
        r#"{"mechanism": "linear-infsa", "operator": "exact", "iterations": 2, "broadcast": false}"#,
        r#"{"mechanism": "linear-infsa", "iterations": 3, "norm_bias": "auto"}"#,
    ] {
        let mechanism = Mechanism::from_json(json).unwrap();
        for (tied, bias, trainable, masked, strategy) in [
            (true, true, true, true, Strategy::Fused),
            (false, true, false, false, Strategy::Composed),
            (false, false, true, true, Strategy::Fused),
        ] {
            let config = config(mechanism.clone()).with_tied(Some(tied)).with_qkv_bias(bias).with_strategy(strategy);
            let mut module = config.with_trained(decay(trainable)).with_extra_proj(bias).init(&device);
            let x = random([2, 6, D_MODEL], &device).require_grad();
            let run = |module: &MultiHeadAttention| {
                let pad = Tensor::<2, Bool>::from_data(keep, &device).bool_not();
                let input = MhaInput::self_attn(x.clone());
                let input = if masked { input.mask_pad(pad) } else { input };
                let context = module.forward(input).context;
                let weighted = context.clone() * (context.clone().detach() + 1.0);
                let gradients = weighted.sum().backward();
                let gradient = |x: Option<Tensor<2>>| x.unwrap();
                (
                    context,
                    x.grad(&gradients).unwrap(),
                    gradient(module.projection.weight.val().grad(&gradients)),
                    gradient(module.output.weight.val().grad(&gradients)),
                    module.learned.free(Parameter::Gamma).map(|logit| logit.val().grad(&gradients).unwrap()),
                )
            };
            assert!(module.pool_first);
            let got = run(&module);
            module.pool_first = false;
            let expected = run(&module);
            assert_close(got.0, expected.0, 1e-5);
            assert_close(got.1, expected.1, 1e-4);
            assert_close(got.2, expected.2, 1e-4);
            assert_close(got.3, expected.3, 1e-4);
            if let (Some(got), Some(expected)) = (got.4, expected.4) {
                assert_close(got, expected, 1e-4);
            }
        }
    }
}

/// A query's bias is by its distance to keys, whatever queries there are beside it.
#[test]
fn biases_by_distance_are_decoded() {
    let device = Device::flex();
    for bias in [r#""alibi""#, r#"{"kind": "buckets", "count": 6, "max_distance": 5, "bidirectional": false}"#] {
        let json = format!(r#"{{"mechanism": "softmax", "bias": {bias}}}"#);
        let module = config(Mechanism::from_json(&json).unwrap()).init(&device);
        let x = random([2, 7, D_MODEL], &device);
        let whole = module.forward(MhaInput::self_attn(x.clone()).causal()).context;
        let mut past = None;
        let steps =
            [(0, 3), (3, 1), (4, 3)].map(|(from, len)| module.attend_next(x.clone().narrow(1, from, len), &mut past));
        let steps = steps.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
        assert_close(Tensor::cat(steps, 1), whole, 1e-5);
    }
}
