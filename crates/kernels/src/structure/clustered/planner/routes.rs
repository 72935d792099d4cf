//! Routes that queries choose for themselves.

use super::{super::members::Members, Head, heaviest::Ranking};
use crate::{
    Scratch,
    call::TokenRows,
    mechanism::Segments,
    parallel,
    structure::dense::{PANEL, padded, transpose},
};

/// Queries of a task.
const QUERIES: usize = 4 * PANEL;

impl Head<'_> {
    /// The clusters that every query sees exactly, pairs of both in order: the `routes` ones whose mean keys, as many times as they have
    /// members, weigh most. Of a masked query, none.
    pub(super) fn best_of_queries(&self, keys: &Members) -> Vec<[u32; 2]> {
        let (dim, ranking) = (self.dim, Ranking::new(keys, (self.k, self.dim), self.scale(), self.m.routes));
        let ends = Ends::new(self, keys);
        let queries: Vec<u32> = (0..self.seq_q).filter(|&i| self.keeps_query(i)).map(|i| i as u32).collect();
        let of_task = |(scratch, choices): &mut (Scratch, _), queries: &[u32]| {
            let panels = scratch.take(padded(queries.len()) * dim);
            transpose(TokenRows::in_one_piece(self.q, dim), queries, |_| 1.0, panels);
            let mut chosen = Vec::with_capacity(queries.len() * self.m.routes.min(keys.len()));
            for (panel, queries) in panels.chunks(PANEL * dim).zip(queries.chunks(PANEL)) {
                let ends: Vec<u32> = queries.iter().map(|&i| ends.of(i as usize)).collect();
                ranking.choose(self.level, panel, &ends, choices);
                for (n, &i) in queries.iter().enumerate() {
                    chosen.extend(choices.of(n).iter().map(|&c| [i, c]));
                }
            }
            chosen
        };
        parallel::map_with(queries.chunks(QUERIES), || (Scratch::default(), ranking.choices()), of_task).concat()
    }
}

/// Which clusters lie before the segment of a query: the first so many.
struct Ends {
    segments: Segments,
    /// Of the keys of every cluster.
    of_clusters: Vec<usize>,
}

impl Ends {
    fn new(head: &Head<'_>, keys: &Members) -> Self {
        let mut last = 0;
        let segment = |c: usize| {
            last = keys.of(c).first().map_or(last, |&j| head.segments.of_key(j as usize));
            last
        };
        Self { segments: head.segments, of_clusters: (0..keys.len()).map(segment).collect() }
    }

    fn of(&self, query: usize) -> u32 {
        let own = self.segments.of_query(query);
        self.of_clusters.partition_point(|&segment| segment < own) as u32
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
