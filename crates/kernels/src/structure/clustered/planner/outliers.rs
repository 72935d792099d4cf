//! Tokens that the mean of their cluster speaks for badly: keys that every query had better see, and queries that had
//! better choose for themselves what they see.

use std::collections::BTreeMap;

use super::{
    super::members::{Members, exact_mean, square_distance},
    Head,
    fit::compact,
};
use crate::{
    call::{
        TokenRows,
        cluster_plan::{NONE, clusters},
    },
    simd::rows,
};

impl Head<'_> {
    /// Takes the keys that are farthest from the means of their clusters out of these.
    pub(super) fn free_outliers(&self, label_k: &mut [i32]) {
        if self.m.outlier_globals == 0 {
            return;
        }
        let keys = Members::new(label_k, None, clusters(label_k));
        let means = self.means(self.k, &keys);
        let distance = |j: usize| square_distance(&self.k[j * self.dim..][..self.dim], &means[label_k[j] as usize]);
        let members = (0..label_k.len()).filter(|&j| label_k[j] != NONE);
        for j in farthest(members.map(|j| (distance(j), j)), self.m.outlier_globals) {
            label_k[j] = NONE;
        }
    }

    /// Lets the queries that are farthest from the mean of the other queries of their clusters see more than these; a query
    /// alone in its cluster is farther than any. Those that then see the same become a cluster. Returns the labels of all
    /// queries, and what each cluster of them sees.
    pub(super) fn route_outliers(
        &self,
        label_q: &[i32],
        queries: &Members,
        keys: &Members,
        mut routes: Vec<Vec<u32>>,
    ) -> (Vec<i32>, Vec<Vec<u32>>) {
        let means = self.means(self.q, queries);
        let distance = |i: usize| match queries.of(label_q[i] as usize).len() {
            1 => f64::INFINITY,
            // From the mean of the others it is n / (n - 1) times as far as from the mean of all.
            n => {
                let mean = &means[label_q[i] as usize];
                square_distance(&self.q[i * self.dim..][..self.dim], mean) * (n as f64 / (n - 1) as f64).powi(2)
            }
        };
        let members = (0..label_q.len()).filter(|&i| label_q[i] != NONE);
        let outliers = farthest(members.map(|i| (distance(i), i)), self.m.outlier_queries);
        let key_means = keys.means(self.k, self.dim);
        let mut labels: Vec<u32> = label_q.iter().map(|&label| label.max(0) as u32).collect();
        let mut parted = BTreeMap::new();
        for i in outliers {
            let of_cluster = &routes[labels[i] as usize];
            let seen = self.seen_by(i, of_cluster, keys, &key_means);
            if seen.len() > of_cluster.len() {
                let fresh = routes.len() as u32;
                labels[i] = *parted.entry(seen.clone()).or_insert(fresh);
                if labels[i] == fresh {
                    routes.push(seen);
                }
            }
        }
        settle(label_q, &labels, routes)
    }

    /// The mean of `x` over every cluster: not rounded, so that the two tokens of a pair are as far from it as each other.
    fn means(&self, x: &[f32], members: &Members) -> Vec<Vec<f64>> {
        let x = TokenRows::in_one_piece(x, self.dim);
        (0..members.len()).map(|c| exact_mean(x, members.of(c).iter().copied())).collect()
    }

    /// The clusters `of_cluster`, and the `routes` best for query `i` alone; ascending.
    fn seen_by(&self, i: usize, of_cluster: &[u32], keys: &Members, key_means: &[f32]) -> Vec<u32> {
        let mut products = vec![0.0; keys.len()];
        rows::dots(self.level, key_means, &self.q[i * self.dim..][..self.dim], &mut products);
        let mut order: Vec<u32> = (0..keys.len() as u32).filter(|&c| !keys.of(c as usize).is_empty()).collect();
        order.sort_by(|&c, &e| products[e as usize].total_cmp(&products[c as usize]));
        order.truncate(self.m.routes);
        order.extend(of_cluster);
        order.sort_unstable();
        order.dedup();
        order
    }
}

/// Numbers the clusters that still have queries anew, in order.
fn settle(label_q: &[i32], labels: &[u32], routes: Vec<Vec<u32>>) -> (Vec<i32>, Vec<Vec<u32>>) {
    let used: Vec<u32> = label_q.iter().zip(labels).filter(|(old, _)| **old != NONE).map(|(_, &label)| label).collect();
    let fresh = compact(&used);
    let number = |label: u32| fresh.get(label as usize).copied().unwrap_or(NONE);
    let numbered =
        label_q.iter().zip(labels).map(|(&old, &label)| if old == NONE { NONE } else { number(label) }).collect();
    let kept = routes.into_iter().zip(0..).filter(|(_, label)| number(*label) != NONE).map(|(routes, _)| routes);
    (numbered, kept.collect())
}

/// The `count` tokens with the largest distances, ascending; those without any distance are none of them.
fn farthest(distances: impl Iterator<Item = (f64, usize)>, count: usize) -> Vec<usize> {
    let mut all: Vec<(f64, usize)> = distances.filter(|&(distance, _)| distance > 0.0).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    all.truncate(count);
    let mut tokens: Vec<usize> = all.into_iter().map(|(_, n)| n).collect();
    tokens.sort_unstable();
    tokens
}
