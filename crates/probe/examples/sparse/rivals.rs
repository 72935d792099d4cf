//! Which keys the rivals of "Spectral Sparse Attention", table 3, let the last token see: each as its own paper has it, but for
//! what that would learn.

use super::heads::Head;
use rand::{RngExt, SeedableRng, seq::index::sample};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// Rounds of k-means for the centroids that the Routing Transformer learns.
const ROUNDS: usize = 4;
/// Reformer's rounds of hashing, as the table's recipe has it, and tokens of a chunk.
const HASHES: usize = 4;
const CHUNK: usize = 64;

/// A tenth of the keys, drawn without repetition.
pub fn random(head: &Head, seed: u64) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    sample(&mut rng, head.tokens, head.tokens.div_ceil(10)).into_vec()
}

/// "Efficient Content-Based Sparse Attention with Routing Transformers": queries and keys on the unit sphere share `sqrt(N)`
/// centroids; a query sees the `sqrt(N)` keys that are nearest to its centroid, so that clusters are of one size.
pub fn routing(head: &Head, seed: u64) -> Vec<usize> {
    let (n, d) = (head.tokens, head.dim);
    let clusters = n.isqrt();
    let (q, k) = (unit(&head.q, d), unit(&head.k, d));
    let points: Vec<&[f32]> = q.chunks_exact(d).chain(k.chunks_exact(d)).collect();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut centres: Vec<f32> = sample(&mut rng, 2 * n, clusters).iter().flat_map(|at| points[at].to_vec()).collect();
    for _ in 0..ROUNDS {
        let mut sums = vec![0.0; centres.len()];
        for point in &points {
            let sum = &mut sums[d * nearest(&centres, point)..][..d];
            sum.iter_mut().zip(*point).for_each(|(sum, x)| *sum += x);
        }
        centres = unit(&sums, d);
    }
    let centre = &centres[d * nearest(&centres, points[n - 1])..][..d];
    let mut keys: Vec<usize> = (0..n).collect();
    keys.sort_by(|&i, &j| dot(centre, points[n + j]).total_cmp(&dot(centre, points[n + i])));
    keys.truncate(n / clusters);
    keys
}

/// "Reformer: The Efficient Transformer": queries are keys, the asker's query in the place of its key; tokens of one angular
/// bucket in one chunk of the sorted order, or the chunk before it, see each other, in any of four rounds.
pub fn reformer(head: &Head, seed: u64) -> Vec<usize> {
    let (n, d) = (head.tokens, head.dim);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let asker = n - 1;
    let token = |j: usize| if j == asker { &head.q[j * d..] } else { &head.k[j * d..][..d] };
    let mut seen = vec![false; n];
    for _ in 0..HASHES {
        // Half as many directions as there are buckets; their opposites are the other half.
        let directions: Vec<f32> = (0..n / CHUNK / 2 * d).map(|_| rng.sample::<f32, _>(StandardNormal)).collect();
        let both: Vec<f32> = directions.iter().copied().chain(directions.iter().map(|x| -x)).collect();
        let buckets: Vec<usize> = (0..n).map(|j| nearest(&both, token(j))).collect();
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by_key(|&j| buckets[j]);
        let chunk = order.iter().position(|&j| j == asker).map_or(0, |at| at / CHUNK);
        let around = &order[chunk.saturating_sub(1) * CHUNK..n.min((chunk + 1) * CHUNK)];
        around.iter().filter(|&&j| buckets[j] == buckets[asker]).for_each(|&j| seen[j] = true);
    }
    (0..n).filter(|&j| seen[j]).collect()
}

/// Rows of length one; rows of zeros as they are.
fn unit(rows: &[f32], d: usize) -> Vec<f32> {
    let scaled = |row: &[f32]| {
        let length = dot(row, row).sqrt().max(f32::MIN_POSITIVE);
        row.iter().map(|x| x / length).collect::<Vec<_>>()
    };
    rows.chunks_exact(d).flat_map(scaled).collect()
}

/// The row with the largest product.
fn nearest(rows: &[f32], point: &[f32]) -> usize {
    let products = rows.chunks_exact(point.len()).map(|row| dot(row, point)).enumerate();
    products.max_by(|(_, x), (_, y)| x.total_cmp(y)).map_or(0, |(at, _)| at)
}

fn dot(x: &[f32], y: &[f32]) -> f32 {
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (x, y) in x.iter().zip(y) {
        (0..8).for_each(|n| sums[n] += x[n] * y[n]);
    }
    let rest: f32 = x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}
