//! Compositions through landmarks, fused, against the reference: scores, normalisations, landmarks, inverses, masks, tied keys and
//! cross-attention, around the edges of tiles.

use crate::support;

use half::{bf16, f16};
use rayon::ThreadPoolBuilder;
use resolvent_kernels::{
    Element, Error, Inputs, Mechanism, Operator, Parameter, Scratch, Shape, Strategy, Tol, simd::Level,
};
use support::{
    problem::{Problem, Solution, assert_solution},
    random::problem,
};

const SCORES: &[&str] = &[
    r#"{"kind": "cosine-exp", "scale": 2.0}"#,
    r#"{"kind": "gaussian"}"#,
    r#"{"kind": "levy", "kappa": 3.0}"#,
    r#"{"kind": "levy", "alpha": 2.0, "kappa": 4.0}"#,
    r#"{"kind": "student", "kappa": 3.0, "alpha": 1.5}"#,
    r#"{"kind": "laplacian"}"#,
];

const NORMALISATIONS: &[&str] = &[
    r#"{"kind": "none"}"#,
    r#"{"kind": "none", "factor": "inv-n"}"#,
    r#"{"kind": "symmetric"}"#,
    r#"{"kind": "symmetric", "degree": "token"}"#,
    r#"{"kind": "row"}"#,
    r#"{"kind": "whitened", "whiten_eps": 0.25}"#,
    r#"{"kind": "whitened", "whiten_eps": 0.25, "centering": "none", "weight_scale": "inv-n"}"#,
    r#"{"kind": "whitened", "whiten_eps": 0.25, "centering": "per-query", "bias_one_over_n": false}"#,
    r#"{"kind": "whitened", "whitening": "none", "centering": "per-query", "weight_scale": "inv-sqrt-n"}"#,
    r#"{"kind": "whitened", "whitening": "none"}"#,
];

/// Landmarks of every kind, and every inverse.
const STRUCTURES: &[&str] = &[
    r#""landmarks": {"kind": "pool", "ratio": 3}, "inverse": "cholesky""#,
    r#""landmarks": {"kind": "pool", "count": 4}, "inverse": "newton-schulz""#,
    r#""landmarks": {"kind": "stride", "ratio": 4}, "inverse": "cg""#,
    r#""landmarks": {"kind": "conv", "ratio": 2}, "inverse": "cholesky", "landmark_act": true"#,
    r#""landmarks": {"kind": "random", "count": 3, "seed": 5}, "inverse": "eigen""#,
    r#""landmarks": {"kind": "first", "count": 3}, "gradient": "unrolled", "newton_iterations": 4"#,
    r#""landmarks": {"kind": "given", "count": 4}, "newton_init": null, "newton_iterations": 9"#,
    r#""landmarks": {"kind": "pool", "ratio": 2}, "newton_init": "backtrack", "landmark_act": true"#,
];

fn json(score: &str, structure: &str, normalisation: &str, tied: bool) -> String {
    format!(
        r#"{{"mechanism": "composed", "tied": {tied}, "score": {score}, "normalisation": {normalisation},
            "structure": {{"kind": "nystrom", "ridge": 0.25, {structure}}}, "series": {{"kind": "one-hop", "gamma": 0.75}}}}"#
    )
}

/// How queries and keys of a call relate.
#[derive(Debug, Clone, Copy)]
struct Call {
    seq_q: usize,
    seq_kv: usize,
    tied: bool,
    masks: Masks,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Masks {
    None,
    Same,
    Apart,
}

const CALLS: &[Call] = &[
    Call { seq_q: 13, seq_kv: 13, tied: false, masks: Masks::Apart },
    Call { seq_q: 13, seq_kv: 13, tied: true, masks: Masks::None },
    Call { seq_q: 13, seq_kv: 13, tied: true, masks: Masks::Same },
    Call { seq_q: 14, seq_kv: 14, tied: true, masks: Masks::Apart },
    Call { seq_q: 5, seq_kv: 17, tied: false, masks: Masks::None },
    Call { seq_q: 67, seq_kv: 9, tied: false, masks: Masks::Apart },
];

fn problem_of(json: &str, call: Call, seed: u64) -> Problem {
    let Call { seq_q, seq_kv, masks, .. } = call;
    let shape = Shape { batch: 2, heads: 2, seq_q, seq_kv, head_dim: 5, value_dim: 3 };
    let mut p = problem(Mechanism::from_json(json).unwrap(), shape, seed);
    if masks != Masks::None {
        let keep = |tokens: usize, every: usize| Some((0..2 * tokens).map(|n| n % every != 2).collect());
        p.key_mask = keep(seq_kv, 6);
        p.query_mask = keep(seq_q, if masks == Masks::Same { 6 } else { 7 });
    }
    // Where a call may give what the configuration says, some do.
    if seed.is_multiple_of(2) {
        for (parameter, values) in [
            (Parameter::Gamma, [0.5, 0.875]),
            (Parameter::Scale, [0.5, 0.25]),
            (Parameter::Kappa, [3.0, 4.0]),
            (Parameter::Alpha, [1.25, 1.5]),
            (Parameter::Lambda, [3.0, 5.0]),
        ] {
            if p.mechanism.parameters().contains(&parameter) {
                p.parameters.insert(parameter, values.to_vec());
            }
        }
    }
    p
}

#[track_caller]
fn assert_fused(what: &str, p: &Problem) {
    let tol = Tol::f32(&p.mechanism).with_noise(1.0);
    let got = p.solve::<f32>(Strategy::Fused, None).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_solution(what, &got, &p.reference(), &p.shape, tol);
}

#[test]
fn scores_and_normalisations_are_those_of_the_reference() {
    let mut seed = 0;
    for score in SCORES {
        for normalisation in NORMALISATIONS {
            for &call in CALLS {
                seed += 1;
                let structure = STRUCTURES[seed as usize % 3];
                let json = json(score, structure, normalisation, call.tied);
                assert_fused(&format!("{json} on {call:?}"), &problem_of(&json, call, seed));
            }
        }
    }
}

#[test]
fn landmarks_and_inverses_are_those_of_the_reference() {
    let mut seed = 0;
    for structure in STRUCTURES {
        for (n, normalisation) in NORMALISATIONS.iter().enumerate() {
            for &call in CALLS {
                seed += 1;
                let json = json(SCORES[(n + seed as usize) % SCORES.len()], structure, normalisation, call.tied);
                assert_fused(&format!("{json} on {call:?}"), &problem_of(&json, call, seed));
            }
        }
    }
}

/// Where tokens are alike, what f32 rounds of a covariance would be multiplied by the inverse among landmarks, twice.
#[test]
fn variances_of_tokens_that_are_alike_are_right() {
    for (n, normalisation) in [
        r#"{"kind": "whitened"}"#,
        r#"{"kind": "whitened", "centering": "per-query", "weight_scale": "inv-n"}"#,
        r#"{"kind": "whitened", "centering": "none", "bias_one_over_n": false}"#,
        r#"{"kind": "none"}"#,
    ]
    .into_iter()
    .enumerate()
    {
        for (spread, within) in [(0.3, 1.0), (0.1, 10.0), (0.05, 30.0)] {
            for inverse in ["cholesky", "cg", "newton-schulz\", \"newton_iterations\": 40, \"gradient\": \"unrolled"] {
                let json = format!(
                    r#"{{"mechanism": "composed", "score": "cosine-exp", "normalisation": {normalisation},
                        "structure": {{"kind": "nystrom", "landmarks": {{"kind": "first", "count": 16}}, "inverse": "{inverse}"}}}}"#
                );
                let mut p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 1, 64, 8), n as u64);
                for x in [Some(&mut p.q), p.k.as_mut()].into_iter().flatten() {
                    x.iter_mut().for_each(|x| *x = f64::from((1.0 + spread * *x) as f32));
                }
                let (got, expected) = (p.fused(), p.reference());
                for (name, least) in [("out", 3e-5), ("dv", 3e-5), ("dq", 1e-4), ("dk", 3e-4)] {
                    let what = format!("{json}, {spread}: {name}");
                    support::assert_close(&what, &got[name], &expected[name], 1, within * least, 0.0);
                }
            }
        }
    }
}

/// On a grid, with a filter over the values, whatever else adds to the output.
#[test]
fn filters_over_the_values_are_added() {
    for (n, normalisation) in NORMALISATIONS.iter().enumerate() {
        for tied in [true, false] {
            for masks in [Masks::None, Masks::Same, Masks::Apart] {
                let structure = r#""landmarks": {"kind": "conv", "ratio": 2}, "value_conv": 3, "grid": [4, 5], "inverse": "cholesky""#;
                let json = json(SCORES[n % SCORES.len()], structure, normalisation, tied);
                let call = Call { seq_q: 20, seq_kv: 20, tied, masks };
                assert_fused(&format!("{json} on {call:?}"), &problem_of(&json, call, n as u64));
            }
        }
    }
}

/// Several hops over one set of landmarks, with every tensor that landmarks may have.
#[test]
fn hops_are_those_of_the_reference() {
    let structures = [
        STRUCTURES[1],
        r#""landmarks": {"kind": "conv", "ratio": 2}, "landmark_act": true, "value_conv": 3, "inverse": "cholesky""#,
        r#""landmarks": {"kind": "given", "count": 4}, "inverse": "cholesky""#,
    ];
    for (n, normalisation) in NORMALISATIONS.iter().enumerate() {
        for &call in CALLS.iter().filter(|call| call.seq_q == call.seq_kv) {
            for structure in structures {
                let json = json(SCORES[n % SCORES.len()], structure, normalisation, call.tied);
                let one = r#""kind": "one-hop", "gamma": 0.75"#;
                let json = json.replace(one, r#""kind": "hops", "count": 3, "gamma": 0.25"#);
                assert_fused(&format!("{json} on {call:?}"), &problem_of(&json, call, n as u64));
            }
        }
    }
}

/// A filter over the values has no meaning where queries stand at other places than keys.
#[test]
fn a_filter_over_the_values_takes_no_cross_attention() {
    let json = json(SCORES[0], r#""value_conv": 3"#, NORMALISATIONS[0], false);
    let shape = Shape { seq_q: 5, ..Shape::square(1, 1, 8, 4) };
    let error = Mechanism::from_json(&json).unwrap().check(&shape, false).unwrap_err();
    assert!(matches!(error, Error::Unsupported { what: "value_conv in cross-attention", .. }), "{error}");
}

/// Tiles, vectors and splits of the tokens end at these.
#[test]
fn sizes_around_every_edge_are_right() {
    let sizes = [(1, 1, 1), (63, 16, 16), (64, 17, 33), (65, 1, 15), (128, 31, 64), (300, 6, 7)];
    for (n, (tokens, head_dim, value_dim)) in sizes.into_iter().enumerate() {
        for (normalisation, tied) in [(1, false), (3, true), (4, true), (4, false), (5, true), (7, false)] {
            let landmarks =
                format!(r#""landmarks": {{"kind": "pool", "ratio": {}}}, "inverse": "cholesky""#, 1 + tokens / 20);
            let score = SCORES[(n + normalisation) % SCORES.len()];
            let json = json(score, &landmarks, NORMALISATIONS[normalisation], tied);
            let shape = Shape { batch: 1, heads: 2, seq_q: tokens, seq_kv: tokens, head_dim, value_dim };
            assert_fused(&format!("{json} on {shape:?}"), &problem(Mechanism::from_json(&json).unwrap(), shape, 3));
        }
    }
}

/// A problem of every normalisation, that more than one task works at.
fn problems() -> impl Iterator<Item = Problem> {
    NORMALISATIONS.iter().enumerate().flat_map(|(n, normalisation)| {
        [false, true].map(|tied| {
            let json = json(SCORES[n % SCORES.len()], STRUCTURES[0], normalisation, tied);
            problem_of(&json, Call { seq_q: 300, seq_kv: 300, tied, masks: Masks::Same }, n as u64)
        })
    })
}

/// The bits of everything that a call returns.
fn bits(solution: &Solution) -> Vec<u64> {
    solution.values().flatten().map(|x| x.to_bits()).collect()
}

#[test]
fn threads_change_no_bit() {
    for p in problems() {
        let solve = |threads| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| bits(&p.fused()))
        };
        assert!(solve(1) == solve(2), "{:?}", p.mechanism);
    }
}

#[test]
fn every_instruction_set_and_storage_agrees_with_the_reference() {
    for p in problems().step_by(3) {
        for level in Level::available() {
            let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
            let what = format!("{}, {:?}", level.name(), p.mechanism);
            assert_solution(&what, &got, &p.reference(), &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
        }
        stored::<f16>(&p);
        stored::<bf16>(&p);
    }
}

fn stored<T: Element>(p: &Problem) {
    let p = p.rounded::<T>().unwrap();
    let got = p.solve::<T>(Strategy::Fused, None).unwrap();
    let what = format!("{}, {:?}", T::NAME, p.mechanism);
    assert_solution(&what, &got, &p.reference(), &p.shape, Tol::HALF.with_noise(1.0));
}

/// What masks hide may be anything.
#[test]
fn masked_content_changes_no_bit() {
    for (n, normalisation) in NORMALISATIONS.iter().enumerate() {
        for &call in CALLS.iter().filter(|call| call.masks != Masks::None) {
            for score in SCORES {
                let json = json(score, STRUCTURES[n % 2], normalisation, call.tied);
                let p = problem_of(&json, call, n as u64);
                let mut hidden = p.clone();
                let is_hidden = |mask: &Option<Vec<bool>>, at: usize, len: usize, dim: usize| {
                    // [batch, heads = 2, tokens, dim]
                    !mask.as_ref().unwrap()[at / (2 * len * dim) * len + at / dim % len]
                };
                let [key, query] = [p.key_mask.clone(), p.query_mask.clone()];
                // Tied tokens are hidden where neither side sees them.
                let q_hidden = |at: usize| {
                    is_hidden(&query, at, call.seq_q, 5) && (!call.tied || is_hidden(&key, at, call.seq_kv, 5))
                };
                (0..p.q.len()).filter(|&at| q_hidden(at)).for_each(|at| hidden.q[at] = f64::NAN);
                if let Some(k) = &mut hidden.k {
                    let of_key = |at: &usize| is_hidden(&key, *at, call.seq_kv, 5);
                    (0..k.len()).filter(of_key).for_each(|at| k[at] = f64::NAN);
                }
                let of_value = |at: &usize| is_hidden(&key, *at, call.seq_kv, 3);
                (0..p.v.len()).filter(of_value).for_each(|at| hidden.v[at] = f64::NAN);
                let of_output = |at: &usize| is_hidden(&query, *at, call.seq_q, 3);
                (0..p.dout.len()).filter(of_output).for_each(|at| hidden.dout[at] = f64::NAN);
                assert!(bits(&p.fused()) == bits(&hidden.fused()), "{json} on {call:?}");
            }
        }
    }
}

/// Landmarks of equal tokens count as one; rows without length are at a right angle to all others.
#[test]
fn equal_and_empty_tokens_are_right() {
    for score in SCORES {
        for (n, normalisation) in NORMALISATIONS.iter().enumerate() {
            for tied in [false, true] {
                let json = json(score, STRUCTURES[[0, 1, 4, 7][n % 4]], normalisation, tied);
                let call = Call { seq_q: 24, seq_kv: 24, tied, masks: Masks::None };
                let mut p = problem_of(&json, call, n as u64);
                for (x, value) in [(Some(&mut p.q), 0.0), (p.k.as_mut(), 0.0)] {
                    let rows = x.into_iter().flat_map(|x| x.chunks_exact_mut(5).enumerate());
                    for (token, row) in rows {
                        match token % 24 {
                            3..9 => row.fill(value),
                            12..20 => row.copy_from_slice(&[0.5, -0.25, 1.0, 0.75, 0.125]),
                            _ => {}
                        }
                    }
                }
                assert_fused(&json, &p);
            }
        }
    }
}

/// A call without keys, or with none that is kept, is zero.
#[test]
fn no_keys_leave_nothing() {
    for normalisation in NORMALISATIONS {
        for tied in [false, true] {
            let json = json(SCORES[1], STRUCTURES[0], normalisation, tied);
            let mut p = problem_of(&json, Call { seq_q: 7, seq_kv: 7, tied, masks: Masks::Same }, 1);
            p.key_mask = Some((0..14).map(|n| n >= 7).collect());
            assert_fused(&json, &p);
        }
    }
}

/// What a plan says of scratch and of what is saved is enough, and the engine is the fused one.
#[test]
fn compositions_through_landmarks_are_fused() {
    for normalisation in NORMALISATIONS {
        let m = Mechanism::from_json(&json(SCORES[0], STRUCTURES[0], normalisation, false)).unwrap();
        let op = Operator::new(&m, Shape::square(1, 1, 8, 4), false, Strategy::Auto).unwrap();
        assert_eq!(op.plan().strategy, Strategy::Fused);
    }
}

/// Landmarks that nearly coincide keep the outputs' digits, but not those of the keys' gradients: that is told, and not where the
/// ridge is large enough.
#[test]
fn landmarks_that_nearly_coincide_are_right_or_refused() {
    let landmarks = r#""landmarks": {"kind": "stride", "ratio": 1}, "inverse": "cholesky""#;
    for score in SCORES {
        for normalisation in NORMALISATIONS {
            for (ridge, backward) in [("1e-6", false), ("0.01", true)] {
                let json = json(score, landmarks, normalisation, false)
                    .replace("0.25, \"landmarks", &format!("{ridge}, \"landmarks"));
                let mut p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 2, 20, 8), 5);
                let k = p.k.as_mut().unwrap();
                for at in (0..k.len()).filter(|at| at / 8 % 2 == 1) {
                    k[at] = f64::from((k[at - 8] + 5e-6) as f32);
                }
                match p.solve::<f32>(Strategy::Fused, None) {
                    Ok(got) if backward => {
                        let expected = p.reference();
                        for name in ["out", "dq", "dv"] {
                            let far = resolvent_kernels::relative_distance(&got[name], &expected[name]);
                            assert!(far < 1e-4, "{json}: {name}, {far:.0e}");
                        }
                    }
                    Err(Error::Close { tensor: "k", .. }) if !backward => {
                        let far = resolvent_kernels::relative_distance(&outputs(&p).unwrap(), &p.reference()["out"]);
                        assert!(far < 1e-3, "{json}: {far:.0e}");
                    }
                    got => panic!("{json}: {got:?}"),
                }
            }
        }
    }
}

/// The forward pass alone.
fn outputs(p: &Problem) -> resolvent_kernels::Result<Vec<f64>> {
    let op = Operator::new(&p.mechanism, p.shape, false, Strategy::Fused)?;
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let (q, k, v) = (narrow(&p.q), p.k.as_deref().map(narrow), narrow(&p.v));
    let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: p.extras() };
    let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
    op.forward(&inputs, &p.mask(), &mut out, &mut stats, &mut Scratch::default())?;
    Ok(out.into_iter().map(f64::from).collect())
}

/// A call may say which tokens are landmarks wherever some are drawn.
#[test]
fn landmarks_of_a_composition_may_be_picked() {
    let of = |landmarks: &str| {
        let parts = format!(r#""structure": {{"kind": "nystrom", "landmarks": {landmarks}}}, "normalisation": "row""#);
        let json = format!(r#"{{"mechanism": "composed", "score": "gaussian", {parts}}}"#);
        problem(Mechanism::from_json(&json).unwrap(), Shape::square(2, 2, 13, 6), 3)
    };
    let first = of(r#"{"kind": "first", "count": 4}"#);
    for strategy in [Strategy::Fused, Strategy::Reference] {
        let mut drawn = of(r#"{"kind": "random", "count": 4, "seed": 5}"#);
        let expected = first.solve::<f32>(strategy, None).unwrap();
        assert_ne!(drawn.solve::<f32>(strategy, None).unwrap(), expected);
        drawn.landmark_indices = Some([0, 1, 2, 3].repeat(2));
        assert_eq!(drawn.solve::<f32>(strategy, None).unwrap(), expected);
    }
}
