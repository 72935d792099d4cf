//! `(I - M) x = b` without a matrix: restarted GMRES.

use crate::{
    Error, LinearOperator, Result,
    error::check_len,
    vector::{axpy, dot, norm, scaled},
};

/// How walks are summed. The Neumann series needs hundreds of products for a decay near one; a Krylov space needs few,
/// because one direction dominates, and it does not ask for non-negative or symmetric operators.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Solver {
    /// Relative residual `|b - (I - M) x| / |b|` at which to stop. Default 1e-6: what f32 kernels can tell apart.
    pub tol: f64,
    /// Products with the operator allowed. Default 1000.
    pub max_iter: usize,
    /// Vectors kept before the method restarts. Default 40.
    pub restart: usize,
}

impl Default for Solver {
    fn default() -> Self {
        Self { tol: 1e-6, max_iter: 1000, restart: 40 }
    }
}

impl Solver {
    /// `(I - M)^-1 b`.
    ///
    /// # Errors
    /// [`Error::NotConverged`], [`Error::Length`]; those of the operator.
    pub fn resolvent(&self, m: &impl LinearOperator, b: &[f64]) -> Result<Vec<f64>> {
        check_len("b", b.len(), m.len())?;
        let mut x = vec![0.0; b.len()];
        let mut spent = 0;
        let size = norm(b);
        loop {
            let residual = self.residual(m, b, &x, &mut spent)?;
            let relative = if size == 0.0 { 0.0 } else { norm(&residual) / size };
            if relative <= self.tol {
                return Ok(x);
            }
            if spent >= self.max_iter || !relative.is_finite() {
                return Err(Error::NotConverged { iterations: spent, residual: relative, tol: self.tol });
            }
            let room = self.restart.max(1).min(self.max_iter - spent);
            axpy(1.0, &cycle(m, &residual, self.tol * size, room, &mut spent)?, &mut x);
        }
    }

    /// `b - (I - M) x`.
    fn residual(&self, m: &impl LinearOperator, b: &[f64], x: &[f64], spent: &mut usize) -> Result<Vec<f64>> {
        if *spent == 0 {
            return Ok(b.to_vec()); // x = 0
        }
        let mut residual = identity_minus(m, x, spent)?;
        residual.iter_mut().zip(b).for_each(|(r, b)| *r = b - *r);
        Ok(residual)
    }
}

/// `(I - M) x`.
fn identity_minus(m: &impl LinearOperator, x: &[f64], spent: &mut usize) -> Result<Vec<f64>> {
    *spent += 1;
    Ok(m.apply(x)?.iter().zip(x).map(|(mx, x)| x - mx).collect())
}

/// The best correction to a `residual` from a Krylov space of at most `room` dimensions.
fn cycle(m: &impl LinearOperator, residual: &[f64], goal: f64, room: usize, spent: &mut usize) -> Result<Vec<f64>> {
    let size = norm(residual);
    let mut basis = vec![scaled(residual, 1.0 / size)];
    let mut problem = Projected { columns: Vec::new(), rotations: Vec::new(), rhs: vec![size] };
    while basis.len() <= room {
        let mut next = identity_minus(m, &basis[basis.len() - 1], spent)?;
        let mut column = Vec::with_capacity(basis.len());
        for direction in &basis {
            let overlap = dot(direction, &next);
            axpy(-overlap, direction, &mut next);
            column.push(overlap);
        }
        let rest = norm(&next);
        let done = problem.push(column, rest) <= goal;
        if done || rest <= f64::EPSILON * size {
            break;
        }
        basis.push(scaled(&next, 1.0 / rest));
    }
    let mut correction = vec![0.0; residual.len()];
    problem.solve().iter().zip(&basis).for_each(|(&weight, direction)| axpy(weight, direction, &mut correction));
    Ok(correction)
}

/// The least-squares problem in the basis, kept triangular by plane rotations.
struct Projected {
    columns: Vec<Vec<f64>>,
    rotations: Vec<(f64, f64)>,
    rhs: Vec<f64>,
}

impl Projected {
    /// Adds a direction with its overlaps with the basis and with what is outside; returns the residual that remains.
    fn push(&mut self, mut column: Vec<f64>, mut outside: f64) -> f64 {
        let last = column.len() - 1;
        for (n, &(c, s)) in self.rotations.iter().enumerate() {
            (column[n], column[n + 1]) = (c * column[n] + s * column[n + 1], c * column[n + 1] - s * column[n]);
        }
        let radius = column[last].hypot(outside);
        let c = if radius == 0.0 { 1.0 } else { column[last] / radius };
        outside = if radius == 0.0 { 0.0 } else { outside / radius };
        column[last] = radius;
        self.columns.push(column);
        self.rotations.push((c, outside));
        let tail = self.rhs[last];
        self.rhs[last] = c * tail;
        self.rhs.push(-outside * tail);
        (outside * tail).abs()
    }

    /// The weights of the basis; 0 for a direction that the operator annihilates.
    fn solve(&self) -> Vec<f64> {
        let mut weights = vec![0.0; self.columns.len()];
        for n in (0..weights.len()).rev() {
            let known: f64 = (n + 1..weights.len()).map(|j| self.columns[j][n] * weights[j]).sum();
            let pivot = self.columns[n][n];
            weights[n] = if pivot == 0.0 { 0.0 } else { (self.rhs[n] - known) / pivot };
        }
        weights
    }
}
