//! Where walkers spend their time.

use crate::{
    Error, LinearOperator, Result,
    vector::{axpy, scaled},
};

/// A distribution over the tokens, as far as the iteration got.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Distribution {
    /// The shares.
    pub shares: Vec<f64>,
    /// Steps taken.
    pub iterations: usize,
    /// The l1 norm of the last change: above the tolerance where the steps ran out.
    pub change: f64,
}

/// How long walkers walk.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Walk {
    /// Chance of following an edge; else the walker starts anew anywhere. Default 0.85, in [0, 1]. At 1 the walker never
    /// does, and stays where it is every other step so that no graph is periodic.
    pub damping: f64,
    /// l1 norm of a step's change at which to stop. Default 1e-7: what f32 kernels can tell apart.
    pub tol: f64,
    /// Steps allowed. Default 1000.
    pub max_iter: usize,
}

impl Default for Walk {
    fn default() -> Self {
        Self { damping: 0.85, tol: 1e-7, max_iter: 1000 }
    }
}

impl Walk {
    /// The stationary distribution of a walker on any non-negative graph `m`, its rows as shares of their sums: PageRank.
    /// A token without edges sends its walkers anywhere.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::Degree`] for a negative row sum; those of the operator.
    pub fn distribution(&self, m: &impl LinearOperator) -> Result<Distribution> {
        if !(0.0..=1.0).contains(&self.damping) {
            return Err(Error::Range { what: "damping", value: self.damping, expected: "between 0 and 1" });
        }
        let n = m.len();
        let sums = m.apply(&vec![1.0; n])?;
        let most = sums.iter().fold(f64::MIN_POSITIVE, |most, s| most.max(s.abs()));
        if let Some(index) = sums.iter().position(|s| s.is_nan() || *s < 0.0) {
            let remedy = "a walk needs non-negative weights: use a non-negative score (relu, abs), or no whitening";
            return Err(Error::Degree { index, degree: sums[index] / most, remedy });
        }
        let mut x = vec![1.0 / n as f64; n];
        let (mut change, mut iterations) = (f64::INFINITY, 0);
        while change > self.tol && iterations < self.max_iter {
            let leaving: Vec<f64> = x.iter().zip(&sums).map(|(x, s)| if *s > 0.0 { x / s } else { 0.0 }).collect();
            let lost: f64 = x.iter().zip(&sums).filter(|(_, s)| **s <= 0.0).map(|(x, _)| x).sum();
            let anywhere = (self.damping * lost + 1.0 - self.damping) / n as f64;
            let walked = m.apply_transpose(&leaving)?;
            let mut next: Vec<f64> = walked.iter().map(|y| self.damping * y + anywhere).collect();
            if self.damping == 1.0 {
                axpy(1.0, &x, &mut next);
            }
            let total: f64 = next.iter().sum();
            next = scaled(&next, 1.0 / total);
            change = next.iter().zip(&x).map(|(a, b)| (a - b).abs()).sum();
            x = next;
            iterations += 1;
        }
        Ok(Distribution { shares: x, iterations, change })
    }
}
