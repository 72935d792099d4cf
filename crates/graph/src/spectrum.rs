//! Power iteration: the dominant direction, the spectral radius and the 2-norm.

use crate::{
    Error, LinearOperator, Result, Transposed,
    vector::{axpy, dot, norm, scaled},
};

/// How long to iterate.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Power {
    /// Stop when a step changes the direction by at most this (2-norm of the difference of unit vectors). Default 1e-7.
    pub tol: f64,
    /// Steps allowed. Default 1000.
    pub max_iter: usize,
}

impl Default for Power {
    fn default() -> Self {
        Self { tol: 1e-7, max_iter: 1000 }
    }
}

/// A dominant eigenvalue with its direction, as far as the iteration got.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Eigenpair {
    /// The eigenvalue.
    pub value: f64,
    /// The direction, l1 norm 1; zero for an operator that annihilates the start.
    pub vector: Vec<f64>,
    /// Steps taken.
    pub iterations: usize,
    /// By how much the last step changed the direction: above the tolerance where the iteration ran out, because two
    /// directions are almost equally strong.
    pub change: f64,
}

impl Power {
    /// Iterates `step` from `start`, shifted by `shift` (`step + shift I`), which tells an eigenvalue from its negative.
    pub(crate) fn iterate(
        &self,
        start: Vec<f64>,
        shift: f64,
        mut step: impl FnMut(&[f64]) -> Result<Vec<f64>>,
    ) -> Result<Eigenpair> {
        let size = norm(&start);
        let mut x = if size > 0.0 { scaled(&start, 1.0 / size) } else { start };
        let (mut value, mut change, mut iterations) = (0.0, f64::INFINITY, 0);
        while iterations < self.max_iter && change > self.tol {
            let mut y = step(&x)?;
            axpy(shift, &x, &mut y);
            iterations += 1;
            let length = norm(&y);
            if let Some(index) = y.iter().position(|y| !y.is_finite()) {
                return Err(Error::Product { index, value: y[index] });
            }
            value = length - shift;
            if length == 0.0 {
                (x, change) = (y, 0.0);
                break;
            }
            let next = scaled(&y, 1.0 / length);
            change = next.iter().zip(&x).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
            x = next;
        }
        let sum: f64 = x.iter().map(|x| x.abs()).sum();
        let vector = if sum > 0.0 { scaled(&x, 1.0 / sum) } else { x };
        Ok(Eigenpair { value, vector, iterations, change })
    }
}

/// The Perron pair of a non-negative operator, from the uniform vector: its spectral radius and the direction that many
/// hops tend to. For the left (incoming) vector pass [`Transposed`].
///
/// The iteration runs on `(M + s I)`, `s` half the largest row sum, which has the same vectors: so a graph with two
/// halves that only see each other converges too. The vector is unique and positive where the graph is connected.
///
/// # Errors
/// [`Error::Product`]; those of the operator.
pub fn perron(m: &impl LinearOperator, power: &Power) -> Result<Eigenpair> {
    let start = vec![1.0; m.len()];
    let shift = 0.5 * m.apply(&start)?.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
    power.iterate(start, shift, |x| m.apply(x))
}

/// The spectral radius of a non-negative operator, the value of its [`perron`] pair.
///
/// # Errors
/// [`Error::Product`]; those of the operator.
pub fn spectral_radius(m: &impl LinearOperator, power: &Power) -> Result<f64> {
    Ok(perron(m, power)?.value)
}

/// The 2-norm of any operator: the root of the dominant eigenvalue of `M^T M`.
///
/// # Errors
/// [`Error::Product`]; those of the operator.
pub fn spectral_norm(m: &impl LinearOperator, power: &Power) -> Result<f64> {
    // A start without symmetry: the uniform vector may be orthogonal to the dominant direction of a signed operator.
    let start = (0..m.len()).map(|i| 1.0 + (i as f64).sin()).collect();
    Ok(power.iterate(start, 0.0, |x| m.apply_transpose(&m.apply(x)?))?.value.max(0.0).sqrt())
}

/// `|lambda_2| / lambda_1`, how fast powers of a non-negative operator forget everything but the dominant direction:
/// the growth rate of what is left when that direction is taken out on both sides, over `steps` steps.
///
/// # Errors
/// [`Error::Product`]; those of the operator.
pub fn subdominant_ratio(m: &impl LinearOperator, power: &Power, steps: usize) -> Result<f64> {
    let (right, left) = (perron(m, power)?, perron(&Transposed(m), power)?);
    let overlap = dot(&left.vector, &right.vector);
    if right.value <= 0.0 || overlap == 0.0 {
        return Ok(0.0);
    }
    let take_out = |mut x: Vec<f64>| {
        axpy(-dot(&left.vector, &x) / overlap, &right.vector, &mut x);
        x
    };
    let mut x = take_out((0..m.len()).map(|i| (1.0 + 2.0 * i as f64).sin()).collect());
    let mut log_growth = Vec::with_capacity(steps);
    for _ in 0..steps {
        let size = norm(&x);
        if size == 0.0 {
            return Ok(0.0);
        }
        x = take_out(m.apply(&scaled(&x, 1.0 / size))?);
        log_growth.push(norm(&x).ln());
    }
    // The first half only forgets the start; a complex pair makes single steps uneven, hence the mean.
    let settled = &log_growth[steps / 2..];
    let rate = (settled.iter().sum::<f64>() / settled.len().max(1) as f64).exp();
    Ok(rate / right.value)
}
