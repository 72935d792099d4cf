//! What changed from one benchmark to another.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{BenchReport, Pass, Point, milliseconds};

/// A point that two benchmarks have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// What it is.
    pub label: String,
    /// Tokens.
    pub tokens: usize,
    /// Which pass.
    pub pass: Pass,
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

/// Turns from which on their spread tells something.
const TELLING: usize = 3;

/// What, beside the code, may have changed the times of two benchmarks, and what only one of them has.
pub fn differences(before: &BenchReport, after: &BenchReport) -> Vec<String> {
    let mut notes = Vec::new();
    let environments = before.environment.rows().into_iter().zip(after.environment.rows());
    let code = ["Resolvent", "Commit"];
    for ((name, old), (_, new)) in environments.filter(|((name, old), (_, new))| old != new && !code.contains(name)) {
        notes.push(format!("{name}: {old} before, {new} after"));
    }
    let rate = after.ceilings.gemm_gflops / before.ceilings.gemm_gflops;
    if !(0.95..=1.05).contains(&rate) {
        notes.push(format!("the machine's matrix product is {rate:.2} times as fast as before"));
    }
    if before.rounds.min(after.rounds) < TELLING {
        notes.push(format!("fewer than {TELLING} turns: their noise is not known, and no change stands out"));
    }
    if before.arrangement != after.arrangement {
        notes.push("the calls differ in --kv-heads, --layout or --sequences: none is compared".into());
    }
    for (has, lacks, name) in [(before, after, "before"), (after, before, "after")] {
        let timed = has.points.iter().filter(|p| p.forward.is_some());
        let alike = |p: &Point| find(lacks, has, p).is_some_and(|other| other.forward.is_some());
        let alone = timed.filter(|p| !alike(p));
        notes.extend(
            alone.map(|p| format!("{} at {} tokens is only in the one {name}, as configured there", p.label, p.tokens)),
        );
    }
    notes
}

/// Whether two points measure the same call, a rival's standing for the mechanism as it was configured.
fn same(a: &Point, b: &Point) -> bool {
    let key = |p: &Point| (p.batch, p.heads, p.tokens, p.head_dim);
    // Older results do not tell in which precision products were taken.
    let precision = |p: &Point| p.plan.as_ref().and_then(|plan| plan.precision);
    let as_precise = precision(a).zip(precision(b)).is_none_or(|(a, b)| a == b);
    // A rival has no configuration of its own: its arithmetic tells. That of ours is counted, and versions may count otherwise.
    a.label == b.label
        && a.mechanism == b.mechanism
        && key(a) == key(b)
        && as_precise
        && (a.mechanism.is_some() || a.flops == b.flops)
}

/// The point of one benchmark that measures the same call as one of another.
fn find<'a>(among: &'a BenchReport, of: &BenchReport, point: &Point) -> Option<&'a Point> {
    among.points.iter().filter(|_| among.arrangement == of.arrangement).find(|other| same(point, other))
}

/// The points of two benchmarks that are of the same mechanism and size, and how they differ.
pub fn changes(before: &BenchReport, after: &BenchReport) -> Vec<Change> {
    let telling = before.rounds.min(after.rounds) >= TELLING;
    let mut changes = Vec::new();
    for new in &after.points {
        let Some(old) = find(before, after, new) else { continue };
        for &pass in Pass::ALL {
            let (Some(a), Some(b)) = (pass.of(old), pass.of(new)) else { continue };
            let noise = a.noise().max(b.noise());
            let significant = telling && (b.median / a.median - 1.0).abs() > noise.max(0.02);
            let (label, tokens) = (new.label.clone(), new.tokens);
            changes.push(Change { label, tokens, pass, before: a.median, after: b.median, noise, significant });
        }
    }
    changes
}
