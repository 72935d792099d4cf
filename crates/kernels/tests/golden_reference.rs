//! The f64 reference against the stored cases: outputs, every gradient, and what the equations name on the way.

mod support;

use resolvent_kernels::{Inputs, Tol, reference};
use support::{assert_close, golden::Golden};

#[test]
fn reference_reproduces_every_case() {
    for case in Golden::all("infsa") {
        let inputs = Inputs { q: case.tensor("q"), k: case.get("k"), v: case.tensor("v"), extras: case.extras() };
        let (shape, mask, slices) = (&case.shape, case.mask(), case.shape.slices());
        let forward = reference::forward(&case.mechanism, shape, &inputs, &mask).unwrap();
        let close = |name: &str, got: &[f64], slices: usize, rtol: f64| {
            assert_close(&format!("{} {name}", case.name), got, case.tensor(name), slices, rtol);
        };
        close("out", &forward.out, slices, Tol::F64.forward);
        for (name, got) in [("frob", &forward.frob), ("alpha", &forward.alpha), ("a", &forward.a)] {
            match got {
                Some(got) if case.get(name).is_some() => close(name, got, slices, Tol::F64.forward),
                _ => assert!(case.get(name).is_none(), "{}: `{name}` is missing", case.name),
            }
        }
        let backward = reference::backward(&case.mechanism, shape, &inputs, &mask, case.tensor("dout")).unwrap();
        close("dq", &backward.dq, slices, Tol::F64.backward);
        close("dv", &backward.dv, slices, Tol::F64.backward);
        assert_eq!(backward.dk.is_some(), case.get("dk").is_some(), "{}", case.name);
        if let Some(dk) = &backward.dk {
            close("dk", dk, slices, Tol::F64.backward);
        }
        if case.get("dgamma").is_some() {
            close("dgamma", &backward.dgamma.unwrap(), 1, Tol::F64.backward);
        }
    }
}
