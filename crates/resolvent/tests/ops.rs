//! `attend` beyond the stored cases: layouts, storage types, masks, strategies and mistakes.

mod support;

use burn::tensor::{Bool, Device, FloatDType, Tensor, TensorData};
use resolvent::{Dropout, Error, Extras, Inputs, Mask, Mechanism, Strategy, attend, plan};
use resolvent_kernels::relative_distance;
use support::random;

const STRATEGIES: [Strategy; 3] = [Strategy::Fused, Strategy::Composed, Strategy::Reference];

fn preset(id: &str) -> Mechanism {
    Mechanism::preset(id).unwrap()
}

fn json(text: &str) -> Mechanism {
    Mechanism::from_json(text).unwrap()
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[track_caller]
fn assert_close<const D: usize>(what: &str, got: Tensor<D>, expected: Tensor<D>, rtol: f64) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let distance = relative_distance(&values(got), &values(expected));
    assert!(distance <= rtol, "{what}: relative distance {distance:.3e} > {rtol:.0e}");
}

/// Inputs as the mechanism takes them, and their leaves.
fn inputs(mechanism: &Mechanism, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Inputs {
    if mechanism.tied { Inputs::tied(q, v) } else { Inputs::new(q, k, v) }
}

/// `out` and the gradients of `sum(out * dout)` in the order q, v, k.
fn run(mechanism: &Mechanism, tensors: [Tensor<4>; 3], mask: &Mask, strategy: Strategy) -> Vec<Tensor<4>> {
    run_with(Extras::default(), mechanism, tensors, mask, strategy)
}

fn run_with(
    extras: Extras,
    mechanism: &Mechanism,
    [q, k, v]: [Tensor<4>; 3],
    mask: &Mask,
    strategy: Strategy,
) -> Vec<Tensor<4>> {
    let [q, k, v] = [q, k, v].map(|x| x.autodiff().require_grad());
    let inputs = Inputs { extras, ..inputs(mechanism, q.clone(), k.clone(), v.clone()) };
    let out = attend(&inputs, mechanism, mask, strategy).unwrap().out;
    // Another one for every token: mechanisms that centre lose what all have in common.
    let [.., seq, dim] = out.dims();
    let dout = TensorData::new((0..seq * dim).map(|i| (1.7 * i as f32).sin()).collect::<Vec<_>>(), [1, 1, seq, dim]);
    let dout = Tensor::<4>::from_data(dout, &out.device()).cast(FloatDType::from(out.dtype()));
    let gradients = (out.clone() * dout).sum().backward();
    let leaves = if mechanism.tied { vec![q, v] } else { vec![q, v, k] };
    // Burn leaves out the gradient of what is not read, as q and k by `uniform`.
    let gradient = |x: &Tensor<4>| x.grad(&gradients).unwrap_or_else(|| x.clone().inner().zeros_like());
    std::iter::once(out.inner()).chain(leaves.iter().map(gradient)).collect()
}

/// Every mechanism, plain and with the options that take another path.
fn mechanisms() -> Vec<Mechanism> {
    [
        r#"{"mechanism": "softmax"}"#,
        r#"{"mechanism": "softmax", "tied": true, "scale": 0.5}"#,
        r#"{"mechanism": "uniform"}"#,
        r#"{"mechanism": "infsa"}"#,
        r#"{"mechanism": "infsa", "activation": "gelu", "tied": true}"#,
        r#"{"mechanism": "infsa-resolvent", "gamma": 0.9}"#,
        r#"{"mechanism": "infsa-resolvent", "tied": true}"#,
        r#"{"mechanism": "linear-infsa"}"#,
        r#"{"mechanism": "linear-infsa", "tied": true, "iterations": 3, "norm_bias": "auto"}"#,
        r#"{"mechanism": "linear-infsa", "operator": "exact", "activation": "abs"}"#,
        r#"{"mechanism": "fna", "kappa": 2}"#,
        r#"{"mechanism": "fna", "kappa": 2, "alpha": 2, "tied": true}"#,
        r#"{"mechanism": "fna", "kappa": 2, "kernel": "student", "norm_exponent": 0.5}"#,
        r#"{"mechanism": "fna", "kappa": 3, "manifold": "sphere", "tied": true}"#,
    ]
    .map(json)
    .into()
}

#[test]
fn strategies_agree_on_every_mask() {
    let device = Device::flex();
    let keep = |rows: [[bool; 6]; 2]| Tensor::<2, Bool>::from_data(rows, &device);
    let some = keep([[true, false, true, true, false, true], [false, true, true, true, true, false]]);
    let none = keep([[true, true, false, true, true, true], [false; 6]]);
    let masks = [
        Mask::none(),
        Mask::causal(),
        Mask::padding(some.clone()),
        Mask::padding(some.clone()).with_causal(),
        Mask::key_mask(none.clone()).with_query_mask(some),
        Mask::query_mask(none),
    ];
    for mechanism in mechanisms() {
        let tensors = [(); 3].map(|()| random([2, 2, 6, 4], &device));
        for mask in &masks {
            let refuses = ["infsa-resolvent", "linear-infsa"].contains(&mechanism.id());
            if mask.causal && refuses {
                continue;
            }
            let [fused, composed, reference] = STRATEGIES.map(|s| run(&mechanism, tensors.clone(), mask, s));
            for (n, expected) in reference.into_iter().enumerate() {
                let what = format!("{mechanism:?}, {mask:?}, tensor {n}");
                assert_close(&format!("fused {what}"), fused[n].clone(), expected.clone(), 1e-4);
                assert_close(&format!("composed {what}"), composed[n].clone(), expected, 1e-4);
            }
        }
    }
}

#[test]
fn all_strategies_leave_out_the_same_pairs() {
    let device = Device::flex();
    let keep = Tensor::<2, Bool>::from_data([[true, false, true, true, true, true], [true; 6]], &device);
    for mechanism in
        [preset("softmax"), preset("fna"), json(r#"{"mechanism": "fna", "manifold": "sphere", "tied": true}"#)]
    {
        for dropout in [Dropout::weights(0.4, 3).unwrap(), Dropout::pairs(0.4, 3).unwrap()] {
            for mask in [Mask::none(), Mask::causal(), Mask::padding(keep.clone())] {
                let tensors = [(); 3].map(|()| random([2, 2, 6, 4], &device));
                let extras = || Extras::default().with_dropout(dropout);
                let [fused, composed, reference] =
                    STRATEGIES.map(|s| run_with(extras(), &mechanism, tensors.clone(), &mask, s));
                let whole = run(&mechanism, tensors, &mask, Strategy::Reference);
                assert!(relative_distance(&values(whole[0].clone()), &values(reference[0].clone())) > 0.1);
                for (n, expected) in reference.into_iter().enumerate() {
                    let what = format!("{mechanism:?}, {dropout:?}, {mask:?}, tensor {n}");
                    assert_close(&format!("fused {what}"), fused[n].clone(), expected.clone(), 1e-4);
                    assert_close(&format!("composed {what}"), composed[n].clone(), expected, 1e-4);
                }
            }
        }
    }
    let tensors = [(); 3].map(|()| random([1, 1, 4, 4], &device));
    for strategy in [Strategy::Fused, Strategy::Composed] {
        let [q, k, v] = tensors.clone();
        let extras = Extras::default().with_dropout(Dropout::weights(0.4, 3).unwrap());
        let refused = attend(&Inputs { extras, ..Inputs::new(q, k, v) }, &preset("infsa"), &Mask::none(), strategy);
        assert!(refused.unwrap_err().to_string().contains("dropout"));
    }
}

#[test]
fn cross_attention_agrees() {
    let device = Device::flex();
    for id in ["softmax", "uniform", "infsa", "linear-infsa", "fna"] {
        let tensors = [random([2, 2, 5, 4], &device), random([2, 2, 9, 4], &device), random([2, 2, 9, 4], &device)];
        let [fused, composed, reference] = STRATEGIES.map(|s| run(&preset(id), tensors.clone(), &Mask::none(), s));
        for (n, expected) in reference.into_iter().enumerate() {
            assert_close(id, fused[n].clone(), expected.clone(), 1e-4);
            assert_close(id, composed[n].clone(), expected, 1e-4);
        }
    }
}

#[test]
fn strided_tensors_give_the_same() {
    let device = Device::flex();
    for mechanism in mechanisms() {
        let strided = [(); 3].map(|()| random([2, 6, 2, 4], &device).swap_dims(1, 2));
        let dense = strided.clone().map(|x| Tensor::from_data(x.into_data(), &device));
        let got = run(&mechanism, strided, &Mask::none(), Strategy::Fused);
        for (got, expected) in got.into_iter().zip(run(&mechanism, dense, &Mask::none(), Strategy::Fused)) {
            assert_eq!(values(got), values(expected), "{mechanism:?}");
        }
    }
}

#[test]
fn halves_are_stored_as_given() {
    let device = Device::flex();
    for mechanism in mechanisms() {
        let wide = [(); 3].map(|()| random([2, 2, 6, 4], &device));
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let narrow = wide.clone().map(|x| x.cast(dtype));
            let rounded = narrow.clone().map(|x| x.cast(FloatDType::F32));
            let expected = run(&mechanism, rounded, &Mask::none(), Strategy::Fused);
            for strategy in [Strategy::Fused, Strategy::Composed] {
                let got = run(&mechanism, narrow.clone(), &Mask::none(), strategy);
                for (got, expected) in got.into_iter().zip(&expected) {
                    assert_eq!(FloatDType::from(got.dtype()), dtype);
                    assert_close(&format!("{mechanism:?}"), got.cast(FloatDType::F32), expected.clone(), 2e-2);
                }
            }
        }
    }
}

#[test]
fn masked_garbage_changes_nothing() {
    let device = Device::flex();
    let keep = Tensor::<2, Bool>::from_data([[true, true, false, true, false]], &device);
    for mechanism in mechanisms() {
        let clean = [(); 3].map(|()| random([1, 2, 5, 4], &device));
        let masked = keep.clone().bool_not().reshape([1, 1, 5, 1]).expand([1, 2, 5, 4]);
        for strategy in [Strategy::Fused, Strategy::Composed] {
            let garbage = clean.clone().map(|x| x.mask_fill(masked.clone(), f32::MAX));
            let expected = run(&mechanism, clean.clone(), &Mask::padding(keep.clone()), strategy);
            let got = run(&mechanism, garbage, &Mask::padding(keep.clone()), strategy);
            for (got, expected) in got.into_iter().zip(expected) {
                assert_eq!(values(got), values(expected), "{mechanism:?} {strategy}");
            }
        }
    }
}

/// Softmax, other scores and windows: every path gives the same, and none where rows have no such sum.
#[test]
fn rows_report_their_log_sums() {
    let device = Device::flex();
    let [q, k, v] = [(); 3].map(|()| random([1, 2, 5, 4], &device));
    let keys = Tensor::<2, Bool>::from_data([[false, true, true, true, true]], &device);
    let mask = Mask::key_mask(keys).with_causal();
    let lse = |mechanism: &Mechanism, strategy| {
        let inputs = Inputs::new(q.clone(), k.clone(), v.clone());
        attend(&inputs, mechanism, &mask, strategy).unwrap().lse
    };
    let window = json(r#"{"mechanism": "local", "window": 2}"#);
    for mechanism in [preset("softmax"), preset("fna"), preset("cosine"), preset("routed"), window] {
        let lse = STRATEGIES.map(|strategy| lse(&mechanism, strategy).expect("a sum of every row"));
        for other in &lse {
            assert!(values(other.clone().narrow(2, 0, 1)).iter().all(|&x| x == f64::NEG_INFINITY), "{mechanism}");
            assert_close(mechanism.id(), other.clone().narrow(2, 1, 4), lse[2].clone().narrow(2, 1, 4), 1e-5);
        }
    }
    for id in ["infsa", "sigmoid", "linear"] {
        assert!(STRATEGIES.into_iter().all(|strategy| lse(&preset(id), strategy).is_none()), "{id}");
    }
}

#[test]
fn the_plan_tells_what_auto_does() {
    let device = Device::flex();
    let x = || random([1, 2, 5, 4], &device);
    let inputs = Inputs::new(x(), x(), x());
    let chosen = plan(&inputs, &preset("infsa"), &Mask::none(), Strategy::Auto).unwrap();
    assert_eq!(chosen.strategy, Strategy::Fused);
    assert!(chosen.kernel.unwrap().flops_forward > 0);
    let f64s = Inputs::new(x().cast(FloatDType::F64), x().cast(FloatDType::F64), x().cast(FloatDType::F64));
    let chosen = plan(&f64s, &preset("infsa"), &Mask::none(), Strategy::Auto).unwrap();
    assert_eq!((chosen.strategy, chosen.kernel), (Strategy::Composed, None));
    let out = attend(&f64s, &preset("infsa"), &Mask::none(), Strategy::Auto).unwrap().out;
    assert_eq!(FloatDType::from(out.dtype()), FloatDType::F64);
    let refused = attend(&f64s, &preset("infsa"), &Mask::none(), Strategy::Fused).unwrap_err();
    assert!(matches!(refused, Error::Strategy { strategy: Strategy::Fused, .. }), "{refused}");
}

#[test]
fn mistakes_are_errors() {
    let device = Device::flex();
    let x = |shape| random(shape, &device);
    let square = [1, 2, 5, 4];
    let infsa = preset("infsa");
    let fails = |inputs: Inputs, mechanism: &Mechanism, mask: Mask, names: &str| {
        for strategy in [Strategy::Auto, Strategy::Composed] {
            let error = attend(&inputs, mechanism, &mask, strategy).unwrap_err().to_string();
            assert!(error.contains(names), "`{error}` does not name `{names}`");
        }
    };
    let good = || Inputs::new(x(square), x(square), x(square));
    fails(Inputs::new(x(square), x([1, 2, 5, 3]), x(square)), &infsa, Mask::none(), "k [1, 2, 5, 3]");
    fails(Inputs::new(x(square), x(square), x([1, 2, 6, 4])), &infsa, Mask::none(), "v [1, 2, 6, 4]");
    fails(Inputs::tied(x(square), x(square)), &infsa, Mask::none(), "`k` is missing");
    fails(good(), &json(r#"{"mechanism": "infsa", "tied": true}"#), Mask::none(), "`k` is given");
    let gamma = |gamma: Vec<f32>| {
        let len = gamma.len();
        Tensor::<1>::from_data(TensorData::new(gamma, [len]), &device)
    };
    fails(good().with_gamma(gamma(vec![0.5; 3])), &infsa, Mask::none(), "gamma [3]");
    fails(good().with_gamma(gamma(vec![0.5, 1.5])), &infsa, Mask::none(), "`gamma` is 1.5");
    fails(good().with_gamma(gamma(vec![0.5; 2])), &preset("softmax"), Mask::none(), "`gamma`");
    fails(good(), &preset("infsa-resolvent"), Mask::causal(), "causal");
    let long = Tensor::<2, Bool>::from_data([[true; 6]], &device);
    fails(good(), &infsa, Mask::key_mask(long.clone()), "key_mask [1, 6]");
    fails(good(), &infsa, Mask::query_mask(long), "query_mask [1, 6]");
    let mixed = Inputs { v: x(square).cast(FloatDType::F16), ..good() };
    fails(mixed, &infsa, Mask::none(), "storage type F16");
    let limited = json(r#"{"mechanism": "infsa-resolvent", "gamma": 0.99, "max_iter": 1}"#);
    fails(good(), &limited, Mask::none(), "did not converge");
}

/// Kernels of distances, through landmarks and whole, by every strategy, padded or not.
#[test]
fn kernels_of_distances_agree() {
    let device = Device::flex();
    let keep = [[true, true, false, true, true, true], [false, false, true, true, true, true]];
    let masks = [Mask::none(), Mask::padding(Tensor::<2, Bool>::from_data(keep, &device))];
    for text in [
        r#"{"mechanism": "soft", "landmarks": {"kind": "pool", "ratio": 2}, "ridge": 0.25}"#,
        r#"{"mechanism": "soft", "landmarks": {"kind": "pool", "count": 4}, "ridge": 0.25}"#,
        r#"{"mechanism": "laplacian", "landmarks": {"kind": "pool", "count": 2}, "grid": [3, 2], "ridge": 0.125, "whiten_eps": 0.125}"#,
        r#"{"mechanism": "soft-pp", "landmarks": {"kind": "pool", "count": 49}, "inverse": "cholesky", "ridge": 0.25}"#,
        r#"{"mechanism": "soft", "landmarks": {"kind": "first", "count": 3}, "inverse": "cholesky", "ridge": 0.25, "scale": 0.5}"#,
        r#"{"mechanism": "soft-pp", "landmarks": {"kind": "pool", "ratio": 2}, "grid": [2, 3], "ridge": 0.25}"#,
        r#"{"mechanism": "soft-pp", "degree": "token", "ridge": 0.25, "newton_iterations": 4, "gradient": "unrolled"}"#,
        r#"{"mechanism": "soft-pp", "landmarks": {"kind": "all"}}"#,
        r#"{"mechanism": "laplacian", "landmarks": {"kind": "pool", "ratio": 2}, "ridge": 0.125, "whiten_eps": 0.125}"#,
        r#"{"mechanism": "laplacian", "landmarks": {"kind": "stride", "ratio": 3}, "ridge": 0.125, "inverse": "cholesky",
            "centering": "per-query", "whitening": "none", "weight_scale": "inv-n", "tied": true}"#,
        r#"{"mechanism": "laplacian-exact", "whiten_eps": 0.125}"#,
        r#"{"mechanism": "laplacian-exact", "centering": "per-query", "whiten_eps": 0.125, "weight_scale": "inv-sqrt-n"}"#,
    ] {
        let mechanism = json(text);
        let tensors = [(); 3].map(|()| random([2, 2, 6, 4], &device));
        for mask in &masks {
            let [fused, composed, reference] = STRATEGIES.map(|s| run(&mechanism, tensors.clone(), mask, s));
            for (n, expected) in reference.into_iter().enumerate() {
                let what = format!("{text}, {mask:?}, tensor {n}");
                assert_close(&format!("fused {what}"), fused[n].clone(), expected.clone(), 1e-4);
                assert_close(&format!("composed {what}"), composed[n].clone(), expected, 1e-4);
            }
        }
    }
}
