//! Where a run's time goes.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Seconds per part of the work, over all sessions of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Steps timed.
    pub steps: usize,
    /// Waiting for a batch (batches are assembled in the background) and making tensors of it.
    pub data: f64,
    /// Forward pass and loss.
    pub forward: f64,
    /// Backward pass.
    pub backward: f64,
    /// Clipping, AdamW, averaging.
    pub optimiser: f64,
    /// Evaluation.
    pub evaluation: f64,
    /// Metrics and checkpoints.
    pub writing: f64,
}

impl Breakdown {
    /// Names and seconds of the parts of a step.
    pub fn step_parts(&self) -> [(&'static str, f64); 4] {
        [("data", self.data), ("forward", self.forward), ("backward", self.backward), ("optimiser", self.optimiser)]
    }

    /// Mean seconds of a step.
    pub fn seconds_per_step(&self) -> f64 {
        self.step_parts().iter().map(|(_, seconds)| seconds).sum::<f64>() / self.steps.max(1) as f64
    }

    /// `47.1 ms a step: data 1 %, forward 31 %, ...`
    pub fn line(&self) -> String {
        let step = self.seconds_per_step();
        let share = |seconds: f64| 100.0 * seconds / self.steps.max(1) as f64 / step.max(f64::MIN_POSITIVE);
        let parts: Vec<_> =
            self.step_parts().iter().map(|&(name, seconds)| format!("{name} {:.0} %", share(seconds))).collect();
        format!(
            "{:.1} ms a step: {}; evaluation {:.1} s, writing {:.1} s in all",
            step * 1e3,
            parts.join(", "),
            self.evaluation,
            self.writing
        )
    }
}

/// Adds the time since the last lap to one part after the other.
#[derive(Debug)]
pub struct Clock {
    last: Instant,
}

impl Clock {
    /// Starts now.
    pub fn start() -> Self {
        Self { last: Instant::now() }
    }

    /// Adds the time since the last lap to `part`.
    pub fn lap(&mut self, part: &mut f64) -> Duration {
        let now = Instant::now();
        let lap = now - self.last;
        *part += lap.as_secs_f64();
        self.last = now;
        lap
    }
}
