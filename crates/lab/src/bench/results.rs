//! What a benchmark found.

use std::fmt::{self, Write};

use resolvent_kernels::{Mechanism, Plan, Shape, Tol};
use serde::{Deserialize, Serialize};

use super::Ceilings;
use crate::environment::Environment;

/// The result of a benchmark, as in its `bench.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// Sequences of one call.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Runs of every point.
    pub rounds: usize,
    /// What the machine can do at best.
    pub ceilings: Ceilings,
    /// Each mechanism against the reference; one that failed has no points.
    pub checks: Vec<Check>,
    /// What was measured, and what was left out and why.
    pub points: Vec<Point>,
    /// The machine.
    pub environment: Environment,
    /// Commands that repeat it.
    pub commands: Vec<String>,
}

/// One mechanism against the f64 reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Its id.
    pub label: String,
    /// Tokens compared.
    pub tokens: usize,
    /// Relative distance of the output.
    pub forward: f64,
    /// The largest relative distance of a gradient.
    pub backward: f64,
    /// Whether both are within tolerance.
    pub passed: bool,
    /// Why there was nothing to compare.
    pub refused: Option<String>,
}

impl Check {
    pub(super) fn new(mechanism: &Mechanism, tokens: usize, forward: f64, backward: f64, tol: Tol) -> Self {
        let passed = forward <= tol.forward && backward <= tol.backward;
        Self { label: mechanism.id().into(), tokens, forward, backward, passed, refused: None }
    }

    pub(super) fn refused(mechanism: &Mechanism, why: String) -> Self {
        Self { refused: Some(why), ..Self::new(mechanism, 0, f64::NAN, f64::NAN, Tol::f32(mechanism)) }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { label, tokens, forward, backward, passed, refused } = self;
        match refused {
            Some(why) => write!(f, "{label}: not compared with the reference: {why}"),
            None => {
                let verdict = if *passed { "agrees with" } else { "DIFFERS from" };
                write!(
                    f,
                    "{label}: {verdict} the reference on {tokens} tokens (output {forward:.0e}, gradients {backward:.0e})"
                )
            }
        }
    }
}

/// What the kernels planned for a point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanSummary {
    /// What `auto` became.
    pub strategy: String,
    /// Why.
    pub reason: String,
    /// Bytes of scratch and statistics of the forward pass.
    pub forward_bytes: u64,
    /// Those of forward and backward pass.
    pub training_bytes: u64,
}

impl PlanSummary {
    pub(super) fn of(plan: &Plan) -> Self {
        let bytes = |scratch: usize| 4 * (scratch + plan.stats) as u64;
        let strategy = serde_json::to_value(plan.strategy).ok().and_then(|s| s.as_str().map(Into::into));
        Self {
            strategy: strategy.unwrap_or_default(),
            reason: plan.reason.into(),
            forward_bytes: bytes(plan.scratch_forward),
            training_bytes: bytes(plan.scratch_forward.max(plan.scratch_backward)),
        }
    }
}

/// One mechanism at one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Its id, or the rival's name.
    pub label: String,
    /// The mechanism with its parameters; absent for a rival.
    pub mechanism: Option<Mechanism>,
    /// Sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// What the kernels planned.
    pub plan: Option<PlanSummary>,
    /// Floating-point operations of the forward and of the backward pass.
    pub flops: [u64; 2],
    /// The forward pass.
    pub forward: Option<Timing>,
    /// The forward and backward pass together.
    pub training: Option<Timing>,
    /// Why it was not measured.
    pub skipped: Option<String>,
}

impl Point {
    pub(super) fn new(label: &str, mechanism: Option<Mechanism>, shape: Shape) -> Self {
        let Shape { batch, heads, seq_q: tokens, head_dim, .. } = shape;
        let label = label.into();
        let (plan, flops, forward, training, skipped) = (None, [0; 2], None, None, None);
        Self { label, mechanism, batch, heads, tokens, head_dim, plan, flops, forward, training, skipped }
    }

    pub(super) fn shape(&self) -> Shape {
        Shape::square(self.batch, self.heads, self.tokens, self.head_dim)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |timing: &Option<Timing>| timing.as_ref().map_or("–".into(), |t| milliseconds(t.median));
        write!(f, "{} at {} tokens: ", self.label, self.tokens)?;
        match &self.skipped {
            Some(why) => f.write_str(why),
            None => write!(f, "forward {} ms, with backward {} ms", time(&self.forward), time(&self.training)),
        }
    }
}

/// Seconds of some runs, and what they mean.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds: the median run.
    pub median: f64,
    /// Seconds: a quarter of the runs were faster.
    pub low: f64,
    /// Seconds: a quarter of the runs were slower.
    pub high: f64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Planned operations over the median, in GFLOP/s.
    pub gflops: f64,
    /// That, over the rate of a plain matrix product.
    pub gemm_share: f64,
    /// Planned bytes over the median, over the rate of a copy; 0 where unknown.
    pub copy_share: f64,
    /// Most bytes held beyond the call's tensors; absent without a counter.
    pub peak_bytes: Option<u64>,
}

impl Timing {
    pub(super) fn of(
        seconds: &mut [f64],
        tokens: usize,
        flops: u64,
        bytes: u64,
        peak_bytes: Option<u64>,
        ceilings: &Ceilings,
    ) -> Self {
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share).round() as usize];
        let median = at(0.5);
        let gflops = flops as f64 / median / 1e9;
        Self {
            median,
            low: at(0.25),
            high: at(0.75),
            tokens_per_second: tokens as f64 / median,
            gflops,
            gemm_share: gflops / ceilings.gemm_gflops,
            copy_share: bytes as f64 / median / 1e9 / ceilings.copy_gbs,
            peak_bytes,
        }
    }

    /// The middle half of the runs over the median.
    fn noise(&self) -> f64 {
        (self.high - self.low) / self.median
    }
}

/// From how many tokens on a mechanism is faster than softmax.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Crossover {
    /// The mechanism's id.
    pub label: String,
    /// Tokens, forward, by interpolation between the sizes; `None` where it never stays faster.
    pub forward: Option<f64>,
    /// Tokens, forward and backward.
    pub training: Option<f64>,
}

type Pass = fn(&Point) -> Option<&Timing>;

/// Both passes, by name.
pub(crate) const PASSES: [(&str, Pass); 2] =
    [("forward", |p| p.forward.as_ref()), ("forward + backward", |p| p.training.as_ref())];

impl BenchReport {
    /// Whether every mechanism agreed with the reference.
    pub fn sound(&self) -> bool {
        self.checks.iter().all(|check| check.passed || check.refused.is_some())
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
        let timed = |tokens: usize| Some((tokens as f64, pass(self.point(label, tokens)?)?.median));
        self.sizes().into_iter().filter_map(timed).collect()
    }

    /// Where each mechanism overtakes softmax for good.
    pub fn crossovers(&self) -> Vec<Crossover> {
        let others = self.labels().into_iter().filter(|&label| label != "softmax");
        let of = |label: &str, pass| crossover(&self.curve("softmax", pass), &self.curve(label, pass));
        others
            .map(|label| Crossover {
                label: label.into(),
                forward: of(label, PASSES[0].1),
                training: of(label, PASSES[1].1),
            })
            .collect()
    }

    /// Milliseconds of every point as text, one table per pass.
    pub fn table(&self) -> String {
        let (labels, sizes) = (self.labels(), self.sizes());
        let width = labels.iter().map(|label| label.len()).max().unwrap_or(0);
        let mut text = format!("{}\n", self.ceilings);
        for (name, pass) in PASSES {
            let _ = write!(text, "\n{name}, ms\n{:width$}", "tokens");
            for n in &sizes {
                let _ = write!(text, " {n:>9}");
            }
            for label in &labels {
                let _ = write!(text, "\n{label:width$}");
                for &n in &sizes {
                    let time = self.point(label, n).and_then(pass).map_or("–".into(), |t| milliseconds(t.median));
                    let _ = write!(text, " {time:>9}");
                }
            }
            text.push('\n');
        }
        text
    }
}

/// Where `other` falls below `base` and stays there, both in ascending tokens, between sizes in log-log coordinates.
fn crossover(base: &[(f64, f64)], other: &[(f64, f64)]) -> Option<f64> {
    let at = |n: f64| base.iter().find(|p| p.0 == n).map(|p| p.1);
    let ratios: Vec<_> = other.iter().filter_map(|&(n, t)| Some((n.ln(), (t / at(n)?).ln()))).collect();
    let last_slower = ratios.iter().rposition(|r| r.1 >= 0.0);
    match last_slower {
        None => ratios.first().map(|r| r.0.exp()),
        Some(i) => {
            let (a, b) = (ratios[i], *ratios.get(i + 1)?);
            Some((a.0 + (b.0 - a.0) * a.1 / (a.1 - b.1)).exp())
        }
    }
}

/// A time in milliseconds with three digits.
pub(crate) fn milliseconds(seconds: f64) -> String {
    let ms = seconds * 1e3;
    let digits = (2.0 - ms.log10().floor()).clamp(0.0, 4.0) as usize;
    format!("{ms:.digits$}")
}

/// A point that two benchmarks have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// What it is.
    pub label: String,
    /// Tokens.
    pub tokens: usize,
    /// Which pass.
    pub pass: String,
    /// Seconds before.
    pub before: f64,
    /// Seconds after.
    pub after: f64,
    /// How far either's middle half of runs spreads over its median.
    pub noise: f64,
    /// Whether the change is larger than the noise of both.
    pub significant: bool,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { label, tokens, pass, before, after, noise, significant } = self;
        let percent = 100.0 * (after / before - 1.0);
        let verdict = match (significant, percent < 0.0) {
            (false, _) => "within the noise",
            (true, true) => "faster",
            (true, false) => "SLOWER",
        };
        let (before, after) = (milliseconds(*before), milliseconds(*after));
        let noise = noise * 100.0;
        write!(
            f,
            "{label} at {tokens} tokens, {pass}: {before} -> {after} ms, {percent:+.1} % (noise {noise:.1} %): {verdict}"
        )
    }
}

/// The points of two benchmarks that are of the same mechanism and size, and how they differ.
pub fn changes(before: &BenchReport, after: &BenchReport) -> Vec<Change> {
    let same = |a: &Point, b: &Point| {
        let key = |p: &Point| (p.label.clone(), p.mechanism.clone(), p.batch, p.heads, p.tokens, p.head_dim);
        key(a) == key(b)
    };
    let mut changes = Vec::new();
    for new in &after.points {
        let Some(old) = before.points.iter().find(|old| same(old, new)) else { continue };
        for (name, pass) in PASSES {
            let (Some(a), Some(b)) = (pass(old), pass(new)) else { continue };
            let noise = a.noise().max(b.noise());
            let significant = (b.median / a.median - 1.0).abs() > noise.max(0.02);
            let (label, tokens, pass) = (new.label.clone(), new.tokens, name.into());
            changes.push(Change { label, tokens, pass, before: a.median, after: b.median, noise, significant });
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crossover_is_where_a_curve_stays_below() {
        let base = [(512.0, 1.0), (1024.0, 4.0), (2048.0, 16.0)];
        let linear = [(512.0, 2.0), (1024.0, 4.0), (2048.0, 8.0)];
        assert!((crossover(&base, &linear).unwrap() - 1024.0).abs() < 1e-6);
        assert_eq!(crossover(&base, &base.map(|(n, t)| (n, t / 2.0))), Some(512.0_f64.ln().exp()));
        assert_eq!(crossover(&base, &base.map(|(n, t)| (n, t * 2.0))), None);
        assert_eq!(crossover(&base, &[]), None);
    }

    #[test]
    fn milliseconds_have_three_digits() {
        assert_eq!([0.1234, 0.0012345, 2.0].map(milliseconds), ["123", "1.23", "2000"]);
    }
}
