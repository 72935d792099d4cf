//! "Spectral Sparse Attention", table 5, by our own proxy: operations alone, no machine.

use super::{
    entries,
    heads::{ClusterKind, Clusters},
    plan,
    proxy::{AttentionWork, EnergyProxy, TERNARY_BITS},
    ssa,
};
use resolvent_kernels::Result;

const WIDTH: usize = 1024;
const HEADS: usize = 16;

/// One attention layer of GPT-2 Medium's shape, in mJ by the proxy: projections and attention apart.
pub fn table() -> Result<()> {
    println!(
        "| tokens | projections, 16 bits | ternary | attention, dense | `ssa`, `centroid` | all: dense over `ssa` | over ternary `ssa` |"
    );
    println!("|---|---|---|---|---|---|---|");
    let (proxy, mechanism, head_dim) = (EnergyProxy::default(), ssa(r#""estimator": "centroid""#)?, WIDTH / HEADS);
    for tokens in [256, 512, 1024, 2048, 4096] {
        let kind = ClusterKind::Independent;
        let head = Clusters { seed: 0, tokens, dim: head_dim, kind }.generate()?;
        let [exact, _, far] = entries(&plan(&mechanism, &head)?, &head.shape());
        let energy = |entries: usize, bits: f64| {
            proxy.attention(AttentionWork { tokens, width: WIDTH, entries: HEADS * entries, head_dim }, bits)
        };
        let (dense, sparse) = (energy(tokens * tokens, 16.0), energy(exact + far, TERNARY_BITS));
        let millijoule = |pj: f64| pj * 1e-9;
        println!(
            "| {tokens} | {:.2} | {:.2} | {:.2} | {:.2} | {:.1}x | {:.1}x |",
            millijoule(dense.projections),
            millijoule(sparse.projections),
            millijoule(dense.attention),
            millijoule(sparse.attention),
            (dense.projections + dense.attention) / (dense.projections + sparse.attention),
            (dense.projections + dense.attention) / (sparse.projections + sparse.attention),
        );
    }
    Ok(())
}
