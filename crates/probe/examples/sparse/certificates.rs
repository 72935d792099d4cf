//! The certificates of plans beside what they bound.

use super::heads::{ClusterKind, Clusters, Head};
use resolvent_kernels::{Extras, Inputs, Mask, Mechanism, Result, reference};

use super::{inputs, mean, plan, ssa};

const TOKENS: usize = 512;

/// Means over the rows: bound, and what it bounds.
pub fn table(seed: u64) -> Result<()> {
    println!("| data | plan | total variation | bound | error of the output | bound of the error |");
    println!("|---|---|---|---|---|---|");
    for (kind, dim) in
        [(ClusterKind::Planted, 32), (ClusterKind::Near, 32), (ClusterKind::Near, 8), (ClusterKind::Independent, 64)]
    {
        let head = Clusters { seed, tokens: TOKENS, dim, kind }.generate()?;
        for (name, fields) in [
            ("`centroid`", r#""estimator": "centroid""#),
            ("`centroid`, 4 routes", r#""estimator": "centroid", "routes": 4"#),
            ("`importance`", ""),
        ] {
            row(&format!("{kind}, d = {dim}"), name, &head, &ssa(fields)?)?;
        }
    }
    Ok(())
}

fn row(data: &str, name: &str, head: &Head, mechanism: &Mechanism) -> Result<()> {
    let (shape, plan) = (head.shape(), plan(mechanism, head)?);
    let bounds = plan.certificate(mechanism, &shape, &inputs(head), &Mask::NONE)?;
    let [q, k, v] = [&head.q, &head.k, &head.v].map(|x| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    let wide = Inputs { q: &q, k: Some(&k), v: &v, extras: Extras::default() };
    let dense = reference::forward(&Mechanism::preset("softmax")?, &shape, &wide, &Mask::NONE)?;
    let along = Inputs { extras: Extras::default().with_clusters(&plan), ..wide };
    let sparse = reference::forward(mechanism, &shape, &along, &Mask::NONE)?;
    let rows = |x: &[f64], y: &[f64], width: usize, of: fn(f64) -> f64| -> Vec<f64> {
        let differences = |(x, y): (&[f64], &[f64])| x.iter().zip(y).map(|(x, y)| of(x - y)).sum();
        x.chunks_exact(width).zip(y.chunks_exact(width)).map(differences).collect()
    };
    let variation = rows(dense.weights(), sparse.weights(), head.tokens, |x| 0.5 * x.abs());
    let error: Vec<f64> = rows(&dense.out, &sparse.out, head.dim, |x| x * x).iter().map(|x| x.sqrt()).collect();
    println!(
        "| {data} | {name} | {:.3} | {:.3} | {:.3} | {:.3} |",
        mean(&variation),
        mean(&bounds.total_variation),
        mean(&error),
        mean(&bounds.output_error)
    );
    Ok(())
}
