//! A head's token graph that is small enough to be stored.

use resolvent_graph::{
    AttentionOperator, Dense, LinearOperator, Paths, Result, Reversible, asymmetry, perplexity, shortest_paths_from,
    shortest_paths_from_logs,
};

/// The weights of a head, and the kernel that they are shares of.
pub(super) struct Stored {
    /// `M`, its rows normalised where the mechanism does so; of `softmax` and `fna` in f64, of others as their kernels have it.
    pub weights: Dense,
    /// The logarithms of the kernel before rows are normalised, where the mechanism keeps what it divided by; `softmax`'s in
    /// f64 from queries and keys, so that none is too small to be there.
    logs: Option<Vec<f64>>,
    /// The logarithms of the sums of the kernel's rows, where the weights are exactly its shares.
    log_sums: Option<Vec<f64>>,
}

impl Stored {
    pub(super) fn new(operator: &AttentionOperator) -> Result<Self> {
        let n = operator.len();
        if let Some(logits) = operator.logits() {
            let sums: Vec<f64> = logits.chunks(n.max(1)).map(log_sum).collect();
            let weights = Dense::from_fn(n, |i, j| log_share(logits[i * n + j], sums[i]).exp());
            return Ok(Self { weights, logs: Some(logits), log_sums: Some(sums) });
        }
        let (weights, rows) = match operator.exact()? {
            Some(exact) => exact,
            None => (Dense::of(operator)?, operator.lse()),
        };
        let log = |rows: Vec<f64>| {
            let entries = weights.entries().iter().enumerate();
            entries.map(|(at, &w)| if w == 0.0 { f64::NEG_INFINITY } else { w.ln() + rows[at / n] }).collect()
        };
        let logs = rows.map(log);
        Ok(Self { weights, logs, log_sums: None })
    }

    /// The share of the weight, by size, that is negative.
    pub(super) fn negative(&self) -> f64 {
        negative(self.weights.entries())
    }

    /// The weights before their rows were divided, up to one factor.
    pub(super) fn kernel(&self) -> Dense {
        let Some(logs) = &self.logs else { return self.weights.clone() };
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let n = self.weights.len();
        Dense::from_fn(n, |i, j| match logs[i * n + j] {
            f64::NEG_INFINITY => 0.0,
            log => (log - most).exp(),
        })
    }

    pub(super) fn asymmetry(&self) -> Result<f64> {
        asymmetry(&self.kernel())
    }

    pub(super) fn reversible(&self) -> Result<Reversible> {
        match &self.logs {
            Some(logs) => Reversible::from_log_weights(self.weights.len(), logs),
            None => Reversible::from_weights(&self.weights),
        }
    }

    /// Shortest paths from the tokens `sources`.
    pub(super) fn paths(&self, sources: Vec<usize>) -> Result<Paths> {
        let n = self.weights.len();
        match (&self.logs, &self.log_sums) {
            (Some(logs), Some(sums)) => {
                let shares: Vec<f64> = logs.iter().enumerate().map(|(at, &log)| log_share(log, sums[at / n])).collect();
                shortest_paths_from_logs(n, &shares, sources)
            }
            _ => shortest_paths_from(&self.weights, sources),
        }
    }
}

/// The share of some weights, by size, that is below zero.
pub(super) fn negative(weights: &[f64]) -> f64 {
    let size: f64 = weights.iter().map(|w| w.abs()).sum();
    let below = weights.iter().fold(0.0, |below, w| below - w.min(0.0));
    if size > 0.0 { below / size } else { 0.0 }
}

/// The mean perplexity of some rows of weights.
pub(super) fn mean_perplexity<'a>(rows: impl ExactSizeIterator<Item = &'a [f64]>) -> f64 {
    let count = rows.len().max(1) as f64;
    rows.map(perplexity).sum::<f64>() / count
}

/// The logarithm of a weight's share of a row, both given by their logarithms; rows without weights have no shares.
fn log_share(log: f64, row: f64) -> f64 {
    if log == f64::NEG_INFINITY { log } else { log - row }
}

fn log_sum(row: &[f64]) -> f64 {
    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY { most } else { most + row.iter().map(|x| (x - most).exp()).sum::<f64>().ln() }
}
