//! What is added to the logits of pairs: the kernels against the reference, that against finite differences, and what biases are equal to.

use crate::{support, threads};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_kernels::{Error, Mechanism, Operator, Parameter, Shape, Strategy, Tol, reference};
use support::{
    problem::{Problem, assert_solution},
    random::problem,
};

/// Compositions that form pairs, of every normalisation and series that takes a bias.
const PAIRS: &[&str] = &[
    r#""mechanism": "softmax""#,
    r#""mechanism": "softmax", "causal": true"#,
    r#""mechanism": "softmax", "tied": true"#,
    r#""mechanism": "infsa", "activation": "gelu""#,
    r#""mechanism": "infsa", "causal": true"#,
    r#""mechanism": "infsa", "activation": "abs", "tied": true"#,
    r#""mechanism": "infsa-resolvent", "gamma": 0.6"#,
    r#""mechanism": "fna", "kappa": 3"#,
    r#""mechanism": "fna", "kappa": 3, "norm_exponent": 0.5"#,
    r#""mechanism": "sigmoid""#,
    r#""mechanism": "sigmoid", "score": {"kind": "dot-sigmoid", "offset": -1.5}"#,
    r#""mechanism": "cosine""#,
    r#""mechanism": "soft", "landmarks": {"kind": "all"}"#,
    r#""mechanism": "soft-pp", "landmarks": {"kind": "all"}"#,
    r#""mechanism": "ssa", "clusters": 4, "samples": 3"#,
    r#""mechanism": "ssa", "clusters": 3, "samples": 2, "causal": true, "balance": null"#,
    r#""mechanism": "composed", "score": {"kind": "dot-squared-relu"}, "series": {"kind": "hops", "count": 3, "gamma": 0.7}"#,
    r#""mechanism": "composed", "score": {"kind": "dot-relu"}, "normalisation": {"kind": "none", "factor": "inv-n"}"#,
    r#""mechanism": "composed", "structure": {"kind": "dense", "window": 9, "sinks": 2}, "causal": true"#,
    r#""mechanism": "composed", "score": {"kind": "dot-exp", "softcap": 3}, "structure": {"kind": "dense", "window": 20}"#,
];

const TENSORS: &[&str] = &[
    r#"{"kind": "tensor"}"#,
    r#"{"kind": "tensor", "batch": true, "heads": false}"#,
    r#"{"kind": "tensor", "batch": true, "queries": false}"#,
    r#"{"kind": "tensor", "heads": false, "keys": false}"#,
    r#"{"kind": "tensor", "heads": false, "queries": false, "keys": false}"#,
];

fn mechanism(values: &str, bias: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{{values}, "bias": {bias}}}"#)).unwrap()
}

/// A problem with a bias of numbers of order one, of which every ninth of a tensor's is absent if there are to be such.
fn biased(values: &str, bias: &str, shape: Shape, seed: u64, absent: bool) -> Problem {
    let mut p = problem(mechanism(values, bias), shape, seed);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let len = p.mechanism.parameter_len_of(Parameter::Bias, &p.shape);
    // Slopes are multiplied with distances.
    let most = if bias.contains("alibi") { 0.1 } else { 2.0 };
    let mut numbers: Vec<f32> = (0..len).map(|_| rng.random_range(-most..most)).collect();
    if absent {
        numbers.iter_mut().skip(4).step_by(9).for_each(|x| *x = f32::NEG_INFINITY);
    }
    p.parameters.insert(Parameter::Bias, numbers);
    p.fix_plan();
    p
}

/// Elements of a parameter.
trait Len {
    fn parameter_len_of(&self, parameter: Parameter, shape: &Shape) -> usize;
}

impl Len for Mechanism {
    fn parameter_len_of(&self, parameter: Parameter, shape: &Shape) -> usize {
        self.parameter_shape(parameter, shape).iter().product()
    }
}

fn assert_fused(p: &Problem) {
    assert_within(p, Tol::f32(&p.mechanism).with_noise(4.0));
}

fn assert_within(p: &Problem, tol: Tol) {
    let mut expected = p.reference();
    let mut got = p.solve::<f32>(Strategy::Fused, None).unwrap();
    // A masked row has no log-sum-exp that anyone asks for.
    for solution in [&mut got, &mut expected] {
        solution.remove("lse");
    }
    let what = format!("{:?} on {:?}", p.mechanism, p.shape);
    assert_solution(&what, &got, &expected, &p.shape, tol);
}

/// A row that is masked by the least number instead of minus infinity weighs all its keys alike, as everywhere.
#[test]
fn rows_of_the_least_bias_are_means() {
    for values in
        [r#""mechanism": "softmax""#, r#""mechanism": "fna", "kappa": 3"#, r#""mechanism": "softmax", "causal": true"#]
    {
        for least in [-1e25, f32::MIN] {
            let mut p = biased(values, r#"{"kind": "tensor"}"#, Shape::square(2, 2, 20, 5), 3, false);
            let bias = p.parameters.get_mut(&Parameter::Bias).unwrap();
            bias.chunks_mut(20).skip(2).step_by(5).for_each(|row| row.fill(least));
            let expected = p.reference();
            let seen = if values.contains("causal") { 3 } else { 20 };
            let mean = |c: usize| (0..seen).map(|j| p.v[j * 5 + c]).sum::<f64>() / seen as f64;
            let off = (0..5).map(|c| (expected["out"][2 * 5 + c] - mean(c)).abs()).fold(0.0, f64::max);
            assert!(off < 1e-14, "{values}, {least}: the reference is off by {off}");
            assert_fused(&p);
        }
    }
}

/// Norms of rows one of which has the least bias everywhere: it adds nothing to them, or affinities beyond f32, which are refused.
#[test]
fn norms_beside_rows_of_the_least_bias() {
    let scores = [
        "\"dot-exp\"",
        "\"cosine-exp\"",
        r#"{"kind": "levy", "kappa": 2}"#,
        "\"constant\"",
        "\"dot-abs\"",
        "\"dot-relu\"",
    ];
    let normalisations = [
        r#""frobenius""#,
        r#"{"kind": "frobenius", "eps": 0.5}"#,
        r#""symmetric""#,
        r#"{"kind": "row", "density_exponent": 0.5}"#,
        r#""none""#,
    ];
    let (mut right, mut refused) = (0, 0);
    for (score, normalisation) in scores.iter().flat_map(|score| normalisations.map(|n| (score, n))) {
        for causal in [false, true] {
            let json = format!(
                r#""mechanism": "composed", "score": {score}, "normalisation": {normalisation}, "causal": {causal}"#
            );
            let allowed = Mechanism::from_json(&format!("{{{json}}}"))
                .is_ok_and(|m| Operator::new(&m, Shape::square(1, 1, 4, 3), false, Strategy::Fused).is_ok());
            for least in [-1e30, f32::MIN] {
                if !allowed {
                    continue;
                }
                let mut p = biased(&json, r#"{"kind": "tensor"}"#, Shape::square(1, 2, 12, 5), 3, false);
                p.parameters
                    .get_mut(&Parameter::Bias)
                    .unwrap()
                    .chunks_mut(12)
                    .skip(3)
                    .step_by(5)
                    .for_each(|row| row.fill(least));
                match p.solve::<f32>(Strategy::Fused, None) {
                    Err(Error::Overflow { .. } | Error::Range { .. }) => refused += 1,
                    Err(error) => panic!("{json}, {least}: {error}"),
                    Ok(got) => {
                        let out = [&got["out"], &p.reference()["out"]].map(Clone::clone);
                        support::assert_close(&format!("{json}, {least}"), &out[0], &out[1], 2, 1e-4, 1e-6);
                        right += 1;
                    }
                }
            }
        }
    }
    assert!(right > 20 && refused > 0, "{right} right, {refused} refused");
}

#[test]
fn the_fused_path_is_the_reference() {
    for (n, values) in PAIRS.iter().enumerate() {
        for (m, bias) in TENSORS.iter().enumerate() {
            for (seq, absent) in [(6, false), (40, true), (150, n % 2 == 0)] {
                let shape = Shape { value_dim: 7, ..Shape::square(2, 2, seq, 5) };
                let mut p = biased(values, bias, shape, (n * 7 + m + seq) as u64, absent);
                if m == 1 {
                    p.key_mask = Some((0..2 * seq).map(|n| n % 5 != 3).collect());
                    p.query_mask = p.key_mask.clone();
                    p.clusters = None;
                    p.fix_plan();
                }
                assert_fused(&p);
            }
        }
    }
}

#[test]
fn biases_by_distance_are_fused() {
    for (n, values) in PAIRS.iter().enumerate() {
        let kinds = [
            r#"{"kind": "alibi"}"#,
            r#"{"kind": "buckets", "count": 8, "max_distance": 20}"#,
            r#"{"kind": "buckets", "count": 6, "max_distance": 9, "bidirectional": false}"#,
            r#"{"kind": "grid", "height": 6, "width": 13}"#,
        ];
        for (m, bias) in kinds.iter().enumerate() {
            let mut p = biased(values, bias, Shape::square(1, 3, 78, 4), (n + m) as u64, false);
            if n % 3 == 1 {
                p.key_mask = Some((0..78).map(|n| n % 7 != 3).collect());
                p.query_mask = p.key_mask.clone();
                p.clusters = None;
                p.fix_plan();
            }
            assert_fused(&p);
        }
    }
}

#[test]
fn queries_and_keys_of_different_number_have_biases() {
    for (n, values) in [PAIRS[0], PAIRS[1], PAIRS[3], PAIRS[7], PAIRS[9]].iter().enumerate() {
        for bias in [TENSORS[0], r#"{"kind": "alibi"}"#, r#"{"kind": "buckets"}"#] {
            let shape = Shape { seq_q: 70, seq_kv: 90, ..Shape::square(2, 2, 70, 4) };
            assert_fused(&biased(values, bias, shape, n as u64, false));
        }
    }
}

/// More rows than a task has, and gradients that are summed over batch and heads.
#[test]
fn long_rows_have_biases() {
    for (n, bias) in [TENSORS[0], r#"{"kind": "tensor", "heads": false}"#, r#"{"kind": "alibi"}"#].iter().enumerate() {
        let p = biased(PAIRS[0], bias, Shape::square(1, 2, 1100, 16), n as u64, n == 1);
        // Gradients of a row add up to nothing; those of slopes are summed times distances of up to 1,100.
        assert_within(&p, Tol { backward: 1e-4, ..Tol::f32(&p.mechanism).with_noise(4.0) });
    }
}

#[test]
fn gradients_are_slopes() {
    let all = TENSORS.iter().copied().chain([
        r#"{"kind": "alibi"}"#,
        r#"{"kind": "buckets", "count": 4, "max_distance": 6}"#,
        r#"{"kind": "grid", "height": 3, "width": 3}"#,
    ]);
    for (m, bias) in all.enumerate() {
        for (n, values) in PAIRS.iter().enumerate() {
            let p = biased(values, bias, Shape::square(2, 2, 9, 3), (n + 3 * m) as u64, m == 1);
            let objective = |numbers: &[f32]| {
                let mut p = p.clone();
                p.parameters.insert(Parameter::Bias, numbers.to_vec());
                let out = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().out;
                out.iter().zip(&p.dout).map(|(x, g)| x * g).sum::<f64>()
            };
            let (numbers, gradient) = (&p.parameters[&Parameter::Bias], &p.reference()["dbias"]);
            for at in (0..numbers.len()).step_by(1 + numbers.len() / 5).filter(|&at| numbers[at].is_finite()) {
                // Small: between both sides there may be a kink.
                let h = 1.0 / 65536.0;
                let moved = |by: f32| {
                    let mut moved = numbers.clone();
                    moved[at] += by;
                    (f64::from(moved[at]), objective(&moved))
                };
                let ((a, f_a), (b, f_b)) = (moved(-h), moved(h));
                let (slope, got) = ((f_b - f_a) / (b - a), gradient[at]);
                let size = gradient.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
                assert!((slope - got).abs() < 1e-4 * size, "{:?}, {at}: {got}, not {slope}", p.mechanism);
            }
        }
    }
}

/// What a bias by distance is as a tensor, of one head and batch element after the other.
fn as_tensor(p: &Problem, number: impl Fn(usize, i64, [usize; 2]) -> f32) -> Problem {
    let Shape { heads, seq_q, seq_kv, .. } = p.shape;
    let rows = (0..heads).flat_map(|h| (0..seq_q).map(move |i| (h, i)));
    let pairs = rows.flat_map(|(h, i)| (0..seq_kv).map(move |j| (h, i, j)));
    let ahead = |i: usize, j: usize| (j + seq_q) as i64 - (i + seq_kv) as i64;
    let numbers = pairs.map(|(h, i, j)| number(h, ahead(i, j), [i, j])).collect();
    let mechanism = mechanism(r#""mechanism": "softmax""#, TENSORS[0]);
    let mut tensor = Problem { mechanism, ..p.clone() };
    tensor.parameters.insert(Parameter::Bias, numbers);
    tensor
}

fn assert_same(p: &Problem, tensor: &Problem) {
    let [mut got, mut expected] = [p.fused(), tensor.fused()];
    for solution in [&mut got, &mut expected] {
        solution.remove("dbias");
    }
    assert_eq!(got, expected, "{:?}", p.mechanism);
}

#[test]
fn biases_by_distance_are_those_of_the_papers() {
    let shape = Shape::square(1, 4, 30, 3);
    let softmax = r#""mechanism": "softmax""#;
    let p = problem(mechanism(softmax, r#"{"kind": "alibi"}"#), shape, 1);
    assert_same(&p, &as_tensor(&p, |h, ahead, _| -(0.25_f32.powi(h as i32 + 1)) * ahead.abs() as f32));
    // The number of heads is no power of two.
    let slopes = p.mechanism.parameter_default(Parameter::Bias, &Shape::square(1, 6, 5, 3));
    assert_eq!(
        slopes,
        [2_f32.powi(-2), 2_f32.powi(-4), 2_f32.powi(-6), 2_f32.powi(-8), 2_f32.powi(-1), 2_f32.powi(-3)]
    );

    let p = biased(softmax, r#"{"kind": "buckets", "count": 8, "max_distance": 16}"#, shape, 2, false);
    let table = p.parameters[&Parameter::Bias].clone();
    // Two single distances, then [2, 5] and from 6 on: 2 (16 / 2)^(1/2) = 5.66.
    let bucket = |distance: i64| match distance {
        0 | 1 => distance as usize,
        2..6 => 2,
        _ => 3,
    };
    let number = |h: usize, ahead: i64, _| table[h * 8 + 4 * usize::from(ahead > 0) + bucket(ahead.abs())];
    assert_same(&p, &as_tensor(&p, number));

    // Powers of two begin buckets of their own: 8 to 15, 16 to 31, 32 to 63 in steps of a half each.
    let shape = Shape::square(1, 1, 70, 3);
    let p = biased(softmax, r#"{"kind": "buckets", "count": 32, "max_distance": 128}"#, shape, 2, false);
    let table = p.parameters[&Parameter::Bias].clone();
    let first = [8, 12, 16, 23, 32, 46, 64];
    let bucket = |distance: i64| match distance {
        0..8 => distance as usize,
        _ => 7 + first.iter().filter(|&&first| first <= distance).count(),
    };
    let number = |_, ahead: i64, _| table[16 * usize::from(ahead > 0) + bucket(ahead.abs())];
    assert_same(&p, &as_tensor(&p, number));

    let shape = Shape::square(1, 4, 30, 3);
    let p = biased(softmax, r#"{"kind": "grid", "height": 5, "width": 6}"#, shape, 3, false);
    let table = p.parameters[&Parameter::Bias].clone();
    let number = |h: usize, _, [i, j]: [usize; 2]| table[h * 99 + (i / 6 + 4 - j / 6) * 11 + i % 6 + 5 - j % 6];
    assert_same(&p, &as_tensor(&p, number));
}

#[test]
fn nothing_added_changes_nothing() {
    // In a window that holds all tokens both are the engine's.
    let window = r#""mechanism": "softmax", "structure": {"kind": "dense", "window": 200}"#;
    for seq in [10, 130] {
        let mut p = biased(window, TENSORS[0], Shape::square(2, 2, seq, 6), 4, false);
        p.parameters.get_mut(&Parameter::Bias).unwrap().fill(0.0);
        let plain = Mechanism::from_json(&format!("{{{window}}}")).unwrap();
        let none = Problem { mechanism: plain, parameters: Default::default(), ..p.clone() };
        let mut got = p.fused();
        got.remove("dbias");
        assert_eq!(got, none.fused());
    }
}

#[test]
fn absent_pairs_are_masked_ones() {
    let heads_alone = r#"{"kind": "tensor", "heads": false, "batch": true}"#;
    for values in ["softmax", "infsa", "sigmoid", "soft-pp"] {
        let landmarks = if values == "soft-pp" { r#", "landmarks": {"kind": "all"}"# } else { "" };
        let values = format!(r#""mechanism": "{values}"{landmarks}"#);
        let mut p = biased(&values, heads_alone, Shape::square(2, 2, 70, 6), 5, false);
        let keep: Vec<bool> = (0..140).map(|n| n % 6 != 2).collect();
        let bias = p.parameters.get_mut(&Parameter::Bias).unwrap();
        for (n, x) in bias.iter_mut().enumerate() {
            let (b, i, j) = (n / 4900, n / 70 % 70, n % 70);
            *x = if keep[b * 70 + i] && keep[b * 70 + j] { 0.0 } else { f32::NEG_INFINITY };
        }
        // What has no pair has no content.
        for x in [Some(&mut p.q), p.k.as_mut(), Some(&mut p.v)].into_iter().flatten() {
            for (n, x) in x.iter_mut().enumerate().filter(|(n, _)| !keep[n / 840 * 70 + n / 6 % 70]) {
                *x = [f64::NAN, f64::INFINITY][n % 2];
            }
        }
        let (mut got, mut masked) = (p.fused(), p.clone());
        (masked.key_mask, masked.query_mask) = (Some(keep.clone()), Some(keep));
        masked.parameters.get_mut(&Parameter::Bias).unwrap().fill(0.0);
        let mut expected = masked.fused();
        for solution in [&mut got, &mut expected] {
            solution.remove("dbias");
        }
        assert_solution(&values, &got, &expected, &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
    }
}

#[test]
fn threads_change_no_bit() {
    for bias in [TENSORS[0], TENSORS[1], r#"{"kind": "alibi"}"#] {
        let p = biased(PAIRS[0], bias, Shape::square(2, 2, 700, 8), 6, false);
        let [one, four] = [1, 4].map(|threads| threads::on_threads(threads, || p.fused()));
        assert_eq!(one, four, "{bias}");
    }
}

#[test]
fn what_cannot_be_added_is_refused() {
    let shape = Shape::square(1, 2, 12, 4);
    let softmax = r#""mechanism": "softmax""#;
    let refused = |values: &str, bias: &str, word: &str| {
        let error = Mechanism::from_json(&format!(r#"{{{values}, "bias": {bias}}}"#))
            .and_then(|m| Operator::new(&m, shape, false, Strategy::Auto))
            .map(drop)
            .unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(r#""mechanism": "soft""#, TENSORS[0], "pairs");
    refused(r#""mechanism": "linear-infsa""#, TENSORS[0], "pairs");
    refused(r#""mechanism": "ssa", "estimator": "centroid""#, TENSORS[0], "centroids");
    refused(r#""mechanism": "laplacian-exact""#, TENSORS[0], "whitened");
    refused(softmax, r#"{"kind": "grid", "height": 3, "width": 5}"#, "grid");
    refused(softmax, r#"{"kind": "grid", "height": 0, "width": 5}"#, "height");
    refused(softmax, r#"{"kind": "buckets", "count": 7}"#, "count");
    refused(softmax, r#"{"kind": "buckets", "max_distance": 4}"#, "max_distance");
    refused(softmax, r#"{"kind": "t5"}"#, "unknown kind");
    refused(softmax, r#"{"kind": "tensor", "rows": true}"#, "rows");

    let mut p = biased(softmax, TENSORS[0], shape, 7, false);
    for (x, word) in [(f32::NAN, "bias"), (f32::INFINITY, "bias"), (1e12, "2^34")] {
        p.parameters.get_mut(&Parameter::Bias).unwrap()[5] = x;
        let error = p.solve::<f32>(Strategy::Fused, None).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    // Numbers are looked at in parts, of which this is not the first.
    let mut long = biased(softmax, TENSORS[0], Shape::square(1, 1, 150, 4), 7, false);
    *long.parameters.get_mut(&Parameter::Bias).unwrap().last_mut().unwrap() = f32::NAN;
    assert!(long.solve::<f32>(Strategy::Fused, None).unwrap_err().to_string().contains("bias"));
    p.parameters.get_mut(&Parameter::Bias).unwrap().pop();
    assert!(matches!(p.solve::<f32>(Strategy::Fused, None), Err(Error::Length { tensor: "bias", .. })));
    p.parameters.clear();
    assert!(matches!(p.solve::<f32>(Strategy::Fused, None), Err(Error::Tensor { tensor: "bias", .. })));
}

/// Padding on the left, and a batch element of nothing but padding.
#[test]
fn leading_and_all_tokens_may_be_masked() {
    for (seed, values) in [PAIRS[0], PAIRS[3], PAIRS[9], PAIRS[17]].iter().enumerate() {
        for masked in [1, 4, 9] {
            let mut p = biased(values, TENSORS[0], Shape::square(2, 2, 9, 3), seed as u64, false);
            p.query_mask = Some((0..18).map(|n| n >= masked).collect());
            p.key_mask = p.query_mask.clone();
            assert_fused(&p);
        }
    }
}
