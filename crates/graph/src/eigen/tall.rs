//! Matrices of many rows and few columns, as blocks of vectors are.

use std::ops::Range;

use faer::{Accum, Mat, MatRef, Par, linalg::matmul::matmul};
use rayon::prelude::*;

/// Rows held together: with the columns of a block they stay in a core's cache.
const ROWS: usize = 2048;

/// A few vectors of the same length, cut into runs of rows that are worked on at the same time. Sums over the rows are taken
/// run by run, whatever the number of threads.
#[derive(Debug, Clone)]
pub(super) struct Tall {
    columns: usize,
    runs: Vec<Mat<f64>>,
}

impl Tall {
    /// No vectors yet, of `rows` elements, and room for `columns`.
    pub fn with_capacity(rows: usize, columns: usize) -> Self {
        let run = |first: usize| {
            let rows = ROWS.min(rows - first);
            let mut run = Mat::with_capacity(rows, columns);
            run.resize_with(rows, 0, |_, _| 0.0);
            run
        };
        Self { columns: 0, runs: (0..rows).step_by(ROWS).map(run).collect() }
    }

    /// Number of vectors.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Adds `vectors` of as many elements as there are rows.
    pub fn extend(&mut self, vectors: &[Vec<f64>]) {
        let had = self.columns;
        self.columns += vectors.len();
        let columns = self.columns;
        self.runs.par_iter_mut().enumerate().for_each(|(n, run)| {
            run.resize_with(run.nrows(), columns, |i, j| vectors[j - had][n * ROWS + i]);
        });
    }

    /// The vectors one by one.
    pub fn vectors(&self, columns: Range<usize>) -> Vec<Vec<f64>> {
        let vector = |j: usize| self.runs.iter().flat_map(|run| run.col_as_slice(j)).copied().collect();
        columns.into_par_iter().map(vector).collect()
    }

    /// The products of these vectors with those of `other` in `columns`.
    pub fn inner(&self, other: &Self, columns: Range<usize>) -> Mat<f64> {
        let part = |(own, other): (&Mat<f64>, &Mat<f64>)| {
            let mut part = Mat::zeros(self.columns, columns.len());
            let right = other.subcols(columns.start, columns.len());
            matmul(part.as_mut(), Accum::Replace, own.transpose(), right, 1.0, Par::Seq);
            part
        };
        let parts: Vec<_> = self.runs.par_iter().zip(&other.runs).map(part).collect();
        parts.iter().fold(Mat::zeros(self.columns, columns.len()), |sum, part| sum + part)
    }

    /// The sums of these vectors with the columns of `weights`; with room for `columns`.
    pub fn times(&self, weights: MatRef<'_, f64>, columns: usize) -> Self {
        let product = |run: &Mat<f64>| {
            let mut out = Mat::with_capacity(run.nrows(), columns);
            out.resize_with(run.nrows(), weights.ncols(), |_, _| 0.0);
            matmul(out.as_mut(), Accum::Replace, run, weights, 1.0, Par::Seq);
            out
        };
        Self { columns: weights.ncols(), runs: self.runs.par_iter().map(product).collect() }
    }

    /// Subtracts the sums of `vectors` with the columns of `weights`.
    pub fn subtract(&mut self, vectors: &Self, weights: MatRef<'_, f64>) {
        self.runs.par_iter_mut().zip(&vectors.runs).for_each(|(own, run)| {
            matmul(own.as_mut(), Accum::Add, run, weights, -1.0, Par::Seq);
        });
    }

    /// The Euclidean norms.
    pub fn norms(&self) -> Vec<f64> {
        let square = |run: &Mat<f64>, j: usize| run.col_as_slice(j).iter().map(|x| x * x).sum::<f64>();
        (0..self.columns).map(|j| self.runs.iter().map(|run| square(run, j)).sum::<f64>().sqrt()).collect()
    }
}
