//! The counter-based generator of plans: the same bits in every implementation, whatever the order of evaluation.

use std::collections::BTreeSet;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// What a stream is drawn for: its last words after the batch entry and the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Stage {
    /// First centres of the queries, also of the one set that queries and keys share.
    Queries = 1,
    /// First centres of the keys, where they are clustered apart.
    Keys = 2,
    /// The projection before clustering, one for all heads.
    Projection = 3,
    /// Which cluster pairs are sampled.
    Pairs = 4,
    /// The edges of one cluster pair.
    Tokens = 5,
    /// The edges of one row.
    Rows = 6,
}

/// The finaliser of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// SplitMix64, started at a state folded from a seed and words that say what it is for.
#[derive(Debug, Clone)]
pub(in super::super) struct Stream(u64);

impl Stream {
    pub fn new(seed: u64, words: &[u64]) -> Self {
        let start = mix(seed.wrapping_add(GOLDEN));
        Self(words.iter().fold(start, |x, word| mix(x ^ mix(word.wrapping_add(GOLDEN)))))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// In [0, 1), a multiple of 2^-53.
    pub fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (-53.0_f64).exp2()
    }

    /// An integer in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.uniform() * n as f64) as usize
    }

    /// A standard normal number: the cosine branch of Box and Muller, two uniforms each.
    pub fn normal(&mut self) -> f64 {
        let (radius, angle) = (self.uniform(), self.uniform());
        (-2.0 * (1.0 - radius).ln()).sqrt() * (2.0 * std::f64::consts::PI * angle).cos()
    }
}

/// The first index with a positive weight whose running sum exceeds `u` times the sum of all; the last with a positive
/// weight where rounding leaves none.
pub(in super::super) fn pick(weights: impl Iterator<Item = f64>, total: f64, u: f64) -> usize {
    let (mut run, mut last) = (0.0, 0);
    for (index, weight) in weights.enumerate() {
        if weight > 0.0 {
            run += weight;
            last = index;
            if run > u * total {
                break;
            }
        }
    }
    last
}

/// `count` distinct integers below `population` in ascending order, every subset equally likely (Floyd's algorithm).
pub(super) fn floyd(population: usize, count: usize, stream: &mut Stream, into: &mut Vec<usize>) {
    /// Up to here a search through a list is faster than a tree.
    const SHORT: usize = 32;
    into.clear();
    if count <= SHORT {
        for t in population - count..population {
            let r = stream.below(t + 1);
            into.push(if into.contains(&r) { t } else { r });
        }
        into.sort_unstable();
        return;
    }
    let mut seen = BTreeSet::new();
    for t in population - count..population {
        let r = stream.below(t + 1);
        if !seen.insert(r) {
            seen.insert(t);
        }
    }
    into.extend(seen);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_those_of_the_definition() {
        assert_eq!(mix(1), 6_238_072_747_940_578_789);
        assert_eq!(Stream::new(0, &[]).next(), 12_035_550_249_420_947_055);
        assert_eq!(Stream::new(7, &[0, 0, 4]).next(), 0x470b_a02c_9c76_38c1);
        let mut stream = Stream::new(7, &[0, 0, 4]);
        let uniforms = [0.277_521_143_809_701_05, 0.022_842_250_746_627_157, 0.806_474_585_644_036_3];
        uniforms.iter().for_each(|want| assert!((stream.uniform() - want).abs() < 1e-16));
        let mut stream = Stream::new(3, &[1, 2, 5, 4, 5]);
        assert_eq!([stream.next(), stream.next()], [0x6748_438c_1371_37da, 0x3fa0_68b6_65e3_87df]);
        assert_eq!(stream.below(1000), 308);
    }

    #[test]
    fn subsets_are_those_of_the_definition() {
        let mut subset = Vec::new();
        floyd(20, 4, &mut Stream::new(1, &[0, 0, 5, 0, 1]), &mut subset);
        assert_eq!(subset, [0, 2, 6, 7]);
        for count in [0, 1, 31, 32, 33, 99, 100] {
            floyd(100, count, &mut Stream::new(5, &[]), &mut subset);
            assert_eq!(subset.len(), count);
            assert!(subset.windows(2).all(|pair| pair[0] < pair[1]) && subset.iter().all(|&x| x < 100));
        }
    }

    #[test]
    fn picks_skip_what_has_no_weight() {
        let weights = [0.0, 1.0, 0.0, 3.0, 0.0];
        let at = |u: f64| pick(weights.into_iter(), 4.0, u);
        assert_eq!([at(0.0), at(0.2), at(0.25), at(0.999), at(1.0)], [1, 1, 3, 3, 3]);
    }

    #[test]
    fn normals_have_the_moments_of_the_bell() {
        let mut stream = Stream::new(9, &[Stage::Projection as u64]);
        let draws: Vec<f64> = (0..4000).map(|_| stream.normal()).collect();
        let moment = |power: i32| draws.iter().map(|x| x.powi(power)).sum::<f64>() / 4000.0;
        // Four standard errors of each mean.
        assert!(moment(1).abs() < 0.064 && (moment(2) - 1.0).abs() < 0.09 && (moment(4) - 3.0).abs() < 0.62);
    }
}
