//! "Spectral Sparse Attention": how close outputs come to dense attention's for how many pairs, by estimator.

use super::heads::{ClusterKind, Clusters};
use resolvent_kernels::{Mechanism, Result};

use super::{attend, density, mean_cosine, ssa};

const TOKENS: usize = 1024;
const CLUSTERS: usize = 32;

/// Cosines and the share of the pairs, from what each estimator spends at least to what it spends at most.
pub fn table(seed: u64) -> Result<()> {
    println!("| data | spent | estimator | density | cosine |");
    println!("|---|---|---|---|---|");
    for (name, kind, dim) in
        [("near, d = 32", ClusterKind::Near, 32), ("projected, d = 64", ClusterKind::Projected, 64)]
    {
        let head = Clusters { seed, tokens: TOKENS, dim, kind }.generate()?;
        let dense = attend(&Mechanism::preset("softmax")?, &head)?;
        for routes in [1, 2, 4, 8] {
            // As many sampled edges as pairs are exact, for a cluster that sees `routes` of the others.
            let samples = routes * TOKENS / CLUSTERS;
            for (estimator, more) in [
                ("`centroid`", r#""estimator": "centroid""#.to_owned()),
                ("no edges beyond", r#""samples": 0"#.to_owned()),
                ("`raw`", format!(r#""estimator": "raw", "samples": {samples}"#)),
                ("`importance`", format!(r#""samples": {samples}"#)),
                ("`row`", format!(r#""sampler": "row", "samples": {samples}"#)),
            ] {
                let mechanism = ssa(&format!(r#""clusters": {CLUSTERS}, "routes": {routes}, {more}"#))?;
                let cosine = mean_cosine(&attend(&mechanism, &head)?, &dense, dim);
                let density = density(&mechanism, &head, estimator == "`centroid`")?;
                println!("| {name} | {routes} | {estimator} | {density:.4} | {cosine:.4} |");
            }
        }
    }
    Ok(())
}
