//! Routes that queries choose for themselves.

use rayon::prelude::*;

use super::{super::members::Members, Head};
use crate::{
    simd::product::{Left, Right, Size, Store, multiply},
    structure::dense::padded,
};

/// Queries that are ranked together: their products with a few hundred means stay in the first cache.
const QUERIES: usize = 32;

impl Head<'_> {
    /// The clusters that every query sees exactly: the `routes` ones whose mean keys, as many times as they have members, weigh most.
    /// Of a masked query, none. Those of later segments than the last before the query's have larger numbers than all that it sees.
    pub(super) fn best_of_queries(&self, keys: &Members) -> Vec<Vec<u32>> {
        let (dim, count) = (self.dim, self.m.routes);
        let present: Vec<u32> = (0..keys.len() as u32).filter(|&c| !keys.of(c as usize).is_empty()).collect();
        let (means, width) = (keys.means(self.k, dim), padded(keys.len()));
        let mut columns = vec![0.0; dim * width];
        for (c, mean) in means.chunks_exact(dim).enumerate() {
            columns[c..].iter_mut().step_by(width).zip(mean).for_each(|(to, &x)| *to = x);
        }
        let (scale, segments) = (self.scale(), self.segments);
        let seen_by = |i: usize| {
            let before = |c: &u32| segments.of_key(keys.of(*c as usize)[0] as usize) < segments.of_query(i);
            &present[..present.partition_point(before)]
        };
        let log_sizes: Vec<f64> = (0..keys.len()).map(|c| (keys.of(c).len() as f64).ln()).collect();
        let of_group = |(group, q): (usize, &[f32])| {
            let (rows, first) = (q.len() / dim, group * QUERIES);
            let last = seen_by(first + rows - 1).last();
            let cols = last.map_or(0, |&c| padded(c as usize + 1));
            let mut products = vec![0.0; rows * width];
            let left = Left { data: q, row_stride: dim, depth_stride: 1 };
            let size = Size { rows, cols, depth: dim };
            multiply(
                self.level,
                size,
                left,
                Right { data: &columns, stride: width },
                Store { data: &mut products, stride: width },
            );
            let best = |(n, products): (usize, &[f32])| match self.keeps_query(first + n) {
                true => largest(seen_by(first + n), count, |c| scale * f64::from(products[c]) + log_sizes[c]),
                false => Vec::new(),
            };
            products.chunks_exact(width.max(1)).enumerate().map(best).collect::<Vec<_>>()
        };
        if present.is_empty() {
            return vec![Vec::new(); self.seq_q];
        }
        self.q.par_chunks(QUERIES * dim).enumerate().flat_map_iter(of_group).collect()
    }
}

/// The `count` of some clusters with the largest `rank`, the first of several that are equal; ascending.
pub(in super::super) fn largest(of: &[u32], count: usize, rank: impl Fn(usize) -> f64) -> Vec<u32> {
    let mut best: Vec<(f64, u32)> = Vec::with_capacity(count.min(of.len()) + 1);
    for &c in of {
        let x = rank(c as usize);
        if best.len() < count || x > best[best.len() - 1].0 {
            best.insert(best.partition_point(|&(other, _)| other >= x), (x, c));
            best.truncate(count);
        }
    }
    let mut clusters: Vec<u32> = best.into_iter().map(|(_, c)| c).collect();
    clusters.sort_unstable();
    clusters
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_first_of_equal_clusters_are_chosen() {
        let ranks = [1.0, 3.0, 2.0, 3.0, 3.0];
        let best = |count| largest(&[0, 1, 2, 3, 4], count, |c| ranks[c]);
        assert_eq!((best(1), best(2), best(4), best(9)), (vec![1], vec![1, 3], vec![1, 2, 3, 4], vec![0, 1, 2, 3, 4]));
    }
}
