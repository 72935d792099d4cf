//! Whitened weights: `c_i (g_ij - a_i - b_j) w_j + beta_i` for the columns that a row sees, of a dense graph without windows.
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
    score::tiles::VisibleIntervals,
    simd::{
        Level,
        math::exp2,
        product::{vectors, vectors_mut},
    },
};

/// What makes weights of a head's affinities, per row and per column.
#[derive(Debug, Clone, Default)]
pub(super) struct Statistics {
    /// `c_i`, `a_i` and `beta_i`.
    scale: Vec<f32>,
    row_means: Vec<f32>,
    bias: Vec<f32>,
    /// `w_j` and `b_j`.
    factors: Vec<f32>,
    centres: Vec<f32>,
    /// Of the columns.
    means: Vec<f32>,
    centering: Centering,
    whitening: Whitening,
    /// Of the first column whose affinities f32 does not tell apart: by how much they differ, and by how much they would have to, per unit.
    too_close: Option<[f64; 2]>,
}

/// How many times the rounding of affinities their deviation is, by which they are divided, at least.
const LEAST_DEVIATION: f64 = 64.0;

/// What flows back: `dG_ij = c_i w_j P_ij - rows_i - columns_j + curve_j (g_ij - mean_j)`.
#[derive(Debug, Clone, Default)]
pub(super) struct Back {
    rows: Vec<f32>,
    columns: Vec<f32>,
    curve: Vec<f32>,
}

impl Statistics {
    pub fn of(sweep: Sweep<'_>, moments: impl Fn(Sweep<'_>) -> Vec<Moments>, m: &Whitened) -> Self {
        let head = sweep.head;
        let none = |len: usize| vec![Moments::default(); len];
        let rows = if m.centering == Centering::PerQuery { moments(sweep) } else { none(head.queries.len()) };
        let columns = if m.centering == Centering::PerKey || m.whitening == Whitening::Diagonal {
            let transposed: Head<'_> = head.transposed();
            moments(Sweep { head: &transposed, q: &transposed.q, k: &transposed.k, ..sweep })
        } else {
            none(head.keys.len())
        };
        let factor = |x: &Moments| match m.whitening {
            Whitening::None => 1.0,
            _ => (x.square / x.count.max(1.0) + m.whiten_eps).powf(-0.5) as f32,
        };
        let means = |of: &[Moments]| of.iter().map(|x| x.mean as f32).collect();
        let too_close =
            columns.iter().filter(|_| m.whitening == Whitening::Diagonal).find_map(|x| x.too_close(m.whiten_eps));
        Self { too_close, ..Self::new(head, m, [means(&rows), means(&columns), columns.iter().map(factor).collect()]) }
    }

    /// See [`Statistics::too_close`](Self#structfield.too_close).
    pub fn too_close(&self) -> Option<[f64; 2]> {
        self.too_close
    }

    /// From the means of the rows and of the columns, and the columns' factors.
    pub fn new(head: &Head<'_>, m: &Whitened, [row_means, means, factors]: [Vec<f32>; 3]) -> Self {
        let seen = head.seen();
        let scale = |&n: &f64| m.weight_scale.value(n.max(1.0) as usize) as f32;
        let bias = |&n: &f64| if m.bias_one_over_n { (1.0 / n.max(1.0)) as f32 } else { 0.0 };
        let centres = if m.centering == Centering::PerKey { means.clone() } else { vec![0.0; means.len()] };
        Self {
            scale: seen.iter().map(scale).collect(),
            row_means,
            bias: seen.iter().map(bias).collect(),
            factors,
            centres,
            means,
            centering: m.centering,
            whitening: m.whitening,
            too_close: None,
        }
    }

    /// What [`Statistics::new`] takes, of rows and of columns.
    pub fn saved(&self) -> [Vec<Vec<f32>>; 2] {
        [vec![self.row_means.clone()], vec![self.means.clone(), self.factors.clone()]]
    }

    /// What flows back through means and variances, from values by column, output gradients by row (of `dim` channels) and the
    /// gradients of the values.
    pub fn back(&self, head: &Head<'_>, values: &[f32], gradients: &[f32], dv: &[f32], dim: usize) -> Back {
        let (rows, columns) = (head.queries.len(), head.keys.len());
        let mut back = Back { rows: vec![0.0; rows], columns: vec![0.0; columns], curve: vec![0.0; columns] };
        let (n, dim) = (rows.max(1) as f64, dim.max(1));
        let sum = |factors: &[f32]| -> Vec<f64> {
            let mut sum = vec![0.0; dim];
            gradients.chunks_exact(dim).zip(factors).for_each(|(row, &factor)| add_row(&mut sum, row, factor));
            sum
        };
        let dot = |x: &[f32], y: &[f64]| x.iter().zip(y).map(|(&x, y)| f64::from(x) * y).sum::<f64>();
        let (biased, scaled) = (sum(&self.bias), sum(&self.scale));
        for (j, (v, dv)) in values.chunks_exact(dim).zip(dv.chunks_exact(dim)).enumerate() {
            let factor = f64::from(self.factors[j]);
            if self.whitening != Whitening::None {
                // <v, dv> without the bias is the gradient of the factor times the factor; that of the variance follows.
                let of_factor = crate::structure::dense::dot(v, dv) - dot(v, &biased);
                back.curve[j] = (-of_factor * factor.powi(2) / n) as f32;
            }
            if self.centering == Centering::PerKey {
                back.columns[j] = (factor * dot(v, &scaled) / n) as f32;
            }
        }
        if self.centering == Centering::PerQuery {
            // A row sees the first columns, and no fewer of them than the rows before it.
            let (mut sum, mut next) = (vec![0.0; dim], 0);
            let of_rows = gradients.chunks_exact(dim).zip(head.seen()).zip(&self.scale).zip(&mut back.rows);
            for (((g, seen), &scale), row) in of_rows {
                while next < seen as usize {
                    add_row(&mut sum, &values[next * dim..][..dim], self.factors[next]);
                    next += 1;
                }
                *row = (f64::from(scale) * dot(g, &sum) / seen.max(1.0)) as f32;
            }
        }
        back
    }

    /// Makes weights of the logarithms in a tile of `[keys, width]`, the first of whose columns is `first`.
    pub fn weigh(
        &self,
        level: Level,
        values: &mut [f32],
        size: [usize; 2],
        (rows, first): (&Range<usize>, usize),
        visible: Option<VisibleIntervals<'_>>,
    ) {
        let lanes = [&self.scale, &self.row_means, &self.bias].map(|x| lanes(x, rows));
        level.dispatch(Weigh { statistics: self, values, size, lanes: &lanes, first, visible, back: None });
    }

    /// The same, and makes gradients of the logarithms of the products of values and output gradients.
    pub fn differentiate(
        &self,
        level: Level,
        (values, products): (&mut [f32], &mut [f32]),
        size: [usize; 2],
        (rows, first): (&Range<usize>, usize),
        visible: Option<VisibleIntervals<'_>>,
        back: &Back,
    ) {
        let of_rows = [&self.scale, &self.row_means, &self.bias].map(|x| lanes(x, rows));
        let taken = lanes(&back.rows, rows);
        let into = Some((back, &taken, &mut *products));
        level.dispatch(Weigh { statistics: self, values, size, lanes: &of_rows, first, visible, back: into });
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
    visible: Option<VisibleIntervals<'a>>,
    back: Option<Backward<'a>>,
}

impl WithSimd for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { statistics, values, size: [keys, width], lanes, first, visible, mut back } = self;
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
                    if let Some(visible) = &visible {
                        [products[n]] = visible.show(simd, [key, n * S::F32_LANES], [products[n]], 0.0);
                    }
                }
                let centred = simd.sub_f32s(simd.sub_f32s(g, mean[n]), centre);
                values[n] = simd.mul_add_e_f32s(slope, centred, bias[n]);
                if let Some(visible) = &visible {
                    [values[n]] = visible.show(simd, [key, n * S::F32_LANES], [values[n]], 0.0);
                }
            }
        }
    }
}

/// Adds a row of values, times `factor`.
fn add_row(sum: &mut [f64], row: &[f32], factor: f32) {
    sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(factor));
}

/// The number of affinities, their mean, and the sum of the squares about it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moments {
    count: f64,
    mean: f64,
    square: f64,
}

impl Moments {
    /// By how much the affinities differ and would have to, per unit of their mean, where they differ by too little of their rounding, which
    /// is that of their logarithms.
    fn too_close(&self, eps: f64) -> Option<[f64; 2]> {
        let rounding = f64::from(f32::EPSILON) * self.mean.ln().abs().max(1.0);
        let apart = (self.square / self.count.max(1.0) + eps).sqrt() / self.mean;
        let limit = LEAST_DEVIATION * rounding;
        (self.square > 0.0 && apart < limit).then_some([apart, limit])
    }

    fn add(&mut self, [count, mean, square]: [f64; 3]) {
        if count > 0.0 {
            let (apart, old) = (mean - self.mean, self.count);
            self.count += count;
            self.mean += apart * (count / self.count);
            self.square += square + apart * apart * (old * count / self.count);
        }
    }
}

/// Makes affinities of the logarithms in a tile of `[keys, width]`, and takes them into the moments of every query. Affinities that are
/// all equal are their mean to the last bit, of which whitening would make something otherwise.
pub(super) fn add_moments(
    level: Level,
    values: &mut [f32],
    size: [usize; 2],
    visible: Option<VisibleIntervals<'_>>,
    moments: &mut [Moments; QUERIES],
) {
    let mut sums = [[0.0; QUERIES]; 3];
    level.dispatch(TileMoments { values, size, visible, sums: &mut sums });
    for (n, moments) in moments.iter_mut().enumerate() {
        moments.add(sums.each_ref().map(|x| f64::from(x[n])));
    }
}

struct TileMoments<'a> {
    values: &'a mut [f32],
    size: [usize; 2],
    visible: Option<VisibleIntervals<'a>>,
    /// Counts, means, squares.
    sums: &'a mut [Lanes; 3],
}

impl WithSimd for TileMoments<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (mut col, width, lanes) = (0, self.size[1], S::F32_LANES);
        while col + 4 * lanes <= width {
            self.columns::<S, 4>(simd, col);
            col += 4 * lanes;
        }
        while col < width {
            self.columns::<S, 1>(simd, col);
            col += lanes;
        }
    }
}

impl TileMoments<'_> {
    /// `N` columns of vectors. The mean comes from a first one, and the sum of what lies apart from that.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, simd: S, col: usize) {
        let Self { values, size: [keys, _], visible, sums } = self;
        let (rate, zero, one) = (simd.splat_f32s(LOG2_E), simd.splat_f32s(0.0), simd.splat_f32s(1.0));
        let [mut counts, mut first, mut rest, mut squares] = [[zero; N]; 4];
        for key in 0..*keys {
            let entries = vectors_mut::<S, N>(values, key * STRIDE + col);
            let (mut shown, mut seen) = ([zero; N], [one; N]);
            for (shown, x) in shown.iter_mut().zip(entries.iter_mut()) {
                *x = exp2(simd, simd.mul_f32s(rate, *x));
                *shown = *x;
            }
            if let Some(visible) = visible {
                shown = visible.show(simd, [key, col], shown, 0.0);
                seen = visible.show(simd, [key, col], seen, 0.0);
            }
            for n in 0..N {
                first[n] = simd.add_f32s(first[n], shown[n]);
                counts[n] = simd.add_f32s(counts[n], seen[n]);
            }
        }
        for n in 0..N {
            first[n] = simd.div_f32s(first[n], simd.max_f32s(counts[n], one));
        }
        for key in 0..*keys {
            let entries = vectors::<S, N>(values, key * STRIDE + col);
            let mut apart = [zero; N];
            for n in 0..N {
                apart[n] = simd.sub_f32s(entries[n], first[n]);
            }
            if let Some(visible) = visible {
                apart = visible.show(simd, [key, col], apart, 0.0);
            }
            for n in 0..N {
                rest[n] = simd.add_f32s(rest[n], apart[n]);
                squares[n] = simd.mul_add_e_f32s(apart[n], apart[n], squares[n]);
            }
        }
        for n in 0..N {
            let shift = simd.div_f32s(rest[n], simd.max_f32s(counts[n], one));
            first[n] = simd.add_f32s(first[n], shift);
            squares[n] = simd.sub_f32s(squares[n], simd.mul_f32s(rest[n], shift));
        }
        for (sums, of) in sums.iter_mut().zip([counts, first, squares]) {
            vectors_mut::<S, N>(sums, col).copy_from_slice(&of);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row may see nothing of its first tiles.
    #[test]
    fn tiles_of_which_a_row_sees_nothing_leave_its_moments() {
        let mut moments = Moments::default();
        for tile in [[0.0, f64::NAN, 0.0], [2.0, 3.0, 2.0], [0.0, f64::NAN, 0.0], [2.0, 5.0, 8.0]] {
            moments.add(tile);
        }
        // 2, 4, 3 and 7 about 4.
        assert_eq!([moments.count, moments.mean, moments.square], [4.0, 4.0, 14.0]);
    }
}
