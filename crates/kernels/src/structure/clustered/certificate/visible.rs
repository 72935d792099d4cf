//! What a row sees of the keys beyond its own clusters, taken in once for all rows of a task.

use super::{super::members::square_distance, FarCluster, Rows, dot};

/// The clusters of keys and the values, as far as a query sees them.
pub(super) struct Visible<'a> {
    rows: &'a Rows<'a>,
    /// Keys below this are taken in.
    limit: usize,
    counts: Vec<usize>,
    sums: Vec<f64>,
    means: Vec<f64>,
    /// The farthest key of every cluster, from the anchor and from the mean.
    from_anchor: Vec<f64>,
    radii: Vec<f64>,
    /// Clusters whose mean and radius are not those of their sum.
    stale: Vec<usize>,
    /// The farthest value from the mean of all, and the largest.
    pub value_radius: f64,
    pub largest_value: f64,
}

impl<'a> Visible<'a> {
    pub fn new(rows: &'a Rows<'a>) -> Self {
        let clusters = rows.graph.keys.len();
        let zeros = |len: usize| vec![0.0; len];
        Self {
            rows,
            limit: 0,
            counts: vec![0; clusters],
            sums: zeros(rows.anchors.len()),
            means: zeros(rows.anchors.len()),
            from_anchor: zeros(clusters),
            radii: zeros(clusters),
            stale: Vec::new(),
            value_radius: 0.0,
            largest_value: 0.0,
        }
    }

    /// Takes in the keys below `limit`.
    pub fn extend(&mut self, limit: usize) {
        let Rows { shape, graph, anchors, value_mean, k, v, keep_k, .. } = self.rows;
        let (d, dv) = (shape.head_dim, shape.value_dim);
        for j in self.limit..limit {
            if keep_k.is_none_or(|keep| keep[j]) {
                let value = &v[j * dv..][..dv];
                self.value_radius = self.value_radius.max(square_distance(value, value_mean).sqrt());
                self.largest_value = self.largest_value.max(dot(value, value).sqrt());
            }
            let Some(c) = graph.group_of_key(j) else { continue };
            let key = &k[j * d..][..d];
            self.counts[c] += 1;
            self.stale.push(c);
            self.sums[c * d..][..d].iter_mut().zip(key).for_each(|(sum, &x)| *sum += f64::from(x));
            self.from_anchor[c] = self.from_anchor[c].max(square_distance(key, &anchors[c * d..][..d]).sqrt());
        }
        self.limit = self.limit.max(limit);
    }

    fn freshen(&mut self) {
        let d = self.rows.shape.head_dim;
        self.stale.sort_unstable();
        self.stale.dedup();
        for c in self.stale.drain(..) {
            let (sum, anchor) = (&self.sums[c * d..][..d], &self.rows.anchors[c * d..][..d]);
            let mean = &mut self.means[c * d..][..d];
            mean.iter_mut().zip(sum).for_each(|(mean, sum)| *mean = sum / self.counts[c] as f64);
            let moved = mean.iter().zip(anchor).map(|(m, a)| (m - a).powi(2)).sum::<f64>().sqrt();
            self.radii[c] = self.from_anchor[c] + moved;
        }
    }

    /// What query `i`, of cluster `a`, sees of the clusters that are not exact for it.
    pub fn far(&mut self, i: usize, a: usize) -> Vec<FarCluster> {
        self.freshen();
        let Rows { shape, scale, q, centroid, ref graph, .. } = *self.rows;
        let (exact, strays) = (graph.keys_of(a), graph.keys.strays());
        let sees_means = centroid && Some(a) != graph.queries.strays();
        let d = shape.head_dim;
        let q = &q[i * d..][..d];
        let norm = dot(q, q).sqrt();
        let own = graph.window.own(i);
        let is_before = |c: usize| (graph.keys.of(c)[0] as usize) < own.start;
        let remote = (0..self.counts.len()).filter(|&c| self.counts[c] > 0 && is_before(c));
        let remote = remote.filter(|&c| !exact.contains(&(c as u32)));
        let far = |c: usize| {
            let product: f64 = q.iter().zip(&self.means[c * d..]).map(|(&q, mean)| f64::from(q) * mean).sum();
            let count = self.counts[c];
            let log_mass = scale * product + (count as f64).ln();
            let has_mean = sees_means && Some(c) != strays;
            FarCluster { cluster: c, count, log_mass, spread: scale * norm * self.radii[c], has_mean }
        };
        remote.map(far).collect()
    }
}
