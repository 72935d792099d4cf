//! The tables on centralities and token weights in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release -p resolvent-graph --example infsa -- [centrality] [alignment]`
//!
//! "Infinite Self-Attention", Fig. 3's worked example and Table 5 on drawn queries.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_graph::{Dense, PerronReport, Result, Solver, katz, markov};
use resolvent_kernels::mechanism::LinearInfsa;

/// A table's name, and what prints it.
type Table = (&'static str, fn() -> Result<()>);

fn main() -> Result<()> {
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    let tables: [Table; 2] = [("centrality", centrality), ("alignment", alignment)];
    for (name, table) in tables {
        if chosen.is_empty() || chosen.iter().any(|c| c == name) {
            println!("\n## {name}\n");
            table()?;
        }
    }
    Ok(())
}

/// Fig. 3's story in five tokens: two point at token 0, which points on to 4 by way of 3; 4 looks at itself.
fn centrality() -> Result<()> {
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

/// Table 5: cosine and rank correlation with the Perron vector of `relu(Q Q^T)`, of the weights and of two baselines.
fn alignment() -> Result<()> {
    const TOKENS: usize = 197;
    const DIM: usize = 12;
    println!("| queries | weights: cosine | rank | equal weights: cosine | energies: cosine | rank |");
    println!("|---|---|---|---|---|---|");
    for (name, shift) in [("normal", 0.0), ("with a common mean, 0.2 of their norm", 0.2), ("0.4", 0.4), ("0.5", 0.5)] {
        let mut sums = [0.0; 5];
        const DRAWS: usize = 16;
        for draw in 0..DRAWS {
            let q: Vec<f32> = normal(TOKENS * DIM, draw as u64).into_iter().map(|x| x + shift).collect();
            let found = PerronReport::new(&LinearInfsa::default(), TOKENS, &q, None)?;
            let numbers = [
                found.weights.cosine,
                found.weights.spearman.unwrap_or(f64::NAN),
                found.uniform.cosine,
                found.energies.cosine,
                found.energies.spearman.unwrap_or(f64::NAN),
            ];
            sums.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += x / DRAWS as f64);
        }
        let cells = sums.map(|mean| format!("{mean:.3}"));
        println!("| {name} | {} |", cells.join(" | "));
    }
    Ok(())
}

/// Standard normal numbers, by Box and Muller.
fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = || {
        let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()) as f32
    };
    (0..count).map(|_| draw()).collect()
}
