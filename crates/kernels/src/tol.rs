//! How far two computations of the same thing may lie apart: every tolerance of the project, in one place.

use crate::{
    Element, Mechanism,
    mechanism::{Form, Series, Structure},
};

/// What rounding leaves of a solver's error, however small its tolerance.
const LEAST_TOL: f64 = 1e-6;

/// Relative tolerances of one storage type and mechanism, as [`relative_distance`] measures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tol {
    /// For outputs.
    pub forward: f64,
    /// For gradients.
    pub backward: f64,
    /// Root mean square of an error that is accepted even where the reference is smaller still: the rounding of terms
    /// that cancel. 0 unless set by [`Tol::with_noise`].
    pub noise: f64,
}

impl Tol {
    /// f64 against f64, in whatever order of summation.
    pub const F64: Self = Self { forward: 1e-10, backward: 1e-10, noise: 0.0 };

    /// Half storage with f32 arithmetic: a few units in the last place of bf16 (2^-8), more where gradients cancel.
    pub const HALF: Self = Self { forward: 2e-2, backward: 5e-2, noise: 0.0 };

    /// Products of operands that keep sixteen bits ([`crate::Precision::Bf16x3`]): a few times 2^-16, more where gradients cancel.
    pub const SIXTEEN_BITS: Self = Self { forward: 5e-5, backward: 1e-4, noise: 0.0 };

    /// How many times the error of a naive computation in bf16 (operands and weights rounded, sums exact) one of
    /// [`crate::Precision::Bf16`] may have, both against f64.
    pub const OF_NAIVE_BF16: f64 = 2.0;

    /// f32 against f64: about thirty times the error of a naive f32 implementation, which is 3e-7. A solver that stops at its
    /// tolerance of the values, several times as long as the output, adds that. Where a matrix of landmarks is inverted, its
    /// condition comes on top.
    pub fn f32(mechanism: &Mechanism) -> Self {
        let solver = |tol: f64| (1e-5 + 10.0 * tol, 1e-5 + 10.0 * tol);
        let (forward, backward) = match (mechanism.own(), &mechanism.series, &mechanism.structure) {
            (Some(Form::Soft(_) | Form::SoftPp(_)), ..) => (1e-5, 3e-5),
            (Some(Form::LaplacianExact(_)), ..) => (2e-5, 5e-5),
            (Some(Form::InfsaResolvent(m)), ..) => solver(m.tol),
            (_, Series::Resolvent(m), _) => solver(m.tol.max(LEAST_TOL)),
            // Keys and values are rounded once more where they are projected.
            (_, _, Structure::Nystrom(_) | Structure::Projected(_)) => (2e-5, 5e-5),
            _ => (1e-5, 1e-5),
        };
        Self { forward, backward, noise: 0.0 }
    }

    /// The same for results whose terms, of order `size`, may cancel to nothing (the gradient of a single token's
    /// weight): accepts a fifth of the tolerance of one term per element, in f32 16 units in the last place.
    pub const fn with_noise(self, size: f64) -> Self {
        Self { noise: self.noise + 0.2 * self.forward * size, ..self }
    }

    /// The same for weights that are exponentials of scores up to `largest`: such a score's four units in the last place are
    /// relative errors of the weights.
    pub const fn with_scores(self, largest: f64) -> Self {
        let error = 2.0 * f32::EPSILON as f64 * largest;
        Self { forward: self.forward + error, backward: self.backward + error, ..self }
    }

    /// The tolerance for tensors stored as `T`.
    pub fn of<T: Element>(mechanism: &Mechanism) -> Self {
        if T::NAME == f32::NAME { Self::f32(mechanism) } else { Self::HALF }
    }
}

/// `|got - expected| / |expected|` in the Euclidean norm: of `got` against a reference that is zero, 0 if it is exactly
/// zero too and infinite otherwise; NaN anywhere is infinitely far.
pub fn relative_distance(got: &[f64], expected: &[f64]) -> f64 {
    let square = |xs: &mut dyn Iterator<Item = f64>| xs.map(|x| x * x).sum::<f64>();
    // Squares of tiny and huge numbers stay in range when everything is measured in units of the largest.
    let unit = expected.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    if unit == 0.0 {
        return if got.iter().all(|&x| x == 0.0) { 0.0 } else { f64::INFINITY };
    }
    let error = square(&mut got.iter().zip(expected).map(|(g, e)| (g - e) / unit)).sqrt();
    let distance = error / square(&mut expected.iter().map(|e| e / unit)).sqrt();
    if distance.is_nan() || got.len() != expected.len() { f64::INFINITY } else { distance }
}

#[cfg(test)]
mod tests {
    use super::relative_distance;

    #[test]
    fn distance_is_relative_and_strict_about_zero_and_nan() {
        assert!((relative_distance(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-15);
        assert!((relative_distance(&[1.1e-200], &[1e-200]) - 0.1).abs() < 1e-12);
        assert_eq!(relative_distance(&[0.0, -0.0], &[0.0, 0.0]), 0.0);
        assert_eq!(relative_distance(&[1e-300], &[0.0]), f64::INFINITY);
        assert_eq!(relative_distance(&[0.0, 1e-300], &[0.0, 0.0]), f64::INFINITY);
        assert_eq!(relative_distance(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(relative_distance(&[f64::NAN], &[0.0]), f64::INFINITY);
        assert_eq!(relative_distance(&[1.0], &[1.0, 1.0]), f64::INFINITY);
    }
}
