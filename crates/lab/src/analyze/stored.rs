//! A head's token graph that is small enough to be stored.

use resolvent_graph::{
    AttentionOperator, Dense, LinearOperator, Paths, Result, Reversible, asymmetry, shortest_paths_from,
    shortest_paths_from_logs,
};

/// The weights of a head, and the kernel that they are shares of.
pub(super) struct Stored {
    /// `M`, its rows normalised where the mechanism does so.
    pub weights: Dense,
    /// The logarithms of the kernel before rows are normalised, where the mechanism keeps what it divided by; `softmax`'s in
    /// f64 from queries and keys, so that none is too small to be there.
    logs: Option<Vec<f64>>,
    /// Whether the weights are exactly the kernel's shares.
    exact: bool,
}

impl Stored {
    pub(super) fn new(operator: &AttentionOperator) -> Result<Self> {
        let n = operator.len();
        if let Some(logits) = operator.logits() {
            let rows: Vec<f64> = logits.chunks(n.max(1)).map(log_sum).collect();
            let share = |i: usize, j: usize| match rows[i] {
                f64::NEG_INFINITY => 0.0,
                row => (logits[i * n + j] - row).exp(),
            };
            return Ok(Self { weights: Dense::from_fn(n, share), logs: Some(logits), exact: true });
        }
        let weights = Dense::of(operator)?;
        let log = |rows: Vec<f64>| {
            let entries = weights.entries().iter().enumerate();
            entries.map(|(at, &w)| if w == 0.0 { f64::NEG_INFINITY } else { w.ln() + rows[at / n] }).collect()
        };
        let logs = operator.lse().map(log);
        Ok(Self { weights, logs, exact: false })
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

    /// Shortest paths from evenly spread tokens, `step` apart.
    pub(super) fn paths(&self, step: usize) -> Result<Paths> {
        let n = self.weights.len();
        let sources = (0..n).step_by(step).collect();
        match &self.logs {
            Some(logits) if self.exact => {
                let rows: Vec<f64> = logits.chunks(n.max(1)).map(log_sum).collect();
                let share =
                    |(at, log): (usize, &f64)| if *log == f64::NEG_INFINITY { *log } else { log - rows[at / n] };
                shortest_paths_from_logs(n, &logits.iter().enumerate().map(share).collect::<Vec<_>>(), sources)
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

/// Mean over rows of weights of `exp` of their entropy as shares of their sums.
pub(super) fn perplexity<'a>(rows: impl ExactSizeIterator<Item = &'a [f64]>) -> f64 {
    let count = rows.len().max(1) as f64;
    let entropy = |row: &[f64]| {
        let total: f64 = row.iter().sum();
        row.iter().filter(|&&w| w > 0.0).map(|w| -(w / total) * (w / total).ln()).sum::<f64>()
    };
    rows.map(|row| entropy(row).exp()).sum::<f64>() / count
}

fn log_sum(row: &[f64]) -> f64 {
    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY { most } else { most + row.iter().map(|x| (x - most).exp()).sum::<f64>().ln() }
}
