//! How the heads of a layer make one map.

use serde::{Deserialize, Serialize};

use super::weights::{flattened, positive};

/// How the heads of a layer make one map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MapRule {
    /// Every head's weights over their sum, then their mean. A head's output goes through values and an output projection of its
    /// own, so that the size of its weights says nothing of its part in the answer; and mechanisms whose rows have different
    /// sums are compared by where they look alone. The default.
    #[default]
    EqualHeads,
    /// The mean of the heads' weights as they are. "Infinite Self-Attention", Figs. 8 to 14.
    Paper,
}

impl MapRule {
    /// The map of `heads`, whose weights may be negative; a head without weight adds nothing.
    pub fn map(self, heads: &[Vec<f32>]) -> Vec<f32> {
        let mut mean = vec![0.0; heads.first().map_or(0, Vec::len)];
        for head in heads {
            let (head, factor) = match self {
                Self::EqualHeads => {
                    let head = positive(head);
                    let sum: f32 = head.iter().sum();
                    (head, if sum > 0.0 { 1.0 / (sum * heads.len() as f32) } else { 0.0 })
                }
                Self::Paper => (head.clone(), 1.0 / heads.len() as f32),
            };
            mean.iter_mut().zip(&head).for_each(|(mean, weight)| *mean += factor * weight);
        }
        flattened(positive(&mean))
    }

    /// The rule in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::EqualHeads => "mean over the heads, each with a sum of one",
            Self::Paper => "mean over the heads as they are",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_count_alike_or_by_their_weights() {
        let heads = [vec![1.0, 3.0], vec![20.0, 0.0], vec![0.0; 2], vec![0.0; 2]];
        assert_eq!(MapRule::EqualHeads.map(&heads), [0.3125, 0.1875]);
        assert_eq!(MapRule::Paper.map(&heads), [5.25, 0.75]);
    }

    /// A negative weight of one head takes from what another has there under the paper's rule alone.
    #[test]
    fn negative_weights() {
        let heads = [vec![-3.0, 1.0], vec![2.0, 2.0]];
        assert_eq!(MapRule::EqualHeads.map(&heads), [0.25, 0.75]);
        assert_eq!(MapRule::Paper.map(&heads), [0.0, 1.5]);
    }
}
