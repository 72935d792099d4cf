//! Texts as token ids, and batches of texts of nearly the same length.

use rand::seq::SliceRandom;

use super::{
    BatchPlan,
    rng::{Purpose, stream},
};

/// Texts as token ids, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    ids: Vec<u32>,
    /// Where each text ends in `ids`.
    ends: Vec<usize>,
    /// Which texts were longer than what was kept of them.
    cut: Vec<bool>,
    marks: Marks,
}

/// Ids that say what is known of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    /// Of whatever was not learnt.
    pub unknown: u32,
    /// Of a space alone, where the spaces before words are tokens or parts of them.
    pub space: Option<u32>,
}

impl Marks {
    /// How many of `ids` are unknown, and how many there are but for the spaces before unknown ones, which every vocabulary knows.
    fn count(self, ids: &[u32]) -> (usize, usize) {
        let is_unknown = |id: &&u32| **id == self.unknown;
        let before = |pair: &&[u32]| Some(pair[0]) == self.space && pair[1] == self.unknown;
        (ids.iter().filter(is_unknown).count(), ids.len() - ids.windows(2).filter(before).count())
    }
}

impl Encoded {
    /// Of each text the ids that are kept and the number of tokens that it had.
    pub(super) fn new(texts: Vec<(Vec<u32>, usize)>, marks: Marks) -> Self {
        let cut = texts.iter().map(|(kept, whole)| kept.len() < *whole).collect();
        let mut encoded = Self { ids: Vec::new(), ends: Vec::with_capacity(texts.len()), cut, marks };
        for (ids, _) in texts {
            encoded.ids.extend(ids);
            encoded.ends.push(encoded.ids.len());
        }
        encoded
    }

    /// Number of texts.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The ids of text `index`.
    pub fn ids(&self, index: usize) -> &[u32] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.ids[start..self.ends[index]]
    }

    /// Tokens of text `index`.
    pub fn tokens(&self, index: usize) -> usize {
        self.ids(index).len()
    }

    /// Whether text `index` was longer than what was kept of it.
    pub fn is_cut(&self, index: usize) -> bool {
        self.cut[index]
    }

    /// Number of texts that were longer than what was kept of them.
    pub fn cut(&self) -> usize {
        self.cut.iter().filter(|&&cut| cut).count()
    }

    /// Share of all tokens that were not in the vocabulary; a space before such a token belongs to it.
    pub fn unknown(&self) -> f64 {
        let (unknown, of) = self.marks.count(&self.ids);
        unknown as f64 / of.max(1) as f64
    }

    /// Whether most tokens of text `index` were not in the vocabulary.
    pub fn is_mostly_unknown(&self, index: usize) -> bool {
        let (unknown, of) = self.marks.count(self.ids(index));
        2 * unknown > of
    }

    /// What a reader should know of how the texts `what` were read; `None` if nothing.
    pub fn note(&self, what: &str, max_tokens: usize) -> Option<String> {
        cut_note(self.cut(), self.len(), what, max_tokens)
    }
}

/// What a reader should know of texts that are longer than the `max_tokens` that a model reads: `3 of 7 texts were cut to their first 512
/// tokens`; `None` where none was `cut`.
pub fn cut_note(cut: usize, of: usize, what: &str, max_tokens: usize) -> Option<String> {
    let first = if max_tokens == 1 { "first token".into() } else { format!("first {max_tokens} tokens") };
    (cut > 0).then(|| format!("{cut} of {of} {what} were cut to their {first}"))
}

/// What stands in padding, which no answer depends on.
const PAD: i32 = 0;

/// A rectangle of token ids: shorter texts are padded to the longest of the batch, and to no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Padded {
    /// `[texts, width]`.
    pub ids: Vec<i32>,
    /// Tokens of each text.
    pub lengths: Vec<usize>,
    /// Tokens of the longest.
    pub width: usize,
}

impl Padded {
    /// `texts`, none of them empty.
    pub fn new(texts: &[impl AsRef<[u32]>]) -> Self {
        let lengths: Vec<usize> = texts.iter().map(|text| text.as_ref().len()).collect();
        let width = lengths.iter().copied().max().unwrap_or(0);
        let mut ids = vec![PAD; texts.len() * width];
        for (row, text) in ids.chunks_exact_mut(width.max(1)).zip(texts) {
            row.iter_mut().zip(text.as_ref()).for_each(|(id, &token)| *id = token as i32);
        }
        Self { ids, lengths, width }
    }

    /// Which places are padding, `[texts, width]`; `None` if none is.
    pub fn padding(&self) -> Option<Vec<bool>> {
        let padded = self.lengths.iter().any(|&length| length < self.width);
        padded.then(|| self.lengths.iter().flat_map(|&length| (0..self.width).map(move |at| at >= length)).collect())
    }
}

/// Batches that are sorted by length together.
const POOL: usize = 50;

/// The batches of an epoch over texts of `lengths`: texts of nearly the same length together, so that little is padded. Which
/// texts meet and in what order is random still: the shuffled texts are sorted in pools of 50 batches, and the batches shuffled.
/// Depends on the plan and the epoch alone.
pub fn by_length(lengths: &[usize], plan: &BatchPlan, epoch: u64) -> Vec<Vec<usize>> {
    let mut order = plan.order(lengths.len(), epoch);
    if plan.drop_last {
        order.truncate(plan.batches(lengths.len()) * plan.batch_size);
    }
    for pool in order.chunks_mut(POOL * plan.batch_size) {
        pool.sort_by_key(|&index| lengths[index]);
    }
    let mut batches: Vec<_> = order.chunks(plan.batch_size).map(<[usize]>::to_vec).collect();
    batches.shuffle(&mut stream(Purpose::Order, plan.seed, epoch, 1));
    batches
}

/// All texts of `lengths`, the longest first, in batches of at most `tokens` tokens, padding included, and at least one text.
pub fn by_budget(lengths: &[usize], tokens: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(lengths[index]));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for index in order {
        match batches.last_mut() {
            Some(batch) if (batch.len() + 1) * lengths[batch[0]] <= tokens => batch.push(index),
            _ => batches.push(vec![index]),
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths() -> Vec<usize> {
        (0..1003).map(|index| 1 + index * 37 % 211).collect()
    }

    #[test]
    fn every_text_comes_once_with_others_of_its_length() {
        let (lengths, plan) = (lengths(), BatchPlan { drop_last: false, ..BatchPlan::training(10, 3) });
        let batches = by_length(&lengths, &plan, 2);
        let mut seen = batches.concat();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..1003));
        let padded = |batches: &[Vec<usize>]| -> usize {
            batches.iter().map(|batch| batch.len() * batch.iter().map(|&i| lengths[i]).max().unwrap()).sum()
        };
        let (tokens, unsorted) = (lengths.iter().sum::<usize>(), plan.order(1003, 2));
        let unsorted: Vec<_> = unsorted.chunks(10).map(<[usize]>::to_vec).collect();
        assert!(padded(&batches) < tokens * 11 / 10 && padded(&unsorted) > tokens * 3 / 2);
        assert_eq!(batches, by_length(&lengths, &plan, 2));
        assert_ne!(batches, by_length(&lengths, &plan, 3));
        let first: Vec<_> = batches.iter().map(|batch| lengths[batch[0]]).collect();
        assert!(!first.is_sorted(), "batches come in random order");
    }

    #[test]
    fn whole_batches_only_where_the_plan_says_so() {
        let batches = by_length(&lengths(), &BatchPlan::training(10, 3), 0);
        assert!(batches.len() == 100 && batches.iter().all(|batch| batch.len() == 10));
    }

    #[test]
    fn a_budget_of_tokens_holds_and_nothing_is_left_out() {
        let lengths = lengths();
        let batches = by_budget(&lengths, 500);
        assert!(batches.iter().all(|batch| batch.len() * lengths[batch[0]] <= 500));
        let mut seen = batches.concat();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..1003));
        assert!(by_budget(&lengths, 1).iter().all(|batch| batch.len() == 1));
    }

    #[test]
    fn texts_are_padded_to_the_longest() {
        let padded = Padded::new(&[vec![5, 6, 7], vec![8]]);
        assert_eq!((padded.width, &padded.ids[..]), (3, &[5, 6, 7, 8, 0, 0][..]));
        assert_eq!(padded.padding().unwrap(), [false, false, false, false, true, true]);
        assert_eq!(Padded::new(&[vec![1], vec![2]]).padding(), None);
    }
}
