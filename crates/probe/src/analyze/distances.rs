//! How far queries are from keys, "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel", Fig. 1; and in how many directions
//! they vary, "Fractional neural attention for efficient multiscale sequence processing", A.2.

use resolvent_graph::{Dense, symmetric_eigen};
use serde::Serialize;

use super::Sequence;

/// Queries and keys that are taken, evenly spread: enough for a tail of one in a thousand.
const TOKENS: usize = 384;
/// Bins of a histogram.
const BINS: usize = 60;
/// Where it ends, in medians.
const END: f64 = 3.0;

/// The distances between the queries and keys of one head.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeadDistances {
    /// The layer's name.
    pub layer: String,
    /// The sequence.
    pub sequence: usize,
    /// The head.
    pub head: usize,
    /// Channels: independent normal ones have a variation of `0.756 / sqrt(channels)` (sums of differences) and
    /// `1.414 / sqrt(channels)` (squares).
    pub channels: usize,
    /// Sums of absolute differences.
    pub absolute: DistanceStats,
    /// Sums of squared differences.
    pub squared: DistanceStats,
    /// The principal components of the queries; none where they are all the same.
    pub components: Option<Components>,
}

/// In how many directions some vectors vary.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Components {
    /// `exp` of the entropy of their variances along the principal components: from 1 to the number of channels.
    pub directions: f64,
    /// The share of the variance that is along the first two.
    pub plane: f64,
}

impl Components {
    /// Of `vectors` of `channels` numbers.
    fn new<'a>(vectors: impl Iterator<Item = &'a [f32]> + Clone, channels: usize) -> Option<Self> {
        let count = vectors.clone().count() as f64;
        let mut mean = vec![0.0; channels];
        for vector in vectors.clone() {
            mean.iter_mut().zip(vector).for_each(|(mean, x)| *mean += f64::from(*x) / count);
        }
        let mut covariance = vec![0.0; channels * channels];
        for vector in vectors {
            let centred: Vec<f64> = vector.iter().zip(&mean).map(|(x, mean)| f64::from(*x) - mean).collect();
            for (row, x) in covariance.chunks_exact_mut(channels).zip(&centred) {
                row.iter_mut().zip(&centred).for_each(|(entry, y)| *entry += x * y);
            }
        }
        let mut variances = symmetric_eigen(&Dense::new(channels, covariance).ok()?).ok()?.values;
        variances.iter_mut().for_each(|x| *x = x.max(0.0));
        variances.sort_by(|x, y| y.total_cmp(x));
        let all: f64 = variances.iter().sum();
        let shares = || variances.iter().map(|x| x / all).filter(|x| *x > 0.0);
        let entropy: f64 = shares().map(|x| -x * x.ln()).sum();
        (all > 0.0).then(|| Self { directions: entropy.exp(), plane: shares().take(2).sum() })
    }
}

/// How some distances are distributed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DistanceStats {
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub std: f64,
    /// The deviation as a share of the mean.
    pub variation: f64,
    /// Fourth moment over the squared variance: 3 for normal ones.
    pub kurtosis: f64,
    /// The distance that one in a thousand exceeds, over the median.
    pub tail: f64,
    /// Shares of the pairs in 60 bins from 0 to three medians; what is beyond is missing.
    pub histogram: Vec<f64>,
}

impl DistanceStats {
    /// Of some distances; `None` of none.
    fn new(mut distances: Vec<f64>) -> Option<Self> {
        distances.sort_by(f64::total_cmp);
        let count = distances.len() as f64;
        let median = *distances.get(distances.len() / 2)?;
        let mean = distances.iter().sum::<f64>() / count;
        let moment = |power: i32| distances.iter().map(|x| (x - mean).powi(power)).sum::<f64>() / count;
        let (variance, fourth) = (moment(2), moment(4));
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let mut histogram = vec![0.0; BINS];
        for x in &distances {
            let bin = share(*x, median) / END * BINS as f64;
            if let Some(bin) = histogram.get_mut(bin as usize) {
                *bin += 1.0 / count;
            }
        }
        Some(Self {
            mean,
            std: variance.sqrt(),
            variation: share(variance.sqrt(), mean),
            kurtosis: share(fourth, variance * variance),
            tail: share(distances[(0.999 * (count - 1.0)).round() as usize], median),
            histogram,
        })
    }

    /// The middle of a bin, in medians.
    pub fn place(bin: usize) -> f64 {
        (bin as f64 + 0.5) * END / BINS as f64
    }
}

/// The distances of every head of a sequence; a token's own key, where it is its query, is left out.
pub(super) fn distances(layer: &str, number: usize, sequence: &Sequence) -> Vec<HeadDistances> {
    let s = sequence.shape;
    let spread = |tokens: usize| (0..tokens.min(TOKENS)).map(move |i| i * tokens / tokens.min(TOKENS));
    let keys = sequence.k.as_deref().unwrap_or(&sequence.q);
    let of_head = |head: usize| {
        let row = |tokens: usize, token: usize| (head * tokens + token) * s.head_dim..;
        let (mut absolute, mut squared) = (Vec::new(), Vec::new());
        for i in spread(s.seq_q) {
            let q = &sequence.q[row(s.seq_q, i)][..s.head_dim];
            for j in spread(s.seq_kv).filter(|&j| sequence.k.is_some() || j != i) {
                let k = &keys[row(s.seq_kv, j)][..s.head_dim];
                let differences = || q.iter().zip(k).map(|(q, k)| f64::from(q - k));
                absolute.push(differences().map(f64::abs).sum::<f64>());
                squared.push(differences().map(|x| x * x).sum::<f64>());
            }
        }
        let (layer, channels) = (layer.to_owned(), s.head_dim);
        let (absolute, squared) = (DistanceStats::new(absolute)?, DistanceStats::new(squared)?);
        let queries = spread(s.seq_q).map(|i| &sequence.q[row(s.seq_q, i)][..channels]);
        let components = Components::new(queries, channels);
        Some(HeadDistances { layer, sequence: number, head, channels, absolute, squared, components })
    };
    (0..s.heads).filter_map(of_head).collect()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, StandardNormal};
    use resolvent_kernels::Shape;

    use super::*;

    /// The tokens `q`, which are queries and keys.
    fn tied(shape: Shape, q: Vec<f32>) -> Sequence {
        Sequence { shape, same_tokens: true, shifted: false, first: 0, number: 0, q, k: None, v: None }
    }

    #[test]
    fn normal_tokens_have_the_variation_of_theory() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let shape = Shape::square(1, 1, 300, 64);
        let mut draw = || (0..shape.q_len()).map(|_| StandardNormal.sample(&mut rng)).collect::<Vec<f32>>();
        let sequence = Sequence { k: Some(draw()), ..tied(shape, draw()) };
        let [found] = &distances("l", 0, &sequence)[..] else { panic!("one head") };
        assert!((found.absolute.variation * 8.0 - 0.756).abs() < 0.05, "{found:?}");
        assert!((found.squared.variation * 8.0 - 1.414).abs() < 0.1, "{found:?}");
        assert!((found.squared.mean - 128.0).abs() < 4.0 && (found.absolute.kurtosis - 3.0).abs() < 0.3);
        assert!((found.absolute.histogram.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        let spread = found.components.unwrap();
        assert!(spread.directions > 50.0 && spread.directions < 64.0 && spread.plane < 0.1, "{spread:?}");
    }

    /// Variances of 9, 1 and none in three orthogonal directions.
    #[test]
    fn components_are_the_directions_of_variance() {
        let vectors: [[f32; 3]; 4] = [[5.0, 4.0, 2.0], [5.0, 6.0, 2.0], [-1.0, 4.0, 2.0], [-1.0, 6.0, 2.0]];
        let turn = |[x, y, z]: [f32; 3]| [0.6 * x + 0.8 * z, y, 0.6 * z - 0.8 * x];
        let turned: Vec<[f32; 3]> = vectors.into_iter().map(turn).collect();
        let found = Components::new(turned.iter().map(|x| &x[..]), 3).unwrap();
        let expected = (-0.9 * 0.9_f64.ln() - 0.1 * 0.1_f64.ln()).exp();
        assert!((found.directions - expected).abs() < 1e-5 && (found.plane - 1.0).abs() < 1e-6, "{found:?}");
        assert!(Components::new([[1.0_f32, 2.0]; 3].iter().map(|x| &x[..]), 2).is_none());
    }

    #[test]
    fn a_tied_token_is_not_far_from_itself() {
        let shape = Shape::square(1, 1, 3, 1);
        let sequence = tied(shape, vec![0.0, 1.0, 3.0]);
        let found = &distances("l", 0, &sequence)[0];
        assert_eq!((found.absolute.mean, found.squared.mean), (2.0, 14.0 / 3.0));
        let same = tied(Shape::square(1, 1, 1, 1), vec![1.0]);
        assert!(distances("l", 0, &same).is_empty());
        let flat = tied(shape, vec![1.0; 3]);
        assert_eq!(
            (distances("l", 0, &flat)[0].absolute.variation, distances("l", 0, &flat)[0].squared.tail),
            (0.0, 0.0)
        );
    }
}
