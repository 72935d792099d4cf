//! Random streams that depend on their coordinates alone, so that order, threads and resuming do not matter.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// What a stream is for: two purposes never share random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Purpose {
    /// Drawing a generated picture.
    Shapes = 1,
    /// Holding pictures out for validation or testing.
    Holdout,
    /// The order of an epoch.
    Order,
    /// Augmenting one picture.
    Augment,
    /// Mixing the pictures of one batch.
    Mix,
    /// Drawing a generated expression.
    Listops,
    /// Which tokens an ablation leaves out.
    Ablation,
    /// Drawing a head with a needle.
    Needle,
    /// Drawing a head whose tokens form clusters.
    Clusters,
    /// Where the windows of an epoch over plain text begin.
    Windows,
    /// Choosing the tokens of a generated text.
    Generation,
    /// Maps without meaning, and the order of what maps do not order.
    Deletion,
    /// Drawing a sequence of keys, values and queries.
    Recall,
    /// Drawing a picture of dashed paths.
    Pathfinder,
    /// Dealing the words of a topic, and drawing a pair of documents.
    Documents,
}

/// The stream of `purpose` at the coordinates (`seed`, `major`, `minor`), e.g. (seed, epoch, picture).
///
/// The coordinates are the ChaCha key itself, so that no two of them collide.
pub fn stream(purpose: Purpose, seed: u64, major: u64, minor: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    for (bytes, word) in key.chunks_exact_mut(8).zip([purpose as u64, seed, major, minor]) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;

    #[test]
    fn every_coordinate_changes_the_stream() {
        let first = |purpose, seed, major, minor| stream(purpose, seed, major, minor).next_u64();
        let base = first(Purpose::Order, 1, 2, 3);
        assert_eq!(base, first(Purpose::Order, 1, 2, 3));
        let others = [
            first(Purpose::Mix, 1, 2, 3),
            first(Purpose::Order, 2, 2, 3),
            first(Purpose::Order, 1, 3, 3),
            first(Purpose::Order, 1, 2, 4),
            first(Purpose::Order, 2, 1, 3),
        ];
        assert!(others.iter().all(|&other| other != base), "{others:?}");
    }
}
