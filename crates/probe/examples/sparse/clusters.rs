//! "Spectral Sparse Attention", table 6: how close outputs come to dense attention's, by estimator.

use super::heads::{ClusterKind, Clusters, Head};
use resolvent_kernels::{Mechanism, Result};

use super::{attend, density, mean_cosine, ssa};

const TOKENS: usize = 1024;

/// Cosines by estimator, where those that sample draw `tokens^1.5` edges in all, over the number of clusters, then over data;
/// and the share of the pairs that each looks at, a cluster's mean as one.
pub fn table(seed: u64) -> Result<()> {
    println!("| data | clusters | estimator | density | cosine |");
    println!("|---|---|---|---|---|");
    let head = |kind, dim| Clusters { seed, tokens: TOKENS, dim, kind }.generate();
    let near = head(ClusterKind::Near, 32)?;
    for clusters in [2, 4, 8, 16, 32] {
        rows("near, d = 32", &near, clusters, "")?;
    }
    rows("near, 2 routes", &near, 32, r#", "routes": 2"#)?;
    rows("near, 32 free keys", &near, 32, r#", "outlier_globals": 32"#)?;
    rows("near, keys clustered", &near, 32, r#", "cluster_on": "keys""#)?;
    let mut planted = head(ClusterKind::Planted, 32)?;
    rows("planted, d = 32", &planted, 32, "")?;
    // Tokens of one cluster have like values, as they would in a layer: 32 centres, over and over, and what each token had.
    let centres = head(ClusterKind::Independent, 32)?;
    planted.v.iter_mut().zip(centres.q[..32 * 32].iter().cycle()).for_each(|(v, centre)| *v += centre);
    rows("planted, values too", &planted, 32, "")?;
    for (name, kind, fields) in [
        ("independent, d = 64", ClusterKind::Independent, ""),
        ("projected, d = 64", ClusterKind::Projected, ""),
        ("projected, keys clustered", ClusterKind::Projected, r#", "cluster_on": "keys""#),
        ("projected, `dual`", ClusterKind::Projected, r#", "cluster_on": "dual""#),
        ("projected, `dual`, 4 routes", ClusterKind::Projected, r#", "cluster_on": "dual", "routes": 4"#),
    ] {
        rows(name, &head(kind, 64)?, 32, fields)?;
    }
    Ok(())
}

fn rows(name: &str, head: &Head, clusters: usize, fields: &str) -> Result<()> {
    let edges = (TOKENS as f64).powf(1.5);
    let samples = (edges / (clusters * (clusters - 1)) as f64).round();
    let per_row = (edges / TOKENS as f64).round();
    let dense = attend(&Mechanism::preset("softmax")?, head)?;
    for (estimator, more) in [
        ("no edges beyond", r#""samples": 0"#.to_owned()),
        ("`raw`", format!(r#""estimator": "raw", "samples": {samples}"#)),
        ("`importance`", format!(r#""samples": {samples}"#)),
        ("`row`", format!(r#""sampler": "row", "samples": {per_row}"#)),
        ("`centroid`", r#""estimator": "centroid""#.to_owned()),
    ] {
        let mechanism = ssa(&format!(r#""clusters": {clusters}{fields}, {more}"#))?;
        let cosine = mean_cosine(&attend(&mechanism, head)?, &dense, head.dim);
        let density = density(&mechanism, head, estimator == "`centroid`")?;
        println!("| {name} | {clusters} | {estimator} | {density:.4} | {cosine:.4} |");
    }
    Ok(())
}
