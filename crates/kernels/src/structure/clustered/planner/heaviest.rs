//! Which clusters weigh most for a query: products with their means are ranked while they are in registers.

use pulp::{Simd, WithSimd};

use super::super::members::Members;
use crate::{
    simd::{
        Level,
        product::{Left, Right, Sink, Size, product, vectors, vectors_mut},
    },
    structure::dense::{PANEL, padded},
};

/// In the place of a cluster where there is none.
const NONE: u32 = u32::MAX;

/// Clusters as queries weigh them: by `scale q . mean + ln n`.
pub(super) struct Ranking {
    dim: usize,
    scale: f32,
    means: Vec<f32>,
    /// `-inf` for a cluster without members, which no query chooses.
    log_sizes: Vec<f32>,
    /// How many clusters a query chooses.
    count: usize,
}

impl Ranking {
    /// Of the clusters of the rows of `x [.., dim]`, of which a query chooses `count`.
    pub fn new(clusters: &Members, (x, dim): (&[f32], usize), scale: f64, count: usize) -> Self {
        let log_sizes = (0..clusters.len()).map(|c| (clusters.of(c).len() as f64).ln() as f32).collect();
        Self { dim, scale: scale as f32, means: clusters.means(x, dim), log_sizes, count: count.min(clusters.len()) }
    }

    /// Memory for the choices of a panel of queries.
    pub fn choices(&self) -> Choices {
        let len = self.count * PANEL;
        Choices { weights: vec![f32::NEG_INFINITY; len], clusters: vec![NONE; len], chosen: Vec::new() }
    }

    /// Chooses for the queries of `panel [dim][padded(ends.len())]`, each among the clusters below its own of `ends`; the first of several
    /// that weigh the same.
    pub fn choose(&self, level: Level, panel: &[f32], ends: &[u32], choices: &mut Choices) {
        choices.weights.fill(f32::NEG_INFINITY);
        choices.clusters.fill(NONE);
        if self.count > 0 {
            level.dispatch(Choose { ranking: self, panel, ends, choices });
        }
    }
}

/// What the queries of a panel choose: weights and clusters `[count][PANEL]`, from the heaviest down.
pub(super) struct Choices {
    weights: Vec<f32>,
    clusters: Vec<u32>,
    chosen: Vec<u32>,
}

impl Choices {
    /// The clusters of query `n`, ascending.
    pub fn of(&mut self, n: usize) -> &[u32] {
        self.chosen.clear();
        self.chosen.extend(self.clusters.iter().skip(n).step_by(PANEL).take_while(|&&c| c != NONE));
        self.chosen.sort_unstable();
        &self.chosen
    }
}

struct Choose<'a> {
    ranking: &'a Ranking,
    panel: &'a [f32],
    ends: &'a [u32],
    choices: &'a mut Choices,
}

impl WithSimd for Choose<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { ranking, panel, ends, choices } = self;
        let (least, most) = ends.iter().fold((NONE, 0), |(least, most), &end| (least.min(end), most.max(end)));
        let width = padded(ends.len());
        let mut of_lanes = [0; PANEL];
        of_lanes[..ends.len()].copy_from_slice(ends);
        let mut heaviest = Heaviest { ranking, least: least as usize, ends: &of_lanes, choices };
        let size = Size { rows: most as usize, cols: width, depth: ranking.dim };
        let left = Left { data: &ranking.means, row_stride: ranking.dim, depth_stride: 1 };
        product(simd, size, left, Right { data: panel, stride: width }, &mut heaviest);
    }
}

/// Keeps the heaviest clusters of every column.
struct Heaviest<'a> {
    ranking: &'a Ranking,
    /// Clusters below this are seen by all.
    least: usize,
    ends: &'a [u32; PANEL],
    choices: &'a mut Choices,
}

impl<S: Simd> Sink<S> for Heaviest<'_> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        let scale = simd.splat_f32s(self.ranking.scale);
        for (cluster, products) in (row..).zip(&block) {
            let log_size = simd.splat_f32s(self.ranking.log_sizes[cluster]);
            for (n, &product) in products.iter().enumerate() {
                let at = col + n * S::F32_LANES;
                let mut weight = simd.mul_add_e_f32s(scale, product, log_size);
                if cluster >= self.least {
                    let end = simd.transmute_u32s_f32s(vectors::<S, 1>(bytemuck::cast_slice(self.ends), at)[0]);
                    let is_seen = simd.less_than_u32s(simd.splat_u32s(cluster as u32), end);
                    weight = simd.select_f32s(is_seen, weight, simd.splat_f32s(f32::NEG_INFINITY));
                }
                self.choices.insert(simd, at, weight, cluster as u32);
            }
        }
    }
}

impl Choices {
    /// Puts a cluster before those that weigh less, for a vector of columns.
    #[inline(always)]
    fn insert<S: Simd>(&mut self, simd: S, at: usize, weight: S::f32s, cluster: u32) {
        let last = vectors::<S, 1>(&self.weights, self.weights.len() - PANEL + at)[0];
        if simd.first_true_m32s(simd.less_than_f32s(last, weight)) >= S::F32_LANES {
            return;
        }
        let clusters: &mut [f32] = bytemuck::cast_slice_mut(&mut self.clusters);
        // What moves down a place: the cluster itself until it has found its own.
        let (mut moved, mut label) = (weight, simd.transmute_f32s_u32s(simd.splat_u32s(cluster)));
        for (weights, clusters) in self.weights.chunks_exact_mut(PANEL).zip(clusters.chunks_exact_mut(PANEL)) {
            let (old, old_label) =
                (&mut vectors_mut::<S, 1>(weights, at)[0], &mut vectors_mut::<S, 1>(clusters, at)[0]);
            let lighter = simd.less_than_f32s(*old, weight);
            let (next, next_label) =
                (simd.select_f32s(lighter, *old, moved), simd.select_f32s(lighter, *old_label, label));
            (*old, *old_label) = (simd.select_f32s(lighter, moved, *old), simd.select_f32s(lighter, label, *old_label));
            (moved, label) = (next, next_label);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Queries of one channel, one to a cluster of one key: what weighs most is chosen, and of equal ones the first.
    #[test]
    fn the_first_of_equal_clusters_are_chosen() {
        let keys = [1.0, 3.0, 2.0, 3.0, 3.0];
        let clusters = Members::new(&[0, 1, 2, 3, 4], None, 5);
        let chosen = |count: usize, query: f32, end: u32| {
            let ranking = Ranking::new(&clusters, (&keys, 1), 0.5, count);
            let mut choices = ranking.choices();
            let mut panel = [0.0; padded(2)];
            (panel[0], panel[1]) = (-1.0, query);
            ranking.choose(Level::Portable, &panel, &[5, end], &mut choices);
            choices.of(1).to_vec()
        };
        assert_eq!([chosen(1, 1.0, 5), chosen(2, 1.0, 5)], [vec![1], vec![1, 3]]);
        assert_eq!([chosen(4, 1.0, 5), chosen(9, 1.0, 5)], [vec![1, 2, 3, 4], vec![0, 1, 2, 3, 4]]);
        assert_eq!([chosen(2, -1.0, 5), chosen(2, 0.0, 5)], [vec![0, 2], vec![0, 1]]);
        assert_eq!([chosen(2, 1.0, 3), chosen(2, 1.0, 1), chosen(2, 1.0, 0)], [vec![1, 2], vec![0], vec![]]);
    }

    /// A cluster weighs as many times as it has members; one without any is not chosen.
    #[test]
    fn sizes_weigh() {
        let keys = [1.0, 1.0, 1.0, 1.5];
        let clusters = Members::new(&[0, 0, 0, 2], None, 3);
        let ranking = Ranking::new(&clusters, (&keys, 1), 1.0, 3);
        let mut choices = ranking.choices();
        let mut panel = [0.0; padded(1)];
        panel[0] = 1.0;
        ranking.choose(Level::Portable, &panel, &[3], &mut choices);
        assert_eq!((choices.clusters[0], choices.clusters[PANEL], choices.of(0)), (0, 2, &[0, 2][..]));
    }
}
