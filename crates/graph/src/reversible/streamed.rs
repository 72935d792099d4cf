//! The symmetrised graph of a mechanism, without its matrix.

use resolvent_kernels::{
    Mechanism, Strategy,
    mechanism::{DotSigmoid, Factor, Normalisation, Score, Structure, Unnormalised},
};

use super::{entries::Entries, log_add, shares};
use crate::{AttentionOperator, Error, LinearOperator, Result, error::check_len};

/// `N = D^-1/2 W D^-1/2` of a mechanism's symmetrised weights `W`, by streamed products: for [`crate::Lanczos`] on graphs
/// whose matrix does not fit.
///
/// `W` is the kernel before its rows are normalised, where the mechanism keeps what it divided by (one hop over pairs whose rows are
/// normalised, as of `softmax`, `fna` and `ssa`), else the operator itself. A product costs one forward pass where `W` is symmetric by
/// itself, a second one with queries and keys exchanged where that transposes it, else a backward pass. Of a sparse `W` (`ssa` with edges, not
/// causal) the entries are computed once and held in f32, where they are at most 2^28. Degrees must be positive; single
/// negative weights are not looked for.
#[derive(Debug)]
pub struct StreamedReversible {
    log_degree: Vec<f64>,
    products: Products,
}

/// Where products with the halves `W` and `W^T` come from, each operator with its factors.
#[derive(Debug)]
enum Products {
    /// The kernel is its own transpose.
    Symmetric(Box<AttentionOperator>, Factors),
    /// Queries and keys exchanged.
    Exchanged(Box<[AttentionOperator; 2]>, [Factors; 2]),
    /// The gradient of the values.
    Adjoint(Box<AttentionOperator>, [Factors; 2]),
    /// Both at once.
    Stored(Entries),
}

/// The diagonal matrices around an operator that make `D^-1/2 W D^-1/2`, or its transpose, of it.
#[derive(Debug)]
struct Factors {
    inward: Vec<f64>,
    outward: Vec<f64>,
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
    pub fn of(operator: AttentionOperator) -> Result<Self> {
        let seq = operator.len();
        let log_rows = operator.lse().unwrap_or_else(|| vec![0.0; seq]);
        match (kernel_transposes(operator.mechanism()), operator.tokens()) {
            (true, (_, None)) => {
                let log_degree = checked(log_sums(&operator, &log_rows)?)?;
                let factors = Factors::forward(&log_rows, &log_degree);
                let products = Products::Symmetric(Box::new(operator), factors);
                Ok(Self { log_degree, products })
            }
            (true, (q, Some(k))) => {
                let (mechanism, keep) = (operator.mechanism(), operator.keep());
                let exchanged = AttentionOperator::new(mechanism, seq, k, Some(q), keep, Strategy::Auto)?;
                let columns = exchanged.lse().unwrap_or_else(|| vec![0.0; seq]);
                let sums = log_sums(&exchanged, &columns)?;
                let both = log_sums(&operator, &log_rows)?.into_iter().zip(sums);
                let log_degree = checked(both.map(|(a, b)| log_add(a, b) - std::f64::consts::LN_2).collect())?;
                let factors = [&log_rows, &columns].map(|rows| Factors::forward(rows, &log_degree));
                let products = Products::Exchanged(Box::new([operator, exchanged]), factors);
                Ok(Self { log_degree, products })
            }
            (false, _) => Self::sparse_or_adjoint(operator, &log_rows),
        }
    }

    fn sparse_or_adjoint(operator: AttentionOperator, log_rows: &[f64]) -> Result<Self> {
        let most = log_rows.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let scale: Vec<f64> = log_rows.iter().map(|x| (x - most).exp()).collect();
        let rows = operator.apply(&vec![1.0; log_rows.len()])?;
        let columns = operator.apply_transpose(&scale)?;
        let degree = rows.iter().zip(&scale).zip(&columns).map(|((r, s), c)| (0.5 * (r * s + c)).ln() + most);
        let log_degree = checked(degree.collect())?;
        let products = match Entries::of(&operator, &log_degree) {
            Some(entries) => Products::Stored(entries),
            None => {
                let factors = [Factors::forward(log_rows, &log_degree), Factors::adjoint(log_rows, &log_degree)];
                Products::Adjoint(Box::new(operator), factors)
            }
        };
        Ok(Self { log_degree, products })
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

/// The degrees, where a graph can be made of them.
fn checked(log_degree: Vec<f64>) -> Result<Vec<f64>> {
    let most = log_degree.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    match log_degree.iter().position(|x| x.is_nan() || x - most <= -80.0) {
        Some(index) => {
            let remedy = "f32 products need positive degrees within e^80 of each other: store the graph (up to 2048 \
                          tokens), use a non-negative score, or leave the token out";
            Err(Error::Degree { index, degree: (log_degree[index] - most).exp(), remedy })
        }
        None => Ok(log_degree),
    }
}

/// Whether exchanging queries and keys transposes the kernel (before any row is normalised).
fn kernel_transposes(mechanism: &Mechanism) -> bool {
    let m = mechanism.values();
    // First keys that every token sees do not see every token; a filter over the values is no part of the kernel.
    let pairs = match &m.structure {
        Structure::Dense(pairs) => pairs.sinks == 0 && (pairs.window.is_none() || !counts_keys(&m)),
        Structure::Nystrom(own) => m.tied && own.value_conv == 0,
        _ => false,
    };
    let alike = match &m.normalisation {
        Normalisation::Row(row) => row.density_exponent == 0.0 && m.has_row_sums(),
        Normalisation::None(_) | Normalisation::Frobenius(_) | Normalisation::Symmetric(_) => true,
        _ => false,
    };
    !m.causal && m.bias.is_none() && pairs && alike && !matches!(m.score, Score::Custom(_))
}

/// Whether weights depend on how many keys a query sees: in a window these are fewer at both ends.
fn counts_keys(m: &Mechanism) -> bool {
    let divided = matches!(&m.normalisation, Normalisation::None(Unnormalised { factor: Factor::InvN, .. }));
    divided || matches!(&m.score, Score::DotSigmoid(DotSigmoid { offset: None, .. }))
}

/// The logarithms of the kernel's row sums.
fn log_sums(graph: &AttentionOperator, log_rows: &[f64]) -> Result<Vec<f64>> {
    let sums = graph.apply(&vec![1.0; graph.len()])?;
    Ok(sums.iter().zip(log_rows).map(|(sum, log)| sum.ln() + log).collect())
}

impl Factors {
    /// Of forward passes; `log_rows` is the logarithm of what a row of the operator is a share of.
    fn forward(log_rows: &[f64], log_degree: &[f64]) -> Self {
        // The least degree is the unit, so that no factor on the way in exceeds one: f32 holds the rest.
        let unit = log_degree.iter().copied().fold(f64::INFINITY, f64::min);
        let inward = log_degree.iter().map(|d| (0.5 * (unit - d)).exp()).collect();
        let outward = log_rows.iter().zip(log_degree).map(|(row, d)| (row - 0.5 * (d + unit)).exp()).collect();
        Self { inward, outward }
    }

    /// Of gradients of the values, which are the transpose.
    fn adjoint(log_rows: &[f64], log_degree: &[f64]) -> Self {
        let logs = || log_rows.iter().zip(log_degree).map(|(row, d)| row - 0.5 * d);
        let unit = logs().fold(f64::NEG_INFINITY, f64::max);
        let inward = logs().map(|log| (log - unit).exp()).collect();
        Self { inward, outward: log_degree.iter().map(|d| (unit - 0.5 * d).exp()).collect() }
    }

    /// The factors around `product`.
    fn around(
        &self,
        block: &[Vec<f64>],
        product: impl FnOnce(&[Vec<f64>]) -> Result<Vec<Vec<f64>>>,
    ) -> Result<Vec<Vec<f64>>> {
        let times = |x: &Vec<f64>, factors: &[f64]| x.iter().zip(factors).map(|(x, factor)| x * factor).collect();
        let weighed: Vec<Vec<f64>> = block.iter().map(|x| times(x, &self.inward)).collect();
        Ok(product(&weighed)?.iter().map(|y| times(y, &self.outward)).collect())
    }
}

/// The mean of two blocks.
fn mean(a: Vec<Vec<f64>>, b: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    a.into_iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| 0.5 * (a + b)).collect()).collect()
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
        match &self.products {
            Products::Symmetric(operator, factors) => factors.around(block, |x| operator.apply_block(x)),
            Products::Exchanged(operators, factors) => {
                let half = |at: usize| factors[at].around(block, |x| operators[at].apply_block(x));
                Ok(mean(half(0)?, half(1)?))
            }
            Products::Adjoint(operator, [there, back]) => {
                let there = there.around(block, |x| operator.apply_block(x))?;
                Ok(mean(there, back.around(block, |x| operator.apply_transpose_block(x))?))
            }
            Products::Stored(entries) => Ok(entries.apply_block(block)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_exchanged_is_told_of_the_values() {
        for (json, transposes) in [
            (r#"{"mechanism": "softmax"}"#, true),
            (r#"{"mechanism": "softmax", "causal": true}"#, false),
            (r#"{"mechanism": "softmax", "bias": "alibi"}"#, false),
            (r#"{"mechanism": "softmax", "series": "resolvent"}"#, false),
            (r#"{"mechanism": "local"}"#, true),
            (r#"{"mechanism": "local", "sinks": 1}"#, false),
            (r#"{"mechanism": "cosine"}"#, true),
            (r#"{"mechanism": "fna"}"#, true),
            (r#"{"mechanism": "fna", "norm_exponent": 1.0}"#, false),
            (r#"{"mechanism": "composed", "score": "levy"}"#, true),
            (r#"{"mechanism": "infsa"}"#, true),
            (r#"{"mechanism": "infsa-resolvent"}"#, true),
            // Rows of affinities, which have no logarithm, are divided already.
            (r#"{"mechanism": "composed", "score": "dot-relu"}"#, false),
            (r#"{"mechanism": "relu"}"#, true),
            (r#"{"mechanism": "relu", "structure": {"kind": "dense", "window": 3}}"#, false),
            (r#"{"mechanism": "sigmoid"}"#, true),
            (r#"{"mechanism": "sigmoid", "structure": {"kind": "dense", "window": 3}}"#, false),
            (r#"{"mechanism": "sigmoid", "offset": -1.0, "structure": {"kind": "dense", "window": 3}}"#, true),
            (r#"{"mechanism": "soft"}"#, true),
            (r#"{"mechanism": "soft", "value_conv": 3}"#, false),
            (r#"{"mechanism": "soft-pp"}"#, true),
            (r#"{"mechanism": "laplacian"}"#, false),
            (r#"{"mechanism": "nystromformer"}"#, false),
            (r#"{"mechanism": "ssa"}"#, false),
            (r#"{"mechanism": "uniform"}"#, false),
        ] {
            assert_eq!(kernel_transposes(&Mechanism::from_json(json).unwrap()), transposes, "{json}");
        }
    }

    /// What is held of `ssa` is held of the same values by another name.
    #[test]
    fn sparse_entries_are_held() {
        let (n, dim) = (64, 4);
        let of = |seed: usize| -> Vec<f32> { (0..n * dim).map(|i| ((i * seed) as f32).sin()).collect() };
        let (q, k) = (of(3), of(7));
        for (json, held) in [
            (r#"{"mechanism": "ssa"}"#, true),
            (r#"{"mechanism": "composed", "structure": "clustered"}"#, true),
            (r#"{"mechanism": "ssa", "estimator": "centroid"}"#, false),
            (r#"{"mechanism": "ssa", "score": "cosine-exp"}"#, false),
            (r#"{"mechanism": "routed"}"#, false),
        ] {
            let made = StreamedReversible::new(&Mechanism::from_json(json).unwrap(), n, &q, Some(&k)).unwrap();
            assert_eq!(matches!(made.products, Products::Stored(_)), held, "{json}");
        }
    }
}
