//! "Spectral Sparse Attention", table 3: which mechanisms find a needle.

use resolvent_kernels::{Mechanism, Result};
use resolvent_lab::data::heads::{Needle, NeedleHead, NeedleKind};

use super::{attend, drawn, mean, ssa};

const TOKENS: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16384];
const SEEDS: u64 = 5;
/// Keys of the baseline that sees the last ones only.
const LOCAL: usize = 256;

/// The mean over the seeds of the cosine between the last row and the needle's value, and the least of them.
pub fn table() -> Result<()> {
    let configurations = [
        ("`importance`", ""),
        ("`centroid`", r#""estimator": "centroid""#),
        ("`centroid`, `outlier_globals: 8`", r#""estimator": "centroid", "outlier_globals": 8"#),
        ("`centroid`, `outlier_queries: 8`", r#""estimator": "centroid", "outlier_queries": 8"#),
    ];
    println!("| needle | mechanism | {} |", TOKENS.map(|n| n.to_string()).join(" | "));
    println!("|---|---|{}", "---|".repeat(TOKENS.len()));
    for kind in [NeedleKind::Tied, NeedleKind::Key, NeedleKind::Query] {
        row(kind, "softmax", |head| Ok(last_row(head, 0)))?;
        row(kind, "the last 256 keys", |head| Ok(last_row(head, head.head.tokens.saturating_sub(LOCAL))))?;
        for (name, fields) in configurations {
            let mechanism = ssa(fields)?;
            row(kind, name, |head| found(&mechanism, head))?;
        }
    }
    Ok(())
}

fn row(kind: NeedleKind, name: &str, cosine: impl Fn(&NeedleHead) -> Result<f64>) -> Result<()> {
    let cell = |tokens: usize| {
        let cosines = (0..SEEDS)
            .map(|seed| cosine(&drawn(Needle { seed, tokens, kind }.generate())?))
            .collect::<Result<Vec<_>>>()?;
        let least = cosines.iter().copied().fold(f64::INFINITY, f64::min);
        Ok(format!("{:.3} ({least:.3})", mean(&cosines)))
    };
    let cells = TOKENS.into_iter().map(cell).collect::<Result<Vec<_>>>()?;
    println!("| {kind} | {name} | {} |", cells.join(" | "));
    Ok(())
}

fn found(mechanism: &Mechanism, head: &NeedleHead) -> Result<f64> {
    let out = attend(mechanism, &head.head)?;
    Ok(head.cosine(&out[out.len() - head.head.dim..]))
}

/// The cosine that softmax over the keys from `first` on finds for the last query.
fn last_row(needle: &NeedleHead, first: usize) -> f64 {
    let head = &needle.head;
    let (n, d) = (head.tokens, head.dim);
    let q = &head.q[(n - 1) * d..];
    let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(q * k)).sum::<f64>() / (d as f64).sqrt();
    let logits: Vec<f64> = head.k.chunks_exact(d).skip(first).map(dot).collect();
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0.0_f64; d];
    for (z, v) in logits.iter().zip(head.v.chunks_exact(d).skip(first)) {
        out.iter_mut().zip(v).for_each(|(out, &v)| *out += (z - most).exp() * f64::from(v));
    }
    needle.cosine(&out.iter().map(|&x| x as f32).collect::<Vec<_>>())
}
