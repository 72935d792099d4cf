//! The fused kernels against the stored cases, on every instruction set that this processor has.

mod support;

use half::{bf16, f16};
use resolvent_kernels::{Element, Mechanism, Strategy, Tol, simd::Level};
use support::{
    golden::Golden,
    problem::{Problem, Solution, assert_solution},
};

#[test]
fn f32_on_every_level() {
    for case in Golden::every() {
        let tol = case.tol().with_scores(largest_score(&case));
        for level in Level::available() {
            let expected = case.solution();
            let mut got = case.problem.solve::<f32>(Strategy::Auto, Some(level)).unwrap();
            got.retain(|name, _| expected.contains_key(name));
            let what = format!("{} on {}", case.name, level.name());
            assert_solution(&what, &got, &expected, &case.problem.shape, tol);
        }
    }
}

/// The largest magnitude of the scores' logarithms, where they are stored.
fn largest_score(case: &Golden) -> f64 {
    let finite = case.get("lse").into_iter().flatten().filter(|x| x.is_finite());
    finite.fold(0.0, |most, x| most.max(x.abs()))
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
        // The gradients of an order and a length scale are sums of terms of order 0.1 that cancel.
        let terms = if matches!(problem.mechanism, Mechanism::Fna(_)) { 0.1 } else { 0.0 };
        let tol = Tol::HALF.with_scores(largest_score(case)).with_noise(terms);
        assert_solution(&format!("{} in {}", case.name, T::NAME), &got, &expected, &problem.shape, tol);
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
