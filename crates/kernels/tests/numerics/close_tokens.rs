//! Tokens that coincide, as those of padding do, and tokens that nearly do.

use crate::support;

use rayon::ThreadPoolBuilder;
use resolvent_kernels::{
    Error, Inputs, Mechanism, Operator, Scratch, Shape, Strategy, Tol,
    mechanism::{Score, Structure, Whitened},
    score::{PairScore, Simd, Slopes, Term},
};
use support::{
    assert_close,
    problem::{Problem, Solution, assert_solution},
    random::{VARIANTS, problem},
};

const TOKENS: usize = 50;
const DIM: usize = 8;

fn call(json: &str) -> Problem {
    problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 2, TOKENS, DIM), 5)
}

/// Writes to all channels of every token what `at` gives for it, if anything.
fn fill(x: &mut [f64], at: fn(usize) -> Option<f64>) {
    for (n, x) in x.iter_mut().enumerate() {
        *x = at(n / DIM % TOKENS).map_or(*x, |value| f64::from(value as f32));
    }
}

/// Landmarks of equal tokens count as one, whatever inverts the matrix among them, and their gradient is that of each.
#[test]
fn landmarks_that_coincide_keep_their_gradients() {
    for json in [
        r#"{"mechanism": "laplacian"}"#,
        r#"{"mechanism": "laplacian", "inverse": "cholesky"}"#,
        r#"{"mechanism": "laplacian", "inverse": "cg", "centering": "per-query"}"#,
        r#"{"mechanism": "laplacian", "newton_iterations": 6}"#,
        r#"{"mechanism": "laplacian", "centering": "none", "whitening": "none", "landmarks": {"kind": "stride", "ratio": 3}}"#,
        r#"{"mechanism": "laplacian", "landmarks": {"kind": "conv", "ratio": 4}}"#,
        r#"{"mechanism": "laplacian", "tied": true, "landmarks": {"kind": "pool", "ratio": 3}}"#,
        r#"{"mechanism": "laplacian", "ridge": 1e-6, "landmarks": {"kind": "pool", "ratio": 5}}"#,
    ] {
        let groups: [fn(usize) -> Option<f64>; 3] = [
            |token| (token >= 24).then_some(0.0),
            |token| (token < 24).then_some(0.37),
            |token| [None, Some(0.0), Some(0.0), None, Some(0.3137), Some(0.3137), Some(0.3137)][token / 8],
        ];
        for (n, (at, masked)) in groups.into_iter().flat_map(|at| [(at, false), (at, true)]).enumerate() {
            let mut p = call(json);
            fill(&mut p.q, at);
            p.k.iter_mut().for_each(|k| fill(k, at));
            if masked {
                // Windows of other sizes than the rest.
                p.key_mask = Some((0..TOKENS).map(|token| ![1, 26, 33, 34].contains(&token)).collect());
            }
            let (mut got, mut expected) = (p.solve::<f32>(Strategy::Fused, None).unwrap(), p.reference());
            // The bandwidth's gradient is one sum of them all, in which most cancels.
            let [of_width, width] = [&mut got, &mut expected].map(|s| s.remove("dlambda").unwrap());
            let (tol, what) = (Tol::f32(&p.mechanism), format!("{json}, {n}"));
            assert_close(&what, &of_width, &width, 1, 4.0 * tol.backward, 0.0);
            assert_solution(&what, &got, &expected, &p.shape, tol);
        }
    }
}

/// Where all queries, or all keys, or both are equal, every mechanism is right in what it computes of them, or says that it cannot.
#[test]
fn equal_tokens_are_right() {
    for json in VARIANTS {
        for (q, k) in [(true, false), (false, true), (true, true)] {
            let mut p = call(json);
            if q {
                fill(&mut p.q, |_| Some(0.3137));
            }
            match &mut p.k {
                Some(keys) if k => fill(keys, |_| Some(0.6151)),
                None if !q => continue,
                _ => {}
            }
            p.fix_plan();
            let (got, expected) = (p.solve::<f32>(Strategy::Fused, None).unwrap(), p.reference());
            let of_values = |s: &support::problem::Solution| {
                s.iter().filter(|(name, _)| ["out", "dv"].contains(name)).map(|(name, x)| (*name, x.clone())).collect()
            };
            let tol = Tol::f32(&p.mechanism).with_noise(1.0);
            assert_solution(json, &of_values(&got), &of_values(&expected), &p.shape, tol);
        }
    }
}

/// Landmarks that nearly coincide leave no digits to the gradient of the keys, however many others there are: that is told, and a larger
/// ridge is enough. Outputs are right.
#[test]
fn landmarks_that_nearly_coincide_are_refused() {
    for (ridge, backward) in [("0", false), ("1e-6", false), ("1e-3", false), ("2.9e-3", false), ("3e-3", true)] {
        for pairs in [1, TOKENS / 2] {
            let fields = r#""inverse": "cholesky", "landmarks": {"kind": "stride", "ratio": 1}"#;
            let mut p = call(&format!(r#"{{"mechanism": "laplacian", "ridge": {ridge}, {fields}}}"#));
            let k = p.k.as_mut().unwrap();
            for at in (0..k.len()).filter(|at| at / DIM % 2 == 1 && at / DIM % TOKENS < 2 * pairs) {
                // A hundred-thousandth of the bandwidth from the token before.
                k[at] = f64::from((k[at - DIM] + 5e-6) as f32);
            }
            let op = Operator::new(&p.mechanism, p.shape, false, Strategy::Fused).unwrap();
            let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
            let (q, k, v) = (narrow(&p.q), narrow(p.k.as_ref().unwrap()), narrow(&p.v));
            let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: p.extras() };
            let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
            op.forward(&inputs, &p.mask(), &mut out, &mut stats, &mut Scratch::default()).unwrap();
            let out: Vec<f64> = out.into_iter().map(f64::from).collect();
            assert_close(ridge, &out, &p.reference()["out"], 2, 1e-4, 0.0);
            let is_close = |e: &Error| matches!(e, Error::Close { tensor: "k", .. });
            let solved = p.solve::<f32>(Strategy::Fused, None);
            assert_eq!(solved.is_ok(), backward, "{ridge}, {pairs} pairs");
            assert!(solved.err().is_none_or(|e| is_close(&e)), "{ridge}");
        }
    }
}

/// Statistics of similarities that differ by their rounding alone are refused by the side that they are taken over.
#[test]
fn similarities_that_nearly_coincide_are_refused() {
    for (fields, near_q, near_k, size, refused) in [
        ("", true, false, 1e-6, Some("q")),
        ("", false, true, 1e-6, None),
        (r#", "centering": "per-query""#, false, true, 1e-6, Some("k")),
        (r#", "centering": "per-query""#, true, false, 1e-6, None),
        (r#", "whiten_eps": 1e-12"#, true, false, 1e-4, Some("q")),
        (r#", "whiten_eps": 1e-12, "whitening": "none""#, true, false, 1e-4, None),
        ("", true, false, 1e-3, None),
    ] {
        let mut p = call(&format!(r#"{{"mechanism": "laplacian-exact"{fields}}}"#));
        let near = |x: &mut Vec<f64>| x.iter_mut().for_each(|x| *x = f64::from((1.0 + *x * size) as f32));
        if near_q {
            near(&mut p.q);
        }
        if near_k {
            near(p.k.as_mut().unwrap());
        }
        match (p.solve::<f32>(Strategy::Fused, None), refused) {
            (Err(Error::Close { tensor, .. }), Some(name)) if tensor == name => {}
            (Ok(_), None) => {}
            (got, _) => panic!("{fields}, {near_q}, {near_k}, {size}: {got:?}"),
        }
    }
}

/// A whitened call through landmarks whose queries lie `apart` from each other.
fn close_queries(score: &str, landmarks: [&str; 2], normalisation: &str, (tokens, apart): (usize, f64)) -> Problem {
    let [kind, count] = landmarks;
    let json = format!(
        r#"{{"mechanism": "composed", "score": {{"kind": "{score}"}}, "normalisation": {{"kind": "whitened"{normalisation}}},
            "structure": {{"kind": "nystrom", "landmarks": {{"kind": "{kind}", "count": {count}}}, "inverse": "cholesky"}}}}"#
    );
    let mut p = problem(Mechanism::from_json(&json).unwrap(), Shape::square(1, 2, tokens, DIM), 5);
    let first = |n: usize| n / (tokens * DIM) * tokens * DIM + n % DIM;
    p.q = (0..p.q.len()).map(|n| f64::from((p.q[first(n)] + apart * p.q[n]) as f32)).collect();
    p
}

/// The largest difference of every gradient, over its largest entry.
fn differences(got: &Solution, expected: &Solution) -> Vec<(&'static str, f64)> {
    let largest = |x: &mut dyn Iterator<Item = f64>| x.fold(0.0, |most: f64, x| most.max(x.abs()));
    let of = |(&name, expected): (&&'static str, &Vec<f64>)| {
        let error = largest(&mut got[name].iter().zip(expected).map(|(x, y)| x - y));
        (name, error / largest(&mut expected.iter().copied()))
    };
    expected.iter().filter(|(name, _)| name.starts_with('d')).map(of).collect()
}

/// What half a rounding of the queries, up for some and down for others, makes of a gradient that is one number.
fn sensitivity(p: &Problem, expected: &Solution, name: &str) -> f64 {
    let moved = (1..8).map(|draw| {
        let mut p = p.clone();
        for (n, x) in p.q.iter_mut().enumerate() {
            let up = (n as f64 * 0.7 * f64::from(draw)).sin() > 0.0;
            *x *= 1.0 + if up { 0.25 } else { -0.25 } * f64::from(f32::EPSILON);
        }
        differences(&p.reference(), expected).into_iter().find(|of| of.0 == name).unwrap().1
    });
    moved.fold(0.0, f64::max)
}

/// Where columns hardly vary over the queries, gradients of landmarks and of the score's parameters are sums in which nearly all of it
/// cancels. They are as right as the others: as f32 holds what affinities of close queries differ by.
#[test]
fn close_queries_keep_gradients_of_landmarks_and_parameters() {
    for score in ["cosine-exp", "gaussian", "laplacian", "levy"] {
        for (n, apart) in [1e-2, 1e-3, 1e-4, 1e-5].into_iter().enumerate() {
            // Nearer queries are refused.
            if score == "laplacian" && apart < 1e-4 {
                continue;
            }
            for normalisation in ["", r#", "whiten_eps": 1e-8"#, r#", "centering": "per-query""#] {
                for landmarks in ["pool", "given"] {
                    let mut p = close_queries(score, [landmarks, "12"], normalisation, (TOKENS, apart));
                    if n % 2 == 1 {
                        p.key_mask = Some((0..TOKENS).map(|token| token % 7 != 3).collect());
                        p.query_mask = Some((0..TOKENS).map(|token| token % 5 != 0).collect());
                    }
                    let expected = p.reference();
                    for (name, error) in differences(&p.fused(), &expected) {
                        // Twenty roundings over the difference; more where a single number is small of itself.
                        let mut bound = 1.2e-6 / apart;
                        if expected[name].len() <= 2 && error > bound {
                            bound = 80.0 * sensitivity(&p, &expected, name);
                        }
                        assert!(error < bound, "{score}, {landmarks}, {apart}{normalisation}: {name} {error}");
                    }
                }
            }
        }
    }
}

/// The same of several tiles and parts, and of more landmarks than a block of columns, whatever the threads.
#[test]
fn sums_over_close_queries_are_those_of_all_parts() {
    for score in ["cosine-exp", "gaussian", "laplacian", "levy", "student"] {
        for normalisation in ["", r#", "centering": "none""#] {
            let p = close_queries(score, ["pool", "80"], normalisation, (600, 1e-3));
            let solve = |threads| {
                let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| p.fused())
            };
            let (one, two, expected) = (solve(1), solve(2), p.reference());
            let bits = |s: &Solution| Vec::from_iter(s.values().flatten().map(|x| x.to_bits()));
            assert!(bits(&one) == bits(&two), "{score}{normalisation}");
            for (name, error) in differences(&one, &expected) {
                assert!(error < 2e-3, "{score}{normalisation}: {name} {error}");
            }
        }
    }
}

/// `1 / (1 + square / 4)`, which is `student` of power 2.
struct Quotient;

impl PairScore for Quotient {
    const TERM: Term = Term::SquaredDifference;
    const LOG: bool = false;
    const NON_NEGATIVE: bool = true;
    const POSITIVE_DEFINITE: bool = true;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, square: S::f32s) -> S::f32s {
        let one = simd.splat_f32s(1.0);
        simd.div_f32s(one, simd.mul_add_f32s(square, simd.splat_f32s(0.25), one))
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, square: S::f32s) -> Slopes<S::f32s> {
        let g = self.value(simd, square);
        let term = simd.mul_f32s(simd.mul_f32s(g, g), simd.splat_f32s(-0.25));
        Slopes { term, parameters: [simd.splat_f32s(0.0); 2] }
    }
}

/// A score whose values are affinities, not their logarithms.
#[test]
fn close_queries_keep_gradients_of_scores_from_outside() {
    let student = r#"student", "alpha": 1, "intrinsic_dim": 1, "kappa": 2, "manifold": "euclidean"#;
    for landmarks in ["pool", "given"] {
        let p = close_queries(student, [landmarks, "12"], "", (TOKENS, 1e-3));
        let Structure::Nystrom(structure) = p.mechanism.values().structure else { panic!("landmarks") };
        let own = Mechanism::new(Score::custom("quotient", Quotient)).structure(structure);
        let own = Problem { mechanism: own.normalisation(Whitened::default()), ..p.clone() };
        let (mut expected, got) = (p.reference(), own.fused());
        expected.retain(|name, _| got.contains_key(name));
        for (name, error) in differences(&got, &expected) {
            assert!(error < 1.2e-3, "{landmarks}: {name} {error}");
        }
    }
}

/// More landmarks than scores are told of at once, and a whole tile of queries that are masked, as padding is: what is taken from one query on
/// is that of the shorter sequence.
#[test]
fn close_queries_may_be_padded() {
    for score in ["cosine-exp", "gaussian", "laplacian", "levy"] {
        for (first, last) in [(0, 70), (70, 170), (0, 0)] {
            let mut p = close_queries(score, ["pool", "85"], "", (170, 1e-2));
            p.query_mask = Some((0..170).map(|token| (first..last).contains(&token)).collect());
            let (got, expected) = (p.solve::<f32>(Strategy::Fused, None).unwrap(), p.reference());
            let off = differences(&got, &expected).into_iter().filter(|(_, error)| *error > 2e-3).collect::<Vec<_>>();
            assert!(off.is_empty(), "{score}, {first} to {last}: {off:?}");
            assert!(got.values().flatten().all(|x| x.is_finite()), "{score}, {first} to {last}");
        }
    }
}

/// Two means that are equal have no slope towards each other where the score has a kink, whatever tokens they are of.
#[test]
fn equal_means_of_other_tokens_are_equal() {
    for json in [
        r#"{"mechanism": "laplacian", "landmarks": {"kind": "pool", "ratio": 3}}"#,
        r#"{"mechanism": "laplacian", "landmarks": {"kind": "pool", "count": 5}}"#,
        r#"{"mechanism": "composed", "score": "levy", "normalisation": "whitened", "structure": {"kind": "nystrom", "ridge": 0.1,
            "landmarks": {"kind": "pool", "ratio": 3}, "inverse": "cholesky"}}"#,
    ] {
        for steps in [1.0, 4.0] {
            let mut p = problem(Mechanism::from_json(json).unwrap(), Shape::square(1, 2, 18, 4), 5);
            let whole =
                |x: &mut Vec<f64>| x.iter_mut().for_each(|x| *x = (*x * 1e3).abs().round() % (steps + 1.0) / steps);
            whole(&mut p.q);
            whole(p.k.as_mut().unwrap());
            let (got, expected) = (p.solve::<f32>(Strategy::Fused, None).unwrap(), p.reference());
            assert_solution(json, &got, &expected, &p.shape, Tol::f32(&p.mechanism).with_noise(1.0));
        }
    }
}
