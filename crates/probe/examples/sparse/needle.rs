//! "Spectral Sparse Attention", table 3: which mechanisms find a needle.

use super::heads::{Needle, NeedleHead, NeedleKind};
use resolvent_kernels::{Mechanism, Result};

use super::{attend, rivals, ssa};

const TOKENS: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16384];
/// Keys of the baseline that sees the last ones only.
const LOCAL: usize = 256;

/// The cosine between the last row and the needle's value.
pub fn table(seed: u64) -> Result<()> {
    let configurations = [
        ("`importance`", ""),
        ("`centroid`", r#""estimator": "centroid""#),
        ("`centroid`, `outlier_globals: 8`", r#""estimator": "centroid", "outlier_globals": 8"#),
        ("`centroid`, `outlier_queries: 8`", r#""estimator": "centroid", "outlier_queries": 8"#),
    ];
    println!("| needle | mechanism | {} |", TOKENS.map(|n| n.to_string()).join(" | "));
    println!("|---|---|{}", "---|".repeat(TOKENS.len()));
    for kind in [NeedleKind::Tied, NeedleKind::Key, NeedleKind::Query] {
        let heads = TOKENS.map(|tokens| Needle { seed, tokens, kind }.generate());
        let heads: Vec<NeedleHead> = heads.into_iter().collect::<Result<_>>()?;
        row(kind, "softmax", &heads, |head| Ok(last_row(head, 0..head.head.tokens)))?;
        row(kind, "the last 256 keys", &heads, |head| {
            Ok(last_row(head, head.head.tokens.saturating_sub(LOCAL)..head.head.tokens))
        })?;
        row(kind, "a tenth of the keys at random", &heads, |head| {
            Ok(last_row(head, rivals::random(&head.head, seed)))
        })?;
        row(kind, "Routing Transformer", &heads, |head| Ok(last_row(head, rivals::routing(&head.head, seed))))?;
        row(kind, "Reformer", &heads, |head| Ok(last_row(head, rivals::reformer(&head.head, seed))))?;
        for (name, fields) in configurations {
            let mechanism = ssa(fields)?;
            row(kind, name, &heads, |head| found(&mechanism, head))?;
        }
    }
    Ok(())
}

fn row(kind: NeedleKind, name: &str, heads: &[NeedleHead], cosine: impl Fn(&NeedleHead) -> Result<f64>) -> Result<()> {
    let cells = heads.iter().map(|head| Ok(format!("{:.4}", cosine(head)?))).collect::<Result<Vec<_>>>()?;
    println!("| {kind} | {name} | {} |", cells.join(" | "));
    Ok(())
}

fn found(mechanism: &Mechanism, head: &NeedleHead) -> Result<f64> {
    let out = attend(mechanism, &head.head)?;
    Ok(head.cosine(&out[out.len() - head.head.dim..]))
}

/// The cosine that softmax over some keys finds for the last query.
fn last_row(needle: &NeedleHead, keys: impl IntoIterator<Item = usize>) -> f64 {
    let head = &needle.head;
    let (n, d) = (head.tokens, head.dim);
    let q = &head.q[(n - 1) * d..];
    let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(q * k)).sum::<f64>() / (d as f64).sqrt();
    let logits: Vec<(usize, f64)> = keys.into_iter().map(|j| (j, dot(&head.k[j * d..][..d]))).collect();
    let most = logits.iter().fold(f64::NEG_INFINITY, |most, (_, z)| most.max(*z));
    let mut out = vec![0.0_f64; d];
    for (j, z) in logits {
        out.iter_mut().zip(&head.v[j * d..]).for_each(|(out, &v)| *out += (z - most).exp() * f64::from(v));
    }
    needle.cosine(&out.iter().map(|&x| x as f32).collect::<Vec<_>>())
}
