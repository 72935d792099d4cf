//! What the tests of the contract share: stored cases, comparison, and running an operator over fresh buffers.
#![allow(dead_code)] // each test binary uses its part

pub mod clusters;
pub mod floors;
pub mod golden;
pub mod problem;
pub mod random;
pub mod transform;
pub mod varlen;

use resolvent_kernels::relative_distance;

/// Numbers below this have fewer digits in f32, or are zero.
const UNDERFLOW: f64 = f32::MIN_POSITIVE as f64;

/// Panics unless every one of the `slices` equal parts of `got` is within `rtol` of that of `expected`, or within
/// `noise` (root mean square) of it, or of what f32 can hold.
#[track_caller]
pub fn assert_close(what: &str, got: &[f64], expected: &[f64], slices: usize, rtol: f64, noise: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths differ");
    let len = (got.len() / slices).max(1);
    for (n, (got, expected)) in got.chunks(len).zip(expected.chunks(len)).enumerate() {
        let distance = relative_distance(got, expected);
        let error = got.iter().zip(expected).map(|(g, e)| (g - e).powi(2)).sum::<f64>().sqrt();
        let close = distance <= rtol || error <= noise.max(UNDERFLOW) * (len as f64).sqrt();
        assert!(close, "{what}, slice {n}: relative distance {distance:.3e} > {rtol:.0e}, error {error:.3e}");
    }
}
