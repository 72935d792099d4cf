//! The f64 reference against the stored cases: outputs, every gradient, and what the equations name on the way.

mod support;

use resolvent_kernels::{Tol, reference};
use support::{assert_close, golden::Golden, problem::assert_solution};

#[test]
fn outputs_and_gradients() {
    for case in Golden::all("infsa") {
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
