//! What a benchmark found.

use std::{
    fmt::{self, Write},
    ops::Add,
    path::Path,
};

use resolvent::Calibration;
use resolvent_kernels::{Mechanism, Plan, Precision, Shape};
use serde::{Deserialize, Serialize};

use super::{
    Arrangement, Ceilings, Check, RESULTS,
    named::{Carried, Instructions, Pass, TensorType},
};
use crate::{
    Error, Result,
    columns::{
        Align::{Left, Right},
        Columns,
    },
    disk::write_atomically,
    environment::{Environment, Load},
    stats::median,
};

/// The result of a benchmark, as in its `bench.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// Sequences of one call.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Heads of keys and values, where tensors lay, and sequences end to end; of several arrangements what they have in common, and labels
    /// say the rest.
    #[serde(default)]
    pub arrangement: Arrangement,
    /// How busy the machine was before anything ran, where the system told.
    #[serde(default)]
    pub load: Option<Load>,
    /// Runs of every point.
    pub rounds: usize,
    /// What the machine can do at best.
    pub ceilings: Ceilings,
    /// Each mechanism against the reference; one that failed has no points.
    pub checks: Vec<Check>,
    /// Each rival against the reference, likewise; and why one could not be asked.
    #[serde(default)]
    pub rivals: Vec<Check>,
    /// Names and versions of the frameworks that ran in a process of their own.
    #[serde(default)]
    pub peer: Option<String>,
    /// What `Strategy::Auto` of the modules follows on this machine, if anything.
    #[serde(default)]
    pub calibration: Option<Calibration>,
    /// Whether it was stopped before all sizes were measured.
    #[serde(default)]
    pub interrupted: bool,
    /// What was measured, and what was left out and why.
    pub points: Vec<Point>,
    /// The machine.
    pub environment: Environment,
    /// Commands that repeat it.
    pub commands: Vec<String>,
}

/// What the kernels planned for a point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanSummary {
    /// What `auto` became.
    pub strategy: Carried,
    /// Why.
    pub reason: String,
    /// Precision of the products; absent in older results.
    #[serde(default)]
    pub precision: Option<Precision>,
    /// The instructions that make them; absent in older results.
    #[serde(default)]
    pub instructions: Option<Instructions>,
    /// Why the precision is not the one that was asked for.
    #[serde(default)]
    pub precision_reason: Option<String>,
    /// Query rows and key columns of one tile.
    #[serde(default)]
    pub tile: (usize, usize),
    /// Bytes that the forward pass holds beside its tensors.
    pub forward_bytes: u64,
    /// Those of forward and backward pass.
    pub training_bytes: u64,
}

impl PlanSummary {
    pub(super) fn of(plan: &Plan) -> Self {
        let bytes = |scratch: usize, allocated: usize| (4 * (scratch + plan.stats) + allocated) as u64;
        let forward = bytes(plan.scratch_forward, plan.allocated_forward);
        Self {
            strategy: Carried::of(plan),
            reason: plan.reason.into(),
            precision: Some(plan.arithmetic.runs),
            instructions: Instructions::of(&plan.arithmetic),
            precision_reason: (plan.arithmetic.runs != plan.arithmetic.asked).then(|| plan.arithmetic.reason.into()),
            tile: plan.tile,
            forward_bytes: forward,
            training_bytes: forward.max(bytes(plan.scratch_backward, plan.allocated_backward)),
        }
    }

    /// Precision and instructions in words, where the result has them: those of earlier versions have not.
    pub(crate) fn arithmetic(&self) -> String {
        let why = self.precision_reason.as_ref().map_or(String::new(), |why| format!(" ({why})"));
        let by = self.instructions.map_or(String::new(), |instructions| format!(" by {instructions}"));
        let told = self.precision.map(|precision| format!("{} precision{by}{why}", precision.name()));
        told.unwrap_or("precision not told".into())
    }
}

/// One mechanism at one size.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Its id, or the rival's name.
    pub label: String,
    /// The mechanism with its parameters; absent for a rival.
    pub mechanism: Option<Mechanism>,
    /// For a rival, the id of the mechanism that it computes.
    #[serde(default)]
    pub rival_of: Option<String>,
    /// Sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// What the kernels planned, with the precision and the instructions of ours.
    pub plan: Option<PlanSummary>,
    /// Type of the tensors; absent in older results.
    #[serde(default)]
    pub dtype: Option<TensorType>,
    /// Floating-point operations of the forward and of the backward pass.
    pub flops: [u64; 2],
    /// The forward pass.
    pub forward: Option<Timing>,
    /// The forward and backward pass together; absent too for a rival that has no backward pass.
    pub training: Option<Timing>,
    /// Why it was not measured.
    pub skipped: Option<String>,
}

impl Point {
    pub(super) fn new(label: &str, mechanism: Option<Mechanism>, shape: Shape) -> Self {
        let Shape { batch, heads, seq_q: tokens, head_dim, .. } = shape;
        let (label, dtype) = (label.into(), Some(TensorType::Float32));
        Self { label, mechanism, batch, heads, tokens, head_dim, dtype, ..Self::default() }
    }

    /// Whether it was measured and has no backward pass.
    pub fn is_forward_only(&self) -> bool {
        self.forward.is_some() && self.training.is_none()
    }

    /// How it was carried out, in words: the plan of ours, the type of a rival's tensors; nothing of a rival in older results.
    pub(crate) fn carried_out(&self) -> Option<String> {
        match &self.plan {
            Some(plan) => Some(format!("{}, {}; {}", plan.strategy, plan.reason, plan.arithmetic())),
            None => {
                let without = if self.is_forward_only() { ", no backward pass" } else { "" };
                self.dtype.map(|dtype| format!("{dtype}{without}"))
            }
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |timing: &Option<Timing>| timing.as_ref().map_or("–".into(), |t| milliseconds(t.median));
        write!(f, "{} at {} tokens: ", self.label, self.tokens)?;
        match &self.skipped {
            Some(why) => f.write_str(why),
            None if self.is_forward_only() => write!(f, "forward {} ms, no backward pass", time(&self.forward)),
            None => write!(f, "forward {} ms, with backward {} ms", time(&self.forward), time(&self.training)),
        }
    }
}

/// What a pass has to do, as planned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work {
    /// 0 where the least is not known.
    pub flops: u64,
    pub exps: u64,
    /// 0 where unknown.
    pub bytes: u64,
}

impl Work {
    /// The forward and the backward pass.
    pub fn of(plan: &Plan) -> [Self; 2] {
        [
            Self { flops: plan.flops_forward, exps: plan.exps_forward, bytes: plan.bytes_forward },
            Self { flops: plan.flops_backward, exps: plan.exps_backward, bytes: plan.bytes_backward },
        ]
    }
}

impl Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { flops: self.flops + other.flops, exps: self.exps + other.exps, bytes: self.bytes + other.bytes }
    }
}

/// Seconds of some runs, and what they mean.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds: the median run.
    pub median: f64,
    /// Seconds: at most a quarter of the runs were faster.
    pub low: f64,
    /// Seconds: at most a quarter of the runs were slower.
    pub high: f64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Planned operations over the median, in GFLOP/s; 0 for a mechanism that may have ended an iteration early
    /// ([`Mechanism::iterates`]).
    pub gflops: f64,
    /// That, over the rate of a plain matrix product.
    pub gemm_share: f64,
    /// Planned exponentials over the median, over the machine's rate of them; 0 where there are none.
    #[serde(default)]
    pub exp_share: f64,
    /// Planned bytes over the median, over the rate of a copy; 0 where unknown.
    pub copy_share: f64,
    /// Most bytes held beyond the call's tensors, its results among these; absent without a counter.
    pub peak_bytes: Option<u64>,
}

impl Timing {
    pub(super) fn of(
        seconds: &mut [f64],
        tokens: usize,
        work: Work,
        peak_bytes: Option<u64>,
        ceilings: &Ceilings,
    ) -> Self {
        let median = median(seconds);
        // A quarter of the runs lie outside on either side, of few runs none.
        let outside = seconds.len() / 4;
        let [low, high] = [outside, seconds.len() - 1 - outside].map(|run| seconds[run]);
        let giga = |count: u64| count as f64 / median / 1e9;
        let gflops = giga(work.flops);
        Self {
            median,
            low,
            high,
            tokens_per_second: tokens as f64 / median,
            gflops,
            gemm_share: gflops / ceilings.gemm_gflops,
            exp_share: giga(work.exps) / ceilings.exp_giga,
            copy_share: giga(work.bytes) / ceilings.copy_gbs,
            peak_bytes,
        }
    }

    /// The middle half of the runs over the median.
    pub(super) fn noise(&self) -> f64 {
        (self.high - self.low) / self.median
    }
}

impl BenchReport {
    /// Writes `bench.json` to a folder, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be written, [`Error::Damaged`] where the results cannot be put as JSON.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let file = folder.join(RESULTS);
        let json = serde_json::to_value(self).map_err(|e| Error::damaged(&file, e.to_string()))?;
        write_atomically(&file, format!("{json:#}\n").as_bytes())
    }

    /// The labels of what was measured, in order.
    pub fn labels(&self) -> Vec<&str> {
        let mut labels: Vec<&str> = Vec::new();
        for point in &self.points {
            if !labels.contains(&point.label.as_str()) {
                labels.push(&point.label);
            }
        }
        labels
    }

    /// The numbers of tokens, ascending.
    pub fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<_> = self.points.iter().map(|point| point.tokens).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// One point.
    pub fn point(&self, label: &str, tokens: usize) -> Option<&Point> {
        self.points.iter().find(|point| point.label == label && point.tokens == tokens)
    }

    /// Tokens and seconds of a label, ascending.
    pub(crate) fn curve(&self, label: &str, pass: Pass) -> Vec<(f64, f64)> {
        let timed = |tokens: usize| Some((tokens as f64, pass.of(self.point(label, tokens)?)?.median));
        self.sizes().into_iter().filter_map(timed).collect()
    }

    /// Milliseconds of every point as text, one table per pass, and how many times as fast as each rival we are.
    pub fn table(&self) -> String {
        let mut text = format!("{}\n{}\n", self.ceilings, self.auto());
        let labels: Vec<_> = self.labels().into_iter().map(|label| (label.to_owned(), label)).collect();
        for &pass in Pass::ALL {
            let milliseconds = |label: &str, n| Some(milliseconds(pass.of(self.point(label, n)?)?.median));
            text += &self.rows(&format!("{pass}, ms"), &labels, milliseconds);
        }
        let rivals: Vec<_> = self.rivals().map(|(rival, ours)| (format!("{ours} over {rival}"), rival)).collect();
        for pass in Pass::ALL.iter().filter(|_| !rivals.is_empty()) {
            let speed = |rival: &str, n| Some(three_digits(self.ratio(rival, n, |p| Some(pass.of(p)?.median))?) + "x");
            text += &self.rows(&format!("{pass}, times as fast"), &rivals, speed);
        }
        for (label, point) in self.measured() {
            let _ = point.carried_out().map(|how| write!(text, "\n{label}: {how}"));
        }
        if let Some(load) = self.load.filter(Load::is_busy) {
            let _ = write!(text, "\nwarning: {load}");
        }
        text + "\n"
    }

    /// What `Strategy::Auto` of the modules does on this machine, and why.
    pub fn auto(&self) -> String {
        let fused = "auto: the fused kernels at every size (not measured on this machine)";
        self.calibration.as_ref().map_or_else(|| fused.into(), ToString::to_string)
    }

    /// Everything that was measured, at its largest size.
    pub(crate) fn measured(&self) -> Vec<(&str, &Point)> {
        let of = |label| self.points.iter().rev().find(|p| p.label == label && p.forward.is_some());
        self.labels().into_iter().filter_map(|label| Some((label, of(label)?))).collect()
    }

    /// A table as text: a row per name and label, a column per number of tokens.
    fn rows(&self, title: &str, rows: &[(String, &str)], cell: impl Fn(&str, usize) -> Option<String>) -> String {
        let sizes = self.sizes();
        let numbers = sizes.iter().map(|n| (Right, n.to_string()));
        let mut table = Columns::new(std::iter::once((Left, "tokens".to_owned())).chain(numbers));
        for (name, label) in rows {
            let cells = sizes.iter().map(|&n| cell(label, n).unwrap_or("–".into()));
            table.row(std::iter::once(name.clone()).chain(cells));
        }
        format!("\n{title}\n{table}")
    }
}

/// A time in milliseconds with three digits.
pub(crate) fn milliseconds(seconds: f64) -> String {
    three_digits(seconds * 1e3)
}

/// A positive number with three digits, and no more than four after the point.
pub(crate) fn three_digits(x: f64) -> String {
    let digits = (2.0 - x.log10().floor()).clamp(0.0, 4.0) as usize;
    format!("{x:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_of_older_results_are_read_and_names_stay() {
        let old = r#"{"strategy": "fused", "reason": "why", "forward_bytes": 1, "training_bytes": 2}"#;
        let plan: PlanSummary = serde_json::from_str(old).unwrap();
        assert_eq!((plan.strategy, plan.arithmetic().as_str()), (Carried::Fused, "precision not told"));
        let told = r#"{"strategy": "reference", "reason": "why", "precision": "bf16", "instructions": "amx-bf16", "precision_reason": null,
            "tile": [1, 2], "forward_bytes": 1, "training_bytes": 2}"#;
        let plan: PlanSummary = serde_json::from_str(told).unwrap();
        assert_eq!(plan.arithmetic(), "bf16 precision by amx-bf16");
        let told: serde_json::Value = serde_json::from_str(told).unwrap();
        assert_eq!(serde_json::to_value(plan).unwrap(), told);
    }

    #[test]
    fn milliseconds_have_three_digits() {
        assert_eq!([0.1234, 0.0012345, 2.0].map(milliseconds), ["123", "1.23", "2000"]);
    }
}
