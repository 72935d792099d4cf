//! Draws that depend on nothing but a seed.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// `count` distinct numbers below `len`, ascending, for batch entry `batch`; every set of them is as likely.
pub(crate) fn sample(seed: u64, batch: usize, len: usize, count: usize) -> impl Iterator<Item = usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(batch as u64);
    let mut wanted = count;
    // Each number is taken with the share of those still wanted among those that are left.
    (0..len).filter(move |&i| {
        let taken = rng.random_range(0..len - i) < wanted;
        wanted -= usize::from(taken);
        taken
    })
}

#[cfg(test)]
mod tests {
    use super::sample;

    #[test]
    fn draws_are_distinct_sorted_and_fixed_by_seed_and_batch() {
        let draw = |seed, batch| Vec::from_iter(sample(seed, batch, 50, 20));
        let picks = draw(3, 0);
        assert!(picks.len() == 20 && picks.windows(2).all(|w| w[0] < w[1]) && picks[19] < 50);
        assert_eq!(picks, draw(3, 0));
        assert_ne!(picks, draw(3, 1));
        assert_ne!(picks, draw(4, 0));
        assert_eq!(Vec::from_iter(sample(0, 0, 5, 5)), [0, 1, 2, 3, 4]);
    }
}
