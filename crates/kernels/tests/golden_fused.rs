//! The fused kernels against the stored cases, on every instruction set that this processor has.

mod support;

use half::{bf16, f16};
use resolvent_kernels::{Element, Strategy, Tol, simd::Level};
use support::{
    floors,
    golden::Golden,
    problem::{Problem, Solution, assert_solution},
};

#[test]
fn f32_on_every_level() {
    for case in Golden::every() {
        let (tol, expected) = (case.tol(), case.solution());
        for level in Level::available() {
            let mut got = case.problem.solve::<f32>(Strategy::Auto, Some(level)).unwrap();
            got.retain(|name, _| expected.contains_key(name));
            let what = format!("{} on {}", case.name, level.name());
            assert_case(&what, &got, &expected, &case.problem, tol, floors::F32);
        }
    }
}

/// Row by row where the terms are known that may cancel, else head by head, without a floor.
#[track_caller]
fn assert_case(what: &str, got: &Solution, expected: &Solution, problem: &Problem, tol: Tol, left: f64) {
    match floors::knows(&problem.mechanism) {
        true => floors::assert_rows(what, got, expected, problem, tol, left),
        false => assert_solution(what, got, expected, &problem.shape, tol),
    }
}

#[test]
fn halves_agree_with_the_reference_on_the_same_bits() {
    assert!(halves_checked::<f16>() >= 45);
    assert!(halves_checked::<bf16>() >= 50);
}

/// Checks every case that `T` can hold; returns how many these are.
fn halves_checked<T: Element>() -> usize {
    let mut cases = Golden::every();
    cases.retain(|case| case.tol().backward < 1e-3);
    let held = cases.iter().filter_map(|case| {
        let problem = case.problem.rounded::<T>()?;
        let expected = problem.reference();
        holds::<T>(&expected).then_some((case, problem, expected))
    });
    held.map(|(case, problem, expected): (_, Problem, _)| {
        let got = problem.solve::<T>(Strategy::Auto, None).unwrap();
        assert_case(&format!("{} in {}", case.name, T::NAME), &got, &expected, &problem, Tol::HALF, floors::HALF);
    })
    .count()
}

/// Whether storing `solution` as `T` keeps every tensor to a small part of the tolerance (no overflow, no underflow).
fn holds<T: Element>(solution: &Solution) -> bool {
    let kept = |x: f64| {
        let stored = f64::from(T::narrow(x as f32).widen());
        (stored - x).abs() <= 0.2 * Tol::HALF.forward * x.abs()
    };
    let largest = |x: &[f64]| x.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    solution.values().all(|x| kept(largest(x)))
}
