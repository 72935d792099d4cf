//! A hop in the sweep that sums its rows.

use super::{
    graph::Graph,
    head::Head,
    normalise::{Weighed, summed},
    routes::merged,
    sums::RowSum,
    sweep::{Summed, Sweep},
};
use crate::simd::rows::max_abs;

impl Graph<'_> {
    /// Whether f32 can hold the affinities of each row times values before they are divided. For a causal row only the values that it may
    /// see count. With routes a query has several rows, which are added up: they fit together.
    fn fits(&self, head: &Head<'_>, sums: &[RowSum], values: &[f32]) -> Vec<bool> {
        let (how, level, columns) = (summed(&self.m.normalisation), self.call.level, head.keys.len());
        if !head.sight.causal {
            let largest = max_abs(level, values).into();
            return sums.iter().map(|sum| sum.fits(how, largest, columns)).collect();
        }
        // The largest value before every position, and how many there are. No mean is larger than what it is of.
        let mut before = vec![(0.0_f32, 0_usize); self.call.shape.seq_kv + 1];
        let tokens = &head.keys[..columns - head.means.len()];
        for (value, &key) in values.chunks_exact((values.len() / columns.max(1)).max(1)).zip(tokens) {
            before[key as usize + 1] = (max_abs(level, value), 1);
        }
        for n in 1..before.len() {
            before[n] = (before[n].0.max(before[n - 1].0), before[n].1 + before[n - 1].1);
        }
        let seen =
            head.queries.iter().map(|&row| before[head.sight.of(row).high.min(self.call.shape.seq_kv as u32) as usize]);
        sums.iter().zip(seen).map(|(sum, (largest, columns))| sum.fits(how, largest.into(), columns.max(1))).collect()
    }

    /// One hop in the sweep that sums the rows, whose weights are then known. Returns whether each row [`Graph::fits`]; the results of those
    /// that do not are not valid.
    pub(super) fn stream(&self, (slice, sweep): (usize, Sweep<'_>), values: &[f32], rows: &mut [f32]) -> Vec<bool> {
        let (head, how) = (&self.heads[slice], summed(&self.m.normalisation));
        let (log, columns) = (sweep.score.is_log(), head.keys.len());
        let sums = self.rows(sweep, values, rows);
        let mut each = if log { vec![true; sums.len()] } else { self.fits(head, &sums, values) };
        head.routes.iter().for_each(|routes| routes.agree(&mut each));
        let fits = each.contains(&true);
        let stride = values.len() / columns.max(1);
        let of_queries = merged(head.routes.as_ref(), &sums);
        let weighed = Weighed::of_rows(&self.m.normalisation, head, log, &of_queries);
        if fits && (how != Summed::Divided || head.routes.is_some()) {
            for (n, (row, sum)) in rows.chunks_exact_mut(stride.max(1)).zip(&sums).enumerate() {
                let factor = match how {
                    Summed::Divided => sum.share_of(&of_queries[n]),
                    _ => weighed.factor(how, log, n, sum),
                };
                row.iter_mut().for_each(|x| *x *= factor);
            }
        }
        if let Some(routes) = head.routes.as_ref().filter(|_| fits) {
            routes.gather(rows, stride);
        }
        let _ = self.weighed[slice].set(weighed);
        each
    }
}
