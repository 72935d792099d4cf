//! Means, and sums of products of what is left without them, merged tile by tile: nothing large cancels.

use crate::{
    scratch::{cut, scratch_len},
    simd::{
        Level,
        product::{Add, Left, Right, Size, multiply_add_outer},
    },
};

/// The means of two sets of columns over the same rows, and `sum_i (x_i - mean x)(y_i - mean y)^T`.
pub(super) struct Moments<'a> {
    pub count: &'a mut f32,
    pub x: &'a mut [f32],
    pub y: &'a mut [f32],
    /// `[x.len(), y.len()]`
    pub cross: &'a mut [f32],
}

/// Sizes of [`Moments`] of `n` and `m` columns.
pub(super) const fn sizes(n: usize, m: usize) -> [usize; 4] {
    [1, n, m, n * m]
}

impl<'a> Moments<'a> {
    /// Moments in `memory`, as they are there.
    pub fn new(memory: &'a mut [f32], n: usize, m: usize) -> Self {
        let ([count, x, y, cross], _) = cut(memory, sizes(n, m));
        Self { count: &mut count[0], x, y, cross }
    }

    /// f32 that [`Moments::new`] takes.
    pub fn len(n: usize, m: usize) -> usize {
        scratch_len(sizes(n, m))
    }

    /// Of no rows.
    pub fn clear(&mut self) {
        *self.count = 0.0;
        [&mut *self.x, &mut *self.y, &mut *self.cross].into_iter().for_each(|x| x.fill(0.0));
    }

    /// Takes in the rows of `x` and `y`, which are left without their means; `x_mean` and `y_mean` are room
    /// for these.
    pub fn add_rows(
        &mut self,
        level: Level,
        [x, y]: [&mut [f32]; 2],
        strides: [usize; 2],
        [x_mean, y_mean]: [&mut [f32]; 2],
    ) {
        centre(x, strides[0], x_mean);
        centre(y, strides[1], y_mean);
        let rows = x.len() / strides[0];
        if rows == 0 {
            return;
        }
        let [share, weight] = self.shares(rows as f32);
        // What the means differ by, which the sums of products are to be corrected for.
        for (mean, new) in [(&mut *self.x, &mut *x_mean), (&mut *self.y, &mut *y_mean)] {
            for (mean, new) in mean.iter_mut().zip(new) {
                *new -= *mean;
                *mean += share * *new;
            }
        }
        x_mean.iter_mut().for_each(|x| *x *= weight);
        *self.count += rows as f32;
        let left = Left { data: x, row_stride: 1, depth_stride: strides[0] };
        let size = Size { rows: self.x.len().min(strides[0]), cols: strides[1], depth: rows };
        let out = Add { data: &mut *self.cross, stride: self.y.len() };
        multiply_add_outer(level, size, left, Right { data: y, stride: strides[1] }, out, [x_mean, y_mean]);
    }

    /// The share of `rows` more among all, and the weight of the square of what the means differ by.
    fn shares(&self, rows: f32) -> [f32; 2] {
        let all = *self.count + rows;
        [rows / all, *self.count * rows / all]
    }

    /// The moments of these rows and the other's.
    pub fn merge(&mut self, other: &Moments<'_>) {
        if *other.count == 0.0 {
            return;
        }
        let [share, weight] = self.shares(*other.count);
        let stride = self.y.len();
        for (i, row) in self.cross.chunks_exact_mut(stride).enumerate() {
            let factor = weight * (other.x[i] - self.x[i]);
            let others = other.cross[i * stride..].iter().zip(&*other.y).zip(&*self.y);
            row.iter_mut().zip(others).for_each(|(x, ((o, y), y_mean))| *x += o + factor * (y - y_mean));
        }
        self.x.iter_mut().zip(&*other.x).for_each(|(x, o)| *x += share * (o - *x));
        self.y.iter_mut().zip(&*other.y).for_each(|(y, o)| *y += share * (o - *y));
        *self.count += *other.count;
    }
}

/// Takes the mean off the rows, and writes it. Both are those of the differences from the first row: rows that are equal leave
/// nothing, of which whitening would make something.
fn centre(x: &mut [f32], stride: usize, mean: &mut [f32]) {
    mean.fill(0.0);
    let Some((first, others)) = x.split_at_mut_checked(stride) else { return };
    let rows = (1 + others.len() / stride) as f32;
    for row in others.chunks_exact(stride) {
        mean.iter_mut().zip(row).zip(&*first).for_each(|((mean, x), first)| *mean += x - first);
    }
    mean.iter_mut().for_each(|mean| *mean /= rows);
    for row in others.chunks_exact_mut(stride) {
        row.iter_mut().zip(&*first).zip(&*mean).for_each(|((x, first), mean)| *x = (*x - first) - mean);
    }
    for (first, mean) in first.iter_mut().zip(mean) {
        (*first, *mean) = (-*mean, *first + *mean);
    }
}

#[cfg(test)]
mod tests {
    use super::Moments;
    use crate::simd::Level;

    #[test]
    fn merged_moments_are_those_of_all_rows() {
        let at = |i: usize, c: usize| 10.0 + ((3 * i + 7 * c) as f32 * 0.83).sin();
        let rows = |r: std::ops::Range<usize>, from: usize| {
            Vec::from_iter(r.flat_map(|i| (from..from + 16).map(move |c| at(i, c))))
        };
        let mut memory = vec![f32::NAN; 2 * Moments::len(16, 16)];
        let mut sums = memory.chunks_exact_mut(Moments::len(16, 16)).map(|memory| Moments::new(memory, 16, 16));
        let [mut sum, mut part] = [sums.next(), sums.next()].map(Option::unwrap);
        let [mut first, mut second] = [[f32::NAN; 16]; 2];
        [&mut sum, &mut part].into_iter().for_each(Moments::clear);
        for r in [0..5, 5..5, 5..21, 21..40] {
            let (of, [mut x, mut y]) =
                (if r.start == 0 { &mut sum } else { &mut part }, [0, 16].map(|c| rows(r.clone(), c)));
            of.add_rows(Level::Portable, [&mut x, &mut y], [16, 16], [&mut first, &mut second]);
        }
        sum.merge(&part);
        assert_eq!([*sum.count, *part.count], [40.0, 35.0]);
        let mean = |c: usize| (0..40).map(|i| f64::from(at(i, c))).sum::<f64>() / 40.0;
        for (a, b) in [(0, 0), (3, 9), (15, 1)] {
            let cross: f64 =
                (0..40).map(|i| (f64::from(at(i, a)) - mean(a)) * (f64::from(at(i, 16 + b)) - mean(16 + b))).sum();
            assert!((f64::from(sum.cross[a * 16 + b]) - cross).abs() < 1e-3, "{a}, {b}");
            assert!((f64::from(sum.x[a]) - mean(a)).abs() < 1e-5 && (f64::from(sum.y[b]) - mean(16 + b)).abs() < 1e-5);
        }
    }
}
