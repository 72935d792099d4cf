//! `uniform` and `linear-infsa` against the stored cases and the reference: sizes around every block, every level and
//! storage type, masks, extreme magnitudes, and the same bits on any number of threads.

mod support;

use half::{bf16, f16};
use resolvent_kernels::{Mechanism, Shape, Strategy, Tol, simd::Level};
use support::{
    golden::Golden,
    problem::{Problem, Solution, assert_solution},
    random::{mechanisms, problem},
};

fn is_pooled(mechanism: &Mechanism) -> bool {
    matches!(mechanism, Mechanism::Uniform(_) | Mechanism::LinearInfsa(_))
}

fn goldens() -> impl Iterator<Item = Golden> {
    Golden::all("infsa").into_iter().filter(|case| is_pooled(&case.problem.mechanism))
}

fn variants() -> impl Iterator<Item = Mechanism> {
    mechanisms().into_iter().filter(is_pooled)
}

fn tolerance(p: &Problem) -> Tol {
    Tol::f32(&p.mechanism).with_noise(1.0)
}

fn at_every_level(p: &Problem, what: &str) {
    let expected = p.reference();
    for level in Level::available() {
        let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
        assert_solution(&format!("{what}, {}", level.name()), &got, &expected, &p.shape, tolerance(p));
    }
}

#[test]
fn stored_cases_at_every_level() {
    for case in goldens() {
        let (p, expected) = (&case.problem, case.solution());
        for level in Level::available() {
            let mut got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
            got.retain(|name, _| expected.contains_key(name)); // most cases store no `dgamma`
            let what = format!("{}, {}", case.name, level.name());
            assert_solution(&what, &got, &expected, &p.shape, Tol::f32(&p.mechanism));
        }
    }
}

#[test]
fn stored_cases_in_half_precision() {
    for case in goldens() {
        for (kind, rounded, solve) in [
            ("bf16", case.problem.rounded::<bf16>(), Problem::solve::<bf16> as fn(&Problem, _, _) -> _),
            ("f16", case.problem.rounded::<f16>(), Problem::solve::<f16>),
        ] {
            let Some(p) = rounded else { continue };
            let got: Solution = solve(&p, Strategy::Fused, None).unwrap();
            let what = format!("{}, {kind}", case.name);
            assert_solution(&what, &got, &p.reference(), &p.shape, Tol::HALF.with_noise(1e-3));
        }
    }
}

#[test]
fn sizes_around_every_block() {
    for mechanism in variants() {
        for (seed, n) in [1, 2, 7, 8, 9, 63, 64, 65, 257].into_iter().enumerate() {
            for dim in [1, 8, 12, 16, 64] {
                let shape = Shape { value_dim: if n == 9 { 5 } else { dim }, ..Shape::square(1, 2, n, dim) };
                let p = problem(mechanism.clone(), shape, seed as u64);
                at_every_level(&p, &format!("{mechanism:?}, {n} x {dim}"));
            }
        }
    }
}

#[test]
fn more_tokens_than_a_tile() {
    for mechanism in variants().filter(|m| !format!("{m:?}").contains("Exact")) {
        let p = problem(mechanism.clone(), Shape::square(1, 2, 2500, 4), 1);
        at_every_level(&p, &format!("{mechanism:?}, long"));
    }
}
