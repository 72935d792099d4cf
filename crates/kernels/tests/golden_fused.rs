//! The fused kernels against the stored cases, on every instruction set that this processor has.

mod support;

use half::{bf16, f16};
use resolvent_kernels::{Element, Strategy, Tol, simd::Level};
use support::{
    golden::Golden,
    problem::{Problem, Solution, assert_solution},
};

#[test]
fn f32_on_every_level() {
    for case in Golden::all("infsa") {
        let tol = Tol::f32(&case.problem.mechanism);
        for level in Level::available() {
            let expected = case.solution();
            let mut got = case.problem.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
            got.retain(|name, _| expected.contains_key(name));
            let what = format!("{} on {}", case.name, level.name());
            assert_solution(&what, &got, &expected, &case.problem.shape, tol);
        }
    }
}

#[test]
fn halves_agree_with_the_reference_on_the_same_bits() {
    assert!(halves_checked::<f16>() >= 12);
    assert!(halves_checked::<bf16>() >= 15);
}

/// Checks every case that `T` can hold; returns how many these are.
fn halves_checked<T: Element>() -> usize {
    let cases = Golden::all("infsa");
    let held = cases.iter().filter_map(|case| {
        let problem = case.problem.rounded::<T>()?;
        let expected = problem.reference();
        holds::<T>(&expected).then_some((case, problem, expected))
    });
    held.map(|(case, problem, expected): (_, Problem, _)| {
        let got = problem.solve::<T>(Strategy::Fused, None).unwrap();
        assert_solution(&format!("{} in {}", case.name, T::NAME), &got, &expected, &problem.shape, Tol::HALF);
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
