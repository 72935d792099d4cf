//! Writing translations: greedy and beam search.

use burn::tensor::{Bool, Int, Tensor, TensorData, activation::log_softmax};

use super::Translator;
use crate::{Result, attention::field};

/// How a translation is searched for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Search {
    /// Id of what stands before the first token.
    pub begin: u32,
    /// Id of what follows the last token.
    pub end: u32,
    /// Most tokens of a translation.
    pub max_tokens: usize,
    /// Hypotheses that are followed at once, at least 1; with 1 the most probable token is taken each time.
    pub beams: usize,
    /// Scores are log-probabilities over the number of tokens to this power: 0 prefers short translations.
    pub length_penalty: f64,
}

/// A translation under way, or done.
#[derive(Debug, Clone)]
struct Hypothesis {
    sentence: usize,
    /// Row of the decoder's state.
    row: usize,
    tokens: Vec<u32>,
    log_probability: f64,
}

impl Hypothesis {
    fn score(&self, search: &Search) -> f64 {
        self.log_probability / ((self.tokens.len() + 1) as f64).powf(search.length_penalty)
    }
}

impl Translator {
    /// The best translation found of each sentence of `source [batch, seq]`, without begin and end. `padding [batch, seq]` is
    /// true where there is no token.
    ///
    /// # Errors
    /// [`crate::Error::Field`] for no beams; whatever the attention refuses.
    pub fn search(
        &self,
        source: Tensor<2, Int>,
        padding: Option<Tensor<2, Bool>>,
        search: &Search,
    ) -> Result<Vec<Vec<u32>>> {
        field("beams", search.beams, search.beams >= 1, "at least 1")?;
        let ([batch, _], device) = (source.dims(), source.device());
        let mut state = self.begin(source, padding)?;
        let begin = |sentence| Hypothesis { sentence, row: sentence, tokens: vec![], log_probability: 0.0 };
        let mut alive: Vec<Hypothesis> = (0..batch).map(begin).collect();
        let mut done: Vec<Vec<Hypothesis>> = vec![Vec::new(); batch];
        for _ in 0..search.max_tokens {
            let last: Vec<i64> =
                alive.iter().map(|h| i64::from(h.tokens.last().copied().unwrap_or(search.begin))).collect();
            let rows = alive.len();
            let logits = self.step(Tensor::from_data(TensorData::new(last, [rows]), &device), &mut state)?;
            let [_, vocabulary] = logits.dims();
            let scores: Vec<f32> = log_softmax(logits, 1).into_data().iter().collect();
            alive = continued(&alive, &scores, vocabulary, search, &mut done);
            if alive.is_empty() {
                break;
            }
            let rows: Vec<i64> = alive.iter().map(|h| h.row as i64).collect();
            let unmoved =
                rows.len() == scores.len() / vocabulary && rows.iter().enumerate().all(|(i, &row)| i as i64 == row);
            if !unmoved {
                let count = rows.len();
                state = state.select(Tensor::from_data(TensorData::new(rows, [count]), &device));
            }
            alive.iter_mut().enumerate().for_each(|(row, h)| h.row = row);
        }
        alive.into_iter().for_each(|h| done[h.sentence].push(h));
        let best = |found: Vec<Hypothesis>| {
            found
                .into_iter()
                .max_by(|a, b| a.score(search).total_cmp(&b.score(search)))
                .map_or_else(Vec::new, |h| h.tokens)
        };
        Ok(done.into_iter().map(best).collect())
    }
}

/// The hypotheses after one more token: of each sentence the best `beams` ways to go on. Those that end are moved to `done`, and a
/// sentence with as many done as there are beams is finished.
fn continued(
    alive: &[Hypothesis],
    scores: &[f32],
    vocabulary: usize,
    search: &Search,
    done: &mut [Vec<Hypothesis>],
) -> Vec<Hypothesis> {
    let mut next = Vec::new();
    for siblings in alive.chunk_by(|a, b| a.sentence == b.sentence) {
        let sentence = siblings[0].sentence;
        let mut candidates: Vec<(f64, &Hypothesis, u32)> = Vec::new();
        for h in siblings {
            let row = &scores[h.row * vocabulary..][..vocabulary];
            let likeliest = top(row, 2 * search.beams);
            candidates.extend(likeliest.into_iter().map(|(token, p)| (h.log_probability + f64::from(p), h, token)));
        }
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut going_on = Vec::new();
        for (place, (log_probability, h, token)) in candidates.into_iter().enumerate() {
            if going_on.len() == search.beams {
                break;
            }
            if token != search.end {
                let tokens = h.tokens.iter().copied().chain([token]).collect();
                going_on.push(Hypothesis { sentence, row: h.row, tokens, log_probability });
            } else if place < search.beams {
                done[sentence].push(Hypothesis { log_probability, ..h.clone() });
            }
        }
        // Greedily, the first end is the end.
        if done[sentence].len() < search.beams {
            next.extend(going_on);
        }
    }
    next
}

/// The `count` highest of `row`, the highest first; of equals, the lower.
fn top(row: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (token, &score) in row.iter().enumerate() {
        if best.len() < count || best.last().is_some_and(|last| score > last.1) {
            let place = best.partition_point(|other| other.1 >= score);
            best.insert(place, (token as u32, score));
            best.truncate(count);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_come_first() {
        assert_eq!(top(&[1.0, 5.0, 5.0, -2.0, 7.0], 3), [(4, 7.0), (1, 5.0), (2, 5.0)]);
        assert_eq!(top(&[1.0], 4), [(0, 1.0)]);
    }
}
