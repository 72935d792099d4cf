//! What is known in closed form about approximations through landmarks.

use crate::support;

use resolvent_kernels::{Error, Mask, Mechanism, Operator, Parameter, Scratch, Shape, Strategy, Tol};
use support::{
    assert_close,
    golden::Golden,
    problem::{Problem, Solution},
    random::problem,
};

/// A way to solve a problem.
type Solve = fn(&Problem) -> Solution;

/// The ways, and how exact they are.
const SOLVERS: [(Solve, f64); 2] = [(Problem::reference, 1e-8), (Problem::fused, 2e-5)];

fn mechanism(json: &str) -> Mechanism {
    Mechanism::from_json(json).unwrap()
}

/// Tokens on a circle: their kernel is circulant, so that waves are its eigenvectors, and one landmark per token makes
/// the output `x f(x + ridge) x` times the wave, with `f` what the steps make of `1/x`.
#[test]
fn newton_schulz_is_a_spectral_filter() {
    for (init, steps) in [("scaled", 3), ("scaled", 20), ("paper", 5), ("identity", 4)] {
        on_a_circle(7, init, steps);
    }
    // So many that steps are taken on eigenvalues, unless they are few.
    for (n, init, steps) in [(390, "scaled", 4), (390, "scaled", 20), (770, "identity", 9)] {
        on_a_circle(n, init, steps);
    }
}

fn on_a_circle(n: usize, init: &str, steps: usize) {
    let (waves, radius, scale, ridge) = (n.min(9), 1.5_f64, 0.5, 0.125);
    let angle = |i: usize| 2.0 * std::f64::consts::PI * i as f64 / n as f64;
    let kernel = |i: usize| (-scale * (2.0 * radius * (angle(i) / 2.0).sin()).powi(2)).exp();
    let norm = (0..n).map(kernel).sum::<f64>() + ridge;
    let json = format!(
        r#"{{"mechanism": "soft", "scale": {scale}, "ridge": {ridge}, "newton_init": "{init}", "newton_iterations": {steps},
            "landmarks": {{"kind": "first", "count": {n}}}}}"#
    );
    let mut p = problem(mechanism(&json), Shape { value_dim: waves, ..Shape::square(1, 1, n, 2) }, 1);
    p.q = (0..n).flat_map(|i| [radius * angle(i).cos(), radius * angle(i).sin()]).collect();
    let wave = |i: usize, k: usize| (angle(i) * k as f64 + 0.3).cos();
    p.v = (0..n * waves).map(|at| wave(at / waves, at % waves)).collect();
    let expected = (0..n * waves).map(|at| {
        let (i, k) = (at / waves, at % waves);
        let eigenvalue: f64 = (0..n).map(|j| kernel(j) * (angle(j) * k as f64).cos()).sum();
        let x = eigenvalue + ridge;
        let start = match init {
            "scaled" => 1.8 / (norm * norm) * x * x,
            "paper" => 2.0 / (norm * norm) * x * x,
            _ => 1.8 / norm * x,
        };
        let filter = (1.0 - (1.0 - start).powi(1 << steps)) / x;
        eigenvalue * filter * eigenvalue * wave(i, k)
    });
    let expected = Vec::from_iter(expected);
    for (solve, rtol) in SOLVERS {
        assert_close(&format!("{n}: {init}, {steps} steps"), &solve(&p)["out"], &expected, 1, rtol, 0.0);
    }
}

/// A gradient through the steps is not that of the inverse before the last of them no longer matters, which is later than the
/// inverse itself is near.
#[test]
fn gradients_of_steps_are_those_of_as_many_as_were_taken() {
    for (mechanism_id, init) in [("soft", "scaled"), ("soft-pp", "paper"), ("soft", "identity")] {
        for steps in 1..12 {
            let m = mechanism(&format!(
                r#"{{"mechanism": "{mechanism_id}", "ridge": 0.25, "landmarks": {{"kind": "pool", "ratio": 3}}, "newton_init": "{init}",
                    "gradient": "unrolled", "newton_iterations": {steps}}}"#
            ));
            for seed in 0..6 {
                let p = problem(m.clone(), Shape { value_dim: 2, ..Shape::square(1, 1, 9, 14) }, seed);
                let what = format!("{mechanism_id} from {init}, {steps} steps, {seed}");
                assert_close(&what, &p.fused()["dq"], &p.reference()["dq"], 1, 1e-5, 0.0);
            }
        }
    }
}

/// Landmarks that nearly coincide: a condition of 1e4 to 1e7, which steps in f32 would answer with noise.
#[test]
fn steps_on_close_landmarks_keep_their_digits() {
    for (spread, ridge, init) in [(0.1, 0.0, "scaled"), (0.03, 0.0, "scaled"), (0.03, 1e-5, "identity")] {
        for steps in [12, 24, 40, 60] {
            let json = format!(
                r#"{{"mechanism": "soft", "scale": 0.5, "ridge": {ridge}, "newton_init": "{init}", "newton_iterations": {steps},
                    "landmarks": {{"kind": "first", "count": 12}}}}"#
            );
            let mut p = problem(mechanism(&json), Shape::square(1, 2, 60, 8), 3);
            p.q.iter_mut().for_each(|x| *x *= spread);
            let what = format!("{spread} apart, {init}, {steps} steps");
            assert_close(&what, &p.fused()["out"], &p.reference()["out"], 2, 1e-4, 0.0);
        }
    }
}

/// Gradients through steps on such landmarks, whether these have converged or not: affinities are f32, which is a ten thousandth of the
/// least eigenvalues here.
#[test]
fn gradients_of_steps_on_close_landmarks_keep_their_digits() {
    for (spread, ridge, init) in
        [(0.1, 0.01, "scaled"), (0.1, 0.01, "identity"), (0.05, 1e-3, "scaled"), (0.05, 1e-4, "scaled")]
    {
        for steps in [10, 20, 40] {
            let json = format!(
                r#"{{"mechanism": "soft", "scale": 0.5, "ridge": {ridge}, "newton_init": "{init}", "newton_iterations": {steps},
                    "gradient": "unrolled", "landmarks": {{"kind": "first", "count": 16}}}}"#
            );
            let mut p = problem(mechanism(&json), Shape::square(1, 2, 64, 8), 3);
            p.q.iter_mut().for_each(|x| *x *= spread);
            let (got, expected) = (p.fused(), p.reference());
            for name in ["dq", "dv"] {
                let what = format!("{name}, {spread} apart, ridge {ridge}, {init}, {steps} steps");
                assert_close(&what, &got[name], &expected[name], 2, 3e-3, 0.0);
            }
        }
    }
}

/// Masked landmarks leave smaller matrices than were planned for: on eigenvalues still, or by products again.
#[test]
fn some_of_many_landmarks_may_be_masked() {
    let n = 400;
    for (masked, gradient) in [(8, "implicit"), (24, "implicit"), (8, "unrolled"), (24, "unrolled")] {
        let json = format!(
            r#"{{"mechanism": "soft", "newton_iterations": 9, "gradient": "{gradient}", "landmarks": {{"kind": "pool", "ratio": 1}}}}"#
        );
        let mut p = problem(mechanism(&json), Shape::square(1, 1, n, 4), 7);
        let keep = Some((0..n).map(|i| i < n - masked).collect());
        (p.key_mask, p.query_mask) = (keep.clone(), keep);
        let (expected, got) = (p.reference(), p.fused());
        for (name, rtol) in [("out", 2e-5), ("dq", 2e-4), ("dv", 2e-5)] {
            assert_close(&format!("{name}, {gradient}, {masked} masked"), &got[name], &expected[name], 1, rtol, 0.0);
        }
    }
}

/// With a landmark at every key, similarities are the kernel's less the ridge, to first order.
#[test]
fn landmarks_interpolate_the_kernel() {
    let (n, ridge) = (24, 1e-3);
    let plain = r#""centering": "none", "whitening": "none", "bias_one_over_n": false, "lambda": 2"#;
    let through = format!(
        r#"{{"mechanism": "laplacian", {plain}, "ridge": {ridge}, "inverse": "cholesky",
            "landmarks": {{"kind": "pool", "ratio": 1}}}}"#
    );
    let whole = format!(r#"{{"mechanism": "laplacian-exact", {plain}}}"#);
    let mut p = problem(mechanism(&through), Shape { value_dim: n, ..Shape::square(1, 2, n, 5) }, 2);
    p.k = Some(p.q.clone());
    p.v = (0..2 * n * n).map(|at| f64::from(u8::from(at % (n * n) / n == at % n))).collect();
    let exact = Problem { mechanism: mechanism(&whole), ..p.clone() };
    for (solve, _) in SOLVERS {
        let (got, expected) = (solve(&p)["out"].clone(), solve(&exact)["out"].clone());
        let most = got.iter().zip(&expected).map(|(g, e)| (g - e).abs()).fold(0.0, f64::max);
        assert!(most <= 1.01 * ridge && most > 0.5 * ridge, "{most}");
    }
}

/// `0 <= P^T Y P <= S` as quadratic forms, whatever the landmarks.
#[test]
fn approximations_lie_below_the_kernel() {
    let columns = 12;
    for landmarks in [
        r#"{"kind": "pool", "ratio": 4}"#,
        r#"{"kind": "first", "count": 5}"#,
        r#"{"kind": "random", "count": 9, "seed": 1}"#,
    ] {
        for inverse in [r#""cholesky""#, r#""newton-schulz", "newton_iterations": 6"#] {
            let through =
                format!(r#"{{"mechanism": "soft", "scale": 0.125, "landmarks": {landmarks}, "inverse": {inverse}}}"#);
            let whole = r#"{"mechanism": "soft", "scale": 0.125, "landmarks": {"kind": "all"}}"#;
            let shape = Shape { value_dim: columns, ..Shape::square(1, 1, 40, 4) };
            let p = problem(mechanism(&through), shape, 3);
            let whole = Problem { mechanism: mechanism(whole), ..p.clone() };
            for (solve, rtol) in SOLVERS {
                let form =
                    |out: &[f64], c: usize| (0..40).map(|i| p.v[i * columns + c] * out[i * columns + c]).sum::<f64>();
                let (below, above) = (&solve(&p)["out"], &solve(&whole)["out"]);
                for c in 0..columns {
                    let (below, above) = (form(below, c), form(above, c));
                    assert!(below >= -rtol * above && below <= (1.0 + rtol) * above, "{through}: {below}, {above}");
                }
            }
        }
    }
}

/// The gradient through the steps, for the cases that store both.
#[test]
fn unrolled_gradients_are_those_of_the_stored_cases() {
    let mut checked = 0;
    for case in Golden::all("soft") {
        let Some(expected) = case.get("dq_unrolled") else { continue };
        let mut config = serde_json::to_value(&case.problem.mechanism).unwrap();
        config["gradient"] = "unrolled".into();
        let p = Problem { mechanism: Mechanism::from_value(config).unwrap(), ..case.problem.clone() };
        let slices = p.shape.slices();
        assert_close(&case.name, &p.reference()["dq"], expected, slices, Tol::F64.backward, 0.0);
        // Without a ridge the null directions' slope is 2^T times the start, and so is the error of f32.
        if case.tol().backward < 1e-3 {
            assert_close(&case.name, &p.fused()["dq"], expected, slices, 10.0 * case.tol().backward, 1e-10);
        }
        checked += 1;
    }
    assert!(checked >= 7, "{checked}");
}

/// Tokens that are their own landmarks, all others far away: gradients are what the far ones leave, however large the
/// token's own share of the sums is.
#[test]
fn a_token_at_a_landmark_is_not_pulled_by_it() {
    for json in [
        r#"{"mechanism": "soft", "landmarks": {"kind": "first", "count": 12}, "inverse": "cholesky"}"#,
        r#"{"mechanism": "soft-pp", "landmarks": {"kind": "pool", "ratio": 1}, "inverse": "cholesky"}"#,
        r#"{"mechanism": "soft", "landmarks": {"kind": "all"}}"#,
    ] {
        let mut p = problem(mechanism(json), Shape::square(1, 2, 12, 8), 5);
        p.q.iter_mut().for_each(|x| *x = f64::from((8.0 * *x + 5.0) as f32));
        let (expected, got) = (p.reference(), p.fused());
        let most = expected["dq"].iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        assert!(most > 0.0 && most < 0.1, "{json}: the test needs small gradients, found {most}");
        assert_close(json, &got["dq"], &expected["dq"], 2, 5e-5, 0.0);
    }
}

/// Landmarks that coincide, or nearly, leave the ridge as the smallest eigenvalue: the inverse has entries of 100, whose sums are
/// as small as one over the number of landmarks.
#[test]
fn landmarks_that_coincide_take_no_digits_from_the_output() {
    for (id, inverse) in [("soft", "cholesky"), ("soft-pp", "cholesky"), ("soft", "eigen"), ("soft-pp", "eigen")] {
        let json = format!(r#"{{"mechanism": "{id}", "inverse": "{inverse}"}}"#);
        let mut p = problem(mechanism(&json), Shape::square(1, 2, 256, 2), 6);
        let tol = Tol::f32(&p.mechanism);
        for step in [0.0, 1.0 / 128.0] {
            p.q = (0..2 * 512).map(|at| (at / 2 % 256) as f64 * step).collect();
            let (expected, got) = (p.reference(), p.fused());
            for name in ["out", "dv"] {
                assert_close(&format!("{json}, {step}: {name}"), &got[name], &expected[name], 2, tol.forward, 0.0);
            }
            // What `eigen` adds for dropped directions is rounded like any product of landmark matrices.
            if inverse == "cholesky" {
                assert_close(&format!("{json}, {step}: dq"), &got["dq"], &expected["dq"], 2, tol.backward, 1e-6);
            }
        }
    }
}

/// Distances do not know where the origin is, and neither may the gradient of their scale.
#[test]
fn a_shared_offset_takes_no_digits_from_the_kernels_width() {
    for (json, width) in [
        (
            r#"{"mechanism": "laplacian", "landmarks": {"kind": "stride", "ratio": 4}, "inverse": "cholesky"}"#,
            "dlambda",
        ),
        (r#"{"mechanism": "laplacian-exact"}"#, "dlambda"),
        (r#"{"mechanism": "soft", "landmarks": {"kind": "first", "count": 24}, "inverse": "cholesky"}"#, "dscale"),
        (r#"{"mechanism": "soft-pp", "landmarks": {"kind": "all"}}"#, "dscale"),
    ] {
        let mut p = problem(mechanism(json), Shape::square(1, 2, 96, 8), 5);
        let parameter = if width == "dscale" { Parameter::Scale } else { Parameter::Lambda };
        let value = if width == "dscale" { 0.1 } else { 4.0 };
        p.parameters.insert(parameter, vec![value; 2]);
        // Multiples of 2^-10 keep their digits with the offset, and so do landmarks that are tokens.
        let exact = |x: &mut f64, offset: f64| *x = (*x * 1024.0).round() / 1024.0 + offset;
        p.q.iter_mut().chain(p.k.iter_mut().flatten()).for_each(|x| exact(x, 1000.0));
        let (expected, got) = (p.reference(), p.fused());
        for (got, expected) in got[width].iter().zip(&expected[width]) {
            assert!((got - expected).abs() < 2e-5 * expected.abs(), "{json}: {got}, should be {expected}");
        }
    }
}

/// A start from which Newton-Schulz diverges is an error, not an output that is no number.
#[test]
fn an_inverse_that_is_not_finite_is_an_error() {
    // Few landmarks, and so many that the steps are taken on eigenvalues.
    [8, 390].into_iter().for_each(diverges);
}

fn diverges(n: usize) {
    let json = format!(
        r#"{{"mechanism": "soft", "newton_init": "official", "ridge": 0.1, "landmarks": {{"kind": "first", "count": {n}}}}}"#
    );
    let shape = Shape::square(1, 1, n, 4);
    // So far apart that the kernel among the landmarks is the identity.
    let q: Vec<f32> = (0..shape.q_len()).map(|i| (100 * i) as f32).collect();
    for strategy in [Strategy::Fused, Strategy::Reference] {
        let op = Operator::new(&mechanism(&json), shape, false, strategy).unwrap();
        let (mut out, mut stats) = (vec![f32::NAN; op.out_len()], vec![f32::NAN; op.plan().stats]);
        let inputs = resolvent_kernels::Inputs { q: &q, k: None, v: &q, extras: Default::default() };
        let refused = op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut Scratch::default());
        assert!(matches!(refused, Err(Error::Diverged { mechanism: "soft" })), "{strategy:?}: {refused:?}");
    }
}
