//! The tables on centralities and token weights in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release --example infsa -- [centrality] [alignment] [--seed N]`
//!
//! "Infinite Self-Attention", Fig. 3's worked example and Table 5 on drawn queries.

mod draws;

use draws::normal;
use resolvent_graph::{Dense, PerronReport, Result, Solver, katz, markov};
use resolvent_kernels::mechanism::LinearInfsa;

fn main() -> Result<()> {
    draws::print(&[("centrality", centrality), ("alignment", alignment)])
}

/// Fig. 3's story in five tokens: two point at token 0, which points on to 4 by way of 3; 4 looks at itself.
fn centrality(_: u64) -> Result<()> {
    let edges = [(1, 0, 1.0), (2, 0, 1.0), (0, 3, 1.0), (3, 4, 1.0), (4, 4, 0.9)];
    let graph = Dense::from_edges(5, &edges);
    let affinity = graph.clone().scaled(1.0 / graph.frobenius());
    let m = affinity.clone().scaled(0.7);
    let (hops, absorbed) = (katz(&m, &Solver::default())?, markov(&m)?.absorption);
    println!("| token | one hop in | all hops in | all hops out | absorption |\n|---|---|---|---|---|");
    for token in 0..5 {
        let column: f64 = affinity.rows().map(|row| row[token]).sum();
        let (received, sent) = (hops.c_in[token], hops.c_out[token]);
        println!("| {token} | {column:.4} | {received:.4} | {sent:.4} | {:.4} |", absorbed[token]);
    }
    Ok(())
}

/// Table 5: cosine and rank correlation with the Perron vector of `relu(Q Q^T)`, of the weights and of two baselines,
/// of one draw of 197 tokens.
fn alignment(seed: u64) -> Result<()> {
    const TOKENS: usize = 197;
    const DIM: usize = 12;
    println!("| queries | vector | cosine | rank |\n|---|---|---|---|");
    for (name, shift) in [("normal", 0.0), ("common mean 0.2", 0.2), ("common mean 0.4", 0.4), ("common mean 0.5", 0.5)]
    {
        let q: Vec<f32> = normal(TOKENS * DIM, 0, seed).into_iter().map(|x| x as f32 + shift).collect();
        let found = PerronReport::new(&LinearInfsa::default(), TOKENS, &q, None)?;
        for (vector, how) in [("weights", found.weights), ("equal weights", found.uniform), ("norms", found.energies)] {
            let rank = how.spearman.map_or("-".into(), |rank| format!("{rank:.4}"));
            println!("| {name} | {vector} | {:.4} | {rank} |", how.cosine);
        }
    }
    Ok(())
}
