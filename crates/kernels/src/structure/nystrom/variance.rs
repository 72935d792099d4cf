//! Variances of the columns of `G = Cq X Ck^T`: `c P c^T` for every row `c` of `Ck`, with `P = X S X` and `S` the covariance of the rows
//! of `Cq`.
//!
//! All of it is in f64. Where landmarks are alike `X` has entries of the size of one over the ridge, and what f32 rounds of `S`, or of `c X`,
//! would be as many times larger than the variances. What f32 rounds of `c` itself is multiplied by `P c`, whose entries are of order one.

use faer::Accum;

use super::{
    backward::Kept,
    forward::Heads,
    layout::{Saved, Sizes, buffers},
    operator::{Core, Loaded, Side, TileBuffers},
    pass::{TOKENS, of_tokens, share, splits},
};
use crate::linalg::{
    Entries, Order,
    wide::{self, WIDE, product, rows},
};

buffers! {
    /// A part's sums over queries; see [`Covariance`].
    Sums(s) {
        count: WIDE,
        mean: WIDE * s.landmarks,
        cross: Sizes::only(s.whitens, WIDE * s.landmarks * s.landmarks),
    }

    /// What taking in a tile of queries takes: their rows without the mean, and that.
    Centred(s) {
        rows: WIDE * TOKENS * s.landmarks,
        mean: WIDE * s.landmarks,
    }

    /// What the variances of a tile of keys take.
    Variances(s) {
        /// `P`, rows of `Ck`, and these times `P`.
        form: Sizes::only(s.whitens, WIDE * s.landmarks * s.landmarks),
        rows: Sizes::only(s.whitens, WIDE * TOKENS * s.landmarks),
        products: Sizes::only(s.whitens, WIDE * TOKENS * s.landmarks),
    }

    /// Matrices of the landmarks.
    Matrices(s) {
        inverse: Sizes::only(s.whitens, WIDE * s.landmarks * s.landmarks),
        other: Sizes::only(s.whitens, WIDE * s.landmarks * s.landmarks),
        first: Sizes::only(s.whitens, WIDE * s.landmarks * s.landmarks),
        second: Sizes::only(s.whitens, WIDE * s.landmarks * s.landmarks),
    }
}

/// `n` f64 of a buffer.
fn wide(x: &mut [f32], n: usize) -> &mut [f64] {
    &mut bytemuck::cast_slice_mut(x)[..n]
}

/// The mean of rows of `n` numbers and, where there is room for it, the lower triangle of `sum_i (x_i - mean)(x_i - mean)^T`.
struct Covariance<'a> {
    count: &'a mut f64,
    mean: &'a mut [f64],
    cross: &'a mut [f64],
}

impl<'a> Covariance<'a> {
    /// Sums in `memory`, as they are there.
    fn new(sizes: &Sizes, memory: &'a mut [f32], n: usize) -> Self {
        let (Sums { count, mean, cross }, _) = Sums::cut(sizes, memory);
        let len = if cross.is_empty() { 0 } else { n * n };
        Self { count: &mut wide(count, 1)[0], mean: wide(mean, n), cross: wide(cross, len) }
    }

    fn clear(&mut self) {
        *self.count = 0.0;
        self.mean.fill(0.0);
        self.cross.fill(0.0);
    }

    /// Takes in a tile of rows. Rows that are equal leave nothing, of which whitening would make something.
    fn add(&mut self, loaded: &Loaded<'_>, centred: Centred<&mut [f32]>) {
        let (n, count) = (self.mean.len(), loaded.count());
        if count == 0 || n == 0 {
            return;
        }
        let (x, mean) = (wide(centred.rows, count * n), wide(centred.mean, n));
        mean.fill(0.0);
        let first = &loaded.c[..n];
        for (x, row) in x.chunks_exact_mut(n).zip(loaded.c.chunks_exact(loaded.stride)) {
            for ((x, mean), (&row, &first)) in x.iter_mut().zip(&mut *mean).zip(row.iter().zip(first)) {
                *x = f64::from(row) - f64::from(first);
                *mean += *x;
            }
        }
        mean.iter_mut().for_each(|mean| *mean /= count as f64);
        x.chunks_exact_mut(n).for_each(|x| x.iter_mut().zip(&*mean).for_each(|(x, mean)| *x -= mean));
        mean.iter_mut().zip(first).for_each(|(mean, &first)| *mean += f64::from(first));
        self.move_to(count as f64, mean);
        if !self.cross.is_empty() {
            wide::add_symmetric(self.cross, rows(x, n), rows(x, n));
        }
    }

    /// Takes in the count and the mean of other rows, and what the means differ by.
    fn move_to(&mut self, count: f64, mean: &[f64]) {
        let n = self.mean.len();
        let all = *self.count + count;
        let (share, weight) = (count / all, *self.count * count / all);
        for (i, cross) in self.cross.chunks_exact_mut(n.max(1)).enumerate() {
            let factor = weight * (mean[i] - self.mean[i]);
            cross.iter_mut().zip(mean).zip(&*self.mean).for_each(|((x, new), old)| *x += factor * (new - old));
        }
        self.mean.iter_mut().zip(mean).for_each(|(old, new)| *old += share * (new - *old));
        *self.count = all;
    }

    fn merge(&mut self, other: &Covariance<'_>) {
        if *other.count > 0.0 {
            self.move_to(*other.count, other.mean);
            self.cross.iter_mut().zip(&*other.cross).for_each(|(x, other)| *x += other);
        }
    }
}

/// f32 that all slices' sums take.
pub(super) fn sums_len(s: &Sizes) -> usize {
    if s.has_query_mean() {
        s.shape.slices() * splits(s.shape.slices(), s.shape.seq_q) * Sums::scratch_len(s)
    } else {
        0
    }
}

impl Core<'_> {
    /// The mean of the rows of `Cq`, their covariance `S`, and `P`, where they are needed.
    pub(super) fn moments(&self, landmarks: &[f32], saved: &mut [f32], partial: &mut [f32], work: &mut [f32]) {
        let (sizes, slices, seq) = (&self.sizes, self.call.shape.slices(), self.call.shape.seq_q);
        if !sizes.has_query_mean() {
            return;
        }
        let len = Sums::scratch_len(sizes);
        let heads = Heads { landmarks, saved };
        let memory = TileBuffers::scratch_len(sizes) + Centred::scratch_len(sizes);
        share(of_tokens(slices, seq).zip(partial.chunks_mut(len)), work, memory, |(part, sums), memory| {
            self.with(heads, part.slice, |head, _| {
                let mut sum = Covariance::new(sizes, sums, head.count);
                sum.clear();
                for range in part.tiles() {
                    let (buffers, memory) = TileBuffers::cut(sizes, memory);
                    sum.add(&self.load(head, Side::Query, range, false, buffers), Centred::cut(sizes, memory).0);
                }
            });
        });
        let parts = splits(slices, seq) * len;
        let items = saved.chunks_mut(Saved::scratch_len(sizes)).zip(partial.chunks_mut(parts)).enumerate().take(slices);
        share(items, work, Matrices::scratch_len(sizes), |(slice, (saved, sums)), memory| {
            let (order, (saved, _)) = (self.order(slice), Saved::cut(sizes, saved));
            let (first, others) = sums.split_at_mut(len);
            let mut sum = Covariance::new(sizes, first, order.n);
            others.chunks_exact_mut(len).for_each(|other| sum.merge(&Covariance::new(sizes, other, order.n)));
            let to = saved.query_mean.iter_mut().zip(&mut *saved.query_mean_low);
            to.zip(&*sum.mean).for_each(|((high, low), &mean)| {
                *high = mean as f32;
                *low = (mean - f64::from(*high)) as f32;
            });
            if sizes.whitens {
                let queries = self.kept(Side::Query, slice).max(1) as f64;
                sum.cross.iter_mut().for_each(|x| *x /= queries);
                wide::mirror(sum.cross, order.n);
                self.write_forms(order, saved, sum.cross, Matrices::cut(sizes, memory).0);
            }
        });
    }

    /// Saves `S` and `P`.
    fn write_forms(&self, order: Order, saved: Saved<&mut [f32]>, s: &[f64], matrices: Matrices<&mut [f32]>) {
        let len = order.n * order.n;
        let [inverse, other, first, _] = matrices.wide(len);
        wide::read(order, [saved.high, saved.low], inverse);
        if len > 0 {
            product(other, Accum::Replace, rows(s, order.n), rows(inverse, order.n));
            product(first, Accum::Replace, rows(inverse, order.n), rows(other, order.n));
        }
        wide::write(order, s, &mut Entries { high: saved.covariance, low: saved.covariance_low });
        wide::write(order, first, &mut Entries { high: saved.form, low: saved.form_low });
    }

    /// Reads `P` for [`Core::forms`].
    pub(super) fn read_form(&self, slice: usize, saved: &Saved<&[f32]>, variances: &mut Variances<&mut [f32]>) {
        let order = self.order(slice);
        if self.sizes.whitens {
            wide::read(order, [saved.form, saved.form_low], wide(variances.form, order.n * order.n));
        }
    }

    /// The rows `c` of a tile of keys, and `c P`.
    fn forms<'v>(&self, loaded: &Loaded<'_>, variances: &'v mut Variances<&mut [f32]>) -> [&'v mut [f64]; 2] {
        let (n, count) = (loaded.landmarks, loaded.count());
        let form = &*wide(variances.form, n * n);
        let [x, products] = [&mut *variances.rows, &mut *variances.products].map(|x| wide(x, count * n));
        if n > 0 {
            for (x, c) in x.chunks_exact_mut(n).zip(loaded.c.chunks_exact(loaded.stride)) {
                x.iter_mut().zip(c).for_each(|(x, &c)| *x = c.into());
            }
            product(products, Accum::Replace, rows(x, n), rows(form, n));
        }
        [x, products]
    }

    /// Writes the values' factors over the standard deviations of their columns; the first factor is that of token `start`.
    pub(super) fn deviations(
        &self,
        loaded: &Loaded<'_>,
        variances: &mut Variances<&mut [f32]>,
        (start, factors): (usize, &mut [f32]),
        scale: f64,
    ) {
        let (eps, n) = (self.whitened().map_or(0.0, |w| w.whiten_eps), loaded.landmarks.max(1));
        let [x, products] = self.forms(loaded, variances);
        // Without landmarks nothing varies.
        let mut variance = x.chunks_exact(n).zip(products.chunks_exact(n));
        for &j in loaded.kept {
            let variance = variance.next().map_or(0.0, |(x, p)| x.iter().zip(p).map(|(x, p)| x * p).sum::<f64>());
            factors[j as usize - start] = (scale * (variance.max(0.0) + eps).powf(-0.5)) as f32;
        }
    }

    /// The share of the variances in the gradients of a tile of keys, from that of each: adds `2 gamma c P` to `dc`, and
    /// `gamma c^T c` to the lower triangle of `sums`.
    pub(super) fn of_variances(
        &self,
        loaded: &Loaded<'_>,
        variances: &mut Variances<&mut [f32]>,
        gamma: &[f32],
        (dc, sums): (&mut [f32], &mut [f32]),
    ) {
        let n = loaded.landmarks;
        if n == 0 || loaded.count() == 0 {
            return;
        }
        let [x, products] = self.forms(loaded, variances);
        let tile = dc.chunks_exact_mut(loaded.stride).zip(x.chunks_exact(n).zip(products.chunks_exact_mut(n)));
        for (&gamma, (dc, (x, products))) in gamma.iter().zip(tile) {
            let gamma = f64::from(gamma);
            dc.iter_mut().zip(&*products).for_each(|(dc, p)| *dc += (2.0 * gamma * p) as f32);
            products.iter_mut().zip(x).for_each(|(p, x)| *p = gamma * x);
        }
        wide::add_symmetric(wide(sums, n * n), rows(x, n), rows(products, n));
    }

    /// From `gamma`, the sum of all parts: writes `(2 / n) X gamma X` for the rows of `Cq`, and adds to `kept.da` what flows through the
    /// inverse: `-2 P gamma X` by its formula, else `2 S X gamma`.
    pub(super) fn through_forms(
        &self,
        order: Order,
        saved: &Saved<&[f32]>,
        (gamma, by_formula): (&mut [f32], bool),
        kept: &mut Kept<&mut [f32]>,
        matrices: Matrices<&mut [f32]>,
        queries: usize,
    ) {
        let (n, len) = (order.n, order.n * order.n);
        if n == 0 {
            return;
        }
        let gamma = wide(gamma, len);
        wide::mirror(gamma, n);
        let [inverse, other, first, second] = matrices.wide(len);
        wide::read(order, [saved.high, saved.low], inverse);
        product(first, Accum::Replace, rows(inverse, n), rows(&*gamma, n));
        product(second, Accum::Replace, rows(first, n), rows(inverse, n));
        let share = 2.0 / queries as f64;
        second.iter_mut().for_each(|x| *x *= share);
        wide::write(order, second, &mut Entries { high: &mut *kept.spread, low: &mut [] });
        let (form, factor) = match by_formula {
            true => ([saved.form, saved.form_low], -2.0),
            false => ([saved.covariance, saved.covariance_low], 2.0),
        };
        wide::read(order, form, other);
        let right = if by_formula { rows(first, n).transpose() } else { rows(first, n) };
        product(second, Accum::Replace, rows(other, n), right);
        wide::read(order, [&*kept.da, &*kept.da_low], other);
        second.iter_mut().zip(&*other).for_each(|(x, da)| *x = da + factor * *x);
        wide::write(order, second, &mut Entries { high: &mut *kept.da, low: &mut *kept.da_low });
    }
}

impl<'m> Matrices<&'m mut [f32]> {
    fn wide(self, len: usize) -> [&'m mut [f64]; 4] {
        [self.inverse, self.other, self.first, self.second].map(|x| wide(x, len))
    }
}
