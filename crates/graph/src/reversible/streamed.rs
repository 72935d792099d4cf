//! The symmetrised graph of a mechanism, without its matrix.

use resolvent_kernels::{Mechanism, Strategy};

use super::{log_add, shares};
use crate::{AttentionOperator, Error, LinearOperator, Result, error::check_len};

/// `N = D^-1/2 W D^-1/2` of a mechanism's symmetrised weights `W`, by streamed products: for [`crate::Lanczos`] on graphs
/// whose matrix does not fit.
///
/// `W` is the kernel before its rows are normalised, where the mechanism keeps what it divided by (`softmax`, `fna`,
/// `ssa`), else the operator itself. A product costs one forward pass where `W` is symmetric by itself, a second one with
/// queries and keys exchanged where that transposes it, else a backward pass. Degrees must be positive; single negative
/// weights are not looked for.
#[derive(Debug)]
pub struct StreamedReversible {
    forward: AttentionOperator,
    back: Back,
    log_degree: Vec<f64>,
    /// `log` of what a row of the operator is a share of.
    log_rows: Vec<f64>,
}

/// Where products with the transposed kernel come from.
#[derive(Debug)]
enum Back {
    /// The kernel is its own transpose.
    Symmetric,
    /// Queries and keys exchanged, with the logarithms of its rows.
    Exchanged(Box<AttentionOperator>, Vec<f64>),
    /// The gradient of the values.
    Adjoint,
}

impl StreamedReversible {
    /// The graph of `mechanism` over `seq` tokens, `q` and `k` `[seq, head_dim]`, `k` `None` iff it is tied.
    ///
    /// # Errors
    /// What the mechanism refuses; [`Error::Degree`] where a degree is not positive or below e^-80 of the largest.
    pub fn new(mechanism: &Mechanism, seq: usize, q: &[f32], k: Option<&[f32]>) -> Result<Self> {
        Self::of(AttentionOperator::new(mechanism, seq, q, k, None, Strategy::Auto)?)
    }

    /// The symmetrised graph of an operator that is there, plan and all.
    ///
    /// # Errors
    /// As [`StreamedReversible::new`]; a masked token has no degree.
    pub fn of(forward: AttentionOperator) -> Result<Self> {
        let seq = forward.len();
        let log_rows = forward.lse().unwrap_or_else(|| vec![0.0; seq]);
        let (back, log_degree) = match (kernel_transposes(forward.mechanism()), forward.tokens()) {
            (true, (_, None)) => (Back::Symmetric, log_sums(&forward, &log_rows)?),
            (true, (q, Some(k))) => {
                let (mechanism, keep) = (forward.mechanism(), forward.keep());
                let exchanged = AttentionOperator::new(mechanism, seq, k, Some(q), keep, Strategy::Auto)?;
                let columns = exchanged.lse().unwrap_or_else(|| vec![0.0; seq]);
                let sums = log_sums(&exchanged, &columns)?;
                let both = log_sums(&forward, &log_rows)?.into_iter().zip(sums);
                let log_degree = both.map(|(a, b)| log_add(a, b) - std::f64::consts::LN_2).collect();
                (Back::Exchanged(Box::new(exchanged), columns), log_degree)
            }
            (false, _) => {
                let most = log_rows.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let scale: Vec<f64> = log_rows.iter().map(|x| (x - most).exp()).collect();
                let rows = forward.apply(&vec![1.0; seq])?;
                let columns = forward.apply_transpose(&scale)?;
                let degree = rows.iter().zip(&scale).zip(&columns).map(|((r, s), c)| (0.5 * (r * s + c)).ln() + most);
                (Back::Adjoint, degree.collect())
            }
        };
        let graph = Self { forward, back, log_degree, log_rows };
        graph.check()?;
        Ok(graph)
    }

    fn check(&self) -> Result<()> {
        let most = self.log_degree.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        match self.log_degree.iter().position(|x| x.is_nan() || x - most <= -80.0) {
            Some(index) => {
                let remedy = "f32 products need positive degrees within e^80 of each other: store the graph (up to 2048 \
                              tokens), use a non-negative score, or leave the token out";
                Err(Error::Degree { index, degree: (self.log_degree[index] - most).exp(), remedy })
            }
            None => Ok(()),
        }
    }

    /// The logarithms of the degrees.
    pub fn log_degree(&self) -> &[f64] {
        &self.log_degree
    }

    /// The stationary distribution.
    pub fn stationary(&self) -> Vec<f64> {
        shares(&self.log_degree)
    }
}

/// Whether exchanging queries and keys transposes the kernel (before any row is normalised).
fn kernel_transposes(mechanism: &Mechanism) -> bool {
    match mechanism {
        Mechanism::Softmax(m) => !m.causal,
        Mechanism::Fna(m) => !m.causal && m.norm_exponent == 0.0,
        Mechanism::Infsa(m) => !m.causal,
        Mechanism::Soft(_) | Mechanism::SoftPp(_) | Mechanism::InfsaResolvent(_) => true,
        _ => false,
    }
}

/// The logarithms of the kernel's row sums.
fn log_sums(graph: &AttentionOperator, log_rows: &[f64]) -> Result<Vec<f64>> {
    let sums = graph.apply(&vec![1.0; graph.len()])?;
    Ok(sums.iter().zip(log_rows).map(|(sum, log)| sum.ln() + log).collect())
}

impl LinearOperator for StreamedReversible {
    fn len(&self) -> usize {
        self.log_degree.len()
    }

    fn apply(&self, x: &[f64]) -> Result<Vec<f64>> {
        Ok(self.apply_block(std::slice::from_ref(&x.to_vec()))?.remove(0))
    }

    fn apply_transpose(&self, x: &[f64]) -> Result<Vec<f64>> {
        self.apply(x)
    }

    fn apply_block(&self, block: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        block.iter().try_for_each(|x| check_len("x", x.len(), self.len()))?;
        // The least degree is the unit, so that no factor on the way in exceeds one: f32 holds the rest.
        let unit = self.log_degree.iter().copied().fold(f64::INFINITY, f64::min);
        let weighed =
            |x: &Vec<f64>| x.iter().zip(&self.log_degree).map(|(x, d)| x * (0.5 * (unit - d)).exp()).collect();
        let inward: Vec<Vec<f64>> = block.iter().map(weighed).collect();
        let outward = |y: Vec<f64>, log_rows: &[f64]| -> Vec<f64> {
            let logs = log_rows.iter().zip(&self.log_degree);
            y.iter().zip(logs).map(|(y, (row, d))| y * (row - 0.5 * (d + unit)).exp()).collect()
        };
        let there = self.forward.apply_block(&inward)?.into_iter().map(|y| outward(y, &self.log_rows));
        let back: Vec<Vec<f64>> = match &self.back {
            Back::Symmetric => return Ok(there.collect()),
            Back::Exchanged(exchanged, log_rows) => {
                exchanged.apply_block(&inward)?.into_iter().map(|y| outward(y, log_rows)).collect()
            }
            Back::Adjoint => self.adjoint(block)?,
        };
        Ok(there.zip(back).map(|(a, b)| a.iter().zip(b).map(|(a, b)| 0.5 * (a + b)).collect()).collect())
    }
}

impl StreamedReversible {
    /// `D^-1/2 W^T D^-1/2 x` by the gradient of the values.
    fn adjoint(&self, block: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        let logs: Vec<f64> = self.log_rows.iter().zip(&self.log_degree).map(|(row, d)| row - 0.5 * d).collect();
        let unit = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let inward = |x: &Vec<f64>| x.iter().zip(&logs).map(|(x, log)| x * (log - unit).exp()).collect();
        let outward = |y: Vec<f64>| y.iter().zip(&self.log_degree).map(|(y, d)| y * (unit - 0.5 * d).exp()).collect();
        let transposed = self.forward.apply_transpose_block(&block.iter().map(inward).collect::<Vec<_>>())?;
        Ok(transposed.into_iter().map(outward).collect())
    }
}
