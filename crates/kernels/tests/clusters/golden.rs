//! Spectral sparse attention against its stored cases: from the stored plans, and the plans themselves.

use crate::support;

use half::{bf16, f16};
use resolvent_kernels::{Element, Strategy, Tol, simd::Level};
use support::{
    golden::Golden,
    problem::{Problem, Solution, assert_solution},
};

#[test]
fn the_reference_attends_as_stored() {
    for case in Golden::all("ssa") {
        let expected = case.solution();
        assert_solution(&case.name, &case.problem.reference(), &expected, &case.problem.shape, Tol::F64);
    }
}

/// Errors are measured against the largest entry of a tensor, as its scores may be of several hundred.
#[track_caller]
fn assert_within(what: &str, got: &Solution, expected: &Solution, [forward, backward]: [f64; 2]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (name, expected) in expected {
        let size = expected.iter().filter(|x| x.is_finite()).fold(1e-2_f64, |most, x| most.max(x.abs()));
        let tol = if matches!(*name, "out" | "lse") { forward } else { backward };
        for (n, (got, want)) in got[name].iter().zip(expected).enumerate() {
            let close = (got - want).abs() <= tol * size || got == want;
            assert!(close, "{what}, {name}[{n}]: {got} instead of {want}");
        }
    }
}

#[test]
fn the_kernels_attend_as_stored_on_every_level() {
    for case in Golden::all("ssa") {
        // What a naive f32 evaluation reaches is 8e-7, and 1e-5 (gradients 7e-5) with scores above 500.
        let tol = if case.name == "large_norms" { [5e-5, 3e-4] } else { [5e-6, 2e-5] };
        for level in Level::available() {
            let got = case.problem.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
            assert_within(&format!("{} on {}", case.name, level.name()), &got, &case.solution(), tol);
        }
    }
}

#[test]
fn halves_agree_with_the_reference_on_the_same_bits() {
    fn check<T: Element>(problem: &Problem, name: &str) {
        let problem = problem.rounded::<T>().unwrap();
        let got = problem.solve::<T>(Strategy::Fused, None).unwrap();
        let what = format!("{name} in {}", T::NAME);
        assert_solution(&what, &got, &problem.reference(), &problem.shape, Tol::HALF);
    }
    // Scores of several hundred would have to be exact to a hundredth.
    for case in Golden::all("ssa").iter().filter(|case| !case.name.starts_with("large_norms")) {
        check::<f16>(&case.problem, &case.name);
        check::<bf16>(&case.problem, &case.name);
    }
}

/// The same labels, blocks and edges as an independent implementation in f64. (Elsewhere the choice between equal
/// distances could differ; it does not on these tokens.)
#[test]
fn plans_are_those_stored() {
    for case in Golden::all("ssa") {
        let (got, want) = (case.problem.plan().to_tensors(), case.problem.clusters.as_ref().unwrap().to_tensors());
        assert_eq!(got.label_q, want.label_q, "{}", case.name);
        assert_eq!(got.label_k, want.label_k, "{}", case.name);
        assert_eq!(got.exact_blocks, want.exact_blocks, "{}", case.name);
        assert_eq!(got.edges, want.edges, "{}", case.name);
        for (got, want) in got.edge_log_weight.iter().zip(&want.edge_log_weight) {
            assert!((got - want).abs() < 1e-5, "{}: {got} instead of {want}", case.name);
        }
    }
}
