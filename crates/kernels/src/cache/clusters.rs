//! Decoding of `ssa`: a token looks at its own cluster, and at a mean or a few tokens of the others.

use super::{Cache, Tokens, part};
use crate::{
    Shape,
    mechanism::Form,
    structure::clustered::{Past, Setting, Token},
};

impl Cache {
    /// Takes the tokens in and writes their rows, where they are asked for, one after the other.
    pub(super) fn attend_clusters(&mut self, tokens: &Tokens<'_>, out: Option<&mut [f32]>) {
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        let Form::Ssa(m) = &self.form else { return };
        let (level, span) = (self.level, self.capacity);
        let at = Setting { m, level, span };
        let codebook =
            |h: usize| tokens.extras.codebook.map(|book| part(book, h * book.len() / heads, book.len() / heads));
        if self.clusters.is_empty() {
            let past = |slice: usize| {
                let (b, h) = (slice / heads, slice % heads);
                Past::new(&at, [b as u64, h as u64], codebook(h), [head_dim, value_dim])
            };
            self.clusters = (0..self.token.slices()).map(past).collect();
        }
        let (sharing, new) = (self.sharing, tokens.new);
        Self::go_on((&mut self.clusters, &mut self.sums), (tokens, heads), out, |past, [slice, n], sum| {
            let (row, key) = (slice * new + n, slice / sharing * new + n);
            let q = part(&tokens.q, row * head_dim, head_dim);
            let (k, v) = (part(&tokens.k, key * head_dim, head_dim), part(&tokens.v, key * value_dim, value_dim));
            let own = past.push(&at, Token { q, k, v });
            sum.map_or(0.0, |sum| past.row(&at, own, q, sum))
        });
    }
}
