//! Shortest hops beside the algorithm of Floyd and Warshall, from uniform rows to hard ones.
//!
//! `cargo bench --bench paths`

use std::{hint::black_box, time::Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_graph::{Dense, LinearOperator, row_perplexity, shortest_paths};

const TOKENS: usize = 500;
const ROUNDS: usize = 5;

/// Row-normalised `exp(sharpness * score)` of scores that are normal.
fn attention(sharpness: f64) -> Dense {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut normal = || {
        let (radius, angle): (f64, f64) = (rng.random_range(f64::EPSILON..1.0), rng.random());
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    };
    let entries = (0..TOKENS * TOKENS).map(|_| (sharpness * normal()).exp()).collect();
    let raw = Dense::new(TOKENS, entries).expect("as many entries as that");
    let sums: Vec<f64> = raw.rows().map(|row| row.iter().sum()).collect();
    Dense::from_fn(TOKENS, |i, j| raw.row(i)[j] / sums[i])
}

/// Lengths and hops between all pairs, by trying every token in between.
fn floyd_warshall(weights: &Dense) -> (Vec<f64>, Vec<f64>) {
    let n = weights.len();
    let mut length: Vec<f64> = weights.entries().iter().map(|w| 1.0 / w).collect();
    let mut hops = vec![1.0; n * n];
    (0..n).for_each(|i| (length[i * (n + 1)], hops[i * (n + 1)]) = (0.0, 0.0));
    for via in 0..n {
        let (onward, onward_hops) = (length[via * n..][..n].to_vec(), hops[via * n..][..n].to_vec());
        for (length, hops) in length.chunks_mut(n).zip(hops.chunks_mut(n)) {
            let (first, first_hops) = (length[via], hops[via]);
            let known = length.iter_mut().zip(hops).zip(onward.iter().zip(&onward_hops));
            for ((length, hops), (second, second_hops)) in known {
                let (through, count) = (first + second, first_hops + second_hops);
                let better = (through < *length) | ((through == *length) & (count < *hops));
                *length = if better { through } else { *length };
                *hops = if better { count } else { *hops };
            }
        }
    }
    (length, hops)
}

fn seconds<T>(work: impl Fn() -> T) -> f64 {
    let start = Instant::now();
    black_box(work());
    start.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    println!("{TOKENS} tokens; medians of {ROUNDS} interleaved runs");
    for sharpness in [0.1, 0.5, 1.0, 2.0, 4.0, 8.0] {
        let weights = attention(sharpness);
        let perplexity = row_perplexity(&weights).expect("positive weights").iter().sum::<f64>() / TOKENS as f64;
        let hops = shortest_paths(&weights).expect("positive weights").summary();
        let runs: Vec<_> =
            (0..ROUNDS).map(|_| (seconds(|| shortest_paths(&weights)), seconds(|| floyd_warshall(&weights)))).collect();
        let (ours, theirs) = (median(runs.iter().map(|r| r.0).collect()), median(runs.iter().map(|r| r.1).collect()));
        println!(
            "perplexity {perplexity:6.1}  mean hops {:5.2}  most {:3}  {:8.2} ms  Floyd-Warshall {:8.2} ms  {:6.2}x",
            hops.mean,
            hops.max,
            ours * 1e3,
            theirs * 1e3,
            theirs / ours
        );
    }
}
