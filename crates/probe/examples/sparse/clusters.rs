//! "Spectral Sparse Attention", table 6: how close outputs come to dense attention's, by estimator.

use super::heads::{ClusterKind, Clusters, Head};
use resolvent_kernels::{Mechanism, Result};

use super::{attend, entries, mean, mean_cosine, plan, ssa};

const TOKENS: usize = 1024;
const SEEDS: u64 = 20;

/// Cosines by estimator at equal density (`tokens^1.5` sampled edges in all), over the number of clusters, then over data: mean
/// and standard deviation over the draws.
pub fn table() -> Result<()> {
    println!("| data | clusters | density | no edges beyond | `raw` | `importance` | `row` | `centroid` |");
    println!("|---|---|---|---|---|---|---|---|");
    let heads = |kind, dim| {
        let head = |seed| Clusters { seed, tokens: TOKENS, dim, kind }.generate();
        (0..SEEDS).map(head).collect::<Result<Vec<Head>>>()
    };
    let near = heads(ClusterKind::Near, 32)?;
    for clusters in [2, 4, 8, 16, 32] {
        row("near, d = 32", &near, clusters, "")?;
    }
    row("near, 2 routes", &near, 32, r#", "routes": 2"#)?;
    row("near, 32 free keys", &near, 32, r#", "outlier_globals": 32"#)?;
    row("near, keys clustered", &near, 32, r#", "cluster_on": "keys""#)?;
    let mut planted = heads(ClusterKind::Planted, 32)?;
    row("planted, d = 32", &planted, 32, "")?;
    // Tokens of one cluster have like values, as they would in a layer: 32 centres, over and over, and what each token had.
    for (head, centres) in planted.iter_mut().zip(heads(ClusterKind::Independent, 32)?) {
        head.v.iter_mut().zip(centres.q[..32 * 32].iter().cycle()).for_each(|(v, centre)| *v += centre);
    }
    row("planted, values too", &planted, 32, "")?;
    for (name, kind, dim, fields) in [
        ("independent, d = 64", ClusterKind::Independent, 64, ""),
        ("projected, d = 64", ClusterKind::Projected, 64, ""),
        ("projected, keys clustered", ClusterKind::Projected, 64, r#", "cluster_on": "keys""#),
        ("projected, `dual`", ClusterKind::Projected, 64, r#", "cluster_on": "dual""#),
        ("projected, `dual`, 4 routes", ClusterKind::Projected, 64, r#", "cluster_on": "dual", "routes": 4"#),
    ] {
        row(name, &heads(kind, dim)?, 32, fields)?;
    }
    Ok(())
}

fn row(name: &str, heads: &[Head], clusters: usize, fields: &str) -> Result<()> {
    let dim = heads[0].dim;
    let edges = (TOKENS as f64).powf(1.5);
    let samples = (edges / (clusters * (clusters - 1)) as f64).round();
    let per_row = (edges / TOKENS as f64).round();
    let with = |more: String| ssa(&format!(r#""clusters": {clusters}{fields}, {more}"#));
    let estimators = [
        with(r#""samples": 0"#.into())?,
        with(format!(r#""estimator": "raw", "samples": {samples}"#))?,
        with(format!(r#""samples": {samples}"#))?,
        with(format!(r#""sampler": "row", "samples": {per_row}"#))?,
        with(r#""estimator": "centroid""#.into())?,
    ];
    let softmax = Mechanism::preset("softmax")?;
    let dense: Vec<Vec<f32>> = heads.iter().map(|head| attend(&softmax, head)).collect::<Result<_>>()?;
    let cosine = |m: &Mechanism| -> Result<String> {
        let of_heads = heads.iter().zip(&dense).map(|(head, dense)| Ok(mean_cosine(&attend(m, head)?, dense, dim)));
        let cosines = of_heads.collect::<Result<Vec<_>>>()?;
        let mean = mean(&cosines);
        let squares: f64 = cosines.iter().map(|cosine| (cosine - mean).powi(2)).sum();
        Ok(format!("{mean:.3} ± {:.3}", (squares / (cosines.len() - 1) as f64).sqrt()))
    };
    let cosines = estimators.iter().map(cosine).collect::<Result<Vec<_>>>()?;
    let [exact, sampled, _] = entries(&plan(&estimators[1], &heads[0])?, &heads[0].shape());
    let density = (exact + sampled) as f64 / (TOKENS * TOKENS) as f64;
    println!("| {name} | {clusters} | {density:.2} | {} |", cosines.join(" | "));
    Ok(())
}
