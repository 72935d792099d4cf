//! Pairs of a query and a key that a call leaves out at random.

use crate::{Error, Result};

/// What is left out of the pairs that are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// Their weights, after the rows were normalised; the others are divided by the share that stays, so that the mean over
    /// the draws is the operator without dropout. "Attention Is All You Need", as its implementations have it.
    Weights,
    /// The pairs themselves, as a mask would, before the rows are normalised: what removing edges of the graph does.
    Pairs,
}

/// Leaves out each pair with the same probability, by itself.
///
/// Whether a pair stays is a function of seed, batch element, head, query and key: forward and backward pass, all strategies,
/// devices and numbers of threads leave out the same pairs, and nothing is stored. For `softmax`, and `fna` without a
/// density exponent.
///
/// ```
/// use resolvent_kernels::Dropout;
/// let dropout = Dropout::weights(0.1, 7)?;
/// let kept = (0..1000).filter(|&key| dropout.keeps(0, 0, key)).count();
/// assert!((850..950).contains(&kept));
/// # Ok::<(), resolvent_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    dropped: Dropped,
    probability: f64,
    seed: u64,
}

impl Dropout {
    /// Drops weights with a probability in [0, 1).
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn weights(probability: f64, seed: u64) -> Result<Self> {
        let dropout = Self { dropped: Dropped::Weights, probability, seed };
        dropout.checked((0.0..1.0).contains(&probability), "in [0, 1)")
    }

    /// Drops pairs with a probability in [0, 1].
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn pairs(probability: f64, seed: u64) -> Result<Self> {
        let dropout = Self { dropped: Dropped::Pairs, probability, seed };
        dropout.checked((0.0..=1.0).contains(&probability), "in [0, 1]")
    }

    fn checked(self, ok: bool, expected: &'static str) -> Result<Self> {
        let (field, got) = ("dropout.probability", self.probability.to_string());
        if ok { Ok(self) } else { Err(Error::OutOfRange { field, got, expected }) }
    }

    /// What is left out.
    pub fn dropped(&self) -> Dropped {
        self.dropped
    }

    /// The same with another draw for each `number`.
    pub fn reseeded(self, number: u64) -> Self {
        Self { seed: mix(self.seed ^ mix(number)), ..self }
    }

    /// Whether query and key, by their positions, stay a pair in a head of a batch element, `slice = batch * heads + head`.
    pub fn keeps(&self, slice: usize, query: usize, key: usize) -> bool {
        keeps(self.threshold(), self.row(slice, query) ^ (key as u32).wrapping_mul(KEY))
    }

    /// What the weight of a pair that stays is multiplied by.
    pub fn factor(&self) -> f64 {
        match self.dropped {
            Dropped::Weights => 1.0 / (1.0 - self.probability),
            Dropped::Pairs => 1.0,
        }
    }

    /// The state of a query's draws.
    pub(crate) fn row(&self, slice: usize, query: usize) -> u32 {
        let place = mix(self.seed) ^ ((slice as u64) << 32 | query as u64);
        (mix(place) >> 32) as u32
    }

    /// Draws below this are left out; `None` where all are.
    pub(crate) fn threshold(&self) -> Option<u32> {
        u32::try_from((self.probability * 2_f64.powi(32)).round() as u64).ok()
    }
}

/// Spreads keys over the words.
pub(crate) const KEY: u32 = 0x9e37_79b9;
/// Multipliers of [`draw`], from a search for the least bias among functions of its shape.
pub(crate) const MULTIPLIERS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

/// A uniform word for a word.
fn draw(x: u32) -> u32 {
    let x = (x ^ x >> 16).wrapping_mul(MULTIPLIERS[0]);
    let x = (x ^ x >> 15).wrapping_mul(MULTIPLIERS[1]);
    x ^ x >> 16
}

fn keeps(threshold: Option<u32>, x: u32) -> bool {
    threshold.is_some_and(|threshold| draw(x) >= threshold)
}

/// A bijection that spreads every bit of its argument (the finaliser of SplitMix64).
fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The standard deviation of a share of `n` draws.
    fn spread(p: f64, n: f64) -> f64 {
        (p * (1.0 - p) / n).sqrt()
    }

    #[test]
    fn shares_are_those_asked_for_in_rows_columns_and_heads() {
        for p in [0.1, 0.5, 0.9] {
            let dropout = Dropout::weights(p, 3).unwrap();
            let (n, bound) = (4096.0, 4.0 * spread(p, 4096.0));
            let share = |kept: usize| 1.0 - kept as f64 / n;
            for fixed in [0, 1, 77, 5000] {
                let row = (0..4096).filter(|&key| dropout.keeps(1, fixed, key)).count();
                let column = (0..4096).filter(|&query| dropout.keeps(1, query, fixed)).count();
                let heads = (0..4096).filter(|&slice| dropout.keeps(slice, 5, fixed)).count();
                for (kept, what) in [(row, "row"), (column, "column"), (heads, "heads")] {
                    assert!((share(kept) - p).abs() < bound, "{what} {fixed}: {} for {p}", share(kept));
                }
            }
        }
    }

    #[test]
    fn neighbours_are_independent() {
        let dropout = Dropout::pairs(0.5, 9).unwrap();
        let keeps = |query: usize, key: usize| dropout.keeps(0, query, key);
        for (rows, keys) in [(0, 1), (1, 0), (1, 1), (64, 0), (0, 64)] {
            let places = || (0..256).flat_map(|i| (0..256).map(move |j| (i, j)));
            let same = places().filter(|&(i, j)| keeps(i, j) == keeps(i + rows, j + keys)).count();
            let share = same as f64 / 65536.0;
            assert!((share - 0.5).abs() < 5.0 * spread(0.5, 65536.0), "{rows}, {keys}: {share}");
        }
        let other = Dropout::pairs(0.5, 10).unwrap();
        let same = (0..65536).filter(|&key| dropout.keeps(0, 0, key) == other.keeps(0, 0, key)).count();
        assert!((same as f64 / 65536.0 - 0.5).abs() < 5.0 * spread(0.5, 65536.0));
    }

    #[test]
    fn nothing_and_everything_can_be_dropped() {
        assert!((0..1000).all(|key| Dropout::pairs(0.0, 1).unwrap().keeps(0, 0, key)));
        assert!(!(0..1000).any(|key| Dropout::pairs(1.0, 1).unwrap().keeps(0, 0, key)));
        for refused in [Dropout::weights(1.0, 1), Dropout::weights(-0.1, 1), Dropout::pairs(f64::NAN, 1)] {
            assert!(matches!(refused, Err(Error::OutOfRange { field: "dropout.probability", .. })));
        }
    }
}
