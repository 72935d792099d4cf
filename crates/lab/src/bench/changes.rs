//! What changed from one benchmark to another.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{BenchReport, PASSES, Point, milliseconds};

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
