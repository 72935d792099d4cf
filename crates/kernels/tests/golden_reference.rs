//! The f64 reference against the stored cases: outputs, every gradient, and what the equations name on the way.

mod support;

use resolvent_kernels::{Tol, reference};
use support::{assert_close, golden::Golden, problem::assert_solution};

#[test]
fn outputs_and_gradients() {
    for case in Golden::every() {
        let expected = case.solution();
        let mut got = case.problem.reference();
        got.retain(|name, _| expected.contains_key(name));
        assert_solution(&case.name, &got, &expected, &case.problem.shape, Tol::F64);
    }
}

#[test]
fn norms_and_token_weights() {
    for case in Golden::all("infsa") {
        let problem = &case.problem;
        let forward =
            reference::forward(&problem.mechanism, &problem.shape, &problem.inputs(), &problem.mask()).unwrap();
        for (name, got) in [("frob", &forward.frob), ("alpha", &forward.alpha), ("a", &forward.a)] {
            let Some(expected) = case.get(name) else { continue };
            let what = format!("{}, {name}", case.name);
            let got = got.as_ref().unwrap_or_else(|| panic!("{what} is missing"));
            assert_close(&what, got, expected, problem.shape.slices(), Tol::F64.forward, 0.0);
        }
    }
}

#[test]
fn distances_resolve_weigh_and_sum_as_stored() {
    let mut densities = 0;
    for case in Golden::all("fna") {
        let (p, slices) = (&case.problem, case.problem.shape.slices());
        let m = p.mechanism.as_fna().unwrap();
        let resolved = m.resolve(p.shape.head_dim, p.shape.heads);
        let got = [resolved.kappa, resolved.intrinsic_dim];
        assert_close(&case.name, &got, case.get("resolved").unwrap(), 1, Tol::F64.forward, 0.0);
        let forward = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap();
        if let Some(weights) = case.get("weights") {
            assert_close(&case.name, forward.weights(), weights, slices, Tol::F64.forward, 0.0);
        }
        assert_eq!(forward.lse0.is_some(), case.get("lse0").is_some(), "{}", case.name);
        if let Some((got, lse0)) = forward.lse0.zip(case.get("lse0")) {
            assert_close(&case.name, &got, lse0, slices, Tol::F64.forward, 0.0);
            densities += 1;
        }
    }
    assert_eq!(densities, 2);
}

/// `W v` is the output whatever the mechanism, and `W` is what the case's diagnostics say of it.
#[test]
fn weights_map_values_to_outputs() {
    for case in Golden::all("infsa") {
        let (problem, shape) = (&case.problem, &case.problem.shape);
        let forward = reference::forward(&problem.mechanism, shape, &problem.inputs(), &problem.mask()).unwrap();
        let rows = problem.mechanism.out_seq(shape);
        assert_eq!(forward.weights().len(), shape.slices() * rows * shape.seq_kv);
        if let (Some(c_out), Some(c_in)) = (case.get("c_out"), case.get("c_in")) {
            let n = shape.seq_q;
            let sums = |along_row: bool| -> Vec<f64> {
                let entry = |w: &[f64], i: usize, j: usize| if along_row { w[i * n + j] } else { w[j * n + i] };
                let slices = forward.weights().chunks(n * n);
                slices.flat_map(|w| (0..n).map(move |i| 1.0 + (0..n).map(|j| entry(w, i, j)).sum::<f64>())).collect()
            };
            assert_close(&case.name, &sums(true), c_out, shape.slices(), Tol::F64.forward, 0.0);
            assert_close(&case.name, &sums(false), c_in, shape.slices(), Tol::F64.forward, 0.0);
        }
    }
}
