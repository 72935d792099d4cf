//! What the tests of the contract share: stored cases, comparison, and running an operator over fresh buffers.
#![allow(dead_code)] // each test binary uses its part

pub mod golden;

use resolvent_kernels::relative_distance;

/// Panics unless every one of the `slices` equal parts of `got` is within `rtol` of that of `expected`.
#[track_caller]
pub fn assert_close(what: &str, got: &[f64], expected: &[f64], slices: usize, rtol: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths differ");
    let len = (got.len() / slices).max(1);
    for (n, (got, expected)) in got.chunks(len).zip(expected.chunks(len)).enumerate() {
        let distance = relative_distance(got, expected);
        assert!(distance <= rtol, "{what}, slice {n}: relative distance {distance:.3e} > {rtol:.0e}");
    }
}
