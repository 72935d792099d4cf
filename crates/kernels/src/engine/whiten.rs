//! Whitened weights: `c_i (g_ij - a_i - b_j) w_j + beta_i`, of a dense graph that is neither causal nor in windows.
//!
//! "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel", eq. 4 to 6, for any score with a bound. Column statistics come
//! from a sweep with queries and keys exchanged; the gradients of means and variances are one number per row and column.

use std::{f32::consts::LOG2_E, ops::Range};

use pulp::{Simd, WithSimd};

use super::{
    head::Head,
    sweep::{Sweep, lanes},
    tile::{Lanes, QUERIES, STRIDE},
};
use crate::{
    mechanism::{Centering, Whitened, Whitening},
    simd::{Level, math::exp2},
};

/// What makes weights of a head's affinities, per row and per column.
#[derive(Debug, Clone, Default)]
pub(super) struct Statistics {
    /// `c_i`, `a_i` and `beta_i`.
    scale: Vec<f32>,
    row_means: Vec<f32>,
    bias: Vec<f32>,
    /// `w_j` and `b_j`.
    pub factors: Vec<f32>,
    centres: Vec<f32>,
    /// The columns' means, and one over their deviations squared.
    means: Vec<f32>,
    precisions: Vec<f32>,
    centering: Centering,
}

/// What flows back: `dG_ij = c_i w_j P_ij - rows_i - columns_j + curve_j (g_ij - mean_j)`.
#[derive(Debug, Clone, Default)]
pub(super) struct Back {
    rows: Vec<f32>,
    columns: Vec<f32>,
    curve: Vec<f32>,
}

impl Statistics {
    pub fn of(sweep: Sweep<'_>, row_logs: impl Fn(Sweep<'_>) -> Vec<f64>, m: &Whitened) -> Self {
        let head = sweep.head;
        let (rows, columns) = (head.queries.len(), head.keys.len());
        let seen = columns.max(1);
        let mut of = Self {
            scale: vec![m.weight_scale.value(seen) as f32; rows],
            row_means: vec![0.0; rows],
            bias: vec![if m.bias_one_over_n { 1.0 / seen as f32 } else { 0.0 }; rows],
            factors: vec![1.0; columns],
            centres: vec![0.0; columns],
            means: vec![0.0; columns],
            precisions: vec![0.0; columns],
            centering: m.centering,
        };
        if m.centering == Centering::PerQuery {
            of.row_means = row_logs(sweep).iter().map(|log| (log.exp() / seen as f64) as f32).collect();
        }
        if m.centering == Centering::PerKey || m.whitening == Whitening::Diagonal {
            of.column_statistics(sweep, row_logs, m, rows.max(1) as f64);
        }
        of
    }

    fn column_statistics(
        &mut self,
        sweep: Sweep<'_>,
        row_logs: impl Fn(Sweep<'_>) -> Vec<f64>,
        m: &Whitened,
        rows: f64,
    ) {
        let transposed: Head<'_> = sweep.head.transposed();
        let sweep = Sweep { head: &transposed, q: &transposed.q, k: &transposed.k, ..sweep };
        self.means = row_logs(sweep).iter().map(|log| (log.exp() / rows) as f32).collect();
        if m.centering == Centering::PerKey {
            self.centres = self.means.clone();
        }
        if m.whitening == Whitening::Diagonal {
            let squares = transposed.blocks.iter().flat_map(|block| sweep.row_deviations(block, &self.means));
            let variances: Vec<f64> = squares.map(|x| x / rows + m.whiten_eps).collect();
            self.factors = variances.iter().map(|x| x.powf(-0.5) as f32).collect();
            self.precisions = variances.iter().map(|x| (1.0 / x) as f32).collect();
        }
    }

    /// What flows back through means and variances, from values by column, output gradients by row (of `dim` channels) and the
    /// gradients of the values.
    pub fn back(&self, head: &Head<'_>, values: &[f32], gradients: &[f32], dv: &[f32], dim: usize) -> Back {
        let (rows, columns) = (head.queries.len(), head.keys.len());
        let mut back = Back { rows: vec![0.0; rows], columns: vec![0.0; columns], curve: vec![0.0; columns] };
        let n = rows.max(1) as f64;
        let sum = |x: &[f32], factors: &[f32]| -> Vec<f64> {
            let mut sum = vec![0.0; dim];
            for (row, &factor) in x.chunks_exact(dim.max(1)).zip(factors) {
                sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(factor));
            }
            sum
        };
        let dot = |x: &[f32], y: &[f64]| x.iter().zip(y).map(|(&x, y)| f64::from(x) * y).sum::<f64>();
        let (biased, scaled) = (sum(gradients, &self.bias), sum(gradients, &self.scale));
        let of_columns = values.chunks_exact(dim.max(1)).zip(dv.chunks_exact(dim.max(1))).enumerate();
        for (j, (v, dv)) in of_columns {
            // <v, dv> without the bias is the gradient of the factor times the factor; that of the variance follows.
            let of_factor = crate::structure::dense::dot(v, dv) - dot(v, &biased);
            back.curve[j] = (-of_factor * f64::from(self.precisions[j]) / n) as f32;
            if self.centering == Centering::PerKey {
                back.columns[j] = (f64::from(self.factors[j]) * dot(v, &scaled) / n) as f32;
            }
        }
        if self.centering == Centering::PerQuery {
            let mean: Vec<f64> = sum(values, &self.factors).iter().map(|x| x / columns.max(1) as f64).collect();
            let of_rows = gradients.chunks_exact(dim.max(1)).zip(&self.scale).zip(&mut back.rows);
            of_rows.for_each(|((g, &scale), row)| *row = (f64::from(scale) * dot(g, &mean)) as f32);
        }
        back
    }

    /// Makes weights of the logarithms in a tile of `[keys, width]`, the first of whose columns is `first`.
    pub fn weigh(&self, level: Level, values: &mut [f32], size: [usize; 2], rows: &Range<usize>, first: usize) {
        let lanes = [&self.scale, &self.row_means, &self.bias].map(|x| lanes(x, rows));
        level.dispatch(Weigh { statistics: self, values, size, lanes: &lanes, first, back: None });
    }

    /// The same, and makes gradients of the logarithms of the products of values and output gradients.
    pub fn differentiate(
        &self,
        level: Level,
        (values, products): (&mut [f32], &mut [f32]),
        size: [usize; 2],
        rows: &Range<usize>,
        first: usize,
        back: &Back,
    ) {
        let of_rows = [&self.scale, &self.row_means, &self.bias].map(|x| lanes(x, rows));
        let taken = lanes(&back.rows, rows);
        let into = Some((back, &taken, &mut *products));
        level.dispatch(Weigh { statistics: self, values, size, lanes: &of_rows, first, back: into });
        // Beyond the last row there is nobody to take anything from.
        products.chunks_mut(STRIDE).take(size[0]).for_each(|row| row[rows.len()..size[1]].fill(0.0));
    }
}

/// What flows back, the part of it per row, and the products.
type Backward<'a> = (&'a Back, &'a Lanes, &'a mut [f32]);

struct Weigh<'a> {
    statistics: &'a Statistics,
    values: &'a mut [f32],
    /// Keys, and queries in whole vectors.
    size: [usize; 2],
    /// Scales, means and biases of the rows.
    lanes: &'a [Lanes; 3],
    first: usize,
    back: Option<Backward<'a>>,
}

impl WithSimd for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { statistics, values, size: [keys, width], lanes, first, mut back } = self;
        let vectors = width * size_of::<f32>() / size_of::<S::f32s>();
        let [scale, mean, bias] = [&lanes[0], &lanes[1], &lanes[2]].map(|x| S::as_simd_f32s(&x[..width]).0);
        let rate = simd.splat_f32s(LOG2_E);
        for key in 0..keys {
            let (j, range) = (first + key, key * STRIDE..key * STRIDE + width);
            let values = S::as_mut_simd_f32s(&mut values[range.clone()]).0;
            let (factor, centre) = (simd.splat_f32s(statistics.factors[j]), simd.splat_f32s(statistics.centres[j]));
            for n in 0..vectors {
                let g = exp2(simd, simd.mul_f32s(rate, values[n]));
                let slope = simd.mul_f32s(scale[n], factor);
                if let Some((back, rows, products)) = &mut back {
                    let rows = S::as_simd_f32s(&rows[..width]).0;
                    let products = S::as_mut_simd_f32s(&mut products[range.clone()]).0;
                    let curve = simd.splat_f32s(back.curve[j]);
                    let apart = simd.sub_f32s(g, simd.splat_f32s(statistics.means[j]));
                    let taken = simd.add_f32s(rows[n], simd.splat_f32s(back.columns[j]));
                    let dg = simd.sub_f32s(simd.mul_f32s(slope, products[n]), taken);
                    products[n] = simd.mul_f32s(g, simd.mul_add_e_f32s(curve, apart, dg));
                }
                let centred = simd.sub_f32s(simd.sub_f32s(g, mean[n]), centre);
                values[n] = simd.mul_add_e_f32s(slope, centred, bias[n]);
            }
        }
    }
}

/// `(g - centre)^2` of the logarithms in a tile of `[keys, width]`, added up per query.
pub(super) fn add_deviations(
    level: Level,
    values: &[f32],
    size: [usize; 2],
    centres: &Lanes,
    sums: &mut [f64; QUERIES],
) {
    let mut part = [0.0; QUERIES];
    level.dispatch(Deviations { values, size, centres, part: &mut part });
    sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += f64::from(part));
}

struct Deviations<'a> {
    values: &'a [f32],
    size: [usize; 2],
    centres: &'a Lanes,
    part: &'a mut Lanes,
}

impl WithSimd for Deviations<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [keys, width] = self.size;
        let centres = S::as_simd_f32s(&self.centres[..width]).0;
        let part = S::as_mut_simd_f32s(&mut self.part[..width]).0;
        let rate = simd.splat_f32s(LOG2_E);
        for row in self.values.chunks(STRIDE).take(keys) {
            for ((part, &x), &centre) in part.iter_mut().zip(S::as_simd_f32s(&row[..width]).0).zip(centres) {
                let apart = simd.sub_f32s(exp2(simd, simd.mul_f32s(rate, x)), centre);
                *part = simd.mul_add_e_f32s(apart, apart, *part);
            }
        }
    }
}
