//! Rows that are divided by their sums `c t`: `c` is a row of `Cq`, and `t` what a channel of ones makes of the keys.
//!
//! The sum has a sign and may be rounding: its floor is a share of `|c| |t|`, whose gradient then takes the place of the sum's. A factor on `c`
//! changes nothing, so that a query far from all landmarks is taken with the factor that leaves its affinities in f32.

use super::{
    layout::Saved,
    operator::{Core, Head, Loaded, Side},
    pass::Part,
};
use crate::{
    simd::product::{Left, Store},
    structure::dense::{Rows, dot},
};

/// A row sum smaller than this, of what it is summed of, is rounding.
const LEAST_ROW_SUM: f64 = 1e-6;

/// The least length of a row of affinities with landmarks of which f32 has digits.
const LEAST_AFFINITIES: f64 = 1e-36;

/// The least largest affinity of a row that leaves f32 digits for those that count beside it.
const LEAST_AFFINITY: f32 = 1e-12;

/// The largest logarithm of an affinity that is told from others: f32 rounds it by four thousandths.
const MOST_LOG: f32 = 65536.0;

/// Of every query where rows are divided by their sums: the factor on its output gradients, the gradient of the sum, and, where that is at its
/// floor, the gradient of the floor in its place, per unit of the lengths of the row and of `t`.
pub(super) const ROW: usize = 3;

/// One over a row sum that is `sum`, or, where that is rounding, over the least that it may be, with its sign. NaN, which no result may
/// have, where the token, or every key, is so far from all landmarks that f32 has no digits for the affinities.
pub(super) fn row_factor(sum: f32, c: &[f32], bound: f64) -> f32 {
    let length = norm(c);
    let divisor = f64::from(sum.abs()).max(bound * length).copysign(sum.into());
    if length < LEAST_AFFINITIES || divisor == 0.0 { f32::NAN } else { (1.0 / divisor) as f32 }
}

fn norm(c: &[f32]) -> f64 {
    dot(c, c).sqrt()
}

/// The gradient of the floor of query `i`, of a part's [`ROW`]s.
fn floor_of(factors: &[f32], part: &Part, i: u32) -> f64 {
    factors[(i as usize - part.tokens.start) * ROW + 2].into()
}

impl Core<'_> {
    /// Makes the largest affinity of rows one, where f32 would not have digits of all: these rows are divided by their sums, which are as
    /// many times larger.
    pub(super) fn lift(&self, head: &Head<'_>, tokens: Rows<'_>, stride: usize, c: &mut [f32]) {
        let largest = |row: &[f32]| row[..head.count].iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for (n, row) in c.chunks_exact_mut(stride).enumerate() {
            if head.count == 0 || largest(row) >= LEAST_AFFINITY {
                continue;
            }
            let token = Left { data: &tokens.data[n * tokens.stride..], row_stride: tokens.stride, depth_stride: 1 };
            self.terms(head, token, 1, Store { data: &mut *row, stride });
            head.score.row(self.call.level, row, None);
            let most = largest(row);
            let within = most >= -MOST_LOG;
            // What lies beyond the landmarks is the affinity with a place that is none of them, and may be far above all of theirs.
            let (own, beyond) = row.split_at_mut(head.count);
            own.iter_mut().for_each(|x| *x = if within { (*x - most).exp() } else { 0.0 });
            beyond.fill(0.0);
        }
    }

    /// Whether a slice has rows: there are keys, and, where rows are divided by their sums, landmarks that make these.
    pub(super) fn has_rows(&self, slice: usize) -> bool {
        self.kept(Side::Key, slice) > 0 && (self.producer.live(slice) > 0 || !self.sizes.by_row)
    }

    /// What a row sum has to exceed, per length of the row of `Cq`: its share of the length of `t`.
    pub(super) fn row_sum_bound(&self, saved: &Saved<&[f32]>) -> f64 {
        if !self.sizes.by_row {
            return 0.0;
        }
        let sums = saved.t.chunks_exact(self.sizes.vp).map(|row| f64::from(row[self.sizes.shape.value_dim]).powi(2));
        LEAST_ROW_SUM * sums.sum::<f64>().sqrt()
    }

    /// Of every row that is divided by its sum `s`, `1 / s` and the gradient of `s`, `-<dout, y> / s`; see [`ROW`].
    pub(super) fn row_gradients(
        &self,
        loaded: &Loaded<'_>,
        part: &Part,
        saved: &Saved<&[f32]>,
        [dout, y]: [&[f32]; 2],
        factors: &mut [f32],
    ) {
        let (dim, bound) = (self.call.shape.value_dim, self.row_sum_bound(saved));
        for (c, &i) in loaded.c.chunks_exact(loaded.stride).zip(loaded.kept) {
            let sums = c.iter().zip(saved.t.chunks_exact(self.sizes.vp));
            let sum: f64 = sums.map(|(&c, t)| f64::from(c) * f64::from(t[dim])).sum();
            let factor = row_factor(sum as f32, &c[..loaded.landmarks], bound);
            let row = i as usize * dim..(i as usize + 1) * dim;
            let gradient = -f64::from(factor) * dot(&dout[row.clone()], &y[row]);
            let at = (i as usize - part.tokens.start) * ROW;
            let (gradient, sign) = (gradient as f32, f64::from(factor).signum());
            let floored = sum.abs() < bound * norm(&c[..loaded.landmarks]);
            let floor = (f64::from(gradient) * sign * LEAST_ROW_SUM) as f32;
            let of = if floored { [factor, 0.0, floor] } else { [factor, gradient, 0.0] };
            factors[at..at + ROW].copy_from_slice(&of);
        }
    }

    /// Adds what flows back to `t`, the last channel of `T`, through the floors `|c| |t|` of row sums.
    pub(super) fn floor_of_sums(
        &self,
        loaded: &Loaded<'_>,
        part: &Part,
        saved: &Saved<&[f32]>,
        factors: &[f32],
        dt: &mut [f32],
    ) {
        let (width, dim) = (self.sizes.vp, self.call.shape.value_dim);
        let length = self.row_sum_bound(saved) / LEAST_ROW_SUM;
        for (c, &i) in loaded.c.chunks_exact(loaded.stride).zip(loaded.kept) {
            let floor = floor_of(factors, part, i);
            if floor == 0.0 || length == 0.0 {
                continue;
            }
            let rate = floor * norm(&c[..loaded.landmarks]) / length;
            for (dt, t) in dt.chunks_exact_mut(width).zip(saved.t.chunks_exact(width)) {
                dt[dim] += (rate * f64::from(t[dim])) as f32;
            }
        }
    }

    /// Adds what flows back to affinities through the floors `|c| |t|` of row sums.
    pub(super) fn floor_of_affinities(
        &self,
        loaded: &Loaded<'_>,
        part: &Part,
        saved: &Saved<&[f32]>,
        factors: &[f32],
        dc: &mut [f32],
    ) {
        let length = self.row_sum_bound(saved) / LEAST_ROW_SUM;
        let tile = dc.chunks_exact_mut(loaded.stride).zip(loaded.c.chunks_exact(loaded.stride)).zip(loaded.kept);
        for ((dc, c), &i) in tile {
            let (floor, own) = (floor_of(factors, part, i), norm(&c[..loaded.landmarks]));
            if floor != 0.0 && own > 0.0 {
                let rate = floor * length / own;
                let own = dc.iter_mut().zip(&c[..loaded.landmarks]);
                own.for_each(|(dc, &c)| *dc += (rate * f64::from(c)) as f32);
            }
        }
    }
}
