//! Speed and memory of the mechanisms, measured in turn so that a disturbance of the machine hits all alike.

use std::time::Instant;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::{
    Recipe, Result,
    checkpoint::Checkpoint,
    memory::{MemoryProbe, peak_above},
    stats::median,
    train::{Bench, TaskData},
};

/// Rounds over all mechanisms; the median round counts.
const ROUNDS: usize = 5;
/// What one mechanism costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Examples per batch.
    pub batch: usize,
    /// Training examples per second: forward, backward, optimiser; the batch is at hand.
    pub train_examples_per_second: f64,
    /// Examples per second through the forward pass alone.
    pub infer_examples_per_second: f64,
    /// Most heap that the model, its optimiser and one training step hold together, in bytes; absent without a probe.
    pub peak_bytes: Option<u64>,
}

/// Measures the recipes, one per mechanism, with the weights they were trained to. In each of five rounds each mechanism
/// trains, and infers, for `slot_seconds`, and at least one step. `None` when `stop` says so.
///
/// # Errors
/// As [`crate::train::run`].
pub fn measure<D: TaskData>(
    recipes: &[Recipe],
    mut trained: Vec<Checkpoint>,
    data: &D,
    device: &Device,
    probe: Option<&dyn MemoryProbe>,
    slot_seconds: f64,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Vec<Speed>>> {
    let tasks = trained.iter_mut().map(|checkpoint| data.restored(checkpoint)).collect::<Result<Vec<_>>>()?;
    let mut benches = Vec::new();
    let mut peaks = Vec::new();
    for ((recipe, task), trained) in recipes.iter().zip(&tasks).zip(trained) {
        let before = probe.map(MemoryProbe::held);
        let mut bench = Bench::new(recipe, task, Some(trained), device)?;
        // The first step makes the optimiser's state: the second is what every later one is.
        bench.step()?;
        peaks.push(match (probe, before) {
            (Some(probe), Some(before)) => Some(peak_above(probe, before, || bench.step())?),
            _ => None,
        });
        benches.push(bench);
    }
    let mut times = vec![(Vec::new(), Vec::new()); benches.len()];
    for _ in 0..ROUNDS {
        for (bench, (train, infer)) in benches.iter_mut().zip(&mut times) {
            if stop() {
                return Ok(None);
            }
            train.push(slot(slot_seconds, || bench.step())?);
            infer.push(slot(slot_seconds, || bench.infer())?);
        }
    }
    let speeds = benches.iter().zip(&mut times).zip(peaks).map(|((bench, (train, infer)), peak_bytes)| Speed {
        batch: bench.examples(),
        train_examples_per_second: (bench.examples() * bench.batches()) as f64 / median(train),
        infer_examples_per_second: bench.examples() as f64 / median(infer),
        peak_bytes,
    });
    Ok(Some(speeds.collect()))
}

/// Mean seconds of `work`, repeated for `seconds`.
fn slot(seconds: f64, mut work: impl FnMut() -> Result<f64>) -> Result<f64> {
    let began = Instant::now();
    let (mut sum, mut count) = (0.0, 0);
    while count == 0 || began.elapsed().as_secs_f64() < seconds {
        sum += work()?;
        count += 1;
    }
    Ok(sum / f64::from(count))
}
