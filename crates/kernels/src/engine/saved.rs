//! What a forward pass saves of its graph, so that the backward pass sums no row again.

use super::{
    graph::Graph,
    normalise::{Weighed, saved_numbers},
};

impl Graph<'_> {
    /// Writes what spares [`Graph::restore`] the sums, [`saved_len`] numbers: by number, slice and token.
    pub fn save(&self, stats: &mut [f32]) {
        let (s, m) = (self.call.shape, &self.m.normalisation);
        if saved_numbers(m)[1] == 0 {
            // A masked query sums nothing.
            stats[..s.slices() * s.seq_q].fill(f32::NEG_INFINITY);
        }
        for (slice, weighed) in self.weighed.iter().enumerate() {
            let Some(weighed) = weighed.get() else { continue };
            let mut rest = &mut *stats;
            for (numbers, (tokens, seq)) in weighed.saved(m).into_iter().zip(self.tokens(slice)) {
                for numbers in numbers {
                    let (part, behind) = std::mem::take(&mut rest).split_at_mut(s.slices() * seq);
                    tokens.iter().zip(numbers).for_each(|(&i, x)| part[slice * seq + i as usize] = x);
                    rest = behind;
                }
            }
        }
    }

    /// Takes the sums from what the same call saved.
    pub fn restore(self, stats: &[f32]) -> Self {
        let (s, m) = (self.call.shape, &self.m.normalisation);
        for (slice, head) in self.heads.iter().enumerate() {
            let (mut rest, mut saved) = (stats, [Vec::new(), Vec::new()]);
            for ((saved, count), (tokens, seq)) in saved.iter_mut().zip(saved_numbers(m)).zip(self.tokens(slice)) {
                for _ in 0..count {
                    let (part, behind) = rest.split_at(s.slices() * seq);
                    saved.push(tokens.iter().map(|&i| part[slice * seq + i as usize]).collect());
                    rest = behind;
                }
            }
            if let Some(weighed) = Weighed::restored(m, head, self.sweep(slice).score.is_log(), saved) {
                // Nobody has asked for them yet.
                let _ = self.weighed[slice].set(weighed);
            }
        }
        self
    }

    /// The positions of a slice's rows and columns, and of how many tokens they are.
    fn tokens(&self, slice: usize) -> [(&[u32], usize); 2] {
        let (s, head) = (self.call.shape, &self.heads[slice]);
        [(&head.queries, s.seq_q), (&head.keys, s.seq_kv)]
    }
}
