//! "Spectral Sparse Attention", table 4: how many edges there are, and how their number grows.

use super::heads::{ClusterKind, Clusters};
use resolvent_kernels::Result;

use super::{entries, plan, ssa};

/// Exact pairs and sampled edges of the default configuration, beside proposition 4's `N^2 / k + k^2 s`.
pub fn table(seed: u64) -> Result<()> {
    let importance = ssa("")?;
    let centroid = ssa(r#""estimator": "centroid""#)?;
    println!("| tokens | clusters | exact | sampled | together | of all pairs | formula | `centroid` |");
    println!("|---|---|---|---|---|---|---|---|");
    let mut points = Vec::new();
    for tokens in [512, 1024, 2048, 4096, 8192] {
        let kind = ClusterKind::Independent;
        let head = Clusters { seed, tokens, dim: 64, kind }.generate()?;
        let made = plan(&importance, &head)?;
        let [exact, sampled, _] = entries(&made, &head.shape());
        let [near, _, far] = entries(&plan(&centroid, &head)?, &head.shape());
        let n = tokens as f64;
        let (k, s) = (n.sqrt().round(), n.ln().ceil());
        let (all, formula) = (exact + sampled, n * n / k + k * k * s);
        points.push((n.ln(), (all as f64).ln()));
        println!(
            "| {tokens} | {} | {exact} | {sampled} | {all} | {:.1} % | {formula:.0} | {} |",
            made.clusters(0)[0],
            100.0 * all as f64 / (n * n),
            near + far
        );
    }
    println!("\nThe log-log slope of edges over tokens is {:.2}.", slope(&points));
    Ok(())
}

/// Of the line of least squares.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let (x, y) = points.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x / count, b + y / count));
    let products = points.iter().map(|(a, b)| (a - x) * (b - y)).sum::<f64>();
    products / points.iter().map(|(a, _)| (a - x).powi(2)).sum::<f64>()
}
