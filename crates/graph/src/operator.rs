//! Square operators that are known by what they do to a vector.

use crate::{Result, error::check_len, vector::dot};

/// A square linear operator over the tokens.
pub trait LinearOperator {
    /// Number of tokens.
    fn len(&self) -> usize;

    /// Whether there are no tokens.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `M x`.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x` does not have [`LinearOperator::len`] elements; what the operator itself meets.
    fn apply(&self, x: &[f64]) -> Result<Vec<f64>>;

    /// `M^T x`.
    ///
    /// # Errors
    /// As [`LinearOperator::apply`].
    fn apply_transpose(&self, x: &[f64]) -> Result<Vec<f64>>;

    /// `M x` for several `x`. The default is one [`LinearOperator::apply`] each; an operator that is streamed overrides it,
    /// because what a pass costs is making the weights, not using them.
    ///
    /// # Errors
    /// As [`LinearOperator::apply`].
    fn apply_block(&self, block: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        block.iter().map(|x| self.apply(x)).collect()
    }

    /// `M^T x` for several `x`, as [`LinearOperator::apply_block`].
    ///
    /// # Errors
    /// As [`LinearOperator::apply`].
    fn apply_transpose_block(&self, block: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        block.iter().map(|x| self.apply_transpose(x)).collect()
    }
}

impl<O: LinearOperator> LinearOperator for &O {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn apply(&self, x: &[f64]) -> Result<Vec<f64>> {
        (**self).apply(x)
    }

    fn apply_transpose(&self, x: &[f64]) -> Result<Vec<f64>> {
        (**self).apply_transpose(x)
    }

    fn apply_block(&self, block: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        (**self).apply_block(block)
    }

    fn apply_transpose_block(&self, block: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        (**self).apply_transpose_block(block)
    }
}

/// A stored matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense {
    n: usize,
    entries: Vec<f64>,
}

impl Dense {
    /// The row-major `n x n` matrix of `entries`.
    ///
    /// # Errors
    /// [`crate::Error::Length`] unless there are `n * n` entries.
    pub fn new(n: usize, entries: Vec<f64>) -> Result<Self> {
        check_len("entries", entries.len(), n * n)?;
        Ok(Self { n, entries })
    }

    pub(crate) fn from_entries(n: usize, entries: Vec<f64>) -> Self {
        debug_assert_eq!(entries.len(), n * n);
        Self { n, entries }
    }

    /// The matrix of `entry(row, column)`.
    pub fn from_fn(n: usize, entry: impl Fn(usize, usize) -> f64) -> Self {
        let entries = (0..n * n).map(|at| entry(at / n, at % n)).collect();
        Self { n, entries }
    }

    /// The matrix of any operator, read off column by column.
    ///
    /// # Errors
    /// Those of the operator.
    pub fn of(operator: &impl LinearOperator) -> Result<Self> {
        /// Columns read at once: what a pass over the weights makes of them costs little beside the weights.
        const COLUMNS: usize = 256;
        let n = operator.len();
        let mut entries = vec![0.0; n * n];
        for first in (0..n).step_by(COLUMNS) {
            let unit = |j: usize| (0..n).map(|i| f64::from(u8::from(i == j))).collect();
            let block: Vec<Vec<f64>> = (first..n.min(first + COLUMNS)).map(unit).collect();
            for (j, column) in (first..).zip(operator.apply_block(&block)?) {
                column.iter().enumerate().for_each(|(i, &x)| entries[i * n + j] = x);
            }
        }
        Ok(Self { n, entries })
    }

    /// The graph of weighted `edges` `(from, to, weight)` over `n` tokens; parallel edges add up.
    ///
    /// # Panics
    /// Where an edge meets a token that is not there.
    pub fn from_edges(n: usize, edges: &[(usize, usize, f64)]) -> Self {
        let mut entries = vec![0.0; n * n];
        for &(from, to, weight) in edges {
            assert!(from < n && to < n, "edge {from} -> {to} in a graph of {n} tokens");
            entries[from * n + to] += weight;
        }
        Self { n, entries }
    }

    /// All entries, row by row.
    pub fn entries(&self) -> &[f64] {
        &self.entries
    }

    /// Row `i`: the weights of the edges that leave token `i`.
    pub fn row(&self, i: usize) -> &[f64] {
        &self.entries[i * self.n..][..self.n]
    }

    /// The rows, in order.
    pub fn rows(&self) -> impl Iterator<Item = &[f64]> {
        (0..self.n).map(|i| self.row(i))
    }

    /// The same graph with every weight times `factor`.
    pub fn scaled(mut self, factor: f64) -> Self {
        self.entries.iter_mut().for_each(|x| *x *= factor);
        self
    }

    /// The Frobenius norm.
    pub fn frobenius(&self) -> f64 {
        dot(&self.entries, &self.entries).sqrt()
    }
}

impl LinearOperator for Dense {
    fn len(&self) -> usize {
        self.n
    }

    fn apply(&self, x: &[f64]) -> Result<Vec<f64>> {
        check_len("x", x.len(), self.n)?;
        Ok(self.rows().map(|row| dot(row, x)).collect())
    }

    fn apply_transpose(&self, x: &[f64]) -> Result<Vec<f64>> {
        check_len("x", x.len(), self.n)?;
        let mut y = vec![0.0; self.n];
        for (i, &x) in x.iter().enumerate() {
            y.iter_mut().zip(&self.entries[i * self.n..]).for_each(|(y, m)| *y += m * x);
        }
        Ok(y)
    }
}

/// The transpose of an operator: every edge turned round.
#[derive(Debug, Clone, Copy)]
pub struct Transposed<'a, O>(pub &'a O);

impl<O: LinearOperator> LinearOperator for Transposed<'_, O> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn apply(&self, x: &[f64]) -> Result<Vec<f64>> {
        self.0.apply_transpose(x)
    }

    fn apply_transpose(&self, x: &[f64]) -> Result<Vec<f64>> {
        self.0.apply(x)
    }
}
