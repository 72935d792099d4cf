//! Compositions of four values out of tensor operations, against the reference; and in a module.

mod support;

use burn::{
    module::Module,
    optim::{GradientsParams, SgdConfig},
    tensor::{Bool, Device, FloatDType, Tensor, TensorData},
};
use resolvent::{
    Error, Inputs, Mask, Mechanism, Parameter, Shape, Strategy, attend,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    convert,
    mechanism::Bias,
};
use resolvent_kernels::{Error as KernelError, relative_distance};
use support::random;

const SCORES: &[&str] = &[
    r#"{"kind": "dot-exp"}"#,
    r#"{"kind": "dot-exp", "softcap": 2.0, "scale": 0.75}"#,
    r#"{"kind": "cosine-exp", "scale": 3.0}"#,
    r#"{"kind": "dot-relu"}"#,
    r#"{"kind": "dot-abs"}"#,
    r#"{"kind": "dot-gelu"}"#,
    r#"{"kind": "dot-squared-relu"}"#,
    r#"{"kind": "dot-sigmoid"}"#,
    r#"{"kind": "dot-sigmoid", "offset": -0.5}"#,
    r#"{"kind": "gaussian"}"#,
    r#"{"kind": "levy", "kappa": 3.0}"#,
    r#"{"kind": "levy", "alpha": 2.0}"#,
    r#"{"kind": "levy", "manifold": "sphere", "intrinsic_dim": 3}"#,
    r#"{"kind": "student", "kappa": 2.0, "alpha": 1.5}"#,
    r#"{"kind": "laplacian"}"#,
    r#"{"kind": "constant"}"#,
];

const STRUCTURES: &[&str] = &[
    r#"{"kind": "dense"}"#,
    r#"{"kind": "dense", "window": 3, "sinks": 1}"#,
    r#"{"kind": "clustered", "clusters": 3, "estimator": "centroid", "balance": null}"#,
    r#"{"kind": "clustered", "clusters": 3, "samples": 2, "balance": null}"#,
    r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "ratio": 3}, "inverse": "cholesky", "ridge": 0.25}"#,
    r#"{"kind": "nystrom", "landmarks": {"kind": "random", "count": 3, "seed": 5}, "ridge": 0.25}"#,
    r#"{"kind": "nystrom", "landmarks": {"kind": "conv", "ratio": 2}, "landmark_act": true, "ridge": 0.25, "gradient": "unrolled"}"#,
    r#"{"kind": "nystrom", "landmarks": {"kind": "first", "count": 3}, "value_conv": 3, "inverse": "cg", "ridge": 0.25}"#,
    r#"{"kind": "features"}"#,
    r#"{"kind": "features", "map": "favor", "count": 7}"#,
    r#"{"kind": "clustered", "clusters": 3, "routes": 1, "route_by": "query", "cluster_on": "keys", "estimator": "centroid"}"#,
];

/// Maps of projected keys, shared and of each head. Their combinations come last, so that the others draw what they drew.
const PROJECTED: &[&str] = &[
    r#"{"kind": "projected", "count": 3}"#,
    r#"{"kind": "projected", "count": 5, "per_head": true, "max_tokens": 12, "seed": 3}"#,
];

/// What `factors` takes: an inverse of a matrix that is not symmetric.
const FACTORED: &[&str] = &[
    r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "count": 3}, "ridge": 0.0, "newton_iterations": 5, "gradient": "unrolled"}"#,
    r#"{"kind": "nystrom", "landmarks": {"kind": "pool", "ratio": 2}, "ridge": 1.0}"#,
];

const NORMALISATIONS: &[&str] = &[
    r#"{"kind": "row"}"#,
    r#"{"kind": "row", "density_exponent": 0.5}"#,
    r#"{"kind": "frobenius", "eps": 0.125}"#,
    r#"{"kind": "symmetric"}"#,
    r#"{"kind": "symmetric", "degree": "token"}"#,
    r#"{"kind": "whitened", "whiten_eps": 0.25}"#,
    r#"{"kind": "whitened", "whitening": "none", "centering": "per-query", "weight_scale": "inv-n"}"#,
    r#"{"kind": "none"}"#,
    r#"{"kind": "none", "factor": "inv-n"}"#,
];

const SERIES: &[&str] = &[
    r#"{"kind": "one-hop", "gamma": 0.75}"#,
    r#"{"kind": "hops", "count": 3, "gamma": 0.5}"#,
    r#"{"kind": "resolvent", "gamma": 0.5, "tol": 1e-7}"#,
];

/// Biases, of which every composition that forms pairs has one in its turn.
const BIASES: &[&str] = &[
    r#"{"kind": "tensor"}"#,
    r#"{"kind": "tensor", "batch": true, "heads": false, "queries": false}"#,
    r#"{"kind": "alibi"}"#,
    r#"{"kind": "buckets", "count": 8, "max_distance": 6}"#,
    r#"{"kind": "grid", "height": 3, "width": 3}"#,
];

/// Sizes, causality, tied keys, masks.
#[derive(Debug, Clone, Copy)]
struct Call {
    seq_q: usize,
    seq_kv: usize,
    causal: bool,
    tied: bool,
    masks: bool,
}

const CALLS: &[Call] = &[
    Call { seq_q: 9, seq_kv: 9, causal: false, tied: false, masks: true },
    Call { seq_q: 9, seq_kv: 9, causal: true, tied: false, masks: true },
    Call { seq_q: 8, seq_kv: 8, causal: false, tied: true, masks: false },
    Call { seq_q: 5, seq_kv: 11, causal: false, tied: false, masks: false },
    Call { seq_q: 4, seq_kv: 10, causal: true, tied: false, masks: true },
];

/// The mechanism of a call, with the `n`-th bias if it takes that, or nothing where it is refused.
fn mechanism([score, structure, normalisation, series]: [&str; 4], call: Call, n: usize) -> Option<(Mechanism, Shape)> {
    let Call { seq_q, seq_kv, causal, tied, .. } = call;
    let json = format!(
        r#"{{"mechanism": "composed", "score": {score}, "structure": {structure}, "normalisation": {normalisation},
            "series": {series}, "tied": {tied}, "causal": {causal}"#
    );
    let shape = Shape { batch: 2, heads: 2, seq_q, seq_kv, head_dim: 4, value_dim: 3 };
    let biased = BIASES.get(n % (BIASES.len() + 1)).map(|bias| format!(r#"{json}, "bias": {bias}}}"#));
    let checked = |json: String| Mechanism::from_json(&json).ok().filter(|m| m.check(&shape, false).is_ok());
    Some((biased.and_then(checked).or_else(|| checked(format!("{json}}}")))?, shape))
}

/// The parameters of a call, per head or filter: near their defaults, or small where there is none.
fn parameters(mechanism: &Mechanism, shape: &Shape, device: &Device) -> Vec<(Parameter, Tensor<1>, Vec<usize>)> {
    let of = |parameter: Parameter| {
        let sizes = mechanism.parameter_shape(parameter, shape);
        let defaults = mechanism.parameter_default(parameter, shape);
        let near = |i: usize, x: f32| if x == 0.0 { 0.3 * (i as f32).cos() } else { x * (1.0 + 0.05 * (i % 3) as f32) };
        let mut values: Vec<f32> = defaults.iter().enumerate().map(|(i, x)| near(i, *x)).collect();
        if let Some(Bias::Tensor(_)) = mechanism.bias.filter(|_| parameter == Parameter::Bias) {
            // Some pairs are absent.
            values.iter_mut().skip(3).step_by(11).for_each(|x| *x = f32::NEG_INFINITY);
        }
        let len = values.len();
        (parameter, Tensor::from_data(TensorData::new(values, [len]), device), sizes)
    };
    mechanism.parameters().into_iter().map(of).collect()
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn mask(call: Call, device: &Device) -> Mask {
    let keep = |seq: usize, step: usize, gap: usize| {
        let keep: Vec<bool> = (0..2 * seq).map(|n| n % step != gap).collect();
        Tensor::<2, Bool>::from_data(TensorData::new(keep, [2, seq]), device)
    };
    match call.masks {
        true => Mask::key_mask(keep(call.seq_kv, 6, 2)).with_query_mask(keep(call.seq_q, 7, 3)),
        false => Mask::none(),
    }
}

/// `out` and all gradients, by name.
fn run(
    mechanism: &Mechanism,
    shape: &Shape,
    [q, k, v]: [Tensor<4>; 3],
    mask: &Mask,
    strategy: Strategy,
) -> Result<Vec<(&'static str, Vec<f64>)>, Error> {
    let [q, k, v] = [q, k, v].map(|x| x.autodiff().require_grad());
    let tied = mechanism.tied;
    let inputs = if tied { Inputs::tied(q.clone(), v.clone()) } else { Inputs::new(q.clone(), k.clone(), v.clone()) };
    let mut leaves = Vec::new();
    let mut inputs = inputs;
    for (parameter, flat, sizes) in parameters(mechanism, shape, &q.device()) {
        let flat = flat.require_grad();
        leaves.push((parameter.name(), flat.clone()));
        inputs = match sizes[..] {
            [_] => inputs.with(parameter, flat),
            [a, b] => inputs.with(parameter, flat.reshape([a, b])),
            [a, b, c] => inputs.with(parameter, flat.reshape([a, b, c])),
            [a, b, c, d] => inputs.with(parameter, flat.reshape([a, b, c, d])),
            _ => unreachable!("parameters have one to four axes"),
        };
    }
    let out = attend(&inputs, mechanism, mask, strategy)?.out;
    let [.., seq, dim] = out.dims();
    let dout = TensorData::new((0..seq * dim).map(|i| (1.7 * i as f32).sin()).collect::<Vec<_>>(), [1, 1, seq, dim]);
    let dout = Tensor::<4>::from_data(dout, &out.device()).cast(FloatDType::from(out.dtype()));
    let gradients = (out.clone() * dout).sum().backward();
    let mut found = vec![("out", values(out.inner()))];
    for (name, leaf) in [("q", q), ("k", k), ("v", v)] {
        // Burn leaves out the gradient of what is not read.
        let gradient = leaf.grad(&gradients).unwrap_or_else(|| leaf.clone().inner().zeros_like());
        found.push((name, values(gradient)));
    }
    for (name, leaf) in leaves {
        let gradient = leaf.grad(&gradients).unwrap_or_else(|| leaf.clone().inner().zeros_like());
        found.push((name, values(gradient)));
    }
    Ok(found)
}

/// The relative distance; absolute, where nothing but rounding is expected.
fn distance(got: &[f64], expected: &[f64]) -> f64 {
    if expected.iter().any(|x| x.abs() > 1e-3) {
        return relative_distance(got, expected);
    }
    got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Every combination of four values with a number of its own.
fn product() -> impl Iterator<Item = (usize, [&'static str; 4])> {
    let two = |n: usize| {
        NORMALISATIONS.iter().enumerate().flat_map(move |(i, normalisation)| {
            SERIES.iter().enumerate().map(move |(j, series)| (n + 3 * i + j, *normalisation, *series))
        })
    };
    SCORES
        .iter()
        .enumerate()
        .flat_map(move |(i, score)| {
            STRUCTURES.iter().enumerate().flat_map(move |(j, structure)| {
                two(i + 2 * j).map(move |(n, normalisation, series)| (n, [*score, *structure, normalisation, series]))
            })
        })
        .chain(SCORES.iter().enumerate().flat_map(|(i, score)| {
            FACTORED.iter().enumerate().flat_map(move |(j, structure)| {
                let factors = r#"{"kind": "factors"}"#;
                SERIES
                    .iter()
                    .enumerate()
                    .map(move |(n, series)| (i + 2 * j + n, [*score, *structure, factors, *series]))
            })
        }))
        .chain(SCORES.iter().enumerate().flat_map(move |(i, score)| {
            PROJECTED.iter().enumerate().flat_map(move |(j, structure)| {
                two(i + 2 * j).map(move |(n, normalisation, series)| (n, [*score, *structure, normalisation, series]))
            })
        }))
}

/// Runs a composition out of tensor operations and by the reference; tells what is farther apart than rounding is.
fn failures(mechanism: &Mechanism, shape: &Shape, call: Call) -> Vec<String> {
    let device = Device::flex();
    let Shape { seq_q, seq_kv, .. } = *shape;
    let tensors = [[seq_q, 4], [seq_kv, 4], [seq_kv, 3]].map(|[seq, dim]| random([2, 2, seq, dim], &device));
    let mask = mask(call, &device);
    let wide = tensors.clone().map(|x| x.cast(FloatDType::F64));
    let by = |tensors, strategy| run(mechanism, shape, tensors, &mask, strategy).unwrap();
    let (got, exact) = (by(tensors.clone(), Strategy::Composed), by(wide, Strategy::Composed));
    let expected = by(tensors, Strategy::Reference);
    let mut failures = Vec::new();
    for (((name, got), (_, exact)), (_, expected)) in got.iter().zip(&exact).zip(&expected) {
        // A parameter's gradient is a sum over all pairs that may cancel: f32 has fewer digits of it.
        let of_f32 = if ["out", "q", "k", "v"].contains(name) { 1e-4 } else { 1e-3 };
        let (in_f32, in_f64) = (distance(got, expected), distance(exact, expected));
        if [in_f32 / of_f32, in_f64 / 2e-6].into_iter().any(|x| x.is_nan() || x > 1.0) {
            failures.push(format!("{name} by {in_f32:.1e} and {in_f64:.1e}: {mechanism:?} {call:?}"));
        }
    }
    failures
}

fn assert_none(failures: &[String], compared: usize) {
    failures.iter().take(20).for_each(|failure| println!("{failure}"));
    assert!(failures.is_empty(), "{} failures in {compared} compositions", failures.len());
}

#[test]
fn tensors_agree_with_the_reference() {
    let (mut compared, mut all) = (0, Vec::new());
    // Two calls of each, in turns.
    for (n, parts) in product().flat_map(|(n, parts)| [(n, parts), (n + 1, parts)]) {
        let call = CALLS[n % CALLS.len()];
        let Some((mechanism, shape)) = mechanism(parts, call, compared + n) else { continue };
        compared += 1;
        all.extend(failures(&mechanism, &shape, call));
    }
    assert_none(&all, compared);
    assert!(compared > 1500, "{compared}");
}

/// Queries that choose for themselves among the clusters of earlier segments.
#[test]
fn causal_segments_agree_with_the_reference() {
    let (mut compared, mut all) = (0, Vec::new());
    for values in [r#""clusters": 2, "routes": 1"#, r#""clusters": 1, "routes": 1, "global_tokens": 1"#] {
        let structure = format!(
            r#"{{"kind": "clustered", {values}, "route_by": "query", "cluster_on": "keys", "estimator": "centroid",
                "causal_clusters": {{"kind": "segment", "size": 3}}}}"#
        );
        for (score, normalisation) in SCORES.iter().flat_map(|score| NORMALISATIONS.iter().map(move |n| (*score, *n))) {
            for (series, call) in SERIES.iter().flat_map(|series| [CALLS[1], CALLS[4]].map(|call| (*series, call))) {
                let parts = [score, &structure, normalisation, series];
                // Means have no bias.
                let Some((mechanism, shape)) = mechanism(parts, call, BIASES.len()) else { continue };
                compared += 1;
                all.extend(failures(&mechanism, &shape, call));
            }
        }
    }
    assert_none(&all, compared);
    assert!(compared > 100, "{compared}");
}

/// A query or a key of which a bias leaves no pair may hold anything, in tensors as in the kernels.
#[test]
fn tokens_without_a_pair_have_no_content() {
    let device = Device::flex();
    let shape = [2, 2, 6, 4];
    let absent = |n: usize| n % 6 == 2 || n / 6 % 6 == 4;
    let numbers: Vec<f32> = (0..36).map(|n| if absent(n) { f32::NEG_INFINITY } else { (n as f32).sin() }).collect();
    let bias = Tensor::<4>::from_data(TensorData::new(numbers, [1, 1, 6, 6]), &device);
    let hole = |x: Tensor<4>, token: usize| {
        let rows =
            Tensor::<1, Bool>::from_data(TensorData::new((0..6).map(|n| n == token).collect::<Vec<_>>(), [6]), &device);
        x.mask_fill(rows.reshape([1, 1, 6, 1]).expand(shape), f32::NAN)
    };
    for preset in ["softmax", "infsa", "sigmoid"] {
        let json = format!(r#"{{"mechanism": "{preset}", "bias": {{"kind": "tensor", "heads": false}}}}"#);
        let mechanism = Mechanism::from_json(&json).unwrap();
        let [q, k, v] = [(); 3].map(|()| random(shape, &device));
        let [dirty_q, dirty_k, dirty_v] = [hole(q.clone(), 4), hole(k.clone(), 2), hole(v.clone(), 2)];
        for strategy in [Strategy::Composed, Strategy::Fused, Strategy::Reference] {
            let out = |q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>| {
                let [q, k, v] = [q, k, v].map(|x| x.clone().autodiff().require_grad());
                let inputs =
                    Inputs::new(q.clone(), k.clone(), v.clone()).with(Parameter::Bias, bias.clone().autodiff());
                let out = attend(&inputs, &mechanism, &Mask::none(), strategy).unwrap().out;
                let gradients = out.clone().powi_scalar(2).sum().backward();
                let all = [q, k, v].map(|x| values(x.grad(&gradients).unwrap()));
                (values(out.inner()), all)
            };
            assert_eq!(out(&q, &k, &v), out(&dirty_q, &dirty_k, &dirty_v), "{preset} by {strategy:?}");
        }
    }
}

#[test]
fn what_needs_eigenvalues_is_refused_by_name() {
    let device = Device::flex();
    for text in [
        r#"{"mechanism": "composed", "score": {"kind": "gaussian"}, "normalisation": {"kind": "whitened", "whitening": "full"}}"#,
        r#"{"mechanism": "composed", "score": {"kind": "gaussian"}, "structure": {"kind": "nystrom", "inverse": "eigen"},
            "normalisation": {"kind": "none"}}"#,
    ] {
        let mechanism = Mechanism::from_json(text).unwrap();
        let x = || random([1, 2, 8, 4], &device);
        let by = |strategy| attend(&Inputs::new(x(), x(), x()), &mechanism, &Mask::none(), strategy);
        let refused = by(Strategy::Composed).unwrap_err();
        assert!(matches!(refused, Error::Mechanism(KernelError::Unsupported { .. })), "{refused}");
        assert!(by(Strategy::Auto).is_ok(), "{text}");
    }
}

/// The numbers of a module's bias.
fn bias(module: &MultiHeadAttention) -> Vec<f64> {
    let slopes = module.learned.value(Parameter::Bias).map(|slopes| values(slopes.inner()));
    slopes.or(module.bias.table.as_ref().map(|table| values(table.val().inner()))).unwrap_or_default()
}

const LEARNED: &[&str] = &[
    r#"{"mechanism": "softmax", "series": {"kind": "hops", "gamma": 0.5}, "bias": {"kind": "buckets", "count": 8, "max_distance": 6}}"#,
    r#"{"mechanism": "infsa", "bias": {"kind": "alibi"}}"#,
    r#"{"mechanism": "infsa", "activation": "gelu", "bias": {"kind": "grid", "height": 3, "width": 3}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "levy", "kappa": 3.0}, "series": {"kind": "resolvent", "gamma": 0.6}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-sigmoid"}, "structure": {"kind": "clustered", "clusters": 3,
        "estimator": "centroid"}, "series": {"kind": "hops", "gamma": 0.5}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "dot-sigmoid", "offset": -0.5}, "normalisation": {"kind": "row"},
        "series": {"kind": "one-hop", "gamma": 0.5}}"#,
    r#"{"mechanism": "composed", "score": {"kind": "student"}, "structure": {"kind": "nystrom", "landmarks": {"kind": "conv",
        "ratio": 2}, "landmark_act": true, "inverse": "cholesky", "ridge": 0.25}, "normalisation": {"kind": "symmetric"},
        "series": {"kind": "one-hop", "gamma": 0.9}}"#,
];

#[test]
fn modules_of_compositions_learn_and_are_stored() {
    let device = Device::flex().autodiff();
    for text in LEARNED {
        for strategy in [Strategy::Auto, Strategy::Composed] {
            let mechanism = Mechanism::from_json(text).unwrap();
            let config = MultiHeadAttentionConfig::new(12, 3, mechanism).with_strategy(strategy);
            let config = config.with_trained([
                Parameter::Gamma,
                Parameter::Alpha,
                Parameter::Kappa,
                Parameter::Scale,
                Parameter::Offset,
                Parameter::Bias,
            ]);
            let mut module = config.init(&device);
            let [x, target] = [(); 2].map(|()| random([2, 9, 12], &device));
            let loss = |module: &MultiHeadAttention| {
                (module.forward(MhaInput::self_attn(x.clone())).context - target.clone()).square().mean()
            };
            let first = loss(&module).into_scalar::<f64>();
            let before = values(module.learned.value(Parameter::Gamma).unwrap().inner());
            let bias_before = bias(&module);
            let mut optimiser = SgdConfig::new().init();
            for _ in 0..20 {
                let gradients = loss(&module).backward();
                let gradients = GradientsParams::from_grads(gradients, &module);
                module = optimiser.step(0.3, module, gradients);
            }
            let last = loss(&module).into_scalar::<f64>();
            assert!(last < 0.97 * first, "{text} {strategy}: from {first} to {last}");
            assert_ne!(before, values(module.learned.value(Parameter::Gamma).unwrap().inner()), "{text}");
            assert_eq!(bias_before.is_empty(), module.mechanism.bias.is_none(), "{text}");
            assert!(bias_before.is_empty() || bias_before != bias(&module), "{text}");
            let file = tempfile::NamedTempFile::new().unwrap();
            convert::save_weights(&module, file.path(), &Default::default()).unwrap();
            let mut other = config.init(&device);
            convert::load_weights(&mut other, file.path()).unwrap();
            assert_eq!(loss(&other).into_scalar::<f64>(), last, "{text} {strategy}");
            assert_eq!(other.num_params(), module.num_params());
        }
    }
}
