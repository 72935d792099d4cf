//! Ten leading eigenpairs of graphs whose matrix is never stored.
//!
//! `cargo bench --bench lanczos -- [TOKENS] [MECHANISM]`

use std::time::Instant;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_graph::{Lanczos, StreamedReversible};
use resolvent_kernels::{
    Mechanism,
    mechanism::{Fna, Kappa, Softmax, Ssa},
};

const HEAD_DIM: usize = 64;
/// Tokens are drawn around this many centres.
const CENTRES: usize = 12;

fn tokens(n: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let centres: Vec<f32> = (0..CENTRES * HEAD_DIM).map(|_| rng.random_range(-1.0..1.0)).collect();
    let at = |i: usize| centres[i / HEAD_DIM % CENTRES * HEAD_DIM + i % HEAD_DIM];
    (0..n * HEAD_DIM).map(|i| at(i) + 0.5 * rng.random_range(-1.0..1.0)).collect()
}

fn main() {
    let n = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(65_536);
    let q = tokens(n);
    let tied = |mechanism: Mechanism| (mechanism.id(), None, mechanism);
    let cases = [
        tied(Mechanism::from(Softmax::default().with_tied(true))),
        tied(Mechanism::from(Fna::default().with_tied(true).with_kappa(Some(Kappa::Value(64.0))))),
        ("ssa", Some(&q[..]), Mechanism::from(Ssa::default())),
    ];
    println!("{n} tokens of {HEAD_DIM} channels, 10 pairs to a residual of 1e-6");
    let chosen = |id: &str| !std::env::args().any(|arg| ["softmax", "fna", "ssa"].contains(&arg.as_str()) && arg != id);
    for (id, k, mechanism) in cases.into_iter().filter(|(id, ..)| chosen(id)) {
        let start = Instant::now();
        let graph = StreamedReversible::new(&mechanism, n, &q, k).expect("positive weights");
        let found = Lanczos { tol: 1e-6, ..Lanczos::default() }.eigenpairs(&graph);
        let seconds = start.elapsed().as_secs_f64();
        match found {
            Ok(found) => {
                let worst = found.residuals.iter().copied().fold(0.0, f64::max);
                let values: Vec<_> = found.values.iter().map(|value| format!("{value:.6}")).collect();
                println!(
                    "{id}: {seconds:.1} s, {} products, worst residual {worst:.1e}: {}",
                    found.products,
                    values.join(" ")
                );
            }
            Err(why) => println!("{id}: {seconds:.1} s, {why}"),
        }
    }
}
