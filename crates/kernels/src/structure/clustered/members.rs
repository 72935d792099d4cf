//! Which tokens a cluster has.

use crate::call::{
    TokenRows,
    cluster_plan::{NONE, STRAY},
};

/// The tokens of every cluster, ascending within each, and those in none.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Members {
    tokens: Vec<u32>,
    /// Where each cluster starts in `tokens`; the last entry is where those in none do.
    start: Vec<usize>,
    strays: Option<usize>,
}

impl Members {
    /// The kept tokens by their `labels`, each below `clusters`, [`NONE`] or [`STRAY`].
    pub fn new(labels: &[i32], keep: Option<&[bool]>, clusters: usize) -> Self {
        let strays = labels.contains(&STRAY).then_some(clusters);
        let clusters = clusters + usize::from(strays.is_some());
        let slot = |label: i32| match label {
            NONE => clusters,
            STRAY => clusters - 1,
            label => label as usize,
        };
        let kept = || labels.iter().enumerate().filter(|(n, _)| keep.is_none_or(|keep| keep[*n]));
        let mut start = vec![0; clusters + 2];
        kept().for_each(|(_, &label)| start[slot(label) + 1] += 1);
        (1..start.len()).for_each(|c| start[c] += start[c - 1]);
        let mut tokens = vec![0; start[clusters + 1]];
        let mut next = start.clone();
        for (n, &label) in kept() {
            tokens[next[slot(label)]] = n as u32;
            next[slot(label)] += 1;
        }
        start.pop();
        Self { tokens, start, strays }
    }

    /// The last cluster, where it is that of the strays: routed to none, and in no mean.
    pub fn strays(&self) -> Option<usize> {
        self.strays
    }

    /// Number of clusters.
    pub fn len(&self) -> usize {
        self.start.len() - 1
    }

    /// The tokens of cluster `c`.
    pub fn of(&self, c: usize) -> &[u32] {
        &self.tokens[self.start[c]..self.start[c + 1]]
    }

    /// The tokens of cluster `group`, or of no cluster.
    pub fn group(&self, group: Option<usize>) -> &[u32] {
        group.map_or(self.unlabelled(), |c| self.of(c))
    }

    /// The tokens in no cluster.
    pub fn unlabelled(&self) -> &[u32] {
        &self.tokens[self.start[self.len()]..]
    }

    /// The mean of `x [.., dim]` over every cluster, `[len, dim]`; 0 for a cluster without tokens.
    pub fn means(&self, x: &[f32], dim: usize) -> Vec<f32> {
        let mut means = vec![0.0; self.len() * dim];
        means
            .chunks_exact_mut(dim)
            .enumerate()
            .for_each(|(c, to)| mean(TokenRows::in_one_piece(x, dim), self.of(c).iter(), to));
        means
    }
}

/// Writes the mean of the rows `tokens` of `x` to the first elements of `to`; 0 where there are none.
pub(super) fn mean<'t>(x: TokenRows<'_>, tokens: impl Iterator<Item = &'t u32>, to: &mut [f32]) {
    to.iter_mut().zip(exact_mean(x, tokens.copied())).for_each(|(to, mean)| *to = mean as f32);
}

/// The mean of the rows `tokens` of `x`; 0 of none.
pub(super) fn exact_mean(x: TokenRows<'_>, tokens: impl Iterator<Item = u32>) -> Vec<f64> {
    let mut sum = vec![0.0; x.channels];
    let mut count = 0_usize;
    for n in tokens {
        sum.iter_mut().zip(x.row(n as usize)).for_each(|(sum, &x)| *sum += f64::from(x));
        count += 1;
    }
    sum.iter_mut().for_each(|sum| *sum /= count.max(1) as f64);
    sum
}

/// The squared distance of a token from a mean.
pub(super) fn square_distance(x: &[f32], mean: &[f64]) -> f64 {
    x.iter().zip(mean).map(|(&x, mean)| (f64::from(x) - mean).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::cluster_plan::clusters;

    #[test]
    fn tokens_are_sorted_into_their_clusters() {
        let labels = [2, NONE, 0, 2, 2, NONE, 0];
        let keep = [true, true, true, false, true, true, true];
        let all = Members::new(&labels, None, clusters(&labels));
        assert_eq!((all.len(), all.of(0), all.of(1), all.of(2)), (3, &[2, 6][..], &[][..], &[0, 3, 4][..]));
        assert_eq!(all.unlabelled(), [1, 5]);
        let kept = Members::new(&labels, Some(&keep), 4);
        assert_eq!((kept.len(), kept.of(2), kept.of(3)), (4, &[0, 4][..], &[][..]));
        let x = [1.0, 9.0, 4.0, 9.0, 3.0, 9.0, 8.0];
        assert_eq!(kept.means(&x, 1), [6.0, 0.0, 2.0, 0.0]);
        assert_eq!(Members::new(&[NONE; 2], None, 0).unlabelled(), [0, 1]);
        let stray = Members::new(&[0, STRAY, NONE, 0, STRAY], None, 1);
        assert_eq!((stray.len(), stray.of(0), stray.unlabelled()), (2, &[0, 3][..], &[2][..]));
        assert_eq!((stray.strays().map(|c| stray.of(c)), all.strays()), (Some(&[1, 4][..]), None));
    }
}
