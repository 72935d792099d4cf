//! What the examples of this folder share: their command line, and what they draw.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_graph::Result;

/// A table's name, and what prints it for a seed.
pub type Table = (&'static str, fn(u64) -> Result<()>);

/// Prints the tables that the command line names, all if it names none, of the draw that `--seed N` asks for (0).
pub fn print(tables: &[Table]) -> Result<()> {
    let mut chosen: Vec<String> = std::env::args().skip(1).collect();
    let mut seed = 0;
    if let Some(at) = chosen.iter().position(|word| word == "--seed") {
        seed = chosen.get(at + 1).and_then(|seed| seed.parse().ok()).expect("a number behind --seed");
        chosen.drain(at..at + 2);
    }
    for (name, table) in tables {
        if chosen.is_empty() || chosen.iter().any(|c| c == name) {
            println!("\n## {name}\n");
            table(seed)?;
        }
    }
    Ok(())
}

/// Independent standard normal numbers, by Box and Muller; `what` tells draws of one seed apart.
pub fn normal(count: usize, what: u64, seed: u64) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(what + 1000 * seed);
    let mut uniform = || rng.random_range(f64::MIN_POSITIVE..1.0);
    (0..count).map(|_| (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()).collect()
}
