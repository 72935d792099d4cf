//! Decoding of `ssa`: a token looks at its own cluster, and at a mean or a few tokens of the others.

use rayon::prelude::*;

use super::{Cache, part};
use crate::{
    Inputs, Mechanism, Shape,
    structure::clustered::{Past, Setting, Token},
};

impl Cache {
    /// Takes the tokens in and writes their rows, where they are asked for, one after the other.
    pub(super) fn attend_clusters(&mut self, inputs: &Inputs<'_, f32>, new: usize, out: Option<&mut [f32]>) {
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        let (Mechanism::Ssa(m), Some(k)) = (&self.mechanism, inputs.k) else { unreachable!("`ssa` is never tied") };
        let (level, span) = (self.level, self.capacity);
        let at = Setting { m, level, span };
        let codebook =
            |h: usize| inputs.extras.codebook.map(|book| part(book, h * book.len() / heads, book.len() / heads));
        if self.clusters.is_empty() {
            let past = |slice: usize| {
                let (b, h) = (slice / heads, slice % heads);
                Past::new(&at, [b as u64, h as u64], codebook(h), [head_dim, value_dim])
            };
            self.clusters = (0..self.token.slices()).map(past).collect();
        }
        let mut rows: Vec<Option<&mut [f32]>> = match out {
            Some(out) => out.chunks_exact_mut(new * value_dim).map(Some).collect(),
            None => self.clusters.iter().map(|_| None).collect(),
        };
        let sums = self.sums.par_chunks_exact_mut(1 + value_dim);
        let slices = self.clusters.par_iter_mut().zip(&mut rows).zip(sums).enumerate();
        slices.for_each(|(slice, ((past, out), sums))| {
            let kv = slice / self.sharing;
            for n in 0..new {
                let q = part(inputs.q, (slice * new + n) * head_dim, head_dim);
                let (k, v) = (
                    part(k, (kv * new + n) * head_dim, head_dim),
                    part(inputs.v, (kv * new + n) * value_dim, value_dim),
                );
                let own = past.push(&at, Token { q, k, v });
                if let Some(out) = out {
                    let factor = past.row(&at, own, q, &mut sums[1..]);
                    let row = out[n * value_dim..].iter_mut().zip(&sums[1..]);
                    row.for_each(|(out, sum)| *out = (factor * sum) as f32);
                }
            }
        });
    }
}
