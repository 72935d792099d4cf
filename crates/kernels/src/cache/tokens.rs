//! The new tokens of a step: without what is masked.

use std::borrow::Cow;

use crate::{Extras, Inputs, Mask, Shape};

/// New tokens of every sequence and head; the rows of masked ones are zeros, so that nothing is made of them.
pub(super) struct Tokens<'a> {
    /// `[batch, heads, new, dim]`, keys and values of the heads that have their own.
    pub q: Cow<'a, [f32]>,
    pub k: Cow<'a, [f32]>,
    pub v: Cow<'a, [f32]>,
    pub extras: Extras<'a>,
    pub mask: Mask<'a>,
    pub new: usize,
    /// `[batch, new]`: unmasked keys up to a token, where any key is masked.
    seen: Vec<usize>,
    /// The same before the first.
    before: Vec<usize>,
}

impl<'a> Tokens<'a> {
    /// `before`: unmasked keys of each sequence.
    pub fn new(inputs: &Inputs<'a, f32>, mask: Mask<'a>, token: &Shape, new: usize, before: &[usize]) -> Self {
        let batch = token.batch;
        let clean = |x: &'a [f32], keep: Option<&[bool]>, dim: usize| -> Cow<'a, [f32]> {
            let Some(keep) = keep.filter(|keep| keep.contains(&false)) else { return Cow::Borrowed(x) };
            let (mut x, heads) = (x.to_vec(), x.len() / (batch * new * dim));
            for (n, row) in x.chunks_exact_mut(dim).enumerate() {
                if !keep[n / (heads * new) * new + n % new] {
                    row.fill(0.0);
                }
            }
            Cow::Owned(x)
        };
        let mut seen = Vec::new();
        for (keep, before) in mask.key.unwrap_or_default().chunks_exact(new).zip(before) {
            seen.extend(keep.iter().scan(*before, |seen, keep| {
                *seen += usize::from(*keep);
                Some(*seen)
            }));
        }
        Self {
            q: clean(inputs.q, mask.query, token.head_dim),
            k: clean(inputs.k.unwrap_or(inputs.q), mask.key, token.head_dim),
            v: clean(inputs.v, mask.key, token.value_dim),
            extras: inputs.extras,
            mask,
            new,
            seen,
            before: before.to_vec(),
        }
    }

    /// Unmasked keys of a sequence up to one of the tokens.
    pub fn seen(&self, sequence: usize, n: usize) -> usize {
        self.seen.get(sequence * self.new + n).copied().unwrap_or(self.before[sequence] + n + 1)
    }

    pub fn keeps_key(&self, sequence: usize, n: usize) -> bool {
        self.mask.key.is_none_or(|keep| keep[sequence * self.new + n])
    }

    pub fn keeps_query(&self, sequence: usize, n: usize) -> bool {
        self.mask.query.is_none_or(|keep| keep[sequence * self.new + n])
    }

    pub fn masks_keys(&self) -> bool {
        self.mask.key.is_some_and(|keep| keep.contains(&false))
    }

    /// Whether all that is not masked is a number.
    pub fn is_finite(&self) -> bool {
        [&self.q, &self.k, &self.v].iter().all(|x| x.iter().all(|x| x.is_finite()))
    }
}
